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
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kern/cuda/attn_codes.cuh"
#include "kern/cuda/attn_dense_few.cuh"
#include "kern/cuda/attn_dense_share.cuh"
#include "kern/cuda/attn_online.cuh"
#include "kern/cuda/attn_out.cuh"
#include "kern/cuda/attn_query.cuh"
#include "kern/cuda/launch.cuh"
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
    AT_POISON = AT_KEYS + 16 * 4,        /* float [64]: 0 or NaN                        */
    AT_LIMIT = AT_POISON + 64 * 4,       /* int [RING]: keys of a tile: 64, or 0        */
    AT_FULL = (AT_LIMIT + RING * 4 + 7) / 8 * 8, /* barriers [RING]                             */
    AT_FREE = AT_FULL + RING * 8,
    AT_SCAN = AT_FREE + RING * 8, /* int64 [18]                                  */
    AT_HELD = (AT_SCAN + (SHARE_WARPS + 2) * 8 + 15) / 16 * 16, /* [warp] */
    HELD_BYTES = 176,
    SMEM_BYTES = AT_HELD + CONSUMERS / 32 * HELD_BYTES
};
static_assert(SMEM_BYTES <= 232448, "shared memory");
/* Results of a pair on their way to another: half of them at a time, over halves of scores. */
static_assert(2 * 8 * 1024 >= PAIR * 64 * 4, "results");
/* Weights lie up to 2^15, so that fp16 keeps all but what is 2^-32 of the largest: the reference is this much below the
 * largest score it was made for. */
#define BELOW    7.0f
#define GROW_FEW (GROW + BELOW)

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

/* By a pair, its own keys: those in [lo, hi) of a tile are attended by some rows, those from hi on by none. */
static __device__ __noinline__ void tile_clean(uint32_t smem, int pair, int side, int lane,
                                               uint32_t tile, int lo, int hi)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
    bar_sync(BAR_PAIR + pair, PAIR); /* of the tile before all has been read */
#pragma unroll 1
    for (int k = pair * KEYS + side; k < (pair + 1) * KEYS; k += 2) {
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

/* Scores of the pair's keys over the warp's half of the dims; its latents are left as the B operand of values. */
template <bool PLAIN>
static __device__ __forceinline__ void scores_half(const worker &c, float (&s)[2][4],
                                                   step_values (&v)[V_STEPS], uint32_t tile)
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

/* Both halves of the scores. n: of the tile. */
static __device__ __forceinline__ void scores_meet(const worker &c, float (&s)[2][4], uint32_t n)
{
    const uint32_t at = c.smem + AT_X + (n & 1) * 8 * 1024 + c.pair * 2 * 1024 + c.lane * 16;
#pragma unroll
    for (int j = 0; j < 2; j++)
        sts128(at + (c.side ^ 1) * 1024 + j * 512,
               make_uint4(__float_as_uint(s[j][0]), __float_as_uint(s[j][1]),
                          __float_as_uint(s[j][2]), __float_as_uint(s[j][3])));
    bar_sync(BAR_PAIR + c.pair, PAIR);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 v = lds128(at + c.side * 1024 + j * 512);
        s[j][0] = (s[j][0] + __uint_as_float(v.x)) * c.f.x;
        s[j][1] = (s[j][1] + __uint_as_float(v.y)) * c.f.x;
        s[j][2] = (s[j][2] + __uint_as_float(v.z)) * c.f.y;
        s[j][3] = (s[j][3] + __uint_as_float(v.w)) * c.f.y;
    }
}

/* Keys that the thread's first (0) or second (8) row attends. */
static __device__ __forceinline__ int keys_of(const worker &c, int odd)
{
    return (int)lds32(c.smem + AT_KEYS + 4 * (c.lane / 4 + odd));
}

/* Of a tile that not all attend whole: scores of keys past a row's, and what the cleaning says of the others. */
static __device__ __forceinline__ void scores_mask(const worker &c, float (&s)[2][4], int base)
{
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

/* The tiles of a share; the first is the block's n-th. */
template <bool PLAIN>
static __device__ __forceinline__ uint32_t tiles_run(worker &c, const share &s, uint32_t n)
{
#pragma unroll 1
    for (int b = s.b0; b < s.b1; b++, n++) {
        const uint32_t place = n % RING, tile = c.smem + AT_RING + place * PLACE;
        mbar_wait(c.smem + AT_FULL + 8 * place, n / RING & 1);
        const int limit = (int)lds32(c.smem + AT_LIMIT + 4 * place), base = b * DENSE_TILE;
        if (limit > 0) {
            const bool whole = s.least - base >= DENSE_TILE;
            if (!whole)
                tile_clean(c.smem, c.pair, c.side, c.lane, tile, max(s.least - base, 0),
                           s.most - base);
            float score[2][4];
            step_values v[V_STEPS];
            scores_half<PLAIN>(c, score, v, tile);
            __syncwarp();
            if (c.lane == 0)
                mbar_arrive(c.smem + AT_FREE + 8 * place);
            scores_meet(c, score, n);
            if (!whole)
                scores_mask(c, score, base);
            refs_check(c, score);
            const uint4 w = weights(c, score);
#pragma unroll
            for (int i = 0; i < V_STEPS; i++) {
                mma_f16(c.o[2 * i], w, v[i].v[0][0], v[i].v[1][0]);
                mma_f16(c.o[2 * i + 1], w, v[i].v[0][1], v[i].v[1][1]);
            }
        } else {
            __syncwarp();
            if (c.lane == 0)
                mbar_arrive(c.smem + AT_FREE + 8 * place);
        }
    }
    return n;
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
    const int m = c.lane / 4;
    if (c.side == 0 && c.lane % 4 == 0) {
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
        queries_load(p, h.s, fp.unit, smem);
        worker c;
        c.smem = smem;
        c.pair = threadIdx.x / PAIR;
        c.side = threadIdx.x % PAIR / 32;
        c.lane = threadIdx.x % 32;
        c.r = {fp.hi, fp.lo, fp.back};
        const int m = c.lane / 4;
        c.f.x = lds_f(smem + AT_FACTOR + 4 * m);
        c.f.y = lds_f(smem + AT_FACTOR + 4 * m + 32);
        worker_clear(c);
        n = tiles_run<PLAIN>(c, h.s, n);
        share_finish(fp, c, h);
    }
    if (threadIdx.x == 0)
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
