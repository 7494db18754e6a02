/* kern/cuda/attn_sparse_softmax.cuh - scores to weights, and the references of the exponentials
 * (attn_sparse_sm90.cu).
 *
 * The reference of a head moves only when a weight under it would exceed 2^GROW: P stays below that, which fp16 and
 * bf16 hold, and the sums are seldom rescaled. So the weights are made under the references as they are, and
 * whether they were small enough is known when they are made: no maximum is taken over warps, and the one
 * barrier that hands P over carries the answer. Where it is no, for the first keys of a piece and seldom
 * after, the maxima are taken and the weights made again. A reference is a function of the head's own
 * scores, whatever other heads make the block do.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_SOFTMAX_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_SOFTMAX_CUH

#include "kern/cuda/attn_sparse_tile.cuh"

/* Floats as integers in the same order. */
static __device__ __forceinline__ int float_order(float x)
{
    const int i = __float_as_int(x);
    return i >= 0 ? i : i ^ 0x7fffffff;
}

static __device__ __forceinline__ float order_float(int i)
{
    return __int_as_float(i >= 0 ? i : i ^ 0x7fffffff);
}

struct op_max {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return fmaxf(a, b);
    }
};
struct op_sum {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return a + b;
    }
};

/* The larger; NaN when one is. */
static __device__ __forceinline__ float max_nan(float a, float b)
{
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

/* One step: with the lane at distance D, of n values each keeps side; a single one both keep. */
template <int D, int n, class OP, int M>
static __device__ __forceinline__ void lanes_step(float (&v)[M], int lane)
{
    if (n == 1) {
        v[0] = OP::of(v[0], __shfl_xor_sync(~0u, v[0], D));
        return;
    }
    const bool up = lane & D;
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
        const float give = up ? v[i] : v[i + n / 2], keep = up ? v[i + n / 2] : v[i];
        v[i] = OP::of(keep, __shfl_xor_sync(~0u, give, D));
    }
}

/* Over the eight lanes that hold other keys of the same heads: v[i] for the thread's N / 4 heads. The result
 * for N / 32 of those, from lanes_head on, ends in v[0..]. With N = 16 two lanes end with the same head. */
template <int N, class OP>
static __device__ __forceinline__ void lanes_reduce(float (&v)[N / 4], int lane)
{
    lanes_step<16, N / 4, OP>(v, lane);
    lanes_step<8, N / 8, OP>(v, lane);
    lanes_step<4, (N >= 32 ? N / 16 : 1), OP>(v, lane);
}

/* The first of the heads that lanes_reduce leaves with a lane, as it counts them. */
template <int N> static __device__ __forceinline__ int lanes_head(int lane)
{
    int at = lane & 16 ? N / 8 : 0;
    at += lane & 8 ? N / 16 : 0;
    return at + (N >= 32 && lane & 4 ? N / 32 : 0);
}

/* The head of a thread's i-th value: column pairs 2t, 2t + 1 of every eight. */
static __device__ __forceinline__ int head_of(int i, int t)
{
    return i / 2 * 8 + 2 * t + i % 2;
}

/* What one consumer thread keeps through a piece. */
template <int N> struct state {
    float o[4][N / 2];             /* O^T: four tiles of 64 value dims            */
    float l[N >= 32 ? N / 32 : 1]; /* sums of weights over the warp's keys, of lanes_head */
};

/* A head's reference, and the score factor beside it. Heads 8 n + 2 t and the next. */
template <int N, int FMT> struct head_pair {
    float2 f, ref;

    __device__ __forceinline__ head_pair(const seat &me, int cur, int n)
    {
        using L = layout<N, FMT>;
        f = lds_f2(me.heads + SMEM + L::qs_at + 8 * n * 4);
        ref = lds_f2(me.heads + cur * N * 4 + SMEM + L::ref_at + 8 * n * 4);
    }
};

template <int N, int FMT> static __device__ __forceinline__ seat seat_take()
{
    using L = layout<N, FMT>;
    seat me;
    /* once: read where it is used it would be read for every use */
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(me.thread));
    const int warp = me.thread / 32 % 4;
    me.group = me.thread / 128;
    me.lane = me.thread % 32;
    me.key = 16 * warp + me.lane / 4;
    me.rows = me.key * L::row + me.lane % 4 * 32;
    me.values = value_place<N, FMT>(me.group, warp, me.lane);
    /* 16 heads by one stmatrix: heads become rows, 16-byte chunks 2 warp and 2 warp + 1 of a row hold the keys */
    const int head = me.lane / 16 * 8 + me.lane % 8, chunk = 2 * warp + me.lane / 8 % 2;
    me.weights = SMEM + L::p + me.group * L::p_bytes + head * 128 + ((chunk ^ (head & 7)) << 4);
    me.scales = SMEM + L::scale_at + me.group * 512 + me.lane % 4 * 128 + place_of_key(me.key) * 2;
    me.heads = me.lane % 4 * 8;
    return me;
}

