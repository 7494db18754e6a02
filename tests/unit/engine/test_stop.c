/* Stop texts: every way to cut a text into pieces gives what a search over the whole text gives. */
#include "base/rng.h"
#include "kvspan/engine.h"
#include "unit/unit.h"

/* Where the text must end: the match that completes first, the longest of those; SIZE_MAX: none. */
static size_t find_end(const char *text, size_t n, const char *const *stop, int32_t n_stop)
{
    for (size_t end = 1; end <= n; end++) {
        size_t best = 0;
        for (int32_t i = 0; i < n_stop; i++) {
            const size_t len = strlen(stop[i]);
            if (len <= end && len > best && memcmp(text + end - len, stop[i], len) == 0) {
                best = len;
            }
        }
        if (best > 0) {
            return end - best;
        }
    }
    return SIZE_MAX;
}

/* Feeds text in pieces of given lengths; returns what was shown. */
static size_t feed(const char *text, size_t n, const char *const *stop, int32_t n_stop, rng *g,
                   char *out, int *stopped)
{
    kvs_stop *s = NULL;
    kvs_error err = {0};
    if (kvs_stop_new(&s, stop, n_stop, &err) < 0) {
        fail_msg("%s", err.text);
    }
    size_t shown = 0;
    const char *p = NULL;
    size_t k = 0;
    *stopped = 0;
    for (size_t at = 0; at < n;) {
        size_t len = (size_t)rng_next_below(g, 4);
        len = len > n - at ? n - at : len;
        *stopped = kvs_stop_feed(s, text + at, len, &p, &k);
        assert_true(*stopped >= 0);
        memcpy(out + shown, p, k);
        shown += k;
        at += len;
        if (*stopped == 1) {
            assert_int_equal(kvs_stop_feed(s, "x", 1, &p, &k), 1);
            assert_int_equal(k, 0);
            break;
        }
    }
    kvs_stop_flush(s, &p, &k);
    memcpy(out + shown, p, k);
    shown += k;
    kvs_stop_flush(s, &p, &k);
    assert_int_equal(k, 0);
    kvs_stop_free(s);
    return shown;
}

static void pieces_do_not_matter(void **state)
{
    (void)state;
    static const char *const sets[][4] = {
        {"ab"},       {"aab", "b"},        {"abab", "ba"}, {"aaa"}, {"abcabd", "cab"},
        {"b", "abc"}, {"abba", "bb", "a"}, {"d"},
    };
    rng g = rng_init(4, 2);
    for (int32_t run = 0; run < 3000; run++) {
        const char *const *stop = sets[(size_t)run % UNIT_COUNT(sets)];
        int32_t n_stop = 0;
        while (n_stop < 4 && stop[n_stop] != NULL) {
            n_stop++;
        }
        char text[24], out[64];
        const size_t n = (size_t)rng_next_below(&g, 20);
        for (size_t i = 0; i < n; i++) {
            text[i] = (char)('a' + (char)rng_next_below(&g, 3));
        }
        const size_t end = find_end(text, n, stop, n_stop);
        const size_t want = end == SIZE_MAX ? n : end;
        int stopped = 0;
        const size_t shown = feed(text, n, stop, n_stop, &g, out, &stopped);
        assert_int_equal(stopped, end != SIZE_MAX);
        if (shown != want || memcmp(out, text, shown) != 0) {
            fail_msg("\"%.*s\" shows \"%.*s\"", (int)n, text, (int)shown, out);
        }
    }
}

static void text_is_held_only_while_it_may_become_a_stop(void **state)
{
    (void)state;
    static const char *const stop[] = {"</end>", "\n\n"};
    kvs_stop *s = NULL;
    const char *p = NULL;
    size_t k = 0;
    assert_int_equal(kvs_stop_new(&s, stop, 2, NULL), KVS_OK);
    assert_int_equal(kvs_stop_feed(s, "abc</en", 7, &p, &k), 0);
    assert_int_equal(k, 3);
    assert_memory_equal(p, "abc", 3);
    assert_int_equal(kvs_stop_feed(s, "d</", 3, &p, &k), 0);
    assert_int_equal(k, 5);
    assert_memory_equal(p, "</end", 5);
    assert_int_equal(kvs_stop_feed(s, "end>zzz", 7, &p, &k), 1);
    assert_int_equal(k, 0);
    kvs_stop_flush(s, &p, &k);
    assert_int_equal(k, 0);
    kvs_stop_free(s);
    assert_int_equal(kvs_stop_new(&s, NULL, 0, NULL), KVS_OK); /* none: all is shown at once */
    assert_int_equal(kvs_stop_feed(s, "</en", 4, &p, &k), 0);
    assert_int_equal(k, 4);
    kvs_stop_free(s);
}

static void refusals_name_the_bound(void **state)
{
    (void)state;
    static char many[KVS_MAX_STOP_BYTES + 2];
    const char *texts[KVS_MAX_STOP_TEXTS + 1];
    kvs_stop *s = NULL;
    kvs_error err = {0};
    for (int32_t i = 0; i <= KVS_MAX_STOP_TEXTS; i++) {
        texts[i] = "x";
    }
    assert_int_equal(kvs_stop_new(&s, texts, KVS_MAX_STOP_TEXTS + 1, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "17 stop texts: give 0 to 16"));
    texts[0] = "";
    assert_int_equal(kvs_stop_new(&s, texts, 1, &err), KVS_INVALID);
    memset(many, 'a', KVS_MAX_STOP_BYTES + 1);
    texts[0] = many;
    assert_int_equal(kvs_stop_new(&s, texts, 1, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "4097"));
    assert_null(s);
    many[KVS_MAX_STOP_BYTES] = '\0';
    assert_int_equal(kvs_stop_new(&s, texts, 1, &err), KVS_OK);
    kvs_stop_free(s);
    kvs_stop_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_do_not_matter),
        cmocka_unit_test(text_is_held_only_while_it_may_become_a_stop),
        cmocka_unit_test(refusals_name_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
