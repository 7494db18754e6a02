/* x86/topk_avx2.c - top-k and its merge for AVX2.
 *
 * There is no compress instruction, so the filter works on 32 columns at a time: in the usual case, at
 * most two of them pass, these are stored without a branch on how many; otherwise lanes are packed by a
 * permutation looked up by their mask.
 */
#define SIMD_LANES 8
#include "kern/x86/topk_loops.h"

/* Bit i: score[i] >= floor, i < 32. */
static inline uint32_t mask32(const float *score, vf floor)
{
    uint32_t m = 0;
    SIMD_UNROLL
    for (int i = 0; i < 4; i++) {
        m |= vm_bits(vm_ge(vf_loadu(score + i * W), floor)) << (i * W);
    }
    return m;
}

/* Appends the columns of `mask`, many of 32. */
static inline int64_t append_many(float *val, int32_t *id, const float *score, uint32_t mask,
                                  int32_t id0)
{
    int64_t n = 0;
    SIMD_UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t m = mask >> (i * W) & 0xFFu;
        const vpack k = vpack_of(m);
        vf_pack_storeu(val + n, k, vf_loadu(score + i * W));
        vi_pack_storeu(id + n, k, vi_add(vi_iota(), vi_set1(id0 + i * W)));
        n += __builtin_popcount(m);
    }
    return n;
}

static int64_t topk_filter(topk_buf *b, const float *score, int64_t n, float floor, int32_t id0)
{
    const vf f = vf_set1(floor);
    float *const val = b->val;
    int32_t *const id = b->id;
    const int64_t full = b->cap - TOPK_PAD;
    int64_t n_out = b->n;
    int64_t at = 0;
    for (; at + STEP <= n && n_out <= full; at += STEP) {
        const uint32_t m = mask32(score + at, f);
        const int32_t id_at = id0 + (int32_t)at;
        const uint32_t rest = m & (m - 1);
        if ((rest & (rest - 1)) == 0) {
            /* none to two: what is written for a missing one is overwritten later */
            const uint32_t i0 = (uint32_t)__builtin_ctz(m | 0x80000000u);
            const uint32_t i1 = (uint32_t)__builtin_ctz(rest | 0x80000000u);
            val[n_out] = score[at + i0];
            val[n_out + 1] = score[at + i1];
            id[n_out] = id_at + (int32_t)i0;
            id[n_out + 1] = id_at + (int32_t)i1;
            n_out += (m != 0) + (rest != 0);
        } else {
            n_out += append_many(val + n_out, id + n_out, score + at, m, id_at);
        }
    }
    if (at + STEP > n && n_out <= full) {
        for (; at < n; at++) {
            val[n_out] = score[at];
            id[n_out] = id0 + (int32_t)at;
            n_out += score[at] >= floor;
        }
    }
    b->n = n_out;
    return at;
}

void topk_apply_avx2(kern_table *t)
{
    t->topk = topk_simd;
    t->topk_scratch = topk_scratch_x86;
}

void topk_merge_apply_avx2(kern_table *t)
{
    t->topk_merge = topk_merge_simd;
    t->topk_merge_scratch = topk_merge_scratch_x86;
}
