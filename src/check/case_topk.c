/* case_topk.c - cases of topk and topk_merge. EXACT: the order is total, so given the scores there
 * is one right answer. -0.0 and +0.0 are one score. */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

/* ---- rows of scores ---- */

typedef enum row_kind {
    ROW_RANDOM,
    ROW_TIES, /* a few hundred distinct values */
    ROW_EQUAL,
    ROW_RISING,
    ROW_FALLING,
    ROW_ONES_ZEROS, /* 100 ones, then zeros */
    ROW_ZEROS,      /* +0 and -0 */
    ROW_SPECIAL,    /* NaN, both infinities, both zeros, denormals among few values */
    ROW_NONE,       /* NaN and -inf only */
    ROW_FEW,        /* NaN and -inf but for a handful */
    ROW_NEGATIVE,
    ROW_SAW, /* long equal stretches with steps between */
    N_ROW_KIND
} row_kind;

static const float g_special[] = {0.0f,   -0.0f,   INFINITY, -INFINITY, NAN,  -NAN,
                                  1e-40f, -1e-40f, 3.4e38f,  -3.4e38f,  1.0f, -1.0f};
enum { N_SPECIAL = sizeof g_special / sizeof *g_special };

static float row_value(rng *r, row_kind kind, int64_t i, int64_t n)
{
    const float noise = (float)(rng_next(r) >> 40) * 0x1p-24f;
    switch (kind) {
    case ROW_RANDOM:
        return noise * 8.0f - 3.0f;
    case ROW_TIES:
        return floorf(noise * 300.0f) * 0.125f - 20.0f;
    case ROW_EQUAL:
        return 0.75f;
    case ROW_RISING:
        return (float)i * 0.001f - 7.0f;
    case ROW_FALLING:
        return (float)(n - i) * 0.001f - 7.0f;
    case ROW_ONES_ZEROS:
        return i < 100 ? 1.0f : 0.0f;
    case ROW_ZEROS:
        return noise < 0.5f ? 0.0f : -0.0f;
    case ROW_SPECIAL:
        return g_special[gen_pick(r, N_SPECIAL)];
    case ROW_NONE:
        return noise < 0.5f ? NAN : -INFINITY;
    case ROW_FEW:
        return noise < 0.99f ? (noise < 0.5f ? NAN : -INFINITY) : noise;
    case ROW_NEGATIVE:
        return -noise - 1e-3f;
    default:
        return (float)(i / 4096 % 7);
    }
}

static void row_fill(rng *r, float *x, int64_t n, row_kind kind)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = row_value(r, kind, i, n);
    }
}

/* ---- topk ---- */

typedef struct topk_expect {
    orc_cand *best;  /* [n_row, k] by id */
    int32_t *n_best; /* [n_row] */
    int32_t pieces;  /* columns per call in the streaming class; 0: one call */
} topk_expect;

static void topk_call(const kern_table *t, check_case *k, dev_queue *q, topk_args *a)
{
    a->scratch_bytes = t->topk_scratch(a, q);
    a->scratch = case_scratch(k, a->scratch_bytes);
    t->topk(a, q);
}

static void topk_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const topk_expect *e = k->expect;
    topk_args a = *(topk_args *)k->args;
    if (e->pieces == 0) {
        topk_call(t, k, q, &a);
        return;
    }
    /* rows of different lengths: a piece past the end of a row has no columns */
    int32_t *n_col = case_alloc(k, a.n_row, sizeof *n_col);
    const int32_t *whole = a.n_col;
    const int32_t id_base = a.id_base;
    int32_t done = 0;
    for (int32_t piece = 0; done < a.score_stride; piece++) {
        const int32_t size = e->pieces + piece % 3; /* uneven */
        for (int32_t row = 0; row < a.n_row; row++) {
            const int32_t left = whole[row] - done;
            n_col[row] = left < 0 ? 0 : left < size ? left : size;
        }
        a.n_col = n_col;
        a.score = ((const topk_args *)k->args)->score + done;
        a.id_base = id_base + done;
        topk_call(t, k, q, &a);
        dev_queue_sync(q); /* before n_col changes */
        done += size;
    }
}

