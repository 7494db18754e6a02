/* page.c - the page allocator: who holds which page of a pool, by count.
 *
 * Invariants: (1) ref[i] is the number of owners of page i; (2) bit i of level 0 is set iff ref[i]
 * is 0; (3) bit w of level k + 1 is set iff word w of level k is not zero; (4) n_free is the number
 * of set bits of level 0. A call that fails leaves all four, and the caller's table, as they were.
 *
 * The free set is a tree of 64-ary words, so the lowest free id is found by one step per level (at
 * most 5) and no two allocators that saw the same calls can differ. It knows ids only, not the
 * memory behind them, and it is used by one thread at a time.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "kv/table.h"

enum { PAGES_MAX_LEVEL = 5 };

struct kvs_pages {
    int64_t n_page;
    int64_t n_free;
    int32_t n_level;
    uint64_t
        *level[PAGES_MAX_LEVEL]; /* level[0]: one bit per page; the last one is a single word */
    int32_t *ref;                /* [n_page] owners                                          */
};

static void mark_free(kvs_pages *p, int64_t id)
{
    for (int32_t k = 0; k < p->n_level; k++) {
        p->level[k][id / 64] |= UINT64_C(1) << (id % 64);
        id /= 64;
    }
    p->n_free++;
}

static int64_t take_lowest(kvs_pages *p)
{
    int64_t id = 0;
    for (int32_t k = p->n_level - 1; k >= 0; k--) {
        id = id * 64 + __builtin_ctzll(p->level[k][id]);
    }
    int64_t bit = id;
    for (int32_t k = 0; k < p->n_level; k++) {
        p->level[k][bit / 64] &= ~(UINT64_C(1) << (bit % 64));
        if (p->level[k][bit / 64] != 0) {
            break;
        }
        bit /= 64;
    }
    p->n_free--;
    return id;
}

kvs_status pages_new(kvs_pages **out, int64_t n_page, kvs_error *err)
{
    *out = NULL;
    if (n_page < 1 || n_page > SHARD_MAX_PAGE) {
        return err_set(err, KVS_INVALID, "n_page %" PRId64 ": a pool has 1 to %d pages", n_page,
                       SHARD_MAX_PAGE);
    }
    kvs_pages *p = mem_calloc(1, sizeof *p);
    if (p == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for an allocator of %" PRId64 " pages", n_page);
    }
    p->n_page = n_page;
    p->ref = mem_calloc((size_t)n_page, sizeof *p->ref);
    bool whole = p->ref != NULL;
    int64_t n_bit = n_page;
    do {
        const int64_t n_word = shard_cdiv(n_bit, 64);
        uint64_t *word = mem_alloc((size_t)n_word * sizeof *word, 0);
        if (word != NULL) {
            memset(word, 0xFF, (size_t)n_word * sizeof *word);
            word[n_word - 1] >>= n_word * 64 - n_bit;
        }
        whole = whole && word != NULL;
        p->level[p->n_level++] = word;
        n_bit = n_word;
    } while (n_bit > 1);
    if (!whole) {
        pages_free(p);
        return err_set(err, KVS_NOMEM, "no memory for an allocator of %" PRId64 " pages", n_page);
    }
    p->n_free = n_page;
    *out = p;
    return KVS_OK;
}

void pages_free(kvs_pages *p)
{
    if (p == NULL) {
        return;
    }
    for (int32_t k = 0; k < p->n_level; k++) {
        mem_free(p->level[k]);
    }
    mem_free(p->ref);
    mem_free(p);
}

int64_t pages_available(const kvs_pages *p)
{
    return p->n_free;
}

