/* attn_dense_few_tile.cuh - dense attention of FP8 rows and few heads: a thread block's shared memory, and what a pair of
 * warps does to a tile (attn_dense_few_sm90.cu).
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_FEW_TILE_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_FEW_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kern/cuda/attn_codes.cuh"
#include "kern/cuda/attn_dense_few.cuh"
#include "kern/cuda/attn_dense_share.cuh"
#include "kern/cuda/attn_online.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum {
    PAIRS = 4,
    PAIR = 64, /* threads */
    CONSUMERS = PAIRS * PAIR,
    THREADS = CONSUMERS + 128, /* a group of which one warp copies */
    RING = 5,
    PLACE = DENSE_TILE * FEW_PITCH,
    KEYS = DENSE_TILE / PAIRS,    /* of a tile, of a pair       */
    STEPS = DENSE_DIM / 16,       /* of a score                  */
    V_STEPS = DENSE_VDIM / 16 / 2 /* of them, of values of a warp */
};
/* Barriers: of each pair, of all consumers. */
enum { BAR_PAIR = 1, BAR_ALL = BAR_PAIR + PAIRS };

/* Shared memory. */
enum {
    AT_RING = 0,
    AT_Q = AT_RING + RING * PLACE,       /* fragments [36][32 lanes][16 bytes]            */
    AT_X = AT_Q + STEPS * 512,           /* halves of scores [2][8 warps][32 lanes][32 bytes] */
    AT_SUM = AT_X + 2 * 8 * 1024,        /* float [pair][16]                            */
    AT_REF = AT_SUM + PAIRS * 16 * 4,    /* float [pair][16]                            */
    AT_FACTOR = AT_REF + PAIRS * 16 * 4, /* float [16]                                  */
    AT_KEYS = AT_FACTOR + 16 * 4,        /* int [16]: keys that a row attends           */
    AT_RUN = AT_KEYS + 16 * 4,           /* RUN_* below                                 */
    AT_POISON = AT_RUN + 32,             /* float [64]: 0 or NaN                        */
    AT_LIMIT = AT_POISON + 64 * 4,       /* int [RING]: keys of a tile: 64, or 0        */
    AT_FULL = (AT_LIMIT + RING * 4 + 7) / 8 * 8, /* barriers [RING]                             */
    AT_FREE = AT_FULL + RING * 8,
    AT_SCAN = AT_FREE + RING * 8, /* int64 [18]                                  */
    AT_HELD = (AT_SCAN + (SHARE_WARPS + 2) * 8 + 15) / 16 * 16, /* [warp] */
    HELD_BYTES = 176,
    SMEM_BYTES = AT_HELD + CONSUMERS / 32 * HELD_BYTES
};
static_assert(SMEM_BYTES <= 232448, "shared memory");
static_assert(AT_POISON % 16 == 0 && AT_FULL % 8 == 0 && AT_HELD % 16 == 0, "alignment");
/* Results of a pair on their way to another: half of them at a time, over halves of scores. */
static_assert(2 * 8 * 1024 >= PAIR * 64 * 4, "results");
/* Weights lie up to 2^15, so that fp16 keeps all but what is 2^-32 of the largest: the reference is this much below the
 * largest score it was made for. */
#define BELOW    7.0f
#define GROW_FEW (GROW + BELOW)

/* A share's tiles, by the block's count of them. */
enum {
    RUN_END = AT_RUN,        /* behind the last                                          */
    RUN_WHOLE = AT_RUN + 4,  /* behind the last that all rows attend whole               */
    RUN_FIRST = AT_RUN + 8,  /* tile of the row that is the block's 0-th                 */
    RUN_LEAST = AT_RUN + 12, /* keys of the shortest row that has any, of the longest */
    RUN_MOST = AT_RUN + 16
};

/* ---- a pair ------------------------------------------------------------------------------------ */

struct rounding {
    uint32_t hi, lo, back;
};

struct worker {
    uint32_t smem;
    int pair, side, lane;
    rounding r;
    two ref, l, f; /* of rows g and g + 8: references, sums of weights, factors of scores */
    float o[32]
           [4]; /* dims 256 side + 16 i + 4 t + 2 j + k: o[2 i + j][k], of the second row [k + 2] */
};

