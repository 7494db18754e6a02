/* jsonw.c: see jsonw.h. */
#include "base/jsonw.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void jsonw_init(jsonw *w)
{
    *w = (jsonw){0};
    buf_init(&w->text);
}

void jsonw_fini(jsonw *w)
{
    buf_fini(&w->text);
}

/* The length of the UTF-8 sequence at s, at most n bytes; 0 when it is none. */
static size_t utf8_len(const unsigned char *s, size_t n)
{
    if (s[0] < 0x80) {
        return 1;
    }
    const size_t len = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC2 || s[0] > 0xF4 || len > n) {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    /* overlong forms, surrogates, above U+10FFFF */
    const bool bad = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
                     (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F);
    return bad ? 0 : len;
}

static void put_string(textbuf *b, const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;
    buf_char(b, '"');
    for (size_t i = 0; i < n;) {
        const size_t len = utf8_len(s + i, n - i);
        if (len == 0) {
            buf_text(b, "\\ufffd");
        } else if (s[i] == '"' || s[i] == '\\') {
            buf_printf(b, "\\%c", s[i]);
        } else if (s[i] == '\n') {
            buf_text(b, "\\n");
        } else if (s[i] < 0x20 || s[i] == 0x7F) {
            buf_printf(b, "\\u%04x", s[i]);
        } else {
            buf_add(b, s + i, len);
        }
        i += len == 0 ? 1 : len;
    }
    buf_char(b, '"');
}

/* Whatever comes before a value: comma, line, key. */
static void begin_value(jsonw *w, const char *key)
{
    const bool in_obj = w->depth > 0 && w->in_obj[w->depth];
    if ((key != NULL) != in_obj || (w->depth == 0 && w->filled[0])) {
        w->misused = true;
    }
    if (w->filled[w->depth]) {
        buf_char(&w->text, ',');
    }
    /* Members of the outermost object stand on their own lines, all else in one. */
    if (w->depth == 1 && in_obj) {
        buf_text(&w->text, "\n  ");
    } else if (w->filled[w->depth]) {
        buf_char(&w->text, ' ');
    }
    w->filled[w->depth] = true;
    if (key != NULL) {
        put_string(&w->text, key, strlen(key));
        buf_text(&w->text, ": ");
    }
}

static void open_value(jsonw *w, const char *key, bool is_obj)
{
    begin_value(w, key);
    if (w->depth == JSONW_DEPTH) {
        w->misused = true;
        return;
    }
    w->depth++;
    w->in_obj[w->depth] = is_obj;
    w->filled[w->depth] = false;
    buf_char(&w->text, is_obj ? '{' : '[');
}

void jsonw_obj(jsonw *w, const char *key)
{
    open_value(w, key, true);
}

void jsonw_arr(jsonw *w, const char *key)
{
    open_value(w, key, false);
}

void jsonw_end(jsonw *w)
{
    if (w->depth == 0) {
        w->misused = true;
        return;
    }
    const bool is_obj = w->in_obj[w->depth];
    if (w->depth == 1 && is_obj && w->filled[1]) {
        buf_char(&w->text, '\n');
    }
    buf_char(&w->text, is_obj ? '}' : ']');
    w->depth--;
}

void jsonw_int(jsonw *w, const char *key, int64_t v)
{
    begin_value(w, key);
    buf_printf(&w->text, "%" PRId64, v);
}

void jsonw_uint(jsonw *w, const char *key, uint64_t v)
{
    begin_value(w, key);
    buf_printf(&w->text, "%" PRIu64, v);
}

void jsonw_real(jsonw *w, const char *key, double v)
{
    begin_value(w, key);
    if (!isfinite(v)) {
        buf_text(&w->text, "null");
        return;
    }
    /* The fewest digits that read back; both directions in the same locale. */
    char s[64];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(s, sizeof s, "%.*g", digits, v);
        if (strtod(s, NULL) == v) {
            break;
        }
    }
    for (const char *p = s; *p != '\0'; p++) {
        if (strchr("0123456789+-e", *p) != NULL) {
            buf_char(&w->text, *p);
        } else if (p == s || strchr("0123456789", p[-1]) != NULL) {
            buf_char(&w->text, '.'); /* the locale's decimal point, of any length */
        }
    }
}

void jsonw_bool(jsonw *w, const char *key, bool v)
{
    begin_value(w, key);
    buf_text(&w->text, v ? "true" : "false");
}

void jsonw_null(jsonw *w, const char *key)
{
    begin_value(w, key);
    buf_text(&w->text, "null");
}

void jsonw_text(jsonw *w, const char *key, const char *s)
{
    if (s == NULL) {
        jsonw_null(w, key);
        return;
    }
    jsonw_text_n(w, key, s, strlen(s));
}

void jsonw_text_n(jsonw *w, const char *key, const char *s, size_t n)
{
    begin_value(w, key);
    put_string(&w->text, s, n);
}

kvs_status jsonw_finish(jsonw *w, const char **text, kvs_error *err)
{
    if (w->text.failed) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of JSON", w->text.n);
    }
    if (w->misused || w->depth != 0 || !w->filled[0]) {
        return err_set(err, KVS_INTERNAL,
                       "the JSON is not well-formed: a value without its key, "
                       "out of place or not ended");
    }
    buf_char(&w->text, '\n');
    if (w->text.failed) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of JSON", w->text.n);
    }
    *text = buf_str(&w->text);
    return KVS_OK;
}
