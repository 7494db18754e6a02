/* dev/dev.h - where memory lives and in what order work runs on it.
 *
 * dev_place is a set of memory operations of one kind of device; dev_queue is an ordered stream of work
 * with a sticky error. Kernels return nothing: what goes wrong is stored in the queue, first error wins,
 * and is read once per step by dev_queue_check. On the host the queue carries the worker pool that kernels
 * use, and work is done when the call returns. On CUDA it carries a stream, and work is done after
 * dev_queue_sync; from the second failure of a device on, CUDA itself repeats the first.
 *
 * The CUDA functions exist in every build. In one without CUDA, dev_cuda_open refuses and says why;
 * nothing else here may be called before it has succeeded. The device it opens is that of the calling
 * thread, as is usual in CUDA: a thread that uses another one opens it itself.
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
    void *stream;         /* CUDA: the cudaStream_t; NULL on the host                               */
    int32_t n_sm;         /* CUDA: multiprocessors, for launches of as many blocks; 0 on the host   */
} dev_queue;

typedef struct dev_place {
    const char *name;                                             /* "host", "cuda"                 */
    void *(*alloc)(size_t bytes);                                 /* 64-byte aligned or NULL        */
    void (*free)(void *p);
    void (*put)(void *dst, const void *host_src, size_t bytes);   /* host -> place                  */
    void (*get)(void *host_dst, const void *src, size_t bytes);   /* place -> host                  */
    void (*fill)(void *dst, int byte, size_t bytes);
    void (*sync)(dev_queue *q);                                   /* all work of q is done          */
} dev_place;

extern const dev_place dev_host;
/* Memory of the calling thread's device. put, get and fill are done when they return, but wait for no
 * queue: sync it first. What fails in them is reported by the next sync. */
extern const dev_place dev_cuda;

/* A queue over `pool` (may be NULL). The pool stays the caller's. */
void dev_queue_init(dev_queue *q, struct pool *pool);
/* Records a failure unless one is already there. Any thread, but not at the same time as
 * dev_queue_check: work that may fail has ended by then. A code >= 0 is recorded as KVS_INTERNAL. */
void dev_queue_fail(dev_queue *q, kvs_status code, const char *text);
/* Returns and clears the sticky failure; KVS_OK, with *err as it was, where there is none. */
kvs_status dev_queue_check(dev_queue *q, kvs_error *err);

/* ---- CUDA devices ------------------------------------------------------------------------------- */

typedef struct dev_cuda_info {
    int32_t index, n_device;   /* of those the process sees (CUDA_VISIBLE_DEVICES)                  */
    char name[64];             /* "NVIDIA H200"                                                     */
    int32_t major, minor;      /* compute capability                                                */
    int32_t n_sm;
    int64_t l2_bytes;
    int64_t mem_bytes;
    int32_t shared_max;        /* bytes of shared memory a block may have                           */
    int32_t driver, runtime;   /* CUDA versions: 13000 is 13.0                                      */
    uint8_t uuid[16];          /* of the device, whichever process asks                             */
} dev_cuda_info;

/* Whether this build has CUDA kernels. */
int dev_cuda_built(void);
/* Makes device `index` the calling thread's and describes it in *info (may be NULL). KVS_UNSUPPORTED: a
 * build without CUDA, or a device that is no Hopper (compute capability 9.0). KVS_NODEV: no driver, no
 * device, or no such index. */
kvs_status dev_cuda_open(int32_t index, dev_cuda_info *info, kvs_error *err);

/* Makes a device that has been opened the calling thread's again: for one thread that works on several. */
kvs_status dev_cuda_use(int32_t index, kvs_error *err);
/* Lets kernels of device `from` read and write the memory of device `to`. KVS_UNSUPPORTED: the two are not
 * connected that way. */
kvs_status dev_cuda_reach(int32_t from, int32_t to, kvs_error *err);

/* ---- memory between processes ---------------------------------------------------------------------- */

enum { DEV_HOST_NAME = 40, DEV_SHARED_UNIT = 2 << 20 };

/* Memory of dev_cuda as another process of the host can name it. */
typedef struct dev_handle {
    uint8_t bytes[64];
} dev_handle;

/* What is the same for processes of one host, as it has run since its start, and for no others. */
kvs_status dev_host_name(char name[DEV_HOST_NAME], kvs_error *err);
/* Names a block of dev_cuda.alloc, on the calling thread's device. A multiple of DEV_SHARED_UNIT bytes: CUDA
 * may put smaller blocks side by side, and shares all of them or none. */
kvs_status dev_cuda_export(void *p, dev_handle *out, kvs_error *err);
/* Where the calling thread's device reaches memory of another process, which keeps it until every process
 * has let go of it. KVS_UNSUPPORTED: the two devices are not connected that way, or one has
 * too many peers. KVS_DEVICE: any other failure, processes that do not share the host's IPC among them. */
kvs_status dev_cuda_import(const dev_handle *h, void **out, kvs_error *err);
void dev_cuda_let_go(void *p); /* of what import gave */

/* A queue over a stream of its own on the calling thread's device; on failure *q needs no close. */
kvs_status dev_queue_open_cuda(dev_queue *q, kvs_error *err);
/* Waits for its work and gives the stream back; nothing on a queue of the host. */
void dev_queue_close(dev_queue *q);
/* Waits until all work of the queue is done, and records what failed in it. */
void dev_queue_sync(dev_queue *q);
/* Whether all work of the queue is done; true also after a failure, which is recorded. Does not wait. */
int dev_queue_is_done(dev_queue *q);
/* Records the failure of a CUDA call as KVS_DEVICE, "what: cudaErrorX (text)"; cuda_error 0 is none. */
void dev_queue_fail_cuda(dev_queue *q, int cuda_error, const char *what);

/* Memory with one address for the host and the device, of any content, in which pages are taken when first
 * touched: for tools that look at the same bytes from both sides. Host code may touch it only while no
 * work of the device is under way. NULL when there is none. */
void *dev_cuda_alloc_shared(size_t bytes);
void dev_cuda_free_shared(void *p);

/* Copies and fills in the order of the queue; memory of the device on both sides. */
void dev_queue_copy(dev_queue *q, void *dst, const void *src, size_t bytes);
void dev_queue_fill(dev_queue *q, void *dst, int byte, size_t bytes);

/* ---- time ---------------------------------------------------------------------------------------- */

typedef struct dev_event {
    void *event;
} dev_event;

kvs_status dev_event_open(dev_event *e, kvs_error *err);
void dev_event_close(dev_event *e);
/* Marks the place in the queue that work has reached. */
void dev_event_record(dev_event *e, dev_queue *q);
/* Microseconds between two marks; waits for the second. Negative after a failure. */
double dev_event_elapsed_us(const dev_event *from, const dev_event *to);

/* ---- graphs -------------------------------------------------------------------------------------- */

/* Work of a queue, recorded once and launched often. Between begin and end the queue's work is recorded
 * instead of run; nothing may be allocated, put, got or waited for. */
typedef struct dev_graph {
    void *exec;
    int32_t n_node;
} dev_graph;

kvs_status dev_capture_begin(dev_queue *q, kvs_error *err);
/* On failure *g is empty and needs no free; the queue is usable again. */
kvs_status dev_capture_end(dev_queue *q, dev_graph *g, kvs_error *err);
void dev_graph_launch(const dev_graph *g, dev_queue *q);
void dev_graph_free(dev_graph *g);

#ifdef __cplusplus
}
#endif
#endif
