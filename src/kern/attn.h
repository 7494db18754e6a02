/* kern/attn.h - contract of the attention op over one rank's shard, and of the merge of partials.
 *
 * attn: for each query row and head, softmax attention in the absorbed form over the keys the row attends
 * in this shard. Keys of a row are given lane by lane (shard.h), in ascending position. Per lane the op
 * skips what is not attended, cuts the attended keys into segments of 2048 and tiles of 64, runs an online
 * softmax over the tiles of a segment, normalises, folds the segments of the lane in order with
 * merge_node, then merges the lanes by the tree (j, j + n/2), (j, j + n/4), ... with the lower lane as
 * operand a. Lanes may be visited in any order that yields those nodes.
 *
 * Arithmetic: scores and output accumulate in f32 (the reference: double); scaled score = (q . k) *
 * softmax_scale * q_scale; P is rounded to the product's operand type where the variant says so, the row
 * sum uses the unrounded f32 P. A key is the dequantised cache row (num/kvfmt.h) and V is its first 512
 * values, rounded as the format says. LSE is the natural log. A row with nothing to attend gives exactly
 * (0, -inf). A key outside a row's bound cannot touch it even if it holds NaN.
 *
 * Row invariance: the bits of (row, head) depend on that row, that head and its keys only.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_ATTN_H
#define KVS_KERN_ATTN_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "dev/dev.h"
#include "shard/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTN_TILE = SHARD_TILE, ATTN_SEGMENT = SHARD_SEGMENT };

/* Counters an op adds to (never resets). Written by the calling thread when the op ends. */
typedef struct attn_stats {
    uint64_t n_key;     /* (row, key) pairs attended, counted once per row, not per head             */
    uint64_t n_fetched; /* cache rows read; rows of one request that share a tile fetch it once      */
    uint64_t n_bad_id;  /* ids outside the pool or the table, other than -1: masked and counted, once
                           per row that meets them; every key of a row whose row_req is outside
                           [0, n_req) is one                                                         */
    uint64_t n_nan;     /* (row, head) results whose LSE would have been NaN or +inf: see below      */
} attn_stats;

typedef struct attn_args {
    /* queries */
    int32_t n_row, n_head;       /* n_head 1..128; n_row >= 0                                        */
    const void *q;               /* [n_row, n_head, 576] bf16 or f32; latent 512 then rope 64        */
    int32_t q_type;              /* kvs_dtype: bf16, or f32 with f32 rows only                       */
    int64_t q_stride_row;        /* elements                                                         */
    int64_t q_stride_head;       /* elements                                                         */
    const float *q_scale;        /* [n_row, n_head] multiplies the scores; NULL: 1                   */
    float softmax_scale;

    /* cache of one layer on this rank */
    const uint8_t *kv;           /* slot s starts at kv + (s / 64) * page_stride + (s % 64) * row_stride */
    int32_t fmt;                 /* kvs_kv_format                                                    */
    int64_t page_stride;         /* bytes                                                            */
    int64_t row_stride;          /* bytes                                                            */
    int64_t n_slot;              /* slots of the pool; ids outside [0, n_slot) are masked            */
    float k_scale;               /* fp8 only                                                         */

    int32_t n_lane;              /* 1, 2, 4 or 8                                                     */

    /* keys, either as lists of slots (slots != NULL) ... */
    const int32_t *slots;        /* [n_row, slots_stride] lane 0's entries, then lane 1's, ...; -1 = none */
    int64_t slots_stride;        /* elements                                                         */
    const int32_t *lane_count;   /* [n_row, n_lane] entries per lane; their sum <= slots_stride      */

    /* ... or as a block table: the row attends local indices [0, kv_len) of its request */
    const int32_t *table;        /* [n_req, table_stride] page ids                                   */
    int64_t table_stride;        /* elements                                                         */
    int32_t table_width;         /* usable entries of a table row; local indices past it are bad ids */
    const int32_t *row_req;      /* [n_row] table row of each query row; equal values are adjacent   */
    const int32_t *kv_len;       /* [n_row] LOCAL keys each row attends, may be 0                    */
    int32_t interleave;          /* I, for the lanes of local indices                                */
    int32_t n_req;

    /* results: f32, normalised */
    float *out;                  /* [n_row, n_head, 512]; 0 where nothing is attended; see out_type   */
    int64_t out_stride_row;      /* elements                                                         */
    int64_t out_stride_head;     /* elements                                                         */
    float *lse;                  /* [n_row, n_head] dense; -inf where nothing is attended            */

    int32_t out_type;            /* kvs_dtype of out: f32 (also 0), or bf16, rounded once, of variants
                                    for CUDA; others refuse it                                      */

    attn_stats *stats;           /* may be NULL                                                      */
    void *scratch;               /* attn_scratch bytes, 64-byte aligned                              */
    size_t scratch_bytes;
} attn_args;

