/* case_gemm.c - cases of products with a weight matrix.
 *
 * Bound of one output: n products in a sum in f32: (sqrt(n) + 2) u sum |x w|, u = 2^-24, + half a
 * unit in the last place of the result. Where a variant's sums do not round to nearest, its own factor
 * (kern_variant.key_u) times n stands for sqrt(n). Products of bf16 values are exact in f32. Variants whose
 * products flush subnormal numbers also lose the terms that have a subnormal operand, and less than
 * the smallest normal number per term. Weights are decoded by the oracle's own tables.
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

static const double u = 0x1p-24;

typedef struct gemm_shape {
    int32_t type, n_row, n_out, n_in, n_batch;
    int32_t row0, col0;
} gemm_shape;

typedef struct gemm_want {
    double value;
    double terms;   /* sum of |x w|                        */
    double flushed; /* ... of those with a subnormal factor */
} gemm_want;

typedef struct gemm_expect {
    gemm_want *want; /* [n_batch, n_row, n_out]         */
    float *alone;    /* a second output, or NULL         */
} gemm_expect;

static void gemm_call(const kern_table *t, check_case *k, dev_queue *q, gemm_args *a)
{
    a->scratch_bytes = t->gemm_scratch(a, q);
    a->scratch = case_scratch(k, a->scratch_bytes);
    t->gemm(a, q);
}

static void gemm_run(const kern_table *t, check_case *k, dev_queue *q)
{
    gemm_args a = *(gemm_args *)k->args;
    gemm_call(t, k, q, &a);
}

static int32_t weight_size(int32_t type)
{
    return type == GEMM_F32 ? 4 : type == GEMM_BF16 ? 2 : 1;
}

/* ---- building -------------------------------------------------------------------------------- */

static float scale_random(rng *r)
{
    const float s = ldexpf(1.0f, gen_pick(r, 8) - 12);
    return gen_pick(r, 4) == 0 ? s : s * (1.0f + (float)gen_pick(r, 4096) / 4096.0f);
}

/* n, or the next multiple of 8: where kernels take pieces of 16 bytes. */
static int64_t upto(int64_t n, int wide)
{
    return wide ? (n + 7) / 8 * 8 : n;
}

/* Buffers with gaps behind every row; rows are filled, gaps stay NaN. Of weights, inputs and results one in two is wide:
 * all its rows and batches begin at multiples of 16 bytes (of codes, of 8). */
static gemm_args *gemm_new(check_case *k, const gemm_shape *s)
{
    rng *r = &k->r;
    const int w_wide = gen_pick(r, 2), x_wide = gen_pick(r, 2), y_wide = gen_pick(r, 2);
    gemm_args *a = case_alloc(k, 1, sizeof *a);
    gemm_mat *w = &a->w;
    const int32_t size = weight_size(s->type);
    w->type = s->type;
    w->n_out = s->n_out;
    w->n_in = s->n_in;
    w->stride = upto(s->n_in + gen_pick(r, 9), w_wide);
    w->row0 = s->row0;
    w->col0 = s->col0;
    a->n_row = s->n_row;
    a->n_batch = s->n_batch;
    a->x_stride = upto(s->n_in + gen_pick(r, 9), x_wide);
    a->y_stride = upto(s->n_out + 1 + gen_pick(r, 4), y_wide);
    a->w_batch = upto(s->n_out * w->stride + gen_pick(r, 5), w_wide);
    a->x_batch = upto(s->n_row * a->x_stride + gen_pick(r, 5), x_wide);
    a->y_batch = upto(s->n_row * a->y_stride + gen_pick(r, 5), y_wide);
    const check_elem el_w = size == 4 ? EL_F32 : size == 2 ? EL_U16 : EL_U8;
    uint8_t *data =
        case_buf(k, "w", BUF_IN, el_w, s->n_batch * a->w_batch + w->stride, w_wide ? 0 : gen_pick(r, 5));
    void *x = case_buf(k, "x", BUF_IN, size == 4 ? EL_F32 : EL_U16,
                       s->n_batch * a->x_batch + a->x_stride, x_wide ? 0 : gen_pick(r, 5));
    a->y = case_buf(k, "y", BUF_OUT, EL_F32, s->n_batch * a->y_batch + a->y_stride,
                    y_wide ? 0 : gen_pick(r, 5));
    w->data = data;
    a->x = x;
    k->args = a;
    if (s->type == GEMM_FP8) {
        const int64_t n_scale = (s->row0 + s->n_out + 127) / 128;
        w->scale_stride = (s->col0 + s->n_in + 127) / 128 + gen_pick(r, 3);
        float *scale = case_buf(k, "scale", BUF_IN, EL_F32, n_scale * w->scale_stride, 1);
        for (int64_t i = 0; i < n_scale * w->scale_stride && !k->failed; i++) {
            scale[i] = scale_random(r);
        }
        w->scale = scale;
    }
    for (int64_t i = 0; i < (int64_t)s->n_batch * s->n_out && !k->failed; i++) {
        const int64_t at = i / s->n_out * a->w_batch + i % s->n_out * w->stride;
        if (s->type == GEMM_FP8) {
            gen_e4m3(r, data + at, s->n_in);
        } else {
            gen_any(r, data, size == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16, at, s->n_in, 0.05f);
        }
    }
    for (int64_t i = 0; i < (int64_t)s->n_batch * s->n_row && !k->failed; i++) {
        const int64_t row = i % s->n_row;
        const int64_t b = i / s->n_row;
        gen_any(r, x, size == 4 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
                b * a->x_batch + row * a->x_stride, s->n_in, 1.0f);
        case_mark(k, a->y + b * a->y_batch + row * a->y_stride, 4 * (int64_t)s->n_out);
    }
    return a;
}

