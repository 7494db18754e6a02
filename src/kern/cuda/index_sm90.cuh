/* kern/cuda/index_sm90.cuh - the index scorer for fp8 keys: what the score op and the fused selection share.
 *
 * One block per multiprocessor: four or six warpgroups that multiply and one warp that copies. A work item is a
 * tile of 64 keys (one page) against a group: up to R neighbouring rows of one request. The tiles of all
 * groups, laid end to end, are cut into equal ranges, one per block (ix_find). The copying warp brings
 * whole pages (8448 bytes, one bulk copy each) into a ring; tile i of the range goes to warpgroup i mod 4 or 6.
 *
 * A page lies unswizzled, so keys are the A operand from registers: thread t of a quad takes 32
 * consecutive bytes of its two keys by 16-byte loads, and the query (B operand, in shared memory) is laid
 * out with the same permutation of the 128 dimensions. One m64nNk32 product per 32 dimensions, N = heads
 * rounded up to 8, 16, 32 or 64; what lies past n_head is a zero query of weight zero.
 *
 * Order of a score, whatever the company: four products into one accumulator, rounded to bf16 with what is below
 * 0 as 0, times the weights as two bf16 each by tensor cores that add in f32, 16 heads a step; the sum of the
 * weights' leading parts plus that of the rest, times k_scale. A NaN stays one, and stays with its row and key.
 * Tokens of a page outside the pool score nothing and are counted.
 */
#ifndef KVS_KERN_CUDA_INDEX_SM90_CUH
#define KVS_KERN_CUDA_INDEX_SM90_CUH

#include <float.h>
#include <math.h>
#include "kern/cuda/index_select.h"
#include "kern/cuda/ptx.cuh"
#include "kern/index.h"
#include "num/kvfmt.h"

enum {
    IX_STAGE = INDEX_PAGE_BYTES_FP8,
    IX_MAX_STAGE = 16,
    IX_MAX_WARP = 25,
    IX_BAR = 1 /* named barrier of the team                */
};

/* Warpgroups that multiply, by the rows of a group. Six have 72 registers a thread, which is enough where products of
 * 64 heads come in two halves; four have 96. */
template <int R> __host__ __device__ constexpr int ix_n_wg()
{
    return R == 4 ? 6 : 4;
}

template <int R> __host__ __device__ constexpr int ix_team()
{
    return 128 * ix_n_wg<R>();
}

/* With the copying warp. */
template <int R> __host__ __device__ constexpr int ix_threads()
{
    return ix_team<R>() + 32;
}

/* ---- instructions ------------------------------------------------------------------------------ */

template <int R> static __device__ __forceinline__ void ix_team_sync()
{
    named_barrier<IX_BAR, ix_team<R>()>();
}

/* ---- work -------------------------------------------------------------------------------------- */

/* Rows [row, row + n) of one request. */
typedef struct ix_group {
    int32_t row, n;
    int32_t req;    /* -1: of no request  */
    int32_t n_tile; /* at least 1         */
} ix_group;

/* fixed: every group has the tiles of the columns asked for; else those of its longest row. */
template <int R>
static __device__ inline ix_group ix_group_at(const index_score_args &a, int32_t row, bool fixed)
{
    ix_group g;
    g.row = row;
    g.n = 1;
    const int32_t req = a.row_req[row];
    int32_t len = a.kv_len[row];
    const int32_t end = min((int64_t)a.n_row, ((int64_t)row / R + 1) * R);
    while (row + g.n < end && a.row_req[row + g.n] == req) {
        len = max(len, a.kv_len[row + g.n]);
        g.n++;
    }
    g.req = req >= 0 && req < a.n_req ? req : -1;
    const int32_t wide = min((int64_t)INDEX_MAX_LEN, (int64_t)a.table_width * KVS_PAGE_TOKENS);
    len = fixed ? a.col_end - a.col_begin : g.req < 0 ? 0 : min(len, wide);
    g.n_tile = max(1, (int32_t)(((int64_t)len + 63) / 64));
    return g;
}

template <int R> static __device__ inline bool ix_is_start(const index_score_args &a, int32_t row)
{
    return row % R == 0 || a.row_req[row] != a.row_req[row - 1];
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
    if (block >= busy) {
        return n_all;
    }
    /* a division of 64 bits is long code */
    const int64_t all = n_all * block;
    return all <= UINT32_MAX ? (uint32_t)all / (uint32_t)busy : all / busy;
}

