/* kern/x86/attn_avx512bf16.c - the kernels of attention in AVX-512 BF16: products of bf16 pairs, for rows
 * of bf16 and e4m3. With SIMD_EMULATE, for tests, they are named attn_isa_avx512bf16_emulated. */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#define ATTN_BF16 1
#include "kern/x86/attn_node.h"

#ifdef SIMD_EMULATE
extern const attn_isa attn_isa_avx512bf16_emulated;
const attn_isa attn_isa_avx512bf16_emulated = ATTN_ISA_TABLE;
#else
const attn_isa attn_isa_avx512bf16 = ATTN_ISA_TABLE;
#endif