kvs_status pages_extend(kvs_pages *p, int32_t dcp, int32_t *table, int64_t width, int64_t *n_have,
                        int64_t new_len, kvs_error *err)
{
    if (dcp < 1 || dcp > KVS_MAX_RANKS) {
        return err_set(err, KVS_INVALID, "dcp %d: use 1 to %d", (int)dcp, KVS_MAX_RANKS);
    }
    if (new_len < 0 || new_len > INT32_MAX) {
        return err_set(err, KVS_INVALID, "new_len %" PRId64 ": a sequence has 0 to 2^31 - 1 tokens",
                       new_len);
    }
    if (width < 0 || *n_have < 0 || *n_have > width) {
        return err_set(err, KVS_INVALID,
                       "n_have %" PRId64 ": a table of %" PRId64 " entries holds 0 to that many",
                       *n_have, width);
    }
    const shard_geom g = {.n = dcp, .i = 1, .rank = 0};
    const int64_t need = shard_table_width(g, new_len);
    if (need <= *n_have) {
        return KVS_OK;
    }
    if (need > width) {
        return err_set(err, KVS_INVALID,
                       "%" PRId64 " tokens need %" PRId64
                       " block-table entries at dcp %d, the table "
                       "has %" PRId64 "; it reaches %" PRId64 " tokens",
                       new_len, need, (int)dcp, width, width * shard_span(g));
    }
    const int64_t n_new = need - *n_have;
    if (n_new > p->n_free) {
        return err_set(err, KVS_LIMIT,
                       "%" PRId64 " tokens need %" PRId64 " more pages, %" PRId64 " of %" PRId64
                       " are free: %" PRId64 " missing",
                       new_len, n_new, p->n_free, p->n_page, n_new - p->n_free);
    }
    for (int64_t b = *n_have; b < need; b++) {
        const int64_t id = take_lowest(p);
        p->ref[id] = 1;
        table[b] = (int32_t)id;
    }
    *n_have = need;
    return KVS_OK;
}

/* Adds d (1 or -1) to the count of every page of table[begin .. end). An id that is not of this
 * pool or has no owner left at its turn (given twice, or more often than it is owned) undoes it. */
static kvs_status ref_add(kvs_pages *p, const int32_t *table, int64_t begin, int64_t end, int32_t d,
                          const char *verb, kvs_error *err)
{
    for (int64_t b = begin; b < end; b++) {
        const int64_t id = table[b];
        const bool known = id >= 0 && id < p->n_page;
        if (known && p->ref[id] > 0 && (d < 0 || p->ref[id] < INT32_MAX)) {
            p->ref[id] += d;
            continue;
        }
        for (int64_t u = begin; u < b; u++) {
            p->ref[table[u]] -= d;
        }
        if (!known) {
            return err_set(err, KVS_INVALID,
                           "cannot %s entry %" PRId64 ": page %" PRId64
                           " is not of this pool of pages "
                           "0 to %" PRId64,
                           verb, b, id, p->n_page - 1);
        }
        if (d > 0 && p->ref[id] > 0) {
            return err_set(err, KVS_LIMIT,
                           "cannot %s entry %" PRId64 ": page %" PRId64 " has 2^31 - 1 owners",
                           verb, b, id);
        }
        return err_set(err, KVS_INVALID,
                       "cannot %s entry %" PRId64 ": page %" PRId64
                       " has no owner left (it was given "
                       "back already)",
                       verb, b, id);
    }
    return KVS_OK;
}

kvs_status pages_truncate(kvs_pages *p, int32_t *table, int64_t *n_have, int64_t n_keep,
                          kvs_error *err)
{
    if (n_keep < 0 || n_keep > *n_have) {
        return err_set(err, KVS_INVALID,
                       "n_keep %" PRId64 ": a table that holds %" PRId64
                       " entries can keep 0 to that many",
                       n_keep, *n_have);
    }
    TRY(ref_add(p, table, n_keep, *n_have, -1, "give back", err));
    for (int64_t b = n_keep; b < *n_have; b++) {
        /* The second of two entries with one page comes after its bit is set. */
        const int64_t id = table[b];
        const bool is_free = (p->level[0][id / 64] >> (id % 64) & 1) != 0;
        if (p->ref[id] == 0 && !is_free) {
            mark_free(p, id);
        }
        table[b] = -1;
    }
    *n_have = n_keep;
    return KVS_OK;
}

kvs_status pages_share(kvs_pages *p, const int32_t *table, int64_t n, kvs_error *err)
{
    if (n < 0) {
        return err_set(err, KVS_INVALID, "cannot share %" PRId64 " entries: give 0 or more", n);
    }
    return ref_add(p, table, 0, n, 1, "share", err);
}
