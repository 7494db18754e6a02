/* cli/main.c - the program kvspan: finds the command and runs it. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "kvspan/log.h"

static const struct {
    const char *word, *about;
    cli_command run;
} k_command[] = {
    {"run", "a model's answer to a text, over one or many ranks", cli_run},
    {"check", "whether the kernels of this machine compute what they must", cli_check},
    {"bench", "how fast the kernels are, as a share of what the machine can do", cli_bench},
    {"plan", "how a model, its cache and a number of devices fit together", cli_plan},
};

enum { N_COMMAND = (int)(sizeof k_command / sizeof *k_command) };

int cli_fail(int code, const char *fmt, ...)
{
    fflush(stdout);
    fputs("kvspan: ", stderr);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return code;
}

int cli_fail_error(int code, const kvs_error *err)
{
    return cli_fail(code, "%s", err->text);
}

static const char *const k_kv_word[] = {"auto", "f32", "bf16", "fp8", "fp8_ds_mla"};

kvs_kv_format cli_kv_of(const char *word)
{
    for (int i = KVS_KV_F32; word != NULL && i <= KVS_KV_FP8_DS_MLA; i++) {
        if (strcmp(word, k_kv_word[i]) == 0) {
            return (kvs_kv_format)i;
        }
    }
    return KVS_KV_AUTO;
}

const char *cli_kv_word(kvs_kv_format kv)
{
    return k_kv_word[kv];
}

static int print_help(const char *command, const char *usage, const char *about)
{
    const size_t n = kvs_options_help(command, NULL, 0);
    char *text = malloc(n + 1);
    if (text == NULL) {
        return cli_fail(CLI_FAILED, "no memory for the help");
    }
    kvs_options_help(command, text, n + 1);
    printf("usage: %s\n\n%s\n\nOptions, each with its environment variable:\n%s", usage, about,
           text);
    free(text);
    return CLI_OK;
}

int cli_options(kvs_options **o, const char *command, int argc, char **argv, const char *usage,
                const char *about)
{
    kvs_error err;
    if (kvs_options_parse(o, command, argc, argv, &err) < 0) {
        return cli_fail_error(CLI_USAGE, &err);
    }
    int code = -1;
    if (kvs_options_flag(*o, "help")) {
        code = print_help(command, usage, about);
    } else if (kvs_log_levels(kvs_options_text(*o, "log", 0), &err) < 0) {
        code = cli_fail_error(CLI_USAGE, &err);
    }
    if (code >= 0) {
        kvs_options_free(*o);
        *o = NULL;
    }
    return code;
}

int cli_no_more_args(const kvs_options *o, const char *command, int32_t n)
{
    if (kvs_options_n_arg(o) <= n) {
        return -1;
    }
    return cli_fail(CLI_USAGE, "%s: unexpected word \"%.60s\": see kvspan %s --help", command,
                    kvs_options_arg(o, n), command);
}

int cli_check_rendezvous(const kvs_options *o)
{
    static const char *const of_it[] = {"rank", "ranks"};
    for (int i = 0; i < 2 && kvs_options_text(o, "rendezvous", 0) == NULL; i++) {
        if (kvs_options_source(o, of_it[i]) == KVS_OPTION_COMMAND_LINE) {
            return cli_fail(CLI_USAGE, "--%s goes with --rendezvous tcp://HOST:PORT: give it too", of_it[i]);
        }
    }
    const int64_t rank = kvs_options_int(o, "rank", 0);
    const int64_t n = kvs_options_int(o, "ranks", 0);
    if (kvs_options_text(o, "rendezvous", 0) != NULL && rank >= n) {
        return cli_fail(CLI_USAGE, "--rank %" PRId64 " of --ranks %" PRId64 ": use --rank 0 to %" PRId64, rank, n,
                        n - 1);
    }
    return -1;
}

static void print_usage(FILE *f)
{
    fputs("kvspan: MLA and sparse attention over a KV cache sharded by token position\n\n"
          "usage: kvspan COMMAND [options]\n"
          "       kvspan --version\n\n",
          f);
    for (int i = 0; i < N_COMMAND; i++) {
        fprintf(f, "  %-7s %s\n", k_command[i].word, k_command[i].about);
    }
    fputs(
        "\nkvspan COMMAND --help lists its options with ranges, defaults and variables.\n"
        "Exit codes: 0 done; 1 the work failed; 2 usage; 3 input file refused; 130 interrupted.\n",
        f);
}

static void list_commands(char *text, size_t cap)
{
    text[0] = '\0';
    for (int i = 0; i < N_COMMAND; i++) {
        const char *sep = i == 0 ? "" : i == N_COMMAND - 1 ? " or " : ", ";
        strncat(text, sep, cap - strlen(text) - 1);
        strncat(text, k_command[i].word, cap - strlen(text) - 1);
    }
}

static int refuse_command(const char *word)
{
    char known[64];
    list_commands(known, sizeof known);
    if (strcmp(word, "serve") == 0) {
        return cli_fail(CLI_USAGE, "%s: this version does not have it: use %s", word, known);
    }
    return cli_fail(CLI_USAGE, "no command \"%.60s\": use %s", word, known);
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stderr);
        return CLI_USAGE;
    }
    const char *word = argv[1];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_usage(stdout);
        return CLI_OK;
    }
    if (strcmp(word, "--version") == 0) {
        printf("kvspan %s\n", kvs_version());
        return CLI_OK;
    }
    for (int i = 0; i < N_COMMAND; i++) {
        if (strcmp(word, k_command[i].word) == 0) {
            return k_command[i].run(argc - 1, argv + 1);
        }
    }
    return refuse_command(word);
}

int main(int argc, char **argv)
{
    const int code = run(argc, argv);
    const int end = cli_close_stdout();
    return code != CLI_OK ? code : end;
}
