/* kern/x86/simd_quads.h - the lanes of vectors in quads, groups of four: sums inside them, and quads
 * exchanged between vectors.
 *
 * Include simd.h first. Same rules: static inline, the emulated form gives the bits of the hardware.
 */
#ifndef KERN_X86_SIMD_QUADS_H
#define KERN_X86_SIMD_QUADS_H

#include "kern/x86/simd.h"

enum { QUADS = SIMD_LANES / 4 }; /* of a vector */

/* Within each quad: the first two lanes of a, the first two of b; zip2_hi: the last two. */
SIMD_FN __m256 zip2_lo8(__m256 a, __m256 b)
{
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

SIMD_FN __m256 zip2_hi8(__m256 a, __m256 b)
{
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

#if SIMD_LANES == 8

SIMD_FN vf vf_zip2_lo(vf a, vf b)
{
    return zip2_lo8(a, b);
}

SIMD_FN vf vf_zip2_hi(vf a, vf b)
{
    return zip2_hi8(a, b);
}

/* Within each quad: lanes 0 and 2 of a, then those of b; odd: 1 and 3. */
SIMD_FN vf vf_even_lanes(vf a, vf b)
{
    return _mm256_shuffle_ps(a, b, 0x88);
}

SIMD_FN vf vf_odd_lanes(vf a, vf b)
{
    return _mm256_shuffle_ps(a, b, 0xdd);
}

/* Quads 0, 2 ... of a, then those of b; odd: 1, 3 ... */
SIMD_FN vf vf_even_quads(vf a, vf b)
{
    return _mm256_permute2f128_ps(a, b, 0x20);
}

SIMD_FN vf vf_odd_quads(vf a, vf b)
{
    return _mm256_permute2f128_ps(a, b, 0x31);
}

#elif defined(SIMD_EMULATE)

SIMD_FN vf vf_zip2_lo(vf a, vf b)
{
    return vf_pair(zip2_lo8(a.lo, b.lo), zip2_lo8(a.hi, b.hi));
}

SIMD_FN vf vf_zip2_hi(vf a, vf b)
{
    return vf_pair(zip2_hi8(a.lo, b.lo), zip2_hi8(a.hi, b.hi));
}

SIMD_FN vf vf_even_lanes(vf a, vf b)
{
    return vf_pair(_mm256_shuffle_ps(a.lo, b.lo, 0x88), _mm256_shuffle_ps(a.hi, b.hi, 0x88));
}

SIMD_FN vf vf_odd_lanes(vf a, vf b)
{
    return vf_pair(_mm256_shuffle_ps(a.lo, b.lo, 0xdd), _mm256_shuffle_ps(a.hi, b.hi, 0xdd));
}

SIMD_FN vf vf_even_quads(vf a, vf b)
{
    return vf_pair(_mm256_permute2f128_ps(a.lo, a.hi, 0x20),
                   _mm256_permute2f128_ps(b.lo, b.hi, 0x20));
}

SIMD_FN vf vf_odd_quads(vf a, vf b)
{
    return vf_pair(_mm256_permute2f128_ps(a.lo, a.hi, 0x31),
                   _mm256_permute2f128_ps(b.lo, b.hi, 0x31));
}

#else

SIMD_FN vf vf_zip2_lo(vf a, vf b)
{
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

SIMD_FN vf vf_zip2_hi(vf a, vf b)
{
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

SIMD_FN vf vf_even_lanes(vf a, vf b)
{
    return _mm512_shuffle_ps(a, b, 0x88);
}

SIMD_FN vf vf_odd_lanes(vf a, vf b)
{
    return _mm512_shuffle_ps(a, b, 0xdd);
}

SIMD_FN vf vf_even_quads(vf a, vf b)
{
    return _mm512_shuffle_f32x4(a, b, 0x88);
}

SIMD_FN vf vf_odd_quads(vf a, vf b)
{
    return _mm512_shuffle_f32x4(a, b, 0xdd);
}

#endif

/* Lane i of quad q: the four lanes of quad q of t[i] added, (0 + 2) + (1 + 3). */
SIMD_FN vf vf_add_quads(const vf t[4])
{
    const vf a = vf_add(vf_zip2_lo(t[0], t[1]), vf_zip2_hi(t[0], t[1]));
    const vf b = vf_add(vf_zip2_lo(t[2], t[3]), vf_zip2_hi(t[2], t[3]));
    return vf_add(vf_even_lanes(a, b), vf_odd_lanes(a, b));
}

/* Quad j of t[i] goes to quad i of t[j]. */
SIMD_FN void transpose_quads(vf t[QUADS])
{
#if SIMD_LANES == 16
    const vf even[2] = {vf_even_quads(t[0], t[1]), vf_even_quads(t[2], t[3])};
    const vf odd[2] = {vf_odd_quads(t[0], t[1]), vf_odd_quads(t[2], t[3])};
    t[0] = vf_even_quads(even[0], even[1]);
    t[1] = vf_even_quads(odd[0], odd[1]);
    t[2] = vf_odd_quads(even[0], even[1]);
    t[3] = vf_odd_quads(odd[0], odd[1]);
#else
    const vf even = vf_even_quads(t[0], t[1]);
    t[1] = vf_odd_quads(t[0], t[1]);
    t[0] = even;
#endif
}

#endif
