/* comm/mpi.c: the ranks are MPI processes. MPI-3 calls only.
 *
 * An exchange sends every peer one packet: the call's identity and up to INLINE bytes of its
 * segment. When all packets are in and agree, what is left follows in rounds of at most CHUNK bytes
 * per peer. Everything is non-blocking and polled with sleep in between, so that a time-out ends
 * the wait; nothing that MPI can still touch after a failure belongs to a caller, because segments
 * are copied in and out.
 *
 * All groups of a family live on one communicator, a duplicate of MPI_COMM_WORLD (the root), and
 * differ by tags, so a split needs no MPI call that could block. A notice travels from process to
 * process outside of the calls: a failure with its reason, and a goodbye when a process has closed
 * its last end of the family.
 *
 * Invariants:
 *   M1  every MPI call of this file is made under g_mpi.lock; comm_fail is called without it.
 *   M2  packets of one group between two processes arrive in the order of exchanges (one tag).
 *   M3  groups that share two processes have different tags: a split takes the largest free number
 *       of all ranks of its parent, and each of them counts on from there.
 *   M4  a buffer with a request that did not complete is never freed (end.stuck).
 *   M5  a root is freed when every process has said goodbye: no message for it is under way. */
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "comm/impl.h"

enum {
    INLINE = 2048,
    CHUNK = 4 << 20,
    TAG_NOTICE = 0,
    POLL_EAGER = 200,   /* polls before the first sleep */
    NAP_MIN_NS = 20000, /* doubling up to */
    NAP_MAX_NS = 500000,
    GRACE_MS = 10,           /* to complete a call all had entered when the family ended */
    FLUSH_MS = 100,          /* a small message to a live process is out by then */
    GOODBYE_FAILED_MS = 2000 /* how long an ended group waits for the others' goodbyes */
};

enum { OP_CLOSE = -1 }; /* in the packet of an end that closes */

typedef struct packet {
    comm_head head;
    uint64_t bytes; /* of the segment */
    unsigned char data[INLINE];
} packet;

typedef struct notice {
    int32_t goodbye; /* 0: the family has failed */
    char text[COMM_TEXT];
} notice;

/* What this process knows of a family. */
typedef struct root {
    struct root *next; /* among those closed here */
    comm_family *family;
    MPI_Comm comm;
    int32_t rank;
    int32_t size;
    int32_t timeout_ms;
    uint64_t next_group;
    uint64_t max_group;
    int32_t n_goodbye;
    bool failed;
    bool stuck; /* a request of an end never completed */
    notice in;
    MPI_Request in_req;
    notice out[2];        /* failure, goodbye */
    MPI_Request *out_req; /* [2, size] */
} root;

typedef struct end {
    struct end *next; /* among the stuck */
    root *root;
    int32_t *world;       /* [size] rank in the root by rank in the group */
    int tag;              /* of packets; data is tag + 1 */
    packet *out;          /* [size] */
    packet *in;           /* [size] */
    bool *late;           /* [size] */
    MPI_Request *req;     /* [2, size]: receives, sends */
    unsigned char *stage; /* rounds: what goes out, then what comes in */
    size_t stage_cap;
    unsigned char *view; /* segments that comm.c wants to look at */
    size_t view_cap;
    bool stuck;
} end;

static struct {
    pthread_mutex_t lock;
    bool started; /* by this file, and not ended yet */
    int n_open;   /* roots with open ends */
    root *closed;
    end *stuck;
} g_mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void lock_mpi(void)
{
    pthread_mutex_lock(&g_mpi.lock);
}

static void unlock_mpi(void)
{
    pthread_mutex_unlock(&g_mpi.lock);
}

/* Between two polls: eager at first, then asleep for longer and longer. */
typedef struct pace {
    int n;
    int64_t nap_ns;
} pace;

static void pace_wait(pace *p)
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

