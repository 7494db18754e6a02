/* attn_sparse.cu - sparse attention on sm_90a: compaction before the main kernel, and the launches (attn_sparse.cuh).
 */
#include "kern/cuda/attn_sparse.cuh"
#include "kern/cuda/attn_sparse.h"
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx.cuh"

enum { PACK_THREADS = 256, PACK_IDS = 8, MAX_LANE = 8 };
/* Rows of the deterministic mode go through in so many at a time: their partials take 2 KiB a head. */
enum { WHOLE_ROWS = 64 };
/* Ids of a share that are little to do, however many blocks are idle beside. */
enum { DIRECT_SHORT = 512 };

/* ---- compaction ---------------------------------------------------------------------------- */

struct pack_params {
    const int32_t *slots;
    int64_t slots_stride;
    const int32_t *lane_count; /* [n_row, n_lane] */
    int64_t n_slot;
    int32_t n_lane, n_segment; /* n_segment: items of a lane, 0 when a row is one item */
    int32_t *ids;              /* [n_row, slots_stride] */
    int32_t *count, *begin;    /* [n_item] */
    attn_stats *stats;
};

static __device__ void items_write(const pack_params &p, int64_t row, const int32_t *lane_at)
{
    if (p.n_segment == 0) {
        if (threadIdx.x == 0) {
            p.count[row] = lane_at[p.n_lane];
            p.begin[row] = 0;
        }
        return;
    }
    for (int i = threadIdx.x; i < p.n_lane * p.n_segment; i += PACK_THREADS) {
        const int lane = i / p.n_segment, skip = i % p.n_segment * ATTN_SEGMENT;
        const int n = lane_at[lane + 1] - lane_at[lane] - skip;
        const int64_t item = row * p.n_lane * p.n_segment + i;
        p.count[item] = n < 0 ? 0 : n < ATTN_SEGMENT ? n : ATTN_SEGMENT;
        p.begin[item] = lane_at[lane] + skip;
    }
}

/* Eight ids from number e of a row's `total`; -1 past the end. wide: rows begin at multiples of 16 bytes. */
static __device__ void ids_load(int32_t (&id)[PACK_IDS], const int32_t *slots, int32_t e,
                                int32_t total, bool wide)
{
    if (wide && e + PACK_IDS <= total) {
        const int4 a = *(const int4 *)(slots + e), b = *(const int4 *)(slots + e + 4);
        id[0] = a.x, id[1] = a.y, id[2] = a.z, id[3] = a.w;
        id[4] = b.x, id[5] = b.y, id[6] = b.z, id[7] = b.w;
        return;
    }
    for (int i = 0; i < PACK_IDS; i++)
        id[i] = e + i < total ? slots[e + i] : -1;
}

