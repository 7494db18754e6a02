/* attn_dense_copy.cuh - dense attention on sm_90a: a thread block's shared memory, and the warps that bring queries
 * and pages (attn_dense_sm90.cu).
 *
 * A tile is given back in three parts: the rope when it is scored, each half of the values when its group of
 * consumers has used it. Pages of bf16 rows come by the copy engine straight to their columns, swizzled. Pages of FP8
 * codes come as they are to the end of their tile, and eight warps convert them in place: every value rounded to
 * bf16, as every reader of the format rounds it.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_COPY_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_COPY_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kern/cuda/attn_dense_share.cuh"
#include "kern/cuda/attn_seesaw.cuh"

enum { COPIERS = 128 };
static_assert((int)DENSE_TILE == (int)TILE_KEYS, "a page is a tile");
enum { BAR_COPY = BAR_OWN };

/* Shared memory, behind what the consumers share. */
enum {
    AT_POISON = AT_OWN,                /* float [2][64] of a tile's keys: 0 or NaN   */
    AT_LIMIT = AT_POISON + 2 * 64 * 4, /* int [2] keys of a tile: 64, or 0        */
    AT_FULL = AT_LIMIT + 16,           /* barriers [2][9]                            */
    AT_FREE = AT_FULL + 2 * N_COL * 8, /* [2][3]                                  */
    AT_QFULL = AT_FREE + 2 * N_FREE * 8,
    AT_QFREE = AT_QFULL + 8,
    AT_RAW = AT_QFREE + 8, /* [2] FP8 pages as they come                 */
    AT_SCAN = AT_RAW + 16, /* int64 [18]                                 */
    SMEM_BYTES = AT_SCAN + (SHARE_WARPS + 2) * 8
};
static_assert(SMEM_BYTES <= 232448, "shared memory");

/* ---- copying warps ------------------------------------------------------------------------- */

/* The queries of a share, by `n` threads of which this is `i`: 16 bytes at a time, zeros behind the last. */
static __device__ void queries_copy(const dense_params &p, const share &s, int head0, int n_head,
                                    uint32_t smem, int i, int n)
{
    for (int j = i; j < DENSE_M * 72; j += n) {
        const int m = j / 72, chunk = j % 72, r = m / p.heads, h = m % p.heads;
        const bool has = r < s.n && h < n_head;
        const uint16_t *from =
            p.q +
            (has ? (s.row + r) * p.q_stride_row + (head0 + h) * p.q_stride_head + chunk * 8 : 0);
        copy16(smem + AT_Q + chunk / 8 * COL_BYTES + m * 128 + ((chunk % 8 ^ (m & 7)) << 4), from,
               has ? 16 : 0);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async();
    mbar_arrive(smem + AT_QFULL);
}

/* Warp 8: pages of bf16 rows as they are. */
static __device__ void pages_copy(const dense_params &p, dense_walk w, uint32_t smem, int side)
{
    const int lane = threadIdx.x % 32;
    uint32_t n_tile = 0;
    dense_unit u;
    while (dense_next(&w, &p.work, &u)) {
        const share s = share_of(p, u, side);
        if (s.b0 >= s.b1)
            continue;
        const int32_t *table = p.table + s.req * p.table_stride;
        pages g = pages_begin(p, table, s);
        for (int b = s.b0; b < s.b1; b++, n_tile++) {
            const int i = pages_step(g, p, table, s, b);
            const int page = page_of(g, i);
            if (lane == 0) {
                const int buf = n_tile & 1;
                const uint32_t full = smem + AT_FULL + buf * N_COL * 8, parity = n_tile / 2 & 1;
                const uint32_t free = smem + AT_FREE + buf * N_FREE * 8;
                const uint32_t tile = smem + AT_K + buf * TILE_BYTES;
                for (int j = 0; j < N_COL; j++) {
                    const int c = j == 0 ? N_COL - 1 : j - 1; /* the rope first */
                    if (j == 0 || j == 1 || j == 5)
                        mbar_wait(free + 8 * (j == 0   ? FREE_ROPE
                                              : j == 1 ? FREE_LEFT
                                                       : FREE_RIGHT),
                                  parity ^ 1);
                    if (j == 0)
                        sts32(smem + AT_LIMIT + 4 * buf, page < 0 ? 0 : DENSE_TILE);
                    if (page < 0) {
                        mbar_arrive(full + 8 * c);
                    } else {
                        mbar_expect(full + 8 * c, COL_BYTES);
                        copy_box(tile + c * COL_BYTES, &p.map, 64 * c, 0, page, full + 8 * c);
                    }
                }
            }
            __syncwarp();
        }
    }
}

/* Warps 9 to 11, with bf16 rows: queries. */
static __device__ void queries_run(const dense_params &p, dense_walk w, uint32_t smem, int side,
                                   int head0, int n_head)
{
    uint32_t n_share = 0;
    dense_unit u;
    while (dense_next(&w, &p.work, &u)) {
        const share s = share_of(p, u, side);
        if (s.b0 >= s.b1)
            continue;
        mbar_wait(smem + AT_QFREE, (n_share & 1) ^ 1);
        queries_copy(p, s, head0, n_head, smem, threadIdx.x - CONSUMERS - 32, 96);
        n_share++;
    }
}

/* ---- FP8 rows ------------------------------------------------------------------------------ */

/* Four codes x scale, rounded to bf16. */
static __device__ __forceinline__ uint2 codes_bf16(uint32_t four, float scale)
{
    uint32_t h[2];
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n"
        "cvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(h[0]), "=r"(h[1])
        : "r"(four));
    uint32_t r[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 f = __half22float2(*(const half2 *)&h[i]);
        const __nv_bfloat162 b = __floats2bfloat162_rn(f.x * scale, f.y * scale);
        r[i] = *(const uint32_t *)&b;
    }
    return make_uint2(r[0], r[1]);
}