template <int FMT> static __device__ __forceinline__ uint32_t weights_pack(float a, float b)
{
    if (FMT == SPARSE_FP8) {
        const half2 h = __floats2half2_rn(a, b);
        return *(const uint32_t *)&h;
    }
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&h;
}

/* A score above a reference, which is a score of the head or 0. The score is rounded first, as the reference was: of scores
 * so large that their last place counts, the difference is then still 0 for the largest. */
static __device__ __forceinline__ float score_over(float s, float f, float ref)
{
    return __fsub_rn(__fmul_rn(s, f), ref);
}

/* The weights under the references as they are, into P. sum[i]: of a head's weights in this thread. Returns
 * whether all are below 2^GROW; without a reference (-inf) or with NaN none is. */
template <int N, int FMT>
static __device__ __forceinline__ bool weights(const float (&s)[N / 2], float (&sum)[N / 4],
                                               const seat &me, int cur)
{
    float top = NEG_INF;
    head_pair<N, FMT> h[2] = {head_pair<N, FMT>(me, cur, 0), head_pair<N, FMT>(me, cur, 1)};
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
        const int then = n + 2 < N / 8 ? n + 2 : 0;
        const head_pair<N, FMT> next[2] = {head_pair<N, FMT>(me, cur, then),
                                           head_pair<N, FMT>(me, cur, then + 1)};
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = n + j;
            const float a = score_over(s[4 * i], h[j].f.x, h[j].ref.x),
                        b = score_over(s[4 * i + 1], h[j].f.y, h[j].ref.y),
                        c = score_over(s[4 * i + 2], h[j].f.x, h[j].ref.x),
                        d = score_over(s[4 * i + 3], h[j].f.y, h[j].ref.y);
            top = max_nan(max_nan(top, max_nan(a, b)), max_nan(c, d));
            const float pa = exp2_approx(a), pb = exp2_approx(b), pc = exp2_approx(c),
                        pd = exp2_approx(d);
            sum[2 * i] = pa + pc;
            sum[2 * i + 1] = pb + pd;
            w[2 * j] = weights_pack<FMT>(pa, pb);
            w[2 * j + 1] = weights_pack<FMT>(pc, pd);
            h[j] = next[j];
        }
        stmatrix4_trans(me.weights + n * 8 * 128, w[0], w[1], w[2], w[3]);
    }
    return top <= GROW;
}

/* Per head over all keys of the pair, in integers that order as floats do: the largest score, and unless `first`
 * the largest above the reference. */
template <int N, int FMT>
static __device__ __forceinline__ void tops_meet(const float (&s)[N / 2], const seat &me, int cur,
                                                 bool first)
{
    using L = layout<N, FMT>;
    const int lane = me.lane;
#pragma unroll 1
    for (int over = 0; over < (first ? 1 : 2); over++) {
        float m[N / 4];
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const head_pair<N, FMT> h(me, cur, n);
            const float x = over ? h.ref.x : 0.0f, y = over ? h.ref.y : 0.0f;
            m[2 * n] = fmaxf(score_over(s[4 * n], h.f.x, x), score_over(s[4 * n + 2], h.f.x, x));
            m[2 * n + 1] =
                fmaxf(score_over(s[4 * n + 1], h.f.y, y), score_over(s[4 * n + 3], h.f.y, y));
        }
        lanes_reduce<N, op_max>(m, lane);
#pragma unroll
        for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
            atoms_max(SMEM + L::max_at +
                          ((2 * cur + over) * N + head_of(lanes_head<N>(lane) + i, lane % 4)) * 4,
                      float_order(fmaxf(m[i], NEG_INF)));
    }
}

