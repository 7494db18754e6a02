/* attn_sparse_sm90.cu - sparse attention over packed keys, the main kernel (attn_sparse.cuh).
 *
 * Keys are the A operand of both products, straight from the cache's bytes: S^T = K Q^T has 64 keys on M
 * and the heads on N, O^T = V^T P^T has 64 value dims on M. So few heads cost few products, and a key is
 * never written back to shared memory in another format: FP8 codes become fp16 fragments in registers
 * (exact for scales that are powers of two), once for S and once for O. Dims are free to go through a
 * product in any order: a lane takes 16 consecutive bytes of a row, and the query tile is laid out to
 * match (query_store).
 *
 * Thread block: two warp groups of consumers and four warps that copy keys into a ring of tiles. Consumer
 * group g scores the even (0) or odd (1) tiles; both meet for the maximum and for P, then each adds V^T P^T of
 * both tiles for its half of the 512 value dims.
 *
 * The reference of the exponentials moves only when the maximum has grown by more than GROW: P stays below
 * 2^GROW, which fp16 and bf16 hold, and the sums are seldom rescaled. It is a function of the head's own
 * scores.
 */
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/attn_sparse_tile.cuh"

/* ---- division of work ---------------------------------------------------------------------- */

/* Every thread of the block: the walk of part `part`, and the total cost. */
static __device__ sparse_walk walk_begin(const sparse_params &p, int part, int64_t *scan,
                                         int64_t *total)
{
    const int per = (p.n_item + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * per, p.n_item), end = min(begin + per, p.n_item);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t own = 0;
    for (int i = begin; i < end; i++)
        own += sparse_cost(p, p.count[i]);
    int64_t sum = own;
    for (int d = 1; d < 32; d *= 2) {
        const int64_t v = __shfl_up_sync(~0u, sum, d);
        if (lane >= d)
            sum += v;
    }
    if (lane == 31)
        scan[warp] = sum;
    __syncthreads();
    int64_t before = 0, all = 0;
    for (int i = 0; i < N_WARP; i++) {
        before += i < warp ? scan[i] : 0;
        all += scan[i];
    }
    sum += before;
    const int64_t n_part = all < p.n_part ? all : p.n_part;
    const int64_t lo = part < n_part ? all * part / n_part : all,
                  hi = part < n_part ? all * (part + 1) / n_part : all;
    int64_t at = sum - own;
    if (lo >= at && lo < sum) {
        int i = begin;
        for (int64_t c; at + (c = sparse_cost(p, p.count[i])) <= lo; at += c)
            i++;
        scan[N_WARP] = i;
        scan[N_WARP + 1] = at;
    }
    if (threadIdx.x == 0 && lo == all)
        scan[N_WARP] = p.n_item;
    __syncthreads();
    sparse_walk w;
    w.item = (int32_t)scan[N_WARP];
    w.at = scan[N_WARP + 1];
    w.lo = lo;
    w.hi = hi;
    *total = all;
    return w;
}

/* Asks for the queries of a piece, so that they are near when its turn comes: thread i of
 * COPIERS. */
template <int N>
static __device__ void queries_ask(const sparse_params &p, int64_t row, int head_group, int i)
{
    const int head0 = head_group * p.group_heads, n_head = min(p.group_heads, p.n_head - head0);
    for (int j = i; j < n_head * 9; j += COPIERS)
        prefetch_l2(p.q + row * p.q_stride_row + (int64_t)(head0 + j / 9) * p.q_stride_head +
                    j % 9 * 64);
}

/* ---- keys ---------------------------------------------------------------------------------- */

/* Warps 8 to 11, a quarter of a tile each: copies the tiles of every piece into the ring, 16 bytes a lane: a
 * row's first 32 chunks by one instruction, what is left of several rows together. Rows past the last key
 * become zeros: the products take 64 keys whatever is there, and NaN must not meet a weight of 0. */
