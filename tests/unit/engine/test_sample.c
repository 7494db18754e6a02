/* Sampling against a slow model: sort everything, filter, walk. */
#include <math.h>

#include "base/rng.h"
#include "engine/sample.h"
#include "unit/unit.h"

enum { V = 37 };

static sample_set plain(double temp)
{
    return (sample_set){.temp = temp, .top_p = 1.0, .repeat_penalty = 1.0};
}

static int32_t pick(int32_t vocab, sample_set set, const float *l, const uint64_t *seen, double u)
{
    sampler *s = NULL;
    int32_t t = -1;
    kvs_error err = {0};
    assert_int_equal(sample_new(&s, vocab, &err), KVS_OK);
    if (sample_token(s, &set, l, seen, u, &t, &err) < 0) {
        fail_msg("%s", err.text);
    }
    sample_free(s);
    assert_in_range(t, 0, vocab - 1);
    return t;
}

/* ---- the model -------------------------------------------------------------------------------- */

typedef struct item {
    double l;
    int32_t id;
} item;

static int by_logit(const void *a, const void *b)
{
    const item *x = a, *y = b;
    return x->l != y->l ? (x->l < y->l ? 1 : -1) : x->id - y->id;
}

/* Probabilities after all filters, by definition. */
static void model(const sample_set *set, const float *l, const uint64_t *seen, double p[V])
{
    item it[V];
    for (int32_t i = 0; i < V; i++) {
        double x = (double)l[i];
        if (seen != NULL && (seen[0] >> i & 1) != 0) {
            x = x > 0 ? x / set->repeat_penalty : x * set->repeat_penalty;
        }
        it[i] = (item){x / set->temp, i};
    }
    qsort(it, V, sizeof *it, by_logit);
    int32_t n = set->top_k > 0 && set->top_k < V ? set->top_k : V;
    double z = 0;
    for (int32_t i = 0; i < n; i++) {
        z += exp(it[i].l - it[0].l);
    }
    double cum = 0;
    int32_t m = 0;
    while (m < n && (m == 0 || set->top_p == 1.0 || cum < set->top_p)) {
        cum += exp(it[m++].l - it[0].l) / z;
    }
    while (m > 1 && exp(it[m - 1].l - it[0].l) < set->min_p) {
        m--;
    }
    z = 0;
    memset(p, 0, V * sizeof *p);
    for (int32_t i = 0; i < m; i++) {
        z += exp(it[i].l - it[0].l);
    }
    for (int32_t i = 0; i < m; i++) {
        p[it[i].id] = exp(it[i].l - it[0].l) / z;
    }
}

static void row(float *l, uint64_t which)
{
    for (int32_t i = 0; i < V; i++) {
        l[i] = (float)(3.0 * rng_normal(1, which, (uint64_t)i));
    }
    l[5] = l[9]; /* a tie */
}

/* A sweep of u over [0, 1) gives each token its share to within a step. */
static void every_filter_leaves_the_defined_distribution(void **state)
{
    (void)state;
    enum { STEPS = 4000 };
    static const int32_t ks[] = {0, 1, 2, 10, V - 1, V, V + 1, 9999999};
    static const double ps[] = {1.0, 0.05, 0.5, 0.9, 0.999};
    static const double mins[] = {0.0, 0.02, 0.3, 1.0};
    const uint64_t seen[1] = {0x123456789};
    sampler *s = NULL;
    assert_int_equal(sample_new(&s, V, NULL), KVS_OK);
    for (uint64_t c = 0; c < 120; c++) {
        float l[V];
        row(l, c);
        sample_set set = plain(c % 3 == 0 ? 1.0 : c % 3 == 1 ? 0.3 : 2.0);
        set.top_k = ks[c % UNIT_COUNT(ks)];
        set.top_p = ps[c / 2 % UNIT_COUNT(ps)];
        set.min_p = mins[c / 3 % UNIT_COUNT(mins)];
        set.repeat_penalty = c % 5 == 0 ? 1.5 : c % 5 == 1 ? 0.7 : 1.0;
        const uint64_t *was = c % 5 < 2 ? seen : NULL;
        double p[V];
        model(&set, l, was, p);
        int32_t count[V] = {0};
        for (int32_t i = 0; i < STEPS; i++) {
            int32_t t = -1;
            assert_int_equal(sample_token(s, &set, l, was, (i + 0.5) / STEPS, &t, NULL), KVS_OK);
            count[t]++;
        }
        for (int32_t i = 0; i < V; i++) {
            if (fabs(count[i] - STEPS * p[i]) > 1.5 || (p[i] == 0 && count[i] > 0)) {
                fail_msg("case %d, token %d: %d of %d, want %.2f", (int)c, i, count[i], STEPS,
                         STEPS * p[i]);
            }
        }
    }
    sample_free(s);
}

