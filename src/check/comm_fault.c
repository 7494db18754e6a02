/* check/comm_fault.c: one rank misbehaves in one call; every rank must end, soon, with one reason
 * that names it. Three faults are none (slow, out of order): there all must succeed. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "check/check_comm.h"
#include "check/comm_case.h"
#include "comm/fault.h"

enum {
    BYTES = 48,
    FLOATS = 12,
    MAX_N = 64,
    SLOW_MS = 40,
    SLACK_MS = 30000 /* a machine may be this slow on top of a time-out */
};

const char *case_fault_name(case_fault fault)
{
    static const char *const name[CASE_N_FAULT] = {
        "none", "slow",  "order", "late", "stall", "die",  "drop",  "bytes",
        "op",   "close", "abort", "null", "value", "name", "count", "status"};
    return fault >= 0 && fault < CASE_N_FAULT ? name[fault] : "?";
}

static bool is_harmless(case_fault f)
{
    return f == CASE_SOUND || f == CASE_SLOW || f == CASE_ORDER;
}

static bool is_late(case_fault f)
{
    return f == CASE_LATE || f == CASE_STALL || f == CASE_DIE;
}

static bool is_mismatch(case_fault f)
{
    return f == CASE_DROP || f == CASE_BYTES || f == CASE_OP;
}

/* Refusals that all ranks see alike and that leave the group alive. */
static bool is_refusal(case_fault f)
{
    return f == CASE_VALUE || f == CASE_NAME || f == CASE_COUNT || f == CASE_STATUS;
}

bool fault_has(int32_t op, case_fault fault, const char *transport, int32_t n, const char **why)
{
    *why = NULL;
    if (op == CASE_HANDSHAKE || op == CASE_AGREE) {
        const bool own =
            op == CASE_AGREE ? fault == CASE_STATUS : fault >= CASE_VALUE && fault <= CASE_COUNT;
        return own && (n > 1 || op == CASE_AGREE);
    }
    if (is_refusal(fault) || fault == CASE_SOUND) {
        return false;
    }
    if (fault == CASE_NULL && (op == COMM_OP_BARRIER || op == COMM_OP_SPLIT)) {
        return false; /* they have no buffer */
    }
    if (n == 1) {
        return fault == CASE_SLOW || fault == CASE_ABORT || fault == CASE_NULL;
    }
    if (fault == CASE_DIE && (strcmp(transport, "mpi") == 0 || strcmp(transport, "tcp") == 0)) {
        *why = transport[0] == 'm' ? "needs a job of its own: the ctest mpi_death"
                                   : "needs a job of its own: the ctest comm_tcp";
    }
    return true;
}

/* ---- calls ------------------------------------------------------------------------------------- */

/* broken: with a NULL buffer, or a root that is not there. */
static kvs_status call(const comm_case *k, bool broken, kvs_error *err)
{
    unsigned char a[BYTES * MAX_N];
    unsigned char b[BYTES * MAX_N];
    float f[FLOATS * MAX_N];
    float g[FLOATS];
    memset(a, 1, sizeof a);
    memset(f, 0, sizeof f);
    switch (k->op) {
    case COMM_OP_ALL_GATHER:
        return comm_all_gather(k->c, broken ? NULL : a, b, BYTES, err);
    case COMM_OP_ALL_TO_ALL:
        return comm_all_to_all(k->c, a, broken ? NULL : b, BYTES, err);
    case COMM_OP_REDUCE_SCATTER:
        return comm_reduce_scatter(k->c, broken ? NULL : f, g, FLOATS, err);
    case COMM_OP_ALL_REDUCE:
        return comm_all_reduce(k->c, broken ? NULL : f, FLOATS, err);
    case COMM_OP_BROADCAST:
        return comm_broadcast(k->c, a, BYTES, broken ? k->n : 0, err);
    case COMM_OP_BARRIER:
        return comm_barrier(k->c, err);
    default: {
        comm *sub = NULL;
        const kvs_status st = comm_split(k->c, 0, 0, &sub, err);
        comm_close(sub);
        return st;
    }
    }
}