template <int N, int FMT>
static __device__ void keys_run(const sparse_params &p, sparse_walk w, uint32_t smem,
                                int head_group)
{
    using L = layout<N, FMT>;
    constexpr int whole = L::key_bytes / 512, rest = L::key_bytes / 16 - 32 * whole;
    const int lane = threadIdx.x % 32, first = (threadIdx.x / 32 - 8) * COPY_ROWS;
    const uint32_t full = smem + L::bar_at, empty = full + 8 * L::stages;
    uint32_t n_tile = 0;
    sparse_unit u;
    while (sparse_next(w, p, u)) {
        const int64_t row = u.item / p.item_per_row;
        const int32_t *ids = p.ids + row * p.ids_stride + u.begin;
        const int last = min(u.n_key, u.b1 * SPARSE_TILE), key = first + lane % COPY_ROWS;
        int id = u.b0 * SPARSE_TILE + key < last ? ids[u.b0 * SPARSE_TILE + key] : 0;
        if (u.b1 > u.b0)
            queries_ask<N>(p, row, head_group, threadIdx.x - CONSUMERS);
        for (int b = u.b0; b < u.b1; b++, n_tile++) {
            const int nv = last - b * SPARSE_TILE, stage = n_tile % L::stages;
            const uint64_t at = (uint64_t)(p.kv + (int64_t)(id / SPARSE_TILE) * p.page_stride +
                                           (int64_t)(id % SPARSE_TILE) * p.row_stride);
            const int next = (b + 1) * SPARSE_TILE + key;
            id = next < last ? ids[next] : 0;
            const uint32_t tile = smem + L::ring + stage * L::tile + first * L::row;
            mbar_wait(empty + 8 * stage, (n_tile / L::stages & 1) ^ 1);
#pragma unroll 8
            for (int r = 0; r < COPY_ROWS; r++) {
                const uint8_t *from = (const uint8_t *)__shfl_sync(~0u, at, r) + 16 * lane;
                const int bytes = first + r < nv ? 16 : 0;
#pragma unroll
                for (int i = 0; i < whole; i++)
                    copy16(tile + r * L::row + 512 * i + 16 * lane, from + 512 * i, bytes);
            }
#pragma unroll
            for (int i = 0; i < (rest * COPY_ROWS + 31) / 32; i++) {
                const int j = 32 * i + lane, r = j / rest, c = 32 * whole + j % rest;
                const uint8_t *from = (const uint8_t *)__shfl_sync(~0u, at, r) + 16 * c;
                if (r < COPY_ROWS)
                    copy16(tile + r * L::row + 16 * c, from, first + r < nv ? 16 : 0);
            }
            copy16_arrive(full + 8 * stage);
        }
    }
}

/* ---- queries ------------------------------------------------------------------------------- */

