/* kern/x86/attn_tile_amx.h - scores and sums of attention as products of tiles (tile.h).
 *
 * Scores: 16 keys by 16 columns, the key rows and the packed queries as they lie. Sums: 16 columns by 16 values, P
 * turned so that a column is a row; so a node of this instruction set is [n_vec][lanes][512], one column behind
 * the other, and the pairs of keys behind the last one up to a whole tile are 0 (attn_load.h).
 *
 * Included by attn_tile.h.
 */
#ifndef KERN_X86_ATTN_TILE_AMX_H
#define KERN_X86_ATTN_TILE_AMX_H

#include "kern/x86/tile.h"

enum { PAIRS = ATTN_TILE / 2, SUM_COLS = 2 * TILE /* values summed together */ };

_Static_assert(N_STEP % TILE == 0 && ATTN_TILE % (2 * TILE) == 0 && VDIM % SUM_COLS == 0, "whole tiles");

/* Scores of n keys, and of what the tile holds behind them up to 16, which is not read. */
static void score(attn_work *w, int32_t n, int32_t v0, int32_t nv)
{
    for (int32_t k = 0; k < n; k += 2 * TILE) {
        const tile_job j = {.a = w->k + (int64_t)k * K_STRIDE,
                            .a_stride = K_STRIDE,
                            .b = w->q + (int64_t)v0 * N_STEP * L,
                            .b_stride = L,
                            .b_next = N_STEP * L,
                            .n_step = N_STEP / TILE,
                            .c = w->s + k * L,
                            .c_stride = L,
                            .c_next = ATTN_TILE * L};
        const int two = n - k > TILE;
        if (two && nv == CHUNK) {
            tile_product(&j, 2, 2);
        } else if (two) {
            tile_product(&j, 2, 1);
        } else if (nv == CHUNK) {
            tile_product(&j, 1, 2);
        } else {
            tile_product(&j, 1, 1);
        }
        prefetch_step(&w->next, (int64_t)nv * (two ? 2 * TILE : TILE) * N_STEP);
    }
}

/* P of nv vectors, [pair][column] -> [column][pair], with 0 behind the last of n pairs. */
static void turn_p(const float *p, int32_t n, int32_t nv, float *to)
{
    for (int32_t v = 0; v < nv; v++, p += ATTN_TILE * L, to += L * PAIRS) {
        for (int32_t i = 0; i < n; i += 8) {
            for (int32_t c = 0; c < L; c += 8) {
                __m256 r[8];
                SIMD_UNROLL
                for (int32_t k = 0; k < 8; k++) {
                    r[k] = i + k < n ? _mm256_loadu_ps(p + (i + k) * L + c) : _mm256_setzero_ps();
                }
                transpose8(r);
                SIMD_UNROLL
                for (int32_t k = 0; k < 8; k++) {
                    _mm256_storeu_ps(to + (c + k) * PAIRS + i, r[k]);
                }
            }
        }
        for (int32_t c = 0; c < L && (n - 1) % TILE < 8; c++) {
            _mm256_storeu_ps(to + c * PAIRS + (n - 1) / TILE * TILE + 8, _mm256_setzero_ps());
        }
    }
}

/* o[column][value] *= shrink[column] for SUM_COLS values of columns 0 to n_col - 1, into `to`. */
static void shrink_sums(const sum_job *j, int32_t n_col, int32_t r, float *to, int64_t to_stride)
{
    for (int32_t c = 0; c < n_col; c++) {
        float by[L];
        vf_storeu(by, j->shrink[c / L]);
        const vf f = vf_set1(by[c % L]);
        const float *o = j->o + (int64_t)c * VDIM + r;
        vf_storeu(to + c * to_stride, vf_mul(vf_loadu(o), f));
        vf_storeu(to + c * to_stride + L, vf_mul(vf_loadu(o + L), f));
    }
}

SIMD_FN void sum_cols(const sum_job *j, const float *p, const int nv, int32_t r)
{
    _Alignas(64) float part[CHUNK * L * SUM_COLS];
    const int whole = j->all; /* else some columns of o must stay */
    float *to = whole ? j->o + r : part;
    const int64_t to_stride = whole ? VDIM : SUM_COLS;
    if (!j->first) {
        shrink_sums(j, nv * L, r, to, to_stride);
    }
    const tile_job t = {.a = p,
                        .a_stride = PAIRS,
                        .b = j->v + r,
                        .b_stride = V_STRIDE,
                        .b_next = TILE,
                        .n_step = (j->n + TILE - 1) / TILE,
                        .c = to,
                        .c_stride = to_stride,
                        .c_next = TILE,
                        .add = !j->first};
    tile_product(&t, nv, 2);
    for (int32_t c = 0; c < nv * L && !whole; c++) {
        if (vm_bits(j->mask[c / L]) >> (c % L) & 1) {
            memcpy(j->o + (int64_t)c * VDIM + r, part + c * SUM_COLS, SUM_COLS * sizeof *part);
        }
    }
}

/* o[v][column][r] = o[v][column][r] * shrink[v] + sum over pairs of v[pair][r] * p[v][pair]. */
static void sum_all(const sum_job *j, int32_t nv, attn_prefetch *f)
{
    _Alignas(64) float p[CHUNK * L * PAIRS];
    turn_p(j->p, j->n, nv, p);
    for (int32_t r = 0; r < VDIM; r += SUM_COLS) {
        if (nv == CHUNK) {
            sum_cols(j, p, 2, r);
        } else {
            sum_cols(j, p, 1, r);
        }
        prefetch_step(f, (int64_t)SUM_COLS * nv * j->n);
    }
}

#endif
