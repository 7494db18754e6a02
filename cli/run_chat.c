/* cli/run_chat.c - a conversation at a terminal.
 *
 * Every turn renders the whole conversation and answers it; the engine reads what is new of it. Ctrl-C ends the
 * answer that is being given, which stays part of the conversation as far as it came; at the prompt it drops the
 * line. The end of the input (Ctrl-D) ends the program. */
#include "cli/run.h"

#include <stdlib.h>
#include <string.h>

typedef struct talk {
    run *r;
    kvs_chat_message *msg; /* [n]; texts owned */
    int32_t n, cap;
} talk;

static bool add(talk *t, kvs_chat_role role, const char *content, const char *reasoning)
{
    if (t->n == t->cap) {
        const int32_t cap = t->cap > 0 ? 2 * t->cap : 16;
        kvs_chat_message *m = realloc(t->msg, (size_t)cap * sizeof *m);
        if (m == NULL) {
            return false;
        }
        t->msg = m;
        t->cap = cap;
    }
    char *c = strdup(content);
    char *why = reasoning != NULL && reasoning[0] != '\0' ? strdup(reasoning) : NULL;
    t->msg[t->n] = (kvs_chat_message){.role = role, .content = c, .reasoning = why};
    t->n++;
    return c != NULL;
}

static void drop_last(talk *t)
{
    t->n--;
    free((char *)(uintptr_t)t->msg[t->n].content);
    free((char *)(uintptr_t)t->msg[t->n].reasoning);
}

/* The answer taken apart, as the next turn's history holds it. */
static bool keep_answer(talk *t, const run_answer *a, int32_t thinks)
{
    kvs_chat_family family = KVS_CHAT_NONE;
    kvs_chat_answer *parsed = NULL;
    size_t n = 0;
    kvs_chat_family_find(&family, t->r->s.chat, NULL);
    kvs_tokens_decode(t->r->t, a->id, (size_t)a->n, 0, NULL, 0, &n, NULL);
    char *text = malloc(n + 1);
    bool ok = text != NULL &&
              kvs_tokens_decode(t->r->t, a->id, (size_t)a->n, 0, text, n, &n, NULL) == KVS_OK;
    ok = ok && kvs_chat_parse(&parsed, family, thinks, NULL, text, n, NULL) == KVS_OK;
    ok = ok && add(t, KVS_CHAT_ASSISTANT, kvs_chat_answer_content(parsed),
                   kvs_chat_answer_reasoning(parsed));
    kvs_chat_answer_free(parsed);
    free(text);
    return ok;
}

/* Answers the conversation so far. A refused turn is taken back, and the talk goes on. */
static int turn(talk *t)
{
    int32_t *ids = NULL;
    int64_t n = 0;
    int32_t thinks = 0;
    int code = run_encode_chat(t->r, t->msg, t->n, &ids, &n, &thinks);
    if (code == CLI_OK) {
        run_answer a;
        const run_place nowhere = {-1, -1};
        code = run_answer_make(t->r, ids, n, nowhere, &a);
        if (code == CLI_OK || code == CLI_INTERRUPTED) {
            run_report(t->r, &a);
            code = keep_answer(t, &a, thinks) ? CLI_OK
                                              : cli_fail(CLI_FAILED, "no memory for the answer");
        } else {
            drop_last(t);
            code = CLI_OK;
        }
        run_answer_free(&a);
    } else {
        drop_last(t);
        code = CLI_OK;
    }
    free(ids);
    return code;
}

/* What would refuse every turn is said before the first one is typed. */
static int can_talk(const run *r, const char *system)
{
    const kvs_chat_message msg[2] = {{.role = KVS_CHAT_SYSTEM, .content = system},
                                     {.role = KVS_CHAT_USER, .content = "?"}};
    const int32_t first = system != NULL ? 0 : 1;
    int32_t *ids = NULL;
    int64_t n = 0;
    int32_t thinks = 0;
    const int code = run_encode_chat(r, msg + first, 2 - first, &ids, &n, &thinks);
    free(ids);
    return code;
}

int run_chat(run *r)
{
    if (kvs_options_text(r->o, "json", 0) != NULL || kvs_options_text(r->o, "logits", 0) != NULL ||
        kvs_options_text(r->o, "locate", 0) != NULL) {
        return cli_fail(CLI_USAGE, "--json, --logits and --locate take one answer: give -p or -f");
    }
    const char *system = kvs_options_text(r->o, "system", 0);
    int code = can_talk(r, system);
    if (code != CLI_OK) {
        return code;
    }
    talk t = {.r = r};
    line_reader *l = line_open("> ");
    if (l == NULL) {
        return cli_fail(CLI_FAILED, "no memory for the conversation");
    }
    bool ok = system == NULL || add(&t, KVS_CHAT_SYSTEM, system, NULL);
    fprintf(stderr, "%s: Ctrl-C stops an answer, Ctrl-D ends.\n", r->s.model);
    code = ok ? CLI_OK : cli_fail(CLI_FAILED, "no memory for the conversation");
    while (code == CLI_OK) {
        bool interrupted = false;
        cli_rearm_interrupt();
        const char *line = line_read(l, &interrupted);
        if (line == NULL && !interrupted) {
            fputc('\n', stderr);
            break;
        }
        if (line == NULL) {
            fputc('\n', stderr);
            continue;
        }
        if (line[0] != '\0') {
            code = add(&t, KVS_CHAT_USER, line, NULL)
                       ? turn(&t)
                       : cli_fail(CLI_FAILED, "no memory for the conversation");
        }
    }
    line_close(l);
    while (t.n > 0) {
        drop_last(&t);
    }
    free(t.msg);
    return code;
}