/* The block that works on a tile: the one whose range holds it. */
static __device__ inline int32_t ix_block_of(int64_t n_all, int64_t tile)
{
    /* nearly, and then exactly: no division of 64 bits, which is long code */
    int64_t c = (int64_t)(__fdividef((float)tile, (float)n_all) * (float)ix_busy(n_all));
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

/* Tiles of the group that begins with a row; 0 where none does. */
template <int R>
static __device__ __forceinline__ int64_t ix_tiles_from(const index_score_args &a, int64_t row,
                                                        bool fixed)
{
    const bool start = row < a.n_row && ix_is_start<R>(a, (int32_t)row);
    return start ? ix_group_at<R>(a, (int32_t)row, fixed).n_tile : 0;
}

enum { IX_FEW = 32 }; /* rows whose share a warp finds alone */

/* The block's share of the tiles of at most IX_FEW rows; every warp for itself. */
template <int R>
static __device__ __forceinline__ ix_share ix_find_few(const index_score_args &a, bool fixed)
{
    static_assert((INDEX_MAX_LEN / 64 + 1) * (int64_t)IX_FEW <= INT32_MAX, "tiles are int32");
    const int32_t n = (int32_t)ix_tiles_from<R>(a, threadIdx.x % 32, fixed);
    const int32_t scan = ix_warp_scan(n);
    ix_share s;
    s.n_all = __shfl_sync(~0u, scan, 31);
    const int64_t cut = ix_cut(s.n_all, (int64_t)blockIdx.x + threadIdx.x % 2);
    s.begin = __shfl_sync(~0u, cut, 0);
    s.end = __shfl_sync(~0u, cut, 1);
    const uint32_t at = __ballot_sync(~0u, scan - n <= s.begin && s.begin < scan);
    s.row = at != 0 ? __ffs((int)at) - 1 : 0;
    s.base = __shfl_sync(~0u, scan - n, s.row);
    return s;
}

/* The same of any number of rows; all threads of the block. s is shared; `warp` has a word per warp. */
template <int R>
static __device__ __noinline__ void ix_find(const index_score_args &a, bool fixed, ix_share *s,
                                            int64_t *warp)
{
    const int32_t tid = threadIdx.x;
    const int32_t n_warp = ix_threads<R>() / 32;
    const bool one_pass = a.n_row <= ix_threads<R>(); /* a thread has one row or none */
    int64_t sum = 0;
#pragma unroll 1
    for (int64_t i = tid; i < a.n_row; i += ix_threads<R>()) {
        sum += ix_tiles_from<R>(a, i, fixed);
    }
    const int64_t scan = ix_warp_scan(sum);
    if (tid % 32 == 31) {
        warp[tid / 32] = scan;
    }
    __syncthreads();
    int64_t n_all = 0;
    int64_t lower = 0;
#pragma unroll 1
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
    for (int64_t at = 0; at < a.n_row && begin < end && done <= begin; at += ix_threads<R>()) {
        const int64_t n = ix_tiles_from<R>(a, at + tid, fixed);
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
            s->row = (int32_t)(at + tid);
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

/* One warp calls it. */
static __device__ __forceinline__ void ix_ring_init(ix_ring *r)
{
    const uint32_t i = threadIdx.x % 32;
    if (i < IX_MAX_STAGE) {
        mbar_init(ptx_shared(&r->full[i]), 1);
        mbar_init(ptx_shared(&r->empty[i]), 4); /* the warps of one warpgroup */
        mbar_init_fence();
        fence_async();
    }
}

/* Keys of a tile that some row of the group attends, summed over rows; first is the tile's first key. */
static __device__ inline int64_t ix_pairs(const index_score_args &a, const ix_group &g,
                                          int64_t first, bool fixed)
{
    int64_t n = 0;
#pragma unroll 1
    for (int32_t r = 0; r < g.n; r++) {
        const int64_t bound = fixed ? min(a.kv_len[g.row + r], a.col_end) : a.kv_len[g.row + r];
        n += max((int64_t)0, min((int64_t)64, bound - first));
    }
    return n;
}

/* What the copying warp counts. */
typedef struct ix_tally {
    int64_t n_key, n_bad;
} ix_tally;

/* The page of tile t of a group, which its lane looks up; -1 where there is none. Counts the tile's keys. */
static __device__ __forceinline__ int64_t ix_page(const index_score_args &a, const ix_group &g,
                                                  int32_t t, int32_t t1, bool fixed,
                                                  ix_tally *tally)
{
    if (t >= t1) {
        return -1;
    }
    const int64_t i_page = (fixed ? a.col_begin / 64 : 0) + (int64_t)t;
    const int64_t pairs = ix_pairs(a, g, i_page * 64, fixed);
    const bool known = g.req >= 0 && i_page < a.table_width;
    int64_t page = -1;
    if (known && pairs > 0) {
        page = a.table[(int64_t)g.req * a.table_stride + i_page];
        page = page >= a.n_page ? -1 : page;
    }
    if (page >= 0) {
        tally->n_key += pairs;
    } else if (fixed || known) {
        tally->n_bad += pairs;
    }
    return page;
}

/* Asks for the pages of the warp's first n lanes, at most n_stage, in the places from slot on. */
static __device__ __forceinline__ void ix_ask(ix_ring *ring, uint8_t *stage, int32_t n_stage,
                                              int32_t slot, uint32_t phase, int32_t n,
                                              const uint8_t *from, bool ok)
{
    const int32_t lane = threadIdx.x % 32;
    const bool wraps = slot + lane >= n_stage;
    const int32_t own = wraps ? slot + lane - n_stage : slot + lane;
    const uint32_t full = ptx_shared(&ring->full[own]);
    if (lane < n) {
        mbar_wait(ptx_shared(&ring->empty[own]), wraps ? phase ^ 1 : phase);
        ring->ok[own] = ok;
    }
    __syncwarp();
    if (lane < n && !ok) {
        mbar_arrive(full);
    }
    if (lane < n && ok) {
        mbar_expect(full, IX_STAGE);
        copy_bulk(ptx_shared(stage) + (uint32_t)own * IX_STAGE, from, IX_STAGE, full);
    }
    __syncwarp();
}

/* The copying warp: brings every page of the share and counts keys. hook.ring_full is called once, when the ring is
 * full for the first time or everything has been asked for; hook.piece, when the share's tiles [t0, t1) of a group
 * have been. */
template <int R, typename HOOK>
static __device__ __forceinline__ void ix_produce(const index_score_args &a, bool fixed,
                                                  const ix_share &s, ix_ring *ring, uint8_t *stage,
                                                  int32_t n_stage, const HOOK &hook)
{
    const int32_t lane = threadIdx.x % 32;
    bool first = true; /* the first time round the ring, whose places are free */
    ix_tally tally = {0, 0};
    int64_t at = s.begin;
    int64_t base = s.base;
    int32_t row = s.row;
    int32_t slot = 0;
    uint32_t phase = 1;
    while (at < s.end) {
        const ix_group g = ix_group_at<R>(a, row, fixed);
        const int32_t t1 = (int32_t)min((int64_t)g.n_tile, s.end - base);
        const int32_t t0 = (int32_t)(at - base);
        int64_t page = -1; /* of the lane's tile, of 32 that have been looked up */
#pragma unroll 1
        for (int32_t t = t0 - 32; t < t1; t += 32) {
            const int64_t next = ix_page(a, g, t + 32 + lane, t1, fixed, &tally);
            const int32_t n = t < t0 ? 0 : min(32, t1 - t);
#pragma unroll 1
            for (int32_t j = 0; j < n;) {
                const int64_t p = __shfl_sync(~0u, page, j + lane);
                const int32_t now = min(first ? n_stage - slot : n_stage / 4, n - j);
                ix_ask(ring, stage, n_stage, slot, phase, now, a.keys + p * a.page_stride, p >= 0);
                j += now;
                slot += now;
                if (slot >= n_stage) {
                    slot -= n_stage;
                    phase ^= 1;
                    if (first) {
                        hook.ring_full();
                    }
                    first = false;
                }
            }
            page = next;
        }
        hook.piece(g, base, t0, t1, base + t1 == s.end);
        at = base + t1;
        base += g.n_tile;
        row += g.n;
    }
    if (first) {
        hook.ring_full();
    }
    /* keys past the table, or of a request that is none, have no tile: every block counts some rows */
    for (int32_t r = (int32_t)blockIdx.x * 32 + lane; !fixed && r < a.n_row;
         r += (int32_t)gridDim.x * 32) {
        const bool known = a.row_req[r] >= 0 && a.row_req[r] < a.n_req;
        tally.n_bad += max((int64_t)0, a.kv_len[r] - (known ? (int64_t)a.table_width * 64 : 0));
    }
    const int64_t n_key = ix_warp_scan(tally.n_key);
    const int64_t n_bad = ix_warp_scan(tally.n_bad);
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

/* Steps of 16 heads of the product with the weights. */
template <int NH> static __device__ __host__ constexpr int ix_n_step()
{
    return NH < 16 ? 1 : NH / 16;
}

/* Words of one row's weights in shared memory. A thread's own, two for each step, lie together by fours. */
template <int NH> static __device__ __host__ constexpr int ix_w_word()
{
    return 16 * ix_n_step<NH>();
}

/* Where in a row's words a thread's first are; with 64 heads the second four are 32 words further. */
template <int NH> static __device__ __forceinline__ int32_t ix_w_at(int32_t tid)
{
    return (tid % 4 * 2 + tid / 4 % 2) * (ix_n_step<NH>() == 1 ? 2 : 4);
}

/* A weight as two bf16: odd 0 its leading bits, 1 the rest. Inf and NaN are in the first. */
static __device__ __forceinline__ uint32_t ix_w_part(float w, int32_t odd)
{
    const uint32_t bits = __float_as_uint(w);
    const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
    const uint32_t lead = bits & 0xFFFF0000u;
    if (odd == 0) {
        return (w != w ? 0x7FFF0000u : lead) >> 16;
    }
    const __nv_bfloat16 rest = __float2bfloat16_rn(__fsub_rn(w, __uint_as_float(lead)));
    return finite ? __bfloat16_as_ushort(rest) : 0;
}

/* The rows of a group into shared memory; the team calls it, with barriers around. */
template <int NH, int R>
static __device__ __forceinline__ void ix_load_q(const index_score_args &a, const ix_group &g,
                                                 uint8_t *q, uint32_t *w)
{
    static_assert(R * ix_w_word<NH>() <= ix_team<R>(), "a thread has one word of weights");
    constexpr int PER = R * NH * 32 / ix_team<R>() < 1 ? 1 : 4; /* words asked for at once */
    const int32_t tid = threadIdx.x;
    const int32_t n = g.n * NH * 32;
    const int32_t per = ix_n_step<NH>() == 1 ? 2 : 4; /* words together */
    const int32_t j = tid % ix_w_word<NH>();
    const int32_t own = j % per + j / (8 * per) * 4; /* of the thread's */
    const int32_t who = j / per % 8;                 /* 2 t + odd       */
    const int32_t w_h = own / 2 * 16 + own % 2 * 8 + who / 2 * 2;
    const bool w_in = tid < g.n * ix_w_word<NH>();
    const float *from = a.w + (int64_t)(g.row + tid / ix_w_word<NH>()) * a.n_head + w_h;
    const float w0 = w_in && w_h < a.n_head ? from[0] : 0.0f;
    const float w1 = w_in && w_h + 1 < a.n_head ? from[1] : 0.0f;
#pragma unroll 1
    for (int32_t i0 = tid; i0 < n; i0 += PER * ix_team<R>()) {
        uint32_t v[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) {
            const int32_t i = i0 + c * ix_team<R>();
            const int32_t h = i / 32 % NH;
            const int64_t row = g.row + i / 32 / NH;
            const bool in = i < n && h < a.n_head;
            v[c] = in ? ((const uint32_t *)a.q)[(row * a.n_head + h) * 32 + i % 32] : 0;
        }
#pragma unroll
        for (int c = 0; c < PER; c++) {
            const int32_t i = i0 + c * ix_team<R>();
            const int32_t h = i / 32 % NH;
            const int32_t to = i % 8 * 4 + i % 32 / 8; /* words 8t .. 8t + 7 are thread t's */
            if (i < n) {
                *(uint32_t *)(q + i / 32 / NH * NH * 128 + h * 128 + ((to / 4) ^ (h & 7)) * 16 +
                              to % 4 * 4) = v[c];
            }
        }
    }
    if (w_in) {
        w[tid] = ix_w_part(w0, who % 2) | ix_w_part(w1, who % 2) << 16;
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

/* Where in a page a thread finds its part: the first half of its 32 bytes of a key, the key 8 further on being
 * 1024 bytes on, and the scale. Odd rows take their halves in the other order: eight lanes then touch all banks. */
typedef struct ix_lane {
    int32_t at, scale;
    bool odd;
} ix_lane;

static __device__ __forceinline__ ix_lane ix_lane_of(int32_t tid)
{
    ix_lane l;
    l.odd = tid / 4 & 1;
    l.at = (tid / 32 % 4 * 16 + tid % 32 / 4) * 128 + tid % 4 * 32 + (l.odd ? 16 : 0);
    l.scale = INDEX_SCALE_AT + 4 * ix_token(tid);
    /* kept, not worked out again for every tile */
    asm volatile("" : "+r"(l.at), "+r"(l.scale));
    return l;
}

static __device__ __forceinline__ ix_keys ix_load_keys(uint32_t page, const ix_lane &l)
{
    ix_keys k;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint4 x = lds128(page + (uint32_t)l.at + i * 1024);
        const uint4 y = lds128(page + (uint32_t)(l.at ^ 16) + i * 1024);
        const uint4 lo = l.odd ? y : x;
        const uint4 hi = l.odd ? x : y;
        k.a[0][i] = lo.x;
        k.a[0][2 + i] = lo.y;
        k.a[1][i] = lo.z;
        k.a[1][2 + i] = lo.w;
        k.a[2][i] = hi.x;
        k.a[2][2 + i] = hi.y;
        k.a[3][i] = hi.z;
        k.a[3][2 + i] = hi.w;
    }
    k.scale = lds_f(page + (uint32_t)l.scale);
    return k;
}

/* Products of a tile's 64 keys and a row's NH heads, begun: the four steps of 32 dimensions into d, which holds
 * nothing before ix_products_wait. q: low word of the query's wgmma_tile. */
template <int NH>
static __device__ __forceinline__ void ix_products(float (&d)[NH / 2], const ix_keys &k,
                                                   uint32_t q);

#define IX_D8(i)                                                                                   \
    "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]),               \
        "=&f"(d[i + 5]), "=&f"(d[i + 6]), "=&f"(d[i + 7])
#define IX_A                                                                                       \
    "r"(k.a[0][0]), "r"(k.a[0][1]), "r"(k.a[0][2]), "r"(k.a[0][3]), "r"(k.a[1][0]),                \
        "r"(k.a[1][1]), "r"(k.a[1][2]), "r"(k.a[1][3]), "r"(k.a[2][0]), "r"(k.a[2][1]),            \
        "r"(k.a[2][2]), "r"(k.a[2][3]), "r"(k.a[3][0]), "r"(k.a[3][1]), "r"(k.a[3][2]),            \
        "r"(k.a[3][3]), "r"(q)
#define IX_STEP "wgmma.mma_async.sync.aligned.m64n"
#define IX_TYPE "k32.f32.e4m3.e4m3 "
#define IX_BEGIN(q)                                                                                \
    "{\n.reg .b32 t;\n.reg .b64 q0, q1, q2, q3;\nmov.b64 q0, {" q ", 0x40000040};\n"               \
    "add.u32 t, " q ", 2;\nmov.b64 q1, {t, 0x40000040};\n"                                         \
    "add.u32 t, " q ", 4;\nmov.b64 q2, {t, 0x40000040};\n"                                         \
    "add.u32 t, " q ", 6;\nmov.b64 q3, {t, 0x40000040};\nwgmma.fence.sync.aligned;\n"
#define IX_END "wgmma.commit_group.sync.aligned;\n}"

/* One text each, so that nothing comes between the steps and d is not cleared first. */
template <>
__device__ __forceinline__ void ix_products<8>(float (&d)[4], const ix_keys &k, uint32_t q)
{
    asm volatile(IX_BEGIN("%20") IX_STEP
                 "8" IX_TYPE "{%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, q0, 0, 1, 1;\n" IX_STEP "8" IX_TYPE "{%0, %1, %2, %3}, "
                 "{%8, %9, %10, %11}, q1, 1, 1, 1;\n" IX_STEP "8" IX_TYPE "{%0, %1, %2, %3}, "
                 "{%12, %13, %14, %15}, q2, 1, 1, 1;\n" IX_STEP "8" IX_TYPE "{%0, %1, %2, %3}, "
                 "{%16, %17, %18, %19}, q3, 1, 1, 1;\n" IX_END
                 : "=&f"(d[0]), "=&f"(d[1]), "=&f"(d[2]), "=&f"(d[3])
                 : IX_A
                 : "memory");
}

template <>
__device__ __forceinline__ void ix_products<16>(float (&d)[8], const ix_keys &k, uint32_t q)
{
    asm volatile(IX_BEGIN("%24") IX_STEP "16" IX_TYPE "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                                         "{%8, %9, %10, %11}, q0, 0, 1, 1;\n" IX_STEP "16" IX_TYPE
                                         "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                                         "{%12, %13, %14, %15}, q1, 1, 1, 1;\n" IX_STEP "16" IX_TYPE
                                         "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                                         "{%16, %17, %18, %19}, q2, 1, 1, 1;\n" IX_STEP "16" IX_TYPE
                                         "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                                         "{%20, %21, %22, %23}, q3, 1, 1, 1;\n" IX_END
                 : IX_D8(0)
                 : IX_A
                 : "memory");
}

template <>
__device__ __forceinline__ void ix_products<32>(float (&d)[16], const ix_keys &k, uint32_t q)
{
    asm volatile(IX_BEGIN("%32") IX_STEP
                 "32" IX_TYPE
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, q0, 0, 1, 1;\n" IX_STEP "32" IX_TYPE
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%20, %21, %22, %23}, q1, 1, 1, 1;\n" IX_STEP "32" IX_TYPE
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%24, %25, %26, %27}, q2, 1, 1, 1;\n" IX_STEP "32" IX_TYPE
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%28, %29, %30, %31}, q3, 1, 1, 1;\n" IX_END
                 : IX_D8(0), IX_D8(8)
                 : IX_A
                 : "memory");
}

#define IX_D                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "                       \
    "%30, %31}, "
template <>
__device__ __forceinline__ void ix_products<64>(float (&d)[32], const ix_keys &k, uint32_t q)
{
    asm volatile(IX_BEGIN("%48") IX_STEP
                 "64" IX_TYPE IX_D "{%32, %33, %34, %35}, q0, 0, 1, 1;\n" IX_STEP "64" IX_TYPE IX_D
                 "{%36, %37, %38, %39}, q1, 1, 1, 1;\n" IX_STEP "64" IX_TYPE IX_D
                 "{%40, %41, %42, %43}, q2, 1, 1, 1;\n" IX_STEP "64" IX_TYPE IX_D
                 "{%44, %45, %46, %47}, q3, 1, 1, 1;\n" IX_END
                 : IX_D8(0), IX_D8(8), IX_D8(16), IX_D8(24)
                 : IX_A
                 : "memory");
}
#undef IX_D

#undef IX_A
#undef IX_D8
#undef IX_STEP
#undef IX_TYPE
#undef IX_BEGIN
#undef IX_END

template <int N> static __device__ __forceinline__ void ix_products_wait(float (&d)[N])
{
    wgmma_wait<0>();
    regs_pin(d);
}

/* Two products as bf16, what is below 0 as 0; a NaN stays one. */
static __device__ __forceinline__ uint32_t ix_relu2(float lower, float upper)
{
    uint32_t v;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(upper), "f"(lower));
    return v;
}

/* sum += a [16 keys, 16 heads] b [16 heads, 8]: of b's columns the even ones have the leading parts of the weights,
 * the odd ones the rest. */
static __device__ __forceinline__ void ix_weigh(float (&sum)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Adds the products of N heads, weighed, to the sums of the thread's two keys; w: its own words of these heads. */
template <int N>
static __device__ __forceinline__ void ix_add_heads(const float (&d)[N / 2], const uint32_t *w,
                                                    float (&sum)[4])
{
    if constexpr (N == 8) {
        ix_weigh(sum, ix_relu2(d[0], d[1]), ix_relu2(d[2], d[3]), 0, 0, w[0], w[1]);
    } else {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            ix_weigh(sum, ix_relu2(d[8 * i], d[8 * i + 1]), ix_relu2(d[8 * i + 2], d[8 * i + 3]),
                     ix_relu2(d[8 * i + 4], d[8 * i + 5]), ix_relu2(d[8 * i + 6], d[8 * i + 7]),
                     w[2 * i], w[2 * i + 1]);
        }
    }
}

/* A thread's own words of a row's weights. */
template <int NH>
static __device__ __forceinline__ void ix_load_w(uint32_t (&own)[2 * ix_n_step<NH>()],
                                                 const uint32_t *w)
{
    if constexpr (ix_n_step<NH>() == 1) {
        *(uint2 *)own = *(const uint2 *)w;
    } else {
        *(uint4 *)own = *(const uint4 *)w;
    }
    if constexpr (ix_n_step<NH>() == 4) {
        *(uint4 *)(own + 4) = *(const uint4 *)(w + 32);
    }
}

/* Rows whose score a thread ends with, and which: the first of them of R rows. */
template <int R> static __device__ __host__ constexpr int ix_n_own()
{
    return R == 4 ? 2 : 1;
}

template <int R> static __device__ __forceinline__ int32_t ix_own(int32_t tid)
{
    return R == 1 ? 0 : tid / 2 % 2 * ix_n_own<R>();
}

/* The low word of wgmma_tile, known to be one for the warp. */
static __device__ __forceinline__ uint32_t ix_tile(const uint8_t *q)
{
    return __shfl_sync(~0u, (uint32_t)wgmma_tile(ptx_shared(q)), 0);
}

/* Scores of key ix_token(tid) of a tile against the thread's own rows of the first n of R, whose queries lie at
 * q (ix_tile) and weights at w (the thread's first word of the first row). Rows from n on have no meaning. All four
 * threads of a quad have the sums of their two keys; each goes on with some. */
template <int NH, int R>
static __device__ __forceinline__ void ix_score(const ix_keys &k, uint32_t q, const uint32_t *w,
                                                int32_t n, int32_t tid,
                                                float (&score)[ix_n_own<R>()])
{
    const bool second = tid & 1;
    const bool upper = tid & 2;
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        s[r] = 0.0f;
        if (r < n) {
            constexpr int N = ix_n_wg<R>() > 4 && NH > 32 ? 32 : NH; /* registers */
            alignas(16) uint32_t own[2 * ix_n_step<NH>()];
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            ix_load_w<NH>(own, w + r * ix_w_word<NH>());
#pragma unroll
            for (int h = 0; h < NH; h += N) {
                float d[N / 2];
                ix_products<N>(d, k, q + (uint32_t)((r * NH + h) * 128 / 16));
                ix_products_wait(d);
                ix_add_heads<N>(d, own + h / 8, sum);
            }
            s[r] = __fadd_rn(second ? sum[2] : sum[0], second ? sum[3] : sum[1]);
        }
    }
    if constexpr (R == 1) {
        score[0] = __fmul_rn(s[0], k.scale);
    } else {
#pragma unroll
        for (int j = 0; j < R / 2; j++) {
            score[j] = __fmul_rn(upper ? s[R / 2 + j] : s[j], k.scale);
        }
    }
}

