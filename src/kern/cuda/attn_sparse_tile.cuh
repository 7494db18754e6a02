/* kern/cuda/attn_sparse_tile.cuh - a tile of 64 keys in shared memory, and its way into the products' fragments
 * (attn_sparse_sm90.cu): the layout of a block's shared memory, FP8 codes to fp16, the fragments of S^T = K Q^T
 * with the product itself, and those of O^T = V^T P^T.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_TILE_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kern/cuda/attn_sparse.cuh"
#include "kern/cuda/attn_sparse.h"
#include "kern/cuda/ptx.cuh"

enum {
    CONSUMERS = 256,
    COPIERS = 128,
    COPY_ROWS = 16,
    THREADS = 384,
    N_WARP = 12,
    HELPER_REGS = 40,
    CONSUMER_REGS = 232
};
enum { BAR_MAX = 1, BAR_P = 2, BAR_SUM = 3, BAR_LOOK = 4 /* and 5: of each group */ };
#define GROW    8.0f
#define NEG_INF (-__int_as_float(0x7f800000))

/* Largest power of two, smallest, and largest scale of any kind for which fp16 holds code x scale. */
#define SCALE_POW2_MAX 128.0f
#define SCALE_POW2_MIN 3.0517578125e-05f
#define SCALE_MAX      146.0f

template <int N, int FMT> struct layout {
    /* A key's bytes in the ring; an odd number of 16-byte chunks: rows start in different banks. */
    static constexpr int key_bytes = FMT == SPARSE_FP8 ? 656 : 1152;
    static constexpr int row = FMT == SPARSE_FP8 ? 656 : 1168;
    static constexpr int tile = SPARSE_TILE * row;
    static constexpr int q = 0, q_bytes = N * SPARSE_DIM * 2;
    static constexpr int p = q + q_bytes, p_bytes = N * SPARSE_TILE * 2;
    static constexpr int ring = p + 2 * p_bytes;
    static constexpr int small =
        2 * N * 4 + 2 * N * 4 + 2 * N * 4 + 8 * N * 4 + N * 4 + 4 * 512 + 16 + 256;
    static constexpr int fit = (232448 - 1024 - ring - small) / tile;
    static constexpr int stages = fit > 4 ? 4 : fit;
    static constexpr int max_at =
        ring + stages * tile;                         /* int [2][N] maxima, ordered               */
    static constexpr int ref_at = max_at + 2 * N * 4; /* float [2][N] references                  */
    static constexpr int qs_at = ref_at + 2 * N * 4;  /* float [N] score factors                  */
    static constexpr int sum_at = qs_at + N * 4;      /* float [8][N] row sums by warp            */
    static constexpr int inv_at = sum_at + 8 * N * 4; /* float [N] 1 / row sum, 0: no result      */
    static constexpr int scale_at = inv_at + N * 4;   /* fp16 [2 pairs][2 tiles][4][64]           */
    static constexpr int fast_at =
        scale_at + 4 * 512;                     /* int [2 pairs][2 tiles]                   */
    static constexpr int bar_at = fast_at + 16; /* full[stages], empty[stages]            */
    static constexpr int bytes = bar_at + 8 * 2 * stages + 16 + 1024;
    static_assert(stages >= 2 && bytes + 128 <= 232448, "shared memory");
};

/* ---- e4m3 codes to fp16 -------------------------------------------------------------------- */

/* The lower or the upper two of four codes. */
static __device__ __forceinline__ uint32_t codes_low(uint32_t four)
{
    uint32_t h;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n}"
        : "=r"(h)
        : "r"(four));
    return h;
}

static __device__ __forceinline__ uint32_t codes_high(uint32_t four)
{
    uint32_t h;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, hi;\n}"
        : "=r"(h)
        : "r"(four));
    return h;
}

