/* The collectives on threads and self against values computed from their definition: sizes 0, 1,
 * odd and large, every group size to 8, in place, the fixed order of sums, exact counters, groups
 * of groups, no allocation after the first call of a size. */
#include "unit/unit.h"

#include <pthread.h>

#include "base/mem.h"
#include "kvspan/log.h"
#include "cases.h"

static const int32_t g_sizes[] = {1, 3, 8, 2, 4, 5, 6, 7};
enum { N_SIZES = 8, N_SIZES_SLOW = 3 };

/* The group sizes to run: under valgrind the first few. */
static int n_sizes(void)
{
    return unit_valgrind() ? N_SIZES_SLOW : N_SIZES;
}

static void run_all_sizes(rank_fn fn)
{
    const comm_config cfg = test_config(LONG_MS);
    for (int i = 0; i < n_sizes(); i++) {
        ranks_run(g_sizes[i], &cfg, fn, NULL);
    }
    comm *self = NULL;
    kvs_error err = {0};
    assert_int_equal(comm_self_open(&self, &cfg, &err), KVS_OK);
    ranks_run_on(&self, 1, fn, NULL);
}

static void test_all_gather(void **state)
{
    (void)state;
    run_all_sizes(case_all_gather);
}

static void test_all_to_all(void **state)
{
    (void)state;
    run_all_sizes(case_all_to_all);
}

static void test_broadcast_from_every_root(void **state)
{
    (void)state;
    run_all_sizes(case_broadcast);
}

static void test_reduce_scatter_in_the_fixed_order(void **state)
{
    (void)state;
    run_all_sizes(case_reduce_scatter);
}

static void test_all_reduce_in_the_fixed_order(void **state)
{
    (void)state;
    run_all_sizes(case_all_reduce);
}

static void test_every_term_is_in_once(void **state)
{
    (void)state;
    run_all_sizes(case_exact_sum);
}

/* ---- many calls ------------------------------------------------------------------------------ */

static void test_many_calls_of_changing_size(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, case_stress, NULL);
    ranks_run(5, &cfg, case_stress, NULL);
    if (n_sizes() == N_SIZES) {
        ranks_run(16, &cfg, case_stress, NULL);
    }
}

static void test_no_allocation_once_warm(void **state)
{
    (void)state;
    run_all_sizes(case_no_alloc);
}

/* The guard of the test above does see an allocation. */
static void first_call_rank(rank_job *job)
{
    char x[64] = {0};
    char y[64 * RANKS_MAX];
    mem_guard_begin();
    EXPECT_OK(job, comm_all_gather(job->c, x, y, sizeof x, &job->err));
    EXPECT(job, mem_guard_end() > 0);
}

static void test_the_first_call_allocates(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, first_call_rank, NULL);
}

/* ---- counters -------------------------------------------------------------------------------- */

