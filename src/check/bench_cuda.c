/* bench_cuda.c - kvspan bench --device cuda: points, timing, rows. */
#include "check/bench_cuda.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "num/kvfmt.h"

enum { TRASH_MIB = 512, READ_MIB = 2048, N_READ = 5, GRAPH_MAX = 96, GRAPH_REPS = 7, REPS = 80 };

/* ---- memory ---------------------------------------------------------------------------------- */

kvs_status cuda_case_alloc(cuda_case *c, size_t bytes, void **out, kvs_error *err)
{
    *out = c->n_block < CUDA_MAX_BLOCK ? dev_cuda.alloc(bytes > 0 ? bytes : 64) : NULL;
    if (*out == NULL) {
        return err_set(err, KVS_LIMIT,
                       "batch %d, q %d, heads %d, len %" PRId64
                       ": the device has no %.2f GiB left for it: use a smaller one",
                       (int)c->p.batch, (int)c->p.q, (int)c->p.heads, c->p.len,
                       (double)bytes / (1024.0 * 1024.0 * 1024.0));
    }
    c->block[c->n_block++] = *out;
    return KVS_OK;
}

int32_t cuda_case_sets(const cuda_case *c, double set_bytes)
{
    const double want = 5.0 * (double)c->b->info.l2_bytes / (set_bytes > 1.0 ? set_bytes : 1.0);
    if (want < 0.3) { /* one alone leaves nothing of its beginning there */
        return 1;
    }
    return want < 3.0 ? 3 : want > CUDA_MAX_SET ? CUDA_MAX_SET : (int32_t)ceil(want);
}

void cuda_case_tile(cuda_case *c, void *dst, int64_t bytes, const void *template_data, int64_t n)
{
    uint8_t *to = dst;
    int64_t done = n < bytes ? n : bytes;
    dev_cuda.put(to, template_data, (size_t)done);
    while (done < bytes) { /* whole templates, so that place i holds i modulo n */
        const int64_t more = bytes - done < done ? bytes - done : done;
        dev_queue_copy(&c->b->queue, to + done, to, (size_t)more);
        done += more;
    }
    dev_queue_sync(&c->b->queue);
}

check_variant cuda_case_variant(const cuda_case *c)
{
    int32_t n = 0;
    const kern_variant *list = kern_variants_cuda(&n);
    const char *name = c->b->kern.variant[c->op];
    for (int32_t i = 0; i < n; i++) {
        if (list[i].op == c->op && strcmp(list[i].name, name) == 0) {
            return check_variant_of(&list[i]);
        }
    }
    return (check_variant){.name = name};
}

/* ---- timing ---------------------------------------------------------------------------------- */

/* Isolated calls. Before each batch the device gets some work, so that the host is ahead of it and no
 * event waits for a launch. */
static kvs_status time_alone(cuda_case *c, void (*launch)(cuda_case *, int32_t), bench_timing *t,
                             kvs_error *err)
{
    cuda_bench *b = c->b;
    dev_queue *q = &b->queue;
    const int32_t reps = b->cfg->reps > 0 ? b->cfg->reps : REPS;
    double *us = mem_alloc_array((size_t)reps, sizeof *us, 0);
    if (us == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for %d samples", (int)reps);
    }
    for (int32_t i = 0; i < 3; i++) {
        launch(c, i % c->n_set);
    }
    dev_queue_sync(q);
    kvs_status st = dev_queue_check(q, err);
    for (int32_t done = 0; done < reps && st == KVS_OK;) {
        const int32_t n = reps - done < CUDA_BATCH ? reps - done : CUDA_BATCH;
        for (int i = 0; i < 2; i++) {
            dev_queue_fill(q, b->trash, i, (size_t)TRASH_MIB << 20);
        }
        for (int32_t i = 0; i < n; i++) {
            dev_event_record(&b->event[2 * i], q);
            launch(c, (done + i) % c->n_set);
            dev_event_record(&b->event[2 * i + 1], q);
        }
        dev_queue_sync(q);
        st = dev_queue_check(q, err);
        for (int32_t i = 0; i < n; i++) {
            us[done + i] = dev_event_elapsed_us(&b->event[2 * i], &b->event[2 * i + 1]);
        }
        done += n;
    }
    if (st == KVS_OK) {
        *t = bench_summary(us, reps);
    }
    mem_free(us);
    return st;
}

