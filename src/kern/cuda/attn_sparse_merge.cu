/* attn_sparse_merge.cu - rows of sparse attention that more than one thread block worked on, put together: of parts of the
 * work, of clusters, or of the segments and lanes of the deterministic mode. A warp has a head, and writes or sends its result.
 */
#include <cuda_bf16.h>

#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/attn_send.cuh"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx.cuh"
#include "kern/exp.h"

enum { MERGE_HEADS = 8, MERGE_THREADS = 32 * MERGE_HEADS };
#define NEG_INF (-__int_as_float(0x7f800000))

/* ---- a head's values ------------------------------------------------------------------------- */

/* 16 of a head's 512 values: four runs of four, 128 apart, so that a warp reads whole lines. */
struct slice {
    float4 v[4];
};

static __device__ slice slice_load(const float *p, int lane)
{
    slice s;
    for (int i = 0; i < 4; i++)
        s.v[i] = *(const float4 *)(p + 128 * i + 4 * lane);
    return s;
}

static __device__ void slice_store(const sparse_params &p, int64_t row, int head, int lane,
                                   const slice &s)
{
    const int64_t at = row * p.out_stride_row + head * p.out_stride_head + 4 * lane;
    for (int i = 0; i < 4; i++) {
        const float x[4] = {s.v[i].x, s.v[i].y, s.v[i].z, s.v[i].w};
        for (int j = 0; j < 4; j++)
            if (p.out_bf16)
                ((__nv_bfloat16 *)p.out)[at + 128 * i + j] = __float2bfloat16_rn(x[j]);
            else
                ((float *)p.out)[at + 128 * i + j] = x[j];
    }
}

/* ---- results --------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t epoch_of(const sparse_params &)
{
    return 0;
}

static __device__ __forceinline__ uint32_t epoch_of(const sparse_send_params &p)
{
    return send_epoch(p.to);
}

/* A head's result, by the warp. */
static __device__ void head_write(const sparse_params &p, uint32_t, int64_t row, int head, int lane,
                                  const slice &s, float lse)
{
    slice_store(p, row, head, lane, s);
    if (lane == 0)
        p.lse[row * p.n_head + head] = lse;
}

static __device__ void head_write(const sparse_send_params &p, uint32_t epoch, int64_t row, int head, int lane,
                                  const slice &s, float lse)
{
    const head_way way(p.to, epoch, row, head,
                       (float *)p.out + row * p.out_stride_row + head * p.out_stride_head);
    for (int i = 0; i < 4; i++)
        way.four(p.to, epoch, 32 * i + lane, s.v[i]);
    if (lane == 0)
        way.lse(p.to, epoch, lse, p.lse + row * p.n_head + head);
}

/* ---- kernels ---------------------------------------------------------------------------------- */

/* A row's head from n partials, of which the first lies in slot `first` and the i-th in `then` + i x step. */
template <class P>
static __device__ void partials_add(const P &p, uint32_t epoch, int64_t row, int head, int lane,
                                    int64_t first, int64_t then, int step, int n)
{
    float top = NEG_INF;
    bool bad = false;
    for (int i = 0; i < n; i++) {
        const float l = p.part_lse[(i == 0 ? first : then + i * step) * p.n_head + head];
        bad = bad || !(l < -NEG_INF);
        top = fmaxf(top, l);
    }
    slice sum = {};
    float weight = 0.0f;
    for (int i = 0; i < n && !bad; i++) {
        const int64_t at = (i == 0 ? first : then + i * step) * p.n_head + head;
        const float l = p.part_lse[at], w = l == NEG_INF ? 0.0f : exp2_approx(l - top);
        const slice s = slice_load(p.part_out + at * SPARSE_VDIM, lane);
        weight += w;
        for (int k = 0; k < 4 && w > 0.0f; k++) {
            sum.v[k].x = fmaf(w, s.v[k].x, sum.v[k].x);
            sum.v[k].y = fmaf(w, s.v[k].y, sum.v[k].y);
            sum.v[k].z = fmaf(w, s.v[k].z, sum.v[k].z);
            sum.v[k].w = fmaf(w, s.v[k].w, sum.v[k].w);
        }
    }
    const float inv = weight > 0.0f ? 1.0f / weight : 0.0f;
    for (int k = 0; k < 4; k++)
        sum.v[k] =
            make_float4(sum.v[k].x * inv, sum.v[k].y * inv, sum.v[k].z * inv, sum.v[k].w * inv);
    head_write(p, epoch, row, head, lane, sum,
               weight > 0.0f ? (top + log2f(weight)) * 0.693147180559945309f : NEG_INF);
    if (lane == 0 && bad && p.n_nan != NULL)
        atomicAdd(p.n_nan, 1ull);
}

