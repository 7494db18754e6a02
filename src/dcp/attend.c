/* dcp/attend.c - writes, q exchange, local attention, partial exchange, merge.
 *
 * Heads of a DCP group are numbered rank-major: head h of the group is head h % head_local of rank
 * h / head_local. A chunk of rows goes through: gather every rank's heads -> attention on this rank's shard
 * for all of them -> send each rank its own heads' partials -> merge over ranks by the tree. With dcp 1 the
 * exchanges fall away and the same kernel and merge remain.
 */
#include <math.h>
#include <string.h>
#include "base/err.h"
#include "dcp/dcp.h"
#include "kern/exp.h"
#include "num/fmt.h"
#include "num/kvfmt.h"

uint64_t dcp_bytes_sent(const kvs_dcp *d)
{
    const comm_stats *st = comm_counters(d->group);
    uint64_t sum = 0;
    for (int i = 0; i < COMM_N_OP; i++)
        sum += st->bytes_sent[i];
    return sum;
}

kvs_status dcp_check_cache(const kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t index_layer,
                           kvs_error *err)
{
    if (c->geom.n != d->geom.n || c->geom.i != d->geom.i || c->geom.rank != d->geom.rank)
        return err_set(err, KVS_INVALID,
                       "cache is shard %d of %d (interleave %d), this rank is %d of %d (interleave %d)",
                       c->geom.rank, c->geom.n, c->geom.i, d->geom.rank, d->geom.n, d->geom.i);
    if (c->fmt != d->s.fmt)
        return err_set(err, KVS_INVALID, "cache rows are %s, the handle was opened for %s",
                       kv_fmt_name(c->fmt), kv_fmt_name(d->s.fmt));
    if (c->n_page < d->plan.n_page)
        return err_set(err, KVS_INVALID, "the plan's tables point into %lld pages, the cache has %lld",
                       (long long)d->plan.n_page, (long long)c->n_page);
    if (layer != DCP_NO_LAYER && (layer < 0 || layer >= c->n_layer))
        return err_set(err, KVS_INVALID, "layer %d: the cache has layers 0 to %d", layer,
                       c->n_layer - 1);
    if (index_layer != DCP_NO_LAYER) {
        if (index_layer < 0 || index_layer >= c->n_index_layer)
            return err_set(err, KVS_INVALID, "index layer %d: the cache has %d index layers",
                           index_layer, c->n_index_layer);
        if (c->index_fmt != d->s.index_fmt)
            return err_set(err, KVS_INVALID,
                           "index keys are %s, the handle was opened for %s",
                           index_fmt_name(c->index_fmt), index_fmt_name(d->s.index_fmt));
    }
    return KVS_OK;
}

static kvs_status check_type(kvs_dtype type, const char *what, kvs_error *err)
{
    if (type != KVS_DTYPE_F32 && type != KVS_DTYPE_BF16)
        return err_set(err, KVS_INVALID, "%s type %d: use KVS_DTYPE_F32 or KVS_DTYPE_BF16", what,
                       (int)type);
    return KVS_OK;
}

kvs_status dcp_write(kvs_dcp *d, kvs_cache *c, int32_t layer, const void *latent, const void *rope,
                     kvs_dtype type, kvs_error *err)
{
    TRY(dcp_check_cache(d, c, layer, DCP_NO_LAYER, err));
    TRY(check_type(type, "latent", err));
    if (d->plan.n_row > 0)
        cache_write(c, &d->kern, &d->queue, layer, latent, rope, type, d->plan.slot, d->plan.n_row);
    return KVS_OK;
}

kvs_status dcp_write_index(kvs_dcp *d, kvs_cache *c, int32_t index_layer, const void *key, kvs_dtype type,
                           kvs_error *err)
{
    TRY(dcp_check_cache(d, c, DCP_NO_LAYER, index_layer, err));
    TRY(check_type(type, "key", err));
    if (d->plan.n_row > 0)
        cache_write_index(c, &d->kern, &d->queue, index_layer, key, type, d->plan.slot,
                          d->plan.n_row);
    return KVS_OK;
}

