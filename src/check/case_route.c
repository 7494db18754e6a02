/* case_route.c - cases of the router against a full sort in double.
 *
 * EXACT: which experts, in ascending order. Two choices that differ by less than f32 resolves would make the
 * set uncertain, so a row is drawn again until its choices and group scores are equal (from equal inputs) or
 * well apart; equal ones are what the tie rule is for and are planted often. Weights: the score's exp is 2
 * ulp and three roundings, its sum over n experts n / 16 + 6 more; four roundings follow.
 */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

enum { MAX_EXPERT = 512 };

static const double u = 0x1p-24;
static const double apart = 1e-4;

typedef struct expert {
    double s, choice;
    int32_t id;
    int32_t kept; /* its group is */
} expert;

typedef struct group_score {
    double score;
    int32_t id;
} group_score;

static void route_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->route(k->args, q);
}

/* Larger first, then the lower id; returns the smallest gap between unequal neighbours. */
static double sort_groups(group_score *g, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        for (int32_t j = i; j > 0 && g[j].score > g[j - 1].score; j--) {
            const group_score t = g[j];
            g[j] = g[j - 1];
            g[j - 1] = t;
        }
    }
    double gap = INFINITY;
    for (int32_t i = 1; i < n; i++) {
        const double d = g[i - 1].score - g[i].score;
        gap = d > 0.0 && d < gap ? d : gap;
    }
    return gap;
}

static double sort_experts(expert *e, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        for (int32_t j = i; j > 0 && e[j].choice > e[j - 1].choice; j--) {
            const expert t = e[j];
            e[j] = e[j - 1];
            e[j - 1] = t;
        }
    }
    double gap = INFINITY;
    for (int32_t i = 1; i < n; i++) {
        const double d = e[i - 1].choice - e[i].choice;
        gap = d > 0.0 && d < gap ? d : gap;
    }
    return gap;
}

static void scores(const route_args *a, const float *logit, expert *e)
{
    double top = -INFINITY;
    double sum = 0.0;
    for (int32_t i = 0; i < a->n_expert; i++) {
        top = fmax(top, (double)logit[i]);
    }
    for (int32_t i = 0; i < a->n_expert; i++) {
        const double l = (double)logit[i];
        e[i].s = a->kind == ROUTE_SIGMOID ? 1.0 / (1.0 + exp(-l)) : exp(l - top);
        sum += e[i].s;
    }
    for (int32_t i = 0; i < a->n_expert; i++) {
        e[i].s = a->kind == ROUTE_SIGMOID ? e[i].s : e[i].s / sum;
        e[i].choice = e[i].s + (a->bias != NULL ? (double)a->bias[i] : 0.0);
        e[i].id = i;
        e[i].kept = 1;
    }
}

/* Sorts the experts of a row, those of kept groups first; returns the smallest gap that decided anything. */
static double order(const route_args *a, const float *logit, expert *e)
{
    scores(a, logit, e);
    double gap = INFINITY;
    const int32_t size = a->n_expert / a->n_group;
    if (a->n_group > 1) {
        group_score g[MAX_EXPERT];
        expert inside[MAX_EXPERT];
        for (int32_t i = 0; i < a->n_group; i++) {
            memcpy(inside, e + i * size, (size_t)size * sizeof *inside);
            sort_experts(inside, size);
            g[i].id = i;
            g[i].score = inside[0].choice;
            g[i].score += !a->group_max && size > 1 ? inside[1].choice : 0.0;
        }
        gap = sort_groups(g, a->n_group);
        for (int32_t i = a->topk_group; i < a->n_group; i++) {
            for (int32_t j = 0; j < size; j++) {
                e[g[i].id * size + j].kept = 0;
            }
        }
    }
    /* kept ones first, in the order of their ids */
    expert sorted[MAX_EXPERT];
    int32_t n = 0;
    for (int32_t kept = 1; kept >= 0; kept--) {
        for (int32_t i = 0; i < a->n_expert; i++) {
            if (e[i].kept == kept) {
                sorted[n++] = e[i];
            }
        }
    }
    int32_t n_kept = 0;
    while (n_kept < n && sorted[n_kept].kept) {
        n_kept++;
    }
    gap = fmin(gap, sort_experts(sorted, n_kept));
    memcpy(e, sorted, (size_t)n * sizeof *e);
    return gap;
}

static void route_row(check_case *k, const route_args *a, float *logit, int ties)
{
    expert e[MAX_EXPERT];
    for (int attempt = 0; attempt < 1000; attempt++) {
        gen_f32(&k->r, logit, a->n_expert, 2.0f);
        for (int32_t i = 0; i < a->n_expert; i++) {
            if (ties) {
                logit[i] = 0.5f * (float)(gen_pick(&k->r, 7) - 3);
            }
        }
        /* many experts leave no room between choices: only equal ones then */
        if (order(a, logit, e) > apart / a->n_expert) {
            return;
        }
    }
    memset(logit, 0, (size_t)a->n_expert * sizeof *logit);
}

