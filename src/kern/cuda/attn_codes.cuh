/* attn_codes.cuh - e4m3 codes x the scale of a tile of 128 dims, as fp16. */
#ifndef KVS_KERN_CUDA_ATTN_CODES_CUH
#define KVS_KERN_CUDA_ATTN_CODES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* Largest power of two, smallest, and what a scale of any kind stays below, for which fp16 holds code x scale. */
#define SCALE_POW2_MAX 128.0f
#define SCALE_POW2_MIN 3.0517578125e-05f
#define SCALE_MAX      146.0f

/* The lower or the upper two of four codes. */
static __device__ __forceinline__ uint32_t codes_low(uint32_t four)
{
    uint32_t h;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n}"
        : "=r"(h)
        : "r"(four));
    return h;
}

static __device__ __forceinline__ uint32_t codes_high(uint32_t four)
{
    uint32_t h;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, hi;\n}"
        : "=r"(h)
        : "r"(four));
    return h;
}

static __device__ __forceinline__ uint32_t half2_mul(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

/* Any scale: two codes, as fp16, x scale, rounded to bf16 as every reader of the format does, then as fp16. */
static __device__ __forceinline__ uint32_t codes_round(uint32_t h, float s0, float s1)
{
    const float2 f = __half22float2(*(const half2 *)&h);
    const float a = __bfloat162float(__float2bfloat16_rn(f.x * s0)),
                b = __bfloat162float(__float2bfloat16_rn(f.y * s1));
    const half2 r = __floats2half2_rn(a, b);
    return *(const uint32_t *)&r;
}

#endif
