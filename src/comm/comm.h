/* comm/comm.h - collectives between the ranks of a group, whatever carries them.
 *
 * Every rank of a group makes the same calls in the same order with the same sizes, whatever it owns: an
 * empty shard enters with empty data. Each call carries (sequence number, operation, bytes); ranks compare
 * them and a mismatch is KVS_PEER with a message that says which rank called what. A rank that is late by
 * more than the time-out or has failed ends the group: every call on every rank returns KVS_PEER naming the
 * rank, for ever after; nothing hangs. comm_abort ends the group at once with the caller's reason.
 *
 * Sums are f32 in a fixed order that depends on the group size only and are the same bits on every
 * transport: ranks 0..n-1 by the tree (r, r + n/2), (r, r + n/4), ... for n = 1, 2, 4, 8, else in rank order.
 *
 * A comm belongs to one rank and is used by one thread at a time. Nothing is allocated by a collective
 * once one of the same size has run (staging grows to the largest and stays).
 */
#ifndef KVS_COMM_COMM_H
#define KVS_COMM_COMM_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/comm.h"
#include "kvspan/status.h"

typedef struct kvs_comm comm;

typedef enum comm_op {
    COMM_OP_ALL_GATHER,
    COMM_OP_ALL_TO_ALL,
    COMM_OP_REDUCE_SCATTER,
    COMM_OP_ALL_REDUCE,
    COMM_OP_BROADCAST,
    COMM_OP_BARRIER,
    COMM_OP_SPLIT,
    COMM_N_OP
} comm_op;

/* Counters of one rank since it opened: what it put on the wire to OTHER ranks and took from them. */
typedef struct comm_stats {
    uint64_t n_call[COMM_N_OP];
    uint64_t bytes_sent[COMM_N_OP]; /* all_gather: bytes * (n-1); all_to_all: bytes_per_peer * (n-1);
                                       reduce_scatter: 4 * n_elem * (n-1); all_reduce as the two in turn */
    uint64_t bytes_received[COMM_N_OP];
} comm_stats;

int32_t comm_rank(const comm *c);
int32_t comm_size(const comm *c);
const char *comm_transport(const comm *c); /* "self", "threads", "mpi" */
const comm_stats *comm_counters(const comm *c);

/* recv [size, bytes] in rank order. In place when send == recv + rank * bytes. */
kvs_status comm_all_gather(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err);
/* send [size, bytes] by destination, recv [size, bytes] by source. Not in place. */
kvs_status comm_all_to_all(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err);
/* send [size, n] f32, recv [n]: the sum over ranks of their block number `rank`. */
kvs_status comm_reduce_scatter(comm *c, const float *send, float *recv, size_t n, kvs_error *err);
/* buf [n] f32 becomes the sum over ranks, the same bits on all. */
kvs_status comm_all_reduce(comm *c, float *buf, size_t n, kvs_error *err);
kvs_status comm_broadcast(comm *c, void *buf, size_t bytes, int32_t root, kvs_error *err);
kvs_status comm_barrier(comm *c, kvs_error *err);
/* Ranks of equal colour form a group, ordered by (key, rank). Collective over c. Close it before c. */
kvs_status comm_split(comm *c, int32_t colour, int32_t key, comm **out, kvs_error *err);
/* Ends the group: every rank's pending and later calls fail with KVS_PEER and this text. */
void comm_abort(comm *c, const char *reason);
void comm_close(comm *c);

/* Start-up handshake: every rank gives the same list of names with its own values; a value that differs
 * from rank 0's refuses the start on every rank, naming the field, both values and the rank. Collective. */
typedef struct comm_field {
    const char *name;
    const char *value;
} comm_field;
kvs_status comm_handshake(comm *c, const comm_field *fields, int32_t n_field, kvs_error *err);

#endif
