/* JSON text and the buffer under it, read back by another library. */
#include "unit/unit.h"

#include <jansson.h>
#include <locale.h>
#include <math.h>

#include "base/jsonw.h"
#include "base/mem.h"
#include "base/rng.h"

static json_t *finish(jsonw *w)
{
    const char *text = NULL;
    kvs_error err = {0};
    if (jsonw_finish(w, &text, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    json_error_t je;
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &je);
    if (j == NULL) {
        fail_msg("%s at byte %d of %s", je.text, je.position, text);
    }
    jsonw_fini(w);
    return j;
}

static void every_kind_reads_back(void **state)
{
    (void)state;
    jsonw w;
    jsonw_init(&w);
    jsonw_obj(&w, NULL);
    jsonw_int(&w, "min", INT64_MIN);
    jsonw_int(&w, "max", INT64_MAX);
    jsonw_bool(&w, "yes", true);
    jsonw_bool(&w, "no", false);
    jsonw_null(&w, "none");
    jsonw_text(&w, "missing", NULL);
    jsonw_text(&w, "text", "a \"b\" \\ \n \t \x7f / \xC3\xA9");
    jsonw_obj(&w, "empty");
    jsonw_end(&w);
    jsonw_arr(&w, "lens");
    for (int i = 0; i < 3; i++) {
        jsonw_int(&w, NULL, i);
    }
    jsonw_arr(&w, NULL);
    jsonw_end(&w);
    jsonw_obj(&w, NULL);
    jsonw_int(&w, "x", 1);
    jsonw_int(&w, "y", 2);
    jsonw_end(&w);
    jsonw_end(&w);
    jsonw_end(&w);
    json_t *j = finish(&w);
    assert_int_equal(json_object_size(j), 9);
    assert_true(json_integer_value(json_object_get(j, "min")) == INT64_MIN);
    assert_true(json_integer_value(json_object_get(j, "max")) == INT64_MAX);
    assert_true(json_is_true(json_object_get(j, "yes")));
    assert_true(json_is_false(json_object_get(j, "no")));
    assert_true(json_is_null(json_object_get(j, "none")));
    assert_true(json_is_null(json_object_get(j, "missing")));
    assert_string_equal(json_string_value(json_object_get(j, "text")),
                        "a \"b\" \\ \n \t \x7f / \xC3\xA9");
    assert_int_equal(json_object_size(json_object_get(j, "empty")), 0);
    const json_t *lens = json_object_get(j, "lens");
    assert_int_equal(json_array_size(lens), 5);
    assert_int_equal(json_integer_value(json_array_get(lens, 2)), 2);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(lens, 4), "y")), 2);
    json_decref(j);
}

static void every_byte_gives_valid_utf8(void **state)
{
    (void)state;
    for (int a = 0; a < 256; a++) {
        for (int b = 0; b < 256; b++) {
            const char s[3] = {(char)a, (char)b, 'z'};
            jsonw w;
            jsonw_init(&w);
            jsonw_text_n(&w, NULL, s, 3);
            json_t *j = finish(&w);
            const char *got = json_string_value(j);
            const size_t n = json_string_length(j);
            const int valid =
                (a < 0x80 && b < 0x80) || (a >= 0xC2 && a <= 0xDF && b >= 0x80 && b <= 0xBF);
            if (valid) {
                assert_int_equal(n, 3);
                assert_memory_equal(got, s, 3);
            } else {
                assert_true(n >= 5);
                assert_non_null(strstr(got + (a == 0), "\xEF\xBF\xBD"));
            }
            assert_int_equal(got[n - 1], 'z');
            json_decref(j);
        }
    }
    static const struct {
        const char *s;
        int n_bad;
    } c[] = {{"\xE2\x82\xAC", 0}, {"\xF0\x9F\x98\x80", 0}, {"\xED\xA0\x80", 3},
             {"\xE0\x80\x80", 3}, {"\xF4\x90\x80\x80", 4}, {"\xF0\x80\x80\x80", 4},
             {"\xEF\xBF\xBF", 0}, {"\xF4\x8F\xBF\xBF", 0}, {"\xE2\x82", 2},
             {"\xF0\x9F\x98", 3}, {"\xF5\x80\x80\x80", 4}, {"\xC0\x80", 2}};
    for (size_t i = 0; i < UNIT_COUNT(c); i++) {
        jsonw w;
        jsonw_init(&w);
        jsonw_text(&w, NULL, c[i].s);
        json_t *j = finish(&w);
        if (c[i].n_bad == 0) {
            assert_string_equal(json_string_value(j), c[i].s);
        } else {
            assert_int_equal(json_string_length(j), 3 * c[i].n_bad);
        }
        json_decref(j);
    }
}

/* A sequence cut by the end of the text: the bytes behind it, which would complete it, are not its. */
static void text_ends_where_its_length_says(void **state)
{
    (void)state;
    static const char whole[] = "\xF0\x9F\x98\x80";
    for (size_t n = 1; n <= 4; n++) {
        jsonw w;
        jsonw_init(&w);
        jsonw_text_n(&w, NULL, whole, n);
        json_t *j = finish(&w);
        assert_int_equal(json_string_length(j), n == 4 ? 4 : 3 * n);
        json_decref(j);
    }
}

