/* engine/queue.h - what crosses between the host's threads and the step thread: requests in, events out.
 *
 * One lock guards both. Requests wait in order of submission; the step thread takes them when a place is free.
 * Events lie in a ring of fixed size; the step thread asks for room before a step, so that a step never has to
 * drop or to wait.
 */
#ifndef ENGINE_QUEUE_H
#define ENGINE_QUEUE_H

#include <pthread.h>

#include "engine/seq.h"

typedef struct queue {
    pthread_mutex_t lock;
    seq *first, *last; /* waiting */
    int32_t n_waiting;
    uint64_t next_id;
    kvs_event *ring; /* [cap] */
    int32_t cap, head, n;
} queue;

kvs_status queue_init(queue *q, int32_t n_event, kvs_error *err);
void queue_fini(queue *q);

/* Takes the sequence and gives it its number. KVS_BUSY leaves it with the caller. Threads: any. */
kvs_status queue_submit(queue *q, seq *s, uint64_t *id, kvs_error *err);
/* Marks a request that waits or is one of running[0 .. n), whose entries may be NULL. Threads: any. */
void queue_cancel(queue *q, seq *const *running, int32_t n, uint64_t id);
/* The first that waits, or NULL. Step thread. */
seq *queue_take(queue *q);
/* The first cancelled one that waits, or NULL. Step thread. */
seq *queue_take_cancelled(queue *q);

/* Whether n more events fit. */
bool queue_has_room(queue *q, int32_t n);
/* Copies *e behind the others; there is room. */
void queue_push(queue *q, const kvs_event *e);
int32_t queue_poll(queue *q, kvs_event *events, int32_t cap);

#endif
