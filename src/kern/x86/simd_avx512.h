/* kern/x86/simd_avx512.h - the 16-lane vectors of simd.h in AVX-512. Include simd.h. */
#ifndef KERN_X86_SIMD_AVX512_H
#define KERN_X86_SIMD_AVX512_H

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vw; /* 32 words of 16 bits */
typedef __mmask16 vm;

SIMD_FN vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

SIMD_FN vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}

SIMD_FN vf vf_bcast(const float *p)
{
    return _mm512_set1_ps(*p);
}

SIMD_FN vf vf_load(const float *p)
{
    return _mm512_load_ps(p);
}

SIMD_FN vf vf_loadu(const float *p)
{
    return _mm512_loadu_ps(p);
}

SIMD_FN void vf_store(float *p, vf x)
{
    _mm512_store_ps(p, x);
}

SIMD_FN void vf_storeu(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}

SIMD_FN void vf_store_where(float *p, vm m, vf x)
{
    _mm512_mask_store_ps(p, m, x);
}

SIMD_FN vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

SIMD_FN vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

SIMD_FN vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

SIMD_FN vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

/* a * b + c, rounded once. */
SIMD_FN vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* a > b ? a : b, so b where either is NaN. */
SIMD_FN vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

SIMD_FN vf vf_select(vm m, vf yes, vf no)
{
    return _mm512_mask_blend_ps(m, no, yes);
}

SIMD_FN vf vf_zero_where(vm m, vf x)
{
    return _mm512_maskz_mov_ps(_knot_mask16(m), x);
}

SIMD_FN vf vf_of_vi(vi a)
{
    return _mm512_castsi512_ps(a);
}

SIMD_FN vi vi_of_vf(vf a)
{
    return _mm512_castps_si512(a);
}

SIMD_FN vf vf_from_vi(vi a)
{
    return _mm512_cvtepi32_ps(a);
}

SIMD_FN vi vi_trunc(vf a)
{
    return _mm512_cvttps_epi32(a);
}

SIMD_FN vm vm_lt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}

SIMD_FN vm vm_nan(vf a)
{
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}

SIMD_FN vm vm_and(vm a, vm b)
{
    return _kand_mask16(a, b);
}

SIMD_FN vm vm_or(vm a, vm b)
{
    return _kor_mask16(a, b);
}

SIMD_FN vm vm_not(vm a)
{
    return _knot_mask16(a);
}

SIMD_FN uint32_t vm_bits(vm m)
{
    return _cvtmask16_u32(m);
}

SIMD_FN vm vm_from_bits(uint32_t bits)
{
    return _cvtu32_mask16(bits);
}

SIMD_FN vi vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}

SIMD_FN vi vi_bcast(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm512_set1_epi32(x);
}

SIMD_FN vi vi_load(const void *p)
{
    return _mm512_load_si512(p);
}

SIMD_FN vi vi_loadu(const void *p)
{
    return _mm512_loadu_si512(p);
}

SIMD_FN void vi_store(void *p, vi x)
{
    _mm512_store_si512(p, x);
}

SIMD_FN vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}

SIMD_FN vi vi_sub(vi a, vi b)
{
    return _mm512_sub_epi32(a, b);
}

SIMD_FN vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}

SIMD_FN vi vi_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}

SIMD_FN vi vi_sll(vi a, int n)
{
    return _mm512_slli_epi32(a, (unsigned)n);
}

SIMD_FN vi vi_srl(vi a, int n)
{
    return _mm512_srli_epi32(a, (unsigned)n);
}

SIMD_FN vi vi_sra(vi a, int n)
{
    return _mm512_srai_epi32(a, (unsigned)n);
}

/* Stores 16 words: the upper half of each lane. */
SIMD_FN void vi_storeu_upper(void *p, vi x)
{
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}

/* 16 bf16 in memory, widened. */
SIMD_FN vf vf_loadu_bf16(const void *p)
{
    const __m256i w = _mm256_loadu_si256(p);
    return vf_of_vi(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
}

/* 16 e4m3 in memory as value * 2^-8, exact; the NaN codes give NaN with nan_safe, else 1.875. */
SIMD_FN vf vf_loadu_e4m3(const void *p, int nan_safe)
{
    const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    const __m256i mag = _mm256_and_si256(_mm256_slli_epi16(w, 7), _mm256_set1_epi16(0x3f80));
    __m256i h = _mm256_or_si256(mag, _mm256_and_si256(w, _mm256_set1_epi16((short)0x8000)));
    if (nan_safe) {
        const __mmask16 nan = _mm256_cmpeq_epi16_mask(mag, _mm256_set1_epi16(0x3f80));
        h = _mm256_or_si256(h, _mm256_maskz_set1_epi16(nan, 0x7e00));
    }
    return _mm512_cvtph_ps(h);
}

/* 32 bytes in memory, sign-extended to words. */
SIMD_FN vw vw_loadu_i8(const void *p)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
}

SIMD_FN vw vw_set1(int16_t x)
{
    return _mm512_set1_epi16(x);
}

SIMD_FN vw vw_add(vw a, vw b)
{
    return _mm512_add_epi16(a, b);
}

SIMD_FN vw vw_sll4(vw a)
{
    return _mm512_slli_epi16(a, 4);
}

/* (a & mask) | (b & ~mask) */
SIMD_FN vw vw_merge_bits(vw mask, vw a, vw b)
{
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

/* Where no bit of x & mask is set: table word x & 7; elsewhere y. `table` holds 8 words, repeated in
 * every 128 bits. */
SIMD_FN vw vw_lookup8_where_clear(vw x, vw mask, vw table, vw y)
{
    return _mm512_mask_permutexvar_epi16(y, _mm512_testn_epi16_mask(x, mask), x, table);
}

/* Words 0-3 of a and b interleaved, within each 128 bits: a0 b0 a1 b1 a2 b2 a3 b3; hi: words 4-7. */
SIMD_FN vw vw_zip_lo(vw a, vw b)
{
    return _mm512_unpacklo_epi16(a, b);
}

SIMD_FN vw vw_zip_hi(vw a, vw b)
{
    return _mm512_unpackhi_epi16(a, b);
}

#ifdef __AVX512BF16__
/* acc + a[2i+1] * b[2i+1], then + a[2i] * b[2i], per lane i; bf16 words; subnormals count as 0. */
SIMD_FN vf vf_dot_bf16(vf acc, vi a, vi b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

/* Word 2i: lo[i], word 2i+1: hi[i], rounded to bf16 (nearest even; subnormals become 0). */
SIMD_FN vi vi_pair_bf16(vf lo, vf hi)
{
    const __m256i a = (__m256i)_mm512_cvtneps_pbh(lo);
    const __m256i b = (__m256i)_mm512_cvtneps_pbh(hi);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* Words 0-15: lo rounded to bf16 (as above), words 16-31: hi. */
SIMD_FN vw vw_join_bf16(vf lo, vf hi)
{
    return (vw)_mm512_cvtne2ps_pbh(hi, lo);
}
#endif

#endif
