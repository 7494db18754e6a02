/* UTF-8 against the standard's table of well-formed sequences, over all pairs of bytes and all
 * four-byte strings of bytes at the borders. */
#include "unit/unit.h"

#include "text/utf8.h"

/* Table 3-7 of the Unicode standard: ranges of the bytes of each form. */
static const unsigned char k_form[9][4][2] = {
    {{0x00, 0x7F}, {1, 0}, {1, 0}, {1, 0}},
    {{0xC2, 0xDF}, {0x80, 0xBF}, {1, 0}, {1, 0}},
    {{0xE0, 0xE0}, {0xA0, 0xBF}, {0x80, 0xBF}, {1, 0}},
    {{0xE1, 0xEC}, {0x80, 0xBF}, {0x80, 0xBF}, {1, 0}},
    {{0xED, 0xED}, {0x80, 0x9F}, {0x80, 0xBF}, {1, 0}},
    {{0xEE, 0xEF}, {0x80, 0xBF}, {0x80, 0xBF}, {1, 0}},
    {{0xF0, 0xF0}, {0x90, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}},
    {{0xF1, 0xF3}, {0x80, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}},
    {{0xF4, 0xF4}, {0x80, 0x8F}, {0x80, 0xBF}, {0x80, 0xBF}},
};

static size_t form_len(int f)
{
    return f == 0 ? 1 : f == 1 ? 2 : f < 6 ? 3 : 4;
}

/* How many bytes of s agree with the form. */
static size_t agree(int f, const unsigned char *s, size_t n)
{
    size_t k = 0;
    while (k < n && k < form_len(f) && s[k] >= k_form[f][k][0] && s[k] <= k_form[f][k][1]) {
        k++;
    }
    return k;
}

/* What the definition says of the head of s. */
static utf8_kind expected(const unsigned char *s, size_t n, size_t *len)
{
    size_t best = 0;
    bool part = false;
    for (int f = 0; f < 9; f++) {
        const size_t k = agree(f, s, n);
        if (k == form_len(f)) {
            *len = k;
            return UTF8_CHAR;
        }
        best = k > best ? k : best;
        part = part || (k > 0 && k == n);
    }
    *len = best > 0 ? best : 1;
    return part ? UTF8_PART : UTF8_BAD;
}

static void check_string(const unsigned char *bytes, size_t n)
{
    /* A block of its own, so that a sanitizer sees a read behind it. */
    unsigned char *s = malloc(n);
    assert_non_null(s);
    memcpy(s, bytes, n);
    textbuf b;
    buf_init(&b);
    utf8_repair(&b, (const char *)s, n);
    char want[16];
    size_t n_want = 0;
    bool valid = true;
    for (size_t i = 0; i < n;) {
        size_t len = 0;
        size_t got = 0;
        const utf8_kind kind = expected(s + i, n - i, &len);
        assert_int_equal(utf8_next((const char *)s + i, n - i, &got), kind);
        assert_int_equal(got, len);
        memcpy(want + n_want, kind == UTF8_CHAR ? (const char *)s + i : "\xEF\xBF\xBD",
               kind == UTF8_CHAR ? len : 3);
        n_want += kind == UTF8_CHAR ? len : 3;
        valid = valid && kind == UTF8_CHAR;
        i += len;
    }
    assert_int_equal(utf8_valid((const char *)s, n), valid);
    assert_int_equal(b.n, n_want);
    assert_memory_equal(b.data, want, n_want);
    buf_fini(&b);
    free(s);
}

static void short_strings_follow_the_table(void **state)
{
    (void)state;
    unsigned char s[4];
    for (unsigned a = 0; a < 256; a++) {
        s[0] = (unsigned char)a;
        check_string(s, 1);
        for (unsigned b = 0; b < 256; b++) {
            s[1] = (unsigned char)b;
            check_string(s, 2);
        }
    }
    static const unsigned char edge[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0,
                                         0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED,
                                         0xEF, 0xF0, 0xF3, 0xF4, 0xF5, 0xFF};
    enum { N = sizeof edge };
    for (int i = 0; i < N * N * N * N; i++) {
        s[0] = edge[i % N];
        s[1] = edge[i / N % N];
        s[2] = edge[i / (N * N) % N];
        s[3] = edge[i / (N * N * N)];
        check_string(s, i % 7 == 0 ? 3 : 4);
    }
}

/* Every code point but the surrogates, and its value. */
static void every_character_has_its_value(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF) {
            continue;
        }
        char s[4];
        const size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
        static const unsigned char mark[5] = {0, 0, 0xC0, 0xE0, 0xF0};
        uint32_t rest = c;
        for (size_t i = n - 1; i > 0; i--) {
            s[i] = (char)(0x80 | (rest & 0x3F));
            rest >>= 6;
        }
        s[0] = (char)(mark[n] | rest);
        size_t len = 0;
        assert_int_equal(utf8_next(s, n, &len), UTF8_CHAR);
        assert_int_equal(len, n);
        assert_int_equal(utf8_value(s, n), c);
    }
}

/* The walk over ASCII, eight bytes at a time, sees a bad byte at every offset. */
static void long_ascii_hides_nothing(void **state)
{
    (void)state;
    char s[40];
    for (size_t n = 1; n <= sizeof s; n++) {
        for (size_t at = 0; at < n; at++) {
            memset(s, 'a', n);
            assert_true(utf8_valid(s, n));
            s[at] = (char)0x80;
            assert_false(utf8_valid(s, n));
            textbuf b;
            buf_init(&b);
            utf8_repair(&b, s, n);
            assert_int_equal(b.n, n + 2);
            assert_memory_equal(b.data + at, UTF8_REPLACEMENT, 3);
            buf_fini(&b);
        }
    }
    assert_true(utf8_valid("", 0));
}

static void white_space_is_that_of_unicode(void **state)
{
    (void)state;
    static const uint32_t space[] = {0x9,    0xA,    0xB,    0xC,    0xD,    0x20,   0x85,
                                     0xA0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004,
                                     0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200A, 0x2028,
                                     0x2029, 0x202F, 0x205F, 0x3000};
    size_t k = 0;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        const bool want = k < UNIT_COUNT(space) && space[k] == c;
        assert_int_equal(utf8_is_space(c), want);
        k += want;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_strings_follow_the_table),
        cmocka_unit_test(every_character_has_its_value),
        cmocka_unit_test(long_ascii_hides_nothing),
        cmocka_unit_test(white_space_is_that_of_unicode),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
