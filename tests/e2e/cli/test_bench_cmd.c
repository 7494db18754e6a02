/* kvspan bench: the CSV's columns, JSON, the table, refusals, and an interrupt in the middle. */
#include "prog.h"

#include <jansson.h>
#include <unistd.h>

static const char *model;

static const char k_head[] =
    "case,op,variant,device,batch,q,heads,len,topk,dcp,invalid,kv,median_us,min_us,p90_us,graph_us,"
    "gflops,gbytes,flop_per_s,byte_per_s,ceiling_kind,ceiling,share,check,err\n";

static int count(const char *text, char c)
{
    int n = 0;
    for (; *text != '\0'; text++) {
        n += *text == c;
    }
    return n;
}

static void csv_has_the_columns_in_their_order(void **state)
{
    (void)state;
    prog p = RUN("bench", "merge", "--batch", "2,3", "--heads", "4", "--dcp", "2", "--reps", "1",
                 "--pool", "1MiB", "--csv", "-");
    assert_int_equal(p.code, 0);
    assert_int_equal(strncmp(p.out, k_head, sizeof k_head - 1), 0);
    assert_int_equal(count(p.out, '\n'), 3);
    assert_int_equal(count(p.out, ','), 3 * count(k_head, ','));
    char *line = strchr(p.out, '\n') + 1;
    char *field[32];
    int n = 0;
    *strchr(line, '\n') = '\0';
    for (char *s = line; s != NULL && n < 32;) {
        field[n++] = strsep(&s, ",");
    }
    assert_int_equal(n, 25);
    assert_non_null(strstr(field[0], "merge/cold/t"));
    assert_string_equal(field[1], "merge");
    assert_string_equal(field[3], "cpu");
    assert_string_equal(field[4], "2");
    assert_string_equal(field[6], "4");
    assert_string_equal(field[7], "");  /* len: merge has none */
    assert_string_equal(field[9], "2"); /* dcp */
    assert_string_equal(field[15], ""); /* graphs are a device's */
    assert_true(strtod(field[12], NULL) >= strtod(field[13], NULL));
    assert_string_equal(field[20], "copy");
    assert_string_equal(field[23], "pass");
    prog_free(&p);
}

static void json_says_the_same(void **state)
{
    (void)state;
    prog p = RUN("bench", "topk", "--len", "3000", "--topk", "50", "--reps", "1", "--pool", "2MiB",
                 "--json", "-");
    assert_int_equal(p.code, 0);
    json_error_t why;
    json_t *root = json_loads(p.out, JSON_REJECT_DUPLICATES, &why);
    assert_non_null(root);
    const json_t *rows = json_object_get(root, "rows");
    assert_int_equal(json_array_size(rows), 4);
    const json_t *row = json_array_get(rows, 1);
    assert_int_equal(json_integer_value(json_object_get(row, "len")), 3000);
    assert_true(json_is_null(json_object_get(row, "heads")));
    assert_true(json_real_value(json_object_get(row, "median_us")) > 0.0);
    assert_non_null(strstr(json_string_value(json_object_get(row, "case")), "equal/cold/t1"));
    assert_string_equal(json_string_value(json_object_get(row, "check")), "pass");
    json_decref(root);
    prog_free(&p);
}

/* Rows of both benches on ranks with drafts: the runs agree, and rates are the work over the median. */
static void a_model_is_timed_end_to_end(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        prog p = RUN("bench", decode ? "decode" : "prefill", "-m", model, "--len", "70", "--dcp",
                     "1,2", "--tp", "2", "--mtp", "1", "--reps", "3", "--threads", "1", "--json", "-");
        if (p.code != 0) {
            fail_msg("exit code %d: %s", p.code, p.err);
        }
        json_t *root = json_loads(p.out, JSON_REJECT_DUPLICATES, NULL);
        const json_t *rows = json_object_get(root, "rows");
        assert_int_equal(json_array_size(rows), 2);
        for (size_t i = 0; i < 2; i++) {
            const json_t *row = json_array_get(rows, i);
            assert_int_equal(json_integer_value(json_object_get(row, "dcp")), i + 1);
            assert_int_equal(json_integer_value(json_object_get(row, "len")), 70);
            assert_int_equal(json_integer_value(json_object_get(row, "reps")), decode ? 6 : 3);
            assert_string_equal(json_string_value(json_object_get(row, "check")), "pass");
            assert_true(json_real_value(json_object_get(row, "tok_per_s")) > 0.0);
            const double us = json_real_value(json_object_get(row, "median_us"));
            const char *work = decode ? "gbytes" : "gflops";
            const char *rate = decode ? "byte_per_s" : "flop_per_s";
            const double done = json_real_value(json_object_get(row, work));
            assert_true(done > 0.0);
            const double want = done * 1e15 / us;
            const double got = json_real_value(json_object_get(row, rate));
            assert_true(got > 0.999 * want && got < 1.001 * want);
            assert_true(json_real_value(json_object_get(row, "share")) > 0.0);
        }
        json_decref(root);
        prog_free(&p);
    }
}

