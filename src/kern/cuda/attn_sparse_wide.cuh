/* attn_sparse_wide.cuh - sparse attention of more than 32 heads over bf16 rows on sm_90a (attn_sparse_wide_sm90.cu): a
 * thread block's shared memory, and the warps that bring the listed rows, in pieces of 16 bytes to where a tile
 * has them. Keys past the last become zeros: the products take 64 keys whatever is there, and NaN must not meet
 * a weight of 0.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_WIDE_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_WIDE_CUH

#include "kern/cuda/attn_seesaw.cuh"
#include "kern/cuda/attn_sparse_walk.cuh"

enum { COPIERS = 128, THREADS = CONSUMERS + COPIERS, CONSUMER_REGS = 232, COPIER_REGS = 40 };
/* Parts of a tile that come together: columns 0 to 3, 4 to 7, the rope. */
enum { N_FULL = 3, PART_COLS = 4 };

/* Shared memory, behind what the consumers share. */
enum {
    AT_FULL = AT_OWN,                       /* barriers [2][3]         */
    AT_FREE = AT_FULL + 2 * N_FULL * 8,     /* [2][3]                  */
    AT_PIECE = AT_FREE + 2 * N_FREE * 8,    /* piece_walk of each warp */
    AT_SCAN = AT_PIECE + THREADS / 32 * 64, /* int32 [26]              */
    SMEM_BYTES = AT_SCAN + (2 * (THREADS / 32) + 2) * 4
};
static_assert(SMEM_BYTES <= 232448, "shared memory");

static __device__ __forceinline__ uint32_t full_at(uint32_t smem, uint32_t n)
{
    return smem + AT_FULL + (n & 1) * N_FULL * 8;
}

static __device__ __forceinline__ uint32_t free_at(uint32_t smem, uint32_t n)
{
    return smem + AT_FREE + (n & 1) * N_FREE * 8;
}

/* ---- the tiles of a part, one after another ---------------------------------------------------- */

/* Where a warp is in its work; in shared memory between the beginnings of pieces, its registers being needed. */
struct piece_walk {
    sparse_walk walk;
    sparse_unit unit;
};
static_assert(sizeof(piece_walk) <= 64, "as many bytes as the layout says");

static __device__ __forceinline__ piece_walk *piece_of(uint8_t *raw)
{
    return (piece_walk *)(raw + AT_PIECE + threadIdx.x / 32 * 64);
}

/* Tiles of a piece: the next one is keys [at, at + 64) of its row's ids, of which there are `last`. */
struct tile_walk {
    const int32_t *ids;
    int at, last;
};

static __device__ __forceinline__ void piece_next(tile_walk &t, const sparse_params &p,
                                                  uint8_t *raw)
{
    piece_walk s = *piece_of(raw);
    t.at = t.last = 0;
    while (sparse_next(s.walk, p, s.unit)) {
        if (s.unit.b1 == 0)
            continue;
        t.ids = p.ids + s.unit.item * p.ids_stride + s.unit.begin;
        t.at = s.unit.b0 * SPARSE_TILE;
        t.last = min(s.unit.n_key, s.unit.b1 * SPARSE_TILE);
        break;
    }
    __syncwarp();
    *piece_of(raw) = s;
    __syncwarp();
}

static __device__ __forceinline__ tile_walk tiles_begin(const sparse_walk &w, uint8_t *raw)
{
    tile_walk t;
    piece_of(raw)->walk = w;
    t.ids = NULL;
    t.at = t.last = 0;
    __syncwarp();
    return t;
}

/* ---- rows -------------------------------------------------------------------------------------- */

enum { OWN_KEYS = 4 /* of a tile, that a lane has a part of */ };

/* The slots of keys key, key + 4, ... of the next tile, or -1; whether there is one. */
static __device__ __forceinline__ bool tile_next(tile_walk &t, const sparse_params &p, uint8_t *raw,
                                                 int key, int (&id)[OWN_KEYS])
{
    if (t.at >= t.last)
        piece_next(t, p, raw);
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++)
        id[i] = t.at + key + 4 * i < t.last ? __ldg(t.ids + t.at + key + 4 * i) : -1;
    const bool is = t.at < t.last;
    t.at += SPARSE_TILE;
    return is;
}

/* Warps 8 to 11, 16 keys each, eight lanes to the 128 bytes of a key's column. */
static __device__ void rows_run(const sparse_params &p, const sparse_walk &w, uint32_t smem,
                                uint8_t *raw)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - CONSUMERS / 32, chunk = lane % 8;
    const int key = 16 * warp + lane / 8;
    tile_walk walk = tiles_begin(w, raw);
    int id[OWN_KEYS];
    bool is = tile_next(walk, p, raw, key, id);
    for (uint32_t n = 0; is; n++) {
        const uint8_t *row[OWN_KEYS];
        uint32_t bytes[OWN_KEYS];
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) {
            row[i] = key_address(p, max(id[i], 0)) + 16 * chunk;
            bytes[i] = id[i] < 0 ? 0 : 16;
        }
        is = tile_next(walk, p, raw, key, id);
        const uint32_t tile = smem + AT_K + (n & 1) * TILE_BYTES, full = full_at(smem, n),
                       free = free_at(smem, n), parity = (n / 2 & 1) ^ 1;
        mbar_wait(free + 8 * FREE_ROPE, parity);
#pragma unroll
        for (int part = 0; part < N_FULL; part++) {
            if (part < 2)
                mbar_wait(free + 8 * (part == 0 ? FREE_LEFT : FREE_RIGHT), parity);
#pragma unroll
            for (int c = PART_COLS * part; c < min(PART_COLS * (part + 1), (int)N_COL); c++)
#pragma unroll
                for (int i = 0; i < OWN_KEYS; i++) {
                    const int k = key + 4 * i;
                    copy16(tile + c * COL_BYTES + k * 128 + ((chunk ^ (k & 7)) << 4),
                           row[i] + 128 * c, bytes[i]);
                }
            copy16_arrive(full + 8 * part);
        }
    }
}

#endif
