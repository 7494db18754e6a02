/* attn_sparse_wide_sm90.cu - sparse attention of more than 32 heads over bf16 rows on sm_90a, the main kernel
 * (attn_sparse.cuh): groups of up to 64 heads on M, by the consumers of attn_seesaw.cuh; how their tiles come:
 * attn_sparse_wide.cuh. Items are rows: the deterministic mode goes by attn_sparse_sm90.cu.
 */
#include "kern/cuda/attn_query.cuh"
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/attn_sparse_out.cuh"
#include "kern/cuda/attn_sparse_wide.cuh"
#include "kern/cuda/launch.cuh"

/* A row's tiles, for attn_seesaw.cuh. */
struct listed_tiles {
    int n_key; /* of the row */

    static constexpr bool rope_first = false, wide = true;

    /* What copies of other threads have brought the matrix units see behind a fence of whoever has waited for it. */
    static __device__ __forceinline__ void column_wait(const consumer &c, uint32_t n, int i)
    {
        if (i % PART_COLS == 0) {
            mbar_wait(full_at(c.smem, n) + 8 * (i / PART_COLS), n / 2 & 1);
            fence_async();
        }
    }

    static __device__ __forceinline__ void give_back(const consumer &c, uint32_t n, int part)
    {
        __syncwarp();
        if (c.lane == 0)
            mbar_arrive(free_at(c.smem, n) + 8 * part);
    }

    static __device__ __forceinline__ void queries_done(const consumer &)
    {
    }

    __device__ __forceinline__ int begin(const consumer &, uint32_t, int b) const
    {
        const int n = n_key - b * TILE_KEYS;
        return n >= TILE_KEYS ? WHOLE : n;
    }

    __device__ __forceinline__ void mask(const consumer &c, float (&s)[32], int n, int) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int k = 8 * j + 2 * (c.lane % 4);
            s[4 * j] = k < n ? s[4 * j] : NEG_INF;
            s[4 * j + 1] = k + 1 < n ? s[4 * j + 1] : NEG_INF;
            s[4 * j + 2] = k < n ? s[4 * j + 2] : NEG_INF;
            s[4 * j + 3] = k + 1 < n ? s[4 * j + 3] : NEG_INF;
        }
    }
};

/* ---- queries ----------------------------------------------------------------------------------- */

/* The queries of a piece by the consumers, eight heads of a warp at once: zeros past the last. */
template <bool WIDE>
static __device__ __forceinline__ void queries_store(const sparse_params &p, int64_t row, int head0,
                                                     int n_head, uint32_t smem)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint16_t *q = p.q + row * p.q_stride_row + (int64_t)head0 * p.q_stride_head;
    uint4 v[8][3];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int m = 8 * k + warp;
#pragma unroll
        for (int i = 0; i < 3; i++)
            v[k][i] = m < n_head && (i < 2 || lane < 8)
                          ? query_load<WIDE>(q + m * p.q_stride_head, lane + 32 * i)
                          : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int c = lane + 32 * i, m = 8 * k + warp;
            if (i < 2 || lane < 8)
                sts128(smem + AT_Q + c / 8 * COL_BYTES + m * 128 + ((c % 8 ^ (m & 7)) << 4),
                       v[k][i]);
        }
}

static __device__ __forceinline__ void queries_load(const sparse_params &p, int64_t row, int head0,
                                                    int n_head, uint32_t smem)
{
    if (p.q_wide)
        queries_store<true>(p, row, head0, n_head, smem);
    else
        queries_store<false>(p, row, head0, n_head, smem);
    fence_async();
    named_barrier<BAR_BOTH, CONSUMERS>();
}

static __device__ __forceinline__ float head_factor(const sparse_params &p, int64_t row, int head0,
                                                    int n_head, int m)
{
    return p.q_scale == NULL || m >= n_head ? p.scale_log2
                                            : p.scale_log2 * p.q_scale[row * p.n_head + head0 + m];
}

