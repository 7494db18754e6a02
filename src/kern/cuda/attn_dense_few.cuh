/* attn_dense_few.cuh - the main kernel of dense attention for FP8 rows and few heads (attn_dense_few_sm90.cu), from the host. */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_FEW_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_FEW_CUH

#include "kern/cuda/attn_dense.cuh"

enum {
    FEW_M = 16,     /* rows x heads of an item, at most                        */
    FEW_PITCH = 592 /* of a row in shared memory, and of the box of dense_params.map */
};

/* hi, lo, back, unit: of attn_dense_round.h, pairs of the same; back with its sign turned. */
struct few_params {
    dense_params d;
    uint32_t hi, lo, back;
    float unit;
};

/* plain: codes are values. */
cudaError_t attn_dense_few_launch(const few_params &p, bool plain, cudaStream_t stream);

#endif
