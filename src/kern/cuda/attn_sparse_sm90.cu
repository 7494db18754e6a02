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
#include "kern/cuda/attn_send.cuh"
#include "kern/cuda/attn_sparse_out.cuh"
#include "kern/cuda/attn_sparse_keys.cuh"
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/attn_sparse_queries.cuh"
#include "kern/cuda/attn_sparse_pair.cuh"
#include "kern/cuda/attn_sparse_results.cuh"
#include "kern/cuda/attn_sparse_smem.cuh"
#include "kern/cuda/launch.cuh"

/* ---- results ------------------------------------------------------------------------------- */

/* What a consumer warp keeps in shared memory between the beginnings of pieces, to have its registers for the work. */
struct unit_state {
    sparse_walk walk;
    sparse_unit unit;
    uint32_t epoch; /* that results go with (send_epoch) */
};

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

static __device__ __forceinline__ void lse_write(const sparse_params &, const target &t, const unit_state *, int,
                                                 uint32_t i, float lse)
{
    t.lse[i] = lse;
}

template <int N, int FMT>
static __device__ __forceinline__ void results_write(const sparse_params &, const state<N> &st, const target &t,
                                                     const seat &me, const unit_state *, int, int n_head)
{
    const int quad = me.lane % 4, warp = me.thread / 32 % 4;
    const int dim = 256 * me.group + 16 * warp + (FMT == SPARSE_FP8 ? 2 : 1) * (me.lane / 4);
    if (!t.wide || FMT != SPARSE_FP8)
        results_store<N, FMT, 0>(st, t, dim, quad, n_head);
    else if (t.bf16)
        results_store<N, FMT, 1>(st, t, dim, quad, n_head);
    else
        results_store<N, FMT, 2>(st, t, dim, quad, n_head);
}

/* ---- results that are sent ------------------------------------------------------------------- */

/* The way of head i of the block's. */
static __device__ __forceinline__ head_way way_of(const sparse_send_params &p, const unit_state *mine, int head0, int i)
{
    const int64_t row = mine->unit.item;
    return head_way(p.to, mine->epoch, row, head0 + i,
                    (float *)p.out + row * p.out_stride_row + (head0 + i) * p.out_stride_head);
}

static __device__ __forceinline__ void lse_write(const sparse_send_params &p, const target &t, const unit_state *mine,
                                                 int head0, uint32_t i, float lse)
{
    if (t.partial)
        t.lse[i] = lse;
    else
        way_of(p, mine, head0, (int)i).lse(p.to, mine->epoch, lse, t.lse + i);
}

/* Heads FROM to FROM + N / 2 - 1: by way of the queries' place in shared memory, which nobody reads before the next piece has
 * its own there, to whole cells. A warp takes a head at a time. */
template <int N, int FMT, int FROM>
static __device__ __forceinline__ void half_send(const sparse_send_params &p, const state<N> &st, const seat &me,
                                                 const unit_state *mine, int head0, int n_head)
{
    using L = layout<N, FMT>;
    static_assert(N / 2 * STAGE_HEAD <= L::q_bytes, "room");
    sums_stage<N, FMT, FROM, N / 2>(st, me, SMEM + L::q);
    named_barrier<BAR_SUM, CONSUMERS>();
    const int n = min(N / 2, n_head - FROM);
    const uint32_t epoch = mine->epoch;
#pragma unroll 1
    for (int i = me.thread / 32; i < n; i += CONSUMERS / 32) {
        const head_way way = way_of(p, mine, head0, FROM + i);
        const float f = lds_f(SMEM + L::inv_at + (FROM + i) * 4);
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = lds128(SMEM + L::q + i * STAGE_HEAD + (32 * k + me.lane) * 16);
#pragma unroll
        for (int k = 0; k < 4; k++)
            way.four(p.to, epoch, 32 * k + me.lane,
                     make_float4(__uint_as_float(v[k].x) * f, __uint_as_float(v[k].y) * f, __uint_as_float(v[k].z) * f,
                                 __uint_as_float(v[k].w) * f));
    }
    named_barrier<BAR_SUM, CONSUMERS>();
}

template <int N, int FMT>
static __device__ __forceinline__ void results_write(const sparse_send_params &p, const state<N> &st, const target &t,
                                                     const seat &me, const unit_state *mine, int head0, int n_head)
{
    if (t.partial) {
        results_write<N, FMT>((const sparse_params &)p, st, t, me, mine, head0, n_head);
        return;
    }
    half_send<N, FMT, 0>(p, st, me, mine, head0, n_head);
    if (n_head > N / 2)
        half_send<N, FMT, N / 2>(p, st, me, mine, head0, n_head);
}

