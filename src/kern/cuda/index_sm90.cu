/* kern/cuda/index_sm90.cu - scores of the indexer: fp8 keys by the tensor cores (index_sm90.cuh), f32 keys
 * by plain fma. */
#include "kern/cuda/cuda.h"
#include "kern/cuda/index_sm90.cuh"

namespace
{

enum { STORE_ROWS = 4, STORE_STAGE = 12, F32_THREADS = 128, F32_PITCH = KVS_INDEX_DIM + 4 };

typedef struct alignas(16) store_shared {
    ix_ring ring;
    ix_share share;
    int64_t warp[IX_MAX_WARP];
} store_shared;

template <int NH> constexpr size_t store_smem()
{
    return 1024 + (size_t)STORE_ROWS * NH * 128 + (size_t)STORE_STAGE * IX_STAGE +
           sizeof(uint32_t) * STORE_ROWS * ix_w_word<NH>() + sizeof(store_shared);
}

struct ring_hook {
    __device__ void ring_full() const
    {
        __syncthreads();
    }
    __device__ void piece(const ix_group &, int64_t, int32_t, int32_t, bool) const
    {
    }
};

/* Scores of the block's share, to memory. */
template <int NH>
__global__ void __launch_bounds__(ix_threads<STORE_ROWS>(), 1)
    score_kernel(const __grid_constant__ index_score_args a)
{
    extern __shared__ uint8_t raw[];
    uint8_t *q = raw + (1024 - (ptx_shared(raw) & 1023)) % 1024;
    uint8_t *stage = q + STORE_ROWS * NH * 128;
    store_shared *s = (store_shared *)(stage + STORE_STAGE * IX_STAGE);
    uint32_t *w = (uint32_t *)(s + 1);
    const int32_t tid = threadIdx.x;
    if (tid >= ix_team<STORE_ROWS>()) {
        ix_ring_init(&s->ring);
    }
    ix_share share;
    if (a.n_row <= IX_FEW) {
        share = ix_find_few<STORE_ROWS>(a, true);
    } else {
        ix_find<STORE_ROWS>(a, true, &s->share, s->warp);
        share = s->share;
    }
    if (tid >= ix_team<STORE_ROWS>()) {
        ix_produce<STORE_ROWS>(a, true, share, &s->ring, stage, STORE_STAGE, ring_hook());
        return;
    }
    int64_t at = share.begin;
    int64_t base = share.base;
    int32_t row = share.row;
    int32_t it = tid / 128; /* the warpgroup's next tile, of those of the share */
    int32_t done = 0;       /* tiles of earlier pieces                          */
    ix_place place = {tid / 128, 0};
    const uint32_t q_tile = ix_tile(q);
    const uint32_t ring_at = ptx_shared(&s->ring);
    const uint32_t stage_at = ptx_shared(stage);
    const ix_lane lane = ix_lane_of(tid);
    if (at >= share.end) {
        ring_hook().ring_full();
    }
    while (at < share.end) {
        const ix_group g = ix_group_at<STORE_ROWS>(a, row, true);
        const int32_t t0 = (int32_t)(at - base);
        const int32_t t1 = (int32_t)min((int64_t)g.n_tile, share.end - base);
        ix_team_sync<STORE_ROWS>();
        ix_load_q<NH, STORE_ROWS>(a, g, q, w);
        if (at == share.begin) {
            ring_hook().ring_full();
        }
        ix_team_sync<STORE_ROWS>();
        for (; it < done + t1 - t0; it += ix_n_wg<STORE_ROWS>()) {
            ix_keys k;
            const bool ok = ix_take<STORE_ROWS, STORE_STAGE>(ring_at, stage_at, &place, lane, &k);
            float score[ix_n_own<STORE_ROWS>()];
            if (ok) {
                ix_score<NH, STORE_ROWS>(k, q_tile, w + ix_w_at<NH>(tid), g.n, tid, score);
            }
            const int64_t col = (int64_t)(t0 + it - done) * 64 + ix_token(tid);
#pragma unroll
            for (int j = 0; j < ix_n_own<STORE_ROWS>(); j++) {
                const int32_t r = ix_own<STORE_ROWS>(tid) + j;
                if (r < g.n && a.col_begin + col < a.col_end) {
                    const bool in = ok && a.col_begin + col < a.kv_len[g.row + r];
                    a.score[(g.row + r) * a.score_stride + col] = in ? score[j] : -INFINITY;
                }
            }
        }
        done += t1 - t0;
        at = base + t1;
        base += g.n_tile;
        row += g.n;
    }
}

/* A NaN stays one. */
static __device__ __forceinline__ float relu(float x)
{
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/* f32 keys: a block has 64 keys of one row; thread (key, half) sums the even or the odd heads. */
__global__ void __launch_bounds__(F32_THREADS)
    score_f32_kernel(const __grid_constant__ index_score_args a)
{
    extern __shared__ float key[]; /* [64, F32_PITCH], then [128] of the query, then [64] sums */
    float *q = key + 64 * F32_PITCH;
    float *half_sum = q + 2 * KVS_INDEX_DIM;
    const int32_t tid = threadIdx.x;
    const int32_t token = tid % 64;
    const int32_t half = tid / 64;
    const int64_t n_tile = ((int64_t)a.col_end - a.col_begin + 63) / 64;
    for (int64_t i = blockIdx.x; i < n_tile * a.n_row; i += gridDim.x) {
        const int64_t row = i / n_tile;
        const int64_t col = i % n_tile * 64;
        const int64_t page_at = (a.col_begin + col) / 64;
        const int32_t req = a.row_req[row];
        const int64_t bound = min(a.kv_len[row], a.col_end);
        const int64_t n = max((int64_t)0, min((int64_t)64, bound - a.col_begin - col));
        int64_t page = -1;
        if (n > 0 && req >= 0 && req < a.n_req && page_at < a.table_width) {
            page = a.table[req * a.table_stride + page_at];
        }
        const bool ok = page >= 0 && page < a.n_page;
        if (tid == 0 && n > 0) {
            uint64_t *counter = ok ? a.n_key : a.n_bad_id;
            if (counter != NULL) {
                atomicAdd((unsigned long long *)counter, (unsigned long long)n);
            }
        }
        float sum = 0.0f;
        if (ok) {
            const float *from = (const float *)(a.keys + page * a.page_stride);
            __syncthreads();
            for (int32_t j = tid; j < 64 * KVS_INDEX_DIM; j += F32_THREADS) {
                key[j / KVS_INDEX_DIM * F32_PITCH + j % KVS_INDEX_DIM] = from[j];
            }
            for (int32_t h = 0; h < a.n_head; h += 2) {
                __syncthreads();
                for (int32_t j = tid; j < 2 * KVS_INDEX_DIM; j += F32_THREADS) {
                    const bool real = h + j / KVS_INDEX_DIM < a.n_head;
                    q[j] = real ? ((const float *)a.q)[(row * a.n_head + h) * KVS_INDEX_DIM + j]
                                : 0.0f;
                }
                __syncthreads();
                if (h + half < a.n_head) {
                    const float4 *x = (const float4 *)(key + token * F32_PITCH);
                    const float4 *y = (const float4 *)(q + half * KVS_INDEX_DIM);
                    float4 p = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
                    for (int32_t j = 0; j < KVS_INDEX_DIM / 4; j++) {
                        p.x = __fmaf_rn(x[j].x, y[j].x, p.x);
                        p.y = __fmaf_rn(x[j].y, y[j].y, p.y);
                        p.z = __fmaf_rn(x[j].z, y[j].z, p.z);
                        p.w = __fmaf_rn(x[j].w, y[j].w, p.w);
                    }
                    const float dot = __fadd_rn(__fadd_rn(p.x, p.z), __fadd_rn(p.y, p.w));
                    sum = __fmaf_rn(relu(dot), a.w[row * a.n_head + h + half], sum);
                }
            }
            if (half == 1) {
                half_sum[token] = sum;
            }
            __syncthreads();
            sum = __fadd_rn(sum, half_sum[token]);
        }
        if (half == 0 && a.col_begin + col + token < a.col_end) {
            a.score[row * a.score_stride + col + token] = ok && token < n ? sum : -INFINITY;
        }
    }
}

template <int NH> void launch_store(const index_score_args *a, dev_queue *q)
{
    const size_t smem = store_smem<NH>();
    static uint64_t done;
    cuda_shared_max(score_kernel<NH>, smem, &done);
    score_kernel<NH>
        <<<(unsigned)(q->n_sm > 0 ? q->n_sm : 1), ix_threads<STORE_ROWS>(), smem, cuda_stream(q)>>>(
            *a);
}

} // namespace

const char *index_score_refuses_sm90(const void *args)
{
    const index_score_args *a = (const index_score_args *)args;
    if (!cuda_aligned16(a->keys) || a->page_stride % 16 != 0) {
        return "index keys: pages must begin at multiples of 16 bytes";
    }
    if (a->fmt != KVS_INDEX_F32 && ((uintptr_t)a->q & 3u) != 0) {
        return "index queries must begin at a multiple of 4 bytes";
    }
    return NULL;
}

void index_score_sm90(const index_score_args *a, dev_queue *q)
{
    if (cuda_refused(q, index_score_refuses_sm90(a)) || a->n_row <= 0 ||
        a->col_end <= a->col_begin) {
        return;
    }
    if (a->fmt == KVS_INDEX_F32) {
        const size_t smem = sizeof(float) * (64 * F32_PITCH + 2 * KVS_INDEX_DIM + 64);
        const int64_t n = (((int64_t)a->col_end - a->col_begin + 63) / 64) * a->n_row;
        score_f32_kernel<<<cuda_blocks(q, n, 1, 16), F32_THREADS, smem, cuda_stream(q)>>>(*a);
    } else if (a->n_head <= 8) {
        launch_store<8>(a, q);
    } else if (a->n_head <= 16) {
        launch_store<16>(a, q);
    } else if (a->n_head <= 32) {
        launch_store<32>(a, q);
    } else {
        launch_store<64>(a, q);
    }
    cuda_launched(q, "index_score_sm90");
}

size_t index_score_scratch_sm90(const index_score_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}
