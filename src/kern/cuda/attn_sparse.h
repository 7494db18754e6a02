/* attn_sparse.h - sparse attention on sm_90a, from the host (attn_sparse.cuh says how it works). */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_H
#define KVS_KERN_CUDA_ATTN_SPARSE_H

#include <cuda_runtime.h>

#include "kern/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPARSE_FP8, SPARSE_BF16 }; /* kinds of rows the main kernel is made for */

/* Text of the first thing that these arguments ask for and the kernels do not have, NULL: none. */
const char *attn_sparse_refuse(const attn_args *a);
size_t attn_sparse_scratch(const attn_args *a, int n_sm);
/* Enqueues the op. Arguments that attn_sparse_refuse accepts. */
cudaError_t attn_sparse_launch(const attn_args *a, int n_sm, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
