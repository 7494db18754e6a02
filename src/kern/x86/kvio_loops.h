/* x86/kvio_loops.h - the loops of a kvio_isa in the vectors of simd.h.
 *
 * A tile is read twice, the second time from the first-level cache: for the largest magnitude, then to
 * be converted. Infinities and NaN are looked for once per tile; only a tile that holds some, or one
 * that may saturate, takes the careful form of the conversion. Whether a tile is careful, or its scale a
 * power of two (then a product with the exact reciprocal stands for the division), shows in no bit.
 *
 * Included once by a file that has defined SIMD_LANES.
 */
#ifndef KVS_KERN_X86_KVIO_LOOPS_H
#define KVS_KERN_X86_KVIO_LOOPS_H

#include <math.h>
#include <stdbool.h>

#include "kern/x86/index_x86.h"
#include "kern/x86/kvio_x86.h"
#include "kern/x86/simd_more.h"

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
    scan s = {0.0f, 0, true};
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

/* n a multiple of 4 * L. */
SIMD_FN scan scan_values(const uint8_t *x, const int wide, int32_t n)
{
    vi top = vi_set1(0);
    if (wide) {
        for (int32_t i = 0; i < n; i += L) {
            top = vi_max(top, vi_and(vi_loadu(x + 4 * i), vi_set1(F32_ABS)));
        }
    } else { /* two bf16 in a lane: magnitudes order like signed words */
        vi words = vi_set1(0);
        for (int32_t i = 0; i < n; i += 2 * L) {
            words = vi_max16(words, vi_and(vi_loadu(x + 2 * i), vi_set1(0x7FFF7FFF)));
        }
        top = vi_max(vi_and(words, vi_set1(0x7FFF0000)), vi_sll(words, 16));
    }
    const int32_t max = vi_max_lane(top);
    if (max >= F32_INF) {
        return scan_careful(x, wide, n);
    }
    const scan s = {f32_from_bits((uint32_t)max), 0, false};
    return s;
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

/* quant_plain of bf16 by 2^e, -100 <= e <= 100, in 16-bit words: where every quotient is a normal e4m3,
 * the exponent is shifted and three bits of the mantissa are kept. Other values take quant_plain. */
SIMD_FN void quant_words(const uint8_t *x, int32_t n, const quant_scale *s, int32_t e, uint8_t *out)
{
    const vi offset = vi_set1((120 + e) * (128 * 0x10001));
    const vi normal = vi_set1(0x00800080); /* exponent 1 */
    for (int32_t i = 0; i < n; i += 4 * L) {
        vi t[2];
        vi sign[2];
        SIMD_UNROLL
        for (int j = 0; j < 2; j++) {
            const vi w = vi_loadu(x + 2 * (i + j * 2 * L));
            t[j] = vi_sub16(vi_and(w, vi_set1(0x7FFF7FFF)), offset);
            sign[j] = vi_and(vi_srl16(w, 8), vi_set1(0x00800080));
        }
        if (vi_any_lt16(vi_min16(t[0], t[1]), normal)) {
            quant_plain(x + 2 * i, 0, 4 * L, s, 1, out + i);
            continue;
        }
        SIMD_UNROLL
        for (int j = 0; j < 2; j++) {
            const vi even = vi_and(vi_srl16(t[j], 4), vi_set1(0x00010001));
            const vi r = vi_add16(vi_add16(t[j], even), vi_set1(0x00070007));
            t[j] = vi_or(vi_srl16(r, 4), sign[j]);
        }
        vi_store2_u8(out + i, t[0], t[1]);
    }
}

/* e4m3(x / s) of n values that were scanned; fits: no finite one saturates. */
SIMD_FN int64_t quant_scanned(const uint8_t *x, const int wide, int32_t n, const scan *c,
                              const bool fits, float s, uint8_t *out)
{
    const quant_scale q = quant_scale_of(s);
    const bool plain = !c->special && fits;
    if (q.pow2) {
        const int32_t e = (int32_t)(f32_bits(s) >> 23) - 127;
        if (plain && !wide && e >= -100 && e <= 100) {
            quant_words(x, n, &q, e, out);
            return 0;
        }
        if (plain) {
            quant_plain(x, wide, n, &q, 1, out);
            return 0;
        }
        return quant_careful(x, wide, n, &q, 1, out);
    }
    if (plain) {
        quant_plain(x, wide, n, &q, 0, out);
        return 0;
    }
    return quant_careful(x, wide, n, &q, 0, out);
}

/* ---- f32 and bf16 --------------------------------------------------------------------------------- */

/* bf16 bits of f32 bits: nearest even; NaN keeps sign and upper payload and becomes quiet. */
SIMD_FN vi bf16_bits(vi u, const int may_be_nan)
{
    const vi even = vi_and(vi_srl(u, 16), vi_set1(1));
    const vi r = vi_srl(vi_add(vi_add(u, even), vi_set1(0x7FFF)), 16);
    if (!may_be_nan) {
        return r;
    }
    const vm nan = vm_lt_i(vi_set1(F32_INF), vi_and(u, vi_set1(F32_ABS)));
    return vi_select(nan, vi_or(vi_srl(u, 16), vi_set1(0x40)), r);
}

SIMD_FN void put_bf16(const uint8_t *x, const int wide, int32_t n, uint8_t *out)
{
    if (!wide) {
        memcpy(out, x, (size_t)n * sizeof(bf16));
        return;
    }
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi a = bf16_bits(vi_loadu(x + 4 * i), 1);
        const vi b = bf16_bits(vi_loadu(x + 4 * (i + L)), 1);
        vi_store2_u16(out + 2 * i, a, b);
    }
}

