/* kvspan check and bench on a device, driven over a fake one: which cases run where, what is left out and
 * said, that a wrong kernel, a broken device and a missing one are told, and that all is given back. */
#include "unit/unit.h"

#include <math.h>

#include "base/mem.h"
#include "check/check.h"
#include "kvspan/bench.h"
#include "unit/check/fake_cuda.h"

typedef struct lines {
    char all[32768];
    size_t n;
} lines;

static void on_line(void *ctx, const char *text)
{
    lines *l = ctx;
    const int n = snprintf(l->all + l->n, sizeof l->all - l->n, "%s\n", text);
    l->n += (size_t)n < sizeof l->all - l->n ? (size_t)n : 0;
}

static int reset(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    return 0;
}

static kvs_status run_check(const char *op, lines *l, kvs_check_result *r, kvs_error *err)
{
    kvs_check_config c = kvs_check_config_default();
    l->n = 0;
    l->all[0] = '\0';
    c.op = op;
    c.quick = 1;
    c.device = "cuda";
    c.line = on_line;
    c.ctx = l;
    c.result = r;
    return kvs_check_run(&c, err);
}

static void has(const lines *l, const char *text)
{
    if (strstr(l->all, text) == NULL) {
        fail_msg("no \"%s\" in\n%s", text, l->all);
    }
}

static void nothing_is_left(void)
{
    assert_int_equal(fake.n_live, 0);
    assert_int_equal(fake.n_open, 0);
}

static void every_case_is_aligned_for_a_device(void **state)
{
    (void)state;
    static const char *const ops[] = {"kv_write", "gather",  "index_write",
                                      "quant_q", "merge", "index_score", "index_select",
                                      "topk"};
    static lines l;
    for (size_t i = 0; i < UNIT_COUNT(ops); i++) {
        kvs_check_result r;
        kvs_error err;
        assert_int_equal(run_check(ops[i], &l, &r, &err), KVS_OK);
        assert_true(r.n_passed > 0 && r.n_failed == 0 && r.n_skipped == 0);
        has(&l, "fake, 8 SMs");
        assert_null(strstr(l.all, " ref "));
        assert_null(strstr(l.all, "left out"));
        nothing_is_left();
    }
    assert_int_equal(fake.n_refused, 0);
}

/* Classes about the order of sums are not for a kernel that promises none, and refused formats are
 * counted; what is only for a device runs on it. */
static void attention_is_checked_as_far_as_the_kernel_promises(void **state)
{
    (void)state;
    static lines l;
    int32_t n = 0;
    const kern_variant *cuda = kern_variants_cuda(&n);
    const kern_variant list[2] = {kern_variants(&n)[0], cuda[0]};
    dev_queue q;
    kvs_check_result r;
    kvs_check_config c = kvs_check_config_default();
    c.op = "attn";
    c.line = on_line;
    c.ctx = &l;
    c.result = &r;
    assert_int_equal(list[0].op, KERN_OP_attn);
    assert_int_equal(dev_queue_open_cuda(&q, NULL), KVS_OK);
    l.n = 0;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"list edges", 8}, &q, NULL), KVS_OK);
    has(&l, "4 of 8 cases left out: attn: rows of fp8_ds_mla or bf16 only");
    assert_int_equal(r.n_passed, 1);
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"tree", 2}, &q, NULL), KVS_OK);
    has(&l, "promises no order of sums");
    assert_int_equal(r.n_skipped, 1);
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"far slots", 1}, &q, NULL), KVS_OK);
    assert_int_equal(r.n_passed, 1);
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"bf16 out", 6}, &q, NULL), KVS_OK);
    assert_int_equal(r.n_passed, 1);
    fake.cuts = 1;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"bf16 out", 1}, &q, NULL), KVS_INTERNAL);
    fake.wrong = 1;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"far slots", 1}, &q, NULL),
                     KVS_INTERNAL);
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"list edges", 2}, &q, NULL),
                     KVS_INTERNAL);
    has(&l, "FAIL");
    dev_queue_close(&q);
    nothing_is_left();
    assert_int_equal(fake.n_refused, 0);
    /* without a device the large classes do not exist */
    assert_int_equal(check_run_variants(&c, list, 1, (check_filter){"far slots", 0}, NULL), KVS_OK);
    assert_int_equal(r.n_passed + r.n_skipped, 0);
}

