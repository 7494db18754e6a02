/* Caches: what a config becomes, what is refused, where rows land. */
#include "unit/unit.h"

#include <math.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "base/rng.h"
#include "kv/cache.h"
#include "num/kvfmt.h"

static kvs_cache_config config(kvs_kv_format kv, kvs_index_format index, int32_t n_layer,
                               int32_t n_index, int64_t n_page)
{
    kvs_cache_config c = kvs_cache_config_default();
    c.kv = kv;
    c.index_kv = index;
    c.n_layer = n_layer;
    c.n_index_layer = n_index;
    c.n_page = n_page;
    return c;
}

typedef struct pair {
    kvs_kv_format kv;
    kvs_index_format index;
    int32_t n_index;
    int64_t row, index_page; /* from the number contract, not from the code */
} pair;

static const pair pairs[] = {
    {KVS_KV_F32, KVS_INDEX_AUTO, 0, 2304, 0},
    {KVS_KV_F32, KVS_INDEX_F32, 2, 2304, 32768},
    {KVS_KV_F32, KVS_INDEX_FP8, 2, 2304, 8448},
    {KVS_KV_BF16, KVS_INDEX_AUTO, 0, 1152, 0},
    {KVS_KV_BF16, KVS_INDEX_FP8, 3, 1152, 8448},
    {KVS_KV_BF16, KVS_INDEX_F32, 1, 1152, 32768},
    {KVS_KV_FP8, KVS_INDEX_AUTO, 0, 576, 0},
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, 0, 656, 0},
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 656, 8448},
};

static void defaults_follow_the_contract(void **state)
{
    (void)state;
    kvs_cache *c = NULL;
    kvs_cache_config cfg = config(KVS_KV_AUTO, KVS_INDEX_AUTO, 2, 0, 1);
    assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
    assert_int_equal(c->fmt, KVS_KV_BF16);
    assert_int_equal(c->index_fmt, KVS_INDEX_AUTO);
    assert_int_equal(c->rule, KVS_SCALE_POW2);
    assert_int_equal(c->geom.n, 1);
    assert_int_equal(c->geom.i, 1);
    cache_free(c);
    cfg.n_index_layer = 2;
    assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
    assert_int_equal(c->fmt, KVS_KV_FP8_DS_MLA);
    assert_int_equal(c->index_fmt, KVS_INDEX_FP8);
    cache_free(c);
    cfg.kv = KVS_KV_F32;
    assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
    assert_int_equal(c->index_fmt, KVS_INDEX_F32);
    cache_free(c);
}

/* Sizes, page-aligned layers that do not overlap, zeroed memory, counters of memory. */
static void every_layer_has_its_own_pages(void **state)
{
    (void)state;
    const size_t os_page = mem_page_size();
    for (size_t k = 0; k < UNIT_COUNT(pairs); k++) {
        const pair *p = &pairs[k];
        kvs_cache *c = NULL;
        const kvs_cache_config cfg = config(p->kv, p->index, 3, p->n_index, 5);
        assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
        kvs_cache_info info;
        cache_get_info(c, &info);
        assert_int_equal(info.row_bytes, p->row);
        assert_int_equal(info.index_page_bytes, p->index_page);
        assert_int_equal(info.bytes_latent, 3 * 5 * 64 * p->row);
        assert_int_equal(info.bytes_index, p->n_index * 5 * p->index_page);
        assert_int_equal(c->n_slot, 320);
        uint8_t *end = c->map;
        for (int32_t i = 0; i < 3 + p->n_index; i++) {
            uint8_t *start = i < 3 ? c->layer[i].kv : c->index_layer[i - 3].keys;
            uint8_t *last = i < 3 ? cache_row(c, i, 319) + p->row
                                  : cache_index_page(c, i - 3, 4) + p->index_page;
            assert_int_equal((uintptr_t)start % os_page, 0);
            assert_true(start >= end);
            assert_true(start < end + os_page);
            end = last;
            assert_int_equal(start[0] | last[-1], 0);
        }
        assert_true(end <= (uint8_t *)c->map + c->map_bytes);
        if (k == 0) {
            /* One layer can be taken away from under a reader. */
            assert_int_equal(mprotect(c->layer[1].kv, os_page, PROT_NONE), 0);
            assert_int_equal(mprotect(c->layer[1].kv, os_page, PROT_READ | PROT_WRITE), 0);
        }
        cache_free(c);
    }
}

