/* cli/run_cmd.c - kvspan run: settings and prompt, then one answer or a conversation. */
#include "cli/run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvspan/comm.h"

enum { PROMPT_MAX = 341 << 20 }; /* what a tokenizer takes */

static const char k_usage[] = "kvspan run -m DIR [-p TEXT | -f FILE] [options]";
static const char k_about[] =
    "Continues a text, or answers it as a turn of a conversation (--chat). Without -p and -f the "
    "text\nis read from standard input; at a terminal that is a conversation. The prompt is not "
    "echoed.\n\nThe answer goes to standard output; progress, notes and --stats to standard error. "
    "Ctrl-C ends the\nanswer. With the same --tp, --interleave, formats and kernels the answer and "
    "its logits are the same\nbits for every --dcp, --chunk, --threads and --mtp. Under mpirun, or "
    "with\n--rendezvous, each process is a rank.";

/* ---- texts to ids ---------------------------------------------------------------------------- */

static int no_memory(void)
{
    return cli_fail(CLI_FAILED, "no memory for the prompt");
}

int run_encode(const run *r, const char *text, size_t n, int32_t **ids, int64_t *n_ids)
{
    const bool special = kvs_options_flag(r->o, "special") != 0;
    const uint32_t flags = KVS_ENCODE_TEMPLATE | (special ? KVS_ENCODE_SPECIAL : 0U);
    kvs_error err;
    size_t need = 0;
    *ids = NULL;
    if (kvs_tokens_encode(r->t, text, n, flags, NULL, 0, &need, &err) < 0) {
        return cli_fail_error(CLI_FAILED, &err);
    }
    *ids = malloc((need + 1) * sizeof **ids);
    if (*ids == NULL) {
        return no_memory();
    }
    if (kvs_tokens_encode(r->t, text, n, flags, *ids, need, &need, &err) < 0) {
        return cli_fail_error(CLI_FAILED, &err);
    }
    *n_ids = (int64_t)need;
    return CLI_OK;
}

static kvs_chat_config chat_config(const run *r)
{
    kvs_chat_config c = kvs_chat_config_default();
    const char *think = kvs_options_text(r->o, "think", 0);
    c.think = think == NULL              ? KVS_THINK_AUTO
              : strcmp(think, "on") == 0 ? KVS_THINK_ON
                                         : KVS_THINK_OFF;
    kvs_chat_family_find(&c.family, r->s.chat, NULL);
    return c;
}

int run_encode_chat(const run *r, const kvs_chat_message *msg, int32_t n_msg, int32_t **ids,
                    int64_t *n_ids, int32_t *thinks)
{
    const kvs_chat_config c = chat_config(r);
    kvs_chat_prompt *p = NULL;
    kvs_error err;
    size_t need = 0;
    *ids = NULL;
    if (c.family == KVS_CHAT_NONE) {
        const bool asked = kvs_options_flag(r->o, "chat") != 0;
        return cli_fail(CLI_FAILED,
                        "%s: no form of conversation is known for %s: give a text to continue, "
                        "with -p, -f or as standard input%s",
                        asked ? "--chat" : "standard input is a terminal", r->s.model,
                        asked ? ", and leave --chat out" : "");
    }
    if (kvs_chat_render(&p, &c, msg, n_msg, &err) < 0) {
        return cli_fail_error(CLI_FAILED, &err);
    }
    int code = CLI_OK;
    if (kvs_chat_encode(p, r->t, NULL, 0, &need, &err) < 0) {
        code = cli_fail_error(CLI_FAILED, &err);
    } else {
        *ids = malloc((need + 1) * sizeof **ids);
        code = *ids == NULL ? no_memory() : CLI_OK;
    }
    if (code == CLI_OK && kvs_chat_encode(p, r->t, *ids, need, &need, &err) < 0) {
        code = cli_fail_error(CLI_FAILED, &err);
    }
    *n_ids = (int64_t)need;
    *thinks = kvs_chat_prompt_thinks(p);
    kvs_chat_prompt_free(p);
    return code;
}

/* ---- the prompt ------------------------------------------------------------------------------ */

