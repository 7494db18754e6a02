/* comm/mpi.c: the ranks are MPI processes. MPI-3 calls only.
 *
 * An exchange sends every peer one packet: the call's identity and up to INLINE bytes of its
 * segment. When all packets are in and agree, what is left follows in rounds of at most CHUNK bytes
 * per peer. Everything is non-blocking and polled with sleep in between, so that a time-out ends
 * the wait; nothing that MPI can still touch after a failure belongs to a caller, because segments
 * are copied in and out.
 *
 * All groups of a family live on one communicator, a duplicate of MPI_COMM_WORLD (the root), and
 * differ by tags, so a split needs no MPI call that could block. mpi_root.c owns that.
 *
 * Invariants:
 *   M1  every MPI call is made under mpi_lock; comm_fail is called without it.
 *   M2  packets of one group between two processes arrive in the order of exchanges (one tag).
 *   M3  groups that share two processes have different tags: a split takes the largest free number
 *       of all ranks of its parent, and each of them counts on from there.
 *   M4  a buffer with a request that did not complete is never freed (end.stuck). */
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/impl.h"
#include "comm/mpi_root.h"

enum {
    INLINE = 2048,
    CHUNK = 4 << 20,
    GRACE_MS = 10 /* to complete a call all had entered when the family ended */
};

typedef struct packet {
    comm_stamp stamp;
    unsigned char data[INLINE];
} packet;

static_assert(sizeof(packet) <= MPI_ROOT_MAX_PACKET, "mpi_root.c can take one that is left over");

typedef struct end {
    struct end *next; /* among the stuck */
    root *root;
    int32_t *world;       /* [size] rank in the root by rank in the group */
    int tag;              /* of packets; data is tag + 1 */
    packet *out;          /* [size] */
    packet *in;           /* [size] */
    bool *late;           /* [size] */
    MPI_Request *req;     /* [2, size]: receives, sends */
    comm_room stage;      /* rounds: what goes out, then what comes in */
    comm_room view;       /* segments that comm.c wants to look at */
    bool stuck;
} end;

static end *g_stuck; /* under mpi_lock */

static void mpi_tell(comm *c)
{
    root *r = c->family->impl;
    mpi_lock();
    r->failed = true;
    notice_send(r, 0, c->family->text);
    mpi_unlock();
    (void)root_flush(r, r->out_req, r->size, MPI_ROOT_FLUSH_MS);
}

static void mpi_poll(comm *c)
{
    mpi_lock();
    notice_poll(c->family->impl);
    mpi_unlock();
}

/* ---- waiting ----------------------------------------------------------------------------------- */

/* After a failure: takes receives back; what cannot be taken back makes the end stuck. */
static void give_up(end *e, int32_t n)
{
    mpi_lock();
    for (int32_t p = 0; p < n; p++) {
        if (e->req[p] != MPI_REQUEST_NULL) {
            (void)MPI_Cancel(&e->req[p]);
        }
    }
    mpi_unlock();
    if (!root_flush(e->root, e->req, 2 * n, MPI_ROOT_FLUSH_MS)) {
        e->stuck = true;
        mpi_lock();
        e->root->stuck = true;
        mpi_unlock();
    }
}

/* The time is over: marks the peers whose messages are missing; false when there are none. */
static bool find_late(end *e, int32_t n)
{
    bool any = false;
    memset(e->late, 0, (size_t)n * sizeof *e->late);
    mpi_lock();
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
    mpi_unlock();
    return any;
}

static kvs_status fail_mpi(comm *c, const comm_head *head, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int len = 0;
    mpi_lock();
    (void)MPI_Error_string(code, text, &len);
    mpi_unlock();
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
        mpi_lock();
        const int code = mpi_test_all(e->req, 2 * c->size, &done);
        notice_poll(e->root);
        mpi_unlock();
        if (code != MPI_SUCCESS) {
            st = fail_mpi(c, head, code);
            break;
        }
        if (done) {
            return KVS_OK;
        }
        if (comm_failed(c)) {
            grace = grace == 0 ? mpi_deadline(GRACE_MS) : grace;
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
    mpi_lock();
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
        k->stamp = (comm_stamp){*head, c->out[p].bytes};
        if (n > 0) {
            memcpy(k->data, c->out[p].p, n);
        }
        code = MPI_Isend(k, (int)(offsetof(packet, data) + n), MPI_BYTE, e->world[p], e->tag,
                         e->root->comm, &e->req[c->size + p]);
    }
    mpi_unlock();
    return code;
}