/* An item without keys is sent, too. */
static __device__ void empty_write(const sparse_send_params &p, const target &t, const unit_state *mine, int head0,
                                   int n_head)
{
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < n_head; i += CONSUMERS / 32) {
        const head_way way = way_of(p, mine, head0, i);
        for (int k = 0; k < 4; k++)
            way.four(p.to, mine->epoch, 32 * k + lane, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        if (lane == 0)
            way.lse(p.to, mine->epoch, NEG_INF, t.lse + i);
    }
}

static __device__ __forceinline__ void empty_write(const sparse_params &p, const target &t, const unit_state *, int,
                                                   int n_head)
{
    empty_write(p, t, n_head);
}

static __device__ __forceinline__ uint32_t epoch_of(const sparse_params &)
{
    return 0;
}

static __device__ __forceinline__ uint32_t epoch_of(const sparse_send_params &p)
{
    return send_epoch(p.to);
}

static __device__ __forceinline__ void epoch_keep(const sparse_params &, unit_state *, uint32_t)
{
}

static __device__ __forceinline__ void epoch_keep(const sparse_send_params &, unit_state *mine, uint32_t epoch)
{
    mine->epoch = epoch;
}

/* ---- the end of a piece ---------------------------------------------------------------------- */

/* Row sums over both groups, then lse and the normalised output. */
template <int N, int FMT, class P>
static __device__ __forceinline__ void finish(const P &p, state<N> &st, const target &t, const seat &me,
                                              const unit_state *mine, int head0, int n_head, int cur)
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
            lse_write(p, t, mine, head0, threadIdx.x,
                      bad ? (t.partial ? __int_as_float(0x7fc00000) : NEG_INF) : lse);
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
    results_write<N, FMT>(p, st, t, me, mine, head0, n_head);
}

/* ---- consumers ----------------------------------------------------------------------------- */

template <int N, int FMT, class P>
static __device__ __forceinline__ void consumers_run(const P &p, const sparse_walk &w, int32_t total, int part,
                                                     int head_group, uint8_t *raw, uint32_t epoch)
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
    epoch_keep(p, mine, epoch);
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
            empty_write(p, target_of(p, u, part, head0), mine, head0, n_head);
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
        finish<N, FMT>(p, st, target_of(p, mine->unit, part, head0), me, mine, head0, n_head, at.cur);
    }
}

template <int N, int FMT, class P>
__global__ void __launch_bounds__(THREADS, 1)
    attn_sparse_main(const __grid_constant__ P p)
{
    using L = layout<N, FMT>;
    extern __shared__ uint8_t raw[];
    const int part = blockIdx.x / p.n_group, head_group = blockIdx.x % p.n_group;
    block_begin<N, FMT>();
    const uint32_t epoch = epoch_of(p);
    grid_wait();
    int32_t total;
    const sparse_walk w = walk_begin<THREADS>(p, part, (int32_t *)(raw + L::scan_at), &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<HELPER_REGS>();
        keys_run<N, FMT>(p, w, head_group);
    } else {
        regs_take<CONSUMER_REGS>();
        consumers_run<N, FMT>(p, w, total, part, head_group, raw, epoch);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int N, int FMT, class P>
static cudaError_t main_launch(const P &p, cudaStream_t stream)
{
    static int known;
    const cudaError_t e =
        smem_take((const void *)attn_sparse_main<N, FMT, P>, layout<N, FMT>::bytes, &known);
    if (e != cudaSuccess)
        return e;
    return launch_kernel(attn_sparse_main<N, FMT, P>, dim3(p.n_part * p.n_group), THREADS,
                         layout<N, FMT>::bytes, true, p, stream);
}

template <class P>
static cudaError_t fp8_launch(const P &p, int n, cudaStream_t stream)
{
    return n == 16   ? main_launch<16, SPARSE_FP8>(p, stream)
           : n == 32 ? main_launch<32, SPARSE_FP8>(p, stream)
                     : main_launch<64, SPARSE_FP8>(p, stream);
}

cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, const attn_send *to, cudaStream_t stream)
{
    if (kind == SPARSE_BF16)
        return n == 16 ? main_launch<16, SPARSE_BF16>(p, stream)
                       : main_launch<32, SPARSE_BF16>(p, stream);
    return to == NULL ? fp8_launch(p, n, stream) : fp8_launch(sparse_send_params(p, *to), n, stream);
}
