/* x86/topk_avx512.c - top-k and its merge for AVX-512: the filter skips 64 columns at once where none
 * passes and compresses them otherwise, without a branch on how many do.
 */
#define SIMD_LANES 16
#include "kern/x86/topk_loops.h"

static int64_t topk_filter(topk_buf *b, const float *score, int64_t n, float floor, int32_t id0)
{
    const vf f = vf_set1(floor);
    float *const val = b->val;
    int32_t *const id = b->id;
    const int64_t full = b->cap - TOPK_PAD;
    int64_t n_out = b->n;
    int64_t at = 0;
    for (; at + STEP <= n && n_out <= full; at += STEP) {
        vf x[4];
        uint32_t m[4];
        SIMD_UNROLL
        for (int j = 0; j < 4; j++) {
            x[j] = vf_loadu(score + at + j * W);
            m[j] = vm_bits(vm_ge(x[j], f));
        }
        if ((m[0] | m[1] | m[2] | m[3]) == 0) {
            continue;
        }
        const vi ids = vi_add(vi_iota(), vi_set1(id0 + (int32_t)at));
        SIMD_UNROLL
        for (int j = 0; j < 4; j++) {
            const vpack k = vpack_of(m[j]);
            vf_pack_storeu(val + n_out, k, x[j]);
            vi_pack_storeu(id + n_out, k, vi_add(ids, vi_set1(j * W)));
            n_out += __builtin_popcount(m[j]);
        }
    }
    if (at + STEP > n && n_out <= full) {
        for (; at + W <= n; at += W) {
            const vf x = vf_loadu(score + at);
            const uint32_t m = vm_bits(vm_ge(x, f));
            vf_pack_storeu(val + n_out, vpack_of(m), x);
            vi_pack_storeu(id + n_out, vpack_of(m), vi_add(vi_iota(), vi_set1(id0 + (int32_t)at)));
            n_out += __builtin_popcount(m);
        }
        for (; at < n; at++) {
            val[n_out] = score[at];
            id[n_out] = id0 + (int32_t)at;
            n_out += score[at] >= floor;
        }
    }
    b->n = n_out;
    return at;
}

void INDEX_X86_AVX512(topk_apply)(kern_table *t)
{
    t->topk = topk_simd;
    t->topk_scratch = topk_scratch_x86;
}

void INDEX_X86_AVX512(topk_merge_apply)(kern_table *t)
{
    t->topk_merge = topk_merge_simd;
    t->topk_merge_scratch = topk_merge_scratch_x86;
}