static void greedy_takes_the_largest_and_the_lower_of_equals(void **state)
{
    (void)state;
    float l[V];
    row(l, 3);
    l[20] = l[11] = 50.0f;
    assert_int_equal(pick(V, plain(0.0), l, NULL, 0.99), 11);
    assert_int_equal(sample_argmax(l, V), 11);
    sample_set set = plain(0.0);
    set.repeat_penalty = 2.0;
    const uint64_t seen[1] = {1 << 11};
    assert_int_equal(pick(V, set, l, seen, 0.0), 20);
    for (int32_t i = 0; i < V; i++) {
        l[i] = -1.0f;
    }
    l[7] = -0.9f; /* negative logits are multiplied */
    const uint64_t seven[1] = {1 << 7};
    assert_int_equal(pick(V, set, l, seven, 0.0), 0);
    /* top_k 1 is greedy at any temperature, ties included */
    row(l, 4);
    l[30] = l[12] = 60.0f;
    set = plain(5.0);
    set.top_k = 1;
    assert_int_equal(pick(V, set, l, NULL, 0.999), 12);
}

static void ends_of_the_unit_interval_stay_inside(void **state)
{
    (void)state;
    float l[V];
    for (int32_t i = 0; i < V; i++) {
        l[i] = i % 2 == 0 ? 0.0f : -INFINITY;
    }
    sample_set set = plain(1.0);
    assert_int_equal(pick(V, set, l, NULL, 0.0), 0);
    assert_int_equal(pick(V, set, l, NULL, 1.0 - 0x1p-53), V - 1); /* the last of probability > 0 */
    set.top_p = 0.999999;
    for (int32_t i = 0; i < 50; i++) {
        assert_int_equal(pick(V, set, l, NULL, i / 50.0) % 2, 0);
    }
    /* temperatures near 0 and far up */
    row(l, 2);
    assert_int_equal(pick(V, plain(1e-300), l, NULL, 0.7), sample_argmax(l, V));
    pick(V, plain(1e300), l, NULL, 0.7);
    /* one token */
    const float one = -3.0f;
    assert_int_equal(pick(1, plain(1.0), &one, NULL, 0.5), 0);
}

static void refuse(const float *l, const char *says)
{
    sampler *s = NULL;
    kvs_error err = {0};
    int32_t t = 0;
    assert_int_equal(sample_new(&s, V, &err), KVS_OK);
    for (int32_t greedy = 0; greedy < 2; greedy++) {
        const sample_set set = plain(greedy ? 0.0 : 1.0);
        assert_int_equal(sample_token(s, &set, l, NULL, 0.5, &t, &err), KVS_INVALID);
        assert_non_null(strstr(err.text, says));
    }
    sample_free(s);
}

static void logits_that_are_no_distribution_are_refused(void **state)
{
    (void)state;
    float l[V];
    row(l, 1);
    l[V - 1] = NAN;
    refuse(l, "token 36 is NaN");
    l[V - 1] = INFINITY;
    refuse(l, "infinite");
    for (int32_t i = 0; i < V; i++) {
        l[i] = -INFINITY;
    }
    refuse(l, "every logit is -inf");
}

static void logprobs_are_those_of_the_softmax(void **state)
{
    (void)state;
    float l[V];
    row(l, 8);
    long double z = 0;
    for (int32_t i = 0; i < V; i++) {
        z += expl((long double)l[i]);
    }
    double lp = 0, top[KVS_MAX_LOGPROBS];
    int32_t id[KVS_MAX_LOGPROBS];
    sample_logprobs(l, V, 9, 6, &lp, id, top);
    assert_true(fabs(lp - (double)((long double)l[9] - logl(z))) < 1e-12);
    item it[V];
    for (int32_t i = 0; i < V; i++) {
        it[i] = (item){(double)l[i], i};
    }
    qsort(it, V, sizeof *it, by_logit);
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(id[i], it[i].id);
        assert_true(fabs(top[i] - (double)((long double)it[i].l - logl(z))) < 1e-12);
    }
    l[3] = l[8] = l[30] = 90.0f; /* equal ones by id; huge logits do not overflow */
    sample_logprobs(l, V, 30, 3, &lp, id, top);
    assert_int_equal(id[0], 3);
    assert_int_equal(id[1], 8);
    assert_int_equal(id[2], 30);
    assert_true(fabs(lp + log(3.0)) < 1e-12);
    sample_logprobs(l, 2, 0, 3, &lp, id, top);
    assert_int_equal(id[2], -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_filter_leaves_the_defined_distribution),
        cmocka_unit_test(greedy_takes_the_largest_and_the_lower_of_equals),
        cmocka_unit_test(ends_of_the_unit_interval_stay_inside),
        cmocka_unit_test(logits_that_are_no_distribution_are_refused),
        cmocka_unit_test(logprobs_are_those_of_the_softmax),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
