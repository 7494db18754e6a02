/* kern/cuda/select.cuh - exact selection inside one block: candidates in shared memory, the cut of the k
 * best, what is kept, and the way out in ascending order.
 *
 * A candidate is {bits of the score, id}. Its rank is (sel_key, sel_inv), both unsigned, larger is better:
 * the order of kern/index.h as integers. The cut is found by a radix select over 11 + 11 + 10 bits of the
 * key and then as many of the id, from the top; it ends as soon as the bin holds nothing to leave out.
 * Appending is in any order; a set is what counts until sel_emit gives each member its place by position.
 *
 * A team of 512 threads works together (SEL_TEAM, ids 0 to 511, named barrier 1).
 */
#ifndef KVS_KERN_CUDA_SELECT_CUH
#define KVS_KERN_CUDA_SELECT_CUH

#include <stdint.h>

#include "kern/cuda/ptx.cuh"

enum { SEL_TEAM = 512, SEL_BAR = 1, SEL_BIN = 2048, SEL_WARP = SEL_TEAM / 32 };

typedef struct sel_shared {
    uint32_t hist[SEL_BIN];
    uint32_t warp[SEL_WARP];
    uint32_t bin, above, in_bin, total;
    uint32_t n_out;
} sel_shared;

typedef struct sel_cut {
    uint32_t key, inv; /* a candidate is in iff (sel_key, sel_inv) >= (key, inv) */
} sel_cut;

static __device__ __forceinline__ void sel_sync()
{
    named_barrier<SEL_BAR, SEL_TEAM>();
}

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

static __device__ __forceinline__ bool sel_in(sel_cut c, uint32_t bits, int32_t id)
{
    const uint32_t key = sel_key(bits);
    return key > c.key || (key == c.key && sel_inv(id) >= c.inv);
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
static __device__ __forceinline__ uint32_t sel_scan(sel_shared *s, uint32_t v, uint32_t *total)
{
    const int32_t tid = threadIdx.x;
    const uint32_t in_warp = sel_warp_scan(v);
    sel_sync();
    if (tid % 32 == 31) {
        s->warp[tid / 32] = in_warp;
    }
    sel_sync();
    uint32_t before = in_warp - v;
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < SEL_WARP; w++) {
        before += w < tid / 32 ? s->warp[w] : 0;
        all += s->warp[w];
    }
    *total = all;
    return before;
}

static __device__ __forceinline__ void sel_hist_zero(sel_shared *s)
{
    for (int32_t i = threadIdx.x; i < SEL_BIN; i += SEL_TEAM) {
        s->hist[i] = 0;
    }
    sel_sync();
}

/* From the counts of thread's four bins (h[0] the highest: bin 2047 - 4 tid): the bin in which the
 * need-th from the top lies, into s. With fewer than `need` in all, bin 0 and in_bin 0 mean: take all. */
static __device__ void sel_find_bin(sel_shared *s, const uint32_t *h, uint32_t need)
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
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = hist[SEL_BIN - 1 - 4 * (int)threadIdx.x - i];
    }
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
    if (threadIdx.x == 0) {
        s->n_out = 0;
    }
    sel_sync();
    for (int32_t at = 0; at < n; at += 8 * SEL_TEAM) {
        uint2 e[8];
        bool in[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int32_t j = at + i * SEL_TEAM + (int32_t)threadIdx.x;
            in[i] = false;
            e[i] = make_uint2(0, 0);
            if (j < n) {
                e[i] = buf[j];
                in[i] = sel_in(c, e[i].x, (int32_t)e[i].y);
            }
        }
        sel_sync();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (at + i * SEL_TEAM < n) {
                const uint32_t to = sel_append(&s->n_out, in[i]);
                if (in[i]) {
                    out[to] = e[i];
                }
            }
        }
    }
    sel_sync();
    const int32_t n_out = (int32_t)s->n_out;
    sel_sync();
    return n_out;
}

/* Where the members of a set go: ascending ids, as positions of geom, and their scores. */
typedef struct sel_out {
    int32_t *id;
    float *score; /* may be NULL */
    int32_t *count;
    int32_t k;
} sel_out;

/* The k best of buf's n entries, whose ids lie in [0, id_end), to `out`, ascending; -1 and 0 behind.
 * bits and before: n_word words each (a multiple of 512). The map of ids is geom's. */
template <typename MAP>
static __device__ __forceinline__ void sel_emit(sel_shared *s, const uint2 *buf, int32_t n,
                                                int32_t id_end, uint32_t *bits, uint32_t *before,
                                                int32_t n_word, sel_out out, MAP map)
{
    const int32_t tid = threadIdx.x;
    const sel_cut c = sel_find(s, buf, n, out.k, 0);
    const int32_t per = n_word / SEL_TEAM;
    uint32_t done = 0;
    for (int64_t w0 = 0; w0 < id_end && n > 0; w0 += (int64_t)n_word * 32) {
        for (int32_t i = tid; i < n_word; i += SEL_TEAM) {
            bits[i] = 0;
        }
        sel_sync();
        for (int32_t i = tid; i < n; i += SEL_TEAM) {
            const int64_t at = (int64_t)(int32_t)buf[i].y - w0;
            if (at >= 0 && at < (int64_t)n_word * 32 && sel_in(c, buf[i].x, (int32_t)buf[i].y)) {
                atomicOr(&bits[at / 32], 1u << (at % 32));
            }
        }
        sel_sync();
        uint32_t mine = 0;
        for (int32_t i = 0; i < per; i++) {
            mine += (uint32_t)__popc(bits[tid * per + i]);
        }
        uint32_t total;
        uint32_t sum = done + sel_scan(s, mine, &total);
        for (int32_t i = 0; i < per; i++) {
            before[tid * per + i] = sum;
            sum += (uint32_t)__popc(bits[tid * per + i]);
        }
        done += total;
        sel_sync();
        for (int32_t i = tid; i < n; i += SEL_TEAM) {
            const uint2 e = buf[i];
            const int64_t at = (int64_t)(int32_t)e.y - w0;
            if (at >= 0 && at < (int64_t)n_word * 32 && sel_in(c, e.x, (int32_t)e.y)) {
                const uint32_t to =
                    before[at / 32] + (uint32_t)__popc(bits[at / 32] & ((1u << (at % 32)) - 1));
                out.id[to] = map((int32_t)e.y);
                if (out.score != NULL) {
                    out.score[to] = __uint_as_float(e.x);
                }
            }
        }
        sel_sync();
    }
    if (tid == 0) {
        *out.count = (int32_t)done;
    }
    for (int32_t i = (int32_t)done + tid; i < out.k; i += SEL_TEAM) {
        out.id[i] = -1;
        if (out.score != NULL) {
            out.score[i] = 0.0f;
        }
    }
}

#endif
