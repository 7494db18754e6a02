/* Regular expressions: what is rewritten means what Oniguruma means by it (the lists were made with
 * that engine), what is refused is refused by name, and nothing runs for ever. */
#include "unit/unit.h"

#include "base/clock.h"
#include "text/pretok.h"

typedef struct cut {
    char text[256];
} cut;

static kvs_status add_piece(void *ctx, const char *s, size_t n, kvs_error *err)
{
    (void)err;
    cut *c = ctx;
    const size_t at = strlen(c->text);
    assert_true(n > 0 && at + n + 2 < sizeof c->text);
    memcpy(c->text + at, s, n);
    memcpy(c->text + at + n, "|", 2);
    return KVS_OK;
}

static void expect_cut(const char *pattern, const char *text, const char *want)
{
    pretok p = {{NULL}, 0};
    regex_run *run = NULL;
    kvs_error err = {0};
    cut c = {""};
    if (pretok_add(&p, "step", pattern, strlen(pattern), &err) != KVS_OK) {
        fail_msg("%s: %s", pattern, err.text);
    }
    assert_int_equal(regex_run_new(&run, strlen(text), NULL), KVS_OK);
    assert_int_equal(pretok_run(&p, run, text, strlen(text), add_piece, &c, &err), KVS_OK);
    if (strcmp(c.text, want) != 0) {
        fail_msg("%s on \"%s\": got \"%s\", want \"%s\"", pattern, text, c.text, want);
    }
    regex_run_free(run);
    pretok_fini(&p);
}

static void accepted_patterns_cut_as_oniguruma_does(void **state)
{
    (void)state;
    expect_cut("b", "abcb", "a|b|c|b|");
    expect_cut("x", "abc", "abc|");
    /* Empty matches cut too, but not right behind a match. */
    expect_cut("x*", "abxxc", "a|b|xx|c|");
    expect_cut("x*", "\xC3\xA9\xC3\xA9", "\xC3\xA9|\xC3\xA9|");
    /* ^ and $ are those of lines. */
    expect_cut("^a", "a\naa\na", "a|\n|a|a\n|a|");
    expect_cut("a$", "aa\na", "a|a|\n|a|");
    expect_cut("\\s+$", "ab \n", "ab| \n|");
    expect_cut("\\s+$", " \n \n", " \n \n|");
    expect_cut("\\s+$", "x  5  ", "x  5|  |");
    /* A dot is anything but a line feed. */
    expect_cut(".+", "a\rb\nc", "a\rb|\n|c|");
    /* White space is White_Space: U+0085 is, U+180E and U+200B are not. */
    expect_cut("\\s", "a\xC2\x85z\xE1\xA0\x8Ez\xE2\x80\x8Bz",
               "a|\xC2\x85|z\xE1\xA0\x8Ez\xE2\x80\x8Bz|");
    expect_cut("[^\\S]", "a\xC2\x85z\xE1\xA0\x8Ez", "a|\xC2\x85|z\xE1\xA0\x8Ez|");
    expect_cut("\\v", "a\nb\vc", "a\nb|\v|c|");
    expect_cut("\\d+", "a1\xD9\xA1\xC2\xB2", "a|1\xD9\xA1|\xC2\xB2|");
    expect_cut("\\D+", "a1\xC2\xB2", "a|1|\xC2\xB2|");
    expect_cut("\\p{N}+", "a1\xC2\xB2z", "a|1\xC2\xB2|z|");
    expect_cut("\\p{^Lu}+", "Ab1C", "A|b1|C|");
    expect_cut("\\P{Lu}+", "Ab1C", "A|b1|C|");
    /* A script, not its extensions: U+3001 is shared by Han and others. */
    expect_cut("\\p{Han}+", "a\xE4\xB8\x80\xE3\x80\x81", "a|\xE4\xB8\x80|\xE3\x80\x81|");
    expect_cut("\\u4e00|\\x{1F600}|\\x41", "A\xE4\xB8\x80\xF0\x9F\x98\x80z",
               "A|\xE4\xB8\x80|\xF0\x9F\x98\x80|z|");
    /* Folding: the long s is an s, the Kelvin sign a k. */
    expect_cut("(?i:'s|'k)", "a'\xC5\xBFz'\xE2\x84\xAAz'S", "a|'\xC5\xBF|z|'\xE2\x84\xAA|z|'S|");
    expect_cut("(?i)B|c(?-i:D)", "abBCDcD", "a|b|B|CD|cD|");
    expect_cut("a{2}|b{1,2}|c{2,}", "abbbaaccc", "a|bb|b|aa|ccc|");
    expect_cut("a{2,3}?", "aaaaa", "aa|aa|a|");
    expect_cut("{x}|]|a{,b", "{x}]a{,b", "{x}|]|a{,b|");
    expect_cut("(a|b)c(?=d)", "acdbce", "ac|dbce|");
    expect_cut("(?<=a)b|(?<!a)c|(?>d+)e|f++|g*+h", "abbcaddeffgh", "a|b|b|c|a|dde|ff|gh|");
    expect_cut("\\A.|.\\z", "abc", "a|b|c|");
    expect_cut("[\\]\\-^a-c]+", "x]-^ab", "x|]-^ab|");
    expect_cut("\\#\\\xC3\xA9", "x#\xC3\xA9", "x|#\xC3\xA9|");
}

