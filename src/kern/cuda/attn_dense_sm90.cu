/* attn_dense_sm90.cu - dense attention over a block table, the main kernel (attn_dense.cuh).
 *
 * S = Q K^T with M = 64 (rows x heads of a group, short ones filled with zeros) and N = 64 keys, O = P V with
 * V read transposed from the same tile. A tile is a page as bf16: nine columns of 64 dims, each [64 keys][64
 * dims] with swizzled rows of 128 bytes. bf16 rows come so by the copy engine through a tensor map; FP8 codes
 * are rounded to bf16 on their way (attn_dense_copy.cuh).
 *
 * Two warp groups, left and right, each with 256 of the 512 columns of O in its registers. Of a pair of tiles
 * left scores the first and right the second; each gives its P to the other through shared memory, thread to
 * thread, since both hold the same places of P. So products of one group run while the other is at its
 * softmax, the softmax is done once, and each half of V is read by one group. The reference of the
 * exponentials moves only when a maximum has grown by more than GROW: P stays below 2^GROW, O is seldom
 * rescaled. The right group goes on from the left group's reference and the left one takes over the right one's.
 *
 * A tile is given back column by column: the rope when it is scored, each half of V when its group has used it.
 *
 * Keys that a row does not attend get a weight of 0, which does not keep NaN away: in a tile that not all rows
 * attend whole, keys that none attends become zeros, and of keys that some attend one with an infinity or NaN
 * among its values becomes zeros too, its score NaN for those who attend it: their result is none anyway.
 */
#include <cuda_bf16.h>

#include "kern/cuda/attn_dense_copy.cuh"
#include "kern/cuda/attn_out.cuh"
#include "kern/cuda/launch.cuh"

/* ---- consumers: a tile that not all rows attend whole ---------------------------------------- */

static __device__ __forceinline__ bool chunk_finite(uint4 v)
{
    const uint32_t m = 0x7f807f80u;
    uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t e = (i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w) & m;
        bad |= (e & 0xffffu) == 0x7f80u || e >> 16 == 0x7f80u;
    }
    return !bad;
}

/* By a group: keys [lo, hi) of a tile are attended by some rows, those from hi on by none. */
static __device__ __forceinline__ void tile_clean(uint32_t tile, uint32_t poison, int lo, int hi,
                                                  int warp, int lane, int group)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int k = warp; k < DENSE_TILE; k += 4) {
        bool bad = false;
        if (k >= lo) {
            const uint32_t at0 =
                tile + lane / 8 * COL_BYTES + k * 128 + ((lane % 8 ^ (k & 7)) << 4);
            bad = k >= hi;
            if (!bad)
                bad = __any_sync(~0u, !chunk_finite(lds128(at0)) ||
                                          !chunk_finite(lds128(at0 + 4 * COL_BYTES)));
            if (bad) {
                sts128(at0, zero);
                sts128(at0 + 4 * COL_BYTES, zero);
            }
        }
        if (lane == 0)
            sts_f(poison + 4 * k, bad && k < hi ? __int_as_float(0x7fc00000) : 0.0f);
    }
    fence_async();
    bar_sync(BAR_GROUP + group, GROUP);
}

/* ---- consumers: scores and softmax ------------------------------------------------------------ */

/* Columns [from, to) of S = Q K^T, in the order in which they come. */
template <int KIND, int FROM, int TO>
static __device__ __forceinline__ void scores_issue(float (&s)[32], uint32_t q, uint32_t tile,
                                                    uint32_t full, uint32_t parity)
{
    uint64_t a = wgmma_tile(q), b = wgmma_tile(tile);
    asm volatile(""
                 : "+l"(a), "+l"(b)); /* not kept from one tile to the next: registers are short */
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        const int c = column_at<KIND>(i);
        mbar_wait(full + 8 * c, parity);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma_ss64(s, a + c * (COL_BYTES / 16) + 2 * j, b + c * (COL_BYTES / 16) + 2 * j,
                       i + j > 0);
    }
}

/* O += P V of a group's 256 columns: with 384 threads by products of 256 columns, for which a thread of 512 has
 * not the registers from the start. */
template <int KIND>
static __device__ __forceinline__ void values_issue(float (&o)[128], const uint32_t (&w)[16],
                                                    uint32_t at)
{
    uint64_t v = wgmma_tile_trans(at);
    asm volatile("" : "+l"(v));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (KIND == DENSE_BF16) {
            wgmma_rs256_trans(o, &w[4 * j], v + 128 * j);
        } else {
            wgmma_rs128_trans<0>(o, &w[4 * j], v + 128 * j);
            wgmma_rs128_trans<64>(o, &w[4 * j], v + 128 * j + 2 * COL_BYTES / 16);
        }
    }
}

