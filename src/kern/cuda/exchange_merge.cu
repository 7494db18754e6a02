/* exchange_merge.cu - partials sent to the ranks of their heads and merged as they come.
 *
 * A head's 512 values and its LSE are 171 lines exactly, three warps' work; two heads are a piece. The receiver
 * merges from where they arrived, its own partial from where it is, which it loads while the others are on
 * their way. Compiled without contraction, for the bits of the merge. */
#include "kern/cuda/exchange.cuh"
#include "kern/cuda/merge.cuh"

enum {
    DIM = KVS_LATENT_DIM,
    UNIT_LINES = (DIM + 1) / WIRE_LINE_WORDS,
    THIRDS = 3,                         /* a warp has a third of a head's lines, two to a lane      */
    THIRD_LINES = UNIT_LINES / THIRDS,
    UNIT_BYTES = DIM * 4 + 16,          /* of a head in a piece                                     */
    UNITS = 2,                          /* heads of a piece                                         */
    STEPS = DIM / 4 / 32                /* 16-byte values of a head, per lane                       */
};
static_assert(UNIT_LINES * WIRE_LINE_WORDS == DIM + 1, "a head and its LSE fill their lines");
static_assert(THIRD_LINES * THIRDS == UNIT_LINES && THIRD_LINES <= 64, "two lines to a lane");
static_assert(UNITS * UNIT_BYTES <= WIRE_CHUNK, "two heads fit a chunk");

template <int R>
struct exchange_merge_launch {
    exchange_shape shape;
    uint32_t units;  /* (row, head) of one rank: what goes to a peer */
    uint32_t pieces;
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

/* Lines of a third that a lane has: the first always, the second where it is one of the third's. */
typedef struct line_pair {
    uint32_t unit;
    int line[2];
    bool two;
} line_pair;

static __device__ __forceinline__ line_pair pair_of(uint32_t item)
{
    const int lane = (int)threadIdx.x % 32;
    line_pair p;
    p.unit = item / THIRDS;
    p.line[0] = (int)(item % THIRDS) * THIRD_LINES + lane;
    p.two = lane + 32 < THIRD_LINES;
    p.line[1] = p.line[0] + (p.two ? 32 : 0);
    return p;
}

/* The three words that a partial of this rank has for a line; the last line ends with the LSE. */
static __device__ __forceinline__ uint4 unit_line(const float *values, float lse, int i)
{
    const float *v = values + 3 * i;
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                      __float_as_uint(i == UNIT_LINES - 1 ? lse : v[2]), 0);
}

static __device__ void send_unit_lines(const exchange_shape &s, const exchange_merge_args &a, uint32_t units,
                                       uint4 control)
{
    const crew t = crew_of_warps(s);
    wire_run r;
    bool begun = false;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        for (uint32_t item = t.at; item < units * THIRDS; item += t.n) {
            const line_pair p = pair_of(item);
            const float *values = unit_values(a, p.unit, to);
            const float lse = unit_lse(a, p.unit, to);
            uint4 v[2] = {unit_line(values, lse, p.line[0]), unit_line(values, lse, p.line[1])};
            if (!begun && !wire_begin(a.w, control, &r)) { /* behind the first loads */
                return;
            }
            begun = true;
            uint8_t *at = wire_lines(a.w, r.epoch, to, a.w.rank) + (size_t)p.unit * UNIT_LINES * WIRE_LINE;
            v[0].w = r.epoch;
            v[1].w = r.epoch;
            wire_store16(at + p.line[0] * WIRE_LINE, v[0]);
            if (p.two) {
                wire_store16(at + p.line[1] * WIRE_LINE, v[1]);
            }
        }
    }
}

static __device__ __forceinline__ void put_word(const exchange_merge_args &a, int64_t at, float v)
{
    if (a.out_type == KVS_DTYPE_BF16) {
        ((uint16_t *)a.out)[at] = bf16_from_f32(v).bits;
    } else {
        ((float *)a.out)[at] = v;
    }
}

/* The lane's lines and the last one, with the LSE, of every peer; what is the own rank's is left alone. */
template <int N>
static __device__ __forceinline__ void wait_pairs(const wire &w, wire_run *r, const line_pair &p, uint4 (&v)[N][3])
{
    const uint8_t *slot = wire_lines(w, r->epoch, w.rank, 0) + (size_t)p.unit * UNIT_LINES * WIRE_LINE;
    const size_t step = (size_t)w.n_line * WIRE_LINE;
    for (uint32_t n = 1;; n++) {
        int missing = -1;
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (q != w.rank) {
                v[q][0] = wire_load16(slot + q * step + p.line[0] * WIRE_LINE);
                v[q][1] = wire_load16(slot + q * step + p.line[1] * WIRE_LINE);
                v[q][2] = wire_load16(slot + q * step + (UNIT_LINES - 1) * WIRE_LINE);
            }
        }
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (q != w.rank && (v[q][0].w != r->epoch || v[q][1].w != r->epoch || v[q][2].w != r->epoch)) {
                missing = q;
            }
        }
        if (missing < 0 || r->dead) {
            return;
        }
        if (n % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, missing);
        }
    }
}

