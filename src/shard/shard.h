/* shard/shard.h - who owns which token: every ownership formula of the project, once.
 *
 * A cache is cut by token position over N ranks with interleave I: owner(pos) = (pos / I) mod N. A
 * rank stores the tokens it owns densely, in ascending position, in pages of 64; 64 mod I = 0. A
 * lane is (pos / I) mod 8: the unit of the deterministic reduction. With N dividing 8 a rank owns
 * 8 / N whole lanes; local lane j of rank r is lane j * N + r. Where N does not divide 8 a rank has
 * one lane: all its keys in ascending position (equal to tolerance, not to the bit). The attended
 * keys of a lane are cut into segments of 2048.
 *
 * Integers in, integers out: no allocation, no threads, no failure. Arguments are validated by
 * topo.h; here positions and lengths are >= 0, 0 <= rank < n. Each kind of index is its own type,
 * so that a global position cannot be used where a local index is meant. All arithmetic is 64-bit.
 *
 * Read by the C compiler, the C++ compiler and nvcc.
 */
#ifndef KVS_SHARD_SHARD_H
#define KVS_SHARD_SHARD_H

#include <stdint.h>
#include "kvspan/config.h"

#ifdef __CUDACC__
#define SHARD_FN static __host__ __device__ inline
#else
#define SHARD_FN static inline
#endif

/* Token index in the sequence. */
typedef struct kvs_pos {
    int64_t v;
} kvs_pos;

/* Index inside one rank's shard of a sequence. */
typedef struct kvs_local {
    int64_t v;
} kvs_local;

/* Row of a pool: page * 64 + offset. */
typedef struct kvs_slot {
    int64_t v;
} kvs_slot;

typedef struct shard_geom {
    int32_t n;    /* DCP size, 1..8              */
    int32_t i;    /* interleave: 1, 2, 4, ... 64 */
    int32_t rank; /* 0 .. n-1                    */
} shard_geom;

enum {
    SHARD_TILE = 64,               /* attended keys of a tile of the deterministic reduction   */
    SHARD_SEGMENT = 2048,          /* attended keys of a segment                               */
    SHARD_NO_SLOT = -1,            /* another rank's token, or no token: skipped               */
    SHARD_BAD_SLOT = -2,           /* an id outside the table or the pool: skipped and counted */
    SHARD_MAX_PAGE = (1 << 25) - 1 /* pages of a pool: every slot fits an int32                */
};

