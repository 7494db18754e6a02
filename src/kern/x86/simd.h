/* kern/x86/simd.h - the vectors that x86 kernels are written in.
 *
 * A file that includes this defines SIMD_LANES first: 8 (AVX2, FMA, F16C) or 16 (AVX-512 F, BW, DQ,
 * VL; bf16 products also BF16). Types: vf = SIMD_LANES floats, vi = SIMD_LANES 32-bit integers, vm =
 * one flag per lane, vw = the 16-bit words of one vi. With SIMD_EMULATE the 16-lane types are pairs
 * of AVX2 vectors and every operation gives the bits the hardware gives, so that a kernel written in
 * these words is tested on a machine that lacks AVX-512. The product never defines SIMD_EMULATE.
 *
 * vf_exp and vf_log perform the operations of kern/exp.h lane by lane and give the same bits.
 *
 * Everything is static inline: a file with wide flags may leave no external inline function behind.
 * Loads and stores without `u` in their name are aligned to the vector.
 */
#ifndef KERN_X86_SIMD_H
#define KERN_X86_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include "kern/exp.h"

#define SIMD_FN static inline __attribute__((always_inline, unused))

/* Before a loop with a constant count: unroll all of it, so that arrays become registers. */
#if defined(__clang__)
#define SIMD_UNROLL _Pragma("unroll")
#else
#define SIMD_UNROLL _Pragma("GCC unroll 32")
#endif

#if !defined(SIMD_LANES)
#error "define SIMD_LANES as 8 or 16 before including simd.h"
#elif SIMD_LANES == 8
#include "kern/x86/simd_avx2.h"
#elif SIMD_LANES == 16 && defined(SIMD_EMULATE)
#include "kern/x86/simd_emulate.h"
#elif SIMD_LANES == 16
#include "kern/x86/simd_avx512.h"
#else
#error "SIMD_LANES is 8 or 16"
#endif

SIMD_FN vf vf_set_bits(uint32_t u)
{
    return vf_of_vi(vi_set1((int32_t)u));
}

SIMD_FN vf vf_neg_inf(void)
{
    return vf_set_bits(0xff800000u);
}

/* Lanes [from, to) of a vector whose lane 0 has number `base`. */
SIMD_FN vm vm_range(int32_t base, int32_t from, int32_t to)
{
    const int32_t lo = from - base < 0 ? 0 : from - base > SIMD_LANES ? SIMD_LANES : from - base;
    const int32_t hi = to - base < 0 ? 0 : to - base > SIMD_LANES ? SIMD_LANES : to - base;
    const uint32_t below_hi = (1u << hi) - 1u;
    const uint32_t below_lo = (1u << lo) - 1u;
    return vm_from_bits(below_hi & ~below_lo);
}

SIMD_FN int vm_any(vm m)
{
    return vm_bits(m) != 0;
}

/* bf16_round of num/fmt.h: nearest even; a NaN keeps sign and upper payload and becomes quiet. */
SIMD_FN vf vf_round_bf16(vf x)
{
    const vi u = vi_of_vf(x);
    const vi odd = vi_and(vi_srl(u, 16), vi_set1(1));
    const vi upper = vi_set1((int32_t)0xffff0000u);
    const vi near = vi_and(vi_add(vi_add(u, odd), vi_set1(0x7fff)), upper);
    const vi quiet = vi_and(vi_or(u, vi_set1(0x00400000)), upper);
    return vf_select(vm_nan(x), vf_of_vi(quiet), vf_of_vi(near));
}

/* SIMD_LANES bf16, rounded so. */
SIMD_FN void vf_storeu_bf16(void *p, vf x)
{
    vi_storeu_upper(p, vi_of_vf(vf_round_bf16(x)));
}

