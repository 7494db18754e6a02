/* How dense attention on a device is divided over thread blocks: every tile of every request is worked on once,
 * and what is cut is put together from the right parts. The kernels themselves are checked on devices. */
#include "unit/unit.h"

#include "base/rng.h"
#include "kern/cuda/attn_dense_walk.h"

enum { MAX_ROW = 60, MAX_TILE = 64, MAX_PART = 140 };

typedef struct problem {
    dense_work w;
    int32_t req[MAX_ROW], len[MAX_ROW];
} problem;

/* Rows of requests in runs, of lengths that end within, at and past the table, some without any keys. */
static void make(problem *p, rng *r)
{
    const int32_t n_row = (int32_t)rng_next_range(r, 1, MAX_ROW);
    const int32_t most_run = (int32_t)rng_next_range(r, 1, 12);
    const int32_t longest = (int32_t)rng_next_range(r, 1, 40);
    int32_t req = 0;
    for (int32_t i = 0, left = 0; i < n_row; i++, left--) {
        if (left <= 0) {
            left = (int32_t)rng_next_range(r, 1, most_run);
            req = req == 3 ? 5 : req + 1;
        }
        p->req[i] = rng_next_below(r, 40) == 0 ? -1 : req;
        p->len[i] = (int32_t)rng_next_range(r, -1, longest * DENSE_TILE);
        if (rng_next_below(r, 4) == 0) {
            p->len[i] -= p->len[i] % DENSE_TILE;
        }
    }
    p->w = (dense_work){.row_req = p->req,
                        .kv_len = p->len,
                        .n_row = n_row,
                        .n_req = MAX_ROW - (int32_t)rng_next_below(r, 50),
                        .table_width = (int32_t)rng_next_range(r, 1, 45),
                        .span = (int32_t)rng_next_range(r, 1, 8),
                        .n_part = (int32_t)rng_next_range(r, 1, MAX_PART),
                        .item_cost = (int32_t)rng_next_range(r, 0, 5)};
}

/* Keys of a row, said another way. */
static int32_t keys(const problem *p, int32_t row)
{
    int32_t n = 0;
    const bool known = p->req[row] >= 0 && p->req[row] < p->w.n_req;
    for (int32_t k = 0; known && k < p->len[row] && k / DENSE_TILE < p->w.table_width; k++) {
        n++;
    }
    return n;
}

typedef struct item {
    int32_t row, n, tiles;
    int64_t begin, end; /* of its costs */
    int32_t seen[MAX_TILE], n_empty;
    int32_t first, last; /* parts that worked on it */
    bool cut;
} item;

/* The items in order, from the text of attn_dense_walk.h; returns the total cost. */
static int64_t items_of(const problem *p, item *items, int32_t *n_item)
{
    int64_t at = 0;
    *n_item = 0;
    for (int32_t i = 0; i < p->w.n_row; i++) {
        if (i == 0 || i % p->w.span == 0 || p->req[i] != p->req[i - 1]) {
            memset(&items[*n_item], 0, sizeof *items);
            items[*n_item].row = i;
            items[(*n_item)++].first = -1;
        }
        item *t = &items[*n_item - 1];
        const int32_t tiles = (keys(p, i) + DENSE_TILE - 1) / DENSE_TILE;
        t->n++;
        t->tiles = tiles > t->tiles ? tiles : t->tiles;
    }
    for (int32_t i = 0; i < *n_item; i++) {
        items[i].begin = at;
        at += items[i].tiles == 0 ? 1 : p->w.item_cost + items[i].tiles;
        items[i].end = at;
    }
    return at;
}

/* A part's walk, as a thread block begins it: at the item that holds its first position. */
static dense_walk walk_of(const problem *p, const item *items, int32_t n_item, int64_t total,
                          int32_t part)
{
    dense_walk w = {p->w.n_row, total, dense_part_begin(&p->w, total, part),
                    dense_part_begin(&p->w, total, part + 1)};
    for (int32_t i = 0; i < n_item; i++) {
        if (items[i].begin <= w.lo && w.lo < items[i].end) {
            w.row = items[i].row;
            w.at = items[i].begin;
        }
    }
    return w;
}

static void take_piece(item *items, int32_t n_item, const dense_unit *u, int32_t part,
                       int32_t *slot)
{
    item *t = NULL;
    for (int32_t i = 0; i < n_item; i++) {
        t = items[i].row == u->item.row ? &items[i] : t;
    }
    assert_non_null(t);
    assert_int_equal(u->item.n, t->n);
    assert_int_equal(u->nb, t->tiles);
    t->n_empty += u->nb == 0;
    for (int32_t b = u->b0; b < u->b1; b++) {
        t->seen[b]++;
    }
    if (u->nb > 0 && (u->b0 > 0 || u->b1 < u->nb)) { /* leaves a partial: each slot once */
        assert_int_equal(slot[u->b0 == 0]++, 0);
        t->cut = true;
    }
    t->first = t->first < 0 ? part : t->first;
    t->last = part;
}

static void every_tile_is_worked_on_once(void **state)
{
    (void)state;
    rng r = rng_init(20, 1);
    int32_t n_cut = 0;
    int32_t n_wide = 0;
    for (int32_t round = 0; round < 3000; round++) {
        static problem p;
        static item items[MAX_ROW];
        int32_t n_item = 0;
        make(&p, &r);
        const int64_t total = items_of(&p, items, &n_item);
        for (int32_t part = 0; part < p.w.n_part; part++) {
            dense_walk w = walk_of(&p, items, n_item, total, part);
            dense_unit u;
            int32_t slot[2] = {0, 0};
            assert_true(w.hi - w.lo <= total / (total < p.w.n_part ? total : p.w.n_part) + 1);
            while (dense_next(&w, &p.w, &u)) {
                take_piece(items, n_item, &u, part, slot);
            }
        }
        for (int32_t i = 0; i < n_item; i++) {
            const item *t = &items[i];
            assert_int_equal(t->n_empty, t->tiles == 0);
            for (int32_t b = 0; b < t->tiles; b++) {
                assert_int_equal(t->seen[b], 1);
            }
            if (t->cut) { /* what the merge is told */
                assert_int_equal(dense_part_of(&p.w, total, t->end - 1), t->last);
                n_cut++;
                n_wide += t->last - t->first > 1;
            }
        }
    }
    assert_true(n_cut > 1000 && n_wide > 300);
}

/* Lengths that have no page, and those of rows without a request, are not work. */
static void keys_without_a_page_are_no_work(void **state)
{
    (void)state;
    const int32_t req[] = {0, 1, 1, 2, -1, 0};
    const int32_t len[] = {200, INT32_MAX, -7, 50, 50, 0};
    const dense_work w = {req, len, 6, 2, 3, 4, 7, 2};
    const int32_t want[] = {192, 192, 0, 0, 0, 0};
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(dense_len(&w, i), want[i]);
    }
    assert_int_equal(dense_tiles(INT32_MAX), 1 << 25);
    assert_int_equal(dense_item_at(&w, 1).n, 2);
    assert_int_equal(dense_item_at(&w, 1).len, 192);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tile_is_worked_on_once),
        cmocka_unit_test(keys_without_a_page_are_no_work),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
