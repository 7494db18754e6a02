/* case_quant.c - cases of quant_q and index_quant.
 *
 * EXACT: codes and scales. ULP: w_out, a product of three roundings and two rounded constants: at
 * most 2.5 units of half an ulp each, taken as 3 ulp.
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

/* One vector of n values of some kind; kinds above 0 are edges. */
static void vector(rng *r, void *x, int32_t type, int64_t at, int64_t n, int32_t kind)
{
    const float sigma = ldexpf(1.0f, gen_pick(r, 30) - 20);
    gen_any(r, x, type, at, n, sigma);
    if (kind == 0) {
        return;
    }
    static const float odd[] = {0.0f, -0.0f,    1e-40f,    448.0f, 449.0f,
                                6e4f, INFINITY, -INFINITY, NAN,    -NAN};
    for (int64_t i = 0; i < n; i++) {
        if (kind == 1) {
            gen_store(x, type, at + i, (i & 1) != 0 ? 0.0f : -0.0f);
        } else if (kind == 2 && gen_pick(r, 16) == 0) {
            gen_store(x, type, at + i, odd[gen_pick(r, 10)]);
        } else if (kind == 3) {
            gen_store(x, type, at + i, (i & 1) != 0 ? NAN : INFINITY);
        } else if (kind == 4) {
            /* halfway between codes when the scale is 1 */
            gen_store(x, type, at + i,
                      i == 0 ? 448.0f : ((float)gen_pick(r, 127) + 0.5f) * 0x1p-9f);
        }
    }
}

/* ---- quant_q ---- */

static void quant_q_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->quant_q(k->args, q);
}

static void quant_q_build(check_case *k, int32_t index)
{
    static const int32_t heads[] = {1, 3, 8, 16, 17, 128};
    quant_q_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->n_row = index % 11 == 10 ? 0 : 1 + gen_pick(r, 4);
    a->n_head = heads[index % 6];
    a->q_type = index % 2 != 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->rule = index / 2 % 3;
    const int32_t step = case_step(k, a->q_type == KVS_DTYPE_F32 ? 4 : 2);
    a->q_stride_head = KVS_ROW_DIM + step * gen_pick(r, 3);
    a->q_stride_row = a->q_stride_head * a->n_head + step * gen_pick(r, 5);
    void *q = case_buf(k, "q", BUF_IN, a->q_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16,
                       a->n_row * a->q_stride_row, step * gen_pick(r, 3));
    const int edges = strcmp(k->cls->name, "edges") == 0;
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head && !k->failed; i++) {
        const int64_t at = i / a->n_head * a->q_stride_row + i % a->n_head * a->q_stride_head;
        vector(r, q, a->q_type, at, KVS_ROW_DIM, edges ? (int32_t)(1 + i % 4) : 0);
    }
    a->q = q;
    a->q_out =
        case_buf(k, "q_out", BUF_OUT, EL_U16, (int64_t)a->n_row * a->n_head * KVS_ROW_DIM, 0);
    a->scale = case_buf(k, "scale", BUF_OUT, EL_F32, (int64_t)a->n_row * a->n_head, 0);
    case_mark_all(k, a->q_out);
    case_mark_all(k, a->scale);
    k->args = a;
}

static void quant_q_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const quant_q_args *a = k->args;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const int64_t from = row * a->q_stride_row + head * a->q_stride_head;
            const int64_t to = row * a->n_head + head;
            const float s = orc_scale(a->rule, orc_amax(a->q, a->q_type, from, KVS_ROW_DIM));
            cmp_bits(r, (coord){"scale", row, head, -1}, a->scale[to], s);
            for (int64_t d = 0; d < KVS_ROW_DIM; d++) {
                orc_count c = {0, 0};
                const uint8_t code = orc_quant(orc_load(a->q, a->q_type, from + d), s, &c);
                cmp_i64(r, (coord){"q_out", row, head, d}, a->q_out[to * KVS_ROW_DIM + d],
                        orc_to_bf16(orc_e4m3(code)));
            }
        }
    }
}

static int quant_q_filled(const kern_table *t)
{
    return t->quant_q != NULL;
}

static int quant_q_same(const kern_table *a, const kern_table *b)
{
    return a->quant_q == b->quant_q;
}

static const check_class g_quant_q[] = {
    {"random", "fp8 queries have one scale per (row, head) that depends on nothing else", 24, 12, 0,
     quant_q_build, NULL, quant_q_compare},
    {"edges", "NaN stays NaN, infinity saturates, neither enters the scale", 24, 12, 0,
     quant_q_build, NULL, quant_q_compare},
};