/* kexp for x <= 0 or NaN; the same bits as kexp there. */
SIMD_FN vf vf_exp_neg(vf x)
{
    const vf magic = vf_set1(KEXP_MAGIC);
    const vf n = vf_sub(vf_fma(x, vf_set1(KEXP_LOG2E), magic), magic);
    vf r = vf_fma(n, vf_set1(-KEXP_LN2_HI), x);
    r = vf_fma(n, vf_set1(-KEXP_LN2_LO), r);
    vf p = vf_fma(vf_set1(KEXP_C6), r, vf_set1(KEXP_C5));
    p = vf_fma(p, r, vf_set1(KEXP_C4));
    p = vf_fma(p, r, vf_set1(KEXP_C3));
    p = vf_fma(p, r, vf_set1(KEXP_C2));
    p = vf_fma(p, vf_mul(r, r), r);
    const vi e = vi_sll(vi_add(vi_trunc(n), vi_set1(127)), 23);
    const vf y = vf_mul(vf_add(p, vf_set1(1.0f)), vf_of_vi(e));
    return vf_zero_where(vm_lt(x, vf_set1(KEXP_MIN)), y);
}

/* kexp for any x. */
SIMD_FN vf vf_exp(vf x)
{
    vf y = vf_exp_neg(x);
    y = vf_select(vm_lt(vf_set1(KEXP_MAX), x), vf_set_bits(0x7f800000u), y);
    return vf_select(vm_nan(x), x, y);
}

/* klog for normal x > 0. */
SIMD_FN vf vf_log(vf x)
{
    const vi u = vi_of_vf(x);
    const vi e = vi_sra(vi_sub(u, vi_set1((int32_t)KLOG_SQRT_HALF_BITS)), 23);
    const vf m = vf_sub(vf_of_vi(vi_sub(u, vi_sll(e, 23))), vf_set1(1.0f));
    const vf z = vf_mul(m, m);
    vf p = vf_fma(vf_set1(KLOG_C8), m, vf_set1(KLOG_C7));
    p = vf_fma(p, m, vf_set1(KLOG_C6));
    p = vf_fma(p, m, vf_set1(KLOG_C5));
    p = vf_fma(p, m, vf_set1(KLOG_C4));
    p = vf_fma(p, m, vf_set1(KLOG_C3));
    p = vf_fma(p, m, vf_set1(KLOG_C2));
    p = vf_fma(p, m, vf_set1(KLOG_C1));
    p = vf_fma(p, m, vf_set1(KLOG_C0));
    const vf fe = vf_from_vi(e);
    vf y = vf_fma(vf_mul(m, z), p, vf_mul(fe, vf_set1(KEXP_LN2_LO)));
    y = vf_fma(vf_set1(-0.5f), z, y);
    return vf_fma(fe, vf_set1(KEXP_LN2_HI), vf_add(m, y));
}

/* merge_node_weights of kern/exp.h, one node per lane. */
typedef struct vf_node {
    vf w_a, w_b, lse;
    vm has_a, has_b;
} vf_node;

SIMD_FN vf_node vf_node_weights(vf lse_a, vf lse_b)
{
    const vf inf = vf_set_bits(0x7f800000u);
    const vf ninf = vf_neg_inf();
    const vf a = vf_select(vm_lt(lse_a, inf), lse_a, ninf);
    const vf b = vf_select(vm_lt(lse_b, inf), lse_b, ninf);
    vf_node n;
    n.has_a = vm_lt(ninf, a);
    n.has_b = vm_lt(ninf, b);
    const vf m = vf_max(a, b);
    const vf w_a = vf_exp(vf_sub(a, m));
    const vf w_b = vf_exp(vf_sub(b, m));
    const vf sum = vf_add(w_a, w_b);
    const vf inv = vf_div(vf_set1(1.0f), sum);
    n.w_a = vf_mul(w_a, inv);
    n.w_b = vf_mul(w_b, inv);
    n.lse = vf_select(vm_and(n.has_a, n.has_b), vf_add(m, vf_log(sum)), vf_select(n.has_a, a, b));
    return n;
}

/* merge_node_value of kern/exp.h: a side that is not there is not read into the sum. */
SIMD_FN vf vf_node_value(const vf_node *n, vf a, vf b)
{
    vf y = vf_fma(n->w_b, b, vf_mul(n->w_a, a));
    y = vf_select(n->has_b, y, a);
    y = vf_select(n->has_a, y, b);
    return vf_zero_where(vm_not(vm_or(n->has_a, n->has_b)), y);
}

/* Eight rows of eight 32-bit values -> their transpose. */
SIMD_FN void transpose8(__m256 r[8])
{
    const __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
    const __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
    const __m256 a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
    const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
    const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
    const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    r[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
    r[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
    r[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
    r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    r[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
    r[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
    r[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
    r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
}

#endif
