/* cuda.c - CUDA devices as places for memory, with queues over streams, events and graphs.
 *
 * Plain C over the CUDA runtime, which is linked statically: it looks for the driver when the first call
 * needs it, so a program with this file in it starts anywhere. Failures become KVS_DEVICE with CUDA's own
 * name for them; those without a driver or a device become KVS_NODEV before anything else runs.
 *
 * Streams do not wait for the default stream (a captured graph could not): transfers are done before
 * put, get and fill return, and whoever calls them syncs the queues that use the memory. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "dev/dev.h"

/* sm_90a code runs on this compute capability only. */
enum { NEED_MAJOR = 9, NEED_MINOR = 0 };

static kvs_status fail(kvs_error *err, cudaError_t e, const char *what)
{
    return err_set(err, e == cudaErrorMemoryAllocation ? KVS_NOMEM : KVS_DEVICE, "%s: %s (%s)", what,
                   cudaGetErrorName(e), cudaGetErrorString(e));
}

/* ---- memory ---- */

/* The first failure of a transfer stays CUDA's last error, which the next sync takes. */
static void *cuda_alloc(size_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, bytes > 0 ? bytes : 1) != cudaSuccess) {
        cudaGetLastError(); /* the caller sees NULL */
        return NULL;
    }
    return p;
}

static void cuda_free(void *p)
{
    cudaFree(p);
}

static void copy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    if (bytes > 0 && cudaMemcpyAsync(dst, src, bytes, kind, NULL) == cudaSuccess) {
        cudaStreamSynchronize(NULL);
    }
}

static void cuda_put(void *dst, const void *src, size_t bytes)
{
    copy(dst, src, bytes, cudaMemcpyHostToDevice);
}

static void cuda_get(void *dst, const void *src, size_t bytes)
{
    copy(dst, src, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_fill(void *dst, int byte, size_t bytes)
{
    if (bytes > 0 && cudaMemsetAsync(dst, byte, bytes, NULL) == cudaSuccess) {
        cudaStreamSynchronize(NULL);
    }
}

const dev_place dev_cuda = {"cuda",   cuda_alloc, cuda_free,     cuda_put,
                            cuda_get, cuda_fill,  dev_queue_sync};

void *dev_cuda_alloc_shared(size_t bytes)
{
    void *p = NULL;
    if (cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    return p;
}

void dev_cuda_free_shared(void *p)
{
    cudaFree(p);
}

/* ---- devices ---- */

int dev_cuda_built(void)
{
    return 1;
}

static kvs_status describe(int32_t index, int32_t n, dev_cuda_info *info, kvs_error *err)
{
    struct cudaDeviceProp p;
    int driver = 0;
    int runtime = 0;
    const cudaError_t e = cudaGetDeviceProperties(&p, index);
    if (e != cudaSuccess) {
        return fail(err, e, "reading the properties of the CUDA device");
    }
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    memset(info, 0, sizeof *info);
    info->index = index;
    info->n_device = n;
    snprintf(info->name, sizeof info->name, "%.63s", p.name);
    info->major = p.major;
    info->minor = p.minor;
    info->n_sm = p.multiProcessorCount;
    info->l2_bytes = p.l2CacheSize;
    info->mem_bytes = (int64_t)p.totalGlobalMem;
    info->shared_max = (int32_t)p.sharedMemPerBlockOptin;
    info->driver = driver;
    info->runtime = runtime;
    memcpy(info->uuid, p.uuid.bytes, sizeof info->uuid);
    return KVS_OK;
}

kvs_status dev_cuda_open(int32_t index, dev_cuda_info *info, kvs_error *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        cudaGetLastError();
        return err_set(err, KVS_NODEV,
                       "no CUDA device here: %s; install NVIDIA's driver and make the GPU visible, "
                       "or run on the CPU",
                       e != cudaSuccess ? cudaGetErrorString(e) : "the driver sees none");
    }
    if (index < 0 || index >= n) {
        return err_set(err, KVS_NODEV, "CUDA device %d: there are %d, numbered from 0", (int)index,
                       n);
    }
    dev_cuda_info local;
    TRY(describe(index, n, &local, err));
    if (local.major != NEED_MAJOR || local.minor != NEED_MINOR) {
        return err_set(err, KVS_UNSUPPORTED,
                       "CUDA device %d, %s, has compute capability %d.%d; the kernels are built "
                       "for Hopper, 9.0 (H100, H200): use such a device or the CPU",
                       (int)index, local.name, (int)local.major, (int)local.minor);
    }
    e = cudaSetDevice(index);
    e = e == cudaSuccess ? cudaFree(NULL) : e; /* the context comes now, not in the first kernel */
    if (e != cudaSuccess) {
        return fail(err, e, "opening the CUDA device");
    }
    if (info != NULL) {
        *info = local;
    }
    return KVS_OK;
}

kvs_status dev_cuda_use(int32_t index, kvs_error *err)
{
    const cudaError_t e = cudaSetDevice(index);
    return e == cudaSuccess ? KVS_OK : fail(err, e, "turning to a CUDA device");
}

kvs_status dev_cuda_reach(int32_t from, int32_t to, kvs_error *err)
{
    int can = 0;
    cudaError_t e = cudaDeviceCanAccessPeer(&can, from, to);
    if (e == cudaSuccess && can == 0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "CUDA device %d cannot reach the memory of device %d: use devices that NVLink or "
                       "PCIe peer access connects",
                       (int)from, (int)to);
    }
    e = e == cudaSuccess ? cudaSetDevice(from) : e;
    e = e == cudaSuccess ? cudaDeviceEnablePeerAccess(to, 0) : e;
    if (e == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        e = cudaSuccess;
    }
    return e == cudaSuccess ? KVS_OK : fail(err, e, "letting a CUDA device reach another's memory");
}

/* ---- memory between processes ---- */

kvs_status dev_cuda_export(void *p, dev_handle *out, kvs_error *err)
{
    cudaIpcMemHandle_t h;
    _Static_assert(sizeof h == sizeof out->bytes, "a handle of CUDA fits");
    const cudaError_t e = cudaIpcGetMemHandle(&h, p);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return e == cudaErrorNotSupported
                   ? err_set(err, KVS_UNSUPPORTED, "the CUDA device cannot share memory between processes here")
                   : fail(err, e, "naming memory of a CUDA device for other processes");
    }
    memcpy(out->bytes, &h, sizeof h);
    return KVS_OK;
}

