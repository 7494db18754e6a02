/* The checking tool: it passes the reference, reports planted faults, and fails wrong variants of
 * every op, each in the class that is there for it. */
#include "unit/unit.h"

#include "base/cpu.h"
#include "check/check.h"
#include "unit/check/wrong_kernels.h"

static kern_table g_ref;

static int setup(void **state)
{
    (void)state;
    return kern_init(&g_ref, 0, NULL, NULL);
}

/* ---- running ---- */

typedef struct lines {
    char last[512];
    char with[512]; /* the last line that contains `word` */
    const char *word;
    int n;
} lines;

static void keep_line(void *ctx, const char *text)
{
    lines *l = ctx;
    snprintf(l->last, sizeof l->last, "%s", text);
    if (l->word != NULL && strstr(text, l->word) != NULL) {
        snprintf(l->with, sizeof l->with, "%s", text);
    }
    l->n++;
}

static kvs_check_config config(const char *op, lines *l, kvs_check_result *result)
{
    kvs_check_config c = kvs_check_config_default();
    c.op = op;
    c.quick = 1;
    c.line = keep_line;
    c.ctx = l;
    c.result = result;
    return c;
}

/* The reference passes every class of the op, by the oracle: the first cases of each, or all. */
static void reference_passes(const char *op, int32_t n_case)
{
    lines l = {.word = "FAIL"};
    kvs_check_result result;
    kvs_check_config c = config(op, &l, &result);
    c.variant = "ref";
    kvs_error err;
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    if (check_run_variants(&c, all, n, (check_filter){NULL, n_case}, &err) != KVS_OK) {
        fail_msg("%s: %s; %s", op, err.text, l.with);
    }
    assert_true(result.n_passed > 0);
    assert_int_equal(result.n_failed, 0);
    assert_non_null(strstr(l.last, "0 failed"));
}

/* KVS_TEST_OP=attn restricts what runs per op to that one, and runs all quick cases of it. */
static int op_wanted(kern_op op)
{
    const char *only = getenv("KVS_TEST_OP");
    return only == NULL || strcmp(only, kern_op_name(op)) == 0;
}

static void the_reference_passes(void **state)
{
    (void)state;
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (op_wanted((kern_op)op)) {
            reference_passes(kern_op_name((kern_op)op), getenv("KVS_TEST_OP") != NULL ? 0 : 3);
        }
    }
}

static void planted_faults_are_reported(void **state)
{
    (void)state;
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (!op_wanted((kern_op)op)) {
            continue;
        }
        lines l = {.word = "FAIL"};
        kvs_check_result result;
        kvs_check_config c = config(kern_op_name((kern_op)op), &l, &result);
        c.selftest = 1;
        kvs_error err;
        if (kvs_check_run(&c, &err) != KVS_OK) {
            fail_msg("%s: %s", err.text, l.with);
        }
        assert_true(result.n_passed >= 6);
    }
}

/* ---- wrong variants ---- */

/* The reference of an op and one more variant. */
static void two_variants(kern_variant list[2], kern_op op, kern_variant second)
{
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        if (all[i].op == op) {
            list[0] = all[i];
            break;
        }
    }
    list[1] = second;
}

static void wrong_variants_fail(void **state)
{
    (void)state;
    int32_t n_wrong = 0;
    const wrong_kernel *wrong = wrong_kernels(&n_wrong);
    for (int32_t i = 0; i < n_wrong; i++) {
        if (!op_wanted(wrong[i].v.op)) {
            continue;
        }
        kern_variant list[2];
        two_variants(list, wrong[i].v.op, wrong[i].v);
        lines l = {.word = "wrong"};
        kvs_check_result result;
        kvs_check_config c = config(kern_op_name(wrong[i].v.op), &l, &result);
        kvs_error err;
        const kvs_status st = check_run_variants(&c, list, 2, wrong[i].only, &err);
        if (st != KVS_INTERNAL || result.n_failed != 1 || result.n_passed != 1 ||
            strstr(l.with, "FAIL") == NULL) {
            fail_msg("%s passed %s: %s", wrong[i].name, wrong[i].only.cls, l.with);
        }
        assert_non_null(strstr(err.text, wrong[i].only.cls));
        assert_non_null(strstr(err.text, "(case "));
    }
}

static void apply_nothing(kern_table *t)
{
    (void)t;
}

static void apply_half(kern_table *t)
{
    t->topk = g_ref.topk; /* and no scratch query */
}

static void apply_ref_topk(kern_table *t)
{
    t->topk = g_ref.topk;
    t->topk_scratch = g_ref.topk_scratch;
}

static int g_future_ran;

/* What a machine without the features of a variant would do with it: stop. */
static void topk_of_the_future(const topk_args *a, dev_queue *q)
{
    g_future_ran = 1;
    g_ref.topk(a, q);
}

static void apply_future(kern_table *t)
{
    t->topk = topk_of_the_future;
    t->topk_scratch = g_ref.topk_scratch;
}

static void run_second(kern_variant second, const char *cpu, lines *l, kvs_check_result *result,
                       kvs_status want)
{
    kern_variant list[2];
    two_variants(list, KERN_OP_topk, second);
    kvs_check_config c = config("topk", l, result);
    c.cpu = cpu;
    assert_int_equal(check_run_variants(&c, list, 2, (check_filter){"list", 1}, NULL), want);
}

