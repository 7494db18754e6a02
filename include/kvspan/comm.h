/* kvspan/comm.h - ranks: how they come to be, and the transports between them.
 *
 * A kvs_comm is one rank's end of a group. It is used by one thread at a time. All ranks of a group make
 * the same collective calls in the same order (kvspan/dcp.h says which functions are collective). A rank
 * that fails, dies or is late by more than the time-out ends the group: every rank gets KVS_PEER with a
 * message that names it, and only kvs_comm_close may follow. Nothing hangs.
 */
#ifndef KVSPAN_COMM_H
#define KVSPAN_COMM_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct kvs_comm kvs_comm;

typedef struct kvs_comm_config {
    size_t struct_size;
    int32_t timeout_ms; /* a collective waits this long for its peers; 0: 30000                       */
    int32_t no_check;   /* 1: skip comparing (sequence, operation, bytes) between ranks               */
} kvs_comm_config;

static inline kvs_comm_config kvs_comm_config_default(void)
{
    kvs_comm_config c;
    c.struct_size = sizeof(c);
    c.timeout_ms = 0;
    c.no_check = 0;
    return c;
}

/* A group of one. *out is NULL on failure. Threads: any. */
kvs_status kvs_comm_open_self(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err);

/* A group of n ranks in this process, 1 <= n <= 64: fills out[0..n-1]; hand each to the thread that is that
 * rank. All or nothing: on failure every out[] is NULL. Each is closed by its own rank. Threads: any. */
kvs_status kvs_comm_open_threads(kvs_comm **out, int32_t n, const kvs_comm_config *cfg,
                                 kvs_error *err);

/* This process's rank in MPI_COMM_WORLD; starts MPI (MPI_THREAD_SERIALIZED or better) when it is not running and
 * then also ends it at the last close. Collective over the world. KVS_UNSUPPORTED in a build without MPI.
 * Threads: one at a time. */
kvs_status kvs_comm_open_mpi(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err);

int32_t kvs_comm_rank(const kvs_comm *c);
int32_t kvs_comm_size(const kvs_comm *c);

/* Waits for every rank. Collective. Threads: the rank's own. */
kvs_status kvs_comm_barrier(kvs_comm *c, kvs_error *err);

/* Ends the group from any rank: pending and later calls of all ranks fail with KVS_PEER and `reason`.
 * Threads: any. */
void kvs_comm_abort(kvs_comm *c, const char *reason);

/* Releases this rank's end. NULL is fine. Not collective; a peer still waiting for this rank gets KVS_PEER.
 * Threads: the rank's own. */
void kvs_comm_close(kvs_comm *c);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
