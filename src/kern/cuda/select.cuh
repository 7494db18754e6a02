/* kern/cuda/select.cuh - exact selection inside one block: candidates in shared memory, the cut of the k
 * best, what is kept, and the way out in ascending order.
 *
 * A candidate is {bits of the score, id}. Its rank is (sel_key, sel_inv), both unsigned, larger is better:
 * the order of kern/index.h as integers. The cut is found by a radix select over 11 + 11 + 10 bits of the
 * key and then as many of the id, from the top; it ends as soon as the bin holds nothing to leave out.
 * Appending is in any order; a set is what counts until sel_emit gives each member its place by position.
 *
 * A team of 512 threads works together (SEL_TEAM, ids 0 to 511, named barrier 2).
 */
#ifndef KVS_KERN_CUDA_SELECT_CUH
#define KVS_KERN_CUDA_SELECT_CUH

#include <stdint.h>

#include "kern/cuda/ptx.cuh"

enum { SEL_TEAM = 512, SEL_BAR = 2, SEL_BIN = 2048, SEL_WARP = SEL_TEAM / 32 };

typedef struct sel_cut {
    uint32_t key, inv; /* a candidate is in iff (sel_key, sel_inv) >= (key, inv) */
} sel_cut;

typedef struct alignas(16) sel_shared {
    uint32_t hist[SEL_BIN];
    uint32_t warp[SEL_WARP];
    uint32_t bin, above, in_bin, total;
    uint32_t n_out;
    sel_cut nth;
} sel_shared;

/* Adds 1 to a counter in shared memory; the lanes that want to, one by one, few as they are. */
static __device__ __forceinline__ uint32_t sel_take(uint32_t *n)
{
    uint32_t was;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(was) : "r"(ptx_shared(n)) : "memory");
    return was;
}

static __device__ __forceinline__ void sel_sync()
{
    named_barrier<SEL_BAR, SEL_TEAM>();
}

/* ---- what blocks of one launch tell each other --------------------------------------------------- */

/* Orders what this thread has read and written before what it does after, for the whole device. */
static __device__ __forceinline__ void fence_device()
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/* Adds; nothing waits for it but what is ordered after. */
static __device__ __forceinline__ void count_add(uint32_t *n, uint32_t add)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(n), "r"(add) : "memory");
}

/* Adds 1, after what this thread has seen done before. */
static __device__ __forceinline__ void count_up(uint32_t *n)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(n) : "memory");
}

/* Waits for n to be reached. */
static __device__ __forceinline__ void wait_count(const uint32_t *at, uint32_t n)
{
    uint32_t v;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    } while (v < n);
}

/* ---- scores as integers ------------------------------------------------------------------------- */

/* Larger score, larger key; both zeros have one. */
static __device__ __forceinline__ uint32_t sel_key(uint32_t bits)
{
    const uint32_t b = bits == 0x80000000u ? 0u : bits;
    return (b >> 31) != 0 ? ~b : b | 0x80000000u;
}

static __device__ __forceinline__ float sel_score(uint32_t key)
{
    return __uint_as_float((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key);
}

/* Lower id, larger value. */
static __device__ __forceinline__ uint32_t sel_inv(int32_t id)
{
    return 0x7FFFFFFFu - (uint32_t)id;
}

/* Score's key and id as one number of 63 bits, larger is better. */
static __device__ __forceinline__ unsigned long long sel_rank(uint2 e)
{
    return (unsigned long long)sel_key(e.x) << 31 | sel_inv((int32_t)e.y);
}

static __device__ __forceinline__ bool sel_in(sel_cut c, uint32_t bits, int32_t id)
{
    const uint32_t key = sel_key(bits);
    return key > c.key || (key == c.key && sel_inv(id) >= c.inv);
}

/* Whether any thread of the team says so. */
static __device__ __forceinline__ bool sel_any(bool mine)
{
    return named_barrier_any<SEL_BAR, SEL_TEAM>(mine);
}

static __device__ __forceinline__ uint32_t sel_warp_scan(uint32_t v)
{
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t up = __shfl_up_sync(~0u, v, d);
        v += (int)(threadIdx.x & 31) >= d ? up : 0;
    }
    return v;
}

