/* What ranks agree on at start: the handshake names the field, both values and the rank, with the
 * same words everywhere; comm_agree; the public functions and their settings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/mem.h"
#include "kvspan/comm.h"
#include "kvspan/log.h"
#include "ranks.h"

/* ---- handshake --------------------------------------------------------------------------------- */

static const comm_field g_base[] = {
    {"page", "64"},       {"dcp", "4"},    {"interleave", "1"},
    {"kv", "fp8_ds_mla"}, {"model", "7f"}, {"kernels", "attn=ref"},
    {"build", ""},
};
enum { N_FIELD = 7 };

typedef struct shake_case {
    int32_t rank;  /* that differs */
    int32_t field; /* which field */
    const char *name;
    const char *value;
    int32_t n_field; /* how many that rank gives */
    kvs_status st;
    const char *want;
} shake_case;

static void shake_rank(rank_job *job)
{
    const shake_case *k = job->ctx;
    comm_field f[N_FIELD + 1];
    memcpy(f, g_base, sizeof g_base);
    f[N_FIELD] = (comm_field){"extra", "1"};
    int32_t n = N_FIELD;
    if (job->rank == k->rank) {
        f[k->field] = (comm_field){k->name, k->value};
        n = k->n_field;
    }
    /* The message is the whole text on every rank, so it is the same on all. */
    const kvs_status st = comm_handshake(job->c, f, n, &job->err);
    EXPECT(job, st == k->st);
    if (st < 0 && strcmp(job->err.text, k->want) != 0) {
        rank_note(job, __FILE__, __LINE__, "\"%s\" is not \"%s\"", job->err.text, k->want);
    }
    EXPECT(job, job->err.code == (st < 0 ? st : 0));
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    EXPECT_OK(job, comm_handshake(job->c, g_base, N_FIELD, &job->err));
}

static void run_shake(int32_t n, shake_case k)
{
    const comm_config cfg = test_config(LONG_MS);
    const int64_t before = mem_stats_get().n_live;
    ranks_run(n, &cfg, shake_rank, &k);
    assert_int_equal(mem_stats_get().n_live, before);
}

static void test_handshake_of_equals(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 8; n++) {
        run_shake(n, (shake_case){.rank = -1});
    }
}

static void test_handshake_names_field_values_and_rank(void **state)
{
    (void)state;
    static const char *const other[N_FIELD] = {"32", "8", "16", "bf16", "80", "attn=avx2", "x"};
    for (int32_t i = 0; i < N_FIELD; i++) {
        char want[232];
        snprintf(want, sizeof want,
                 "handshake: %s is \"%s\" on rank 0 and \"%s\" on rank 2; start all ranks with the "
                 "same",
                 g_base[i].name, g_base[i].value, other[i]);
        run_shake(4, (shake_case){2, i, g_base[i].name, other[i], N_FIELD, KVS_INVALID, want});
    }
}

/* Rank 0 is the one that the others are compared with; the first of them is named. */
static void test_handshake_when_rank_0_differs(void **state)
{
    (void)state;
    run_shake(3, (shake_case){0, 1, "dcp", "2", N_FIELD, KVS_INVALID,
                              "handshake: dcp is \"2\" on rank 0 and \"4\" on rank 1; start all "
                              "ranks with the same"});
}

static void test_handshake_of_different_lists(void **state)
{
    (void)state;
    run_shake(3, (shake_case){1, 2, "interleaf", "1", N_FIELD, KVS_INVALID,
                              "handshake: field 2 is \"interleave\" on rank 0 and \"interleaf\" on "
                              "rank 1; start all ranks from one build"});
    run_shake(3, (shake_case){2, 0, "page", "64", N_FIELD + 1, KVS_INVALID,
                              "handshake: rank 0 has 7 fields and rank 2 has 8: \"extra\" is only "
                              "on rank 2; start all ranks from one build"});
    run_shake(3, (shake_case){2, 0, "page", "64", N_FIELD - 2, KVS_INVALID,
                              "handshake: rank 0 has 7 fields and rank 2 has 5: \"kernels\" is "
                              "only on rank 0; start all ranks from one build"});
    run_shake(2, (shake_case){1, 0, "page", "64", 0, KVS_INVALID,
                              "handshake: rank 0 has 7 fields and rank 1 has 0: \"page\" is only "
                              "on rank 0; start all ranks from one build"});
}

/* A bad argument on one rank is a refusal on all, also for a group of one. */
static void test_handshake_of_bad_arguments(void **state)
{
    (void)state;
    run_shake(3, (shake_case){1, 3, "kv", NULL, N_FIELD, KVS_INVALID,
                              "rank 1: handshake: field 3 has no value"});
    run_shake(1, (shake_case){0, 3, NULL, "x", N_FIELD, KVS_INVALID,
                              "rank 0: handshake: field 3 has no name"});
    run_shake(2, (shake_case){0, 0, "page", "64", -1, KVS_INVALID,
                              "rank 0: handshake: -1 fields; give a list of 0 or more"});
    char *huge = malloc((1 << 20) + 1);
    memset(huge, 'x', 1 << 20);
    huge[1 << 20] = '\0';
    run_shake(2, (shake_case){1, 5, "kernels", huge, N_FIELD, KVS_LIMIT,
                              "rank 1: handshake: over 1048576 bytes at field 5 \"kernels\""});
    free(huge);
}

