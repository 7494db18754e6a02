/* cache.c - makes a cache from a config, over its own mapping or over the caller's memory, and
 * hands its layers to kernels.
 *
 * A config is checked whole before anything is allocated. An own mapping holds the latent rows of
 * layer 0, 1, ..., then the index pages of index layer 0, 1, ...; each layer begins at a page of
 * the machine, so that one layer, or a whole rank, can be protected. Over the caller's memory a
 * layer is a base and strides, which may be much larger than what they step over (layers
 * interleaved in one pool); that two layers do not overlap is the caller's matter, except that no
 * two may be the same.
 */
#include "kv/cache.h"

#include <inttypes.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "num/kvfmt.h"
#include "shard/topo.h"

enum { CACHE_MAX_LAYER = 1024 };

static const size_t HUGE_FROM = (size_t)32 << 20; /* a mapping this large asks for huge pages */

int64_t cache_row_bytes(const kvs_cache *c)
{
    return kv_row_bytes(c->fmt);
}

int64_t cache_index_page_bytes(const kvs_cache *c)
{
    return index_page_bytes(c->index_fmt);
}

static kvs_status check_counts(const kvs_cache_config *cfg, kvs_error *err)
{
    if (cfg->n_layer < 1 || cfg->n_layer > CACHE_MAX_LAYER) {
        return err_set(err, KVS_INVALID, "n_layer %d: a cache has 1 to %d layers",
                       (int)cfg->n_layer, CACHE_MAX_LAYER);
    }
    if (cfg->n_index_layer < 0 || cfg->n_index_layer > cfg->n_layer) {
        return err_set(err, KVS_INVALID,
                       "n_index_layer %d: of %d layers 0 to that many can have index keys",
                       (int)cfg->n_index_layer, (int)cfg->n_layer);
    }
    if (cfg->n_page < 1 || cfg->n_page > SHARD_MAX_PAGE) {
        return err_set(err, KVS_INVALID,
                       "n_page %" PRId64 ": a rank's pool has 1 to %d pages of %d tokens",
                       cfg->n_page, SHARD_MAX_PAGE, KVS_PAGE_TOKENS);
    }
    if (cfg->kernel_level != 0 && cfg->kernel_level != 1) {
        return err_set(err, KVS_INVALID, "kernel_level %d: use 0 or 1", (int)cfg->kernel_level);
    }
    return KVS_OK;
}

static kvs_status resolve_rule(const kvs_cache_config *cfg, kvs_kv_format kv, int32_t *rule,
                               kvs_error *err)
{
    switch (cfg->scale_rule) {
    case KVS_SCALE_AUTO:
    case KVS_SCALE_POW2:
        *rule = KVS_SCALE_POW2;
        return KVS_OK;
    case KVS_SCALE_EXACT:
        if (kv != KVS_KV_FP8_DS_MLA) {
            return err_set(err, KVS_INVALID,
                           "scale_rule exact with %s rows: only fp8_ds_mla rows hold tile scales; "
                           "leave it 0",
                           kv_fmt_name(kv));
        }
        *rule = KVS_SCALE_EXACT;
        return KVS_OK;
    default:
        return err_set(err, KVS_INVALID, "scale_rule %d: use 0, pow2 (1) or exact (2)",
                       (int)cfg->scale_rule);
    }
}

