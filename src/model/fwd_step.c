/* model/fwd_step.c - a step of the main model, a pass of a draft layer, and what is kept of them.
 *
 * A step is checked whole before anything happens: tokens, wanted rows, then the batch by the plan. From then on
 * a failure on one rank ends the group, so that nobody waits for it.
 */
#include <string.h>
#include "base/err.h"
#include "model/fwd_impl.h"

/* Rows of a batch, or -1 where it is not one that a plan takes: the plan then says why. */
static int64_t rows_of(const fwd *f, const kvs_batch *b)
{
    if (b->n_req < 0 || b->n_req > f->d->s.max_reqs || (b->n_req > 0 && !b->q_len))
        return -1;
    int64_t n = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        if (b->q_len[i] < 0)
            return -1;
        n += b->q_len[i];
    }
    return n > f->cfg.max_rows ? -1 : n;
}

static kvs_status check_prompt(const kvs_batch *b, const int32_t *n_prompt, kvs_error *err)
{
    for (int32_t i = 0; n_prompt && i < b->n_req; i++) {
        if (n_prompt[i] < 0 || n_prompt[i] > b->q_len[i])
            return err_set(err, KVS_INVALID, "request %d: %d prompt rows of %d: use 0 to all of them", i,
                           n_prompt[i], b->q_len[i]);
    }
    return KVS_OK;
}

static kvs_status check_rows(const fwd *f, int64_t n_row, const int32_t *token, const int32_t *logit_row,
                             int32_t n_logit, const float *logits, kvs_error *err)
{
    if (n_row > 0 && !token)
        return err_set(err, KVS_INVALID, "a step of %lld rows without tokens", (long long)n_row);
    for (int64_t i = 0; i < n_row; i++) {
        if (token[i] < 0 || token[i] >= f->h->vocab)
            return err_set(err, KVS_INVALID, "row %lld: token %d is outside the vocabulary of %d",
                           (long long)i, token[i], f->h->vocab);
    }
    if (n_logit < 0 || n_logit > f->cfg.max_logits)
        return err_set(err, KVS_LIMIT, "logits of %d rows: this handle gives 0 to max_logits %d", n_logit,
                       f->cfg.max_logits);
    if (n_logit > 0 && (!logit_row || !logits))
        return err_set(err, KVS_INVALID, "logits of %d rows: logit_row and logits must be set", n_logit);
    for (int32_t i = 0; i < n_logit; i++) {
        if (logit_row[i] < 0 || logit_row[i] >= n_row || (i > 0 && logit_row[i] <= logit_row[i - 1]))
            return err_set(err, KVS_INVALID,
                           "logit row %d of %d is %d: rows of the step (0 to %lld), ascending", i, n_logit,
                           logit_row[i], (long long)n_row - 1);
    }
    return KVS_OK;
}

/* Which rows take the multi-head form: prompt rows, where no layer has an indexer. */
static void mark_prompt(fwd *f, const kvs_batch *b, const int32_t *n_prompt)
{
    int32_t row = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        const int32_t n = n_prompt && f->h->n_index_head == 0 ? n_prompt[i] : 0;
        for (int32_t j = 0; j < b->q_len[i]; j++, row++)
            f->b.is_prompt[row] = j < n;
    }
}

/* Checks and plans; changes nothing where it fails. */
static kvs_status prepare(fwd *f, const kvs_batch *b, const int32_t *n_prompt, const int32_t *token,
                          const int32_t *logit_row, int32_t n_logit, const float *logits, kvs_error *err)
{
    const int64_t n_row = rows_of(f, b);
    if (n_row >= 0) {
        TRY(check_prompt(b, n_prompt, err));
        TRY(check_rows(f, n_row, token, logit_row, n_logit, logits, err));
    }
    TRY(dcp_plan_batch(f->d, b, err));
    f->draft_rows = -1;
    mark_prompt(f, b, n_prompt);
    return KVS_OK;
}

static kvs_status layer(fwd *f, int32_t i, int32_t reuse, kvs_error *err)
{
    const wt_layer *l = &f->w->layer[i];
    TRY(fwd_attention(f, l, i, reuse, err));
    return fwd_ffn(f, l, err);
}

/* ---- logits ---- */

/* Every rank's [n, vocab_most] of its rows of the head -> [n, vocab]. */
static void join_logits(const fwd *f, int32_t n, float *logits)
{
    const int64_t most = f->s.vocab_most;
    for (int32_t r = 0; r < f->s.tp; r++) {
        const wt_range v = wt_share(f->h->vocab, f->s.tp, r);
        for (int32_t i = 0; i < n; i++)
            memcpy(logits + (int64_t)i * f->h->vocab + v.begin,
                   f->b.head_part + ((int64_t)r * n + i) * most,
                   (size_t)(v.end - v.begin) * sizeof *logits);
    }
}

