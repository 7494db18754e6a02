/* What a plan says that a model takes, against what an opened one has taken, to the byte: tiny models rank by
 * rank, the models of models/ as whole engines, and what the allocator counts for both. */
#include "unit/unit.h"

#include <pthread.h>

#include "base/mem.h"
#include "base/pool.h"
#include "engine/engine.h"
#include "engine/plan.h"
#include "unit/model/tiny.h"

static const char *k_random, *k_needle;

/* What is in no plan. Of a rank: its handles and workers. Of an engine: the list of tensors, events, pages, a
 * sampler; the communicator of each rank, and what opening sends through it. */
enum { HANDLES = 48 << 10, ENGINE = 2 << 20, COMM = 192 << 10, OPENING = 4 << 10, MAX_TP = 8 };

typedef struct setting {
    int32_t tp, dcp, interleave, ep, threads, chunk, seqs, mtp;
    int64_t ctx;
    kvs_kv_format kv;
    kvs_index_format index;
    int32_t trace, last;
} setting;

static kvs_plan_config config_of(const setting *s)
{
    kvs_plan_config c = kvs_plan_config_default();
    c.gpus = s->tp;
    c.mem_bytes = INT64_C(1) << 50;
    c.tp = s->tp;
    c.dcp = s->dcp;
    c.ep = s->ep;
    c.interleave = s->interleave;
    c.kv = s->kv;
    c.index_kv = s->index;
    c.ctx = s->ctx;
    c.seqs = s->seqs;
    c.mtp = s->mtp;
    c.chunk = s->chunk;
    c.threads = s->threads;
    return c;
}

/* ---- ranks of tiny models -------------------------------------------------------------------- */

typedef struct one {
    const wt *w;
    const fwd_config *c;
    const rank_limits *l;
    comm *end;
    pthread_barrier_t *all;
    int64_t workspace, own, cache; /* of this rank */
    kvs_status st;
    kvs_error err;
} one;

static int64_t size(const void *p)
{
    return p != NULL ? (int64_t)mem_size(p) : 0;
}

static void *open_rank(void *arg)
{
    one *o = arg;
    rank r;
    o->st = rank_open(&r, o->w, o->c, o->l, o->end, &o->err);
    if (o->st == KVS_OK) {
        fwd_info i;
        fwd_get_info(r.f, &i);
        o->workspace = i.workspace;
        o->cache = i.cache_latent + i.cache_index + i.cache_draft;
        o->own = size(r.block) + size(r.pack) + size(r.logits) + size(r.draft_logits) +
                 size(r.pend) + size(r.chain) + size(r.hid) + size(r.keep_row);
    }
    pthread_barrier_wait(o->all); /* every rank has opened */
    pthread_barrier_wait(o->all); /* what lives has been read */
    if (o->st == KVS_OK) {
        rank_close(&r);
    }
    return NULL;
}

/* Returns how much the ranks' workspaces differ. */
static int64_t ranks_take_what_is_planned(const wt *w, const setting *s)
{
    const kvs_plan_config pc = config_of(s);
    const fwd_config like = {.trace = s->trace, .selection_last = s->last};
    kvs_plan p = kvs_plan_empty();
    kvs_error err = {0};
    if (plan_make(&p, &w->h, &pc, &like, &err) < 0 || p.n_refusal > 0) {
        fail_msg("%s: %s%s", w->h.name, err.text, p.n_refusal > 0 ? p.refusal[0].why : "");
    }
    const fwd_config c = plan_fwd_config(&p, &like);
    rank_limits l = plan_limits(&p);
    l.timeout_ms = 30000;
    const comm_config cc = {.timeout_ms = 30000};
    comm *end[MAX_TP] = {NULL};
    pthread_t thread[MAX_TP];
    one o[MAX_TP];
    pthread_barrier_t all;
    pthread_barrier_init(&all, NULL, (unsigned)s->tp + 1);
    assert_int_equal(s->tp == 1 ? comm_self_open(&end[0], &cc, NULL)
                                : comm_thread_open(end, s->tp, &cc, NULL),
                     KVS_OK);
    const int64_t before = mem_stats_get().live_bytes;
    for (int32_t i = 0; i < s->tp; i++) {
        o[i] = (one){.w = w, .c = &c, .l = &l, .end = end[i], .all = &all};
        assert_int_equal(pthread_create(&thread[i], NULL, open_rank, &o[i]), 0);
    }
    pthread_barrier_wait(&all);
    const int64_t lives = mem_stats_get().live_bytes - before;
    pthread_barrier_wait(&all);
    int64_t most = 0;
    int64_t least = INT64_MAX;
    int64_t sum = 0;
    for (int32_t i = 0; i < s->tp; i++) {
        pthread_join(thread[i], NULL);
        if (o[i].st < 0) {
            fail_msg("%s: rank %d: %s", w->h.name, i, o[i].err.text);
        }
        const int64_t n = o[i].workspace + o[i].own;
        most = n > most ? n : most;
        least = n < least ? n : least;
        sum += n;
        assert_int_equal(o[i].cache, p.pool_bytes);
        comm_close(end[i]);
    }
    pthread_barrier_destroy(&all);
    assert_int_equal(most, p.workspace_bytes);
    assert_int_equal(sum, p.process_workspace);
    assert_int_equal(p.process_cache, s->tp * p.pool_bytes);
    const int64_t rest = lives - p.process_workspace - p.process_cache;
    if (rest < 0 || rest > s->tp * HANDLES) {
        fail_msg("%s: %lld bytes live, %lld of them in no plan", w->h.name, (long long)lives,
                 (long long)rest);
    }
    return most - least;
}