const check_op check_quant_q_op = {
    KERN_OP_quant_q,
    sizeof g_quant_q / sizeof *g_quant_q,
    g_quant_q,
    quant_q_filled,
    quant_q_same,
    quant_q_run,
    NULL,
};

/* ---- index_quant ---- */

static void index_quant_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->index_quant(k->args, q);
}

static void index_quant_build(check_case *k, int32_t index)
{
    static const int32_t heads[] = {64, 32, 4, 8, 1, 33, 16, 7};
    index_quant_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->n_row = index % 11 == 10 ? 0 : 1 + gen_pick(r, 4);
    a->n_head = heads[index % 8];
    a->q_type = index % 2 != 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    const int64_t n = (int64_t)a->n_row * a->n_head;
    void *q =
        case_buf(k, "q", BUF_IN, a->q_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16, n * KVS_INDEX_DIM,
                 case_step(k, a->q_type == KVS_DTYPE_F32 ? 4 : 2) * gen_pick(r, 3));
    float *w = case_buf(k, "w", BUF_IN, EL_F32, n, gen_pick(r, 3));
    const int edges = strcmp(k->cls->name, "edges") == 0;
    gen_f32(r, w, n, 2.0f);
    for (int64_t i = 0; i < n && !k->failed; i++) {
        vector(r, q, a->q_type, i * KVS_INDEX_DIM, KVS_INDEX_DIM, edges ? (int32_t)(1 + i % 4) : 0);
        if (edges && i % 7 == 3) {
            w[i] = i % 2 != 0 ? NAN : 0.0f;
        }
    }
    a->q = q;
    a->w = w;
    if (index % 3 == 2) {
        a->q_f32 = case_buf(k, "q_f32", BUF_OUT, EL_F32, n * KVS_INDEX_DIM, 0);
        case_mark_all(k, a->q_f32);
    } else {
        a->q8 = case_buf(k, "q8", BUF_OUT, EL_U8, n * KVS_INDEX_DIM, 0);
        case_mark_all(k, a->q8);
    }
    a->w_out = case_buf(k, "w_out", BUF_OUT, EL_F32, n, 0);
    case_mark_all(k, a->w_out);
    a->n_nan = index % 5 == 4 ? NULL : case_counter(k, "n_nan");
    k->args = a;
}

static void index_quant_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const index_quant_args *a = k->args;
    int64_t n_nan = 0;
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        const int64_t row = i / a->n_head;
        const int64_t head = i % a->n_head;
        const int64_t at = i * KVS_INDEX_DIM;
        const float s =
            a->q8 != NULL ? orc_scale_index(orc_amax(a->q, a->q_type, at, KVS_INDEX_DIM)) : 1.0f;
        for (int64_t d = 0; d < KVS_INDEX_DIM; d++) {
            orc_count c = {0, 0};
            const float x = orc_load(a->q, a->q_type, at + d);
            const uint8_t code = orc_quant(x, s, &c);
            n_nan += (int64_t)c.n_nan;
            if (a->q8 != NULL) {
                cmp_i64(r, (coord){"q8", row, head, d}, a->q8[at + d], code);
            } else {
                cmp_bits(r, (coord){"q_f32", row, head, d}, a->q_f32[at + d], x);
            }
        }
        n_nan += isnan(a->w[i]) ? 1 : 0;
        const double w = (double)a->w[i] * (double)s / sqrt(128.0) / sqrt((double)a->n_head);
        cmp_near(r, (coord){"w_out", row, head, -1}, a->w_out[i], w, 6.0 * half_ulp_f32(w));
    }
    if (a->n_nan != NULL) {
        cmp_i64(r, (coord){"n_nan", 0, -1, -1}, (int64_t)case_counted(k, a->n_nan), n_nan);
    }
}

static int index_quant_filled(const kern_table *t)
{
    return t->index_quant != NULL;
}

static int index_quant_same(const kern_table *a, const kern_table *b)
{
    return a->index_quant == b->index_quant;
}

static const check_class g_index_quant[] = {
    {"random",
     "index queries: pow2 with floor 1e-4 on amax; w = ((w * q_scale) * dim^-1/2) * heads^-1/2", 32,
     16, 0, index_quant_build, NULL, index_quant_compare},
    {"edges", "NaN is counted and never enters a scale", 32, 16, 0, index_quant_build, NULL,
     index_quant_compare},
};

const check_op check_index_quant_op = {
    KERN_OP_index_quant,
    sizeof g_index_quant / sizeof *g_index_quant,
    g_index_quant,
    index_quant_filled,
    index_quant_same,
    index_quant_run,
    NULL,
};
