/* kern/cuda/index_select_sm90.cu - scores and the exact k best in one launch, with no array of scores.
 *
 * The scorer is index_sm90.cuh's. A score that may still matter is appended to its row's list of candidates
 * in shared memory (index_select.cuh); when a list is nearly full it is cut to its k best (select.cuh), and what is
 * worse than the cut is no candidate from then on. A row whose tiles all fall to one block is finished there. The
 * lists of a row that several blocks share go to scratch, and the first of them merges them when all have come: at
 * most two rows' groups of a block are shared, and it is the first of one, so scratch depends on the number of blocks
 * alone and no block merges twice. It may wait for others, which are of the same cooperative launch.
 *
 * With few rows, and many blocks to each, the blocks agree on the cut first and each writes its own members
 * (index_exchange.cuh).
 *
 * Nothing in a result depends on the order of atomics: they place members of sets whose order is made
 * afterwards, and any cut met on the way is a lower bound of the final one.
 */
#include <cooperative_groups.h>
#include "kern/cuda/cuda.h"
#include "kern/cuda/index_exchange.cuh"
#include "kern/cuda/index_select.cuh"
#include "kern/cuda/index_select.h"

namespace cg = cooperative_groups;

namespace
{

enum {
    MERGE_CAP = 16384, /* candidates of a merge in shared memory */
    MERGE_STEP = 4 * SEL_TEAM
};

/* Brings this block's open lists into scratch and tells the block that will merge them, the first of the part. */
template <int R>
static __device__ __noinline__ void publish(const sel_kernel_args &a, sel_state *st, uint2 *cand)
{
    for (int32_t i = 0; i < st->n_part; i++) {
        const part p = st->parts[i];
        for (int32_t r = 0; r < p.g.n; r++) {
            if (p.in_shared && (st->part_open[i] >> r & 1) != 0) {
                const sel_cut none = {0, 0};
                dump_list<R>(a, st, p.slot, r, cand + (int64_t)r * cap<R>(), (int32_t)st->count[r],
                             a.exchange ? st->part_cut[i][r] : none);
            }
        }
    }
    sel_sync();
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < st->n_part; i++) {
            if (st->part_open[i] != 0) {
                count_up(&a.m.ticket[st->parts[i].block0]);
            }
        }
    }
}

/* All lists of a row to its k best. buf: MERGE_CAP candidates; bits: SEL_BIT_WORD words. */
template <int R>
static __device__ __noinline__ void merge_row(const sel_kernel_args &a, sel_state *st,
                                              const part &p, int32_t r, uint2 *buf, uint32_t *bits)
{
    const int32_t tid = threadIdx.x;
    const uint32_t lane = threadIdx.x & 31;
    const int32_t n_list = p.block1 - p.block0 + 1;
    if (tid == 0) {
        st->best_cut = 0;
        st->count[r] = 0;
    }
    uint32_t total;
    const uint32_t n_mine = tid < n_list ? (uint32_t)__ldcg(&a.m.count[list_at<R>(p, r, tid)]) : 0;
    const uint32_t before = sel_scan(&st->sel, n_mine, &total);
    if (tid < n_list) {
        const uint2 c = __ldcg((const uint2 *)&a.m.cut[list_at<R>(p, r, tid)]);
        atomicMax(&st->best_cut, (unsigned long long)c.x << 32 | c.y);
        st->before[tid] = before;
    }
    sel_sync();
    sel_cut c = {(uint32_t)(st->best_cut >> 32), (uint32_t)st->best_cut};
#pragma unroll 1
    for (uint32_t done = 0; done < total; done += MERGE_STEP) {
        uint2 e[4];
        uint32_t in[4]; /* lanes */
        uint32_t mine = 0, all = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t j = min(done + (uint32_t)(i * SEL_TEAM + tid), total - 1);
            const int32_t from = last_not_above(st->before, n_list, j);
            e[i] = __ldcg(a.m.list + list_at<R>(p, r, from) * cap<R>() + (j - st->before[from]));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool want =
                done + (uint32_t)(i * SEL_TEAM + tid) < total && sel_in(c, e[i].x, (int32_t)e[i].y);
            in[i] = __ballot_sync(~0u, want);
            mine |= (uint32_t)want << i;
            all += (uint32_t)__popc(in[i]);
        }
        uint32_t to = 0;
        if (lane == 0 && all != 0) {
            to = atomicAdd(&st->count[r], all);
        }
        to = __shfl_sync(~0u, to, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((mine >> i & 1) != 0) {
                buf[to + (uint32_t)__popc(in[i] & ((1u << lane) - 1))] = e[i];
            }
            to += (uint32_t)__popc(in[i]);
        }
        sel_sync();
        const int32_t n = (int32_t)st->count[r];
        sel_sync();
        if (n > MERGE_CAP - MERGE_STEP) {
            c = sel_find_above(&st->sel, buf, n, a.s.k, SLACK, c.key);
            const int32_t left = sel_keep(&st->sel, buf, n, c, buf);
            if (tid == 0) {
                st->count[r] = (uint32_t)left;
            }
            sel_sync();
        }
    }
    finish_row(a.s, &st->sel, buf, (int32_t)st->count[r], c.key, p.g.row + r, bits);
}