/* Sum over lower threads; *total over all. */
static __device__ __noinline__ uint32_t sel_scan(sel_shared *s, uint32_t v, uint32_t *total)
{
    const int32_t tid = threadIdx.x;
    const uint32_t in_warp = sel_warp_scan(v);
    sel_sync();
    if (tid % 32 == 31) {
        s->warp[tid / 32] = in_warp;
    }
    sel_sync();
    const uint32_t of_warp = tid % 32 < SEL_WARP ? s->warp[tid % 32] : 0;
    const uint32_t upto = sel_warp_scan(of_warp);
    *total = __shfl_sync(~0u, upto, 31);
    return __shfl_sync(~0u, upto - of_warp, tid / 32) + in_warp - v;
}

static __device__ __forceinline__ void sel_hist_zero(sel_shared *s)
{
    ((uint4 *)s->hist)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    sel_sync();
}

/* From the counts of thread's four bins (h[0] the highest: bin 2047 - 4 tid): the bin in which the
 * need-th from the top lies, into s. With fewer than `need` in all, bin 0 and in_bin 0 mean: take all. */
static __device__ __noinline__ void sel_find_bin(sel_shared *s, const uint32_t *h, uint32_t need)
{
    const int32_t tid = threadIdx.x;
    uint32_t total;
    uint32_t before = sel_scan(s, h[0] + h[1] + h[2] + h[3], &total);
    if (tid == 0) {
        s->total = total;
        if (total < need) {
            s->bin = 0;
            s->above = total;
            s->in_bin = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (before < need && need <= before + h[i]) {
            s->bin = (uint32_t)(SEL_BIN - 1 - 4 * tid - i);
            s->above = before;
            s->in_bin = h[i];
        }
        before += h[i];
    }
    sel_sync();
}

static __device__ __forceinline__ void sel_own_bins(const uint32_t *hist, uint32_t *h)
{
    const uint4 v = ((const uint4 *)hist)[SEL_TEAM - 1 - (int)threadIdx.x];
    h[0] = v.w;
    h[1] = v.z;
    h[2] = v.y;
    h[3] = v.x;
}

static __device__ __forceinline__ uint32_t sel_shift(int32_t digit)
{
    return digit % 3 == 0 ? 21 : digit % 3 == 1 ? 10 : 0;
}

static __device__ __forceinline__ uint32_t sel_mask(int32_t digit)
{
    return digit % 3 == 2 ? 1023 : 2047;
}

/* Whether a candidate agrees with the cut in all digits above `digit`. */
static __device__ __forceinline__ bool sel_agrees(sel_cut c, uint32_t key, uint32_t inv,
                                                  int32_t digit)
{
    if (digit < 3) {
        return digit == 0 || ((key ^ c.key) >> (digit == 1 ? 21 : 10)) == 0;
    }
    return key == c.key && (digit == 3 || ((inv ^ c.inv) >> (digit == 4 ? 21 : 10)) == 0);
}

static __device__ __forceinline__ uint32_t sel_digit(uint32_t key, uint32_t inv, int32_t digit)
{
    return ((digit < 3 ? key : inv) >> sel_shift(digit)) & sel_mask(digit);
}

static __device__ __forceinline__ void sel_set_digit(sel_cut *c, int32_t digit, uint32_t bin)
{
    if (digit < 3) {
        c->key |= bin << sel_shift(digit);
    } else {
        c->inv |= bin << sel_shift(digit);
    }
}

/* Counts the candidates that agree with c, by their digit, into the cleared histogram. */
static __device__ __forceinline__ void sel_hist(sel_shared *s, const uint2 *buf, int32_t n,
                                                sel_cut c, int32_t digit)
{
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += SEL_TEAM) {
        const uint2 e = buf[i];
        const uint32_t key = sel_key(e.x);
        const uint32_t inv = sel_inv((int32_t)e.y);
        if (sel_agrees(c, key, inv, digit)) {
            atomicAdd(&s->hist[sel_digit(key, inv, digit)], 1u);
        }
    }
    sel_sync();
}