static double value_of_w(const gemm_args *a, int64_t b, int64_t o, int64_t i)
{
    const gemm_mat *w = &a->w;
    const int64_t at = b * a->w_batch + o * w->stride + i;
    if (w->type != GEMM_FP8) {
        return (double)orc_load(w->data, w->type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16, at);
    }
    const int64_t at_scale = (w->row0 + o) / 128 * w->scale_stride + (w->col0 + i) / 128;
    const volatile float product =
        orc_e4m3(((const uint8_t *)w->data)[at]) * w->scale[at_scale]; /* rounded to f32 */
    return (double)orc_round_bf16(product);
}

static double value_of_x(const gemm_args *a, int64_t b, int64_t row, int64_t i)
{
    return (double)orc_load(a->x, a->w.type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
                            b * a->x_batch + row * a->x_stride + i);
}

static int is_tiny(double x)
{
    return x != 0.0 && fabs(x) < 0x1p-126;
}

static void want_add(gemm_want *g, double x, double w)
{
    g->value += x * w;
    g->terms += fabs(x * w);
    g->flushed += is_tiny(x) || is_tiny(w) ? fabs(x * w) : 0.0;
}

static void gemm_finish(check_case *k)
{
    const gemm_args *a = k->args;
    gemm_expect *e = k->expect != NULL ? k->expect : case_alloc(k, 1, sizeof *e);
    const int64_t n = (int64_t)a->n_batch * a->n_row * a->w.n_out;
    e->want = case_alloc(k, n, sizeof *e->want);
    double *w = case_alloc(k, a->w.n_in, sizeof *w);
    k->expect = e;
    if (k->failed) {
        return;
    }
    for (int64_t at = 0; at < (int64_t)a->n_batch * a->w.n_out; at++) {
        const int64_t b = at / a->w.n_out;
        const int64_t o = at % a->w.n_out;
        for (int64_t i = 0; i < a->w.n_in; i++) {
            w[i] = value_of_w(a, b, o, i);
        }
        for (int64_t row = 0; row < a->n_row; row++) {
            gemm_want *g = &e->want[(b * a->n_row + row) * a->w.n_out + o];
            for (int64_t i = 0; i < a->w.n_in; i++) {
                want_add(g, value_of_x(a, b, row, i), w[i]);
            }
        }
    }
}

static void gemm_random(check_case *k, int32_t index)
{
    static const int32_t rows[] = {1, 3, 8, 63, 2, 4, 7, 9, 1, 200, 5, 16};
    rng *r = &k->r;
    gemm_shape s = {.type = 1 + index % 3, .n_row = rows[index % 12], .n_batch = 1};
    const int32_t big = s.n_row > 16;
    s.n_out = 1 + gen_pick(r, big ? 70 : 300);
    s.n_in = index % 4 == 0 ? 64 * (1 + gen_pick(r, 8)) : 1 + gen_pick(r, big ? 300 : 700);
    s.row0 = gen_pick(r, 300);
    s.col0 = gen_pick(r, 3) == 0 ? gen_pick(r, 300) : 128 * gen_pick(r, 3);
    gemm_new(k, &s);
    gemm_finish(k);
}

/* Every tail of a vector, tile and block; nothing at all. */
static void gemm_edges(check_case *k, int32_t index)
{
    static const gemm_shape shapes[] = {
        {0, 0, 5, 40, 1, 0, 0},     {0, 3, 1, 1, 1, 7, 3},       {0, 1, 8, 32, 1, 0, 0},
        {0, 67, 97, 33, 1, 127, 1}, {0, 4, 9, 513, 1, 120, 100}, {0, 2, 0, 16, 1, 0, 0},
        {0, 5, 5, 1025, 1, 1, 127}, {0, 9, 13, 2049, 1, 128, 0}, {0, 1, 3, 4500, 1, 255, 64},
        {0, 133, 8, 31, 1, 0, 96},  {0, 1700, 9, 33, 1, 120, 0},
    };
    const int32_t n = sizeof shapes / sizeof *shapes;
    gemm_shape s = shapes[index / 3 % n];
    s.type = 1 + index % 3;
    gemm_new(k, &s);
    gemm_finish(k);
}

