/* attn_dense.cu - dense attention over a block table on sm_90a: counters, the merge of what several blocks
 * worked on, and the launches (attn_dense.cuh).
 */
#include <cuda.h>
#include <cuda_bf16.h>

#include "kern/cuda/attn_dense.cuh"
#include "kern/cuda/attn_dense.h"
#include "kern/cuda/attn_dense_few.cuh"
#include "kern/cuda/attn_dense_round.h"
#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx.cuh"
#include "num/kvfmt.h"

enum { COUNT_THREADS = 128, MERGE_THREADS = 128, MERGE_UNROLL = 8, MAX_PART = 1024 };
#define NEG_INF (-__int_as_float(0x7f800000))

/* ---- counters -------------------------------------------------------------------------------- */

struct count_params {
    dense_params d;
    attn_stats *stats;
};

/* A block per row: its keys on pages that exist, and those without. Rows of a group share a fetch: the
 * first of its longest ones counts it. */
static __global__ void __launch_bounds__(COUNT_THREADS)
    attn_dense_count(const __grid_constant__ count_params c)
{
    const dense_params &p = c.d;
    const int32_t row = (int32_t)blockIdx.x, len = dense_len(&p.work, row),
                  all = max(p.work.kv_len[row], 0);
    const int32_t req = p.work.row_req[row];
    int32_t n = 0;
    for (int32_t b = (int32_t)threadIdx.x; b < dense_tiles(len); b += COUNT_THREADS) {
        const int32_t page = p.table[req * p.table_stride + b];
        n += page >= 0 && page < p.n_page ? min(len - b * DENSE_TILE, (int32_t)DENSE_TILE) : 0;
    }
    __shared__ int32_t sum;
    if (threadIdx.x == 0)
        sum = 0;
    __syncthreads();
    n = __reduce_add_sync(~0u, n);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&sum, n);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    int32_t first = row;
    while (!dense_begins(&p.work, first))
        first--;
    bool fetches = true;
    for (int32_t r = first + (row - first) / p.rows * p.rows;
         r < p.work.n_row && (r <= row || !dense_begins(&p.work, r)) &&
         (r - first) / p.rows == (row - first) / p.rows;
         r++)
        fetches = fetches && (r < row ? dense_len(&p.work, r) < len : dense_len(&p.work, r) <= len);
    if (sum > 0)
        atomicAdd((unsigned long long *)&c.stats->n_key, (unsigned long long)sum);
    if (sum > 0 && fetches)
        atomicAdd((unsigned long long *)&c.stats->n_fetched, (unsigned long long)sum);
    if (all > sum)
        atomicAdd((unsigned long long *)&c.stats->n_bad_id, (unsigned long long)(all - sum));
}

/* ---- merge ----------------------------------------------------------------------------------- */

