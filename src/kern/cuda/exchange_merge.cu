/* exchange_merge.cu - partials sent to the ranks of their heads and merged as they come.
 *
 * A head is a warp's work: its 512 values, four cells a lane, and its LSE in a cell of its own behind the values of
 * all, which so stay on whole lines of the link. Where there are few heads a head is four warps' work, each with a
 * quarter of the values and the LSE. The receiver merges what comes as it comes, its own partial from where it is, which
 * it loads while the others are on their way. Compiled without contraction, for the bits of the merge.
 * Where attention has sent the partials (attn_send.cuh) there are no blocks that send. */
#include "kern/cuda/exchange.cuh"
#include "kern/cuda/merge.cuh"

enum {
    DIM = KVS_LATENT_DIM,
    STEPS = DIM / 4 / 32, /* cells of a head, per lane */
    FEW = 4               /* works of a head where there are few */
};

/* A work is STEPS / SPLIT cells of each lane, and an LSE. */
template <int SPLIT>
struct work_cells {
    enum { N_STEP = STEPS / SPLIT, ALL = 32 * N_STEP };
};

template <int R>
struct exchange_merge_launch {
    exchange_shape shape;
    uint32_t units; /* (row, head) of one rank: what goes to a peer */
    exchange_merge_args rank[R];
};

/* Values and LSE of unit u of rank `of` in this rank's partial. */
static __device__ __forceinline__ const float *unit_values(const exchange_merge_args &a, uint32_t u, int of)
{
    const uint32_t local = (uint32_t)(a.n_head / a.w.n_rank);
    return a.part + u / local * a.part_row + (of * local + u % local) * DIM;
}

static __device__ __forceinline__ float unit_lse(const exchange_merge_args &a, uint32_t u, int of)
{
    const uint32_t local = (uint32_t)(a.n_head / a.w.n_rank);
    return a.part_lse[u / local * a.lse_row + of * local + u % local];
}

/* Element of the own result. */
static __device__ __forceinline__ int64_t unit_out(const exchange_merge_args &a, uint32_t u)
{
    const uint32_t local = (uint32_t)(a.n_head / a.w.n_rank);
    return u / local * a.out_row + (int64_t)(u % local) * DIM;
}

static __device__ __forceinline__ void unit_done(const exchange_merge_args &a, uint32_t u,
                                                 const merge_plan &p)
{
    if (threadIdx.x % 32 == 0) {
        if (a.lse != NULL) {
            a.lse[u] = p.lse;
        }
        if (a.n_nan != NULL && p.n_nan > 0) {
            atomicAdd((unsigned long long *)a.n_nan, (unsigned long long)p.n_nan);
        }
    }
}

