/* tiny_run.c: see tiny_run.h. Every rank runs the same steps; rank 0 compares. */
#include "unit/unit.h"

#include "tiny_run.h"

#include <math.h>

#include "model/fwd.h"
#include "oracle/mkmodel.h"

enum {
    VOCAB = 256,
    KEEP = 2,
    STEPS = 16,
    DRAFTS = 4,
    TOPK = 16,
    TOKENS = 317,
    MAX_PAGES = 8,
    LAYER_ROWS = 8
};

#define TIE_GAP 1e-5F

typedef struct tiny_run {
    const tiny_case *c;
    const wt *w;
    golden *g;
    tiny_result *r;   /* rank 0 writes */
    double *row_diff; /* [KEEP + STEPS] */
    int layer_alone;
} tiny_run;

typedef struct rank_run {
    rank_job *job;
    const tiny_run *t;
    fwd *f;
    int32_t table[MAX_PAGES];
    const int32_t *token;
    float logits[LAYER_ROWS * VOCAB];
} rank_run;

static golden_array get(const tiny_run *t, const char *what, int layer)
{
    char name[64];
    if (layer < 0)
        snprintf(name, sizeof name, "%s.%s.%d", t->c->mode, what, t->c->prompt);
    else
        snprintf(name, sizeof name, "%s.%s.%d.%d", t->c->mode, what, t->c->prompt, layer);
    return golden_get(t->g, name);
}

/* ---- comparing ---------------------------------------------------------------------------- */

static int best(const float *x)
{
    int at = 0;
    for (int i = 1; i < VOCAB; i++)
        at = x[i] > x[at] ? i : at;
    return at;
}

static double log_sum_exp(const float *x)
{
    const double most = x[best(x)];
    double sum = 0;
    for (int i = 0; i < VOCAB; i++)
        sum += exp(x[i] - most);
    return most + log(sum);
}

static double largest_diff(const float *a, const float *b)
{
    double most = 0;
    for (int i = 0; i < VOCAB; i++) {
        const double d = fabs((double)a[i] - b[i]);
        most = d > most || isnan(d) ? d : most; /* a NaN stays: it fails every bound */
    }
    return most;
}

static void compare_logits(const tiny_run *t, const float *got, const float *expected)
{
    tiny_result *const r = t->r;
    const double d = largest_diff(got, expected);
    t->row_diff[r->rows] = d;
    r->diff = d > r->diff || isnan(d) ? d : r->diff;
    const double za = log_sum_exp(expected);
    const double zb = log_sum_exp(got);
    double kl = 0;
    for (int i = 0; i < VOCAB; i++)
        kl += exp(expected[i] - za) * ((expected[i] - za) - (got[i] - zb));
    r->kl += kl;
    r->kl_most = kl > r->kl_most || isnan(kl) ? kl : r->kl_most;
    r->rows++;
    r->top1 += best(got) == best(expected);
}

static int32_t common_ids(const int32_t *a, int32_t n, const int32_t *b, int32_t m)
{
    int32_t same = 0;
    for (int32_t i = 0, j = 0; i < n && j < m;) {
        same += a[i] == b[j];
        const int32_t at = a[i];
        i += at <= b[j];
        j += b[j] <= at;
    }
    return same;
}

/* Row `row` of the last step against row `at` of the arrays, every layer with an indexer. */
static void compare_sets(rank_run *k, int32_t row, int32_t at)
{
    tiny_result *const r = k->t->r;
    for (int32_t layer = 0; layer < k->t->w->h.n_layer; layer++) {
        const golden_array want = get(k->t, "select", layer);
        if (want.n_dim < 0)
            continue;
        const int32_t *const ids = want.i32 + (int64_t)at * TOPK;
        int32_t n = 0;
        while (n < TOPK && ids[n] >= 0)
            n++;
        int32_t got[TOPK];
        const int32_t m = fwd_selection(k->f, layer, row, got);
        const int32_t same = common_ids(ids, n, got, m);
        const golden_array gap = get(k->t, "gap", layer);
        const int equal = same == n && m == n;
        r->sets++;
        r->differ += !equal;
        r->wrong += !equal && (gap.n_dim < 0 || gap.f32[at] >= TIE_GAP || m != n);
        r->ids += n;
        r->common += same;
        r->ids0 += layer == 0 ? n : 0;
        r->common0 += layer == 0 ? same : 0;
    }
}

/* ---- running ------------------------------------------------------------------------------ */

