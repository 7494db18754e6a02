/* What the ranks of a group must have in common: set-ups that differ are refused on every rank with the
 * field named, ranks that do different things end the group with the rank named, and a rank that stores
 * nothing of a step takes part in it all the same. */
#include "unit/unit.h"

#include <math.h>

#include "base/mem.h"
#include "kv/cache.h"
#include "kvspan/dcp.h"
#include "kvspan/log.h"
#include "num/fmt.h"
#include "unit/comm/ranks.h"

static kvs_dcp_config small_config(void)
{
    kvs_dcp_config c = kvs_dcp_config_default();
    c.tp = 2;
    c.dcp = 2;
    c.n_head = 4;
    c.n_index_head = 4;
    c.topk = 16;
    c.softmax_scale = 0.125f;
    c.kv = KVS_KV_BF16;
    c.max_rows = 8;
    c.max_reqs = 2;
    c.max_len = 640;
    c.cpu = "ref";
    return c;
}

/* ---- set-ups that differ --------------------------------------------------------------------- */

typedef struct difference {
    const char *says; /* part of the message on every rank */
    void (*change)(kvs_dcp_config *c);
} difference;

#define CHANGE(name, code)                                                                         \
    static void name(kvs_dcp_config *c)                                                            \
    {                                                                                              \
        code;                                                                                      \
    }
CHANGE(other_tp, c->tp = 4)
CHANGE(other_dcp, c->dcp = 1)
CHANGE(other_interleave, c->interleave = 64)
CHANGE(other_heads, c->n_head = 8)
CHANGE(other_index_heads, c->n_index_head = 8)
CHANGE(other_topk, c->topk = 17)
CHANGE(other_scale, c->softmax_scale = 0.12500001f)
CHANGE(other_rows, c->kv = KVS_KV_FP8_DS_MLA)
CHANGE(other_keys, c->index_kv = KVS_INDEX_F32)
CHANGE(other_exchange, c->exchange = KVS_EXCHANGE_AG_RS)
CHANGE(other_trace, c->trace = 1)
CHANGE(other_max_rows, c->max_rows = 9)
CHANGE(other_max_reqs, c->max_reqs = 3)
CHANGE(other_max_len, c->max_len = 641)
CHANGE(other_tag, c->model_tag = "2f0c")
CHANGE(no_indexer_fp8, (c->n_index_head = 0, c->kv = KVS_KV_FP8))
CHANGE(quantised_query, (no_indexer_fp8(c), c->q_fp8 = 1))
CHANGE(impossible, c->interleave = 3)
#ifdef __x86_64__
CHANGE(other_kernels, c->cpu = "avx2")
#endif

static const difference differences[] = {
    {"rank 1: tp 4", other_tp},
    {"handshake: dcp is \"2\" on rank 0 and \"1\" on rank 1", other_dcp},
    {"handshake: interleave is \"1\" on rank 0 and \"64\" on rank 1", other_interleave},
    {"handshake: n_head is", other_heads},
    {"handshake: n_index_head is", other_index_heads},
    {"handshake: topk is \"16\" on rank 0 and \"17\" on rank 1", other_topk},
    {"handshake: softmax_scale is", other_scale},
    {"handshake: kv is", other_rows},
    {"handshake: index_kv is", other_keys},
    {"handshake: exchange is", other_exchange},
    {"handshake: trace is", other_trace},
    {"handshake: max_rows is", other_max_rows},
    {"handshake: max_reqs is", other_max_reqs},
    {"handshake: max_len is", other_max_len},
    {"handshake: model_tag is \"\" on rank 0 and \"2f0c\" on rank 1", other_tag},
    {"handshake: n_index_head is", no_indexer_fp8},
    {"rank 1: interleave 3", impossible},
#ifdef __x86_64__
    {"handshake: kernels is", other_kernels},
#endif
};

static void differ(rank_job *job)
{
    for (size_t i = 0; i < UNIT_COUNT(differences); i++) {
        kvs_dcp_config c = small_config();
        if (job->rank == 1) {
            differences[i].change(&c);
        }
        kvs_dcp *d = (kvs_dcp *)job;
        EXPECT_FAIL(job, kvs_dcp_open(&d, &c, job->c, &job->err), KVS_INVALID, differences[i].says);
        EXPECT(job, d == NULL);
    }
    kvs_dcp_config c = small_config();
    no_indexer_fp8(&c);
    if (job->rank == 1) {
        quantised_query(&c);
    }
    kvs_dcp *d = NULL;
    EXPECT_FAIL(job, kvs_dcp_open(&d, &c, job->c, &job->err), KVS_INVALID, "q_fp8 is");
    /* the group is as good as before */
    c = small_config();
    EXPECT_OK(job, kvs_dcp_open(&d, &c, job->c, &job->err));
    EXPECT(job, d != NULL);
    kvs_dcp_close(d);
}

