/* What a plan says the attention layer sends, against what it does send: thread ranks run a step of
 * selection and sparse attention, and count. What is allocated: plan_engine. */
#include "unit/unit.h"

#include <pthread.h>

#include "engine/plan.h"
#include "kvspan/dcp.h"

enum { TOKENS = 300, SEQS = 3, DRAFTS = 1, ROWS = SEQS * (1 + DRAFTS), TOPK = 64, INDEX_HEADS = 4 };

typedef struct setup {
    int32_t tp, dcp, interleave, n_head, topk;
    kvs_kv_format kv;
    kvs_exchange exchange;
} setup;

typedef struct member {
    const setup *s;
    kvs_comm *comm;
    kvs_step_info info;
    kvs_status st;
    kvs_error err;
} member;

static kvs_dcp_config dcp_config(const setup *s)
{
    kvs_dcp_config c = kvs_dcp_config_default();
    c.tp = s->tp;
    c.dcp = s->dcp;
    c.interleave = s->interleave;
    c.n_head = s->n_head;
    c.n_index_head = s->topk > 0 ? INDEX_HEADS : 0;
    c.topk = s->topk;
    c.softmax_scale = 0.1f;
    c.kv = s->kv;
    c.exchange = s->exchange;
    c.max_rows = ROWS;
    c.max_reqs = SEQS;
    c.max_len = TOKENS;
    return c;
}

#define STEP(expr)                                                                                 \
    do {                                                                                           \
        if (r->st >= 0) {                                                                          \
            r->st = (expr);                                                                        \
        }                                                                                          \
    } while (0)

static void step(member *r, kvs_dcp *d)
{
    const setup *s = r->s;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = s->kv;
    cc.n_layer = 1;
    cc.n_index_layer = s->topk > 0 ? 1 : 0;
    cc.dcp = s->dcp;
    cc.interleave = s->interleave;
    cc.rank = kvs_dcp_rank(d);
    const int64_t width = kvs_table_width(s->dcp, TOKENS);
    cc.n_page = width * SEQS;
    kvs_cache *cache = NULL;
    STEP(kvs_cache_create(&cache, &cc, &r->err));
    int32_t table[SEQS * 8];
    for (int32_t i = 0; i < SEQS * (int32_t)width; i++) {
        table[i] = i;
    }
    const int32_t q_len[SEQS] = {1 + DRAFTS, 1 + DRAFTS, 1 + DRAFTS};
    const int64_t seq_len[SEQS] = {TOKENS, TOKENS, TOKENS};
    const kvs_batch b = {SEQS, q_len, seq_len, table, width, cc.n_page};
    STEP(kvs_dcp_plan(d, &b, &r->err));
    const size_t heads = (size_t)kvs_dcp_heads(d);
    float *q = calloc(ROWS * heads * KVS_ROW_DIM, sizeof *q);
    float *out = calloc(ROWS * heads * KVS_LATENT_DIM, sizeof *out);
    float *iq = calloc((size_t)ROWS * INDEX_HEADS * KVS_INDEX_DIM, sizeof *iq);
    float w[ROWS * INDEX_HEADS] = {0};
    kvs_attend how = KVS_ATTEND_DENSE;
    if (s->topk > 0) {
        how = KVS_ATTEND_SPARSE;
        STEP(kvs_dcp_select(d, cache, 0, iq, KVS_DTYPE_F32, w, &r->err));
    }
    STEP(kvs_dcp_attend(d, cache, 0, how, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32, NULL, &r->err));
    STEP(kvs_dcp_finish(d, &r->info, &r->err));
    free(q);
    free(out);
    free(iq);
    kvs_cache_free(cache);
}

static void *run_rank(void *arg)
{
    member *r = arg;
    const kvs_dcp_config c = dcp_config(r->s);
    kvs_dcp *d = NULL;
    r->st = kvs_dcp_open(&d, &c, r->comm, &r->err);
    if (r->st >= 0) {
        step(r, d);
    }
    kvs_dcp_close(d);
    kvs_comm_close(r->comm);
    return NULL;
}

