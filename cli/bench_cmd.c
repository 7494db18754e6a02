/* cli/bench_cmd.c - kvspan bench: a table for people, CSV, JSON. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"
#include "cli/cli.h"
#include "kvspan/bench.h"

enum { MAX_LIST = 64 };

typedef struct bench {
    const kvs_options *o;
    kvs_bench_config cfg;
    int64_t value[8][MAX_LIST];
    int32_t n_axis;
    double invalid[MAX_LIST];
    cli_progress bar;
    cli_output csv, json;
    json_t *rows;
    bool to_stdout; /* CSV or JSON goes there: no table */
    int n_row;
    double tok_per_s; /* of the row at hand; 0 where it has none */
} bench;

/* ---- rows ------------------------------------------------------------------------------------ */

static const char k_csv_head[] =
    "case,op,variant,device,batch,q,heads,len,topk,dcp,invalid,kv,median_us,min_us,p90_us,graph_us,"
    "gflops,gbytes,flop_per_s,byte_per_s,ceiling_kind,ceiling,share,check,err\n";

/* A count that the op does not have is an empty field. */
static void csv_count(FILE *f, int64_t v)
{
    if (v > 0) {
        fprintf(f, "%" PRId64, v);
    }
    fputc(',', f);
}

static void csv_row(FILE *f, const kvs_bench_row *r)
{
    fprintf(f, "%s,%s,%s,%s,", r->name, r->op, r->variant, r->device);
    csv_count(f, r->batch);
    csv_count(f, r->q);
    csv_count(f, r->heads);
    csv_count(f, r->len);
    csv_count(f, r->topk);
    csv_count(f, r->dcp);
    fprintf(f, "%g,%s,", r->invalid, r->kv);
    fprintf(f, "%.3f,%.3f,%.3f,", r->median_us, r->min_us, r->p90_us);
    if (r->graph_us > 0.0) { /* graphs: devices only */
        fprintf(f, "%.3f", r->graph_us);
    }
    fputc(',', f);
    fprintf(f, "%.6g,%.6g,%.6g,%.6g,", r->gflop, r->gbyte, r->flop_per_s, r->byte_per_s);
    fprintf(f, "%s,%.6g,%.4f,%s,%.4g\n", r->ceiling_kind, r->ceiling, r->share,
            r->passed ? "pass" : "FAIL", r->err);
}

static void json_count(json_t *o, const char *key, int64_t v)
{
    json_object_set_new(o, key, v > 0 ? json_integer(v) : json_null());
}

static json_t *json_row(const kvs_bench_row *r, double tok_per_s)
{
    json_t *o = json_pack("{s:s, s:s, s:s, s:s}", "case", r->name, "op", r->op, "variant",
                          r->variant, "device", r->device);
    json_count(o, "batch", r->batch);
    json_count(o, "q", r->q);
    json_count(o, "heads", r->heads);
    json_count(o, "len", r->len);
    json_count(o, "topk", r->topk);
    json_count(o, "dcp", r->dcp);
    json_count(o, "threads", r->threads);
    json_count(o, "reps", r->n_rep);
    json_t *rest = json_pack(
        "{s:f, s:s, s:f, s:f, s:f, s:o, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:s, s:f}", "invalid",
        r->invalid, "kv", r->kv, "median_us", r->median_us, "min_us", r->min_us, "p90_us",
        r->p90_us, "graph_us", r->graph_us > 0.0 ? json_real(r->graph_us) : json_null(), "gflops",
        r->gflop, "gbytes", r->gbyte, "flop_per_s", r->flop_per_s, "byte_per_s", r->byte_per_s,
        "ceiling_kind", r->ceiling_kind, "ceiling", r->ceiling, "share", r->share, "check",
        r->passed ? "pass" : "FAIL", "err", r->err);
    json_object_update(o, rest);
    json_decref(rest);
    if (tok_per_s > 0.0) {
        json_object_set_new(o, "tok_per_s", json_real(tok_per_s));
    }
    return o;
}

static void table_count(int width, int64_t v)
{
    if (v > 0) {
        printf(" %*" PRId64, width, v);
    } else {
        printf(" %*s", width, "-");
    }
}

