/* kern/cuda/attn_sparse_queries.cuh - the queries of a piece into shared memory, as the B operand of the scores
 * (attn_sparse_sm90.cu).
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_QUERIES_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_QUERIES_CUH

#include "kern/cuda/attn_query.cuh"
#include "kern/cuda/attn_sparse_tile.cuh"

/* ---- queries ------------------------------------------------------------------------------- */

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
            const int e = FMT == SPARSE_FP8 ? query_exponent(amax) : 0;
            const float mul = power_of_two(-e);
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
            const float factor = scale * power_of_two(e);
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

/* A barrier of the consumers is to follow. */
template <int N, int FMT>
static __device__ __forceinline__ void queries_load(const sparse_params &p, int64_t row, int head0,
                                                    int n_head)
{
    if (p.q_wide)
        queries_store<N, FMT, true>(p, row, head0, n_head);
    else
        queries_store<N, FMT, false>(p, row, head0, n_head);
    fence_async();
}

#endif
