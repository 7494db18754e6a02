/* err.c: fills kvs_error. */
#include "base/err.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static void format_cut(char *dst, size_t cap, const char *fmt, va_list ap)
{
    const int n = vsnprintf(dst, cap, fmt, ap);
    if (n < 0) {
        dst[0] = '\0';
    } else if ((size_t)n >= cap && cap > 4) {
        memcpy(dst + cap - 4, "...", 4);
    }
}

kvs_status err_set_at(kvs_error *err, const char *file, int line, kvs_status code, const char *fmt,
                      ...)
{
    if (err == NULL) {
        return code;
    }
    const char *slash = file != NULL ? strrchr(file, '/') : NULL;
    /* The arguments may point into the text being replaced. */
    char text[sizeof err->text];
    va_list ap;
    va_start(ap, fmt);
    format_cut(text, sizeof text, fmt, ap);
    va_end(ap);

    err->code = code;
    err->line = line;
    err->file = slash != NULL ? slash + 1 : file;
    err->pos = -1;
    memcpy(err->text, text, sizeof text);
    return code;
}

void err_at(kvs_error *err, int64_t pos)
{
    if (err != NULL) {
        err->pos = pos;
    }
}

void err_prefix(kvs_error *err, const char *fmt, ...)
{
    if (err == NULL) {
        return;
    }
    char text[sizeof err->text];
    va_list ap;
    va_start(ap, fmt);
    format_cut(text, sizeof text, fmt, ap);
    va_end(ap);

    const size_t n = strlen(text);
    const int room = (int)(sizeof text - n);
    const int m = snprintf(text + n, sizeof text - n, ": %s", err->text);
    if (m >= room) {
        memcpy(text + sizeof text - 4, "...", 4);
    }
    memcpy(err->text, text, sizeof text);
}
