/* comm/thread.c: the ranks are threads of one process.
 *
 * A group has a desk per rank with two sides, used in turn. An exchange: copy what goes to others
 * onto the own desk, arrive, wait until all have arrived, copy from the others' desks. There is one
 * wait per exchange and no rank touches memory that another rank's caller owns.
 *
 * Invariants:
 *   T1  a rank arrives at exchange e + 1 only after it has copied all it takes at e; so when all
 *       have arrived at e + 1, side e mod 2 is free, and its owner writes it again at e + 2.
 *   T2  `arrived` counts arrivals of all ranks; no rank is more than one exchange ahead, so
 *       arrived >= size * e means that all are at e.
 *   T3  a rank that finds all arrived succeeds whatever the failure flag says; desks live until
 *       the last end of the group closes, so it may still read them.
 *   T4  locks are taken in the order house, group; nobody sleeps with a lock other than by waiting
 *       on the group's condition.
 * A group dies when all its ends are closed. One whose split broke off half-way may have ends that
 * never came to be; it dies with the family (house). */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/pool.h"
#include "comm/impl.h"

enum { SPIN = 2000 };

/* One side of a rank's desk. Written by its rank before it arrives, read by all after. */
typedef struct side {
    comm_head head;
    size_t *at;          /* [size] offset of what goes to rank p */
    size_t *bytes;       /* [size] */
    unsigned char *data; /* cap bytes */
    size_t cap;
    unsigned char *fresh; /* a larger block that replaces data at the side's next use */
    size_t fresh_cap;
} side;

typedef struct desk {
    side side[2];
    atomic_uint_fast64_t epoch; /* exchanges this rank has arrived at */
    atomic_bool closed;
} desk;

typedef struct group {
    struct group *next; /* in the house */
    struct group *prev;
    int32_t size;
    int spin;
    atomic_int ends; /* not closed yet; from the start all of them */
    atomic_int n_closed;
    _Alignas(64) atomic_uint_fast64_t arrived;
    pthread_mutex_t lock;
    pthread_cond_t news; /* all arrived, an end closed, the family failed */
    desk *desks;         /* [size] */
} group;

/* The groups of a family, so that a failure reaches all who wait. Guarded by lock. */
typedef struct house {
    pthread_mutex_t lock;
    group *first;
} house;

typedef struct end {
    group *g;
    uint64_t epoch;
    bool *late; /* [size] */
} end;

static void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void group_free(group *g)
{
    for (int32_t r = 0; g->desks != NULL && r < g->size; r++) {
        for (int i = 0; i < 2; i++) {
            side *s = &g->desks[r].side[i];
            mem_free(s->at);
            mem_free(s->bytes);
            mem_free(s->data);
            mem_free(s->fresh);
        }
    }
    mem_free(g->desks);
    pthread_cond_destroy(&g->news);
    pthread_mutex_destroy(&g->lock);
    mem_free(g);
}

static bool group_init_locks(group *g)
{
    pthread_condattr_t attr;
    if (pthread_mutex_init(&g->lock, NULL) != 0) {
        return false;
    }
    bool ok = pthread_condattr_init(&attr) == 0;
    if (ok) {
        ok = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0 &&
             pthread_cond_init(&g->news, &attr) == 0;
        pthread_condattr_destroy(&attr);
    }
    if (!ok) {
        pthread_mutex_destroy(&g->lock);
    }
    return ok;
}