static void table_row(bench *b, const kvs_bench_row *r)
{
    if (b->n_row == 0) {
        printf("%-8s %-18s %-10s %-10s %6s %3s %5s %8s %5s %3s %5s %11s %9s %9s  %-17s %s\n", "op",
               "case", "variant", "kv", "batch", "q", "heads", "len", "topk", "dcp", "inval",
               "median us", "Gflop/s", "Gbyte/s", "ceiling", "check");
    }
    printf("%-8s %-18s %-10s %-10s", r->op, r->name, r->variant, r->kv[0] != '\0' ? r->kv : "-");
    table_count(6, r->batch);
    table_count(3, r->q);
    table_count(5, r->heads);
    table_count(8, r->len);
    table_count(5, r->topk);
    table_count(3, r->dcp);
    printf(" %5.3g %11.1f", r->invalid, r->median_us);
    if (r->flop_per_s > 0.0) {
        printf(" %9.1f", r->flop_per_s * 1e-9);
    } else {
        printf(" %9s", "-");
    }
    if (r->byte_per_s > 0.0) {
        printf(" %9.2f", r->byte_per_s * 1e-9);
    } else {
        printf(" %9s", "-");
    }
    if (r->graph_us > 0.0) {
        printf(" (graph %.1f us)", r->graph_us);
    }
    printf("  %4.0f %% %-10s %s", 100.0 * r->share, r->ceiling_kind, r->passed ? "pass" : "FAIL");
    if (b->tok_per_s > 0.0) {
        printf("  %.1f tokens/s", b->tok_per_s);
    }
    putchar('\n');
    fflush(stdout);
}

static void on_row(void *ctx, const kvs_bench_row *r)
{
    bench *b = ctx;
    cli_progress_wipe(&b->bar);
    if (!b->to_stdout) {
        table_row(b, r);
    }
    if (b->csv.f != NULL) {
        csv_row(b->csv.f, r);
    }
    if (b->rows != NULL) {
        json_array_append_new(b->rows, json_row(r, b->tok_per_s));
    }
    b->n_row++;
}

static void on_model_row(void *ctx, const kvs_bench_row *r, double tok_per_s)
{
    bench *b = ctx;
    b->tok_per_s = tok_per_s;
    on_row(b, r);
}

static int on_progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    bench *b = ctx;
    cli_progress_step(&b->bar, what, done, total);
    return cli_interrupted();
}

/* ---- options --------------------------------------------------------------------------------- */

static kvs_bench_axis axis_of(bench *b, const char *name)
{
    int64_t *v = b->value[b->n_axis++];
    const int32_t n = kvs_options_count(b->o, name);
    for (int32_t i = 0; i < n && i < MAX_LIST; i++) {
        v[i] = kvs_options_int(b->o, name, i);
    }
    return (kvs_bench_axis){v, n < MAX_LIST ? n : MAX_LIST};
}

static kvs_bench_axis formats_of(bench *b)
{
    int64_t *v = b->value[b->n_axis++];
    const int32_t n = kvs_options_count(b->o, "kv");
    for (int32_t i = 0; i < n && i < MAX_LIST; i++) {
        v[i] = cli_kv_of(kvs_options_text(b->o, "kv", i));
    }
    return (kvs_bench_axis){v, n < MAX_LIST ? n : MAX_LIST};
}

static bool given(const bench *b, const char *name)
{
    return kvs_options_source(b->o, name) != KVS_OPTION_DEFAULT;
}

static bool is_cuda(const bench *b)
{
    const char *device = kvs_options_text(b->o, "device", 0);
    return device != NULL && strcmp(device, "cuda") == 0;
}

static void fill_config(bench *b, const char *op)
{
    kvs_bench_config *c = &b->cfg;
    *c = kvs_bench_config_default();
    c->op = op;
    c->batch = axis_of(b, "batch");
    c->q = axis_of(b, "q");
    c->heads = axis_of(b, "heads");
    c->len = axis_of(b, "len");
    c->topk = axis_of(b, "topk");
    c->dcp = axis_of(b, "dcp");
    c->threads = axis_of(b, "threads");
    c->kv = formats_of(b);
    c->n_invalid = kvs_options_count(b->o, "invalid");
    for (int32_t i = 0; i < c->n_invalid && i < MAX_LIST; i++) {
        b->invalid[i] = kvs_options_real(b->o, "invalid", i);
    }
    c->invalid = b->invalid;
    /* what was not given stays 0, so that an op that has no use for it does not refuse a default */
    c->interleave = given(b, "interleave") ? (int32_t)kvs_options_int(b->o, "interleave", 0) : 0;
    if (given(b, "exchange")) {
        c->exchange = strcmp(kvs_options_text(b->o, "exchange", 0), "ag_rs") == 0
                          ? KVS_EXCHANGE_AG_RS
                          : KVS_EXCHANGE_A2A;
    }
    c->timeout_ms = given(b, "timeout") ? (int32_t)(kvs_options_real(b->o, "timeout", 0) * 1e3) : 0;
    c->reps = (int32_t)kvs_options_int(b->o, "reps", 0);
    c->warm = kvs_options_flag(b->o, "warm");
    c->pool_bytes = given(b, "pool") ? kvs_options_int(b->o, "pool", 0) : 0;
    c->seed = (uint64_t)kvs_options_int(b->o, "seed", 0);
    c->device = kvs_options_text(b->o, "device", 0);
    c->cpu = is_cuda(b) && kvs_options_source(b->o, "cpu") != KVS_OPTION_COMMAND_LINE
                 ? NULL /* a cap of the CPU's kernels */
                 : kvs_options_text(b->o, "cpu", 0);
    c->kernels = kvs_options_text(b->o, "kernels", 0);
    c->row = on_row;
    c->progress = on_progress;
    c->ctx = b;
}

