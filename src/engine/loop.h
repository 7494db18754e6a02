/* engine/loop.h - the iterations of an engine on rank 0: which requests run, what each step brings them.
 *
 * loop_step does one of: a chunk of the oldest unread prompt; one decode of every request that has read its
 * prompt. They alternate when both wait. Files: loop.c admits, reads prompts, ends requests; decode.c verifies and
 * emits; spec.c drafts; keep.c keeps what ended and finds prefixes.
 *
 * One decode of request s with drafts d[0 .. k) (k may be 0):
 *
 *     position          n_fed      n_fed+1  ...  n_fed+k          rows of one main step
 *     fed               t[len-1]   d[0]     ...  d[k-1]
 *     logits draw       x[0]       x[1]     ...  x[k]             x[j] counts while x[i] == d[i] for i < j
 *
 * x[0 .. e) are emitted, e the first mismatch included, or up to the end token or limit; then len += e and
 * n_fed = len - 1, and the hidden rows of positions n_fed - e .. n_fed - 1 wait in the rank's pend entry.
 *
 * Drafts for the next verification, made just before it (spec.c):
 *     pass 0   positions n_drafted .. n_fed - 1, true hidden rows, true next tokens: the draft caches now hold
 *              what they would without speculation; its last row gives d[0]
 *     pass j   position n_fed - 1 + j, hidden row g of pass j - 1, next token d[j-1]; gives d[j]. With
 *              index_share_mtp the rows attend the selection of pass 0's last row.
 * While a prompt is read each chunk runs a pass 0 over its rows whose next token is known: all but the prompt's
 * last one, which waits in pend for the token it gives. Rows of these chunks are prompt rows to the forward pass
 * (fwd.h), in the main model and in drafts; all others are generated ones.
 */
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/queue.h"
#include "engine/rank.h"
#include "kv/table.h"

typedef struct loop_counts {
    int64_t prefill_ns, decode_ns, page_peak;
    uint64_t n_prefill, n_reused, n_output, n_decode, n_verify;
    uint64_t n_draft[KVS_MAX_DRAFTS], n_accept[KVS_MAX_DRAFTS];
} loop_counts;

typedef struct loop {
    rank *r;
    const hp *h;
    queue *q;
    kvs_pages *pages;
    sampler *sampler;
    int32_t dcp, chunk, mtp, max_seqs;
    int64_t n_page;
    seq *run[KVS_MAX_SEQS]; /* by slot; changed by the step thread under the queue's lock */
    seq *kept[KVS_MAX_SEQS]; /* by slot; step thread only */
    uint64_t clock;          /* of seq.used */
    bool no_reuse;           /* nothing is kept */
    bool keep_prompt;        /* rows of an answer are not reused as those of a prompt */
    bool decoded_last;
    kvs_status dead; /* < 0: the engine has ended, with death */
    kvs_error death;
    loop_counts n;
} loop;

/* Events that one iteration may make. */
int32_t loop_max_events(int32_t max_seqs);

kvs_status loop_step(loop *l, kvs_error *err);
/* Drops what runs, without events, and what is kept. */
void loop_drop(loop *l);

/* ---- shared by the files of the loop ---------------------------------------------------------- */

/* Pages for the first new_len tokens. */
kvs_status loop_extend(loop *l, seq *s, int64_t new_len, kvs_error *err);
/* The last event of a request, which is gone or kept (finish), gone (fail). */
void loop_finish(loop *l, seq *s, kvs_finish why);
void loop_fail(loop *l, seq *s, const kvs_error *why);

/* Whether drafts are made for a request: there is room for one after the first token. */
bool loop_drafts(const loop *l, const seq *s);

/* Adds request i of n to a command: its table and lengths. Rows are of the prompt, or generated ones. */
typedef enum loop_rows { LOOP_GENERATED = 0, LOOP_PROMPT = 1 } loop_rows;
void loop_add(rank_work *w, const seq *s, loop_rows rows, int32_t q_len, int64_t seq_len, int32_t from);

/* Draws the token after logits row `row` of the last main step and emits it. *ended: the request is over, and
 * *done is its reason, or it failed and is gone (0). */
typedef struct loop_emit {
    int32_t token;
    bool ended, failed;
    kvs_finish why;
    kvs_error error;
} loop_emit;
void loop_draw(loop *l, seq *s, int32_t logit, int32_t row, loop_emit *out);

/* One decode of list[0 .. n), whose drafts are made first (decode.c). */
kvs_status loop_decode(loop *l, seq **list, int32_t n, kvs_error *err);
/* Drafts for list[0 .. n), which comes out ordered by falling number of drafts (spec.c). */
kvs_status spec_draft(loop *l, seq **list, int32_t n, kvs_error *err);
/* Pass 0 over rows [0, n) of the main step just made for s (a chunk of its prompt). */
kvs_status spec_prefill(loop *l, seq *s, int32_t n, kvs_error *err);

/* ---- kept sequences (keep.c) ------------------------------------------------------------------- */

/* A place for a request that begins, which takes over what prefix it can and displaces the sequence kept longest
 * where no place is free. Fewer than max_seqs run. */
int32_t keep_place(loop *l, seq *s);
/* Looks once more, before the first row of s is read: another one may have read its prefix meanwhile. */
void keep_share(loop *l, seq *s);
/* Keeps a request that has ended, in its slot, where no request runs; false: there is nothing to keep. */
bool keep_take(loop *l, seq *s);
/* Drops the sequence unused for longest; false: none is kept. */
bool keep_evict(loop *l);
void keep_drop(loop *l);

#endif
