/* bench_cuda_exchange.c - what attention sends between ranks that have a CUDA device each: by peer memory and,
 * where it is, by NCCL, one after the other in the same run.
 *
 * A call is one exchange of all ranks: q (each rank's heads to all), partials (f32 and LSE, each rank's to
 * the rank of their heads), both, or the candidates of a selection (each rank's best TOPK with their
 * scores, to all, and the cut of the best TOPK of them all). Peer memory merges partials as they come; NCCL's
 * rows move them only, values and LSE in one message. A graph per device holds N_CALL of them, which is how a
 * step meets them: the time of a call is a graph's over N_CALL, between two events of rank 0. All devices begin
 * together, behind an exchange of nothing. Ranks beyond the devices share them ("shared" in the row's name): that shows
 * what the kernels cost, not what a link does, and NCCL sits it out.
 *
 * Bytes: what one rank sends. The ceiling is a copy of the driver between neighbours, all ranks at once. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/comm_cuda.h"
#include "comm/nccl.h"

enum {
    DIM = KVS_LATENT_DIM,
    QDIM = KVS_ROW_DIM,
    TOPK = 2048,
    N_CALL = 64,
    N_REP = 15,
    TRASH = 128 << 20,
    COPY = 64 << 20,
    COPIES = 8,
    TIMEOUT_MS = 10000
};

typedef enum moved { MOVED_Q, MOVED_PARTIAL, MOVED_BOTH, MOVED_SELECT, N_MOVED } moved;

typedef struct exchange_bench {
    cuda_bench *b;
    const cuda_point *p;
    gpu_world w;
    int32_t n, n_row, heads;
    exchange_args start[WIRE_MAX_RANK], q[WIRE_MAX_RANK];
    exchange_merge_args part[WIRE_MAX_RANK];
    void *trash[WIRE_MAX_RANK];
    uint16_t *host_q[WIRE_MAX_RANK]; /* [n_row, heads / n, 576] */
    float *host_part[WIRE_MAX_RANK]; /* [n_row, heads, 512] */
    float *host_lse[WIRE_MAX_RANK];
    exchange_args select[WIRE_MAX_RANK]; /* one row: ids, scores and counts of the rank's lists */
    int32_t *host_cand[WIRE_MAX_RANK];
    topk_merge_args cut[WIRE_MAX_RANK];
    void *send[WIRE_MAX_RANK], *recv[WIRE_MAX_RANK]; /* NCCL's messages */
    dev_graph graph[WIRE_MAX_RANK];
    double ceiling;
} exchange_bench;

static int64_t q_bytes(const exchange_bench *s)
{
    return (int64_t)s->n_row * (s->heads / s->n) * QDIM * 2;
}

/* To one peer. */
static int64_t part_bytes(const exchange_bench *s)
{
    return (int64_t)s->n_row * (s->heads / s->n) * (DIM + 1) * 4;
}

/* Words of a rank's lists. */
static int64_t cand_words(const exchange_bench *s)
{
    return ((int64_t)s->n_row * (2 * TOPK + 1) + 3) / 4 * 4;
}

static double bytes_of(const exchange_bench *s, moved what)
{
    if (what == MOVED_SELECT) {
        return (double)(s->n - 1) * (double)cand_words(s) * 4.0;
    }
    const double q = what != MOVED_PARTIAL ? (double)q_bytes(s) : 0.0;
    const double part = what != MOVED_Q ? (double)part_bytes(s) : 0.0;
    return (s->n - 1) * (q + part);
}

/* ---- buffers ---------------------------------------------------------------------------------- */

static kvs_status make_q(exchange_bench *s, int32_t r, kvs_error *err)
{
    const int32_t local = s->heads / s->n;
    const size_t n = (size_t)q_bytes(s) / 2;
    exchange_args *a = &s->q[r];
    void *src = NULL;
    s->host_q[r] = mem_alloc(n * 2, 0);
    if (s->host_q[r] == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the queries of a case");
    }
    rng g = rng_init(s->b->cfg->seed, (uint64_t)(100 + r));
    for (size_t i = 0; i + 4 <= n; i += 4) {
        const uint64_t x = rng_next(&g);
        memcpy(s->host_q[r] + i, &x, 8);
    }
    TRY(gpu_alloc(&s->w, r, n * 2, &src, err));
    TRY(gpu_alloc(&s->w, r, n * 2 * (size_t)s->n, &a->part[0].dst, err));
    gpu_put(&s->w, r, src, s->host_q[r], n * 2);
    a->w = p2p_wire(s->w.g, r);
    a->op = EXCHANGE_Q;
    a->n_row = s->n_row;
    a->n_part = 1;
    a->part[0].src = src;
    a->part[0].bytes = local * QDIM * 2;
    a->part[0].src_row = a->part[0].bytes;
    a->part[0].dst_rank = a->part[0].bytes;
    a->part[0].dst_row = (int64_t)s->heads * QDIM * 2;
    s->start[r] = *a;
    s->start[r].op = EXCHANGE_BARRIER;
    s->start[r].n_row = 0;
    s->start[r].n_part = 0;
    return KVS_OK;
}

