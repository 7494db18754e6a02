/* comm/mpi_root.c: starts and ends MPI; a root per family of groups.
 *
 * A notice travels from process to process outside of the calls: a failure with its reason, and a
 * goodbye when a process has closed its last end of the family. A root that is left stays in a list
 * until all processes have left it; the list is swept whenever a group opens or closes, and waited
 * for before MPI ends.
 *
 * Invariants:
 *   R1  every MPI call is made under g_mpi.lock, which is held for as long as the call.
 *   R2  a root is freed when every process has said goodbye: no message for it is under way. */
#include "comm/mpi_root.h"
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"

enum {
    POLL_EAGER = 200,   /* polls before the first sleep */
    NAP_MIN_NS = 20000, /* doubling up to */
    NAP_MAX_NS = 500000,
    GOODBYE_FAILED_MS = 2000 /* how long an ended group waits for the others' goodbyes */
};

static struct {
    pthread_mutex_t lock;
    bool started; /* by this file, and not ended yet */
    int n_open;   /* roots with open ends */
    root *left;   /* roots this process has left and others may not have */
} g_mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

void mpi_lock(void)
{
    pthread_mutex_lock(&g_mpi.lock);
}

void mpi_unlock(void)
{
    pthread_mutex_unlock(&g_mpi.lock);
}

void pace_wait(pace *p)
{
    if (p->n++ < POLL_EAGER) {
        sched_yield();
        return;
    }
    p->nap_ns = p->nap_ns == 0 ? NAP_MIN_NS : 2 * p->nap_ns;
    p->nap_ns = p->nap_ns > NAP_MAX_NS ? NAP_MAX_NS : p->nap_ns;
    const struct timespec t = {.tv_nsec = (long)p->nap_ns};
    (void)nanosleep(&t, NULL);
}

/* ---- notices (under the lock) ------------------------------------------------------------------ */

static void notice_post(root *r)
{
    if (MPI_Irecv(&r->in, sizeof r->in, MPI_BYTE, MPI_ANY_SOURCE, MPI_ROOT_TAG_NOTICE, r->comm,
                  &r->in_req) != MPI_SUCCESS) {
        r->in_req = MPI_REQUEST_NULL;
    }
}

/* Takes what has come. */
void notice_poll(root *r)
{
    int done = 1;
    while (r->in_req != MPI_REQUEST_NULL) {
        if (MPI_Test(&r->in_req, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) {
            return;
        }
        if (r->in.goodbye) {
            r->n_goodbye++;
        } else {
            r->failed = true;
            r->in.text[COMM_TEXT - 1] = '\0';
            if (r->family != NULL) {
                comm_family_fail(r->family, r->in.text);
            }
        }
        notice_post(r);
    }
}

void notice_send(root *r, int32_t goodbye, const char *text)
{
    notice *n = &r->out[goodbye];
    n->goodbye = goodbye;
    snprintf(n->text, sizeof n->text, "%s", text);
    for (int32_t p = 0; p < r->size; p++) {
        MPI_Request *q = &r->out_req[goodbye * r->size + p];
        if (p != r->rank &&
            MPI_Isend(n, sizeof *n, MPI_BYTE, p, MPI_ROOT_TAG_NOTICE, r->comm, q) != MPI_SUCCESS) {
            *q = MPI_REQUEST_NULL;
        }
    }
}

/* Whether all are complete; a null request is. Stops at the first that is not. */
int mpi_test_all(MPI_Request *req, int n, bool *done)
{
    *done = false;
    for (int i = 0; i < n; i++) {
        int one = 1;
        if (req[i] != MPI_REQUEST_NULL) {
            const int code = MPI_Test(&req[i], &one, MPI_STATUS_IGNORE);
            if (code != MPI_SUCCESS) {
                return code;
            }
        }
        if (!one) {
            return MPI_SUCCESS;
        }
    }
    *done = true;
    return MPI_SUCCESS;
}

static bool all_done(MPI_Request *req, int n)
{
    bool done;
    return mpi_test_all(req, n, &done) == MPI_SUCCESS && done;
}

/* Gives requests of small messages the time to go out; takes the lock. */
bool root_flush(root *r, MPI_Request *req, int n, int32_t ms)
{
    const int64_t until = mpi_deadline(ms);
    pace p = {0};
    for (;;) {
        mpi_lock();
        const bool done = all_done(req, n);
        notice_poll(r);
        mpi_unlock();
        if (done || clock_ns() >= until) {
            return done;
        }
        pace_wait(&p);
    }
}

/* ---- roots ------------------------------------------------------------------------------------- */

void root_free(root *r)
{
    mem_free(r->out_req);
    mem_free(r);
}

/* Receives what nobody asked for: packets of ends that closed. Under the lock. */
static void root_drain(root *r)
{
    static unsigned char sink[MPI_ROOT_MAX_PACKET];
    for (;;) {
        int there = 0;
        MPI_Status st;
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, r->comm, &there, &st) != MPI_SUCCESS ||
            !there) {
            return;
        }
        int n = 0;
        (void)MPI_Get_count(&st, MPI_BYTE, &n);
        if (n < 0 || (size_t)n > sizeof sink ||
            MPI_Recv(sink, n, MPI_BYTE, st.MPI_SOURCE, st.MPI_TAG, r->comm, MPI_STATUS_IGNORE) !=
                MPI_SUCCESS) {
            r->stuck = true; /* the rest of a broken exchange stays where it is */
            return;
        }
    }
}