/* One block per row: ids that name a slot of the pool, in order. A thread has eight that follow one another. */
static __global__ void __launch_bounds__(PACK_THREADS)
    attn_sparse_pack(const __grid_constant__ pack_params p)
{
    __shared__ int32_t warp_sum[PACK_THREADS / 32];
    __shared__ int32_t lane_begin[MAX_LANE + 1]; /* in the row's list   */
    __shared__ int32_t lane_at[MAX_LANE + 1];    /* among its valid ids */
    grid_release();
    const int64_t row = blockIdx.x;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid == 0) {
        int64_t sum = 0;
        for (int l = 0; l < p.n_lane; l++) {
            lane_begin[l] = (int32_t)sum;
            const int32_t n = p.lane_count[row * p.n_lane + l];
            sum = min(sum + (n > 0 ? n : 0), p.slots_stride);
        }
        lane_begin[p.n_lane] = (int32_t)sum;
    }
    __syncthreads();
    const int32_t total = lane_begin[p.n_lane];
    const int32_t *slots = p.slots + row * p.slots_stride;
    const bool wide = (uintptr_t)slots % 16 == 0;
    int32_t *ids = p.ids + row * p.slots_stride;
    int32_t base = 0, n_bad = 0;
    for (int32_t e0 = 0; e0 < total; e0 += PACK_THREADS * PACK_IDS) {
        const int32_t e = e0 + PACK_IDS * tid;
        int32_t id[PACK_IDS];
        ids_load(id, slots, e, total, wide);
        uint32_t ok = 0;
        for (int i = 0; i < PACK_IDS; i++) {
            const bool in = id[i] >= 0 && id[i] < p.n_slot;
            ok |= (uint32_t)in << i;
            n_bad += !in && id[i] != -1;
        }
        int32_t sum = __popc(ok);
        for (int d = 1; d < 32; d *= 2) {
            const int32_t v = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? v : 0;
        }
        if (lane == 31)
            warp_sum[warp] = sum;
        __syncthreads();
        const int32_t before = base;
        int32_t at = before + sum - __popc(ok);
        for (int w = 0; w < PACK_THREADS / 32; w++) {
            at += w < warp ? warp_sum[w] : 0;
            base += warp_sum[w];
        }
        for (int i = 0; i < PACK_IDS; i++)
            if (ok >> i & 1)
                ids[at + __popc(ok & ((1u << i) - 1))] = id[i];
        for (int l = 0; l < p.n_lane; l++) {
            const int32_t i = lane_begin[l] - e;
            if (i >= 0 && i < PACK_IDS)
                lane_at[l] = at + __popc(ok & ((1u << i) - 1));
        }
        __syncthreads();
    }
    if (tid <= p.n_lane && (tid == p.n_lane || lane_begin[tid] >= total))
        lane_at[tid] = base;
    __syncthreads();
    items_write(p, row, lane_at);
    n_bad = __reduce_add_sync(~0u, n_bad);
    if (p.stats == NULL)
        return;
    if (lane == 0 && n_bad > 0)
        atomicAdd((unsigned long long *)&p.stats->n_bad_id, (unsigned long long)n_bad);
    if (tid == 0) {
        atomicAdd((unsigned long long *)&p.stats->n_key, (unsigned long long)base);
        atomicAdd((unsigned long long *)&p.stats->n_fetched, (unsigned long long)base);
    }
}

/* ---- launches ------------------------------------------------------------------------------ */

/* Heads of a group: the fewest groups, unless that leaves most of the card idle. */
static int group_size(const attn_args *a, int whole, int n_sm)
{
    const int most = a->fmt == KVS_KV_BF16 && whole ? 32 : 64;
    const int64_t pairs =
        (int64_t)a->n_row * ((a->slots_stride + 2 * SPARSE_TILE - 1) / (2 * SPARSE_TILE));
    int n = 16;
    while (n < most && n < a->n_head && pairs * ((a->n_head + n - 1) / n) > n_sm)
        n *= 2;
    return n;
}

/* What a row is cut into where lanes are of at most so many keys; 0: it is one item. */
static int n_segment(int64_t lane_most)
{
    return (int)shard_n_segment(lane_most);
}

static int64_t rows_at_once(const attn_args *a, int whole)
{
    const int64_t most = whole ? (int64_t)WHOLE_ROWS : (int64_t)SPARSE_ROWS;
    return a->n_row > most ? most : a->n_row;
}

struct lay {
    size_t ids, count, begin, cut, lse, out, bytes;
    int64_t n_item, n_partial;
};

static struct lay scratch_lay(const attn_args *a, int64_t lane_most, int n_sm)
{
    const int whole = lane_most > 0;
    struct lay l;
    const size_t line = 255;
    const int64_t rows = rows_at_once(a, whole);
    l.n_item = whole ? rows * a->n_lane * n_segment(lane_most) : rows;
    l.n_partial = whole ? l.n_item : 2 * (int64_t)n_sm;
    l.ids = 0;
    l.count = ((size_t)(rows * a->slots_stride) * 4 + line) & ~line;
    l.begin = l.count + (((size_t)l.n_item * 4 + line) & ~line);
    l.cut = l.begin + (((size_t)l.n_item * 4 + line) & ~line);
    l.lse = l.cut + (((size_t)n_sm * 8 + line) & ~line);
    l.out = l.lse + (((size_t)(l.n_partial * a->n_head) * 4 + line) & ~line);
    l.bytes = l.out + (size_t)(l.n_partial * a->n_head) * SPARSE_VDIM * 4 + line;
    return l;
}

size_t attn_sparse_scratch(const attn_args *a, int64_t lane_most, int n_sm)
{
    return scratch_lay(a, lane_most, n_sm).bytes;
}