/* A cut that keeps the k best of buf and at most `slack` more. */
static __device__ __noinline__ sel_cut sel_find(sel_shared *s, const uint2 *buf, int32_t n,
                                                int32_t k, int32_t slack)
{
    sel_cut c = {0, 0};
    if (n <= k + slack) {
        return c;
    }
    uint32_t need = (uint32_t)k;
#pragma unroll 1
    for (int32_t digit = 0; digit < 6; digit++) {
        sel_hist_zero(s);
        sel_hist(s, buf, n, c, digit);
        uint32_t h[4];
        sel_own_bins(s->hist, h);
        sel_find_bin(s, h, need);
        need -= s->above;
        sel_set_digit(&c, digit, s->bin);
        const uint32_t over = s->in_bin - need;
        sel_sync();
        if (over <= (uint32_t)slack) {
            break;
        }
    }
    return c;
}

/* Of entries whose keys are lo or more, in bins of 2^13 from there, two octaves of scores: the one that holds the k-th
 * best, into s->bin, s->above, s->in_bin. */
static __device__ __forceinline__ void sel_bin_above(sel_shared *s, const uint2 *buf, int32_t n,
                                                     int32_t k, uint32_t lo)
{
    sel_hist_zero(s);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += SEL_TEAM) {
        atomicAdd(&s->hist[min((sel_key(buf[i].x) - lo) >> 13, SEL_BIN - 1u)], 1u);
    }
    sel_sync();
    uint32_t h[4];
    sel_own_bins(s->hist, h);
    sel_find_bin(s, h, (uint32_t)k);
}

/* sel_find for entries whose keys are lo or more: one pass where the k-th best lies in those bins and not too many share
 * its own. */
static __device__ __noinline__ sel_cut sel_find_above(sel_shared *s, const uint2 *buf, int32_t n,
                                                      int32_t k, int32_t slack, uint32_t lo)
{
    if (n <= k + slack) {
        return {lo, 0};
    }
    if (lo == 0) {
        return sel_find(s, buf, n, k, slack);
    }
    sel_bin_above(s, buf, n, k, lo);
    const uint32_t bin = s->bin;
    const uint32_t over = s->above + s->in_bin - (uint32_t)k;
    sel_sync();
    if (bin < SEL_BIN - 1u && over <= (uint32_t)slack) {
        return {lo + (bin << 13), 0};
    }
    return sel_find(s, buf, n, k, slack);
}

enum { SEL_POOL = 512 };

/* Of the first n ranks of pool, the need-th from the top as a cut, into *c; the caller syncs before and after. */
static __device__ __forceinline__ void sel_nth(const unsigned long long *pool, uint32_t n,
                                               uint32_t need, sel_cut *c)
{
    const uint32_t tid = threadIdx.x;
    const unsigned long long mine = tid < n ? pool[tid] : 0;
    uint32_t better = 0;
#pragma unroll 8
    for (uint32_t j = 0; j < n; j++) {
        better += pool[j] > mine;
    }
    if (tid < n && better == need - 1) {
        *c = {(uint32_t)(mine >> 31), (uint32_t)mine & 0x7FFFFFFFu};
    }
}

/* The cut that keeps exactly the k best; n > k, lo as in sel_find_above. The bin of the k-th best is mostly so small
 * that each of its entries can be held against all others. */
