/* Snapshots as untrusted input: damage is detected, lies are refused by name, and a reader whose
 * set-up differs is told what differs. */
#include "unit/unit.h"

#include <math.h>

#include "base/hash.h"
#include "base/rng.h"
#include "kv/snap.h"
#include "unit/comm/ranks.h"
#include "unit/kv/shards.h"

enum { N_TOKEN = 130, WIDTH = 3, N_PAGE = 4 };

static const shape dsa = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 2, 0};
static const shape dense = {KVS_KV_FP8, KVS_INDEX_AUTO, 2, 0, 0};
static const int32_t table[WIDTH] = {3, 0, 2};
static const uint64_t model[2] = {7, 9};

typedef struct sample {
    const char *path;
    uint8_t *data;
    int64_t n;
    kvs_cache *c; /* a cache that can read it */
} sample;

/* Index keys of the sample's layers 0 and 2, as a mapped cache would say. */
static sample sample_new(const shape *s, bool with_tokens)
{
    sample f = {.path = test_path("sample.kvs")};
    const comm_config cfg = test_config(LONG_MS);
    int32_t tokens[N_TOKEN];
    for (int32_t t = 0; t < N_TOKEN; t++) {
        tokens[t] = t * 31;
    }
    comm *cm = NULL;
    assert_int_equal(comm_self_open(&cm, &cfg, NULL), KVS_OK);
    f.c = shard_new(s, 1, 1, 0, N_PAGE);
    for (int32_t i = 0; i < s->n_index; i++) {
        f.c->index_layer[i].of_layer = 2 * i;
    }
    shard_fill(f.c, s, table, N_TOKEN);
    assert_int_equal(snap_write(f.path, cm, f.c, table, WIDTH, N_TOKEN, with_tokens ? tokens : NULL,
                                model, NULL),
                     KVS_OK);
    comm_close(cm);
    f.data = file_bytes(f.path, &f.n);
    return f;
}

static void sample_free(sample *f)
{
    cache_free(f->c);
    free(f->data);
    test_dir_remove();
}

static kvs_status read_it(const sample *f, kvs_error *err)
{
    int32_t tokens[N_TOKEN];
    memset(err, 0, sizeof *err);
    return snap_read(f->path, f->c, table, WIDTH, model, tokens, N_TOKEN, err);
}

static void any_damaged_byte_of_the_header_is_detected(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, true);
    rng r = rng_init(3, 0);
    kvs_error err;
    kvs_snapshot_info info;
    assert_int_equal(read_it(&f, &err), KVS_OK);
    FILE *at = fopen(f.path, "r+b");
    setvbuf(at, NULL, _IONBF, 0);
    for (int64_t i = 0; i < SNAP_HEADER_BYTES; i++) {
        const int bit = 1 << rng_next_below(&r, 8);
        fseek(at, (long)i, SEEK_SET);
        fputc(f.data[i] ^ bit, at);
        const kvs_status st = snap_stat(f.path, &info, &err);
        if (st != KVS_FORMAT && st != KVS_UNSUPPORTED) {
            fail_msg("byte %d xor %d: %s", (int)i, bit, kvs_status_name(st));
        }
        assert_int_equal(st == KVS_UNSUPPORTED, i >= 8 && i < 12); /* the version */
        fseek(at, (long)i, SEEK_SET);
        fputc(f.data[i], at);
    }
    assert_int_equal(snap_stat(f.path, &info, &err), KVS_OK);
    fclose(at);
    sample_free(&f);
}

static void any_damaged_byte_of_the_pages_is_detected(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, true);
    rng r = rng_init(4, 0);
    kvs_error err;
    FILE *at = fopen(f.path, "r+b");
    setvbuf(at, NULL, _IONBF, 0);
    for (int32_t k = 0; k < 600; k++) {
        /* Every region: ids, the fill of the last page, hashes, the last byte. */
        const int64_t i = k == 0   ? f.n - 1
                          : k == 1 ? SNAP_HEADER_BYTES
                                   : rng_next_range(&r, SNAP_HEADER_BYTES, f.n - 1);
        const int bit = 1 << rng_next_below(&r, 8);
        fseek(at, (long)i, SEEK_SET);
        fputc(f.data[i] ^ bit, at);
        const kvs_status st = read_it(&f, &err);
        if (st != KVS_FORMAT || err.pos > i || err.pos < i - 64 * 656) {
            fail_msg("byte %d xor %d: %s, byte %d, \"%s\"", (int)i, bit, kvs_status_name(st),
                     (int)err.pos, err.text);
        }
        fseek(at, (long)i, SEEK_SET);
        fputc(f.data[i], at);
    }
    assert_int_equal(read_it(&f, &err), KVS_OK);
    fclose(at);
    sample_free(&f);
}

