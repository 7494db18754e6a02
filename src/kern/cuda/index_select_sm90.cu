/* kern/cuda/index_select_sm90.cu - scores and the exact k best in one launch, with no array of scores.
 *
 * The scorer is index_sm90.cuh's. A score that may still matter is appended to its row's list of candidates
 * in shared memory; when a list is nearly full it is cut to its k best (select.cuh), and what is worse than
 * the cut is no candidate from then on. A row whose tiles all fall to one block is finished there. The
 * lists of a row that several blocks share go to scratch, and the block that comes last merges them: at
 * most two rows' groups of a block are shared, so scratch depends on the number of blocks alone.
 *
 * With few rows, and many blocks to each, the lists together would hold the whole row. Then the blocks first
 * agree on a cut: histograms of 11 bits of the score, added up in memory between barriers of the grid
 * (a cooperative launch), and each keeps only what is inside.
 *
 * Nothing in a result depends on the order of atomics: they place members of sets whose order is made
 * afterwards, and any cut met on the way is a lower bound of the final one.
 */
#include <cooperative_groups.h>
#include "kern/cuda/cuda.h"
#include "kern/cuda/index_select.h"
#include "kern/cuda/index_sm90.cuh"
#include "kern/cuda/select.cuh"
#include "shard/shard.h"

namespace cg = cooperative_groups;

