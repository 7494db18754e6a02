/* kvio.cu - rows into and out of a cache, with the bytes of the reference.
 *
 * A warp moves a row at a time: lane l has latents 16 l to 16 l + 15, so the 8 lanes of a tile of 128 find
 * its scale with three shuffles, and the first lanes have the rope. Warps stride over the tokens; each adds
 * what it counted once, at its end. Bounded by memory: a row is read once and written once. */
#include "kern/cuda/rows.cuh"

enum { LANE_LATENT = KVS_LATENT_DIM / 32, PAGE = KVS_PAGE_TOKENS };

typedef struct counts {
    uint32_t written, bad, nan, sat;
} counts;

static __device__ void counts_add(kvio_stats *s, counts c)
{
    if (s != NULL) { /* the same for all threads */
        warp_count(&s->n_written, c.written);
        warp_count(&s->n_bad_id, c.bad);
        warp_count(&s->n_nan, c.nan);
        warp_count(&s->n_sat, c.sat);
    }
}

/* Whether the slot is to be written; lane 0 counts. */
static __device__ bool slot_ok(int64_t slot, int64_t n_slot, bool counting, counts *c)
{
    const bool ok = slot >= 0 && slot < n_slot;
    c->written += counting && ok;
    c->bad += counting && !ok && slot != -1;
    return ok;
}

/* Four codes of v / s. */
static __device__ uint32_t pack4(const float *v, float s, counts *c)
{
    uint32_t w = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w |= (uint32_t)row_quant(v[i], s) << (8 * i);
        c->sat += (uint32_t)e4m3_saturates(v[i] / s);
    }
    return w;
}

static __device__ uint4 pack16(const float (&v)[16], float s, counts *c)
{
    return make_uint4(pack4(v, s, c), pack4(v + 4, s, c), pack4(v + 8, s, c), pack4(v + 12, s, c));
}

/* A bf16 source goes into bf16 rows bit for bit: 16 bytes of it. */
static __device__ void copy16(void *to, const void *from)
{
    *(uint4 *)to = *(const uint4 *)from;
}

/* The rope as bf16 by lanes 0 to 7. */
static __device__ void put_rope_bf16(const kv_write_args &a, int64_t tok, uint8_t *to, int lane,
                                     counts *c)
{
    if (lane < 8) {
        float v[8];
        const int64_t at = tok * a.rope_stride + 8 * lane;
        row_load<8>(a.rope, a.in_type, at, v);
        c->nan += row_count_nan<8>(v);
        if (a.in_type == KVS_DTYPE_F32) {
            row_store<8>(to, KVS_DTYPE_BF16, 8 * lane, v);
        } else {
            copy16(to + 16 * lane, (const uint16_t *)a.rope + at);
        }
    }
}

template <int FMT>
static __device__ void put_row(const kv_write_args &a, int64_t tok, uint8_t *row, int lane, counts *c)
{
    float v[LANE_LATENT];
    const int64_t at = tok * a.latent_stride + LANE_LATENT * lane;
    row_load<LANE_LATENT>(a.latent, a.in_type, at, v);
    c->nan += row_count_nan<LANE_LATENT>(v);
    if (FMT == KVS_KV_FP8_DS_MLA) {
        const float s = scale_for(a.rule, lanes_max(row_amax<LANE_LATENT>(v), 8));
        *(uint4 *)(row + 16 * lane) = pack16(v, s, c);
        if (lane % 8 == 0) {
            *(float *)(row + KV_DS_SCALE_AT + lane / 8 * 4) = s;
        }
        put_rope_bf16(a, tok, row + KV_DS_ROPE_AT, lane, c);
    } else if (FMT == KVS_KV_BF16) {
        if (a.in_type == KVS_DTYPE_F32) {
            row_store<LANE_LATENT>(row, KVS_DTYPE_BF16, LANE_LATENT * lane, v);
        } else {
            const uint16_t *src = (const uint16_t *)a.latent + at;
            copy16(row + 32 * lane, src);
            copy16(row + 32 * lane + 16, src + 8);
        }
        put_rope_bf16(a, tok, row + 2 * KVS_LATENT_DIM, lane, c);
    } else if (FMT == KVS_KV_FP8) {
        *(uint4 *)(row + 16 * lane) = pack16(v, a.k_scale, c);
        if (lane < 4) {
            row_load<16>(a.rope, a.in_type, tok * a.rope_stride + 16 * lane, v);
            c->nan += row_count_nan<16>(v);
            *(uint4 *)(row + KVS_LATENT_DIM + 16 * lane) = pack16(v, a.k_scale, c);
        }
    } else {
        row_store<LANE_LATENT>(row, KVS_DTYPE_F32, LANE_LATENT * lane, v);
        if (lane < 8) {
            float x[8];
            row_load<8>(a.rope, a.in_type, tok * a.rope_stride + 8 * lane, x);
            c->nan += row_count_nan<8>(x);
            row_store<8>(row, KVS_DTYPE_F32, KVS_LATENT_DIM + 8 * lane, x);
        }
    }
}

