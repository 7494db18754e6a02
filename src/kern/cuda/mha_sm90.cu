/* mha_sm90.cu - multi-head attention over blocks of keys on sm_90a, the main kernel and the op (mha_sm90.cuh).
 *
 * A unit is MHA_ROWS query rows of one head, or of two blocks of threads, a pair, that take it together (PAIR 2). They
 * take units in turn, a head's units side by side and longest first, so that blocks that run at the same time read
 * the same keys. Two groups of consumers have 64 rows each; two warps bring tiles of keys and of values, each into a
 * ring of two places. Each block of a pair fetches half of every tile for both.
 *
 * S = Q K^T (m64n128, both operands in shared memory), weights in registers, O += P V with P from registers. The
 * scores of a tile are issued before the values of the tile before it, so that the tensor cores have work while weights
 * are made, a group's own and the other's.
 *
 * The fold. State between blocks is (out, lse), as memory has it between calls, so that it makes no difference to
 * the bits in how many calls the blocks come. A block begins with O = out, a sum of 1 and lse as the reference of
 * the exponentials (or with 0, 0, -inf), and ends with out = O / sum. The reference moves only when a maximum has
 * grown by more than GROW: O is seldom rescaled. All of that is decided row by row, and tiles are counted from the
 * first key of a block on: a row's bits are its own.
 *
 * A block that is to be dropped for a row is noticed when O holds some of it already. It takes a key or a query
 * that is not finite or huge to get there: before such a block (MHA_WILD) the state goes to out and comes back
 * from there.
 */
#include <cuda_bf16.h>

#include "kern/cuda/attn_online.cuh"
#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/mha_sm90.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum {
    GROUP = 128,
    CONSUMERS = 2 * GROUP,
    THREADS = CONSUMERS + 128,
    REGS_COPIER = 24,
    REGS_CONSUMER = 240,
    RING = 2,
    KEY_BYTES = MHA_HEAD_BYTES + MHA_ROPE_BYTES, /* of a tile: 3 columns of 128 rows   */
    KEY_COL = 16384,
    Q_COL = 8192, /* of a group: 3 columns of 64 rows   */
    Q_BYTES = 3 * Q_COL,
    AT_K = 0,
    AT_V = AT_K + RING * KEY_BYTES,
    AT_Q = AT_V + RING * MHA_HEAD_BYTES,
    AT_BAR = AT_Q + 2 * Q_BYTES,
    AT_K_FULL = AT_BAR,
    AT_K_FREE = AT_K_FULL + 8 * RING,
    AT_V_FULL = AT_K_FREE + 8 * RING,
    AT_V_FREE = AT_V_FULL + 8 * RING,
    SMEM_BYTES = AT_V_FREE + 8 * RING
};
enum { BAR_GROUP = 1 }; /* and 2: of each group */

#define LOG2E 1.44269504088896341f
#define LN2   0.693147180559945309f

/* ---- units ----------------------------------------------------------------------------------- */

struct unit {
    int head, row0, n_tile; /* row0: of the unit, PAIR * MHA_ROWS rows */
};

static __device__ __forceinline__ int row_len(const mha_params &p, int row)
{
    return min(max(p.len[row], 0), p.n_key);
}

/* By a warp. */
template <int PAIR>
static __device__ __forceinline__ unit unit_of(const mha_params &p, int64_t i, int lane)
{
    const int n = (p.n_row - 1) / (PAIR * MHA_ROWS) + 1;
    unit u;
    u.head = (int)(i / n);
    u.row0 = (n - 1 - (int)(i % n)) * PAIR * MHA_ROWS;
    int most = 0;
#pragma unroll
    for (int r = 0; r < PAIR * MHA_ROWS; r += 32)
        if (u.row0 + r + lane < p.n_row)
            most = max(most, row_len(p, u.row0 + r + lane));
    u.n_tile = (__reduce_max_sync(~0u, most) + MHA_STEP - 1) / MHA_STEP;
    return u;
}

