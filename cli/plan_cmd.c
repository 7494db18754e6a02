/* cli/plan_cmd.c - kvspan plan: a plan as a page for people or as JSON. */
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "cli/cli.h"
#include "kvspan/plan.h"

static const char k_usage[] = "kvspan plan -m DIR | --preset NAME [options]";

/* ---- options --------------------------------------------------------------------------------- */

static const char *index_word(kvs_index_format f)
{
    static const char *const word[] = {"none", "fp8", "f32"};
    return word[f];
}

static const char *weight_word(kvs_weight_format f)
{
    static const char *const word[] = {"auto", "bf16", "fp8"};
    return word[f];
}

static bool is_word(const kvs_options *o, const char *name, const char *word)
{
    const char *text = kvs_options_text(o, name, 0);
    return text != NULL && strcmp(text, word) == 0;
}

static int32_t int_of(const kvs_options *o, const char *name)
{
    return (int32_t)kvs_options_int(o, name, 0);
}

static kvs_plan_config config_of(const kvs_options *o)
{
    kvs_plan_config c = kvs_plan_config_default();
    c.preset = kvs_options_text(o, "preset", 0);
    c.model_dir = kvs_options_text(o, "model", 0);
    c.gpus = int_of(o, "gpus");
    c.mem_bytes = kvs_options_int(o, "mem", 0);
    c.util = kvs_options_real(o, "util", 0);
    c.weights = is_word(o, "weights", "fp8")    ? KVS_WEIGHT_FP8
                : is_word(o, "weights", "bf16") ? KVS_WEIGHT_BF16
                                                : KVS_WEIGHT_AUTO;
    c.tp = int_of(o, "tp");
    c.dcp = int_of(o, "dcp");
    c.ep = int_of(o, "ep");
    c.interleave = int_of(o, "interleave");
    c.kv = cli_kv_of(kvs_options_text(o, "kv", 0));
    c.index_kv = is_word(o, "index-kv", "fp8")   ? KVS_INDEX_FP8
                 : is_word(o, "index-kv", "f32") ? KVS_INDEX_F32
                                                 : KVS_INDEX_AUTO;
    c.ctx = kvs_options_int(o, "ctx", 0);
    c.seqs = int_of(o, "seqs");
    c.mtp = int_of(o, "mtp");
    c.chunk = int_of(o, "chunk");
    c.threads = int_of(o, "threads");
    c.cpu = kvs_options_text(o, "cpu", 0);
    c.kernels = kvs_options_text(o, "kernels", 0);
    return c;
}

/* ---- the page -------------------------------------------------------------------------------- */

/* 1234567 as "1,234,567"; the last eight results are valid. */
static const char *grouped(int64_t v)
{
    enum { RING = 8, CAP = 32 };
    static char ring[RING][CAP];
    static int next;
    char *out = ring[next++ % RING];
    char digits[CAP];
    const int n = snprintf(digits, sizeof digits, "%" PRId64, v);
    int k = 0;
    for (int i = 0; i < n && k < CAP - 2; i++) {
        if (i > 0 && (n - i) % 3 == 0) {
            out[k++] = ',';
        }
        out[k++] = digits[i];
    }
    out[k] = '\0';
    return out;
}

static void line_gb(const char *what, int64_t bytes, const char *note)
{
    printf("  %-22s %12.3f GB  %s\n", what, (double)bytes / 1e9, note);
}

/* A number of parameters: "671.88 B" from a milliard on, three digits below it, "6.86 M" or "213 K". */
static const char *parameters(int64_t n, char text[32])
{
    if (n < 1000) {
        snprintf(text, 32, "%" PRId64, n);
        return text;
    }
    const int k = n < 999500 ? 0 : n < 999500000 ? 1 : 2;
    const double v = (double)n / (const double[]){1e3, 1e6, 1e9}[k];
    const int decimals = k == 2 || v < 9.995 ? 2 : v < 99.95 ? 1 : 0;
    snprintf(text, 32, "%.*f %c", decimals, v, "KMB"[k]);
    return text;
}

