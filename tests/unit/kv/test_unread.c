/* What a sequence does not reach is never read: free pages are taken away from the process, the rest
 * of a partial page is NaN, and neither changes a bit of a result. Lengths around page ends. */
#include "unit/unit.h"

#include <sys/mman.h>

#include "base/mem.h"
#include "kv/snap.h"
#include "kv/table.h"
#include "num/kvfmt.h"
#include "unit/kv/run_kern.h"
#include "unit/kv/shards.h"

enum { N_PAGE = 5, WIDTH = 3, MAX = WIDTH * 64 };

static const shape shapes[] = {
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 1, 1, 0},
    {KVS_KV_BF16, KVS_INDEX_F32, 1, 1, 0},
    {KVS_KV_F32, KVS_INDEX_F32, 1, 1, 0},
    {KVS_KV_FP8, KVS_INDEX_AUTO, 1, 0, 0},
};

static const int32_t table[WIDTH] = {3, 0, 2};

typedef struct paged {
    uint8_t *map;
    size_t page; /* of the machine's pages: one of the cache's and its index keys */
    kvs_cache *c;
} paged;

/* A page of rows and a page of keys, each at the start of a page of the machine. */
static void paged_open(paged *p, const shape *s)
{
    const size_t rows = mem_page_round((size_t)(64 * shape_row(s)));
    const size_t keys = s->n_index > 0 ? mem_page_round((size_t)shape_index_page(s)) : 0;
    p->page = rows + keys;
    p->map = mem_map_pages(p->page * N_PAGE, 0, NULL);
    assert_non_null(p->map);
    memset(p->map, 0xFF, p->page * N_PAGE);
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = s->kv;
    cfg.index_kv = s->index;
    cfg.n_index_layer = s->n_index;
    cfg.n_page = N_PAGE;
    const kvs_cache_layer layer = {p->map, (int64_t)p->page, shape_row(s),
                                   keys > 0 ? p->map + rows : NULL, (int64_t)p->page};
    assert_int_equal(cache_map(&p->c, &cfg, &layer, 0, NULL), KVS_OK);
}

static void paged_close(paged *p)
{
    cache_free(p->c);
    mem_unmap_pages(p->map, p->page * N_PAGE);
}

/* Takes away, or gives back, the pages that the first len tokens do not reach. */
static void free_pages(const paged *p, int32_t len, int access)
{
    for (int32_t page = 0; page < N_PAGE; page++) {
        bool used = false;
        for (int32_t b = 0; b * 64 < len; b++) {
            used = used || table[b] == page;
        }
        if (!used) {
            assert_int_equal(mprotect(p->map + (size_t)page * p->page, p->page, access), 0);
        }
    }
}

typedef struct job {
    const shape *s;
    const paged *bare;      /* len tokens, NaN behind them, the other pages gone */
    const kvs_cache *whole; /* MAX tokens                                     */
    int32_t len;
} job;

static const int32_t whole_table[WIDTH] = {0, 1, 2};

static void check_attn(const kern_table *t, void *ctx)
{
    const job *j = ctx;
    static float out[3][RUN_ROWS * RUN_HEADS * 512];
    float lse[3][RUN_ROWS * RUN_HEADS];
    const int32_t kv_len[RUN_ROWS] = {j->len, (j->len + 1) / 2};
    run_attn(t, j->whole, whole_table, WIDTH, kv_len, false, out[0], lse[0]);
    run_attn(t, j->bare->c, table, WIDTH, kv_len, false, out[1], lse[1]);
    run_attn(t, j->bare->c, table, WIDTH, kv_len, true, out[2], lse[2]);
    assert_memory_equal(out[1], out[0], sizeof out[0]);
    assert_memory_equal(out[2], out[0], sizeof out[0]);
    assert_memory_equal(lse[1], lse[0], sizeof lse[0]);
    for (size_t i = 0; i < UNIT_COUNT(out[0]); i++) {
        assert_false(f32_is_nan(out[1][i]));
    }
}

static void check_score(const kern_table *t, void *ctx)
{
    const job *j = ctx;
    float score[2][MAX];
    run_score(t, j->whole, whole_table, WIDTH, j->len, score[0]);
    run_score(t, j->bare->c, table, WIDTH, j->len, score[1]);
    assert_memory_equal(score[1], score[0], sizeof score[0]);
    for (int32_t l = 0; l < MAX; l++) {
        assert_false(f32_is_nan(score[1][l]));
    }
}

