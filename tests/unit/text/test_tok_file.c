/* tokenizer.json as an enemy or a stranger would write it: every refusal names what it refuses, and
 * what is accepted has the promised ids. */
#include "unit/unit.h"

#include "base/mem.h"
#include "text/tokenizer.h"
#include "unit/text/tiny.h"

typedef struct refusal {
    tiny what;
    kvs_status code;
    const char *text; /* part of the message */
} refusal;

#define SPLIT(regex)                                                                               \
    "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" regex "\"}, "                              \
    "\"behavior\": \"Isolated\", \"invert\": false}"
#define LEVEL           "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}"
#define SEQUENCE(a)     "{\"type\": \"Sequence\", \"pretokenizers\": [" a ", " LEVEL "]}"
#define ADDED(id, text) "[{\"id\": " id ", \"content\": \"" text "\", \"special\": true}]"

static const refusal k_refused[] = {
    {{.normalizer = "{\"type\": \"NFC\"}"}, KVS_UNSUPPORTED, "normalizer NFC"},
    {{.normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"Lowercase\"}]}"},
     KVS_UNSUPPORTED,
     "normalizer Lowercase"},
    {{.normalizer = "{\"type\": \"Sequence\"}"}, KVS_UNSUPPORTED, "normalizer Sequence"},
    {{.pre = "null"}, KVS_UNSUPPORTED, "without ByteLevel"},
    {{.pre = SPLIT("a")}, KVS_UNSUPPORTED, "without ByteLevel"},
    {{.pre = "{\"type\": \"Metaspace\"}"}, KVS_UNSUPPORTED, "Metaspace"},
    {{.pre = "{\"type\": \"ByteLevel\"}"}, KVS_UNSUPPORTED, "add_prefix_space"},
    {{.pre = SEQUENCE(LEVEL)}, KVS_UNSUPPORTED, "ByteLevel behind ByteLevel"},
    {{.pre = SEQUENCE("{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a\"}, \"behavior\": "
                      "\"Removed\"}")},
     KVS_UNSUPPORTED,
     "behavior Removed"},
    {{.pre = SEQUENCE("{\"type\": \"Split\", \"pattern\": {}, \"behavior\": \"Isolated\"}")},
     KVS_FORMAT,
     "neither a Regex nor a String"},
    {{.pre = SEQUENCE(SPLIT("a(b"))}, KVS_UNSUPPORTED, "PCRE2 says: missing closing parenthesis"},
    {{.pre = SEQUENCE(SPLIT("x|\\\\w+"))}, KVS_UNSUPPORTED, "\"\\w\" at byte 2"},
    {{.pre = SEQUENCE(SPLIT("\\\\p{Nonesuch}"))}, KVS_UNSUPPORTED, "unknown property"},
    {{.post = "{\"type\": \"BertProcessing\"}"}, KVS_UNSUPPORTED, "BertProcessing"},
    {{.post =
          "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"x\"}}, "
          "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {}}"},
     KVS_FORMAT,
     "\"x\" has no ids"},
    {{.post =
          "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"x\"}}, "
          "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"x\": {\"ids\": [999]}}}"},
     KVS_FORMAT,
     "\"x\" has an id of no token"},
    {{.post =
          "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"x\"}}, "
          "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"x\": {\"ids\": "
          "[1,1,1,1,1,1,1,1,1]}}}"},
     KVS_LIMIT,
     "more than 8"},
    {{.post = "{\"type\": \"TemplateProcessing\", \"single\": []}"}, KVS_FORMAT, "no Sequence"},
    {{.decoder = "null"}, KVS_UNSUPPORTED, "decoder is missing"},
    {{.decoder = "{\"type\": \"WordPiece\"}"}, KVS_UNSUPPORTED, "decoder WordPiece"},
    {{.options = "\"type\": \"Unigram\", "}, KVS_UNSUPPORTED, "model.type Unigram"},
    {{.options = "\"type\": \"BPE\", \"byte_fallback\": true, "}, KVS_UNSUPPORTED, "byte_fallback"},
    {{.options = "\"type\": \"BPE\", \"dropout\": 0.1, "}, KVS_UNSUPPORTED, "model.dropout"},
    {{.options = "\"type\": \"BPE\", \"end_of_word_suffix\": \"</w>\", "},
     KVS_UNSUPPORTED,
     "model.end_of_word_suffix"},
    {{.options = "\"type\": \"BPE\", \"continuing_subword_prefix\": \"##\", "},
     KVS_UNSUPPORTED,
     "model.continuing_subword_prefix"},
    {{.options = "\"type\": \"BPE\", \"ignore_merges\": 1, "},
     KVS_FORMAT,
     "ignore_merges is neither"},
    {{.vocab = ", \"ab\": 7, \"abc\": 257, \"bc\": 258"}, KVS_FORMAT, "id 7 belongs to two pieces"},
    {{.vocab = ", \"ab\": 256, \"ab\": 257"}, KVS_FORMAT, "duplicate object key"},
    {{.vocab = ", \"ab\": -1"}, KVS_FORMAT, "the id of \"ab\" is not in 0..4194303"},
    {{.vocab = ", \"ab\": 4194304"}, KVS_FORMAT, "the id of \"ab\" is not in"},
    {{.vocab = ", \"ab\": 1.5"}, KVS_FORMAT, "the id of \"ab\" is not in"},
    {{.vocab = ", \"ab\": 99999999999999999999"}, KVS_FORMAT, "too big integer"},
    {{.skip_byte = 'z'}, KVS_UNSUPPORTED, "no piece for the byte 0x7A"},
    {{.skip_byte = 0xF4}, KVS_UNSUPPORTED, "no piece for the byte 0xF4"},
    {{.merges = "[\"a b\", \"x y\"]"}, KVS_FORMAT, "merges[1] (x, y): its result is not"},
    {{.merges = "[\"a zz\"]"}, KVS_FORMAT, "merges[0] (a, zz): its right piece is not"},
    {{.merges = "[[\"zz\", \"a\"]]"}, KVS_FORMAT, "merges[0] (zz, a): its left piece is not"},
    {{.merges = "[\"a b c\"]"}, KVS_FORMAT, "merges[0] is no pair"},
    {{.merges = "[\"ab\"]"}, KVS_FORMAT, "merges[0] is no pair"},
    {{.merges = "[[\"a\", \"b\", \"c\"]]"}, KVS_FORMAT, "merges[0] is no pair"},
    {{.merges = "[[\"a\", 5]]"}, KVS_FORMAT, "merges[0] is no pair"},
    {{.merges = "[7]"}, KVS_FORMAT, "merges[0] is no pair"},
    {{.merges = "[[\"a\", \"\\u4e00\"]]"}, KVS_FORMAT, "not spelled in the byte alphabet"},
    {{.merges = "{}"}, KVS_FORMAT, "model.merges is no list"},
    {{.added = "{}"}, KVS_FORMAT, "added_tokens is no list"},
    {{.added = "[5]"}, KVS_FORMAT, "added_tokens[0]: content"},
    {{.added = ADDED("300", "")}, KVS_FORMAT, "added_tokens[0]: content"},
    {{.added = ADDED("-3", "<x>")}, KVS_FORMAT, "\"<x>\": id is not in"},
    {{.added = ADDED("4194304", "<x>")}, KVS_FORMAT, "\"<x>\": id is not in"},
    {{.added = ADDED("\\\"7\\\"", "<x>")}, KVS_FORMAT, "line 1"},
    {{.added = ADDED("256", "<x>")}, KVS_FORMAT, "added_tokens[0]: id 256 belongs to two"},
    {{.added = ADDED("300", "ab")}, KVS_FORMAT, "\"ab\" has the id 300 here and 256"},
    {{.added = "[{\"id\": 300, \"content\": \"<x>\"}, {\"id\": 301, \"content\": \"<x>\"}]"},
     KVS_FORMAT,
     "\"<x>\" is there twice"},
    {{.added = "[{\"id\": 300, \"content\": \"<x>\"}, "
               "{\"id\": 301, \"content\": \"<x>\", \"normalized\": true}]"},
     KVS_FORMAT,
     "\"<x>\" is there twice"},
    {{.added = "[{\"id\": 300, \"content\": \"<x>\", \"lstrip\": \"yes\"}]"},
     KVS_FORMAT,
     "lstrip is neither true nor false"},
    {{.config = "[]"}, KVS_FORMAT, "tokenizer_config.json: not an object"},
    {{.config = "{"}, KVS_FORMAT, "tokenizer_config.json line 1"},
    {{.config = "{\"bos_token\": \"<s>\"}"}, KVS_FORMAT, "bos_token \"<s>\" is no token"},
    {{.config = "{\"eos_token\": 5}"}, KVS_FORMAT, "eos_token is no text"},
    {{.config = "{\"add_bos_token\": true}"}, KVS_FORMAT, "add_bos_token without such a token"},
    {{.config = "{\"add_bos_token\": 1, \"bos_token\": \"a\"}"},
     KVS_FORMAT,
     "add_bos_token is neither"},
};

