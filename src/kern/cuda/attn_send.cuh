/* attn_send.cuh - results of attention on their way to the ranks of their heads: the message that exchange_merge.cu
 * receives, sent by whoever has a head's last value in place of senders of its own. What is the own rank's goes to memory.
 *
 * The exchange is the next one of the rank, which begins when the merge is launched; what it rests on (dev/wire.h) holds as it
 * does for senders of that launch, which come after the same kernels: the rank has heard in the exchange before from all
 * peers, so they have finished the one before that. */
#ifndef KVS_KERN_CUDA_ATTN_SEND_CUH
#define KVS_KERN_CUDA_ATTN_SEND_CUH

#include "kern/cuda/attn_send.h"
#include "kern/cuda/wire.cuh"

enum { SEND_CELLS = 128 /* of a head's values */ };

/* The exchange that results go with; 0: the group has ended, or can do no more, and nothing is sent. To be asked before
 * grid_wait, too, for the kernels that an early launch of attention may overtake are attention's own. */
static __device__ __forceinline__ uint32_t send_epoch(const attn_send &s)
{
    const uint4 c = wire_load16(wire_own(s.w));
    const uint64_t done = (uint64_t)c.y << 32 | c.x;
    return (c.z | c.w) != 0 || done / WIRE_TURN >= WIRE_LAST_EPOCH ? 0 : wire_epoch(done);
}

/* wire_put, with nothing called: these kernels have no registers for what a call may change. */
static __device__ __forceinline__ void send_cell(const attn_send &s, uint32_t epoch, int to, uint8_t *cells, uint32_t i,
                                                 uint4 v)
{
    if (v.x == WIRE_EMPTY_WORD && wire_is_reserved(v.x, v.y, v.z, v.w)) {
        wire_store4(wire_escapes(s.w, epoch, to, s.w.rank) + i, wire_escape_of(epoch, v.w));
        v.w = WIRE_MARK_WORD;
    }
    wire_store16(cells + (size_t)i * WIRE_CELL, v);
}

/* The way of a row's head: `own` is where its result is to be where it is the own rank's. */
struct head_way {
    float *own;
    uint8_t *cells; /* of the message to rank `to` */
    int to;
    uint32_t unit;
    bool is_own;

    __device__ __forceinline__ head_way(const attn_send &s, uint32_t epoch, int64_t row, int head, float *result)
    {
        to = head / s.local;
        unit = (uint32_t)(s.row0 + (int32_t)row) * (uint32_t)s.local + (uint32_t)(head - to * s.local);
        is_own = to == s.w.rank;
        own = result;
        cells = wire_cells(s.w, epoch, to, s.w.rank);
    }

    /* Values 4 i to 4 i + 3. */
    __device__ __forceinline__ void four(const attn_send &s, uint32_t epoch, int i, float4 v) const
    {
        if (is_own)
            *(float4 *)(own + 4 * i) = v;
        else if (epoch != 0)
            send_cell(s, epoch, to, cells, unit * SEND_CELLS + i,
                      make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)));
    }

    /* By one thread; at: where the LSE of the own rank's is to be. */
    __device__ __forceinline__ void lse(const attn_send &s, uint32_t epoch, float v, float *at) const
    {
        if (is_own)
            *at = v;
        else if (epoch != 0)
            for (int k = 0; k < s.works; k++)
                wire_store16(cells + (size_t)(s.units * SEND_CELLS + unit * s.works + k) * WIRE_CELL,
                             make_uint4(__float_as_uint(v), 0, 0, 0));
    }
};

#endif
