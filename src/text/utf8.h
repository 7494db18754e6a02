/* utf8.h: UTF-8 as text and vocabularies meet it: valid, broken, or not finished yet.
 *
 * The rule for broken input is one everywhere: each maximal bad sequence counts as one U+FFFD. Such a
 * sequence is the longest run of bytes that begins a valid character and breaks off, or else a
 * single byte. Unicode calls it "substitution of maximal subparts"; Python's errors="replace" and
 * Rust's from_utf8_lossy do the same. */
#ifndef TEXT_UTF8_H
#define TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

/* What stands for a bad sequence, and its length. */
#define UTF8_REPLACEMENT "\xEF\xBF\xBD"
enum { UTF8_REPLACEMENT_LEN = 3, UTF8_MAX_LEN = 4 };

typedef enum utf8_kind {
    UTF8_CHAR, /* a character                                                */
    UTF8_BAD,  /* a maximal bad sequence                                     */
    UTF8_PART  /* bytes that reach the end and that more bytes may complete  */
} utf8_kind;

/* What s[0..n) begins with, n > 0. *len is its length, 1..4, at most n. */
utf8_kind utf8_next(const char *s, size_t n, size_t *len);

/* The code point of the character at s, of which utf8_next has said UTF8_CHAR and len. */
uint32_t utf8_value(const char *s, size_t len);

/* Whether all of s[0..n) is valid. */
bool utf8_valid(const char *s, size_t n);

/* Adds s[0..n) to b with every bad sequence replaced; an unfinished one at the end is bad too. */
void utf8_repair(textbuf *b, const char *s, size_t n);

/* Property White_Space of Unicode. */
bool utf8_is_space(uint32_t c);

#endif
