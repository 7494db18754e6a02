/* text/chat.h - the inside of kvspan/chat.h: a prompt under construction, what the renderers share.
 *
 * Invariants of a prompt: spans are ascending, disjoint and inside the text; a span is exactly one special token
 * of the family's vocabulary; text that came from a message lies in no span. */
#ifndef TEXT_CHAT_H
#define TEXT_CHAT_H

#include <jansson.h>
#include <stdbool.h>

#include "base/buf.h"
#include "kvspan/chat.h"
#include "text/tokenizer.h"

struct kvs_chat_prompt {
    textbuf text;
    kvs_chat_span *span;
    int32_t n_span, cap_span;
    bool failed; /* no memory for a span */
    bool thinks;
};

struct kvs_chat_answer {
    textbuf reasoning, content;
    kvs_chat_call *call; /* strings owned */
    int32_t n_call, cap_call;
};

/* A config checked and resolved. */
typedef struct chat_setup {
    kvs_chat_family family;
    bool think;
    bool effort_high;
    bool keep_reasoning;
    bool prompt;     /* the opening of an answer follows */
    json_t *tools;   /* array of function objects {"name": ...}; NULL: none */
    json_t *entries; /* the array as given, whose entries a family may want whole */
} chat_setup;

/* Plain text; text of n bytes; one special token. */
void chat_text(kvs_chat_prompt *p, const char *s);
void chat_bytes(kvs_chat_prompt *p, const char *s, size_t n);
void chat_special(kvs_chat_prompt *p, const char *token);
/* JSON as Python writes it. */
void chat_json(kvs_chat_prompt *p, const json_t *v);

/* The object in a call's arguments. The caller releases it. */
kvs_status chat_arguments(json_t **out, const kvs_chat_call *call, int32_t i_msg, kvs_error *err);

/* Index of the last message of a user (or developer), -1 without. */
int32_t chat_last_user(const kvs_chat_message *msg, int32_t n);

/* "" for NULL. */
static inline const char *chat_str(const char *s)
{
    return s != NULL ? s : "";
}

kvs_status chat_render_glm(kvs_chat_prompt *p, const chat_setup *s, const kvs_chat_message *msg,
                           int32_t n, kvs_error *err);
kvs_status chat_render_deepseek(kvs_chat_prompt *p, const chat_setup *s,
                                const kvs_chat_message *msg, int32_t n, kvs_error *err);

/* The implementations of the public functions of the same name. */
kvs_status chat_render(kvs_chat_prompt **out, const kvs_chat_config *cfg,
                       const kvs_chat_message *msg, int32_t n_msg, kvs_error *err);
void chat_prompt_free(kvs_chat_prompt *p);
kvs_status chat_encode(const kvs_chat_prompt *p, const kvs_tokenizer *t, id_sink *out,
                       kvs_error *err);
kvs_status chat_parse(kvs_chat_answer **out, kvs_chat_family family, bool thinks, const char *tools,
                      const char *text, size_t n, kvs_error *err);
void chat_answer_free(kvs_chat_answer *a);
const char *chat_family_name(kvs_chat_family f);
kvs_status chat_family_find(kvs_chat_family *f, const char *name, kvs_error *err);

/* A JSON array of tools as a list of function objects; both NULL for NULL. The caller releases them. */
kvs_status chat_tools_read(json_t **functions, json_t **entries, const char *tools, kvs_error *err);

#endif
