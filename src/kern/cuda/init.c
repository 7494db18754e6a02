/* init.c - the list of CUDA variants. One line per kernel; a kernel that is not listed does not exist.
 *
 * sm90 is the name of a kernel for Hopper. Its last fields say what it promises less than the contract
 * (KERN_FREE_ORDER), which args it takes, and how far its sums may lie from ones that round to nearest.
 *
 * Tensor cores add the 16 products of a bf16 or fp16 step to the accumulator as one sum of 17 addends: each
 * is aligned to the largest and cut two bits below its last place (at most 2^-25 of the largest), and the
 * sum is cut to f32 (at most 2^-23 of it). With partial sums that grow evenly that is, of 36 steps over 576
 * values, (17/2 + 2) 36 / 2 = 189 units of 2^-24 of the largest partial sum, which the product of the norms
 * bounds; over n keys in steps of 16 it is (17/2 + 2) / 32 n, about n / 3. A score of mha has up to 16 steps
 * (192 dims and the rope part): 84. A product over n_in is a sum like one over keys.
 *
 * Values of fp8_ds_mla rows are fp16 in the sparse kernels, multiples of 2^-24: what a tile's scale makes smaller
 * than 2^-14 loses bits. */
#include "kern/cuda/cuda.h"

/* FP8 products keep about 13 bits behind the largest of 32 products and the accumulator, cutting the rest, and are
 * rounded to bf16 before they are weighed: docs/kernels-hopper.md, "Index and selection". */
#define INDEX_DOT_U 46341.0f

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

/* With the scratch that the op asks for. */
#define SM90_APPLY_SCRATCH(op)                                                                          \
    static void apply_##op(kern_table *t)                                                               \
    {                                                                                                   \
        t->op = op##_sm90;                                                                              \
        t->op##_scratch = op##_scratch_sm90;                                                            \
    }
SM90_APPLY_SCRATCH(index_score)
SM90_APPLY_SCRATCH(index_select)
SM90_APPLY_SCRATCH(topk)
SM90_APPLY_SCRATCH(topk_merge)
SM90_APPLY_SCRATCH(localise)
SM90_APPLY_SCRATCH(mha)
SM90_APPLY_SCRATCH(gemm)
static void apply_attn(kern_table *t)
{
    t->attn = attn_sm90;
    t->attn_scratch = attn_scratch_sm90;
}

static void apply_attn_det(kern_table *t)
{
    t->attn = attn_sm90_det;
    t->attn_scratch = attn_scratch_sm90_det;
}

/* Kernels that give the reference's bits. */
#define SM90_EXACT(op) {KERN_OP_##op, "sm90", 0, apply_##op, KERN_CUDA, 0, op##_refuses_sm90, 0, 0, 0}

static const kern_variant g_variants[] = {
    /* the last of an op is the one in use unless another is asked for */
    {KERN_OP_attn, "sm90_det", 0, apply_attn_det, KERN_CUDA, 0, attn_det_refuses_sm90, 189, 0.34f, 0x1p-24f},
    {KERN_OP_attn, "sm90", 0, apply_attn, KERN_CUDA, KERN_FREE_ORDER, attn_refuses_sm90, 189, 0.34f, 0x1p-24f},
    {KERN_OP_mha, "sm90", 0, apply_mha, KERN_CUDA, 0, mha_refuses_sm90, 84, 0.34f, 0},
    {KERN_OP_gemm, "sm90", 0, apply_gemm, KERN_CUDA, 0, gemm_refuses_sm90, 0, 0.34f, 0},
    SM90_EXACT(merge),    SM90_EXACT(quant_q),     SM90_EXACT(index_quant),
    SM90_EXACT(kv_write), SM90_EXACT(index_write), SM90_EXACT(gather),
    SM90_EXACT(topk_merge), SM90_EXACT(topk),     SM90_EXACT(localise),
    {KERN_OP_index_score, "sm90", 0, apply_index_score, KERN_CUDA, 0, index_score_refuses_sm90, INDEX_DOT_U, 0, 0},
    {KERN_OP_index_select, "sm90", 0, apply_index_select, KERN_CUDA, 0, index_select_refuses_sm90, INDEX_DOT_U, 0, 0},
};

const kern_variant *cuda_variants(int32_t *n)
{
    *n = sizeof g_variants / sizeof *g_variants;
    return g_variants;
}
