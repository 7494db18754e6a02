/* check/roof_avx512.c - ceilings with 512-bit vectors. */
#include "check/roof.h"

#include <immintrin.h>

#define CHAINS(X)                                                                                  \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

int roof_fma_avx512(int64_t n, double *flops)
{
    __m512 one = _mm512_set1_ps(1.0f);
#define START(i) __m512 a##i = _mm512_set1_ps((float)(i));
    CHAINS(START)
#undef START
    for (int64_t k = 0; k < n; k++) {
        /* opaque to the compiler, so that the chains stay what they are */
        __asm__ volatile("" : "+v"(one));
#define STEP(i) a##i = _mm512_fmadd_ps(one, one, a##i);
        CHAINS(STEP)
#undef STEP
    }
    int ok = 1;
    float lane[16];
#define CHECK(i)                                                                                   \
    _mm512_storeu_ps(lane, a##i);                                                                  \
    for (int l = 0; l < 16; l++) {                                                                 \
        ok = ok && lane[l] == (float)(i) + (float)n;                                               \
    }
    CHAINS(CHECK)
#undef CHECK
    *flops = (double)n * 16 * 16 * 2;
    return ok;
}

uint64_t roof_read_avx512(const uint8_t *p, size_t n)
{
    __m512i a = _mm512_setzero_si512();
    __m512i b = a;
    __m512i c = a;
    __m512i d = a;
    for (size_t i = 0; i < n; i += 256) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
    }
    a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
    uint64_t w[8];
    _mm512_storeu_si512(w, a);
    return w[0] ^ w[1] ^ w[2] ^ w[3] ^ w[4] ^ w[5] ^ w[6] ^ w[7];
}

void roof_copy_avx512(uint8_t *to, const uint8_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += 256) {
        const __m512i a = _mm512_loadu_si512(from + i);
        const __m512i b = _mm512_loadu_si512(from + i + 64);
        const __m512i c = _mm512_loadu_si512(from + i + 128);
        const __m512i d = _mm512_loadu_si512(from + i + 192);
        _mm512_stream_si512((__m512i *)(void *)(to + i), a);
        _mm512_stream_si512((__m512i *)(void *)(to + i + 64), b);
        _mm512_stream_si512((__m512i *)(void *)(to + i + 128), c);
        _mm512_stream_si512((__m512i *)(void *)(to + i + 192), d);
    }
    _mm_sfence();
}
