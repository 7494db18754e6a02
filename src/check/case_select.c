/* case_select.c - cases of scores and selection together.
 *
 * Where the scores of a row's keys differ by less than a variant's rounding, the oracle cannot say which of
 * them are in. So two kinds of case: random keys, in which every member must have the oracle's score within
 * the bound of index_score and no key left out may lie above the worst member by more than twice that
 * bound; and keys that are few vectors over and over, whose scores are equal bits or far apart, so that the
 * set, ties by position included, is known exactly. A second call must give the same bytes. */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_INDEX_DIM };

typedef struct select_expect {
    orc_score *score; /* [n_row, n_col] */
    uint8_t *state;   /* [n_row, n_col] 1: a score */
    int64_t n_col;
    uint64_t n_bad, n_key;
    int32_t exact; /* equal scores are equal bits, others far apart */
    int32_t *id_again;
    float *score_again;
    int32_t *count_again;
} select_expect;

typedef struct select_shape {
    int32_t fmt, n_head, n_req, rows_per_req, width, k, n_vector;
    int32_t dcp, interleave, rank;
    const int32_t *lens; /* kv_len by row, cycled */
    int32_t n_len;
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
    if (fmt == KVS_INDEX_F32) {
        float v[DIM];
        gen_f32(r, v, DIM, 1.0f);
        for (int32_t i = 0; i < DIM && vector >= 0; i++) {
            v[i] = (float)(base[i] % 16) * 0.125f * (float)(1 << vector);
        }
        memcpy(page + off * (int64_t)sizeof v, v, sizeof v);
        return;
    }
    float scale = ldexpf(1.0f, vector >= 0 ? vector - 4 : gen_pick(r, 3) - 9);
    if (vector >= 0) {
        memcpy(page + off * DIM, base, DIM);
    } else {
        gen_e4m3(r, page + off * DIM, DIM);
    }
    memcpy(page + PAGE * DIM + 4 * off, &scale, sizeof scale);
}

static index_select_args *select_new(check_case *k, const select_shape *s)
{
    index_select_args *a = case_alloc(k, 1, sizeof *a);
    index_score_args *in = &a->in;
    rng *r = &k->r;
    in->fmt = s->fmt;
    in->n_head = s->n_head;
    in->n_row = s->n_req * s->rows_per_req;
    in->n_req = s->n_req;
    in->table_width = s->width;
    in->table_stride = s->width + gen_pick(r, 3);
    in->n_page = (int64_t)s->n_req * s->width + 2;
    const int32_t unit = 4 * case_step(k, 4);
    in->page_stride = orc_index_page_bytes(s->fmt) + unit * gen_pick(r, 9);
    a->k = s->k;
    a->dcp = s->dcp;
    a->interleave = s->interleave;
    a->rank = s->rank;
    const int64_t n_q = (int64_t)in->n_row * s->n_head;
    const check_elem el = s->fmt == KVS_INDEX_F32 ? EL_F32 : EL_U8;
    void *q = case_buf(k, "q", BUF_IN, el, n_q * DIM, 0);
    float *w = case_buf(k, "w", BUF_IN, EL_F32, n_q, gen_pick(r, 3));
    in->keys = case_buf(k, "keys", BUF_IN, EL_U8, in->n_page * in->page_stride, 0);
    int32_t *table = case_buf(k, "table", BUF_IN, EL_I32, in->n_req * in->table_stride, 0);
    int32_t *row_req = case_buf(k, "row_req", BUF_IN, EL_I32, in->n_row, 0);
    int32_t *kv_len = case_buf(k, "kv_len", BUF_IN, EL_I32, in->n_row, 0);
    const int64_t n_list = (int64_t)in->n_row * s->k;
    select_expect *e = case_alloc(k, 1, sizeof *e);
    a->list_id = case_buf(k, "list_id", BUF_OUT, EL_I32, n_list, gen_pick(r, 4));
    a->list_score = case_buf(k, "list_score", BUF_OUT, EL_F32, n_list, gen_pick(r, 4));
    a->list_count = case_buf(k, "list_count", BUF_OUT, EL_I32, in->n_row, 0);
    e->id_again = case_buf(k, "id again", BUF_OUT, EL_I32, n_list, 0);
    e->score_again = case_buf(k, "score again", BUF_OUT, EL_F32, n_list, 0);
    e->count_again = case_buf(k, "count again", BUF_OUT, EL_I32, in->n_row, 0);
    in->n_bad_id = case_counter(k, "n_bad_id");
    in->n_key = case_counter(k, "n_key");
    int32_t *page = case_alloc(k, in->n_page, sizeof *page);
    if (k->failed) {
        return a;
    }
    if (s->fmt == KVS_INDEX_F32) {
        gen_f32(r, q, n_q * DIM, 1.0f);
    } else {
        gen_e4m3(r, q, n_q * DIM);
    }
    gen_f32(r, w, n_q, 0.05f);
    gen_permutation(r, page, (int32_t)in->n_page);
    for (int32_t req = 0; req < s->n_req; req++) {
        for (int32_t i = 0; i < s->width; i++) {
            table[req * in->table_stride + i] = page[req * s->width + i];
        }
    }
    for (int32_t row = 0; row < in->n_row; row++) {
        row_req[row] = row / s->rows_per_req;
        kv_len[row] = s->lens[row % s->n_len];
    }
    case_mark_all(k, a->list_id);
    case_mark_all(k, a->list_score);
    case_mark_all(k, a->list_count);
    case_mark_all(k, e->id_again);
    case_mark_all(k, e->score_again);
    case_mark_all(k, e->count_again);
    in->q = q;
    in->w = w;
    in->table = table;
    in->row_req = row_req;
    in->kv_len = kv_len;
    e->exact = s->n_vector > 0;
    k->args = a;
    k->expect = e;
    return a;
}

