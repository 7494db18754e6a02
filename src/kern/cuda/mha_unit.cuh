/* mha_unit.cuh - multi-head attention on sm_90a (mha_sm90.cu): shared memory, units of work, and the two warps that bring
 * their tiles.
 */
#ifndef KVS_KERN_CUDA_MHA_UNIT_CUH
#define KVS_KERN_CUDA_MHA_UNIT_CUH

#include "kern/cuda/mha_sm90.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum {
    GROUP = 128,
    CONSUMERS = 2 * GROUP,
    THREADS = CONSUMERS + 128,
    REGS_COPIER = 24,
    REGS_CONSUMER = 240,
    RING = 2,
    Q_COL = 8192 /* of a group: columns of 64 rows */
};

/* Shared memory of a form. */
template <class F> struct place {
    enum {
        Q_COLS = F::NOPE / 64 + 1,
        Q_BYTES = Q_COLS * Q_COL,
        AT_K = 0,
        AT_V = AT_K + RING * F::KEY_BYTES,
        AT_Q = AT_V + RING * F::VALUE_BYTES,
        AT_BAR = AT_Q + 2 * Q_BYTES,
        AT_K_FULL = AT_BAR,
        AT_K_FREE = AT_K_FULL + 8 * RING,
        AT_V_FULL = AT_K_FREE + 8 * RING,
        AT_V_FREE = AT_V_FULL + 8 * RING,
        BYTES = AT_V_FREE + 8 * RING
    };
};

/* ---- units ----------------------------------------------------------------------------------- */

struct unit {
    int head, part;   /* part: of the head's, the last is the first to be taken */
    int row0, n_tile; /* row0: PAIR * MHA_ROWS rows                             */
};

static __device__ __forceinline__ int row_len(const mha_params &p, int row)
{
    return min(max(p.len[row], 0), p.n_key);
}

/* Units of a head. */
static __host__ __device__ __forceinline__ uint32_t unit_parts(const mha_params &p, int pair)
{
    return (uint32_t)((p.n_row - 1) / (pair * MHA_ROWS) + 1);
}

/* `by` units further on. */
template <int PAIR>
static __device__ __forceinline__ void unit_step(const mha_params &p, unit &u, uint32_t by)
{
    const uint32_t n = unit_parts(p, PAIR), part = (uint32_t)u.part + by;
    u.head += (int)(part / n);
    u.part = (int)(part % n);
}

/* Rows and tiles, by a warp. */
template <class F, int PAIR>
static __device__ __forceinline__ void unit_measure(const mha_params &p, unit &u, int lane)
{
    u.row0 = ((int)unit_parts(p, PAIR) - 1 - u.part) * (PAIR * MHA_ROWS);
    int most = 0;
#pragma unroll
    for (int r = 0; r < PAIR * MHA_ROWS; r += 32)
        if (u.row0 + r + lane < p.n_row)
            most = max(most, row_len(p, u.row0 + r + lane));
    u.n_tile = (__reduce_max_sync(~0u, most) + F::STEP - 1) / F::STEP;
}

template <int PAIR> static __device__ __forceinline__ unit unit_first(const mha_params &p)
{
    unit u = {};
    unit_step<PAIR>(p, u, blockIdx.x / PAIR);
    return u;
}

/* Units of this block or pair: from the first on, in steps. */
#define FOR_UNITS(u)                                                                               \
    for (unit u = unit_first<PAIR>(p); u.head < p.n_head; unit_step<PAIR>(p, u, gridDim.x / PAIR))

/* ---- copying --------------------------------------------------------------------------------- */

/* This block's part of n bytes. */
template <int PAIR>
static __device__ __forceinline__ void part_copy(uint32_t dst, const uint8_t *src, uint32_t n,
                                                 uint32_t bar, uint32_t rank)
{
    if constexpr (PAIR == 1)
        copy_bulk(dst, src, n, bar);
    else
        copy_bulk_all(dst + rank * (n / 2), src + rank * (n / 2), n / 2, bar, 3);
}

/* One lane: the keys (VALUES 0) or values of all tiles of all units. */
template <class F, int PAIR, int VALUES>
static __device__ void tiles_copy(const mha_params &p, uint32_t smem, uint32_t rank)
{
    typedef place<F> P;
    const int lane = threadIdx.x % 32;
    uint32_t n = 0;
    FOR_UNITS(u)
    {
        unit_measure<F, PAIR>(p, u, lane);
        if (lane != 0)
            continue;
        const uint8_t *from = p.tiles + (int64_t)u.head * p.n_tile * F::TILE_BYTES;
#pragma unroll 1
        for (int t = 0; t < u.n_tile; t++, n++) {
            const uint32_t at = n % RING, parity = (n / RING & 1) ^ 1;
            const uint8_t *tile = from + (int64_t)t * F::TILE_BYTES;
            if constexpr (VALUES) {
                const uint32_t full = smem + P::AT_V_FULL + 8 * at;
                mbar_wait(smem + P::AT_V_FREE + 8 * at, parity);
                mbar_expect(full, F::VALUE_BYTES);
                part_copy<PAIR>(smem + P::AT_V + at * F::VALUE_BYTES, tile + F::HEAD_BYTES,
                                F::VALUE_BYTES, full, rank);
            } else {
                const uint32_t full = smem + P::AT_K_FULL + 8 * at,
                               dst = smem + P::AT_K + at * F::KEY_BYTES;
                mbar_wait(smem + P::AT_K_FREE + 8 * at, parity);
                mbar_expect(full, F::KEY_BYTES);
                part_copy<PAIR>(dst, tile, F::HEAD_BYTES, full, rank);
                part_copy<PAIR>(dst + F::HEAD_BYTES, p.rope_tiles + (int64_t)t * F::ROPE_BYTES,
                                F::ROPE_BYTES, full, rank);
            }
        }
    }
}

#endif
