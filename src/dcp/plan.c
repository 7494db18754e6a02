/* dcp/plan.c - one step's integers: lengths, per-token bounds, slots and tables, all checked.
 *
 * Nothing here talks to other ranks. Everything is checked before the first write into the plan, so that a
 * refused batch leaves the former plan as it was.
 */
#include <stdio.h>
#include <string.h>
#include "base/err.h"
#include "dcp/dcp.h"
#include "kv/table.h"

static kvs_status check_request(const kvs_dcp *d, const kvs_batch *b, int32_t i, kvs_error *err)
{
    if (b->q_len[i] < 0)
        return err_set(err, KVS_INVALID, "request %d: q_len %d is negative; use 0 or more", i,
                       b->q_len[i]);
    if (b->seq_len[i] < b->q_len[i])
        return err_set(err, KVS_INVALID,
                       "request %d: seq_len %lld is shorter than its %d new tokens; seq_len counts "
                       "them too",
                       i, (long long)b->seq_len[i], b->q_len[i]);
    if (b->seq_len[i] > d->s.max_len)
        return err_set(err, KVS_LIMIT, "request %d: seq_len %lld exceeds max_len %lld", i,
                       (long long)b->seq_len[i], (long long)d->s.max_len);
    char what[32];
    snprintf(what, sizeof what, "request %d", i);
    return table_check(d->geom, b->table + (int64_t)i * b->table_stride, b->table_stride,
                       b->seq_len[i], b->n_page, what, err);
}

static kvs_status check_batch(const kvs_dcp *d, const kvs_batch *b, int32_t *n_row, kvs_error *err)
{
    if (b->n_req < 0 || b->n_req > d->s.max_reqs)
        return err_set(err, KVS_LIMIT, "n_req %d: this handle takes 0 to max_reqs %d requests a step",
                       b->n_req, d->s.max_reqs);
    if (b->n_req > 0 && (!b->q_len || !b->seq_len || !b->table))
        return err_set(err, KVS_INVALID, "batch of %d requests: q_len, seq_len and table must be set",
                       b->n_req);
    if (b->n_page < 0 || b->n_page > INT32_MAX / KVS_PAGE_TOKENS)
        return err_set(err, KVS_INVALID, "n_page %lld: use 0 to %d", (long long)b->n_page,
                       INT32_MAX / KVS_PAGE_TOKENS);
    if (b->n_req > 0 && b->table_stride < 0)
        return err_set(err, KVS_INVALID, "table_stride %lld is negative",
                       (long long)b->table_stride);
    int64_t rows = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        TRY(check_request(d, b, i, err));
        rows += b->q_len[i];
        if (rows > d->s.max_rows)
            return err_set(err, KVS_LIMIT,
                           "the step has %lld or more tokens; this handle takes max_rows %d",
                           (long long)rows, d->s.max_rows);
    }
    *n_row = (int32_t)rows;
    return KVS_OK;
}

kvs_status dcp_plan_batch(kvs_dcp *d, const kvs_batch *b, kvs_error *err)
{
    int32_t n_row = 0;
    TRY(check_batch(d, b, &n_row, err));
    dcp_plan *p = &d->plan;
    int32_t row = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        const int32_t *table = b->table + (int64_t)i * b->table_stride;
        int64_t used = shard_table_width(d->geom, b->seq_len[i]);
        int32_t *mine = p->table + (int64_t)i * p->table_width;
        memcpy(mine, table, (size_t)used * sizeof *mine);
        for (int64_t t = used; t < p->table_width; t++)
            mine[t] = -1;
        kvs_pos first = {b->seq_len[i] - b->q_len[i]};
        table_slots(d->geom, mine, first, b->q_len[i], p->slot + row);
        for (int32_t j = 0; j < b->q_len[i]; j++, row++) {
            int64_t bound = shard_bound(b->seq_len[i], b->q_len[i], j);
            p->row_req[row] = i;
            p->bound[row] = (int32_t)bound;
            p->bound_local[row] = (int32_t)shard_len(d->geom, bound);
        }
    }
    p->n_req = b->n_req;
    p->n_row = n_row;
    p->n_page = b->n_page;
    d->sel.n_row = -1;
    return KVS_OK;
}
