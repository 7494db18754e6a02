/* detok.h: ids to text, one id at a time.
 *
 * Pieces are joined as bytes. Bytes that may still become a character are held back, at most three;
 * what cannot become one turns into U+FFFD as utf8.h says, as soon as that is certain, or at the
 * flush. So the text of pushes and flush together is that of all bytes at once. */
#ifndef TEXT_DETOK_H
#define TEXT_DETOK_H

#include "text/tokenizer.h"
#include "text/utf8.h"

struct kvs_detok {
    const kvs_tokenizer *t;
    bool skip_special;
    size_t n_held; /* 0..3 between calls                    */
    char held[];   /* [longest piece + UTF8_MAX_LEN]        */
};

/* t must outlive it. On failure *out is NULL. */
kvs_status detok_new(kvs_detok **out, const kvs_tokenizer *t, bool skip_special, kvs_error *err);
void detok_free(kvs_detok *d);

/* The most bytes that one push or flush gives. */
size_t detok_bound(const kvs_tokenizer *t);

/* As kvs_detok_push and kvs_detok_flush. */
kvs_status detok_push(kvs_detok *d, int32_t id, char *out, size_t cap, size_t *n, kvs_error *err);
kvs_status detok_flush(kvs_detok *d, char *out, size_t cap, size_t *n, kvs_error *err);

#endif
