/* text/added.c - sorted texts, searched by narrowing a range byte by byte. */
#include "text/added.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/utf8.h"

kvs_status added_init(added_set *s, int32_t n, kvs_error *err)
{
    memset(s, 0, sizeof *s);
    s->tok = mem_calloc(n > 0 ? (size_t)n : 1, sizeof *s->tok);
    if (s->tok == NULL) {
        return err_set(err, KVS_NOMEM, "tokenizer: no memory for %d added tokens", n);
    }
    s->n = n;
    return KVS_OK;
}

void added_fini(added_set *s)
{
    for (int32_t i = 0; i < s->n; i++) {
        mem_free(s->tok[i].text);
    }
    mem_free(s->tok);
    regex_free(s->word);
    memset(s, 0, sizeof *s);
}

kvs_status added_fill(added_token *t, const char *text, size_t n, int32_t id, uint32_t flags,
                      kvs_error *err)
{
    t->text = mem_alloc(n, 1);
    if (t->text == NULL) {
        return err_set(err, KVS_NOMEM, "tokenizer: no memory for an added token");
    }
    memcpy(t->text, text, n);
    t->n = n;
    t->id = id;
    t->flags = flags;
    return KVS_OK;
}

static int compare(const char *a, size_t n_a, const char *b, size_t n_b)
{
    const int c = memcmp(a, b, n_a < n_b ? n_a : n_b);
    return c != 0 ? c : n_a < n_b ? -1 : n_a > n_b;
}

static int compare_tokens(const void *a, const void *b)
{
    const added_token *x = a;
    const added_token *y = b;
    return compare(x->text, x->n, y->text, y->n);
}

kvs_status added_sort(added_set *s, kvs_error *err)
{
    qsort(s->tok, (size_t)s->n, sizeof *s->tok, compare_tokens);
    for (int32_t i = 1; i < s->n; i++) {
        const added_token *t = &s->tok[i];
        if (compare_tokens(t - 1, t) == 0) {
            return err_set(err, KVS_FORMAT, "added_tokens: \"%.*s\" is there twice",
                           (int)(t->n < 60 ? t->n : 60), t->text);
        }
    }
    for (int32_t i = 0; i < s->n && s->word == NULL; i++) {
        if ((s->tok[i].flags & ADDED_SINGLE_WORD) != 0) {
            TRY(regex_new_word(&s->word, err));
        }
    }
    int32_t i = 0;
    for (int b = 0; b <= 256; b++) {
        while (i < s->n && (unsigned char)s->tok[i].text[0] < b) {
            i++;
        }
        s->first[b] = i;
    }
    return KVS_OK;
}

const added_token *added_find(const added_set *s, const char *text, size_t n)
{
    int32_t lo = 0;
    int32_t hi = s->n;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        const int c = compare(s->tok[mid].text, s->tok[mid].n, text, n);
        if (c == 0) {
            return &s->tok[mid];
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return NULL;
}

/* The first token of lo..hi-1, which agree in their first d bytes, whose byte d is at least b. */
static int32_t lower(const added_set *s, int32_t lo, int32_t hi, size_t d, int b)
{
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        const added_token *t = &s->tok[mid];
        if (t->n <= d || (unsigned char)t->text[d] < b) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The longest token that text[0..n) begins with, n > 0. */
static const added_token *longest(const added_set *s, const char *text, size_t n)
{
    const int b = (unsigned char)text[0];
    int32_t lo = s->first[b];
    int32_t hi = s->first[b + 1];
    const added_token *best = NULL;
    for (size_t d = 1; lo < hi; d++) {
        /* Of those that agree in d bytes, one that ends here sorts first. */
        if (s->tok[lo].n == d) {
            best = &s->tok[lo];
            lo++;
        }
        if (d == n) {
            break;
        }
        const int next = (unsigned char)text[d];
        lo = lower(s, lo, hi, d, next);
        hi = lower(s, lo, hi, d, next + 1);
    }
    return best;
}

/* Where the white space that ends at `end` begins. */
static size_t space_before(const char *text, size_t end)
{
    while (end > 0) {
        size_t at = end - 1;
        while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) {
            at--;
        }
        if (!utf8_is_space(utf8_value(text + at, end - at))) {
            break;
        }
        end = at;
    }
    return end;
}

static size_t space_after(const char *text, size_t n, size_t at)
{
    size_t len = 0;
    while (at < n && utf8_next(text + at, n - at, &len) == UTF8_CHAR &&
           utf8_is_space(utf8_value(text + at, len))) {
        at += len;
    }
    return at;
}

static bool stands_alone(const added_set *s, regex_run *run, const char *text, size_t n,
                         size_t begin, size_t end)
{
    if (end < n && regex_begins(s->word, run, text + end, n - end)) {
        return false;
    }
    size_t at = begin > 0 ? begin - 1 : 0;
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) {
        at--;
    }
    return begin == 0 || !regex_begins(s->word, run, text + at, begin - at);
}

bool added_next(const added_set *s, regex_run *run, const char *text, size_t n, bool with_special,
                size_t floor, added_match *m)
{
    for (size_t i = m->from; s->n > 0 && i < n;) {
        const int b = (unsigned char)text[i];
        const added_token *t = s->first[b] < s->first[b + 1] ? longest(s, text + i, n - i) : NULL;
        if (t == NULL) {
            i++;
            continue;
        }
        const size_t stop = i + t->n;
        if (((t->flags & ADDED_SPECIAL) != 0 && !with_special) ||
            ((t->flags & ADDED_SINGLE_WORD) != 0 && !stands_alone(s, run, text, n, i, stop))) {
            i = stop;
            continue;
        }
        const size_t begin = (t->flags & ADDED_LSTRIP) != 0 ? space_before(text, i) : i;
        m->from = stop;
        m->begin = begin > floor ? begin : floor;
        m->end = (t->flags & ADDED_RSTRIP) != 0 ? space_after(text, n, stop) : stop;
        m->tok = t;
        return true;
    }
    return false;
}