typedef struct refusal {
    const char *what; /* part of the message */
    void (*spoil)(kvs_cache_config *c);
    kvs_status status;
} refusal;

static const float scale_bad[4][2] = {{1.0f, 0.0f}, {1.0f, -0.5f}, {1.0f, NAN}, {1.0f, INFINITY}};

#define SPOIL(name, code)                                                                          \
    static void name(kvs_cache_config *c)                                                          \
    {                                                                                              \
        code;                                                                                      \
    }
SPOIL(no_layer, c->n_layer = 0)
SPOIL(many_layers, c->n_layer = 1025)
SPOIL(index_negative, c->n_index_layer = -1)
SPOIL(index_many, c->n_index_layer = 3)
SPOIL(no_page, c->n_page = 0)
SPOIL(page_negative, c->n_page = INT64_MIN)
SPOIL(page_many, c->n_page = 1 << 25)
SPOIL(dcp_3, c->dcp = 3)
SPOIL(dcp_7, c->dcp = 7)
SPOIL(dcp_9, (c->dcp = 9, c->kernel_level = 1))
SPOIL(dcp_negative, c->dcp = -1)
SPOIL(interleave_3, c->interleave = 3)
SPOIL(interleave_128, c->interleave = 128)
SPOIL(interleave_negative, c->interleave = -4)
SPOIL(rank_high, (c->dcp = 4, c->rank = 4))
SPOIL(rank_negative, c->rank = -1)
SPOIL(level_2, c->kernel_level = 2)
SPOIL(hadamard_2, (c->n_index_layer = 1, c->hadamard = 2))
SPOIL(hadamard_alone, c->hadamard = 1)
SPOIL(kv_unknown, c->kv = (kvs_kv_format)9)
SPOIL(index_unknown, (c->n_index_layer = 1, c->index_kv = (kvs_index_format)3))
SPOIL(index_without, c->index_kv = KVS_INDEX_FP8)
SPOIL(fp8_with_index, (c->kv = KVS_KV_FP8, c->n_index_layer = 1))
SPOIL(ds_f32_keys, (c->kv = KVS_KV_FP8_DS_MLA, c->n_index_layer = 1, c->index_kv = KVS_INDEX_F32))
SPOIL(rule_unknown, c->scale_rule = (kvs_scale_rule)3)
SPOIL(rule_exact_bf16, c->scale_rule = KVS_SCALE_EXACT)
SPOIL(scale_zero, (c->kv = KVS_KV_FP8, c->k_scale = scale_bad[0]))
SPOIL(scale_negative, (c->kv = KVS_KV_FP8, c->k_scale = scale_bad[1]))
SPOIL(scale_nan, (c->kv = KVS_KV_FP8, c->k_scale = scale_bad[2]))
SPOIL(scale_inf, (c->kv = KVS_KV_FP8, c->k_scale = scale_bad[3]))

static const refusal refusals[] = {
    {"n_layer 0", no_layer, KVS_INVALID},
    {"n_layer 1025", many_layers, KVS_INVALID},
    {"n_index_layer -1", index_negative, KVS_INVALID},
    {"n_index_layer 3: of 2 layers", index_many, KVS_INVALID},
    {"n_page 0", no_page, KVS_INVALID},
    {"n_page -9223372036854775808", page_negative, KVS_INVALID},
    {"1 to 33554431 pages", page_many, KVS_INVALID},
    {"dcp 4", dcp_3, KVS_UNSUPPORTED},
    {"dcp 8", dcp_7, KVS_UNSUPPORTED},
    {"dcp 9", dcp_9, KVS_INVALID},
    {"dcp -1", dcp_negative, KVS_INVALID},
    {"interleave 3", interleave_3, KVS_INVALID},
    {"interleave 128", interleave_128, KVS_INVALID},
    {"interleave -4", interleave_negative, KVS_INVALID},
    {"rank 4", rank_high, KVS_INVALID},
    {"rank -1", rank_negative, KVS_INVALID},
    {"kernel_level 2", level_2, KVS_INVALID},
    {"hadamard 2", hadamard_2, KVS_INVALID},
    {"hadamard", hadamard_alone, KVS_INVALID},
    {"row format 9", kv_unknown, KVS_INVALID},
    {"key format 3", index_unknown, KVS_INVALID},
    {"without index keys", index_without, KVS_INVALID},
    {"use fp8_ds_mla", fp8_with_index, KVS_UNSUPPORTED},
    {"use fp8 index keys", ds_f32_keys, KVS_UNSUPPORTED},
    {"scale_rule 3", rule_unknown, KVS_INVALID},
    {"scale_rule exact with bf16", rule_exact_bf16, KVS_INVALID},
    {"1", scale_zero, KVS_INVALID},
    {"-0.5", scale_negative, KVS_INVALID},
    {"nan", scale_nan, KVS_INVALID},
    {"inf", scale_inf, KVS_INVALID},
};

