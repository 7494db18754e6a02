/* api/comm_api.c: the public face of comm/: checks arguments, fills in defaults, calls below. */
#include <string.h>
#include <stdlib.h>
#include "base/err.h"
#include "base/knob.h"
#include "comm/comm.h"
#include "kvspan/comm.h"

enum { TIMEOUT_MS = 30000 };

/* cfg NULL means defaults. */
static kvs_status config_read(const kvs_comm_config *cfg, comm_config *out, kvs_error *err)
{
    kvs_comm_config full = {0};
    if (cfg != NULL) {
        if (cfg->struct_size < sizeof cfg->struct_size) {
            return err_set(err, KVS_INVALID,
                           "kvs_comm_config.struct_size is %zu; use kvs_comm_config_default()",
                           cfg->struct_size);
        }
        memcpy(&full, cfg, cfg->struct_size < sizeof full ? cfg->struct_size : sizeof full);
    }
    if (full.timeout_ms < 0) {
        return err_set(err, KVS_INVALID, "kvs_comm_config.timeout_ms is %d; use 0 (for %d) or more",
                       full.timeout_ms, TIMEOUT_MS);
    }
    if (full.no_check != 0 && full.no_check != 1) {
        return err_set(err, KVS_INVALID, "kvs_comm_config.no_check is %d; use 0 or 1",
                       full.no_check);
    }
    out->timeout_ms = full.timeout_ms > 0 ? full.timeout_ms : TIMEOUT_MS;
    out->no_check = full.no_check == 1;
    return KVS_OK;
}

static kvs_status no_out(kvs_error *err)
{
    return err_set(err, KVS_INVALID, "out is NULL; give the address of a kvs_comm pointer");
}

kvs_status kvs_comm_open_self(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err)
{
    if (out == NULL) {
        return no_out(err);
    }
    *out = NULL;
    comm_config c;
    TRY(config_read(cfg, &c, err));
    return comm_self_open(out, &c, err);
}

kvs_status kvs_comm_open_threads(kvs_comm **out, int32_t n, const kvs_comm_config *cfg,
                                 kvs_error *err)
{
    if (out == NULL) {
        return no_out(err);
    }
    for (int32_t r = 0; r < n && n <= COMM_MAX_THREADS; r++) {
        out[r] = NULL;
    }
    comm_config c;
    TRY(config_read(cfg, &c, err));
    return comm_thread_open(out, n, &c, err);
}

kvs_status kvs_comm_open_mpi(kvs_comm **out, const kvs_comm_config *cfg, kvs_error *err)
{
    if (out == NULL) {
        return no_out(err);
    }
    *out = NULL;
    comm_config c;
    TRY(config_read(cfg, &c, err));
    return comm_mpi_open(out, &c, err);
}

kvs_status kvs_comm_open_tcp(kvs_comm **out, const char *address, int32_t rank, int32_t size,
                             const kvs_comm_config *cfg, kvs_error *err)
{
    if (out == NULL) {
        return no_out(err);
    }
    *out = NULL;
    comm_config c;
    TRY(config_read(cfg, &c, err));
    return comm_tcp_open(out, address, rank, size, &c, err);
}

int32_t kvs_comm_launched(void)
{
    static const char *const var[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof var / sizeof *var; i++) {
        const char *v = knob_getenv(var[i]);
        const long n = v != NULL ? strtol(v, NULL, 10) : 0;
        if (n > 0 && n <= INT32_MAX) {
            return (int32_t)n;
        }
    }
    return 0;
}

int32_t kvs_comm_rank(const kvs_comm *c)
{
    return c != NULL ? comm_rank(c) : -1;
}

int32_t kvs_comm_size(const kvs_comm *c)
{
    return c != NULL ? comm_size(c) : 0;
}

kvs_status kvs_comm_barrier(kvs_comm *c, kvs_error *err)
{
    if (c == NULL) {
        return err_set(err, KVS_INVALID, "the comm is NULL; open one with kvs_comm_open_*");
    }
    return comm_barrier(c, err);
}

void kvs_comm_abort(kvs_comm *c, const char *reason)
{
    comm_abort(c, reason);
}

void kvs_comm_close(kvs_comm *c)
{
    comm_close(c);
}
