/* kern/cuda/index_exchange.cuh - how blocks that share a few long rows agree on the k best.
 *
 * The lists of all blocks together would hold nearly the whole row. So the blocks add up, in memory, how many of their
 * candidates have each value of the leading 13 bits of the key, and of the leading 7. When all have, each knows the
 * bin of the k-th best: what lies above is in. Each block then tells the others how many it has above, and which it
 * has in that bin, some hundreds in all. From these each finds the exact cut, and, blocks being in the order of
 * positions, where its own members go. Where too many share the bin (equal scores), the row stays open: its lists are
 * merged by one block.
 *
 * The blocks are of one cooperative launch, so a block may wait for what others write.
 */
#ifndef KVS_KERN_CUDA_INDEX_EXCHANGE_CUH
#define KVS_KERN_CUDA_INDEX_EXCHANGE_CUH

#include "kern/cuda/index_select.cuh"

enum {
    MAX_TIE = 4096, /* candidates of the cut's bin, of all blocks */
    TIE_BIN = 64,   /* bins of six more bits                      */
    TIE_SHIFT = BIN_SHIFT - 6,
    SMALL_RANGE = 2048 /* positions of which a warp has the bits     */
};

/* Bins that follow each other, and are counted most, lie in different lines of memory. */
static __device__ __forceinline__ uint32_t bin_at(uint32_t bin)
{
    return (bin & 63) << 7 | bin >> 6;
}

static __device__ __forceinline__ uint32_t group_at(uint32_t group)
{
    return N_BIN + group * 32;
}

static __device__ __forceinline__ uint32_t *hist_of(const sel_kernel_args &a, const part *p,
                                                    int32_t r)
{
    return a.m.hist + (int64_t)(p->g.row + r) * ROW_HIST;
}

/* Waits for a word that another block writes with release to have one of these bits, and returns it. */
static __device__ __forceinline__ unsigned long long wait_bits(const unsigned long long *at,
                                                               unsigned long long bits)
{
    unsigned long long v;
    do {
        asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    } while ((v & bits) == 0);
    return v;
}

/* All blocks have come here, and what they wrote before is seen after; the team calls it. at: 0 before. */
static __device__ __forceinline__ void meet(uint32_t *at)
{
    sel_sync();
    if (threadIdx.x == 0) {
        count_up(at);
        wait_count(at, gridDim.x);
    }
    sel_sync();
}

/* Adds the counts of this block's candidates to those of the row. bins: N_BIN words in shared memory. */
template <int R>
static __device__ __forceinline__ void add_counts(const sel_kernel_args &a, sel_state *st,
                                                  uint2 *cand, uint32_t *bins, int32_t i, int32_t r)
{
    const int32_t tid = threadIdx.x;
    int32_t n;
    const uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
    uint32_t *to = hist_of(a, &st->parts[i], r);
#pragma unroll 1
    for (int32_t j = tid; j < N_BIN / 4; j += SEL_TEAM) {
        ((uint4 *)bins)[j] = make_uint4(0, 0, 0, 0);
    }
    sel_sync();
#pragma unroll 1
    for (int32_t j = tid; j < n; j += SEL_TEAM) {
        atomicAdd(&bins[sel_key(buf[j].x) >> BIN_SHIFT], 1u);
    }
    sel_sync();
#pragma unroll 4
    for (int32_t j = tid; j < N_BIN; j += SEL_TEAM) {
        const uint32_t c = bins[j];
        const uint32_t sum = __reduce_add_sync(~0u, c);
        if (c != 0) {
            count_add(&to[bin_at((uint32_t)j)], c);
        }
        if (tid % 32 == 0 && sum != 0) {
            count_add(&to[group_at((uint32_t)j / BIN_GROUP)], sum);
        }
    }
}

/* Of counts, two in each lane of a warp, from the top: what is before the lane's first, and the lane in whose two the
 * need-th falls; -1 where there are not so many. */
static __device__ __forceinline__ int32_t find_pair(uint32_t first, uint32_t second, uint32_t need,
                                                    uint32_t *before)
{
    const uint32_t scan = sel_warp_scan(first + second);
    *before = scan - first - second;
    return __ffs((int)__ballot_sync(~0u, need <= scan)) - 1;
}

