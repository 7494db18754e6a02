/* pool.c: the worker pool.
 *
 * One atomic word `state` holds the run: bits 0..15 the workers inside, bit 16 closed, bits 17..63
 * the run's number. Invariants:
 *   P1  fn, ctx and n_task change only while no worker is inside and the run is closed.
 *   P2  a worker enters by raising the count of an open run whose number it has not seen, with one
 *       compare-and-swap, and reads fn, ctx, n_task after that.
 *   P3  the caller closes the run when no task is left to fetch and returns when the count is 0;
 *       workers that come later find the run closed and wait for the next.
 * Sleeping follows one pattern on both sides: announce under the mutex, look again, wait; the waker
 * changes the state, then looks for the announcement (all sequentially consistent). */
#include "base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"

#define STATE_COUNT  UINT64_C(0xFFFF)
#define STATE_CLOSED (UINT64_C(1) << 16)
#define STATE_RUN    (UINT64_C(1) << 17)

/* Looks at the state before sleeping: long when every thread has a core, short when not. */
enum { SPIN_LONG = 2000, SPIN_SHORT = 20 };

typedef struct worker {
    pool *p;
    pthread_t thread;
    int i;
} worker;

struct pool {
    _Alignas(64) atomic_uint_fast64_t state;
    _Alignas(64) atomic_int_fast64_t next; /* the task to fetch; may run past n_task */
    _Alignas(64) atomic_int n_sleep;       /* workers asleep or about to be          */
    atomic_int caller_waits;
    atomic_bool stop;
    pool_fn fn;
    void *ctx;
    int64_t n_task;
    bool guard; /* the caller is inside a no-allocation guard */
    int n_thread;
    int n_started;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_cond_t done;
    worker *workers; /* [n_thread - 1] */
};

static atomic_int g_threads; /* workers and callers of all open pools of the process */

static void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int spin_limit(void)
{
    static atomic_int cores;
    int n = atomic_load_explicit(&cores, memory_order_relaxed);
    if (n == 0) {
        n = pool_cores();
        atomic_store_explicit(&cores, n, memory_order_relaxed);
    }
    return atomic_load_explicit(&g_threads, memory_order_relaxed) <= n ? SPIN_LONG : SPIN_SHORT;
}

static void work(pool *p, int i_worker)
{
    const pool_fn fn = p->fn;
    void *ctx = p->ctx;
    const int64_t n_task = p->n_task;
    for (;;) {
        const int64_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (i >= n_task) {
            return;
        }
        fn(ctx, i, i_worker);
    }
}

/* Whether the state is an open run that the worker has not seen. */
static bool is_news(uint64_t state, uint64_t seen)
{
    return (state & STATE_CLOSED) == 0 && state / STATE_RUN != seen;
}

/* Waits for a run and enters it; false when the pool closes. */
static bool enter(pool *p, uint64_t *seen)
{
    int spin = 0;
    for (;;) {
        uint64_t s = atomic_load_explicit(&p->state, memory_order_acquire);
        if (is_news(s, *seen)) {
            if (atomic_compare_exchange_weak(&p->state, &s, s + 1)) {
                *seen = s / STATE_RUN;
                return true;
            }
            continue;
        }
        if (atomic_load(&p->stop)) {
            return false;
        }
        if (spin++ < spin_limit()) {
            spin_pause();
            continue;
        }
        spin = 0;
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->n_sleep, 1);
        while (!is_news(atomic_load(&p->state), *seen) && !atomic_load(&p->stop)) {
            pthread_cond_wait(&p->wake, &p->lock);
        }
        atomic_fetch_sub(&p->n_sleep, 1);
        pthread_mutex_unlock(&p->lock);
    }
}

static void leave(pool *p)
{
    const uint64_t s = atomic_fetch_sub(&p->state, 1) - 1;
    if ((s & STATE_COUNT) == 0 && atomic_load(&p->caller_waits)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->done);
        pthread_mutex_unlock(&p->lock);
    }
}