static void topk_settle(check_case *k)
{
    const topk_args *a = k->args;
    for (int64_t row = 0; row < a->n_row; row++) {
        const int32_t n = a->list_count[row];
        if (n >= 0 && n < a->k) {
            poison_fill(a->list_id + row * a->k + n, (size_t)(a->k - n) * 4);
            poison_fill(a->list_score + row * a->k + n, (size_t)(a->k - n) * 4);
        }
    }
}

/* k best of each row, with an old list of n_old entries below id_base. */
static topk_args *topk_new(check_case *k, int32_t n_row, int32_t n_best, int32_t n_col,
                           int32_t n_old)
{
    topk_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->n_row = n_row;
    a->k = n_best;
    a->score_stride = n_col + gen_pick(r, 9);
    a->id_base = n_old > 0 ? n_old * 3 + 5 : 0;
    a->score = case_buf(k, "score", BUF_IN, EL_F32, n_row * a->score_stride, gen_pick(r, 8));
    a->n_col = case_buf(k, "n_col", BUF_IN, EL_I32, n_row, 0);
    a->list_id = case_buf(k, "list_id", BUF_INOUT, EL_I32, (int64_t)n_row * n_best, gen_pick(r, 4));
    a->list_score =
        case_buf(k, "list_score", BUF_INOUT, EL_F32, (int64_t)n_row * n_best, gen_pick(r, 4));
    a->list_count = case_buf(k, "list_count", BUF_INOUT, EL_I32, n_row, 0);
    case_mark_all(k, a->list_id);
    case_mark_all(k, a->list_score);
    case_mark_all(k, a->list_count);
    k->expect = case_alloc(k, 1, sizeof(topk_expect));
    k->args = a;
    for (int64_t row = 0; row < n_row && !k->failed; row++) {
        ((int32_t *)a->n_col)[row] = n_col;
        a->list_count[row] = 0;
    }
    return a;
}

static void topk_old_list(check_case *k, topk_args *a, int64_t row, int32_t n_old)
{
    const int32_t n = n_old < a->k ? n_old : a->k;
    for (int32_t i = 0; i < n; i++) {
        a->list_id[row * a->k + i] = 3 * i + gen_pick(&k->r, 3);
        a->list_score[row * a->k + i] = row_value(&k->r, ROW_TIES, i, n);
    }
    a->list_count[row] = n;
}

static void topk_finish(check_case *k)
{
    const topk_args *a = k->args;
    topk_expect *e = k->expect;
    e->best = case_alloc(k, (int64_t)a->n_row * a->k, sizeof *e->best);
    e->n_best = case_alloc(k, a->n_row, sizeof *e->n_best);
    orc_cand *all = case_alloc(k, a->k + a->score_stride, sizeof *all);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        int64_t n = 0;
        for (int32_t i = 0; i < a->list_count[row]; i++) {
            all[n++] = (orc_cand){a->list_score[row * a->k + i], a->list_id[row * a->k + i]};
        }
        for (int32_t i = 0; i < a->n_col[row]; i++) {
            all[n++] = (orc_cand){a->score[row * a->score_stride + i], a->id_base + i};
        }
        n = orc_select(all, n);
        n = n < a->k ? n : a->k;
        orc_sort_id(all, n);
        memcpy(e->best + row * a->k, all, (size_t)n * sizeof *all);
        e->n_best[row] = (int32_t)n;
    }
}

static void topk_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const topk_args *a = k->args;
    const topk_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        cmp_i64(r, (coord){"list_count", row, -1, -1}, a->list_count[row], e->n_best[row]);
        for (int64_t i = 0; i < e->n_best[row]; i++) {
            const orc_cand want = e->best[row * a->k + i];
            cmp_i64(r, (coord){"list_id", row, -1, i}, a->list_id[row * a->k + i], want.id);
            cmp_near(r, (coord){"list_score", row, -1, i}, a->list_score[row * a->k + i],
                     (double)want.score, 0.0);
        }
    }
}

