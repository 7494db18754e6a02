/* dcp/workspace.c - what a handle allocates, as a function of its set-up alone.
 *
 * dcp_layout_of gives the size of every buffer; dcp_open allocates exactly those, and `plan` prints their
 * sums. No size depends on the length of a context except the block tables, one entry per 64 * dcp tokens of
 * max_len and request.
 */
#include "dcp/workspace.h"
#include <string.h>
#include "base/err.h"
#include "base/mem.h"

typedef struct shape {
    const dcp_setup *s;
    shard_geom geom;
    int32_t n_lane, chunk, score_rows, ctx_chunk, ctx_pad;
    int64_t width; /* table entries */
    int64_t elem;
} shape;

static shape shape_of(const dcp_setup *s)
{
    shape h;
    h.s = s;
    h.geom = (shard_geom){s->dcp, s->interleave, 0};
    h.n_lane = shard_n_lane(h.geom);
    h.chunk = dcp_chunk_rows(s, s->head_group);
    h.ctx_chunk = dcp_chunk_rows(s, s->head_local);
    h.score_rows = dcp_min32(DCP_SCORE_ROWS, s->max_rows);
    /* a block that starts anywhere on a rank's round holds at most this many of its rows */
    h.ctx_pad = (int32_t)shard_len_max(h.geom, DCP_CONTEXT_BLOCK + s->interleave * s->dcp);
    h.ctx_pad = dcp_min32(h.ctx_pad, DCP_CONTEXT_BLOCK);
    h.width = shard_table_width(h.geom, s->max_len);
    h.elem = s->fmt == KVS_KV_F32 ? 4 : 2;
    return h;
}

int32_t dcp_chunk_rows(const dcp_setup *s, int32_t heads)
{
    int32_t rows = DCP_CHUNK_COLUMNS / heads;
    rows = rows < 1 ? 1 : rows;
    return dcp_min32(rows, s->max_rows);
}

static void layout_plan(const shape *h, dcp_layout *l)
{
    const dcp_setup *s = h->s;
    l->bytes[DCP_BUF_TABLE] = s->max_reqs * h->width * 4;
    l->bytes[DCP_BUF_ROW_REQ] = (int64_t)s->max_rows * 4;
    l->bytes[DCP_BUF_BOUND] = (int64_t)s->max_rows * 4;
    l->bytes[DCP_BUF_BOUND_LOCAL] = (int64_t)s->max_rows * 4;
    l->bytes[DCP_BUF_SLOT] = (int64_t)s->max_rows * 8;
}

static void layout_selection(const shape *h, dcp_layout *l)
{
    const dcp_setup *s = h->s;
    if (s->topk == 0)
        return;
    int64_t list = (int64_t)s->max_rows * s->topk * 4;
    l->bytes[DCP_BUF_SLOTS] = list;
    l->bytes[DCP_BUF_LANE_COUNT] = (int64_t)s->max_rows * h->n_lane * 4;
    if (s->trace) {
        l->bytes[DCP_BUF_ALL_ID] = list;
        l->bytes[DCP_BUF_ALL_COUNT] = (int64_t)s->max_rows * 4;
    }
    if (s->n_index_head == 0)
        return;
    int64_t rows = h->score_rows;
    l->bytes[DCP_BUF_IQ] = rows * s->n_index_head * KVS_INDEX_DIM *
                           (s->index_fmt == KVS_INDEX_F32 ? 4 : 1);
    l->bytes[DCP_BUF_IW] = rows * s->n_index_head * 4;
    l->bytes[DCP_BUF_SCORE] = rows * DCP_SCORE_COLUMNS * 4;
    l->bytes[DCP_BUF_N_COL] = rows * 4;
    int64_t message = rows * (2 * (int64_t)s->topk + 1) * 4;
    l->bytes[DCP_BUF_CAND_SEND] = message;
    l->bytes[DCP_BUF_CAND_RECV] = s->dcp > 1 ? message * s->dcp : 0;
    l->bytes[DCP_BUF_CUT_SCORE] = rows * 4;
    l->bytes[DCP_BUF_CUT_ID] = rows * 4;
    l->bytes[DCP_BUF_CUT_TOTAL] = rows * 4;
}

