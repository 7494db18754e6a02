/* oracle_attn.c - attention as one softmax over the union of the keys a row attends, and the merge.
 *
 * Lanes and segments appear only where the contract makes them visible: a NaN drops the segment it
 * lies in. Everything else ignores the order of the keys.
 */
#include <math.h>
#include <string.h>

#include "check/oracle.h"

enum { DIM = 576, VDIM = 512, SEGMENT = 2048 };

void orc_pool_fill(const attn_args *a, const uint8_t *used, orc_pool *pool)
{
    for (int64_t s = 0; s < a->n_slot; s++) {
        if (!used[s]) {
            continue;
        }
        float *v = pool->value + s * DIM;
        orc_row_read(a->fmt, a->k_scale, a->kv + s / 64 * a->page_stride + s % 64 * a->row_stride,
                     v);
        double norm2 = 0.0;
        for (int d = 0; d < DIM; d++) {
            norm2 += (double)v[d] * (double)v[d];
            if (d == VDIM - 1) {
                pool->vnorm2[s] = norm2;
            }
        }
        pool->norm[s] = sqrt(norm2);
    }
}

int64_t orc_attn_max_keys(const attn_args *a)
{
    if (a->slots != NULL) {
        return a->slots_stride;
    }
    int64_t max = 0;
    for (int64_t r = 0; r < a->n_row; r++) {
        max = a->kv_len[r] > max ? a->kv_len[r] : max;
    }
    return max;
}

static void add_key(orc_keys *k, int64_t slot, int64_t n_slot, int64_t *n_in_lane)
{
    if (slot < 0 || slot >= n_slot) {
        k->n_bad_id++;
        return;
    }
    if (*n_in_lane % SEGMENT == 0) {
        k->n_seg++;
    }
    ++*n_in_lane;
    k->slot[k->n] = (int32_t)slot;
    k->seg[k->n] = k->n_seg - 1;
    k->n++;
}

void orc_attn_keys(const attn_args *a, int64_t row, orc_keys *k)
{
    k->n = 0;
    k->n_seg = 0;
    k->n_bad_id = 0;
    const int32_t *list = a->slots != NULL ? a->slots + row * a->slots_stride : NULL;
    for (int64_t lane = 0; lane < a->n_lane; lane++) {
        int64_t n_in_lane = 0;
        if (list != NULL) {
            const int64_t n = a->lane_count[row * a->n_lane + lane];
            for (int64_t i = 0; i < n; i++, list++) {
                if (*list != -1) {
                    add_key(k, *list, a->n_slot, &n_in_lane);
                }
            }
            continue;
        }
        const int64_t req = a->row_req[row];
        for (int64_t l = 0; l < a->kv_len[row]; l++) {
            if (l / a->interleave % a->n_lane == lane) {
                const int64_t slot =
                    req < 0 || req >= a->n_req
                        ? -1
                        : orc_slot(a->table + req * a->table_stride, a->table_width, a->n_slot, l);
                add_key(k, slot, a->n_slot, &n_in_lane);
            }
        }
    }
}

static double dot(const double *q, const float *k)
{
    double s0 = 0.0;
    double s1 = 0.0;
    double s2 = 0.0;
    double s3 = 0.0;
    for (int d = 0; d < DIM; d += 4) {
        s0 += q[d] * (double)k[d];
        s1 += q[d + 1] * (double)k[d + 1];
        s2 += q[d + 2] * (double)k[d + 2];
        s3 += q[d + 3] * (double)k[d + 3];
    }
    return (s0 + s1) + (s2 + s3);
}

/* Scores of all keys into s; those of a segment with a NaN or +inf become NaN, and are counted. */
static void scores(const orc_pool *pool, const orc_keys *keys, const double *q, double scale,
                   double *s, orc_attn *o)
{
    for (int64_t begin = 0, end = 0; begin < keys->n; begin = end) {
        int bad = 0;
        for (end = begin; end < keys->n && keys->seg[end] == keys->seg[begin]; end++) {
            s[end] = dot(q, pool->value + (int64_t)keys->slot[end] * DIM) * scale;
            bad |= !((float)s[end] < INFINITY);
        }
        o->n_nan += bad;
        for (int64_t i = begin; i < end && bad; i++) {
            s[i] = NAN;
        }
    }
}

/* The unit round-off that decides which keys could weigh anything after rounding. */
static const double u32 = 0x1p-24;

void orc_attn_head(const attn_args *a, const orc_pool *pool, const orc_keys *keys, int64_t row,
                   int64_t head, double *s, orc_attn *o)
{
    memset(o, 0, sizeof *o);
    o->lse = -INFINITY;
    double q[DIM];
    double norm2 = 0.0;
    double abs = 0.0;
    for (int64_t d = 0; d < DIM; d++) {
        q[d] =
            (double)orc_load(a->q, a->q_type, row * a->q_stride_row + head * a->q_stride_head + d);
        norm2 += q[d] * q[d];
        abs += fabs(q[d]);
    }
    const double scale = (double)a->softmax_scale *
                         (a->q_scale != NULL ? (double)a->q_scale[row * a->n_head + head] : 1.0);
    scores(pool, keys, q, scale, s, o);
    double m = -INFINITY;
    for (int64_t i = 0; i < keys->n; i++) {
        m = s[i] > m ? s[i] : m;
    }
    if (!(m > -INFINITY)) {
        return;
    }
    double sum = 0.0;
    for (int64_t i = 0; i < keys->n; i++) {
        if (isnan(s[i])) {
            continue;
        }
        const int64_t slot = keys->slot[i];
        const float *v = pool->value + slot * DIM;
        const double p = exp(s[i] - m);
        const double terms = sqrt(norm2) * pool->norm[slot] * fabs(scale);
        o->n_used++;
        if (s[i] + 2.0 * 24.0 * u32 * terms >= m - 60.0) {
            o->terms = fmax(o->terms, terms);
            o->score = fmax(o->score, fabs(s[i]));
        }
        if (p == 0.0) {
            continue;
        }
        sum += p;
        o->w2v2 += p * p * pool->vnorm2[slot];
        for (int d = 0; d < VDIM; d++) {
            const double pv = p * (double)v[d];
            o->out[d] += pv;
            o->square[d] += pv * (double)v[d];
        }
    }
    for (int d = 0; d < VDIM; d++) {
        o->out[d] /= sum;
        o->square[d] /= sum;
    }
    o->w2v2 /= sum * sum;
    o->lse = m + log(sum);
    o->flush = (abs + DIM) * 0x1p-126 * fabs(scale);
}

void orc_merge_head(const merge_args *a, int64_t row, int64_t head, orc_merge *o)
{
    memset(o, 0, sizeof *o);
    double m = -INFINITY;
    double sum = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t p = 0; p < a->n_part; p++) {
            const double lse = (double)a->lse_in[p][row * a->lse_stride_row + head];
            if (isnan(lse) || isinf(lse)) {
                o->n_nan += pass == 0 && isnan(lse);
                continue;
            }
            if (pass == 0) {
                m = fmax(m, lse);
                o->n_live++;
            } else {
                o->weight[p] = exp(lse - m);
                sum += o->weight[p];
            }
        }
    }
    o->lse = o->n_live > 0 ? m + log(sum) : -INFINITY;
    for (int32_t p = 0; p < a->n_part && o->n_live > 0; p++) {
        o->weight[p] /= sum;
    }
}
