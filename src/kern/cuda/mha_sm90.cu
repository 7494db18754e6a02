/* mha_sm90.cu - multi-head attention over blocks of keys on sm_90a, the main kernel and the op (mha_sm90.cuh).
 *
 * A unit is MHA_ROWS query rows of one head, or of two blocks of threads, a pair, that take it together (PAIR 2). They
 * take units in turn, a head's units side by side and longest first, so that blocks that run at the same time read
 * the same keys. Two groups of consumers have 64 rows each; two warps bring tiles of keys and of values, each into a
 * ring of two places. Each block of a pair fetches half of every tile for both.
 *
 * S = Q K^T (both operands in shared memory), weights in registers, O += P V with P from registers. The
 * scores of a tile are issued before the values of the tile before it, so that the tensor cores have work while weights
 * are made, a group's own and the other's.
 *
 * The fold. State between blocks is (out, lse), as memory has it between calls, so that it makes no difference to
 * the bits in how many calls the blocks come. A block begins with O = out, a sum of 1 and lse as the reference of
 * the exponentials (or with 0, 0, -inf), and ends with out = O / sum. The reference moves only when a maximum has
 * grown by more than GROW: O is seldom rescaled. All of that is decided row by row, and tiles are counted from the
 * first key of a block on: a row's bits are its own.
 *
 * A block that is to be dropped for a row is noticed when O holds some of it already. It takes a key or a query
 * that is not finite or huge to get there: before such a block (MHA_WILD) the state goes to out and comes back
 * from there.
 */
#include <cuda_bf16.h>

#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/mha_state.cuh"

/* ---- a tile ------------------------------------------------------------------------------------ */

/* A descriptor further on: only the low word counts addresses, which never carry. */
static __device__ __forceinline__ uint64_t further(uint64_t d, uint32_t by)
{
    return (d & 0xffffffff00000000ull) | (uint32_t)((uint32_t)d + by);
}

template <class F>
static __device__ __forceinline__ void scores_issue(float (&s)[F::STEP / 2], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int c = 0; c < place<F>::Q_COLS; c++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint64_t a = further(q, c * (Q_COL / 16) + 2 * j),
                           b = further(k, c * (F::KEY_COL / 16) + 2 * j);
            if constexpr (F::STEP == 128)
                wgmma_ss128(s, a, b, c + j > 0);
            else
                wgmma_ss64(s, a, b, c + j > 0);
        }
}

template <class F>
static __device__ __forceinline__ void values_issue(float (&o)[F::VDIM / 2],
                                                    const uint32_t (&w)[F::STEP / 4], uint64_t v)
{
#pragma unroll
    for (int j = 0; j < F::STEP / 16; j++) {
        const uint64_t b = further(v, j / 4 * (F::VDIM / 64 * 8192 / 16) + 128 * (j % 4));
        if constexpr (F::VDIM == 128)
            wgmma_rs128_trans<0>(o, &w[4 * j], b);
        else
            wgmma_rs256_trans(o, &w[4 * j], b);
    }
}

/* Base-2 exponents of scores under a reference. f s - ref in one rounding is exact about a reference that is itself
 * rounded, but where 2^-24 of it is no small number: then the product is rounded first, so that the largest is 0. Only
 * wild blocks get there. */
template <int N>
static __device__ __forceinline__ void exponents(float (&s)[N], float f, float rx, float ry,
                                                 int flag)
{
    float fx = f, fy = f;
    if (flag & MHA_WILD) {
        const bool far_x = fabsf(rx) > 0x1p26f, far_y = fabsf(ry) > 0x1p26f;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i % 4 < 2 ? far_x : far_y)
                s[i] = __fsub_rn(__fmul_rn(s[i], f), i % 4 < 2 ? rx : ry);
        fx = far_x ? 1.0f : f, fy = far_y ? 1.0f : f;
        rx = far_x ? 0.0f : rx, ry = far_y ? 0.0f : ry;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        s[i] = i % 4 < 2 ? fmaf(s[i], fx, -rx) : fmaf(s[i], fy, -ry);
}