static void gemm_batch(check_case *k, int32_t index)
{
    static const int32_t rows[] = {1, 4, 70, 2};
    rng *r = &k->r;
    gemm_shape s = {.type = 1 + index % 2, .n_row = rows[index / 2 % 4]};
    s.n_batch = 2 + gen_pick(r, 6);
    s.n_out = 1 + gen_pick(r, 60);
    s.n_in = 1 + gen_pick(r, 300);
    gemm_new(k, &s);
    gemm_finish(k);
}

/* FP8 at its limits: NaN codes, subnormal codes, scales where products leave the normal numbers,
 * and inputs that are subnormal, infinite or NaN. */
static void gemm_limits(check_case *k, int32_t index)
{
    static const float scales[] = {0.0f,        -0x1.2p-3f,  0x1p-149f, 0x1.8p-130f, 0x1.9p-118f,
                                   0x1.3p-117f, 0x1.7p-116f, 0x1p-115f, 0x1.1p112f,  INFINITY};
    static const int32_t rows[] = {1, 5, 70};
    rng *r = &k->r;
    gemm_shape s = {GEMM_FP8, rows[index % 3],  1 + gen_pick(r, 40), 1 + gen_pick(r, 500),
                    1,        gen_pick(r, 200), gen_pick(r, 200)};
    gemm_args *a = gemm_new(k, &s);
    uint8_t *w = (uint8_t *)a->w.data;
    uint16_t *x = (uint16_t *)a->x;
    const int64_t n_scale = (s.row0 + s.n_out + 127) / 128 * a->w.scale_stride;
    for (int64_t i = 0; i < n_scale && !k->failed; i++) {
        ((float *)a->w.scale)[i] = scales[gen_pick(r, index % 4 == 3 ? 10 : 9)];
    }
    for (int64_t o = 0; o < s.n_out && !k->failed; o++) {
        for (int64_t i = 0; i < s.n_in; i++) {
            const int32_t kind = gen_pick(r, 8);
            uint8_t *c = &w[o * a->w.stride + i];
            *c = kind < 3 ? (uint8_t)(*c & 0x87) : kind == 3 ? (uint8_t)gen_pick(r, 127) : *c;
        }
        if (gen_pick(r, 8) == 0) {
            w[o * a->w.stride + gen_pick(r, s.n_in)] = o % 2 != 0 ? 0x7F : 0xFF;
        }
    }
    for (int64_t row = 0; row < s.n_row && !k->failed; row++) {
        const uint16_t odd[] = {0x0001, 0x807F, 0x0080, 0x8000, 0x7F80, 0xFF80, 0x7FC1};
        for (int32_t i = 0; i < 4; i++) {
            x[row * a->x_stride + gen_pick(r, s.n_in)] = odd[gen_pick(r, row % 4 == 3 ? 7 : 4)];
        }
    }
    gemm_finish(k);
}

/* ---- the same bits in other company ---------------------------------------------------------- */

static void gemm_alone(check_case *k, int32_t index)
{
    static const gemm_shape shapes[] = {
        {0, 9, 40, 300, 1, 0, 0},    {0, 200, 100, 150, 1, 100, 0}, {0, 8, 12, 2304, 1, 3, 128},
        {0, 67, 10, 1100, 1, 0, 50}, {0, 3, 300, 70, 1, 60, 0},
    };
    gemm_shape s = shapes[index / 3 % 5];
    s.type = 1 + index % 3;
    gemm_args *a = gemm_new(k, &s);
    gemm_expect *e = case_alloc(k, 1, sizeof *e);
    e->alone = case_buf(k, "alone", BUF_OUT, EL_F32, a->n_row * a->y_stride, 3);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        case_mark(k, e->alone + row * a->y_stride, 4 * (int64_t)a->w.n_out);
    }
    if (s.type == GEMM_FP8 && !k->failed) {
        ((uint8_t *)a->w.data)[a->w.stride + s.n_in / 2] = 0xFF;
    }
    if (!k->failed) { /* a NaN with a payload meets the one of the code */
        const float nan = -NAN;
        memcpy((uint8_t *)a->x + (s.type == GEMM_F32 ? 4 : 2) * a->x_stride,
               s.type == GEMM_F32 ? (const void *)&nan : (const void *)&(uint16_t){0xFFC3},
               s.type == GEMM_F32 ? 4 : 2);
    }
    k->expect = e;
    gemm_finish(k);
}

