/* attn_seesaw.cuh - attention on sm_90a with heads on M: the two groups of consumers over tiles of 64 keys
 * (attn_dense_sm90.cu, attn_sparse_wide_sm90.cu).
 *
 * S = Q K^T with M = 64 (rows x heads, short ones filled with zeros) and N = 64 keys, O = P V with V read transposed
 * from the same tile. A tile is nine columns of 64 dims, each [64 keys][64 dims] of bf16 with swizzled rows of 128
 * bytes, the rope the last column. Queries lie as a tile does.
 *
 * Two warp groups, left and right, each with 256 of the 512 columns of O in its registers. Of a pair of tiles
 * left scores the first and right the second; each gives its P to the other through shared memory, thread to
 * thread, since both hold the same places of P. So products of one group run while the other is at its
 * softmax, the softmax is done once, and each half of V is read by one group. The reference of the
 * exponentials moves only when a maximum has grown by more than GROW: P stays below 2^GROW, O is seldom
 * rescaled. The right group goes on from the left group's reference and the left one takes over the right one's.
 *
 * A tile is given back in three parts: the rope when it is scored, each half of V when its group has used it.
 *
 * What brings the tiles is a type T of the kernel:
 *   T::rope_first               whether the rope comes before the rest
 *   T::wide                     P V by products of 256 columns (a thread of 512 has not the registers from the start)
 *   T::column_wait(c, n, i)     until column i of tile n is there
 *   T::give_back(c, n, part)    tile n's part (FREE_*) has been used by this warp
 *   T::queries_done(c)          this warp asks no more of the queries
 *   t.begin(c, n, b)            tile n of the block, b of the row, comes: WHOLE, or what mask is told
 *   t.mask(c, s, what, b)       scores of keys that a row does not attend become -inf
 */
#ifndef KVS_KERN_CUDA_ATTN_SEESAW_CUH
#define KVS_KERN_CUDA_ATTN_SEESAW_CUH

#include <cuda_bf16.h>

#include "kern/cuda/attn_online.cuh"
#include "kern/cuda/attn_out.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum {
    GROUP = 128, /* threads of a group */
    CONSUMERS = 256,
    TILE_KEYS = 64,
    N_COL = 9, /* columns of 64 dims  */
    COL_BYTES = 8192,
    TILE_BYTES = N_COL * COL_BYTES
};
/* Barriers: of a warp of one group with its like in the other, of a group, of the consumers; from BAR_OWN on the
 * kernel's. */
enum { BAR_LEFT = 1, BAR_RIGHT = 5, BAR_GROUP = 9, BAR_BOTH = 11, BAR_OWN = 12 };
/* Parts of a tile that are given back together. */
enum { FREE_ROPE, FREE_LEFT, FREE_RIGHT, N_FREE };
enum { WHOLE = -1 };

/* Shared memory; from AT_OWN on the kernel's. */
enum {
    AT_Q = 0,
    AT_K = AT_Q + TILE_BYTES,
    AT_P = AT_K + 2 * TILE_BYTES, /* 64 bytes a thread                     */
    AT_REF = AT_P + 64 * GROUP,   /* float [2][64] references of left, right */
    AT_SUM = AT_REF + 2 * 64 * 4, /* float [2][2][64] row sums             */
    AT_OWN = AT_SUM + 4 * 64 * 4
};

/* A thread of a group at its work. */
struct consumer {
    uint32_t smem;
    int group, warp, lane, tid; /* tid: in its group */
    float o[128];  /* of its two rows of M: 4 j + 0, 1 and 2, 3 at columns 8 j + 2 t, + 1 */
    two ref, l, f; /* references, sums of its own weights, factors of scores */
};

static __device__ __forceinline__ void consumer_begin(consumer &c, uint32_t smem)
{
    c.smem = smem;
    c.group = threadIdx.x / GROUP;
    c.tid = threadIdx.x % GROUP;
    c.warp = c.tid / 32;
    c.lane = c.tid % 32;
}

static __device__ __forceinline__ void consumer_clear(consumer &c)
{
    c.ref.x = c.ref.y = NEG_INF;
    c.l.x = c.l.y = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; i++)
        c.o[i] = 0.0f;
    regs_pin(
        c.o); /* zeros that the compiler knows it makes when products are under way, which then wait */
}

