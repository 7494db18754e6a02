/* kvspan/plan.h - how a model, its KV cache and a number of devices fit together, without either.
 *
 * kvs_plan_make takes a model's geometry (a preset or a config.json), devices and settings, and
 * works out bytes: of the weights and workspaces of a rank, of the cache per token, what fits,
 * and what an exchange moves. It loads no weights and needs no device. What the settings do not
 * allow comes back as refusals, each with the rule, the value, the reason and the nearest
 * setting that works; the numbers are then those of the nearest settings, which the result shows.
 *
 * Sizes are bytes. "Rank" is one device of the TP group. The ranks of a DCP group share one
 * cache; a TP group of tp / dcp DCP groups holds tp / dcp equal copies of it; gpus / tp TP
 * groups are independent replicas.
 */
#ifndef KVSPAN_PLAN_H
#define KVSPAN_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "kvspan/config.h"
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* How the product weights are stored. Embedding, head, norms, router, indexer weights_proj and
 * eh_proj stay bf16 (the router's bias f32) in either. */
typedef enum kvs_weight_format {
    KVS_WEIGHT_AUTO = 0, /* as the checkpoint is published; bf16 where config.json says nothing */
    KVS_WEIGHT_BF16 = 1,
    KVS_WEIGHT_FP8 = 2 /* e4m3, one f32 scale per block of 128 x 128 */
} kvs_weight_format;

typedef struct kvs_plan_config {
    size_t struct_size;
    const char *preset;    /* a name of kvs_plan_preset, or NULL */
    const char *model_dir; /* a folder that holds config.json, or NULL; one of the two is set */
    int32_t gpus;          /* devices, 1..65536; default: tp, or 8 where that is not given either */
    int64_t mem_bytes;     /* memory of one device; default 141e9 */
    double util;           /* share of it that may be used, in (0, 1]; default 0.92 */
    kvs_weight_format weights;
    int32_t tp;         /* ranks that share the heads; default: gpus */
    int32_t dcp;        /* ranks that share one cache: 1, 2, 4, 8; default 1 */
    int32_t ep;         /* ranks the experts are spread over, divides tp; default: tp */
    int32_t interleave; /* 1, 2, 4, ... 64; default 1 */
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int64_t ctx;   /* tokens of one sequence; default: the model's limit */
    int32_t seqs;  /* sequences at once, 1..65536; default 1 */
    int32_t mtp;   /* draft tokens per step, 0..7; default 0 */
    int32_t chunk; /* prompt tokens of one step; default 2048 */
    int32_t threads;     /* workers of a rank, 1..1024; default: cores of this machine / tp, at least 1 */
    const char *cpu;     /* cap of the kernels: "ref", "avx2", ...; NULL: KVS_CPU, else this machine's best */
    const char *kernels; /* "op=variant,..."; NULL: none. Both: workspaces hold scratch of the kernels */
} kvs_plan_config;

static inline kvs_plan_config kvs_plan_config_default(void)
{
    kvs_plan_config c;
    c.struct_size = sizeof(c);
    c.preset = NULL;
    c.model_dir = NULL;
    c.gpus = 0;
    c.mem_bytes = 0;
    c.util = 0.0;
    c.weights = KVS_WEIGHT_AUTO;
    c.tp = 0;
    c.dcp = 0;
    c.ep = 0;
    c.interleave = 0;
    c.kv = KVS_KV_AUTO;
    c.index_kv = KVS_INDEX_AUTO;
    c.ctx = 0;
    c.seqs = 0;
    c.mtp = 0;
    c.chunk = 0;
    c.threads = 0;
    c.cpu = NULL;
    c.kernels = NULL;
    return c;
}

/* One reason why an engine would not start with these settings. */
typedef struct kvs_plan_refusal {
    char rule[32];    /* a stable name: "dcp_divides_tp" */
    char value[64];   /* what was asked for: "tp 6, dcp 4" */
    char why[160];    /* one sentence */
    char nearest[96]; /* the nearest setting that passes this rule: "--dcp 2"; empty: none */
} kvs_plan_refusal;

enum { KVS_PLAN_MAX_REFUSAL = 24 };

/* What one rank sends to the others of its DCP group in one layer of a decode step of
 * seqs * (1 + mtp) tokens. */
typedef struct kvs_plan_exchange {
    int64_t q;         /* queries: gathered over heads */
    int64_t partial;   /* attention results, f32 */
    int64_t lse;       /* their log-sum-exp, f32 */
    int64_t selection; /* top-k candidates: in layers with an indexer only */
} kvs_plan_exchange;

typedef struct kvs_plan {
    size_t struct_size;

    /* the model */
    char model[64];        /* preset name or the folder's last part */
    char architecture[48]; /* "DeepseekV32ForCausalLM" */
    int32_t n_layer, n_index_layer; /* of the main model */
    int32_t n_head, n_index_head, topk;
    int32_t n_mtp_layer;   /* draft layers of the checkpoint */
    int64_t max_ctx;       /* the model's own limit */
    int64_t n_param;       /* parameters of the main model */
    int64_t n_param_mtp;   /* of the draft layers, embedding and head copies not counted */

    /* the settings, defaults filled in */
    int32_t gpus, tp, dcp, ep, interleave, seqs, mtp, chunk;
    int64_t mem_bytes, usable_bytes; /* usable = mem * util */
    double util;
    kvs_weight_format weights;
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int64_t ctx;

    /* cache bytes of one token over all layers, in the group as a whole */
    int64_t row_bytes;         /* a latent row of one layer */
    int64_t index_token_bytes; /* an index key with its scale, of one layer; 0 without an indexer */
    int64_t token_latent;      /* main layers */
    int64_t token_index;       /* main layers that have an indexer */
    int64_t token_draft;       /* rows and index keys of the draft layers; 0 unless mtp > 0 */
    int64_t token_bytes;       /* their sum */

    /* bytes of one rank (the fullest one) */
    int64_t weight_bytes;    /* main model, as stored */
    int64_t weight_mtp;      /* draft layers, as stored; 0 unless mtp > 0 */
    int64_t workspace_bytes; /* all that a step works in: forward pass, attention layer, engine */
    int64_t cache_bytes;     /* left for pages */
    int64_t page_bytes;      /* one page of 64 tokens: all layers, index keys and drafts */
    int64_t checkpoint_bytes; /* all weights once, draft layers included */

    /* what fits */
    int64_t n_page;          /* pages in a rank's pool */
    int64_t tokens_per_rank; /* tokens stored by one rank */
    int64_t tokens_total;    /* tokens one DCP group holds */
    int64_t tokens_replicas; /* tokens over all gpus / tp replicas */
    int64_t longest_ctx;     /* of one sequence alone, at most max_ctx */
    int64_t longest_ctx_seqs; /* of each of `seqs` equal sequences, at most max_ctx */

    /* per layer and step, by the form of the exchange */
    int32_t n_row; /* tokens of the step: seqs * (1 + mtp) */
    kvs_plan_exchange a2a, ag_rs;
    int64_t a2a_step, ag_rs_step; /* over all layers of the main model */

    int32_t n_refusal;
    kvs_plan_refusal refusal[KVS_PLAN_MAX_REFUSAL];

    /* what a token's pass through the main model takes: its active experts, no embedding table */
    int64_t step_param;       /* parameters, the head's not counted */
    int64_t head_param;       /* of the head: only for rows whose logits are wanted */
    int64_t step_weight_bytes; /* of both, over all ranks */

    int32_t threads;      /* workers of a rank */
    int64_t weight_copies; /* bytes of one rank (the fullest): what opening makes from the weights, absorbed
                              matrices and f32 vectors; draft layers included where they are used */
    int64_t pool_bytes;   /* of one rank: pages for `seqs` sequences of `ctx` tokens, which is what an engine
                              reserves; memory only where a page has been written */

    /* one process whose threads are the tp ranks, as kvs_engine_open makes it: equal to its statistics. The
     * program itself comes on top, some 10 MB with a tokenizer. */
    int64_t process_weights;   /* weights and copies, once for all ranks */
    int64_t process_workspace; /* of all ranks */
    int64_t process_messages;  /* copies of what ranks send each other, once the largest have been sent */
    int64_t process_cache;     /* pools of all ranks, full */
    int64_t process_bytes;     /* their sum */
} kvs_plan;

/* An empty result of the size that the caller was compiled with. */
static inline kvs_plan kvs_plan_empty(void)
{
    kvs_plan p;
    memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    return p;
}

/* Works a plan out into *out, whose struct_size is set. KVS_OK also where n_refusal > 0. Fails,
 * leaving *out alone, for what is no setting at all: no or two models, an unknown preset (the
 * known ones are named), a config.json that cannot be read (KVS_IO), is malformed (KVS_FORMAT,
 * with the byte offset) or is of an architecture that this library does not know
 * (KVS_UNSUPPORTED), and values outside their type's range (KVS_INVALID names the field).
 * Threads: any. */
kvs_status kvs_plan_make(kvs_plan *out, const kvs_plan_config *cfg, kvs_error *err);

/* The name of preset i, NULL from the last one on. Static storage. Threads: any. */
const char *kvs_plan_preset(int32_t i);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
