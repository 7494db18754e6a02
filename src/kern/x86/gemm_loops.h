/* x86/gemm_loops.h - the loops of a gemm_isa in the vectors of simd.h.
 *
 * Included once by a file that has defined SIMD_LANES and GEMM_DOT (1: products of bf16 pairs; 0:
 * bf16 through f32), and GEMM_F32_ONLY where it takes dot_f32 alone. A step is one vector of an operand as it is stored: L values of f32 or 2 L of
 * bf16. A tile is up to MR rows of x times NR rows of w; its accumulators stay in registers for a
 * block.
 */
#ifndef KVS_KERN_X86_GEMM_LOOPS_H
#define KVS_KERN_X86_GEMM_LOOPS_H

#include <string.h>

#include "kern/x86/gemm_vec.h"
#include "kern/x86/gemm_x86.h"
#include "num/fmt.h"

enum {
    L = SIMD_LANES,
    STEP = 4 * L, /* bytes */
    NR = L == 16 ? 8 : 4,
    MR = 3,                    /* rows of x of a tile, with NR rows of w ...        */
    MR_FEW = L == 16 ? 4 : MR, /* ... and with half as many, where there are few    */
    LINE = 64
};

/* Rows of w beside m rows of x. */
SIMD_FN int outs_of(const int m)
{
    return m > MR ? NR / 2 : NR;
}

/* What a vector in memory is: f32, bf16 taken as even and odd elements, bf16 taken as pairs. */
enum { FORM_F32, FORM_SPLIT, FORM_PAIRS };

SIMD_FN vf operand(const uint8_t *p, const int form, const int half)
{
    if (form == FORM_SPLIT) {
        return half == 0 ? vf_even_bf16(vi_loadu(p)) : vf_odd_bf16(vi_loadu(p));
    }
    return vf_loadu((const float *)(const void *)p);
}

SIMD_FN vf product(vf acc, vf w, vf x, const int form)
{
#if GEMM_DOT
    if (form == FORM_PAIRS) {
        return vf_dot_bf16(acc, vi_of_vf(w), vi_of_vf(x));
    }
#else
    (void)form;
#endif
    return vf_fma(w, x, acc);
}

SIMD_FN void tile_half(vf *acc, const uint8_t *const *x, const uint8_t *const *w, int64_t at,
                       const int m, const int form, const int half)
{
    vf xv[MR_FEW];
    SIMD_UNROLL
    for (int i = 0; i < m; i++) {
        xv[i] = operand(x[i] + at, form, half);
    }
    SIMD_UNROLL
    for (int j = 0; j < outs_of(m); j++) {
        const vf wv = operand(w[j] + at, form, half);
        SIMD_UNROLL
        for (int i = 0; i < m; i++) {
            acc[i * NR + j] = product(acc[i * NR + j], wv, xv[i], form);
        }
    }
}

/* One step of m rows of x and their rows of w, `at` bytes into them. */
SIMD_FN void tile_step(vf *acc, const uint8_t *const *x, const uint8_t *const *w, int64_t at,
                       const int m, const int form)
{
    tile_half(acc, x, w, at, m, form, 0);
    if (form == FORM_SPLIT) {
        tile_half(acc, x, w, at, m, form, 1);
    }
}

/* The last bytes of the rows, filled up with zeros: fewer than a step. */
SIMD_FN void tile_tail(vf *acc, const uint8_t *const *x, const uint8_t *const *w, int64_t at,
                       int64_t rest, const int m, const int form)
{
    uint8_t end[(MR_FEW + NR) * STEP];
    const uint8_t *xe[MR_FEW];
    const uint8_t *we[NR];
    memset(end, 0, sizeof end);
    for (int i = 0; i < m; i++) {
        xe[i] = memcpy(end + i * STEP, x[i] + at, (size_t)rest);
    }
    for (int j = 0; j < outs_of(m); j++) {
        we[j] = memcpy(end + (MR_FEW + j) * STEP, w[j] + at, (size_t)rest);
    }
    tile_step(acc, xe, we, 0, m, form);
}

