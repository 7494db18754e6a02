/* bench_cuda_layer.c - one layer of attention over ranks that have a CUDA device each, end to end in one graph
 * a rank: index scores and selection on the rank's keys, candidates and queries to all, the cut of the best of them all,
 * slots, attention of all heads, partials to the ranks of their heads, merged. Dense (topk 0): queries to all, attention of
 * all heads over the rank's keys, partials, merged.
 *
 * Beside it, on the same devices: the same layer without DCP (each rank has the whole context and its own heads: no
 * exchange at all), with attention that sends its partials itself where it can ("fused"), and with NCCL in the places of the
 * exchanges. NCCL's row moves the same bytes and merges what it
 * moved, but neither packs what it sends nor sorts what it receives, which a real one would have to.
 *
 * Both ways of cutting hold the same tokens (bench_cuda_layer_make.c), so both must select the same positions and give
 * the same results (bench_cuda_layer_check.c); what a graph leaves is compared with the same launches made one by one.
 *
 * Index keys alone are larger than an L2 from four rows of 128k on; there is one set of data. */
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "check/bench_cuda_layer.h"
#include "comm/nccl.h"

enum {
    DIM = KVS_ROW_DIM,
    VDIM = KVS_LATENT_DIM,
    IDIM = KVS_INDEX_DIM,
    N_CALL = 12,
    N_REP = 11,
    TIMEOUT_MS = 10000
};

/* WAY_SENT: as WAY_P2P, but attention sends its results itself. */
typedef enum way { WAY_ONE, WAY_P2P, WAY_SENT, WAY_NCCL, N_WAY } way;

/* ---- the ways ---------------------------------------------------------------------------------- */

static void enqueue_one(layer_bench *s, int32_t r, dev_queue *q)
{
    const kern_table *k = &s->b->kern;
    if (layer_is_sparse(s)) {
        k->index_select(&s->one[r].select, q);
        k->localise(&s->one[r].local, q);
    }
    k->attn(&s->one[r].attn, q);
}

static void find_cut(layer_bench *s, int32_t r, dev_queue *q)
{
    const float *score[WIRE_MAX_RANK];
    const int32_t *id[WIRE_MAX_RANK];
    const int32_t *count[WIRE_MAX_RANK];
    const int64_t list = (int64_t)s->n_row * s->p->topk;
    for (int32_t p = 0; p < s->n; p++) {
        id[p] = (const int32_t *)(const void *)((const uint8_t *)s->lists[r] + p * s->list_bytes);
        score[p] = (const float *)(const void *)(id[p] + list);
        count[p] = id[p] + 2 * list;
    }
    topk_merge_args a = s->part[r].cut;
    a.cand_id = id;
    a.cand_score = score;
    a.cand_count = count;
    s->b->kern.topk_merge(&a, q);
}

static int is_det(const layer_bench *s)
{
    return strstr(s->b->kern.variant[KERN_OP_attn], "det") != NULL;
}

static void enqueue_rest(layer_bench *s, int32_t r, way how, dev_queue *q)
{
    if (layer_is_sparse(s)) {
        find_cut(s, r, q);
        s->b->kern.localise(&s->part[r].local, q);
    }
    if (how == WAY_SENT) {
        attn_send_sm90(&s->part[r].attn, &s->back[r].w, is_det(s), q);
    } else {
        s->b->kern.attn(&s->part[r].attn, q);
    }
}

/* What the ranks that `lead` leads do, over peer memory. */
static void enqueue_p2p(layer_bench *s, int32_t lead, way how)
{
    exchange_merge_args back[WIRE_MAX_RANK];
    int32_t led[WIRE_MAX_RANK];
    const int32_t n = gpu_ranks_led_by(&s->w, lead, led);
    dev_queue *q = &s->w.queue[lead];
    for (int32_t i = 0; i < n && layer_is_sparse(s); i++) {
        s->b->kern.index_select(&s->part[led[i]].select, q);
    }
    gpu_exchange_led_by(&s->w, s->send, lead);
    for (int32_t i = 0; i < n; i++) {
        enqueue_rest(s, led[i], how, q);
    }
    memcpy(back, s->back, sizeof back);
    for (int32_t r = 0; r < s->n; r++) {
        back[r].sent = how == WAY_SENT;
    }
    gpu_merge_led_by(&s->w, back, lead);
}

