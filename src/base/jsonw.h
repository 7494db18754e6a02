/* jsonw.h: writes JSON text.
 *
 *     jsonw w;
 *     jsonw_init(&w);
 *     jsonw_obj(&w, NULL);
 *     jsonw_int(&w, "dcp", 4);
 *     jsonw_arr(&w, "lens"); jsonw_int(&w, NULL, 5); jsonw_end(&w);
 *     jsonw_end(&w);
 *     TRY(jsonw_finish(&w, &text, err));
 *
 * Every value takes its key, which is NULL inside an array and at the top. Strings are escaped;
 * bytes that are no UTF-8 become U+FFFD. Numbers are written so that they read back to the same
 * value; NaN and infinities, which JSON lacks, become null. The locale does not matter. Running out
 * of memory sticks and is reported by jsonw_finish; a value in the wrong place (a key missing, one
 * too many, an end without a begin) is a bug of the caller and is reported there as KVS_INTERNAL. */
#ifndef BASE_JSONW_H
#define BASE_JSONW_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

enum { JSONW_DEPTH = 32 };

typedef struct jsonw {
    textbuf text;
    int depth;
    bool in_obj[JSONW_DEPTH + 1]; /* what is open at each depth     */
    bool filled[JSONW_DEPTH + 1]; /* it has a member already        */
    bool misused;
} jsonw;

void jsonw_init(jsonw *w);
void jsonw_fini(jsonw *w);

void jsonw_obj(jsonw *w, const char *key); /* begin an object */
void jsonw_arr(jsonw *w, const char *key); /* begin an array  */
void jsonw_end(jsonw *w);                  /* end the innermost of them */

void jsonw_int(jsonw *w, const char *key, int64_t v);
void jsonw_uint(jsonw *w, const char *key, uint64_t v);
void jsonw_real(jsonw *w, const char *key, double v);
void jsonw_bool(jsonw *w, const char *key, bool v);
void jsonw_null(jsonw *w, const char *key);
void jsonw_text(jsonw *w, const char *key, const char *s); /* NULL is null */
void jsonw_text_n(jsonw *w, const char *key, const char *s, size_t n);

/* The finished text, which ends in a newline and is valid until jsonw_fini. */
kvs_status jsonw_finish(jsonw *w, const char **text, kvs_error *err);

#endif
