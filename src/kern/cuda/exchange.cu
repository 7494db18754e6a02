/* exchange.cu - messages between ranks by stores into the peers' memory, and partials merged as they come.
 *
 * A grid has for each rank it serves (blockIdx.y) one block that compares heads, blocks that send and blocks
 * that receive, so that both directions of a link are busy from the first clock on and nobody's sending
 * waits for what he receives. All blocks fit on the device at once (two to a multiprocessor, counted over
 * the ranks): whoever waits is not in the way of whoever is waited for.
 *
 * Plain messages are a stream of words (lines) or parts cut into chunks of 4096 bytes, which a warp each
 * sends and receives. Partials go by heads: 512 values and the LSE are 171 lines exactly, a warp's work; two
 * heads are a chunk. The receiver merges from where they arrived, its own partial from where it is.
 *
 * Compiled without contraction, for the bits of the merge. */
#include "kern/cuda/cuda.h"
#include "kern/cuda/merge.cuh"
#include "kern/cuda/wire.cuh"
#include "kern/exchange.h"

#ifndef EXCHANGE_SENDERS /* blocks that send, at most; a probe may try others */
#define EXCHANGE_SENDERS 64
#endif
#ifndef EXCHANGE_RECEIVERS
#define EXCHANGE_RECEIVERS 64
#endif

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    DIM = KVS_LATENT_DIM,
    VECS = WIRE_CHUNK_DATA / 16 / 32,   /* of a chunk, per lane                                     */
    UNIT_LINES = (DIM + 1) / WIRE_LINE_WORDS,
    UNIT_STEPS = (UNIT_LINES + 31) / 32,
    UNIT_BYTES = DIM * 4 + 16,          /* of a head in a chunk                                     */
    UNITS = 2                           /* heads of a chunk                                         */
};
static_assert(UNIT_LINES * WIRE_LINE_WORDS == DIM + 1, "a head and its LSE fill their lines");
static_assert(UNITS * UNIT_BYTES <= WIRE_CHUNK, "two heads fit a chunk");

/* What the blocks of a grid do. */
typedef struct exchange_shape {
    int32_t lines; /* the form: lines, else chunks */
    uint32_t send, receive; /* blocks */
} exchange_shape;

/* Threads or warps of one role, numbered. */
typedef struct crew {
    uint32_t at, n;
} crew;

/* The block's role; false: it sends. */
static __device__ __forceinline__ bool is_receiver(const exchange_shape &s)
{
    return blockIdx.x > s.send;
}

static __device__ __forceinline__ crew crew_of_threads(const exchange_shape &s)
{
    const uint32_t block = is_receiver(s) ? blockIdx.x - 1 - s.send : blockIdx.x - 1;
    return crew{block * THREADS + threadIdx.x, (is_receiver(s) ? s.receive : s.send) * THREADS};
}

static __device__ __forceinline__ crew crew_of_warps(const exchange_shape &s)
{
    const crew t = crew_of_threads(s);
    return crew{t.at / 32, t.n / 32};
}

/* The k-th rank to deal with: k = 0 is the own one; ranks begin with different peers. */
static __device__ __forceinline__ int nth_rank(const wire &w, int k)
{
    return (w.rank + k) % w.n_rank;
}

/* ---- plain messages --------------------------------------------------------------------------- */

typedef struct exchange_launch {
    exchange_shape shape;
    uint32_t words;  /* to one peer */
    uint32_t chunks;
    exchange_args rank[WIRE_MAX_RANK];
} exchange_launch;

/* A place in the stream of words. */
typedef struct cursor {
    int part;
    uint32_t row, col; /* col: words */
} cursor;

static __device__ __forceinline__ cursor cursor_at(const exchange_args &a, uint32_t word)
{
    cursor c = {0, 0, 0};
    uint32_t width = (uint32_t)a.part[0].bytes / 4;
    while (c.part + 1 < a.n_part && word >= width * (uint32_t)a.n_row) {
        word -= width * (uint32_t)a.n_row;
        width = (uint32_t)a.part[++c.part].bytes / 4;
    }
    c.row = word / width;
    c.col = word % width;
    return c;
}

