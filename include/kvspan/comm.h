/* kvspan/comm.h - ranks: how they come to be, and the transports between them.
 *
 * A kvs_comm is one rank's end of a group. It is used by one thread at a time. All ranks of a group
 * make the same collective calls in the same order (kvspan/dcp.h says which functions are
 * collective). A rank that fails, dies, closes its end or is late by more than the time-out ends the
 * group: every rank gets KVS_PEER with a message that names it, at once in later calls, and only
 * kvs_comm_close may follow. Nothing hangs. What the library splits off a group (kvs_dcp_open) ends
 * with it, and it with that. A rank whose call is refused for its arguments or for want of memory
 * ends the group too, since it does not enter; the others are told why.
 *
 * A message ends in the rank's own last calls; the longer list of each rank goes to the log (level
 * warn, subsystem comm) when its group ends.
 *
 * Compiles as C11 and C++17. */
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
    int32_t timeout_ms; /* a collective waits this long for its peers; 0: 30000                    */
    int32_t no_check;   /* 1: skip comparing (call number, operation, bytes) between ranks; what a
                           rank receives is still checked for its size                             */
} kvs_comm_config;

static inline kvs_comm_config kvs_comm_config_default(void)
{
    kvs_comm_config c;
    c.struct_size = sizeof(c);
    c.timeout_ms = 0;
    c.no_check = 0;
    return c;
}

/* A group of one. cfg NULL means defaults, here and below. *out is NULL on failure.
 * Threads: any. */
kvs_status kvs_comm_open_self(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err);

/* A group of n ranks in this process, 1 <= n <= 64: fills out[0..n-1]; hand each to the thread that
 * is that rank. All or nothing: on failure every out[] is NULL (with n out of range, out is not
 * touched). Each is closed by its own rank.
 * Threads: any. */
kvs_status kvs_comm_open_threads(kvs_comm **out, int32_t n, const kvs_comm_config *cfg,
                                 kvs_error *err);

/* This process's rank in MPI_COMM_WORLD. Collective over the world. KVS_UNSUPPORTED in a build
 * without MPI.
 *
 * Starts MPI when it is not running and then ends it at the last close, which waits for the other
 * processes' last close, at most the time-out; when one is missing (it died), MPI stays as it is.
 * MPI cannot start twice in a process: keep one group open until the end. An application that runs
 * MPI itself starts it with MPI_THREAD_SERIALIZED or better and ends it after the last close. Calls
 * of this library into MPI are serialised among themselves; unless MPI runs with
 * MPI_THREAD_MULTIPLE, the application sees to it that its own do not meet them.
 *
 * When a process dies, mpirun usually kills the others before they can report; `mpirun
 * --enable-recovery` (Open MPI) or `mpiexec -disable-auto-cleanup` (MPICH) leaves that to them.
 * Threads: one at a time. */
kvs_status kvs_comm_open_mpi(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err);

/* Rank `rank` of `size` processes, 1 <= size <= 256, on one host or several, without a launcher: each
 * opens its end with the same address "tcp://HOST:PORT" and the same size. Rank 0 must run on HOST (a
 * name, an IPv4 address, or an IPv6 address in brackets), where it listens until all have come; the
 * others may start before it, and try for as long as the time-out. Collective over the processes. A rank
 * that is missing when time is over is named to all who came (KVS_PEER); one that does not fit (another
 * size, a rank that is there already) is told so at once (KVS_INVALID), and the others go on waiting for
 * the right one. Several groups may be opened at one address, one after the other.
 *
 * Afterwards each process listens on a port of its own choice, at the address it reached rank 0 from,
 * and each two of them are connected: firewalls between the hosts let that pass. With 127.0.0.1 as HOST
 * nothing outside of the host can connect. What is not a rank may connect and does no harm, but ranks are
 * not authenticated and nothing is encrypted: as with MPI, the network is one that is trusted. A process
 * that dies is noticed by its peers at once, a host that vanishes by the time-out.
 * Threads: any. */
kvs_status kvs_comm_open_tcp(kvs_comm **out, const char *address, int32_t rank, int32_t size,
                             const kvs_comm_config *cfg, kvs_error *err);

/* How many processes the MPI launcher (mpirun, mpiexec) started this one with; 0: none did.
 * Read from the environment; MPI need not run. Threads: any. */
int32_t kvs_comm_launched(void);

/* This rank's number, and how many there are; -1 and 0 for NULL. Threads: any. */
int32_t kvs_comm_rank(const kvs_comm *c);
int32_t kvs_comm_size(const kvs_comm *c);

/* Waits for every rank. Collective. Threads: the rank's own. */
kvs_status kvs_comm_barrier(kvs_comm *c, kvs_error *err);

/* Ends the group from any rank: pending and later calls of all ranks fail with KVS_PEER and
 * `reason` (copied; NULL is fine), unless the group has ended already.
 * Threads: any, while the rank's own has not closed it. */
void kvs_comm_abort(kvs_comm *c, const char *reason);

/* Releases this rank's end. NULL is fine. Not collective, but see kvs_comm_open_mpi; a peer that
 * waits for this rank, now or later, gets KVS_PEER.
 * Threads: the rank's own. */
void kvs_comm_close(kvs_comm *c);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
