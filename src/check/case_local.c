/* case_local.c - cases of localise: positions to slots. EXACT. */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

enum { PAGE = KVS_PAGE_TOKENS };

typedef struct local_expect {
    int32_t *slots;      /* [n_row, k] */
    int32_t *lane_count; /* [n_row, n_lane] */
    int32_t n_lane;
    uint64_t n_bad;
} local_expect;

static void localise_run(const kern_table *t, check_case *k, dev_queue *q)
{
    localise_args a = *(localise_args *)k->args;
    a.scratch_bytes = t->localise_scratch(&a, q);
    a.scratch = case_scratch(k, a.scratch_bytes);
    t->localise(&a, q);
}

/* Shape of the case: which N, I and rank. Case 0 is one rank with everything in place. */
static localise_args *localise_new(check_case *k, int32_t index, int32_t n_row, int32_t n_best)
{
    localise_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->dcp = 1 + index % 8;
    a->interleave = 1 << (index / 8 % 7);
    a->rank = gen_pick(r, a->dcp);
    a->n_row = n_row;
    a->k = n_best;
    a->id_stride = n_best + gen_pick(r, 4);
    a->n_req = n_row > 0 ? 1 + n_row / 2 : 0;
    a->table_width = 40;
    a->table_stride = a->table_width + gen_pick(r, 3);
    a->n_slot = 100000 * PAGE;
    a->slots_stride = n_best + gen_pick(r, 4);
    a->id = case_buf(k, "id", BUF_IN, EL_I32, n_row * a->id_stride, gen_pick(r, 3));
    a->table = case_buf(k, "table", BUF_IN, EL_I32, a->n_req * a->table_stride, 0);
    a->row_req = case_buf(k, "row_req", BUF_IN, EL_I32, n_row, 0);
    a->bound = case_buf(k, "bound", BUF_IN, EL_I32, n_row, 0);
    a->slots = case_buf(k, "slots", BUF_OUT, EL_I32, n_row * a->slots_stride, gen_pick(r, 3));
    const int32_t n_lane = orc_place_of(0, a->dcp, a->interleave).n_lane;
    a->lane_count = case_buf(k, "lane_count", BUF_OUT, EL_I32, (int64_t)n_row * n_lane, 0);
    case_mark_all(k, a->lane_count);
    a->n_bad_id = index % 5 == 4 ? NULL : case_counter(k, "n_bad_id");
    for (int64_t i = 0; i < a->n_req * a->table_stride && !k->failed; i++) {
        ((int32_t *)a->table)[i] = gen_pick(r, 100000);
    }
    for (int64_t row = 0; row < n_row && !k->failed; row++) {
        ((int32_t *)a->row_req)[row] = (int32_t)(row / 2);
        ((int32_t *)a->bound)[row] = PAGE * a->table_width * a->dcp - gen_pick(r, 100);
        case_mark(k, a->slots + row * a->slots_stride, 4 * (int64_t)n_best);
    }
    k->args = a;
    return a;
}

static void localise_finish(check_case *k)
{
    const localise_args *a = k->args;
    local_expect *e = case_alloc(k, 1, sizeof *e);
    e->n_lane = orc_place_of(0, a->dcp, a->interleave).n_lane;
    e->slots = case_alloc(k, (int64_t)a->n_row * a->k, sizeof *e->slots);
    e->lane_count = case_alloc(k, (int64_t)a->n_row * e->n_lane, sizeof *e->lane_count);
    int64_t *order = case_alloc(k, a->k, sizeof *order);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        e->n_bad +=
            orc_localise(a, row, e->slots + row * a->k, e->lane_count + row * e->n_lane, order);
    }
    k->expect = e;
}

/* k distinct ids below the bound: a run, or a sample, ascending or in any order. */
static void fill_ids(check_case *k, const localise_args *a, int64_t row, int shuffled)
{
    rng *r = &k->r;
    int32_t *id = (int32_t *)a->id + row * a->id_stride;
    const int32_t bound = a->bound[row];
    const int32_t step = bound / a->k > 1 && gen_pick(r, 3) != 0 ? bound / a->k : 1;
    int32_t at = gen_pick(r, step);
    for (int32_t i = 0; i < a->k; i++) {
        id[i] = at < bound ? at : -1;
        at += 1 + (step > 1 ? gen_pick(r, 2 * step - 2) : 0);
    }
    for (int32_t i = a->k - 1; shuffled && i > 0; i--) {
        const int32_t j = gen_pick(r, i + 1);
        const int32_t t = id[i];
        id[i] = id[j];
        id[j] = t;
    }
}

static const int32_t g_k[] = {256, 2048, 64, 1, 17, 700};

static void localise_random(check_case *k, int32_t index)
{
    localise_args *a = localise_new(k, index, 5, g_k[index % 6]);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        fill_ids(k, a, row, row % 2 != 0 || index % 3 == 0);
        for (int32_t i = 0; row == 3 && i < a->k; i += 1 + gen_pick(&k->r, 3)) {
            ((int32_t *)a->id)[row * a->id_stride + i] = -1;
        }
    }
    if (index % 3 == 1) {
        int32_t *count = case_buf(k, "count", BUF_IN, EL_I32, a->n_row, 0);
        for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
            count[row] = row == 0 ? a->k : gen_pick(&k->r, a->k + 1);
        }
        a->count = count;
    }
    localise_finish(k);
}