static void print_model(const kvs_plan *p)
{
    char text[32];
    printf("%s (%s): %s parameters", p->model, p->architecture, parameters(p->n_param, text));
    if (p->n_mtp_layer > 0) {
        printf(" and %s of drafts", parameters(p->n_param_mtp, text));
    }
    printf("; %d layers, %d with an indexer, %d heads\n", p->n_layer, p->n_index_layer, p->n_head);
    printf("gpus %d, tp %d, dcp %d, ep %d, interleave %d, weights %s, kv %s", p->gpus, p->tp,
           p->dcp, p->ep, p->interleave, weight_word(p->weights), cli_kv_word(p->kv));
    if (p->n_index_layer > 0) {
        printf(", index-kv %s", index_word(p->index_kv));
    }
    printf(", ctx %" PRId64 ", seqs %d, mtp %d, chunk %d\n", p->ctx, p->seqs, p->mtp, p->chunk);
}

static void print_token(const kvs_plan *p)
{
    printf("\nbytes of one token, all layers\n");
    printf("  %-22s %12s     %d x %" PRId64 "\n", "latent rows", grouped(p->token_latent),
           p->n_layer, p->row_bytes);
    if (p->n_index_layer > 0) {
        printf("  %-22s %12s     %d x %" PRId64 "\n", "index keys", grouped(p->token_index),
               p->n_index_layer, p->index_token_bytes);
    }
    if (p->mtp > 0) {
        printf("  %-22s %12s     %d draft layer%s\n", "drafts", grouped(p->token_draft),
               p->n_mtp_layer, p->n_mtp_layer == 1 ? "" : "s");
    }
    printf("  %-22s %12s\n", "together", grouped(p->token_bytes));
}

static void print_rank(const kvs_plan *p)
{
    char note[96];
    printf("\none rank\n");
    snprintf(note, sizeof note, "of %.3f GB", (double)p->mem_bytes / 1e9);
    line_gb("usable", p->usable_bytes, note);
    snprintf(note, sizeof note, "of %.3f GB", (double)p->checkpoint_bytes / 1e9);
    line_gb("weights", p->weight_bytes, note);
    if (p->mtp > 0) {
        line_gb("weights of drafts", p->weight_mtp, "");
    }
    line_gb("made of weights", p->weight_copies, "absorbed matrices, f32 vectors");
    snprintf(note, sizeof note, "%d thread%s", p->threads, p->threads == 1 ? "" : "s");
    line_gb("workspaces", p->workspace_bytes, note);
    snprintf(note, sizeof note, "%s pages of 64 tokens, %s bytes each", grouped(p->n_page),
             grouped(p->page_bytes));
    line_gb("cache", p->cache_bytes, note);
}

/* What kvspan run takes with these settings, and what its peak_rss_bytes comes to. */
static void print_process(const kvs_plan *p)
{
    char note[96];
    printf("\none process with %d rank%s\n", p->tp, p->tp == 1 ? "" : "s");
    line_gb("weights, once", p->process_weights, "as stored, and what is made of them");
    line_gb("workspaces", p->process_workspace, "");
    if (p->tp > 1) {
        line_gb("messages", p->process_messages, "between its ranks");
    }
    snprintf(note, sizeof note, "%d x %" PRId64 " tokens; taken as they fill", p->seqs, p->ctx);
    line_gb("cache, full", p->process_cache, note);
    line_gb("together", p->process_bytes, "and some 10 MB of the program itself");
}

static void print_fit(const kvs_plan *p)
{
    printf("\ntokens that fit\n");
    printf("  %-22s %12s\n", "stored by one rank", grouped(p->tokens_per_rank));
    printf("  %-22s %12s     %d rank%s one cache\n", "in a DCP group", grouped(p->tokens_total),
           p->dcp, p->dcp == 1 ? " holds" : "s share");
    if (p->gpus > p->tp) {
        printf("  %-22s %12s     %d TP groups\n", "in all replicas", grouped(p->tokens_replicas),
               p->gpus / p->tp);
    }
    printf("  %-22s %12s     the model's limit is %s\n", "longest context", grouped(p->longest_ctx),
           grouped(p->max_ctx));
    if (p->seqs > 1) {
        printf("  %-22s %12s     each of %d\n", "longest at once", grouped(p->longest_ctx_seqs),
               p->seqs);
    }
}