/* Rows that several parts worked on: block x is the part in which the row begins. A warp per head. */
template <class P>
static __global__ void __launch_bounds__(MERGE_THREADS)
    attn_sparse_merge(const __grid_constant__ P p)
{
    const int head = blockIdx.y * MERGE_HEADS + threadIdx.x / 32, part = blockIdx.x;
    const uint32_t epoch = epoch_of(p);
    grid_wait();
    const int2 cut = p.cut[part];
    if (cut.x >= 0 && head < p.n_head)
        partials_add(p, epoch, cut.x, head, threadIdx.x % 32, 2 * part + 1, 2 * part, 2,
                     cut.y - part + 1);
}

/* Rows that n_part clusters of attn_sparse_direct worked on: block x is the row. */
template <class P>
static __global__ void __launch_bounds__(MERGE_THREADS)
    attn_sparse_join(const __grid_constant__ P p)
{
    const int head = blockIdx.y * MERGE_HEADS + threadIdx.x / 32;
    const int64_t row = blockIdx.x, first = row * p.n_part;
    const uint32_t epoch = epoch_of(p);
    grid_wait();
    if (head < p.n_head)
        partials_add(p, epoch, row, head, threadIdx.x % 32, first, first, 1, p.n_part);
}

struct node {
    slice s;
    float lse;
};

static __device__ float node_value(merge_weight w, float a, float b)
{
    return merge_node_value(w, a, b);
}

/* a becomes the node of (a, b). */
static __device__ void node_merge(node &a, const node &b)
{
    const merge_weight w = merge_node_weights(a.lse, b.lse);
    for (int k = 0; k < 4; k++) {
        a.s.v[k].x = node_value(w, a.s.v[k].x, b.s.v[k].x);
        a.s.v[k].y = node_value(w, a.s.v[k].y, b.s.v[k].y);
        a.s.v[k].z = node_value(w, a.s.v[k].z, b.s.v[k].z);
        a.s.v[k].w = node_value(w, a.s.v[k].w, b.s.v[k].w);
    }
    a.lse = w.lse;
}

/* Deterministic mode: folds the segments of a lane, then merges the lanes by the tree. */
template <int N_LANE, class P>
static __global__ void __launch_bounds__(MERGE_THREADS)
    attn_sparse_tree(const __grid_constant__ P p)
{
    const int head = blockIdx.y * MERGE_HEADS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x;
    const int n_segment = p.item_per_row / N_LANE;
    const uint32_t epoch = epoch_of(p);
    grid_wait();
    if (head >= p.n_head)
        return;
    node n[N_LANE];
#pragma unroll
    for (int l = 0; l < N_LANE; l++) {
        n[l].s = {};
        n[l].lse = NEG_INF;
        for (int seg = 0; seg < n_segment; seg++) {
            const int64_t item = row * p.item_per_row + l * n_segment + seg;
            if (p.count[item] == 0)
                break;
            node b;
            b.lse = p.part_lse[item * p.n_head + head];
            b.s = slice_load(p.part_out + (item * p.n_head + head) * SPARSE_VDIM, lane);
            node_merge(n[l], b);
        }
    }
#pragma unroll
    for (int d = N_LANE / 2; d >= 1; d /= 2)
#pragma unroll
        for (int l = 0; l < d; l++)
            node_merge(n[l], n[l + d]);
    head_write(p, epoch, row, head, lane, n[0].s, n[0].lse);
}

/* ---- launches ---------------------------------------------------------------------------------- */

template <class P>
static cudaError_t of_heads(void (*kernel)(P), int64_t n, const P &p, cudaStream_t stream)
{
    return launch_kernel(kernel, dim3((unsigned)n, (p.n_head + MERGE_HEADS - 1) / MERGE_HEADS), MERGE_THREADS, 0, true,
                         p, stream);
}

template <class P>
static cudaError_t merge_launch(const P &p, int n_lane, int64_t n_row, cudaStream_t stream)
{
    if (!p.whole)
        return of_heads(attn_sparse_merge<P>, p.n_part, p, stream);
    return n_lane == 1   ? of_heads(attn_sparse_tree<1, P>, n_row, p, stream)
           : n_lane == 2 ? of_heads(attn_sparse_tree<2, P>, n_row, p, stream)
           : n_lane == 4 ? of_heads(attn_sparse_tree<4, P>, n_row, p, stream)
                         : of_heads(attn_sparse_tree<8, P>, n_row, p, stream);
}

cudaError_t attn_sparse_merge_launch(const sparse_params &p, int n_lane, int64_t n_row, const attn_send *to,
                                     cudaStream_t stream)
{
    return to == NULL ? merge_launch(p, n_lane, n_row, stream)
                      : merge_launch(sparse_send_params(p, *to), n_lane, n_row, stream);
}

cudaError_t attn_sparse_join_launch(const sparse_params &p, int64_t n_row, const attn_send *to, cudaStream_t stream)
{
    return to == NULL ? of_heads(attn_sparse_join<sparse_params>, n_row, p, stream)
                      : of_heads(attn_sparse_join<sparse_send_params>, n_row, sparse_send_params(p, *to), stream);
}
