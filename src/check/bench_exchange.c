/* check/bench_exchange.c - what attention sends between ranks: queries gathered, partials
 * exchanged and merged, without the kernel.
 *
 * dcp ranks are threads of this process, each with its own handle; the calling thread is rank 0.
 * A call lets all of them work off batch x q rows and ends when the last is done. Partials are
 * random. Bytes: what the ranks send to each other, once written and once read. */
#include "check/bench.h"

#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "dcp/dcp.h"

enum { DIM = KVS_LATENT_DIM, TIMEOUT_MS = 30000 };

typedef struct exchange_state exchange_state;

typedef struct rank {
    exchange_state *s;
    comm *end;
    kvs_dcp *d;
    pthread_t thread;
    int started;
    kvs_status st;
    kvs_error err;
    uint16_t *q;   /* [n_row, heads / dcp, 576] bf16 */
    uint16_t *out; /* [n_row, heads / dcp, 512] bf16 */
    float *lse;    /* [n_row, heads / dcp] */
    float *part;   /* check: the partial before it is exchanged, [chunk, heads, 512] */
    float *part_lse;
} rank;

struct exchange_state {
    rank r[KVS_MAX_RANKS];
    int32_t n, n_row, heads;
    kvs_dcp_config cfg;
    kvs_status (*work)(rank *r, kvs_error *err); /* what the next round does */

    /* the gate between rank 0, which opens rounds, and the others */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int has_gate, stop;
    int64_t round;
    int32_t n_done;
};

static kvs_status open_rank(rank *r, kvs_error *err)
{
    return dcp_open(&r->d, &r->s->cfg, r->end, err);
}

static kvs_status exchange_rows(rank *r, kvs_error *err)
{
    const exchange_state *s = r->s;
    const size_t local = (size_t)(s->heads / s->n);
    for (int32_t row = 0; row < s->n_row; row += r->d->chunk_rows) {
        const int32_t left = s->n_row - row;
        const int32_t n = left < r->d->chunk_rows ? left : r->d->chunk_rows;
        const size_t at = (size_t)row * local;
        TRY(dcp_exchange(r->d, r->q + at * KVS_ROW_DIM, KVS_DTYPE_BF16, n, r->out + at * DIM,
                         KVS_DTYPE_BF16, r->lse + at, err));
    }
    return KVS_OK;
}

static void work_once(rank *r)
{
    if (r->st >= 0) {
        r->st = r->s->work(r, &r->err);
        if (r->st < 0) {
            comm_abort(r->end, r->err.text); /* the others need not wait for it */
        }
    }
}

static void *rank_main(void *arg)
{
    rank *r = arg;
    exchange_state *s = r->s;
    int64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (s->round == seen && !s->stop) {
            pthread_cond_wait(&s->turned, &s->lock);
        }
        seen = s->round;
        const int stop = s->stop;
        pthread_mutex_unlock(&s->lock);
        if (stop) {
            return NULL;
        }
        work_once(r);
        pthread_mutex_lock(&s->lock);
        s->n_done++;
        pthread_cond_broadcast(&s->turned);
        pthread_mutex_unlock(&s->lock);
    }
}

static kvs_status first_failure(const exchange_state *s, kvs_error *err)
{
    for (int32_t i = 0; i < s->n; i++) {
        if (s->r[i].st < 0) {
            if (err != NULL) {
                *err = s->r[i].err;
            }
            return s->r[i].st;
        }
    }
    return KVS_OK;
}