/* A head's reference before a pair and after it. Its own scores alone decide whether it moves. */
template <int N, int FMT> struct head_move {
    float was, ref;

    __device__ __forceinline__ head_move(int cur, bool first, int head)
    {
        using L = layout<N, FMT>;
        const uint32_t at = SMEM + L::max_at + (2 * cur * N + head) * 4;
        const float top = order_float((int)lds32(at)), over = order_float((int)lds32(at + N * 4)),
                    old = lds_f(SMEM + L::ref_at + (cur * N + head) * 4);
        was = first ? NEG_INF : old;
        ref = (over > GROW) | first ? top : was;
    }
    __device__ __forceinline__ float alpha() const
    {
        return ref == was ? 1.0f : exp2_approx(was - ref);
    }
};

/* What was summed so far, under the new references. */
template <int N, int FMT>
static __device__ __forceinline__ void sums_move(state<N> &st, int cur, int lane)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float a = head_move<N, FMT>(cur, false, head_of(i, lane % 4)).alpha();
#pragma unroll
        for (int mt = 0; mt < 4; mt++) {
            st.o[mt][i / 2 * 4 + i % 2] *= a;
            st.o[mt][i / 2 * 4 + i % 2 + 2] *= a;
        }
    }
#pragma unroll
    for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
        st.l[i] *=
            head_move<N, FMT>(cur, false, head_of(lanes_head<N>(lane) + i, lane % 4)).alpha();
}

/* The weights of a pair in which a reference may move, `first` of its piece or not: both groups meet for the
 * maxima, and what was summed so far is rescaled. Returns whether `fast` holds in both groups. */
template <int N, int FMT>
static __device__ __forceinline__ bool weights_move(state<N> &st, const float (&s)[N / 2],
                                                    float (&sum)[N / 4], const seat &me, int cur,
                                                    bool first, bool any, bool fast)
{
    using L = layout<N, FMT>;
    if (any)
        tops_meet<N, FMT>(s, me, cur, first);
    named_barrier<BAR_MAX, CONSUMERS>();
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
        uint32_t w[4];
#pragma unroll
        for (int i = n; i < n + 2; i++) {
            const head_pair<N, FMT> h(me, cur, i);
            float p[4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float f = e ? h.f.y : h.f.x,
                            ref = head_move<N, FMT>(cur, first, 8 * i + me.lane % 4 * 2 + e).ref;
                const float sub = ref == NEG_INF ? 0.0f : ref;
                p[e] = exp2_approx(score_over(s[4 * i + e], f, sub));
                p[e + 2] = exp2_approx(score_over(s[4 * i + e + 2], f, sub));
                sum[2 * i + e] = any ? p[e] + p[e + 2] : 0.0f;
            }
            w[2 * (i - n)] = weights_pack<FMT>(p[0], p[1]);
            w[2 * (i - n) + 1] = weights_pack<FMT>(p[2], p[3]);
        }
        if (any)
            stmatrix4_trans(me.weights + n * 8 * 128, w[0], w[1], w[2], w[3]);
    }
    if (!first)
        sums_move<N, FMT>(st, cur, me.lane);
    if (me.thread < N) {
        const int other = cur ^ 1;
        sts_f(SMEM + L::ref_at + (other * N + me.thread) * 4,
              head_move<N, FMT>(cur, first, me.thread).ref);
        sts32(SMEM + L::max_at + (2 * other * N + me.thread) * 4, (uint32_t)float_order(NEG_INF));
        sts32(SMEM + L::max_at + ((2 * other + 1) * N + me.thread) * 4,
              (uint32_t)float_order(NEG_INF));
    }
    fence_async();
    return named_barrier_all(BAR_P, CONSUMERS, fast);
}

/* Keys past the last, and those whose scales fp16 does not hold, which poison their head. A key past the last has
 * -inf after the factor of its head. */
template <int N, int FMT>
static __device__ __forceinline__ void scores_mask(float (&s)[N / 2], const seat &me, int nv,
                                                   bool fits)
{
    using L = layout<N, FMT>;
    const bool has0 = me.key < nv, has1 = me.key + 8 < nv;
    const float poison = fits ? 0.0f : __int_as_float(0x7fc00000);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 f = lds_f2(me.heads + SMEM + L::qs_at + 8 * n * 4);
        const float x = copysignf(NEG_INF, -f.x), y = copysignf(NEG_INF, -f.y);
        s[4 * n] = has0 ? s[4 * n] + poison : x;
        s[4 * n + 1] = has0 ? s[4 * n + 1] + poison : y;
        s[4 * n + 2] = has1 ? s[4 * n + 2] + poison : x;
        s[4 * n + 3] = has1 ? s[4 * n + 3] + poison : y;
    }
}

#endif
