/* buf.c: see buf.h. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

void buf_init(textbuf *b)
{
    *b = (textbuf){0};
}

void buf_fini(textbuf *b)
{
    mem_free(b->data);
    *b = (textbuf){0};
}

void buf_clear(textbuf *b)
{
    b->n = 0;
    b->failed = false;
    if (b->data != NULL) {
        b->data[0] = '\0';
    }
}

/* Room for n more bytes and the NUL. */
static bool reserve(textbuf *b, size_t n)
{
    if (b->failed || n > PTRDIFF_MAX - b->n - 1) {
        b->failed = true;
        return false;
    }
    const size_t need = b->n + n + 1;
    if (need <= b->cap) {
        return true;
    }
    const size_t cap = need < 256 ? 256 : need + need / 2;
    char *grown = mem_realloc(b->data, cap);
    if (grown == NULL) {
        b->failed = true;
        return false;
    }
    b->data = grown;
    b->cap = cap;
    return true;
}

void buf_add(textbuf *b, const void *data, size_t n)
{
    if (n == 0 || !reserve(b, n)) {
        return;
    }
    memcpy(b->data + b->n, data, n);
    b->n += n;
    b->data[b->n] = '\0';
}

void buf_text(textbuf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}

void buf_char(textbuf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_printf(textbuf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    va_list again;
    va_copy(again, ap);
    const int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
    } else if (reserve(b, (size_t)n)) {
        vsnprintf(b->data + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
}

const char *buf_str(const textbuf *b)
{
    return b->data != NULL ? b->data : "";
}
