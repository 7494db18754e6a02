/* kern/cuda/index_select.cuh - the fused selection's state, and how a block's share of the keys becomes lists of
 * candidates in shared memory.
 *
 * The team scores tiles without waiting for each other: a step is a tile of each warpgroup, and a warp that begins
 * step n waits only for all warps to have ended step n - 2, where it learns whether a list was then nearly full. If
 * so the team meets and cuts. So a list keeps room for three steps.
 *
 * A row's keys come in ascending order, up to the tiles of two steps, and a cut is made between steps. A later key
 * whose score equals the cut's is therefore worse than the k best already there: only larger scores are candidates.
 */
#ifndef KVS_KERN_CUDA_INDEX_SELECT_CUH
#define KVS_KERN_CUDA_INDEX_SELECT_CUH

#include "kern/cuda/index_sm90.cuh"
#include "kern/cuda/select.cuh"
#include "shard/shard.h"

enum {
    MAX_BLOCK = 256,
    MAX_FUSED_K = 2048,
    SLACK = 64,        /* a cut on the way may keep so many more         */
    MERGE_SLACK = 512, /* and that of a list which others will be merged with */
    BIN_SHIFT = 19,    /* blocks agree by the leading 13 bits of a key      */
    N_BIN = 1 << (32 - BIN_SHIFT),
    BIN_GROUP = 64, /* neighbours that have a sum as well                */
    ROW_HIST = N_BIN + N_BIN / BIN_GROUP * 32,
    MAX_OWN_TIE = 512 /* candidates of one such bin that a block tells others */
};

/* A word of sel_mem.told: TOLD, sure members << 32, candidates of the cut's bin. */
static constexpr unsigned long long TOLD = 1ull << 63;

template <int R> __host__ __device__ constexpr int cap()
{
    return R == 4 ? 4224 : 8192;
}

template <int R> __host__ __device__ constexpr int stages()
{
    return R == 4 ? 6 : R == 2 ? 8 : 16;
}

/* Scratch, by R, the number of blocks and, where blocks agree first, of rows. */
typedef struct sel_mem {
    uint32_t *ticket;         /* [block]                     */
    uint32_t *met;            /* [1]                         */
    uint32_t *hist;           /* [row, ROW_HIST]             */
    int32_t *count;           /* [2 block, R]                */
    sel_cut *cut;             /* [2 block, R]                */
    uint2 *list;              /* [2 block, R, cap]           */
    uint2 *tie;               /* [2 block, R, MAX_OWN_TIE]   */
    unsigned long long *told; /* [2 block, R]        */
} sel_mem;

typedef struct sel_kernel_args {
    index_select_args s;
    sel_mem m;
    int32_t exchange; /* the blocks agree on a cut first */
} sel_kernel_args;

/* Tiles of a warpgroup in a step. */
template <int R> __host__ __device__ constexpr int step_tiles()
{
    return R == 4 ? 1 : 2;
}

/* What a row's list may gain in three steps. */
template <int R> __host__ __device__ constexpr int room()
{
    return 3 * step_tiles<R>() * ix_n_wg<R>() * 64;
}

/* A list of so many is nearly full. With four rows what it gains until it is cut seldom is a fourth of room, so it gets
 * that much, and the rest goes to scratch (rest_of). */
template <int R> __host__ __device__ constexpr int limit()
{
    return cap<R>() - (R == 4 ? room<R>() / 4 : room<R>());
}

/* Whether lists may have more than cap entries. */
template <int R> __host__ __device__ constexpr bool has_rest()
{
    return limit<R>() + room<R>() > cap<R>();
}

/* A group of rows that this block shares with others. */
typedef struct part {
    ix_group g;
    int32_t block0, block1; /* the blocks that work on it                     */
    int32_t slot;           /* of this block's lists                          */
    int32_t in_shared;      /* its lists are still in shared memory           */
    int32_t t0, t1;         /* the tiles that are this block's                */
} part;

typedef struct alignas(16) sel_state {
    ix_ring ring;
    uint64_t step[2]; /* ends of steps                                      */
    int32_t full[4];  /* the last step, of every fourth, that found one full */
    ix_share share;
    int64_t warp[IX_MAX_WARP];
    sel_shared sel;
    uint32_t count[4];
    sel_cut cut[4];
    float least[4]; /* what a score must exceed */
    part parts[2];
    sel_cut part_cut[2][4];
    uint32_t part_need[2][4]; /* of those in the cut's bin; 0: all in the cut are in */
    int32_t part_open[2];     /* bit r: the row's lists are to be merged             */
    sel_small small[4];
    uint32_t n_sure, n_tie;
    int32_t n_part;
    unsigned long long best_cut;
    uint32_t before[MAX_BLOCK + 1];
    sel_kernel_args
        args; /* as the launch has them, for code that runs once: nearer than the constants */
} sel_state;

