/* x86/gemm_vec.h - the operations on vectors of simd.h that products need besides: bytes, the two
 * halves of bf16 pairs, sums over lanes.
 *
 * Include simd_more.h first. Same rules: static inline, the emulated form gives the bits of the
 * hardware. "Within 128 bits" is meant where an operation's name says zip or shuffle.
 */
#ifndef KERN_X86_GEMM_VEC_H
#define KERN_X86_GEMM_VEC_H

#include "kern/x86/simd_more.h"

/* The even elements of a vector of bf16, as f32; the odd ones. */
SIMD_FN vf vf_even_bf16(vi x)
{
    return vf_of_vi(vi_sll(x, 16));
}

SIMD_FN vf vf_odd_bf16(vi x)
{
    return vf_of_vi(vi_and(x, vi_set1((int32_t)0xffff0000u)));
}

#if SIMD_LANES == 8 || defined(SIMD_EMULATE)

/* Per 128 bits: the four sums over its lanes, (0 + 2) + (1 + 3). */
SIMD_FN __m256 sum_quads(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

SIMD_FN __m256i zip_lo_bytes(__m256i a, __m256i b)
{
    return _mm256_unpacklo_epi8(a, b);
}

SIMD_FN __m256i zip_hi_bytes(__m256i a, __m256i b)
{
    return _mm256_unpackhi_epi8(a, b);
}

#endif

#if SIMD_LANES == 8

SIMD_FN vi vi_of_128(__m128i x)
{
    return _mm256_broadcastsi128_si256(x);
}

/* The sums over all lanes: within 128 bits as above, then halves onto halves. */
SIMD_FN __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    const __m256 s = sum_quads(a, b, c, d);
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Orders the quarters of 128 bits so that zipping with zeros gives words in order. */
SIMD_FN vi vb_before_zip(vi x)
{
    return _mm256_permute4x64_epi64(x, 0xd8);
}

SIMD_FN vi vb_zip_lo(vi a, vi b)
{
    return zip_lo_bytes(a, b);
}

SIMD_FN vi vb_zip_hi(vi a, vi b)
{
    return zip_hi_bytes(a, b);
}

SIMD_FN vi vb_set1(int x)
{
    return _mm256_set1_epi8((char)x);
}

SIMD_FN vi vb_zero(void)
{
    return _mm256_setzero_si256();
}

SIMD_FN vi vi_xor(vi a, vi b)
{
    return _mm256_xor_si256(a, b);
}

/* All bits of the bytes that are 0. */
SIMD_FN vi vb_is_zero(vi x)
{
    return _mm256_cmpeq_epi8(x, _mm256_setzero_si256());
}

SIMD_FN vi vb_max(vi a, vi b)
{
    return _mm256_max_epu8(a, b);
}

SIMD_FN int vb_any_equal(vi a, vi b)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) != 0;
}

/* Byte i: table[index i & 15]; the table is repeated in every 128 bits. */
SIMD_FN vi vb_shuffle(vi table, vi index)
{
    return _mm256_shuffle_epi8(table, index);
}

SIMD_FN vi vw_add(vi a, vi b)
{
    return _mm256_add_epi16(a, b);
}

SIMD_FN vi vw_sll4(vi a)
{
    return _mm256_slli_epi16(a, 4);
}

#elif defined(SIMD_EMULATE)

SIMD_FN vi vi_of_128(__m128i x)
{
    return vi_pair(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x));
}

SIMD_FN __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    const __m256 s =
        _mm256_add_ps(sum_quads(a.lo, b.lo, c.lo, d.lo), sum_quads(a.hi, b.hi, c.hi, d.hi));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

SIMD_FN vi vb_before_zip(vi x)
{
    const __m256i lo = _mm256_permute4x64_epi64(x.lo, 0xd8);
    const __m256i hi = _mm256_permute4x64_epi64(x.hi, 0xd8);
    return vi_pair(_mm256_unpacklo_epi64(lo, hi), _mm256_unpackhi_epi64(lo, hi));
}

SIMD_FN vi vb_zip_lo(vi a, vi b)
{
    return vi_pair(zip_lo_bytes(a.lo, b.lo), zip_lo_bytes(a.hi, b.hi));
}

SIMD_FN vi vb_zip_hi(vi a, vi b)
{
    return vi_pair(zip_hi_bytes(a.lo, b.lo), zip_hi_bytes(a.hi, b.hi));
}

SIMD_FN vi vb_set1(int x)
{
    return vi_pair(_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x));
}

SIMD_FN vi vb_zero(void)
{
    return vi_set1(0);
}

SIMD_FN vi vi_xor(vi a, vi b)
{
    return vi_pair(_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi));
}

SIMD_FN vi vb_is_zero(vi x)
{
    const __m256i zero = _mm256_setzero_si256();
    return vi_pair(_mm256_cmpeq_epi8(x.lo, zero), _mm256_cmpeq_epi8(x.hi, zero));
}

SIMD_FN vi vb_max(vi a, vi b)
{
    return vi_pair(_mm256_max_epu8(a.lo, b.lo), _mm256_max_epu8(a.hi, b.hi));
}

