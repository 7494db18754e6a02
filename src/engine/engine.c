/* engine/engine.c - an engine opened and closed; other ranks as threads. */
#include "engine/engine.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"

/* ---- the other ranks ------------------------------------------------------------------------- */

static void *rank_main(void *arg)
{
    rank_thread *t = arg;
    const struct kvs_engine *e = t->e;
    rank r;
    if (rank_open(&r, e->w, &e->s.fwd, &e->s.lim, t->end, NULL) == KVS_OK) {
        rank_follow(&r, NULL); /* a failure has reached rank 0 through the comm */
        rank_close(&r);
    }
    comm_close(t->end);
    return NULL;
}

static kvs_status start_ranks(kvs_engine *e, kvs_error *err)
{
    const int32_t tp = e->s.plan.tp;
    const comm_config cc = {.timeout_ms = e->s.lim.timeout_ms};
    comm *end[COMM_MAX_THREADS] = {NULL};
    if (tp == 1) {
        TRY(comm_self_open(&end[0], &cc, err));
    } else {
        TRY(comm_thread_open(end, tp, &cc, err));
    }
    e->world = end[0];
    e->owns_world = true;
    e->other = mem_calloc((size_t)tp, sizeof *e->other);
    kvs_status st =
        e->other != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for %d ranks", tp);
    for (int32_t r = 1; r < tp; r++) {
        rank_thread *t = e->other != NULL ? &e->other[e->n_other] : NULL;
        if (st == KVS_OK) {
            *t = (rank_thread){.e = e, .end = end[r], .number = r};
            if (pthread_create(&t->thread, NULL, rank_main, t) == 0) {
                e->n_other++;
                continue;
            }
            st = err_set(err, KVS_NOMEM, "rank %d: its thread did not start", r);
            comm_abort(e->world, "a rank's thread did not start");
        }
        comm_close(end[r]);
    }
    return st;
}

/* What every process must agree on besides what the attention layer compares. */
static kvs_status compare(const kvs_engine *e, kvs_error *err)
{
    char text[6][32];
    snprintf(text[0], sizeof text[0], "%016" PRIx64 "%08" PRIx64, e->w->hash[0],
             e->w->hash[1] >> 32);
    snprintf(text[1], sizeof text[1], "%d", e->s.plan.mtp);
    snprintf(text[2], sizeof text[2], "%d", e->s.plan.chunk);
    snprintf(text[3], sizeof text[3], "%" PRId64, e->s.plan.ctx);
    snprintf(text[4], sizeof text[4], "%d", e->s.plan.seqs);
    snprintf(text[5], sizeof text[5], "%d", e->s.plan.ep);
    const comm_field field[] = {{"model", text[0]}, {"mtp", text[1]},  {"chunk", text[2]},
                                {"ctx", text[3]},   {"seqs", text[4]}, {"ep", text[5]}};
    return comm_handshake(e->world, field, sizeof field / sizeof *field, err);
}

/* ---- opening --------------------------------------------------------------------------------- */

static kvs_status load(kvs_engine *e, const kvs_engine_config *cfg, kvs_error *err)
{
    hp h;
    TRY(hp_read(&h, cfg->model_dir, err));
    const int32_t ranks = cfg->comm != NULL ? comm_size(cfg->comm) : 0;
    TRY(setup_make(&e->s, cfg, &h, ranks, err));
    TRY(setup_check_space(&e->s, ranks > 0 ? 1 : e->s.plan.tp, err));
    return wt_open(&e->w, cfg->model_dir, e->s.plan.mtp > 0, err);
}

/* Dense layers read a prompt by another path than an answer (the multi-head form), equal to tolerance only, so
 * there rows of an answer are not taken for those of a prompt. Sparse layers have one path. */
