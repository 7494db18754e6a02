/* kern/x86/simd_emulate.h - the 16-lane vectors of simd.h as pairs of AVX2 vectors, for tests on a
 * machine without AVX-512. Include simd.h with SIMD_EMULATE.
 *
 * Each operation gives the bits of the instruction it stands for. The bf16 product is two fused
 * multiply-adds per lane, the odd element first, with subnormal inputs read as 0 and subnormal
 * results written as 0.
 */
#ifndef KERN_X86_SIMD_EMULATE_H
#define KERN_X86_SIMD_EMULATE_H

typedef struct vf {
    __m256 lo, hi; /* lanes 0-7, 8-15 */
} vf;

typedef struct vi {
    __m256i lo, hi;
} vi;

typedef vi vw;       /* 32 words of 16 bits */
typedef uint32_t vm; /* bit i: lane i       */

SIMD_FN vf vf_pair(__m256 lo, __m256 hi)
{
    const vf r = {lo, hi};
    return r;
}

SIMD_FN vi vi_pair(__m256i lo, __m256i hi)
{
    const vi r = {lo, hi};
    return r;
}

/* Bits 0-7 as a mask of 8 lanes. */
SIMD_FN __m256 mask8(uint32_t bits)
{
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hit = _mm256_and_si256(_mm256_set1_epi32((int32_t)bits), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane));
}

SIMD_FN vm vm_pair(__m256 lo, __m256 hi)
{
    return (uint32_t)_mm256_movemask_ps(lo) | (uint32_t)_mm256_movemask_ps(hi) << 8;
}

SIMD_FN vf vf_zero(void)
{
    return vf_pair(_mm256_setzero_ps(), _mm256_setzero_ps());
}

SIMD_FN vf vf_set1(float x)
{
    return vf_pair(_mm256_set1_ps(x), _mm256_set1_ps(x));
}

SIMD_FN vf vf_bcast(const float *p)
{
    return vf_set1(*p);
}

SIMD_FN vf vf_load(const float *p)
{
    return vf_pair(_mm256_load_ps(p), _mm256_load_ps(p + 8));
}

SIMD_FN vf vf_loadu(const float *p)
{
    return vf_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}

SIMD_FN void vf_store(float *p, vf x)
{
    _mm256_store_ps(p, x.lo);
    _mm256_store_ps(p + 8, x.hi);
}

SIMD_FN void vf_storeu(float *p, vf x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

SIMD_FN void vf_store_where(float *p, vm m, vf x)
{
    _mm256_maskstore_ps(p, _mm256_castps_si256(mask8(m)), x.lo);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(mask8(m >> 8)), x.hi);
}

SIMD_FN vf vf_add(vf a, vf b)
{
    return vf_pair(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}

SIMD_FN vf vf_sub(vf a, vf b)
{
    return vf_pair(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}

SIMD_FN vf vf_mul(vf a, vf b)
{
    return vf_pair(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}

SIMD_FN vf vf_div(vf a, vf b)
{
    return vf_pair(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}

/* a * b + c, rounded once. */
SIMD_FN vf vf_fma(vf a, vf b, vf c)
{
    return vf_pair(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}

/* a > b ? a : b, so b where either is NaN. */
SIMD_FN vf vf_max(vf a, vf b)
{
    return vf_pair(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}

SIMD_FN vf vf_select(vm m, vf yes, vf no)
{
    return vf_pair(_mm256_blendv_ps(no.lo, yes.lo, mask8(m)),
                   _mm256_blendv_ps(no.hi, yes.hi, mask8(m >> 8)));
}

SIMD_FN vf vf_zero_where(vm m, vf x)
{
    return vf_pair(_mm256_andnot_ps(mask8(m), x.lo), _mm256_andnot_ps(mask8(m >> 8), x.hi));
}

SIMD_FN vf vf_of_vi(vi a)
{
    return vf_pair(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi));
}

SIMD_FN vi vi_of_vf(vf a)
{
    return vi_pair(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
}

SIMD_FN vf vf_from_vi(vi a)
{
    return vf_pair(_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi));
}

SIMD_FN vi vi_trunc(vf a)
{
    return vi_pair(_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi));
}

SIMD_FN vm vm_lt(vf a, vf b)
{
    return vm_pair(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
}

SIMD_FN vm vm_nan(vf a)
{
    return vm_pair(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q),
                   _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

SIMD_FN vm vm_and(vm a, vm b)
{
    return a & b;
}

SIMD_FN vm vm_or(vm a, vm b)
{
    return a | b;
}

SIMD_FN vm vm_not(vm a)
{
    return ~a & 0xffffu;
}

SIMD_FN uint32_t vm_bits(vm m)
{
    return m;
}

SIMD_FN vm vm_from_bits(uint32_t bits)
{
    return bits & 0xffffu;
}

SIMD_FN vi vi_set1(int32_t x)
{
    return vi_pair(_mm256_set1_epi32(x), _mm256_set1_epi32(x));
}

SIMD_FN vi vi_bcast(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return vi_set1(x);
}

SIMD_FN vi vi_load(const void *p)
{
    const __m256i *v = p;
    return vi_pair(_mm256_load_si256(v), _mm256_load_si256(v + 1));
}

SIMD_FN vi vi_loadu(const void *p)
{
    const __m256i *v = p;
    return vi_pair(_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1));
}

SIMD_FN void vi_store(void *p, vi x)
{
    __m256i *v = p;
    _mm256_store_si256(v, x.lo);
    _mm256_store_si256(v + 1, x.hi);
}

SIMD_FN vi vi_add(vi a, vi b)
{
    return vi_pair(_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi));
}

SIMD_FN vi vi_sub(vi a, vi b)
{
    return vi_pair(_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi));
}

SIMD_FN vi vi_and(vi a, vi b)
{
    return vi_pair(_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi));
}

SIMD_FN vi vi_or(vi a, vi b)
{
    return vi_pair(_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi));
}

SIMD_FN vi vi_sll(vi a, int n)
{
    return vi_pair(_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n));
}

