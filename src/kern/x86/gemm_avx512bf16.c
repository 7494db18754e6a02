/* x86/gemm_avx512bf16.c - products with a weight matrix for AVX-512 with products of bf16 pairs;
 * f32 weights through FMA. Subnormal bf16 values count as 0 (simd.h). Codes go through byte lookups
 * where the processor has them, with the same bits.
 */
#define SIMD_LANES 16
#define GEMM_DOT   1
#include "base/cpu.h"
#include "kern/x86/gemm_codes.h"
#include "kern/x86/gemm_loops.h"

#define ISA_WITH(how, rows, dot)                                                                   \
    {                                                                                              \
        .n_out = NR, .block_f32 = 1024, .block_bf16 = 2048, .panel_out = 64, .panel_row = 96,      \
        .tile_row = MR, .dot_f32 = dot_f32, .dot_bf16 = dot_bf16, .codes = how, .codes_row = rows, \
        .dot_codes = dot,                                                                          \
    }

static const gemm_isa g_isa = ISA_WITH(&g_codes, 0, NULL);
static const gemm_isa g_isa_vbmi = ISA_WITH(&gemm_codes_vbmi, 8, gemm_dot_codes_vbmi);

static void gemm_simd(const gemm_args *a, dev_queue *q)
{
    gemm_run(&g_isa, a, q);
}

static size_t gemm_scratch_simd(const gemm_args *a, const dev_queue *q)
{
    return gemm_scratch_run(&g_isa, a, q);
}

static void gemm_vbmi(const gemm_args *a, dev_queue *q)
{
    gemm_run(&g_isa_vbmi, a, q);
}

static size_t gemm_scratch_vbmi(const gemm_args *a, const dev_queue *q)
{
    return gemm_scratch_run(&g_isa_vbmi, a, q);
}

void GEMM_X86_AVX512BF16(gemm_apply)(kern_table *t)
{
    t->gemm = gemm_simd;
    t->gemm_scratch = gemm_scratch_simd;
#ifndef SIMD_EMULATE
    if (cpu_has(cpu_features(), CPU_AVX512VBMI)) {
        gemm_apply_vbmi(t);
    }
#endif
}

void GEMM_X86_VBMI(gemm_apply)(kern_table *t)
{
    t->gemm = gemm_vbmi;
    t->gemm_scratch = gemm_scratch_vbmi;
}
