/* Ids and text as the `tokenizers` library gives them, for every family of regular expressions, both
 * forms of merges, ignore_merges on and off, and added tokens of every kind.
 *
 * test_tok_golden [FOLDER [SPEED]]: FOLDER is tests/data/text or a larger set of the same script. With
 * SPEED it only prints how fast each tokenizer encodes. */
#include "unit/unit.h"

#include "base/clock.h"
#include "unit/text/golden.h"

static const char *dir;

enum { MAX_IDS = 1 << 16 };

typedef struct list {
    size_t n;
    int32_t ids[MAX_IDS];
} list;

/* A list of ids; `same` is taken where the file says so. */
static void read_list(reader *r, list *out, const list *same)
{
    const uint32_t n = reader_u16(r);
    if (n == 0xFFFF) {
        assert_non_null(same);
        memcpy(out, same, sizeof out->n + same->n * sizeof *same->ids);
        return;
    }
    out->n = n;
    for (uint32_t i = 0; i < n; i++) {
        out->ids[i] = (int32_t)reader_u16(r);
    }
}

static void say(const char *what, const int32_t *ids, size_t n)
{
    print_message("%s:", what);
    for (size_t i = 0; i < n && i < 60; i++) {
        print_message(" %d", ids[i]);
    }
    print_message("\n");
}

/* Whether text has these ids; prints both where it has not. */
static bool has_ids(const kvs_tokenizer *t, const char *text, size_t n, uint32_t flags,
                    const list *want)
{
    static int32_t ids[MAX_IDS];
    size_t n_ids = 0;
    kvs_error err;
    if (kvs_tokens_encode(t, text, n, flags, ids, MAX_IDS, &n_ids, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    if (n_ids == want->n && memcmp(ids, want->ids, n_ids * sizeof *ids) == 0) {
        return true;
    }
    print_message("flags %u, text of %zu bytes: \"%.*s\"\n", flags, n, (int)n, text);
    say("  got", ids, n_ids);
    say(" want", want->ids, want->n);
    return false;
}

/* The template's ids, in front and behind. */
static void check_template(reader *r, const kvs_tokenizer *t)
{
    static list inner;
    static list whole;
    size_t n = 0;
    assert_int_equal(kvs_tokens_encode(t, "a", 1, 0, inner.ids, MAX_IDS, &inner.n, NULL), KVS_OK);
    for (int side = 0; side < 2; side++) {
        const uint32_t k = reader_u8(r);
        if (side == 0) {
            int32_t prefix[8];
            assert_int_equal(kvs_tokenizer_prefix(t, prefix, 8), k);
        }
        for (uint32_t i = 0; i < k; i++) {
            whole.ids[n++] = (int32_t)reader_u16(r);
        }
        if (side == 0) {
            memcpy(whole.ids + n, inner.ids, inner.n * sizeof *inner.ids);
            n += inner.n;
        }
    }
    whole.n = n;
    assert_true(has_ids(t, "a", 1, KVS_ENCODE_TEMPLATE, &whole));
}

static void check_encode(reader *r, const kvs_tokenizer *t)
{
    static const uint32_t flags[3] = {KVS_ENCODE_SPECIAL, 0, KVS_ENCODE_NO_ADDED};
    static list want[3];
    reader s = reader_open(dir, "strings.bin");
    const uint32_t n = reader_u32(&s);
    int n_bad = 0;
    assert_int_equal(reader_u32(r), n);
    assert_true(n > 0);
    check_template(r, t);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t len = reader_u32(&s);
        const char *text = reader_bytes(&s, len);
        bool good = true;
        for (int k = 0; k < 3; k++) {
            read_list(r, &want[k], k > 0 ? &want[k - 1] : NULL);
            good = (n_bad > 8 || has_ids(t, text, len, flags[k], &want[k])) && good;
        }
        n_bad += !good;
    }
    assert_int_equal(s.at, s.n);
    assert_int_equal(n_bad, 0);
    print_message("  %u strings, three ways\n", n);
    reader_close(&s);
}

static void check_decode(reader *r, const kvs_tokenizer *t)
{
    static list ids;
    static char text[1 << 20];
    const uint32_t n = reader_u32(r);
    for (uint32_t i = 0; i < n; i++) {
        read_list(r, &ids, NULL);
        for (int32_t skip = 0; skip < 2; skip++) {
            const uint32_t len = reader_u32(r);
            const char *want = reader_bytes(r, len);
            size_t got = 0;
            assert_int_equal(
                kvs_tokens_decode(t, ids.ids, ids.n, skip, text, sizeof text, &got, NULL), KVS_OK);
            assert_int_equal(got, len);
            assert_memory_equal(text, want, len);
        }
    }
    assert_int_equal(r->at, r->n);
}

static void check_family(const char *name)
{
    char file[64];
    snprintf(file, sizeof file, "%s.gold", name);
    kvs_tokenizer *t = golden_tokenizer(dir, name, NULL);
    reader r = reader_open(dir, file);
    assert_memory_equal(reader_bytes(&r, 4), "KVTG", 4);
    check_encode(&r, t);
    check_decode(&r, t);
    reader_close(&r);
    kvs_tokenizer_close(t);
}

static void deepseek_three_splits(void **state)
{
    (void)state;
    check_family("deepseek");
}

static void glm_one_regex_ignore_merges(void **state)
{
    (void)state;
    check_family("glm");
}

static void v2_lite_letter_class_and_digits(void **state)
{
    (void)state;
    check_family("v2lite");
}

static void byte_level_with_its_own_regex(void **state)
{
    (void)state;
    check_family("gpt2");
}

static void rare_steps_and_added_tokens(void **state)
{
    (void)state;
    check_family("mixed");
}

static int print_speed(void)
{
    static const char *const name[] = {"deepseek", "glm", "v2lite", "gpt2", "mixed"};
    reader s = reader_open(dir, "strings.bin");
    char *text = malloc(s.n);
    size_t n = 0;
    const uint32_t n_string = reader_u32(&s);
    for (uint32_t i = 0; i < n_string; i++) {
        const uint32_t len = reader_u32(&s);
        memcpy(text + n, reader_bytes(&s, len), len);
        n += len;
    }
    for (size_t f = 0; f < UNIT_COUNT(name); f++) {
        kvs_tokenizer *t = golden_tokenizer(dir, name[f], NULL);
        const int64_t from = clock_ns();
        size_t n_ids = 0;
        kvs_tokens_encode(t, text, n, 0, NULL, 0, &n_ids, NULL);
        const double s_run = (double)(clock_ns() - from) * 1e-9;
        printf("%-9s %9zu bytes %8zu ids %7.1f MB/s\n", name[f], n, n_ids,
               (double)n * 1e-6 / s_run);
        kvs_tokenizer_close(t);
    }
    free(text);
    reader_close(&s);
    return 0;
}

int main(int argc, char **argv)
{
    dir = argc > 1 ? argv[1] : "tests/data/text";
    if (argc > 2) {
        return print_speed();
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deepseek_three_splits),
        cmocka_unit_test(glm_one_regex_ignore_merges),
        cmocka_unit_test(v2_lite_letter_class_and_digits),
        cmocka_unit_test(byte_level_with_its_own_regex),
        cmocka_unit_test(rare_steps_and_added_tokens),
    };
    return cmocka_run_group_tests_name("tok_golden", tests, NULL, NULL);
}
