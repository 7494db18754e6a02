/* comm/nccl.c: groups over NCCL. The host communicator compares and notices who is late; NCCL moves bytes.
 *
 * Opening a NCCL communicator blocks until every rank has come, and there is nothing to abort before it
 * has. So a thread of its own does it: a rank that waits longer than its time-out leaves that thread
 * behind, which cleans up by itself if it ever returns. */
#include "comm/nccl.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/impl.h"
#include "comm/nccl_load.h"

static const char k_library[] = "libnccl.so.2";

/* Identity of a call, compared between ranks. */
typedef struct call {
    uint64_t number, bytes;
    int32_t op, root;
} call;

struct nccl {
    comm *host;
    void *handle; /* NULL once aborted */
    int32_t device;
    uint64_t n_call;
    call *calls; /* [size] */
};

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static nccl_api g_api; /* filled once, under the lock */
static bool g_loaded;

kvs_status nccl_load(int32_t *version, kvs_error *err)
{
    kvs_status st = KVS_OK;
    pthread_mutex_lock(&g_lock);
    if (!g_loaded) {
        nccl_api api;
        st = nccl_api_load(&api, k_library, err);
        if (st == KVS_OK) {
            g_api = api;
            g_loaded = true;
        }
    }
    pthread_mutex_unlock(&g_lock);
    TRY(st);
    int v = 0;
    (void)g_api.version(&v);
    if (version != NULL) {
        *version = v;
    }
    return KVS_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

typedef struct opening {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    nccl_id id;
    int32_t n_rank, rank, device;
    void *handle;
    int result;
    kvs_status st;
    bool done, left; /* left: nobody waits for it any more */
} opening;

static void opening_free(opening *o)
{
    pthread_cond_destroy(&o->ended);
    pthread_mutex_destroy(&o->lock);
    mem_free(o);
}

static void *opening_main(void *arg)
{
    opening *o = arg;
    void *handle = NULL;
    const kvs_status st = dev_cuda_use(o->device, NULL);
    const int result = st == KVS_OK ? g_api.init_rank(&handle, o->n_rank, o->id, o->rank) : NCCL_OK;
    pthread_mutex_lock(&o->lock);
    o->handle = handle;
    o->result = result;
    o->st = st;
    o->done = true;
    const bool left = o->left;
    pthread_cond_signal(&o->ended);
    pthread_mutex_unlock(&o->lock);
    if (left) {
        if (result == NCCL_OK && handle != NULL) {
            (void)g_api.abort(handle);
        }
        opening_free(o);
    }
    return NULL;
}

static opening *opening_new(void)
{
    opening *o = mem_calloc(1, sizeof *o);
    pthread_condattr_t attr;
    if (o == NULL || pthread_condattr_init(&attr) != 0) {
        mem_free(o);
        return NULL;
    }
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    const bool cond = pthread_cond_init(&o->ended, &attr) == 0;
    pthread_condattr_destroy(&attr);
    if (!cond || pthread_mutex_init(&o->lock, NULL) != 0) {
        if (cond) {
            pthread_cond_destroy(&o->ended);
        }
        mem_free(o);
        return NULL;
    }
    return o;
}

/* Waits for the opening's thread; *handle stays NULL where it failed or is late. */
static kvs_status opening_wait(opening *o, int32_t timeout_ms, void **handle, kvs_error *err)
{
    const int64_t until = clock_ns() + (int64_t)timeout_ms * INT64_C(1000000);
    const struct timespec at = {.tv_sec = until / INT64_C(1000000000),
                                .tv_nsec = until % INT64_C(1000000000)};
    int rc = 0;
    pthread_mutex_lock(&o->lock);
    while (!o->done && rc != ETIMEDOUT) {
        rc = pthread_cond_timedwait(&o->ended, &o->lock, &at);
    }
    const bool done = o->done;
    o->left = !done;
    pthread_mutex_unlock(&o->lock);
    if (!done) {
        return err_set(err, KVS_PEER, "NCCL has not connected the ranks within %d ms", timeout_ms);
    }
    const kvs_status st = o->st;
    const int result = o->result;
    *handle = st == KVS_OK && result == NCCL_OK ? o->handle : NULL;
    opening_free(o);
    if (*handle == NULL) {
        return err_set(err, KVS_DEVICE, "NCCL cannot connect the ranks: %s",
                       st == KVS_OK ? g_api.error_text(result) : "the device cannot be used");
    }
    return KVS_OK;
}

static kvs_status connect(nccl *c, const nccl_id *id, kvs_error *err)
{
    opening *o = opening_new();
    pthread_t thread;
    if (o == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to open NCCL");
    }
    o->id = *id;
    o->n_rank = comm_size(c->host);
    o->rank = comm_rank(c->host);
    o->device = c->device;
    if (pthread_create(&thread, NULL, opening_main, o) != 0) {
        opening_free(o);
        return err_set(err, KVS_NOMEM, "no thread to open NCCL");
    }
    pthread_detach(thread);
    return opening_wait(o, c->host->cfg.timeout_ms, &c->handle, err);
}

/* Every rank has NCCL of one version. */
static kvs_status agree_on_version(comm *host, kvs_error *err)
{
    int32_t version = 0;
    TRY(comm_agree(host, nccl_load(&version, err), err));
    char text[16];
    snprintf(text, sizeof text, "%d", (int)version);
    const comm_field field = {"NCCL version", text};
    return comm_handshake(host, &field, 1, err);
}

kvs_status nccl_open(nccl **out, comm *host, int32_t device, kvs_error *err)
{
    *out = NULL;
    TRY(agree_on_version(host, err));
    nccl *c = mem_calloc(1, sizeof *c);
    call *calls = mem_calloc((size_t)comm_size(host), sizeof *calls);
    kvs_status st = c != NULL && calls != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for NCCL");
    nccl_id id;
    memset(&id, 0, sizeof id);
    if (st == KVS_OK && comm_rank(host) == 0) {
        const int r = g_api.unique_id(&id);
        st = r == NCCL_OK ? KVS_OK : err_set(err, KVS_DEVICE, "NCCL: %s", g_api.error_text(r));
    }
    st = comm_agree(host, st, err);
    st = st < 0 ? st : comm_broadcast(host, &id, sizeof id, 0, err);
    if (st == KVS_OK) {
        c->host = host;
        c->device = device;
        c->calls = calls;
        st = comm_agree(host, connect(c, &id, err), err);
    }
    if (st < 0) {
        if (c != NULL && c->handle != NULL) {
            (void)g_api.abort(c->handle);
        }
        mem_free(calls);
        mem_free(c);
        return st;
    }
    *out = c;
    return KVS_OK;
}

void nccl_close(nccl *c)
{
    if (c == NULL) {
        return;
    }
    if (c->handle != NULL) {
        (void)(comm_failed(c->host) ? g_api.abort(c->handle) : g_api.destroy(c->handle));
    }
    mem_free(c->calls);
    mem_free(c);
}

/* ---- failure --------------------------------------------------------------------------------- */

/* Aborts what runs. The host communicator has ended, or ends with this reason. */
static void end_group(nccl *c, const char *why)
{
    comm_abort(c->host, why);
    if (c->handle != NULL) {
        (void)g_api.abort(c->handle);
        c->handle = NULL;
    }
}

static kvs_status fail(nccl *c, const char *what, int result, kvs_error *err)
{
    char why[128];
    snprintf(why, sizeof why, "NCCL: %s: %.80s", what, g_api.error_text(result));
    end_group(c, why);
    return err_set(err, KVS_DEVICE, "%s", why);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static void call_text(const call *k, char *text, size_t cap)
{
    const comm_head head = {.number = k->number, .bytes = k->bytes, .op = k->op, .root = k->root};
    comm_head_text(text, cap, &head);
}

/* Before anything is enqueued: every rank is here and makes the same call. */
static kvs_status compare(nccl *c, comm_op op, uint64_t bytes, int32_t root, kvs_error *err)
{
    const call mine = {++c->n_call, bytes, (int32_t)op, root};
    const kvs_status st = comm_all_gather(c->host, &mine, c->calls, sizeof mine, err);
    if (st < 0) {
        end_group(c, "the host communicator has failed");
        return st;
    }
    for (int32_t r = 1; r < comm_size(c->host); r++) {
        if (memcmp(&c->calls[0], &c->calls[r], sizeof mine) != 0) {
            char a[96];
            char b[96];
            char why[224];
            call_text(&c->calls[0], a, sizeof a);
            call_text(&c->calls[r], b, sizeof b);
            snprintf(why, sizeof why, "rank %d called %s, rank 0 %s", (int)r, b, a);
            end_group(c, why);
            return err_set(err, KVS_PEER, "%s", why);
        }
    }
    return KVS_OK;
}

static kvs_status begin(nccl *c, comm_op op, const void *send, const void *recv, size_t bytes,
                        int32_t root, kvs_error *err)
{
    if (bytes > 0 && (send == NULL || recv == NULL)) {
        end_group(c, "a buffer is NULL");
        return err_set(err, KVS_INVALID, "NCCL: %s with a buffer that is NULL", comm_op_name(op));
    }
    if (root < 0 || root >= comm_size(c->host)) {
        end_group(c, "there is no such root");
        return err_set(err, KVS_INVALID, "NCCL: root %d is not in 0..%d", root,
                       comm_size(c->host) - 1);
    }
    return compare(c, op, bytes, root, err);
}

kvs_status nccl_all_gather(nccl *c, const void *send, void *recv, size_t bytes, dev_queue *q,
                           kvs_error *err)
{
    TRY(begin(c, COMM_OP_ALL_GATHER, send, recv, bytes, 0, err));
    const int r = bytes == 0 ? NCCL_OK : g_api.all_gather(send, recv, bytes, NCCL_BYTES, c->handle, q->stream);
    return r == NCCL_OK ? KVS_OK : fail(c, "all_gather", r, err);
}

kvs_status nccl_all_to_all(nccl *c, const void *send, void *recv, size_t bytes, dev_queue *q,
                           kvs_error *err)
{
    TRY(begin(c, COMM_OP_ALL_TO_ALL, send, recv, bytes, 0, err));
    const char *from = send;
    char *to = recv;
    if (bytes == 0) {
        return KVS_OK;
    }
    int r = g_api.group_start();
    for (int32_t p = 0; p < comm_size(c->host) && r == NCCL_OK; p++) {
        r = g_api.send(from + (size_t)p * bytes, bytes, NCCL_BYTES, p, c->handle, q->stream);
        r = r == NCCL_OK ? g_api.recv(to + (size_t)p * bytes, bytes, NCCL_BYTES, p, c->handle, q->stream) : r;
    }
    const int end = g_api.group_end();
    r = r == NCCL_OK ? end : r;
    return r == NCCL_OK ? KVS_OK : fail(c, "all_to_all", r, err);
}

kvs_status nccl_broadcast(nccl *c, void *buf, size_t bytes, int32_t root, dev_queue *q, kvs_error *err)
{
    TRY(begin(c, COMM_OP_BROADCAST, buf, buf, bytes, root, err));
    const int r = bytes == 0 ? NCCL_OK : g_api.broadcast(buf, buf, bytes, NCCL_BYTES, root, c->handle, q->stream);
    return r == NCCL_OK ? KVS_OK : fail(c, "broadcast", r, err);
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Until the queue is done, NCCL reports a failure, a peer has ended the group or time is over. */
static kvs_status wait_queue(nccl *c, dev_queue *q, kvs_error *err)
{
    const int32_t ms = c->host->cfg.timeout_ms;
    const int64_t until = clock_ns() + (int64_t)ms * INT64_C(1000000);
    while (!dev_queue_is_done(q)) {
        int r = NCCL_OK;
        (void)g_api.async_error(c->handle, &r);
        if (r != NCCL_OK && r != NCCL_IN_PROGRESS) {
            return fail(c, "work on the device", r, err);
        }
        if (comm_failed(c->host)) {
            end_group(c, "the group has ended");
            return comm_barrier(c->host, err);
        }
        if (clock_ns() > until) {
            char why[96];
            snprintf(why, sizeof why, "NCCL's work on its device is not done after %d ms", (int)ms);
            end_group(c, why);
            return err_set(err, KVS_PEER, "rank %d: %s", comm_rank(c->host), why);
        }
        sched_yield();
    }
    return dev_queue_check(q, err);
}

kvs_status nccl_wait(nccl *c, dev_queue *q, kvs_error *err)
{
    const kvs_status st = comm_barrier(c->host, err);
    if (st < 0) {
        end_group(c, "the host communicator has failed");
        return st;
    }
    return wait_queue(c, q, err);
}
