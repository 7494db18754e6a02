/* roof_cuda.cu - the ceilings of memory: streaming reads, and gathers of whole cache rows; and of products.
 *
 * Every value read enters a sum, so no load can be left out; the sum is written where it has a value that
 * random data never gives. */
#include <cuda_runtime.h>

#include "check/roof_cuda.h"
#include "kern/cuda/ptx_tile.cuh"

enum { THREADS = 256, UNROLL = 4, NEVER = 0x5A17C0DE };

static __device__ uint32_t fold(uint4 x)
{
    return (x.x ^ x.y) + (x.z ^ x.w);
}

static __global__ void __launch_bounds__(THREADS) read_kernel(const uint4 *p, int64_t n, uint32_t *sink)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t sum = 0;
    for (; i + (UNROLL - 1) * step < n; i += UNROLL * step) {
        uint4 x[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            x[k] = __ldcs(p + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            sum += fold(x[k]);
        }
    }
    for (; i < n; i += step) {
        sum += fold(p[i]);
    }
    if (sum == NEVER) {
        *sink = sum;
    }
}

/* Each thread of a group of `pieces` lanes has one 16-byte piece of a row; four rows are under way. */
static __global__ void __launch_bounds__(THREADS)
    gather_kernel(const uint8_t *kv, int32_t pieces, const int32_t *slots, int64_t stride,
                  const int32_t *count, int32_t n_lane, uint32_t *sink)
{
    const int32_t row = (int32_t)blockIdx.x;
    int32_t n = 0;
    for (int i = 0; i < n_lane; i++) {
        n += count[(int64_t)row * n_lane + i];
    }
    const int32_t *list = slots + row * stride;
    const int64_t all = (int64_t)n * pieces;
    const int64_t step = (int64_t)gridDim.y * THREADS;
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.y * THREADS + threadIdx.x; i < all; i += UNROLL * step) {
        uint4 x[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const int64_t at = i + k * step;
            const int64_t slot = at < all ? list[at / pieces] : -1;
            x[k] = make_uint4(0, 0, 0, 0);
            if (slot >= 0) {
                x[k] = ((const uint4 *)(kv + slot * 16 * pieces))[at % pieces];
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            sum += fold(x[k]);
        }
    }
    if (sum == NEVER) {
        *sink = sum;
    }
}

void roof_cuda_read(const void *p, int64_t n_bytes, uint32_t *sink, dev_queue *q)
{
    const cudaStream_t stream = (cudaStream_t)q->stream;
    read_kernel<<<q->n_sm * 8, THREADS, 0, stream>>>((const uint4 *)p, n_bytes / 16, sink);
    dev_queue_fail_cuda(q, (int)cudaGetLastError(), "read_kernel");
}

void roof_cuda_gather(const uint8_t *kv, int64_t row_bytes, const int32_t *slots, int64_t stride,
                      const int32_t *count, int32_t n_lane, int32_t n_row, uint32_t *sink, dev_queue *q)
{
    const int want = q->n_sm * 8 / (n_row > 0 ? n_row : 1);
    const dim3 grid((unsigned)n_row, (unsigned)(want < 1 ? 1 : want > 64 ? 64 : want));
    gather_kernel<<<grid, THREADS, 0, (cudaStream_t)q->stream>>>(kv, (int32_t)(row_bytes / 16), slots,
                                                                 stride, count, n_lane, sink);
    dev_queue_fail_cuda(q, (int)cudaGetLastError(), "gather_kernel");
}

/* ---- products -------------------------------------------------------------------------------- */

/* Two groups of 128 threads, each with products of 64 x 128 over 64 of k: 16 and 8 KB of b and a. */
enum { PRODUCT_THREADS = 256, PRODUCT_A = 8192, PRODUCT_B = 16384, PRODUCT_SMEM = 2 * PRODUCT_A + PRODUCT_B };
#define PRODUCT_FLOP (2.0 * 2 * 64 * 128 * 64) /* of a block and step */

static __global__ void __launch_bounds__(PRODUCT_THREADS) products_kernel(int64_t steps, float *sink)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw);
    /* sums of four uniform values are near enough to normal: what counts is how many bits change */
    for (uint32_t i = threadIdx.x; i < PRODUCT_SMEM / 4; i += PRODUCT_THREADS) {
        float x[2];
        for (int j = 0; j < 2; j++) {
            uint64_t h = (2 * i + j + 1) * 0x9E3779B97F4A7C15ull;
            h = (h ^ h >> 31) * 0xBF58476D1CE4E5B9ull;
            h ^= h >> 29;
            x[j] = (float)(int32_t)(h & 0xffff) + (float)(int32_t)(h >> 16 & 0xffff) +
                   (float)(int32_t)(h >> 32 & 0xffff) + (float)(int32_t)(h >> 48) - 131070.0f;
            x[j] *= 1.0f / 37837.0f;
        }
        const __nv_bfloat162 v = __floats2bfloat162_rn(x[0], x[1]);
        sts32(smem + 4 * i, *(const uint32_t *)&v);
    }
    fence_async();
    __syncthreads();
    const uint64_t a = wgmma_tile(smem + threadIdx.x / 128 * PRODUCT_A), b = wgmma_tile(smem + 2 * PRODUCT_A);
    float d[64];
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        wgmma_ss128(d, a + 2 * j, b + 2 * j, j > 0);
    for (int64_t s = 1; s < steps; s++) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma_ss128(d, a + 2 * j, b + 2 * j, 1);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_commit();
    wgmma_wait<0>();
    regs_pin(d);
    float sum = 0.0f;
    for (int i = 0; i < 64; i++)
        sum += d[i];
    if (sum == 12345.678f)
        *sink = sum;
}

void roof_cuda_products(double flop, float *sink, dev_queue *q)
{
    const int blocks = q->n_sm > 0 ? q->n_sm : 1;
    const int64_t steps = (int64_t)(flop / blocks / PRODUCT_FLOP);
    products_kernel<<<blocks, PRODUCT_THREADS, PRODUCT_SMEM, (cudaStream_t)q->stream>>>(steps, sink);
    dev_queue_fail_cuda(q, (int)cudaGetLastError(), "products_kernel");
}
