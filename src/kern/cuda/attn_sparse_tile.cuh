/* kern/cuda/attn_sparse_tile.cuh - a tile of 64 keys in shared memory, and its way into the products' fragments
 * (attn_sparse_sm90.cu): the layout of a block's shared memory, FP8 codes to fp16, the fragments of S^T = K Q^T
 * with the product itself, and those of O^T = V^T P^T.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_TILE_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_TILE_CUH

#include "kern/cuda/attn_codes.cuh"
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
/* Where a block's shared memory begins: behind the 1 KiB that the driver keeps (the launch makes sure). A number, so
 * that every address and every operand's description is one, or one addition away from one. In a cluster an address
 * says in its upper bits whose memory it is of: a kernel that runs in one has SMEM from smem_own. A description has the
 * lower bits alone. */
#define SMEM_AT 1024u
#ifdef SMEM_OF_CLUSTER
#define SMEM smem_own()
#else
#define SMEM SMEM_AT
#endif
#define GROW    8.0f
#define NEG_INF (-__int_as_float(0x7f800000))

/* SMEM_AT of the block that asks. */
static __device__ __forceinline__ uint32_t smem_own()
{
    uint32_t at;
    asm("{\n.reg .u32 rank;\nmov.u32 rank, %%cluster_ctarank;\nmapa.shared::cluster.u32 %0, %1, rank;\n}"
        : "=r"(at)
        : "r"(SMEM_AT));
    return at;
}

template <int N, int FMT> struct layout {
    /* A key's bytes in the ring; an odd number of 16-byte chunks: rows start in different banks. */
    static constexpr int key_bytes = FMT == SPARSE_FP8 ? 656 : 1152;
    static constexpr int row = FMT == SPARSE_FP8 ? 656 : 1168;
    static constexpr int tile = SPARSE_TILE * row;
    static constexpr int q = 0, q_bytes = N * SPARSE_DIM * 2;
    static constexpr int p = q + q_bytes, p_bytes = N * SPARSE_TILE * 2;
    static constexpr int ring = p + 2 * p_bytes;
    static constexpr int small =
        4 * N * 4 + 2 * N * 4 + N * 4 + 8 * N * 4 + N * 4 + 4 * 512 + 512 + 256;
    static constexpr int fit = (232448 - ring - small) / tile;
    static constexpr int stages = fit > 4 ? 4 : fit;
    static constexpr int max_at =
        ring + stages * tile;                         /* int [2][2][N] maxima, ordered            */
    static constexpr int ref_at = max_at + 4 * N * 4; /* float [2][N] references                  */
    static constexpr int qs_at = ref_at + 2 * N * 4;  /* float [N] score factors                  */
    static constexpr int sum_at = qs_at + N * 4;      /* float [8][N] row sums by warp            */
    static constexpr int inv_at = sum_at + 8 * N * 4; /* float [N] 1 / row sum, 0: no result      */
    static constexpr int scale_at =
        inv_at + N * 4; /* fp16 [2 pairs][2 tiles][4 of 128 dims][64], keys as place_of_key */
    static constexpr int bar_at = scale_at + 4 * 512;       /* full[stages], empty[stages] */
    static constexpr int free_at = bar_at + 8 * 2 * stages; /* P has been read             */
    static constexpr int scan_at = free_at + 8;             /* int32 [2 N_WARP + 2]        */
    static constexpr int unit_at = (scan_at + (2 * N_WARP + 2) * 4 + 15) / 16 * 16;
    static constexpr int bytes = unit_at + 8 * 64; /* unit_state of each consumer warp */
    static_assert(stages >= 2 && bytes <= 232448, "shared memory");
};

/* A consumer thread's place in what its block works on, computed once: offsets from a tile's beginning, addresses. */
struct seat {
    int thread, group, lane, key; /* key: its first of a tile, the other is 8 further */
    uint32_t rows;                /* of its first key, at its bytes for the scores     */
    uint32_t values;              /* of its row and column for value_load              */
    uint32_t weights;             /* address in its group's tile of P                  */
    uint32_t scales;              /* address of its first key's scale of 128 dims lane % 4 */
    uint32_t heads;               /* bytes from a table of floats by head to its heads   */
};

/* ---- the ring ------------------------------------------------------------------------------ */

