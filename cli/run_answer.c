/* cli/run_answer.c - one answer: the prompt goes in, events come out, text is shown as it comes.
 *
 * A token counts while no stop text is complete: the tokens that a step of speculation brings behind it
 * are dropped, so ids, text and digest are the same with and without drafts. */
#include "cli/run.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_EVENT = 16 };

typedef struct work {
    run *r;
    run_answer *a;
    kvs_detok *d;
    kvs_stop *stop;
    char *piece; /* [bound] */
    size_t bound;
    uint64_t id;
    int64_t n_prompt;
    double t0_s;
    bool done, failed; /* the last event has come; something has been explained */
} work;

static bool fail(work *w, const kvs_error *err)
{
    cli_progress_wipe(&w->r->bar);
    cli_fail_error(CLI_FAILED, err);
    w->failed = true;
    return false;
}

static bool no_memory(work *w)
{
    cli_fail(CLI_FAILED, "no memory for the answer");
    w->failed = true;
    return false;
}

/* ---- text ------------------------------------------------------------------------------------ */

static void show(work *w, const char *text, size_t n)
{
    fwrite(text, 1, n, w->a->text_f);
    if (w->r->show && n > 0) {
        fwrite(text, 1, n, stdout);
        if (fflush(stdout) != 0) {
            w->failed = true; /* cli_close_stdout says why */
        }
    }
}

/* Passes text on; true when a stop text is complete. */
static bool feed(work *w, const char *text, size_t n)
{
    const char *out = NULL;
    size_t n_out = 0;
    const int found = kvs_stop_feed(w->stop, text, n, &out, &n_out);
    if (found < 0) {
        no_memory(w);
        return false;
    }
    show(w, out, n_out);
    return found == 1;
}

static bool add_text(work *w, int32_t token)
{
    kvs_error err;
    size_t n = 0;
    if (kvs_detok_push(w->d, token, w->piece, w->bound, &n, &err) < 0) {
        return fail(w, &err);
    }
    return feed(w, w->piece, n);
}

static void end_text(work *w)
{
    const char *out = NULL;
    size_t n = 0;
    if (kvs_detok_flush(w->d, w->piece, w->bound, &n, NULL) == KVS_OK && feed(w, w->piece, n)) {
        w->a->reason = KVS_FINISH_STOP;
    }
    kvs_stop_flush(w->stop, &out, &n);
    show(w, out, n);
    if (w->r->show && w->r->typed) {
        putchar('\n');
    }
    fflush(stdout);
}

/* ---- what is kept of a token ----------------------------------------------------------------- */

static bool keep_id(work *w, int32_t token)
{
    run_answer *a = w->a;
    if (a->n == a->cap) {
        const int64_t cap = a->cap > 0 ? 2 * a->cap : 256;
        int32_t *id = realloc(a->id, (size_t)cap * sizeof *id);
        if (id == NULL) {
            return no_memory(w);
        }
        a->id = id;
        a->cap = cap;
    }
    a->id[a->n++] = token;
    return true;
}

static void keep_logprobs(run_answer *a, const kvs_event *e)
{
    if (a->logprobs == NULL) {
        return;
    }
    json_t *top = json_array();
    for (int32_t i = 0; i < e->n_top; i++) {
        json_array_append_new(top, json_pack("[i, f]", e->top_token[i], e->top_logprob[i]));
    }
    json_array_append_new(a->logprobs, json_pack("{s:i, s:f, s:o}", "token", e->token, "logprob",
                                                 e->logprob, "top", top));
}

static void keep_layer(work *w, int32_t layer, int32_t n)
{
    run_answer *a = w->a;
    if (w->r->traced) {
        char name[16];
        snprintf(name, sizeof name, "%d", layer);
        json_t *list = json_object_get(a->selected, name);
        if (list == NULL) {
            list = json_array();
            json_object_set_new(a->selected, name, list);
        }
        json_t *row = json_array();
        for (int32_t i = 0; i < n; i++) {
            json_array_append_new(row, json_integer(a->ids[i]));
        }
        json_array_append_new(list, row);
    }
    run_found f = {.layer = layer, .total = n, .token = a->n};
    for (int32_t i = 0; i < n; i++) {
        f.n += a->ids[i] >= a->place.begin && a->ids[i] < a->place.end;
    }
    if (f.n > a->found[layer].n) {
        a->found[layer] = f;
    }
}