/* The bin of the k-th best of a row, and how many in it are in. */
static __device__ __forceinline__ void take_cut(const sel_kernel_args &a, sel_state *st, int32_t i,
                                                int32_t r)
{
    static_assert(N_BIN / BIN_GROUP == 4 * 32 && BIN_GROUP == 2 * 32, "a warp has them");
    const uint32_t *from = hist_of(a, &st->parts[i], r);
    const uint32_t lane = threadIdx.x;
    const uint32_t k = (uint32_t)a.s.k;
    if (lane < 32) {
        uint32_t g[4];
        uint32_t before;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            g[j] = __ldcg(&from[group_at(N_BIN / BIN_GROUP - 1 - 4 * lane - j)]);
        }
        const int32_t at = find_pair(g[0] + g[1], g[2] + g[3], k, &before);
        uint32_t group = 4 * lane;
#pragma unroll
        for (uint32_t j = 0; j < 3; j++) {
            if (group == 4 * lane + j && before + g[j] < k) {
                before += g[j];
                group++;
            }
        }
        if (at < 0) { /* fewer than k */
            st->part_cut[i][r] = {0, 0};
            st->part_need[i][r] = 0;
        } else {
            const uint32_t need = k - __shfl_sync(~0u, before, at);
            const uint32_t top = N_BIN - 1 - BIN_GROUP * __shfl_sync(~0u, group, at) -
                                 2 * lane; /* bins top, top - 1 */
            const uint32_t first = __ldcg(&from[bin_at(top)]);
            const uint32_t second = __ldcg(&from[bin_at(top - 1)]);
            if (find_pair(first, second, need, &before) == (int32_t)lane) {
                const bool lower = before + first < need;
                before += lower ? first : 0;
                st->part_cut[i][r] = {(lower ? top - 1 : top) << BIN_SHIFT, 0};
                st->part_need[i][r] = need == before + (lower ? second : first) ? 0 : need - before;
            }
        }
    }
    sel_sync();
}

/* Counts this block's sure members of a row and tells the others, with the candidates of the cut's bin. */
template <int R>
static __device__ __forceinline__ void tell(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                            int32_t i, int32_t r)
{
    int32_t n;
    const uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
    const int64_t slot = (int64_t)st->parts[i].slot * R + r;
    const uint32_t cut = st->part_cut[i][r].key >> BIN_SHIFT;
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
        const uint32_t key = sel_key(e.x) >> BIN_SHIFT;
        const bool in = j < n && key >= cut;
        const uint32_t sure = __ballot_sync(~0u, in && (key > cut || !ties));
        if (threadIdx.x % 32 == 0 && sure != 0) {
            atomicAdd(&st->n_sure, (uint32_t)__popc(sure));
        }
        if (in && key == cut && ties) {
            const uint32_t place = sel_take(&st->n_tie);
            if (place < MAX_OWN_TIE) {
                a.m.tie[slot * MAX_OWN_TIE + place] = e;
            }
        }
    }
    sel_sync();
    if (threadIdx.x == 0) {
        const unsigned long long n_tie = min(st->n_tie, MAX_OWN_TIE + 1u);
        asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(&a.m.told[slot]),
                     "l"(TOLD | (unsigned long long)st->n_sure << 32 | n_tie)
                     : "memory");
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

/* The exact cut of a row among the n_tie candidates of its bin, into part_cut; returns how many of those in lie before
 * this block's part. pool: MAX_TIE candidates in shared memory. */
