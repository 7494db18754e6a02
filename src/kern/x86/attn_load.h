/* kern/x86/attn_load.h - queries and cache rows into the arrays of a block (attn_x86.h).
 *
 * Included once by the file of an instruction set, after attn_tile.h. Values are those of kv_row_read
 * (num/kvfmt.h): stored f32 and bf16 as they are, e4m3 as bf16_rne(value * scale). Where the scale is a
 * power of two and the row holds no NaN the product is exact and no rounding is done; that a row takes
 * that way depends on the row alone and does not show in the values. With bf16 cells a product that is
 * subnormal becomes 0, as the pair dot would read it.
 */
#ifndef KERN_X86_ATTN_LOAD_H
#define KERN_X86_ATTN_LOAD_H

#include "kern/x86/attn_tile.h"
#include "num/kvfmt.h"

/* Whether value * s is exact, and normal or 0, for every e4m3 value but NaN: s = 2^e, e -117 .. 119. */
static int scale_is_exact(float s)
{
    const uint32_t u = f32_bits(s);
    const uint32_t e = u >> 23;
    return (u & 0x807fffffu) == 0 && e >= 127 - 117 && e <= 127 + 119;
}

/* Whether one of n e4m3 codes is NaN; n a multiple of 32. */
SIMD_FN int has_nan_code(const uint8_t *p, int32_t n)
{
    const __m256i mag = _mm256_set1_epi8(0x7f);
    __m256i any = _mm256_setzero_si256();
    SIMD_UNROLL
    for (int32_t i = 0; i < n; i += 32) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(p + i));
        any = _mm256_or_si256(any, _mm256_cmpeq_epi8(_mm256_and_si256(x, mag), mag));
    }
    return _mm256_movemask_epi8(any) != 0;
}

static float scale_at(const uint8_t *row, int32_t tile)
{
    float s;
    memcpy(&s, row + KV_DS_SCALE_AT + 4 * tile, sizeof s);
    return s;
}

#if ATTN_BF16

/* What turns codes into bf16 of value * 2^e: an offset for the exponent of normal codes, and the
 * subnormal ones as a table. */
typedef struct pow2_scale {
    vw add, table;
} pow2_scale;

/* bf16 of 0 .. 7 times 2^-9, and which of them have an exponent, for every 128 bits. */
#define ATTN_SUBNORMAL 0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60
#define ATTN_NONZERO   0x0000, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff
static const _Alignas(64) uint16_t subnormal_table[32] = {ATTN_SUBNORMAL, ATTN_SUBNORMAL,
                                                          ATTN_SUBNORMAL, ATTN_SUBNORMAL};
static const _Alignas(64) uint16_t subnormal_mask[32] = {ATTN_NONZERO, ATTN_NONZERO, ATTN_NONZERO,
                                                         ATTN_NONZERO};

SIMD_FN pow2_scale pow2_scale_of(float s)
{
    const int32_t e = (int32_t)(f32_bits(s) >> 23) - 127;
    const vw up = vi_and(vi_load(subnormal_mask), vw_set1((int16_t)(e * 128)));
    const pow2_scale r = {vw_set1((int16_t)((120 + e) * 128)), vw_add(vi_load(subnormal_table), up)};
    return r;
}

/* n codes, n a multiple of 32, exactly scaled. */
SIMD_FN void load_pow2(const uint8_t *p, int32_t n, const pow2_scale *s, uint16_t *out)
{
    SIMD_UNROLL
    for (int32_t i = 0; i < n; i += 32) {
        const vw x = vw_loadu_i8(p + i);
        const vw mag = vw_add(vi_and(vw_sll4(x), vw_set1(0x07f0)), s->add);
        const vw y = vw_lookup8_where_clear(x, vw_set1(0x78), s->table, mag);
        vi_store(out + i, vw_merge_bits(vw_set1((int16_t)0x8000), x, y));
    }
}

