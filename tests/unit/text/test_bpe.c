/* The two ways of merging against a third: strings in an array, the best pair found by comparing
 * texts, over random merges. Then size: a pre-token of a mebibyte. */
#include "unit/unit.h"

#include "base/clock.h"
#include "base/rng.h"
#include "text/bpe.h"
#include "unit/text/tiny.h"

enum { N_LETTER = 4, MAX_MERGE = 40, MAX_PIECE = 64, MAX_TEXT = 300 };

typedef struct merges {
    int n;
    char left[MAX_MERGE][MAX_PIECE];
    char right[MAX_MERGE][MAX_PIECE];
} merges;

/* Random merges of pieces that exist by then, most of them of short ones. */
static void make_merges(merges *m, rng *r)
{
    m->n = 0;
    const int want = (int)rng_next_range(r, 1, MAX_MERGE);
    for (int i = 0; i < want; i++) {
        char side[2][MAX_PIECE];
        for (int k = 0; k < 2; k++) {
            const int64_t pick = rng_next_range(r, -N_LETTER, m->n - 1);
            if (pick < 0) {
                side[k][0] = (char)('a' + N_LETTER + pick);
                side[k][1] = '\0';
            } else {
                snprintf(side[k], MAX_PIECE, "%s%s", m->left[pick], m->right[pick]);
            }
        }
        if (strlen(side[0]) + strlen(side[1]) < MAX_PIECE) {
            memcpy(m->left[m->n], side[0], MAX_PIECE);
            memcpy(m->right[m->n], side[1], MAX_PIECE);
            m->n++;
        }
    }
}

static void fill_vocab(vocab *v, const merges *m)
{
    assert_int_equal(vocab_init(v, 256 + MAX_MERGE, 256 + MAX_MERGE, 1 << 14, MAX_MERGE, NULL),
                     KVS_OK);
    for (int b = 0; b < 256; b++) {
        char name[3];
        tiny_spell((unsigned char)b, name);
        assert_int_equal(vocab_add(v, b, name, strlen(name), true, NULL), KVS_OK);
    }
    for (int i = 0; i < m->n; i++) {
        char piece[2 * MAX_PIECE];
        const int n = snprintf(piece, sizeof piece, "%s%s", m->left[i], m->right[i]);
        if (vocab_find(v, piece, (size_t)n) < 0) {
            assert_int_equal(vocab_add(v, 256 + i, piece, (size_t)n, true, NULL), KVS_OK);
        }
        assert_int_equal(vocab_add_merge(v, (uint32_t)i, m->left[i], strlen(m->left[i]),
                                         m->right[i], strlen(m->right[i])),
                         0);
    }
    assert_int_equal(vocab_finish(v, NULL), KVS_OK);
}

/* The definition: again and again the pair of the lowest rank, leftmost first. */
static size_t naive(const vocab *v, const merges *m, const char *text, size_t n, int32_t *ids)
{
    static char piece[MAX_TEXT][MAX_PIECE];
    size_t k = n;
    for (size_t i = 0; i < n; i++) {
        piece[i][0] = text[i];
        piece[i][1] = '\0';
    }
    for (;;) {
        int best = -1;
        size_t at = 0;
        for (size_t i = 0; i + 1 < k; i++) {
            int rank = -1; /* a repeated merge has its last rank */
            for (int r = 0; r < m->n; r++) {
                if (strcmp(m->left[r], piece[i]) == 0 && strcmp(m->right[r], piece[i + 1]) == 0) {
                    rank = r;
                }
            }
            if (rank >= 0 && (best < 0 || rank < best)) {
                best = rank;
                at = i;
            }
        }
        if (best < 0) {
            break;
        }
        char both[2 * MAX_PIECE];
        snprintf(both, sizeof both, "%s%s", piece[at], piece[at + 1]);
        memcpy(piece[at], both, MAX_PIECE);
        memmove(piece[at + 1], piece[at + 2], (k - at - 2) * sizeof *piece);
        k--;
    }
    for (size_t i = 0; i < k; i++) {
        ids[i] = vocab_find(v, piece[i], strlen(piece[i]));
    }
    return k;
}

