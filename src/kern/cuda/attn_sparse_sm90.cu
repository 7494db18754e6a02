/* attn_sparse_sm90.cu - sparse attention over packed keys, the main kernel (attn_sparse.cuh).
 *
 * Keys are the A operand of both products, straight from the cache's bytes: S^T = K Q^T has 64 keys on M
 * and the heads on N, O^T = V^T P^T has 64 value dims on M. So few heads cost few products, and a key is
 * never written back to shared memory in another format: FP8 codes become fp16 fragments in registers
 * (exact for scales that are powers of two), once for S and once for O. Dims are free to go through a
 * product in any order: a lane takes 16 consecutive bytes of a row, and the query tile is laid out to
 * match (attn_sparse_queries.cuh).
 *
 * Thread block: two warp groups of consumers and four warps that copy keys into a ring of tiles. Consumer
 * group g scores the even (0) or odd (1) tiles; both meet once, when P is there (attn_sparse_softmax.cuh), then each adds
 * V^T P^T of both tiles for its half of the 512 value dims.
 */
#include "kern/cuda/attn_sparse_out.cuh"
#include "kern/cuda/attn_sparse_keys.cuh"
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/attn_sparse_queries.cuh"
#include "kern/cuda/attn_sparse_pair.cuh"
#include "kern/cuda/attn_sparse_smem.cuh"
#include "kern/cuda/launch.cuh"

/* ---- results ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void out_one(void *base, bool bf16, int64_t at, float a)
{
    if (bf16)
        ((__nv_bfloat16 *)base)[at] = __float2bfloat16_rn(a);
    else
        ((float *)base)[at] = a;
}

/* The thread's values of every head, normalised. WIDE: 0 one by one, 1 pairs of bf16, 2 pairs of f32. */
template <int N, int FMT, int WIDE>
static __device__ __forceinline__ void results_store(const state<N> &st, const target &t, int dim,
                                                     int quad, int n_head)
{
    using L = layout<N, FMT>;
    const int64_t at = 2 * quad * t.stride_head + dim;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int h = head_of(i, quad), r = i / 2 * 4 + i % 2;
        if (h >= n_head)
            continue;
        const float f = lds_f(SMEM + L::inv_at + h * 4);
        const int64_t o = at + (i / 2 * 8 + i % 2) * t.stride_head;
#pragma unroll
        for (int mt = 0; mt < 4; mt++) {
            const float a = st.o[mt][r] * f, b = st.o[mt][r + 2] * f;
            if (WIDE == 2) {
                *(float2 *)((float *)t.out + o + 64 * mt) = make_float2(a, b);
            } else if (WIDE == 1) {
                const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
                *(__nv_bfloat162 *)((uint16_t *)t.out + o + 64 * mt) = v;
            } else {
                out_one(t.out, t.bf16, o + 64 * mt, a);
                out_one(t.out, t.bf16, o + 64 * mt + (FMT == SPARSE_FP8 ? 1 : 8), b);
            }
        }
    }
}

/* Row sums over both groups, then lse and the normalised output. */
template <int N, int FMT>
static __device__ __forceinline__ void finish(const sparse_params &p, state<N> &st, const target &t,
                                              const seat &me, int n_head, int cur)
{
    using L = layout<N, FMT>;
    const int group = me.group, warp = me.thread / 32 % 4, lane = me.lane;
    const int quad = lane % 4, at = lanes_head<N>(lane);
    if (FMT != SPARSE_FP8) {
        /* an infinite value must not leave as NaN: it makes the row sum NaN, which drops the head */
        float zero[N / 4] = {};
#pragma unroll
        for (int i = 0; i < N / 4; i++)
#pragma unroll
            for (int mt = 0; mt < 4; mt++) {
                const int r = i / 2 * 4 + i % 2;
                zero[i] = fmaf(st.o[mt][r], 0.0f, fmaf(st.o[mt][r + 2], 0.0f, zero[i]));
            }
        lanes_reduce<N, op_sum>(zero, lane);
#pragma unroll
        for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
            st.l[i] += zero[i];
    }
#pragma unroll
    for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
        sts_f(SMEM + L::sum_at + ((4 * group + warp) * N + head_of(at + i, quad)) * 4, st.l[i]);
    named_barrier<BAR_SUM, CONSUMERS>();
    bool bad = false;
    if (threadIdx.x < N) {
        float l = 0.0f;
        for (int i = 0; i < 8; i++)
            l += lds_f(SMEM + L::sum_at + (i * N + threadIdx.x) * 4);
        const bool none = l == 0.0f;
        bad = !(l < -NEG_INF);
        sts_f(SMEM + L::inv_at + threadIdx.x * 4, bad || none ? 0.0f : 1.0f / l);
        if ((int)threadIdx.x < n_head) {
            const float ref = lds_f(SMEM + L::ref_at + (cur * N + threadIdx.x) * 4);
            const float lse2 = none ? NEG_INF : ref + log2f(l);
            const float lse = t.partial ? lse2 : lse2 * 0.693147180559945309f;
            /* a partial passes NaN on: the merge then drops the whole row and counts it once */
            t.lse[threadIdx.x] = bad ? (t.partial ? __int_as_float(0x7fc00000) : NEG_INF) : lse;
            if (bad && !t.partial && p.n_nan != NULL)
                atomicAdd(p.n_nan, 1ull);
        }
    }
    if (named_barrier_any<BAR_SUM, CONSUMERS>(bad)) { /* what is NaN stays so times 0 */
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            if (lds_f(SMEM + L::inv_at + head_of(i, quad) * 4) == 0.0f)
#pragma unroll
                for (int mt = 0; mt < 4; mt++)
                    st.o[mt][i / 2 * 4 + i % 2] = st.o[mt][i / 2 * 4 + i % 2 + 2] = 0.0f;
    }
    const int dim = 256 * group + 16 * warp + (FMT == SPARSE_FP8 ? 2 : 1) * (lane / 4);
    if (!t.wide || FMT != SPARSE_FP8)
        results_store<N, FMT, 0>(st, t, dim, quad, n_head);
    else if (t.bf16)
        results_store<N, FMT, 1>(st, t, dim, quad, n_head);
    else
        results_store<N, FMT, 2>(st, t, dim, quad, n_head);
}

