/* mha_state.cuh - multi-head attention on sm_90a (mha_sm90.cu): what a group of consumers holds. Queries of a unit, and
 * the state (out, lse) between blocks of keys: fetched, folded, stored, and taken back where a block is dropped.
 */
#ifndef KVS_KERN_CUDA_MHA_STATE_CUH
#define KVS_KERN_CUDA_MHA_STATE_CUH

#include "kern/cuda/attn_online.cuh"
#include "kern/cuda/mha_unit.cuh"

enum { BAR_GROUP = 1 }; /* and 2: of each group */

#define LOG2E 1.44269504088896341f
#define LN2   0.693147180559945309f

/* ---- queries and state ------------------------------------------------------------------------- */

template <class F> struct consumer {
    uint32_t smem;
    int group, warp, lane;   /* warp: in its group */
    int head, row;           /* row: the first of its two rows */
    int nx, ny;              /* keys that they attend          */
    int least;               /* of all rows of the group       */
    float o[F::VDIM / 2];    /* 4 j + 0, 1 and 2, 3 at columns 8 j + 2 (lane % 4), + 1 */
    uint32_t w[F::STEP / 4]; /* weights as fragments         */
    two ref, l, lse;         /* l: of this thread's columns    */
    int wild;                /* MHA_WILD with queries, or a scale, out of the usual */
    bool look;               /* a block of the unit is wild: each has to be asked   */
};

/* The group's queries to shared memory; MHA_WILD where one of them is. */
template <class F>
static __device__ __forceinline__ int queries_load(const mha_params &p, const consumer<F> &c,
                                                   int row0)
{
    constexpr int PIECES = F::NOPE / 8 + MHA_ROPE / 8;
    const int tid = c.warp * 32 + c.lane;
    bool wild = false;
#pragma unroll 4
    for (int i = tid; i < 64 * PIECES; i += GROUP) {
        const int r = i / PIECES, k = i % PIECES;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row0 + r < p.n_row) {
            const uint16_t *q = p.q + (row0 + r) * p.q_stride_row + c.head * p.q_stride_head;
            if (p.q_wide) {
                v = *(const uint4 *)(q + 8 * k);
            } else {
                uint32_t e[8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int d = 8 * k + j;
                    e[j] = d >= F::NOPE ? q[p.nope + d - F::NOPE] : d < p.nope ? q[d] : 0;
                }
                v = make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16,
                               e[6] | e[7] << 16);
            }
        }
        wild = wild || mha_pair_over<MHA_QK_EXP>(v.x) || mha_pair_over<MHA_QK_EXP>(v.y) ||
               mha_pair_over<MHA_QK_EXP>(v.z) || mha_pair_over<MHA_QK_EXP>(v.w);
        sts128(c.smem + place<F>::AT_Q + c.group * place<F>::Q_BYTES + k / 8 * Q_COL +
                   mha_piece(r, k % 8),
               v);
    }
    fence_async();
    wild = !named_barrier_all(BAR_GROUP + c.group, GROUP, !wild);
    return wild || !(p.scale_log2 <= (float)MHA_SCALE_MAX) ? MHA_WILD : 0;
}

/* A number that is worked out where it is used, rather than kept in registers over the loop. */
static __device__ __forceinline__ int here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

template <class F>
static __device__ __forceinline__ float *out_row(const mha_params &p, const consumer<F> &c, int odd)
{
    const int row = here(c.row + 8 * odd);
    return p.out + row * p.out_stride_row + c.head * p.out_stride_head;
}

/* Values of a row that has some, zeros of another. */
template <class F>
static __device__ __forceinline__ void row_fetch(const mha_params &p, consumer<F> &c, int odd,
                                                 float lse)
{
    const float *from = out_row(p, c, odd);
    const bool some = lse > NEG_INF;
    const int d0 = here(c.lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < F::VDIM / 8; j++) {
        const int d = 8 * j + d0;
        float2 v = make_float2(0.0f, 0.0f);
        if (some && p.out_wide && d < p.v_dim) {
            v = *(const float2 *)(from + d);
        } else if (some) {
            v.x = d < p.v_dim ? from[d] : 0.0f;
            v.y = d + 1 < p.v_dim ? from[d + 1] : 0.0f;
        }
        c.o[4 * j + 2 * odd] = v.x;
        c.o[4 * j + 2 * odd + 1] = v.y;
    }
}

template <class F>
static __device__ __forceinline__ void row_store(const mha_params &p, const consumer<F> &c, int odd)
{
    float *to = out_row(p, c, odd);
    const int d0 = here(c.lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < F::VDIM / 8; j++) {
        const int d = 8 * j + d0;
        const float a = c.o[4 * j + 2 * odd], b = c.o[4 * j + 2 * odd + 1];
        if (p.out_wide && d < p.v_dim) {
            *(float2 *)(to + d) = make_float2(a, b);
        } else {
            if (d < p.v_dim)
                to[d] = a;
            if (d + 1 < p.v_dim)
                to[d + 1] = b;
        }
    }
}

/* The reference that stands for an lse; finite for a finite one. */
static __device__ __forceinline__ float ref_of(float lse)
{
    return lse > NEG_INF ? fminf(fmaxf(lse * LOG2E, -3.40282347e38f), 3.40282347e38f) : NEG_INF;
}