namespace
{

enum {
    MAX_BLOCK = 256,
    MAX_FUSED_K = 2048,
    STEP_TILE = 8,             /* tiles between two looks at the lists              */
    STEP_KEY = STEP_TILE * 64, /* what a row's list may gain between them           */
    SLACK = 256,               /* a cut on the way may keep so many more            */
    MERGE_CAP = 16384,         /* candidates of a merge in shared memory            */
    MERGE_STEP = 8 * SEL_TEAM,
    N_DIGIT = 3, /* of a score's key                                  */
    FEW = 2048   /* candidates too many that a merge takes in stride  */
};

template <int R> __host__ __device__ constexpr int cap()
{
    return R == 4 ? 4096 : 8192;
}

template <int R> __host__ __device__ constexpr int stages()
{
    return R == 4 ? 6 : R == 2 ? 8 : 16;
}

template <int R> __host__ __device__ constexpr int emit_words()
{
    return R == 4 ? 4096 : 8192;
}

/* A group of rows that this block shares with others. */
typedef struct part {
    ix_group g;
    int32_t block0, block1; /* the blocks that work on it                     */
    int32_t slot;           /* of this block's lists                          */
    int32_t in_shared;      /* its lists are still in shared memory           */
} part;

typedef struct alignas(16) sel_state {
    ix_ring ring;
    ix_share share;
    int64_t warp[IX_THREADS / 32];
    sel_shared sel;
    uint32_t count[4];
    sel_cut cut[4];
    float least[4]; /* the lowest score inside cut */
    part parts[2];
    sel_cut part_cut[2][4];
    uint32_t part_need[2][4]; /* 0: the row has fewer than k candidates */
    int32_t part_n[2][4];
    int32_t n_part, last[2];
    uint32_t more;
    unsigned long long best_cut;
    uint32_t before[MAX_BLOCK + 1];
} sel_state;

/* Scratch, by R and the number of blocks. */
typedef struct sel_mem {
    uint32_t *ticket; /* [block]                        */
    uint32_t *hist;   /* [block, R, N_DIGIT, SEL_BIN]   */
    int32_t *count;   /* [2 block, R]                   */
    sel_cut *cut;     /* [2 block, R]                   */
    uint2 *list;      /* [2 block, R, cap]              */
} sel_mem;

typedef struct sel_kernel_args {
    index_select_args s;
    sel_mem m;
    int32_t exchange; /* the blocks agree on a cut first */
} sel_kernel_args;

struct to_position {
    shard_geom geom;
    __device__ int32_t operator()(int32_t id) const
    {
        kvs_local l;
        l.v = id;
        return (int32_t)shard_pos(geom, l).v;
    }
};

static __device__ to_position position_map(const index_select_args &s)
{
    to_position p;
    p.geom.n = s.dcp;
    p.geom.i = s.interleave;
    p.geom.rank = s.rank;
    return p;
}

static __device__ sel_out row_out(const index_select_args &s, int64_t row)
{
    sel_out o;
    o.id = s.list_id + row * s.k;
    o.score = s.list_score + row * s.k;
    o.count = s.list_count + row;
    o.k = s.k;
    return o;
}

/* Ids of a row's candidates lie below. */
static __device__ int32_t id_end(const index_select_args &s, int32_t row)
{
    const int64_t wide = (int64_t)s.in.table_width * KVS_PAGE_TOKENS;
    return (int32_t)min(wide, (int64_t)s.in.kv_len[row]);
}

/* A row's candidates, all of them, to its result. bits: 2 n_word words. */
static __device__ __noinline__ void finish_row(const index_select_args &s, sel_shared *sel,
                                               const uint2 *buf, int32_t n, int32_t row,
                                               uint32_t *bits, int32_t n_word)
{
    sel_emit(sel, buf, n, id_end(s, row), bits, bits + n_word, n_word, row_out(s, row),
             position_map(s));
    ix_team_sync();
}

/* Cuts the lists that are nearly full. */
template <int R>
static __device__ __noinline__ void cut_lists(sel_state *st, uint2 *cand, int32_t n_row, int32_t k)
{
    for (int32_t r = 0; r < n_row; r++) {
        uint2 *buf = cand + (int64_t)r * cap<R>();
        const int32_t n = (int32_t)st->count[r];
        if (n > cap<R>() - STEP_KEY) {
            const sel_cut c = sel_find(&st->sel, buf, n, k, SLACK);
            const int32_t left = sel_keep(&st->sel, buf, n, c, buf);
            if (threadIdx.x == 0) {
                st->count[r] = (uint32_t)left;
                st->cut[r] = c;
                st->least[r] = sel_score(c.key);
            }
        }
    }
    ix_team_sync();
}

/* Scores tiles [t0, t1) of a group, whose first is tile `it` of the ring, into the lists. */
template <int NH, int R>
static __device__ __forceinline__ void
score_piece(const index_select_args &s, sel_state *st, const ix_group &g, const uint8_t *q,
            const float *w, const uint8_t *stage, uint2 *cand, int64_t it0, int32_t t0, int32_t t1)
{
    const int32_t tid = threadIdx.x;
    const int32_t wg = tid / 128;
    int32_t len[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        len[r] = r < g.n ? s.in.kv_len[g.row + r] : 0;
    }
    uint32_t seen = 0;
    for (int32_t step = t0; step < t1; step += STEP_TILE) {
#pragma unroll 1
        for (int32_t t = step + wg; t < min(t1, step + STEP_TILE); t += IX_N_WG) {
            const int64_t it = it0 + t - t0;
            const int32_t slot = (int32_t)(it % stages<R>());
            mbar_wait(ptx_shared(&st->ring.full[slot]), (uint32_t)(it / stages<R>()) & 1);
            const bool ok = st->ring.ok[slot] != 0;
            const ix_keys key = ix_load_keys(stage + slot * IX_STAGE, tid);
            __syncwarp();
            if (tid % 32 == 0) {
                mbar_arrive(ptx_shared(&st->ring.empty[slot]));
            }
            if (!ok) {
                continue;
            }
            const int32_t id = t * 64 + ix_token(tid);
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (r >= g.n) {
                    break;
                }
                const float score = ix_score<NH>(key, wgmma_tile(ptx_shared(q + r * NH * 128)),
                                                 w + r * 4 * ix_w_stride<NH>(), tid);
                /* false for NaN */
                bool want = tid % 4 < 2 && id < len[r] && score >= st->least[r];
                uint32_t m = __ballot_sync(~0u, want);
                if (m != 0) {
                    const uint32_t bits = __float_as_uint(score);
                    want = want && sel_in(st->cut[r], bits, id);
                    m = __ballot_sync(~0u, want);
                    const uint32_t lane = tid % 32;
                    uint32_t to = 0;
                    if (lane == 0) {
                        to = atomicAdd(&st->count[r], (uint32_t)__popc(m));
                    }
                    to = __shfl_sync(~0u, to, 0);
                    seen = max(seen, to + (uint32_t)__popc(m));
                    to += (uint32_t)__popc(m & ((1u << lane) - 1));
                    if (want) {
                        cand[(int64_t)r * cap<R>() + to] = make_uint2(bits, (uint32_t)id);
                    }
                }
            }
        }
        if (ix_team_any(seen > (uint32_t)(cap<R>() - STEP_KEY))) {
            cut_lists<R>(st, cand, g.n, s.k);
            seen = 0;
        }
    }
    ix_team_sync();
}

