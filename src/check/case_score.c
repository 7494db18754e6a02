/* case_score.c - cases of the indexer's scores.
 *
 * Bound: K = 128 products in a dot, then n_head terms: sqrt(128) u sum|q||k||w| + (sqrt(n_head) +
 * 2) u sum|w relu|, both times k_scale, + 2 u |score| for the scale and the last rounding; u =
 * 2^-24 in every variant, since the products of fp8 values are exact in f32 and f32 keys are
 * multiplied in f32. Where a variant's sums do not round to nearest (kern_variant.dot_u), its own factor
 * stands for sqrt(128).
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_INDEX_DIM };

static const double u = 0x1p-24;

typedef struct score_expect {
    orc_score *score; /* [n_row, n_col] */
    uint8_t *state;   /* [n_row, n_col] 0: -inf, 1: a score */
    int64_t n_col;
    uint64_t n_bad, n_key;
    float *alone;  /* second output of the invariance class; NULL elsewhere */
    int32_t shift; /* keys of request 1 at l + shift are those of request 0 at l */
} score_expect;

static void score_call(const kern_table *t, check_case *k, dev_queue *q, index_score_args *a)
{
    a->scratch_bytes = t->index_score_scratch(a, q);
    a->scratch = case_scratch(k, a->scratch_bytes);
    t->index_score(a, q);
}

static void score_run(const kern_table *t, check_case *k, dev_queue *q)
{
    index_score_args a = *(index_score_args *)k->args;
    score_call(t, k, q, &a);
}

typedef struct score_shape {
    int32_t fmt, n_head, n_req, rows_per_req, width, col_begin, col_end;
    const int32_t *lens; /* kv_len by row, cycled */
    int32_t n_len;
} score_shape;

/* One key, at random, into token `off` of a page. */
static void put_key(rng *r, int32_t fmt, uint8_t *page, int64_t off)
{
    if (fmt == KVS_INDEX_F32) {
        float v[DIM];
        gen_f32(r, v, DIM, 1.0f);
        memcpy(page + off * (int64_t)sizeof v, v, sizeof v);
        return;
    }
    gen_e4m3(r, page + off * DIM, DIM);
    float scale = ldexpf(1.0f, gen_pick(r, 6) - 9);
    if (gen_pick(r, 4) == 0) {
        scale *= 1.0f + (float)gen_pick(r, 1000) / 1024.0f;
    }
    memcpy(page + PAGE * DIM + 4 * off, &scale, sizeof scale);
}

static void copy_key(int32_t fmt, uint8_t *to, int64_t to_off, const uint8_t *from, int64_t off)
{
    const int64_t size = fmt == KVS_INDEX_F32 ? DIM * 4 : DIM;
    memcpy(to + to_off * size, from + off * size, (size_t)size);
    if (fmt != KVS_INDEX_F32) {
        memcpy(to + PAGE * DIM + 4 * to_off, from + PAGE * DIM + 4 * off, 4);
    }
}