/* ---- results ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ row_target head_target(const target &t, int head)
{
    const int64_t at = head * t.stride_head;
    return {(char *)t.out + at * (t.bf16 ? 2 : 4), t.lse + head, t.bf16, t.wide, t.partial};
}

static __device__ __forceinline__ void results_store(const sparse_params &p, consumer &c,
                                                     const target &t, int n_head)
{
    const two sum = sums_finish(c, 0);
    const int m = 16 * c.warp + c.lane / 4;
    if (m < n_head)
        row_finish(c, 0, head_target(t, m), false, sum.x, p.n_nan);
    if (m + 8 < n_head)
        row_finish(c, 1, head_target(t, m + 8), false, sum.y, p.n_nan);
}

/* ---- consumers --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void consumers_run(const sparse_params &p, const sparse_walk &w,
                                                     int32_t total, uint32_t smem, uint8_t *raw,
                                                     int part, int head_group)
{
    const int head0 = head_group * p.group_heads, n_head = min(p.group_heads, p.n_head - head0);
    const bool notes = threadIdx.x == 0 && head_group == 0;
    piece_walk *const piece = piece_of(raw);
    consumer c;
    consumer_begin(c, smem);
    uint32_t n_tile = 0;
    if (notes)
        p.cut[part] = make_int2(-1, 0);
    piece->walk = w;
    for (;;) {
        sparse_walk walk = piece->walk;
        sparse_unit u;
        if (!sparse_next(walk, p, u))
            break;
        __syncwarp();
        piece->walk = walk;
        piece->unit = u;
        __syncwarp();
        if (u.b1 == 0) {
            empty_write(p, target_of(p, u, part, head0), n_head);
            continue;
        }
        /* walk.at: the position behind the item */
        if (notes && u.b0 == 0 && u.b1 < u.nb)
            p.cut[part] =
                make_int2(u.item, sparse_part_of(walk.at - 1, total, min(total, p.n_part)));
        queries_load(p, u.item, head0, n_head, smem);
        const int m = 16 * c.warp + c.lane / 4;
        c.f = {head_factor(p, u.item, head0, n_head, m),
               head_factor(p, u.item, head0, n_head, m + 8)};
        consumer_clear(c);
        const listed_tiles tiles = {u.n_key};
        if (c.group == 0)
            left_run(c, tiles, u.b0, u.b1, n_tile);
        else
            right_run(c, tiles, u.b0, u.b1, n_tile);
        n_tile += piece->unit.b1 - piece->unit.b0;
        results_store(p, c, target_of(p, piece->unit, part, head0), n_head);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS, 1)
    attn_sparse_wide(const __grid_constant__ sparse_params p)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw);
    const int part = blockIdx.x / p.n_group, head_group = blockIdx.x % p.n_group;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * N_FULL; i++)
            mbar_init(smem + AT_FULL + 8 * i, COPIERS);
        for (int i = 0; i < 2 * N_FREE; i++)
            mbar_init(smem + AT_FREE + 8 * i, GROUP / 32);
        mbar_init_fence();
    }
    grid_wait();
    int32_t total;
    const sparse_walk w = walk_begin<THREADS>(p, part, (int32_t *)(raw + AT_SCAN), &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<COPIER_REGS>();
        rows_run(p, w, smem, raw);
    } else {
        regs_take<CONSUMER_REGS>();
        consumers_run(p, w, total, smem, raw, part, head_group);
    }
}

cudaError_t attn_sparse_wide_launch(const sparse_params &p, cudaStream_t stream)
{
    const cudaError_t e = cudaFuncSetAttribute(
        attn_sparse_wide, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
    return e != cudaSuccess ? e
                            : launch_kernel(attn_sparse_wide, dim3(p.n_part * p.n_group), THREADS,
                                            SMEM_BYTES, true, p, stream);
}
