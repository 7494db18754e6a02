/* model/fwd_layer.c - products and norms of a layer, and its attention.
 *
 * An attention layer: norm; latents of keys and queries; cache rows of every token; index keys, and on layers
 * with an indexer the selection; then chunk by chunk of rows: the heads' queries, absorbed, attention over the
 * group's cache, values, output product. Prompt rows of a layer without an indexer take the multi-head form
 * instead (fwd_heads.c). What a rank computes of the latents, the index and the selection is
 * the same on every rank; heads are its own, and their output is summed over ranks.
 */
#include <string.h>
#include "model/fwd_impl.h"
#include "base/err.h"

/* ---- products and norms ---- */

void fwd_product_heads(fwd *f, const gemm_mat *w, int64_t w_batch, int32_t n_batch, int32_t n_row,
                       const void *x, int64_t x_stride, int64_t x_batch, float *y, int64_t y_stride,
                       int64_t y_batch)
{
    if (n_row == 0 || w->n_out == 0)
        return;
    const gemm_args a = {
        .w = *w,
        .n_row = n_row,
        .x = x,
        .x_stride = x_stride,
        .y = y,
        .y_stride = y_stride,
        .n_batch = n_batch,
        .w_batch = w_batch,
        .x_batch = x_batch,
        .y_batch = y_batch,
        .scratch = f->b.gemm,
        .scratch_bytes = f->gemm_bytes,
    };
    f->d->kern.gemm(&a, &f->d->queue);
}

void fwd_product(fwd *f, const gemm_mat *w, int32_t n_row, fwd_op in, float *y, int64_t y_stride)
{
    const void *x = w->type == GEMM_F32 ? (const void *)in.f : (const void *)in.b;
    fwd_product_heads(f, w, 0, 1, n_row, x, in.stride, 0, y, y_stride, 0);
}

static void norm_to(fwd *f, int32_t n_row, int32_t dim, const float *x, int64_t x_stride,
                    const float *weight, float eps, void *y, kvs_dtype type, int64_t y_stride)
{
    const norm_args a = {
        .n_row = n_row,
        .dim = dim,
        .x = x,
        .x_stride = x_stride,
        .weight = weight,
        .eps = eps,
        .y = y,
        .y_type = (int32_t)type,
        .y_stride = y_stride,
    };
    f->d->kern.norm(&a, &f->d->queue);
}

fwd_op fwd_norm(fwd *f, int32_t n_row, int32_t dim, const float *x, int64_t x_stride,
                const float *weight, float eps, int need, bf16 *to_b, float *to_f)
{
    if (need & FWD_NEED_B)
        norm_to(f, n_row, dim, x, x_stride, weight, eps, to_b, KVS_DTYPE_BF16, dim);
    if (need & FWD_NEED_F)
        norm_to(f, n_row, dim, x, x_stride, weight, eps, to_f, KVS_DTYPE_F32, dim);
    const fwd_op r = {need & FWD_NEED_B ? to_b : NULL, need & FWD_NEED_F ? to_f : NULL, dim};
    return r;
}

kvs_status fwd_add_sum(fwd *f, int32_t n_row, kvs_error *err)
{
    const int64_t n = (int64_t)n_row * f->h->hidden;
    for (int64_t at = 0; f->s.tp > 1 && at < n; at += f->s.reduce_values) {
        const int64_t m = n - at < f->s.reduce_values ? n - at : f->s.reduce_values;
        TRY(comm_all_reduce(f->world, f->b.sum + at, (size_t)m, err));
    }
    fwd_add(f, n, f->b.x, f->b.sum);
    return KVS_OK;
}

void fwd_rope(fwd *f, int32_t row0, int32_t n_row, int32_t n_head, int32_t dim0, int interleaved, float *x,
              int64_t row_stride, int64_t head_stride)
{
    const rope_args a = {
        .n_row = n_row,
        .n_head = n_head,
        .n_pair = FWD_HALF_ROPE,
        .dim0 = dim0,
        .interleaved = interleaved,
        .x = x,
        .x_stride_row = row_stride,
        .x_stride_head = head_stride,
        .cos = f->b.cos + (int64_t)row0 * FWD_HALF_ROPE,
        .sin = f->b.sin + (int64_t)row0 * FWD_HALF_ROPE,
    };
    f->d->kern.rope(&a, &f->d->queue);
}

