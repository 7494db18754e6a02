/* x86/topk_loops.h - the loops of a topk_isa in the vectors of simd.h.
 *
 * Included once by a file that has defined SIMD_LANES and defines topk_filter itself.
 */
#ifndef KVS_KERN_X86_TOPK_LOOPS_H
#define KVS_KERN_X86_TOPK_LOOPS_H

#include <math.h>

#include "kern/x86/index_x86.h"
#include "kern/x86/simd_more.h"
#include "kern/x86/topk.h"

enum { W = SIMD_LANES, STEP = 4 * SIMD_LANES };

static int64_t topk_filter(topk_buf *b, const float *score, int64_t n, float floor, int32_t id0);

/* NaN behind the last value up to a whole step, so that loops have no tail. */
static void pad_nan(float *v, int64_t n)
{
    const vf nan = vf_set1(NAN);
    for (int64_t i = n; i < n + STEP; i += W) {
        vf_storeu(v + i, nan);
    }
}

/* The lanes of a vector shifted round by h. */
static inline vi turn_by(uint32_t h)
{
    return vi_and(vi_add(vi_iota(), vi_set1((int32_t)(h % W))), vi_set1(W - 1));
}

/* x with its lanes moved, or `rest` where that is larger or x is NaN. */
static inline vf max_turned(const float *x, vi turn, vf rest)
{
    return vf_max(vf_permute(vf_loadu(x), turn), rest);
}

static void group_run(float *group, const float *score, int64_t n, uint32_t h)
{
    const vi turn = turn_by(h);
    for (int64_t i = 0; i < n; i += W) {
        vf_storeu(group + i, max_turned(score + i, turn, vf_loadu(group + i)));
    }
}

/* Four runs of n scores, `stride` apart, into the same groups. */
static void group_run4(float *group, const float *score, int64_t stride, int64_t n, uint32_t h)
{
    const vi t0 = turn_by(h);
    const vi t1 = turn_by(h >> 4);
    const vi t2 = turn_by(h >> 3 ^ 5);
    for (int64_t i = 0; i < n; i += W) {
        const float *at = score + i;
        vf m = max_turned(at, t0, vf_loadu(group + i));
        m = max_turned(at + stride, t1, m);
        m = max_turned(at + 2 * stride, t2, m);
        m = vf_max(vf_loadu(at + 3 * stride), m);
        vf_storeu(group + i, m);
    }
}

static void topk_group_max(float *group, int64_t n_group, const float *score, int64_t n,
                           uint32_t seed)
{
    for (int64_t at = 0; at + W <= n; seed++) {
        const uint32_t h = topk_hash(seed);
        const int64_t first = (int64_t)(h >> 8) * W & (n_group - W);
        const bool four = n - at >= 4 * n_group;
        const int64_t todo = n - at < n_group ? (n - at) / W * W : n_group;
        const int64_t high = todo < n_group - first ? todo : n_group - first;
        if (four) {
            group_run4(group + first, score + at, n_group, high, h);
            group_run4(group, score + at + high, n_group, todo - high, h);
        } else {
            group_run(group + first, score + at, high, h);
            group_run(group, score + at + high, todo - high, h);
        }
        at += four ? 4 * n_group : todo;
    }
}

static int64_t topk_count_ge(float *v, int64_t n, float x)
{
    const vf limit = vf_set1(x);
    vi c[4] = {vi_set1(0), vi_set1(0), vi_set1(0), vi_set1(0)};
    pad_nan(v, n);
    for (int64_t i = 0; i < n; i += STEP) {
        SIMD_UNROLL
        for (int j = 0; j < 4; j++) {
            c[j] = vi_count(c[j], vm_ge(vf_loadu(v + i + j * W), limit));
        }
    }
    int32_t part[W];
    vi_storeu(part, vi_add(vi_add(c[0], c[1]), vi_add(c[2], c[3])));
    int64_t sum = 0;
    for (int i = 0; i < W; i++) {
        sum += part[i];
    }
    return sum;
}

