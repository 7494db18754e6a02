/* nccl_api.h - what the fake NCCLs export: NCCL's functions as comm/nccl.c looks them up. */
#ifndef NCCL_API_H
#define NCCL_API_H

#include <stddef.h>

#define API __attribute__((visibility("default")))

typedef struct id {
    char bytes[128];
} id;

/* A send or a receive that waits for the end of its group. */
typedef struct msg {
    int peer;
    void *p;
    size_t bytes;
} msg;

API int ncclGetVersion(int *version);
API int ncclGetUniqueId(id *i);
API int ncclCommInitRank(void **comm, int n, id i, int rank);
API int ncclCommDestroy(void *comm);
API int ncclCommAbort(void *comm);
API int ncclCommGetAsyncError(void *comm, int *error);
API const char *ncclGetErrorString(int error);
API int ncclAllGather(const void *send, void *recv, size_t count, int type, void *comm, void *stream);
API int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream);
API int ncclSend(const void *buf, size_t count, int type, int peer, void *comm, void *stream);
API int ncclRecv(void *buf, size_t count, int type, int peer, void *comm, void *stream);
API int ncclGroupStart(void);
API int ncclGroupEnd(void);

#endif