/* Scores of a tile, of whose keys the thread's rows attend nx and ny, to weights in their place. Returns what the sums
 * so far are to be multiplied by. */
template <class F>
static __device__ __forceinline__ two weights(consumer<F> &c, float (&s)[F::STEP / 2], float f,
                                              bool whole, int nx, int ny, int flag)
{
    if (!whole) {
#pragma unroll
        for (int j = 0; j < F::STEP / 8; j++) {
            const int k = 8 * j + c.lane % 4 * 2;
            s[4 * j] = k < nx ? s[4 * j] : NEG_INF;
            s[4 * j + 1] = k + 1 < nx ? s[4 * j + 1] : NEG_INF;
            s[4 * j + 2] = k < ny ? s[4 * j + 2] : NEG_INF;
            s[4 * j + 3] = k + 1 < ny ? s[4 * j + 3] : NEG_INF;
        }
    }
    two most = rows_max(s);
    most.x *= f;
    most.y *= f;
    const two alpha = refs_move(c.ref, most);
    const float sx = ref_finite(c.ref.x), sy = ref_finite(c.ref.y);
    float lx = 0.0f, ly = 0.0f;
    exponents(s, f, sx, sy, flag);
#pragma unroll
    for (int j = 0; j < F::STEP / 8; j++) {
        s[4 * j] = exp2_approx(s[4 * j]);
        s[4 * j + 1] = exp2_approx(s[4 * j + 1]);
        s[4 * j + 2] = exp2_approx(s[4 * j + 2]);
        s[4 * j + 3] = exp2_approx(s[4 * j + 3]);
        lx += s[4 * j] + s[4 * j + 1];
        ly += s[4 * j + 2] + s[4 * j + 3];
    }
    c.l.x = fmaf(c.l.x, alpha.x, lx);
    c.l.y = fmaf(c.l.y, alpha.y, ly);
    return alpha;
}

template <int N>
static __device__ __forceinline__ void weights_pack(uint32_t (&w)[N], const float (&s)[2 * N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const __nv_bfloat162 v = __floats2bfloat162_rn(s[2 * i], s[2 * i + 1]);
        w[i] = *(const uint32_t *)&v;
    }
}

/* ---- a unit ------------------------------------------------------------------------------------ */

/* A place is free when nobody of the pair reads it: each block's copies go to both. */
template <class F, int PAIR>
static __device__ __forceinline__ void free_arrive(const consumer<F> &c, uint32_t bar)
{
    __syncwarp();
    if constexpr (PAIR == 1) {
        if (c.lane == 0)
            mbar_arrive(c.smem + bar);
    } else {
        if (c.lane < PAIR)
            mbar_arrive_at(c.smem + bar, c.lane);
    }
}

#define PARITY(n) ((n) / RING & 1)
#define PLACE(n)  ((n) % RING)

static __device__ __forceinline__ int flags_read(const mha_params &p, int head, int block)
{
    return p.flags[(int64_t)head * p.n_block + block] |
           (p.flags[(int64_t)p.n_head * p.n_block + block] & MHA_WILD);
}

/* By a warp: whether one of a head's first n blocks is wild. */
static __device__ __forceinline__ bool flags_any(const mha_params &p, int head, int n, int lane)
{
    int f = 0;
    for (int b = lane; b < n; b += 32)
        f |= flags_read(p, head, b);
    return __any_sync(~0u, (f & MHA_WILD) != 0);
}

/* The flag of a block of the unit. */
template <class F>
static __device__ __forceinline__ int flag_of(const mha_params &p, const consumer<F> &c, int block)
{
    return (c.look ? flags_read(p, c.head, block) : MHA_BLOCK) | c.wild;
}

