/* x86/kvio_quant.h - values to e4m3 in the vectors of simd.h: what a stretch of values holds, its scale,
 * its codes.
 *
 * A tile is read twice, the second time from the first-level cache: for the largest magnitude, then to
 * be converted. Infinities and NaN are looked for once per tile; only a tile that holds some, or one
 * that may saturate, takes the careful form of the conversion. Which form a tile takes shows in no bit: a
 * product with the exact reciprocal of a power of two stands for the division, and bf16 by such a scale
 * is converted in 16-bit words, by integers.
 *
 * Included by kvio_loops.h only.
 */
#ifndef KVS_KERN_X86_KVIO_QUANT_H
#define KVS_KERN_X86_KVIO_QUANT_H

#include <stdbool.h>

#include "kern/x86/simd_more.h"
#include "num/kvfmt.h"

enum {
    L = SIMD_LANES,
    F32_INF = 0x7F800000,
    F32_ABS = 0x7FFFFFFF
};

SIMD_FN int64_t in_bytes(const int wide)
{
    return wide ? 4 : 2;
}

/* L values from x on; wide: f32, else bf16. */
SIMD_FN vf in_load(const uint8_t *x, const int wide)
{
    return wide ? vf_loadu((const float *)(const void *)x) : vf_loadu_bf16(x);
}

/* What a stretch of values holds: the largest finite magnitude, NaN, infinities. */
typedef struct scan {
    float amax;
    int64_t n_nan;
    bool special; /* some value is NaN or infinite */
} scan;

SIMD_FN scan scan_careful(const uint8_t *x, const int wide, int32_t n)
{
    vi top = vi_set1(0);
    scan s = {.special = true};
    for (int32_t i = 0; i < n; i += L) {
        const vi mag =
            vi_and(vi_of_vf(in_load(x + i * in_bytes(wide), wide)), vi_set1(F32_ABS));
        const vm finite = vm_lt_i(mag, vi_set1(F32_INF));
        top = vi_max(top, vi_select(finite, mag, vi_set1(0)));
        s.n_nan += __builtin_popcount(vm_bits(vm_lt_i(vi_set1(F32_INF), mag)));
    }
    s.amax = f32_from_bits((uint32_t)vi_max_lane(top));
    return s;
}

/* n a multiple of L. */
SIMD_FN scan scan_values(const uint8_t *x, const int wide, int32_t n)
{
    vi top = vi_set1(0);
    for (int32_t i = 0; i < n; i += L) {
        top = vi_max(top, vi_and(vi_of_vf(in_load(x + i * in_bytes(wide), wide)), vi_set1(F32_ABS)));
    }
    const int32_t max = vi_max_lane(top);
    if (max >= F32_INF) {
        return scan_careful(x, wide, n);
    }
    const scan s = {.amax = f32_from_bits((uint32_t)max)};
    return s;
}

/* Exponent bits of the least scales: scale_pow2 gives 2^-13 or more, scale_index 2^-22 or more. */
enum {
    LEAST_ROW = 127 - 13,
    LEAST_INDEX = 127 - 22
};

/* The exponent bits of the smallest power of two that is 2^(least - 127) or more and not below amax / 448,
 * which is scale_pow2 or scale_index: 448 = 1.75 * 2^8, and rounding takes no quotient across a power. */
SIMD_FN int32_t scale_exponent(uint32_t amax_bits, int32_t least)
{
    const int32_t e = (int32_t)((amax_bits + 0x1FFFFFu) >> 23) - 8;
    return e > least ? e : least;
}

/* Magnitudes of e4m3 codes of finite |v| <= 464. Adding 2^20 times the power of two at or below |v|, or
 * below 2^-6 times that one, rounds to the spacing of the codes there; the low bits of the sum are the
 * code but for an offset that follows from the exponent. */