typedef struct refused {
    const char *pattern;
    const char *text;
} refused;

static void other_patterns_are_refused_by_name(void **state)
{
    (void)state;
    static const refused list[] = {
        {"\\w+", "\"\\w\" at byte 0"},
        {"a\\b", "\"\\b\" at byte 1"},
        {"[\\W]", "\"\\W\" at byte 1"},
        {"\\h", "\"\\h\""},
        {"\\R", "\"\\R\""},
        {"\\X", "\"\\X\""},
        {"\\K", "\"\\K\""},
        {"\\G", "\"\\G\""},
        {"\\Z", "\"\\Z\""},
        {"(a)\\1", "\"\\1\" at byte 3"},
        {"\\07", "\"\\0\""},
        {"\\`", "\"\\`\""},
        {"[\\A]", "\"\\A\""},
        {"a\\", "nothing follows the backslash"},
        {"[a[b]]", "\"[b]]\" at byte 2: a class in a class"},
        {"[[:alpha:]]", "\"[:alpha:\" at byte 1: a class in a class"},
        {"[a-z&&b]", "intersection"},
        {"[]a]", "an empty class"},
        {"[^]a]", "an empty class"},
        {"[ab", "the class does not end"},
        {"(?m:a)", "\"(?m:a)\" at byte 0: this group"},
        {"a(?i)b", "\"(?i)b\" at byte 1: this group"},
        {"(?x)a", "this group"},
        {"(?<name>a)", "this group"},
        {"(?#c)", "this group"},
        {"(*UCP)a", "PCRE2 says"},
        {"(*a)", "PCRE2 says"},
        {"a{2}?", "\"{2}?\" at byte 1: this repetition"},
        {"a{2,3}+", "this repetition"},
        {"a{,3}", "this repetition"},
        {"a{3,2}", "PCRE2 says"},
        {"a{99999}", "PCRE2 says"},
        {"\\pL", "a property is written"},
        {"\\p{L", "a property is written"},
        {"\\p{}", "a property is written"},
        {"\\p{L&}", "a property is written"},
        {"\\p{Alpha}", "PCRE2 says"},
        {"\\x{110000}", "no code point"},
        {"\\x{d800}", "no code point"},
        {"\\x{}", "no code point"},
        {"\\xe9", "no code point"},
        {"\\x4", "no code point"},
        {"\\u12", "no code point"},
        {"\\udfff", "no code point"},
        {"(?<=a+)b", "PCRE2 says: lookbehind assertion is not fixed length"},
        {"a)", "PCRE2 says: unmatched closing parenthesis"},
        {"*a", "PCRE2 says"},
    };
    for (size_t i = 0; i < UNIT_COUNT(list); i++) {
        regex *r = NULL;
        kvs_error err = {0};
        assert_int_equal(regex_new(&r, "step 3", list[i].pattern, strlen(list[i].pattern), &err),
                         KVS_UNSUPPORTED);
        if (r != NULL || strstr(err.text, list[i].text) == NULL ||
            strncmp(err.text, "step 3: regex: ", 15) != 0) {
            fail_msg("%s: \"%s\"", list[i].pattern, err.text);
        }
    }
}

/* Matches around the border of a window of starting positions, in characters of several bytes. */
static void windows_lose_no_match(void **state)
{
    (void)state;
    enum { N = 3 * 70000 };
    regex *r = NULL;
    regex_run *run = NULL;
    char *text = malloc(N);
    assert_non_null(text);
    assert_int_equal(regex_new(&r, "x", "(?<=\xE2\x82\xAC)x", strlen("(?<=\xE2\x82\xAC)x"), NULL),
                     KVS_OK);
    assert_int_equal(regex_run_new(&run, N, NULL), KVS_OK);
    for (size_t at = 65520; at < 65560; at++) {
        for (size_t i = 0; i + 3 <= N; i += 3) {
            memcpy(text + i, "\xE2\x82\xAC", 3);
        }
        text[at / 3 * 3] = 'x';
        memcpy(text + at / 3 * 3 + 1, "yy", 2);
        size_t begin = 0;
        size_t end = 0;
        bool found = false;
        assert_int_equal(regex_find(r, run, text, N, 0, &begin, &end, &found, NULL), KVS_OK);
        assert_true(found);
        assert_int_equal(begin, at / 3 * 3);
        assert_int_equal(end, begin + 1);
        assert_int_equal(regex_find(r, run, text, N, end, &begin, &end, &found, NULL), KVS_OK);
        assert_false(found);
    }
    regex_run_free(run);
    regex_free(r);
    free(text);
}