/* Tiles n, n + 1, ... of this block of threads are the unit's. */
template <class F, int PAIR>
static __device__ __forceinline__ void unit_attend(const mha_params &p, consumer<F> &c, int n_tile,
                                                   uint32_t n)
{
    typedef place<F> P;
    float s[F::STEP / 2];
    const uint64_t q = wgmma_tile(c.smem + P::AT_Q + c.group * P::Q_BYTES);
    int flag = flag_of(p, c, 0);
    mbar_wait(c.smem + P::AT_K_FULL + 8 * PLACE(n), PARITY(n));
    wgmma_fence();
    scores_issue<F>(s, q, wgmma_tile(c.smem + P::AT_K + PLACE(n) * F::KEY_BYTES));
    wgmma_commit();
    wgmma_wait<0>();
    regs_pin(s);
    free_arrive<F, PAIR>(c, P::AT_K_FREE + 8 * PLACE(n));
    two alpha = weights(c, s, p.scale_log2, c.least >= F::STEP, c.nx, c.ny, flag);
    scale(c.o, alpha);
    weights_pack(c.w, s);
    for (int t = 1; t < n_tile; t++, n++) {
        const uint32_t k_at = PLACE(n + 1), v_at = PLACE(n);
        const int key0 = t * F::STEP;
        uint64_t k = wgmma_tile(c.smem + P::AT_K + k_at * F::KEY_BYTES);
        uint64_t v = wgmma_tile_trans(c.smem + P::AT_V + v_at * F::VALUE_BYTES);
        mbar_wait(c.smem + P::AT_K_FULL + 8 * k_at, PARITY(n + 1));
        wgmma_fence();
        scores_issue<F>(s, q, k);
        wgmma_commit();
        mbar_wait(c.smem + P::AT_V_FULL + 8 * v_at, PARITY(n));
        wgmma_fence();
        values_issue<F>(c.o, c.w, v);
        wgmma_commit();
        const bool begins = t % F::BLOCK_TILES == 0;
        two inv = {1.0f, 1.0f};
        if (begins) {
            inv = block_end(p, c, key0 - MHA_BLOCK, flag);
            flag = flag_of(p, c, t / F::BLOCK_TILES);
        }
        wgmma_wait<1>();
        regs_pin(s);
        free_arrive<F, PAIR>(c, P::AT_K_FREE + 8 * k_at);
        alpha =
            weights(c, s, p.scale_log2, c.least >= key0 + F::STEP, c.nx - key0, c.ny - key0, flag);
        wgmma_wait<0>();
        regs_pin(c.o);
        free_arrive<F, PAIR>(c, P::AT_V_FREE + 8 * v_at);
        if (begins) {
            scale(c.o, inv);
            if (flag & MHA_WILD)
                rows_keep(p, c);
        }
        if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f))
            scale(c.o, alpha);
        weights_pack(c.w, s);
    }
    mbar_wait(c.smem + P::AT_V_FULL + 8 * PLACE(n), PARITY(n));
    wgmma_fence();
    values_issue<F>(c.o, c.w, wgmma_tile_trans(c.smem + P::AT_V + PLACE(n) * F::VALUE_BYTES));
    wgmma_commit();
    wgmma_wait<0>();
    regs_pin(c.o);
    free_arrive<F, PAIR>(c, P::AT_V_FREE + 8 * PLACE(n));
    const two inv = block_end(p, c, (n_tile - 1) / F::BLOCK_TILES * MHA_BLOCK, flag);
    scale(c.o, inv);
}

