/* kern/cuda/index_sm90.cuh - the index scorer for fp8 keys: what the score op and the fused selection share.
 *
 * One block per multiprocessor: four warpgroups that multiply and one warp that copies. A work item is a
 * tile of 64 keys (one page) against a group: up to R neighbouring rows of one request. The tiles of all
 * groups, laid end to end, are cut into equal ranges, one per block (ix_find). The copying warp brings
 * whole pages (8448 bytes, one bulk copy each) into a ring; tile i of a piece goes to warpgroup i mod 4.
 *
 * A page lies unswizzled, so keys are the A operand from registers: thread t of a quad takes 32
 * consecutive bytes of its two keys by 16-byte loads, and the query (B operand, in shared memory) is laid
 * out with the same permutation of the 128 dimensions. One m64nNk32 product per 32 dimensions, N = heads
 * rounded up to 8, 16, 32 or 64; what lies past n_head is a zero query of weight zero.
 *
 * Order of a score, whatever the company: four products into one accumulator, then per thread a chain of
 * fma over heads 8j + 2t and one over 8j + 2t + 1, their sum, then (t0 + t1) + (t2 + t3), times k_scale.
 * max(0, x) keeps NaN. Tokens of a page outside the pool score nothing and are counted.
 */
#ifndef KVS_KERN_CUDA_INDEX_SM90_CUH
#define KVS_KERN_CUDA_INDEX_SM90_CUH

#include <float.h>
#include <math.h>
#include "kern/cuda/ptx.cuh"
#include "kern/index.h"
#include "num/kvfmt.h"

enum {
    IX_TEAM = 512,             /* threads that multiply: four warpgroups   */
    IX_THREADS = IX_TEAM + 32, /* and the copying warp                     */
    IX_N_WG = 4,
    IX_STAGE = INDEX_PAGE_BYTES_FP8,
    IX_MAX_STAGE = 16,
    IX_BAR = 1 /* named barrier of the team                */
};

/* ---- instructions ------------------------------------------------------------------------------ */

static __device__ __forceinline__ void ix_team_sync()
{
    named_barrier<IX_BAR, IX_TEAM>();
}

/* Whether any thread of the team says so. */
static __device__ __forceinline__ bool ix_team_any(bool mine)
{
    return named_barrier_any<IX_BAR, IX_TEAM>(mine);
}

static __device__ __forceinline__ float ix_relu(float x)
{
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- work -------------------------------------------------------------------------------------- */

/* Rows [row, row + n) of one request. */
typedef struct ix_group {
    int32_t row, n;
    int32_t req;    /* -1: of no request  */
    int32_t n_tile; /* at least 1         */
} ix_group;

/* fixed: every group has the tiles of the columns asked for; else those of its longest row. */
static __device__ inline ix_group ix_group_at(const index_score_args &a, int32_t row, int32_t most,
                                              bool fixed)
{
    ix_group g;
    g.row = row;
    g.n = 1;
    const int32_t req = a.row_req[row];
    int32_t len = a.kv_len[row];
    const int32_t end = min((int64_t)a.n_row, ((int64_t)row / most + 1) * most);
    while (row + g.n < end && a.row_req[row + g.n] == req) {
        len = max(len, a.kv_len[row + g.n]);
        g.n++;
    }
    g.req = req >= 0 && req < a.n_req ? req : -1;
    const int32_t wide = min((int64_t)INT32_MAX - 63, (int64_t)a.table_width * KVS_PAGE_TOKENS);
    len = fixed ? a.col_end - a.col_begin : g.req < 0 ? 0 : min(len, wide);
    g.n_tile = max(1, (int32_t)(((int64_t)len + 63) / 64));
    return g;
}

static __device__ inline bool ix_is_start(const index_score_args &a, int32_t row, int32_t most)
{
    return row % most == 0 || a.row_req[row] != a.row_req[row - 1];
}

/* A block's share of the work. */
typedef struct ix_share {
    int64_t n_all;      /* tiles of all groups                                     */
    int64_t begin, end; /* this block's range of them                              */
    int64_t base;       /* where the tiles of the first group of the range begin   */
    int32_t row;        /* first row of that group                                 */
} ix_share;

/* Blocks with work, the first of the grid: each has at least one tile. */
static __device__ __forceinline__ int64_t ix_busy(int64_t n_all)
{
    return min(n_all, (int64_t)gridDim.x);
}

/* Where the range of a block begins. */
static __device__ __forceinline__ int64_t ix_cut(int64_t n_all, int64_t block)
{
    const int64_t busy = ix_busy(n_all);
    return block >= busy ? n_all : n_all * block / busy;
}

/* The block that works on a tile: the one whose range holds it. */
static __device__ inline int32_t ix_block_of(int64_t n_all, int64_t tile)
{
    int64_t c = tile * ix_busy(n_all) / n_all;
    while (ix_cut(n_all, c + 1) <= tile) {
        c++;
    }
    while (ix_cut(n_all, c) > tile) {
        c--;
    }
    return (int32_t)c;
}

/* Sum over the lower lanes and this one. */
template <typename T> static __device__ __forceinline__ T ix_warp_scan(T v)
{
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T up = __shfl_up_sync(~0u, v, d);
        v += (int)(threadIdx.x & 31) >= d ? up : 0;
    }
    return v;
}

