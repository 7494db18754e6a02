/* Attention and selection over shards against formulas in double that share no code with the library: own
 * bf16 and e4m3 rounding (by search over all codes), own softmax, own sort. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "world.h"

/* ---- independent formats --------------------------------------------------------------------- */

static double o_bf16(double x)
{
    if (x == 0.0 || !isfinite(x)) {
        return x;
    }
    int e = 0;
    const double m = frexp(x, &e); /* [0.5, 1): 8 significant bits */
    return ldexp(nearbyint(ldexp(m, 8)), e - 8);
}

static double o_e4m3_value(int code)
{
    const int e = code >> 3 & 15;
    const int m = code & 7;
    const double v = e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
    return code & 128 ? -v : v;
}

static double o_e4m3(double x)
{
    static double value[127];
    if (value[126] == 0) {
        for (int c = 0; c < 127; c++) {
            value[c] = o_e4m3_value(c);
        }
    }
    const double a = fabs(x);
    int best = 0;
    for (int c = 1; c < 127; c++) {
        const double d = fabs(value[c] - a);
        const double b = fabs(value[best] - a);
        if (d < b || (d == b && (c & 1) == 0)) {
            best = c;
        }
    }
    return x < 0 ? -value[best] : value[best];
}

static double o_pow2_scale(double amax, double floor_)
{
    return exp2(ceil(log2(fmax(amax, floor_))));
}

/* What attention reads of a row that was given as x. */
static void o_row(const scenario *s, const float *x, double *y)
{
    const kvs_kv_format fmt = s->kv;
    const double k_scale = s->k_scale != 0.0f ? (double)s->k_scale : 1.0;
    for (int i = 0; i < 576; i++) {
        const double in = fmt == KVS_KV_F32 ? (double)x[i] : o_bf16((double)x[i]);
        /* quotient and product are f32 before they are rounded further */
        const double q = o_e4m3((double)(float)(in / k_scale));
        y[i] = fmt == KVS_KV_FP8 ? o_bf16((double)(float)(q * k_scale)) : in;
    }
    if (fmt != KVS_KV_FP8_DS_MLA) {
        return;
    }
    for (int t = 0; t < 4; t++) {
        double amax = 0;
        for (int i = 0; i < 128; i++) {
            amax = fmax(amax, fabs(y[t * 128 + i]));
        }
        const double scale = o_pow2_scale(amax / 448.0, 1e-4);
        for (int i = 0; i < 128; i++) {
            y[t * 128 + i] = o_bf16(o_e4m3(y[t * 128 + i] / scale) * scale);
        }
    }
}

/* ---- oracles --------------------------------------------------------------------------------- */

/* A request whose rows have been read: 576 values for each of its positions. */
typedef struct o_req {
    int32_t id;
    const double *rows;
} o_req;

/* softmax attention of one (row, head) over positions ids[0..n); also the largest |value| met. */
static void o_attend(const scenario *s, o_req req, int64_t pos, int32_t head, const int32_t *ids,
                     int32_t n, double *out, double *lse, double *vmax)
{
    float x[576];
    double q[576];
    data_query(s, req.id, pos, head, x);
    for (int i = 0; i < 576; i++) {
        q[i] =
            s->q_type == KVS_DTYPE_F32 && s->kv == KVS_KV_F32 ? (double)x[i] : o_bf16((double)x[i]);
    }
    double *score = malloc(((size_t)n + 1) * sizeof *score);
    double top = -INFINITY;
    *vmax = 0;
    for (int32_t k = 0; k < n; k++) {
        const double *y = req.rows + (size_t)ids[k] * 576;
        double sum = 0;
        for (int i = 0; i < 576; i++) {
            sum += q[i] * y[i];
            *vmax = fmax(*vmax, fabs(y[i]));
        }
        score[k] = sum * (double)(1.0f / 24.0f);
        top = fmax(top, score[k]);
    }
    double l = 0;
    memset(out, 0, 512 * sizeof *out);
    for (int32_t k = 0; k < n; k++) {
        const double p = exp(score[k] - top);
        l += p;
        for (int i = 0; i < 512; i++) {
            out[i] += p * req.rows[(size_t)ids[k] * 576 + (size_t)i];
        }
    }
    for (int i = 0; i < 512; i++) {
        out[i] = n > 0 ? out[i] / l : 0;
    }
    *lse = n > 0 ? top + log(l) : -INFINITY;
    free(score);
}

