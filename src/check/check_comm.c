/* check/check_comm.c: which cases there are, how a group of ranks runs one, and the rows. */
#include "check/check_comm.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/err.h"
#include "base/knob.h"
#include "base/log.h"
#include "base/mem.h"
#include "check/comm_case.h"

enum { MAX_N = 8, TIMEOUT_MS = 1000, ROW = 512 };

typedef struct run {
    const check_comm_config *cfg;
    check_comm_totals totals;
    int32_t timeout_ms;
    comm *job; /* of several processes, NULL without */
    bool silent;
    char first[160]; /* failed row */
} run;

const char *case_op_name(int32_t op)
{
    return op == CASE_HANDSHAKE ? "handshake" : op == CASE_AGREE ? "agree" : comm_op_name(op);
}

const char *case_size_name(case_size size)
{
    static const char *const name[SIZE_N] = {"0", "1", "odd", "large", "in_place", "uneven"};
    return size >= 0 && size < SIZE_N ? name[size] : "?";
}

void case_wrong(comm_case *k, const char *fmt, ...)
{
    if (k->v.wrong[0] != '\0') {
        return;
    }
    const int n = snprintf(k->v.wrong, sizeof k->v.wrong, "rank %d: ", k->rank);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(k->v.wrong + n, sizeof k->v.wrong - (size_t)n, fmt, ap);
    va_end(ap);
}

/* ---- rows -------------------------------------------------------------------------------------- */

static void emit(run *r, const char *row)
{
    if (r->cfg->line != NULL && !r->silent) {
        r->cfg->line(r->cfg->ctx, row);
    }
}

static int row_head(char *row, const comm_case *k, const char *transport)
{
    int len = snprintf(row, ROW, "op=%s transport=%s n=%d fault=%s ", case_op_name(k->op),
                       transport, k->n, case_fault_name(k->fault));
    if (k->fault == CASE_SOUND && k->op < COMM_N_OP) {
        len += snprintf(row + len, (size_t)(ROW - len), "size=%s ", case_size_name(k->size));
    } else if (k->fault != CASE_SOUND && k->fault != CASE_ORDER) {
        len += snprintf(row + len, (size_t)(ROW - len), "rank=%d ", k->victim);
    }
    return len;
}

static void row_skip(run *r, const comm_case *k, const char *transport, const char *why)
{
    char row[ROW];
    const int len = row_head(row, k, transport);
    snprintf(row + len, (size_t)(ROW - len), "skip \"%s\"", why);
    r->totals.n_skipped++;
    emit(r, row);
}

/* Judges the verdicts of all ranks and writes the row. */
static void row_done(run *r, const comm_case *k, const char *transport, case_verdict *v)
{
    char row[ROW];
    uint64_t n_call = 0;
    uint64_t bytes = 0;
    double ms = 0;
    const char *wrong = NULL;
    fault_compare(k, v);
    for (int32_t i = 0; i < k->n; i++) {
        wrong = wrong == NULL && v[i].wrong[0] != '\0' ? v[i].wrong : wrong;
        n_call += v[i].n_call;
        bytes += v[i].bytes;
        ms = v[i].ms > ms ? v[i].ms : ms;
    }
    int len = row_head(row, k, transport);
    len += snprintf(row + len, (size_t)(ROW - len), "%s ", wrong == NULL ? "pass" : "FAIL");
    if (k->fault == CASE_SOUND) {
        len += snprintf(row + len, (size_t)(ROW - len), "calls=%llu bytes=%llu",
                        (unsigned long long)n_call, (unsigned long long)bytes);
    } else {
        const int32_t other = k->victim == 0 ? 1 % k->n : 0;
        len += snprintf(row + len, (size_t)(ROW - len), "ms=%.1f", ms);
        if (v[other].reason[0] != '\0') {
            len += snprintf(row + len, (size_t)(ROW - len), " \"%s\"", v[other].reason);
        }
    }
    if (wrong == NULL) {
        r->totals.n_passed++;
    } else {
        snprintf(row + len, (size_t)(ROW - len), " wrong: %s", wrong);
        if (r->totals.n_failed++ == 0) {
            snprintf(r->first, sizeof r->first, "%.*s", (int)sizeof r->first - 1, row);
        }
    }
    emit(r, row);
}