template <class F, int PAIR>
static __device__ __forceinline__ void units_attend(const mha_params &p, uint32_t smem,
                                                    uint32_t rank)
{
    consumer<F> c;
    c.smem = smem;
    c.group = __shfl_sync(~0u, threadIdx.x / GROUP, 0); /* uniform, and known to be */
    c.warp = threadIdx.x % GROUP / 32;
    c.lane = threadIdx.x % 32;
    uint32_t n = 0;
    FOR_UNITS(u)
    {
        unit_measure<F, PAIR>(p, u, c.lane);
        const int row0 = u.row0 + (int)rank * MHA_ROWS + 64 * c.group;
        c.head = u.head;
        c.row = row0 + 16 * c.warp + c.lane / 4;
        c.nx = c.row < p.n_row ? row_len(p, c.row) : 0;
        c.ny = c.row + 8 < p.n_row ? row_len(p, c.row + 8) : 0;
        int least = p.n_key;
        for (int r = c.lane; r < 64; r += 32)
            if (row0 + r < p.n_row)
                least = min(least, row_len(p, row0 + r));
        c.least = __reduce_min_sync(~0u, least);
        state_load(p, c);
        if (u.n_tile > 0) {
            bar_sync(BAR_GROUP + c.group, GROUP); /* the queries before have been read by all */
            c.wild = queries_load(p, c, row0);
            c.look = flags_any(p, c.head, (u.n_tile - 1) / F::BLOCK_TILES + 1, c.lane);
            unit_attend<F, PAIR>(p, c, u.n_tile, n);
        }
        state_store(p, c);
        n += u.n_tile;
    }
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

template <class F, int PAIR>
static __global__ void __launch_bounds__(THREADS, 1) mha_main(const __grid_constant__ mha_params p)
{
    typedef place<F> P;
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t smem = ptx_shared(raw), rank = PAIR > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) {
            mbar_init(smem + P::AT_K_FULL + 8 * i, 1);
            mbar_init(smem + P::AT_V_FULL + 8 * i, 1);
            mbar_init(smem + P::AT_K_FREE + 8 * i, PAIR * CONSUMERS / 32);
            mbar_init(smem + P::AT_V_FREE + 8 * i, PAIR * CONSUMERS / 32);
        }
        mbar_init_fence();
    }
    grid_wait();
    if constexpr (PAIR > 1)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<REGS_COPIER>();
        if (threadIdx.x / 32 == CONSUMERS / 32)
            tiles_copy<F, PAIR, 0>(p, smem, rank);
        else if (threadIdx.x / 32 == CONSUMERS / 32 + 1)
            tiles_copy<F, PAIR, 1>(p, smem, rank);
        __syncwarp();
    } else {
        regs_take<REGS_CONSUMER>();
        units_attend<F, PAIR>(p, smem, rank);
    }
    if constexpr (PAIR > 1)
        cluster_sync(); /* copies to, and arrivals at, a block that has ended would go astray */
}

/* ---- the op ------------------------------------------------------------------------------------ */

typedef struct lay {
    size_t rope, flags, bytes;
} lay;

template <class F> static lay lay_of(const mha_args *a)
{
    const size_t line = 255, tiles = ((size_t)a->n_key + F::STEP - 1) / F::STEP,
                 heads = (size_t)a->n_head;
    lay l;
    l.rope = heads * tiles * F::TILE_BYTES;
    l.flags = l.rope + tiles * F::ROPE_BYTES;
    const size_t blocks = (tiles + F::BLOCK_TILES - 1) / F::BLOCK_TILES;
    l.bytes = l.flags + (((heads + 1) * blocks * sizeof(int32_t) + line) & ~line) + line;
    return l;
}

static bool is_wide(const mha_args *a)
{
    return a->nope > mha_narrow::NOPE || a->v_dim > mha_narrow::VDIM;
}

static size_t scratch_bytes(const mha_args *a)
{
    return is_wide(a) ? lay_of<mha_wide>(a).bytes : lay_of<mha_narrow>(a).bytes;
}

size_t mha_scratch_sm90(const mha_args *a, const dev_queue *q)
{
    (void)q;
    return scratch_bytes(a);
}

