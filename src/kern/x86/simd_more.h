/* kern/x86/simd_more.h - operations on the vectors of simd.h that the index and cache kernels need
 * besides: comparisons, lanes moved to the front by a mask, narrowing stores.
 *
 * Include simd.h first. Same rules: static inline, the emulated form gives the bits of the hardware.
 * vpack is whatever a kind of vector needs to move chosen lanes to the front.
 */
#ifndef KERN_X86_SIMD_MORE_H
#define KERN_X86_SIMD_MORE_H

#include <string.h>

#include "kern/x86/simd.h"

SIMD_FN int32_t max_of_8(__m256i x)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

/* Of words none of which is negative. */
SIMD_FN int32_t min_of_8_words(__m128i x)
{
    return _mm_cvtsi128_si32(_mm_minpos_epu16(x)) & 0xFFFF;
}

#if SIMD_LANES == 8

#include "kern/x86/simd_pack8.h"

typedef __m256i vpack;

SIMD_FN void vf_storeu_where(float *p, vm m, vf x)
{
    _mm256_maskstore_ps(p, _mm256_castps_si256(m), x);
}

SIMD_FN vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

SIMD_FN vm vm_ge(vf a, vf b)
{
    return _mm256_cmp_ps(a, b, _CMP_GE_OQ);
}

SIMD_FN vm vm_eq(vf a, vf b)
{
    return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
}

/* Lane i: x[order[i]], orders below SIMD_LANES. */
SIMD_FN vf vf_permute(vf x, vi order)
{
    return _mm256_permutevar8x32_ps(x, order);
}

SIMD_FN vi vi_iota(void)
{
    return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
}

SIMD_FN vi vi_loadu(const void *p)
{
    return _mm256_loadu_si256(p);
}

SIMD_FN void vi_storeu(void *p, vi x)
{
    _mm256_storeu_si256(p, x);
}

/* An aligned store that goes past the caches. */
SIMD_FN void vi_stream(void *p, vi x)
{
    _mm256_stream_si256(p, x);
}

/* Bit i: lane i is negative. */
SIMD_FN uint32_t vi_sign_bits(vi x)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(x));
}

/* c + 1 in the lanes of m. */
SIMD_FN vi vi_count(vi c, vm m)
{
    return _mm256_sub_epi32(c, _mm256_castps_si256(m));
}

SIMD_FN vpack vpack_of(uint32_t bits)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)simd_pack8[bits]));
}

/* Stores the chosen lanes, in order, at p; the rest of the SIMD_LANES elements there is overwritten. */
SIMD_FN void vf_pack_storeu(float *p, vpack k, vf x)
{
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, k));
}

SIMD_FN void vi_pack_storeu(int32_t *p, vpack k, vi x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permutevar8x32_epi32(x, k));
}

SIMD_FN vm vm_lt_i(vi a, vi b)
{
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a));
}

SIMD_FN vi vi_select(vm m, vi yes, vi no)
{
    return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m));
}

SIMD_FN vi vi_max(vi a, vi b)
{
    return _mm256_max_epi32(a, b);
}

/* The largest lane. */
SIMD_FN int32_t vi_max_lane(vi x)
{
    return max_of_8(x);
}

/* The smaller and the larger of each pair of signed 16-bit words. */
SIMD_FN vi vi_min16(vi a, vi b)
{
    return _mm256_min_epi16(a, b);
}

SIMD_FN vi vi_max16(vi a, vi b)
{
    return _mm256_max_epi16(a, b);
}

/* Four vectors as bytes in order, each byte a's value (0..127) with the sign bit of s. */
SIMD_FN void vi_store4_signed_u8(void *p, const vi a[4], const vi s[4])
{
    /* lanes of a result: a0-3 b0-3 c0-3 d0-3 | a4-7 ...; saturation keeps the sign */
    const __m256i v = _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]),
                                         _mm256_packs_epi32(a[2], a[3]));
    const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(s[0], s[1]),
                                            _mm256_packs_epi32(s[2], s[3]));
    const __m256i x = _mm256_or_si256(v, _mm256_and_si256(sign, _mm256_set1_epi8((char)0x80)));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(p, _mm256_permutevar8x32_epi32(x, order));
}

/* 2 * SIMD_LANES values of 0..65535 as 16-bit words. */
SIMD_FN void vi_store2_u16(void *p, vi a, vi b)
{
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}