SIMD_FN vi e4m3_mag(vi mag)
{
    const vi least = vi_set1(0x3C800000); /* 2^-6, the smallest normal value */
    const vi power = vi_and(vi_max(mag, least), vi_set1(F32_INF));
    const vf big = vf_of_vi(vi_add(power, vi_set1(20 << 23)));
    const vi sum = vi_of_vf(vf_add(vf_of_vi(mag), big));
    return vi_add(vi_sub(sum, power), vi_sub(vi_srl(power, 20), vi_set1((20 << 23) + 121 * 8)));
}

typedef struct quant_scale {
    vf by;     /* the scale, or its exact reciprocal */
    bool pow2; /* by is the reciprocal               */
} quant_scale;

static quant_scale quant_scale_of(float s)
{
    const uint32_t u = f32_bits(s);
    const uint32_t e = u >> 23;
    quant_scale q;
    q.pow2 = (u & 0x807FFFFFu) == 0 && e >= 1 && e <= 253;
    q.by = vf_set1(q.pow2 ? f32_from_bits((254u - e) << 23) : s);
    return q;
}

SIMD_FN vf quotient(vf x, const quant_scale *s, const int pow2)
{
    return pow2 ? vf_mul(x, s->by) : vf_div(x, s->by);
}

/* Codes of n values (a multiple of 4 * L) none of which is special or saturates. */
SIMD_FN void quant_plain(const uint8_t *x, const int wide, int32_t n, const quant_scale *s,
                         const int pow2, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += 4 * L) {
        vi mag[4];
        vi bits[4];
        SIMD_UNROLL
        for (int j = 0; j < 4; j++) {
            const vf v = in_load(x + (i + j * L) * in_bytes(wide), wide);
            bits[j] = vi_of_vf(quotient(v, s, pow2));
            mag[j] = e4m3_mag(vi_and(bits[j], vi_set1(F32_ABS)));
        }
        vi_store4_signed_u8(out + i, mag, bits);
    }
}

/* The same for any values; returns how many saturate. */
SIMD_FN int64_t quant_careful(const uint8_t *x, const int wide, int32_t n, const quant_scale *s,
                              const int pow2, uint8_t *out)
{
    int64_t n_sat = 0;
    for (int32_t i = 0; i < n; i += 4 * L) {
        vi mag[4];
        vi bits[4];
        SIMD_UNROLL
        for (int j = 0; j < 4; j++) {
            const vf v = in_load(x + (i + j * L) * in_bytes(wide), wide);
            bits[j] = vi_of_vf(quotient(v, s, pow2));
            const vi m = vi_and(bits[j], vi_set1(F32_ABS));
            const vm nan = vm_lt_i(vi_set1(F32_INF), m);
            const vm high = vm_lt_i(vi_set1(0x43E00000), m); /* 448 */
            const uint32_t lost = vm_bits(vm_lt_i(vi_set1(0x43E80000), m)) & ~vm_bits(nan);
            n_sat += __builtin_popcount(lost);
            const vi code = e4m3_mag(vi_select(high, vi_set1(0x43E00000), m));
            mag[j] = vi_select(nan, vi_set1(0x7F), code);
        }
        vi_store4_signed_u8(out + i, mag, bits);
    }
    return n_sat;
}

SIMD_FN vi vi_set1_word(int32_t x)
{
    return vi_set1((int32_t)(((uint32_t)x & 0xFFFFu) * 0x10001u));
}

/* Codes (0..127) of the bf16 words w, as quant_plain gives them for a power of two. `zero` is the word of
 * exponent 0 of e4m3, so that w - zero is the exponent and seven bits of mantissa of a normal code, of which
 * three bits stay. */
SIMD_FN vi words_normal(vi w, int32_t zero)
{
    const vi mag = vi_and(w, vi_set1(0x7FFF7FFF));
    const vi even = vi_and(vi_srl16(w, 4), vi_set1(0x00010001));
    return vi_srl16(vi_add16(vi_sub16(mag, vi_set1_word(zero - 7)), even), 4);
}

