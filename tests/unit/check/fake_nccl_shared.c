/* fake_nccl_shared.c - a library that has NCCL's functions and moves bytes of host memory between processes, built as
 * libnccl.so.2, so that the check of NCCL over processes runs on any machine. A call returns when all ranks have
 * made it; a rank that waits for the others for too long ends its process. The memory has no name of its own: it goes
 * with the last process, however that ends. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "unit/comm/nccl_api.h"

enum { MAX_RANK = 4, PIECE = 1 << 20, MAX_RECV = MAX_RANK, LIMIT_S = 30 };

typedef struct region {
    atomic_int here, round;
    char slot[MAX_RANK][MAX_RANK * PIECE];
} region;

/* A process has one communicator at a time. */
static struct {
    region *r;
    int fd; /* of the region that this process made and that others may still have to find; 0: none */
    int rank, n, n_recv;
    msg recv[MAX_RECV];
} g;

static time_t now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec;
}

static void meet(void)
{
    const time_t until = now_s() + LIMIT_S;
    const int round = atomic_load(&g.r->round);
    if (atomic_fetch_add(&g.r->here, 1) + 1 == g.n) {
        atomic_store(&g.r->here, 0);
        atomic_fetch_add(&g.r->round, 1);
    }
    while (atomic_load(&g.r->round) == round) {
        const struct timespec t = {.tv_sec = 0, .tv_nsec = 20000};
        nanosleep(&t, NULL);
        if (now_s() > until) {
            fprintf(stderr, "fake NCCL: rank %d has waited %d s for the others\n", g.rank, LIMIT_S);
            _exit(1);
        }
    }
}

static void close_own(void)
{
    if (g.fd > 0) {
        close(g.fd);
        g.fd = 0;
    }
}

static region *map(const char *name)
{
    const int fd = open(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    void *p = mmap(NULL, sizeof(region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return p != MAP_FAILED ? p : NULL;
}

int ncclGetVersion(int *version)
{
    *version = 22809;
    return 0;
}

int ncclGetUniqueId(id *i)
{
    close_own();
    g.fd = memfd_create("fake NCCL", MFD_CLOEXEC);
    if (g.fd < 0 || ftruncate(g.fd, sizeof(region)) != 0) {
        close_own();
        return 2;
    }
    memset(i, 0, sizeof *i);
    snprintf(i->bytes, sizeof i->bytes, "/proc/%d/fd/%d", (int)getpid(), g.fd);
    return 0;
}

int ncclCommInitRank(void **comm, int n, id i, int rank)
{
    g.r = n <= MAX_RANK ? map(i.bytes) : NULL;
    if (g.r == NULL) {
        return 2;
    }
    g.rank = rank;
    g.n = n;
    *comm = &g;
    meet();
    close_own();
    return 0;
}

int ncclCommDestroy(void *comm)
{
    (void)comm;
    munmap(g.r, sizeof *g.r);
    g.r = NULL;
    return 0;
}

int ncclCommAbort(void *comm)
{
    return ncclCommDestroy(comm);
}

int ncclCommGetAsyncError(void *comm, int *error)
{
    (void)comm;
    *error = 0;
    return 0;
}

const char *ncclGetErrorString(int error)
{
    return error == 2 ? "system error" : "error";
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, void *comm, void *stream)
{
    (void)comm;
    (void)stream;
    if (type != 0 || count > PIECE) {
        return 4;
    }
    memcpy(g.r->slot[g.rank], send, count);
    meet();
    for (int p = 0; p < g.n; p++) {
        memcpy((char *)recv + (size_t)p * count, g.r->slot[p], count);
    }
    meet();
    return 0;
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, void *comm, void *stream)
{
    (void)comm;
    (void)stream;
    if (type != 0 || count > PIECE) {
        return 4;
    }
    if (g.rank == root) {
        memcpy(g.r->slot[root], send, count);
    }
    meet();
    if (g.rank != root) {
        memcpy(recv, g.r->slot[root], count);
    }
    meet();
    return 0;
}

int ncclGroupStart(void)
{
    g.n_recv = 0;
    return 0;
}

int ncclSend(const void *buf, size_t count, int type, int peer, void *comm, void *stream)
{
    (void)comm;
    (void)stream;
    if (type != 0 || count > PIECE) {
        return 4;
    }
    memcpy(g.r->slot[g.rank] + (size_t)peer * PIECE, buf, count);
    return 0;
}

int ncclRecv(void *buf, size_t count, int type, int peer, void *comm, void *stream)
{
    (void)comm;
    (void)stream;
    if (type != 0 || g.n_recv == MAX_RECV) {
        return 4;
    }
    g.recv[g.n_recv++] = (msg){peer, buf, count};
    return 0;
}

int ncclGroupEnd(void)
{
    meet();
    for (int i = 0; i < g.n_recv; i++) {
        memcpy(g.recv[i].p, g.r->slot[g.recv[i].peer] + (size_t)g.rank * PIECE, g.recv[i].bytes);
    }
    meet();
    return 0;
}
