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

/* Four neighbours; wide: at a multiple of four. */
static __device__ __forceinline__ void out_four(void *base, bool bf16, bool wide, int64_t at,
                                                float4 v)
{
    if (!wide) {
        out_pair(base, bf16, false, at, v.x, v.y);
        out_pair(base, bf16, false, at + 2, v.z, v.w);
    } else if (bf16) {
        const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y),
                             b = __floats2bfloat162_rn(v.z, v.w);
        *(uint2 *)((uint16_t *)base + at) = make_uint2(*(const uint32_t *)&a, *(const uint32_t *)&b);
    } else {
        *(float4 *)((float *)base + at) = v;
    }
}

#endif