/* What a block does one after the other shows where blocks are few; what is looked at while a call is launched shows in a
 * graph that was recorded over other data. */
static void a_kernel_that_is_wrong_with_few_blocks_or_peeks_is_told(void **state)
{
    (void)state;
    static lines l;
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    const kern_variant *cuda = kern_variants_cuda(&n);
    kern_variant list[2] = {all[0], cuda[0]};
    for (int32_t i = 0; i < n; i++) {
        list[1] = cuda[i].op == KERN_OP_index_select ? cuda[i] : list[1];
    }
    for (int32_t i = 0; list[0].op != KERN_OP_index_select; i++) {
        list[0] = all[i];
    }
    dev_queue q;
    kvs_check_result r;
    kvs_check_config c = kvs_check_config_default();
    c.op = "index_select";
    c.line = on_line;
    c.ctx = &l;
    c.result = &r;
    assert_int_equal(dev_queue_open_cuda(&q, NULL), KVS_OK);
    l.n = 0;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"random", 2}, &q, NULL), KVS_OK);
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"many rows", 2}, &q, NULL), KVS_OK);
    assert_int_equal(r.n_passed, 1);
    fake.narrow = 1;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"random", 2}, &q, NULL), KVS_INTERNAL);
    has(&l, "FAIL");
    assert_int_equal(q.n_sm, 8);
    fake.narrow = 0;
    fake.peeks = 1;
    l.n = 0;
    assert_int_equal(check_run_on(&c, list, 2, (check_filter){"random", 2}, &q, NULL), KVS_INTERNAL);
    has(&l, "FAIL");
    dev_queue_close(&q);
    nothing_is_left();
}

static void a_wrong_kernel_and_a_broken_device_are_told(void **state)
{
    (void)state;
    static lines l;
    kvs_check_result r;
    kvs_error err;
    fake.wrong = 1;
    assert_int_equal(run_check("kv_write", &l, &r, &err), KVS_INTERNAL);
    has(&l, "sm90        random         FAIL");
    nothing_is_left();
    fake.dies = 1;
    assert_int_equal(run_check("merge", &l, &r, &err), KVS_DEVICE);
    assert_non_null(strstr(err.text, "merge sm90, random, case 0"));
    assert_non_null(strstr(err.text, "illegal address"));
    has(&l, "FAIL");
    assert_null(strstr(l.all, "edges"));
    /* what a broken device may still write to is not given back */
    assert_int_equal(fake.n_live, 1);
    dev_cuda_free_shared(fake.shared);
}

static void what_cannot_run_is_refused_or_skipped(void **state)
{
    (void)state;
    static lines l;
    kvs_check_result r;
    kvs_error err;
    assert_int_equal(run_check("norm", &l, &r, &err), KVS_OK);
    has(&l, "no CUDA kernel");
    assert_int_equal(r.n_skipped, 1);
    fake.absent = 1;
    assert_int_equal(run_check("merge", &l, &r, &err), KVS_NODEV);
    kvs_check_config c = kvs_check_config_default();
    c.device = "cuda";
    c.selftest = 1;
    assert_int_equal(kvs_check_run(&c, &err), KVS_INVALID);
    c.device = "tpu";
    assert_int_equal(kvs_check_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "use cpu or cuda"));
    nothing_is_left();
}

/* ---- bench ---- */

typedef struct rows {
    int n;
    kvs_bench_row last;
    char name[4][40];
    double gflop[4];
} rows;

