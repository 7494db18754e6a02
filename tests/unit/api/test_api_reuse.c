/* A prefix taken over gives the bits of a prompt read whole: answers and digests of later turns, with and without an
 * indexer, for every DCP size, with and without drafts, against an engine that keeps nothing. */
#include <stdbool.h>

#include "oracle/mkmodel.h"
#include "unit/api/drive.h"
#include "unit/unit.h"

enum { MAX_NEW = 24, LONG = 1200, TURNS = 3 };

typedef struct got {
    int32_t n, token[MAX_NEW];
    uint64_t digest;
    int64_t reused;
} got;

static const char *model;

typedef struct cell {
    int32_t tp, dcp, mtp, chunk;
    bool no_reuse;
    int32_t seqs;
} cell;

static kvs_engine *must_open(const cell *k)
{
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = model;
    c.tp = k->tp;
    c.dcp = k->dcp;
    c.mtp = k->mtp;
    c.chunk = k->chunk;
    c.threads = 1;
    c.no_reuse = k->no_reuse;
    c.max_seqs = k->seqs;
    c.ctx = LONG;
    return drive_open(&c);
}

static void take(void *ctx, kvs_engine *e, const kvs_event *ev)
{
    (void)e;
    got *g = ctx;
    if (ev->kind == KVS_EVENT_TOKEN) {
        assert_true(g->n < MAX_NEW);
        g->token[g->n++] = ev->token;
        g->digest = ev->digest;
    } else if (ev->kind == KVS_EVENT_PREFILL) {
        g->reused = ev->reused;
    } else {
        assert_int_equal(ev->kind, KVS_EVENT_FINISH);
    }
}

static got ask(kvs_engine *e, const int32_t *prompt, int32_t n, int32_t max_new)
{
    got g = {0};
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = n;
    r.max_new = max_new;
    r.temp = 0.9;
    r.seed = 5;
    r.ignore_eos = 1;
    drive_submit(e, &r);
    drive(e, take, &g);
    assert_int_equal(g.n, max_new);
    return g;
}

/* Turns: 495 tokens; these, their answer and 20 more; the first 513 of them and another one. */
static void converse(kvs_engine *e, int32_t n_turn, got *g)
{
    static int32_t ids[LONG];
    assert_int_equal(mkmodel_tokens("v3", 256, LONG, ids), 0);
    g[0] = ask(e, ids, 495, MAX_NEW);
    memcpy(ids + 495, g[0].token, MAX_NEW * sizeof *ids);
    g[1] = ask(e, ids, 495 + MAX_NEW + 20, 5);
    ids[513] = ids[513] == 20 ? 21 : 20;
    if (n_turn == TURNS) {
        g[2] = ask(e, ids, 514, 5);
    }
}

/* Runs the cells and holds them against the first one, which keeps nothing. reused: what the others take over. */
static void compare(const cell *k, int32_t n, int32_t n_turn, const int64_t *reused)
{
    static const int64_t n_prompt[TURNS] = {495, 495 + MAX_NEW + 20, 514};
    static got want[TURNS], g[TURNS];
    for (int32_t i = 0; i < n; i++) {
        kvs_engine *e = must_open(&k[i]);
        converse(e, n_turn, i == 0 ? want : g);
        kvs_engine_stats s = kvs_engine_stats_empty();
        kvs_engine_get_stats(e, &s);
        kvs_engine_close(e);
        int64_t sum = 0;
        int64_t all = 0;
        for (int32_t t = 0; t < n_turn; t++) {
            all += n_prompt[t];
            sum += i > 0 ? reused[t] : 0;
        }
        assert_int_equal(s.n_reused, sum);
        assert_int_equal(s.n_prefill, all - sum);
        for (int32_t t = 0; t < n_turn && i > 0; t++) {
            assert_int_equal(g[t].n, want[t].n);
            assert_memory_equal(g[t].token, want[t].token, (size_t)g[t].n * sizeof(int32_t));
            assert_true(g[t].digest == want[t].digest);
            assert_int_equal(g[t].reused, reused[t]);
        }
    }
}

static void rows_of_an_answer_for_every_dcp_size(void **state)
{
    (void)state;
    static const cell cells[] = {{8, 1, 0, 512, true, 1},
                                 {8, 1, 3, 200, false, 1},
                                 {8, 2, 0, 512, false, 1},
                                 {8, 4, 5, 128, false, 1},
                                 {8, 8, 2, 333, false, 1}};
    static const int64_t reused[TURNS] = {0, 512, 0};
    compare(cells, UNIT_COUNT(cells), 2, reused);
}

/* Branches of one prompt, that end on and off the borders of pages and of what is reused; all stay kept. With
 * drafts the row before the branch is read again. */
static void branches_of_any_length(void **state)
{
    (void)state;
    static const struct {
        int32_t common, reused;
    } branch[] = {{511, 0},   {512, 0},    {513, 512},   {576, 512},
                  {577, 512}, {1024, 512}, {1025, 1024}, {1090, 1024}};
    static const cell whole = {1, 1, 0, 600, true, 1};
    static const cell kept = {1, 1, 3, 77, false, UNIT_COUNT(branch) + 1};
    static int32_t ids[LONG], other[LONG];
    assert_int_equal(mkmodel_tokens("v3", 256, LONG, ids), 0);
    kvs_engine *e = must_open(&kept);
    kvs_engine *scratch = must_open(&whole);
    ask(e, ids, 1100, 4);
    for (size_t i = 0; i < UNIT_COUNT(branch); i++) {
        const int32_t n = branch[i].common + 8;
        memcpy(other, ids, (size_t)n * sizeof *ids);
        other[branch[i].common] = ids[branch[i].common] == 20 ? 21 : 20;
        const got a = ask(e, other, n, 6);
        const got b = ask(scratch, other, n, 6);
        assert_int_equal(a.reused, branch[i].reused);
        assert_int_equal(b.reused, 0);
        assert_memory_equal(a.token, b.token, 6 * sizeof(int32_t));
        assert_true(a.digest == b.digest);
    }
    kvs_engine_close(scratch);
    kvs_engine_close(e);
}

static void tiny(const char *variant, const int64_t *reused)
{
    static const cell cells[] = {{1, 1, 0, 512, true, 1}, {1, 1, 4, 200, false, 1}};
    char dir[256], msg[256];
    if (mkmodel_temp(variant, "bf16", 1, dir, sizeof dir, msg, sizeof msg) != 0) {
        fail_msg("%s", msg);
    }
    const char *before = model;
    model = dir;
    compare(cells, UNIT_COUNT(cells), TURNS, reused);
    model = before;
    mkmodel_remove(dir);
}

static void shared_selections(void **state)
{
    (void)state;
    static const int64_t reused[TURNS] = {0, 512, 512};
    tiny("glm52", reused);
}

/* The border lies in the first answer, which is not taken for a part of the second prompt; of that one it is. */
static void prompts_only_without_an_indexer(void **state)
{
    (void)state;
    static const int64_t reused[TURNS] = {0, 0, 512};
    tiny("v3", reused);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return 2;
    }
    model = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_an_answer_for_every_dcp_size),
        cmocka_unit_test(branches_of_any_length),
        cmocka_unit_test(shared_selections),
        cmocka_unit_test(prompts_only_without_an_indexer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