static void test_counters_are_exact(void **state)
{
    (void)state;
    run_all_sizes(case_counters);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void test_groups_of_groups_close_in_any_order(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    for (int i = 0; i < 2; i++) {
        bool parent_first = i == 1;
        const int64_t before = mem_stats_get().n_live;
        ranks_run(8, &cfg, case_split, &parent_first);
        assert_int_equal(mem_stats_get().n_live, before);
    }
}

static void test_uneven_groups_side_by_side(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(7, &cfg, case_uneven_split, NULL);
}

/* Two groups per rank, each used by a thread of its own: the order in which the threads of a rank
 * come to their calls differs from rank to rank. */
typedef struct second {
    comm *c;
    int32_t rank;
    kvs_status st;
    float sum;
} second;

static void *second_main(void *arg)
{
    second *s = arg;
    for (int k = 0; k < 200 && s->st == KVS_OK; k++) {
        float x = (float)(k * s->rank);
        if ((k * 7 + s->rank * 3) % 11 == 0) {
            sleep_ms(1);
        }
        s->st = comm_all_reduce(s->c, &x, 1, NULL);
        s->sum += x;
    }
    return NULL;
}

static void two_groups_rank(rank_job *job)
{
    second s[2] = {{.c = job->c, .rank = job->rank}, {.rank = job->rank}};
    pthread_t t[2];
    EXPECT_OK(job, comm_split(job->c, 0, -job->rank, &s[1].c, &job->err));
    for (int i = 0; i < 2; i++) {
        EXPECT(job, pthread_create(&t[i], NULL, second_main, &s[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(t[i], NULL);
        EXPECT(job, s[i].st == KVS_OK);
        EXPECT(job, s[i].sum == 199 * 200 / 2 * (0 + 1 + 2)); /* exact */
    }
    comm_close(s[1].c);
}

static void test_two_groups_used_at_once(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, two_groups_rank, NULL);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void test_open_refuses_bad_sizes(void **state)
{
    (void)state;
    const comm_config cfg = test_config(1000);
    comm *ends[1] = {NULL};
    kvs_error err = {0};
    assert_int_equal(comm_thread_open(ends, 0, &cfg, &err), KVS_INVALID);
    assert_int_equal(comm_thread_open(ends, COMM_MAX_THREADS + 1, &cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "65"));
}

/* Every allocation of opening fails once: an error, nothing set, nothing left. */
static void test_open_survives_failing_allocations(void **state)
{
    (void)state;
    const comm_config cfg = test_config(1000);
    const int64_t before = mem_stats_get().n_live;
    int64_t k = 1;
    for (;; k++) {
        comm *ends[3] = {NULL};
        kvs_error err = {0};
        mem_fail_after(k);
        const kvs_status st = comm_thread_open(ends, 3, &cfg, &err);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        if (!fired) {
            assert_int_equal(st, KVS_OK);
            for (int r = 0; r < 3; r++) {
                comm_close(ends[r]);
            }
            break;
        }
        assert_int_equal(st, KVS_NOMEM);
        for (int r = 0; r < 3; r++) {
            assert_null(ends[r]);
        }
        assert_int_equal(mem_stats_get().n_live, before);
    }
    assert_true(k > 10);
    assert_int_equal(mem_stats_get().n_live, before);
}

/* A rank without memory for its end of a split: all ranks hear of it, the group lives on. */
static void starved_split_rank(rank_job *job)
{
    comm *sub = NULL;
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    const kvs_status st = comm_split(job->c, 0, 0, &sub, &job->err);
    if (st == KVS_OK) {
        EXPECT_OK(job, comm_barrier(sub, &job->err));
        comm_close(sub);
    } else if (st == KVS_NOMEM) {
        /* For staging, the rank could not even enter; else all know and go on. */
        EXPECT(job, sub == NULL);
        if (!comm_failed(job->c)) {
            EXPECT_OK(job, comm_barrier(job->c, &job->err));
        }
    } else {
        EXPECT(job, st == KVS_PEER && comm_failed(job->c));
    }
}

static void test_split_survives_failing_allocations(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    const int64_t before = mem_stats_get().n_live;
    bool fired = true;
    for (int64_t k = 1; fired; k++) {
        comm *ends[3] = {NULL};
        assert_int_equal(comm_thread_open(ends, 3, &cfg, NULL), KVS_OK);
        mem_fail_after(k);
        ranks_run_on(ends, 3, starved_split_rank, NULL);
        fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(mem_stats_get().n_live, before);
        assert_true(k < 1000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_gather),
        cmocka_unit_test(test_all_to_all),
        cmocka_unit_test(test_broadcast_from_every_root),
        cmocka_unit_test(test_reduce_scatter_in_the_fixed_order),
        cmocka_unit_test(test_all_reduce_in_the_fixed_order),
        cmocka_unit_test(test_every_term_is_in_once),
        cmocka_unit_test(test_many_calls_of_changing_size),
        cmocka_unit_test(test_no_allocation_once_warm),
        cmocka_unit_test(test_the_first_call_allocates),
        cmocka_unit_test(test_counters_are_exact),
        cmocka_unit_test(test_groups_of_groups_close_in_any_order),
        cmocka_unit_test(test_uneven_groups_side_by_side),
        cmocka_unit_test(test_two_groups_used_at_once),
        cmocka_unit_test(test_open_refuses_bad_sizes),
        cmocka_unit_test(test_open_survives_failing_allocations),
        cmocka_unit_test(test_split_survives_failing_allocations),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
