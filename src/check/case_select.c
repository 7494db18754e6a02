/* case_select.c - cases of scores and selection together.
 *
 * Where the scores of a row's keys differ by less than a variant's rounding, the oracle cannot say which of
 * them are in. So two kinds of case: random keys, in which every member must have the oracle's score within
 * index_score_bound and no key left out may lie above the worst member by more than twice that
 * bound; and keys that are one vector over and over with scales of a pattern, whose scores are equal bits or
 * further apart than roundings, so that the set, ties by position included, is known exactly. A second call must
 * give the same bytes. */
#include <math.h>
#include <string.h>

#include "check/case_index.h"

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_INDEX_DIM };

typedef struct select_expect {
    index_expect all; /* a column is a local index */
    int32_t exact;    /* equal scores are equal bits, others far apart */
    int32_t *id_again;
    float *score_again;
    int32_t *count_again;
} select_expect;

typedef struct select_shape {
    index_shape in;
    int32_t k;
    int32_t dcp, interleave, rank;
} select_shape;

static void select_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const select_expect *e = k->expect;
    index_select_args a = *(index_select_args *)k->args;
    a.scratch_bytes = t->index_select_scratch(&a, q);
    a.scratch = case_scratch(k, a.scratch_bytes);
    t->index_select(&a, q);
    a.list_id = e->id_again;
    a.list_score = e->score_again;
    a.list_count = e->count_again;
    a.in.n_bad_id = NULL;
    a.in.n_key = NULL;
    t->index_select(&a, q);
}

/* How the scales of a row's keys go. Of f32 keys, which have none, the values are scaled: by powers of two, so that
 * nothing is rounded. */
typedef enum scale_kind {
    SCALE_RANDOM,  /* and keys at random                                        */
    SCALE_FEW,     /* up to 5 powers of two                                     */
    SCALE_ONE_SET, /* 100 keys of 1, then zeros: thousands of ties with zero     */
    SCALE_EQUAL,
    SCALE_STEPS, /* the same for 4096 keys, seven powers of two in turn       */
    SCALE_RISING, /* each key better than all before it; fp8                   */
    SCALE_FALLING,
    N_SCALE_KIND
} scale_kind;

static float scale_of(rng *r, scale_kind kind, int64_t l, int64_t n, int32_t n_few)
{
    switch (kind) {
    case SCALE_RANDOM:
        return ldexpf(1.0f, gen_pick(r, 3) - 9);
    case SCALE_FEW:
        return ldexpf(1.0f, gen_pick(r, n_few) - 4);
    case SCALE_ONE_SET:
        return l < 100 ? 1.0f : 0.0f;
    case SCALE_STEPS:
        return ldexpf(1.0f, (int32_t)(l / 4096 % 7) - 4);
    case SCALE_RISING:
        return 1.0f + (float)l * 0x1p-16f;
    case SCALE_FALLING:
        return 1.0f + (float)(n - l) * 0x1p-16f;
    default:
        return 1.0f;
    }
}

/* base: the vector; NULL: one at random. */
static void put_key(rng *r, int32_t fmt, uint8_t *page, int64_t off, float scale,
                    const uint8_t *base)
{
    uint8_t code[DIM];
    float v[DIM];
    if (fmt == KVS_INDEX_F32) {
        gen_f32(r, v, DIM, 1.0f);
        for (int32_t i = 0; i < DIM && base != NULL; i++) {
            v[i] = (float)(base[i] % 16) * 0.125f * scale;
        }
        index_key_put(fmt, page, off, v, 1.0f);
        return;
    }
    if (base == NULL) {
        gen_e4m3(r, code, DIM);
    }
    index_key_put(fmt, page, off, base != NULL ? base : code, scale);
}