static void keep_selection(work *w, const kvs_event *e)
{
    run_answer *a = w->a;
    for (int32_t i = 0; a->ids != NULL && i < w->r->s.n_layer; i++) {
        const int32_t n = kvs_engine_selection(w->r->e, i, e->row, a->ids, w->r->s.topk);
        if (n >= 0) {
            keep_layer(w, i, n);
        }
    }
}

/* ---- events ---------------------------------------------------------------------------------- */

static double seconds(const kvs_engine_stats *s)
{
    return s->prefill_s + s->decode_s;
}

static void on_progress(work *w, const kvs_event *e)
{
    if (e->done == e->reused) {
        return; /* taken up; it has no speed yet */
    }
    kvs_engine_stats s = kvs_engine_stats_empty();
    kvs_engine_get_stats(w->r->e, &s);
    const double t = seconds(&s) - w->t0_s;
    char what[64];
    snprintf(what, sizeof what, "prompt %lld of %lld, %.0f tokens/s", (long long)e->done,
             (long long)e->total, t > 0 ? (double)(e->done - e->reused) / t : 0.0);
    cli_progress_step(&w->r->bar, what, e->done, e->total);
}

static void on_token(work *w, const kvs_event *e)
{
    run_answer *a = w->a;
    cli_progress_wipe(&w->r->bar);
    keep_selection(w, e);
    keep_logprobs(a, e);
    if (!keep_id(w, e->token) || !npy_row(&a->logits, e->logits)) {
        w->failed = true;
        return;
    }
    a->digest = e->digest;
    if (e->is_end == 0 && add_text(w, e->token)) {
        a->reason = KVS_FINISH_STOP;
        w->done = true;
    }
}

static void on_event(work *w, const kvs_event *e)
{
    if (e->request != w->id || w->done || w->failed) {
        return;
    }
    switch (e->kind) {
    case KVS_EVENT_PREFILL:
        on_progress(w, e);
        break;
    case KVS_EVENT_TOKEN:
        on_token(w, e);
        break;
    case KVS_EVENT_FINISH:
        w->a->reason = e->reason;
        w->done = true;
        break;
    case KVS_EVENT_ERROR:
        fail(w, &e->error);
        break;
    }
}

/* Steps until the answer is whole, and then until the engine is idle again. */
static void drive(work *w)
{
    kvs_event e[N_EVENT];
    kvs_error err;
    bool cancelled = false;
    for (;;) {
        if (!cancelled && (w->done || w->failed || cli_interrupted())) {
            kvs_engine_cancel(w->r->e, w->id);
            cancelled = true;
        }
        const kvs_status st = kvs_engine_step(w->r->e, &err);
        for (int32_t n = 0; (n = kvs_engine_poll(w->r->e, e, N_EVENT)) > 0;) {
            for (int32_t i = 0; i < n; i++) {
                on_event(w, &e[i]);
            }
        }
        if (st < 0 && !w->failed) {
            fail(w, &err);
        }
        if (st != KVS_OK) {
            return;
        }
    }
}

/* ---- a request ------------------------------------------------------------------------------- */