static __device__ __forceinline__ uint32_t half2_mul(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

/* Any scale: two codes, as fp16, x scale, rounded to bf16 as every reader of the format does, then as fp16. */
static __device__ __forceinline__ uint32_t codes_round(uint32_t h, float s0, float s1)
{
    const float2 f = __half22float2(*(const half2 *)&h);
    const float a = __bfloat162float(__float2bfloat16_rn(f.x * s0)),
                b = __bfloat162float(__float2bfloat16_rn(f.y * s1));
    const half2 r = __floats2half2_rn(a, b);
    return *(const uint32_t *)&r;
}

static __device__ __forceinline__ uint32_t half2_twice(float s)
{
    const half2 h = __float2half2_rn(s);
    return *(const uint32_t *)&h;
}

/* ---- scores -------------------------------------------------------------------------------- */

/* Looks at the scales of this warp's 16 keys of a tile, keeps them as fp16 for the second product and says
 * whether all are powers of two that fp16 multiplies exactly. Keys past n_key count as 1. */
template <int N, int FMT>
static __device__ bool scales_look(uint32_t smem, uint32_t tile, int slot, int warp, int lane,
                                   int nv, bool *fits)
{
    using L = layout<N, FMT>;
    const int t = lane % 4, key = 16 * warp + lane / 4;
    bool fast = true, fit = true;
    for (int i = 0; i < 2; i++) {
        const int k = key + 8 * i;
        const float s = k < nv ? lds_f(tile + k * L::row + 512 + 4 * t) : 1.0f;
        const bool pow2 =
            (__float_as_uint(s) & 0x807fffffu) == 0 && s <= SCALE_POW2_MAX && s >= SCALE_POW2_MIN;
        fast = fast && pow2;
        fit = fit && fabsf(s) <= SCALE_MAX;
        const half h = __float2half_rn(pow2 ? s : 0.0f);
        sts16(smem + L::scale_at + slot * 512 + (t * 64 + k) * 2, *(const uint16_t *)&h);
    }
    *fits = __all_sync(~0u, fit);
    fast = named_barrier_all(BAR_LOOK + slot % 2, 128, fast);
    if (warp == 0 && lane == 0)
        sts32(smem + L::fast_at + slot * 4, fast);
    return fast;
}

/* What a lane reads for one group of 64 dims: of its two keys 16 codes and their scale, or 16 values. */
template <int FMT> struct raw_group {
    uint32_t a[8], b[8]; /* FP8: four words each */
    float s0, s1;
};

template <int FMT>
static __device__ __forceinline__ void score_load(raw_group<FMT> &r, uint32_t k0, uint32_t k1,
                                                  int grp, int t)
{
    const bool codes = FMT == SPARSE_FP8 && grp < 8;
    const uint32_t at = codes ? grp / 2 * 128 + 32 * t + grp % 2 * 16
                              : (FMT == SPARSE_FP8 ? 528 : grp * 128) + 32 * t;
    const uint4 x0 = lds128(k0 + at), x1 = lds128(k1 + at);
    r.a[0] = x0.x, r.a[1] = x0.y, r.a[2] = x0.z, r.a[3] = x0.w;
    r.b[0] = x1.x, r.b[1] = x1.y, r.b[2] = x1.z, r.b[3] = x1.w;
    if (codes) {
        const uint32_t sc = 512 + grp / 2 * 4;
        r.s0 = lds_f(k0 + sc);
        r.s1 = lds_f(k1 + sc);
        return;
    }
    const uint4 y0 = lds128(k0 + at + 16), y1 = lds128(k1 + at + 16);
    r.a[4] = y0.x, r.a[5] = y0.y, r.a[6] = y0.z, r.a[7] = y0.w;
    r.b[4] = y1.x, r.b[5] = y1.y, r.b[6] = y1.z, r.b[7] = y1.w;
}

/* Half a group as fragments: two steps of 16 dims. */
template <int FMT, bool FAST>
static __device__ __forceinline__ void score_half(uint32_t (&f)[2][4], const raw_group<FMT> &r,
                                                  int grp, int side)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int j = 2 * side + i;
        if (FMT != SPARSE_FP8 || grp == 8) {
            f[i][0] = r.a[2 * j];
            f[i][1] = r.b[2 * j];
            f[i][2] = r.a[2 * j + 1];
            f[i][3] = r.b[2 * j + 1];
        } else if (FAST) {
            const uint32_t h0 = half2_twice(r.s0), h1 = half2_twice(r.s1);
            f[i][0] = half2_mul(codes_low(r.a[j]), h0);
            f[i][1] = half2_mul(codes_low(r.b[j]), h1);
            f[i][2] = half2_mul(codes_high(r.a[j]), h0);
            f[i][3] = half2_mul(codes_high(r.b[j]), h1);
        } else {
            f[i][0] = codes_round(codes_low(r.a[j]), r.s0, r.s0);
            f[i][1] = codes_round(codes_low(r.b[j]), r.s1, r.s1);
            f[i][2] = codes_round(codes_high(r.a[j]), r.s0, r.s0);
            f[i][3] = codes_round(codes_high(r.b[j]), r.s1, r.s1);
        }
    }
}

