/* text/chat.c - prompts: what every family shares, checks, and the public calls.
 *
 * Checks are made before anything is rendered, so a renderer meets well-formed messages only. */
#include "text/chat.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/pyjson.h"

static const struct {
    kvs_chat_family family;
    const char *name;
} k_family[] = {
    {KVS_CHAT_V2, "v2"},         {KVS_CHAT_V3, "v3"},    {KVS_CHAT_R1, "r1"},
    {KVS_CHAT_V31, "v3.1"},      {KVS_CHAT_V32, "v3.2"}, {KVS_CHAT_GLM5, "glm-5"},
    {KVS_CHAT_GLM52, "glm-5.2"},
};

const char *chat_family_name(kvs_chat_family f)
{
    for (size_t i = 0; i < sizeof k_family / sizeof *k_family; i++) {
        if (k_family[i].family == f) {
            return k_family[i].name;
        }
    }
    return "none";
}

kvs_status chat_family_find(kvs_chat_family *f, const char *name, kvs_error *err)
{
    for (size_t i = 0; i < sizeof k_family / sizeof *k_family; i++) {
        if (strcmp(k_family[i].name, name) == 0) {
            *f = k_family[i].family;
            return KVS_OK;
        }
    }
    return err_set(err, KVS_INVALID,
                   "chat format \"%.40s\": use v2, v3, r1, v3.1, v3.2, glm-5 or glm-5.2", name);
}

void chat_bytes(kvs_chat_prompt *p, const char *s, size_t n)
{
    buf_add(&p->text, s, n);
}

void chat_text(kvs_chat_prompt *p, const char *s)
{
    buf_text(&p->text, s);
}

void chat_json(kvs_chat_prompt *p, const json_t *v)
{
    pyjson_add(&p->text, v);
}

void chat_special(kvs_chat_prompt *p, const char *token)
{
    if (p->n_span == p->cap_span) {
        const int32_t cap = p->cap_span > 0 ? 2 * p->cap_span : 32;
        kvs_chat_span *s = mem_realloc(p->span, (size_t)cap * sizeof *s);
        if (s == NULL) {
            p->failed = true;
            return;
        }
        p->span = s;
        p->cap_span = cap;
    }
    const int64_t begin = (int64_t)p->text.n;
    buf_text(&p->text, token);
    p->span[p->n_span++] = (kvs_chat_span){begin, (int64_t)p->text.n};
}

int32_t chat_last_user(const kvs_chat_message *msg, int32_t n)
{
    for (int32_t i = n - 1; i >= 0; i--) {
        if (msg[i].role == KVS_CHAT_USER || msg[i].role == KVS_CHAT_DEVELOPER) {
            return i;
        }
    }
    return -1;
}

kvs_status chat_arguments(json_t **out, const kvs_chat_call *call, int32_t i_msg, kvs_error *err)
{
    json_error_t e;
    *out = json_loads(chat_str(call->arguments), JSON_REJECT_DUPLICATES, &e);
    if (*out == NULL || !json_is_object(*out)) {
        const bool parsed = *out != NULL;
        json_decref(*out);
        *out = NULL;
        return err_set(err, KVS_INVALID, "message %d: arguments of \"%.60s\": %s", i_msg,
                       chat_str(call->name), parsed ? "no JSON object" : e.text);
    }
    return KVS_OK;
}