/* A vi seen as 2 * SIMD_LANES words of 16 bits. */
SIMD_FN vi vi_add16(vi a, vi b)
{
    return _mm256_add_epi16(a, b);
}

SIMD_FN vi vi_sub16(vi a, vi b)
{
    return _mm256_sub_epi16(a, b);
}

SIMD_FN vi vi_sll16(vi a, int n)
{
    return _mm256_slli_epi16(a, n);
}

SIMD_FN vi vi_srl16(vi a, int n)
{
    return _mm256_srli_epi16(a, n);
}

/* The bits of b that a lacks. */
SIMD_FN vi vi_andnot(vi a, vi b)
{
    return _mm256_andnot_si256(a, b);
}

/* a - b, 0 where b is larger; unsigned. */
SIMD_FN vi vi_sub16_to_0(vi a, vi b)
{
    return _mm256_subs_epu16(a, b);
}

/* The lower half of the product. */
SIMD_FN vi vi_mul16(vi a, vi b)
{
    return _mm256_mullo_epi16(a, b);
}

/* Byte i mod 16 of `table` for every byte i of x, which is below 128. */
SIMD_FN vi vi_lookup_u8(__m128i table, vi x)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x);
}

/* Whether a word of a is below that of b, signed. */
SIMD_FN int vi_any_lt16(vi a, vi b)
{
    const __m256i lt = _mm256_cmpgt_epi16(b, a);
    return !_mm256_testz_si256(lt, lt);
}

/* The smallest word; none is negative. */
SIMD_FN int32_t vi_min_word(vi x)
{
    return min_of_8_words(_mm_min_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

/* Words of 0..127 of a, then of b, as bytes with the signs of the words of sa, then of sb; `stream`: past
 * the caches, p aligned to the vector. */
SIMD_FN void vi_store2_signed_u8(void *p, vi a, vi b, vi sa, vi sb, const int stream)
{
    const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(sa, sb), _mm256_set1_epi8((char)0x80));
    const __m256i x = _mm256_or_si256(_mm256_packus_epi16(a, b), sign);
    const __m256i y = _mm256_permute4x64_epi64(x, 0xd8);
    if (stream) {
        _mm256_stream_si256(p, y);
    } else {
        _mm256_storeu_si256(p, y);
    }
}

/* 2 * SIMD_LANES bytes, sign-extended to words. */
SIMD_FN vi vi_loadu_i8(const void *p)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
}

/* Word by word: where no bit of x & mask is set word x & 7 of `table`, which holds eight words repeated in
 * every 128 bits; elsewhere y. */
SIMD_FN vi vi_lookup8_where_clear(vi x, vi mask, vi table, vi y)
{
    const __m256i i = _mm256_and_si256(x, _mm256_set1_epi16(7));
    const __m256i byte = _mm256_add_epi16(_mm256_mullo_epi16(i, _mm256_set1_epi16(0x0202)),
                                          _mm256_set1_epi16(0x0100));
    const __m256i clear = _mm256_cmpeq_epi16(_mm256_and_si256(x, mask), _mm256_setzero_si256());
    return _mm256_blendv_epi8(y, _mm256_shuffle_epi8(table, byte), clear);
}

/* Words of 0..255 of a, then of b, as bytes. */
SIMD_FN void vi_store2_u8(void *p, vi a, vi b)
{
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
}

/* Words as the upper halves of 32-bit values. */
SIMD_FN void vi_store_high(void *p, vi a)
{
    __m256i *v = p;
    const __m256i lo = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a));
    const __m256i hi = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1));
    _mm256_storeu_si256(v, _mm256_slli_epi32(lo, 16));
    _mm256_storeu_si256(v + 1, _mm256_slli_epi32(hi, 16));
}

#elif defined(SIMD_EMULATE)

typedef uint32_t vpack;

SIMD_FN void vf_storeu_where(float *p, vm m, vf x)
{
    _mm256_maskstore_ps(p, _mm256_castps_si256(mask8(m)), x.lo);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(mask8(m >> 8)), x.hi);
}

