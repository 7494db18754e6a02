/* comm/impl.h: what comm.c shares with the transports; private to this folder.
 *
 * A transport moves segments between ranks (one primitive, `exchange`) and can wake or tell the
 * peers. comm.c builds every collective, the counters, the ring of last calls and the sums on it.
 *
 * A family is a group and all groups split from it. Its failure state is one flag and one text,
 * written once: the first reason wins. Threads share one family object; an MPI process has one per
 * group it opened and learns of failures elsewhere through messages. */
#ifndef KVS_COMM_IMPL_H
#define KVS_COMM_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"

enum { COMM_TEXT = 168, COMM_RING = 16 };

/* Identity of a call, compared between ranks. */
typedef struct comm_head {
    uint64_t number; /* of the call in its group, from 1          */
    uint64_t bytes;  /* the size argument in bytes                */
    int32_t op;
    int32_t root; /* broadcast only, else 0                       */
} comm_head;

/* What goes before a segment between processes. */
typedef struct comm_stamp {
    comm_head head;
    uint64_t bytes; /* of the segment */
} comm_stamp;

enum { COMM_OP_CLOSE = -1 }; /* in the stamp of an end that closes */

/* Memory that grows and stays. */
typedef struct comm_room {
    unsigned char *p;
    size_t cap;
} comm_room;

typedef struct comm_out {
    const void *p;
    size_t bytes;
} comm_out;

/* p NULL asks for a view: the transport sets p to its own copy, valid until the next exchange. */
typedef struct comm_in {
    void *p;
    size_t bytes;
} comm_in;

typedef struct comm_record {
    comm_head head;
    int64_t t_begin;
    int64_t t_end; /* 0 while the call runs */
    kvs_status st;
} comm_record;

typedef struct comm_family {
    atomic_int refs; /* comms that live */
    atomic_bool failed;
    pthread_mutex_t lock;
    char text[COMM_TEXT]; /* constant once failed is seen set */
    void *impl;           /* the transport's */
} comm_family;

/* Who becomes what in a split; the same on all members of the new group. */
typedef struct comm_plan {
    int32_t rank;
    int32_t size;
    const int32_t *members; /* [size] ranks in the parent by new rank */
    uint64_t offer;         /* the largest offer of all ranks of the parent */
} comm_plan;

typedef struct transport {
    const char *name;
    /* Sends out[p] to p and receives in[p] from p for every peer p (own entries are not looked at).
     * first: compares *head with the peers' unless no_check; later exchanges of a call do not.
     * A rank returns only when all ranks have entered, except for no_check where the transport may
     * wait just for those it receives from. Failure: comm_fail, then KVS_PEER; or KVS_NOMEM. */
    kvs_status (*exchange)(comm *c, const comm_head *head, bool first, kvs_error *err);
    /* Wakes and tells everybody that the family has failed. Any thread. */
    void (*tell)(comm *c);
    /* Learns of failures elsewhere outside of an exchange; NULL where the family is shared memory. */
    void (*poll)(comm *c);
    /* A number the transport wants maximised over the ranks before a split. */
    uint64_t (*split_offer)(comm *c);
    /* Makes this rank's end `child` of the new group; *token of the leader (new rank 0) reaches
     * split_commit of every member. cancel undoes prepare when some rank failed; abandon, when the
     * group ended in between and members may hold the token. */
    kvs_status (*split_prepare)(comm *c, comm *child, const comm_plan *plan, uint64_t *token,
                                kvs_error *err);
    void (*split_commit)(comm *child, uint64_t token);
    void (*split_cancel)(comm *child, uint64_t token, bool ended);
    /* Frees c->impl; NULL impl is fine. */
    void (*close)(comm *c);
    /* Frees family->impl after the last close. */
    void (*family_free)(comm_family *f);
} transport;

enum { COMM_META = 256 }; /* bytes per rank of comm.meta */