static index_select_args *select_new(check_case *k, const select_shape *s)
{
    index_select_args *a = case_alloc(k, 1, sizeof *a);
    select_expect *e = case_alloc(k, 1, sizeof *e);
    rng *r = &k->r;
    k->args = a;
    k->expect = e;
    index_sizes(k, &a->in, &s->in, 9);
    a->k = s->k;
    a->dcp = s->dcp;
    a->interleave = s->interleave;
    a->rank = s->rank;
    index_inputs(k, &a->in, 0);
    const int64_t n_list = (int64_t)a->in.n_row * s->k;
    a->list_id = case_buf(k, "list_id", BUF_OUT, EL_I32, n_list, gen_pick(r, 4));
    a->list_score = case_buf(k, "list_score", BUF_OUT, EL_F32, n_list, gen_pick(r, 4));
    a->list_count = case_buf(k, "list_count", BUF_OUT, EL_I32, a->in.n_row, 0);
    e->id_again = case_buf(k, "id again", BUF_OUT, EL_I32, n_list, 0);
    e->score_again = case_buf(k, "score again", BUF_OUT, EL_F32, n_list, 0);
    e->count_again = case_buf(k, "count again", BUF_OUT, EL_I32, a->in.n_row, 0);
    index_fill(k, &a->in, &s->in);
    if (k->failed) {
        return a;
    }
    case_mark_all(k, a->list_id);
    case_mark_all(k, a->list_score);
    case_mark_all(k, a->list_count);
    case_mark_all(k, e->id_again);
    case_mark_all(k, e->score_again);
    case_mark_all(k, e->count_again);
    return a;
}

/* Every key that a table names. */
static void select_fill(check_case *k, index_select_args *a, scale_kind kind, int32_t n_few)
{
    const index_score_args *in = &a->in;
    const int64_t n_col = (int64_t)in->table_width * PAGE;
    uint8_t base[DIM];
    gen_e4m3(&k->r, base, DIM);
    for (int32_t req = 0; req < in->n_req && !k->failed; req++) {
        for (int64_t l = 0; l < n_col; l++) {
            uint8_t *page = index_page(in, req, l);
            if (page != NULL) {
                put_key(&k->r, in->fmt, page, l % PAGE, scale_of(&k->r, kind, l, n_col, n_few),
                        kind == SCALE_RANDOM ? NULL : base);
            }
        }
    }
    ((select_expect *)k->expect)->exact = kind != SCALE_RANDOM;
}

/* What the oracle says of the keys that some row attends; a key whose score is NaN or -inf is none to select. */
static void select_finish(check_case *k, const index_select_args *a)
{
    index_expect *e = &((select_expect *)k->expect)->all;
    const int64_t n_col = (int64_t)a->in.table_width * PAGE;
    index_expect_make(k, &a->in, 0, INT32_MAX, n_col, e);
    for (int64_t i = 0; i < a->in.n_row * n_col && !k->failed; i++) {
        const double s = e->score[i].value;
        e->state[i] = e->state[i] && s > -INFINITY; /* false for NaN */
    }
}

/* With positive weights a key with a larger scale has a larger score. */
static void weights_positive(check_case *k, const index_select_args *a)
{
    for (int64_t i = 0; i < (int64_t)a->in.n_row * a->in.n_head && !k->failed; i++) {
        ((float *)a->in.w)[i] = fabsf(a->in.w[i]);
    }
}

static const int32_t g_heads[] = {64, 8, 32, 4, 16, 33, 1, 48};

static void select_random(check_case *k, int32_t index)
{
    static const int32_t lens[] = {640, 64, 63, 65, 0, 500, 1, 577};
    const select_shape s = {.in = {.fmt = index % 4 == 3 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = g_heads[index % 8],
                                   .n_req = 1 + index % 3,
                                   .rows_per_req = 1 + index / 2 % 5,
                                   .width = 10,
                                   .lens = lens,
                                   .n_len = 8},
                            .k = index % 3 == 0   ? 100
                                 : index % 3 == 1 ? 1
                                                  : 700,
                            .dcp = 1 << index % 4,
                            .interleave = index % 2 != 0 ? 64 : 1,
                            .rank = index % 4 != 0 ? 1 : 0};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, SCALE_RANDOM, 0);
    select_finish(k, a);
}