kvs_status dev_cuda_import(const dev_handle *h, void **out, kvs_error *err)
{
    cudaIpcMemHandle_t handle;
    memcpy(&handle, h->bytes, sizeof handle);
    *out = NULL;
    const cudaError_t e = cudaIpcOpenMemHandle(out, handle, cudaIpcMemLazyEnablePeerAccess);
    if (e == cudaSuccess) {
        return KVS_OK;
    }
    cudaGetLastError();
    *out = NULL;
    /* Any other error is one: a caller may go without what is not supported, and should not without what is broken. */
    if (e == cudaErrorPeerAccessUnsupported || e == cudaErrorTooManyPeers || e == cudaErrorNotSupported) {
        return err_set(err, KVS_UNSUPPORTED,
                       "the CUDA device cannot reach memory of another process (%s): use devices that NVLink or "
                       "PCIe peer access connects",
                       cudaGetErrorName(e));
    }
    return fail(err, e, "mapping memory of another process, which has to share the host's IPC");
}

void dev_cuda_let_go(void *p)
{
    if (p != NULL && cudaIpcCloseMemHandle(p) != cudaSuccess) {
        cudaGetLastError();
    }
}

/* ---- queues ---- */

kvs_status dev_queue_open_cuda(dev_queue *q, kvs_error *err)
{
    dev_queue_init(q, NULL);
    cudaStream_t stream = NULL;
    int device = 0;
    int n_sm = 0;
    cudaError_t e = cudaGetDevice(&device);
    e = e == cudaSuccess ? cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device) : e;
    e = e == cudaSuccess ? cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) : e;
    if (e != cudaSuccess) {
        return fail(err, e, "opening a queue on the CUDA device");
    }
    q->stream = stream;
    q->n_sm = n_sm;
    return KVS_OK;
}

