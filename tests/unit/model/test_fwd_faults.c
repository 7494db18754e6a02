/* What a forward pass refuses, what it must not depend on, and what must show when it is wrong: settings,
 * steps with a fault, kept selections, the layout of drafts, memory. */
#include "unit/unit.h"

#include <math.h>
#include <pthread.h>

#include "tiny.h"

#include "base/mem.h"
#include "comm/comm.h"
#include "kvspan/log.h"
#include "model/fwd_impl.h"

static wt *glm(uint64_t seed)
{
    const tiny_spec spec = {.kind = TINY_GLM52, .type = GEMM_BF16, .seed = seed};
    return tiny_new(&spec);
}

/* ---- settings -------------------------------------------------------------------------------- */

static fwd_config config(void)
{
    return (fwd_config){.dcp = 1,
                        .interleave = 1,
                        .threads = 1,
                        .max_rows = 40,
                        .max_reqs = 2,
                        .max_logits = 40,
                        .max_len = 256,
                        .n_page = 8};
}

static void expect_refused(const wt *w, const fwd_config *c, kvs_status want, const char *word)
{
    const comm_config cc = {.timeout_ms = 10000};
    kvs_comm *self = NULL;
    kvs_error err;
    fwd *f = NULL;
    memset(&err, 0, sizeof err);
    assert_int_equal(comm_self_open(&self, &cc, NULL), KVS_OK);
    const kvs_status st = fwd_open(&f, w, c, self, &err);
    if (st != want || f != NULL || strstr(err.text, word) == NULL) {
        fail_msg("status %d, not %d, or \"%s\" does not name %s", st, want, err.text, word);
    }
    comm_close(self);
}

static void settings_that_do_not_work_are_named(void **state)
{
    (void)state;
    const tiny_spec dense = {.kind = TINY_V3, .type = GEMM_BF16, .seed = 1};
    wt *w = glm(1);
    wt *v3 = tiny_new(&dense);
    fwd_config c = config();
    c.hadamard = 1;
    expect_refused(v3, &c, KVS_INVALID, "hadamard");
    c.kv = KVS_KV_F32;
    expect_refused(w, &c, KVS_INVALID, "hadamard");
    c = config();
    c.trace = 1;
    expect_refused(v3, &c, KVS_INVALID, "trace");
    c = config();
    c.ep = 2;
    expect_refused(w, &c, KVS_INVALID, "ep 2");
    c = config();
    c.max_logits = 41;
    expect_refused(w, &c, KVS_INVALID, "max_logits 41");
    c = config();
    c.max_rows = 0;
    expect_refused(w, &c, KVS_INVALID, "max_rows 0");
    c = config();
    c.latent_eps = NAN;
    expect_refused(w, &c, KVS_INVALID, "latent_eps");
    c = config();
    c.dcp = 2;
    expect_refused(w, &c, KVS_INVALID, "dcp");
    c = config();
    c.n_page = 0;
    expect_refused(w, &c, KVS_INVALID, "n_page");
    c = config();
    c.kernels = "gemm=none";
    expect_refused(w, &c, KVS_INVALID, "gemm");
    w->h.kv_lora = 256;
    c = config();
    expect_refused(w, &c, KVS_UNSUPPORTED, "kv_lora");
    tiny_free(w);
    tiny_free(v3);
}

/* A rank with other settings ends the opening on all. */
typedef struct opener {
    const wt *w;
    fwd_config c;
    kvs_comm *comm;
    kvs_status status;
    kvs_error error;
} opener;

static void *open_rank(void *arg)
{
    opener *o = arg;
    fwd *f = NULL;
    o->status = fwd_open(&f, o->w, &o->c, o->comm, &o->error);
    fwd_close(f);
    return NULL;
}

