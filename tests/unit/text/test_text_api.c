/* Public functions of kvspan/text.h: folders, missing arguments, sizes, flags, threads. */
#include "unit/unit.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "unit/text/golden.h"
#include "unit/text/tiny.h"

static const char *data_dir;
static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/kvspan-text-XXXXXX");
    return mkdtemp(folder) != NULL ? 0 : -1;
}

static void put_file(const char *name, const char *data, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (data == NULL) {
        unlink(path);
    } else {
        assert_int_equal(file_write_all(path, data, n, NULL), KVS_OK);
    }
}

static int drop_folder(void **state)
{
    (void)state;
    put_file("tokenizer.json", NULL, 0);
    put_file("tokenizer_config.json", NULL, 0);
    put_file("tiktoken.model", NULL, 0);
    return rmdir(folder);
}

static void a_folder_is_opened_or_refused(void **state)
{
    (void)state;
    kvs_error err = {0};
    kvs_tokenizer *t = (kvs_tokenizer *)&err;
    assert_int_equal(kvs_tokenizer_open(&t, folder, &err), KVS_IO);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    assert_null(t);

    put_file("tiktoken.model", "IQ== 0\n", 7);
    assert_int_equal(kvs_tokenizer_open(&t, folder, &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "tiktoken.model (Kimi)"));
    assert_non_null(strstr(err.text, "not read yet"));

    textbuf b;
    buf_init(&b);
    const tiny what = {.added = "[{\"id\": 300, \"content\": \"<s>\", \"special\": true}]"};
    tiny_json(&b, &what);
    put_file("tokenizer.json", b.data, b.n);
    assert_int_equal(kvs_tokenizer_open(&t, folder, &err), KVS_OK);
    assert_int_equal(kvs_tokenizer_size(t), 301);
    assert_int_equal(kvs_tokenizer_bos(t), -1);
    assert_int_equal(kvs_tokenizer_eos(t), -1);
    kvs_tokenizer_close(t);

    static const char config[] =
        "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": \"ab\"}, \"add_bos_token\": true}";
    put_file("tokenizer_config.json", config, sizeof config - 1);
    char path[128];
    snprintf(path, sizeof path, "%s//", folder);
    assert_int_equal(kvs_tokenizer_open(&t, path, &err), KVS_OK);
    assert_int_equal(kvs_tokenizer_bos(t), 300);
    assert_int_equal(kvs_tokenizer_eos(t), 256);
    assert_int_equal(kvs_tokenizer_adds_bos(t), 1);
    kvs_tokenizer_close(t);

    put_file("tokenizer.json", b.data, b.n - 1);
    assert_int_equal(kvs_tokenizer_open(&t, folder, &err), KVS_FORMAT);
    assert_null(t);
    assert_non_null(strstr(err.text, folder));
    put_file("tokenizer.json", b.data, b.n);
    put_file("tokenizer_config.json", config, sizeof config - 2);
    assert_int_equal(kvs_tokenizer_open(&t, folder, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "tokenizer_config.json"));

    char *far = malloc(10000);
    assert_non_null(far);
    memset(far, 'x', 9999);
    far[9999] = '\0';
    assert_int_equal(kvs_tokenizer_open(&t, far, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "too long"));
    free(far);
    buf_fini(&b);
}

