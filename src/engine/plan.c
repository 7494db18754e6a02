/* engine/plan.c - settings resolved and refused, sizes, what fits. */
#include "engine/plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/pool.h"
#include "kvspan/dcp.h"
#include "model/weights.h"
#include "num/kvfmt.h"
#include "shard/topo.h"

enum {
    PLAN_GPUS_MAX = 65536,
    PLAN_SEQS_MAX = 65536,
    PLAN_CHUNK_MAX = 1 << 20,
    PLAN_MTP_MAX = 7,
    PLAN_GPUS = 8,
    PLAN_CHUNK = 2048,
    PLAN_INDEX_HEADS_MAX = 64 /* kern/index.h */
};

#define PLAN_MEM_BYTES INT64_C(141000000000)
#define PLAN_UTIL      0.92
#define PLAN_PAGES_MAX (INT64_C(0x80000000) / KVS_PAGE_TOKENS - 1) /* kvs_cache_config.n_page */

/* ---- refusals -------------------------------------------------------------------------------- */

ERR_PRINTF(3, 4) static void text_set(char *dst, size_t cap, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(dst, cap, fmt, ap);
    va_end(ap);
}

#define SET(field, ...) text_set((field), sizeof(field), __VA_ARGS__)

/* A new entry with `rule` and `value`; why and nearest are the caller's. Every rule has at most one
 * entry, so the list cannot overflow. */
static kvs_plan_refusal *refuse(kvs_plan *p, const char *rule)
{
    kvs_plan_refusal *r = &p->refusal[p->n_refusal];
    p->n_refusal += p->n_refusal < KVS_PLAN_MAX_REFUSAL - 1;
    memset(r, 0, sizeof *r);
    SET(r->rule, "%s", rule);
    return r;
}

/* ---- settings -------------------------------------------------------------------------------- */

static kvs_status out_of_range(const char *field, int64_t v, int64_t lo, int64_t hi, kvs_error *err)
{
    return err_set(err, KVS_INVALID, "%s %" PRId64 ": must be %" PRId64 " to %" PRId64, field, v,
                   lo, hi);
}

kvs_status plan_check_config(const kvs_plan_config *cfg, kvs_error *err)
{
    const struct {
        const char *name;
        int64_t v, hi;
    } field[] = {
        {"gpus", cfg->gpus, PLAN_GPUS_MAX},         {"mem", cfg->mem_bytes, INT64_C(1) << 50},
        {"weights", cfg->weights, KVS_WEIGHT_FP8},  {"tp", cfg->tp, PLAN_GPUS_MAX},
        {"dcp", cfg->dcp, PLAN_GPUS_MAX},           {"ep", cfg->ep, PLAN_GPUS_MAX},
        {"interleave", cfg->interleave, 1 << 20},   {"kv", cfg->kv, KVS_KV_FP8_DS_MLA},
        {"index-kv", cfg->index_kv, KVS_INDEX_F32}, {"ctx", cfg->ctx, INT64_C(1) << 40},
        {"seqs", cfg->seqs, PLAN_SEQS_MAX},         {"mtp", cfg->mtp, 1 << 20},
        {"chunk", cfg->chunk, PLAN_CHUNK_MAX},      {"threads", cfg->threads, POOL_MAX_THREAD},
    };
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        if (field[i].v < 0 || field[i].v > field[i].hi) {
            return out_of_range(field[i].name, field[i].v, 0, field[i].hi, err);
        }
    }
    if (cfg->util != 0.0 && !(cfg->util > 0.0 && cfg->util <= 1.0)) {
        return err_set(err, KVS_INVALID, "util %g: must be above 0 and at most 1", cfg->util);
    }
    return KVS_OK;
}

/* Whether a setting may be v, the others being what they are. */
typedef bool (*accept_fn)(const kvs_plan *p, const hp *g, int32_t v);

/* The accepted value in 1..hi nearest to want, the larger of two; 0 where there is none. */
static int32_t nearest(const kvs_plan *p, const hp *g, accept_fn ok, int32_t want, int32_t hi)
{
    for (int32_t d = want > hi ? want - hi : 0; d < want || want + d <= hi; d++) {
        if (want + d <= hi && ok(p, g, want + d)) {
            return want + d;
        }
        if (want - d >= 1 && ok(p, g, want - d)) {
            return want - d;
        }
    }
    return 0;
}