static kvs_batch batch_of(const rank_run *k, const int32_t *q_len, const int64_t *seq_len)
{
    return (kvs_batch){.n_req = 1,
                       .q_len = q_len,
                       .seq_len = seq_len,
                       .table = k->table,
                       .table_stride = MAX_PAGES,
                       .n_page = MAX_PAGES};
}

/* Tokens [from, to): logits of the last n_logit of them. */
static void step(rank_run *k, int32_t from, int32_t to, int32_t n_logit)
{
    const int32_t n = to - from;
    const int64_t len = to;
    const int32_t rows[KEEP] = {n - n_logit, n - 1};
    const kvs_batch b = batch_of(k, &n, &len);
    const int32_t prompt = from < k->t->c->prompt && !k->t->c->absorbed ? n : 0;
    EXPECT_OK(k->job, fwd_step(k->f, &b, &prompt, k->token + from, rows, n_logit, k->logits,
                               &k->job->err));
}

static void run_drafts(rank_run *k, const float *hidden)
{
    const int32_t n = k->t->c->prompt;
    const golden_array want = get(k->t, "mtp.logits", -1);
    const golden_array tokens = get(k->t, "mtp.drafts", -1);
    EXPECT(k->job, want.n == DRAFTS * VOCAB && tokens.n == DRAFTS);
    if (k->job->note[0] != '\0')
        return;
    const size_t width = (size_t)k->t->w->h.hidden;
    float *const out = malloc((size_t)n * width * sizeof *out);
    for (int32_t j = 0; j < DRAFTS; j++) {
        const int32_t q = j == 0 ? n : 1;
        const int64_t len = n + j;
        const int32_t row = q - 1;
        const kvs_batch b = batch_of(k, &q, &len);
        const float *const in = j == 0 ? hidden : out + (size_t)(j == 1 ? n - 1 : 0) * width;
        float *const again = malloc((size_t)q * width * sizeof *again);
        memcpy(again, in, (size_t)q * width * sizeof *again);
        const int32_t *const next = j == 0 ? k->token + 1 : tokens.i32 + j - 1;
        const int32_t reuse = j > 0 && k->t->w->h.index_share_mtp;
        const int32_t prompt = j == 0 && !k->t->c->absorbed ? q : 0;
        EXPECT_OK(k->job, fwd_draft(k->f, 0, &b, &prompt, next, again, reuse, &row, 1, k->logits, out,
                                    &k->job->err));
        free(again);
        if (j == 0 && k->t->w->h.index_share_mtp)
            EXPECT_OK(k->job, fwd_draft_keep(k->f, &row, 1, &k->job->err));
        if (k->job->rank != 0 || k->job->note[0] != '\0')
            continue;
        const double d = largest_diff(k->logits, want.f32 + (int64_t)j * VOCAB);
        k->t->r->draft_diff = d > k->t->r->draft_diff || isnan(d) ? d : k->t->r->draft_diff;
    }
    free(out);
}

static void run_layer(rank_run *k)
{
    enum { N = 300 };
    char name[64];
    snprintf(name, sizeof name, "%s.layer.logits", k->t->c->mode);
    const golden_array want = golden_get(k->t->g, name);
    EXPECT(k->job, want.n == LAYER_ROWS * VOCAB);
    if (k->job->note[0] != '\0')
        return;
    const int32_t n = N;
    const int64_t len = N;
    int32_t rows[LAYER_ROWS];
    for (int32_t i = 0; i < LAYER_ROWS; i++)
        rows[i] = N - LAYER_ROWS + i;
    float *const hidden = malloc((size_t)N * (size_t)k->t->w->h.hidden * sizeof *hidden);
    mkmodel_hidden(k->t->c->variant, N, k->t->w->h.hidden, hidden);
    const kvs_batch b = batch_of(k, &n, &len);
    EXPECT_OK(k->job, fwd_draft(k->f, 0, &b, &n, k->token + 1, hidden, 0, rows, LAYER_ROWS, k->logits,
                                NULL, &k->job->err));
    free(hidden);
    for (int i = 0; i < LAYER_ROWS && k->job->rank == 0; i++)
        compare_logits(k->t, k->logits + i * VOCAB, want.f32 + i * VOCAB);
}