static __device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* Codes, as fp16, to the values of attn_dense_round.h. */
template <bool PLAIN> static __device__ __forceinline__ uint32_t value_pair(uint32_t h, rounding r)
{
    if (PLAIN)
        return h;
    return half2_fma(h, r.back, half2_fma(h, r.hi, half2_mul(h, r.lo)));
}

static __device__ __forceinline__ void mma_f16(float (&d)[4], const uint4 &a, uint32_t b0,
                                               uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* An 8x8 matrix of 16-bit elements, a row to four lanes, transposed. */
static __device__ __forceinline__ uint32_t transposed(uint32_t a)
{
    uint32_t d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

static __device__ __forceinline__ uint32_t half_pair(float a, float b)
{
    const half2 h = __floats2half2_rn(a, b);
    return *(const uint32_t *)&h;
}

static __device__ __forceinline__ bool codes_nan(uint4 v)
{
    const uint32_t m = 0x7f7f7f7fu;
    return (__vcmpeq4(v.x & m, m) | __vcmpeq4(v.y & m, m) | __vcmpeq4(v.z & m, m) |
            __vcmpeq4(v.w & m, m)) != 0;
}

/* By a pair, its own keys of the block's n-th tile: from lo on they are not attended by all rows, from hi on by none. */
static __device__ __noinline__ void tile_clean(uint32_t smem, uint32_t tile, uint32_t n)
{
    const int base = (int)(n + lds32(smem + RUN_FIRST)) * DENSE_TILE;
    const int lo = (int)lds32(smem + RUN_LEAST) - base, hi = (int)lds32(smem + RUN_MOST) - base;
    const int pair = threadIdx.x / PAIR, lane = threadIdx.x % 32;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    bar_sync(BAR_PAIR + pair, PAIR); /* of the tile before all has been read */
#pragma unroll 1
    for (int k = pair * KEYS + threadIdx.x / 32 % 2; k < (pair + 1) * KEYS; k += 2) {
        bool bad = false;
        if (k >= lo) {
            const uint32_t at = tile + k * FEW_PITCH + lane * 16;
            bad = k >= hi;
            if (!bad)
                bad = __any_sync(~0u, codes_nan(lds128(at)) ||
                                          (lane < 4 && codes_nan(lds128(at + 512))));
            if (bad) {
                sts128(at, zero);
                if (lane < 4)
                    sts128(at + 512, zero);
            }
        }
        if (lane == 0)
            sts_f(smem + AT_POISON + 4 * k, bad && k < hi ? __int_as_float(0x7fc00000) : 0.0f);
    }
    fence_async();
    bar_sync(BAR_PAIR + pair, PAIR);
}

static __device__ __forceinline__ void tile_give(uint32_t smem, uint32_t place)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbar_arrive(smem + AT_FREE + 8 * place);
}

/* Values of 16 dims of the pair's keys, as the B operand of scores: [8 keys][dims 4 t, 4 t + 1 and 4 t + 2, 4 t + 3]. */
struct step_values {
    uint32_t v[2][2];
};

template <bool PLAIN>
static __device__ __forceinline__ step_values step_make(const worker &c, uint32_t a, uint32_t b)
{
    step_values s;
    s.v[0][0] = value_pair<PLAIN>(codes_low(a), c.r);
    s.v[0][1] = value_pair<PLAIN>(codes_high(a), c.r);
    s.v[1][0] = value_pair<PLAIN>(codes_low(b), c.r);
    s.v[1][1] = value_pair<PLAIN>(codes_high(b), c.r);
    return s;
}

static __device__ __forceinline__ void step_score(float (&s)[2][4], const uint4 &q,
                                                  const step_values &v)
{
    mma_f16(s[0], q, v.v[0][0], v.v[0][1]);
    mma_f16(s[1], q, v.v[1][0], v.v[1][1]);
}

/* O += P V of one step. */
static __device__ __forceinline__ void step_add(worker &c, int i, const uint4 &w,
                                                const step_values &v)
{
    mma_f16(c.o[2 * i], w, v.v[0][0], v.v[1][0]);
    mma_f16(c.o[2 * i + 1], w, v.v[0][1], v.v[1][1]);
}

static __device__ __forceinline__ void values_add(worker &c, const uint4 &w,
                                                  const step_values (&v)[V_STEPS])
{
#pragma unroll
    for (int i = 0; i < V_STEPS; i++)
        step_add(c, i, w, v[i]);
}

/* Whether O += P V of a tile is done step by step beside the scores of the next: products under conversions. Where codes
 * are values there is little to convert, and the compiler runs out of registers. */
template <bool PLAIN> static constexpr bool values_beside = !PLAIN;

/* Scores of the pair's keys over the warp's half of the dims, whose latents are left in v as the B operand of values;
 * beside them, maybe, O += P V of the tile before, which v has been holding. */
template <bool PLAIN>
static __device__ __forceinline__ void
scores_half(worker &c, float (&s)[2][4], step_values (&v)[V_STEPS], const uint4 &w, uint32_t tile)
{
    const uint32_t at = tile + (c.pair * KEYS + c.lane % 16) * FEW_PITCH + c.lane / 16 * 16;
    const uint32_t qat = c.smem + AT_Q + c.lane * 16;
#pragma unroll
    for (int j = 0; j < 2; j++)
        s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
    {
        uint32_t k[4];
        ldmatrix4(k, at + DENSE_VDIM + c.side * 32);
        const uint32_t rope = qat + (DENSE_VDIM / 16 + c.side * 2) * 512;
        step_score(s, lds128(rope), step_make<PLAIN>(c, k[0], k[1]));
        step_score(s, lds128(rope + 512), step_make<PLAIN>(c, k[2], k[3]));
    }
    const uint32_t kat = at + c.side * (DENSE_VDIM / 2), q = qat + c.side * V_STEPS * 512;
#pragma unroll
    for (int i = 0; i < V_STEPS; i += 2) {
        uint32_t k[4];
        ldmatrix4(k, kat + 16 * i);
        if (values_beside<PLAIN>) {
            step_add(c, i, w, v[i]);
            step_add(c, i + 1, w, v[i + 1]);
        }
        v[i] = step_make<PLAIN>(c, k[0], k[1]);
        step_score(s, lds128(q + 512 * i), v[i]);
        v[i + 1] = step_make<PLAIN>(c, k[2], k[3]);
        step_score(s, lds128(q + 512 * i + 512), v[i + 1]);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int m = 0; m < 4; m++)
                v[i + j].v[m / 2][m % 2] = transposed(v[i + j].v[m / 2][m % 2]);
    }
}

