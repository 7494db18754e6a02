/* cli/cli.h - what the commands of kvspan share: exit codes, errors, outputs.
 *
 * Results go to standard output or to the file that an option names; all else goes to standard
 * error. A failure is one line, "kvspan: what, which value, what would work", and an exit code. */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "kvspan/config.h"
#include "kvspan/option.h"
#include "kvspan/status.h"

enum {
    CLI_OK = 0,
    CLI_FAILED = 1, /* the work failed: a check fell short, a plan or a run was refused */
    CLI_USAGE = 2,  /* the command line */
    CLI_INPUT = 3,  /* an input file was refused */
    CLI_INTERRUPTED = 130
};

/* A command: argv[0] is its word. Returns an exit code. */
typedef int (*cli_command)(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_check(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_run(int argc, char **argv);

/* Prints "kvspan: text" and returns the exit code. */
int cli_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int cli_fail_error(int code, const kvs_error *err);

/* Parses the command's options. Returns -1 when the command is to go on, and then *o is the
 * caller's to free; otherwise an exit code, the help having been printed or the refusal explained.
 * `usage` and `about` head the help. Sets the log levels. */
int cli_options(kvs_options **o, const char *command, int argc, char **argv, const char *usage,
                const char *about);

/* Refuses positional arguments past the first n. Returns -1 when there are none. */
int cli_no_more_args(const kvs_options *o, const char *command, int32_t n);
/* -1, or the exit code where --rank or --ranks is given without the rendezvous they belong to, or does not fit the
 * other. */
int cli_check_rendezvous(const kvs_options *o);

/* "fp8_ds_mla" and back; AUTO for NULL. */
kvs_kv_format cli_kv_of(const char *word);
const char *cli_kv_word(kvs_kv_format kv);

/* ---- outputs (output.c) ---------------------------------------------------------------------- */

/* A text that is collected in memory and then appears whole: in a file, which until then is what it
 * was, or on standard output where the path is "-". A path that names something other than a
 * regular file (a pipe, a device) is written directly. */
typedef struct cli_output {
    const char *path; /* NULL: not wanted, and nothing happens */
    FILE *f;          /* write here */
    char *text;
    size_t n;
} cli_output;

/* Whether something is there that is no regular file. */
bool cli_is_special(const char *path);

/* Returns false, with a message, when there is no memory or no file can be made there. Before the work. */
bool cli_output_open(cli_output *o, const char *path);
/* Returns an exit code, CLI_OK when the text is in place. */
int cli_output_commit(cli_output *o);
void cli_output_drop(cli_output *o);

/* ---- long runs (progress.c) ------------------------------------------------------------------ */

typedef struct cli_progress {
    bool on, drawn;
    double start_s, last_s;
} cli_progress;

/* A bar on standard error, where that is a terminal. Wipe it before printing anything. */
void cli_progress_begin(cli_progress *p);
void cli_progress_step(cli_progress *p, const char *what, int64_t done, int64_t total);
void cli_progress_wipe(cli_progress *p);

/* From now on the first interrupt sets a flag; the second one ends the program. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);
/* Forgets an interrupt; the next one sets the flag again, and ends a wait for input. */
void cli_rearm_interrupt(void);
/* Around a wait for input: an interrupt ends it, also one that came before the wait began. */
void cli_read_begin(void);
void cli_read_end(void);

/* ---- the end --------------------------------------------------------------------------------- */

/* Ends standard output: CLI_OK, or CLI_FAILED when something could not be written. */
int cli_close_stdout(void);

#endif
