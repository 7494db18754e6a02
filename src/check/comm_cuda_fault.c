/* check/comm_cuda_fault.c: ranks that misbehave in an exchange over peer memory: what the others are told.
 *
 * Each rank is a launch of its own here, so that they may differ. Where ranks of a process share a device the launches
 * run side by side if the device has room, as it has; where they did not, the time-out would end them. */
#include "check/comm_cuda.h"
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"

typedef enum fault {
    FAULT_SLOW,  /* comes late, in time */
    FAULT_LATE,  /* does not come */
    FAULT_ROWS,  /* comes with a row more */
    FAULT_WIDTH, /* ... with wider rows */
    FAULT_OP,    /* ... with another op */
    FAULT_ABORT, /* ends the group from the host while the others wait */
    N_FAULT_KIND
} fault;

static const char *const k_name[N_FAULT_KIND] = {"slow", "late", "rows", "width", "op", "abort"};

enum { WIDTH = 1152, ROWS = 3 };

typedef struct trial {
    gpu_world w;
    exchange_args a[WIRE_MAX_RANK];
    int32_t victim;
    char wrong[192];
    char reason[192]; /* as rank `other` was told */
    double ms;        /* until the waiting ranks were done */
} trial;

static kvs_status make(trial *t, kvs_error *err)
{
    for (int32_t r = 0; r < t->w.n; r++) {
        exchange_args *a = &t->a[r];
        memset(a, 0, sizeof *a);
        void *src = NULL;
        TRY(gpu_alloc(&t->w, r, 2 * WIDTH * (ROWS + 1), &src, err));
        TRY(gpu_alloc(&t->w, r, (size_t)(2 * WIDTH * (ROWS + 1) * t->w.n), &a->part[0].dst, err));
        gpu_fill(&t->w, r, src, r + 1, 2 * WIDTH * (ROWS + 1));
        a->w = p2p_wire(t->w.g, r);
        a->op = EXCHANGE_Q;
        a->n_row = ROWS;
        a->n_part = 1;
        a->part[0].src = src;
        a->part[0].src_row = WIDTH;
        a->part[0].bytes = WIDTH;
        a->part[0].dst_rank = WIDTH;
        a->part[0].dst_row = (int64_t)t->w.n * WIDTH;
    }
    return KVS_OK;
}

static void plant(trial *t, fault f)
{
    exchange_args *v = &t->a[t->victim];
    v->n_row += f == FAULT_ROWS;
    v->part[0].bytes += f == FAULT_WIDTH ? 16 : 0;
    v->op = f == FAULT_OP ? EXCHANGE_SELECT : v->op;
}

static void nap(int32_t ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    (void)nanosleep(&t, NULL);
}

/* Only the victim, which comes after the others. */
static void launch_victim(trial *t)
{
    if (gpu_is_here(&t->w, t->victim) && p2p_use(t->w.g, t->victim, NULL) == KVS_OK) {
        exchange_sm90(&t->a[t->victim], 1, &t->w.queue[t->victim]);
    }
}

static void expect_data(trial *t)
{
    uint8_t got[WIDTH];
    for (int32_t r = 0; r < t->w.n; r++) {
        for (int32_t from = 0; from < t->w.n && gpu_is_here(&t->w, r) && t->wrong[0] == '\0'; from++) {
            const uint8_t *dst = t->a[r].part[0].dst;
            gpu_get(&t->w, r, got, dst + (size_t)from * WIDTH, sizeof got);
            if (got[0] != from + 1 || got[WIDTH - 1] != from + 1) {
                snprintf(t->wrong, sizeof t->wrong, "rank %d has %02x from rank %d, want %02x", (int)r,
                         got[0], (int)from, (unsigned)(from + 1));
            }
        }
    }
}

/* All ranks were told, and what they were told names the victim. */
static void expect_reason(trial *t, const char *names)
{
    char who[24];
    snprintf(who, sizeof who, "rank %d", (int)t->victim);
    for (int32_t r = 0; r < t->w.n && t->wrong[0] == '\0'; r++) {
        kvs_error e;
        memset(&e, 0, sizeof e);
        if (!gpu_is_here(&t->w, r)) {
            continue;
        }
        const kvs_status st = p2p_check(t->w.g, r, &e);
        if (st != KVS_PEER || strstr(e.text, who) == NULL || strstr(e.text, names) == NULL) {
            snprintf(t->wrong, sizeof t->wrong, "rank %d was told %s \"%.120s\"", (int)r,
                     kvs_status_name(st), e.text);
        }
        if (r != t->victim) {
            snprintf(t->reason, sizeof t->reason, "%.190s", e.text);
        }
    }
}

