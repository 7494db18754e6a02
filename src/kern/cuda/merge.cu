/* merge.cu - the merge of partials, by tree or fold, with the bits of the reference.
 *
 * A warp owns one (row, head) at a time: every lane works out the same few weights (exp and log of
 * kern/exp.h; this file is compiled without contraction, so an fma exists only where the source says
 * fmaf), then the lanes go over the values four at a time. Bounded by memory: each live part is read once,
 * the result written once. A part of weight 0 is not read. */
#include "kern/cuda/cuda.h"
#include "kern/exp.h"
#include "num/fmt.h"

enum { MAX_PART = 8, WARPS = 8, VEC = 4 };

/* The args by value, without arrays that live elsewhere. */
typedef struct merge_launch {
    const float *out_in[MAX_PART];
    const float *lse_in[MAX_PART];
    merge_args a;
} merge_launch;

typedef struct merge_plan {
    merge_weight node[MAX_PART - 1]; /* in the order they are applied */
    float lse;
    int n_nan;
} merge_plan;

/* The nodes of one (row, head). N parts; the loops unroll, so nothing is indexed at run time. */
template <int N, bool TREE>
static __device__ merge_plan plan_nodes(const merge_launch &m, int64_t row, int64_t head)
{
    merge_plan p;
    float lse[N];
    p.n_nan = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        lse[i] = m.lse_in[i][row * m.a.lse_stride_row + head];
        p.n_nan += lse[i] != lse[i];
        lse[i] = merge_clean_lse(lse[i]);
    }
    int at = 0;
    if (TREE) {
#pragma unroll
        for (int half = N / 2; half >= 1; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; i++) {
                p.node[at] = merge_node_weights(lse[i], lse[i + half]);
                lse[i] = p.node[at].lse;
                at++;
            }
        }
    } else {
#pragma unroll
        for (int i = 1; i < N; i++) {
            p.node[at] = merge_node_weights(lse[0], lse[i]);
            lse[0] = p.node[at].lse;
            at++;
        }
    }
    p.lse = lse[0];
    return p;
}

/* Whether the lse of a part lets its values be read. */
static __device__ bool is_live(float lse)
{
    return lse < (float)INFINITY && lse > -(float)INFINITY;
}

static __device__ float4 merge_node_four(const merge_weight &w, float4 a, float4 b)
{
    return make_float4(merge_node_value(w, a.x, b.x), merge_node_value(w, a.y, b.y),
                       merge_node_value(w, a.z, b.z), merge_node_value(w, a.w, b.w));
}

template <int N, bool TREE>
static __device__ float4 merge_four(const merge_launch &m, const merge_plan &p, int64_t row,
                                    int64_t head, int64_t d)
{
    float4 v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float *src = m.out_in[i] + row * m.a.in_stride_row + head * m.a.in_stride_head + d;
        v[i] = is_live(m.lse_in[i][row * m.a.lse_stride_row + head]) ? *(const float4 *)src
                                                                     : make_float4(0, 0, 0, 0);
    }
    int at = 0;
    if (TREE) {
#pragma unroll
        for (int half = N / 2; half >= 1; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; i++) {
                v[i] = merge_node_four(p.node[at], v[i], v[i + half]);
                at++;
            }
        }
    } else {
#pragma unroll
        for (int i = 1; i < N; i++) {
            v[0] = merge_node_four(p.node[at], v[0], v[i]);
            at++;
        }
    }
    if (N == 1 && !is_live(m.lse_in[0][row * m.a.lse_stride_row + head])) {
        return make_float4(0, 0, 0, 0);
    }
    return v[0];
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
                const uint32_t lo = bf16_from_f32(v.x).bits | (uint32_t)bf16_from_f32(v.y).bits << 16;
                const uint32_t hi = bf16_from_f32(v.z).bits | (uint32_t)bf16_from_f32(v.w).bits << 16;
                *(uint2 *)((uint16_t *)m.a.out + to + d) = make_uint2(lo, hi);
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
