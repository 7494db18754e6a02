/* The collectives and their faults between MPI processes; run by mpirun with 1 to 8 of them. The
 * cases are those of the thread ranks, with the same expected bits. Every process runs every test;
 * one group stays open throughout, because MPI ends with the last. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/mem.h"
#include "kvspan/log.h"
#include "unit/comm/cases.h"

static kvs_comm *g_base;

static int32_t world(void)
{
    return kvs_comm_size(g_base);
}

static void run_with(const comm_config *cfg, rank_fn fn, void *ctx)
{
    rank_job job = {.rank = kvs_comm_rank(g_base), .n = world(), .ctx = ctx};
    if (comm_mpi_open(&job.c, cfg, &job.err) != KVS_OK) {
        fail_msg("%s", job.err.text);
    }
    EXPECT(&job, comm_rank(job.c) == job.rank && comm_size(job.c) == job.n);
    EXPECT(&job, strcmp(comm_transport(job.c), "mpi") == 0);
    fn(&job);
    comm_close(job.c);
    if (job.note[0] != '\0') {
        fail_msg("%s", job.note);
    }
}

static void run(rank_fn fn, void *ctx)
{
    const comm_config cfg = test_config(LONG_MS);
    run_with(&cfg, fn, ctx);
}

static void test_collectives(void **state)
{
    (void)state;
    static const rank_fn cases[] = {case_all_gather,     case_all_to_all, case_broadcast,
                                    case_reduce_scatter, case_all_reduce, case_exact_sum,
                                    case_no_alloc,       case_counters,   case_stress};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        run(cases[i], NULL);
    }
}

static void test_groups_of_groups(void **state)
{
    (void)state;
    if (world() % 4 != 0) {
        skip();
    }
    for (int i = 0; i < 2; i++) {
        bool parent_first = i == 1;
        run(case_split, &parent_first);
    }
    run(case_uneven_split, NULL);
}

/* ---- large ------------------------------------------------------------------------------------- */

/* Several rounds of the data exchange, the last one odd. */
enum { LARGE = 9 * 1024 * 1024 + 5 };

static unsigned char large_byte(int32_t from, int32_t to, size_t i)
{
    return (unsigned char)(i * 7 + i / 4096 + (size_t)from * 31 + (size_t)to * 101);
}

static bool large_holds(const unsigned char *p, int32_t from, int32_t to)
{
    for (size_t i = 0; i < LARGE; i++) {
        if (p[i] != large_byte(from, to, i)) {
            return false;
        }
    }
    return true;
}

static void large_rank(rank_job *job)
{
    const size_t n = (size_t)job->n;
    unsigned char *a = malloc(LARGE * n);
    unsigned char *b = malloc(LARGE * n);
    for (int32_t to = 0; to < job->n; to++) {
        for (size_t i = 0; i < LARGE; i++) {
            a[(size_t)to * LARGE + i] = large_byte(job->rank, to, i);
        }
    }
    EXPECT_OK(job, comm_all_to_all(job->c, a, b, LARGE, &job->err));
    for (int32_t from = 0; from < job->n; from++) {
        EXPECT(job, large_holds(b + (size_t)from * LARGE, from, job->rank));
    }
    EXPECT_OK(job, comm_all_gather(job->c, a, b, LARGE, &job->err));
    for (int32_t from = 0; from < job->n; from++) {
        EXPECT(job, large_holds(b + (size_t)from * LARGE, from, 0));
    }
    EXPECT_OK(job, comm_broadcast(job->c, a, LARGE, job->n - 1, &job->err));
    EXPECT(job, large_holds(a, job->n - 1, 0));
    float *f = (float *)(void *)a;
    const size_t m = (LARGE - 5) / 4 - 1;
    for (size_t i = 0; i < m; i++) {
        f[i] = (float)((i & 1023) << job->rank);
    }
    EXPECT_OK(job, comm_all_reduce(job->c, f, m, &job->err));
    bool exact = true;
    for (size_t i = 0; i < m; i++) {
        exact = exact && f[i] == (float)((i & 1023) * ((1U << job->n) - 1));
    }
    EXPECT(job, exact);
    free(a);
    free(b);
}

static void test_large_segments(void **state)
{
    (void)state;
    if (world() > 4) {
        skip(); /* a gigabyte of buffers */
    }
    run(large_rank, NULL);
}

/* ---- faults ------------------------------------------------------------------------------------ */

static void run_fault(comm_fault_kind kind, int32_t rank, int32_t op)
{
    fault_case k = {
        .op = op,
        .rank = rank,
        .fault = {.kind = kind, .call = 2, .ms = kind == COMM_FAULT_STALL ? LONG_MS : DELAY_MS},
    };
    fault_want(&k);
    run(case_fault, &k);
    assert_int_equal(atomic_load(&k.n_named), 1);
}

static void test_disagreeing_ranks(void **state)
{
    (void)state;
    static const comm_fault_kind kinds[] = {COMM_FAULT_DROP, COMM_FAULT_BYTES, COMM_FAULT_OP};
    if (world() < 2) {
        skip();
    }
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        for (int i = 0; i < 3; i++) {
            run_fault(kinds[i], world() - 1, op);
        }
        run_fault(kinds[op % 3], 0, op);
    }
}