static void ranks_that_differ_do_not_open(void **state)
{
    (void)state;
    wt *w = glm(1);
    for (int32_t what = 0; what < 5; what++) {
        kvs_comm *group[2];
        const comm_config cc = {.timeout_ms = 20000};
        assert_int_equal(comm_thread_open(group, 2, &cc, NULL), KVS_OK);
        opener o[2];
        pthread_t t;
        for (int32_t r = 0; r < 2; r++) {
            o[r] = (opener){.w = w, .c = config(), .comm = group[r]};
        }
        switch (what) {
        case 0:
            o[1].c.hadamard = 1;
            break;
        case 1:
            o[1].c.latent_eps = 1e-3f;
            break;
        case 2:
            o[1].c.n_page = 9;
            break;
        case 3:
            o[1].c.max_logits = 3;
            break;
        default:
            o[1].c.selection_last = 1;
            break;
        }
        assert_int_equal(pthread_create(&t, NULL, open_rank, &o[1]), 0);
        open_rank(&o[0]);
        pthread_join(t, NULL);
        for (int32_t r = 0; r < 2; r++) {
            assert_int_equal(o[r].status, KVS_INVALID);
            assert_non_null(strstr(o[r].error.text, "model_tag"));
            comm_close(group[r]);
        }
    }
    tiny_free(w);
}

/* ---- steps with a fault ---------------------------------------------------------------------- */

#define WANT(expr, status)                                                                               \
    if ((expr) != (status)) {                                                                            \
        return #expr;                                                                                    \
    }