static void run_prompt(rank_run *k)
{
    const tiny_case *const c = k->t->c;
    const size_t width = (size_t)k->t->w->h.hidden;
    const int32_t chunk = c->chunk > 0 ? c->chunk : c->prompt;
    const golden_array want = get(k->t, "logits", -1);
    EXPECT(k->job, want.n == (KEEP + STEPS) * VOCAB);
    float *const hidden = malloc((size_t)c->prompt * width * sizeof *hidden);
    for (int32_t at = 0; at < c->prompt && k->job->note[0] == '\0'; at += chunk) {
        const int32_t to = at + chunk < c->prompt ? at + chunk : c->prompt;
        const int32_t n_logit = to < c->prompt ? 0 : to - at < KEEP ? 1 : KEEP;
        step(k, at, to, n_logit);
        if (k->job->note[0] != '\0')
            break;
        memcpy(hidden + (size_t)at * width, fwd_hidden(k->f),
               (size_t)(to - at) * width * sizeof *hidden);
        for (int32_t i = 0; i < n_logit && k->job->rank == 0; i++) {
            const int32_t row = KEEP - n_logit + i;
            compare_logits(k->t, k->logits + (int64_t)i * VOCAB, want.f32 + (int64_t)row * VOCAB);
            compare_sets(k, to - at - n_logit + i, row);
        }
    }
    if (c->drafts && k->job->note[0] == '\0')
        run_drafts(k, hidden);
    free(hidden);
    for (int32_t j = 0; j < STEPS && k->job->note[0] == '\0'; j++) {
        step(k, c->prompt + j, c->prompt + j + 1, 1);
        if (k->job->rank != 0 || k->job->note[0] != '\0')
            continue;
        compare_logits(k->t, k->logits, want.f32 + (int64_t)(KEEP + j) * VOCAB);
        compare_sets(k, 0, KEEP + j);
    }
}

static void run_rank(rank_job *job)
{
    const tiny_run *const t = job->ctx;
    const tiny_case *const c = t->c;
    rank_run k = {.job = job, .t = t, .token = golden_get(t->g, "tokens").i32};
    for (int32_t i = 0; i < MAX_PAGES; i++)
        k.table[i] = MAX_PAGES - 1 - i; /* not in order */
    const int32_t sparse = t->w->h.n_index_head > 0;
    const int32_t whole =
        t->layer_alone || c->drafts || c->chunk == 0; /* drafts take all rows at once */
    const fwd_config cfg = {.dcp = c->dcp > 0 ? c->dcp : 1,
                            .interleave = 1,
                            .threads = 1,
                            .kv = c->kv,
                            .index_kv = sparse ? c->index_kv : KVS_INDEX_AUTO,
                            .hadamard = c->hadamard,
                            .latent_eps = c->latent_eps,
                            .max_rows = whole ? TOKENS : c->chunk,
                            .max_reqs = 1,
                            .max_logits = LAYER_ROWS,
                            .max_len = TOKENS + DRAFTS,
                            .n_page = MAX_PAGES,
                            .trace = sparse};
    EXPECT_OK(job, fwd_open(&k.f, t->w, &cfg, job->c, &job->err));
    if (k.f == NULL)
        return;
    if (t->layer_alone)
        run_layer(&k);
    else
        run_prompt(&k);
    fwd_close(k.f);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static tiny_result measure(const tiny_case *c, int layer_alone)
{
    char dir[256], msg[256];
    tiny_result r = {0};
    kvs_error err = {0};
    if (mkmodel_temp(c->variant, c->dtype, strcmp(c->dtype, "f32") == 0 ? 1 : 3, dir, sizeof dir,
                     msg, sizeof msg) != 0)
        fail_msg("%s", msg);
    wt *w = NULL;
    golden *const g = golden_open(c->variant, msg, sizeof msg);
    const kvs_status st = wt_open(&w, dir, 1, &err);
    mkmodel_remove(dir); /* the mapping stays */
    if (g == NULL)
        fail_msg("%s", msg);
    if (st != KVS_OK)
        fail_msg("%s %s: %s", c->variant, c->dtype, err.text);
    double row_diff[KEEP + STEPS];
    tiny_run t = {
        .c = c, .w = w, .g = g, .r = &r, .row_diff = row_diff, .layer_alone = layer_alone};
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(c->tp > 0 ? c->tp : 1, &cfg, run_rank, &t);
    wt_close(w);
    golden_close(g);
    assert_true(r.rows > 0);
    r.kl /= r.rows;
    qsort(row_diff, (size_t)r.rows, sizeof *row_diff, by_size);
    r.median = row_diff[r.rows / 2];
    return r;
}

tiny_result tiny_measure(const tiny_case *c)
{
    return measure(c, 0);
}

tiny_result tiny_measure_layer(const tiny_case *c)
{
    return measure(c, 1);
}