static void layout_exchange(const shape *h, dcp_layout *l)
{
    const dcp_setup *s = h->s;
    int64_t own = (int64_t)h->chunk * s->head_local;
    int64_t all = (int64_t)h->chunk * s->head_group;
    int64_t q_row = KVS_ROW_DIM * h->elem + 4; /* values and one scale */
    l->bytes[DCP_BUF_Q_LOCAL] = s->q_ready ? 0 : own * q_row;
    l->bytes[DCP_BUF_Q_WIRE] = s->dcp > 1 ? all * q_row : 0;
    /* KVS_ATTEND_CONTEXT stages more rows of fewer heads here */
    int64_t ctx = dcp_has_form(s, KVS_ATTEND_CONTEXT) ? (int64_t)h->ctx_chunk * s->head_local : 0;
    l->bytes[DCP_BUF_Q_FULL] = s->q_ready && s->dcp == 1 ? 0 : (all > ctx ? all : ctx) * q_row;
    l->bytes[DCP_BUF_Q_SCALE] = s->q_fp8 ? all * 4 : 0;
    l->bytes[DCP_BUF_NODE_OUT] = all * KVS_LATENT_DIM * 4;
    l->bytes[DCP_BUF_NODE_LSE] = all * 4;
    int64_t wire = all * (KVS_LATENT_DIM + 1) * 4;
    /* ag_rs gathers the LSE of every head from every rank */
    int64_t lse = all * s->dcp * 4;
    l->bytes[DCP_BUF_WIRE_SEND] = s->dcp > 1 ? wire : 0;
    l->bytes[DCP_BUF_WIRE_RECV] = s->dcp > 1 ? (wire > lse ? wire : lse) : 0;
}

static void layout_context(const shape *h, dcp_layout *l)
{
    const dcp_setup *s = h->s;
    if (!dcp_has_form(s, KVS_ATTEND_CONTEXT) && !(s->forms & DCP_BLOCKS))
        return;
    int64_t row = KVS_ROW_DIM * h->elem;
    int64_t pairs = (int64_t)h->ctx_chunk * s->head_local;
    l->bytes[DCP_BUF_CTX_LOCAL] = s->dcp > 1 ? h->ctx_pad * row : 0;
    l->bytes[DCP_BUF_CTX_WIRE] = s->dcp > 1 ? h->ctx_pad * row * s->dcp : 0;
    l->bytes[DCP_BUF_CTX_ROWS] = DCP_CONTEXT_BLOCK * row;
    if (!dcp_has_form(s, KVS_ATTEND_CONTEXT))
        return;
    l->bytes[DCP_BUF_CTX_LEN] = (int64_t)h->ctx_chunk * 4;
    for (int i = 0; i < 3; i++) {
        l->bytes[DCP_BUF_CTX_PART0 + i] = pairs * KVS_LATENT_DIM * 4;
        l->bytes[DCP_BUF_CTX_LSE0 + i] = pairs * 4;
    }
}

/* Of the attention kernel, in each form that is called. */
static size_t attn_scratch(const shape *h, const kern_table *kern, const dev_queue *q)
{
    static const int32_t some = 0;
    const dcp_setup *s = h->s;
    const struct {
        kvs_attend how;
        int32_t rows, heads, lanes;
        const int32_t *slots;
    } call[] = {
        {KVS_ATTEND_DENSE, h->chunk, s->head_group, h->n_lane, NULL},
        {KVS_ATTEND_SPARSE, h->chunk, s->head_group, h->n_lane, &some},
        {KVS_ATTEND_CONTEXT, h->ctx_chunk, s->head_local, 1, NULL},
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof call / sizeof *call; i++) {
        if (!dcp_has_form(s, call[i].how))
            continue;
        attn_args a;
        memset(&a, 0, sizeof a);
        a.fmt = call[i].how != KVS_ATTEND_CONTEXT ? s->fmt
                : s->fmt == KVS_KV_F32            ? KVS_KV_F32
                                                  : KVS_KV_BF16;
        a.q_type = s->fmt == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
        a.interleave = s->interleave;
        a.n_row = call[i].rows;
        a.n_head = call[i].heads;
        a.n_lane = call[i].lanes;
        a.slots = call[i].slots;
        a.slots_stride = call[i].slots != NULL ? s->topk : 0;
        size_t n = kern->attn_scratch(&a, q);
        most = n > most ? n : most;
    }
    return most;
}