/* Finds the block's share; all threads of the block. s is shared; `warp` has a word per warp. */
static __device__ __noinline__ void ix_find(const index_score_args &a, int32_t most, bool fixed,
                                            ix_share *s, int64_t *warp)
{
    const int32_t tid = threadIdx.x;
    const int32_t n_warp = IX_THREADS / 32;
    const bool one_pass = a.n_row <= IX_THREADS; /* a thread has one row or none */
    int64_t sum = 0;
    for (int64_t i = tid; i < a.n_row; i += IX_THREADS) {
        sum +=
            ix_is_start(a, (int32_t)i, most) ? ix_group_at(a, (int32_t)i, most, fixed).n_tile : 0;
    }
    const int64_t scan = ix_warp_scan(sum);
    if (tid % 32 == 31) {
        warp[tid / 32] = scan;
    }
    __syncthreads();
    int64_t n_all = 0;
    int64_t lower = 0;
    for (int32_t w = 0; w < n_warp; w++) {
        n_all += warp[w];
        lower += w < tid / 32 ? warp[w] : 0;
    }
    const int64_t begin = ix_cut(n_all, blockIdx.x);
    const int64_t end = ix_cut(n_all, (int64_t)blockIdx.x + 1);
    if (tid == 0) {
        s->n_all = n_all;
        s->begin = begin;
        s->end = end;
        s->base = 0;
        s->row = 0;
    }
    __syncthreads();
    if (one_pass) {
        const int64_t before = lower + scan - sum;
        if (sum > 0 && before <= begin && begin < before + sum) {
            s->base = before;
            s->row = tid;
        }
        __syncthreads();
        return;
    }
    int64_t done = 0;
    for (int64_t at = 0; at < a.n_row && begin < end && done <= begin; at += IX_THREADS) {
        const int64_t i = at + tid;
        const bool start = i < a.n_row && ix_is_start(a, (int32_t)i, most);
        const int64_t n = start ? ix_group_at(a, (int32_t)i, most, fixed).n_tile : 0;
        const int64_t in_warp = ix_warp_scan(n);
        __syncthreads();
        if (tid % 32 == 31) {
            warp[tid / 32] = in_warp;
        }
        __syncthreads();
        int64_t before = done + in_warp - n;
        for (int32_t w = 0; w < n_warp; w++) {
            before += w < tid / 32 ? warp[w] : 0;
            done += warp[w];
        }
        if (n > 0 && before <= begin && begin < before + n) {
            s->base = before;
            s->row = (int32_t)i;
        }
    }
    __syncthreads();
}

/* ---- the ring of pages ------------------------------------------------------------------------- */

typedef struct ix_ring {
    uint64_t full[IX_MAX_STAGE];
    uint64_t empty[IX_MAX_STAGE];
    int32_t ok[IX_MAX_STAGE]; /* 0: the page has no keys to score */
} ix_ring;

static __device__ void ix_ring_init(ix_ring *r)
{
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < IX_MAX_STAGE; i++) {
            mbar_init(ptx_shared(&r->full[i]), 1);
            mbar_init(ptx_shared(&r->empty[i]), 4); /* the warps of one warpgroup */
        }
        mbar_init_fence();
        fence_async();
    }
}

/* Keys of a tile that some row of the group attends, summed over rows; first is the tile's first key. */
static __device__ inline int64_t ix_pairs(const index_score_args &a, const ix_group &g,
                                          int64_t first, bool fixed)
{
    int64_t n = 0;
    for (int32_t r = 0; r < g.n; r++) {
        const int64_t bound = fixed ? min(a.kv_len[g.row + r], a.col_end) : a.kv_len[g.row + r];
        n += max((int64_t)0, min((int64_t)64, bound - first));
    }
    return n;
}