static __device__ __forceinline__ void cursor_step(const exchange_args &a, cursor *c)
{
    if (++c->col == (uint32_t)a.part[c->part].bytes / 4) {
        c->col = 0;
        if (++c->row == (uint32_t)a.n_row) {
            c->row = 0;
            c->part++;
        }
    }
}

static __device__ __forceinline__ const uint32_t *src_word(const exchange_args &a, const cursor &c, int to)
{
    const exchange_part &p = a.part[c.part];
    return (const uint32_t *)((const uint8_t *)p.src + to * p.src_rank + c.row * p.src_row) + c.col;
}

static __device__ __forceinline__ uint32_t *dst_word(const exchange_args &a, const cursor &c, int from)
{
    const exchange_part &p = a.part[c.part];
    return (uint32_t *)((uint8_t *)p.dst + from * p.dst_rank + c.row * p.dst_row) + c.col;
}

/* Up to three words of line i; words past the end are 0. */
static __device__ __forceinline__ uint4 read_line(const exchange_launch &x, const exchange_args &a,
                                                  uint32_t i, int to)
{
    uint32_t v[WIRE_LINE_WORDS] = {0, 0, 0};
    cursor c = cursor_at(a, i * WIRE_LINE_WORDS);
#pragma unroll
    for (int k = 0; k < WIRE_LINE_WORDS; k++) {
        if (i * WIRE_LINE_WORDS + k < x.words) {
            v[k] = *src_word(a, c, to);
            cursor_step(a, &c);
        }
    }
    return make_uint4(v[0], v[1], v[2], 0);
}

static __device__ __forceinline__ void write_line(const exchange_launch &x, const exchange_args &a,
                                                  uint32_t i, uint4 line, int from)
{
    const uint32_t v[WIRE_LINE_WORDS] = {line.x, line.y, line.z};
    cursor c = cursor_at(a, i * WIRE_LINE_WORDS);
#pragma unroll
    for (int k = 0; k < WIRE_LINE_WORDS; k++) {
        if (i * WIRE_LINE_WORDS + k < x.words) {
            *dst_word(a, c, from) = v[k];
            cursor_step(a, &c);
        }
    }
}

static __device__ void send_lines(const exchange_launch &x, const exchange_args &a, const wire_run &r)
{
    const crew t = crew_of_threads(x.shape);
    const uint32_t lines = (x.words + WIRE_LINE_WORDS - 1) / WIRE_LINE_WORDS;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *slot = wire_lines(a.w, r.epoch, to, a.w.rank);
        for (uint32_t i = t.at; i < lines; i += t.n) {
            uint4 v = read_line(x, a, i, to);
            v.w = r.epoch;
            wire_store16(slot + (size_t)i * WIRE_LINE, v);
        }
    }
}

static __device__ void receive_lines(const exchange_launch &x, const exchange_args &a, wire_run *r)
{
    const crew t = crew_of_threads(x.shape);
    const uint32_t lines = (x.words + WIRE_LINE_WORDS - 1) / WIRE_LINE_WORDS;
    for (int k = 0; k < a.w.n_rank; k++) {
        const int from = nth_rank(a.w, k);
        const uint8_t *slot = wire_lines(a.w, r->epoch, a.w.rank, from);
        for (uint32_t i = t.at; i < lines; i += t.n) {
            if (k == 0) {
                write_line(x, a, i, read_line(x, a, i, from), from);
                continue;
            }
            const uint8_t *at = slot + (size_t)i * WIRE_LINE;
            const uint4 v = wire_wait_line(a.w, r, at, wire_load16(at), from);
            write_line(x, a, i, v, from);
        }
    }
}

/* One chunk of a part: bytes [begin, begin + n) of its rows. */
typedef struct piece {
    int part;
    uint32_t begin, n;
} piece;