/* The same without quantisation. */
static const void *q_typed(const kvs_dcp *d, const void *q, kvs_dtype q_type, int64_t row0, int32_t n,
                           int32_t heads, void *staging)
{
    int64_t width = (int64_t)heads * KVS_ROW_DIM;
    int64_t count = width * n;
    if (q_type == KVS_DTYPE_F32) {
        const float *src = (const float *)q + row0 * width;
        if (d->elem_bytes == 4)
            return src;
        bf16 *dst = staging;
        for (int64_t i = 0; i < count; i++)
            dst[i] = bf16_from_f32(src[i]);
        return dst;
    }
    const bf16 *src = (const bf16 *)q + row0 * width;
    if (d->elem_bytes == 2)
        return src;
    float *dst = staging;
    for (int64_t i = 0; i < count; i++)
        dst[i] = bf16_to_f32(src[i]);
    return dst;
}

dcp_query dcp_query_of(kvs_dcp *d, const void *q, kvs_dtype q_type, int64_t row0, int32_t n,
                       int32_t heads, void *to, void *spare)
{
    dcp_query r = {.q = NULL, .scale = NULL};
    if (!d->s.q_fp8) {
        r.q = q_typed(d, q, q_type, row0, n, heads, to);
        return r;
    }
    /* the scales lie behind the values, so that one message carries both */
    float *scale = (float *)(void *)((uint8_t *)to + (size_t)n * (size_t)heads * KVS_ROW_DIM *
                                                        (size_t)d->elem_bytes);
    quant_q_args qa = {
        .n_row = n,
        .n_head = heads,
        .q = q_typed(d, q, q_type, row0, n, heads, spare),
        .q_type = KVS_DTYPE_BF16,
        .q_stride_row = (int64_t)heads * KVS_ROW_DIM,
        .q_stride_head = KVS_ROW_DIM,
        .rule = KVS_SCALE_POW2,
        .q_out = to,
        .scale = scale,
    };
    d->kern.quant_q(&qa, &d->queue);
    r.q = to;
    r.scale = scale;
    return r;
}

void dcp_attn_args(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, int32_t row0,
                   int32_t n_row, attn_args *a)
{
    const dcp_plan *p = &d->plan;
    memset(a, 0, sizeof *a);
    cache_attn_args(c, layer, a);
    a->n_row = n_row;
    a->q_type = d->elem_bytes == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->softmax_scale = d->s.softmax_scale;
    a->n_lane = d->n_lane;
    a->interleave = d->s.interleave;
    if (how == KVS_ATTEND_SPARSE) {
        a->slots = d->sel.slots + (int64_t)row0 * d->s.topk;
        a->slots_stride = d->s.topk;
        a->lane_count = d->sel.lane_count + (int64_t)row0 * d->n_lane;
    } else {
        a->table = p->table;
        a->table_stride = p->table_width;
        a->table_width = (int32_t)p->table_width;
        a->row_req = p->row_req + row0;
        a->kv_len = p->bound_local + row0;
        a->n_req = p->n_req;
    }
}

void dcp_attn_run(kvs_dcp *d, attn_args *a)
{
    a->stats = &d->attn_count;
    a->scratch = d->scratch;
    a->scratch_bytes = d->scratch_bytes;
    d->kern.attn(a, &d->queue);
}

/* [dcp][n, head_local, width] -> [n, head_group, width], elements of `size` bytes. */
static void heads_from_ranks(const kvs_dcp *d, const uint8_t *wire, int64_t rank_stride, uint8_t *full,
                             int32_t n, size_t width_bytes)
{
    size_t piece = (size_t)d->s.head_local * width_bytes;
    for (int32_t r = 0; r < d->s.dcp; r++)
        for (int32_t t = 0; t < n; t++)
            memcpy(full + ((size_t)t * (size_t)d->s.dcp + (size_t)r) * piece,
                   wire + r * rank_stride + (int64_t)((size_t)t * piece), piece);
}