static void tiny_models_take_what_is_planned(void **state)
{
    (void)state;
    static const setting with_index[] = {
        {1, 1, 1, 0, 1, 64, 1, 0, 1000, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0},
        {1, 1, 1, 0, 3, 300, 3, 3, 2000, KVS_KV_BF16, KVS_INDEX_AUTO, 1, 0},
        {2, 2, 4, 1, 2, 17, 5, 7, 65, KVS_KV_F32, KVS_INDEX_F32, 0, 0},
        {8, 4, 1, 4, 1, 128, 2, 0, 4096, KVS_KV_F32, KVS_INDEX_FP8, 0, 1},
        {4, 1, 1, 2, 2, 33, 1, 1, 700, KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 1, 1},
    };
    static const setting dense[] = {
        {1, 1, 1, 0, 2, 64, 1, 0, 1000, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0},
        {4, 4, 16, 2, 1, 200, 3, 0, 4000, KVS_KV_FP8, KVS_INDEX_AUTO, 0, 0},
        {8, 2, 1, 0, 1, 5, 9, 0, 100, KVS_KV_F32, KVS_INDEX_AUTO, 0, 0},
    };
    for (tiny_kind kind = TINY_GLM52; kind <= TINY_V2; kind++) {
        const tiny_spec spec = {
            .kind = kind, .type = kind == TINY_V32 ? GEMM_F32 : GEMM_FP8, .seed = 3};
        wt *w = tiny_new(&spec);
        const bool index = kind == TINY_GLM52 || kind == TINY_V32;
        const size_t n = index ? UNIT_COUNT(with_index) : UNIT_COUNT(dense);
        for (size_t i = 0; i < n; i++) {
            setting s = index ? with_index[i] : dense[i];
            s.mtp = kind == TINY_V3 ? (int32_t)(2 * i) : s.mtp;
            /* as when a folder is opened without its draft layers */
            gemm_mat *eh = w->h.n_mtp > 0 ? &w->layer[w->h.n_layer].eh : NULL;
            const int32_t n_out = eh != NULL ? eh->n_out : 0;
            if (eh != NULL && s.mtp == 0) {
                eh->n_out = 0;
            }
            ranks_take_what_is_planned(w, &s);
            if (eh != NULL) {
                eh->n_out = n_out;
            }
        }
        tiny_free(w);
    }
}

/* Blocks of 128 columns do not divide evenly: the last rank works on more of them than the first. */
static void the_fullest_rank_is_planned_for(void **state)
{
    (void)state;
    const tiny_spec spec = {.kind = TINY_GLM52, .type = GEMM_BF16, .seed = 4};
    wt *w = tiny_new(&spec);
    w->h.inter = 161 * 128 - 8;
    const setting s = {8, 8, 1, 0, 1, 128, 1, 0, 300, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0};
    gemm_mat *eh = &w->layer[w->h.n_layer].eh;
    const int32_t n_out = eh->n_out;
    eh->n_out = 0;
    const int64_t spread = ranks_take_what_is_planned(w, &s);
    /* gate, up and their product in f32, and a little scratch */
    assert_in_range(spread, 128 * 120 * 3 * 4, 128 * 120 * 3 * 4 + 4096);
    eh->n_out = n_out;
    tiny_free(w);
}

/* ---- engines --------------------------------------------------------------------------------- */

/* A prompt of n tokens and a token of an answer. */
static void answer_one(kvs_engine *e, int32_t n)
{
    int32_t *prompt = calloc((size_t)n, sizeof *prompt);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = n;
    r.max_new = 1;
    uint64_t id = 0;
    kvs_error err = {0};
    assert_int_equal(kvs_engine_submit(e, &r, &id, &err), KVS_OK);
    free(prompt);
    kvs_event ev[8];
    while (kvs_engine_step(e, &err) == KVS_OK) {
        while (kvs_engine_poll(e, ev, 8) > 0) {
        }
    }
    while (kvs_engine_poll(e, ev, 8) > 0) {
    }
}