static __device__ __forceinline__ uint4 bits_of(float4 v)
{
    return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

static __device__ __forceinline__ float4 floats_of(uint4 v)
{
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

/* What a lane has of B steps of a head, from d0 on. */
template <int B>
static __device__ __forceinline__ void load_steps(const exchange_merge_args &a, uint32_t u, int of, int d0,
                                                  float4 (&v)[B])
{
    const float4 *values = (const float4 *)unit_values(a, u, of);
#pragma unroll
    for (int b = 0; b < B; b++) {
        v[b] = values[threadIdx.x % 32 + 32 * (d0 + b)];
    }
}

template <int SPLIT>
static __device__ __forceinline__ void send_units(const exchange_merge_args &a, const crew &t, uint32_t units,
                                                  uint4 control)
{
    typedef work_cells<SPLIT> cell;
    const uint32_t lane = threadIdx.x % 32;
    wire_run r;
    bool begun = false;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        for (uint32_t i = t.at; i < units * SPLIT; i += t.n) {
            float4 v[cell::N_STEP];
            load_steps<cell::N_STEP>(a, i / SPLIT, to, (int)(i % SPLIT) * cell::N_STEP, v);
            const float lse = unit_lse(a, i / SPLIT, to);
            if (!begun && !wire_begin(a.w, control, &r)) { /* behind the first loads */
                return;
            }
            begun = true;
            uint8_t *cells = wire_cells(a.w, r.epoch, to, a.w.rank);
#pragma unroll
            for (int d = 0; d < cell::N_STEP; d++) {
                wire_put(a.w, r.epoch, to, cells, i * cell::ALL + lane + 32 * d, bits_of(v[d]));
            }
            if (lane == 0) {
                wire_put(a.w, r.epoch, to, cells, units * SPLIT * cell::ALL + i,
                         make_uint4(__float_as_uint(lse), 0, 0, 0));
            }
        }
    }
}

/* Of every peer, B of the lane's cells, 32 apart from `first` on, and in front of them, with LSE, that of the LSE;
 * what is the own rank's is left alone. Cells are empty again after. */
template <int N, int B, bool LSE>
static __device__ __forceinline__ void take_cells(const wire &w, wire_run *r, uint32_t first, uint32_t lse,
                                                  uint4 (&v)[N][B + LSE])
{
    const size_t step = wire_slot_bytes(w.n_cell);
    uint8_t *slot = wire_cells(w, r->epoch, w.rank, 0);
    for (uint32_t k = 1;; k++) {
        int missing = -1;
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (q != w.rank) {
                if (LSE) {
                    v[q][0] = wire_load16(slot + q * step + (size_t)lse * WIRE_CELL);
                }
#pragma unroll
                for (int b = 0; b < B; b++) {
                    v[q][b + LSE] = wire_load16(slot + q * step + (size_t)(first + 32 * b) * WIRE_CELL);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < N; q++) {
#pragma unroll
            for (int b = 0; b < B + LSE; b++) {
                missing = q != w.rank && wire_is_empty(v[q][b]) ? q : missing;
            }
        }
        if (missing < 0 || r->dead) {
            break;
        }
        if (k % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, missing);
        }
    }
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (q != w.rank) {
#pragma unroll
            for (int b = 0; b < B; b++) {
                v[q][b + LSE] = wire_content(w, r, q, first + 32 * b, v[q][b + LSE]);
                wire_clear(slot + q * step, first + 32 * b);
            }
        }
    }
    if (LSE) { /* an LSE's cell ends with zeros, so it is what it says; all lanes have it before it goes */
        __syncwarp();
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (q != w.rank && threadIdx.x % 32 == 0) {
                wire_clear(slot + q * step, lse);
            }
        }
    }
}

/* Four values of a head to its result. */
static __device__ __forceinline__ void put_four(const exchange_merge_args &a, int64_t at, float4 v)
{
    if (a.out_type == KVS_DTYPE_BF16) {
        *(uint2 *)((uint16_t *)a.out + at) = merge_to_bf16(v);
    } else {
        *(float4 *)((float *)a.out + at) = v;
    }
}

/* B steps from d0 on of head u of all ranks, merged. of[q]: in front, with LSE, the LSE. */
template <int N, bool TREE, int B, bool LSE>
static __device__ __forceinline__ void merge_cells(const exchange_merge_args &a, const merge_plan &plan,
                                                   const float (&lse)[N], const float4 (&own)[B], uint32_t u,
                                                   int d0, const uint4 (&of)[N][B + LSE])
{
#pragma unroll
    for (int b = 0; b < B; b++) {
        float4 v[N];
#pragma unroll
        for (int q = 0; q < N; q++) {
            const float4 x = q == a.w.rank ? own[b] : floats_of(of[q][b + LSE]);
            v[q] = merge_is_live(lse[q]) ? x : make_float4(0, 0, 0, 0);
        }
        put_four(a, unit_out(a, u) + 4 * ((int)(threadIdx.x % 32) + 32 * (d0 + b)), merge_values<N, TREE>(plan, v));
    }
}

