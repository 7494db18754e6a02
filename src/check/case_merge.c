/* case_merge.c - cases of the merge of partials, and of the exp and log behind it.
 *
 * Every variant must give the reference's bits, and those must be near the formula in double.
 *
 * Bound. A node forms w = exp(lse - m) (argument rounded: |lse - m| u; exp 2 ulp = 4 u), w / sum
 * (sum u, the reciprocal u, the product u) and two products with one addition (2 u): with |lse - m|
 * <= 88 for a weight that is not 0 the relative error of a weight is below 100 u in the worst case,
 * and a weight below e^-87 counts as 0: 2^-125. But the error of the argument is weighted by the
 * weight itself, x e^-x <= 0.37, so the sum of |terms| moves by at most (0.4 + 4 + 3 + 2) u per
 * node: 10 u. A value passes at most depth nodes. LSE: the weights' 5 u, log 1e-7, and the
 * roundings of m + log: 2 u |lse|, per node; an lse off by that much moves the weights of the next
 * node by the same, relative.
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"
#include "kern/exp.h"

static const double u = 0x1p-24;

typedef struct merge_expect {
    orc_merge *head; /* [n_row, n_head] */
    float **part_of; /* writable view of out_in */
    float **lse_of;
    int exp_log; /* compare kern/exp.h with libm instead */
} merge_expect;

static void merge_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->merge(k->args, q);
}

typedef struct merge_shape {
    int32_t n_part, mode, n_row, n_head, dim, out_type, pad;
} merge_shape;

static merge_args *merge_new(check_case *k, const merge_shape *s)
{
    static const char *const out_names[] = {"out 0", "out 1", "out 2", "out 3",
                                            "out 4", "out 5", "out 6", "out 7"};
    static const char *const lse_names[] = {"lse 0", "lse 1", "lse 2", "lse 3",
                                            "lse 4", "lse 5", "lse 6", "lse 7"};
    merge_args *a = case_alloc(k, 1, sizeof *a);
    merge_expect *e = case_alloc(k, 1, sizeof *e);
    *a = (merge_args){.n_part = s->n_part,
                      .mode = s->mode,
                      .n_row = s->n_row,
                      .n_head = s->n_head,
                      .dim = s->dim,
                      .out_type = s->out_type};
    const int64_t size = s->out_type == KVS_DTYPE_BF16 ? 2 : 4;
    const int32_t step = case_step(k, (int32_t)size) * s->pad;
    a->in_stride_head = s->dim + 4 * s->pad;
    a->in_stride_row = a->in_stride_head * s->n_head + 8 * s->pad;
    a->lse_stride_row = s->n_head + s->pad;
    a->out_stride_head = s->dim + 2 * step;
    a->out_stride_row = a->out_stride_head * s->n_head + step;
    e->part_of = case_alloc(k, s->n_part, sizeof *e->part_of);
    e->lse_of = case_alloc(k, s->n_part, sizeof *e->lse_of);
    for (int32_t p = 0; p < s->n_part; p++) {
        e->part_of[p] = case_buf(k, out_names[p % 8], BUF_IN, EL_F32, s->n_row * a->in_stride_row,
                                 case_step(k, 4) * s->pad);
        e->lse_of[p] =
            case_buf(k, lse_names[p % 8], BUF_IN, EL_F32, s->n_row * a->lse_stride_row, s->pad);
    }
    a->out_in = (const float *const *)e->part_of;
    a->lse_in = (const float *const *)e->lse_of;
    a->out = case_buf(k, "out", BUF_OUT, size == 2 ? EL_U16 : EL_F32, s->n_row * a->out_stride_row,
                      step);
    for (int64_t row = 0; row < s->n_row; row++) {
        for (int64_t head = 0; head < s->n_head; head++) {
            const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
            case_mark(k, (uint8_t *)a->out + at * size, s->dim * size);
        }
    }
    if (s->pad != 2) {
        a->lse = case_buf(k, "lse", BUF_OUT, EL_F32, (int64_t)s->n_row * s->n_head, 0);
        case_mark_all(k, a->lse);
        a->n_nan = case_counter(k, "n_nan");
    }
    k->args = a;
    k->expect = e;
    return a;
}