SIMD_FN vf vf_min(vf a, vf b)
{
    return vf_pair(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}

SIMD_FN vm vm_ge(vf a, vf b)
{
    return vm_pair(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}

SIMD_FN vm vm_eq(vf a, vf b)
{
    return vm_pair(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}

SIMD_FN vi vi_iota(void)
{
    return vi_pair(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                   _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
}

SIMD_FN void vi_storeu(void *p, vi x)
{
    __m256i *v = p;
    _mm256_storeu_si256(v, x.lo);
    _mm256_storeu_si256(v + 1, x.hi);
}

SIMD_FN void vi_stream(void *p, vi x)
{
    vi_storeu(p, x);
}

SIMD_FN vf vf_permute(vf x, vi order)
{
    float from[16];
    int32_t at[16];
    float to[16];
    vf_storeu(from, x);
    vi_storeu(at, order);
    for (int i = 0; i < 16; i++) {
        to[i] = from[at[i]];
    }
    return vf_loadu(to);
}

SIMD_FN uint32_t vi_sign_bits(vi x)
{
    return vm_pair(_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi));
}

SIMD_FN vi vi_count(vi c, vm m)
{
    return vi_pair(_mm256_sub_epi32(c.lo, _mm256_castps_si256(mask8(m))),
                   _mm256_sub_epi32(c.hi, _mm256_castps_si256(mask8(m >> 8))));
}

SIMD_FN vpack vpack_of(uint32_t bits)
{
    return bits;
}

/* Like the hardware's compress and a full store: the lanes behind the chosen ones become 0. */
SIMD_FN void vi_pack_storeu(int32_t *p, vpack k, vi x)
{
    int32_t from[16];
    int32_t to[16] = {0};
    int n = 0;
    vi_storeu(from, x);
    for (int i = 0; i < 16; i++) {
        if (k >> i & 1) {
            to[n++] = from[i];
        }
    }
    memcpy(p, to, sizeof to);
}

SIMD_FN void vf_pack_storeu(float *p, vpack k, vf x)
{
    vi_pack_storeu((int32_t *)(void *)p, k, vi_of_vf(x));
}

SIMD_FN vm vm_lt_i(vi a, vi b)
{
    return vm_pair(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)),
                   _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi)));
}

SIMD_FN vi vi_select(vm m, vi yes, vi no)
{
    return vi_of_vf(vf_select(m, vf_of_vi(yes), vf_of_vi(no)));
}

SIMD_FN vi vi_max(vi a, vi b)
{
    return vi_pair(_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi));
}

SIMD_FN int32_t vi_max_lane(vi x)
{
    return max_of_8(_mm256_max_epi32(x.lo, x.hi));
}

SIMD_FN vi vi_min16(vi a, vi b)
{
    return vi_pair(_mm256_min_epi16(a.lo, b.lo), _mm256_min_epi16(a.hi, b.hi));
}

SIMD_FN vi vi_max16(vi a, vi b)
{
    return vi_pair(_mm256_max_epi16(a.lo, b.lo), _mm256_max_epi16(a.hi, b.hi));
}

SIMD_FN void vi_store4_signed_u8(void *p, const vi a[4], const vi s[4])
{
    uint8_t *out = p;
    for (int j = 0; j < 4; j++) {
        int32_t x[16];
        int32_t sign[16];
        vi_storeu(x, a[j]);
        vi_storeu(sign, s[j]);
        for (int i = 0; i < 16; i++) {
            out[j * 16 + i] = (uint8_t)(x[i] | (sign[i] < 0 ? 0x80 : 0));
        }
    }
}

SIMD_FN void vi_store2_u16(void *p, vi a, vi b)
{
    __m256i *v = p;
    _mm256_storeu_si256(v, narrow16(a.lo, a.hi));
    _mm256_storeu_si256(v + 1, narrow16(b.lo, b.hi));
}

SIMD_FN vi vi_add16(vi a, vi b)
{
    return vi_pair(_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi));
}

SIMD_FN vi vi_sub16(vi a, vi b)
{
    return vi_pair(_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi));
}

SIMD_FN vi vi_sll16(vi a, int n)
{
    return vi_pair(_mm256_slli_epi16(a.lo, n), _mm256_slli_epi16(a.hi, n));
}

SIMD_FN vi vi_srl16(vi a, int n)
{
    return vi_pair(_mm256_srli_epi16(a.lo, n), _mm256_srli_epi16(a.hi, n));
}

SIMD_FN vi vi_andnot(vi a, vi b)
{
    return vi_pair(_mm256_andnot_si256(a.lo, b.lo), _mm256_andnot_si256(a.hi, b.hi));
}

