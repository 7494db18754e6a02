/* check/check_comm.h: the body of `kvspan check --comm`.
 *
 * Runs every collective on every transport there is: what it moves and sums against a naive
 * simulation, what it counts against the contract's formulas, and with every fault a rank can have,
 * that all ranks end with one reason that names the rank. Transports: self, threads of 1 to 8
 * ranks, and those of a job of several processes: TCP where a rendezvous is given, else MPI when the
 * process was started by mpirun and the build has it (all processes of the job call check_comm_run
 * then; the one of rank 0 reports, and runs the other transports). Exchanges between CUDA devices: comm_cuda.h. */
#ifndef KVS_CHECK_COMM_H
#define KVS_CHECK_COMM_H

#include <stdint.h>
#include "comm/comm.h"
#include "kvspan/log.h"
#include "kvspan/status.h"

typedef struct check_comm_totals {
    int64_t n_passed;
    int64_t n_failed;
    int64_t n_skipped;
} check_comm_totals;

typedef struct check_comm_config {
    uint64_t seed; /* of the data                                                             */
    int32_t quick; /* 1: fewer group sizes, smaller data; under 15 s                          */
    int32_t
        timeout_ms; /* of the calls in which a rank is late on purpose; 0: 1000, on CUDA 300   */
    const char *rendezvous; /* of a job: "tcp://HOST:PORT"; NULL: none                             */
    int32_t rank, n_rank;   /* this process in it                                                  */
    /* Receives each row as it is finished, without newline:
     *     op=all_gather transport=threads n=3 fault=none size=odd pass calls=12 bytes=29484
     *     op=barrier transport=threads n=3 fault=stall rank=2 pass ms=1000.4 "rank 2 more than ..."
     * a failed one has FAIL and, last, the first thing that was wrong; a skipped one skip and why.
     * Called from the calling thread; NULL: not wanted. */
    void (*line)(void *ctx, const char *text);
    void *ctx;
    check_comm_totals
        *totals; /* rows; filled also on failure; NULL: not wanted                    */
} check_comm_config;

/* KVS_OK: it ran and no row failed. KVS_INTERNAL: a row failed; the message has the number and the
 * first one. KVS_INVALID: a negative time-out, or processes of a job that do not check the same. Else it could not run.
 * While it runs, the library's log is silent for the subsystem comm; the level comes back as given by KVS_LOG. */
kvs_status check_comm_run(const check_comm_config *cfg, kvs_error *err);

/* What connects the processes of the job that this one belongs to: "tcp", "mpi"; NULL: it is alone. */
const char *check_job_transport(const check_comm_config *cfg);
/* This process's end of a new group of all processes of the job. KVS_UNSUPPORTED: not in this build. */
kvs_status check_job_open(const check_comm_config *cfg, int32_t timeout_ms, comm **out, kvs_error *err);
/* How long processes wait for each other at most, ms: `ms`, and as long as one of them may be waiting for a rank that is
 * late on purpose. */
int32_t check_job_patience(int32_t ms, int32_t timeout_ms);
/* Collective: KVS_INVALID on all where one checks something else, with what it is, both values and the rank. device: what
 * is checked; timeout_ms: of ranks that are late on purpose. */
kvs_status check_job_compare(const check_comm_config *cfg, comm *job, const char *device, int32_t timeout_ms,
                             kvs_error *err);

/* Turns the log of comm/ off and returns the level it had: failures of a check are on purpose. */
kvs_log_level check_comm_log_off(void);
void check_comm_log_on(kvs_log_level level);

#endif
