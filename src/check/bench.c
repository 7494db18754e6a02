/* check/bench.c - grids, memory, timing and rows. */
#include "check/bench.h"
#include "check/bench_cuda.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/err.h"
#include "base/knob.h"
#include "base/log.h"
#include "base/mem.h"

enum {
    MAX_ROWS = 1 << 20,
    SAMPLE_MAX = 64, /* timed samples of a case by default */
    SAMPLE_MIN = 5
};

#define POOL_BYTES     (INT64_C(1) << 30)
#define CASE_NS        INT64_C(500000000)   /* of samples, by default              */
#define SAMPLE_NS      INT64_C(200000)      /* a sample is at least so long        */
#define CEILING_AGE_NS INT64_C(15000000000) /* a ceiling is measured again after   */
#define ASK_NS         INT64_C(100000000)
#define CEILING_LOW    0.85
#define HUGE_BYTES     ((size_t)8 << 20)

static const bench_op k_roof_op = {
    .pub = {.name = "roof",
            .about = "the ceilings: read and copy bandwidth, multiply-adds per second",
            .axes = KVS_BENCH_THREADS},
};

static const bench_op *const k_op[] = {
    &bench_attn_op,  &bench_index_op,    &bench_topk_op,  &bench_select_op,
    &bench_merge_op, &bench_exchange_op, &bench_write_op, &bench_gemm_op,
    &bench_mha_op,   &bench_mha_wide_op, &k_roof_op,
};

enum { N_OP = (int)(sizeof k_op / sizeof *k_op) };

const kvs_bench_op *kvs_bench_ops(int32_t i)
{
    return i >= 0 && i < N_OP ? &k_op[i]->pub : NULL;
}

kvs_status bench_skip(bench_case *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->skip_text, sizeof c->skip_text, fmt, ap);
    va_end(ap);
    c->skip = c->skip_text;
    return KVS_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

kvs_status bench_alloc(bench_case *c, size_t bytes, void **out, kvs_error *err)
{
    *out = NULL;
    bytes = bytes > 0 ? bytes : 64;
    if (c->n_block == BENCH_MAX_BLOCK) {
        return err_set(err, KVS_INTERNAL, "a case of %s takes more than %d blocks of memory",
                       kern_op_name(c->op), BENCH_MAX_BLOCK);
    }
    if (bytes > BENCH_MEM_MAX || c->mem_bytes + bytes > BENCH_MEM_MAX) {
        return err_set(err, KVS_LIMIT,
                       "batch %d, q %d, heads %d, len %" PRId64
                       " takes more than 6 GiB: use a smaller one",
                       c->p.batch, c->p.q, c->p.heads, c->p.len);
    }
    void *p = mem_map_pages(bytes, bytes >= HUGE_BYTES, err);
    if (p == NULL) {
        return KVS_NOMEM;
    }
    c->block[c->n_block] = p;
    c->block_bytes[c->n_block++] = bytes;
    c->mem_bytes += bytes;
    *out = p;
    return KVS_OK;
}

static void case_release(bench_case *c)
{
    if (c->fini != NULL) {
        c->fini(c);
    }
    for (int32_t i = 0; i < c->n_block; i++) {
        mem_unmap_pages(c->block[i], c->block_bytes[i]);
    }
    c->n_block = 0;
}

kvs_status bench_scratch(bench_case *c, size_t bytes, void **out, size_t *n, kvs_error *err)
{
    *n = bytes;
    return bench_alloc(c, bytes, out, err);
}

int32_t bench_n_set(const bench_case *c, size_t set_bytes)
{
    if (c->run->cfg->warm) {
        return 1;
    }
    const int64_t all = c->run->cfg->pool_bytes > 0 ? c->run->cfg->pool_bytes : POOL_BYTES;
    const int64_t n = shard_cdiv(all, set_bytes > 0 ? (int64_t)set_bytes : 1);
    return n < 1 ? 1 : n > 65536 ? 65536 : (int32_t)n;
}