static kvs_status make_part(exchange_bench *s, int32_t r, kvs_error *err)
{
    const size_t pairs = (size_t)s->n_row * (size_t)s->heads;
    exchange_merge_args *a = &s->part[r];
    void *p = NULL;
    s->host_part[r] = mem_alloc(pairs * DIM * 4, 0);
    s->host_lse[r] = mem_alloc(pairs * 4, 0);
    if (s->host_part[r] == NULL || s->host_lse[r] == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the partials of a case");
    }
    rng g = rng_init(s->b->cfg->seed, (uint64_t)(200 + r));
    for (size_t i = 0; i < pairs * DIM; i++) {
        s->host_part[r][i] = (float)rng_next_uniform(&g) - 0.5f;
    }
    gen_f32(&g, s->host_lse[r], (int64_t)pairs, 2.0f);
    a->w = p2p_wire(s->w.g, r);
    a->n_row = s->n_row;
    a->n_head = s->heads;
    TRY(gpu_alloc(&s->w, r, pairs * DIM * 4, &p, err));
    gpu_put(&s->w, r, p, s->host_part[r], pairs * DIM * 4);
    a->part = p;
    a->part_row = (int64_t)s->heads * DIM;
    TRY(gpu_alloc(&s->w, r, pairs * 4, &p, err));
    gpu_put(&s->w, r, p, s->host_lse[r], pairs * 4);
    a->part_lse = p;
    a->lse_row = s->heads;
    TRY(gpu_alloc(&s->w, r, pairs / (size_t)s->n * DIM * 2, &a->out, err));
    a->out_type = KVS_DTYPE_BF16;
    a->out_row = (int64_t)(s->heads / s->n) * DIM;
    TRY(gpu_alloc(&s->w, r, pairs / (size_t)s->n * 4, &p, err));
    a->lse = p;
    const int64_t largest = part_bytes(s) > cand_words(s) * 4 ? part_bytes(s) : cand_words(s) * 4;
    const size_t message = (size_t)largest * (size_t)s->n;
    TRY(gpu_alloc(&s->w, r, message, &s->send[r], err));
    TRY(gpu_alloc(&s->w, r, message, &s->recv[r], err));
    dev_cuda.fill(s->send[r], 0x11, message);
    TRY(gpu_alloc(&s->w, r, TRASH, &s->trash[r], err));
    return KVS_OK;
}

/* Lists of full length: every n-th position is the rank's, a random share of them is listed. */
static kvs_status make_select(exchange_bench *s, int32_t r, kvs_error *err)
{
    const size_t bytes = (size_t)cand_words(s) * 4;
    exchange_args *a = &s->select[r];
    void *p = NULL;
    s->host_cand[r] = mem_calloc(1, bytes);
    if (s->host_cand[r] == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the candidates of a case");
    }
    rng g = rng_init(s->b->cfg->seed, (uint64_t)(300 + r));
    int32_t *id = s->host_cand[r];
    int32_t *count = id + (int64_t)s->n_row * 2 * TOPK;
    for (int32_t row = 0; row < s->n_row; row++) {
        int32_t at = 0;
        for (int32_t i = 0; i < TOPK; i++) {
            at += 1 + (int32_t)(rng_next(&g) >> 59);
            id[row * TOPK + i] = at * s->n + r;
        }
        count[row] = TOPK;
    }
    gen_f32(&g, (float *)(void *)(id + (int64_t)s->n_row * TOPK), (int64_t)s->n_row * TOPK, 1.0f);
    a->w = p2p_wire(s->w.g, r);
    a->op = EXCHANGE_SELECT;
    a->n_row = 1;
    a->n_part = 1;
    a->part[0].bytes = (int32_t)bytes;
    a->part[0].dst_rank = (int64_t)bytes;
    TRY(gpu_alloc(&s->w, r, bytes, &p, err));
    gpu_put(&s->w, r, p, s->host_cand[r], bytes);
    a->part[0].src = p;
    TRY(gpu_alloc(&s->w, r, bytes * (size_t)s->n, &a->part[0].dst, err));
    TRY(gpu_alloc(&s->w, r, (size_t)s->n_row * 3 * 4, &p, err));
    s->cut[r] = (topk_merge_args){.n_row = s->n_row, .n_list = s->n, .k = TOPK, .cand_stride = TOPK, .cut_score = p,
                                  .cut_id = (int32_t *)p + s->n_row, .n_total = (int32_t *)p + 2 * s->n_row};
    s->cut[r].scratch_bytes = s->b->kern.topk_merge_scratch(&s->cut[r], &s->w.queue[r]);
    return gpu_alloc(&s->w, r, s->cut[r].scratch_bytes + 64, &s->cut[r].scratch, err);
}

