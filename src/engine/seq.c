/* engine/seq.c - requests checked and kept. */
#include "engine/seq.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "kv/table.h"
#include "shard/shard.h"

static kvs_status refuse_real(const char *field, double v, const char *range, kvs_error *err)
{
    return err_set(err, KVS_INVALID, "%s %g: use %s", field, v, range);
}

static kvs_status check_sampling(const kvs_request *r, kvs_error *err)
{
    if (!(r->temp >= 0.0) || isinf(r->temp)) {
        return refuse_real("temp", r->temp, "0 (greedy) or a positive number", err);
    }
    if (!(r->top_p >= 0.0 && r->top_p <= 1.0)) {
        return refuse_real("top-p", r->top_p, "more than 0 and at most 1", err);
    }
    if (!(r->min_p >= 0.0 && r->min_p <= 1.0)) {
        return refuse_real("min-p", r->min_p, "0 to 1", err);
    }
    if (!(r->repeat_penalty >= 0.0) || isinf(r->repeat_penalty)) {
        return refuse_real("repeat-penalty", r->repeat_penalty, "a positive number; 1 is none",
                           err);
    }
    if (r->top_k < 0) {
        return err_set(err, KVS_INVALID, "top-k %d: use 0 (all) or more", r->top_k);
    }
    if (r->logprobs < 0 || r->logprobs > KVS_MAX_LOGPROBS) {
        return err_set(err, KVS_INVALID, "logprobs %d: use 0 to %d", r->logprobs, KVS_MAX_LOGPROBS);
    }
    return KVS_OK;
}

static kvs_status check_ids(const int32_t *id, int64_t n, int32_t vocab, const char *what,
                            kvs_error *err)
{
    for (int64_t i = 0; i < n; i++) {
        if (id[i] < 0 || id[i] >= vocab) {
            return err_set(err, KVS_INVALID,
                           "%s %" PRId64 " is %d: the vocabulary's ids are 0 to %d", what, i, id[i],
                           vocab - 1);
        }
    }
    return KVS_OK;
}

static kvs_status check(const kvs_request *r, const hp *h, int64_t ctx, kvs_error *err)
{
    if (r->n_prompt < 1 || r->prompt == NULL) {
        return err_set(err, KVS_INVALID, "the prompt is empty: give at least one token");
    }
    if (r->n_prompt >= ctx) {
        return err_set(err, KVS_LIMIT,
                       "the prompt has %" PRId64 " tokens and the context limit is %" PRId64
                       ": an answer needs room for at least one more token",
                       r->n_prompt, ctx);
    }
    if (r->max_new < 0) {
        return err_set(err, KVS_INVALID, "max_new %" PRId64 ": use 0 (no limit) or more",
                       r->max_new);
    }
    if (r->n_stop < 0 || r->n_stop > KVS_MAX_STOP_IDS || (r->n_stop > 0 && r->stop == NULL)) {
        return err_set(err, KVS_INVALID, "n_stop %d: give 0 to %d ids", r->n_stop,
                       KVS_MAX_STOP_IDS);
    }
    TRY(check_sampling(r, err));
    TRY(check_ids(r->stop, r->n_stop, h->vocab, "stop id", err));
    return check_ids(r->prompt, r->n_prompt, h->vocab, "prompt token", err);
}

static void set_ends(seq *s, const kvs_request *r, const hp *h)
{
    for (int32_t i = 0; i < h->n_eos && r->ignore_eos == 0; i++) {
        s->end[s->n_end++] = h->eos[i];
    }
    for (int32_t i = 0; i < r->n_stop; i++) {
        s->end[s->n_end++] = r->stop[i];
    }
}

static void mark(seq *s, int32_t token)
{
    if (s->seen != NULL) {
        s->seen[token / 64] |= UINT64_C(1) << (token % 64);
    }
}

kvs_status seq_new(seq **out, const kvs_request *r, const hp *h, int64_t ctx, int32_t dcp,
                   kvs_error *err)
{
    *out = NULL;
    TRY(check(r, h, ctx, err));
    seq *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a request");
    }
    s->n_prompt = r->n_prompt;
    s->len = r->n_prompt;
    s->limit_is_ctx = r->max_new == 0 || r->max_new > ctx - r->n_prompt;
    s->limit = s->limit_is_ctx ? ctx : r->n_prompt + r->max_new;
    s->set = (sample_set){.temp = r->temp,
                          .top_k = r->top_k,
                          .top_p = r->top_p == 0.0 ? 1.0 : r->top_p,
                          .min_p = r->min_p,
                          .repeat_penalty = r->repeat_penalty == 0.0 ? 1.0 : r->repeat_penalty};
    s->seed = r->seed;
    s->stream = r->stream;
    s->logprobs = r->logprobs;
    set_ends(s, r, h);
    hash_init64(&s->digest);
    const bool seen = s->set.repeat_penalty != 1.0;
    s->width = shard_table_width((shard_geom){.n = dcp, .i = 1, .rank = 0}, s->limit);
    s->token = mem_alloc_array((size_t)s->limit, sizeof *s->token, 0);
    s->table = mem_alloc_array((size_t)s->width, sizeof *s->table, 0);
    s->seen = seen ? mem_calloc((size_t)h->vocab / 64 + 1, sizeof *s->seen) : NULL;
    if (s->token == NULL || s->table == NULL || (seen && s->seen == NULL)) {
        const int64_t limit = s->limit;
        seq_free(s);
        return err_set(err, KVS_NOMEM, "no memory for a request of %" PRId64 " tokens", limit);
    }
    memcpy(s->token, r->prompt, (size_t)r->n_prompt * sizeof *s->token);
    for (int64_t i = 0; i < r->n_prompt; i++) {
        mark(s, r->prompt[i]);
    }
    *out = s;
    return KVS_OK;
}

void seq_free(seq *s)
{
    if (s != NULL) {
        mem_free(s->token);
        mem_free(s->table);
        mem_free(s->seen);
        mem_free(s);
    }
}

void seq_append(seq *s, int32_t token, const float *logits, int32_t vocab)
{
    s->token[s->len++] = token;
    mark(s, token);
    hash_add64(&s->digest, logits, (size_t)vocab * sizeof *logits);
}

bool seq_is_end(const seq *s, int32_t token)
{
    for (int32_t i = 0; i < s->n_end; i++) {
        if (s->end[i] == token) {
            return true;
        }
    }
    return false;
}

int32_t seq_draft_room(const seq *s, int32_t k)
{
    const int64_t room = s->limit - s->len - 1;
    return room < 0 ? 0 : room < k ? (int32_t)room : k;
}