/* Keys that some row attends, then what the oracle says of them. */
static void select_fill(check_case *k, index_select_args *a, int32_t n_vector)
{
    const index_score_args *in = &a->in;
    select_expect *e = k->expect;
    uint8_t base[DIM];
    gen_e4m3(&k->r, base, DIM);
    e->n_col = (int64_t)in->table_width * PAGE;
    e->score = case_alloc(k, in->n_row * e->n_col, sizeof *e->score);
    e->state = case_alloc(k, in->n_row * e->n_col, 1);
    for (int32_t req = 0; req < in->n_req && !k->failed; req++) {
        for (int64_t l = 0; l < e->n_col; l++) {
            const int64_t slot =
                orc_slot(in->table + req * in->table_stride, in->table_width, in->n_page * PAGE, l);
            if (slot >= 0) {
                put_key(&k->r, in->fmt, (uint8_t *)in->keys + slot / PAGE * in->page_stride,
                        slot % PAGE, n_vector > 0 ? gen_pick(&k->r, n_vector) : -1, base);
            }
        }
    }
    for (int64_t row = 0; row < in->n_row && !k->failed; row++) {
        const int32_t req = in->row_req[row];
        for (int64_t l = 0; l < in->kv_len[row]; l++) {
            const int64_t slot = req < 0 || req >= in->n_req
                                     ? -1
                                     : orc_slot(in->table + req * in->table_stride, in->table_width,
                                                in->n_page * PAGE, l);
            if (slot < 0) {
                e->n_bad++;
                continue;
            }
            e->n_key++;
            e->state[row * e->n_col + l] = 1;
            e->score[row * e->n_col + l] = orc_index_score(in, row, slot);
        }
    }
}

static const int32_t g_heads[] = {64, 8, 32, 4, 16, 33, 1, 48};

static void select_random(check_case *k, int32_t index)
{
    static const int32_t lens[] = {640, 64, 63, 65, 0, 500, 1, 577};
    const select_shape s = {.fmt = index % 4 == 3 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                            .n_head = g_heads[index % 8],
                            .n_req = 1 + index % 3,
                            .rows_per_req = 1 + index / 2 % 5,
                            .width = 10,
                            .k = index % 3 == 0   ? 100
                                 : index % 3 == 1 ? 1
                                                  : 700,
                            .dcp = 1 << index % 4,
                            .interleave = index % 2 != 0 ? 64 : 1,
                            .rank = index % 4 != 0 ? 1 : 0,
                            .lens = lens,
                            .n_len = 8};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, 0);
}

