/* kvspan check: rows, CSV, JSON, what goes with what, and exit code 1 when something is wrong. */
#include "prog.h"

#include <jansson.h>
#include <unistd.h>

static json_t *parse(const char *text)
{
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        fail_msg("%s at line %d of %s", why.text, why.line, text);
    }
    return root;
}

static const char *last_line(const char *text)
{
    const size_t n = strlen(text);
    assert_true(n > 1 && text[n - 1] == '\n');
    const char *line = text + n - 1;
    while (line > text && line[-1] != '\n') {
        line--;
    }
    return line;
}

static int count_lines(const char *text)
{
    int n = 0;
    for (; *text != '\0'; text++) {
        n += *text == '\n';
    }
    return n;
}

static void a_right_op_passes_and_the_last_line_counts(void **state)
{
    (void)state;
    prog p = RUN("check", "--op", "localise", "--quick", "--seed", "3");
    assert_int_equal(p.code, 0);
    assert_string_equal(p.err, "");
    int passed = -1;
    int failed = -1;
    int skipped = -1;
    char end = 0;
    assert_int_equal(sscanf(last_line(p.out), "%d passed, %d failed, %d skipped%c", &passed,
                            &failed, &skipped, &end),
                     4);
    assert_true(passed > 0 && failed == 0);
    assert_int_equal(passed + skipped, count_lines(p.out) - 1);
    assert_non_null(strstr(p.out, "localise"));
    prog_free(&p);
}

static void csv_and_json_hold_every_row(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-checks-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char csv[64];
    char json[64];
    snprintf(csv, sizeof csv, "%s/c.csv", dir);
    snprintf(json, sizeof json, "%s/c.json", dir);
    prog p = RUN("check", "--op", "localise", "--quick", "--csv", csv, "--json", json);
    assert_int_equal(p.code, 0);
    char *text = prog_read(csv);
    assert_non_null(text);
    static const char head[] = "op,variant,class,cases,verdict,worst,detail,seed\n";
    assert_int_equal(strncmp(text, head, sizeof head - 1), 0);
    assert_int_equal(count_lines(text), count_lines(p.out));
    free(text);
    text = prog_read(json);
    json_t *root = parse(text);
    const json_t *rows = json_object_get(root, "rows");
    assert_int_equal(json_array_size(rows), count_lines(p.out) - 1);
    const json_t *row = json_array_get(rows, 0);
    assert_string_equal(json_string_value(json_object_get(row, "op")), "localise");
    assert_string_equal(json_string_value(json_object_get(row, "verdict")), "pass");
    assert_true(json_integer_value(json_object_get(row, "cases")) > 0);
    assert_int_equal(json_integer_value(json_object_get(root, "failed")), 0);
    json_decref(root);
    free(text);
    unlink(csv);
    unlink(json);
    assert_int_equal(rmdir(dir), 0);
    prog_free(&p);

    p = RUN("check", "--op", "localise", "--quick", "--csv", "-");
    assert_int_equal(strncmp(p.out, head, sizeof head - 1), 0); /* and nothing else */
    assert_null(strstr(p.out, "passed,"));
    prog_free(&p);
    p = RUN("check", "--op", "localise", "--quick", "--json", "-");
    json_decref(parse(p.out));
    prog_free(&p);
}