typedef struct nccl_part {
    layer_bench *s;
    comm *host;
    nccl *c;
    int32_t rank;
    kvs_status st;
    kvs_error err;
} nccl_part;

static kvs_status enqueue_nccl(nccl_part *k, kvs_error *err)
{
    layer_bench *s = k->s;
    const int32_t r = k->rank;
    dev_queue *q = &s->w.queue[r];
    const float *out_in[WIRE_MAX_RANK];
    const float *lse_in[WIRE_MAX_RANK];
    if (layer_is_sparse(s)) {
        s->b->kern.index_select(&s->part[r].select, q);
        TRY(nccl_all_gather(k->c, s->part[r].select.list_id, s->lists[r], (size_t)s->list_bytes, q,
                            err));
        find_cut(s, r, q);
        s->b->kern.localise(&s->part[r].local, q);
    }
    TRY(nccl_all_gather(k->c, s->one[r].attn.q, s->moved_in[r],
                        (size_t)(s->n_row * s->local) * DIM * 2, q, err));
    s->b->kern.attn(&s->part[r].attn,
                    q); /* on what peer memory has gathered: heads of a row side by side */
    TRY(nccl_all_to_all(k->c, s->moved_out[r], s->moved_in[r], (size_t)layer_part_bytes(s), q,
                        err));
    for (int32_t p = 0; p < s->n; p++) {
        out_in[p] = (const float *)s->moved_in[r] + p * layer_part_bytes(s) / 4;
        lse_in[p] = out_in[p] + layer_out_n(s);
    }
    const merge_args m = {.n_part = s->n,
                          .mode = MERGE_TREE,
                          .n_row = s->n_row,
                          .n_head = s->local,
                          .dim = VDIM,
                          .out_in = out_in,
                          .lse_in = lse_in,
                          .in_stride_row = s->back[r].out_row,
                          .in_stride_head = VDIM,
                          .lse_stride_row = s->local,
                          .out = s->back[r].out,
                          .out_type = KVS_DTYPE_BF16,
                          .out_stride_row = s->back[r].out_row,
                          .out_stride_head = VDIM};
    s->b->kern.merge(&m, q);
    return KVS_OK;
}

/* ---- timing ------------------------------------------------------------------------------------ */

typedef struct recording {
    layer_bench *s;
    way how;
    int32_t n;
} recording;

static void enqueue(gpu_world *w, int32_t lead, void *ctx)
{
    const recording *k = ctx;
    int32_t led[WIRE_MAX_RANK];
    const int32_t n = gpu_ranks_led_by(w, lead, led);
    for (int32_t c = 0; c < k->n; c++) {
        for (int32_t i = 0; i < n && k->how == WAY_ONE; i++) {
            enqueue_one(k->s, led[i], &w->queue[lead]);
        }
        if (k->how != WAY_ONE && n > 0) {
            enqueue_p2p(k->s, lead, k->how);
        }
    }
}

/* All ranks begin together; the time between two events of rank 0. */
static kvs_status run_graphs(layer_bench *s, double *us, kvs_error *err)
{
    dev_event *e = s->b->event;
    for (int32_t r = 0; r < s->n; r++) {
        TRY(p2p_use(s->w.g, r, err));
        for (int i = 0; i < 2; i++) { /* so that the host is ahead */
            dev_queue_fill(&s->w.queue[r], s->trash[r], i, LAYER_TRASH);
        }
    }
    gpu_exchange(&s->w, s->start, -1, false);
    for (int32_t r = 0; r < s->n; r++) {
        TRY(p2p_use(s->w.g, r, err));
        if (r == 0) {
            dev_event_record(&e[0], &s->w.queue[r]);
        }
        gpu_launch(&s->w, s->graph, r);
        if (r == 0) {
            dev_event_record(&e[1], &s->w.queue[r]);
        }
    }
    TRY(gpu_sync(&s->w, err));
    TRY(p2p_use(s->w.g, 0, err));
    *us = dev_event_elapsed_us(&e[0], &e[1]) / N_CALL;
    return p2p_check(s->w.g, 0, err);
}