static void *worker_main(void *arg)
{
    const worker *w = arg;
    pool *p = w->p;
    uint64_t seen = 0;
    while (enter(p, &seen)) {
        const bool guard = p->guard;
        if (guard) {
            mem_guard_begin();
        }
        work(p, w->i);
        if (guard) {
            (void)mem_guard_end();
        }
        leave(p);
    }
    return NULL;
}

static void wait_inside(pool *p)
{
    for (int spin = 0; spin < spin_limit(); spin++) {
        if ((atomic_load_explicit(&p->state, memory_order_acquire) & STATE_COUNT) == 0) {
            return;
        }
        spin_pause();
    }
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->caller_waits, 1);
    while ((atomic_load(&p->state) & STATE_COUNT) != 0) {
        pthread_cond_wait(&p->done, &p->lock);
    }
    atomic_store(&p->caller_waits, 0);
    pthread_mutex_unlock(&p->lock);
}

void pool_run(pool *p, pool_fn fn, void *ctx, int64_t n_task)
{
    if (p == NULL || p->n_thread == 1 || n_task <= 1) {
        for (int64_t i = 0; i < n_task; i++) {
            fn(ctx, i, 0);
        }
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n_task = n_task;
    p->guard = mem_guard_active();
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    const uint64_t run = atomic_load_explicit(&p->state, memory_order_relaxed) / STATE_RUN + 1;
    atomic_store(&p->state, run * STATE_RUN);
    if (atomic_load(&p->n_sleep) > 0) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    work(p, 0);
    atomic_fetch_or(&p->state, STATE_CLOSED);
    wait_inside(p);
}

/* A worker inherits the creator's signal mask; with all blocked, signals go to the host's threads. */
static int start_worker(worker *w)
{
    /* what a thread does to itself stays with it, so that a host's handler of crashes sees it */
    static const int own[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        sigdelset(&all, own[i]);
    }
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int rc = pthread_create(&w->thread, NULL, worker_main, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

kvs_status pool_open(pool **out, int n_thread, kvs_error *err)
{
    *out = NULL;
    if (n_thread < 1 || n_thread > POOL_MAX_THREAD) {
        return err_set(err, KVS_INVALID, "%d worker threads: use 1 to %d", n_thread,
                       POOL_MAX_THREAD);
    }
    pool *p = mem_calloc(1, sizeof *p);
    worker *workers = mem_calloc((size_t)n_thread, sizeof *workers);
    if (p == NULL || workers == NULL) {
        mem_free(workers);
        mem_free(p);
        return err_set(err, KVS_NOMEM, "no memory for a pool of %d threads", n_thread);
    }
    p->workers = workers;
    p->n_thread = n_thread;
    atomic_init(&p->state, STATE_CLOSED);
    atomic_init(&p->next, 0);
    atomic_init(&p->n_sleep, 0);
    atomic_init(&p->caller_waits, 0);
    atomic_init(&p->stop, false);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    atomic_fetch_add(&g_threads, n_thread);
    for (int i = 1; i < n_thread; i++) {
        worker *w = &workers[i - 1];
        *w = (worker){.p = p, .i = i};
        const int rc = start_worker(w);
        if (rc != 0) {
            pool_close(p);
            return err_set(err, KVS_LIMIT, "cannot start worker thread %d of %d: %s; use fewer",
                           i + 1, n_thread, strerrordesc_np(rc));
        }
        p->n_started++;
    }
    *out = p;
    return KVS_OK;
}

void pool_close(pool *p)
{
    if (p == NULL) {
        return;
    }
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->stop, true);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n_started; i++) {
        pthread_join(p->workers[i].thread, NULL);
    }
    atomic_fetch_sub(&g_threads, p->n_thread);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    mem_free(p->workers);
    mem_free(p);
}

int pool_size(const pool *p)
{
    return p == NULL ? 1 : p->n_thread;
}

int pool_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        return 1;
    }
    const int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}