/* The cut of rank r, from lists of all ranks. */
static void merge_lists(exchange_bench *s, int32_t r, const void *lists, dev_queue *q)
{
    const float *score[WIRE_MAX_RANK];
    const int32_t *id[WIRE_MAX_RANK];
    const int32_t *count[WIRE_MAX_RANK];
    for (int32_t p = 0; p < s->n; p++) {
        id[p] = (const int32_t *)lists + p * cand_words(s);
        score[p] = (const float *)(const void *)(id[p] + (int64_t)s->n_row * TOPK);
        count[p] = id[p] + (int64_t)s->n_row * 2 * TOPK;
    }
    topk_merge_args a = s->cut[r];
    a.cand_score = score;
    a.cand_id = id;
    a.cand_count = count;
    s->b->kern.topk_merge(&a, q);
}

/* ---- timing ----------------------------------------------------------------------------------- */

/* All ranks begin together; the time between two events of rank 0. */
static kvs_status run_once(exchange_bench *s, void (*enqueue)(exchange_bench *s, int32_t rank), double *us,
                           kvs_error *err)
{
    dev_event *e = s->b->event;
    for (int32_t r = 0; r < s->n; r++) {
        TRY(p2p_use(s->w.g, r, err));
        for (int i = 0; i < 2; i++) { /* so that the host is ahead */
            dev_queue_fill(&s->w.queue[r], s->trash[r], i, TRASH);
        }
    }
    gpu_exchange(&s->w, s->start, -1, false);
    for (int32_t r = 0; r < s->n; r++) {
        TRY(p2p_use(s->w.g, r, err));
        if (r == 0) {
            dev_event_record(&e[0], &s->w.queue[r]);
        }
        enqueue(s, r);
        if (r == 0) {
            dev_event_record(&e[1], &s->w.queue[r]);
        }
    }
    TRY(gpu_sync(&s->w, err));
    TRY(p2p_use(s->w.g, 0, err));
    *us = dev_event_elapsed_us(&e[0], &e[1]);
    return p2p_check(s->w.g, 0, err);
}

static void enqueue_graph(exchange_bench *s, int32_t rank)
{
    gpu_launch(&s->w, s->graph, rank);
}

static void enqueue_copies(exchange_bench *s, int32_t rank)
{
    const int32_t to = (rank + 1) % s->n;
    for (int i = 0; i < COPIES; i++) {
        dev_queue_copy(&s->w.queue[rank], (uint8_t *)s->trash[to] + COPY, s->trash[rank], COPY);
    }
}

static kvs_status measure_ceiling(exchange_bench *s, kvs_error *err)
{
    double us = 0.0;
    for (int i = 0; i < 2; i++) {
        TRY(run_once(s, enqueue_copies, &us, err));
    }
    s->ceiling = (double)COPY * COPIES / us * 1e6;
    return KVS_OK;
}

static kvs_status time_graphs(exchange_bench *s, bench_timing *t, kvs_error *err)
{
    double us[N_REP];
    double warm;
    TRY(run_once(s, enqueue_graph, &warm, err));
    for (int i = 0; i < N_REP; i++) {
        TRY(run_once(s, enqueue_graph, &us[i], err));
        us[i] /= N_CALL;
    }
    *t = bench_summary(us, N_REP);
    return KVS_OK;
}

static void free_graphs(exchange_bench *s)
{
    for (int32_t r = 0; r < s->n; r++) {
        dev_graph_free(&s->graph[r]);
    }
}

