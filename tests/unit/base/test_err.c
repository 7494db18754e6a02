/* Errors: what err_set stores, how long texts are cut, TRY and TRY_GOTO. */
#include "unit/unit.h"

#include "base/err.h"

static void set_fills_every_field(void **state)
{
    (void)state;
    kvs_error err;
    memset(&err, 0x5A, sizeof err);
    const kvs_status st = err_set(&err, KVS_INVALID, "dcp %d: use 1, 2, 4 or 8", 3);
    const int line = __LINE__ - 1;
    assert_int_equal(st, KVS_INVALID);
    assert_int_equal(err.code, KVS_INVALID);
    assert_int_equal(err.line, line);
    assert_string_equal(err.file, "test_err.c");
    assert_int_equal(err.pos, -1);
    assert_string_equal(err.text, "dcp 3: use 1, 2, 4 or 8");
    err_at(&err, INT64_C(5000000000));
    assert_true(err.pos == INT64_C(5000000000));
}

static void null_is_allowed(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, KVS_IO, "x"), KVS_IO);
    err_at(NULL, 3);
    err_prefix(NULL, "x");
}

static void long_text_is_cut(void **state)
{
    (void)state;
    kvs_error err;
    char text[400];
    for (size_t n = 225; n < sizeof text; n++) {
        memset(text, 'a', n);
        text[n] = '\0';
        err_set(&err, KVS_IO, "%s", text);
        if (n < sizeof err.text) {
            assert_string_equal(err.text, text);
            continue;
        }
        assert_int_equal(strlen(err.text), sizeof err.text - 1);
        assert_string_equal(err.text + sizeof err.text - 5, "a...");
    }
}

static void prefix_keeps_code_and_place(void **state)
{
    (void)state;
    kvs_error err;
    err_set(&err, KVS_FORMAT, "page 4 is cut");
    const int32_t line = err.line;
    err_at(&err, 77);
    err_prefix(&err, "%s", "cache.kvs");
    assert_string_equal(err.text, "cache.kvs: page 4 is cut");
    assert_int_equal(err.code, KVS_FORMAT);
    assert_int_equal(err.line, line);
    assert_int_equal(err.pos, 77);
    for (int i = 0; i < 300; i++) {
        err_prefix(&err, "p%d", i);
        assert_true(strlen(err.text) < sizeof err.text);
    }
    assert_string_equal(err.text + sizeof err.text - 4, "...");
    err_set(&err, KVS_FORMAT, "<%s>", err.text);
    assert_int_equal(err.text[0], '<');
    assert_int_equal(err.text[1], 'p');
}

static kvs_status pass_on(kvs_status in, int *after)
{
    TRY(in);
    *after = 1;
    return KVS_OK;
}

static kvs_status clean_up(kvs_status in, int *cleaned, int *after)
{
    kvs_status st = KVS_OK;
    TRY_GOTO(in, out);
    *after = 1;
out:
    *cleaned = 1;
    return st;
}

static void try_returns_on_failure_only(void **state)
{
    (void)state;
    static const kvs_status all[] = {
#define VALUE(name, value, text) KVS_##name,
        KVS_STATUS_LIST(VALUE)
#undef VALUE
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int after = 0;
        int cleaned = 0;
        int after_goto = 0;
        const kvs_status st = pass_on(all[i], &after);
        const kvs_status st_goto = clean_up(all[i], &cleaned, &after_goto);
        assert_int_equal(after, all[i] >= 0);
        assert_int_equal(after_goto, all[i] >= 0);
        assert_int_equal(cleaned, 1);
        assert_int_equal(st, all[i] < 0 ? all[i] : KVS_OK);
        assert_int_equal(st_goto, all[i]);
    }
}

static void every_status_has_name_and_text(void **state)
{
    (void)state;
    assert_string_equal(kvs_status_name(KVS_OK), "KVS_OK");
    assert_string_equal(kvs_status_name((kvs_status)-12), "KVS_INTERNAL");
    assert_string_equal(kvs_status_text((kvs_status)-10), "another rank failed");
    assert_string_equal(kvs_status_text((kvs_status)1), "nothing to do");
    assert_string_equal(kvs_status_name((kvs_status)-13), "KVS_?");
    assert_string_equal(kvs_status_text((kvs_status)2), "unknown status");
    int major = -1;
    int minor = -1;
    int patch = -1;
    char tail = '\0';
    assert_int_equal(sscanf(kvs_version(), "%d.%d.%d%c", &major, &minor, &patch, &tail), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(set_fills_every_field),
        cmocka_unit_test(null_is_allowed),
        cmocka_unit_test(long_text_is_cut),
        cmocka_unit_test(prefix_keeps_code_and_place),
        cmocka_unit_test(try_returns_on_failure_only),
        cmocka_unit_test(every_status_has_name_and_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
