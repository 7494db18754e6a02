/* quant.cu - quantisation of attention queries and of index queries, with the codes of the reference.
 *
 * A warp owns a (row, head): the largest magnitude by shuffles, then codes. Bounded by memory: a vector is
 * read once (it stays in registers) and written once. */
#include <math.h>

#include "kern/cuda/rows.cuh"

enum { Q_PIECE = 8, Q_N_PIECE = KVS_ROW_DIM / Q_PIECE, Q_ROUNDS = (Q_N_PIECE + 31) / 32 };

/* 576 values are 72 pieces of 8; lane l has pieces l, l + 32 and, below 8, l + 64. */
static __global__ void __launch_bounds__(ROW_THREADS) quant_q_kernel(const quant_q_args a)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t n = (int64_t)a.n_row * a.n_head;
    for (int64_t i = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32; i < n;
         i += (int64_t)gridDim.x * ROW_WARPS) {
        const int64_t at = i / a.n_head * a.q_stride_row + i % a.n_head * a.q_stride_head;
        float v[Q_ROUNDS][Q_PIECE];
        float amax = 0.0f;
#pragma unroll
        for (int k = 0; k < Q_ROUNDS; k++) {
            const int piece = lane + 32 * k;
            if (piece < Q_N_PIECE) {
                row_load<Q_PIECE>(a.q, a.q_type, at + Q_PIECE * piece, v[k]);
                amax = fmaxf(amax, row_amax<Q_PIECE>(v[k]));
            }
        }
        const float s = scale_for(a.rule, lanes_max(amax, 32));
#pragma unroll
        for (int k = 0; k < Q_ROUNDS; k++) {
            const int piece = lane + 32 * k;
            if (piece < Q_N_PIECE) {
#pragma unroll
                for (int j = 0; j < Q_PIECE; j++) {
                    v[k][j] = e4m3_to_f32(row_quant(v[k][j], s));
                }
                row_store<Q_PIECE>(a.q_out, KVS_DTYPE_BF16, i * KVS_ROW_DIM + Q_PIECE * piece, v[k]);
            }
        }
        if (lane == 0) {
            a.scale[i] = s;
        }
    }
}

const char *quant_q_refuses_sm90(const void *args)
{
    const quant_q_args *a = (const quant_q_args *)args;
    const int64_t unit = a->q_type == KVS_DTYPE_F32 ? 4 : 8;
    const bool ok = cuda_aligned16(a->q) && cuda_aligned16(a->q_out) && a->q_stride_row % unit == 0 &&
                    a->q_stride_head % unit == 0;
    return ok ? NULL : "quant_q: the CUDA kernel needs queries at multiples of 16 bytes";
}

void quant_q_sm90(const quant_q_args *a, dev_queue *q)
{
    if (cuda_refused(q, quant_q_refuses_sm90(a)) || a->n_row <= 0 || a->n_head <= 0) {
        return;
    }
    const unsigned blocks = cuda_blocks(q, (int64_t)a->n_row * a->n_head, ROW_WARPS, 8);
    quant_q_kernel<<<blocks, ROW_THREADS, 0, cuda_stream(q)>>>(*a);
    cuda_launched(q, "quant_q_kernel");
}

/* ---- index queries ---- */

static __global__ void __launch_bounds__(ROW_THREADS)
    index_quant_kernel(const index_quant_args a, float by_dim, float by_head)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t n = (int64_t)a.n_row * a.n_head;
    uint32_t n_nan = 0;
    for (int64_t i = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32; i < n;
         i += (int64_t)gridDim.x * ROW_WARPS) {
        const int64_t at = i * KVS_INDEX_DIM + 4 * lane;
        float v[4];
        float s = 1.0f;
        row_load<4>(a.q, a.q_type, at, v);
        n_nan += row_count_nan<4>(v);
        if (a.q8 != NULL) {
            s = scale_index(lanes_max(row_amax<4>(v), 32));
            *(uint32_t *)(a.q8 + at) = row_quant(v[0], s) | (uint32_t)row_quant(v[1], s) << 8 |
                                       (uint32_t)row_quant(v[2], s) << 16 |
                                       (uint32_t)row_quant(v[3], s) << 24;
        } else {
            *(float4 *)(a.q_f32 + at) = make_float4(v[0], v[1], v[2], v[3]);
        }
        if (lane == 0) {
            const float w = a.w[i];
            n_nan += (uint32_t)f32_is_nan(w);
            a.w_out[i] = w * s * by_dim * by_head;
        }
    }
    warp_count(a.n_nan, n_nan);
}

const char *index_quant_refuses_sm90(const void *args)
{
    const index_quant_args *a = (const index_quant_args *)args;
    const void *out = a->q8 != NULL ? (const void *)a->q8 : (const void *)a->q_f32;
    return cuda_aligned16(a->q) && cuda_aligned16(out)
               ? NULL
               : "index_quant: the CUDA kernel needs queries at multiples of 16 bytes";
}

void index_quant_sm90(const index_quant_args *a, dev_queue *q)
{
    if (cuda_refused(q, index_quant_refuses_sm90(a)) || a->n_row <= 0 || a->n_head <= 0) {
        return;
    }
    const float by_dim = (float)(1.0 / sqrt((double)KVS_INDEX_DIM));
    const float by_head = (float)(1.0 / sqrt((double)a->n_head));
    const unsigned blocks = cuda_blocks(q, (int64_t)a->n_row * a->n_head, ROW_WARPS, 8);
    index_quant_kernel<<<blocks, ROW_THREADS, 0, cuda_stream(q)>>>(*a, by_dim, by_head);
    cuda_launched(q, "index_quant_kernel");
}