struct kvs_comm {
    const transport *transport;
    comm_family *family;
    void *impl;
    struct comm_fault_state *fault; /* NULL without faults */
    int32_t rank;
    int32_t size;
    comm_config cfg;
    uint64_t n_call;
    comm_out *out;       /* [size] */
    comm_in *in;         /* [size] */
    const float **src;   /* [size] operands of a sum */
    int32_t *members;    /* [size] of a split under way */
    unsigned char *meta; /* [size, COMM_META]: set-up exchanges */
    comm_stats stats;
    uint64_t sent; /* by the call that runs */
    uint64_t received;
    comm_record ring[COMM_RING]; /* call number i at i % COMM_RING */
    bool dumped;                 /* the ring has been logged after a failure */
    comm_hook hook;
    void *hook_ctx;
};

/* A comm without impl, in a new family or in `family` (whose refs rise). NULL: no memory. */
comm *comm_new(const transport *t, comm_family *family, int32_t rank, int32_t size,
               const comm_config *cfg);

/* Records the reason unless the family has one, tells everybody, returns KVS_PEER. */
kvs_status comm_fail(comm *c, const char *fmt, ...) ERR_PRINTF(2, 3);
/* Records without telling: for a transport that was told. */
void comm_family_fail(comm_family *f, const char *text);

/* Ends the group because the ranks in `late` (one flag per rank) did not come. */
kvs_status comm_fail_late(comm *c, const comm_head *head, const bool *late);
/* Ends the group because head b of rank_b differs from head a of rank_a. */
kvs_status comm_fail_mismatch(comm *c, int32_t rank_a, const comm_head *a, int32_t rank_b,
                              const comm_head *b);
/* Ends the group because a rank sent `got` bytes where `want` were due. */
kvs_status comm_fail_size(comm *c, const comm_head *head, int32_t rank, size_t got, size_t want);
kvs_status comm_fail_closed(comm *c, const comm_head *head, int32_t rank);
/* Compares the stamps that all ranks sent, `stride` bytes apart, this rank's own among them: closed
 * ends, heads (of a first exchange, unless no_check), then the sizes of the segments. */
kvs_status comm_check_stamps(comm *c, const comm_head *head, bool first, const comm_stamp *stamps,
                             size_t stride);
bool comm_room_reserve(comm_room *r, size_t n);
/* Gives the segments that comm.c wants to look at (p NULL) memory of r. */
kvs_status comm_room_for_views(comm *c, comm_room *r, kvs_error *err);
static inline bool comm_head_equal(const comm_head *a, const comm_head *b)
{
    return a->number == b->number && a->bytes == b->bytes && a->op == b->op && a->root == b->root;
}

/* The three steps of a call; the segments of an exchange are c->out and c->in, cleared by begin.
 * exchange gives KVS_IDLE when a fault skips the call. end returns the call's status: it counts, or
 * turns KVS_PEER into the reason of the family. */
kvs_status comm_call_begin(comm *c, comm_op op, uint64_t bytes, int32_t root, kvs_error *err);
kvs_status comm_call_exchange(comm *c, bool first, kvs_error *err);
kvs_status comm_call_end(comm *c, kvs_status st, kvs_error *err);
/* Instead of a call: ends the group because this rank cannot enter. */
kvs_status comm_call_refuse(comm *c, kvs_status st, int32_t op, const char *why, kvs_error *err);

static inline size_t comm_align_up(size_t n)
{
    return (n + (MEM_ALIGN - 1)) & ~(size_t)(MEM_ALIGN - 1);
}

/* "all_gather of 64 bytes (call 17)" */
void comm_head_text(char *buf, size_t cap, const comm_head *h);

/* dst [n] = sum over the ranks' src[r] [n] in the fixed order; dst may equal one of them. */
void comm_sum(float *dst, const float *const *src, int32_t n_rank, size_t n);

/* The exchange of a rank with a fault: KVS_IDLE when it skips the call. */
kvs_status comm_fault_exchange(comm *c, const comm_head *head, bool first, kvs_error *err);

/* Frees c without telling anybody: an end that no peer has seen. */
void comm_discard(comm *c);

#endif
