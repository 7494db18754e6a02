/* attn_sparse_main.cuh - the launches of sparse attention's main kernels. */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH

#include <cuda_runtime.h>

#include "kern/cuda/attn_sparse.cuh"

/* kind: SPARSE_FP8 or SPARSE_BF16; n: heads the tile is made for, 16, 32 or 64 (not with bf16). */
cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, cudaStream_t stream);
/* The same for bf16 rows and groups of up to 64 heads, not in the deterministic mode. */
cudaError_t attn_sparse_wide_launch(const sparse_params &p, cudaStream_t stream);

#endif