static topo_config topo_of(const kvs_plan *p, const hp *g)
{
    return (topo_config){.tp = p->tp,
                         .dcp = p->dcp,
                         .interleave = p->interleave,
                         .heads = g->n_head,
                         .max_context = p->ctx > TOPO_MAX_CONTEXT ? 0 : p->ctx};
}

static bool topo_ok(const topo_config *c)
{
    topo_refusal list[TOPO_N_RULE];
    return topo_check(c, list) == 0;
}

static bool tp_ok(const kvs_plan *p, const hp *g, int32_t v)
{
    topo_config c = topo_of(p, g);
    c.tp = v;
    return p->gpus % v == 0 && topo_ok(&c);
}

static bool dcp_ok(const kvs_plan *p, const hp *g, int32_t v)
{
    topo_config c = topo_of(p, g);
    c.dcp = v;
    return topo_ok(&c);
}

static bool ep_ok(const kvs_plan *p, const hp *g, int32_t v)
{
    return p->tp % v == 0 && g->n_expert % v == 0;
}

static void nearest_text(kvs_plan_refusal *r, const char *option, int32_t v)
{
    if (v > 0) {
        SET(r->nearest, "--%s %d", option, v);
    }
}

/* Puts "dcp 4" into the setting it names. */
static bool take_nearest(kvs_plan *p, const char *nearest)
{
    const struct {
        const char *name;
        int32_t *v;
    } field[] = {{"tp ", &p->tp}, {"dcp ", &p->dcp}, {"interleave ", &p->interleave}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        const size_t n = strlen(field[i].name);
        if (strncmp(nearest, field[i].name, n) == 0) {
            *field[i].v = (int32_t)strtol(nearest + n, NULL, 10);
            return true;
        }
    }
    return false;
}

/* Ranks, interleave and heads by the rules of topo.h: the first refusal is noted and its nearest
 * setting taken, until nothing is refused. */
static void resolve_topo(kvs_plan *p, const hp *g)
{
    for (int round = 0; round < TOPO_N_RULE; round++) {
        topo_refusal list[TOPO_N_RULE];
        const topo_config c = topo_of(p, g);
        if (topo_check(&c, list) == 0) {
            return;
        }
        kvs_plan_refusal *r = refuse(p, list[0].rule);
        SET(r->value, "%s", list[0].value);
        SET(r->why, "%s", list[0].why);
        if (!take_nearest(p, list[0].nearest)) {
            break;
        }
        const char *second = strchr(list[0].nearest, ','); /* "tp 5, dcp 1" */
        if (second == NULL) {
            SET(r->nearest, "--%s", list[0].nearest);
        } else {
            take_nearest(p, second + 2);
            SET(r->nearest, "--%.*s --%s", (int)(second - list[0].nearest), list[0].nearest, second + 2);
        }
    }
    p->dcp = 1;
    p->interleave = 1;
    p->tp = (g->n_head + KVS_MAX_HEADS - 1) / KVS_MAX_HEADS;
    while (g->n_head % p->tp != 0) {
        p->tp++;
    }
}

static void resolve_gpus(kvs_plan *p, const hp *g)
{
    if (p->gpus % p->tp == 0) {
        return;
    }
    kvs_plan_refusal *r = refuse(p, "tp_divides_gpus");
    SET(r->value, "tp %d, gpus %d", p->tp, p->gpus);
    SET(r->why, "the devices are cut into TP groups of equal size");
    const int32_t near = nearest(p, g, tp_ok, p->tp, p->gpus);
    if (near > 0) {
        SET(r->nearest, "--tp %d", near);
        p->tp = near;
        return;
    }
    p->gpus = (p->gpus / p->tp + 1) * p->tp;
    SET(r->nearest, "--gpus %d", p->gpus);
}

