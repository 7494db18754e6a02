/* attn_problem.c: see attn_problem.h. */
#include "attn_problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *get(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p == NULL) {
        abort();
    }
    memset(p, 0xff, bytes);
    return p;
}

static int64_t row_bytes(int32_t fmt)
{
    return fmt == KVS_KV_F32 ? 2304 : fmt == KVS_KV_BF16 ? 1152 : fmt == KVS_KV_FP8 ? 576 : 656;
}

static void put_f32(uint8_t *at, double x)
{
    const float f = (float)x;
    memcpy(at, &f, sizeof f);
}

/* x cut to bf16: the lower half of the float dropped. */
static void put_bf16(uint8_t *at, double x)
{
    const float f = (float)x;
    memcpy(at, (const uint8_t *)&f + 2, 2);
}

static double get_f32(const uint8_t *at)
{
    float f;
    memcpy(&f, at, sizeof f);
    return f;
}

static double get_bf16(const uint8_t *at)
{
    float f = 0.0f;
    memcpy((uint8_t *)&f + 2, at, 2);
    return f;
}

static double e4m3(uint8_t c)
{
    const int exp = c >> 3 & 15;
    const double mag = exp == 0 ? ldexp(c & 7, -9) : ldexp(8 + (c & 7), exp - 10);
    return (c & 0x7f) == 0x7f ? NAN : c & 0x80 ? -mag : mag;
}

/* Rounded to float, then to 8 significant bits or the last place of bf16's subnormals, nearest even. */
static double to_bf16(double x)
{
    const double y = (double)(float)x;
    int e = 0;
    frexp(y, &e);
    const int last = e - 8 > -133 ? e - 8 : -133;
    const double r = ldexp(nearbyint(ldexp(y, -last)), last);
    return isfinite(y) ? (fabs(r) < 0x1p128 ? r : copysign(INFINITY, r)) : y;
}

/* Uniform with variance 1: as good as a normal here, and cheaper. */
static double random_value(rng *r)
{
    return sqrt(12.0) * (rng_next_uniform(r) - 0.5);
}

static uint8_t random_code(rng *r)
{
    /* all exponents are about as frequent, so subnormals occur in every row */
    const uint8_t c = (uint8_t)rng_next(r);
    return (c & 0x7f) == 0x7f ? 0x7e : c;
}

static double random_scale(const problem_spec *s, rng *r)
{
    const double pow2 = ldexp(1.0, (int)rng_next_range(r, -9, -6));
    return s->odd_scales && rng_next(r) % 4 != 0 ? pow2 * (1.0 + rng_next_uniform(r)) : pow2;
}

static void fill_row(const problem_spec *s, uint8_t *at, rng *r)
{
    for (int d = 0; d < 576; d++) {
        const double x = random_value(r);
        switch (s->fmt) {
        case KVS_KV_F32:
            put_f32(at + 4 * d, x);
            break;
        case KVS_KV_BF16:
            put_bf16(at + 2 * d, x);
            break;
        case KVS_KV_FP8:
            at[d] = random_code(r);
            break;
        default:
            if (d < 512) {
                at[d] = random_code(r);
            } else {
                put_bf16(at + 528 + 2 * (d - 512), x);
            }
            break;
        }
    }
    for (int t = 0; t < 4 && s->fmt == KVS_KV_FP8_DS_MLA; t++) {
        put_f32(at + 512 + 4 * t, random_scale(s, r));
    }
}

static uint8_t *row_at(const problem *p, int64_t slot)
{
    return p->kv + slot / 64 * p->a.page_stride + slot % 64 * p->a.row_stride;
}

double problem_value(const problem *p, int64_t slot, int32_t d)
{
    const uint8_t *at = row_at(p, slot);
    switch (p->spec.fmt) {
    case KVS_KV_F32:
        return get_f32(at + 4 * d);
    case KVS_KV_BF16:
        return get_bf16(at + 2 * d);
    case KVS_KV_FP8:
        return to_bf16(e4m3(at[d]) * (double)p->a.k_scale);
    default:
        return d < 512 ? to_bf16(e4m3(at[d]) * get_f32(at + 512 + d / 128 * 4))
                       : get_bf16(at + 528 + 2 * (d - 512));
    }
}