/* Buffers and tables; pages are a permutation, what no row may attend stays NaN. */
static index_score_args *score_new(check_case *k, const score_shape *s)
{
    index_score_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->fmt = s->fmt;
    a->n_head = s->n_head;
    a->n_row = s->n_req * s->rows_per_req;
    a->n_req = s->n_req;
    a->table_width = s->width;
    a->table_stride = s->width + gen_pick(r, 3);
    a->n_page = (int64_t)s->n_req * s->width + 2;
    const int32_t unit = 4 * case_step(k, 4);
    a->page_stride = orc_index_page_bytes(s->fmt) + unit * gen_pick(r, 30);
    a->col_begin = s->col_begin;
    a->col_end = s->col_end;
    a->score_stride = s->col_end - s->col_begin + gen_pick(r, 9);
    const int64_t n_q = (int64_t)a->n_row * s->n_head;
    const check_elem el = s->fmt == KVS_INDEX_F32 ? EL_F32 : EL_U8;
    void *q = case_buf(k, "q", BUF_IN, el, n_q * DIM,
                       case_step(k, s->fmt == KVS_INDEX_F32 ? 4 : 1) * gen_pick(r, 3));
    float *w = case_buf(k, "w", BUF_IN, EL_F32, n_q, gen_pick(r, 3));
    a->keys = case_buf(k, "keys", BUF_IN, EL_U8, a->n_page * a->page_stride, unit * gen_pick(r, 3));
    int32_t *table = case_buf(k, "table", BUF_IN, EL_I32, a->n_req * a->table_stride, 0);
    int32_t *row_req = case_buf(k, "row_req", BUF_IN, EL_I32, a->n_row, 0);
    int32_t *kv_len = case_buf(k, "kv_len", BUF_IN, EL_I32, a->n_row, 0);
    a->score = case_buf(k, "score", BUF_OUT, EL_F32, a->n_row * a->score_stride, gen_pick(r, 3));
    a->n_bad_id = case_counter(k, "n_bad_id");
    a->n_key = case_counter(k, "n_key");
    int32_t *page = case_alloc(k, a->n_page, sizeof *page);
    if (k->failed) {
        return a;
    }
    if (s->fmt == KVS_INDEX_F32) {
        gen_f32(r, q, n_q * DIM, 1.0f);
    } else {
        gen_e4m3(r, q, n_q * DIM);
    }
    gen_f32(r, w, n_q, 0.05f);
    gen_permutation(r, page, (int32_t)a->n_page);
    for (int32_t req = 0; req < s->n_req; req++) {
        for (int32_t i = 0; i < s->width; i++) {
            table[req * a->table_stride + i] = page[req * s->width + i];
        }
    }
    for (int32_t row = 0; row < a->n_row; row++) {
        row_req[row] = row / s->rows_per_req;
        kv_len[row] = s->lens[row % s->n_len];
        case_mark(k, a->score + row * a->score_stride, 4 * (int64_t)(s->col_end - s->col_begin));
    }
    a->q = q;
    a->w = w;
    a->table = table;
    a->row_req = row_req;
    a->kv_len = kv_len;
    k->args = a;
    return a;
}

/* Keys of every local index that some row of the request attends. */
static void score_fill(check_case *k, index_score_args *a)
{
    for (int32_t req = 0; req < a->n_req && !k->failed; req++) {
        int64_t len = 0;
        for (int32_t row = 0; row < a->n_row; row++) {
            len = a->row_req[row] == req && a->kv_len[row] > len ? a->kv_len[row] : len;
        }
        for (int64_t l = 0; l < len; l++) {
            const int64_t slot =
                orc_slot(a->table + req * a->table_stride, a->table_width, a->n_page * PAGE, l);
            if (slot >= 0) {
                put_key(&k->r, a->fmt, (uint8_t *)a->keys + slot / PAGE * a->page_stride,
                        slot % PAGE);
            }
        }
    }
}

static void score_finish(check_case *k)
{
    const index_score_args *a = k->args;
    score_expect *e = k->expect != NULL ? k->expect : case_alloc(k, 1, sizeof *e);
    e->n_col = a->col_end - a->col_begin;
    e->score = case_alloc(k, a->n_row * e->n_col, sizeof *e->score);
    e->state = case_alloc(k, a->n_row * e->n_col, 1);
    k->expect = e;
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t l = a->col_begin; l < a->col_end && l < a->kv_len[row]; l++) {
            const int32_t req = a->row_req[row];
            const int64_t slot = req < 0 || req >= a->n_req
                                     ? -1
                                     : orc_slot(a->table + req * a->table_stride, a->table_width,
                                                a->n_page * PAGE, l);
            if (slot < 0) {
                e->n_bad++;
                continue;
            }
            const int64_t at = row * e->n_col + l - a->col_begin;
            e->n_key++;
            e->state[at] = 1;
            e->score[at] = orc_index_score(a, row, slot);
        }
    }
}

static const int32_t g_heads[] = {8, 64, 32, 4, 16, 33, 1, 48};

static void score_random(check_case *k, int32_t index)
{
    static const int32_t lens[] = {190, 64, 63, 65, 0, 128, 1, 200};
    const score_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index / 2 % 8],
                           .n_req = (1 + index) % 4,
                           .rows_per_req = 1 + index / 3 % 5,
                           .width = 4,
                           .col_begin = index % 4 == 3 ? 64 : 0,
                           .col_end = index % 4 == 2 ? 131 : 256,
                           .lens = lens,
                           .n_len = 8};
    index_score_args *a = score_new(k, &s);
    if (index == 0) {
        ((int32_t *)a->kv_len)[0] = 256; /* a full row, for the selftest */
    }
    score_fill(k, a);
    score_finish(k);
}

