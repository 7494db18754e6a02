/* model/weights.h - the tensors of a model, and what they take: parameters and bytes, of the whole
 * checkpoint and of one rank.
 *
 * One inventory (weights.c) lists every tensor with its shape, how it is stored and how the
 * ranks of a TP group share it; every sum here walks it. Counted as parameters: all but scales
 * and the router's bias. The embedding and head that some checkpoints repeat in a draft layer
 * are not counted.
 *
 * Which rank holds what is wt_share's rule (wt.h). */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include <stdint.h>

#include "model/hp.h"

typedef enum weights_part { WEIGHTS_MAIN, WEIGHTS_MTP } weights_part;

int64_t weights_params(const hp *g, weights_part part);

/* format is resolved: BF16 or FP8. */
int64_t weights_bytes(const hp *g, weights_part part, kvs_weight_format format);

/* The bytes of one rank: 0 <= rank < tp, 1 <= ep <= tp. */
int64_t weights_rank_bytes(const hp *g, weights_part part, kvs_weight_format format, int32_t tp,
                           int32_t ep, int32_t rank);

/* Their largest over ranks. */
int64_t weights_rank_bytes_max(const hp *g, weights_part part, kvs_weight_format format,
                               int32_t tp, int32_t ep);

/* What opening makes beside the stored tensors: W_UK transposed of each head, W_UV too where kv_b_proj is fp8, both
 * bf16; f32 copies of vectors; a list of each layer's experts. Of a rank's heads; the rest on every rank. Not
 * counted: copies of tensors that a file holds at odd addresses, k_scale. */
int64_t weights_copy_bytes(const hp *g, weights_part part, kvs_weight_format format, int32_t tp);

/* What one token's pass through the main model is multiplied with: its active experts and no embedding table.
 * Parameters without the head's; bytes with the head's. */
int64_t weights_step_params(const hp *g);
int64_t weights_step_bytes(const hp *g, kvs_weight_format format);
int64_t weights_head_params(const hp *g);

#endif