/* This block's part of what blocks will add to, or wait for; the team calls it. */
template <int R> static __device__ __forceinline__ void clear_scratch(const sel_kernel_args &a)
{
    if (threadIdx.x == 0) {
        a.m.ticket[blockIdx.x] = 0;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        *a.m.met = 0;
    }
    if (a.exchange) {
        if (threadIdx.x < 2 * R) {
            a.m.told[blockIdx.x * 2 * R + threadIdx.x] = 0;
        }
        uint4 *h = (uint4 *)a.m.hist;
        const int32_t n = a.s.in.n_row * (ROW_HIST / 4);
#pragma unroll 1
        for (int32_t i = (int32_t)(threadIdx.x * gridDim.x + blockIdx.x); i < n;
             i += ix_team<R>() * (int32_t)gridDim.x) {
            h[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

/* The team calls it. */
template <int R>
static __device__ __forceinline__ void state_init(const sel_kernel_args &a, const ix_share &share,
                                                  sel_state *st)
{
    static_assert(sizeof a % 4 == 0 && sizeof a / 4 <= ix_team<R>(), "a thread copies a word");
    if (threadIdx.x < sizeof a / 4) {
        ((uint32_t *)&st->args)[threadIdx.x] = ((const uint32_t *)&a)[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        st->share = share;
    }
    if (threadIdx.x < 2) {
        mbar_init(ptx_shared(&st->step[threadIdx.x]), ix_team<R>() / 32);
    }
    if (threadIdx.x < 4) {
        st->full[threadIdx.x] = -1;
    }
    ix_team_sync<R>();
}

struct select_hook {
    const cg::grid_group *grid;
    cg::grid_group::arrival_token *token;
    sel_state *st;
    int64_t n_all;
    /* This block's part of scratch is clear, too. */
    __device__ void ring_full() const
    {
        *token = grid->barrier_arrive();
    }
    __device__ void piece(const ix_group &g, int64_t base, int32_t t0, int32_t t1, bool last) const
    {
        if (threadIdx.x % 32 == 0 && (t0 > 0 || t1 < g.n_tile)) {
            note_part(st, g, n_all, base, t0, t1, last);
        }
    }
};

template <int NH, int R>
__global__ void __launch_bounds__(ix_threads<R>(), 1)
    select_kernel(const __grid_constant__ sel_kernel_args param)
{
    extern __shared__ uint8_t raw[];
    uint8_t *q = raw + (1024 - (ptx_shared(raw) & 1023)) % 1024;
    uint8_t *stage = q + R * NH * 128;
    uint2 *cand = (uint2 *)(stage + stages<R>() * IX_STAGE);
    sel_state *st = (sel_state *)(cand + R * cap<R>());
    uint32_t *w = (uint32_t *)(st + 1);
    const sel_kernel_args &a = st->args;
    const cg::grid_group grid = cg::this_grid();
    cg::grid_group::arrival_token token;
    const bool team = threadIdx.x < ix_team<R>();
    const bool few = param.s.in.n_row <= IX_FEW;
    ix_share share;
    if (few) { /* nobody waits for anybody before pages and queries are on their way */
        share = ix_find_few<R>(param.s.in, false);
    } else {
        ix_find<R>(param.s.in, false, &st->share, st->warp);
        share = st->share;
    }
    const select_hook hook = {&grid, &token, st, share.n_all};
    if (team) {
        clear_scratch<R>(param);
        state_init<R>(param, share, st);
        consume<NH, R>(a, st, q, w, stage, cand, hook);
    } else {
        ix_ring_init(&st->ring);
        if (threadIdx.x % 32 == 0) {
            st->n_part = 0;
        }
        ix_produce<R>(param.s.in, false, share, &st->ring, stage, stages<R>(), hook);
    }
    grid.barrier_wait(std::move(token));
    if (threadIdx.x >= SEL_TEAM) {
        return;
    }
    if (a.exchange) {
        agree<R>(a, st, cand, (uint2 *)q);
    }
    const int32_t open =
        (st->n_part > 0 ? st->part_open[0] : 0) | (st->n_part > 1 ? st->part_open[1] : 0);
    if (open == 0) {
        return;
    }
    publish<R>(a, st, cand);
    for (int32_t i = 0; i < st->n_part; i++) {
        const part p = st->parts[i];
        if (st->part_open[i] == 0 || p.block0 != (int32_t)blockIdx.x) {
            continue;
        }
        if (threadIdx.x == 0) {
            wait_count(&a.m.ticket[p.block0], (uint32_t)(p.block1 - p.block0 + 1));
        }
        sel_sync();
        for (int32_t r = 0; r < p.g.n; r++) {
            if ((st->part_open[i] >> r & 1) != 0) {
                merge_row<R>(a, st, p, r, (uint2 *)q, (uint32_t *)(q + MERGE_CAP * sizeof(uint2)));
            }
        }
    }
}

template <int NH, int R> constexpr size_t select_smem()
{
    static_assert((size_t)R * NH * 128 + (size_t)stages<R>() * IX_STAGE +
                          (size_t)R * cap<R>() * 8 >=
                      (size_t)MERGE_CAP * 8 + (size_t)SEL_BIT_WORD * 4,
                  "a merge fits where pages and lists were");
    static_assert((size_t)R * NH * 128 + (size_t)stages<R>() * IX_STAGE >=
                      (size_t)MAX_TIE * 8 + (size_t)SEL_BIT_WORD * 4,
                  "what blocks agree by fits where pages were");
    static_assert(MAX_FUSED_K + SLACK + 256 <= limit<R>() && room<R>() <= cap<R>() &&
                      (has_rest<R>() ? R == 4 : limit<R>() + room<R>() <= cap<R>()),
                  "a cut list has room, and what comes until the next cut");
    static_assert(MAX_FUSED_K * 8 + SEL_BIT_WORD * 4 <= cap<R>() * 8,
                  "a list of k has room for bits");
    return 1024 + (size_t)R * NH * 128 + (size_t)stages<R>() * IX_STAGE +
           (size_t)R * cap<R>() * sizeof(uint2) + sizeof(sel_state) +
           sizeof(uint32_t) * R * ix_w_word<NH>();
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

/* Few rows, and a fourth as many groups as blocks or fewer: the blocks of a row agree. */
bool agrees(const index_select_args *a, const dev_queue *q)
{
    const int64_t r = group_rows(a);
    return (a->in.n_row + r - 1) / r * 4 <= n_block(q);
}

/* Lays scratch out; returns its size. base may be NULL. */
size_t lay_out(const index_select_args *a, const dev_queue *q, uint8_t *base, sel_mem *m)
{
    /* as many rows of a group as so many rows allow, however many requests they are of: never less for more rows, so
     * that the largest shape's scratch does for all */
    const size_t r = a->in.n_row >= 4 ? 4 : a->in.n_row >= 2 ? 2 : 1;
    const size_t b = (size_t)n_block(q);
    const size_t c = r == 4 ? cap<4>() : cap<1>();
    size_t at = 0;
    m->ticket = (uint32_t *)(base + at);
    at += align_up(b * sizeof *m->ticket);
    m->met = (uint32_t *)(base + at);
    at += align_up(sizeof *m->met);
    m->hist = (uint32_t *)(base + at);
    const size_t most = b / 4 * r;
    const size_t n_hist = (size_t)a->in.n_row < most ? (size_t)a->in.n_row : most;
    at += align_up(n_hist * ROW_HIST * sizeof *m->hist);
    m->count = (int32_t *)(base + at);
    at += align_up(2 * b * r * sizeof *m->count);
    m->cut = (sel_cut *)(base + at);
    at += align_up(2 * b * r * sizeof *m->cut);
    m->list = (uint2 *)(base + at);
    at += align_up(2 * b * r * c * sizeof *m->list);
    m->tie = (uint2 *)(base + at);
    at += align_up(2 * b * r * MAX_OWN_TIE * sizeof *m->tie);
    m->told = (unsigned long long *)(base + at);
    at += align_up(2 * b * r * sizeof *m->told);
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
    cfg.blockDim = dim3(ix_threads<R>());
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
    k.exchange = agrees(a, q);
    if (r == 1) {
        launch_heads<1>(k, q);
    } else if (r == 2) {
        launch_heads<2>(k, q);
    } else {
        launch_heads<4>(k, q);
    }
    cuda_launched(q, "index_select_sm90");
}