static void check_gather(const kern_table *t, void *ctx)
{
    const job *j = ctx;
    static float out[2][MAX * 576];
    for (int side = 0; side < 2; side++) {
        const int64_t start[1] = {0};
        const int64_t count[1] = {j->len};
        dev_queue q;
        dev_queue_init(&q, NULL);
        gather_args a = {.n_req = 1,
                         .table = side == 0 ? whole_table : table,
                         .table_stride = WIDTH,
                         .table_width = WIDTH,
                         .start = start,
                         .count = count,
                         .out_begin = start,
                         .out = out[side],
                         .out_type = KVS_DTYPE_F32,
                         .out_stride = 576};
        cache_gather_args(side == 0 ? j->whole : j->bare->c, 0, &a);
        memset(out[side], 0, sizeof out[side]);
        t->gather(&a, &q);
    }
    assert_memory_equal(out[1], out[0], sizeof out[0]);
    for (int32_t i = 0; i < j->len * 576; i++) {
        assert_false(f32_is_nan(out[1][i]));
    }
}

/* A snapshot of the bare pool equals that of the whole one. */
static void check_snapshot(const job *j)
{
    const comm_config cfg = {.timeout_ms = 60000, .no_check = false};
    uint8_t *data[2];
    int64_t n[2];
    for (int side = 0; side < 2; side++) {
        comm *cm = NULL;
        const char *path = test_path(side == 0 ? "whole.kvs" : "bare.kvs");
        assert_int_equal(comm_self_open(&cm, &cfg, NULL), KVS_OK);
        assert_int_equal(snap_write(path, cm, side == 0 ? j->whole : j->bare->c,
                                    side == 0 ? whole_table : table, WIDTH, j->len, NULL, NULL,
                                    NULL),
                         KVS_OK);
        comm_close(cm);
        data[side] = file_bytes(path, &n[side]);
    }
    assert_int_equal(n[0], n[1]);
    /* A mapped cache knows whose its index keys are, and so does a created one of equal counts. */
    assert_memory_equal(data[0], data[1], (size_t)n[0]);
    free(data[0]);
    free(data[1]);
}

static void free_pages_and_the_rest_of_a_page_are_not_read(void **state)
{
    (void)state;
    static const int32_t lens[] = {1, 63, 64, 65, 127, 128, 129, 191, 192};
    static float latent[MAX * 512], rope[MAX * 64], key[MAX * 128];
    random_f32(latent, MAX * 512, 1);
    random_f32(rope, MAX * 64, 2);
    random_f32(key, MAX * 128, 3);
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    dev_queue q;
    dev_queue_init(&q, NULL);
    const shard_geom g = {1, 1, 0};
    const kvs_pos first = {0};
    for (size_t k = 0; k < UNIT_COUNT(shapes); k++) {
        const shape *s = &shapes[k];
        for (size_t a = 0; a < UNIT_COUNT(lens); a += unit_valgrind() ? 3 : 1) {
            paged bare;
            int64_t slot[MAX];
            kvs_cache *whole = NULL;
            kvs_cache_config cfg = kvs_cache_config_default();
            cfg.kv = s->kv;
            cfg.index_kv = s->index;
            cfg.n_index_layer = s->n_index;
            cfg.n_page = WIDTH;
            assert_int_equal(cache_create(&whole, &cfg, NULL), KVS_OK);
            paged_open(&bare, s);
            for (int side = 0; side < 2; side++) {
                kvs_cache *c = side == 0 ? whole : bare.c;
                const int32_t n = side == 0 ? MAX : lens[a];
                table_slots(g, side == 0 ? whole_table : table, first, n, slot);
                cache_write(c, &ref, &q, 0, latent, rope, KVS_DTYPE_F32, slot, n);
                if (s->n_index > 0) {
                    cache_write_index(c, &ref, &q, 0, key, KVS_DTYPE_F32, slot, n);
                }
            }
            free_pages(&bare, lens[a], PROT_NONE);
            job j = {s, &bare, whole, lens[a]};
            each_variant(KERN_OP_attn, check_attn, &j);
            each_variant(KERN_OP_gather, check_gather, &j);
            if (s->n_index > 0) {
                each_variant(KERN_OP_index_score, check_score, &j);
            }
            check_snapshot(&j);
            free_pages(&bare, lens[a], PROT_READ | PROT_WRITE);
            paged_close(&bare);
            cache_free(whole);
        }
    }
    test_dir_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(free_pages_and_the_rest_of_a_page_are_not_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
