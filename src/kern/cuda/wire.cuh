/* kern/cuda/wire.cuh - how a kernel sends and waits through dev/wire.h.
 *
 * Cells rest on one property: a 16-byte store or load of the type b128 is one access (PTX gives single-copy
 * atomicity to scalar types, and b128 is one), also when the store comes over NVLink. So a cell is either
 * empty or holds all of what was sent, and needs no order towards other cells. `check --comm --device cuda` looks
 * for torn ones: every word of its messages depends on the exchange.
 *
 * An emptied cell is not sent to before the rank that emptied it has ended the kernel that did and has sent a
 * message of the next exchange, which the sender has received: the two stores meet in that order in the
 * receiver's memory.
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

static __device__ __forceinline__ uint32_t wire_load4(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ void wire_store4(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
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

/* Cells of messages from `from` in the area of rank `to`, and their words among the escapes. */
static __device__ __forceinline__ uint8_t *wire_cells(const wire &w, uint32_t epoch, int to, int from)
{
    return w.area[to] + wire_cell_at(w.n_rank, w.n_cell, epoch, from);
}

static __device__ __forceinline__ uint32_t *wire_escapes(const wire &w, uint32_t epoch, int to, int from)
{
    return (uint32_t *)(w.area[to] + wire_escape_at(w.n_rank, w.n_cell, epoch, from));
}

static __device__ __forceinline__ bool wire_is_empty(uint4 v)
{
    return v.x == WIRE_EMPTY_WORD && v.w == WIRE_EMPTY_WORD && wire_is_reserved(v.x, v.y, v.z, v.w);
}

static __device__ __noinline__ void wire_put_mark(const wire &w, uint32_t epoch, int to, uint32_t i, uint32_t last)
{
    wire_store4(wire_escapes(w, epoch, to, w.rank) + i, wire_escape_of(epoch, last));
}

/* Sends cell i of the message to rank `to`; cells: wire_cells of it. */
static __device__ __forceinline__ void wire_put(const wire &w, uint32_t epoch, int to, uint8_t *cells, uint32_t i,
                                                uint4 v)
{
    if (v.x == WIRE_EMPTY_WORD && wire_is_reserved(v.x, v.y, v.z, v.w)) {
        wire_put_mark(w, epoch, to, i, v.w);
        v.w = WIRE_MARK_WORD;
    }
    wire_store16(cells + (size_t)i * WIRE_CELL, v);
}

/* The last word of a cell that came as a mark. */
static __device__ __noinline__ uint32_t wire_take_mark(const wire &w, wire_run *r, int from, uint32_t i)
{
    const uint32_t *p = wire_escapes(w, r->epoch, w.rank, from) + i;
    uint32_t word = wire_load4(p);
    for (uint32_t n = 1; word >> 1 != r->epoch && !r->dead; n++) {
        if (n % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, from);
        }
        word = wire_load4(p);
    }
    return WIRE_EMPTY_WORD | (word & 1u);
}

/* What cell i of the message from rank `from`, which is not empty, stands for. */
static __device__ __forceinline__ uint4 wire_content(const wire &w, wire_run *r, int from, uint32_t i, uint4 v)
{
    if (v.x == WIRE_EMPTY_WORD && wire_is_reserved(v.x, v.y, v.z, v.w)) {
        v.w = wire_take_mark(w, r, from, i);
    }
    return v;
}

static __device__ __forceinline__ void wire_clear(uint8_t *cells, uint32_t i)
{
    wire_store16(cells + (size_t)i * WIRE_CELL,
                 make_uint4(WIRE_EMPTY_WORD, WIRE_EMPTY_WORD, WIRE_EMPTY_WORD, WIRE_EMPTY_WORD));
}

/* Cell i of the message from rank `from`, once it has come; empty again after. */
static __device__ __forceinline__ uint4 wire_take(const wire &w, wire_run *r, int from, uint32_t i)
{
    uint8_t *cells = wire_cells(w, r->epoch, w.rank, from);
    uint4 v = wire_load16(cells + (size_t)i * WIRE_CELL);
    for (uint32_t k = 1; wire_is_empty(v) && !r->dead; k++) {
        if (k % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, from);
        }
        v = wire_load16(cells + (size_t)i * WIRE_CELL);
    }
    wire_clear(cells, i);
    return wire_content(w, r, from, i, v);
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
    uint4 h = wire_load16(at);
    for (uint32_t k = 1; h.w != r->epoch && !r->dead; k++) {
        if (k % WIRE_POLLS == 0) {
            r->dead = wire_look(w, r->epoch, r->until, p);
        }
        h = wire_load16(at);
    }
    if (!r->dead && (h.x != what || h.y != n_row || h.z != words)) {
        wire_fail(w, r->epoch, WIRE_MISMATCH, p);
    }
}

#endif