static __device__ uint4 query_load(const sparse_params &p, const uint16_t *q, int chunk)
{
    if (p.q_wide)
        return __ldg((const uint4 *)q + chunk);
    uint32_t w[4];
    for (int i = 0; i < 4; i++)
        w[i] = q[chunk * 8 + 2 * i] | (uint32_t)q[chunk * 8 + 2 * i + 1] << 16;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

static __device__ __forceinline__ uint32_t query_word(uint32_t w, float mul, bool f16)
{
    const float lo = __uint_as_float(w << 16) * mul, hi = __uint_as_float(w & 0xffff0000u) * mul;
    if (f16) {
        const half2 h = __floats2half2_rn(lo, hi);
        return *(const uint32_t *)&h;
    }
    const __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
    return *(const uint32_t *)&b;
}

/* Largest magnitude among eight bf16 values, as bits. */
static __device__ __forceinline__ uint32_t query_top(uint4 v)
{
    const uint32_t m = 0x7fff7fffu;
    const uint32_t top = __vmaxu2(__vmaxu2(v.x & m, v.y & m), __vmaxu2(v.z & m, v.w & m));
    return max(top & 0xffffu, top >> 16);
}

/* Where a lane's words of a query go: eight consecutive dims (a chunk) of a head, in the order in which
 * score_load gives the keys' dims to the product. There a lane t of four has a run of consecutive bytes
 * (32 dims of FP8 codes, 16 of other values), and every step of 16 takes four of its values, two at k = 2t
 * and two at k = 2t + 8. A warp's heads agree in their last three bits, which swizzle the tile. */
template <int N, int FMT> struct query_place {
    uint32_t base[3]; /* of chunks lane, lane + 32, lane + 64 */
    uint32_t word[4];

    __device__ __forceinline__ query_place(uint32_t q, int lane, int warp)
    {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int chunk = lane + 32 * i;
            const bool codes = FMT == SPARSE_FP8 && i < 2;
            const int atom = codes ? chunk / 16 * 2 + chunk % 4 / 2 : chunk / 8;
            const int t = codes ? chunk % 16 / 4 : chunk % 8 / 2;
            base[i] = q + atom * N * 128 + warp * 128 + 4 * t;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = ((lane % 2 * 4 + i) ^ warp) << 4;
    }
};

/* The queries of a piece into shared memory, by the consumers: a warp takes every eighth head, four at a
 * time. With FP8 keys a head is scaled by a power of two so that its largest value lies in [128, 256): fp16
 * then holds every bit that counts, and the factor goes back into the scores. */
template <int N, int FMT>
static __device__ __forceinline__ void queries_load(const sparse_params &p, uint32_t smem,
                                                    int64_t row, int head0, int n_head)
{
    using L = layout<N, FMT>;
    constexpr int BATCH = N / 8 < 4 ? N / 8 : 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const query_place<N, FMT> place(smem + L::q, lane, warp);
    const uint16_t *q = p.q + row * p.q_stride_row + (int64_t)(head0 + warp) * p.q_stride_head;
#pragma unroll 1
    for (int first = 0; first < N; first += 8 * BATCH) {
        uint4 v[BATCH][3];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const bool has = first + 8 * k + warp < n_head;
            const uint16_t *head = q + (first + 8 * k) * p.q_stride_head;
#pragma unroll
            for (int i = 0; i < 3; i++)
                v[k][i] = has && (i < 2 || lane < 8) ? query_load(p, head, lane + 32 * i)
                                                     : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int h = first + 8 * k + warp;
            const uint32_t amax = __reduce_max_sync(
                ~0u, max(max(query_top(v[k][0]), query_top(v[k][1])), query_top(v[k][2])));
            int e = (int)(amax >> 7) - 127 - 7;
            e = FMT != SPARSE_FP8 || amax == 0 || amax >= 0x7f80 ? 0 : max(e, -120);
            const float mul = __uint_as_float((uint32_t)(127 - e) << 23);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                if (i == 2 && lane >= 8)
                    continue;
                const bool f16 = FMT == SPARSE_FP8 && i < 2;
                const uint32_t at = place.base[i] + (first + 8 * k) * 128;
                sts32(at + place.word[0], query_word(v[k][i].x, mul, f16));
                sts32(at + place.word[1], query_word(v[k][i].y, mul, f16));
                sts32(at + place.word[2], query_word(v[k][i].z, mul, f16));
                sts32(at + place.word[3], query_word(v[k][i].w, mul, f16));
            }
            if (lane == 0) {
                float s = h < n_head ? p.scale_log2 : 0.0f;
                if (h < n_head && p.q_scale != NULL)
                    s *= p.q_scale[row * p.n_head + head0 + h];
                sts_f(smem + L::qs_at + h * 4, s * __uint_as_float((uint32_t)(127 + e) << 23));
            }
        }
    }
    fence_async();
    named_barrier<BAR_SUM, CONSUMERS>();
}

/* ---- softmax ------------------------------------------------------------------------------- */

/* Floats as integers in the same order. */
static __device__ __forceinline__ int float_order(float x)
{
    const int i = __float_as_int(x);
    return i >= 0 ? i : i ^ 0x7fffffff;
}

static __device__ __forceinline__ float order_float(int i)
{
    return __int_as_float(i >= 0 ? i : i ^ 0x7fffffff);
}

struct op_max {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return fmaxf(a, b);
    }
};
struct op_sum {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return a + b;
    }
};

