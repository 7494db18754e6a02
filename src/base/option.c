/* option.c: a command line and the environment, read by the rows of knob.c.
 *
 * Values are kept as copies of their texts plus the parsed numbers. Order: default, then variable,
 * then command line, each replacing what was there as a whole. */
#include "kvspan/option.h"

#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/knob.h"
#include "base/mem.h"

enum { MAX_ROW = 64, MAX_ITEM = 64, OPT_HELP = 1000 };

typedef struct option_value {
    const knob *k;
    char *text;  /* items, each ended by a NUL; NULL without a value */
    char **item; /* [n] into text */
    knob_value *v;
    int32_t n;
    kvs_option_source source;
} option_value;

struct kvs_options {
    uint32_t command;
    bool help;
    int32_t n_row;
    int32_t n_arg;
    char **arg; /* [n_arg] into arg_text */
    char *arg_text;
    option_value row[MAX_ROW];
};

static void value_clear(option_value *o)
{
    mem_free(o->text);
    mem_free(o->item);
    mem_free(o->v);
    *o = (option_value){.k = o->k};
}

/* Adds a text behind those that the same source gave; those of a weaker source go. */
static kvs_status value_add(option_value *o, const char *what, const char *s,
                            kvs_option_source source, kvs_error *err)
{
    if (o->source != source) {
        value_clear(o);
    }
    if (o->n == MAX_ITEM) {
        return err_set(err, KVS_LIMIT, "%s is given more than %d times", what, MAX_ITEM);
    }
    size_t used = 0;
    for (int32_t i = 0; i < o->n; i++) {
        used += strlen(o->item[i]) + 1;
    }
    knob_value v;
    const size_t len = strlen(s);
    TRY(knob_parse(o->k, what, s, len, &v, err));
    char *text = mem_alloc(used + len + 1, 0);
    char **item = mem_alloc_array((size_t)o->n + 1, sizeof *item, 0);
    if (text == NULL || item == NULL) {
        mem_free(text);
        mem_free(item);
        return err_set(err, KVS_NOMEM, "%s: no memory for its value", what);
    }
    char *p = text;
    for (int32_t i = 0; i < o->n; i++) {
        item[i] = p;
        p = stpcpy(p, o->item[i]) + 1;
    }
    memcpy(p, s, len + 1);
    item[o->n] = p;
    mem_free(o->text);
    mem_free(o->item);
    o->text = text;
    o->item = item;
    o->n++;
    o->source = source;
    return KVS_OK;
}

/* Replaces a value by the items of s. `what` names the option for messages. */
static kvs_status value_set(option_value *o, const char *what, const char *s,
                            kvs_option_source source, kvs_error *err)
{
    if (o->k->repeat) {
        return value_add(o, what, s, source, err);
    }
    const size_t len = strlen(s);
    int32_t n = 1;
    for (size_t i = 0; i < len && o->k->list; i++) {
        n += s[i] == ',';
    }
    if (n > MAX_ITEM) {
        return err_set(err, KVS_LIMIT, "%s has %d values: use at most %d", what, (int)n, MAX_ITEM);
    }
    value_clear(o);
    o->text = mem_alloc(len + 1, 0);
    o->item = mem_alloc_array((size_t)n, sizeof *o->item, 0);
    o->v = mem_calloc((size_t)n, sizeof *o->v);
    if (o->text == NULL || o->item == NULL || o->v == NULL) {
        value_clear(o);
        return err_set(err, KVS_NOMEM, "%s: no memory for its value", what);
    }
    memcpy(o->text, s, len + 1);
    char *p = o->text;
    for (int32_t i = 0; i < n; i++) {
        const size_t item_len = o->k->list ? strcspn(p, ",") : strlen(p);
        o->item[i] = p;
        const kvs_status st = knob_parse(o->k, what, p, item_len, &o->v[i], err);
        if (st < 0) {
            value_clear(o);
            return st;
        }
        p[item_len] = '\0';
        p += item_len + 1;
    }
    o->n = n;
    o->source = source;
    return KVS_OK;
}

