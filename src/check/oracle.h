/* check/oracle.h - what every op should give, written a second time.
 *
 * From the formulas of docs/numbers.md in float64, by means that differ from the kernels' where
 * there is a choice: formats are decoded by arithmetic on their fields and encoded by search, a
 * selection is a full sort, attention is one softmax over the union of the keys. Nothing here
 * includes or links anything of num/, shard/ or kern/ except the params structs of kern/<family>.h.
 *
 * Reductions come with the magnitude of their terms, from which cmp.c derives bounds.
 */
#ifndef KVS_CHECK_ORACLE_H
#define KVS_CHECK_ORACLE_H

#include <stddef.h>
#include <stdint.h>

#include "kern/attn.h"
#include "kern/index.h"
#include "kern/kvio.h"
#include "kern/mha.h"
#include "kern/ops.h"

/* ---- numbers (oracle_num.c) ------------------------------------------------------------------ */

void orc_init(void); /* fills the tables of codes; call once before the rest */
float orc_e4m3(uint8_t code);
float orc_bf16(uint16_t bits);
uint8_t orc_to_e4m3(float x);
uint16_t orc_to_bf16(float x);
float orc_round_bf16(float x);
/* Scales of a tile with largest finite magnitude amax. */
float orc_scale(int32_t rule, float amax);
float orc_scale_index(float amax);
/* Element i of a buffer of bf16 or f32, and the largest finite magnitude of n elements from i on.
 */
float orc_load(const void *p, int32_t type, int64_t i);
float orc_amax(const void *p, int32_t type, int64_t i, int64_t n);

typedef struct orc_count {
    uint64_t n_nan, n_sat;
} orc_count;

/* e4m3 of x / s, counting. */
uint8_t orc_quant(float x, float s, orc_count *c);

/* ---- rows (oracle_kvio.c) -------------------------------------------------------------------- */

int64_t orc_row_bytes(int32_t fmt);
int64_t orc_index_page_bytes(int32_t fmt);
void orc_row_read(int32_t fmt, float k_scale, const uint8_t *row, float *out /* [576] */);
void orc_row_write(const kv_write_args *a, int64_t tok, uint8_t *row, orc_count *c);
/* Key values [128] and the scale of token `off` of a page. */
float orc_index_read(int32_t fmt, const uint8_t *page, int64_t off, float *out);
void orc_index_write(const index_write_args *a, int64_t tok, uint8_t *page, int64_t off,
                     orc_count *c);
/* Slot of local index l through a table row of `width` pages in a pool of n_slot; -1 if there is
 * none. */
int64_t orc_slot(const int32_t *table, int64_t width, int64_t n_slot, int64_t l);

/* ---- attention (oracle_attn.c) --------------------------------------------------------------- */

/* The pool of a case, dequantised. */
typedef struct orc_pool {
    float *value;   /* [n_slot, 576] */
    double *norm;   /* [n_slot] Euclidean, of the 576 */
    double *vnorm2; /* [n_slot] squared, of the 512 */
} orc_pool;

/* The keys one row attends: slots, lane by lane, and the segment each lies in. */
typedef struct orc_keys {
    int64_t n;
    int32_t *slot; /* [n] */
    int32_t *seg;  /* [n] */
    int32_t n_seg;
    uint64_t n_bad_id;
} orc_keys;

typedef struct orc_attn {
    double out[KVS_LATENT_DIM];
    double square[KVS_LATENT_DIM]; /* sum of w v^2, w the softmax weights */
    double lse;
    double w2v2;    /* sum over keys of w^2 |v|^2 */
    double terms;   /* largest |q| |k| * scale among keys that could weigh something */
    double score;   /* largest |score| among them */
    double flush;   /* what a score loses where products flush denormals to zero */
    int64_t n_used; /* keys that entered */
    int64_t n_nan;  /* segments dropped for a NaN or +inf score */
} orc_attn;

/* Fills pool (arrays given) for the slots with used[slot] != 0. */
void orc_pool_fill(const attn_args *a, const uint8_t *used, orc_pool *pool);
/* Most keys any row can attend; arrays of that size hold orc_attn_keys' result. */
int64_t orc_attn_max_keys(const attn_args *a);
void orc_attn_keys(const attn_args *a, int64_t row, orc_keys *keys);
/* work: [keys->n] doubles. */
void orc_attn_head(const attn_args *a, const orc_pool *pool, const orc_keys *keys, int64_t row,
                   int64_t head, double *work, orc_attn *o);

/* ---- attention in its multi-head form (oracle_mha.c) ------------------------------------------ */

enum { ORC_MHA_MAX_V = 512 };

/* One (row, head) over the blocks of a call that are not dropped, and what the fold with `lse_a`, `out_a` gives. */
typedef struct orc_mha {
    double out[ORC_MHA_MAX_V];
    double square[ORC_MHA_MAX_V]; /* sum of w v^2, w the softmax weights of the keys  */
    double block[ORC_MHA_MAX_V];  /* the call's own result                            */
    double lse, lse_block;
    double w_a, w_b;  /* weights of the fold                                          */
    double w2v2;      /* sum over keys of w^2 |v|^2                                   */
    double terms;     /* largest |q| |k| * scale among keys that could weigh anything */
    double score;     /* largest |score| among them                                   */
    double flush;     /* what a score loses where products flush denormals to zero    */
    int64_t n_used;   /* keys that entered                                            */
    int32_t n_nan;    /* blocks that were dropped                                     */
} orc_mha;

/* out_a, lse_a: of earlier calls, read where a->first is 0. work: [2 * n_key] doubles. */
void orc_mha_head(const mha_args *a, int64_t row, int64_t head, const float *out_a, float lse_a,
                  double *work, orc_mha *o);

/* ---- indexer and selection (oracle_index.c) -------------------------------------------------- */

typedef struct orc_score {
    double value;
    double dot_terms; /* k_scale * sum over heads of |w| |q| |k| */
    double sum_terms; /* k_scale * sum over heads of |w * relu| */
} orc_score;

orc_score orc_index_score(const index_score_args *a, int64_t row, int64_t slot);

typedef struct orc_cand {
    float score;
    int32_t id;
} orc_cand;

/* Sorts by the order of selection and drops what is never selected; returns how many stay. */
int64_t orc_select(orc_cand *c, int64_t n);
/* Sorts by id. */
void orc_sort_id(orc_cand *c, int64_t n);

/* Where a position lies under DCP: owner, local index there, and the owner's local lane. */
typedef struct orc_place {
    int32_t owner;
    int64_t local;
    int32_t lane;
    int32_t n_lane;
} orc_place;

orc_place orc_place_of(int64_t pos, int64_t dcp, int64_t interleave);

/* One row of localise: slots [k] with -1 behind, lane_count, number of bad ids. order: [k] scratch.
 */
uint64_t orc_localise(const localise_args *a, int64_t row, int32_t *slots, int32_t *lane_count,
                      int64_t *order);

/* ---- merge (oracle_attn.c) ------------------------------------------------------------------- */

typedef struct orc_merge {
    double lse;
    double weight[64]; /* of each part, 0 where it is not read */
    int32_t n_live;
    int32_t n_nan;
} orc_merge;

void orc_merge_head(const merge_args *a, int64_t row, int64_t head, orc_merge *o);

#endif