static kvs_status call_start(const comm_case *k, kvs_error *err)
{
    const bool has = k->rank == k->victim;
    comm_field f[3] = {{"page", "64"}, {"interleave", "1"}, {"model", "7f"}};
    if (k->op == CASE_AGREE) {
        kvs_error mine = {.code = KVS_IO, .text = "cannot read the weights"};
        const kvs_status st = comm_agree(k->c, has ? KVS_IO : KVS_OK, has ? &mine : err);
        if (has) {
            *err = mine;
        }
        return st;
    }
    if (has && k->fault == CASE_VALUE) {
        f[1].value = "16";
    } else if (has && k->fault == CASE_NAME) {
        f[1].name = "interleaf";
    }
    return comm_handshake(k->c, f, has && k->fault == CASE_COUNT ? 2 : 3, err);
}

/* ---- a rank ------------------------------------------------------------------------------------ */

static void die(void *ctx)
{
    (void)ctx;
    pthread_exit(NULL);
}

static void plant(comm_case *k, uint64_t i_call)
{
    comm_fault f = {.kind = COMM_FAULT_DELAY, .call = i_call, .ms = SLOW_MS, .die = die};
    switch (k->fault) {
    case CASE_LATE:
        f.ms = check_job_patience(0, k->timeout_ms);
        break;
    case CASE_STALL:
        f.kind = COMM_FAULT_STALL;
        f.ms = k->timeout_ms < INT32_MAX - SLACK_MS ? k->timeout_ms + SLACK_MS : INT32_MAX;
        break;
    case CASE_DIE:
        f.kind = COMM_FAULT_DIE;
        break;
    case CASE_DROP:
        f.kind = COMM_FAULT_DROP;
        break;
    case CASE_BYTES:
        f.kind = COMM_FAULT_BYTES;
        break;
    case CASE_OP:
        f.kind = COMM_FAULT_OP;
        break;
    case CASE_ORDER:
        f.ms = SLOW_MS * (k->n - k->rank) / 2;
        break;
    default:
        break;
    }
    kvs_error err = {0};
    if (comm_fault_wrap(k->c, &f, &err) == NULL) {
        case_wrong(k, "%.120s", err.text);
    }
}

/* The call of the fault, on the rank that has it. */
static kvs_status victim_call(comm_case *k, kvs_error *err)
{
    switch (k->fault) {
    case CASE_CLOSE:
        comm_close(k->c);
        k->c = NULL;
        return KVS_PEER;
    case CASE_ABORT:
        comm_abort(k->c, "planted");
        return call(k, false, err);
    case CASE_NULL: {
        kvs_error refusal = {0};
        const kvs_status st = call(k, true, &refusal);
        if (st != KVS_INVALID) {
            case_wrong(k, "a bad argument gives %s", kvs_status_name(st));
        }
        return call(k, false, err);
    }
    case CASE_DROP:
        (void)call(k, false, err);
        return comm_barrier(k->c, err);
    default:
        return call(k, false, err);
    }
}

/* The reason without this rank's own last calls. */
static void keep_reason(comm_case *k, const kvs_error *err)
{
    snprintf(k->v.reason, sizeof k->v.reason, "%.*s", (int)sizeof k->v.reason - 1, err->text);
    char *tail = strstr(k->v.reason, " [rank ");
    if (tail != NULL) {
        *tail = '\0';
    }
}

static void run_refusal(comm_case *k)
{
    kvs_error err = {0};
    const kvs_status want = k->op == CASE_AGREE ? KVS_IO : KVS_INVALID;
    const kvs_status st = call_start(k, &err);
    k->v.failed = st < 0;
    if (st != want) {
        case_wrong(k, "gives %s, not %s", kvs_status_name(st), kvs_status_name(want));
    }
    keep_reason(k, &err);
    if (comm_barrier(k->c, &err) != KVS_OK) {
        case_wrong(k, "the group does not live on: %.100s", err.text);
    }
}