static __device__ __forceinline__ uint32_t tile_at(const consumer &c, uint32_t n)
{
    return c.smem + AT_K + (n & 1) * TILE_BYTES;
}

/* ---- scores and softmax ------------------------------------------------------------------------ */

/* The column that comes i-th. */
template <class T> static __device__ __forceinline__ constexpr int column_at(int i)
{
    return !T::rope_first ? i : i == 0 ? N_COL - 1 : i - 1;
}

/* Columns [FROM, TO) of S = Q K^T of tile n, in the order in which they come. */
template <class T, int FROM, int TO>
static __device__ __forceinline__ void scores_issue(const consumer &c, float (&s)[32], uint32_t n)
{
    uint64_t a = wgmma_tile(c.smem + AT_Q), b = wgmma_tile(tile_at(c, n));
    asm volatile(""
                 : "+l"(a), "+l"(b)); /* not kept from one tile to the next: registers are short */
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        const int at = column_at<T>(i);
        T::column_wait(c, n, at);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma_ss64(s, a + at * (COL_BYTES / 16) + 2 * j, b + at * (COL_BYTES / 16) + 2 * j,
                       i + j > 0);
    }
}

/* O += P V of a group's 256 columns, which begin at `at`. */
template <class T>
static __device__ __forceinline__ void values_issue(float (&o)[128], const uint32_t (&w)[16],
                                                    uint32_t at)
{
    uint64_t v = wgmma_tile_trans(at);
    asm volatile("" : "+l"(v));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (T::wide) {
            wgmma_rs256_trans(o, &w[4 * j], v + 128 * j);
        } else {
            wgmma_rs128_trans<0>(o, &w[4 * j], v + 128 * j);
            wgmma_rs128_trans<64>(o, &w[4 * j], v + 128 * j + 2 * COL_BYTES / 16);
        }
    }
}

static __device__ __forceinline__ uint32_t weight_pair(float a, float b)
{
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&h;
}

/* Scores to weights: ref is the reference before and after, l the sums of this group's weights, w the weights as
 * fragments. Returns what the sums so far are to be multiplied by. */
static __device__ __forceinline__ two weights(float (&s)[32], uint32_t (&w)[16], two &ref, two &l)
{
    const two alpha = refs_move(ref, rows_max(s));
    const float sx = ref_finite(ref.x), sy = ref_finite(ref.y);
    float lx = 0.0f, ly = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float a = exp2_approx(s[4 * j] - sx), b = exp2_approx(s[4 * j + 1] - sx);
        const float c = exp2_approx(s[4 * j + 2] - sy), d = exp2_approx(s[4 * j + 3] - sy);
        lx += a + b;
        ly += c + d;
        w[2 * j] = weight_pair(a, b);
        w[2 * j + 1] = weight_pair(c, d);
    }
    l.x = l.x * alpha.x + lx;
    l.y = l.y * alpha.y + ly;
    return alpha;
}

static __device__ __forceinline__ void scores_scale(float (&s)[32], two f)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        s[4 * j] *= f.x;
        s[4 * j + 1] *= f.x;
        s[4 * j + 2] *= f.y;
        s[4 * j + 3] *= f.y;
    }
}

static __device__ __forceinline__ void rescale(float (&o)[128], two alpha)
{
    if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f)) {
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < 32; j++) {
            o[4 * j] *= alpha.x;
            o[4 * j + 1] *= alpha.x;
            o[4 * j + 2] *= alpha.y;
            o[4 * j + 3] *= alpha.y;
        }
    }
}

