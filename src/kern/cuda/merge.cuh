/* kern/cuda/merge.cuh - the merge of up to 8 partials of a (row, head), by tree or fold: what merge.cu and
 * exchange.cu have in common. First the weights of all nodes from the LSE, then the nodes value by value.
 * Files that include this are compiled without contraction, so an fma exists only where kern/exp.h says
 * fmaf. */
#ifndef KVS_KERN_CUDA_MERGE_CUH
#define KVS_KERN_CUDA_MERGE_CUH

#include "kern/exp.h"
#include "num/fmt.h"

enum { MERGE_MAX_PART = 8 };

typedef struct merge_plan {
    merge_weight node[MERGE_MAX_PART - 1]; /* in the order they are applied */
    float lse;
    int n_nan;
} merge_plan;

/* Whether the lse of a part lets its values be read. */
static __device__ __forceinline__ bool merge_is_live(float lse)
{
    return lse < (float)INFINITY && lse > -(float)INFINITY;
}

/* N parts; the loops unroll, so nothing is indexed at run time. Uses up lse. */
template <int N, bool TREE>
static __device__ __forceinline__ merge_plan merge_plan_of(float (&lse)[N])
{
    merge_plan p;
    p.n_nan = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
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

static __device__ __forceinline__ float merge_node_of(const merge_weight &w, float a, float b)
{
    return merge_node_value(w, a, b);
}

static __device__ __forceinline__ float4 merge_node_of(const merge_weight &w, float4 a, float4 b)
{
    return make_float4(merge_node_value(w, a.x, b.x), merge_node_value(w, a.y, b.y),
                       merge_node_value(w, a.z, b.z), merge_node_value(w, a.w, b.w));
}

/* Values of one place of all parts; uses up v. */
template <int N, bool TREE, typename V>
static __device__ __forceinline__ V merge_values(const merge_plan &p, V (&v)[N])
{
    int at = 0;
    if (TREE) {
#pragma unroll
        for (int half = N / 2; half >= 1; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; i++) {
                v[i] = merge_node_of(p.node[at], v[i], v[i + half]);
                at++;
            }
        }
    } else {
#pragma unroll
        for (int i = 1; i < N; i++) {
            v[0] = merge_node_of(p.node[at], v[0], v[i]);
            at++;
        }
    }
    return v[0];
}

/* Four values as bf16, the first in the low half. */
static __device__ __forceinline__ uint2 merge_to_bf16(float4 v)
{
    return make_uint2(bf16_from_f32(v.x).bits | (uint32_t)bf16_from_f32(v.y).bits << 16,
                      bf16_from_f32(v.z).bits | (uint32_t)bf16_from_f32(v.w).bits << 16);
}

#endif
