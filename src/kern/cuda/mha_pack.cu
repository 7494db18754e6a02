/* mha_pack.cu - keys and values to tiles of bf16 (mha_sm90.cuh). A block of threads has a block of keys of one head, or
 * the rope parts of a block; a warp has a key at a time, a lane 8 of its values, or twice 8.
 */
#include <cuda_bf16.h>

#include "kern/cuda/launch.cuh"
#include "kern/cuda/mha_sm90.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* Values [d, d + 8) of a row of n, zeros behind it. */
static __device__ __forceinline__ void values_load(const float *row, int d, int n, bool wide,
                                                   float (&x)[8])
{
    if (wide && d + 8 <= n) {
        const float4 a = __ldcs((const float4 *)(row + d)),
                     b = __ldcs((const float4 *)(row + d + 4));
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = d + i < n ? row[d + i] : 0.0f;
}

static __device__ __forceinline__ uint32_t pair_of(float a, float b)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&v;
}

static __device__ __forceinline__ bool pair_finite(uint32_t v)
{
    return (v & 0x7f80u) != 0x7f80u && (v & 0x7f800000u) != 0x7f800000u;
}

/* Piece `c` of key `key` of a head: 8 dims of the key, or from NOPE on 8 values. Whether they are wild; in *odd whether
 * a value is not finite. */
template <class F>
static __device__ __forceinline__ bool piece_load(const mha_params &p, int head, int key, int c,
                                                  uint32_t (&v)[4], bool *odd)
{
    const bool values = c >= F::NOPE / 8;
    v[0] = v[1] = v[2] = v[3] = 0;
    if (key < p.n_key) {
        float x[8];
        const float *row = p.kv + key * p.kv_stride_key + head * p.kv_stride_head;
        values_load(values ? row + p.nope : row, 8 * (values ? c - F::NOPE / 8 : c),
                    values ? p.v_dim : p.nope, p.kv_wide, x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = pair_of(x[2 * i], x[2 * i + 1]);
    }
    bool wild = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wild = wild || (values ? mha_pair_over<MHA_V_EXP>(v[i]) : mha_pair_over<MHA_QK_EXP>(v[i]));
        *odd = *odd || (values && !pair_finite(v[i]));
    }
    return wild;
}

/* Key `key` of a head by a warp. Returns its wildness, and in *bad whether a value was not finite; the same for all
 * lanes. */
template <class F>
static __device__ __forceinline__ bool key_pack(const mha_params &p, int head, int key, int lane,
                                                bool *bad)
{
    constexpr int KEY_PIECES = F::NOPE / 8, PIECES = KEY_PIECES + F::VDIM / 8,
                  N = (PIECES + 31) / 32;
    static_assert(KEY_PIECES % 8 == 0 && PIECES % 8 == 0, "columns are whole");
    uint32_t v[N][4];
    bool wild = false, odd = false;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane + 32 * i < PIECES)
            wild = piece_load<F>(p, head, key, lane + 32 * i, v[i], &odd) || wild;
    *bad = __any_sync(~0u, odd);
    const int r = key % F::STEP;
    uint8_t *tile = p.tiles + ((int64_t)head * p.n_tile + key / F::STEP) * F::TILE_BYTES;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = lane + 32 * i, d = c - KEY_PIECES;
        if (c >= PIECES)
            continue;
        if (*bad && d >= 0)
            v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
        const uint32_t at = d >= 0 ? F::HEAD_BYTES + r / 64 * (F::VDIM / 64 * 8192) + d / 8 * 8192 +
                                         mha_piece(r % 64, d % 8)
                                   : c / 8 * F::KEY_COL + mha_piece(r, c % 8);
        *(uint4 *)(tile + at) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    }
    return __any_sync(~0u, wild);
}

/* Rope parts of four keys by a warp: 8 lanes have one. */
template <class F>
static __device__ __forceinline__ bool rope_pack(const mha_params &p, int key, int c)
{
    uint32_t v[4] = {0, 0, 0, 0};
    if (key < p.n_key) {
        const uint16_t *from = p.rope + key * p.rope_stride + 8 * c;
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = (uint32_t)from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
    }
    uint8_t *tile = p.rope_tiles + (int64_t)(key / F::STEP) * F::ROPE_BYTES;
    *(uint4 *)(tile + mha_piece(key % F::STEP, c)) = make_uint4(v[0], v[1], v[2], v[3]);
    return mha_pair_over<MHA_QK_EXP>(v[0]) || mha_pair_over<MHA_QK_EXP>(v[1]) ||
           mha_pair_over<MHA_QK_EXP>(v[2]) || mha_pair_over<MHA_QK_EXP>(v[3]);
}

template <class F>
static __global__ void __launch_bounds__(THREADS) mha_pack(const __grid_constant__ mha_params p)
{
    __shared__ int first, wild;
    const int head = blockIdx.x % (p.n_head + 1), block = blockIdx.x / (p.n_head + 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        first = MHA_BLOCK, wild = 0;
    __syncthreads();
    const int key0 = block * MHA_BLOCK, end = min(key0 + MHA_BLOCK, p.n_tile * F::STEP);
    bool some = false;
    if (head == p.n_head) {
        for (int key = key0 + threadIdx.x / 8; key < end; key += THREADS / 8)
            some = rope_pack<F>(p, key, threadIdx.x % 8) || some;
    } else {
#pragma unroll 4
        for (int key = key0 + warp; key < end; key += WARPS) {
            bool bad;
            some = key_pack<F>(p, head, key, lane, &bad) || some;
            if (bad && lane == 0)
                atomicMin(&first, key - key0);
        }
    }
    if (some)
        wild = MHA_WILD;
    __syncthreads();
    if (threadIdx.x == 0)
        p.flags[(int64_t)head * p.n_block + block] = first | wild;
}

template <class F> cudaError_t mha_pack_launch(const mha_params &p, cudaStream_t stream)
{
    return launch_kernel(mha_pack<F>, dim3((unsigned)p.n_block * (unsigned)(p.n_head + 1)), THREADS,
                         0, false, p, stream);
}

template cudaError_t mha_pack_launch<mha_narrow>(const mha_params &p, cudaStream_t stream);
template cudaError_t mha_pack_launch<mha_wide>(const mha_params &p, cudaStream_t stream);