/* ---- consumers ----------------------------------------------------------------------------- */

/* What a consumer warp keeps in shared memory between the beginnings of pieces, to have its registers for the work. */
struct unit_state {
    sparse_walk walk;
    sparse_unit unit;
};

template <int N, int FMT>
static __device__ __forceinline__ void consumers_run(const sparse_params &p, const sparse_walk &w,
                                                     int32_t total, int part, int head_group,
                                                     uint8_t *raw)
{
    static_assert(sizeof(unit_state) <= 64, "as many bytes as layout says");
    const seat me = seat_take<N, FMT>();
    const int head0 = head_group * p.group_heads, n_head = min(p.group_heads, p.n_head - head0);
    const bool notes = me.thread == 0 && p.cut != NULL && head_group == 0;
    unit_state *const mine = (unit_state *)(raw + layout<N, FMT>::unit_at + me.thread / 32 * 64);
    turn at = {};
    if (notes)
        p.cut[part] = make_int2(-1, 0);
    mine->walk = w;
    for (;;) {
        sparse_walk walk = mine->walk;
        sparse_unit u;
        if (!sparse_next(walk, p, u))
            break;
        __syncwarp();
        mine->walk = walk;
        mine->unit = u;
        __syncwarp();
        if (u.b1 == 0) {
            empty_write(p, target_of(p, u, part, head0), n_head);
            continue;
        }
        /* walk.at: the position behind the item */
        if (notes && !p.whole && u.b0 == 0 && u.b1 < u.nb)
            p.cut[part] =
                make_int2(u.item, sparse_part_of(walk.at - 1, total, min(total, p.n_part)));
        queries_load<N, FMT>(p, u.item / p.item_per_row, head0, n_head);
        named_barrier<BAR_SUM, CONSUMERS>();
        state<N> st = {};
        at.left = min(u.n_key, u.b1 * SPARSE_TILE) - u.b0 * SPARSE_TILE;
        at.first = true;
#pragma unroll 1
        while (at.left > 0)
            pair_run<N, FMT>(st, me, at);
        finish<N, FMT>(p, st, target_of(p, mine->unit, part, head0), me, n_head, at.cur);
    }
}

template <int N, int FMT>
__global__ void __launch_bounds__(THREADS, 1)
    attn_sparse_main(const __grid_constant__ sparse_params p)
{
    using L = layout<N, FMT>;
    extern __shared__ uint8_t raw[];
    const int part = blockIdx.x / p.n_group, head_group = blockIdx.x % p.n_group;
    block_begin<N, FMT>();
    grid_wait();
    int32_t total;
    const sparse_walk w = walk_begin<THREADS>(p, part, (int32_t *)(raw + L::scan_at), &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<HELPER_REGS>();
        keys_run<N, FMT>(p, w, head_group);
    } else {
        regs_take<CONSUMER_REGS>();
        consumers_run<N, FMT>(p, w, total, part, head_group, raw);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int N, int FMT>
static cudaError_t main_launch(const sparse_params &p, cudaStream_t stream)
{
    static int known;
    const cudaError_t e =
        smem_take((const void *)attn_sparse_main<N, FMT>, layout<N, FMT>::bytes, &known);
    if (e != cudaSuccess)
        return e;
    return launch_kernel(attn_sparse_main<N, FMT>, dim3(p.n_part * p.n_group), THREADS,
                         layout<N, FMT>::bytes, true, p, stream);
}

cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, cudaStream_t stream)
{
    if (kind == SPARSE_BF16)
        return n == 16 ? main_launch<16, SPARSE_BF16>(p, stream)
                       : main_launch<32, SPARSE_BF16>(p, stream);
    return n == 16   ? main_launch<16, SPARSE_FP8>(p, stream)
           : n == 32 ? main_launch<32, SPARSE_FP8>(p, stream)
                     : main_launch<64, SPARSE_FP8>(p, stream);
}
