/* Options: the table is sound; line, variable and default in order; refusals say what would work. */
#include "unit/unit.h"

#include <locale.h>

#include "base/knob.h"
#include "base/mem.h"
#include "kvspan/option.h"

#define PARSE(out, err, command, ...)                                                              \
    parse_words((out), (err), (command), (const char *const[]){command, __VA_ARGS__, NULL})

static kvs_status parse_words(kvs_options **out, kvs_error *err, const char *command,
                              const char *const *words)
{
    int argc = 0;
    char *argv[40];
    while (words[argc] != NULL) {
        argv[argc] = (char *)(uintptr_t)words[argc];
        argc++;
    }
    argv[argc] = NULL;
    char *before[40];
    memcpy(before, argv, sizeof before);
    const kvs_status st = kvs_options_parse(out, command, argc, argv, err);
    assert_memory_equal(before, argv, (size_t)argc * sizeof *argv);
    return st;
}

static int clean_environment(void **state)
{
    (void)state;
    const knob *k = NULL;
    for (size_t i = 0; (k = knob_at(i)) != NULL; i++) {
        char var[64];
        unsetenv(knob_env_name(k, var, sizeof var));
    }
    return 0;
}

static void the_table_is_sound(void **state)
{
    (void)state;
    static const uint32_t commands[] = {KNOB_BENCH, KNOB_CHECK, KNOB_PLAN};
    const knob *k = NULL;
    size_t n = 0;
    for (; (k = knob_at(n)) != NULL; n++) {
        assert_true(strlen(k->help) > 5);
        assert_true(k->commands != 0 && (k->commands & ~(uint32_t)KNOB_ALL) == 0);
        assert_int_equal(k->kind == KNOB_FLAG, k->arg == NULL);
        assert_true(k->kind != KNOB_WORD || k->choices != NULL);
        assert_true(k->kind != KNOB_INT || k->choices != NULL || k->lo < k->hi);
        assert_true(k->kind != KNOB_REAL || k->real_lo < k->real_hi);
        assert_true(k->def == NULL || k->def_say == NULL);
        for (size_t c = 0; c < UNIT_COUNT(commands); c++) {
            if ((k->commands & commands[c]) != 0) {
                assert_ptr_equal(knob_find(k->name, commands[c]), k); /* unique per command */
            }
        }
        if (k->def != NULL) {
            knob_value v;
            kvs_error err = {0};
            if (knob_parse(k, k->name, k->def, strlen(k->def), &v, &err) != KVS_OK) {
                fail_msg("%s", err.text);
            }
        }
    }
    assert_true(n > 30);
    assert_null(knob_find("no-such", 0));
    assert_ptr_equal(knob_find("decode-context-parallel-size", KNOB_PLAN),
                     knob_find("dcp", KNOB_PLAN));
    assert_int_equal(knob_command("serve"), 0);
}

static void line_over_variable_over_default(void **state)
{
    (void)state;
    kvs_options *o = NULL;
    assert_int_equal(PARSE(&o, NULL, "bench", "attn"), KVS_OK);
    assert_int_equal(kvs_options_source(o, "timeout"), KVS_OPTION_DEFAULT);
    assert_true(kvs_options_real(o, "timeout", 0) == 30);
    assert_int_equal(kvs_options_count(o, "len"), 0);
    assert_null(kvs_options_text(o, "cpu", 0));
    kvs_options_free(o);

    setenv("KVS_TIMEOUT", "2.5", 1);
    setenv("KVS_LEN", "10,20,30", 1);
    setenv("KVS_CPU", "", 1); /* empty is unset */
    assert_int_equal(PARSE(&o, NULL, "bench", "attn"), KVS_OK);
    assert_int_equal(kvs_options_source(o, "timeout"), KVS_OPTION_ENVIRONMENT);
    assert_true(kvs_options_real(o, "timeout", 0) == 2.5);
    assert_int_equal(kvs_options_count(o, "len"), 3);
    assert_null(kvs_options_text(o, "cpu", 0));
    kvs_options_free(o);

    assert_int_equal(PARSE(&o, NULL, "bench", "--timeout=7", "attn", "--len", "5", "--len", "6,7"),
                     KVS_OK);
    assert_int_equal(kvs_options_source(o, "timeout"), KVS_OPTION_COMMAND_LINE);
    assert_true(kvs_options_real(o, "timeout", 0) == 7);
    assert_int_equal(kvs_options_count(o, "len"), 2);
    assert_int_equal(kvs_options_int(o, "len", 0), 6);
    assert_int_equal(kvs_options_int(o, "len", 1), 7);
    assert_int_equal(kvs_options_int(o, "len", 2), 0);
    assert_int_equal(kvs_options_int(o, "len", -1), 0);
    kvs_options_free(o);
    /* A variable of another command is not looked at. */
    setenv("KVS_MEM", "rubbish", 1);
    assert_int_equal(PARSE(&o, NULL, "bench", "attn"), KVS_OK);
    kvs_options_free(o);
    assert_int_equal(PARSE(&o, NULL, "plan", "x"), KVS_INVALID);
}

