/* oracle.h: the number formats told from their definition, in double, by search.
 *
 * Every finite value of bf16 and e4m3, every f32, every product of an e4m3 value and an f32 scale,
 * and every midpoint of two neighbours is exact in double. */
#ifndef ORACLE_H
#define ORACLE_H

#include <math.h>
#include <stdint.h>

/* Sign, exponent and mantissa put together; code is not a NaN. */
static inline double oracle_e4m3_value(int code)
{
    const int e = (code >> 3) & 15;
    const int m = code & 7;
    const double v = e == 0 ? ldexp(m, 1 - 7 - 3) : ldexp(8 + m, e - 7 - 3);
    return (code & 0x80) != 0 ? -v : v;
}

/* The code nearest to x among all 127 finite magnitudes, the even one of two; x is not NaN. */
static inline int oracle_e4m3_nearest(double x)
{
    const int sign = signbit(x) ? 0x80 : 0;
    const double a = fabs(x);
    int best = 0;
    if (isinf(x)) {
        return sign | 0x7E;
    }
    for (int c = 1; c <= 0x7E; c++) {
        const double d = fabs(a - oracle_e4m3_value(c));
        const double d_best = fabs(a - oracle_e4m3_value(best));
        if (d < d_best || (d == d_best && c % 2 == 0)) {
            best = c;
        }
    }
    return sign | best;
}

/* The distance between neighbours around the value of a code. */
static inline double oracle_e4m3_step(int code)
{
    const int e = (code >> 3) & 15;
    return ldexp(1.0, (e == 0 ? 1 : e) - 7 - 3);
}

/* 0x7F80, infinity, counts as 2^128: the value after the largest, which is what rounding sees. */
static inline double oracle_bf16_value(int code)
{
    const int e = (code >> 7) & 255;
    const int m = code & 127;
    const double v = e == 0 ? ldexp(m, 1 - 127 - 7) : ldexp(128 + m, e - 127 - 7);
    return (code & 0x8000) != 0 ? -v : v;
}

/* Nearest bf16 code by bisection over the magnitudes; x is not NaN. */
static inline int oracle_bf16_nearest(double x)
{
    const int sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs(x);
    int lo = 0;
    int hi = 0x7F80;
    if (a >= oracle_bf16_value(hi)) {
        return sign | hi;
    }
    while (hi - lo > 1) { /* value(lo) <= a < value(hi) */
        const int mid = (lo + hi) / 2;
        if (oracle_bf16_value(mid) <= a) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    const double below = a - oracle_bf16_value(lo);
    const double above = oracle_bf16_value(hi) - a;
    const int up = above < below || (above == below && hi % 2 == 0);
    return sign | (up ? hi : lo);
}

/* 2^ceil(log2(x)) for x > 0. */
static inline double oracle_pow2_ceil(double x)
{
    int e = 0;
    const double m = frexp(x, &e); /* x = m * 2^e, m in [0.5, 1) */
    return ldexp(1.0, m == 0.5 ? e - 1 : e);
}

/* The scale of a row's tile, or with index != 0 of an index key, from its largest finite magnitude.
 * Quotients are rounded to f32, which double followed by f32 does exactly. */
static inline float oracle_scale(int exact, int index, double amax)
{
    if (index) {
        const double floored = amax > (double)1e-4f ? amax : (double)1e-4f;
        return (float)oracle_pow2_ceil((double)(float)(floored / 448.0));
    }
    const double s = (double)(float)(amax / 448.0);
    if (exact) {
        const double least = ldexp(1.0, -126);
        return (float)(s > least ? s : least);
    }
    return (float)oracle_pow2_ceil(s > (double)1e-4f ? s : (double)1e-4f);
}

#endif