template <int FMT>
static __global__ void __launch_bounds__(ROW_THREADS) kv_write_kernel(const kv_write_args a)
{
    const int lane = (int)threadIdx.x % 32;
    counts c = {0, 0, 0, 0};
    for (int64_t tok = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32; tok < a.n_tok;
         tok += (int64_t)gridDim.x * ROW_WARPS) {
        const int64_t slot = a.slot[tok];
        if (slot_ok(slot, a.n_slot, lane == 0, &c)) {
            put_row<FMT>(a, tok, a.kv + slot / PAGE * a.page_stride + slot % PAGE * a.row_stride, lane,
                         &c);
        }
    }
    counts_add(a.stats, c);
}

const char *kv_write_refuses_sm90(const void *args)
{
    const kv_write_args *a = (const kv_write_args *)args;
    const int64_t unit = a->in_type == KVS_DTYPE_F32 ? 4 : 8; /* elements of 16 bytes */
    const bool ok = cuda_aligned16(a->latent) && cuda_aligned16(a->rope) && cuda_aligned16(a->kv) &&
                    a->latent_stride % unit == 0 && a->rope_stride % unit == 0 &&
                    a->page_stride % 16 == 0 && a->row_stride % 16 == 0;
    return ok ? NULL : "kv_write: the CUDA kernel needs rows at multiples of 16 bytes";
}

void kv_write_sm90(const kv_write_args *a, dev_queue *q)
{
    if (cuda_refused(q, kv_write_refuses_sm90(a)) || a->n_tok <= 0) {
        return;
    }
    const unsigned blocks = cuda_blocks(q, a->n_tok, ROW_WARPS, 8);
    const cudaStream_t stream = cuda_stream(q);
    switch (a->fmt) {
    case KVS_KV_F32:
        kv_write_kernel<KVS_KV_F32><<<blocks, ROW_THREADS, 0, stream>>>(*a);
        break;
    case KVS_KV_BF16:
        kv_write_kernel<KVS_KV_BF16><<<blocks, ROW_THREADS, 0, stream>>>(*a);
        break;
    case KVS_KV_FP8:
        kv_write_kernel<KVS_KV_FP8><<<blocks, ROW_THREADS, 0, stream>>>(*a);
        break;
    default:
        kv_write_kernel<KVS_KV_FP8_DS_MLA><<<blocks, ROW_THREADS, 0, stream>>>(*a);
        break;
    }
    cuda_launched(q, "kv_write_kernel");
}

/* ---- index keys ---- */

static __global__ void __launch_bounds__(ROW_THREADS) index_write_kernel(const index_write_args a)
{
    const int lane = (int)threadIdx.x % 32;
    counts c = {0, 0, 0, 0};
    for (int64_t tok = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32; tok < a.n_tok;
         tok += (int64_t)gridDim.x * ROW_WARPS) {
        const int64_t slot = a.slot[tok];
        if (!slot_ok(slot, a.n_slot, lane == 0, &c)) {
            continue; /* the same for the whole warp */
        }
        uint8_t *page = a.keys + slot / PAGE * a.page_stride;
        const int64_t off = slot % PAGE;
        float v[4];
        row_load<4>(a.key, a.in_type, tok * a.key_stride + 4 * lane, v);
        c.nan += row_count_nan<4>(v);
        if (a.fmt == KVS_INDEX_F32) {
            *(float4 *)(page + off * 512 + 16 * lane) = make_float4(v[0], v[1], v[2], v[3]);
            continue;
        }
        const float s = scale_index(lanes_max(row_amax<4>(v), 32));
        *(uint32_t *)(page + off * KVS_INDEX_DIM + 4 * lane) = pack4(v, s, &c);
        if (lane == 0) {
            *(float *)(page + INDEX_SCALE_AT + 4 * off) = s;
        }
    }
    counts_add(a.stats, c);
}

const char *index_write_refuses_sm90(const void *args)
{
    const index_write_args *a = (const index_write_args *)args;
    const int64_t unit = a->in_type == KVS_DTYPE_F32 ? 4 : 8;
    const bool ok = cuda_aligned16(a->key) && cuda_aligned16(a->keys) && a->key_stride % unit == 0 &&
                    a->page_stride % 16 == 0;
    return ok ? NULL : "index_write: the CUDA kernel needs keys and pages at multiples of 16 bytes";
}

