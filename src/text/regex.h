/* regex.h: regular expressions of tokenizer files, run by PCRE2.
 *
 * The files are written for Oniguruma in its Ruby syntax. Most of what they hold means the same to
 * PCRE2; what does not is rewritten (\s, \v, \uHHHH, scripts, anchors at lines) or refused by name
 * (\w, \b, \h, nested classes, POSIX brackets, class intersections, options, references). Matching
 * is in UTF-8 with Unicode properties. regex_translate says exactly what is taken.
 *
 * A regex is constant after it was made and may be used by many threads; a regex_run is one thread's.
 * Time is bounded: a run that has matched for longer than its allowance ends with KVS_LIMIT. */
#ifndef TEXT_REGEX_H
#define TEXT_REGEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "kvspan/status.h"

enum { REGEX_SOURCE_MAX = 1 << 16 };

typedef struct regex regex;
typedef struct regex_run regex_run;

/* Rewrites src for PCRE2. */
kvs_status regex_translate(textbuf *out, const char *src, size_t n, kvs_error *err);

/* `name` goes into messages and is copied as far as 47 bytes. On failure *out is NULL. */
kvs_status regex_new(regex **out, const char *name, const char *src, size_t n, kvs_error *err);

/* A regex of one character that a word may hold: Alphabetic, marks, decimal digits, connectors,
 * joiners. */
kvs_status regex_new_word(regex **out, kvs_error *err);
void regex_free(regex *r); /* NULL is fine */

/* n_byte: how much text will come; the allowance is 10 s and another 2 s for each MiB. */
kvs_status regex_run_new(regex_run **out, size_t n_byte, kvs_error *err);
void regex_run_free(regex_run *run); /* NULL is fine */

/* Ends the allowance at a time of base/clock.h. */
void regex_run_set_deadline(regex_run *run, int64_t t_ns);

/* The first match in s[0..n), which is valid UTF-8, that begins at `from` or later; what lies before
 * `from` is seen by look-behind. *found false: there is none. */
kvs_status regex_find(const regex *r, regex_run *run, const char *s, size_t n, size_t from,
                      size_t *begin, size_t *end, bool *found, kvs_error *err);

/* Whether s[0..n) begins with a match. */
bool regex_begins(const regex *r, regex_run *run, const char *s, size_t n);

/* Whether PCRE2 compiled it to machine code; otherwise it is interpreted. */
bool regex_is_compiled(const regex *r);

#endif
