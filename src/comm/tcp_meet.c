/* comm/tcp_meet.c: processes that know one address find each other.
 *
 * Rank 0 listens there. Each of the others opens a listener of its own, connects, and says in a `hello`
 * who it is and where it listens; when all have come, rank 0 answers each with the addresses of all and
 * a key that nobody else has, and closes.
 *
 * The port may be reached by anything. What is no hello is dropped, a caller that says nothing waits and
 * goes when the room is needed; neither keeps the ranks from meeting. A rank that does not fit (another
 * number of ranks, a rank that is there already, another protocol) is told so at once, while rank 0 goes
 * on waiting for the right one; should time run out, every rank that came is told who is missing and what
 * was turned away. A rank that goes before all have come may come again. */
#include "comm/tcp_meet.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include "base/err.h"
#include "base/mem.h"

enum {
    MAX_GUEST = 64,        /* callers that have not said who they are */
    VERSION = 1,           /* of the protocol */
    RETRY_NS = 5000000,    /* between two attempts to reach rank 0 */
    ANSWER_GRACE_MS = 2000 /* rank 0 may have begun to wait later */
};

static const uint64_t k_magic = UINT64_C(0x4B565320656E7472); /* also tells another byte order */

typedef struct hello {
    uint64_t magic;
    int32_t version, size, rank;
    uint32_t port; /* of its listener */
} hello;

typedef struct answer {
    uint64_t magic;
    uint64_t key;
    int64_t st;
    char text[COMM_TEXT]; /* why not; the addresses of all ranks follow otherwise */
} answer;

typedef struct guest {
    int fd;
    size_t n_in;
    hello in;
} guest;

/* Rank 0 while it waits. */
typedef struct desk {
    tcp_mesh *m;
    int listener;
    int n_guest, n_seated;
    guest guests[MAX_GUEST];
    int *seat; /* [size] connections of the ranks that have come */
    struct pollfd *set; /* [1 + MAX_GUEST + size] */
    char turned_away[96];
} desk;

static void nap(int64_t ns)
{
    const struct timespec t = {.tv_nsec = (long)ns};
    (void)nanosleep(&t, NULL);
}

/* A listener on the address that a socket, or rank 0, is reached at. */
static kvs_status open_listener(tcp_mesh *m, tcp_addr own, kvs_error *err)
{
    tcp_addr_set_port(&own, 0);
    m->listener = tcp_listen(&own);
    const int code = m->listener < 0 ? m->listener : tcp_own_addr(m->listener, &m->addr[m->rank]);
    return code == 0 ? KVS_OK
                     : err_set(err, KVS_IO, "rank %d cannot listen for its peers: %s", m->rank,
                               strerror(-code));
}

/* ---- rank 0 ------------------------------------------------------------------------------------ */

static void send_refusal(int fd, kvs_status st, const char *text)
{
    answer a = {.magic = k_magic, .st = st};
    snprintf(a.text, sizeof a.text, "%.*s", (int)sizeof a.text - 1, text);
    struct iovec v = {.iov_base = &a, .iov_len = sizeof a};
    (void)tcp_send_some(fd, &v, 1); /* the first bytes of a connection fit */
}

/* Why a hello cannot be taken; false when it can. */
static bool does_not_fit(const desk *d, const hello *h, char *why, size_t cap)
{
    const int32_t size = d->m->size;
    if (h->version != VERSION) {
        snprintf(why, cap, "a rank speaks version %d, rank 0 %d: start all from one build", h->version,
                 VERSION);
    } else if (h->size != size) {
        snprintf(why, cap, "rank %d was told of %d ranks, rank 0 of %d: start all with the same number",
                 h->rank, h->size, size);
    } else if (h->rank < 1 || h->rank >= size) {
        snprintf(why, cap, "rank %d is not in 0..%d", h->rank, size - 1);
    } else if (d->seat[h->rank] >= 0) {
        snprintf(why, cap, "rank %d was started twice", h->rank);
    } else {
        return false;
    }
    return true;
}

/* Has a hello: the guest gets the seat of its rank or is turned away. */
static void seat_guest(desk *d, const guest *g)
{
    char why[COMM_TEXT];
    tcp_addr at;
    if (g->in.magic != k_magic || tcp_peer_addr(g->fd, &at) < 0) {
        tcp_close(g->fd);
        return;
    }
    if (does_not_fit(d, &g->in, why, sizeof why)) {
        send_refusal(g->fd, KVS_INVALID, why);
        tcp_close(g->fd);
        snprintf(d->turned_away, sizeof d->turned_away, "%.95s", why);
        return;
    }
    tcp_addr_set_port(&at, (uint16_t)g->in.port);
    d->m->addr[g->in.rank] = at;
    d->seat[g->in.rank] = g->fd;
    d->n_seated++;
}

