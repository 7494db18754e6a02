/* fake_ipc.c - see fake_ipc.h. */
#include "unit/comm/fake_ipc.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "base/err.h"

enum { MAX_BLOCK = 64 };

typedef struct block {
    void *p; /* NULL: none */
    size_t bytes;
    int fd; /* -1: of another process */
} block;

/* What a handle holds. */
typedef struct name {
    pid_t pid;
    int fd;
    size_t bytes;
} name;

fake_ipc_state fake_ipc;
static block g_block[MAX_BLOCK];

static block *find(const void *p)
{
    for (int i = 0; i < MAX_BLOCK; i++) {
        if (g_block[i].p == p) {
            return &g_block[i];
        }
    }
    return NULL;
}

/* Behind a block's bytes, for all who map it: how many other processes do. One that was killed counts on. */
static atomic_int *n_other(const block *b)
{
    return (atomic_int *)(void *)((char *)b->p + b->bytes);
}

static size_t mapped_bytes(size_t bytes)
{
    return bytes + sizeof(atomic_int);
}

static void *map(int fd, size_t bytes, bool own)
{
    block *b = find(NULL);
    void *p = b != NULL ? mmap(NULL, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (p == MAP_FAILED) {
        return NULL;
    }
    *b = (block){p, bytes, own ? fd : -1};
    if (!own) {
        atomic_fetch_add(n_other(b), 1);
    }
    return p;
}

void *fake_ipc_alloc(size_t bytes)
{
    if (bytes == 0 || bytes % DEV_SHARED_UNIT != 0) {
        return NULL;
    }
    const int fd = memfd_create("fake device", MFD_CLOEXEC);
    void *p = fd >= 0 && ftruncate(fd, (off_t)mapped_bytes(bytes)) == 0 ? map(fd, bytes, true) : NULL;
    if (p == NULL && fd >= 0) {
        close(fd);
    }
    return p;
}

static void unmap(block *b)
{
    munmap(b->p, mapped_bytes(b->bytes));
    if (b->fd >= 0) {
        close(b->fd);
    }
    b->p = NULL;
}

bool fake_ipc_free(void *p)
{
    block *b = p != NULL ? find(p) : NULL;
    if (b == NULL || b->fd < 0) {
        return false;
    }
    fake_ipc.n_early += atomic_load(n_other(b)) > 0;
    unmap(b);
    return true;
}

bool fake_ipc_is_mapped(const void *p)
{
    const block *b = p != NULL ? find(p) : NULL;
    return b != NULL && b->fd < 0;
}

kvs_status dev_cuda_export(void *p, dev_handle *out, kvs_error *err)
{
    const block *b = p != NULL ? find(p) : NULL;
    if (fake_ipc.dies_exporting) {
        raise(SIGKILL);
    }
    if (b == NULL || b->fd < 0) {
        return err_set(err, KVS_DEVICE, "not a block of whole units");
    }
    const name n = {getpid(), b->fd, b->bytes};
    memset(out, 0, sizeof *out);
    memcpy(out->bytes, &n, sizeof n);
    return KVS_OK;
}

kvs_status dev_cuda_import(const dev_handle *h, void **out, kvs_error *err)
{
    char path[64];
    name n;
    memcpy(&n, h->bytes, sizeof n);
    *out = NULL;
    if (fake_ipc.dies_importing) {
        raise(SIGKILL);
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)n.pid, n.fd);
    const int fd = fake_ipc.refuses || n.pid == getpid() ? -1 : open(path, O_RDWR);
    if (fd < 0) {
        return err_set(err, KVS_UNSUPPORTED, "the CUDA device cannot reach memory of another process");
    }
    *out = map(fd, n.bytes, false);
    close(fd);
    fake_ipc.n_mapped += *out != NULL;
    return *out != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no room to map memory of another process");
}

void dev_cuda_let_go(void *p)
{
    if (fake_ipc_is_mapped(p)) {
        block *b = find(p);
        const long ms = fake_ipc.let_go_ms;
        const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
        nanosleep(&t, NULL);
        atomic_fetch_sub(n_other(b), 1);
        unmap(b);
        fake_ipc.n_mapped--;
    }
}
