/* comm/p2p.h: a group of ranks whose kernels write into each other's memory.
 *
 * The group owns one area per rank (dev/wire.h) on the rank's device and lets the devices reach each
 * other. Kernels get a wire each and do the exchanging (kern/exchange.h); what they find wrong waits in
 * the area until p2p_check reads it. Ranks may share a device: a simulation of more GPUs than there are.
 *
 * The rules of comm/comm.h hold: every rank enters every exchange, ranks that disagree or do not come end
 * the group with one reason that names the rank, and nothing hangs; an ended group stays ended. What
 * differs: a rank learns of it when it checks, once its queue is done, and results since then are void.
 *
 * Ranks of one process (p2p_open) are threads or turns of one thread; a function of one rank is for one thread
 * at a time. Ranks that are processes of one host (p2p_open_over) have a device each and hold one area each,
 * which the others map; each calls the functions for its own rank only, and those that are collective then are
 * marked so. They share their end with a host communicator: whatever ends one ends the other. */
#ifndef KVS_COMM_P2P_H
#define KVS_COMM_P2P_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "comm/comm.h"
#include "dev/dev.h"
#include "dev/wire.h"
#include "kvspan/status.h"

typedef struct p2p p2p;

typedef struct p2p_config {
    int32_t n_rank;        /* 1 to WIRE_MAX_RANK */
    const int32_t *device; /* [n_rank] CUDA device of each rank */
    uint32_t n_cell;       /* room of a message (exchange_cells_for) */
    int32_t timeout_ms;    /* > 0: how long a kernel waits for its peers */
    bool share;            /* processes may be on one device, to test what they do: see p2p_open_over */
    /* Names what a head says, for messages: op = what & 0xFF. NULL: numbers. */
    const char *(*op_name)(int32_t op);
} p2p_config;

/* *out is NULL on failure. KVS_INVALID: a config that cannot be. KVS_NODEV: a device that is not there.
 * KVS_UNSUPPORTED: no CUDA in this build, or two devices that cannot reach each other. KVS_NOMEM. */
kvs_status p2p_open(p2p **out, const p2p_config *cfg, kvs_error *err);
/* This process's rank of a group over the processes of `host` (the caller's; it outlives the group), on device
 * cfg->device[its rank]; the other entries do not matter, and the rest is the same on all. Devices are told apart by
 * their UUID, so each process may see others, under other numbers. Collective. All succeed or all fail with one reason:
 * as above; KVS_INVALID where numbers of cells, time-outs or numbers of ranks differ, or where the ranks of `host` are
 * threads; KVS_UNSUPPORTED on different hosts (use comm/nccl.h), and where two ranks are on one device: a device
 * runs kernels of one process at a time, so an exchange would take as long as it needs to change between them,
 * milliseconds. With cfg->share they do that. */
kvs_status p2p_open_over(p2p **out, comm *host, const p2p_config *cfg, kvs_error *err);
/* All queues are done. NULL is fine. Over processes: collective, unless the host communicator has ended; a
 * rank frees its area once the others have let go of it, and keeps it where they cannot say so. */
void p2p_close(p2p *g);

/* Makes the rank's device the calling thread's. */
kvs_status p2p_use(const p2p *g, int32_t rank, kvs_error *err);
wire p2p_wire(const p2p *g, int32_t rank);

/* After the rank's queue is done: KVS_OK, or KVS_PEER with the reason for which the group has ended, the same
 * each time. Over processes the host communicator ends too, if it has not. */
kvs_status p2p_check(p2p *g, int32_t rank, kvs_error *err);
/* Ends the group from the host, also while kernels wait: they give up, and every rank is told this reason.
 * Nothing where the group has ended already. */
void p2p_abort(p2p *g, int32_t rank, const char *reason);
/* Exchanges that the rank has finished since the group was opened or renewed. */
uint32_t p2p_count(const p2p *g, int32_t rank);
/* Whether the group should be renewed before many more exchanges: half of the epochs are used. */
int p2p_is_worn(uint32_t count);
/* Starts the epochs again. Between exchanges, with all queues done and no fault; by one thread. Over processes:
 * collective. */
kvs_status p2p_renew(p2p *g, kvs_error *err);

/* Bytes that one rank's area takes. */
size_t p2p_area_bytes(const p2p_config *cfg);

/* The text of a fault, for p2p_check and tests. seen: [n_rank] what `by` has as the head of each rank; the
 * own one is what it sent itself. reason: of p2p_abort. */
void p2p_explain(const p2p_config *cfg, uint64_t fault, const wire_head *seen, const char *reason,
                 kvs_error *err);

#endif