/* What the main kernels have in common, for rows from row0 on and groups of at most n heads. */
static sparse_params params_of(const attn_args *a, int64_t row0, int n)
{
    sparse_params p = {};
    p.kv = a->kv;
    p.page_stride = a->page_stride;
    p.row_stride = a->row_stride;
    p.q = (const uint16_t *)a->q + row0 * a->q_stride_row;
    p.q_stride_row = a->q_stride_row;
    p.q_stride_head = a->q_stride_head;
    p.q_scale = a->q_scale == NULL ? NULL : a->q_scale + row0 * a->n_head;
    p.scale_log2 = a->softmax_scale * 1.44269504088896341f;
    p.q_wide =
        ((uintptr_t)a->q | (uintptr_t)(a->q_stride_row * 2) | (uintptr_t)(a->q_stride_head * 2)) %
            16 ==
        0;
    p.n_head = a->n_head;
    p.n_group = (a->n_head + n - 1) / n;
    p.group_heads = (a->n_head + p.n_group - 1) / p.n_group;
    p.out_bf16 = a->out_type == KVS_DTYPE_BF16;
    p.out = (char *)a->out + row0 * a->out_stride_row * (p.out_bf16 ? 2 : 4);
    p.out_stride_row = a->out_stride_row;
    p.out_stride_head = a->out_stride_head;
    p.out_wide = (uintptr_t)a->out % (p.out_bf16 ? 8 : 16) == 0 &&
                 (a->out_stride_row | a->out_stride_head) % 4 == 0;
    p.lse = a->lse + row0 * a->n_head;
    p.n_nan = a->stats == NULL ? NULL : (unsigned long long *)&a->stats->n_nan;
    return p;
}