SIMD_FN vi vi_srl(vi a, int n)
{
    return vi_pair(_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n));
}

SIMD_FN vi vi_sra(vi a, int n)
{
    return vi_pair(_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n));
}

/* 16 lanes of bits < 2^16 to 16 words in order. */
SIMD_FN __m256i narrow16(__m256i lo, __m256i hi)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
}

/* Stores 16 words: the upper half of each lane. */
SIMD_FN void vi_storeu_upper(void *p, vi x)
{
    _mm256_storeu_si256(p, narrow16(_mm256_srli_epi32(x.lo, 16), _mm256_srli_epi32(x.hi, 16)));
}

/* 8 bf16, widened. */
SIMD_FN __m256 widen8(__m128i w)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
}

/* 16 bf16 in memory, widened. */
SIMD_FN vf vf_loadu_bf16(const void *p)
{
    const __m128i *v = p;
    return vf_pair(widen8(_mm_loadu_si128(v)), widen8(_mm_loadu_si128(v + 1)));
}

/* 16 e4m3 in memory as value * 2^-8, exact; the NaN codes give NaN with nan_safe, else 1.875. */
SIMD_FN vf vf_loadu_e4m3(const void *p, int nan_safe)
{
    const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    const __m256i mag = _mm256_and_si256(_mm256_slli_epi16(w, 7), _mm256_set1_epi16(0x3f80));
    __m256i h = _mm256_or_si256(mag, _mm256_and_si256(w, _mm256_set1_epi16((short)0x8000)));
    if (nan_safe) {
        const __m256i nan = _mm256_cmpeq_epi16(mag, _mm256_set1_epi16(0x3f80));
        h = _mm256_or_si256(h, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    }
    return vf_pair(_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
}

/* 32 bytes in memory, sign-extended to words. */
SIMD_FN vw vw_loadu_i8(const void *p)
{
    const __m128i *v = p;
    return vi_pair(_mm256_cvtepi8_epi16(_mm_loadu_si128(v)),
                   _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1)));
}

SIMD_FN vw vw_set1(int16_t x)
{
    return vi_pair(_mm256_set1_epi16(x), _mm256_set1_epi16(x));
}

SIMD_FN vw vw_add(vw a, vw b)
{
    return vi_pair(_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi));
}

SIMD_FN vw vw_sll4(vw a)
{
    return vi_pair(_mm256_slli_epi16(a.lo, 4), _mm256_slli_epi16(a.hi, 4));
}

SIMD_FN __m256i merge_bits8(__m256i mask, __m256i a, __m256i b)
{
    return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}

/* (a & mask) | (b & ~mask) */
SIMD_FN vw vw_merge_bits(vw mask, vw a, vw b)
{
    return vi_pair(merge_bits8(mask.lo, a.lo, b.lo), merge_bits8(mask.hi, a.hi, b.hi));
}

