/* kern/ref/ops_loops.h - the row-wise ops of kern/ops.h as plain loops, for any instruction set.
 *
 * One source for every variant: the reference compiles these loops for the base machine, x86/ops_*.c
 * compile them with wider vectors. The order of every sum is written out (16 interleaved partial sums,
 * then a fixed tree) and every fused multiply-add is an fmaf, so that the compiler has nothing to choose
 * and all variants give the same bits. Rows are shared among the queue's workers in blocks whose size
 * depends on the shape alone; no row knows its block.
 *
 * Everything is static: a file with wide flags may leave no external inline function behind.
 */
#ifndef KERN_REF_OPS_LOOPS_H
#define KERN_REF_OPS_LOOPS_H

#include <math.h>
#include "base/pool.h"
#include "kern/exp.h"
#include "kern/ops.h"
#include "num/fmt.h"

enum { OPS_LANE = 16, OPS_BLOCK = 16384 /* values of a task */ };

/* ---- rows over workers ---- */

typedef void (*ops_row_fn)(const void *args, int64_t row);

typedef struct ops_job {
    ops_row_fn fn;
    const void *args;
    int64_t n_row, block;
} ops_job;

static inline void ops_block(void *ctx, int64_t task, int worker)
{
    (void)worker;
    const ops_job *j = (const ops_job *)ctx;
    const int64_t first = task * j->block;
    const int64_t last = first + j->block < j->n_row ? first + j->block : j->n_row;
    for (int64_t row = first; row < last; row++) {
        j->fn(j->args, row);
    }
}

static inline void ops_rows(dev_queue *q, ops_row_fn fn, const void *args, int64_t n_row,
                            int64_t width)
{
    ops_job j = {fn, args, n_row, 1 + OPS_BLOCK / (width > 0 ? width : 1)};
    pool_run(q->pool, ops_block, &j, (n_row + j.block - 1) / j.block);
}

/* ---- norm ---- */

static inline float ops_tree(float *s)
{
    for (int w = OPS_LANE / 2; w > 0; w /= 2) {
        for (int j = 0; j < w; j++) {
            s[j] += s[j + w];
        }
    }
    return s[0];
}

static inline float ops_sum(const float *x, int32_t n)
{
    float s[OPS_LANE] = {0.0f};
    int32_t i = 0;
    for (; i + OPS_LANE <= n; i += OPS_LANE) {
        for (int j = 0; j < OPS_LANE; j++) {
            s[j] += x[i + j];
        }
    }
    for (int j = 0; i + j < n; j++) {
        s[j] += x[i + j];
    }
    return ops_tree(s);
}

static inline float ops_sum_squares(const float *x, int32_t n, float c)
{
    float s[OPS_LANE] = {0.0f};
    int32_t i = 0;
    for (; i + OPS_LANE <= n; i += OPS_LANE) {
        for (int j = 0; j < OPS_LANE; j++) {
            const float d = x[i + j] - c;
            s[j] = fmaf(d, d, s[j]);
        }
    }
    for (int j = 0; i + j < n; j++) {
        const float d = x[i + j] - c;
        s[j] = fmaf(d, d, s[j]);
    }
    return ops_tree(s);
}

static inline void ops_norm_row(const void *args, int64_t row)
{
    const norm_args *a = (const norm_args *)args;
    const float *x = a->x + row * a->x_stride;
    const int32_t n = a->dim;
    const float c = a->centre ? ops_sum(x, n) / (float)n : 0.0f;
    const float r = 1.0f / sqrtf(ops_sum_squares(x, n, c) / (float)n + a->eps);
    if (a->y_type == KVS_DTYPE_BF16) {
        bf16 *y = (bf16 *)a->y + row * a->y_stride;
        if (a->bias == NULL) {
            for (int32_t i = 0; i < n; i++) {
                y[i] = bf16_from_f32((x[i] - c) * r * a->weight[i]);
            }
        } else {
            for (int32_t i = 0; i < n; i++) {
                y[i] = bf16_from_f32((x[i] - c) * r * a->weight[i] + a->bias[i]);
            }
        }
        return;
    }
    float *y = (float *)a->y + row * a->y_stride;
    if (a->bias == NULL) {
        for (int32_t i = 0; i < n; i++) {
            y[i] = (x[i] - c) * r * a->weight[i];
        }
    } else {
        for (int32_t i = 0; i < n; i++) {
            y[i] = (x[i] - c) * r * a->weight[i] + a->bias[i];
        }
    }
}

