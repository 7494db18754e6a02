/* api/chat_api.c - public functions of kvspan/chat.h. */
#include "kvspan/chat.h"

#include <string.h>

#include "base/err.h"
#include "text/chat.h"

const char *kvs_chat_family_name(kvs_chat_family f)
{
    return chat_family_name(f);
}

kvs_status kvs_chat_family_find(kvs_chat_family *f, const char *name, kvs_error *err)
{
    if (f == NULL || name == NULL) {
        return err_set(err, KVS_INVALID, "chat: the result and a name must be given");
    }
    return chat_family_find(f, name, err);
}

kvs_status kvs_chat_render(kvs_chat_prompt **out, const kvs_chat_config *cfg,
                           const kvs_chat_message *msg, int32_t n_msg, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "chat: out must be given");
    }
    *out = NULL;
    if (cfg == NULL || (msg == NULL && n_msg != 0)) {
        return err_set(err, KVS_INVALID, "chat: cfg and messages must be given");
    }
    if (cfg->struct_size < sizeof cfg->struct_size) {
        return err_set(err, KVS_INVALID,
                       "chat: struct_size is not set: use kvs_chat_config_default");
    }
    kvs_chat_config c;
    memset(&c, 0, sizeof c);
    memcpy(&c, cfg, cfg->struct_size < sizeof c ? cfg->struct_size : sizeof c);
    return chat_render(out, &c, msg, n_msg, err);
}

void kvs_chat_prompt_free(kvs_chat_prompt *p)
{
    chat_prompt_free(p);
}

const char *kvs_chat_prompt_text(const kvs_chat_prompt *p, size_t *n)
{
    if (n != NULL) {
        *n = p != NULL ? p->text.n : 0;
    }
    return p != NULL ? buf_str(&p->text) : "";
}

const kvs_chat_span *kvs_chat_prompt_spans(const kvs_chat_prompt *p, int32_t *n)
{
    if (n != NULL) {
        *n = p != NULL ? p->n_span : 0;
    }
    return p != NULL ? p->span : NULL;
}

kvs_status kvs_chat_encode(const kvs_chat_prompt *p, const kvs_tokenizer *t, int32_t *ids,
                           size_t cap, size_t *n_ids, kvs_error *err)
{
    if (p == NULL || t == NULL || n_ids == NULL || (ids == NULL && cap > 0)) {
        return err_set(err, KVS_INVALID, "chat: prompt, tokenizer, n_ids and ids must be given");
    }
    *n_ids = 0;
    id_sink out = {ids, cap, 0};
    TRY(chat_encode(p, t, &out, err));
    *n_ids = out.n;
    if (out.n > cap && ids != NULL) {
        return err_set(err, KVS_LIMIT, "room for %zu ids, %zu are needed", cap, out.n);
    }
    return KVS_OK;
}

int32_t kvs_chat_prompt_thinks(const kvs_chat_prompt *p)
{
    return p != NULL && p->thinks;
}

kvs_status kvs_chat_parse(kvs_chat_answer **out, kvs_chat_family family, int32_t thinks,
                          const char *tools, const char *text, size_t n, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "chat: out must be given");
    }
    *out = NULL;
    if (text == NULL && n > 0) {
        return err_set(err, KVS_INVALID, "chat: text must be given");
    }
    return chat_parse(out, family, thinks != 0, tools, text != NULL ? text : "", n, err);
}

void kvs_chat_answer_free(kvs_chat_answer *a)
{
    chat_answer_free(a);
}

const char *kvs_chat_answer_reasoning(const kvs_chat_answer *a)
{
    return a != NULL ? buf_str(&a->reasoning) : "";
}

const char *kvs_chat_answer_content(const kvs_chat_answer *a)
{
    return a != NULL ? buf_str(&a->content) : "";
}

const kvs_chat_call *kvs_chat_answer_calls(const kvs_chat_answer *a, int32_t *n)
{
    if (n != NULL) {
        *n = a != NULL ? a->n_call : 0;
    }
    return a != NULL ? a->call : NULL;
}
