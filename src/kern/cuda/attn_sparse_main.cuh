/* attn_sparse_main.cuh - the launches of sparse attention's main kernels. */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH

#include <cuda_runtime.h>

#include "kern/attn.h"
#include "kern/cuda/attn_sparse.cuh"

/* kind: SPARSE_FP8 or SPARSE_BF16; n: heads the tile is made for, 16, 32 or 64 (not with bf16). */
cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, cudaStream_t stream);
/* The same for bf16 rows and groups of up to 64 heads, not in the deterministic mode. */
cudaError_t attn_sparse_wide_launch(const sparse_params &p, cudaStream_t stream);

/* For few rows of FP8 (attn_sparse_direct.cuh): every row's list in n_split x n_join shares of at most SPARSE_SHARE. */
enum { SPARSE_SHARE = 2048, SPARSE_SPLITS = 16 };

struct direct_params {
    sparse_params s; /* of its keys: kv and strides alone */
    const int32_t *slots;
    int64_t slots_stride;
    const int32_t *lane_count; /* [n_row, n_lane] */
    int64_t n_slot;
    int32_t n_lane;
    int32_t n_split; /* 1, 2, 4, 8 or 16: blocks of a cluster            */
    int32_t n_join;  /* clusters of a row: above 1, results go to part_out */
    attn_stats *stats;
};

/* How many clusters of n_split blocks for groups of n heads run at once. */
cudaError_t attn_sparse_direct_fit(int n, int n_split, int *fit);
cudaError_t attn_sparse_direct_launch(const direct_params &p, int n, int64_t n_row,
                                      cudaStream_t stream);

#endif
