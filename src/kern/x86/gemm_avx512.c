/* x86/gemm_avx512.c - products with a weight matrix for AVX-512: everything in f32. */
#define SIMD_LANES 16
#define GEMM_DOT   0
#include "kern/x86/gemm_loops.h"

static const gemm_isa g_isa = {
    .n_out = NR,
    .block_f32 = 1024,
    .block_bf16 = 1024,
    .few = 8,
    .panel_out = 48,
    .panel_row = 48,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
    .tile_row = MR,
    WIDENED_PANELS,
    .codes = &g_codes,
};

static void gemm_simd(const gemm_args *a, dev_queue *q)
{
    gemm_run(&g_isa, a, q);
}

static size_t gemm_scratch_simd(const gemm_args *a, const dev_queue *q)
{
    return gemm_scratch_run(&g_isa, a, q);
}

void GEMM_X86_AVX512(gemm_apply)(kern_table *t)
{
    t->gemm = gemm_simd;
    t->gemm_scratch = gemm_scratch_simd;
}