static int read_stream(FILE *f, const char *name, char **text, size_t *n)
{
    size_t cap = 1 << 16;
    *n = 0;
    *text = malloc(cap);
    while (*text != NULL) {
        const size_t k = fread(*text + *n, 1, cap - *n, f);
        *n += k;
        if (ferror(f)) {
            return cli_fail(CLI_INPUT, "%s: cannot read: %s", name, strerror(errno));
        }
        if (k == 0) {
            return CLI_OK;
        }
        if (*n > PROMPT_MAX) {
            return cli_fail(CLI_INPUT, "%s: longer than %d MiB, which no prompt may be", name,
                            PROMPT_MAX >> 20);
        }
        if (*n == cap) {
            cap *= 2;
            char *more = realloc(*text, cap);
            if (more == NULL) {
                free(*text);
            }
            *text = more;
        }
    }
    return no_memory();
}

static int read_prompt(const kvs_options *o, char **text, size_t *n)
{
    const char *given = kvs_options_text(o, "prompt", 0);
    const char *path = kvs_options_text(o, "file", 0);
    if (given != NULL) {
        *text = strdup(given);
        *n = strlen(given);
        return *text != NULL ? CLI_OK : no_memory();
    }
    const bool std = path == NULL || strcmp(path, "-") == 0;
    FILE *f = std ? stdin : fopen(path, "rb");
    if (f == NULL) {
        return cli_fail(CLI_INPUT, "%s: cannot open: %s", path, strerror(errno));
    }
    const char *name = std ? "standard input" : path;
    int code = read_stream(f, name, text, n);
    if (!std) {
        fclose(f);
    }
    if (code == CLI_OK && *n == 0) {
        code = cli_fail(CLI_INPUT, "%s: the prompt is empty: give some text", name);
    }
    return code;
}

/* ---- settings -------------------------------------------------------------------------------- */

static int32_t int_of(const kvs_options *o, const char *name)
{
    return (int32_t)kvs_options_int(o, name, 0);
}

static bool is_word(const kvs_options *o, const char *name, const char *word)
{
    const char *text = kvs_options_text(o, name, 0);
    return text != NULL && strcmp(text, word) == 0;
}

static kvs_engine_config config_of(const run *r)
{
    const kvs_options *o = r->o;
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = kvs_options_text(o, "model", 0);
    c.tp = int_of(o, "tp");
    c.dcp = int_of(o, "dcp");
    c.interleave = int_of(o, "interleave");
    c.ep = int_of(o, "ep");
    c.threads = int_of(o, "threads");
    c.kv = cli_kv_of(kvs_options_text(o, "kv", 0));
    c.index_kv = is_word(o, "index-kv", "fp8")   ? KVS_INDEX_FP8
                 : is_word(o, "index-kv", "f32") ? KVS_INDEX_F32
                                                 : KVS_INDEX_AUTO;
    c.scale_rule = is_word(o, "scale-rule", "exact") ? KVS_SCALE_EXACT : KVS_SCALE_POW2;
    c.exchange = is_word(o, "exchange", "ag_rs") ? KVS_EXCHANGE_AG_RS : KVS_EXCHANGE_A2A;
    c.hadamard = kvs_options_flag(o, "hadamard");
    c.latent_eps = (float)kvs_options_real(o, "latent-eps", 0);
    c.ctx = kvs_options_int(o, "ctx", 0);
    c.chunk = int_of(o, "chunk");
    c.mtp = int_of(o, "mtp");
    c.trace = r->traced || kvs_options_text(o, "locate", 0) != NULL;
    c.no_reuse = is_word(o, "reuse", "off");
    c.selection_last = kvs_options_flag(o, "selection-last");
    c.timeout_ms = (int32_t)(kvs_options_real(o, "timeout", 0) * 1000.0);
    c.cpu = kvs_options_text(o, "cpu", 0);
    c.kernels = kvs_options_text(o, "kernels", 0);
    c.comm = r->comm;
    return c;
}

/* What needs another option or excludes one. Returns -1 when all is well. */
static int check_options(const kvs_options *o, bool chat)
{
    const bool json = kvs_options_text(o, "json", 0) != NULL;
    if (kvs_options_text(o, "model", 0) == NULL) {
        return cli_fail(CLI_USAGE, "run: no model: name its folder with -m DIR");
    }
    if (kvs_options_text(o, "prompt", 0) != NULL && kvs_options_text(o, "file", 0) != NULL) {
        return cli_fail(CLI_USAGE, "-p and -f are two prompts: give one");
    }
    if (kvs_options_int(o, "max-new", 0) == 0) {
        return cli_fail(CLI_USAGE, "--max-new 0: use 1 or more, or -1 for no limit");
    }
    if (kvs_options_flag(o, "trace-selection") && !json) {
        return cli_fail(CLI_USAGE, "--trace-selection goes into the JSON: give --json FILE too");
    }
    if (kvs_options_int(o, "logprobs", 0) > 0 && !json) {
        return cli_fail(CLI_USAGE, "--logprobs goes into the JSON: give --json FILE too");
    }
    if (!chat && (kvs_options_text(o, "system", 0) || kvs_options_text(o, "think", 0))) {
        return cli_fail(CLI_USAGE,
                        "--system and --think belong to a conversation: give --chat too");
    }
    if (chat && kvs_options_flag(o, "special")) {
        return cli_fail(CLI_USAGE, "--special: in a conversation what is typed is always text");
    }
    return cli_check_rendezvous(o);
}