static __host__ __device__ __forceinline__ int64_t unit_count(const mha_params &p, int pair)
{
    return (int64_t)p.n_head * ((p.n_row - 1) / (pair * MHA_ROWS) + 1);
}

/* Units of this block or pair: from the first on, in steps. */
#define FOR_UNITS(i)                                                                               \
    for (int64_t i = blockIdx.x / PAIR; i < unit_count(p, PAIR); i += gridDim.x / PAIR)

/* ---- copying --------------------------------------------------------------------------------- */

/* This block's part of n bytes. */
template <int PAIR>
static __device__ __forceinline__ void part_copy(uint32_t dst, const uint8_t *src, uint32_t n,
                                                 uint32_t bar, uint32_t rank)
{
    if constexpr (PAIR == 1)
        copy_bulk(dst, src, n, bar);
    else
        copy_bulk_all(dst + rank * (n / 2), src + rank * (n / 2), n / 2, bar, 3);
}

/* One lane: the keys (VALUES 0) or values of all tiles of all units. */
template <int PAIR, int VALUES>
static __device__ void tiles_copy(const mha_params &p, uint32_t smem, uint32_t rank)
{
    const int lane = threadIdx.x % 32;
    uint32_t n = 0;
    FOR_UNITS(i)
    {
        const unit u = unit_of<PAIR>(p, i, lane);
        if (lane != 0)
            continue;
        const uint8_t *from = p.tiles + (int64_t)u.head * p.n_tile * 2 * MHA_HEAD_BYTES;
        for (int t = 0; t < u.n_tile; t++, n++) {
            const uint32_t at = n % RING, parity = (n / RING & 1) ^ 1;
            const uint8_t *tile = from + (int64_t)t * 2 * MHA_HEAD_BYTES;
            if constexpr (VALUES) {
                const uint32_t full = smem + AT_V_FULL + 8 * at;
                mbar_wait(smem + AT_V_FREE + 8 * at, parity);
                mbar_expect(full, MHA_HEAD_BYTES);
                part_copy<PAIR>(smem + AT_V + at * MHA_HEAD_BYTES, tile + MHA_HEAD_BYTES,
                                MHA_HEAD_BYTES, full, rank);
            } else {
                const uint32_t full = smem + AT_K_FULL + 8 * at, dst = smem + AT_K + at * KEY_BYTES;
                mbar_wait(smem + AT_K_FREE + 8 * at, parity);
                mbar_expect(full, KEY_BYTES);
                part_copy<PAIR>(dst, tile, MHA_HEAD_BYTES, full, rank);
                part_copy<PAIR>(dst + MHA_HEAD_BYTES, p.rope_tiles + (int64_t)t * MHA_ROPE_BYTES,
                                MHA_ROPE_BYTES, full, rank);
            }
        }
    }
}

/* ---- consumers: queries and state ------------------------------------------------------------- */

struct consumer {
    uint32_t smem;
    int group, warp, lane; /* warp: in its group */
    int head, row;         /* row: the first of its two rows */
    int nx, ny;            /* keys that they attend          */
    int least;             /* of all rows of the group       */
    float o[64];           /* 4 j + 0, 1 and 2, 3 at columns 8 j + 2 (lane % 4), + 1 */
    uint32_t w[32];        /* weights as fragments           */
    two ref, l, lse;       /* l: of this thread's columns    */
    int wild;              /* MHA_WILD with queries, or a scale, out of the usual */
    bool look;             /* a block of the unit is wild: each has to be asked   */
};