/* Sixteen codes to two chunks of a swizzled row. */
static __device__ __forceinline__ void codes_store(uint32_t row, int chunk, int swizzle, uint4 v,
                                                   float scale)
{
    const uint2 a = codes_bf16(v.x, scale), b = codes_bf16(v.y, scale);
    sts128(row + ((chunk ^ swizzle) << 4), make_uint4(a.x, a.y, b.x, b.y));
    const uint2 c = codes_bf16(v.z, scale), d = codes_bf16(v.w, scale);
    sts128(row + (((chunk + 1) ^ swizzle) << 4), make_uint4(c.x, c.y, d.x, d.y));
}

/* Where the codes of a page lie before they are converted: at the end of the tile they become, a column of 64 bytes
 * of all keys after another. Columns 0 to 3 of the tile do not reach them; with the rope, which comes to its
 * place as it is, DENSE_DS has one column less. */
template <int KIND> struct raw_page {
    static constexpr int n_col = KIND == DENSE_DS ? 8 : 9;
    static constexpr int col_bytes = 64 * DENSE_TILE;
    static constexpr int at = n_col * (COL_BYTES - col_bytes);
    static constexpr int bytes = n_col * col_bytes + (KIND == DENSE_DS ? COL_BYTES : 0);
};

/* By one thread: the page of tile n, once its columns behind the first four are free. */
template <int KIND>
static __device__ __forceinline__ void raw_issue(const dense_params &p, uint32_t smem, uint32_t n,
                                                 int page)
{
    using R = raw_page<KIND>;
    const uint32_t tile = smem + AT_K + (n & 1) * TILE_BYTES, bar = smem + AT_RAW + (n & 1) * 8;
    mbar_expect(bar, R::bytes);
#pragma unroll 1
    for (int c = 0; c < R::n_col; c++)
        copy_box(tile + R::at + c * R::col_bytes, &p.map, 64 * c, 0, page, bar);
    if (KIND == DENSE_DS)
        copy_box(tile + 8 * COL_BYTES, &p.rope_map, 0, 0, page, bar);
}

/* The same without waiting: whether it is done. */
template <int KIND>
static __device__ __forceinline__ bool raw_try(const dense_params &p, uint32_t smem, uint32_t n,
                                               int page)
{
    const uint32_t free = smem + AT_FREE + (n & 1) * N_FREE * 8, parity = (n / 2 & 1) ^ 1;
    if (!mbar_test(free + 8 * FREE_ROPE, parity) || !mbar_test(free + 8 * FREE_RIGHT, parity))
        return false;
    raw_issue<KIND>(p, smem, n, page);
    return true;
}

/* Columns [from, to) in shared memory are there for the products. */
static __device__ __forceinline__ void columns_give(uint32_t full, int from, int to)
{
    fence_async();
    __syncwarp();
    const int c = from + threadIdx.x % 32;
    if (c < to)
        mbar_arrive(full + 8 * c);
}

