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

/* A block of several rows: sum[nk][p->lanes] receives every lane by itself. */
SIMD_FN void score_group_rows(const score_panel *p, int32_t first_lane, const float *key,
                              const int nz, const int nk, const int pairs, float *sum)
{
    vf acc[24];
    group_products(p, first_lane, key, nz, nk, pairs, acc);
    uint32_t bits =
        0; /* lanes without a head: the same in every vector, since a row's lanes divide L */
    for (uint32_t l = 0; l < L; l++) {
        bits |= (uint32_t)((int32_t)l % p->row_lanes >= p->n_head) << l;
    }
    const vm none = vm_from_bits(bits);
    SIMD_UNROLL
    for (int k = 0; k < nk; k++) {
        SIMD_UNROLL
        for (int z = 0; z < nz; z++) {
            const vf relu = vf_zero_where(none, vf_max(vf_zero(), acc[k * nz + z]));
            vf_storeu(sum + k * p->lanes + first_lane + z * L,
                      vf_mul(relu, vf_loadu(p->w + first_lane + z * L)));
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

/* The lanes of eight keys, `stride` apart, added: l and l + 8 first where there are `lanes` 16. */
SIMD_FN __m256 add_lanes(const float *sum, int32_t stride, const int lanes)
{
    __m256 t[8];
    SIMD_UNROLL
    for (int i = 0; i < 8; i++) {
        t[i] = _mm256_loadu_ps(sum + i * stride);
        if (lanes == 16) {
            t[i] = _mm256_add_ps(t[i], _mm256_loadu_ps(sum + i * stride + 8));
        }
    }
    return add_eight(t);
}

/* The four lanes of eight keys added: (0 + 2) + (1 + 3). */
static __m256 add_four(const float *sum, int32_t stride)
{
    __m256 t[4];
    SIMD_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(sum + i * stride)),
                                    _mm_loadu_ps(sum + (i + 4) * stride), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(t[0], t[1]), b = _mm256_unpackhi_ps(t[0], t[1]);
    const __m256 c = _mm256_unpacklo_ps(t[2], t[3]), d = _mm256_unpackhi_ps(t[2], t[3]);
    const __m256 l0 = _mm256_shuffle_ps(a, c, 0x44), l1 = _mm256_shuffle_ps(a, c, 0xee);
    const __m256 l2 = _mm256_shuffle_ps(b, d, 0x44), l3 = _mm256_shuffle_ps(b, d, 0xee);
    return _mm256_add_ps(_mm256_add_ps(l0, l2), _mm256_add_ps(l1, l3));
}

static void store_scores(float *out, int32_t n, __m256 s)
{
    if (n >= 8) {
        _mm256_storeu_ps(out, s);
        return;
    }
    float last[8];
    _mm256_storeu_ps(last, s);
    memcpy(out, last, (size_t)n * sizeof *out);
}

static void score_finish_row(const score_panel *p, const float *sum, const float *scale, int32_t n,
                             float *out)
{
    for (int32_t k = 0; k < n; k += 8) {
        const float *from = sum + (int64_t)k * p->lanes;
        const __m256 s =
            p->row_lanes == 4 ? add_four(from, p->lanes) : add_lanes(from, p->lanes, 8);
        store_scores(out + k, n - k, _mm256_mul_ps(s, _mm256_loadu_ps(scale + k)));
    }
}

static void score_finish(const float *sum, const float *scale, int32_t n, float *out)
{
    for (int32_t k = 0; k < n; k += 8) {
        store_scores(out + k, n - k,
                     _mm256_mul_ps(add_lanes(sum + k * L, L, L), _mm256_loadu_ps(scale + k)));
    }
}

#endif