static void select_ties(check_case *k, int32_t index)
{
    static const int32_t lens[] = {1280, 1000, 64, 1279, 0, 700};
    const select_shape s = {.in = {.fmt = index % 4 == 3 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = g_heads[index % 8],
                                   .n_req = 2,
                                   .rows_per_req = 1 + index % 4,
                                   .width = 20,
                                   .lens = lens,
                                   .n_len = 6},
                            .k = index % 2 == 0 ? 300 : 64,
                            .dcp = 2,
                            .interleave = 1,
                            .rank = index % 2};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, SCALE_FEW, 1 + index % 5);
    select_finish(k, a);
}

/* Rows longer than what is kept of them at a time, in every pattern of scores. */
static void select_long(check_case *k, int32_t index)
{
    static const int32_t lens[] = {20000, 16385, 19999, 8193};
    static const int32_t few_lens[] = {9000, 8300};
    static const int32_t heads[] = {2, 4, 1, 8};
    const int32_t rows = k->quick ? 1 + index % 2 : 1 << (index + index / 6) % 3;
    const scale_kind kind = (scale_kind)(1 + index % (N_SCALE_KIND - 1));
    const int f32 = kind < SCALE_RISING && index / 6 % 2 != 0;
    const select_shape s = {.in = {.fmt = f32 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = heads[index / 3 % 4],
                                   .n_req = rows == 4 || k->quick ? 1 : 2,
                                   .rows_per_req = rows,
                                   .width = k->quick ? 141 : 313,
                                   .lens = k->quick ? few_lens : lens,
                                   .n_len = k->quick ? 2 : 4},
                            .k = index % 2 == 0 ? 2048 : 300,
                            .dcp = 1 << index % 4,
                            .interleave = 1,
                            .rank = 0};
    index_select_args *a = select_new(k, &s);
    weights_positive(k, a);
    select_fill(k, a, kind, 4);
    select_finish(k, a);
}

/* NaN in codes, scales and a row's weights, infinite scales, a row whose best scores are -inf. */
static void select_nan(check_case *k, int32_t index)
{
    static const int32_t lens[] = {400, 130, 320, 448};
    const select_shape s = {.in = {.fmt = index % 4 == 3 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = g_heads[index % 8],
                                   .n_req = 2,
                                   .rows_per_req = 1 + index % 4,
                                   .width = 7,
                                   .lens = lens,
                                   .n_len = 4},
                            .k = index % 2 == 0 ? 50 : 300,
                            .dcp = 1,
                            .interleave = 1,
                            .rank = 0};
    index_select_args *a = select_new(k, &s);
    weights_positive(k, a);
    select_fill(k, a, SCALE_FEW, 3);
    const index_score_args *in = &a->in;
    for (int64_t l = 0; l < in->n_req * 7 * PAGE && !k->failed; l++) {
        uint8_t *page = index_page(in, (int32_t)(l / (7 * PAGE)), l % (7 * PAGE));
        const int32_t dice = gen_pick(&k->r, index % 3 == 0 ? 3 : 24);
        const float odd = dice == 0 ? NAN : INFINITY;
        if (in->fmt == KVS_INDEX_F32 && dice < 2) {
            memcpy(page + 4 * (l % PAGE * DIM + gen_pick(&k->r, DIM)), &odd, sizeof odd);
        } else if (dice < 2) {
            memcpy(page + PAGE * DIM + 4 * (l % PAGE), &odd, sizeof odd);
        } else if (dice == 2 && in->fmt != KVS_INDEX_F32) {
            page[l % PAGE * DIM + gen_pick(&k->r, DIM)] = (uint8_t)(0x7F | (l & 1) << 7);
        }
    }
    float *w = (float *)a->in.w;
    for (int32_t h = 0; h < in->n_head && !k->failed; h++) {
        w[h] = -w[h]; /* the first row's scores are below zero */
    }
    if (in->n_row > 2 && !k->failed) {
        w[2 * in->n_head + in->n_head / 2] = NAN;
    }
    select_finish(k, a);
}

