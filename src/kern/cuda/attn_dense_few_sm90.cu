/* attn_dense_few_sm90.cu - dense attention over a block table, FP8 rows, up to 16 rows x heads (attn_dense.cuh): the main
 * kernel that converts codes once, in registers, on their way to the products.
 *
 * A tile is a page of codes as it is in the pool, rows 592 bytes apart so that eight of them at one column touch all
 * banks. Products are mma.m16n8k16 with rows x heads on M: S = Q K^T takes keys, O = P V takes values as the B operand.
 * ldmatrix brings codes so that after a conversion (attn_dense_round.h) they are keys as the operand wants them, the dims in
 * an order of their own, to which queries are laid out. The same registers, transposed by movmatrix, are values.
 *
 * Two warps are a pair, and each of four pairs has 16 keys of every tile. A warp of a pair scores its keys over half of the
 * dims (256 latents, 32 of the rope), keeps what it has converted, and adds P V of the same 256 dims. Between the two
 * stands what they exchange: halves of scores. Both then make the same weights, which are A fragments as they come out
 * of S. So pairs have references, sums and results of their own and wait for nobody; they meet at the end of a share.
 *
 * Keys that a row does not attend: as in attn_dense_sm90.cu, with codes instead of values.
 */
#include "kern/cuda/attn_dense_few_tile.cuh"
#include "kern/cuda/attn_out.cuh"
#include "kern/cuda/attn_query.cuh"
#include "kern/cuda/launch.cuh"

/* threadIdx.x, read anew: what depends on it is not kept in registers and predicates from one end of the kernel to the
 * other. */
static __device__ __forceinline__ int thread_now()
{
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

/* ---- copying warp ------------------------------------------------------------------------------ */

static __device__ void pages_run(const dense_params &p, dense_walk w, uint32_t smem)
{
    uint32_t n = 0;
    dense_unit u;
    while (dense_next(&w, &p.work, &u)) {
        const share s = share_of(p, u, 0);
        if (s.b0 >= s.b1)
            continue;
        const int32_t *table = p.table + s.req * p.table_stride;
        pages g = pages_begin(p, table, s);
        for (int b = s.b0; b < s.b1; b++, n++) {
            const int page = page_of(g, pages_step(g, p, table, s, b));
            const uint32_t place = n % RING, full = smem + AT_FULL + 8 * place;
            if (threadIdx.x % 32 == 0) {
                mbar_wait(smem + AT_FREE + 8 * place, (n / RING & 1) ^ 1);
                sts32(smem + AT_LIMIT + 4 * place, page < 0 ? 0 : DENSE_TILE);
                if (page < 0) {
                    mbar_arrive(full);
                } else {
                    mbar_expect(full, PLACE);
                    copy_box(smem + AT_RING + place * PLACE, &p.map, 0, 0, page, full);
                }
            }
            __syncwarp();
        }
    }
}

/* ---- queries ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ void run_store(uint32_t smem, const share &s, uint32_t n)
{
    sts32(smem + RUN_END, n + (s.b1 - s.b0));
    sts32(smem + RUN_WHOLE, n + (s.least / DENSE_TILE - s.b0));
    sts32(smem + RUN_FIRST, s.b0 - n);
    sts32(smem + RUN_LEAST, s.least);
    sts32(smem + RUN_MOST, s.most);
}

/* All consumers: queries as A fragments in the order in which codes come, and the factors of scores. A head is scaled by
 * a power of two into the range where fp16 keeps its bits. */
static __device__ void queries_load(const dense_params &p, const share &s, float unit,
                                    uint32_t smem)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int m = threadIdx.x / 32; m < FEW_M; m += CONSUMERS / 32) {
        const int r = m / p.heads, h = m % p.heads;
        const bool has = r < s.n;
        const uint16_t *q = p.q + (has ? (s.row + r) * p.q_stride_row + h * p.q_stride_head : 0);
        uint4 v[3];
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            v[i] = has && (i < 2 || lane < 8) ? query_load<true>(q, lane + 32 * i)
                                              : make_uint4(0, 0, 0, 0);
            top = max(top, query_top(v[i]));
        }
        const int e = query_exponent(__reduce_max_sync(~0u, top));
        const float mul = power_of_two(-e);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int chunk = lane + 32 * i;
            const uint32_t at =
                smem + AT_Q + chunk / 2 * 512 + (m % 8 * 4 + chunk % 2 * 2) * 16 + (m >= 8 ? 4 : 0);
            if (chunk < DENSE_DIM / 8) {
                sts32(at, query_word(v[i].x, mul, true));
                sts32(at + 8, query_word(v[i].y, mul, true));
                sts32(at + 16, query_word(v[i].z, mul, true));
                sts32(at + 24, query_word(v[i].w, mul, true));
            }
        }
        if (lane == 0) {
            float f = 0.0f;
            if (has)
                f = p.scale_log2 * unit * power_of_two(e);
            if (has && p.q_scale != NULL)
                f *= p.q_scale[(int64_t)(s.row + r) * p.n_head + h];
            sts_f(smem + AT_FACTOR + 4 * m, f);
            sts32(smem + AT_KEYS + 4 * m, has ? (uint32_t)dense_len(&p.work, s.row + r) : 0);
        }
    }
    bar_sync(BAR_ALL, CONSUMERS);
}

