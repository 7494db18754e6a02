/* comm/nccl_load.h: the functions of NCCL that comm/nccl.c calls, and how they are found; private to this
 * folder and its tests. Types are our own statements of NCCL's stable C interface (2.x). */
#ifndef KVS_COMM_NCCL_LOAD_H
#define KVS_COMM_NCCL_LOAD_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/status.h"

enum { NCCL_OK = 0, NCCL_IN_PROGRESS = 7, NCCL_BYTES = 0 /* the data type of 1 byte */ };

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

typedef struct nccl_api {
    int (*version)(int *version);
    int (*unique_id)(nccl_id *id);
    int (*init_rank)(void **comm, int n_rank, nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
    int (*async_error)(void *comm, int *error);
    const char *(*error_text)(int error);
    int (*all_gather)(const void *send, void *recv, size_t count, int type, void *comm, void *stream);
    int (*broadcast)(const void *send, void *recv, size_t count, int type, int root, void *comm,
                     void *stream);
    int (*send)(const void *buf, size_t count, int type, int peer, void *comm, void *stream);
    int (*recv)(void *buf, size_t count, int type, int peer, void *comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
} nccl_api;

/* Fills *api from the shared library `name`, which stays loaded. */
kvs_status nccl_api_load(nccl_api *api, const char *name, kvs_error *err);

#endif