/* Every call here is refused before any work; b is the batch of a step that comes. */
static const char *faulty_calls(fwd *f, const kvs_batch *b)
{
    enum { MOST = 2000 };
    static _Thread_local int32_t token[MOST];
    static _Thread_local float logits[2 * TINY_VOCAB];
    static _Thread_local float hidden[MOST * TINY_HIDDEN];
    int32_t table[64];
    int32_t q_len[TINY_MAX_SEQ];
    const int32_t row[2] = {1, 0};
    const int32_t first[1] = {0};
    int32_t far[1] = {MOST};
    for (int32_t i = 0; i < MOST; i++) {
        token[i] = 1;
    }
    token[0] = -1;
    WANT(fwd_step(f, b, NULL, token, first, 1, logits, NULL), KVS_INVALID)
    WANT(fwd_draft(f, 0, b, NULL, token, hidden, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    token[0] = TINY_VOCAB;
    WANT(fwd_step(f, b, NULL, token, first, 1, logits, NULL), KVS_INVALID)
    token[0] = 1;
    WANT(fwd_step(f, b, NULL, NULL, first, 1, logits, NULL), KVS_INVALID)
    WANT(fwd_step(f, b, NULL, token, row, 2, logits, NULL), KVS_INVALID)
    WANT(fwd_step(f, b, NULL, token, far, 1, logits, NULL), KVS_INVALID)
    WANT(fwd_step(f, b, NULL, token, first, 1, NULL, NULL), KVS_INVALID)
    WANT(fwd_step(f, b, NULL, token, first, -1, logits, NULL), KVS_LIMIT)
    memcpy(q_len, b->q_len, (size_t)b->n_req * sizeof *q_len);
    q_len[0]++; /* more prompt rows than rows */
    WANT(fwd_step(f, b, q_len, token, first, 1, logits, NULL), KVS_INVALID)
    WANT(fwd_draft(f, 0, b, q_len, token, hidden, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    q_len[0] = -1;
    WANT(fwd_step(f, b, q_len, token, first, 1, logits, NULL), KVS_INVALID)
    WANT(fwd_step(f, b, NULL, token, first, f->cfg.max_logits + 1, logits, NULL), KVS_LIMIT)
    WANT(fwd_draft(f, 1, b, NULL, token, hidden, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    WANT(fwd_draft(f, -1, b, NULL, token, hidden, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    WANT(fwd_draft(f, 0, b, NULL, token, NULL, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    WANT(fwd_draft(f, 0, b, NULL, token, hidden, 2, first, 1, logits, NULL, NULL), KVS_INVALID)
    WANT(fwd_draft(f, 0, b, NULL, token, hidden, 1, first, 1, logits, NULL, NULL), KVS_INVALID)
    kvs_batch bad = *b;
    bad.n_req = f->cfg.max_reqs + 1;
    WANT(fwd_step(f, &bad, NULL, token, first, 1, logits, NULL), KVS_LIMIT)
    bad = *b;
    memcpy(q_len, b->q_len, (size_t)b->n_req * sizeof *q_len);
    bad.q_len = q_len;
    q_len[0] = -1;
    WANT(fwd_step(f, &bad, NULL, token, first, 1, logits, NULL), KVS_INVALID)
    q_len[0] = 1 << 30;
    WANT(fwd_step(f, &bad, NULL, token, first, 1, logits, NULL), KVS_INVALID)
    bad = *b;
    memcpy(table, b->table, (size_t)(b->n_req * b->table_stride) * sizeof *table);
    bad.table = table;
    table[0] = (int32_t)b->n_page;
    WANT(fwd_step(f, &bad, NULL, token, first, 1, logits, NULL), KVS_INVALID)
    table[0] = -1;
    WANT(fwd_draft(f, 0, &bad, NULL, token, hidden, 0, first, 1, logits, NULL, NULL), KVS_INVALID)
    return NULL;
}

static void refused_steps_change_nothing(void **state)
{
    (void)state;
    wt *w = glm(2);
    tiny_run r = tiny_default();
    r.tp = 2;
    r.dcp = 2;
    r.cut = 60;
    r.draft = 1;
    r.trace = 1;
    tiny_result clean;
    tiny_result got;
    tiny_execute(w, &r, &clean);
    r.between = faulty_calls;
    tiny_execute(w, &r, &got);
    tiny_same(&r, &clean, &got, "refused steps between");
    tiny_result_free(&clean);
    tiny_result_free(&got);
    tiny_free(w);
}

static const char *keep_too_early(fwd *f, const kvs_batch *b)
{
    (void)b;
    const int32_t row = 0;
    WANT(fwd_draft_keep(f, &row, 1, NULL), KVS_INVALID)
    return NULL;
}

static const char *keep_wrong_rows(fwd *f)
{
    const int32_t row = 0;
    const int32_t far = 1 << 20;
    WANT(fwd_draft_keep(f, &row, 1, NULL), KVS_OK)
    WANT(fwd_draft_keep(f, &far, 1, NULL), KVS_INVALID)
    WANT(fwd_draft_keep(f, &row, f->cfg.max_reqs + 1, NULL), KVS_LIMIT)
    WANT(fwd_selection(f, 0, 0, f->b.last), -1)
    return NULL;
}

static void selections_are_kept_of_a_draft_alone(void **state)
{
    (void)state;
    wt *w = glm(2);
    tiny_run r = tiny_default();
    tiny_result got;
    r.len[0] = 30;
    r.between = keep_too_early;
    tiny_execute(w, &r, &got);
    tiny_result_free(&got);
    r.between = NULL;
    r.draft = 1;
    r.at_end = keep_wrong_rows;
    tiny_execute(w, &r, &got);
    tiny_result_free(&got);
    tiny_free(w);
}

/* One rank's work fails: it says why, and the other is told instead of waiting. */
typedef struct failing {
    const wt *w;
    kvs_comm *comm;
    kvs_status status[2];
    kvs_error error;
} failing;

static void *fail_rank(void *arg)
{
    enum { ROWS = 10 };
    failing *x = arg;
    fwd *f = NULL;
    const fwd_config c = config();
    x->status[0] = fwd_open(&f, x->w, &c, x->comm, &x->error);
    if (x->status[0] < 0) {
        return NULL;
    }
    const int32_t q_len = ROWS;
    const int32_t table[4] = {0, 1, 2, 3};
    int32_t token[ROWS];
    for (int32_t i = 0; i < ROWS; i++) {
        token[i] = i;
    }
    const int64_t seq_len = ROWS;
    const kvs_batch b = {.n_req = 1, .q_len = &q_len, .seq_len = &seq_len, .table = table,
                         .table_stride = 4, .n_page = 8};
    if (comm_rank(x->comm) == 1) {
        dev_queue_fail(&f->d->queue, KVS_DEVICE, "the device is gone");
    }
    x->status[0] = fwd_step(f, &b, NULL, token, NULL, 0, NULL, &x->error);
    x->status[1] = fwd_step(f, &b, NULL, token, NULL, 0, NULL, x->status[0] < 0 ? NULL : &x->error);
    fwd_close(f);
    return NULL;
}

static void a_rank_that_fails_alone_ends_the_group(void **state)
{
    (void)state;
    wt *w = glm(3);
    kvs_comm *group[2];
    const comm_config cc = {.timeout_ms = 20000};
    assert_int_equal(comm_thread_open(group, 2, &cc, NULL), KVS_OK);
    failing x[2] = {{.w = w, .comm = group[0]}, {.w = w, .comm = group[1]}};
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, fail_rank, &x[1]), 0);
    fail_rank(&x[0]);
    pthread_join(t, NULL);
    assert_int_equal(x[1].status[0], KVS_DEVICE);
    assert_non_null(strstr(x[1].error.text, "the device is gone"));
    assert_int_equal(x[1].status[1], KVS_PEER);
    assert_int_equal(x[0].status[1], KVS_PEER);
    assert_non_null(strstr(x[0].error.text, "the device is gone"));
    comm_close(group[0]);
    comm_close(group[1]);
    tiny_free(w);
}

/* ---- what must show -------------------------------------------------------------------------- */

static int differ(const tiny_run *r, const float *a, const float *b)
{
    for (int32_t i = 0; i < r->n_seq; i++) {
        const int64_t at = i * (int64_t)TINY_MAX_LEN * TINY_VOCAB;
        if (memcmp(a + at, b + at, (size_t)r->len[i] * TINY_VOCAB * sizeof *a) != 0) {
            return 1;
        }
    }
    return 0;
}

static void rotated_keys_are_other_bits(void **state)
{
    (void)state;
    wt *w = glm(4);
    tiny_run r = tiny_default();
    r.trace = 1;
    tiny_result plain;
    tiny_result rotated;
    tiny_execute(w, &r, &plain);
    r.hadamard = 1;
    tiny_execute(w, &r, &rotated);
    assert_true(differ(&r, plain.logits, rotated.logits));
    /* and little else: most rows select the same keys */
    const int64_t n = 4 * (int64_t)TINY_MAX_SEQ * TINY_MAX_LEN * TINY_TOPK;
    int64_t other = 0;
    int64_t valid = 0;
    for (int64_t i = 0; i < n; i++) {
        valid += plain.ids[i] > 0;
        other += plain.ids[i] != rotated.ids[i];
    }
    assert_true(other > 0 && other < valid / 2);
    tiny_result_free(&plain);
    tiny_result_free(&rotated);
    tiny_free(w);
}

static void the_control_attends_the_last_positions(void **state)
{
    (void)state;
    wt *w = glm(5);
    tiny_run r = tiny_default();
    r.trace = 1;
    r.draft = 1;
    tiny_result indexed;
    tiny_result last;
    tiny_execute(w, &r, &indexed);
    r.selection_last = 1;
    tiny_execute(w, &r, &last);
    for (int64_t layer = 0; layer < 4; layer++) {
        for (int32_t t = 0; t < r.len[0]; t++) {
            const int32_t *ids = last.ids + (layer * TINY_MAX_SEQ * TINY_MAX_LEN + t) * TINY_TOPK;
            const int32_t from = t + 1 > TINY_TOPK ? t + 1 - TINY_TOPK : 0;
            for (int32_t i = 0; i < TINY_TOPK; i++) {
                assert_int_equal(ids[i], from + i <= t ? from + i : -1);
            }
        }
    }
    /* up to topk positions there is nothing to choose */
    assert_memory_equal(tiny_at(indexed.logits, 0, 0, TINY_VOCAB), tiny_at(last.logits, 0, 0, TINY_VOCAB),
                        TINY_TOPK * TINY_VOCAB * sizeof(float));
    assert_true(differ(&r, indexed.logits, last.logits));
    assert_true(differ(&r, indexed.draft, last.draft));
    tiny_result_free(&indexed);
    tiny_result_free(&last);
    tiny_free(w);
}

/* A draft layer that looks for its rows where they are not gives other logits; the main model does not. */
static void a_draft_on_a_wrong_layout_shows(void **state)
{
    (void)state;
    for (tiny_kind kind = TINY_GLM52; kind <= TINY_V3; kind++) {
        const tiny_spec spec = {.kind = kind, .type = GEMM_BF16, .seed = 6};
        wt *w = tiny_new(&spec);
        tiny_run r = tiny_default();
        r.tp = 2;
        r.dcp = 2;
        r.draft = 1;
        r.draft_cut = 40;
        tiny_result right;
        tiny_result wrong;
        tiny_execute(w, &r, &right);
        r.moved = 1;
        tiny_execute(w, &r, &wrong);
        assert_false(differ(&r, right.logits, wrong.logits));
        assert_true(differ(&r, right.draft, wrong.draft));
        tiny_result_free(&right);
        tiny_result_free(&wrong);
        tiny_free(w);
    }
}

/* ---- draft steps that reuse a selection ------------------------------------------------------ */

/* The index key and the latent row of every draft position are there, beyond the tokens too. */
static const char *draft_rows_are_written(fwd *f)
{
    const kvs_cache *c = f->cache;
    const int32_t layer = f->h->n_layer;
    const int32_t index_layer = f->index_of[layer];
    for (int64_t seq = 0; seq < 3; seq++) {
        const int64_t len = seq == 0 ? 130 : seq == 1 ? 37 : 5;
        for (int64_t pos = 0; pos < len + TINY_CHAIN; pos++) {
            const int64_t page = seq * (TINY_MAX_LEN / 64) + pos / 64; /* dealt in order */
            const uint8_t *key = cache_index_page(c, index_layer, page) + pos % 64 * 128;
            const uint8_t *row = cache_row(c, layer, page * 64 + pos % 64);
            int any_key = 0;
            int any_row = 0;
            for (int i = 0; i < 128; i++) {
                any_key |= key[i];
                any_row |= row[i];
            }
            if (!any_key || !any_row) {
                return any_key ? "a latent row is missing" : "an index key is missing";
            }
        }
    }
    return NULL;
}

static void reuse_writes_keys_and_leaves_no_trace(void **state)
{
    (void)state;
    wt *w = glm(7);
    tiny_run r = tiny_default();
    r.draft = 1;
    tiny_result without;
    tiny_result with;
    r.cut = 3; /* chains begin in the middle of sequences that go on, with true rows after them */
    tiny_execute(w, &r, &without);
    r.chain = 1;
    tiny_execute(w, &r, &with);
    r.chain = 0;
    tiny_same(&r, &without, &with, "chains between");
    tiny_result_free(&with);
    r.chain = 1;
    r.cut = TINY_MAX_LEN;
    r.at_end = draft_rows_are_written;
    tiny_execute(w, &r, &with);
    tiny_result_free(&without);
    tiny_result_free(&with);
    tiny_free(w);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void bytes_are_known_before(void **state)
{
    (void)state;
    for (tiny_kind kind = TINY_GLM52; kind <= TINY_V2; kind++) {
        const tiny_spec spec = {.kind = kind, .type = GEMM_FP8, .seed = 8};
        wt *w = tiny_new(&spec);
        const comm_config cc = {.timeout_ms = 10000};
        kvs_comm *self = NULL;
        fwd *f = NULL;
        fwd_config c = config();
        c.trace = w->h.n_index_head > 0;
        fwd_memory m;
        assert_int_equal(fwd_bytes(&w->h, &c, 1, &m, NULL), KVS_OK);
        assert_int_equal(m.workspace_all, m.workspace_most);
        const int64_t cache = m.cache;
        const int64_t space = m.workspace_most;
        assert_int_equal(comm_self_open(&self, &cc, NULL), KVS_OK);
        const mem_stats before = mem_stats_get();
        assert_int_equal(fwd_open(&f, w, &c, self, NULL), KVS_OK);
        const mem_stats after = mem_stats_get();
        fwd_info info;
        fwd_get_info(f, &info);
        assert_int_equal(info.workspace, space);
        assert_int_equal(info.cache_latent + info.cache_index + info.cache_draft, cache);
        assert_true(kind == TINY_V2 ? info.cache_draft == 0 : info.cache_draft > 0);
        assert_true((info.cache_index > 0) == (w->h.n_index_head > 0));
        /* what lives is that, and the handles themselves */
        const int64_t lives = after.live_bytes - before.live_bytes;
        assert_true(lives >= cache + space && lives < cache + space + 256 * 1024);
        fwd_close(f);
        assert_int_equal(mem_stats_get().live_bytes, before.live_bytes);
        comm_close(self);
        tiny_free(w);
    }
}

static void steps_do_not_allocate(void **state)
{
    (void)state;
    static const tiny_kind kinds[] = {TINY_GLM52, TINY_V2};
    for (size_t i = 0; i < UNIT_COUNT(kinds); i++) {
        const tiny_spec spec = {.kind = kinds[i], .type = GEMM_BF16, .seed = 9};
        wt *w = tiny_new(&spec);
        tiny_run r = tiny_default();
        r.guard = 1;
        r.n_seq = 2;
        r.len[0] = r.len[1] = 60;
        r.prompt[0] = r.prompt[1] = 50;
        r.apart = 1;
        r.cut = i == 0 ? 20 : 60; /* blocks of the context that grow would make the messages grow */
        tiny_result got;
        for (r.tp = 1; r.tp <= 2; r.tp++) {
            r.dcp = r.tp;
            tiny_execute(w, &r, &got);
            tiny_result_free(&got);
        }
        tiny_free(w);
    }
}

/* Each allocation of an opening fails once: nothing is left behind. */
static void an_opening_without_memory_leaves_nothing(void **state)
{
    (void)state;
    wt *w = glm(10);
    const comm_config cc = {.timeout_ms = 10000};
    const fwd_config c = config();
    const int64_t before = mem_stats_get().live_bytes;
    int64_t n = 0;
    for (int fired = 1; fired; n++) {
        /* a communicator that ran out of memory has ended: each opening has its own */
        kvs_comm *self = NULL;
        fwd *f = NULL;
        assert_int_equal(comm_self_open(&self, &cc, NULL), KVS_OK);
        mem_fail_after(n + 1);
        const kvs_status st = fwd_open(&f, w, &c, self, NULL);
        fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(st, fired ? KVS_NOMEM : KVS_OK);
        assert_true((f == NULL) == fired);
        fwd_close(f);
        comm_close(self);
        assert_int_equal(mem_stats_get().live_bytes, before);
    }
    assert_true(n > 5);
    tiny_free(w);
}

int main(void)
{
    mem_poison(true);
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_that_do_not_work_are_named),
        cmocka_unit_test(ranks_that_differ_do_not_open),
        cmocka_unit_test(refused_steps_change_nothing),
        cmocka_unit_test(selections_are_kept_of_a_draft_alone),
        cmocka_unit_test(a_rank_that_fails_alone_ends_the_group),
        cmocka_unit_test(rotated_keys_are_other_bits),
        cmocka_unit_test(the_control_attends_the_last_positions),
        cmocka_unit_test(a_draft_on_a_wrong_layout_shows),
        cmocka_unit_test(reuse_writes_keys_and_leaves_no_trace),
        cmocka_unit_test(bytes_are_known_before),
        cmocka_unit_test(steps_do_not_allocate),
        cmocka_unit_test(an_opening_without_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
