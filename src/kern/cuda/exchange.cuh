/* kern/cuda/exchange.cuh - how the kernels of exchanges are cut into blocks and launched.
 *
 * A grid has for each rank it serves (blockIdx.y) one block that compares heads, blocks that send and blocks
 * that receive, so that both directions of a link are busy from the first clock on and nobody's sending
 * waits for what he receives. All blocks fit on the device at once (two to a multiprocessor, counted over
 * the ranks): whoever waits is not in the way of whoever is waited for.
 *
 * A message in chunks is cut into pieces, a warp's work each; a flag stands for `group` pieces. */
#ifndef KVS_KERN_CUDA_EXCHANGE_CUH
#define KVS_KERN_CUDA_EXCHANGE_CUH

#include "kern/cuda/cuda.h"
#include "kern/cuda/wire.cuh"
#include "kern/exchange.h"

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,               /* and a warp that sets flags, where there are chunks        */
    MAX_SEND = 96,                      /* blocks                                                   */
    MAX_RECEIVE = 128,
    MAX_GROUP = 512                     /* groups that a block may send                             */
};
/* What the blocks of a grid do. */
typedef struct exchange_shape {
    int32_t lines;          /* the form: lines, else chunks */
    uint32_t send, receive; /* blocks */
    uint32_t group;         /* pieces behind a flag */
} exchange_shape;

/* Threads or warps of one role, numbered. */
typedef struct crew {
    uint32_t at, n;
} crew;

static __device__ __forceinline__ bool is_receiver(const exchange_shape &s)
{
    return blockIdx.x > s.send;
}

/* Not for the warp that sets flags. */
static __device__ __forceinline__ crew crew_of_threads(const exchange_shape &s)
{
    const uint32_t block = is_receiver(s) ? blockIdx.x - 1 - s.send : blockIdx.x - 1;
    return crew{block * THREADS + threadIdx.x, (is_receiver(s) ? s.receive : s.send) * THREADS};
}

static __device__ __forceinline__ crew crew_of_warps(const exchange_shape &s)
{
    const crew t = crew_of_threads(s);
    return crew{t.at / 32, t.n / 32};
}

static __device__ __forceinline__ bool is_flag_warp()
{
    return threadIdx.x >= THREADS;
}

/* The k-th rank to deal with: k = 0 is the own one; ranks begin with different peers. */
static __device__ __forceinline__ int nth_rank(const wire &w, int k)
{
    return (w.rank + k) % w.n_rank;
}

/* A block that sends groups of pieces to all peers: its warps store, one thread sets the flags. SEND stores piece
 * i for rank `to` at an address, by a warp. counts: zero, of MAX_GROUP words. */
template <typename SEND>
static __device__ __forceinline__ void send_groups(const wire &w, const wire_run &r, const exchange_shape &s,
                                                   uint32_t pieces, uint32_t *counts, SEND send)
{
    const uint32_t groups = (pieces + s.group - 1) / s.group;
    uint32_t n = 0;
    for (int k = 1; k < w.n_rank; k++) {
        const int to = nth_rank(w, k);
        uint8_t *slot = wire_chunks(w, r.epoch, to, w.rank);
        for (uint32_t g = blockIdx.x - 1; g < groups; g += s.send, n++) {
            if (is_flag_warp()) {
                if (threadIdx.x == THREADS) {
                    wire_set_flag(wire_flags(w, r.epoch, to, w.rank) + g, r.epoch, &counts[n], WARPS);
                }
                continue;
            }
            const uint32_t end = (g + 1) * s.group < pieces ? (g + 1) * s.group : pieces;
            for (uint32_t i = g * s.group + threadIdx.x / 32; i < end; i += WARPS) {
                send(to, i, slot + (size_t)i * WIRE_CHUNK);
            }
            wire_piece_done(&counts[n]);
        }
    }
}

/* Zeroes the counts of a block that sends chunks, and makes its warps agree: all go on, or none where one has
 * seen that the group has ended, since the thread that sets flags waits for them all. */
static __device__ __forceinline__ bool begin_groups(uint32_t *counts, bool sound)
{
    for (uint32_t i = threadIdx.x; i < MAX_GROUP; i += blockDim.x) {
        counts[i] = 0;
    }
    return __syncthreads_and(sound) != 0;
}

/* After the kernel before it: a launch may begin while that one ends. */
static __device__ __forceinline__ void after_the_one_before()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- launches --------------------------------------------------------------------------------- */

static uint32_t blocks_for(int64_t items, int64_t per_block, int64_t most)
{
    const int64_t want = (items + per_block - 1) / per_block;
    return (uint32_t)(want < 1 ? 1 : want < most ? want : most);
}

/* Blocks of one rank of a group of n_rank, where n of them share the device: two blocks to a multiprocessor in
 * all. items: lines / a warp's or thread's work to one peer, per_block of them to a block. */
static exchange_shape shape_of(const dev_queue *q, int32_t n, int32_t n_rank, int32_t lines, int64_t items,
                               int64_t per_block)
{
    const int64_t half = ((int64_t)2 * (q->n_sm > 0 ? q->n_sm : 1) / n - 1) / 2;
    const int64_t room = half < 1 ? 1 : half;
    const int64_t peers = n_rank > 1 ? n_rank - 1 : 1;
    exchange_shape s;
    s.lines = lines;
    s.group = WARPS;
    s.send = blocks_for(items * peers, per_block, room < MAX_SEND ? room : (int64_t)MAX_SEND);
    s.receive = blocks_for(items * peers, per_block, room < MAX_RECEIVE ? room : (int64_t)MAX_RECEIVE);
    while (((items + s.group - 1) / s.group + s.send - 1) / s.send * peers > MAX_GROUP) {
        s.group *= 2;
    }
    return s;
}

static bool is_lines(int32_t form, int64_t bytes)
{
    return form == EXCHANGE_AUTO ? bytes <= EXCHANGE_LINE_MAX : form == EXCHANGE_LINES;
}

/* Ranks of one launch belong to one group, do the same, and none is there twice. */
template <typename A>
static const char *refuses_ranks(const A *a, int32_t n)
{
    uint32_t seen = 0;
    if (n < 1 || n > WIRE_MAX_RANK) {
        return "exchange: a launch serves 1 to 8 ranks";
    }
    for (int32_t i = 0; i < n; i++) {
        if (a[i].w.n_rank != a[0].w.n_rank || a[i].w.rank < 0 || a[i].w.rank >= WIRE_MAX_RANK ||
            (seen & (1u << a[i].w.rank)) != 0 || a[i].form != a[0].form || a[i].n_row != a[0].n_row) {
            return "exchange: the ranks of a launch are different ones of one group with the same message";
        }
        seen |= 1u << a[i].w.rank;
    }
    return NULL;
}

/* A launch that may begin while the kernel before it ends (it waits for that itself). */
template <typename X>
static void launch(void (*kernel)(X), const X &x, const exchange_shape &s, int32_t n, dev_queue *q,
                   const char *name)
{
    cudaLaunchAttribute early;
    cudaLaunchConfig_t c = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(1 + s.send + s.receive, (unsigned)n);
    c.blockDim = dim3(s.lines ? THREADS : THREADS + 32);
    c.stream = cuda_stream(q);
    c.attrs = &early;
    c.numAttrs = 1;
    (void)cudaLaunchKernelEx(&c, kernel, x);
    cuda_launched(q, name);
}

#endif