/* ---- the command ----------------------------------------------------------------------------- */

static const kvs_bench_op *find_op(const char *name)
{
    for (int32_t i = 0; kvs_bench_ops(i) != NULL; i++) {
        if (strcmp(name, kvs_bench_ops(i)->name) == 0) {
            return kvs_bench_ops(i);
        }
    }
    return NULL;
}

static int refuse_op(const char *name)
{
    char known[160] = "";
    for (int32_t i = 0; kvs_bench_ops(i) != NULL; i++) {
        strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, kvs_bench_ops(i)->name, sizeof known - strlen(known) - 1);
    }
    return cli_fail(CLI_USAGE, "no bench \"%.40s\": use %s, decode, prefill", name, known);
}

static bool is_stdout(const char *path)
{
    return path != NULL && strcmp(path, "-") == 0;
}

static bool open_outputs(bench *b)
{
    const char *csv = kvs_options_text(b->o, "csv", 0);
    const char *json = kvs_options_text(b->o, "json", 0);
    b->to_stdout = is_stdout(csv) || is_stdout(json);
    if (!cli_output_open(&b->csv, csv)) {
        return false;
    }
    if (!cli_output_open(&b->json, json)) {
        cli_output_drop(&b->csv);
        return false;
    }
    if (b->csv.f != NULL) {
        fputs(k_csv_head, b->csv.f);
    }
    b->rows = json != NULL ? json_array() : NULL;
    return true;
}

/* Files appear also when a check failed: their rows say so. Not when the run broke off. */
static int commit_outputs(bench *b, bool whole)
{
    int code = CLI_OK;
    if (!whole) {
        cli_output_drop(&b->csv);
        cli_output_drop(&b->json);
    } else {
        if (b->json.f != NULL) {
            json_t *root = json_pack("{s:O}", "rows", b->rows);
            json_dumpf(root, b->json.f, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
            fputc('\n', b->json.f);
            json_decref(root);
        }
        code = cli_output_commit(&b->csv);
        const int second = cli_output_commit(&b->json);
        code = code != CLI_OK ? code : second;
    }
    json_decref(b->rows);
    return code;
}

static int code_of(kvs_status st)
{
    return st == KVS_INVALID || st == KVS_LIMIT || st == KVS_UNSUPPORTED ? CLI_USAGE
           : st == KVS_CANCELLED                                         ? CLI_INTERRUPTED
                                                                         : CLI_FAILED;
}

/* Without a grid the op has its own: says which. */
static void say_own_grid(const bench *b)
{
    static const char *const axes[] = {"batch", "q",       "heads",   "len", "topk",
                                       "dcp",   "invalid", "threads", "kv"};
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        if (given(b, axes[i])) {
            return;
        }
    }
    if (is_cuda(b)) {
        fprintf(stderr, "bench on cuda: a table of shapes of its own; under two minutes\n");
    } else if (b->cfg.op != NULL && find_op(b->cfg.op) != NULL) {
        fprintf(stderr, "bench %s: %s; under a minute\n", b->cfg.op, find_op(b->cfg.op)->about);
    }
}

