/* comm/comm.h: collectives between the ranks of a group, whatever carries them.
 *
 * Every rank of a group makes the same calls in the same order with the same sizes, whatever it
 * owns: an empty shard enters with empty data. Each call carries (number, operation, bytes, root);
 * ranks compare them, and a difference ends the group with a message that says which rank called
 * what. A rank that is late by more than the time-out, has failed or has closed its end ends the
 * group too: every call on every rank returns KVS_PEER with the same reason, for ever after
 * (processes that notice at the same moment may word it differently); nothing hangs. comm_abort
 * ends it at once with the caller's reason. A call that is refused on one rank for its arguments
 * (KVS_INVALID) or for want of memory (KVS_NOMEM) ends the group as well, because that rank does
 * not enter while the others do.
 *
 * A group and all groups split from it, directly or not, are one family and end together: whatever
 * ends one ends all, on all ranks. They close in any order.
 *
 * Sums are f32 in a fixed order that depends on the group size only and are the same bits on every
 * transport: ranks 0..n-1 by the tree (r, r + n/2), (r, r + n/4), ... for n = 1, 2, 4, 8, else in
 * rank order from 0.
 *
 * A comm belongs to one rank and is used by one thread at a time (comm_abort: any thread). What a
 * rank sends is copied before the call waits for anybody: no rank ever reads or writes another
 * rank's buffers. Nothing is allocated by a collective once one of the same operation and size has
 * run (staging grows to the largest and stays); split and handshake are set-up and do allocate. */
#ifndef KVS_COMM_COMM_H
#define KVS_COMM_COMM_H

#include <stdbool.h>
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

/* "all_gather", ...; "?" outside the list. */
const char *comm_op_name(int32_t op);

enum {
    COMM_MAX_THREADS = 64,
    COMM_MAX_TCP = 256,
    /* what a rank that is a thread holds of what it sends: so many times its largest message of a group, since
     * peers may still read one while the next is laid out */
    COMM_THREAD_STAGING = 2
};

typedef struct comm_config {
    int32_t
        timeout_ms; /* > 0; how long a collective waits for its peers                          */
    bool no_check;  /* skip comparing (number, operation, bytes, root). What a rank receives is
                           still checked for its size, so nothing is written out of bounds         */
} comm_config;

/* A group of one. *out is NULL on failure. */
kvs_status comm_self_open(comm **out, const comm_config *cfg, kvs_error *err);

/* n ranks of this process, 1 <= n <= COMM_MAX_THREADS: out[0..n-1], each for the thread that is
 * that rank. On failure every out[] is NULL. */
kvs_status comm_thread_open(comm **out, int32_t n, const comm_config *cfg, kvs_error *err);

/* This process's rank of MPI_COMM_WORLD; see kvs_comm_open_mpi. */
kvs_status comm_mpi_open(comm **out, const comm_config *cfg, kvs_error *err);

/* Rank `rank` of `size` processes that meet at "tcp://HOST:PORT", where rank 0 listens until all have come; see
 * kvs_comm_open_tcp. */
kvs_status comm_tcp_open(comm **out, const char *address, int32_t rank, int32_t size,
                         const comm_config *cfg, kvs_error *err);

/* Counters of one rank since it opened: payload it gave to OTHER ranks and took from them in calls
 * that succeeded. Handshake and comm_agree count as the operations they are made of. */
typedef struct comm_stats {
    uint64_t n_call[COMM_N_OP];
    /* n ranks. all_gather, all_to_all: bytes * (n-1) both ways. reduce_scatter of n_elem:
     * 4 * n_elem * (n-1) both ways. all_reduce of m with own block b = comm_block(m, ...):
     * 4 * (m - b) + 4 * b * (n-1) both ways. broadcast: the root sends bytes * (n-1), the others
     * receive bytes. barrier: none. split: 32 * (n-1) both ways. */
    uint64_t bytes_sent[COMM_N_OP];
    uint64_t bytes_received[COMM_N_OP];
} comm_stats;