/* A tile of the ring, and the parity of its turn. */
struct ring_at {
    uint32_t stage, parity;
};

template <int N, int FMT> static __device__ __forceinline__ ring_at ring_next(ring_at r)
{
    const bool wrap = r.stage + 1 == layout<N, FMT>::stages;
    return {wrap ? 0 : r.stage + 1, wrap ? r.parity ^ 1 : r.parity};
}

template <int N, int FMT> static __device__ __forceinline__ uint32_t ring_tile(ring_at r)
{
    return SMEM + layout<N, FMT>::ring + r.stage * layout<N, FMT>::tile;
}

/* The barriers of its arrival and of its being given back. */
template <int N, int FMT> static __device__ __forceinline__ uint32_t ring_full(ring_at r)
{
    return SMEM + layout<N, FMT>::bar_at + 8 * r.stage;
}

template <int N, int FMT> static __device__ __forceinline__ uint32_t ring_empty(ring_at r)
{
    return ring_full<N, FMT>(r) + 8 * layout<N, FMT>::stages;
}

/* ---- scales -------------------------------------------------------------------------------- */

/* The scales of this lane's two keys of a tile (rows lane / 4 and 8 more of its warp's 16). */
struct key_scales {
    float a[4], b[4];
    uint32_t h[4]; /* both, fp16 */
};

/* Where the scales of a tile keep a key: a lane t of four finds those of its keys 2t, 2t + 1, 2t + 8 and 2t + 9 of every
 * 16 side by side. */
static __device__ __forceinline__ int place_of_key(int key)
{
    return key % 8 / 2 * 16 + key / 16 * 4 + key / 8 % 2 * 2 + key % 2;
}

/* Loads them, keeps them as fp16 for the second product and says, for all four warps, whether every one is a power of
 * two that fp16 multiplies exactly. fits: whether all of this lane's are below SCALE_MAX. Keys from nv on count as 1. */
template <int N, int FMT>
static __device__ __forceinline__ bool scales_look(key_scales &s, const seat &me, uint32_t rows,
                                                   int slot, int nv, bool &fits)
{
    using L = layout<N, FMT>;
    const int t = me.lane % 4;
    uint32_t bits[2][4];
    bool pow2 = true;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 v = lds128(rows - 32 * t + 8 * i * L::row + 512);
        const bool has = me.key + 8 * i < nv;
        const uint32_t one = __float_as_uint(1.0f);
        bits[i][0] = has ? v.x : one, bits[i][1] = has ? v.y : one, bits[i][2] = has ? v.z : one,
        bits[i][3] = has ? v.w : one;
        const uint32_t some = bits[i][0] | bits[i][1] | bits[i][2] | bits[i][3];
        const uint32_t least = min(min(bits[i][0], bits[i][1]), min(bits[i][2], bits[i][3])),
                       most = max(max(bits[i][0], bits[i][1]), max(bits[i][2], bits[i][3]));
        pow2 = pow2 && (some & 0x807fffffu) == 0 && least >= __float_as_uint(SCALE_POW2_MIN) &&
               most <= __float_as_uint(SCALE_POW2_MAX);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s.a[i] = __uint_as_float(bits[0][i]);
        s.b[i] = __uint_as_float(bits[1][i]);
        const half2 h = __floats2half2_rn(s.a[i], s.b[i]);
        s.h[i] = *(const uint32_t *)&h;
    }
    const uint32_t own = t < 2 ? (t == 0 ? s.h[0] : s.h[1]) : (t == 2 ? s.h[2] : s.h[3]);
    sts16(me.scales + slot * 512, (uint16_t)own);
    sts16(me.scales + slot * 512 + 2 * (place_of_key(8) - place_of_key(0)), (uint16_t)(own >> 16));
    const bool fast = named_barrier_all(BAR_LOOK + me.group, 128, pow2);
    fits = true;
    if (!fast) {
        float most = 0.0f;
        bool number = true;
        for (int i = 0; i < 4; i++) {
            number = number && s.a[i] == s.a[i] && s.b[i] == s.b[i];
            most = fmaxf(most, fmaxf(fabsf(s.a[i]), fabsf(s.b[i])));
        }
        fits = __all_sync(~0u, number && most < SCALE_MAX);
    }
    return fast;
}