static kvs_status make_loop(kvs_engine *e, bool no_reuse, kvs_error *err)
{
    const kvs_plan *p = &e->s.plan;
    TRY(queue_init(&e->q, 2 * loop_max_events(p->seqs), err));
    e->l = (loop){.r = &e->r,
                  .h = &e->w->h,
                  .q = &e->q,
                  .dcp = p->dcp,
                  .chunk = p->chunk,
                  .mtp = p->mtp,
                  .max_seqs = p->seqs,
                  .n_page = e->s.fwd.n_page,
                  .no_reuse = no_reuse,
                  .keep_prompt = e->w->h.n_index_head == 0};
    TRY(pages_new(&e->l.pages, e->s.fwd.n_page, err));
    TRY(sample_new(&e->l.sampler, e->w->h.vocab, err));
    if (e->s.fwd.trace != 0) {
        e->ids = mem_alloc_array((size_t)e->w->h.topk + 1, sizeof *e->ids, 0);
        if (e->ids == NULL) {
            return err_set(err, KVS_NOMEM, "no memory for a traced selection");
        }
    }
    return KVS_OK;
}

static kvs_status open_ranks(kvs_engine *e, const kvs_engine_config *cfg, kvs_error *err)
{
    if (cfg->comm == NULL) {
        TRY(start_ranks(e, err));
    } else {
        e->world = cfg->comm;
        comm_set_timeout(e->world, e->s.lim.timeout_ms);
        TRY(compare(e, err));
    }
    return rank_open(&e->r, e->w, &e->s.fwd, &e->s.lim, e->world, err);
}

kvs_status engine_open(kvs_engine **out, const kvs_engine_config *cfg, kvs_error *err)
{
    const int64_t t0 = clock_ns();
    kvs_engine *e = mem_calloc(1, sizeof *e);
    kvs_status st = e != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for an engine");
    if (st == KVS_OK) {
        st = load(e, cfg, err);
    }
    if (st == KVS_OK) {
        st = make_loop(e, cfg->no_reuse != 0, err);
    }
    if (cfg->comm != NULL) {
        st = comm_agree(cfg->comm, st, err);
    }
    if (st == KVS_OK) {
        st = open_ranks(e, cfg, err);
    }
    if (st < 0) {
        engine_close(e);
        return st;
    }
    e->load_s = (double)(clock_ns() - t0) * 1e-9;
    *out = e;
    return KVS_OK;
}

/* ---- closing --------------------------------------------------------------------------------- */

void engine_close(kvs_engine *e)
{
    if (e == NULL) {
        return;
    }
    if (e->r.f != NULL) {
        if (comm_rank(e->world) == 0 && !comm_failed(e->world)) {
            rank_send_end(&e->r, NULL);
        }
        loop_drop(&e->l);
        rank_close(&e->r);
    }
    if (e->owns_world) {
        comm_close(e->world);
    }
    for (int32_t i = 0; i < e->n_other; i++) {
        pthread_join(e->other[i].thread, NULL);
    }
    mem_free(e->other);
    queue_fini(&e->q);
    pages_free(e->l.pages);
    sample_free(e->l.sampler);
    mem_free(e->ids);
    wt_close(e->w);
    mem_free(e);
}

/* ---- what belongs to the whole --------------------------------------------------------------- */

kvs_status engine_follow(kvs_engine *e, kvs_error *err)
{
    if (comm_rank(e->world) == 0) {
        return err_set(err, KVS_INVALID, "rank 0 drives the engine: use kvs_engine_step");
    }
    return rank_follow(&e->r, err);
}

kvs_status engine_submit(kvs_engine *e, const kvs_request *r, uint64_t *id, kvs_error *err)
{
    if (comm_rank(e->world) != 0) {
        return err_set(err, KVS_INVALID,
                       "rank %d: requests are given to rank 0; use kvs_engine_follow",
                       (int)comm_rank(e->world));
    }
    seq *s = NULL;
    TRY(seq_new(&s, r, &e->w->h, e->s.plan.ctx, e->s.plan.dcp, err));
    const kvs_status st = queue_submit(&e->q, s, id, err);
    if (st < 0) {
        seq_free(s);
    }
    return st;
}

