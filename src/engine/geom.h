/* engine/geom.h - the geometry of a model: the numbers of its config.json that decide sizes.
 *
 * Filled from the table of known models or from a config.json. Only what sizes depend on is
 * read: rope settings, router kind and token ids are not. Every field has been checked against
 * the limits stated here, so that sums over a model stay far below 2^63. */
#ifndef ENGINE_GEOM_H
#define ENGINE_GEOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/plan.h"

typedef struct geom {
    char name[64];
    char arch[48];
    int32_t vocab;      /* 1..2^24                                                            */
    int32_t hidden;     /* 1..65536                                                           */
    int32_t inter;      /* of a dense layer, 1..2^18                                          */
    int32_t moe_inter;  /* of an expert, 0..65536; 0 only with n_expert 0                     */
    int32_t n_layer;    /* 1..1024                                                            */
    int32_t n_dense;    /* the first layers, which have no experts: 0..n_layer                */
    int32_t n_head;     /* 1..1024                                                            */
    int32_t q_lora;     /* 0..65536; 0: one query projection without a latent                 */
    int32_t kv_lora;    /* 1..65536                                                           */
    int32_t nope, rope, v_dim; /* of a head, 1..4096                                          */
    int32_t n_index_head; /* 0..1024; 0: no indexer                                           */
    int32_t index_dim, topk;
    int32_t n_index_layer; /* layers of the main model that have an indexer of their own      */
    int32_t n_expert, n_shared; /* 0..4096                                                    */
    bool router_bias;   /* an f32 bias per expert beside the router                           */
    bool tied;          /* the head is the embedding                                          */
    int32_t n_mtp;      /* draft layers, 0..8; each is a whole sparse layer                   */
    int64_t max_ctx;    /* 1..2^31 - 1                                                        */
    kvs_weight_format stored; /* AUTO: in a form this library cannot read                     */
    char stored_as[32]; /* how config.json calls it                                           */
} geom;

/* The i-th known model, NULL from the last on. */
const geom *geom_preset(int32_t i);

/* KVS_INVALID names the text and lists what exists. */
kvs_status geom_find(geom *g, const char *preset, kvs_error *err);

/* Reads dir/config.json: see kvs_plan_make for the failures. On failure *g is undefined. */
kvs_status geom_read(geom *g, const char *dir, kvs_error *err);

/* The same from text of n bytes; `name` becomes g->name. */
kvs_status geom_parse(geom *g, const char *name, const char *text, size_t n, kvs_error *err);

#endif
