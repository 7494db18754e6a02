/* x86/index_score_loops.h - the loops of a score_isa in the vectors of simd.h.
 *
 * Included once by a file that has defined SIMD_LANES and SCORE_BF16 (1: e4m3 cells are pairs of bf16).
 */
#ifndef KVS_KERN_X86_INDEX_SCORE_LOOPS_H
#define KVS_KERN_X86_INDEX_SCORE_LOOPS_H

#include <math.h>

#include "kern/x86/index_score.h"
#include "kern/x86/index_x86.h"
#include "kern/x86/simd_more.h"
#include "kern/x86/simd_quads.h"

enum { L = SIMD_LANES };

static void score_transpose(const float *from, int32_t n_row, int32_t n_cell, float *to,
                            int32_t stride)
{
    for (int32_t r = 0; r < n_row; r += 8) {
        for (int32_t c = 0; c < n_cell; c += 8) {
            __m256 t[8];
            SIMD_UNROLL
            for (int i = 0; i < 8; i++) {
                t[i] = _mm256_loadu_ps(from + (int64_t)(r + i) * n_cell + c);
            }
            transpose8(t);
            SIMD_UNROLL
            for (int i = 0; i < 8; i++) {
                _mm256_storeu_ps(to + (int64_t)(c + i) * stride + r, t[i]);
            }
        }
    }
}

SIMD_FN vf cell_product(vf acc, const float *q, const float *key, int pairs)
{
#if SCORE_BF16
    if (pairs) {
        return vf_dot_bf16(acc, vi_loadu(q), vi_bcast(key));
    }
#else
    (void)pairs;
#endif
    return vf_fma(vf_loadu(q), vf_bcast(key), acc);
}

/* acc[k * nz + z] = one block of nz vectors of heads times nk keys. nz, nk and pairs are constants of the
 * caller. */
SIMD_FN void group_products(const score_panel *p, int32_t first_head, const float *key,
                            const int nz, const int nk, const int pairs, vf acc[24])
{
    const float *q = p->cell + (int64_t)first_head * p->n_cell;
    const int32_t n_cell = pairs ? KVS_INDEX_DIM / 2 : KVS_INDEX_DIM;
    SIMD_UNROLL
    for (int i = 0; i < nk * nz; i++) {
        acc[i] = vf_zero();
    }
    for (int32_t c = 0; c < n_cell; c++) {
        SIMD_UNROLL
        for (int k = 0; k < nk; k++) {
            SIMD_UNROLL
            for (int z = 0; z < nz; z++) {
                acc[k * nz + z] = cell_product(acc[k * nz + z], q + (c * nz + z) * L,
                                               key + k * n_cell + c, pairs);
            }
        }
    }
}

/* A block of the heads of one row. first_head numbers the block's heads; sum[nk][L] is written by the first
 * block and added to by later ones. */
SIMD_FN void score_group(const score_panel *p, int32_t first_head, const float *key, const int nz,
                         const int nk, const int pairs, float *sum)
{
    vf acc[24];
    group_products(p, first_head, key, nz, nk, pairs, acc);
    vm none[4];
    SIMD_UNROLL
    for (int z = 0; z < nz; z++) {
        none[z] = vm_range(first_head + z * L, p->n_head, SCORE_MAX_HEAD);
    }
    SIMD_UNROLL
    for (int k = 0; k < nk; k++) {
        vf s = first_head == 0 ? vf_zero() : vf_loadu(sum + k * L);
        SIMD_UNROLL
        for (int z = 0; z < nz; z++) {
            /* the second operand of max is the result where one is NaN: NaN stays */
            const vf relu = vf_zero_where(none[z], vf_max(vf_zero(), acc[k * nz + z]));
            s = vf_fma(relu, vf_loadu(p->w + first_head + z * L), s);
        }
        vf_storeu(sum + k * L, s);
    }
}

/* A block of several rows: raw[nk][p->lanes] receives the products of every lane. */
SIMD_FN void raw_group(const score_panel *p, int32_t first_lane, const float *key, const int nz,
                       const int nk, const int pairs, float *raw)
{
    vf acc[24];
    group_products(p, first_lane, key, nz, nk, pairs, acc);
    SIMD_UNROLL
    for (int k = 0; k < nk; k++) {
        SIMD_UNROLL
        for (int z = 0; z < nz; z++) {
            vf_storeu(raw + k * p->lanes + first_lane + z * L, acc[k * nz + z]);
        }
    }
}

/* What turns the products of one vector of lanes into terms of a sum. */
typedef struct lane_weight {
    vf w;
    vm none; /* lanes without a head; with `masked` alone */
} lane_weight;

SIMD_FN vf weigh(const float *raw, const lane_weight *w, const int masked)
{
    /* the second operand of max is the result where one is NaN: NaN stays */
    vf x = vf_max(vf_zero(), vf_loadu(raw));
    if (masked) {
        x = vf_zero_where(w->none, x);
    }
    return vf_mul(x, w->w);
}

/* The lanes without a head, the same in every vector, since a row's lanes divide L. */
SIMD_FN vm lanes_without_head(const score_panel *p)
{
    uint32_t bits = 0;
    for (uint32_t l = 0; l < L; l++) {
        bits |= (uint32_t)((int32_t)l % p->row_lanes >= p->n_head) << l;
    }
    return vm_from_bits(bits);
}

/* Scores of keys [k, k + L) for the QUADS rows from `lane` on; their products are raw[key - k][stride], which
 * begin at `lane`, in one vector or, with 8 lanes a row, two. A row's lanes are added as (0 + 2) + (1 + 3),
 * or, of 8, ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). row_lanes and masked (whether lanes without a head
 * may hold anything but 0) are constants of the caller. */