/* ---- results ----------------------------------------------------------------------------------- */

/* Where a share's results go. */
struct target {
    bool partial;
    int64_t slot; /* of partials: of the item's first row and head */
};

/* What a warp knows of its work beside the tiles, for which there are no registers: in shared memory, by all lanes
 * alike. */
struct held {
    dense_walk w;
    dense_unit u;
    share s;
    target t;
    int64_t total;
    int4 goes_on;
};
static_assert(sizeof(held) <= HELD_BYTES, "held");

/* A row's values of this warp and, by one thread of a team, its lse. */
static __device__ __forceinline__ void row_store(const dense_params &p, const worker &c,
                                                 const held &k, float unit, int odd, int n_key,
                                                 float ref, float sum)
{
    const share &s = k.s;
    const target &t = k.t;
    const int m = c.lane / 4 + 8 * odd, r = m / p.heads, head = m % p.heads, row = s.row + r;
    if (r >= s.n)
        return;
    const bool none = n_key == 0 || sum == 0.0f, bad = !none && !(sum < -NEG_INF);
    const float f = none || bad ? 0.0f : unit / sum;
    const int64_t part = t.slot + (int64_t)(row - k.u.item.row) * p.n_head + head;
    const int64_t at =
        t.partial ? part * DENSE_VDIM : row * p.out_stride_row + head * p.out_stride_head;
    void *out = t.partial ? p.part_out : p.out;
    const bool bf16 = !t.partial && p.out_bf16, wide = t.partial || p.out_wide;
    const int dim = 256 * c.side + 4 * (c.lane % 4);
#pragma unroll
    for (int i = 0; i < V_STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float x = c.o[2 * i + j][2 * odd], y = c.o[2 * i + j][2 * odd + 1];
            out_pair(out, bf16, wide, at + dim + 16 * i + 2 * j, f == 0.0f ? 0.0f : x * f,
                     f == 0.0f ? 0.0f : y * f);
        }
    if (c.side != 0 || c.lane % 4 != 0)
        return;
    const float lse = none ? NEG_INF : ref + log2f(sum);
    if (t.partial)
        p.part_lse[part] = bad ? __int_as_float(0x7fc00000) : lse;
    else
        p.lse[(int64_t)row * p.n_head + head] = bad ? NEG_INF : lse * 0.693147180559945309f;
    if (bad && !t.partial && p.n_nan != NULL)
        atomicAdd(p.n_nan, 1ull);
}

