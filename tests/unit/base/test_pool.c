/* The worker pool: every task once, visibility, worker numbers, many pools on few cores, errors. */
#include "unit/unit.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

typedef struct job {
    int64_t n_task;
    int n_worker;
    int *count;            /* [n_task], plain: a race would be seen by TSan */
    int *owner;            /* [n_task] the worker that ran it               */
    atomic_int bad_worker; /* worker numbers out of range                   */
    atomic_int *inside;    /* [n_worker] how many run as that worker now    */
    int nap_ns;
} job;

static void run_task(void *ctx, int64_t i, int w)
{
    job *j = ctx;
    if (w < 0 || w >= j->n_worker || i < 0 || i >= j->n_task) {
        atomic_fetch_add(&j->bad_worker, 1);
        return;
    }
    if (atomic_fetch_add(&j->inside[w], 1) != 0) {
        atomic_fetch_add(&j->bad_worker, 1);
    }
    j->count[i]++;
    j->owner[i] = w;
    if (j->nap_ns > 0) {
        const struct timespec t = {0, j->nap_ns};
        nanosleep(&t, NULL);
    }
    atomic_fetch_sub(&j->inside[w], 1);
}

static job job_new(int64_t n_task, int n_worker)
{
    job j = {.n_task = n_task, .n_worker = n_worker};
    j.count = calloc((size_t)n_task + 1, sizeof *j.count);
    j.owner = calloc((size_t)n_task + 1, sizeof *j.owner);
    j.inside = calloc((size_t)n_worker, sizeof *j.inside);
    return j;
}

static void job_free(job *j)
{
    free(j->count);
    free(j->owner);
    free(j->inside);
}

static void every_task_runs_once(void **state)
{
    (void)state;
    static const int threads[] = {1, 2, 3, 8};
    static const int64_t tasks[] = {0, 1, 2, 7, 8, 9, 1000};
    for (size_t t = 0; t < UNIT_COUNT(threads); t++) {
        pool *p = NULL;
        assert_int_equal(pool_open(&p, threads[t], NULL), KVS_OK);
        assert_int_equal(pool_size(p), threads[t]);
        for (size_t n = 0; n < UNIT_COUNT(tasks); n++) {
            job j = job_new(tasks[n], threads[t]);
            for (int rep = 1; rep <= 20; rep++) {
                pool_run(p, run_task, &j, tasks[n]);
                for (int64_t i = 0; i < tasks[n]; i++) {
                    assert_int_equal(j.count[i], rep);
                }
            }
            assert_int_equal(j.bad_worker, 0);
            job_free(&j);
        }
        pool_close(p);
    }
}

static void null_and_one_run_inline_in_order(void **state)
{
    (void)state;
    job j = job_new(5, 1);
    pool_run(NULL, run_task, &j, 5);
    assert_int_equal(pool_size(NULL), 1);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(j.count[i], 1);
        assert_int_equal(j.owner[i], 0);
    }
    job_free(&j);
    pool_close(NULL);
}

static void long_tasks_are_shared(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 4, NULL), KVS_OK);
    job j = job_new(40, 4);
    j.nap_ns = 2000000;
    pool_run(p, run_task, &j, j.n_task);
    int used[4] = {0};
    for (int i = 0; i < 40; i++) {
        used[j.owner[i]]++;
    }
    for (int w = 0; w < 4; w++) {
        assert_true(used[w] > 0);
    }
    job_free(&j);
    pool_close(p);
}

/* A short run must not wait for workers that are asleep or have no core. */
static void short_runs_do_not_wait_for_sleepers(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 32, NULL), KVS_OK);
    job j = job_new(2, 32);
    for (int i = 0; i < 3000; i++) {
        pool_run(p, run_task, &j, 2);
        if (i % 1000 == 999) {
            const struct timespec nap = {0, 3000000};
            nanosleep(&nap, NULL);
        }
    }
    assert_int_equal(j.count[0], 3000);
    assert_int_equal(j.count[1], 3000);
    assert_int_equal(j.bad_worker, 0);
    job_free(&j);
    pool_close(p);
}

/* Waits for the other task, at most ten seconds. */
static void meet_task(void *ctx, int64_t i, int w)
{
    (void)i;
    (void)w;
    atomic_int *n_there = ctx;
    atomic_fetch_add(n_there, 1);
    const int64_t until = clock_ns() + INT64_C(10000000000);
    while (atomic_load(n_there) < 2 && clock_ns() < until) {
        sched_yield();
    }
    if (atomic_load(n_there) < 2) {
        atomic_fetch_add(n_there, -100);
    }
}