static void hand_over(exchange_bench *s, const char *variant, moved what, const bench_timing *t,
                      const char *wrong)
{
    static const char *const name[2][N_MOVED] = {
        {"q", "partials", "q+partials", "candidates"},
        {"q/shared", "partials/shared", "q+partials/shared", "candidates/shared"}};
    const double byte = bytes_of(s, what);
    const kvs_bench_row row = {
        .name = name[s->n > s->b->info.n_device][what],
        .op = "exchange",
        .variant = variant,
        .device = "cuda",
        .kv = "",
        .batch = s->p->batch,
        .q = s->p->q,
        .heads = s->heads,
        .dcp = s->n,
        .topk = what == MOVED_SELECT ? TOPK : 0,
        .n_rep = t->n,
        .median_us = t->median_us,
        .min_us = t->min_us,
        .p90_us = t->p90_us,
        .graph_us = t->median_us,
        .gbyte = byte * 1e-9,
        .byte_per_s = byte / t->median_us * 1e6,
        .ceiling_kind = "peer_copy",
        .ceiling = s->ceiling,
        .share = byte / t->median_us * 1e6 / s->ceiling,
        .passed = wrong[0] == '\0',
    };
    bench_hand_over(s->b->cfg, &s->b->tally, &row, wrong);
}

/* ---- peer memory ------------------------------------------------------------------------------- */

typedef struct recording {
    exchange_bench *s;
    moved what;
} recording;

static void enqueue_p2p(gpu_world *w, int32_t lead, void *ctx)
{
    const recording *k = ctx;
    int32_t led[WIRE_MAX_RANK];
    const int32_t n_led = k->what == MOVED_SELECT ? gpu_ranks_led_by(w, lead, led) : 0;
    for (int i = 0; i < N_CALL; i++) {
        if (k->what == MOVED_Q || k->what == MOVED_BOTH) {
            gpu_exchange_led_by(w, k->s->q, lead);
        }
        if (k->what == MOVED_PARTIAL || k->what == MOVED_BOTH) {
            gpu_merge_led_by(w, k->s->part, lead);
        }
        if (k->what == MOVED_SELECT) {
            gpu_exchange_led_by(w, k->s->select, lead);
        }
        for (int32_t r = 0; r < n_led; r++) {
            merge_lists(k->s, led[r], k->s->select[led[r]].part[0].dst, &w->queue[lead]);
        }
    }
}

/* Every rank has every rank's queries. */
static kvs_status check_q(exchange_bench *s, char *wrong, size_t cap, kvs_error *err)
{
    const size_t piece = (size_t)(s->heads / s->n) * QDIM * 2;
    const size_t all = (size_t)q_bytes(s) * (size_t)s->n;
    uint8_t *got = mem_alloc(all, 0);
    if (got == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check queries");
    }
    for (int32_t r = 0; r < s->n; r++) {
        gpu_get(&s->w, r, got, s->q[r].part[0].dst, all);
        for (int32_t i = 0; i < s->n_row * s->n && wrong[0] == '\0'; i++) {
            const int32_t row = i / s->n;
            const int32_t from = i % s->n;
            if (memcmp(got + (size_t)i * piece, (const uint8_t *)s->host_q[from] + (size_t)row * piece,
                       piece) != 0) {
                snprintf(wrong, cap, "rank %d: queries of rank %d, row %d", (int)r, (int)from, (int)row);
            }
        }
    }
    mem_free(got);
    return KVS_OK;
}

/* The last row against the reference's merge. */
static kvs_status check_part(exchange_bench *s, char *wrong, size_t cap, kvs_error *err)
{
    const int32_t local = s->heads / s->n;
    const size_t n = (size_t)local * DIM;
    const float *out_in[WIRE_MAX_RANK];
    const float *lse_in[WIRE_MAX_RANK];
    kern_table ref;
    dev_queue host;
    uint16_t *got = mem_alloc(2 * n * sizeof *got, 0);
    if (got == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check partials");
    }
    dev_queue_init(&host, NULL);
    (void)kern_init(&ref, 0, NULL, NULL);
    for (int32_t r = 0; r < s->n && wrong[0] == '\0'; r++) {
        for (int32_t p = 0; p < s->n; p++) {
            const size_t head = (size_t)(s->n_row - 1) * (size_t)s->heads + (size_t)(r * local);
            out_in[p] = s->host_part[p] + head * DIM;
            lse_in[p] = s->host_lse[p] + head;
        }
        const merge_args a = {.n_part = s->n, .mode = MERGE_TREE, .n_row = 1, .n_head = local, .dim = DIM,
                              .out_in = out_in, .lse_in = lse_in, .in_stride_head = DIM,
                              .out = got + n, .out_type = KVS_DTYPE_BF16, .out_stride_head = DIM};
        ref.merge(&a, &host);
        gpu_get(&s->w, r, got, (const uint16_t *)s->part[r].out + (size_t)(s->n_row - 1) * n, n * 2);
        if (memcmp(got, got + n, n * 2) != 0) {
            snprintf(wrong, cap, "rank %d: merged partials differ from the reference's", (int)r);
        }
    }
    mem_free(got);
    return KVS_OK;
}