static void a_file_of_another_length_is_refused(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, true);
    kvs_error err;
    kvs_snapshot_info info;
    const int64_t cuts[] = {0,     1,       4095,    4096,   4097, 4096 + 4 * N_TOKEN - 1,
                            40000, f.n / 2, f.n - 8, f.n - 1};
    for (size_t k = 0; k < UNIT_COUNT(cuts); k++) {
        file_put(f.path, f.data, cuts[k]);
        assert_int_equal(snap_stat(f.path, &info, &err), KVS_FORMAT);
        assert_non_null(
            strstr(err.text, cuts[k] < 4096 ? "less than a snapshot's header" : "it is cut off"));
        assert_int_equal(read_it(&f, &err), KVS_FORMAT);
        assert_non_null(strstr(err.text, f.path));
    }
    uint8_t *more = calloc(1, (size_t)f.n + 4096);
    memcpy(more, f.data, (size_t)f.n);
    for (int64_t extra = 1; extra <= 4096; extra *= 8) {
        file_put(f.path, more, f.n + extra);
        assert_int_equal(snap_stat(f.path, &info, &err), KVS_FORMAT);
        assert_non_null(strstr(err.text, "bytes follow the last page"));
    }
    free(more);
    assert_int_equal(snap_stat(test_path("none"), &info, &err), KVS_IO);
    assert_int_equal(snap_stat(test_dir(), &info, &err), KVS_IO);
    sample_free(&f);
}

/* ---- headers that lie, with the checksum they should have ----------------------------------- */

typedef struct lie {
    int32_t at, size;
    uint64_t value;
    const char *says;
    int64_t pos; /* of the refusal; -1: not looked at */
} lie;

static void put(uint8_t *p, uint64_t v, int32_t size)
{
    for (int32_t i = 0; i < size; i++) {
        p[i] = (uint8_t)(v >> (8 * i));
    }
}

static void expect_lie(const sample *f, const lie *l, int32_t n, const char *says, int64_t pos)
{
    uint8_t head[SNAP_HEADER_BYTES];
    memcpy(head, f->data, sizeof head);
    for (int32_t k = 0; k < n; k++) {
        put(head + l[k].at, l[k].value, l[k].size);
    }
    put(head + 4088, XXH3_64bits(head, 4088), 8);
    snap_head h;
    kvs_error err = {0};
    const kvs_status st = snap_head_parse(&h, head, f->n, &err);
    if ((st != KVS_FORMAT && st != KVS_UNSUPPORTED) || strstr(err.text, says) == NULL ||
        (pos >= 0 && err.pos != pos)) {
        fail_msg("field %d = 0x%llx: %s, byte %d, \"%s\", not \"%s\"", l->at,
                 (unsigned long long)l->value, kvs_status_name(st), (int)err.pos, err.text, says);
    }
}

/* Offsets in the sample: ids at 4096, then five sections of three pages. */
enum {
    LATENT_BYTES = 3 * (64 * 656 + 8),
    INDEX_BYTES = 3 * (8448 + 8),
    LATENT_0 = 4096 + 4 * N_TOKEN,
    INDEX_0 = LATENT_0 + 3 * LATENT_BYTES,
    ENTRY_INDEX = 128 + 3 * 16
};