/* ---- groups in this process -------------------------------------------------------------------- */

/* A group of thread ranks that runs one case; n = 1 may be self. */
typedef struct local {
    comm_case k[MAX_N];
    pthread_t thread[MAX_N];
    bool started[MAX_N];
} local;

static void *rank_main(void *arg)
{
    comm_case *k = arg;
    if (k->fault == CASE_SOUND && k->op < COMM_N_OP) {
        data_run(k);
    } else {
        fault_run(k);
    }
    return NULL;
}

static kvs_status local_open(local *g, const comm_case *proto, const char *transport,
                             kvs_error *err)
{
    const comm_config cfg = {.timeout_ms = PATIENT_MS};
    comm *ends[MAX_N] = {NULL};
    if (strcmp(transport, "self") == 0) {
        TRY(comm_self_open(&ends[0], &cfg, err));
    } else {
        TRY(comm_thread_open(ends, proto->n, &cfg, err));
    }
    for (int32_t i = 0; i < proto->n; i++) {
        g->k[i] = *proto;
        g->k[i].c = ends[i];
        g->k[i].rank = i;
    }
    return KVS_OK;
}

static void local_start(local *g, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        g->started[i] = pthread_create(&g->thread[i], NULL, rank_main, &g->k[i]) == 0;
        if (!g->started[i]) {
            case_wrong(&g->k[i], "its thread does not start");
            comm_abort(g->k[i].c, "a thread does not start");
        }
    }
}

static void local_finish(run *r, local *g, const comm_case *proto, const char *transport)
{
    case_verdict v[MAX_N];
    for (int32_t i = 0; i < proto->n; i++) {
        if (g->started[i]) {
            pthread_join(g->thread[i], NULL);
        }
    }
    for (int32_t i = 0; i < proto->n; i++) {
        comm_close(g->k[i].c);
        v[i] = g->k[i].v;
    }
    row_done(r, proto, transport, v);
}

/* Runs the cases side by side: late ranks mostly sleep. */
static kvs_status run_local(run *r, const comm_case *protos, int n_case, const char *transport,
                            kvs_error *err)
{
    local *g = mem_calloc((size_t)n_case, sizeof *g);
    if (g == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the groups of the check");
    }
    int n_open = 0;
    kvs_status st = KVS_OK;
    for (; n_open < n_case; n_open++) {
        st = local_open(&g[n_open], &protos[n_open], transport, err);
        if (st < 0) {
            break;
        }
        local_start(&g[n_open], protos[n_open].n);
    }
    for (int i = 0; i < n_open; i++) {
        local_finish(r, &g[i], &protos[i], transport);
    }
    mem_free(g);
    return st;
}

/* ---- jobs of several processes ----------------------------------------------------------------- */

const char *check_job_transport(const check_comm_config *cfg)
{
    if (cfg->rendezvous != NULL) {
        return "tcp";
    }
    return knob_getenv("OMPI_COMM_WORLD_SIZE") != NULL || knob_getenv("PMI_SIZE") != NULL ||
                   knob_getenv("PMIX_RANK") != NULL
               ? "mpi"
               : NULL;
}

kvs_status check_job_open(const check_comm_config *cfg, int32_t timeout_ms, comm **out, kvs_error *err)
{
    const comm_config c = {.timeout_ms = timeout_ms};
    return cfg->rendezvous != NULL
               ? comm_tcp_open(out, cfg->rendezvous, cfg->rank, cfg->n_rank, &c, err)
               : comm_mpi_open(out, &c, err);
}

