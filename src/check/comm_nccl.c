/* check/comm_nccl.c: NCCL between the devices, a thread or a process each: what it moves, and ranks that misbehave. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "check/comm_cuda.h"
#include "comm/nccl.h"

typedef enum trial_kind {
    TRIAL_DATA,
    TRIAL_LATE, /* a rank does not come to a call */
    TRIAL_SIZE, /* ... comes with another size */
    TRIAL_WAIT, /* ... does not come to the wait */
    N_TRIAL
} trial_kind;

enum { MAX_BYTES = 1 << 20 };

/* What a rank says of a trial; plain data, which processes gather. */
typedef struct verdict {
    kvs_status st;
    kvs_error err;
    char wrong[192];
} verdict;

typedef struct nccl_rank {
    comm *host;
    trial_kind kind;
    int32_t rank, n, victim, timeout_ms, device;
    uint64_t seed;
    verdict v;
    uint8_t *send, *recv; /* device, [n, MAX_BYTES] */
    uint8_t *mine, *back; /* host, the same */
    dev_queue queue;
    nccl *c;
} nccl_rank;

static uint8_t byte_of(uint64_t seed, int32_t rank, size_t i)
{
    return (uint8_t)(rng_u64(seed, (uint64_t)rank, i / 8) >> (i % 8 * 8));
}

/* [all, bytes]: rank p's part is what it sent to rank `to`. */
static void compare(nccl_rank *k, const char *op, size_t bytes, bool gather, int32_t root)
{
    for (int32_t p = 0; p < k->n && k->v.wrong[0] == '\0'; p++) {
        const int32_t from = root >= 0 ? root : p;
        const size_t at = gather || root >= 0 ? 0 : (size_t)k->rank * bytes;
        for (size_t i = 0; i < bytes && k->v.wrong[0] == '\0'; i++) {
            const uint8_t got = k->back[(root >= 0 ? 0 : (size_t)p * bytes) + i];
            if (got != byte_of(k->seed, from, at + i)) {
                snprintf(k->v.wrong, sizeof k->v.wrong, "rank %d: %s of %zu bytes: byte %zu from rank %d",
                         (int)k->rank, op, bytes, i, (int)from);
            }
        }
    }
}

static kvs_status fetch(nccl_rank *k, const void *from, size_t bytes, kvs_error *err)
{
    TRY(nccl_wait(k->c, &k->queue, err));
    dev_cuda.get(k->back, from, bytes);
    return KVS_OK;
}

static kvs_status run_data(nccl_rank *k, kvs_error *err)
{
    static const size_t size[] = {0, 1, 4099, MAX_BYTES};
    const size_t all = (size_t)k->n * MAX_BYTES;
    for (size_t i = 0; i < all; i++) {
        k->mine[i] = byte_of(k->seed, k->rank, i);
    }
    for (size_t s = 0; s < sizeof size / sizeof *size; s++) {
        const size_t bytes = size[s];
        dev_cuda.put(k->send, k->mine, all);
        dev_cuda.fill(k->recv, GPU_POISON, all);
        TRY(nccl_all_gather(k->c, k->send, k->recv, bytes, &k->queue, err));
        TRY(fetch(k, k->recv, all, err));
        compare(k, "all_gather", bytes, true, -1);
        dev_cuda.fill(k->recv, GPU_POISON, all);
        TRY(nccl_all_to_all(k->c, k->send, k->recv, bytes, &k->queue, err));
        TRY(fetch(k, k->recv, all, err));
        compare(k, "all_to_all", bytes, false, -1);
        const int32_t root = k->n - 1;
        TRY(nccl_broadcast(k->c, k->send, bytes, root, &k->queue, err));
        TRY(fetch(k, k->send, all, err));
        compare(k, "broadcast", bytes, true, root);
    }
    return KVS_OK;
}

