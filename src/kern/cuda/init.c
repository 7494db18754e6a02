/* init.c - the list of CUDA variants. One line per kernel; a kernel that is not listed does not exist.
 *
 * sm90 is the name of a kernel for Hopper. Its last fields say what it promises less than the contract
 * (KERN_FREE_ORDER), which args it takes, and how far its sums may lie from ones that round to nearest.
 *
 * Tensor cores add the 16 products of a bf16 or fp16 step to the accumulator as one sum of 17 addends: each
 * is aligned to the largest and cut two bits below its last place (at most 2^-25 of the largest), and the
 * sum is cut to f32 (at most 2^-23 of it). With partial sums that grow evenly that is, of 36 steps over 576
 * values, (17/2 + 2) 36 / 2 = 189 units of 2^-24 of the largest partial sum, which the product of the norms
 * bounds; over n keys in steps of 16 it is (17/2 + 2) / 32 n, about n / 3. */
#include "kern/cuda/cuda.h"

#define SM90_APPLY(op)                                                                                  \
    static void apply_##op(kern_table *t)                                                               \
    {                                                                                                   \
        t->op = op##_sm90;                                                                              \
    }
SM90_APPLY(merge)
SM90_APPLY(quant_q)
SM90_APPLY(index_quant)
SM90_APPLY(kv_write)
SM90_APPLY(index_write)
SM90_APPLY(gather)

/* Kernels that give the reference's bits. */
#define SM90_EXACT(op) {KERN_OP_##op, "sm90", 0, apply_##op, KERN_CUDA, 0, op##_refuses_sm90, 0, 0}

static const kern_variant g_variants[] = {
    SM90_EXACT(merge),    SM90_EXACT(quant_q),     SM90_EXACT(index_quant),
    SM90_EXACT(kv_write), SM90_EXACT(index_write), SM90_EXACT(gather),
};

const kern_variant *cuda_variants(int32_t *n)
{
    *n = sizeof g_variants / sizeof *g_variants;
    return g_variants;
}