static void line_exchange(const char *what, int64_t a2a, int64_t ag_rs)
{
    printf("  %-22s %12s %12s\n", what, grouped(a2a), grouped(ag_rs));
}

static void print_exchange(const kvs_plan *p)
{
    if (p->dcp == 1) {
        printf("\nexchange: none with dcp 1\n");
        return;
    }
    printf("\nbytes one rank sends per layer, %d token%s a step\n", p->n_row,
           p->n_row == 1 ? "" : "s");
    printf("  %-22s %12s %12s\n", "", "a2a", "ag_rs");
    line_exchange("queries", p->a2a.q, p->ag_rs.q);
    line_exchange("partials", p->a2a.partial, p->ag_rs.partial);
    line_exchange("log-sum-exp", p->a2a.lse, p->ag_rs.lse);
    if (p->n_index_layer > 0) {
        line_exchange("selection", p->a2a.selection, p->ag_rs.selection);
    }
    line_exchange("the step, all layers", p->a2a_step, p->ag_rs_step);
}

static void print_refusals(const kvs_plan *p)
{
    if (p->n_refusal == 0) {
        return;
    }
    printf("\nrefused; the figures are those of the nearest settings\n");
    for (int32_t i = 0; i < p->n_refusal; i++) {
        const kvs_plan_refusal *r = &p->refusal[i];
        printf("  %s: %s: %s%s%s\n", r->rule, r->value, r->why,
               r->nearest[0] != '\0' ? "; use " : "", r->nearest);
    }
}

static void print_page(const kvs_plan *p)
{
    print_model(p);
    print_token(p);
    print_rank(p);
    print_process(p);
    print_fit(p);
    print_exchange(p);
    print_refusals(p);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_exchange(const kvs_plan_exchange *x, int64_t step)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "q", (json_int_t)x->q, "partial",
                     (json_int_t)x->partial, "lse", (json_int_t)x->lse, "selection",
                     (json_int_t)x->selection, "step", (json_int_t)step);
}

static json_t *json_settings(const kvs_plan *p)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:f, s:s, s:s, s:s, s:I, s:i, s:i, s:i, s:i}",
                     "gpus", p->gpus, "tp", p->tp, "dcp", p->dcp, "ep", p->ep, "interleave",
                     p->interleave, "mem", (json_int_t)p->mem_bytes, "util", p->util, "weights",
                     weight_word(p->weights), "kv", cli_kv_word(p->kv), "index_kv",
                     index_word(p->index_kv), "ctx", (json_int_t)p->ctx, "seqs", p->seqs, "mtp",
                     p->mtp, "chunk", p->chunk, "threads", p->threads);
}

static json_t *json_model(const kvs_plan *p)
{
    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I}", "name",
                     p->model, "architecture", p->architecture, "layers", p->n_layer,
                     "index_layers", p->n_index_layer, "mtp_layers", p->n_mtp_layer, "heads",
                     p->n_head, "index_heads", p->n_index_head, "topk", p->topk, "max_ctx",
                     (json_int_t)p->max_ctx, "parameters", (json_int_t)p->n_param, "parameters_mtp",
                     (json_int_t)p->n_param_mtp, "checkpoint_bytes",
                     (json_int_t)p->checkpoint_bytes);
}

static json_t *json_token(const kvs_plan *p)
{
    return json_pack("{s:I, s:I, s:I, s:I}", "latent", (json_int_t)p->token_latent, "index",
                     (json_int_t)p->token_index, "draft", (json_int_t)p->token_draft, "total",
                     (json_int_t)p->token_bytes);
}

static json_t *json_rank(const kvs_plan *p)
{
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "usable", (json_int_t)p->usable_bytes,
        "weights", (json_int_t)p->weight_bytes, "weights_mtp", (json_int_t)p->weight_mtp,
        "weights_copies", (json_int_t)p->weight_copies, "workspace", (json_int_t)p->workspace_bytes,
        "cache", (json_int_t)p->cache_bytes, "page", (json_int_t)p->page_bytes, "pages",
        (json_int_t)p->n_page, "pool", (json_int_t)p->pool_bytes);
}

