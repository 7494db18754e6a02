/* buf.h: text that grows.
 *
 * A failure to grow sticks: later additions do nothing and buf_failed says so, so that a writer
 * checks once at the end. The content always ends in a NUL that n does not count. */
#ifndef BASE_BUF_H
#define BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

typedef struct textbuf {
    char *data; /* NULL until something was added */
    size_t n;
    size_t cap;
    bool failed;
} textbuf;

void buf_init(textbuf *b);
void buf_fini(textbuf *b);

/* Empties it and forgets a failure; keeps the memory. */
void buf_clear(textbuf *b);

void buf_add(textbuf *b, const void *data, size_t n);
void buf_text(textbuf *b, const char *s);
void buf_char(textbuf *b, char c);
void buf_printf(textbuf *b, const char *fmt, ...) ERR_PRINTF(2, 3);

/* The content as a string, "" when empty; valid until the next addition. */
const char *buf_str(const textbuf *b);

#endif