/* fp8: s = 2^ceil(log2(max(amax, 1e-4) / 448)); f32: as it is. */
static void o_index_vector(const scenario *s, const float *x, double *y, double *scale)
{
    const int f32 = s->kv == KVS_KV_F32;
    double amax = 0;
    for (int i = 0; i < 128; i++) {
        y[i] = f32 ? (double)x[i] : o_bf16((double)x[i]);
        amax = fmax(amax, fabs(y[i]));
    }
    *scale = f32 ? 1.0 : o_pow2_scale(fmax(amax, 1e-4) / 448.0, 0.0);
    for (int i = 0; i < 128; i++) {
        y[i] = f32 ? y[i] : o_e4m3(y[i] / *scale);
    }
}

/* Score of every position below bound, and the magnitude of its terms. */
static void o_scores(const scenario *s, int32_t req_id, int64_t pos, int64_t bound, double *score,
                     double *mag)
{
    float x[128];
    double q[64][128];
    double w[64];
    for (int h = 0; h < s->n_index_head; h++) {
        double sq = 0;
        data_index_query(s, req_id, pos, h, x);
        o_index_vector(s, x, q[h], &sq);
        w[h] = (double)data_index_weight(s, req_id, pos, h) * sq / sqrt(128.0) /
               sqrt((double)s->n_index_head);
    }
    for (int64_t t = 0; t < bound; t++) {
        double k[128];
        double sk = 0;
        data_index_key(s, req_id, t, x);
        o_index_vector(s, x, k, &sk);
        score[t] = 0;
        mag[t] = 0;
        for (int h = 0; h < s->n_index_head; h++) {
            double dot = 0;
            double abs_dot = 0;
            for (int i = 0; i < 128; i++) {
                dot += q[h][i] * k[i];
                abs_dot += fabs(q[h][i] * k[i]);
            }
            score[t] += fmax(dot, 0.0) * w[h] * sk;
            mag[t] += abs_dot * fabs(w[h]) * sk;
        }
    }
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* P in bf16 costs 2^-9 relative per term; everything else is f32. */
static void check_row(const scenario *s, const outcome *o, int32_t row, o_req req, int64_t pos,
                      const int32_t *ids, int32_t n)
{
    for (int32_t h = 0; h < s->n_head; h += 5) {
        double out[512];
        double lse = 0;
        double vmax = 0;
        o_attend(s, req, pos, h, ids, n, out, &lse, &vmax);
        const float got = o->lse[row * s->n_head + h];
        if (n == 0) {
            assert_true(got == -(float)INFINITY);
        } else if (!(fabs((double)got - lse) <= 1e-5 * (1.0 + fabs(lse)))) {
            fail_msg("row %d head %d: lse %.9g, formula %.9g", row, h, (double)got, lse);
        }
        /* P is rounded to bf16 at worst: 2^-9 of sum p |v|; an output type of bf16 adds 2^-9 */
        const double tol = vmax * 0x1p-9 * (s->out_type == KVS_DTYPE_BF16 ? 2 : 1) + 1e-6;
        for (int i = 0; i < 512; i++) {
            const float v = o->out[((int64_t)row * s->n_head + h) * 512 + i];
            if (!(fabs((double)v - out[i]) <= tol)) {
                fail_msg("row %d head %d value %d: %.9g, formula %.9g, tolerance %.3g", row, h, i,
                         (double)v, out[i], tol);
            }
        }
    }
}

/* The set is right up to what rounding of the scores may swap at its edge. */
static void check_set(const scenario *s, const outcome *o, int32_t row, int32_t req_id, int64_t pos,
                      int64_t bound)
{
    double *score = malloc((size_t)bound * sizeof *score);
    double *mag = malloc((size_t)bound * sizeof *mag);
    unsigned char *in = calloc((size_t)bound, 1);
    o_scores(s, req_id, pos, bound, score, mag);
    const int64_t want = bound < s->topk ? bound : s->topk;
    assert_int_equal(o->count[row], want);
    double worst = INFINITY;
    double slack = 0;
    for (int32_t k = 0; k < o->topk; k++) {
        const int32_t id = o->ids[(int64_t)row * o->topk + k];
        if (k >= want) {
            assert_int_equal(id, -1);
            continue;
        }
        assert_in_range(id, 0, bound - 1);
        assert_int_equal(in[id], 0);
        assert_true(k == 0 || id > o->ids[(int64_t)row * o->topk + k - 1]);
        in[id] = 1;
        worst = fmin(worst, score[id]);
        slack = fmax(slack, mag[id] * 0x1p-18);
    }
    for (int64_t t = 0; t < bound; t++) {
        if (!in[t] && score[t] > worst + slack + mag[t] * 0x1p-18) {
            fail_msg("row %d: position %lld scores %.9g and is missing; %.9g is in", row,
                     (long long)t, score[t], worst);
        }
    }
    free(score);
    free(mag);
    free(in);
}

static void check_all(const scenario *s, const outcome *o)
{
    int32_t row = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        double *rows = malloc((size_t)s->seq_len[i] * 576 * sizeof *rows);
        for (int64_t t = 0; t < s->seq_len[i]; t++) {
            float x[576];
            data_row(s, s->req_id[i], t, x);
            o_row(s, x, rows + t * 576);
        }
        for (int32_t j = 0; j < s->q_len[i]; j++, row++) {
            const int64_t pos = s->seq_len[i] - s->q_len[i] + j;
            int32_t *ids = malloc((size_t)(pos + 1) * sizeof *ids);
            int32_t n = 0;
            if (s->how == KVS_ATTEND_SPARSE) {
                check_set(s, o, row, s->req_id[i], pos, pos + 1);
                n = o->count[row];
                memcpy(ids, o->ids + (int64_t)row * o->topk, (size_t)n * sizeof *ids);
            } else {
                for (n = 0; n <= pos; n++) {
                    ids[n] = n;
                }
            }
            check_row(s, o, row, (o_req){s->req_id[i], rows}, pos, ids, n);
            free(ids);
        }
        free(rows);
    }
}