/* A shard of this rank; `other` says what it has that rank 0's has not. */
static kvs_cache *shard(rank_job *job, const char *other)
{
    static const float two[2] = {1.0f, 2.0f};
    kvs_cache_config c = kvs_cache_config_default();
    c.kv = strcmp(other, "k_scale") == 0 || strcmp(other, "one") == 0 ? KVS_KV_FP8 : KVS_KV_FP8_DS_MLA;
    c.n_layer = strcmp(other, "layers") == 0 ? 3 : 2;
    c.n_index_layer = c.kv == KVS_KV_FP8 ? 0 : 1;
    c.n_page = 1;
    c.dcp = 2;
    c.rank = job->rank;
    c.k_scale = strcmp(other, "k_scale") == 0 ? two : NULL;
    c.scale_rule = strcmp(other, "scale rule") == 0 ? KVS_SCALE_EXACT : KVS_SCALE_POW2;
    c.hadamard = strcmp(other, "hadamard") == 0;
    kvs_cache *cache = NULL;
    EXPECT_OK(job, kvs_cache_create(&cache, &c, &job->err));
    return cache;
}

static void differ_in_cache(rank_job *job)
{
    static const struct {
        const char *other, *says;
    } list[] = {{"layers", "handshake: cache layers is \"2\" on rank 0 and \"3\" on rank 1"},
                {"hadamard", "handshake: cache is"},
                {"scale rule", "handshake: cache scale rule is \"pow2\" on rank 0 and \"exact\""},
                {"k_scale", "handshake: cache k_scale is"},
                {"", NULL}};
    for (size_t i = 0; i < UNIT_COUNT(list); i++) {
        const char *plain = strcmp(list[i].other, "k_scale") == 0 ? "one" : "";
        kvs_cache *cache = shard(job, job->rank == 1 ? list[i].other : plain);
        kvs_dcp_config c = small_config();
        c.kv = *plain ? KVS_KV_FP8 : KVS_KV_FP8_DS_MLA;
        c.n_index_head = *plain ? 0 : c.n_index_head;
        c.topk = *plain ? 0 : c.topk;
        c.cache = cache;
        kvs_dcp *d = NULL;
        if (list[i].says != NULL) {
            EXPECT_FAIL(job, kvs_dcp_open(&d, &c, job->c, &job->err), KVS_INVALID, list[i].says);
        } else {
            EXPECT_OK(job, kvs_dcp_open(&d, &c, job->c, &job->err));
        }
        kvs_dcp_close(d);
        d = NULL;
        c.cache = job->rank == 1 ? NULL : cache;
        EXPECT_FAIL(job, kvs_dcp_open(&d, &c, job->c, &job->err), KVS_INVALID, "handshake: ");
        c.cache = cache;
        c.dcp = 1;
        EXPECT_FAIL(job, kvs_dcp_open(&d, &c, job->c, &job->err), KVS_INVALID,
                    "cache is a shard of 2 ranks, dcp is 1");
        kvs_cache_free(cache);
    }
}

static void caches_that_differ_are_refused_by_name(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, differ_in_cache, NULL);
}

static void a_different_setup_is_refused_by_name(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, differ, NULL);
}

/* ---- a step ---------------------------------------------------------------------------------- */

enum { MAX_ROW = 8, HEADS = 4 };

typedef struct buffers {
    bf16 latent[MAX_ROW][512], rope[MAX_ROW][64], key[MAX_ROW][128];
    bf16 q[MAX_ROW][HEADS][576], iq[MAX_ROW][4][128];
    float w[MAX_ROW][4];
    float out[MAX_ROW][HEADS][512], lse[MAX_ROW][HEADS];
} buffers;

static float noise(int64_t a, int64_t b)
{
    const uint64_t u = ((uint64_t)a * 1000003 + (uint64_t)b + 77) * UINT64_C(0x9E3779B97F4A7C15);
    return (float)(u >> 40) * 0x1p-23f - 1.0f;
}

static void fill_row(bf16 *x, int64_t n, int64_t stream)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = bf16_from_f32(noise(stream, i));
    }
}

