/* merge.cu - the merge of partials, by tree or fold, with the bits of the reference.
 *
 * A warp owns one (row, head) at a time: every lane works out the same few weights (exp and log of
 * kern/exp.h; this file is compiled without contraction, so an fma exists only where the source says
 * fmaf), then the lanes go over the values four at a time. Bounded by memory: each live part is read once,
 * the result written once. A part of weight 0 is not read. */
#include "kern/cuda/cuda.h"
#include "kern/cuda/merge.cuh"

enum { MAX_PART = MERGE_MAX_PART, WARPS = 8, VEC = 4 };

/* The args by value, without arrays that live elsewhere. */
typedef struct merge_launch {
    const float *out_in[MAX_PART];
    const float *lse_in[MAX_PART];
    merge_args a;
} merge_launch;

/* The nodes of one (row, head). */
template <int N, bool TREE>
static __device__ merge_plan plan_nodes(const merge_launch &m, int64_t row, int64_t head)
{
    float lse[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        lse[i] = m.lse_in[i][row * m.a.lse_stride_row + head];
    }
    return merge_plan_of<N, TREE>(lse);
}

template <int N, bool TREE>
static __device__ float4 merge_four(const merge_launch &m, const merge_plan &p, int64_t row,
                                    int64_t head, int64_t d)
{
    float4 v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float *src = m.out_in[i] + row * m.a.in_stride_row + head * m.a.in_stride_head + d;
        const bool live = merge_is_live(m.lse_in[i][row * m.a.lse_stride_row + head]);
        v[i] = live ? *(const float4 *)src : make_float4(0, 0, 0, 0);
    }
    return merge_values<N, TREE>(p, v);
}

template <int N, bool TREE>
static __global__ void __launch_bounds__(32 * WARPS) merge_kernel(const merge_launch m)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t n = (int64_t)m.a.n_row * m.a.n_head;
    const int64_t first = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    for (int64_t i = first; i < n; i += (int64_t)gridDim.x * WARPS) {
        const int64_t row = i / m.a.n_head;
        const int64_t head = i % m.a.n_head;
        const merge_plan p = plan_nodes<N, TREE>(m, row, head);
        const int64_t to = row * m.a.out_stride_row + head * m.a.out_stride_head;
        for (int64_t d = lane * VEC; d < m.a.dim; d += 32 * VEC) {
            const float4 v = merge_four<N, TREE>(m, p, row, head, d);
            if (m.a.out_type == KVS_DTYPE_BF16) {
                *(uint2 *)((uint16_t *)m.a.out + to + d) = merge_to_bf16(v);
            } else {
                *(float4 *)((float *)m.a.out + to + d) = v;
            }
        }
        if (lane == 0) {
            if (m.a.lse != NULL) {
                m.a.lse[i] = p.lse;
            }
            if (m.a.n_nan != NULL && p.n_nan > 0) {
                atomicAdd((unsigned long long *)m.a.n_nan, (unsigned long long)p.n_nan);
            }
        }
    }
}

const char *merge_refuses_sm90(const void *args)
{
    const merge_args *a = (const merge_args *)args;
    const int64_t out_unit = a->out_type == KVS_DTYPE_BF16 ? 8 : 4; /* elements of 16 bytes */
    bool aligned = cuda_aligned16(a->out) && a->in_stride_row % 4 == 0 &&
                   a->in_stride_head % 4 == 0 && a->out_stride_row % out_unit == 0 &&
                   a->out_stride_head % out_unit == 0;
    if (a->n_part < 1 || a->n_part > MAX_PART) {
        return "merge: the CUDA kernel takes 1 to 8 partials";
    }
    for (int32_t i = 0; i < a->n_part; i++) {
        aligned = aligned && cuda_aligned16(a->out_in[i]);
    }
    return aligned ? NULL : "merge: the CUDA kernel needs rows and heads at multiples of 16 bytes";
}

void merge_sm90(const merge_args *a, dev_queue *q)
{
    if (cuda_refused(q, merge_refuses_sm90(a)) || a->n_row <= 0 || a->n_head <= 0) {
        return;
    }
    merge_launch m;
    m.a = *a;
    for (int32_t i = 0; i < a->n_part; i++) {
        m.out_in[i] = a->out_in[i];
        m.lse_in[i] = a->lse_in[i];
    }
    const unsigned blocks = cuda_blocks(q, (int64_t)a->n_row * a->n_head, WARPS, 8);
    switch (a->n_part * 2 + (a->mode == MERGE_TREE)) {
#define MERGE_CASE(n, tree)                                                                        \
    case n * 2 + tree:                                                                             \
        merge_kernel<n, tree != 0><<<blocks, 32 * WARPS, 0, cuda_stream(q)>>>(m);                  \
        break;
        MERGE_CASE(1, 0)
        MERGE_CASE(1, 1)
        MERGE_CASE(2, 0)
        MERGE_CASE(2, 1)
        MERGE_CASE(3, 0)
        MERGE_CASE(4, 0)
        MERGE_CASE(4, 1)
        MERGE_CASE(5, 0)
        MERGE_CASE(6, 0)
        MERGE_CASE(7, 0)
        MERGE_CASE(8, 0)
        MERGE_CASE(8, 1)
#undef MERGE_CASE
    default:
        dev_queue_fail(q, KVS_INVALID, "merge: a tree has 1, 2, 4 or 8 partials");
        return;
    }
    cuda_launched(q, "merge_kernel");
}