/* A NaN or +inf score (a NaN in an attended key or query, or an overflow) makes that (row, head)'s result
 * (0, -inf) in the segment where it occurs, and is counted in n_nan once per segment; so does a segment
 * whose result is not finite (an infinity among the values): no NaN or infinity crosses an interface but
 * the lse -inf. A segment all of whose scores are -inf is the identity too, and is not counted. */

typedef void (*attn_fn)(const attn_args *a, dev_queue *q);
/* Bytes of scratch for these args on this queue. Depends on heads, lanes and workers, never on lengths. */
typedef size_t (*attn_scratch_fn)(const attn_args *a, const dev_queue *q);

/* merge: combines n_part partials of the same rows and heads.
 *   MERGE_TREE: n_part must be 1, 2, 4 or 8: (p, p + n/2), (p, p + n/4), ... the lower one is operand a
 *   MERGE_FOLD: ((0, 1), 2), 3 ...
 * A node: inputs with lse NaN or +inf count as -inf (NaN is counted); m = max(lse_a, lse_b);
 * w = exp(lse - m); out = (w_a out_a + w_b out_b) / (w_a + w_b); lse = m + log(w_a + w_b), exp and log as
 * in kern/exp.h, fused where kern/exp.h says. A side with lse -inf is not read into the sum; merging with
 * the identity (anything, -inf) returns the other operand's bits; two identities give (0, -inf).
 * Every variant gives the same bits. */
enum { MERGE_TREE = 0, MERGE_FOLD = 1 };

typedef struct merge_args {
    int32_t n_part;              /* 1..8 for a tree, any >= 1 for a fold                             */
    int32_t mode;
    int32_t n_row, n_head, dim;  /* dim: values per head, a multiple of 16                           */
    const float *const *out_in;  /* [n_part] -> [n_row, n_head, dim] f32                             */
    const float *const *lse_in;  /* [n_part] -> [n_row, n_head] f32                                  */
    int64_t in_stride_row, in_stride_head;   /* elements, of every out_in                            */
    int64_t lse_stride_row;      /* elements, of every lse_in                                        */
    void *out;                   /* [n_row, n_head, dim] f32 or bf16 (rounded once, to nearest even) */
    int32_t out_type;            /* kvs_dtype                                                        */
    int64_t out_stride_row, out_stride_head; /* elements                                             */
    float *lse;                  /* [n_row, n_head] dense; may be NULL                               */
    uint64_t *n_nan;             /* NaN inputs are added here; may be NULL                           */
} merge_args;

typedef void (*merge_fn)(const merge_args *a, dev_queue *q);

/* quant_q: bf16 or f32 queries -> e4m3 values (as bf16, exact) and one scale per (row, head), pow2 or
 * exact rule over the finite values of the 576. */
typedef struct quant_q_args {
    int32_t n_row, n_head;
    const void *q;               /* [n_row, n_head, 576]                                             */
    int32_t q_type;              /* kvs_dtype                                                        */
    int64_t q_stride_row, q_stride_head;
    int32_t rule;                /* kvs_scale_rule                                                   */
    uint16_t *q_out;             /* [n_row, n_head, 576] bf16 bits of the e4m3 values                */
    float *scale;                /* [n_row, n_head]                                                  */
} quant_q_args;

typedef void (*quant_q_fn)(const quant_q_args *a, dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