/* full: with a prompt that makes the ranks' messages as large as they get. */
static void engine_takes_what_is_planned(const char *dir, const setting *s, bool full)
{
    kvs_plan_config pc = config_of(s);
    pc.model_dir = dir;
    kvs_plan p = kvs_plan_empty();
    kvs_error err = {0};
    if (kvs_plan_make(&p, &pc, &err) < 0 || p.n_refusal > 0) {
        fail_msg("%s: %s%s", dir, err.text, p.n_refusal > 0 ? p.refusal[0].why : "");
    }
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = dir;
    c.tp = s->tp;
    c.dcp = s->dcp;
    c.interleave = s->interleave;
    c.ep = s->ep;
    c.threads = s->threads;
    c.chunk = s->chunk;
    c.max_seqs = s->seqs;
    c.mtp = s->mtp;
    c.ctx = s->ctx;
    c.kv = s->kv;
    c.index_kv = s->index;
    c.no_reuse = 1; /* what a kept sequence remembers of itself is in no plan */
    const int64_t before = mem_stats_get().live_bytes;
    kvs_engine *e = NULL;
    if (kvs_engine_open(&e, &c, &err) < 0) {
        fail_msg("%s: %s", dir, err.text);
    }
    const int64_t opened = mem_stats_get().live_bytes - before;
    if (full && s->tp > 1) {
        answer_one(e, p.chunk > p.n_row ? p.chunk : p.n_row);
    }
    const int64_t lives = mem_stats_get().live_bytes - before;
    kvs_engine_stats st = kvs_engine_stats_empty();
    kvs_engine_get_stats(e, &st);
    const int64_t owned = e->w->bytes_owned;
    kvs_engine_close(e);
    assert_int_equal(mem_stats_get().live_bytes, before);

    const int32_t share = pool_cores() / s->tp;
    assert_int_equal(p.threads, s->threads > 0 ? s->threads : share > 0 ? share : 1);
    assert_int_equal(st.threads, p.threads);
    assert_int_equal(st.weights, p.process_weights);
    assert_int_equal(st.pool, p.pool_bytes);
    assert_true(st.workspace <= p.workspace_bytes);
    if (s->tp == 1) {
        assert_int_equal(st.workspace, p.workspace_bytes);
        assert_int_equal(st.workspace, p.process_workspace);
        assert_int_equal(p.weight_bytes + p.weight_mtp + p.weight_copies, p.process_weights);
        assert_int_equal(owned, p.weight_copies);
    }
    assert_int_equal(p.process_bytes, p.process_weights + p.process_workspace +
                                          p.process_messages + p.process_cache);
    const int64_t rest = opened - owned - p.process_workspace - p.process_cache;
    if (rest < 0 || rest > ENGINE + s->tp * (COMM + HANDLES)) {
        fail_msg("%s: %lld bytes live, %lld of them in no plan", dir, (long long)opened,
                 (long long)rest);
    }
    /* what opening has sent is small and was counted with it */
    if (full) {
        const int64_t sent = p.process_messages - (s->tp > 1 ? s->tp * OPENING : 0);
        assert_in_range(lives - opened, sent, p.process_messages);
    }
}

static void engines_take_what_is_planned(void **state)
{
    (void)state;
    static const setting cell[] = {
        {1, 1, 1, 0, 0, 0, 1, 0, 0, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0},
        {1, 1, 1, 0, 2, 100, 2, 3, 1000, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0},
        {2, 2, 1, 0, 1, 128, 1, 1, 2000, KVS_KV_BF16, KVS_INDEX_F32, 0, 0},
        {4, 2, 8, 2, 1, 96, 4, 7, 500, KVS_KV_F32, KVS_INDEX_AUTO, 0, 0},
        {8, 8, 1, 1, 1, 40, 1, 0, 2560, KVS_KV_F32, KVS_INDEX_FP8, 0, 0},
        {8, 8, 1, 0, 1, 48, 1, 2, 2559, KVS_KV_AUTO, KVS_INDEX_AUTO, 0, 0},
    };
    for (size_t i = 0; i < UNIT_COUNT(cell); i++) {
        engine_takes_what_is_planned(k_random, &cell[i], true);
        if (i % 2 == 1) {
            engine_takes_what_is_planned(k_needle, &cell[i], false);
        }
    }
}

/* ---- the bundled models ---------------------------------------------------------------------- */

static void presets_are_the_models_that_come_along(void **state)
{
    (void)state;
    const char *const dir[] = {k_random, k_needle};
    for (size_t i = 0; i < UNIT_COUNT(dir); i++) {
        hp read;
        hp preset;
        assert_int_equal(hp_read(&read, dir[i], NULL), KVS_OK);
        assert_int_equal(hp_find(&preset, read.name, NULL), KVS_OK);
        memset(read.config_hash, 0, sizeof read.config_hash);
        const unsigned char *a = (const unsigned char *)&read;
        const unsigned char *b = (const unsigned char *)&preset;
        for (size_t k = 0; k < sizeof read; k++) {
            if (a[k] != b[k]) {
                fail_msg("%s: byte %zu of its hp is not the preset's", read.name, k);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    k_random = argv[1];
    k_needle = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_are_the_models_that_come_along),
        cmocka_unit_test(tiny_models_take_what_is_planned),
        cmocka_unit_test(the_fullest_rank_is_planned_for),
        cmocka_unit_test(engines_take_what_is_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