static __device__ __forceinline__ piece piece_of(const exchange_args &a, uint32_t chunk)
{
    piece p = {0, 0, 0};
    uint32_t bytes = (uint32_t)a.n_row * (uint32_t)a.part[0].bytes;
    for (;;) {
        const uint32_t chunks = (bytes + WIRE_CHUNK_DATA - 1) / WIRE_CHUNK_DATA;
        if (chunk < chunks) {
            break;
        }
        chunk -= chunks;
        bytes = (uint32_t)a.n_row * (uint32_t)a.part[++p.part].bytes;
    }
    p.begin = chunk * WIRE_CHUNK_DATA;
    p.n = bytes - p.begin < WIRE_CHUNK_DATA ? bytes - p.begin : (uint32_t)WIRE_CHUNK_DATA;
    return p;
}

static __device__ __forceinline__ bool is_vectors(const exchange_part &p)
{
    return ((p.bytes | p.src_rank | p.src_row | p.dst_rank | p.dst_row | (int64_t)(uintptr_t)p.src |
             (int64_t)(uintptr_t)p.dst) & 15) == 0;
}

/* Moves a piece by a warp between its rows and a buffer: V is what is moved at a time. OUT: to the buffer. */
template <typename V, bool OUT>
static __device__ __forceinline__ void move_piece(const exchange_part &p, int rank, const piece &at,
                                                  uint8_t *buf)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t width = (uint32_t)p.bytes;
    uint8_t *rows = OUT ? (uint8_t *)p.src + rank * p.src_rank : (uint8_t *)p.dst + rank * p.dst_rank;
    const int64_t stride = OUT ? p.src_row : p.dst_row;
    for (uint32_t first = 0; first < at.n; first += VECS * 32 * (uint32_t)sizeof(V)) {
        V v[VECS];
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const uint32_t i = first + (lane + 32 * k) * (uint32_t)sizeof(V);
            const uint32_t off = at.begin + i;
            if (i < at.n) {
                v[k] = OUT ? *(const V *)(rows + off / width * stride + off % width)
                           : __ldcg((const V *)(buf + i));
            }
        }
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const uint32_t i = first + (lane + 32 * k) * (uint32_t)sizeof(V);
            const uint32_t off = at.begin + i;
            if (i < at.n) {
                *(V *)(OUT ? buf + i : rows + off / width * stride + off % width) = v[k];
            }
        }
    }
}

/* The own rows, without a buffer. */
template <typename V>
static __device__ __forceinline__ void copy_piece(const exchange_part &p, int rank, const piece &at)
{
    const uint32_t width = (uint32_t)p.bytes;
    for (uint32_t i = threadIdx.x % 32 * (uint32_t)sizeof(V); i < at.n; i += 32 * (uint32_t)sizeof(V)) {
        const uint32_t row = (at.begin + i) / width;
        const uint32_t col = (at.begin + i) % width;
        *(V *)((uint8_t *)p.dst + rank * p.dst_rank + row * p.dst_row + col) =
            *(const V *)((const uint8_t *)p.src + rank * p.src_rank + row * p.src_row + col);
    }
}

static __device__ void send_chunks(const exchange_launch &x, const exchange_args &a, const wire_run &r)
{
    const crew t = crew_of_warps(x.shape);
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *slot = wire_chunks(a.w, r.epoch, to, a.w.rank);
        uint32_t *flags = wire_flags(a.w, r.epoch, to, a.w.rank);
        for (uint32_t i = t.at; i < x.chunks; i += t.n) {
            const piece at = piece_of(a, i);
            const exchange_part &p = a.part[at.part];
            if (is_vectors(p)) {
                move_piece<uint4, true>(p, to, at, slot + (size_t)i * WIRE_CHUNK);
            } else {
                move_piece<uint32_t, true>(p, to, at, slot + (size_t)i * WIRE_CHUNK);
            }
            wire_set_flag(flags + i, r.epoch);
        }
    }
}

