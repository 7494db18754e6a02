/* comm/tcp.c: the ranks are processes that are connected by TCP.
 *
 * Each group has a connection between any two of its ranks. An exchange sends a stamp (the call's
 * identity and the segment's size) and the segment to every peer, and takes the same from each: straight
 * out of and into the callers' buffers, since nothing but this call moves the bytes. What arrives before
 * its time waits in the connection. A segment is read once all stamps are in and agree.
 *
 * A failure travels on the control connections (tcp_mesh.c), which every rank that waits looks at: it
 * arrives however torn the data is. A process that dies closes its connections, so its peers are told by
 * the system, at once; one that stands still or whose host is gone is found by the time-out.
 *
 * Invariants:
 *   P1  a call that succeeds has sent all and received all: between calls no segment is under way.
 *   P2  a stamp goes before its segment, and nobody waits for a segment to be taken before it looks at
 *       the stamps; so ranks that disagree find out however large their segments are.
 *   P3  a split numbers its groups as in mpi.c (M3), and makes the connections that a rank calls for
 *       before the exchange in which all say that they have; so taking them waits for nobody. */
#include <errno.h>
#include <string.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/impl.h"
#include "comm/tcp_mesh.h"

enum {
    GRACE_MS = 20, /* for a call all had entered when the family ended, and for a reason on its way */
    FLUSH_MS = 100 /* a closing end's last stamp */
};

/* Between this rank and a peer. */
typedef struct lane {
    int fd;
    int no_in, no_out; /* errno: why nothing comes, or can be sent, any more; 0: it does, it can */
    comm_stamp out;
    size_t n_in, n_out; /* bytes moved of stamp and segment */
} lane;

typedef struct end {
    tcp_mesh *mesh;
    uint64_t group;
    int32_t *world;     /* [size] rank in the mesh by rank in the group */
    lane *lanes;        /* [size] */
    comm_stamp *in;     /* [size] */
    bool *late;         /* [size] */
    struct pollfd *set; /* [size + mesh->size + 1] */
    comm_room view;
} end;

static void mesh_tell(comm *c)
{
    tcp_mesh_tell(c->family->impl, c->family->text);
}

/* ---- moving ------------------------------------------------------------------------------------ */

static bool has_stamp(const lane *l)
{
    return l->n_in >= sizeof(comm_stamp);
}

static bool is_all_in(const comm *c, const lane *l, int32_t p)
{
    return l->n_in == sizeof(comm_stamp) + c->in[p].bytes;
}

static bool is_all_out(const comm *c, const lane *l, int32_t p)
{
    return l->n_out == sizeof(comm_stamp) + c->out[p].bytes;
}

static bool send_to(comm *c, int32_t p)
{
    lane *l = &((end *)c->impl)->lanes[p];
    struct iovec v[2];
    int n = 0;
    size_t done = l->n_out;
    if (done < sizeof l->out) {
        v[n++] = (struct iovec){(char *)&l->out + done, sizeof l->out - done};
        done = sizeof l->out;
    }
    done -= sizeof l->out;
    if (done < c->out[p].bytes) {
        v[n++] = (struct iovec){(char *)(uintptr_t)c->out[p].p + done, c->out[p].bytes - done};
    }
    const int64_t sent = n > 0 && l->no_out == 0 ? tcp_send_some(l->fd, v, n) : 0;
    l->no_out = sent < 0 ? (int)-sent : l->no_out;
    l->n_out += sent > 0 ? (size_t)sent : 0;
    return sent > 0;
}

/* The stamp and, once all agree on the sizes, the segment. */
static bool receive_from(comm *c, int32_t p, bool agreed)
{
    end *e = c->impl;
    lane *l = &e->lanes[p];
    bool moved = false;
    while (l->no_in == 0) {
        char *to;
        size_t n;
        if (!has_stamp(l)) {
            to = (char *)&e->in[p] + l->n_in;
            n = sizeof(comm_stamp) - l->n_in;
        } else {
            const size_t done = l->n_in - sizeof(comm_stamp);
            to = agreed ? (char *)c->in[p].p + done : NULL;
            n = agreed ? c->in[p].bytes - done : 0;
        }
        const int64_t got = n > 0 ? tcp_recv_some(l->fd, to, n) : 0;
        if (got <= 0) {
            l->no_in = (int)-got;
            break;
        }
        l->n_in += (size_t)got;
        moved = true;
    }
    return moved;
}