int32_t comm_rank(const comm *c);
int32_t comm_size(const comm *c);
const char *comm_transport(const comm *c); /* "self", "threads", "tcp", "mpi" */
const comm_stats *comm_counters(const comm *c);
/* Changes how long this rank waits in later calls; ms > 0. */
void comm_set_timeout(comm *c, int32_t ms);
/* Whether the group has ended, as far as this rank has heard. Threads: any. */
bool comm_failed(const comm *c);

/* recv [size, bytes] in rank order. In place when send == recv + rank * bytes; no other overlap. */
kvs_status comm_all_gather(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err);
/* send [size, bytes] by destination, recv [size, bytes] by source. Not in place. */
kvs_status comm_all_to_all(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err);
/* send [size, n] f32, recv [n]: the sum over ranks of their block number `rank`. In place when
 * recv == send + rank * n; no other overlap. */
kvs_status comm_reduce_scatter(comm *c, const float *send, float *recv, size_t n, kvs_error *err);
/* buf [n] f32 becomes the sum over ranks, the same bits on all. */
kvs_status comm_all_reduce(comm *c, float *buf, size_t n, kvs_error *err);
/* The root's buf goes to all. Every rank waits for every rank, as in the other calls. */
kvs_status comm_broadcast(comm *c, void *buf, size_t bytes, int32_t root, kvs_error *err);
kvs_status comm_barrier(comm *c, kvs_error *err);
/* Ranks of equal colour (any value) form a group, ordered by (key, rank). Collective over c; a rank
 * splits one group of a family at a time. When a rank has no memory for its end, every rank gets
 * KVS_NOMEM, *out is NULL and c lives on. */
kvs_status comm_split(comm *c, int32_t colour, int32_t key, comm **out, kvs_error *err);
/* Ends the group: every rank's pending and later calls fail with KVS_PEER and this text. */
void comm_abort(comm *c, const char *reason);
/* Releases this rank's end; NULL is fine. Not collective. A peer that waits for this rank, now or
 * later, gets KVS_PEER at once. */
void comm_close(comm *c);

/* First element and number of elements of rank r's block of m elements cut over n ranks: what
 * all_reduce sums on rank r. */
static inline size_t comm_block_begin(size_t m, int32_t n, int32_t r)
{
    return m / (size_t)n * (size_t)r + m % (size_t)n * (size_t)r / (size_t)n;
}

static inline size_t comm_block(size_t m, int32_t n, int32_t r)
{
    return comm_block_begin(m, n, r + 1) - comm_block_begin(m, n, r);
}

/* All ranks succeed or all fail: every rank gives the status of its own work (with its message in
 * *err when it is negative). When any is negative, every rank returns the status of the lowest rank
 * that failed with "rank R: its message". Collective; the group lives on. */
kvs_status comm_agree(comm *c, kvs_status mine, kvs_error *err);

/* Start-up handshake: every rank gives the same list of names with its own values; a value that
 * differs from rank 0's refuses the start on every rank with the same KVS_INVALID, naming the
 * field, both values and the rank. Collective; the group lives on after a refusal. At most 1 MiB
 * of names and values. */
typedef struct comm_field {
    const char *name;
    const char *value;
} comm_field;
kvs_status comm_handshake(comm *c, const comm_field *fields, int32_t n_field, kvs_error *err);

/* The last calls of this rank, oldest first, a line each: number, operation, bytes, how long it
 * took, how it ended. Returns the length it needs, as snprintf does. */
size_t comm_history(const comm *c, char *buf, size_t cap);

/* fn(ctx, rank, true) runs before a call may wait for others, fn(ctx, rank, false) after it: a test
 * can run its thread ranks one at a time between collectives, with the pages of the others
 * protected. Groups split from c later inherit it. NULL removes it. */
typedef void (*comm_hook)(void *ctx, int32_t rank, bool waiting);
void comm_set_hook(comm *c, comm_hook fn, void *ctx);

#endif
