/* x86/kvio_avx512.c - cache writers, gather and query quantisation for AVX-512. */
#define SIMD_LANES 16
#include "kern/x86/kvio_loops.h"

void INDEX_X86_AVX512(kv_write_apply)(kern_table *t)
{
    t->kv_write = kv_write_simd;
}

void INDEX_X86_AVX512(index_write_apply)(kern_table *t)
{
    t->index_write = index_write_simd;
}

void INDEX_X86_AVX512(gather_apply)(kern_table *t)
{
    t->gather = gather_simd;
}

void INDEX_X86_AVX512(index_quant_apply)(kern_table *t)
{
    t->index_quant = index_quant_simd;
}
