/* Attention output, LSE and selected sets are the same bits for dcp 1, 2, 4 and 8, for a row alone and in
 * company, for every number of threads and every way of cutting the work; each rank reads its own rows only
 * and moves exactly the bytes that the set-up says.
 *
 * tp is fixed at 8, so that dcp 1 calls the kernels with an eighth of the heads that dcp 8 does. The kernel
 * variant is the best the machine has unless KVS_CPU caps it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "shard/shard.h"
#include "world.h"

static const int32_t k_dcp[] = {1, 2, 4, 8};

/* Runs the scenario at every DCP size and compares with dcp 1. */
static void all_sizes(scenario s, const char *what)
{
    outcome first;
    for (size_t i = 0; i < sizeof k_dcp / sizeof *k_dcp; i++) {
        char text[160];
        outcome o;
        s.dcp = k_dcp[i];
        world_run(&s, &o);
        if (i == 0) {
            first = o;
            continue;
        }
        snprintf(text, sizeof text, "%s, dcp %d against 1", what, s.dcp);
        same_bits(&first, &o, text);
        outcome_fini(&o);
    }
    outcome_fini(&first);
}

static void set_requests(scenario *s, int32_t n, const int64_t *seq_len, const int32_t *q_len)
{
    s->n_req = n;
    for (int32_t i = 0; i < n; i++) {
        s->req_id[i] = i;
        s->seq_len[i] = seq_len[i];
        s->q_len[i] = q_len[i];
    }
}

/* Decode, MTP and prefill rows together; requests shorter than the DCP size; one of no tokens. */
static void set_mixed(scenario *s)
{
    static const int64_t seq[] = {1, 5, 700, 0, 131, 64, 129, 520};
    static const int32_t q[] = {1, 2, 4, 0, 8, 1, 40, 3};
    set_requests(s, 8, seq, q);
}

static const kvs_kv_format k_formats[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8_DS_MLA};

static void test_sparse_formats(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof k_formats / sizeof *k_formats; f++) {
        scenario s = scenario_default();
        set_mixed(&s);
        s.kv = k_formats[f];
        s.q_type = s.kv == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
        all_sizes(s, "sparse, mixed batch");
    }
}

static void test_dense_formats(void **state)
{
    (void)state;
    static const kvs_kv_format fmt[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA};
    for (size_t f = 0; f < sizeof fmt / sizeof *fmt; f++) {
        scenario s = scenario_default();
        set_mixed(&s);
        s.kv = fmt[f];
        s.how = KVS_ATTEND_DENSE;
        s.n_index_head = 0;
        s.q_fp8 = s.kv == KVS_KV_FP8;
        all_sizes(s, "dense, mixed batch");
    }
}

static void test_context_path(void **state)
{
    (void)state;
    static const int64_t seq[] = {1100, 513, 7};
    static const int32_t q[] = {70, 1, 7};
    for (size_t f = 0; f < sizeof k_formats / sizeof *k_formats; f++) {
        scenario s = scenario_default();
        set_requests(&s, 3, seq, q);
        s.kv = k_formats[f];
        s.how = KVS_ATTEND_CONTEXT;
        s.n_index_head = 0;
        all_sizes(s, "context path");
    }
}

static void test_interleaves(void **state)
{
    (void)state;
    for (int32_t i = 1; i <= 64; i *= 2) {
        scenario s = scenario_default();
        set_mixed(&s);
        s.interleave = i;
        all_sizes(s, "sparse, interleave");
        s.how = KVS_ATTEND_DENSE;
        s.n_index_head = 0;
        all_sizes(s, "dense, interleave");
    }
}

static void test_head_counts(void **state)
{
    (void)state;
    for (int32_t heads = 8; heads <= 128; heads += 8) {
        scenario s = scenario_default();
        static const int64_t seq[] = {200, 3};
        static const int32_t q[] = {2, 1};
        set_requests(&s, 2, seq, q);
        s.n_head = heads;
        all_sizes(s, "sparse, heads");
    }
}

static void test_query_lengths(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 8; n++) {
        const int64_t seq[] = {333, 64 + n, n};
        const int32_t q[] = {n, n, n};
        scenario s = scenario_default();
        set_requests(&s, 3, seq, q);
        all_sizes(s, "sparse, query length");
        s.how = KVS_ATTEND_DENSE;
        s.n_index_head = 0;
        all_sizes(s, "dense, query length");
    }
}

