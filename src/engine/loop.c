/* engine/loop.c - requests admitted, prompts read, requests ended. */
#include "engine/loop.h"

#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"

int32_t loop_max_events(int32_t max_seqs)
{
    return max_seqs * (RANK_PEND_ROWS + 3) + KVS_MAX_WAITING;
}

/* ---- pages ----------------------------------------------------------------------------------- */

kvs_status loop_extend(loop *l, seq *s, int64_t new_len, kvs_error *err)
{
    kvs_status st = KVS_OK;
    do {
        st = pages_extend(l->pages, l->dcp, s->table, s->width, &s->n_entry, new_len, err);
    } while (st == KVS_LIMIT && keep_evict(l));
    TRY(st);
    const int64_t used = l->n_page - pages_available(l->pages);
    l->n.page_peak = used > l->n.page_peak ? used : l->n.page_peak;
    return KVS_OK;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void set_running(loop *l, int32_t slot, seq *s)
{
    pthread_mutex_lock(&l->q->lock);
    l->run[slot] = s;
    pthread_mutex_unlock(&l->q->lock);
}

static void release(loop *l, seq *s)
{
    if (s->state != SEQ_WAITING) {
        set_running(l, s->slot, NULL);
        pages_truncate(l->pages, s->table, &s->n_entry, 0, NULL);
    }
    seq_free(s);
}

void loop_finish(loop *l, seq *s, kvs_finish why)
{
    const kvs_event e = {.kind = KVS_EVENT_FINISH, .request = s->id, .reason = why};
    queue_push(l->q, &e);
    if (s->state != SEQ_WAITING) {
        set_running(l, s->slot, NULL);
    }
    if (!keep_take(l, s)) {
        release(l, s);
    }
}

void loop_fail(loop *l, seq *s, const kvs_error *why)
{
    const kvs_event e = {.kind = KVS_EVENT_ERROR, .request = s->id, .error = *why};
    queue_push(l->q, &e);
    release(l, s);
}

void loop_drop(loop *l)
{
    for (int32_t i = 0; i < l->max_seqs; i++) {
        if (l->run[i] != NULL) {
            release(l, l->run[i]);
        }
    }
    keep_drop(l);
}

/* ---- admission ------------------------------------------------------------------------------- */

static void end_cancelled(loop *l)
{
    for (seq *s = NULL; (s = queue_take_cancelled(l->q)) != NULL;) {
        loop_finish(l, s, KVS_FINISH_INTERRUPTED);
    }
    for (int32_t i = 0; i < l->max_seqs; i++) {
        pthread_mutex_lock(&l->q->lock);
        const bool cancelled = l->run[i] != NULL && l->run[i]->cancelled;
        pthread_mutex_unlock(&l->q->lock);
        if (cancelled) {
            loop_finish(l, l->run[i], KVS_FINISH_INTERRUPTED);
        }
    }
}

static void push_progress(loop *l, const seq *s)
{
    const kvs_event e = {.kind = KVS_EVENT_PREFILL,
                         .request = s->id,
                         .done = s->n_fed,
                         .total = s->n_prompt,
                         .reused = s->n_reused};
    queue_push(l->q, &e);
}

static int32_t n_running(const loop *l)
{
    int32_t n = 0;
    for (int32_t i = 0; i < l->max_seqs; i++) {
        n += l->run[i] != NULL;
    }
    return n;
}

static void admit(loop *l)
{
    for (int32_t n = n_running(l); n < l->max_seqs; n++) {
        seq *s = queue_take(l->q);
        if (s == NULL) {
            return;
        }
        s->slot = keep_place(l, s);
        s->state = SEQ_PREFILL;
        set_running(l, s->slot, s);
        push_progress(l, s);
    }
}

/* ---- prompts --------------------------------------------------------------------------------- */

bool loop_drafts(const loop *l, const seq *s)
{
    return l->mtp > 0 && s->limit - s->n_prompt > 2;
}

void loop_add(rank_work *w, const seq *s, loop_rows rows, int32_t q_len, int64_t seq_len, int32_t from)
{
    const int32_t i = w->c.n_req++;
    w->q_len[i] = q_len;
    w->n_prompt[i] = rows == LOOP_PROMPT ? q_len : 0;
    w->seq_len[i] = seq_len;
    w->slot[i] = s->slot;
    w->from[i] = from;
    int32_t *table = w->table + i * w->c.stride;
    for (int64_t b = 0; b < w->c.stride; b++) {
        table[b] = b < s->n_entry ? s->table[b] : -1;
    }
    w->c.n_row += q_len;
}

static kvs_status feed_chunk(loop *l, seq *s, int32_t rows, bool last, kvs_error *err)
{
    rank_work *w = rank_begin(l->r, RANK_STEP, s->n_entry);
    memcpy(w->token, s->token + s->n_fed, (size_t)rows * sizeof *w->token);
    loop_add(w, s, LOOP_PROMPT, rows, s->n_fed + rows, rows - 1);
    if (last) {
        w->logit_row[w->c.n_logit++] = rows - 1;
    }
    TRY(rank_send(l->r, err));
    const int32_t pairs = last ? rows - 1 : rows;
    if (loop_drafts(l, s) && pairs > 0) {
        TRY(spec_prefill(l, s, pairs, err));
    }
    s->n_fed += rows;
    l->n.n_prefill += (uint64_t)rows;
    return KVS_OK;
}

static kvs_status prefill(loop *l, seq *s, kvs_error *err)
{
    if (s->n_fed == s->n_reused) {
        keep_share(l, s);
        l->n.n_reused += (uint64_t)s->n_reused;
    }
    const int64_t left = s->n_prompt - s->n_fed;
    const int32_t rows = left < l->chunk ? (int32_t)left : l->chunk;
    const bool last = rows == left;
    kvs_error why;
    if (loop_extend(l, s, s->n_fed + rows, &why) < 0) {
        loop_fail(l, s, &why);
        return KVS_OK;
    }
    TRY(feed_chunk(l, s, rows, last, err));
    push_progress(l, s);
    if (!last) {
        return KVS_OK;
    }
    s->state = SEQ_DECODE;
    loop_emit e;
    loop_draw(l, s, 0, rows - 1, &e);
    if (e.failed) {
        loop_fail(l, s, &e.error);
    } else if (e.ended) {
        loop_finish(l, s, e.why);
    }
    return KVS_OK;
}

/* ---- an iteration ---------------------------------------------------------------------------- */

static seq *oldest_prompt(const loop *l)
{
    seq *best = NULL;
    for (int32_t i = 0; i < l->max_seqs; i++) {
        seq *s = l->run[i];
        if (s != NULL && s->state == SEQ_PREFILL && (best == NULL || s->id < best->id)) {
            best = s;
        }
    }
    return best;
}

static kvs_status iterate(loop *l, kvs_error *err)
{
    seq *list[KVS_MAX_SEQS];
    int32_t n = 0;
    for (int32_t i = 0; i < l->max_seqs; i++) {
        if (l->run[i] != NULL && l->run[i]->state == SEQ_DECODE) {
            list[n++] = l->run[i];
        }
    }
    seq *prompt = oldest_prompt(l);
    if (prompt == NULL && n == 0) {
        return KVS_IDLE;
    }
    const int64_t t0 = clock_ns();
    l->decoded_last = prompt == NULL || (n > 0 && !l->decoded_last);
    kvs_status st = KVS_OK;
    if (l->decoded_last) {
        st = loop_decode(l, list, n, err);
        l->n.decode_ns += clock_ns() - t0;
    } else {
        st = prefill(l, prompt, err);
        l->n.prefill_ns += clock_ns() - t0;
    }
    return st;
}

kvs_status loop_step(loop *l, kvs_error *err)
{
    if (l->dead < 0) {
        if (err != NULL) {
            *err = l->death;
        }
        return l->dead;
    }
    if (!queue_has_room(l->q, loop_max_events(l->max_seqs))) {
        return err_set(err, KVS_BUSY, "events of former steps wait: poll them first");
    }
    end_cancelled(l);
    admit(l);
    kvs_error why = {0};
    const kvs_status st = iterate(l, &why);
    if (st < 0) {
        l->dead = st;
        l->death = why;
        for (int32_t i = 0; i < l->max_seqs; i++) {
            if (l->run[i] != NULL) {
                loop_fail(l, l->run[i], &why);
            }
        }
        if (err != NULL) {
            *err = why;
        }
    }
    return st;
}