static kvs_status count_piece(void *ctx, const char *s, size_t n, kvs_error *err)
{
    (void)s;
    (void)err;
    *(size_t *)ctx += n;
    return KVS_OK;
}

/* Patterns and texts that cost much: done in time, or refused with the pattern's name. */
static void nothing_runs_for_ever(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    static const struct {
        const char *pattern;
        const char *unit;
        const char *tail;
        bool done;
    } list[] = {
        {"\\s+$", " ", "5", true},
        {"\\s+(?!\\S)", " ", "5", true},
        {"\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", " ", "5", true},
        {"\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", " \t", "", true},
        {"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", "\xE4\xB8\x80", "", true},
        {"(?:a|b|ab)+", "ab", "", false},
        {"(?:a+)+b", "a", "c", false},
        {"(?:a|aa)+$", "a", "c", false},
    };
    char *text = malloc(N + 8);
    assert_non_null(text);
    for (size_t i = 0; i < UNIT_COUNT(list); i++) {
        const size_t unit = strlen(list[i].unit);
        size_t n = 0;
        while (n + unit <= N) {
            memcpy(text + n, list[i].unit, unit);
            n += unit;
        }
        memcpy(text + n, list[i].tail, strlen(list[i].tail));
        n += strlen(list[i].tail);
        pretok p = {{NULL}, 0};
        regex_run *run = NULL;
        kvs_error err = {0};
        size_t total = 0;
        assert_int_equal(pretok_add(&p, "step 1", list[i].pattern, strlen(list[i].pattern), &err),
                         KVS_OK);
        assert_int_equal(regex_run_new(&run, n, NULL), KVS_OK);
        const int64_t from = clock_ns();
        const kvs_status st = pretok_run(&p, run, text, n, count_piece, &total, &err);
        const double seconds = (double)(clock_ns() - from) * 1e-9;
        if (st != (list[i].done ? KVS_OK : KVS_LIMIT) || seconds > 60.0) {
            fail_msg("%s: status %d after %.1f s: %s", list[i].pattern, st, seconds, err.text);
        }
        if (list[i].done) {
            assert_int_equal(total, n);
        } else {
            assert_non_null(strstr(err.text, "step 1"));
        }
        regex_run_free(run);
        pretok_fini(&p);
    }
    free(text);
}

/* The allowance of a run: a pattern that is slow at every position ends by the clock. */
static void the_clock_ends_a_run(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    char *text = malloc(N);
    regex *r = NULL;
    regex_run *run = NULL;
    kvs_error err;
    assert_non_null(text);
    memset(text, 'a', N);
    assert_int_equal(regex_new(&r, "slow", "a+b", 3, NULL), KVS_OK);
    assert_int_equal(regex_run_new(&run, 0, NULL), KVS_OK);
    size_t begin = 0;
    size_t end = 0;
    bool found = true;
    regex_run_set_deadline(run, clock_ns());
    assert_int_equal(regex_find(r, run, text, N, 0, &begin, &end, &found, &err), KVS_LIMIT);
    assert_string_equal(err.text, "slow: the regex takes too long on this text");
    assert_false(found);
    /* Many fast searches count too. */
    memset(text, 'b', N);
    kvs_status st = KVS_OK;
    int n_search = 0;
    while (st == KVS_OK && n_search < 1000) {
        st = regex_find(r, run, text, 8, 0, &begin, &end, &found, &err);
        n_search++;
    }
    assert_int_equal(st, KVS_LIMIT);
    regex_run_free(run);
    regex_free(r);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted_patterns_cut_as_oniguruma_does),
        cmocka_unit_test(other_patterns_are_refused_by_name),
        cmocka_unit_test(windows_lose_no_match),
        cmocka_unit_test(nothing_runs_for_ever),
        cmocka_unit_test(the_clock_ends_a_run),
    };
    return cmocka_run_group_tests_name("regex", tests, NULL, NULL);
}