/* Past one segment of a lane: 8 lanes of more than 2048 keys. */
static void test_long_lanes(void **state)
{
    (void)state;
    static const int64_t seq[] = {8 * 2048 + 77};
    static const int32_t q[] = {1};
    scenario s = scenario_default();
    set_requests(&s, 1, seq, q);
    s.n_head = 8;
    s.how = KVS_ATTEND_DENSE;
    s.kv = KVS_KV_BF16;
    s.n_index_head = 0;
    all_sizes(s, "dense, several segments in a lane");
}

/* All ids of a row on rank 3 of 8; none at all; every second row empty. */
static void ids_uneven(int32_t req_id, int64_t bound, int32_t topk, int32_t *out)
{
    for (int32_t i = 0; i < topk; i++) {
        const int64_t pos = req_id % 3 == 0 ? 3 + 8 * (int64_t)i : (int64_t)i * 5;
        out[topk - 1 - i] = req_id % 3 == 1 || pos >= bound ? -1 : (int32_t)pos;
    }
}

static void test_rows_empty_on_ranks(void **state)
{
    (void)state;
    static const int64_t seq[] = {400, 300, 200, 100, 2};
    static const int32_t q[] = {3, 2, 1, 4, 1};
    for (size_t f = 0; f < sizeof k_formats / sizeof *k_formats; f++) {
        scenario s = scenario_default();
        set_requests(&s, 5, seq, q);
        s.kv = k_formats[f];
        s.select = WORLD_IDS;
        s.ids = ids_uneven;
        all_sizes(s, "rows empty on some or all ranks");
        outcome o;
        world_run(&s, &o);
        /* rows 3 and 4 belong to request 1, whose ids are all -1 */
        for (int32_t row = 3; row < 5; row++) {
            for (int32_t h = 0; h < s.n_head; h++) {
                assert_true(o.lse[row * s.n_head + h] == -(float)__builtin_inf());
                assert_true(o.out[(int64_t)(row * s.n_head + h) * 512 + 511] == 0.0f);
            }
        }
        outcome_fini(&o);
    }
}

static void test_no_requests(void **state)
{
    (void)state;
    scenario s = scenario_default();
    s.n_req = 0;
    all_sizes(s, "no requests");
    static const int64_t seq[] = {9, 100};
    static const int32_t q[] = {0, 0};
    set_requests(&s, 2, seq, q);
    all_sizes(s, "requests without new tokens");
}

