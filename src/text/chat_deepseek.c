/* text/chat_deepseek.c - prompts of DeepSeek-V2, V3, R1, V3.1 and V3.2.
 *
 * The mark-up is the models'; the sentences around the tool schemas are this library's. */
#include <string.h>

#include "text/chat.h"

#define BOS          "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
#define EOS          "<\uff5cend\u2581of\u2581sentence\uff5c>"
#define USER         "<\uff5cUser\uff5c>"
#define ASSISTANT    "<\uff5cAssistant\uff5c>"
#define CALLS_BEGIN  "<\uff5ctool\u2581calls\u2581begin\uff5c>"
#define CALLS_END    "<\uff5ctool\u2581calls\u2581end\uff5c>"
#define CALL_BEGIN   "<\uff5ctool\u2581call\u2581begin\uff5c>"
#define CALL_END     "<\uff5ctool\u2581call\u2581end\uff5c>"
#define CALL_SEP     "<\uff5ctool\u2581sep\uff5c>"
#define OUTPUT_BEGIN "<\uff5ctool\u2581output\u2581begin\uff5c>"
#define OUTPUT_END   "<\uff5ctool\u2581output\u2581end\uff5c>"
#define DSML         "\uff5cDSML\uff5c" /* the token; the angle brackets around it are text */

/* What follows the reasoning that a caller left in the content of a past answer. */
static const char *answer_of(const kvs_chat_message *m)
{
    const char *s = chat_str(m->content);
    for (const char *end = strstr(s, "</think>"); end != NULL; end = strstr(s, "</think>")) {
        s = end + strlen("</think>");
    }
    return s;
}

/* All system texts, a blank line between. */
static void systems(kvs_chat_prompt *p, const kvs_chat_message *msg, int32_t n)
{
    const char *between = "";
    for (int32_t i = 0; i < n; i++) {
        if (msg[i].role == KVS_CHAT_SYSTEM) {
            chat_text(p, between);
            chat_text(p, chat_str(msg[i].content));
            between = "\n\n";
        }
    }
}

static bool has_system(const kvs_chat_message *msg, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (msg[i].role == KVS_CHAT_SYSTEM) {
            return true;
        }
    }
    return false;
}

static void render_v2(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                      int32_t n)
{
    chat_special(p, BOS);
    systems(p, msg, n);
    if (has_system(msg, n)) {
        chat_text(p, "\n\n");
    }
    for (int32_t i = 0; i < n; i++) {
        if (msg[i].role == KVS_CHAT_USER) {
            chat_text(p, "User: ");
            chat_text(p, chat_str(msg[i].content));
            chat_text(p, "\n\n");
        } else if (msg[i].role == KVS_CHAT_ASSISTANT) {
            chat_text(p, "Assistant: ");
            chat_text(p, chat_str(msg[i].content));
            chat_special(p, EOS);
        }
    }
    if (s->prompt) {
        chat_text(p, "Assistant:");
    }
}

static void render_v3(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                      int32_t n)
{
    const bool r1 = s->family == KVS_CHAT_R1;
    chat_special(p, BOS);
    systems(p, msg, n);
    for (int32_t i = 0; i < n; i++) {
        if (msg[i].role == KVS_CHAT_USER) {
            chat_special(p, USER);
            chat_text(p, chat_str(msg[i].content));
        } else if (msg[i].role == KVS_CHAT_ASSISTANT) {
            chat_special(p, ASSISTANT);
            chat_text(p, r1 ? answer_of(&msg[i]) : chat_str(msg[i].content));
            chat_special(p, EOS);
        }
    }
    if (s->prompt) {
        chat_special(p, ASSISTANT);
        if (r1) {
            chat_special(p, "<think>");
            chat_text(p, "\n");
            p->thinks = true;
        }
    }
}