/* Items that several parts worked on: block x is the part in which the item begins, y a row and head of it. */
static __global__ void __launch_bounds__(MERGE_THREADS)
    attn_dense_merge(const __grid_constant__ dense_params p)
{
    __shared__ float weight[MAX_PART];
    __shared__ float total[2];
    const int part = blockIdx.x, rest = blockIdx.y, row = rest / p.n_head, head = rest % p.n_head;
    grid_wait();
    const int4 cut = p.cut[part];
    if (cut.x < 0 || row >= cut.y)
        return;
    const int n = cut.z - part + 1;
    const int64_t step = 2 * (int64_t)p.work.span * p.n_head,
                  first = step * part + (int64_t)row * p.n_head + head;
    /* of its first part in slot 1, of the others in slot 0 */
    if (threadIdx.x < 32) {
        float top = NEG_INF, sum = 0.0f;
        bool bad = false;
        for (int i = threadIdx.x; i < n; i += 32) {
            const float l = p.part_lse[first + i * step + (i == 0 ? step / 2 : 0)];
            weight[i] = l;
            bad = bad || !(l < -NEG_INF);
            top = fmaxf(top, l);
        }
        for (int d = 16; d > 0; d /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        bad = __any_sync(~0u, bad);
        for (int i = threadIdx.x; i < n; i += 32) {
            const float l = weight[i], w = bad || l == NEG_INF ? 0.0f : exp2_approx(l - top);
            weight[i] = w;
            sum += w;
        }
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x == 0) {
            total[0] = sum > 0.0f ? 1.0f / sum : 0.0f;
            p.lse[(int64_t)(cut.x + row) * p.n_head + head] =
                sum > 0.0f ? (top + log2f(sum)) * 0.693147180559945309f : NEG_INF;
            if (bad && p.n_nan != NULL)
                atomicAdd(p.n_nan, 1ull);
        }
    }
    __syncthreads();
    const float *from = p.part_out + 4 * threadIdx.x;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i0 = 0; i0 < n; i0 += MERGE_UNROLL) {
        float4 v[MERGE_UNROLL];
#pragma unroll
        for (int j = 0; j < MERGE_UNROLL; j++) {
            const int i = i0 + j;
            v[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < n && weight[i] > 0.0f)
                v[j] = *(const float4 *)(from +
                                         (first + i * step + (i == 0 ? step / 2 : 0)) * DENSE_VDIM);
        }
#pragma unroll
        for (int j = 0; j < MERGE_UNROLL; j++) {
            const float w = i0 + j < n ? weight[i0 + j] : 0.0f;
            sum.x = fmaf(w, v[j].x, sum.x);
            sum.y = fmaf(w, v[j].y, sum.y);
            sum.z = fmaf(w, v[j].z, sum.z);
            sum.w = fmaf(w, v[j].w, sum.w);
        }
    }
    const int64_t at =
        (cut.x + row) * p.out_stride_row + head * p.out_stride_head + 4 * threadIdx.x;
    const float x[4] = {sum.x * total[0], sum.y * total[0], sum.z * total[0], sum.w * total[0]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (p.out_bf16)
            ((__nv_bfloat16 *)p.out)[at + j] = __float2bfloat16_rn(x[j]);
        else
            ((float *)p.out)[at + j] = x[j];
    }
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* How rows and heads become the groups of attn_dense.cuh, with so many rows of a request. */
static void shape_of(int32_t n_head, int32_t per_request, int n_sm, dense_params *p)
{
    p->n_head = n_head;
    p->n_head_group = (n_head + DENSE_M - 1) / DENSE_M;
    p->heads = (n_head + p->n_head_group - 1) / p->n_head_group;
    p->work.span = per_request < 1                ? 1
                   : per_request < DENSE_MAX_SPAN ? per_request
                                                  : (int32_t)DENSE_MAX_SPAN;
    const int32_t fit = DENSE_M / p->heads;
    p->rows = fit < p->work.span ? fit : p->work.span;
    p->n_side = (p->work.span + p->rows - 1) / p->rows * p->n_head_group;
    if (p->n_side > n_sm) {
        p->work.span = p->rows;
        p->n_side = p->n_head_group;
    }
    p->work.n_part = n_sm / p->n_side > 0 ? n_sm / p->n_side : 1;
    p->work.n_part = p->work.n_part < MAX_PART ? p->work.n_part : (int32_t)MAX_PART;
    p->work.item_cost = 2;
}

struct lay {
    size_t cut, lse, out, bytes;
};

static struct lay scratch_lay(const dense_params *p)
{
    const size_t line = 255,
                 n = 2 * (size_t)p->work.n_part * (size_t)p->work.span * (size_t)p->n_head;
    struct lay l;
    l.cut = 0;
    l.lse = ((size_t)p->work.n_part * sizeof(int4) + line) & ~line;
    l.out = l.lse + ((n * sizeof(float) + line) & ~line);
    l.bytes = l.out + n * DENSE_VDIM * sizeof(float) + line;
    return l;
}