/* A row computed alone is the row of the batch: batch of 64 with 1 to 3 rows each. */
static void test_row_alone(void **state)
{
    (void)state;
    static const kvs_attend how[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    for (size_t m = 0; m < 3; m++) {
        scenario s = scenario_default();
        s.n_req = 64;
        s.how = how[m];
        s.n_index_head = s.how == KVS_ATTEND_SPARSE ? 4 : 0;
        s.dcp = 4;
        for (int32_t i = 0; i < 64; i++) {
            s.req_id[i] = i;
            s.q_len[i] = 1 + i % 3;
            s.seq_len[i] = 3 + (i * 37) % 300;
        }
        outcome all;
        world_run(&s, &all);
        static const int32_t pick[] = {0, 17, 41, 63};
        for (size_t p = 0; p < 4; p++) {
            int32_t row = 0;
            for (int32_t i = 0; i < pick[p]; i++) {
                row += s.q_len[i];
            }
            scenario one = s;
            one.n_req = 1;
            one.req_id[0] = pick[p];
            one.seq_len[0] = s.seq_len[pick[p]];
            one.q_len[0] = 1; /* the last row of the request, alone */
            row += s.q_len[pick[p]] - 1;
            outcome o;
            world_run(&one, &o);
            assert_memory_equal(o.lse, all.lse + (int64_t)row * s.n_head,
                                (size_t)s.n_head * sizeof(float));
            assert_memory_equal(o.out, all.out + (int64_t)row * s.n_head * 512,
                                (size_t)s.n_head * 512 * sizeof(float));
            outcome_fini(&o);
        }
        outcome_fini(&all);
    }
}

/* Neither threads, nor the rows of a step, nor how the cache was written move a bit. */
static void test_threads_and_chunks(void **state)
{
    (void)state;
    static const kvs_attend how[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    for (size_t m = 0; m < 3; m++) {
        scenario s = scenario_default();
        set_mixed(&s);
        s.how = how[m];
        s.n_index_head = s.how == KVS_ATTEND_SPARSE ? 4 : 0;
        s.dcp = 2;
        s.n_head = 128;
        outcome a;
        outcome b;
        world_run(&s, &a);
        s.threads = 2;
        s.write_chunk = 13;
        world_run(&s, &b);
        same_bits(&a, &b, "2 threads and writes in pieces of 13 against 1 thread");
        outcome_fini(&b);
        /* a handle with room for more rows exchanges in other chunks */
        s.threads = 3;
        s.max_rows = 1000;
        world_run(&s, &b);
        same_bits(&a, &b, "3 threads, other chunks");
        outcome_fini(&b);
        outcome_fini(&a);
    }
}

/* Ranks run one at a time between collectives, the others' caches unreadable; counters are exact. */
static void test_own_rows_only(void **state)
{
    (void)state;
    static const kvs_attend how[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    for (size_t m = 0; m < 3; m++) {
        for (size_t i = 0; i < sizeof k_dcp / sizeof *k_dcp; i++) {
            scenario s = scenario_default();
            static const int64_t seq[] = {700, 5, 131};
            static const int32_t q[] = {1, 1, 1};
            set_requests(&s, 3, seq, q);
            s.how = how[m];
            s.n_index_head = s.how == KVS_ATTEND_SPARSE ? 4 : 0;
            s.dcp = k_dcp[i];
            s.serialise = 1;
            outcome o;
            world_run(&s, &o);
            for (int32_t r = 0; r < s.tp; r++) {
                const shard_geom g = {s.dcp, s.interleave, r % s.dcp};
                const kvs_step_info *in = &o.info[r];
                uint64_t rows = 0;
                for (int32_t t = 0; t < 3; t++) {
                    if (s.how != KVS_ATTEND_SPARSE) {
                        rows += (uint64_t)shard_len(g, seq[t]);
                        continue;
                    }
                    for (int32_t k = 0; k < o.count[t]; k++) {
                        const kvs_pos p = {o.ids[t * s.topk + k]};
                        rows += shard_owner(g, p) == g.rank;
                    }
                }
                assert_int_equal(in->n_row_read, rows);
                const uint64_t peers = (uint64_t)s.dcp - 1;
                const uint64_t pairs = 3 * (uint64_t)s.n_head / (uint64_t)s.tp;
                if (s.how == KVS_ATTEND_CONTEXT) {
                    uint64_t ctx = 0;
                    for (int32_t t = 0; t < 3; t++) {
                        for (int64_t at = 0; at < seq[t]; at += 512) {
                            const int64_t end = at + 512 < seq[t] ? at + 512 : seq[t];
                            ctx += (uint64_t)shard_range_max(g, at, end);
                        }
                    }
                    assert_int_equal(in->bytes_context, peers * ctx * 1152);
                    assert_int_equal(in->bytes_q + in->bytes_partial + in->bytes_select, 0);
                    continue;
                }
                assert_int_equal(in->n_key_attended, rows);
                assert_int_equal(in->bytes_q, peers * pairs * 1152);
                assert_int_equal(in->bytes_partial, peers * pairs * 513 * 4);
                if (s.how == KVS_ATTEND_SPARSE) {
                    int64_t k = shard_len_max(g, 700);
                    k = k < s.topk ? k : s.topk;
                    assert_int_equal(in->bytes_select, peers * 3 * (2 * (uint64_t)k + 1) * 4);
                    uint64_t scored = 0;
                    for (int32_t t = 0; t < 3; t++) {
                        scored += (uint64_t)shard_len(g, seq[t]);
                    }
                    assert_int_equal(in->n_key_scored, scored);
                }
            }
            outcome_fini(&o);
        }
    }
}

/* Workspaces do not grow with the context: only the block tables do. */
static void test_workspace_is_bounded(void **state)
{
    (void)state;
    kvs_comm *comm = NULL;
    kvs_comm_config cc = kvs_comm_config_default();
    kvs_error err;
    int64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvs_comm_open_self(&comm, &cc, &err), KVS_OK);
        kvs_dcp_config dc = kvs_dcp_config_default();
        dc.n_head = 16;
        dc.n_index_head = 64;
        dc.topk = 2048;
        dc.softmax_scale = 0.1f;
        dc.max_reqs = 1;
        dc.max_len = i == 0 ? 65536 : 1048576;
        kvs_dcp *d = NULL;
        assert_int_equal(kvs_dcp_open(&d, &dc, comm, &err), KVS_OK);
        bytes[i] = kvs_dcp_workspace_bytes(d) - kvs_table_width(1, dc.max_len) * 4;
        kvs_dcp_close(d);
        kvs_comm_close(comm);
    }
    assert_int_equal(bytes[0], bytes[1]);
}

/* ag_rs and the sizes that do not divide 8 agree to tolerance. */
static void close_to(const outcome *a, const outcome *b, double tol, const char *what)
{
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        const double d = (double)a->lse[i] - (double)b->lse[i];
        if (!(a->lse[i] == b->lse[i] || (d < 1e-5 && d > -1e-5))) {
            fail_msg("%s: lse %lld: %g and %g", what, (long long)i, (double)a->lse[i],
                     (double)b->lse[i]);
        }
    }
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head * 512; i++) {
        const double d = (double)a->out[i] - (double)b->out[i];
        if (!(d < tol && d > -tol)) {
            fail_msg("%s: out %lld: %g and %g", what, (long long)i, (double)a->out[i],
                     (double)b->out[i]);
        }
    }
}