static void unknown_names_and_mixed_options_are_usage_errors(void **state)
{
    (void)state;
    prog_expect(RUN("check", "--op", "conv"), 2, "conv");
    prog_expect(RUN("check", "--op", "merge", "--variant", "sse"), 2, "sse");
    prog_expect(RUN("check", "--cpu", "sse"), 2, "--cpu \"sse\"");
    prog_expect(RUN("check", "--comm", "--op", "merge"), 2, "--op does not go with --comm");
    prog_expect(RUN("check", "--comm", "--bench"), 2, "--bench does not go with --comm");
    prog_expect(RUN("check", "--comm", "--csv", "f"), 2, "--csv does not go with --comm");
    prog_expect(RUN("check", "--timeout", "2"), 2, "--timeout goes with --comm only");
    prog_expect(RUN("check", "--rendezvous", "tcp://h:1"), 2, "--rendezvous goes with --comm only");
    prog_expect(RUN("check", "--comm", "--ranks", "2"), 2, "--ranks goes with --rendezvous");
    prog_expect(RUN("check", "--comm", "--rendezvous", "tcp://h:1", "--ranks", "2", "--rank", "3"), 2,
                "--rank 3 of --ranks 2: use --rank 0 to 1");
    prog_expect(RUN("check", "--comm", "--rendezvous", "tcp://h:1", "--ranks", "9"), 2, "--ranks \"9\"");
    prog_expect(RUN("check", "--comm", "--rendezvous", "h:1"), 2, "is no address: use tcp://HOST:PORT");
    prog_expect(RUN("check", "--conformance", "--quick"), 2, "leave out quick");
    prog_expect(RUN("check", "merge"), 2, "unexpected word \"merge\"");
    prog_expect(RUN("check", "--heads", "8"), 2, "no option --heads for check");
}

static void a_cap_on_the_cpu_skips_what_lies_above(void **state)
{
    (void)state;
    static const char *const variables[] = {NULL, "KVS_CPU=ref"};
    for (int i = 0; i < 2; i++) {
        prog p = i == 0 ? RUN("check", "--op", "topk", "--quick", "--cpu", "ref")
                        : RUN_ENV(variables[1], "check", "--op", "topk", "--quick");
        assert_int_equal(p.code, 0);
        assert_non_null(strstr(p.out, "topk         ref"));
        assert_null(strstr(p.out, "avx2        random"));
        assert_non_null(strstr(p.out, "above the CPU cap"));
        prog_free(&p);
    }
}

static const char *g_wrong;

static void a_failure_is_exit_code_1_and_is_in_the_files(void **state)
{
    (void)state;
    const char *right = prog_path;
    prog_path = g_wrong;
    char dir[] = "/tmp/kvspan-wrong-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char csv[64];
    char json[64];
    snprintf(csv, sizeof csv, "%s/c.csv", dir);
    snprintf(json, sizeof json, "%s/c.json", dir);
    prog p = RUN("check", "--csv", csv, "--json", json);
    assert_non_null(strstr(p.out, "FAIL"));
    assert_string_equal(last_line(p.out), "0 passed, 1 failed, 0 skipped\n");
    prog_expect(p, 1, "1 of 1 checks failed");
    char *text = prog_read(csv);
    assert_non_null(text);
    assert_non_null(strstr(text, "merge,ref,random"));
    free(text);
    text = prog_read(json);
    json_t *root = parse(text);
    assert_int_equal(json_integer_value(json_object_get(root, "failed")), 1);
    json_decref(root);
    free(text);

    p = RUN("bench", "topk", "--csv", csv, "--json", json);
    assert_non_null(strstr(p.out, "FAIL"));
    prog_expect(p, 1, "1 of 1 rows are wrong");
    text = prog_read(csv);
    const char *row_at = strchr(text, '\n');
    assert_non_null(row_at); /* every value in its column */
    assert_string_equal(row_at + 1, "random/cold/t1,topk,ref,cpu,1,,,100,8,1,0,,2.000,1.000,3.000,,"
                                    "0,1e-06,0,5e+08,read,1e+09,0.5000,FAIL,7\n");
    free(text);
    text = prog_read(json);
    root = parse(text);
    const json_t *row = json_array_get(json_object_get(root, "rows"), 0);
    assert_string_equal(json_string_value(json_object_get(row, "check")), "FAIL");
    json_decref(root);
    free(text);
    unlink(csv);
    unlink(json);
    rmdir(dir);
    prog_path = right;
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        g_wrong = argv[2];
        argc = 2;
    }
    prog_init(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_op_passes_and_the_last_line_counts),
        cmocka_unit_test(csv_and_json_hold_every_row),
        cmocka_unit_test(unknown_names_and_mixed_options_are_usage_errors),
        cmocka_unit_test(a_cap_on_the_cpu_skips_what_lies_above),
        cmocka_unit_test(a_failure_is_exit_code_1_and_is_in_the_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