/* Texts of very different lengths, none at all. */
static void lengths_rank(rank_job *job)
{
    char text[3000];
    memset(text, 'a' + job->rank, sizeof text);
    text[job->rank * 900] = '\0';
    const comm_field f = {"kernels", text};
    EXPECT_FAIL(job, comm_handshake(job->c, &f, 1, &job->err), KVS_INVALID,
                "kernels is \"\" on rank 0 and \"bbbbbbbb");
    EXPECT(job, rank_says(job, "on rank 1"));
    EXPECT_OK(job, comm_handshake(job->c, NULL, 0, &job->err));
}

static void test_handshake_of_any_length(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(4, &cfg, lengths_rank, NULL);
}

/* ---- agreement --------------------------------------------------------------------------------- */

static void agree_rank(rank_job *job)
{
    EXPECT_OK(job, comm_agree(job->c, KVS_OK, &job->err));
    EXPECT_OK(job, comm_agree(job->c, KVS_IDLE, &job->err));
    kvs_error mine = {0};
    kvs_status st = KVS_OK;
    if (job->rank >= 1) {
        st = job->rank == 1 ? KVS_NOMEM : KVS_IO;
        mine.code = st;
        snprintf(mine.text, sizeof mine.text, "no room for %d", job->rank);
    }
    EXPECT(job, comm_agree(job->c, st, &mine) == KVS_NOMEM);
    EXPECT(job, strcmp(mine.text, "rank 1: no room for 1") == 0);
    EXPECT(job, comm_agree(job->c, job->rank == 2 ? KVS_IO : KVS_OK, NULL) == KVS_IO);
    kvs_error stale = {.code = KVS_NOMEM, .text = "of another call"};
    EXPECT(job, comm_agree(job->c, job->rank == 2 ? KVS_IO : KVS_OK, &stale) == KVS_IO);
    EXPECT(job, strcmp(stale.text, "rank 2: read or write failed") == 0);
}

static void test_agree_tells_all_of_the_lowest_rank(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(4, &cfg, agree_rank, NULL);
}

/* ---- public functions -------------------------------------------------------------------------- */

static void test_settings_are_checked(void **state)
{
    (void)state;
    kvs_comm *c = (kvs_comm *)&c;
    kvs_error err = {0};
    kvs_comm_config cfg = kvs_comm_config_default();
    assert_int_equal(kvs_comm_open_self(NULL, &cfg, &err), KVS_INVALID);

    cfg.timeout_ms = -5;
    assert_int_equal(kvs_comm_open_self(&c, &cfg, &err), KVS_INVALID);
    assert_null(c);
    assert_non_null(strstr(err.text, "timeout_ms is -5"));

    cfg = kvs_comm_config_default();
    cfg.no_check = 2;
    assert_int_equal(kvs_comm_open_self(&c, &cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "no_check is 2"));

    cfg = kvs_comm_config_default();
    cfg.struct_size = 3;
    assert_int_equal(kvs_comm_open_self(&c, &cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "struct_size is 3"));

    /* A program built when the struct ended at timeout_ms: what lies behind is not read. */
    cfg = kvs_comm_config_default();
    cfg.struct_size = offsetof(kvs_comm_config, no_check);
    cfg.no_check = 77;
    assert_int_equal(kvs_comm_open_self(&c, &cfg, &err), KVS_OK);
    assert_int_equal(kvs_comm_rank(c), 0);
    assert_int_equal(kvs_comm_size(c), 1);
    assert_int_equal(kvs_comm_barrier(c, &err), KVS_OK);
    kvs_comm_abort(c, "done");
    assert_int_equal(kvs_comm_barrier(c, &err), KVS_PEER);
    assert_non_null(strstr(err.text, "rank 0 ended the group: done"));
    kvs_comm_close(c);

    assert_int_equal(kvs_comm_open_self(&c, NULL, NULL), KVS_OK);
    kvs_comm_close(c);
    kvs_comm_close(NULL);
    kvs_comm_abort(NULL, "nobody");
    assert_int_equal(kvs_comm_barrier(NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_comm_rank(NULL), -1);
    assert_int_equal(kvs_comm_size(NULL), 0);
}

/* The time-out given is the one that is used; without one it is 30 s. */
static void test_timeout_is_honoured(void **state)
{
    (void)state;
    kvs_comm *c[2] = {NULL};
    kvs_error err = {0};
    kvs_comm_config cfg = kvs_comm_config_default();
    cfg.timeout_ms = 50;
    assert_int_equal(kvs_comm_open_threads(c, 2, &cfg, &err), KVS_OK);
    assert_int_equal(kvs_comm_rank(c[1]), 1);
    assert_int_equal(kvs_comm_barrier(c[0], &err), KVS_PEER);
    assert_non_null(strstr(err.text, "rank 1 more than 50 ms late for barrier (call 1)"));
    kvs_comm_close(c[0]);
    kvs_comm_close(c[1]);

    kvs_comm *none[2] = {(kvs_comm *)&c, (kvs_comm *)&c};
    assert_int_equal(kvs_comm_open_threads(none, 65, NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_comm_open_threads(NULL, 2, NULL, &err), KVS_INVALID);
    cfg.timeout_ms = -1;
    assert_int_equal(kvs_comm_open_threads(none, 2, &cfg, &err), KVS_INVALID);
    assert_null(none[0]);
    assert_null(none[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_handshake_of_equals),
        cmocka_unit_test(test_handshake_names_field_values_and_rank),
        cmocka_unit_test(test_handshake_when_rank_0_differs),
        cmocka_unit_test(test_handshake_of_different_lists),
        cmocka_unit_test(test_handshake_of_bad_arguments),
        cmocka_unit_test(test_handshake_of_any_length),
        cmocka_unit_test(test_agree_tells_all_of_the_lowest_rank),
        cmocka_unit_test(test_settings_are_checked),
        cmocka_unit_test(test_timeout_is_honoured),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
