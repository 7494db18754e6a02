/* case_ops.c - cases of the row-wise ops: norm, rope, act. Each against its formula in double.
 *
 * Bounds, with u = 2^-24. norm: a sum of n terms in 16 partial sums takes n / 16 + 4 roundings, so the sum
 * of squares is off by (n / 16 + 6) u relative, its root by half of that; the mean of a LayerNorm by
 * (n / 16 + 5) u of the mean magnitude, which moves every x - c alike; four more roundings follow. rope:
 * two products and one addition: 3 u of |a c| + |b s|. act: exp 2 ulp = 4 u, which e / (1 + e) <= 1
 * weakens, then three roundings; below exp's range a weight of e^-88 counts as 0.
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

static const double u = 0x1p-24;

/* One result of f32 or bf16 against its value and the error of what was rounded. */
static void near_typed(check_result *r, coord at, const void *y, int32_t type, int64_t i,
                       double want, double tol)
{
    if (type == KVS_DTYPE_BF16) {
        tol += half_ulp_bf16(fabs(want) + tol);
    }
    cmp_near(r, at, orc_load(y, type, i), want, tol);
}

static void mark_rows(check_case *k, void *y, int32_t type, int64_t n_row, int64_t stride,
                      int64_t n)
{
    const int64_t size = type == KVS_DTYPE_BF16 ? 2 : 4;
    for (int64_t row = 0; row < n_row; row++) {
        case_mark(k, (uint8_t *)y + row * stride * size, n * size);
    }
}

/* ---- norm ---- */

typedef struct norm_expect {
    float *x; /* what came in, for results in place */
} norm_expect;

static void norm_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->norm(k->args, q);
}

static void norm_values(check_case *k, const norm_args *a, float *x, int edges)
{
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        float *v = x + row * a->x_stride;
        gen_f32(&k->r, v, a->dim, ldexpf(1.0f, gen_pick(&k->r, 24) - 12));
        const int32_t kind = edges ? gen_pick(&k->r, 6) : 5;
        for (int64_t i = 0; i < a->dim; i++) {
            if (kind == 0) {
                v[i] = 0.0f;
            } else if (kind == 1) {
                v[i] = 3.0f; /* no spread at all */
            } else if (kind == 2) {
                v[i] = v[i] * 0x1p-20f + 7.0f; /* a mean far above the spread */
            } else if (kind == 3) {
                v[i] *= 1e-30f; /* squares are far below eps */
            } else if (kind == 4 && i == row % a->dim) {
                v[i] = NAN;
            }
        }
    }
}

static void norm_build(check_case *k, int32_t index)
{
    static const int32_t dims[] = {512, 1, 128, 7168, 16, 15, 17, 1536, 48, 100, 31, 2048, 257};
    norm_args *a = case_alloc(k, 1, sizeof *a);
    norm_expect *e = case_alloc(k, 1, sizeof *e);
    rng *r = &k->r;
    const int edges = strcmp(k->cls->name, "edges") == 0;
    const int in_place = index % 5 == 3;
    a->dim = dims[index % 13];
    a->n_row = index % 9 == 8 ? 0 : 1 + gen_pick(r, index % 4 == 1 ? 40 : 5);
    a->x_stride = a->dim + gen_pick(r, 3) * 5;
    a->y_stride = in_place ? a->x_stride : a->dim + gen_pick(r, 3) * 3;
    a->y_type = in_place || index % 2 == 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->eps = index % 3 == 0 ? 1e-5f : 1e-6f;
    a->centre = index % 4 == 2 || index % 7 == 3;
    float *x = case_buf(k, "x", in_place ? BUF_INOUT : BUF_IN, EL_F32, a->n_row * a->x_stride,
                        gen_pick(r, 3));
    float *w = case_buf(k, "weight", BUF_IN, EL_F32, a->dim, gen_pick(r, 3));
    norm_values(k, a, x, edges);
    gen_f32(r, w, a->dim, 1.0f);
    if (a->centre) {
        float *b = case_buf(k, "bias", BUF_IN, EL_F32, a->dim, 1);
        gen_f32(r, b, a->dim, 0.5f);
        a->bias = b;
    }
    a->x = x;
    a->weight = w;
    a->y = x;
    if (!in_place) {
        a->y = case_buf(k, "y", BUF_OUT, a->y_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16,
                        a->n_row * a->y_stride, gen_pick(r, 3));
    }
    mark_rows(k, a->y, a->y_type, a->n_row, a->y_stride, a->dim);
    e->x = case_alloc(k, a->n_row * a->x_stride, sizeof *x);
    if (!k->failed) {
        memcpy(e->x, x, (size_t)(a->n_row * a->x_stride) * sizeof *x);
    }
    k->args = a;
    k->expect = e;
}

