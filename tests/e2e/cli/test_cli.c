/* The program as a whole: commands, usage errors, help, exit codes. */
#include "prog.h"

#include <unistd.h>

static void help_and_version_go_to_standard_output(void **state)
{
    (void)state;
    static const char *const words[] = {"--help", "-h", "help"};
    for (size_t i = 0; i < UNIT_COUNT(words); i++) {
        prog p = RUN(words[i]);
        assert_int_equal(p.code, 0);
        assert_string_equal(p.err, "");
        assert_non_null(strstr(p.out, "usage: kvspan COMMAND"));
        assert_non_null(strstr(p.out, "130 interrupted"));
        prog_free(&p);
    }
    prog p = RUN("--version");
    assert_int_equal(p.code, 0);
    int major = -1;
    int minor = -1;
    int patch = -1;
    char end = 0;
    assert_int_equal(sscanf(p.out, "kvspan %d.%d.%d%c", &major, &minor, &patch, &end), 4);
    assert_int_equal(end, '\n');
    prog_free(&p);
}

static void every_command_has_a_help_with_ranges_and_variables(void **state)
{
    (void)state;
    static const char *const commands[] = {"bench", "check", "plan"};
    for (size_t i = 0; i < UNIT_COUNT(commands); i++) {
        prog p = RUN_ENV("KVS_SEED=rubbish", commands[i], "--help");
        assert_int_equal(p.code, 0);
        assert_string_equal(p.err, "");
        char usage[64];
        snprintf(usage, sizeof usage, "usage: kvspan %s", commands[i]);
        assert_ptr_equal(strstr(p.out, usage), p.out);
        assert_non_null(strstr(p.out, "default"));
        assert_non_null(strstr(p.out, "KVS_JSON"));
        prog_free(&p);
    }
}

static void usage_errors_are_one_line_and_exit_code_2(void **state)
{
    (void)state;
    prog p = prog_run(NULL, (const char *const[]){NULL});
    assert_int_equal(p.code, 2);
    assert_string_equal(p.out, "");
    assert_non_null(strstr(p.err, "usage: kvspan COMMAND"));
    prog_free(&p);
    prog_expect(RUN("pla"), 2, "no command \"pla\": use ");
    prog_expect(RUN("serve", "-m", "x"), 2, "serve: this version does not have it");
    prog_expect(RUN("serve"), 2, "serve: this version does not have it");
    prog_expect(RUN("plan", "--presett=x"), 2, "did you mean --preset");
    prog_expect(RUN("plan", "--preset", "glm-5", "--seqs", "0"), 2, "--seqs \"0\": use 1..65536");
    prog_expect(RUN("plan", "--preset", "glm-5", "word"), 2, "unexpected word \"word\"");
    prog_expect(RUN("plan", "--preset", "glm-5", "--csv", "f"), 2, "no option --csv for plan");
    prog_expect(RUN("plan", "--preset", "glm-5", "--log", "loud"), 2, "loud");
    prog_expect(RUN_ENV("KVS_SEQS=x", "plan", "--preset", "glm-5"), 2, "KVS_SEQS \"x\"");
}

static void a_full_standard_output_is_an_error(void **state)
{
    (void)state;
    if (access("/dev/full", W_OK) != 0) {
        skip();
    }
    char command[600];
    snprintf(command, sizeof command, "%s plan --preset glm-5 >/dev/full 2>/dev/null", prog_path);
    const int status = system(command);
    assert_int_equal(WEXITSTATUS(status), 1);
}

int main(int argc, char **argv)
{
    prog_init(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(help_and_version_go_to_standard_output),
        cmocka_unit_test(every_command_has_a_help_with_ranges_and_variables),
        cmocka_unit_test(usage_errors_are_one_line_and_exit_code_2),
        cmocka_unit_test(a_full_standard_output_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