/* Ids outside the pool, rows longer than their table, rows of no request, rows of no length. */
static void score_bad(check_case *k, int32_t index)
{
    static const int32_t lens[] = {300, 0, 70, 256, -5, 257};
    const score_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index % 8],
                           .n_req = 3,
                           .rows_per_req = 2,
                           .width = 4,
                           .col_begin = 64 * (index % 3),
                           .col_end = 320,
                           .lens = lens,
                           .n_len = 6};
    index_score_args *a = score_new(k, &s);
    if (!k->failed) {
        int32_t *table = (int32_t *)a->table;
        table[1] = -1;
        table[2] = (int32_t)a->n_page;
        table[a->table_stride] = INT32_MAX;
        table[a->table_stride + 2] = INT32_MIN;
        a->table = case_fenced_table(k, table, a->n_req, a->table_stride, a->n_page);
        ((int32_t *)a->row_req)[5] = index % 2 != 0 ? 3 : -1;
    }
    score_fill(k, a);
    score_finish(k);
}

/* NaN in keys, scales, queries and weights of single scores; NaN past the bound of every other row.
 */
static void score_nan(check_case *k, int32_t index)
{
    static const int32_t lens[] = {40, 64, 90, 130};
    const score_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index % 8],
                           .n_req = 1,
                           .rows_per_req = 4,
                           .width = 3,
                           .col_begin = 0,
                           .col_end = 192,
                           .lens = lens,
                           .n_len = 4};
    index_score_args *a = score_new(k, &s);
    score_fill(k, a);
    if (!k->failed) {
        for (int64_t l = 70; l < 90; l++) {
            /* the last row attends these, the first two do not */
            uint8_t *page = (uint8_t *)a->keys + a->table[l / PAGE] * a->page_stride;
            if (a->fmt == KVS_INDEX_F32) {
                const float nan = -NAN;
                memcpy(page + 4 * ((l % PAGE) * DIM + gen_pick(&k->r, DIM)), &nan, sizeof nan);
            } else {
                page[l % PAGE * DIM + gen_pick(&k->r, DIM)] = (l & 1) != 0 ? 0x7F : 0xFF;
            }
        }
        if (index % 3 == 1) {
            ((float *)a->w)[3 * a->n_head] = NAN;
        }
        if (index % 3 == 2 && a->fmt == KVS_INDEX_F32) {
            ((float *)a->q)[2 * a->n_head * DIM + 5] = NAN;
        }
    }
    score_finish(k);
}

/* ---- invariance: alone, in pieces, elsewhere ---- */

static void score_alone(check_case *k, int32_t index)
{
    static const int32_t lens[] = {150, 151, 190, 64, 3, 170, 0, 129};
    const score_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index / 2 % 8],
                           .n_req = 2,
                           .rows_per_req = 8,
                           .width = 4,
                           .col_begin = 0,
                           .col_end = 256,
                           .lens = lens,
                           .n_len = 8};
    index_score_args *a = score_new(k, &s);
    score_expect *e = case_alloc(k, 1, sizeof *e);
    e->alone = case_buf(k, "alone", BUF_OUT, EL_F32, a->n_row * a->score_stride, 1);
    e->shift = 1 + gen_pick(&k->r, 40);
    k->expect = e;
    score_fill(k, a);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        case_mark(k, e->alone + row * a->score_stride, 4 * 256);
    }
    if (!k->failed) {
        /* the second request: the same queries over the same keys, further back */
        const int64_t n = 8 * (int64_t)a->n_head;
        const size_t size = a->fmt == KVS_INDEX_F32 ? 4 : 1;
        memcpy((uint8_t *)a->q + (size_t)(n * DIM) * size, a->q, (size_t)(n * DIM) * size);
        memcpy((float *)a->w + n, a->w, (size_t)n * sizeof(float));
        for (int32_t row = 0; row < 8; row++) {
            ((int32_t *)a->kv_len)[8 + row] = a->kv_len[row] + e->shift;
        }
        uint8_t *keys = (uint8_t *)a->keys;
        for (int64_t l = 0; l < 190 + e->shift; l++) {
            uint8_t *to = keys + a->table[a->table_stride + l / PAGE] * a->page_stride;
            if (l < e->shift) {
                put_key(&k->r, a->fmt, to, l % PAGE);
                continue;
            }
            const int64_t from = l - e->shift;
            copy_key(a->fmt, to, l % PAGE, keys + a->table[from / PAGE] * a->page_stride,
                     from % PAGE);
        }
    }
    score_finish(k);
}