int32_t check_job_patience(int32_t ms, int32_t timeout_ms)
{
    const int64_t all = ms + INT64_C(3) * timeout_ms; /* a late rank comes after up to three time-outs */
    return all < INT32_MAX ? (int32_t)all : INT32_MAX;
}

kvs_status check_job_compare(const check_comm_config *cfg, comm *job, const char *device, int32_t timeout_ms,
                             kvs_error *err)
{
    char seed[24];
    char timeout[24];
    snprintf(seed, sizeof seed, "%" PRIu64, cfg->seed);
    snprintf(timeout, sizeof timeout, "%" PRId32 " ms", timeout_ms);
    const comm_field fields[] = {{"check --device", device},
                                 {"check --seed", seed},
                                 {"check --quick", cfg->quick != 0 ? "yes" : "no"},
                                 {"check --timeout", timeout}};
    return comm_handshake(job, fields, sizeof fields / sizeof *fields, err);
}

/* Every process runs its rank in a group of its own; the verdicts meet in the job's group. */
static kvs_status run_job(run *r, const comm_case *proto, kvs_error *err)
{
    comm_case k = *proto;
    k.rank = comm_rank(r->job);
    TRY(check_job_open(r->cfg, check_job_patience(PATIENT_MS, r->timeout_ms), &k.c, err));
    (void)rank_main(&k);
    comm_close(k.c);
    case_verdict *v = mem_calloc((size_t)k.n, sizeof *v);
    if (v == NULL) {
        comm_abort(r->job, "no memory for the verdicts");
    }
    const kvs_status st = comm_all_gather(r->job, &k.v, v, sizeof *v, err);
    if (st >= 0) {
        row_done(r, proto, comm_transport(r->job), v);
    }
    mem_free(v);
    return st;
}

/* ---- which cases ------------------------------------------------------------------------------- */

static comm_case proto_of(const run *r, int32_t op, int32_t n)
{
    const comm_case k = {.op = op,
                         .n = n,
                         .victim = -1,
                         .seed = r->cfg->seed,
                         .quick = r->cfg->quick != 0,
                         .timeout_ms = r->timeout_ms};
    return k;
}

static kvs_status run_cases(run *r, const comm_case *k, int n_case, const char *transport,
                            kvs_error *err)
{
    if (r->job == NULL) {
        return run_local(r, k, n_case, transport, err);
    }
    for (int i = 0; i < n_case; i++) {
        TRY(run_job(r, &k[i], err));
    }
    return KVS_OK;
}

static kvs_status run_data(run *r, const char *transport, int32_t n, kvs_error *err)
{
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        for (int size = 0; size < SIZE_N; size++) {
            comm_case k = proto_of(r, op, n);
            k.size = (case_size)size;
            if (data_has(op, k.size)) {
                TRY(run_cases(r, &k, 1, transport, err));
            }
        }
    }
    return KVS_OK;
}

/* A job runs its cases one after the other; a quick run lets two ops stand for all here. */
static bool is_slow_case(const run *r, const comm_case *k)
{
    return r->cfg->quick != 0 && r->job != NULL &&
           (k->fault == CASE_LATE || k->fault == CASE_STALL) && k->op != COMM_OP_ALL_REDUCE &&
           k->op != COMM_OP_BARRIER;
}

static kvs_status run_faults(run *r, const char *transport, int32_t n, kvs_error *err)
{
    for (int f = CASE_SLOW; f < CASE_N_FAULT; f++) {
        comm_case k[CASE_N_OP];
        int n_case = 0;
        for (int32_t op = 0; op < CASE_N_OP; op++) {
            const char *why;
            comm_case p = proto_of(r, op, n);
            p.fault = (case_fault)f;
            p.victim = (op + f) % n;
            if (!fault_has(op, p.fault, transport, n, &why) || is_slow_case(r, &p)) {
                continue;
            }
            if (why != NULL) {
                row_skip(r, &p, transport, why);
            } else {
                k[n_case++] = p;
            }
        }
        TRY(run_cases(r, k, n_case, transport, err));
    }
    return KVS_OK;
}