static int64_t deadline(int32_t ms)
{
    return clock_ns() + (int64_t)ms * INT64_C(1000000);
}

/* ---- notices (under the lock) ------------------------------------------------------------------ */

static void notice_post(root *r)
{
    if (MPI_Irecv(&r->in, sizeof r->in, MPI_BYTE, MPI_ANY_SOURCE, TAG_NOTICE, r->comm,
                  &r->in_req) != MPI_SUCCESS) {
        r->in_req = MPI_REQUEST_NULL;
    }
}

/* Takes what has come. */
static void notice_poll(root *r)
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

static void notice_send(root *r, int32_t goodbye, const char *text)
{
    notice *n = &r->out[goodbye];
    n->goodbye = goodbye;
    snprintf(n->text, sizeof n->text, "%s", text);
    for (int32_t p = 0; p < r->size; p++) {
        MPI_Request *q = &r->out_req[goodbye * r->size + p];
        if (p != r->rank &&
            MPI_Isend(n, sizeof *n, MPI_BYTE, p, TAG_NOTICE, r->comm, q) != MPI_SUCCESS) {
            *q = MPI_REQUEST_NULL;
        }
    }
}

/* Whether all are complete; a null request is. Stops at the first that is not. */
static int test_all(MPI_Request *req, int n, bool *done)
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
    return test_all(req, n, &done) == MPI_SUCCESS && done;
}

/* Gives requests of small messages the time to go out; takes the lock. */
static bool flush(root *r, MPI_Request *req, int n, int32_t ms)
{
    const int64_t until = deadline(ms);
    pace p = {0};
    for (;;) {
        lock_mpi();
        const bool done = all_done(req, n);
        notice_poll(r);
        unlock_mpi();
        if (done || clock_ns() >= until) {
            return done;
        }
        pace_wait(&p);
    }
}

static void mpi_tell(comm *c)
{
    root *r = c->family->impl;
    lock_mpi();
    r->failed = true;
    notice_send(r, 0, c->family->text);
    unlock_mpi();
    (void)flush(r, r->out_req, r->size, FLUSH_MS);
}

static void mpi_poll(comm *c)
{
    lock_mpi();
    notice_poll(c->family->impl);
    unlock_mpi();
}

/* ---- waiting ----------------------------------------------------------------------------------- */

/* After a failure: takes receives back; what cannot be taken back makes the end stuck. */
static void give_up(end *e, int32_t n)
{
    lock_mpi();
    for (int32_t p = 0; p < n; p++) {
        if (e->req[p] != MPI_REQUEST_NULL) {
            (void)MPI_Cancel(&e->req[p]);
        }
    }
    unlock_mpi();
    if (!flush(e->root, e->req, 2 * n, FLUSH_MS)) {
        e->stuck = true;
        lock_mpi();
        e->root->stuck = true;
        unlock_mpi();
    }
}

/* The time is over: marks the peers whose messages are missing; false when there are none. */
static bool find_late(end *e, int32_t n)
{
    bool any = false;
    memset(e->late, 0, (size_t)n * sizeof *e->late);
    lock_mpi();
    for (int32_t i = 0; i < 2 * n; i++) {
        /* Sends tell only when every receive is in. */
        if (i == n && any) {
            break;
        }
        int done = 1;
        if (e->req[i] != MPI_REQUEST_NULL) {
            (void)MPI_Test(&e->req[i], &done, MPI_STATUS_IGNORE);
        }
        if (!done) {
            e->late[i % n] = true;
            any = true;
        }
    }
    unlock_mpi();
    return any;
}

static kvs_status fail_mpi(comm *c, const comm_head *head, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int len = 0;
    lock_mpi();
    (void)MPI_Error_string(code, text, &len);
    unlock_mpi();
    return comm_fail(c, "rank %d: MPI failed in %s: %.80s", c->rank, comm_op_name(head->op), text);
}

/* Waits for all requests of the end. A notice can overtake the packets of a call that everybody has
 * entered; such a call still succeeds when they come in the grace. */
