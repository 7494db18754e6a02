/* cli/check_cmd.c - kvspan check: a row per op, variant and class; CSV, JSON; speeds. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "kvspan/bench.h"
#include "kvspan/check.h"

enum { MAX_TIMED = 64 };

typedef struct check {
    const kvs_options *o;
    cli_progress bar;
    cli_output csv, json;
    json_t *rows, *speeds;
    bool to_stdout; /* CSV or JSON goes there: no lines */
    char temp[64];  /* where the library writes the CSV until it is whole; empty: nowhere */
    /* --bench: what has been timed, as "op variant" */
    char timed[MAX_TIMED][48];
    int n_timed;
} check;

/* ---- rows ------------------------------------------------------------------------------------ */

static void on_line(void *ctx, const char *text)
{
    check *c = ctx;
    cli_progress_wipe(&c->bar);
    if (!c->to_stdout) {
        puts(text);
        fflush(stdout);
    }
}

static void on_row(void *ctx, const kvs_check_row *r)
{
    check *c = ctx;
    if (c->rows == NULL) {
        return;
    }
    if (r->op == NULL) {
        json_array_append_new(c->rows,
                              json_pack("{s:s, s:s}", "verdict", r->verdict, "line", r->line));
        return;
    }
    json_array_append_new(c->rows,
                          json_pack("{s:s, s:s, s:s, s:I, s:s, s:f, s:s}", "op", r->op, "variant",
                                    r->variant, "class", r->cls, "cases", (json_int_t)r->n_case,
                                    "verdict", r->verdict, "worst", r->worst, "detail", r->detail));
}

static int on_progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    check *c = ctx;
    cli_progress_step(&c->bar, what, done, total);
    return cli_interrupted();
}

/* ---- speeds ---------------------------------------------------------------------------------- */

static void on_speed(void *ctx, const kvs_bench_row *r)
{
    check *c = ctx;
    const char *asked = kvs_options_text(c->o, "variant", 0);
    if (asked != NULL && strcmp(asked, r->variant) != 0) {
        return;
    }
    char key[48];
    snprintf(key, sizeof key, "%s %s", r->op, r->variant);
    for (int i = 0; i < c->n_timed; i++) {
        if (strcmp(c->timed[i], key) == 0) {
            return; /* the same function under a lower cap */
        }
    }
    if (c->n_timed < MAX_TIMED) {
        memcpy(c->timed[c->n_timed++], key, sizeof key);
    }
    cli_progress_wipe(&c->bar);
    if (!c->to_stdout) {
        printf("%-12s %-11s %-18s %11.1f us  %4.0f %% of %s at %.1f G/s%s\n", r->op, r->variant,
               r->name, r->median_us, 100.0 * r->share, r->ceiling_kind, r->ceiling * 1e-9,
               r->passed ? "" : "  FAIL");
        fflush(stdout);
    }
    if (c->speeds != NULL) {
        json_array_append_new(c->speeds, json_pack("{s:s, s:s, s:s, s:f, s:f, s:s, s:f, s:b}", "op",
                                                   r->op, "variant", r->variant, "case", r->name,
                                                   "median_us", r->median_us, "share", r->share,
                                                   "ceiling_kind", r->ceiling_kind, "ceiling",
                                                   r->ceiling, "passed", r->passed));
    }
}

/* Which bench times an op of the check; NULL: none does. */
static const char *bench_of(const char *op)
{
    static const char *const known[][2] = {
        {"attn", "attn"},   {"index_score", "index"}, {"topk", "topk"},
        {"merge", "merge"}, {"kv_write", "write"},    {"index_write", "write"},
        {"mha", "mha"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(op, known[i][0]) == 0) {
            return known[i][1];
        }
    }
    return NULL;
}

static bool is_timed(const check *c, const kvs_bench_op *op)
{
    const char *asked = kvs_options_text(c->o, "op", 0);
    if ((op->axes & KVS_BENCH_KERNELS) == 0 || (op->axes & KVS_BENCH_EXCHANGE) != 0) {
        return false; /* no kernel of its own */
    }
    const char *name = asked != NULL ? bench_of(asked) : op->name;
    return name != NULL && strcmp(name, op->name) == 0;
}