/* The group's queries to shared memory; MHA_WILD where one of them is. */
static __device__ __forceinline__ int queries_load(const mha_params &p, const consumer &c, int row0)
{
    const int tid = c.warp * 32 + c.lane;
    bool wild = false;
#pragma unroll 4
    for (int i = tid; i < 64 * 24; i += GROUP) {
        const int r = i / 24, k = i % 24;
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
                    e[j] = d >= MHA_DIM ? q[p.nope + d - MHA_DIM] : d < p.nope ? q[d] : 0;
                }
                v = make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16,
                               e[6] | e[7] << 16);
            }
        }
        wild = wild || mha_pair_over<MHA_QK_EXP>(v.x) || mha_pair_over<MHA_QK_EXP>(v.y) ||
               mha_pair_over<MHA_QK_EXP>(v.z) || mha_pair_over<MHA_QK_EXP>(v.w);
        sts128(c.smem + AT_Q + c.group * Q_BYTES + k / 8 * Q_COL + mha_piece(r, k % 8), v);
    }
    fence_async();
    wild = !named_barrier_all(BAR_GROUP + c.group, GROUP, !wild);
    return wild || !(p.scale_log2 <= (float)MHA_SCALE_MAX) ? MHA_WILD : 0;
}

static __device__ __forceinline__ float *out_row(const mha_params &p, const consumer &c, int odd)
{
    return p.out + (c.row + 8 * odd) * p.out_stride_row + c.head * p.out_stride_head;
}

