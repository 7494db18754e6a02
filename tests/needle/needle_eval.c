/* needle_eval: one long text with eleven facts at depths 0 to 100 %, a question for each of them.
 *
 *   needle_eval --model DIR [--text FILE] [--tokens N] [--seed N] [--distractors N] [--tail BYTES]
 *               [--depths 0,50,100] [--tp N] [--dcp N] [--threads N] [--chunk N] [--mtp N] [--selection-last 1]
 *
 * Every question is a request of its own: the text, then the question. The engine keeps what it read for the one
 * before, so the text is read once. stdout: a JSON line for each answer, then one that sums up. An answer is right when
 * it starts with the six digits and no seventh follows. The text does not depend on --depths, which says what is asked.
 * Uses the public interface only. Ends with 0 when every question was answered, rightly or not.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvspan/kvspan.h>

#include "haystack.h"

enum { DEPTHS = 11, MAX_NEW = 8, MAX_TEXT = 256 };

typedef struct setting {
    haystack_recipe recipe;
    const char *model;
    int64_t tp, dcp, threads, chunk, mtp, selection_last;
    bool asked[DEPTHS];
} setting;

/* What one question brought. */
typedef struct reply {
    int32_t token[MAX_NEW];
    int32_t n;
    int64_t prompt, reused;
    uint64_t digest;
    char text[MAX_TEXT];
} reply;

static int fail(const char *what, const char *value)
{
    fprintf(stderr, "needle_eval: %s: %s\n", what, value);
    return 2;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int parse_depths(const char *list, setting *s)
{
    memset(s->asked, 0, sizeof s->asked);
    for (const char *at = list;; at++) {
        char *end = NULL;
        const long v = strtol(at, &end, 10);
        if (end == at || v < 0 || v > 100 || v % 10 != 0 || (*end != ',' && *end != 0))
            return fail("no list of tens from 0 to 100", list);
        s->asked[v / 10] = true;
        if (*end == 0)
            return 0;
        at = end;
    }
}

static int parse(int argc, char **argv, setting *s)
{
    int64_t seed = (int64_t)s->recipe.seed;
    const struct {
        const char *name;
        int64_t lo, hi, *out;
    } number[] = {{"--tokens", 600, 1 << 24, &s->recipe.tokens},
                  {"--seed", 0, INT64_MAX, &seed},
                  {"--distractors", 0, 4000, &s->recipe.distractors},
                  {"--tail", 0, 1 << 20, &s->recipe.tail},
                  {"--tp", 0, 128, &s->tp},
                  {"--dcp", 0, 8, &s->dcp},
                  {"--threads", 0, 1024, &s->threads},
                  {"--chunk", 0, 1 << 20, &s->chunk},
                  {"--mtp", 0, KVS_MAX_DRAFTS, &s->mtp},
                  {"--selection-last", 0, 1, &s->selection_last}};
    const size_t n_number = sizeof number / sizeof number[0];
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            return fail("no value", argv[i]);
        size_t k = 0;
        while (k < n_number && strcmp(argv[i], number[k].name) != 0)
            k++;
        if (strcmp(argv[i], "--text") == 0)
            s->recipe.file = argv[i + 1];
        else if (strcmp(argv[i], "--model") == 0)
            s->model = argv[i + 1];
        else if (strcmp(argv[i], "--depths") == 0 && parse_depths(argv[i + 1], s) != 0)
            return 2;
        else if (strcmp(argv[i], "--depths") != 0 && k == n_number)
            return fail("no such option", argv[i]);
        else if (k < n_number &&
                 !haystack_number(argv[i + 1], number[k].lo, number[k].hi, number[k].out))
            return fail("not a number in range", argv[i + 1]);
    }
    s->recipe.seed = (uint64_t)seed;
    return s->model ? 0 : fail("missing", "--model DIR");
}

