/* The collectives and their faults between MPI processes; run by mpirun with 1 to 8 of them. The
 * cases are those of the thread ranks, with the same expected bits. Every process runs every test;
 * one group stays open throughout, because MPI ends with the last. */
#include <setjmp.h>
#include <stdarg.h>
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

static void test_large_segments(void **state)
{
    (void)state;
    if (world() > 4) {
        skip(); /* a gigabyte of buffers */
    }
    run(case_large, NULL);
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

static void test_slow_ranks_are_fine(void **state)
{
    (void)state;
    run(case_slow, NULL);
}

static void test_sizes_are_checked_even_when_unchecked(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    comm_config cfg = test_config(LONG_MS);
    cfg.no_check = true;
    run_with(&cfg, case_unchecked, NULL);
}

static void test_closing_ends_those_who_wait(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(case_leaving, NULL);
}

static void test_abort_in_a_child_ends_the_family(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(case_aborted, NULL);
}

static void test_handshake_names_field_values_and_rank(void **state)
{
    (void)state;
    if (world() < 2) {
        skip();
    }
    run(case_handshake, NULL);
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