/* hidden: [.., hidden] f32 after the final norm; rounded here to what the head takes. */
static kvs_status make_logits(fwd *f, const float *hidden, const int32_t *row, int32_t n, float *logits,
                              kvs_error *err)
{
    if (n == 0)
        return KVS_OK;
    const int32_t width = f->h->hidden;
    const gemm_mat head = wt_rows(&f->w->head, f->s.vocab.begin, f->s.vocab.end);
    for (int32_t i = 0; i < n; i++) {
        const float *from = hidden + (int64_t)row[i] * width;
        if (head.type == GEMM_F32)
            fwd_cast(f, 1, width, from, width, f->b.head_f + (int64_t)i * width, width, KVS_DTYPE_F32);
        else
            fwd_cast(f, 1, width, from, width, f->b.head_b + (int64_t)i * width, width, KVS_DTYPE_BF16);
    }
    const fwd_op in = {f->b.head_b, f->b.head_f, width};
    if (f->s.tp == 1) {
        fwd_product(f, &head, n, in, logits, f->h->vocab);
        return KVS_OK;
    }
    const int64_t most = f->s.vocab_most;
    float *mine = f->b.head_part + (int64_t)f->s.rank * n * most;
    fwd_product(f, &head, n, in, mine, most);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = f->s.vocab.end - f->s.vocab.begin; j < most; j++)
            mine[i * most + j] = 0.0f;
    TRY(comm_all_gather(f->world, mine, f->b.head_part, (size_t)(n * most) * sizeof *mine, err));
    join_logits(f, n, logits);
    return KVS_OK;
}

static void norm_rows(fwd *f, const float *weight, float *to)
{
    fwd_norm(f, f->d->plan.n_row, f->h->hidden, f->b.x, f->h->hidden, weight, f->h->eps, FWD_NEED_F, NULL,
             to);
}

/* A rank that failed alone ends the group. */
static kvs_status ended(fwd *f, kvs_status st, const kvs_error *why, kvs_error *err)
{
    if (st < 0 && st != KVS_PEER)
        comm_abort(f->world, why->text);
    if (st < 0 && err)
        *err = *why;
    return st;
}

/* ---- the main model ---- */

static kvs_status run_step(fwd *f, const int32_t *token, const int32_t *logit_row, int32_t n_logit,
                           float *logits, kvs_error *err)
{
    const int32_t n = f->d->plan.n_row;
    fwd_angles(f);
    fwd_embed(f, n, token, f->b.x);
    for (int32_t i = 0; i < f->h->n_layer; i++)
        TRY(layer(f, i, 0, err));
    norm_rows(f, f->w->norm, f->b.hidden);
    TRY(make_logits(f, f->b.hidden, logit_row, n_logit, logits, err));
    return dcp_finish(f->d, NULL, err);
}

kvs_status fwd_step(fwd *f, const kvs_batch *b, const int32_t *n_prompt, const int32_t *token,
                    const int32_t *logit_row, int32_t n_logit, float *logits, kvs_error *err)
{
    TRY(prepare(f, b, n_prompt, token, logit_row, n_logit, logits, err));
    f->n_traced = 0;
    if (f->d->plan.n_row == 0)
        return KVS_OK;
    kvs_error why;
    memset(&why, 0, sizeof why);
    const kvs_status st = run_step(f, token, logit_row, n_logit, logits, &why);
    if (st >= 0)
        f->n_traced = f->d->plan.n_row;
    return ended(f, st, &why, err);
}

const float *fwd_hidden(const fwd *f)
{
    return f->b.hidden;
}

int32_t fwd_selection(const fwd *f, int32_t i_layer, int32_t row, int32_t *ids)
{
    if (!f->cfg.trace || i_layer < 0 || i_layer >= f->h->n_layer || row < 0 || row >= f->n_traced ||
        f->source_of[i_layer] < 0)
        return -1;
    const int64_t at = (int64_t)f->source_of[i_layer] * f->cfg.max_rows + row;
    memcpy(ids, f->b.trace + at * f->h->topk, (size_t)f->h->topk * sizeof *ids);
    return f->b.trace_n[at];
}

/* ---- draft layers ---- */