/* A cache without memory behind it. */
static kvs_status cache_new(kvs_cache **out, const kvs_cache_config *cfg, kvs_error *err)
{
    topo group;
    int32_t rule = 0;
    TRY(check_counts(cfg, err));
    const topo_config ranks = {.dcp = cfg->dcp,
                               .rank = cfg->rank,
                               .interleave = cfg->interleave,
                               .kernel_level = cfg->kernel_level};
    TRY(topo_init(&group, &ranks, err));
    kv_layout layout = {.kv = cfg->kv, .index = cfg->index_kv, .hadamard = cfg->hadamard};
    TRY(kv_layout_resolve(cfg->n_index_layer > 0, &layout, err));
    TRY(resolve_rule(cfg, layout.kv, &rule, err));
    const bool scaled = layout.kv == KVS_KV_FP8 && cfg->k_scale != NULL;
    for (int32_t i = 0; scaled && i < cfg->n_layer; i++) {
        TRY(kv_k_scale_check(cfg->k_scale[i], i, err));
    }

    kvs_cache *c = mem_calloc(1, sizeof *c);
    if (c == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a cache of %d layers", (int)cfg->n_layer);
    }
    c->layer = mem_calloc((size_t)cfg->n_layer, sizeof *c->layer);
    c->index_layer = mem_calloc((size_t)cfg->n_index_layer, sizeof *c->index_layer);
    if (c->layer == NULL || c->index_layer == NULL) {
        cache_free(c);
        return err_set(err, KVS_NOMEM, "no memory for a cache of %d layers", (int)cfg->n_layer);
    }
    c->geom = group.geom;
    c->fmt = layout.kv;
    c->index_fmt = layout.index;
    c->rule = rule;
    c->hadamard = layout.hadamard;
    c->tag = cache_tag(layout);
    c->n_layer = cfg->n_layer;
    c->n_index_layer = cfg->n_index_layer;
    c->n_page = cfg->n_page;
    c->n_slot = cfg->n_page * KVS_PAGE_TOKENS;
    c->k_scale_ignored = cfg->k_scale != NULL && !scaled;
    for (int32_t i = 0; i < c->n_layer; i++) {
        c->layer[i].k_scale = scaled ? cfg->k_scale[i] : 1.0f;
    }
    *out = c;
    return KVS_OK;
}

/* Bytes of n pages rounded up to whole pages of the machine, or false where that overflows. */
static bool layer_bytes(int64_t n_page, int64_t page_bytes, size_t *out)
{
    size_t bytes = 0;
    if (__builtin_mul_overflow((size_t)n_page, (size_t)page_bytes, &bytes) ||
        bytes > (size_t)PTRDIFF_MAX - mem_page_size()) {
        return false;
    }
    *out = mem_page_round(bytes);
    return true;
}

kvs_status cache_create(kvs_cache **out, const kvs_cache_config *cfg, kvs_error *err)
{
    *out = NULL;
    kvs_cache *c = NULL;
    TRY(cache_new(&c, cfg, err));
    const int64_t row = cache_row_bytes(c);
    const int64_t index_page = cache_index_page_bytes(c);
    size_t latent = 0;
    size_t index = 0;
    size_t latent_all = 0;
    size_t index_all = 0;
    size_t total = 0;
    if (!layer_bytes(c->n_page, kv_page_bytes(c->fmt), &latent) ||
        !layer_bytes(c->n_page, index_page, &index) ||
        __builtin_mul_overflow(latent, (size_t)c->n_layer, &latent_all) ||
        __builtin_mul_overflow(index, (size_t)c->n_index_layer, &index_all) ||
        __builtin_add_overflow(latent_all, index_all, &total)) {
        cache_free(c);
        return err_set(err, KVS_LIMIT,
                       "n_page %" PRId64 ": %d layers of that many pages pass the "
                       "address space; use fewer pages",
                       cfg->n_page, (int)cfg->n_layer);
    }
    c->map = mem_map_pages(total, total >= HUGE_FROM, err);
    if (c->map == NULL) {
        cache_free(c);
        return KVS_NOMEM;
    }
    c->map_bytes = total;
    uint8_t *p = c->map;
    for (int32_t i = 0; i < c->n_layer; i++) {
        c->layer[i].kv = p;
        c->layer[i].row_stride = row;
        c->layer[i].page_stride = row * KVS_PAGE_TOKENS;
        p += latent;
    }
    for (int32_t i = 0; i < c->n_index_layer; i++) {
        c->index_layer[i].keys = p;
        c->index_layer[i].page_stride = index_page;
        c->index_layer[i].of_layer = c->n_index_layer == c->n_layer ? i : -1;
        p += index;
    }
    *out = c;
    return KVS_OK;
}

/* The last byte of pages at `stride` from base lies in the address space. */
static bool reaches(const void *base, int64_t n_page, int64_t stride, int64_t page_bytes)
{
    uintptr_t end = 0;
    return !__builtin_mul_overflow((uintptr_t)(n_page - 1), (uintptr_t)stride, &end) &&
           !__builtin_add_overflow(end, (uintptr_t)page_bytes, &end) &&
           !__builtin_add_overflow(end, (uintptr_t)base, &end) && end <= (uintptr_t)INTPTR_MAX;
}

static int64_t row_align(int32_t fmt)
{
    return fmt == KVS_KV_F32    ? (int64_t)sizeof(float)
           : fmt == KVS_KV_BF16 ? (int64_t)sizeof(bf16)
                                : 1;
}