static json_t *json_process(const kvs_plan *p)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)p->process_weights,
                     "workspace", (json_int_t)p->process_workspace, "messages",
                     (json_int_t)p->process_messages, "cache", (json_int_t)p->process_cache,
                     "total", (json_int_t)p->process_bytes);
}

static json_t *json_fit(const kvs_plan *p)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "rank", (json_int_t)p->tokens_per_rank, "group",
                     (json_int_t)p->tokens_total, "replicas", (json_int_t)p->tokens_replicas,
                     "longest_ctx", (json_int_t)p->longest_ctx, "longest_ctx_each",
                     (json_int_t)p->longest_ctx_seqs);
}

static json_t *json_refusals(const kvs_plan *p)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < p->n_refusal; i++) {
        const kvs_plan_refusal *r = &p->refusal[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "rule", r->rule, "value",
                                              r->value, "why", r->why, "nearest", r->nearest));
    }
    return list;
}

static bool write_json(const kvs_plan *p, FILE *f)
{
    json_t *root = json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:{s:i, s:o, s:o}, s:o}", "model", json_model(p), "settings",
        json_settings(p), "token_bytes", json_token(p), "rank_bytes", json_rank(p), "process_bytes",
        json_process(p), "tokens", json_fit(p), "exchange", "rows", p->n_row, "a2a", json_exchange(&p->a2a, p->a2a_step),
        "ag_rs", json_exchange(&p->ag_rs, p->ag_rs_step), "refusals", json_refusals(p));
    const bool ok = root != NULL &&
                    json_dumpf(root, f, JSON_INDENT(2) | JSON_REAL_PRECISION(15)) == 0 &&
                    fputc('\n', f) != EOF;
    json_decref(root);
    return ok;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int show(const kvs_plan *p, const char *json_path)
{
    if (json_path == NULL || strcmp(json_path, "-") != 0) {
        print_page(p);
    }
    cli_output json;
    if (!cli_output_open(&json, json_path)) {
        return CLI_FAILED;
    }
    if (json_path != NULL && !write_json(p, json.f)) {
        cli_output_drop(&json);
        return cli_fail(CLI_FAILED, "no memory for the JSON to %s", json_path);
    }
    const int code = cli_output_commit(&json);
    if (code != CLI_OK || p->n_refusal == 0) {
        return code;
    }
    const kvs_plan_refusal *r = &p->refusal[0];
    return cli_fail(CLI_FAILED, "%s: %s%s%s", r->value, r->why,
                    r->nearest[0] != '\0' ? "; use " : "", r->nearest);
}

/* A config.json that is missing, malformed or of an unknown model is a refused input. */
static int code_of(kvs_status st)
{
    return st == KVS_IO || st == KVS_FORMAT || st == KVS_UNSUPPORTED ? CLI_INPUT
           : st == KVS_INVALID                                       ? CLI_USAGE
                                                                     : CLI_FAILED;
}

static void about_text(char *about, size_t cap)
{
    size_t n = (size_t)snprintf(about, cap,
                                "Works out what a model, its KV cache and a number of devices need "
                                "and what fits, without either.\nThe bytes are those that an engine "
                                "with these settings takes. For kvspan run on this\nmachine say "
                                "--tp as there: \"one process\" is what it comes to when the context "
                                "is full.\nExit code 1 when the settings would be refused. "
                                "Presets:\n ");
    for (int32_t i = 0; kvs_plan_preset(i) != NULL && n < cap; i++) {
        n += (size_t)snprintf(about + n, cap - n, "%s %s", i > 0 ? "," : "", kvs_plan_preset(i));
    }
}

int cli_plan(int argc, char **argv)
{
    char about[768];
    about_text(about, sizeof about);
    kvs_options *o = NULL;
    int code = cli_options(&o, "plan", argc, argv, k_usage, about);
    if (code >= 0) {
        return code;
    }
    code = cli_no_more_args(o, "plan", 0);
    if (code < 0) {
        const kvs_plan_config c = config_of(o);
        kvs_plan p = kvs_plan_empty();
        kvs_error err;
        const kvs_status st = kvs_plan_make(&p, &c, &err);
        code =
            st < 0 ? cli_fail_error(code_of(st), &err) : show(&p, kvs_options_text(o, "json", 0));
    }
    kvs_options_free(o);
    return code;
}
