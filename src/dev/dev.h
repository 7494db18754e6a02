/* dev/dev.h - where memory lives and in what order work runs on it.
 *
 * dev_place is a set of memory operations of one device; dev_queue is an ordered stream of work with a
 * sticky error. Kernels return nothing: what goes wrong is stored in the queue, first error wins, and is
 * read once per step by dev_queue_check. On the host the queue carries the worker pool that kernels use;
 * work is done when the call returns.
 *
 * Read by the C compiler and by nvcc: plain declarations only.
 */
#ifndef KVS_DEV_DEV_H
#define KVS_DEV_DEV_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pool;

typedef struct dev_queue {
    struct pool *pool;    /* workers a host kernel may use; NULL: the caller alone                  */
    int32_t n_worker;     /* workers in pool (1 when pool is NULL); i_worker < n_worker             */
    int32_t failed;       /* not 0 after a failure; later ones are dropped                          */
    kvs_error error;      /* the first failure                                                      */
} dev_queue;

typedef struct dev_place {
    const char *name;                                             /* "host"                         */
    void *(*alloc)(size_t bytes);                                 /* 64-byte aligned or NULL        */
    void (*free)(void *p);
    void (*put)(void *dst, const void *host_src, size_t bytes);   /* host -> place                  */
    void (*get)(void *host_dst, const void *src, size_t bytes);   /* place -> host                  */
    void (*fill)(void *dst, int byte, size_t bytes);
    void (*sync)(dev_queue *q);
} dev_place;

extern const dev_place dev_host;

/* A queue over `pool` (may be NULL). The pool stays the caller's. */
void dev_queue_init(dev_queue *q, struct pool *pool);
/* Records a failure unless one is already there. Any thread, but not at the same time as
 * dev_queue_check: work that may fail has ended by then. A code >= 0 is recorded as KVS_INTERNAL. */
void dev_queue_fail(dev_queue *q, kvs_status code, const char *text);
/* Returns and clears the sticky failure; KVS_OK, with *err as it was, where there is none. */
kvs_status dev_queue_check(dev_queue *q, kvs_error *err);

#ifdef __cplusplus
}
#endif
#endif
