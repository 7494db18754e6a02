/* init.c - the list of CUDA variants. One line per kernel; a kernel that is not listed does not exist.
 *
 * sm90 is the name of a kernel for Hopper. Its last two fields say what it promises less than the contract
 * (KERN_FREE_ORDER) and which args it takes. */
#include "kern/cuda/cuda.h"

static void apply_merge(kern_table *t)
{
    t->merge = merge_sm90;
}

static const kern_variant g_variants[] = {
    {KERN_OP_merge, "sm90", 0, apply_merge, KERN_CUDA, 0, merge_refuses_sm90},
};

const kern_variant *cuda_variants(int32_t *n)
{
    *n = sizeof g_variants / sizeof *g_variants;
    return g_variants;
}