/* An ended group stays ended, and does not keep anybody. */
static kvs_status expect_ended(trial *t, int32_t timeout_ms, kvs_error *err)
{
    for (int32_t r = 0; r < t->w.n; r++) {
        t->a[r].n_row = ROWS;
        t->a[r].part[0].bytes = WIDTH;
        t->a[r].op = EXCHANGE_Q;
    }
    const int64_t begin = clock_ns();
    gpu_exchange(&t->w, t->a, -1, true);
    TRY(gpu_sync(&t->w, err));
    const double ms = (double)(clock_ns() - begin) * 1e-6;
    if (ms > 0.5 * timeout_ms && t->wrong[0] == '\0') {
        snprintf(t->wrong, sizeof t->wrong, "an ended group kept a rank for %.1f ms", ms);
    }
    for (int32_t r = 0; r < t->w.n && t->wrong[0] == '\0'; r++) {
        if (!gpu_is_here(&t->w, r)) {
            continue;
        }
        if (p2p_check(t->w.g, r, NULL) != KVS_PEER || p2p_renew(t->w.g, NULL) != KVS_PEER) {
            snprintf(t->wrong, sizeof t->wrong, "rank %d goes on after the group has ended", (int)r);
        }
    }
    return KVS_OK;
}

static void expect_sound(trial *t)
{
    for (int32_t r = 0; r < t->w.n && t->wrong[0] == '\0'; r++) {
        kvs_error e;
        if (gpu_is_here(&t->w, r) && p2p_check(t->w.g, r, &e) < 0) {
            snprintf(t->wrong, sizeof t->wrong, "%.190s", e.text);
        }
    }
}

/* How long those who are here took to be told. A process whose rank does not come waits for nothing. */
static void expect_time(trial *t, fault f, int32_t timeout_ms)
{
    const bool waits = t->w.host == NULL || t->w.here != t->victim;
    if (f == FAULT_LATE && waits && (t->ms < 0.8 * timeout_ms || t->ms > 3.0 * timeout_ms)) {
        snprintf(t->wrong, sizeof t->wrong, "the wait took %.1f ms", t->ms);
    }
    if (f != FAULT_LATE && f != FAULT_SLOW && t->ms > 0.7 * timeout_ms) {
        snprintf(t->wrong, sizeof t->wrong, "the ranks were told after %.1f ms only", t->ms);
    }
}

/* Until the queues are done. */
static kvs_status run_ranks(trial *t, fault f, const gpu_run *run, kvs_error *err)
{
    const bool comes_later = f == FAULT_SLOW || f == FAULT_LATE || f == FAULT_ABORT;
    TRY(gpu_meet(run, err));
    const int64_t begin = clock_ns();
    gpu_exchange(&t->w, t->a, comes_later ? t->victim : -1, true);
    if (f == FAULT_SLOW) {
        nap(run->timeout_ms / 4);
        launch_victim(t);
    } else if (f == FAULT_ABORT) {
        nap(run->timeout_ms / 8);
        if (gpu_is_here(&t->w, t->victim)) {
            p2p_abort(t->w.g, t->victim, "enough");
        }
    }
    TRY(gpu_sync(&t->w, err));
    t->ms = (double)(clock_ns() - begin) * 1e-6;
    return gpu_meet(run, err); /* a process that did not wait is told when the others have been */
}

static kvs_status run_trial(trial *t, fault f, const gpu_run *run, kvs_error *err)
{
    static const char *const names[N_FAULT_KIND] = {"",     "late",       "rows",
                                                    "sent", "candidates", "ended the group: enough"};
    TRY(make(t, err));
    plant(t, f);
    TRY(run_ranks(t, f, run, err));
    expect_time(t, f, run->timeout_ms);
    if (f == FAULT_SLOW) {
        expect_data(t);
        expect_sound(t);
        return KVS_OK;
    }
    expect_reason(t, names[f]);
    return expect_ended(t, run->timeout_ms, err);
}

/* In a job: what one process saw is what all say. */
static kvs_status share(trial *t, const gpu_run *run, kvs_error *err)
{
    TRY(gpu_share(run, t->wrong, sizeof t->wrong, err));
    TRY(gpu_share(run, t->reason, sizeof t->reason, err));
    return gpu_slowest(run, &t->ms, err);
}

static kvs_status open_trial(trial *t, int32_t n, const gpu_run *run, kvs_error *err)
{
    const int64_t bytes = 2 * WIDTH * (ROWS + 1);
    memset(t, 0, sizeof *t);
    return run->job != NULL ? gpu_open_job(&t->w, run, bytes, run->timeout_ms, err)
                            : gpu_open(&t->w, n, run->n_device, true, bytes, run->timeout_ms, err);
}

kvs_status gpu_check_faults(gpu_run *run, int32_t n, kvs_error *err)
{
    for (int f = 0; f < N_FAULT_KIND; f++) {
        char what[96];
        char tail[224];
        trial t;
        char group[64];
        TRY(open_trial(&t, n, run, err));
        t.victim = f % n;
        kvs_status st = run_trial(&t, (fault)f, run, err);
        st = st == KVS_OK ? share(&t, run, err) : st;
        gpu_end(&t.w, run, st, err);
        TRY(st);
        gpu_group_text(run, n, n < run->n_device ? n : run->n_device, group, sizeof group);
        snprintf(what, sizeof what, "op=queries %s fault=%s rank=%d", group, k_name[f], (int)t.victim);
        snprintf(tail, sizeof tail, "ms=%.1f%s%s%s", t.ms, t.reason[0] != '\0' ? " \"" : "", t.reason,
                 t.reason[0] != '\0' ? "\"" : "");
        gpu_row(run, what, t.wrong, tail);
    }
    return KVS_OK;
}