static void test_ag_rs_agrees(void **state)
{
    (void)state;
    scenario s = scenario_default();
    set_mixed(&s);
    outcome a;
    outcome b;
    world_run(&s, &a);
    s.exchange = KVS_EXCHANGE_AG_RS;
    for (size_t i = 0; i < sizeof k_dcp / sizeof *k_dcp; i++) {
        s.dcp = k_dcp[i];
        world_run(&s, &b);
        close_to(&a, &b, 2e-6, "ag_rs");
        outcome_fini(&b);
    }
    outcome_fini(&a);
}

static void test_other_sizes_agree(void **state)
{
    (void)state;
    static const int32_t odd[] = {3, 5, 6, 7};
    for (int32_t m = 0; m < 2; m++) {
        scenario s = scenario_default();
        set_mixed(&s);
        s.how = m ? KVS_ATTEND_DENSE : KVS_ATTEND_SPARSE;
        s.n_index_head = m ? 0 : 4;
        for (size_t i = 0; i < 4; i++) {
            outcome a;
            outcome b;
            s.tp = odd[i];
            s.n_head = 2 * odd[i];
            s.dcp = 1;
            world_run(&s, &a);
            s.dcp = odd[i];
            s.kernel_level = 1;
            world_run(&s, &b);
            close_to(&a, &b, 0.02, "a size that does not divide 8");
            s.kernel_level = 0;
            outcome_fini(&b);
            world_try(&s, &b);
            for (int32_t r = 0; r < s.tp; r++) {
                assert_true(b.status[r] < 0);
            }
            outcome_fini(&a);
            outcome_fini(&b);
        }
    }
}

/* "brief" runs the part that the sanitizers repeat; "rest" the other; no argument all. */
int main(int argc, char **argv)
{
    const struct CMUnitTest brief[] = {
        cmocka_unit_test(test_sparse_formats),      cmocka_unit_test(test_dense_formats),
        cmocka_unit_test(test_rows_empty_on_ranks), cmocka_unit_test(test_no_requests),
        cmocka_unit_test(test_own_rows_only),       cmocka_unit_test(test_workspace_is_bounded),
        cmocka_unit_test(test_ag_rs_agrees),
    };
    const struct CMUnitTest rest[] = {
        cmocka_unit_test(test_context_path),          cmocka_unit_test(test_interleaves),
        cmocka_unit_test(test_head_counts),           cmocka_unit_test(test_query_lengths),
        cmocka_unit_test(test_long_lanes),            cmocka_unit_test(test_row_alone),
        cmocka_unit_test(test_threads_and_chunks),    cmocka_unit_test(test_other_sizes_agree),
    };
    const char *part = argc > 1 ? argv[1] : "";
    int failed = 0;
    if (strcmp(part, "rest") != 0) {
        failed += cmocka_run_group_tests(brief, NULL, NULL);
    }
    if (strcmp(part, "brief") != 0) {
        failed += cmocka_run_group_tests(rest, NULL, NULL);
    }
    return failed;
}
