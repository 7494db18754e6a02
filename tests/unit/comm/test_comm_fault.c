/* Ranks that fail: every collective with every fault ends within the time-out on every rank, with
 * one reason that names the rank; the group stays ended; nothing else in its family hangs. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/clock.h"
#include "base/mem.h"
#include "comm/fault.h"
#include "kvspan/log.h"
#include "cases.h"

/* ---- every collective with every fault --------------------------------------------------------- */

typedef struct case_thread {
    pthread_t thread;
    fault_case k;
    int32_t n;
    comm *ends[RANKS_MAX];
    char note[NOTE];
} case_thread;

static void *case_main(void *arg)
{
    case_thread *t = arg;
    ranks_collect(t->ends, t->n, case_fault, &t->k, t->note);
    return NULL;
}

static void die_thread(void *ctx)
{
    (void)ctx;
    pthread_exit(NULL);
}

static void run_fault(int32_t n, int32_t rank, comm_fault_kind kind)
{
    const comm_config cfg = test_config(LONG_MS);
    case_thread t[COMM_N_OP];
    const int64_t before = mem_stats_get().n_live;
    const int64_t begin = clock_ns();
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        t[op] = (case_thread){.n = n};
        t[op].k = (fault_case){
            .op = op,
            .rank = rank,
            .fault = {.kind = kind, .call = 2, .ms = DELAY_MS, .die = die_thread},
        };
        fault_want(&t[op].k);
        assert_int_equal(comm_thread_open(t[op].ends, n, &cfg, NULL), KVS_OK);
        assert_int_equal(pthread_create(&t[op].thread, NULL, case_main, &t[op]), 0);
    }
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        pthread_join(t[op].thread, NULL);
    }
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        if (t[op].note[0] != '\0') {
            fail_msg("%s", t[op].note);
        }
        assert_int_equal(atomic_load(&t[op].k.n_named), n - (kind == COMM_FAULT_DIE));
    }
    assert_true(clock_ns() - begin < DEADLINE_MS * INT64_C(1000000));
    assert_int_equal(mem_stats_get().n_live, before);
}

static void test_late_rank(void **state)
{
    (void)state;
    run_fault(3, 1, COMM_FAULT_DELAY);
}

static void test_rank_that_stops(void **state)
{
    (void)state;
    run_fault(2, 0, COMM_FAULT_STALL);
}

static void test_rank_whose_thread_ends(void **state)
{
    (void)state;
    run_fault(4, 3, COMM_FAULT_DIE);
}

static void test_rank_that_skips_a_call(void **state)
{
    (void)state;
    run_fault(3, 2, COMM_FAULT_DROP);
    run_fault(2, 0, COMM_FAULT_DROP);
}

static void test_rank_with_another_size(void **state)
{
    (void)state;
    run_fault(5, 4, COMM_FAULT_BYTES);
    run_fault(3, 0, COMM_FAULT_BYTES);
}

static void test_rank_with_another_operation(void **state)
{
    (void)state;
    run_fault(8, 5, COMM_FAULT_OP);
    run_fault(2, 0, COMM_FAULT_OP);
}

/* ---- what is no failure ------------------------------------------------------------------------ */

static void slow_rank(rank_job *job)
{
    const comm_fault f = {.kind = COMM_FAULT_DELAY, .call = 1, .ms = 20 * (job->n - job->rank)};
    EXPECT(job, comm_fault_wrap(job->c, &f, &job->err) != NULL);
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        EXPECT_OK(job, case_call(job->c, op, &job->err));
    }
}

static void test_slow_ranks_in_any_order_are_fine(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(4, &cfg, slow_rank, NULL);
}

/* ---- the two messages, word for word ----------------------------------------------------------- */

static void mismatch_rank(rank_job *job)
{
    unsigned char a[64] = {0};
    unsigned char b[64 * 4];
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    const kvs_status st = job->rank == 2 ? comm_all_to_all(job->c, a, b, 16, &job->err)
                                         : comm_all_gather(job->c, a, b, 64, &job->err);
    EXPECT(job, st == KVS_PEER);
    char want[232];
    snprintf(
        want, sizeof want,
        "rank 2 called all_to_all of 16 bytes (call 2), rank 0 all_gather of 64 bytes (call 2) "
        "[rank %d, last calls: barrier 0, all_%s]",
        job->rank, job->rank == 2 ? "to_all 16" : "gather 64");
    EXPECT(job, strcmp(job->err.text, want) == 0);
}

static void test_mismatch_names_both_ranks_and_calls(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(4, &cfg, mismatch_rank, NULL);
}