static void leave_guests(desk *d, int i)
{
    d->n_guest--;
    memmove(&d->guests[i], &d->guests[i + 1], (size_t)(d->n_guest - i) * sizeof *d->guests);
}

static void take_guests(desk *d)
{
    for (;;) {
        const int fd = tcp_accept(d->listener);
        if (fd < 0) {
            return;
        }
        if (d->n_guest == MAX_GUEST) {
            tcp_close(d->guests[0].fd);
            leave_guests(d, 0);
        }
        d->guests[d->n_guest++] = (guest){.fd = fd};
    }
}

static void hear_guests(desk *d)
{
    for (int i = 0; i < d->n_guest;) {
        guest *g = &d->guests[i];
        const int64_t got = tcp_recv_some(g->fd, (char *)&g->in + g->n_in, sizeof g->in - g->n_in);
        g->n_in += got > 0 ? (size_t)got : 0;
        if (got < 0) {
            tcp_close(g->fd);
        } else if (g->n_in == sizeof g->in) {
            seat_guest(d, g);
        } else {
            i++;
            continue;
        }
        leave_guests(d, i);
    }
}

/* A rank that has come says nothing more: what is readable is its end. */
static void look_at_seats(desk *d)
{
    for (int32_t r = 1; r < d->m->size; r++) {
        char x;
        if (d->seat[r] >= 0 && tcp_recv_some(d->seat[r], &x, 1) != 0) {
            tcp_close(d->seat[r]);
            d->seat[r] = -1;
            d->n_seated--;
        }
    }
}

static void wait_at_desk(desk *d, int64_t until)
{
    nfds_t n = 0;
    d->set[n++] = (struct pollfd){.fd = d->listener, .events = POLLIN};
    for (int i = 0; i < d->n_guest; i++) {
        d->set[n++] = (struct pollfd){.fd = d->guests[i].fd, .events = POLLIN};
    }
    for (int32_t r = 1; r < d->m->size; r++) {
        if (d->seat[r] >= 0) {
            d->set[n++] = (struct pollfd){.fd = d->seat[r], .events = POLLIN};
        }
    }
    (void)poll(d->set, n, tcp_ms_until(until));
}

/* "ranks 2, 3 have not come ..." to everybody who has. */
static kvs_status tell_missing(desk *d, int32_t timeout_ms, kvs_error *err)
{
    char who[64] = "";
    char why[256];
    int n = 0;
    size_t len = 0;
    for (int32_t r = 1; r < d->m->size; r++) {
        if (d->seat[r] < 0 && len + 16 < sizeof who) {
            len += (size_t)snprintf(who + len, sizeof who - len, "%s%d", n++ > 0 ? ", " : "", r);
        }
    }
    snprintf(why, sizeof why, "rank%s %s ha%s not come within %d ms%s%s", n > 1 ? "s" : "", who,
             n > 1 ? "ve" : "s", timeout_ms, d->turned_away[0] != '\0' ? "; turned away: " : "",
             d->turned_away);
    for (int32_t r = 1; r < d->m->size; r++) {
        if (d->seat[r] >= 0) {
            send_refusal(d->seat[r], KVS_PEER, why);
        }
    }
    return err_set(err, KVS_PEER, "%s", why);
}

/* Everybody has come: gives all the addresses of all. */
static kvs_status give_addresses(desk *d, int64_t until, kvs_error *err)
{
    const answer a = {.magic = k_magic, .key = d->m->key, .st = KVS_OK};
    for (int32_t r = 1; r < d->m->size; r++) {
        int code = tcp_send_all(d->seat[r], &a, sizeof a, until);
        code = code < 0 ? code
                        : tcp_send_all(d->seat[r], d->m->addr,
                                       (size_t)d->m->size * sizeof *d->m->addr, until);
        if (code < 0) {
            return err_set(err, KVS_PEER, "rank %d has come and gone: %s", r, strerror(-code));
        }
    }
    return KVS_OK;
}

static kvs_status receive(desk *d, int32_t timeout_ms, kvs_error *err)
{
    const int64_t until = tcp_deadline(timeout_ms);
    for (;;) {
        take_guests(d);
        look_at_seats(d);
        hear_guests(d);
        if (d->n_seated == d->m->size - 1) {
            return give_addresses(d, tcp_deadline(timeout_ms), err);
        }
        if (clock_ns() >= until) {
            return tell_missing(d, timeout_ms, err);
        }
        wait_at_desk(d, until);
    }
}

