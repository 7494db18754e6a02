/* cli/run_report.c - what an answer cost: lines for people, JSON for programs. */
#include "cli/run.h"

#include <inttypes.h>
#include <string.h>
#include <sys/resource.h>

/* ---- figures --------------------------------------------------------------------------------- */

static double per_s(uint64_t n, double s)
{
    return s > 0.0 ? (double)n / s : 0.0;
}

static int64_t peak_rss(void)
{
    struct rusage u;
    return getrusage(RUSAGE_SELF, &u) == 0 ? (int64_t)u.ru_maxrss * 1024 : 0;
}

/* Differences of the counters over the answer. */
typedef struct delta {
    uint64_t prefill, reused, decode, verify;
    double accept[KVS_MAX_DRAFTS]; /* share of the i-th drafts that were accepted */
    double per_step;               /* tokens of a decode step                     */
} delta;

static delta delta_of(const run_answer *a)
{
    const kvs_engine_stats *x = &a->before, *y = &a->after;
    delta d = {.prefill = y->n_prefill - x->n_prefill,
               .reused = y->n_reused - x->n_reused,
               .decode = y->n_decode - x->n_decode,
               .verify = y->n_verify - x->n_verify};
    for (int i = 0; i < KVS_MAX_DRAFTS; i++) {
        const uint64_t n = y->n_draft[i] - x->n_draft[i];
        d.accept[i] = n > 0 ? (double)(y->n_accept[i] - x->n_accept[i]) / (double)n : 0.0;
    }
    d.per_step = d.verify > 0 ? (double)d.decode / (double)d.verify : 0.0;
    return d;
}

static const char *exchange_word(kvs_exchange x)
{
    return x == KVS_EXCHANGE_AG_RS ? "ag_rs" : "a2a";
}

static const char *index_word(const kvs_engine_stats *s)
{
    return s->topk == 0 ? "none" : s->index_kv == KVS_INDEX_F32 ? "f32" : "fp8";
}

/* ---- lines ----------------------------------------------------------------------------------- */

static void size_text(char *buf, size_t cap, int64_t bytes)
{
    if (bytes < 1000000) {
        snprintf(buf, cap, "%.1f kB", (double)bytes / 1e3);
    } else if (bytes < 1000000000) {
        snprintf(buf, cap, "%.1f MB", (double)bytes / 1e6);
    } else {
        snprintf(buf, cap, "%.2f GB", (double)bytes / 1e9);
    }
}

static bool same_found(const run_found *a, const run_found *b)
{
    return a->n == b->n && a->total == b->total && a->token == b->token;
}

static void report_place(const run *r, const run_answer *a)
{
    if (a->place.begin < 0) {
        return;
    }
    const long long size = a->place.end - a->place.begin;
    fprintf(stderr,
            "The text to locate is at positions %" PRId64 " to %" PRId64 " of the prompt.\n",
            a->place.begin, a->place.end - 1);
    int n = 0;
    for (int32_t i = 0; i < r->s.n_layer; i++) {
        const run_found *f = &a->found[i];
        int32_t last = i; /* layers that share a selection are one line */
        while (last + 1 < r->s.n_layer && same_found(f, &a->found[last + 1])) {
            last++;
        }
        if (f->n > 0) {
            char layers[40];
            n++;
            snprintf(layers, sizeof layers, last > i ? "layers %d to %d" : "layer %d", i, last);
            fprintf(stderr,
                    "  %s: %d of its %lld tokens were among the %d selected when token %lld of the "
                    "answer was written\n",
                    layers, f->n, size, f->total, (long long)f->token + 1);
        }
        i = last;
    }
    if (n == 0) {
        fputs(r->s.topk > 0 ? "  no layer selected any of it\n"
                            : "  this model attends every position; nothing is selected\n",
              stderr);
    }
}