/* Scratch of the kernels depends on heads, lanes, rows of a call and workers; lengths do not enter. */
static int64_t kernel_scratch(const shape *h, const kern_table *kern)
{
    const dcp_setup *s = h->s;
    dev_queue q;
    memset(&q, 0, sizeof q);
    q.n_worker = s->threads;
    size_t most = attn_scratch(h, kern, &q);
    if (s->topk > 0) {
        localise_args la;
        memset(&la, 0, sizeof la);
        la.n_row = h->score_rows;
        la.k = s->topk;
        la.dcp = s->dcp;
        la.interleave = s->interleave;
        size_t n = kern->localise_scratch(&la, &q);
        most = n > most ? n : most;
    }
    if (s->topk > 0 && s->n_index_head > 0) {
        index_score_args sa;
        memset(&sa, 0, sizeof sa);
        sa.n_row = h->score_rows;
        sa.n_head = s->n_index_head;
        sa.fmt = s->index_fmt;
        sa.col_end = DCP_SCORE_COLUMNS;
        size_t n = kern->index_score_scratch(&sa, &q);
        most = n > most ? n : most;
        topk_args ta;
        memset(&ta, 0, sizeof ta);
        ta.n_row = h->score_rows;
        ta.k = s->topk;
        n = kern->topk_scratch(&ta, &q);
        most = n > most ? n : most;
        topk_merge_args ma;
        memset(&ma, 0, sizeof ma);
        ma.n_row = h->score_rows;
        ma.n_list = s->dcp;
        ma.k = s->topk;
        ma.cand_stride = s->topk;
        n = kern->topk_merge_scratch(&ma, &q);
        most = n > most ? n : most;
    }
    return (int64_t)most;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The largest of the collectives of attend.c, select.c and context.c, as a rank hands it over: one copy of what
 * goes to all alike, a padded part for each peer of what does not. */
static int64_t message_of(const shape *h, const dcp_layout *l)
{
    const dcp_setup *s = h->s;
    if (s->dcp == 1)
        return 0;
    const int64_t own = (int64_t)h->chunk * s->head_local;
    const int64_t scale = s->q_fp8 ? 4 : 0;
    const int64_t ag_rs = s->exchange == KVS_EXCHANGE_AG_RS;
    const int64_t part = own * (KVS_LATENT_DIM + (ag_rs ? 0 : 1)) * 4;
    int64_t most = own * (KVS_ROW_DIM * h->elem + scale);
    most = larger(most, (s->dcp - 1) * (int64_t)shard_cdiv(part, MEM_ALIGN) * MEM_ALIGN);
    most = larger(most, ag_rs ? l->bytes[DCP_BUF_NODE_LSE] : 0);
    most = larger(most, l->bytes[DCP_BUF_CAND_SEND]);
    return larger(most, l->bytes[DCP_BUF_CTX_LOCAL]);
}

void dcp_layout_of(const dcp_setup *s, const kern_table *kern, dcp_layout *l)
{
    memset(l, 0, sizeof *l);
    shape h = shape_of(s);
    layout_plan(&h, l);
    layout_selection(&h, l);
    layout_exchange(&h, l);
    layout_context(&h, l);
    l->bytes[DCP_BUF_SCRATCH] = kernel_scratch(&h, kern);
    l->chunk_rows = h.chunk;
    l->ctx_chunk = h.ctx_chunk;
    l->ctx_pad = h.ctx_pad;
    l->score_rows = h.score_rows;
    l->table_width = h.width;
    l->message = message_of(&h, l);
}

static int64_t sum_of(const dcp_layout *l, int first, int last)
{
    int64_t sum = 0;
    for (int i = first; i <= last; i++)
        sum += l->bytes[i];
    return sum;
}

void dcp_layout_sum(const dcp_layout *l, dcp_workspace *out)
{
    out->plan = sum_of(l, DCP_BUF_TABLE, DCP_BUF_SLOT);
    out->selection = sum_of(l, DCP_BUF_SLOTS, DCP_BUF_ALL_COUNT);
    out->score = sum_of(l, DCP_BUF_IQ, DCP_BUF_CUT_TOTAL);
    out->q = sum_of(l, DCP_BUF_Q_LOCAL, DCP_BUF_Q_SCALE);
    out->partial = sum_of(l, DCP_BUF_NODE_OUT, DCP_BUF_WIRE_RECV);
    out->context = sum_of(l, DCP_BUF_CTX_LOCAL, DCP_BUF_CTX_LSE2);
    out->kernel = l->bytes[DCP_BUF_SCRATCH];
    out->total = sum_of(l, 0, DCP_N_BUF - 1);
    out->message = l->message;
}

kvs_status dcp_workspace_bytes(const dcp_setup *s, const kern_table *kern, dcp_workspace *out,
                               kvs_error *err)
{
    dcp_layout l;
    dcp_layout_of(s, kern, &l);
    dcp_layout_sum(&l, out);
    if (out->total < 0)
        return err_set(err, KVS_LIMIT, "workspaces do not fit 63 bits; lower max_rows %d or topk %d",
                       s->max_rows, s->topk);
    return KVS_OK;
}
