#include "world.h"

#include "base/rng.h"

world_cfg world_default(void)
{
    return (world_cfg){.tp = 1,
                       .dcp = 1,
                       .chunk = 64,
                       .max_seqs = 1,
                       .vocab = 29,
                       .ctx = 600,
                       .n_eos = 1,
                       .eos = {28}};
}

typedef struct start {
    world *w;
    int32_t rank;
} start;

static fwd_config fwd_cfg(const world_cfg *c, int64_t n_page)
{
    const int32_t verify = c->max_seqs * (1 + c->mtp);
    return (fwd_config){.dcp = c->dcp,
                        .interleave = 1,
                        .max_rows = c->chunk > verify ? c->chunk : verify,
                        .max_reqs = c->max_seqs,
                        .max_logits = verify,
                        .max_len = c->ctx,
                        .n_page = n_page,
                        .trace = 1};
}

static void open_rank(world *w, int32_t r)
{
    const world_cfg *c = &w->c;
    const fwd_config f = fwd_cfg(c, w->l.n_page);
    const rank_limits lim = {.max_reqs = f.max_reqs,
                             .max_rows = f.max_rows,
                             .max_logits = f.max_logits,
                             .width = kvs_table_width(c->dcp, c->ctx),
                             .mtp = c->mtp,
                             .timeout_ms = 20000};
    w->followed[r] = rank_open(&w->r[r], &w->w, &f, &lim, w->end[r], &w->err[r]);
}

static void *follow(void *arg)
{
    start *s = arg;
    world *w = s->w;
    const int32_t r = s->rank;
    free(s);
    open_rank(w, r);
    if (w->followed[r] == KVS_OK) {
        w->followed[r] = rank_follow(&w->r[r], &w->err[r]);
        rank_close(&w->r[r]);
    }
    comm_close(w->end[r]);
    return NULL;
}

void world_open(world *w, world_cfg c)
{
    *w = (world){.c = c};
    fake_weights(&w->w, c.vocab, c.mtp > 0, c.share);
    w->w.h.n_eos = c.n_eos;
    memcpy(w->w.h.eos, c.eos, sizeof c.eos);
    w->l = (loop){.r = &w->r[0],
                  .h = &w->w.h,
                  .q = &w->q,
                  .dcp = c.dcp,
                  .chunk = c.chunk,
                  .mtp = c.mtp,
                  .max_seqs = c.max_seqs,
                  .no_reuse = c.no_reuse,
                  .keep_prompt = c.keep_prompt};
    w->l.n_page = c.n_page > 0 ? c.n_page : c.max_seqs * kvs_table_width(c.dcp, c.ctx);
    kvs_error err = {0};
    const comm_config cc = {.timeout_ms = 20000};
    assert_int_equal(comm_thread_open(w->end, c.tp, &cc, &err), KVS_OK);
    assert_int_equal(queue_init(&w->q, 2 * loop_max_events(c.max_seqs), &err), KVS_OK);
    assert_int_equal(kvs_pages_new(&w->l.pages, w->l.n_page, &err), KVS_OK);
    assert_int_equal(sample_new(&w->l.sampler, c.vocab, &err), KVS_OK);
    for (int32_t r = 1; r < c.tp; r++) {
        start *s = malloc(sizeof *s);
        *s = (start){w, r};
        assert_int_equal(pthread_create(&w->thread[r], NULL, follow, s), 0);
    }
    open_rank(w, 0);
    assert_int_equal(w->followed[0], KVS_OK);
}

void world_close(world *w)
{
    rank_send_end(&w->r[0], NULL);
    rank_close(&w->r[0]);
    loop_drop(&w->l);
    assert_int_equal(kvs_pages_available(w->l.pages), w->l.n_page);
    comm_close(w->end[0]);
    for (int32_t r = 1; r < w->c.tp; r++) {
        pthread_join(w->thread[r], NULL);
    }
    queue_fini(&w->q);
    kvs_pages_free(w->l.pages);
    sample_free(w->l.sampler);
}

uint64_t world_submit(world *w, const kvs_request *r)
{
    seq *s = NULL;
    kvs_error err = {0};
    if (seq_new(&s, r, &w->w.h, w->c.ctx, w->c.dcp, &err) < 0) {
        fail_msg("%s", err.text);
    }
    uint64_t id = 0;
    assert_int_equal(queue_submit(&w->q, s, &id, &err), KVS_OK);
    return id;
}

static void take(answer *a, const kvs_event *e)
{
    assert_int_equal(a->end, 0); /* nothing follows the last event */
    if (e->kind == KVS_EVENT_PREFILL) {
        assert_true(a->n_progress == 0 ? e->done == e->reused : e->done > a->done);
        a->done = e->done;
        a->total = e->total;
        a->reused = e->reused;
        a->n_progress++;
    } else if (e->kind == KVS_EVENT_TOKEN) {
        assert_true(a->n < WORLD_OUT);
        assert_int_equal(e->position, a->total + a->n);
        a->token[a->n++] = e->token;
        a->digest = e->digest;
    } else {
        a->end = e->kind == KVS_EVENT_FINISH ? (int32_t)e->reason : -1;
        a->error = e->error;
    }
}

void world_poll(world *w, answer *answers, int32_t n)
{
    kvs_event e[7];
    for (int32_t k = 0; (k = queue_poll(&w->q, e, 7)) > 0;) {
        for (int32_t i = 0; i < k; i++) {
            assert_in_range(e[i].request, 1, n);
            take(&answers[e[i].request - 1], &e[i]);
        }
    }
}

kvs_status world_run(world *w, answer *answers, int32_t n, kvs_error *err)
{
    for (int32_t turn = 0;; turn++) {
        assert_true(turn < 100000);
        const kvs_status st = loop_step(&w->l, err);
        world_poll(w, answers, n);
        if (st != KVS_OK) {
            return st;
        }
    }
}

answer world_answer(world_cfg c, const kvs_request *r)
{
    static world w;
    static answer a;
    world_open(&w, c);
    a = (answer){0};
    world_submit(&w, r);
    kvs_error err = {0};
    if (world_run(&w, &a, 1, &err) < 0) {
        fail_msg("%s", err.text);
    }
    world_close(&w);
    return a;
}

void world_prompt(int32_t *token, int64_t n, int32_t vocab, uint64_t which)
{
    for (int64_t i = 0; i < n; i++) {
        token[i] = (int32_t)rng_below(5, which, (uint64_t)i, (uint64_t)vocab);
    }
}
