/* option.h: the options of the program `kvspan`, for programs that offer the same ones.
 *
 * Every option is one row of one table in the library: name, kind, range, default, help. It can be
 * given on the command line (--name VALUE or --name=VALUE) and through an environment variable
 * (KVS_NAME, with '-' as '_'); the command line wins. A flag's variable takes 1, 0, true, false,
 * yes, no, on or off. Lists are separated by commas; an option that may be repeated
 * takes one text each time. What a command does not know it refuses; what lies outside the range is
 * refused with the range. */
#ifndef KVSPAN_OPTION_H
#define KVSPAN_OPTION_H

#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct kvs_options kvs_options;

/* Reads the options of `command` ("bench", "check", "plan", "run") from argv[1..argc-1] and the
 * environment. Other words are positional arguments; after "--" all are. argv is not changed and
 * not kept. On failure *out is NULL and err says which option, which value and what would work.
 * --help is always accepted; then nothing else is checked.
 * Threads: one at a time, in the process (getopt_long keeps global state). */
kvs_status kvs_options_parse(kvs_options **out, const char *command, int argc, char *const *argv,
                             kvs_error *err);
void kvs_options_free(kvs_options *o);

/* Where the value of an option comes from. */
typedef enum kvs_option_source {
    KVS_OPTION_DEFAULT = 0,
    KVS_OPTION_ENVIRONMENT = 1,
    KVS_OPTION_COMMAND_LINE = 2
} kvs_option_source;

/* The value of an option of the parsed command, named without dashes. Without a value and without a
 * default: 0 or NULL, and a count of 0. Item i of a list; 0 for options that are no list. Sizes in
 * bytes are read with _int. A name that the command does not have, or the wrong kind, gives 0 or
 * NULL. Texts live as long as *o.
 * Threads: any. */
kvs_option_source kvs_options_source(const kvs_options *o, const char *name);
int kvs_options_flag(const kvs_options *o, const char *name);
int32_t kvs_options_count(const kvs_options *o, const char *name);
int64_t kvs_options_int(const kvs_options *o, const char *name, int32_t i);
double kvs_options_real(const kvs_options *o, const char *name, int32_t i);
const char *kvs_options_text(const kvs_options *o, const char *name, int32_t i);

/* The positional arguments.
 * Threads: any. */
int32_t kvs_options_n_arg(const kvs_options *o);
const char *kvs_options_arg(const kvs_options *o, int32_t i);

/* Writes the option list of `command` for people, with ranges, defaults and variables; at most
 * cap - 1 bytes and a NUL. Returns the length of the whole text; 0 for an unknown command.
 * Threads: any. */
size_t kvs_options_help(const char *command, char *buf, size_t cap);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
