/* attn_dense.h - attention over a block table on sm_90a, from the host (attn_dense.cuh says how it works). */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_H
#define KVS_KERN_CUDA_ATTN_DENSE_H

#include <cuda_runtime.h>

#include "kern/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Why args with a table are not for it; NULL where they are. */
const char *attn_dense_refuses(const attn_args *a);
/* Bytes of scratch, and the op enqueued, for args that are not refused. */
size_t attn_dense_scratch(const attn_args *a, int n_sm);
cudaError_t attn_dense_launch(const attn_args *a, int n_sm, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