/* ---- keys ---- */

static kvs_status write_rows(fwd *f, const wt_layer *l, int32_t i_layer, fwd_op in, kvs_error *err)
{
    const int32_t n = f->d->plan.n_row;
    fwd_product(f, &l->kv_a, n, in, f->b.kv, KVS_ROW_DIM);
    norm_to(f, n, KVS_LATENT_DIM, f->b.kv, KVS_ROW_DIM, l->kv_norm, f->s.latent_eps, f->b.latent,
            KVS_DTYPE_F32, KVS_LATENT_DIM);
    fwd_rope(f, 0, n, 1, KVS_LATENT_DIM, 1, f->b.kv, KVS_ROW_DIM, KVS_ROW_DIM);
    fwd_cast(f, n, KVS_ROPE_DIM, f->b.kv + KVS_LATENT_DIM, KVS_ROW_DIM, f->b.k_rope, KVS_ROPE_DIM,
             KVS_DTYPE_F32);
    return dcp_write(f->d, f->cache, i_layer, f->b.latent, f->b.k_rope, KVS_DTYPE_F32, err);
}

/* ---- indexer ---- */

static kvs_status write_index(fwd *f, const wt_layer *l, int32_t index_layer, fwd_op in, kvs_error *err)
{
    const int32_t n = f->d->plan.n_row;
    fwd_product(f, &l->ik, n, in, f->b.index_k, KVS_INDEX_DIM);
    const norm_args a = {
        .n_row = n,
        .dim = KVS_INDEX_DIM,
        .x = f->b.index_k,
        .x_stride = KVS_INDEX_DIM,
        .weight = l->ik_norm,
        .bias = l->ik_bias,
        .eps = 1e-6f,
        .centre = 1,
        .y = f->b.index_k,
        .y_type = KVS_DTYPE_F32,
        .y_stride = KVS_INDEX_DIM,
    };
    f->d->kern.norm(&a, &f->d->queue);
    fwd_rope(f, 0, n, 1, 0, f->h->index_interleaved, f->b.index_k, KVS_INDEX_DIM, KVS_INDEX_DIM);
    if (f->cfg.hadamard)
        fwd_hadamard(f, n, f->b.index_k);
    return dcp_write_index(f->d, f->cache, index_layer, f->b.index_k, KVS_DTYPE_F32, err);
}

/* The last topk positions of every row, in place of what the indexer would choose. */
static kvs_status select_last(fwd *f, kvs_error *err)
{
    const int32_t k = f->h->topk;
    for (int32_t row = 0; row < f->d->plan.n_row; row++) {
        const int32_t bound = f->d->plan.bound[row];
        const int32_t first = bound > k ? bound - k : 0;
        for (int32_t i = 0; i < k; i++)
            f->b.last[(int64_t)row * k + i] = first + i < bound ? first + i : -1;
    }
    return dcp_set_selection(f->d, f->b.last, k, err);
}

static kvs_status keep_trace(fwd *f, int32_t index_layer, kvs_error *err)
{
    const int64_t k = f->h->topk;
    int32_t *ids = f->b.trace + index_layer * f->cfg.max_rows * k;
    int32_t *count = f->b.trace_n + (int64_t)index_layer * f->cfg.max_rows;
    if (!f->cfg.selection_last)
        return dcp_selection_copy(f->d, ids, count, err);
    memcpy(ids, f->b.last, (size_t)f->d->plan.n_row * (size_t)k * sizeof *ids);
    for (int32_t row = 0; row < f->d->plan.n_row; row++)
        count[row] = f->d->plan.bound[row] < k ? f->d->plan.bound[row] : (int32_t)k;
    return KVS_OK;
}

