/* kern/cuda/attn_sparse_keys.cuh - how the keys of a part of the work are copied by sparse attention's main kernel
 * (attn_sparse_sm90.cu).
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_KEYS_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_KEYS_CUH

#include "kern/cuda/attn_sparse_tile.cuh"
#include "kern/cuda/attn_sparse_walk.cuh"

/* Asks for the queries of a piece, so that they are near when its turn comes: thread i of
 * COPIERS. */
template <int N>
static __device__ void queries_ask(const sparse_params &p, int64_t row, int head_group, int i)
{
    const int head0 = head_group * p.group_heads, n_head = min(p.group_heads, p.n_head - head0);
    for (int j = i; j < n_head * 9; j += COPIERS)
        prefetch_l2(p.q + row * p.q_stride_row + (int64_t)(head0 + j / 9) * p.q_stride_head +
                    j % 9 * 64);
}

/* ---- keys ---------------------------------------------------------------------------------- */

/* The slots of keys at, at + 4, ... and of key `left`; past `last` slot 0, which is not read. */
static __device__ __forceinline__ void ids_next(int (&id)[4], int &id_left, const int32_t *ids,
                                                int at, int left, int last)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        id[k] = at + 4 * k < last ? __ldg(ids + at + 4 * k) : 0;
    id_left = left < last ? __ldg(ids + left) : 0;
}

/* Where a thread of warps 8 to 11, which have 16 rows of a tile each, brings its bytes. Eight lanes have a row's 128 bytes
 * at a time, four rows an instruction, so a lane keeps the addresses of its four rows and nothing is exchanged; what is
 * left of a row goes row by lane. */
template <int N, int FMT> struct copier {
    using L = layout<N, FMT>;
    static constexpr int whole = L::key_bytes / 128, rest = L::key_bytes % 128 / 16;
    static_assert(rest <= 1, "one chunk is left of a row");
    int lane, own, left; /* rows own, own + 4, ... and left */
    uint32_t ring, ring_left;

    __device__ __forceinline__ copier()
    {
        lane = threadIdx.x % 32;
        const int first = (threadIdx.x / 32 - CONSUMERS / 32) * COPY_ROWS;
        own = first + lane / 8;
        left = first + lane % COPY_ROWS;
        ring = SMEM + L::ring + own * L::row + lane % 8 * 16;
        ring_left = SMEM + L::ring + left * L::row + whole * 128;
    }

    __device__ __forceinline__ void addresses(const sparse_params &p, const int (&id)[4],
                                              int id_left, const uint8_t *(&from)[4],
                                              const uint8_t *&from_left) const
    {
#pragma unroll
        for (int k = 0; k < 4; k++)
            from[k] = key_address(p, id[k]) + lane % 8 * 16;
        from_left = key_address(p, id_left) + whole * 128;
    }

    /* The n-th tile when its place is free; nv: keys it has. Rows past the last key become zeros: the products take
     * 64 keys whatever is there, and NaN must not meet a weight of 0. */
    __device__ __forceinline__ void bring(uint32_t n, const uint8_t *const (&from)[4],
                                          const uint8_t *from_left, int nv) const
    {
        const uint32_t stage = n % L::stages, full = SMEM + L::bar_at + 8 * stage;
        mbar_wait(full + 8 * L::stages, (n / L::stages & 1) ^ 1);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < whole; i++)
                copy16(ring + stage * L::tile + 4 * k * L::row + 128 * i, from[k] + 128 * i,
                       own + 4 * k < nv ? 16 : 0);
        if (rest > 0 && lane < COPY_ROWS)
            copy16(ring_left + stage * L::tile, from_left, left < nv ? 16 : 0);
        copy16_arrive(full);
    }
};

/* Warps 8 to 11: copies the tiles of every piece into the ring. */
template <int N, int FMT>
static __device__ void keys_run(const sparse_params &p, sparse_walk w, int head_group)
{
    const copier<N, FMT> me;
    uint32_t n_tile = 0;
    sparse_unit u;
    while (sparse_next(w, p, u)) {
        const int64_t row = u.item / p.item_per_row;
        const int32_t *ids = p.ids + row * p.ids_stride + u.begin;
        const int last = min(u.n_key, u.b1 * SPARSE_TILE);
        int id[4], id_left;
        ids_next(id, id_left, ids, u.b0 * SPARSE_TILE + me.own, u.b0 * SPARSE_TILE + me.left, last);
        if (u.b1 > u.b0)
            queries_ask<N>(p, row, head_group, threadIdx.x - CONSUMERS);
        for (int b = u.b0; b < u.b1; b++, n_tile++) {
            const uint8_t *from[4], *from_left;
            me.addresses(p, id, id_left, from, from_left);
            ids_next(id, id_left, ids, (b + 1) * SPARSE_TILE + me.own,
                     (b + 1) * SPARSE_TILE + me.left, last);
            me.bring(n_tile, from, from_left, last - b * SPARSE_TILE);
        }
    }
}

#endif
