/* num/fmt.h - the number formats of the cache and the one way each is converted.
 *
 * bf16, e4m3 (E4M3FN: bias 7, largest 448, NaN 0x7F and 0xFF, no infinity) and ue8m0 (a power of
 * two in a byte), the scales a quantiser derives from amax, and quantise / dequantise of one value.
 * All rounding is to nearest, ties to even. ceil(log2(x)) is taken from the exponent bits, so no
 * result depends on libm. A SIMD or CUDA form of any of these must give the same bits for every
 * input, NaN payloads included.
 *
 * Not here: how values lie in a row or a page (num/kvfmt.h).
 *
 * Read by the C compiler, the C++ compiler and nvcc.
 */
#ifndef KVS_NUM_FMT_H
#define KVS_NUM_FMT_H

#include <float.h>
#include <stdint.h>
#include <string.h>
#include "kvspan/config.h"

#ifdef __CUDACC__
#define FMT_FN static __host__ __device__ inline
#else
#define FMT_FN static inline
#endif

#define E4M3_MAX          448.0f /* 0x7E: what values saturate to                                */
#define E4M3_SAT          464.0f /* halfway to what the next code would be: above it, a loss     */
#define SCALE_POW2_FLOOR  1e-4f  /* on amax / 448: rows and queries                              */
#define SCALE_INDEX_FLOOR 1e-4f  /* on amax: index keys and index queries                        */

/* A struct, so that bf16 bits are never mistaken for an integer or an f16. */
typedef struct bf16 {
    uint16_t bits;
} bf16;

FMT_FN uint32_t f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FMT_FN float f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

FMT_FN int f32_is_nan(float x)
{
    return (f32_bits(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

FMT_FN int f32_is_finite(float x)
{
    return (f32_bits(x) & 0x7FFFFFFFu) < 0x7F800000u;
}

/* Exact. */
FMT_FN float bf16_to_f32(bf16 b)
{
    return f32_from_bits((uint32_t)b.bits << 16);
}

/* Nearest even; overflow gives infinity; a NaN keeps sign and upper payload and becomes quiet. */
FMT_FN bf16 bf16_from_f32(float x)
{
    const uint32_t u = f32_bits(x);
    bf16 b;
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        b.bits = (uint16_t)((u >> 16) | 0x0040u);
    } else {
        b.bits = (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    }
    return b;
}

/* x rounded to a value of bf16. */
FMT_FN float bf16_round(float x)
{
    return bf16_to_f32(bf16_from_f32(x));
}

/* Exact. 0x7F and 0xFF give the quiet NaN of that sign (0x7FC00000, 0xFFC00000). */
FMT_FN float e4m3_to_f32(uint8_t c)
{
    const uint32_t sign = (uint32_t)(c & 0x80u) << 24;
    const uint32_t mag = c & 0x7Fu;
    if (mag == 0x7Fu) {
        return f32_from_bits(sign | 0x7FC00000u);
    }
    if (mag < 8u) { /* subnormal: multiples of 2^-9; the sign comes last so that -0 stays */
        return f32_from_bits(f32_bits((float)mag * 0x1p-9f) | sign);
    }
    return f32_from_bits(sign | ((mag << 20) + (120u << 23)));
}

/* Nearest even, saturating to +-448 (infinity too); NaN becomes 0x7F or 0xFF by its sign. */
FMT_FN uint8_t e4m3_from_f32(float x)
{
    const uint32_t u = f32_bits(x);
    const uint32_t sign = (u >> 24) & 0x80u;
    const uint32_t mag = u & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) {
        return (uint8_t)(sign | 0x7Fu);
    }
    if (mag >= 0x43E00000u) { /* 448 */
        return (uint8_t)(sign | 0x7Eu);
    }
    if (mag < 0x3C800000u) { /* 2^-6: adding 2^14 rounds to multiples of 2^-9, 8 being normal */
        const uint32_t r = f32_bits(f32_from_bits(mag) + 16384.0f) - 0x46800000u;
        return (uint8_t)(sign | r);
    }
    return (uint8_t)(sign | (((mag + 0x7FFFFu + ((mag >> 20) & 1u)) >> 20) - (120u << 3)));
}

/* Whether quantising x loses magnitude to saturation, beyond rounding: |x| > 464, infinity too. */
FMT_FN int e4m3_saturates(float x)
{
    const uint32_t mag = f32_bits(x) & 0x7FFFFFFFu;
    return mag > 0x43E80000u && mag <= 0x7F800000u;
}

/* The smallest power of two >= x and >= FLT_MIN: 2^ceil(log2(x)). For x <= 2^127, 0 included. */
FMT_FN float pow2_ceil(float x)
{
    const uint32_t u = f32_bits(x);
    if (!(x > FLT_MIN)) {
        return FLT_MIN;
    }
    return f32_from_bits((u + 0x7FFFFFu) & 0x7F800000u);
}

/* 2^(c - 127), exact (c = 0 is a subnormal f32); 0xFF is NaN. */
FMT_FN float ue8m0_to_f32(uint8_t c)
{
    if (c == 0xFFu) {
        return f32_from_bits(0x7FC00000u);
    }
    return f32_from_bits(c == 0 ? 0x00400000u : (uint32_t)c << 23);
}

/* The code of the smallest power of two >= x. At most 0xFE, 2^127 (infinity too); 0 for x <=
 * 2^-127, zero and negative ones included; NaN gives 0xFF. */
FMT_FN uint8_t ue8m0_from_f32(float x)
{
    const uint32_t u = f32_bits(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0xFFu;
    }
    if ((u & 0x80000000u) != 0 || u <= 0x00400000u) {
        return 0;
    }
    const uint32_t e = (u + 0x7FFFFFu) >> 23;
    return (uint8_t)(e < 0xFEu ? e : 0xFEu);
}

/* max(amax, |x|) where x is finite, else amax: NaN and infinity do not enter a scale. */
FMT_FN float amax_add(float amax, float x)
{
    const uint32_t mag = f32_bits(x) & 0x7FFFFFFFu;
    return mag < 0x7F800000u && mag > f32_bits(amax) ? f32_from_bits(mag) : amax;
}

/* Largest finite magnitude of n values; 0 where there is none. */
FMT_FN float amax_f32(const float *x, int32_t n)
{
    float amax = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        amax = amax_add(amax, x[i]);
    }
    return amax;
}

FMT_FN float amax_bf16(const bf16 *x, int32_t n)
{
    float amax = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        amax = amax_add(amax, bf16_to_f32(x[i]));
    }
    return amax;
}