static kvs_status wait_all(comm *c, const comm_head *head, int64_t until)
{
    end *e = c->impl;
    kvs_status st = KVS_OK;
    int64_t grace = 0;
    pace p = {0};
    for (;;) {
        bool done;
        lock_mpi();
        const int code = test_all(e->req, 2 * c->size, &done);
        notice_poll(e->root);
        unlock_mpi();
        if (code != MPI_SUCCESS) {
            st = fail_mpi(c, head, code);
            break;
        }
        if (done) {
            return KVS_OK;
        }
        if (comm_failed(c)) {
            grace = grace == 0 ? deadline(GRACE_MS) : grace;
            if (clock_ns() >= grace) {
                st = KVS_PEER;
                break;
            }
        } else if (clock_ns() >= until) {
            if (!find_late(e, c->size)) {
                return KVS_OK;
            }
            st = comm_fail_late(c, head, e->late);
            break;
        }
        pace_wait(&p);
    }
    give_up(e, c->size);
    return st;
}

/* ---- exchange ---------------------------------------------------------------------------------- */

static size_t in_packet(size_t bytes)
{
    return bytes < INLINE ? bytes : INLINE;
}

/* First error code of the sequence; MPI_SUCCESS when all were posted. */
static int post_packets(comm *c, const comm_head *head)
{
    end *e = c->impl;
    int code = MPI_SUCCESS;
    lock_mpi();
    for (int32_t p = 0; p < c->size && code == MPI_SUCCESS; p++) {
        if (p != c->rank) {
            code = MPI_Irecv(&e->in[p], sizeof(packet), MPI_BYTE, e->world[p], e->tag,
                             e->root->comm, &e->req[p]);
        }
    }
    for (int32_t p = 0; p < c->size && code == MPI_SUCCESS; p++) {
        if (p == c->rank) {
            continue;
        }
        packet *k = &e->out[p];
        const size_t n = in_packet(c->out[p].bytes);
        k->head = *head;
        k->bytes = c->out[p].bytes;
        if (n > 0) {
            memcpy(k->data, c->out[p].p, n);
        }
        code = MPI_Isend(k, (int)(offsetof(packet, data) + n), MPI_BYTE, e->world[p], e->tag,
                         e->root->comm, &e->req[c->size + p]);
    }
    unlock_mpi();
    return code;
}

static kvs_status check_packets(comm *c, const comm_head *head, bool first)
{
    end *e = c->impl;
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && e->in[p].head.op == OP_CLOSE) {
            return comm_fail_closed(c, head, p);
        }
    }
    e->in[c->rank].head = *head;
    for (int32_t p = 1; p < c->size && first && !c->cfg.no_check; p++) {
        if (!comm_head_equal(&e->in[0].head, &e->in[p].head)) {
            return comm_fail_mismatch(c, 0, &e->in[0].head, p, &e->in[p].head);
        }
    }
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && e->in[p].bytes != c->in[p].bytes) {
            return comm_fail_size(c, head, p, e->in[p].bytes, c->in[p].bytes);
        }
    }
    return KVS_OK;
}

static bool reserve(unsigned char **block, size_t *cap, size_t n)
{
    if (n <= *cap) {
        return true;
    }
    unsigned char *fresh = mem_alloc(n, 0);
    if (fresh == NULL) {
        return false;
    }
    mem_free(*block);
    *block = fresh;
    *cap = n;
    return true;
}

static size_t align_up(size_t n)
{
    return (n + (MEM_ALIGN - 1)) & ~(size_t)(MEM_ALIGN - 1);
}

static size_t rest_of(size_t bytes)
{
    return bytes - in_packet(bytes);
}

