/* kern/x86/merge_avx512.c - merge and quant_q in AVX-512. With SIMD_EMULATE, for tests, the functions are
 * named ..._avx512_emulated. */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#include "kern/x86/merge_impl.h"
#include "kern/x86/merge_x86.h"
#include "kern/x86/quant_impl.h"

#ifdef SIMD_EMULATE
#define merge_apply_avx512   merge_apply_avx512_emulated
#define quant_q_apply_avx512 quant_q_apply_avx512_emulated
void merge_apply_avx512_emulated(kern_table *t);
void quant_q_apply_avx512_emulated(kern_table *t);
#endif

void merge_apply_avx512(kern_table *t)
{
    t->merge = merge_run;
}

void quant_q_apply_avx512(kern_table *t)
{
    t->quant_q = quant_q_run;
}
