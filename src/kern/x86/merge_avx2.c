/* kern/x86/merge_avx2.c - merge and quant_q in AVX2 and FMA. */
#define SIMD_LANES 8
#include "kern/x86/simd.h"

#include "kern/x86/merge_impl.h"
#include "kern/x86/merge_x86.h"
#include "kern/x86/quant_impl.h"

void merge_apply_avx2(kern_table *t)
{
    t->merge = merge_run;
}

void quant_q_apply_avx2(kern_table *t)
{
    t->quant_q = quant_q_run;
}
