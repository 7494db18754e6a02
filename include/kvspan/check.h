/* kvspan/check.h - checks every kernel that this machine can run.
 *
 * Each op (attention, merge, indexer, top-k, cache writes and reads, ...) is run in every variant
 * over random and edge shapes and compared with an oracle that is written from the formulas and
 * shares no code with the kernels. Inputs must stay as they were, nothing outside the outputs may
 * be touched, two runs and any number of worker threads must give the same bytes, and what
 * docs/numbers.md promises to the bit is compared to the bit.
 *
 * Compiles as C11 and C++17.
 */
#ifndef KVSPAN_CHECK_H
#define KVSPAN_CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* How many rows passed, failed and were skipped. Skipped: a variant that this machine cannot
 * run, or that is another one's function. */
typedef struct kvs_check_result {
    int64_t n_passed;
    int64_t n_failed;
    int64_t n_skipped;
} kvs_check_result;

/* One row of results. Texts are valid during the call that hands the row over. */
typedef struct kvs_check_row {
    const char *op, *variant, *cls; /* NULL with comm: the line says it all */
    const char *verdict;            /* "pass", "FAIL" or "skip" */
    int64_t n_case;
    double worst;       /* the largest error over its bound */
    const char *detail; /* the first failure, or why it was skipped; may be "" */
    const char *line;   /* the whole row as text */
} kvs_check_row;

/* Zero means default for every field. */
typedef struct kvs_check_config {
    size_t struct_size;  /* sizeof(kvs_check_config) */
    const char *op;      /* the op to check; NULL: all */
    const char *variant; /* the variant to check; NULL: all */
    const char *cpu;     /* CPU cap: "ref", "avx2", "avx512", "avx512bf16", "amx"; NULL: none */
    uint64_t seed;       /* of the random cases */
    int32_t quick;       /* 1: fewer and smaller cases */

    /* 1: only the cases that pin a sentence of the number contract, each with that sentence, with
     * fixed seed and size. */
    int32_t conformance;

    /* 1: plant faults into outputs, inputs and red zones of every op and demand that each is
     * reported; a row per fault. */
    int32_t selftest;

    /* Receives each finished row, without newline. */
    void (*line)(void *ctx, const char *text);
    void *ctx;

    /* A file that receives the rows too: op,variant,class,cases,verdict,worst,detail,seed. Replaced
     * if it exists. NULL: none. */
    const char *csv;

    kvs_check_result *result; /* filled also on failure; NULL: not wanted */

    /* 1: instead of the kernels, the collectives of every transport, with and without faults. Goes
     * with seed, quick, timeout_ms and what receives something, except csv and progress. */
    int32_t comm;
    /* comm: of calls in which a rank is late on purpose; default 1000, with cuda 300 */
    int32_t timeout_ms;

    /* Receives each row, after `line` has had its text. NULL: not wanted. */
    void (*row)(void *ctx, const kvs_check_row *row);

    /* Told what is about to be done, of how many steps in all; a return value other than 0 ends the
     * run with KVS_CANCELLED. NULL: not wanted. */
    int (*progress)(void *ctx, const char *what, int64_t done, int64_t total);

    /* Where the kernels run: "cpu" (NULL too) or "cuda", the first device the process sees. There the
     * kernels of the device are checked, in memory that host and device share; selftest and cpu are
     * refused. With comm: exchanges between the devices the process sees, which ranks share where there are
     * fewer, and NCCL where there are two and NCCL can be loaded. */
    const char *device;

    /* comm: several processes that call this check together, each with the same `rendezvous`
     * ("tcp://HOST:PORT"), its rank, 0 up, and their number; see kvs_comm_open_tcp. NULL: the processes
     * that an MPI launcher has started, where one has, else this one alone. Up to 8 processes; rank 0 hands the
     * rows over. With cuda each has the device whose number is that of the process among those of its host, modulo
     * those that it sees. */
    const char *rendezvous;
    int32_t rank, n_rank;
} kvs_check_config;

static inline kvs_check_config kvs_check_config_default(void)
{
    kvs_check_config c;
    memset(&c, 0, sizeof c);
    c.struct_size = sizeof c;
    return c;
}

/* Runs the checks. A row is: op, variant, case class, verdict, worst error over its bound, and for
 * a failure the first bad coordinate; the last line is "N passed, N failed, N skipped".
 *
 * Returns KVS_OK when nothing failed. KVS_INVALID: an unknown op, variant or CPU level (the
 * message lists what exists), or a size or flag that is not valid. KVS_INTERNAL: a check failed;
 * the message has the number and the first failure. KVS_NODEV, KVS_UNSUPPORTED: no CUDA device that
 * can be used, or no CUDA kernels in this build. KVS_DEVICE: the device failed and the run broke off;
 * the process cannot use it again. KVS_CANCELLED, KVS_NOMEM, KVS_IO. Threads:
 * one call at a time; line, row and progress are called from the calling thread. */
kvs_status kvs_check_run(const kvs_check_config *cfg, kvs_error *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
