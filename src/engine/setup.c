/* engine/setup.c - settings against the model. What may go together is decided in plan.c; the sizes
 * of a step and of the pool follow here. */
#include <inttypes.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/pool.h"
#include "engine/engine.h"
#include "engine/plan.h"
#include "shard/shard.h"

enum { TIMEOUT_MS = 30000, MAX_TP = COMM_MAX_THREADS };

#define ANY_MEMORY (INT64_C(1) << 50)
#define PAGES_MAX  (INT64_C(0x80000000) / KVS_PAGE_TOKENS - 1) /* kvs_cache_config.n_page */

static kvs_status check_range(const char *field, int64_t v, int64_t hi, kvs_error *err)
{
    return v >= 0 && v <= hi ? KVS_OK
                             : err_set(err, KVS_INVALID,
                                       "%s %" PRId64 ": use 0 (default) to %" PRId64, field, v, hi);
}

static kvs_status check_fields(const kvs_engine_config *c, kvs_error *err)
{
    TRY(check_range("threads", c->threads, POOL_MAX_THREAD, err));
    TRY(check_range("max_seqs", c->max_seqs, KVS_MAX_SEQS, err));
    TRY(check_range("timeout_ms", c->timeout_ms, INT32_MAX, err));
    TRY(check_range("trace", c->trace, 1, err));
    TRY(check_range("no_reuse", c->no_reuse, 1, err));
    TRY(check_range("selection_last", c->selection_last, 1, err));
    TRY(check_range("hadamard", c->hadamard, 1, err));
    TRY(check_range("scale_rule", c->scale_rule, KVS_SCALE_EXACT, err));
    TRY(check_range("exchange", c->exchange, KVS_EXCHANGE_AG_RS, err));
    if (!(c->latent_eps >= 0.0f && c->latent_eps < 1.0f)) {
        return err_set(err, KVS_INVALID,
                       "latent-eps %g: use 0 (the model's) or a small positive number",
                       (double)c->latent_eps);
    }
    return KVS_OK;
}

/* TP follows from DCP; from one that is refused, the next that is not, so that the refusal is about DCP. */
static int32_t tp_of(int32_t dcp)
{
    int32_t tp = 1;
    while (tp < dcp && tp < KVS_MAX_RANKS) {
        tp *= 2;
    }
    return tp;
}

static kvs_plan_config plan_of(const kvs_engine_config *c, int32_t ranks)
{
    kvs_plan_config p = kvs_plan_config_default();
    p.model_dir = c->model_dir;
    p.mem_bytes = ANY_MEMORY;
    p.util = 1.0;
    p.dcp = c->dcp;
    p.tp = c->tp != 0 ? c->tp : ranks > 0 ? ranks : tp_of(c->dcp);
    p.gpus = p.tp > 0 ? p.tp : 0;
    p.ep = c->ep;
    p.interleave = c->interleave;
    p.kv = c->kv;
    p.index_kv = c->index_kv;
    p.ctx = c->ctx;
    p.seqs = c->max_seqs;
    p.mtp = c->mtp;
    p.chunk = c->chunk;
    p.threads = c->threads;
    return p;
}

/* What an opening says besides its plan. */
static fwd_config rest_of(const kvs_engine_config *c)
{
    return (fwd_config){.scale_rule = c->scale_rule,
                        .exchange = c->exchange,
                        .hadamard = c->hadamard,
                        .latent_eps = c->latent_eps,
                        .trace = c->trace,
                        .selection_last = c->selection_last,
                        .cpu = c->cpu,
                        .kernels = c->kernels};
}

static kvs_status resolve(setup *s, const kvs_engine_config *cfg, const hp *h, int32_t ranks,
                          kvs_error *err)
{
    const kvs_plan_config pc = plan_of(cfg, ranks);
    const fwd_config rest = rest_of(cfg);
    TRY(plan_check_config(&pc, err));
    if (pc.tp > MAX_TP && ranks == 0) {
        return err_set(err, KVS_INVALID, "tp %d: at most %d ranks are threads of one process",
                       pc.tp, MAX_TP);
    }
    if (ranks > 0 && pc.tp != ranks) {
        return err_set(err, KVS_INVALID, "tp %d: %d ranks were started; use --tp %d", pc.tp, ranks,
                       ranks);
    }
    s->plan = kvs_plan_empty();
    TRY(plan_make(&s->plan, h, &pc, &rest, err));
    if (s->plan.n_refusal > 0) {
        const kvs_plan_refusal *r = &s->plan.refusal[0];
        return err_set(err, KVS_INVALID, "%s: %s%s%s", r->value, r->why,
                       r->nearest[0] != '\0' ? "; use " : "", r->nearest);
    }
    return KVS_OK;
}

static shard_geom geom_of(const kvs_plan *p)
{
    return (shard_geom){.n = p->dcp, .i = p->interleave, .rank = 0};
}

kvs_status setup_make(setup *s, const kvs_engine_config *cfg, const hp *h, int32_t ranks,
                      kvs_error *err)
{
    *s = (setup){0};
    TRY(check_fields(cfg, err));
    TRY(hp_runnable(h, err));
    TRY(resolve(s, cfg, h, ranks, err));
    const kvs_plan *p = &s->plan;
    if (p->ctx < 2) {
        return err_set(err, KVS_INVALID, "ctx %" PRId64 ": a prompt and an answer need 2 tokens",
                       p->ctx);
    }
    const fwd_config rest = rest_of(cfg);
    s->fwd = plan_fwd_config(p, &rest);
    s->lim = plan_limits(p);
    s->lim.timeout_ms = cfg->timeout_ms > 0 ? cfg->timeout_ms : TIMEOUT_MS;
    if (s->fwd.n_page > PAGES_MAX) {
        return err_set(err, KVS_INVALID,
                       "%d sequences of %" PRId64 " tokens: a pool has at most %" PRId64
                       " pages of 64 tokens; use --ctx %" PRId64,
                       p->seqs, p->ctx, PAGES_MAX, PAGES_MAX / p->seqs * shard_span(geom_of(p)));
    }
    return KVS_OK;
}

/* ---- address space --------------------------------------------------------------------------- */

static bool maps(size_t bytes)
{
    kvs_error why;
    void *p = mem_map_pages(bytes, 0, &why);
    mem_unmap_pages(p, bytes);
    return p != NULL;
}

kvs_status setup_check_space(const setup *s, int32_t n_here, kvs_error *err)
{
    const double all = (double)s->plan.pool_bytes * n_here;
    if (all < 0x1p62 && maps((size_t)(s->plan.pool_bytes * n_here))) {
        return KVS_OK;
    }
    int64_t ctx = s->plan.ctx;
    double need = all;
    while (ctx > KVS_PAGE_TOKENS && !(need < 0x1p62 && maps((size_t)need))) {
        ctx /= 2;
        need /= 2.0;
    }
    return err_set(
        err, KVS_NOMEM,
        "a context of %" PRId64 " tokens takes up to %.1f GB of cache and the system "
        "reserves no more than %.1f GB (ulimit -v, vm.overcommit_memory); use --ctx %" PRId64,
        s->plan.ctx, all / 1e9, need / 1e9, ctx);
}
