/* --device cuda where there is none, or in a build without CUDA: exit code 1 and a line that says what is
 * missing; options that have no meaning there are usage errors. The device is hidden where there is one. */
#include "prog.h"

static const char hidden[] = "CUDA_VISIBLE_DEVICES=";

static void no_device_is_said(const char *const *words)
{
    prog p = prog_run(hidden, words);
    assert_int_equal(p.code, 1);
    const int built = strstr(p.err, "kvspan: no CUDA device here: ") != NULL;
    const int bare = strstr(p.err, "kvspan: this build has no CUDA kernels: ") != NULL;
    if (built + bare != 1 || p.out[0] != '\0') {
        fail_msg("%s%s", p.out, p.err);
    }
    prog_free(&p);
}

static void a_missing_device_is_exit_code_1(void **state)
{
    (void)state;
    no_device_is_said((const char *const[]){"check", "--device", "cuda", "--quick", NULL});
    no_device_is_said((const char *const[]){"check", "--device", "cuda", "--op", "merge", NULL});
    no_device_is_said((const char *const[]){"bench", "attn", "--device", "cuda", NULL});
    no_device_is_said((const char *const[]){"bench", "--device", "cuda", NULL});
    no_device_is_said((const char *const[]){"check", "--comm", "--device", "cuda", NULL});
    prog p = RUN_ENV("KVS_DEVICE=cuda", "check", "--op", "merge", "--quick");
    assert_true(p.code == 1 || p.code == 0);
    assert_true(strstr(p.err, "CUDA") != NULL || strstr(p.out, "sm90") != NULL);
    prog_free(&p);
}

static void what_does_not_go_with_a_device_is_a_usage_error(void **state)
{
    (void)state;
    prog_expect(RUN_ENV(hidden, "check", "--device", "cuda", "--selftest"), 2, "--selftest");
    prog_expect(RUN_ENV(hidden, "check", "--device", "cuda", "--comm", "--op", "merge"), 2, "--comm");
    prog_expect(RUN_ENV(hidden, "check", "--device", "cuda", "--bench"), 2, "--bench");
    prog_expect(RUN_ENV(hidden, "check", "--device", "cuda", "--cpu", "avx2"), 2, "--cpu");
    prog_expect(RUN_ENV(hidden, "bench", "write", "--device", "cuda"), 2, "use attn, index, select");
    prog_expect(RUN_ENV(hidden, "bench", "attn", "--device", "cuda", "--warm"), 2, "warm");
    prog_expect(RUN_ENV(hidden, "bench", "attn", "--device", "cuda", "--deterministic"), 2,
                "--kernels attn=");
    prog_expect(RUN_ENV(hidden, "bench", "decode", "--device", "cuda"), 2, "runs on the CPU");
    prog_expect(RUN_ENV(hidden, "run", "--device", "cuda", "-p", "x"), 2, "use cpu");
    prog_expect(RUN_ENV(hidden, "check", "--device", "rocm"), 2, "use one of cpu, cuda");
}

int main(int argc, char **argv)
{
    prog_init(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_device_is_exit_code_1),
        cmocka_unit_test(what_does_not_go_with_a_device_is_a_usage_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
