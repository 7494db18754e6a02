/* kern/cuda/index_exchange.cuh - how blocks that share a few long rows agree on the k best.
 *
 * The lists of all blocks together would hold nearly the whole row. So the blocks add up, in memory, how many of
 * their candidates have each value of the leading 11 bits of the key, and of the leading 16. After one barrier of
 * the grid each knows the 16 bits of the k-th best: what lies above is in. What shares them is seldom more than
 * some dozens: each block tells the others how many it has above, and which it has that share them. After a second
 * barrier each finds the exact cut by counting, and, blocks being in the order of positions, where its own members
 * go. Where too many share the 16 bits (equal scores), the row stays open: its lists are merged by one block.
 */
#ifndef KVS_KERN_CUDA_INDEX_EXCHANGE_CUH
#define KVS_KERN_CUDA_INDEX_EXCHANGE_CUH

#include "kern/cuda/index_select.cuh"

/* Bins that follow each other, and are counted most, lie in different lines of memory. */
static __device__ __forceinline__ uint32_t coarse_at(uint32_t bin)
{
    return (bin & 7) << 8 | bin >> 3;
}

static __device__ __forceinline__ uint32_t fine_at(uint32_t bin)
{
    return N_COARSE + ((bin & 63) << 10 | bin >> 6);
}

static __device__ __forceinline__ uint32_t *hist_of(const sel_kernel_args &a, const part *p,
                                                    int32_t r)
{
    return a.m.hist + (int64_t)(p->g.row + r) * (N_COARSE + N_FINE);
}

/* Adds the counts of this block's candidates to those of the row. */
template <int R>
static __device__ __noinline__ void add_counts(const sel_kernel_args &a, sel_state *st, uint2 *cand)
{
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            int32_t n;
            const uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
            uint32_t *to = hist_of(a, &st->parts[i], r);
            sel_hist_zero(&st->sel);
#pragma unroll 1
            for (int32_t j = threadIdx.x; j < n; j += SEL_TEAM) {
                const uint32_t key = sel_key(buf[j].x);
                atomicAdd(&to[fine_at(key >> 16)], 1u);
                atomicAdd(&st->sel.hist[key >> 21], 1u);
            }
            sel_sync();
#pragma unroll 1
            for (int32_t b = threadIdx.x; b < N_COARSE; b += SEL_TEAM) {
                if (st->sel.hist[b] != 0) {
                    atomicAdd(&to[coarse_at((uint32_t)b)], st->sel.hist[b]);
                }
            }
            sel_sync();
        }
    }
}

/* The leading 16 bits of the k-th best of a row, and how many with them are in. */
static __device__ void take_cut(const sel_kernel_args &a, sel_state *st, int32_t i, int32_t r)
{
    const int32_t tid = threadIdx.x;
    const uint32_t *from = hist_of(a, &st->parts[i], r);
    uint32_t h[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        h[j] = __ldcg(&from[coarse_at((uint32_t)(SEL_BIN - 1 - 4 * tid - j))]);
    }
    sel_find_bin(&st->sel, h, (uint32_t)a.s.k);
    const bool all = st->sel.total < (uint32_t)a.s.k;
    const uint32_t need = (uint32_t)a.s.k - st->sel.above;
    if (tid < 32) {
        const uint32_t bin = st->sel.bin * 32 + 31 - (uint32_t)tid;
        const uint32_t own = all ? 0 : __ldcg(&from[fine_at(bin)]);
        const uint32_t scan = sel_warp_scan(own);
        if (all && tid == 0) {
            st->part_cut[i][r] = {0, 0};
            st->part_need[i][r] = 0;
        } else if (!all && scan - own < need && need <= scan) {
            st->part_cut[i][r] = {bin << 16, 0};
            st->part_need[i][r] = need == scan ? 0 : need - (scan - own);
        }
    }
    sel_sync();
}

/* Counts this block's sure members of a row and tells the others, with the candidates that share the cut's bits. */
template <int R>
static __device__ void tell(const sel_kernel_args &a, sel_state *st, uint2 *cand, int32_t i,
                            int32_t r)
{
    int32_t n;
    const uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
    uint2 *to = a.m.tie + ((int64_t)st->parts[i].slot * R + r) * (1 + MAX_OWN_TIE);
    const uint32_t cut = st->part_cut[i][r].key >> 16;
    const bool ties = st->part_need[i][r] != 0;
    if (threadIdx.x == 0) {
        st->n_sure = 0;
        st->n_tie = 0;
    }
    sel_sync();
#pragma unroll 1
    for (int32_t at = 0; at < n; at += SEL_TEAM) {
        const int32_t j = at + (int32_t)threadIdx.x;
        const uint2 e = j < n ? buf[j] : make_uint2(0, 0);
        const uint32_t key = sel_key(e.x) >> 16;
        const bool in = j < n && key >= cut;
        const uint32_t sure = __ballot_sync(~0u, in && (key > cut || !ties));
        if (threadIdx.x % 32 == 0 && sure != 0) {
            atomicAdd(&st->n_sure, (uint32_t)__popc(sure));
        }
        if (in && key == cut && ties) {
            const uint32_t place = atomicAdd(&st->n_tie, 1u);
            if (place < MAX_OWN_TIE) {
                to[1 + place] = e;
            }
        }
    }
    sel_sync();
    if (threadIdx.x == 0) {
        to[0] = make_uint2(st->n_sure, st->n_tie);
    }
}