void index_write_sm90(const index_write_args *a, dev_queue *q)
{
    if (cuda_refused(q, index_write_refuses_sm90(a)) || a->n_tok <= 0) {
        return;
    }
    const unsigned blocks = cuda_blocks(q, a->n_tok, ROW_WARPS, 8);
    index_write_kernel<<<blocks, ROW_THREADS, 0, cuda_stream(q)>>>(*a);
    cuda_launched(q, "index_write_kernel");
}

/* ---- gather ---- */

/* The slot of local index l of a request; -1 where table or pool end before it. */
static __device__ int64_t table_slot(const gather_args &a, int64_t req, int64_t l)
{
    if (l < 0 || l / PAGE >= a.table_width) {
        return -1;
    }
    const int64_t page = a.table[req * a.table_stride + l / PAGE];
    const int64_t slot = page * PAGE + l % PAGE;
    return page >= 0 && slot < a.n_slot ? slot : -1;
}

static __device__ void unpack16(uint4 w, float s, float (&v)[16])
{
    const uint32_t part[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        v[i] = row_dequant(part[i / 4] >> (8 * (i % 4)) & 0xFFu, s);
    }
}

/* Lane's share of a row: 16 latents, and 8 of the rope for lanes 0 to 7. */
static __device__ void get_row(const gather_args &a, const uint8_t *row, int lane, float (&v)[16],
                               float (&rope)[8])
{
    const int at = lane < 8 ? 8 * lane : 0;
    switch (a.fmt) {
    case KVS_KV_F32:
        row_load<16>(row, KVS_DTYPE_F32, 16 * lane, v);
        row_load<8>(row, KVS_DTYPE_F32, KVS_LATENT_DIM + at, rope);
        break;
    case KVS_KV_BF16:
        row_load<16>(row, KVS_DTYPE_BF16, 16 * lane, v);
        row_load<8>(row, KVS_DTYPE_BF16, KVS_LATENT_DIM + at, rope);
        break;
    case KVS_KV_FP8: {
        const uint2 w = *(const uint2 *)(row + KVS_LATENT_DIM + at);
        unpack16(*(const uint4 *)(row + 16 * lane), a.k_scale, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            rope[i] = row_dequant((i < 4 ? w.x : w.y) >> (8 * (i % 4)) & 0xFFu, a.k_scale);
        }
        break;
    }
    default:
        unpack16(*(const uint4 *)(row + 16 * lane),
                 *(const float *)(row + KV_DS_SCALE_AT + lane / 8 * 4), v);
        row_load<8>(row + KV_DS_ROPE_AT, KVS_DTYPE_BF16, at, rope);
        break;
    }
}

static __global__ void __launch_bounds__(ROW_THREADS) gather_kernel(const gather_args a)
{
    const int lane = (int)threadIdx.x % 32;
    uint32_t bad = 0;
    for (int64_t req = blockIdx.y; req < a.n_req; req += gridDim.y) {
        const int64_t n = a.count[req];
        for (int64_t t = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32; t < n;
             t += (int64_t)gridDim.x * ROW_WARPS) {
            const int64_t slot = table_slot(a, req, a.start[req] + t);
            const int64_t to = (a.out_begin[req] + t) * a.out_stride;
            float v[16] = {0};
            float rope[8] = {0};
            bad += slot < 0 && lane == 0;
            if (slot >= 0) {
                get_row(a, a.kv + slot / PAGE * a.page_stride + slot % PAGE * a.row_stride, lane, v,
                        rope);
            }
            row_store<16>(a.out, a.out_type, to + 16 * lane, v);
            if (lane < 8) {
                row_store<8>(a.out, a.out_type, to + KVS_LATENT_DIM + 8 * lane, rope);
            }
        }
    }
    warp_count(a.n_bad_id, bad);
}

const char *gather_refuses_sm90(const void *args)
{
    const gather_args *a = (const gather_args *)args;
    const int64_t unit = a->out_type == KVS_DTYPE_F32 ? 4 : 8;
    const bool ok = cuda_aligned16(a->kv) && cuda_aligned16(a->out) && a->page_stride % 16 == 0 &&
                    a->row_stride % 16 == 0 && a->out_stride % unit == 0;
    return ok ? NULL : "gather: the CUDA kernel needs rows at multiples of 16 bytes";
}

void gather_sm90(const gather_args *a, dev_queue *q)
{
    enum { MAX_Y = 1024, WAVES = 8 };
    if (cuda_refused(q, gather_refuses_sm90(a)) || a->n_req <= 0) {
        return;
    }
    /* the numbers of rows are known on the device only: a full grid, whatever the requests hold */
    const int32_t y = a->n_req < MAX_Y ? a->n_req : MAX_Y;
    const int32_t x = q->n_sm * WAVES / y;
    const dim3 grid((unsigned)(x > 1 ? x : 1), (unsigned)y);
    gather_kernel<<<grid, ROW_THREADS, 0, cuda_stream(q)>>>(*a);
    cuda_launched(q, "gather_kernel");
}