/* n codes, n a multiple of 32, any scale, NaN codes too. */
SIMD_FN void load_any(const uint8_t *p, int32_t n, float s, uint16_t *out)
{
    const vf c = vf_set1(256.0f); /* vf_loadu_e4m3 gives value / 256 */
    const vf scale = vf_set1(s);
    for (int32_t i = 0; i < n; i += 32) {
        const vf lo = vf_mul(vf_mul(vf_loadu_e4m3(p + i, 1), c), scale);
        const vf hi = vf_mul(vf_mul(vf_loadu_e4m3(p + i + 16, 1), c), scale);
        vi_store(out + i, vw_join_bf16(lo, hi));
    }
}

SIMD_FN void load_codes(const uint8_t *p, int32_t n, float s, uint16_t *out)
{
    if (scale_is_exact(s) && !has_nan_code(p, n)) {
        const pow2_scale c = pow2_scale_of(s);
        load_pow2(p, n, &c, out);
    } else {
        load_any(p, n, s, out);
    }
}

static void load_row(const attn_args *a, const uint8_t *row, float *out)
{
    uint16_t *w = (uint16_t *)(void *)out;
    if (a->fmt == KVS_KV_BF16) {
        for (int32_t i = 0; i < KVS_ROW_DIM; i += 32) {
            vi_store(w + i, vi_loadu(row + 2 * i));
        }
    } else if (a->fmt == KVS_KV_FP8) {
        load_codes(row, KVS_ROW_DIM, a->k_scale, w);
    } else {
        for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
            load_codes(row + KV_DS_TILE * t, KV_DS_TILE, scale_at(row, t), w + KV_DS_TILE * t);
        }
        for (int32_t i = 0; i < KVS_ROPE_DIM; i += 32) {
            vi_store(w + VDIM + i, vi_loadu(row + KV_DS_ROPE_AT + 2 * i));
        }
    }
}

/* Values of two keys as pairs, each 32 in the order of vw_zip_lo, then vw_zip_hi. */
static void pair_values(const float *k0, const float *k1, float *v)
{
    for (int32_t i = 0; i < VDIM / 2; i += 16) {
        const vi a = vi_load(k0 + i);
        const vi b = k1 != NULL ? vi_load(k1 + i) : vi_set1(0);
        vi_store(v + 2 * i, vw_zip_lo(a, b));
        vi_store(v + 2 * i + 16, vw_zip_hi(a, b));
    }
}

#if !ATTN_TILES
/* The row of a node that holds value d: the order of pair_values. */
static int32_t row_of_value(int32_t d)
{
    return (d & ~31) | (d & 4) << 2 | (d >> 1 & 12) | (d & 3);
}
#else
/* Pairs [n, end) of v become 0. */
static void clear_pairs(attn_work *w, int32_t n, int32_t end)
{
    for (int32_t i = n; i < end; i++) {
        memset(w->v + (int64_t)i * V_STRIDE, 0, VDIM * sizeof *w->v);
    }
}
#endif

static void load_tile(attn_work *w, const uint8_t *const *row, int32_t n)
{
    for (int32_t i = 0; i < n; i += 2) {
        float *k = w->k + (int64_t)i * K_STRIDE;
        load_row(w->a, row[i], k);
        if (i + 1 < n) {
            load_row(w->a, row[i + 1], k + K_STRIDE);
        }
        pair_values(k, i + 1 < n ? k + K_STRIDE : NULL, w->v + (int64_t)(i / 2) * V_STRIDE);
    }
#if ATTN_TILES
    /* behind the last pair lie 0 up to a whole tile: only pairs of an earlier key tile have to go */
    const int32_t n_pair = (n + 1) / 2;
    const int32_t end = (n_pair + TILE - 1) / TILE * TILE;
    clear_pairs(w, n_pair, end < w->n_pair ? end : w->n_pair);
    w->n_pair = w->n_pair > end ? w->n_pair : n_pair;
#endif
}

static void cut_tile(attn_work *w, int32_t n)
{
    float *v = w->v + (int64_t)(n / 2) * V_STRIDE;
    for (int32_t i = 0; i < VDIM && n % 2 != 0; i += L) {
        vi_store(v + i, vi_and(vi_load(v + i), vi_set1(0xffff)));
    }
#if ATTN_TILES
    clear_pairs(w, (n + 1) / 2, ((n + 1) / 2 + TILE - 1) / TILE * TILE);
#endif
}

#else

