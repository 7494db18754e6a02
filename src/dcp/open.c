/* dcp/open.c - making and ending a handle: set-up, group, handshake, workspaces. */
#include <stdio.h>
#include <string.h>
#include "base/err.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "dcp/dcp.h"
#include "dcp/workspace.h"
#include "kvspan/version.h"
#include "num/kvfmt.h"

enum { MAX_FIELD = 32, FIELD_TEXT = 560 };

/* The fields that every rank of the TP group must agree on, as text. */
typedef struct hello {
    int32_t n;
    comm_field field[MAX_FIELD];
    char text[MAX_FIELD][FIELD_TEXT];
} hello;

static void hello_text(hello *h, const char *name, const char *value)
{
    snprintf(h->text[h->n], FIELD_TEXT, "%s", value);
    h->field[h->n].name = name;
    h->field[h->n].value = h->text[h->n];
    h->n++;
}

static void hello_int(hello *h, const char *name, int64_t value)
{
    char t[32];
    snprintf(t, sizeof t, "%lld", (long long)value);
    hello_text(h, name, t);
}

/* What readers of a cache rely on without seeing it in the bytes of another rank. */
static void hello_cache(hello *h, const kvs_cache *c)
{
    if (!c) {
        hello_text(h, "cache", "not given");
        return;
    }
    hash_state scales;
    hash_init64(&scales);
    for (int32_t i = 0; i < c->n_layer; i++)
        hash_add64(&scales, &c->layer[i].k_scale, sizeof c->layer[i].k_scale);
    char t[32];
    snprintf(t, sizeof t, "0x%016llx", (unsigned long long)c->tag); /* rows, keys, Hadamard */
    hello_text(h, "cache", t);
    hello_int(h, "cache hadamard", c->hadamard);
    hello_int(h, "cache layers", c->n_layer);
    hello_int(h, "cache index layers", c->n_index_layer);
    hello_text(h, "cache scale rule", scale_rule_name(c->rule));
    snprintf(t, sizeof t, "0x%016llx", (unsigned long long)hash_get64(&scales));
    hello_text(h, "cache k_scale", t);
}

static kvs_status handshake(kvs_dcp *d, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err)
{
    hello *h = mem_calloc(1, sizeof *h);
    if (!h)
        return err_set(err, KVS_NOMEM, "no memory for the handshake");
    const dcp_setup *s = &d->s;
    char scale[32];
    snprintf(scale, sizeof scale, "%a", (double)s->softmax_scale);
    hello_text(h, "version", KVS_VERSION_STRING);
    hello_int(h, "tp", s->tp);
    hello_int(h, "dcp", s->dcp);
    hello_int(h, "interleave", s->interleave);
    hello_int(h, "page", KVS_PAGE_TOKENS);
    hello_int(h, "n_head", s->n_head);
    hello_int(h, "n_index_head", s->n_index_head);
    hello_int(h, "topk", s->topk);
    hello_text(h, "softmax_scale", scale);
    hello_int(h, "kv", s->fmt);
    hello_int(h, "index_kv", s->index_fmt);
    hello_int(h, "exchange", s->exchange);
    hello_int(h, "q_fp8", s->q_fp8);
    hello_int(h, "trace", s->trace);
    hello_int(h, "max_rows", s->max_rows);
    hello_int(h, "max_reqs", s->max_reqs);
    hello_int(h, "max_len", s->max_len);
    hello_text(h, "kernels", d->kernels);
    hello_text(h, "model_tag", cfg->model_tag ? cfg->model_tag : "");
    hello_cache(h, cfg->cache);
    kvs_status st = comm_handshake(world, h->field, h->n, err);
    mem_free(h);
    return st;
}

static void describe_kernels(kvs_dcp *d)
{
    size_t at = 0;
    for (int op = 0; op < KERN_N_OP; op++) {
        int n = snprintf(d->kernels + at, sizeof d->kernels - at, "%s%s=%s", op ? "," : "",
                         kern_op_name((kern_op)op), d->kern.variant[op]);
        if (n < 0 || (size_t)n >= sizeof d->kernels - at)
            return;
        at += (size_t)n;
    }
}

