/* engine/seq.h - one request from its submission to its last event.
 *
 *     seq_new ----> WAITING ----> PREFILL ----> DECODE ----> gone
 *                      |  a place   |  the prompt's   |  end token, limit
 *                      |  is free   |  last chunk     |
 *                      +------------+--------+--------+
 *                                            v
 *                             cancel, or a failure of its own: gone
 *
 * One that ended without a failure may stay behind for its rows (keep.c); then nothing else of it counts.
 *
 * Lengths, in tokens. The sequence is prompt then answer; token[p] stands at position p.
 *   n_prompt <= len <= limit   known tokens; limit: where the answer must end
 *   n_fed                      rows in the main model's caches. PREFILL: n_fed <= n_prompt = len.
 *                              DECODE: n_fed = len - 1, the last token has not been fed
 *   n_drafted <= n_fed         rows in the draft layer's caches that come from true hidden rows. The pair of
 *                              position p is (hidden row of p, token at p + 1), so at most len - 1
 *   n_reused <= n_fed          rows that were another sequence's, whose pages the first entries of table share
 *   table[0 .. n_entry)        pages, the same ids on every rank
 * Rows that rejected drafts left in the caches lie at or past n_fed (n_drafted) and are written again before any
 * row attends them.
 */
#ifndef ENGINE_SEQ_H
#define ENGINE_SEQ_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hash.h"
#include "engine/sample.h"
#include "kvspan/engine.h"
#include "model/hp.h"

typedef enum seq_state { SEQ_WAITING, SEQ_PREFILL, SEQ_DECODE } seq_state;

typedef struct seq {
    hash_state digest; /* of the answer's logits */
    struct seq *next;  /* in the queue */
    seq_state state;
    bool cancelled;
    uint64_t id;
    int32_t slot;  /* place among the running ones */
    uint64_t used; /* running or kept: when its rows were last taken over; larger is later */

    sample_set set;
    uint64_t seed, stream;
    int32_t logprobs;
    int32_t n_end, end[HP_MAX_EOS + KVS_MAX_STOP_IDS];

    int64_t n_prompt, len, limit, n_fed, n_drafted, n_reused;
    bool limit_is_ctx;
    int32_t *token; /* [limit] */
    int32_t *table; /* [width] */
    int64_t width, n_entry;
    int32_t n_draft, draft[KVS_MAX_DRAFTS]; /* of the coming verification */
    uint64_t *seen;                         /* bits of tokens that occurred; NULL without a penalty */
} seq;

/* Checks a request against the model and the context limit and copies it. */
kvs_status seq_new(seq **out, const kvs_request *r, const hp *h, int64_t ctx, int32_t dcp, kvs_error *err);
void seq_free(seq *s);

/* Appends a token; `logits` [vocab] is the row it was drawn from. */
void seq_append(seq *s, int32_t token, const float *logits, int32_t vocab);
/* Whether a token ends the answer. */
bool seq_is_end(const seq *s, int32_t token);
/* Drafts that the next verification may hold, at most k: the answer may not pass its limit. */
int32_t seq_draft_room(const seq *s, int32_t k);

#endif