static void report_stats(const run_answer *a)
{
    const kvs_engine_stats *s = &a->after;
    const delta d = delta_of(a);
    char one[32], latent[32], index[32], draft[32], weights[32], rss[32];
    fprintf(stderr, "prompt   %" PRIu64 " tokens in %.2f s, %.1f tokens/s", d.prefill, a->prefill_s,
            per_s(d.prefill, a->prefill_s));
    if (d.reused > 0) {
        fprintf(stderr, "; %" PRIu64 " before them were in the cache", d.reused);
    }
    fputc('\n', stderr);
    fprintf(stderr,
            "answer   %" PRId64 " tokens (%s); %" PRIu64 " by decode in %.2f s, %.1f tokens/s\n",
            a->n, kvs_finish_name(a->reason), d.decode, a->decode_s, per_s(d.decode, a->decode_s));
    if (s->mtp > 0) {
        fprintf(stderr, "drafts   up to %d a step, accepted by position", s->mtp);
        for (int32_t i = 0; i < s->mtp; i++) {
            fprintf(stderr, " %.2f", d.accept[i]);
        }
        fprintf(stderr, "; %.2f tokens a step\n", d.per_step);
    }
    size_text(one, sizeof one, s->cache_latent + s->cache_index + s->cache_draft);
    size_text(latent, sizeof latent, s->cache_latent);
    size_text(index, sizeof index, s->cache_index);
    size_text(draft, sizeof draft, s->cache_draft);
    size_text(weights, sizeof weights, s->weights);
    size_text(rss, sizeof rss, peak_rss());
    fprintf(stderr, "cache    %s on %s%d rank%s: latent %s, index %s, draft %s; kv %s, index %s\n",
            one, s->tp == 1 ? "" : "each of ", s->tp, s->tp == 1 ? "" : "s", latent, index, draft,
            cli_kv_word(s->kv), index_word(s));
    fprintf(stderr, "ranks    tp %d, dcp %d, interleave %d, %d thread%s each, %s, %s\n", s->tp,
            s->dcp, s->interleave, s->threads, s->threads == 1 ? "" : "s", s->transport,
            exchange_word(s->exchange));
    fprintf(stderr, "memory   weights %s, peak %s; loaded in %.2f s\n", weights, rss, s->load_s);
}

void run_report(const run *r, const run_answer *a)
{
    fflush(stdout);
    report_place(r, a);
    if (kvs_options_flag(r->o, "stats")) {
        report_stats(a);
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_ids(const int32_t *id, int64_t n)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) {
        json_array_append_new(list, json_integer(id[i]));
    }
    return list;
}

/* "op=variant,..." as an object. */
static json_t *json_kernels(const char *text)
{
    json_t *all = json_object();
    while (*text != '\0') {
        const size_t n = strcspn(text, ",");
        const size_t k = strcspn(text, "=");
        char op[64];
        if (k < n && k < sizeof op) {
            memcpy(op, text, k);
            op[k] = '\0';
            json_object_set_new(all, op, json_stringn(text + k + 1, n - k - 1));
        }
        text += n + (text[n] == ',');
    }
    return all;
}

static json_t *json_accept(const run_answer *a)
{
    const delta d = delta_of(a);
    json_t *list = json_array();
    for (int32_t i = 0; i < a->after.mtp; i++) {
        json_array_append_new(list, json_real(d.accept[i]));
    }
    return list;
}

static json_t *json_ranks(const kvs_engine_stats *s)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < s->tp; i++) {
        json_array_append_new(list,
                              json_integer(s->cache_latent + s->cache_index + s->cache_draft));
    }
    return list;
}

static json_t *json_answer(const int32_t *prompt, int64_t n_prompt, const run_answer *a)
{
    char digest[17];
    snprintf(digest, sizeof digest, "%016" PRIx64, a->digest);
    return json_pack("{s:s, s:I, s:I, s:o, s:I, s:o, s:o, s:s, s:o}", "model", a->after.model,
                     "prompt_tokens", (json_int_t)n_prompt, "reused_tokens",
                     (json_int_t)delta_of(a).reused, "prompt_ids", json_ids(prompt, n_prompt),
                     "output_tokens", (json_int_t)a->n, "token_ids", json_ids(a->id, a->n), "text",
                     json_stringn(a->text, a->n_text), "finish_reason", kvs_finish_name(a->reason),
                     "logits_digest", a->n > 0 ? json_string(digest) : json_null());
}