static void route_build(check_case *k, int32_t index)
{
    static const struct {
        int32_t n_expert, n_active, n_group, topk_group;
    } shape[] = {{8, 2, 1, 1},  {64, 6, 1, 1},  {16, 4, 4, 2}, {1, 1, 1, 1},  {5, 5, 1, 1},
                 {32, 8, 8, 4}, {24, 3, 24, 4}, {12, 6, 4, 1}, {40, 7, 5, 2}, {9, 1, 3, 3}};
    route_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    const int32_t s = index % 10;
    const int ties = strcmp(k->cls->name, "ties") == 0;
    a->n_row = index % 11 == 10 ? 0 : 1 + gen_pick(r, index % 4 == 1 ? 60 : 6);
    a->n_expert = shape[s].n_expert;
    a->n_active = shape[s].n_active;
    a->n_group = shape[s].n_group;
    a->topk_group = shape[s].topk_group;
    a->kind = index % 3 == 2 ? ROUTE_SOFTMAX : ROUTE_SIGMOID;
    a->group_max = index / 10 % 2;
    a->norm_topk = index / 2 % 2;
    a->scale = index % 4 == 0 ? 1.0f : 2.5f;
    float *logit =
        case_buf(k, "logit", BUF_IN, EL_F32, (int64_t)a->n_row * a->n_expert, gen_pick(r, 3));
    if (index % 3 != 1) {
        float *bias = case_buf(k, "bias", BUF_IN, EL_F32, a->n_expert, gen_pick(r, 3));
        for (int32_t i = 0; i < a->n_expert && !k->failed; i++) {
            bias[i] = ties ? 0.25f * (float)(gen_pick(r, 3) - 1) : 0.0f;
        }
        if (!ties) {
            gen_f32(r, bias, a->n_expert, 0.3f);
        }
        a->bias = bias;
    }
    a->logit = logit;
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        route_row(k, a, logit + row * a->n_expert, ties);
        if (strcmp(k->cls->name, "nan") == 0 && row % 2 == 0) {
            for (int32_t i = gen_pick(r, 3); i < a->n_expert; i += 1 + gen_pick(r, 4)) {
                logit[row * a->n_expert + i] = NAN;
            }
        }
    }
    const int64_t n = (int64_t)a->n_row * a->n_active;
    a->id = case_buf(k, "id", BUF_OUT, EL_I32, n, 0);
    a->weight = case_buf(k, "weight", BUF_OUT, EL_F32, n, 0);
    case_mark_all(k, a->id);
    case_mark_all(k, a->weight);
    k->args = a;
}

static int has_nan(const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (isnan(x[i])) {
            return 1;
        }
    }
    return 0;
}

static void compare_nan_row(const route_args *a, int64_t row, check_result *r)
{
    int32_t last = -1;
    for (int64_t i = 0; i < a->n_active; i++) {
        const int32_t id = a->id[row * a->n_active + i];
        if (id <= last || id >= a->n_expert) {
            cmp_fail(r, "row %lld: id %d after %d of %d experts", (long long)row, id, last,
                     a->n_expert);
        }
        last = id;
        cmp_near(r, (coord){"weight", row, -1, i}, a->weight[row * a->n_active + i], NAN, 0.0);
    }
}

static void compare_row(const route_args *a, int64_t row, check_result *r)
{
    expert e[MAX_EXPERT];
    const float *logit = a->logit + row * a->n_expert;
    order(a, logit, e);
    double weight[MAX_EXPERT];
    double sum = 0.0;
    for (int32_t i = 0; i < a->n_expert; i++) {
        weight[i] = -1.0;
    }
    for (int32_t i = 0; i < a->n_active; i++) {
        weight[e[i].id] = e[i].s;
        sum += e[i].s;
    }
    int64_t at = row * a->n_active;
    for (int32_t i = 0; i < a->n_expert; i++) {
        if (weight[i] < 0.0) {
            continue;
        }
        const double want =
            (a->norm_topk ? weight[i] / (sum + 1e-20) : weight[i]) * (double)a->scale;
        const double tol = (a->n_expert / 16.0 + a->n_active + 24.0) * u * want + 0x1p-120;
        cmp_i64(r, (coord){"id", row, -1, i}, a->id[at], i);
        cmp_near(r, (coord){"weight", row, -1, i}, a->weight[at], want, tol);
        at++;
    }
}

static void route_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const route_args *a = k->args;
    for (int64_t row = 0; row < a->n_row; row++) {
        if (has_nan(a->logit + row * a->n_expert, a->n_expert)) {
            compare_nan_row(a, row, r);
        } else {
            compare_row(a, row, r);
        }
    }
}

static int route_filled(const kern_table *t)
{
    return t->route != NULL;
}

static int route_same(const kern_table *a, const kern_table *b)
{
    return a->route == b->route;
}

static const check_class g_route[] = {
    {"random",
     "route: the bias selects and does not weight; groups that are not kept take no part; weights "
     "are divided by their sum + 1e-20, then scaled",
     60, 30, 1, route_build, NULL, route_compare},
    {"ties", "route: of equal choices the lower index, in groups and in experts", 60, 30, 1,
     route_build, NULL, route_compare},
    {"nan", "route: a NaN logit makes the row's weights NaN, ids stay valid and distinct", 30, 15,
     1, route_build, NULL, route_compare},
};

const check_op check_route_op = {
    KERN_OP_route, sizeof g_route / sizeof *g_route, g_route, route_filled, route_same, route_run,
    NULL,
};