static void resolve_ep(kvs_plan *p, const hp *g)
{
    const int32_t ep = p->ep;
    if (ep_ok(p, g, ep)) {
        return;
    }
    const int32_t near = nearest(p, g, ep_ok, ep, p->tp);
    const bool divides = p->tp % ep == 0;
    kvs_plan_refusal *r = refuse(p, divides ? "ep_divides_experts" : "ep_divides_tp");
    if (divides) {
        SET(r->value, "ep %d, %d experts", ep, g->n_expert);
        SET(r->why, "every EP rank holds the same number of experts");
    } else {
        SET(r->value, "ep %d, tp %d", ep, p->tp);
        SET(r->why, "the ranks of a TP group share the experts");
    }
    nearest_text(r, "ep", near);
    p->ep = near > 0 ? near : 1;
}

/* What the kernels are made for; no setting changes it. */
static void check_geometry(kvs_plan *p, const hp *g)
{
    if (g->kv_lora != KVS_LATENT_DIM || g->rope != KVS_ROPE_DIM) {
        kvs_plan_refusal *r = refuse(p, "latent_dims");
        SET(r->value, "kv_lora_rank %d, qk_rope_head_dim %d", g->kv_lora, g->rope);
        SET(r->why, "a cache row holds %d latent and %d rope values", KVS_LATENT_DIM, KVS_ROPE_DIM);
    }
    if (g->n_index_head == 0) {
        return;
    }
    if (g->index_dim != KVS_INDEX_DIM || g->n_index_head > PLAN_INDEX_HEADS_MAX) {
        kvs_plan_refusal *r = refuse(p, "index_dims");
        SET(r->value, "%d index heads of %d", g->n_index_head, g->index_dim);
        SET(r->why, "index keys have %d values, and there are at most %d index heads",
            KVS_INDEX_DIM, PLAN_INDEX_HEADS_MAX);
    }
    if (g->topk > KVS_MAX_TOPK) {
        kvs_plan_refusal *r = refuse(p, "index_topk");
        SET(r->value, "index_topk %d", g->topk);
        SET(r->why, "a selection holds at most %d tokens", KVS_MAX_TOPK);
    }
}

static void resolve_formats(kvs_plan *p, const hp *g)
{
    const bool dsa = g->n_index_head > 0;
    kv_layout l = {.kv = p->kv, .index = p->index_kv, .hadamard = 0};
    kvs_error why;
    if (kv_layout_resolve(dsa, &l, &why) < 0) {
        kvs_plan_refusal *r = refuse(p, "kv_format");
        SET(r->value, "kv %s, index-kv %s", kv_fmt_name(p->kv), index_fmt_name(p->index_kv));
        SET(r->why, "%s", why.text);
        l.index = KVS_INDEX_AUTO; /* every row format has a default; fp8 with an indexer has none */
        if (kv_layout_resolve(dsa, &l, NULL) < 0) {
            l.kv = KVS_KV_AUTO;
            kv_layout_resolve(dsa, &l, NULL);
        }
        SET(r->nearest, "--kv %s", kv_fmt_name(l.kv));
    }
    p->kv = l.kv;
    p->index_kv = l.index;
    if (p->weights == KVS_WEIGHT_AUTO) {
        p->weights = g->stored;
    }
    if (p->weights == KVS_WEIGHT_AUTO) {
        kvs_plan_refusal *r = refuse(p, "weight_format");
        SET(r->value, "%s", g->stored_as);
        SET(r->why, "this library reads bf16 weights and fp8 weights in blocks of 128 x 128");
        SET(r->nearest, "--weights fp8");
        p->weights = KVS_WEIGHT_FP8;
    }
}

static void resolve_mtp(kvs_plan *p, const hp *g)
{
    if (p->mtp > 0 && g->n_mtp == 0) {
        kvs_plan_refusal *r = refuse(p, "mtp_layers");
        SET(r->value, "mtp %d", p->mtp);
        SET(r->why, "%s has no draft layer", p->model);
        SET(r->nearest, "--mtp 0");
        p->mtp = 0;
    } else if (p->mtp > PLAN_MTP_MAX) {
        kvs_plan_refusal *r = refuse(p, "mtp_range");
        SET(r->value, "mtp %d", p->mtp);
        SET(r->why, "a step verifies at most %d draft tokens", PLAN_MTP_MAX);
        SET(r->nearest, "--mtp %d", PLAN_MTP_MAX);
        p->mtp = PLAN_MTP_MAX;
    }
}

