/* Addresses past 2^31 and 2^32 bytes: pages of one pool with the strides that engines have, written
 * and read back through every kernel variant this machine runs. A far pool is an address range whose
 * pages take memory when they are touched; each test touches a few. */
#include "unit/unit.h"

#include "base/mem.h"
#include "kv/snap.h"
#include "kv/table.h"
#include "num/kvfmt.h"
#include "unit/kv/run_kern.h"
#include "unit/kv/shards.h"

enum { N_FAR = 5, LEN = N_FAR * 64 };

/* What a far pool looks like: one block per page, rows at its start, index keys behind them. */
typedef struct far_case {
    const char *name;
    kvs_kv_format kv;
    kvs_index_format index;
    int64_t stride;       /* of rows; 0: no rows are touched */
    int64_t index_stride; /* 0: no index keys                */
    int32_t page[N_FAR];  /* of the block table, in this order */
} far_case;

static const far_case cases[] = {
    /* 2^31 lies in block 1993, 2^32 in block 3987. */
    {"ds_mla in one pool",
     KVS_KV_FP8_DS_MLA,
     KVS_INDEX_FP8,
     1077120,
     1077120,
     {4564, 1993, 2143, 7, 1994}},
    {"bf16 in one pool", KVS_KV_BF16, KVS_INDEX_F32, 1077120, 1077120, {1994, 4564, 0, 2143, 1993}},
    {"f32 in one pool",
     KVS_KV_F32,
     KVS_INDEX_FP8,
     1077120,
     1077120,
     {2143, 1993, 1994, 4564, 3988}},
    {"fp8 in one pool", KVS_KV_FP8, KVS_INDEX_AUTO, 1077120, 0, {1993, 3988, 4564, 1994, 2143}},
    /* Index pages 16384 apart: 2^31 at page 131072, 2^32 at 262144. */
    {"index pages a million in",
     KVS_KV_BF16,
     KVS_INDEX_FP8,
     0,
     16384,
     {1048575, 131072, 262143, 262144, 1048576}},
    /* Row offsets of the last slots an int32 can name. */
    {"the largest pool",
     KVS_KV_FP8,
     KVS_INDEX_AUTO,
     64 * 576,
     0,
     {(1 << 25) - 2, 116509, 58255, 1 << 24, 3}},
};

typedef struct pool_pair {
    kvs_cache *far, *near;
    uint8_t *map;
    size_t map_bytes;
    int32_t near_table[N_FAR];
} pool_pair;

typedef struct far_job {
    const far_case *f;
    pool_pair *p;
} far_job;

static int64_t last_page(const far_case *f)
{
    int64_t last = 0;
    for (int32_t b = 0; b < N_FAR; b++) {
        last = f->page[b] > last ? f->page[b] : last;
    }
    return last;
}

/* A far cache, and a near one of N_FAR pages whose table is 0, 1, ... */
static void pools_open(pool_pair *p, const far_case *f)
{
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = f->kv;
    cfg.index_kv = f->index;
    cfg.n_index_layer = f->index_stride > 0;
    const float k_scale = 0.5f;
    cfg.k_scale = f->kv == KVS_KV_FP8 ? &k_scale : NULL;
    cfg.n_page = N_FAR;
    kvs_error err = {0};
    assert_int_equal(cache_create(&p->near, &cfg, NULL), KVS_OK);
    const int64_t page = 64 * cache_row_bytes(p->near);
    const int64_t stride = f->stride > 0 ? f->stride : page;
    const int64_t index_at = f->stride > 0 ? page : 0;
    cfg.n_page = last_page(f) + 1;
    /* Rows that no test touches may lie over the index keys. */
    p->map_bytes = (size_t)(cfg.n_page * (f->stride > 0 ? f->stride : f->index_stride) + 65536);
    p->map = mem_map_pages(p->map_bytes, 0, &err);
    if (p->map == NULL) {
        fail_msg("%s: %s", f->name, err.text);
    }
    const kvs_cache_layer layer = {p->map, stride, cache_row_bytes(p->near),
                                   f->index_stride > 0 ? p->map + index_at : NULL, f->index_stride};
    if (cache_map(&p->far, &cfg, &layer, p->near->tag, &err) != KVS_OK) {
        fail_msg("%s: %s", f->name, err.text);
    }
    for (int32_t b = 0; b < N_FAR; b++) {
        p->near_table[b] = b;
    }
}