static const int32_t g_k[] = {64, 1, 2048, 7, 512, 100, 1024, 2, 2049, 33};
enum { N_K = sizeof g_k / sizeof *g_k };

static void topk_random(check_case *k, int32_t index)
{
    static const int32_t cols[] = {1000, 1, 4096, 65, 8320, 31, 2049, 0, 5000, 640};
    const int32_t n_best = g_k[index % N_K];
    const int32_t n_col = cols[(index + index / N_K) % 10];
    topk_args *a = topk_new(k, (1 + index) % 5, n_best, n_col, 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        if (row > 0) {
            ((int32_t *)a->n_col)[row] = gen_pick(&k->r, n_col + 1);
        }
        row_fill(&k->r, (float *)a->score + row * a->score_stride, n_col, ROW_RANDOM);
    }
    topk_finish(k);
}

/* Every kind of row, in lengths around k. */
static void topk_patterns(check_case *k, int32_t index)
{
    const int32_t n_best = g_k[index % N_K];
    const int32_t n_col = index % 3 == 0   ? 8320
                          : index % 3 == 1 ? n_best + gen_pick(&k->r, 5) - 2
                                           : 3 * n_best + 17;
    topk_args *a = topk_new(k, N_ROW_KIND, n_best, n_col > 0 ? n_col : 1, 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        row_fill(&k->r, (float *)a->score + row * a->score_stride, a->n_col[row], (row_kind)row);
    }
    topk_finish(k);
}

/* A running list, longer or shorter than k, full or not. */
static void topk_list(check_case *k, int32_t index)
{
    const int32_t n_best = g_k[index % N_K];
    const int32_t n_old = index % 3 == 0 ? n_best : index % 3 == 1 ? n_best / 2 : 1;
    topk_args *a = topk_new(k, 6, n_best, 700 + 400 * (index % 4), n_old);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        topk_old_list(k, a, row, row == 1 ? 0 : n_old);
        row_fill(&k->r, (float *)a->score + row * a->score_stride, a->n_col[row],
                 row == 5       ? ROW_NONE
                 : row % 2 != 0 ? ROW_SPECIAL
                                : ROW_TIES);
    }
    topk_finish(k);
}

/* The same rows in pieces: the oracle knows only the whole. */
static void topk_stream(check_case *k, int32_t index)
{
    const int32_t n_best = g_k[index % N_K];
    topk_args *a = topk_new(k, N_ROW_KIND, n_best, 4000, 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        row_fill(&k->r, (float *)a->score + row * a->score_stride, a->n_col[row], (row_kind)row);
        ((int32_t *)a->n_col)[row] = row % 3 == 2 ? 1500 : 4000;
    }
    static const int32_t pieces[] = {1000, 64, 333, 3999};
    ((topk_expect *)k->expect)->pieces = pieces[index % 4];
    topk_finish(k);
}

static void topk_long(check_case *k, int32_t index)
{
    static const int32_t cols[] = {131072, 300001, 4 << 20, 262144};
    const int32_t n_col = cols[index % 4];
    const row_kind kind = (row_kind)(index % N_ROW_KIND);
    topk_args *a = topk_new(k, n_col > 1000000 ? 1 : 2, index == 1 ? 32768 : 2048, n_col, 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        row_fill(&k->r, (float *)a->score + row * a->score_stride, n_col,
                 row == 0 ? kind : ROW_RANDOM);
    }
    topk_finish(k);
}

static int topk_filled(const kern_table *t)
{
    return t->topk != NULL && t->topk_scratch != NULL;
}

static int topk_same(const kern_table *a, const kern_table *b)
{
    return a->topk == b->topk;
}

