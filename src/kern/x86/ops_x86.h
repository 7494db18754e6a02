/* kern/x86/ops_x86.h - the variants of norm, rope, act and route for x86. */
#ifndef KERN_X86_OPS_X86_H
#define KERN_X86_OPS_X86_H

#include "kern/kern.h"

void norm_apply_avx2(kern_table *t);
void norm_apply_avx512(kern_table *t);
void rope_apply_avx2(kern_table *t);
void rope_apply_avx512(kern_table *t);
void act_apply_avx2(kern_table *t);
void act_apply_avx512(kern_table *t);
void route_apply_avx2(kern_table *t);
void route_apply_avx512(kern_table *t);

#endif
