/* kern/cuda/attn_dense_walk.h - the division of dense attention's work over thread blocks (attn_dense.cuh).
 *
 * Lengths are known on the device alone: every block finds its share from row_req and kv_len. An item is up to
 * `span` adjacent rows of one request: it begins where the request changes and at every multiple of `span`.
 * It costs item_cost for its queries and results and one per tile of 64 keys, a page, of its longest row (1 when
 * it has none). Costs are laid end to end, and part p of P takes positions [p W / P, (p + 1) W / P) of the total
 * W, P being at most W. An item cut by a part's end leaves partials, at most two per part: slot 0 of a part holds
 * what began in an earlier one, slot 1 what goes on in the next.
 *
 * Read by nvcc, and by the C compiler for tests.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_WALK_H
#define KVS_KERN_CUDA_ATTN_DENSE_WALK_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define DENSE_FN __host__ __device__ static inline
#else
#define DENSE_FN static inline
#endif

enum { DENSE_TILE = 64 /* keys of a tile, a page */ };

typedef struct dense_work {
    const int32_t *row_req, *kv_len; /* [n_row] */
    int32_t n_row, n_req, table_width;
    int32_t span, n_part, item_cost;
} dense_work;

/* Keys row r attends of those that the table has room for. */
DENSE_FN int32_t dense_len(const dense_work *p, int32_t r)
{
    const int32_t req = p->row_req[r];
    const int32_t len = p->kv_len[r];
    const int64_t most = (int64_t)p->table_width * DENSE_TILE;
    return req < 0 || req >= p->n_req || len < 0 ? 0 : len < most ? len : (int32_t)most;
}

DENSE_FN bool dense_begins(const dense_work *p, int32_t r)
{
    return r % p->span == 0 || p->row_req[r] != p->row_req[r - 1];
}

/* Rows [row, row + n) of one request, the longest of len keys. */
typedef struct dense_item {
    int32_t row, n, len;
} dense_item;

DENSE_FN dense_item dense_item_at(const dense_work *p, int32_t row)
{
    dense_item i = {row, 1, dense_len(p, row)};
    while (row + i.n < p->n_row && !dense_begins(p, row + i.n)) {
        const int32_t len = dense_len(p, row + i.n);
        i.len = len > i.len ? len : i.len;
        i.n++;
    }
    return i;
}

DENSE_FN int32_t dense_tiles(int32_t n_key)
{
    return (int32_t)(((int64_t)n_key + DENSE_TILE - 1) / DENSE_TILE);
}

DENSE_FN int64_t dense_cost(const dense_work *p, dense_item i)
{
    return i.len == 0 ? 1 : p->item_cost + dense_tiles(i.len);
}

/* Where part `part` of the total cost begins. */
DENSE_FN int64_t dense_part_begin(const dense_work *p, int64_t total, int32_t part)
{
    const int64_t n_part = total < p->n_part ? total : p->n_part;
    return part < n_part ? total * part / n_part : total;
}

/* The part that owns a position. */
DENSE_FN int32_t dense_part_of(const dense_work *p, int64_t total, int64_t at)
{
    const int64_t n_part = total < p->n_part ? total : p->n_part;
    return (int32_t)(((at + 1) * n_part - 1) / total);
}

/* Where a part is in its work. */
typedef struct dense_walk {
    int32_t row;    /* first of the next item              */
    int64_t at;     /* position of that item's first cost */
    int64_t lo, hi; /* positions of the part              */
} dense_walk;

/* A piece of an item: tiles [b0, b1) of its nb. */
typedef struct dense_unit {
    dense_item item;
    int32_t b0, b1, nb;
} dense_unit;

/* The next piece of this part, an empty item included (b1 = 0); 0 at the end. */
DENSE_FN int dense_next(dense_walk *w, const dense_work *p, dense_unit *u)
{
    while (w->row < p->n_row && w->at < w->hi) {
        const int64_t at = w->at;
        const int64_t first = at + p->item_cost;
        u->item = dense_item_at(p, w->row);
        u->nb = dense_tiles(u->item.len);
        w->row += u->item.n;
        w->at = at + dense_cost(p, u->item);
        if (u->nb == 0) {
            u->b0 = u->b1 = 0;
            if (at >= w->lo) {
                return 1;
            }
            continue;
        }
        u->b0 = (int32_t)(w->lo > first ? w->lo - first : 0);
        u->b1 = (int32_t)(w->hi - first < u->nb ? w->hi - first : u->nb);
        if (u->b0 < u->b1) {
            return 1;
        }
    }
    return 0;
}

#endif
