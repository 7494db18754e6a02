/* engine/stop.c - finds the first stop text in a stream of pieces.
 *
 * Invariant: held[0 .. n_held) is the text not shown yet; between calls it is the longest end of the
 * stream that begins a stop text. Bytes are taken one at a time and after each one every stop text
 * is compared with the end of what is held, so the first to complete is found wherever the pieces'
 * borders lie. */
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "kvspan/engine.h"

struct kvs_stop {
    int32_t n;
    bool done;
    char *text[KVS_MAX_STOP_TEXTS];
    size_t len[KVS_MAX_STOP_TEXTS];
    char *held;
    size_t n_held, cap, shown; /* held[0 .. shown) was handed out by the last call */
};

kvs_status kvs_stop_new(kvs_stop **out, const char *const *texts, int32_t n, kvs_error *err)
{
    if (out == NULL || (texts == NULL && n > 0)) {
        return err_set(err, KVS_INVALID, "stop texts: out and texts must be given");
    }
    *out = NULL;
    if (n < 0 || n > KVS_MAX_STOP_TEXTS) {
        return err_set(err, KVS_INVALID, "%d stop texts: give 0 to %d", n, KVS_MAX_STOP_TEXTS);
    }
    kvs_stop *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for stop texts");
    }
    kvs_status st = KVS_OK;
    for (int32_t i = 0; i < n && st == KVS_OK; i++) {
        const size_t len = texts[i] != NULL ? strlen(texts[i]) : 0;
        if (len == 0 || len > KVS_MAX_STOP_BYTES) {
            st = err_set(err, KVS_INVALID, "stop text %d has %zu bytes: use 1 to %d", i, len,
                         KVS_MAX_STOP_BYTES);
            break;
        }
        s->text[i] = mem_alloc(len + 1, 0);
        if (s->text[i] == NULL) {
            st = err_set(err, KVS_NOMEM, "no memory for stop texts");
            break;
        }
        memcpy(s->text[i], texts[i], len + 1);
        s->len[i] = len;
        s->n++;
    }
    if (st < 0) {
        kvs_stop_free(s);
        return st;
    }
    *out = s;
    return KVS_OK;
}

void kvs_stop_free(kvs_stop *s)
{
    if (s == NULL) {
        return;
    }
    for (int32_t i = 0; i < s->n; i++) {
        mem_free(s->text[i]);
    }
    mem_free(s->held);
    mem_free(s);
}

/* The length of the longest stop text that held[0 .. n) ends in; 0: none. */
static size_t match_at(const kvs_stop *s, size_t n)
{
    size_t best = 0;
    for (int32_t i = 0; i < s->n; i++) {
        const size_t len = s->len[i];
        if (len > best && len <= n && memcmp(s->held + n - len, s->text[i], len) == 0) {
            best = len;
        }
    }
    return best;
}

/* How many bytes at the end of what is held begin a stop text without being all of it. */
static size_t undecided(const kvs_stop *s)
{
    size_t best = 0;
    for (int32_t i = 0; i < s->n; i++) {
        size_t k = s->len[i] - 1 < s->n_held ? s->len[i] - 1 : s->n_held;
        for (; k > best; k--) {
            if (memcmp(s->held + s->n_held - k, s->text[i], k) == 0) {
                best = k;
            }
        }
    }
    return best;
}

static void drop_shown(kvs_stop *s)
{
    if (s->shown > 0) {
        memmove(s->held, s->held + s->shown, s->n_held - s->shown);
        s->n_held -= s->shown;
        s->shown = 0;
    }
}

int kvs_stop_feed(kvs_stop *s, const char *bytes, size_t n, const char **show, size_t *n_show)
{
    drop_shown(s);
    *show = "";
    *n_show = 0;
    if (s->done) {
        return 1;
    }
    if (s->n == 0) { /* nothing is ever held back */
        *show = bytes;
        *n_show = n;
        return 0;
    }
    if (s->n_held + n > s->cap) {
        const size_t cap = 2 * (s->n_held + n) + 64;
        char *held = mem_realloc(s->held, cap);
        if (held == NULL) {
            return KVS_NOMEM;
        }
        s->held = held;
        s->cap = cap;
    }
    for (size_t i = 0; i < n; i++) {
        s->held[s->n_held++] = bytes[i];
        const size_t len = match_at(s, s->n_held);
        if (len > 0) {
            s->done = true;
            s->shown = s->n_held - len;
            s->n_held = s->shown;
            *show = s->held;
            *n_show = s->shown;
            return 1;
        }
    }
    s->shown = s->n_held - undecided(s);
    *show = s->held != NULL ? s->held : "";
    *n_show = s->shown;
    return 0;
}

void kvs_stop_flush(kvs_stop *s, const char **show, size_t *n_show)
{
    drop_shown(s);
    *show = s->held != NULL ? s->held : "";
    *n_show = s->n_held;
    s->shown = s->n_held;
}
