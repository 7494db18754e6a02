/* pretok.h: cutting text into pre-tokens.
 *
 * A sequence of steps, each one regular expression: its matches and what lies between them become
 * pieces of their own, which the next step sees one by one, with nothing around them. No byte is
 * lost or added. */
#ifndef TEXT_PRETOK_H
#define TEXT_PRETOK_H

#include "text/regex.h"

enum { PRETOK_STEPS_MAX = 16 };

typedef struct pretok {
    regex *step[PRETOK_STEPS_MAX];
    int n_step;
} pretok;

/* Gets each pre-token in order, n > 0. */
typedef kvs_status (*pretok_fn)(void *ctx, const char *s, size_t n, kvs_error *err);

void pretok_fini(pretok *p);

/* Adds a step that cuts at the matches of src. */
kvs_status pretok_add(pretok *p, const char *name, const char *src, size_t n, kvs_error *err);

/* Adds a step that cuts at the occurrences of a text, n > 0. */
kvs_status pretok_add_text(pretok *p, const char *name, const char *text, size_t n, kvs_error *err);

/* Hands the pre-tokens of s[0..n), valid UTF-8, to fn; ends at its first failure. */
kvs_status pretok_run(const pretok *p, regex_run *run, const char *s, size_t n, pretok_fn fn,
                      void *ctx, kvs_error *err);

#endif
