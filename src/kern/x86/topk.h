/* x86/topk.h - exact selection of the k best scores of a row: what topk and topk_merge share.
 *
 * topk.c holds the method and the bookkeeping in plain C; a topk_isa holds the loops over floats
 * that touch every element. The loops decide nothing, so every variant selects the same set.
 *
 * Padded arrays: `v` of the loops over collected values has TOPK_PAD elements of room behind element
 * n - 1, which the loops may read and overwrite.
 *
 * Included by kern/x86/ only.
 */
#ifndef KVS_KERN_X86_TOPK_H
#define KVS_KERN_X86_TOPK_H

#include <stdbool.h>
#include <stdint.h>

#include "kern/index.h"
#include "kern/kern.h"
#include "num/fmt.h"

enum { TOPK_PAD = 64 };

/* Values and ids collected so far, ids ascending. */
typedef struct topk_buf {
    float *val;     /* [cap + TOPK_PAD] */
    int32_t *id;    /* [cap + TOPK_PAD] */
    int64_t n, cap; /* cap a multiple of TOPK_PAD */
} topk_buf;

typedef struct topk_isa {
    /* group[g] = max(group[g], ...) over a part of the n scores, each score entering one group at most
     * and NaN none. The mapping of columns to groups changes with every n_group columns and with
     * `seed`, so that no period in the scores lines up with it. n_group a multiple of 64. */
    void (*group_max)(float *group, int64_t n_group, const float *score, int64_t n, uint32_t seed);
    /* Appends (score, id0 + column) of the scores >= floor in order of columns. Returns how many
     * columns were read: n, or fewer when less than TOPK_PAD entries are left in the buffer. */
    int64_t (*filter)(topk_buf *b, const float *score, int64_t n, float floor, int32_t id0);
    /* How many of v are >= x; NaN is not. */
    int64_t (*count_ge)(float *v, int64_t n, float x);
    /* Least and largest of v, NaN ignored; (+inf, -inf) where there is none. */
    void (*range)(float *v, int64_t n, float *lo, float *hi);
    /* Keeps in place, in order, the entries with val > x and the first n_equal with val == x. */
    void (*keep)(topk_buf *b, float x, int64_t n_equal);
    /* Packs the values >= lo and not >= hi (hi may be NaN) to the front of out [n + TOPK_PAD], which may
     * be v; returns how many. *n_ge = how many values are >= lo. */
    int64_t (*between)(float *v, int64_t n, float lo, float hi, float *out, int64_t *n_ge);
    /* Writes the indices i with v[i] == x, ascending, to at [n + TOPK_PAD]; returns how many. */
    int64_t (*match)(float *v, int64_t n, float x, int32_t *at);
    /* Whether one of n ids is negative. */
    bool (*any_negative)(const int32_t *id, int64_t n);
} topk_isa;

/* Where the k-th largest value lies: n_ge = count(>= key) >= k. Either n_ge <= k + slack and the search
 * ended early, or key is the k-th value's own and n_above = count(> key) < k. */
typedef struct topk_cut {
    int32_t key;
    int64_t n_ge, n_above;
} topk_cut;

/* n >= k >= 1; no NaN among v. spare [n + TOPK_PAD]. */
topk_cut topk_cut_find(const topk_isa *isa, float *v, int64_t n, int64_t k, int64_t slack,
                       float *spare);

/* Groups for the k-th largest of group maxima to be a useful floor: at least 2k. */
int64_t topk_n_group(int32_t k);

/* Sortable integers: topk_key ascends with the value, key + 1 names the next larger float. Both zeros
 * have the key 0; -1 stands for -0.0 and compares like 0. Above the key of +inf lies a NaN, which no
 * value reaches. */
enum { TOPK_KEY_LOWEST = -2139095040 /* -FLT_MAX */ };

static inline int32_t topk_key(float x)
{
    const uint32_t u = f32_bits(x + 0.0f);
    return (int32_t)((u & 0x80000000u) != 0 ? u ^ 0x7FFFFFFFu : u);
}

static inline float topk_float(int32_t key)
{
    const uint32_t u = (uint32_t)key;
    return f32_from_bits((u & 0x80000000u) != 0 ? u ^ 0x7FFFFFFFu : u);
}

static inline size_t topk_align64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

/* Scrambles a counter. */
static inline uint32_t topk_hash(uint32_t x)
{
    x = (x + 0x9E3779B9u) * 0x85EBCA6Bu;
    x = (x ^ x >> 15) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

/* The lowest n set bits of m. */
static inline uint32_t topk_first_bits(uint32_t m, int64_t n)
{
    if (n <= 0) {
        return 0;
    }
    while (__builtin_popcount(m) > n) {
        m &= ~(0x80000000u >> __builtin_clz(m));
    }
    return m;
}

void topk_run(const topk_isa *isa, const topk_args *a, dev_queue *q);
size_t topk_scratch_x86(const topk_args *a, const dev_queue *q);
void topk_merge_run(const topk_isa *isa, const topk_merge_args *a, dev_queue *q);
size_t topk_merge_scratch_x86(const topk_merge_args *a, const dev_queue *q);

#endif
