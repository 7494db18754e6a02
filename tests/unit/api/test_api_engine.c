/* The engine through its public functions, on the random checkpoint: several requests at once, cancelled ones,
 * statistics, errors. Run with ranks as threads, and under mpirun with a process for each rank. */
#include "unit/api/drive.h"
#include "unit/unit.h"

static const char *model;
static kvs_comm *world; /* under mpirun */
static int32_t n_rank = 2;

enum { N = 3, MAX = 40 };

typedef struct got {
    int32_t n, token[MAX];
    int32_t end;
    uint64_t digest;
    int64_t reused;
} got;

static kvs_engine *must_open(int32_t dcp, int32_t mtp, int32_t seqs, int32_t no_reuse)
{
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = model;
    c.tp = n_rank;
    c.dcp = dcp;
    c.mtp = mtp;
    c.max_seqs = seqs;
    c.no_reuse = no_reuse;
    c.threads = 1;
    c.chunk = 50;
    c.trace = 1;
    c.comm = world;
    return drive_open(&c);
}

/* Three prompts of 5, 64 and 130 tokens; the second one is sampled. */
static void submit(kvs_engine *e, int32_t i)
{
    static const int64_t len[N] = {5, 64, 130};
    int32_t prompt[130];
    for (int32_t t = 0; t < len[i]; t++) {
        prompt[t] = 20 + (i * 311 + t * t * 17 + t) % 900;
    }
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = len[i];
    r.max_new = 8 + 3 * i;
    r.temp = i == 1 ? 1.0 : 0.0;
    r.seed = 3;
    r.ignore_eos = 1;
    drive_submit(e, &r);
}

/* Greedily. */
static void submit_ids(kvs_engine *e, const int32_t *prompt, int32_t n, int32_t max_new)
{
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = n;
    r.max_new = max_new;
    r.ignore_eos = 1;
    drive_submit(e, &r);
}

static void take(void *ctx, kvs_engine *e, const kvs_event *ev)
{
    got *a = (got *)ctx + (ev->request - 1);
    if (ev->kind == KVS_EVENT_TOKEN) {
        assert_true(a->n < MAX);
        a->token[a->n++] = ev->token;
        a->digest = ev->digest;
        assert_non_null(ev->logits);
        int32_t ids[32];
        assert_int_equal(kvs_engine_selection(e, 0, ev->row, ids, 32),
                         ev->position < 32 ? ev->position : 32);
        assert_int_equal(ids[0] <= ids[1], 1);
    } else if (ev->kind == KVS_EVENT_FINISH) {
        a->end = (int32_t)ev->reason;
    } else {
        assert_int_equal(ev->kind, KVS_EVENT_PREFILL);
        a->reused = ev->reused;
    }
}

