/* kern/x86/attn_keys.h - which cache rows a block attends, tile by tile.
 *
 * A key_stream yields the attended keys of one lane of a block in ascending position, without -1 and bad
 * ids. In table mode the rows of a block share it: each attends the keys below its own bound, a prefix.
 * A key_walk strings the lanes of a block together in bit-reversed order, one tile ahead of the work,
 * so that the rows of the next tile can be fetched early.
 */
#ifndef KERN_X86_ATTN_KEYS_H
#define KERN_X86_ATTN_KEYS_H

#include <stdbool.h>

#include "kern/x86/attn_x86.h"

typedef struct key_block {
    int32_t row0, n_row;
} key_block;

/* Rows of a block at most; 1 in list mode. */
int32_t key_block_rows(const attn_args *a);
/* Whether a block starts at this row. */
bool key_block_starts(const attn_args *a, int32_t row);
/* The block that starts at row0. */
key_block key_block_at(const attn_args *a, int32_t row0);
/* An estimate of its keys: entries of the list, or the largest bound. */
int64_t key_block_guess(const attn_args *a, key_block b);

/* The i-th lane in the order in which lanes enter the tree: pairs of the tree are neighbours. */
int32_t key_lane(int32_t n_lane, int32_t i);

/* Keys of one row of the request in this lane, those past the table included. */
int64_t key_bound(const attn_args *a, int32_t lane, int32_t row);

typedef struct key_stream {
    const attn_args *a;
    key_block block;
    int32_t lane;
    const int32_t *list;  /* list mode: the lane's entries                               */
    const int32_t *table; /* table mode; NULL where the request does not exist           */
    int64_t k, n;         /* the next entry or key, and how many                         */
    int64_t least;        /* the smallest bound of a row: keys below it are everyone's   */
    uint64_t *n_bad;      /* bad ids are added here, once per row that meets them; or NULL */
} key_stream;

typedef struct key_tile {
    const uint8_t *row[ATTN_TILE];
    int64_t key[ATTN_TILE]; /* table mode: number in the lane     */
    int32_t n;
    int32_t i_lane; /* in the order of key_lane           */
    bool whole;     /* every row of the block attends all */
} key_tile;

key_stream key_stream_open(const attn_args *a, key_block b, int32_t lane, uint64_t *n_bad);
/* The next tile: 64 keys, fewer at the end of the lane, 0 behind it. */
void key_stream_next(key_stream *s, key_tile *t);

/* Whether every page the block can reach lies in the pool, so that no key is skipped. Table mode. */
bool key_block_is_plain(const attn_args *a, key_block b);

typedef struct key_walk {
    const attn_args *a;
    key_block block;
    int32_t i_lane, end_lane;
    int32_t n_tile; /* tiles still to give, -1: no limit */
    uint64_t *n_bad;
    key_stream stream;
    key_tile tile[2];
    int32_t cur; /* the tile to work on; the other is the one after it */
} key_walk;

/* All lanes of a block. */
void key_walk_block(key_walk *w, const attn_args *a, key_block b, uint64_t *n_bad);
/* Segment i_segment of one lane. plain: key_block_is_plain. */
void key_walk_segment(key_walk *w, const attn_args *a, key_block b, int32_t i_lane,
                      int64_t i_segment, bool plain);
/* Moves on; the tile that was next is the current one. */
void key_walk_step(key_walk *w);

static inline const key_tile *key_walk_tile(const key_walk *w)
{
    return &w->tile[w->cur];
}

static inline const key_tile *key_walk_next(const key_walk *w)
{
    return &w->tile[1 - w->cur];
}

#endif