static void select_ties(check_case *k, int32_t index)
{
    static const int32_t lens[] = {1280, 1000, 64, 1279, 0, 700};
    const select_shape s = {.fmt = index % 4 == 3 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                            .n_head = g_heads[index % 8],
                            .n_req = 2,
                            .rows_per_req = 1 + index % 4,
                            .width = 20,
                            .k = index % 2 == 0 ? 300 : 64,
                            .n_vector = 1 + index % 5,
                            .dcp = 2,
                            .interleave = 1,
                            .rank = index % 2,
                            .lens = lens,
                            .n_len = 6};
    index_select_args *a = select_new(k, &s);
    select_fill(k, a, s.n_vector);
}

static void select_bad(check_case *k, int32_t index)
{
    static const int32_t lens[] = {300, 0, 70, 256, -5, 257};
    const select_shape s = {.fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8,
                            .n_head = g_heads[index % 8],
                            .n_req = 3,
                            .rows_per_req = 2,
                            .width = 4,
                            .k = 90,
                            .dcp = 1,
                            .interleave = 1,
                            .rank = 0,
                            .lens = lens,
                            .n_len = 6};
    index_select_args *a = select_new(k, &s);
    if (!k->failed) {
        int32_t *table = (int32_t *)a->in.table;
        table[1] = -1;
        table[2] = (int32_t)a->in.n_page;
        table[a->in.table_stride] = INT32_MAX;
        table[a->in.table_stride + 2] = INT32_MIN;
        a->in.table = case_fenced_table(k, table, a->in.n_req, a->in.table_stride, a->in.n_page);
        ((int32_t *)a->in.row_req)[5] = index % 2 != 0 ? 3 : -1;
    }
    select_fill(k, a, 0);
}

/* ---- comparison ---- */

static double bound_of(const index_select_args *a, const orc_score *o, const check_variant *v)
{
    const double u = 0x1p-24;
    return fmax(sqrt(128.0), v->dot_u) * u * o->dot_terms +
           (sqrt((double)a->in.n_head) + 2.0) * u * o->sum_terms + 2.0 * u * fabs(o->value) +
           0x1p-149;
}

/* Local index of a position on the case's rank; -1 where it is another's or none. */
static int64_t local_of(const index_select_args *a, int32_t pos)
{
    const orc_place p = orc_place_of(pos < 0 ? 0 : pos, a->dcp, a->interleave);
    return pos < 0 || p.owner != a->rank ? -1 : p.local;
}

/* The set of a row of few vectors, by the oracle's scores, which tell them apart. */
static void compare_exact(check_case *k, const index_select_args *a, int64_t row, check_result *r)
{
    const select_expect *e = k->expect;
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
    const select_expect *e = k->expect;
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
                 bound_of(a, o, v));
        worst = got < worst ? got : worst;
        in[l] = 1;
        last = l;
    }
    for (int64_t l = 0; l < e->n_col && want == a->k && !k->failed; l++) {
        const orc_score *o = &e->score[row * e->n_col + l];
        if (e->state[row * e->n_col + l] && !in[l]) {
            cmp_i64(r, (coord){"left out, yet better than a member", row, -1, l},
                    o->value - bound_of(a, o, v) > worst, 0);
        }
    }
    for (int64_t i = want; i < a->k; i++) {
        cmp_i64(r, (coord){"id behind", row, -1, i}, a->list_id[row * a->k + i], -1);
        cmp_near(r, (coord){"score behind", row, -1, i}, a->list_score[row * a->k + i], 0.0, 0.0);
    }
    if (e->exact) {
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
    cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)case_counted(k, a->in.n_bad_id),
            (int64_t)e->n_bad);
    cmp_i64(r, (coord){"n_key", 0, -1, -1}, (int64_t)case_counted(k, a->in.n_key),
            (int64_t)e->n_key);
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
