/* tiny.h: a small tokenizer.json whose parts a test may replace: 256 bytes of the alphabet with the
 * ids 0..255, a few pieces more, and merges. */
#ifndef UNIT_TEXT_TINY_H
#define UNIT_TEXT_TINY_H

#include "base/buf.h"
#include "kvspan/text.h"

/* NULL: the default in the comment. Each is JSON. */
typedef struct tiny {
    const char *normalizer; /* null */
    const char *pre;        /* ByteLevel without a regex */
    const char *post;       /* null */
    const char *decoder;    /* ByteLevel */
    const char *added;      /* [] */
    const char *options;    /* "type": "BPE", and what else a model has, a comma at the end */
    const char *vocab;      /* , "ab": 256, "abc": 257, "bc": 258 */
    const char *merges;     /* ["a b", "b c", "ab c"] */
    const char *config;     /* tokenizer_config.json; without */
    int skip_byte;          /* > 0: this byte has no piece */
} tiny;

/* The character of the byte alphabet, in UTF-8 with a NUL. */
void tiny_spell(unsigned char b, char out[3]);

void tiny_json(textbuf *out, const tiny *what);

/* tok_parse of it. */
kvs_status tiny_parse(kvs_tokenizer **t, const tiny *what, kvs_error *err);

#endif