static void resolve_ctx(kvs_plan *p, const hp *g)
{
    if (p->ctx > g->max_ctx) {
        kvs_plan_refusal *r = refuse(p, "ctx_model");
        SET(r->value, "ctx %" PRId64, p->ctx);
        SET(r->why, "%s was made for at most %" PRId64 " tokens", p->model, g->max_ctx);
        SET(r->nearest, "--ctx %" PRId64, g->max_ctx);
        p->ctx = g->max_ctx;
    }
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static plan_shape shape_of(const kvs_plan *p)
{
    return (plan_shape){
        .tp = p->tp,
        .dcp = p->dcp,
        .interleave = p->interleave,
        .n_head = p->n_head,
        .topk = p->topk < KVS_MAX_TOPK ? p->topk : KVS_MAX_TOPK,
        .kv = p->kv,
        .max_len = p->ctx,
    };
}

static shard_geom shard_of(const kvs_plan *p)
{
    return (shard_geom){.n = p->dcp, .i = p->interleave, .rank = 0};
}

/* Rows of a step's largest decode: a token and its drafts of every sequence. */
static int32_t verify_rows(const kvs_plan *p)
{
    return p->seqs * (1 + p->mtp);
}

rank_limits plan_limits(const kvs_plan *p)
{
    const int32_t verify = verify_rows(p);
    return (rank_limits){.max_reqs = p->seqs,
                         .max_rows = p->chunk > verify ? p->chunk : verify,
                         .max_logits = verify,
                         .width = shard_table_width(shard_of(p), p->ctx),
                         .mtp = p->mtp};
}

fwd_config plan_fwd_config(const kvs_plan *p, const fwd_config *like)
{
    const rank_limits l = plan_limits(p);
    fwd_config c = *like;
    c.dcp = p->dcp;
    c.interleave = p->interleave;
    c.ep = p->ep;
    c.threads = p->threads;
    c.kv = p->kv;
    c.index_kv = p->index_kv;
    c.max_rows = l.max_rows;
    c.max_reqs = l.max_reqs;
    c.max_logits = l.max_logits;
    c.max_len = p->ctx;
    c.n_page = l.width * p->seqs;
    return c;
}

/* What sizes follow from besides the plan. */
typedef struct sizing {
    const hp *g;
    const fwd_config *like;
    int32_t threads; /* as given, 0: by the machine */
    hp run;          /* g, made to run where it does not (check_geometry has refused it), without draft
                        layers that are not used */
} sizing;

static void sizing_init(sizing *z, const kvs_plan *p, const hp *g, const kvs_plan_config *cfg,
                        const fwd_config *like)
{
    *z = (sizing){.g = g, .like = like, .threads = cfg->threads, .run = *g};
    hp *h = &z->run;
    h->kv_lora = KVS_LATENT_DIM;
    h->rope = KVS_ROPE_DIM;
    h->index_dim = KVS_INDEX_DIM;
    h->n_index_head = h->n_index_head < PLAN_INDEX_HEADS_MAX ? h->n_index_head : PLAN_INDEX_HEADS_MAX;
    h->topk = h->topk < KVS_MAX_TOPK ? h->topk : KVS_MAX_TOPK;
    h->yarn = false; /* no size depends on it */
    h->stored = p->weights;
    h->n_mtp = p->mtp > 0 ? g->n_mtp : 0;
}

static void size_token(kvs_plan *p, const hp *g)
{
    const int64_t index_page = g->n_index_head > 0 ? index_page_bytes(p->index_kv) : 0;
    const int64_t n_draft = p->mtp > 0 ? g->n_mtp : 0;
    p->row_bytes = kv_row_bytes(p->kv);
    p->index_token_bytes = index_page / KVS_PAGE_TOKENS;
    p->token_latent = g->n_layer * p->row_bytes;
    p->token_index = g->n_index_layer * p->index_token_bytes;
    p->token_draft = n_draft * (p->row_bytes + p->index_token_bytes);
    p->token_bytes = p->token_latent + p->token_index + p->token_draft;
}

/* a * b, INT64_MAX where that is past it; both >= 0. */
static int64_t product(int64_t a, int64_t b)
{
    int64_t v = 0;
    return __builtin_mul_overflow(a, b, &v) ? INT64_MAX : v;
}

static int64_t sum(int64_t a, int64_t b)
{
    return a > INT64_MAX - b ? INT64_MAX : a + b;
}

static void size_weights(kvs_plan *p, const hp *g)
{
    const bool mtp = p->mtp > 0;
    p->weight_bytes = weights_rank_bytes_max(g, WEIGHTS_MAIN, p->weights, p->tp, p->ep);
    p->weight_copies = weights_copy_bytes(g, WEIGHTS_MAIN, p->weights, p->tp);
    p->process_weights = weights_bytes(g, WEIGHTS_MAIN, p->weights) +
                         weights_copy_bytes(g, WEIGHTS_MAIN, p->weights, 1);
    p->weight_mtp = 0;
    if (mtp) {
        p->weight_mtp = weights_rank_bytes_max(g, WEIGHTS_MTP, p->weights, p->tp, p->ep);
        p->weight_copies += weights_copy_bytes(g, WEIGHTS_MTP, p->weights, p->tp);
        p->process_weights += weights_bytes(g, WEIGHTS_MTP, p->weights) +
                              weights_copy_bytes(g, WEIGHTS_MTP, p->weights, 1);
    }
}

/* What a rank needs, what a process of all ranks does, and how many pages are left. */
static kvs_status size_rank(kvs_plan *p, const sizing *z, kvs_error *err)
{
    const int32_t share = pool_cores() / p->tp;
    p->threads = z->threads > 0 ? z->threads : share > 0 ? share : 1;
    size_weights(p, z->g);
    fwd_config c = plan_fwd_config(p, z->like);
    const rank_limits l = plan_limits(p);
    const int64_t n_page = c.n_page;
    c.n_page = 1;
    fwd_memory m;
    TRY(fwd_bytes(&z->run, &c, p->tp, &m, err));
    const int64_t engine = rank_bytes(&l, z->g->hidden, z->g->vocab);
    p->page_bytes = m.cache;
    p->workspace_bytes = m.workspace_most + engine;
    p->pool_bytes = product(n_page, p->page_bytes);
    p->process_workspace = m.workspace_all + p->tp * engine;
    p->process_cache = product(p->pool_bytes, p->tp);
    p->process_messages = p->tp > 1 ? COMM_THREAD_STAGING * m.messages : 0;
    p->process_bytes = sum(p->process_weights + p->process_workspace + p->process_messages,
                           p->process_cache);
    const int64_t left = p->usable_bytes - p->weight_bytes - p->weight_mtp - p->weight_copies -
                         p->workspace_bytes;
    p->cache_bytes = left > 0 ? left : 0;
    p->n_page = p->cache_bytes / p->page_bytes;
    if (p->n_page > PLAN_PAGES_MAX) {
        p->n_page = PLAN_PAGES_MAX;
    }
    return KVS_OK;
}

static int64_t capped(int64_t n_page, int64_t span, int64_t max_ctx)
{
    const int64_t n = n_page * span;
    return n < max_ctx ? n : max_ctx;
}

static void size_fit(kvs_plan *p, const hp *g)
{
    const int64_t span = shard_span(shard_of(p));
    p->tokens_per_rank = p->n_page * KVS_PAGE_TOKENS;
    p->tokens_total = p->n_page * span;
    p->tokens_replicas = p->tokens_total * (p->gpus / p->tp);
    p->longest_ctx = capped(p->n_page, span, g->max_ctx);
    p->longest_ctx_seqs = capped(p->n_page / p->seqs, span, g->max_ctx);
}

static bool weights_fit(const kvs_plan *p)
{
    return p->n_page > 0;
}

static bool cache_fits(const kvs_plan *p)
{
    return p->seqs * shard_table_width(shard_of(p), p->ctx) <= p->n_page;
}

static int64_t exchange_step(const kvs_plan *p, const kvs_plan_exchange *x)
{
    return p->n_layer * (x->q + x->partial + x->lse) + p->n_index_layer * x->selection;
}

static void size_exchange(kvs_plan *p)
{
    const plan_shape s = shape_of(p);
    p->n_row = verify_rows(p);
    p->a2a = plan_exchange(&s, KVS_EXCHANGE_A2A, p->n_row);
    p->ag_rs = plan_exchange(&s, KVS_EXCHANGE_AG_RS, p->n_row);
    p->a2a_step = exchange_step(p, &p->a2a);
    p->ag_rs_step = exchange_step(p, &p->ag_rs);
}

/* ---- what does not fit ----------------------------------------------------------------------- */

/* The smallest multiple of tp by a power of two on which the weights leave room for a page, with
 * experts spread over as many ranks as may be: fills t's gpus, tp and ep. t->gpus 0: none. */
static kvs_status enough_ranks(const kvs_plan *p, const sizing *z, kvs_plan *t,
                               kvs_error *err)
{
    const hp *g = z->g;
    *t = *p;
    for (int32_t k = p->tp * 2; k <= g->n_head; k *= 2) {
        t->gpus = k;
        t->tp = k;
        t->ep = g->n_expert > 0 ? nearest(t, g, ep_ok, k, k) : k;
        if (!tp_ok(t, g, k)) {
            continue;
        }
        TRY(size_rank(t, z, err));
        if (weights_fit(t)) {
            return KVS_OK;
        }
    }
    t->gpus = 0;
    return KVS_OK;
}

static kvs_status refuse_weights(kvs_plan *p, const sizing *z, bool ep_given, kvs_error *err)
{
    kvs_plan_refusal *r = refuse(p, "weights_fit");
    const double need = (double)(p->weight_bytes + p->weight_mtp + p->weight_copies +
                                 p->workspace_bytes);
    SET(r->value, "%.2f GB on a rank, %.2f GB usable", need / 1e9, (double)p->usable_bytes / 1e9);
    SET(r->why, "weights and workspaces must leave room for cache pages");
    kvs_plan t = *p;
    if (p->weights == KVS_WEIGHT_BF16 && z->g->stored == KVS_WEIGHT_FP8) {
        t.weights = KVS_WEIGHT_FP8;
        TRY(size_rank(&t, z, err));
        if (weights_fit(&t)) {
            SET(r->nearest, "--weights fp8");
            return KVS_OK;
        }
    }
    TRY(enough_ranks(p, z, &t, err));
    if (t.gpus > 0) {
        SET(r->nearest, "--gpus %d --tp %d", t.gpus, t.tp);
    }
    if (t.gpus > 0 && (t.ep != t.tp || ep_given)) {
        const size_t n = strlen(r->nearest);
        text_set(r->nearest + n, sizeof r->nearest - n, " --ep %d", t.ep);
    }
    return KVS_OK;
}

/* The smallest larger DCP size whose pages hold the sequences; 0: none. */
static kvs_status enough_dcp(const kvs_plan *p, const sizing *z, int32_t *dcp, kvs_error *err)
{
    *dcp = 0;
    for (int32_t n = p->dcp * 2; n <= KVS_MAX_RANKS; n *= 2) {
        kvs_plan t = *p;
        if (!dcp_ok(&t, z->g, n)) {
            continue;
        }
        t.dcp = n;
        TRY(size_rank(&t, z, err));
        if (cache_fits(&t)) {
            *dcp = n;
            return KVS_OK;
        }
    }
    return KVS_OK;
}

static kvs_status refuse_cache(kvs_plan *p, const sizing *z, kvs_error *err)
{
    kvs_plan_refusal *r = refuse(p, "cache_fit");
    SET(r->value, "%d x %" PRId64 " tokens", p->seqs, p->ctx);
    SET(r->why, "a DCP group of %d ranks holds %" PRId64 " tokens in pages of %" PRId64, p->dcp,
        p->tokens_total, shard_span(shard_of(p)));
    int32_t dcp = 0;
    TRY(enough_dcp(p, z, &dcp, err));
    if (dcp > 0) {
        SET(r->nearest, "--dcp %d, or ", dcp);
    }
    const size_t n = strlen(r->nearest);
    char *to = r->nearest + n;
    const size_t room = sizeof r->nearest - n;
    const int64_t width = shard_table_width(shard_of(p), p->ctx);
    if (p->longest_ctx_seqs > 0) {
        text_set(to, room, "--ctx %" PRId64, p->longest_ctx_seqs);
    } else if (width <= p->n_page) {
        text_set(to, room, "--seqs %" PRId64, p->n_page / width);
    } else {
        text_set(to, room, "--seqs 1 --ctx %" PRId64, p->longest_ctx);
    }
    return KVS_OK;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void describe(kvs_plan *p, const hp *g)
{
    SET(p->model, "%s", g->name);
    SET(p->architecture, "%s", g->arch);
    p->n_layer = g->n_layer;
    p->n_index_layer = g->n_index_layer;
    p->n_head = g->n_head;
    p->n_index_head = g->n_index_head;
    p->topk = g->topk;
    p->n_mtp_layer = g->n_mtp;
    p->max_ctx = g->max_ctx;
    p->n_param = weights_params(g, WEIGHTS_MAIN);
    p->n_param_mtp = weights_params(g, WEIGHTS_MTP);
}

static void take_settings(kvs_plan *p, const hp *g, const kvs_plan_config *cfg)
{
    p->gpus = cfg->gpus > 0 ? cfg->gpus : cfg->tp > 0 ? cfg->tp : PLAN_GPUS;
    p->tp = cfg->tp > 0 ? cfg->tp : p->gpus;
    p->dcp = cfg->dcp > 0 ? cfg->dcp : 1;
    p->interleave = cfg->interleave > 0 ? cfg->interleave : 1;
    p->mem_bytes = cfg->mem_bytes > 0 ? cfg->mem_bytes : PLAN_MEM_BYTES;
    p->util = cfg->util > 0.0 ? cfg->util : PLAN_UTIL;
    p->usable_bytes = (int64_t)((double)p->mem_bytes * p->util);
    p->weights = cfg->weights;
    p->kv = cfg->kv;
    p->index_kv = cfg->index_kv;
    p->ctx = cfg->ctx > 0 ? cfg->ctx : g->max_ctx;
    p->seqs = cfg->seqs > 0 ? cfg->seqs : 1;
    p->mtp = cfg->mtp;
    p->chunk = cfg->chunk > 0 ? cfg->chunk : PLAN_CHUNK;
}

kvs_status plan_make(kvs_plan *p, const hp *g, const kvs_plan_config *cfg, const fwd_config *like,
                     kvs_error *err)
{
    const size_t struct_size = p->struct_size;
    memset(p, 0, sizeof *p);
    p->struct_size = struct_size;
    describe(p, g);
    take_settings(p, g, cfg);
    check_geometry(p, g);
    resolve_topo(p, g);
    resolve_gpus(p, g);
    p->ep = cfg->ep > 0 ? cfg->ep : p->tp;
    if (g->n_expert > 0) {
        resolve_ep(p, g);
    }
    resolve_formats(p, g);
    resolve_mtp(p, g);
    resolve_ctx(p, g);

    p->checkpoint_bytes =
        weights_bytes(g, WEIGHTS_MAIN, p->weights) + weights_bytes(g, WEIGHTS_MTP, p->weights);
    p->step_param = weights_step_params(g);
    p->head_param = weights_head_params(g);
    p->step_weight_bytes = weights_step_bytes(g, p->weights);
    size_token(p, g);
    sizing z;
    sizing_init(&z, p, g, cfg, like);
    TRY(size_rank(p, &z, err));
    size_fit(p, g);
    size_exchange(p);
    if (!weights_fit(p)) {
        return refuse_weights(p, &z, cfg->ep > 0, err);
    }
    return cache_fits(p) ? KVS_OK : refuse_cache(p, &z, err);
}