/* Results of the first pair from the others: half of a thread's at a time. */
static __device__ __forceinline__ void results_meet(worker &c)
{
    const uint32_t at = c.smem + AT_X + threadIdx.x % PAIR * 16;
#pragma unroll 1
    for (int pair = 1; pair < PAIRS; pair++)
#pragma unroll
        for (int part = 0; part < 2; part++) {
            if (c.pair == pair)
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const float *x = c.o[16 * part + i];
                    sts128(at + i * PAIR * 16,
                           make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                      __float_as_uint(x[2]), __float_as_uint(x[3])));
                }
            bar_sync(BAR_ALL, CONSUMERS);
            if (c.pair == 0)
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const uint4 v = lds128(at + i * PAIR * 16);
                    c.o[16 * part + i][0] += __uint_as_float(v.x);
                    c.o[16 * part + i][1] += __uint_as_float(v.y);
                    c.o[16 * part + i][2] += __uint_as_float(v.z);
                    c.o[16 * part + i][3] += __uint_as_float(v.w);
                }
            bar_sync(BAR_ALL, CONSUMERS);
        }
}

/* A row's reference and sum over all pairs; what this pair's results are to be multiplied by. */
static __device__ __forceinline__ float sums_meet(const worker &c, int m, float *ref, float *sum)
{
    float most = NEG_INF, own = 0.0f, all = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        most = fmaxf(most, lds_f(c.smem + AT_REF + (i * 16 + m) * 4));
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const float r = lds_f(c.smem + AT_REF + (i * 16 + m) * 4);
        const float f = r == NEG_INF ? 0.0f : ref_change(r, most);
        all += f * lds_f(c.smem + AT_SUM + (i * 16 + m) * 4);
        own = i == c.pair ? f : own;
    }
    *ref = most;
    *sum = all;
    return own;
}

static __device__ __forceinline__ void share_finish(const few_params &fp, worker &c, const held &h)
{
    const dense_params &p = fp.d;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        c.l.x += __shfl_xor_sync(~0u, c.l.x, d);
        c.l.y += __shfl_xor_sync(~0u, c.l.y, d);
    }
    const int thread = thread_now(), m = thread % 32 / 4;
    if (thread / 32 % 2 == 0 && thread % 4 == 0) {
        const uint32_t at = (c.pair * 16 + m) * 4;
        sts_f(c.smem + AT_SUM + at, c.l.x);
        sts_f(c.smem + AT_SUM + at + 32, c.l.y);
        sts_f(c.smem + AT_REF + at, c.ref.x);
        sts_f(c.smem + AT_REF + at + 32, c.ref.y);
    }
    bar_sync(BAR_ALL, CONSUMERS);
    two ref, sum, own;
    own.x = sums_meet(c, m, &ref.x, &sum.x);
    own.y = sums_meet(c, m + 8, &ref.y, &sum.y);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        c.o[i][0] *= own.x;
        c.o[i][1] *= own.x;
        c.o[i][2] *= own.y;
        c.o[i][3] *= own.y;
    }
    results_meet(c);
    if (c.pair == 0) {
        row_store(p, c, h, fp.unit, 0, keys_of(c, 0), ref.x, sum.x);
        row_store(p, c, h, fp.unit, 1, keys_of(c, 8), ref.y, sum.y);
    }
}

/* Rows that attend nothing in this piece: (0, -inf); of a partial the lse alone. */
static __device__ void empty_store(const dense_params &p, const held &k)
{
    const share &s = k.s;
    const target &t = k.t;
    for (int m = threadIdx.x / 32; m < s.n * p.n_head; m += CONSUMERS / 32) {
        const int row = s.row + m / p.n_head, head = m % p.n_head, lane = threadIdx.x % 32;
        if (t.partial) {
            if (lane == 0)
                p.part_lse[t.slot + (int64_t)(row - k.u.item.row) * p.n_head + head] = NEG_INF;
            continue;
        }
        const int64_t at = row * p.out_stride_row + head * p.out_stride_head;
        for (int d = 2 * lane; d < DENSE_VDIM; d += 64)
            out_pair(p.out, p.out_bf16, p.out_wide, at + d, 0.0f, 0.0f);
        if (lane == 0)
            p.lse[(int64_t)row * p.n_head + head] = NEG_INF;
    }
}

