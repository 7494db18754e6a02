/* check/roof_avx2.c - ceilings with 256-bit vectors. */
#include "check/roof.h"

#include <immintrin.h>

/* Twelve chains cover the latency of two fused multiply-adds a cycle. Adding 1 keeps every sum
 * exact. */
#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

int roof_fma_avx2(int64_t n, double *flops)
{
    __m256 one = _mm256_set1_ps(1.0f);
#define START(i) __m256 a##i = _mm256_set1_ps((float)(i));
    CHAINS(START)
#undef START
    for (int64_t k = 0; k < n; k++) {
        /* opaque to the compiler, so that the chains stay what they are */
        __asm__ volatile("" : "+x"(one));
#define STEP(i) a##i = _mm256_fmadd_ps(one, one, a##i);
        CHAINS(STEP)
#undef STEP
    }
    int ok = 1;
    float lane[8];
#define CHECK(i)                                                                                   \
    _mm256_storeu_ps(lane, a##i);                                                                  \
    for (int l = 0; l < 8; l++) {                                                                  \
        ok = ok && lane[l] == (float)(i) + (float)n;                                               \
    }
    CHAINS(CHECK)
#undef CHECK
    *flops = (double)n * 12 * 8 * 2;
    return ok;
}

uint64_t roof_read_avx2(const uint8_t *p, size_t n)
{
    __m256i a = _mm256_setzero_si256();
    __m256i b = a;
    __m256i c = a;
    __m256i d = a;
    for (size_t i = 0; i < n; i += 128) {
        const __m256i *v = (const __m256i *)(const void *)(p + i);
        a = _mm256_xor_si256(a, _mm256_loadu_si256(v));
        b = _mm256_xor_si256(b, _mm256_loadu_si256(v + 1));
        c = _mm256_xor_si256(c, _mm256_loadu_si256(v + 2));
        d = _mm256_xor_si256(d, _mm256_loadu_si256(v + 3));
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    uint64_t w[4];
    _mm256_storeu_si256((__m256i *)(void *)w, a);
    return w[0] ^ w[1] ^ w[2] ^ w[3];
}

void roof_copy_avx2(uint8_t *to, const uint8_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += 128) {
        const __m256i *v = (const __m256i *)(const void *)(from + i);
        __m256i *o = (__m256i *)(void *)(to + i);
        const __m256i a = _mm256_loadu_si256(v);
        const __m256i b = _mm256_loadu_si256(v + 1);
        const __m256i c = _mm256_loadu_si256(v + 2);
        const __m256i d = _mm256_loadu_si256(v + 3);
        _mm256_stream_si256(o, a);
        _mm256_stream_si256(o + 1, b);
        _mm256_stream_si256(o + 2, c);
        _mm256_stream_si256(o + 3, d);
    }
    _mm_sfence();
}