static kvs_status open_engine(const setting *s, kvs_engine **e, kvs_error *err)
{
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = s->model;
    c.tp = (int32_t)s->tp;
    c.dcp = (int32_t)s->dcp;
    c.threads = (int32_t)s->threads;
    c.chunk = (int32_t)s->chunk;
    c.mtp = (int32_t)s->mtp;
    c.selection_last = (int32_t)s->selection_last;
    return kvs_engine_open(e, &c, err);
}

/* Steps until the request has ended. */
static kvs_status answer(kvs_engine *e, reply *a, kvs_error *err)
{
    for (kvs_status st = KVS_OK; st != KVS_IDLE;) {
        kvs_event ev[8];
        st = kvs_engine_step(e, err);
        if (st < 0)
            return st;
        for (int32_t n = 0; (n = kvs_engine_poll(e, ev, 8)) > 0;) {
            for (int32_t i = 0; i < n; i++) {
                if (ev[i].kind == KVS_EVENT_PREFILL) {
                    a->reused = ev[i].reused;
                } else if (ev[i].kind == KVS_EVENT_TOKEN && a->n < MAX_NEW) {
                    a->token[a->n++] = ev[i].token;
                    a->digest = ev[i].digest;
                } else if (ev[i].kind == KVS_EVENT_ERROR) {
                    *err = ev[i].error;
                    return KVS_INTERNAL;
                }
            }
        }
    }
    return KVS_OK;
}

/* The text with the question for fact k behind it; ids has room for all of it. */
static kvs_status ask(kvs_engine *e, const kvs_tokenizer *t, haystack *h, int32_t k, int32_t *ids,
                      reply *a, kvs_error *err)
{
    char question[HAYSTACK_QUESTION];
    const int size = haystack_question(h, k, question);
    char *text = malloc((size_t)h->n + (size_t)size);
    if (!text)
        return KVS_NOMEM;
    memcpy(text, h->byte, (size_t)h->n);
    memcpy(text + h->n, question, (size_t)size);
    const size_t n_text = (size_t)h->n + (size_t)size;
    size_t n = 0;
    uint64_t id = 0;
    kvs_status st =
        kvs_tokens_encode(t, text, n_text, KVS_ENCODE_TEMPLATE, ids, n_text + 16, &n, err);
    free(text);
    memset(a, 0, sizeof *a);
    a->prompt = (int64_t)n;
    kvs_request r = kvs_request_default();
    r.prompt = ids;
    r.n_prompt = (int64_t)n;
    r.max_new = MAX_NEW;
    if (st >= 0)
        st = kvs_engine_submit(e, &r, &id, err);
    if (st >= 0)
        st = answer(e, a, err);
    size_t n_out = 0;
    if (st >= 0)
        st = kvs_tokens_decode(t, a->token, (size_t)a->n, 1, a->text, MAX_TEXT - 1, &n_out, err);
    return st;
}

/* The digits that the answer starts with, spaces skipped. */
static void digits_of(const char *text, char out[16])
{
    size_t n = 0;
    text += strspn(text, " ");
    while (n < 15 && text[n] >= '0' && text[n] <= '9') {
        out[n] = text[n];
        n++;
    }
    out[n] = 0;
}

static void print_counts(const char *name, const uint64_t *after, const uint64_t *before, int64_t n)
{
    printf("\"%s\": [", name);
    for (int64_t i = 0; i < n; i++)
        printf("%s%" PRIu64, i ? ", " : "", after[i] - before[i]);
    printf("]");
}

