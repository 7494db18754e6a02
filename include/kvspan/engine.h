/* kvspan/engine.h - from a model folder and a prompt of token ids to an answer, token by token.
 *
 * An engine holds one model on the ranks of one TP group. The host drives it:
 *
 *     kvs_engine_open                       loads the model, starts the ranks
 *     kvs_engine_submit                     a request: prompt ids, limits, sampling; gives its number
 *     until kvs_engine_step says KVS_IDLE:
 *         kvs_engine_step                   one iteration: a chunk of a prompt, or one decode of every running
 *                                           request (1 token each, up to 1 + mtp with speculation)
 *         kvs_engine_poll                   what happened: progress, tokens, the end with its reason
 *     kvs_engine_close
 *
 * Ranks. By default the engine starts tp - 1 threads, and the caller's thread is rank 0 during kvs_engine_step.
 * With a kvs_comm of the caller's (MPI) every process opens the engine with the same settings; rank 0 does the
 * above, the others call kvs_engine_follow, which returns when rank 0 closes. Rank 0 decides and broadcasts each
 * step's plan. A failure on any rank ends the engine with its message; nothing hangs, and only close may follow.
 *
 * Same bits. Logits, tokens and digests are equal for dcp 1, 2, 4, 8 (same tp, interleave, formats, kernels, with
 * exchange a2a), for any chunk, thread count and company of other requests, and with and without speculation.
 * That holds for sampled requests too: the random number of a token is a function of (seed, stream, position).
 *
 * Speculation (mtp 1..7): the checkpoint's draft layer proposes tokens greedily, the model verifies them in one
 * step. A draft is accepted when it is the token that the request's own sampling draws from the model's
 * distribution at that position; so a draft x is accepted with probability p(x), a rejection leaves the
 * distribution p without x, normalised, which is the exact rule for a draft distribution that is all on x. Where a
 * checkpoint has several draft layers the first one makes every draft.
 *
 * Reuse. The cache of a request that has ended, cancelled ones included, stays until its place among max_seqs is
 * needed. A request whose prompt begins with the same tokens as one that runs or was kept shares those pages and
 * reads only the rest: what is shared is rounded down to 512 positions for every dcp and leaves at least the last
 * token of the prompt, with mtp the last one in common too. Tokens are compared, never hashes, and answers and
 * digests are those of a prompt read whole. In a model without an indexer the answer's part of a kept sequence is
 * read again, because dense layers read prompts by another path than answers. A place is taken first from a kept
 * sequence that the request carries on, then from what is free, then from the kept sequence that was unused for
 * longest. no_reuse turns all this off.
 *
 * Not done: taking a running request's pages away for another one (the pool has room for max_seqs sequences of
 * ctx tokens); a decode step and a prompt chunk in one iteration (they alternate). None of these can be asked for.
 */
#ifndef KVSPAN_ENGINE_H
#define KVSPAN_ENGINE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "kvspan/comm.h"
#include "kvspan/config.h"
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct kvs_engine kvs_engine;

enum {
    KVS_MAX_DRAFTS = 7,    /* drafts of one step                                                     */
    KVS_MAX_LOGPROBS = 20, /* alternatives of one token                                              */
    KVS_MAX_STOP_IDS = 16, /* of one request                                                         */
    KVS_MAX_SEQS = 64,     /* requests that run at once                                              */
    KVS_MAX_WAITING = 1024 /* requests that wait                                                     */
};