int32_t engine_selection(const kvs_engine *e, int32_t layer, int32_t row, int32_t *ids, int32_t cap)
{
    if (e->ids == NULL || layer < 0 || layer >= e->w->h.n_layer || row < 0) {
        return -1;
    }
    const int32_t n = fwd_selection(e->r.f, layer, row, e->ids);
    for (int32_t i = 0; i < n && i < cap; i++) {
        ids[i] = e->ids[i];
    }
    return n;
}

static void copy_text(char *dst, size_t cap, const char *src)
{
    snprintf(dst, cap, "%s", src != NULL ? src : "");
}

/* kvspan/chat.h knows the forms by these names. */
static const char *chat_name(hp_family f)
{
    switch (f) {
    case HP_V2:
        return "v2";
    case HP_V3:
        return "v3";
    case HP_V31:
        return "v3.1";
    case HP_V32:
        return "v3.2";
    case HP_GLM5:
        return "glm-5";
    case HP_GLM52:
        return "glm-5.2";
    case HP_KIMI:
    case HP_GLM4_LITE:
        break;
    }
    return "none";
}

static void stats_of_cache(const kvs_engine *e, const fwd_info *i, kvs_engine_stats *s)
{
    const int64_t n = e->s.fwd.n_page;
    const int64_t peak = e->l.n.page_peak;
    s->n_page = n;
    s->n_page_peak = peak;
    s->cache_latent = i->cache_latent / n * peak;
    s->cache_index = i->cache_index / n * peak;
    s->cache_draft = i->cache_draft / n * peak;
    s->pool = i->cache_latent + i->cache_index + i->cache_draft;
    s->workspace = i->workspace + rank_bytes(&e->s.lim, e->w->h.hidden, e->w->h.vocab);
    s->weights = e->w->bytes_stored + e->w->bytes_owned;
}

void engine_get_stats(const kvs_engine *e, kvs_engine_stats *s)
{
    const kvs_plan *p = &e->s.plan;
    const hp *h = &e->w->h;
    const loop_counts *n = &e->l.n;
    fwd_info i;
    fwd_get_info(e->r.f, &i);
    *s = kvs_engine_stats_empty();
    copy_text(s->model, sizeof s->model, h->name);
    copy_text(s->transport, sizeof s->transport, i.transport);
    copy_text(s->kernels, sizeof s->kernels, i.kernels);
    s->tp = p->tp;
    s->dcp = p->dcp;
    s->interleave = p->interleave;
    s->ep = p->ep;
    s->threads = e->s.fwd.threads;
    s->rank = i.rank;
    s->chunk = p->chunk;
    s->mtp = p->mtp;
    s->max_seqs = p->seqs;
    s->ctx = p->ctx;
    s->kv = i.kv;
    s->index_kv = i.index_kv;
    s->exchange = i.exchange;
    s->vocab = h->vocab;
    s->n_layer = h->n_layer;
    s->topk = h->n_index_head > 0 ? h->topk : 0;
    copy_text(s->chat, sizeof s->chat, chat_name(h->family));
    s->n_eos = h->n_eos;
    memcpy(s->eos, h->eos, sizeof s->eos);
    s->load_s = e->load_s;
    stats_of_cache(e, &i, s);
    s->prefill_s = (double)n->prefill_ns * 1e-9;
    s->decode_s = (double)n->decode_ns * 1e-9;
    s->n_prefill = n->n_prefill;
    s->n_reused = n->n_reused;
    s->n_output = n->n_output;
    s->n_decode = n->n_decode;
    s->n_verify = n->n_verify;
    memcpy(s->n_draft, n->n_draft, sizeof s->n_draft);
    memcpy(s->n_accept, n->n_accept, sizeof s->n_accept);
}