static kvs_status set_defaults(kvs_options *o, kvs_error *err)
{
    const knob *k = NULL;
    for (size_t i = 0; (k = knob_at(i)) != NULL; i++) {
        if ((k->commands & o->command) == 0) {
            continue;
        }
        if (o->n_row == MAX_ROW) {
            return err_set(err, KVS_INTERNAL, "more than %d options", MAX_ROW);
        }
        option_value *v = &o->row[o->n_row++];
        v->k = k;
        if (k->def != NULL) {
            TRY(value_set(v, k->name, k->def, KVS_OPTION_DEFAULT, err));
        }
    }
    return KVS_OK;
}

static kvs_status read_environment(kvs_options *o, kvs_error *err)
{
    for (int32_t i = 0; i < o->n_row; i++) {
        char var[64];
        if (o->row[i].k->repeat) { /* the line has been read once, and will be again */
            value_clear(&o->row[i]);
        }
        const char *s = knob_getenv(knob_env_name(o->row[i].k, var, sizeof var));
        if (s != NULL) {
            TRY(value_set(&o->row[i], var, s, KVS_OPTION_ENVIRONMENT, err));
        }
    }
    return KVS_OK;
}

/* The number of single-letter edits between two words, both short. */
static size_t distance(const char *a, const char *b)
{
    enum { CAP = 40 };
    const size_t m = strlen(b) < CAP ? strlen(b) : CAP;
    size_t row[CAP + 1];
    for (size_t j = 0; j <= m; j++) {
        row[j] = j;
    }
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diag = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t change = diag + (a[i - 1] != b[j - 1]);
            diag = row[j];
            const size_t gap = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            row[j] = change < gap ? change : gap;
        }
    }
    return row[m];
}

static kvs_status refuse_unknown(const kvs_options *o, const char *command, const char *word,
                                 kvs_error *err)
{
    char name[40];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    const char *bare = name + strspn(name, "-");
    const char *best = NULL;
    size_t best_d = strlen(bare) / 3 + 1; /* one wrong letter in three at most */
    for (int32_t i = 0; i < o->n_row; i++) {
        const size_t d = distance(bare, o->row[i].k->name);
        if (d < best_d) {
            best_d = d;
            best = o->row[i].k->name;
        }
    }
    if (best != NULL) {
        return err_set(err, KVS_INVALID, "no option %s for %s: did you mean --%s?", name, command,
                       best);
    }
    return err_set(err, KVS_INVALID, "no option %s for %s: see kvspan %s --help", name, command,
                   command);
}

static size_t long_options(const kvs_options *o, struct option opts[2 * MAX_ROW + 2])
{
    size_t n = 0;
    for (int32_t i = 0; i < o->n_row; i++) {
        const knob *k = o->row[i].k;
        const int has_arg = k->kind == KNOB_FLAG ? no_argument : required_argument;
        opts[n++] = (struct option){k->name, has_arg, NULL, 256 + (int)i};
        if (k->alias != NULL) {
            opts[n++] = (struct option){k->alias, has_arg, NULL, 256 + (int)i};
        }
    }
    opts[n++] = (struct option){"help", no_argument, NULL, OPT_HELP};
    opts[n] = (struct option){0};
    return n;
}

/* ":hm:": letters of the rows that have one, a colon behind those that take a value. */
static void short_options(const kvs_options *o, char letters[2 * MAX_ROW + 3])
{
    *letters++ = ':';
    *letters++ = 'h';
    for (int32_t i = 0; i < o->n_row; i++) {
        const knob *k = o->row[i].k;
        if (k->letter != '\0') {
            *letters++ = k->letter;
            if (k->kind != KNOB_FLAG) {
                *letters++ = ':';
            }
        }
    }
    *letters = '\0';
}

/* The row of a letter, as long_options numbers them; 0 where there is none. */
static int letter_row(const kvs_options *o, int letter)
{
    for (int32_t i = 0; i < o->n_row; i++) {
        if (letter != 0 && o->row[i].k->letter == letter) {
            return 256 + (int)i;
        }
    }
    return 0;
}

