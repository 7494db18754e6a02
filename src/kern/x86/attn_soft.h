/* kern/x86/attn_soft.h - what the kernels of both forms of attention share: cells, and the softmax of a tile.
 *
 * Included after simd.h with ATTN_BF16 0 (cells are floats, products are fma) or 1 (cells are pairs of bf16,
 * products are pair dots). Scores and P of consecutive keys (or pairs of keys) lie `step` floats apart.
 */
#ifndef KERN_X86_ATTN_SOFT_H
#define KERN_X86_ATTN_SOFT_H

enum { L = SIMD_LANES };

#if ATTN_BF16
typedef vi cell; /* one pair per lane */
#define cell_load(p)            vi_load(p)
#define cell_bcast(p)           vi_bcast(p)
#define cell_mul_add(acc, a, b) vf_dot_bf16(acc, a, b)
#else
typedef vf cell;
#define cell_load(p)            vf_load(p)
#define cell_bcast(p)           vf_bcast(p)
#define cell_mul_add(acc, a, b) vf_fma(a, b, acc)
#endif

/* Largest scaled score of n keys, not below m. NaN is passed over here; exp meets it. */
SIMD_FN vf score_max(const float *s, const int32_t step, int32_t n, vf scale, vf m)
{
    vf m1 = m;
    int32_t i = 0;
    for (; i + 2 <= n; i += 2) {
        m = vf_max(vf_mul(vf_load(s + i * step), scale), m);
        m1 = vf_max(vf_mul(vf_load(s + (i + 1) * step), scale), m1);
    }
    if (i < n) {
        m = vf_max(vf_mul(vf_load(s + i * step), scale), m);
    }
    return vf_max(m1, m);
}

/* P of n keys from their scores, in the cells of the product; returns the sum of the unrounded P. */
SIMD_FN vf score_exp(const float *s, float *p, const int32_t step, int32_t n, vf scale, vf m)
{
    vf sum = vf_zero();
#if ATTN_BF16
    for (int32_t i = 0; i < n; i += 2) {
        const vf lo = vf_exp_neg(vf_sub(vf_mul(vf_load(s + i * step), scale), m));
        vf hi = vf_zero();
        sum = vf_add(sum, lo);
        if (i + 1 < n) {
            hi = vf_exp_neg(vf_sub(vf_mul(vf_load(s + (i + 1) * step), scale), m));
            sum = vf_add(sum, hi);
        }
        vi_store(p + i / 2 * step, vi_pair_bf16(lo, hi));
    }
#else
    for (int32_t i = 0; i < n; i++) {
        const vf x = vf_exp_neg(vf_sub(vf_mul(vf_load(s + i * step), scale), m));
        sum = vf_add(sum, x);
        vf_store(p + i * step, x);
    }
#endif
    return sum;
}

#endif