static void test_late_ranks(void **state)
{
    (void)state;
    if (world() != 4) {
        skip();
    }
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        run_fault(COMM_FAULT_STALL, op % world(), op);
    }
    run_fault(COMM_FAULT_DELAY, 1, COMM_OP_ALL_REDUCE);
}

static void slow_rank(rank_job *job)
{
    const comm_fault f = {.kind = COMM_FAULT_DELAY, .call = 1, .ms = 20 * (job->n - job->rank)};
    EXPECT(job, comm_fault_wrap(job->c, &f, &job->err) != NULL);
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        EXPECT_OK(job, case_call(job->c, op, &job->err));
    }
}

static void test_slow_ranks_are_fine(void **state)
{
    (void)state;
    run(slow_rank, NULL);
}

static void unchecked_rank(rank_job *job)
{
    unsigned char a[64 * RANKS_MAX] = {0};
    unsigned char b[64 * RANKS_MAX];
    EXPECT(job, (job->rank == 1 ? comm_all_to_all(job->c, a, b, 64, &job->err)
                                : comm_all_gather(job->c, a, b, 64, &job->err)) == KVS_OK);
    EXPECT_FAIL(job, comm_all_gather(job->c, a, b, job->rank == 1 ? 32 : 64, &job->err), KVS_PEER,
                "in all_gather");
    EXPECT(job, rank_says(job, "rank 1"));
}

static void test_sizes_are_checked_even_when_unchecked(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    comm_config cfg = test_config(LONG_MS);
    cfg.no_check = true;
    run_with(&cfg, unchecked_rank, NULL);
}

static void leaving_rank(rank_job *job)
{
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 1) {
        return;
    }
    EXPECT_FAIL(job, comm_all_reduce(job->c, NULL, 0, &job->err), KVS_PEER,
                "rank 1 has closed its end");
    case_ended(job, "rank 1 has closed its end");
}

static void test_closing_ends_those_who_wait(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(leaving_rank, NULL);
}

static void *abort_main(void *arg)
{
    sleep_ms(30);
    comm_abort(arg, "client gone");
    return NULL;
}

/* All wait for rank 0, which does not come; another thread of rank 1 ends the group. */
static void aborted_rank(rank_job *job)
{
    comm *pair = NULL;
    EXPECT_OK(job, comm_split(job->c, job->rank / 2, 0, &pair, &job->err));
    pthread_t t;
    if (job->rank == 1) {
        EXPECT(job, pthread_create(&t, NULL, abort_main, pair) == 0);
    }
    const comm_fault f = {.kind = COMM_FAULT_STALL, .call = 2, .ms = LONG_MS};
    if (job->rank == 0) {
        EXPECT(job, comm_fault_wrap(job->c, &f, &job->err) != NULL);
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "ended the group: client gone");
    if (job->rank == 1) {
        pthread_join(t, NULL);
    }
    EXPECT_FAIL(job, comm_barrier(pair, &job->err), KVS_PEER, "ended the group: client gone");
    case_ended(job, "client gone");
    comm_close(pair);
}

static void test_abort_in_a_child_ends_the_family(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(aborted_rank, NULL);
}

static void handshake_rank(rank_job *job)
{
    comm_field f[2] = {{"page", "64"}, {"model", "7f"}};
    EXPECT_OK(job, comm_handshake(job->c, f, 2, &job->err));
    if (job->rank == 1) {
        f[1].value = "80";
    }
    EXPECT_FAIL(job, comm_handshake(job->c, f, 2, &job->err), KVS_INVALID,
                "handshake: model is \"7f\" on rank 0 and \"80\" on rank 1");
    EXPECT_FAIL(job, comm_agree(job->c, job->rank == 1 ? KVS_NOMEM : KVS_OK, NULL), KVS_NOMEM, "");
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
}

static void test_handshake_names_field_values_and_rank(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(handshake_rank, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_groups_of_groups),
        cmocka_unit_test(test_large_segments),
        cmocka_unit_test(test_disagreeing_ranks),
        cmocka_unit_test(test_late_ranks),
        cmocka_unit_test(test_slow_ranks_are_fine),
        cmocka_unit_test(test_sizes_are_checked_even_when_unchecked),
        cmocka_unit_test(test_closing_ends_those_who_wait),
        cmocka_unit_test(test_abort_in_a_child_ends_the_family),
        cmocka_unit_test(test_handshake_names_field_values_and_rank),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    kvs_error err = {0};
    if (kvs_comm_open_mpi(&g_base, NULL, &err) != KVS_OK) {
        print_error("%s\n", err.text);
        return 1;
    }
    const int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvs_comm_close(g_base);
    /* All processes have said goodbye to every group, so nothing of one is left. */
    const int64_t n_left = mem_stats_get().n_live;
    if (n_failed == 0 && n_left != 0) {
        print_error("%lld blocks are left\n", (long long)n_left);
        return 1;
    }
    return n_failed;
}