/* Values of a row that has some, zeros of another. */
static __device__ __forceinline__ void row_fetch(const mha_params &p, consumer &c, int odd,
                                                 float lse)
{
    const float *from = out_row(p, c, odd);
    const bool some = lse > NEG_INF;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int d = 8 * j + c.lane % 4 * 2;
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

static __device__ __forceinline__ void row_store(const mha_params &p, const consumer &c, int odd)
{
    float *to = out_row(p, c, odd);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int d = 8 * j + c.lane % 4 * 2;
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
static __device__ __forceinline__ void sums_begin(consumer &c)
{
    const bool mine = c.lane % 4 == 0;
    c.ref.x = ref_of(c.lse.x);
    c.ref.y = ref_of(c.lse.y);
    c.l.x = mine && c.lse.x > NEG_INF ? 1.0f : 0.0f;
    c.l.y = mine && c.lse.y > NEG_INF ? 1.0f : 0.0f;
}

static __device__ __forceinline__ void state_load(const mha_params &p, consumer &c)
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
static __device__ __forceinline__ void state_store(const mha_params &p, const consumer &c)
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

static __device__ __forceinline__ void scale(float (&o)[64], two f)
{
#pragma unroll
    for (int j = 0; j < 16; j++) {
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

/* ---- consumers: a block ------------------------------------------------------------------------ */

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
static __device__ __forceinline__ void rows_restore(const mha_params &p, consumer &c, bool bad_x,
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
static __device__ __forceinline__ two block_end(const mha_params &p, consumer &c, int key0,
                                                int flag)
{
    const float lx = quad_sum(c.l.x), ly = quad_sum(c.l.y);
    bool bad_x = false, bad_y = false;
    if (flag & MHA_WILD) {
        wgmma_wait<0>();
        regs_pin(c.o);
        float ax = 0.0f, ay = 0.0f; /* NaN where something is not finite */
#pragma unroll
        for (int j = 0; j < 16; j++) {
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
static __device__ __forceinline__ void rows_keep(const mha_params &p, consumer &c)
{
    if (c.row < p.n_row && c.lse.x > NEG_INF)
        row_store(p, c, 0);
    if (c.row + 8 < p.n_row && c.lse.y > NEG_INF)
        row_store(p, c, 1);
}

/* ---- consumers: a tile ------------------------------------------------------------------------- */

/* A descriptor further on: only the low word counts addresses, which never carry. */
static __device__ __forceinline__ uint64_t further(uint64_t d, uint32_t by)
{
    return (d & 0xffffffff00000000ull) | (uint32_t)((uint32_t)d + by);
}

static __device__ __forceinline__ void scores_issue(float (&s)[64], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int c = 0; c < 3; c++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma_ss128(s, further(q, c * (Q_COL / 16) + 2 * j),
                        further(k, c * (KEY_COL / 16) + 2 * j), c + j > 0);
}

static __device__ __forceinline__ void values_issue(float (&o)[64], const uint32_t (&w)[32],
                                                    uint64_t v)
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        wgmma_rs128_trans<0>(o, &w[4 * j], further(v, j / 4 * (16384 / 16) + 128 * (j % 4)));
}

/* Base-2 exponents of scores under a reference. f s - ref in one rounding is exact about a reference that is itself
 * rounded, but where 2^-24 of it is no small number: then the product is rounded first, so that the largest is 0. Only
 * wild blocks get there. */
static __device__ __forceinline__ void exponents(float (&s)[64], float f, float rx, float ry,
                                                 int flag)
{
    float fx = f, fy = f;
    if (flag & MHA_WILD) {
        const bool far_x = fabsf(rx) > 0x1p26f, far_y = fabsf(ry) > 0x1p26f;
#pragma unroll
        for (int i = 0; i < 64; i++)
            if (i % 4 < 2 ? far_x : far_y)
                s[i] = __fsub_rn(__fmul_rn(s[i], f), i % 4 < 2 ? rx : ry);
        fx = far_x ? 1.0f : f, fy = far_y ? 1.0f : f;
        rx = far_x ? 0.0f : rx, ry = far_y ? 0.0f : ry;
    }
#pragma unroll
    for (int i = 0; i < 64; i++)
        s[i] = i % 4 < 2 ? fmaf(s[i], fx, -rx) : fmaf(s[i], fy, -ry);
}

/* Scores of a tile, of whose keys the thread's rows attend nx and ny, to weights in their place. Returns what the sums
 * so far are to be multiplied by. */
static __device__ __forceinline__ two weights(consumer &c, float (&s)[64], float f, bool whole,
                                              int nx, int ny, int flag)
{
    if (!whole) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const int k = 8 * j + c.lane % 4 * 2;
            s[4 * j] = k < nx ? s[4 * j] : NEG_INF;
            s[4 * j + 1] = k + 1 < nx ? s[4 * j + 1] : NEG_INF;
            s[4 * j + 2] = k < ny ? s[4 * j + 2] : NEG_INF;
            s[4 * j + 3] = k + 1 < ny ? s[4 * j + 3] : NEG_INF;
        }
    }
    two most = rows_max(s);
    most.x *= f;
    most.y *= f;
    const two alpha = refs_move(c.ref, most);
    const float sx = ref_finite(c.ref.x), sy = ref_finite(c.ref.y);
    float lx = 0.0f, ly = 0.0f;
    exponents(s, f, sx, sy, flag);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        s[4 * j] = exp2_approx(s[4 * j]);
        s[4 * j + 1] = exp2_approx(s[4 * j + 1]);
        s[4 * j + 2] = exp2_approx(s[4 * j + 2]);
        s[4 * j + 3] = exp2_approx(s[4 * j + 3]);
        lx += s[4 * j] + s[4 * j + 1];
        ly += s[4 * j + 2] + s[4 * j + 3];
    }
    c.l.x = fmaf(c.l.x, alpha.x, lx);
    c.l.y = fmaf(c.l.y, alpha.y, ly);
    return alpha;
}

static __device__ __forceinline__ void weights_pack(uint32_t (&w)[32], const float (&s)[64])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const __nv_bfloat162 v = __floats2bfloat162_rn(s[2 * i], s[2 * i + 1]);
        w[i] = *(const uint32_t *)&v;
    }
}

/* ---- consumers: a unit ------------------------------------------------------------------------- */

/* A place is free when nobody of the pair reads it: each block's copies go to both. */
template <int PAIR>
static __device__ __forceinline__ void free_arrive(const consumer &c, uint32_t bar)
{
    __syncwarp();
    if constexpr (PAIR == 1) {
        if (c.lane == 0)
            mbar_arrive(c.smem + bar);
    } else {
        if (c.lane < PAIR)
            mbar_arrive_at(c.smem + bar, c.lane);
    }
}

#define PARITY(n) ((n) / RING & 1)
#define PLACE(n)  ((n) % RING)

static __device__ __forceinline__ int flags_read(const mha_params &p, int head, int block)
{
    return p.flags[(int64_t)head * p.n_block + block] |
           (p.flags[(int64_t)p.n_head * p.n_block + block] & MHA_WILD);
}

/* By a warp: whether one of a head's first n blocks is wild. */
static __device__ __forceinline__ bool flags_any(const mha_params &p, int head, int n, int lane)
{
    int f = 0;
    for (int b = lane; b < n; b += 32)
        f |= flags_read(p, head, b);
    return __any_sync(~0u, (f & MHA_WILD) != 0);
}

/* The flag of a block of the unit. */
static __device__ __forceinline__ int flag_of(const mha_params &p, const consumer &c, int block)
{
    return (c.look ? flags_read(p, c.head, block) : MHA_BLOCK) | c.wild;
}

/* Tiles n, n + 1, ... of this block of threads are the unit's. */
template <int PAIR>
static __device__ __forceinline__ void unit_attend(const mha_params &p, consumer &c, int n_tile,
                                                   uint32_t n)
{
    float s[64];
    const uint64_t q = wgmma_tile(c.smem + AT_Q + c.group * Q_BYTES);
    int flag = flag_of(p, c, 0);
    mbar_wait(c.smem + AT_K_FULL + 8 * PLACE(n), PARITY(n));
    wgmma_fence();
    scores_issue(s, q, wgmma_tile(c.smem + AT_K + PLACE(n) * KEY_BYTES));
    wgmma_commit();
    wgmma_wait<0>();
    regs_pin(s);
    free_arrive<PAIR>(c, AT_K_FREE + 8 * PLACE(n));
    two alpha = weights(c, s, p.scale_log2, c.least >= MHA_STEP, c.nx, c.ny, flag);
    scale(c.o, alpha);
    weights_pack(c.w, s);
    for (int t = 1; t < n_tile; t++, n++) {
        const uint32_t k_at = PLACE(n + 1), v_at = PLACE(n);
        const int key0 = t * MHA_STEP;
        uint64_t k = wgmma_tile(c.smem + AT_K + k_at * KEY_BYTES);
        uint64_t v = wgmma_tile_trans(c.smem + AT_V + v_at * MHA_HEAD_BYTES);
        mbar_wait(c.smem + AT_K_FULL + 8 * k_at, PARITY(n + 1));
        wgmma_fence();
        scores_issue(s, q, k);
        wgmma_commit();
        mbar_wait(c.smem + AT_V_FULL + 8 * v_at, PARITY(n));
        wgmma_fence();
        values_issue(c.o, c.w, v);
        wgmma_commit();
        const bool begins = t % MHA_BLOCK_TILES == 0;
        two inv = {1.0f, 1.0f};
        if (begins) {
            inv = block_end(p, c, key0 - MHA_BLOCK, flag);
            flag = flag_of(p, c, t / MHA_BLOCK_TILES);
        }
        wgmma_wait<1>();
        regs_pin(s);
        free_arrive<PAIR>(c, AT_K_FREE + 8 * k_at);
        alpha =
            weights(c, s, p.scale_log2, c.least >= key0 + MHA_STEP, c.nx - key0, c.ny - key0, flag);
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive<PAIR>(c, AT_V_FREE + 8 * v_at);
        if (begins) {
            scale(c.o, inv);
            if (flag & MHA_WILD)
                rows_keep(p, c);
        }
        if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f))
            scale(c.o, alpha);
        weights_pack(c.w, s);
    }
    mbar_wait(c.smem + AT_V_FULL + 8 * PLACE(n), PARITY(n));
    wgmma_fence();
    values_issue(c.o, c.w, wgmma_tile_trans(c.smem + AT_V + PLACE(n) * MHA_HEAD_BYTES));
    wgmma_commit();
    wgmma_wait<0>();
    regs_pin(c.o);
    free_arrive<PAIR>(c, AT_V_FREE + 8 * PLACE(n));
    const two inv = block_end(p, c, (n_tile - 1) / MHA_BLOCK_TILES * MHA_BLOCK, flag);
    scale(c.o, inv);
}

