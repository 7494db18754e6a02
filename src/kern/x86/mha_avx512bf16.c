/* kern/x86/mha_avx512bf16.c - the kernels of multi-head attention in AVX-512 BF16: products of bf16 pairs.
 * With SIMD_EMULATE, for tests, they are named mha_isa_avx512bf16_emulated. */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#define ATTN_BF16 1
#include "kern/x86/mha_tile.h"

#ifdef SIMD_EMULATE
extern const mha_isa mha_isa_avx512bf16_emulated;
const mha_isa mha_isa_avx512bf16_emulated = MHA_ISA_TABLE;
#else
const mha_isa mha_isa_avx512bf16 = MHA_ISA_TABLE;
#endif