/* Every rank does `work` once. */
static kvs_status run_round(exchange_state *s, kvs_status (*work)(rank *r, kvs_error *err),
                            kvs_error *err)
{
    pthread_mutex_lock(&s->lock);
    s->work = work;
    s->n_done = 0;
    s->round++;
    pthread_cond_broadcast(&s->turned);
    pthread_mutex_unlock(&s->lock);
    work_once(&s->r[0]);
    pthread_mutex_lock(&s->lock);
    while (s->n_done < s->n - 1) {
        pthread_cond_wait(&s->turned, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return first_failure(s, err);
}

static kvs_status call(bench_case *c, int32_t set, kvs_error *err)
{
    (void)set;
    return run_round(c->state, exchange_rows, err);
}

static void fini(bench_case *c)
{
    exchange_state *s = c->state;
    if (s->has_gate) {
        pthread_mutex_lock(&s->lock);
        s->stop = 1;
        pthread_cond_broadcast(&s->turned);
        pthread_mutex_unlock(&s->lock);
    }
    for (int32_t i = 0; i < s->n; i++) {
        if (s->r[i].started) {
            pthread_join(s->r[i].thread, NULL);
        }
        dcp_close(s->r[i].d);
        comm_close(s->r[i].end);
    }
    if (s->has_gate) {
        pthread_cond_destroy(&s->turned);
        pthread_mutex_destroy(&s->lock);
    }
}

/* ---- comparison ------------------------------------------------------------------------------ */

static void fill_partials(bench_case *c, rank *r)
{
    const int64_t pairs = (int64_t)r->d->chunk_rows * r->s->heads;
    gen_f32(&c->r, r->d->node_out, pairs * DIM, 1.0f);
    gen_f32(&c->r, r->d->node_lse, pairs, 4.0f);
}

/* The first chunk of rank i's heads against the merge of the partials that went in. */
static kvs_status check(bench_case *c, check_result *result, kvs_error *err)
{
    exchange_state *s = c->state;
    const int32_t local = s->heads / s->n;
    const float *out_in[KVS_MAX_RANKS];
    const float *lse_in[KVS_MAX_RANKS];
    for (int32_t i = 0; i < s->n; i++) {
        rank *r = &s->r[i];
        const size_t pairs = (size_t)r->d->chunk_rows * (size_t)s->heads;
        fill_partials(c, r);
        void *p = NULL;
        TRY(bench_alloc(c, pairs * DIM * sizeof(float), &p, err));
        r->part = memcpy(p, r->d->node_out, pairs * DIM * sizeof(float));
        TRY(bench_alloc(c, pairs * sizeof(float), &p, err));
        r->part_lse = memcpy(p, r->d->node_lse, pairs * sizeof(float));
    }
    TRY(call(c, 0, err));
    const int32_t n = s->n_row < s->r[0].d->chunk_rows ? s->n_row : s->r[0].d->chunk_rows;
    for (int32_t i = 0; i < s->n && n == s->n_row;
         i++) { /* later chunks of ag_rs have used them up */
        for (int32_t p = 0; p < s->n; p++) {
            out_in[p] = s->r[p].part + (size_t)(i * local) * DIM;
            lse_in[p] = s->r[p].part_lse + i * local;
        }
        const merge_args a = {
            .n_part = s->n,
            .mode = MERGE_TREE,
            .n_row = n,
            .n_head = local,
            .dim = DIM,
            .out_in = out_in,
            .lse_in = lse_in,
            .in_stride_row = (int64_t)s->heads * DIM,
            .in_stride_head = DIM,
            .lse_stride_row = s->heads,
            .out = s->r[i].out,
            .out_type = KVS_DTYPE_BF16,
            .out_stride_row = (int64_t)local * DIM,
            .out_stride_head = DIM,
            .lse = s->r[i].lse,
        };
        orc_merge o;
        orc_merge_head(&a, n - 1, local - 1, &o);
        merge_compare_head(&a, &o, n - 1, local - 1, result);
    }
    return KVS_OK;
}

/* ---- the op ---------------------------------------------------------------------------------- */

static kvs_status start_ranks(bench_case *c, exchange_state *s, kvs_error *err)
{
    comm *end[KVS_MAX_RANKS];
    const int32_t given = c->run->cfg->timeout_ms;
    const comm_config cc = {.timeout_ms = given > 0 ? given : TIMEOUT_MS, .no_check = 0};
    TRY(comm_thread_open(end, s->n, &cc, err));
    for (int32_t i = 0; i < s->n; i++) {
        s->r[i].s = s;
        s->r[i].end = end[i];
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->turned, NULL);
    s->has_gate = 1;
    for (int32_t i = 1; i < s->n; i++) {
        if (pthread_create(&s->r[i].thread, NULL, rank_main, &s->r[i]) != 0) {
            return err_set(err, KVS_NOMEM, "no thread for rank %d of %d", i, s->n);
        }
        s->r[i].started = 1;
    }
    return run_round(s, open_rank, err);
}

static kvs_status make_buffers(bench_case *c, exchange_state *s, kvs_error *err)
{
    const size_t local = (size_t)s->n_row * (size_t)(s->heads / s->n);
    for (int32_t i = 0; i < s->n; i++) {
        rank *r = &s->r[i];
        void *p = NULL;
        TRY(bench_alloc(c, local * (KVS_ROW_DIM + DIM) * sizeof(uint16_t), &p, err));
        r->q = p;
        r->out = r->q + local * KVS_ROW_DIM;
        gen_bf16(&c->r, r->q, (int64_t)local * KVS_ROW_DIM, 1.0f);
        TRY(bench_alloc(c, local * sizeof(float), &p, err));
        r->lse = p;
        fill_partials(c, r);
    }
    return KVS_OK;
}

static kvs_status setup(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    if (c->p.dcp == 1 || KVS_LANES % c->p.dcp != 0) {
        return bench_skip(c, "dcp %d: ranks that exchange are 2, 4 or 8", c->p.dcp);
    }
    if (c->p.heads % c->p.dcp != 0) {
        return bench_skip(c, "%d heads cannot be cut over %d ranks", c->p.heads, c->p.dcp);
    }
    const int32_t cores = pool_cores();
    TRY(bench_threads(c->run, c->p.dcp < cores ? c->p.dcp : cores, err)); /* for the ceiling */
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(exchange_state), &p, err));
    exchange_state *s = p;
    c->state = s;
    c->fini = fini;
    const kvs_exchange how = c->run->cfg->exchange;
    c->label = how == KVS_EXCHANGE_AG_RS ? "ag_rs" : "a2a";
    s->n = c->p.dcp;
    s->n_row = c->p.batch * c->p.q;
    s->heads = c->p.heads;
    s->cfg = kvs_dcp_config_default();
    s->cfg.tp = s->n;
    s->cfg.dcp = s->n;
    s->cfg.n_head = s->heads;
    s->cfg.softmax_scale = 1.0f;
    s->cfg.kv = KVS_KV_BF16;
    s->cfg.exchange = how;
    s->cfg.max_rows = s->n_row;
    s->cfg.cpu = c->run->cfg->cpu;
    s->cfg.kernels = c->run->cfg->kernels;
    TRY(start_ranks(c, s, err));
    TRY(make_buffers(c, s, err));
    c->variant = comm_transport(s->r[0].end);
    TRY(call(c, 0, err));
    kvs_step_info info;
    double sent = 0.0;
    for (int32_t i = 0; i < s->n; i++) {
        TRY(dcp_finish(s->r[i].d, &info, err));
        sent += (double)info.bytes_q + (double)info.bytes_partial;
    }
    c->byte = 2.0 * sent;
    c->mem_kind = ROOF_COPY;
    c->call = call;
    c->check = check;
    return KVS_OK;
}

static const int64_t k_dcp[] = {8, 4, 2};

const bench_op bench_exchange_op = {
    .pub = {.name = "exchange",
            .about =
                "queries and partials between dcp thread ranks, merged, without the kernel. Own "
                "grid: batch 8, q 1, heads 128, dcp 8, 4, 2",
            .axes = KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_HEADS | KVS_BENCH_DCP |
                    KVS_BENCH_EXCHANGE | KVS_BENCH_KERNELS},
    .op = KERN_OP_merge,
    .def = {.batch = 8, .q = 1, .heads = 128, .threads = 1, .kv = KVS_KV_BF16},
    .dcp = {k_dcp, 3},
    .setup = setup,
};