/* Warps 8 to 15: pages of FP8 rows, 8 keys to a warp, four lanes to a key. A page comes as it is to the end of its
 * tile; then columns 0 to 3 are converted, the codes of the others taken into registers, and these converted
 * over them. The page of the next tile is asked for as soon as there is room, whatever is being done. */
template <int KIND>
static __device__ void codes_run(const dense_params &p, dense_walk w, uint32_t smem, int side,
                                 int head0, int n_head)
{
    using R = raw_page<KIND>;
    const int lane = threadIdx.x % 32, q = lane % 4, i = threadIdx.x - CONSUMERS;
    const int key = i / 32 * 8 + lane / 4, swizzle = key & 7;
    uint32_t n = 0, n_raw = 0,
             n_share = 0; /* tiles; pages that have come by buffer, a bit each; shares */
    dense_unit u;
    while (dense_next(&w, &p.work, &u)) {
        const share s = share_of(p, u, side);
        if (s.b0 >= s.b1)
            continue;
        const int32_t *table = p.table + s.req * p.table_stride;
        pages g = pages_begin(p, table, s);
        bool asked = false; /* by thread CONSUMERS: the page of the tile in hand */
        mbar_wait(smem + AT_QFREE, (n_share & 1) ^ 1);
        queries_copy(p, s, head0, n_head, smem, i, 2 * COPIERS);
        n_share++;
        for (int b = s.b0; b < s.b1; b++, n++) {
            const int at = pages_step(g, p, table, s, b);
            const int page = page_of(g, at), after = page_of(g, at + 1);
            const int buf = n & 1;
            const uint32_t full = smem + AT_FULL + buf * N_COL * 8, parity = n / 2 & 1;
            const uint32_t free = smem + AT_FREE + buf * N_FREE * 8;
            const uint32_t tile = smem + AT_K + buf * TILE_BYTES, row = tile + key * 128;
            float scale[4] = {p.k_scale, p.k_scale, p.k_scale, p.k_scale};
            if (KIND == DENSE_DS && page >= 0) {
                const float4 f =
                    __ldg((const float4 *)(p.kv + page * p.page_stride + key * p.row_stride + 512));
                scale[0] = f.x, scale[1] = f.y, scale[2] = f.z, scale[3] = f.w;
            }
            if (i == 0 && page >= 0 && !asked) {
                mbar_wait(free + 8 * FREE_ROPE, parity ^ 1);
                mbar_wait(free + 8 * FREE_RIGHT, parity ^ 1);
                raw_issue<KIND>(p, smem, n, page);
            }
            asked = i != 0 || after < 0;
            if (!asked)
                asked = raw_try<KIND>(p, smem, n + 1, after);
            mbar_wait(free + 8 * FREE_ROPE, parity ^ 1);
            mbar_wait(free + 8 * FREE_LEFT, parity ^ 1);
            mbar_wait(free + 8 * FREE_RIGHT, parity ^ 1);
            if (i == 0)
                sts32(smem + AT_LIMIT + 4 * buf, page < 0 ? 0 : DENSE_TILE);
            if (page < 0) {
                columns_give(full, 0, N_COL);
                continue;
            }
            mbar_wait(smem + AT_RAW + 8 * buf, n_raw >> buf & 1);
            n_raw ^= 1u << buf;
            const uint32_t from = tile + R::at + key * 64 + q * 16;
#pragma unroll
            for (int c = 0; c < 4; c++)
                codes_store(row + c * COL_BYTES, 2 * q, swizzle, lds128(from + c * R::col_bytes),
                            scale[c / 2]);
            columns_give(full, 0, 4);
            if (!asked)
                asked = raw_try<KIND>(p, smem, n + 1, after);
            uint4 v[R::n_col - 4];
#pragma unroll
            for (int c = 4; c < R::n_col; c++)
                v[c - 4] = lds128(from + c * R::col_bytes);
            named_barrier<BAR_COPY, 2 * COPIERS>();
#pragma unroll
            for (int c = 4; c < R::n_col; c++)
                codes_store(row + c * COL_BYTES, 2 * q, swizzle, v[c - 4],
                            scale[c < 8 ? c / 2 : 0]);
            columns_give(full, 4, N_COL);
            if (!asked)
                asked = raw_try<KIND>(p, smem, n + 1, after);
        }
    }
}

#endif
