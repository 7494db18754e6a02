/* dcp/context.c - KVS_ATTEND_CONTEXT: keys travel, queries stay.
 *
 * For each request with rows in the step the context is walked in fixed blocks of 512 positions: every rank
 * dequantises its rows of the block, an all-gather brings them together, they are put in sequence order, and
 * this rank's own heads attend the block. Blocks fold in order with the merge node. A block holds the same
 * rows in the same order for every DCP size, so the bits do not depend on it, nor on how a prompt was cut
 * into steps.
 *
 * dcp_context_block gives such blocks to a caller that attends them in another form (model/fwd_heads.c).
 */
#include <math.h>
#include <string.h>
#include "base/err.h"
#include "dcp/dcp.h"
#include "num/kvfmt.h"

/* Positions [begin, begin + len) of a request, and what each rank has of them. */
typedef struct ctx_block {
    int64_t begin, len;
    int64_t pad; /* rows each rank sends */
} ctx_block;

static ctx_block block_of(const kvs_dcp *d, int64_t seq_len, int64_t j)
{
    ctx_block b;
    b.begin = j * DCP_CONTEXT_BLOCK;
    int64_t end = b.begin + DCP_CONTEXT_BLOCK;
    end = end < seq_len ? end : seq_len;
    b.len = end - b.begin;
    b.pad = shard_range_max(d->geom, b.begin, end);
    return b;
}

static void gather_own(kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t req, ctx_block b,
                       void *out)
{
    const dcp_plan *p = &d->plan;
    int64_t start = shard_len(d->geom, b.begin);
    int64_t count = shard_len(d->geom, b.begin + b.len) - start;
    int64_t zero = 0;
    gather_args g = {
        .n_req = 1,
        .table = p->table + (int64_t)req * p->table_width,
        .table_stride = p->table_width,
        .table_width = (int32_t)p->table_width,
        .start = &start,
        .count = &count,
        .out_begin = &zero,
        .out = out,
        .out_type = d->elem_bytes == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
        .out_stride = KVS_ROW_DIM,
        .n_bad_id = &d->info.n_bad_id,
    };
    cache_gather_args(c, layer, &g);
    d->kern.gather(&g, &d->queue);
    d->info.n_row_read += (uint64_t)count;
}

/* Puts the block's rows into d->ctx_rows in sequence order, on every rank. */
static kvs_status collect_block(kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t req, ctx_block b,
                                kvs_error *err)
{
    size_t row_bytes = (size_t)KVS_ROW_DIM * (size_t)d->elem_bytes;
    if (d->s.dcp == 1) {
        gather_own(d, c, layer, req, b, d->ctx_rows);
        return KVS_OK;
    }
    gather_own(d, c, layer, req, b, d->ctx_local);
    int64_t have = shard_len(d->geom, b.begin + b.len) - shard_len(d->geom, b.begin);
    memset((uint8_t *)d->ctx_local + (size_t)have * row_bytes, 0,
           (size_t)(b.pad - have) * row_bytes);
    uint64_t before = dcp_bytes_sent(d);
    TRY(comm_all_gather(d->group, d->ctx_local, d->ctx_wire, (size_t)b.pad * row_bytes, err));
    d->info.bytes_context += dcp_bytes_sent(d) - before;
    for (int64_t i = 0; i < b.len; i++) {
        kvs_pos pos = {b.begin + i};
        shard_geom g = d->geom;
        g.rank = shard_owner(g, pos);
        int64_t at = g.rank * b.pad + shard_local(g, pos).v - shard_len(g, b.begin);
        memcpy((uint8_t *)d->ctx_rows + (size_t)i * row_bytes,
               (const uint8_t *)d->ctx_wire + (size_t)at * row_bytes, row_bytes);
    }
    return KVS_OK;
}

kvs_status dcp_context_block(kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t req, int64_t j,
                             int64_t seq_len, int32_t *n, kvs_error *err)
{
    TRY(dcp_check_cache(d, c, layer, DCP_NO_LAYER, err));
    if (!d->ctx_rows)
        return err_set(err, KVS_INVALID, "a block of the context: the handle was opened without DCP_BLOCKS");
    const ctx_block b = block_of(d, seq_len, j);
    *n = (int32_t)b.len;
    return collect_block(d, c, layer, req, b, err);
}

