/* Whole models answer the same over MPI processes as over threads: tokens and the digest of every logit, for dcp 1, 2
 * and 4 of 4 ranks, with and without an indexer, with drafts where the checkpoint has them.
 *
 * Run under mpirun with 4 ranks. Each process writes a checkpoint of its own, as nodes without a common disk have it.
 * Rank 0 runs the group as threads inside itself at dcp 1, one request at a time, prompts whole and no drafts; then
 * all processes run the requests together, prompts in pieces. */
#include "oracle/mkmodel.h"
#include "unit/api/drive.h"
#include "unit/unit.h"

enum { RANKS = 4, N = 3, LONGEST = 530, MAX_NEW = 10 };

/* On one page, at its border, and past the first 512 positions, which a dense prompt reads as one block. */
static const int32_t k_len[N] = {5, 64, LONGEST};

typedef struct got {
    int32_t n, token[MAX_NEW];
    uint64_t digest;
} got;

typedef struct cell {
    const char *variant, *dtype;
    kvs_kv_format kv;
    int32_t mtp, interleave;
} cell;

static kvs_comm *g_world;

static kvs_engine *must_open(const cell *k, const char *dir, kvs_comm *comm, int32_t dcp)
{
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = dir;
    c.tp = RANKS;
    c.dcp = dcp;
    c.kv = k->kv;
    c.interleave = k->interleave;
    c.mtp = comm != NULL ? k->mtp : 0;
    c.chunk = comm != NULL ? 180 : 0;
    c.max_seqs = N;
    c.threads = 1;
    c.no_reuse = 1;
    c.ctx = LONGEST + MAX_NEW + KVS_MAX_DRAFTS + 1;
    c.comm = comm;
    return drive_open(&c);
}

/* The second request is sampled. */
static void submit(kvs_engine *e, const cell *k, int32_t i)
{
    static int32_t ids[N * LONGEST];
    assert_int_equal(mkmodel_tokens(k->variant, 256, N * LONGEST, ids), 0);
    kvs_request r = kvs_request_default();
    r.prompt = ids + (ptrdiff_t)i * LONGEST;
    r.n_prompt = k_len[i];
    r.max_new = MAX_NEW;
    r.temp = i == 1 ? 1.0 : 0.0;
    r.seed = 7;
    r.ignore_eos = 1;
    drive_submit(e, &r);
}

static void take(void *ctx, kvs_engine *e, const kvs_event *ev)
{
    (void)e;
    got *a = (got *)ctx + (ev->request - 1);
    if (ev->kind == KVS_EVENT_TOKEN) {
        assert_true(a->n < MAX_NEW);
        a->token[a->n++] = ev->token;
        a->digest = ev->digest;
    }
}

static void threads_alone(const cell *k, const char *dir, got want[N])
{
    kvs_engine *e = must_open(k, dir, NULL, 1);
    for (int32_t i = 0; i < N; i++) {
        submit(e, k, i);
        drive(e, take, want);
        assert_int_equal(want[i].n, MAX_NEW);
        assert_true(i == 0 || want[i].digest != want[i - 1].digest);
    }
    kvs_engine_close(e);
}

static void processes(const cell *k, const char *dir, int32_t dcp, const got want[N])
{
    kvs_error err = {0};
    kvs_engine *e = must_open(k, dir, g_world, dcp);
    if (kvs_comm_rank(g_world) != 0) {
        if (kvs_engine_follow(e, &err) != KVS_OK) {
            fail_msg("%s", err.text);
        }
        kvs_engine_close(e);
        return;
    }
    got g[N];
    memset(g, 0, sizeof g);
    for (int32_t i = 0; i < N; i++) {
        submit(e, k, i);
    }
    drive(e, take, g);
    kvs_engine_stats s = kvs_engine_stats_empty();
    kvs_engine_get_stats(e, &s);
    kvs_engine_close(e);
    assert_string_equal(s.transport, "mpi");
    assert_int_equal(s.dcp, dcp);
    for (int32_t i = 0; i < N; i++) {
        if (g[i].n != want[i].n || memcmp(g[i].token, want[i].token, sizeof g[i].token) != 0 ||
            g[i].digest != want[i].digest) {
            fail_msg("%s, dcp %d, request %d: digest %016llx, over threads %016llx", k->variant,
                     dcp, i, (unsigned long long)g[i].digest, (unsigned long long)want[i].digest);
        }
    }
}

static void compare(const cell *k)
{
    char dir[256];
    char msg[256];
    if (mkmodel_temp(k->variant, k->dtype, 1, dir, sizeof dir, msg, sizeof msg) != 0) {
        fail_msg("%s", msg);
    }
    static got want[N];
    memset(want, 0, sizeof want);
    if (kvs_comm_rank(g_world) == 0) {
        threads_alone(k, dir, want);
    }
    for (int32_t dcp = 1; dcp <= RANKS; dcp *= 2) {
        processes(k, dir, dcp, want);
    }
    mkmodel_remove(dir);
}

static void dense_models_answer_the_same_over_processes(void **state)
{
    (void)state;
    static const cell cells[] = {
        {.variant = "v2", .dtype = "bf16", .kv = KVS_KV_BF16, .interleave = 1},
        {.variant = "v3", .dtype = "fp8", .kv = KVS_KV_FP8_DS_MLA, .mtp = 3, .interleave = 1},
        {.variant = "moonlight", .dtype = "f32", .kv = KVS_KV_F32, .interleave = 16},
    };
    for (size_t i = 0; i < UNIT_COUNT(cells); i++) {
        compare(&cells[i]);
    }
}

static void a_sparse_model_answers_the_same_over_processes(void **state)
{
    (void)state;
    static const cell shared = {
        .variant = "glm52", .dtype = "fp8", .kv = KVS_KV_FP8_DS_MLA, .mtp = 3, .interleave = 4};
    compare(&shared);
}

int main(void)
{
    kvs_error err = {0};
    if (kvs_comm_open_mpi(&g_world, NULL, &err) < 0) {
        fprintf(stderr, "test_engine_mpi: %s\n", err.text);
        return 1;
    }
    if (kvs_comm_size(g_world) != RANKS) {
        fprintf(stderr, "test_engine_mpi: %d ranks: run under mpirun -n %d\n",
                kvs_comm_size(g_world), RANKS);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_models_answer_the_same_over_processes),
        cmocka_unit_test(a_sparse_model_answers_the_same_over_processes),
    };
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kvs_comm_close(g_world);
    return rc;
}