/* The same where a code may be below 8: a multiple of 2^-9, the whole significand moved right. Eight bits
 * stay behind the point, enough to round. The larger of both readings is the right one: that of a normal
 * code where the value is small is at most 16 m, against 8 (128 + m); the significand is multiplied by
 * 2^0..2^3 only where the exponent is too small by 3..0, by 0 elsewhere, and by up to 4 at the largest
 * exponents, where it stays far below. */
SIMD_FN vi words_any(vi w, int32_t zero)
{
    const __m128i power = _mm_setr_epi8(0, 1, 2, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const vi mag = vi_and(w, vi_set1(0x7FFF7FFF));
    const vi over = vi_srl16(vi_sub16_to_0(mag, vi_set1_word(zero - 4 * 128)), 7);
    const vi whole = vi_or(vi_and(w, vi_set1(0x007F007F)), vi_set1(0x00800080));
    const vi small = vi_mul16(whole, vi_lookup_u8(power, over));
    const vi y = vi_max16(vi_sll16(vi_sub16_to_0(mag, vi_set1_word(zero)), 4), small);
    const vi even = vi_and(vi_srl16(y, 8), vi_set1(0x00010001));
    return vi_srl16(vi_add16(vi_add16(y, even), vi_set1(0x007F007F)), 8);
}

/* Asks for `bytes` from p on, a constant. */
SIMD_FN void ask(const uint8_t *p, const int32_t bytes)
{
    SIMD_UNROLL
    for (int32_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(p + i);
    }
}

/* n values of bf16, n a multiple of 4 * L. stream: past the caches, out aligned to 64. Asks for n values at
 * `next` in passing, line by line, since a burst would hold up the loads and stores of this stretch. */
SIMD_FN void quant_words(const uint8_t *x, const uint8_t *next, int32_t n, int32_t zero, const int normal,
                         const int stream, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += 4 * L) {
        ask(next + 2 * i, 8 * L);
        const vi a = vi_loadu(x + 2 * i);
        const vi b = vi_loadu(x + 2 * (i + 2 * L));
        if (normal) {
            vi_store2_signed_u8(out + i, words_normal(a, zero), words_normal(b, zero), a, b, stream);
        } else {
            vi_store2_signed_u8(out + i, words_any(a, zero), words_any(b, zero), a, b, stream);
        }
    }
}

/* The largest magnitude of n words, n a multiple of 2 * L; *far: what magnitudes lack to 0x7FFF at most,
 * lane by lane. */
SIMD_FN int32_t words_top(const uint8_t *x, int32_t n, vi *far)
{
    vi near = vi_set1(0x7FFF7FFF);
    vi most = vi_set1(0);
    SIMD_UNROLL
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi lack = vi_andnot(vi_loadu(x + 2 * i), vi_set1(0x7FFF7FFF));
        near = vi_min16(near, lack);
        most = vi_max16(most, lack);
    }
    *far = most;
    return 0x7FFF - vi_min_word(near);
}

/* Whether some magnitude gives a code below 8. */
SIMD_FN int words_low(vi far, int32_t zero)
{
    return vi_any_lt16(vi_set1_word(0x7FFF - (zero + 128)), far);
}

enum {
    GROUP = 4,           /* tiles converted together, at most                             */
    WORD_LIMIT = 0x7500, /* magnitudes from 2^107 on are left to the careful form         */
    WORD_SAT = 2024      /* 464 as a word above the word of exponent 0 of e4m3            */
};

/* n_tile tiles of n bf16 values with a power of two each: first what every tile holds, then the
 * conversions, so that the one does not wait for the other. False, nothing done, where one of them is for
 * quant_tile. */