static kvs_status desk_open(desk *d, const tcp_addr *at, kvs_error *err)
{
    char text[TCP_ADDR_TEXT];
    tcp_addr_text(at, text, sizeof text);
    d->listener = tcp_listen(at);
    if (d->listener == -EADDRINUSE) {
        return err_set(err, KVS_INVALID,
                       "rank 0 cannot listen at %s: something does already; is rank 0 started twice?",
                       text);
    }
    if (d->listener < 0) {
        return err_set(err, KVS_INVALID,
                       "rank 0 cannot listen at %s: %s; give an address of the host of rank 0", text,
                       strerror(-d->listener));
    }
    if (getrandom(&d->m->key, sizeof d->m->key, 0) != (ssize_t)sizeof d->m->key) {
        return err_set(err, KVS_IO, "the system gives no random numbers: %s", strerror(errno));
    }
    return open_listener(d->m, *at, err);
}

static void desk_close(desk *d)
{
    tcp_close(d->listener);
    for (int i = 0; i < d->n_guest; i++) {
        tcp_close(d->guests[i].fd);
    }
    for (int32_t r = 0; d->seat != NULL && r < d->m->size; r++) {
        tcp_close(d->seat[r]);
    }
    mem_free(d->seat);
    mem_free(d->set);
    mem_free(d);
}

static kvs_status host(tcp_mesh *m, const tcp_addr *at, int32_t timeout_ms, kvs_error *err)
{
    desk *d = mem_calloc(1, sizeof *d);
    if (d == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", m->size);
    }
    d->m = m;
    d->listener = -1;
    d->seat = mem_alloc_array((size_t)m->size, sizeof *d->seat, 0);
    d->set = mem_calloc((size_t)m->size + MAX_GUEST + 1, sizeof *d->set);
    for (int32_t r = 0; d->seat != NULL && r < m->size; r++) {
        d->seat[r] = -1;
    }
    kvs_status st = d->seat != NULL && d->set != NULL
                        ? KVS_OK
                        : err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", m->size);
    st = st < 0 ? st : desk_open(d, at, err);
    st = st < 0 ? st : receive(d, timeout_ms, err);
    desk_close(d);
    return st;
}

/* ---- the others -------------------------------------------------------------------------------- */

/* One visit to rank 0. KVS_IDLE: nobody there, or it went; code says what happened. */
static kvs_status visit(tcp_mesh *m, int fd, int64_t until, int *code, kvs_error *err)
{
    tcp_addr own;
    answer a;
    if (m->listener < 0) {
        *code = tcp_own_addr(fd, &own);
        if (*code < 0) {
            return KVS_IDLE;
        }
        TRY(open_listener(m, own, err));
    }
    const hello h = {.magic = k_magic,
                     .version = VERSION,
                     .size = m->size,
                     .rank = m->rank,
                     .port = tcp_addr_port(&m->addr[m->rank])};
    *code = tcp_send_all(fd, &h, sizeof h, until);
    *code = *code < 0 ? *code : tcp_recv_all(fd, &a, sizeof a, until);
    if (*code < 0) {
        return KVS_IDLE;
    }
    a.text[sizeof a.text - 1] = '\0';
    if (a.magic != k_magic) {
        return err_set(err, KVS_INVALID, "what listens there is no rank 0 of kvspan");
    }
    if (a.st != KVS_OK) {
        return err_set(err, a.st == KVS_INVALID ? KVS_INVALID : KVS_PEER, "%s", a.text);
    }
    m->key = a.key;
    *code = tcp_recv_all(fd, m->addr, (size_t)m->size * sizeof *m->addr, until);
    return *code < 0 ? KVS_IDLE : KVS_OK;
}

static kvs_status go_there(tcp_mesh *m, const tcp_addr *at, int32_t timeout_ms, kvs_error *err)
{
    const int64_t until = tcp_deadline(timeout_ms);
    int code = -ETIMEDOUT;
    do {
        const int fd = tcp_connect(at, until);
        kvs_status st = KVS_IDLE;
        if (fd < 0) {
            code = fd;
        } else {
            st = visit(m, fd, until + (int64_t)ANSWER_GRACE_MS * INT64_C(1000000), &code, err);
            tcp_close(fd);
        }
        if (st != KVS_IDLE) {
            return st;
        }
        nap(RETRY_NS);
    } while (clock_ns() < until);
    char text[TCP_ADDR_TEXT];
    tcp_addr_text(at, text, sizeof text);
    return err_set(err, KVS_PEER, "rank %d has not met rank 0 at %s within %d ms: %s", m->rank, text,
                   timeout_ms, code == -EPIPE ? "it closed the connection" : strerror(-code));
}

kvs_status tcp_meet(tcp_mesh *m, const tcp_addr *at, int32_t timeout_ms, kvs_error *err)
{
    if (m->size == 1) {
        return KVS_OK;
    }
    return m->rank == 0 ? host(m, at, timeout_ms, err) : go_there(m, at, timeout_ms, err);
}