/* A group with `size` ends to close, entered in the house; NULL: no memory. */
static group *group_new(house *h, int32_t size)
{
    group *g = mem_calloc(1, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    if (!group_init_locks(g)) {
        mem_free(g);
        return NULL;
    }
    g->size = size;
    g->spin = size <= pool_cores() ? SPIN : 0;
    atomic_init(&g->ends, size);
    bool ok = (g->desks = mem_calloc((size_t)size, sizeof *g->desks)) != NULL;
    for (int32_t r = 0; ok && r < size; r++) {
        for (int i = 0; ok && i < 2; i++) {
            side *s = &g->desks[r].side[i];
            s->at = mem_calloc((size_t)size, sizeof *s->at);
            s->bytes = mem_calloc((size_t)size, sizeof *s->bytes);
            ok = s->at != NULL && s->bytes != NULL;
        }
    }
    if (!ok) {
        group_free(g);
        return NULL;
    }
    pthread_mutex_lock(&h->lock);
    g->next = h->first;
    if (h->first != NULL) {
        h->first->prev = g;
    }
    h->first = g;
    pthread_mutex_unlock(&h->lock);
    return g;
}

/* Takes the group out of the house and frees it. */
static void group_remove(house *h, group *g)
{
    pthread_mutex_lock(&h->lock);
    if (g->prev != NULL) {
        g->prev->next = g->next;
    } else {
        h->first = g->next;
    }
    if (g->next != NULL) {
        g->next->prev = g->prev;
    }
    pthread_mutex_unlock(&h->lock);
    group_free(g);
}

static void group_wake(group *g)
{
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->news);
    pthread_mutex_unlock(&g->lock);
}

static void thread_tell(comm *c)
{
    house *h = c->family->impl;
    pthread_mutex_lock(&h->lock);
    for (group *g = h->first; g != NULL; g = g->next) {
        group_wake(g);
    }
    pthread_mutex_unlock(&h->lock);
}

static void thread_family_free(comm_family *f)
{
    house *h = f->impl;
    if (h == NULL) {
        return;
    }
    while (h->first != NULL) {
        group_remove(h, h->first);
    }
    pthread_mutex_destroy(&h->lock);
    mem_free(h);
}

/* ---- exchange -------------------------------------------------------------------------------- */

/* Room for n bytes on this side of the desk and, at its next use, on the other. Peers may still
 * read the other side's block (T1), so that one is only put ready. */
static bool desk_reserve(desk *d, int i, size_t n)
{
    side *s = &d->side[i];
    side *other = &d->side[1 - i];
    if (s->fresh != NULL) {
        mem_free(s->data);
        s->data = s->fresh;
        s->cap = s->fresh_cap;
        s->fresh = NULL;
    }
    if (n <= s->cap) {
        return true;
    }
    unsigned char *a = mem_alloc(n, 0);
    unsigned char *b = mem_alloc(n, 0);
    if (a == NULL || b == NULL) {
        mem_free(a);
        mem_free(b);
        return false;
    }
    mem_free(s->data);
    s->data = a;
    s->cap = n;
    mem_free(other->fresh);
    other->fresh = b;
    other->fresh_cap = n;
    return true;
}

/* Lays out what goes to each peer; segments that repeat the one before share its bytes. */
static size_t lay_out(const comm *c, side *s)
{
    size_t at = 0;
    int32_t last = -1;
    for (int32_t p = 0; p < c->size; p++) {
        if (p == c->rank) {
            continue;
        }
        s->bytes[p] = c->out[p].bytes;
        if (last >= 0 && c->out[p].p == c->out[last].p && c->out[p].bytes == c->out[last].bytes) {
            s->at[p] = s->at[last];
        } else {
            s->at[p] = at;
            at += comm_align_up(c->out[p].bytes);
        }
        last = p;
    }
    return at;
}

static kvs_status put_on_desk(comm *c, side *s, desk *d, int i, kvs_error *err)
{
    const size_t need = lay_out(c, s);
    if (!desk_reserve(d, i, need)) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of staging on rank %d", need,
                       c->rank);
    }
    size_t done = 0;
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && s->bytes[p] > 0 && s->at[p] >= done) {
            memcpy(s->data + s->at[p], c->out[p].p, s->bytes[p]);
            done = s->at[p] + s->bytes[p];
        }
    }
    return KVS_OK;
}

/* A peer that closed before it came to exchange e, or -1. */
static int32_t closed_before(const comm *c, group *g, uint64_t e)
{
    if (atomic_load_explicit(&g->n_closed, memory_order_acquire) == 0) {
        return -1;
    }
    for (int32_t r = 0; r < c->size; r++) {
        if (atomic_load_explicit(&g->desks[r].closed, memory_order_acquire) &&
            atomic_load_explicit(&g->desks[r].epoch, memory_order_acquire) < e) {
            return r;
        }
    }
    return -1;
}