typedef struct candidate {
    float score;
    int32_t id;
} candidate;

static int better_first(const void *x, const void *y)
{
    const candidate *a = x;
    const candidate *b = y;
    return a->score != b->score ? (a->score < b->score ? 1 : -1) : a->id > b->id ? 1 : -1;
}

/* The cut of the last row, on every rank, against a sort. */
static kvs_status check_select(exchange_bench *s, char *wrong, size_t cap, kvs_error *err)
{
    candidate *all = mem_alloc((size_t)s->n * TOPK * sizeof *all, 0);
    if (all == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check a selection");
    }
    for (int32_t i = 0; i < s->n * TOPK; i++) {
        const int32_t *id = s->host_cand[i / TOPK] + (int64_t)(s->n_row - 1) * TOPK + i % TOPK;
        all[i].id = *id;
        memcpy(&all[i].score, id + (int64_t)s->n_row * TOPK, sizeof all[i].score);
    }
    qsort(all, (size_t)s->n * TOPK, sizeof *all, better_first);
    for (int32_t r = 0; r < s->n && wrong[0] == '\0'; r++) {
        candidate got;
        gpu_get(&s->w, r, &got.score, s->cut[r].cut_score + s->n_row - 1, sizeof got.score);
        gpu_get(&s->w, r, &got.id, s->cut[r].cut_id + s->n_row - 1, sizeof got.id);
        if (got.score != all[TOPK - 1].score || got.id != all[TOPK - 1].id) {
            snprintf(wrong, cap, "rank %d: the cut is (%g, %d), want (%g, %d)", (int)r, (double)got.score, (int)got.id,
                     (double)all[TOPK - 1].score, (int)all[TOPK - 1].id);
        }
    }
    mem_free(all);
    return KVS_OK;
}

static kvs_status check_moved(exchange_bench *s, moved what, char *wrong, size_t cap, kvs_error *err)
{
    if (what == MOVED_SELECT) {
        return check_select(s, wrong, cap, err);
    }
    TRY(what != MOVED_PARTIAL ? check_q(s, wrong, cap, err) : KVS_OK);
    return what != MOVED_Q ? check_part(s, wrong, cap, err) : KVS_OK;
}

static kvs_status bench_p2p(exchange_bench *s, kvs_error *err)
{
    for (int i = 0; i < N_MOVED; i++) {
        char wrong[128] = "";
        bench_timing t = {0};
        recording k = {s, (moved)i};
        kvs_status st = gpu_record(&s->w, enqueue_p2p, &k, s->graph, err);
        st = st == KVS_OK ? time_graphs(s, &t, err) : st;
        free_graphs(s);
        TRY(st);
        TRY(check_moved(s, (moved)i, wrong, sizeof wrong, err));
        hand_over(s, "p2p", (moved)i, &t, wrong);
    }
    return KVS_OK;
}

/* ---- NCCL -------------------------------------------------------------------------------------- */

typedef struct nccl_part {
    exchange_bench *s;
    comm *host;
    nccl *c;
    int32_t rank;
    moved what;
    kvs_status st;
    kvs_error err;
} nccl_part;

static kvs_status enqueue_nccl(nccl_part *k, kvs_error *err)
{
    exchange_bench *s = k->s;
    dev_queue *q = &s->w.queue[k->rank];
    if (k->what == MOVED_SELECT) {
        TRY(nccl_all_gather(k->c, s->select[k->rank].part[0].src, s->recv[k->rank], (size_t)cand_words(s) * 4, q, err));
        merge_lists(s, k->rank, s->recv[k->rank], q);
        return KVS_OK;
    }
    if (k->what != MOVED_PARTIAL) {
        TRY(nccl_all_gather(k->c, s->q[k->rank].part[0].src, s->recv[k->rank], (size_t)q_bytes(s), q, err));
    }
    if (k->what != MOVED_Q) {
        TRY(nccl_all_to_all(k->c, s->send[k->rank], s->recv[k->rank], (size_t)part_bytes(s), q, err));
    }
    return KVS_OK;
}