/* Zero is the default of every field but model_dir. */
typedef struct kvs_engine_config {
    size_t struct_size;
    const char *model_dir;     /* config.json and safetensors files                                  */
    int32_t tp;                /* ranks that share heads and experts; default: dcp, or the comm's size */
    int32_t dcp;               /* ranks that share the cache by position: 1, 2, 4, 8; default 1      */
    int32_t interleave;        /* 1, 2, 4, ... 64; default 1                                         */
    int32_t ep;                /* ranks the experts are spread over, divides tp; default tp          */
    int32_t threads;           /* workers of each rank; default: cores / ranks, at least 1           */
    kvs_kv_format kv;          /* default: fp8_ds_mla where the model has an indexer, else bf16      */
    kvs_index_format index_kv; /* default: f32 with f32 rows, else fp8                               */
    kvs_scale_rule scale_rule; /* default pow2                                                       */
    kvs_exchange exchange;     /* default a2a                                                        */
    int32_t hadamard;          /* 1: index vectors are rotated                                       */
    float latent_eps;          /* of the latent norms; default: the config's                         */
    int64_t ctx;               /* longest sequence, prompt and answer; default: the model's limit    */
    int32_t chunk;             /* prompt tokens of one step; default 2048                            */
    int32_t mtp;               /* drafts per step, 0..7; default 0                                   */
    int32_t max_seqs;          /* requests that run at once, 1..64; default 1                        */
    int32_t trace;             /* 1: kvs_engine_selection works                                      */
    int32_t no_reuse;          /* 1: caches of ended requests are dropped, every prompt is read whole */
    int32_t selection_last;    /* 1: an experiment: every selection is replaced by the last positions */
    int32_t timeout_ms;        /* a collective waits this long for a rank; default 30000; threads    */
    const char *cpu;           /* cap of the kernels: "ref", "avx2", ...; NULL: KVS_CPU, else best   */
    const char *kernels;       /* "op=variant,..."; NULL: none                                       */
    kvs_comm *comm;            /* the caller's rank, kept until close; NULL: threads                 */
} kvs_engine_config;

static inline kvs_engine_config kvs_engine_config_default(void)
{
    kvs_engine_config c;
    memset(&c, 0, sizeof(c));
    c.struct_size = sizeof(c);
    return c;
}

/* Loads the model and starts the ranks; collective with a comm. Settings that do not go together are refused
 * here with the field, its value and the nearest that works (KVS_INVALID; KVS_UNSUPPORTED where the model is what
 * the library cannot run; KVS_IO and KVS_FORMAT for its files). On failure *out is NULL. model_dir and the
 * other texts are read until the call returns. Threads: any, one at a time. */
kvs_status kvs_engine_open(kvs_engine **out, const kvs_engine_config *cfg, kvs_error *err);

/* Ends the ranks and frees everything; unfinished requests are dropped. NULL is fine. With a comm: rank 0's
 * close ends the others' kvs_engine_follow; they then close theirs. Threads: step thread only. */
void kvs_engine_close(kvs_engine *e);

/* On a rank other than 0 of a comm: takes part until rank 0 closes (KVS_OK) or a rank fails. KVS_INVALID on
 * rank 0. Threads: one at a time. */
kvs_status kvs_engine_follow(kvs_engine *e, kvs_error *err);

/* ------------------------------------------------------------------------------------------------------
 * Requests.
 */

/* Zero is the default of every field but the prompt. The order of the filters: repeat_penalty, temp, top_k,
 * top_p, min_p, each on what the former left. Ties: the lower id first. */
typedef struct kvs_request {
    size_t struct_size;
    const int32_t *prompt;  /* [n_prompt] ids below the vocabulary's size; copied                     */
    int64_t n_prompt;       /* at least 1, less than ctx                                              */
    int64_t max_new;        /* new tokens at most; default: until the model stops or ctx is reached   */
    double temp;            /* >= 0; 0: greedy, the largest logit                                     */
    int32_t top_k;          /* keep the k largest; 0, and any number from the vocabulary's size on: all */
    double top_p;           /* keep the fewest whose probabilities reach it; 0 or 1: all              */
    double min_p;           /* keep those of at least this share of the largest probability; 0: all   */
    double repeat_penalty;  /* > 0: logits of tokens that occurred, prompt included, are divided by it where
                               positive and multiplied where negative; 0 or 1: none                   */
    uint64_t seed, stream;  /* equal pairs draw equal numbers; give answers to one prompt streams 0, 1, ... */
    int32_t ignore_eos;     /* 1: the model's own end tokens do not end the answer                    */
    int32_t n_stop;         /* ids that end the answer too, 0..16                                     */
    const int32_t *stop;    /* [n_stop]; copied                                                       */
    int32_t logprobs;       /* 1..20: log-probabilities of the token and of that many best ones       */
} kvs_request;