static void root_rank(rank_job *job)
{
    int x = 0;
    EXPECT_FAIL(job, comm_broadcast(job->c, &x, sizeof x, job->rank == 1, &job->err), KVS_PEER,
                "rank 1 called broadcast of 4 bytes from rank 1 (call 1), rank 0 broadcast of 4 "
                "bytes from rank 0 (call 1)");
}

static void test_broadcast_from_two_roots(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, root_rank, NULL);
}

/* Without the comparison a wrong operation of the same shape passes, a wrong size does not. */
static void unchecked_rank(rank_job *job)
{
    unsigned char a[64 * 3] = {0};
    unsigned char b[64 * 3];
    const kvs_status st = job->rank == 2 ? comm_all_to_all(job->c, a, b, 64, &job->err)
                                         : comm_all_gather(job->c, a, b, 64, &job->err);
    EXPECT(job, st == KVS_OK);
    EXPECT_FAIL(job, comm_all_gather(job->c, a, b, job->rank == 1 ? 32 : 64, &job->err), KVS_PEER,
                "in all_gather");
    EXPECT(job, rank_says(job, "sent 32 bytes") || rank_says(job, "sent 64 bytes"));
    EXPECT(job, rank_says(job, "rank 1"));
}

static void test_sizes_are_checked_even_when_unchecked(void **state)
{
    (void)state;
    comm_config cfg = test_config(LONG_MS);
    cfg.no_check = true;
    ranks_run(3, &cfg, unchecked_rank, NULL);
}

/* ---- refusals, closing, aborting --------------------------------------------------------------- */

typedef struct refusal {
    int32_t kind;
    const char *want;
} refusal;

static kvs_status refused_call(comm *c, int32_t kind, kvs_error *err)
{
    unsigned char a[8] = {0};
    float f[2] = {0};
    switch (kind) {
    case 0:
        return comm_all_gather(c, NULL, a, 4, err);
    case 1:
        return comm_all_gather(c, a, NULL, 4, err);
    case 2:
        return comm_all_to_all(c, a, a + 4, 4, err);
    case 3:
        return comm_broadcast(c, a, 4, comm_size(c), err);
    case 4:
        return comm_broadcast(c, a, 4, -1, err);
    case 5:
        return comm_all_reduce(c, NULL, 4, err);
    case 6:
        return comm_reduce_scatter(c, f, NULL, 1, err);
    case 7:
        return comm_all_gather(c, a, a, SIZE_MAX / 2, err);
    default:
        return comm_all_reduce(c, f, SIZE_MAX / 2, err);
    }
}

static void refused_rank(rank_job *job)
{
    const refusal *k = job->ctx;
    if (job->rank == 1) {
        EXPECT_FAIL(job, refused_call(job->c, k->kind, &job->err), KVS_INVALID, k->want);
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, k->want);
    EXPECT(job, rank_says(job, "rank 1 did not enter"));
}

static void test_refused_arguments_end_the_group(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    const refusal kinds[] = {{0, "NULL"},   {1, "NULL"},      {2, "overlap"},
                             {3, "root 3"}, {4, "root -1"},   {5, "NULL"},
                             {6, "NULL"},   {7, "overflows"}, {8, "overflows"}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        refusal k = kinds[i];
        ranks_run(3, &cfg, refused_rank, &k);
    }
}

static void leaving_rank(rank_job *job)
{
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 1) {
        sleep_ms(30);
        return;
    }
    EXPECT_FAIL(job, comm_all_reduce(job->c, NULL, 0, &job->err), KVS_PEER,
                "rank 1 has closed its end");
    case_ended(job, "rank 1 has closed its end");
}

static void test_closing_ends_those_who_wait(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, leaving_rank, NULL);
}

typedef struct aborter {
    comm *c;
} aborter;

static void *abort_main(void *arg)
{
    const aborter *a = arg;
    sleep_ms(30);
    comm_abort(a->c, "client gone");
    return NULL;
}

static void aborted_rank(rank_job *job)
{
    aborter a = {job->c};
    pthread_t t;
    if (job->rank == 1) {
        /* Another thread aborts while this rank waits for rank 2. */
        EXPECT(job, pthread_create(&t, NULL, abort_main, &a) == 0);
    } else if (job->rank == 2) {
        while (!comm_failed(job->c)) {
            sleep_ms(1);
        }
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER,
                "rank 1 ended the group: client gone");
    if (job->rank == 1) {
        pthread_join(t, NULL);
    }
    comm_abort(job->c, "the first reason stays");
    comm_abort(job->c, NULL);
    case_ended(job, "client gone");
}

static void test_abort_from_another_thread(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, aborted_rank, NULL);
}