static bool all_arrived(const group *g, uint64_t e)
{
    return atomic_load_explicit(&g->arrived, memory_order_acquire) >= (uint64_t)g->size * e;
}

typedef enum outcome { ARRIVED, ENDED, LATE, CLOSED } outcome;

/* Waits until all have arrived at e, the family failed, a peer closed or the time is over. */
static outcome wait_all(const comm *c, group *g, uint64_t e, int32_t *who)
{
    for (int i = 0; i < g->spin; i++) {
        if (all_arrived(g, e)) {
            return ARRIVED;
        }
        spin_pause();
    }
    const int64_t until = clock_ns() + (int64_t)c->cfg.timeout_ms * INT64_C(1000000);
    const struct timespec deadline = {.tv_sec = until / INT64_C(1000000000),
                                      .tv_nsec = until % INT64_C(1000000000)};
    bool time_over = false;
    outcome o = LATE;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        if (all_arrived(g, e)) {
            o = ARRIVED;
            break;
        }
        if (comm_failed(c)) {
            o = ENDED;
            break;
        }
        if ((*who = closed_before(c, g, e)) >= 0) {
            o = CLOSED;
            break;
        }
        if (time_over) {
            break;
        }
        time_over = pthread_cond_timedwait(&g->news, &g->lock, &deadline) == ETIMEDOUT;
    }
    pthread_mutex_unlock(&g->lock);
    return o;
}

static void arrive(group *g, desk *d, uint64_t e)
{
    atomic_store_explicit(&d->epoch, e, memory_order_release);
    const uint64_t n = atomic_fetch_add_explicit(&g->arrived, 1, memory_order_acq_rel) + 1;
    if (n == (uint64_t)g->size * e) {
        group_wake(g);
    }
}

static kvs_status late(comm *c, const comm_head *head, group *g, uint64_t e)
{
    end *me = c->impl;
    bool any = false;
    for (int32_t r = 0; r < c->size; r++) {
        me->late[r] = atomic_load_explicit(&g->desks[r].epoch, memory_order_acquire) < e;
        any = any || me->late[r];
    }
    if (any) {
        return comm_fail_late(c, head, me->late);
    }
    /* The last one came while this rank was giving up and is about to count itself. */
    while (!all_arrived(g, e)) {
        sched_yield();
    }
    return KVS_OK;
}

static kvs_status take_from_desks(comm *c, const comm_head *head, group *g, int i)
{
    for (int32_t p = 0; p < c->size; p++) {
        if (p == c->rank) {
            continue;
        }
        const side *s = &g->desks[p].side[i];
        comm_in *in = &c->in[p];
        if (s->bytes[c->rank] != in->bytes) {
            return comm_fail_size(c, head, p, s->bytes[c->rank], in->bytes);
        }
        if (in->bytes == 0) {
            continue;
        }
        if (in->p == NULL) {
            in->p = s->data + s->at[c->rank];
        } else {
            memcpy(in->p, s->data + s->at[c->rank], in->bytes);
        }
    }
    return KVS_OK;
}

static kvs_status thread_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    end *me = c->impl;
    group *g = me->g;
    desk *d = &g->desks[c->rank];
    const uint64_t e = me->epoch + 1;
    const int i = (int)(e & 1);
    if (comm_failed(c)) {
        return KVS_PEER;
    }
    d->side[i].head = *head;
    TRY(put_on_desk(c, &d->side[i], d, i, err));
    me->epoch = e;
    arrive(g, d, e);

    int32_t who = -1;
    switch (wait_all(c, g, e, &who)) {
    case ARRIVED:
        break;
    case ENDED:
        return KVS_PEER;
    case CLOSED:
        return comm_fail_closed(c, head, who);
    case LATE:
        TRY(late(c, head, g, e));
        break;
    }
    if (first && !c->cfg.no_check) {
        const comm_head *zero = &g->desks[0].side[i].head;
        for (int32_t r = 1; r < c->size; r++) {
            const comm_head *h = &g->desks[r].side[i].head;
            if (!comm_head_equal(zero, h)) {
                return comm_fail_mismatch(c, 0, zero, r, h);
            }
        }
    }
    return take_from_desks(c, head, g, i);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static end *end_new(int32_t size)
{
    end *e = mem_calloc(1, sizeof *e);
    if (e == NULL) {
        return NULL;
    }
    e->late = mem_calloc((size_t)size, sizeof *e->late);
    if (e->late == NULL) {
        mem_free(e);
        return NULL;
    }
    return e;
}