void bench_sample(rng *r, int32_t n, int32_t k, uint8_t *mark, int32_t *out)
{
    const int flip = k > n / 2; /* mark what is left out where that is less */
    const int32_t draws = flip ? n - k : k;
    for (int32_t i = 0; i < draws;) {
        const uint64_t x = rng_next_below(r, (uint64_t)n);
        i += !mark[x];
        mark[x] = 1;
    }
    int32_t m = 0;
    for (int32_t i = 0; i < n; i++) {
        if (mark[i] != flip) {
            out[m++] = i;
        }
        mark[i] = 0;
    }
}

check_variant bench_variant(const bench_case *c)
{
    int32_t n = 0;
    const kern_variant *list = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        if (list[i].op == c->op && strcmp(list[i].name, c->variant) == 0) {
            return check_variant_of(&list[i]);
        }
    }
    return check_variant_of(&list[0]);
}

/* ---- ceilings and threads -------------------------------------------------------------------- */

kvs_status bench_threads(bench_run *b, int32_t n, kvs_error *err)
{
    if (b->n_thread == n) {
        return KVS_OK;
    }
    pool_close(b->pool);
    b->pool = NULL;
    b->n_thread = 0;
    TRY(pool_open(&b->pool, n, err));
    b->n_thread = n;
    memset(b->rate_ns, 0, sizeof b->rate_ns);
    dev_queue_init(&b->queue, b->pool);
    return KVS_OK;
}

kvs_status bench_ceiling(bench_run *b, roof_kind kind, double *rate, kvs_error *err)
{
    const int64_t now = clock_ns();
    if (b->rate_ns[kind] == 0 || now - b->rate_ns[kind] > CEILING_AGE_NS) {
        roof_value v;
        TRY(roof_measure(&b->roof, kind, b->pool, &v, err));
        b->rate[kind] = v.best;
        b->rate_ns[kind] = clock_ns();
        if (v.best < CEILING_LOW * v.best_seen) {
            LOG(WARN, CORE,
                "ceiling %s with %d threads is %.2f G/s, %.0f %% of the best seen (%.2f): the "
                "machine is busy or hot, and shares taken now flatter",
                roof_name(kind), b->n_thread, v.best * 1e-9, 100.0 * v.best / v.best_seen,
                v.best_seen * 1e-9);
        }
    }
    *rate = b->rate[kind];
    return KVS_OK;
}

/* ---- timing ---------------------------------------------------------------------------------- */

static int by_value(const void *pa, const void *pb)
{
    const double a = *(const double *)pa;
    const double b = *(const double *)pb;
    return (a > b) - (a < b);
}

/* One sample: `inner` calls on the sets from *set on; nanoseconds of all. */
static kvs_status sample(bench_case *c, int32_t inner, int32_t *set, int64_t *ns, kvs_error *err)
{
    const int64_t t0 = clock_ns();
    for (int32_t i = 0; i < inner; i++) {
        TRY(c->call(c, *set, err));
        *set = *set + 1 < c->n_set ? *set + 1 : 0;
    }
    *ns = clock_ns() - t0;
    return dev_queue_check(&c->run->queue, err);
}

bench_timing bench_summary(double *us, int32_t n)
{
    qsort(us, (size_t)n, sizeof *us, by_value);
    bench_timing t = {.n = n, .min_us = us[0]};
    t.median_us = n % 2 != 0 ? us[n / 2] : 0.5 * (us[n / 2 - 1] + us[n / 2]);
    t.p90_us = us[(int32_t)ceil(0.9 * n) - 1];
    return t;
}

/* Lets the caller end a long case, ten times a second at most. */
static kvs_status ask(bench_run *b, kvs_error *err)
{
    const int64_t now = clock_ns();
    if (b->cfg->progress == NULL || now - b->asked_ns < ASK_NS) {
        return KVS_OK;
    }
    b->asked_ns = now;
    return b->cfg->progress(b->cfg->ctx, b->what, b->n_done - 1, b->n_total) != 0
               ? err_set(err, KVS_CANCELLED, "bench: ended after %d rows", b->tally.n_row)
               : KVS_OK;
}