static inline void ops_norm(const norm_args *a, dev_queue *q)
{
    ops_rows(q, ops_norm_row, a, a->n_row, a->dim);
}

/* ---- rope ---- */

static inline void ops_rope_row(const void *args, int64_t row)
{
    const rope_args *a = (const rope_args *)args;
    const int32_t n = a->n_pair;
    const float *c = a->cos + row * n;
    const float *s = a->sin + row * n;
    /* values of a pair lie `apart`, pairs lie `step` from each other */
    const int64_t step = a->interleaved ? 2 : 1;
    const int64_t apart = a->interleaved ? 1 : n;
    for (int64_t h = 0; h < a->n_head; h++) {
        float *x = a->x + row * a->x_stride_row + h * a->x_stride_head + a->dim0;
        for (int32_t i = 0; i < n; i++) {
            const float u = x[i * step];
            const float v = x[i * step + apart];
            x[i * step] = fmaf(-v, s[i], u * c[i]);
            x[i * step + apart] = fmaf(v, c[i], u * s[i]);
        }
    }
}

static inline void ops_rope(const rope_args *a, dev_queue *q)
{
    ops_rows(q, ops_rope_row, a, a->n_row, 2 * (int64_t)a->n_pair * a->n_head);
}

/* ---- act ---- */

/* kexp without branches: the same bits for every x, NaN included. */
static inline float ops_exp(float x)
{
    const float low = x < KEXP_MIN ? KEXP_MIN : x;
    const float c = low > KEXP_MAX ? KEXP_MAX : low;
    const float n = fmaf(c, KEXP_LOG2E, KEXP_MAGIC) - KEXP_MAGIC;
    float r = fmaf(n, -KEXP_LN2_HI, c);
    r = fmaf(n, -KEXP_LN2_LO, r);
    float p = fmaf(KEXP_C6, r, KEXP_C5);
    p = fmaf(p, r, KEXP_C4);
    p = fmaf(p, r, KEXP_C3);
    p = fmaf(p, r, KEXP_C2);
    p = fmaf(p, r * r, r);
    /* a NaN has no integer: it takes 2^0, and p is a NaN already */
    const int32_t e = (int32_t)(n == n ? n : 0.0f);
    const float y = (p + 1.0f) * kexp_bits((uint32_t)(e + 127) << 23);
    const float high = x > KEXP_MAX ? (float)INFINITY : y;
    return x < KEXP_MIN ? 0.0f : high;
}

static inline float ops_silu_up(float g, float up)
{
    return g / (1.0f + ops_exp(-g)) * up;
}

static inline void ops_act_row(const void *args, int64_t row)
{
    const act_args *a = (const act_args *)args;
    const float *g = a->gate + row * a->stride;
    const float *up = a->up + row * a->stride;
    if (a->y_type == KVS_DTYPE_BF16) {
        bf16 *y = (bf16 *)a->y + row * a->y_stride;
        for (int32_t i = 0; i < a->dim; i++) {
            y[i] = bf16_from_f32(ops_silu_up(g[i], up[i]));
        }
        return;
    }
    float *y = (float *)a->y + row * a->y_stride;
    for (int32_t i = 0; i < a->dim; i++) {
        y[i] = ops_silu_up(g[i], up[i]);
    }
}

static inline void ops_act(const act_args *a, dev_queue *q)
{
    ops_rows(q, ops_act_row, a, a->n_row, a->dim);
}

/* ---- route ---- */

enum { OPS_MAX_EXPERT = 4096 };

typedef struct ops_router {
    float s[OPS_MAX_EXPERT]; /* scores: the weights before their norm                            */
    float choice
        [OPS_MAX_EXPERT]; /* what experts are chosen by                                       */
    uint8_t
        out[OPS_MAX_EXPERT]; /* 1: its group is not kept; 2: chosen already                      */
    float group[OPS_MAX_EXPERT];
    uint8_t group_out[OPS_MAX_EXPERT];
} ops_router;