static kvs_status select_keys(fwd *f, const wt_layer *l, int32_t index_layer, fwd_op in, fwd_op q_lat,
                              kvs_error *err)
{
    if (f->cfg.selection_last)
        return select_last(f, err);
    const int32_t n = f->d->plan.n_row;
    const int32_t heads = f->h->n_index_head;
    const int64_t width = (int64_t)heads * KVS_INDEX_DIM;
    fwd_product(f, &l->iq, n, q_lat, f->b.index_q, width);
    fwd_rope(f, 0, n, heads, 0, f->h->index_interleaved, f->b.index_q, width, KVS_INDEX_DIM);
    if (f->cfg.hadamard)
        fwd_hadamard(f, (int64_t)n * heads, f->b.index_q);
    fwd_product(f, &l->iw, n, in, f->b.index_w, heads);
    return dcp_select(f->d, f->cache, index_layer, f->b.index_q, KVS_DTYPE_F32, f->b.index_w, err);
}

/* ---- heads ---- */

/* A layer's matrices cut to this rank's heads. */
typedef struct head_mats {
    gemm_mat q, uk, uv;
    fwd_op q_in; /* what q takes: the query latent, or the layer's input */
    kvs_attend how;
    int32_t i_layer;
} head_mats;

static gemm_mat head_from(const gemm_mat *m, int64_t head_stride, int32_t head)
{
    gemm_mat r = *m;
    r.data = (const uint8_t *)m->data + head * head_stride * (m->type == GEMM_F32 ? 4 : 2);
    return r;
}

static head_mats heads_of(const fwd *f, const wt_layer *l, int32_t i_layer, fwd_op in, fwd_op q_lat)
{
    const int32_t first = f->s.head0;
    const int32_t last = first + f->s.n_head;
    const int has_latent = f->h->q_lora > 0;
    head_mats m = {
        .q = wt_rows(has_latent ? &l->q_b : &l->q, first * f->s.q_dim, last * f->s.q_dim),
        .uk = head_from(&l->uk, l->uk_head, first),
        .uv = head_from(&l->uv, l->uv_head, first),
        .q_in = has_latent ? q_lat : in,
        .how = f->h->n_index_head > 0 ? KVS_ATTEND_SPARSE : KVS_ATTEND_DENSE,
        .i_layer = i_layer,
    };
    return m;
}

/* The absorbed queries of n rows from row0 on, as attention takes them, into q_row. */
static kvs_dtype make_queries(fwd *f, const wt_layer *l, const head_mats *m, int32_t row0, int32_t n)
{
    const int32_t heads = f->s.n_head;
    const int32_t nope = f->h->nope;
    const int64_t q_row = (int64_t)heads * f->s.q_dim;
    fwd_product(f, &m->q, n, fwd_rows_from(m->q_in, row0), f->b.q, q_row);
    fwd_rope(f, row0, n, heads, nope, 1, f->b.q, q_row, f->s.q_dim);
    fwd_cast_heads(f, n, heads, nope, f->b.q, q_row, f->s.q_dim, f->b.q_nope, (int64_t)heads * nope, nope,
                   (int32_t)fwd_operand(&m->uk));
    fwd_product_heads(f, &m->uk, l->uk_head, heads, n, f->b.q_nope, (int64_t)heads * nope, nope,
                      f->b.q_latent, (int64_t)heads * KVS_LATENT_DIM, KVS_LATENT_DIM);
    /* rounded here rather than by dcp: the same bits, and every worker takes part */
    const kvs_dtype type = f->d->elem_bytes == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    const int64_t elem = f->d->elem_bytes;
    const int64_t to_row = (int64_t)heads * KVS_ROW_DIM;
    fwd_cast_heads(f, n, heads, KVS_LATENT_DIM, f->b.q_latent, (int64_t)heads * KVS_LATENT_DIM,
                   KVS_LATENT_DIM, f->b.q_row, to_row, KVS_ROW_DIM, (int32_t)type);
    fwd_cast_heads(f, n, heads, KVS_ROPE_DIM, f->b.q + nope, q_row, f->s.q_dim,
                   f->b.q_row + KVS_LATENT_DIM * elem, to_row, KVS_ROW_DIM, (int32_t)type);
    return type;
}

void fwd_output(fwd *f, const wt_layer *l, int32_t row0, int32_t n_row, const float *v)
{
    const int32_t v_dim = f->h->v_dim;
    const int32_t width = f->s.n_head * v_dim;
    const gemm_mat o = wt_cols(&l->o, f->s.head0 * v_dim, f->s.head0 * v_dim + width);
    fwd_op v_in = {NULL, v, width};
    if (o.type != GEMM_F32) {
        fwd_cast(f, n_row, width, v, width, f->b.v_in, width, KVS_DTYPE_BF16);
        v_in.b = f->b.v_in;
    }
    fwd_product(f, &o, n_row, v_in, f->b.sum + (int64_t)row0 * f->h->hidden, f->h->hidden);
}