static kvs_status read_line(kvs_options *o, const char *command, int argc, char **argv,
                            kvs_error *err)
{
    struct option opts[2 * MAX_ROW + 2];
    char letters[2 * MAX_ROW + 3];
    long_options(o, opts);
    short_options(o, letters);
    optind = 0; /* glibc: start over */
    opterr = 0;
    for (;;) {
        int c = getopt_long(argc, argv, letters, opts, NULL);
        if (c == -1) {
            return KVS_OK;
        }
        if (c == 'h' || c == OPT_HELP) {
            o->help = true;
            return KVS_OK;
        }
        const int row = letter_row(o, c);
        c = row != 0 ? row : c;
        if (c >= 256) {
            option_value *v = &o->row[c - 256];
            char what[64];
            snprintf(what, sizeof what, "--%s", v->k->name);
            TRY(value_set(v, what, v->k->kind == KNOB_FLAG ? "1" : optarg, KVS_OPTION_COMMAND_LINE,
                          err));
            continue;
        }
        const int missing = c == ':' ? letter_row(o, optopt) : 0;
        if (missing != 0) {
            return err_set(err, KVS_INVALID, "-%c needs a value", optopt);
        }
        if (optopt >= 256 && optopt != OPT_HELP) {
            const char *name = o->row[optopt - 256].k->name;
            return c == ':' ? err_set(err, KVS_INVALID, "--%s needs a value", name)
                            : err_set(err, KVS_INVALID, "--%s takes no value", name);
        }
        if (optopt == OPT_HELP) {
            return err_set(err, KVS_INVALID, "--help takes no value");
        }
        const char letter[3] = {'-', (char)optopt, '\0'};
        return refuse_unknown(o, command, optopt != 0 ? letter : argv[optind - 1], err);
    }
}

static kvs_status keep_args(kvs_options *o, int argc, char **argv, int first, kvs_error *err)
{
    size_t bytes = 0;
    for (int i = first; i < argc; i++) {
        bytes += strlen(argv[i]) + 1;
    }
    const int n = argc - first;
    o->arg = mem_alloc_array((size_t)n, sizeof *o->arg, 0);
    o->arg_text = mem_alloc(bytes, 0);
    if (o->arg == NULL || o->arg_text == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the command line");
    }
    char *p = o->arg_text;
    for (int i = 0; i < n; i++) {
        const size_t len = strlen(argv[first + i]) + 1;
        memcpy(p, argv[first + i], len);
        o->arg[i] = p;
        p += len;
    }
    o->n_arg = n;
    return KVS_OK;
}

/* Pairs of options that contradict each other. */
static kvs_status check_pairs(const kvs_options *o, kvs_error *err)
{
    const char *exchange = kvs_options_text(o, "exchange", 0);
    if (kvs_options_flag(o, "deterministic") && exchange != NULL &&
        strcmp(exchange, "ag_rs") == 0) {
        return err_set(err, KVS_INVALID,
                       "--exchange ag_rs does not promise the same bits: use "
                       "--exchange a2a with --deterministic");
    }
    if (kvs_options_flag(o, "warm") && kvs_options_flag(o, "cold")) {
        return err_set(err, KVS_INVALID, "--warm and --cold exclude each other: give one");
    }
    return KVS_OK;
}

static kvs_status parse(kvs_options *o, const char *command, int argc, char **argv, kvs_error *err)
{
    o->command = knob_command(command);
    if (o->command == 0) {
        return err_set(err, KVS_INVALID, "no command \"%s\": use bench, check, plan or run", command);
    }
    TRY(set_defaults(o, err));
    /* The line first finds out whether help is asked for, which no bad variable may hinder. */
    const kvs_status line = read_line(o, command, argc, argv, err);
    if (line < 0 || o->help) {
        return line;
    }
    TRY(read_environment(o, err));
    TRY(read_line(o, command, argc, argv, err));
    TRY(keep_args(o, argc, argv, optind, err));
    return check_pairs(o, err);
}