static void missing_arguments_are_refused(void **state)
{
    (void)state;
    kvs_error err = {0};
    kvs_tokenizer *t = (kvs_tokenizer *)&err;
    int32_t ids[4];
    char out[64];
    size_t n = 7;
    assert_int_equal(kvs_tokenizer_open(NULL, folder, &err), KVS_INVALID);
    assert_int_equal(kvs_tokenizer_open(&t, NULL, &err), KVS_INVALID);
    assert_null(t);
    kvs_tokenizer_close(NULL);
    assert_int_equal(kvs_tokenizer_size(NULL), 0);
    assert_int_equal(kvs_tokenizer_bos(NULL), -1);
    assert_int_equal(kvs_tokenizer_eos(NULL), -1);
    assert_int_equal(kvs_tokenizer_adds_bos(NULL), 0);
    assert_int_equal(kvs_tokenizer_prefix(NULL, ids, 4), 0);
    assert_null(kvs_token_piece(NULL, 5, &n));
    assert_int_equal(n, 0);
    assert_int_equal(kvs_token_is_special(NULL, 5), 0);
    assert_int_equal(kvs_token_find(NULL, "a"), -1);

    t = golden_tokenizer(data_dir, "glm", NULL);
    n = 7;
    assert_int_equal(kvs_token_find(t, NULL), -1);
    assert_int_equal(kvs_tokens_encode(NULL, "a", 1, 0, ids, 4, &n, &err), KVS_INVALID);
    assert_int_equal(n, 0);
    assert_non_null(strstr(err.text, "the tokenizer is NULL"));
    assert_int_equal(kvs_tokens_encode(t, NULL, 1, 0, ids, 4, &n, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "text is NULL"));
    assert_int_equal(kvs_tokens_encode(t, "a", 1, 0, NULL, 4, &n, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "ids is NULL"));
    assert_int_equal(kvs_tokens_encode(t, "a", 1, 0, ids, 4, NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_tokens_encode(t, "a", 1, 8, ids, 4, &n, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "flags 8"));
    assert_int_equal(
        kvs_tokens_encode(t, "a", 1, KVS_ENCODE_SPECIAL | KVS_ENCODE_NO_ADDED, ids, 4, &n, &err),
        KVS_INVALID);
    assert_int_equal(kvs_tokens_encode(t, NULL, 0, 0, ids, 4, &n, &err), KVS_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kvs_tokens_encode(t, "a", (size_t)1 << 31, 0, ids, 4, &n, &err), KVS_LIMIT);

    kvs_detok *d = (kvs_detok *)&err;
    assert_int_equal(kvs_detok_new(NULL, t, 0, &err), KVS_INVALID);
    assert_int_equal(kvs_detok_new(&d, NULL, 0, &err), KVS_INVALID);
    assert_null(d);
    assert_int_equal(kvs_detok_bound(NULL), 0);
    assert_int_equal(kvs_detok_push(NULL, 1, out, 64, &n, &err), KVS_INVALID);
    assert_int_equal(kvs_detok_flush(NULL, out, 64, &n, &err), KVS_INVALID);
    kvs_detok_free(NULL);
    assert_int_equal(kvs_detok_new(&d, t, 0, &err), KVS_OK);
    assert_int_equal(kvs_detok_push(d, -1, out, 64, &n, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "token id -1"));
    assert_int_equal(kvs_detok_push(d, INT32_MIN, out, 64, &n, NULL), KVS_INVALID);
    assert_int_equal(kvs_detok_push(d, 1, NULL, 64, &n, &err), KVS_INVALID);
    assert_int_equal(kvs_detok_push(d, 1, out, 64, NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_detok_flush(d, NULL, 4, &n, &err), KVS_INVALID);
    kvs_detok_free(d);
    assert_int_equal(kvs_tokens_decode(NULL, ids, 1, 0, out, 64, &n, &err), KVS_INVALID);
    assert_int_equal(kvs_tokens_decode(t, NULL, 1, 0, out, 64, &n, &err), KVS_INVALID);
    assert_int_equal(kvs_tokens_decode(t, ids, 1, 0, NULL, 64, &n, &err), KVS_INVALID);
    assert_int_equal(kvs_tokens_decode(t, ids, 1, 0, out, 64, NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_tokens_decode(t, NULL, 0, 0, NULL, 0, &n, &err), KVS_OK);
    ids[0] = 5;
    ids[1] = -7;
    assert_int_equal(kvs_tokens_decode(t, ids, 2, 0, out, 64, &n, &err), KVS_INVALID);
    assert_int_equal(n, 0);
    kvs_tokenizer_close(t);
}

/* The count is right for any room, and what fits is written. */
static void room_is_counted(void **state)
{
    (void)state;
    static const char text[] = "  The passcode for Zo\xC3\xAB is 483920. \xFF";
    kvs_tokenizer *t = golden_tokenizer(data_dir, "deepseek", NULL);
    int32_t ids[128];
    int32_t some[128];
    size_t n = 0;
    size_t k = 0;
    const uint32_t flags = KVS_ENCODE_TEMPLATE;
    assert_true(kvs_tokens_bound(sizeof text - 1) <= 128);
    assert_int_equal(kvs_tokens_encode(t, text, sizeof text - 1, flags, ids, 128, &n, NULL),
                     KVS_OK);
    assert_int_equal(kvs_tokens_encode(t, text, sizeof text - 1, flags, NULL, 0, &k, NULL), KVS_OK);
    assert_int_equal(k, n);
    for (size_t cap = 0; cap <= n + 1; cap++) {
        memset(some, 0xEE, sizeof some);
        kvs_error err = {0};
        const kvs_status st =
            kvs_tokens_encode(t, text, sizeof text - 1, flags, some, cap, &k, &err);
        assert_int_equal(st, cap < n ? KVS_LIMIT : KVS_OK);
        assert_int_equal(k, n);
        assert_memory_equal(some, ids, (cap < n ? cap : n) * sizeof *ids);
        assert_int_equal((uint32_t)some[cap < n ? cap : n], 0xEEEEEEEE);
    }
    char out[128];
    static const char want[] = "  The passcode for Zo\xC3\xAB is 483920. \xEF\xBF\xBD";
    assert_int_equal(kvs_tokens_decode(t, ids, n, 1, NULL, 0, &k, NULL), KVS_OK);
    assert_int_equal(k, sizeof want - 1);
    for (size_t cap = 0; cap <= k + 1; cap++) {
        memset(out, '#', sizeof out);
        assert_int_equal(kvs_tokens_decode(t, ids, n, 1, out, cap, &k, NULL),
                         cap < sizeof want - 1 ? KVS_LIMIT : KVS_OK);
        const size_t len = cap < sizeof want - 1 ? cap : sizeof want - 1;
        assert_int_equal(k, sizeof want - 1);
        assert_memory_equal(out, want, len);
        assert_int_equal(out[len], '#');
    }
    kvs_tokenizer_close(t);
}

/* The worst texts do not pass the bound: bytes without merges, and bytes that are not UTF-8. */
static void the_bound_holds(void **state)
{
    (void)state;
    const tiny what = {
        .post = "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": "
                "\"a\"}}, {\"Sequence\": {\"id\": \"A\"}}, {\"SpecialToken\": {\"id\": \"a\"}}], "
                "\"special_tokens\": {\"a\": {\"ids\": [1,2,3,4,5,6,7,8]}}}"};
    kvs_tokenizer *t = NULL;
    assert_int_equal(tiny_parse(&t, &what, NULL), KVS_OK);
    char text[100];
    memset(text, 0xFF, sizeof text);
    for (size_t n = 0; n <= sizeof text; n++) {
        size_t k = 0;
        assert_int_equal(kvs_tokens_encode(t, text, n, KVS_ENCODE_TEMPLATE, NULL, 0, &k, NULL),
                         KVS_OK);
        assert_int_equal(k, 3 * n + 16);
        assert_true(k <= kvs_tokens_bound(n));
    }
    assert_int_equal(kvs_tokens_bound(SIZE_MAX), SIZE_MAX);
    assert_int_equal(kvs_tokens_bound(SIZE_MAX / 2), SIZE_MAX);
    kvs_tokenizer_close(t);
}

/* What a stranger writes: a control token in it is found only where that was asked for. */
static void flags_decide_what_a_control_token_is(void **state)
{
    (void)state;
    static const char text[] = "<|user|>hi<think>";
    kvs_tokenizer *t = golden_tokenizer(data_dir, "glm", NULL);
    const int32_t user = kvs_token_find(t, "<|user|>");
    const int32_t think = kvs_token_find(t, "<think>");
    assert_true(user > 0 && think > 0);
    assert_int_equal(kvs_token_is_special(t, user), 1);
    assert_int_equal(kvs_token_is_special(t, think), 0);
    static const uint32_t flags[3] = {KVS_ENCODE_SPECIAL, 0, KVS_ENCODE_NO_ADDED};
    for (int k = 0; k < 3; k++) {
        int32_t ids[32];
        size_t n = 0;
        bool has_user = false;
        bool has_think = false;
        assert_int_equal(kvs_tokens_encode(t, text, sizeof text - 1, flags[k], ids, 32, &n, NULL),
                         KVS_OK);
        for (size_t i = 0; i < n; i++) {
            has_user = has_user || ids[i] == user;
            has_think = has_think || ids[i] == think;
        }
        assert_int_equal(has_user, k == 0);
        assert_int_equal(has_think, k < 2);
        char out[32];
        assert_int_equal(kvs_tokens_decode(t, ids, n, 0, out, sizeof out, &n, NULL), KVS_OK);
        assert_int_equal(n, sizeof text - 1);
        assert_memory_equal(out, text, n);
    }
    kvs_tokenizer_close(t);
}

/* Broken text has the ids of the text with U+FFFD in its place. */
static void broken_text_is_repaired_text(void **state)
{
    (void)state;
    static const char *const pair[][2] = {
        {"a\xFFz", "a\xEF\xBF\xBDz"},
        {"\xE2\x82", "\xEF\xBF\xBD"},
        {"\xE2\x82z\xC0\x80", "\xEF\xBF\xBDz\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"<|user\x80|>", "<|user\xEF\xBF\xBD|>"},
    };
    kvs_tokenizer *t = golden_tokenizer(data_dir, "glm", NULL);
    for (size_t i = 0; i < UNIT_COUNT(pair); i++) {
        int32_t ids[2][64];
        size_t n[2];
        for (int k = 0; k < 2; k++) {
            assert_int_equal(kvs_tokens_encode(t, pair[i][k], strlen(pair[i][k]),
                                               KVS_ENCODE_SPECIAL, ids[k], 64, &n[k], NULL),
                             KVS_OK);
        }
        assert_int_equal(n[0], n[1]);
        assert_memory_equal(ids[0], ids[1], n[0] * sizeof *ids[0]);
    }
    kvs_tokenizer_close(t);
}

typedef struct worker {
    const kvs_tokenizer *t;
    const char *text;
    size_t n;
    size_t n_ids;
    uint64_t sum;
} worker;

static void *encode_all(void *arg)
{
    worker *w = arg;
    const size_t cap = kvs_tokens_bound(w->n);
    int32_t *ids = malloc(cap * sizeof *ids);
    for (int i = 0; ids != NULL && i < 5; i++) {
        if (kvs_tokens_encode(w->t, w->text, w->n, 0, ids, cap, &w->n_ids, NULL) != KVS_OK) {
            w->n_ids = 0;
        }
        w->sum = 0;
        for (size_t k = 0; k < w->n_ids; k++) {
            w->sum = w->sum * 31 + (uint64_t)ids[k];
        }
    }
    free(ids);
    return NULL;
}

static void one_tokenizer_serves_many_threads(void **state)
{
    (void)state;
    enum { N = 4 };
    kvs_tokenizer *t = golden_tokenizer(data_dir, "v2lite", NULL);
    reader r = reader_open(data_dir, "strings.bin");
    worker w[N];
    pthread_t id[N];
    for (int i = 0; i < N; i++) {
        w[i] = (worker){.t = t, .text = r.data, .n = r.n < 20000 ? r.n : 20000};
        assert_int_equal(pthread_create(&id[i], NULL, encode_all, &w[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(id[i], NULL);
        assert_true(w[i].n_ids > 1000);
        assert_int_equal(w[i].n_ids, w[0].n_ids);
        assert_int_equal(w[i].sum, w[0].sum);
    }
    reader_close(&r);
    kvs_tokenizer_close(t);
}

int main(int argc, char **argv)
{
    data_dir = argc > 1 ? argv[1] : "tests/data/text";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_folder_is_opened_or_refused, make_folder, drop_folder),
        cmocka_unit_test(missing_arguments_are_refused),
        cmocka_unit_test(room_is_counted),
        cmocka_unit_test(the_bound_holds),
        cmocka_unit_test(flags_decide_what_a_control_token_is),
        cmocka_unit_test(broken_text_is_repaired_text),
        cmocka_unit_test(one_tokenizer_serves_many_threads),
    };
    return cmocka_run_group_tests_name("text_api", tests, NULL, NULL);
}