/* 4 ranks in two pairs. One rank ends its pair or the whole; all groups of the family end. */
typedef struct family_case {
    bool by_child;
    atomic_int n_done;
} family_case;

static void family_rank(rank_job *job)
{
    family_case *k = job->ctx;
    const bool by_child = k->by_child;
    comm *pair = NULL;
    EXPECT_OK(job, comm_split(job->c, job->rank / 2, 0, &pair, &job->err));
    if (pair == NULL) {
        return;
    }
    if (job->rank == 3) {
        sleep_ms(30); /* the others wait by now */
        comm_abort(by_child ? pair : job->c, "no more pages");
    }
    comm *other = by_child ? job->c : pair;
    if (job->rank == 3) {
        EXPECT_FAIL(job, comm_barrier(other, &job->err), KVS_PEER, "no more pages");
    } else {
        kvs_status st = KVS_OK;
        while (st == KVS_OK) {
            st = comm_barrier(other, &job->err);
        }
        EXPECT(job, st == KVS_PEER && rank_says(job, "no more pages"));
    }
    EXPECT(job, comm_failed(pair) && comm_failed(job->c));
    /* Closing would wake the others too. */
    atomic_fetch_add(&k->n_done, 1);
    while (atomic_load(&k->n_done) < job->n) {
        sleep_ms(1);
    }
    case_ended(job, "no more pages");
    comm_close(pair);
}

static void test_a_family_ends_together(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    for (int i = 0; i < 2; i++) {
        family_case k = {.by_child = i == 1};
        ranks_run(4, &cfg, family_rank, &k);
    }
}

/* One thread per rank, two groups, the calls in another order on one rank: nobody can go on, and
 * both groups end with one reason. */
static void crossed_rank(rank_job *job)
{
    comm *sub = NULL;
    EXPECT_OK(job, comm_split(job->c, 0, 0, &sub, &job->err));
    if (sub == NULL) {
        return;
    }
    comm_set_timeout(job->c, LATE_MS);
    comm_set_timeout(sub, LATE_MS);
    comm *first = job->rank == 0 ? sub : job->c;
    comm *second = job->rank == 0 ? job->c : sub;
    EXPECT_FAIL(job, comm_barrier(first, &job->err), KVS_PEER, "more than 800 ms late for barrier");
    EXPECT_FAIL(job, comm_barrier(second, &job->err), KVS_PEER,
                "more than 800 ms late for barrier");
    comm_close(sub);
}

static void test_crossed_calls_of_two_groups(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(3, &cfg, crossed_rank, NULL);
}

/* A split that breaks off between its two exchanges leaves no memory behind. */
static void broken_split_rank(rank_job *job)
{
    const int rank = *(const int *)job->ctx;
    comm *sub = NULL;
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == rank) {
        sleep_ms(1);
        comm_abort(job->c, "in the middle");
    }
    const kvs_status st = comm_split(job->c, 0, 0, &sub, &job->err);
    EXPECT(job, (st == KVS_OK) == (sub != NULL));
    comm_close(sub);
}

static void test_split_during_abort_leaves_nothing(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    const int64_t before = mem_stats_get().n_live;
    for (int rank = 0; rank < 3; rank++) {
        ranks_run(3, &cfg, broken_split_rank, &rank);
        assert_int_equal(mem_stats_get().n_live, before);
    }
}

/* ---- ring and log ------------------------------------------------------------------------------ */

static void history_rank(rank_job *job)
{
    unsigned char a[64] = {0};
    unsigned char b[64 * 2];
    for (size_t i = 1; i <= 40; i++) {
        EXPECT_OK(job, comm_all_gather(job->c, a, b, i, &job->err));
    }
    char text[4096];
    const size_t need = comm_history(job->c, text, sizeof text);
    EXPECT(job, need == strlen(text) && need < sizeof text);
    char first[64];
    snprintf(first, sizeof first, "rank %d: all_gather of 25 bytes (call 25): KVS_OK", job->rank);
    EXPECT(job, strncmp(text, first, strlen(first)) == 0);
    EXPECT(job, strstr(text, "all_gather of 40 bytes (call 40): KVS_OK") != NULL);
    EXPECT(job, strstr(text, "(call 24)") == NULL);
    char cut[20];
    EXPECT(job, comm_history(job->c, cut, sizeof cut) == need && strlen(cut) == 19);
    EXPECT(job, comm_history(job->c, NULL, 0) == need);
}

static void test_history_has_the_last_16_calls(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, history_rank, NULL);
}

enum { LINES = 256 };

typedef struct log_lines {
    int n;
    char text[LINES][256];
} log_lines;