/* Options of the kernels' benches that a whole model has no use for, and the reverse. Returns -1 when all is well. */
static int check_options(const bench *b, const char *op, bool whole)
{
    static const char *const of_kernel[] = {"q",    "heads", "topk", "invalid",
                                            "warm", "cold",  "pool"};
    static const char *const of_model[] = {"model", "tp", "mtp"};
    const char *const *no = whole ? of_kernel : of_model;
    const size_t n =
        whole ? sizeof of_kernel / sizeof *of_kernel : sizeof of_model / sizeof *of_model;
    for (size_t i = 0; i < n; i++) {
        if (given(b, no[i])) {
            return cli_fail(CLI_USAGE, "--%s: bench %s has no use for it: leave it out", no[i],
                            op != NULL ? op : "without an op");
        }
    }
    if (is_cuda(b) && given(b, "deterministic")) {
        return cli_fail(CLI_USAGE, "--deterministic: on cuda name the variant instead, --kernels attn=...");
    }
    if (whole && is_cuda(b)) {
        return cli_fail(CLI_USAGE, "--device cuda: bench %s runs on the CPU: leave it out", op);
    }
    if (whole && kvs_options_text(b->o, "model", 0) == NULL) {
        return cli_fail(CLI_USAGE, "bench %s: no model: name its folder with -m DIR", op);
    }
    for (int32_t i = 0; whole && i < b->cfg.batch.n; i++) {
        if (b->cfg.batch.v[i] != 1) {
            return cli_fail(CLI_USAGE,
                            "--batch %" PRId64 ": bench %s times one request at a time: use 1",
                            b->cfg.batch.v[i], op);
        }
    }
    return -1;
}

static kvs_status run_model(bench *b, const char *op, kvs_error *err)
{
    const bench_model m = {.cfg = &b->cfg,
                           .op = op,
                           .model_dir = kvs_options_text(b->o, "model", 0),
                           .tp = (int32_t)kvs_options_int(b->o, "tp", 0),
                           .mtp = (int32_t)kvs_options_int(b->o, "mtp", 0),
                           .row = on_model_row};
    return bench_model_run(&m, err);
}

static int run(bench *b, const char *op)
{
    fill_config(b, op);
    const bool model = op != NULL && bench_model_has(op);
    const int refused = check_options(b, op, model);
    if (refused >= 0) {
        return refused;
    }
    say_own_grid(b);
    if (!open_outputs(b)) {
        return CLI_FAILED;
    }
    cli_catch_interrupt();
    cli_progress_begin(&b->bar);
    kvs_error err;
    const kvs_status st = model ? run_model(b, op, &err) : kvs_bench_run(&b->cfg, &err);
    cli_progress_wipe(&b->bar);
    const bool whole = st >= 0 || (st == KVS_INTERNAL && b->n_row > 0);
    const int code = commit_outputs(b, whole);
    if (st < 0 && model && (st == KVS_IO || st == KVS_FORMAT || st == KVS_UNSUPPORTED)) {
        return cli_fail_error(CLI_INPUT, &err);
    }
    if (st == KVS_UNSUPPORTED && is_cuda(b)) {
        return cli_fail_error(CLI_FAILED, &err); /* a device, not a word on the command line */
    }
    return st < 0 ? cli_fail_error(code_of(st), &err) : code;
}

static void about_text(char *text, size_t cap)
{
    size_t n = (size_t)snprintf(
        text, cap,
        "Times kernels on random data beside the ceilings of this machine, measured just before,\n"
        "and checks a sample of the results. Without OP: a short case of each. Without options an\n"
        "op has a grid of its own, which takes under a minute (its lengths are cut to a sixteenth\n"
        "where only the reference kernel runs). Lists make a grid:\n"
        "--heads 1,3,8,16 --threads 1,2. An option that an op does not use is refused.\n\n");
    for (int32_t i = 0; kvs_bench_ops(i) != NULL && n < cap; i++) {
        n += (size_t)snprintf(text + n, cap - n, "  %-9s %s\n", kvs_bench_ops(i)->name,
                              kvs_bench_ops(i)->about);
    }
    if (n < cap) {
        snprintf(text + n, cap - n,
                 "\nA whole model, with -m DIR, one request, two runs whose logits must be the "
                 "same bits:\n"
                 "  %-9s one step of an answer after a prompt of --len tokens (256, 1024)\n"
                 "  %-9s a prompt of --len tokens\n",
                 "decode", "prefill");
    }
}

int cli_bench(int argc, char **argv)
{
    char about[4096];
    about_text(about, sizeof about);
    kvs_options *o = NULL;
    int code = cli_options(&o, "bench", argc, argv, "kvspan bench [OP] [options]", about);
    if (code >= 0) {
        return code;
    }
    const char *op = kvs_options_n_arg(o) > 0 ? kvs_options_arg(o, 0) : NULL;
    code = cli_no_more_args(o, "bench", 1);
    if (code < 0 && op != NULL && find_op(op) == NULL && !bench_model_has(op)) {
        code = refuse_op(op);
    }
    if (code < 0) {
        bench *b = calloc(1, sizeof *b);
        if (b == NULL) {
            code = cli_fail(CLI_FAILED, "no memory for the bench");
        } else {
            b->o = o;
            code = run(b, op);
        }
        free(b);
    }
    kvs_options_free(o);
    return code;
}