static void every_kind_has_its_getter(void **state)
{
    (void)state;
    kvs_options *o = NULL;
    assert_int_equal(PARSE(&o, NULL, "bench", "attn", "--invalid", "0,0.875,1", "--kv",
                           "bf16,fp8_ds_mla", "--cold", "--decode-context-parallel-size", "1,8",
                           "--seed", "9223372036854775807", "--csv", "-", "extra"),
                     KVS_OK);
    assert_int_equal(kvs_options_count(o, "invalid"), 3);
    assert_true(kvs_options_real(o, "invalid", 1) == 0.875);
    assert_string_equal(kvs_options_text(o, "kv", 0), "bf16");
    assert_string_equal(kvs_options_text(o, "kv", 1), "fp8_ds_mla");
    assert_null(kvs_options_text(o, "kv", 2));
    assert_int_equal(kvs_options_flag(o, "cold"), 1);
    assert_int_equal(kvs_options_flag(o, "warm"), 0);
    assert_int_equal(kvs_options_int(o, "dcp", 1), 8);
    assert_true(kvs_options_int(o, "seed", 0) == INT64_MAX);
    assert_string_equal(kvs_options_text(o, "csv", 0), "-");
    assert_int_equal(kvs_options_n_arg(o), 2);
    assert_string_equal(kvs_options_arg(o, 0), "attn");
    assert_string_equal(kvs_options_arg(o, 1), "extra");
    assert_null(kvs_options_arg(o, 2));
    assert_null(kvs_options_arg(o, -1));
    /* wrong kind, wrong command, no such name */
    assert_int_equal(kvs_options_flag(o, "kv"), 0);
    assert_int_equal(kvs_options_int(o, "kv", 0), 0);
    assert_int_equal(kvs_options_int(o, "gpus", 0), 0);
    assert_null(kvs_options_text(o, "no-such", 0));
    kvs_options_free(o);

    assert_int_equal(PARSE(&o, NULL, "check", "--", "--quick"), KVS_OK);
    assert_int_equal(kvs_options_flag(o, "quick"), 0);
    assert_string_equal(kvs_options_arg(o, 0), "--quick");
    kvs_options_free(o);
    kvs_options_free(NULL);
}

static void flags_read_words_from_variables(void **state)
{
    (void)state;
    static const struct {
        const char *word;
        int want; /* -1 refused */
    } c[] = {{"1", 1},  {"true", 1}, {"yes", 1}, {"on", 1}, {"0", 0},
             {"no", 0}, {"off", 0},  {"", 0},    {"2", -1}, {"TRUE", -1}};
    for (size_t i = 0; i < UNIT_COUNT(c); i++) {
        setenv("KVS_QUICK", c[i].word, 1);
        kvs_options *o = NULL;
        kvs_error err = {0};
        const kvs_status st = PARSE(&o, &err, "check", "--seed", "1");
        assert_int_equal(st, c[i].want < 0 ? KVS_INVALID : KVS_OK);
        if (c[i].want >= 0) {
            assert_int_equal(kvs_options_flag(o, "quick"), c[i].want);
        } else {
            assert_non_null(strstr(err.text, "KVS_QUICK"));
            assert_non_null(strstr(err.text, c[i].word));
        }
        kvs_options_free(o);
    }
}

