/* cli/run.h - kvspan run in pieces: settings and prompt (run_cmd.c), one answer (run_answer.c), what
 * is reported about it (run_report.c), a conversation at a terminal (run_chat.c), lines typed there
 * (line.c), logits in a file (npy.c). */
#ifndef CLI_RUN_H
#define CLI_RUN_H

#include <jansson.h>

#include "cli/cli.h"
#include "kvspan/chat.h"
#include "kvspan/engine.h"
#include "kvspan/text.h"

/* ---- logits (npy.c) -------------------------------------------------------------------------- */

/* A two-dimensional f32 array that grows by rows and appears under its name when it is whole. */
typedef struct npy {
    const char *path; /* NULL: not wanted, and nothing happens */
    FILE *f;
    char *temp;
    int64_t n_row;
    int32_t n_col;
} npy;

/* These print why and return false when they fail. */
bool npy_open(npy *a, const char *path, int32_t n_col);
bool npy_row(npy *a, const float *row);
bool npy_commit(npy *a);
void npy_drop(npy *a);

/* ---- the run --------------------------------------------------------------------------------- */

/* A place of the prompt: tokens [begin, end) hold the text of --locate. */
typedef struct run_place {
    int64_t begin, end; /* -1: not asked for */
} run_place;

/* Which layer attended how much of the place when a token of the answer was drawn. */
typedef struct run_found {
    int32_t layer, n, total; /* n of the layer's `total` attended positions lie in the place */
    int64_t token;           /* which token of the answer */
} run_found;

typedef struct run {
    const kvs_options *o;
    kvs_engine *e;
    kvs_tokenizer *t;
    kvs_comm *comm; /* NULL: ranks are threads */
    kvs_engine_stats s; /* as of the open */
    cli_progress bar;
    bool show;   /* the answer's text goes to standard output */
    bool typed;  /* standard output is a terminal */
    bool traced; /* selections go into the JSON */
} run;

typedef struct run_answer {
    int32_t *id; /* [n] */
    int64_t n, cap;
    char *text; /* what was shown, n_text bytes and a NUL */
    size_t n_text;
    FILE *text_f;
    kvs_finish reason; /* 0: it failed */
    uint64_t digest;
    kvs_engine_stats before, after;
    double prefill_s, decode_s;
    json_t *logprobs, *selected; /* NULL where not asked for */
    npy logits;
    run_place place;
    run_found *found; /* [n_layer]: the best of each layer */
    int32_t *ids;     /* [topk] scratch */
} run_answer;

/* Answers a prompt of ids. Returns an exit code: CLI_OK, CLI_INTERRUPTED, or a failure that has been
 * explained. The answer is filled as far as it came. */
int run_answer_make(run *r, const int32_t *prompt, int64_t n_prompt, run_place place, run_answer *a);
void run_answer_free(run_answer *a);

/* --stats and --locate on standard error. */
void run_report(const run *r, const run_answer *a);
/* The JSON of cli.md into f. */
bool run_json(const run *r, const int32_t *prompt, int64_t n_prompt, const run_answer *a, FILE *f);

/* The ids of a text, as the options say; for free. Returns an exit code. */
int run_encode(const run *r, const char *text, size_t n, int32_t **ids, int64_t *n_ids);
/* The same of a conversation. *thinks as kvs_chat_prompt_thinks. */
int run_encode_chat(const run *r, const kvs_chat_message *msg, int32_t n_msg, int32_t **ids,
                    int64_t *n_ids, int32_t *thinks);

/* Talks until the end of the input. */
int run_chat(run *r);

/* ---- lines (line.c) -------------------------------------------------------------------------- */

typedef struct line_reader line_reader;

/* Reads lines from the terminal, with editing and history where libedit was there when this was
 * built. NULL without memory. */
line_reader *line_open(const char *prompt);
/* The next line without its end, valid until the next call. NULL: the input has ended, or *interrupted
 * is set and the line is given up. */
const char *line_read(line_reader *l, bool *interrupted);
void line_close(line_reader *l);

#endif