/* Both halves of the scores of the block's n-th tile. What is written two tiles later over what is read here is
 * behind the barrier of the tile between. */
static __device__ __forceinline__ void scores_meet(const worker &c, float (&s)[2][4], uint32_t n)
{
    const uint32_t at = c.smem + AT_X + (n & 1) * 8 * 1024 + c.pair * 2 * 1024 + c.lane * 16;
#pragma unroll
    for (int j = 0; j < 2; j++)
        sts128(at + (c.side ^ 1) * 1024 + j * 512,
               make_uint4(__float_as_uint(s[j][0]), __float_as_uint(s[j][1]),
                          __float_as_uint(s[j][2]), __float_as_uint(s[j][3])));
    bar_sync(BAR_PAIR + c.pair, PAIR);
    const float fx = lds_f(c.smem + AT_FACTOR + 4 * (c.lane / 4)),
                fy = lds_f(c.smem + AT_FACTOR + 4 * (c.lane / 4) + 32);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 v = lds128(at + c.side * 1024 + j * 512);
        s[j][0] = (s[j][0] + __uint_as_float(v.x)) * fx;
        s[j][1] = (s[j][1] + __uint_as_float(v.y)) * fx;
        s[j][2] = (s[j][2] + __uint_as_float(v.z)) * fy;
        s[j][3] = (s[j][3] + __uint_as_float(v.w)) * fy;
    }
}

/* Keys that the thread's first (0) or second (8) row attends. */
static __device__ __forceinline__ int keys_of(const worker &c, int odd)
{
    return (int)lds32(c.smem + AT_KEYS + 4 * (c.lane / 4 + odd));
}