/* ---- a warpgroup's way through the ring -------------------------------------------------------- */

/* Tile `it` of the block's share is warpgroup it % ix_n_wg's, in place it % N_STAGE. N_STAGE is a multiple of ix_n_wg:
 * the tiles of a place are then one warpgroup's, which waits for each of them. Were they not, one that waits for a
 * tile while the last of that place has not come yet would take the one before for it: its phase has the same parity,
 * and pages come out of order. */
typedef struct ix_place {
    int32_t slot;
    uint32_t phase;
} ix_place;

template <int R, int N_STAGE> static __device__ __forceinline__ void ix_next(ix_place *p)
{
    static_assert(N_STAGE % ix_n_wg<R>() == 0, "a place is one warpgroup's");
    p->slot += ix_n_wg<R>();
    if (p->slot >= N_STAGE) {
        p->slot -= N_STAGE;
        p->phase ^= 1;
    }
}

/* The next tile's keys; false where it has none to score, alike in the whole warpgroup. ring and stage: their
 * addresses in shared memory. */
template <int R, int N_STAGE>
static __device__ __forceinline__ bool ix_take(uint32_t ring, uint32_t stage, ix_place *p,
                                               const ix_lane &lane, ix_keys *k)
{
    const uint32_t slot = (uint32_t)p->slot;
    mbar_wait(ring + (uint32_t)offsetof(ix_ring, full) + slot * 8, p->phase);
    const bool ok = lds32(ring + (uint32_t)offsetof(ix_ring, ok) + slot * 4) != 0;
    *k = ix_load_keys(stage + slot * IX_STAGE, lane);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbar_arrive(ring + (uint32_t)offsetof(ix_ring, empty) + slot * 8);
    }
    ix_next<R, N_STAGE>(p);
    return ok;
}

#endif