/* Pages whose bytes lie where 31 and 32 bits end. */
static void select_far(check_case *k, int32_t index)
{
    static const int32_t lens[] = {384, 200, 129};
    const select_shape s = {.in = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = g_heads[index % 8],
                                   .n_req = 2,
                                   .rows_per_req = 1 << index / 2 % 3,
                                   .width = 6,
                                   .lens = lens,
                                   .n_len = 3,
                                   .far = 1},
                            .k = 100,
                            .dcp = 1,
                            .interleave = 1,
                            .rank = 0};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, SCALE_RANDOM, 0);
    select_finish(k, a);
}

/* More rows than 16 bits count, some without a key. */
static void select_many_rows(check_case *k, int32_t index)
{
    static const int32_t lens[] = {3, 1, 0, 2, 5};
    const int32_t rows = index == 0 ? 4 : 2;
    const select_shape s = {.in = {.fmt = KVS_INDEX_FP8,
                                   .n_head = 1,
                                   .n_req = 70000 / rows,
                                   .rows_per_req = rows,
                                   .width = 1,
                                   .lens = lens,
                                   .n_len = 5},
                            .k = 2,
                            .dcp = 1,
                            .interleave = 1,
                            .rank = 0};
    index_select_args *a = select_new(k, &s);
    for (int32_t req = 0; req < a->in.n_req && !k->failed; req++) {
        for (int64_t l = 0; l < 5; l++) {
            put_key(&k->r, a->in.fmt, index_page(&a->in, req, l), l, 0x1p-9f, NULL);
        }
    }
    select_finish(k, a);
}

static void select_bad(check_case *k, int32_t index)
{
    const select_shape s = {.in = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                                   .n_head = g_heads[index % 8],
                                   .n_req = 3,
                                   .rows_per_req = 2,
                                   .width = 4,
                                   .lens = index_bad_lens,
                                   .n_len = 6},
                            .k = 90,
                            .dcp = 1,
                            .interleave = 1,
                            .rank = 0};
    index_select_args *a = select_new(k, &s);
    index_make_bad(k, &a->in, index);
    select_fill(k, a, SCALE_RANDOM, 0);
    select_finish(k, a);
}

/* ---- comparison ---- */

/* Local index of a position on the case's rank; -1 where it is another's or none. */
static int64_t local_of(const index_select_args *a, int32_t pos)
{
    const orc_place p = orc_place_of(pos < 0 ? 0 : pos, a->dcp, a->interleave);
    return pos < 0 || p.owner != a->rank ? -1 : p.local;
}

/* The set of a row of one vector, by the oracle's scores, which tell the scales apart. */
static void compare_exact(check_case *k, const index_select_args *a, int64_t row, check_result *r)
{
    const index_expect *e = &((const select_expect *)k->expect)->all;
    orc_cand *all = case_alloc(k, e->n_col + 1, sizeof *all);
    int64_t n = 0;
    for (int64_t l = 0; l < e->n_col && !k->failed; l++) {
        if (e->state[row * e->n_col + l]) {
            all[n++] = (orc_cand){(float)e->score[row * e->n_col + l].value, (int32_t)l};
        }
    }
    n = orc_select(all, n);
    n = n < a->k ? n : a->k;
    orc_sort_id(all, n);
    for (int64_t i = 0; i < n; i++) {
        cmp_i64(r, (coord){"local id", row, -1, i}, local_of(a, a->list_id[row * a->k + i]),
                all[i].id);
    }
}