static void log_line(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text)
{
    (void)level;
    log_lines *l = ctx;
    if (sys == KVS_LOG_COMM && l->n < LINES) {
        snprintf(l->text[l->n++], sizeof l->text[0], "%s", text);
    }
}

static void dumping_rank(rank_job *job)
{
    for (int i = 0; i < 5; i++) {
        EXPECT_OK(job, comm_barrier(job->c, &job->err));
    }
    comm_set_timeout(job->c, LATE_MS);
    while (job->rank == 2 && !comm_failed(job->c)) {
        sleep_ms(1);
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "rank 2 more than 800 ms late");
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "rank 2 more than 800 ms late");
}

static void test_every_rank_logs_its_ring_once(void **state)
{
    (void)state;
    static log_lines lines;
    const kvs_logger logger = {log_line, &lines};
    const comm_config cfg = test_config(LONG_MS);
    kvs_log_set(&logger);
    ranks_run(4, &cfg, dumping_rank, NULL);
    kvs_log_set(&(kvs_logger){0});
    for (int r = 0; r < 4; r++) {
        char head[32];
        char last[64];
        int n_head = 0;
        int n_call = 0;
        bool has_last = false;
        snprintf(head, sizeof head, "rank %d of 4 (threads)", r);
        snprintf(last, sizeof last, "rank %d: barrier (call %d): %s", r, r == 2 ? 5 : 6,
                 r == 2 ? "KVS_OK" : "KVS_PEER");
        for (int i = 0; i < lines.n; i++) {
            char call[32];
            snprintf(call, sizeof call, "rank %d: barrier", r);
            n_head += strncmp(lines.text[i], head, strlen(head)) == 0;
            n_call += strncmp(lines.text[i], call, strlen(call)) == 0;
            has_last = has_last || strncmp(lines.text[i], last, strlen(last)) == 0;
        }
        assert_int_equal(n_head, 1);
        assert_int_equal(n_call, r == 2 ? 5 : 6);
        assert_true(has_last);
    }
}

/* ---- hook -------------------------------------------------------------------------------------- */

typedef struct turn {
    pthread_mutex_t lock;
    int running;
    int worst;
} turn;

static void take_turn(void *ctx, int32_t rank, bool waiting)
{
    (void)rank;
    turn *t = ctx;
    if (waiting) {
        t->running--;
        pthread_mutex_unlock(&t->lock);
    } else {
        pthread_mutex_lock(&t->lock);
        t->running++;
        t->worst = t->running > t->worst ? t->running : t->worst;
    }
}

static void turn_rank(rank_job *job)
{
    turn *t = job->ctx;
    comm *sub = NULL;
    take_turn(t, job->rank, false);
    comm_set_hook(job->c, take_turn, t);
    EXPECT_OK(job, comm_split(job->c, 0, 0, &sub, &job->err));
    for (int i = 0; i < 50; i++) {
        EXPECT_OK(job, comm_barrier(i % 2 == 0 ? job->c : sub, &job->err));
        EXPECT(job, t->running == 1);
    }
    take_turn(t, job->rank, true);
    comm_set_hook(job->c, NULL, NULL);
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    comm_close(sub);
}

static void test_hook_lets_ranks_run_one_at_a_time(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    turn t = {.lock = PTHREAD_MUTEX_INITIALIZER};
    ranks_run(4, &cfg, turn_rank, &t);
    assert_int_equal(t.worst, 1);
    assert_int_equal(t.running, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late_rank),
        cmocka_unit_test(test_rank_that_stops),
        cmocka_unit_test(test_rank_whose_thread_ends),
        cmocka_unit_test(test_rank_that_skips_a_call),
        cmocka_unit_test(test_rank_with_another_size),
        cmocka_unit_test(test_rank_with_another_operation),
        cmocka_unit_test(test_slow_ranks_in_any_order_are_fine),
        cmocka_unit_test(test_mismatch_names_both_ranks_and_calls),
        cmocka_unit_test(test_broadcast_from_two_roots),
        cmocka_unit_test(test_sizes_are_checked_even_when_unchecked),
        cmocka_unit_test(test_refused_arguments_end_the_group),
        cmocka_unit_test(test_closing_ends_those_who_wait),
        cmocka_unit_test(test_abort_from_another_thread),
        cmocka_unit_test(test_a_family_ends_together),
        cmocka_unit_test(test_crossed_calls_of_two_groups),
        cmocka_unit_test(test_split_during_abort_leaves_nothing),
        cmocka_unit_test(test_history_has_the_last_16_calls),
        cmocka_unit_test(test_every_rank_logs_its_ring_once),
        cmocka_unit_test(test_hook_lets_ranks_run_one_at_a_time),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
