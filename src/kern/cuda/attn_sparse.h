/* attn_sparse.h - sparse attention on sm_90a, from the host (attn_sparse.cuh says how it works). */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_H
#define KVS_KERN_CUDA_ATTN_SPARSE_H

#include <cuda_runtime.h>

#include "kern/attn.h"
#include "kern/cuda/attn_send.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPARSE_FP8, SPARSE_BF16 }; /* kinds of rows the main kernel is made for */

/* Why args with lists of slots are not for it; NULL where they are. */
const char *attn_sparse_refuses(const attn_args *a);
/* Bytes of scratch, and the op enqueued, for args that are not refused. lane_most above 0: deterministic, by the segments,
 * fold and tree of kern/attn.h, with lanes of at most so many keys, whatever slots_stride; 0: a row's keys are cut by the
 * work. to: results are sent, args being what attn_send_refuses lets through; NULL: they are written. */
size_t attn_sparse_scratch(const attn_args *a, int64_t lane_most, int n_sm);
cudaError_t attn_sparse_launch(const attn_args *a, int64_t lane_most, int n_sm, const struct attn_send *to,
                               cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
