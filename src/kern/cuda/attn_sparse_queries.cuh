/* kern/cuda/attn_sparse_queries.cuh - the queries of a piece into shared memory, as the B operand of the scores
 * (attn_sparse_sm90.cu).
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_QUERIES_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_QUERIES_CUH

#include "kern/cuda/attn_sparse_tile.cuh"

/* ---- queries ------------------------------------------------------------------------------- */

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

/* Where a lane's words of a query go: eight consecutive dims (a chunk) of a head, in the order in which
 * score_load gives the keys' dims to the product. There a lane t of four has a run of consecutive bytes
 * (32 dims of FP8 codes, 16 of other values), and every step of 16 takes four of its values, two at k = 2t
 * and two at k = 2t + 8. A warp's heads agree in their last three bits, which swizzle the tile. */
template <int N, int FMT> struct query_place {
    uint32_t base[3]; /* of chunks lane, lane + 32, lane + 64 */
    uint32_t word[4];

    __device__ __forceinline__ query_place(uint32_t q, int lane, int warp)
    {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int chunk = lane + 32 * i;
            const bool codes = FMT == SPARSE_FP8 && i < 2;
            const int atom = codes ? chunk / 16 * 2 + chunk % 4 / 2 : chunk / 8;
            const int t = codes ? chunk % 16 / 4 : chunk % 8 / 2;
            base[i] = q + atom * N * 128 + warp * 128 + 4 * t;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = ((lane % 2 * 4 + i) ^ warp) << 4;
    }
};

/* Two heads of this warp from the k-th of its own, every eighth of the group's; zeros past the last. */
template <bool WIDE>
static __device__ __forceinline__ void queries_two(uint4 (&v)[2][3], const uint16_t *q,
                                                   int64_t stride, int k, int n_head)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const bool has = 8 * (k + j) + warp < n_head;
        const uint16_t *head = q + 8 * (k + j) * stride;
#pragma unroll
        for (int i = 0; i < 3; i++)
            v[j][i] = has && (i < 2 || lane < 8) ? query_load<WIDE>(head, lane + 32 * i)
                                                 : make_uint4(0, 0, 0, 0);
    }
}

/* The queries of a piece into shared memory, by the consumers: a warp takes every eighth head, two at a time with the
 * next two in flight. With FP8 keys a head is scaled by a power of two so that its largest value lies in
 * [128, 256): fp16 then holds every bit that counts, and the factor goes back into the scores. */
template <int N, int FMT, bool WIDE>
static __device__ __forceinline__ void queries_store(const sparse_params &p, int64_t row, int head0,
                                                     int n_head)
{
    using L = layout<N, FMT>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const query_place<N, FMT> place(SMEM + L::q, lane, warp);
    const uint16_t *q = p.q + row * p.q_stride_row + (int64_t)(head0 + warp) * p.q_stride_head;
    float scale = 1.0f; /* of head 8 lane + warp */
    if (lane < N / 8 && 8 * lane + warp < n_head) {
        scale = p.scale_log2;
        if (p.q_scale != NULL)
            scale *= p.q_scale[row * p.n_head + head0 + 8 * lane + warp];
    }
    uint4 v[2][3];
    queries_two<WIDE>(v, q, p.q_stride_head, 0, n_head);
#pragma unroll 1
    for (int k = 0; k < N / 8; k += 2) {
        uint4 next[2][3];
        queries_two<WIDE>(next, q, p.q_stride_head, k + 2, n_head);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t amax = __reduce_max_sync(
                ~0u, max(max(query_top(v[j][0]), query_top(v[j][1])), query_top(v[j][2])));
            int e = (int)(amax >> 7) - 127 - 7;
            e = FMT != SPARSE_FP8 || amax == 0 || amax >= 0x7f80 ? 0 : max(e, -120);
            const float mul = __uint_as_float((uint32_t)(127 - e) << 23);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                if (i == 2 && lane >= 8)
                    continue;
                const bool f16 = FMT == SPARSE_FP8 && i < 2;
                const uint32_t at = place.base[i] + 8 * (k + j) * 128;
                sts32(at + place.word[0], query_word(v[j][i].x, mul, f16));
                sts32(at + place.word[1], query_word(v[j][i].y, mul, f16));
                sts32(at + place.word[2], query_word(v[j][i].z, mul, f16));
                sts32(at + place.word[3], query_word(v[j][i].w, mul, f16));
            }
            /* never 0: a key past the last has score -inf, and must have it after the factor */
            const float factor = scale * __uint_as_float((uint32_t)(127 + e) << 23);
            if (lane == k + j)
                sts_f(SMEM + L::qs_at + (8 * (k + j) + warp) * 4,
                      factor == 0.0f ? __int_as_float(1) : factor);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 3; i++)
                v[j][i] = next[j][i];
    }
}

template <int N, int FMT>
static __device__ __forceinline__ void queries_load(const sparse_params &p, int64_t row, int head0,
                                                    int n_head)
{
    if (p.q_wide)
        queries_store<N, FMT, true>(p, row, head0, n_head);
    else
        queries_store<N, FMT, false>(p, row, head0, n_head);
    fence_async();
    named_barrier<BAR_SUM, CONSUMERS>();
}

#endif