static inline void ops_scores(const route_args *a, const float *logit, float *s)
{
    const int32_t n = a->n_expert;
    if (a->kind == ROUTE_SIGMOID) {
        for (int32_t i = 0; i < n; i++) {
            s[i] = 1.0f / (1.0f + ops_exp(-logit[i]));
        }
        return;
    }
    float top = logit[0];
    for (int32_t i = 1; i < n; i++) {
        top = logit[i] > top ? logit[i] : top;
    }
    for (int32_t i = 0; i < n; i++) {
        s[i] = ops_exp(logit[i] - top);
    }
    const float sum = ops_sum(s, n);
    for (int32_t i = 0; i < n; i++) {
        s[i] = s[i] / sum;
    }
}

/* The index of the largest v[i] with out[i] == 0, the lowest of equals; a NaN is below everything. -1 where
 * all are out. */
static inline int32_t ops_best(const float *v, const uint8_t *out, int32_t begin, int32_t end)
{
    int32_t best = -1;
    for (int32_t i = begin; i < end; i++) {
        if (out[i] == 0 && (best < 0 || v[i] > v[best] || (v[best] != v[best] && v[i] == v[i]))) {
            best = i;
        }
    }
    return best;
}

/* The largest choice of n, or the sum of the two largest; a NaN counts as -inf. */
static inline float ops_group_score(const float *choice, int32_t n, int32_t only_max)
{
    float first = -(float)INFINITY;
    float second = -(float)INFINITY;
    for (int32_t i = 0; i < n; i++) {
        const float v = choice[i] == choice[i] ? choice[i] : -(float)INFINITY;
        second = v > first ? first : v > second ? v : second;
        first = v > first ? v : first;
    }
    return only_max || n == 1 ? first : first + second;
}

/* Sets out[i] = 1 for the experts of groups that are not kept. */
static inline void ops_groups(const route_args *a, ops_router *w)
{
    const int32_t size = a->n_expert / a->n_group;
    for (int32_t g = 0; g < a->n_group; g++) {
        w->group[g] = ops_group_score(w->choice + g * size, size, a->group_max);
        w->group_out[g] = 0;
    }
    for (int32_t k = 0; k < a->topk_group; k++) {
        const int32_t g = ops_best(w->group, w->group_out, 0, a->n_group);
        if (g >= 0) {
            w->group_out[g] = 2;
        }
    }
    for (int32_t i = 0; i < size * a->n_group; i++) {
        w->out[i] = w->group_out[i / size] == 2 ? 0 : 1;
    }
}

static inline void ops_route_row(const void *args, int64_t row)
{
    const route_args *a = (const route_args *)args;
    const int32_t n = a->n_expert;
    const float *logit = a->logit + row * n;
    int32_t *id = a->id + row * a->n_active;
    float *weight = a->weight + row * a->n_active;
    ops_router w;
    int bad = 0; /* some logit is a NaN */
    ops_scores(a, logit, w.s);
    for (int32_t i = 0; i < n; i++) {
        w.choice[i] = a->bias != NULL ? w.s[i] + a->bias[i] : w.s[i];
        w.out[i] = 0;
        bad |= f32_is_nan(logit[i]);
    }
    if (a->n_group > 1) {
        ops_groups(a, &w);
    }
    for (int32_t k = 0; k < a->n_active; k++) {
        int32_t best = ops_best(w.choice, w.out, 0, n);
        /* fewer experts in the kept groups than are asked for: the lowest of the others */
        for (int32_t i = 0; best < 0; i++) {
            best = w.out[i] == 1 ? i : best;
        }
        w.out[best] = 2;
    }
    int32_t k = 0;
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        if (w.out[i] == 2) {
            id[k] = i;
            weight[k++] = w.s[i];
            sum += w.s[i];
        }
    }
    const float by = a->norm_topk ? sum + 1e-20f : 1.0f;
    for (k = 0; k < a->n_active; k++) {
        const float v = weight[k] / by * a->scale;
        weight[k] = bad || f32_is_nan(v) ? f32_from_bits(0x7FC00000u) : v;
    }
}

static inline void ops_route(const route_args *a, dev_queue *q)
{
    ops_rows(q, ops_route_row, a, a->n_row, (int64_t)a->n_expert * (a->n_active + 4));
}

#endif
