/* tokenizer.h: what kvspan/text.h promises, inside: a tokenizer read from a model's folder.
 *
 * text -> (broken UTF-8 replaced) -> added tokens cut out -> pre-tokens -> BPE -> ids. A tokenizer
 * is constant once it was made. */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include "kvspan/text.h"
#include "text/added.h"
#include "text/bpe.h"
#include "text/pretok.h"
#include "text/vocab.h"

enum {
    TOK_WRAP_MAX = 8,       /* ids in front of a text, and behind it */
    TOK_TEXT_MAX = 1 << 30, /* bytes of a text                       */
    TOK_FILE_MAX = 1 << 28  /* bytes of a file                       */
};

struct kvs_tokenizer {
    vocab v;
    bool ignore_merges;
    added_set raw;    /* looked for first                 */
    added_set normal; /* looked for in what is left of it */
    pretok pre;
    int32_t bos; /* -1: none */
    int32_t eos;
    int32_t before[TOK_WRAP_MAX]; /* what the model's template puts in front */
    int32_t n_before;
    int32_t after[TOK_WRAP_MAX];
    int32_t n_after;
};

/* Reads the folder's tokenizer.json and, where it is there, tokenizer_config.json. On failure *out
 * is NULL. */
kvs_status tok_open(kvs_tokenizer **out, const char *dir, kvs_error *err);

/* The same from the text of the two files; config may be NULL. */
kvs_status tok_parse(kvs_tokenizer **out, const char *json, size_t n, const char *config,
                     size_t n_config, kvs_error *err);
void tok_free(kvs_tokenizer *t);

/* kvs_tokens_encode with arguments that are known to be good. */
kvs_status tok_encode(const kvs_tokenizer *t, const char *text, size_t n, uint32_t flags,
                      id_sink *out, kvs_error *err);

/* The id of an added token or of a piece by its text; -1. */
int32_t tok_find(const kvs_tokenizer *t, const char *text, size_t n);

#endif