/* A word of every part, merged. lse: as it came. */
template <int N, bool TREE>
static __device__ __forceinline__ float merge_word(const merge_plan &plan, const float (&lse)[N],
                                                   const uint32_t (&word)[N])
{
    float v[N];
#pragma unroll
    for (int p = 0; p < N; p++) {
        v[p] = merge_is_live(lse[p]) ? __uint_as_float(word[p]) : 0.0f;
    }
    return merge_values<N, TREE>(plan, v);
}

/* Line i of the result from the same line of all parts. */
template <int N, bool TREE>
static __device__ __forceinline__ void merge_line(const exchange_merge_args &a, const merge_plan &plan,
                                                  const float (&lse)[N], int64_t out, int i,
                                                  const uint4 (&v)[N][3], int of)
{
    uint32_t x[N], y[N], z[N];
#pragma unroll
    for (int q = 0; q < N; q++) {
        x[q] = v[q][of].x;
        y[q] = v[q][of].y;
        z[q] = v[q][of].z;
    }
    put_word(a, out + 3 * i, merge_word<N, TREE>(plan, lse, x));
    put_word(a, out + 3 * i + 1, merge_word<N, TREE>(plan, lse, y));
    if (i < UNIT_LINES - 1) {
        put_word(a, out + 3 * i + 2, merge_word<N, TREE>(plan, lse, z));
    }
}

template <int N, bool TREE>
static __device__ void receive_unit_lines(const exchange_shape &s, const exchange_merge_args &a, uint32_t units,
                                          wire_run *r)
{
    const crew t = crew_of_warps(s);
    for (uint32_t item = t.at; item < units * THIRDS; item += t.n) {
        const line_pair p = pair_of(item);
        uint4 v[N][3];
        float lse[N], used[N];
        const float *own = unit_values(a, p.unit, a.w.rank);
        const float own_lse = unit_lse(a, p.unit, a.w.rank);
        const uint4 own_line[2] = {unit_line(own, own_lse, p.line[0]), unit_line(own, own_lse, p.line[1])};
        wait_pairs<N>(a.w, r, p, v);
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (q == a.w.rank) {
                v[q][0] = own_line[0];
                v[q][1] = own_line[1];
                v[q][2].z = __float_as_uint(own_lse);
            }
            lse[q] = __uint_as_float(v[q][2].z);
            used[q] = lse[q];
        }
        const merge_plan plan = merge_plan_of<N, TREE>(used);
        const int64_t out = unit_out(a, p.unit);
        merge_line<N, TREE>(a, plan, lse, out, p.line[0], v, 0);
        if (p.two) {
            merge_line<N, TREE>(a, plan, lse, out, p.line[1], v, 1);
        }
        if (item % THIRDS == 0) {
            unit_done(a, p.unit, plan);
        }
    }
}

static __device__ void send_unit_chunks(const exchange_shape &s, const exchange_merge_args &a, uint32_t units,
                                        uint32_t pieces, const wire_run &r, uint32_t *counts)
{
    send_groups(a.w, r, s, pieces, counts, [&](int to, uint32_t i, uint8_t *buf) {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t u0 = i * UNITS;
        float4 *at = (float4 *)buf;
        float4 v[UNITS * STEPS];
#pragma unroll
        for (int j = 0; j < UNITS * STEPS; j++) {
            if (u0 + j / STEPS < units) {
                v[j] = ((const float4 *)unit_values(a, u0 + j / STEPS, to))[lane + 32 * (j % STEPS)];
            }
        }
#pragma unroll
        for (int j = 0; j < UNITS * STEPS; j++) {
            if (u0 + j / STEPS < units) {
                at[j / STEPS * (UNIT_BYTES / 16) + lane + 32 * (j % STEPS)] = v[j];
            }
        }
        if (lane < UNITS && u0 + lane < units) {
            at[lane * (UNIT_BYTES / 16) + DIM / 4] = make_float4(unit_lse(a, u0 + lane, to), 0, 0, 0);
        }
    });
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

/* Head u, which lies at place j of piece i of every peer. own: its values on this rank, of this lane. */
template <int N, bool TREE>
static __device__ __forceinline__ void merge_unit(const exchange_merge_args &a, const wire_run &r, uint32_t u,
                                                  uint32_t i, int j, const float4 (&own)[STEPS], float own_lse)
{
    enum { AT_ONCE = N <= 2 ? STEPS : N <= 4 ? 2 : 1 }; /* loads of each peer under way */
    const int lane = (int)threadIdx.x % 32;
    const uint8_t *slot = wire_chunks(a.w, r.epoch, a.w.rank, 0) + (size_t)i * WIRE_CHUNK + j * UNIT_BYTES;
    const size_t step = (size_t)a.w.n_chunk * WIRE_CHUNK;
    float lse[N], used[N];
#pragma unroll
    for (int q = 0; q < N; q++) {
        lse[q] = q == a.w.rank ? own_lse : __ldcg((const float *)(slot + q * step) + DIM);
    }
    merge_plan plan;
#pragma unroll
    for (int d0 = 0; d0 < STEPS; d0 += AT_ONCE) {
        float4 v[AT_ONCE][N];
#pragma unroll
        for (int d = 0; d < AT_ONCE; d++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                v[d][q] = q == a.w.rank ? own[d0 + d]
                                        : __ldcg((const float4 *)(slot + q * step) + lane + 32 * (d0 + d));
            }
        }
        if (d0 == 0) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                used[q] = lse[q];
            }
            plan = merge_plan_of<N, TREE>(used);
        }
