/* pool.h: a few worker threads that one caller hands numbered tasks to.
 *
 * The caller is worker 0 and works too. Tasks are fetched one at a time from a shared counter, so
 * which worker runs a task is not fixed: a result may depend on i_task, never on i_worker, which is
 * for scratch memory. Waiting threads spin for a short while and then sleep. pool_run waits for the
 * workers that have joined the run, never for one that has not woken up yet, so that many pools on
 * few cores make progress.
 *
 * One pool belongs to one caller at a time; a task must not call pool_run on its own pool. Workers
 * block all signals. pool_run does not allocate. */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include <stdint.h>

#include "kvspan/status.h"

typedef struct pool pool;

/* i_task in [0, n_task), i_worker in [0, pool_size). */
typedef void (*pool_fn)(void *ctx, int64_t i_task, int i_worker);

enum { POOL_MAX_THREAD = 1024 };

/* n_thread includes the caller: 1 starts no thread. On failure *out is NULL. */
kvs_status pool_open(pool **out, int n_thread, kvs_error *err);

/* Runs fn once for every task and returns when all are done; what they wrote is visible to the
 * caller. With p NULL, or a pool of 1, runs them in order in the calling thread as worker 0. */
void pool_run(pool *p, pool_fn fn, void *ctx, int64_t n_task);

/* Ends the workers; NULL is fine. */
void pool_close(pool *p);

/* The number of workers, the caller included; 1 for NULL. */
int pool_size(const pool *p);

/* The number of cores this process may use, at least 1. */
int pool_cores(void);

#endif
