/* text/chat_glm.c - prompts of GLM-5, 5.1 and 5.2.
 *
 * The mark-up is the models'; the sentences around the tool schemas are this library's. */
#include <string.h>

#include "text/chat.h"

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Content without the white space around it. */
static void trimmed(kvs_chat_prompt *p, const char *s)
{
    while (is_space(*s)) {
        s++;
    }
    size_t n = strlen(s);
    while (n > 0 && is_space(s[n - 1])) {
        n--;
    }
    chat_bytes(p, s, n);
}

static void tools_section(kvs_chat_prompt *p, const chat_setup *s)
{
    chat_special(p, "<|system|>");
    chat_text(
        p, "\n# Tools\n\nThe functions below may be called to help with the user's request. Their "
           "schemas, one to a line:\n<tools>\n");
    for (size_t i = 0; i < json_array_size(s->entries); i++) {
        chat_json(p, json_array_get(s->entries, i));
        chat_text(p, "\n");
    }
    chat_text(p,
              "</tools>\n\nA call is written as the function's name followed by its arguments:\n");
    chat_special(p, "<tool_call>");
    chat_text(p, "{name}");
    for (int i = 1; i <= 2; i++) {
        chat_special(p, "<arg_key>");
        chat_text(p, i == 1 ? "{key 1}" : "{key 2}");
        chat_special(p, "</arg_key>");
        chat_special(p, "<arg_value>");
        chat_text(p, i == 1 ? "{value 1}" : "{value 2}");
        chat_special(p, "</arg_value>");
    }
    chat_text(p, "...");
    chat_special(p, "</tool_call>");
}

static kvs_status add_call(kvs_chat_prompt *p, const kvs_chat_call *call, int32_t i_msg,
                           kvs_error *err)
{
    json_t *args = NULL;
    const kvs_status st = chat_arguments(&args, call, i_msg, err);
    if (st < 0) {
        return st;
    }
    chat_special(p, "<tool_call>");
    chat_text(p, call->name);
    for (void *it = json_object_iter(args); it != NULL; it = json_object_iter_next(args, it)) {
        const json_t *v = json_object_iter_value(it);
        chat_special(p, "<arg_key>");
        chat_text(p, json_object_iter_key(it));
        chat_special(p, "</arg_key>");
        chat_special(p, "<arg_value>");
        if (json_is_string(v)) {
            chat_bytes(p, json_string_value(v), json_string_length(v));
        } else {
            chat_json(p, v);
        }
        chat_special(p, "</arg_value>");
    }
    chat_special(p, "</tool_call>");
    json_decref(args);
    return KVS_OK;
}

/* What stands for thinking that is left out or was none. */
static void no_thinking(kvs_chat_prompt *p, const chat_setup *s)
{
    if (s->family == KVS_CHAT_GLM52) {
        chat_special(p, "<think>");
    }
    chat_special(p, "</think>");
}

static kvs_status assistant(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *m,
                            int32_t i_msg, bool keep, kvs_error *err)
{
    chat_special(p, "<|assistant|>");
    if (keep && m->reasoning != NULL && m->reasoning[0] != '\0') {
        chat_special(p, "<think>");
        trimmed(p, m->reasoning);
        chat_special(p, "</think>");
    } else {
        no_thinking(p, s);
    }
    trimmed(p, chat_str(m->content));
    for (int32_t c = 0; c < m->n_call; c++) {
        const kvs_status st = add_call(p, &m->calls[c], i_msg, err);
        if (st < 0) {
            return st;
        }
    }
    return KVS_OK;
}

kvs_status chat_render_glm(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                           int32_t n, kvs_error *err)
{
    chat_special(p, "[gMASK]");
    chat_special(p, "<sop>");
    if (s->family == KVS_CHAT_GLM52 && s->think) {
        chat_special(p, "<|system|>");
        chat_text(p, s->effort_high ? "Reasoning Effort: High" : "Reasoning Effort: Max");
    }
    if (s->tools != NULL) {
        tools_section(p, s);
    }
    const int32_t last_user = chat_last_user(msg, n);
    for (int32_t i = 0; i < n; i++) {
        const kvs_chat_message *m = &msg[i];
        if (m->role == KVS_CHAT_ASSISTANT) {
            const kvs_status st = assistant(p, s, m, i, s->keep_reasoning || i > last_user, err);
            if (st < 0) {
                return st;
            }
        } else if (m->role == KVS_CHAT_TOOL) {
            if (i == 0 || msg[i - 1].role != KVS_CHAT_TOOL) {
                chat_special(p, "<|observation|>");
            }
            chat_special(p, "<tool_response>");
            chat_text(p, chat_str(m->content));
            chat_special(p, "</tool_response>");
        } else {
            chat_special(p, m->role == KVS_CHAT_SYSTEM ? "<|system|>" : "<|user|>");
            chat_text(p, chat_str(m->content));
        }
    }
    if (s->prompt) {
        chat_special(p, "<|assistant|>");
        if (s->think) {
            chat_special(p, "<think>");
            p->thinks = true;
        } else {
            no_thinking(p, s);
        }
    }
    return KVS_OK;
}