SIMD_FN vi vi_sub16_to_0(vi a, vi b)
{
    return vi_pair(_mm256_subs_epu16(a.lo, b.lo), _mm256_subs_epu16(a.hi, b.hi));
}

SIMD_FN vi vi_mul16(vi a, vi b)
{
    return vi_pair(_mm256_mullo_epi16(a.lo, b.lo), _mm256_mullo_epi16(a.hi, b.hi));
}

SIMD_FN vi vi_lookup_u8(__m128i table, vi x)
{
    const __m256i t = _mm256_broadcastsi128_si256(table);
    return vi_pair(_mm256_shuffle_epi8(t, x.lo), _mm256_shuffle_epi8(t, x.hi));
}

SIMD_FN int vi_any_lt16(vi a, vi b)
{
    const __m256i lt =
        _mm256_or_si256(_mm256_cmpgt_epi16(b.lo, a.lo), _mm256_cmpgt_epi16(b.hi, a.hi));
    return !_mm256_testz_si256(lt, lt);
}

SIMD_FN int32_t vi_min_word(vi x)
{
    const __m256i m = _mm256_min_epi16(x.lo, x.hi);
    return min_of_8_words(_mm_min_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)));
}

SIMD_FN void vi_store2_signed_u8(void *p, vi a, vi b, vi sa, vi sb, const int stream)
{
    (void)stream;
    uint8_t *out = p;
    const vi v[2] = {a, b};
    const vi s[2] = {sa, sb};
    for (int j = 0; j < 2; j++) {
        uint16_t x[32];
        uint16_t sign[32];
        vi_storeu(x, v[j]);
        vi_storeu(sign, s[j]);
        for (int i = 0; i < 32; i++) {
            out[j * 32 + i] = (uint8_t)(x[i] | (sign[i] >> 8 & 0x80));
        }
    }
}

SIMD_FN vi vi_loadu_i8(const void *p)
{
    return vw_loadu_i8(p);
}

SIMD_FN vi vi_lookup8_where_clear(vi x, vi mask, vi table, vi y)
{
    return vw_lookup8_where_clear(x, mask, table, y);
}

SIMD_FN void vi_store2_u8(void *p, vi a, vi b)
{
    __m256i *v = p;
    _mm256_storeu_si256(v, _mm256_permute4x64_epi64(_mm256_packus_epi16(a.lo, a.hi), 0xd8));
    _mm256_storeu_si256(v + 1, _mm256_permute4x64_epi64(_mm256_packus_epi16(b.lo, b.hi), 0xd8));
}

SIMD_FN void vi_store_high(void *p, vi a)
{
    uint16_t from[32];
    uint32_t to[32];
    vi_storeu(from, a);
    for (int i = 0; i < 32; i++) {
        to[i] = (uint32_t)from[i] << 16;
    }
    memcpy(p, to, sizeof to);
}

#else /* AVX-512 */

typedef __mmask16 vpack;

SIMD_FN void vf_storeu_where(float *p, vm m, vf x)
{
    _mm512_mask_storeu_ps(p, m, x);
}

SIMD_FN vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

SIMD_FN vm vm_ge(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}

SIMD_FN vm vm_eq(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}

SIMD_FN vf vf_permute(vf x, vi order)
{
    return _mm512_permutexvar_ps(order, x);
}

SIMD_FN vi vi_iota(void)
{
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

SIMD_FN void vi_storeu(void *p, vi x)
{
    _mm512_storeu_si512(p, x);
}

SIMD_FN void vi_stream(void *p, vi x)
{
    _mm512_stream_si512(p, x);
}

SIMD_FN uint32_t vi_sign_bits(vi x)
{
    return _cvtmask16_u32(_mm512_movepi32_mask(x));
}

SIMD_FN vi vi_count(vi c, vm m)
{
    return _mm512_mask_sub_epi32(c, m, c, _mm512_set1_epi32(-1));
}

SIMD_FN vpack vpack_of(uint32_t bits)
{
    return _cvtu32_mask16(bits);
}

/* Compress in a register and store all of it: compressing into memory is slow on some processors. */
SIMD_FN void vf_pack_storeu(float *p, vpack k, vf x)
{
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(k, x));
}