/* What a thread knows of its two rows of M, 8 apart. */
struct two {
    float x, y;
};

/* Scores to weights: ref is the reference before and after, l the sums of this group's weights, w the weights as
 * fragments. Returns what the sums so far are to be multiplied by. */
static __device__ __forceinline__ two weights(float (&s)[32], uint32_t (&w)[16], two &ref, two &l)
{
    float mx = NEG_INF, my = NEG_INF;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        mx = fmaxf(mx, fmaxf(s[4 * j], s[4 * j + 1]));
        my = fmaxf(my, fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
    my = fmaxf(my, __shfl_xor_sync(~0u, my, 1));
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
    my = fmaxf(my, __shfl_xor_sync(~0u, my, 2));
    const two was = ref;
    ref.x = mx > was.x + GROW ? mx : was.x;
    ref.y = my > was.y + GROW ? my : was.y;
    const float sx = ref.x == NEG_INF ? 0.0f : ref.x, sy = ref.y == NEG_INF ? 0.0f : ref.y;
    two alpha;
    alpha.x = ref.x == was.x ? 1.0f : exp2_approx(was.x - ref.x);
    alpha.y = ref.y == was.y ? 1.0f : exp2_approx(was.y - ref.y);
    float lx = 0.0f, ly = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float a = exp2_approx(s[4 * j] - sx), b = exp2_approx(s[4 * j + 1] - sx);
        const float c = exp2_approx(s[4 * j + 2] - sy), d = exp2_approx(s[4 * j + 3] - sy);
        lx += a + b;
        ly += c + d;
        const __nv_bfloat162 u = __floats2bfloat162_rn(a, b), v = __floats2bfloat162_rn(c, d);
        w[2 * j] = *(const uint32_t *)&u;
        w[2 * j + 1] = *(const uint32_t *)&v;
    }
    l.x = l.x * alpha.x + lx;
    l.y = l.y * alpha.y + ly;
    return alpha;
}

/* Scaled scores; in a tile that not all attend whole, those of keys a row does not attend become -inf. */
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

static __device__ __forceinline__ void scores_mask(float (&s)[32], uint32_t poison, int nx, int ny,
                                                   int t)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int k = 8 * j + 2 * t;
        const float2 add = lds_f2(poison + 4 * k);
        s[4 * j] = k < nx ? s[4 * j] + add.x : NEG_INF;
        s[4 * j + 1] = k + 1 < nx ? s[4 * j + 1] + add.y : NEG_INF;
        s[4 * j + 2] = k < ny ? s[4 * j + 2] + add.x : NEG_INF;
        s[4 * j + 3] = k + 1 < ny ? s[4 * j + 3] + add.y : NEG_INF;
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
static __device__ __forceinline__ void weights_give(uint32_t smem, uint32_t ref_at,
                                                    const uint32_t (&w)[16], two ref, int tid)
{
    const uint32_t at = smem + AT_P + 16 * tid;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sts128(at + 16 * GROUP * i, make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
    if (tid % 4 == 0) {
        const int m = tid / 32 * 16 + tid % 32 / 4;
        sts_f(ref_at + 4 * m, ref.x);
        sts_f(ref_at + 4 * m + 32, ref.y);
    }
}

static __device__ __forceinline__ two weights_take(uint32_t smem, uint32_t ref_at,
                                                   uint32_t (&w)[16], int tid)
{
    const uint32_t at = smem + AT_P + 16 * tid;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = lds128(at + 16 * GROUP * i);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    const int m = tid / 32 * 16 + tid % 32 / 4;
    two ref;
    ref.x = lds_f(ref_at + 4 * m);
    ref.y = lds_f(ref_at + 4 * m + 32);
    return ref;
}

/* Takes over the other group's reference: what the own sums are to be multiplied by. */
static __device__ __forceinline__ two ref_take(two &ref, two to, two &l)
{
    two alpha;
    alpha.x = to.x == ref.x ? 1.0f : exp2_approx(ref.x - to.x);
    alpha.y = to.y == ref.y ? 1.0f : exp2_approx(ref.y - to.y);
    l.x *= alpha.x;
    l.y *= alpha.y;
    ref = to;
    return alpha;
}

/* ---- consumers: results ------------------------------------------------------------------------ */

/* Where a share's results go. */
struct target {
    bool partial;
    int64_t slot; /* of partials: of the item's first row and head */
};

/* One row of M: normalised values, lse. `sum` is the row sum, NaN where the row is to be dropped. */
static __device__ __forceinline__ void row_store(const dense_params &p, const dense_unit &u,
                                                 const target &t, const float (&o)[128], int odd,
                                                 int row, int head, int len, float ref, float sum,
                                                 int col, bool first)
{
    const bool none = len == 0 || sum == 0.0f, bad = !none && !(sum < -NEG_INF);
    const float f = none || bad ? 0.0f : 1.0f / sum;
    const int64_t part = t.slot + (int64_t)(row - u.item.row) * p.n_head + head;
    void *base = t.partial ? (void *)p.part_out : p.out;
    const int64_t at =
        t.partial ? part * DENSE_VDIM : row * p.out_stride_row + head * p.out_stride_head;
    const bool bf16 = !t.partial && p.out_bf16, wide = t.partial || p.out_wide;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const float a = o[4 * j + 2 * odd], b = o[4 * j + 2 * odd + 1];
        out_pair(base, bf16, wide, at + col + 8 * j, f == 0.0f ? 0.0f : a * f,
                 f == 0.0f ? 0.0f : b * f);
    }
    if (!first)
        return;
    const float lse = none ? NEG_INF : ref + log2f(sum);
    if (t.partial) /* NaN goes on: the merge drops the row and counts it once */
        p.part_lse[part] = bad ? __int_as_float(0x7fc00000) : lse;
    else
        p.lse[(int64_t)row * p.n_head + head] = bad ? NEG_INF : lse * 0.693147180559945309f;
    if (bad && !t.partial && p.n_nan != NULL)
        atomicAdd(p.n_nan, 1ull);
}

