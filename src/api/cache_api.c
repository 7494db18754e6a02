/* cache_api.c - the public functions of caches, pages and block tables.
 *
 * Only what a caller can get wrong at the edge is checked here: missing pointers and the size of a
 * config. Values are checked by the module that means them (kv/cache.h, kv/table.h).
 */
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "kv/cache.h"
#include "kv/table.h"
#include "kvspan/dcp.h"

/* A field behind the caller's struct_size reads as 0, its default. */
static kvs_status take_config(const kvs_cache_config *cfg, kvs_cache_config *own, kvs_error *err)
{
    memset(own, 0, sizeof *own);
    if (cfg == NULL) {
        return err_set(err, KVS_INVALID, "cfg is NULL; start from kvs_cache_config_default()");
    }
    if (cfg->struct_size < sizeof cfg->struct_size) {
        return err_set(err, KVS_INVALID,
                       "struct_size %zu of kvs_cache_config; start from kvs_cache_config_default()",
                       cfg->struct_size);
    }
    memcpy(own, cfg, cfg->struct_size < sizeof *own ? cfg->struct_size : sizeof *own);
    return KVS_OK;
}

kvs_status kvs_cache_create(kvs_cache **out, const kvs_cache_config *cfg, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "out is NULL; give the address of a kvs_cache pointer");
    }
    *out = NULL;
    kvs_cache_config own;
    TRY(take_config(cfg, &own, err));
    return cache_create(out, &own, err);
}

kvs_status kvs_cache_map(kvs_cache **out, const kvs_cache_config *cfg,
                         const kvs_cache_layer *layers, uint64_t tag, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "out is NULL; give the address of a kvs_cache pointer");
    }
    *out = NULL;
    kvs_cache_config own;
    TRY(take_config(cfg, &own, err));
    if (layers == NULL) {
        return err_set(err, KVS_INVALID, "layers is NULL; give n_layer of them");
    }
    return cache_map(out, &own, layers, tag, err);
}

void kvs_cache_free(kvs_cache *c)
{
    cache_free(c);
}

uint64_t kvs_cache_tag(const kvs_cache *c)
{
    return c != NULL ? c->tag : 0;
}

void kvs_cache_get_info(const kvs_cache *c, kvs_cache_info *info)
{
    if (info == NULL) {
        return;
    }
    *info = (kvs_cache_info){0};
    if (c != NULL) {
        cache_get_info(c, info);
    }
}

static bool dcp_known(int32_t dcp)
{
    return dcp >= 1 && dcp <= KVS_MAX_RANKS;
}

int64_t kvs_span(int32_t dcp)
{
    const shard_geom g = {.n = dcp, .i = 1, .rank = 0};
    return dcp_known(dcp) ? shard_span(g) : 0;
}

int64_t kvs_table_width(int32_t dcp, int64_t max_len)
{
    const shard_geom g = {.n = dcp, .i = 1, .rank = 0};
    return dcp_known(dcp) && max_len > 0 ? shard_table_width(g, max_len) : 0;
}

kvs_status kvs_pages_new(kvs_pages **out, int64_t n_page, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "out is NULL; give the address of a kvs_pages pointer");
    }
    return pages_new(out, n_page, err);
}

void kvs_pages_free(kvs_pages *p)
{
    pages_free(p);
}

int64_t kvs_pages_available(const kvs_pages *p)
{
    return p != NULL ? pages_available(p) : 0;
}

static kvs_status need_pages(const kvs_pages *p, kvs_error *err)
{
    return p != NULL ? KVS_OK
                     : err_set(err, KVS_INVALID, "pages is NULL; open it with kvs_pages_new");
}

kvs_status kvs_pages_extend(kvs_pages *p, int32_t dcp, int32_t *table, int64_t table_width,
                            int64_t *n_have, int64_t new_len, kvs_error *err)
{
    TRY(need_pages(p, err));
    if (n_have == NULL || (table == NULL && table_width > 0)) {
        return err_set(err, KVS_INVALID, "%s is NULL", n_have == NULL ? "n_have" : "table");
    }
    return pages_extend(p, dcp, table, table_width, n_have, new_len, err);
}

kvs_status kvs_pages_truncate(kvs_pages *p, int32_t *table, int64_t *n_have, int64_t n_keep,
                              kvs_error *err)
{
    TRY(need_pages(p, err));
    if (n_have == NULL || (table == NULL && *n_have > 0)) {
        return err_set(err, KVS_INVALID, "%s is NULL", n_have == NULL ? "n_have" : "table");
    }
    return pages_truncate(p, table, n_have, n_keep, err);
}

kvs_status kvs_pages_share(kvs_pages *p, const int32_t *table, int64_t n, kvs_error *err)
{
    TRY(need_pages(p, err));
    if (table == NULL && n > 0) {
        return err_set(err, KVS_INVALID, "table is NULL");
    }
    return pages_share(p, table, n, err);
}
