/* snapshot_api.c - the public functions of snapshots.
 *
 * Of the collective one only `comm` is checked here: a rank that returned for another argument
 * would leave its peers waiting, so snap_write brings those refusals to every rank.
 */
#include "base/err.h"
#include "kv/snap.h"
#include "kvspan/dcp.h"

static kvs_status is_null(const char *what, kvs_error *err)
{
    return err_set(err, KVS_INVALID, "%s is NULL", what);
}

kvs_status kvs_snapshot_write(const char *path, kvs_comm *cm, const kvs_cache *c,
                              const int32_t *table, int64_t table_width, int64_t n_token,
                              const int32_t *tokens, const uint64_t model_hash[2], kvs_error *err)
{
    if (cm == NULL) {
        return is_null("comm", err);
    }
    return snap_write(path, cm, c, table, table_width, n_token, tokens, model_hash, err);
}

kvs_status kvs_snapshot_stat(const char *path, kvs_snapshot_info *info, kvs_error *err)
{
    if (path == NULL || info == NULL) {
        return is_null(path == NULL ? "path" : "info", err);
    }
    return snap_stat(path, info, err);
}

kvs_status kvs_snapshot_read(const char *path, kvs_cache *c, const int32_t *table,
                             int64_t table_width, const uint64_t *model_hash, int32_t *tokens,
                             int64_t cap, kvs_error *err)
{
    if (path == NULL || c == NULL) {
        return is_null(path == NULL ? "path" : "cache", err);
    }
    return snap_read(path, c, table, table_width, model_hash, tokens, cap, err);
}