/* Rows that attend nothing in this piece: (0, -inf); of a partial the lse alone. */
static __device__ void empty_store(const dense_params &p, const dense_unit &u, const share &s,
                                   const target &t, int head0, int n_head)
{
    for (int m = threadIdx.x / 32; m < s.n * n_head; m += CONSUMERS / 32) {
        const int row = s.row + m / n_head, head = head0 + m % n_head, lane = threadIdx.x % 32;
        if (t.partial) {
            if (lane == 0)
                p.part_lse[t.slot + (int64_t)(row - u.item.row) * p.n_head + head] = NEG_INF;
            continue;
        }
        const int64_t at = row * p.out_stride_row + head * p.out_stride_head;
        for (int d = 2 * lane; d < DENSE_VDIM; d += 64)
            out_pair(p.out, p.out_bf16, p.out_wide, at + d, 0.0f, 0.0f);
        if (lane == 0)
            p.lse[(int64_t)row * p.n_head + head] = NEG_INF;
    }
}

/* ---- consumers: a share ------------------------------------------------------------------------ */

/* A thread of a group at its work. */
struct consumer {
    uint32_t smem;
    int group, warp, lane, tid; /* tid: in its group */
    float o[128]; /* of its two rows of M: 4 j + 0, 1 and 2, 3 at columns 8 j + 2 t, + 1 */
    two ref, l, f;
    int nx, ny; /* keys that its rows attend */
};

static __device__ __forceinline__ void free_arrive(const consumer &c, uint32_t n, int what)
{
    __syncwarp();
    if (c.lane == 0)
        mbar_arrive(c.smem + AT_FREE + (n & 1) * N_FREE * 8 + 8 * what);
}

/* Waits for the first column of tile n, of keys from `base` on. WHOLE where all rows attend it whole; else it is made
 * fit for those that do not, and its keys are returned: 64, or 0 of a page that does not exist. (Read here: behind the
 * scores the place may hold the next tile's.) */
enum { WHOLE = -1 };
template <int KIND>
static __device__ __forceinline__ int tile_begin(const consumer &c, const share &s, uint32_t n,
                                                 int base)
{
    const int buf = n & 1;
    const uint32_t full = c.smem + AT_FULL + buf * N_COL * 8, parity = n / 2 & 1;
    mbar_wait(full + 8 * column_at<KIND>(0), parity);
    const int limit = (int)lds32(c.smem + AT_LIMIT + 4 * buf);
    const int lo = min(limit, s.least - base), hi = min(limit, s.most - base);
    if (lo >= DENSE_TILE)
        return WHOLE;
#pragma unroll 1
    for (int i = 0; i < N_COL; i++)
        mbar_wait(full + 8 * i, parity);
    tile_clean(c.smem + AT_K + buf * TILE_BYTES, c.smem + AT_POISON + 4 * 64 * c.group, max(lo, 0),
               hi, c.warp, c.lane, c.group);
    return limit;
}

