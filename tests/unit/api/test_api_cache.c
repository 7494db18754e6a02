/* Public functions of caches, pages and snapshots: a missing argument is an error with a message,
 * an older client's config is read as far as it goes, and a life from create to read works. */
#include "unit/unit.h"

#include "base/mem.h"
#include "kvspan/dcp.h"
#include "unit/kv/shards.h"

static void missing_arguments_are_refused(void **state)
{
    (void)state;
    kvs_error err;
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.n_page = 1;
    kvs_cache *c = (kvs_cache *)&cfg;
    assert_int_equal(kvs_cache_create(NULL, &cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "out is NULL"));
    assert_int_equal(kvs_cache_create(&c, NULL, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "kvs_cache_config_default"));
    assert_null(c);
    cfg.struct_size = 0;
    c = (kvs_cache *)&cfg;
    assert_int_equal(kvs_cache_create(&c, &cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "struct_size 0"));
    assert_null(c);
    cfg.struct_size = sizeof cfg;
    c = (kvs_cache *)&cfg;
    assert_int_equal(kvs_cache_map(&c, &cfg, NULL, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "layers is NULL"));
    assert_null(c);
    assert_int_equal(kvs_cache_map(NULL, &cfg, NULL, 0, NULL), KVS_INVALID);
    assert_int_equal(kvs_cache_map(&c, NULL, NULL, 0, NULL), KVS_INVALID);
    kvs_cache_free(NULL);
    assert_int_equal(kvs_cache_tag(NULL), 0);
    kvs_cache_get_info(NULL, NULL);
    kvs_cache_info info = {.row_bytes = 5};
    kvs_cache_get_info(NULL, &info);
    assert_int_equal(info.row_bytes, 0);

    int32_t table[1] = {-1};
    int64_t have = 0;
    kvs_pages *p = NULL;
    assert_int_equal(kvs_pages_new(NULL, 1, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_extend(NULL, 1, table, 1, &have, 1, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_truncate(NULL, table, &have, 0, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_share(NULL, table, 0, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_available(NULL), 0);
    kvs_pages_free(NULL);
    assert_int_equal(kvs_pages_new(&p, 1, NULL), KVS_OK);
    assert_int_equal(kvs_pages_extend(p, 1, NULL, 1, &have, 1, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "table is NULL"));
    assert_int_equal(kvs_pages_extend(p, 1, table, 1, NULL, 1, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "n_have is NULL"));
    assert_int_equal(kvs_pages_truncate(p, table, NULL, 0, &err), KVS_INVALID);
    have = 1;
    assert_int_equal(kvs_pages_truncate(p, NULL, &have, 0, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_share(p, NULL, 1, &err), KVS_INVALID);
    assert_int_equal(kvs_pages_share(p, NULL, 0, &err), KVS_OK);
    assert_int_equal(kvs_pages_available(p), 1);
    kvs_pages_free(p);

    kvs_snapshot_info stat;
    assert_int_equal(kvs_snapshot_write("x", NULL, c, table, 1, 0, NULL, NULL, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "comm is NULL"));
    assert_int_equal(kvs_snapshot_stat(NULL, &stat, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "path is NULL"));
    assert_int_equal(kvs_snapshot_stat("x", NULL, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "info is NULL"));
    assert_int_equal(kvs_snapshot_read(NULL, c, table, 1, NULL, NULL, 0, &err), KVS_INVALID);
    assert_int_equal(kvs_snapshot_read("x", NULL, table, 1, NULL, NULL, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "cache is NULL"));
}

/* A client built when the config ended after n_page: what lies behind it in memory is not read. */
static void an_older_config_gets_defaults_for_what_it_lacks(void **state)
{
    (void)state;
    kvs_cache_config cfg;
    memset(&cfg, 0xEE, sizeof cfg);
    const size_t old = offsetof(kvs_cache_config, n_page) + sizeof cfg.n_page;
    const kvs_cache_config full = kvs_cache_config_default();
    memcpy(&cfg, &full, old);
    cfg.struct_size = old;
    cfg.kv = KVS_KV_FP8;
    cfg.n_page = 2;
    kvs_cache *c = NULL;
    assert_int_equal(kvs_cache_create(&c, &cfg, NULL), KVS_OK);
    assert_true(c->layer[0].k_scale == 1.0f);
    kvs_cache_free(c);
    /* A newer client's: what lies behind the library's struct is not read. */
    struct {
        kvs_cache_config cfg;
        uint8_t more[64];
    } newer;
    memset(&newer, 0xEE, sizeof newer);
    newer.cfg = full;
    newer.cfg.struct_size = sizeof newer;
    newer.cfg.n_page = 1;
    assert_int_equal(kvs_cache_create(&c, &newer.cfg, NULL), KVS_OK);
    kvs_cache_free(c);
}

static void spans_and_widths(void **state)
{
    (void)state;
    assert_int_equal(kvs_span(1), 64);
    assert_int_equal(kvs_span(8), 512);
    assert_int_equal(kvs_span(0), 0);
    assert_int_equal(kvs_span(9), 0);
    assert_int_equal(kvs_table_width(4, 480000), 1875);
    assert_int_equal(kvs_table_width(2, 1000000), 7813);
    assert_int_equal(kvs_table_width(2, INT32_MAX), 16777216);
    assert_int_equal(kvs_table_width(1, 64), 1);
    assert_int_equal(kvs_table_width(1, 65), 2);
    assert_int_equal(kvs_table_width(1, 0), 0);
    assert_int_equal(kvs_table_width(1, -5), 0);
    assert_int_equal(kvs_table_width(-1, 5), 0);
}

/* Makes, writes, reads and frees; returns the first failure. Frees whatever it made. */
static kvs_status live(const char *path, kvs_error *err)
{
    kvs_cache *c = NULL;
    kvs_cache *over = NULL;
    kvs_pages *p = NULL;
    kvs_comm *cm = NULL;
    int32_t table[2] = {-1, -1};
    int64_t have = 0;
    int32_t ids[100] = {1, 2, 3};
    static _Alignas(64) uint8_t rows[3 * 64 * 1152];
    static _Alignas(64) uint8_t keys[3 * 8448];
    const kvs_cache_layer layer = {rows, 64 * 1152, 1152, keys, 8448};
    kvs_snapshot_info info;
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = KVS_KV_BF16;
    cfg.n_index_layer = 1;
    cfg.n_page = 3;
    kvs_status st = kvs_pages_new(&p, 3, err);
    if (st == KVS_OK) {
        st = kvs_pages_extend(p, 1, table, 2, &have, 100, err);
    }
    if (st == KVS_OK) {
        st = kvs_cache_create(&c, &cfg, err);
    }
    if (st == KVS_OK) {
        st = kvs_comm_open_self(&cm, NULL, err);
    }
    if (st == KVS_OK) {
        memset(cache_row(c, 0, 70), 0x21, 1152);
        st = kvs_snapshot_write(path, cm, c, table, 2, 100, ids, NULL, err);
    }
    if (st == KVS_OK) {
        st = kvs_snapshot_stat(path, &info, err);
    }
    if (st == KVS_OK) {
        st = kvs_cache_map(&over, &cfg, &layer, kvs_cache_tag(c), err);
    }
    if (st == KVS_OK) {
        st = kvs_snapshot_read(path, over, table, 2, NULL, ids, 100, err);
    }
    kvs_comm_close(cm);
    kvs_cache_free(over);
    kvs_cache_free(c);
    kvs_pages_free(p);
    if (st == KVS_OK) {
        assert_int_equal(info.n_token, 100);
        assert_int_equal(rows[70 * 1152 + 1151], 0x21);
        assert_int_equal(rows[71 * 1152], 0);
    }
    return st;
}

static void no_memory_anywhere_is_an_error_and_no_leak(void **state)
{
    (void)state;
    const mem_stats before = mem_stats_get();
    const char *path = test_path("life.kvs");
    int64_t n = 0;
    for (kvs_status st = KVS_NOMEM; st != KVS_OK;) {
        kvs_error err = {0};
        mem_fail_after(++n);
        st = live(path, &err);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        if (fired == (st == KVS_OK) || (fired && err.text[0] == '\0')) {
            fail_msg("allocation %d: %s \"%s\"", (int)n, kvs_status_name(st), err.text);
        }
        assert_int_equal(mem_stats_get().n_live, before.n_live);
        assert_int_equal(mem_stats_get().live_bytes, before.live_bytes);
        /* Whole or absent. */
        kvs_snapshot_info info;
        assert_true(test_dir_files() == 0 ||
                    (test_dir_files() == 1 && kvs_snapshot_stat(path, &info, NULL) == KVS_OK));
        remove(path);
    }
    assert_true(n > 15);
    test_dir_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_arguments_are_refused),
        cmocka_unit_test(an_older_config_gets_defaults_for_what_it_lacks),
        cmocka_unit_test(spans_and_widths),
        cmocka_unit_test(no_memory_anywhere_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
