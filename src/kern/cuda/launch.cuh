/* kern/cuda/launch.cuh - the launch of a kernel that takes one parameter block. */
#ifndef KVS_KERN_CUDA_LAUNCH_CUH
#define KVS_KERN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* early: the kernel begins before what precedes it in the stream has ended; it waits by grid_wait. */
template <class P>
static cudaError_t launch_kernel(void (*kernel)(P), dim3 grid, int threads, size_t shared,
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

#endif