static bool is_done(const comm *c, int32_t p)
{
    const lane *l = &((const end *)c->impl)->lanes[p];
    return is_all_in(c, l, p) && is_all_out(c, l, p);
}

static bool move(comm *c, bool agreed)
{
    bool moved = false;
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank) {
            const bool sent = send_to(c, p);
            const bool got = receive_from(c, p, agreed);
            moved = moved || sent || got;
        }
    }
    return moved;
}

/* ---- waiting ----------------------------------------------------------------------------------- */

static void wait_for_news(comm *c, bool agreed, int64_t until)
{
    end *e = c->impl;
    int n = 0;
    for (int32_t p = 0; p < c->size; p++) {
        const lane *l = &e->lanes[p];
        short events = 0;
        events |= l->no_in == 0 && (!has_stamp(l) || (agreed && !is_all_in(c, l, p))) ? POLLIN : 0;
        events |= l->no_out == 0 && !is_all_out(c, l, p) ? POLLOUT : 0;
        if (p != c->rank && events != 0) {
            e->set[n++] = (struct pollfd){.fd = l->fd, .events = events};
        }
    }
    n += tcp_mesh_watch(e->mesh, e->set + n);
    if (!comm_failed(c)) {
        e->set[n++] = (struct pollfd){.fd = e->mesh->wake, .events = POLLIN};
    }
    (void)poll(e->set, (nfds_t)n, tcp_ms_until(until));
}

static bool has_closed(const end *e, int32_t p)
{
    return has_stamp(&e->lanes[p]) && e->in[p].head.op == COMM_OP_CLOSE;
}

/* A peer that closed its end or is gone, and on which this call still depends; -1: none. */
static int32_t first_lost(const comm *c)
{
    const end *e = c->impl;
    for (int32_t p = 0; p < c->size; p++) {
        const lane *l = &e->lanes[p];
        if (p != c->rank && (has_closed(e, p) || (l->no_in != 0 && !is_all_in(c, l, p)) ||
                             (l->no_out != 0 && !is_all_out(c, l, p)))) {
            return p;
        }
    }
    return -1;
}

static kvs_status fail_lost(comm *c, const comm_head *head, int32_t p)
{
    const end *e = c->impl;
    const lane *l = &e->lanes[p];
    if (has_closed(e, p)) {
        return comm_fail_closed(c, head, p);
    }
    char what[96];
    comm_head_text(what, sizeof what, head);
    const int why = l->no_in != 0 ? l->no_in : l->no_out;
    return comm_fail(c, "rank %d is gone (%.40s) in %s", p,
                     why == EPIPE ? "its process has ended" : strerror(why), what);
}

/* The time is over: who has not come; when all have, whose segments do not move. */
static kvs_status fail_late(comm *c, const comm_head *head)
{
    end *e = c->impl;
    bool any = false;
    for (int step = 0; step < 3 && !any; step++) {
        for (int32_t p = 0; p < c->size; p++) {
            const lane *l = &e->lanes[p];
            const bool ok = step == 0   ? has_stamp(l)
                            : step == 1 ? is_all_in(c, l, p)
                                        : is_all_out(c, l, p);
            e->late[p] = p != c->rank && !ok;
            any = any || e->late[p];
        }
    }
    return comm_fail_late(c, head, e->late);
}

static bool all_have(const comm *c, bool (*what)(const comm *c, int32_t p))
{
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && !what(c, p)) {
            return false;
        }
    }
    return true;
}

static bool has_come(const comm *c, int32_t p)
{
    return has_stamp(&((const end *)c->impl)->lanes[p]);
}

/* ---- exchange ---------------------------------------------------------------------------------- */