static kvs_status time_case(bench_case *c, bench_timing *t, kvs_error *err)
{
    const int32_t reps = c->run->cfg->reps;
    const int32_t most = reps > 0 ? reps : SAMPLE_MAX;
    double *us = mem_alloc_array((size_t)most, sizeof *us, 0);
    if (us == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for %d samples", most);
    }
    int32_t set = 0;
    int64_t ns = 0;
    kvs_status st = sample(c, 1, &set, &ns, err); /* warms up code, tables and workers */
    if (st >= 0) {
        st = sample(c, 1, &set, &ns, err);
    }
    const int32_t inner = ns >= SAMPLE_NS ? 1 : (int32_t)(SAMPLE_NS / (ns > 0 ? ns : 1)) + 1;
    int64_t total = 0;
    int32_t n = 0;
    while (st >= 0 && n < most && (reps > 0 || n < SAMPLE_MIN || total < CASE_NS)) {
        st = sample(c, inner, &set, &ns, err);
        us[n++] = (double)ns * 1e-3 / inner;
        total += ns;
        st = st < 0 ? st : ask(c->run, err);
        if (reps == 0 && n >= 3 && total > 8 * CASE_NS) {
            break; /* a long case: three samples have to do */
        }
    }
    if (st >= 0) {
        *t = bench_summary(us, n);
    }
    mem_free(us);
    return st;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* "sparse/cold/t2": what the op says, then what the axes it has leave to say. */
static void name_of(const bench_case *c, uint32_t axes, char *name, size_t cap)
{
    char threads[16] = "";
    if ((axes & KVS_BENCH_THREADS) != 0) {
        snprintf(threads, sizeof threads, "/t%d", c->p.threads);
    }
    const char *heat = (axes & KVS_BENCH_POOL) == 0 ? "" : c->run->cfg->warm ? "/warm" : "/cold";
    snprintf(name, cap, "%s%s%s", c->label, heat, threads);
}

roof_kind bench_flop_kind(const bench_case *c)
{
    return roof_of_variant(c->variant, strcmp(c->kv, "f32") == 0);
}

static kvs_status share_of(bench_case *c, kvs_bench_row *row, kvs_error *err)
{
    bench_run *b = c->run;
    const roof_kind flop_kind = bench_flop_kind(c);
    double flop_rate = 0.0;
    double byte_rate = 0.0;
    TRY(bench_ceiling(b, c->mem_kind, &byte_rate, err));
    if (c->flop > 0.0) {
        TRY(bench_ceiling(b, flop_kind, &flop_rate, err));
    }
    const double of_flop = flop_rate > 0.0 ? row->flop_per_s / flop_rate : 0.0;
    const double of_byte = byte_rate > 0.0 ? row->byte_per_s / byte_rate : 0.0;
    const int arithmetic = of_flop > of_byte;
    row->ceiling_kind = roof_name(arithmetic ? flop_kind : c->mem_kind);
    row->ceiling = arithmetic ? flop_rate : byte_rate;
    row->share = arithmetic ? of_flop : of_byte;
    return KVS_OK;
}

void bench_hand_over(const kvs_bench_config *cfg, bench_tally *t, const kvs_bench_row *row,
                     const char *why)
{
    t->n_row++;
    if (!row->passed && t->n_wrong++ == 0) {
        snprintf(t->first_wrong, sizeof t->first_wrong, "%s %s: %s", row->op, row->name, why);
    }
    if (cfg->row != NULL) {
        cfg->row(cfg->ctx, row);
    }
}

kvs_status bench_verdict(const bench_tally *t, kvs_error *err)
{
    return t->n_wrong == 0 ? KVS_OK
                           : err_set(err, KVS_INTERNAL, "%d of %d rows are wrong, first %s",
                                     (int)t->n_wrong, (int)t->n_row, t->first_wrong);
}

static kvs_status run_case(bench_case *c, const bench_op *op, kvs_error *err)
{
    char name[64];
    name_of(c, op->pub.axes, name, sizeof name);
    kvs_bench_row row = {
        .name = name,
        .op = op->pub.name,
        .variant = c->variant,
        .device = "cpu",
        .kv = c->kv,
        .batch = c->p.batch,
        .q = c->p.q,
        .heads = c->p.heads,
        .len = c->p.len,
        .topk = c->p.topk,
        .dcp = c->p.dcp,
        .threads = c->p.threads,
        .invalid = c->p.invalid,
        .gflop = c->flop * 1e-9,
        .gbyte = c->byte * 1e-9,
    };
    /* the ceilings come first, so that they are those of just before */
    TRY(share_of(c, &row, err));
    bench_timing t = {.n = 0};
    TRY(time_case(c, &t, err));
    row.n_rep = t.n;
    row.median_us = t.median_us;
    row.min_us = t.min_us;
    row.p90_us = t.p90_us;
    row.flop_per_s = c->flop / t.median_us * 1e6;
    row.byte_per_s = c->byte / t.median_us * 1e6;
    TRY(share_of(c, &row, err));
    check_result r;
    memset(&r, 0, sizeof r);
    TRY(c->check(c, &r, err));
    row.passed = r.n_bad == 0;
    row.err = r.worst;
    bench_hand_over(c->run->cfg, &c->run->tally, &row, r.first);
    return KVS_OK;
}

/* ---- the grid -------------------------------------------------------------------------------- */

typedef struct axis {
    int64_t v[BENCH_MAX_VALUE];
    int32_t n;
} axis;

typedef struct grid {
    axis batch, q, heads, len, topk, dcp, threads, kv;
    double invalid[BENCH_MAX_VALUE];
    int32_t n_invalid;
    int32_t n_label;
} grid;

static void axis_one(axis *a, int64_t v)
{
    a->v[0] = v;
    a->n = 1;
}

/* The caller's values, else the op's list, else its scalar. */
static kvs_status axis_take(axis *a, const char *name, kvs_bench_axis given, kvs_bench_axis own,
                            int64_t scalar, int64_t lo, int64_t hi, kvs_error *err)
{
    const kvs_bench_axis from = given.n > 0 ? given : own;
    if (from.n > BENCH_MAX_VALUE) {
        return err_set(err, KVS_LIMIT, "%s has %d values: use at most %d", name, from.n,
                       BENCH_MAX_VALUE);
    }
    if (from.n <= 0) {
        axis_one(a, scalar);
        return KVS_OK;
    }
    for (int32_t i = 0; i < from.n; i++) {
        if (from.v[i] < lo || from.v[i] > hi) {
            return err_set(err, KVS_INVALID, "%s %" PRId64 ": must be %" PRId64 " to %" PRId64,
                           name, from.v[i], lo, hi);
        }
        a->v[i] = from.v[i];
    }
    a->n = from.n;
    return KVS_OK;
}

static kvs_status take_invalid(grid *g, const kvs_bench_config *cfg, kvs_error *err)
{
    if (cfg->n_invalid > BENCH_MAX_VALUE) {
        return err_set(err, KVS_LIMIT, "invalid has %d values: use at most %d", cfg->n_invalid,
                       BENCH_MAX_VALUE);
    }
    g->invalid[0] = 0.0;
    g->n_invalid = cfg->n_invalid > 0 ? cfg->n_invalid : 1;
    for (int32_t i = 0; i < cfg->n_invalid; i++) {
        if (!(cfg->invalid[i] >= 0.0 && cfg->invalid[i] <= 1.0)) {
            return err_set(err, KVS_INVALID, "invalid %g: must be 0 to 1", cfg->invalid[i]);
        }
        g->invalid[i] = cfg->invalid[i];
    }
    return KVS_OK;
}

/* What an op does not take is refused, never ignored. */
static kvs_status refuse_unused(const bench_op *op, const kvs_bench_config *cfg, kvs_error *err)
{
    const struct {
        const char *name;
        uint32_t axis;
        int given;
    } used[] = {
        {"batch", KVS_BENCH_BATCH, cfg->batch.n > 0},
        {"q", KVS_BENCH_Q, cfg->q.n > 0},
        {"heads", KVS_BENCH_HEADS, cfg->heads.n > 0},
        {"len", KVS_BENCH_LEN, cfg->len.n > 0},
        {"topk", KVS_BENCH_TOPK, cfg->topk.n > 0},
        {"dcp", KVS_BENCH_DCP, cfg->dcp.n > 0},
        {"kv", KVS_BENCH_KV, cfg->kv.n > 0},
        {"invalid", KVS_BENCH_INVALID, cfg->n_invalid > 0},
        {"interleave", KVS_BENCH_INTERLEAVE, cfg->interleave != 0},
        {"exchange", KVS_BENCH_EXCHANGE, cfg->exchange != KVS_EXCHANGE_AUTO},
        {"timeout", KVS_BENCH_EXCHANGE, cfg->timeout_ms != 0},
        {"kernels", KVS_BENCH_KERNELS, cfg->kernels != NULL},
        {"threads", KVS_BENCH_THREADS, cfg->threads.n > 0},
        {"warm", KVS_BENCH_POOL, cfg->warm != 0},
        {"pool", KVS_BENCH_POOL, cfg->pool_bytes != 0},
    };
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
        if (used[i].given && (op->pub.axes & used[i].axis) == 0) {
            return err_set(err, KVS_INVALID, "bench %s does not use %s: leave it out", op->pub.name,
                           used[i].name);
        }
    }
    return KVS_OK;
}