double problem_query(const problem *p, int32_t row, int32_t head, int32_t d)
{
    const int64_t i = row * p->a.q_stride_row + head * p->a.q_stride_head + d;
    const uint8_t *q = p->q;
    return p->a.q_type == KVS_DTYPE_F32 ? get_f32(q + 4 * i) : get_bf16(q + 2 * i);
}

static void make_lists(problem *p, rng *r)
{
    const problem_spec *s = &p->spec;
    p->a.slots_stride = s->n_key + 5;
    p->slots = get((size_t)s->n_row * (size_t)p->a.slots_stride * sizeof *p->slots);
    p->lane_count = get((size_t)s->n_row * (size_t)s->n_lane * sizeof *p->lane_count);
    for (int32_t i = 0; i < s->n_row; i++) {
        int32_t left = s->n_key;
        for (int32_t j = 0; j < s->n_lane; j++) {
            const int32_t part = (int32_t)rng_next_range(r, 0, 2 * s->n_key / s->n_lane);
            const int32_t n = j + 1 == s->n_lane || part > left ? left : part;
            p->lane_count[i * s->n_lane + j] = n;
            left -= n;
        }
        int32_t *at = p->slots + i * p->a.slots_stride;
        for (int32_t k = 0; k < s->n_key; k++) {
            const double u = rng_next_uniform(r);
            at[k] = (int32_t)rng_next_below(r, (uint64_t)p->a.n_slot);
            if (u < s->none) {
                at[k] = -1;
            } else if (u < s->none + s->bad) {
                static const int32_t out[] = {-2, INT32_MIN, INT32_MAX, 0};
                at[k] = out[rng_next_below(r, 4)];
                at[k] = at[k] == 0 ? (int32_t)p->a.n_slot : at[k];
            }
        }
    }
    p->a.slots = p->slots;
    p->a.lane_count = p->lane_count;
}

static void make_table(problem *p, rng *r)
{
    const problem_spec *s = &p->spec;
    const int32_t width = (s->n_key + 63) / 64;
    const int32_t n_page = (int32_t)(p->a.n_slot / 64);
    p->a.n_req = s->n_req;
    p->a.table_width = width;
    p->a.table_stride = width + 3;
    p->table = get((size_t)s->n_req * (size_t)p->a.table_stride * sizeof *p->table);
    p->row_req = get((size_t)s->n_row * sizeof *p->row_req);
    p->kv_len = get((size_t)s->n_row * sizeof *p->kv_len);
    for (int32_t i = 0; i < s->n_req; i++) {
        for (int32_t k = 0; k < width; k++) {
            const bool bad = rng_next_uniform(r) < s->bad;
            p->table[i * p->a.table_stride + k] =
                bad ? n_page + (k % 2 ? 0 : -n_page - 1)
                    : (int32_t)rng_next_below(r, (uint64_t)n_page);
        }
    }
    int32_t base = 0;
    for (int32_t i = 0; i < s->n_row; i++) {
        const int32_t req = (int32_t)((int64_t)i * s->n_req / s->n_row);
        if (i == 0 || req != p->row_req[i - 1]) {
            base = (int32_t)rng_next_range(r, s->n_key / 2, s->n_key);
        }
        p->row_req[i] = req;
        const int32_t len = s->ragged ? base - (int32_t)rng_next_range(r, 0, 9) : base;
        p->kv_len[i] = len < 0 ? 0 : len;
    }
    p->a.table = p->table;
    p->a.row_req = p->row_req;
    p->a.kv_len = p->kv_len;
    p->a.interleave = s->interleave;
}