static void sizes_have_units(void **state)
{
    (void)state;
    static const struct {
        const char *s;
        int64_t want; /* 0 refused */
    } c[] = {{"141GB", INT64_C(141000000000)},
             {"131GiB", INT64_C(131) << 30},
             {"1.5GiB", INT64_C(3) << 29},
             {"2000000", 2000000},
             {"2000000B", 2000000},
             {"80MB", 80000000},
             {"2048KiB", 2 << 20},
             {"5000kB", 5000000},
             {"0.5TB", INT64_C(500000000000)},
             {"1TiB", INT64_C(1) << 40},
             {"80G", 0},
             {"80gb", 0},
             {"-5GB", 0},
             {"GB", 0},
             {"1MB", 0},
             {"5000TiB", 0},
             {"nanGB", 0},
             {" 80GB", 0},
             {"80GB ", 0},
             {"1e400GB", 0}};
    for (int round = 0; round < 2; round++) {
        if (round == 1) {
            setlocale(LC_ALL, "de_DE.UTF-8");
        }
        for (size_t i = 0; i < UNIT_COUNT(c); i++) {
            kvs_options *o = NULL;
            const kvs_status st = PARSE(&o, NULL, "plan", "--mem", c[i].s);
            assert_int_equal(st, c[i].want > 0 ? KVS_OK : KVS_INVALID);
            if (c[i].want > 0) {
                assert_true(kvs_options_int(o, "mem", 0) == c[i].want);
                assert_string_equal(kvs_options_text(o, "mem", 0), c[i].s);
            }
            kvs_options_free(o);
        }
    }
    setlocale(LC_ALL, "C");
}

static void letters_stand_for_their_options(void **state)
{
    (void)state;
    static const char *const forms[][2] = {{"-m", "a/b"}, {"-ma/b", "x"}, {"--model=a/b", "x"}};
    for (size_t i = 0; i < UNIT_COUNT(forms); i++) {
        kvs_options *o = NULL;
        assert_int_equal(PARSE(&o, NULL, "plan", forms[i][0], forms[i][1], "--seqs", "3"), KVS_OK);
        assert_string_equal(kvs_options_text(o, "model", 0), "a/b");
        assert_int_equal(kvs_options_source(o, "model"), KVS_OPTION_COMMAND_LINE);
        assert_int_equal(kvs_options_int(o, "seqs", 0), 3);
        assert_int_equal(kvs_options_n_arg(o), i == 0 ? 0 : 1);
        kvs_options_free(o);
    }
}