/* Rows of positions first .. first + n - 1; heads are those of rank `rank` of tp. */
static void fill_step(buffers *b, int64_t first, int32_t n, int32_t rank, int32_t tp)
{
    const int32_t local = HEADS / tp;
    for (int32_t t = 0; t < n; t++) {
        const int64_t pos = first + t;
        fill_row(b->latent[t], 512, 10 * pos);
        fill_row(b->rope[t], 64, 10 * pos + 1);
        fill_row(b->key[t], 128, 10 * pos + 2);
        for (int32_t h = 0; h < 4; h++) {
            fill_row(b->iq[t][h], 128, 1000 * (pos + 1) + h);
            b->w[t][h] = noise(pos, h);
        }
        bf16 *q = &b->q[0][0][0] + (size_t)t * (size_t)local * 576;
        for (int32_t h = 0; h < local; h++) {
            fill_row(q + h * 576, 576, 7000 * (pos + 1) + rank * local + h);
        }
    }
}

typedef struct rig {
    kvs_dcp *d;
    kvs_cache *c;
    buffers *b;
    int32_t table[8];
} rig;

static void rig_open(rig *r, rank_job *job, int32_t dcp)
{
    memset(r, 0, sizeof *r);
    kvs_dcp_config dc = small_config();
    dc.tp = job->n;
    dc.dcp = dcp;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = KVS_KV_BF16;
    cc.n_index_layer = 1;
    cc.dcp = dcp;
    cc.rank = job->rank % dcp;
    cc.n_page = 10;
    r->b = calloc(1, sizeof *r->b);
    for (int32_t i = 0; i < 8; i++) {
        r->table[i] = 9 - i;
    }
    EXPECT_OK(job, kvs_dcp_open(&r->d, &dc, job->c, &job->err));
    EXPECT_OK(job, kvs_cache_create(&r->c, &cc, &job->err));
    memset(r->c->map, 0xFF, r->c->map_bytes);
}

static void rig_close(rig *r)
{
    kvs_dcp_close(r->d);
    kvs_cache_free(r->c);
    free(r->b);
}

static void rig_plan(rig *r, rank_job *job, int64_t seq_len, int32_t q_len)
{
    const kvs_batch b = {.n_req = 1,
                         .q_len = &q_len,
                         .seq_len = &seq_len,
                         .table = r->table,
                         .table_stride = 8,
                         .n_page = 10};
    EXPECT_OK(job, kvs_dcp_plan(r->d, &b, &job->err));
    fill_step(r->b, seq_len - q_len, q_len, job->rank, job->n);
}

static void rig_write(rig *r, rank_job *job)
{
    const buffers *b = r->b;
    EXPECT_OK(job, kvs_dcp_write(r->d, r->c, 0, b->latent, b->rope, KVS_DTYPE_BF16, &job->err));
    EXPECT_OK(job, kvs_dcp_write_index(r->d, r->c, 0, b->key, KVS_DTYPE_BF16, &job->err));
}

static kvs_status rig_select(rig *r, rank_job *job)
{
    return kvs_dcp_select(r->d, r->c, 0, r->b->iq, KVS_DTYPE_BF16, &r->b->w[0][0], &job->err);
}

static kvs_status rig_attend(rig *r, rank_job *job, kvs_attend how)
{
    return kvs_dcp_attend(r->d, r->c, 0, how, r->b->q, KVS_DTYPE_BF16, r->b->out, KVS_DTYPE_F32,
                          &r->b->lse[0][0], &job->err);
}

/* Tokens 0 .. n - 1, in steps of 8. */
static void rig_history(rig *r, rank_job *job, int64_t n)
{
    for (int64_t at = 0; at < n; at += MAX_ROW) {
        const int64_t end = at + MAX_ROW < n ? at + MAX_ROW : n;
        rig_plan(r, job, end, (int32_t)(end - at));
        rig_write(r, job);
    }
}

/* ---- ranks that do different things ---------------------------------------------------------- */

enum { SHORT_MS = 3000 };

static void skip_attend(rank_job *job)
{
    rig r;
    rig_open(&r, job, 2);
    rig_history(&r, job, 40);
    rig_plan(&r, job, 41, 1);
    rig_write(&r, job);
    if (job->rank == 1) { /* it thinks that the client has gone */
        while (!comm_failed(job->c)) {
            sleep_ms(20);
        }
    }
    EXPECT_FAIL(job, rig_attend(&r, job, KVS_ATTEND_DENSE), KVS_PEER,
                "rank 1 more than 3000 ms late for all_gather");
    char history[4096];
    comm_history(job->c, history, sizeof history);
    EXPECT(job, strstr(history, "all_gather") != NULL);
    rig_close(&r);
}

