/* kern/exp.h - the exp and log of every softmax and merge, and the one merge node.
 *
 * libm differs between hosts and versions, so these are written out: each is a fixed sequence of IEEE f32
 * operations and fused multiply-adds. A SIMD form that performs the same sequence per element gives the
 * same bits; x86/simd.h holds those forms and kvspan check compares them over the whole input range.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_EXP_H
#define KVS_KERN_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define KEXP_FN static __host__ __device__ inline
#else
#define KEXP_FN static inline
#endif

/* Constants shared with the SIMD forms. */
#define KEXP_LOG2E 1.44269504088896341f
#define KEXP_LN2_HI 0.693145751953125f      /* 17 bits: n * hi is exact for |n| < 256 */
#define KEXP_LN2_LO 1.42860682030941723e-6f
#define KEXP_MAGIC 12582912.0f              /* 1.5 * 2^23: adding it rounds to an integer, nearest even */
#define KEXP_MIN -87.0f                     /* below: 0 */
#define KEXP_MAX 88.0f                      /* above: +inf; never met in a softmax */
#define KEXP_C2 0.5f
#define KEXP_C3 0.16666518f
#define KEXP_C4 0.041666206f
#define KEXP_C5 0.008368954f
#define KEXP_C6 0.0013950599f

#define KLOG_SQRT_HALF_BITS 0x3f3504f3u
#define KLOG_C0 0.3333331f
#define KLOG_C1 -0.24999987f
#define KLOG_C2 0.20002231f
#define KLOG_C3 -0.16669261f
#define KLOG_C4 0.14218563f
#define KLOG_C5 -0.123840995f
#define KLOG_C6 0.11873486f
#define KLOG_C7 -0.11791594f
#define KLOG_C8 0.06916363f

KEXP_FN float kexp_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

KEXP_FN uint32_t kexp_ubits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* e^x within 2 ulp for x in [-87, 88]; exactly 1 at 0; 0 below -87 and at -inf; +inf above 88. NaN -> NaN. */
KEXP_FN float kexp(float x)
{
    if (!(x == x))
        return x;
    if (x < KEXP_MIN)
        return 0.0f;
    if (x > KEXP_MAX)
        return (float)INFINITY;
    float n = fmaf(x, KEXP_LOG2E, KEXP_MAGIC) - KEXP_MAGIC;
    float r = fmaf(n, -KEXP_LN2_HI, x);
    r = fmaf(n, -KEXP_LN2_LO, r);
    float p = fmaf(KEXP_C6, r, KEXP_C5);
    p = fmaf(p, r, KEXP_C4);
    p = fmaf(p, r, KEXP_C3);
    p = fmaf(p, r, KEXP_C2);
    p = fmaf(p, r * r, r);
    /* n is in [-126, 127], so 2^n is normal and the product neither underflows nor overflows */
    int32_t e = (int32_t)n;
    return (p + 1.0f) * kexp_bits((uint32_t)(e + 127) << 23);
}

/* ln x within 2 ulp (absolute 1e-7 near 1) for normal x > 0; exactly 0 at 1. */
KEXP_FN float klog(float x)
{
    uint32_t u = kexp_ubits(x);
    /* x = 2^e * m, m in [sqrt(1/2), sqrt(2)) */
    int32_t e = (int32_t)(u - KLOG_SQRT_HALF_BITS) >> 23;
    float m = kexp_bits(u - ((uint32_t)e << 23)) - 1.0f;
    float z = m * m;
    float p = fmaf(KLOG_C8, m, KLOG_C7);
    p = fmaf(p, m, KLOG_C6);
    p = fmaf(p, m, KLOG_C5);
    p = fmaf(p, m, KLOG_C4);
    p = fmaf(p, m, KLOG_C3);
    p = fmaf(p, m, KLOG_C2);
    p = fmaf(p, m, KLOG_C1);
    p = fmaf(p, m, KLOG_C0);
    float fe = (float)e;
    float y = fmaf(m * z, p, fe * KEXP_LN2_LO);
    y = fmaf(-0.5f, z, y);
    return fmaf(fe, KEXP_LN2_HI, m + y);
}

/* The weights of a merge node: out = w_b * out_b + (w_a * out_a), the product rounded first, then one fma.
 * A weight of 0 with lse -inf means: do not read that side. */
typedef struct merge_weight {
    float w_a, w_b; /* normalised: w_a + w_b = 1 up to rounding */
    float lse;      /* of the result */
    int take;       /* 0: blend; 1: copy a; 2: copy b; 3: identity (0, -inf) */
} merge_weight;

KEXP_FN float merge_clean_lse(float lse)
{
    return lse < (float)INFINITY ? lse : -(float)INFINITY; /* NaN compares false */
}

KEXP_FN merge_weight merge_node_weights(float lse_a, float lse_b)
{
    merge_weight r;
    float a = merge_clean_lse(lse_a);
    float b = merge_clean_lse(lse_b);
    int has_a = a > -(float)INFINITY;
    int has_b = b > -(float)INFINITY;
    r.w_a = has_a ? 1.0f : 0.0f;
    r.w_b = has_b ? 1.0f : 0.0f;
    r.take = has_a ? (has_b ? 0 : 1) : (has_b ? 2 : 3);
    r.lse = has_a ? a : b;
    if (r.take != 0)
        return r;
    float m = a > b ? a : b;
    float w_a = kexp(a - m);
    float w_b = kexp(b - m);
    float sum = w_a + w_b;
    float inv = 1.0f / sum;
    r.w_a = w_a * inv;
    r.w_b = w_b * inv;
    r.lse = m + klog(sum);
    return r;
}

/* One element of a merge node. */
KEXP_FN float merge_node_value(merge_weight w, float out_a, float out_b)
{
    switch (w.take) {
    case 1:
        return out_a;
    case 2:
        return out_b;
    case 3:
        return 0.0f;
    default:
        return fmaf(w.w_b, out_b, w.w_a * out_a);
    }
}

#endif
