/* kern/cuda/index_select_sm90.cu - scores and the exact k best in one launch, with no array of scores.
 *
 * The scorer is index_sm90.cuh's. A score that may still matter is appended to its row's list of candidates
 * in shared memory (index_select.cuh); when a list is nearly full it is cut to its k best (select.cuh), and what is
 * worse than the cut is no candidate from then on. A row whose tiles all fall to one block is finished there. The
 * lists of a row that several blocks share go to scratch, and the block that comes last merges them: at
 * most two rows' groups of a block are shared, so scratch depends on the number of blocks alone.
 *
 * With few rows, and many blocks to each, the blocks agree on the cut first and each writes its own members
 * (index_exchange.cuh; a cooperative launch).
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

/* Brings this block's open lists into scratch and tells the others; notes where this block came last. */
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
        fence_device();
        for (int32_t i = 0; i < st->n_part; i++) {
            const part *p = &st->parts[i];
            st->last[i] = st->part_open[i] != 0 && atomicAdd(&a.m.ticket[p->block0], 1u) ==
                                                       (uint32_t)(p->block1 - p->block0);
        }
        fence_device();
    }
    sel_sync();
}

/* All lists of a row to its k best. buf: MERGE_CAP candidates; bits: SEL_BIT_WORD words. */
template <int R>
static __device__ __noinline__ void merge_row(const sel_kernel_args &a, sel_state *st,
                                              const part &p, int32_t r, uint2 *buf, uint32_t *bits)
{
    const int32_t tid = threadIdx.x;
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
        bool in[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t j = done + (uint32_t)(i * SEL_TEAM + tid);
            in[i] = j < total;
            e[i] = make_uint2(0, 0);
            if (in[i]) {
                const int32_t from = last_not_above(st->before, n_list, j);
                e[i] =
                    __ldcg(a.m.list + list_at<R>(p, r, from) * cap<R>() + (j - st->before[from]));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool want = in[i] && sel_in(c, e[i].x, (int32_t)e[i].y);
            const uint32_t to = sel_append(&st->count[r], want);
            if (want) {
                buf[to] = e[i];
            }
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

/* This block's part of what blocks will add to. */
static __device__ void clear_scratch(const sel_kernel_args &a)
{
    if (threadIdx.x == 0) {
        a.m.ticket[blockIdx.x] = 0;
    }
    if (a.exchange) {
        uint4 *h = (uint4 *)a.m.hist;
        const int64_t n = (int64_t)a.s.in.n_row * (N_COARSE + N_FINE) / 4;
        for (int64_t i = (int64_t)blockIdx.x * IX_THREADS + threadIdx.x; i < n;
             i += (int64_t)gridDim.x * IX_THREADS) {
            h[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

static __device__ __forceinline__ void state_init(const sel_kernel_args &a, sel_state *st)
{
    static_assert(sizeof a % 4 == 0 && sizeof a / 4 <= IX_THREADS, "a thread copies a word");
    if (threadIdx.x < sizeof a / 4) {
        ((uint32_t *)&st->args)[threadIdx.x] = ((const uint32_t *)&a)[threadIdx.x];
    }
    ix_ring_init(&st->ring);
    if (threadIdx.x == 0) {
        st->n_part = 0;
        mbar_init(ptx_shared(&st->step[0]), IX_TEAM / 32);
        mbar_init(ptx_shared(&st->step[1]), IX_TEAM / 32);
        for (int i = 0; i < 4; i++) {
            st->full[i] = -1;
        }
    }
}

template <int NH, int R>
__global__ void __launch_bounds__(IX_THREADS, 1)
    select_kernel(const __grid_constant__ sel_kernel_args param)
{
    extern __shared__ uint8_t raw[];
    uint8_t *q = raw + (1024 - (ptx_shared(raw) & 1023)) % 1024;
    uint8_t *stage = q + R * NH * 128;
    uint2 *cand = (uint2 *)(stage + stages<R>() * IX_STAGE);
    sel_state *st = (sel_state *)(cand + R * cap<R>());
    uint32_t *w = (uint32_t *)(st + 1);
    const bool team = threadIdx.x < SEL_TEAM;
    cg::grid_group grid = cg::this_grid();
    state_init(param, st);
    __syncthreads();
    const sel_kernel_args &a = st->args;
    ix_find(a.s.in, R, false, &st->share, st->warp);
    clear_scratch(a);
    cg::grid_group::arrival_token token = grid.barrier_arrive();
    if (threadIdx.x < IX_TEAM) {
        consume<NH, R>(a, st, q, w, stage, cand);
    } else {
        ix_produce(a.s.in, R, false, st->share, &st->ring, stage, stages<R>());
    }
    grid.barrier_wait(std::move(token));
    if (a.exchange) {
        if (team) {
            add_counts<R>(a, st, cand);
        }
        grid.sync();
        if (team) {
            tell_all<R>(a, st, cand);
        }
        grid.sync();
        if (team) {
            settle_all<R>(a, st, cand, (uint32_t *)q);
        }
    }
    const int32_t open =
        (st->n_part > 0 ? st->part_open[0] : 0) | (st->n_part > 1 ? st->part_open[1] : 0);
    if (!team || open == 0) {
        return;
    }
    publish<R>(a, st, cand);
    for (int32_t i = 0; i < st->n_part; i++) {
        for (int32_t r = 0; st->last[i] && r < st->parts[i].g.n; r++) {
            if ((st->part_open[i] >> r & 1) != 0) {
                merge_row<R>(a, st, st->parts[i], r, (uint2 *)q,
                             (uint32_t *)(q + MERGE_CAP * sizeof(uint2)));
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
    static_assert(MAX_FUSED_K + SLACK + 256 + room<R>() < cap<R>(), "a cut list has room");
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
    /* as many rows of a group as so many rows allow, however many requests they are of: never less for more rows, so that
     * the largest shape's scratch does for all */
    const size_t r = a->in.n_row >= 4 ? 4 : a->in.n_row >= 2 ? 2 : 1;
    const size_t b = (size_t)n_block(q);
    const size_t c = r == 4 ? cap<4>() : cap<1>();
    size_t at = 0;
    m->ticket = (uint32_t *)(base + at);
    at += align_up(b * sizeof *m->ticket);
    m->hist = (uint32_t *)(base + at);
    const size_t most = b / 4 * r;
    const size_t n_hist = (size_t)a->in.n_row < most ? (size_t)a->in.n_row : most;
    at += align_up(n_hist * (N_COARSE + N_FINE) * sizeof *m->hist);
    m->count = (int32_t *)(base + at);
    at += align_up(2 * b * r * sizeof *m->count);
    m->cut = (sel_cut *)(base + at);
    at += align_up(2 * b * r * sizeof *m->cut);
    m->list = (uint2 *)(base + at);
    at += align_up(2 * b * r * c * sizeof *m->list);
    m->tie = (uint2 *)(base + at);
    at += align_up(2 * b * r * (1 + MAX_OWN_TIE) * sizeof *m->tie);
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
