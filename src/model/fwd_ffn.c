/* model/fwd_ffn.c - the feed-forward half of a layer: dense, or experts and a shared expert.
 *
 * A rank computes its columns of a dense FFN and of the shared expert, and its columns of its experts. A row's
 * sum on a rank starts at 0 and takes the rank's experts in ascending id, then the shared expert; a rank
 * without columns adds nothing. One sum over ranks ends the layer.
 *
 * Rows are gathered expert by expert, so that each weight is read once per step, and in chunks of ffn_rows. No row
 * knows which others its expert has.
 */
#include <string.h>
#include "model/fwd_impl.h"
#include "base/err.h"

/* This rank's columns of an FFN. */
static wt_ffn cut(const wt_ffn *m, wt_range r)
{
    const wt_ffn c = {
        .gate = wt_rows(&m->gate, r.begin, r.end),
        .up = wt_rows(&m->up, r.begin, r.end),
        .down = wt_cols(&m->down, r.begin, r.end),
    };
    return c;
}

/* y [n, hidden] = down(silu(gate x) * up x); inner columns are at least 1. */
static void swiglu(fwd *f, const wt_ffn *m, int32_t n, fwd_op in, float *y)
{
    const int32_t inner = m->gate.n_out;
    fwd_product(f, &m->gate, n, in, f->b.gate_up, 2 * (int64_t)inner);
    fwd_product(f, &m->up, n, in, f->b.gate_up + inner, 2 * (int64_t)inner);
    const act_args a = {
        .n_row = n,
        .dim = inner,
        .gate = f->b.gate_up,
        .up = f->b.gate_up + inner,
        .stride = 2 * (int64_t)inner,
        .y = f->b.act,
        .y_type = (int32_t)fwd_operand(&m->down),
        .y_stride = inner,
    };
    f->d->kern.act(&a, &f->d->queue);
    const fwd_op act = {(const bf16 *)(const void *)f->b.act, f->b.act, inner};
    fwd_product(f, &m->down, n, act, y, f->h->hidden);
}

/* The whole step's rows through one FFN: into sum, or added to it. */
static void dense(fwd *f, const wt_ffn *whole, wt_range columns, fwd_op in, int add)
{
    const int32_t n = f->d->plan.n_row;
    const int64_t hidden = f->h->hidden;
    if (columns.begin == columns.end) {
        if (!add)
            fwd_zero(f->b.sum, n * hidden);
        return;
    }
    const wt_ffn m = cut(whole, columns);
    for (int32_t row0 = 0; row0 < n; row0 += f->s.ffn_rows) {
        const int32_t k = dcp_min32(f->s.ffn_rows, n - row0);
        float *to = f->b.sum + row0 * hidden;
        swiglu(f, &m, k, fwd_rows_from(in, row0), add ? f->b.expert_out : to);
        if (add)
            fwd_add(f, k * hidden, to, f->b.expert_out);
    }
}

/* ---- experts ---- */

static void route(fwd *f, const wt_layer *l, fwd_op in)
{
    const hp *h = f->h;
    const int32_t n = f->d->plan.n_row;
    fwd_product(f, &l->router, n, in, f->b.router, h->n_expert);
    const route_args a = {
        .n_row = n,
        .n_expert = h->n_expert,
        .n_active = h->n_active,
        .n_group = h->n_group,
        .topk_group = h->topk_group,
        .kind = h->router == HP_SOFTMAX ? ROUTE_SOFTMAX : ROUTE_SIGMOID,
        .group_max = h->group_max,
        .norm_topk = h->norm_topk,
        .scale = h->route_scale,
        .logit = f->b.router,
        .bias = l->router_bias,
        .id = f->b.expert_id,
        .weight = f->b.expert_w,
    };
    f->d->kern.route(&a, &f->d->queue);
}

/* Rows of every expert, ascending: expert e has list entries [list_at[e], list_at[e + 1]). */
static void list_rows(fwd *f)
{
    const int32_t n_expert = f->h->n_expert;
    const int32_t active = f->h->n_active;
    const int64_t n = (int64_t)f->d->plan.n_row * active;
    int32_t *at = f->b.list_at;
    memset(at, 0, (size_t)(n_expert + 1) * sizeof *at);
    for (int64_t i = 0; i < n; i++)
        at[f->b.expert_id[i] + 1]++;
    for (int32_t e = 0; e < n_expert; e++)
        at[e + 1] += at[e];
    for (int64_t i = 0; i < n; i++) {
        const int32_t to = at[f->b.expert_id[i]]++;
        f->b.list_row[to] = (int32_t)(i / active);
        f->b.list_w[to] = f->b.expert_w[i];
    }
    /* each start has moved to its end: the start of the next */
    memmove(at + 1, at, (size_t)n_expert * sizeof *at);
    at[0] = 0;
}

static void one_expert(fwd *f, const wt_ffn *whole, int32_t begin, int32_t end, fwd_op in)
{
    const int32_t hidden = f->h->hidden;
    const wt_ffn m = cut(whole, f->s.moe);
    const int need = fwd_need(&m.gate) | fwd_need(&m.up);
    bf16 *to_b = need & FWD_NEED_B ? f->b.gather_b : NULL;
    float *to_f = need & FWD_NEED_F ? f->b.gather_f : NULL;
    for (int32_t i = begin; i < end; i += f->s.ffn_rows) {
        const int32_t k = dcp_min32(f->s.ffn_rows, end - i);
        const int32_t *rows = f->b.list_row + i;
        fwd_gather(f, k, rows, hidden, in, to_b, to_f);
        const fwd_op x = {to_b, to_f, hidden};
        swiglu(f, &m, k, x, f->b.expert_out);
        fwd_scatter_add(f, k, rows, f->b.list_w + i, hidden, f->b.expert_out, f->b.sum);
    }
}

static void experts(fwd *f, const wt_layer *l, fwd_op in)
{
    route(f, l, in);
    list_rows(f);
    fwd_zero(f->b.sum, (int64_t)f->d->plan.n_row * f->h->hidden);
    if (f->s.moe.begin == f->s.moe.end)
        return;
    for (int32_t e = f->s.expert.begin; e < f->s.expert.end; e++)
        one_expert(f, &l->expert[e], f->b.list_at[e], f->b.list_at[e + 1], in);
}

static int need_of(const wt_layer *l)
{
    if (l->n_expert == 0)
        return fwd_need(&l->ffn.gate) | fwd_need(&l->ffn.up);
    int need = fwd_need(&l->router) | fwd_need(&l->shared.gate) | fwd_need(&l->shared.up);
    for (int32_t e = 0; e < l->n_expert; e++)
        need |= fwd_need(&l->expert[e].gate) | fwd_need(&l->expert[e].up);
    return need;
}

kvs_status fwd_ffn(fwd *f, const wt_layer *l, kvs_error *err)
{
    const int32_t n = f->d->plan.n_row;
    const int32_t hidden = f->h->hidden;
    const fwd_op in = fwd_norm(f, n, hidden, f->b.x, hidden, l->ffn_norm, f->h->eps, need_of(l), f->b.in_b,
                               f->b.in_f);
    if (l->n_expert == 0) {
        dense(f, &l->ffn, f->s.inter, in, 0);
    } else {
        experts(f, l, in);
        if (l->shared.gate.n_out > 0)
            dense(f, &l->shared, f->s.shared, in, 1);
    }
    return fwd_add_sum(f, n, err);
}