const char *mha_refuses_sm90(const void *args)
{
    const mha_args *a = (const mha_args *)args;
    if (a->type != KVS_DTYPE_BF16)
        return "sm90 takes bf16 queries and keys";
    if (a->nope > mha_wide::NOPE || a->v_dim > mha_wide::VDIM)
        return "sm90 takes up to 192 dims without rope and 256 of values";
    if ((int64_t)a->n_key > 1 << 30 || a->n_head > 65535 ||
        ((int64_t)a->n_key + MHA_BLOCK - 1) / MHA_BLOCK * (a->n_head + 1) > 0x7fffffff)
        return "sm90 takes up to 2^30 keys and, with 512 of them a block, 2^31 blocks of all heads";
    return NULL;
}

template <class F> static mha_params params_of(const mha_args *a)
{
    const lay l = lay_of<F>(a);
    uint8_t *base = (uint8_t *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    mha_params p = {};
    p.n_row = a->n_row;
    p.n_head = a->n_head;
    p.nope = a->nope;
    p.v_dim = a->v_dim;
    p.n_key = a->n_key;
    p.n_block = (a->n_key + MHA_BLOCK - 1) / MHA_BLOCK;
    p.n_tile = (a->n_key + F::STEP - 1) / F::STEP;
    p.first = a->first;
    p.q = (const uint16_t *)a->q;
    p.q_stride_row = a->q_stride_row;
    p.q_stride_head = a->q_stride_head;
    p.q_wide =
        a->nope == F::NOPE && cuda_aligned16(a->q) && (a->q_stride_row | a->q_stride_head) % 8 == 0;
    p.scale_log2 = a->softmax_scale * LOG2E;
    p.kv = a->kv;
    p.kv_stride_key = a->kv_stride_key;
    p.kv_stride_head = a->kv_stride_head;
    p.kv_wide = cuda_aligned16(a->kv) && (a->kv_stride_key | a->kv_stride_head | a->nope) % 4 == 0;
    p.rope = (const uint16_t *)a->rope;
    p.rope_stride = a->rope_stride;
    p.len = a->len;
    p.out = a->out;
    p.out_stride_row = a->out_stride_row;
    p.out_stride_head = a->out_stride_head;
    p.out_wide =
        (uintptr_t)a->out % 8 == 0 && (a->out_stride_row | a->out_stride_head | a->v_dim) % 2 == 0;
    p.lse = a->lse;
    p.n_nan = (unsigned long long *)a->n_nan;
    p.tiles = base;
    p.rope_tiles = base + l.rope;
    p.flags = (int32_t *)(base + l.flags);
    return p;
}

template <class F, int PAIR> static cudaError_t main_launch(const mha_params &p, dev_queue *q)
{
    static uint64_t shared_set;
    cuda_shared_max(mha_main<F, PAIR>, place<F>::BYTES, &shared_set);
    const int64_t most = q->n_sm > PAIR ? q->n_sm / PAIR : 1,
                  n = (int64_t)p.n_head * unit_parts(p, PAIR);
    return launch_kernel(mha_main<F, PAIR>, dim3((unsigned)(n < most ? n : most) * PAIR), THREADS,
                         place<F>::BYTES, true, p, cuda_stream(q), PAIR);
}

template <class F> static cudaError_t attend(const mha_args *a, dev_queue *q)
{
    const mha_params p = params_of<F>(a);
    const cudaError_t e = p.n_tile > 0 ? mha_pack_launch<F>(p, cuda_stream(q)) : cudaSuccess;
    if (e != cudaSuccess)
        return e;
    return a->n_row > MHA_ROWS && q->n_sm >= 2 ? main_launch<F, 2>(p, q) : main_launch<F, 1>(p, q);
}

void mha_sm90(const mha_args *a, dev_queue *q)
{
    if (cuda_refused(q, mha_refuses_sm90(a)) || a->n_row == 0)
        return;
    if (a->scratch_bytes < scratch_bytes(a)) {
        dev_queue_fail(q, KVS_INVALID, "mha: scratch is smaller than mha_scratch says");
        return;
    }
    const cudaError_t e = is_wide(a) ? attend<mha_wide>(a, q) : attend<mha_narrow>(a, q);
    dev_queue_fail_cuda(q, (int)e, "mha");
}
