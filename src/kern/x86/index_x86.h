/* x86/index_x86.h - the x86 variants of the index and cache ops: one apply function each, for kern.c.
 *
 * With SIMD_EMULATE the AVX-512 and AMX files compile under names of their own, for tests.
 */
#ifndef KVS_KERN_X86_INDEX_X86_H
#define KVS_KERN_X86_INDEX_X86_H

#include "kern/kern.h"

#ifdef SIMD_EMULATE
#define INDEX_X86_AVX512(name) name##_emulate
#define INDEX_X86_AMX(name)    name##_emulate_amx
#else
#define INDEX_X86_AVX512(name) name##_avx512
#define INDEX_X86_AMX(name)    name##_amx
#endif

void topk_apply_avx2(kern_table *t);
void topk_merge_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(topk_apply)(kern_table *t);
void INDEX_X86_AVX512(topk_merge_apply)(kern_table *t);
void index_score_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(index_score_apply)(kern_table *t); /* with BF16 */
void INDEX_X86_AMX(index_score_apply)(kern_table *t);
void kv_write_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(kv_write_apply)(kern_table *t);
void index_write_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(index_write_apply)(kern_table *t);
void gather_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(gather_apply)(kern_table *t);
void index_quant_apply_avx2(kern_table *t);
void INDEX_X86_AVX512(index_quant_apply)(kern_table *t);
void localise_apply_avx2(kern_table *t);

#endif