struct to_position {
    shard_geom geom;
    __device__ int32_t operator()(int32_t id) const
    {
        if (geom.n == 1) {
            return id;
        }
        kvs_local l;
        l.v = id;
        return (int32_t)shard_pos(geom, l).v;
    }
};

static __device__ __forceinline__ to_position position_map(const index_select_args &s)
{
    to_position p;
    p.geom.n = s.dcp;
    p.geom.i = s.interleave;
    p.geom.rank = s.rank;
    return p;
}

static __device__ __forceinline__ sel_out row_out(const index_select_args &s, int64_t row)
{
    sel_out o;
    o.id = s.list_id + row * s.k;
    o.score = s.list_score + row * s.k;
    o.count = s.list_count + row;
    o.k = s.k;
    return o;
}

/* Ids of a row's candidates lie below. */
static __device__ __forceinline__ int32_t id_end(const index_select_args &s, int32_t row)
{
    const int64_t wide = (int64_t)s.in.table_width * KVS_PAGE_TOKENS;
    return (int32_t)min(wide, (int64_t)s.in.kv_len[row]);
}

/* A row's candidates, all of them, to its result; lo as in sel_find_above. bits: SEL_BIT_WORD words, which may lie
 * behind the first k of buf. */
static __device__ __noinline__ void finish_row(const index_select_args &s, sel_shared *sel,
                                               uint2 *buf, int32_t n, uint32_t lo, int32_t row,
                                               uint32_t *bits)
{
    const sel_out out = row_out(s, row);
    const int32_t end = id_end(s, row);
    if (n > s.k) {
        n = sel_keep(sel, buf, n, sel_find_exact(sel, buf, n, s.k, lo), buf);
    }
    sel_place(sel, buf, n, 0, end, 0, bits, out, position_map(s));
    sel_fill(out, n);
    sel_sync();
}

static __device__ __forceinline__ void set_cut(sel_state *st, int32_t r, sel_cut c, int32_t left)
{
    st->count[r] = (uint32_t)left;
    st->cut[r] = c;
    st->least[r] = sel_score(c.key);
}

/* Where in scratch the entries of a row's list from cap on go: the place of the list of the share's last piece, which
 * comes to scratch when all scores are there. */
template <int R> static __device__ __forceinline__ uint2 *rest_of(const sel_state *st, int32_t r)
{
    return st->args.m.list + ((2 * (int64_t)blockIdx.x + 1) * R + r) * cap<R>();
}

/* Cuts lists of which one is nearly full: of four rows each by a warpgroup, else by the team. */
template <int R>
static __device__ __noinline__ void cut_lists(sel_state *st, uint2 *cand, int32_t n_row, int32_t k)
{
    const int32_t tid = threadIdx.x;
    ix_team_sync<R>();
    if constexpr (R == 4) {
        const int32_t r = tid / 128;
        const int32_t n = r < n_row ? (int32_t)st->count[r] : 0;
        if (n > k + SLACK + 256) {
            const small_list l = {cand + (int64_t)r * cap<R>(), rest_of<R>(st, r), cap<R>(), n};
            sel_small *s = &st->small[r];
            const int32_t bar = SEL_BAR + 1 + r;
            const sel_cut c =
                small_find(st->sel.hist + SEL_SMALL_BIN * r, s, bar, l, k, SLACK, st->cut[r].key);
            const int32_t left = small_keep(s, bar, l, c);
            if (tid % 128 == 0) {
                set_cut(st, r, c, left);
            }
        }
    } else if (tid < SEL_TEAM) {
        for (int32_t r = 0; r < n_row; r++) {
            uint2 *buf = cand + (int64_t)r * cap<R>();
            const int32_t n = (int32_t)st->count[r];
            if (n > limit<R>()) {
                const sel_cut c = sel_find_above(&st->sel, buf, n, k, SLACK, st->cut[r].key);
                const int32_t left = sel_keep(&st->sel, buf, n, c, buf);
                if (tid == 0) {
                    set_cut(st, r, c, left);
                }
            }
        }
    }
    ix_team_sync<R>();
}

/* Where a warpgroup is in the block's share. */
typedef struct walk {
    ix_place place;
    int32_t it;   /* its next tile, of those of the share */
    int32_t step; /* the team's next step                 */
    int32_t done; /* tiles of earlier pieces              */
} walk;