static size_t rest_of(size_t bytes)
{
    return bytes - in_packet(bytes);
}

/* Memory for the views and for the largest round. */
static kvs_status reserve_all(comm *c, kvs_error *err)
{
    end *e = c->impl;
    size_t stage = 0;
    for (int32_t p = 0; p < c->size; p++) {
        if (p == c->rank) {
            continue;
        }
        const size_t a = rest_of(c->out[p].bytes);
        const size_t b = rest_of(c->in[p].bytes);
        stage += comm_align_up(a < CHUNK ? a : CHUNK) + comm_align_up(b < CHUNK ? b : CHUNK);
    }
    if (!comm_room_reserve(&e->stage, stage)) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of staging on rank %d", stage,
                       c->rank);
    }
    return comm_room_for_views(c, &e->view, err);
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
    mpi_lock();
    for (int32_t i = 0; i < 2 * c->size && code == MPI_SUCCESS; i++) {
        const int32_t p = i % c->size;
        const bool recv = i < c->size;
        const size_t n = in_round(recv ? c->in[p].bytes : c->out[p].bytes, done);
        if (p == c->rank || n == 0) {
            continue;
        }
        unsigned char *s = e->stage.p + at;
        at += comm_align_up(n);
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
    mpi_unlock();
    return code;
}

static void take_round(comm *c, size_t done)
{
    const end *e = c->impl;
    size_t at = 0;
    for (int32_t p = 0; p < c->size; p++) {
        const size_t n = in_round(c->in[p].bytes, done);
        if (p != c->rank && n > 0) {
            memcpy((unsigned char *)c->in[p].p + INLINE + done, e->stage.p + at, n);
            at += comm_align_up(n);
        }
    }
}

static kvs_status mpi_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    end *e = c->impl;
    const int64_t until = mpi_deadline(c->cfg.timeout_ms);
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
    e->in[c->rank].stamp = (comm_stamp){*head, 0};
    TRY(comm_check_stamps(c, head, first, &e->in[0].stamp, sizeof(packet)));
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
        TRY(wait_all(c, head, mpi_deadline(c->cfg.timeout_ms)));
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
        mpi_lock();
        e->next = g_stuck;
        g_stuck = e;
        mpi_unlock();
        return;
    }
    mem_free(e->world);
    mem_free(e->out);
    mem_free(e->in);
    mem_free(e->late);
    mem_free(e->req);
    mem_free(e->stage.p);
    mem_free(e->view.p);
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
        mpi_lock();
        for (int32_t p = 0; p < c->size; p++) {
            packet *k = &e->out[p];
            k->stamp = (comm_stamp){{.op = COMM_OP_CLOSE}, 0};
            if (p != c->rank && MPI_Isend(k, (int)offsetof(packet, data), MPI_BYTE, e->world[p],
                                          e->tag, e->root->comm, &e->req[p]) != MPI_SUCCESS) {
                e->req[p] = MPI_REQUEST_NULL;
            }
        }
        mpi_unlock();
        e->stuck = !root_flush(e->root, e->req, 2 * c->size, MPI_ROOT_FLUSH_MS);
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

static void mpi_family_free(comm_family *f)
{
    if (f->impl != NULL) {
        root_leave(f->impl, atomic_load(&f->failed));
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

kvs_status comm_mpi_open(comm **out, const comm_config *cfg, kvs_error *err)
{
    *out = NULL;
    kvs_error why = {0};
    root *r = root_new(cfg, &why);
    if (r == NULL) {
        return err_set(err, why.code, "%s", why.text);
    }
    comm *c = comm_new(&g_transport, NULL, r->rank, r->size, cfg);
    end *e = c != NULL ? end_new(r, r->size, 0) : NULL;
    const kvs_status st = e != NULL
                              ? root_join(r, err)
                              : err_set(err, KVS_NOMEM, "no memory for the group of this MPI rank");
    if (st < 0) {
        end_free(e);
        if (c != NULL) {
            comm_discard(c);
        }
        if (!r->stuck) {
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