static void what_is_not_done_is_refused_by_name(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(k_refused); i++) {
        const refusal *r = &k_refused[i];
        kvs_error err = {0};
        kvs_tokenizer *t = (kvs_tokenizer *)&err;
        const kvs_status st = tiny_parse(&t, &r->what, &err);
        if (st != r->code || strstr(err.text, r->text) == NULL || t != NULL) {
            fail_msg("case %zu: status %d, \"%s\"; want \"%s\"", i, st, err.text, r->text);
        }
    }
}

/* Text in a buffer of its own size, so that a sanitizer sees a read behind it. */
static kvs_status parse_text(kvs_tokenizer **t, const char *text, kvs_error *err)
{
    const size_t n = strlen(text);
    char *own = malloc(n > 0 ? n : 1);
    assert_non_null(own);
    memcpy(own, text, n);
    const kvs_status st = tok_parse(t, own, n, NULL, 0, err);
    free(own);
    return st;
}

static void what_is_no_json_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "{",
        "[]",
        "5",
        "null",
        "{\"model\": {}} x",
        "{\"model\": \"\xff\"}",
        "{'model': 1}",
        "{\"model\": \"a\\u0000b\"}",
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        kvs_error err = {0};
        kvs_tokenizer *t = NULL;
        assert_int_equal(parse_text(&t, bad[i], &err), KVS_FORMAT);
        assert_non_null(strstr(err.text, "tokenizer.json"));
        assert_null(t);
    }
    kvs_error err;
    kvs_tokenizer *t = NULL;
    assert_int_equal(parse_text(&t, "{\"model\": {}}", &err), KVS_UNSUPPORTED);
    assert_int_equal(parse_text(&t, "{\"model\": {\"type\": \"BPE\"}}", &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "model.vocab is no object"));
}