template <int R>
static __device__ __forceinline__ uint32_t cut_ties(const sel_kernel_args &a, sel_state *st,
                                                    int32_t i, int32_t r, uint32_t n_tie,
                                                    uint2 *pool)
{
    const int32_t tid = threadIdx.x;
    const part &p = st->parts[i];
    const int32_t n_list = p.block1 - p.block0 + 1;
    const uint32_t need = st->part_need[i][r];
    uint32_t *bins = st->sel.hist; /* TIE_BIN counts, then up to 32 ranks */
    unsigned long long *few = (unsigned long long *)(st->sel.hist + TIE_BIN);
    if (tid < TIE_BIN) {
        bins[tid] = 0;
    }
    if (tid == 0) {
        st->n_tie = 0;
        st->sel.n_out = 0;
    }
    sel_sync();
#pragma unroll 1
    for (uint32_t j = (uint32_t)tid; j < n_tie; j += SEL_TEAM) {
        const int32_t block = last_not_above(st->before, n_list, j);
        const uint2 e =
            __ldcg(a.m.tie + list_at<R>(p, r, block) * MAX_OWN_TIE + j - st->before[block]);
        pool[j] = e;
        atomicAdd(&bins[sel_key(e.x) >> TIE_SHIFT & (TIE_BIN - 1)], 1u);
    }
    sel_sync();
    /* every warp finds the bin for itself */
    const uint32_t lane = (uint32_t)tid % 32;
    const uint32_t first = bins[TIE_BIN - 1 - 2 * lane];
    const uint32_t second = bins[TIE_BIN - 2 - 2 * lane];
    uint32_t before;
    const int32_t at = find_pair(first, second, need, &before);
    const bool lower = before + first < need;
    const uint32_t bin = __shfl_sync(~0u, TIE_BIN - 1 - 2 * lane - lower, at);
    const uint32_t in_bin = __shfl_sync(~0u, lower ? second : first, at);
    const uint32_t still = need - __shfl_sync(~0u, before + (lower ? first : 0), at);
    sel_cut c;
    if (in_bin <= 32) {
#pragma unroll 1
        for (uint32_t j = (uint32_t)tid; j < n_tie; j += SEL_TEAM) {
            const uint2 e = pool[j];
            if ((sel_key(e.x) >> TIE_SHIFT & (TIE_BIN - 1)) == bin) {
                few[sel_take(&st->sel.n_out)] = sel_rank(e);
            }
        }
        sel_sync();
        const unsigned long long own = lane < in_bin ? few[lane] : 0;
        uint32_t better = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < in_bin; j++) {
            better += few[j] > own;
        }
        const uint32_t who = __ballot_sync(~0u, lane < in_bin && better == still - 1);
        const unsigned long long v = __shfl_sync(~0u, own, __ffs((int)who) - 1);
        c = {(uint32_t)(v >> 31), (uint32_t)v & 0x7FFFFFFFu};
    } else {
        sel_sync(); /* the bins have been read */
        c = sel_find(&st->sel, pool, (int32_t)n_tie, (int32_t)need, 0);
    }
    uint32_t mine = 0;
#pragma unroll 1
    for (uint32_t j = (uint32_t)tid; j < n_tie; j += SEL_TEAM) {
        mine += (int32_t)pool[j].y < p.t0 * 64 && sel_in(c, pool[j].x, (int32_t)pool[j].y);
    }
    mine = __reduce_add_sync(~0u, mine);
    if (tid % 32 == 0 && mine != 0) {
        atomicAdd(&st->n_tie, mine);
    }
    if (tid == 0) {
        st->part_cut[i][r] = c;
    }
    sel_sync();
    return st->n_tie;
}

/* The members among buf (n entries, ids in [id0, id0 + SMALL_RANGE)) to their places from `first` on. */
static __device__ __forceinline__ void place_small(const uint2 *buf, int32_t n, sel_cut c,
                                                   int32_t id0, uint32_t first, uint32_t *bits,
                                                   const sel_out &out, const to_position &map)
{
    const int32_t tid = threadIdx.x;
    if (tid < SMALL_RANGE / 32) {
        bits[tid] = 0;
    }
    sel_sync();
#pragma unroll 1
    for (int32_t j = tid; j < n; j += SEL_TEAM) {
        const int32_t l = (int32_t)buf[j].y - id0;
        if (sel_in(c, buf[j].x, (int32_t)buf[j].y)) {
            atomicOr(&bits[l / 32], 1u << (l % 32));
        }
    }
    sel_sync();
    const uint2 own = ((const uint2 *)bits)[tid % 32];
    const uint32_t own_n = (uint32_t)(__popc(own.x) + __popc(own.y));
    const uint32_t own_before = first + sel_warp_scan(own_n) - own_n;
#pragma unroll 1
    for (int32_t at = 0; at < n; at += SEL_TEAM) {
        const int32_t j = at + tid;
        const uint2 e = j < n ? buf[j] : make_uint2(0, 0);
        const int32_t l = j < n ? (int32_t)e.y - id0 : 0;
        const uint32_t before = __shfl_sync(~0u, own_before, l / 64);
        if (j < n && sel_in(c, e.x, (int32_t)e.y)) {
            const uint32_t lower = bits[l / 32] & ((1u << (l % 32)) - 1);
            const uint32_t to = before + (uint32_t)__popc(lower) +
                                (l % 64 < 32 ? 0 : (uint32_t)__popc(bits[l / 32 - 1]));
            out.id[to] = map((int32_t)e.y);
            if (out.score != NULL) {
                out.score[to] = __uint_as_float(e.x);
            }
        }
    }
}