/* Repeated ids, ids outside everything, pages outside the table and the pool, rows of no request.
 */
static void localise_bad(check_case *k, int32_t index)
{
    localise_args *a = localise_new(k, index, 8, g_k[index % 6]);
    a->n_slot = 50000 * PAGE; /* half of the pages */
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        fill_ids(k, a, row, 1);
        int32_t *id = (int32_t *)a->id + row * a->id_stride;
        for (int32_t i = 0; i < a->k; i++) {
            const int32_t odd[] = {-2,           INT32_MIN, a->bound[row], INT32_MAX, id[0],
                                   id[a->k / 2], -1};
            if (gen_pick(&k->r, 4) == 0) {
                id[i] = odd[gen_pick(&k->r, 7)];
            }
        }
        if (row == 1) {
            ((int32_t *)a->bound)[row] = 0;
        } else if (row == 2) {
            ((int32_t *)a->bound)[row] =
                INT32_MAX; /* ids past the table are allowed by the bound */
            id[0] = INT32_MAX - 1;
            id[a->k - 1] = PAGE * a->table_width * a->dcp;
        } else if (row >= 6) {
            ((int32_t *)a->row_req)[row] = row == 6 ? a->n_req : -1;
        }
    }
    for (int32_t i = 0; i < a->table_stride && !k->failed; i++) {
        if (gen_pick(&k->r, 6) == 0) {
            ((int32_t *)a->table)[i] = (i & 1) != 0 ? -1 : INT32_MAX;
        }
    }
    a->table = case_fenced_table(k, a->table, a->n_req, a->table_stride, a->n_slot / PAGE);
    localise_finish(k);
}

/* Candidates with scores of which the cut keeps a part: many ties with the cut's score. */
static void localise_cut(check_case *k, int32_t index)
{
    localise_args *a = localise_new(k, index, 7, g_k[index % 6]);
    const int64_t n = a->n_row * a->id_stride;
    float *score = case_buf(k, "score", BUF_IN, EL_F32, n, gen_pick(&k->r, 3));
    float *cut_score = case_buf(k, "cut_score", BUF_IN, EL_F32, a->n_row, 0);
    int32_t *cut_id = case_buf(k, "cut_id", BUF_IN, EL_I32, a->n_row, 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        fill_ids(k, a, row, row % 2 != 0);
        for (int64_t i = 0; i < a->k; i++) {
            static const float few[] = {1.0f, 2.0f, 3.0f, 0.0f, -0.0f, NAN, INFINITY, -1.0f};
            score[row * a->id_stride + i] = few[gen_pick(&k->r, 8)];
        }
        static const float cuts[] = {2.0f, 0.0f, -0.0f, INFINITY, INFINITY, -1.0f, 1.5f};
        cut_score[row] = cuts[row];
        cut_id[row] = row == 4 ? -1 : a->bound[row] / 2;
    }
    a->score = score;
    a->cut_score = cut_score;
    a->cut_id = cut_id;
    localise_finish(k);
}

static void localise_empty(check_case *k, int32_t index)
{
    localise_args *a = localise_new(k, index, index % 2 != 0 ? 3 : 0, 16);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t i = 0; i < a->k; i++) {
            ((int32_t *)a->id)[row * a->id_stride + i] = -1;
        }
    }
    localise_finish(k);
}

static void localise_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const localise_args *a = k->args;
    const local_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t lane = 0; lane < e->n_lane; lane++) {
            cmp_i64(r, (coord){"lane_count", row, lane, -1}, a->lane_count[row * e->n_lane + lane],
                    e->lane_count[row * e->n_lane + lane]);
        }
        for (int64_t i = 0; i < a->k; i++) {
            cmp_i64(r, (coord){"slots", row, -1, i}, a->slots[row * a->slots_stride + i],
                    e->slots[row * a->k + i]);
        }
    }
    if (a->n_bad_id != NULL) {
        cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)case_counted(k, a->n_bad_id),
                (int64_t)e->n_bad);
    }
}

static int localise_filled(const kern_table *t)
{
    return t->localise != NULL && t->localise_scratch != NULL;
}

static int localise_same(const kern_table *a, const kern_table *b)
{
    return a->localise == b->localise;
}

static const check_class g_classes[] = {
    {"random",
     "owner(pos) = (pos / I) mod N; slots are lane-major, ascending, with a count per lane", 112,
     56, 0, localise_random, NULL, localise_compare},
    {"bad ids", "an id outside the table is masked and counted, never dereferenced", 56, 24, 0,
     localise_bad, NULL, localise_compare},
    {"cut",
     "a candidate is kept when its score is above the cut or equal with an id at or below it", 56,
     24, 0, localise_cut, NULL, localise_compare},
    {"empty", NULL, 16, 8, 0, localise_empty, NULL, localise_compare},
};

const check_op check_localise_op = {
    KERN_OP_localise,
    sizeof g_classes / sizeof *g_classes,
    g_classes,
    localise_filled,
    localise_same,
    localise_run,
    NULL,
};