/* Number of the last of before[0, n) that is not above j; before ascends from 0. */
static __device__ __forceinline__ int32_t last_not_above(const uint32_t *before, int32_t n,
                                                         uint32_t j)
{
    int32_t lo = 0;
    int32_t hi = n;
    while (hi - lo > 1) {
        const int32_t mid = (lo + hi) / 2;
        if (before[mid] <= j) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The exact cut of a row among the candidates that share its bits, into part_cut; returns how many of those in are
 * of blocks before this one. The histogram's place holds the candidates. */
template <int R>
static __device__ uint32_t cut_ties(const sel_kernel_args &a, sel_state *st, int32_t i, int32_t r,
                                    uint32_t n_tie)
{
    static_assert(MAX_TIE <= SEL_TEAM && MAX_TIE * 8 <= SEL_BIN * 4, "a thread has one");
    const int32_t tid = threadIdx.x;
    const part &p = st->parts[i];
    const uint32_t need = st->part_need[i][r];
    unsigned long long *pool = (unsigned long long *)st->sel.hist;
    unsigned long long mine = 0;
    int32_t block = 0;
    if ((uint32_t)tid < n_tie) {
        block = last_not_above(st->before, p.block1 - p.block0 + 1, (uint32_t)tid);
        const uint2 e = __ldcg(a.m.tie + list_at<R>(p, r, block) * (1 + MAX_OWN_TIE) + 1 + tid -
                               st->before[block]);
        mine = (unsigned long long)sel_key(e.x) << 32 | sel_inv((int32_t)e.y);
        pool[tid] = mine;
    }
    sel_sync();
    uint32_t better = 0;
#pragma unroll 8
    for (uint32_t j = 0; j < n_tie; j++) {
        better += pool[j] > mine;
    }
    const bool in = (uint32_t)tid < n_tie && better < need;
    if (in && better == need - 1) {
        st->part_cut[i][r] = {(uint32_t)(mine >> 32), (uint32_t)mine};
    }
    uint32_t n_before;
    (void)sel_scan(&st->sel, in && p.block0 + block < (int32_t)blockIdx.x, &n_before);
    sel_sync();
    return n_before;
}

/* This block's members of a row to their places; leaves the row open where too many share the cut's bits. bits:
 * SEL_BIT_WORD words. */
template <int R>
static __device__ void settle(const sel_kernel_args &a, sel_state *st, uint2 *cand, int32_t i,
                              int32_t r, uint32_t *bits)
{
    const int32_t tid = threadIdx.x;
    const part p = st->parts[i];
    const int32_t n_list = p.block1 - p.block0 + 1;
    const bool is_list = tid < n_list;
    uint2 told = make_uint2(0, 0);
    if (is_list) {
        told = __ldcg(a.m.tie + list_at<R>(p, r, tid) * (1 + MAX_OWN_TIE));
    }
    const bool ties = st->part_need[i][r] != 0;
    uint32_t n_sure, n_tie, first;
    const uint32_t sure_before = sel_scan(&st->sel, told.x, &n_sure);
    const uint32_t tie_before = sel_scan(&st->sel, told.y, &n_tie);
    if (sel_any(told.y > MAX_OWN_TIE || n_tie > MAX_TIE)) {
        return;
    }
    if (is_list) {
        st->before[tid] = tie_before;
    }
    if (p.block0 + tid == (int32_t)blockIdx.x) {
        st->n_sure = sure_before;
    }
    sel_sync();
    first = st->n_sure;
    if (ties) {
        first += cut_ties<R>(a, st, i, r, n_tie);
    }
    int32_t n;
    uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
    n = sel_keep(&st->sel, buf, n, st->part_cut[i][r], buf);
    const sel_out out = row_out(a.s, p.g.row + r);
    const int32_t end = min(id_end(a.s, p.g.row + r), p.t1 * 64);
    sel_place(&st->sel, buf, n, p.t0 * 64, end, first, bits, out, position_map(a.s));
    if (p.block1 == (int32_t)blockIdx.x) {
        sel_fill(out, ties ? a.s.k : (int32_t)n_sure);
    }
    if (tid == 0) {
        st->part_open[i] &= ~(1 << r);
    }
    sel_sync();
}

/* The first half of the way, up to the second barrier. */
template <int R>
static __device__ __noinline__ void tell_all(const sel_kernel_args &a, sel_state *st, uint2 *cand)
{
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            take_cut(a, st, i, r);
            tell<R>(a, st, cand, i, r);
        }
    }
}

template <int R>
static __device__ __noinline__ void settle_all(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                               uint32_t *bits)
{
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            settle<R>(a, st, cand, i, r, bits);
        }
    }
}

#endif