/* 2^ceil(log2(max(amax / 448, 1e-4))), the quotient rounded to f32; at least 2^-13. amax is finite
 * and >= 0 here and below. */
FMT_FN float scale_pow2(float amax)
{
    const float s = amax / E4M3_MAX;
    return pow2_ceil(s > SCALE_POW2_FLOOR ? s : SCALE_POW2_FLOOR);
}

/* max(amax / 448, FLT_MIN): any f32. */
FMT_FN float scale_exact(float amax)
{
    const float s = amax / E4M3_MAX;
    return s > FLT_MIN ? s : FLT_MIN;
}

/* By kvs_scale_rule; KVS_SCALE_AUTO is pow2. */
FMT_FN float scale_for(int32_t rule, float amax)
{
    return rule == KVS_SCALE_EXACT ? scale_exact(amax) : scale_pow2(amax);
}

/* Index keys and index queries: 2^ceil(log2(max(amax, 1e-4) / 448)). At least 2^-22. */
FMT_FN float scale_index(float amax)
{
    return pow2_ceil((amax > SCALE_INDEX_FLOOR ? amax : SCALE_INDEX_FLOOR) / E4M3_MAX);
}

/* A true division, never a product with 1 / s. */
FMT_FN uint8_t e4m3_quant(float x, float s)
{
    return e4m3_from_f32(x / s);
}

/* What attention reads: the f32 product, rounded to bf16. Exact where s is a power of two (unless
 * the product overflows or is subnormal). */
FMT_FN float e4m3_dequant(uint8_t c, float s)
{
    return bf16_round(e4m3_to_f32(c) * s);
}

#endif