static __device__ __noinline__ sel_cut sel_find_exact(sel_shared *s, const uint2 *buf, int32_t n,
                                                      int32_t k, uint32_t lo)
{
    if (lo == 0) {
        return sel_find(s, buf, n, k, 0);
    }
    sel_bin_above(s, buf, n, k, lo);
    const uint32_t bin = s->bin;
    const uint32_t in_bin = s->in_bin;
    const uint32_t need = (uint32_t)k - s->above;
    if (bin == SEL_BIN - 1u || in_bin > SEL_POOL) {
        sel_sync();
        return sel_find(s, buf, n, k, 0);
    }
    unsigned long long *pool = (unsigned long long *)s->hist;
    if (threadIdx.x == 0) {
        s->n_out = 0;
    }
    sel_sync();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += SEL_TEAM) {
        const uint2 e = buf[i];
        if ((sel_key(e.x) - lo) >> 13 == bin) {
            pool[sel_take(&s->n_out)] = sel_rank(e);
        }
    }
    sel_sync();
    sel_nth(pool, in_bin, need, &s->nth);
    sel_sync();
    return s->nth;
}

/* Appends e to out at *n (shared) for the threads that want to; whole warps call it. */
static __device__ __forceinline__ uint32_t sel_append(uint32_t *n, bool want)
{
    const uint32_t m = __ballot_sync(~0u, want);
    const uint32_t lane = threadIdx.x & 31;
    uint32_t at = 0;
    if (lane == 0 && m != 0) {
        at = atomicAdd(n, (uint32_t)__popc(m));
    }
    at = __shfl_sync(~0u, at, 0);
    return at + (uint32_t)__popc(m & ((1u << lane) - 1));
}

/* Moves what is inside the cut from buf (n entries, shared or global) to out, which may be buf; returns
 * how many. */
static __device__ __noinline__ int32_t sel_keep(sel_shared *s, const uint2 *buf, int32_t n,
                                                sel_cut c, uint2 *out)
{
    const uint32_t lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        s->n_out = 0;
    }
#pragma unroll 1
    for (int32_t at = 0; at < n; at += 4 * SEL_TEAM) {
        uint2 e[4];
        uint32_t in[4]; /* lanes */
        uint32_t mine = 0, all = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t j = at + i * SEL_TEAM + (int32_t)threadIdx.x;
            e[i] = j < n ? buf[j] : make_uint2(0, 0);
            const bool keep = j < n && sel_in(c, e[i].x, (int32_t)e[i].y);
            in[i] = __ballot_sync(~0u, keep);
            mine |= (uint32_t)keep << i;
            all += (uint32_t)__popc(in[i]);
        }
        sel_sync(); /* read before others write there */
        uint32_t to = 0;
        if (lane == 0 && all != 0) {
            to = atomicAdd(&s->n_out, all);
        }
        to = __shfl_sync(~0u, to, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((mine >> i & 1) != 0) {
                out[to + (uint32_t)__popc(in[i] & ((1u << lane) - 1))] = e[i];
            }
            to += (uint32_t)__popc(in[i]);
        }
    }
    sel_sync();
    const int32_t n_out = (int32_t)s->n_out;
    sel_sync();
    return n_out;
}

/* ---- one warpgroup's cut ----------------------------------------------------------------------- */

enum { SEL_SMALL_BIN = 512 };

/* A warpgroup's own; hist is apart. */
typedef struct sel_small {
    uint32_t warp[4];
    uint32_t bin, above, in_bin, n_out;
} sel_small;

static __device__ __forceinline__ void small_sync(int32_t bar)
{
    asm volatile("bar.sync %0, 128;" ::"r"(bar) : "memory");
}

/* The bin in which the need-th from the top lies, into s. */
static __device__ __forceinline__ void small_find_bin(const uint32_t *hist, sel_small *s,
                                                      int32_t bar, uint32_t need)
{
    const uint32_t tid = threadIdx.x % 128;
    const uint4 h = ((const uint4 *)hist)[127 - tid];
    const uint32_t mine = h.x + h.y + h.z + h.w;
    const uint32_t scan = sel_warp_scan(mine);
    if (tid % 32 == 31) {
        s->warp[tid / 32] = scan;
    }
    small_sync(bar);
    uint32_t before = scan - mine;
#pragma unroll
    for (uint32_t w = 0; w < 3; w++) {
        before += w < tid / 32 ? s->warp[w] : 0;
    }
    if (before < need && need <= before + mine) {
        const uint32_t c[4] = {h.w, h.z, h.y, h.x};
        uint32_t bin = SEL_SMALL_BIN - 1 - 4 * tid;
        uint32_t i = 0;
        while (before + c[i] < need) {
            before += c[i];
            i++;
        }
        s->bin = bin - i;
        s->above = before;
        s->in_bin = c[i];
    }
    small_sync(bar);
}