static kvs_status check_rows(const kvs_cache *c, int32_t i, const kvs_cache_layer *l,
                             kvs_error *err)
{
    const int64_t row = cache_row_bytes(c);
    const int64_t align = row_align(c->fmt);
    if (l->kv == NULL) {
        return err_set(err, KVS_INVALID, "layer %d: kv is NULL; give its memory", (int)i);
    }
    if (l->row_stride < row) {
        return err_set(err, KVS_INVALID,
                       "layer %d: row_stride %" PRId64 " is below the %" PRId64
                       " bytes of a %s row",
                       (int)i, l->row_stride, row, kv_fmt_name(c->fmt));
    }
    if (l->row_stride > INT64_MAX / KVS_PAGE_TOKENS ||
        l->page_stride < l->row_stride * (KVS_PAGE_TOKENS - 1) + row) {
        return err_set(err, KVS_INVALID,
                       "layer %d: page_stride %" PRId64 " is below %d rows at "
                       "row_stride %" PRId64,
                       (int)i, l->page_stride, KVS_PAGE_TOKENS, l->row_stride);
    }
    if ((uintptr_t)l->kv % (uintptr_t)align != 0 || l->row_stride % align != 0 ||
        l->page_stride % align != 0) {
        return err_set(err, KVS_INVALID,
                       "layer %d: kv %p, page_stride %" PRId64 ", row_stride %" PRId64
                       ": %s rows need multiples of %" PRId64 " bytes",
                       (int)i, l->kv, l->page_stride, l->row_stride, kv_fmt_name(c->fmt), align);
    }
    if (!reaches(l->kv, c->n_page, l->page_stride, l->page_stride)) {
        return err_set(err, KVS_INVALID,
                       "layer %d: %" PRId64 " pages at page_stride %" PRId64
                       " pass the address space; use fewer",
                       (int)i, c->n_page, l->page_stride);
    }
    return KVS_OK;
}

static kvs_status check_index(const kvs_cache *c, int32_t i, const kvs_cache_layer *l,
                              kvs_error *err)
{
    const int64_t page = cache_index_page_bytes(c);
    if (l->index_stride < page) {
        return err_set(err, KVS_INVALID,
                       "layer %d: index_stride %" PRId64 " is below the %" PRId64
                       " bytes of a page of %s index keys",
                       (int)i, l->index_stride, page, index_fmt_name(c->index_fmt));
    }
    /* Both formats hold f32: scales or keys. */
    if ((uintptr_t)l->index % sizeof(float) != 0 || l->index_stride % (int64_t)sizeof(float) != 0) {
        return err_set(err, KVS_INVALID,
                       "layer %d: index %p, index_stride %" PRId64
                       ": index pages need multiples of 4 bytes",
                       (int)i, l->index, l->index_stride);
    }
    if (!reaches(l->index, c->n_page, l->index_stride, page)) {
        return err_set(err, KVS_INVALID,
                       "layer %d: %" PRId64 " pages at index_stride %" PRId64
                       " pass the address space; use fewer",
                       (int)i, c->n_page, l->index_stride);
    }
    return KVS_OK;
}

static kvs_status take_layers(kvs_cache *c, const kvs_cache_layer *layers, kvs_error *err)
{
    int32_t n_index = 0;
    for (int32_t i = 0; i < c->n_layer; i++) {
        n_index += layers[i].index != NULL;
    }
    if (n_index != c->n_index_layer) {
        return err_set(err, KVS_INVALID,
                       "%d layers have index memory, n_index_layer is %d: give as many",
                       (int)n_index, (int)c->n_index_layer);
    }
    n_index = 0;
    for (int32_t i = 0; i < c->n_layer; i++) {
        const kvs_cache_layer *l = &layers[i];
        TRY(check_rows(c, i, l, err));
        for (int32_t j = 0; j < i; j++) {
            if (layers[j].kv == l->kv || (l->index != NULL && layers[j].index == l->index)) {
                return err_set(err, KVS_INVALID,
                               "layers %d and %d have the same memory: give each its own", (int)j,
                               (int)i);
            }
        }
        c->layer[i].kv = l->kv;
        c->layer[i].page_stride = l->page_stride;
        c->layer[i].row_stride = l->row_stride;
        if (l->index != NULL) {
            TRY(check_index(c, i, l, err));
            c->index_layer[n_index].keys = l->index;
            c->index_layer[n_index].page_stride = l->index_stride;
            c->index_layer[n_index].of_layer = i;
            n_index++;
        }
    }
    return KVS_OK;
}