/* This block's members of a row to their places; leaves the row open where too many share the cut's bin. work: MAX_TIE
 * candidates, then SEL_BIT_WORD words. */
template <int R>
static __device__ __forceinline__ void settle(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                              int32_t i, int32_t r, uint2 *work)
{
    const int32_t tid = threadIdx.x;
    const part p = st->parts[i];
    uint32_t sure = 0;
    uint32_t tie = 0;
    if (tid <= p.block1 - p.block0) {
        const unsigned long long v = wait_bits(a.m.told + list_at<R>(p, r, tid), TOLD);
        sure = (uint32_t)(v >> 32) & 0xFFFF;
        tie = (uint32_t)v;
    }
    /* of both at once: sure members are k or fewer, and no block says more than MAX_OWN_TIE + 1 */
    static_assert(MAX_FUSED_K <= 2048 && MAX_BLOCK * (MAX_OWN_TIE + 1) < 1 << 20, "20 + 12 bits");
    uint32_t total;
    const uint32_t before = sel_scan(&st->sel, sure << 20 | tie, &total);
    const uint32_t n_tie = total & 0xFFFFF;
    if (sel_any(tie > MAX_OWN_TIE || n_tie > MAX_TIE)) {
        return;
    }
    if (tid <= p.block1 - p.block0) {
        st->before[tid] = before & 0xFFFFF;
    }
    if (p.block0 + tid == (int32_t)blockIdx.x) {
        st->n_sure = before >> 20;
    }
    sel_sync();
    const bool ties = st->part_need[i][r] != 0;
    uint32_t first = st->n_sure;
    if (ties) {
        first += cut_ties<R>(a, st, i, r, n_tie, work);
    }
    const sel_out out = row_out(a.s, p.g.row + r);
    const sel_cut c = st->part_cut[i][r];
    int32_t n;
    uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
    uint32_t *bits = (uint32_t *)(work + MAX_TIE);
    if (p.t1 - p.t0 <= SMALL_RANGE / 64) {
        place_small(buf, n, c, p.t0 * 64, first, bits, out, position_map(a.s));
    } else {
        n = sel_keep(&st->sel, buf, n, c, buf);
        const int32_t end = min(id_end(a.s, p.g.row + r), p.t1 * 64);
        sel_place(&st->sel, buf, n, p.t0 * 64, end, first, bits, out, position_map(a.s));
    }
    if (p.block1 == (int32_t)blockIdx.x) {
        sel_fill(out, ties ? a.s.k : (int32_t)(total >> 20));
    }
    if (tid == 0) {
        st->part_open[i] &= ~(1 << r);
    }
    sel_sync();
}

/* The whole way, for every row that this block shares. work: as settle has it, and at first N_BIN words. */
template <int R>
static __device__ __noinline__ void agree(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                          uint2 *work)
{
    static_assert(N_BIN * 4 <= MAX_TIE * 8, "bins lie where ties will");
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            add_counts<R>(a, st, cand, (uint32_t *)work, i, r);
            sel_sync();
        }
    }
    meet(a.m.met);
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            take_cut(a, st, i, r);
            tell<R>(a, st, cand, i, r);
        }
    }
#pragma unroll 1
    for (int32_t i = 0; i < st->n_part; i++) {
#pragma unroll 1
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            settle<R>(a, st, cand, i, r, work);
        }
    }
}

#endif
