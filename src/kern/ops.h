/* kern/ops.h - contract of the row-wise ops between products: norms, rope, activation, router.
 *
 * All read f32 and compute in f32 in an order that is fixed (sums: 16 interleaved partial sums, then a fixed
 * tree), so every variant gives the same bits and a row's result depends on that row only. Outputs that feed a
 * product are written in the product's operand type: bf16 (rounded to nearest even, once) or f32. Partial sum
 * j takes elements j, j + 16, ... in order; the tree adds (j, j + 8), (j, j + 4), (j, j + 2), (j, j + 1). Sums of
 * squares are fused multiply-adds.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_OPS_H
#define KVS_KERN_OPS_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* norm: y = (x - c) * rsqrt(mean((x - c)^2) + eps) * weight + bias, with c = mean(x) where `centre`
 * (LayerNorm), 0 else (RMSNorm). rsqrt is 1 / sqrtf; y is (((x - c) * rsqrt) * weight) + bias. */
typedef struct norm_args {
    int32_t n_row, dim;       /* dim >= 1                                                              */
    const float *x;           /* [n_row, dim]                                                          */
    int64_t x_stride;         /* elements                                                              */
    const float *weight;      /* [dim]                                                                 */
    const float *bias;        /* [dim] or NULL                                                         */
    float eps;
    int32_t centre;
    void *y;                  /* [n_row, dim] of y_type; may be x when f32                             */
    int32_t y_type;           /* kvs_dtype                                                             */
    int64_t y_stride;         /* elements                                                              */
} norm_args;
typedef void (*norm_fn)(const norm_args *a, dev_queue *q);

/* rope: rotates dims [dim0, dim0 + 2 * n_pair) of every head in place: (a, b) -> (a c - b s, a s + b c), each a
 * product and an fma. Pairs are (2i, 2i+1) where `interleaved`, else (i, i + n_pair). */
typedef struct rope_args {
    int32_t n_row, n_head, n_pair, dim0, interleaved;
    float *x;                 /* [n_row, n_head, ...]                                                  */
    int64_t x_stride_row, x_stride_head; /* elements                                                   */
    const float *cos, *sin;   /* [n_row, n_pair] of each row's position                                */
} rope_args;
typedef void (*rope_fn)(const rope_args *a, dev_queue *q);

/* act: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)) with kern/exp.h. */
typedef struct act_args {
    int32_t n_row, dim;
    const float *gate, *up;   /* [n_row, dim]                                                          */
    int64_t stride;           /* elements, of both                                                     */
    void *y;                  /* [n_row, dim] of y_type                                                */
    int32_t y_type;           /* kvs_dtype                                                             */
    int64_t y_stride;
} act_args;
typedef void (*act_fn)(const act_args *a, dev_queue *q);

/* route: the experts of each row. Scores s = sigmoid(logit) or softmax(logits); choice = s + bias. With
 * n_group > 1 only experts of the topk_group best groups take part (score of a group: the sum of its two
 * largest choices, or its largest where group_max); ties: lower index. The n_active largest choices, then
 * weight = s of them, divided by (their sum + 1e-20) where norm_topk, times scale. Expert ids come out in
 * ascending order with their weights, and sums of weights go in that order. A NaN logit makes the row's weights
 * NaN; ids stay valid and distinct: a NaN choice is below every other, and where the kept groups have fewer than
 * n_active experts the lowest of the others follow. */
enum { ROUTE_SOFTMAX = 1, ROUTE_SIGMOID = 2 };
typedef struct route_args {
    int32_t n_row;
    int32_t n_expert;         /* 1..4096                                                               */
    int32_t n_active;         /* 1..n_expert                                                           */
    int32_t n_group;          /* >= 1, divides n_expert                                                */
    int32_t topk_group;       /* 1..n_group                                                            */
    int32_t kind, group_max, norm_topk;
    float scale;
    const float *logit;       /* [n_row, n_expert]                                                     */
    const float *bias;        /* [n_expert] or NULL                                                    */
    int32_t *id;              /* [n_row, n_active]                                                     */
    float *weight;            /* [n_row, n_active]                                                     */
} route_args;
typedef void (*route_fn)(const route_args *a, dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