static scenario three_requests(kvs_kv_format fmt, kvs_attend how, int32_t dcp)
{
    scenario s = scenario_default();
    static const int64_t seq[] = {300, 3, 66};
    static const int32_t q[] = {3, 2, 1};
    s.n_req = 3;
    for (int32_t i = 0; i < 3; i++) {
        s.req_id[i] = 10 + i;
        s.seq_len[i] = seq[i];
        s.q_len[i] = q[i];
    }
    s.kv = fmt;
    s.how = how;
    s.dcp = dcp;
    s.n_index_head = how == KVS_ATTEND_SPARSE ? 8 : 0;
    s.q_type = KVS_DTYPE_F32;
    return s;
}

static void run_case(kvs_kv_format fmt, kvs_attend how, int32_t dcp, int32_t interleave,
                     kvs_dtype out_type)
{
    scenario s = three_requests(fmt, how, dcp);
    s.interleave = interleave;
    s.out_type = out_type;
    outcome o;
    world_run(&s, &o);
    check_all(&s, &o);
    outcome_fini(&o);
}

static void test_sparse(void **state)
{
    (void)state;
    static const kvs_kv_format fmt[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8_DS_MLA};
    for (size_t f = 0; f < 3; f++) {
        run_case(fmt[f], KVS_ATTEND_SPARSE, 1, 1, KVS_DTYPE_F32);
        run_case(fmt[f], KVS_ATTEND_SPARSE, 4, 4, KVS_DTYPE_F32);
        run_case(fmt[f], KVS_ATTEND_SPARSE, 8, 1, KVS_DTYPE_BF16);
    }
}

static void test_dense(void **state)
{
    (void)state;
    static const kvs_kv_format fmt[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA};
    for (size_t f = 0; f < 4; f++) {
        run_case(fmt[f], KVS_ATTEND_DENSE, 1, 1, KVS_DTYPE_BF16);
        run_case(fmt[f], KVS_ATTEND_DENSE, 2, 16, KVS_DTYPE_F32);
        run_case(fmt[f], KVS_ATTEND_CONTEXT, 8, 1, KVS_DTYPE_F32);
        run_case(fmt[f], KVS_ATTEND_CONTEXT, 1, 64, KVS_DTYPE_F32);
    }
}

/* fp8 rows are divided and multiplied by k_scale; other formats ignore one that is given. */
static void test_k_scale(void **state)
{
    (void)state;
    static const kvs_attend how[] = {KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    for (size_t m = 0; m < 2; m++) {
        scenario s = three_requests(KVS_KV_FP8, how[m], 4);
        outcome one;
        outcome o;
        world_run(&s, &one);
        s.k_scale = 0.06f;
        world_run(&s, &o);
        check_all(&s, &o);
        outcome_fini(&o);
        /* a power of two moves only what e4m3 holds as a subnormal, 2^-9 apart */
        s.k_scale = 0.5f;
        world_run(&s, &o);
        for (int64_t i = 0; i < (int64_t)o.n_row * o.n_head * 512; i++) {
            assert_true(fabs((double)o.out[i] - (double)one.out[i]) < 0.03);
        }
        outcome_fini(&o);
        outcome_fini(&one);
        s = three_requests(KVS_KV_BF16, how[m], 4);
        s.k_scale = 0.06f;
        world_run(&s, &o);
        check_all(&s, &o);
        outcome_fini(&o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sparse),
        cmocka_unit_test(test_dense),
        cmocka_unit_test(test_k_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