static __device__ __forceinline__ void tile_mask(const consumer &c, float (&s)[32], int limit,
                                                 int base)
{
    scores_mask(s, c.smem + AT_POISON + 4 * 64 * c.group, min(limit, c.nx - base),
                min(limit, c.ny - base), c.lane % 4);
}

#define TILE_OF(c, n) ((c).smem + AT_K + ((n)&1) * TILE_BYTES)
#define FULL_OF(c, n) ((c).smem + AT_FULL + ((n)&1) * N_COL * 8)
#define PARITY_OF(n)  ((n) / 2 & 1)

/* Group left of a share whose tiles are n, n + 1, ... of the block: scores the first of every pair. */
template <int KIND>
static __device__ __forceinline__ void left_run(consumer &c, const share &sh, uint32_t n)
{
    float s[32];
    uint32_t mine[16], other[16];
    int keys = tile_begin<KIND>(c, sh, n, sh.b0 * DENSE_TILE);
    scores_issue<KIND, 0, N_COL>(s, c.smem + AT_Q, TILE_OF(c, n), FULL_OF(c, n), PARITY_OF(n));
    wgmma_commit();
    for (int b = sh.b0; b < sh.b1; b += 2, n += 2) {
        const bool pair = b + 1 < sh.b1, more = b + 2 < sh.b1;
        wgmma_wait<0>();
        regs_pin(s);
        free_arrive(c, n, FREE_ROPE);
        if (!more && c.lane == 0)
            mbar_arrive(c.smem + AT_QFREE);
        scores_scale(s, c.f);
        if (keys != WHOLE)
            tile_mask(c, s, keys, b * DENSE_TILE);
        const two alpha = weights(s, mine, c.ref, c.l);
        weights_give(c.smem, c.smem + AT_REF, mine, c.ref, c.tid);
        bar_arrive(BAR_LEFT + c.warp, 64);
        rescale(c.o, alpha);
        regs_pin(c.o);
        wgmma_fence();
        values_issue<KIND>(c.o, mine, TILE_OF(c, n));
        wgmma_commit();
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive(c, n, FREE_LEFT);
        if (!pair)
            break;
        bar_sync(BAR_RIGHT + c.warp, 64);
        const two to = weights_take(c.smem, c.smem + AT_REF + 4 * 64, other, c.tid);
        rescale(c.o, ref_take(c.ref, to, c.l));
        regs_pin(c.o);
        wgmma_fence();
        values_issue<KIND>(c.o, other, TILE_OF(c, n + 1));
        wgmma_commit();
        if (!more) {
            wgmma_wait<0>();
            regs_pin(c.o);
            free_arrive(c, n + 1, FREE_LEFT);
            break;
        }
        keys = tile_begin<KIND>(c, sh, n + 2, (b + 2) * DENSE_TILE);
        scores_issue<KIND, 0, 1>(s, c.smem + AT_Q, TILE_OF(c, n + 2), FULL_OF(c, n + 2),
                                 PARITY_OF(n + 2));
        wgmma_commit();
        wgmma_wait<1>();
        free_arrive(c, n + 1, FREE_LEFT);
        scores_issue<KIND, 1, N_COL>(s, c.smem + AT_Q, TILE_OF(c, n + 2), FULL_OF(c, n + 2),
                                     PARITY_OF(n + 2));
        wgmma_commit();
    }
}

/* The first weights of a pair, from the left group, times the right half of its values: under way. */
template <int KIND>
static __device__ __forceinline__ void right_other(consumer &c, uint32_t (&other)[16], uint32_t n)
{
    bar_sync(BAR_LEFT + c.warp, 64);
    const two to = weights_take(c.smem, c.smem + AT_REF, other, c.tid);
    rescale(c.o, ref_take(c.ref, to, c.l));
    regs_pin(c.o);
    wgmma_fence();
    values_issue<KIND>(c.o, other, TILE_OF(c, n) + 4 * COL_BYTES);
    wgmma_commit();
}