/* m rows of x from row r on and their rows of w from row j0 on; m, form and streams are
 * constants of the caller. */
SIMD_FN void tile_part(const gemm_tile *t, int32_t r, int32_t j0, const int m, const int form,
                       const int streams)
{
    const uint8_t *x[MR_FEW];
    SIMD_UNROLL
    for (int i = 0; i < m; i++) {
        x[i] = t->x + (r + i) * t->x_stride;
    }
    const uint8_t *w[NR];
    SIMD_UNROLL
    for (int j = 0; j < outs_of(m); j++) {
        w[j] = t->w[j0 + j];
    }
    vf acc[MR_FEW * NR];
    SIMD_UNROLL
    for (int i = 0; i < m * NR; i++) {
        acc[i] = vf_zero();
    }
    const int64_t end = (int64_t)t->n * (form == FORM_F32 ? 4 : 2);
    int64_t at = 0;
    for (; at + LINE <= end; at += LINE) {
        if (streams) {
            const int64_t to = at + (at < t->turn ? GEMM_AHEAD : t->jump);
            SIMD_UNROLL
            for (int j = 0; j < outs_of(m); j++) {
                _mm_prefetch((const char *)(w[j] + to), _MM_HINT_T0);
            }
        }
        tile_step(acc, x, w, at, m, form);
        if (STEP < LINE) {
            tile_step(acc, x, w, at + STEP, m, form);
        }
    }
    if (STEP < LINE && at + STEP <= end) {
        tile_step(acc, x, w, at, m, form);
        at += STEP;
    }
    if (at < end) {
        tile_tail(acc, x, w, at, end - at, m, form);
    }
    SIMD_UNROLL
    for (int i = 0; i < m; i++) {
        float *y = t->y + (r + i) * t->y_stride + j0;
        SIMD_UNROLL
        for (int j = 0; j < outs_of(m); j += 4) {
            const vf *s = acc + i * NR + j;
            if (j0 + j < t->n_out) {
                put4(y + j, vf_sum4(s[0], s[1], s[2], s[3]), t->n_out - j0 - j, t->first);
            }
        }
    }
}

SIMD_FN void tile_rows(const gemm_tile *t, int32_t r, const int m, const int form,
                       const int streams)
{
    for (int32_t j0 = 0; j0 < NR && j0 < t->n_out; j0 += outs_of(m)) {
        tile_part(t, r, j0, m, form, streams);
    }
}

/* How many of n rows come next: 4 go as 2 + 2 where 3 is the most, which is faster than 3 + 1. */
SIMD_FN int32_t share_of_rows(int32_t n, int32_t most)
{
    const int32_t n_share = (n + most - 1) / most;
    return (n + n_share - 1) / n_share;
}

#define TILE_FN(name, m, form)                                                                     \
    static void name##_##m(const gemm_tile *t, int32_t r)                                          \
    {                                                                                              \
        tile_rows(t, r, m, form, 0);                                                               \
    }                                                                                              \
    static void name##_##m##_stream(const gemm_tile *t, int32_t r)                                 \
    {                                                                                              \
        tile_rows(t, r, m, form, 1);                                                               \
    }

#if SIMD_LANES == 16
#define TILE_FN_FEW(name, form) TILE_FN(name, 4, form)
#define TILE_FN_LIST(name, end)                                                                    \
    {                                                                                              \
        name##_1##end, name##_2##end, name##_3##end, name##_4##end                                 \
    }
#else
#define TILE_FN_FEW(name, form)
#define TILE_FN_LIST(name, end)                                                                    \
    {                                                                                              \
        name##_1##end, name##_2##end, name##_3##end                                                \
    }
#endif