/* A call that all make, so that NCCL is connected; then the one that goes wrong. */
static kvs_status run_fault(nccl_rank *k, kvs_error *err)
{
    const bool victim = k->rank == k->victim;
    TRY(nccl_all_gather(k->c, k->send, k->recv, 64, &k->queue, err));
    TRY(nccl_wait(k->c, &k->queue, err));
    comm_set_timeout(k->host, k->timeout_ms);
    if (k->kind == TRIAL_LATE && victim) {
        return KVS_PEER;
    }
    TRY(nccl_all_gather(k->c, k->send, k->recv, k->kind == TRIAL_SIZE && victim ? 128 : 64, &k->queue,
                        err));
    if (k->kind == TRIAL_WAIT && victim) {
        dev_queue_sync(&k->queue);
        return KVS_PEER;
    }
    return nccl_wait(k->c, &k->queue, err);
}

static kvs_status open_rank(nccl_rank *k, kvs_error *err)
{
    const size_t all = (size_t)k->n * MAX_BYTES;
    TRY(dev_cuda_open(k->device, NULL, err));
    TRY(dev_queue_open_cuda(&k->queue, err));
    k->send = dev_cuda.alloc(all);
    k->recv = dev_cuda.alloc(all);
    k->mine = mem_alloc(all, 0);
    k->back = mem_alloc(all, 0);
    return k->send != NULL && k->recv != NULL && k->mine != NULL && k->back != NULL
               ? KVS_OK
               : err_set(err, KVS_NOMEM, "no memory for a rank of NCCL");
}

static void *rank_main(void *arg)
{
    nccl_rank *k = arg;
    verdict *v = &k->v;
    v->st = comm_agree(k->host, open_rank(k, &v->err), &v->err);
    v->st = v->st < 0 ? v->st : nccl_open(&k->c, k->host, k->device, &v->err);
    if (v->st == KVS_OK) {
        v->st = k->kind == TRIAL_DATA ? run_data(k, &v->err) : run_fault(k, &v->err);
    }
    /* nobody frees what another rank's NCCL may still read */
    dev_queue_sync(&k->queue);
    return NULL;
}

static void close_rank(nccl_rank *k)
{
    if (dev_cuda_use(k->device, NULL) != KVS_OK) {
        return;
    }
    nccl_close(k->c);
    dev_queue_close(&k->queue);
    dev_cuda.free(k->send);
    dev_cuda.free(k->recv);
    mem_free(k->mine);
    mem_free(k->back);
    comm_close(k->host);
}

/* What went wrong with a trial: every rank but the victim was told KVS_PEER with a text that names it. */
static void judge(const verdict *v, int32_t n, trial_kind kind, int32_t victim, char *wrong, size_t cap,
                  char *reason)
{
    char who[24];
    snprintf(who, sizeof who, "rank %d", (int)victim);
    for (int32_t r = 0; r < n && wrong[0] == '\0'; r++) {
        if (v[r].wrong[0] != '\0') {
            snprintf(wrong, cap, "%.180s", v[r].wrong);
        } else if (kind == TRIAL_DATA && v[r].st < 0) {
            snprintf(wrong, cap, "rank %d: %.150s", (int)r, v[r].err.text);
        } else if (kind != TRIAL_DATA && r != victim) {
            snprintf(reason, cap, "%.180s", v[r].err.text);
            if (v[r].st != KVS_PEER || strstr(v[r].err.text, who) == NULL) {
                snprintf(wrong, cap, "rank %d was told %s \"%.120s\"", (int)r, kvs_status_name(v[r].st),
                         v[r].err.text);
            }
        }
    }
}

static void rank_init(nccl_rank *k, const gpu_run *run, trial_kind kind, int32_t n)
{
    memset(k, 0, sizeof *k);
    k->kind = kind;
    k->n = n;
    k->victim = 1;
    k->timeout_ms = run->timeout_ms;
    k->seed = run->cfg->seed + run->n_case;
    dev_queue_init(&k->queue, NULL);
}