static void on_row(void *ctx, const kvs_bench_row *r)
{
    rows *x = ctx;
    if (x->n < 4) {
        snprintf(x->name[x->n], sizeof x->name[0], "%s", r->name);
        x->gflop[x->n] = r->gflop;
    }
    x->last = *r;
    x->n++;
    assert_string_equal(r->device, "cuda");
    assert_true(r->median_us > 0.0);
    assert_true(fake.wrong || r->passed);
}

static kvs_bench_config bench_config(const char *op, rows *x)
{
    memset(x, 0, sizeof *x);
    kvs_bench_config c = kvs_bench_config_default();
    c.op = op;
    c.device = "cuda";
    c.reps = 2;
    c.row = on_row;
    c.ctx = x;
    return c;
}

static void sparse_attention_is_timed_and_checked(void **state)
{
    (void)state;
    static const int64_t batch[] = {2};
    static const int64_t q[] = {2};
    static const int64_t heads[] = {3};
    static const int64_t len[] = {500};
    static const int64_t topk[] = {70};
    static const int64_t dcp[] = {1, 4};
    static const double invalid[] = {0.0, 0.5, 1.0};
    rows x;
    kvs_error err;
    kvs_bench_config c = bench_config("attn", &x);
    c.batch = (kvs_bench_axis){batch, 1};
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 1};
    c.topk = (kvs_bench_axis){topk, 1};
    c.dcp = (kvs_bench_axis){dcp, 2};
    c.invalid = invalid;
    c.n_invalid = 3;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 6);
    assert_string_equal(x.name[0], "2x2 h3 k70");
    assert_string_equal(x.name[1], "2x2 h3 k70 shard");
    assert_string_equal(x.name[2], "2x2 h3 k70 holes");
    assert_true(x.last.graph_us > 0.0 && x.last.invalid == 1.0 && x.last.gflop == 0.0);
    assert_true(fake.n_graph > 0);
    /* a shard of four has about a quarter of the keys, and half the entries are half the work */
    assert_true(x.gflop[1] > 0.15 * x.gflop[0] && x.gflop[1] < 0.35 * x.gflop[0]);
    assert_true(x.gflop[2] > 0.49 * x.gflop[0] && x.gflop[2] < 0.51 * x.gflop[0]);
    nothing_is_left();
    c.n_invalid = 2;
    fake.wrong = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    assert_non_null(strstr(err.text, "4 of 4 rows are wrong"));
    nothing_is_left();
}

static void scores_and_selection_are_timed_and_checked(void **state)
{
    (void)state;
    static const int64_t batch[] = {2};
    static const int64_t q[] = {3};
    static const int64_t heads[] = {4};
    static const int64_t len[] = {700, 9000};
    static const int64_t topk[] = {100};
    rows x;
    kvs_error err;
    kvs_bench_config c = bench_config("index", &x);
    c.batch = (kvs_bench_axis){batch, 1};
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 1);
    c = bench_config("select", &x);
    c.batch = (kvs_bench_axis){batch, 1};
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 2};
    c.topk = (kvs_bench_axis){topk, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 2);
    nothing_is_left();
    fake.wrong = 1;
    c.len.n = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    nothing_is_left();
}

static void the_multi_head_form_is_timed_and_checked(void **state)
{
    (void)state;
    static const int64_t q[] = {5};
    static const int64_t heads[] = {2};
    static const int64_t len[] = {5, 600};
    static const int64_t two[] = {2};
    rows x;
    kvs_error err;
    kvs_bench_config c = bench_config("mha", &x);
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 2};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 2);
    assert_string_equal(x.name[1], "5 of 600 h2");
    assert_true(fabs(x.gflop[0] - 1e-9 * 2 * 320 * 2 * (1 + 2 + 3 + 4 + 5)) < 1e-12);
    assert_true(fabs(x.gflop[1] - 1e-9 * 2 * 320 * 2 * (596 + 597 + 598 + 599 + 600)) < 1e-12);
    assert_string_equal(x.last.ceiling_kind, "products");
    assert_true(fabs(x.last.share * x.last.ceiling - x.last.flop_per_s) <= 1e-9 * x.last.flop_per_s);
    nothing_is_left();
    c = bench_config("mha_wide", &x);
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 2};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 2);
    assert_true(fabs(x.gflop[1] - 1e-9 * 2 * 512 * 2 * (596 + 597 + 598 + 599 + 600)) < 1e-12);
    nothing_is_left();
    c = bench_config("mha", &x);
    c.q = (kvs_bench_axis){q, 1};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 2};
    c.batch = (kvs_bench_axis){two, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "no batch, topk"));
    c.batch.n = 0;
    fake.wrong = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    assert_non_null(strstr(err.text, "2 of 2 rows are wrong"));
    nothing_is_left();
}

