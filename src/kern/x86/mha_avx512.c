/* kern/x86/mha_avx512.c - the kernels of multi-head attention in AVX-512: f32 products for every operand type.
 * With SIMD_EMULATE, for tests, they are named mha_isa_avx512_emulated. */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#define ATTN_BF16 0
#include "kern/x86/mha_tile.h"

#ifdef SIMD_EMULATE
extern const mha_isa mha_isa_avx512_emulated;
const mha_isa mha_isa_avx512_emulated = MHA_ISA_TABLE;
#else
const mha_isa mha_isa_avx512 = MHA_ISA_TABLE;
#endif
