/* attn_sparse_results.cuh - the sums of a piece on their way out of the consumers' registers, by way of shared memory, so
 * that other blocks of the cluster can read them (attn_sparse_direct_sm90.cu), or that they are sent in whole lines.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_RESULTS_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_RESULTS_CUH

#include "kern/cuda/attn_sparse_softmax.cuh"

/* Bytes from a head to the next: the four heads that a warp stores at a time, two apart, lie in different banks. */
enum { STAGE_HEAD = SPARSE_VDIM * 4 + 16 };

/* The thread's sums of heads [FROM, FROM + COUNT) to `at`, where head FROM begins. */
template <int N, int FMT, int FROM, int COUNT>
static __device__ __forceinline__ void sums_stage(const state<N> &st, const seat &me, uint32_t at)
{
    const int quad = me.lane % 4;
    const int dim =
        256 * me.group + me.thread / 32 % 4 * 16 + (FMT == SPARSE_FP8 ? 2 : 1) * (me.lane / 4);
    const uint32_t own = at + 2 * quad * STAGE_HEAD + dim * 4;
#pragma unroll
    for (int i = FROM / 4; i < (FROM + COUNT) / 4; i++) {
        const int r = i / 2 * 4 + i % 2;
        const uint32_t head = own + ((i - FROM / 4) / 2 * 8 + i % 2) * STAGE_HEAD;
#pragma unroll
        for (int mt = 0; mt < 4; mt++) {
            if (FMT == SPARSE_FP8) {
                sts_f2(head + 256 * mt, st.o[mt][r], st.o[mt][r + 2]);
            } else {
                sts_f(head + 256 * mt, st.o[mt][r]);
                sts_f(head + 256 * mt + 32, st.o[mt][r + 2]);
            }
        }
    }
}

/* Row sums over all warps of both groups: that of head i with thread i of N. A barrier of the consumers is in it. */
template <int N, int FMT>
static __device__ __forceinline__ float sums_of_rows(const state<N> &st, const seat &me)
{
    using L = layout<N, FMT>;
    const int warp = me.thread / 32;
#pragma unroll
    for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
        sts_f(SMEM + L::sum_at + (warp * N + head_of(lanes_head<N>(me.lane) + i, me.lane % 4)) * 4,
              st.l[i]);
    named_barrier<BAR_SUM, CONSUMERS>();
    float l = 0.0f;
    if (me.thread < N)
        for (int i = 0; i < 8; i++)
            l += lds_f(SMEM + L::sum_at + (i * N + me.thread) * 4);
    return l;
}

#endif