/* One step: with the lane at distance D, of n values each keeps side; a single one both keep. */
template <int D, int n, class OP, int M>
static __device__ __forceinline__ int lanes_step(float (&v)[M], int lane)
{
    if (n == 1) {
        v[0] = OP::of(v[0], __shfl_xor_sync(~0u, v[0], D));
        return 0;
    }
    const bool up = lane & D;
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
        const float give = up ? v[i] : v[i + n / 2], keep = up ? v[i + n / 2] : v[i];
        v[i] = OP::of(keep, __shfl_xor_sync(~0u, give, D));
    }
    return up ? n / 2 : 0;
}

/* Over the eight lanes that hold other keys of the same heads: v[i] for the thread's N / 4 heads. The
 * result for heads [at, at + N / 32) of those ends in v[0..N / 32); `at` is returned. With N = 16 two
 * lanes end with the same head. */
template <int N, class OP>
static __device__ __forceinline__ int lanes_reduce(float (&v)[N / 4], int lane)
{
    int at = lanes_step<16, N / 4, OP>(v, lane);
    at += lanes_step<8, N / 8, OP>(v, lane);
    return at + lanes_step<4, (N >= 32 ? N / 16 : 1), OP>(v, lane);
}

/* The head of a thread's i-th value: column pairs 2t, 2t + 1 of every eight. */
static __device__ __forceinline__ int head_of(int i, int t)
{
    return i / 2 * 8 + 2 * t + i % 2;
}

/* What one consumer thread keeps through a piece. */
template <int N> struct state {
    float o[4][N / 2]; /* O^T: four tiles of 64 value dims */
    float l[N / 4];    /* row sums over this thread's keys */
};

/* Scores to P in shared memory; both groups meet twice. `next_init`: the piece ends with this pair. Returns
 * the reference of head threadIdx.x. */
template <int N, int FMT>
static __device__ __forceinline__ float softmax(state<N> &st, float (&s)[N / 2], uint32_t smem,
                                                int group, int warp, int lane, int nv, bool fits,
                                                int cur, bool next_init)
{
    using L = layout<N, FMT>;
    const int t = lane % 4, key = 16 * warp + lane / 4;
    const bool has0 = key < nv, has1 = key + 8 < nv;
    const float poison = fits ? 0.0f : __int_as_float(0x7fc00000);
    const uint32_t max_at = smem + L::max_at + cur * N * 4, ref_at = smem + L::ref_at + cur * N * 4;
    float m[N / 4];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 f = lds_f2(smem + L::qs_at + (8 * n + 2 * t) * 4);
        s[4 * n] = has0 ? fmaf(s[4 * n], f.x, poison) : NEG_INF;
        s[4 * n + 1] = has0 ? fmaf(s[4 * n + 1], f.y, poison) : NEG_INF;
        s[4 * n + 2] = has1 ? fmaf(s[4 * n + 2], f.x, poison) : NEG_INF;
        s[4 * n + 3] = has1 ? fmaf(s[4 * n + 3], f.y, poison) : NEG_INF;
        m[2 * n] = fmaxf(s[4 * n], s[4 * n + 2]);
        m[2 * n + 1] = fmaxf(s[4 * n + 1], s[4 * n + 3]);
    }
    if (nv > 0) {
        const int at = lanes_reduce<N, op_max>(m, lane);
#pragma unroll
        for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
            atoms_max(max_at + head_of(at + i, t) * 4, float_order(m[i]));
    }
    named_barrier<BAR_MAX, CONSUMERS>();
    bool moved = false;
    float alpha[N / 4];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const int2 top = lds_i2(max_at + (8 * n + 2 * t) * 4);
        const float2 old = lds_f2(ref_at + (8 * n + 2 * t) * 4);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float mx = order_float(e ? top.y : top.x), was = e ? old.y : old.x;
            const float ref = mx > was + GROW ? mx : was;
            const float sub = ref == NEG_INF ? 0.0f : ref;
            alpha[2 * n + e] = ref == was ? 1.0f : sparse_exp2(was - ref);
            moved = moved || ref != was;
            s[4 * n + e] = sparse_exp2(s[4 * n + e] - sub);
            s[4 * n + 2 + e] = sparse_exp2(s[4 * n + 2 + e] - sub);
        }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            st.l[i] *= alpha[i];
