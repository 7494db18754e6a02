/* engine/sample.c - filters and draw.
 *
 * A heap over all tokens gives them in falling order, as many as top-k and top-p ask for; without
 * either nothing is ordered and the walk goes by token id. */
#include "engine/sample.h"

#include <math.h>
#include <stdbool.h>

#include "base/err.h"
#include "base/mem.h"

typedef struct cand {
    double l; /* logit after penalty and temperature, less the largest: <= 0 */
    int32_t id;
} cand;

struct sampler {
    int32_t vocab;
    cand *c; /* [vocab] */
};

kvs_status sample_new(sampler **out, int32_t vocab, kvs_error *err)
{
    *out = NULL;
    sampler *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a sampler");
    }
    s->vocab = vocab;
    s->c = mem_alloc_array((size_t)vocab, sizeof *s->c, 0);
    if (s->c == NULL) {
        mem_free(s);
        return err_set(err, KVS_NOMEM, "no memory for a sampler of %d tokens", vocab);
    }
    *out = s;
    return KVS_OK;
}

void sample_free(sampler *s)
{
    if (s != NULL) {
        mem_free(s->c);
        mem_free(s);
    }
}

int32_t sample_argmax(const float *logits, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i]))) {
            best = i;
        }
    }
    return best;
}

static kvs_status check_row(const float *logits, int32_t vocab, kvs_error *err)
{
    float most = -INFINITY;
    for (int32_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            return err_set(err, KVS_INVALID,
                           "the logit of token %d is %s: the model's weights or its cache hold "
                           "values that are no numbers",
                           i, isnan(logits[i]) ? "NaN" : "infinite");
        }
        most = logits[i] > most ? logits[i] : most;
    }
    if (most == -INFINITY) {
        return err_set(err, KVS_INVALID, "every logit is -inf: no token can follow");
    }
    return KVS_OK;
}

static double penalised(double l, int32_t id, const uint64_t *seen, double r)
{
    if (r == 1.0 || seen == NULL || (seen[id / 64] >> (id % 64) & 1) == 0) {
        return l;
    }
    return l > 0.0 ? l / r : l * r;
}

/* Candidates in id order, and the greedy choice. */
static int32_t fill(sampler *s, const sample_set *set, const float *logits, const uint64_t *seen)
{
    int32_t best = 0;
    for (int32_t i = 0; i < s->vocab; i++) {
        s->c[i] = (cand){penalised((double)logits[i], i, seen, set->repeat_penalty), i};
        if (s->c[i].l > s->c[best].l) {
            best = i;
        }
    }
    return best;
}

/* The larger logit, then the lower id. */
static bool before(cand a, cand b)
{
    return a.l > b.l || (a.l == b.l && a.id < b.id);
}

static void sift(cand *h, int32_t n, int32_t i)
{
    const cand x = h[i];
    for (;;) {
        int32_t kid = 2 * i + 1;
        if (kid >= n) {
            break;
        }
        kid += kid + 1 < n && before(h[kid + 1], h[kid]);
        if (!before(h[kid], x)) {
            break;
        }
        h[i] = h[kid];
        i = kid;
    }
    h[i] = x;
}

/* Moves the first of the heap's n to its end; the ordered ones grow from the array's end downwards. */
static cand pop(cand *h, int32_t n)
{
    const cand top = h[0];
    h[0] = h[n - 1];
    h[n - 1] = top;
    sift(h, n - 1, 0);
    return top;
}

static double weight(cand c)
{
    return exp(c.l);
}

/* Leaves the kept ones in c[begin .. vocab), the best last, and returns begin. */
static int32_t keep_best(sampler *s, const sample_set *set)
{
    const int32_t v = s->vocab;
    const int32_t k = set->top_k > 0 && set->top_k < v ? set->top_k : v;
    double total = 0.0;
    for (int32_t i = 0; k == v && i < v; i++) {
        total += weight(s->c[i]);
    }
    for (int32_t i = v / 2 - 1; i >= 0; i--) {
        sift(s->c, v, i);
    }
    if (k < v) { /* top-p is a share of what top-k left */
        for (int32_t i = 0; i < k; i++) {
            total += weight(pop(s->c, v - i));
        }
        double sum = 0.0;
        int32_t n = 0;
        while (n < k && (n == 0 || set->top_p == 1.0 || sum < set->top_p * total)) {
            sum += weight(s->c[v - 1 - n++]);
        }
        return v - n;
    }
    double sum = 0.0;
    int32_t n = 0;
    while (n < v && (n == 0 || sum < set->top_p * total)) {
        sum += weight(pop(s->c, v - n));
        n++;
    }
    return v - n;
}

/* The token at share u of the weights of c[begin .. end) that min_p keeps. */
static int32_t draw(const cand *c, int32_t begin, int32_t end, double min_p, double u)
{
    double total = 0.0;
    for (int32_t i = begin; i < end; i++) {
        const double w = weight(c[i]);
        total += w >= min_p ? w : 0.0;
    }
    const double target = u * total;
    double sum = 0.0;
    int32_t last = c[begin].id;
    for (int32_t i = begin; i < end; i++) {
        const double w = weight(c[i]);
        if (w == 0.0 || w < min_p) {
            continue;
        }
        sum += w;
        last = c[i].id;
        if (sum > target) {
            break;
        }
    }
    return last; /* the last kept one where rounding left the sum at the target */
}

kvs_status sample_token(sampler *s, const sample_set *set, const float *logits,
                        const uint64_t *seen, double u, int32_t *token, kvs_error *err)
{
    TRY(check_row(logits, s->vocab, err));
    const int32_t best = fill(s, set, logits, seen);
    if (set->temp == 0.0) {
        *token = best;
        return KVS_OK;
    }
    const double most = s->c[best].l;
    for (int32_t i = 0; i < s->vocab; i++) {
        s->c[i].l = (s->c[i].l - most) / set->temp;
    }
    const bool all = (set->top_k == 0 || set->top_k >= s->vocab) && set->top_p == 1.0;
    const int32_t begin = all ? 0 : keep_best(s, set);
    *token = draw(s->c, begin, s->vocab, set->min_p, u);
    return KVS_OK;
}

void sample_logprobs(const float *logits, int32_t vocab, int32_t token, int32_t n, double *logprob,
                     int32_t *top_token, double *top_logprob)
{
    const double most = (double)logits[sample_argmax(logits, vocab)];
    double sum = 0.0;
    for (int32_t i = 0; i < vocab; i++) {
        sum += exp((double)logits[i] - most);
    }
    const double base = most + log(sum);
    *logprob = (double)logits[token] - base;
    int32_t have = 0;
    for (int32_t i = 0; i < vocab && n > 0; i++) {
        const double l = (double)logits[i] - base;
        if (have == n && l <= top_logprob[n - 1]) {
            continue;
        }
        int32_t at = have < n ? have++ : n - 1;
        for (; at > 0 && top_logprob[at - 1] < l; at--) {
            top_logprob[at] = top_logprob[at - 1];
            top_token[at] = top_token[at - 1];
        }
        top_logprob[at] = l;
        top_token[at] = i;
    }
    for (int32_t i = have; i < n; i++) { /* a vocabulary of fewer tokens */
        top_token[i] = -1;
        top_logprob[i] = -INFINITY;
    }
}