/* The copying warp: brings every page of the share and counts keys. */
static __device__ __noinline__ void ix_produce(const index_score_args &a, int32_t most, bool fixed,
                                               const ix_share &s, ix_ring *ring, uint8_t *stage,
                                               int32_t n_stage)
{
    const int32_t lane = threadIdx.x % 32;
    const int64_t first_page = fixed ? a.col_begin / 64 : 0;
    int64_t n_bad = 0;
    int64_t n_key = 0;
    int64_t at = s.begin;
    int64_t base = s.base;
    int32_t row = s.row;
    int32_t slot = 0;
    uint32_t phase = 1;
    /* keys past the table, or of a request that is none, have no tile: every block counts some rows */
    for (int32_t r = (int32_t)blockIdx.x * 32 + lane; !fixed && r < a.n_row; r += (int32_t)gridDim.x * 32) {
        const bool known = a.row_req[r] >= 0 && a.row_req[r] < a.n_req;
        n_bad += max((int64_t)0, a.kv_len[r] - (known ? (int64_t)a.table_width * 64 : 0));
    }
    while (at < s.end) {
        const ix_group g = ix_group_at(a, row, most, fixed);
        const int32_t t1 = (int32_t)min((int64_t)g.n_tile, s.end - base);
        const int32_t *table = g.req < 0 ? NULL : a.table + (int64_t)g.req * a.table_stride;
        int32_t t = (int32_t)(at - base);
        while (t < t1) {
            /* a lane looks up the page of one tile */
            const int64_t i_page = first_page + t + lane;
            int64_t page = -1;
            if (t + lane < t1) {
                const int64_t pairs = ix_pairs(a, g, i_page * 64, fixed);
                if (table != NULL && i_page < a.table_width) {
                    page = pairs > 0 ? table[i_page] : -1;
                }
                page = page >= a.n_page ? -1 : page;
                if (page >= 0) {
                    n_key += pairs;
                } else if (fixed || (g.req >= 0 && i_page < a.table_width)) {
                    n_bad += pairs;
                }
            }
            const int32_t n = min(32, t1 - t);
#pragma unroll 1
            for (int32_t j = 0; j < n; j++) {
                const int64_t p = __shfl_sync(~0u, page, j);
                if (lane == 0) {
                    mbar_wait(ptx_shared(&ring->empty[slot]), phase);
                    ring->ok[slot] = p >= 0;
                    if (p >= 0) {
                        mbar_expect(ptx_shared(&ring->full[slot]), IX_STAGE);
                        copy_bulk(ptx_shared(stage + (int64_t)slot * IX_STAGE),
                                  a.keys + p * a.page_stride, IX_STAGE,
                                  ptx_shared(&ring->full[slot]));
                    } else {
                        mbar_arrive(ptx_shared(&ring->full[slot]));
                    }
                }
                slot++;
                if (slot == n_stage) {
                    slot = 0;
                    phase ^= 1;
                }
            }
            t += n;
        }
        at = base + t1;
        base += g.n_tile;
        row += g.n;
    }
    n_key = ix_warp_scan(n_key);
    n_bad = ix_warp_scan(n_bad);
    if (lane == 31) {
        if (a.n_key != NULL && n_key > 0) {
            atomicAdd((unsigned long long *)a.n_key, (unsigned long long)n_key);
        }
        if (a.n_bad_id != NULL && n_bad > 0) {
            atomicAdd((unsigned long long *)a.n_bad_id, (unsigned long long)n_bad);
        }
    }
}

/* ---- queries ----------------------------------------------------------------------------------- */

/* Floats of one row's weights in shared memory: those of thread t of a quad begin at t * stride. */
template <int NH> static __device__ __host__ constexpr int ix_w_stride()
{
    return NH / 4 + (NH == 8 ? 2 : 4);
}