static __device__ void receive_chunks(const exchange_launch &x, const exchange_args &a, wire_run *r)
{
    const crew t = crew_of_warps(x.shape);
    for (int k = 0; k < a.w.n_rank; k++) {
        const int from = nth_rank(a.w, k);
        uint8_t *slot = wire_chunks(a.w, r->epoch, a.w.rank, from);
        const uint32_t *flags = wire_flags(a.w, r->epoch, a.w.rank, from);
        for (uint32_t i = t.at; i < x.chunks; i += t.n) {
            const piece at = piece_of(a, i);
            const exchange_part &p = a.part[at.part];
            const bool vectors = is_vectors(p);
            if (k == 0) {
                if (vectors) {
                    copy_piece<uint4>(p, from, at);
                } else {
                    copy_piece<uint32_t>(p, from, at);
                }
                continue;
            }
            wire_wait_flag(a.w, r, flags + i, from);
            if (vectors) {
                move_piece<uint4, false>(p, from, at, slot + (size_t)i * WIRE_CHUNK);
            } else {
                move_piece<uint32_t, false>(p, from, at, slot + (size_t)i * WIRE_CHUNK);
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    exchange_kernel(const __grid_constant__ exchange_launch x)
{
    const exchange_args &a = x.rank[blockIdx.y];
    wire_run r;
    if (!wire_begin(a.w, &r)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)a.op | (uint32_t)(x.shape.lines << 8), (uint32_t)a.n_row,
                           x.words);
    } else if (is_receiver(x.shape)) {
        x.shape.lines ? receive_lines(x, a, &r) : receive_chunks(x, a, &r);
    } else {
        x.shape.lines ? send_lines(x, a, r) : send_chunks(x, a, r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

/* ---- partials --------------------------------------------------------------------------------- */

typedef struct exchange_merge_launch {
    exchange_shape shape;
    uint32_t units;  /* (row, head) of one rank: what goes to a peer */
    uint32_t chunks;
    exchange_merge_args rank[WIRE_MAX_RANK];
} exchange_merge_launch;

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

static __device__ void send_unit_lines(const exchange_merge_launch &x, const exchange_merge_args &a,
                                       const wire_run &r)
{
    const crew t = crew_of_warps(x.shape);
    const int lane = (int)threadIdx.x % 32;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *slot = wire_lines(a.w, r.epoch, to, a.w.rank);
        for (uint32_t u = t.at; u < x.units; u += t.n) {
            const float *v = unit_values(a, u, to);
            const float lse = unit_lse(a, u, to);
            uint8_t *at = slot + (size_t)u * UNIT_LINES * WIRE_LINE;
#pragma unroll
            for (int s = 0; s < UNIT_STEPS; s++) {
                const int i = lane + 32 * s;
                if (i < UNIT_LINES) {
                    const float last = i == UNIT_LINES - 1 ? lse : v[3 * i + 2];
                    wire_store16(at + (size_t)i * WIRE_LINE,
                                 make_uint4(__float_as_uint(v[3 * i]), __float_as_uint(v[3 * i + 1]),
                                            __float_as_uint(last), r.epoch));
                }
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

/* Lines i of all ranks: the three words that the own rank holds there count as its line. */
template <int N>
static __device__ __forceinline__ void load_lines(const exchange_merge_args &a, const wire_run &r, uint32_t u,
                                                  int i, uint4 (&v)[N])
{
#pragma unroll
    for (int p = 0; p < N; p++) {
        if (p == a.w.rank) {
            const float *own = unit_values(a, u, p) + 3 * i;
            v[p] = make_uint4(__float_as_uint(own[0]), __float_as_uint(own[1]),
                              __float_as_uint(i == UNIT_LINES - 1 ? 0.0f : own[2]), r.epoch);
        } else {
            v[p] = wire_load16(wire_lines(a.w, r.epoch, a.w.rank, p) +
                               ((size_t)u * UNIT_LINES + (size_t)i) * WIRE_LINE);
        }
    }
}

template <int N>
static __device__ __forceinline__ void wait_lines(const exchange_merge_args &a, wire_run *r, uint32_t u,
                                                  int i, uint4 (&v)[N])
{
#pragma unroll
    for (int p = 0; p < N; p++) {
        v[p] = wire_wait_line(a.w, r,
                              wire_lines(a.w, r->epoch, a.w.rank, p) +
                                  ((size_t)u * UNIT_LINES + (size_t)i) * WIRE_LINE,
                              v[p], p);
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

template <int N, bool TREE>
static __device__ __forceinline__ void merge_lines(const exchange_merge_args &a, const merge_plan &plan,
                                                   const float (&lse)[N], int64_t out, int i,
                                                   const uint4 (&v)[N])
{
    uint32_t x[N], y[N], z[N];
#pragma unroll
    for (int p = 0; p < N; p++) {
        x[p] = v[p].x;
        y[p] = v[p].y;
        z[p] = v[p].z;
    }
    put_word(a, out + 3 * i, merge_word<N, TREE>(plan, lse, x));
    put_word(a, out + 3 * i + 1, merge_word<N, TREE>(plan, lse, y));
    if (i < UNIT_LINES - 1) {
        put_word(a, out + 3 * i + 2, merge_word<N, TREE>(plan, lse, z));
    }
}

template <int N, bool TREE>
static __device__ void receive_unit_lines(const exchange_merge_launch &x, const exchange_merge_args &a,
                                          wire_run *r)
{
    enum { AHEAD = N <= 2 ? UNIT_STEPS : N <= 4 ? 2 : 1 }; /* lines of each rank under way */
    const crew t = crew_of_warps(x.shape);
    const int lane = (int)threadIdx.x % 32;
    for (uint32_t u = t.at; u < x.units; u += t.n) {
        uint4 v[AHEAD][N];
        uint4 tail[N];
        float lse[N];
        load_lines<N>(a, *r, u, UNIT_LINES - 1, tail);
        for (int s0 = 0; s0 < UNIT_STEPS; s0 += AHEAD) {
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                const int i = lane + 32 * (s0 + s);
                load_lines<N>(a, *r, u, i < UNIT_LINES ? i : UNIT_LINES - 1, v[s]);
            }
            if (s0 == 0) {
                wait_lines<N>(a, r, u, UNIT_LINES - 1, tail);
            }
#pragma unroll
            for (int p = 0; p < N; p++) {
                lse[p] = p == a.w.rank ? unit_lse(a, u, p) : __uint_as_float(tail[p].z);
            }
            float used[N];
#pragma unroll
            for (int p = 0; p < N; p++) {
                used[p] = lse[p];
            }
            const merge_plan plan = merge_plan_of<N, TREE>(used);
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                const int i = lane + 32 * (s0 + s);
                if (i < UNIT_LINES) {
                    wait_lines<N>(a, r, u, i, v[s]);
                    merge_lines<N, TREE>(a, plan, lse, unit_out(a, u), i, v[s]);
                }
            }
            if (s0 == 0) {
                unit_done(a, u, plan);
            }
        }
    }
}

static __device__ void send_unit_chunks(const exchange_merge_launch &x, const exchange_merge_args &a,
                                        const wire_run &r)
{
    enum { STEPS = DIM / 4 / 32 };
    const crew t = crew_of_warps(x.shape);
    const int lane = (int)threadIdx.x % 32;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *slot = wire_chunks(a.w, r.epoch, to, a.w.rank);
        uint32_t *flags = wire_flags(a.w, r.epoch, to, a.w.rank);
        for (uint32_t i = t.at; i < x.chunks; i += t.n) {
            const uint32_t u0 = i * UNITS;
            float4 *at = (float4 *)(slot + (size_t)i * WIRE_CHUNK);
            float4 v[UNITS][STEPS];
#pragma unroll
            for (int j = 0; j < UNITS * STEPS; j++) {
                const uint32_t u = u0 + j / STEPS;
                if (u < x.units) {
                    v[j / STEPS][j % STEPS] =
                        ((const float4 *)unit_values(a, u, to))[lane + 32 * (j % STEPS)];
                }
            }
#pragma unroll
            for (int j = 0; j < UNITS * STEPS; j++) {
                if (u0 + j / STEPS < x.units) {
                    at[j / STEPS * (UNIT_BYTES / 16) + lane + 32 * (j % STEPS)] = v[j / STEPS][j % STEPS];
                }
            }
            if (lane < UNITS && u0 + lane < x.units) {
                at[lane * (UNIT_BYTES / 16) + DIM / 4] = make_float4(unit_lse(a, u0 + lane, to), 0, 0, 0);
            }
            wire_set_flag(flags + i, r.epoch);
        }
    }
}

/* Head u, which lies at place j of chunk i of every peer. */
template <int N, bool TREE>
static __device__ __forceinline__ void merge_unit(const exchange_merge_args &a, const wire_run &r, uint32_t u,
                                                  uint32_t i, int j)
{
    const int lane = (int)threadIdx.x % 32;
    const float4 *src[N];
    float lse[N], used[N];
#pragma unroll
    for (int p = 0; p < N; p++) {
        const float4 *there = (const float4 *)(wire_chunks(a.w, r.epoch, a.w.rank, p) + (size_t)i * WIRE_CHUNK) +
                              j * (UNIT_BYTES / 16);
        src[p] = p == a.w.rank ? (const float4 *)unit_values(a, u, p) : there;
        lse[p] = p == a.w.rank ? unit_lse(a, u, p) : __ldcg(&there[DIM / 4].x);
        used[p] = lse[p];
    }
    const merge_plan plan = merge_plan_of<N, TREE>(used);
    const int64_t out = unit_out(a, u);
#pragma unroll
    for (int d = lane; d < DIM / 4; d += 32) {
        float4 v[N];
#pragma unroll
        for (int p = 0; p < N; p++) {
            v[p] = merge_is_live(lse[p]) ? __ldcg(src[p] + d) : make_float4(0, 0, 0, 0);
        }
        const float4 m = merge_values<N, TREE>(plan, v);
        if (a.out_type == KVS_DTYPE_BF16) {
            *(uint2 *)((uint16_t *)a.out + out + 4 * d) = merge_to_bf16(m);
        } else {
            *(float4 *)((float *)a.out + out + 4 * d) = m;
        }
    }
    unit_done(a, u, plan);
}

template <int N, bool TREE>
static __device__ void receive_unit_chunks(const exchange_merge_launch &x, const exchange_merge_args &a,
                                           wire_run *r)
{
    const crew t = crew_of_warps(x.shape);
    for (uint32_t i = t.at; i < x.chunks; i += t.n) {
        for (int k = 1; k < N; k++) {
            const int from = nth_rank(a.w, k);
            wire_wait_flag(a.w, r, wire_flags(a.w, r->epoch, a.w.rank, from) + i, from);
        }
#pragma unroll
        for (int j = 0; j < UNITS; j++) {
            if (i * UNITS + j < x.units) {
                merge_unit<N, TREE>(a, *r, i * UNITS + j, i, j);
            }
        }
    }
}

template <int N, bool TREE>
static __global__ void __launch_bounds__(THREADS, 2)
    exchange_merge_kernel(const __grid_constant__ exchange_merge_launch x)
{
    const exchange_merge_args &a = x.rank[blockIdx.y];
    wire_run r;
    if (!wire_begin(a.w, &r)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)EXCHANGE_PARTIAL | (uint32_t)(x.shape.lines << 8),
                           (uint32_t)a.n_row, x.units * (DIM + 1));
    } else if (!is_receiver(x.shape)) {
        x.shape.lines ? send_unit_lines(x, a, r) : send_unit_chunks(x, a, r);
    } else if (x.shape.lines) {
        receive_unit_lines<N, TREE>(x, a, &r);
    } else {
        receive_unit_chunks<N, TREE>(x, a, &r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

/* ---- launches --------------------------------------------------------------------------------- */

static uint32_t blocks_for(int64_t items, int64_t per_block, int64_t most)
{
    const int64_t want = (items + per_block - 1) / per_block;
    return (uint32_t)(want < 1 ? 1 : want < most ? want : most);
}

/* Blocks of one rank where n ranks share the device: two blocks to a multiprocessor in all. */
static exchange_shape shape_of(const dev_queue *q, int32_t n, int32_t lines, int64_t send, int64_t receive,
                               int64_t per_block)
{
    const int64_t half = ((int64_t)2 * (q->n_sm > 0 ? q->n_sm : 1) / n - 1) / 2;
    const int64_t room = half < 1 ? 1 : half;
    exchange_shape s;
    s.lines = lines;
    s.send = blocks_for(send, per_block, room < EXCHANGE_SENDERS ? room : EXCHANGE_SENDERS);
    s.receive = blocks_for(receive, per_block, room < EXCHANGE_RECEIVERS ? room : EXCHANGE_RECEIVERS);
    return s;
}

static bool is_lines(int32_t form, int64_t bytes)
{
    return form == EXCHANGE_AUTO ? bytes <= EXCHANGE_LINE_MAX : form == EXCHANGE_LINES;
}

/* Ranks of one launch belong to one group, and none is there twice. */
template <typename A>
static const char *refuses_ranks(const A *a, int32_t n)
{
    uint32_t seen = 0;
    if (n < 1 || n > WIRE_MAX_RANK) {
        return "exchange: a launch serves 1 to 8 ranks";
    }
    for (int32_t i = 0; i < n; i++) {
        if (a[i].w.n_rank != a[0].w.n_rank || (seen & (1u << a[i].w.rank)) != 0) {
            return "exchange: the ranks of a launch are different ones of one group";
        }
        seen |= 1u << a[i].w.rank;
    }
    return NULL;
}

void exchange_sm90(const exchange_args *a, int32_t n, dev_queue *q)
{
    exchange_launch x;
    if (cuda_refused(q, refuses_ranks(a, n))) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        if (cuda_refused(q, exchange_refuses(&a[i]))) {
            return;
        }
        x.rank[i] = a[i];
    }
    const int64_t bytes = exchange_bytes(a);
    const int64_t peers = a->w.n_rank - 1;
    const int32_t lines = is_lines(a->form, bytes);
    x.words = (uint32_t)(bytes / 4);
    x.chunks = 0;
    for (int32_t i = 0; i < a->n_part; i++) {
        x.chunks += (uint32_t)(((int64_t)a->n_row * a->part[i].bytes + WIRE_CHUNK_DATA - 1) / WIRE_CHUNK_DATA);
    }
    const int64_t items = lines ? (bytes + 11) / 12 : x.chunks;
    x.shape = shape_of(q, n, lines, items * peers, items * (peers + 1), lines ? THREADS : WARPS);
    const dim3 grid(1 + x.shape.send + x.shape.receive, (unsigned)n);
    exchange_kernel<<<grid, THREADS, 0, cuda_stream(q)>>>(x);
    cuda_launched(q, "exchange_kernel");
}

template <int N>
static void launch_merge(const exchange_merge_launch &x, dim3 grid, dev_queue *q)
{
    exchange_merge_kernel<N, KVS_LANES % N == 0><<<grid, THREADS, 0, cuda_stream(q)>>>(x);
}

void exchange_merge_sm90(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    static void (*const launch[WIRE_MAX_RANK])(const exchange_merge_launch &, dim3, dev_queue *) = {
        launch_merge<1>, launch_merge<2>, launch_merge<3>, launch_merge<4>,
        launch_merge<5>, launch_merge<6>, launch_merge<7>, launch_merge<8>,
    };
    exchange_merge_launch x;
    if (cuda_refused(q, refuses_ranks(a, n))) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        if (cuda_refused(q, exchange_merge_refuses(&a[i]))) {
            return;
        }
        x.rank[i] = a[i];
    }
    const int64_t bytes = exchange_merge_bytes(a);
    const int64_t peers = a->w.n_rank - 1;
    const int32_t lines = is_lines(a->form, bytes);
    x.units = (uint32_t)((int64_t)a->n_row * (a->n_head / a->w.n_rank));
    x.chunks = (x.units + UNITS - 1) / UNITS;
    const int64_t items = lines ? x.units : x.chunks;
    x.shape = shape_of(q, n, lines, items * peers, items, WARPS);
    const dim3 grid(1 + x.shape.send + x.shape.receive, (unsigned)n);
    launch[a->w.n_rank - 1](x, grid, q);
    cuda_launched(q, "exchange_merge_kernel");
}