kvs_status chat_tools_read(json_t **functions, json_t **entries, const char *tools, kvs_error *err)
{
    *functions = NULL;
    *entries = NULL;
    if (tools == NULL) {
        return KVS_OK;
    }
    json_error_t e;
    json_t *all = json_loads(tools, JSON_REJECT_DUPLICATES, &e);
    if (all == NULL || !json_is_array(all)) {
        const bool parsed = all != NULL;
        json_decref(all);
        return err_set(err, KVS_INVALID, "tools: %s: give a JSON array of function schemas",
                       parsed ? "no array" : e.text);
    }
    json_t *list = json_array();
    for (size_t i = 0; list != NULL && i < json_array_size(all); i++) {
        json_t *entry = json_array_get(all, i);
        json_t *f = json_object_get(entry, "function");
        f = f != NULL ? f : entry;
        if (!json_is_object(f) || !json_is_string(json_object_get(f, "name"))) {
            json_decref(list);
            json_decref(all);
            return err_set(err, KVS_INVALID, "tools: entry %zu has no \"name\"", i);
        }
        if (json_array_append(list, f) != 0) {
            json_decref(list);
            list = NULL;
        }
    }
    if (list == NULL) {
        json_decref(all);
        return err_set(err, KVS_NOMEM, "tools: no memory");
    }
    if (json_array_size(list) == 0) {
        json_decref(list);
        json_decref(all);
        return KVS_OK; /* an empty list is no tools */
    }
    *functions = list;
    *entries = all;
    return KVS_OK;
}

static bool family_has_tools(kvs_chat_family f)
{
    return f == KVS_CHAT_V31 || f == KVS_CHAT_V32 || f == KVS_CHAT_GLM5 || f == KVS_CHAT_GLM52;
}

static kvs_status check_message(const kvs_chat_config *cfg, const kvs_chat_message *msg, int32_t i,
                                kvs_error *err)
{
    const kvs_chat_message *m = &msg[i];
    const char *family = chat_family_name(cfg->family);
    if (m->role < KVS_CHAT_SYSTEM || m->role > KVS_CHAT_DEVELOPER) {
        return err_set(err, KVS_INVALID, "message %d: role %d: use system, user, assistant or tool",
                       i, (int)m->role);
    }
    if (m->role == KVS_CHAT_DEVELOPER && cfg->family != KVS_CHAT_V32) {
        return err_set(err, KVS_UNSUPPORTED, "message %d: %s has no developer role: use user", i,
                       family);
    }
    if (m->n_call < 0 || (m->n_call > 0 && m->calls == NULL)) {
        return err_set(err, KVS_INVALID, "message %d: n_call %d without calls", i, m->n_call);
    }
    if (m->n_call > 0 && m->role != KVS_CHAT_ASSISTANT) {
        return err_set(err, KVS_INVALID, "message %d: only an assistant makes calls", i);
    }
    if ((m->n_call > 0 || m->role == KVS_CHAT_TOOL) && !family_has_tools(cfg->family)) {
        return err_set(err, KVS_UNSUPPORTED,
                       "message %d: %s has no form for tool calls: use v3.1, v3.2 or glm-5", i,
                       family);
    }
    for (int32_t c = 0; c < m->n_call; c++) {
        if (m->calls[c].name == NULL || m->calls[c].name[0] == '\0') {
            return err_set(err, KVS_INVALID, "message %d: call %d has no name", i, c);
        }
        json_t *args = NULL;
        TRY(chat_arguments(&args, &m->calls[c], i, err));
        json_decref(args);
    }
    if (m->role == KVS_CHAT_TOOL) {
        int32_t before = i - 1;
        while (before >= 0 && msg[before].role == KVS_CHAT_TOOL) {
            before--;
        }
        if (before < 0 || msg[before].role != KVS_CHAT_ASSISTANT || msg[before].n_call == 0) {
            return err_set(err, KVS_INVALID,
                           "message %d: a tool result has to follow an assistant's call", i);
        }
    }
    return KVS_OK;
}