static void compare_row(check_case *k, const index_select_args *a, int64_t row,
                        const check_variant *v, check_result *r)
{
    const select_expect *expect = k->expect;
    const index_expect *e = &expect->all;
    uint8_t *in = case_alloc(k, e->n_col, 1);
    int64_t n_valid = 0;
    for (int64_t l = 0; l < e->n_col && !k->failed; l++) {
        n_valid += e->state[row * e->n_col + l];
    }
    const int64_t want = n_valid < a->k ? n_valid : a->k;
    cmp_i64(r, (coord){"list_count", row, -1, -1}, a->list_count[row], want);
    int64_t last = -1;
    double worst = INFINITY;
    for (int64_t i = 0; i < want && !k->failed; i++) {
        const int64_t l = local_of(a, a->list_id[row * a->k + i]);
        const int ok = l > last && l < e->n_col && e->state[row * e->n_col + l];
        cmp_i64(r, (coord){"ascending local ids of keys", row, -1, i}, ok, 1);
        if (!ok) {
            return;
        }
        const orc_score *o = &e->score[row * e->n_col + l];
        const double got = (double)a->list_score[row * a->k + i];
        cmp_near(r, (coord){"list_score", row, -1, i}, a->list_score[row * a->k + i], o->value,
                 index_score_bound(&a->in, o, v));
        worst = got < worst ? got : worst;
        in[l] = 1;
        last = l;
    }
    for (int64_t l = 0; l < e->n_col && want == a->k && !k->failed; l++) {
        const orc_score *o = &e->score[row * e->n_col + l];
        if (e->state[row * e->n_col + l] && !in[l]) {
            cmp_i64(r, (coord){"left out, yet better than a member", row, -1, l},
                    o->value - index_score_bound(&a->in, o, v) > worst, 0);
        }
    }
    for (int64_t i = want; i < a->k; i++) {
        cmp_i64(r, (coord){"id behind", row, -1, i}, a->list_id[row * a->k + i], -1);
        cmp_near(r, (coord){"score behind", row, -1, i}, a->list_score[row * a->k + i], 0.0, 0.0);
    }
    if (expect->exact) {
        compare_exact(k, a, row, r);
    }
}

static void select_compare(check_case *k, const check_variant *v, check_result *r)
{
    const index_select_args *a = k->args;
    const select_expect *e = k->expect;
    for (int64_t row = 0; row < a->in.n_row && !k->failed; row++) {
        compare_row(k, a, row, v, r);
        cmp_i64(r, (coord){"count again", row, -1, -1}, e->count_again[row], a->list_count[row]);
        for (int64_t i = row * a->k; i < (row + 1) * a->k; i++) {
            cmp_i64(r, (coord){"id again", row, -1, i}, e->id_again[i], a->list_id[i]);
            cmp_bits(r, (coord){"score again", row, -1, i}, e->score_again[i], a->list_score[i]);
        }
    }
    index_compare_counts(k, &a->in, &e->all, r);
}

static int select_filled(const kern_table *t)
{
    return t->index_select != NULL && t->index_select_scratch != NULL;
}

static int select_same(const kern_table *a, const kern_table *b)
{
    return a->index_select == b->index_select;
}

static const check_class g_classes[] = {
    {"random", "the k best of a row's scores, ascending positions, -1 and 0 behind", 48, 12, 0,
     select_random, NULL, select_compare},
    {"ties", "of equal scores the lower positions are selected", 40, 10, 0, select_ties, NULL,
     select_compare},
    {"bad", "keys of pages outside the table or the pool are never selected, and counted", 16, 8, 0,
     select_bad, NULL, select_compare},
    {"long", "the k best do not depend on how many of a row's keys are looked at together", 12, 2, 0, select_long,
     NULL, select_compare},
    {"nan", "NaN and -inf are never selected", 16, 4, 0, select_nan, NULL, select_compare},
    {"far pages", "a page is found by its id and a stride of 64 bits", 6, 2, 0, select_far, NULL, select_compare},
    {"many rows", NULL, 2, 0, CLASS_DEVICE, select_many_rows, NULL, select_compare},
};

const check_op check_index_select_op = {
    KERN_OP_index_select,
    sizeof g_classes / sizeof *g_classes,
    g_classes,
    select_filled,
    select_same,
    select_run,
    NULL,
};
