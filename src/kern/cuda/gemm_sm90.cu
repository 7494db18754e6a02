/* gemm_sm90.cu - products with a weight matrix on sm_90a: y = x W^T, weights of bf16, or of e4m3 with block scales
 * made bf16 as they come. It is there for keys and values of heads from latents (mha.h), rows by the hundred.
 *
 * A block of threads has 128 rows of x and 128 outputs: two groups of 64 rows, steps of 64 of n_in through a ring
 * of three places, operands as tiles of wgmma_tile. What lies at multiples of 16 bytes comes by asynchronous copies,
 * the rest, and codes, through registers. Places beyond a row, an output or n_in hold zeros.
 *
 * An output is a sum over n_in in steps of 16 from the first on, whatever shares the call: one shape of product and
 * one order, also where a single row is asked for.
 */
#include <cuda_fp8.h>
#include <cuda_pipeline_primitives.h>

#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum {
    ROWS = 128, /* of x, and of w */
    STEP = 64,
    RING = 3,
    THREADS = 256,
    TILE_BYTES = ROWS * STEP * 2,
    PLACE_BYTES = 2 * TILE_BYTES, /* x, w */
    SMEM_BYTES = RING * PLACE_BYTES,
    PIECE = 8,                             /* values of 16 bytes */
    PIECES = ROWS * STEP / PIECE / THREADS /* of a tile a thread brings */
};

typedef struct gemm_params {
    gemm_args a;
    int32_t x_wide, w_wide; /* rows begin at multiples of 16 bytes, of codes 8 */
    int32_t y_wide;         /* pairs of y are aligned                          */
} gemm_params;

/* ---- bringing tiles ---------------------------------------------------------------------------- */

/* n of 8 values, zeros behind them. */
static __device__ __forceinline__ uint4 values_of(const uint16_t *from, int n)
{
    uint32_t v[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        v[i] = i < n ? from[i] : 0;
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

static __device__ __forceinline__ void values_bring(uint32_t to, const uint16_t *from, int n,
                                                    bool wide)
{
    n = min(n, (int)PIECE);
    if (wide)
        copy16(to, from, n > 0 ? 2 * n : 0);
    else
        sts128(to, values_of(from, n));
}

static __device__ __forceinline__ uint32_t two_of(uint32_t codes, float s0, float s1)
{
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
    const float2 f = __half22float2(*(const __half2 *)&h);
    const __nv_bfloat162 v = __floats2bfloat162_rn(f.x * s0, f.y * s1);
    return *(const uint32_t *)&v;
}

/* Elements [i, i + 8) of row o of the slice, n of which there are. */
static __device__ __forceinline__ uint4 codes_of(const gemm_mat &w, int o, int i, int n, bool wide)
{
    const uint8_t *from = (const uint8_t *)w.data + o * w.stride + i;
    const float *scale = w.scale + (int64_t)((w.row0 + o) / GEMM_BLOCK) * w.scale_stride;
    uint32_t v[4] = {0, 0, 0, 0};
    if (n >= PIECE && wide) {
        const uint2 c = *(const uint2 *)from;
        const float s = scale[(w.col0 + i) / GEMM_BLOCK];
        v[0] = two_of(c.x & 0xffff, s, s), v[1] = two_of(c.x >> 16, s, s);
        v[2] = two_of(c.y & 0xffff, s, s), v[3] = two_of(c.y >> 16, s, s);
        return make_uint4(v[0], v[1], v[2], v[3]);
    }
#pragma unroll
    for (int j = 0; j < PIECE; j++)
        if (j < n)
            v[j / 2] |= (two_of(from[j], scale[(w.col0 + i + j) / GEMM_BLOCK], 0.0f) & 0xffff)
                        << 16 * (j % 2);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

static __device__ __forceinline__ uint32_t piece_at(int r, int c)
{
    return (uint32_t)(r * 128 + ((c ^ (r & 7)) << 4));
}

/* Step `step` of the block's rows of x and w to a place of the ring. */
template <bool CODES>
static __device__ __forceinline__ void step_bring(const gemm_params &p, const uint16_t *x,
                                                  const uint16_t *w, int row0, int out0, int step,
                                                  uint32_t to)
{
    const gemm_args &a = p.a;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const int at = threadIdx.x + THREADS * j, r = at / 8, c = at % 8;
        const int i = step * STEP + c * PIECE, n = a.w.n_in - i;
        const bool row = row0 + r < a.n_row && n > 0, out = out0 + r < a.w.n_out && n > 0;
        values_bring(to + piece_at(r, c), row ? x + (row0 + r) * a.x_stride + i : x, row ? n : 0,
                     p.x_wide);
        const uint32_t at_w = to + TILE_BYTES + piece_at(r, c);
        if constexpr (CODES)
            sts128(at_w, codes_of(a.w, out ? out0 + r : 0, i, out ? n : 0, p.w_wide));
        else
            values_bring(at_w, out ? w + (out0 + r) * a.w.stride + i : w, out ? n : 0, p.w_wide);
    }
    __pipeline_commit();
}

/* ---- products ---------------------------------------------------------------------------------- */

/* A thread's two rows of the group, 8 apart: 4 j + 0, 1 and 2, 3 at outputs 8 j + 2 (lane % 4), + 1. */
static __device__ __forceinline__ void sums_store(const gemm_params &p, const float (&sum)[64],
                                                  float *y, int row0, int out0)
{
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = row + 8 * (i % 2), o = out0 + 8 * (i / 2) + lane % 4 * 2;
        if (r >= p.a.n_row)
            continue;
        float *to = y + r * p.a.y_stride + o;
        if (p.y_wide && o + 1 < p.a.w.n_out) {
            *(float2 *)to = make_float2(sum[2 * i], sum[2 * i + 1]);
        } else {
            if (o < p.a.w.n_out)
                to[0] = sum[2 * i];
            if (o + 1 < p.a.w.n_out)
                to[1] = sum[2 * i + 1];
        }
    }
}

template <bool CODES>
static __global__ void __launch_bounds__(THREADS, 2)
    gemm_main(const __grid_constant__ gemm_params p)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const gemm_args &a = p.a;
    const uint32_t smem = ptx_shared(raw), group = threadIdx.x / 128;
    const int row0 = blockIdx.x * ROWS, out0 = blockIdx.y * ROWS;
    const int n_step = (a.w.n_in + STEP - 1) / STEP;
    const uint16_t *x = (const uint16_t *)a.x + blockIdx.z * a.x_batch;
    const uint16_t *w = (const uint16_t *)a.w.data + (CODES ? 0 : blockIdx.z * a.w_batch);
    float sum[64];
#pragma unroll
    for (int i = 0; i < 64; i++)
        sum[i] = 0.0f;
    for (int s = 0; s < RING - 1; s++)
        step_bring<CODES>(p, x, w, row0, out0, s, smem + s * PLACE_BYTES);
    for (int s = 0; s < n_step; s++) {
        __pipeline_wait_prior(RING - 2);
        fence_async();
        __syncthreads(); /* step s is there, and what step s - 1 read is free */
        const uint32_t at = smem + s % RING * PLACE_BYTES;
        const uint64_t dx = wgmma_tile(at + group * (TILE_BYTES / 2)),
                       dw = wgmma_tile(at + TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEP / 16; j++)
            wgmma_ss128(sum, dx + 2 * j, dw + 2 * j, 1);
        wgmma_commit();
        step_bring<CODES>(p, x, w, row0, out0, s + RING - 1,
                          smem + (s + RING - 1) % RING * PLACE_BYTES);
        wgmma_wait<0>();
        regs_pin(sum);
    }
    sums_store(p, sum, a.y + blockIdx.z * a.y_batch, row0, out0);
}

