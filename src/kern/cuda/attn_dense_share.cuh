/* attn_dense_share.cuh - dense attention on sm_90a: what a thread block finds out about its work (attn_dense.cuh): its
 * walk over items, its share of a piece, and the pages of that.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_SHARE_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_SHARE_CUH

#include "kern/cuda/attn_dense.cuh"

enum { SHARE_WARPS = 16 /* of a block, at most */ };

/* ---- division of work ---------------------------------------------------------------------- */

/* Every thread of the block: the walk of part `part`, and the total cost. */
template <int THREADS>
static __device__ dense_walk walk_begin(const dense_params &p, int part, int64_t *scan,
                                        int64_t *total)
{
    const int per = (p.work.n_row + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * per, p.work.n_row),
              end = min(begin + per, p.work.n_row);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t own = 0;
    for (int r = begin; r < end; r++)
        own += dense_begins(&p.work, r) ? dense_cost(&p.work, dense_item_at(&p.work, r)) : 0;
    int64_t sum = own;
    for (int d = 1; d < 32; d *= 2) {
        const int64_t v = __shfl_up_sync(~0u, sum, d);
        if (lane >= d)
            sum += v;
    }
    if (lane == 31)
        scan[warp] = sum;
    __syncthreads();
    int64_t before = 0, all = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        before += i < warp ? scan[i] : 0;
        all += scan[i];
    }
    sum += before;
    const int64_t lo = dense_part_begin(&p.work, all, part),
                  hi = dense_part_begin(&p.work, all, part + 1);
    int64_t at = sum - own;
    if (lo >= at && lo < sum) {
        int r = begin;
        for (;; r++) {
            const int64_t c =
                dense_begins(&p.work, r) ? dense_cost(&p.work, dense_item_at(&p.work, r)) : 0;
            if (at + c > lo)
                break;
            at += c;
        }
        scan[SHARE_WARPS] = r;
        scan[SHARE_WARPS + 1] = at;
    }
    if (threadIdx.x == 0 && lo == all) {
        scan[SHARE_WARPS] = p.work.n_row;
        scan[SHARE_WARPS + 1] = all;
    }
    __syncthreads();
    dense_walk w;
    w.row = (int32_t)scan[SHARE_WARPS];
    w.at = scan[SHARE_WARPS + 1];
    w.lo = lo;
    w.hi = hi;
    *total = all;
    return w;
}

/* What a thread block has of a piece: rows [row, row + n), tiles [b0, b1). */
struct share {
    int row, n, req, b0, b1;
    int most, least; /* keys of the longest row, and of the shortest that has any */
};

static __device__ share share_of(const dense_params &p, const dense_unit &u, int side)
{
    share s;
    const int first = side / p.n_head_group * p.rows;
    s.row = u.item.row + first;
    s.n = min(p.rows, u.item.n - first);
    s.most = 0;
    s.least = 0x7fffffff;
    for (int i = 0; i < s.n; i++) {
        const int len = dense_len(&p.work, s.row + i);
        s.most = max(s.most, len);
        s.least = len > 0 ? min(s.least, len) : s.least;
    }
    s.req = s.n > 0 ? p.work.row_req[s.row] : 0;
    s.b0 = u.b0;
    s.b1 = min(u.b1, dense_tiles(s.most));
    return s;
}

/* ---- pages ----------------------------------------------------------------------------------- */

/* Page ids of 64 tiles to come, two for each lane of a warp; -1 where there is none. */
struct pages {
    int cur, next;
};

static __device__ int page_load(const dense_params &p, const int32_t *table, int tile, int b1)
{
    if (tile >= b1)
        return -1;
    const int page = table[tile];
    return page >= 0 && page < p.n_page ? page : -1;
}

static __device__ __forceinline__ int page_of(const pages &g, int i)
{
    const int a = __shfl_sync(~0u, g.cur, i & 31), b = __shfl_sync(~0u, g.next, i & 31);
    return i < 32 ? a : b;
}

/* Comes to tile b of a share, after pages_begin or tile b - 1; returns what page_of calls it. */
static __device__ __forceinline__ int pages_step(pages &g, const dense_params &p,
                                                 const int32_t *table, const share &s, int b)
{
    const int i = (b - s.b0) & 31;
    if (i == 0) {
        g.cur = g.next;
        g.next = page_load(p, table, b + 32 + threadIdx.x % 32, s.b1);
    }
    return i;
}

static __device__ __forceinline__ pages pages_begin(const dense_params &p, const int32_t *table,
                                                    const share &s)
{
    pages g;
    g.next = page_load(p, table, s.b0 + threadIdx.x % 32, s.b1);
    return g;
}

#endif
