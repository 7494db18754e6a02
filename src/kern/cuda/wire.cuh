/* kern/cuda/wire.cuh - how a kernel sends and waits through dev/wire.h.
 *
 * Lines rest on one property: a 16-byte store or load of the type b128 is one access (PTX gives single-copy
 * atomicity to scalar types, and b128 is one), also when the store comes over NVLink. So a line holds
 * either the old three words and the old epoch or the new ones, and needs no order towards other lines.
 * `check --comm --device cuda` looks for torn lines: every word of its messages depends on the exchange.
 *
 * Chunks rest on release and acquire, which add up along a chain: warps store, count in shared memory with
 * release; the thread that sees the count with acquire sets the flag with release at system scope; whoever
 * sees the flag with acquire, and meets its warp, sees what was stored.
 *
 * A wait ends by itself: after the wire's limit it sets the fault, here and on every peer that is sound so
 * far, and from then on all waits of the rank end at once. */
#ifndef KVS_KERN_CUDA_WIRE_CUH
#define KVS_KERN_CUDA_WIRE_CUH

#include "dev/wire.h"

/* Loads between looks at the clock and at the fault. */
enum { WIRE_POLLS = 64 };

typedef struct wire_run {
    uint32_t epoch;
    bool dead; /* the group has ended: what waits return is void */
    uint64_t until;
} wire_run;

static __device__ __forceinline__ uint4 wire_load16(const void *p)
{
    uint64_t lo, hi;
    asm volatile("{\n.reg .b128 v;\nld.relaxed.sys.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
                 : "=l"(lo), "=l"(hi)
                 : "l"(p)
                 : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32));
}

static __device__ __forceinline__ void wire_store16(void *p, uint4 v)
{
    const uint64_t lo = (uint64_t)v.y << 32 | v.x;
    const uint64_t hi = (uint64_t)v.w << 32 | v.z;
    asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(p),
                 "l"(lo), "l"(hi)
                 : "memory");
}

static __device__ __forceinline__ uint32_t wire_peek_flag(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ uint32_t wire_load_flag(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ void wire_store_flag(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ uint64_t wire_clock()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

static __device__ __forceinline__ wire_control *wire_own(const wire &w)
{
    return (wire_control *)w.area[w.rank];
}

/* Ends the group, unless it has ended: the first fault stays. */
static __device__ __noinline__ void wire_fail(const wire &w, uint32_t epoch, wire_fault code, int about)
{
    const unsigned long long f = WIRE_FAULT(code, about, w.rank, epoch);
    unsigned long long *own = (unsigned long long *)&wire_own(w)->fault;
    if (atomicCAS_system(own, 0ull, f) != 0) {
        return;
    }
    for (int p = 0; p < w.n_rank; p++) {
        if (p != w.rank) {
            atomicCAS_system((unsigned long long *)&((wire_control *)w.area[p])->fault, 0ull, f);
        }
    }
}

/* The control block, for wire_begin: asked for early, so that a first load of data shares the way. */
static __device__ __forceinline__ uint4 wire_ask(const wire &w)
{
    return wire_load16(wire_own(w));
}

/* The number of the exchange that this kernel is; by whole warps, with what wire_ask gave. False: the group
 * has ended. */
static __device__ __forceinline__ bool wire_begin(const wire &w, uint4 c, wire_run *r)
{
    const uint64_t done = (uint64_t)__shfl_sync(~0u, c.y, 0) << 32 | __shfl_sync(~0u, c.x, 0);
    const uint32_t fault = __shfl_sync(~0u, c.z | c.w, 0);
    r->epoch = wire_epoch(done);
    r->dead = false;
    r->until = wire_clock() + w.limit_ns;
    if (fault == 0 && done / WIRE_TURN >= WIRE_LAST_EPOCH) {
        wire_fail(w, r->epoch, WIRE_WORN, w.rank);
        return false;
    }
    return fault == 0;
}

/* By all threads of a block, when it is done; blocks: of the rank, this one is number `block`. */
static __device__ __forceinline__ void wire_end(const wire &w, uint32_t block, uint32_t blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t n = block == 0 ? WIRE_TURN - (blocks - 1) : 1u;
        atomicAdd((unsigned long long *)&wire_own(w)->done, (unsigned long long)n);
    }
}

/* A wait that takes long: whether the group has ended meanwhile, or ends here. */
static __device__ __noinline__ bool wire_look(const wire &w, uint32_t epoch, uint64_t until, int from)
{
    const uint4 c = wire_load16(wire_own(w));
    if ((c.z | c.w) == 0 && wire_clock() > until) {
        wire_fail(w, epoch, WIRE_LATE, from);
        return true;
    }
    return (c.z | c.w) != 0;
}

/* B lines of one peer, `step` bytes from one to the next, once they all are of this epoch; the first n of them
 * are wanted. One way to the memory and back serves all that are missing. */
template <int B>
static __device__ __forceinline__ void wire_wait_lines(const wire &w, wire_run *r, const uint8_t *at,
                                                       size_t step, int n, int from, uint4 (&v)[B])
{
    for (uint32_t i = 1;; i++) {
        bool missing = false;
#pragma unroll
        for (int b = 0; b < B; b++) {
            v[b] = wire_load16(at + (b < n ? b : 0) * step);
        }
#pragma unroll
        for (int b = 0; b < B; b++) {
            missing = missing || v[b].w != r->epoch;
        }
        if (!missing || r->dead) {
            return;
        }
        if (i % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, from);
        }
    }
}

/* By a warp: until the chunk of this flag has come. */
static __device__ __forceinline__ void wire_wait_flag(const wire &w, wire_run *r, const uint32_t *p, int from)
{
    if (threadIdx.x % 32 == 0) {
        for (uint32_t n = 1; wire_peek_flag(p) != r->epoch && !r->dead; n++) {
            if (n % WIRE_POLLS == 0) {
                r->dead = wire_look(w, r->epoch, r->until, from);
            }
        }
        (void)wire_load_flag(p); /* orders what follows behind what the flag stands for */
    }
    r->dead = __shfl_sync(~0u, r->dead, 0) != 0;
}

/* Pieces of a chunk, stored by several warps of a block, are counted in shared memory; one thread waits until
 * all have been and sets the flag for them, which takes as long as the stores take to arrive: the others go
 * on meanwhile. By a warp that has stored its piece: */
static __device__ __forceinline__ void wire_piece_done(uint32_t *count)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"((uint32_t)__cvta_generic_to_shared(count))
                     : "memory");
    }
}

