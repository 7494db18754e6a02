/* comm/tcp_mesh.c: the processes of a family and the connections between them.
 *
 * A connection is made by the higher rank; the lower one's listener takes it in the kernel, so calling
 * waits for nobody. What a caller wants is in the first bytes it sends, a `join`: only one that has the
 * family's key is kept, whatever else connects is dropped.
 *
 * Invariants:
 *   N1  a rank makes the groups of splits one after the other, their numbers growing (tcp.c), so a
 *       caller for a number below the one asked for will never be asked for and is dropped.
 *   N2  a notice is small, and at most two go to a process: it fits into the connection's buffer, so
 *       sending one waits for nobody. */
#include "comm/tcp_mesh.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/err.h"
#include "base/mem.h"
#include "comm/tcp_meet.h"

static const uint64_t k_magic = UINT64_C(0x4B5653206A6F696E); /* also tells another byte order */

/* ---- notices ----------------------------------------------------------------------------------- */

/* Wakes whoever waits in this process, now or later. */
static void wake(const tcp_mesh *m)
{
    const uint64_t one = 1;
    if (write(m->wake, &one, sizeof one) < 0) {
        return; /* it is readable already */
    }
}

/* Under the lock. */
static void send_notice(control *p, int32_t goodbye, const char *text)
{
    notice n = {.goodbye = goodbye};
    snprintf(n.text, sizeof n.text, "%s", text);
    struct iovec v = {.iov_base = &n, .iov_len = sizeof n};
    if (p->fd >= 0) {
        (void)tcp_send_some(p->fd, &v, 1);
    }
}

void tcp_mesh_tell(tcp_mesh *m, const char *text)
{
    pthread_mutex_lock(&m->lock);
    for (int32_t p = 0; p < m->size; p++) {
        send_notice(&m->peer[p], 0, text);
    }
    pthread_mutex_unlock(&m->lock);
    wake(m);
}

/* True when the connection has ended. A failure that has come is copied to text. */
static bool read_notices(control *p, char *text)
{
    for (;;) {
        const int64_t got =
            tcp_recv_some(p->fd, (char *)&p->in + p->n_in, sizeof p->in - p->n_in);
        if (got <= 0) {
            return got < 0;
        }
        p->n_in += (size_t)got;
        if (p->n_in < sizeof p->in) {
            continue;
        }
        p->n_in = 0;
        p->in.text[COMM_TEXT - 1] = '\0';
        p->goodbye = p->goodbye || p->in.goodbye != 0;
        if (p->in.goodbye == 0 && text[0] == '\0') {
            memcpy(text, p->in.text, COMM_TEXT);
        }
    }
}

void tcp_mesh_poll(comm *c)
{
    tcp_mesh *m = c->family->impl;
    char text[COMM_TEXT] = "";
    int32_t lost = -1;
    pthread_mutex_lock(&m->lock);
    for (int32_t i = 0; i < m->size; i++) {
        control *p = &m->peer[i];
        if (p->fd >= 0 && read_notices(p, text)) {
            tcp_close(p->fd);
            p->fd = -1;
            lost = p->goodbye || lost >= 0 ? lost : i;
        }
    }
    pthread_mutex_unlock(&m->lock);
    if (text[0] != '\0') {
        comm_family_fail(c->family, text);
        wake(m);
    }
    if (lost >= 0) {
        (void)comm_fail(c, "rank %d is gone: its process has ended or cannot be reached", lost);
    }
}

int tcp_mesh_watch(tcp_mesh *m, struct pollfd *set)
{
    int n = 0;
    pthread_mutex_lock(&m->lock);
    for (int32_t i = 0; i < m->size; i++) {
        if (m->peer[i].fd >= 0) {
            set[n++] = (struct pollfd){.fd = m->peer[i].fd, .events = POLLIN};
        }
    }
    pthread_mutex_unlock(&m->lock);
    return n;
}

/* ---- calling and answering --------------------------------------------------------------------- */

