/* kern/x86/attn_avx512.c - the kernels of attention in AVX-512: f32 products for every row format.
 * With SIMD_EMULATE, for tests, they are named attn_isa_avx512_emulated. */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#define ATTN_BF16 0
#include "kern/x86/attn_node.h"

#ifdef SIMD_EMULATE
extern const attn_isa attn_isa_avx512_emulated;
const attn_isa attn_isa_avx512_emulated = ATTN_ISA_TABLE;
#else
const attn_isa attn_isa_avx512 = ATTN_ISA_TABLE;
#endif
