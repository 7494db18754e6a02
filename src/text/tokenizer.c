/* text/tokenizer.c - from text to ids. */
#include "text/tokenizer.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/utf8.h"

void tok_free(kvs_tokenizer *t)
{
    if (t != NULL) {
        vocab_fini(&t->v);
        added_fini(&t->raw);
        added_fini(&t->normal);
        pretok_fini(&t->pre);
        mem_free(t);
    }
}

int32_t tok_find(const kvs_tokenizer *t, const char *text, size_t n)
{
    const added_token *a = added_find(&t->raw, text, n);
    a = a != NULL ? a : added_find(&t->normal, text, n);
    return a != NULL ? a->id : vocab_find(&t->v, text, n);
}

typedef struct encode {
    const kvs_tokenizer *t;
    uint32_t flags;
    regex_run *regex;
    bpe_run bpe;
    id_sink *out;
} encode;

static kvs_status add_pretoken(void *ctx, const char *s, size_t n, kvs_error *err)
{
    encode *e = ctx;
    return bpe_encode(&e->bpe, s, n, e->out, err);
}

/* Text in which the tokens of sets[0..n_set) are still to be found. */
static kvs_status add_text(encode *e, const added_set *const *sets, int n_set, const char *s,
                           size_t n, kvs_error *err)
{
    if (n == 0) {
        return KVS_OK;
    }
    if (n_set == 0) {
        return pretok_run(&e->t->pre, e->regex, s, n, add_pretoken, e, err);
    }
    const bool special = (e->flags & KVS_ENCODE_SPECIAL) != 0;
    added_match m = {0, 0, 0, NULL};
    size_t done = 0;
    while (added_next(sets[0], e->regex, s, n, special, done, &m)) {
        TRY(add_text(e, sets + 1, n_set - 1, s + done, m.begin - done, err));
        sink_add(e->out, m.tok->id);
        done = m.end;
    }
    return add_text(e, sets + 1, n_set - 1, s + done, n - done, err);
}

static kvs_status encode_valid(const kvs_tokenizer *t, const char *text, size_t n, uint32_t flags,
                               id_sink *out, kvs_error *err)
{
    encode e = {.t = t, .flags = flags, .out = out};
    TRY(regex_run_new(&e.regex, n, err));
    kvs_status st = bpe_run_init(&e.bpe, &t->v, t->ignore_merges, n, err);
    if (st == KVS_OK) {
        const added_set *const sets[2] = {&t->raw, &t->normal};
        const int n_set = (flags & KVS_ENCODE_NO_ADDED) != 0 ? 0 : 2;
        st = add_text(&e, sets, n_set, text, n, err);
        bpe_run_fini(&e.bpe);
    }
    regex_run_free(e.regex);
    return st;
}

static void add_ids(id_sink *out, const int32_t *ids, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        sink_add(out, ids[i]);
    }
}

kvs_status tok_encode(const kvs_tokenizer *t, const char *text, size_t n, uint32_t flags,
                      id_sink *out, kvs_error *err)
{
    if (n > TOK_TEXT_MAX / 3) {
        return err_set(err, KVS_LIMIT, "a text of %zu bytes: at most %d", n, TOK_TEXT_MAX / 3);
    }
    if ((flags & KVS_ENCODE_TEMPLATE) != 0) {
        add_ids(out, t->before, t->n_before);
    }
    if (n > 0 && utf8_valid(text, n)) {
        TRY(encode_valid(t, text, n, flags, out, err));
    } else if (n > 0) {
        textbuf b;
        buf_init(&b);
        utf8_repair(&b, text, n);
        const kvs_status st = b.failed
                                  ? err_set(err, KVS_NOMEM, "no memory for %zu bytes of text", n)
                                  : encode_valid(t, b.data, b.n, flags, out, err);
        buf_fini(&b);
        TRY(st);
    }
    if ((flags & KVS_ENCODE_TEMPLATE) != 0) {
        add_ids(out, t->after, t->n_after);
    }
    return KVS_OK;
}
