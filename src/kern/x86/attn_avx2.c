/* kern/x86/attn_avx2.c - the kernels of attention in AVX2 and FMA: f32 products for every row format. */
#define SIMD_LANES 8
#include "kern/x86/simd.h"

#define ATTN_BF16 0
#include "kern/x86/attn_node.h"

const attn_isa attn_isa_avx2 = ATTN_ISA_TABLE;
