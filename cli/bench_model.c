/* cli/bench_model.c - an answer's steps and a prompt, timed through kvspan/engine.h beside the machine's ceilings.
 *
 * Each case opens an engine and reads a prompt of seeded random ids two times or more; with "decode" a fixed
 * number of steps of the answer follow. A sample is one step, or the whole prompt. The runs must end with the same
 * digest of logits. What a step has to read or compute follows from kvspan/plan.h: the weights of a token's active
 * experts once and the cache rows it attends (with drafts: of one of the step's tokens, and no draft layer, so the
 * share is a lower bound); for a prompt two flops for each parameter and token, and the products with attended rows
 * and scored keys. Ceilings come from kvs_bench_run's roof, with all the threads of all ranks. */
#include "cli/bench.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cli.h"
#include "kvspan/engine.h"
#include "kvspan/plan.h"

enum { STEPS = 24, RUNS = 2, MAX_SAMPLE = 4096, EVENTS = 16 };

typedef struct ceilings {
    int32_t threads; /* 0: not measured */
    double read, flop;
    char flop_kind[32];
} ceilings;

typedef struct bench_case {
    const bench_model *m;
    bool decode;
    int64_t len;
    int32_t dcp, threads, steps;
    kvs_kv_format kv;
    kvs_plan plan;
    kvs_engine_stats stats;
    ceilings *roof;
    int32_t n_sample;
    double us[MAX_SAMPLE];
    double total_us;
    uint64_t n_token;          /* of all samples */
    uint64_t digest;
    int32_t n_run, n_other;    /* runs, and those whose digest was another one */
} bench_case;

bool bench_model_has(const char *op)
{
    return strcmp(op, "decode") == 0 || strcmp(op, "prefill") == 0;
}

__attribute__((format(printf, 3, 4))) static kvs_status fail(kvs_error *err, kvs_status st,
                                                             const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    *err = (kvs_error){.code = st, .pos = -1};
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    return st;
}

/* ---- ceilings -------------------------------------------------------------------------------- */

static void on_roof(void *ctx, const kvs_bench_row *r)
{
    ceilings *c = ctx;
    if (strcmp(r->variant, "read") == 0) {
        c->read = r->ceiling;
    } else if (r->gflop > 0.0 && r->ceiling > c->flop) {
        c->flop = r->ceiling;
        snprintf(c->flop_kind, sizeof c->flop_kind, "%s", r->variant);
    }
}

static kvs_status measure_roof(ceilings *c, int32_t threads, const kvs_bench_config *cfg,
                               kvs_error *err)
{
    if (c->threads == threads) {
        return KVS_OK;
    }
    const int64_t n = threads;
    *c = (ceilings){.threads = threads};
    kvs_bench_config b = kvs_bench_config_default();
    b.op = "roof";
    b.threads = (kvs_bench_axis){&n, 1};
    b.cpu = cfg->cpu;
    b.row = on_roof;
    b.ctx = c;
    return kvs_bench_run(&b, err);
}

/* ---- useful work ----------------------------------------------------------------------------- */

/* Keys that the tokens at positions [0, n) attend, each token its own, in all. */
static double attended(int64_t n, int32_t topk)
{
    const int64_t full = topk > 0 && topk < n ? topk : n; /* the first tokens attend all before them */
    return (double)full * (double)(full + 1) / 2.0 + (double)(n - full) * (double)full;
}

static double prompt_flop(const kvs_plan *p, int64_t n)
{
    const double pair = 2.0 * (KVS_ROW_DIM + KVS_LATENT_DIM) * p->n_head;
    const double key = 2.0 * KVS_INDEX_DIM * p->n_index_head;
    return 2.0 * (double)p->step_param * (double)n + 2.0 * (double)p->head_param +
           p->n_layer * pair * attended(n, p->topk) + p->n_index_layer * key * attended(n, 0);
}

static double step_bytes(const kvs_plan *p, int64_t len)
{
    const int64_t rows = p->topk > 0 && p->topk < len ? p->topk : len;
    return (double)p->step_weight_bytes + (double)p->token_latent * (double)rows +
           (double)p->token_index * (double)len;
}

/* ---- one request ----------------------------------------------------------------------------- */

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void add_sample(bench_case *c, double us, uint64_t n_token)
{
    if (c->n_sample < MAX_SAMPLE) {
        c->us[c->n_sample++] = us;
        c->total_us += us;
        c->n_token += n_token;
    }
}

typedef struct heard {
    uint64_t n_token, digest;
    bool reading; /* the step was one of the prompt's */
    bool failed;
} heard;