static kvs_status time_graphs(layer_bench *s, bench_timing *t, kvs_error *err)
{
    double us[N_REP];
    TRY(run_graphs(s, us, err));
    for (int i = 0; i < N_REP; i++) {
        TRY(run_graphs(s, &us[i], err));
    }
    *t = bench_summary(us, N_REP);
    return KVS_OK;
}

static void free_graphs(layer_bench *s)
{
    for (int32_t r = 0; r < s->n; r++) {
        dev_graph_free(&s->graph[r]);
    }
}

/* Work of one rank. */
static void count_work(const layer_bench *s, way how, double *flop, double *byte)
{
    const int sparse = layer_is_sparse(s);
    const double dcp = how == WAY_ONE ? 1.0 : s->n;
    const double heads = how == WAY_ONE ? s->local : s->heads;
    const double tokens = (double)s->p->batch * (double)s->p->len / dcp;
    double keys = 0.0; /* (row, key) pairs */
    for (int32_t i = 0; i < s->n_row; i++) {
        keys += (double)(sparse ? s->p->topk : shard_bound(s->p->len, s->p->q, i % s->p->q)) / dcp;
    }
    *byte = (sparse ? keys : tokens) * (double)orc_row_bytes(s->p->kv) +
            (double)s->n_row * heads * DIM * 2.0 + (double)layer_out_n(s) * 2.0;
    *flop = keys * heads * 2.0 * (DIM + VDIM);
    if (sparse) {
        *byte += tokens * (IDIM + 4.0);
        *flop += tokens * s->p->q * 2.0 * IDIM * LAYER_INDEX_HEAD;
    }
}

static void hand_over(layer_bench *s, way how, const bench_timing *t, const check_result *r)
{
    static const char *const variant[N_WAY] = {NULL, "p2p", "fused", "nccl"};
    double flop, byte;
    count_work(s, how, &flop, &byte);
    char name[56];
    snprintf(name, sizeof name, "layer %dx%d h%d%s tp%d%s", (int)s->p->batch, (int)s->p->q,
             (int)s->heads, layer_is_sparse(s) ? "" : " dense", (int)s->n,
             s->n > s->b->info.n_device ? " shared" : "");
    const kvs_bench_row row = {
        .name = name,
        .op = "attn",
        .variant = how == WAY_ONE ? s->b->kern.variant[KERN_OP_attn] : variant[how],
        .device = "cuda",
        .kv = kv_fmt_name(s->p->kv),
        .batch = s->p->batch,
        .q = s->p->q,
        .heads = s->heads,
        .len = s->p->len,
        .topk = s->p->topk,
        .dcp = how == WAY_ONE ? 1 : s->n,
        .n_rep = t->n,
        .median_us = t->median_us,
        .min_us = t->min_us,
        .p90_us = t->p90_us,
        .graph_us = t->median_us,
        .gflop = flop * 1e-9,
        .gbyte = byte * 1e-9,
        .flop_per_s = flop / t->median_us * 1e6,
        .byte_per_s = byte / t->median_us * 1e6,
        .ceiling_kind = "read",
        .ceiling = s->b->read_rate,
        .share = byte / t->median_us * 1e6 / s->b->read_rate,
        .passed = r->n_bad == 0,
        .err = r->worst,
    };
    bench_hand_over(s->b->cfg, &s->b->tally, &row, r->first);
}

/* Both cuts once, launch by launch. They are recorded first, for that loads their kernels: loading one later waits for
 * the device, on which an exchange may wait for a rank that has not been launched yet. */
static kvs_status run_both(layer_bench *s, kvs_error *err)
{
    for (int how = WAY_ONE; how <= WAY_P2P; how++) {
        recording k = {s, (way)how, 1};
        const kvs_status st = gpu_record(&s->w, enqueue, &k, s->graph, err);
        free_graphs(s);
        TRY(st);
        for (int32_t r = 0; r < s->n; r++) {
            TRY(p2p_use(s->w.g, r, err));
            enqueue(&s->w, r, &k);
        }
        TRY(gpu_sync(&s->w, err));
    }
    return p2p_check(s->w.g, 0, err);
}