static float *value_at(const merge_args *a, const merge_expect *e, int32_t p, int64_t row,
                       int64_t head)
{
    return e->part_of[p] + row * a->in_stride_row + head * a->in_stride_head;
}

static float *lse_at(const merge_args *a, const merge_expect *e, int32_t p, int64_t row,
                     int64_t head)
{
    return e->lse_of[p] + row * a->lse_stride_row + head;
}

static void merge_finish(check_case *k)
{
    const merge_args *a = k->args;
    merge_expect *e = k->expect;
    e->head = case_alloc(k, (int64_t)a->n_row * a->n_head, sizeof *e->head);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            orc_merge_head(a, row, head, &e->head[row * a->n_head + head]);
        }
    }
}

static const merge_shape g_shapes[] = {
    {2, MERGE_TREE, 3, 5, 512, KVS_DTYPE_F32, 0},  {8, MERGE_TREE, 2, 4, 512, KVS_DTYPE_F32, 1},
    {4, MERGE_TREE, 5, 3, 512, KVS_DTYPE_BF16, 2}, {1, MERGE_TREE, 2, 3, 512, KVS_DTYPE_F32, 0},
    {3, MERGE_FOLD, 4, 2, 512, KVS_DTYPE_F32, 1},  {8, MERGE_FOLD, 1, 7, 512, KVS_DTYPE_BF16, 0},
    {1, MERGE_FOLD, 3, 1, 512, KVS_DTYPE_BF16, 1}, {8, MERGE_TREE, 1, 16, 16, KVS_DTYPE_F32, 3},
    {4, MERGE_TREE, 3, 1, 48, KVS_DTYPE_F32, 2},   {2, MERGE_FOLD, 6, 128, 128, KVS_DTYPE_F32, 0},
    {5, MERGE_FOLD, 2, 2, 576, KVS_DTYPE_F32, 1},  {2, MERGE_TREE, 0, 4, 512, KVS_DTYPE_F32, 0},
    {8, MERGE_TREE, 33, 8, 512, KVS_DTYPE_F32, 0}, {4, MERGE_TREE, 64, 16, 512, KVS_DTYPE_BF16, 0},
};
enum { N_SHAPE = sizeof g_shapes / sizeof *g_shapes };

static void merge_random(check_case *k, int32_t index)
{
    const merge_args *a = merge_new(k, &g_shapes[index % N_SHAPE]);
    const merge_expect *e = k->expect;
    for (int32_t p = 0; p < a->n_part && !k->failed; p++) {
        for (int64_t row = 0; row < a->n_row; row++) {
            for (int64_t head = 0; head < a->n_head; head++) {
                gen_f32(&k->r, value_at(a, e, p, row, head), a->dim, 1.0f);
                gen_f32(&k->r, lse_at(a, e, p, row, head), 1, 4.0f);
            }
        }
    }
    merge_finish(k);
}

/* Every combination of what an lse may be; the values behind a weight of 0 are NaN. */
static void merge_edges(check_case *k, int32_t index)
{
    static const float lses[] = {-INFINITY, NAN,   INFINITY, 0.0f,   1.5f,  -3.0f, 90.0f,
                                 -90.0f,    3e38f, -3e38f,   1e-40f, -0.0f, -NAN};
    enum { N_LSE = sizeof lses / sizeof *lses };
    const int32_t mode = index % 2;
    const int32_t n_part = mode == MERGE_TREE ? 1 << (index / 2 % 4) : 1 + index / 2 % 4;
    const merge_shape s = {
        n_part, mode, N_LSE, N_LSE, 64, index % 3 == 2 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32, index % 2};
    const merge_args *a = merge_new(k, &s);
    const merge_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            for (int32_t p = 0; p < n_part; p++) {
                const float lse = p == 0   ? lses[row]
                                  : p == 1 ? lses[head]
                                           : lses[gen_pick(&k->r, N_LSE)];
                *lse_at(a, e, p, row, head) = lse;
                if (lse > -INFINITY && lse < INFINITY) {
                    gen_f32(&k->r, value_at(a, e, p, row, head), a->dim, 1.0f);
                }
            }
        }
    }
    merge_finish(k);
}