static void numbers_read_back_exactly(void **state)
{
    (void)state;
    static const double fixed[] = {
        0,   -0.0, 1, 0.1, 1e300, 5e-324, 1.7976931348623157e308, 1.0 / 3, 123456789012345680.0,
        2.5, -1e-7};
    for (int round = 0; round < 2; round++) {
        const int other = round == 1 && setlocale(LC_ALL, "de_DE.UTF-8") != NULL;
        for (int i = 0; i < 2000; i++) {
            double v = 0;
            if (i < (int)UNIT_COUNT(fixed)) {
                v = fixed[i];
            } else {
                const uint64_t bits = rng_u64(4, 0, (uint64_t)i);
                memcpy(&v, &bits, sizeof v);
            }
            if (!isfinite(v)) {
                continue;
            }
            jsonw w;
            jsonw_init(&w);
            jsonw_real(&w, NULL, v);
            if (other) {
                setlocale(LC_ALL, "C");
            }
            json_t *j = finish(&w);
            assert_true(json_number_value(j) == v);
            json_decref(j);
            if (other) {
                setlocale(LC_ALL, "de_DE.UTF-8");
            }
        }
    }
    setlocale(LC_ALL, "C");
    static const double none[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < UNIT_COUNT(none); i++) {
        jsonw w;
        jsonw_init(&w);
        jsonw_real(&w, NULL, none[i]);
        json_t *j = finish(&w);
        assert_true(json_is_null(j));
        json_decref(j);
    }
    jsonw w;
    jsonw_init(&w);
    jsonw_real(&w, NULL, 0.1);
    const char *text = NULL;
    assert_int_equal(jsonw_finish(&w, &text, NULL), KVS_OK);
    assert_string_equal(text, "0.1\n");
    jsonw_fini(&w);
    jsonw_init(&w);
    jsonw_uint(&w, NULL, UINT64_MAX);
    assert_int_equal(jsonw_finish(&w, &text, NULL), KVS_OK);
    assert_string_equal(text, "18446744073709551615\n");
    jsonw_fini(&w);
}

static void misuse_is_reported(void **state)
{
    (void)state;
    for (int c = 0; c < 8; c++) {
        jsonw w;
        jsonw_init(&w);
        switch (c) {
        case 0:
            break; /* nothing at all */
        case 1:
            jsonw_obj(&w, NULL); /* not ended */
            break;
        case 2:
            jsonw_end(&w);
            break;
        case 3:
            jsonw_int(&w, "key", 1);
            break;
        case 4:
            jsonw_obj(&w, NULL);
            jsonw_int(&w, NULL, 1);
            jsonw_end(&w);
            break;
        case 5:
            jsonw_int(&w, NULL, 1);
            jsonw_int(&w, NULL, 2);
            break;
        case 6:
            jsonw_arr(&w, NULL);
            jsonw_int(&w, "key", 1);
            jsonw_end(&w);
            break;
        default:
            for (int i = 0; i < JSONW_DEPTH + 1; i++) {
                jsonw_arr(&w, NULL);
            }
            for (int i = 0; i < JSONW_DEPTH; i++) {
                jsonw_end(&w);
            }
            break;
        }
        const char *text = NULL;
        assert_int_equal(jsonw_finish(&w, &text, NULL), KVS_INTERNAL);
        assert_null(text);
        jsonw_fini(&w);
    }
    jsonw w;
    jsonw_init(&w);
    for (int i = 0; i < JSONW_DEPTH; i++) {
        jsonw_arr(&w, NULL);
    }
    for (int i = 0; i < JSONW_DEPTH; i++) {
        jsonw_end(&w);
    }
    json_decref(finish(&w));
}

static void running_out_of_memory_is_reported(void **state)
{
    (void)state;
    const mem_stats s0 = mem_stats_get();
    for (int n = 1;; n++) {
        jsonw w;
        jsonw_init(&w);
        mem_fail_after(n);
        jsonw_arr(&w, NULL);
        for (int i = 0; i < 1000; i++) {
            jsonw_int(&w, NULL, i);
        }
        jsonw_end(&w);
        const char *text = NULL;
        const kvs_status st = jsonw_finish(&w, &text, NULL);
        const int fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(st, fired ? KVS_NOMEM : KVS_OK);
        jsonw_fini(&w);
        assert_int_equal(mem_stats_get().n_live, s0.n_live);
        if (!fired) {
            assert_true(n > 3);
            break;
        }
    }
}

static void a_buffer_grows_and_stays_terminated(void **state)
{
    (void)state;
    textbuf b;
    buf_init(&b);
    assert_string_equal(buf_str(&b), "");
    buf_add(&b, "", 0);
    char *want = malloc(100001);
    for (size_t i = 0; i < 100000; i++) {
        const char c = (char)('a' + i % 26);
        want[i] = c;
        if (i % 3 == 0) {
            buf_char(&b, c);
        } else if (i % 3 == 1) {
            buf_printf(&b, "%c", c);
        } else {
            const char s[2] = {c, '\0'};
            buf_text(&b, s);
        }
        assert_int_equal(b.n, i + 1);
        assert_int_equal(b.data[b.n], 0);
    }
    want[100000] = '\0';
    assert_string_equal(buf_str(&b), want);
    buf_clear(&b);
    assert_string_equal(buf_str(&b), "");
    buf_printf(&b, "%s", want);
    assert_string_equal(buf_str(&b), want);
    mem_fail_after(1);
    for (int i = 0; i < 3; i++) {
        buf_text(&b, want);
    }
    mem_fail_after(0);
    buf_text(&b, "later");
    assert_true(b.failed);
    assert_string_equal(buf_str(&b) + b.n - 3, want + 99997);
    buf_clear(&b);
    assert_false(b.failed);
    buf_fini(&b);
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_reads_back),
        cmocka_unit_test(every_byte_gives_valid_utf8),
        cmocka_unit_test(text_ends_where_its_length_says),
        cmocka_unit_test(numbers_read_back_exactly),
        cmocka_unit_test(misuse_is_reported),
        cmocka_unit_test(running_out_of_memory_is_reported),
        cmocka_unit_test(a_buffer_grows_and_stays_terminated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
