/* kern/cuda/launch.cuh - the launch of a kernel that takes one parameter block. */
#ifndef KVS_KERN_CUDA_LAUNCH_CUH
#define KVS_KERN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* early: the kernel begins before what precedes it in the stream has ended; it waits by grid_wait.
 * cluster: neighbouring blocks that are one cluster. */
template <class P>
static cudaError_t launch_kernel(void (*kernel)(P), dim3 grid, int threads, size_t shared,
                                 bool early, const P &p, cudaStream_t stream, unsigned cluster = 1)
{
    cudaLaunchAttribute attr[2];
    int n = 0;
    if (early) {
        attr[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attr[n].id = cudaLaunchAttributeClusterDimension;
        attr[n].val.clusterDim.x = cluster;
        attr[n].val.clusterDim.y = attr[n].val.clusterDim.z = 1;
        n++;
    }
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = n;
    return cudaLaunchKernelEx(&c, kernel, p);
}

#endif