/* s = K Q^T of one tile; complete when it returns. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void scores(float (&s)[N / 2], uint32_t smem, uint32_t tile,
                                              int warp, int lane)
{
    using L = layout<N, FMT>;
    const uint32_t k0 = tile + (16 * warp + lane / 4) * L::row, k1 = k0 + 8 * L::row;
    uint32_t f[2][2][4];
    raw_group<FMT> r;
    score_load<FMT>(r, k0, k1, 0, lane % 4);
    regs_pin(s);
#pragma unroll
    for (int i = 0; i < 18; i++) {
        const int grp = i / 2, side = i % 2;
        if (i >= 2)
            wgmma_wait<1>();
        score_half<FMT, FAST>(f[side], r, grp, side);
        regs_pin(f[side]);
        wgmma_fence();
        const uint64_t q = wgmma_tile(smem + L::q + grp * N * 128) + 4 * side;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (FMT == SPARSE_FP8 && grp < 8)
                wgmma_rs<N, OPERAND_F16>(s, f[side][j], q + 2 * j, i + j > 0);
            else
                wgmma_rs<N, OPERAND_BF16>(s, f[side][j], q + 2 * j, i + j > 0);
        }
        wgmma_commit();
        if (side == 1 && grp < 8)
            score_load<FMT>(r, k0, k1, grp + 1, lane % 4);
    }
    wgmma_wait<0>();
    regs_pin(s);
}

/* ---- fragments of values ------------------------------------------------------------ */

/* What a lane reads for 16 keys and 128 of this warp group's 256 value dims: two tiles of 64, of which its
 * warp has 16. */
struct raw_value {
    uint32_t x[4], y[4]; /* FP8: x alone           */
    uint32_t h[2];       /* scales of keys 2t, 2t + 1 and 2t + 8, 2t + 9, fp16 pairs */
    float s[4];          /* the same, f32          */
};

template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void value_load(raw_value &r, uint32_t smem, uint32_t tile,
                                                  int slot, int kk, int side, int group, int warp,
                                                  int lane)
{
    using L = layout<N, FMT>;
    if (FMT != SPARSE_FP8) {
        const uint32_t at = tile + (16 * kk + lane / 16 * 8 + lane % 8) * L::row +
                            2 * (256 * group + 128 * side + 16 * warp) + lane / 8 % 2 * 16;
        ldmatrix4_trans(r.x, at);
        ldmatrix4_trans(r.y, at + 128);
        return;
    }
    ldmatrix4_trans(r.x, tile + (16 * kk + lane / 8 % 2 * 8 + lane % 8) * L::row + 256 * group +
                             128 * side + 16 * warp + lane / 16 * 64);
    const int t = lane % 4, tile128 = 2 * group + side;
    if (FAST) {
        const uint32_t sc = smem + L::scale_at + slot * 512 + (tile128 * 64 + 16 * kk + 2 * t) * 2;
        r.h[0] = lds32(sc);
        r.h[1] = lds32(sc + 16);
    } else {
        const uint32_t sc = tile + (16 * kk + 2 * t) * L::row + 512 + 4 * tile128;
        r.s[0] = lds_f(sc), r.s[1] = lds_f(sc + L::row), r.s[2] = lds_f(sc + 8 * L::row),
        r.s[3] = lds_f(sc + 9 * L::row);
    }
}

template <int FMT, bool FAST>
static __device__ __forceinline__ void value_fragments(uint32_t (&f)[2][4], const raw_value &r)
{
    if constexpr (FMT != SPARSE_FP8) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            f[0][j] = r.x[j];
            f[1][j] = r.y[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            /* bytes: key 2t dims 2g, 2g + 1, key 2t + 1 the same */
            const uint32_t a = __byte_perm(r.x[2 * i], 0, 0x3120),
                           b = __byte_perm(r.x[2 * i + 1], 0, 0x3120);
            if (FAST) {
                f[i][0] = half2_mul(codes_low(a), r.h[0]);
                f[i][1] = half2_mul(codes_high(a), r.h[0]);
                f[i][2] = half2_mul(codes_low(b), r.h[1]);
                f[i][3] = half2_mul(codes_high(b), r.h[1]);
            } else {
                f[i][0] = codes_round(codes_low(a), r.s[0], r.s[1]);
                f[i][1] = codes_round(codes_high(a), r.s[0], r.s[1]);
                f[i][2] = codes_round(codes_low(b), r.s[2], r.s[3]);
                f[i][3] = codes_round(codes_high(b), r.s[2], r.s[3]);
            }
        }
    }
}

#endif
