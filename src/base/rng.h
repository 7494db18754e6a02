/* rng.h: random numbers as a function of (seed, stream, counter).
 *
 * Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"). The
 * same three numbers give the same value on every machine, in any order, from any thread; there is
 * no state to share. One counter yields one value: rng_u64, rng_uniform and rng_normal of the same
 * counter are functions of the same bits. rng_normal goes through libm, so its last bit may differ
 * between hosts; the integers and rng_uniform do not.
 *
 * `rng` is a cursor over the counters of one stream for code that draws in sequence. */
#ifndef BASE_RNG_H
#define BASE_RNG_H

#include <math.h>
#include <stdint.h>

/* The four words of block (c0, c1) under key. */
static inline void rng_block(uint64_t key, uint64_t c0, uint64_t c1, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key;
    uint32_t k1 = (uint32_t)(key >> 32);
    uint32_t x0 = (uint32_t)c0;
    uint32_t x1 = (uint32_t)(c0 >> 32);
    uint32_t x2 = (uint32_t)c1;
    uint32_t x3 = (uint32_t)(c1 >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)x0 * UINT32_C(0xD2511F53);
        const uint64_t p1 = (uint64_t)x2 * UINT32_C(0xCD9E8D57);
        x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)p1;
        x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)p0;
        k0 += UINT32_C(0x9E3779B9);
        k1 += UINT32_C(0xBB67AE85);
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}

/* Uniform over all 64-bit values. */
static inline uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t counter)
{
    uint32_t w[4];
    rng_block(seed, counter, stream, w);
    return (uint64_t)w[1] << 32 | w[0];
}

/* Uniform in [0, 1), a multiple of 2^-53. */
static inline double rng_uniform(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return (double)(rng_u64(seed, stream, counter) >> 11) * 0x1p-53;
}

/* Uniform over [0, n), n > 0; the bias is below n / 2^64. */
static inline uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t counter, uint64_t n)
{
    __extension__ typedef unsigned __int128 u128;
    return (uint64_t)((u128)rng_u64(seed, stream, counter) * n >> 64);
}

/* Standard normal (Box-Muller over the two halves of a block); |value| < 8.6. */
static inline double rng_normal(uint64_t seed, uint64_t stream, uint64_t counter)
{
    uint32_t w[4];
    rng_block(seed, counter, stream, w);
    const uint64_t a = (uint64_t)w[1] << 32 | w[0];
    const uint64_t b = (uint64_t)w[3] << 32 | w[2];
    const double u = (double)((a >> 11) + 1) * 0x1p-53; /* (0, 1] */
    const double v = (double)(b >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586477 * v);
}

typedef struct rng {
    uint64_t seed;
    uint64_t stream;
    uint64_t counter;
} rng;

static inline rng rng_init(uint64_t seed, uint64_t stream)
{
    const rng r = {seed, stream, 0};
    return r;
}

static inline uint64_t rng_next(rng *r)
{
    return rng_u64(r->seed, r->stream, r->counter++);
}

static inline uint64_t rng_next_below(rng *r, uint64_t n)
{
    return rng_below(r->seed, r->stream, r->counter++, n);
}

/* Uniform over lo..hi, both included; lo <= hi. */
static inline int64_t rng_next_range(rng *r, int64_t lo, int64_t hi)
{
    const uint64_t n = (uint64_t)hi - (uint64_t)lo + 1;
    const uint64_t x = n == 0 ? rng_next(r) : rng_next_below(r, n);
    return (int64_t)((uint64_t)lo + x);
}

static inline double rng_next_uniform(rng *r)
{
    return rng_uniform(r->seed, r->stream, r->counter++);
}

static inline double rng_next_normal(rng *r)
{
    return rng_normal(r->seed, r->stream, r->counter++);
}

#endif
