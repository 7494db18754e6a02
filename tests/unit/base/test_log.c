/* Logging: level specs, who gets a line, cutting, rate limit, recursion, threads, stderr form. */
#include "unit/unit.h"

#include <pthread.h>
#include <unistd.h>

#include "base/log.h"

typedef struct catch
{
    int n;
    kvs_log_level level;
    kvs_log_sys sys;
    char text[2000];
    int inside; /* plain: two callers at once would be a race */
    int overlap;
    int recurse;
}
catch;

static void on_line(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text)
{
    catch *c = ctx;
    c->overlap += c->inside;
    c->inside = 1;
    c->n++;
    c->level = level;
    c->sys = sys;
    snprintf(c->text, sizeof c->text, "%s", text);
    if (c->recurse) {
        LOG(ERROR, CORE, "from inside");
    }
    c->inside = 0;
}

static catch g_catch;

static int begin(void **state)
{
    (void)state;
    memset(&g_catch, 0, sizeof g_catch);
    const kvs_logger l = {on_line, &g_catch};
    kvs_log_set(&l);
    return kvs_log_levels("warn", NULL) == KVS_OK ? 0 : -1;
}

static void levels_select_lines(void **state)
{
    (void)state;
    LOG(INFO, KV, "no");
    LOG(DEBUG, KV, "no");
    assert_int_equal(g_catch.n, 0);
    LOG(WARN, KV, "pool of %d", 7);
    assert_int_equal(g_catch.n, 1);
    assert_string_equal(g_catch.text, "pool of 7");
    assert_int_equal(g_catch.level, KVS_LOG_WARN);
    assert_int_equal(g_catch.sys, KVS_LOG_KV);

    assert_int_equal(kvs_log_levels("error,kv=debug,comm=off", NULL), KVS_OK);
    static const struct {
        kvs_log_level level;
        kvs_log_sys sys;
        int want;
    } c[] = {
        {KVS_LOG_ERROR, KVS_LOG_CORE, 1}, {KVS_LOG_WARN, KVS_LOG_CORE, 0},
        {KVS_LOG_DEBUG, KVS_LOG_KV, 1},   {KVS_LOG_ERROR, KVS_LOG_COMM, 0},
        {KVS_LOG_ERROR, KVS_LOG_HTTP, 1}, {KVS_LOG_WARN, KVS_LOG_HTTP, 0},
    };
    for (size_t i = 0; i < UNIT_COUNT(c); i++) {
        assert_int_equal(log_wants(c[i].level, c[i].sys), c[i].want);
        const int before = g_catch.n;
        log_write(c[i].level, c[i].sys, "x");
        assert_int_equal(g_catch.n - before, c[i].want);
    }
    /* A spec of subsystems only leaves the others alone. */
    assert_int_equal(kvs_log_levels("comm=info", NULL), KVS_OK);
    assert_true(log_wants(KVS_LOG_INFO, KVS_LOG_COMM));
    assert_true(log_wants(KVS_LOG_DEBUG, KVS_LOG_KV));
    assert_false(log_wants(KVS_LOG_WARN, KVS_LOG_CORE));
}

static void bad_specs_change_nothing(void **state)
{
    (void)state;
    static const char *const bad[] = {"",           "loud",     "kv=loud", "what=info",
                                      "info,debug", "info,",    "info,kv", "=info",
                                      "kv=",        ",kv=info", "info kv", "INFO"};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        kvs_error err = {0};
        assert_int_equal(kvs_log_levels(bad[i], &err), KVS_INVALID);
        assert_non_null(strstr(err.text, bad[i]));
        for (int s = 0; s < KVS_LOG_N_SYS; s++) {
            assert_true(log_wants(KVS_LOG_WARN, (kvs_log_sys)s));
            assert_false(log_wants(KVS_LOG_INFO, (kvs_log_sys)s));
        }
    }
}