template <int PAIR>
static __device__ __forceinline__ void units_attend(const mha_params &p, uint32_t smem,
                                                    uint32_t rank)
{
    consumer c;
    c.smem = smem;
    c.group = __shfl_sync(~0u, threadIdx.x / GROUP, 0); /* uniform, and known to be */
    c.warp = threadIdx.x % GROUP / 32;
    c.lane = threadIdx.x % 32;
    uint32_t n = 0;
    FOR_UNITS(i)
    {
        const unit u = unit_of<PAIR>(p, i, c.lane);
        const int row0 = u.row0 + (int)rank * MHA_ROWS + 64 * c.group;
        c.head = u.head;
        c.row = row0 + 16 * c.warp + c.lane / 4;
        c.nx = c.row < p.n_row ? row_len(p, c.row) : 0;
        c.ny = c.row + 8 < p.n_row ? row_len(p, c.row + 8) : 0;
        int least = p.n_key;
        for (int r = c.lane; r < 64; r += 32)
            if (row0 + r < p.n_row)
                least = min(least, row_len(p, row0 + r));
        c.least = __reduce_min_sync(~0u, least);
        state_load(p, c);
        if (u.n_tile > 0) {
            bar_sync(BAR_GROUP + c.group, GROUP); /* the queries before have been read by all */
            c.wild = queries_load(p, c, row0);
            c.look = flags_any(p, c.head, (u.n_tile - 1) / MHA_BLOCK_TILES + 1, c.lane);
            unit_attend<PAIR>(p, c, u.n_tile, n);
        }
        state_store(p, c);
        n += u.n_tile;
    }
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

template <int PAIR>
static __global__ void __launch_bounds__(THREADS, 1) mha_main(const __grid_constant__ mha_params p)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw), rank = PAIR > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            mbar_init(smem + AT_K_FULL + 8 * i, 1);
            mbar_init(smem + AT_V_FULL + 8 * i, 1);
            mbar_init(smem + AT_K_FREE + 8 * i, PAIR * CONSUMERS / 32);
            mbar_init(smem + AT_V_FREE + 8 * i, PAIR * CONSUMERS / 32);
        }
        mbar_init_fence();
    }
    grid_wait();
    if constexpr (PAIR > 1)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<REGS_COPIER>();
        if (threadIdx.x / 32 == CONSUMERS / 32)
            tiles_copy<PAIR, 0>(p, smem, rank);
        else if (threadIdx.x / 32 == CONSUMERS / 32 + 1)
            tiles_copy<PAIR, 1>(p, smem, rank);
        __syncwarp();
    } else {
        regs_take<REGS_CONSUMER>();
        units_attend<PAIR>(p, smem, rank);
    }
    if constexpr (PAIR > 1)
        cluster_sync(); /* copies to, and arrivals at, a block that has ended would go astray */
}