static json_t *json_settings(const kvs_engine_stats *s)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:o, s:s, s:s, s:i, s:i, s:I}", "tp",
                     s->tp, "dcp", s->dcp, "interleave", s->interleave, "ep", s->ep, "threads",
                     s->threads, "transport", s->transport, "exchange", exchange_word(s->exchange),
                     "kernels", json_kernels(s->kernels), "kv", cli_kv_word(s->kv), "index_kv",
                     index_word(s), "mtp", s->mtp, "chunk", s->chunk, "ctx", (json_int_t)s->ctx);
}

/* Over the group: each DCP group holds the whole cache once. */
static json_t *json_cost(const run_answer *a)
{
    const kvs_engine_stats *s = &a->after;
    const delta d = delta_of(a);
    return json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:{s:I, s:I, s:I}, s:o, s:I, s:I}", "load_s",
        s->load_s, "prefill_s", a->prefill_s, "decode_s", a->decode_s, "prefill_tok_per_s",
        per_s(d.prefill, a->prefill_s), "decode_tok_per_s", per_s(d.decode, a->decode_s),
        "accepted_per_step", d.per_step, "accept_by_position", json_accept(a), "cache_bytes",
        "latent", (json_int_t)(s->cache_latent * s->tp), "index",
        (json_int_t)(s->cache_index * s->tp), "draft", (json_int_t)(s->cache_draft * s->tp),
        "cache_bytes_per_rank", json_ranks(s), "peak_rss_bytes", (json_int_t)peak_rss(),
        "weight_bytes", (json_int_t)s->weights);
}

static json_t *json_place(const run *r, const run_answer *a)
{
    json_t *layers = json_object();
    for (int32_t i = 0; i < r->s.n_layer; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        if (a->found[i].n > 0) {
            json_object_set_new(layers, name, json_integer(a->found[i].n));
        }
    }
    return json_pack("{s:I, s:I, s:o}", "begin", (json_int_t)a->place.begin, "end",
                     (json_int_t)a->place.end, "attended", layers);
}

/* A line for each member, so that long lists do not take one for each value. */
static bool write_object(const json_t *root, FILE *f)
{
    const char *key = NULL;
    json_t *value = NULL;
    const char *sep = "{\n";
    bool ok = true;
    json_object_foreach((json_t *)(uintptr_t)root, key, value)
    {
        ok = ok && fprintf(f, "%s  \"%s\": ", sep, key) > 0 &&
             json_dumpf(value, f, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15)) == 0;
        sep = ",\n";
    }
    return ok && fputs("\n}\n", f) != EOF;
}

bool run_json(const run *r, const int32_t *prompt, int64_t n_prompt, const run_answer *a, FILE *f)
{
    json_t *root = json_answer(prompt, n_prompt, a);
    json_t *settings = json_settings(&a->after);
    json_t *cost = json_cost(a);
    bool ok = root != NULL && settings != NULL && cost != NULL &&
              json_object_update(root, settings) == 0 && json_object_update(root, cost) == 0;
    json_decref(settings);
    json_decref(cost);
    if (ok && a->selected != NULL) {
        ok = json_object_set(root, "selected", a->selected) == 0;
    }
    if (ok && a->logprobs != NULL) {
        ok = json_object_set(root, "logprobs", a->logprobs) == 0;
    }
    if (ok && a->place.begin >= 0) {
        ok = json_object_set_new(root, "located", json_place(r, a)) == 0;
    }
    ok = ok && write_object(root, f);
    json_decref(root);
    return ok;
}
