/* attn_tables.cu - deterministic attention over block tables on sm_90a: what a row attends is written as a list of slots,
 * lane by lane, and goes the way of lists (attn_sparse.h), whose segments, fold and tree are those of the contract.
 *
 * A list takes four bytes a key where a row of the cache has 656 and more. Rows go through in as many at a time as keep
 * lists and partials within ROOM, or one by one. */
#include "kern/cuda/attn_sparse.h"
#include "kern/cuda/attn_tables.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx.cuh"

enum { THREADS = 256, BLOCKS = 512, MOST_ROWS = 64 };
#define ROOM ((size_t)256 << 20)

struct list_params {
    const int32_t *table, *row_req, *kv_len;
    int64_t table_stride, n_slot, stride; /* stride: of a row's list, and the most keys it can have */
    int32_t table_width, n_req, n_lane, interleave;
    int32_t *slots, *lane_count;
    attn_stats *stats;
};

/* Keys that row attends through the table; *bad: others that it asks for. */
static __device__ int32_t keys_of(const list_params &p, int64_t row, int32_t *bad)
{
    const int32_t len = max(p.kv_len[row], 0), req = p.row_req[row];
    const int32_t n = req < 0 || req >= p.n_req ? 0 : (int32_t)min((int64_t)len, p.stride);
    *bad = len - n;
    return n;
}

static __device__ int32_t slot_of(const list_params &p, const int32_t *table, int64_t local)
{
    return (int32_t)shard_slot_checked(table, p.table_width, p.n_slot, {local}).v;
}

/* Blocks (x, row). An entry of the list is a key of the table; a page that is none leaves -1, which attention skips. */
static __global__ void __launch_bounds__(THREADS) attn_tables_list(const __grid_constant__ list_params p)
{
    __shared__ int32_t begin[KVS_LANES + 1];
    const int64_t row = blockIdx.y;
    int32_t n_bad;
    const int32_t n = keys_of(p, row, &n_bad);
    if (threadIdx.x == 0) {
        begin[0] = 0;
        for (int l = 0; l < p.n_lane; l++) {
            const int32_t count = (int32_t)shard_lane_len(p.n_lane, p.interleave, l, n);
            begin[l + 1] = begin[l] + count;
            if (blockIdx.x == 0)
                p.lane_count[row * p.n_lane + l] = count;
        }
    }
    if (blockIdx.x + threadIdx.x > 0)
        n_bad = 0; /* counted once */
    __syncthreads();
    const int32_t *table = p.table + (int64_t)p.row_req[row] * p.table_stride;
    int32_t *slots = p.slots + row * p.stride;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < n; e += (int64_t)gridDim.x * THREADS) {
        int lane = 0;
        while (e >= begin[lane + 1])
            lane++;
        const int32_t slot =
            slot_of(p, table, shard_lane_key(p.n_lane, p.interleave, lane, e - begin[lane]).v);
        n_bad += slot < 0;
        slots[e] = slot < 0 ? -1 : slot;
    }
    n_bad = __reduce_add_sync(~0u, n_bad);
    if (p.stats != NULL && threadIdx.x % 32 == 0 && n_bad > 0)
        atomicAdd((unsigned long long *)&p.stats->n_bad_id, (unsigned long long)n_bad);
}

/* ---- launches ------------------------------------------------------------------------------ */

struct lay {
    int64_t rows; /* at a time */
    size_t count, sparse, bytes;
};

/* Rows [row0, row0 + n) of the call, with lists that are yet to be written. */
static attn_args listed(const attn_args *a, int64_t row0, int64_t n)
{
    attn_args b = *a;
    b.n_row = (int32_t)n;
    b.q = (const uint16_t *)a->q + row0 * a->q_stride_row;
    b.q_scale = a->q_scale == NULL ? NULL : a->q_scale + row0 * a->n_head;
    b.out = (float *)((char *)a->out + row0 * a->out_stride_row * (a->out_type == KVS_DTYPE_BF16 ? 2 : 4));
    b.lse = a->lse + row0 * a->n_head;
    b.slots_stride = (int64_t)a->table_width * KVS_PAGE_TOKENS;
    return b;
}

/* The most keys of a lane. */
static int64_t lane_most(const attn_args *a)
{
    return shard_lane_len(a->n_lane, a->interleave, 0, (int64_t)a->table_width * KVS_PAGE_TOKENS);
}

static lay lay_of(const attn_args *a, int n_sm)
{
    const size_t line = 255;
    lay l = {};
    for (l.rows = a->n_row < MOST_ROWS ? a->n_row : MOST_ROWS;; l.rows = (l.rows + 1) / 2) {
        const attn_args b = listed(a, 0, l.rows);
        l.count = ((size_t)(l.rows * b.slots_stride) * 4 + line) & ~line;
        l.sparse = l.count + (((size_t)(l.rows * a->n_lane) * 4 + line) & ~line);
        l.bytes = l.sparse + attn_sparse_scratch(&b, lane_most(a), n_sm) + line;
        if (l.bytes <= ROOM || l.rows <= 1)
            return l;
    }
}

size_t attn_tables_scratch(const attn_args *a, int n_sm)
{
    return lay_of(a, n_sm).bytes;
}

static cudaError_t rows_launch(const attn_args *a, int64_t row0, int64_t n, const lay &l, int n_sm,
                               const attn_send *to, cudaStream_t stream)
{
    char *base = (char *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    attn_args b = listed(a, row0, n);
    list_params p = {};
    p.table = a->table;
    p.row_req = a->row_req + row0;
    p.kv_len = a->kv_len + row0;
    p.table_stride = a->table_stride;
    p.n_slot = a->n_slot;
    p.stride = b.slots_stride;
    p.table_width = a->table_width;
    p.n_req = a->n_req;
    p.n_lane = a->n_lane;
    p.interleave = a->interleave;
    p.slots = (int32_t *)base;
    p.lane_count = (int32_t *)(base + l.count);
    p.stats = a->stats;
    const int64_t x = shard_cdiv(p.stride, THREADS), most = BLOCKS / n + 1;
    const cudaError_t e = launch_kernel(attn_tables_list, dim3((unsigned)(x < 1 ? 1 : x < most ? x : most), (unsigned)n),
                                        THREADS, 0, false, p, stream);
    b.slots = p.slots;
    b.lane_count = p.lane_count;
    b.scratch = base + l.sparse;
    attn_send part = {};
    if (to != NULL) {
        part = *to;
        part.row0 += (int32_t)row0;
    }
    return e != cudaSuccess ? e
                            : attn_sparse_launch(&b, lane_most(a), n_sm, to == NULL ? NULL : &part, stream);
}

cudaError_t attn_tables_launch(const attn_args *a, int n_sm, const attn_send *to, cudaStream_t stream)
{
    const lay l = lay_of(a, n_sm);
    cudaError_t e = cudaSuccess;
    for (int64_t row = 0; row < a->n_row && e == cudaSuccess; row += l.rows)
        e = rows_launch(a, row, l.rows < a->n_row - row ? l.rows : a->n_row - row, l, n_sm, to, stream);
    return e;
}

const char *attn_tables_refuses(const attn_args *a)
{
    attn_args b = *a;
    b.slots_stride = 0;
    if (a->fmt == KVS_KV_FP8)
        return "sm90_det attends rows of fp8_ds_mla and bf16; sm90 also those of fp8";
    if ((int64_t)a->table_width * KVS_PAGE_TOKENS > INT32_MAX)
        return "sm90_det takes tables of at most 2^31 tokens a request";
    return attn_sparse_refuses(&b);
}