static void arguments_are_lazy_and_lines_are_cut(void **state)
{
    (void)state;
    int n_eval = 0;
    LOG(DEBUG, KV, "%d", ++n_eval);
    assert_int_equal(n_eval, 0);
    LOG(ERROR, KV, "%d", ++n_eval);
    assert_int_equal(n_eval, 1);
    char big[1500];
    memset(big, 'b', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    LOG(ERROR, KV, "%s", big);
    assert_int_equal(strlen(g_catch.text), 999);
}

static void the_gate_opens_once_a_second(void **state)
{
    (void)state;
    log_gate g = {0};
    const int64_t s = INT64_C(1000000000);
    int64_t dropped = -1;
    assert_true(log_gate_open(&g, 5 * s, &dropped));
    assert_int_equal(dropped, 0);
    assert_false(log_gate_open(&g, 5 * s, &dropped));
    assert_false(log_gate_open(&g, 6 * s - 1, &dropped));
    assert_true(log_gate_open(&g, 6 * s, &dropped));
    assert_int_equal(dropped, 2);
    assert_true(log_gate_open(&g, 9 * s, &dropped));
    assert_int_equal(dropped, 0);

    for (int i = 0; i < 100; i++) {
        LOG_RATE(WARN, COMM, "rank %d is late", i);
    }
    assert_true(g_catch.n >= 1 && g_catch.n < 10);
    assert_int_equal(strncmp(g_catch.text, "rank ", 5), 0);

    log_gate h = {0};
    char big[1500];
    memset(big, 'b', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    atomic_store(&h.n_dropped, 41);
    log_write_rate(&h, KVS_LOG_WARN, KVS_LOG_KV, "%s", big);
    assert_string_equal(g_catch.text + strlen(g_catch.text) - 19, "b (41 more like it)");
    atomic_store(&h.next_ns, 0);
    atomic_store(&h.n_dropped, 3);
    log_write_rate(&h, KVS_LOG_WARN, KVS_LOG_KV, "short");
    assert_string_equal(g_catch.text, "short (3 more like it)");
}

static void a_logger_that_logs_does_not_hang(void **state)
{
    (void)state;
    g_catch.recurse = 1;
    LOG(ERROR, KV, "outer");
    assert_int_equal(g_catch.n, 1);
    assert_string_equal(g_catch.text, "outer");
    g_catch.recurse = 0;
    LOG(ERROR, KV, "again");
    assert_int_equal(g_catch.n, 2);
}

static void silence_is_possible(void **state)
{
    (void)state;
    const kvs_logger none = {NULL, NULL};
    kvs_log_set(&none);
    LOG(ERROR, KV, "nobody");
    assert_int_equal(g_catch.n, 0);
}

static void *talk(void *arg)
{
    (void)arg;
    for (int i = 0; i < 500; i++) {
        LOG(ERROR, KV, "%d", i);
        if (i % 100 == 0) {
            (void)kvs_log_levels("info,kv=error", NULL);
        }
    }
    return NULL;
}

static void threads_take_turns(void **state)
{
    (void)state;
    pthread_t t[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&t[i], NULL, talk, NULL), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(t[i], NULL);
    }
    assert_int_equal(g_catch.n, 2000);
    assert_int_equal(g_catch.overlap, 0);
}

/* What a child process that runs this program with `mode` writes to standard error. */
static void child_stderr(const char *env, const char *mode, char *out, size_t cap)
{
    char cmd[600];
    char self[300];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    snprintf(cmd, sizeof cmd, "env -u KVS_LOG -u JOURNAL_STREAM %s '%s' %s 2>&1 >/dev/null", env,
             self, mode);
    FILE *p = popen(cmd, "r");
    assert_non_null(p);
    const size_t got = fread(out, 1, cap - 1, p);
    out[got] = '\0';
    assert_int_equal(pclose(p), 0);
}

static void standard_error_is_the_default(void **state)
{
    (void)state;
    char out[4000];
    child_stderr("", "speak", out, sizeof out);
    assert_string_equal(out, "kvspan: error: kv: e\nkvspan: warn: kv: w\n");
    child_stderr("KVS_LOG=error,kv=debug", "speak", out, sizeof out);
    assert_string_equal(out, "kvspan: error: kv: e\nkvspan: warn: kv: w\nkvspan: info: kv: i\n"
                             "kvspan: debug: kv: d\n");
    child_stderr("JOURNAL_STREAM=8:1", "speak", out, sizeof out);
    assert_string_equal(out, "<3>kvspan: error: kv: e\n<4>kvspan: warn: kv: w\n");
    child_stderr("KVS_LOG=loud", "speak", out, sizeof out);
    assert_int_equal(strncmp(out, "kvspan: warn: core: log levels \"loud\"", 37), 0);
    assert_non_null(strstr(out, "kvspan: error: kv: e\n"));
}

static void words_of_levels_and_subsystems(void **state)
{
    (void)state;
    assert_string_equal(kvs_log_level_name(KVS_LOG_WARN), "warn");
    assert_string_equal(kvs_log_level_name((kvs_log_level)5), "?");
    assert_string_equal(kvs_log_sys_name(KVS_LOG_SCHED), "sched");
    assert_string_equal(kvs_log_sys_name(KVS_LOG_N_SYS), "?");
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "speak") == 0) {
        LOG(ERROR, KV, "e");
        LOG(WARN, KV, "w");
        LOG(INFO, KV, "i");
        LOG(DEBUG, KV, "d");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(levels_select_lines, begin),
        cmocka_unit_test_setup(bad_specs_change_nothing, begin),
        cmocka_unit_test_setup(arguments_are_lazy_and_lines_are_cut, begin),
        cmocka_unit_test_setup(the_gate_opens_once_a_second, begin),
        cmocka_unit_test_setup(a_logger_that_logs_does_not_hang, begin),
        cmocka_unit_test_setup(silence_is_possible, begin),
        cmocka_unit_test_setup(threads_take_turns, begin),
        cmocka_unit_test(standard_error_is_the_default),
        cmocka_unit_test(words_of_levels_and_subsystems),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