static void notes(const run *r)
{
    if (kvs_options_source(r->o, "dcp") != KVS_OPTION_DEFAULT &&
        kvs_options_source(r->o, "tp") == KVS_OPTION_DEFAULT && r->s.tp > 1) {
        fprintf(stderr,
                "kvspan: note: tp %d follows from dcp %d; digests compare at equal --tp only\n",
                r->s.tp, r->s.dcp);
    }
    if (r->s.exchange == KVS_EXCHANGE_AG_RS) {
        fputs("kvspan: note: with --exchange ag_rs bits may differ between DCP sizes\n", stderr);
    }
    if (kvs_options_flag(r->o, "selection-last")) {
        fputs("kvspan: note: --selection-last is an experiment: the model's own selection is not "
              "used\n",
              stderr);
    }
}

/* A folder that cannot be read is a refused input, settings that do not fit it a refused start. */
static int code_of(kvs_status st)
{
    return st == KVS_IO || st == KVS_FORMAT || st == KVS_UNSUPPORTED ? CLI_INPUT : CLI_FAILED;
}

/* ---- one answer ------------------------------------------------------------------------------ */

/* The tokens whose bytes hold the text of --locate, by what each id spells. */
static int find_place(const run *r, const int32_t *ids, int64_t n, run_place *place)
{
    const char *text = kvs_options_text(r->o, "locate", 0);
    *place = (run_place){-1, -1};
    if (text == NULL) {
        return CLI_OK;
    }
    char *all = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&all, &len);
    size_t *end = malloc(((size_t)n + 1) * sizeof *end);
    if (f == NULL || end == NULL) {
        return no_memory();
    }
    for (int64_t i = 0; i < n; i++) {
        size_t k = 0;
        const char *piece = kvs_token_piece(r->t, ids[i], &k);
        fwrite(piece != NULL ? piece : "", 1, k, f);
        fflush(f);
        end[i] = len;
    }
    fclose(f);
    const char *at = memmem(all, len, text, strlen(text));
    if (at != NULL) {
        const size_t from = (size_t)(at - all);
        const size_t to = from + strlen(text);
        int64_t i = 0;
        while (end[i] <= from) {
            i++;
        }
        place->begin = i;
        while (end[i] < to) {
            i++;
        }
        place->end = i + 1;
    }
    free(end);
    free(all);
    return at != NULL
               ? CLI_OK
               : cli_fail(CLI_USAGE, "--locate \"%.60s\": the prompt does not hold it", text);
}

static int write_json(const run *r, const int32_t *ids, int64_t n, const run_answer *a,
                      cli_output *out)
{
    if (out->path != NULL && !run_json(r, ids, n, a, out->f)) {
        return cli_fail(CLI_FAILED, "no memory for the JSON to %s", out->path);
    }
    return cli_output_commit(out);
}

static int answer(run *r, const int32_t *ids, int64_t n)
{
    run_place place;
    int code = find_place(r, ids, n, &place);
    if (code != CLI_OK) {
        return code;
    }
    cli_output out;
    if (!cli_output_open(&out, kvs_options_text(r->o, "json", 0))) {
        return CLI_FAILED;
    }
    run_answer a;
    code = run_answer_make(r, ids, n, place, &a);
    if (code == CLI_OK || code == CLI_INTERRUPTED) {
        run_report(r, &a);
        const int json = write_json(r, ids, n, &a, &out);
        code = json != CLI_OK ? json : code;
    }
    cli_output_drop(&out);
    run_answer_free(&a);
    return code;
}

