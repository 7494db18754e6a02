/* text/detok.c - bytes of pieces become whole characters. */
#include "text/detok.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"

kvs_status detok_new(kvs_detok **out, const kvs_tokenizer *t, bool skip_special, kvs_error *err)
{
    kvs_detok *d = mem_alloc(sizeof *d + t->v.max_len + UTF8_MAX_LEN, 0);
    *out = d;
    if (d == NULL) {
        return err_set(err, KVS_NOMEM, "detok: no memory");
    }
    d->t = t;
    d->skip_special = skip_special;
    d->n_held = 0;
    return KVS_OK;
}

void detok_free(kvs_detok *d)
{
    mem_free(d);
}

size_t detok_bound(const kvs_tokenizer *t)
{
    return UTF8_REPLACEMENT_LEN * (t->v.max_len + UTF8_MAX_LEN);
}

/* Writes what is certain of s[0..n) to out, or counts it where out is NULL; *rest is how many bytes
 * at the end are not. */
static size_t settle(const char *s, size_t n, char *out, size_t *rest)
{
    size_t k = 0;
    *rest = 0;
    for (size_t i = 0; i < n;) {
        size_t len = 0;
        const utf8_kind kind = utf8_next(s + i, n - i, &len);
        if (kind == UTF8_PART) {
            *rest = n - i;
            break;
        }
        const bool good = kind == UTF8_CHAR;
        const size_t n_add = good ? len : UTF8_REPLACEMENT_LEN;
        if (out != NULL) {
            memcpy(out + k, good ? s + i : UTF8_REPLACEMENT, n_add);
        }
        k += n_add;
        i += len;
    }
    return k;
}

/* The bytes that an id adds: none for a hole, an id past the vocabulary, or a skipped special. */
static size_t piece_of(const kvs_detok *d, int32_t id, const char **bytes)
{
    const vocab *v = &d->t->v;
    if (!vocab_has(v, id) || (d->skip_special && (v->flags[id] & VOCAB_SPECIAL) != 0)) {
        *bytes = NULL;
        return 0;
    }
    *bytes = v->bytes + v->at[id];
    return v->len[id];
}

static kvs_status too_small(size_t cap, size_t need, kvs_error *err)
{
    return err_set(err, KVS_LIMIT, "detok: room for %zu bytes, %zu are needed", cap, need);
}

kvs_status detok_push(kvs_detok *d, int32_t id, char *out, size_t cap, size_t *n, kvs_error *err)
{
    const char *bytes = NULL;
    const size_t len = piece_of(d, id, &bytes);
    *n = 0;
    if (len == 0) {
        return KVS_OK;
    }
    memcpy(d->held + d->n_held, bytes, len);
    const size_t n_all = d->n_held + len;
    size_t rest = 0;
    *n = settle(d->held, n_all, NULL, &rest);
    if (*n > cap) {
        return too_small(cap, *n, err); /* n_held is as it was */
    }
    (void)settle(d->held, n_all, out, &rest);
    memmove(d->held, d->held + n_all - rest, rest);
    d->n_held = rest;
    return KVS_OK;
}

kvs_status detok_flush(kvs_detok *d, char *out, size_t cap, size_t *n, kvs_error *err)
{
    *n = d->n_held > 0 ? UTF8_REPLACEMENT_LEN : 0;
    if (*n > cap) {
        return too_small(cap, *n, err);
    }
    if (*n > 0) {
        memcpy(out, UTF8_REPLACEMENT, *n);
    }
    d->n_held = 0;
    return KVS_OK;
}
