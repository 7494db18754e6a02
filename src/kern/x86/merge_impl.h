/* kern/x86/merge_impl.h - the merge of partials, for one instruction set.
 *
 * Included once by the file of an instruction set, after simd.h. The weights of SIMD_LANES heads are
 * computed at once, each lane as merge_node_weights does; then the values of one head at a time run
 * through all nodes in registers. The bits are those of the reference.
 *
 * The nodes of a tree or of up to BATCH parts of a fold make a plan. A long fold takes several plans, the
 * result of one being part 0 of the next.
 */
#ifndef KERN_X86_MERGE_IMPL_H
#define KERN_X86_MERGE_IMPL_H

#include <stdbool.h>

#include "base/pool.h"
#include "kern/attn.h"

enum {
    L = SIMD_LANES,
    BATCH = 8,  /* parts of a plan                                 */
    SLICE = 512, /* values of a head that a fold carries at a time */
    AHEAD = 64, /* values that a part is asked for early           */
    LINE = 16   /* values of a cache line                          */
};

/* The merges of the parts of SIMD_LANES heads. */
typedef struct plan {
    int32_t mode, n_part, n_node;
    int32_t a[BATCH], b[BATCH];            /* node i: part a = node(part a, part b)     */
    float w_a[BATCH][L], w_b[BATCH][L];    /* [node][head]                              */
    uint32_t node_a[BATCH], node_b[BATCH]; /* bit h: that side is there, for head h     */
    uint32_t part[BATCH];                  /* bit h: the part is there, for head h      */
    vf lse[BATCH];
} plan;

/* Part p of head h is at in[p] + h * stride. */
typedef struct source {
    const float *in[BATCH];
    int64_t stride;
} source;

static void plan_node(plan *p, int32_t a, int32_t b)
{
    const int32_t i = p->n_node++;
    const vf_node n = vf_node_weights(p->lse[a], p->lse[b]);
    p->a[i] = a;
    p->b[i] = b;
    vf_storeu(p->w_a[i], n.w_a);
    vf_storeu(p->w_b[i], n.w_b);
    p->node_a[i] = vm_bits(n.has_a);
    p->node_b[i] = vm_bits(n.has_b);
    p->lse[a] = n.lse;
}

/* lse[0 .. n_part) are set; the result's is lse[0]. */
static void plan_make(plan *p, int32_t n_part, int32_t mode)
{
    p->mode = mode;
    p->n_part = n_part;
    p->n_node = 0;
    for (int32_t i = 0; i < n_part; i++) {
        const vf lse = p->lse[i];
        p->lse[i] = vf_select(vm_lt(lse, vf_set_bits(0x7f800000u)), lse, vf_neg_inf());
        p->part[i] = vm_bits(vm_lt(vf_neg_inf(), p->lse[i]));
    }
    if (mode == MERGE_FOLD) {
        for (int32_t i = 1; i < n_part; i++) {
            plan_node(p, 0, i);
        }
        return;
    }
    for (int32_t half = n_part / 2; half >= 1; half /= 2) {
        for (int32_t i = 0; i < half; i++) {
            plan_node(p, i, i + half);
        }
    }
}

SIMD_FN void put(void *out, int32_t type, int64_t at, vf x)
{
    if (type == KVS_DTYPE_BF16) {
        vf_storeu_bf16((uint16_t *)out + at, x);
    } else {
        vf_storeu((float *)out + at, x);
    }
}

/* Values [d0, d1) of a head of which every part is there, for a tree of n_part. */
SIMD_FN void tree_whole(const int n_part, const plan *p, const source *s, int32_t h, int32_t d0,
                        int32_t d1, void *out, int32_t type)
{
    for (int32_t d = d0; d < d1; d += L) {
        vf x[BATCH];
        int i = 0;
        SIMD_UNROLL
        for (int k = 0; k < n_part; k++) {
            x[k] = vf_loadu(s->in[k] + h * s->stride + d);
            if (d % LINE == 0) { /* behind the head lies the next one, as a rule */
                __builtin_prefetch((const void *)((uintptr_t)(s->in[k] + h * s->stride + d) +
                                                  AHEAD * sizeof(float)));
            }
        }
        SIMD_UNROLL
        for (int half = n_part / 2; half >= 1; half /= 2) {
            SIMD_UNROLL
            for (int k = 0; k < half; k++, i++) {
                const vf a = vf_mul(vf_bcast(&p->w_a[i][h]), x[k]);
                x[k] = vf_fma(vf_bcast(&p->w_b[i][h]), x[k + half], a);
            }
        }
        put(out, type, d, x[0]);
    }
}