#pragma unroll
            for (int mt = 0; mt < 4; mt++) {
                st.o[mt][i / 2 * 4 + i % 2] *= alpha[i];
                st.o[mt][i / 2 * 4 + i % 2 + 2] *= alpha[i];
            }
        }
    }
    uint32_t lo[N / 8], hi[N / 8];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        st.l[2 * n] += s[4 * n] + s[4 * n + 2];
        st.l[2 * n + 1] += s[4 * n + 1] + s[4 * n + 3];
        if (FMT == SPARSE_FP8) {
            const half2 a = __floats2half2_rn(s[4 * n], s[4 * n + 1]),
                        b = __floats2half2_rn(s[4 * n + 2], s[4 * n + 3]);
            lo[n] = *(const uint32_t *)&a;
            hi[n] = *(const uint32_t *)&b;
        } else {
            const __nv_bfloat162 a = __floats2bfloat162_rn(s[4 * n], s[4 * n + 1]);
            const __nv_bfloat162 b = __floats2bfloat162_rn(s[4 * n + 2], s[4 * n + 3]);
            lo[n] = *(const uint32_t *)&a;
            hi[n] = *(const uint32_t *)&b;
        }
    }
    if (nv > 0) {
        /* heads become rows of the tile: 16-byte chunk 2 warp + 0, 1 holds this warp's keys */
        const int head = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        const uint32_t at =
            smem + L::p + group * L::p_bytes + head * 128 + ((chunk ^ (head & 7)) << 4);
#pragma unroll
        for (int n = 0; n < N / 8; n += 2)
            stmatrix4_trans(at + n * 8 * 128, lo[n], hi[n], lo[n + 1], hi[n + 1]);
    }
    float ref = 0.0f;
    if (threadIdx.x < N) {
        const int top = (int)lds32(max_at + threadIdx.x * 4);
        const float mx = order_float(top), was = lds_f(ref_at + threadIdx.x * 4);
        ref = mx > was + GROW ? mx : was;
        const int other = cur ? -N * 4 : N * 4;
        sts32(max_at + other + threadIdx.x * 4, (uint32_t)(next_init ? float_order(NEG_INF) : top));
        sts_f(ref_at + other + threadIdx.x * 4, next_init ? NEG_INF : ref);
    }
    fence_async();
    named_barrier<BAR_P, CONSUMERS>();
    return ref;
}

/* ---- values -------------------------------------------------------------------------------- */

/* O^T += V^T P^T of one tile; complete when it returns. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void values(state<N> &st, uint32_t smem, uint32_t tile, int which,
                                              int slot, int group, int warp, int lane)
{
    using L = layout<N, FMT>;
    constexpr ptx_operand TYPE = FMT == SPARSE_FP8 ? OPERAND_F16 : OPERAND_BF16;
    const uint64_t p = wgmma_tile(smem + L::p + which * L::p_bytes);
    uint32_t f[2][2][4];
    raw_value r;
    value_load<N, FMT, FAST>(r, smem, tile, slot, 0, 0, group, warp, lane);
#pragma unroll
    for (int mt = 0; mt < 4; mt++)
        regs_pin(st.o[mt]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int kk = i / 2, side = i % 2;
        if (i >= 2)
            wgmma_wait<1>();
        value_fragments<FMT, FAST>(f[side], r);
        regs_pin(f[side]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; j++)
            wgmma_rs<N, TYPE>(st.o[2 * side + j], f[side][j], p + 2 * kk, 1);
        wgmma_commit();
        if (i < 7)
            value_load<N, FMT, FAST>(r, smem, tile, slot, (i + 1) / 2, (i + 1) % 2, group, warp,
                                     lane);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int mt = 0; mt < 4; mt++)
        regs_pin(st.o[mt]);
}

/* ---- results ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void out_pair(void *base, bool bf16, bool wide, int64_t at,
                                                float a, float b)
{
    if (!bf16) {
        float *o = (float *)base + at;
        if (wide)
            *(float2 *)o = make_float2(a, b);
        else
            o[0] = a, o[1] = b;
        return;
    }
    uint16_t *o = (uint16_t *)base + at;
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    if (wide)
        *(uint32_t *)o = *(const uint32_t *)&v;
    else
        o[0] = *(const uint16_t *)&v.x, o[1] = *(const uint16_t *)&v.y;
}

static __device__ __forceinline__ void out_one(void *base, bool bf16, int64_t at, float a)
{
    if (bf16)
        ((__nv_bfloat16 *)base)[at] = __float2bfloat16_rn(a);
    else
        ((float *)base)[at] = a;
}

/* Where a piece's results go. */
struct target {
    void *out;
    float *lse; /* of the group's first head */
    int64_t stride_head;
    bool bf16, wide, partial;
};