/* Rows in groups of 1, 2, 5, 1, ... times outputs in slices of 1, 7, 128, ... */
static void gemm_alone_run(const kern_table *t, check_case *k, dev_queue *q)
{
    static const int32_t groups[] = {1, 2, 5, 1, 70};
    static const int32_t slices[] = {1, 7, 128, 16};
    const gemm_args whole = *(gemm_args *)k->args;
    const gemm_expect *e = k->expect;
    const int32_t size = weight_size(whole.w.type);
    const int32_t size_x = size == 4 ? 4 : 2;
    gemm_run(t, k, q);
    int32_t step = k->index;
    for (int32_t row = 0; row < whole.n_row;) {
        const int32_t left = whole.n_row - row;
        const int32_t group = groups[step++ % 5];
        gemm_args a = whole;
        a.n_row = group < left ? group : left;
        a.x = (const uint8_t *)a.x + row * a.x_stride * size_x;
        for (int32_t out = 0; out < whole.w.n_out;) {
            const int32_t rest = whole.w.n_out - out;
            const int32_t slice = slices[step++ % 4];
            a.w.n_out = slice < rest ? slice : rest;
            a.w.data = (const uint8_t *)whole.w.data + out * a.w.stride * size;
            a.w.row0 = whole.w.row0 + out;
            a.y = e->alone + row * a.y_stride + out;
            gemm_call(t, k, q, &a);
            out += a.w.n_out;
        }
        row += a.n_row;
    }
}

static void compare_value(const gemm_args *a, const gemm_want *g, coord at, float y,
                          const check_variant *v, check_result *r)
{
    const double n = (double)a->w.n_in;
    if (v->bf16 && isinf(g->flushed) && isnan(y)) {
        return; /* an infinity met a subnormal number that counted as 0 */
    }
    const double flush = v->bf16 ? g->flushed + n * 0x1p-126 : 0.0;
    const double tol = (fmax(sqrt(n), v->key_u * n) + 2.0) * u * g->terms + half_ulp_f32(g->value) +
                       n * 0x1p-149 + flush;
    cmp_near(r, at, y, g->value, tol);
}

void gemm_compare_one(const gemm_args *a, int64_t b, int64_t row, int64_t out,
                      const check_variant *v, check_result *r)
{
    gemm_want g = {0.0, 0.0, 0.0};
    for (int64_t i = 0; i < a->w.n_in; i++) {
        want_add(&g, value_of_x(a, b, row, i), value_of_w(a, b, out, i));
    }
    compare_value(a, &g, (coord){"y", row, b, out}, a->y[b * a->y_batch + row * a->y_stride + out],
                  v, r);
}

static void gemm_compare(check_case *k, const check_variant *v, check_result *r)
{
    const gemm_args *a = k->args;
    const gemm_expect *e = k->expect;
    for (int64_t at = 0; at < (int64_t)a->n_batch * a->n_row; at++) {
        const int64_t b = at / a->n_row;
        const int64_t row = at % a->n_row;
        const float *y = a->y + b * a->y_batch + row * a->y_stride;
        for (int64_t o = 0; o < a->w.n_out; o++) {
            compare_value(a, &e->want[at * a->w.n_out + o], (coord){"y", row, b, o}, y[o], v, r);
            if (e->alone != NULL) {
                cmp_bits(r, (coord){"alone", row, -1, o}, e->alone[row * a->y_stride + o], y[o]);
            }
        }
    }
}

static int gemm_filled(const kern_table *t)
{
    return t->gemm != NULL && t->gemm_scratch != NULL;
}

static int gemm_same(const kern_table *a, const kern_table *b)
{
    return a->gemm == b->gemm;
}

static const check_class g_classes[] = {
    {"random", "y = x W^T, FP8 as bf16(f32(code) * scale), sums in f32", 36, 12, 0, gemm_random,
     NULL, gemm_compare},
    {"edges", "any n_row and n_out from 0, any n_in from 1, any place in the whole tensor", 33, 33,
     0, gemm_edges, NULL, gemm_compare},
    {"limits", "a NaN code makes its outputs NaN; scales may be any f32", 16, 8, 0, gemm_limits,
     NULL, gemm_compare},
    {"alone", "an output depends on its row of x and its row of w only", 15, 15, 0, gemm_alone,
     gemm_alone_run, gemm_compare},
    {"batch", "n_batch products of one shape", 16, 8, 0, gemm_batch, NULL, gemm_compare},
};

const check_op check_gemm_op = {
    KERN_OP_gemm, sizeof g_classes / sizeof *g_classes, g_classes, gemm_filled, gemm_same, gemm_run,
    NULL,
};