static void pools_close(pool_pair *p)
{
    cache_free(p->far);
    cache_free(p->near);
    mem_unmap_pages(p->map, p->map_bytes);
}

static float latent[LEN * 512], rope[LEN * 64], key[LEN * 128];

static uint8_t *far_row(const pool_pair *p, const far_case *f, int64_t pos, int64_t row)
{
    return p->map + (int64_t)f->page[pos / 64] * f->stride + pos % 64 * row;
}

static void write_all(const kern_table *t, const far_case *f, pool_pair *p)
{
    dev_queue q;
    dev_queue_init(&q, NULL);
    int64_t slot[LEN];
    const shard_geom g = {1, 1, 0};
    const kvs_pos first = {0};
    assert_int_equal(table_check(g, f->page, N_FAR, LEN, p->far->n_page, "far", NULL), KVS_OK);
    for (int side = 0; side < 2; side++) {
        kvs_cache *c = side == 0 ? p->near : p->far;
        table_slots(g, side == 0 ? p->near_table : f->page, first, LEN, slot);
        if (f->stride > 0) {
            cache_write(c, t, &q, 0, latent, rope, KVS_DTYPE_F32, slot, LEN);
        }
        if (f->index_stride > 0) {
            cache_write_index(c, t, &q, 0, key, KVS_DTYPE_F32, slot, LEN);
        }
    }
}

/* Bytes of every row and key against the scalar writer, at addresses worked out here. */
static void check_bytes(const kern_table *t, void *ctx)
{
    const far_job *j = ctx;
    const far_case *f = j->f;
    pool_pair *p = j->p;
    write_all(t, f, p);
    const int64_t row = cache_row_bytes(p->far);
    const kv_writer w = {(int32_t)f->kv, KVS_SCALE_POW2, p->far->layer[0].k_scale, KVS_DTYPE_F32};
    uint8_t want[2304];
    for (int64_t pos = 0; f->stride > 0 && pos < LEN; pos++) {
        uint8_t *at = far_row(p, f, pos, row);
        kv_row_write(&w, want, latent + pos * 512, rope + pos * 64, NULL);
        assert_memory_equal(at, want, (size_t)row);
        memset(at, 0, (size_t)row); /* so that the next variant has to write it */
    }
    static uint8_t page[32768];
    const int64_t bytes = f->index_stride > 0 ? cache_index_page_bytes(p->far) : 0;
    for (int32_t b = 0; bytes > 0 && b < N_FAR; b++) {
        uint8_t *at = p->map + (f->stride > 0 ? 64 * row : 0) + f->page[b] * f->index_stride;
        for (int32_t off = 0; off < 64; off++) {
            index_key_write((int32_t)f->index, KVS_DTYPE_F32, page, off, key + (b * 64 + off) * 128,
                            NULL);
        }
        assert_memory_equal(at, page, (size_t)bytes);
        memset(at, 0, (size_t)bytes);
    }
}

static void check_gather(const kern_table *t, void *ctx)
{
    const far_job *j = ctx;
    const far_case *f = j->f;
    pool_pair *p = j->p;
    dev_queue q;
    dev_queue_init(&q, NULL);
    static float out[LEN * 576];
    const int64_t start[1] = {3};
    const int64_t count[1] = {LEN - 3};
    const int64_t begin[1] = {0};
    uint64_t n_bad = 0;
    gather_args a = {.n_req = 1,
                     .table = f->page,
                     .table_stride = N_FAR,
                     .table_width = N_FAR,
                     .start = start,
                     .count = count,
                     .out_begin = begin,
                     .out = out,
                     .out_type = KVS_DTYPE_F32,
                     .out_stride = 576,
                     .n_bad_id = &n_bad};
    cache_gather_args(p->far, 0, &a);
    memset(out, 0xFF, sizeof out);
    t->gather(&a, &q);
    float want[576];
    for (int64_t pos = 3; pos < LEN; pos++) {
        kv_row_read((int32_t)f->kv, a.k_scale, far_row(p, f, pos, cache_row_bytes(p->far)), want);
        assert_memory_equal(out + (pos - 3) * 576, want, sizeof want);
    }
    assert_int_equal(n_bad, 0);
}