#pragma unroll
        for (int d = 0; d < AT_ONCE; d++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                v[d][q] = merge_is_live(lse[q]) ? v[d][q] : make_float4(0, 0, 0, 0);
            }
            put_four(a, unit_out(a, u) + 4 * (lane + 32 * (d0 + d)), merge_values<N, TREE>(plan, v[d]));
        }
    }
    unit_done(a, u, plan);
}

template <int N, bool TREE>
static __device__ void receive_unit_chunks(const exchange_shape &s, const exchange_merge_args &a, uint32_t units,
                                           uint32_t pieces, wire_run *r)
{
    if (is_flag_warp()) {
        return;
    }
    const crew t = crew_of_warps(s);
    const int lane = (int)threadIdx.x % 32;
    for (uint32_t i = t.at; i < pieces; i += t.n) {
        float4 own[UNITS][STEPS];
        float own_lse[UNITS];
#pragma unroll
        for (int j = 0; j < UNITS; j++) { /* while the peers' are on their way */
            const uint32_t u = i * UNITS + j < units ? i * UNITS + j : i * UNITS;
            own_lse[j] = unit_lse(a, u, a.w.rank);
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                own[j][d] = ((const float4 *)unit_values(a, u, a.w.rank))[lane + 32 * d];
            }
        }
        for (int k = 1; k < N; k++) {
            const int from = nth_rank(a.w, k);
            wire_wait_flag(a.w, r, wire_flags(a.w, r->epoch, a.w.rank, from) + i / s.group, from);
        }
#pragma unroll
        for (int j = 0; j < UNITS; j++) {
            if (i * UNITS + j < units) {
                merge_unit<N, TREE>(a, *r, i * UNITS + j, i, j, own[j], own_lse[j]);
            }
        }
    }
}

template <int N, bool TREE, int R>
static __global__ void __launch_bounds__(THREADS + 32, 2)
    exchange_merge_kernel(const __grid_constant__ exchange_merge_launch<R> x)
{
    __shared__ uint32_t counts[MAX_GROUP];
    const exchange_merge_args &a = x.rank[R == 1 ? 0 : blockIdx.y];
    const bool sends = blockIdx.x > 0 && !is_receiver(x.shape);
    wire_run r;
    after_the_one_before();
    const uint4 control = wire_ask(a.w);
    if (sends && x.shape.lines) {
        send_unit_lines(x.shape, a, x.units, control);
    }
    const bool sound = wire_begin(a.w, control, &r);
    if (!(sends && !x.shape.lines ? begin_groups(counts, sound) : sound)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)EXCHANGE_PARTIAL | (uint32_t)(x.shape.lines << 8),
                           (uint32_t)a.n_row, x.units * (DIM + 1));
    } else if (sends && !x.shape.lines) {
        send_unit_chunks(x.shape, a, x.units, x.pieces, r, counts);
    } else if (!sends && x.shape.lines) {
        receive_unit_lines<N, TREE>(x.shape, a, x.units, &r);
    } else if (!sends) {
        receive_unit_chunks<N, TREE>(x.shape, a, x.units, x.pieces, &r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

template <int N, int R>
static void launch_merge(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    exchange_merge_launch<R> x;
    memset(&x, 0, sizeof x);
    const int32_t lines = is_lines(a->form, exchange_merge_bytes(a));
    x.units = (uint32_t)((int64_t)a->n_row * (a->n_head / a->w.n_rank));
    x.pieces = (x.units + UNITS - 1) / UNITS;
    memcpy(x.rank, a, (size_t)n * sizeof *a);
    x.shape = shape_of(q, n, N, lines, lines ? (int64_t)x.units * THIRDS : x.pieces, WARPS);
    launch(exchange_merge_kernel<N, KVS_LANES % N == 0, R>, x, x.shape, n, q, "exchange_merge_kernel");
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
        const char *heads = a[i].n_head == a[0].n_head ? NULL : "exchange_merge: one launch, one number of heads";
        if (cuda_refused(q, exchange_merge_refuses(&a[i])) || cuda_refused(q, heads)) {
            return;
        }
    }
    of_ranks[n > 1][a->w.n_rank - 1](a, n, q);
}