/* Queries of n rows, from q's row row0 on, of all heads of the group: points a->q (and a->q_scale) at them. */
static kvs_status gather_q(kvs_dcp *d, const void *q, kvs_dtype q_type, int64_t row0, int32_t n,
                           attn_args *a, kvs_error *err)
{
    const dcp_setup *s = &d->s;
    size_t q_bytes = (size_t)n * (size_t)s->head_local * KVS_ROW_DIM * (size_t)d->elem_bytes;
    size_t scale_bytes = s->q_fp8 ? (size_t)n * (size_t)s->head_local * sizeof(float) : 0;
    const dcp_query mine =
        dcp_query_of(d, q, q_type, row0, n, s->head_local, d->q_local, d->q_full);
    a->n_head = s->head_group;
    a->q_stride_head = KVS_ROW_DIM;
    a->q_stride_row = (int64_t)s->head_group * KVS_ROW_DIM;
    a->q = mine.q;
    a->q_scale = mine.scale;
    if (s->dcp == 1)
        return KVS_OK;
    uint64_t before = dcp_bytes_sent(d);
    TRY(comm_all_gather(d->group, mine.q, d->q_wire, q_bytes + scale_bytes, err));
    d->info.bytes_q += dcp_bytes_sent(d) - before;
    int64_t stride = (int64_t)(q_bytes + scale_bytes);
    heads_from_ranks(d, d->q_wire, stride, d->q_full, n, KVS_ROW_DIM * (size_t)d->elem_bytes);
    a->q = d->q_full;
    if (s->q_fp8) {
        heads_from_ranks(d, (const uint8_t *)d->q_wire + q_bytes, stride, (uint8_t *)d->q_scale, n,
                         sizeof(float));
        a->q_scale = d->q_scale;
    }
    return KVS_OK;
}

/* Destination of a chunk's merged rows. */
typedef struct merged {
    void *out;
    int32_t out_type;
    float *lse; /* may be NULL */
} merged;

static void *out_at(void *out, kvs_dtype type, int64_t elements)
{
    return (uint8_t *)out + elements * (type == KVS_DTYPE_F32 ? 4 : 2);
}

static void merge_ranks(kvs_dcp *d, const float *const *out_in, const float *const *lse_in, int32_t n,
                        const merged *m)
{
    const dcp_setup *s = &d->s;
    uint64_t n_nan = 0;
    merge_args ma = {
        .n_part = s->dcp,
        .mode = KVS_LANES % s->dcp == 0 ? MERGE_TREE : MERGE_FOLD,
        .n_row = n,
        .n_head = s->head_local,
        .dim = KVS_LATENT_DIM,
        .out_in = out_in,
        .lse_in = lse_in,
        .in_stride_row = (int64_t)s->head_local * KVS_LATENT_DIM,
        .in_stride_head = KVS_LATENT_DIM,
        .lse_stride_row = s->head_local,
        .out = m->out,
        .out_type = m->out_type,
        .out_stride_row = (int64_t)s->head_local * KVS_LATENT_DIM,
        .out_stride_head = KVS_LATENT_DIM,
        .lse = m->lse,
        .n_nan = &n_nan,
    };
    d->kern.merge(&ma, &d->queue);
    d->info.n_nan += n_nan;
}