static heard listen(kvs_engine *e, kvs_error *err)
{
    heard h = {0};
    kvs_event ev[EVENTS];
    int32_t n = 0;
    while ((n = kvs_engine_poll(e, ev, EVENTS)) > 0) {
        for (int32_t i = 0; i < n; i++) {
            h.reading = h.reading || ev[i].kind == KVS_EVENT_PREFILL;
            if (ev[i].kind == KVS_EVENT_TOKEN) {
                h.n_token++;
                h.digest = ev[i].digest;
            } else if (ev[i].kind == KVS_EVENT_ERROR) {
                h.failed = true;
                *err = ev[i].error;
            }
        }
    }
    return h;
}

static kvs_status one_run(bench_case *c, kvs_engine *e, const int32_t *ids, kvs_error *err)
{
    const kvs_bench_config *cfg = c->m->cfg;
    kvs_request r = kvs_request_default();
    r.prompt = ids;
    r.n_prompt = c->len;
    r.max_new = c->decode ? 1 + (int64_t)c->steps * (1 + c->m->mtp) : 1;
    r.ignore_eos = 1;
    uint64_t id = 0;
    kvs_status st = kvs_engine_submit(e, &r, &id, err);
    uint64_t digest = 0;
    double prompt_us = 0.0;
    int32_t n_step = 0;
    while (st == KVS_OK) {
        if (cfg->progress != NULL && cfg->progress(cfg->ctx, c->m->op, c->n_run, RUNS) != 0) {
            return fail(err, KVS_CANCELLED, "bench %s: interrupted", c->m->op);
        }
        const double t0 = now_us();
        st = kvs_engine_step(e, err);
        const double us = now_us() - t0;
        const heard h = listen(e, err);
        if (h.failed) {
            return err->code;
        }
        digest = h.n_token > 0 ? h.digest : digest;
        if (h.reading) {
            prompt_us += us;
        } else if (h.n_token > 0 && c->decode && n_step < c->steps) {
            add_sample(c, us, h.n_token);
            if (++n_step == c->steps) { /* the same number of steps in every run */
                kvs_engine_cancel(e, id);
            }
        }
    }
    if (!c->decode) {
        add_sample(c, prompt_us, (uint64_t)c->len);
    }
    if (c->n_run++ == 0) {
        c->digest = digest;
    }
    c->n_other += digest != c->digest;
    return st == KVS_IDLE ? KVS_OK : st;
}

/* Ids of the whole vocabulary by a linear congruential generator. */
static int32_t *make_prompt(int64_t len, int32_t vocab, uint64_t seed)
{
    int32_t *ids = malloc((size_t)len * sizeof *ids);
    uint64_t x = seed * 2 + 1;
    for (int64_t i = 0; ids != NULL && i < len; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        ids[i] = (int32_t)((x >> 33) % (uint64_t)vocab);
    }
    return ids;
}

/* ---- a case ---------------------------------------------------------------------------------- */