/* Where each buffer of the layout goes. */
static void **buffer_of(kvs_dcp *d, dcp_buf b)
{
    void *const where[DCP_N_BUF] = {
        [DCP_BUF_TABLE] = &d->plan.table,
        [DCP_BUF_ROW_REQ] = &d->plan.row_req,
        [DCP_BUF_BOUND] = &d->plan.bound,
        [DCP_BUF_BOUND_LOCAL] = &d->plan.bound_local,
        [DCP_BUF_SLOT] = &d->plan.slot,
        [DCP_BUF_SLOTS] = &d->sel.slots,
        [DCP_BUF_LANE_COUNT] = &d->sel.lane_count,
        [DCP_BUF_ALL_ID] = &d->sel.all_id,
        [DCP_BUF_ALL_COUNT] = &d->sel.all_count,
        [DCP_BUF_IQ] = &d->iq8,
        [DCP_BUF_IW] = &d->iw,
        [DCP_BUF_SCORE] = &d->score,
        [DCP_BUF_N_COL] = &d->n_col,
        [DCP_BUF_CAND_SEND] = &d->cand_send,
        [DCP_BUF_CAND_RECV] = &d->cand_recv,
        [DCP_BUF_CUT_SCORE] = &d->cut_score,
        [DCP_BUF_CUT_ID] = &d->cut_id,
        [DCP_BUF_CUT_TOTAL] = &d->cut_total,
        [DCP_BUF_Q_LOCAL] = &d->q_local,
        [DCP_BUF_Q_WIRE] = &d->q_wire,
        [DCP_BUF_Q_FULL] = &d->q_full,
        [DCP_BUF_Q_SCALE] = &d->q_scale,
        [DCP_BUF_NODE_OUT] = &d->node_out,
        [DCP_BUF_NODE_LSE] = &d->node_lse,
        [DCP_BUF_WIRE_SEND] = &d->wire_send,
        [DCP_BUF_WIRE_RECV] = &d->wire_recv,
        [DCP_BUF_CTX_LOCAL] = &d->ctx_local,
        [DCP_BUF_CTX_WIRE] = &d->ctx_wire,
        [DCP_BUF_CTX_ROWS] = &d->ctx_rows,
        [DCP_BUF_CTX_LEN] = &d->ctx_len,
        [DCP_BUF_CTX_PART0] = &d->ctx_part[0],
        [DCP_BUF_CTX_PART1] = &d->ctx_part[1],
        [DCP_BUF_CTX_PART2] = &d->ctx_part[2],
        [DCP_BUF_CTX_LSE0] = &d->ctx_lse[0],
        [DCP_BUF_CTX_LSE1] = &d->ctx_lse[1],
        [DCP_BUF_CTX_LSE2] = &d->ctx_lse[2],
        [DCP_BUF_SCRATCH] = &d->scratch,
    };
    return (void **)where[b];
}

static kvs_status make_workspaces(kvs_dcp *d, kvs_error *err)
{
    dcp_layout l;
    dcp_layout_of(&d->s, &d->kern, &l);
    TRY(dcp_workspace_bytes(&d->s, &d->kern, &d->bytes, err));
    d->chunk_rows = l.chunk_rows;
    d->ctx_chunk = l.ctx_chunk;
    d->ctx_pad = l.ctx_pad;
    d->score_rows = l.score_rows;
    d->plan.table_width = l.table_width;
    d->scratch_bytes = (size_t)l.bytes[DCP_BUF_SCRATCH];
    for (int b = 0; b < DCP_N_BUF; b++) {
        if (l.bytes[b] == 0)
            continue;
        void *p = mem_alloc((size_t)l.bytes[b], MEM_ALIGN);
        if (!p)
            return err_set(err, KVS_NOMEM,
                           "workspaces need %lld bytes in all; lower max_rows %d, topk %d or threads %d",
                           (long long)d->bytes.total, d->s.max_rows, d->s.topk, d->s.threads);
        memcpy(buffer_of(d, (dcp_buf)b), &p, sizeof p);
    }
    return KVS_OK;
}

/* Everything that needs no other rank, workspaces last. */
static kvs_status local_setup(kvs_dcp *d, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err)
{
    TRY(dcp_setup_resolve(&d->s, cfg, comm_size(world), err));
    uint32_t features = 0;
    TRY(dcp_features(cfg->cpu, &features, err));
    TRY(kern_init(&d->kern, features, cfg->kernels, err));
    describe_kernels(d);
    if (cfg->cache && cfg->cache->geom.n != d->s.dcp)
        return err_set(err, KVS_INVALID, "cache is a shard of %d ranks, dcp is %d", cfg->cache->geom.n,
                       d->s.dcp);
    d->geom = (shard_geom){d->s.dcp, d->s.interleave, comm_rank(world) % d->s.dcp};
    d->n_lane = shard_n_lane(d->geom);
    d->elem_bytes = d->s.fmt == KVS_KV_F32 ? 4 : 2;
    d->sel.n_row = -1;
    TRY(pool_open(&d->workers, d->s.threads, err));
    dev_queue_init(&d->queue, d->workers);
    return make_workspaces(d, err);
}

kvs_status dcp_open(kvs_dcp **out, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err)
{
    *out = NULL;
    kvs_dcp *d = mem_calloc(1, sizeof *d);
    kvs_error why;
    memset(&why, 0, sizeof why);
    kvs_status st = d ? local_setup(d, cfg, world, &why)
                      : err_set(&why, KVS_NOMEM, "no memory for an attention handle");
    TRY_GOTO(comm_agree(world, st, &why), out);
    TRY_GOTO(handshake(d, cfg, world, &why), out);
    TRY_GOTO(comm_split(world, comm_rank(world) / d->s.dcp, comm_rank(world), &d->group, &why), out);
    if (comm_rank(world) == 0) {
        LOG(DEBUG, KERN, "kernels: %s", d->kernels);
        if (d->s.exchange == KVS_EXCHANGE_AG_RS && d->s.dcp > 1)
            LOG(WARN, DCP,
                "exchange ag_rs: results equal those of other DCP sizes to tolerance, not to the bit; "
                "use a2a for equal bits");
    }
    *out = d;
    return KVS_OK;
out:
    dcp_close(d);
    if (err)
        *err = why;
    return st;
}

void dcp_close(kvs_dcp *d)
{
    if (!d)
        return;
    comm_close(d->group);
    for (int b = 0; b < DCP_N_BUF; b++) {
        void *p = NULL;
        memcpy(&p, buffer_of(d, (dcp_buf)b), sizeof p);
        mem_free(p);
    }
    pool_close(d->workers);
    mem_free(d);
}