/* Exchange a2a: every rank gets the N partials of its own heads and merges them by the tree. */
static kvs_status exchange_a2a(kvs_dcp *d, int32_t n, const merged *m, kvs_error *err)
{
    const dcp_setup *s = &d->s;
    int64_t out_elems = (int64_t)n * s->head_local * KVS_LATENT_DIM;
    int64_t lse_elems = (int64_t)n * s->head_local;
    int64_t peer = out_elems + lse_elems;
    size_t piece = (size_t)s->head_local * KVS_LATENT_DIM * sizeof(float);
    size_t lse_piece = (size_t)s->head_local * sizeof(float);
    for (int32_t r = 0; r < s->dcp; r++) {
        float *to = d->wire_send + r * peer;
        for (int32_t t = 0; t < n; t++) {
            int64_t head = (int64_t)t * s->head_group + (int64_t)r * s->head_local;
            memcpy(to + (int64_t)t * s->head_local * KVS_LATENT_DIM,
                   d->node_out + head * KVS_LATENT_DIM, piece);
            memcpy(to + out_elems + (int64_t)t * s->head_local, d->node_lse + head, lse_piece);
        }
    }
    uint64_t before = dcp_bytes_sent(d);
    TRY(comm_all_to_all(d->group, d->wire_send, d->wire_recv, (size_t)peer * sizeof(float), err));
    d->info.bytes_partial += dcp_bytes_sent(d) - before;
    const float *out_in[KVS_MAX_RANKS];
    const float *lse_in[KVS_MAX_RANKS];
    for (int32_t r = 0; r < s->dcp; r++) {
        out_in[r] = d->wire_recv + r * peer;
        lse_in[r] = out_in[r] + out_elems;
    }
    merge_ranks(d, out_in, lse_in, n, m);
    return KVS_OK;
}

/* ln sum_r exp(lse_r) in rank order, -inf when every part is; NaN and +inf parts count as -inf. */
static float lse_of_ranks(const float *lse, int64_t stride, int32_t n)
{
    float top = -INFINITY;
    for (int32_t r = 0; r < n; r++)
        top = fmaxf(top, merge_clean_lse(lse[r * stride]));
    if (top == -INFINITY)
        return -INFINITY;
    float sum = 0.0f;
    for (int32_t r = 0; r < n; r++)
        sum += kexp(merge_clean_lse(lse[r * stride]) - top);
    return top + klog(sum);
}

/* Exchange ag_rs: every rank scales its partial by exp(lse - global lse); the sum is a reduce-scatter. */
static kvs_status exchange_ag_rs(kvs_dcp *d, int32_t n, const merged *m, kvs_error *err)
{
    const dcp_setup *s = &d->s;
    int64_t pairs = (int64_t)n * s->head_group;
    int64_t out_elems = (int64_t)n * s->head_local * KVS_LATENT_DIM;
    float *all_lse = d->wire_recv; /* [dcp, n, head_group] */
    uint64_t before = dcp_bytes_sent(d);
    TRY(comm_all_gather(d->group, d->node_lse, all_lse, (size_t)pairs * sizeof(float), err));
    for (int64_t i = 0; i < pairs; i++) {
        int64_t t = i / s->head_group;
        int64_t h = i % s->head_group;
        float all = lse_of_ranks(all_lse + i, pairs, s->dcp);
        float mine = merge_clean_lse(d->node_lse[i]);
        float f = mine == -INFINITY ? 0.0f : kexp(mine - all);
        const float *from = d->node_out + i * KVS_LATENT_DIM;
        int64_t to_head = t * s->head_local + h % s->head_local;
        float *to = d->wire_send + h / s->head_local * out_elems + to_head * KVS_LATENT_DIM;
        for (int32_t k = 0; k < KVS_LATENT_DIM; k++)
            to[k] = f == 0.0f ? 0.0f : from[k] * f;
        if (m->lse && h / s->head_local == d->geom.rank)
            m->lse[to_head] = all;
    }
    float *sum = d->node_out;
    TRY(comm_reduce_scatter(d->group, d->wire_send, sum, (size_t)out_elems, err));
    d->info.bytes_partial += dcp_bytes_sent(d) - before;
    if (m->out_type == KVS_DTYPE_F32) {
        memcpy(m->out, sum, (size_t)out_elems * sizeof(float));
        return KVS_OK;
    }
    bf16 *out = m->out;
    for (int64_t i = 0; i < out_elems; i++)
        out[i] = bf16_from_f32(sum[i]);
    return KVS_OK;
}