#define TILE_ROWS(name, form)                                                                      \
    TILE_FN(name, 1, form)                                                                         \
    TILE_FN(name, 2, form)                                                                         \
    TILE_FN(name, 3, form)                                                                         \
    TILE_FN_FEW(name, form)                                                                        \
    static void name(const gemm_tile *t)                                                           \
    {                                                                                              \
        typedef void (*rows_fn)(const gemm_tile *, int32_t);                                       \
        static const rows_fn fn[2][MR_FEW] = {TILE_FN_LIST(name, ), TILE_FN_LIST(name, _stream)};  \
        const int32_t most = t->n_row <= 2 * MR_FEW ? MR_FEW : MR;                                 \
        for (int32_t r = 0; r < t->n_row;) {                                                       \
            const int32_t m = share_of_rows(t->n_row - r, most);                                   \
            fn[t->streams && r == 0][m - 1](t, r);                                                 \
            r += m;                                                                                \
        }                                                                                          \
    }

TILE_ROWS(dot_f32, FORM_F32)
#ifndef GEMM_F32_ONLY
#if GEMM_DOT
TILE_ROWS(dot_bf16, FORM_PAIRS)
#else
TILE_ROWS(dot_bf16, FORM_SPLIT)

/* n bf16 -> f32 as the products take them, with zeros behind them up to whole vectors of bf16. */
SIMD_FN void widen(const uint8_t *from, int32_t n, float *to)
{
    int32_t i = 0;
    for (; i + 2 * L <= n; i += 2 * L) {
        const vi x = vi_loadu(from + 2 * (int64_t)i);
        vf_storeu(to + i, vf_even_bf16(x));
        vf_storeu(to + i + L, vf_odd_bf16(x));
    }
    if (i < n) {
        uint8_t end[STEP] = {0};
        memcpy(end, from + 2 * (int64_t)i, 2 * (size_t)(n - i));
        const vi x = vi_loadu(end);
        vf_storeu(to + i, vf_even_bf16(x));
        vf_storeu(to + i + L, vf_odd_bf16(x));
    }
}

static void widen_rows(const uint8_t *from, int64_t stride, int32_t n_row, int32_t n, uint8_t *to,
                       int64_t to_stride)
{
    for (int32_t r = 0; r < n_row; r++) {
        widen(from + r * stride, n, (float *)(void *)(to + r * to_stride));
    }
}

/* Where there is no product of bf16 pairs, panels hold f32. */
#define WIDENED_PANELS                                                                             \
    .packed_out = NR, .packed_size = 4, .packed_step = 2 * L, .pack_x = widen_rows,                \
    .pack_w = widen_rows, .dot_packed = dot_f32
#endif

/* ---- e4m3 ------------------------------------------------------------------------------------ */

/* The bf16 value of code * scale, exponent of the code left out: byte m of lo and hi for a
 * normal code with mantissa m, byte 8 + m for a subnormal one. A product's rounding depends on
 * the mantissa alone while nothing leaves the normal numbers; elsewhere, and for NaN codes,
 * codes go by value. */
typedef struct code_table {
    uint8_t lo[16], hi[16];
    float scale;
    int32_t is_plain;
    uint8_t pad[24];
} code_table;

/* Whether every product of the scale with a code is a normal number or 0. */
static int scale_is_plain(float scale)
{
    const uint32_t e = (f32_bits(scale) >> 23) & 255u;
    return e >= 12 && e <= 244;
}

SIMD_FN __m256i round_to_words(__m256 x)
{
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)),
                             16);
}

