/* Large numbers: steps of 70,000 rows, sequences of more than a million tokens and up to the longest there
 * is. Pages that many table entries name keep them cheap; tests/unit/kv/test_far.c has pages that lie far
 * apart. */
#include "unit/unit.h"

#include <math.h>

#include "kvspan/dcp.h"
#include "num/fmt.h"
#include "unit/comm/ranks.h"

static const kvs_attend k_forms[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};

/* What a rank of its own holds. */
typedef struct rig {
    kvs_comm *comm;
    kvs_dcp *d;
    kvs_cache *c;
    kvs_error err;
} rig;

#define OK(r, call)                                                                                \
    do {                                                                                           \
        if ((call) != KVS_OK) {                                                                    \
            fail_msg("%s: %s", #call, (r)->err.text);                                              \
        }                                                                                          \
    } while (0)

static void *take(size_t n, size_t size)
{
    void *p = calloc(n, size);
    assert_non_null(p);
    return p;
}

/* ---- many rows ------------------------------------------------------------------------------- */

enum { REQS = 7000, Q = 10, ROWS = REQS * Q };

static void value_is(const float *out, int64_t row, double want)
{
    if (!(fabs((double)out[row * 512] - want) < 1e-5)) {
        fail_msg("row %lld: %.7f, not %.7f", (long long)row, (double)out[row * 512], want);
    }
}

/* Value 0 of position p is p; all requests share one page. The indexer finds a row's own position. */
static void a_step_of_70000_rows(void **state)
{
    (void)state;
    rig r = {0};
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.kv = KVS_KV_BF16;
    dc.n_head = 1;
    dc.n_index_head = 1;
    dc.topk = 1;
    dc.softmax_scale = 1.0f;
    dc.max_rows = ROWS;
    dc.max_reqs = REQS;
    dc.max_len = 64;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = KVS_KV_BF16;
    cc.n_index_layer = 1;
    cc.n_page = 1;
    OK(&r, kvs_comm_open_self(&r.comm, NULL, &r.err));
    OK(&r, kvs_dcp_open(&r.d, &dc, r.comm, &r.err));
    OK(&r, kvs_cache_create(&r.c, &cc, &r.err));
    int32_t *q_len = take(REQS, sizeof *q_len);
    int64_t *len = take(REQS, sizeof *len);
    int32_t *table = take(REQS, sizeof *table);
    float *latent = take(Q * 576, sizeof *latent);
    bf16 *q = take((size_t)ROWS * 576, sizeof *q);
    bf16 *iq = take((size_t)ROWS * 128, sizeof *iq);
    float *w = take(ROWS, sizeof *w);
    int32_t *ids = take(ROWS, sizeof *ids);
    float *out = take((size_t)ROWS * 512, sizeof *out);
    for (int32_t i = 0; i < REQS; i++) {
        q_len[i] = Q;
        len[i] = Q;
    }
    for (int32_t i = 0; i < ROWS; i++) {
        iq[(int64_t)i * 128] = bf16_from_f32(1.0f);
        w[i] = 1.0f;
        ids[i] = i * 7 % (i % Q + 1);
    }
    for (int32_t p = 0; p < Q; p++) {
        latent[p * 512] = (float)p;
    }
    kvs_batch b = {
        .n_req = 1, .q_len = q_len, .seq_len = len, .table = table, .table_stride = 1, .n_page = 1};
    OK(&r, kvs_dcp_plan(r.d, &b, &r.err));
    OK(&r, kvs_dcp_write(r.d, r.c, 0, latent, latent + Q * 512, KVS_DTYPE_F32, &r.err));
    for (int32_t p = 0; p < Q; p++) {
        memset(latent + p * 128, 0, 128 * sizeof *latent);
        latent[p * 128] = (float)(p + 1);
    }
    OK(&r, kvs_dcp_write_index(r.d, r.c, 0, latent, KVS_DTYPE_F32, &r.err));
    b.n_req = REQS;
    OK(&r, kvs_dcp_plan(r.d, &b, &r.err));
    for (int32_t m = 0; m < 4; m++) { /* ids of ours, the indexer's, dense, context */
        if (m == 0) {
            OK(&r, kvs_dcp_set_selection(r.d, ids, 1, &r.err));
        } else if (m == 1) {
            OK(&r, kvs_dcp_select(r.d, r.c, 0, iq, KVS_DTYPE_BF16, w, &r.err));
        }
        OK(&r, kvs_dcp_attend(r.d, r.c, 0, k_forms[m > 0 ? m - 1 : 0], q, KVS_DTYPE_BF16, out,
                              KVS_DTYPE_F32, NULL, &r.err));
        for (int64_t row = 0; row < ROWS; row++) {
            const int32_t own = (int32_t)(row % Q);
            value_is(out, row, m == 0 ? ids[row] : m == 1 ? own : own / 2.0);
        }
        OK(&r, kvs_dcp_finish(r.d, NULL, &r.err));
    }
    void *all[] = {q_len, len, table, latent, q, iq, w, ids, out};
    for (size_t i = 0; i < UNIT_COUNT(all); i++) {
        free(all[i]);
    }
    kvs_cache_free(r.c);
    kvs_dcp_close(r.d);
    kvs_comm_close(r.comm);
}

/* ---- long sequences -------------------------------------------------------------------------- */

enum { PAGES = 3, PERIOD_1 = PAGES * 64 }; /* tokens after which pages repeat, at dcp 1 */

static void fill_periods(rank_job *job, kvs_dcp *d, kvs_cache *c, const int32_t *table,
                         int64_t stride, int64_t period, int32_t has_index)
{
    enum { STEP = 192 };
    static const int64_t row_size = 512 + 64 + 128;
    float *x = calloc(STEP * (size_t)row_size, sizeof *x);
    for (int64_t at = 0; at < period; at += STEP) {
        const int32_t q_len = STEP;
        const int64_t len = at + STEP;
        const kvs_batch b = {.n_req = 1,
                             .q_len = &q_len,
                             .seq_len = &len,
                             .table = table,
                             .table_stride = stride,
                             .n_page = PAGES};
        for (int32_t t = 0; t < STEP; t++) {
            x[t * 512] = (float)(at + t);
            x[STEP * 576 + t * 128] = (at + t) % PERIOD_1 == 100 ? 1.0f : 0.0f;
        }
        EXPECT_OK(job, kvs_dcp_plan(d, &b, &job->err));
        EXPECT_OK(job, kvs_dcp_write(d, c, 0, x, x + STEP * 512, KVS_DTYPE_F32, &job->err));
        if (has_index) {
            EXPECT_OK(job, kvs_dcp_write_index(d, c, 0, x + STEP * 576, KVS_DTYPE_F32, &job->err));
        }
    }
    free(x);
}

static int32_t *repeating_table(int64_t n)
{
    int32_t *t = malloc((size_t)n * sizeof *t);
    for (int64_t i = 0; i < n; i++) {
        t[i] = (int32_t)(i % PAGES);
    }
    return t;
}

static void open_long(rank_job *job, kvs_dcp **d, kvs_cache **c, int64_t max_len, int32_t topk,
                      int32_t has_index)
{
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.dcp = job->n;
    dc.kv = KVS_KV_F32;
    dc.n_head = job->n;
    dc.n_index_head = has_index;
    dc.topk = topk;
    dc.trace = has_index;
    dc.softmax_scale = 1.0f;
    dc.max_rows = 192;
    dc.max_reqs = 1;
    dc.max_len = max_len;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = KVS_KV_F32;
    cc.n_index_layer = has_index;
    cc.dcp = job->n;
    cc.rank = job->rank;
    cc.n_page = PAGES;
    EXPECT_OK(job, kvs_dcp_open(d, &dc, job->c, &job->err));
    EXPECT_OK(job, kvs_cache_create(c, &cc, &job->err));
}

/* 1,100,000 tokens of which every 192nd scores 1 and the others 0: the first 64 of those win. */
static void select_in_a_million(rank_job *job)
{
    enum { TOKENS = 1100000, TOPK = 64 };
    kvs_dcp *d = NULL;
    kvs_cache *c = NULL;
    const int64_t width = kvs_table_width(1, TOKENS);
    int32_t *table = repeating_table(width);
    open_long(job, &d, &c, TOKENS, TOPK, 1);
    fill_periods(job, d, c, table, width, PERIOD_1, 1);
    const int64_t len = TOKENS;
    const int32_t q_len = 1;
    const kvs_batch b = {.n_req = 1,
                         .q_len = &q_len,
                         .seq_len = &len,
                         .table = table,
                         .table_stride = width,
                         .n_page = PAGES};
    static float q[576];
    static float iq[128] = {1.0f};
    const float w = 1.0f;
    static float out[512];
    float lse = 0.0f;
    static int32_t ids[TOPK];
    int32_t count = 0;
    EXPECT_OK(job, kvs_dcp_plan(d, &b, &job->err));
    EXPECT_OK(job, kvs_dcp_select(d, c, 0, iq, KVS_DTYPE_F32, &w, &job->err));
    EXPECT_OK(job, kvs_dcp_selection(d, ids, &count, &job->err));
    EXPECT(job, count == TOPK);
    for (int32_t i = 0; i < TOPK; i++) {
        EXPECT(job, ids[i] == 100 + i * PERIOD_1);
    }
    EXPECT_OK(job, kvs_dcp_attend(d, c, 0, KVS_ATTEND_SPARSE, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                                  &lse, &job->err));
    EXPECT(job, fabsf(out[0] - 100.0f) < 1e-4f && fabsf(lse - logf(TOPK)) < 1e-5f);
    kvs_step_info info;
    EXPECT_OK(job, kvs_dcp_finish(d, &info, &job->err));
    EXPECT(job, info.n_key_scored == TOKENS);
    kvs_dcp_close(d);
    kvs_cache_free(c);
    free(table);
}

static void a_sequence_of_1100000_tokens(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(1, &cfg, select_in_a_million, NULL);
}

/* Positions up to 2^31 - 2 over 8 ranks; span 512, so pages repeat after 1536 tokens. */
static void attend_to_the_end(rank_job *job)
{
    enum { SPAN = 512, N_ID = 4 };
    static const int32_t ids[N_ID] = {INT32_MAX - 1, 0, (1 << 30) + 5, 511};
    double want = 0;
    for (int32_t i = 0; i < N_ID; i++) {
        want += (double)(ids[i] / SPAN % PAGES * SPAN + ids[i] % SPAN) / N_ID;
    }
    kvs_dcp *d = NULL;
    kvs_cache *c = NULL;
    const int64_t width = kvs_table_width(job->n, INT32_MAX);
    const int32_t *table = job->ctx;
    open_long(job, &d, &c, INT32_MAX, N_ID, 0);
    fill_periods(job, d, c, table, width, PAGES * SPAN, 0);
    const int64_t len = INT32_MAX;
    const int32_t q_len = 1;
    const kvs_batch b = {.n_req = 1,
                         .q_len = &q_len,
                         .seq_len = &len,
                         .table = table,
                         .table_stride = width,
                         .n_page = PAGES};
    const float q[576] = {0.0f};
    float out[512];
    float lse = 0.0f;
    EXPECT_OK(job, kvs_dcp_plan(d, &b, &job->err));
    EXPECT_OK(job, kvs_dcp_set_selection(d, ids, N_ID, &job->err));
    EXPECT_OK(job, kvs_dcp_attend(d, c, 0, KVS_ATTEND_SPARSE, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                                  &lse, &job->err));
    EXPECT(job, fabs((double)out[0] - want) < 1e-3 && fabsf(lse - logf(N_ID)) < 1e-5f);
    EXPECT_OK(job, kvs_dcp_finish(d, NULL, &job->err));
    kvs_dcp_close(d);
    kvs_cache_free(c);
}

static void the_longest_sequence(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    int32_t *table = repeating_table(kvs_table_width(8, INT32_MAX));
    ranks_run(8, &cfg, attend_to_the_end, table);
    free(table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_of_70000_rows),
        cmocka_unit_test(a_sequence_of_1100000_tokens),
        cmocka_unit_test(the_longest_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