static void topk_range(float *v, int64_t n, float *lo, float *hi)
{
    vf a = vf_set1(INFINITY);
    vf z = vf_set1(-INFINITY);
    pad_nan(v, n);
    for (int64_t i = 0; i < n; i += W) {
        const vf x = vf_loadu(v + i);
        a = vf_min(x, a); /* the second operand is the result where x is NaN */
        z = vf_max(x, z);
    }
    float low[W];
    float high[W];
    vf_storeu(low, a);
    vf_storeu(high, z);
    *lo = low[0];
    *hi = high[0];
    for (int i = 1; i < W; i++) {
        *lo = low[i] < *lo ? low[i] : *lo;
        *hi = high[i] > *hi ? high[i] : *hi;
    }
}

static void topk_keep(topk_buf *b, float x, int64_t n_equal)
{
    const vf limit = vf_set1(x);
    float *const val = b->val;
    int32_t *const id = b->id;
    const int64_t n = b->n;
    int64_t n_out = 0;
    pad_nan(val, n);
    for (int64_t i = 0; i < n; i += W) {
        const vf v = vf_loadu(val + i);
        const vi d = vi_loadu(id + i);
        uint32_t keep = vm_bits(vm_lt(limit, v));
        const uint32_t eq = vm_bits(vm_eq(v, limit));
        if (eq != 0) {
            const uint32_t first = topk_first_bits(eq, n_equal);
            n_equal -= __builtin_popcount(first);
            keep |= first;
        }
        const vpack k = vpack_of(keep);
        /* n_out <= i: nothing unread is overwritten */
        vf_pack_storeu(val + n_out, k, v);
        vi_pack_storeu(id + n_out, k, d);
        n_out += __builtin_popcount(keep);
    }
    b->n = n_out;
}

static int64_t topk_between(float *v, int64_t n, float lo, float hi, float *out, int64_t *n_ge)
{
    const vf a = vf_set1(lo);
    const vf z = vf_set1(hi);
    int64_t n_out = 0;
    int64_t n_lo = 0;
    pad_nan(v, n);
    for (int64_t i = 0; i < n; i += W) {
        const vf x = vf_loadu(v + i);
        const uint32_t ge = vm_bits(vm_ge(x, a));
        const uint32_t in = ge & ~vm_bits(vm_ge(x, z));
        vf_pack_storeu(out + n_out, vpack_of(in), x);
        n_out += __builtin_popcount(in);
        n_lo += __builtin_popcount(ge);
    }
    *n_ge = n_lo;
    return n_out;
}

static int64_t topk_match(float *v, int64_t n, float x, int32_t *at)
{
    const vf limit = vf_set1(x);
    int64_t n_out = 0;
    pad_nan(v, n);
    for (int64_t i = 0; i < n; i += W) {
        const uint32_t eq = vm_bits(vm_eq(vf_loadu(v + i), limit));
        if (eq != 0) {
            vi_pack_storeu(at + n_out, vpack_of(eq), vi_add(vi_iota(), vi_set1((int32_t)i)));
            n_out += __builtin_popcount(eq);
        }
    }
    return n_out;
}

static bool topk_any_negative(const int32_t *id, int64_t n)
{
    vi any = vi_set1(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        any = vi_or(any, vi_loadu(id + i));
    }
    bool found = vi_sign_bits(any) != 0;
    for (; i < n; i++) {
        found |= id[i] < 0;
    }
    return found;
}

static const topk_isa g_isa = {
    .group_max = topk_group_max,
    .filter = topk_filter,
    .count_ge = topk_count_ge,
    .range = topk_range,
    .keep = topk_keep,
    .between = topk_between,
    .match = topk_match,
    .any_negative = topk_any_negative,
};

static void topk_simd(const topk_args *a, dev_queue *q)
{
    topk_run(&g_isa, a, q);
}

static void topk_merge_simd(const topk_merge_args *a, dev_queue *q)
{
    topk_merge_run(&g_isa, a, q);
}

#endif