kvs_status kvs_options_parse(kvs_options **out, const char *command, int argc, char *const *argv,
                             kvs_error *err)
{
    *out = NULL;
    kvs_options *o = mem_calloc(1, sizeof *o);
    /* getopt_long reorders the pointers of what it is given. */
    char **copy = mem_alloc_array((size_t)argc + 1, sizeof *copy, 0);
    kvs_status st = KVS_OK;
    if (o == NULL || copy == NULL) {
        st = err_set(err, KVS_NOMEM, "no memory for the options");
    } else {
        memcpy(copy, argv, (size_t)argc * sizeof *copy);
        copy[argc] = NULL;
        st = parse(o, command, argc, copy, err);
    }
    mem_free(copy);
    if (st < 0) {
        kvs_options_free(o);
        return st;
    }
    *out = o;
    return KVS_OK;
}

void kvs_options_free(kvs_options *o)
{
    if (o == NULL) {
        return;
    }
    for (int32_t i = 0; i < o->n_row; i++) {
        value_clear(&o->row[i]);
    }
    mem_free(o->arg);
    mem_free(o->arg_text);
    mem_free(o);
}

/* The value of a name that the command has; NULL otherwise. */
static const option_value *lookup(const kvs_options *o, const char *name)
{
    const knob *k = knob_find(name, o->command);
    for (int32_t i = 0; k != NULL && i < o->n_row; i++) {
        if (o->row[i].k == k) {
            return &o->row[i];
        }
    }
    return NULL;
}

kvs_option_source kvs_options_source(const kvs_options *o, const char *name)
{
    const option_value *v = lookup(o, name);
    return v != NULL ? v->source : KVS_OPTION_DEFAULT;
}

int kvs_options_flag(const kvs_options *o, const char *name)
{
    if (strcmp(name, "help") == 0) {
        return o->help;
    }
    const option_value *v = lookup(o, name);
    return v != NULL && v->k->kind == KNOB_FLAG && v->n > 0 && v->v[0].i != 0;
}

int32_t kvs_options_count(const kvs_options *o, const char *name)
{
    const option_value *v = lookup(o, name);
    return v != NULL ? v->n : 0;
}

int64_t kvs_options_int(const kvs_options *o, const char *name, int32_t i)
{
    const option_value *v = lookup(o, name);
    const bool ok =
        v != NULL && i >= 0 && i < v->n && (v->k->kind == KNOB_INT || v->k->kind == KNOB_BYTES);
    return ok ? v->v[i].i : 0;
}

double kvs_options_real(const kvs_options *o, const char *name, int32_t i)
{
    const option_value *v = lookup(o, name);
    return v != NULL && i >= 0 && i < v->n && v->k->kind == KNOB_REAL ? v->v[i].r : 0.0;
}

const char *kvs_options_text(const kvs_options *o, const char *name, int32_t i)
{
    const option_value *v = lookup(o, name);
    return v != NULL && i >= 0 && i < v->n ? v->item[i] : NULL;
}

int32_t kvs_options_n_arg(const kvs_options *o)
{
    return o->n_arg;
}

const char *kvs_options_arg(const kvs_options *o, int32_t i)
{
    return i >= 0 && i < o->n_arg ? o->arg[i] : NULL;
}

size_t kvs_options_help(const char *command, char *buf, size_t cap)
{
    const uint32_t bit = knob_command(command);
    size_t n = 0;
    const knob *k = NULL;
    for (size_t i = 0; bit != 0 && (k = knob_at(i)) != NULL; i++) {
        if ((k->commands & bit) == 0) {
            continue;
        }
        char left[80];
        char range[160] = "";
        char var[64];
        char letter[8] = "";
        if (k->letter != '\0') {
            snprintf(letter, sizeof letter, "-%c, ", k->letter);
        }
        snprintf(left, sizeof left, "%s--%s %s", letter, k->name, k->arg != NULL ? k->arg : "");
        if (k->kind != KNOB_FLAG && k->kind != KNOB_TEXT) {
            knob_range(k, range, sizeof range);
        }
        const char *def = k->def != NULL ? k->def : k->def_say;
        const int m = snprintf(
            n < cap ? buf + n : NULL, n < cap ? cap - n : 0, "  %-30s %s\n%33s%s%s%s%s%s%s\n", left,
            k->help, "", range, range[0] != '\0' ? "; " : "", def != NULL ? "default " : "",
            def != NULL ? def : "", def != NULL ? "; " : "", knob_env_name(k, var, sizeof var));
        n += m > 0 ? (size_t)m : 0;
    }
    return n;
}