/* By the one thread. Nothing keeps the warps from coming: they wait for nobody and have agreed to go on. */
static __device__ __forceinline__ void wire_set_flag(uint32_t *flag, uint32_t epoch, const uint32_t *count,
                                                     uint32_t pieces)
{
    uint32_t n;
    do {
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                     : "=r"(n)
                     : "r"((uint32_t)__cvta_generic_to_shared(count))
                     : "memory");
    } while (n < pieces);
    wire_store_flag(flag, epoch);
}

/* Lines, flags and chunks of messages from `from` in the area of rank `to`. */
static __device__ __forceinline__ uint8_t *wire_lines(const wire &w, uint32_t epoch, int to, int from)
{
    return w.area[to] + wire_line_at(w.n_rank, w.n_line, epoch, from);
}

static __device__ __forceinline__ uint32_t *wire_flags(const wire &w, uint32_t epoch, int to, int from)
{
    return (uint32_t *)(w.area[to] + wire_flag_at(w.n_rank, w.n_line, w.n_chunk, epoch, from));
}

static __device__ __forceinline__ uint8_t *wire_chunks(const wire &w, uint32_t epoch, int to, int from)
{
    return w.area[to] + wire_chunk_at(w.n_rank, w.n_line, w.n_chunk, epoch, from);
}

/* By the first warp of one block of each rank: tells every peer what this rank's message is, and ends the
 * group where a peer's is another. */
static __device__ __forceinline__ void wire_compare_heads(const wire &w, wire_run *r, uint32_t what,
                                                          uint32_t n_row, uint32_t words)
{
    const int p = (int)threadIdx.x;
    if (p >= w.n_rank) {
        return;
    }
    /* the own one is kept for whoever explains a mismatch */
    wire_store16(w.area[p] + wire_head_at(w.n_rank, r->epoch, w.rank),
                 make_uint4(what, n_row, words, r->epoch));
    const uint8_t *at = w.area[w.rank] + wire_head_at(w.n_rank, r->epoch, p);
    uint4 h[1];
    wire_wait_lines<1>(w, r, at, 0, 1, p, h);
    if (!r->dead && (h[0].x != what || h[0].y != n_row || h[0].z != words)) {
        wire_fail(w, r->epoch, WIRE_MISMATCH, p);
    }
}

#endif
