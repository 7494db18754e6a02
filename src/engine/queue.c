/* engine/queue.c - a list, a ring and a lock. */
#include "engine/queue.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"

kvs_status queue_init(queue *q, int32_t n_event, kvs_error *err)
{
    *q = (queue){.next_id = 1, .cap = n_event};
    q->ring = mem_alloc_array((size_t)n_event, sizeof *q->ring, 0);
    if (q->ring == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for %d events", n_event);
    }
    pthread_mutex_init(&q->lock, NULL);
    return KVS_OK;
}

void queue_fini(queue *q)
{
    if (q->ring == NULL) {
        return;
    }
    for (seq *s = q->first; s != NULL;) {
        seq *next = s->next;
        seq_free(s);
        s = next;
    }
    mem_free(q->ring);
    pthread_mutex_destroy(&q->lock);
    *q = (queue){0};
}

kvs_status queue_submit(queue *q, seq *s, uint64_t *id, kvs_error *err)
{
    pthread_mutex_lock(&q->lock);
    const bool full = q->n_waiting == KVS_MAX_WAITING;
    if (!full) {
        s->id = q->next_id++;
        s->next = NULL;
        if (q->last != NULL) {
            q->last->next = s;
        } else {
            q->first = s;
        }
        q->last = s;
        q->n_waiting++;
        *id = s->id;
    }
    pthread_mutex_unlock(&q->lock);
    return full ? err_set(err, KVS_BUSY, "%d requests wait already: try again later",
                          KVS_MAX_WAITING)
                : KVS_OK;
}

void queue_cancel(queue *q, seq *const *running, int32_t n, uint64_t id)
{
    pthread_mutex_lock(&q->lock);
    for (seq *s = q->first; s != NULL; s = s->next) {
        s->cancelled = s->cancelled || s->id == id;
    }
    for (int32_t i = 0; i < n; i++) {
        if (running[i] != NULL && running[i]->id == id) {
            running[i]->cancelled = true;
        }
    }
    pthread_mutex_unlock(&q->lock);
}

/* Takes the first one of which `cancelled` is as asked, or any. */
static seq *take(queue *q, bool any)
{
    pthread_mutex_lock(&q->lock);
    seq *before = NULL;
    seq *s = q->first;
    while (s != NULL && !any && !s->cancelled) {
        before = s;
        s = s->next;
    }
    if (s != NULL) {
        if (before != NULL) {
            before->next = s->next;
        } else {
            q->first = s->next;
        }
        q->last = q->last == s ? before : q->last;
        q->n_waiting--;
        s->next = NULL;
    }
    pthread_mutex_unlock(&q->lock);
    return s;
}

seq *queue_take(queue *q)
{
    return take(q, true);
}

seq *queue_take_cancelled(queue *q)
{
    return take(q, false);
}

bool queue_has_room(queue *q, int32_t n)
{
    pthread_mutex_lock(&q->lock);
    const bool room = q->cap - q->n >= n;
    pthread_mutex_unlock(&q->lock);
    return room;
}

void queue_push(queue *q, const kvs_event *e)
{
    pthread_mutex_lock(&q->lock);
    q->ring[(q->head + q->n) % q->cap] = *e;
    q->n++;
    pthread_mutex_unlock(&q->lock);
}

int32_t queue_poll(queue *q, kvs_event *events, int32_t cap)
{
    pthread_mutex_lock(&q->lock);
    int32_t n = 0;
    while (n < cap && q->n > 0) {
        events[n++] = q->ring[q->head];
        q->head = (q->head + 1) % q->cap;
        q->n--;
    }
    pthread_mutex_unlock(&q->lock);
    return n;
}