/* The same for a fold. */
static void fold_whole(const plan *p, const source *s, int32_t h, int32_t d0, int32_t d1, void *out,
                       int32_t type)
{
    for (int32_t d = d0; d < d1; d += L) {
        vf x = vf_loadu(s->in[0] + h * s->stride + d);
        for (int32_t i = 0; i < p->n_node; i++) {
            const vf b = vf_loadu(s->in[i + 1] + h * s->stride + d);
            x = vf_fma(vf_bcast(&p->w_b[i][h]), b, vf_mul(vf_bcast(&p->w_a[i][h]), x));
        }
        put(out, type, d, x);
    }
}

/* The same for any plan and whatever is missing: an absent side is not read. */
static void plan_head(const plan *p, const source *s, int32_t h, int32_t d0, int32_t d1, void *out,
                      int32_t type)
{
    for (int32_t d = d0; d < d1; d += L) {
        vf x[BATCH];
        for (int32_t k = 0; k < p->n_part; k++) {
            const int there = (int)(p->part[k] >> h & 1u);
            x[k] = there ? vf_loadu(s->in[k] + h * s->stride + d) : vf_zero();
        }
        for (int32_t i = 0; i < p->n_node; i++) {
            const int32_t a = p->a[i];
            const int32_t b = p->b[i];
            if ((p->node_b[i] >> h & 1u) == 0) {
                continue;
            }
            if ((p->node_a[i] >> h & 1u) == 0) {
                x[a] = x[b];
                continue;
            }
            x[a] = vf_fma(vf_bcast(&p->w_b[i][h]), x[b], vf_mul(vf_bcast(&p->w_a[i][h]), x[a]));
        }
        put(out, type, d, x[0]);
    }
}

static bool all_there(const plan *p, int32_t h)
{
    uint32_t all = UINT32_MAX;
    for (int32_t i = 0; i < p->n_part; i++) {
        all &= p->part[i];
    }
    return (all >> h & 1u) != 0;
}

/* Values [d0, d1) of a head, of whichever shape the plan is. */
static void any_head(const plan *p, const source *s, int32_t h, int32_t d0, int32_t d1, void *out,
                     int32_t type)
{
    if (!all_there(p, h)) {
        plan_head(p, s, h, d0, d1, out, type);
    } else if (p->mode == MERGE_FOLD) {
        fold_whole(p, s, h, d0, d1, out, type);
    } else if (p->n_part == 8) {
        tree_whole(8, p, s, h, d0, d1, out, type);
    } else if (p->n_part == 4) {
        tree_whole(4, p, s, h, d0, d1, out, type);
    } else if (p->n_part == 2) {
        tree_whole(2, p, s, h, d0, d1, out, type);
    } else {
        plan_head(p, s, h, d0, d1, out, type);
    }
}

/* lse of up to SIMD_LANES heads, -inf behind them. */
static vf load_lse(const float *lse, int32_t n)
{
    _Alignas(64) float x[L];
    vf_store(x, vf_neg_inf());
    memcpy(x, lse, (size_t)n * sizeof *x);
    return vf_load(x);
}

typedef struct group {
    const merge_args *a;
    int32_t row, head, n; /* heads [head, head + n) of a row */
    uint64_t n_nan;
} group;