static void score_alone_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const score_expect *e = k->expect;
    const index_score_args whole = *(index_score_args *)k->args;
    score_run(t, k, q);
    for (int32_t row = 0; row < whole.n_row; row++) {
        for (int32_t col = 0; col < whole.col_end; col += row % 2 != 0 ? 64 : 128) {
            index_score_args a = whole;
            const int64_t at = (int64_t)row * a.n_head;
            a.n_row = 1;
            a.q = (const uint8_t *)a.q + at * DIM * (a.fmt == KVS_INDEX_F32 ? 4 : 1);
            a.w += at;
            a.row_req += row;
            a.kv_len += row;
            a.col_begin = col;
            a.col_end = col + (row % 2 != 0 ? 64 : 128);
            a.score = e->alone + row * a.score_stride + col;
            a.n_bad_id = NULL;
            a.n_key = NULL;
            score_call(t, k, q, &a);
        }
    }
}

static void compare_alone(const index_score_args *a, const score_expect *e, check_result *r)
{
    for (int64_t row = 0; row < a->n_row; row++) {
        const float *whole = a->score + row * a->score_stride;
        const float *alone = e->alone + row * a->score_stride;
        for (int64_t c = 0; c < e->n_col; c++) {
            cmp_bits(r, (coord){"row alone, in pieces", row, -1, c}, alone[c], whole[c]);
        }
        if (row < 8) {
            const float *moved = a->score + (row + 8) * a->score_stride + e->shift;
            for (int64_t c = 0; c < a->kv_len[row]; c++) {
                cmp_bits(r, (coord){"same key elsewhere", row, -1, c}, moved[c], whole[c]);
            }
        }
    }
}

void score_compare_one(const index_score_args *a, const orc_score *o, int64_t row, int64_t col,
                       const check_variant *v, check_result *r)
{
    const double tol = fmax(sqrt(128.0), v->dot_u) * u * o->dot_terms +
                       (sqrt((double)a->n_head) + 2.0) * u * o->sum_terms +
                       2.0 * u * fabs(o->value) + 0x1p-149;
    cmp_near(r, (coord){"score", row, -1, col}, a->score[row * a->score_stride + col], o->value,
             tol);
}

static void score_compare(check_case *k, const check_variant *v, check_result *r)
{
    const index_score_args *a = k->args;
    const score_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t c = 0; c < e->n_col; c++) {
            if (e->state[row * e->n_col + c]) {
                score_compare_one(a, &e->score[row * e->n_col + c], row, c, v, r);
            } else {
                cmp_near(r, (coord){"score", row, -1, c}, a->score[row * a->score_stride + c],
                         -INFINITY, 0.0);
            }
        }
    }
    if (e->alone != NULL) {
        compare_alone(a, e, r);
    }
    cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)case_counted(k, a->n_bad_id),
            (int64_t)e->n_bad);
    cmp_i64(r, (coord){"n_key", 0, -1, -1}, (int64_t)case_counted(k, a->n_key), (int64_t)e->n_key);
}

static int score_filled(const kern_table *t)
{
    return t->index_score != NULL && t->index_score_scratch != NULL;
}

static int score_same(const kern_table *a, const kern_table *b)
{
    return a->index_score == b->index_score;
}

static const check_class g_classes[] = {
    {"random", "score = (sum_h max(0, q8_h . k8) * w_h) * k_scale in f32", 32, 16, 0, score_random,
     NULL, score_compare},
    {"bad ids", "an id outside the table is masked and counted, never dereferenced", 12, 6, 0,
     score_bad, NULL, score_compare},
    {"nan", "a key outside a row's bound cannot touch that row even if it holds NaN", 12, 6, 0,
     score_nan, NULL, score_compare},
    {"alone", "a score depends neither on shard, row, batch nor on where the key lies", 16, 6, 0,
     score_alone, score_alone_run, score_compare},
};

const check_op check_index_score_op = {
    KERN_OP_index_score,
    sizeof g_classes / sizeof *g_classes,
    g_classes,
    score_filled,
    score_same,
    score_run,
    NULL,
};