kvs_status cache_map(kvs_cache **out, const kvs_cache_config *cfg, const kvs_cache_layer *layers,
                     uint64_t tag, kvs_error *err)
{
    *out = NULL;
    kvs_cache *c = NULL;
    TRY(cache_new(&c, cfg, err));
    const kv_layout layout = {.kv = (kvs_kv_format)c->fmt,
                              .index = (kvs_index_format)c->index_fmt,
                              .hadamard = c->hadamard};
    kvs_status st = tag == 0 ? KVS_OK : cache_tag_check(tag, layout, err);
    if (st == KVS_OK) {
        st = take_layers(c, layers, err);
    }
    if (st != KVS_OK) {
        cache_free(c);
        return st;
    }
    *out = c;
    return KVS_OK;
}

void cache_free(kvs_cache *c)
{
    if (c == NULL) {
        return;
    }
    mem_unmap_pages(c->map, c->map_bytes);
    mem_free(c->layer);
    mem_free(c->index_layer);
    mem_free(c);
}

void cache_get_info(const kvs_cache *c, kvs_cache_info *info)
{
    const kvio_stats *l = &c->latent_stats;
    const kvio_stats *x = &c->index_stats;
    *info = (kvs_cache_info){
        .bytes_latent = c->n_slot * cache_row_bytes(c) * c->n_layer,
        .bytes_index = c->n_page * cache_index_page_bytes(c) * c->n_index_layer,
        .row_bytes = cache_row_bytes(c),
        .index_page_bytes = cache_index_page_bytes(c),
        .n_row_written = l->n_written,
        .n_index_written = x->n_written,
        .n_nan = l->n_nan + x->n_nan,
        .n_saturated = l->n_sat + x->n_sat,
        .n_bad_slot = l->n_bad_id + x->n_bad_id,
        .k_scale_ignored = c->k_scale_ignored,
    };
}

void cache_write(kvs_cache *c, const kern_table *k, dev_queue *q, int32_t layer, const void *latent,
                 const void *rope, kvs_dtype type, const int64_t *slot, int64_t n_tok)
{
    const cache_layer *l = &c->layer[layer];
    const kv_write_args a = {
        .n_tok = n_tok,
        .latent = latent,
        .rope = rope,
        .latent_stride = KVS_LATENT_DIM,
        .rope_stride = KVS_ROPE_DIM,
        .in_type = type,
        .slot = slot,
        .kv = l->kv,
        .fmt = c->fmt,
        .page_stride = l->page_stride,
        .row_stride = l->row_stride,
        .n_slot = c->n_slot,
        .rule = c->rule,
        .k_scale = l->k_scale,
        .stats = &c->latent_stats,
    };
    k->kv_write(&a, q);
}

void cache_write_index(kvs_cache *c, const kern_table *k, dev_queue *q, int32_t index_layer,
                       const void *key, kvs_dtype type, const int64_t *slot, int64_t n_tok)
{
    const cache_index_layer *l = &c->index_layer[index_layer];
    const index_write_args a = {
        .n_tok = n_tok,
        .key = key,
        .key_stride = KVS_INDEX_DIM,
        .in_type = type,
        .slot = slot,
        .keys = l->keys,
        .fmt = c->index_fmt,
        .page_stride = l->page_stride,
        .n_slot = c->n_slot,
        .stats = &c->index_stats,
    };
    k->index_write(&a, q);
}

void cache_attn_args(const kvs_cache *c, int32_t layer, attn_args *a)
{
    const cache_layer *l = &c->layer[layer];
    a->kv = l->kv;
    a->fmt = c->fmt;
    a->page_stride = l->page_stride;
    a->row_stride = l->row_stride;
    a->n_slot = c->n_slot;
    a->k_scale = l->k_scale;
}

void cache_index_args(const kvs_cache *c, int32_t index_layer, index_score_args *a)
{
    const cache_index_layer *l = &c->index_layer[index_layer];
    a->keys = l->keys;
    a->fmt = c->index_fmt;
    a->page_stride = l->page_stride;
    a->n_page = c->n_page;
}

void cache_gather_args(const kvs_cache *c, int32_t layer, gather_args *a)
{
    const cache_layer *l = &c->layer[layer];
    a->kv = l->kv;
    a->fmt = c->fmt;
    a->page_stride = l->page_stride;
    a->row_stride = l->row_stride;
    a->n_slot = c->n_slot;
    a->k_scale = l->k_scale;
}