static __device__ target target_of(const sparse_params &p, const sparse_unit &u, int part,
                                   int head0)
{
    target t;
    const bool cut = !p.whole && u.nb > 0 && (u.b0 > 0 || u.b1 < u.nb);
    if (p.whole || cut) {
        const int64_t slot = p.whole ? u.item : 2 * (int64_t)part + (u.b0 == 0);
        t.out = p.part_out + (slot * p.n_head + head0) * SPARSE_VDIM;
        t.lse = p.part_lse + slot * p.n_head + head0;
        t.stride_head = SPARSE_VDIM;
        t.bf16 = false;
        t.wide = true;
    } else {
        const int64_t at = u.item * p.out_stride_row + head0 * p.out_stride_head;
        t.out = (char *)p.out + at * (p.out_bf16 ? 2 : 4);
        t.lse = p.lse + (int64_t)u.item * p.n_head + head0;
        t.stride_head = p.out_stride_head;
        t.bf16 = p.out_bf16;
        t.wide = p.out_wide;
    }
    t.partial = cut;
    return t;
}

/* An item without keys: (0, -inf); a partial needs the lse alone. */
static __device__ void empty_write(const sparse_params &p, const target &t, int n_head)
{
    if (threadIdx.x < n_head)
        t.lse[threadIdx.x] = NEG_INF;
    if (p.whole)
        return;
    for (int h = 0; h < n_head; h++)
        out_pair(t.out, t.bf16, t.wide, h * t.stride_head + 2 * threadIdx.x, 0.0f, 0.0f);
}

/* The thread's values of every head, normalised. WIDE: 0 one by one, 1 pairs of bf16, 2 pairs of f32. */
template <int N, int FMT, int WIDE>
static __device__ __forceinline__ void results_store(const state<N> &st, const target &t,
                                                     uint32_t smem, int dim, int quad, int n_head)
{
    using L = layout<N, FMT>;
    const int64_t at = 2 * quad * t.stride_head + dim;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int h = head_of(i, quad), r = i / 2 * 4 + i % 2;
        if (h >= n_head)
            continue;
        const float f = lds_f(smem + L::inv_at + h * 4);
        const int64_t o = at + (i / 2 * 8 + i % 2) * t.stride_head;
#pragma unroll
        for (int mt = 0; mt < 4; mt++) {
            const float a = f == 0.0f ? 0.0f : st.o[mt][r] * f,
                        b = f == 0.0f ? 0.0f : st.o[mt][r + 2] * f;
            if (WIDE == 2) {
                *(float2 *)((float *)t.out + o + 64 * mt) = make_float2(a, b);
            } else if (WIDE == 1) {
                const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
                *(__nv_bfloat162 *)((uint16_t *)t.out + o + 64 * mt) = v;
            } else {
                out_one(t.out, t.bf16, o + 64 * mt, a);
                out_one(t.out, t.bf16, o + 64 * mt + (FMT == SPARSE_FP8 ? 1 : 8), b);
            }
        }
    }
}

