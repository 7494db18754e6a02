/* api/dcp_api.c - the public attention functions: pointers are checked here, everything else below. */
#include <string.h>
#include "base/err.h"
#include "dcp/dcp.h"

#define NOT_NULL(p)                                                                                \
    do {                                                                                           \
        if (!(p)) {                                                                                \
            return err_set(err, KVS_INVALID, "%s: " #p " is NULL", __func__);                      \
        }                                                                                          \
    } while (0)

kvs_status kvs_dcp_open(kvs_dcp **out, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(cfg);
    NOT_NULL(world);
    kvs_dcp_config c = kvs_dcp_config_default();
    if (cfg->struct_size < sizeof cfg->struct_size || cfg->struct_size > 4096)
        return err_set(err, KVS_INVALID,
                       "kvs_dcp_config.struct_size %zu: start from kvs_dcp_config_default()",
                       cfg->struct_size);
    memcpy(&c, cfg, cfg->struct_size < sizeof c ? cfg->struct_size : sizeof c);
    return dcp_open(out, &c, world, err);
}

void kvs_dcp_close(kvs_dcp *d)
{
    dcp_close(d);
}

int32_t kvs_dcp_rank(const kvs_dcp *d)
{
    return d->geom.rank;
}

int32_t kvs_dcp_heads(const kvs_dcp *d)
{
    return d->s.head_local;
}

int64_t kvs_dcp_workspace_bytes(const kvs_dcp *d)
{
    return d->bytes.total;
}

const char *kvs_dcp_kernels(const kvs_dcp *d)
{
    return d->kernels;
}

kvs_status kvs_dcp_plan(kvs_dcp *d, const kvs_batch *batch, kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(batch);
    return dcp_plan_batch(d, batch, err);
}

kvs_status kvs_dcp_write(kvs_dcp *d, kvs_cache *c, int32_t layer, const void *latent,
                         const void *rope, kvs_dtype type, kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(c);
    if (d->plan.n_row > 0) {
        NOT_NULL(latent);
        NOT_NULL(rope);
    }
    return dcp_write(d, c, layer, latent, rope, type, err);
}

kvs_status kvs_dcp_write_index(kvs_dcp *d, kvs_cache *c, int32_t index_layer, const void *key,
                               kvs_dtype type, kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(c);
    if (d->plan.n_row > 0)
        NOT_NULL(key);
    return dcp_write_index(d, c, index_layer, key, type, err);
}

kvs_status kvs_dcp_select(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, const void *q,
                          kvs_dtype type, const float *w, kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(c);
    if (d->plan.n_row > 0) {
        NOT_NULL(q);
        NOT_NULL(w);
    }
    return dcp_select(d, c, index_layer, q, type, w, err);
}

kvs_status kvs_dcp_set_selection(kvs_dcp *d, const int32_t *ids, int64_t stride, kvs_error *err)
{
    NOT_NULL(d);
    if (d->plan.n_row > 0 && stride > 0)
        NOT_NULL(ids);
    return dcp_set_selection(d, ids, stride, err);
}

kvs_status kvs_dcp_selection(const kvs_dcp *d, int32_t *ids, int32_t *count, kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(ids);
    NOT_NULL(count);
    return dcp_selection_copy(d, ids, count, err);
}

kvs_status kvs_dcp_attend(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                          const void *q, kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse,
                          kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(c);
    if (d->plan.n_row > 0) {
        NOT_NULL(q);
        NOT_NULL(out);
    }
    return dcp_attend(d, c, layer, how, q, q_type, out, out_type, lse, err);
}

kvs_status kvs_dcp_attend_local(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                                const void *q, kvs_dtype q_type, float *out, float *lse,
                                kvs_error *err)
{
    NOT_NULL(d);
    NOT_NULL(c);
    if (d->plan.n_row > 0) {
        NOT_NULL(q);
        NOT_NULL(out);
        NOT_NULL(lse);
    }
    return dcp_attend_local(d, c, layer, how, q, q_type, out, lse, err);
}

kvs_status kvs_dcp_finish(kvs_dcp *d, kvs_step_info *info, kvs_error *err)
{
    NOT_NULL(d);
    return dcp_finish(d, info, err);
}

/* Every variant of merge gives the same bits, so the best one that KVS_CPU allows serves. */
static kvs_status merge_kernel(kern_table *kern, kvs_error *err)
{
    uint32_t features = 0;
    TRY(dcp_features(NULL, &features, err));
    return kern_init(kern, features, NULL, err);
}

kvs_status kvs_merge(int32_t n_part, const float *const *out_in, const float *const *lse_in,
                     int32_t n_row, int32_t n_head, int32_t dim, void *out, kvs_dtype out_type,
                     float *lse, kvs_error *err)
{
    if (n_part < 1)
        return err_set(err, KVS_INVALID, "n_part %d: at least 1 partial is needed", n_part);
    if (n_row < 0 || n_head < 1 || dim < 16 || dim % 16 != 0)
        return err_set(err, KVS_INVALID,
                       "merge of [%d, %d, %d]: n_row >= 0, n_head >= 1 and dim a multiple of 16 "
                       "are needed",
                       n_row, n_head, dim);
    if (out_type != KVS_DTYPE_F32 && out_type != KVS_DTYPE_BF16)
        return err_set(err, KVS_INVALID, "out type %d: use KVS_DTYPE_F32 or KVS_DTYPE_BF16",
                       (int)out_type);
    if (n_row == 0)
        return KVS_OK;
    NOT_NULL(out_in);
    NOT_NULL(lse_in);
    NOT_NULL(out);
    for (int32_t p = 0; p < n_part; p++) {
        if (!out_in[p] || !lse_in[p])
            return err_set(err, KVS_INVALID, "partial %d of %d is NULL", p, n_part);
    }
    kern_table kern;
    TRY(merge_kernel(&kern, err));
    dev_queue q;
    dev_queue_init(&q, NULL);
    const merge_args a = {
        .n_part = n_part,
        .mode = n_part <= KVS_LANES && KVS_LANES % n_part == 0 ? MERGE_TREE : MERGE_FOLD,
        .n_row = n_row,
        .n_head = n_head,
        .dim = dim,
        .out_in = out_in,
        .lse_in = lse_in,
        .in_stride_row = (int64_t)n_head * dim,
        .in_stride_head = dim,
        .lse_stride_row = n_head,
        .out = out,
        .out_type = (int32_t)out_type,
        .out_stride_row = (int64_t)n_head * dim,
        .out_stride_head = dim,
        .lse = lse,
    };
    kern.merge(&a, &q);
    return dev_queue_check(&q, err);
}