/* Memory for the views and for the largest round. */
static kvs_status reserve_all(comm *c, kvs_error *err)
{
    end *e = c->impl;
    size_t view = 0;
    size_t stage = 0;
    for (int32_t p = 0; p < c->size; p++) {
        if (p == c->rank) {
            continue;
        }
        view += c->in[p].p == NULL ? align_up(c->in[p].bytes) : 0;
        const size_t a = rest_of(c->out[p].bytes);
        const size_t b = rest_of(c->in[p].bytes);
        stage += align_up(a < CHUNK ? a : CHUNK) + align_up(b < CHUNK ? b : CHUNK);
    }
    if (!reserve(&e->view, &e->view_cap, view) || !reserve(&e->stage, &e->stage_cap, stage)) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of staging on rank %d",
                       view + stage, c->rank);
    }
    size_t at = 0;
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && c->in[p].p == NULL && c->in[p].bytes > 0) {
            c->in[p].p = e->view + at;
            at += align_up(c->in[p].bytes);
        }
    }
    return KVS_OK;
}

/* Bytes of a segment that travel in the round that begins at `done` bytes behind the packet. */
static size_t in_round(size_t bytes, size_t done)
{
    const size_t rest = rest_of(bytes);
    const size_t left = rest > done ? rest - done : 0;
    return left < CHUNK ? left : CHUNK;
}

/* Posts a round; *any: there was something to post. */
static int post_round(comm *c, size_t done, bool *any)
{
    end *e = c->impl;
    int code = MPI_SUCCESS;
    size_t at = 0;
    *any = false;
    lock_mpi();
    for (int32_t i = 0; i < 2 * c->size && code == MPI_SUCCESS; i++) {
        const int32_t p = i % c->size;
        const bool recv = i < c->size;
        const size_t n = in_round(recv ? c->in[p].bytes : c->out[p].bytes, done);
        if (p == c->rank || n == 0) {
            continue;
        }
        unsigned char *s = e->stage + at;
        at += align_up(n);
        *any = true;
        if (recv) {
            code =
                MPI_Irecv(s, (int)n, MPI_BYTE, e->world[p], e->tag + 1, e->root->comm, &e->req[i]);
        } else {
            memcpy(s, (const unsigned char *)c->out[p].p + INLINE + done, n);
            code =
                MPI_Isend(s, (int)n, MPI_BYTE, e->world[p], e->tag + 1, e->root->comm, &e->req[i]);
        }
    }
    unlock_mpi();
    return code;
}

static void take_round(comm *c, size_t done)
{
    const end *e = c->impl;
    size_t at = 0;
    for (int32_t p = 0; p < c->size; p++) {
        const size_t n = in_round(c->in[p].bytes, done);
        if (p != c->rank && n > 0) {
            memcpy((unsigned char *)c->in[p].p + INLINE + done, e->stage + at, n);
            at += align_up(n);
        }
    }
}

static kvs_status mpi_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    end *e = c->impl;
    const int64_t until = deadline(c->cfg.timeout_ms);
    mpi_poll(c);
    if (comm_failed(c)) {
        return KVS_PEER;
    }
    TRY(reserve_all(c, err));
    int code = post_packets(c, head);
    if (code != MPI_SUCCESS) {
        const kvs_status st = fail_mpi(c, head, code);
        give_up(e, c->size);
        return st;
    }
    TRY(wait_all(c, head, until));
    TRY(check_packets(c, head, first));
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && c->in[p].bytes > 0) {
            memcpy(c->in[p].p, e->in[p].data, in_packet(c->in[p].bytes));
        }
    }
    for (size_t done = 0;; done += CHUNK) {
        bool any;
        code = post_round(c, done, &any);
        if (code != MPI_SUCCESS) {
            const kvs_status st = fail_mpi(c, head, code);
            give_up(e, c->size);
            return st;
        }
        if (!any) {
            return KVS_OK;
        }
        TRY(wait_all(c, head, deadline(c->cfg.timeout_ms)));
        take_round(c, done);
    }
}

/* ---- ends -------------------------------------------------------------------------------------- */

