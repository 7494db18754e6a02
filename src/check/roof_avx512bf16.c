/* check/roof_avx512bf16.c - the rate of dot products of bf16 pairs. */
#include "check/roof.h"

#include <immintrin.h>

#define CHAINS(X)                                                                                  \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

/* Each step adds 1 * 1 + 1 * 1 to every lane: exact. */
int roof_dot_avx512bf16(int64_t n, double *flops)
{
    __m512i bits = _mm512_set1_epi16(0x3F80); /* 1.0 */
#define START(i) __m512 a##i = _mm512_set1_ps((float)(i));
    CHAINS(START)
#undef START
    for (int64_t k = 0; k < n; k++) {
        /* opaque to the compiler, so that the chains stay what they are */
        __asm__ volatile("" : "+v"(bits));
        const __m512bh one = (__m512bh)bits;
#define STEP(i) a##i = _mm512_dpbf16_ps(a##i, one, one);
        CHAINS(STEP)
#undef STEP
    }
    int ok = 1;
    float lane[16];
#define CHECK(i)                                                                                   \
    _mm512_storeu_ps(lane, a##i);                                                                  \
    for (int l = 0; l < 16; l++) {                                                                 \
        ok = ok && lane[l] == (float)(i) + 2.0f * (float)n;                                        \
    }
    CHAINS(CHECK)
#undef CHECK
    *flops = (double)n * 16 * 32 * 2;
    return ok;
}
