/* kern/cuda/rows.cuh - how the kernels that move rows read, quantise and write a few values of one.
 *
 * Everything gives the bits of num/fmt.h on the host. What differs there and here is NaN: a CUDA operation
 * answers every NaN by 0x7FFFFFFF, so a NaN is passed by around the arithmetic, by its bits. */
#ifndef KVS_KERN_CUDA_ROWS_CUH
#define KVS_KERN_CUDA_ROWS_CUH

#include "kern/cuda/cuda.h"
#include "num/fmt.h"
#include "num/kvfmt.h"

enum { ROW_WARPS = 8, ROW_THREADS = 32 * ROW_WARPS };

/* N = 4, 8, 16, ... values of type f32 or bf16 beginning at element `at`, in pieces of 16 bytes (8 for four
 * of bf16). */
template <int N>
static __device__ __forceinline__ void row_load(const void *base, int32_t type, int64_t at, float (&v)[N])
{
    if (type == KVS_DTYPE_F32) {
        const float4 *src = (const float4 *)((const float *)base + at);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float4 x = src[i];
            v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
        }
        return;
    }
    uint32_t w[N / 2];
    const uint16_t *src = (const uint16_t *)base + at;
    if (N == 4) {
        *(uint2 *)w = *(const uint2 *)src;
    } else {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 x = ((const uint4 *)src)[i];
            w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
        }
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        v[2 * i] = f32_from_bits(w[i] << 16);
        v[2 * i + 1] = f32_from_bits(w[i] & 0xFFFF0000u);
    }
}

/* N = 8, 16, ... values to f32 or, rounded, to bf16. */
template <int N>
static __device__ __forceinline__ void row_store(void *base, int32_t type, int64_t at, const float (&v)[N])
{
    if (type == KVS_DTYPE_F32) {
        float4 *to = (float4 *)((float *)base + at);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            to[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        }
        return;
    }
    uint4 *to = (uint4 *)((uint16_t *)base + at);
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[j] = (uint32_t)bf16_from_f32(v[8 * i + 2 * j]).bits |
                   (uint32_t)bf16_from_f32(v[8 * i + 2 * j + 1]).bits << 16;
        }
        to[i] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* e4m3(x / s) for s > 0. */
static __device__ __forceinline__ uint8_t row_quant(float x, float s)
{
    return e4m3_from_f32(f32_is_nan(x) ? x : x / s);
}

/* bf16_rne(code * s) as an f32, NaN and infinite scales included. */
static __device__ __forceinline__ float row_dequant(uint32_t code, float s)
{
    const float x = e4m3_to_f32((uint8_t)code);
    const float y = x * s;
    if (!f32_is_nan(y)) {
        return bf16_round(y);
    }
    /* of two NaN the first; without one it is 0 x infinity, which x86 answers by 0xFFC00000 */
    return bf16_round(f32_is_nan(x) ? x : f32_is_nan(s) ? s : f32_from_bits(0xFFC00000u));
}

template <int N>
static __device__ __forceinline__ float row_amax(const float (&v)[N])
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        amax = amax_add(amax, v[i]);
    }
    return amax;
}

template <int N>
static __device__ __forceinline__ uint32_t row_count_nan(const float (&v)[N])
{
    uint32_t n = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        n += (uint32_t)f32_is_nan(v[i]);
    }
    return n;
}

/* The largest of `width` lanes, a power of two, in all of them. Finite values only: fmaxf is exact. */
static __device__ __forceinline__ float lanes_max(float x, int width)
{
    for (int d = width / 2; d > 0; d /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
    }
    return x;
}

/* The sum over a warp is added to *to (may be NULL) once; the whole warp calls. */
static __device__ __forceinline__ void warp_count(uint64_t *to, uint32_t n)
{
    const uint32_t sum = __reduce_add_sync(0xFFFFFFFFu, n);
    if (to != NULL && sum > 0 && threadIdx.x % 32 == 0) {
        atomicAdd((unsigned long long *)to, (unsigned long long)sum);
    }
}

#endif