SIMD_FN __m256i lookup8(__m256i x, __m256i mask, __m256i table, __m256i y)
{
    const __m256i i = _mm256_and_si256(x, _mm256_set1_epi16(7));
    const __m256i byte = _mm256_add_epi16(_mm256_mullo_epi16(i, _mm256_set1_epi16(0x0202)),
                                          _mm256_set1_epi16(0x0100));
    const __m256i clear = _mm256_cmpeq_epi16(_mm256_and_si256(x, mask), _mm256_setzero_si256());
    return _mm256_blendv_epi8(y, _mm256_shuffle_epi8(table, byte), clear);
}

/* Where no bit of x & mask is set: table word x & 7; elsewhere y. `table` holds 8 words, repeated in
 * every 128 bits. */
SIMD_FN vw vw_lookup8_where_clear(vw x, vw mask, vw table, vw y)
{
    return vi_pair(lookup8(x.lo, mask.lo, table.lo, y.lo), lookup8(x.hi, mask.hi, table.hi, y.hi));
}

/* Words 0-3 of a and b interleaved, within each 128 bits: a0 b0 a1 b1 a2 b2 a3 b3; hi: words 4-7. */
SIMD_FN vw vw_zip_lo(vw a, vw b)
{
    return vi_pair(_mm256_unpacklo_epi16(a.lo, b.lo), _mm256_unpacklo_epi16(a.hi, b.hi));
}

SIMD_FN vw vw_zip_hi(vw a, vw b)
{
    return vi_pair(_mm256_unpackhi_epi16(a.lo, b.lo), _mm256_unpackhi_epi16(a.hi, b.hi));
}

/* Subnormals to zero of the same sign. */
SIMD_FN __m256 flush8(__m256 x)
{
    const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
    const __m256 mag = _mm256_andnot_ps(sign, x);
    const __m256 tiny = _mm256_cmp_ps(mag, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return _mm256_andnot_ps(_mm256_andnot_ps(sign, tiny), x);
}

SIMD_FN __m256 dot_bf16_8(__m256 acc, __m256i a, __m256i b)
{
    const __m256i odd = _mm256_set1_epi32((int32_t)0xffff0000u);
    const __m256 a1 = flush8(_mm256_castsi256_ps(_mm256_and_si256(a, odd)));
    const __m256 b1 = flush8(_mm256_castsi256_ps(_mm256_and_si256(b, odd)));
    const __m256 a0 = flush8(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)));
    const __m256 b0 = flush8(_mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
    const __m256 t = flush8(_mm256_fmadd_ps(a1, b1, flush8(acc)));
    return flush8(_mm256_fmadd_ps(a0, b0, t));
}

/* acc + a[2i+1] * b[2i+1], then + a[2i] * b[2i], per lane i; bf16 words; subnormals count as 0. */
SIMD_FN vf vf_dot_bf16(vf acc, vi a, vi b)
{
    return vf_pair(dot_bf16_8(acc.lo, a.lo, b.lo), dot_bf16_8(acc.hi, a.hi, b.hi));
}

/* Lane i: bf16 bits of x[i], nearest even; subnormals become 0; NaN stays NaN. */
SIMD_FN __m256i round_bf16_8(__m256 x)
{
    const __m256i u = _mm256_castps_si256(flush8(x));
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, even), _mm256_set1_epi32(0x7fff)), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, quiet, nan);
}

/* Word 2i: lo[i], word 2i+1: hi[i], rounded to bf16 (nearest even; subnormals become 0). */
SIMD_FN vi vi_pair_bf16(vf lo, vf hi)
{
    const __m256i a = _mm256_slli_epi32(round_bf16_8(hi.lo), 16);
    const __m256i b = _mm256_slli_epi32(round_bf16_8(hi.hi), 16);
    return vi_pair(_mm256_or_si256(round_bf16_8(lo.lo), a),
                   _mm256_or_si256(round_bf16_8(lo.hi), b));
}

/* Words 0-15: lo rounded to bf16 (as above), words 16-31: hi. */
SIMD_FN vw vw_join_bf16(vf lo, vf hi)
{
    return vi_pair(narrow16(round_bf16_8(lo.lo), round_bf16_8(lo.hi)),
                   narrow16(round_bf16_8(hi.lo), round_bf16_8(hi.hi)));
}

#endif