static inline kvs_request kvs_request_default(void)
{
    kvs_request r;
    memset(&r, 0, sizeof(r));
    r.struct_size = sizeof(r);
    return r;
}

/* Queues a request; *id is its number, from 1 upwards. KVS_INVALID names the field; KVS_LIMIT: the prompt leaves
 * no room for an answer below ctx (both numbers are named); KVS_BUSY: too many wait. Threads: any. */
kvs_status kvs_engine_submit(kvs_engine *e, const kvs_request *r, uint64_t *id, kvs_error *err);

/* The request ends with reason "interrupted" at the next step; what it has read is kept as that of others. One that
 * has ended or never was is left alone. Threads: any. */
void kvs_engine_cancel(kvs_engine *e, uint64_t id);

/* One iteration. KVS_IDLE when nothing is left to do; KVS_BUSY when events must be polled first. A failure ends
 * the engine; requests whose logits are no numbers fail alone (an event) and the engine lives on.
 * Threads: step thread only; the same one that closes. */
kvs_status kvs_engine_step(kvs_engine *e, kvs_error *err);

typedef enum kvs_event_kind {
    KVS_EVENT_PREFILL = 1, /* `done` of `total` prompt tokens are in the cache, `reused` unread       */
    KVS_EVENT_TOKEN = 2,   /* a token of the answer                                                   */
    KVS_EVENT_FINISH = 3,  /* the last event of a request: reason                                     */
    KVS_EVENT_ERROR = 4    /* the last event of a request that failed: error                          */
} kvs_event_kind;

typedef enum kvs_finish {
    KVS_FINISH_STOP = 1,       /* an end token of the model or a stop id, which is the last TOKEN     */
    KVS_FINISH_LENGTH = 2,     /* max_new                                                             */
    KVS_FINISH_CONTEXT = 3,    /* ctx                                                                 */
    KVS_FINISH_INTERRUPTED = 4 /* kvs_engine_cancel                                                   */
} kvs_finish;

typedef struct kvs_event {
    kvs_event_kind kind;
    kvs_finish reason;    /* FINISH                                                                   */
    uint64_t request;
    int64_t done, total;  /* PREFILL                                                                  */
    int64_t reused;       /* PREFILL: of done, positions shared with another sequence; final once done is
                             larger                                                                   */
    int32_t token;        /* TOKEN                                                                    */
    int32_t is_end;       /* TOKEN: 1: an end token or stop id; its text is not part of the answer    */
    int64_t position;     /* TOKEN: in the sequence; the prompt's first token is 0                    */
    uint64_t digest;      /* TOKEN: XXH3-64 of the f32 little-endian logits of the answer's tokens up to here */
    double logprob;       /* TOKEN, with logprobs: natural log, of the model's distribution before filters */
    int32_t n_top;        /* TOKEN, with logprobs: alternatives, the best first                       */
    int32_t row;          /* TOKEN: for kvs_engine_selection                                          */
    int32_t top_token[KVS_MAX_LOGPROBS];
    double top_logprob[KVS_MAX_LOGPROBS];
    const float *logits;  /* TOKEN: [vocab] before filters, until the next step; else NULL            */
    kvs_error error;      /* ERROR                                                                    */
} kvs_event;

/* Moves up to cap events, oldest first; returns their number. Threads: any, one at a time. */
int32_t kvs_engine_poll(kvs_engine *e, kvs_event *events, int32_t cap);

