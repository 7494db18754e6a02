/* engine/rank.h - what every rank of the engine does: takes rank 0's commands and runs them on its forward pass.
 *
 * Rank 0 builds a command (rank_cmd and its arrays), rank_send broadcasts and runs it; the others sit in
 * rank_follow. So every rank makes the same forward calls with the same arguments, and what ranks must agree on
 * is decided in one place. A command carries requests, tokens and tables; hidden rows never travel: each rank
 * has them, from its own forward pass.
 *
 * Hidden rows, per rank:
 *   main   the rows of the last main step, in the forward handle
 *   pend   [max_reqs][RANK_PEND_ROWS]: rows of a slot's last main step whose draft pass is still to come. A main
 *          step stores the rows from keep_from on of each of its requests, the first at entry 0.
 *   chain  g_out of the last draft pass that asked for it
 *
 * Invariants: (1) nothing is allocated between rank_open and rank_close; (2) a failure ends the group with its
 * text (comm_abort), so that no rank waits for one that has failed; (3) waiting for the next command has no time
 * limit, everything else has the comm's.
 */
#ifndef ENGINE_RANK_H
#define ENGINE_RANK_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"
#include "kvspan/engine.h"
#include "model/fwd.h"

enum { RANK_PEND_ROWS = KVS_MAX_DRAFTS + 1 };

typedef struct rank_limits {
    int32_t max_reqs, max_rows, max_logits;
    int64_t width;   /* block-table entries of one request                                        */
    int32_t mtp;
    int32_t timeout_ms;
} rank_limits;

typedef enum rank_op { RANK_STEP = 1, RANK_DRAFT = 2, RANK_END = 3 } rank_op;
typedef enum rank_source { RANK_MAIN = 1, RANK_PEND = 2, RANK_CHAIN = 3 } rank_source;

/* Travels as it is, then the arrays. */
typedef struct rank_cmd {
    int32_t op;
    int32_t n_req, n_row, n_logit;
    int64_t stride;   /* of table                                                                  */
    int32_t source;   /* DRAFT: where hidden rows come from                                        */
    int32_t reuse;    /* DRAFT: rows attend the kept selection                                     */
    int32_t keep;     /* DRAFT: keep the selection of each request's last row                      */
    int32_t chain;    /* DRAFT: g_out is wanted                                                    */
} rank_cmd;

/* A command being built or received: the arrays lie in one block, with room for the limits. */
typedef struct rank_work {
    rank_cmd c;
    int64_t *seq_len;   /* [n_req]                                                                 */
    int32_t *q_len;     /* [n_req]                                                                 */
    int32_t *n_prompt;  /* [n_req] rows, from the first, that belong to the prompt                 */
    int32_t *slot;      /* [n_req] STEP, and DRAFT from pend: the request's place in pend          */
    int32_t *from;      /* [n_req] STEP: first row to keep in pend, q_len: none. DRAFT: the request's
                           first row of main or chain                                              */
    int32_t *token;     /* [n_row]                                                                 */
    int32_t *logit_row; /* [n_logit]                                                               */
    int32_t *table;     /* [n_req, stride]                                                         */
} rank_work;

typedef struct rank {
    comm *world;
    fwd *f;
    rank_limits lim;
    int32_t hidden, vocab;
    int64_t n_page;
    rank_work w;
    unsigned char *block; /* the arrays of w, then room to pack them                               */
    unsigned char *pack;
    float *logits;       /* [max_logits, vocab] of the last main step                              */
    float *draft_logits; /* [max_reqs, vocab] of the last draft pass; NULL without mtp             */
    float *pend, *hid, *chain;
    int32_t *keep_row;   /* [max_reqs]                                                             */
} rank;

/* Bytes of a rank's own buffers, those of the forward pass not counted. */
int64_t rank_bytes(const rank_limits *lim, int32_t hidden, int32_t vocab);

/* Opens the forward pass and makes every buffer. Collective over world, which stays the caller's. On failure *r
 * needs no close, and the group has ended or will. */
kvs_status rank_open(rank *r, const wt *w, const fwd_config *cfg, const rank_limits *lim, comm *world,
                     kvs_error *err);
void rank_close(rank *r);

/* An empty command to fill; `stride` entries of table per request. */
rank_work *rank_begin(rank *r, rank_op op, int64_t stride);

/* Rank 0: sends what rank_begin returned to all, and runs it. */
kvs_status rank_send(rank *r, kvs_error *err);
/* Rank 0: lets the others' rank_follow return. */
kvs_status rank_send_end(rank *r, kvs_error *err);
/* The others: runs commands until the end (KVS_OK) or a failure. */
kvs_status rank_follow(rank *r, kvs_error *err);

#endif