/* Tasks that wait for each other end only where a worker that sleeps is woken for the second. */
static void sleepers_are_woken(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    int met = 1;
    for (int round = 0; round < 5 && met; round++) {
        const struct timespec nap = {0, 30000000};
        nanosleep(&nap, NULL);
        atomic_int n_there = 0;
        pool_run(p, meet_task, &n_there, 2);
        met = atomic_load(&n_there) == 2;
    }
    pool_close(p);
    assert_true(met);
}

static void *rank_main(void *arg)
{
    int *ok = arg;
    pool *p = NULL;
    if (pool_open(&p, 3, NULL) != KVS_OK) {
        return NULL;
    }
    job j = job_new(16, 3);
    for (int i = 0; i < 300; i++) {
        pool_run(p, run_task, &j, j.n_task);
    }
    *ok = atomic_load(&j.bad_worker) == 0;
    for (int i = 0; i < 16; i++) {
        *ok = *ok && j.count[i] == 300;
    }
    job_free(&j);
    pool_close(p);
    return NULL;
}

static void many_pools_on_few_cores(void **state)
{
    (void)state;
    enum { N = 8 };
    pthread_t t[N];
    int ok[N] = {0};
    const int64_t t0 = clock_ns();
    for (int i = 0; i < N; i++) {
        assert_int_equal(pthread_create(&t[i], NULL, rank_main, &ok[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(t[i], NULL);
        assert_true(ok[i]);
    }
    assert_true(clock_ns() - t0 < INT64_C(20000000000));
}

static void mask_task(void *ctx, int64_t i, int w)
{
    (void)i;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, NULL, &set);
    const int open = sigismember(&set, SIGINT) == 0;
    /* what a thread does to itself: a host's handler of crashes must see it */
    const int own = sigismember(&set, SIGSEGV) == 0 && sigismember(&set, SIGILL) == 0;
    ((int *)ctx)[w] = !own ? 3 : open ? 2 : 1;
    const struct timespec nap = {0, 2000000};
    nanosleep(&nap, NULL);
}

static void workers_leave_signals_to_the_host(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    int seen[2] = {0};
    for (int i = 0; i < 50 && seen[1] == 0; i++) {
        pool_run(p, mask_task, seen, 4);
    }
    assert_int_equal(seen[0], 2);
    assert_int_equal(seen[1], 1);
    pool_close(p);
}

static void alloc_task(void *ctx, int64_t i, int w)
{
    (void)ctx;
    (void)w;
    (void)i;
    mem_free(mem_alloc(1, 0));
    const struct timespec nap = {0, 10000};
    nanosleep(&nap, NULL);
}

static void the_guard_reaches_the_workers(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 4, NULL), KVS_OK);
    const int64_t before = mem_stats_get().n_violation;
    pool_run(p, alloc_task, NULL, 500);
    assert_int_equal(mem_stats_get().n_violation - before, 0);
    mem_guard_begin();
    pool_run(p, alloc_task, NULL, 500);
    (void)mem_guard_end();
    assert_int_equal(mem_stats_get().n_violation - before, 500);
    const int64_t n_alloc = mem_stats_get().n_alloc;
    job j = job_new(50, 4);
    pool_run(p, run_task, &j, 50);
    assert_int_equal(mem_stats_get().n_alloc, n_alloc);
    job_free(&j);
    pool_close(p);
}

static void bad_sizes_are_refused(void **state)
{
    (void)state;
    static const int bad[] = {0, -1, POOL_MAX_THREAD + 1};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        kvs_error err = {0};
        pool *p = (pool *)&err;
        assert_int_equal(pool_open(&p, bad[i], &err), KVS_INVALID);
        assert_null(p);
        assert_non_null(strstr(err.text, "use 1 to 1024"));
    }
    const mem_stats s0 = mem_stats_get();
    for (int n = 1;; n++) {
        pool *p = NULL;
        mem_fail_after(n);
        const kvs_status st = pool_open(&p, 2, NULL);
        if (!mem_fail_fired()) {
            mem_fail_after(0);
            assert_int_equal(st, KVS_OK);
            assert_true(n > 2);
            pool_close(p);
            break;
        }
        assert_int_equal(st, KVS_NOMEM);
        assert_null(p);
    }
    assert_int_equal(mem_stats_get().n_live, s0.n_live);
    assert_true(pool_cores() >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(null_and_one_run_inline_in_order),
        cmocka_unit_test(long_tasks_are_shared),
        cmocka_unit_test(short_runs_do_not_wait_for_sleepers),
        cmocka_unit_test(sleepers_are_woken),
        cmocka_unit_test(many_pools_on_few_cores),
        cmocka_unit_test(workers_leave_signals_to_the_host),
        cmocka_unit_test(the_guard_reaches_the_workers),
        cmocka_unit_test(bad_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