/* text: the prompt; NULL: a conversation at a terminal. */
static int drive(run *r, const char *text, size_t n, bool chat)
{
    if (text == NULL) {
        return run_chat(r);
    }
    int32_t *ids = NULL;
    int64_t n_ids = 0;
    int32_t thinks = 0;
    int code = CLI_OK;
    if (chat) {
        const char *system = kvs_options_text(r->o, "system", 0);
        kvs_chat_message msg[2] = {{.role = KVS_CHAT_SYSTEM, .content = system},
                                   {.role = KVS_CHAT_USER, .content = text}};
        const int32_t first = system != NULL ? 0 : 1;
        code = run_encode_chat(r, msg + first, 2 - first, &ids, &n_ids, &thinks);
    } else {
        code = run_encode(r, text, n, &ids, &n_ids);
    }
    if (code == CLI_OK) {
        code = answer(r, ids, n_ids);
    }
    free(ids);
    return code;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* With a rendezvous, or under an MPI launcher, each process is a rank. */
static int open_comm(run *r)
{
    const char *meet = kvs_options_text(r->o, "rendezvous", 0);
    if (meet == NULL && kvs_comm_launched() < 2) {
        return CLI_OK;
    }
    kvs_comm_config c = kvs_comm_config_default();
    c.timeout_ms = (int32_t)(kvs_options_real(r->o, "timeout", 0) * 1000.0);
    kvs_error err;
    const kvs_status st =
        meet == NULL ? kvs_comm_open_mpi(&r->comm, &c, &err)
                     : kvs_comm_open_tcp(&r->comm, meet, (int32_t)kvs_options_int(r->o, "rank", 0),
                                         (int32_t)kvs_options_int(r->o, "ranks", 0), &c, &err);
    return st < 0 ? cli_fail_error(code_of(st), &err) : CLI_OK;
}

/* All ranks of a group hear the same refusal; one of them says it. */
static int refuse(const run *r, kvs_status st, const kvs_error *err)
{
    return r->comm != NULL && kvs_comm_rank(r->comm) != 0 ? code_of(st)
                                                          : cli_fail_error(code_of(st), err);
}

static int follow(run *r)
{
    kvs_error err;
    const kvs_status st = kvs_engine_follow(r->e, &err);
    return st < 0 ? cli_fail_error(CLI_FAILED, &err) : CLI_OK;
}

static int with_engine(run *r, const char *text, size_t n, bool chat)
{
    kvs_error err;
    const kvs_engine_config c = config_of(r);
    kvs_status st = kvs_tokenizer_open(&r->t, c.model_dir, &err);
    if (st == KVS_OK || r->comm != NULL) { /* the other ranks wait for this one */
        kvs_error why;
        const kvs_status open = kvs_engine_open(&r->e, &c, &why);
        err = open < 0 ? why : err;
        st = open < 0 ? open : st;
    }
    if (st < 0) {
        return refuse(r, st, &err);
    }
    r->s = kvs_engine_stats_empty();
    kvs_engine_get_stats(r->e, &r->s);
    if (r->s.rank != 0) {
        return follow(r);
    }
    notes(r);
    return drive(r, text, n, chat);
}

static int run_all(const kvs_options *o)
{
    const bool at_terminal = isatty(STDIN_FILENO) && kvs_options_text(o, "prompt", 0) == NULL &&
                             kvs_options_text(o, "file", 0) == NULL;
    const bool chat = at_terminal || kvs_options_flag(o, "chat");
    int code = check_options(o, chat);
    if (code >= 0) {
        return code;
    }
    const char *json = kvs_options_text(o, "json", 0);
    run r = {.o = o,
             .show = json == NULL || strcmp(json, "-") != 0,
             .typed = isatty(STDOUT_FILENO) != 0,
             .traced = kvs_options_flag(o, "trace-selection") != 0};
    char *text = NULL;
    size_t n = 0;
    code = open_comm(&r);
    const bool reads = r.comm == NULL || kvs_comm_rank(r.comm) == 0;
    if (code == CLI_OK && reads && !at_terminal) {
        code = read_prompt(o, &text, &n);
    }
    cli_catch_interrupt();
    if (code == CLI_OK) {
        code = with_engine(&r, at_terminal ? NULL : text, n, chat);
    }
    free(text);
    kvs_engine_close(r.e);
    kvs_tokenizer_close(r.t);
    kvs_comm_close(r.comm);
    return code;
}

int cli_run(int argc, char **argv)
{
    kvs_options *o = NULL;
    int code = cli_options(&o, "run", argc, argv, k_usage, k_about);
    if (code >= 0) {
        return code;
    }
    code = cli_no_more_args(o, "run", 0);
    if (code < 0) {
        code = run_all(o);
    }
    kvs_options_free(o);
    return code;
}