/* Waits for all warps to have ended step n - 2; whether a list was then nearly full. */
static __device__ __forceinline__ bool step_begin(sel_state *st, int32_t n)
{
    if (n < 2) {
        return false;
    }
    mbar_wait(ptx_shared(&st->step[n & 1]), (uint32_t)(n - 2) >> 1 & 1);
    return *(volatile int32_t *)&st->full[(n - 2) & 3] == n - 2;
}

static __device__ __forceinline__ void step_end(sel_state *st, int32_t n, int32_t tid)
{
    __syncwarp();
    if (tid % 32 == 0) {
        mbar_arrive(ptx_shared(&st->step[n & 1]));
    }
}

/* Scores tiles [t0, t1) of a group into the lists. */
template <int NH, int R>
static __device__ __forceinline__ void score_piece(const index_select_args &s, sel_state *st,
                                                   const ix_group &g, uint32_t q, const uint32_t *w,
                                                   uint32_t stage, uint2 *cand, const ix_lane &lane,
                                                   walk *at, int32_t t0, int32_t t1)
{
    constexpr int N_OWN = ix_n_own<R>();
    constexpr int TILES = step_tiles<R>();
    constexpr int N_WG = ix_n_wg<R>();
    const int32_t tid = threadIdx.x;
    const int32_t own = ix_own<R>(tid);
    const int32_t token = ix_token(tid);
    int32_t len[N_OWN];
    float least[N_OWN];
#pragma unroll
    for (int j = 0; j < N_OWN; j++) {
        const bool real = own + j < g.n && (R > 1 || tid % 4 < 2);
        len[j] = (real ? s.in.kv_len[g.row + own + j] : 0) - token;
        least[j] = st->least[own + j];
    }
    const int32_t base = (t0 - at->done) * 64; /* of tile 0 of the share, as a key of the row */
    int32_t first = base + at->it * 64;
    int32_t left = (t1 - t0 + TILES * N_WG - 1) / (TILES * N_WG); /* steps */
#pragma unroll 1
    for (; left > 0; left--) {
        if (step_begin(st, at->step)) {
            cut_lists<R>(st, cand, g.n, s.k);
#pragma unroll
            for (int j = 0; j < N_OWN; j++) {
                least[j] = st->least[own + j];
            }
        }
#pragma unroll 1
        for (int i = 0; i < TILES && first < t1 * 64; i++, first += 64 * N_WG) {
            ix_keys key;
            if (!ix_take<R, stages<R>()>(ptx_shared(&st->ring), stage, &at->place, lane, &key)) {
                continue;
            }
            float score[N_OWN];
            ix_score<NH, R>(key, q, w, g.n, tid, score);
#pragma unroll
            for (int j = 0; j < N_OWN; j++) {
                if (score[j] > least[j] && first < len[j]) { /* never for NaN */
                    const uint32_t to = sel_take(&st->count[own + j]);
                    const uint2 e =
                        make_uint2(__float_as_uint(score[j]), (uint32_t)(first + token));
                    if (!has_rest<R>() || to < cap<R>()) {
                        cand[(own + j) * cap<R>() + to] = e;
                    } else {
                        rest_of<R>(st, own + j)[to - cap<R>()] = e;
                    }
                    if (to >= limit<R>()) {
                        *(volatile int32_t *)&st->full[at->step & 3] = at->step;
                    }
                }
            }
        }
        step_end(st, at->step, tid);
        at->step++;
    }
    at->it = (first - base) / 64;
    at->done += t1 - t0;
    ix_team_sync<R>();
    if constexpr (has_rest<R>()) {
        const uint32_t most = max(max(st->count[0], st->count[1]), max(st->count[2], st->count[3]));
        if (most > cap<R>()) {
            cut_lists<R>(st, cand, g.n, s.k);
        }
    }
}

/* Puts a list into scratch, cut to its k best or a few more; floor: a cut that is known to hold k. */
template <int R>
static __device__ __noinline__ void dump_list(const sel_kernel_args &a, sel_state *st, int32_t slot,
                                              int32_t r, const uint2 *buf, int32_t n, sel_cut floor)
{
    const int64_t at = (int64_t)slot * R + r;
    sel_cut c = st->cut[r];
    if (n > a.s.k + MERGE_SLACK) {
        c = sel_find_above(&st->sel, buf, n, a.s.k, MERGE_SLACK, c.key);
    }
    if (floor.key > c.key || (floor.key == c.key && floor.inv > c.inv)) {
        c = floor;
    }
    n = sel_keep(&st->sel, buf, n, c, a.m.list + at * cap<R>());
    if (threadIdx.x == 0) {
        a.m.count[at] = n;
        a.m.cut[at] = c;
    }
}

