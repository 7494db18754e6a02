/* kern/x86/attn_keys.c - the attended keys of blocks: lists of slots, or local indices through a table. */
#include "kern/x86/attn_keys.h"

#include "shard/shard.h"

int32_t key_block_rows(const attn_args *a)
{
    if (a->slots != NULL) {
        return 1;
    }
    return a->n_head < ATTN_COLS ? ATTN_COLS / a->n_head : 1;
}

bool key_block_starts(const attn_args *a, int32_t row)
{
    if (row % key_block_rows(a) == 0) {
        return true;
    }
    return a->row_req[row] != a->row_req[row - 1];
}

key_block key_block_at(const attn_args *a, int32_t row0)
{
    key_block b = {.row0 = row0, .n_row = 1};
    while (row0 + b.n_row < a->n_row && !key_block_starts(a, row0 + b.n_row)) {
        b.n_row++;
    }
    return b;
}

static int64_t not_negative(int64_t n)
{
    return n > 0 ? n : 0;
}

int64_t key_block_guess(const attn_args *a, key_block b)
{
    int64_t n = 0;
    if (a->slots != NULL) {
        const int32_t *count = a->lane_count + (int64_t)b.row0 * a->n_lane;
        for (int32_t j = 0; j < a->n_lane; j++) {
            n += not_negative(count[j]);
        }
        return n;
    }
    for (int32_t r = 0; r < b.n_row; r++) {
        n = a->kv_len[b.row0 + r] > n ? a->kv_len[b.row0 + r] : n;
    }
    return n;
}

int32_t key_lane(int32_t n_lane, int32_t i)
{
    int32_t lane = 0;
    for (int32_t bit = n_lane / 2; bit > 0; bit /= 2, i /= 2) {
        lane += i % 2 * bit;
    }
    return lane;
}

int64_t key_bound(const attn_args *a, int32_t lane, int32_t row)
{
    return shard_lane_len(a->n_lane, a->interleave, lane, not_negative(a->kv_len[row]));
}

static const int32_t *table_row(const attn_args *a, int32_t row)
{
    const int32_t req = a->row_req[row];
    return req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
}

/* Keys of a lane that the table has a page for. */
static int64_t covered(const attn_args *a, int32_t lane)
{
    const int64_t len = not_negative(a->table_width) * KVS_PAGE_TOKENS;
    return shard_lane_len(a->n_lane, a->interleave, lane, len);
}

key_stream key_stream_open(const attn_args *a, key_block b, int32_t lane, uint64_t *n_bad)
{
    key_stream s = {.a = a, .block = b, .lane = lane, .n_bad = n_bad};
    if (a->slots != NULL) {
        const int32_t *count = a->lane_count + (int64_t)b.row0 * a->n_lane;
        s.list = a->slots + b.row0 * a->slots_stride;
        for (int32_t j = 0; j < lane; j++) {
            s.list += not_negative(count[j]);
        }
        s.n = not_negative(count[lane]);
        s.least = s.n;
        return s;
    }
    s.table = table_row(a, b.row0);
    const int64_t limit = s.table != NULL ? covered(a, lane) : 0;
    s.least = INT64_MAX;
    for (int32_t r = 0; r < b.n_row; r++) {
        const int64_t bound = key_bound(a, lane, b.row0 + r);
        s.least = bound < s.least ? bound : s.least;
        s.n = bound > s.n ? bound : s.n;
        if (bound > limit && n_bad != NULL) {
            *n_bad += (uint64_t)(bound - limit);
        }
    }
    s.n = s.n < limit ? s.n : limit;
    return s;
}

static const uint8_t *row_at(const attn_args *a, int64_t slot)
{
    return a->kv + slot / KVS_PAGE_TOKENS * a->page_stride + slot % KVS_PAGE_TOKENS * a->row_stride;
}

/* Entries are mostly -1 or mostly not, in no order a branch could learn: none is taken on them. */
static void list_next(key_stream *s, key_tile *t)
{
    const attn_args *a = s->a;
    int32_t slot[ATTN_TILE + 1];
    int32_t n = 0;
    uint64_t n_bad = 0;
    while (s->k < s->n && n < ATTN_TILE) {
        const int32_t id = s->list[s->k++];
        const int ok = id >= 0 && id < a->n_slot;
        slot[n] = id;
        n += ok;
        n_bad += (uint64_t)(!ok && id != SHARD_NO_SLOT);
    }
    for (int32_t i = 0; i < n; i++) {
        t->row[i] = row_at(a, slot[i]);
    }
    t->n = n;
    t->whole = true;
    if (s->n_bad != NULL) {
        *s->n_bad += n_bad;
    }
}

