/* kern/x86/mha_avx2.c - the kernels of multi-head attention in AVX2 and FMA: f32 products for every operand type. */
#define SIMD_LANES 8
#include "kern/x86/simd.h"

#define ATTN_BF16 0
#include "kern/x86/mha_tile.h"

const mha_isa mha_isa_avx2 = MHA_ISA_TABLE;