static void code_table_fill(code_table *t, float scale)
{
    const __m256 s = _mm256_set1_ps(scale);
    const __m256 normal =
        _mm256_mul_ps(s, _mm256_setr_ps(1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 1.875f));
    const __m256 below =
        _mm256_mul_ps(s, _mm256_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f));
    /* exponent fields: 2^-7 for what the code's exponent adds to, 2^-9 for subnormals; 0 stays */
    const int k = 9 << 7;
    const __m256i n = _mm256_sub_epi32(round_to_words(normal), _mm256_set1_epi32(7 << 7));
    const __m256i b =
        _mm256_sub_epi32(round_to_words(below), _mm256_setr_epi32(0, k, k, k, k, k, k, k));
    const __m256i word = _mm256_permute4x64_epi64(_mm256_packus_epi32(n, b), 0xd8);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(word, _mm256_set1_epi16(0xff)),
                                              _mm256_srli_epi16(word, 8));
    _mm256_storeu_si256((__m256i *)(void *)t->lo, _mm256_permute4x64_epi64(bytes, 0xd8));
    t->scale = scale;
    t->is_plain = scale_is_plain(scale);
}

static void code_tables(const float *scale, int32_t n, uint8_t *table)
{
    for (int32_t i = 0; i < n; i++) {
        code_table_fill((code_table *)(void *)table + i, scale[i]);
    }
}

SIMD_FN vi table_half(const uint8_t *half)
{
    return vi_of_128(_mm_loadu_si128((const __m128i *)(const void *)half));
}

/* STEP codes -> 2 vectors of bf16; NaN codes come out as numbers. *top: largest magnitude code
   so far. */
SIMD_FN void codes_to_bf16(const uint8_t *code, vi t_lo, vi t_hi, vi *top, uint16_t *to)
{
    const vi x = vb_before_zip(vi_loadu(code));
    const vi e = vi_and(x, vb_set1(0x78));
    const vi at = vi_or(vi_and(x, vb_set1(7)), vi_and(vb_is_zero(e), vb_set1(8)));
    const vi lo = vb_shuffle(t_lo, at);
    const vi hi = vi_xor(vb_shuffle(t_hi, at), vi_and(x, vb_set1(0x80)));
    *top = vb_max(*top, vi_and(x, vb_set1(0x7f)));
    vi_storeu(to, vw_add(vb_zip_lo(lo, hi), vw_sll4(vb_zip_lo(e, vb_zero()))));
    vi_storeu(to + 2 * L, vw_add(vb_zip_hi(lo, hi), vw_sll4(vb_zip_hi(e, vb_zero()))));
}

static void codes_by_value(const uint8_t *code, int32_t n, float scale, uint16_t *to)
{
    for (int32_t i = 0; i < n; i++) {
        to[i] = bf16_from_f32(e4m3_to_f32(code[i]) * scale).bits;
    }
}

static void dequant(const gemm_strip *s)
{
    const code_table *t = (const code_table *)(const void *)s->table;
    const vi lo = table_half(t->lo);
    const vi hi = table_half(t->hi);
    const int32_t whole = t->is_plain ? s->n / STEP * STEP : 0;
    vi top = vb_zero();
    for (int32_t r = 0; r < s->n_row && whole > 0; r++) {
        const uint8_t *code = s->code + r * s->stride;
        uint16_t *to = s->to + r * s->to_stride;
        if (whole == GEMM_BLOCK) {
            SIMD_UNROLL
            for (int32_t i = 0; i < GEMM_BLOCK; i += STEP) {
                _mm_prefetch((const char *)(code + i + s->ahead), _MM_HINT_T0);
                codes_to_bf16(code + i, lo, hi, &top, to + i);
            }
            continue;
        }
        for (int32_t i = 0; i < whole; i += STEP) {
            codes_to_bf16(code + i, lo, hi, &top, to + i);
        }
    }
    const int32_t from = vb_any_equal(top, vb_set1(0x7f)) ? 0 : whole;
    for (int32_t r = 0; r < s->n_row && from < s->n; r++) {
        codes_by_value(s->code + r * s->stride + from, s->n - from, t->scale,
                       s->to + r * s->to_stride + from);
    }
}

static const gemm_codes g_codes = {sizeof(code_table), code_tables, dequant};
#endif

#endif
