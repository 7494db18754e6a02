/* model/hp.h - the hyper-parameters of a model: everything of its config.json that sizes or maths depend on.
 *
 * Filled from the table of known models or from a config.json, which is the only reading of that file in the
 * project. Every field has been checked against the limits stated here, so that sums over a model stay far
 * below 2^63. A key that changes the maths and is unknown or set to something this library does not do is
 * refused by name; keys known to change nothing are skipped.
 */
#ifndef MODEL_HP_H
#define MODEL_HP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/plan.h"

enum { HP_MAX_LAYER = 1024, HP_MAX_EOS = 8 };

typedef enum hp_router { HP_SOFTMAX = 1, HP_SIGMOID = 2 } hp_router;

/* Which prompts the model expects (text/chat.h); from model_type and geometry. */
typedef enum hp_family { HP_V2 = 1, HP_V3, HP_V31, HP_V32, HP_KIMI, HP_GLM5, HP_GLM52, HP_GLM4_LITE } hp_family;

typedef struct hp {
    char name[64];
    char arch[48];       /* architectures[0]                                                          */
    char model_type[32];
    hp_family family;
    int32_t vocab;       /* 1..2^24                                                                   */
    int32_t hidden;      /* 1..65536                                                                  */
    int32_t inter;       /* of a dense layer, 1..2^18                                                 */
    int32_t moe_inter;   /* of an expert, 0..65536; 0 only with n_expert 0                            */
    int32_t n_layer;     /* 1..1024                                                                   */
    int32_t n_dense;     /* the first layers, which have no experts: 0..n_layer                       */
    int32_t n_head;      /* 1..1024                                                                   */
    int32_t q_lora;      /* 0..65536; 0: one query projection without a latent                        */
    int32_t kv_lora;     /* 1..65536                                                                  */
    int32_t nope, rope, v_dim; /* of a head, 1..4096                                                  */
    int32_t n_index_head; /* 0..1024; 0: no indexer                                                   */
    int32_t index_dim, topk;
    int32_t n_index_layer; /* layers of the main model that have an indexer of their own              */
    uint8_t index_full[HP_MAX_LAYER]; /* layer i has an indexer of its own; layer 0 always where any  */
    bool index_interleaved; /* pairing of the indexer's rope (the main rope is interleaved)           */
    bool index_share_mtp;   /* draft steps after the first reuse its selection                        */
    int32_t n_expert, n_shared; /* 0..4096                                                            */
    int32_t n_active;    /* experts per token, 1..n_expert                                            */
    int32_t n_group, topk_group; /* 1..n_expert; 1 <= topk_group <= n_group                           */
    hp_router router;
    bool group_max;      /* a group's score is its largest choice, not the sum of two                 */
    bool norm_topk;
    float route_scale;
    bool router_bias;    /* an f32 bias per expert beside the router                                  */
    float eps;           /* of every RMS norm, the latent ones included (see latent_eps in fwd.h)     */
    double theta;
    bool yarn;
    double yarn_factor, yarn_beta_fast, yarn_beta_slow, yarn_mscale, yarn_mscale_all;
    int64_t yarn_orig;
    bool tied;           /* the head is the embedding                                                 */
    int32_t n_mtp;       /* draft layers, 0..8; each is a whole sparse layer                          */
    int64_t max_ctx;     /* 1..2^31 - 1                                                               */
    int32_t bos;         /* -1: none                                                                  */
    int32_t n_eos, eos[HP_MAX_EOS];
    kvs_weight_format stored; /* AUTO: in a form this library cannot read                             */
    char stored_as[32];  /* how config.json calls it                                                  */
    char prefix[24];     /* before every tensor's name: "language_model." in a multimodal wrapper     */
    uint64_t config_hash[2]; /* XXH3-128 (low, high) of config.json without spaces and with sorted
                            keys; 0 of a preset                                                       */
} hp;

/* The i-th known model, NULL from the last on. */
const hp *hp_preset(int32_t i);
/* KVS_INVALID names the text and lists what exists. */
kvs_status hp_find(hp *h, const char *preset, kvs_error *err);
/* Reads dir/config.json: see kvs_plan_make for the failures. On failure *h is undefined. */
kvs_status hp_read(hp *h, const char *dir, kvs_error *err);
/* The same from text of n bytes; `name` becomes h->name. */
kvs_status hp_parse(hp *h, const char *name, const char *text, size_t n, kvs_error *err);
/* KVS_UNSUPPORTED where config.json says that weights are stored in a form that is not read. */
kvs_status hp_readable(const hp *h, kvs_error *err);
/* KVS_UNSUPPORTED, with the field, its value and what would work, where the forward pass cannot run this
 * geometry (kv_lora not 512, rope not 64, index_dim not 128, a storage form that is not read, ...). */
kvs_status hp_runnable(const hp *h, kvs_error *err);

/* (nope + rope)^-1/2, times m^2 with YaRN: m = 0.1 mscale_all ln(factor) + 1 where factor > 1 and mscale_all is
 * set. */
float hp_softmax_scale(const hp *h);
/* What YaRN multiplies cos and sin by: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1). hp_runnable
 * refuses all but 1: every known model has 1. */
double hp_rope_magnitude(const hp *h);
/* The rope / 2 inverse frequencies theta^(-2i / rope), YaRN applied; worked out in double, rounded to f32 once. */
void hp_inv_freq(const hp *h, float *inv_freq);
/* The first and the last pair of YaRN's ramp: pairs up to low keep their frequency, pairs from high on are slowed
 * by the whole factor. */
void hp_yarn_ramp(const hp *h, double *low, double *high);

#endif
