/* hash.h: XXH3, 64 and 128 bits, seed 0, whole buffers and streams.
 *
 * Not for adversaries: where a collision would matter the data is compared too. Values are numbers,
 * the same on every host; what is written to a file is the little-endian form. */
#ifndef BASE_HASH_H
#define BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct hash128 {
    uint64_t lo;
    uint64_t hi;
} hash128;

static inline uint64_t hash_xx64(const void *data, size_t n)
{
    return XXH3_64bits(data, n);
}

static inline hash128 hash_xx128(const void *data, size_t n)
{
    const XXH128_hash_t h = XXH3_128bits(data, n);
    const hash128 r = {h.low64, h.high64};
    return r;
}

static inline bool hash128_equal(hash128 a, hash128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

/* A stream: init, any number of adds, then either result; the pieces do not matter. One stream has
 * one width. */
typedef XXH3_state_t hash_state; /* 64-byte aligned, 576 bytes */

static inline void hash_init64(hash_state *s)
{
    XXH3_64bits_reset(s);
}

static inline void hash_add64(hash_state *s, const void *data, size_t n)
{
    XXH3_64bits_update(s, data, n);
}

static inline uint64_t hash_get64(const hash_state *s)
{
    return XXH3_64bits_digest(s);
}

static inline void hash_init128(hash_state *s)
{
    XXH3_128bits_reset(s);
}

static inline void hash_add128(hash_state *s, const void *data, size_t n)
{
    XXH3_128bits_update(s, data, n);
}

static inline hash128 hash_get128(const hash_state *s)
{
    const XXH128_hash_t h = XXH3_128bits_digest(s);
    const hash128 r = {h.low64, h.high64};
    return r;
}

#endif