/* What the ranks other than 0 of a comm do; true for them. */
static int followed(kvs_engine *e)
{
    if (world == NULL || kvs_comm_rank(world) == 0) {
        return 0;
    }
    kvs_error err = {0};
    const kvs_request r = kvs_request_default();
    uint64_t id = 0;
    assert_int_equal(kvs_engine_step(e, &err), KVS_INVALID);
    assert_int_equal(kvs_engine_submit(e, &r, &id, &err), KVS_INVALID);
    if (kvs_engine_follow(e, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    kvs_engine_close(e);
    return 1;
}

static void requests_give_the_same_alone_and_together(void **state)
{
    (void)state;
    got want[N], g[N];
    memset(want, 0, sizeof want);
    kvs_engine *e = must_open(1, 0, 1, 0);
    if (!followed(e)) {
        kvs_error err = {0};
        assert_int_equal(kvs_engine_follow(e, &err), KVS_INVALID);
        for (int32_t i = 0; i < N; i++) {
            submit(e, i);
            drive(e, take, want);
            assert_int_equal(want[i].end, KVS_FINISH_LENGTH);
            assert_int_equal(want[i].n, 8 + 3 * i);
        }
        kvs_engine_close(e);
    }
    memset(g, 0, sizeof g);
    e = must_open(n_rank, 3, N, 0);
    if (followed(e)) {
        return;
    }
    for (int32_t i = 0; i < N; i++) {
        submit(e, i);
    }
    drive(e, take, g);
    for (int32_t i = 0; i < N; i++) {
        assert_int_equal(g[i].n, want[i].n);
        assert_memory_equal(g[i].token, want[i].token, (size_t)g[i].n * sizeof(int32_t));
        assert_true(g[i].digest == want[i].digest);
    }
    kvs_engine_stats s = kvs_engine_stats_empty();
    kvs_engine_get_stats(e, &s);
    assert_string_equal(s.model, "random-v32");
    assert_string_equal(s.chat, "v3.2");
    assert_string_equal(s.transport, world != NULL ? "mpi" : "threads");
    assert_int_equal(s.tp, n_rank);
    assert_int_equal(s.dcp, n_rank);
    assert_int_equal(s.mtp, 3);
    assert_int_equal(s.n_prefill, 5 + 64 + 130);
    assert_int_equal(s.n_output, 8 + 11 + 14);
    assert_int_equal(s.n_decode, s.n_output - 3);
    assert_int_equal(s.vocab, 1024);
    assert_true(s.n_page_peak >= 3 && s.n_page_peak < s.n_page);
    assert_int_equal(s.cache_latent, s.n_page_peak * 64 * 3 * 656);
    assert_int_equal(s.cache_draft, s.n_page_peak * 64 * (656 + 132));
    kvs_engine_close(e);
}

/* A prompt of 520 tokens; then it, its answer and 30 more: 512 of these are there. The same in an engine that keeps
 * nothing. */
static void a_second_turn_reads_only_what_is_new(void **state)
{
    (void)state;
    enum { FIRST = 520, ANSWER = 12, MORE = 30, SECOND = FIRST + ANSWER + MORE };
    static got g[2][2];
    memset(g, 0, sizeof g);
    const int32_t from = UNIT_SANITIZED ? 1 : 0; /* there without the other engine */
    for (int32_t keep = from; keep < 2; keep++) {
        int32_t prompt[SECOND];
        for (int32_t t = 0; t < SECOND; t++) {
            prompt[t] = 20 + (t * t * 13 + t) % 900;
        }
        kvs_engine *e = must_open(n_rank, 3 * keep, 1, 1 - keep);
        if (followed(e)) {
            continue;
        }
        submit_ids(e, prompt, FIRST, ANSWER);
        drive(e, take, g[keep]);
        memcpy(prompt + FIRST, g[keep][0].token, ANSWER * sizeof *prompt);
        submit_ids(e, prompt, SECOND, ANSWER);
        drive(e, take, g[keep]);
        kvs_engine_stats s = kvs_engine_stats_empty();
        kvs_engine_get_stats(e, &s);
        assert_int_equal(s.n_reused, 512 * keep);
        assert_int_equal(s.n_prefill, FIRST + SECOND - 512 * keep);
        assert_int_equal(g[keep][1].reused, 512 * keep);
        kvs_engine_close(e);
    }
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(g[from][i].n, g[1][i].n);
        assert_memory_equal(g[from][i].token, g[1][i].token, (size_t)g[1][i].n * sizeof(int32_t));
        assert_true(g[from][i].digest == g[1][i].digest);
    }
}

static void a_cancelled_request_ends_and_the_next_one_runs(void **state)
{
    (void)state;
    got g[2];
    memset(g, 0, sizeof g);
    kvs_engine *e = must_open(1, 2, 1, 0);
    if (followed(e)) {
        return;
    }
    submit(e, 2);
    submit(e, 0);
    assert_int_equal(kvs_engine_step(e, NULL), KVS_OK);
    kvs_engine_cancel(e, 1);
    kvs_engine_cancel(e, 99);
    drive(e, take, g);
    assert_int_equal(g[0].end, KVS_FINISH_INTERRUPTED);
    assert_int_equal(g[0].n, 0);
    assert_int_equal(g[1].end, KVS_FINISH_LENGTH);
    kvs_engine_close(e);
}

static void a_refused_open_names_what_and_what_would_work(void **state)
{
    (void)state;
    if (world != NULL) {
        return;
    }
    kvs_engine *e = (kvs_engine *)(uintptr_t)8;
    kvs_error err = {0};
    kvs_engine_config c = kvs_engine_config_default();
    assert_int_equal(kvs_engine_open(&e, NULL, &err), KVS_INVALID);
    assert_null(e);
    assert_int_equal(kvs_engine_open(NULL, &c, &err), KVS_INVALID);
    assert_int_equal(kvs_engine_open(&e, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "model_dir"));
    c.model_dir = "/nowhere";
    assert_int_equal(kvs_engine_open(&e, &c, &err), KVS_IO);
    c.model_dir = model;
#define REFUSED(field, value, says)                                                                \
    do {                                                                                           \
        kvs_engine_config x = c;                                                                   \
        x.field = (value);                                                                         \
        assert_int_equal(kvs_engine_open(&e, &x, &err), KVS_INVALID);                              \
        assert_null(e);                                                                            \
        if (strstr(err.text, (says)) == NULL) {                                                    \
            fail_msg("\"%s\" lacks \"%s\"", err.text, (says));                                     \
        }                                                                                          \
    } while (0)
    REFUSED(tp, 3, "tp 3");
    REFUSED(tp, -1, "tp -1");
    REFUSED(tp, 128, "tp 128");
    REFUSED(dcp, 3, "use --dcp 4");
    REFUSED(dcp, 16, "dcp 16");
    REFUSED(mtp, 8, "mtp 8");
    REFUSED(ctx, 1, "ctx 1");
    REFUSED(ctx, 1 << 20, "use --ctx 2560");
    REFUSED(max_seqs, KVS_MAX_SEQS + 1, "max_seqs 65");
    REFUSED(threads, -1, "threads -1");
    REFUSED(threads, 1 << 20, "threads 1048576");
    REFUSED(timeout_ms, -1, "timeout_ms -1");
    REFUSED(trace, 2, "trace 2");
    REFUSED(no_reuse, 2, "no_reuse 2");
    REFUSED(latent_eps, -1.0f, "latent-eps -1");
    REFUSED(kv, KVS_KV_FP8, "fp8");
    REFUSED(interleave, 3, "interleave 3");
    REFUSED(kernels, "attn=fastest", "fastest");
#undef REFUSED
}

static void nothing_is_done_with_no_engine(void **state)
{
    (void)state;
    kvs_error err = {0};
    kvs_event ev;
    uint64_t id = 0;
    const kvs_request r = kvs_request_default();
    assert_int_equal(kvs_engine_step(NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_engine_submit(NULL, &r, &id, &err), KVS_INVALID);
    assert_int_equal(kvs_engine_follow(NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_engine_poll(NULL, &ev, 1), 0);
    assert_int_equal(kvs_engine_selection(NULL, 0, 0, NULL, 0), -1);
    kvs_engine_cancel(NULL, 1);
    kvs_engine_get_stats(NULL, NULL);
    kvs_engine_close(NULL);
    assert_string_equal(kvs_finish_name(KVS_FINISH_CONTEXT), "context");
    assert_string_equal(kvs_finish_name((kvs_finish)9), "?");
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return 2;
    }
    model = argv[1];
    kvs_error err = {0};
    n_rank = kvs_comm_launched() > 1 ? kvs_comm_launched() : 2;
    if (kvs_comm_launched() > 1 && kvs_comm_open_mpi(&world, NULL, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_give_the_same_alone_and_together),
        cmocka_unit_test(a_second_turn_reads_only_what_is_new),
        cmocka_unit_test(a_cancelled_request_ends_and_the_next_one_runs),
        cmocka_unit_test(a_refused_open_names_what_and_what_would_work),
        cmocka_unit_test(nothing_is_done_with_no_engine),
    };
    const int code = cmocka_run_group_tests(tests, NULL, NULL);
    kvs_comm_close(world);
    return code;
}