static void norm_compare_row(const norm_args *a, const float *x, int64_t row, check_result *r)
{
    const double n = a->dim;
    double sum = 0.0;
    double magnitude = 0.0;
    for (int64_t i = 0; i < a->dim; i++) {
        sum += (double)x[i];
        magnitude += fabs((double)x[i]);
    }
    const double c = a->centre ? sum / n : 0.0;
    const double c_off = a->centre ? (n / 16.0 + 6.0) * u * magnitude / n : 0.0;
    double square = 0.0;
    for (int64_t i = 0; i < a->dim; i++) {
        square += ((double)x[i] - c) * ((double)x[i] - c);
    }
    const double mean = square / n + (double)a->eps;
    const double root = 1.0 / sqrt(mean);
    /* a mean off by c_off adds its square, and the rounding of every x - c */
    const double spread = sqrt(square / n);
    const double d_off = c_off + u * (spread + fabs(c));
    const double root_off =
        root * ((n / 32.0 + 6.0) * u + (d_off * d_off + 4.0 * u * spread * spread) / mean);
    for (int64_t i = 0; i < a->dim; i++) {
        const double d = (double)x[i] - c;
        const double w = (double)a->weight[i];
        const double b = a->bias != NULL ? (double)a->bias[i] : 0.0;
        const double want = d * root * w + b;
        const double tol = fabs(w) * (fabs(d) * (root_off + 4.0 * u * root) + c_off * root) +
                           2.0 * u * fabs(b) + 0x1p-140;
        near_typed(r, (coord){"y", row, -1, i}, a->y, a->y_type, row * a->y_stride + i, want, tol);
    }
}

static void norm_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const norm_args *a = k->args;
    const norm_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        norm_compare_row(a, e->x + row * a->x_stride, row, r);
    }
}

static int norm_filled(const kern_table *t)
{
    return t->norm != NULL;
}

static int norm_same(const kern_table *a, const kern_table *b)
{
    return a->norm == b->norm;
}

static const check_class g_norm[] = {
    {"random",
     "norm: y = (x - c) * rsqrt(mean((x - c)^2) + eps) * weight + bias in f32, one rounding", 52,
     26, 1, norm_build, NULL, norm_compare},
    {"edges", "norm: a row of zeros gives zeros (or the bias), a NaN stays in its row", 39, 20, 1,
     norm_build, NULL, norm_compare},
};

const check_op check_norm_op = {
    KERN_OP_norm, sizeof g_norm / sizeof *g_norm, g_norm, norm_filled, norm_same, norm_run, NULL,
};

/* ---- rope ---- */

static void rope_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->rope(k->args, q);
}

static void rope_build(check_case *k, int32_t index)
{
    static const int32_t heads[] = {1, 8, 3, 64, 16};
    static const int32_t pairs[] = {32, 32, 1, 5, 16, 33};
    rope_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->n_row = index % 9 == 8 ? 0 : 1 + gen_pick(r, index % 4 == 1 ? 40 : 5);
    a->n_head = heads[index % 5];
    a->n_pair = pairs[index % 6];
    a->dim0 = index % 3 == 0 ? 0 : 1 + gen_pick(r, 200);
    a->interleaved = index / 2 % 2;
    a->x_stride_head = a->dim0 + 2 * a->n_pair + gen_pick(r, 3) * 7;
    a->x_stride_row = a->n_head * a->x_stride_head + gen_pick(r, 3);
    const int64_t n = a->n_row * a->x_stride_row;
    const int64_t n_angle = (int64_t)a->n_row * a->n_pair;
    float *x = case_buf(k, "x", BUF_INOUT, EL_F32, n, gen_pick(r, 3));
    float *c = case_buf(k, "cos", BUF_IN, EL_F32, n_angle, gen_pick(r, 3));
    float *s = case_buf(k, "sin", BUF_IN, EL_F32, n_angle, gen_pick(r, 3));
    float *before = case_alloc(k, n, sizeof *before);
    gen_f32(r, x, n, 2.0f);
    for (int64_t i = 0; i < n_angle && !k->failed; i++) {
        const double angle = rng_next_uniform(r) * 100.0;
        c[i] = (float)cos(angle);
        s[i] = (float)sin(angle);
    }
    if (!k->failed) {
        memcpy(before, x, (size_t)n * sizeof *x);
    }
    a->x = x;
    a->cos = c;
    a->sin = s;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t h = 0; h < a->n_head; h++) {
            case_mark(k, x + row * a->x_stride_row + h * a->x_stride_head + a->dim0,
                      2 * (int64_t)a->n_pair * 4);
        }
    }
    k->args = a;
    k->expect = before;
}