static const check_class g_topk[] = {
    {"random", "selection: larger score first, then lower id", 40, 20, 0, topk_random, NULL,
     topk_compare},
    {"patterns", "ties go to the lower id; -0.0 equals +0.0; NaN and -inf are never selected", 30,
     10, 0, topk_patterns, NULL, topk_compare},
    {"list", "a running list enters with its own ids", 20, 10, 0, topk_list, NULL, topk_compare},
    {"stream", "a row fed in pieces gives the list of the whole row", 20, 8, CLASS_STEPS, topk_stream, NULL,
     topk_compare},
    {"long", NULL, 12, 1, 0, topk_long, NULL, topk_compare},
};

const check_op check_topk_op = {
    KERN_OP_topk, sizeof g_topk / sizeof *g_topk, g_topk, topk_filled, topk_same, topk_run,
    topk_settle,
};

/* ---- topk_merge ---- */

typedef struct cut_expect {
    orc_cand cut;
    int32_t n_total;
    int32_t *all; /* [k] */
} cut_expect;

static void topk_merge_run(const kern_table *t, check_case *k, dev_queue *q)
{
    topk_merge_args a = *(topk_merge_args *)k->args;
    a.scratch_bytes = t->topk_merge_scratch(&a, q);
    a.scratch = case_scratch(k, a.scratch_bytes);
    t->topk_merge(&a, q);
}

/* Candidates of one row: ids ascending inside each list and distinct over all. */
static void cand_fill(check_case *k, const topk_merge_args *a, int64_t row, row_kind kind,
                      int32_t fill)
{
    rng *r = &k->r;
    int32_t n[8] = {0};
    int32_t room = 0;
    for (int32_t list = 0; list < a->n_list; list++) {
        const int32_t most = fill == 0 ? 0 : fill == 1 ? 1 + gen_pick(r, a->k) : a->k;
        n[list] = fill == 3 && list % 2 != 0 ? 0 : most;
        ((int32_t *)a->cand_count[list])[row] = 0;
        room += n[list];
    }
    for (int32_t id = gen_pick(r, 5); room > 0; id += 1 + gen_pick(r, 3)) {
        const int32_t list = gen_pick(r, a->n_list);
        int32_t *count = (int32_t *)a->cand_count[list] + row;
        if (*count == n[list]) {
            continue;
        }
        float s = row_value(r, kind, id, 10000);
        s = isnan(s) || s == -INFINITY ? 0.5f : s; /* lists come from topk */
        ((int32_t *)a->cand_id[list])[row * a->cand_stride + *count] = id;
        ((float *)a->cand_score[list])[row * a->cand_stride + *count] = s;
        ++*count;
        room--;
    }
}

static topk_merge_args *topk_merge_new(check_case *k, int32_t n_row, int32_t n_list, int32_t n_best)
{
    static const char *const names[8] = {"list 0", "list 1", "list 2", "list 3",
                                         "list 4", "list 5", "list 6", "list 7"};
    topk_merge_args *a = case_alloc(k, 1, sizeof *a);
    a->n_row = n_row;
    a->n_list = n_list;
    a->k = n_best;
    a->cand_stride = n_best + gen_pick(&k->r, 5);
    const float **score = case_alloc(k, 8, sizeof *score);
    const int32_t **id = case_alloc(k, 8, sizeof *id);
    const int32_t **count = case_alloc(k, 8, sizeof *count);
    for (int32_t i = 0; i < n_list; i++) {
        score[i] =
            case_buf(k, names[i], BUF_IN, EL_F32, n_row * a->cand_stride, gen_pick(&k->r, 3));
        id[i] = case_buf(k, names[i], BUF_IN, EL_I32, n_row * a->cand_stride, gen_pick(&k->r, 3));
        count[i] = case_buf(k, names[i], BUF_IN, EL_I32, n_row, 0);
    }
    a->cand_score = score;
    a->cand_id = id;
    a->cand_count = count;
    a->cut_score = case_buf(k, "cut_score", BUF_OUT, EL_F32, n_row, 0);
    a->cut_id = case_buf(k, "cut_id", BUF_OUT, EL_I32, n_row, 0);
    a->n_total = case_buf(k, "n_total", BUF_OUT, EL_I32, n_row, 0);
    case_mark_all(k, a->cut_score);
    case_mark_all(k, a->cut_id);
    case_mark_all(k, a->n_total);
    k->args = a;
    return a;
}