static void empty_and_inherited_variants_are_named(void **state)
{
    (void)state;
    lines l = {.word = "hollow"};
    kvs_check_result result;
    run_second((kern_variant)KERN_VARIANT(topk, "hollow", 0, apply_nothing), NULL, &l, &result,
               KVS_INTERNAL);
    assert_non_null(strstr(l.with, "sets no function"));
    assert_int_equal(result.n_failed, 1);
    run_second((kern_variant)KERN_VARIANT(topk, "hollow", 0, apply_half), NULL, &l, &result,
               KVS_INTERNAL);
    assert_int_equal(result.n_failed, 1);
    l.word = "heir";
    run_second((kern_variant)KERN_VARIANT(topk, "heir", 0, apply_ref_topk), NULL, &l, &result,
               KVS_OK);
    assert_non_null(strstr(l.with, "inherited"));
    assert_int_equal(result.n_skipped, 1);
    assert_string_equal(l.last, "1 passed, 0 failed, 1 skipped");
}

/* Instructions that the machine lacks, or that a cap forbids, are not tried; the line names them. */
static void variants_beyond_the_machine_are_left_alone(void **state)
{
    (void)state;
    lines l = {.word = "future"};
    kvs_check_result result;
    const kern_variant unknown = KERN_VARIANT(topk, "future", 1u << 31, apply_future);
    run_second(unknown, NULL, &l, &result, KVS_OK);
    assert_non_null(strstr(l.with, "not on this machine"));
    assert_string_equal(l.last, "1 passed, 0 failed, 1 skipped");
    const kern_variant capped = KERN_VARIANT(topk, "future", CPU_AVX2, apply_future);
    l.with[0] = '\0';
    run_second(capped, "ref", &l, &result, KVS_OK);
    assert_non_null(strstr(l.with, "above the CPU cap: avx2"));
    assert_string_equal(l.last, "1 passed, 0 failed, 1 skipped");
    assert_int_equal(g_future_ran, 0);
    const kern_variant present = KERN_VARIANT(topk, "future", 0, apply_future);
    run_second(present, NULL, &l, &result, KVS_OK);
    assert_string_equal(l.last, "2 passed, 0 failed, 0 skipped");
    assert_int_equal(g_future_ran, 1);
}

/* ---- the entry ---- */

static void refuses(kvs_check_config c, const char *a, const char *b)
{
    kvs_error err;
    assert_int_equal(kvs_check_run(&c, &err), KVS_INVALID);
    if (strstr(err.text, a) == NULL || strstr(err.text, b) == NULL) {
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", err.text, a, b);
    }
}

static void bad_configs_are_refused(void **state)
{
    (void)state;
    kvs_check_config c = kvs_check_config_default();
    c.op = "atn";
    refuses(c, "\"atn\"", "localise");
    c = kvs_check_config_default();
    c.variant = "fast";
    refuses(c, "\"fast\"", "ref");
    c.op = "merge";
    refuses(c, "merge", "ref");
    c = kvs_check_config_default();
    c.cpu = "mmx";
    refuses(c, "mmx", "avx2");
    c = kvs_check_config_default();
    c.quick = 2;
    refuses(c, "quick", "2");
    c = kvs_check_config_default();
    c.conformance = 1;
    c.seed = 3;
    refuses(c, "conformance", "seed");
    c = kvs_check_config_default();
    c.comm = 1;
    c.rendezvous = "tcp://127.0.0.1:9"; /* nobody is there: it is refused before it is called */
    c.n_rank = 9;
    refuses(c, "9 processes", "use 1 to 8");
    c.n_rank = 2;
    c.rank = 2;
    refuses(c, "rank 2 of 2 processes", "use 0 to 1");
    c = kvs_check_config_default();
    c.struct_size = 0;
    refuses(c, "struct_size", "");
    assert_int_equal(kvs_check_run(NULL, NULL), KVS_INVALID);
    c = kvs_check_config_default();
    c.op = "topk_merge";
    c.csv = "/nonexistent/x.csv";
    kvs_error err;
    assert_int_equal(kvs_check_run(&c, &err), KVS_IO);
    assert_non_null(strstr(err.text, "/nonexistent/x.csv"));
}

static void a_short_config_has_defaults_behind_it(void **state)
{
    (void)state;
    kvs_check_config c = kvs_check_config_default();
    c.op = "topk_merge";
    c.variant = "ref";
    c.selftest = 7; /* behind the size: not read */
    c.struct_size = offsetof(kvs_check_config, conformance);
    c.quick = 1;
    assert_int_equal(kvs_check_run(&c, NULL), KVS_OK);
}

static void csv_and_conformance_rows(void **state)
{
    (void)state;
    char path[] = "/tmp/kvspan_check_XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "r");
    assert_non_null(f);
    lines l = {.word = "cut is (+inf, -1)"};
    kvs_check_config c = config("topk_merge", &l, NULL);
    c.quick = 0;
    c.conformance = 1;
    c.variant = "ref";
    c.csv = path;
    assert_int_equal(kvs_check_run(&c, NULL), KVS_OK);
    assert_non_null(strstr(l.with, "pass"));
    char row[512];
    assert_non_null(fgets(row, sizeof row, f));
    assert_string_equal(row, "op,variant,class,cases,verdict,worst,detail,seed\n");
    int n = 0;
    while (fgets(row, sizeof row, f) != NULL) {
        assert_non_null(strstr(row, "topk_merge,ref,"));
        assert_non_null(strstr(row, ",40,pass,0,\""));
        n++;
    }
    assert_int_equal(n, 2);
    fclose(f);
    remove(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_reference_passes),
        cmocka_unit_test(planted_faults_are_reported),
        cmocka_unit_test(wrong_variants_fail),
        cmocka_unit_test(empty_and_inherited_variants_are_named),
        cmocka_unit_test(variants_beyond_the_machine_are_left_alone),
        cmocka_unit_test(bad_configs_are_refused),
        cmocka_unit_test(a_short_config_has_defaults_behind_it),
        cmocka_unit_test(csv_and_conformance_rows),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