/* ---- scores -------------------------------------------------------------------------------- */

/* What a lane reads at a time of its two keys: 16 codes, enough for two halves of a group of 64 dims, or 8 values, half of
 * what is enough for one. */
struct raw_chunk {
    uint32_t a[4], b[4];
};

/* Steps i of two times 16 dims, two a group: the chunk a step takes, and where that lies. */
template <int FMT> static __device__ __forceinline__ constexpr int chunk_of(int i)
{
    return FMT == SPARSE_FP8 && i < 16 ? i / 2 : FMT == SPARSE_FP8 ? i - 8 : i;
}

/* rows: at the lane's bytes of its first key (seat). */
template <int N, int FMT>
static __device__ __forceinline__ void score_load(raw_chunk &r, uint32_t rows, int chunk)
{
    using L = layout<N, FMT>;
    const int at = (FMT == SPARSE_FP8 && chunk >= 8 ? 528 : chunk / 2 * 128) + chunk % 2 * 16;
    const uint4 x = lds128(rows + at), y = lds128(rows + 8 * L::row + at);
    r.a[0] = x.x, r.a[1] = x.y, r.a[2] = x.z, r.a[3] = x.w;
    r.b[0] = y.x, r.b[1] = y.y, r.b[2] = y.z, r.b[3] = y.w;
}

/* Step i as fragments. */
template <int FMT, bool FAST>
static __device__ __forceinline__ void score_half(uint32_t (&f)[2][4], const raw_chunk &r,
                                                  const key_scales &s, int i)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int j = i % 2 * 2 + k, of = i / 4 % 4;
        if (FMT != SPARSE_FP8 || i >= 16) {
            f[k][0] = r.a[2 * k];
            f[k][1] = r.b[2 * k];
            f[k][2] = r.a[2 * k + 1];
            f[k][3] = r.b[2 * k + 1];
        } else if (FAST) {
            const uint32_t a = __byte_perm(s.h[of], 0, 0x1010), b = __byte_perm(s.h[of], 0, 0x3232);
            f[k][0] = half2_mul(codes_low(r.a[j]), a);
            f[k][1] = half2_mul(codes_low(r.b[j]), b);
            f[k][2] = half2_mul(codes_high(r.a[j]), a);
            f[k][3] = half2_mul(codes_high(r.b[j]), b);
        } else {
            f[k][0] = codes_round(codes_low(r.a[j]), s.a[of], s.a[of]);
            f[k][1] = codes_round(codes_low(r.b[j]), s.b[of], s.b[of]);
            f[k][2] = codes_round(codes_high(r.a[j]), s.a[of], s.a[of]);
            f[k][3] = codes_round(codes_high(r.b[j]), s.b[of], s.b[of]);
        }
    }
}

/* s = K Q^T of one tile, its first two chunks in r; complete when it returns. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void scores(float (&s)[N / 2], raw_chunk (&r)[2],
                                              const key_scales &scales, uint32_t rows)
{
    using L = layout<N, FMT>;
    uint32_t f[2][2][4];
    regs_pin(s);
#pragma unroll
    for (int i = 0; i < 18; i++) {
        const int grp = i / 2, side = i % 2, chunk = chunk_of<FMT>(i);
        if (i >= 2)
            wgmma_wait<1>();
        score_half<FMT, FAST>(f[side], r[chunk % 2], scales, i);
        regs_pin(f[side]);
        wgmma_fence();
        const uint64_t q = wgmma_tile(SMEM_AT + L::q + grp * N * 128) + 4 * side;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (FMT == SPARSE_FP8 && grp < 8)
                wgmma_rs<N, OPERAND_F16>(s, f[side][j], q + 2 * j, i + j > 0);
            else
                wgmma_rs<N, OPERAND_BF16>(s, f[side][j], q + 2 * j, i + j > 0);
        }
        wgmma_commit();
        if (i < 17 && chunk_of<FMT>(i + 1) != chunk && chunk + 2 <= chunk_of<FMT>(17))
            score_load<N, FMT>(r[chunk % 2], rows, chunk + 2);
    }
    wgmma_wait<0>();
    regs_pin(s);
}

/* ---- values -------------------------------------------------------------------------------- */

