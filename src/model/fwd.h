/* model/fwd.h - the forward pass of one rank of a TP group: tokens in, logits out.
 *
 * Owns the rank's attention handle (dcp), its caches, every workspace. Each rank computes its heads, its blocks
 * of the FFNs, its experts and its rows of the head; norms, latents, the router and the index work are replicated
 * and must come out the same on every rank. Sums over ranks are f32 by the communicator's fixed tree.
 *
 * Invariants: (1) nothing is allocated between fwd_open and fwd_close by a step; (2) the rows of a step may
 * belong to any requests, and a row's result depends on neither its company nor on how prompts were cut;
 * (3) every rank makes the same calls with the same arguments (collective); (4) workspaces are bounded by
 * max_rows, never by the context.
 */
#ifndef MODEL_FWD_H
#define MODEL_FWD_H

#include "comm/comm.h"
#include "kvspan/dcp.h"
#include "model/wt.h"

typedef struct fwd fwd;

typedef struct fwd_config {
    int32_t dcp, interleave;  /* tp is the comm's size                                                */
    int32_t ep;               /* divides tp; 0: tp                                                    */
    int32_t threads;          /* workers of this rank, the caller included                            */
    kvs_kv_format kv;         /* AUTO: fp8_ds_mla where the model has an indexer, else bf16           */
    kvs_index_format index_kv;
    kvs_scale_rule scale_rule;
    kvs_exchange exchange;
    int32_t hadamard;
    float latent_eps;         /* of q_a_layernorm and kv_a_layernorm; 0: the config's eps             */
    int32_t max_rows;         /* tokens of one step                                                   */
    int32_t max_reqs;
    int32_t max_logits;       /* rows of one step that get logits                                     */
    int64_t max_len;          /* longest sequence                                                     */
    int64_t n_page;           /* pages of this rank's pool                                            */
    int32_t trace;            /* 1: fwd_selection works                                               */
    int32_t selection_last;   /* 1: replace every selection by the last topk positions (a control)    */
    const char *cpu, *kernels;
} fwd_config;

/* Collective over world, which outlives the handle. w too; its draft layers are used where it has them. */
kvs_status fwd_open(fwd **out, const wt *w, const fwd_config *cfg, kvs_comm *world, kvs_error *err);
void fwd_close(fwd *f);

/* One step of the main model. b: as kvs_dcp_plan takes it. token: [n_row] ids in [0, vocab). Cache rows of all
 * tokens are written before they are attended. logit_row: [n_logit] rows whose logits are wanted, ascending;
 * logits: [n_logit, vocab] f32, the same on every rank. The hidden rows after the final norm stay in the handle
 * until the next step. n_prompt: [n_req] rows of each request, from its first, that belong to its prompt; NULL: none.
 * On layers without an indexer those take the multi-head form of attention and the others the absorbed one, which
 * agree to tolerance: what a row gives depends on what it is, not on how it came. Collective. On KVS_INVALID before any work (a token or a page out of range) nothing
 * changed and the group lives on: the check is the same on every rank. */
kvs_status fwd_step(fwd *f, const kvs_batch *b, const int32_t *n_prompt, const int32_t *token,
                    const int32_t *logit_row, int32_t n_logit, float *logits, kvs_error *err);
/* [n_row, hidden] f32 of the last fwd_step: RMSNorm(x; model.norm) before any rounding. */
const float *fwd_hidden(const fwd *f);

/* One pass of draft layer `mtp` (0 .. n_mtp - 1) over rows at positions i given by b, like fwd_step: row i takes
 * hidden h_i and the token at i + 1, writes slot i of the layer's own caches and predicts the token at i + 2.
 * hidden: [n_row, hidden] f32, main hidden (fwd_hidden's rows, copied by the caller) or a former pass's g_out.
 * g_out: [n_row, hidden] f32 or NULL: the rows after shared_head.norm, what a chained pass takes.
 * reuse 0: the layer's own indexer selects. reuse 1: each row attends the selection kept for its request by
 * fwd_draft_keep (index_share_mtp); its index key is still written; rows whose position is below topk attend
 * everything. Collective. */
kvs_status fwd_draft(fwd *f, int32_t mtp, const kvs_batch *b, const int32_t *n_prompt,
                     const int32_t *next_token, const float *hidden, int32_t reuse,
                     const int32_t *logit_row, int32_t n_logit, float *logits, float *g_out,
                     kvs_error *err);
/* Keeps, for request i of coming reuse passes (one row each, i < n), the selection of row row[i] of the last
 * fwd_draft with reuse 0. No communication. */
kvs_status fwd_draft_keep(fwd *f, const int32_t *row, int32_t n, kvs_error *err);

/* With trace: positions that row `row` of the last fwd_step attended in layer `layer`: ids [topk] ascending, returns
 * their number; -1 where nothing was traced. Dense layers: -1. */
int32_t fwd_selection(const fwd *f, int32_t layer, int32_t row, int32_t *ids);

typedef struct fwd_info {
    int64_t cache_latent, cache_index, cache_draft; /* bytes of this rank; draft: both kinds           */
    int64_t workspace;                              /* bytes of this rank, the attention layer's too   */
    const char *kernels;                            /* "op=variant,..." valid until close              */
    const char *transport;
    int32_t tp, dcp, interleave, rank;
    kvs_kv_format kv;
    kvs_index_format index_kv;
    kvs_exchange exchange;
} fwd_info;
void fwd_get_info(const fwd *f, fwd_info *info);

/* What the handles of a group of tp ranks would allocate, without weights or ranks: for planning. Draft layers
 * count where h has them: h->n_mtp is 0 for an opening without. */
typedef struct fwd_memory {
    int64_t cache;          /* of each rank                                                            */
    int64_t workspace_most; /* of the rank with the most: widths of FFNs and experts differ            */
    int64_t workspace_all;  /* of all ranks together                                                   */
    int64_t messages;       /* over all ranks: the most that each hands the TP group and its DCP group
                               in one collective; what a communicator copies of it is not counted above */
} fwd_memory;
kvs_status fwd_bytes(const hp *h, const fwd_config *cfg, int32_t tp, fwd_memory *out, kvs_error *err);

#endif