/* The reference is many times slower: an op's own lengths are cut to what takes as long. */
static void shorten_for_ref(const bench_run *b, const bench_op *op, axis *len)
{
    enum { CUT = 16, LEAST = 256 };
    for (int32_t i = 0; i < len->n && strcmp(b->kern.variant[op->op], "ref") == 0; i++) {
        len->v[i] = len->v[i] / CUT > LEAST ? len->v[i] / CUT : len->v[i];
    }
}

static kvs_status make_grid(const bench_run *b, const bench_op *op, grid *g, kvs_error *err)
{
    const kvs_bench_config *cfg = b->cfg;
    const kvs_bench_axis none = {NULL, 0};
    const bench_point *d = &op->def;
    const int32_t threads = d->threads > 0 ? d->threads : pool_cores();
    TRY(axis_take(&g->batch, "batch", cfg->batch, op->batch, d->batch, 1, 65536, err));
    TRY(axis_take(&g->q, "q", cfg->q, none, d->q, 1, 65536, err));
    TRY(axis_take(&g->heads, "heads", cfg->heads, op->heads, d->heads, 1, KVS_MAX_HEADS, err));
    TRY(axis_take(&g->len, "len", cfg->len, op->len, d->len, 1, INT32_MAX - 1, err));
    TRY(axis_take(&g->topk, "topk", cfg->topk, op->topk, d->topk, 0, KVS_MAX_TOPK, err));
    TRY(axis_take(&g->dcp, "dcp", cfg->dcp, op->dcp, d->dcp, 1, KVS_MAX_RANKS, err));
    TRY(axis_take(&g->threads, "threads", cfg->threads, none, threads, 1, POOL_MAX_THREAD, err));
    TRY(axis_take(&g->kv, "kv", cfg->kv, op->kv, d->kv, KVS_KV_F32, KVS_KV_FP8_DS_MLA, err));
    if (cfg->len.n == 0) {
        shorten_for_ref(b, op, &g->len);
    }
    if (cfg->batch.n == 0 && strcmp(b->kern.variant[op->op], "ref") == 0) {
        g->batch.n = 1;
    }
    g->n_label = op->n_label > 0 ? op->n_label : 1;
    return take_invalid(g, cfg, err);
}