/* 100,000 brackets deep, open only, and closed again, in a key that nobody reads. */
static void deep_nesting_is_refused(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    char *text = malloc(2 * DEPTH + 64);
    assert_non_null(text);
    for (int closed = 0; closed < 2; closed++) {
        for (int brace = 0; brace < 2; brace++) {
            size_t n = (size_t)sprintf(text, "{\"ignored\": ");
            for (int i = 0; i < DEPTH; i++) {
                text[n++] = '[';
            }
            for (int i = 0; closed && i < DEPTH; i++) {
                text[n++] = ']';
            }
            n += (size_t)sprintf(text + n, "%s", brace ? "}" : "");
            kvs_error err;
            kvs_tokenizer *t = NULL;
            assert_int_equal(tok_parse(&t, text, n, NULL, 0, &err), KVS_FORMAT);
            assert_non_null(strstr(err.text, "maximum parsing depth"));
        }
    }
    free(text);
}

/* The steps of a file may nest too, but not for ever. */
static void nested_sequences_end(void **state)
{
    (void)state;
    textbuf b;
    buf_init(&b);
    for (int i = 0; i < 100; i++) {
        buf_text(&b, "{\"type\": \"Sequence\", \"pretokenizers\": [");
    }
    buf_text(&b, LEVEL);
    for (int i = 0; i < 100; i++) {
        buf_text(&b, "]}");
    }
    kvs_error err;
    kvs_tokenizer *t = NULL;
    const tiny what = {.pre = buf_str(&b)};
    assert_int_equal(tiny_parse(&t, &what, &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "Sequence is not supported"));
    buf_fini(&b);
}

