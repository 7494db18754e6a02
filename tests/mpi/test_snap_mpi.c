/* Snapshots over MPI: what the processes of a group write together, groups of any other size read, and a rank
 * whose arguments differ, or a place that cannot be written, is an error of the same status on all. */
#include "unit/unit.h"

#include "comm/comm.h"
#include "kvspan/comm.h"
#include "kvspan/dcp.h"
#include "kvspan/log.h"
#include "unit/kv/shards.h"

enum { N_TOKEN = 1000, PATH_BYTES = 256 };

static const shape shapes[] = {
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 2, 1, 1},
    {KVS_KV_BF16, KVS_INDEX_F32, 1, 1, 0},
    {KVS_KV_FP8, KVS_INDEX_AUTO, 3, 0, 0},
};
static const uint64_t model[2] = {0x1122334455667788, 0x99AABBCCDDEEFF00};

static kvs_comm *g_world;

/* Rank 0's, on all ranks; the folder is rank 0's to remove. */
static void common_path(const char *name, char path[PATH_BYTES])
{
    memset(path, 0, PATH_BYTES);
    if (kvs_comm_rank(g_world) == 0) {
        snprintf(path, PATH_BYTES, "%s", test_path(name));
    }
    assert_int_equal(comm_broadcast(g_world, path, PATH_BYTES, 0, NULL), KVS_OK);
}

static int64_t width_of(int32_t n)
{
    return (N_TOKEN + 64 * n - 1) / (64 * n);
}

static kvs_status write_shared(const char *path, const shape *s, int32_t interleave, const int32_t *ids,
                               kvs_error *err)
{
    const int32_t n = kvs_comm_size(g_world);
    const int64_t width = width_of(n);
    int32_t table[N_TOKEN / 64 + 1];
    table_shuffled(table, width, width + 2, 7);
    kvs_cache *c = shard_new(s, n, interleave, kvs_comm_rank(g_world), width + 2);
    shard_fill(c, s, table, N_TOKEN);
    const kvs_status st =
        kvs_snapshot_write(path, g_world, c, table, width, N_TOKEN, ids, model, err);
    kvs_cache_free(c);
    return st;
}

/* Every shard of a group of n. */
static void read_at(const char *path, const shape *s, int32_t n, int32_t interleave)
{
    const int64_t width = width_of(n);
    int32_t table[N_TOKEN / 64 + 1];
    table_shuffled(table, width, width + 2, (uint64_t)n);
    for (int32_t rank = 0; rank < n; rank++) {
        kvs_cache *got = shard_new(s, n, interleave, rank, width + 2);
        kvs_cache *want = shard_new(s, n, interleave, rank, width + 2);
        shard_fill(want, s, table, N_TOKEN);
        int32_t ids[N_TOKEN];
        kvs_error err = {0};
        if (kvs_snapshot_read(path, got, table, width, model, ids, N_TOKEN, &err) != KVS_OK) {
            fail_msg("dcp %d: %s", n, err.text);
        }
        assert_int_equal(shard_differs(got, want), -1);
        assert_int_equal(ids[N_TOKEN - 1], 3 * (N_TOKEN - 1));
        kvs_cache_free(got);
        kvs_cache_free(want);
    }
}

static void processes_write_and_any_group_reads(void **state)
{
    (void)state;
    static const int32_t ns[] = {1, 2, 8};
    int32_t ids[N_TOKEN];
    for (int32_t t = 0; t < N_TOKEN; t++) {
        ids[t] = 3 * t;
    }
    char path[PATH_BYTES];
    common_path("shared.kvs", path);
    for (size_t i = 0; i < UNIT_COUNT(shapes); i++) {
        kvs_error err = {0};
        if (write_shared(path, &shapes[i], 16, ids, &err) != KVS_OK) {
            fail_msg("%s", err.text);
        }
        kvs_snapshot_info info;
        assert_int_equal(kvs_snapshot_stat(path, &info, NULL), KVS_OK);
        assert_int_equal(info.writer_dcp, kvs_comm_size(g_world));
        assert_int_equal(info.n_token, N_TOKEN);
        /* the processes take turns at the sizes, so that all of them read */
        for (size_t k = 0; k < UNIT_COUNT(ns); k++) {
            if (((int32_t)k + kvs_comm_rank(g_world)) % 2 == 0) {
                read_at(path, &shapes[i], ns[k], k == 0 ? 1 : 64);
            }
        }
        assert_int_equal(comm_barrier(g_world, NULL), KVS_OK);
    }
}

static void one_rank_that_differs_stops_all(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    common_path("differs.kvs", path);
    int32_t ids[N_TOKEN] = {0};
    ids[5] = kvs_comm_rank(g_world) == 2;
    kvs_error err = {0};
    assert_int_equal(write_shared(path, &shapes[0], 1, ids, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "snapshot token ids"));
    ids[5] = 0;
    common_path("no/such/folder.kvs", path);
    assert_int_equal(write_shared(path, &shapes[0], 1, ids, &err), KVS_IO);
    assert_int_equal(comm_barrier(g_world, NULL), KVS_OK);
    if (kvs_comm_rank(g_world) == 0) {
        assert_int_equal(test_dir_files(), 1); /* that of the other test */
        test_dir_remove();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(processes_write_and_any_group_reads),
        cmocka_unit_test(one_rank_that_differs_stops_all),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    kvs_error err = {0};
    if (kvs_comm_open_mpi(&g_world, NULL, &err) != KVS_OK) {
        print_error("%s\n", err.text);
        return 1;
    }
    const int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvs_comm_close(g_world);
    return n_failed;
}
