/* cases.h: what one rank does in a test of the collectives, whatever the transport. The context of
 * each is NULL unless it says otherwise. */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H

#include <stdatomic.h>
#include "comm/fault.h"
#include "ranks.h"

/* Any number of ranks. */
void case_all_gather(rank_job *job);
void case_all_to_all(rank_job *job);
void case_broadcast(rank_job *job);
void case_reduce_scatter(rank_job *job);
void case_all_reduce(rank_job *job);
void case_exact_sum(rank_job *job);
void case_stress(rank_job *job);
void case_no_alloc(rank_job *job);
void case_counters(rank_job *job);

/* 4 or 8 ranks; ctx: bool, whether the parents close first. Closes job->c then. */
void case_split(rank_job *job);
/* 4 ranks or more. */
void case_uneven_split(rank_job *job);

/* ---- processes (cases_process.c); two ranks or more, except case_large and case_slow ------------ */

/* Segments of several megabytes; a gigabyte of buffers with 8 ranks. */
void case_large(rank_job *job);
/* Every rank sleeps before it enters its first call. */
void case_slow(rank_job *job);
/* With no_check: another operation of the same shape passes, another size does not. */
void case_unchecked(rank_job *job);
/* Rank 1 closes its end. */
void case_leaving(rank_job *job);
/* A thread of rank 1 ends a group that was split while all wait in its parent. */
void case_aborted(rank_job *job);
void case_handshake(rank_job *job);

/* ---- faults ------------------------------------------------------------------------------------ */

enum { LATE_MS = 800, DELAY_MS = 3200, DEADLINE_MS = 50000 };

/* One collective of each kind with small data; the group that a split makes is closed at once. */
kvs_status case_call(comm *c, int32_t op, kvs_error *err);

/* Every call on the ended group fails at once with a message that holds `text`. */
void case_ended(rank_job *job, const char *text);

typedef struct fault_case {
    int32_t op;
    comm_fault fault;
    int32_t rank; /* that has it */
    char want[96];
    atomic_int n_named; /* ranks that got a reason with `want` */
} fault_case;

/* Fills k->want from op, fault and rank; the fault is in call 2, followed by a barrier where the rank
 * skips it. */
void fault_want(fault_case *k);

/* ctx: fault_case. */
void case_fault(rank_job *job);

#endif