static const lie lies[] = {
    {0, 1, 'k', "not a cache snapshot", 0},
    {7, 1, 2, "not a cache snapshot", 0},
    {8, 4, 2, "snapshot version 2; this library reads version 1", 8},
    {8, 4, 0, "snapshot version 0", 8},
    {12, 4, 0, "no row format tag", 12},
    {12, 4, 0x4B564005, "no row format tag", 12},
    {12, 4, 0x4B562004, "no row format tag", 12}, /* pages of 32 */
    {12, 4, 0xFFFFFFFF, "no row format tag", 12},
    {12, 4, 0x4B564003, "fp8 rows with index keys", 12},
    {16, 4, 0x4B494003, "no index format tag", 12},
    {16, 4, 0x4B494002, "f32 index keys with fp8_ds_mla rows", 12},
    {16, 4, 0x4B490001, "no index format tag", 12},
    {16, 4, 0, "2 layers with index keys, an index tag for none", 16},
    {20, 4, 32, "pages of 32 tokens", 20},
    {20, 4, 0, "pages of 0 tokens", 20},
    {24, 4, 0, "0 layers with rows", 24},
    {24, 4, 1, "1 layers with rows and 2 with index keys", 24},
    {24, 4, 246, "246 layers with rows and 2", 24},
    {24, 4, 0x80000000, "2147483648 layers with rows", 24},
    {24, 4, 0xFFFFFFFF, "4294967295 layers with rows", 24},
    {28, 4, 0, "0 layers with index keys, an index tag for some", 16},
    {28, 4, 4, "4 with index keys", 24},
    {28, 4, 0xFFFFFFFD, "with index keys", 24}, /* the sum wraps to 0 */
    {32, 4, 0, "writer's dcp 0", 32},
    {32, 4, 9, "writer's dcp 9", 32},
    {36, 4, 0, "writer's interleave 0", 36},
    {36, 4, 3, "writer's interleave 3", 36},
    {36, 4, 128, "writer's interleave 128", 36},
    {40, 8, 0x80000000, "2147483648 tokens", 40},
    {40, 8, UINT64_MAX, "18446744073709551615 tokens", 40},
    {40, 8, 0x7FFFFFFF, "token ids: 8589934588 bytes at byte 4096", 48},
    {40, 8, N_TOKEN + 1, "rows of layer 0 begin at byte", LATENT_0},
    {40, 8, N_TOKEN - 1, "sections leave a gap", LATENT_0},
    {40, 8, N_TOKEN - 3, "sections leave a gap", LATENT_0},
    {40, 8, 0, "sections leave a gap", -1},
    {48, 8, 0, "a hash of token ids without token ids", 80},
    {48, 8, 8, "token ids: 520 bytes at byte 8 do not lie", 48},
    {48, 8, UINT64_MAX - 100, "do not lie between the header", 48}, /* the end wraps */
    {48, 8, 4100, "sections", -1},
    {56, 8, 100, "bytes follow the last page", -1},
    {56, 8, UINT64_MAX, "it is cut off", -1},
    {96, 1, 1, "unused byte 96 of the header is 1", 96},
    {127, 1, 255, "unused byte 127", 127},
    {128 + 5 * 16, 1, 1, "unused byte 208", 208},
    {4087, 1, 1, "unused byte 4087", 4087},
    {128, 8, 0, "rows of layer 0: 125976 bytes at byte 0 do not lie", 128},
    {128, 8, 4095, "do not lie", 128},
    {128, 8, UINT64_C(1) << 63, "do not lie", 128},
    {128, 8, UINT64_MAX - LATENT_BYTES + 1, "do not lie", 128},
    {128, 8, LATENT_0 + 1, "sections leave a gap", LATENT_0 + 1},
    {128, 8, LATENT_0 - 1, "sections overlap", LATENT_0 - 1},
    {144, 8, LATENT_0, "sections overlap", LATENT_0},
    {144, 8, LATENT_0 + 2 * LATENT_BYTES, "sections leave a gap", LATENT_0 + 2 * LATENT_BYTES},
    {136, 4, 0x40000000, "k_scale 2 of layer 0: fp8_ds_mla rows have none", 136},
    {136, 4, 0, "k_scale 0 of layer 0", 136},
    {140, 1, 1, "unused bytes 140 to 143", 140},
    {ENTRY_INDEX + 8, 4, 3, "index keys 0 belong to layer 3", ENTRY_INDEX + 8},
    {ENTRY_INDEX + 8, 4, UINT32_MAX, "index keys 1 belong to layer 2", ENTRY_INDEX + 24},
    {ENTRY_INDEX + 8, 4, 2, "index keys 1 belong to layer 2", ENTRY_INDEX + 24},
    {ENTRY_INDEX + 24, 4, UINT32_MAX, "index keys 1 belong to layer 4294967295", ENTRY_INDEX + 24},
    {ENTRY_INDEX + 24, 4, 0x80000000, "index keys 1 belong to layer 2147483648", ENTRY_INDEX + 24},
    {ENTRY_INDEX + 12, 4, 1, "unused bytes", ENTRY_INDEX + 12},
};

