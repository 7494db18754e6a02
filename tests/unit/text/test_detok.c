/* Streaming text: whole characters only, the same text however the bytes are cut into ids, and
 * equal to what all bytes give at once. */
#include "unit/unit.h"

#include "base/mem.h"
#include "base/rng.h"
#include "text/detok.h"
#include "unit/text/tiny.h"

static kvs_tokenizer *make(const tiny *what)
{
    kvs_tokenizer *t = NULL;
    kvs_error err = {0};
    if (tiny_parse(&t, what, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    return t;
}

/* Whole characters only. */
static void push(kvs_detok *d, int32_t id, textbuf *all)
{
    char out[256];
    size_t n = 99;
    assert_true(kvs_detok_bound(d) <= sizeof out);
    assert_int_equal(kvs_detok_push(d, id, out, kvs_detok_bound(d), &n, NULL), KVS_OK);
    assert_true(utf8_valid(out, n));
    buf_add(all, out, n);
}

static void flush(kvs_detok *d, textbuf *all)
{
    char out[4];
    size_t n = 99;
    assert_int_equal(kvs_detok_flush(d, out, sizeof out, &n, NULL), KVS_OK);
    assert_true(utf8_valid(out, n));
    buf_add(all, out, n);
}

/* Bytes that cut characters, broken and whole. */
static size_t random_bytes(rng *r, unsigned char *s, size_t cap)
{
    static const char *const part[] = {
        "a",    "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xC3",
        "\xE2", "\xE2\x82", "\xF0\x9F",     "\xF0\x9F\x98",     "\x80",
        "\xBF", "\xC0",     "\xED\xA0\x80", "\xF4\x90",         "\xFF"};
    size_t n = 0;
    const int64_t n_part = rng_next_range(r, 0, 8);
    for (int64_t i = 0; i < n_part; i++) {
        const char *p = part[rng_next_below(r, UNIT_COUNT(part))];
        const size_t len = strlen(p);
        if (n + len <= cap) {
            memcpy(s + n, p, len);
            n += len;
        }
    }
    return n;
}

static void bytes_one_by_one_give_the_text_of_all(void **state)
{
    (void)state;
    const tiny what = {NULL};
    kvs_tokenizer *t = make(&what);
    kvs_detok *d = NULL;
    assert_int_equal(kvs_detok_new(&d, t, 0, NULL), KVS_OK);
    rng r = rng_init(77, 1);
    for (int round = 0; round < 5000; round++) {
        unsigned char s[40];
        const size_t n = random_bytes(&r, s, sizeof s);
        textbuf want;
        textbuf got;
        buf_init(&want);
        buf_init(&got);
        utf8_repair(&want, (const char *)s, n);
        size_t done = 0;
        for (size_t i = 0; i < n; i++) {
            push(d, s[i], &got);
            /* Nothing is held back longer than it must be: at most three bytes, and only such as
             * can still begin a character. */
            assert_true(d->n_held <= 3);
            size_t len = 0;
            if (d->n_held > 0) {
                assert_int_equal(utf8_next(d->held, d->n_held, &len), UTF8_PART);
                assert_int_equal(len, d->n_held);
            }
            assert_true(got.n >= done);
            done = got.n;
        }
        flush(d, &got);
        assert_int_equal(got.n, want.n);
        assert_memory_equal(buf_str(&got), buf_str(&want), want.n);
        buf_fini(&want);
        buf_fini(&got);
    }
    kvs_detok_free(d);
    kvs_tokenizer_close(t);
}

/* A text in ids of one to six bytes, cut at every place: pieces for all its substrings. */
static void every_cut_gives_the_same_text(void **state)
{
    (void)state;
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z\xE2\x82";
    enum { N = sizeof text - 1 };
    int32_t id_of[N][N + 1];
    textbuf b;
    buf_init(&b);
    int32_t id = 256;
    for (size_t i = 0; i < N; i++) {
        for (size_t j = i + 1; j <= N; j++) {
            bool old = j == i + 1;
            id_of[i][j] = old ? (unsigned char)text[i] : id;
            for (size_t k = 0; k < i && !old; k++) {
                if (k + j - i <= N && memcmp(text + k, text + i, j - i) == 0) {
                    id_of[i][j] = id_of[k][k + j - i];
                    old = true;
                }
            }
            if (!old) {
                buf_text(&b, ", \"");
                for (size_t k = i; k < j; k++) {
                    char name[3];
                    tiny_spell((unsigned char)text[k], name);
                    buf_text(&b, name);
                }
                buf_printf(&b, "\": %d", id++);
            }
        }
    }
    const tiny what = {.vocab = buf_str(&b), .merges = "[]"};
    kvs_tokenizer *t = make(&what);
    kvs_detok *d = NULL;
    assert_int_equal(kvs_detok_new(&d, t, 0, NULL), KVS_OK);
    /* One bit per place between two bytes: cut or not. */
    for (unsigned cuts = 0; cuts < 1u << (N - 1); cuts++) {
        textbuf got;
        buf_init(&got);
        size_t from = 0;
        for (size_t i = 1; i <= N; i++) {
            if (i == N || (cuts >> (i - 1) & 1) != 0) {
                push(d, id_of[from][i], &got);
                from = i;
                size_t whole = 0; /* characters that are complete after i bytes are out */
                for (size_t len = 0; whole < i; whole += len) {
                    if (utf8_next(text + whole, i - whole, &len) != UTF8_CHAR) {
                        break;
                    }
                }
                assert_int_equal(got.n, whole);
            }
        }
        flush(d, &got);
        assert_int_equal(got.n, N - 2 + 3);
        assert_memory_equal(got.data, text, N - 2);
        assert_memory_equal(got.data + N - 2, "\xEF\xBF\xBD", 3);
        buf_fini(&got);
    }
    kvs_detok_free(d);
    kvs_tokenizer_close(t);
    buf_fini(&b);
}

static void special_tokens_are_skipped_or_shown(void **state)
{
    (void)state;
    const tiny what = {.added = "[{\"id\": 300, \"content\": \"<x>\", \"special\": true}, "
                                "{\"id\": 301, \"content\": \"<y>\", \"special\": false}, "
                                "{\"id\": 302, \"content\": \"<\\uff5c>\", \"special\": true}]"};
    kvs_tokenizer *t = make(&what);
    assert_int_equal(kvs_token_is_special(t, 300), 1);
    assert_int_equal(kvs_token_is_special(t, 301), 0);
    assert_int_equal(kvs_token_is_special(t, 'a'), 0);
    assert_int_equal(kvs_token_is_special(t, 299), 0);
    assert_int_equal(kvs_token_is_special(t, -1), 0);
    for (int32_t skip = 0; skip < 2; skip++) {
        kvs_detok *d = NULL;
        textbuf got;
        buf_init(&got);
        assert_int_equal(kvs_detok_new(&d, t, skip, NULL), KVS_OK);
        push(d, 'a', &got);
        push(d, 0xC3, &got); /* a skipped token does not part the bytes of a character */
        push(d, 300, &got);
        push(d, 0xA9, &got);
        push(d, 301, &got);
        push(d, 302, &got);
        push(d, 299, &got);
        push(d, 100000, &got);
        flush(d, &got);
        assert_string_equal(buf_str(&got), skip ? "a\xC3\xA9<y>"
                                                : "a\xEF\xBF\xBD<x>\xEF\xBF\xBD<y><\xEF\xBD\x9C>");
        buf_fini(&got);
        kvs_detok_free(d);
    }
    kvs_tokenizer_close(t);
}

static void too_little_room_changes_nothing(void **state)
{
    (void)state;
    const tiny what = {NULL};
    kvs_tokenizer *t = make(&what);
    kvs_detok *d = NULL;
    kvs_error err;
    char out[8];
    size_t n = 0;
    assert_int_equal(kvs_detok_new(&d, t, 0, NULL), KVS_OK);
    assert_int_equal(kvs_detok_push(d, 0xE2, out, 0, &n, NULL), KVS_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kvs_detok_push(d, 0x82, out, 0, &n, NULL), KVS_OK);
    memset(out, '#', sizeof out);
    for (size_t cap = 0; cap < 3; cap++) {
        assert_int_equal(kvs_detok_push(d, 0xAC, out, cap, &n, &err), KVS_LIMIT);
        assert_int_equal(n, 3);
        assert_int_equal(out[0], '#');
        /* The three bytes and the piece "abc" behind them: six. */
        assert_int_equal(kvs_detok_push(d, 257, out, cap, &n, &err), KVS_LIMIT);
        assert_int_equal(n, 6);
    }
    assert_int_equal(kvs_detok_push(d, 0xAC, out, 3, &n, NULL), KVS_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(out, "\xE2\x82\xAC#", 4);

    assert_int_equal(kvs_detok_push(d, 0xF0, out, 0, &n, NULL), KVS_OK);
    assert_int_equal(kvs_detok_flush(d, out, 2, &n, &err), KVS_LIMIT);
    assert_int_equal(n, 3);
    assert_int_equal(kvs_detok_flush(d, out, 3, &n, NULL), KVS_OK);
    assert_memory_equal(out, "\xEF\xBF\xBD", 3);
    assert_int_equal(kvs_detok_flush(d, out, 0, &n, NULL), KVS_OK);
    assert_int_equal(n, 0);
    kvs_detok_free(d);
    kvs_tokenizer_close(t);
}

/* Steps do not allocate. */
static void pushing_allocates_nothing(void **state)
{
    (void)state;
    const tiny what = {NULL};
    kvs_tokenizer *t = make(&what);
    kvs_detok *d = NULL;
    assert_int_equal(kvs_detok_new(&d, t, 0, NULL), KVS_OK);
    char out[64];
    size_t n = 0;
    mem_guard_begin();
    for (int32_t id = 0; id < 300; id++) {
        assert_int_equal(kvs_detok_push(d, id, out, sizeof out, &n, NULL), KVS_OK);
    }
    assert_int_equal(mem_guard_end(), 0);
    kvs_detok_free(d);
    kvs_tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_one_by_one_give_the_text_of_all),
        cmocka_unit_test(every_cut_gives_the_same_text),
        cmocka_unit_test(special_tokens_are_skipped_or_shown),
        cmocka_unit_test(too_little_room_changes_nothing),
        cmocka_unit_test(pushing_allocates_nothing),
    };
    return cmocka_run_group_tests_name("detok", tests, NULL, NULL);
}