static kvs_status time_op(check *c, const kvs_bench_op *op, const char *level, kvs_error *err)
{
    static const int64_t batch = 1;
    static const int64_t len = 8192;
    static const int64_t rows = 32;
    kvs_bench_config b = kvs_bench_config_default();
    b.op = op->name;
    b.cpu = level;
    b.one = 1;
    b.reps = 3;
    b.pool_bytes = INT64_C(256) << 20;
    if ((op->axes & (KVS_BENCH_LEN | KVS_BENCH_BATCH)) == (KVS_BENCH_LEN | KVS_BENCH_BATCH)) {
        b.batch = (kvs_bench_axis){&batch, 1};
        b.len = (kvs_bench_axis){&len, 1};
    } else if ((op->axes & KVS_BENCH_LEN) != 0) { /* rows of one context, every head with keys of its own */
        b.q = (kvs_bench_axis){&rows, 1};
        b.heads = (kvs_bench_axis){&batch, 1};
        b.len = (kvs_bench_axis){&len, 1};
    }
    b.seed = (uint64_t)kvs_options_int(c->o, "seed", 0);
    b.row = on_speed;
    b.progress = on_progress;
    b.ctx = c;
    return kvs_bench_run(&b, err);
}

/* A short case of every bench op under each level, the lowest first; a level that the machine lacks
 * runs what the one below ran. */
static kvs_status time_variants(check *c, kvs_error *err)
{
    static const char *const levels[] = {"ref", "avx2", "avx512", "avx512bf16"};
    const char *cap = kvs_options_text(c->o, "cpu", 0);
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        for (int32_t k = 0; kvs_bench_ops(k) != NULL; k++) {
            const kvs_status st = is_timed(c, kvs_bench_ops(k))
                                      ? time_op(c, kvs_bench_ops(k), levels[i], err)
                                      : KVS_OK;
            if (st < 0) {
                return st;
            }
        }
        if (cap != NULL && strcmp(cap, levels[i]) == 0) {
            break;
        }
    }
    return KVS_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static bool is_cuda(const kvs_options *o)
{
    const char *device = kvs_options_text(o, "device", 0);
    return device != NULL && strcmp(device, "cuda") == 0;
}

/* What goes with --comm and with --device cuda. */
static int check_options(const kvs_options *o)
{
    static const char *const kernel_only[] = {"op",       "variant", "conformance", "bench",
                                              "selftest", "csv",     "cpu"};
    const bool comm = kvs_options_flag(o, "comm") != 0;
    for (size_t i = 0; comm && i < sizeof kernel_only / sizeof *kernel_only; i++) {
        if (kvs_options_source(o, kernel_only[i]) == KVS_OPTION_COMMAND_LINE) {
            return cli_fail(CLI_USAGE, "--%s does not go with --comm: leave one of them out",
                            kernel_only[i]);
        }
    }
    const bool cuda = is_cuda(o);
    static const char *const cpu_only[] = {"selftest", "bench", "cpu"};
    for (size_t i = 0; cuda && i < sizeof cpu_only / sizeof *cpu_only; i++) {
        if (kvs_options_source(o, cpu_only[i]) == KVS_OPTION_COMMAND_LINE) {
            return cli_fail(CLI_USAGE, "--%s does not go with --device cuda: leave one of them out",
                            cpu_only[i]);
        }
    }
    if (!comm && kvs_options_source(o, "timeout") == KVS_OPTION_COMMAND_LINE) {
        return cli_fail(CLI_USAGE, "--timeout goes with --comm only: leave it out");
    }
    if (!comm && kvs_options_source(o, "rendezvous") == KVS_OPTION_COMMAND_LINE) {
        return cli_fail(CLI_USAGE, "--rendezvous goes with --comm only: leave it out");
    }
    return cli_check_rendezvous(o);
}

static bool is_stdout(const char *path)
{
    return path != NULL && strcmp(path, "-") == 0;
}

static bool open_outputs(check *c)
{
    const char *csv = kvs_options_text(c->o, "csv", 0);
    const char *json = kvs_options_text(c->o, "json", 0);
    c->to_stdout = is_stdout(csv) || is_stdout(json);
    if (!cli_output_open(&c->csv, csv)) {
        return false;
    }
    if (!cli_output_open(&c->json, json)) {
        cli_output_drop(&c->csv);
        return false;
    }
    if (json != NULL) {
        c->rows = json_array();
        c->speeds = json_array();
    }
    if (csv != NULL) {
        snprintf(c->temp, sizeof c->temp, "%s", "/tmp/kvspan-check-XXXXXX");
        const int fd = mkstemp(c->temp);
        if (fd < 0) {
            c->temp[0] = '\0';
            cli_fail(CLI_FAILED, "/tmp: cannot create a file: %s", strerror(errno));
            cli_output_drop(&c->csv);
            cli_output_drop(&c->json);
            return false;
        }
        close(fd);
    }
    return true;
}