/* ---- the op ------------------------------------------------------------------------------------ */

typedef struct lay {
    size_t rope, flags, bytes;
} lay;

static lay scratch_lay(const mha_args *a)
{
    const size_t line = 255, tiles = ((size_t)a->n_key + MHA_STEP - 1) / MHA_STEP,
                 heads = (size_t)a->n_head;
    lay l;
    l.rope = heads * tiles * 2 * MHA_HEAD_BYTES;
    l.flags = l.rope + tiles * MHA_ROPE_BYTES;
    const size_t blocks = (tiles + MHA_BLOCK_TILES - 1) / MHA_BLOCK_TILES;
    l.bytes = l.flags + (((heads + 1) * blocks * sizeof(int32_t) + line) & ~line) + line;
    return l;
}

size_t mha_scratch_sm90(const mha_args *a, const dev_queue *q)
{
    (void)q;
    return scratch_lay(a).bytes;
}

const char *mha_refuses_sm90(const void *args)
{
    const mha_args *a = (const mha_args *)args;
    if (a->type != KVS_DTYPE_BF16)
        return "sm90 takes bf16 queries and keys";
    if (a->nope > MHA_DIM || a->v_dim > MHA_DIM)
        return "sm90 takes up to 128 dims without rope and 128 of values";
    if ((int64_t)a->n_key > 1 << 30 || a->n_head > 65535 ||
        ((int64_t)a->n_key + MHA_BLOCK - 1) / MHA_BLOCK * (a->n_head + 1) > 0x7fffffff)
        return "sm90 takes up to 2^30 keys and, with 512 of them a block, 2^31 blocks of all heads";
    return NULL;
}