/* A rank's graph: NCCL connects in the first call, outside of it. */
static kvs_status record_nccl(nccl_part *k, kvs_error *err)
{
    exchange_bench *s = k->s;
    dev_queue *q = &s->w.queue[k->rank];
    TRY(p2p_use(s->w.g, k->rank, err));
    if (k->c == NULL) {
        TRY(nccl_open(&k->c, k->host, s->w.device[k->rank], err));
    }
    TRY(enqueue_nccl(k, err));
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

static kvs_status record_all(exchange_bench *s, nccl_part *k, moved what, kvs_error *err)
{
    pthread_t thread[WIRE_MAX_RANK];
    int32_t started = 0;
    for (; started < s->n; started++) {
        k[started].what = what;
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

static kvs_status bench_nccl(exchange_bench *s, kvs_error *err)
{
    comm *host[WIRE_MAX_RANK];
    nccl_part k[WIRE_MAX_RANK];
    const comm_config cc = {.timeout_ms = TIMEOUT_MS};
    kvs_error why;
    if (nccl_load(NULL, &why) < 0) {
        LOG(WARN, CORE, "bench exchange: without NCCL: %s", why.text);
        return KVS_OK;
    }
    TRY(comm_thread_open(host, s->n, &cc, err));
    memset(k, 0, sizeof k);
    for (int32_t r = 0; r < s->n; r++) {
        k[r].s = s;
        k[r].host = host[r];
        k[r].rank = r;
    }
    kvs_status st = KVS_OK;
    for (int i = 0; i < N_MOVED && st == KVS_OK; i++) {
        bench_timing t = {0};
        st = record_all(s, k, (moved)i, err);
        st = st == KVS_OK ? time_graphs(s, &t, err) : st;
        free_graphs(s);
        if (st == KVS_OK) {
            hand_over(s, "nccl", (moved)i, &t, "");
        }
    }
    for (int32_t r = 0; r < s->n; r++) {
        if (p2p_use(s->w.g, r, NULL) == KVS_OK) {
            nccl_close(k[r].c);
        }
        comm_close(host[r]);
    }
    return st;
}

/* ---- the op ------------------------------------------------------------------------------------ */

static kvs_status run_open(exchange_bench *s, kvs_error *err)
{
    for (int32_t r = 0; r < s->n; r++) {
        TRY(make_q(s, r, err));
        TRY(make_part(s, r, err));
        TRY(make_select(s, r, err));
    }
    TRY(measure_ceiling(s, err));
    TRY(bench_p2p(s, err));
    return s->n > s->b->info.n_device ? KVS_OK : bench_nccl(s, err);
}

kvs_status cuda_run_exchange(cuda_bench *b, const cuda_point *p, kvs_error *err)
{
    if (p->heads % p->dcp != 0) {
        return err_set(err, KVS_INVALID, "bench exchange: %d heads cannot be cut over %d ranks",
                       (int)p->heads, (int)p->dcp);
    }
    exchange_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case of exchange");
    }
    s->b = b;
    s->p = p;
    s->n = p->dcp;
    s->n_row = p->batch * p->q;
    s->heads = p->heads;
    int64_t largest = q_bytes(s) > part_bytes(s) ? q_bytes(s) : part_bytes(s);
    largest = largest > cand_words(s) * 4 ? largest : cand_words(s) * 4;
    kvs_status st = gpu_open(&s->w, s->n, b->info.n_device, true, largest, TIMEOUT_MS, err);
    st = st == KVS_OK ? run_open(s, err) : st;
    for (int32_t r = 0; r < WIRE_MAX_RANK; r++) {
        mem_free(s->host_q[r]);
        mem_free(s->host_part[r]);
        mem_free(s->host_lse[r]);
        mem_free(s->host_cand[r]);
    }
    if (st != KVS_DEVICE && s->w.g != NULL) {
        gpu_close(&s->w);
        (void)dev_cuda_use(0, NULL);
    }
    mem_free(s);
    return st;
}