static void too_many_steps_are_refused(void **state)
{
    (void)state;
    textbuf b;
    buf_init(&b);
    buf_text(&b, "{\"type\": \"Sequence\", \"pretokenizers\": [");
    for (int i = 0; i < 17; i++) {
        buf_text(&b, SPLIT("a") ", ");
    }
    buf_text(&b, LEVEL "]}");
    kvs_error err;
    kvs_tokenizer *t = NULL;
    const tiny what = {.pre = buf_str(&b)};
    assert_int_equal(tiny_parse(&t, &what, &err), KVS_LIMIT);
    assert_non_null(strstr(err.text, "more than 16 steps"));
    buf_fini(&b);
}

static void long_pieces_are_refused(void **state)
{
    (void)state;
    textbuf b;
    buf_init(&b);
    buf_text(&b, ", \"ab\": 256, \"abc\": 257, \"bc\": 258, \"");
    for (int i = 0; i < 8193; i++) {
        buf_char(&b, 'q');
    }
    buf_text(&b, "\": 259");
    kvs_error err;
    kvs_tokenizer *t = NULL;
    tiny what = {.vocab = buf_str(&b)};
    assert_int_equal(tiny_parse(&t, &what, &err), KVS_LIMIT);
    assert_non_null(strstr(err.text, "8193 bytes long: at most 8192"));

    buf_clear(&b);
    buf_text(&b, "[{\"id\": 300, \"content\": \"");
    for (int i = 0; i < 513; i++) {
        buf_char(&b, 'q');
    }
    buf_text(&b, "\"}]");
    what = (tiny){.added = buf_str(&b)};
    assert_int_equal(tiny_parse(&t, &what, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "content is no text of 1 to 512 bytes"));
    buf_fini(&b);
}

static void expect_ids(const kvs_tokenizer *t, const char *text, uint32_t flags,
                       const int32_t *want, size_t n_want)
{
    int32_t ids[64];
    size_t n = 0;
    assert_int_equal(kvs_tokens_encode(t, text, strlen(text), flags, ids, 64, &n, NULL), KVS_OK);
    assert_int_equal(n, n_want);
    assert_memory_equal(ids, want, n * sizeof *ids);
}

/* Ids without a piece: inside the vocabulary, between it and the added tokens, and behind. */
static void holes_are_allowed(void **state)
{
    (void)state;
    const tiny what = {.vocab = ", \"ab\": 300, \"abc\": 70000, \"bc\": 258",
                       .added = ADDED("90000", "<x>")};
    kvs_tokenizer *t = NULL;
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    assert_int_equal(kvs_tokenizer_size(t), 90001);
    static const int32_t want[] = {300, 'a', 90000, 70000};
    expect_ids(t, "aba<x>abc", KVS_ENCODE_SPECIAL, want, 4);
    static const int32_t ids[] = {300, 299, 301, 89999, 90001, INT32_MAX, 70000};
    char text[64];
    size_t n = 99;
    assert_int_equal(kvs_tokens_decode(t, ids, 7, 0, text, sizeof text, &n, NULL), KVS_OK);
    assert_int_equal(n, 5);
    assert_memory_equal(text, "ababc", 5);
    assert_null(kvs_token_piece(t, 299, &n));
    assert_int_equal(n, 0);
    assert_null(kvs_token_piece(t, -1, &n));
    assert_null(kvs_token_piece(t, 90001, NULL));
    assert_memory_equal(kvs_token_piece(t, 70000, &n), "abc", 3);
    assert_int_equal(n, 3);
    kvs_tokenizer_close(t);
}