/* Row sums over both groups, then lse and the normalised output. */
template <int N, int FMT>
static __device__ __forceinline__ void finish(const sparse_params &p, state<N> &st, const target &t,
                                              uint32_t smem, int group, int warp, int lane,
                                              int n_head, float ref)
{
    using L = layout<N, FMT>;
    if (FMT != SPARSE_FP8) {
        /* an infinite value must not leave as NaN: it makes the row sum NaN, which drops the head */
#pragma unroll
        for (int i = 0; i < N / 4; i++)
#pragma unroll
            for (int mt = 0; mt < 4; mt++) {
                const int r = i / 2 * 4 + i % 2;
                st.l[i] = fmaf(st.o[mt][r], 0.0f, fmaf(st.o[mt][r + 2], 0.0f, st.l[i]));
            }
    }
    const int quad = lane % 4, at = lanes_reduce<N, op_sum>(st.l, lane);
#pragma unroll
    for (int i = 0; i < (N >= 32 ? N / 32 : 1); i++)
        sts_f(smem + L::sum_at + ((4 * group + warp) * N + head_of(at + i, quad)) * 4, st.l[i]);
    named_barrier<BAR_SUM, CONSUMERS>();
    if (threadIdx.x < N) {
        float l = 0.0f;
        for (int i = 0; i < 8; i++)
            l += lds_f(smem + L::sum_at + (i * N + threadIdx.x) * 4);
        const bool bad = !(l < -NEG_INF), none = l == 0.0f;
        sts_f(smem + L::inv_at + threadIdx.x * 4, bad || none ? 0.0f : 1.0f / l);
        if ((int)threadIdx.x < n_head) {
            const float lse2 = none ? NEG_INF : ref + log2f(l);
            const float lse = t.partial ? lse2 : lse2 * 0.693147180559945309f;
            /* a partial passes NaN on: the merge then drops the whole row and counts it once */
            t.lse[threadIdx.x] = bad ? (t.partial ? __int_as_float(0x7fc00000) : NEG_INF) : lse;
            if (bad && !t.partial && p.n_nan != NULL)
                atomicAdd(p.n_nan, 1ull);
        }
    }
    named_barrier<BAR_SUM, CONSUMERS>();
    const int dim = 256 * group + 16 * warp + (FMT == SPARSE_FP8 ? 2 : 1) * (lane / 4);
    if (!t.wide || FMT != SPARSE_FP8)
        results_store<N, FMT, 0>(st, t, smem, dim, quad, n_head);
    else if (t.bf16)
        results_store<N, FMT, 1>(st, t, smem, dim, quad, n_head);
    else
        results_store<N, FMT, 2>(st, t, smem, dim, quad, n_head);
}

/* ---- consumers ----------------------------------------------------------------------------- */