static void compare(const setup *s)
{
    kvs_comm *end[8];
    member r[8];
    pthread_t thread[8];
    assert_int_equal(kvs_comm_open_threads(end, s->tp, NULL, NULL), KVS_OK);
    for (int32_t i = 0; i < s->tp; i++) {
        memset(&r[i], 0, sizeof r[i]);
        r[i].s = s;
        r[i].comm = end[i];
        assert_int_equal(pthread_create(&thread[i], NULL, run_rank, &r[i]), 0);
    }
    for (int32_t i = 0; i < s->tp; i++) {
        pthread_join(thread[i], NULL);
    }
    const plan_shape shape = {
        .tp = s->tp,
        .dcp = s->dcp,
        .interleave = s->interleave,
        .n_head = s->n_head,
        .topk = s->topk,
        .kv = s->kv,
        .max_len = TOKENS,
    };
    const kvs_plan_exchange x = plan_exchange(&shape, s->exchange, ROWS);
    for (int32_t i = 0; i < s->tp; i++) {
        if (r[i].st < 0) {
            fail_msg("rank %d: %s", i, r[i].err.text);
        }
        assert_int_equal(r[i].info.bytes_q, x.q);
        assert_int_equal(r[i].info.bytes_partial, x.partial + x.lse);
        assert_int_equal(r[i].info.bytes_select, x.selection);
    }
}

static void sent_bytes_are_the_planned_ones(void **state)
{
    (void)state;
    static const setup cases[] = {
        {1, 1, 1, 4, TOPK, KVS_KV_FP8_DS_MLA, KVS_EXCHANGE_A2A},
        {2, 2, 1, 4, TOPK, KVS_KV_FP8_DS_MLA, KVS_EXCHANGE_A2A},
        {4, 2, 4, 8, TOPK, KVS_KV_BF16, KVS_EXCHANGE_AG_RS},
        {4, 4, 1, 8, 128, KVS_KV_F32, KVS_EXCHANGE_A2A},
        {8, 8, 16, 16, TOPK, KVS_KV_FP8_DS_MLA, KVS_EXCHANGE_A2A},
        {4, 4, 2, 4, 0, KVS_KV_BF16, KVS_EXCHANGE_AG_RS},
        {2, 2, 64, 2, 0, KVS_KV_FP8, KVS_EXCHANGE_A2A},
    };
    for (size_t i = 0; i < UNIT_COUNT(cases); i++) {
        compare(&cases[i]);
    }
}

static void pages_take_what_a_cache_allocates(void **state)
{
    (void)state;
    static const struct {
        const char *preset;
        kvs_kv_format kv;
        int32_t mtp, n_layer, n_index_layer;
    } want[] = {
        {"deepseek-v2-lite", KVS_KV_FP8, 0, 27, 0},
        {"deepseek-v3.2", KVS_KV_AUTO, 0, 61, 61},
        {"glm-5.2", KVS_KV_BF16, 2, 79, 22},
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        kvs_plan_config c = kvs_plan_config_default();
        c.preset = want[i].preset;
        c.kv = want[i].kv;
        c.mtp = want[i].mtp;
        kvs_plan p = kvs_plan_empty();
        assert_int_equal(kvs_plan_make(&p, &c, NULL), KVS_OK);
        kvs_cache_config cc = kvs_cache_config_default();
        cc.kv = want[i].kv;
        cc.n_layer = want[i].n_layer;
        cc.n_index_layer = want[i].n_index_layer;
        cc.n_page = 3;
        kvs_cache *cache = NULL;
        assert_int_equal(kvs_cache_create(&cache, &cc, NULL), KVS_OK);
        kvs_cache_info info;
        kvs_cache_get_info(cache, &info);
        assert_int_equal(info.bytes_latent + info.bytes_index, 3 * p.page_bytes);
        assert_int_equal(info.row_bytes, p.row_bytes);
        kvs_cache_free(cache);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_take_what_a_cache_allocates),
        cmocka_unit_test(sent_bytes_are_the_planned_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