static kvs_status call_one(tcp_mesh *m, uint64_t group, int32_t to, int *fd, int64_t until,
                           kvs_error *err)
{
    const join j = {.magic = k_magic, .key = m->key, .group = group, .rank = m->rank};
    const int s = tcp_connect(&m->addr[to], until);
    int code = s;
    if (s >= 0) {
        code = tcp_send_all(s, &j, sizeof j, until);
    }
    if (code < 0) {
        char text[TCP_ADDR_TEXT];
        tcp_addr_text(&m->addr[to], text, sizeof text);
        tcp_close(s);
        return err_set(err, KVS_PEER, "rank %d cannot reach rank %d at %s: %s", m->rank, to, text,
                       strerror(-code));
    }
    *fd = s;
    return KVS_OK;
}

kvs_status tcp_mesh_call(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd,
                         int64_t until, kvs_error *err)
{
    for (int32_t i = 0; i < n; i++) {
        if (members[i] < m->rank) {
            TRY(call_one(m, group, members[i], &fd[i], until, err));
        }
    }
    return KVS_OK;
}

static void drop_caller(tcp_mesh *m, int32_t i)
{
    m->callers[i] = m->callers[--m->n_caller];
}

/* Takes what has connected; when the list is full, the caller that has waited longest goes. */
static void take_callers(tcp_mesh *m)
{
    for (;;) {
        const int fd = tcp_accept(m->listener);
        if (fd < 0) {
            return;
        }
        if (m->n_caller == m->max_caller) {
            tcp_close(m->callers[0].fd);
            memmove(&m->callers[0], &m->callers[1],
                    (size_t)(m->n_caller - 1) * sizeof *m->callers);
            m->n_caller--;
        }
        m->callers[m->n_caller++] = (caller){.fd = fd};
    }
}

static bool has_said(const caller *k)
{
    return k->n_in == sizeof k->in;
}

/* Reads what a caller wants; false when it is none of ours, or none that will be asked for. */
static bool hear_caller(const tcp_mesh *m, uint64_t group, caller *k)
{
    if (!has_said(k)) {
        const int64_t got = tcp_recv_some(k->fd, (char *)&k->in + k->n_in, sizeof k->in - k->n_in);
        if (got < 0) {
            return false;
        }
        k->n_in += (size_t)got;
    }
    return !has_said(k) || (k->in.magic == k_magic && k->in.key == m->key && k->in.group >= group);
}

/* Gives the callers that have come for the group to those who are to have them. */
static void hand_out(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd)
{
    for (int32_t k = m->n_caller - 1; k >= 0; k--) {
        caller *who = &m->callers[k];
        if (!hear_caller(m, group, who)) {
            tcp_close(who->fd);
            drop_caller(m, k);
            continue;
        }
        for (int32_t i = 0; i < n && has_said(who) && who->in.group == group; i++) {
            if (members[i] == who->in.rank && members[i] > m->rank && fd[i] < 0) {
                fd[i] = who->fd;
                drop_caller(m, k);
                break;
            }
        }
    }
}

static int32_t first_missing(const tcp_mesh *m, const int32_t *members, int32_t n, const int *fd)
{
    for (int32_t i = 0; i < n; i++) {
        if (members[i] > m->rank && fd[i] < 0) {
            return members[i];
        }
    }
    return -1;
}

/* Until somebody connects or says something. */
static void wait_for_callers(tcp_mesh *m, struct pollfd *set, int64_t until)
{
    nfds_t n = 0;
    set[n++] = (struct pollfd){.fd = m->listener, .events = POLLIN};
    for (int32_t k = 0; k < m->n_caller; k++) {
        if (!has_said(&m->callers[k])) {
            set[n++] = (struct pollfd){.fd = m->callers[k].fd, .events = POLLIN};
        }
    }
    (void)poll(set, n, tcp_ms_until(until));
}