/* What a lane reads for 16 keys and 128 of this warp group's 256 value dims: two tiles of 64, of which its
 * warp has 16. */
struct raw_value {
    uint32_t x[4], y[4]; /* codes: x alone */
};

/* What a consumer has loaded of the values ahead of its products: four steps, which is what a load takes beside
 * everything else that asks of shared memory. Step i: keys 16 (i / 2) and on, 128 dims i % 2. */
struct value_ahead {
    raw_value r[4];
};

/* tile: of keys, at this lane's place (value_place); kk: which 16 keys; side: which 128 dims. */
template <int N, int FMT>
static __device__ __forceinline__ void value_load(raw_value &r, uint32_t tile, int kk, int side)
{
    using L = layout<N, FMT>;
    ldmatrix4_trans(r.x, tile + 16 * kk * L::row + (FMT == SPARSE_FP8 ? 128 : 256) * side);
    if (FMT != SPARSE_FP8)
        ldmatrix4_trans(r.y, tile + 16 * kk * L::row + 256 * side + 128);
}

/* The lane's row and column for value_load, from the tile's beginning. */
template <int N, int FMT>
static __device__ __forceinline__ uint32_t value_place(int group, int warp, int lane)
{
    using L = layout<N, FMT>;
    return FMT == SPARSE_FP8
               ? (lane / 8 % 2 * 8 + lane % 8) * L::row + 256 * group + 16 * warp + lane / 16 * 64
               : (lane / 16 * 8 + lane % 8) * L::row + 2 * (256 * group + 16 * warp) +
                     lane / 8 % 2 * 16;
}

/* The scales of a tile's keys in one of the four 128 dims, this lane's: fp16 pairs [16 keys][2t, 2t + 8]. */
struct value_scales {
    uint32_t h[8];
};

template <int N, int FMT>
static __device__ __forceinline__ void value_scales_load(value_scales &v, int slot, int tile128,
                                                         int lane)
{
    using L = layout<N, FMT>;
    const uint32_t at = SMEM + L::scale_at + slot * 512 + tile128 * 128 + lane % 4 * 32;
    const uint4 x = lds128(at), y = lds128(at + 16);
    v.h[0] = x.x, v.h[1] = x.y, v.h[2] = x.z, v.h[3] = x.w;
    v.h[4] = y.x, v.h[5] = y.y, v.h[6] = y.z, v.h[7] = y.w;
}

/* FAST: with the scales in v; else from the tile's rows at `rows`, which are those of 16 keys. */
template <int N, int FMT, bool FAST>
static __device__ __forceinline__ void value_fragments(uint32_t (&f)[2][4], const raw_value &r,
                                                       const value_scales &v, int kk, uint32_t rows,
                                                       int tile128, int lane)
{
    using L = layout<N, FMT>;
    if constexpr (FMT != SPARSE_FP8) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            f[0][j] = r.x[j];
            f[1][j] = r.y[j];
        }
        return;
    }
    float s[4] = {};
    if (!FAST) {
        const uint32_t at = rows + lane % 4 * 2 * L::row + 512 + 4 * tile128;
        s[0] = lds_f(at), s[1] = lds_f(at + L::row), s[2] = lds_f(at + 8 * L::row),
        s[3] = lds_f(at + 9 * L::row);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        /* bytes: key 2t dims 2g, 2g + 1, key 2t + 1 the same */
        const uint32_t a = __byte_perm(r.x[2 * i], 0, 0x3120),
                       b = __byte_perm(r.x[2 * i + 1], 0, 0x3120);
        if (FAST) {
            f[i][0] = half2_mul(codes_low(a), v.h[2 * kk]);
            f[i][1] = half2_mul(codes_high(a), v.h[2 * kk]);
            f[i][2] = half2_mul(codes_low(b), v.h[2 * kk + 1]);
            f[i][3] = half2_mul(codes_high(b), v.h[2 * kk + 1]);
        } else {
            f[i][0] = codes_round(codes_low(a), s[0], s[1]);
            f[i][1] = codes_round(codes_high(a), s[0], s[1]);
            f[i][2] = codes_round(codes_low(b), s[2], s[3]);
            f[i][3] = codes_round(codes_high(b), s[2], s[3]);
        }
    }
}

#endif
