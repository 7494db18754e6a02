/* seed_snapshot.c: writes the seeds of fuzz_snapshot into the folder it is given. */
#include <stdio.h>
#include <string.h>

#include "kv/snap.h"

static kvs_status seed(const char *dir, const char *name, kvs_kv_format kv, kvs_index_format index,
                       int32_t n_layer, int32_t n_index, int64_t n_token, kvs_error *err)
{
    static const float scale[2] = {0.5f, 2.0f};
    static const int32_t ids[65] = {5, 6, 7};
    static const int32_t table[2] = {1, 0};
    static const uint64_t model[2] = {3, 4};
    const comm_config comm_cfg = {.timeout_ms = 10000, .no_check = false};
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = kv;
    cfg.index_kv = index;
    cfg.n_layer = n_layer;
    cfg.n_index_layer = n_index;
    cfg.n_page = 2;
    cfg.k_scale = kv == KVS_KV_FP8 ? scale : NULL;
    kvs_cache *c = NULL;
    comm *cm = NULL;
    kvs_status st = cache_create(&c, &cfg, err);
    if (st == KVS_OK) {
        memset(cache_row(c, 0, 64), 0x3C, 40);
        st = comm_self_open(&cm, &comm_cfg, err);
    }
    if (st == KVS_OK) {
        st = snap_write(path, cm, c, table, 2, n_token, n_token % 2 != 0 ? ids : NULL, model, err);
    }
    comm_close(cm);
    cache_free(c);
    return st;
}

int main(int argc, char **argv)
{
    kvs_error err;
    if (argc != 2) {
        fprintf(stderr, "use: seed_snapshot FOLDER\n");
        return 2;
    }
    const char *dir = argv[1];
    if (seed(dir, "empty", KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 3, 2, 0, &err) != KVS_OK ||
        seed(dir, "one_token", KVS_KV_FP8, KVS_INDEX_AUTO, 2, 0, 1, &err) != KVS_OK ||
        seed(dir, "two_pages", KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 1, 1, 65, &err) != KVS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}