/* ---- the op ------------------------------------------------------------------------------------ */

static void *out_of(layer_bench *s, way how, int32_t r)
{
    return how == WAY_ONE ? (void *)s->one[r].attn.out : s->back[r].out;
}

/* So that nothing of an earlier way passes for this one's. */
static void poison(layer_bench *s, way how)
{
    const size_t part = layer_out_n(s) * (size_t)s->n;
    for (int32_t r = 0; r < s->n; r++) {
        if (p2p_use(s->w.g, r, NULL) == KVS_OK) {
            dev_cuda.fill(out_of(s, how, r), GPU_POISON, layer_out_n(s) * sizeof(uint16_t));
            dev_cuda.fill(s->part[r].attn.out, GPU_POISON, part * sizeof(float));
            dev_cuda.fill(s->part[r].attn.lse, GPU_POISON, part / VDIM * sizeof(float));
        }
    }
}

/* A way that needs no threads: recorded, timed, and what it leaves held against `want`, [n] results in bf16. */
static kvs_status run_way(layer_bench *s, way how, const uint8_t *want, check_result *res,
                          kvs_error *err)
{
    const size_t bytes = layer_out_n(s) * sizeof(uint16_t);
    recording k = {s, how, N_CALL};
    bench_timing t = {0};
    uint8_t *got = mem_alloc(bytes, 0);
    if (got == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to compare results");
    }
    poison(s, how);
    kvs_status st = gpu_record(&s->w, enqueue, &k, s->graph, err);
    st = st == KVS_OK ? time_graphs(s, &t, err) : st;
    free_graphs(s);
    for (int32_t r = 0; r < s->n && st == KVS_OK; r++) {
        gpu_get(&s->w, r, got, out_of(s, how, r), bytes);
        cmp_i64(res, (coord){"results of the graph that differ", r, -1, -1},
                memcmp(got, want + (size_t)r * bytes, bytes) != 0, 0);
    }
    mem_free(got);
    if (st == KVS_OK) {
        hand_over(s, how, &t, res);
    }
    return st;
}

static kvs_status run_ways(layer_bench *s, check_result *res, kvs_error *err)
{
    const size_t bytes = layer_out_n(s) * sizeof(uint16_t);
    uint8_t *want = mem_alloc(bytes * (size_t)s->n, 0);
    if (want == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to compare results");
    }
    kvs_status st = run_both(s, err);
    for (int how = WAY_ONE; how <= WAY_P2P && st == KVS_OK; how++) {
        for (int32_t r = 0; r < s->n; r++) {
            gpu_get(&s->w, r, want + (size_t)r * bytes, out_of(s, (way)how, r), bytes);
        }
        st = run_way(s, (way)how, want, res, err);
    }
    if (st == KVS_OK && attn_send_refuses(&s->part[0].attn, &s->back[0].w, is_det(s)) == NULL) {
        st = run_way(s, WAY_SENT, want, res, err); /* the bits of the way before */
    }
    mem_free(want);
    return st;
}

static kvs_status record_nccl(nccl_part *k, kvs_error *err)
{
    layer_bench *s = k->s;
    dev_queue *q = &s->w.queue[k->rank];
    TRY(p2p_use(s->w.g, k->rank, err));
    TRY(nccl_open(&k->c, k->host, s->w.device[k->rank], err));
    TRY(enqueue_nccl(k, err)); /* NCCL connects in the first call, outside of a graph */
    TRY(nccl_wait(k->c, q, err));
    TRY(dev_capture_begin(q, err));
    for (int i = 0; i < N_CALL; i++) {
        TRY(enqueue_nccl(k, err));
    }
    return dev_capture_end(q, &s->graph[k->rank], err);
}

static void *nccl_main(void *arg)
{
    nccl_part *k = arg;
    k->st = record_nccl(k, &k->err);
    if (k->st < 0) {
        comm_abort(k->host, k->err.text);
    }
    return NULL;
}