/* Prints the line of one answer; returns whether it is right. */
static bool report(const setting *s, const haystack *h, int32_t k, const reply *a,
                   const kvs_engine_stats *before, const kvs_engine_stats *after)
{
    char want[16];
    char got[16];
    snprintf(want, sizeof want, "%06" PRIu32, h->fact[k].code);
    digits_of(a->text, got);
    const bool ok = strcmp(want, got) == 0;
    printf("{\"length\": %" PRId64 ", \"prompt_tokens\": %" PRId64 ", \"seed\": %" PRIu64
           ", \"tp\": %d, \"dcp\": %d, \"selection_last\": %" PRId64 ", \"depth\": %" PRId64
           ", \"name\": \"%s\", \"expected\": \"%s\", \"got\": \"%s\", \"ok\": %s, "
           "\"n_reused\": %" PRId64 ", \"prefill_s\": %.2f, \"decode_s\": %.3f, ",
           s->recipe.tokens, a->prompt, s->recipe.seed, after->tp, after->dcp, s->selection_last,
           s->recipe.depth[k], h->fact[k].name, want, got, ok ? "true" : "false", a->reused,
           after->prefill_s - before->prefill_s, after->decode_s - before->decode_s);
    print_counts("drafts", after->n_draft, before->n_draft, s->mtp);
    printf(", ");
    print_counts("accepted", after->n_accept, before->n_accept, s->mtp);
    printf(", \"logits_digest\": \"%016" PRIx64 "\"}\n", a->digest);
    fflush(stdout);
    return ok;
}

static kvs_status ask_all(const setting *s, kvs_engine *e, const kvs_tokenizer *t, haystack *h,
                          int32_t *ids, double began, kvs_error *err)
{
    static const uint64_t none[KVS_MAX_DRAFTS];
    int32_t right = 0;
    int32_t asked = 0;
    kvs_engine_stats after = kvs_engine_stats_empty();
    kvs_engine_get_stats(e, &after);
    for (int32_t k = 0; k < DEPTHS; k++) {
        if (!s->asked[k])
            continue;
        const kvs_engine_stats before = after;
        reply a;
        const kvs_status st = ask(e, t, h, k, ids, &a, err);
        if (st < 0)
            return st;
        kvs_engine_get_stats(e, &after);
        right += report(s, h, k, &a, &before, &after);
        asked++;
    }
    printf("{\"summary\": true, \"length\": %" PRId64 ", \"seed\": %" PRIu64
           ", \"tp\": %d, \"dcp\": %d, \"threads\": %d, \"chunk\": %d, \"selection_last\": %" PRId64
           ", \"asked\": %d, \"right\": %d, \"n_prefill\": %" PRIu64 ", \"n_reused\": %" PRIu64
           ", \"prefill_s\": %.2f, \"decode_s\": %.2f, \"all_s\": %.2f, ",
           s->recipe.tokens, s->recipe.seed, after.tp, after.dcp, after.threads, after.chunk,
           s->selection_last, asked, right, after.n_prefill, after.n_reused, after.prefill_s,
           after.decode_s, now() - began);
    print_counts("drafts", after.n_draft, none, s->mtp);
    printf(", ");
    print_counts("accepted", after.n_accept, none, s->mtp);
    printf(", \"kernels\": \"%s\"}\n", after.kernels);
    return KVS_OK;
}

int main(int argc, char **argv)
{
    setting s = {.recipe = {.tokens = 8192, .seed = 1, .distractors = 60, .n_wanted = DEPTHS},
                 .mtp = 3};
    const double began = now();
    char path[4096];
    for (int32_t k = 0; k < DEPTHS; k++) {
        s.recipe.depth[k] = 10 * k;
        s.asked[k] = true;
    }
    const int bad = parse(argc, argv, &s);
    if (bad)
        return bad;
    snprintf(path, sizeof path, "%s/text.txt", s.model);
    if (!s.recipe.file)
        s.recipe.file = path;
    haystack h;
    const int unmade = haystack_make(&h, &s.recipe, "needle_eval");
    if (unmade)
        return unmade;
    kvs_error err = {0};
    kvs_tokenizer *t = NULL;
    kvs_engine *e = NULL;
    int32_t *ids = malloc(((size_t)h.n + HAYSTACK_QUESTION + 16) * sizeof *ids);
    kvs_status st = ids ? kvs_tokenizer_open(&t, s.model, &err) : KVS_NOMEM;
    if (st >= 0)
        st = open_engine(&s, &e, &err);
    if (st >= 0)
        st = ask_all(&s, e, t, &h, ids, began, &err);
    kvs_engine_close(e);
    kvs_tokenizer_close(t);
    free(ids);
    haystack_free(&h);
    return st < 0 ? fail("cannot answer", err.text) : 0;
}