/* A list in shared memory, whose entries from `cap` on are in global memory. */
typedef struct small_list {
    uint2 *buf, *rest;
    int32_t cap, n;
} small_list;

static __device__ __forceinline__ uint2 small_entry(const small_list &l, int32_t i)
{
    return i < l.cap ? l.buf[i] : __ldcg(&l.rest[i - l.cap]);
}

/* As sel_find_above, by the 128 threads of a warpgroup with barrier `bar` and 512 bins at hist: bins of 2^14 from lo
 * on, or else (lo 0, or no success) digits of 9 bits of the 63 of sel_rank. l.n > k + slack. */
static __device__ __noinline__ sel_cut small_find(uint32_t *hist, sel_small *s, int32_t bar,
                                                  const small_list &l, int32_t k, int32_t slack,
                                                  uint32_t lo)
{
    const int32_t tid = (int32_t)threadIdx.x % 128;
    unsigned long long cut = 0;
    uint32_t need = (uint32_t)k;
#pragma unroll 1
    for (int32_t shift = lo != 0 ? 63 : 54; shift >= 0; shift -= 9) {
        ((uint4 *)hist)[tid] = make_uint4(0, 0, 0, 0);
        small_sync(bar);
#pragma unroll 4
        for (int32_t i = tid; i < l.n; i += 128) {
            const unsigned long long v = sel_rank(small_entry(l, i));
            const uint32_t near = min(((uint32_t)(v >> 31) - lo) >> 14, SEL_SMALL_BIN - 1u);
            const bool agrees = shift >= 54 || (v ^ cut) >> (shift + 9) == 0;
            if (agrees) {
                atomicAdd(&hist[shift == 63 ? near : (uint32_t)(v >> shift) % SEL_SMALL_BIN], 1u);
            }
        }
        small_sync(bar);
        small_find_bin(hist, s, bar, need);
        const uint32_t bin = s->bin;
        const uint32_t over = s->in_bin + s->above - need;
        const bool enough = over <= (uint32_t)slack;
        if (shift == 63) {
            if (enough && bin < SEL_SMALL_BIN - 1u) {
                return {lo + (bin << 14), 0};
            }
            continue;
        }
        need -= s->above;
        cut |= (unsigned long long)bin << shift;
        if (enough) {
            break;
        }
    }
    return {(uint32_t)(cut >> 31), (uint32_t)cut & 0x7FFFFFFFu};
}

/* As sel_keep, in place, by a warpgroup; at most l.cap are kept. */
static __device__ __noinline__ int32_t small_keep(sel_small *s, int32_t bar, const small_list &l,
                                                  sel_cut c)
{
    const uint32_t tid = threadIdx.x % 128;
    const uint32_t lane = tid % 32;
    if (tid == 0) {
        s->n_out = 0;
    }
#pragma unroll 1
    for (int32_t at = 0; at < l.n; at += 4 * 128) {
        uint2 e[4];
        uint32_t in[4]; /* lanes */
        uint32_t mine = 0, all = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t j = at + i * 128 + (int32_t)tid;
            e[i] = j < l.n ? small_entry(l, j) : make_uint2(0, 0);
            const bool keep = j < l.n && sel_in(c, e[i].x, (int32_t)e[i].y);
            in[i] = __ballot_sync(~0u, keep);
            mine |= (uint32_t)keep << i;
            all += (uint32_t)__popc(in[i]);
        }
        small_sync(bar);
        uint32_t to = 0;
        if (lane == 0 && all != 0) {
            to = atomicAdd(&s->n_out, all);
        }
        to = __shfl_sync(~0u, to, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((mine >> i & 1) != 0) {
                l.buf[to + (uint32_t)__popc(in[i] & ((1u << lane) - 1))] = e[i];
            }
            to += (uint32_t)__popc(in[i]);
        }
    }
    small_sync(bar);
    const int32_t n_out = (int32_t)s->n_out;
    small_sync(bar);
    return n_out;
}

