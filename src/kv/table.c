/* table.c - from token positions to slots of one rank's pool.
 *
 * The only formulas here are shard.h's; this file walks sequences and checks tables. Everything is
 * 64-bit: a position may pass 2^31 in ownership maths, a slot may pass 2^31 / row bytes.
 */
#include "kv/table.h"

#include <inttypes.h>

#include "base/err.h"

void table_slots(shard_geom g, const int32_t *table, kvs_pos first, int64_t n, int64_t *slot)
{
    for (int64_t t = 0; t < n; t++) {
        const kvs_pos p = {first.v + t};
        slot[t] = shard_owner(g, p) == g.rank ? shard_slot(table, shard_local(g, p)).v : -1;
    }
}

kvs_status table_check(shard_geom g, const int32_t *table, int64_t width, int64_t len,
                       int64_t n_page, const char *what, kvs_error *err)
{
    if (len < 0) {
        return err_set(err, KVS_INVALID, "%s: length %" PRId64 " is negative", what, len);
    }
    const int64_t need = shard_table_width(g, len);
    if (need > width) {
        return err_set(err, KVS_INVALID,
                       "%s: %" PRId64 " tokens need %" PRId64 " block-table entries at dcp %d, the "
                       "table has %" PRId64 "; it reaches %" PRId64 " tokens",
                       what, len, need, (int)g.n, width, width > 0 ? width * shard_span(g) : 0);
    }
    if (need > 0 && table == NULL) {
        return err_set(err, KVS_INVALID, "%s: no block table for %" PRId64 " tokens", what, len);
    }
    for (int64_t b = 0; b < need; b++) {
        if (table[b] < 0 || table[b] >= n_page) {
            return err_set(err, KVS_INVALID,
                           "%s: block-table entry %" PRId64 " is page %d; the pool has pages 0 to "
                           "%" PRId64,
                           what, b, (int)table[b], n_page - 1);
        }
    }
    return KVS_OK;
}
