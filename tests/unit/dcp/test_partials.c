/* What shards give each other and how it meets: a row that is empty on a rank, or on all; the weight of
 * a shard; the order of the LSE. Every workspace starts as NaN and so does every page, so that what
 * nobody wrote shows when it is read. */
#include "unit/unit.h"

#include <math.h>

#include "base/mem.h"
#include "world.h"

static const kvs_exchange k_exchange[] = {KVS_EXCHANGE_A2A, KVS_EXCHANGE_AG_RS};
static const kvs_attend k_forms[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
static const kvs_kv_format k_formats[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8_DS_MLA};

static void requests(scenario *s, int32_t n, int64_t seq_len, int32_t q_len)
{
    s->n_req = n;
    for (int32_t i = 0; i < n; i++) {
        s->req_id[i] = i;
        s->seq_len[i] = seq_len;
        s->q_len[i] = q_len;
    }
}

static void no_nan(const outcome *o)
{
    for (int64_t i = 0; i < (int64_t)o->n_row * o->n_head; i++) {
        assert_true(o->lse[i] < INFINITY); /* not NaN either */
        for (int64_t d = 0; d < 512; d++) {
            assert_true(isfinite(o->out[i * 512 + d]));
        }
    }
}

/* Request 0: every position; 1: the even ones, which rank 0 of 2 holds; 2: the odd ones; 3: none. */
static void ids_by_parity(int32_t req_id, int64_t bound, int32_t topk, int32_t *out)
{
    const int32_t step = req_id == 0 ? 1 : 2;
    for (int32_t i = 0; i < topk; i++) {
        const int32_t pos = (req_id == 2) + i * step;
        out[i] = req_id == 3 || pos >= bound ? -1 : pos;
    }
}

static void a_row_empty_on_a_rank_is_the_other_ranks_row(void **state)
{
    (void)state;
    enum { HEADS = 4 };
    for (size_t f = 0; f < UNIT_COUNT(k_formats); f++) {
        scenario s = scenario_default();
        requests(&s, 4, 60, 1);
        s.tp = 2;
        s.n_head = HEADS;
        s.kv = k_formats[f];
        s.select = WORLD_IDS;
        s.ids = ids_by_parity;
        outcome alone;
        world_run(&s, &alone);
        s.dcp = 2;
        for (size_t e = 0; e < UNIT_COUNT(k_exchange); e++) {
            s.exchange = k_exchange[e];
            outcome o;
            world_run(&s, &o);
            no_nan(&o);
            /* requests 1 and 2: the partial of one rank, bit for bit, in both exchanges */
            assert_memory_equal(o.lse + HEADS, alone.lse + HEADS, 2 * HEADS * sizeof(float));
            assert_memory_equal(o.out + HEADS * 512, alone.out + HEADS * 512,
                                2 * HEADS * 512 * sizeof(float));
            for (int32_t h = 3 * HEADS; h < 4 * HEADS; h++) {
                assert_true(o.lse[h] == -INFINITY);
                for (int32_t d = 0; d < 512; d++) {
                    assert_true(o.out[h * 512 + d] == 0.0f);
                }
            }
            assert_int_equal(o.info[0].n_nan + o.info[1].n_nan, 0);
            assert_int_equal(o.info[0].n_key_attended, 30 + 30);
            assert_int_equal(o.info[1].n_key_attended, 30 + 30);
            outcome_fini(&o);
        }
        outcome_fini(&alone);
    }
}

/* ---- 8 keys of weight 1 on rank 0, 2 keys on rank 1 ------------------------------------------ */

static float g_logit; /* score of the keys of rank 1; those of rank 0 have 0 */

/* Value 0 of a row is 1 on rank 0 (positions below 8, with interleave 8) and 0 on rank 1. */
static int weighed(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    (void)req_id;
    (void)head;
    memset(x, 0, (size_t)n * sizeof *x);
    if (kind == DATA_ROW) {
        x[0] = pos < 8 ? 1.0f : 0.0f;
        x[1] = pos < 8 ? 0.0f : 1.0f;
    } else if (kind == DATA_QUERY) {
        x[1] = g_logit * 24.0f; /* the softmax scale is 1/24 */
    }
    return 1;
}

static void ids_all(int32_t req_id, int64_t bound, int32_t topk, int32_t *out)
{
    (void)req_id;
    for (int32_t i = 0; i < topk; i++) {
        out[i] = i < bound ? i : -1;
    }
}

static void shares(kvs_attend how, kvs_exchange exchange, kvs_kv_format kv, float logit, double z1)
{
    scenario s = scenario_default();
    requests(&s, 1, 10, 1);
    s.tp = 2;
    s.dcp = 2;
    s.interleave = 8;
    s.n_head = 2;
    s.kv = kv;
    s.q_type = KVS_DTYPE_F32;
    s.how = how;
    s.exchange = exchange;
    s.n_index_head = 0;
    s.select = WORLD_IDS;
    s.ids = ids_all;
    s.data = weighed;
    g_logit = logit;
    outcome o;
    world_run(&s, &o);
    for (int32_t h = 0; h < 2; h++) {
        const double out = (double)o.out[h * 512];
        const double lse = (double)o.lse[h];
        if (!(fabs(out - 8.0 / (8.0 + z1)) < 1e-5 && fabs(lse - log(8.0 + z1)) < 1e-5)) {
            fail_msg("form %d, exchange %d, format %d: share %.7f of %.7f, lse %.7f of %.7f",
                     (int)how, (int)exchange, (int)kv, out, 8.0 / (8.0 + z1), lse, log(8.0 + z1));
        }
    }
    outcome_fini(&o);
}

/* Sums of exponentials 8 and 2 give 0.8 and 0.2; a logarithm of another base anywhere does not. */
static void shards_weigh_by_their_sums(void **state)
{
    (void)state;
    for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
        for (size_t e = 0; e < UNIT_COUNT(k_exchange); e++) {
            for (size_t f = 0; f < UNIT_COUNT(k_formats); f++) {
                shares(k_forms[m], k_exchange[e], k_formats[f], 0.0f, 2.0);
            }
            /* 2 keys at ln 4 weigh as much as 8 at 0; far above, they are all there is */
            shares(k_forms[m], k_exchange[e], KVS_KV_F32, 1.38629436f, 8.0);
            shares(k_forms[m], k_exchange[e], KVS_KV_F32, -2.0f, 2.0 * exp(-2.0));
        }
        shares(k_forms[m] == KVS_ATTEND_SPARSE ? KVS_ATTEND_DENSE : k_forms[m], KVS_EXCHANGE_A2A,
               KVS_KV_FP8, 0.0f, 2.0);
    }
}