static void refusals_name_the_value(void **state)
{
    (void)state;
    const mem_stats before = mem_stats_get();
    kvs_cache_layer layers[2] = {{.kv = (void *)4096}, {.kv = (void *)8192}};
    for (size_t k = 0; k < UNIT_COUNT(refusals); k++) {
        const refusal *r = &refusals[k];
        kvs_cache_config cfg = config(KVS_KV_AUTO, KVS_INDEX_AUTO, 2, 0, 4);
        r->spoil(&cfg);
        kvs_error err;
        kvs_cache *c = (kvs_cache *)&cfg;
        assert_int_equal(cache_create(&c, &cfg, &err), r->status);
        assert_null(c);
        if (strstr(err.text, r->what) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", err.text, r->what);
        }
        c = (kvs_cache *)&cfg;
        assert_int_equal(cache_map(&c, &cfg, layers, 0, &err), r->status);
        assert_null(c);
    }
    assert_int_equal(mem_stats_get().n_live, before.n_live);
}

static void k_scale_is_kept_or_flagged(void **state)
{
    (void)state;
    const float scale[2] = {0.5f, 3.0f};
    kvs_cache *c = NULL;
    kvs_cache_config cfg = config(KVS_KV_FP8, KVS_INDEX_AUTO, 2, 0, 1);
    cfg.k_scale = scale;
    assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
    assert_true(c->layer[0].k_scale == 0.5f && c->layer[1].k_scale == 3.0f);
    kvs_cache_info info;
    cache_get_info(c, &info);
    assert_int_equal(info.k_scale_ignored, 0);
    attn_args a = {0};
    cache_attn_args(c, 1, &a);
    assert_true(a.k_scale == 3.0f);
    gather_args g = {0};
    cache_gather_args(c, 1, &g);
    assert_true(g.k_scale == 3.0f);
    cache_gather_args(c, 0, &g);
    assert_true(g.k_scale == 0.5f);
    cache_free(c);
    /* A checkpoint's scale must not reach an unquantised cache, whatever it is. */
    cfg.kv = KVS_KV_BF16;
    cfg.k_scale = scale_bad[2];
    assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
    cache_get_info(c, &info);
    assert_int_equal(info.k_scale_ignored, 1);
    assert_true(c->layer[0].k_scale == 1.0f && c->layer[1].k_scale == 1.0f);
    cache_free(c);
}

static void dcp_beyond_the_tree_needs_kernel_level(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 8; n++) {
        kvs_cache_config cfg = config(KVS_KV_BF16, KVS_INDEX_AUTO, 1, 0, 1);
        cfg.dcp = n;
        cfg.rank = n - 1;
        cfg.interleave = 64;
        cfg.kernel_level = 1;
        kvs_cache *c = NULL;
        assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
        assert_int_equal(c->geom.n, n);
        assert_int_equal(c->geom.i, 64);
        assert_int_equal(c->geom.rank, n - 1);
        cache_free(c);
        cfg.kernel_level = 0;
        const bool whole = n == 1 || n == 2 || n == 4 || n == 8;
        assert_int_equal(cache_create(&c, &cfg, NULL), whole ? KVS_OK : KVS_UNSUPPORTED);
        cache_free(c);
    }
}