static void products_are_timed_and_checked(void **state)
{
    (void)state;
    static const int64_t q[] = {3, 9};
    static const int64_t heads[] = {2};
    static const int64_t len[] = {200};
    static const int64_t kv[] = {KVS_KV_BF16, KVS_KV_FP8};
    rows x;
    kvs_error err;
    kvs_bench_config c = bench_config("gemm", &x);
    c.q = (kvs_bench_axis){q, 2};
    c.heads = (kvs_bench_axis){heads, 1};
    c.len = (kvs_bench_axis){len, 1};
    c.kv = (kvs_bench_axis){kv, 2};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 4);
    assert_string_equal(x.name[1], "9 x 512x200");
    assert_true(fabs(x.gflop[0] - 1e-9 * 2 * 3 * 512 * 200) < 1e-12);
    assert_true(fabs(x.last.gbyte - 1e-9 * (9 * 200 * 2 + 512 * 200 + 4 * 4 * 2 + 9 * 512 * 4)) < 1e-12);
    assert_string_equal(x.last.ceiling_kind, "products");
    nothing_is_left();
    fake.wrong = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INTERNAL);
    assert_non_null(strstr(err.text, "4 of 4 rows are wrong"));
    nothing_is_left();
    c.len = (kvs_bench_axis){q, 0};
    c.batch = (kvs_bench_axis){heads, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "no batch, topk"));
}

static void bench_refusals_say_what_would_work(void **state)
{
    (void)state;
    static const int64_t rows_of[] = {65536};
    static const int64_t two[] = {2};
    rows x;
    kvs_error err;
    kvs_bench_config c = bench_config("write", &x);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "use attn, index, select, mha, mha_wide, gemm, exchange, roof"));
    c = bench_config("attn", &x);
    c.warm = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "warm"));
    c = bench_config("attn", &x);
    c.batch = (kvs_bench_axis){rows_of, 1};
    c.q = (kvs_bench_axis){two, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    c = bench_config("select", &x);
    c.dcp = (kvs_bench_axis){two, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    c = bench_config("exchange", &x);
    c.topk = (kvs_bench_axis){two, 1};
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "no len, topk"));
    c = bench_config("roof", &x);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_OK);
    assert_int_equal(x.n, 1);
    fake.absent = 1;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_NODEV);
    nothing_is_left();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_case_is_aligned_for_a_device, reset),
        cmocka_unit_test_setup(attention_is_checked_as_far_as_the_kernel_promises, reset),
        cmocka_unit_test_setup(a_kernel_that_is_wrong_with_few_blocks_or_peeks_is_told, reset),
        cmocka_unit_test_setup(a_wrong_kernel_and_a_broken_device_are_told, reset),
        cmocka_unit_test_setup(what_cannot_run_is_refused_or_skipped, reset),
        cmocka_unit_test_setup(sparse_attention_is_timed_and_checked, reset),
        cmocka_unit_test_setup(scores_and_selection_are_timed_and_checked, reset),
        cmocka_unit_test_setup(the_multi_head_form_is_timed_and_checked, reset),
        cmocka_unit_test_setup(products_are_timed_and_checked, reset),
        cmocka_unit_test_setup(bench_refusals_say_what_would_work, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
