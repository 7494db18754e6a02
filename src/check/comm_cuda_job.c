/* check/comm_cuda_job.c: the check of exchanges by several processes, a rank each: who they are, what they tell each
 * other between exchanges, and their groups. */
#include <stdio.h>
#include <string.h>
#include "check/comm_cuda.h"

enum { TEXT = 192 };

/* The first text of any process becomes that of all. */
static kvs_status first_text(comm *job, char *text, size_t cap, kvs_error *err)
{
    char mine[TEXT];
    char all[WIRE_MAX_RANK][TEXT];
    memset(mine, 0, sizeof mine);
    snprintf(mine, sizeof mine, "%s", text);
    TRY(comm_all_gather(job, mine, all, sizeof mine, err));
    for (int32_t r = 0; r < comm_size(job); r++) {
        if (all[r][0] != '\0') {
            snprintf(text, cap, "%s", all[r]);
            break;
        }
    }
    return KVS_OK;
}

kvs_status gpu_share(const gpu_run *r, char *text, size_t cap, kvs_error *err)
{
    return r->job != NULL ? first_text(r->job, text, cap, err) : KVS_OK;
}

kvs_status gpu_meet(const gpu_run *r, kvs_error *err)
{
    return r->job != NULL ? comm_barrier(r->job, err) : KVS_OK;
}

kvs_status gpu_slowest(const gpu_run *r, double *ms, kvs_error *err)
{
    double all[WIRE_MAX_RANK];
    if (r->job == NULL) {
        return KVS_OK;
    }
    TRY(comm_all_gather(r->job, ms, all, sizeof *ms, err));
    for (int32_t i = 0; i < comm_size(r->job); i++) {
        *ms = all[i] > *ms ? all[i] : *ms;
    }
    return KVS_OK;
}

/* ---- who they are -------------------------------------------------------------------------------- */

/* This process's device: the next one that it sees for each process of its host before it. */
static kvs_status find_device(gpu_run *r, dev_cuda_info *info, kvs_error *err)
{
    char host[DEV_HOST_NAME];
    char hosts[WIRE_MAX_RANK][DEV_HOST_NAME];
    kvs_status st = dev_host_name(host, err);
    st = st == KVS_OK ? dev_cuda_open(0, info, err) : st;
    TRY(comm_agree(r->job, st, err));
    TRY(comm_all_gather(r->job, host, hosts, sizeof host, err));
    int32_t before = 0;
    for (int32_t i = 0; i < comm_size(r->job); i++) {
        before += i < comm_rank(r->job) && memcmp(host, hosts[i], sizeof host) == 0;
    }
    r->device = before % info->n_device;
    return comm_agree(r->job, dev_cuda_open(r->device, info, err), err);
}

/* How many devices they have: the same one may have another number in each. */
static kvs_status count_devices(gpu_run *r, const dev_cuda_info *info, kvs_error *err)
{
    uint8_t uuid[WIRE_MAX_RANK][sizeof info->uuid];
    TRY(comm_all_gather(r->job, info->uuid, uuid, sizeof info->uuid, err));
    r->n_device = 0;
    for (int32_t i = 0; i < comm_size(r->job); i++) {
        int32_t first = 0;
        while (memcmp(uuid[first], uuid[i], sizeof uuid[i]) != 0) {
            first++;
        }
        r->n_device += first == i;
    }
    return KVS_OK;
}

kvs_status gpu_job_open(gpu_run *r, dev_cuda_info *info, kvs_error *err)
{
    const char *transport = check_job_transport(r->cfg);
    if (transport == NULL) {
        return KVS_OK;
    }
    kvs_error why;
    const kvs_status st = check_job_open(r->cfg, check_job_patience(GPU_PATIENT_MS, r->timeout_ms), &r->job, &why);
    if (st == KVS_UNSUPPORTED) {
        char what[48];
        snprintf(what, sizeof what, "transport=p2p over=%s", transport);
        gpu_skip(r, what, why.text);
        return KVS_OK;
    }
    if (st < 0) {
        return err_set(err, st, "%s", why.text);
    }
    if (comm_size(r->job) > WIRE_MAX_RANK) {
        return err_set(err, KVS_INVALID, "check --comm --device cuda with %d processes: use 1 to %d",
                       comm_size(r->job), WIRE_MAX_RANK);
    }
    TRY(check_job_compare(r->cfg, r->job, "cuda", r->timeout_ms, err));
    TRY(find_device(r, info, err));
    return count_devices(r, info, err);
}

/* ---- their groups -------------------------------------------------------------------------------- */

/* A group whose failure is part of the check has a communicator of its own to end with. */
kvs_status gpu_open_job(gpu_world *w, const gpu_run *r, int64_t max_bytes, int32_t timeout_ms, kvs_error *err)
{
    memset(w, 0, sizeof *w);
    w->n = comm_size(r->job);
    TRY(check_job_open(r->cfg, check_job_patience(GPU_PATIENT_MS, r->timeout_ms), &w->host, err));
    w->here = comm_rank(w->host);
    for (int32_t i = 0; i < w->n; i++) {
        w->device[i] = r->device;
    }
    const p2p_config cfg = {
        .n_rank = w->n,
        .device = w->device,
        .n_cell = exchange_cells_for(max_bytes),
        .timeout_ms = timeout_ms,
        .share = r->n_device < w->n,
        .op_name = exchange_op_name,
    };
    kvs_status st = p2p_open_over(&w->g, w->host, &cfg, err);
    st = st == KVS_OK ? comm_agree(w->host, dev_queue_open_cuda(&w->queue[w->here], err), err) : st;
    if (st < 0) {
        gpu_close(w);
    }
    return st;
}

/* ---- the run ------------------------------------------------------------------------------------- */

kvs_status gpu_check_job(gpu_run *r, kvs_error *err)
{
    gpu_world w;
    kvs_error why;
    const int32_t n = comm_size(r->job);
    const kvs_status st = gpu_open_job(&w, r, WIRE_CELL, r->timeout_ms, &why);
    if (st == KVS_UNSUPPORTED) {
        char what[96];
        gpu_group_text(r, n, r->n_device, what, sizeof what);
        gpu_skip(r, what, why.text);
        return gpu_check_nccl(r, err);
    }
    if (st < 0) {
        return err_set(err, st, "%s", why.text);
    }
    gpu_close(&w);
    TRY(gpu_check_data(r, n, true, err));
    TRY(gpu_check_graph(r, n, true, err));
    if (n > 1) {
        TRY(gpu_check_faults(r, n, err));
    }
    return gpu_check_nccl(r, err);
}
