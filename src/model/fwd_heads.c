/* model/fwd_heads.c - attention in its multi-head form: prompt rows of layers without an indexer.
 *
 * The rows of one request in the step, heads in groups: their queries; then block after block of 512 positions
 * of the context, the rows' own tokens included, which the group of ranks gathers in sequence order; keys and
 * values of the heads expanded from the block's latents (kv_b); attention of all rows, folded into what earlier
 * blocks gave. Against the absorbed form a (query, key, head) takes nope + 64 + v_dim products instead of 1088,
 * and a (key, head) 512 (nope + v_dim) more, once a step whatever its rows: so all rows of a step stay together,
 * and what does not fit is cut into groups of heads.
 *
 * A block holds the same rows in the same order for every DCP size and every cut of the prompt, and a row attends
 * a prefix of it: bits depend on neither, nor on the groups of heads.
 */
#include <string.h>
#include "model/fwd_impl.h"
#include "base/err.h"

_Static_assert((int)DCP_CONTEXT_BLOCK == (int)MHA_BLOCK, "a block of the context is one of the kernel");

/* Heads [first, first + n) of this rank, and rows of the plan. */
typedef struct heads {
    const wt_layer *l;
    int32_t i_layer;
    int32_t first, n;
    int32_t row0, n_row;
    const void *q; /* [n_row, n, nope + rope] */
    int32_t type;  /* of q and of the block's rows */
} heads;

static int32_t group_of(const fwd *f, int32_t n_row)
{
    const int32_t fit = f->s.head_pairs / n_row;
    return fit < 1 ? 1 : dcp_min32(fit, f->s.head_most);
}

static void make_queries(fwd *f, heads *g, fwd_op q_in)
{
    const gemm_mat *all = f->h->q_lora > 0 ? &g->l->q_b : &g->l->q;
    const int32_t dim = f->s.q_dim;
    const int32_t first = (f->s.head0 + g->first) * dim;
    const gemm_mat q = wt_rows(all, first, first + g->n * dim);
    const int64_t row = (int64_t)g->n * dim;
    fwd_product(f, &q, g->n_row, fwd_rows_from(q_in, g->row0), f->b.hq, row);
    fwd_rope(f, g->row0, g->n_row, g->n, f->h->nope, 1, f->b.hq, row, dim);
    g->q = f->b.hq;
    if (g->type == KVS_DTYPE_BF16) {
        fwd_cast(f, g->n_row, (int32_t)row, f->b.hq, row, f->b.hq_b, row, g->type);
        g->q = f->b.hq_b;
    }
}

/* Keys and values of the group's heads from the latents of the n rows that the handle holds. */
static void expand(fwd *f, const heads *g, int32_t n)
{
    const int32_t width = f->h->nope + f->h->v_dim;
    const int32_t first = (f->s.head0 + g->first) * width;
    const gemm_mat kv_b = wt_rows(&g->l->kv_b, first, first + g->n * width);
    fwd_latents(f, n, f->d->ctx_rows, g->type, &kv_b, f->b.h_lat);
    const fwd_op latents = {(const bf16 *)(const void *)f->b.h_lat, f->b.h_lat, KVS_LATENT_DIM};
    fwd_product(f, &kv_b, n, latents, f->b.h_kv, (int64_t)g->n * width);
}

/* Folds block j, of n keys, into the rows' values. */
static void attend_block(fwd *f, const heads *g, int64_t j, int32_t n)
{
    const int32_t v_dim = f->h->v_dim;
    const int32_t width = f->h->nope + v_dim;
    const int64_t elem = g->type == KVS_DTYPE_F32 ? 4 : 2;
    uint64_t n_key = 0;
    for (int32_t t = 0; t < g->n_row; t++) {
        const int64_t left = f->d->plan.bound[g->row0 + t] - j * DCP_CONTEXT_BLOCK;
        f->b.h_len[t] = (int32_t)(left < 0 ? 0 : left < n ? left : n);
        n_key += (uint64_t)f->b.h_len[t];
    }
    const mha_args a = {
        .n_row = g->n_row,
        .n_head = g->n,
        .nope = f->h->nope,
        .v_dim = v_dim,
        .type = g->type,
        .q = g->q,
        .q_stride_row = (int64_t)g->n * f->s.q_dim,
        .q_stride_head = f->s.q_dim,
        .softmax_scale = f->d->s.softmax_scale,
        .n_key = n,
        .kv = f->b.h_kv,
        .kv_stride_key = (int64_t)g->n * width,
        .kv_stride_head = width,
        .rope = (const uint8_t *)f->d->ctx_rows + KVS_LATENT_DIM * elem,
        .rope_stride = KVS_ROW_DIM,
        .len = f->b.h_len,
        .first = j == 0,
        .out = f->b.hv + (int64_t)g->first * v_dim,
        .out_stride_row = (int64_t)f->s.n_head * v_dim,
        .out_stride_head = v_dim,
        .lse = f->b.h_lse,
        .n_nan = &f->d->info.n_nan,
        .scratch = f->b.h_scratch,
        .scratch_bytes = f->heads_bytes,
    };
    f->d->kern.mha(&a, &f->d->queue);
    if (g->first == 0)
        f->d->info.n_key_attended += n_key; /* once a row, not once a head */
}

static kvs_status attend_group(fwd *f, heads *g, fwd_op q_in, kvs_error *err)
{
    const dcp_plan *p = &f->d->plan;
    const int64_t len = p->bound[g->row0 + g->n_row - 1]; /* bounds ascend inside a request */
    make_queries(f, g, q_in);
    for (int64_t j = 0; j * DCP_CONTEXT_BLOCK < len; j++) {
        int32_t n = 0;
        TRY(dcp_context_block(f->d, f->cache, g->i_layer, p->row_req[g->row0], j, len, &n, err));
        expand(f, g, n);
        attend_block(f, g, j, n);
    }
    return KVS_OK;
}

kvs_status fwd_attend_heads(fwd *f, const wt_layer *l, int32_t i_layer, fwd_op q_in, int32_t row0,
                            int32_t n, kvs_error *err)
{
    heads g = {
        .l = l,
        .i_layer = i_layer,
        .row0 = row0,
        .n_row = n,
        .type = f->d->elem_bytes == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
    };
    const int32_t group = group_of(f, n);
    for (g.first = 0; g.first < f->s.n_head; g.first += group) {
        g.n = dcp_min32(group, f->s.n_head - g.first);
        TRY(attend_group(f, &g, q_in, err));
    }
    const int64_t width = (int64_t)f->s.n_head * f->h->v_dim;
    for (int32_t at = 0; at < n; at += f->s.attend_rows)
        fwd_output(f, l, row0 + at, dcp_min32(f->s.attend_rows, n - at), f->b.hv + at * width);
    return KVS_OK;
}