/* Of a tile that not all attend whole: scores of keys past a row's, and what the cleaning says of the others. */
static __device__ __forceinline__ void scores_mask(const worker &c, float (&s)[2][4], uint32_t n)
{
    const int base = (int)(n + lds32(c.smem + RUN_FIRST)) * DENSE_TILE;
    const int nx = keys_of(c, 0), ny = keys_of(c, 8);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int k = c.pair * KEYS + 8 * j + 2 * (c.lane % 4);
        const float2 add = lds_f2(c.smem + AT_POISON + 4 * k);
        s[j][0] = base + k < nx ? s[j][0] + add.x : NEG_INF;
        s[j][1] = base + k + 1 < nx ? s[j][1] + add.y : NEG_INF;
        s[j][2] = base + k < ny ? s[j][2] + add.x : NEG_INF;
        s[j][3] = base + k + 1 < ny ? s[j][3] + add.y : NEG_INF;
    }
}

/* References that move where a weight would be too large, and sums and results with them. */
static __device__ __forceinline__ void refs_check(worker &c, const float (&s)[2][4])
{
    two most;
    most.x = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
    most.y = fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3]));
    if (!__any_sync(~0u, most.x > c.ref.x + GROW_FEW || most.y > c.ref.y + GROW_FEW))
        return;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        most.x = fmaxf(most.x, __shfl_xor_sync(~0u, most.x, d));
        most.y = fmaxf(most.y, __shfl_xor_sync(~0u, most.y, d));
    }
    const two was = c.ref;
    c.ref.x = most.x > was.x + GROW_FEW ? most.x - BELOW : was.x;
    c.ref.y = most.y > was.y + GROW_FEW ? most.y - BELOW : was.y;
    const float ax = ref_change(was.x, c.ref.x), ay = ref_change(was.y, c.ref.y);
    c.l.x *= ax;
    c.l.y *= ay;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        c.o[i][0] *= ax;
        c.o[i][1] *= ax;
        c.o[i][2] *= ay;
        c.o[i][3] *= ay;
    }
}

/* Weights of the pair's keys, as the A operand of values. */
static __device__ __forceinline__ uint4 weights(worker &c, float (&s)[2][4])
{
    const float rx = ref_finite(c.ref.x), ry = ref_finite(c.ref.y);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        s[j][0] = exp2_approx(s[j][0] - rx);
        s[j][1] = exp2_approx(s[j][1] - rx);
        s[j][2] = exp2_approx(s[j][2] - ry);
        s[j][3] = exp2_approx(s[j][3] - ry);
    }
    c.l.x += s[0][0] + s[0][1] + (s[1][0] + s[1][1]);
    c.l.y += s[0][2] + s[0][3] + (s[1][2] + s[1][3]);
    return make_uint4(half_pair(s[0][0], s[0][1]), half_pair(s[0][2], s[0][3]),
                      half_pair(s[1][0], s[1][1]), half_pair(s[1][2], s[1][3]));
}

/* The tiles of a share, from the block's n-th on; returns the one behind them. */
template <bool PLAIN> static __device__ __forceinline__ uint32_t tiles_run(worker &c, uint32_t n)
{
    uint4 w = make_uint4(0, 0, 0, 0); /* of the last tile that has been scored, and its values */
    step_values v[V_STEPS];
#pragma unroll
    for (int i = 0; i < V_STEPS; i++)
        v[i].v[0][0] = v[i].v[0][1] = v[i].v[1][0] = v[i].v[1][1] = 0;
#pragma unroll 1
    for (; (int)(n - lds32(c.smem + RUN_END)) < 0; n++) {
        const uint32_t place = n % RING, tile = c.smem + AT_RING + place * PLACE;
        mbar_wait(c.smem + AT_FULL + 8 * place, n / RING & 1);
        if (lds32(c.smem + AT_LIMIT + 4 * place) > 0) {
            const bool whole = (int)(n - lds32(c.smem + RUN_WHOLE)) < 0;
            if (!whole)
                tile_clean(c.smem, tile, n);
            float score[2][4];
            scores_half<PLAIN>(c, score, v, w, tile);
            tile_give(c.smem, place);
            scores_meet(c, score, n);
            if (!whole)
                scores_mask(c, score, n);
            refs_check(c, score);
            w = weights(c, score);
            if (!values_beside<PLAIN>)
                values_add(c, w, v);
        } else {
            tile_give(c.smem, place);
            bar_sync(BAR_PAIR + c.pair, PAIR); /* for scores_meet */
        }
    }
    if (values_beside<PLAIN>)
        values_add(c, w, v);
    return n;
}

#endif
