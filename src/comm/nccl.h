/* comm/nccl.h: collectives over device memory by NCCL, which is loaded when it is asked for.
 *
 * It carries all_gather, all_to_all and broadcast, of bytes between buffers of the ranks' devices, in the
 * order of a queue, also while a graph is recorded. It carries no sums: NCCL's have an order of their own,
 * and ours are fixed (comm/comm.h). Barriers, splits and set-up stay with the host communicator that every
 * group here is opened over (threads, TCP, MPI), and so do the rules:
 *   - each call is compared between the ranks, (number, operation, bytes, root), before anything is enqueued;
 *     recording a graph compares, replaying one does not;
 *   - a rank that does not come to a call, or to nccl_wait, ends the group with an error that names it;
 *   - work that is enqueued everywhere and does not end in time is aborted (ncclCommAbort);
 *   - the group and its host communicator end together, for ever.
 *
 * No header of NCCL is used and nothing is linked: nccl_load.c declares what it calls and looks for
 * libnccl.so.2 where the loader does (LD_LIBRARY_PATH). Environment variables of NCCL are left as they are. */
#ifndef KVS_COMM_NCCL_H
#define KVS_COMM_NCCL_H

#include <stddef.h>
#include <stdint.h>
#include "comm/comm.h"
#include "dev/dev.h"

typedef struct nccl nccl;

/* Loads NCCL; *version (may be NULL) as NCCL counts: 22809 is 2.28.9. KVS_UNSUPPORTED, with what is missing
 * and what would work, when it is not there or lacks a function. Threads: any. */
kvs_status nccl_load(int32_t *version, kvs_error *err);

/* This rank's end of a group over the ranks of `host` (which stays the caller's and outlives it), on the
 * calling thread's device `device`; ranks have different devices. Collective. *out is NULL on failure. */
kvs_status nccl_open(nccl **out, comm *host, int32_t device, kvs_error *err);

/* As in comm/comm.h, in the order of q; memory of the device on both sides. */
kvs_status nccl_all_gather(nccl *c, const void *send, void *recv, size_t bytes, dev_queue *q,
                           kvs_error *err);
kvs_status nccl_all_to_all(nccl *c, const void *send, void *recv, size_t bytes, dev_queue *q,
                           kvs_error *err);
kvs_status nccl_broadcast(nccl *c, void *buf, size_t bytes, int32_t root, dev_queue *q, kvs_error *err);

/* Waits until every rank has come here and this rank's queue is done, each for the host communicator's
 * time-out at most. */
kvs_status nccl_wait(nccl *c, dev_queue *q, kvs_error *err);

/* Not collective; the queue is done, or the group has ended. NULL is fine. */
void nccl_close(nccl *c);

#endif