static void every_lie_of_a_header_has_its_own_refusal(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, true);
    assert_int_equal(f.n, INDEX_0 + 2 * INDEX_BYTES);
    for (size_t k = 0; k < UNIT_COUNT(lies); k++) {
        expect_lie(&f, &lies[k], 1, lies[k].says, lies[k].pos);
    }
    /* No ids and no hash of ids: their bytes belong to nobody. */
    const lie no_ids[3] = {{48, 8, 0, NULL, 0}, {80, 8, 0, NULL, 0}, {88, 8, 0, NULL, 0}};
    expect_lie(&f, no_ids, 3, "sections leave a gap", LATENT_0);
    /* The last section given to nobody: the sections end before the file. */
    const lie fewer[3] = {
        {28, 4, 1, NULL, 0}, {ENTRY_INDEX + 16, 8, 0, NULL, 0}, {ENTRY_INDEX + 24, 4, 0, NULL, 0}};
    expect_lie(&f, fewer, 3, "bytes follow the last page", INDEX_0 + INDEX_BYTES);
    /* Sections in another order are another file of the same format. */
    uint8_t head[SNAP_HEADER_BYTES];
    memcpy(head, f.data, sizeof head);
    put(head + 128, LATENT_0 + LATENT_BYTES, 8);
    put(head + 144, LATENT_0, 8);
    put(head + 4088, XXH3_64bits(head, 4088), 8);
    snap_head h;
    assert_int_equal(snap_head_parse(&h, head, f.n, NULL), KVS_OK);
    assert_int_equal(h.layer[1].at, LATENT_0);
    sample_free(&f);

    f = sample_new(&dense, false);
    static const float bad[] = {0.0f, -1.0f, NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < UNIT_COUNT(bad); k++) {
        const lie l = {136 + 16, 4, f32_bits(bad[k]), "", 0};
        expect_lie(&f, &l, 1, "k_scale of layer 1 is ", 152);
    }
    sample_free(&f);
}

static void a_negative_token_id_is_refused(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, true);
    put(f.data + 4096 + 4 * 77, 0xFFFFFFFB, 4);
    const XXH128_hash_t ids = XXH3_128bits(f.data + 4096, 4 * N_TOKEN);
    put(f.data + 80, ids.low64, 8);
    put(f.data + 88, ids.high64, 8);
    put(f.data + 4088, XXH3_64bits(f.data, 4088), 8);
    file_put(f.path, f.data, f.n);
    kvs_error err;
    assert_int_equal(read_it(&f, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "token id -5 at position 77"));
    sample_free(&f);
}

/* ---- readers that do not fit ---------------------------------------------------------------- */

static void expect_reader(const sample *f, const shape *s, kvs_status want, const char *says)
{
    kvs_cache *c = shard_new(s, 1, 1, 0, N_PAGE);
    kvs_error err = {0};
    assert_int_equal(snap_read(f->path, c, table, WIDTH, NULL, NULL, 0, &err), want);
    if (want != KVS_OK && strstr(err.text, says) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, says);
    }
    kvs_cache *untouched = shard_new(s, 1, 1, 0, N_PAGE);
    assert_true(want == KVS_OK || shard_differs(c, untouched) == -1);
    cache_free(untouched);
    cache_free(c);
}