/* The first value of every axis and the first label. */
static void shorten(grid *g)
{
    axis *const all[] = {&g->batch, &g->q,   &g->heads,   &g->len,
                         &g->topk,  &g->dcp, &g->threads, &g->kv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        all[i]->n = 1;
    }
    g->n_invalid = 1;
    g->n_label = 1;
}

static int64_t grid_size(const grid *g)
{
    return (int64_t)g->batch.n * g->q.n * g->heads.n * g->len.n * g->topk.n * g->dcp.n *
           g->threads.n * g->kv.n * g->n_invalid * g->n_label;
}

/* Point i of the grid: labels vary fastest, then shapes, formats and threads last. */
static bench_point grid_point(const grid *g, int64_t i, int32_t *i_label)
{
    bench_point p;
    *i_label = (int32_t)(i % g->n_label);
    i /= g->n_label;
    p.invalid = g->invalid[i % g->n_invalid];
    i /= g->n_invalid;
    p.q = (int32_t)g->q.v[i % g->q.n];
    i /= g->q.n;
    p.batch = (int32_t)g->batch.v[i % g->batch.n];
    i /= g->batch.n;
    p.heads = (int32_t)g->heads.v[i % g->heads.n];
    i /= g->heads.n;
    p.topk = (int32_t)g->topk.v[i % g->topk.n];
    i /= g->topk.n;
    p.len = g->len.v[i % g->len.n];
    i /= g->len.n;
    p.kv = (int32_t)g->kv.v[i % g->kv.n];
    i /= g->kv.n;
    p.dcp = (int32_t)g->dcp.v[i % g->dcp.n];
    i /= g->dcp.n;
    p.threads = (int32_t)g->threads.v[i];
    return p;
}