SIMD_FN void put_f32(const uint8_t *x, const int wide, int32_t n, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += L) {
        vi_storeu(out + 4 * i, vi_of_vf(in_load(x + i * in_bytes(wide), wide)));
    }
}

/* ---- writers -------------------------------------------------------------------------------------- */

SIMD_FN void write_ds_mla(const kv_writer *w, uint8_t *row, const uint8_t *latent, const uint8_t *rope,
                          const int wide, kv_count *count)
{
    scan c[KV_DS_N_TILE];
    float s[KV_DS_N_TILE];
    for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
        c[t] = scan_values(latent + t * KV_DS_TILE * in_bytes(wide), wide, KV_DS_TILE);
        s[t] = scale_for(w->rule, c[t].amax);
        count->n_nan += (uint64_t)c[t].n_nan;
    }
    for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
        count->n_sat += (uint64_t)quant_scanned(latent + t * KV_DS_TILE * in_bytes(wide), wide,
                                                KV_DS_TILE, &c[t], true, s[t], row + t * KV_DS_TILE);
    }
    memcpy(row + KV_DS_SCALE_AT, s, sizeof s);
    put_bf16(rope, wide, KVS_ROPE_DIM, row + KV_DS_ROPE_AT);
    count->n_nan += (uint64_t)scan_values(rope, wide, KVS_ROPE_DIM).n_nan;
}

SIMD_FN void write_part(const kv_writer *w, uint8_t *out, const uint8_t *x, int32_t n, const int wide,
                        kv_count *count)
{
    const scan c = scan_values(x, wide, n);
    count->n_nan += (uint64_t)c.n_nan;
    if (w->fmt == KVS_KV_FP8) {
        const bool fits = w->k_scale > 0.0f && c.amax / w->k_scale <= E4M3_SAT;
        count->n_sat += (uint64_t)quant_scanned(x, wide, n, &c, fits, w->k_scale, out);
    } else if (w->fmt == KVS_KV_BF16) {
        put_bf16(x, wide, n, out);
    } else {
        put_f32(x, wide, n, out);
    }
}

SIMD_FN void write_row(const kv_writer *w, uint8_t *row, const uint8_t *latent, const uint8_t *rope,
                       const int wide, kv_count *count)
{
    if (w->fmt == KVS_KV_FP8_DS_MLA) {
        write_ds_mla(w, row, latent, rope, wide, count);
        return;
    }
    const int64_t size = kv_row_bytes(w->fmt) / KVS_ROW_DIM;
    write_part(w, row, latent, KVS_LATENT_DIM, wide, count);
    write_part(w, row + KVS_LATENT_DIM * size, rope, KVS_ROPE_DIM, wide, count);
}

static void kvio_write_row(const kv_writer *w, uint8_t *row, const void *latent, const void *rope,
                           kv_count *count)
{
    if (w->in_type == KVS_DTYPE_BF16) {
        write_row(w, row, latent, rope, 0, count);
    } else {
        write_row(w, row, latent, rope, 1, count);
    }
}

SIMD_FN float quant_key(const uint8_t *x, const int wide, uint8_t *out, kv_count *count)
{
    const scan c = scan_values(x, wide, KVS_INDEX_DIM);
    const float s = scale_index(c.amax);
    count->n_sat += (uint64_t)quant_scanned(x, wide, KVS_INDEX_DIM, &c, true, s, out);
    count->n_nan += (uint64_t)c.n_nan;
    return s;
}

static float kvio_quant_head(const void *x, int32_t in_type, uint8_t *q8, uint64_t *n_nan)
{
    kv_count c = {0};
    const float s = in_type == KVS_DTYPE_BF16 ? quant_key(x, 0, q8, &c) : quant_key(x, 1, q8, &c);
    *n_nan += c.n_nan;
    return s;
}