static kvs_status check_draft(const fwd *f, int32_t mtp, const kvs_batch *b, const float *hidden,
                              int32_t reuse, kvs_error *err)
{
    if (mtp < 0 || mtp >= f->s.n_mtp)
        return err_set(err, KVS_INVALID, "draft layer %d: this handle has %d", mtp, f->s.n_mtp);
    if (!hidden && rows_of(f, b) != 0)
        return err_set(err, KVS_INVALID, "a draft pass needs the hidden rows of its tokens");
    if (reuse != 0 && reuse != 1)
        return err_set(err, KVS_INVALID, "reuse %d: use 0 or 1", reuse);
    if (!reuse)
        return KVS_OK;
    if (f->h->n_index_head == 0)
        return err_set(err, KVS_INVALID, "reuse of a selection: %s has no indexer; use reuse 0", f->h->name);
    if (b->n_req > f->n_keep)
        return err_set(err, KVS_INVALID, "reuse for %d requests: selections of %d are kept", b->n_req,
                       f->n_keep);
    for (int32_t i = 0; i < b->n_req && b->q_len; i++) {
        if (b->q_len[i] > 1)
            return err_set(err, KVS_INVALID, "reuse with %d rows of request %d: one row each", b->q_len[i], i);
    }
    return KVS_OK;
}

/* u = eh [norm(embedding); norm(hidden)] becomes the residual stream. */
static void join_hidden(fwd *f, const wt_layer *l, const int32_t *next_token, const float *hidden)
{
    const int32_t n = f->d->plan.n_row;
    const int32_t width = f->h->hidden;
    fwd_embed(f, n, next_token, f->b.embed);
    const float *const half[2] = {f->b.embed, hidden};
    const float *const weight[2] = {l->enorm, l->hnorm};
    const int is_f32 = l->eh.type == GEMM_F32;
    for (int i = 0; i < 2; i++) {
        const norm_args a = {
            .n_row = n,
            .dim = width,
            .x = half[i],
            .x_stride = width,
            .weight = weight[i],
            .eps = f->h->eps,
            .y = is_f32 ? (void *)(f->b.pair_f + i * width) : (void *)(f->b.pair_b + i * width),
            .y_type = is_f32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
            .y_stride = 2 * (int64_t)width,
        };
        f->d->kern.norm(&a, &f->d->queue);
    }
    const fwd_op in = {f->b.pair_b, f->b.pair_f, 2 * (int64_t)width};
    fwd_product(f, &l->eh, n, in, f->b.x, width);
}

static kvs_status run_draft(fwd *f, int32_t mtp, const int32_t *next_token, const float *hidden,
                            int32_t reuse, const int32_t *logit_row, int32_t n_logit, float *logits,
                            float *g_out, kvs_error *err)
{
    const int32_t i = f->h->n_layer + mtp;
    const wt_layer *l = &f->w->layer[i];
    fwd_angles(f);
    join_hidden(f, l, next_token, hidden);
    TRY(layer(f, i, reuse, err));
    norm_rows(f, l->head_norm, f->b.x);
    if (g_out)
        memcpy(g_out, f->b.x, (size_t)f->d->plan.n_row * (size_t)f->h->hidden * sizeof *g_out);
    TRY(make_logits(f, f->b.x, logit_row, n_logit, logits, err));
    return dcp_finish(f->d, NULL, err);
}

kvs_status fwd_draft(fwd *f, int32_t mtp, const kvs_batch *b, const int32_t *n_prompt,
                     const int32_t *next_token, const float *hidden, int32_t reuse,
                     const int32_t *logit_row, int32_t n_logit, float *logits, float *g_out,
                     kvs_error *err)
{
    TRY(check_draft(f, mtp, b, hidden, reuse, err));
    TRY(prepare(f, b, n_prompt, next_token, logit_row, n_logit, logits, err));
    if (f->d->plan.n_row == 0)
        return KVS_OK;
    kvs_error why;
    memset(&why, 0, sizeof why);
    const kvs_status st = run_draft(f, mtp, next_token, hidden, reuse, logit_row, n_logit, logits, g_out,
                                    &why);
    if (st >= 0 && !reuse)
        f->draft_rows = f->d->plan.n_row;
    return ended(f, st, &why, err);
}

kvs_status fwd_draft_keep(fwd *f, const int32_t *row, int32_t n, kvs_error *err)
{
    if (f->h->n_index_head == 0)
        return err_set(err, KVS_INVALID, "no selection to keep: %s has no indexer", f->h->name);
    if (f->draft_rows < 0)
        return err_set(err, KVS_INVALID, "no selection to keep: the last call was no draft pass of reuse 0");
    if (n < 0 || n > f->cfg.max_reqs)
        return err_set(err, KVS_LIMIT, "selections of %d requests: use 0 to max_reqs %d", n,
                       f->cfg.max_reqs);
    TRY(dcp_selection_keep(f->d, row, n, f->b.keep, f->b.keep_lane, err));
    f->n_keep = n;
    return KVS_OK;
}
