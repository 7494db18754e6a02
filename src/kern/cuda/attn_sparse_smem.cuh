/* attn_sparse_smem.cuh - the shared memory of sparse attention's kernels, asked for by the host. */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_SMEM_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_SMEM_CUH

#include "kern/cuda/attn_sparse_tile.cuh"

/* Whether a block's shared memory begins where SMEM_AT says. Not for the kernel to find out: a way out of it, however
 * cold, costs every access of the kernel an instruction. */
static cudaError_t base_look(const void *kernel)
{
    int device, kept = 0;
    cudaFuncAttributes own;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&kept, cudaDevAttrReservedSharedMemoryPerBlock, device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&own, kernel);
    if (e != cudaSuccess)
        return e;
    return (unsigned)kept == SMEM_AT && own.sharedSizeBytes == 0 ? cudaSuccess
                                                              : cudaErrorInvalidConfiguration;
}

/* Before a launch with `bytes`. known: of the kernel, 0 at first; asking twice does no harm. */
static cudaError_t smem_take(const void *kernel, int bytes, int *known)
{
    if (!__atomic_load_n(known, __ATOMIC_RELAXED)) {
        const cudaError_t e = base_look(kernel);
        if (e != cudaSuccess)
            return e;
        __atomic_store_n(known, 1, __ATOMIC_RELAXED);
    }
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

#endif
