/* comm/mpi_root.h: what the MPI transport shares between its two files; private to them.
 *
 * mpi_root.c owns MPI itself (start, lock, end) and a root per family: its communicator, the notices
 * that travel between processes outside of calls, the goodbyes. mpi.c owns the ends of groups and
 * moves data. */
#ifndef KVS_COMM_MPI_ROOT_H
#define KVS_COMM_MPI_ROOT_H

#include <mpi.h>
#include "base/clock.h"
#include "comm/impl.h"

enum {
    MPI_ROOT_TAG_NOTICE = 0,    /* groups have the tags above */
    MPI_ROOT_MAX_PACKET = 4096, /* bytes of a message that may be left over when a family is gone */
    MPI_ROOT_FLUSH_MS = 100     /* a small message to a live process is out by then */
};

typedef struct notice {
    int32_t goodbye; /* 0: the family has failed */
    char text[COMM_TEXT];
} notice;

/* What this process knows of a family. */
typedef struct root {
    struct root *next; /* among those closed here */
    comm_family *family;
    MPI_Comm comm;
    int32_t rank;
    int32_t size;
    int32_t timeout_ms;
    uint64_t next_group;
    uint64_t max_group;
    int32_t n_goodbye;
    bool failed;
    bool stuck; /* a request of an end never completed */
    notice in;
    MPI_Request in_req;
    notice out[2];        /* failure, goodbye */
    MPI_Request *out_req; /* [2, size] */
} root;

/* Every MPI call is made between these two. */
void mpi_lock(void);
void mpi_unlock(void);

/* Between two polls: eager at first, then asleep for longer and longer. */
typedef struct pace {
    int n;
    int64_t nap_ns;
} pace;

void pace_wait(pace *p);

static inline int64_t mpi_deadline(int32_t ms)
{
    return clock_ns() + (int64_t)ms * INT64_C(1000000);
}

/* Whether all requests are complete; a null one is. Stops at the first that is not. Under the lock,
 * like the other two. */
int mpi_test_all(MPI_Request *req, int n, bool *done);
/* Takes the notices that have come. */
void notice_poll(root *r);
/* Sends a failure (goodbye 0) or a goodbye (1) to all other processes; each at most once. */
void notice_send(root *r, int32_t goodbye, const char *text);

/* The rest takes the lock. */

/* Gives requests of small messages the time to go out; false when it is over. */
bool root_flush(root *r, MPI_Request *req, int n, int32_t ms);
/* MPI runs and a root for a family exists; NULL and err filled otherwise. */
root *root_new(const comm_config *cfg, kvs_error *err);
/* Duplicates MPI_COMM_WORLD, waiting for the other processes to do so at most the time-out. */
kvs_status root_join(root *r, kvs_error *err);
/* A root that never was joined. */
void root_free(root *r);
/* This process has closed its last end: says goodbye, and ends MPI when it was the last family and
 * this file had started it. */
void root_leave(root *r, bool failed);

#endif