/* Bytes that valid UTF-8 cannot hold need no piece; a piece outside the alphabet is itself. */
static void unused_bytes_and_raw_pieces(void **state)
{
    (void)state;
    const tiny what = {
        .skip_byte = 0xF5,
        .vocab = ", \"ab\": 256, \"abc\": 257, \"bc\": 258, \"\\uff5cx\": 259, \"\": 260"};
    kvs_tokenizer *t = NULL;
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    size_t n = 0;
    assert_memory_equal(kvs_token_piece(t, 259, &n), "\xEF\xBD\x9Cx", 4);
    assert_int_equal(n, 4);
    /* Text never becomes such a piece. */
    static const int32_t want[] = {0xEF, 0xBD, 0x9C, 'x'};
    expect_ids(t, "\xEF\xBD\x9Cx", 0, want, 4);
    assert_int_equal(kvs_token_find(t, "\xEF\xBD\x9Cx"), -1);
    assert_int_equal(kvs_token_find(t, ""), -1);
    assert_non_null(kvs_token_piece(t, 260, &n));
    assert_int_equal(n, 0);
    kvs_tokenizer_close(t);
}

/* A merge that is there twice has the later rank, as in the library. */
static void a_repeated_merge_has_the_later_rank(void **state)
{
    (void)state;
    static const int32_t first[] = {256, 'c'};
    static const int32_t later[] = {'a', 258};
    tiny what = {.merges = "[\"a b\", \"b c\"]"};
    kvs_tokenizer *t = NULL;
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    expect_ids(t, "abc", 0, first, 2);
    kvs_tokenizer_close(t);
    what.merges = "[\"a b\", \"b c\", [\"a\", \"b\"]]";
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    expect_ids(t, "abc", 0, later, 2);
    kvs_tokenizer_close(t);
}

typedef struct bos_case {
    const char *config;
    const char *post;
    int adds_bos;
    int n_prefix;
    int n_all; /* ids of "b" with its template */
} bos_case;

#define TEMPLATE(before, after)                                                                    \
    "{\"type\": \"TemplateProcessing\", \"single\": [" before                                      \
    "{\"Sequence\": {\"id\": \"A\"}}" after                                                        \
    "], \"special_tokens\": {\"a\": {\"ids\": [97]}, \"ab\": {\"ids\": [256]}}}"
#define TOKEN(name) "{\"SpecialToken\": {\"id\": \"" name "\"}}"

static const bos_case k_bos[] = {
    {NULL, NULL, 0, 0, 1},
    {"{\"bos_token\": \"a\"}", NULL, 0, 0, 1},
    {"{\"bos_token\": \"a\", \"add_bos_token\": true}", NULL, 1, 1, 2},
    {"{\"bos_token\": {\"content\": \"a\"}, \"add_bos_token\": true}", NULL, 1, 1, 2},
    {"{\"bos_token\": \"a\", \"add_bos_token\": null}", TEMPLATE(TOKEN("a") ", ", ""), 1, 1, 2},
    {"{\"bos_token\": \"a\", \"add_bos_token\": false}", TEMPLATE(TOKEN("a") ", ", ""), 0, 0, 1},
    {"{\"bos_token\": \"a\", \"add_bos_token\": true}", TEMPLATE(TOKEN("a") ", ", ""), 1, 1, 2},
    {"{\"bos_token\": \"ab\"}", TEMPLATE(TOKEN("a") ", ", ""), 0, 1, 2},
    {"{\"bos_token\": \"a\", \"add_bos_token\": true}", TEMPLATE(TOKEN("ab") ", ", ""), 1, 2, 3},
    {"{\"eos_token\": \"ab\", \"add_eos_token\": true}", NULL, 0, 0, 2},
    {"{\"eos_token\": \"ab\", \"add_eos_token\": false}",
     TEMPLATE(TOKEN("a") ", ", ", " TOKEN("ab")), 0, 1, 2},
    {NULL, TEMPLATE(TOKEN("a") ", " TOKEN("ab") ", ", ", " TOKEN("ab")), 0, 2, 4},
};

