/* kern/cuda/exchange.cuh - how the kernels of exchanges are cut into blocks and launched.
 *
 * A grid has for each rank it serves (blockIdx.y) one block that compares heads, blocks that send and blocks
 * that receive, so that both directions of a link are busy from the first clock on and nobody's sending
 * waits for what he receives. All blocks fit on the device at once (two to a multiprocessor, counted over
 * the ranks): whoever waits is not in the way of whoever is waited for. */
#ifndef KVS_KERN_CUDA_EXCHANGE_CUH
#define KVS_KERN_CUDA_EXCHANGE_CUH

#include "kern/cuda/cuda.h"
#include "kern/cuda/wire.cuh"
#include "kern/exchange.h"

enum { THREADS = 256, WARPS = THREADS / 32, BLOCKS = 2 /* on a multiprocessor */ };

typedef struct exchange_shape {
    uint32_t send, receive; /* blocks */
} exchange_shape;

/* The threads or warps of one role, numbered. */
typedef struct crew {
    uint32_t at, n;
} crew;

static __device__ __forceinline__ bool is_receiver(const exchange_shape &s)
{
    return blockIdx.x > s.send;
}

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

/* The k-th rank to deal with: k = 0 is the own one; ranks begin with different peers. */
static __device__ __forceinline__ int nth_rank(const wire &w, int k)
{
    return (w.rank + k) % w.n_rank;
}

/* After the kernel before it: a launch may begin while that one ends. */
static __device__ __forceinline__ void after_the_one_before()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- launches --------------------------------------------------------------------------------- */

/* Blocks for so many works of a warp: at most `most`, with as equal shares as rounds of it can have. */
static uint32_t blocks_for(int64_t works, int64_t most)
{
    const int64_t want = (works + WARPS - 1) / WARPS;
    const int64_t rounds = (want + most - 1) / most;
    return want < 1 ? 1 : (uint32_t)((want + rounds - 1) / rounds);
}

/* Blocks of one rank where n of them share the device: no more in all than are there at once. A fifth of them can
 * send as fast as a link carries; those that receive have more to do, and wait. works: what goes to one peer, in
 * works of a warp; messages: how many such are sent, 0 where that has been done. */
static exchange_shape shape_of(const dev_queue *q, int32_t n, int32_t messages, int64_t works)
{
    const int64_t all = (int64_t)(q->n_sm > 0 ? q->n_sm : 1) * BLOCKS / n;
    const int64_t room = all < 3 ? 2 : all - 1;
    const int64_t send = messages == 0 ? 0 : room / 5 < 1 ? 1 : room / 5;
    exchange_shape s;
    s.send = messages == 0 ? 0 : blocks_for(works * messages, send);
    s.receive = blocks_for(works, room - send);
    return s;
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
            (seen & (1u << a[i].w.rank)) != 0 || a[i].n_row != a[0].n_row) {
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
    c.blockDim = dim3(THREADS);
    c.stream = cuda_stream(q);
    c.attrs = &early;
    c.numAttrs = 1;
    (void)cudaLaunchKernelEx(&c, kernel, x);
    cuda_launched(q, name);
}

#endif
