/* kern/cuda/attn_dense_round.h - rows of FP8 codes and one scale in fp16: factors by which a few operations on a code
 * give what every reader of the format gives, code x k_scale rounded to bf16.
 *
 * With k_scale = m unit, m in [8, 16) and unit a power of two, fp16 holds every bf16(code x m): 8 bits, no less than
 * 2^-6. What has to be made is the rounding to 8 bits where fp16 rounds to 11. For a code h,
 *     t = h hi + (h lo)     hi + lo = m + back, about 8 m
 *     value = t - h back
 * t has 3 bits before the first of h m, so it is rounded at the 8th bit of h m; that asks for back of few bits, so that
 * h back is a multiple of that bit and the difference exact, and for t to pass a power of two where h m does. Such a
 * back (about 7 m) is there for nearly every scale, and whether it is one is tried with all codes: h lo keeps few bits where h
 * is small, so a code x m close to halfway may fall to the wrong side (m as large as t allows makes that seldom).
 *
 * Read by nvcc, and by the C compiler for tests.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_ROUND_H
#define KVS_KERN_CUDA_ATTN_DENSE_ROUND_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "num/fmt.h"

typedef struct dense_round {
    uint16_t hi, lo, back; /* fp16                                  */
    bool plain;            /* m = 8: the values are the codes       */
    float unit;            /* what values are to be multiplied by   */
} dense_round;

/* x rounded to fp16, nearest even; below the overflow. */
static inline double dense_half(double x)
{
    if (fabs(x) < 0x1p-14) {
        return rint(x * 0x1p24) * 0x1p-24;
    }
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    u += ((uint64_t)1 << 41) - 1 + (u >> 42 & 1);
    u &= ~(((uint64_t)1 << 42) - 1);
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Bits of a value of fp16. */
static inline uint16_t dense_half_bits(double x)
{
    const uint16_t sign = signbit(x) ? 0x8000u : 0;
    const double a = fabs(x);
    if (a < 0x1p-14) {
        return (uint16_t)(sign | (uint16_t)(a * 0x1p24));
    }
    uint64_t u;
    memcpy(&u, &a, sizeof u);
    return (uint16_t)(sign | (uint16_t)((u >> 42) - ((uint64_t)(1023 - 15) << 10)));
}

static inline bool dense_round_holds(float k_scale, double unit, double hi, double lo, double back)
{
    for (int code = 1; code < 0x7F; code++) {
        const double h = e4m3_to_f32((uint8_t)code);
        const double t = dense_half(h * hi + dense_half(h * lo));
        if (dense_half(t - h * back) * unit != bf16_round(e4m3_dequant((uint8_t)code, k_scale))) {
            return false;
        }
    }
    return true;
}

/* The factors for a scale; false where there are none. */
static inline bool dense_round_find(float k_scale, dense_round *r)
{
    if (!f32_is_finite(k_scale) || !(k_scale >= 0x1p-100f) || !(k_scale <= 0x1p100f)) {
        return false;
    }
    int e;
    const double m = 16.0 * frexp(k_scale, &e);
    r->unit = ldexpf(1.0f, e - 4);
    r->plain = m == 8.0;
    for (int i = 0; i < 8; i++) { /* 7 m in steps of two: nearest first, then up and down in turn */
        const double back = 2.0 * (floor(3.5 * m) + (i % 2 == 0 ? -(i / 2) : i / 2 + 1));
        const double hi = dense_half(m + back), lo = dense_half(m + back - hi);
        if (dense_round_holds(k_scale, r->unit, hi, lo, back)) {
            r->hi = dense_half_bits(hi);
            r->lo = dense_half_bits(lo);
            r->back = dense_half_bits(back);
            r->unit = r->plain ? k_scale : r->unit;
            return true;
        }
    }
    return false;
}

#endif