static kvs_status exchange_nodes(kvs_dcp *d, int32_t n, const merged *m, kvs_error *err)
{
    return d->s.exchange == KVS_EXCHANGE_AG_RS ? exchange_ag_rs(d, n, m, err)
                                               : exchange_a2a(d, n, m, err);
}

kvs_status dcp_exchange(kvs_dcp *d, const void *q, kvs_dtype q_type, int32_t n, void *out,
                        kvs_dtype out_type, float *lse, kvs_error *err)
{
    attn_args a;
    memset(&a, 0, sizeof a);
    TRY(gather_q(d, q, q_type, 0, n, &a, err));
    const merged m = {.out = out, .out_type = (int32_t)out_type, .lse = lse};
    return exchange_nodes(d, n, &m, err);
}

/* Rows [row0, row0 + n) of the plan; their queries begin with row q0 of q. */
static kvs_status attend_chunk(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                               const void *q, kvs_dtype q_type, int32_t q0, int32_t row0, int32_t n,
                               const merged *m, kvs_error *err)
{
    attn_args a;
    dcp_attn_args(d, c, layer, how, row0, n, &a);
    TRY(gather_q(d, q, q_type, q0, n, &a, err));
    /* with one rank and f32 results the node is the result */
    int direct = d->s.dcp == 1 && m->out_type == KVS_DTYPE_F32;
    a.out = direct ? m->out : d->node_out;
    a.out_stride_head = KVS_LATENT_DIM;
    a.out_stride_row = (int64_t)d->s.head_group * KVS_LATENT_DIM;
    a.lse = direct && m->lse ? m->lse : d->node_lse;
    dcp_attn_run(d, &a);
    if (direct)
        return KVS_OK;
    if (d->s.dcp == 1) {
        const float *out_in[1] = {d->node_out};
        const float *lse_in[1] = {d->node_lse};
        merge_ranks(d, out_in, lse_in, n, m);
        return KVS_OK;
    }
    return exchange_nodes(d, n, m, err);
}

/* Rows [row0, row0 + n_row) of the plan; q, out and lse begin with row0's. */
static kvs_status attend_rows(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                              int32_t row0, int32_t n_row, const void *q, kvs_dtype q_type, void *out,
                              kvs_dtype out_type, float *lse, kvs_error *err)
{
    int64_t width = (int64_t)d->s.head_local * KVS_LATENT_DIM;
    for (int32_t at = 0; at < n_row; at += d->chunk_rows) {
        int32_t n = dcp_min32(d->chunk_rows, n_row - at);
        merged m = {
            .out = out_at(out, out_type, at * width),
            .out_type = (int32_t)out_type,
            .lse = lse ? lse + (int64_t)at * d->s.head_local : NULL,
        };
        TRY(attend_chunk(d, c, layer, how, q, q_type, at, row0 + at, n, &m, err));
    }
    return KVS_OK;
}

static kvs_status check_attend(const kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                               kvs_dtype q_type, kvs_error *err)
{
    if (how != KVS_ATTEND_DENSE && how != KVS_ATTEND_SPARSE && how != KVS_ATTEND_CONTEXT)
        return err_set(err, KVS_INVALID, "attend %d: use DENSE 1, SPARSE 2 or CONTEXT 3", (int)how);
    TRY(dcp_check_cache(d, c, layer, DCP_NO_LAYER, err));
    TRY(check_type(q_type, "q", err));
    if (!dcp_has_form(&d->s, how))
        return err_set(err, KVS_INVALID,
                       "attend %d: the handle was opened for other forms (%d); add 1 << %d to forms", (int)how,
                       d->s.forms, (int)how);
    if (d->s.q_ready && (q_type == KVS_DTYPE_F32) != (d->elem_bytes == 4))
        return err_set(err, KVS_INVALID, "q type %d: the handle was opened with q_ready 1: use %s", (int)q_type,
                       d->elem_bytes == 4 ? "KVS_DTYPE_F32" : "KVS_DTYPE_BF16");
    if (how == KVS_ATTEND_SPARSE && d->sel.n_row != d->plan.n_row)
        return err_set(err, KVS_INVALID,
                       "sparse attention before a selection: call kvs_dcp_select or "
                       "kvs_dcp_set_selection after the plan");
    return KVS_OK;
}