static void kvio_widen_head(const void *x, int32_t in_type, float *out, uint64_t *n_nan)
{
    if (in_type == KVS_DTYPE_BF16) {
        put_f32(x, 0, KVS_INDEX_DIM, (uint8_t *)out);
        *n_nan += (uint64_t)scan_values(x, 0, KVS_INDEX_DIM).n_nan;
    } else {
        put_f32(x, 1, KVS_INDEX_DIM, (uint8_t *)out);
        *n_nan += (uint64_t)scan_values(x, 1, KVS_INDEX_DIM).n_nan;
    }
}

/* First what every key holds, then the conversions: the one does not wait for the other. */
SIMD_FN void quant_keys(const kvio_key *k, int32_t n, const int wide, kv_count *count)
{
    scan c[KVIO_KEYS];
    float s[KVIO_KEYS];
    for (int32_t i = 0; i < n; i++) {
        c[i] = scan_values(k[i].value, wide, KVS_INDEX_DIM);
        s[i] = scale_index(c[i].amax);
        count->n_nan += (uint64_t)c[i].n_nan;
    }
    for (int32_t i = 0; i < n; i++) {
        uint8_t *out = k[i].page + k[i].off * index_key_bytes(KVS_INDEX_FP8);
        count->n_sat += (uint64_t)quant_scanned(k[i].value, wide, KVS_INDEX_DIM, &c[i], true, s[i], out);
        memcpy(k[i].page + index_scale_at(k[i].off), &s[i], sizeof s[i]);
    }
}

static void kvio_write_keys(int32_t fmt, int32_t in_type, const kvio_key *k, int32_t n, kv_count *count)
{
    if (fmt == KVS_INDEX_F32) {
        for (int32_t i = 0; i < n; i++) {
            uint8_t *out = k[i].page + k[i].off * index_key_bytes(fmt);
            kvio_widen_head(k[i].value, in_type, (float *)(void *)out, &count->n_nan);
        }
    } else if (in_type == KVS_DTYPE_BF16) {
        quant_keys(k, n, 0, count);
    } else {
        quant_keys(k, n, 1, count);
    }
}

/* ---- reader --------------------------------------------------------------------------------------- */

/* Whether one of n codes is NaN; n a multiple of 32. */
static bool has_nan_code(const uint8_t *p, int32_t n)
{
    const __m256i mag = _mm256_set1_epi8(0x7F);
    __m256i any = _mm256_setzero_si256();
    for (int32_t i = 0; i < n; i += 32) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(p + i));
        any = _mm256_or_si256(any, _mm256_cmpeq_epi8(_mm256_and_si256(x, mag), mag));
    }
    return !_mm256_testz_si256(any, any);
}

/* bf16 of 0 .. 7 times 2^-9, and which of them have an exponent, for every 128 bits. */
#define KVIO_SUBNORMAL 0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60
#define KVIO_NONZERO   0x0000, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF
static const uint16_t subnormal_table[32] = {KVIO_SUBNORMAL, KVIO_SUBNORMAL, KVIO_SUBNORMAL,
                                             KVIO_SUBNORMAL};
static const uint16_t subnormal_mask[32] = {KVIO_NONZERO, KVIO_NONZERO, KVIO_NONZERO, KVIO_NONZERO};

/* n codes (a multiple of 2 * L), none NaN, times 2^e, every product a normal bf16 or 0: the exponent is
 * shifted, subnormal codes come from a table. */
SIMD_FN void read_words(const uint8_t *p, int32_t e, int32_t n, const int wide, uint8_t *out)
{
    const uint32_t step = (uint32_t)(e * 128) & 0xFFFFu;
    const vi scale = vi_set1((int32_t)(step << 16 | step));
    const vi table = vi_add16(vi_loadu(subnormal_table), vi_and(vi_loadu(subnormal_mask), scale));
    const vi offset = vi_set1((120 + e) * (128 * 0x10001));
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi x = vi_loadu_i8(p + i);
        const vi shifted = vi_and(vi_sll16(x, 4), vi_set1(0x07F007F0));
        vi mag = vi_add16(shifted, offset);
        /* eight lanes pay more for the table than for asking whether it is needed */
        if (L == 16 || vi_any_lt16(shifted, vi_set1(0x00800080))) {
            mag = vi_lookup8_where_clear(x, vi_set1(0x00780078), table, mag);
        }
        const vi w = vi_or(mag, vi_and(x, vi_set1((int32_t)0x80008000u)));
        if (wide) {
            vi_store_high(out + 4 * i, w);
        } else {
            vi_storeu(out + 2 * i, w);
        }
    }
}

