/* processes.h: runs a function in processes of its own and collects what went wrong, as ranks.h does for
 * threads. */
#ifndef TESTS_PROCESSES_H
#define TESTS_PROCESSES_H

#include "ranks.h"

enum { ADDRESS = 48 };

/* An address on this host at which nobody listens. */
void free_address(char address[ADDRESS]);

/* What each process does, with an end that it opens itself; job->c is closed for it. */
typedef void (*process_fn)(rank_job *job, const char *address);

/* n processes, ranks 0..n-1; `dies` (-1: none) may end any way. Fails the test when a rank noted a failure,
 * left memory or did not come to its end. */
void processes_fork(int32_t n, int32_t dies, process_fn fn, void *ctx);

/* The same on ends that are open already. */
void processes_run(int32_t n, const comm_config *cfg, rank_fn fn, void *ctx);

#endif