/* Differences of the two lse over the whole range of exp, in fine steps. */
static void merge_exp_range(check_case *k, int32_t index)
{
    const merge_shape s = {2, MERGE_TREE, k->quick ? 16 : 128, 128, 16, KVS_DTYPE_F32, 0};
    const merge_args *a = merge_new(k, &s);
    const merge_expect *e = k->expect;
    const int64_t n = (int64_t)a->n_row * a->n_head;
    for (int64_t i = 0; i < n && !k->failed; i++) {
        const int64_t row = i / a->n_head;
        const int64_t head = i % a->n_head;
        float diff = 0.0f;
        if (index == 0) {
            diff = (float)(-92.0 * (double)i / (double)n);
        } else {
            diff = -ldexpf(1.0f + (float)rng_next_uniform(&k->r), gen_pick(&k->r, 30) - 23);
        }
        const float base = index == 0 ? 0.0f : (float)gen_pick(&k->r, 64) * 0.25f;
        const int32_t larger = (int32_t)(i & 1);
        *lse_at(a, e, larger, row, head) = base;
        *lse_at(a, e, 1 - larger, row, head) = base + diff;
        gen_f32(&k->r, value_at(a, e, 0, row, head), a->dim, 1.0f);
        gen_f32(&k->r, value_at(a, e, 1, row, head), a->dim, 1.0f);
    }
    merge_finish(k);
}

/* kern/exp.h itself; the op runs over nothing. */
static void merge_exp_log(check_case *k, int32_t index)
{
    (void)index;
    const merge_shape s = {2, MERGE_TREE, 0, 1, 16, KVS_DTYPE_F32, 0};
    merge_new(k, &s);
    ((merge_expect *)k->expect)->exp_log = 1;
}

/* exp: 2 ulp of the result, as kern/exp.h says; log: 2 ulp, or 1e-7 absolute near 1. */
static void compare_exp_log(const check_case *k, check_result *r)
{
    const int64_t n = k->quick ? 100000 : 4000000;
    rng c = rng_init(k->r.seed, k->r.stream);
    for (int64_t i = 0; i < n; i++) {
        const float x = (float)(-87.0 + 175.0 * (double)i / (double)n);
        const double want = exp((double)x);
        cmp_near(r, (coord){"exp of step", i, -1, -1}, kexp(x), want, 4.0 * half_ulp_f32(want));
        const uint32_t bits = 0x00800000u + (uint32_t)rng_next_below(&c, 0x7F000000u);
        float y = 0.0f;
        memcpy(&y, &bits, sizeof y);
        const double log_y = log((double)y);
        cmp_near(r, (coord){"log of bits", bits, -1, -1}, klog(y), log_y,
                 fmax(4.0 * half_ulp_f32(log_y), 1e-7));
    }
    const float edges[] = {0.0f, -0.0f, -87.0f, 88.0f, 1e-40f, -1e-40f, 1e-10f};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        const double want = exp((double)edges[i]);
        cmp_near(r, (coord){"exp of edge", (int64_t)i, -1, -1}, kexp(edges[i]), want,
                 4.0 * half_ulp_f32(want));
    }
    cmp_bits(r, (coord){"exp(0)", 0, -1, -1}, kexp(0.0f), 1.0f);
    cmp_bits(r, (coord){"log(1)", 0, -1, -1}, klog(1.0f), 0.0f);
    cmp_bits(r, (coord){"exp(-inf)", 0, -1, -1}, kexp(-INFINITY), 0.0f);
    cmp_bits(r, (coord){"exp(-87.1)", 0, -1, -1}, kexp(-87.1f), 0.0f);
    cmp_bits(r, (coord){"exp(inf)", 0, -1, -1}, kexp(INFINITY), INFINITY);
    cmp_near(r, (coord){"exp(NaN)", 0, -1, -1}, kexp(NAN), NAN, 0.0);
}

