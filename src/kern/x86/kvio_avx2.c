/* x86/kvio_avx2.c - cache writers, gather and query quantisation for AVX2. */
#define SIMD_LANES 8
#include "kern/x86/kvio_loops.h"

void kv_write_apply_avx2(kern_table *t)
{
    t->kv_write = kv_write_simd;
}

void index_write_apply_avx2(kern_table *t)
{
    t->index_write = index_write_simd;
}

void gather_apply_avx2(kern_table *t)
{
    t->gather = gather_simd;
}

void index_quant_apply_avx2(kern_table *t)
{
    t->index_quant = index_quant_simd;
}
