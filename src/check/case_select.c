/* case_select.c - cases of scores and selection together.
 *
 * Where the scores of a row's keys differ by less than a variant's rounding, the oracle cannot say which of
 * them are in. So two kinds of case: random keys, in which every member must have the oracle's score within
 * index_score_bound and no key left out may lie above the worst member by more than twice that
 * bound; and keys that are few vectors over and over, whose scores are equal bits or far apart, so that the
 * set, ties by position included, is known exactly. A second call must give the same bytes. */
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
    int32_t k, n_vector;
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

/* One key, at random or vector number `vector`, whose scale tells it from the others. */
static void put_key(rng *r, int32_t fmt, uint8_t *page, int64_t off, int32_t vector,
                    const uint8_t *base)
{
    uint8_t code[DIM];
    float v[DIM];
    if (fmt == KVS_INDEX_F32) {
        gen_f32(r, v, DIM, 1.0f);
        for (int32_t i = 0; i < DIM && vector >= 0; i++) {
            v[i] = (float)(base[i] % 16) * 0.125f * (float)(1 << vector);
        }
        index_key_put(fmt, page, off, v, 1.0f);
        return;
    }
    const float scale = ldexpf(1.0f, vector >= 0 ? vector - 4 : gen_pick(r, 3) - 9);
    if (vector < 0) {
        gen_e4m3(r, code, DIM);
    }
    index_key_put(fmt, page, off, vector >= 0 ? base : code, scale);
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
    e->exact = s->n_vector > 0;
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

/* Every key that a table names, then what the oracle says of those that some row attends. */
static void select_fill(check_case *k, index_select_args *a, int32_t n_vector)
{
    const index_score_args *in = &a->in;
    select_expect *e = k->expect;
    const int64_t n_col = (int64_t)in->table_width * PAGE;
    uint8_t base[DIM];
    gen_e4m3(&k->r, base, DIM);
    for (int32_t req = 0; req < in->n_req && !k->failed; req++) {
        for (int64_t l = 0; l < n_col; l++) {
            uint8_t *page = index_page(in, req, l);
            if (page != NULL) {
                put_key(&k->r, in->fmt, page, l % PAGE,
                        n_vector > 0 ? gen_pick(&k->r, n_vector) : -1, base);
            }
        }
    }
    index_expect_make(k, in, 0, INT32_MAX, n_col, &e->all);
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
    select_fill(k, a, 0);
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
                            .n_vector = 1 + index % 5,
                            .dcp = 2,
                            .interleave = 1,
                            .rank = index % 2};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, s.n_vector);
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
    select_fill(k, a, 0);
}

/* ---- comparison ---- */

/* Local index of a position on the case's rank; -1 where it is another's or none. */
static int64_t local_of(const index_select_args *a, int32_t pos)
{
    const orc_place p = orc_place_of(pos < 0 ? 0 : pos, a->dcp, a->interleave);
    return pos < 0 || p.owner != a->rank ? -1 : p.local;
}

/* The set of a row of few vectors, by the oracle's scores, which tell them apart. */
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