/* "stop", "length", "context", "interrupted"; "?" outside the list. Threads: any. */
const char *kvs_finish_name(kvs_finish reason);

/* With trace: the positions that the row behind a TOKEN event of the last step attended in `layer`, ascending:
 * ids [cap]; returns how many there are, -1 where nothing was traced (a dense layer, a row or layer out of
 * range). Threads: step thread only. */
int32_t kvs_engine_selection(const kvs_engine *e, int32_t layer, int32_t row, int32_t *ids, int32_t cap);

/* ------------------------------------------------------------------------------------------------------
 * What the engine is and has done.
 */

typedef struct kvs_engine_stats {
    size_t struct_size;
    char model[64], transport[16], kernels[512]; /* kernels: "op=variant,..."                          */
    int32_t tp, dcp, interleave, ep, threads, rank, chunk, mtp, max_seqs;
    int64_t ctx;
    kvs_kv_format kv;
    kvs_index_format index_kv;
    kvs_exchange exchange;
    int32_t vocab, n_layer, topk; /* topk 0: no indexer                                               */
    char chat[16];                /* the form of its prompts, a name of kvs_chat_family_find; "none"  */
    int32_t n_eos, eos[8];
    double load_s;

    /* Bytes of one rank; caches are the same on every rank. Pages are memory once they are taken; cache_*: of those taken
     * at the peak; pool: of all, which is address space only. */
    int64_t cache_latent, cache_index, cache_draft, pool;
    int64_t workspace;    /* all that a step works in; of this rank: others differ where widths do    */
    int64_t weights;      /* stored tensors in use and what was made of them, once per process        */
    int64_t n_page, n_page_peak;

    /* Since open. */
    double prefill_s, decode_s;
    uint64_t n_prefill;   /* prompt tokens read                                                       */
    uint64_t n_reused;    /* prompt tokens not read, since another sequence's rows were there         */
    uint64_t n_output;    /* tokens emitted, those of prefill steps included                          */
    uint64_t n_decode;    /* tokens emitted by decode steps                                           */
    uint64_t n_verify;    /* request-steps of decode: n_decode / n_verify tokens a step               */
    uint64_t n_draft[KVS_MAX_DRAFTS];  /* drafts proposed as the i-th of their step                   */
    uint64_t n_accept[KVS_MAX_DRAFTS]; /* of these, accepted                                          */
} kvs_engine_stats;

static inline kvs_engine_stats kvs_engine_stats_empty(void)
{
    kvs_engine_stats s;
    memset(&s, 0, sizeof(s));
    s.struct_size = sizeof(s);
    return s;
}

/* Fills *out, whose struct_size is set. Threads: step thread only. */
void kvs_engine_get_stats(const kvs_engine *e, kvs_engine_stats *out);

/* ------------------------------------------------------------------------------------------------------
 * Stop texts: cuts an answer's text at the first occurrence of any of them, across the borders of its pieces.
 * Text is held back while it may still become one.
 */

typedef struct kvs_stop kvs_stop;

enum { KVS_MAX_STOP_TEXTS = 16, KVS_MAX_STOP_BYTES = 4096 };

/* texts: [n], 0 <= n <= 16, copied; each of 1..4096 bytes. Threads: any. */
kvs_status kvs_stop_new(kvs_stop **out, const char *const *texts, int32_t n, kvs_error *err);
void kvs_stop_free(kvs_stop *s);

/* Takes the next n bytes. *show, *n_show: what may be shown now, until the next call. Returns 1 when a stop text
 * is complete: what was shown is all that comes before it, and later calls show nothing and return 1. Of several
 * that end at one byte the longest counts. KVS_NOMEM: nothing was taken. Threads: one at a time. */
int kvs_stop_feed(kvs_stop *s, const char *bytes, size_t n, const char **show, size_t *n_show);
/* The answer has ended: what is still held back. Threads: one at a time. */
void kvs_stop_flush(kvs_stop *s, const char **show, size_t *n_show);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
