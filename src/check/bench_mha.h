/* check/bench_mha.h - the multi-head form of attention as bench times it, on the host and on a device: the last rows
 * of a context, with keys and values of 128 + 64 and 128 dims. */
#ifndef KVS_CHECK_BENCH_MHA_H
#define KVS_CHECK_BENCH_MHA_H

#include "kern/mha.h"

enum { NOPE = 128, ROPE = KVS_ROPE_DIM, VDIM = 128, Q_DIM = NOPE + ROPE, KV_DIM = NOPE + VDIM };

/* Its args without memory, everything dense; type: a kvs_dtype. */
mha_args bench_mha_args(int32_t n_row, int32_t n_head, int32_t n_key, int32_t type);
/* Fills len, [n_row], so that the last row attends all keys and each before it one less; returns the operations of a
 * call, 2 (192 + 128) per head and key attended. */
double bench_mha_lengths(const mha_args *a, int32_t *len);

#endif