static mha_params params_of(const mha_args *a)
{
    const lay l = scratch_lay(a);
    uint8_t *base = (uint8_t *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    mha_params p = {};
    p.n_row = a->n_row;
    p.n_head = a->n_head;
    p.nope = a->nope;
    p.v_dim = a->v_dim;
    p.n_key = a->n_key;
    p.n_block = (a->n_key + MHA_BLOCK - 1) / MHA_BLOCK;
    p.n_tile = (a->n_key + MHA_STEP - 1) / MHA_STEP;
    p.first = a->first;
    p.q = (const uint16_t *)a->q;
    p.q_stride_row = a->q_stride_row;
    p.q_stride_head = a->q_stride_head;
    p.q_wide =
        a->nope == MHA_DIM && cuda_aligned16(a->q) && (a->q_stride_row | a->q_stride_head) % 8 == 0;
    p.scale_log2 = a->softmax_scale * LOG2E;
    p.kv = a->kv;
    p.kv_stride_key = a->kv_stride_key;
    p.kv_stride_head = a->kv_stride_head;
    p.kv_wide = cuda_aligned16(a->kv) && (a->kv_stride_key | a->kv_stride_head | a->nope) % 4 == 0;
    p.rope = (const uint16_t *)a->rope;
    p.rope_stride = a->rope_stride;
    p.len = a->len;
    p.out = a->out;
    p.out_stride_row = a->out_stride_row;
    p.out_stride_head = a->out_stride_head;
    p.out_wide =
        (uintptr_t)a->out % 8 == 0 && (a->out_stride_row | a->out_stride_head | a->v_dim) % 2 == 0;
    p.lse = a->lse;
    p.n_nan = (unsigned long long *)a->n_nan;
    p.tiles = base;
    p.rope_tiles = base + l.rope;
    p.flags = (int32_t *)(base + l.flags);
    return p;
}

template <int PAIR> static cudaError_t main_launch(const mha_params &p, dev_queue *q)
{
    static uint64_t shared_set;
    cuda_shared_max(mha_main<PAIR>, SMEM_BYTES, &shared_set);
    const int64_t most = q->n_sm > PAIR ? q->n_sm / PAIR : 1, n = unit_count(p, PAIR);
    return launch_kernel(mha_main<PAIR>, dim3((unsigned)(n < most ? n : most) * PAIR), THREADS,
                         SMEM_BYTES, true, p, cuda_stream(q), PAIR);
}

void mha_sm90(const mha_args *a, dev_queue *q)
{
    if (cuda_refused(q, mha_refuses_sm90(a)) || a->n_row == 0)
        return;
    if (a->scratch_bytes < scratch_lay(a).bytes) {
        dev_queue_fail(q, KVS_INVALID, "mha: scratch is smaller than mha_scratch says");
        return;
    }
    const mha_params p = params_of(a);
    cudaError_t e = p.n_tile > 0 ? mha_pack_launch(p, cuda_stream(q)) : cudaSuccess;
    if (e == cudaSuccess)
        e = a->n_row > MHA_ROWS && q->n_sm >= 2 ? main_launch<2>(p, q) : main_launch<1>(p, q);
    dev_queue_fail_cuda(q, (int)e, "mha");
}