/* Ranks that are threads of this process. */
static kvs_status run_threads(const gpu_run *run, trial_kind kind, verdict *v, kvs_error *err)
{
    nccl_rank k[WIRE_MAX_RANK];
    pthread_t thread[WIRE_MAX_RANK];
    comm *host[WIRE_MAX_RANK];
    const int32_t n = run->n_device;
    const comm_config cc = {.timeout_ms = GPU_PATIENT_MS};
    int32_t started = 0;
    TRY(comm_thread_open(host, n, &cc, err));
    for (int32_t r = 0; r < n; r++) {
        rank_init(&k[r], run, kind, n);
        k[r].host = host[r];
        k[r].rank = r;
        k[r].device = r;
    }
    for (; started < n; started++) {
        if (pthread_create(&thread[started], NULL, rank_main, &k[started]) != 0) {
            snprintf(k[started].v.wrong, sizeof k[started].v.wrong, "a thread does not start");
            comm_abort(host[started], k[started].v.wrong);
            break;
        }
    }
    for (int32_t r = 0; r < started; r++) {
        pthread_join(thread[r], NULL);
    }
    for (int32_t r = 0; r < n; r++) {
        v[r] = k[r].v;
        close_rank(&k[r]);
    }
    return dev_cuda_use(0, err);
}

/* This process's rank. */
static kvs_status run_process(const gpu_run *run, trial_kind kind, verdict *v, kvs_error *err)
{
    nccl_rank k;
    rank_init(&k, run, kind, comm_size(run->job));
    k.rank = comm_rank(run->job);
    k.device = run->device;
    TRY(check_job_open(run->cfg, check_job_patience(GPU_PATIENT_MS, run->timeout_ms), &k.host, err));
    (void)rank_main(&k);
    const kvs_status st = comm_all_gather(run->job, &k.v, v, sizeof *v, err);
    if (kind != TRIAL_DATA) {
        comm_abort(k.host, "the trial is over"); /* the victim may not have heard: all abort NCCL, or all destroy it */
    }
    close_rank(&k);
    return st;
}

static kvs_status run_trial(gpu_run *run, trial_kind kind, kvs_error *err)
{
    static const char *const name[N_TRIAL] = {"none", "late", "bytes", "late_wait"};
    verdict v[WIRE_MAX_RANK];
    const int32_t n = run->job != NULL ? comm_size(run->job) : run->n_device;
    char what[112];
    char wrong[192] = "";
    char reason[192] = "";
    run->n_case++;
    TRY(run->job != NULL ? run_process(run, kind, v, err) : run_threads(run, kind, v, err));
    judge(v, n, kind, 1, wrong, sizeof wrong, reason);
    snprintf(what, sizeof what, "op=%s transport=nccl%s%s n=%d devices=%d fault=%s",
             kind == TRIAL_DATA ? "all_gather,all_to_all,broadcast" : "all_gather",
             run->job != NULL ? " over=" : "", run->job != NULL ? comm_transport(run->job) : "", (int)n,
             (int)run->n_device, name[kind]);
    gpu_row(run, what, wrong, reason);
    return KVS_OK;
}

/* Why there is nothing to check; empty: there is. */
static kvs_status find_reason_to_skip(const gpu_run *run, char *text, size_t cap, kvs_error *err)
{
    kvs_error why;
    const int32_t n = run->job != NULL ? comm_size(run->job) : run->n_device;
    text[0] = '\0';
    if (n < 2) {
        snprintf(text, cap, "there is one %s; NCCL's ranks have a device each", run->job != NULL ? "process" : "device");
    } else if (run->n_device < n) {
        snprintf(text, cap, "%d processes have %d device%s; NCCL's ranks have one each", (int)n, (int)run->n_device,
                 run->n_device == 1 ? "" : "s");
    } else if (nccl_load(NULL, &why) < 0) {
        snprintf(text, cap, "%.180s", why.text);
    }
    return gpu_share(run, text, cap, err);
}

kvs_status gpu_check_nccl(gpu_run *run, kvs_error *err)
{
    char why[192];
    TRY(find_reason_to_skip(run, why, sizeof why, err));
    if (why[0] != '\0') {
        gpu_skip(run, "op=all_gather transport=nccl", why);
        return KVS_OK;
    }
    for (int kind = 0; kind < N_TRIAL; kind++) {
        TRY(run_trial(run, (trial_kind)kind, err));
    }
    return KVS_OK;
}
