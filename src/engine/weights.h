/* engine/weights.h - the tensors of a model, and what they take: parameters and bytes, of the whole
 * checkpoint and of one rank.
 *
 * One inventory (weights.c) lists every tensor with its shape, how it is stored and how the
 * ranks of a TP group share it; every sum here walks it. Counted as parameters: all but scales
 * and the router's bias. The embedding and head that some checkpoints repeat in a draft layer
 * are not counted.
 *
 * How ranks share a tensor. Rank r of tp takes units [r n / tp, (r + 1) n / tp) of the n units
 * of a split dimension: heads of q_b, kv_b and o; blocks of 128 of an FFN's inner dimension;
 * rows of embedding and head. Experts: rank r holds the experts of group r / (tp / ep), each
 * split by r mod (tp / ep). Everything else is on every rank. */
#ifndef ENGINE_WEIGHTS_H
#define ENGINE_WEIGHTS_H

#include <stdint.h>

#include "engine/geom.h"

typedef enum weights_part { WEIGHTS_MAIN, WEIGHTS_MTP } weights_part;

int64_t weights_params(const geom *g, weights_part part);

/* format is resolved: BF16 or FP8. */
int64_t weights_bytes(const geom *g, weights_part part, kvs_weight_format format);

/* The bytes of one rank: 0 <= rank < tp, 1 <= ep <= tp. */
int64_t weights_rank_bytes(const geom *g, weights_part part, kvs_weight_format format, int32_t tp,
                           int32_t ep, int32_t rank);

/* Their largest over ranks. */
int64_t weights_rank_bytes_max(const geom *g, weights_part part, kvs_weight_format format,
                               int32_t tp, int32_t ep);

#endif
