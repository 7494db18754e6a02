/* fake_nccl.c - a library that has NCCL's functions and moves bytes of host memory between threads, built as
 * libnccl.so.2, so that comm/nccl.c runs on any machine. A call returns when all ranks have made it.
 * FAKE_NCCL_STUCK in the environment: connecting never ends. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "unit/comm/nccl_api.h"

enum { MAX_RANK = 8, MAX_MSG = 2 * MAX_RANK };

typedef struct fake_comm {
    int rank, n;
} fake_comm;

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_turn = PTHREAD_COND_INITIALIZER;
static int g_here, g_round;
static const void *g_from[MAX_RANK];
static msg g_send[MAX_RANK][MAX_MSG];
static int g_n_send[MAX_RANK];

static __thread msg t_recv[MAX_MSG];
static __thread int t_n_recv, t_grouped, t_n_send;
static __thread fake_comm *t_comm;

static void meet(int n)
{
    pthread_mutex_lock(&g_lock);
    const int round = g_round;
    if (++g_here == n) {
        g_here = 0;
        g_round++;
        pthread_cond_broadcast(&g_turn);
    }
    while (g_round == round) {
        pthread_cond_wait(&g_turn, &g_lock);
    }
    pthread_mutex_unlock(&g_lock);
}

int ncclGetVersion(int *version)
{
    *version = 22809;
    return 0;
}

int ncclGetUniqueId(id *i)
{
    memset(i, 7, sizeof *i);
    return 0;
}

int ncclCommInitRank(void **comm, int n, id i, int rank)
{
    if (getenv("FAKE_NCCL_STUCK") != NULL) {
        for (;;) {
            pause();
        }
    }
    if (i.bytes[0] != 7 || i.bytes[127] != 7) {
        return 4;
    }
    fake_comm *c = malloc(sizeof *c);
    c->rank = rank;
    c->n = n;
    *comm = c;
    meet(n);
    return 0;
}

int ncclCommDestroy(void *comm)
{
    free(comm);
    return 0;
}

int ncclCommAbort(void *comm)
{
    free(comm);
    return 0;
}

int ncclCommGetAsyncError(void *comm, int *error)
{
    (void)comm;
    *error = 0;
    return 0;
}

const char *ncclGetErrorString(int error)
{
    return error == 4 ? "invalid argument" : "error";
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, void *comm, void *stream)
{
    const fake_comm *c = comm;
    (void)stream;
    if (type != 0) {
        return 4;
    }
    g_from[c->rank] = send;
    meet(c->n);
    for (int p = 0; p < c->n; p++) {
        memcpy((char *)recv + (size_t)p * count, g_from[p], count);
    }
    meet(c->n);
    return 0;
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
{
    const fake_comm *c = comm;
    (void)stream;
    if (type != 0) {
        return 4;
    }
    g_from[c->rank] = send;
    meet(c->n);
    if (c->rank != root) {
        memcpy(recv, g_from[root], count);
    }
    meet(c->n);
    return 0;
}

int ncclSend(const void *buf, size_t count, int type, int peer, void *comm, void *stream)
{
    fake_comm *c = comm;
    (void)stream;
    t_comm = c;
    g_send[c->rank][t_n_send++] = (msg){peer, (void *)buf, count};
    g_n_send[c->rank] = t_n_send;
    return t_grouped && type == 0 ? 0 : 4;
}

int ncclRecv(void *buf, size_t count, int type, int peer, void *comm, void *stream)
{
    (void)comm;
    (void)stream;
    t_recv[t_n_recv++] = (msg){peer, buf, count};
    return t_grouped && type == 0 ? 0 : 4;
}

int ncclGroupStart(void)
{
    t_grouped = 1;
    t_n_recv = t_n_send = 0;
    return 0;
}

int ncclGroupEnd(void)
{
    const fake_comm *c = t_comm;
    meet(c->n);
    for (int i = 0; i < t_n_recv; i++) {
        for (int k = 0; k < g_n_send[t_recv[i].peer]; k++) {
            const msg *m = &g_send[t_recv[i].peer][k];
            if (m->peer == c->rank && m->bytes == t_recv[i].bytes) {
                memcpy(t_recv[i].p, m->p, m->bytes);
            }
        }
    }
    meet(c->n);
    t_grouped = 0;
    return 0;
}
