/* x86/gemm_codes.h - e4m3 codes to bf16 by looking up each byte of the value, for AVX-512 with VBMI
 * and BF16.
 *
 * The table of a scale holds the 128 magnitudes, NaN included, as 128 low and 128 high bytes: two
 * lookups give 64 values. They are code * scale rounded to bf16 as the processor does, subnormals
 * as 0, which is how the products that follow would read them. Same bits of products as
 * gemm_loops.h.
 */
#ifndef KVS_KERN_X86_GEMM_CODES_H
#define KVS_KERN_X86_GEMM_CODES_H

#include "kern/x86/gemm_x86.h"

#ifdef SIMD_EMULATE
#define gemm_codes_vbmi     gemm_codes_vbmi_emulate
#define gemm_dot_codes_vbmi gemm_dot_codes_vbmi_emulate
#endif

extern const gemm_codes gemm_codes_vbmi;

/* dot_codes of a gemm_isa for up to 8 rows: values go from the lookup to the product in registers,
 * four rows at a time. */
void gemm_dot_codes_vbmi(const gemm_tile *t, const uint8_t *table);

#endif