static void tools_v31(kvs_chat_prompt *p, const chat_setup *s)
{
    chat_text(p,
              "## Tools\n\nThe functions below may be called to help with the user's request.\n");
    for (size_t i = 0; i < json_array_size(s->tools); i++) {
        const json_t *f = json_array_get(s->tools, i);
        const char *say = json_string_value(json_object_get(f, "description"));
        const json_t *params = json_object_get(f, "parameters");
        chat_text(p, "\n### ");
        chat_text(p, json_string_value(json_object_get(f, "name")));
        chat_text(p, "\nDescription: ");
        chat_text(p, chat_str(say));
        chat_text(p, "\nParameters: ");
        if (params != NULL) {
            chat_json(p, params);
        } else {
            chat_text(p, "{}");
        }
        chat_text(p, "\n");
    }
    chat_text(p, "\nA call is written as\n");
    chat_special(p, CALLS_BEGIN);
    chat_special(p, CALL_BEGIN);
    chat_text(p, "{name}");
    chat_special(p, CALL_SEP);
    chat_text(p, "{arguments as JSON}");
    chat_special(p, CALL_END);
    chat_special(p, CALLS_END);
}

static void calls_v31(kvs_chat_prompt *p, const kvs_chat_message *m)
{
    if (m->n_call == 0) {
        return;
    }
    chat_special(p, CALLS_BEGIN);
    for (int32_t c = 0; c < m->n_call; c++) {
        chat_special(p, CALL_BEGIN);
        chat_text(p, m->calls[c].name);
        chat_special(p, CALL_SEP);
        chat_text(p, m->calls[c].arguments);
        chat_special(p, CALL_END);
    }
    chat_special(p, CALLS_END);
}

static void render_v31(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                       int32_t n)
{
    chat_special(p, BOS);
    systems(p, msg, n);
    if (s->tools != NULL) {
        chat_text(p, has_system(msg, n) ? "\n\n" : "");
        tools_v31(p, s);
    }
    bool after_tool = false;
    for (int32_t i = 0; i < n; i++) {
        const kvs_chat_message *m = &msg[i];
        if (m->role == KVS_CHAT_USER) {
            chat_special(p, USER);
            chat_text(p, chat_str(m->content));
        } else if (m->role == KVS_CHAT_ASSISTANT) {
            /* after a tool's result the answer just goes on */
            if (!after_tool) {
                chat_special(p, ASSISTANT);
                chat_special(p, "</think>");
            }
            chat_text(p, answer_of(m));
            calls_v31(p, m);
            chat_special(p, EOS);
        } else if (m->role == KVS_CHAT_TOOL) {
            chat_special(p, OUTPUT_BEGIN);
            chat_text(p, chat_str(m->content));
            chat_special(p, OUTPUT_END);
        }
        if (m->role != KVS_CHAT_SYSTEM) {
            after_tool = m->role == KVS_CHAT_TOOL;
        }
    }
    if (s->prompt && !after_tool) {
        chat_special(p, ASSISTANT);
        chat_special(p, s->think ? "<think>" : "</think>");
        p->thinks = s->think;
    }
}

static void dsml(kvs_chat_prompt *p, const char *before, const char *after)
{
    chat_text(p, before);
    chat_special(p, DSML);
    chat_text(p, after);
}

static void tools_v32(kvs_chat_prompt *p, const chat_setup *s)
{
    chat_text(
        p,
        "## Tools\n\nThe functions below may be called to help with the user's request. A block of "
        "calls is written as:\n");
    dsml(p, "<", "function_calls>\n");
    dsml(p, "<", "invoke name=\"{name}\">\n");
    dsml(p, "<", "parameter name=\"{key}\" string=\"true|false\">{value}");
    dsml(p, "</", "parameter>\n...\n");
    dsml(p, "</", "invoke>\n");
    dsml(p, "</",
         "function_calls>\n\nTexts are written as they are with string=\"true\", all other values "
         "as "
         "JSON with string=\"false\". The schemas, one to a line:\n<functions>\n");
    for (size_t i = 0; i < json_array_size(s->tools); i++) {
        chat_json(p, json_array_get(s->tools, i));
        chat_text(p, "\n");
    }
    chat_text(p, "</functions>");
}