/* Parts [from, from + n) into the plan, from index `at`. */
static void group_parts(group *g, int32_t from, int32_t n, int32_t at, plan *p, source *s)
{
    const merge_args *a = g->a;
    for (int32_t i = 0; i < n; i++) {
        const float *lse = a->lse_in[from + i] + g->row * a->lse_stride_row + g->head;
        p->lse[at + i] = load_lse(lse, g->n);
        g->n_nan += (uint64_t)__builtin_popcount(vm_bits(vm_nan(p->lse[at + i])));
        s->in[at + i] =
            a->out_in[from + i] + g->row * a->in_stride_row + g->head * a->in_stride_head;
    }
}

static void *out_at(const group *g, int32_t h)
{
    const merge_args *a = g->a;
    const int64_t at = g->row * a->out_stride_row + (g->head + h) * a->out_stride_head;
    const int64_t size = a->out_type == KVS_DTYPE_BF16 ? 2 : 4;
    return (uint8_t *)a->out + at * size;
}

static vf group_plan(group *g)
{
    const merge_args *a = g->a;
    plan p;
    source s = {.stride = a->in_stride_head};
    group_parts(g, 0, a->n_part, 0, &p, &s);
    plan_make(&p, a->n_part, a->mode);
    for (int32_t h = 0; h < g->n; h++) {
        any_head(&p, &s, h, 0, a->dim, out_at(g, h), a->out_type);
    }
    return p.lse[0];
}

/* A fold of more parts than a plan holds: slice by slice, the sum so far in `carry`. */
static vf group_long_fold(group *g)
{
    const merge_args *a = g->a;
    _Alignas(64) float carry[L][SLICE];
    vf lse = vf_neg_inf();
    for (int32_t d0 = 0; d0 < a->dim; d0 += SLICE) {
        const int32_t n_d = a->dim - d0 < SLICE ? a->dim - d0 : SLICE;
        g->n_nan = 0; /* each slice sees the same */
        for (int32_t from = 0; from < a->n_part;) {
            plan p;
            source s = {.stride = a->in_stride_head};
            const int32_t keep = from > 0;
            const int32_t left = a->n_part - from;
            const int32_t n = left < BATCH - keep ? left : BATCH - keep;
            group_parts(g, from, n, keep, &p, &s);
            p.lse[0] = keep ? lse : p.lse[0];
            plan_make(&p, n + keep, MERGE_FOLD);
            from += n;
            for (int32_t h = 0; h < g->n; h++) {
                source of_h = {.stride = 0};
                for (int32_t i = 0; i < p.n_part; i++) {
                    of_h.in[i] = i == 0 && keep ? carry[h] : s.in[i] + h * s.stride + d0;
                }
                if (from < a->n_part) {
                    any_head(&p, &of_h, h, 0, n_d, carry[h], KVS_DTYPE_F32);
                } else {
                    const int64_t size = a->out_type == KVS_DTYPE_BF16 ? 2 : 4;
                    any_head(&p, &of_h, h, 0, n_d, (uint8_t *)out_at(g, h) + d0 * size,
                             a->out_type);
                }
            }
            lse = p.lse[0];
        }
    }
    return lse;
}

/* Task i: SIMD_LANES heads of a row. */
static void merge_task(void *ctx, int64_t i_task, int i_worker)
{
    const merge_args *a = ctx;
    (void)i_worker;
    const int32_t n_group = (a->n_head + L - 1) / L;
    group g = {.a = a, .row = (int32_t)(i_task / n_group), .head = (int32_t)(i_task % n_group) * L};
    g.n = a->n_head - g.head < L ? a->n_head - g.head : L;
    const vf lse = a->n_part <= BATCH ? group_plan(&g) : group_long_fold(&g);
    if (a->lse != NULL) {
        _Alignas(64) float x[L];
        vf_store(x, lse);
        memcpy(a->lse + (int64_t)g.row * a->n_head + g.head, x, (size_t)g.n * sizeof *x);
    }
    if (a->n_nan != NULL && g.n_nan > 0) {
        __atomic_fetch_add(a->n_nan, g.n_nan, __ATOMIC_RELAXED);
    }
}

static void merge_run(const merge_args *a, dev_queue *q)
{
    merge_args copy = *a;
    pool_run(q->pool, merge_task, &copy, (int64_t)a->n_row * ((a->n_head + L - 1) / L));
}

#endif