static void make_queries(problem *p, rng *r)
{
    const problem_spec *s = &p->spec;
    const bool f32 = s->fmt == KVS_KV_F32;
    p->a.q_type = f32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    p->a.q_stride_head = 576 + 8;
    p->a.q_stride_row = p->a.q_stride_head * s->n_head + 24;
    const int64_t n = p->a.q_stride_row * s->n_row;
    p->q = get((size_t)n * (f32 ? 4 : 2));
    p->q_scale = get((size_t)s->n_row * (size_t)s->n_head * sizeof(float));
    for (int32_t i = 0; i < s->n_row; i++) {
        for (int32_t h = 0; h < s->n_head; h++) {
            p->q_scale[i * s->n_head + h] = (float)(0.5 + rng_next_uniform(r));
            for (int32_t d = 0; d < 576; d++) {
                const int64_t at = i * p->a.q_stride_row + h * p->a.q_stride_head + d;
                const double x = (double)s->q_size * random_value(r);
                if (f32) {
                    put_f32((uint8_t *)p->q + 4 * at, x);
                } else {
                    put_bf16((uint8_t *)p->q + 2 * at, x);
                }
            }
        }
    }
    p->a.q = p->q;
    p->a.q_scale = s->seed % 2 ? p->q_scale : NULL;
}

problem problem_make(problem_spec spec)
{
    problem p = {.spec = spec};
    rng r = rng_init(spec.seed, 17);
    attn_args *a = &p.a;
    a->n_row = spec.n_row;
    a->n_head = spec.n_head;
    a->n_lane = spec.n_lane;
    a->fmt = spec.fmt;
    a->softmax_scale = 0.07f;
    a->k_scale = (float)random_scale(&spec, &r);
    a->n_slot = 64 * (spec.n_key / 64 + 2);
    a->row_stride = row_bytes(spec.fmt) + spec.row_pad;
    a->page_stride = 64 * a->row_stride + 64;
    p.kv_bytes = (size_t)(a->n_slot / 64 * a->page_stride);
    p.kv = get(p.kv_bytes);
    a->kv = p.kv;
    make_queries(&p, &r);
    if (spec.list) {
        make_lists(&p, &r);
    } else {
        make_table(&p, &r);
    }
    /* only what somebody attends is filled in; the rest stays NaN */
    int32_t *slot = get((size_t)spec.n_key * sizeof *slot);
    bool *done = get((size_t)a->n_slot);
    p.value = get((size_t)a->n_slot * 576 * sizeof *p.value);
    memset(done, 0, (size_t)a->n_slot);
    for (int32_t i = 0; i < spec.n_row; i++) {
        int32_t lane_n[8];
        const int32_t n = problem_keys(&p, i, slot, lane_n, NULL);
        for (int32_t k = 0; k < n; k++) {
            if (!done[slot[k]]) {
                done[slot[k]] = true;
                fill_row(&spec, row_at(&p, slot[k]), &r);
                for (int32_t d = 0; d < 576; d++) {
                    p.value[(int64_t)slot[k] * 576 + d] = (float)problem_value(&p, slot[k], d);
                }
            }
        }
    }
    free(slot);
    free(done);
    return p;
}

void problem_free(problem *p)
{
    free(p->kv);
    free(p->q);
    free(p->q_scale);
    free(p->value);
    free(p->slots);
    free(p->lane_count);
    free(p->table);
    free(p->row_req);
    free(p->kv_len);
}

int32_t problem_keys(const problem *p, int32_t row, int32_t *slot, int32_t *lane_n, uint64_t *n_bad)
{
    const attn_args *a = &p->a;
    int32_t n = 0;
    int32_t at = 0;
    uint64_t bad = 0;
    for (int32_t j = 0; j < a->n_lane; j++) {
        const int32_t before = n;
        if (a->slots != NULL) {
            const int32_t end = at + a->lane_count[row * a->n_lane + j];
            for (; at < end; at++) {
                const int32_t id = a->slots[row * a->slots_stride + at];
                if (id >= 0 && id < a->n_slot) {
                    slot[n++] = id;
                } else {
                    bad += id != -1;
                }
            }
        } else {
            const int32_t *table = a->table + a->row_req[row] * a->table_stride;
            for (int32_t l = 0; l < a->kv_len[row]; l++) {
                if (l / a->interleave % a->n_lane != j) {
                    continue;
                }
                const int64_t id = l / 64 < a->table_width ? table[l / 64] : -1;
                if (id >= 0 && id * 64 + l % 64 < a->n_slot) {
                    slot[n++] = (int32_t)(id * 64 + l % 64);
                } else {
                    bad++;
                }
            }
        }
        lane_n[j] = n - before;
    }
    if (n_bad != NULL) {
        *n_bad += bad;
    }
    return n;
}