static void a_reader_of_another_layout_is_told_both(void **state)
{
    (void)state;
    sample f = sample_new(&dsa, false);
    static const struct {
        shape s;
        const char *says[2];
    } others[] = {
        {{KVS_KV_BF16, KVS_INDEX_FP8, 3, 2, 0}, {"fp8_ds_mla rows", "bf16 rows"}},
        {{KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, 3, 0, 0}, {"fp8 index keys", "no index keys"}},
        {{KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 2, 1}, {"fp8 index keys, the", "Hadamard-rotated"}},
        {{KVS_KV_FP8, KVS_INDEX_AUTO, 3, 0, 0}, {"fp8_ds_mla rows (656", "fp8 rows (576"}},
    };
    for (size_t k = 0; k < UNIT_COUNT(others); k++) {
        expect_reader(&f, &others[k].s, KVS_FORMAT, others[k].says[0]);
        expect_reader(&f, &others[k].s, KVS_FORMAT, others[k].says[1]);
    }
    const shape more = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 4, 2, 0};
    const shape fewer = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 1, 0};
    const shape all = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 3, 0};
    expect_reader(&f, &more, KVS_INVALID,
                  "3 layers of rows and 2 of index keys, the cache 4 and 2");
    expect_reader(&f, &fewer, KVS_INVALID, "the cache 3 and 1");
    expect_reader(&f, &all, KVS_INVALID, "the cache 3 and 3");
    expect_reader(&f, &dsa, KVS_OK, ""); /* a created cache of 2 of 3 does not say which */
    f.c->index_layer[1].of_layer = 1;
    kvs_error err;
    int32_t tokens[N_TOKEN];
    assert_int_equal(snap_read(f.path, f.c, table, WIDTH, NULL, NULL, 0, &err), KVS_INVALID);
    assert_non_null(
        strstr(err.text, "index keys 1 belong to layer 2 in the snapshot and to layer 1"));
    f.c->index_layer[1].of_layer = 2;

    static const uint64_t other[2] = {7, 8};
    assert_int_equal(snap_read(f.path, f.c, table, WIDTH, other, NULL, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "00000000000000090000000000000007"));
    assert_non_null(strstr(err.text, "00000000000000080000000000000007"));
    assert_int_equal(snap_read(f.path, f.c, table, WIDTH, model, tokens, N_TOKEN, &err),
                     KVS_INVALID);
    assert_non_null(strstr(err.text, "holds no token ids"));
    assert_int_equal(snap_read(f.path, f.c, table, 2, model, NULL, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "130 tokens need 3"));
    const int32_t far[WIDTH] = {0, 1, N_PAGE};
    assert_int_equal(snap_read(f.path, f.c, far, WIDTH, model, NULL, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "entry 2 is page 4"));
    sample_free(&f);

    f = sample_new(&dsa, true);
    assert_int_equal(snap_read(f.path, f.c, table, WIDTH, model, tokens, N_TOKEN - 1, &err),
                     KVS_LIMIT);
    assert_non_null(strstr(err.text, "130 token ids do not fit a buffer of 129"));
    sample_free(&f);

    f = sample_new(&dense, false);
    f.c->layer[1].k_scale = 0.75f;
    assert_int_equal(snap_read(f.path, f.c, table, WIDTH, NULL, NULL, 0, &err), KVS_INVALID);
    assert_non_null(
        strstr(err.text, "layer 1: rows were written with k_scale 1, the cache has 0.75"));
    sample_free(&f);
}

static void a_cache_of_too_many_layers_is_refused(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    static const struct {
        int32_t n_layer, n_index;
        kvs_status want;
    } cases[] = {{247, 0, KVS_OK}, {248, 0, KVS_LIMIT}, {124, 123, KVS_OK}, {124, 124, KVS_LIMIT}};
    for (size_t k = 0; k < UNIT_COUNT(cases); k++) {
        const shape s = {KVS_KV_BF16, KVS_INDEX_FP8, cases[k].n_layer, cases[k].n_index, 0};
        kvs_cache *c = shard_new(&s, 1, 1, 0, 1);
        const int32_t page = 0;
        shard_fill(c, &s, &page, 2);
        comm *cm = NULL;
        kvs_error err = {0};
        assert_int_equal(comm_self_open(&cm, &cfg, NULL), KVS_OK);
        const char *path = test_path("many.kvs");
        assert_int_equal(snap_write(path, cm, c, &page, 1, 2, NULL, NULL, &err), cases[k].want);
        comm_close(cm);
        if (cases[k].want == KVS_OK) {
            kvs_cache *got = shard_new(&s, 1, 1, 0, 1);
            assert_int_equal(snap_read(path, got, &page, 1, NULL, NULL, 0, &err), KVS_OK);
            assert_int_equal(shard_differs(got, c), -1);
            cache_free(got);
        } else {
            assert_non_null(strstr(err.text, "247 in all"));
        }
        cache_free(c);
    }
    test_dir_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_damaged_byte_of_the_header_is_detected),
        cmocka_unit_test(any_damaged_byte_of_the_pages_is_detected),
        cmocka_unit_test(a_file_of_another_length_is_refused),
        cmocka_unit_test(every_lie_of_a_header_has_its_own_refusal),
        cmocka_unit_test(a_negative_token_id_is_refused),
        cmocka_unit_test(a_reader_of_another_layout_is_told_both),
        cmocka_unit_test(a_cache_of_too_many_layers_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