SIMD_FN void finish_quads(const score_panel *p, int32_t lane, const float *raw, int32_t stride,
                          const float *scale, int32_t k, vm none, const int row_lanes,
                          const int masked)
{
    /* where the second vector is not there, the first takes its place: its rows have no scores */
    const int32_t next = lane + L < p->lanes ? L : 0;
    const lane_weight w[2] = {{vf_loadu(p->w + lane), none}, {vf_loadu(p->w + lane + next), none}};
    vf row[QUADS];
    SIMD_UNROLL
    for (int j = 0; j < QUADS; j++) {
        vf t[4];
        SIMD_UNROLL
        for (int i = 0; i < 4; i++) {
            const float *at = raw + (j * 4 + i) * stride;
            t[i] = weigh(at, &w[0], masked);
            if (row_lanes == 8) {
                const vf b = weigh(at + next, &w[1], masked);
                t[i] = vf_add(vf_even_quads(t[i], b), vf_odd_quads(t[i], b));
            }
        }
        row[j] = vf_add_quads(t);
    }
    transpose_quads(row);
    const vf scales = vf_loadu(scale + k);
    const score_dest *dest = p->row + lane / row_lanes;
    SIMD_UNROLL
    for (int r = 0; r < QUADS; r++) {
        const vf s = vf_mul(row[r], scales);
        const int32_t left = dest[r].n - k;
        if (left >= L) {
            vf_storeu(dest[r].to + k, s);
        } else if (left > 0) {
            vf_storeu_where(dest[r].to + k, vm_range(0, 0, left), s);
        }
    }
}

SIMD_FN void finish_part(const score_panel *p, const float *raw, const float *scale, int32_t at,
                         int32_t n, const int row_lanes)
{
    const vm none = lanes_without_head(p);
    for (int32_t lane = 0; lane < p->lanes; lane += QUADS * row_lanes) {
        for (int32_t k = 0; k < n; k += L) {
            finish_quads(p, lane, raw + k * p->lanes + lane, p->lanes, scale, at + k, none,
                         row_lanes, 1);
        }
    }
}

/* Products of n keys with all lanes of a panel, as raw_group writes them; by each variant. */
static void score_raw(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *raw);

/* Part by part, so that the products of a panel stay in the first cache. */
static void score_rows(const score_panel *p, int32_t n_panel, const float *key, int32_t fmt,
                       const float *scale, float *raw)
{
    for (int32_t i = 0; i < n_panel; i++, p++) {
        for (int32_t at = 0; at < p->n_key; at += SCORE_PART) {
            const int32_t n = p->n_key - at < SCORE_PART ? p->n_key - at : SCORE_PART;
            score_raw(p, key + (int64_t)at * p->n_cell, fmt, n, raw);
            if (p->row_lanes == 4) {
                finish_part(p, raw, scale, at, n, 4);
            } else {
                finish_part(p, raw, scale, at, n, 8);
            }
        }
    }
}

/* Eight lanes of eight keys, t[key], added: (0 + 4) + (2 + 6) + ((1 + 5) + (3 + 7)). */
SIMD_FN __m256 add_eight(__m256 t[8])
{
    transpose8(t);
    const __m256 even = _mm256_add_ps(_mm256_add_ps(t[0], t[4]), _mm256_add_ps(t[2], t[6]));
    const __m256 odd = _mm256_add_ps(_mm256_add_ps(t[1], t[5]), _mm256_add_ps(t[3], t[7]));
    return _mm256_add_ps(even, odd);
}

/* The lanes of eight keys added: l and l + 8 first where there are 16. */
SIMD_FN __m256 add_lanes(const float *sum)
{
    __m256 t[8];
    SIMD_UNROLL
    for (int i = 0; i < 8; i++) {
        t[i] = _mm256_loadu_ps(sum + i * L);
        if (L == 16) {
            t[i] = _mm256_add_ps(t[i], _mm256_loadu_ps(sum + i * L + 8));
        }
    }
    return add_eight(t);
}

static void score_finish(const float *sum, const float *scale, int32_t n, float *out)
{
    for (int32_t k = 0; k < n; k += 8) {
        const __m256 s = _mm256_mul_ps(add_lanes(sum + k * L), _mm256_loadu_ps(scale + k));
        if (n - k >= 8) {
            _mm256_storeu_ps(out + k, s);
        } else {
            float last[8];
            _mm256_storeu_ps(last, s);
            memcpy(out + k, last, (size_t)(n - k) * sizeof *out);
        }
    }
}

/* What the tables of all variants have alike. */
#define SCORE_ISA_COMMON                                                                           \
    .lanes = L, .block = score_block, .unpack = score_unpack, .transpose = score_transpose,        \
    .finish = score_finish

/* The entries of the op for a table `isa`, and the function that puts them into a kern_table. */
#define SCORE_VARIANT(apply, isa)                                                                  \
    static void index_score_simd(const index_score_args *a, dev_queue *q)                          \
    {                                                                                              \
        index_score_run(&(isa), a, q);                                                             \
    }                                                                                              \
    static size_t index_score_scratch_simd(const index_score_args *a, const dev_queue *q)          \
    {                                                                                              \
        return index_score_scratch_run(&(isa), a, q);                                              \
    }                                                                                              \
    void apply(kern_table *t)                                                                      \
    {                                                                                              \
        t->index_score = index_score_simd;                                                         \
        t->index_score_scratch = index_score_scratch_simd;                                         \
    }

#endif