static void take_csv(check *c)
{
    FILE *f = c->temp[0] != '\0' ? fopen(c->temp, "r") : NULL;
    char part[4096];
    size_t n = 0;
    while (f != NULL && (n = fread(part, 1, sizeof part, f)) > 0) {
        fwrite(part, 1, n, c->csv.f);
    }
    if (f != NULL) {
        fclose(f);
    }
}

/* Files appear also when a check failed: their rows say so. Not when the run broke off. */
static int commit_outputs(check *c, const kvs_check_result *r, bool whole)
{
    int code = CLI_OK;
    if (whole) {
        take_csv(c);
        if (c->json.f != NULL) {
            json_t *root =
                json_pack("{s:I, s:I, s:I, s:I, s:O, s:O}", "seed",
                          (json_int_t)kvs_options_int(c->o, "seed", 0), "passed",
                          (json_int_t)r->n_passed, "failed", (json_int_t)r->n_failed, "skipped",
                          (json_int_t)r->n_skipped, "rows", c->rows, "speeds", c->speeds);
            json_dumpf(root, c->json.f, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
            fputc('\n', c->json.f);
            json_decref(root);
        }
        code = cli_output_commit(&c->csv);
        const int second = cli_output_commit(&c->json);
        code = code != CLI_OK ? code : second;
    }
    cli_output_drop(&c->csv);
    cli_output_drop(&c->json);
    json_decref(c->rows);
    json_decref(c->speeds);
    if (c->temp[0] != '\0') {
        unlink(c->temp);
    }
    return code;
}

static kvs_check_config config_of(check *c, kvs_check_result *result)
{
    const kvs_options *o = c->o;
    kvs_check_config k = kvs_check_config_default();
    k.comm = kvs_options_flag(o, "comm");
    k.seed = (uint64_t)kvs_options_int(o, "seed", 0);
    k.quick = kvs_options_flag(o, "quick");
    k.device = kvs_options_text(o, "device", 0);
    if (!k.comm) {
        k.op = kvs_options_text(o, "op", 0);
        k.variant = kvs_options_text(o, "variant", 0);
        k.cpu = is_cuda(o) ? NULL : kvs_options_text(o, "cpu", 0);
        k.conformance = kvs_options_flag(o, "conformance");
        k.selftest = kvs_options_flag(o, "selftest");
        k.csv = c->temp[0] != '\0' ? c->temp : NULL;
    } else if (kvs_options_source(o, "timeout") != KVS_OPTION_DEFAULT) {
        k.timeout_ms = (int32_t)(kvs_options_real(o, "timeout", 0) * 1e3);
    }
    k.rendezvous = kvs_options_text(o, "rendezvous", 0);
    k.rank = (int32_t)kvs_options_int(o, "rank", 0);
    k.n_rank = (int32_t)kvs_options_int(o, "ranks", 0);
    k.line = on_line;
    k.row = on_row;
    k.progress = on_progress;
    k.ctx = c;
    k.result = result;
    return k;
}

static int code_of(kvs_status st)
{
    return st == KVS_INVALID ? CLI_USAGE : st == KVS_CANCELLED ? CLI_INTERRUPTED : CLI_FAILED;
}

static int run(check *c)
{
    if (!open_outputs(c)) {
        return CLI_FAILED;
    }
    kvs_check_result result = {0, 0, 0};
    const kvs_check_config k = config_of(c, &result);
    if (!k.comm) {
        cli_catch_interrupt(); /* collectives are not asked between steps */
    }
    cli_progress_begin(&c->bar);
    kvs_error err;
    kvs_status st = kvs_check_run(&k, &err);
    if (st >= 0 && kvs_options_flag(c->o, "bench")) {
        st = time_variants(c, &err);
    }
    cli_progress_wipe(&c->bar);
    const int code = commit_outputs(c, &result, st >= 0 || st == KVS_INTERNAL);
    return st < 0 ? cli_fail_error(code_of(st), &err) : code;
}

int cli_check(int argc, char **argv)
{
    static const char about[] =
        "Checks every variant of every kernel that this machine can run against an independent\n"
        "double-precision oracle: a row per op, variant and class of cases, with the largest error "
        "as\n"
        "a share of what is allowed. The last line counts them. Exit code 1 when one failed.";
    kvs_options *o = NULL;
    int code = cli_options(&o, "check", argc, argv, "kvspan check [options]", about);
    if (code >= 0) {
        return code;
    }
    code = cli_no_more_args(o, "check", 0);
    code = code < 0 ? check_options(o) : code;
    if (code < 0) {
        check *c = calloc(1, sizeof *c);
        if (c == NULL) {
            code = cli_fail(CLI_FAILED, "no memory for the check");
        } else {
            c->o = o;
            code = run(c);
        }
        free(c);
    }
    kvs_options_free(o);
    return code;
}