static kvs_status report(bench_run *b, const bench_op *op, const bench_point *p, kvs_error *err)
{
    snprintf(b->what, sizeof b->what, "%s len %" PRId64 " heads %d batch %d", op->pub.name, p->len,
             p->heads, p->batch);
    const int stop = b->cfg->progress != NULL &&
                     b->cfg->progress(b->cfg->ctx, b->what, b->n_done, b->n_total) != 0;
    b->n_done++;
    return stop ? err_set(err, KVS_CANCELLED, "bench: ended after %d rows", b->tally.n_row)
                : KVS_OK;
}

/* A point that cannot be run is left out with a warning; b->left_out keeps the last reason. */
static void leave_out(bench_run *b, const bench_op *op, const char *why)
{
    if (why[0] != '\0') {
        LOG(WARN, CORE, "bench %s: left out: %s", op->pub.name, why);
        snprintf(b->left_out, sizeof b->left_out, "%s", why);
    }
}

static kvs_status run_point(bench_run *b, const bench_op *op, const bench_point *p, int32_t i_label,
                            kvs_error *err)
{
    if ((int64_t)p->batch * p->q > MAX_ROWS) {
        return err_set(err, KVS_LIMIT, "batch %d x q %d: more than %d rows", p->batch, p->q,
                       MAX_ROWS);
    }
    TRY(report(b, op, p, err));
    TRY(bench_threads(b, p->threads, err));
    bench_case *c = mem_calloc(1, sizeof *c);
    if (c == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case of %s", op->pub.name);
    }
    c->run = b;
    c->p = *p;
    c->geom.n = p->dcp;
    c->geom.i = b->cfg->interleave > 0 ? b->cfg->interleave : 1;
    c->r = rng_init(b->cfg->seed, (uint64_t)b->n_done);
    c->op = op->op;
    c->label = op->n_label > 0 ? op->labels[i_label] : op->pub.name;
    c->variant = b->kern.variant[op->op];
    c->kv = "";
    c->mem_kind = ROOF_READ;
    c->n_set = 1;
    kvs_status st = op->setup(c, i_label, err);
    if (st >= 0 && c->skip != NULL) {
        leave_out(b, op, c->skip);
    } else if (st >= 0) {
        st = run_case(c, op, err);
    }
    case_release(c);
    mem_free(c);
    return st;
}

