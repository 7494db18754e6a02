/* attn_dense_sm90.cu - dense attention over a block table, the main kernel (attn_dense.cuh): what the consumers of
 * attn_seesaw.cuh need to know of a share of the work, and its results.
 *
 * A tile is a page as bf16. bf16 rows come so by the copy engine through a tensor map; FP8 codes are rounded to bf16 on
 * their way (attn_dense_copy.cuh). A tile is given back column by column.
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

/* Of a tile that not all attend whole: scores of keys past nx, ny, and what the cleaning says of the others. */
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

/* ---- consumers: results ------------------------------------------------------------------------ */

/* Where a share's results go. */
struct target {
    bool partial;
    int64_t slot; /* of partials: of the item's first row and head */
};

static __device__ __forceinline__ row_target row_target_of(const dense_params &p,
                                                           const dense_unit &u, const target &t,
                                                           int row, int head)
{
    if (t.partial) {
        const int64_t part = t.slot + (int64_t)(row - u.item.row) * p.n_head + head;
        return {p.part_out + part * DENSE_VDIM, p.part_lse + part, false, true, true};
    }
    const int64_t at = row * p.out_stride_row + head * p.out_stride_head;
    return {(char *)p.out + at * (p.out_bf16 ? 2 : 4), p.lse + (int64_t)row * p.n_head + head,
            p.out_bf16 != 0, p.out_wide != 0, false};
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

/* A share's tiles, for attn_seesaw.cuh. */
template <int KIND> struct page_tiles {
    share s;
    int nx, ny; /* keys that the thread's rows attend */

    static constexpr bool rope_first = KIND == DENSE_BF16, wide = KIND == DENSE_BF16;

    static __device__ __forceinline__ uint32_t full_at(const consumer &c, uint32_t n)
    {
        return c.smem + AT_FULL + (n & 1) * N_COL * 8;
    }

    static __device__ __forceinline__ void column_wait(const consumer &c, uint32_t n, int i)
    {
        mbar_wait(full_at(c, n) + 8 * i, n / 2 & 1);
    }

    static __device__ __forceinline__ void give_back(const consumer &c, uint32_t n, int part)
    {
        __syncwarp();
        if (c.lane == 0)
            mbar_arrive(c.smem + AT_FREE + (n & 1) * N_FREE * 8 + 8 * part);
    }

    static __device__ __forceinline__ void queries_done(const consumer &c)
    {
        if (c.lane == 0)
            mbar_arrive(c.smem + AT_QFREE);
    }

    /* WHOLE where all rows attend it whole; else it is made fit for those that do not, and its keys are returned: 64, or
     * 0 of a page that does not exist. (Read here: behind the scores the place may hold the next tile's.) */
    __device__ __forceinline__ int begin(const consumer &c, uint32_t n, int b) const
    {
        column_wait(c, n, column_at<page_tiles>(0));
        const int limit = (int)lds32(c.smem + AT_LIMIT + 4 * (n & 1)), base = b * DENSE_TILE;
        const int lo = min(limit, s.least - base), hi = min(limit, s.most - base);
        if (lo >= DENSE_TILE)
            return WHOLE;
#pragma unroll 1
        for (int i = 0; i < N_COL; i++)
            column_wait(c, n, i);
        tile_clean(tile_at(c, n), c.smem + AT_POISON + 4 * 64 * c.group, max(lo, 0), hi, c.warp,
                   c.lane, c.group);
        return limit;
    }

    __device__ __forceinline__ void mask(const consumer &c, float (&score)[32], int limit,
                                         int b) const
    {
        scores_mask(score, c.smem + AT_POISON + 4 * 64 * c.group, min(limit, nx - b * DENSE_TILE),
                    min(limit, ny - b * DENSE_TILE), c.lane % 4);
    }
};

/* Row sums over both groups, then lse and values of the thread's rows. */
template <int KIND>
static __device__ __forceinline__ void
finish(const dense_params &p, consumer &c, const page_tiles<KIND> &tiles, const dense_unit &u,
       const target &t, int head0, int n_head, uint32_t n_share)
{
    const two sum = sums_finish(c, n_share);
    const int m = 16 * c.warp + c.lane / 4;
    const share &s = tiles.s;
    int r = m / p.heads, h = m % p.heads;
    if (r < s.n && h < n_head)
        row_finish(c, 0, row_target_of(p, u, t, s.row + r, head0 + h), tiles.nx == 0, sum.x,
                   p.n_nan);
    r = (m + 8) / p.heads, h = (m + 8) % p.heads;
    if (r < s.n && h < n_head)
        row_finish(c, 1, row_target_of(p, u, t, s.row + r, head0 + h), tiles.ny == 0, sum.y,
                   p.n_nan);
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
    consumer_begin(c, smem);
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
        page_tiles<KIND> tiles;
        tiles.s = s;
        c.f.x = row_factor(p, s, m, head0, n_head, &tiles.nx);
        c.f.y = row_factor(p, s, m + 8, head0, n_head, &tiles.ny);
        consumer_clear(c);
        mbar_wait(smem + AT_QFULL, n_share & 1);
        if (c.group == 0)
            left_run(c, tiles, s.b0, s.b1, n_tile);
        else
            right_run(c, tiles, s.b0, s.b1, n_tile);
        n_tile += s.b1 - s.b0;
        finish(p, c, tiles, u, t, head0, n_head, n_share);
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
