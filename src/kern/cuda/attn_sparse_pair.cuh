/* attn_sparse_pair.cuh - a pair of tiles through the consumers of sparse attention's kernels (attn_sparse_sm90.cu,
 * attn_sparse_direct_sm90.cu): scores of one tile each, weights, values of both for half of the dims each.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_PAIR_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_PAIR_CUH

#include "kern/cuda/attn_sparse_softmax.cuh"

/* ---- before all pairs ---------------------------------------------------------------------- */

/* By all threads of a block: no maxima yet, and the barriers of the ring and of P. A barrier of the block is to follow. */
template <int N, int FMT> static __device__ __forceinline__ void block_begin()
{
    using L = layout<N, FMT>;
    if (threadIdx.x < 2 * N)
        sts32(SMEM + L::max_at + threadIdx.x * 4, (uint32_t)float_order(NEG_INF));
    if (threadIdx.x == 0) {
        const uint32_t full = SMEM + L::bar_at;
        for (int i = 0; i < L::stages; i++) {
            mbar_init(full + 8 * i, COPIERS);
            mbar_init(full + 8 * (L::stages + i), CONSUMERS / 32);
        }
        mbar_init(SMEM + L::free_at, CONSUMERS / 32);
        mbar_init_fence();
    }
}

/* ---- values -------------------------------------------------------------------------------- */

template <int N, int FMT>
static __device__ __forceinline__ void values_ahead(value_ahead &v, uint32_t tile)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        value_load<N, FMT>(v.r[i], tile, i / 2, i % 2);
}

/* O^T += V^T P^T of tile `which` of the pair, which is given back at `empty`; begun and ended with products in flight.
 * tile, next: at the lane's place (seat) in this one and in the pair's next, of which the end loads ahead when
 * there is one; rows: this one's beginning. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void
values(state<N> &st, value_ahead &v, value_scales (&sc)[2], uint32_t tile, uint32_t next,
       uint32_t rows, int which, int slot, bool more, const seat &me, uint32_t empty)
{
    const int group = me.group, lane = me.lane;
    using L = layout<N, FMT>;
    constexpr ptx_operand TYPE = FMT == SPARSE_FP8 ? OPERAND_F16 : OPERAND_BF16;
    const uint64_t p = wgmma_tile(SMEM_AT + L::p + which * L::p_bytes);
    uint32_t f[2][2][2][4];
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        wgmma_wait<1>();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int i = (2 * kk + side) % 4;
            value_fragments<N, FMT, FAST>(f[kk % 2][side], v.r[i], sc[side], kk,
                                          rows + 16 * kk * L::row, 2 * group + side, lane);
            regs_pin(f[kk % 2][side]);
        }
        if (kk == 3) {
            __syncwarp();
            if (lane == 0)
                mbar_arrive(empty);
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma_rs<N, TYPE>(st.o[j], f[kk % 2][j / 2][j % 2], p + 2 * kk, 1);
        wgmma_commit();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int i = (2 * kk + side) % 4;
            if (kk < 2)
                value_load<N, FMT>(v.r[i], tile, kk + 2, side);
            else if (more)
                value_load<N, FMT>(v.r[i], next, kk - 2, side);
            if (FMT == SPARSE_FP8 && FAST && kk == 3 && more)
                value_scales_load<N, FMT>(sc[side], slot + 1, 2 * group + side, lane);
        }
    }
}

/* Of a pair's one or two tiles, which it gives back. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void values_of_pair(state<N> &st, value_ahead &v, const seat &me,
                                                      ring_at ring, int slot, bool two)
{
    using L = layout<N, FMT>;
    value_scales sc[2] = {};
    if (FMT == SPARSE_FP8 && FAST) {
        value_scales_load<N, FMT>(sc[0], slot, 2 * me.group, me.lane);
        value_scales_load<N, FMT>(sc[1], slot, 2 * me.group + 1, me.lane);
    }
    const uint32_t tile = ring_tile<N, FMT>(ring),
                   next = ring_tile<N, FMT>(ring_next<N, FMT>(ring));
#pragma unroll
    for (int mt = 0; mt < 4; mt++)
        regs_pin(st.o[mt]);
    values<N, FMT, FAST>(st, v, sc, tile + me.values, next + me.values, tile, 0, slot, two, me,
                         ring_empty<N, FMT>(ring));
    if (two)
        values<N, FMT, FAST>(st, v, sc, next + me.values, next + me.values, next, 1, slot + 1,
                             false, me, ring_empty<N, FMT>(ring_next<N, FMT>(ring)));
    wgmma_wait<0>();
#pragma unroll
    for (int mt = 0; mt < 4; mt++)
        regs_pin(st.o[mt]);
}

/* ---- a pair -------------------------------------------------------------------------------- */