SIMD_FN void vi_pack_storeu(int32_t *p, vpack k, vi x)
{
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(k, x));
}

SIMD_FN vm vm_lt_i(vi a, vi b)
{
    return _mm512_cmplt_epi32_mask(a, b);
}

SIMD_FN vi vi_select(vm m, vi yes, vi no)
{
    return _mm512_mask_blend_epi32(m, no, yes);
}

SIMD_FN vi vi_max(vi a, vi b)
{
    return _mm512_max_epi32(a, b);
}

SIMD_FN int32_t vi_max_lane(vi x)
{
    return max_of_8(_mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
}

SIMD_FN vi vi_min16(vi a, vi b)
{
    return _mm512_min_epi16(a, b);
}

SIMD_FN vi vi_max16(vi a, vi b)
{
    return _mm512_max_epi16(a, b);
}

SIMD_FN void vi_store4_signed_u8(void *p, const vi a[4], const vi s[4])
{
    __m128i *v = p;
    SIMD_UNROLL
    for (int j = 0; j < 4; j++) {
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(s[j], 24), _mm512_set1_epi32(0x80));
        _mm_storeu_si128(v + j, _mm512_cvtepi32_epi8(_mm512_or_si512(a[j], sign)));
    }
}

SIMD_FN void vi_store2_u16(void *p, vi a, vi b)
{
    __m256i *v = p;
    _mm256_storeu_si256(v, _mm512_cvtepi32_epi16(a));
    _mm256_storeu_si256(v + 1, _mm512_cvtepi32_epi16(b));
}

SIMD_FN vi vi_add16(vi a, vi b)
{
    return _mm512_add_epi16(a, b);
}

SIMD_FN vi vi_sub16(vi a, vi b)
{
    return _mm512_sub_epi16(a, b);
}

SIMD_FN vi vi_sll16(vi a, int n)
{
    return _mm512_slli_epi16(a, n);
}

SIMD_FN vi vi_srl16(vi a, int n)
{
    return _mm512_srli_epi16(a, n);
}

SIMD_FN vi vi_andnot(vi a, vi b)
{
    return _mm512_andnot_si512(a, b);
}

SIMD_FN vi vi_sub16_to_0(vi a, vi b)
{
    return _mm512_subs_epu16(a, b);
}

SIMD_FN vi vi_mul16(vi a, vi b)
{
    return _mm512_mullo_epi16(a, b);
}

SIMD_FN vi vi_lookup_u8(__m128i table, vi x)
{
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x);
}

SIMD_FN int vi_any_lt16(vi a, vi b)
{
    return _cvtmask32_u32(_mm512_cmplt_epi16_mask(a, b)) != 0;
}

SIMD_FN int32_t vi_min_word(vi x)
{
    const __m256i m = _mm256_min_epi16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return min_of_8_words(_mm_min_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)));
}

SIMD_FN void vi_store2_signed_u8(void *p, vi a, vi b, vi sa, vi sb, const int stream)
{
    /* 0xd8: a bit of the second where the third has one, else of the first */
    const __m512i x = _mm512_ternarylogic_epi32(_mm512_packus_epi16(a, b), _mm512_packs_epi16(sa, sb),
                                                _mm512_set1_epi8((char)0x80), 0xd8);
    const __m512i y = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x);
    if (stream) {
        _mm512_stream_si512(p, y);
    } else {
        _mm512_storeu_si512(p, y);
    }
}

SIMD_FN vi vi_loadu_i8(const void *p)
{
    return vw_loadu_i8(p);
}

SIMD_FN vi vi_lookup8_where_clear(vi x, vi mask, vi table, vi y)
{
    return vw_lookup8_where_clear(x, mask, table, y);
}

SIMD_FN void vi_store2_u8(void *p, vi a, vi b)
{
    __m256i *v = p;
    _mm256_storeu_si256(v, _mm512_cvtepi16_epi8(a));
    _mm256_storeu_si256(v + 1, _mm512_cvtepi16_epi8(b));
}

SIMD_FN void vi_store_high(void *p, vi a)
{
    __m512i *v = p;
    const __m512i lo = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a));
    const __m512i hi = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1));
    _mm512_storeu_si512(v, _mm512_slli_epi32(lo, 16));
    _mm512_storeu_si512(v + 1, _mm512_slli_epi32(hi, 16));
}

#endif

#endif