/* ---- consumers --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void worker_clear(worker &c)
{
    c.ref.x = c.ref.y = NEG_INF;
    c.l.x = c.l.y = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++)
        c.o[i][0] = c.o[i][1] = c.o[i][2] = c.o[i][3] = 0.0f;
}

/* The next share, and where its results go; false at the end. */
static __device__ __forceinline__ bool share_next(const dense_params &p, held &h, int part)
{
    dense_walk w = h.w;
    dense_unit u;
    const bool more = dense_next(&w, &p.work, &u);
    __syncwarp(); /* all have read it */
    if (more) {
        target t;
        t.partial = u.nb > 0 && (u.b0 > 0 || u.b1 < u.nb);
        t.slot = (2 * (int64_t)part + (u.b0 == 0)) * p.work.span * p.n_head;
        if (t.partial && u.b0 == 0) /* w.at: the position behind the item */
            h.goes_on =
                make_int4(u.item.row, u.item.n, dense_part_of(&p.work, h.total, w.at - 1), 0);
        h.s = share_of(p, u, 0);
        h.u = u;
        h.t = t;
        h.w = w;
    }
    __syncwarp();
    return more;
}

template <bool PLAIN>
static __device__ __forceinline__ void consumers_run(const few_params &fp, held &h, uint32_t smem,
                                                     int part)
{
    const dense_params &p = fp.d;
    uint32_t n = 0;
    while (share_next(p, h, part)) {
        if (h.s.b0 >= h.s.b1) {
            empty_store(p, h);
            continue;
        }
        if (thread_now() == 0)
            run_store(smem, h.s, n);
        queries_load(p, h.s, fp.unit, smem);
        worker c;
        c.smem = smem;
        c.pair = threadIdx.x / PAIR;
        c.side = threadIdx.x % PAIR / 32;
        c.lane = threadIdx.x % 32;
        c.r = {fp.hi, fp.lo, fp.back};
        worker_clear(c);
        n = tiles_run<PLAIN>(c, n);
        share_finish(fp, c, h);
    }
    if (thread_now() == 0)
        p.cut[part] = h.goes_on;
}

/* ---- the kernel -------------------------------------------------------------------------------- */

template <bool PLAIN>
static __global__ void __launch_bounds__(THREADS, 1)
    attn_dense_few(const __grid_constant__ few_params p)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            mbar_init(smem + AT_FULL + 8 * i, 1);
            mbar_init(smem + AT_FREE + 8 * i, CONSUMERS / 32);
        }
        mbar_init_fence();
    }
    grid_wait();
    int64_t total;
    const dense_walk w = walk_begin<THREADS>(p.d, blockIdx.x, (int64_t *)(raw + AT_SCAN), &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<40>();
        if (threadIdx.x < CONSUMERS + 32)
            pages_run(p.d, w, smem);
    } else {
        regs_take<232>();
        held &h = *(held *)(raw + AT_HELD + threadIdx.x / 32 * HELD_BYTES);
        h.w = w;
        h.total = total;
        h.goes_on = make_int4(-1, 0, 0, 0);
        __syncwarp();
        consumers_run<PLAIN>(p, h, smem, blockIdx.x);
    }
}

template <bool PLAIN> static cudaError_t few_launch(const few_params &p, cudaStream_t stream)
{
    const cudaError_t e = cudaFuncSetAttribute(
        attn_dense_few<PLAIN>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
    return e != cudaSuccess ? e
                            : launch_kernel(attn_dense_few<PLAIN>, dim3(p.d.work.n_part), THREADS,
                                            SMEM_BYTES, true, p, stream);
}

cudaError_t attn_dense_few_launch(const few_params &p, bool plain, cudaStream_t stream)
{
    return plain ? few_launch<true>(p, stream) : few_launch<false>(p, stream);
}