SIMD_FN int vb_any_equal(vi a, vi b)
{
    return _mm256_movemask_epi8(
               _mm256_or_si256(_mm256_cmpeq_epi8(a.lo, b.lo), _mm256_cmpeq_epi8(a.hi, b.hi))) != 0;
}

/* The low bytes of the words of a, then of b; the high bytes. */
SIMD_FN vi vb_even_bytes(vi a, vi b)
{
    const vi low = vi_set1(0x00ff00ff);
    const vi x = vi_and(a, low);
    const vi y = vi_and(b, low);
    return vi_pair(_mm256_permute4x64_epi64(_mm256_packus_epi16(x.lo, x.hi), 0xd8),
                   _mm256_permute4x64_epi64(_mm256_packus_epi16(y.lo, y.hi), 0xd8));
}

SIMD_FN vi vb_odd_bytes(vi a, vi b)
{
    return vb_even_bytes(vi_pair(_mm256_srli_epi16(a.lo, 8), _mm256_srli_epi16(a.hi, 8)),
                         vi_pair(_mm256_srli_epi16(b.lo, 8), _mm256_srli_epi16(b.hi, 8)));
}

/* Byte i: byte x[i] & 127 of the 128 in t0 and t1. */
SIMD_FN vi vb_lookup128(vi t0, vi t1, vi x)
{
    uint8_t table[128];
    uint8_t byte[64];
    _mm256_storeu_si256((__m256i *)(void *)table, t0.lo);
    _mm256_storeu_si256((__m256i *)(void *)(table + 32), t0.hi);
    _mm256_storeu_si256((__m256i *)(void *)(table + 64), t1.lo);
    _mm256_storeu_si256((__m256i *)(void *)(table + 96), t1.hi);
    vi_storeu(byte, x);
    for (int i = 0; i < 64; i++) {
        byte[i] = table[byte[i] & 127];
    }
    return vi_loadu(byte);
}

SIMD_FN vi vb_shuffle(vi table, vi index)
{
    return vi_pair(_mm256_shuffle_epi8(table.lo, index.lo),
                   _mm256_shuffle_epi8(table.hi, index.hi));
}

#else /* AVX-512 */

SIMD_FN vi vi_of_128(__m128i x)
{
    return _mm512_broadcast_i32x4(x);
}

SIMD_FN __m128 vf_sum4(vf a, vf b, vf c, vf d)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 q =
        _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(q), _mm512_extractf32x8_ps(q, 1));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

SIMD_FN vi vb_before_zip(vi x)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
}

SIMD_FN vi vb_zip_lo(vi a, vi b)
{
    return _mm512_unpacklo_epi8(a, b);
}

SIMD_FN vi vb_zip_hi(vi a, vi b)
{
    return _mm512_unpackhi_epi8(a, b);
}

SIMD_FN vi vb_set1(int x)
{
    return _mm512_set1_epi8((char)x);
}

SIMD_FN vi vb_zero(void)
{
    return _mm512_setzero_si512();
}

SIMD_FN vi vi_xor(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}

SIMD_FN vi vb_is_zero(vi x)
{
    return _mm512_movm_epi8(_mm512_testn_epi8_mask(x, x));
}

SIMD_FN vi vb_max(vi a, vi b)
{
    return _mm512_max_epu8(a, b);
}

SIMD_FN int vb_any_equal(vi a, vi b)
{
    return _mm512_cmpeq_epi8_mask(a, b) != 0;
}

SIMD_FN vi vb_shuffle(vi table, vi index)
{
    return _mm512_shuffle_epi8(table, index);
}

#ifdef __AVX512VBMI__
/* 0, 2, 4, ... 126 */
SIMD_FN vi vb_iota2(void)
{
    uint8_t at[64];
    for (int i = 0; i < 64; i++) {
        at[i] = (uint8_t)(2 * i);
    }
    return vi_loadu(at);
}

SIMD_FN vi vb_even_bytes(vi a, vi b)
{
    return _mm512_permutex2var_epi8(a, vb_iota2(), b);
}

SIMD_FN vi vb_odd_bytes(vi a, vi b)
{
    return _mm512_permutex2var_epi8(a, vi_or(vb_iota2(), vb_set1(1)), b);
}

SIMD_FN vi vb_lookup128(vi t0, vi t1, vi x)
{
    return _mm512_permutex2var_epi8(t0, x, t1);
}
#endif

#endif

/* y[0 .. n) = s, or + s; NaN as the quiet one. */
SIMD_FN void put4(float *y, __m128 s, int32_t n, int first)
{
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float *at = n >= 4 ? y : part;
    if (n < 4) {
        memcpy(part, y, (size_t)n * sizeof *y);
    }
    if (!first) {
        s = _mm_add_ps(_mm_loadu_ps(at), s);
    }
    s = _mm_blendv_ps(s, _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000)), _mm_cmpunord_ps(s, s));
    _mm_storeu_ps(at, s);
    if (n < 4) {
        memcpy(y, part, (size_t)n * sizeof *y);
    }
}

#endif