/* ---- the way out ------------------------------------------------------------------------------- */

/* Where the members of a set go: ascending ids, and their scores. */
typedef struct sel_out {
    int32_t *id;
    float *score; /* may be NULL */
    int32_t *count;
    int32_t k;
} sel_out;

/* What sel_place needs beside the histogram: a bit for each id of a pass. */
enum { SEL_PASS = 64 * SEL_BIN, SEL_BIT_WORD = SEL_PASS / 32 };

/* Writes the entries of buf (n, all members, ids in [id0, id1)) in ascending order of ids from place `at` on, ids as
 * map has them. bits: SEL_BIT_WORD words, 16-byte aligned. */
template <typename MAP>
static __device__ __noinline__ void sel_place(sel_shared *s, const uint2 *buf, int32_t n,
                                              int32_t id0, int32_t id1, uint32_t at, uint32_t *bits,
                                              sel_out out, MAP map)
{
    const int32_t tid = threadIdx.x;
    const unsigned long long *pair = (const unsigned long long *)bits;
#pragma unroll 1
    for (int64_t w0 = id0; w0 < id1 && n > 0; w0 += SEL_PASS) {
        const int32_t n_pair = (int32_t)(min((int64_t)SEL_PASS, id1 - w0) + 63) / 64;
        const int32_t per = (n_pair + SEL_TEAM - 1) / SEL_TEAM; /* 1 to 4 */
#pragma unroll 1
        for (int32_t i = tid; i < (n_pair + 1) / 2; i += SEL_TEAM) {
            ((uint4 *)bits)[i] = make_uint4(0, 0, 0, 0);
        }
        sel_sync();
#pragma unroll 1
        for (int32_t i = tid; i < n; i += SEL_TEAM) {
            const int64_t l = (int64_t)(int32_t)buf[i].y - w0;
            if (l >= 0 && l < SEL_PASS) {
                atomicOr(&bits[l / 32], 1u << (l % 32));
            }
        }
        sel_sync();
        uint32_t mine = 0;
#pragma unroll 1
        for (int32_t i = tid * per; i < min((tid + 1) * per, n_pair); i++) {
            mine += (uint32_t)__popcll(pair[i]);
        }
        uint32_t total;
        uint32_t sum = at + sel_scan(s, mine, &total);
#pragma unroll 1
        for (int32_t i = tid * per; i < min((tid + 1) * per, n_pair); i++) {
            s->hist[i] = sum;
            sum += (uint32_t)__popcll(pair[i]);
        }
        at += total;
        sel_sync();
#pragma unroll 1
        for (int32_t i = tid; i < n; i += SEL_TEAM) {
            const uint2 e = buf[i];
            const int64_t l = (int64_t)(int32_t)e.y - w0;
            if (l >= 0 && l < SEL_PASS) {
                const unsigned long long lower = pair[l / 64] & ((1ull << (l % 64)) - 1);
                const uint32_t to = s->hist[l / 64] + (uint32_t)__popcll(lower);
                out.id[to] = map((int32_t)e.y);
                if (out.score != NULL) {
                    out.score[to] = __uint_as_float(e.x);
                }
            }
        }
        sel_sync();
    }
}

/* What lies behind a list of n members. */
static __device__ __forceinline__ void sel_fill(sel_out out, int32_t n)
{
    if (threadIdx.x == 0) {
        *out.count = n;
    }
#pragma unroll 1
    for (int32_t i = n + (int32_t)threadIdx.x; i < out.k; i += SEL_TEAM) {
        out.id[i] = -1;
        if (out.score != NULL) {
            out.score[i] = 0.0f;
        }
    }
}

#endif
