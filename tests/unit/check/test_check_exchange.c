/* The check and the bench of exchanges between devices, driven over a fake device: right ones pass, and moved
 * bytes, ranks that are not compared and wrong names are told. */
#include "unit/unit.h"

#include "kvspan/bench.h"
#include "kvspan/check.h"
#include "unit/check/fake_cuda.h"

enum { MAX_FAIL = 64 };

typedef struct rows {
    int n, n_pass, n_skip, n_fail;
    char fail[MAX_FAIL][512];
} rows;

static void on_line(void *ctx, const char *text)
{
    rows *r = ctx;
    const int failed = strstr(text, " FAIL ") != NULL;
    r->n++;
    r->n_pass += strstr(text, " pass ") != NULL;
    r->n_skip += strstr(text, " skip ") != NULL;
    if (failed && r->n_fail < MAX_FAIL) {
        snprintf(r->fail[r->n_fail], sizeof r->fail[0], "%s", text);
    }
    r->n_fail += failed;
}

static int reset(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    fake.replays = 1;
    return 0;
}

static kvs_status run(rows *r, kvs_check_result *total, kvs_error *err)
{
    kvs_check_config c = kvs_check_config_default();
    memset(r, 0, sizeof *r);
    memset(err, 0, sizeof *err);
    c.comm = 1;
    c.quick = 1;
    c.device = "cuda";
    c.timeout_ms = 120;
    c.line = on_line;
    c.ctx = r;
    c.result = total;
    const kvs_status st = kvs_check_run(&c, err);
    assert_int_equal(fake.n_live, 0);
    assert_int_equal(fake.n_open, 0);
    return st;
}

static int failures_with(const rows *r, const char *a, const char *b)
{
    int n = 0;
    for (int i = 0; i < r->n_fail && i < MAX_FAIL; i++) {
        n += strstr(r->fail[i], a) != NULL && strstr(r->fail[i], b) != NULL;
    }
    return n;
}

