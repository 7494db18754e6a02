/* text/pretok.c - the steps, one inside the other, so that no list of pieces is kept. */
#include "text/pretok.h"

#include <string.h>

#include "base/err.h"

void pretok_fini(pretok *p)
{
    for (int i = 0; i < p->n_step; i++) {
        regex_free(p->step[i]);
    }
    memset(p, 0, sizeof *p);
}

kvs_status pretok_add(pretok *p, const char *name, const char *src, size_t n, kvs_error *err)
{
    if (p->n_step == PRETOK_STEPS_MAX) {
        return err_set(err, KVS_LIMIT, "%s: more than %d steps", name, PRETOK_STEPS_MAX);
    }
    TRY(regex_new(&p->step[p->n_step], name, src, n, err));
    p->n_step++;
    return KVS_OK;
}

kvs_status pretok_add_text(pretok *p, const char *name, const char *text, size_t n, kvs_error *err)
{
    textbuf b;
    buf_init(&b);
    for (size_t i = 0; i < n; i++) {
        if (strchr("\\^$.[]|()?*+{}", text[i]) != NULL) {
            buf_char(&b, '\\');
        }
        buf_char(&b, text[i]);
    }
    const kvs_status st = b.failed ? err_set(err, KVS_NOMEM, "%s: no memory", name)
                                   : pretok_add(p, name, buf_str(&b), b.n, err);
    buf_fini(&b);
    return st;
}

typedef struct cut {
    const pretok *p;
    regex_run *run;
    pretok_fn fn;
    void *ctx;
    kvs_error *err;
} cut;

static size_t char_len(const char *s, size_t n)
{
    size_t len = 1;
    while (len < n && ((unsigned char)s[len] & 0xC0) == 0x80) {
        len++;
    }
    return len;
}

/* Cuts s[0..n) by the steps from i_step on. */
static kvs_status cut_piece(const cut *c, int i_step, const char *s, size_t n)
{
    if (n == 0) {
        return KVS_OK;
    }
    if (i_step == c->p->n_step) {
        return c->fn(c->ctx, s, n, c->err);
    }
    size_t done = 0;  /* pieces up to here are cut off          */
    size_t from = 0;  /* where the next match may begin         */
    bool any = false; /* `done` is where a match ended          */
    while (from <= n) {
        size_t begin = 0;
        size_t end = 0;
        bool found = false;
        TRY(regex_find(c->p->step[i_step], c->run, s, n, from, &begin, &end, &found, c->err));
        if (!found) {
            break;
        }
        if (begin == end && any && end == done) {
            /* An empty match right behind a match is none; look from the next character on. */
            from = done < n ? done + char_len(s + done, n - done) : n + 1;
            continue;
        }
        TRY(cut_piece(c, i_step + 1, s + done, begin - done));
        TRY(cut_piece(c, i_step + 1, s + begin, end - begin));
        done = end;
        from = end;
        any = true;
    }
    return cut_piece(c, i_step + 1, s + done, n - done);
}

kvs_status pretok_run(const pretok *p, regex_run *run, const char *s, size_t n, pretok_fn fn,
                      void *ctx, kvs_error *err)
{
    const cut c = {p, run, fn, ctx, err};
    return cut_piece(&c, 0, s, n);
}
