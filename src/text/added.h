/* added.h: added tokens, found in raw text before anything else is done with it.
 *
 * The leftmost match counts, the longest of those that begin there; the search goes on behind it.
 * lstrip and rstrip take the white space beside a token with it; a single_word token next to a
 * letter, mark, digit or joiner is text. Tokens whose flag `normalized` is off are looked for first,
 * the others in what they leave over. */
#ifndef TEXT_ADDED_H
#define TEXT_ADDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"
#include "text/regex.h"

enum {
    ADDED_TEXT_MAX = 512, /* bytes of one token's text */
    ADDED_SPECIAL = 1,
    ADDED_LSTRIP = 2,
    ADDED_RSTRIP = 4,
    ADDED_SINGLE_WORD = 8,
    ADDED_NORMALIZED = 16
};

typedef struct added_token {
    char *text;
    size_t n;
    int32_t id;
    uint32_t flags;
} added_token;

/* Sorted by text; the tokens that begin with byte b are first[b] .. first[b + 1] - 1. */
typedef struct added_set {
    added_token *tok;
    int32_t n;
    int32_t first[257];
    regex *word; /* one character of a word; only where a token is single_word */
} added_set;

/* Room for n tokens, none of them filled in. */
kvs_status added_init(added_set *s, int32_t n, kvs_error *err);
void added_fini(added_set *s);

/* Copies text. The caller fills tokens 0..n-1, then sorts. */
kvs_status added_fill(added_token *t, const char *text, size_t n, int32_t id, uint32_t flags,
                      kvs_error *err);

/* Puts the tokens in order. Refuses two of one text. */
kvs_status added_sort(added_set *s, kvs_error *err);

/* The token of exactly this text, NULL where there is none. */
const added_token *added_find(const added_set *s, const char *text, size_t n);

typedef struct added_match {
    size_t from;  /* in: where to look; out: where the search goes on   */
    size_t begin; /* what the token takes, white space included         */
    size_t end;
    const added_token *tok;
} added_match;

/* The next token in text[m->from..n), false when there is none. with_special false passes over the
 * tokens of the flag special. m->begin is never before `floor`, the end of the match before. */
bool added_next(const added_set *s, regex_run *run, const char *text, size_t n, bool with_special,
                size_t floor, added_match *m);

#endif