static void the_table_has_a_row_per_case(void **state)
{
    (void)state;
    prog p =
        RUN("bench", "attn", "--batch", "1", "--heads", "1,3", "--len", "100", "--topk", "0,16",
            "--kv", "bf16", "--threads", "1", "--reps", "1", "--dcp", "2", "--pool", "1MiB");
    assert_int_equal(p.code, 0);
    assert_int_equal(count(p.out, '\n'), 5);
    assert_non_null(strstr(p.out, "sparse/cold/t1"));
    assert_non_null(strstr(p.out, "dense/cold/t1"));
    assert_null(strstr(p.out, "FAIL"));
    prog_free(&p);
}

static void what_cannot_be_timed_is_a_usage_error(void **state)
{
    (void)state;
    prog_expect(RUN("bench", "attention"), 2, "no bench \"attention\": use attn, index");
    prog_expect(RUN("bench", "decode"), 2, "no model: name its folder with -m DIR");
    prog_expect(RUN("bench", "decode", "-m", model, "--batch", "2"), 2, "one request at a time");
    prog_expect(RUN("bench", "prefill", "-m", model, "--heads", "2"), 2, "--heads");
    prog_expect(RUN("bench", "attn", "--mtp", "1"), 2, "--mtp");
    prog_expect(RUN("bench", "prefill", "-m", "/nonexistent"), 3, "/nonexistent");
    prog_expect(RUN("bench", "topk", "--heads", "8"), 2, "bench topk does not use heads");
    prog_expect(RUN("bench", "attn", "--exchange", "a2a"), 2, "bench attn does not use exchange");
    prog_expect(RUN("bench", "roof", "--warm"), 2, "bench roof does not use warm");
    prog_expect(RUN("bench", "roof", "--pool", "1MiB"), 2, "bench roof does not use pool");
    prog_expect(RUN("bench", "attn", "--kv", "fp8", "--topk", "64"), 2, "fp8_ds_mla");
    prog_expect(RUN("bench", "attn", "--len", "2000000000", "--topk", "0"), 2, "6 GiB");
    prog_expect(RUN("bench", "attn", "--warm", "--cold"), 2, "give one");
    prog_expect(RUN("bench", "attn", "index"), 2, "unexpected word \"index\"");
    prog_expect(RUN("bench", "--kernels", "attn=fast", "attn"), 2, "fast");
}

static void an_interrupt_ends_with_130_and_leaves_files_alone(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-bench-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char csv[64];
    snprintf(csv, sizeof csv, "%s/b.csv", dir);
    FILE *f = fopen(csv, "w");
    assert_non_null(f);
    fputs("old\n", f);
    fclose(f);
    const char *const words[] = {"bench",     "merge", "--batch", "1",       "--heads", "1",
                                 "--dcp",     "2",     "--reps",  "1000000", "--csv",   csv,
                                 "--threads", "1",     "--pool",  "1MiB",    NULL};
    prog p = prog_run_signal(words, SIGINT, 2000);
    assert_int_equal(p.code, 130);
    char *text = prog_read(csv);
    assert_string_equal(text, "old\n");
    free(text);
    unlink(csv);
    assert_int_equal(rmdir(dir), 0);
    prog_free(&p);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s PROGRAM MODEL\n", argv[0]);
        return 2;
    }
    model = argv[2];
    prog_init(argc - 1, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(csv_has_the_columns_in_their_order),
        cmocka_unit_test(json_says_the_same),
        cmocka_unit_test(a_model_is_timed_end_to_end),
        cmocka_unit_test(the_table_has_a_row_per_case),
        cmocka_unit_test(what_cannot_be_timed_is_a_usage_error),
        cmocka_unit_test(an_interrupt_ends_with_130_and_leaves_files_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