/* The state as a block begins with it: what there is weighs 1. One thread of a row's four has that in its sum. */
template <class F> static __device__ __forceinline__ void sums_begin(consumer<F> &c)
{
    const bool mine = c.lane % 4 == 0;
    c.ref.x = ref_of(c.lse.x);
    c.ref.y = ref_of(c.lse.y);
    c.l.x = mine && c.lse.x > NEG_INF ? 1.0f : 0.0f;
    c.l.y = mine && c.lse.y > NEG_INF ? 1.0f : 0.0f;
}

template <class F>
static __device__ __forceinline__ void state_load(const mha_params &p, consumer<F> &c)
{
    c.lse.x = c.lse.y = NEG_INF;
    if (!p.first && c.row < p.n_row)
        c.lse.x = p.lse[(int64_t)c.row * p.n_head + c.head];
    if (!p.first && c.row + 8 < p.n_row)
        c.lse.y = p.lse[(int64_t)(c.row + 8) * p.n_head + c.head];
    c.lse.x = c.lse.x < -NEG_INF ? c.lse.x : NEG_INF; /* NaN compares false */
    c.lse.y = c.lse.y < -NEG_INF ? c.lse.y : NEG_INF;
    row_fetch(p, c, 0, c.lse.x);
    row_fetch(p, c, 1, c.lse.y);
    sums_begin(c);
}

/* Rows that attend nothing and have something are left as they are. */
template <class F>
static __device__ __forceinline__ void state_store(const mha_params &p, const consumer<F> &c)
{
    const bool lead = c.lane % 4 == 0;
    if (c.row < p.n_row && (p.first || c.nx > 0 || c.lse.x == NEG_INF)) {
        row_store(p, c, 0);
        if (lead)
            p.lse[(int64_t)c.row * p.n_head + c.head] = c.lse.x;
    }
    if (c.row + 8 < p.n_row && (p.first || c.ny > 0 || c.lse.y == NEG_INF)) {
        row_store(p, c, 1);
        if (lead)
            p.lse[(int64_t)(c.row + 8) * p.n_head + c.head] = c.lse.y;
    }
}

template <int N> static __device__ __forceinline__ void scale(float (&o)[N], two f)
{
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        o[4 * j] *= f.x;
        o[4 * j + 1] *= f.x;
        o[4 * j + 2] *= f.y;
        o[4 * j + 3] *= f.y;
    }
}

static __device__ __forceinline__ float rcp_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- a block ----------------------------------------------------------------------------------- */

/* One row's lse behind a block of sum l, and what its O is to be multiplied by. */
static __device__ __forceinline__ float row_fold(bool bad, float l, float ref, float &lse)
{
    const float l0 = lse > NEG_INF ? 1.0f : 0.0f;
    const bool none = bad || (l == l0 && ref == ref_of(lse)); /* nothing entered */
    const float to = (ref + log2f(l)) * LN2, inv = rcp_approx(l);
    lse = none ? lse : to;
    return none ? 1.0f : inv;
}

/* O of a block that may have to be dropped is complete: who loses it gets back what was before. */
template <class F>
static __device__ __forceinline__ void rows_restore(const mha_params &p, consumer<F> &c, bool bad_x,
                                                    bool bad_y)
{
    if (bad_x)
        row_fetch(p, c, 0, c.lse.x);
    if (bad_y)
        row_fetch(p, c, 1, c.lse.y);
    const unsigned n = (unsigned)bad_x + bad_y;
    if (n > 0 && c.lane % 4 == 0 && p.n_nan != NULL)
        atomicAdd(p.n_nan, (unsigned long long)n);
}

/* The end of the block of keys [key0, ...), whose sums are complete and whose last values may be under way. flag: the
 * block's. What O is to be multiplied by. */
template <class F>
static __device__ __forceinline__ two block_end(const mha_params &p, consumer<F> &c, int key0,
                                                int flag)
{
    const float lx = quad_sum(c.l.x), ly = quad_sum(c.l.y);
    bool bad_x = false, bad_y = false;
    if (flag & MHA_WILD) {
        wgmma_wait<0>();
        regs_pin(c.o);
        float ax = 0.0f, ay = 0.0f; /* NaN where something is not finite */
#pragma unroll
        for (int j = 0; j < F::VDIM / 8; j++) {
            ax = fmaf(c.o[4 * j], 0.0f, fmaf(c.o[4 * j + 1], 0.0f, ax));
            ay = fmaf(c.o[4 * j + 2], 0.0f, fmaf(c.o[4 * j + 3], 0.0f, ay));
        }
        ax = quad_sum(ax) + lx;
        ay = quad_sum(ay) + ly;
        const int first = flag & MHA_FIRST_MASK;
        bad_x = !(ax < -NEG_INF) || (first < MHA_BLOCK && c.nx - key0 > first);
        bad_y = !(ay < -NEG_INF) || (first < MHA_BLOCK && c.ny - key0 > first);
        bad_x = bad_x && c.row < p.n_row;
        bad_y = bad_y && c.row + 8 < p.n_row;
        rows_restore(p, c, bad_x, bad_y);
    }
    two inv;
    inv.x = row_fold(bad_x, lx, c.ref.x, c.lse.x);
    inv.y = row_fold(bad_y, ly, c.ref.y, c.lse.y);
    sums_begin(c);
    return inv;
}

/* Before a block that may have to be dropped; O is that of (out, lse). */
template <class F>
static __device__ __forceinline__ void rows_keep(const mha_params &p, consumer<F> &c)
{
    if (c.row < p.n_row && c.lse.x > NEG_INF)
        row_store(p, c, 0);
    if (c.row + 8 < p.n_row && c.lse.y > NEG_INF)
        row_store(p, c, 1);
}

#endif
