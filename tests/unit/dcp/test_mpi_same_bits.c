/* The same bits over MPI processes as over threads, for dcp 1, 2 and 4 of 4 ranks. Other ranks' rows are in
 * other processes: what a rank did not own it cannot have read.
 *
 * Run under mpirun with 4 ranks. Every process computes its rank of the step over MPI, then each compares
 * its heads with a run of the whole group as threads at dcp 1 inside itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "world.h"

static kvs_comm *g_world;

static void mixed(scenario *s)
{
    static const int64_t seq[] = {1, 5, 700, 0, 131, 64};
    static const int32_t q[] = {1, 2, 4, 0, 8, 1};
    s->n_req = 6;
    for (int32_t i = 0; i < 6; i++) {
        s->req_id[i] = i;
        s->seq_len[i] = seq[i];
        s->q_len[i] = q[i];
    }
}

static void compare(const scenario *s, const outcome *mine, const outcome *whole, int32_t rank)
{
    const int32_t hl = s->n_head / s->tp;
    for (int32_t t = 0; t < whole->n_row; t++) {
        const int64_t head = (int64_t)t * s->n_head + (int64_t)rank * hl;
        assert_memory_equal(mine->lse + head, whole->lse + head, (size_t)hl * sizeof(float));
        assert_memory_equal(mine->out + head * 512, whole->out + head * 512,
                            (size_t)hl * 512 * sizeof(float));
    }
    if (rank == 0 && s->how == KVS_ATTEND_SPARSE) {
        assert_memory_equal(mine->ids, whole->ids,
                            (size_t)whole->n_row * (size_t)s->topk * sizeof *mine->ids);
    }
}

static void test_mpi_equals_threads(void **state)
{
    (void)state;
    static const kvs_attend how[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    const int32_t rank = kvs_comm_rank(g_world);
    for (size_t m = 0; m < 3; m++) {
        scenario s = scenario_default();
        mixed(&s);
        s.tp = 4;
        s.n_head = 32;
        s.how = how[m];
        s.n_index_head = s.how == KVS_ATTEND_SPARSE ? 4 : 0;
        outcome whole;
        world_run(&s, &whole);
        for (s.dcp = 1; s.dcp <= 4; s.dcp *= 2) {
            outcome o;
            world_rank(&s, g_world, &o);
            if (o.status[rank] < 0) {
                fail_msg("rank %d, dcp %d: %s", rank, s.dcp, o.error[rank].text);
            }
            compare(&s, &o, &whole, rank);
            outcome_fini(&o);
        }
        outcome_fini(&whole);
    }
}

int main(void)
{
    kvs_error err;
    if (kvs_comm_open_mpi(&g_world, NULL, &err) < 0) {
        fprintf(stderr, "test_mpi_same_bits: %s\n", err.text);
        return 1;
    }
    if (kvs_comm_size(g_world) != 4) {
        fprintf(stderr, "test_mpi_same_bits: %d ranks: run under mpirun -n 4\n",
                kvs_comm_size(g_world));
        return 1;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_mpi_equals_threads)};
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kvs_comm_close(g_world);
    return rc;
}