kvs_status tcp_mesh_answer(tcp_mesh *m, uint64_t group, const int32_t *members, int32_t n, int *fd,
                           int64_t until, kvs_error *err)
{
    struct pollfd *set = mem_calloc((size_t)m->max_caller + 1, sizeof *set);
    if (set == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to wait for %d ranks", n);
    }
    int32_t missing;
    for (;;) {
        take_callers(m);
        hand_out(m, group, members, n, fd);
        missing = first_missing(m, members, n, fd);
        if (missing < 0 || clock_ns() >= until) {
            break;
        }
        wait_for_callers(m, set, until);
    }
    mem_free(set);
    return missing < 0 ? KVS_OK
                       : err_set(err, KVS_PEER, "rank %d has not connected to rank %d in time", missing,
                                 m->rank);
}

/* ---- life -------------------------------------------------------------------------------------- */

void tcp_mesh_free(tcp_mesh *m)
{
    if (m == NULL) {
        return;
    }
    for (int32_t i = 0; m->peer != NULL && i < m->size; i++) {
        send_notice(&m->peer[i], 1, "");
        tcp_close(m->peer[i].fd);
    }
    for (int32_t k = 0; k < m->n_caller; k++) {
        tcp_close(m->callers[k].fd);
    }
    tcp_close(m->listener);
    tcp_close(m->wake);
    pthread_mutex_destroy(&m->lock);
    mem_free(m->addr);
    mem_free(m->peer);
    mem_free(m->callers);
    mem_free(m);
}

static tcp_mesh *mesh_new(int32_t rank, int32_t size)
{
    tcp_mesh *m = mem_calloc(1, sizeof *m);
    if (m == NULL) {
        return NULL;
    }
    if (pthread_mutex_init(&m->lock, NULL) != 0) {
        mem_free(m);
        return NULL;
    }
    m->rank = rank;
    m->size = size;
    m->next_group = TCP_GROUP_FIRST;
    m->listener = -1;
    m->max_caller = 4 * size + 32;
    m->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    m->addr = mem_calloc((size_t)size, sizeof *m->addr);
    m->peer = mem_calloc((size_t)size, sizeof *m->peer);
    m->callers = mem_calloc((size_t)m->max_caller, sizeof *m->callers);
    for (int32_t i = 0; m->peer != NULL && i < size; i++) {
        m->peer[i].fd = -1;
    }
    if (m->wake < 0 || m->addr == NULL || m->peer == NULL || m->callers == NULL) {
        tcp_mesh_free(m);
        return NULL;
    }
    return m;
}

/* The control connections to all others. */
static kvs_status connect_all(tcp_mesh *m, int64_t until, kvs_error *err)
{
    int32_t *all = mem_calloc((size_t)m->size, sizeof *all);
    int *fd = mem_calloc((size_t)m->size, sizeof *fd);
    kvs_status st = all != NULL && fd != NULL
                        ? KVS_OK
                        : err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", m->size);
    for (int32_t i = 0; i < m->size && st == KVS_OK; i++) {
        all[i] = i;
        fd[i] = -1;
    }
    st = st < 0 ? st : tcp_mesh_call(m, TCP_GROUP_CONTROL, all, m->size, fd, until, err);
    st = st < 0 ? st : tcp_mesh_answer(m, TCP_GROUP_CONTROL, all, m->size, fd, until, err);
    for (int32_t i = 0; i < m->size && all != NULL && fd != NULL; i++) {
        m->peer[i].fd = fd[i];
    }
    mem_free(all);
    mem_free(fd);
    return st;
}

kvs_status tcp_mesh_open(tcp_mesh **out, const char *address, int32_t rank, int32_t size,
                         int32_t timeout_ms, kvs_error *err)
{
    *out = NULL;
    tcp_addr at;
    TRY(tcp_resolve(address, &at, err));
    tcp_mesh *m = mesh_new(rank, size);
    if (m == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", size);
    }
    kvs_status st = tcp_meet(m, &at, timeout_ms, err);
    st = st < 0 ? st : connect_all(m, tcp_deadline(timeout_ms), err);
    if (st < 0) {
        tcp_mesh_free(m);
        return st;
    }
    *out = m;
    return KVS_OK;
}
