/* x86/gemm_avx2.c - products with a weight matrix for AVX2 and FMA: everything in f32. */
#define SIMD_LANES 8
#define GEMM_DOT   0
#include "kern/x86/gemm_loops.h"

static const gemm_isa g_isa = {
    .n_out = NR,
    .block_f32 = 512,
    .block_bf16 = 512,
    .few = 8,
    .panel_out = 96,
    .panel_row = 66,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
    .tile_row = MR,
    WIDENED_PANELS,
    .codes = &g_codes,
};

static void gemm_avx2(const gemm_args *a, dev_queue *q)
{
    gemm_run(&g_isa, a, q);
}

static size_t gemm_scratch_avx2(const gemm_args *a, const dev_queue *q)
{
    return gemm_scratch_run(&g_isa, a, q);
}

void gemm_apply_avx2(kern_table *t)
{
    t->gemm = gemm_avx2;
    t->gemm_scratch = gemm_scratch_avx2;
}