static kvs_status run_op(bench_run *b, const bench_op *op, const grid *g, kvs_error *err)
{
    if (op->setup == NULL) {
        return bench_roof(b, err);
    }
    const int64_t n = grid_size(g);
    const int32_t rows_before = b->tally.n_row;
    for (int64_t i = 0; i < n; i++) {
        int32_t i_label = 0;
        const bench_point p = grid_point(g, i, &i_label);
        TRY(run_point(b, op, &p, i_label, err));
    }
    if (b->tally.n_row == rows_before && n > 0) {
        return err_set(err, KVS_INVALID, "bench %s: %s", op->pub.name, b->left_out);
    }
    return KVS_OK;
}

/* ---- roof ------------------------------------------------------------------------------------ */

kvs_status bench_roof(bench_run *b, kvs_error *err)
{
    for (int32_t k = 0; k < ROOF_N_KIND; k++) {
        const roof_kind kind = (roof_kind)k;
        roof_value v;
        TRY(roof_measure(&b->roof, kind, b->pool, &v, err));
        if (v.best == 0.0) {
            continue;
        }
        double us[ROOF_N_WINDOW];
        for (int i = 0; i < ROOF_N_WINDOW; i++) {
            us[i] = v.window[i] * 1e6;
        }
        const bench_timing t = bench_summary(us, ROOF_N_WINDOW);
        const int bytes = roof_is_bytes(kind);
        const double rate = v.work / t.median_us * 1e6;
        char name[64];
        snprintf(name, sizeof name, "%s/t%d", roof_name(kind), b->n_thread);
        const kvs_bench_row row = {
            .name = name,
            .op = "roof",
            .variant = roof_name(kind),
            .device = "cpu",
            .kv = "",
            .threads = b->n_thread,
            .n_rep = t.n,
            .median_us = t.median_us,
            .min_us = t.min_us,
            .p90_us = t.p90_us,
            .gflop = bytes ? 0.0 : v.work * 1e-9,
            .gbyte = bytes ? v.work * 1e-9 : 0.0,
            .flop_per_s = bytes ? 0.0 : rate,
            .byte_per_s = bytes ? rate : 0.0,
            .ceiling_kind = roof_name(kind),
            .ceiling = v.best_seen,
            .share = rate / v.best_seen,
            .passed = 1, /* a loop with a wrong result has failed the measurement */
        };
        bench_hand_over(b->cfg, &b->tally, &row, "");
    }
    return KVS_OK;
}

static kvs_status run_roof(bench_run *b, const kvs_bench_config *cfg, kvs_error *err)
{
    const int64_t own[] = {1, pool_cores()};
    const kvs_bench_axis def = {own, own[1] > 1 ? 2 : 1};
    axis threads;
    TRY(axis_take(&threads, "threads", cfg->threads, def, 1, 1, POOL_MAX_THREAD, err));
    b->n_total += threads.n;
    const bench_point p = {.batch = 0};
    for (int32_t i = 0; i < threads.n; i++) {
        TRY(report(b, &k_roof_op, &p, err));
        TRY(bench_threads(b, (int32_t)threads.v[i], err));
        TRY(bench_roof(b, err));
    }
    return KVS_OK;
}

/* ---- the run --------------------------------------------------------------------------------- */

static const bench_op *find_op(const char *name, kvs_error *err)
{
    char known[96] = "";
    for (int i = 0; i < N_OP; i++) {
        if (strcmp(name, k_op[i]->pub.name) == 0) {
            return k_op[i];
        }
        strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, k_op[i]->pub.name, sizeof known - strlen(known) - 1);
    }
    err_set(err, KVS_INVALID, "no bench \"%.32s\": use %s", name, known);
    return NULL;
}

static kvs_status check_config(const kvs_bench_config *cfg, kvs_error *err)
{
    const int i_ok = cfg->interleave == 0 || (cfg->interleave > 0 && cfg->interleave <= 64 &&
                                              (cfg->interleave & (cfg->interleave - 1)) == 0);
    if (!i_ok) {
        return err_set(err, KVS_INVALID, "interleave %d: use 1, 2, 4, 8, 16, 32 or 64",
                       cfg->interleave);
    }
    if (cfg->reps < 0 || cfg->reps > 1000000) {
        return err_set(err, KVS_INVALID, "reps %d: must be 0 to 1000000", cfg->reps);
    }
    if (cfg->pool_bytes < 0 || cfg->pool_bytes > (int64_t)BENCH_MEM_MAX) {
        return err_set(err, KVS_INVALID, "pool of %" PRId64 " bytes: must be 0 to 6 GiB",
                       cfg->pool_bytes);
    }
    if (cfg->exchange < KVS_EXCHANGE_AUTO || cfg->exchange > KVS_EXCHANGE_AG_RS) {
        return err_set(err, KVS_INVALID, "exchange %d: use a value of kvs_exchange",
                       (int)cfg->exchange);
    }
    return KVS_OK;
}