SHARD_FN int64_t shard_cdiv(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* The rank that stores position p. */
SHARD_FN int32_t shard_owner(shard_geom g, kvs_pos p)
{
    return (int32_t)((p.v / g.i) % g.n);
}

/* Where the owner of p stores it, counted in that rank's tokens. */
SHARD_FN kvs_local shard_local(shard_geom g, kvs_pos p)
{
    kvs_local l;
    l.v = (p.v / ((int64_t)g.i * g.n)) * g.i + p.v % g.i;
    return l;
}

/* The position of local index l of rank g.rank: the inverse of shard_local. */
SHARD_FN kvs_pos shard_pos(shard_geom g, kvs_local l)
{
    kvs_pos p;
    p.v = (l.v / g.i) * ((int64_t)g.i * g.n) + (int64_t)g.rank * g.i + l.v % g.i;
    return p;
}

/* How many of the first `len` positions rank g.rank owns, which is also the local index of the
 * first one it owns at or past `len`. Sums to len over ranks. Never subtract in local space. */
SHARD_FN int64_t shard_len(shard_geom g, int64_t len)
{
    const int64_t round = (int64_t)g.i * g.n;
    int64_t rem = len % round - (int64_t)g.rank * g.i;
    rem = rem < 0 ? 0 : rem > g.i ? g.i : rem;
    return (len / round) * g.i + rem;
}

/* The largest shard_len over ranks (rank 0's). */
SHARD_FN int64_t shard_len_max(shard_geom g, int64_t len)
{
    shard_geom g0 = g;
    g0.rank = 0;
    return shard_len(g0, len);
}

/* The most positions of [begin, end) that any rank owns: rows of a buffer that is the same size on
 * every rank. 0 <= begin <= end. */
SHARD_FN int64_t shard_range_max(shard_geom g, int64_t begin, int64_t end)
{
    int64_t most = 0;
    for (g.rank = 0; g.rank < g.n; g.rank++) {
        const int64_t n = shard_len(g, end) - shard_len(g, begin);
        most = n > most ? n : most;
    }
    return most;
}

/* Keys (global count) that token j of n new tokens may attend when the sequence ends at len:
 * len - n + j + 1, and 0 for padding rows. */
SHARD_FN int64_t shard_bound(int64_t len, int64_t n, int64_t j)
{
    const int64_t b = len - n + j + 1;
    return b < 0 ? 0 : b;
}

/* Of those, how many rank g.rank holds: each token's bound is localised on its own. */
SHARD_FN int64_t shard_local_bound(shard_geom g, int64_t len, int64_t n, int64_t j)
{
    return shard_len(g, shard_bound(len, n, j));
}

/* Lane of a position: (pos / I) mod 8. */
SHARD_FN int32_t shard_lane(shard_geom g, kvs_pos p)
{
    return (int32_t)((p.v / g.i) % KVS_LANES);
}

/* Lanes of one rank: 8 / N, or 1 where N does not divide 8. */
SHARD_FN int32_t shard_n_lane(shard_geom g)
{
    return KVS_LANES % g.n == 0 ? KVS_LANES / g.n : 1;
}

/* Local lane of local index l: 0 .. shard_n_lane - 1. */
SHARD_FN int32_t shard_lane_of_local(int32_t n_lane, int32_t i, kvs_local l)
{
    return (int32_t)((l.v / i) % n_lane);
}

/* The k-th key of local lane `lane`, as a local index. */
SHARD_FN kvs_local shard_lane_key(int32_t n_lane, int32_t i, int32_t lane, int64_t k)
{
    kvs_local l;
    l.v = (k / i) * ((int64_t)i * n_lane) + (int64_t)lane * i + k % i;
    return l;
}

/* Keys of local lane `lane` among the first `local_len` local indices. */
SHARD_FN int64_t shard_lane_len(int32_t n_lane, int32_t i, int32_t lane, int64_t local_len)
{
    shard_geom g;
    g.n = n_lane;
    g.i = i;
    g.rank = lane;
    return shard_len(g, local_len);
}

/* Segments of a lane with n_key attended keys, and the keys [begin, end) of segment i of them. */
SHARD_FN int64_t shard_n_segment(int64_t n_key)
{
    return shard_cdiv(n_key, SHARD_SEGMENT);
}

SHARD_FN int64_t shard_segment_begin(int64_t i)
{
    return i * SHARD_SEGMENT;
}

SHARD_FN int64_t shard_segment_end(int64_t n_key, int64_t i)
{
    const int64_t end = (i + 1) * SHARD_SEGMENT;
    return end < n_key ? end : n_key;
}

/* Tokens that one block-table entry covers: a page on every rank. The unit of the scheduler, of a
 * block that is hashed for reuse and of a block that is moved to another tier. */
SHARD_FN int64_t shard_span(shard_geom g)
{
    return (int64_t)KVS_PAGE_TOKENS * g.n;
}

/* Entries of a block table for sequences of up to max_len tokens. The same on every rank. */
SHARD_FN int64_t shard_table_width(shard_geom g, int64_t max_len)
{
    return shard_cdiv(max_len, shard_span(g));
}

/* Slot of local index l through a row of a block table. The caller has checked l / 64 < width and
 * that the entry is a page: a negative entry must not come here, since -1 * 64 + 63 is "none". */
SHARD_FN kvs_slot shard_slot(const int32_t *table, kvs_local l)
{
    kvs_slot s;
    s.v = (int64_t)table[l.v / KVS_PAGE_TOKENS] * KVS_PAGE_TOKENS + l.v % KVS_PAGE_TOKENS;
    return s;
}

/* The same with every check: SHARD_BAD_SLOT where l lies outside the table [width] or the entry
 * outside a pool of n_slot slots. */
SHARD_FN kvs_slot shard_slot_checked(const int32_t *table, int64_t width, int64_t n_slot,
                                     kvs_local l)
{
    kvs_slot s;
    s.v = SHARD_BAD_SLOT;
    if (l.v < 0 || l.v / KVS_PAGE_TOKENS >= width || table[l.v / KVS_PAGE_TOKENS] < 0) {
        return s;
    }
    const kvs_slot found = shard_slot(table, l);
    return found.v < n_slot ? found : s;
}

/* Where rank g.rank writes position p: its slot if it owns p, SHARD_NO_SLOT if another rank does,
 * SHARD_BAD_SLOT as above. */
SHARD_FN kvs_slot shard_write_slot(shard_geom g, const int32_t *table, int64_t width,
                                   int64_t n_slot, kvs_pos p)
{
    if (shard_owner(g, p) != g.rank) {
        kvs_slot none;
        none.v = SHARD_NO_SLOT;
        return none;
    }
    return shard_slot_checked(table, width, n_slot, shard_local(g, p));
}

#endif