static kvs_status attend_chunk(fwd *f, const wt_layer *l, const head_mats *m, int32_t row0, int32_t n,
                               kvs_error *err)
{
    const int32_t heads = f->s.n_head;
    const int32_t v_dim = f->h->v_dim;
    const kvs_dtype q_type = make_queries(f, l, m, row0, n);
    TRY(dcp_attend_rows(f->d, f->cache, m->i_layer, m->how, row0, n, f->b.q_row, q_type,
                        f->b.q_latent, fwd_operand(&m->uv), err));
    fwd_product_heads(f, &m->uv, l->uv_head, heads, n, f->b.q_latent, (int64_t)heads * KVS_LATENT_DIM,
                      KVS_LATENT_DIM, f->b.v, (int64_t)heads * v_dim, v_dim);
    fwd_output(f, l, row0, n, f->b.v);
    return KVS_OK;
}

/* The first row behind row0 that is not attended in one call with it: rows of the multi-head form are of one
 * request. */
static int32_t run_end(const fwd *f, int32_t row0)
{
    const dcp_plan *p = &f->d->plan;
    int32_t row = row0 + 1;
    while (row < p->n_row && f->b.is_prompt[row] == f->b.is_prompt[row0] &&
           (!f->b.is_prompt[row] || p->row_req[row] == p->row_req[row0]))
        row++;
    return row;
}

static kvs_status attend(fwd *f, const wt_layer *l, const head_mats *m, kvs_error *err)
{
    const int32_t n = f->d->plan.n_row;
    for (int32_t row0 = 0, end = 0; row0 < n; row0 = end) {
        end = run_end(f, row0);
        if (f->b.is_prompt[row0]) {
            TRY(fwd_attend_heads(f, l, m->i_layer, m->q_in, row0, end - row0, err));
            continue;
        }
        for (int32_t at = row0; at < end; at += f->s.attend_rows)
            TRY(attend_chunk(f, l, m, at, dcp_min32(f->s.attend_rows, end - at), err));
    }
    return KVS_OK;
}

kvs_status fwd_attention(fwd *f, const wt_layer *l, int32_t i_layer, int32_t reuse, kvs_error *err)
{
    const hp *h = f->h;
    const int32_t n = f->d->plan.n_row;
    const int32_t index_layer = f->index_of[i_layer];
    const int has_latent = h->q_lora > 0;
    int need = fwd_need(has_latent ? &l->q_a : &l->q) | fwd_need(&l->kv_a);
    if (index_layer >= 0)
        need |= fwd_need(&l->ik) | fwd_need(&l->iw);
    const fwd_op in = fwd_norm(f, n, h->hidden, f->b.x, h->hidden, l->attn_norm, h->eps, need, f->b.in_b,
                               f->b.in_f);
    TRY(write_rows(f, l, i_layer, in, err));
    fwd_op q_lat = in;
    if (has_latent) {
        fwd_product(f, &l->q_a, n, in, f->b.q_lat, h->q_lora);
        const int q_need = fwd_need(&l->q_b) | (index_layer >= 0 ? fwd_need(&l->iq) : 0);
        q_lat = fwd_norm(f, n, h->q_lora, f->b.q_lat, h->q_lora, l->q_norm, f->s.latent_eps, q_need,
                         f->b.q_lat_b, f->b.q_lat_f);
    }
    if (index_layer >= 0) {
        TRY(write_index(f, l, index_layer, in, err));
        if (reuse)
            TRY(dcp_selection_restore(f->d, f->b.keep, f->b.keep_lane, f->n_keep, err));
        else
            TRY(select_keys(f, l, index_layer, in, q_lat, err));
        if (f->cfg.trace && i_layer < h->n_layer)
            TRY(keep_trace(f, index_layer, err));
    }
    const head_mats m = heads_of(f, l, i_layer, in, q_lat);
    TRY(attend(f, l, &m, err));
    return fwd_add_sum(f, n, err);
}