/* n codes (a multiple of 2 * L), none NaN, times s, rounded to bf16, as f32 (wide) or bf16. */
SIMD_FN void read_rounded(const uint8_t *p, float s, int32_t n, const int wide, uint8_t *out)
{
    const vf by = vf_set1(s * 256.0f); /* vf_loadu_e4m3 gives value / 256 */
    for (int32_t i = 0; i < n; i += 2 * L) {
        vi w[2];
        SIMD_UNROLL
        for (int j = 0; j < 2; j++) {
            const vi u = vi_of_vf(vf_mul(vf_loadu_e4m3(p + i + j * L, 0), by));
            w[j] = bf16_bits(u, 0);
        }
        if (wide) {
            vi_storeu(out + 4 * i, vi_sll(w[0], 16));
            vi_storeu(out + 4 * (i + L), vi_sll(w[1], 16));
        } else {
            vi_store2_u16(out + 2 * i, w[0], w[1]);
        }
    }
}

SIMD_FN void read_codes(const uint8_t *p, float s, int32_t n, const int wide, uint8_t *out)
{
    const uint32_t u = f32_bits(s);
    const uint32_t e = u >> 23;
    const bool pow2 = (u & 0x807FFFFFu) == 0 && e >= 20 && e <= 240; /* products normal */
    if (!f32_is_finite(s * 256.0f) || has_nan_code(p, n)) {
        for (int32_t i = 0; i < n; i++) {
            const float v = e4m3_dequant(p[i], s);
            const bf16 b = bf16_from_f32(v);
            if (wide) {
                memcpy(out + 4 * i, &v, sizeof v);
            } else {
                memcpy(out + 2 * i, &b, sizeof b);
            }
        }
    } else if (pow2) {
        read_words(p, (int32_t)e - 127, n, wide, out);
    } else {
        read_rounded(p, s, n, wide, out);
    }
}

/* n stored bf16 values (a multiple of 2 * L); as bf16 a NaN becomes quiet. */
SIMD_FN void read_bf16(const uint8_t *p, int32_t n, const int wide, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi w = vi_loadu(p + 2 * i);
        if (wide) {
            vi_store_high(out + 4 * i, w);
            continue;
        }
        vi_storeu(out + 2 * i, w);
        if (vi_any_lt16(vi_set1(0x7F807F80), vi_and(w, vi_set1(0x7FFF7FFF)))) {
            for (int32_t j = i; j < i + 2 * L; j++) {
                bf16 x;
                memcpy(&x, p + 2 * j, sizeof x);
                x = bf16_from_f32(bf16_to_f32(x));
                memcpy(out + 2 * j, &x, sizeof x);
            }
        }
    }
}

SIMD_FN void read_row(int32_t fmt, float k_scale, const uint8_t *row, const int wide, uint8_t *out)
{
    const int64_t size = in_bytes(wide);
    if (fmt == KVS_KV_FP8_DS_MLA) {
        for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
            float s;
            memcpy(&s, row + KV_DS_SCALE_AT + t * (int32_t)sizeof s, sizeof s);
            read_codes(row + t * KV_DS_TILE, s, KV_DS_TILE, wide, out + t * KV_DS_TILE * size);
        }
        read_bf16(row + KV_DS_ROPE_AT, KVS_ROPE_DIM, wide, out + KVS_LATENT_DIM * size);
    } else if (fmt == KVS_KV_FP8) {
        read_codes(row, k_scale, KVS_ROW_DIM, wide, out);
    } else if (fmt == KVS_KV_BF16) {
        read_bf16(row, KVS_ROW_DIM, wide, out);
    } else if (wide) {
        memcpy(out, row, KV_ROW_BYTES_F32);
    } else {
        put_bf16(row, 1, KVS_ROW_DIM, out);
    }
}

static void kvio_read_row(int32_t fmt, float k_scale, const uint8_t *row, int32_t out_type, void *out)
{
    if (out_type == KVS_DTYPE_BF16) {
        read_row(fmt, k_scale, row, 0, out);
    } else {
        read_row(fmt, k_scale, row, 1, out);
    }
}

static void kvio_stream(void *out, const void *from, int64_t bytes)
{
    uint8_t *to = out;
    for (int64_t i = 0; i < bytes; i += 4 * L) {
        vi_stream(to + i, vi_loadu((const uint8_t *)from + i));
    }
}

/* ---- ops ------------------------------------------------------------------------------------------ */

static const kvio_isa g_isa = {
    .write_row = kvio_write_row,
    .write_keys = kvio_write_keys,
    .read_row = kvio_read_row,
    .stream = kvio_stream,
    .quant_head = kvio_quant_head,
    .widen_head = kvio_widen_head,
};

static void kv_write_simd(const kv_write_args *a, dev_queue *q)
{
    kv_write_run(&g_isa, a, q);
}

static void index_write_simd(const index_write_args *a, dev_queue *q)
{
    index_write_run(&g_isa, a, q);
}

static void gather_simd(const gather_args *a, dev_queue *q)
{
    gather_run(&g_isa, a, q);
}

static void index_quant_simd(const index_quant_args *a, dev_queue *q)
{
    index_quant_run(&g_isa, a, q);
}

#endif