/* Whether a call that cannot go on has waited long enough for a reason, or for what is on its way. */
static bool grace_is_over(int64_t *grace)
{
    *grace = *grace == 0 ? tcp_deadline(GRACE_MS) : *grace;
    return clock_ns() >= *grace;
}

static kvs_status run(comm *c, const comm_head *head, bool first)
{
    end *e = c->impl;
    int64_t until = tcp_deadline(c->cfg.timeout_ms);
    int64_t grace = 0;
    bool agreed = false;
    for (;;) {
        const bool moved = move(c, agreed);
        if (!agreed && all_have(c, has_come)) {
            TRY(comm_check_stamps(c, head, first, e->in, sizeof *e->in));
            agreed = true;
            continue;
        }
        if (agreed && all_have(c, is_done)) {
            return KVS_OK;
        }
        until = agreed && moved ? tcp_deadline(c->cfg.timeout_ms) : until;
        tcp_mesh_poll(c);
        const int32_t lost = first_lost(c);
        if (comm_failed(c) || lost >= 0) {
            if (grace_is_over(&grace)) {
                return comm_failed(c) ? KVS_PEER : fail_lost(c, head, lost);
            }
        } else if (clock_ns() >= until) {
            return fail_late(c, head);
        }
        wait_for_news(c, agreed, grace != 0 ? grace : until);
    }
}

static kvs_status tcp_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    end *e = c->impl;
    tcp_mesh_poll(c);
    if (comm_failed(c)) {
        return KVS_PEER;
    }
    TRY(comm_room_for_views(c, &e->view, err));
    for (int32_t p = 0; p < c->size; p++) {
        lane *l = &e->lanes[p];
        l->out = (comm_stamp){*head, c->out[p].bytes};
        l->n_in = 0;
        l->n_out = 0;
    }
    e->in[c->rank] = (comm_stamp){*head, 0};
    return run(c, head, first);
}

/* ---- ends -------------------------------------------------------------------------------------- */

static void end_free(end *e)
{
    if (e == NULL) {
        return;
    }
    mem_free(e->world);
    mem_free(e->lanes);
    mem_free(e->in);
    mem_free(e->late);
    mem_free(e->set);
    mem_free(e->view.p);
    mem_free(e);
}

static end *end_new(tcp_mesh *m, int32_t size, uint64_t group)
{
    const size_t n = (size_t)size;
    end *e = mem_calloc(1, sizeof *e);
    if (e == NULL) {
        return NULL;
    }
    e->mesh = m;
    e->group = group;
    e->world = mem_calloc(n, sizeof *e->world);
    e->lanes = mem_calloc(n, sizeof *e->lanes);
    e->in = mem_calloc(n, sizeof *e->in);
    e->late = mem_calloc(n, sizeof *e->late);
    e->set = mem_calloc(n + (size_t)m->size + 1, sizeof *e->set);
    if (e->world == NULL || e->lanes == NULL || e->in == NULL || e->late == NULL ||
        e->set == NULL) {
        end_free(e);
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        e->lanes[i].fd = -1;
    }
    return e;
}

/* tcp_mesh_call or tcp_mesh_answer, for the lanes of an end. */
typedef kvs_status (*joiner)(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd,
                             int64_t until, kvs_error *err);

static kvs_status connect_end(end *e, int32_t size, joiner fn, int32_t timeout_ms, kvs_error *err)
{
    int *fd = mem_alloc_array((size_t)size, sizeof *fd, 0);
    if (fd == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", size);
    }
    for (int32_t p = 0; p < size; p++) {
        fd[p] = e->lanes[p].fd;
    }
    const kvs_status st =
        fn(e->mesh, e->group, e->world, size, fd, tcp_deadline(timeout_ms), err);
    for (int32_t p = 0; p < size; p++) {
        e->lanes[p].fd = fd[p];
    }
    mem_free(fd);
    return st;
}

static void close_lanes(end *e, int32_t size)
{
    for (int32_t p = 0; p < size; p++) {
        tcp_close(e->lanes[p].fd);
    }
}

