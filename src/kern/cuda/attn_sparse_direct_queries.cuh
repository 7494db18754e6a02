/* attn_sparse_direct_queries.cuh - the queries of a block's one piece into shared memory, as the B operand of the scores
 * (attn_sparse_direct_sm90.cu): all of them asked for at once, where attn_sparse_queries.cuh takes two heads a warp at a time. A
 * block that has nothing else to wait for is ready sooner so; one that goes from row to row is not.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_DIRECT_QUERIES_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_DIRECT_QUERIES_CUH

#include "kern/cuda/attn_query.cuh"
#include "kern/cuda/attn_sparse_tile.cuh"

/* ---- queries ------------------------------------------------------------------------------- */

/* The i-th words of four chunks, for the tile. */
template <bool F16>
static __device__ __forceinline__ uint4 words_of(const uint4 (&v)[4], int i, float mul)
{
    uint32_t w[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
        w[t] = query_word(i == 0 ? v[t].x : i == 1 ? v[t].y : i == 2 ? v[t].z : v[t].w, mul, F16);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* A warp has eight heads at once, of each 64 dims a lane four chunks of eight. The products take dims in the order in
 * which score_load gives them those of the keys: there a lane t of four has a run of consecutive bytes (32 dims of FP8
 * codes, 16 of other values), and every step of 16 takes four of its values, two at k = 2t and two at k = 2t + 8. So
 * the i-th words of the chunks that lie alike in the runs of t = 0 to 3 are 16 bytes of the tile, which the last three bits
 * of the head swizzle: what a lane loads is what it stores, and eight lanes meet all banks. */
template <int FMT> static __device__ __forceinline__ int query_chunk(int atoms, int t, int run)
{
    return FMT == SPARSE_FP8 ? 16 * atoms + 4 * t + run
                             : 8 * (2 * atoms + run / 2) + 2 * t + run % 2;
}

/* The queries of a piece into shared memory, by the consumers. With FP8 keys a head is scaled by a power of two so that
 * its largest value lies in [128, 256): fp16 then holds every bit that counts, and the factor goes back into the
 * scores. Zeros past the last head. */
template <int N, int FMT, bool WIDE>
static __device__ __forceinline__ void all_queries_store(const sparse_params &p, int64_t row, int head0,
                                                     int n_head)
{
    using L = layout<N, FMT>;
    const int lane = threadIdx.x % 32, run = lane / 8, head = threadIdx.x / 32 * 8 + lane % 8;
    if (threadIdx.x / 32 >= N / 8)
        return;
    const bool has = head < n_head;
    const uint16_t *q = p.q + row * p.q_stride_row + (int64_t)(head0 + head) * p.q_stride_head;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 v[4][4], rope[4];
#pragma unroll
    for (int a = 0; a < 4; a++)
#pragma unroll
        for (int t = 0; t < 4; t++)
            v[a][t] = has ? query_load<WIDE>(q, query_chunk<FMT>(a, t, run)) : none;
#pragma unroll
    for (int t = 0; t < 4; t++)
        rope[t] = has && run < 2 ? query_load<WIDE>(q, 64 + 2 * t + run) : none;
    float scale = p.scale_log2;
    if (has && p.q_scale != NULL)
        scale *= p.q_scale[row * p.n_head + head0 + head];

    int e = 0;
    if (FMT == SPARSE_FP8) {
        uint32_t top = 0;
#pragma unroll
        for (int t = 0; t < 4; t++) {
#pragma unroll
            for (int a = 0; a < 4; a++)
                top = max(top, query_top(v[a][t]));
            top = max(top, query_top(rope[t]));
        }
        top = max(top, __shfl_xor_sync(~0u, top, 8));
        top = max(top, __shfl_xor_sync(~0u, top, 16));
        e = query_exponent(top);
    }
    const float mul = power_of_two(-e), factor = has ? scale * power_of_two(e) : 1.0f;
    const uint32_t at = SMEM + L::q + run / 2 * N * 128 + head * 128;
#pragma unroll
    for (int a = 0; a < 4; a++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sts128(at + 2 * a * N * 128 + ((run % 2 * 4 + i) ^ head % 8) * 16,
                   words_of<FMT == SPARSE_FP8>(v[a], i, mul));
    if (run < 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sts128(SMEM + L::q + 8 * N * 128 + head * 128 + ((run * 4 + i) ^ head % 8) * 16,
                   words_of<false>(rope, i, mul));
    /* never 0: a key past the last has score -inf, and must have it after the factor */
    if (run == 0)
        sts_f(SMEM + L::qs_at + head * 4, factor == 0.0f ? __int_as_float(1) : factor);
}

/* A barrier of the consumers is to follow. */
template <int N, int FMT>
static __device__ __forceinline__ void all_queries_load(const sparse_params &p, int64_t row, int head0,
                                                    int n_head)
{
    if (p.q_wide)
        all_queries_store<N, FMT, true>(p, row, head0, n_head);
    else
        all_queries_store<N, FMT, false>(p, row, head0, n_head);
    fence_async();
}

#endif