static void whether_bos_is_added(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(k_bos); i++) {
        const bos_case *c = &k_bos[i];
        const tiny what = {.config = c->config, .post = c->post};
        kvs_tokenizer *t = NULL;
        kvs_error err = {0};
        if (tiny_parse(&t, &what, &err) != KVS_OK) {
            fail_msg("case %zu: %s", i, err.text);
        }
        int32_t ids[8];
        size_t n = 0;
        assert_int_equal(kvs_tokenizer_adds_bos(t), c->adds_bos);
        assert_int_equal(kvs_tokenizer_prefix(t, NULL, 0), c->n_prefix);
        assert_int_equal(kvs_tokens_encode(t, "b", 1, KVS_ENCODE_TEMPLATE, ids, 8, &n, NULL),
                         KVS_OK);
        assert_int_equal(n, c->n_all);
        assert_int_equal(ids[c->n_prefix], 'b');
        if (c->adds_bos) {
            assert_int_equal(ids[0], kvs_tokenizer_bos(t));
        }
        assert_int_equal(kvs_tokens_encode(t, "", 0, 0, NULL, 0, &n, NULL), KVS_OK);
        assert_int_equal(n, 0);
        kvs_tokenizer_close(t);
    }
}

/* The n-th allocation fails, for every n: the reason is memory, and nothing is left behind. */
static void failing_allocations_leave_nothing(void **state)
{
    (void)state;
    const tiny what = {.pre = SEQUENCE(SPLIT("\\\\s+|[^a]")),
                       .added = "[{\"id\": 300, \"content\": \"<x>\", \"single_word\": true}, "
                                "{\"id\": 301, \"content\": "
                                "\"<y>\", \"normalized\": true}]",
                       .config = "{\"bos_token\": \"<x>\", \"add_bos_token\": true}"};
    textbuf json;
    buf_init(&json);
    tiny_json(&json, &what);
    const int64_t live = mem_stats_get().n_live;
    bool done = false;
    int64_t n_fail = 0;
    for (int64_t n = 1; !done && n < 1000; n++) {
        kvs_error err = {0};
        kvs_tokenizer *t = NULL;
        int32_t ids[64];
        char text[64];
        size_t n_ids = 0;
        size_t n_text = 0;
        mem_fail_after(n);
        kvs_status st = tok_parse(&t, json.data, json.n, what.config, strlen(what.config), &err);
        if (st == KVS_OK) {
            st = kvs_tokens_encode(t, "ab <x>\xff<y> abc", 15,
                                   KVS_ENCODE_TEMPLATE | KVS_ENCODE_SPECIAL, ids, 64, &n_ids, &err);
        }
        if (st == KVS_OK) {
            st = kvs_tokens_decode(t, ids, n_ids, 0, text, sizeof text, &n_text, &err);
        }
        done = !mem_fail_fired();
        mem_fail_after(0);
        if (st != KVS_OK) {
            n_fail++;
            assert_int_equal(st, KVS_NOMEM);
            assert_true(err.text[0] != '\0');
        } else {
            assert_int_equal(n_text, 20);
            assert_memory_equal(text, "<x>ab <x>\xEF\xBF\xBD<y> abc", 20);
        }
        kvs_tokenizer_close(t);
        assert_int_equal(mem_stats_get().n_live, live);
    }
    assert_true(done);
    assert_true(n_fail > 20);
    buf_fini(&json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_not_done_is_refused_by_name),
        cmocka_unit_test(what_is_no_json_is_refused),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(nested_sequences_end),
        cmocka_unit_test(too_many_steps_are_refused),
        cmocka_unit_test(long_pieces_are_refused),
        cmocka_unit_test(holes_are_allowed),
        cmocka_unit_test(unused_bytes_and_raw_pieces),
        cmocka_unit_test(a_repeated_merge_has_the_later_rank),
        cmocka_unit_test(whether_bos_is_added),
        cmocka_unit_test(failing_allocations_leave_nothing),
    };
    return cmocka_run_group_tests_name("tok_file", tests, NULL, NULL);
}
