/* attn_sparse_direct_sm90.cu - sparse attention of FP8 rows in one launch, for few rows (attn_sparse_direct.cuh).
 *
 * The consumers are those of attn_sparse_sm90.cu. A block's sums stay in its shared memory; when all blocks of the
 * cluster have them, each adds up its part of the heads over all blocks, in their order, and writes it: nothing of a row goes through
 * memory twice, and the bits of a result do not depend on who comes first.
 */
#define SMEM_OF_CLUSTER
#include "kern/cuda/attn_send.cuh"
#include "kern/cuda/attn_sparse_direct.cuh"
#include "kern/cuda/attn_sparse_out.cuh"
#include "kern/cuda/attn_sparse_pair.cuh"
#include "kern/cuda/attn_sparse_direct_queries.cuh"
#include "kern/cuda/attn_sparse_results.cuh"
#include "kern/cuda/attn_sparse_smem.cuh"
#include "kern/cuda/launch.cuh"

/* ---- the work ------------------------------------------------------------------------------ */

/* What a block works on. */
struct piece {
    int64_t row;
    int rank, join; /* in its cluster; of the row's clusters */
    int head0, n_head;

    __device__ __forceinline__ explicit piece(const direct_params &p)
    {
        const int cluster = blockIdx.x / p.n_split, group = cluster / p.n_join;
        rank = blockIdx.x % p.n_split;
        join = cluster % p.n_join;
        row = group / p.s.n_group;
        head0 = group % p.s.n_group * p.s.group_heads;
        n_head = min(p.s.group_heads, p.s.n_head - head0);
    }

    /* As target_of: of a whole row, or slot row x n_join + join of the partials. */
    __device__ __forceinline__ target results(const direct_params &p) const
    {
        target t;
        t.partial = p.n_join > 1;
        const int64_t slot = row * p.n_join + join, at = slot * p.s.n_head + head0;
        if (t.partial) {
            t.out = p.s.part_out + at * SPARSE_VDIM;
            t.lse = p.s.part_lse + at;
            t.stride_head = SPARSE_VDIM;
        } else {
            t.out = (char *)p.s.out + (row * p.s.out_stride_row + head0 * p.s.out_stride_head) *
                                          (p.s.out_bf16 ? 2 : 4);
            t.lse = p.s.lse + at;
            t.stride_head = p.s.out_stride_head;
        }
        t.bf16 = !t.partial && p.s.out_bf16;
        t.wide = t.partial || p.s.out_wide;
        return t;
    }
};

/* ---- results ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void lse_write(const direct_params &, const piece &, const target &t, uint32_t, int i,
                                                 float lse)
{
    t.lse[i] = lse;
}

static __device__ __forceinline__ void four_write(const direct_params &, const piece &, const target &t, uint32_t, int i,
                                                  int dim, float4 v)
{
    out_four(t.out, t.bf16, t.wide, i * t.stride_head + dim, v);
}

/* Results that are sent are whole rows': a row of several clusters is sent by what joins them. */
static __device__ __forceinline__ void lse_write(const direct_send_params &p, const piece &of, const target &t,
                                                 uint32_t epoch, int i, float lse)
{
    head_way(p.to, epoch, of.row, of.head0 + i, (float *)t.out).lse(p.to, epoch, lse, t.lse + i);
}

static __device__ __forceinline__ void four_write(const direct_send_params &p, const piece &of, const target &t,
                                                  uint32_t epoch, int i, int dim, float4 v)
{
    head_way(p.to, epoch, of.row, of.head0 + i, (float *)t.out + i * t.stride_head).four(p.to, epoch, dim / 4, v);
}

/* By a thread whose warp has queries last, if at all: those are waited for, too. */
template <int N> static __device__ __forceinline__ void epoch_keep(const direct_params &)
{
}

template <int N> static __device__ __forceinline__ void epoch_keep(const direct_send_params &p)
{
    if (threadIdx.x == CONSUMERS - 1)
        sts32(SMEM + direct_layout<N>::epoch_at, send_epoch(p.to));
}

template <int N> static __device__ __forceinline__ uint32_t epoch_kept(const direct_params &)
{
    return 0;
}

template <int N> static __device__ __forceinline__ uint32_t epoch_kept(const direct_send_params &)
{
    return lds32(SMEM + direct_layout<N>::epoch_at);
}