/* ---- the op ------------------------------------------------------------------------------------ */

size_t gemm_scratch_sm90(const gemm_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}

static int64_t tiles_of(int32_t n)
{
    return ((int64_t)n + ROWS - 1) / ROWS;
}

enum { MOST_IN = 1 << 30 };

const char *gemm_refuses_sm90(const void *args)
{
    const gemm_args *a = (const gemm_args *)args;
    if (a->w.type != GEMM_BF16 && a->w.type != GEMM_FP8)
        return "sm90 takes weights of bf16 and fp8";
    if (a->w.type == GEMM_FP8 && a->n_batch > 1)
        return "sm90 takes one product of fp8 weights a call";
    if (a->w.n_in > MOST_IN)
        return "sm90 takes up to 2^30 inputs";
    if (tiles_of(a->w.n_out) > 65535 || a->n_batch > 65535)
        return "sm90 takes up to 8388480 outputs and 65535 products a call";
    return NULL;
}

static int32_t rows_wide(const void *p, int64_t stride, int64_t batch)
{
    return cuda_aligned16(p) && (stride | batch) % PIECE == 0;
}

template <bool CODES> static cudaError_t main_launch(const gemm_params &p, dev_queue *q)
{
    static uint64_t shared_set;
    cuda_shared_max(gemm_main<CODES>, SMEM_BYTES, &shared_set);
    const dim3 grid((unsigned)tiles_of(p.a.n_row), (unsigned)tiles_of(p.a.w.n_out),
                    (unsigned)p.a.n_batch);
    return launch_kernel(gemm_main<CODES>, grid, THREADS, SMEM_BYTES, false, p, cuda_stream(q));
}

void gemm_sm90(const gemm_args *a, dev_queue *q)
{
    if (cuda_refused(q, gemm_refuses_sm90(a)) || a->n_row <= 0 || a->w.n_out <= 0)
        return;
    const int64_t w_batch = a->n_batch > 1 ? a->w_batch : 0,
                  x_batch = a->n_batch > 1 ? a->x_batch : 0,
                  y_batch = a->n_batch > 1 ? a->y_batch : 0;
    const bool codes = a->w.type == GEMM_FP8;
    gemm_params p = {};
    p.a = *a;
    p.x_wide = rows_wide(a->x, a->x_stride, x_batch);
    p.w_wide = codes ? (uintptr_t)a->w.data % PIECE == 0 && (a->w.stride | a->w.col0) % PIECE == 0
                     : rows_wide(a->w.data, a->w.stride, w_batch);
    p.y_wide = (uintptr_t)a->y % 8 == 0 && (a->y_stride | y_batch) % 2 == 0;
    const cudaError_t e = codes ? main_launch<true>(p, q) : main_launch<false>(p, q);
    dev_queue_fail_cuda(q, (int)e, "gemm");
}