void dev_queue_close(dev_queue *q)
{
    if (q->stream != NULL) {
        cudaStreamSynchronize(q->stream);
        cudaStreamDestroy(q->stream);
        q->stream = NULL;
    }
}

void dev_queue_fail_cuda(dev_queue *q, int cuda_error, const char *what)
{
    if (cuda_error != cudaSuccess) {
        kvs_error err;
        fail(&err, (cudaError_t)cuda_error, what);
        dev_queue_fail(q, err.code, err.text);
    }
}

void dev_queue_sync(dev_queue *q)
{
    if (q == NULL || q->stream == NULL) {
        return;
    }
    const cudaError_t e = cudaStreamSynchronize(q->stream);
    const cudaError_t last = cudaGetLastError();
    dev_queue_fail_cuda(q, (int)(e != cudaSuccess ? e : last), "work on the CUDA device");
}

int dev_queue_is_done(dev_queue *q)
{
    const cudaError_t e = cudaStreamQuery(q->stream);
    if (e == cudaErrorNotReady) {
        cudaGetLastError();
        return 0;
    }
    dev_queue_fail_cuda(q, (int)e, "work on the CUDA device");
    return 1;
}

void dev_queue_copy(dev_queue *q, void *dst, const void *src, size_t bytes)
{
    if (bytes > 0) {
        dev_queue_fail_cuda(
            q, (int)cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, q->stream), "copy");
    }
}

void dev_queue_fill(dev_queue *q, void *dst, int byte, size_t bytes)
{
    if (bytes > 0) {
        dev_queue_fail_cuda(q, (int)cudaMemsetAsync(dst, byte, bytes, q->stream), "fill");
    }
}

/* ---- events ---- */

kvs_status dev_event_open(dev_event *e, kvs_error *err)
{
    cudaEvent_t event = NULL;
    e->event = NULL;
    const cudaError_t st = cudaEventCreate(&event);
    if (st != cudaSuccess) {
        return fail(err, st, "making a CUDA event");
    }
    e->event = event;
    return KVS_OK;
}

void dev_event_close(dev_event *e)
{
    if (e->event != NULL) {
        cudaEventDestroy(e->event);
        e->event = NULL;
    }
}

void dev_event_record(dev_event *e, dev_queue *q)
{
    dev_queue_fail_cuda(q, (int)cudaEventRecord(e->event, q->stream), "recording a CUDA event");
}

double dev_event_elapsed_us(const dev_event *from, const dev_event *to)
{
    float ms = 0.0f;
    if (cudaEventSynchronize(to->event) != cudaSuccess ||
        cudaEventElapsedTime(&ms, from->event, to->event) != cudaSuccess) {
        return -1.0;
    }
    return 1e3 * (double)ms;
}

/* ---- graphs ---- */

kvs_status dev_capture_begin(dev_queue *q, kvs_error *err)
{
    const cudaError_t e = cudaStreamBeginCapture(q->stream, cudaStreamCaptureModeThreadLocal);
    return e == cudaSuccess ? KVS_OK : fail(err, e, "beginning a CUDA graph");
}

kvs_status dev_capture_end(dev_queue *q, dev_graph *g, kvs_error *err)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    size_t n = 0;
    memset(g, 0, sizeof *g);
    cudaError_t e = cudaStreamEndCapture(q->stream, &graph);
    e = e == cudaSuccess ? cudaGraphGetNodes(graph, NULL, &n) : e;
    e = e == cudaSuccess ? cudaGraphInstantiate(&exec, graph, 0) : e;
    if (graph != NULL) {
        cudaGraphDestroy(graph);
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        return fail(err, e, "making a CUDA graph");
    }
    g->exec = exec;
    g->n_node = (int32_t)n;
    return KVS_OK;
}

void dev_graph_launch(const dev_graph *g, dev_queue *q)
{
    dev_queue_fail_cuda(q, (int)cudaGraphLaunch(g->exec, q->stream), "launching a CUDA graph");
}

void dev_graph_free(dev_graph *g)
{
    if (g->exec != NULL) {
        cudaGraphExecDestroy(g->exec);
        g->exec = NULL;
    }
}