/* Tells the peers in the group that no more will come. */
static void end_close(comm *c)
{
    end *e = c->impl;
    if (e == NULL) {
        return;
    }
    const comm_stamp last = {{.op = COMM_OP_CLOSE}, 0};
    const int64_t until = tcp_deadline(FLUSH_MS);
    for (int32_t p = 0; p < c->size && !comm_failed(c); p++) {
        if (e->lanes[p].fd >= 0) {
            (void)tcp_send_all(e->lanes[p].fd, &last, sizeof last, until);
        }
    }
    close_lanes(e, c->size);
    end_free(e);
    c->impl = NULL;
}

static uint64_t split_offer(comm *c)
{
    const tcp_mesh *m = c->family->impl;
    return m->next_group;
}

static kvs_status split_prepare(comm *c, comm *child, const comm_plan *plan, uint64_t *token,
                                kvs_error *err)
{
    tcp_mesh *m = c->family->impl;
    const end *parent = c->impl;
    *token = 0;
    m->next_group = plan->offer + 1;
    end *e = end_new(m, plan->size, plan->offer);
    if (e == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", plan->size);
    }
    for (int32_t i = 0; i < plan->size; i++) {
        e->world[i] = parent->world[plan->members[i]];
    }
    const kvs_status st = connect_end(e, plan->size, tcp_mesh_call, c->cfg.timeout_ms, err);
    if (st < 0) {
        close_lanes(e, plan->size);
        end_free(e);
        return st;
    }
    child->impl = e;
    return KVS_OK;
}

static void split_commit(comm *child, uint64_t token)
{
    (void)token;
    kvs_error err;
    if (connect_end(child->impl, child->size, tcp_mesh_answer, child->cfg.timeout_ms, &err) < 0) {
        (void)comm_fail(child, "rank %d cannot join the group that was split: %.100s", child->rank,
                        err.text);
    }
}

static void split_cancel(comm *child, uint64_t token, bool ended)
{
    (void)token;
    (void)ended;
    close_lanes(child->impl, child->size);
    end_free(child->impl);
    child->impl = NULL;
}

static void family_free(comm_family *f)
{
    tcp_mesh_free(f->impl);
}

static const transport g_transport = {
    .name = "tcp",
    .exchange = tcp_exchange,
    .tell = mesh_tell,
    .poll = tcp_mesh_poll,
    .split_offer = split_offer,
    .split_prepare = split_prepare,
    .split_commit = split_commit,
    .split_cancel = split_cancel,
    .close = end_close,
    .family_free = family_free,
};

kvs_status comm_tcp_open(comm **out, const char *address, int32_t rank, int32_t size,
                         const comm_config *cfg, kvs_error *err)
{
    *out = NULL;
    if (size < 1 || size > COMM_MAX_TCP) {
        return err_set(err, KVS_INVALID, "rank %d of %d: use 1 to %d ranks", rank, size, COMM_MAX_TCP);
    }
    if (rank < 0 || rank >= size) {
        return err_set(err, KVS_INVALID, "rank %d of %d: use rank 0 to %d", rank, size, size - 1);
    }
    tcp_mesh *m;
    TRY(tcp_mesh_open(&m, address, rank, size, cfg->timeout_ms, err));
    comm *c = comm_new(&g_transport, NULL, rank, size, cfg);
    end *e = c != NULL ? end_new(m, size, TCP_GROUP_ALL) : NULL;
    for (int32_t p = 0; p < size && e != NULL; p++) {
        e->world[p] = p;
    }
    kvs_status st =
        e != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", size);
    st = st < 0 ? st : connect_end(e, size, tcp_mesh_call, cfg->timeout_ms, err);
    st = st < 0 ? st : connect_end(e, size, tcp_mesh_answer, cfg->timeout_ms, err);
    if (st < 0) {
        if (e != NULL) {
            close_lanes(e, size);
        }
        end_free(e);
        if (c != NULL) {
            comm_discard(c);
        }
        tcp_mesh_free(m);
        return st;
    }
    c->family->impl = m;
    c->impl = e;
    *out = c;
    return KVS_OK;
}