static void refusals_say_what_would_work(void **state)
{
    (void)state;
    static const struct {
        const char *command, *a, *b;
        const char *says[2];
    } c[] = {
        {"bench", "--interleave", "3", {"--interleave \"3\"", "one of 1, 2, 4, 8, 16, 32, 64"}},
        {"bench", "--interleave", "0", {"--interleave \"0\"", "one of 1, 2, 4, 8"}},
        {"bench", "--interleave", "1|2", {"--interleave", "one of"}},
        {"plan", "--dcp", "0", {"--dcp \"0\"", "1..65536"}},
        {"plan", "x", "-m", {"-m", "needs a value"}},
        {"check", "-m", "x", {"no option -m for check", "kvspan check --help"}},
        {"bench", "--dcp", "9", {"--dcp \"9\"", "1..8"}},
        {"bench", "--dcp", "1,,2", {"--dcp \"\"", "1..8"}},
        {"bench", "--len", "12x", {"--len \"12x\"", "0..2147483647"}},
        {"bench", "--len", "2147483648", {"--len", "0..2147483647"}},
        {"bench", "--len", "99999999999999999999", {"--len", "0..2147483647"}},
        {"bench", "--len", " 5", {"--len", "0..2147483647"}},
        {"bench", "--heads", "129", {"--heads \"129\"", "1..128"}},
        {"bench", "--invalid", "1.01", {"--invalid", "0..1"}},
        {"bench", "--invalid", "nan", {"--invalid", "0..1"}},
        {"bench", "--timeout", "0", {"--timeout", "0.001..86400"}},
        {"bench", "--kv", "fp4", {"--kv \"fp4\"", "f32, bf16, fp8, fp8_ds_mla"}},
        {"bench", "--kv", "fp", {"--kv \"fp\"", "f32, bf16"}},
        {"run", "--device", "cuda", {"--device \"cuda\"", "use cpu"}},
        {"bench", "--device", "rocm", {"--device \"rocm\"", "one of cpu, cuda"}},
        {"bench", "--seed", "-1", {"--seed", "0 or more"}},
        {"bench", "--seed", "9223372036854775808", {"--seed", "0 or more"}},
        {"bench", "--csv", "", {"--csv", "not empty"}},
        {"bench", "--sed", "1", {"--sed", "did you mean --seed"}},
        {"bench", "--sedd=1", "x", {"no option --sedd", "did you mean --seed"}},
        {"bench", "--quantum", "x", {"no option --quantum", "kvspan bench --help"}},
        {"check", "--heads", "x", {"no option --heads for check", "kvspan check --help"}},
        {"check", "-z", "x", {"no option -z for check", "kvspan check --help"}},
        {"check", "--quick=1", "x", {"--quick", "takes no value"}},
        {"check", "x", "--seed", {"--seed", "needs a value"}},
        {"bench", "--warm", "--cold", {"--warm and --cold", "give one"}},
        {"serve", "x", "y", {"no command \"serve\"", "bench, check, plan or run"}},
    };
    for (size_t i = 0; i < UNIT_COUNT(c); i++) {
        kvs_options *o = (kvs_options *)state;
        kvs_error err = {0};
        assert_int_equal(PARSE(&o, &err, c[i].command, c[i].a, c[i].b), KVS_INVALID);
        assert_null(o);
        for (int k = 0; k < 2; k++) {
            if (strstr(err.text, c[i].says[k]) == NULL) {
                fail_msg("\"%s\" does not say \"%s\"", err.text, c[i].says[k]);
            }
        }
    }
    kvs_options *o = NULL;
    kvs_error err = {0};
    assert_int_equal(PARSE(&o, &err, "bench", "--deterministic", "--exchange", "ag_rs"),
                     KVS_INVALID);
    assert_non_null(strstr(err.text, "--exchange a2a"));
    char many[400] = "1";
    for (int i = 0; i < 64; i++) {
        strcat(many, ",1");
    }
    assert_int_equal(PARSE(&o, &err, "bench", "--len", many), KVS_LIMIT);
    many[strlen(many) - 2] = '\0';
    assert_int_equal(PARSE(&o, &err, "bench", "--len", many), KVS_OK);
    assert_int_equal(kvs_options_count(o, "len"), 64);
    kvs_options_free(o);
}

static void a_repeated_text_is_kept_as_often_as_it_is_given(void **state)
{
    (void)state;
    kvs_options *o = NULL;
    kvs_error err = {0};
    assert_int_equal(PARSE(&o, &err, "run", "--stop", "a,b", "-n", "5", "--stop=", "--stop", "c"),
                     KVS_INVALID); /* an empty one is none */
    assert_int_equal(PARSE(&o, &err, "run", "--stop", "a,b", "-n", "5", "--stop", "c"), KVS_OK);
    assert_int_equal(kvs_options_count(o, "stop"), 2);
    assert_string_equal(kvs_options_text(o, "stop", 0), "a,b");
    assert_string_equal(kvs_options_text(o, "stop", 1), "c");
    assert_int_equal(kvs_options_int(o, "max-new", 0), 5);
    kvs_options_free(o);
    setenv("KVS_STOP", "from, the environment", 1);
    assert_int_equal(PARSE(&o, &err, "run", "-n", "5", "x"), KVS_OK);
    assert_int_equal(kvs_options_count(o, "stop"), 1);
    assert_string_equal(kvs_options_text(o, "stop", 0), "from, the environment");
    kvs_options_free(o);
    assert_int_equal(PARSE(&o, &err, "run", "--stop", "z", "x"), KVS_OK); /* the line wins */
    assert_int_equal(kvs_options_count(o, "stop"), 1);
    assert_string_equal(kvs_options_text(o, "stop", 0), "z");
    kvs_options_free(o);
    unsetenv("KVS_STOP");
}

