/* engine/spec.c - passes of the draft layer; loop.h draws which rows they hold. */
#include <string.h>

#include "base/err.h"
#include "engine/loop.h"

/* ---- prompts --------------------------------------------------------------------------------- */

kvs_status spec_prefill(loop *l, seq *s, int32_t n, kvs_error *err)
{
    rank_work *w = rank_begin(l->r, RANK_DRAFT, s->n_entry);
    w->c.source = RANK_MAIN;
    memcpy(w->token, s->token + s->n_fed + 1, (size_t)n * sizeof *w->token);
    loop_add(w, s, LOOP_PROMPT, n, s->n_fed + n, 0);
    TRY(rank_send(l->r, err));
    s->n_drafted = s->n_fed + n;
    return KVS_OK;
}

/* ---- drafts ---------------------------------------------------------------------------------- */

/* More drafts first; equal ones stay in order. So the requests of a later pass are the first ones of
 * an earlier pass, and request i keeps its number. */
static void order(const loop *l, seq **list, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        seq *s = list[i];
        const int32_t k = seq_draft_room(s, l->mtp);
        int32_t at = i;
        for (; at > 0 && seq_draft_room(list[at - 1], l->mtp) < k; at--) {
            list[at] = list[at - 1];
        }
        list[at] = s;
    }
}

/* How many of the ordered list take more than j drafts. */
static int32_t n_beyond(const loop *l, seq *const *list, int32_t n, int32_t j)
{
    int32_t m = 0;
    while (m < n && seq_draft_room(list[m], l->mtp) > j) {
        m++;
    }
    return m;
}

static int64_t widest(seq *const *list, int32_t n)
{
    int64_t w = 0;
    for (int32_t i = 0; i < n; i++) {
        w = list[i]->n_entry > w ? list[i]->n_entry : w;
    }
    return w;
}

/* The rows that wait, with the tokens that followed them. */
static void add_true_rows(rank_work *w, const seq *s)
{
    const int32_t n = (int32_t)(s->n_fed - s->n_drafted);
    memcpy(w->token + w->c.n_row, s->token + s->n_drafted + 1, (size_t)n * sizeof *w->token);
    loop_add(w, s, LOOP_GENERATED, n, s->n_fed, 0);
    w->logit_row[w->c.n_logit++] = w->c.n_row - 1;
}

static void take_drafts(const loop *l, seq **list, int32_t n, int32_t j)
{
    for (int32_t i = 0; i < n; i++) {
        const float *logits = l->r->draft_logits + (int64_t)i * l->h->vocab;
        list[i]->draft[j] = sample_argmax(logits, l->h->vocab);
        list[i]->n_draft = j + 1;
    }
}

kvs_status spec_draft(loop *l, seq **list, int32_t n, kvs_error *err)
{
    order(l, list, n);
    int32_t m = n_beyond(l, list, n, 0);
    if (m == 0) {
        return KVS_OK;
    }
    const int64_t stride = widest(list, m);
    const bool share = l->h->index_share_mtp;
    int32_t next = n_beyond(l, list, m, 1);
    rank_work *w = rank_begin(l->r, RANK_DRAFT, stride);
    w->c.source = RANK_PEND;
    w->c.keep = share && next > 0;
    w->c.chain = next > 0;
    int32_t g_row[KVS_MAX_SEQS]; /* of the pass before: each request's last row */
    for (int32_t i = 0; i < m; i++) {
        add_true_rows(w, list[i]);
        g_row[i] = w->c.n_row - 1;
    }
    TRY(rank_send(l->r, err));
    take_drafts(l, list, m, 0);
    for (int32_t i = 0; i < m; i++) {
        list[i]->n_drafted = list[i]->n_fed;
    }
    for (int32_t j = 1; next > 0; j++) {
        m = next;
        next = n_beyond(l, list, m, j + 1);
        w = rank_begin(l->r, RANK_DRAFT, stride);
        w->c.source = RANK_CHAIN;
        w->c.reuse = share;
        w->c.chain = next > 0;
        for (int32_t i = 0; i < m; i++) {
            w->token[i] = list[i]->draft[j - 1];
            w->logit_row[w->c.n_logit++] = i;
            loop_add(w, list[i], LOOP_GENERATED, 1, list[i]->n_fed + j, g_row[i]);
            g_row[i] = i;
        }
        TRY(rank_send(l->r, err));
        take_drafts(l, list, m, j);
    }
    return KVS_OK;
}
