/* host.c - the host as a place for memory, and the queue with its sticky error.
 *
 * Work on the host is done when the call returns, so sync has nothing to wait for. The first failure
 * of a step wins; several workers may fail at once. */
#include "dev/dev.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/pool.h"

/* dev_queue.failed: the error is complete once it is QUEUE_FAILED */
enum { QUEUE_FINE = 0, QUEUE_WRITING = 1, QUEUE_FAILED = 2 };

static void *host_alloc(size_t bytes)
{
    return mem_alloc(bytes, MEM_ALIGN);
}

static void host_copy(void *dst, const void *src, size_t bytes)
{
    if (bytes > 0) { /* an empty copy may come with NULL */
        memcpy(dst, src, bytes);
    }
}

static void host_fill(void *dst, int byte, size_t bytes)
{
    if (bytes > 0) {
        memset(dst, byte, bytes);
    }
}

static void host_sync(dev_queue *q)
{
    (void)q;
}

const dev_place dev_host = {"host",    host_alloc, mem_free, host_copy,
                            host_copy, host_fill,  host_sync};

void dev_queue_init(dev_queue *q, struct pool *workers)
{
    memset(q, 0, sizeof *q);
    q->pool = workers;
    q->n_worker = pool_size(workers);
}

void dev_queue_fail(dev_queue *q, kvs_status code, const char *text)
{
    int32_t fine = QUEUE_FINE;
    if (!__atomic_compare_exchange_n(&q->failed, &fine, QUEUE_WRITING, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED)) {
        return;
    }
    /* a success is no failure: whoever reports one here has a fault of its own */
    err_set(&q->error, code < 0 ? code : KVS_INTERNAL, "%s", text);
    __atomic_store_n(&q->failed, QUEUE_FAILED, __ATOMIC_RELEASE);
}

kvs_status dev_queue_check(dev_queue *q, kvs_error *err)
{
    if (__atomic_load_n(&q->failed, __ATOMIC_ACQUIRE) == QUEUE_FINE) {
        return KVS_OK;
    }
    const kvs_status code = q->error.code;
    if (err != NULL) {
        *err = q->error;
    }
    q->failed = QUEUE_FINE;
    return code;
}