size_t attn_dense_scratch(const attn_args *a, int n_sm)
{
    size_t most = 0;
    for (int32_t n = 1; n <= DENSE_MAX_SPAN;
         n++) { /* how many rows a request has is not known yet */
        dense_params p = {};
        shape_of(a->n_head, n, n_sm, &p);
        const size_t bytes = scratch_lay(&p).bytes;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A function of the driver; NULL where it has none. */
static encode_fn encode_find(void)
{
    static encode_fn found;
    encode_fn f = __atomic_load_n(&found, __ATOMIC_RELAXED);
    if (f == NULL) {
        void *p = NULL;
        cudaDriverEntryPointQueryResult why;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                             &why) != cudaSuccess ||
            why != cudaDriverEntryPointSuccess)
            return NULL;
        f = (encode_fn)p;
        __atomic_store_n(&found, f, __ATOMIC_RELAXED);
    }
    return f;
}

/* A map of `n` values from byte `at` of every row on, in boxes of 64 of them by 64 keys. wide: bf16, swizzled as
 * a tile is; else bytes. */
static cudaError_t map_make(const attn_args *a, int32_t n_page, int at, uint32_t n, bool wide,
                            CUtensorMap *map)
{
    const encode_fn encode = encode_find();
    if (encode == NULL)
        return cudaErrorNotSupported;
    const cuuint64_t dim[3] = {n, DENSE_TILE, (cuuint64_t)(n_page > 0 ? n_page : 1)};
    const cuuint64_t stride[2] = {(cuuint64_t)a->row_stride, (cuuint64_t)a->page_stride};
    const cuuint32_t box[3] = {64, DENSE_TILE, 1}, step[3] = {1, 1, 1};
    /* a pool without pages may have no address; nothing of it is read, but a map must have one */
    const uintptr_t base = n_page > 0 ? (uintptr_t)a->kv + (uintptr_t)at
                                      : ((uintptr_t)a->scratch + 255) & ~(uintptr_t)255;
    return encode(map, wide ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
                  (void *)base, dim, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? cudaSuccess
               : cudaErrorInvalidValue;
}

/* A map of whole rows of FP8 codes, eight bytes an element, with room for what lies between rows in shared memory: what is
 * past a row comes as zeros. */
static cudaError_t few_map_make(const attn_args *a, int32_t n_page, CUtensorMap *map)
{
    const encode_fn encode = encode_find();
    if (encode == NULL)
        return cudaErrorNotSupported;
    const cuuint64_t dim[3] = {DENSE_DIM / 8, DENSE_TILE, (cuuint64_t)(n_page > 0 ? n_page : 1)};
    const cuuint64_t stride[2] = {(cuuint64_t)a->row_stride, (cuuint64_t)a->page_stride};
    const cuuint32_t box[3] = {FEW_PITCH / 8, DENSE_TILE, 1}, step[3] = {1, 1, 1};
    const uintptr_t base =
        n_page > 0 ? (uintptr_t)a->kv : ((uintptr_t)a->scratch + 255) & ~(uintptr_t)255;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, (void *)base, dim, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? cudaSuccess
               : cudaErrorInvalidValue;
}

static cudaError_t maps_make(const attn_args *a, int kind, dense_params *p)
{
    if (kind != DENSE_DS)
        return map_make(a, p->n_page, 0, DENSE_DIM, kind == DENSE_BF16, &p->map);
    const cudaError_t e = map_make(a, p->n_page, 0, DENSE_VDIM, false, &p->map);
    return e != cudaSuccess
               ? e
               : map_make(a, p->n_page, KV_DS_ROPE_AT, DENSE_DIM - DENSE_VDIM, true, &p->rope_map);
}

static void params_fill(const attn_args *a, int n_sm, dense_params *p)
{
    const int32_t n_req = a->n_req > 0 ? a->n_req : 1;
    p->work.n_row = a->n_row;
    shape_of(a->n_head, (a->n_row + n_req - 1) / n_req, n_sm, p);
    const struct lay l = scratch_lay(p);
    char *base = (char *)(((uintptr_t)a->scratch + 255) & ~(uintptr_t)255);
    p->kv = a->kv;
    p->page_stride = a->page_stride;
    p->row_stride = a->row_stride;
    p->n_page = (int32_t)(a->n_slot / DENSE_TILE);
    p->k_scale = a->k_scale;
    p->table = a->table;
    p->table_stride = a->table_stride;
    p->work.table_width = a->table_width;
    p->work.n_req = a->n_req;
    p->work.row_req = a->row_req;
    p->work.kv_len = a->kv_len;
    p->q = (const uint16_t *)a->q;
    p->q_stride_row = a->q_stride_row;
    p->q_stride_head = a->q_stride_head;
    p->q_scale = a->q_scale;
    p->scale_log2 = a->softmax_scale * 1.44269504088896341f;
    p->out = a->out;
    p->out_stride_row = a->out_stride_row;
    p->out_stride_head = a->out_stride_head;
    p->out_bf16 = a->out_type == KVS_DTYPE_BF16;
    p->out_wide = (uintptr_t)a->out % 8 == 0 && (a->out_stride_row | a->out_stride_head) % 2 == 0;
    p->lse = a->lse;
    p->part_out = (float *)(base + l.out);
    p->part_lse = (float *)(base + l.lse);
    p->cut = (int4 *)(base + l.cut);
    p->n_nan = a->stats == NULL ? NULL : (unsigned long long *)&a->stats->n_nan;
}

static cudaError_t few_launch(const dense_params &d, const dense_round &r, cudaStream_t stream)
{
    few_params p;
    p.d = d;
    p.hi = r.hi * 0x10001u;
    p.lo = r.lo * 0x10001u;
    p.back = (r.back ^ 0x8000u) * 0x10001u;
    p.unit = r.unit;
    return attn_dense_few_launch(p, r.plain, stream);
}

cudaError_t attn_dense_launch(const attn_args *a, int n_sm, cudaStream_t stream)
{
    count_params c = {};
    dense_params &p = c.d;
    params_fill(a, n_sm, &p);
    c.stats = a->stats;
    const int kind = a->fmt == KVS_KV_BF16  ? DENSE_BF16
                     : a->fmt == KVS_KV_FP8 ? DENSE_FP8
                                            : DENSE_DS;
    dense_round round;
    const bool few = kind == DENSE_FP8 && p.work.span * p.n_head <= FEW_M &&
                     dense_round_find(a->k_scale, &round);
    cudaError_t e = few ? few_map_make(a, p.n_page, &p.map) : maps_make(a, kind, &p);
    if (e == cudaSuccess && a->stats != NULL)
        e = launch_kernel(attn_dense_count, dim3((unsigned)a->n_row), COUNT_THREADS, 0, false, c,
                          stream);
    if (e == cudaSuccess)
        e = few ? few_launch(p, round, stream) : attn_dense_main_launch(p, kind, stream);
    if (e == cudaSuccess && p.work.n_part > 1)
        e = launch_kernel(attn_dense_merge, dim3(p.work.n_part, p.work.span * p.n_head),
                          MERGE_THREADS, 0, true, p, stream);
    return e;
}

const char *attn_dense_refuses(const attn_args *a)
{
    if (a->fmt != KVS_KV_BF16 && a->fmt != KVS_KV_FP8 && a->fmt != KVS_KV_FP8_DS_MLA)
        return "sm90 attends rows of bf16, fp8 and fp8_ds_mla";
    if (a->q_type != KVS_DTYPE_BF16)
        return "sm90 takes bf16 queries";
    if (((uintptr_t)a->kv | (uintptr_t)a->page_stride | (uintptr_t)a->row_stride) % 16 != 0)
        return "sm90 reads rows that begin at multiples of 16 bytes";
    if (((uintptr_t)a->q | (uintptr_t)(a->q_stride_row * 2) | (uintptr_t)(a->q_stride_head * 2)) %
            16 !=
        0)
        return "sm90 reads queries that begin at multiples of 16 bytes";
    if (a->n_slot % DENSE_TILE != 0)
        return "sm90 reads whole pages: n_slot must be a multiple of 64";
    if (a->row_stride * DENSE_TILE > ((int64_t)1 << 31))
        return "sm90 takes pages of at most 2 GiB";
    return NULL;
}