/* ---- order of rows and heads ----------------------------------------------------------------- */

enum { BATCH = 3, HEADS_4 = 4, Q_LEN = 2 };

static float label(int32_t req_id, int32_t head, int64_t j)
{
    return (float)(100 * req_id + 10 * head + j);
}

/* Every key has the same score for one query: 100 b + 10 h + s. Value 1 says the request. */
static int labelled(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    memset(x, 0, (size_t)n * sizeof *x);
    if (kind == DATA_ROW) {
        x[0] = 1.0f;
        x[1] = (float)req_id;
    } else if (kind == DATA_QUERY) {
        x[0] = label(req_id, head, pos) * 24.0f;
    }
    return 1;
}

/* The two tokens of a request stand at positions 0 and 1, so the second sees two keys. */
static void lse_is_tokens_by_heads(void **state)
{
    (void)state;
    for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
        for (size_t e = 0; e < 2 * UNIT_COUNT(k_exchange); e++) {
            scenario s = scenario_default();
            requests(&s, BATCH, Q_LEN, Q_LEN);
            s.tp = 2;
            s.dcp = e < 2 ? 1 : 2;
            s.exchange = k_exchange[e % 2];
            s.n_head = HEADS_4;
            s.kv = KVS_KV_F32;
            s.q_type = KVS_DTYPE_F32;
            s.how = k_forms[m];
            s.n_index_head = 0;
            s.select = WORLD_IDS;
            s.ids = ids_all;
            s.data = labelled;
            outcome o;
            world_run(&s, &o);
            for (int32_t b = 0; b < BATCH; b++) {
                for (int32_t h = 0; h < HEADS_4; h++) {
                    for (int32_t j = 0; j < Q_LEN; j++) {
                        const int64_t at = (int64_t)(b * Q_LEN + j) * HEADS_4 + h;
                        const double want = (double)label(b, h, j) + log(1.0 + j);
                        assert_true(fabs((double)o.lse[at] - want) < 1e-3);
                        assert_true(fabsf(o.out[at * 512 + 1] - (float)b) < 1e-5f);
                    }
                }
            }
            outcome_fini(&o);
        }
    }
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_empty_on_a_rank_is_the_other_ranks_row),
        cmocka_unit_test(shards_weigh_by_their_sums),
        cmocka_unit_test(lse_is_tokens_by_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