static kvs_status run_all_job(run *r, kvs_error *err)
{
    const char *transport = check_job_transport(r->cfg);
    const comm_case none = proto_of(r, COMM_OP_BARRIER, 1);
    if (transport == NULL) {
        row_skip(r, &none, "tcp", "give each process a rendezvous, its rank and their number");
        row_skip(r, &none, "mpi", "start under mpirun");
        return KVS_OK;
    }
    const kvs_status st =
        check_job_open(r->cfg, check_job_patience(PATIENT_MS, r->timeout_ms), &r->job, err);
    if (st == KVS_UNSUPPORTED) {
        row_skip(r, &none, transport, err != NULL ? err->text : "not in this build");
        return KVS_OK;
    }
    TRY(st);
    const int32_t n = comm_size(r->job);
    if (n > MAX_N) {
        return err_set(err, KVS_INVALID, "check --comm with %d processes: use 1 to %d", n, MAX_N);
    }
    TRY(check_job_compare(r->cfg, r->job, "cpu", r->timeout_ms, err));
    r->silent = comm_rank(r->job) != 0;
    TRY(run_data(r, transport, n, err));
    return run_faults(r, transport, n, err);
}

static kvs_status run_all_local(run *r, kvs_error *err)
{
    static const int32_t data_quick[] = {1, 2, 3, 5, 8};
    static const int32_t data_full[] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const int32_t fault_quick[] = {3};
    static const int32_t fault_full[] = {2, 3, 4, 8};
    const bool quick = r->cfg->quick != 0;
    const int n_data = quick ? 5 : 8;
    const int n_fault = quick ? 1 : 4;
    TRY(run_data(r, "self", 1, err));
    TRY(run_faults(r, "self", 1, err));
    for (int i = 0; i < n_data; i++) {
        TRY(run_data(r, "threads", quick ? data_quick[i] : data_full[i], err));
    }
    for (int i = 0; i < n_fault; i++) {
        TRY(run_faults(r, "threads", quick ? fault_quick[i] : fault_full[i], err));
    }
    return KVS_OK;
}

kvs_log_level check_comm_log_off(void)
{
    int level = KVS_LOG_DEBUG;
    while (level > KVS_LOG_OFF && !log_wants((kvs_log_level)level, KVS_LOG_COMM)) {
        level--;
    }
    (void)kvs_log_levels("comm=off", NULL);
    return (kvs_log_level)level;
}

void check_comm_log_on(kvs_log_level level)
{
    char spec[32];
    snprintf(spec, sizeof spec, "comm=%s", kvs_log_level_name(level));
    (void)kvs_log_levels(spec, NULL);
}

kvs_status check_comm_run(const check_comm_config *cfg, kvs_error *err)
{
    if (cfg->timeout_ms < 0) {
        return err_set(err, KVS_INVALID, "check --comm: time-out of %d ms; use 0 or more",
                       cfg->timeout_ms);
    }
    run r = {.cfg = cfg, .timeout_ms = cfg->timeout_ms > 0 ? cfg->timeout_ms : TIMEOUT_MS};
    const kvs_log_level level = check_comm_log_off();
    kvs_status st = run_all_job(&r, err);
    const bool lead = !r.silent;
    comm_close(r.job);
    r.job = NULL;
    if (st >= 0 && lead) {
        st = run_all_local(&r, err);
    }
    check_comm_log_on(level);
    if (cfg->totals != NULL) {
        *cfg->totals = r.totals;
    }
    TRY(st);
    if (r.totals.n_failed > 0) {
        return err_set(err, KVS_INTERNAL, "check --comm: %lld of %lld rows failed; the first: %s",
                       (long long)r.totals.n_failed,
                       (long long)(r.totals.n_failed + r.totals.n_passed), r.first);
    }
    return KVS_OK;
}