/* Weights and references to the thread of the other group that has the same rows. */
static __device__ __forceinline__ void weights_give(const consumer &c, const uint32_t (&w)[16])
{
    const uint32_t at = c.smem + AT_P + 16 * c.tid, ref = c.smem + AT_REF + 4 * 64 * c.group;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sts128(at + 16 * GROUP * i, make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
    if (c.tid % 4 == 0) {
        const int m = 16 * c.warp + c.lane / 4;
        sts_f(ref + 4 * m, c.ref.x);
        sts_f(ref + 4 * m + 32, c.ref.y);
    }
}

/* Those of the other group; its reference becomes this one's. Returns what the own sums are to be multiplied by. */
static __device__ __forceinline__ two weights_take(consumer &c, uint32_t (&w)[16])
{
    const uint32_t at = c.smem + AT_P + 16 * c.tid, ref = c.smem + AT_REF + 4 * 64 * (c.group ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = lds128(at + 16 * GROUP * i);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    const int m = 16 * c.warp + c.lane / 4;
    const two to = {lds_f(ref + 4 * m), lds_f(ref + 4 * m + 32)};
    two alpha;
    alpha.x = ref_change(c.ref.x, to.x);
    alpha.y = ref_change(c.ref.y, to.y);
    c.l.x *= alpha.x;
    c.l.y *= alpha.y;
    c.ref = to;
    return alpha;
}

/* ---- a row's tiles ------------------------------------------------------------------------------ */

/* O += P V with the weights of either group, once O is what it is to be multiplied by. */
template <class T>
static __device__ __forceinline__ void values_add(consumer &c, const uint32_t (&w)[16], two alpha,
                                                  uint32_t n)
{
    rescale(c.o, alpha);
    regs_pin(c.o);
    wgmma_fence();
    values_issue<T>(c.o, w, tile_at(c, n) + c.group * 4 * COL_BYTES);
    wgmma_commit();
}

/* Group left of a row whose tiles [b0, b1) are n, n + 1, ... of the block: scores the first of every pair. */
template <class T>
static __device__ __forceinline__ void left_run(consumer &c, const T &t, int b0, int b1, uint32_t n)
{
    float s[32];
    uint32_t mine[16], other[16];
    int what = t.begin(c, n, b0);
    scores_issue<T, 0, N_COL>(c, s, n);
    wgmma_commit();
    for (int b = b0;; b += 2, n += 2) { /* left by its breaks alone, where nothing is under way */
        const bool pair = b + 1 < b1, more = b + 2 < b1;
        wgmma_wait<0>();
        regs_pin(s);
        T::give_back(c, n, FREE_ROPE);
        if (!more)
            T::queries_done(c);
        scores_scale(s, c.f);
        if (what != WHOLE)
            t.mask(c, s, what, b);
        const two alpha = weights(s, mine, c.ref, c.l);
        weights_give(c, mine);
        bar_arrive(BAR_LEFT + c.warp, 64);
        values_add<T>(c, mine, alpha, n);
        wgmma_wait<0>();
        regs_pin(c.o);
        T::give_back(c, n, FREE_LEFT);
        if (!pair)
            break;
        bar_sync(BAR_RIGHT + c.warp, 64);
        const two to = weights_take(c, other);
        values_add<T>(c, other, to, n + 1);
        if (!more) {
            wgmma_wait<0>();
            regs_pin(c.o);
            T::give_back(c, n + 1, FREE_LEFT);
            break;
        }
        what = t.begin(c, n + 2, b + 2);
        scores_issue<T, 0, 1>(c, s, n + 2);
        wgmma_commit();
        wgmma_wait<1>();
        T::give_back(c, n + 1, FREE_LEFT);
        scores_issue<T, 1, N_COL>(c, s, n + 2);
        wgmma_commit();
    }
}

/* The first weights of a pair, from the left group, times the right half of its values: under way. */
template <class T>
static __device__ __forceinline__ void right_other(consumer &c, uint32_t (&other)[16], uint32_t n)
{
    bar_sync(BAR_LEFT + c.warp, 64);
    const two to = weights_take(c, other);
    values_add<T>(c, other, to, n);
}

/* Group right: scores the second of every pair. */
template <class T>
static __device__ __forceinline__ void right_run(consumer &c, const T &t, int b0, int b1,
                                                 uint32_t n)
{
    uint32_t mine[16], other[16];
    int b = b0;
    for (; b + 1 < b1; b += 2, n += 2) {
        float s[32];
        const int what = t.begin(c, n + 1, b + 1);
        scores_issue<T, 0, N_COL>(c, s, n + 1);
        wgmma_commit();
        right_other<T>(c, other, n);
        wgmma_wait<1>();
        regs_pin(s);
        T::give_back(c, n + 1, FREE_ROPE);
        if (b + 3 >= b1)
            T::queries_done(c);
        scores_scale(s, c.f);
        if (what != WHOLE)
            t.mask(c, s, what, b + 1);
        const two alpha = weights(s, mine, c.ref, c.l);
        weights_give(c, mine);
        bar_arrive(BAR_RIGHT + c.warp, 64);
        wgmma_wait<0>();
        regs_pin(c.o);
        T::give_back(c, n, FREE_RIGHT);
        values_add<T>(c, mine, alpha, n + 1);
        wgmma_wait<0>();
        regs_pin(c.o);
        T::give_back(c, n + 1, FREE_RIGHT);
    }
    if (b < b1) {
        right_other<T>(c, other, n);
        if (b1 - b0 == 1)
            T::queries_done(c);
        wgmma_wait<0>();
        regs_pin(c.o);
        T::give_back(c, n, FREE_RIGHT);
    }
}

/* Sums over both groups of the thread's rows, for the share that is the n-th of the block. A sum is NaN where the row
 * is to be dropped, which an infinite value makes it too: it must not leave as NaN. */
static __device__ __forceinline__ two sums_finish(consumer &c, uint32_t n)
{
#pragma unroll
    for (int j = 0; j < 32; j++) {
        c.l.x = fmaf(c.o[4 * j], 0.0f, fmaf(c.o[4 * j + 1], 0.0f, c.l.x));
        c.l.y = fmaf(c.o[4 * j + 2], 0.0f, fmaf(c.o[4 * j + 3], 0.0f, c.l.y));
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        c.l.x += __shfl_xor_sync(~0u, c.l.x, d);
        c.l.y += __shfl_xor_sync(~0u, c.l.y, d);
    }
    const int m = 16 * c.warp + c.lane / 4;
    const uint32_t sum = c.smem + AT_SUM + (n & 1) * 2 * 64 * 4;
    if (c.lane % 4 == 0) {
        sts_f(sum + c.group * 64 * 4 + 4 * m, c.l.x);
        sts_f(sum + c.group * 64 * 4 + 4 * m + 32, c.l.y);
    }
    named_barrier<BAR_BOTH, CONSUMERS>();
    return {lds_f(sum + 4 * m) + lds_f(sum + 64 * 4 + 4 * m),
            lds_f(sum + 4 * m + 32) + lds_f(sum + 64 * 4 + 4 * m + 32)};
}

/* Where a row of M goes: its head's values and lse. */
struct row_target {
    void *out; /* of the head's first value */
    float *lse;
    bool bf16, wide; /* wide: pairs are aligned */
    bool
        partial; /* a NaN goes on and lse stays in base 2: the merge drops the row and counts it once */
};

/* The thread's first (odd 0) or second row, normalised. `sum` is NaN where the row is to be dropped; empty: it attends
 * nothing. */
static __device__ __forceinline__ void row_finish(const consumer &c, int odd, const row_target &t,
                                                  bool empty, float sum, unsigned long long *n_nan)
{
    const bool none = empty || sum == 0.0f, bad = !none && !(sum < -NEG_INF);
    const float f = none || bad ? 0.0f : 1.0f / sum;
    const int col = 256 * c.group + 2 * (c.lane % 4);
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const float a = c.o[4 * j + 2 * odd], b = c.o[4 * j + 2 * odd + 1];
        out_pair(t.out, t.bf16, t.wide, col + 8 * j, f == 0.0f ? 0.0f : a * f,
                 f == 0.0f ? 0.0f : b * f);
    }
    if (c.group != 0 || c.lane % 4 != 0)
        return;
    const float lse = none ? NEG_INF : (odd ? c.ref.y : c.ref.x) + log2f(sum);
    if (t.partial)
        *t.lse = bad ? __int_as_float(0x7fc00000) : lse;
    else
        *t.lse = bad ? NEG_INF : lse * 0.693147180559945309f;
    if (bad && !t.partial && n_nan != NULL)
        atomicAdd(n_nan, 1ull);
}

#endif