static void right_exchanges_pass(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    if (run(&r, &total, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    /* 4 groups x 2 contents x (4 messages + 2 merges), 2 graphs, 3 groups x 6 forms of attention that sends, 2 ranks that
     * are not heard, 2 groups x 6 faults */
    assert_int_equal(r.n_pass, 4 * 2 * 6 + 2 + 3 * 6 + 2 + 12);
    assert_int_equal(r.n_skip, 3 * 3 + 1); /* deterministic forms, NCCL */
    assert_int_equal(total.n_passed, r.n_pass);
    assert_int_equal(total.n_failed, 0);
}

static void a_wrong_byte_is_told(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    fake.wrong = 1;
    assert_int_equal(run(&r, &total, &err), KVS_INTERNAL);
    assert_non_null(strstr(err.text, "rows failed; the first: op=queries"));
    assert_int_equal(failures_with(&r, "op=queries", "byte 3 of"), 8);
    assert_int_equal(failures_with(&r, "op=candidates", "byte 3 of"), 8);
    assert_int_equal(failures_with(&r, "op=pieces", "byte 3 of"), 8);
    assert_int_equal(failures_with(&r, "op=partials_f32", "out, byte 5 of"), 8);
    assert_int_equal(failures_with(&r, "op=graph", "byte 3 of"), 2);
    assert_int_equal(failures_with(&r, "op=barrier", ""), 0);
}

static void a_wrong_value_that_attention_sends_is_told(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    fake.strays = 1;
    assert_int_equal(run(&r, &total, &err), KVS_INTERNAL);
    assert_int_equal(failures_with(&r, "op=attn_sent", "launches: rank 0, out of row 0, head 0, value 0"), r.n_fail);
    assert_int_equal(r.n_fail, 3 * 6);
}

static void ranks_that_are_not_compared_are_told(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    fake.deaf = 1;
    assert_int_equal(run(&r, &total, &err), KVS_INTERNAL);
    assert_int_equal(failures_with(&r, "fault=rows", "was told KVS_OK"), 2);
    assert_int_equal(failures_with(&r, "fault=width", "was told KVS_OK"), 2);
    assert_int_equal(failures_with(&r, "fault=op", "was told KVS_OK"), 2);
    assert_int_equal(failures_with(&r, "fault=mute", "was told KVS_OK"), 1);
    assert_int_equal(failures_with(&r, "fault=stale", "was told KVS_OK"), 1);
    assert_int_equal(r.n_fail, 8);
}

static void a_wrong_name_is_told(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    fake.blames = 1;
    assert_int_equal(run(&r, &total, &err), KVS_INTERNAL);
    assert_int_equal(failures_with(&r, "n=3", "was told KVS_PEER \"rank"), r.n_fail);
    assert_true(r.n_fail >= 2);
}

static void no_device_is_said(void **state)
{
    (void)state;
    rows r;
    kvs_check_result total;
    kvs_error err;
    fake.absent = 1;
    assert_int_equal(run(&r, &total, &err), KVS_NODEV);
}

/* ---- bench ------------------------------------------------------------------------------------- */

typedef struct timed {
    int n, n_wrong;
    char name[16][32];
    char variant[16][16];
    int64_t dcp[16];
} timed;

static void on_row(void *ctx, const kvs_bench_row *row)
{
    timed *t = ctx;
    assert_in_range(t->n, 0, 15);
    t->dcp[t->n] = row->dcp;
    snprintf(t->variant[t->n], sizeof t->variant[0], "%s", row->variant);
    snprintf(t->name[t->n++], sizeof t->name[0], "%s", row->name);
    t->n_wrong += !row->passed;
    assert_true(row->graph_us > 0.0 && row->gbyte > 0.0);
}

static void exchanges_are_timed_and_compared(void **state)
{
    (void)state;
    static const int64_t dcp[] = {4};
    static const int64_t batch[] = {1, 3};
    static const int64_t heads[] = {8};
    timed t;
    kvs_error err;
    memset(&t, 0, sizeof t);
    kvs_bench_config c = kvs_bench_config_default();
    c.op = "exchange";
    c.device = "cuda";
    c.dcp = (kvs_bench_axis){dcp, 1};
    c.batch = (kvs_bench_axis){batch, 2};
    c.heads = (kvs_bench_axis){heads, 1};
    c.row = on_row;
    c.ctx = &t;
    fake.replays = 0;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(t.n, 8);
    for (int i = 0; i < 8; i++) {
        assert_string_equal(t.variant[i], "p2p");
    }
    assert_string_equal(t.name[0], "q/shared");
    assert_string_equal(t.name[6], "q+partials/shared");
    assert_string_equal(t.name[7], "candidates/shared");
    assert_int_equal(fake.n_live, 0);
    assert_int_equal(fake.n_open, 0);
    fake.wrong = 1;
    memset(&t, 0, sizeof t);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    assert_int_equal(t.n_wrong, 6); /* a changed id that is not at the cut changes nothing */
    fake.wrong = 0;
    fake.cut = 1;
    memset(&t, 0, sizeof t);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    assert_int_equal(t.n_wrong, 2);
    static const int64_t three[] = {3};
    c.heads = (kvs_bench_axis){three, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "3 heads"));
}

/* ---- a layer ----------------------------------------------------------------------------------- */

static kvs_status run_layer_of(timed *t, int32_t ranks, int64_t q_rows, int64_t n_best, int64_t fmt,
                               kvs_error *err)
{
    const int64_t dcp[] = {ranks};
    const int64_t q[] = {q_rows};
    const int64_t topk[] = {n_best};
    const int64_t kv[] = {fmt};
    static const int64_t batch[] = {2};
    static const int64_t heads[] = {8};
    static const int64_t len[] = {1024};
    kvs_bench_config c = kvs_bench_config_default();
    memset(t, 0, sizeof *t);
    memset(err, 0, sizeof *err);
    c.op = "attn";
    c.device = "cuda";
    c.dcp = (kvs_bench_axis){dcp, 1};
    c.q = (kvs_bench_axis){q, 1};
    c.batch = (kvs_bench_axis){batch, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 1};
    c.topk = (kvs_bench_axis){topk, 1};
    c.kv = (kvs_bench_axis){kv, 1};
    c.reps = 1;
    c.row = on_row;
    c.ctx = t;
    return kvs_bench_run(&c, err);
}

static kvs_status run_layer(timed *t, int32_t ranks, int64_t q_rows, kvs_error *err)
{
    return run_layer_of(t, ranks, q_rows, 64, KVS_KV_FP8_DS_MLA, err);
}

/* Ranks select what one does and give its results; one rank in the row beside them has the whole context. */
static void a_layer_over_ranks_is_that_of_one(void **state)
{
    (void)state;
    timed t;
    kvs_error err;
    fake.replays = 0; /* a graph does what it holds the first time */
    if (run_layer(&t, 2, 3, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(t.n, 4); /* the shard alone, then the layer */
    assert_non_null(strstr(t.name[0], "shard"));
    assert_string_equal(t.name[1], "layer 2x3 h8 tp2 shared");
    assert_string_equal(t.name[2], t.name[1]);
    assert_string_equal(t.variant[1], "sm90");
    assert_string_equal(t.variant[2], "p2p");
    assert_string_equal(t.variant[3], "fused");
    assert_int_equal(t.dcp[1], 1);
    assert_int_equal(t.dcp[2], 2);
    assert_int_equal(fake.n_live, 0);
    assert_int_equal(fake.n_open, 0);
    if (run_layer(&t, 8, 1, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(t.dcp[2], 8);
}

/* Dense layers attend all tokens of the ranks, a row of several those up to its own. */
static void a_dense_layer_over_ranks_is_that_of_one(void **state)
{
    (void)state;
    static const int64_t fmt[] = {KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA};
    timed t;
    kvs_error err;
    fake.replays = 0; /* a graph does what it holds the first time */
    for (int i = 0; i < 3; i++) {
        if (run_layer_of(&t, i == 0 ? 8 : 2, 3, 0, fmt[i], &err) != KVS_OK) {
            fail_msg("%s", err.text);
        }
        assert_int_equal(t.n, 3);
        assert_string_equal(t.name[1],
                            i == 0 ? "layer 2x3 h8 dense tp8 shared" : "layer 2x3 h8 dense tp2 shared");
        assert_string_equal(t.variant[2], "p2p");
        assert_int_equal(fake.n_live, 0);
    }
    fake.wrong = 1;
    assert_int_equal(run_layer_of(&t, 2, 1, 0, KVS_KV_BF16, &err), KVS_INTERNAL);
}

static void a_layer_that_differs_is_told(void **state)
{
    (void)state;
    timed t;
    kvs_error err;
    fake.replays = 0; /* a graph does what it holds the first time */
    fake.cut = 1; /* ranks keep too few */
    assert_int_equal(run_layer(&t, 2, 1, &err), KVS_INTERNAL);
    assert_int_equal(t.n_wrong, 3);
    assert_non_null(strstr(err.text, "selected by all ranks"));
    fake.cut = 0;
    fake.strays = 1; /* only where attention sends */
    assert_int_equal(run_layer(&t, 2, 1, &err), KVS_INTERNAL);
    assert_int_equal(t.n_wrong, 1);
    assert_non_null(strstr(err.text, "results of the graph that differ"));
    fake.strays = 0;
    fake.wrong = 1;
    assert_int_equal(run_layer(&t, 2, 1, &err), KVS_INTERNAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(right_exchanges_pass, reset),
        cmocka_unit_test_setup(a_wrong_byte_is_told, reset),
        cmocka_unit_test_setup(a_wrong_value_that_attention_sends_is_told, reset),
        cmocka_unit_test_setup(ranks_that_are_not_compared_are_told, reset),
        cmocka_unit_test_setup(a_wrong_name_is_told, reset),
        cmocka_unit_test_setup(no_device_is_said, reset),
        cmocka_unit_test_setup(exchanges_are_timed_and_compared, reset),
        cmocka_unit_test_setup(a_layer_over_ranks_is_that_of_one, reset),
        cmocka_unit_test_setup(a_dense_layer_over_ranks_is_that_of_one, reset),
        cmocka_unit_test_setup(a_layer_that_differs_is_told, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