/* Puts a list into scratch, cut to its k best or a few more. */
template <int R>
static __device__ __noinline__ void dump_list(const sel_kernel_args &a, sel_state *st, int32_t slot,
                                              int32_t r, const uint2 *buf, int32_t n, bool cut)
{
    const int64_t at = (int64_t)slot * R + r;
    sel_cut c = st->cut[r];
    if (cut && n > a.s.k + SLACK) {
        c = sel_find(&st->sel, buf, n, a.s.k, SLACK);
    }
    n = sel_keep(&st->sel, buf, n, c, a.m.list + at * cap<R>());
    if (threadIdx.x == 0) {
        a.m.count[at] = n;
        a.m.cut[at] = c;
    }
}

/* The multiplying team's walk over the block's share. Finishes rows that are this block's alone; notes
 * shared ones, leaving the lists of the last piece in shared memory. */
template <int NH, int R>
static __device__ __forceinline__ void consume(const sel_kernel_args &a, sel_state *st, uint8_t *q,
                                               float *w, const uint8_t *stage, uint2 *cand)
{
    const index_select_args &s = a.s;
    const ix_share share = st->share;
    int64_t at = share.begin;
    int64_t base = share.base;
    int32_t row = share.row;
    int64_t done = 0;
    while (at < share.end) {
        const ix_group g = ix_group_at(s.in, row, R, false);
        const int32_t t0 = (int32_t)(at - base);
        const int32_t t1 = (int32_t)min((int64_t)g.n_tile, share.end - base);
        ix_team_sync();
        ix_load_q<NH>(s.in, g, q, w);
        if (threadIdx.x < 4) {
            st->count[threadIdx.x] = 0;
            st->cut[threadIdx.x] = {0, 0};
            st->least[threadIdx.x] = -FLT_MAX; /* not -inf */
        }
        ix_team_sync();
        score_piece<NH, R>(s, st, g, q, w, stage, cand, done, t0, t1);
        const bool last = base + t1 == share.end;
        if (t0 == 0 && t1 == g.n_tile) {
            for (int32_t r = 0; r < g.n; r++) {
                finish_row(s, &st->sel, cand + (int64_t)r * cap<R>(), (int32_t)st->count[r],
                           g.row + r, st->sel.hist, SEL_BIN / 2);
            }
        } else {
            const int32_t i = st->n_part;
            const int32_t slot = 2 * (int32_t)blockIdx.x + (t0 == 0);
            ix_team_sync();
            if (threadIdx.x == 0) {
                part *p = &st->parts[i];
                p->g = g;
                p->block0 = ix_block_of(share.n_all, base);
                p->block1 = ix_block_of(share.n_all, base + g.n_tile - 1);
                p->slot = slot;
                p->in_shared = last;
                st->n_part = i + 1;
            }
            for (int32_t r = 0; r < g.n && !last; r++) {
                dump_list<R>(a, st, slot, r, cand + (int64_t)r * cap<R>(), (int32_t)st->count[r],
                             true);
            }
            ix_team_sync();
        }
        done += t1 - t0;
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

static __device__ uint32_t *hist_of(const sel_kernel_args &a, const part *p, int32_t r, int32_t n_r,
                                    int32_t digit)
{
    return a.m.hist + (((int64_t)p->block0 * n_r + r) * N_DIGIT + digit) * SEL_BIN;
}

/* Adds the counts of this block's candidates to those of the row. */
template <int R>
static __device__ __noinline__ void add_hist(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                             int32_t digit)
{
    for (int32_t i = 0; i < st->n_part; i++) {
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            if (st->part_need[i][r] == 0) {
                continue;
            }
            int32_t n;
            const uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
            sel_hist_zero(&st->sel);
            sel_hist(&st->sel, buf, n, st->part_cut[i][r], digit);
            uint32_t *to = hist_of(a, &st->parts[i], r, R, digit);
            for (int32_t b = threadIdx.x; b < SEL_BIN; b += SEL_TEAM) {
                if (st->sel.hist[b] != 0) {
                    atomicAdd(&to[b], st->sel.hist[b]);
                }
            }
            ix_team_sync();
        }
    }
}

/* Takes the digit of every part's cut from the sums. */
template <int R>
static __device__ __noinline__ void take_digit(const sel_kernel_args &a, sel_state *st,
                                               int32_t digit)
{
    for (int32_t i = 0; i < st->n_part; i++) {
        for (int32_t r = 0; r < st->parts[i].g.n; r++) {
            const uint32_t need = st->part_need[i][r];
            if (need == 0) {
                continue;
            }
            const uint32_t *from = hist_of(a, &st->parts[i], r, R, digit);
            uint32_t h[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                h[j] = __ldcg(&from[SEL_BIN - 1 - 4 * (int)threadIdx.x - j]);
            }
            sel_find_bin(&st->sel, h, need);
            if (threadIdx.x == 0) {
                if (st->sel.total < need) {
                    st->part_need[i][r] = 0;
                } else {
                    sel_set_digit(&st->part_cut[i][r], digit, st->sel.bin);
                    st->part_need[i][r] = need - st->sel.above;
                    st->more |= st->sel.in_bin - (need - st->sel.above) > FEW;
                }
            }
            ix_team_sync();
        }
    }
}

/* The blocks agree on a cut of every shared row; all threads of the grid. */
template <int R>
static __device__ void exchange_cuts(const sel_kernel_args &a, sel_state *st, uint2 *cand,
                                     cg::grid_group &grid)
{
    const bool team = threadIdx.x < SEL_TEAM;
    const ix_group g0 = ix_group_at(a.s.in, 0, R, false);
    const bool one = g0.n_tile == st->share.n_all && st->share.n_all >= gridDim.x;
    if (threadIdx.x < 8) {
        st->part_cut[threadIdx.x / 4][threadIdx.x % 4] = {0, 0};
        st->part_need[threadIdx.x / 4][threadIdx.x % 4] = (uint32_t)a.s.k;
    }
    for (int32_t digit = 0; digit < N_DIGIT; digit++) {
        if (threadIdx.x == 0) {
            st->more = 0;
        }
        __syncthreads();
        if (team) {
            add_hist<R>(a, st, cand, digit);
        }
        grid.sync();
        if (team) {
            take_digit<R>(a, st, digit);
        }
        __syncthreads();
        /* alike in all blocks: with one group they all know its sums */
        if (one ? st->more == 0 : digit == 1) {
            break;
        }
        __syncthreads();
    }
}

/* Brings this block's lists into scratch and tells the others; notes where this block came last. */
template <int R>
static __device__ void publish(const sel_kernel_args &a, sel_state *st, uint2 *cand)
{
    for (int32_t i = 0; i < st->n_part; i++) {
        const part p = st->parts[i];
        for (int32_t r = 0; r < p.g.n; r++) {
            int32_t n;
            uint2 *buf = list_of<R>(a, st, cand, i, r, &n);
            if (a.exchange) {
                ix_team_sync();
                const int64_t at = (int64_t)p.slot * R + r;
                const sel_cut c = st->part_cut[i][r];
                n = sel_keep(&st->sel, buf, n, c, a.m.list + at * cap<R>());
                if (threadIdx.x == 0) {
                    a.m.count[at] = n;
                    a.m.cut[at] = c;
                }
            } else if (p.in_shared) {
                dump_list<R>(a, st, p.slot, r, buf, n, true);
            }
        }
    }
    __threadfence();
    ix_team_sync();
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < st->n_part; i++) {
            const part *p = &st->parts[i];
            st->last[i] =
                atomicAdd(&a.m.ticket[p->block0], 1u) == (uint32_t)(p->block1 - p->block0);
        }
        __threadfence();
    }
    ix_team_sync();
}