static kvs_status record_all(layer_bench *s, nccl_part *k, kvs_error *err)
{
    pthread_t thread[WIRE_MAX_RANK];
    int32_t started = 0;
    for (; started < s->n; started++) {
        if (pthread_create(&thread[started], NULL, nccl_main, &k[started]) != 0) {
            comm_abort(k[started].host, "no thread for a rank");
            break;
        }
    }
    for (int32_t r = 0; r < started; r++) {
        pthread_join(thread[r], NULL);
    }
    for (int32_t r = 0; r < started; r++) {
        if (k[r].st < 0) {
            *err = k[r].err;
            return k[r].st;
        }
    }
    return started == s->n ? KVS_OK : err_set(err, KVS_NOMEM, "no thread for a rank of NCCL");
}

static kvs_status run_nccl(layer_bench *s, const check_result *res, kvs_error *err)
{
    comm *host[WIRE_MAX_RANK];
    nccl_part k[WIRE_MAX_RANK];
    const comm_config cc = {.timeout_ms = TIMEOUT_MS};
    bench_timing t = {0};
    kvs_error why;
    if (s->n > s->b->info.n_device) {
        return KVS_OK;
    }
    if (nccl_load(NULL, &why) < 0) {
        LOG(WARN, CORE, "bench attn: without NCCL: %s", why.text);
        return KVS_OK;
    }
    TRY(comm_thread_open(host, s->n, &cc, err));
    memset(k, 0, sizeof k);
    for (int32_t r = 0; r < s->n; r++) {
        k[r].s = s;
        k[r].host = host[r];
        k[r].rank = r;
    }
    kvs_status st = record_all(s, k, err);
    st = st == KVS_OK ? time_graphs(s, &t, err) : st;
    free_graphs(s);
    for (int32_t r = 0; r < s->n; r++) {
        if (p2p_use(s->w.g, r, NULL) == KVS_OK) {
            nccl_close(k[r].c);
        }
        comm_close(host[r]);
    }
    if (st == KVS_OK) {
        hand_over(s, WAY_NCCL, &t, res);
    }
    return st;
}

static kvs_status run_open(layer_bench *s, kvs_error *err)
{
    check_result res;
    memset(&res, 0, sizeof res);
    TRY(layer_make(s, err));
    layer_set_out(s, KVS_DTYPE_F32);
    TRY(run_both(s, err));
    TRY(layer_compare(s, &res, err));
    layer_set_out(s, KVS_DTYPE_BF16);
    TRY(run_ways(s, &res, err));
    return run_nccl(s, &res, err);
}

int cuda_has_layer(const cuda_point *p)
{
    return p->dcp > 1 && p->invalid == 0.0 && p->heads % p->dcp == 0 &&
           p->len % (KVS_PAGE_TOKENS * p->dcp) == 0;
}

kvs_status cuda_run_layer(cuda_bench *b, const cuda_point *p, kvs_error *err)
{
    static const kern_op need[] = {KERN_OP_attn, KERN_OP_merge, KERN_OP_index_select,
                                   KERN_OP_topk_merge, KERN_OP_localise};
    TRY(kern_need(&b->kern, need, p->topk > 0 ? 5 : 2, err));
    layer_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a layer");
    }
    s->b = b;
    s->p = p;
    s->n = p->dcp;
    s->n_row = p->batch * p->q;
    s->heads = p->heads;
    s->local = p->heads / p->dcp;
    s->list_bytes = p->topk == 0 ? 0 : ((int64_t)s->n_row * (2 * p->topk + 1) * 4 + 15) / 16 * 16;
    s->n_key = p->batch * p->len < LAYER_KEY ? p->batch * p->len : LAYER_KEY;
    const int64_t first = (int64_t)s->n_row * s->local * DIM * 2 + s->list_bytes;
    kvs_status st =
        gpu_open(&s->w, s->n, b->info.n_device, true,
                 first > layer_part_bytes(s) ? first : layer_part_bytes(s), TIMEOUT_MS, err);
    st = st == KVS_OK ? run_open(s, err) : st;
    layer_free(s);
    if (st != KVS_DEVICE && s->w.g != NULL) {
        gpu_close(&s->w);
        (void)dev_cuda_use(0, NULL);
    }
    mem_free(s);
    return st;
}