/* This block's place in scratch for the lists of a group it shares, of whose tiles t0 is its first. */
static __device__ __forceinline__ int32_t part_slot(int32_t t0)
{
    return 2 * (int32_t)blockIdx.x + (t0 == 0);
}

/* Notes a group that is not this block's alone. One thread calls it. */
static __device__ __noinline__ void note_part(sel_state *st, const ix_group &g, int64_t n_all,
                                              int64_t base, int32_t t0, int32_t t1, bool last)
{
    part *p = &st->parts[st->n_part];
    p->g = g;
    p->block0 = ix_block_of(n_all, base);
    p->block1 = ix_block_of(n_all, base + g.n_tile - 1);
    p->slot = part_slot(t0);
    p->in_shared = last;
    p->t0 = t0;
    p->t1 = t1;
    st->part_open[st->n_part] = (1 << g.n) - 1;
    st->n_part++;
}

/* The multiplying team's walk over the block's share. Finishes rows that are this block's alone; the lists of others go
 * to scratch, but for those of the last piece. hook.ring_full is called once, before the first score. */
template <int NH, int R, typename HOOK>
static __device__ __forceinline__ void consume(const sel_kernel_args &a, sel_state *st, uint8_t *q,
                                               uint32_t *w, const uint8_t *stage, uint2 *cand,
                                               const HOOK &hook)
{
    const index_select_args &s = a.s;
    const ix_lane lane = ix_lane_of((int32_t)threadIdx.x);
    const int32_t wg = (int32_t)threadIdx.x / 128;
    const uint32_t q_tile = ix_tile(q);
    const volatile ix_share *share = &st->share; /* read anew each time: registers are scarce */
    int64_t at = share->begin;
    int64_t base = share->base;
    int32_t row = share->row;
    walk way = {{wg, 0}, wg, 0, 0};
    if (at >= share->end) {
        hook.ring_full();
    }
    while (at < share->end) {
        const ix_group g = ix_group_at<R>(s.in, row, false);
        const int32_t t0 = (int32_t)(at - base);
        const int32_t t1 = (int32_t)min((int64_t)g.n_tile, share->end - base);
        const bool last = base + t1 == share->end;
        ix_team_sync<R>();
        ix_load_q<NH, R>(s.in, g, q, w);
        if (threadIdx.x < 4) {
            st->count[threadIdx.x] = 0;
            st->cut[threadIdx.x] = {0, 0};
            st->least[threadIdx.x] = -INFINITY;
        }
        if (at == share->begin) {
            hook.ring_full();
        }
        ix_team_sync<R>();
        score_piece<NH, R>(s, st, g, q_tile, w + ix_w_at<NH>((int32_t)threadIdx.x),
                           ptx_shared(stage), cand, lane, &way, t0, t1);
        if (threadIdx.x >= SEL_TEAM) {
            /* they only multiply */
        } else if (t0 == 0 && t1 == g.n_tile) {
            for (int32_t r = 0; r < g.n; r++) {
                uint2 *buf = cand + (int64_t)r * cap<R>();
                finish_row(s, &st->sel, buf, (int32_t)st->count[r], st->cut[r].key, g.row + r,
                           (uint32_t *)(buf + MAX_FUSED_K));
            }
        } else {
            for (int32_t r = 0; r < g.n && !last; r++) {
                dump_list<R>(a, st, part_slot(t0), r, cand + (int64_t)r * cap<R>(),
                             (int32_t)st->count[r], {0, 0});
            }
        }
        at = base + t1;
        base += g.n_tile;
        row += g.n;
    }
}

/* A part's list of one row, wherever it is; *n its length. */
template <int R>
static __device__ uint2 *list_of(const sel_kernel_args &a, sel_state *st, uint2 *cand, int32_t i,
                                 int32_t r, int32_t *n)
{
    const part *p = &st->parts[i];
    if (p->in_shared) {
        *n = (int32_t)st->count[r];
        return cand + (int64_t)r * cap<R>();
    }
    const int64_t at = (int64_t)p->slot * R + r;
    *n = a.m.count[at];
    return a.m.list + at * cap<R>();
}

/* Of blocks that share a part, the tid-th one's place in scratch: only the first has the row's first tile. */
template <int R>
static __device__ __forceinline__ int64_t list_at(const part &p, int32_t r, int32_t i)
{
    return (2 * (int64_t)(p.block0 + i) + (i == 0)) * R + r;
}

#endif
