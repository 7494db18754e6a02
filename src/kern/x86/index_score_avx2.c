/* x86/index_score_avx2.c - indexer scores for AVX2 and FMA: everything in f32.
 *
 * e4m3 codes are unpacked as halves, which puts a factor 2^-8 on queries and keys; the weights take it
 * back. A block is 16 lanes, two vectors, times six keys: twelve accumulators. Where the rows of few
 * heads fill one vector at most, it is that vector times twelve keys; a lane's sums are the same.
 */
#define SIMD_LANES 8
#define SCORE_BF16 0
#include "kern/x86/index_score_loops.h"

enum { NZ = 2, NK = 6, NK_ONE = 12 };

static int32_t score_block(int32_t n_head)
{
    return n_head <= L ? L : NZ * L;
}

static void score_unpack(const uint8_t *code, int64_t n, float *cell)
{
    for (int64_t i = 0; i < n * KVS_INDEX_DIM; i += L) {
        vf_storeu(cell + i, vf_loadu_e4m3(code + i, 1));
    }
}

static void score_sums(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *sum)
{
    (void)fmt;
    for (int32_t h = 0; h < p->n_head; h += NZ * L) {
        for (int32_t k = 0; k < n; k += NK) {
            score_group(p, h, key + (int64_t)k * KVS_INDEX_DIM, NZ, NK, 0, sum + k * L);
        }
    }
}

static void score_raw(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *raw)
{
    (void)fmt;
    if (p->lanes == L) {
        for (int32_t k = 0; k < n; k += NK_ONE) {
            raw_group(p, 0, key + (int64_t)k * KVS_INDEX_DIM, 1, NK_ONE, 0, raw + k * L);
        }
        return;
    }
    for (int32_t h = 0; h < p->lanes; h += NZ * L) {
        for (int32_t k = 0; k < n; k += NK) {
            raw_group(p, h, key + (int64_t)k * KVS_INDEX_DIM, NZ, NK, 0, raw + k * p->lanes);
        }
    }
}

static const score_isa g_isa = {SCORE_ISA_COMMON, .fp8_cells = KVS_INDEX_DIM, .w_factor = 0x1p16f,
                                .sums = score_sums, .rows = score_rows};

SCORE_VARIANT(index_score_apply_avx2, g_isa)