/* Where a block keeps what the others read: sums at the beginning (sums_stage), row sums and references here. */
template <int N> struct stage {
    using L = layout<N, SPARSE_FP8>;
    static constexpr int row_sum = L::inv_at, ref = L::max_at;
    static constexpr int factor = L::sum_at; /* float [n_split][heads of this block] */
    static_assert(N * STAGE_HEAD <= L::max_at && factor != row_sum, "room");
};

/* What is left of the weights of a block under the largest reference of all: lane r of every n_split has block r. */
struct part_weight {
    float top, sum, own; /* of all; of all; this block's part of 1 */
    bool bad;

    __device__ __forceinline__ part_weight(float l, float ref, int n_split)
    {
        bad = !(l < -NEG_INF);
        top = l > 0.0f ? ref : NEG_INF;
        for (int d = 1; d < n_split; d *= 2) {
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            bad |= __shfl_xor_sync(~0u, (int)bad, d) != 0;
        }
        const float w = l > 0.0f ? exp2_approx(ref - top) : 0.0f;
        sum = w * l;
        for (int d = 1; d < n_split; d *= 2)
            sum += __shfl_xor_sync(~0u, sum, d);
        own = bad || sum == 0.0f ? 0.0f : w / sum;
    }
};

/* Of this block's heads of its group: lse, and by how much each block's sums count. Whole warps of threads 0 to N - 1;
 * with N = 16 the other half of the warp does the same. */
template <int N, class P>
static __device__ __forceinline__ void factors_write(const P &p, const piece &of, const target &t, uint32_t epoch)
{
    const int i = threadIdx.x % N, r = i % p.n_split, own = i / p.n_split;
    const int head = of.rank * (N / p.n_split) + own;
    const part_weight w(ldc_f(cluster_address(SMEM + stage<N>::row_sum + 4 * head, r)),
                        ldc_f(cluster_address(SMEM + stage<N>::ref + 4 * head, r)), p.n_split);
    sts_f(SMEM + stage<N>::factor + 4 * i, w.own);
    if (r == 0 && head < of.n_head && threadIdx.x < N) {
        const float lse2 = w.sum == 0.0f ? NEG_INF : w.top + log2f(w.sum);
        const float lse = t.partial ? lse2 : lse2 * 0.693147180559945309f;
        /* as a piece of the main kernel says it */
        lse_write(p, of, t, epoch, head, w.bad ? (t.partial ? __int_as_float(0x7fc00000) : NEG_INF) : lse);
        if (w.bad && !t.partial && p.s.n_nan != NULL)
            atomicAdd(p.s.n_nan, 1ull);
    }
}

/* Four values of a head over all blocks. A block whose factor is 0 may hold anything. */
static __device__ __forceinline__ float4 parts_add(uint32_t at, uint32_t factors, int n_split)
{
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int r0 = 0; r0 < n_split; r0 += 4) {
        float f[4];
        float4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[i] = r0 + i < n_split ? lds_f(factors + 4 * (r0 + i)) : 0.0f;
            v[i] = f[i] != 0.0f ? ldc_f4(cluster_address(at, r0 + i))
                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum.x = fmaf(f[i], v[i].x, sum.x);
            sum.y = fmaf(f[i], v[i].y, sum.y);
            sum.z = fmaf(f[i], v[i].z, sum.z);
            sum.w = fmaf(f[i], v[i].w, sum.w);
        }
    }
    return sum;
}

template <int N, class P>
static __device__ __forceinline__ void parts_write(const P &p, const piece &of, const target &t, uint32_t epoch)
{
    const int each = N / p.n_split, lane = threadIdx.x % 32;
    const int first = of.rank * each, n = min(each, of.n_head - first);
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < 4 * n; i += CONSUMERS / 32) {
        const int head = first + i / 4, dim = i % 4 * 128 + 4 * lane;
        const float4 v = parts_add(SMEM + head * STAGE_HEAD + dim * 4,
                                      SMEM + stage<N>::factor + i / 4 * p.n_split * 4, p.n_split);
        four_write(p, of, t, epoch, head, dim, v);
    }
}

/* ---- the kernel ---------------------------------------------------------------------------- */

