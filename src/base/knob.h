/* knob.h: the one table of options, and the only place that reads the environment.
 *
 * A row says what an option is called, which commands have it, what values it takes, its default
 * and its help. include/kvspan/option.h parses command lines with it. Library code that honours an
 * option by itself, without a program around it, asks knob_env for its variable. */
#ifndef BASE_KNOB_H
#define BASE_KNOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

typedef enum knob_kind {
    KNOB_FLAG,  /* present or not                                       */
    KNOB_INT,   /* lo..hi, or one of `choices` when that is given       */
    KNOB_REAL,  /* real_lo..real_hi                                     */
    KNOB_TEXT,  /* any text, not empty                                  */
    KNOB_WORD,  /* one of `choices`                                     */
    KNOB_BYTES, /* a number with B, kB, MB, GB, TB, KiB, MiB, GiB, TiB  */
} knob_kind;

enum { KNOB_BENCH = 1, KNOB_CHECK = 2, KNOB_PLAN = 4, KNOB_RUN = 8, KNOB_ALL = 15 };

typedef struct knob {
    const char *name;
    const char *alias;   /* a second name, or NULL                                  */
    char letter;         /* a one-letter form, or NUL                               */
    const char *arg;     /* what the value is called in the help; NULL for a flag   */
    const char *choices; /* "a|b|c", or NULL                                        */
    const char *def;     /* default, as it would be written; NULL: none             */
    const char *def_say; /* how the help describes a default that is not a constant */
    const char *help;
    int64_t lo, hi;
    double real_lo, real_hi;
    knob_kind kind;
    uint32_t commands; /* KNOB_BENCH | ... */
    bool list;   /* values are separated by commas                                 */
    bool repeat; /* each time the option is given adds a value; a text            */
} knob;

/* Row i, or NULL past the end. */
const knob *knob_at(size_t i);

/* The row of an option as `command` (one KNOB_ bit, or 0 for the first row of that name) has it, by
 * name or alias; NULL if there is none. */
const knob *knob_find(const char *name, uint32_t command);

/* The bit of a command's word; 0 if there is none. */
uint32_t knob_command(const char *word);

/* One value (not a list) of a row. */
typedef union knob_value {
    int64_t i; /* FLAG, INT, BYTES */
    double r;  /* REAL             */
} knob_value;

/* Reads s[0..n). `what` names the option in the message ("--timeout", "KVS_TIMEOUT"). TEXT and WORD
 * are only checked. */
kvs_status knob_parse(const knob *k, const char *what, const char *s, size_t n, knob_value *v,
                      kvs_error *err);

/* The range in words: "1..64", "one of a, b, c", "" where anything goes. Returns buf. */
char *knob_range(const knob *k, char *buf, size_t cap);

/* The variable of an option: "KVS_" and the name in capitals. Returns buf. */
char *knob_env_name(const knob *k, char *buf, size_t cap);

/* The value of the variable of option `name`; NULL when unset or empty, or no such option. */
const char *knob_env(const char *name);

/* The value of any variable; NULL when unset or empty. */
const char *knob_getenv(const char *var);

#endif
