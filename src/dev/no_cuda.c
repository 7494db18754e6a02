/* no_cuda.c - what stands for cuda.c in a build without CUDA: dev_cuda_open refuses with the reason, so
 * nothing of the rest is reached by a caller that keeps to dev.h; it fails in its own way all the same. */
#include <string.h>

#include "base/err.h"
#include "dev/dev.h"

static const char reason[] = "this build has no CUDA kernels: build with the preset cuda "
                             "(KVS_CUDA=ON, needs nvcc), or run on the CPU";

static void *no_alloc(size_t bytes)
{
    (void)bytes;
    return NULL;
}

static void no_free(void *p)
{
    (void)p;
}

static void no_copy(void *dst, const void *src, size_t bytes)
{
    (void)dst;
    (void)src;
    (void)bytes;
}

static void no_fill(void *dst, int byte, size_t bytes)
{
    (void)dst;
    (void)byte;
    (void)bytes;
}

const dev_place dev_cuda = {"cuda", no_alloc, no_free, no_copy, no_copy, no_fill, dev_queue_sync};

void *dev_cuda_alloc_shared(size_t bytes)
{
    return no_alloc(bytes);
}

void dev_cuda_free_shared(void *p)
{
    no_free(p);
}

int dev_cuda_built(void)
{
    return 0;
}

kvs_status dev_cuda_open(int32_t index, dev_cuda_info *info, kvs_error *err)
{
    (void)index;
    (void)info;
    return err_set(err, KVS_UNSUPPORTED, "%s", reason);
}

kvs_status dev_cuda_use(int32_t index, kvs_error *err)
{
    return dev_cuda_open(index, NULL, err);
}

kvs_status dev_cuda_reach(int32_t from, int32_t to, kvs_error *err)
{
    (void)to;
    return dev_cuda_open(from, NULL, err);
}

kvs_status dev_cuda_export(void *p, dev_handle *out, kvs_error *err)
{
    (void)p;
    (void)out;
    return dev_cuda_open(0, NULL, err);
}

kvs_status dev_cuda_import(const dev_handle *h, void **out, kvs_error *err)
{
    (void)h;
    *out = NULL;
    return dev_cuda_open(0, NULL, err);
}

void dev_cuda_let_go(void *p)
{
    no_free(p);
}

kvs_status dev_queue_open_cuda(dev_queue *q, kvs_error *err)
{
    dev_queue_init(q, NULL);
    return err_set(err, KVS_UNSUPPORTED, "%s", reason);
}

void dev_queue_close(dev_queue *q)
{
    (void)q;
}

void dev_queue_sync(dev_queue *q)
{
    (void)q;
}

int dev_queue_is_done(dev_queue *q)
{
    (void)q;
    return 1;
}

void dev_queue_fail_cuda(dev_queue *q, int cuda_error, const char *what)
{
    (void)what;
    if (cuda_error != 0) {
        dev_queue_fail(q, KVS_UNSUPPORTED, reason);
    }
}

void dev_queue_copy(dev_queue *q, void *dst, const void *src, size_t bytes)
{
    no_copy(dst, src, bytes);
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

void dev_queue_fill(dev_queue *q, void *dst, int byte, size_t bytes)
{
    no_fill(dst, byte, bytes);
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

kvs_status dev_event_open(dev_event *e, kvs_error *err)
{
    e->event = NULL;
    return err_set(err, KVS_UNSUPPORTED, "%s", reason);
}

void dev_event_close(dev_event *e)
{
    (void)e;
}

void dev_event_record(dev_event *e, dev_queue *q)
{
    (void)e;
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

double dev_event_elapsed_us(const dev_event *from, const dev_event *to)
{
    (void)from;
    (void)to;
    return -1.0;
}

kvs_status dev_capture_begin(dev_queue *q, kvs_error *err)
{
    (void)q;
    return err_set(err, KVS_UNSUPPORTED, "%s", reason);
}

kvs_status dev_capture_end(dev_queue *q, dev_graph *g, kvs_error *err)
{
    (void)q;
    memset(g, 0, sizeof *g);
    return err_set(err, KVS_UNSUPPORTED, "%s", reason);
}

void dev_graph_launch(const dev_graph *g, dev_queue *q)
{
    (void)g;
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

void dev_graph_free(dev_graph *g)
{
    (void)g;
}