/* Microseconds per call inside a graph of many. */
static kvs_status time_graph(cuda_case *c, double *us, kvs_error *err)
{
    cuda_bench *b = c->b;
    dev_queue *q = &b->queue;
    const int32_t n = c->n_set > GRAPH_MAX ? GRAPH_MAX : c->n_set < 24 ? c->n_set * 8 : c->n_set;
    dev_graph g;
    double sample[GRAPH_REPS];
    TRY(dev_capture_begin(q, err));
    for (int32_t i = 0; i < n; i++) {
        c->launch(c, i % c->n_set);
    }
    TRY(dev_capture_end(q, &g, err));
    dev_graph_launch(&g, q);
    for (int i = 0; i < GRAPH_REPS; i++) {
        dev_queue_fill(q, b->trash, i, (size_t)TRASH_MIB << 20);
        dev_event_record(&b->event[0], q);
        dev_graph_launch(&g, q);
        dev_event_record(&b->event[1], q);
        dev_queue_sync(q);
        sample[i] = dev_event_elapsed_us(&b->event[0], &b->event[1]) / n;
    }
    dev_graph_free(&g);
    *us = bench_summary(sample, GRAPH_REPS).median_us;
    return dev_queue_check(q, err);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static kvs_status run_case(cuda_case *c, const char *op, kvs_error *err)
{
    bench_timing t = {0};
    bench_timing floor = {0};
    double graph_us = 0.0;
    check_result r;
    memset(&r, 0, sizeof r);
    TRY(c->check(c, &r, err)); /* first: a wrong kernel is not timed for nothing */
    TRY(time_alone(c, c->launch, &t, err));
    TRY(time_graph(c, &graph_us, err));
    if (c->floor != NULL) {
        TRY(time_alone(c, c->floor, &floor, err));
    }
    const int products = floor.median_us > 0.0 && c->floor_products;
    const int gather = floor.median_us > 0.0 && c->byte > 0.0 && !products;
    const double ceiling = products ? c->flop / floor.median_us * 1e6
                           : gather ? c->byte / floor.median_us * 1e6
                                    : c->b->read_rate;
    const double rate = c->byte / t.median_us * 1e6;
    const kvs_bench_row row = {
        .name = c->label,
        .op = op,
        .variant = c->b->kern.variant[c->op],
        .device = "cuda",
        .kv = c->kv,
        .batch = c->p.batch,
        .q = c->p.q,
        .heads = c->p.heads,
        .len = c->p.len,
        .topk = c->p.topk,
        .dcp = c->p.dcp,
        .invalid = c->p.invalid,
        .n_rep = t.n,
        .median_us = t.median_us,
        .min_us = t.min_us,
        .p90_us = t.p90_us,
        .graph_us = graph_us,
        .gflop = c->flop * 1e-9,
        .gbyte = c->byte * 1e-9,
        .flop_per_s = c->flop / t.median_us * 1e6,
        .byte_per_s = rate,
        .ceiling_kind = products ? "products" : gather ? "gather" : "read",
        .ceiling = ceiling,
        .share = (products ? c->flop / t.median_us * 1e6 : rate) / ceiling,
        .passed = r.n_bad == 0,
        .err = r.worst,
    };
    bench_hand_over(c->b->cfg, &c->b->tally, &row, r.first);
    return KVS_OK;
}

/* Streaming reads of 2 GiB; the row of `bench roof`. */
static kvs_status measure_read(cuda_bench *b, int want_row, kvs_error *err)
{
    const int64_t bytes = (int64_t)READ_MIB << 20;
    uint8_t *p = dev_cuda.alloc((size_t)bytes + 64);
    double us[N_READ];
    if (p == NULL) {
        return err_set(err, KVS_NOMEM, "bench: the device has no %d MiB left", READ_MIB);
    }
    dev_queue *q = &b->queue;
    dev_queue_fill(q, p, 0x35, (size_t)bytes + 64);
    for (int i = -1; i < N_READ; i++) {
        dev_event_record(&b->event[0], q);
        roof_cuda_read(p, bytes, (uint32_t *)(p + bytes), q);
        dev_event_record(&b->event[1], q);
        dev_queue_sync(q);
        us[i < 0 ? 0 : i] = dev_event_elapsed_us(&b->event[0], &b->event[1]);
    }
    dev_cuda.free(p);
    TRY(dev_queue_check(q, err));
    const bench_timing t = bench_summary(us, N_READ);
    b->read_rate = (double)bytes / t.median_us * 1e6;
    if (want_row) {
        const kvs_bench_row row = {.name = "read",
                                   .op = "roof",
                                   .variant = "read",
                                   .device = "cuda",
                                   .kv = "",
                                   .n_rep = t.n,
                                   .median_us = t.median_us,
                                   .min_us = t.min_us,
                                   .p90_us = t.p90_us,
                                   .gbyte = (double)bytes * 1e-9,
                                   .byte_per_s = b->read_rate,
                                   .ceiling_kind = "read",
                                   .ceiling = b->read_rate,
                                   .share = 1.0,
                                   .passed = 1};
        bench_hand_over(b->cfg, &b->tally, &row, "");
    }
    return KVS_OK;
}

/* ---- points ---------------------------------------------------------------------------------- */

typedef struct cuda_op {
    const char *name;
    kvs_status (*setup)(cuda_case *c, kvs_error *err);
    kern_op need[2];
    int32_t n_need;
    const cuda_point *own;
    int32_t n_own;
    kvs_status (*run)(cuda_bench *b, const cuda_point *p, kvs_error *err); /* instead of setup */
} cuda_op;

#define LEN 131072
#define DS  KVS_KV_FP8_DS_MLA
#define BF  KVS_KV_BF16
#define F8  KVS_KV_FP8
static const cuda_point k_attn[] = {
    /* batch, q, heads, len, topk, dcp, share of -1, rows */
    {128, 2, 128, LEN, 2048, 1, 0.0, DS},   {128, 1, 128, LEN, 2048, 1, 0.0, DS},
    {128, 1, 64, LEN, 2048, 1, 0.0, DS},    {128, 1, 16, LEN, 2048, 1, 0.0, DS},
    {16, 1, 128, LEN, 2048, 1, 0.0, DS},    {1, 1, 128, LEN, 2048, 1, 0.0, DS},
    {128, 1, 128, LEN, 2048, 2, 0.0, DS},   {128, 1, 128, LEN, 2048, 4, 0.0, DS},
    {128, 1, 128, LEN, 2048, 8, 0.0, DS},   {64, 1, 128, LEN, 2048, 8, 0.0, DS},
    {128, 1, 128, LEN, 2048, 1, 0.5, DS},   {128, 1, 128, LEN, 2048, 1, 0.75, DS},
    {128, 1, 128, LEN, 2048, 1, 0.875, DS}, {64, 1, 128, LEN, 2048, 1, 0.875, DS},
    {64, 1, 128, LEN, 2048, 1, 1.0, DS},    {128, 2, 128, LEN, 32768, 1, 0.0, DS},
    /* a part of a prompt */
    {1, 4096, 128, LEN, 2048, 1, 0.0, DS},  {1, 4096, 128, LEN, 2048, 1, 0.875, DS},
    /* topk 0: dense */
    {128, 1, 128, 4096, 0, 1, 0.0, BF},     {128, 1, 128, 8192, 0, 1, 0.0, BF},
    {128, 1, 128, 16384, 0, 1, 0.0, BF},    {128, 1, 128, 32768, 0, 1, 0.0, BF},
    {128, 2, 128, 4096, 0, 1, 0.0, BF},     {128, 2, 128, 8192, 0, 1, 0.0, BF},
    {128, 2, 128, 16384, 0, 1, 0.0, BF},    {128, 2, 128, 32768, 0, 1, 0.0, BF},
    {16, 1, 128, 65536, 0, 1, 0.0, BF},     {1, 1, 128, LEN, 0, 1, 0.0, BF},
    {1, 1, 128, 16384, 0, 1, 0.0, BF},      {64, 1, 16, 65536, 0, 1, 0.0, BF},
    {1, 1, 16, LEN, 0, 1, 0.0, BF},         {16, 1, 16, 16384, 0, 1, 0.0, BF},
    {64, 1, 16, 65536, 0, 1, 0.0, F8},      {128, 1, 128, 16384, 0, 1, 0.0, F8},
    {1, 1, 128, LEN, 0, 1, 0.0, F8},        {128, 1, 128, 16384, 0, 1, 0.0, DS},
    {16, 1, 128, LEN, 0, 8, 0.0, BF},       {16, 1, 128, LEN, 0, 8, 0.0, F8},
};
static const cuda_point k_index[] = {
    {64, 1, 64, LEN, 2048, 1, 0.0, KVS_INDEX_FP8},
    {1, 1, 64, LEN, 2048, 1, 0.0, KVS_INDEX_FP8},
    {1, 4096, 64, LEN, 2048, 1, 0.0, KVS_INDEX_FP8},
};
static const cuda_point k_exchange[] = {
    {1, 1, 128, 0, 0, 2, 0.0, 0},
    {16, 1, 128, 0, 0, 2, 0.0, 0},
    {64, 1, 128, 0, 0, 2, 0.0, 0},
};

/* the last q positions of a context of len, in the multi-head form */
static const cuda_point k_mha[] = {
    {1, 8192, 128, 32768, 0, 1, 0.0, BF},
    {1, 8192, 128, 8192, 0, 1, 0.0, BF},
    {1, 2048, 128, LEN, 0, 1, 0.0, BF},
    {1, 8192, 16, 32768, 0, 1, 0.0, BF},
};
static const cuda_point k_mha_wide[] = {
    {1, 8192, 64, 32768, 0, 1, 0.0, BF},
    {1, 8192, 64, 8192, 0, 1, 0.0, BF},
};

/* q rows of len inputs to 256 outputs for each head */
static const cuda_point k_gemm[] = {
    {1, 8192, 128, 512, 0, 1, 0.0, BF},
    {1, 8192, 128, 512, 0, 1, 0.0, F8},
    {1, 8192, 64, 4096, 0, 1, 0.0, BF},
};

static const cuda_op k_op[] = {
    {"attn", cuda_setup_attn, {KERN_OP_attn}, 1, k_attn, sizeof k_attn / sizeof *k_attn, NULL},
    {"index", cuda_setup_index, {KERN_OP_index_score}, 1, k_index, 3, NULL},
    {"select", cuda_setup_select, {KERN_OP_index_select, KERN_OP_index_score}, 2, k_index, 3, NULL},
    {"mha", cuda_setup_mha, {KERN_OP_mha}, 1, k_mha, sizeof k_mha / sizeof *k_mha, NULL},
    {"mha_wide", cuda_setup_mha_wide, {KERN_OP_mha}, 1, k_mha_wide, 2, NULL},
    {"gemm", cuda_setup_gemm, {KERN_OP_gemm}, 1, k_gemm, 3, NULL},
    {"exchange", NULL, {KERN_OP_merge, KERN_OP_topk_merge}, 2, k_exchange, 3, cuda_run_exchange},
};
enum { N_OP = sizeof k_op / sizeof *k_op };

static kvs_status run_point(cuda_bench *b, const cuda_op *op, const cuda_point *p, kvs_error *err)
{
    char what[96];
    snprintf(what, sizeof what, "%s batch %d x %d heads %d dcp %d", op->name, (int)p->batch,
             (int)p->q, (int)p->heads, (int)p->dcp);
    if (b->cfg->progress != NULL &&
        b->cfg->progress(b->cfg->ctx, what, b->n_done, b->n_total) != 0) {
        return err_set(err, KVS_CANCELLED, "bench: ended after %d rows", (int)b->tally.n_row);
    }
    if (op->run != NULL) {
        b->n_done++;
        return op->run(b, p, err);
    }
    cuda_case *c = mem_calloc(1, sizeof *c);
    if (c == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case of %s", op->name);
    }
    c->b = b;
    c->p = *p;
    c->r = rng_init(b->cfg->seed, (uint64_t)++b->n_done);
    c->op = op->need[0];
    kvs_status st = op->setup(c, err);
    if (st == KVS_OK) {
        st = run_case(c, op->name, err);
    }
    if (st != KVS_DEVICE) {
        for (int32_t i = 0; i < c->n_block; i++) {
            dev_cuda.free(c->block[i]);
        }
    }
    if (c->state != NULL) {
        c->free_state(c);
        mem_free(c->state);
    }
    mem_free(c);
    return st;
}

static int64_t pick(kvs_bench_axis a, int64_t *i, int64_t own)
{
    if (a.n <= 0) {
        return own;
    }
    const int64_t at = *i % a.n;
    *i /= a.n;
    return a.v[at];
}

/* Point i of the caller's grid: q varies fastest. False past the last. */
static int grid_point(const kvs_bench_config *cfg, const cuda_op *op, int64_t i, cuda_point *p)
{
    static const int64_t rows[] = {1, 16, 64};
    const cuda_point *d = &op->own[op->setup == cuda_setup_attn ? 1 : 0];
    const kvs_bench_axis own_rows = {rows, op->run != NULL ? 3 : 0}; /* exchange is about rows */
    *p = *d;
    p->q = (int32_t)pick(cfg->q, &i, d->q);
    p->batch = (int32_t)pick(cfg->batch.n > 0 ? cfg->batch : own_rows, &i, d->batch);
    p->heads = (int32_t)pick(cfg->heads, &i, d->heads);
    p->topk = (int32_t)pick(cfg->topk, &i, d->topk);
    p->len = pick(cfg->len, &i, d->len);
    p->dcp = (int32_t)pick(cfg->dcp, &i, d->dcp);
    p->kv = (int32_t)pick(cfg->kv, &i, d->kv);
    if (cfg->n_invalid > 0) {
        p->invalid = cfg->invalid[i % cfg->n_invalid];
        i /= cfg->n_invalid;
    }
    return i == 0;
}

static kvs_status check_exchange_point(const cuda_point *p, kvs_error *err)
{
    const int ok = p->batch >= 1 && p->q >= 1 && (int64_t)p->batch * p->q <= 4096 && p->heads >= 1 &&
                   p->heads <= KVS_MAX_HEADS && (p->dcp == 2 || p->dcp == 4 || p->dcp == 8) &&
                   p->len == 0 && p->topk == 0 && p->kv == 0 && p->invalid == 0.0;
    return ok ? KVS_OK
              : err_set(err, KVS_INVALID,
                        "bench exchange on cuda takes batch x q up to 4096 rows, up to %d heads and dcp 2, "
                        "4 or 8, and no len, topk, kv or invalid",
                        KVS_MAX_HEADS);
}

static int is_mha(const cuda_op *op)
{
    return op->setup == cuda_setup_mha || op->setup == cuda_setup_mha_wide;
}

static kvs_status check_mha_point(const cuda_point *p, kvs_error *err)
{
    const int ok = p->batch == 1 && p->q >= 1 && p->q <= 65536 && p->heads >= 1 &&
                   p->heads <= KVS_MAX_HEADS && p->len >= p->q && p->len <= (1 << 22) && p->topk == 0 &&
                   p->dcp == 1 && p->invalid == 0.0 && p->kv == KVS_KV_BF16;
    return ok ? KVS_OK
              : err_set(err, KVS_INVALID,
                        "bench mha on cuda takes up to 65536 q of one context of len q to 4194304, up to %d "
                        "heads and kv bf16, and no batch, topk, dcp or invalid",
                        KVS_MAX_HEADS);
}

static kvs_status check_gemm_point(const cuda_point *p, kvs_error *err)
{
    const int ok = p->batch == 1 && p->q >= 1 && p->q <= 65536 && p->heads >= 1 &&
                   p->heads <= KVS_MAX_HEADS && p->len >= 1 && p->len <= 65536 && p->topk == 0 &&
                   p->dcp == 1 && p->invalid == 0.0 &&
                   (p->kv == KVS_KV_BF16 || p->kv == KVS_KV_FP8);
    return ok ? KVS_OK
              : err_set(err, KVS_INVALID,
                        "bench gemm on cuda takes up to 65536 q of len 1 to 65536 inputs, 256 outputs for each "
                        "of up to %d heads, weights of kv bf16 or fp8, and no batch, topk, dcp or invalid",
                        KVS_MAX_HEADS);
}

static kvs_status check_point(const cuda_op *op, const cuda_point *p, kvs_error *err)
{
    if (op->run != NULL) {
        return check_exchange_point(p, err);
    }
    if (op->setup == cuda_setup_gemm) {
        return check_gemm_point(p, err);
    }
    if (is_mha(op)) {
        return check_mha_point(p, err);
    }
    const int attn = op->setup == cuda_setup_attn;
    if (p->batch < 1 || p->q < 1 || (int64_t)p->batch * p->q > 65536 || p->heads < 1 ||
        p->heads > (attn ? KVS_MAX_HEADS : 64) || p->topk < (attn ? 0 : 1) || p->topk > KVS_MAX_TOPK ||
        p->len < p->q || p->len > (1 << 22) || !(p->invalid >= 0.0 && p->invalid <= 1.0)) {
        return err_set(err, KVS_INVALID,
                       "bench %s on cuda: batch %d, q %d, heads %d, topk %d, len %" PRId64
                       ": at most 65536 rows, %d heads, topk 1 to 32768 (0 with attn: dense), len q to "
                       "4194304",
                       op->name, (int)p->batch, (int)p->q, (int)p->heads, (int)p->topk, p->len,
                       attn ? KVS_MAX_HEADS : 64);
    }
    const int dcp_ok = p->dcp == 1 || (attn && (p->dcp == 2 || p->dcp == 4 || p->dcp == 8));
    const int dense = attn && p->topk == 0;
    const int kv_ok = attn ? p->kv == KVS_KV_FP8_DS_MLA || p->kv == KVS_KV_BF16 ||
                                 (dense && p->kv == KVS_KV_FP8)
                           : p->kv == KVS_INDEX_FP8;
    if (!dcp_ok || !kv_ok || ((!attn || dense) && p->invalid > 0.0)) {
        return err_set(err, KVS_INVALID, "bench %s on cuda takes %s", op->name,
                       dense  ? "dcp 1, 2, 4 or 8, rows of bf16, fp8 or fp8_ds_mla and no invalid"
                       : attn ? "dcp 1, 2, 4 or 8 and rows of fp8_ds_mla or bf16"
                            : "index keys of fp8, dcp 1 and no invalid");
    }
    return KVS_OK;
}

static int has_grid(const kvs_bench_config *c)
{
    return c->batch.n > 0 || c->q.n > 0 || c->heads.n > 0 || c->len.n > 0 || c->topk.n > 0 ||
           c->dcp.n > 0 || c->kv.n > 0 || c->n_invalid > 0;
}

static kvs_status run_op(cuda_bench *b, const cuda_op *op, kvs_error *err)
{
    TRY(kern_need(&b->kern, op->need, op->n_need, err));
    const int grid = has_grid(b->cfg);
    cuda_point p;
    int64_t n = 0;
    for (; grid ? grid_point(b->cfg, op, n, &p) : n < op->n_own; n++) {
        TRY(check_point(op, grid ? &p : &op->own[n], err));
    }
    n = b->cfg->one != 0 && n > 1 ? 1 : n;
    b->n_total = b->n_done + n;
    for (int64_t i = 0; i < n; i++) {
        grid_point(b->cfg, op, i, &p);
        TRY(run_point(b, op, grid ? &p : &op->own[i], err));
        if (grid && op->setup == cuda_setup_attn && cuda_has_layer(&p)) {
            TRY(cuda_run_layer(b, &p, err));
        }
    }
    return KVS_OK;
}

/* ---- the run --------------------------------------------------------------------------------- */

static kvs_status find_op(const char *name, const cuda_op **op, kvs_error *err)
{
    *op = NULL;
    for (int i = 0; name != NULL && i < N_OP; i++) {
        if (strcmp(name, k_op[i].name) == 0) {
            *op = &k_op[i];
        }
    }
    if (name == NULL || *op != NULL || strcmp(name, "roof") == 0) {
        return KVS_OK;
    }
    return err_set(err, KVS_INVALID,
                   "bench %.32s has no form for cuda: use attn, index, select, mha, mha_wide, gemm, exchange, roof", name);
}

static kvs_status refuse_host_only(const kvs_bench_config *c, kvs_error *err)
{
    const struct {
        const char *name;
        int given;
    } used[] = {
        {"threads", c->threads.n > 0},
        {"warm", c->warm != 0},
        {"pool", c->pool_bytes != 0},
        {"interleave", c->interleave != 0},
        {"exchange", c->exchange != KVS_EXCHANGE_AUTO},
        {"timeout", c->timeout_ms != 0},
        {"cpu", c->cpu != NULL},
    };
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
        if (used[i].given) {
            return err_set(err, KVS_INVALID, "bench on cuda does not use %s: leave it out",
                           used[i].name);
        }
    }
    return KVS_OK;
}