/* Frees the closed roots that everybody has left; true when none remains. Takes the lock. */
static bool sweep(void)
{
    mpi_lock();
    for (root **at = &g_mpi.left; *at != NULL;) {
        root *r = *at;
        notice_poll(r);
        if (r->n_goodbye < r->size - 1 || !all_done(r->out_req, 2 * r->size)) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        if (r->in_req != MPI_REQUEST_NULL) {
            (void)MPI_Cancel(&r->in_req);
            (void)MPI_Wait(&r->in_req, MPI_STATUS_IGNORE);
        }
        root_drain(r);
        if (!r->stuck) {
            (void)MPI_Comm_free(&r->comm);
        }
        root_free(r);
    }
    const bool none = g_mpi.left == NULL;
    mpi_unlock();
    return none;
}

/* Waits for the other processes' goodbyes. */
static bool sweep_all(int32_t wait_ms)
{
    const int64_t until = mpi_deadline(wait_ms);
    pace p = {0};
    while (!sweep()) {
        if (clock_ns() >= until) {
            return false;
        }
        pace_wait(&p);
    }
    return true;
}

/* Ends MPI when all processes are there to do so: MPI_Finalize waits for each of them. */
static void end_mpi(int32_t wait_ms)
{
    if (!sweep_all(wait_ms)) {
        LOG(WARN, COMM, "MPI is not finalised: some rank has not closed its group in %d ms",
            wait_ms);
        return;
    }
    mpi_lock();
    (void)MPI_Finalize();
    g_mpi.started = false;
    mpi_unlock();
}

void root_leave(root *r, bool failed)
{
    mpi_lock();
    r->family = NULL;
    failed = failed || r->failed;
    notice_send(r, 1, "");
    r->next = g_mpi.left;
    g_mpi.left = r;
    const bool last = --g_mpi.n_open == 0;
    const bool started = g_mpi.started;
    const int32_t ms = r->timeout_ms;
    mpi_unlock();
    if (last && started) {
        end_mpi(failed && ms > GOODBYE_FAILED_MS ? GOODBYE_FAILED_MS : ms);
    } else {
        /* The last one to leave MPI to the application leaves nothing under way if it can. */
        (void)sweep_all(last ? MPI_ROOT_FLUSH_MS : 0);
    }
}

/* ---- starting ---------------------------------------------------------------------------------- */

/* MPI runs and may be called from several threads in turn. Under the lock. */
static kvs_status start_mpi(kvs_error *err)
{
    int is_on = 0;
    int is_over = 0;
    int level = MPI_THREAD_SINGLE;
    (void)MPI_Initialized(&is_on);
    (void)MPI_Finalized(&is_over);
    if (is_over) {
        return err_set(err, KVS_UNSUPPORTED,
                       "MPI has been finalised in this process; keep one group open until the end");
    }
    if (!is_on) {
        if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) {
            return err_set(err, KVS_UNSUPPORTED, "MPI does not start; run under mpirun");
        }
        g_mpi.started = true;
        (void)MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    } else {
        (void)MPI_Query_thread(&level);
    }
    if (level < MPI_THREAD_SERIALIZED) {
        return err_set(err, KVS_UNSUPPORTED,
                       "MPI runs at thread level %d; start it with MPI_THREAD_SERIALIZED (%d)",
                       level, MPI_THREAD_SERIALIZED);
    }
    return KVS_OK;
}

kvs_status root_join(root *r, kvs_error *err)
{
    const int64_t until = mpi_deadline(r->timeout_ms);
    MPI_Request req;
    mpi_lock();
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &r->comm, &req);
    mpi_unlock();
    pace p = {0};
    for (int done = 0; code == MPI_SUCCESS && !done;) {
        mpi_lock();
        code = MPI_Test(&req, &done, MPI_STATUS_IGNORE);
        mpi_unlock();
        if (!done && clock_ns() >= until) {
            r->stuck = true;
            return err_set(err, KVS_PEER,
                           "some rank of MPI_COMM_WORLD did not open its end in %d ms",
                           r->timeout_ms);
        }
        if (!done) {
            pace_wait(&p);
        }
    }
    if (code != MPI_SUCCESS) {
        return err_set(err, KVS_PEER, "MPI_Comm_idup failed with code %d", code);
    }
    mpi_lock();
    (void)MPI_Comm_set_errhandler(r->comm, MPI_ERRORS_RETURN);
    notice_post(r);
    g_mpi.n_open++;
    mpi_unlock();
    return KVS_OK;
}

static root *root_make(const comm_config *cfg)
{
    root *r = mem_calloc(1, sizeof *r);
    if (r == NULL) {
        return NULL;
    }
    int rank = 0;
    int size = 1;
    int *ub = NULL;
    int has_ub = 0;
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
    (void)MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &ub, &has_ub);
    r->rank = rank;
    r->size = size;
    r->timeout_ms = cfg->timeout_ms;
    r->max_group = has_ub ? ((uint64_t)*ub - 2) / 2 : (32767 - 2) / 2;
    r->next_group = 1;
    r->in_req = MPI_REQUEST_NULL;
    r->out_req = mem_calloc(2 * (size_t)size, sizeof *r->out_req);
    if (r->out_req == NULL) {
        mem_free(r);
        return NULL;
    }
    for (int i = 0; i < 2 * size; i++) {
        r->out_req[i] = MPI_REQUEST_NULL;
    }
    return r;
}

root *root_new(const comm_config *cfg, kvs_error *err)
{
    mpi_lock();
    const kvs_status st = start_mpi(err);
    root *r = st < 0 ? NULL : root_make(cfg);
    mpi_unlock();
    if (st >= 0 && r == NULL) {
        err_set(err, KVS_NOMEM, "no memory for the group of this MPI rank");
    }
    if (r != NULL) {
        (void)sweep();
    }
    return r;
}
