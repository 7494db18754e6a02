/* attn_query.cuh - bf16 queries on their way into shared memory, as bf16 or fp16. */
#ifndef KVS_KERN_CUDA_ATTN_QUERY_CUH
#define KVS_KERN_CUDA_ATTN_QUERY_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* Eight values of a query; WIDE: by one load. */
template <bool WIDE>
static __device__ __forceinline__ uint4 query_load(const uint16_t *q, int chunk)
{
    if (WIDE)
        return __ldg((const uint4 *)q + chunk);
    q += chunk * 8;
    return make_uint4(q[0] | (uint32_t)q[1] << 16, q[2] | (uint32_t)q[3] << 16,
                      q[4] | (uint32_t)q[5] << 16, q[6] | (uint32_t)q[7] << 16);
}

static __device__ __forceinline__ uint32_t query_word(uint32_t w, float mul, bool f16)
{
    const float lo = __uint_as_float(w << 16) * mul, hi = __uint_as_float(w & 0xffff0000u) * mul;
    if (f16) {
        const half2 h = __floats2half2_rn(lo, hi);
        return *(const uint32_t *)&h;
    }
    const __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
    return *(const uint32_t *)&b;
}

/* Largest magnitude among eight bf16 values, as bits. */
static __device__ __forceinline__ uint32_t query_top(uint4 v)
{
    const uint32_t m = 0x7fff7fffu;
    const uint32_t top = __vmaxu2(__vmaxu2(v.x & m, v.y & m), __vmaxu2(v.z & m, v.w & m));
    return max(top & 0xffffu, top >> 16);
}

/* What power of two is to be taken from a head whose largest magnitude is `top` (bits of bf16), so that it lies in
 * [128, 256): fp16 then holds every bit that counts. 0 of a head that is all zeros or not all finite. */
static __device__ __forceinline__ int query_exponent(uint32_t top)
{
    return top == 0 || top >= 0x7f80 ? 0 : max((int)(top >> 7) - 127 - 7, -120);
}

static __device__ __forceinline__ float power_of_two(int e)
{
    return __uint_as_float((uint32_t)(127 + e) << 23);
}

#endif