/* Group right: scores the second of every pair. */
template <int KIND>
static __device__ __forceinline__ void right_run(consumer &c, const share &sh, uint32_t n)
{
    uint32_t mine[16], other[16];
    int b = sh.b0;
    for (; b + 1 < sh.b1; b += 2, n += 2) {
        float s[32];
        const int keys = tile_begin<KIND>(c, sh, n + 1, (b + 1) * DENSE_TILE);
        scores_issue<KIND, 0, N_COL>(s, c.smem + AT_Q, TILE_OF(c, n + 1), FULL_OF(c, n + 1),
                                     PARITY_OF(n + 1));
        wgmma_commit();
        right_other<KIND>(c, other, n);
        wgmma_wait<1>();
        regs_pin(s);
        free_arrive(c, n + 1, FREE_ROPE);
        if (b + 3 >= sh.b1 && c.lane == 0)
            mbar_arrive(c.smem + AT_QFREE);
        scores_scale(s, c.f);
        if (keys != WHOLE)
            tile_mask(c, s, keys, (b + 1) * DENSE_TILE);
        const two alpha = weights(s, mine, c.ref, c.l);
        weights_give(c.smem, c.smem + AT_REF + 4 * 64, mine, c.ref, c.tid);
        bar_arrive(BAR_RIGHT + c.warp, 64);
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive(c, n, FREE_RIGHT);
        rescale(c.o, alpha);
        regs_pin(c.o);
        wgmma_fence();
        values_issue<KIND>(c.o, mine, TILE_OF(c, n + 1) + 4 * COL_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive(c, n + 1, FREE_RIGHT);
    }
    if (b < sh.b1) {
        right_other<KIND>(c, other, n);
        if (c.lane == 0 && sh.b1 - sh.b0 == 1)
            mbar_arrive(c.smem + AT_QFREE);
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive(c, n, FREE_RIGHT);
    }
}

/* Row sums over both groups, then lse and values of the thread's rows. */
static __device__ __forceinline__ void finish(const dense_params &p, consumer &c,
                                              const dense_unit &u, const share &s, const target &t,
                                              int head0, int n_head, uint32_t n_share)
{
    /* an infinite value must not leave as NaN: it makes the row sum NaN, which drops the row */
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
    const int m = 16 * c.warp + c.lane / 4, quad = c.lane % 4;
    const uint32_t sum = c.smem + AT_SUM + (n_share & 1) * 2 * 64 * 4;
    if (quad == 0) {
        sts_f(sum + c.group * 64 * 4 + 4 * m, c.l.x);
        sts_f(sum + c.group * 64 * 4 + 4 * m + 32, c.l.y);
    }
    named_barrier<BAR_BOTH, CONSUMERS>();
    const float lx = lds_f(sum + 4 * m) + lds_f(sum + 64 * 4 + 4 * m);
    const float ly = lds_f(sum + 4 * m + 32) + lds_f(sum + 64 * 4 + 4 * m + 32);
    const int col = 256 * c.group + 2 * quad;
    const bool first = c.group == 0 && quad == 0;
    int r = m / p.heads, h = m % p.heads;
    if (r < s.n && h < n_head)
        row_store(p, u, t, c.o, 0, s.row + r, head0 + h, c.nx, c.ref.x, lx, col, first);
    r = (m + 8) / p.heads, h = (m + 8) % p.heads;
    if (r < s.n && h < n_head)
        row_store(p, u, t, c.o, 1, s.row + r, head0 + h, c.ny, c.ref.y, ly, col, first);
}

/* Factor of the scores of row m of M, and how many keys it attends; 0 of a row that is not there. */
static __device__ __forceinline__ float row_factor(const dense_params &p, const share &s, int m,
                                                   int head0, int n_head, int *len)
{
    const int r = m / p.heads, h = m % p.heads;
    *len = 0;
    if (r >= s.n || h >= n_head)
        return 0.0f;
    *len = dense_len(&p.work, s.row + r);
    return p.q_scale == NULL
               ? p.scale_log2
               : p.scale_log2 * p.q_scale[(int64_t)(s.row + r) * p.n_head + head0 + h];
}

template <int KIND>
static __device__ __forceinline__ void consumers_run(const dense_params &p, dense_walk w,
                                                     int64_t total, uint32_t smem, int part,
                                                     int side, int head0, int n_head)
{
    consumer c;
    c.smem = smem;
    c.group = threadIdx.x / GROUP;
    c.tid = threadIdx.x % GROUP;
    c.warp = c.tid / 32;
    c.lane = c.tid % 32;
    uint32_t n_tile = 0, n_share = 0;
    int4 goes_on = make_int4(-1, 0, 0, 0);
    dense_unit u;
    while (dense_next(&w, &p.work, &u)) {
        const share s = share_of(p, u, side);
        target t;
        t.partial = u.nb > 0 && (u.b0 > 0 || u.b1 < u.nb);
        t.slot = (2 * (int64_t)part + (u.b0 == 0)) * p.work.span * p.n_head;
        if (t.partial && u.b0 == 0) /* w.at: the position behind the item */
            goes_on = make_int4(u.item.row, u.item.n, dense_part_of(&p.work, total, w.at - 1), 0);
        if (s.n <= 0)
            continue;
        if (s.b0 >= s.b1) {
            empty_store(p, u, s, t, head0, n_head);
            continue;
        }
        const int m = 16 * c.warp + c.lane / 4;
        c.f.x = row_factor(p, s, m, head0, n_head, &c.nx);
        c.f.y = row_factor(p, s, m + 8, head0, n_head, &c.ny);
        c.ref.x = c.ref.y = NEG_INF;
        c.l.x = c.l.y = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; i++)
            c.o[i] = 0.0f;
        mbar_wait(smem + AT_QFULL, n_share & 1);
        if (c.group == 0)
            left_run<KIND>(c, s, n_tile);
        else
            right_run<KIND>(c, s, n_tile);
        n_tile += s.b1 - s.b0;
        finish(p, c, u, s, t, head0, n_head, n_share);
        n_share++;
    }
    if (threadIdx.x == 0 && side == 0)
        p.cut[part] = goes_on;
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

/* Threads, and registers of those that copy and those that consume. */
template <int KIND> struct budget {
    static constexpr int threads = KIND == DENSE_BF16 ? 384 : 512;
    static constexpr int copier = KIND == DENSE_BF16 ? 40 : 40;
    static constexpr int consumer = KIND == DENSE_BF16 ? 232 : 216;
};

template <int KIND>
static __global__ void __launch_bounds__(budget<KIND>::threads, 1)
    attn_dense_main(const __grid_constant__ dense_params p)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw);
    int64_t *scan = (int64_t *)(raw + AT_SCAN);
    const int part = blockIdx.x / p.n_side, side = blockIdx.x % p.n_side;
    const int head0 = side % p.n_head_group * p.heads, n_head = min(p.heads, p.n_head - head0);
    if (threadIdx.x == 0) {
        const int arrivals = KIND == DENSE_BF16 ? 1 : 2 * COPIERS / 32;
        for (int i = 0; i < 2 * N_COL; i++)
            mbar_init(smem + AT_FULL + 8 * i, arrivals);
        for (int i = 0; i < 2 * N_FREE; i++)
            mbar_init(smem + AT_FREE + 8 * i, GROUP / 32);
        mbar_init(smem + AT_QFULL, KIND == DENSE_BF16 ? 96 : 2 * COPIERS);
        mbar_init(smem + AT_QFREE, CONSUMERS / 32);
        mbar_init(smem + AT_RAW, 1);
        mbar_init(smem + AT_RAW + 8, 1);
        mbar_init_fence();
    }
    grid_wait();
    int64_t total;
    const dense_walk w = walk_begin<budget<KIND>::threads>(p, part, scan, &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<budget<KIND>::copier>();
        if constexpr (KIND == DENSE_BF16) {
            if (threadIdx.x < CONSUMERS + 32)
                pages_copy(p, w, smem, side);
            else
                queries_run(p, w, smem, side, head0, n_head);
        } else {
            codes_run<KIND>(p, w, smem, side, head0, n_head);
        }
    } else {
        regs_take<budget<KIND>::consumer>();
        consumers_run<KIND>(p, w, total, smem, part, side, head0, n_head);
    }
}

/* ---- launch -------------------------------------------------------------------------------------- */

template <int KIND> static cudaError_t main_launch(const dense_params &p, cudaStream_t stream)
{
    const cudaError_t e = cudaFuncSetAttribute(
        attn_dense_main<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
    if (e != cudaSuccess)
        return e;
    return launch_kernel(attn_dense_main<KIND>, dim3(p.work.n_part * p.n_side),
                         budget<KIND>::threads, SMEM_BYTES, true, p, stream);
}

cudaError_t attn_dense_main_launch(const dense_params &p, int kind, cudaStream_t stream)
{
    return kind == DENSE_BF16  ? main_launch<DENSE_BF16>(p, stream)
           : kind == DENSE_FP8 ? main_launch<DENSE_FP8>(p, stream)
                               : main_launch<DENSE_DS>(p, stream);
}