/* n e4m3 codes, n a multiple of 32, times s. */
SIMD_FN void load_codes(const uint8_t *p, int32_t n, float s, float *out)
{
    /* vf_loadu_e4m3 gives value / 256 */
    if (scale_is_exact(s) && !has_nan_code(p, n)) {
        const vf c = vf_set1(s * 256.0f);
        for (int32_t i = 0; i < n; i += L) {
            vf_store(out + i, vf_mul(vf_loadu_e4m3(p + i, 0), c));
        }
        return;
    }
    const vf c = vf_set1(256.0f);
    const vf scale = vf_set1(s);
    for (int32_t i = 0; i < n; i += L) {
        const vf x = vf_mul(vf_mul(vf_loadu_e4m3(p + i, 1), c), scale);
        vf_store(out + i, vf_round_bf16(x));
    }
}

SIMD_FN void load_bf16(const uint8_t *p, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i += L) {
        vf_store(out + i, vf_loadu_bf16(p + 2 * i));
    }
}

static void load_row(const attn_args *a, const uint8_t *row, float *out)
{
    switch (a->fmt) {
    case KVS_KV_F32:
        for (int32_t i = 0; i < KVS_ROW_DIM; i += L) {
            vf_store(out + i, vf_loadu((const float *)(const void *)(row + 4 * i)));
        }
        break;
    case KVS_KV_BF16:
        load_bf16(row, KVS_ROW_DIM, out);
        break;
    case KVS_KV_FP8:
        load_codes(row, KVS_ROW_DIM, a->k_scale, out);
        break;
    default:
        for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
            load_codes(row + KV_DS_TILE * t, KV_DS_TILE, scale_at(row, t), out + KV_DS_TILE * t);
        }
        load_bf16(row + KV_DS_ROPE_AT, KVS_ROPE_DIM, out + VDIM);
        break;
    }
}

static int32_t row_of_value(int32_t d)
{
    return d;
}

static void load_tile(attn_work *w, const uint8_t *const *row, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        load_row(w->a, row[i], w->k + (int64_t)i * K_STRIDE);
    }
}

/* A key is multiplied with its own P only. */
static void cut_tile(attn_work *w, int32_t n)
{
    (void)w;
    (void)n;
}

#endif

/* Eight cells of a query from cell i; NULL, a column that is not there, gives zeros. */
SIMD_FN __m256 query_cells(const uint8_t *q, int32_t type, int32_t i)
{
    if (q == NULL) {
        return _mm256_setzero_ps();
    }
#if ATTN_BF16
    (void)type;
    return _mm256_loadu_ps((const float *)(const void *)(q + 4 * i));
#else
    if (type == KVS_DTYPE_F32) {
        return _mm256_loadu_ps((const float *)(const void *)(q + 4 * i));
    }
    const __m128i w = _mm_loadu_si128((const __m128i *)(const void *)(q + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
#endif
}

/* Packs the eight columns from col, which is a multiple of 8. */
static void pack_eight(attn_work *w, int32_t col)
{
    const attn_args *a = w->a;
    const int64_t size = a->q_type == KVS_DTYPE_F32 ? 4 : 2;
    const uint8_t *q[8];
    for (int32_t j = 0; j < 8; j++) {
        const int64_t row = w->row0 + (col + j) / a->n_head;
        const int64_t head = (col + j) % a->n_head;
        const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
        const int there = col + j < w->n_col;
        q[j] = there ? (const uint8_t *)a->q + at * size : NULL;
        const float by = there && a->q_scale != NULL ? a->q_scale[row * a->n_head + head] : 1.0f;
        w->scale[col + j] = there ? a->softmax_scale * by : 0.0f;
    }
    float *out = w->q + (int64_t)(col / L) * N_STEP * L + col % L;
    for (int32_t i = 0; i < N_STEP; i += 8) {
        __m256 r[8];
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            r[j] = query_cells(q[j], a->q_type, i);
        }
        transpose8(r);
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            _mm256_store_ps(out + (int64_t)(i + j) * L, r[j]);
        }
    }
}

static void pack_q(attn_work *w)
{
    for (int32_t col = 0; col < w->n_vec * L; col += 8) {
        pack_eight(w, col);
    }
}

#endif
