/* kv/cache.h - one rank's shard of the latent rows and index keys of every layer.
 *
 * Invariants: (1) base pointers and strides never change after opening; (2) a slot in [0, n_slot) of any
 * layer lies inside the memory the cache was given; (3) every writer goes through cache_write /
 * cache_write_index, which count what they meet, except a snapshot's reader (snap.h), which copies bytes that
 * a writer has counted; (4) formats never change, and `tag` says them.
 * Which slot a token has is block-table business (table.h), not the cache's.
 */
#ifndef KVS_KV_CACHE_H
#define KVS_KV_CACHE_H

#include "kern/kern.h"
#include "kvspan/dcp.h"
#include "shard/shard.h"

typedef struct cache_layer {
    uint8_t *kv;
    int64_t page_stride, row_stride;
    float k_scale; /* 1 where the format has none */
} cache_layer;

typedef struct cache_index_layer {
    uint8_t *keys;
    int64_t page_stride;
    int32_t of_layer; /* the latent layer it belongs to; -1 where the creator did not say */
} cache_index_layer;

struct kvs_cache {
    shard_geom geom;
    int32_t fmt;        /* kvs_kv_format, resolved                                                   */
    int32_t index_fmt;  /* kvs_index_format, resolved; AUTO: no index layers                         */
    int32_t rule;       /* kvs_scale_rule, resolved: pow2 or exact                                   */
    int32_t hadamard;
    uint64_t tag;
    int32_t n_layer, n_index_layer;
    int64_t n_page, n_slot;
    cache_layer *layer;             /* [n_layer]                                                     */
    cache_index_layer *index_layer; /* [n_index_layer]                                               */
    kvio_stats latent_stats, index_stats;
    int32_t k_scale_ignored;
    void *map;                      /* own mapping, page aligned, or NULL for the caller's memory    */
    size_t map_bytes;
};

/* Bytes of a slot's row and of an index page, without padding; 0 pages' bytes without index layers. */
int64_t cache_row_bytes(const kvs_cache *c);
int64_t cache_index_page_bytes(const kvs_cache *c);

/* cfg is complete (struct_size handled by the caller) and is checked here, field by field. On failure
 * *out is NULL. */
kvs_status cache_create(kvs_cache **out, const kvs_cache_config *cfg, kvs_error *err);
kvs_status cache_map(kvs_cache **out, const kvs_cache_config *cfg, const kvs_cache_layer *layers,
                     uint64_t tag, kvs_error *err);
void cache_free(kvs_cache *c);
void cache_get_info(const kvs_cache *c, kvs_cache_info *info);

/* Where a slot's row and a page's index keys start. layer and slot or page are in range. */
static inline uint8_t *cache_row(const kvs_cache *c, int32_t layer, int64_t slot)
{
    const cache_layer *l = &c->layer[layer];
    return l->kv + slot / KVS_PAGE_TOKENS * l->page_stride + slot % KVS_PAGE_TOKENS * l->row_stride;
}

static inline uint8_t *cache_index_page(const kvs_cache *c, int32_t index_layer, int64_t page)
{
    const cache_index_layer *l = &c->index_layer[index_layer];
    return l->keys + page * l->page_stride;
}

/* slot: [n_tok], -1 = not this rank's. layer is in range. */
void cache_write(kvs_cache *c, const kern_table *k, dev_queue *q, int32_t layer, const void *latent,
                 const void *rope, kvs_dtype type, const int64_t *slot, int64_t n_tok);
void cache_write_index(kvs_cache *c, const kern_table *k, dev_queue *q, int32_t index_layer,
                       const void *key, kvs_dtype type, const int64_t *slot, int64_t n_tok);

/* Fill the cache part of a kernel's arguments: the only place that knows both. */
void cache_attn_args(const kvs_cache *c, int32_t layer, attn_args *a);
void cache_index_args(const kvs_cache *c, int32_t index_layer, index_score_args *a);
void cache_gather_args(const kvs_cache *c, int32_t layer, gather_args *a);

#endif