template <int N, int FMT>
static __device__ __forceinline__ void consumers_run(const sparse_params &p, sparse_walk w,
                                                     int64_t total, uint32_t smem, int part,
                                                     int head_group)
{
    using L = layout<N, FMT>;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint32_t full = smem + L::bar_at, empty = full + 8 * L::stages;
    const int head0 = head_group * p.group_heads, n_head = min(p.group_heads, p.n_head - head0);
    uint32_t n_tile = 0, n_pair = 0;
    int2 goes_on = make_int2(-1, 0);
    sparse_unit u;
    while (sparse_next(w, p, u)) {
        const target t = target_of(p, u, part, head0);
        if (u.b1 == 0) {
            empty_write(p, t, n_head);
            continue;
        }
        if (t.partial && u.b0 == 0) /* w.at: the position behind the item */
            goes_on = make_int2(
                u.item, sparse_part_of(w.at - 1, total, (int)min(total, (int64_t)p.n_part)));
        state<N> st = {};
        float ref = 0.0f;
        queries_load<N, FMT>(p, smem, u.item / p.item_per_row, head0, n_head);
        for (int b = u.b0; b < u.b1; b += 2, n_pair++) {
            const int n_in = min(2, u.b1 - b);
            const bool last = b + 2 >= u.b1;
            const int own = b + group;
            const int nv = group < n_in ? min(u.n_key - own * SPARSE_TILE, (int)SPARSE_TILE) : 0;
            float s[N / 2];
            bool fits = true;
            if (nv > 0) {
                const uint32_t i = n_tile + group, tile = smem + L::ring + i % L::stages * L::tile;
                mbar_wait(full + 8 * (i % L::stages), i / L::stages & 1);
                const bool fast =
                    FMT != SPARSE_FP8 ||
                    scales_look<N, FMT>(smem, tile, n_pair % 2 * 2 + group, warp, lane, nv, &fits);
                if (fast)
                    scores<N, FMT, true>(s, smem, tile, warp, lane);
                else
                    scores<N, FMT, false>(s, smem, tile, warp, lane);
            } else {
                for (int i = 0; i < N / 2; i++)
                    s[i] = 0.0f;
            }
            ref = softmax<N, FMT>(st, s, smem, group, warp, lane, nv, fits, n_pair & 1, last);
            for (int j = 0; j < n_in; j++) {
                const uint32_t i = n_tile + j, tile = smem + L::ring + i % L::stages * L::tile;
                const int slot = n_pair % 2 * 2 + j;
                mbar_wait(full + 8 * (i % L::stages), i / L::stages & 1);
                if (FMT != SPARSE_FP8 || lds32(smem + L::fast_at + slot * 4))
                    values<N, FMT, true>(st, smem, tile, j, slot, group, warp, lane);
                else
                    values<N, FMT, false>(st, smem, tile, j, slot, group, warp, lane);
                __syncwarp();
                if (lane == 0)
                    mbar_arrive(empty + 8 * (i % L::stages));
            }
            n_tile += n_in;
        }
        finish<N, FMT>(p, st, t, smem, group, warp, lane, n_head, ref);
    }
    if (threadIdx.x == 0 && p.cut != NULL && head_group == 0)
        p.cut[part] = goes_on;
}

template <int N, int FMT>
__global__ void __launch_bounds__(THREADS, 1)
    attn_sparse_main(const __grid_constant__ sparse_params p)
{
    using L = layout<N, FMT>;
    extern __shared__ uint8_t raw[];
    __shared__ int64_t scan[N_WARP + 2];
    const uint32_t smem = (ptx_shared(raw) + 1023) & ~1023u;
    const int part = blockIdx.x / p.n_group, head_group = blockIdx.x % p.n_group;
    if (threadIdx.x < 2 * N) {
        sts32(smem + L::max_at + threadIdx.x * 4, (uint32_t)float_order(NEG_INF));
        sts_f(smem + L::ref_at + threadIdx.x * 4, NEG_INF);
    }
    if (threadIdx.x == 0) {
        const uint32_t full = smem + L::bar_at;
        for (int i = 0; i < L::stages; i++) {
            mbar_init(full + 8 * i, COPIERS);
            mbar_init(full + 8 * (L::stages + i), CONSUMERS / 32);
        }
        mbar_init_fence();
    }
    grid_wait();
    int64_t total;
    const sparse_walk w = walk_begin(p, part, scan, &total);
    grid_release();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<HELPER_REGS>();
        keys_run<N, FMT>(p, w, smem, head_group);
    } else {
        regs_take<CONSUMER_REGS>();
        consumers_run<N, FMT>(p, w, total, smem, part, head_group);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int N, int FMT>
static cudaError_t main_launch(const sparse_params &p, cudaStream_t stream)
{
    using L = layout<N, FMT>;
    cudaError_t e = cudaFuncSetAttribute(attn_sparse_main<N, FMT>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, L::bytes);
    if (e != cudaSuccess)
        return e;
    return sparse_launch(attn_sparse_main<N, FMT>, dim3(p.n_part * p.n_group), THREADS, L::bytes,
                         true, p, stream);
}

cudaError_t attn_sparse_main_launch(const sparse_params &p, int kind, int n, cudaStream_t stream)
{
    if (kind == SPARSE_BF16)
        return n == 16 ? main_launch<16, SPARSE_BF16>(p, stream)
                       : main_launch<32, SPARSE_BF16>(p, stream);
    return n == 16   ? main_launch<16, SPARSE_FP8>(p, stream)
           : n == 32 ? main_launch<32, SPARSE_FP8>(p, stream)
                     : main_launch<64, SPARSE_FP8>(p, stream);
}
