/* case_score.c - cases of the indexer's scores.
 *
 * Scores against the oracle, within index_score_bound; and against each other, bit by bit: a row alone, in
 * pieces, the same keys elsewhere.
 */
#include <math.h>
#include <string.h>

#include "check/case_index.h"

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_INDEX_DIM };

typedef struct score_expect {
    index_expect all; /* where there is no score, -inf */
    float *alone;     /* second output of the invariance class; NULL elsewhere */
    int32_t shift;    /* keys of request 1 at l + shift are those of request 0 at l */
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

/* One key, at random, into token `off` of a page. */
static void put_key(rng *r, int32_t fmt, uint8_t *page, int64_t off)
{
    float v[DIM];
    uint8_t code[DIM];
    if (fmt == KVS_INDEX_F32) {
        gen_f32(r, v, DIM, 1.0f);
        index_key_put(fmt, page, off, v, 1.0f);
        return;
    }
    gen_e4m3(r, code, DIM);
    float scale = ldexpf(1.0f, gen_pick(r, 6) - 9);
    if (gen_pick(r, 4) == 0) {
        scale *= 1.0f + (float)gen_pick(r, 1000) / 1024.0f;
    }
    index_key_put(fmt, page, off, code, scale);
}

static void copy_key(int32_t fmt, uint8_t *to, int64_t to_off, const uint8_t *from, int64_t off)
{
    float scale = 1.0f;
    if (fmt != KVS_INDEX_F32) {
        memcpy(&scale, from + PAGE * DIM + 4 * off, sizeof scale);
    }
    index_key_put(fmt, to, to_off, from + off * (fmt == KVS_INDEX_F32 ? 4 * DIM : DIM), scale);
}

/* Scores of the columns [begin, end); what no row may attend stays NaN. */
static index_score_args *score_new(check_case *k, const index_shape *s, int32_t begin, int32_t end)
{
    index_score_args *a = case_alloc(k, 1, sizeof *a);
    k->args = a;
    index_sizes(k, a, s, 30);
    a->col_begin = begin;
    a->col_end = end;
    a->score_stride = end - begin + gen_pick(&k->r, 9);
    index_inputs(k, a, 3);
    a->score =
        case_buf(k, "score", BUF_OUT, EL_F32, a->n_row * a->score_stride, gen_pick(&k->r, 3));
    index_fill(k, a, s);
    for (int32_t row = 0; row < a->n_row && !k->failed; row++) {
        case_mark(k, a->score + row * a->score_stride, 4 * (int64_t)(end - begin));
    }
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
            uint8_t *page = index_page(a, req, l);
            if (page != NULL) {
                put_key(&k->r, a->fmt, page, l % PAGE);
            }
        }
    }
}

static void score_finish(check_case *k)
{
    const index_score_args *a = k->args;
    score_expect *e = k->expect != NULL ? k->expect : case_alloc(k, 1, sizeof *e);
    k->expect = e;
    index_expect_make(k, a, a->col_begin, a->col_end, a->col_end - a->col_begin, &e->all);
}

static const int32_t g_heads[] = {8, 64, 32, 4, 16, 33, 1, 48};

static void score_random(check_case *k, int32_t index)
{
    static const int32_t lens[] = {190, 64, 63, 65, 0, 128, 1, 200};
    const index_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index / 2 % 8],
                           .n_req = (1 + index) % 4,
                           .rows_per_req = 1 + index / 3 % 5,
                           .width = 4,
                           .lens = lens,
                           .n_len = 8};
    index_score_args *a =
        score_new(k, &s, index % 4 == 3 ? 64 : 0, index % 4 == 2 ? 131 : 256);
    if (index == 0) {
        ((int32_t *)a->kv_len)[0] = 256; /* a full row, for the selftest */
    }
    score_fill(k, a);
    score_finish(k);
}

/* Ids outside the pool, rows longer than their table, rows of no request, rows of no length. */
static void score_bad(check_case *k, int32_t index)
{
    const index_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index % 8],
                           .n_req = 3,
                           .rows_per_req = 2,
                           .width = 4,
                           .lens = index_bad_lens,
                           .n_len = 6};
    index_score_args *a = score_new(k, &s, 64 * (index % 3), 320);
    index_make_bad(k, a, index);
    score_fill(k, a);
    score_finish(k);
}

/* NaN in keys, scales, queries and weights of single scores; NaN past the bound of every other row.
 */
static void score_nan(check_case *k, int32_t index)
{
    static const int32_t lens[] = {40, 64, 90, 130};
    const index_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index % 8],
                           .n_req = 1,
                           .rows_per_req = 4,
                           .width = 3,
                           .lens = lens,
                           .n_len = 4};
    index_score_args *a = score_new(k, &s, 0, 192);
    score_fill(k, a);
    if (!k->failed) {
        for (int64_t l = 70; l < 90; l++) {
            /* the last row attends these, the first two do not */
            uint8_t *page = index_page(a, 0, l);
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

/* Pages whose bytes lie where 31 and 32 bits end. */
static void score_far(check_case *k, int32_t index)
{
    static const int32_t lens[] = {384, 200, 129};
    const index_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index % 8],
                           .n_req = 2,
                           .rows_per_req = 1 + index % 3,
                           .width = 6,
                           .lens = lens,
                           .n_len = 3,
                           .far = 1};
    index_score_args *a = score_new(k, &s, 0, 384);
    score_fill(k, a);
    score_finish(k);
}

/* ---- invariance: alone, in pieces, elsewhere ---- */

static void score_alone(check_case *k, int32_t index)
{
    static const int32_t lens[] = {150, 151, 190, 64, 3, 170, 0, 129};
    const index_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                           .n_head = g_heads[index / 2 % 8],
                           .n_req = 2,
                           .rows_per_req = 8,
                           .width = 4,
                           .lens = lens,
                           .n_len = 8};
    index_score_args *a = score_new(k, &s, 0, 256);
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
        for (int64_t l = 0; l < 190 + e->shift; l++) {
            uint8_t *to = index_page(a, 1, l);
            if (l < e->shift) {
                put_key(&k->r, a->fmt, to, l % PAGE);
                continue;
            }
            const int64_t from = l - e->shift;
            copy_key(a->fmt, to, l % PAGE, index_page(a, 0, from), from % PAGE);
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
        for (int64_t c = 0; c < e->all.n_col; c++) {
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
    cmp_near(r, (coord){"score", row, -1, col}, a->score[row * a->score_stride + col], o->value,
             index_score_bound(a, o, v));
}

static void score_compare(check_case *k, const check_variant *v, check_result *r)
{
    const index_score_args *a = k->args;
    const score_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t c = 0; c < e->all.n_col; c++) {
            const int64_t at = row * e->all.n_col + c;
            if (e->all.state[at]) {
                score_compare_one(a, &e->all.score[at], row, c, v, r);
            } else {
                cmp_near(r, (coord){"score", row, -1, c}, a->score[row * a->score_stride + c],
                         -INFINITY, 0.0);
            }
        }
    }
    if (e->alone != NULL) {
        compare_alone(a, e, r);
    }
    index_compare_counts(k, a, &e->all, r);
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
    {"far pages", "a page is found by its id and a stride of 64 bits", 6, 2, 0, score_far, NULL, score_compare},
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
