/* comm/p2p_process.c: groups whose ranks are processes: who can be in one, and how areas are named and mapped. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/log.h"
#include "comm/p2p_impl.h"

/* Where a rank is. */
typedef struct whereabouts {
    char host[DEV_HOST_NAME];
    uint8_t uuid[16];
} whereabouts;

static kvs_status find_self(const p2p *g, whereabouts *w, kvs_error *err)
{
    dev_cuda_info info;
    TRY(dev_cuda_open(g->device[comm_rank(g->host)], &info, err));
    memcpy(w->uuid, info.uuid, sizeof w->uuid);
    return dev_host_name(w->host, err);
}

/* Every rank compares the same places in the same order, so all name the same pair. Numbers of devices are not
 * compared: a process counts those that it sees. */
static kvs_status compare_places(const p2p *g, const whereabouts *at, kvs_error *err)
{
    for (int32_t b = 1; b < g->cfg.n_rank; b++) {
        for (int32_t a = 0; a < b; a++) {
            if (memcmp(at[a].host, at[b].host, sizeof at[a].host) != 0) {
                return err_set(err, KVS_UNSUPPORTED,
                               "p2p: ranks %d and %d are on different hosts: use NCCL between hosts", a, b);
            }
            if (!g->cfg.share && memcmp(at[a].uuid, at[b].uuid, sizeof at[a].uuid) == 0) {
                return err_set(err, KVS_UNSUPPORTED,
                               "p2p: ranks %d and %d are processes on one CUDA device: give each process a "
                               "device, or make them ranks of one process",
                               a, b);
            }
        }
    }
    return KVS_OK;
}

static kvs_status compare_configs(const p2p *g, kvs_error *err)
{
    char cells[24];
    char timeout[24];
    snprintf(cells, sizeof cells, "%" PRIu32, g->cfg.n_cell);
    snprintf(timeout, sizeof timeout, "%" PRId32, g->cfg.timeout_ms);
    const comm_field fields[] = {
        {"p2p cells", cells}, {"p2p time-out", timeout}, {"p2p share", g->cfg.share ? "yes" : "no"}};
    return comm_handshake(g->host, fields, 3, err);
}

/* What an area takes: blocks that are shared are whole units. */
static size_t own_bytes(const p2p *g)
{
    const size_t unit = DEV_SHARED_UNIT;
    return (g->bytes + unit - 1) / unit * unit;
}

/* This rank's area, empty, and its name for the others. */
static kvs_status make_own(p2p *g, dev_handle *name, kvs_error *err)
{
    const int32_t own = comm_rank(g->host);
    TRY(p2p_alloc_area(g, own, own_bytes(g), err));
    TRY(p2p_wipe(g, err));
    return dev_cuda_export(g->area[own], name, err);
}

static kvs_status map_others(p2p *g, const dev_handle *name, kvs_error *err)
{
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        if (!p2p_is_here(g, r)) {
            void *p = NULL;
            TRY(p2p_use(g, r, err));
            TRY(dev_cuda_import(&name[r], &p, err));
            g->area[r] = p;
        }
    }
    return KVS_OK;
}

/* Every step that may fail on one rank is agreed on, so that all leave at the same one. */
static kvs_status open_over(p2p *g, kvs_error *err)
{
    whereabouts at[WIRE_MAX_RANK];
    dev_handle name[WIRE_MAX_RANK];
    whereabouts here;
    dev_handle mine;
    memset(&here, 0, sizeof here);
    memset(&mine, 0, sizeof mine);
    TRY(compare_configs(g, err));
    TRY(comm_agree(g->host, find_self(g, &here, err), err));
    TRY(comm_all_gather(g->host, &here, at, sizeof here, err));
    TRY(compare_places(g, at, err));
    TRY(comm_agree(g->host, make_own(g, &mine, err), err));
    g->named = true;
    TRY(comm_all_gather(g->host, &mine, name, sizeof mine, err));
    return comm_agree(g->host, map_others(g, name, err), err);
}

static kvs_status check_host(const p2p_config *cfg, const comm *host, kvs_error *err)
{
    TRY(p2p_check_config(cfg, err));
    if (cfg->n_rank != comm_size(host)) {
        return err_set(err, KVS_INVALID, "p2p: %d ranks over a host communicator of %d: use as many",
                       cfg->n_rank, comm_size(host));
    }
    return strcmp(comm_transport(host), "threads") != 0
               ? KVS_OK
               : err_set(err, KVS_INVALID, "p2p: the ranks are threads of one process: use p2p_open");
}

kvs_status p2p_open_over(p2p **out, comm *host, const p2p_config *cfg, kvs_error *err)
{
    *out = NULL;
    kvs_status st = check_host(cfg, host, err);
    p2p *g = st == KVS_OK ? p2p_new(cfg) : NULL;
    if (st == KVS_OK && g == NULL) {
        st = err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", cfg->n_rank);
    }
    st = comm_agree(host, st, err);
    if (st < 0) {
        mem_free(g);
        return st;
    }
    g->host = host;
    for (int32_t r = 0; r < cfg->n_rank; r++) {
        g->device[r] = cfg->device[comm_rank(host)];
    }
    st = open_over(g, err);
    if (st < 0) {
        p2p_close(g);
        return st;
    }
    *out = g;
    return KVS_OK;
}

/* Where the others cannot say that they have let go, a kernel of theirs may still be sending here: memory that
 * stays as long as this process does no harm to anybody, memory that is given to something else would. */
bool p2p_let_go(p2p *g)
{
    if (g->host == NULL) {
        return true;
    }
    const int32_t own = comm_rank(g->host);
    if (g->named && comm_failed(g->host) && g->area[own] != NULL) {
        (void)p2p_check(g, own, NULL); /* peers that have not heard: their next launches send nothing */
    }
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        if (r != own && g->area[r] != NULL && p2p_use(g, r, NULL) == KVS_OK) {
            dev_cuda_let_go(g->area[r]);
        }
    }
    if (!g->named || comm_barrier(g->host, NULL) == KVS_OK) {
        return true;
    }
    LOG(INFO, COMM, "rank %d keeps %zu bytes of its CUDA device: another rank may still write there", own,
        own_bytes(g));
    return false;
}