/* All lists of a row to its k best. buf: MERGE_CAP candidates; bits: twice emit_words. */
template <int R>
static __device__ __noinline__ void merge_row(const sel_kernel_args &a, sel_state *st,
                                              const part &p, int32_t r, uint2 *buf, uint32_t *bits)
{
    const int32_t tid = threadIdx.x;
    const int32_t n_list = p.block1 - p.block0 + 1;
    const int64_t block = p.block0 + tid;
    const int64_t at =
        (2 * block + (tid == 0)) * R + r; /* only the first has the row's first tile */
    if (tid == 0) {
        st->best_cut = 0;
        st->count[r] = 0;
    }
    uint32_t total;
    const uint32_t n_mine = tid < n_list ? (uint32_t)__ldcg(&a.m.count[at]) : 0;
    const uint32_t before = sel_scan(&st->sel, n_mine, &total);
    if (tid < n_list) {
        const uint2 c = __ldcg((const uint2 *)&a.m.cut[at]);
        atomicMax(&st->best_cut, (unsigned long long)c.x << 32 | c.y);
        st->before[tid] = before;
    }
    ix_team_sync();
    sel_cut c = {(uint32_t)(st->best_cut >> 32), (uint32_t)st->best_cut};
    for (uint32_t done = 0; done < total; done += MERGE_STEP) {
        uint2 e[8];
        bool in[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t j = done + (uint32_t)(i * SEL_TEAM + tid);
            in[i] = j < total;
            e[i] = make_uint2(0, 0);
            if (in[i]) {
                int32_t lo = 0;
                int32_t hi = n_list;
                while (hi - lo > 1) {
                    const int32_t mid = (lo + hi) / 2;
                    if (st->before[mid] <= j) {
                        lo = mid;
                    } else {
                        hi = mid;
                    }
                }
                const int64_t from = (2 * (int64_t)(p.block0 + lo) + (lo == 0)) * R + r;
                e[i] = __ldcg(a.m.list + from * cap<R>() + (j - st->before[lo]));
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool want = in[i] && sel_in(c, e[i].x, (int32_t)e[i].y);
            const uint32_t to = sel_append(&st->count[r], want);
            if (want) {
                buf[to] = e[i];
            }
        }
        ix_team_sync();
        const int32_t n = (int32_t)st->count[r];
        ix_team_sync();
        if (n > MERGE_CAP - MERGE_STEP) {
            c = sel_find(&st->sel, buf, n, a.s.k, SLACK);
            const int32_t left = sel_keep(&st->sel, buf, n, c, buf);
            if (tid == 0) {
                st->count[r] = (uint32_t)left;
            }
            ix_team_sync();
        }
    }
    finish_row(a.s, &st->sel, buf, (int32_t)st->count[r], p.g.row + r, bits, emit_words<R>());
}

/* This block's words of scratch that others will add to. */
template <int R>
static __device__ void clear_scratch(const sel_kernel_args &a, const ix_share &share)
{
    if (threadIdx.x == 0) {
        a.m.ticket[blockIdx.x] = 0;
    }
    if (!a.exchange || share.begin >= share.end) {
        return;
    }
    const bool starts = share.begin == share.base ||
                        share.base + ix_group_at(a.s.in, share.row, R, false).n_tile < share.end;
    if (starts) {
        uint4 *h = (uint4 *)(a.m.hist + (int64_t)blockIdx.x * R * N_DIGIT * SEL_BIN);
        for (int32_t i = threadIdx.x; i < R * N_DIGIT * SEL_BIN / 4; i += IX_THREADS) {
            h[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

template <int NH, int R>
__global__ void __launch_bounds__(IX_THREADS, 1)
    select_kernel(const __grid_constant__ sel_kernel_args a)
{
    extern __shared__ uint8_t raw[];
    uint8_t *q = raw + (1024 - (ptx_shared(raw) & 1023)) % 1024;
    uint8_t *stage = q + R * NH * 128;
    uint2 *cand = (uint2 *)(stage + stages<R>() * IX_STAGE);
    sel_state *st = (sel_state *)(cand + R * cap<R>());
    float *w = (float *)(st + 1);
    cg::grid_group grid = cg::this_grid();
    ix_ring_init(&st->ring);
    if (threadIdx.x == 0) {
        st->n_part = 0;
    }
    ix_find(a.s.in, R, false, &st->share, st->warp);
    clear_scratch<R>(a, st->share);
    cg::grid_group::arrival_token token = grid.barrier_arrive();
    if (threadIdx.x >= IX_TEAM) {
        ix_produce(a.s.in, R, false, st->share, &st->ring, stage, stages<R>());
    } else {
        consume<NH, R>(a, st, q, w, stage, cand);
    }
    grid.barrier_wait(std::move(token));
    if (a.exchange) {
        exchange_cuts<R>(a, st, cand, grid);
    }
    if (threadIdx.x >= IX_TEAM || st->n_part == 0) {
        return;
    }
    publish<R>(a, st, cand);
    for (int32_t i = 0; i < st->n_part; i++) {
        for (int32_t r = 0; st->last[i] && r < st->parts[i].g.n; r++) {
            merge_row<R>(a, st, st->parts[i], r, (uint2 *)q,
                         (uint32_t *)(q + MERGE_CAP * sizeof(uint2)));
        }
    }
}

template <int NH, int R> constexpr size_t select_smem()
{
    static_assert((size_t)R * NH * 128 + (size_t)stages<R>() * IX_STAGE +
                          (size_t)R * cap<R>() * 8 >=
                      (size_t)MERGE_CAP * 8 + (size_t)emit_words<R>() * 8,
                  "a merge fits where pages and lists were");
    static_assert(MAX_FUSED_K + SLACK + STEP_KEY <= cap<R>(), "a cut list has room for a step");
    return 1024 + (size_t)R * NH * 128 + (size_t)stages<R>() * IX_STAGE +
           (size_t)R * cap<R>() * sizeof(uint2) + sizeof(sel_state) +
           sizeof(float) * R * 4 * ix_w_stride<NH>();
}

size_t align_up(size_t n)
{
    return (n + 255) / 256 * 256;
}

int32_t n_block(const dev_queue *q)
{
    return q->n_sm < 1 ? 1 : q->n_sm < MAX_BLOCK ? q->n_sm : MAX_BLOCK;
}

/* Rows of a group: as many as requests have on average, so that they share the keys. */
int32_t group_rows(const index_select_args *a)
{
    const int32_t per = a->in.n_row / (a->in.n_req > 0 ? a->in.n_req : 1);
    return per >= 4 ? 4 : per >= 2 ? 2 : 1;
}

/* Lays scratch out; returns its size. base may be NULL. */
size_t lay_out(const index_select_args *a, const dev_queue *q, uint8_t *base, sel_mem *m)
{
    const size_t r = (size_t)group_rows(a);
    const size_t b = (size_t)n_block(q);
    const size_t c = r == 4 ? cap<4>() : cap<1>();
    size_t at = 0;
    m->ticket = (uint32_t *)(base + at);
    at += align_up(b * sizeof *m->ticket);
    m->hist = (uint32_t *)(base + at);
    at += align_up(b * r * N_DIGIT * SEL_BIN * sizeof *m->hist);
    m->count = (int32_t *)(base + at);
    at += align_up(2 * b * r * sizeof *m->count);
    m->cut = (sel_cut *)(base + at);
    at += align_up(2 * b * r * sizeof *m->cut);
    m->list = (uint2 *)(base + at);
    at += align_up(2 * b * r * c * sizeof *m->list);
    return at;
}

template <int NH, int R> void launch(const sel_kernel_args &a, dev_queue *q)
{
    static_assert(select_smem<NH, R>() <= 232448, "shared memory of a block");
    const size_t smem = select_smem<NH, R>();
    static uint64_t done;
    cuda_shared_max(select_kernel<NH, R>, smem, &done);
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeCooperative;
    attr.val.cooperative = 1;
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = dim3((unsigned)n_block(q));
    cfg.blockDim = dim3(IX_THREADS);
    cfg.dynamicSmemBytes = smem;
    cfg.stream = cuda_stream(q);
    cfg.attrs = &attr;
    cfg.numAttrs = 1;
    (void)cudaLaunchKernelEx(&cfg, select_kernel<NH, R>, a);
}

template <int R> void launch_heads(const sel_kernel_args &a, dev_queue *q)
{
    const int32_t n = a.s.in.n_head;
    if (n <= 8) {
        launch<8, R>(a, q);
    } else if (n <= 16) {
        launch<16, R>(a, q);
    } else if (n <= 32) {
        launch<32, R>(a, q);
    } else {
        launch<64, R>(a, q);
    }
}

bool is_fused(const index_select_args *a)
{
    return a->in.fmt != KVS_INDEX_F32 && a->k <= MAX_FUSED_K;
}

} // namespace

const char *index_select_refuses_sm90(const void *args)
{
    return index_score_refuses_sm90(&((const index_select_args *)args)->in);
}

size_t index_select_scratch_sm90(const index_select_args *a, const dev_queue *q)
{
    sel_mem m;
    return is_fused(a) ? lay_out(a, q, NULL, &m) : select_steps_scratch(a, q);
}

void index_select_sm90(const index_select_args *a, dev_queue *q)
{
    if (cuda_refused(q, index_select_refuses_sm90(a)) || a->in.n_row <= 0) {
        return;
    }
    if (!is_fused(a)) {
        select_steps(a, q);
        return;
    }
    sel_kernel_args k;
    k.s = *a;
    (void)lay_out(a, q, (uint8_t *)a->scratch, &k.m);
    const int32_t r = group_rows(a);
    k.exchange = (int64_t)(a->in.n_row + r - 1) / r * 4 <= n_block(q);
    if (r == 1) {
        launch_heads<1>(k, q);
    } else if (r == 2) {
        launch_heads<2>(k, q);
    } else {
        launch_heads<4>(k, q);
    }
    cuda_launched(q, "index_select_sm90");
}