static void a_rank_that_leaves_a_step_is_named(void **state)
{
    (void)state;
    const comm_config cfg = test_config(SHORT_MS);
    ranks_run(2, &cfg, skip_attend, NULL);
}

static void call_another(rank_job *job)
{
    rig r;
    rig_open(&r, job, 2);
    rig_history(&r, job, 40);
    rig_plan(&r, job, 42, 2);
    rig_write(&r, job);
    const kvs_status st =
        job->rank == 0 ? rig_select(&r, job) : rig_attend(&r, job, KVS_ATTEND_DENSE);
    EXPECT(job, st == KVS_PEER);
    EXPECT(job, rank_says(job, "rank 1 called all_gather of"));
    rig_close(&r);
}

static void plan_another(rank_job *job)
{
    rig r;
    rig_open(&r, job, 2);
    rig_history(&r, job, 40);
    rig_plan(&r, job, 42, job->rank == 0 ? 2 : 1);
    rig_write(&r, job);
    EXPECT_FAIL(job, rig_attend(&r, job, KVS_ATTEND_DENSE), KVS_PEER,
                "rank 1 called all_gather of");
    rig_close(&r);
}

static void ranks_that_differ_in_a_step_are_named(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, call_another, NULL);
    ranks_run(2, &cfg, plan_another, NULL);
}

/* ---- a rank without a token ------------------------------------------------------------------ */

typedef struct answer {
    float out[3][HEADS][512], lse[3][HEADS];
} answer;

static const kvs_attend forms[3] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};

/* One token at position 40, which rank 0 of 2 stores; rank 1 is given NaN in its place. */
static void one_token(rank_job *job, int32_t dcp)
{
    answer *to = job->ctx;
    rig r;
    rig_open(&r, job, dcp);
    rig_history(&r, job, 40);
    rig_plan(&r, job, 41, 1);
    const int32_t is_owner = job->rank % dcp == 0;
    if (!is_owner) {
        memset(r.b->latent, 0xFF, sizeof r.b->latent);
        memset(r.b->rope, 0xFF, sizeof r.b->rope);
        memset(r.b->key, 0xFF, sizeof r.b->key);
    }
    const size_t bytes = r.c->map_bytes;
    uint8_t *before = malloc(bytes);
    memcpy(before, r.c->map, bytes);
    rig_write(&r, job);
    EXPECT(job, (memcmp(before, r.c->map, bytes) == 0) == !is_owner);
    kvs_cache_info info;
    kvs_cache_get_info(r.c, &info);
    EXPECT(job, info.n_nan == 0);
    EXPECT(job, info.n_row_written == (uint64_t)(dcp == 1 ? 41 : is_owner ? 21 : 20));
    memcpy(before, r.c->map, bytes);
    EXPECT_OK(job, rig_select(&r, job));
    const int32_t local = HEADS / job->n;
    for (int32_t m = 0; m < 3; m++) {
        EXPECT_OK(job, rig_attend(&r, job, forms[m]));
        memcpy(to->out[m][job->rank * local], r.b->out, (size_t)local * 512 * sizeof(float));
        memcpy(&to->lse[m][job->rank * local], r.b->lse, (size_t)local * sizeof(float));
    }
    EXPECT_OK(job, kvs_dcp_finish(r.d, NULL, &job->err));
    EXPECT(job, memcmp(before, r.c->map, bytes) == 0); /* reading writes nothing */
    free(before);
    rig_close(&r);
}

static void one_token_dcp_1(rank_job *job)
{
    one_token(job, 1);
}

static void one_token_dcp_2(rank_job *job)
{
    one_token(job, 2);
}

static void a_rank_that_stores_nothing_takes_part(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    static answer alone;
    static answer shared;
    ranks_run(2, &cfg, one_token_dcp_1, &alone);
    ranks_run(2, &cfg, one_token_dcp_2, &shared);
    assert_memory_equal(&alone, &shared, sizeof alone);
    assert_true(isfinite(alone.lse[0][0]) && isfinite(alone.out[2][3][511]));
}

/* ---- every combination ----------------------------------------------------------------------- */

typedef struct cell {
    kvs_dcp_config c;
    int32_t works; /* by the contract */
} cell;