static kvs_status setup(chat_setup *s, const kvs_chat_config *cfg, kvs_error *err)
{
    memset(s, 0, sizeof *s);
    s->family = cfg->family;
    const char *family = chat_family_name(cfg->family);
    if (strcmp(family, "none") == 0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "chat: no format is known for this model: name one (v2, v3, r1, v3.1, v3.2, "
                       "glm-5, glm-5.2) or continue a plain text");
    }
    const bool plain = cfg->family == KVS_CHAT_V2 || cfg->family == KVS_CHAT_V3;
    if (cfg->think < KVS_THINK_AUTO || cfg->think > KVS_THINK_OFF) {
        return err_set(err, KVS_INVALID, "chat: think %d: use auto, on or off", (int)cfg->think);
    }
    if (cfg->think == KVS_THINK_ON && plain) {
        return err_set(err, KVS_UNSUPPORTED, "chat: %s has no thinking: use think off", family);
    }
    if (cfg->think == KVS_THINK_OFF && cfg->family == KVS_CHAT_R1) {
        return err_set(err, KVS_UNSUPPORTED, "chat: r1 always thinks: use think on");
    }
    s->think = !plain && cfg->think != KVS_THINK_OFF;
    if (cfg->effort != NULL) {
        const bool high = strcmp(cfg->effort, "high") == 0;
        if (cfg->family != KVS_CHAT_GLM52) {
            return err_set(err, KVS_UNSUPPORTED, "chat: %s has no reasoning effort", family);
        }
        if (!high && strcmp(cfg->effort, "max") != 0) {
            return err_set(err, KVS_INVALID, "chat: effort \"%.20s\": use max or high",
                           cfg->effort);
        }
        s->effort_high = high;
    }
    s->keep_reasoning = cfg->keep_reasoning != 0;
    s->prompt = cfg->no_prompt == 0;
    TRY(chat_tools_read(&s->tools, &s->entries, cfg->tools, err));
    if (s->tools != NULL && !family_has_tools(cfg->family)) {
        json_decref(s->tools);
        json_decref(s->entries);
        return err_set(err, KVS_UNSUPPORTED, "chat: %s has no form for tools", family);
    }
    return KVS_OK;
}

kvs_status chat_render(kvs_chat_prompt **out, const kvs_chat_config *cfg,
                       const kvs_chat_message *msg, int32_t n_msg, kvs_error *err)
{
    *out = NULL;
    if (n_msg < 1) {
        return err_set(err, KVS_INVALID, "chat: %d messages: give at least one", n_msg);
    }
    for (int32_t i = 0; i < n_msg; i++) {
        TRY(check_message(cfg, msg, i, err));
    }
    chat_setup s;
    TRY(setup(&s, cfg, err));
    kvs_chat_prompt *p = mem_calloc(1, sizeof *p);
    kvs_status st = KVS_NOMEM;
    if (p != NULL) {
        buf_init(&p->text);
        const bool glm = s.family == KVS_CHAT_GLM5 || s.family == KVS_CHAT_GLM52;
        st = glm ? chat_render_glm(p, &s, msg, n_msg, err)
                 : chat_render_deepseek(p, &s, msg, n_msg, err);
        if (st >= 0 && (p->failed || p->text.failed)) {
            st = KVS_NOMEM;
        }
    }
    json_decref(s.tools);
    json_decref(s.entries);
    if (st < 0) {
        chat_prompt_free(p);
        return st == KVS_NOMEM ? err_set(err, KVS_NOMEM, "chat: no memory for the prompt") : st;
    }
    *out = p;
    return KVS_OK;
}

void chat_prompt_free(kvs_chat_prompt *p)
{
    if (p != NULL) {
        buf_fini(&p->text);
        mem_free(p->span);
        mem_free(p);
    }
}

kvs_status chat_encode(const kvs_chat_prompt *p, const kvs_tokenizer *t, id_sink *out,
                       kvs_error *err)
{
    const char *text = buf_str(&p->text);
    int64_t done = 0; /* text before it has its ids */
    for (int32_t i = 0; i <= p->n_span; i++) {
        const bool last = i == p->n_span;
        const int64_t begin = last ? (int64_t)p->text.n : p->span[i].begin;
        const int32_t id = last ? -1 : tok_find(t, text + begin, (size_t)(p->span[i].end - begin));
        if (id < 0 && !last) {
            continue; /* the vocabulary lacks it: it joins the text around it */
        }
        if (begin > done) {
            TRY(tok_encode(t, text + done, (size_t)(begin - done), KVS_ENCODE_NO_ADDED, out, err));
        }
        if (!last) {
            sink_add(out, id);
            done = p->span[i].end;
        }
    }
    return KVS_OK;
}