static void end_free(end *e)
{
    if (e == NULL) {
        return;
    }
    if (e->stuck) {
        lock_mpi();
        e->next = g_mpi.stuck;
        g_mpi.stuck = e;
        unlock_mpi();
        return;
    }
    mem_free(e->world);
    mem_free(e->out);
    mem_free(e->in);
    mem_free(e->late);
    mem_free(e->req);
    mem_free(e->stage);
    mem_free(e->view);
    mem_free(e);
}

static end *end_new(root *r, int32_t size, uint64_t group)
{
    const size_t n = (size_t)size;
    end *e = mem_calloc(1, sizeof *e);
    if (e == NULL) {
        return NULL;
    }
    e->root = r;
    e->tag = (int)(1 + 2 * group);
    e->world = mem_calloc(n, sizeof *e->world);
    e->out = mem_calloc(n, sizeof *e->out);
    e->in = mem_calloc(n, sizeof *e->in);
    e->late = mem_calloc(n, sizeof *e->late);
    e->req = mem_calloc(2 * n, sizeof *e->req);
    if (e->world == NULL || e->out == NULL || e->in == NULL || e->late == NULL || e->req == NULL) {
        end_free(e);
        return NULL;
    }
    for (size_t i = 0; i < 2 * n; i++) {
        e->req[i] = MPI_REQUEST_NULL;
    }
    return e;
}

/* Tells the peers in the group that no packet will follow. */
static void mpi_close(comm *c)
{
    end *e = c->impl;
    if (e == NULL) {
        return;
    }
    if (!comm_failed(c) && !e->stuck) {
        lock_mpi();
        for (int32_t p = 0; p < c->size; p++) {
            packet *k = &e->out[p];
            k->head = (comm_head){.op = OP_CLOSE};
            k->bytes = 0;
            if (p != c->rank && MPI_Isend(k, (int)offsetof(packet, data), MPI_BYTE, e->world[p],
                                          e->tag, e->root->comm, &e->req[p]) != MPI_SUCCESS) {
                e->req[p] = MPI_REQUEST_NULL;
            }
        }
        unlock_mpi();
        e->stuck = !flush(e->root, e->req, 2 * c->size, FLUSH_MS);
    }
    end_free(e);
    c->impl = NULL;
}

static uint64_t mpi_offer(comm *c)
{
    const root *r = c->family->impl;
    return r->next_group;
}

static kvs_status mpi_prepare(comm *c, comm *child, const comm_plan *plan, uint64_t *token,
                              kvs_error *err)
{
    root *r = c->family->impl;
    const end *parent = c->impl;
    *token = 0;
    if (plan->offer > r->max_group) {
        return err_set(err, KVS_LIMIT, "MPI has tags for %llu groups in a family",
                       (unsigned long long)r->max_group);
    }
    r->next_group = plan->offer + 1;
    end *e = end_new(r, plan->size, plan->offer);
    if (e == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", plan->size);
    }
    for (int32_t i = 0; i < plan->size; i++) {
        e->world[i] = parent->world[plan->members[i]];
    }
    child->impl = e;
    return KVS_OK;
}

static void mpi_commit(comm *child, uint64_t token)
{
    (void)child;
    (void)token;
}

static void mpi_cancel(comm *child, uint64_t token, bool ended)
{
    (void)token;
    (void)ended;
    end_free(child->impl);
    child->impl = NULL;
}

/* ---- roots ------------------------------------------------------------------------------------- */

static void root_free(root *r)
{
    mem_free(r->out_req);
    mem_free(r);
}

/* Receives what nobody asked for: packets of ends that closed. Under the lock. */
static void root_drain(root *r)
{
    static packet sink;
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
            MPI_Recv(&sink, n, MPI_BYTE, st.MPI_SOURCE, st.MPI_TAG, r->comm, MPI_STATUS_IGNORE) !=
                MPI_SUCCESS) {
            r->stuck = true; /* the rest of a broken exchange stays where it is */
            return;
        }
    }
}