/* Scores of one head in float64 into s[n]; returns the largest error bound of one of them. */
static double scores(const problem *p, int32_t row, int32_t head, const int32_t *slot, int32_t n,
                     double *s)
{
    const double by = (double)p->a.softmax_scale *
                      (p->a.q_scale != NULL ? (double)p->a.q_scale[row * p->a.n_head + head] : 1.0);
    double q[576];
    double worst = 0.0;
    for (int32_t d = 0; d < 576; d++) {
        q[d] = problem_query(p, row, head, d);
    }
    for (int32_t k = 0; k < n; k++) {
        double sum = 0.0;
        double terms = 0.0;
        for (int32_t d = 0; d < 576; d++) {
            const double x = q[d] * (double)p->value[(int64_t)slot[k] * 576 + d];
            sum += x;
            terms += fabs(x);
        }
        s[k] = sum * by;
        /* 576 roundings of f32, each half an ulp of a partial sum: sqrt as for independent errors */
        const double bound = 3.0 * sqrt(576.0) * 0x1p-24 * terms * by + 0x1p-22 * fabs(s[k]);
        worst = bound > worst ? bound : worst;
    }
    return worst;
}

bool problem_check(const problem *p, int32_t row, int32_t head, const float *out, float lse,
                   double p_unit, char *msg, size_t cap)
{
    int32_t *slot = get((size_t)p->spec.n_key * sizeof *slot);
    double *s = get((size_t)p->spec.n_key * sizeof *s);
    int32_t lane_n[8];
    const int32_t n = problem_keys(p, row, slot, lane_n, NULL);
    const double err = scores(p, row, head, slot, n, s);
    double m = -INFINITY;
    double l = 0.0;
    for (int32_t k = 0; k < n; k++) {
        m = s[k] > m ? s[k] : m;
    }
    for (int32_t k = 0; k < n; k++) {
        s[k] = exp(s[k] - m);
        l += s[k];
    }
    const double want_lse = n > 0 ? m + log(l) : -INFINITY;
    bool ok = n > 0 ? fabs((double)lse - want_lse) <= err + 1e-6 * (4.0 + fabs(want_lse))
                    : lse == -INFINITY;
    if (!ok) {
        snprintf(msg, cap, "row %d head %d: lse %.9g, want %.9g +- %.3g", row, head, (double)lse,
                 want_lse, err);
    }
    for (int32_t d = 0; d < 512 && ok; d++) {
        double want = 0.0;
        double size = 0.0;
        for (int32_t k = 0; k < n; k++) {
            const double x = s[k] * (double)p->value[(int64_t)slot[k] * 576 + d];
            want += x;
            size += fabs(x);
        }
        want = n > 0 ? want / l : 0.0;
        size = n > 0 ? size / l : 0.0;
        /* a score error moves numerator and denominator; P and its exp; the chain over keys */
        const double bound = size * (2.0 * err + p_unit + 1e-6 + 3.0 * sqrt(n) * 0x1p-24);
        ok = fabs((double)out[d] - want) <= bound;
        if (!ok) {
            snprintf(msg, cap, "row %d head %d value %d: %.9g, want %.9g +- %.3g (%d keys)", row,
                     head, d, (double)out[d], want, bound, n);
        }
    }
    free(slot);
    free(s);
    return ok;
}