/* Rows [row0, row0 + n_row) of the call. */
static cudaError_t rows_launch(const attn_args *a, int64_t lane_most, int64_t row0, int64_t n_row,
                               int n_sm, const attn_send *to, cudaStream_t stream)
{
    const int whole = lane_most > 0;
    const struct lay l = scratch_lay(a, lane_most, n_sm);
    char *base = (char *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    const int per_row = whole ? a->n_lane * n_segment(lane_most) : 1;
    pack_params k = {};
    k.slots = a->slots + row0 * a->slots_stride;
    k.slots_stride = a->slots_stride;
    k.lane_count = a->lane_count + row0 * a->n_lane;
    k.n_slot = a->n_slot;
    k.n_lane = a->n_lane;
    k.n_segment = n_segment(lane_most);
    k.ids = (int32_t *)(base + l.ids);
    k.count = (int32_t *)(base + l.count);
    k.begin = (int32_t *)(base + l.begin);
    k.stats = a->stats;
    cudaError_t e =
        launch_kernel(attn_sparse_pack, dim3((unsigned)n_row), PACK_THREADS, 0, false, k, stream);
    if (e != cudaSuccess)
        return e;

    const int n = group_size(a, whole, n_sm);
    sparse_params p = params_of(a, row0, n);
    p.ids = k.ids;
    p.ids_stride = k.slots_stride;
    p.count = k.count;
    p.begin = k.begin;
    p.n_item = (int32_t)(n_row * per_row);
    p.item_per_row = per_row;
    p.n_part = n_sm < p.n_group ? 1 : n_sm / p.n_group;
    p.whole = whole;
    /* with a tile or two for each block, an even cut is worth more than the cost of beginning */
    p.item_cost =
        n_row * ((a->slots_stride + 2 * SPARSE_TILE - 1) / (2 * SPARSE_TILE)) * p.n_group > n_sm
            ? 2
            : 0;
    p.part_out = (float *)(base + l.out);
    p.part_lse = (float *)(base + l.lse);
    p.cut = (int2 *)(base + l.cut);
    const bool bf16 = a->fmt == KVS_KV_BF16;
    attn_send part = {};
    if (to != NULL) {
        part = *to;
        part.row0 += (int32_t)row0;
    }
    const attn_send *const sends = to == NULL ? NULL : &part;
    e = bf16 && n == 64 ? attn_sparse_wide_launch(p, stream)
                        : attn_sparse_main_launch(p, bf16 ? SPARSE_BF16 : SPARSE_FP8, n, whole ? NULL : sends, stream);
    return e != cudaSuccess ? e : attn_sparse_merge_launch(p, a->n_lane, n_row, sends, stream);
}

/* ---- one launch ---------------------------------------------------------------------------- */

/* Groups of n heads and shares of a list, n_join clusters of n_split; n = 0 where it is not for these args. */
struct direct_plan {
    int n, n_split, n_join;
};

/* Clocks of a pair of tiles and n heads, and of a second launch. */
static int64_t pair_clocks(int n)
{
    return n == 16 ? 6400 : n == 32 ? 6900 : 8000;
}
enum { JOIN_CLOCKS = 6000 };

/* The quickest division of which all blocks run at once. Rows that nothing would cut are left to the division by counts,
 * which knows what is empty; so are divisions that leave more than a quarter of the card idle, unless there is little to do. */
static cudaError_t direct_plan_make(const attn_args *a, int n_sm, direct_plan *plan)
{
    const int64_t stride = a->slots_stride;
    int64_t best = INT64_MAX;
    *plan = {0, 0, 0};
    if (a->fmt != KVS_KV_FP8_DS_MLA || a->n_row > n_sm)
        return cudaSuccess;
    for (int n = 16; n <= 64; n *= 2) {
        const int64_t groups = (int64_t)a->n_row * ((a->n_head + n - 1) / n);
        for (int s = 1; s <= SPARSE_SPLITS && groups * s <= n_sm; s *= 2) {
            int fit = 0;
            const cudaError_t e = attn_sparse_direct_fit(n, s, &fit);
            if (e != cudaSuccess)
                return e;
            for (int j = 1; groups * j <= fit && groups * s * j <= n_sm; j *= 2) {
                const int64_t share = (stride + s * j - 1) / (s * j);
                const int64_t clocks =
                    (share + 2 * SPARSE_TILE - 1) / (2 * SPARSE_TILE) * pair_clocks(n) +
                    (j > 1 ? JOIN_CLOCKS + 100 * j : 0) + 10 * s;
                if (s * j == 1 || share > SPARSE_SHARE || clocks >= best ||
                    (4 * groups * s * j < 3 * n_sm && share > DIRECT_SHORT))
                    continue;
                best = clocks;
                *plan = {n, s, j};
            }
        }
    }
    return cudaSuccess;
}

static cudaError_t direct_run(const attn_args *a, direct_plan plan, int n_sm, const attn_send *to,
                              cudaStream_t stream)
{
    const struct lay l = scratch_lay(a, 0, n_sm);
    char *base = (char *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    direct_params p = {};
    p.s = params_of(a, 0, plan.n);
    p.s.part_out = (float *)(base + l.out);
    p.s.part_lse = (float *)(base + l.lse);
    p.s.n_part = plan.n_join;
    p.slots = a->slots;
    p.slots_stride = a->slots_stride;
    p.lane_count = a->lane_count;
    p.n_slot = a->n_slot;
    p.n_lane = a->n_lane;
    p.n_split = plan.n_split;
    p.n_join = plan.n_join;
    p.stats = a->stats;
    const cudaError_t e = attn_sparse_direct_launch(p, plan.n, a->n_row, plan.n_join == 1 ? to : NULL, stream);
    return e != cudaSuccess || plan.n_join == 1 ? e : attn_sparse_join_launch(p.s, a->n_row, to, stream);
}

cudaError_t attn_sparse_launch(const attn_args *a, int64_t lane_most, int n_sm, const attn_send *to,
                               cudaStream_t stream)
{
    direct_plan plan = {0, 0, 0};
    if (lane_most == 0) {
        const cudaError_t e = direct_plan_make(a, n_sm, &plan);
        if (e != cudaSuccess)
            return e;
    }
    if (plan.n > 0)
        return direct_run(a, plan, n_sm, to, stream);
    const int64_t step = rows_at_once(a, lane_most > 0);
    cudaError_t e = cudaSuccess;
    for (int64_t row = 0; row < a->n_row && e == cudaSuccess; row += step)
        e = rows_launch(a, lane_most, row, row + step < a->n_row ? step : a->n_row - row, n_sm,
                        to, stream);
    return e;
}

/* ---- what it takes -------------------------------------------------------------------------- */

const char *attn_sparse_refuses(const attn_args *a)
{
    if (a->fmt != KVS_KV_FP8_DS_MLA && a->fmt != KVS_KV_BF16)
        return "sm90 attends rows of fp8_ds_mla and bf16";
    if (a->q_type != KVS_DTYPE_BF16)
        return "sm90 takes bf16 queries";
    if (((uintptr_t)a->kv | (uintptr_t)a->page_stride | (uintptr_t)a->row_stride) % 16 != 0)
        return "sm90 reads rows that begin at multiples of 16 bytes";
    if (a->slots_stride > 32768)
        return "sm90 takes at most 32768 keys a row";
    return NULL;
}
