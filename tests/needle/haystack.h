/* haystack.h: a long text with facts hidden in it, for programs that ask models/needle for them.
 *
 * Text of a file from a random paragraph on (from the top again where it ends), cut at ends of sentences; at such ends
 * stand `The passcode for NAME is 123456.` for wanted names and for distractors. The same recipe gives the same bytes
 * everywhere. Names are three syllables of a list that tools/needle/names.py shares; those for which 7a + 3b + 5c is a
 * multiple of 8 were kept out of training, and only those are used. Two fifths of the distractors differ from another
 * name of the text in one syllable. The text ends with a paragraph; the question is another one.
 */
#ifndef TESTS_NEEDLE_HAYSTACK_H
#define TESTS_NEEDLE_HAYSTACK_H

#include <stdbool.h>
#include <stdint.h>

/* HAYSTACK_TAIL bytes of text are more than 128 tokens. */
enum { HAYSTACK_WANTED = 16, HAYSTACK_NAME = 16, HAYSTACK_TAIL = 900, HAYSTACK_QUESTION = 64 };

/* --tokens is met within a few percent for models/needle. */
typedef struct haystack_recipe {
    const char *file;
    int64_t tokens;
    uint64_t seed;
    int64_t distractors;
    int64_t tail; /* least bytes of text behind the last fact; see HAYSTACK_TAIL */
    int32_t n_wanted;
    int64_t depth[HAYSTACK_WANTED]; /* percent: 0 before the first sentence, 100 before `tail` */
} haystack_recipe;

typedef struct haystack_fact {
    char name[HAYSTACK_NAME];
    uint32_t code;     /* 0..999999 */
    int64_t answer_at; /* byte of the first digit */
} haystack_fact;

typedef struct haystack {
    char *byte; /* [n] */
    int64_t n;
    haystack_fact fact[HAYSTACK_WANTED]; /* as in the recipe */
} haystack;

/* 0, or a line on stderr with `program` in front, and 2. */
int haystack_make(haystack *h, const haystack_recipe *r, const char *program);
void haystack_free(haystack *h);

/* The question for a wanted fact, with what goes before it; returns its length. */
int haystack_question(const haystack *h, int32_t wanted, char out[HAYSTACK_QUESTION]);

/* A whole number from lo to hi. */
bool haystack_number(const char *s, int64_t lo, int64_t hi, int64_t *out);

#endif