template <int N, class P>
static __device__ __forceinline__ void consumers_run(const P &p, const piece &of)
{
    using L = layout<N, SPARSE_FP8>;
    const seat me = seat_take<N, SPARSE_FP8>();
    epoch_keep<N>(p);
    all_queries_load<N, SPARSE_FP8>(p.s, of.row, of.head0, of.n_head);
    bar_sync(BAR_READY, THREADS);
    turn at = {};
    at.left = (int)lds32(SMEM + direct_layout<N>::n_at);
    at.first = true;
    const bool any = at.left > 0;
    state<N> st = {};
#pragma unroll 1
    while (at.left > 0)
        pair_run<N, SPARSE_FP8>(st, me, at);
    const float l = sums_of_rows<N, SPARSE_FP8>(st, me);
    if (me.thread < N) {
        const float ref = lds_f(SMEM + L::ref_at + (at.cur * N + me.thread) * 4);
        sts_f(SMEM + stage<N>::row_sum + me.thread * 4, l);
        sts_f(SMEM + stage<N>::ref + me.thread * 4, any ? ref : NEG_INF);
    }
    if (any)
        sums_stage<N, SPARSE_FP8, 0, N>(st, me, SMEM);
    cluster_sync();
    const target t = of.results(p);
    const uint32_t epoch = epoch_kept<N>(p);
    if (me.thread < (N < 32 ? 32 : N))
        factors_write<N>(p, of, t, epoch);
    named_barrier<BAR_SUM, CONSUMERS>();
    parts_write<N>(p, of, t, epoch);
}

template <int N, class P>
__global__ void __launch_bounds__(THREADS, 1)
    attn_sparse_direct(const __grid_constant__ P p)
{
    grid_release();
    const piece of(p);
    block_begin<N, SPARSE_FP8>();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        regs_give<HELPER_REGS>();
        const int n = ids_pack<N>(p, of.row, of.join * p.n_split + of.rank, of.head0 == 0);
        bar_arrive(BAR_READY, THREADS);
        share_bring<N>(p.s, n);
        cluster_sync();
    } else {
        regs_take<CONSUMER_REGS>();
        consumers_run<N>(p, of);
    }
    cluster_sync(); /* until all have read it, a block's shared memory stays */
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int N, class P> static cudaError_t direct_prepare()
{
    static int known;
    const cudaError_t e =
        smem_take((const void *)attn_sparse_direct<N, P>, direct_layout<N>::bytes, &known);
    return e != cudaSuccess ? e
                            : cudaFuncSetAttribute(attn_sparse_direct<N, P>,
                                                   cudaFuncAttributeNonPortableClusterSizeAllowed,
                                                   1);
}

/* Of either kernel: registers and shared memory are the same. */
template <int N> static cudaError_t direct_fit(int n_split, int *fit)
{
    static int known[SPARSE_SPLITS + 1]; /* how many and one more; asking twice does no harm */
    const int is = __atomic_load_n(&known[n_split], __ATOMIC_RELAXED);
    *fit = is - 1;
    if (is != 0)
        return cudaSuccess;
    cudaLaunchAttribute attr;
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = (unsigned)n_split;
    attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)n_split);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = direct_layout<N>::bytes;
    c.attrs = &attr;
    c.numAttrs = 1;
    cudaError_t e = direct_prepare<N, direct_params>();
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveClusters(fit, attn_sparse_direct<N, direct_params>, &c);
    if (e == cudaSuccess)
        __atomic_store_n(&known[n_split], *fit + 1, __ATOMIC_RELAXED);
    return e;
}

cudaError_t attn_sparse_direct_fit(int n, int n_split, int *fit)
{
    return n == 16   ? direct_fit<16>(n_split, fit)
           : n == 32 ? direct_fit<32>(n_split, fit)
                     : direct_fit<64>(n_split, fit);
}

template <int N, class P>
static cudaError_t direct_launch(const P &p, int64_t n_row, cudaStream_t stream)
{
    const cudaError_t e = direct_prepare<N, P>();
    return e != cudaSuccess ? e
                            : launch_kernel(attn_sparse_direct<N, P>,
                                            dim3((unsigned)(n_row * p.s.n_group * p.n_join * p.n_split)),
                                            THREADS, direct_layout<N>::bytes, false, p, stream,
                                            (unsigned)p.n_split);
}

template <class P>
static cudaError_t launch_of(const P &p, int n, int64_t n_row, cudaStream_t stream)
{
    return n == 16   ? direct_launch<16>(p, n_row, stream)
           : n == 32 ? direct_launch<32>(p, n_row, stream)
                     : direct_launch<64>(p, n_row, stream);
}

cudaError_t attn_sparse_direct_launch(const direct_params &p, int n, int64_t n_row, const attn_send *to,
                                      cudaStream_t stream)
{
    return to == NULL ? launch_of(p, n, n_row, stream)
                      : launch_of(direct_send_params(p, *to), n, n_row, stream);
}