static void check_text(bpe_run *run, const merges *m, const char *text, size_t n)
{
    int32_t want[MAX_TEXT];
    int32_t ids[MAX_TEXT];
    const size_t n_want = naive(run->v, m, text, n, want);
    for (int way = 0; way < 4; way++) {
        id_sink out = {ids, MAX_TEXT, 0};
        memset(ids, 0xEE, sizeof ids);
        if (way == 0 && n > BPE_SHORT_MAX) {
            continue;
        }
        if (way == 0) {
            bpe_encode_short(run, text, n, &out);
        } else if (way == 1) {
            assert_int_equal(bpe_encode_long(run, text, n, &out, NULL), KVS_OK);
        } else {
            /* The second time a short one comes from the table. */
            assert_int_equal(bpe_encode(run, text, n, &out, NULL), KVS_OK);
        }
        assert_int_equal(out.n, n_want);
        assert_memory_equal(ids, want, n_want * sizeof *ids);
    }
}

static void all_ways_agree_with_the_definition(void **state)
{
    (void)state;
    static const size_t lens[] = {1, 2, 3, 5, 8, 21, 22, 23, 63, 64, 65, 300};
    rng r = rng_init(31, 1);
    for (int round = 0; round < 120; round++) {
        merges m;
        vocab v;
        bpe_run run;
        make_merges(&m, &r);
        fill_vocab(&v, &m);
        assert_int_equal(bpe_run_init(&run, &v, false, 100, NULL), KVS_OK);
        for (size_t i = 0; i < UNIT_COUNT(lens); i++) {
            char text[MAX_TEXT];
            for (size_t k = 0; k < lens[i]; k++) {
                text[k] = (char)('a' + rng_next_below(&r, round % 3 == 0 ? 2 : N_LETTER));
            }
            check_text(&run, &m, text, lens[i]);
        }
        bpe_run_fini(&run);
        vocab_fini(&v);
    }
}

/* A pre-token that is a piece, though no merge makes it. */
static void ignore_merges_takes_whole_pieces(void **state)
{
    (void)state;
    const tiny what[2] = {
        {.vocab = ", \"ab\": 256, \"abc\": 257, \"bc\": 258, \"cab\": 259", .merges = "[\"a b\"]"},
        {.vocab = ", \"ab\": 256, \"abc\": 257, \"bc\": 258, \"cab\": 259",
         .merges = "[\"a b\"]",
         .options = "\"type\": \"BPE\", \"ignore_merges\": true, "}};
    for (int on = 0; on < 2; on++) {
        kvs_tokenizer *t = NULL;
        int32_t ids[4];
        size_t n = 0;
        assert_int_equal(tiny_parse(&t, &what[on], NULL), KVS_OK);
        assert_int_equal(kvs_tokens_encode(t, "cab", 3, 0, ids, 4, &n, NULL), KVS_OK);
        assert_int_equal(n, on ? 1 : 2);
        assert_int_equal(ids[0], on ? 259 : 'c');
        /* Only as a whole. */
        assert_int_equal(kvs_tokens_encode(t, "cabc", 4, 0, ids, 4, &n, NULL), KVS_OK);
        assert_int_equal(n, 3);
        assert_int_equal(ids[1], 256);
        kvs_tokenizer_close(t);
    }
}

