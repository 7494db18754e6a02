/* engine/decode.c - drafts verified, tokens drawn and emitted. */
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "engine/loop.h"

static void fill_logprobs(const loop *l, const seq *s, const float *logits, kvs_event *e)
{
    e->n_top = s->logprobs < l->h->vocab ? s->logprobs : l->h->vocab;
    sample_logprobs(logits, l->h->vocab, e->token, e->n_top, &e->logprob, e->top_token,
                    e->top_logprob);
}

void loop_draw(loop *l, seq *s, int32_t logit, int32_t row, loop_emit *out)
{
    *out = (loop_emit){0};
    const float *logits = l->r->logits + (int64_t)logit * l->h->vocab;
    const double u = rng_uniform(s->seed, s->stream, (uint64_t)s->len);
    if (sample_token(l->sampler, &s->set, logits, s->seen, u, &out->token, &out->error) < 0) {
        err_prefix(&out->error, "position %lld", (long long)s->len);
        out->failed = true;
        return;
    }
    kvs_event e = {.kind = KVS_EVENT_TOKEN,
                   .request = s->id,
                   .token = out->token,
                   .position = s->len,
                   .row = row,
                   .logits = logits};
    seq_append(s, out->token, logits, l->h->vocab);
    e.digest = hash_get64(&s->digest);
    e.is_end = seq_is_end(s, out->token);
    if (s->logprobs > 0) {
        fill_logprobs(l, s, logits, &e);
    }
    queue_push(l->q, &e);
    l->n.n_output++;
    out->ended = e.is_end != 0 || s->len == s->limit;
    out->why = e.is_end != 0     ? KVS_FINISH_STOP
               : s->limit_is_ctx ? KVS_FINISH_CONTEXT
                                 : KVS_FINISH_LENGTH;
}

/* Emits the tokens that the rows from `base` on give to s; `logit` is its first row of logits. */
static void verify(loop *l, seq *s, int32_t logit, int32_t base)
{
    const int32_t k = s->n_draft;
    l->n.n_verify++;
    for (int32_t j = 0; j < k; j++) {
        l->n.n_draft[j]++;
    }
    loop_emit e;
    for (int32_t j = 0;; j++) {
        loop_draw(l, s, logit + j, base + j, &e);
        if (e.failed) {
            loop_fail(l, s, &e.error);
            return;
        }
        l->n.n_decode++;
        const bool accepted = j < k && e.token == s->draft[j];
        if (accepted) {
            l->n.n_accept[j]++;
        }
        if (e.ended) {
            loop_finish(l, s, e.why);
            return;
        }
        if (!accepted) {
            break;
        }
    }
    s->n_draft = 0;
    s->n_fed = s->len - 1;
}

/* Pages for the rows that drafts and verification will write; takes those out that get none. */
static int32_t make_room(loop *l, seq **list, int32_t n)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        seq *s = list[i];
        kvs_error why;
        const int32_t k = l->mtp > 0 ? seq_draft_room(s, l->mtp) : 0;
        if (loop_extend(l, s, s->n_fed + 1 + k, &why) < 0) {
            loop_fail(l, s, &why);
            continue;
        }
        list[kept++] = s;
    }
    return kept;
}

kvs_status loop_decode(loop *l, seq **list, int32_t n, kvs_error *err)
{
    n = make_room(l, list, n);
    if (n == 0) {
        return KVS_OK;
    }
    if (l->mtp > 0) {
        TRY(spec_draft(l, list, n, err));
    }
    int64_t stride = 0;
    for (int32_t i = 0; i < n; i++) {
        stride = list[i]->n_entry > stride ? list[i]->n_entry : stride;
    }
    rank_work *w = rank_begin(l->r, RANK_STEP, stride);
    for (int32_t i = 0; i < n; i++) {
        const seq *s = list[i];
        w->token[w->c.n_row] = s->token[s->len - 1];
        memcpy(w->token + w->c.n_row + 1, s->draft, (size_t)s->n_draft * sizeof *s->draft);
        for (int32_t j = 0; j <= s->n_draft; j++) {
            w->logit_row[w->c.n_logit++] = w->c.n_row + j;
        }
        loop_add(w, s, LOOP_GENERATED, 1 + s->n_draft, s->n_fed + 1 + s->n_draft, 0);
    }
    TRY(rank_send(l->r, err));
    int32_t row = 0; /* every row has logits */
    for (int32_t i = 0; i < n; i++) {
        const int32_t q_len = 1 + list[i]->n_draft;
        verify(l, list[i], row, row);
        row += q_len;
    }
    return KVS_OK;
}
