/* kern/x86/mha_load.h - queries, keys and values into the arrays of a piece (mha_x86.h).
 *
 * Included once by the file of an instruction set, through mha_tile.h. Expanded values are rounded to bf16
 * where the operands are bf16; with cells of pairs a value that rounds to a subnormal becomes 0, here or in the
 * pair dot.
 */
#ifndef KERN_X86_MHA_LOAD_H
#define KERN_X86_MHA_LOAD_H

#include <string.h>

#include "kern/x86/attn_soft.h"
#include "kern/x86/mha_x86.h"
#include "num/fmt.h"

enum { TILE = MHA_TILE, ROPE = KVS_ROPE_DIM, WIDE = 2 * SIMD_LANES /* floats of a pair of vectors */ };

#if ATTN_BF16

/* n f32 values into the cells of a row from value `at` on, as bf16. */
static void put_f32(float *row, int32_t at, const float *x, int32_t n, int32_t type)
{
    (void)type;
    bf16 *y = (bf16 *)(void *)row + at;
    int32_t i = 0;
    for (; i + L <= n; i += L) {
        vf_storeu_bf16(y + i, vf_loadu(x + i));
    }
    for (; i < n; i++) {
        y[i] = bf16_from_f32(x[i]);
    }
}

/* n values of the operands' type. */
static void put_typed(float *row, int32_t at, const void *x, int64_t from, int32_t n, int32_t type)
{
    (void)type;
    memcpy((bf16 *)(void *)row + at, (const bf16 *)x + from, (size_t)n * sizeof(bf16));
}

/* Zeros behind n values, up to the end of the cells. */
static void put_end(const mha_work *w, float *row, int32_t n)
{
    memset((bf16 *)(void *)row + n, 0, (size_t)(2 * w->n_step - n) * sizeof(bf16));
}

/* Values of two keys as pairs; key1 NULL: one key. */
static void put_values(const mha_work *w, int32_t i_pair, const float *key0, const float *key1)
{
    const int32_t n = w->a->v_dim;
    float *to = w->v + (int64_t)i_pair * w->n_value;
    int32_t r = 0;
    for (; r + L <= n; r += L) {
        vi_store(to + r, vi_pair_bf16(vf_loadu(key0 + r), key1 != NULL ? vf_loadu(key1 + r) : vf_zero()));
    }
    if (r < w->n_value) {
        _Alignas(64) float two[2][SIMD_LANES] = {{0}};
        memcpy(two[0], key0 + r, (size_t)(n - r) * sizeof(float));
        if (key1 != NULL) {
            memcpy(two[1], key1 + r, (size_t)(n - r) * sizeof(float));
        }
        vi_store(to + r, vi_pair_bf16(vf_load(two[0]), vf_load(two[1])));
    }
}

#else

static void put_f32(float *row, int32_t at, const float *x, int32_t n, int32_t type)
{
    float *y = row + at;
    int32_t i = 0;
    if (type == KVS_DTYPE_F32) {
        memcpy(y, x, (size_t)n * sizeof *y);
        return;
    }
    for (; i + L <= n; i += L) {
        vf_storeu(y + i, vf_round_bf16(vf_loadu(x + i)));
    }
    for (; i < n; i++) {
        y[i] = bf16_round(x[i]);
    }
}

static void put_typed(float *row, int32_t at, const void *x, int64_t from, int32_t n, int32_t type)
{
    float *y = row + at;
    int32_t i = 0;
    if (type == KVS_DTYPE_F32) {
        memcpy(y, (const float *)x + from, (size_t)n * sizeof *y);
        return;
    }
    const bf16 *b = (const bf16 *)x + from;
    for (; i + L <= n; i += L) {
        vf_storeu(y + i, vf_loadu_bf16(b + i));
    }
    for (; i < n; i++) {
        y[i] = bf16_to_f32(b[i]);
    }
}

static void put_end(const mha_work *w, float *row, int32_t n)
{
    memset(row + n, 0, (size_t)(w->n_step - n) * sizeof *row);
}

static void put_values(const mha_work *w, int32_t i_key, const float *key)
{
    float *to = w->v + (int64_t)i_key * w->n_value;
    put_f32(to, 0, key, w->a->v_dim, w->a->type);
    memset(to + w->a->v_dim, 0, (size_t)(w->n_value - w->a->v_dim) * sizeof *to);
}

#endif

/* The eight rows of w->turn into eight columns of `to`, whose rows are `step` cells apart. */
static void turn_eight(const mha_work *w, float *to, int64_t step)
{
    for (int32_t i = 0; i < w->n_step; i += 8) {
        __m256 r[8];
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            r[j] = _mm256_loadu_ps(w->turn + (int64_t)j * w->n_step + i);
        }
        transpose8(r);
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            _mm256_store_ps(to + (i + j) * step, r[j]);
        }
    }
}

/* Where column `col` of an array of pairs with n rows begins. */
SIMD_FN int64_t column_at(int32_t col, int32_t n)
{
    return (int64_t)(col / WIDE) * n * WIDE + col % WIDE;
}

static void load_queries(const mha_work *w)
{
    const mha_args *a = w->a;
    const int32_t n = a->nope + ROPE;
    for (int32_t col = 0; col < w->n_pair * WIDE; col += 8) {
        for (int32_t j = 0; j < 8; j++) {
            float *row = w->turn + (int64_t)j * w->n_step;
            const int32_t there = col + j < w->n_row ? n : 0;
            const int64_t from = (w->row0 + col + j) * a->q_stride_row + w->head * a->q_stride_head;
            if (there > 0) {
                put_typed(row, 0, a->q, from, n, a->type);
            }
            put_end(w, row, there);
        }
        turn_eight(w, w->q + column_at(col, w->n_step), WIDE);
    }
}

/* Keys [key0, key0 + n) of the block into the tile. */
static void load_tile(const mha_work *w, int32_t key0, int32_t n)
{
    const mha_args *a = w->a;
    const float *kv = a->kv + key0 * a->kv_stride_key + w->head * a->kv_stride_head;
    for (int32_t i0 = 0; i0 < n; i0 += 8) {
        const int32_t m = n - i0 < 8 ? n - i0 : 8;
        for (int32_t j = 0; j < m; j++) {
            float *row = w->turn + (int64_t)j * w->n_step;
            put_f32(row, 0, kv + (i0 + j) * a->kv_stride_key, a->nope, a->type);
            put_typed(row, a->nope, a->rope, (key0 + i0 + j) * a->rope_stride, ROPE, a->type);
            put_end(w, row, a->nope + ROPE);
        }
        turn_eight(w, w->k + i0, TILE);
    }
    const float *value = kv + a->nope;
#if ATTN_BF16
    for (int32_t i = 0; i < n; i += 2) {
        put_values(w, i / 2, value + i * a->kv_stride_key,
                   i + 1 < n ? value + (i + 1) * a->kv_stride_key : NULL);
    }
#else
    for (int32_t i = 0; i < n; i++) {
        put_values(w, i, value + i * a->kv_stride_key);
    }
#endif
}

#endif
