/* attn_sparse_main.cuh - the launches of sparse attention's main kernels. */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH

#include <cuda_runtime.h>

#include "kern/attn.h"
#include "kern/cuda/attn_send.h"
#include "kern/cuda/attn_sparse.cuh"

/* The same of launches that send: kernels of their own, so that those that do not stay as they are. */
struct sparse_send_params : sparse_params {
    attn_send to;

    sparse_send_params(const sparse_params &p, const attn_send &s) : sparse_params(p), to(s)
    {
    }
};

/* kind: SPARSE_FP8 or SPARSE_BF16; n: heads the tile is made for, 16, 32 or 64 (not with bf16). to: results of rows that
 * nothing is cut of are sent; of rows of FP8, not in the deterministic mode; NULL: they are written. */
cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, const attn_send *to, cudaStream_t stream);
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

struct direct_send_params : direct_params {
    attn_send to;

    direct_send_params(const direct_params &p, const attn_send &of) : direct_params(p), to(of)
    {
    }
};

/* How many clusters of n_split blocks for groups of n heads run at once. */
cudaError_t attn_sparse_direct_fit(int n, int n_split, int *fit);
/* to: as above, where n_join is 1. */
cudaError_t attn_sparse_direct_launch(const direct_params &p, int n, int64_t n_row, const attn_send *to,
                                      cudaStream_t stream);

/* Rows that the main kernels left partials of: in the deterministic mode (whole) all n_row; or the n_row of direct kernels with
 * n_part clusters a row. */
cudaError_t attn_sparse_merge_launch(const sparse_params &p, int n_lane, int64_t n_row, const attn_send *to,
                                     cudaStream_t stream);
cudaError_t attn_sparse_join_launch(const sparse_params &p, int64_t n_row, const attn_send *to, cudaStream_t stream);

#endif
