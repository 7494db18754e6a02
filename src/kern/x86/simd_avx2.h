/* kern/x86/simd_avx2.h - the 8-lane vectors of simd.h in AVX2, FMA and F16C. Include simd.h. */
#ifndef KERN_X86_SIMD_AVX2_H
#define KERN_X86_SIMD_AVX2_H

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm; /* all bits of a lane set, or none */

SIMD_FN vf vf_zero(void)
{
    return _mm256_setzero_ps();
}

SIMD_FN vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}

/* One float in memory to all lanes. */
SIMD_FN vf vf_bcast(const float *p)
{
    return _mm256_broadcast_ss(p);
}

SIMD_FN vf vf_load(const float *p)
{
    return _mm256_load_ps(p);
}

SIMD_FN vf vf_loadu(const float *p)
{
    return _mm256_loadu_ps(p);
}

SIMD_FN void vf_store(float *p, vf x)
{
    _mm256_store_ps(p, x);
}

SIMD_FN void vf_storeu(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}

SIMD_FN void vf_store_where(float *p, vm m, vf x)
{
    _mm256_maskstore_ps(p, _mm256_castps_si256(m), x);
}

SIMD_FN vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

SIMD_FN vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

SIMD_FN vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

SIMD_FN vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

/* a * b + c, rounded once. */
SIMD_FN vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* a > b ? a : b, so b where either is NaN. */
SIMD_FN vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

SIMD_FN vf vf_select(vm m, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, m);
}

SIMD_FN vf vf_zero_where(vm m, vf x)
{
    return _mm256_andnot_ps(m, x);
}

SIMD_FN vf vf_of_vi(vi a)
{
    return _mm256_castsi256_ps(a);
}

SIMD_FN vi vi_of_vf(vf a)
{
    return _mm256_castps_si256(a);
}

SIMD_FN vf vf_from_vi(vi a)
{
    return _mm256_cvtepi32_ps(a);
}

SIMD_FN vi vi_trunc(vf a)
{
    return _mm256_cvttps_epi32(a);
}

SIMD_FN vm vm_lt(vf a, vf b)
{
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}

SIMD_FN vm vm_nan(vf a)
{
    return _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
}

SIMD_FN vm vm_and(vm a, vm b)
{
    return _mm256_and_ps(a, b);
}

SIMD_FN vm vm_or(vm a, vm b)
{
    return _mm256_or_ps(a, b);
}

SIMD_FN vm vm_not(vm a)
{
    return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
}

SIMD_FN uint32_t vm_bits(vm m)
{
    return (uint32_t)_mm256_movemask_ps(m);
}

SIMD_FN vm vm_from_bits(uint32_t bits)
{
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hit = _mm256_and_si256(_mm256_set1_epi32((int32_t)bits), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane));
}

SIMD_FN vi vi_set1(int32_t x)
{
    return _mm256_set1_epi32(x);
}

SIMD_FN vi vi_load(const void *p)
{
    return _mm256_load_si256(p);
}

SIMD_FN void vi_store(void *p, vi x)
{
    _mm256_store_si256(p, x);
}

SIMD_FN vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}

SIMD_FN vi vi_sub(vi a, vi b)
{
    return _mm256_sub_epi32(a, b);
}

SIMD_FN vi vi_and(vi a, vi b)
{
    return _mm256_and_si256(a, b);
}

SIMD_FN vi vi_or(vi a, vi b)
{
    return _mm256_or_si256(a, b);
}

SIMD_FN vi vi_sll(vi a, int n)
{
    return _mm256_slli_epi32(a, n);
}

SIMD_FN vi vi_srl(vi a, int n)
{
    return _mm256_srli_epi32(a, n);
}

SIMD_FN vi vi_sra(vi a, int n)
{
    return _mm256_srai_epi32(a, n);
}

/* Stores 8 words: the upper half of each lane. */
SIMD_FN void vi_storeu_upper(void *p, vi x)
{
    const __m256i w = _mm256_srli_epi32(x, 16);
    _mm_storeu_si128(p,
                     _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

/* 8 bf16 in memory, widened. */
SIMD_FN vf vf_loadu_bf16(const void *p)
{
    const __m128i w = _mm_loadu_si128(p);
    return vf_of_vi(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
}

/* 8 e4m3 in memory as value * 2^-8, exact; the NaN codes give NaN with nan_safe, else 1.875. */
SIMD_FN vf vf_loadu_e4m3(const void *p, int nan_safe)
{
    const __m128i w = _mm_cvtepi8_epi16(_mm_loadl_epi64(p));
    const __m128i mag = _mm_and_si128(_mm_slli_epi16(w, 7), _mm_set1_epi16(0x3f80));
    __m128i h = _mm_or_si128(mag, _mm_and_si128(w, _mm_set1_epi16((short)0x8000)));
    if (nan_safe) {
        const __m128i nan = _mm_cmpeq_epi16(mag, _mm_set1_epi16(0x3f80));
        h = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    }
    return _mm256_cvtph_ps(h);
}

#endif