/* Rows of the block that attend key k of the lane. */
static uint64_t rows_at(const key_stream *s, int64_t k)
{
    uint64_t n = 0;
    for (int32_t r = 0; r < s->block.n_row; r++) {
        n += (uint64_t)(key_bound(s->a, s->lane, s->block.row0 + r) > k);
    }
    return n;
}

static void table_next(key_stream *s, key_tile *t)
{
    const attn_args *a = s->a;
    const int64_t last_of_run = a->interleave - 1; /* of I, a power of two */
    const int64_t skip = (int64_t)a->interleave * (a->n_lane - 1);
    kvs_local l = shard_lane_key(a->n_lane, a->interleave, s->lane, s->k);
    t->n = 0;
    while (s->k < s->n && t->n < ATTN_TILE) {
        const kvs_slot slot = shard_slot_checked(s->table, a->table_width, a->n_slot, l);
        if (slot.v >= 0) {
            t->row[t->n] = row_at(a, slot.v);
            t->key[t->n++] = s->k;
        } else if (s->n_bad != NULL) {
            *s->n_bad += rows_at(s, s->k);
        }
        s->k++;
        l.v += (l.v & last_of_run) == last_of_run ? 1 + skip : 1; /* shard_lane_key of k + 1 */
    }
    t->whole = t->n == 0 || t->key[t->n - 1] < s->least;
}

void key_stream_next(key_stream *s, key_tile *t)
{
    if (s->list != NULL) {
        list_next(s, t);
    } else {
        table_next(s, t);
    }
}

bool key_block_is_plain(const attn_args *a, key_block b)
{
    const int32_t *table = table_row(a, b.row0);
    if (table == NULL) {
        return true; /* no key at all */
    }
    const int64_t n = shard_cdiv(key_block_guess(a, b), KVS_PAGE_TOKENS);
    const int64_t n_page = a->n_slot / KVS_PAGE_TOKENS;
    for (int64_t i = 0; i < n && i < a->table_width; i++) {
        if (table[i] < 0 || table[i] >= n_page) {
            return false;
        }
    }
    return true;
}

static void walk_fill(key_walk *w, key_tile *t)
{
    t->n = 0;
    if (w->n_tile == 0) {
        return;
    }
    while (w->i_lane < w->end_lane) {
        key_stream_next(&w->stream, t);
        t->i_lane = w->i_lane;
        if (t->n > 0) {
            w->n_tile -= w->n_tile > 0;
            return;
        }
        if (++w->i_lane < w->end_lane) {
            w->stream =
                key_stream_open(w->a, w->block, key_lane(w->a->n_lane, w->i_lane), w->n_bad);
        }
    }
}

void key_walk_step(key_walk *w)
{
    walk_fill(w, &w->tile[w->cur]);
    w->cur = 1 - w->cur;
}

static void walk_begin(key_walk *w)
{
    w->stream = key_stream_open(w->a, w->block, key_lane(w->a->n_lane, w->i_lane), w->n_bad);
    w->cur = 0;
}

void key_walk_block(key_walk *w, const attn_args *a, key_block b, uint64_t *n_bad)
{
    w->a = a;
    w->block = b;
    w->i_lane = 0;
    w->end_lane = a->n_lane;
    w->n_tile = -1;
    w->n_bad = n_bad;
    walk_begin(w);
    walk_fill(w, &w->tile[0]);
    walk_fill(w, &w->tile[1]);
}

void key_walk_segment(key_walk *w, const attn_args *a, key_block b, int32_t i_lane,
                      int64_t i_segment, bool plain)
{
    w->a = a;
    w->block = b;
    w->i_lane = i_lane;
    w->end_lane = i_lane + 1;
    w->n_tile = ATTN_SEGMENT / ATTN_TILE;
    w->n_bad = NULL;
    walk_begin(w);
    if (a->slots == NULL && plain) {
        w->stream.k = shard_segment_begin(i_segment);
    } else {
        for (int64_t i = 0; i < i_segment * (ATTN_SEGMENT / ATTN_TILE); i++) {
            key_stream_next(&w->stream, &w->tile[0]);
        }
    }
    walk_fill(w, &w->tile[0]);
    walk_fill(w, &w->tile[1]);
}