/* Where the rows lie does not enter the bits. */
static void check_attn(const kern_table *t, void *ctx)
{
    const far_job *j = ctx;
    const pool_pair *p = j->p;
    static float out[3][RUN_ROWS * RUN_HEADS * 512];
    float lse[3][RUN_ROWS * RUN_HEADS];
    const int32_t kv_len[RUN_ROWS] = {LEN, 3 * 64 + 17};
    run_attn(t, p->near, p->near_table, N_FAR, kv_len, false, out[0], lse[0]);
    run_attn(t, p->far, j->f->page, N_FAR, kv_len, false, out[1], lse[1]);
    run_attn(t, p->far, j->f->page, N_FAR, kv_len, true, out[2], lse[2]);
    assert_memory_equal(out[1], out[0], sizeof out[0]);
    assert_memory_equal(lse[1], lse[0], sizeof lse[0]);
    assert_memory_equal(out[2], out[0], sizeof out[0]);
    assert_true(lse[0][0] > -100.0f && lse[0][0] < 100.0f);
    assert_true(out[0][0] != 0.0f);
}

static void check_score(const kern_table *t, void *ctx)
{
    const far_job *j = ctx;
    const pool_pair *p = j->p;
    static float score[2][LEN];
    run_score(t, p->near, p->near_table, N_FAR, LEN - 5, score[0]);
    run_score(t, p->far, j->f->page, N_FAR, LEN - 5, score[1]);
    assert_memory_equal(score[1], score[0], sizeof score[0]);
    int32_t n_zero = 0;
    for (int32_t l = 0; l < LEN - 5; l++) {
        n_zero += score[1][l] == 0.0f;
    }
    assert_true(n_zero < 16); /* a sum of negative products is 0 */
}

/* From far pages into a file, and from the file into other far pages. */
static void check_snapshot(const far_case *f, pool_pair *p)
{
    const comm_config cfg = {.timeout_ms = 60000, .no_check = false};
    const char *path = test_path("far.kvs");
    comm *cm = NULL;
    kvs_error err = {0};
    int32_t turned[N_FAR];
    for (int32_t b = 0; b < N_FAR; b++) {
        turned[b] = f->page[(b + 1) % N_FAR];
    }
    assert_int_equal(comm_self_open(&cm, &cfg, NULL), KVS_OK);
    assert_int_equal(snap_write(path, cm, p->far, f->page, N_FAR, LEN, NULL, NULL, &err), KVS_OK);
    comm_close(cm);
    assert_int_equal(snap_read(path, p->far, turned, N_FAR, NULL, NULL, 0, &err), KVS_OK);
    const int64_t row = cache_row_bytes(p->near);
    const int64_t index_page = cache_index_page_bytes(p->near);
    for (int64_t b = 0; b < N_FAR; b++) {
        uint8_t *at = p->map + turned[b] * f->stride;
        assert_memory_equal(at, p->near->layer[0].kv + b * 64 * row, (size_t)(64 * row));
        if (index_page > 0) {
            assert_memory_equal(at + 64 * row, p->near->index_layer[0].keys + b * index_page,
                                (size_t)index_page);
        }
    }
    test_dir_remove();
}

static void every_kernel_reaches_far_pages(void **state)
{
    (void)state;
    random_f32(latent, LEN * 512, 1);
    random_f32(rope, LEN * 64, 2);
    random_f32(key, LEN * 128, 3);
    /* Neither valgrind nor, with an unlucky start of the stack, the thread sanitizer has an address
     * range for the last one. */
    const bool small = UNIT_TSAN || unit_valgrind();
    for (size_t k = 0; k < UNIT_COUNT(cases) - (small ? 1 : 0); k++) {
        const far_case *f = &cases[k];
        pool_pair p = {0};
        pools_open(&p, f);
        far_job job = {f, &p};
        const bool rows = f->stride > 0;
        const bool keys = f->index_stride > 0;
        if (rows) {
            each_variant(KERN_OP_kv_write, check_bytes, &job);
        }
        if (keys) {
            each_variant(KERN_OP_index_write, check_bytes, &job);
        }
        kern_table ref;
        assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
        write_all(&ref, f, &p);
        if (rows) {
            each_variant(KERN_OP_gather, check_gather, &job);
            each_variant(KERN_OP_attn, check_attn, &job);
        }
        if (keys) {
            each_variant(KERN_OP_index_score, check_score, &job);
        }
        if (rows) {
            check_snapshot(f, &p);
        }
        pools_close(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kernel_reaches_far_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