static void rope_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const rope_args *a = k->args;
    const float *before = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t h = 0; h < a->n_head; h++) {
            const int64_t at = row * a->x_stride_row + h * a->x_stride_head + a->dim0;
            for (int64_t i = 0; i < a->n_pair; i++) {
                const int64_t first = at + (a->interleaved ? 2 * i : i);
                const int64_t second = at + (a->interleaved ? 2 * i + 1 : i + a->n_pair);
                const double x = (double)before[first];
                const double y = (double)before[second];
                const double c = (double)a->cos[row * a->n_pair + i];
                const double s = (double)a->sin[row * a->n_pair + i];
                cmp_near(r, (coord){"x of a pair", row, h, i}, a->x[first], x * c - y * s,
                         2.0 * u * (fabs(x * c) + fabs(y * s)) + 0x1p-140);
                cmp_near(r, (coord){"y of a pair", row, h, i}, a->x[second], x * s + y * c,
                         2.0 * u * (fabs(x * s) + fabs(y * c)) + 0x1p-140);
            }
        }
    }
}

static int rope_filled(const kern_table *t)
{
    return t->rope != NULL;
}

static int rope_same(const kern_table *a, const kern_table *b)
{
    return a->rope == b->rope;
}

static const check_class g_rope[] = {
    {"random",
     "rope: (a, b) -> (a c - b s, a s + b c); pairs are (2i, 2i+1) interleaved, else (i, i + n)",
     48, 24, 1, rope_build, NULL, rope_compare},
};

const check_op check_rope_op = {
    KERN_OP_rope, sizeof g_rope / sizeof *g_rope, g_rope, rope_filled, rope_same, rope_run, NULL,
};

/* ---- act ---- */

static void act_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->act(k->args, q);
}

static void act_build(check_case *k, int32_t index)
{
    static const int32_t dims[] = {512, 1, 7, 2048, 8, 129, 33, 18432};
    static const float odd[] = {0.0f,   -0.0f,  87.0f, 87.5f,  88.0f,    88.5f, -86.9f,  -87.1f,
                                -88.1f, 1e-40f, 1e30f, -1e30f, INFINITY, NAN,   -120.0f, 0x1p-30f};
    act_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->dim = dims[index % 8];
    a->n_row = index % 9 == 8 ? 0 : 1 + gen_pick(r, index % 8 == 3 ? 20 : 5);
    a->y_type = index % 2 == 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    const int joined = index % 3 == 1; /* gate and up in one buffer, as one product leaves them */
    a->stride = a->dim * (joined ? 2 : 1) + gen_pick(r, 3) * 5;
    a->y_stride = a->dim + gen_pick(r, 3);
    const int64_t n = a->n_row * a->stride;
    float *gate = case_buf(k, "gate", BUF_IN, EL_F32, n, gen_pick(r, 3));
    float *up = joined ? gate + a->dim : case_buf(k, "up", BUF_IN, EL_F32, n, gen_pick(r, 3));
    const int edges = strcmp(k->cls->name, "edges") == 0;
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        gen_f32(r, up + row * a->stride, a->dim, 2.0f);
        gen_f32(r, gate + row * a->stride, a->dim, edges ? 50.0f : 3.0f);
        for (int64_t i = 0; edges && i < a->dim; i++) {
            if (gen_pick(r, 3) == 0) {
                gate[row * a->stride + i] = odd[gen_pick(r, 16)];
            }
        }
    }
    a->gate = gate;
    a->up = up;
    a->y = case_buf(k, "y", BUF_OUT, a->y_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16,
                    a->n_row * a->y_stride, gen_pick(r, 3));
    mark_rows(k, a->y, a->y_type, a->n_row, a->y_stride, a->dim);
    k->args = a;
}

static void act_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const act_args *a = k->args;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t i = 0; i < a->dim; i++) {
            const double g = (double)a->gate[row * a->stride + i];
            const double up = (double)a->up[row * a->stride + i];
            const double want = g / (1.0 + exp(-g)) * up;
            const double tol =
                isfinite(want) ? 9.0 * u * fabs(want) + 0x1p-119 * fabs(up) + 0x1p-140 : 0.0;
            near_typed(r, (coord){"y", row, -1, i}, a->y, a->y_type, row * a->y_stride + i, want,
                       tol);
        }
    }
}

static int act_filled(const kern_table *t)
{
    return t->act != NULL;
}

static int act_same(const kern_table *a, const kern_table *b)
{
    return a->act == b->act;
}

static const check_class g_act[] = {
    {"random", "act: y = gate / (1 + exp(-gate)) * up in f32, one rounding to y's type", 32, 16, 1,
     act_build, NULL, act_compare},
    {"edges", "act: large negative gates give 0, a NaN gives a NaN", 32, 16, 1, act_build, NULL,
     act_compare},
};

const check_op check_act_op = {
    KERN_OP_act, sizeof g_act / sizeof *g_act, g_act, act_filled, act_same, act_run, NULL,
};