void fault_run(comm_case *k)
{
    kvs_error err = {0};
    if (is_refusal(k->fault)) {
        run_refusal(k);
        return;
    }
    const bool first_call = k->fault == CASE_ORDER;
    if (!first_call && comm_barrier(k->c, &err) != KVS_OK) {
        /* The news of an end may overtake the call before it. */
        if (k->fault == CASE_ABORT || k->fault == CASE_NULL) {
            k->v.failed = 1;
            keep_reason(k, &err);
        } else {
            case_wrong(k, "the call before the fault: %.110s", err.text);
        }
        return;
    }
    if (k->rank == k->victim || k->fault == CASE_ORDER) {
        plant(k, first_call ? 1 : 2);
    }
    if (is_late(k->fault)) {
        comm_set_timeout(k->c, k->timeout_ms);
    }
    const int64_t begin = clock_ns();
    const kvs_status st = k->rank == k->victim ? victim_call(k, &err) : call(k, false, &err);
    k->v.ms = (double)(clock_ns() - begin) * 1e-6;
    k->v.failed = st < 0;
    k->v.n_call = 1;
    if (is_harmless(k->fault)) {
        if (st != KVS_OK) {
            case_wrong(k, "fails: %.120s", err.text);
        }
        return;
    }
    if (k->c == NULL) {
        return;
    }
    if (st != KVS_PEER) {
        case_wrong(k, "gives %s, not KVS_PEER", kvs_status_name(st));
    }
    if (k->v.ms > 3.0 * k->timeout_ms + SLACK_MS) {
        case_wrong(k, "ends after %.0f ms", k->v.ms);
    }
    keep_reason(k, &err);
    if (call(k, false, &err) != KVS_PEER || comm_barrier(k->c, &err) != KVS_PEER) {
        case_wrong(k, "a later call does not give KVS_PEER");
    }
}

/* ---- all ranks --------------------------------------------------------------------------------- */

/* What the reason must hold besides the same words on all ranks. */
static void wanted(const comm_case *k, char *text, size_t cap)
{
    static const char *const by_fault[CASE_N_FAULT] = {
        [CASE_CLOSE] = " has closed its end",
        [CASE_ABORT] = " ended the group: planted",
        [CASE_NULL] = " did not enter ",
        [CASE_VALUE] = "interleave is",
        [CASE_NAME] = "interleaf",
        [CASE_COUNT] = "\"model\" is only on",
        [CASE_STATUS] = ": cannot read the weights",
    };
    if (is_late(k->fault)) {
        snprintf(text, cap, "rank %d more than %d ms late for %s", k->victim, k->timeout_ms,
                 case_op_name(k->op));
    } else if (k->fault == CASE_DROP) {
        snprintf(text, cap, k->victim == 0 ? "rank %d barrier" : "rank %d called barrier",
                 k->victim);
    } else if (is_mismatch(k->fault)) {
        const int32_t op = k->fault == CASE_OP ? (k->op + 1) % COMM_N_OP : k->op;
        snprintf(text, cap, k->victim == 0 ? "rank %d %s" : "rank %d called %s", k->victim,
                 case_op_name(op));
    } else if (k->op == CASE_HANDSHAKE) {
        snprintf(text, cap, "%s", by_fault[k->fault]);
    } else {
        snprintf(text, cap, "rank %d%s", k->victim, by_fault[k->fault]);
    }
}

void fault_compare(const comm_case *k, case_verdict *v)
{
    if (is_harmless(k->fault)) {
        return;
    }
    char want[96];
    char name[16];
    wanted(k, want, sizeof want);
    snprintf(name, sizeof name, "rank %d", k->victim);
    const int32_t base = k->victim == 0 ? 1 % k->n : 0; /* a rank that is not the victim */
    for (int32_t r = 0; r < k->n && v[0].wrong[0] == '\0'; r++) {
        const bool gone = r == k->victim && (k->fault == CASE_DIE || k->fault == CASE_CLOSE);
        if (gone) {
            continue;
        }
        if (strcmp(v[r].reason, v[base].reason) != 0) {
            snprintf(v[0].wrong, sizeof v[0].wrong, "rank %d is told \"%.60s\", rank %d \"%.60s\"",
                     r, v[r].reason, base, v[base].reason);
        }
    }
    if (v[0].wrong[0] == '\0' &&
        (strstr(v[base].reason, want) == NULL || strstr(v[base].reason, name) == NULL)) {
        snprintf(v[0].wrong, sizeof v[0].wrong, "\"%.70s\" lacks \"%.70s\"", v[base].reason, want);
    }
}
