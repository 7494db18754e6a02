/* kern/cuda/wire.cuh - how a kernel sends and waits through dev/wire.h.
 *
 * Lines rest on one property: a 16-byte store or load of the type b128 is one access (PTX gives single-copy
 * atomicity to scalar types, and b128 is one), also when the store comes over NVLink. So a line holds
 * either the old three words and the old epoch or the new ones, and needs no order towards other lines.
 * `check --comm --device cuda` looks for torn lines: every word of its messages depends on the exchange.
 *
 * Chunks rest on release and acquire at system scope: a warp stores its chunk, meets, and lane 0 sets the
 * flag with release; whoever sees the flag with acquire, and meets, sees the chunk.
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

/* The number of the exchange that this kernel is; by whole warps. False: the group has ended. */
static __device__ __forceinline__ bool wire_begin(const wire &w, wire_run *r)
{
    const uint4 c = wire_load16(wire_own(w));
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

/* The line once it is of this epoch; v: what a first load of it gave. */
static __device__ __forceinline__ uint4 wire_wait_line(const wire &w, wire_run *r, const void *p, uint4 v,
                                                       int from)
{
    for (uint32_t n = 1; v.w != r->epoch && !r->dead; n++) {
        if (n % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, from);
        }
        v = wire_load16(p);
    }
    return v;
}

/* By a warp: until the chunk of this flag has come. */
static __device__ __forceinline__ void wire_wait_flag(const wire &w, wire_run *r, const uint32_t *p, int from)
{
    if (threadIdx.x % 32 == 0) {
        for (uint32_t n = 1; wire_load_flag(p) != r->epoch && !r->dead; n++) {
            if (n % WIRE_POLLS == 0) {
                r->dead = wire_look(w, r->epoch, r->until, from);
            }
        }
    }
    r->dead = __shfl_sync(~0u, r->dead, 0) != 0;
}

/* By a warp, after it has stored a chunk. */
static __device__ __forceinline__ void wire_set_flag(uint32_t *p, uint32_t epoch)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        wire_store_flag(p, epoch);
    }
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
    const uint4 h = wire_wait_line(w, r, at, wire_load16(at), p);
    if (!r->dead && (h.x != what || h.y != n_row || h.z != words)) {
        wire_fail(w, r->epoch, WIRE_MISMATCH, p);
    }
}

#endif