static void open_cell(rank_job *job)
{
    const cell *x = job->ctx;
    kvs_dcp *d = NULL;
    const kvs_status st = kvs_dcp_open(&d, &x->c, job->c, &job->err);
    EXPECT(job, (st == KVS_OK) == (x->works != 0));
    EXPECT(job, (d != NULL) == (x->works != 0));
    if (st != KVS_OK) {
        /* a refusal has a way out */
        EXPECT(job, rank_says(job, "use") || rank_says(job, "leave"));
    }
    kvs_dcp_close(d);
}

/* Row format x index keys x indexer x fp8 queries x DCP size x exchange: opened, or refused as the number
 * contract says. */
static void every_combination_works_or_is_refused(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    int32_t n_works = 0;
    for (int32_t i = 0; i < 5 * 3 * 2 * 2 * 8 * 2; i++) {
        int32_t k = i;
        cell x = {.c = kvs_dcp_config_default()};
        const kvs_kv_format kv = (kvs_kv_format)(k % 5);
        k /= 5;
        const kvs_index_format index = (kvs_index_format)(k % 3);
        k /= 3;
        const int32_t indexer = k % 2;
        k /= 2;
        const int32_t q_fp8 = k % 2;
        k /= 2;
        const int32_t dcp = 1 + k % 8;
        k /= 8;
        x.c.dcp = dcp;
        x.c.kv = kv;
        x.c.index_kv = index;
        x.c.n_index_head = indexer ? 2 : 0;
        x.c.topk = 2;
        x.c.q_fp8 = q_fp8;
        x.c.exchange = k ? KVS_EXCHANGE_AG_RS : KVS_EXCHANGE_A2A;
        x.c.n_head = dcp;
        x.c.softmax_scale = 1.0f;
        x.c.max_rows = 1;
        x.c.max_reqs = 1;
        x.c.max_len = 64;
        const int32_t size = dcp == 1 || dcp == 2 || dcp == 4 || dcp == 8;
        const int32_t shared = kv == KVS_KV_AUTO || kv == KVS_KV_FP8_DS_MLA;
        const int32_t pair = indexer ? kv != KVS_KV_FP8 && !(shared && index == KVS_INDEX_F32)
                                     : index == KVS_INDEX_AUTO;
        x.works = size && pair && (!q_fp8 || kv == KVS_KV_FP8);
        n_works += x.works;
        /* what is refused for its formats is refused at any size: two of them will do */
        if (!x.works && size && dcp > 2) {
            continue;
        }
        ranks_run(dcp, &cfg, open_cell, &x);
    }
    /* with an indexer 10 pairs of formats, without 5, and fp8 queries; 4 sizes, 2 exchanges */
    assert_int_equal(n_works, (10 + 5 + 1) * 4 * 2);
}

/* ---- what costs equal bits says so ------------------------------------------------------------ */

typedef struct heard {
    int32_t n;
    char text[256];
} heard;

static void hear(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text)
{
    heard *h = ctx;
    if (level == KVS_LOG_WARN && sys == KVS_LOG_DCP) {
        h->n++;
        snprintf(h->text, sizeof h->text, "%s", text);
    }
}

static void open_exchange(rank_job *job)
{
    kvs_dcp_config c = small_config();
    c.exchange = *(const kvs_exchange *)job->ctx;
    kvs_dcp *d = NULL;
    EXPECT_OK(job, kvs_dcp_open(&d, &c, job->c, &job->err));
    kvs_dcp_close(d);
}

/* Once per group, with the way out. */
static void an_exchange_that_moves_bits_warns(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    heard h = {0};
    const kvs_logger logger = {hear, &h};
    kvs_log_set(&logger);
    kvs_exchange exchange = KVS_EXCHANGE_A2A;
    ranks_run(2, &cfg, open_exchange, &exchange);
    const int32_t n_a2a = h.n;
    exchange = KVS_EXCHANGE_AG_RS;
    ranks_run(2, &cfg, open_exchange, &exchange);
    kvs_log_set(NULL);
    assert_int_equal(n_a2a, 0);
    assert_int_equal(h.n, 1);
    assert_non_null(strstr(h.text, "ag_rs"));
    assert_non_null(strstr(h.text, "use a2a"));
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_different_setup_is_refused_by_name),
        cmocka_unit_test(caches_that_differ_are_refused_by_name),
        cmocka_unit_test(a_rank_that_leaves_a_step_is_named),
        cmocka_unit_test(ranks_that_differ_in_a_step_are_named),
        cmocka_unit_test(a_rank_that_stores_nothing_takes_part),
        cmocka_unit_test(every_combination_works_or_is_refused),
        cmocka_unit_test(an_exchange_that_moves_bits_warns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
