/* comm/tcp_mesh.h: what the processes of a family of TCP groups share; private to tcp*.c.
 *
 * tcp_mesh.c owns how the processes find each other, the listener each keeps for as long as the
 * family lives, the connections of groups, and a control connection between any two processes, on
 * which failures and goodbyes travel outside of calls. tcp.c owns the ends of groups and moves data. */
#ifndef KVS_COMM_TCP_MESH_H
#define KVS_COMM_TCP_MESH_H

#include <poll.h>
#include "base/clock.h"
#include "comm/impl.h"
#include "comm/tcp_sock.h"

enum {
    TCP_GROUP_CONTROL, /* no group: the control connections */
    TCP_GROUP_ALL,     /* the group of all ranks; splits count on from here */
    TCP_GROUP_FIRST
};

typedef struct notice {
    int32_t goodbye; /* 0: the family has failed */
    char text[COMM_TEXT];
} notice;

/* The control connection to a process. */
typedef struct control {
    int fd; /* -1: none, or it has ended */
    bool goodbye;
    size_t n_in;
    notice in;
} control;

/* A process that connected and says, or will say, for which group. */
typedef struct join {
    uint64_t magic;
    uint64_t key;
    uint64_t group;
    int64_t rank; /* in the mesh */
} join;

typedef struct caller {
    int fd;
    size_t n_in;
    join in;
} caller;

/* Ranks here are those of the group of all. */
typedef struct tcp_mesh {
    int32_t rank;
    int32_t size;
    uint64_t key; /* of this family */
    uint64_t next_group;
    tcp_addr *addr; /* [size] of the listeners */
    int listener;
    int wake; /* readable once the family has failed */
    control *peer; /* [size] */
    caller *callers; /* [n_caller <= max_caller] not asked for yet */
    int32_t n_caller;
    int32_t max_caller;
    pthread_mutex_t lock; /* of the control connections */
} tcp_mesh;

static inline int64_t tcp_deadline(int32_t ms)
{
    return clock_ns() + (int64_t)ms * INT64_C(1000000);
}

/* Finds the other processes: rank 0 listens at `address`, the others go there. Waits for them at most
 * the time-out. Every process that came is told why it fails. */
kvs_status tcp_mesh_open(tcp_mesh **out, const char *address, int32_t rank, int32_t size,
                         int32_t timeout_ms, kvs_error *err);
void tcp_mesh_free(tcp_mesh *m);

/* Connects to the members of a group below this rank, which need not take part yet: fd[i] for
 * members[i], ranks of the mesh; other entries stay. */
kvs_status tcp_mesh_call(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd,
                         int64_t until, kvs_error *err);
/* Takes the connections of those above this rank. */
kvs_status tcp_mesh_answer(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd,
                           int64_t until, kvs_error *err);

/* Takes the notices that have come; a process that is gone without a goodbye ends the family. */
void tcp_mesh_poll(comm *c);
/* Tells every process, and wakes the threads of this one, that the family has failed. Any thread. */
void tcp_mesh_tell(tcp_mesh *m, const char *text);
/* Puts what wakes a waiting rank into set [size + 1]; how many. */
int tcp_mesh_watch(tcp_mesh *m, struct pollfd *set);

#endif