static kvs_status open_engine(bench_case *c, kvs_engine **e, kvs_error *err)
{
    const bench_model *m = c->m;
    const kvs_bench_config *cfg = m->cfg;
    kvs_engine_config ec = kvs_engine_config_default();
    ec.model_dir = m->model_dir;
    ec.tp = m->tp;
    ec.dcp = c->dcp;
    ec.interleave = cfg->interleave;
    ec.threads = c->threads;
    ec.kv = c->kv;
    ec.exchange = cfg->exchange;
    ec.timeout_ms = cfg->timeout_ms;
    ec.mtp = m->mtp;
    ec.no_reuse = 1; /* every run reads the whole prompt */
    ec.ctx = c->len + 2 + (c->decode ? (int64_t)c->steps * (1 + m->mtp) : 0);
    ec.cpu = cfg->cpu;
    ec.kernels = cfg->kernels;
    const kvs_status st = kvs_engine_open(e, &ec, err);
    if (st < 0) {
        return st;
    }
    c->stats = kvs_engine_stats_empty();
    kvs_engine_get_stats(*e, &c->stats);
    kvs_plan_config pc = kvs_plan_config_default();
    pc.model_dir = m->model_dir;
    pc.tp = c->stats.tp;
    pc.dcp = c->stats.dcp;
    pc.kv = c->stats.kv;
    pc.index_kv = c->stats.index_kv;
    pc.ctx = c->stats.ctx;
    c->plan = kvs_plan_empty();
    return kvs_plan_make(&c->plan, &pc, err);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(bench_case *c)
{
    char name[64];
    snprintf(name, sizeof name, "%s/tp%d/t%d", c->m->op, c->stats.tp, c->stats.threads);
    qsort(c->us, (size_t)c->n_sample, sizeof *c->us, by_value);
    const double median = (c->us[(c->n_sample - 1) / 2] + c->us[c->n_sample / 2]) / 2.0;
    kvs_bench_row r = {.name = name,
                       .op = c->m->op,
                       .variant = c->stats.transport,
                       .device = "cpu",
                       .kv = cli_kv_word(c->stats.kv),
                       .batch = 1,
                       .q = c->decode ? 1 + c->stats.mtp : 0,
                       .heads = c->plan.n_head,
                       .len = c->len,
                       .topk = c->stats.topk,
                       .dcp = c->stats.dcp,
                       .threads = c->stats.threads,
                       .n_rep = c->n_sample,
                       .median_us = median,
                       .min_us = c->us[0],
                       .p90_us = c->us[(c->n_sample - 1) * 9 / 10],
                       .passed = c->n_other == 0};
    if (c->decode) {
        r.gbyte = step_bytes(&c->plan, c->len) * 1e-9;
        r.byte_per_s = r.gbyte * 1e15 / median;
        r.ceiling_kind = "read";
        r.ceiling = c->roof->read;
        r.share = r.byte_per_s / r.ceiling;
    } else {
        r.gflop = prompt_flop(&c->plan, c->len) * 1e-9;
        r.flop_per_s = r.gflop * 1e15 / median;
        r.ceiling_kind = c->roof->flop_kind;
        r.ceiling = c->roof->flop;
        r.share = r.flop_per_s / r.ceiling;
    }
    c->m->row(c->m->cfg->ctx, &r, (double)c->n_token * 1e6 / c->total_us);
}

static kvs_status run_case(bench_case *c, kvs_error *err)
{
    const kvs_bench_config *cfg = c->m->cfg;
    kvs_engine *e = NULL;
    int32_t *ids = NULL;
    kvs_status st = open_engine(c, &e, err);
    if (st >= 0) {
        ids = make_prompt(c->len, c->stats.vocab, cfg->seed);
        st = ids != NULL ? measure_roof(c->roof, c->stats.tp * c->stats.threads, cfg, err)
                         : fail(err, KVS_NOMEM, "no memory for a prompt of %" PRId64 " ids", c->len);
    }
    const int32_t runs = c->decode || cfg->reps < RUNS ? RUNS : cfg->reps;
    for (int32_t i = 0; i < runs && st >= 0; i++) {
        st = one_run(c, e, ids, err);
    }
    if (st >= 0) {
        report(c);
    }
    free(ids);
    kvs_engine_close(e);
    return st;
}

/* ---- the grid -------------------------------------------------------------------------------- */

static kvs_bench_axis axis_or(kvs_bench_axis a, const int64_t *own, int32_t n)
{
    return a.n > 0 ? a : (kvs_bench_axis){own, n};
}

static kvs_status run_grid(const bench_model *m, bench_case *c, kvs_error *err)
{
    static const int64_t own_len[] = {256, 1024};
    static const int64_t own_dcp[] = {1};
    static const int64_t own_zero[] = {0}; /* the engine's own */
    const kvs_bench_config *cfg = m->cfg;
    const kvs_bench_axis len = axis_or(cfg->len, own_len, 2);
    const kvs_bench_axis dcp = axis_or(cfg->dcp, own_dcp, 1);
    const kvs_bench_axis threads = axis_or(cfg->threads, own_zero, 1);
    const kvs_bench_axis kv = axis_or(cfg->kv, own_zero, 1);
    const bool decode = strcmp(m->op, "decode") == 0;
    ceilings roof = {0};
    int32_t n_wrong = 0;
    for (int32_t i = 0; i < len.n * dcp.n * threads.n * kv.n; i++) {
        *c = (bench_case){.m = m,
                          .decode = decode,
                          .len = len.v[i % len.n],
                          .dcp = (int32_t)dcp.v[i / len.n % dcp.n],
                          .threads = (int32_t)threads.v[i / len.n / dcp.n % threads.n],
                          .kv = (kvs_kv_format)kv.v[i / len.n / dcp.n / threads.n],
                          .steps = cfg->reps > 0 ? cfg->reps : STEPS,
                          .roof = &roof};
        if (c->len < 1) {
            return fail(err, KVS_INVALID, "len %" PRId64 ": a prompt has at least 1 token", c->len);
        }
        if (cfg->reps > MAX_SAMPLE / RUNS) {
            return fail(err, KVS_INVALID, "reps %d: use at most %d", cfg->reps, MAX_SAMPLE / RUNS);
        }
        const kvs_status st = run_case(c, err);
        if (st < 0) {
            return st;
        }
        n_wrong += c->n_other > 0;
    }
    return n_wrong == 0 ? KVS_OK
                        : fail(err, KVS_INTERNAL,
                               "%d cases: equal runs gave logits with different digests", n_wrong);
}

kvs_status bench_model_run(const bench_model *m, kvs_error *err)
{
    bench_case *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return fail(err, KVS_NOMEM, "no memory for the bench");
    }
    const kvs_status st = run_grid(m, c, err);
    free(c);
    return st;
}