/* Words that fall on one place of the table of remembered words do not mix. */
static void remembered_words_do_not_mix(void **state)
{
    (void)state;
    rng r = rng_init(5, 2);
    merges m;
    vocab v;
    bpe_run run;
    make_merges(&m, &r);
    fill_vocab(&v, &m);
    assert_int_equal(bpe_run_init(&run, &v, false, 0, NULL), KVS_OK);
    assert_true(run.word_mask < 64);
    for (int i = 0; i < 3000; i++) {
        char text[8];
        const size_t n = (size_t)rng_next_range(&r, 2, 6);
        for (size_t k = 0; k < n; k++) {
            text[k] = (char)('a' + rng_next_below(&r, N_LETTER));
        }
        check_text(&run, &m, text, n);
    }
    bpe_run_fini(&run);
    vocab_fini(&v);
}

/* "a" doubled twenty times has a piece for every power of two. */
static void a_mebibyte_in_one_piece(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    textbuf vocab_text;
    textbuf merge_text;
    char piece[1 << 13];
    buf_init(&vocab_text);
    buf_init(&merge_text);
    buf_text(&merge_text, "[");
    for (int k = 0; k < 12; k++) {
        memset(piece, 'a', (size_t)1 << k);
        piece[1 << k] = '\0';
        buf_printf(&merge_text, "%s[\"%s\", \"%s\"]", k > 0 ? ", " : "", piece, piece);
        buf_printf(&vocab_text, ", \"%s%s\": %d", piece, piece, 256 + k);
    }
    buf_text(&merge_text, "]");
    const tiny what = {.vocab = buf_str(&vocab_text), .merges = buf_str(&merge_text)};
    kvs_tokenizer *t = NULL;
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    char *text = malloc(N);
    int32_t *ids = malloc(N * sizeof *ids);
    assert_true(text != NULL && ids != NULL);
    memset(text, 'a', N);
    size_t n = 0;
    const int64_t from = clock_ns();
    assert_int_equal(kvs_tokens_encode(t, text, N - 1, 0, ids, N, &n, NULL), KVS_OK);
    /* n^2 steps would take a quarter of an hour. */
    assert_true(clock_ns() - from < INT64_C(20000000000));
    assert_int_equal(n, N / 4096 - 1 + 12);
    for (size_t i = 0; i < n; i++) {
        const size_t rest = N / 4096 - 1;
        assert_int_equal(ids[i], i < rest     ? 256 + 11
                                 : i + 1 == n ? 'a'
                                              : 256 + 10 - (int)(i - rest));
    }
    /* Nothing merges. */
    memset(text, 'x', N);
    assert_int_equal(kvs_tokens_encode(t, text, N, 0, ids, N, &n, NULL), KVS_OK);
    assert_int_equal(n, N);
    free(ids);
    free(text);
    kvs_tokenizer_close(t);
    buf_fini(&merge_text);
    buf_fini(&vocab_text);
}

/* The alphabet: every byte and nothing else, there and back. */
static void the_byte_alphabet(void **state)
{
    (void)state;
    char out[8];
    size_t n = 0;
    for (int b = 0; b < 256; b++) {
        char name[3];
        tiny_spell((unsigned char)b, name);
        assert_true(vocab_spell(name, strlen(name), out, &n));
        assert_int_equal(n, 1);
        assert_int_equal((unsigned char)out[0], b);
    }
    /* Space, DEL, U+00A0, U+00AD, U+0144, U+FF5C are no letters of it. */
    static const char *const other[] = {" ",        "\x7f",     "\xC2\xA0",
                                        "\xC2\xAD", "\xC5\x84", "\xEF\xBD\x9C"};
    for (size_t i = 0; i < UNIT_COUNT(other); i++) {
        assert_false(vocab_spell(other[i], strlen(other[i]), out, &n));
        assert_int_equal(n, strlen(other[i]));
        assert_memory_equal(out, other[i], n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ways_agree_with_the_definition),
        cmocka_unit_test(ignore_merges_takes_whole_pieces),
        cmocka_unit_test(remembered_words_do_not_mix),
        cmocka_unit_test(a_mebibyte_in_one_piece),
        cmocka_unit_test(the_byte_alphabet),
    };
    return cmocka_run_group_tests_name("bpe", tests, NULL, NULL);
}
