/* check/bench_mha.h - the multi-head form of attention as bench times it, on the host and on a device: the last rows
 * of a context, with keys and values of 128 + 64 and 128 dims, or (mha_wide) of 192 + 64 and 256. */
#ifndef KVS_CHECK_BENCH_MHA_H
#define KVS_CHECK_BENCH_MHA_H

#include "kern/mha.h"

enum { ROPE = KVS_ROPE_DIM, BENCH_MHA_NOPE = 192, BENCH_MHA_VDIM = 256 /* at most */ };

/* Its args without memory, everything dense; wide: of the larger dims; type: a kvs_dtype. */
mha_args bench_mha_args(int32_t n_row, int32_t n_head, int32_t n_key, int32_t wide, int32_t type);
/* Elements of a query, and of an expanded key with its values. */
int32_t bench_mha_q_dim(const mha_args *a);
int32_t bench_mha_kv_dim(const mha_args *a);
/* Fills len, [n_row], so that the last row attends all keys and each before it one less; returns the operations of a
 * call, two per dim of a query and of values, head and key attended. */
double bench_mha_lengths(const mha_args *a, int32_t *len);

#endif
