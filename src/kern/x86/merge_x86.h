/* kern/x86/merge_x86.h - the variants of merge and quant_q for x86. */
#ifndef KERN_X86_MERGE_X86_H
#define KERN_X86_MERGE_X86_H

#include "kern/kern.h"

void merge_apply_avx2(kern_table *t);
void merge_apply_avx512(kern_table *t);
void quant_q_apply_avx2(kern_table *t);
void quant_q_apply_avx512(kern_table *t);

#endif