static kvs_status open_device(cuda_bench *b, kvs_error *err)
{
    TRY(dev_cuda_open(0, &b->info, err));
    TRY(kern_init_cuda(&b->kern, b->cfg->kernels, err));
    TRY(dev_queue_open_cuda(&b->queue, err));
    for (; b->n_event < 2 * CUDA_BATCH; b->n_event++) {
        TRY(dev_event_open(&b->event[b->n_event], err));
    }
    b->trash = dev_cuda.alloc((size_t)TRASH_MIB << 20);
    return b->trash != NULL
               ? KVS_OK
               : err_set(err, KVS_NOMEM, "bench: the device has no %d MiB left", TRASH_MIB);
}

static kvs_status run_all(cuda_bench *b, kvs_error *err)
{
    const cuda_op *op = NULL;
    TRY(find_op(b->cfg->op, &op, err));
    TRY(refuse_host_only(b->cfg, err));
    TRY(open_device(b, err));
    orc_init();
    TRY(measure_read(b, op == NULL, err));
    if (op != NULL) {
        TRY(run_op(b, op, err));
    }
    for (int i = 0; b->cfg->op == NULL && i < N_OP; i++) {
        if (kern_need(&b->kern, k_op[i].need, k_op[i].n_need, NULL) == KVS_OK) {
            TRY(run_op(b, &k_op[i], err));
        }
    }
    return bench_verdict(&b->tally, err);
}

kvs_status bench_run_cuda(const kvs_bench_config *cfg, kvs_error *err)
{
    cuda_bench *b = mem_calloc(1, sizeof *b);
    if (b == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the bench");
    }
    b->cfg = cfg;
    const kvs_status st = run_all(b, err);
    if (st != KVS_DEVICE) { /* a device that failed answers nothing more */
        for (int32_t i = 0; i < b->n_event; i++) {
            dev_event_close(&b->event[i]);
        }
        if (b->trash != NULL) {
            dev_cuda.free(b->trash);
        }
        dev_queue_close(&b->queue);
    }
    mem_free(b);
    return st;
}