static kvs_status call_v32(kvs_chat_prompt *p, const kvs_chat_call *call, int32_t i_msg,
                           kvs_error *err)
{
    json_t *args = NULL;
    const kvs_status st = chat_arguments(&args, call, i_msg, err);
    if (st < 0) {
        return st;
    }
    dsml(p, "<", "invoke name=\"");
    chat_text(p, call->name);
    chat_text(p, "\">\n");
    for (void *it = json_object_iter(args); it != NULL; it = json_object_iter_next(args, it)) {
        const json_t *v = json_object_iter_value(it);
        dsml(p, "<", "parameter name=\"");
        chat_text(p, json_object_iter_key(it));
        chat_text(p, json_is_string(v) ? "\" string=\"true\">" : "\" string=\"false\">");
        if (json_is_string(v)) {
            chat_bytes(p, json_string_value(v), json_string_length(v));
        } else {
            chat_json(p, v);
        }
        dsml(p, "</", "parameter>\n");
    }
    dsml(p, "</", "invoke>\n");
    json_decref(args);
    return KVS_OK;
}

static kvs_status assistant_v32(kvs_chat_prompt *p, const kvs_chat_message *m, int32_t i_msg,
                                bool reasons, kvs_error *err)
{
    if (reasons) {
        chat_text(p, chat_str(m->reasoning));
        chat_special(p, "</think>");
    }
    chat_text(p, chat_str(m->content));
    if (m->n_call > 0) {
        dsml(p, "\n\n<", "function_calls>\n");
        for (int32_t c = 0; c < m->n_call; c++) {
            const kvs_status st = call_v32(p, &m->calls[c], i_msg, err);
            if (st < 0) {
                return st;
            }
        }
        dsml(p, "</", "function_calls>");
    }
    chat_special(p, EOS);
    return KVS_OK;
}

/* Results [i, end) of a run of tools. */
static void results_v32(kvs_chat_prompt *p, const kvs_chat_message *msg, int32_t i, int32_t end)
{
    chat_text(p, "\n\n<function_results>\n");
    for (; i < end; i++) {
        chat_text(p, "<result>");
        chat_text(p, chat_str(msg[i].content));
        chat_text(p, "</result>\n");
    }
    chat_text(p, "</function_results>\n\n");
}

static kvs_status render_v32(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                             int32_t n, kvs_error *err)
{
    const int32_t last_user = chat_last_user(msg, n);
    bool tools = s->tools == NULL; /* already written */
    chat_special(p, BOS);
    if (!tools && msg[0].role != KVS_CHAT_SYSTEM) {
        tools_v32(p, s);
        tools = true;
    }
    for (int32_t i = 0; i < n; i++) {
        const kvs_chat_message *m = &msg[i];
        const bool reasons = s->think && i >= last_user;
        const bool opens = i + 1 < n || s->prompt; /* an answer follows */
        bool mark = false;
        if (m->role == KVS_CHAT_SYSTEM) {
            chat_text(p, chat_str(m->content));
            if (!tools) {
                chat_text(p, "\n\n");
                tools_v32(p, s);
                tools = true;
            }
        } else if (m->role == KVS_CHAT_ASSISTANT) {
            const kvs_status st = assistant_v32(p, m, i, s->think && i > last_user, err);
            if (st < 0) {
                return st;
            }
        } else if (m->role == KVS_CHAT_TOOL) {
            int32_t end = i + 1;
            while (end < n && msg[end].role == KVS_CHAT_TOOL) {
                end++;
            }
            results_v32(p, msg, i, end);
            i = end - 1;
            mark = end < n || s->prompt;
        } else {
            chat_special(p, USER);
            chat_text(p, chat_str(m->content));
            mark = opens;
            if (mark) {
                chat_special(p, ASSISTANT);
            }
        }
        if (mark) {
            chat_special(p, reasons ? "<think>" : "</think>");
            p->thinks = reasons && i == n - 1;
        }
    }
    return KVS_OK;
}

kvs_status chat_render_deepseek(kvs_chat_prompt *p, const chat_setup *s,
                                const kvs_chat_message *msg, int32_t n, kvs_error *err)
{
    switch (s->family) {
    case KVS_CHAT_V2:
        render_v2(p, s, msg, n);
        return KVS_OK;
    case KVS_CHAT_V31:
        render_v31(p, s, msg, n);
        return KVS_OK;
    case KVS_CHAT_V32:
        return render_v32(p, s, msg, n, err);
    default:
        render_v3(p, s, msg, n);
        return KVS_OK;
    }
}