static kvs_status run_one(bench_run *b, const bench_op *op, kvs_error *err)
{
    TRY(refuse_unused(op, b->cfg, err));
    if (op == &k_roof_op) {
        return run_roof(b, b->cfg, err);
    }
    grid g;
    TRY(make_grid(b, op, &g, err));
    if (b->cfg->one) {
        shorten(&g);
    }
    b->n_total = grid_size(&g);
    return run_op(b, op, &g, err);
}

/* The first point of every op. */
static kvs_status run_short(bench_run *b, kvs_error *err)
{
    b->n_total = N_OP;
    for (int i = 0; i < N_OP - 1; i++) {
        grid g;
        TRY(make_grid(b, k_op[i], &g, err));
        shorten(&g);
        TRY(run_op(b, k_op[i], &g, err));
    }
    return KVS_OK;
}

/* Memory for the ceilings: no cache holds 1 GiB; a run that asks for less gets less. */
static size_t roof_bytes(const kvs_bench_config *cfg)
{
    const int64_t unit = INT64_C(64) << 20;
    const int64_t want =
        cfg->pool_bytes > 0 ? shard_cdiv(cfg->pool_bytes, unit) * unit : POOL_BYTES;
    return (size_t)(want < POOL_BYTES ? want : POOL_BYTES);
}

static kvs_status run_all(bench_run *b, const kern_table *kern, kvs_error *err)
{
    uint32_t cap = 0;
    TRY(cpu_parse_level(b->cfg->cpu != NULL ? b->cfg->cpu : knob_env("cpu"), &cap, err));
    b->features = cpu_features() & cap;
    if (kern != NULL) {
        b->kern = *kern;
    } else {
        TRY(kern_init(&b->kern, b->features, b->cfg->kernels, err));
    }
    const bench_op *op = NULL;
    if (b->cfg->op != NULL) {
        op = find_op(b->cfg->op, err);
        if (op == NULL) {
            return KVS_INVALID;
        }
        TRY(refuse_unused(op, b->cfg, err)); /* before anything takes time */
    }
    TRY(roof_open(&b->roof, roof_bytes(b->cfg), b->features, err));
    orc_init();
    TRY(op != NULL ? run_one(b, op, err) : run_short(b, err));
    return bench_verdict(&b->tally, err);
}

kvs_status bench_run_table(const kvs_bench_config *cfg, const kern_table *kern, kvs_error *err)
{
    if (cfg == NULL || cfg->struct_size < sizeof cfg->struct_size) {
        return err_set(err, KVS_INVALID,
                       "bench: struct_size is not set: start from kvs_bench_config_default");
    }
    kvs_bench_config c;
    memset(&c, 0, sizeof c);
    memcpy(&c, cfg, cfg->struct_size < sizeof c ? cfg->struct_size : sizeof c);
    TRY(check_config(&c, err));
    int32_t cuda = 0;
    TRY(check_device_parse(c.device, &cuda, err));
    if (cuda != 0) {
        return bench_run_cuda(&c, err);
    }
    bench_run *b = mem_calloc(1, sizeof *b);
    if (b == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the bench");
    }
    b->cfg = &c;
    const kvs_status st = run_all(b, kern, err);
    pool_close(b->pool);
    roof_close(&b->roof);
    mem_free(b);
    return st;
}

kvs_status kvs_bench_run(const kvs_bench_config *cfg, kvs_error *err)
{
    return bench_run_table(cfg, NULL, err);
}