static void help_lists_every_option_of_the_command(void **state)
{
    (void)state;
    static const char *const commands[] = {"bench", "check", "plan", "run"};
    for (size_t c = 0; c < UNIT_COUNT(commands); c++) {
        static char text[20000];
        const size_t n = kvs_options_help(commands[c], text, sizeof text);
        assert_int_equal(n, strlen(text));
        const knob *k = NULL;
        for (size_t i = 0; (k = knob_at(i)) != NULL; i++) {
            char word[80];
            char var[64];
            char env[80];
            snprintf(word, sizeof word, " --%s ", k->name);
            snprintf(env, sizeof env, "%s\n", knob_env_name(k, var, sizeof var));
            if ((k->commands & knob_command(commands[c])) != 0) {
                assert_non_null(strstr(text, word));
                assert_non_null(strstr(text, env));
                assert_non_null(strstr(text, k->help));
            } else if (knob_find(k->name, knob_command(commands[c])) == NULL) {
                assert_null(strstr(text, word));
            }
        }
        char small[50];
        memset(small, 'x', sizeof small);
        assert_int_equal(kvs_options_help(commands[c], small, 20), n);
        assert_memory_equal(small, text, 19);
        assert_int_equal(small[19], 0);
        assert_int_equal(small[20], 'x');
        assert_int_equal(kvs_options_help(commands[c], NULL, 0), n);
    }
    assert_int_equal(kvs_options_help("serve", NULL, 0), 0);
    static char text[20000];
    kvs_options_help("plan", text, sizeof text);
    assert_non_null(strstr(text, "1..65536; default 1; KVS_DCP\n"));
    assert_non_null(strstr(text, "default the number of devices; KVS_TP\n"));
    assert_non_null(strstr(text, "  -m, --model DIR "));
    kvs_options_help("bench", text, sizeof text);
    assert_non_null(strstr(text, "one of 1, 2, 4, 8, 16, 32, 64; default 1; KVS_INTERLEAVE\n"));

    setenv("KVS_SEED", "rubbish", 1);
    kvs_options *o = NULL;
    assert_int_equal(PARSE(&o, NULL, "check", "--help"), KVS_OK);
    assert_int_equal(kvs_options_flag(o, "help"), 1);
    kvs_options_free(o);
    assert_int_equal(PARSE(&o, NULL, "check", "-h"), KVS_OK);
    assert_int_equal(kvs_options_flag(o, "help"), 1);
    kvs_options_free(o);
    assert_int_equal(PARSE(&o, NULL, "check", "x"), KVS_INVALID);
}

static void variables_serve_library_code(void **state)
{
    (void)state;
    assert_null(knob_env("cpu"));
    setenv("KVS_CPU", "avx2", 1);
    assert_string_equal(knob_env("cpu"), "avx2");
    setenv("KVS_CPU", "", 1);
    assert_null(knob_env("cpu"));
    assert_null(knob_env("no-such"));
    char var[64];
    assert_string_equal(knob_env_name(knob_find("dcp", 0), var, sizeof var), "KVS_DCP");
}

static void no_memory_is_an_error_without_a_leak(void **state)
{
    (void)state;
    const mem_stats s0 = mem_stats_get();
    for (int n = 1;; n++) {
        kvs_options *o = NULL;
        mem_fail_after(n);
        const kvs_status st = PARSE(&o, NULL, "bench", "attn", "--len", "1,2", "--kv", "bf16");
        const int fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(st, fired ? KVS_NOMEM : KVS_OK);
        kvs_options_free(o);
        assert_int_equal(mem_stats_get().n_live, s0.n_live);
        if (!fired) {
            assert_true(n > 10);
            break;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_is_sound),
        cmocka_unit_test_setup(line_over_variable_over_default, clean_environment),
        cmocka_unit_test_setup(every_kind_has_its_getter, clean_environment),
        cmocka_unit_test_setup(flags_read_words_from_variables, clean_environment),
        cmocka_unit_test_setup(sizes_have_units, clean_environment),
        cmocka_unit_test_setup(letters_stand_for_their_options, clean_environment),
        cmocka_unit_test_setup(refusals_say_what_would_work, clean_environment),
        cmocka_unit_test_setup(a_repeated_text_is_kept_as_often_as_it_is_given, clean_environment),
        cmocka_unit_test_setup(help_lists_every_option_of_the_command, clean_environment),
        cmocka_unit_test_setup(variables_serve_library_code, clean_environment),
        cmocka_unit_test_setup(no_memory_is_an_error_without_a_leak, clean_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
