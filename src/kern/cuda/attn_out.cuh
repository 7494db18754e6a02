/* kern/cuda/attn_out.cuh - results of attention kernels to memory. */
#ifndef KVS_KERN_CUDA_ATTN_OUT_CUH
#define KVS_KERN_CUDA_ATTN_OUT_CUH

#include <cuda_bf16.h>
#include <stdint.h>

/* Two neighbours of an output of bf16 or f32, from element `at`; wide: at a multiple of both. */
static __device__ __forceinline__ void out_pair(void *base, bool bf16, bool wide, int64_t at,
                                                float a, float b)
{
    if (!bf16) {
        float *o = (float *)base + at;
        if (wide)
            *(float2 *)o = make_float2(a, b);
        else
            o[0] = a, o[1] = b;
        return;
    }
    uint16_t *o = (uint16_t *)base + at;
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    if (wide)
        *(__nv_bfloat162 *)o = v;
    else
        o[0] = *(const uint16_t *)&v.x, o[1] = *(const uint16_t *)&v.y;
}

#endif
