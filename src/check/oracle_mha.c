/* oracle_mha.c - multi-head attention over the blocks of a call as one softmax, and its fold with earlier calls. */
#include <math.h>
#include <string.h>

#include "check/oracle.h"

enum { ROPE = 64 };

/* The unit round-off that decides which keys could weigh anything after rounding. */
static const double u32 = 0x1p-24;

static double rounded(const mha_args *a, float x)
{
    return (double)(a->type == KVS_DTYPE_F32 ? x : orc_round_bf16(x));
}

/* Value d of a key as it meets the query. */
static double key_value(const mha_args *a, int64_t head, int64_t key, int64_t d)
{
    if (d < a->nope) {
        return rounded(a, a->kv[key * a->kv_stride_key + head * a->kv_stride_head + d]);
    }
    return (double)orc_load(a->rope, a->type, key * a->rope_stride + d - a->nope);
}

static int value_bad(const mha_args *a, int64_t head, int64_t key)
{
    const float *v = a->kv + key * a->kv_stride_key + head * a->kv_stride_head + a->nope;
    int bad = 0;
    for (int64_t d = 0; d < a->v_dim; d++) {
        bad |= !isfinite(rounded(a, v[d]));
    }
    return bad;
}

/* Scores of the n keys, and |k| behind them; NaN in blocks that are dropped, whose number is returned. */
static int scores(const mha_args *a, int64_t row, int64_t head, int64_t n, double *s, double *q_norm,
                  orc_mha *o)
{
    const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
    const int64_t dim = (int64_t)a->nope + ROPE;
    int n_bad = 0;
    int bad = 0;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0.0;
        double norm2 = 0.0;
        for (int64_t d = 0; d < dim; d++) {
            const double k = key_value(a, head, i, d);
            sum += (double)orc_load(a->q, a->type, at + d) * k;
            norm2 += k * k;
        }
        s[i] = sum * (double)a->softmax_scale;
        s[n + i] = sqrt(norm2);
        bad |= !((float)s[i] < INFINITY) || value_bad(a, head, i);
        if (i + 1 == n || (i + 1) % MHA_BLOCK == 0) {
            for (int64_t j = i / MHA_BLOCK * MHA_BLOCK; j <= i && bad; j++) {
                s[j] = NAN;
            }
            n_bad += bad;
            bad = 0;
        }
    }
    double norm2 = 0.0;
    double abs = 0.0;
    for (int64_t d = 0; d < dim; d++) {
        const double x = (double)orc_load(a->q, a->type, at + d);
        norm2 += x * x;
        abs += fabs(x);
    }
    *q_norm = sqrt(norm2);
    o->flush = (abs + (double)dim) * 0x1p-126 * fabs((double)a->softmax_scale);
    return n_bad;
}

static void weigh(const mha_args *a, int64_t head, int64_t n, const double *s, double q_norm, orc_mha *o)
{
    double m = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        m = s[i] > m ? s[i] : m;
    }
    if (!(m > -INFINITY)) {
        return;
    }
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(s[i])) {
            continue;
        }
        const double p = exp(s[i] - m);
        const double terms = q_norm * s[n + i] * fabs((double)a->softmax_scale);
        o->n_used++;
        if (s[i] + 2.0 * 80.0 * u32 * terms >= m - 60.0) {
            o->terms = fmax(o->terms, terms);
            o->score = fmax(o->score, fabs(s[i]));
        }
        sum += p;
        const float *v = a->kv + i * a->kv_stride_key + head * a->kv_stride_head + a->nope;
        for (int64_t d = 0; d < a->v_dim && p > 0.0; d++) {
            const double x = rounded(a, v[d]);
            o->block[d] += p * x;
            o->square[d] += p * x * x;
            o->w2v2 += p * p * x * x;
        }
    }
    for (int64_t d = 0; d < a->v_dim; d++) {
        o->block[d] /= sum;
        o->square[d] /= sum;
    }
    o->w2v2 /= sum * sum;
    o->lse_block = m + log(sum);
}

void orc_mha_head(const mha_args *a, int64_t row, int64_t head, const float *out_a, float lse_a,
                  double *work, orc_mha *o)
{
    memset(o, 0, sizeof *o);
    o->lse_block = -INFINITY;
    const int64_t len = a->len[row];
    const int64_t n = len < 0 ? 0 : len < a->n_key ? len : a->n_key;
    double q_norm = 0.0;
    o->n_nan = scores(a, row, head, n, work, &q_norm, o);
    weigh(a, head, n, work, q_norm, o);
    const double before = a->first ? -INFINITY : (double)lse_a;
    const double m = fmax(before, o->lse_block);
    o->lse = -INFINITY;
    if (!(m > -INFINITY)) {
        return;
    }
    const double e_a = exp(before - m);
    const double e_b = exp(o->lse_block - m);
    o->lse = m + log(e_a + e_b);
    o->w_a = e_a / (e_a + e_b);
    o->w_b = e_b / (e_a + e_b);
    for (int64_t d = 0; d < a->v_dim; d++) {
        o->out[d] = o->w_b * o->block[d] + (o->w_a > 0.0 ? o->w_a * (double)out_a[d] : 0.0);
    }
}