/* 10^15 bytes of address space are more than a machine maps; the counters go back. */
static void sizes_beyond_the_machine_fail_cleanly(void **state)
{
    (void)state;
    const mem_stats before = mem_stats_get();
    kvs_cache_config cfg = config(KVS_KV_F32, KVS_INDEX_F32, 1024, 1024, (1 << 25) - 1);
    kvs_cache *c = (kvs_cache *)&cfg;
    kvs_error err;
    assert_int_equal(cache_create(&c, &cfg, &err), KVS_NOMEM);
    assert_null(c);
    assert_int_equal(mem_stats_get().n_live, before.n_live);
}

typedef struct map_case {
    kvs_cache_layer layer[2];
    kvs_status status;
    const char *what;
} map_case;

static void mapped_layers_are_checked(void **state)
{
    (void)state;
    _Alignas(64) static uint8_t mem[2 * 64 * 1152];
    uint8_t *m = mem; /* never touched: only addresses are checked */
    const int64_t row = 1152;
    const int64_t page = 64 * 1152;
    const map_case cases[] = {
        {{{m, page, row, m, 8448}, {m + page, page, row, NULL, 0}}, KVS_OK, ""},
        {{{m, page, row, NULL, 0}, {m + page, page, row, m, 8448}}, KVS_OK, ""},
        {{{m, INT64_C(1) << 40, row, m, 8448}, {m + 2, 1 << 20, row, NULL, 0}}, KVS_OK, ""},
        /* tokens of two layers in turn: a page is 63 double strides and one row */
        {{{m, page * 2, row * 2, m, 8448}, {m + row, page * 2, row * 2, NULL, 0}}, KVS_OK, ""},
        {{{m, page * 2 - row, row * 2, m, 8448}, {m + row, page * 2, row * 2, NULL, 0}},
         KVS_OK,
         ""},
        {{{m, page * 2 - row - 2, row * 2, m, 8448}, {m + row, page * 2, row * 2, NULL, 0}},
         KVS_INVALID,
         "page_stride 146302 is below 64 rows"},
        {{{NULL, page, row, m, 8448}, {m, page, row, NULL, 0}}, KVS_INVALID, "layer 0: kv is NULL"},
        {{{m, page, row, m, 8448}, {m + 2, page, row - 2, NULL, 0}},
         KVS_INVALID,
         "layer 1: row_stride 1150 is below the 1152 bytes of a bf16 row"},
        {{{m, page - 2, row, m, 8448}, {m + 2, page, row, NULL, 0}}, KVS_INVALID, "page_stride"},
        {{{m, -page, row, m, 8448}, {m + 2, page, row, NULL, 0}}, KVS_INVALID, "page_stride"},
        {{{m, INT64_MAX - 1, INT64_MAX - 1, m, 8448}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "is below 64 rows"},
        {{{m + 1, page, row, m, 8448}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "bf16 rows need multiples of 2 bytes"},
        {{{m, page + 1, row, m, 8448}, {m + 2, page, row, NULL, 0}}, KVS_INVALID, "multiples of 2"},
        {{{m, page * 2, row + 1, m, 8448}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "multiples of 2"},
        {{{m, page, row, m, 8447}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "index_stride 8447 is below the 8448 bytes"},
        {{{m, page, row, m, 8450}, {m + 2, page, row, NULL, 0}}, KVS_INVALID, "multiples of 4"},
        {{{m, page, row, m + 2, 8448}, {m + 2, page, row, NULL, 0}}, KVS_INVALID, "multiples of 4"},
        {{{m, page, row, NULL, 0}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "0 layers have index memory, n_index_layer is 1"},
        {{{m, page, row, m, 8448}, {m + 2, page, row, m + 4, 8448}},
         KVS_INVALID,
         "2 layers have index memory"},
        {{{m, page, row, m, 8448}, {m, page, row, NULL, 0}},
         KVS_INVALID,
         "layers 0 and 1 have the same memory"},
        {{{m, INT64_C(1) << 62, row, m, 8448}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "pass the address space"},
        {{{m, page, row, m, INT64_C(1) << 62}, {m + 2, page, row, NULL, 0}},
         KVS_INVALID,
         "pass the address space"},
    };
    const mem_stats before = mem_stats_get();
    for (size_t k = 0; k < UNIT_COUNT(cases); k++) {
        const kvs_cache_config cfg = config(KVS_KV_BF16, KVS_INDEX_AUTO, 2, 1, 5);
        kvs_cache *c = NULL;
        kvs_error err = {0};
        const kvs_status st = cache_map(&c, &cfg, cases[k].layer, 0, &err);
        if (st != cases[k].status || strstr(err.text, cases[k].what) == NULL) {
            fail_msg("case %zu: %d \"%s\", not \"%s\"", k, (int)st, err.text, cases[k].what);
        }
        if (c != NULL) {
            assert_int_equal(c->index_layer[0].of_layer, cases[k].layer[0].index != NULL ? 0 : 1);
        }
        cache_free(c);
    }
    assert_int_equal(mem_stats_get().n_live, before.n_live);
}

static void another_layouts_tag_is_refused(void **state)
{
    (void)state;
    static uint8_t mem[64 * 2304];
    uint64_t tag[UNIT_COUNT(pairs) + 1];
    for (size_t k = 0; k < UNIT_COUNT(tag); k++) {
        const pair *p = &pairs[k < UNIT_COUNT(pairs) ? k : 4];
        kvs_cache_config cfg = config(p->kv, p->index, 3, p->n_index, 1);
        cfg.hadamard = k == UNIT_COUNT(pairs);
        kvs_cache *c = NULL;
        assert_int_equal(cache_create(&c, &cfg, NULL), KVS_OK);
        tag[k] = c->tag;
        assert_true(tag[k] != 0);
        cache_free(c);
        for (size_t j = 0; j < k; j++) {
            assert_true(tag[j] != tag[k]);
        }
    }
    const kvs_cache_config cfg = config(KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, 1, 0, 1);
    const kvs_cache_layer layer = {mem, 64 * 656, 656, NULL, 0};
    for (size_t k = 0; k < UNIT_COUNT(tag); k++) {
        kvs_cache *c = NULL;
        kvs_error err = {0};
        const kvs_status st = cache_map(&c, &cfg, &layer, tag[k], &err);
        if (k == 7) {
            assert_int_equal(st, KVS_OK);
        } else {
            assert_int_equal(st, KVS_FORMAT);
            assert_null(c);
            assert_non_null(strstr(err.text, "fp8_ds_mla"));
            assert_non_null(
                strstr(err.text, kv_fmt_name((int32_t)(k < 9 ? pairs[k].kv : KVS_KV_BF16))));
        }
        cache_free(c);
    }
    kvs_cache *c = NULL;
    assert_int_equal(cache_map(&c, &cfg, &layer, 12345, NULL), KVS_FORMAT);
}

enum { N_TOK = 9, GUARD = 0xA5 };

/* Rows and keys of two interleaved layers of one pool: each lands where the strides say, as
 * num/kvfmt.h writes it, and nothing between them changes. */
static void writes_land_by_stride_and_nowhere_else(void **state)
{
    (void)state;
    static const int64_t slot[N_TOK] = {3, -1, 64, 0, 191, 192, 63, -7, 130};
    kern_table k;
    assert_int_equal(kern_init(&k, 0, NULL, NULL), KVS_OK);
    dev_queue q = {.n_worker = 1};
    float latent[N_TOK * 512];
    float rope[N_TOK * 64];
    float key[N_TOK * 128];
    rng r = rng_init(5, 0);
    for (size_t i = 0; i < N_TOK * 512; i++) {
        latent[i] = (float)rng_next_normal(&r);
        rope[i % (N_TOK * 64)] = (float)rng_next_normal(&r);
        key[i % (N_TOK * 128)] = (float)rng_next_normal(&r);
    }
    latent[2 * 512 + 7] = NAN;
    for (size_t p = 0; p < UNIT_COUNT(pairs); p++) {
        const int64_t row = pairs[p].row;
        const int64_t index = pairs[p].index_page;
        const bool has = index > 0;
        const int64_t row_stride = row + 12; /* 4-byte aligned */
        const int64_t layer_bytes = 64 * row_stride + index + 20;
        const int64_t block = 2 * layer_bytes;
        uint8_t *pool = malloc((size_t)(3 * block));
        uint8_t *want = malloc((size_t)(3 * block));
        memset(pool, GUARD, (size_t)(3 * block));
        memset(want, GUARD, (size_t)(3 * block));
        kvs_cache_layer layers[2];
        for (int32_t i = 0; i < 2; i++) {
            uint8_t *at = pool + i * layer_bytes;
            layers[i] = (kvs_cache_layer){at, block, row_stride, has ? at + 64 * row_stride : NULL,
                                          has ? block : 0};
        }
        kvs_cache_config cfg = config(pairs[p].kv, pairs[p].index, 2, has ? 2 : 0, 3);
        const float scale[2] = {0.25f, 0.75f};
        cfg.k_scale = scale;
        kvs_cache *c = NULL;
        assert_int_equal(cache_map(&c, &cfg, layers, 0, NULL), KVS_OK);
        cache_write(c, &k, &q, 1, latent, rope, KVS_DTYPE_F32, slot, N_TOK);
        for (int32_t i = 0; has && i < 2; i++) {
            cache_write_index(c, &k, &q, i, key, KVS_DTYPE_F32, slot, N_TOK - i);
        }
        const bool fp8 = pairs[p].kv == KVS_KV_FP8;
        const kv_writer w = {(int32_t)pairs[p].kv, KVS_SCALE_POW2, fp8 ? 0.75f : 1.0f,
                             KVS_DTYPE_F32};
        for (int32_t t = 0; t < N_TOK; t++) {
            if (slot[t] < 0 || slot[t] >= 192) {
                continue;
            }
            uint8_t *at = want + slot[t] / 64 * block;
            kv_row_write(&w, at + layer_bytes + slot[t] % 64 * row_stride, latent + t * 512,
                         rope + t * 64, NULL);
            for (int32_t i = 0; has && i < 2 && t < N_TOK - i; i++) {
                index_key_write(c->index_fmt, KVS_DTYPE_F32, at + i * layer_bytes + 64 * row_stride,
                                (int32_t)(slot[t] % 64), key + t * 128, NULL);
            }
        }
        assert_memory_equal(pool, want, (size_t)(3 * block));
        kvs_cache_info info;
        cache_get_info(c, &info);
        assert_int_equal(info.n_row_written, 6);
        assert_int_equal(info.n_index_written, has ? 11 : 0);
        assert_int_equal(info.n_bad_slot, has ? 6 : 2);
        assert_int_equal(info.n_nan, 1);
        cache_free(c);
        free(pool);
        free(want);
    }
}

static void no_memory_leaves_nothing(void **state)
{
    (void)state;
    static uint8_t mem[64 * 656];
    static _Alignas(64) uint8_t index[8448];
    const kvs_cache_layer layer = {mem, 64 * 656, 656, index, 8448};
    const kvs_cache_config cfg = config(KVS_KV_AUTO, KVS_INDEX_AUTO, 1, 1, 1);
    const mem_stats before = mem_stats_get();
    for (int32_t mapped = 0; mapped < 2; mapped++) {
        int64_t n = 0;
        for (;;) {
            kvs_cache *c = (kvs_cache *)&n;
            kvs_error err;
            mem_fail_after(++n);
            const kvs_status st =
                mapped ? cache_map(&c, &cfg, &layer, 0, &err) : cache_create(&c, &cfg, &err);
            mem_fail_after(0);
            if (st == KVS_OK) {
                cache_free(c);
                break;
            }
            assert_int_equal(st, KVS_NOMEM);
            assert_null(c);
            assert_int_equal(mem_stats_get().n_live, before.n_live);
        }
        assert_int_equal(n, mapped ? 4 : 5);
    }
    assert_int_equal(mem_stats_get().n_live, before.n_live);
    assert_int_equal(mem_stats_get().live_bytes, before.live_bytes);
    cache_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_follow_the_contract),
        cmocka_unit_test(every_layer_has_its_own_pages),
        cmocka_unit_test(refusals_name_the_value),
        cmocka_unit_test(k_scale_is_kept_or_flagged),
        cmocka_unit_test(dcp_beyond_the_tree_needs_kernel_level),
        cmocka_unit_test(sizes_beyond_the_machine_fail_cleanly),
        cmocka_unit_test(mapped_layers_are_checked),
        cmocka_unit_test(another_layouts_tag_is_refused),
        cmocka_unit_test(writes_land_by_stride_and_nowhere_else),
        cmocka_unit_test(no_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
