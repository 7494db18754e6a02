/* kv/table.h - from tokens to slots through block tables, and the page allocator.
 *
 * Every rank of a DCP group holds the same page ids; table entry b covers positions [b * span, (b+1) * span),
 * 64 of them on each rank. A slot mapping gives each new token the slot its owner writes, -1 on the others.
 */
#ifndef KVS_KV_TABLE_H
#define KVS_KV_TABLE_H

#include <stdint.h>
#include "kvspan/dcp.h"
#include "shard/shard.h"

/* slot[t] for positions first .. first + n - 1 of one sequence on rank g.rank. The table reaches the last
 * position. */
void table_slots(shard_geom g, const int32_t *table, kvs_pos first, int64_t n, int64_t *slot);

/* Every entry that the first len positions reach lies in [0, n_page) and len fits the width. The message
 * names `what`, the entry and the bound. */
kvs_status table_check(shard_geom g, const int32_t *table, int64_t width, int64_t len, int64_t n_page,
                       const char *what, kvs_error *err);

/* Page allocator: reference counts, lowest free id first, so that ranks making the same calls agree. */
kvs_status pages_new(kvs_pages **out, int64_t n_page, kvs_error *err);
void pages_free(kvs_pages *p);
int64_t pages_available(const kvs_pages *p);
kvs_status pages_extend(kvs_pages *p, int32_t dcp, int32_t *table, int64_t width, int64_t *n_have,
                        int64_t new_len, kvs_error *err);
kvs_status pages_truncate(kvs_pages *p, int32_t *table, int64_t *n_have, int64_t n_keep, kvs_error *err);
kvs_status pages_share(kvs_pages *p, const int32_t *table, int64_t n, kvs_error *err);

#endif