static void end_free(end *e)
{
    if (e != NULL) {
        mem_free(e->late);
        mem_free(e);
    }
}

static void thread_close(comm *c)
{
    end *me = c->impl;
    if (me->g != NULL) {
        group *g = me->g;
        atomic_store_explicit(&g->desks[c->rank].closed, true, memory_order_release);
        atomic_fetch_add_explicit(&g->n_closed, 1, memory_order_acq_rel);
        group_wake(g);
        if (atomic_fetch_sub(&g->ends, 1) == 1) {
            group_remove(c->family->impl, g);
        }
    }
    end_free(me);
    c->impl = NULL;
}

static uint64_t thread_offer(comm *c)
{
    (void)c;
    return 0;
}

/* The leader makes the group; its address is the token. */
static kvs_status thread_prepare(comm *c, comm *child, const comm_plan *plan, uint64_t *token,
                                 kvs_error *err)
{
    end *e = end_new(plan->size);
    group *g = NULL;
    if (e != NULL && plan->rank == 0) {
        g = group_new(c->family->impl, plan->size);
    }
    if (e == NULL || (plan->rank == 0 && g == NULL)) {
        end_free(e);
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", plan->size);
    }
    child->impl = e;
    *token = (uint64_t)(uintptr_t)g;
    return KVS_OK;
}

static void thread_commit(comm *child, uint64_t token)
{
    end *e = child->impl;
    e->g = (group *)(uintptr_t)token;
}

static void thread_cancel(comm *child, uint64_t token, bool ended)
{
    if (token != 0 && !ended) {
        group_remove(child->family->impl, (group *)(uintptr_t)token);
    }
    end_free(child->impl);
    child->impl = NULL;
}

static const transport g_thread = {
    .name = "threads",
    .exchange = thread_exchange,
    .tell = thread_tell,
    .split_offer = thread_offer,
    .split_prepare = thread_prepare,
    .split_commit = thread_commit,
    .split_cancel = thread_cancel,
    .close = thread_close,
    .family_free = thread_family_free,
};

static house *house_new(void)
{
    house *h = mem_calloc(1, sizeof *h);
    if (h != NULL && pthread_mutex_init(&h->lock, NULL) != 0) {
        mem_free(h);
        return NULL;
    }
    return h;
}

/* Fills out[] in one family; on failure some are set. */
static bool open_all(comm **out, int32_t n, const comm_config *cfg)
{
    for (int32_t r = 0; r < n; r++) {
        out[r] = comm_new(&g_thread, r > 0 ? out[0]->family : NULL, r, n, cfg);
        if (out[r] == NULL) {
            return false;
        }
        if (r == 0 && (out[0]->family->impl = house_new()) == NULL) {
            return false;
        }
        if ((out[r]->impl = end_new(n)) == NULL) {
            return false;
        }
    }
    group *g = group_new(out[0]->family->impl, n);
    for (int32_t r = 0; r < n && g != NULL; r++) {
        ((end *)out[r]->impl)->g = g;
    }
    return g != NULL;
}

kvs_status comm_thread_open(comm **out, int32_t n, const comm_config *cfg, kvs_error *err)
{
    if (n < 1 || n > COMM_MAX_THREADS) {
        return err_set(err, KVS_INVALID, "%d thread ranks: use 1 to %d", n, COMM_MAX_THREADS);
    }
    memset(out, 0, (size_t)n * sizeof *out);
    if (open_all(out, n, cfg)) {
        return KVS_OK;
    }
    for (int32_t r = 0; r < n && out[r] != NULL; r++) {
        end_free(out[r]->impl);
        comm_discard(out[r]);
    }
    memset(out, 0, (size_t)n * sizeof *out);
    return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", n);
}
