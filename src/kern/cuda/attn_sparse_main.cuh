/* attn_sparse_main.cuh - launches of sparse attention: any of its kernels, and the main one. */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_MAIN_CUH

#include <cuda_runtime.h>

#include "kern/cuda/attn_sparse.cuh"

/* early: the kernel begins before what precedes it in the stream has ended; it waits by grid_wait. */
template <class P>
static cudaError_t sparse_launch(void (*kernel)(P), dim3 grid, int threads, size_t shared,
                                 bool early, const P &p, cudaStream_t stream)
{
    cudaLaunchAttribute attr;
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = stream;
    c.attrs = &attr;
    c.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&c, kernel, p);
}

/* kind: SPARSE_FP8 or SPARSE_BF16; n: heads the tile is made for, 16, 32 or 64 (not with bf16). */
cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, cudaStream_t stream);

#endif