/* Attention of rows [row0, row0 + n) over d->ctx_rows into part 0. */
static void attend_block(kvs_dcp *d, dcp_query q, int32_t row0, int32_t n, ctx_block b)
{
    static const int32_t identity[DCP_CONTEXT_BLOCK / KVS_PAGE_TOKENS] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int32_t t = 0; t < n; t++) {
        int64_t left = d->plan.bound[row0 + t] - b.begin;
        d->ctx_len[t] = (int32_t)(left < 0 ? 0 : left < b.len ? left : b.len);
    }
    int is_f32 = d->elem_bytes == 4;
    int64_t row_bytes = (int64_t)KVS_ROW_DIM * d->elem_bytes;
    attn_args a;
    memset(&a, 0, sizeof a);
    a.n_row = n;
    a.n_head = d->s.head_local;
    a.q = q.q;
    a.q_scale = q.scale;
    a.q_type = is_f32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a.q_stride_head = KVS_ROW_DIM;
    a.q_stride_row = (int64_t)d->s.head_local * KVS_ROW_DIM;
    a.softmax_scale = d->s.softmax_scale;
    a.kv = d->ctx_rows;
    a.fmt = is_f32 ? KVS_KV_F32 : KVS_KV_BF16;
    a.page_stride = KVS_PAGE_TOKENS * row_bytes;
    a.row_stride = row_bytes;
    a.n_slot = DCP_CONTEXT_BLOCK;
    a.k_scale = 1.0f;
    a.n_lane = 1;
    a.table = identity;
    a.table_stride = 0; /* one table row for every request id */
    a.table_width = DCP_CONTEXT_BLOCK / KVS_PAGE_TOKENS;
    a.row_req = d->plan.row_req + row0; /* one request: all equal */
    a.kv_len = d->ctx_len;
    a.interleave = 1;
    a.n_req = d->plan.n_req;
    a.out = d->ctx_part[0];
    a.out_stride_head = KVS_LATENT_DIM;
    a.out_stride_row = (int64_t)d->s.head_local * KVS_LATENT_DIM;
    a.lse = d->ctx_lse[0];
    attn_stats st = {0};
    a.stats = &st;
    a.scratch = d->scratch;
    a.scratch_bytes = d->scratch_bytes;
    d->kern.attn(&a, &d->queue);
    d->info.n_key_attended += st.n_key;
    d->info.n_nan += st.n_nan;
}

static void fold(kvs_dcp *d, int32_t n_part, const float *const *out_in, const float *const *lse_in,
                 int32_t n, void *out, int32_t out_type, float *lse)
{
    merge_args m = {
        .n_part = n_part,
        .mode = MERGE_FOLD,
        .n_row = n,
        .n_head = d->s.head_local,
        .dim = KVS_LATENT_DIM,
        .out_in = out_in,
        .lse_in = lse_in,
        .in_stride_row = (int64_t)d->s.head_local * KVS_LATENT_DIM,
        .in_stride_head = KVS_LATENT_DIM,
        .lse_stride_row = d->s.head_local,
        .out = out,
        .out_type = out_type,
        .out_stride_row = (int64_t)d->s.head_local * KVS_LATENT_DIM,
        .out_stride_head = KVS_LATENT_DIM,
        .lse = lse,
        .n_nan = &d->info.n_nan,
    };
    d->kern.merge(&m, &d->queue);
}

/* Rows [row0, row0 + n) of one request over its whole context; the result lands in part *at. */
static kvs_status attend_rows(kvs_dcp *d, const kvs_cache *c, int32_t layer, dcp_query q, int32_t row0,
                              int32_t n, int32_t *at, kvs_error *err)
{
    int32_t req = d->plan.row_req[row0];
    int64_t seq_len = d->plan.bound[row0 + n - 1]; /* bounds ascend inside a request */
    int32_t cur = 1;
    int64_t n_pair = (int64_t)n * d->s.head_local;
    for (int64_t i = 0; i < n_pair; i++)
        d->ctx_lse[cur][i] = -INFINITY; /* the identity; its values are not read */
    for (int64_t j = 0; j * DCP_CONTEXT_BLOCK < seq_len; j++) {
        ctx_block b = block_of(d, seq_len, j);
        TRY(collect_block(d, c, layer, req, b, err));
        attend_block(d, q, row0, n, b);
        const float *out_in[2] = {d->ctx_part[cur], d->ctx_part[0]};
        const float *lse_in[2] = {d->ctx_lse[cur], d->ctx_lse[0]};
        int32_t next = 3 - cur;
        fold(d, 2, out_in, lse_in, n, d->ctx_part[next], KVS_DTYPE_F32, d->ctx_lse[next]);
        cur = next;
    }
    *at = cur;
    return KVS_OK;
}

kvs_status dcp_attend_context(kvs_dcp *d, const kvs_cache *c, int32_t layer, const void *q,
                              kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse,
                              kvs_error *err)
{
    const dcp_plan *p = &d->plan;
    int64_t width = (int64_t)d->s.head_local * KVS_LATENT_DIM;
    int32_t row0 = 0;
    while (row0 < p->n_row) {
        int32_t n = 1;
        while (n < d->ctx_chunk && row0 + n < p->n_row && p->row_req[row0 + n] == p->row_req[row0])
            n++;
        /* no block has been folded yet, so a partial's room is free */
        const dcp_query own =
            dcp_query_of(d, q, q_type, row0, n, d->s.head_local, d->q_full, d->ctx_part[2]);
        int32_t at = 0;
        TRY(attend_rows(d, c, layer, own, row0, n, &at, err));
        const float *out_in[1] = {d->ctx_part[at]};
        const float *lse_in[1] = {d->ctx_lse[at]};
        fold(d, 1, out_in, lse_in, n, (uint8_t *)out + row0 * width * (out_type == KVS_DTYPE_F32 ? 4 : 2),
             (int32_t)out_type, lse ? lse + (int64_t)row0 * d->s.head_local : NULL);
        row0 += n;
    }
    return KVS_OK;
}