static void topk_merge_finish(check_case *k)
{
    const topk_merge_args *a = k->args;
    cut_expect *e = case_alloc(k, a->n_row, sizeof *e);
    orc_cand *all = case_alloc(k, a->n_list * a->cand_stride, sizeof *all);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        int64_t n = 0;
        for (int32_t list = 0; list < a->n_list; list++) {
            for (int32_t i = 0; i < a->cand_count[list][row]; i++) {
                all[n++] = (orc_cand){a->cand_score[list][row * a->cand_stride + i],
                                      a->cand_id[list][row * a->cand_stride + i]};
            }
        }
        n = orc_select(all, n);
        n = n < a->k ? n : a->k;
        e[row].n_total = (int32_t)n;
        e[row].cut = n > 0 ? all[n - 1] : (orc_cand){INFINITY, -1};
        orc_sort_id(all, n);
        e[row].all = case_alloc(k, a->k, sizeof(int32_t));
        for (int64_t i = 0; i < a->k && !k->failed; i++) {
            e[row].all[i] = i < n ? all[i].id : -1;
        }
    }
    k->expect = e;
}

static void topk_merge_build(check_case *k, int32_t index)
{
    static const row_kind kinds[] = {ROW_RANDOM,  ROW_TIES,   ROW_EQUAL,   ROW_ZEROS,
                                     ROW_SPECIAL, ROW_RISING, ROW_NEGATIVE};
    const int patterns = strcmp(k->cls->name, "patterns") == 0;
    const int32_t n_list = 1 + (index + 7) % 8;
    const int32_t n_best = g_k[index % N_K];
    topk_merge_args *a = topk_merge_new(k, patterns ? 7 : index % 11 == 10 ? 0 : 3, n_list, n_best);
    if (index % 2 == 0) {
        a->all_id =
            case_buf(k, "all_id", BUF_OUT, EL_I32, (int64_t)a->n_row * n_best, gen_pick(&k->r, 3));
        case_mark_all(k, a->all_id);
    }
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        if (patterns) {
            cand_fill(k, a, row, kinds[row], (int32_t)((row + index) % 4));
        } else {
            cand_fill(k, a, row, ROW_RANDOM, index == 0 ? 2 : 1 + index % 3);
        }
    }
    topk_merge_finish(k);
}

static void topk_merge_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const topk_merge_args *a = k->args;
    const cut_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        cmp_i64(r, (coord){"n_total", row, -1, -1}, a->n_total[row], e[row].n_total);
        cmp_i64(r, (coord){"cut_id", row, -1, -1}, a->cut_id[row], e[row].cut.id);
        cmp_near(r, (coord){"cut_score", row, -1, -1}, a->cut_score[row], (double)e[row].cut.score,
                 0.0);
        for (int64_t i = 0; i < a->k && a->all_id != NULL; i++) {
            cmp_i64(r, (coord){"all_id", row, -1, i}, a->all_id[row * a->k + i], e[row].all[i]);
        }
    }
}

static int topk_merge_filled(const kern_table *t)
{
    return t->topk_merge != NULL && t->topk_merge_scratch != NULL;
}

static int topk_merge_same(const kern_table *a, const kern_table *b)
{
    return a->topk_merge == b->topk_merge;
}

static const check_class g_topk_merge[] = {
    {"random", "the set is what lies at or above the cut (score, then lower id)", 40, 20, 0,
     topk_merge_build, NULL, topk_merge_compare},
    {"patterns", "with no candidate the cut is (+inf, -1); ties go to the lower id", 40, 20, 0,
     topk_merge_build, NULL, topk_merge_compare},
};

const check_op check_topk_merge_op = {
    KERN_OP_topk_merge,
    sizeof g_topk_merge / sizeof *g_topk_merge,
    g_topk_merge,
    topk_merge_filled,
    topk_merge_same,
    topk_merge_run,
    NULL,
};