/* What the op read: value_at as the op sees it. */
static const float *part_at(const merge_args *a, int32_t p, int64_t row, int64_t head)
{
    return a->out_in[p] + row * a->in_stride_row + head * a->in_stride_head;
}

void merge_compare_head(const merge_args *a, const orc_merge *o, int64_t row, int64_t head,
                        check_result *r)
{
    const double depth = a->mode == MERGE_TREE ? ceil(log2((double)a->n_part)) : a->n_part - 1;
    const double lse_moves =
        o->n_live > 0 ? expm1(fmin(fmax(depth - 1.0, 0.0) * 2.0 * u * fabs(o->lse), 1.0)) : 0.0;
    for (int64_t d = 0; d < a->dim; d++) {
        double want = 0.0;
        double terms = 0.0;
        for (int32_t p = 0; p < a->n_part; p++) {
            if (o->weight[p] > 0.0) {
                const double v = (double)part_at(a, p, row, head)[d];
                want += o->weight[p] * v;
                terms += o->weight[p] * fabs(v);
            }
        }
        /* a weight under e^-87 is taken as 0: its value is at most 10 here */
        const double tol = (depth * 10.0 * u + lse_moves) * terms + a->n_part * 0x1p-122;
        const int64_t at = row * a->out_stride_row + head * a->out_stride_head + d;
        if (a->out_type == KVS_DTYPE_BF16) {
            cmp_near(r, (coord){"out", row, head, d}, orc_bf16(((const uint16_t *)a->out)[at]),
                     want, tol + half_ulp_bf16(want) * 1.01);
        } else {
            cmp_near(r, (coord){"out", row, head, d}, ((const float *)a->out)[at], want, tol);
        }
    }
    if (a->lse != NULL) {
        const double tol = o->n_live > 0 ? depth * (5.0 * u + 1e-7 + 2.0 * u * fabs(o->lse)) : 0.0;
        cmp_near(r, (coord){"lse", row, head, -1}, a->lse[row * a->n_head + head], o->lse, tol);
    }
}

static void merge_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const merge_args *a = k->args;
    const merge_expect *e = k->expect;
    int64_t n_nan = 0;
    if (e->exp_log) {
        compare_exp_log(k, r);
        return;
    }
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const orc_merge *o = &e->head[row * a->n_head + head];
            n_nan += o->n_nan;
            merge_compare_head(a, o, row, head, r);
            if (o->n_live != 1 || a->out_type != KVS_DTYPE_F32) {
                continue;
            }
            /* merged with identities only: the operand's bits */
            for (int32_t p = 0; p < a->n_part; p++) {
                if (o->weight[p] > 0.0) {
                    const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
                    cmp_bytes(r, (coord){"bits of the one live part", row, head, -1},
                              (const float *)a->out + at, part_at(a, p, row, head),
                              (size_t)a->dim * sizeof(float));
                }
            }
        }
    }
    if (a->n_nan != NULL) {
        cmp_i64(r, (coord){"n_nan", 0, -1, -1}, (int64_t)case_counted(k, a->n_nan), n_nan);
    }
}

static int merge_filled(const kern_table *t)
{
    return t->merge != NULL;
}

static int merge_same(const kern_table *a, const kern_table *b)
{
    return a->merge == b->merge;
}

static const check_class g_merge[] = {
    {"random",
     "out = (w_a out_a + w_b out_b) / (w_a + w_b), lse = m + log(w_a + w_b), natural log, one "
     "rounding to the output type",
     N_SHAPE, N_SHAPE - 2, 1, merge_random, NULL, merge_compare},
    {"edges",
     "merging with the identity returns the other operand's bits; a side of weight 0 is not read; "
     "NaN and +inf lse count as -inf",
     24, 12, 1, merge_edges, NULL, merge_compare},
    {"exp range", "every variant of merge has the same bits", 6, 2, 1, merge_exp_range, NULL,
     merge_compare},
    {"exp and log", "exp and log are our own: 2 ulp", 1, 1, 0, merge_exp_log, NULL, merge_compare},
};

const check_op check_merge_op = {
    KERN_OP_merge, sizeof g_merge / sizeof *g_merge, g_merge, merge_filled, merge_same, merge_run,
    NULL,
};