static bool submit(work *w, const int32_t *prompt, int64_t n_prompt)
{
    const kvs_options *o = w->r->o;
    const int64_t max_new = kvs_options_int(o, "max-new", 0);
    kvs_request q = kvs_request_default();
    q.prompt = prompt;
    q.n_prompt = n_prompt;
    q.max_new = max_new > 0 ? max_new : 0;
    q.temp = kvs_options_real(o, "temp", 0);
    q.top_k = (int32_t)kvs_options_int(o, "top-k", 0);
    q.top_p = kvs_options_real(o, "top-p", 0);
    q.min_p = kvs_options_real(o, "min-p", 0);
    q.repeat_penalty = kvs_options_real(o, "repeat-penalty", 0);
    q.seed = (uint64_t)kvs_options_int(o, "seed", 0);
    q.ignore_eos = kvs_options_flag(o, "ignore-eos");
    q.logprobs = (int32_t)kvs_options_int(o, "logprobs", 0);
    kvs_error err;
    return kvs_engine_submit(w->r->e, &q, &w->id, &err) == KVS_OK ? true : fail(w, &err);
}

static bool prepare(work *w, run_place place)
{
    run *r = w->r;
    run_answer *a = w->a;
    const kvs_options *o = r->o;
    const char *stop[KVS_MAX_STOP_TEXTS + 1];
    const int32_t n_stop = kvs_options_count(o, "stop");
    for (int32_t i = 0; i < n_stop && i <= KVS_MAX_STOP_TEXTS; i++) {
        stop[i] = kvs_options_text(o, "stop", i);
    }
    kvs_error err;
    if (kvs_stop_new(&w->stop, stop, n_stop, &err) < 0 || kvs_detok_new(&w->d, r->t, 1, &err) < 0) {
        return fail(w, &err);
    }
    w->bound = kvs_detok_bound(w->d);
    w->piece = malloc(w->bound + 1);
    a->text_f = open_memstream(&a->text, &a->n_text);
    a->place = place;
    const bool trace = r->traced || place.begin >= 0;
    a->found = calloc((size_t)r->s.n_layer + 1, sizeof *a->found);
    a->ids = trace ? calloc((size_t)r->s.topk + 1, sizeof *a->ids) : NULL;
    a->selected = r->traced ? json_object() : NULL;
    a->logprobs = kvs_options_int(o, "logprobs", 0) > 0 ? json_array() : NULL;
    if (w->piece == NULL || a->text_f == NULL || a->found == NULL || (trace && a->ids == NULL)) {
        return no_memory(w);
    }
    if (!npy_open(&a->logits, kvs_options_text(o, "logits", 0), r->s.vocab)) {
        w->failed = true;
        return false;
    }
    return true;
}

static void close_answer(work *w)
{
    run_answer *a = w->a;
    a->after = kvs_engine_stats_empty();
    kvs_engine_get_stats(w->r->e, &a->after);
    a->prefill_s = a->after.prefill_s - a->before.prefill_s;
    a->decode_s = a->after.decode_s - a->before.decode_s;
    if (a->text_f != NULL) {
        fclose(a->text_f);
        a->text_f = NULL;
    }
    if (w->failed) {
        npy_drop(&a->logits);
    } else if (!npy_commit(&a->logits)) {
        w->failed = true;
    }
    kvs_stop_free(w->stop);
    kvs_detok_free(w->d);
    free(w->piece);
}

int run_answer_make(run *r, const int32_t *prompt, int64_t n_prompt, run_place place, run_answer *a)
{
    *a = (run_answer){.before = kvs_engine_stats_empty()};
    kvs_engine_get_stats(r->e, &a->before);
    work w = {.r = r, .a = a, .n_prompt = n_prompt, .t0_s = seconds(&a->before)};
    cli_progress_begin(&r->bar);
    if (prepare(&w, place) && submit(&w, prompt, n_prompt)) {
        drive(&w);
        cli_progress_wipe(&r->bar);
        end_text(&w);
    }
    close_answer(&w);
    return w.failed ? CLI_FAILED : a->reason == KVS_FINISH_INTERRUPTED ? CLI_INTERRUPTED : CLI_OK;
}

void run_answer_free(run_answer *a)
{
    json_decref(a->logprobs);
    json_decref(a->selected);
    npy_drop(&a->logits);
    free(a->found);
    free(a->ids);
    free(a->text);
    free(a->id);
    *a = (run_answer){0};
}
