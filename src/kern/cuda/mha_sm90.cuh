/* mha_sm90.cuh - multi-head attention on sm_90a: what its two kernels share. mha_pack.cu rounds keys and values to
 * bf16 and lays them out as tiles, mha_sm90.cu attends the tiles.
 *
 * A tile is STEP keys of one head, as the products read it: columns of 64 dims, rows of 128 bytes, swizzled
 * (wgmma_tile). Keys: columns [STEP keys][64 dims], and one more, the rope part, which all heads share and which
 * is kept once. Values: for each 64 keys, columns [64 keys][64 dims]. Dims beyond nope and v_dim, and keys beyond
 * n_key, are zeros. So a plain bulk copy brings a tile, whatever the strides of the args.
 *
 * Sizes come in two forms: up to 128 dims without rope and 128 of values, and up to 192 and 256.
 *
 * A weight of 0 does not stop NaN. A key with a value that is not finite becomes zeros here; the first of each
 * block is told, and whoever attends it loses the block, as it would have by that value.
 */
#ifndef KVS_KERN_CUDA_MHA_SM90_CUH
#define KVS_KERN_CUDA_MHA_SM90_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "kern/mha.h"

enum {
    MHA_ROWS = 128, /* query rows of a unit, 64 of each group of consumers */
    MHA_ROPE = 64
};

/* Keys of a tile, dims without rope and of values, both filled up to multiples of 64. */
template <int STEP_, int NOPE_, int VDIM_> struct mha_form {
    enum {
        STEP = STEP_,
        NOPE = NOPE_,
        VDIM = VDIM_,
        BLOCK_TILES = MHA_BLOCK / STEP,
        KEY_COL = STEP * 128,         /* bytes of a column of keys              */
        HEAD_BYTES = STEP * NOPE * 2, /* of a tile's keys without rope          */
        ROPE_BYTES = STEP * MHA_ROPE * 2,
        KEY_BYTES = HEAD_BYTES + ROPE_BYTES,
        VALUE_BYTES = STEP * VDIM * 2,
        TILE_BYTES = HEAD_BYTES + VALUE_BYTES
    };
};
typedef mha_form<128, 128, 128> mha_narrow;
typedef mha_form<64, 192, 256> mha_wide;

/* What a block of a head holds: the first key with a value that is not finite, or MHA_BLOCK, and MHA_WILD where a
 * number is not finite or so large that a score or a sum might be none. */
enum { MHA_WILD = 1 << 16, MHA_FIRST_MASK = MHA_WILD - 1 };

typedef struct mha_params {
    int32_t n_row, n_head, nope, v_dim, n_key;
    int32_t n_block, n_tile;
    int32_t first;
    const uint16_t *q;
    int64_t q_stride_row, q_stride_head;
    int32_t q_wide;   /* rows of q are pieces of 16 bytes    */
    float scale_log2; /* of scores, base 2                   */
    const float *kv;
    int64_t kv_stride_key, kv_stride_head;
    int32_t kv_wide; /* rows of kv are pieces of 16 bytes */
    const uint16_t *rope;
    int64_t rope_stride;
    const int32_t *len;
    float *out;
    int64_t out_stride_row, out_stride_head;
    int32_t out_wide; /* pairs of out are aligned */
    float *lse;
    unsigned long long *n_nan; /* may be NULL */
    uint8_t *tiles;            /* [n_head][n_tile][keys, values]                   */
    uint8_t *rope_tiles;       /* [n_tile]                                         */
    int32_t *flags;            /* [n_head + 1][n_block], the last of the rope part */
} mha_params;

/* Whether one of two bf16 is none, or 2^E or more. */
template <int E> static __device__ __forceinline__ bool mha_pair_over(uint32_t two)
{
    return (two & 0x7fffu) >= (127u + E) << 7 || (two >> 16 & 0x7fffu) >= (127u + E) << 7;
}

/* Sizes of a query, a key, a value and a scale (base 2) below which a block is not wild: scores stay below 2^26,
 * sums below 2^64. */
enum { MHA_QK_EXP = 8, MHA_V_EXP = 40, MHA_SCALE_MAX = 4 };

/* Byte of 16-byte piece c (of 8) of row r in a swizzled column. */
static __device__ __forceinline__ uint32_t mha_piece(int r, int c)
{
    return (uint32_t)(r * 128 + ((c ^ (r & 7)) << 4));
}

/* The whole of n_key keys. */
template <class F> cudaError_t mha_pack_launch(const mha_params &p, cudaStream_t stream);

#endif