SIMD_FN bool quant_group(const uint8_t *const *x, const uint8_t *const *next, const int n_tile, int32_t n,
                         int32_t least, const int stream, uint8_t *const *out, float *s)
{
    vi far[GROUP];
    int32_t zero[GROUP];
    int32_t most = 0;
    SIMD_UNROLL
    for (int i = 0; i < n_tile; i++) {
        const int32_t top = words_top(x[i], n, &far[i]);
        const int32_t e = scale_exponent((uint32_t)top << 16, least);
        s[i] = f32_from_bits((uint32_t)e << 23);
        zero[i] = (e - 7) * 128;
        most = top > most ? top : most;
    }
    if (most >= WORD_LIMIT) {
        return false;
    }
    int low = 0;
    SIMD_UNROLL
    for (int i = 0; i < n_tile; i++) {
        low |= words_low(far[i], zero[i]);
    }
    if (low) {
        for (int i = 0; i < n_tile; i++) {
            quant_words(x[i], next[i], n, zero[i], 0, stream, out[i]);
        }
    } else {
        for (int i = 0; i < n_tile; i++) {
            quant_words(x[i], next[i], n, zero[i], 1, stream, out[i]);
        }
    }
    return true;
}

/* How many of n values are NaN, n a multiple of 2 * L. */
SIMD_FN int64_t count_nan(const uint8_t *x, const int wide, int32_t n)
{
    if (wide) {
        return scan_values(x, 1, n).n_nan;
    }
    vi far;
    return words_top(x, n, &far) > F32_INF >> 16 ? scan_careful(x, 0, n).n_nan : 0;
}

/* e4m3(x / s) of n values of any kind that were scanned; fits: no finite one saturates. Returns how many
 * saturate. */
SIMD_FN int64_t quant_scanned(const uint8_t *x, const int wide, int32_t n, const scan *c,
                              const bool fits, float s, uint8_t *out)
{
    const quant_scale q = quant_scale_of(s);
    if (c->special || !fits) {
        return q.pow2 ? quant_careful(x, wide, n, &q, 1, out) : quant_careful(x, wide, n, &q, 0, out);
    }
    if (q.pow2) {
        quant_plain(x, wide, n, &q, 1, out);
    } else {
        quant_plain(x, wide, n, &q, 0, out);
    }
    return 0;
}

/* A tile of any kind with a scale of its own, which is returned: the exact one, or a power of two. */
SIMD_FN float quant_tile(const uint8_t *x, const int wide, int32_t n, const bool exact, int32_t least,
                         uint8_t *out, kv_count *count)
{
    const scan c = scan_values(x, wide, n);
    const float s = exact ? scale_exact(c.amax)
                          : f32_from_bits((uint32_t)scale_exponent(f32_bits(c.amax), least) << 23);
    count->n_nan += (uint64_t)c.n_nan;
    count->n_sat += (uint64_t)quant_scanned(x, wide, n, &c, true, s, out);
    return s;
}

/* n values of any kind by a given scale. next, stream: as quant_words, for bf16 and a power of two. */
SIMD_FN void quant_given(const uint8_t *x, const uint8_t *next, const int wide, int32_t n, float s,
                         const int stream, uint8_t *out, kv_count *count)
{
    const uint32_t u = f32_bits(s);
    if (!wide && (u & 0x807FFFFFu) == 0 && u >= 27u << 23 && u <= 227u << 23) { /* 2^-100 to 2^100 */
        const int32_t zero = ((int32_t)(u >> 23) - 7) * 128;
        vi far;
        if (words_top(x, n, &far) <= zero + WORD_SAT) {
            if (words_low(far, zero)) {
                quant_words(x, next, n, zero, 0, stream, out);
            } else {
                quant_words(x, next, n, zero, 1, stream, out);
            }
            return;
        }
    }
    const scan c = scan_values(x, wide, n);
    const bool fits = s > 0.0f && c.amax / s <= E4M3_SAT;
    count->n_nan += (uint64_t)c.n_nan;
    count->n_sat += (uint64_t)quant_scanned(x, wide, n, &c, fits, s, out);
}

#endif