template <int N, bool TREE, int SPLIT>
static __device__ __forceinline__ void receive_units(const exchange_merge_args &a, const crew &t, uint32_t units,
                                                     wire_run *r)
{
    typedef work_cells<SPLIT> cell;
    enum { MOST = N <= 2 ? STEPS : N <= 4 ? 2 : 1 };                /* steps of each peer under way */
    enum { AT_ONCE = +MOST < +cell::N_STEP ? +MOST : +cell::N_STEP };
    for (uint32_t i = t.at; i < units * SPLIT; i += t.n) {
        const uint32_t u = i / SPLIT;
        const int begin = (int)(i % SPLIT) * cell::N_STEP;
        const uint32_t lane_cell = i * cell::ALL + threadIdx.x % 32;
        const uint32_t lse_cell = units * SPLIT * cell::ALL + i;
        float4 own[AT_ONCE];
        load_steps<AT_ONCE>(a, u, a.w.rank, begin, own); /* while the peers' are on their way */
        const float own_lse = unit_lse(a, u, a.w.rank);
        uint4 first[N][AT_ONCE + 1];
        float lse[N], used[N];
        take_cells<N, AT_ONCE, true>(a.w, r, lane_cell, lse_cell, first);
#pragma unroll
        for (int q = 0; q < N; q++) {
            lse[q] = q == a.w.rank ? own_lse : __uint_as_float(first[q][0].x);
            used[q] = lse[q];
        }
        const merge_plan plan = merge_plan_of<N, TREE>(used);
        merge_cells<N, TREE, AT_ONCE, true>(a, plan, lse, own, u, begin, first);
#pragma unroll
        for (int d0 = AT_ONCE; d0 < cell::N_STEP; d0 += AT_ONCE) {
            uint4 more[N][AT_ONCE];
            load_steps<AT_ONCE>(a, u, a.w.rank, begin + d0, own);
            take_cells<N, AT_ONCE, false>(a.w, r, lane_cell + 32 * d0, 0, more);
            merge_cells<N, TREE, AT_ONCE, false>(a, plan, lse, own, u, begin + d0, more);
        }
        if (begin == 0) {
            unit_done(a, u, plan);
        }
    }
}

template <int N, bool TREE, int R, int SPLIT>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    exchange_merge_kernel(const __grid_constant__ exchange_merge_launch<R> x)
{
    const exchange_merge_args &a = x.rank[R == 1 ? 0 : blockIdx.y];
    const bool sends = blockIdx.x > 0 && !is_receiver(x.shape);
    const crew t = crew_of_warps(x.shape);
    wire_run r;
    after_the_one_before();
    const uint4 control = wire_ask(a.w);
    if (sends) {
        send_units<SPLIT>(a, t, x.units, control);
    }
    if (!wire_begin(a.w, control, &r)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)EXCHANGE_PARTIAL, (uint32_t)a.n_row, x.units * (DIM + 1));
    } else if (!sends) {
        receive_units<N, TREE, SPLIT>(a, t, x.units, &r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

template <int N, int R>
static void launch_merge(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    exchange_merge_launch<R> x;
    memset(&x, 0, sizeof x);
    x.units = (uint32_t)((int64_t)a->n_row * (a->n_head / a->w.n_rank));
    memcpy(x.rank, a, (size_t)n * sizeof *a);
    enum { TREE = KVS_LANES % N == 0 };
    const int split = exchange_merge_works(a->n_row, a->n_head, N);
    x.shape = shape_of(q, n, a->sent ? 0 : N > 1 ? N - 1 : 1, (int64_t)x.units * split);
    if (split == FEW) {
        launch(exchange_merge_kernel<N, TREE, R, FEW>, x, x.shape, n, q, "exchange_merge_kernel");
    } else {
        launch(exchange_merge_kernel<N, TREE, R, 1>, x, x.shape, n, q, "exchange_merge_kernel");
    }
}

void exchange_merge_sm90(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    static void (*const of_ranks[2][WIRE_MAX_RANK])(const exchange_merge_args *, int32_t, dev_queue *) = {
        {launch_merge<1, 1>, launch_merge<2, 1>, launch_merge<3, 1>, launch_merge<4, 1>, launch_merge<5, 1>,
         launch_merge<6, 1>, launch_merge<7, 1>, launch_merge<8, 1>},
        {launch_merge<1, 8>, launch_merge<2, 8>, launch_merge<3, 8>, launch_merge<4, 8>, launch_merge<5, 8>,
         launch_merge<6, 8>, launch_merge<7, 8>, launch_merge<8, 8>},
    };
    if (cuda_refused(q, refuses_ranks(a, n))) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        const char *heads = a[i].n_head == a[0].n_head && !a[i].sent == !a[0].sent
                                ? NULL
                                : "exchange_merge: one launch, one number of heads, sent or not";
        if (cuda_refused(q, exchange_merge_refuses(&a[i])) || cuda_refused(q, heads)) {
            return;
        }
    }
    of_ranks[n > 1][a->w.n_rank - 1](a, n, q);
}