kvs_status dcp_attend(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, const void *q,
                      kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse, kvs_error *err)
{
    TRY(check_attend(d, c, layer, how, q_type, err));
    TRY(check_type(out_type, "out", err));
    if (how == KVS_ATTEND_CONTEXT)
        return dcp_attend_context(d, c, layer, q, q_type, out, out_type, lse, err);
    return attend_rows(d, c, layer, how, 0, d->plan.n_row, q, q_type, out, out_type, lse, err);
}

kvs_status dcp_attend_rows(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, int32_t row0,
                           int32_t n_row, const void *q, kvs_dtype q_type, void *out,
                           kvs_dtype out_type, kvs_error *err)
{
    TRY(check_attend(d, c, layer, how, q_type, err));
    TRY(check_type(out_type, "out", err));
    if (how == KVS_ATTEND_CONTEXT || row0 < 0 || n_row < 0 || n_row > d->plan.n_row - row0)
        return err_set(err, KVS_INVALID,
                       "attend rows %d to %d of %d in form %d: use rows of the plan, DENSE or SPARSE", row0,
                       row0 + n_row, d->plan.n_row, (int)how);
    return attend_rows(d, c, layer, how, row0, n_row, q, q_type, out, out_type, NULL, err);
}

kvs_status dcp_attend_local(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, const void *q,
                            kvs_dtype q_type, float *out, float *lse, kvs_error *err)
{
    TRY(check_attend(d, c, layer, how, q_type, err));
    if (how == KVS_ATTEND_CONTEXT)
        return err_set(err, KVS_INVALID,
                       "attend_local with CONTEXT: that form moves keys between ranks; use DENSE or "
                       "SPARSE");
    const dcp_setup *s = &d->s;
    for (int32_t row0 = 0; row0 < d->plan.n_row; row0 += d->chunk_rows) {
        int32_t n = dcp_min32(d->chunk_rows, d->plan.n_row - row0);
        attn_args a;
        dcp_attn_args(d, c, layer, how, row0, n, &a);
        a.n_head = s->head_group;
        const dcp_query all = dcp_query_of(d, q, q_type, row0, n, s->head_group, d->q_full,
                                           s->dcp > 1 ? d->q_wire : d->q_local);
        a.q = all.q;
        a.q_scale = all.scale;
        a.q_stride_head = KVS_ROW_DIM;
        a.q_stride_row = (int64_t)s->head_group * KVS_ROW_DIM;
        a.out_stride_head = KVS_LATENT_DIM;
        a.out_stride_row = (int64_t)s->head_group * KVS_LATENT_DIM;
        a.out = out + row0 * a.out_stride_row;
        a.lse = lse + (int64_t)row0 * s->head_group;
        dcp_attn_run(d, &a);
    }
    return KVS_OK;
}

kvs_status dcp_finish(kvs_dcp *d, kvs_step_info *info, kvs_error *err)
{
    kvs_step_info st = d->info;
    st.n_row_read += d->attn_count.n_fetched;
    st.n_key_attended += d->attn_count.n_key;
    st.n_bad_id += d->attn_count.n_bad_id;
    st.n_nan += d->attn_count.n_nan;
    memset(&d->info, 0, sizeof d->info);
    memset(&d->attn_count, 0, sizeof d->attn_count);
    if (info)
        *info = st;
    TRY(dev_queue_check(&d->queue, err));
    if (st.n_bad_id > 0)
        return err_set(err, KVS_INVALID,
                       "%llu ids of the step lay outside their row's bound, the table or the pool and "
                       "were masked; ids must be positions below the row's length",
                       (unsigned long long)st.n_bad_id);
    return KVS_OK;
}
