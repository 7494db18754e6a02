/* x86/index_score_pairs.h - what the AVX-512 forms of indexer scores share: e4m3 as pairs of bf16, and sums
 * through pair dots, or fused multiply-adds for f32 keys.
 *
 * Every e4m3 value is a bf16 value, so queries and keys lose nothing. All heads are one block of one to
 * four vectors; the number of keys beside them keeps 24 accumulators in registers.
 *
 * Included once by a file that has defined SIMD_LANES 16 and SCORE_BF16 1.
 */
#ifndef KVS_KERN_X86_INDEX_SCORE_PAIRS_H
#define KVS_KERN_X86_INDEX_SCORE_PAIRS_H

#include "kern/x86/index_score_loops.h"
#include "num/fmt.h"

static int32_t score_block(int32_t n_head)
{
    return (n_head + L - 1) / L * L;
}

/* Whether one of 128 codes is NaN. */
static int has_nan(const uint8_t *code)
{
    const __m256i mag = _mm256_set1_epi8(0x7F);
    __m256i any = _mm256_setzero_si256();
    SIMD_UNROLL
    for (int i = 0; i < KVS_INDEX_DIM; i += 32) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(code + i));
        any = _mm256_or_si256(any, _mm256_cmpeq_epi8(_mm256_and_si256(x, mag), mag));
    }
    return _mm256_movemask_epi8(any) != 0;
}

static void unpack_scalar(const uint8_t *code, uint16_t *out)
{
    for (int i = 0; i < KVS_INDEX_DIM; i++) {
        out[i] = bf16_from_f32(e4m3_to_f32(code[i])).bits;
    }
}

/* The magnitudes of a row's codes as bf16, a NaN as 1.875 * 2^8, with their signs. Returns the larger of
 * `most` and the codes in each word: sign off, times 16. */
SIMD_FN vw unpack_row(const uint8_t *code, uint16_t *out, vw table, vw most)
{
    SIMD_UNROLL
    for (int i = 0; i < KVS_INDEX_DIM; i += 32) {
        const vw x = vw_loadu_i8(code + i);
        const vw mag = vi_and(vw_sll4(x), vw_set1(0x07F0));
        const vw normal = vw_add(mag, vw_set1(120 << 7));
        const vw value = vw_lookup8_where_clear(x, vw_set1(0x78), table, normal);
        vi_storeu(out + i, vw_merge_bits(vw_set1((int16_t)0x8000), x, value));
        most = vi_max16(most, mag);
    }
    return most;
}

/* bf16 of 0 .. 7 times 2^-9, repeated in every 128 bits. */
#define SUBNORMAL 0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60
static const uint16_t g_subnormal[32] = {SUBNORMAL, SUBNORMAL, SUBNORMAL, SUBNORMAL};

static void score_unpack(const uint8_t *code, int64_t n, float *cell)
{
    const vw table = vi_loadu(g_subnormal);
    uint16_t *out = (uint16_t *)(void *)cell;
    vw most = vw_set1(0);
    for (int64_t k = 0; k < n; k++) {
        most = unpack_row(code + k * KVS_INDEX_DIM, out + k * KVS_INDEX_DIM, table, most);
    }
    if (!vi_any_lt16(vw_set1(0x07E0), most)) {
        return;
    }
    for (int64_t k = 0; k < n; k++) {
        if (has_nan(code + k * KVS_INDEX_DIM)) {
            unpack_scalar(code + k * KVS_INDEX_DIM, out + k * KVS_INDEX_DIM);
        }
    }
}

SIMD_FN void sums_of(const score_panel *p, const float *key, int32_t n, const int nz, const int nk,
                     const int pairs, const int rows, float *sum)
{
    for (int32_t k = 0; k < n; k += nk) {
        const float *at = key + (int64_t)k * p->n_cell;
        if (rows) {
            raw_group(p, 0, at, nz, nk, pairs, sum + k * p->lanes);
        } else {
            score_group(p, 0, at, nz, nk, pairs, sum + k * L);
        }
    }
}

#define SCORE_SUMS(nz, nk, pairs, rows)                                                            \
    static void sums_##nz##_##pairs##_##rows(const score_panel *p, const float *key, int32_t n,    \
                                             float *sum)                                           \
    {                                                                                              \
        sums_of(p, key, n, nz, nk, pairs, rows, sum);                                              \
    }
#define SCORE_SUMS_ALL(pairs, rows)                                                                \
    SCORE_SUMS(1, 24, pairs, rows)                                                                 \
    SCORE_SUMS(2, 12, pairs, rows)                                                                 \
    SCORE_SUMS(3, 8, pairs, rows)                                                                  \
    SCORE_SUMS(4, 6, pairs, rows)
SCORE_SUMS_ALL(0, 0)
SCORE_SUMS_ALL(0, 1)
SCORE_SUMS_ALL(1, 0)
SCORE_SUMS_ALL(1, 1)

/* Lanes of one row's heads, or raw products of several rows. */
static void score_sums(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *sum)
{
    typedef void (*sums_fn)(const score_panel *, const float *, int32_t, float *);
    static const sums_fn fn[2][2][4] = {{{sums_1_0_0, sums_2_0_0, sums_3_0_0, sums_4_0_0},
                                         {sums_1_0_1, sums_2_0_1, sums_3_0_1, sums_4_0_1}},
                                        {{sums_1_1_0, sums_2_1_0, sums_3_1_0, sums_4_1_0},
                                         {sums_1_1_1, sums_2_1_1, sums_3_1_1, sums_4_1_1}}};
    fn[fmt != KVS_INDEX_F32][p->row_lanes != 0][p->block / L - 1](p, key, n, sum);
}

static void score_raw(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *raw)
{
    score_sums(p, key, fmt, n, raw);
}

#define SCORE_ISA_PAIRS SCORE_ISA_COMMON, .fp8_cells = KVS_INDEX_DIM / 2, .w_factor = 1.0f

#endif