/* What a consumer keeps of where it is. */
struct turn {
    ring_at ring; /* the pair's first tile                  */
    int left;     /* keys from there to the end of the piece */
    int cur;      /* which of the references count          */
    int odd;      /* pairs so far                           */
    bool first;   /* pair of its piece                      */
};

/* One pair of tiles: scores, weights, values. The references of a pair are almost always those of the one before,
 * so the weights are made under them at once; when one would be too large in any head, scores and weights are
 * made again with maxima. */
template <int N, int FMT>
static __device__ __forceinline__ void pair_run(state<N> &st, const seat &me, turn &at)
{
    const bool two = at.left > SPARSE_TILE, first = at.first;
    const int nv = min(at.left - me.group * SPARSE_TILE, (int)SPARSE_TILE);
    const int slot = 2 * at.odd;
    const ring_at ring = at.ring, next = ring_next<N, FMT>(ring);
    mbar_wait(ring_full<N, FMT>(ring), ring.parity);
    if (me.group == 1 && two)
        mbar_wait(ring_full<N, FMT>(next), next.parity);
    const uint32_t rows = ring_tile<N, FMT>(me.group == 0 ? ring : next) + me.rows,
                   values = ring_tile<N, FMT>(ring) + me.values;
    float sum[N / 4];
    value_ahead v;
    bool move = first, fast = true;
#pragma unroll 1
    for (;;) {
        float s[N / 2];
        bool below = true, fast_own = true;
        if (nv > 0) {
            raw_chunk r[2];
            key_scales scales;
            bool fits = true;
            score_load<N, FMT>(r[0], rows, 0);
            score_load<N, FMT>(r[1], rows, 1);
            if (FMT == SPARSE_FP8)
                fast_own = scales_look<N, FMT>(scales, me, rows, slot, nv, fits);
            if (fast_own)
                scores<N, FMT, true>(s, r, scales, rows);
            else
                scores<N, FMT, false>(s, r, scales, rows);
            if (nv < SPARSE_TILE || !fits)
                scores_mask<N, FMT>(s, me, nv, fits);
        } else {
            for (int i = 0; i < N / 2; i++)
                s[i] = 0.0f;
        }
        if (move) {
            fast = weights_move<N, FMT>(st, s, sum, me, at.cur, first, nv > 0, fast_own);
            lanes_reduce<N, op_sum>(sum, me.lane);
            values_ahead<N, FMT>(v, values);
            at.cur ^= 1;
            break;
        }
        mbar_wait(SMEM + layout<N, FMT>::free_at, at.odd ^ 1);
        if (nv > 0)
            below = weights<N, FMT>(s, sum, me, at.cur);
        else
            for (int i = 0; i < N / 4; i++)
                sum[i] = 0.0f;
        fence_async();
        lanes_reduce<N, op_sum>(sum, me.lane);
        values_ahead<N, FMT>(v, values);
        fast = named_barrier_all(BAR_P, CONSUMERS, below && fast_own);
        if (fast || named_barrier_all(BAR_P, CONSUMERS, below))
            break;
        move = true;
    }
#pragma unroll
    for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
        st.l[i] += sum[i];
    if (fast)
        values_of_pair<N, FMT, true>(st, v, me, ring, slot, two);
    else
        values_of_pair<N, FMT, false>(st, v, me, ring, slot, two);
    if (me.lane == 0)
        mbar_arrive(SMEM + layout<N, FMT>::free_at);
    at.odd ^= 1;
    at.left -= 2 * SPARSE_TILE;
    at.first = false;
    at.ring = two ? ring_next<N, FMT>(next) : next;
}

#endif