/* Frees the closed roots that everybody has left; true when none remains. Takes the lock. */
static bool sweep(void)
{
    lock_mpi();
    for (root **at = &g_mpi.closed; *at != NULL;) {
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
    const bool none = g_mpi.closed == NULL;
    unlock_mpi();
    return none;
}

/* Waits for the other processes' goodbyes. */
static bool sweep_all(int32_t wait_ms)
{
    const int64_t until = deadline(wait_ms);
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
    lock_mpi();
    (void)MPI_Finalize();
    g_mpi.started = false;
    unlock_mpi();
}

static void mpi_family_free(comm_family *f)
{
    root *r = f->impl;
    if (r == NULL) {
        return;
    }
    lock_mpi();
    r->family = NULL;
    r->failed = r->failed || atomic_load(&f->failed);
    notice_send(r, 1, "");
    r->next = g_mpi.closed;
    g_mpi.closed = r;
    const bool last = --g_mpi.n_open == 0;
    const bool started = g_mpi.started;
    const bool failed = r->failed;
    const int32_t ms = r->timeout_ms;
    unlock_mpi();
    if (last && started) {
        end_mpi(failed && ms > GOODBYE_FAILED_MS ? GOODBYE_FAILED_MS : ms);
    } else {
        /* The last one to leave MPI to the application leaves nothing under way if it can. */
        (void)sweep_all(last ? FLUSH_MS : 0);
    }
}

static const transport g_transport = {
    .name = "mpi",
    .exchange = mpi_exchange,
    .tell = mpi_tell,
    .poll = mpi_poll,
    .split_offer = mpi_offer,
    .split_prepare = mpi_prepare,
    .split_commit = mpi_commit,
    .split_cancel = mpi_cancel,
    .close = mpi_close,
    .family_free = mpi_family_free,
};

/* ---- opening ----------------------------------------------------------------------------------- */

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

/* Duplicates MPI_COMM_WORLD, waiting for the other processes to do so at most the time-out. */
static kvs_status root_join(root *r, kvs_error *err)
{
    const int64_t until = deadline(r->timeout_ms);
    MPI_Request req;
    lock_mpi();
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &r->comm, &req);
    unlock_mpi();
    pace p = {0};
    for (int done = 0; code == MPI_SUCCESS && !done;) {
        lock_mpi();
        code = MPI_Test(&req, &done, MPI_STATUS_IGNORE);
        unlock_mpi();
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
    lock_mpi();
    (void)MPI_Comm_set_errhandler(r->comm, MPI_ERRORS_RETURN);
    notice_post(r);
    g_mpi.n_open++;
    unlock_mpi();
    return KVS_OK;
}

static root *root_new(const comm_config *cfg)
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

kvs_status comm_mpi_open(comm **out, const comm_config *cfg, kvs_error *err)
{
    *out = NULL;
    lock_mpi();
    kvs_status st = start_mpi(err);
    root *r = st < 0 ? NULL : root_new(cfg);
    unlock_mpi();
    TRY(st);
    (void)sweep();
    comm *c = r != NULL ? comm_new(&g_transport, NULL, r->rank, r->size, cfg) : NULL;
    end *e = c != NULL ? end_new(r, r->size, 0) : NULL;
    st = e != NULL ? root_join(r, err)
                   : err_set(err, KVS_NOMEM, "no memory for the group of this MPI rank");
    if (st < 0) {
        end_free(e);
        if (c != NULL) {
            comm_discard(c);
        }
        if (r != NULL && !r->stuck) {
            root_free(r);
        }
        return st;
    }
    for (int32_t p = 0; p < r->size; p++) {
        e->world[p] = p;
    }
    r->family = c->family;
    c->family->impl = r;
    c->impl = e;
    *out = c;
    return KVS_OK;
}