/* The rows of a group into shared memory; the team calls it, with barriers around. */
template <int NH>
static __device__ void ix_load_q(const index_score_args &a, const ix_group &g, uint8_t *q, float *w)
{
    const int32_t tid = threadIdx.x;
    for (int32_t i = tid; i < g.n * NH * 32; i += IX_TEAM) {
        const int32_t word = i % 32;
        const int32_t h = i / 32 % NH;
        const int32_t r = i / 32 / NH;
        uint32_t v = 0;
        if (h < a.n_head) {
            v = ((const uint32_t *)a.q)[((int64_t)(g.row + r) * a.n_head + h) * 32 + word];
        }
        const int32_t to = word % 8 * 4 + word / 8; /* words 8t .. 8t + 7 are thread t's */
        *(uint32_t *)(q + r * NH * 128 + h * 128 + ((to / 4) ^ (h & 7)) * 16 + to % 4 * 4) = v;
    }
    for (int32_t i = tid; i < g.n * NH; i += IX_TEAM) {
        const int32_t h = i % NH;
        const int32_t r = i / NH;
        const int32_t t = h % 8 / 2;
        w[(r * 4 + t) * ix_w_stride<NH>() + h / 8 * 2 + h % 2] =
            h < a.n_head ? a.w[(int64_t)(g.row + r) * a.n_head + h] : 0.0f;
    }
    fence_async();
}

/* ---- scores ------------------------------------------------------------------------------------ */

/* A thread's part of a page: the A operand of four products, and the scale of the key whose score the
 * thread ends with (ix_token). */
typedef struct ix_keys {
    uint32_t a[4][4];
    float scale;
} ix_keys;

/* Token of a tile whose score thread `tid` ends with; threads 2 and 3 of a quad repeat 0 and 1. */
static __device__ __forceinline__ int32_t ix_token(int32_t tid)
{
    return tid / 32 % 4 * 16 + tid % 32 / 4 + tid % 2 * 8;
}

static __device__ __forceinline__ ix_keys ix_load_keys(const uint8_t *page, int32_t tid)
{
    ix_keys k;
    const int32_t t = tid % 4;
    const int32_t g = tid % 32 / 4;
    const bool odd =
        g & 1; /* takes its halves in the other order: eight lanes then touch all banks */
    const uint8_t *p = page + (tid / 32 % 4 * 16 + g) * 128 + t * 32;
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        const uint4 x = *(const uint4 *)(p + i * 1024 + (odd ? 16 : 0));
        const uint4 y = *(const uint4 *)(p + i * 1024 + (odd ? 0 : 16));
        const uint4 lo = odd ? y : x;
        const uint4 hi = odd ? x : y;
        k.a[0][i] = lo.x;
        k.a[0][2 + i] = lo.y;
        k.a[1][i] = lo.z;
        k.a[1][2 + i] = lo.w;
        k.a[2][i] = hi.x;
        k.a[2][2 + i] = hi.y;
        k.a[3][i] = hi.z;
        k.a[3][2 + i] = hi.w;
    }
    k.scale = *(const float *)(page + INDEX_SCALE_AT + 4 * ix_token(tid));
    return k;
}

/* Score of the key ix_token(tid) of a tile against one row. */
template <int NH>
static __device__ __forceinline__ float ix_score(const ix_keys &k, uint64_t q, const float *w,
                                                 int32_t tid)
{
    alignas(16) float d[NH / 2];
#pragma unroll
    for (int i = 0; i < NH / 2; i++) {
        d[i] = 0.0f;
    }
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) {
        wgmma_rs<NH, OPERAND_E4M3>(d, k.a[s], q + 2 * s, s > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    const float *my_w = w + tid % 4 * ix_w_stride<NH>();
    float s00 = 0.0f, s01 = 0.0f, s10 = 0.0f, s11 = 0.0f;
    alignas(16) float x[NH / 4];
#pragma unroll
    for (int i = 0; i < NH / 4; i += NH == 8 ? 2 : 4) {
        if constexpr (NH == 8) {
            *(float2 *)(x + i) = *(const float2 *)(my_w + i);
        } else {
            *(float4 *)(x + i) = *(const float4 *)(my_w + i);
        }
    }
#pragma unroll
    for (int j = 0; j < NH / 8; j++) {
        s00 = __fmaf_rn(ix_relu(d[4 * j]), x[2 * j], s00);
        s01 = __fmaf_rn(ix_relu(d[4 * j + 1]), x[2 * j + 1], s01);
        s10 = __fmaf_rn(ix_relu(d[4 * j + 2]), x[2 * j], s10);
        s11 = __fmaf_rn(ix_relu(d[4 * j + 3]), x[2 * j + 1], s11);
    }
    const float s0 = __fadd_rn(s00, s01);
    const float s1 = __fadd_rn(s10, s11);
    const bool second = tid & 1;
    float s = second ? s1 : s0;
    s = __fadd_rn(s, __shfl_xor_sync(~0u, second ? s0 : s1, 1));
    s = __fadd_rn(s, __shfl_xor_sync(~0u, s, 2));
    return __fmul_rn(s, k.scale);
}

#endif
