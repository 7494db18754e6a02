/* kvspan/chat.h - conversations as the model families expect them, and answers taken apart again.
 *
 * kvs_chat_render turns messages into the prompt text of a family. The result is text plus the list of
 * the places in it that are special tokens: what a user or a tool wrote is never taken for a special token,
 * whatever it contains. kvs_chat_encode gives the token ids of such a prompt. kvs_chat_parse takes an answer
 * apart into reasoning, content and tool calls.
 *
 * The formats, one line each (B: the beginning-of-sentence token, E: the end-of-sentence token, U, A: the user
 * and assistant tokens of the DeepSeek vocabularies):
 *
 *   v2     B system \n\n User: q \n\n Assistant: a E User: ...
 *   v3     B system U q A a E U ... A
 *   r1     as v3; an answer starts with <think>\n
 *   v3.1   B systems joined by a blank line U q A, then <think> or </think>; past answers are </think> a E
 *   v3.2   as v3.1; reasoning stays after the last user turn; tools and calls in DSML markup
 *   glm-5  [gMASK]<sop> <|system|>s <|user|>q <|assistant|> <think>r</think> or </think> a
 *   glm-5.2  as glm-5 with a line on reasoning effort; past turns carry <think></think>
 *
 * Messages are UTF-8. Text of a message is taken as it is, except that GLM answers are trimmed.
 *
 * Compiles as C11 and C++17. */
#ifndef KVSPAN_CHAT_H
#define KVSPAN_CHAT_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/status.h"
#include "kvspan/text.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef enum kvs_chat_family {
    KVS_CHAT_NONE =
        0, /* no known format: rendering is refused                                    */
    KVS_CHAT_V2 = 1,
    KVS_CHAT_V3 = 2,
    KVS_CHAT_R1 = 3,
    KVS_CHAT_V31 = 4,
    KVS_CHAT_V32 = 5,
    KVS_CHAT_GLM5 =
        6, /* GLM-5 and 5.1                                                            */
    KVS_CHAT_GLM52 = 7
} kvs_chat_family;

/* "glm-5.2", ...; "none" for others. */
const char *kvs_chat_family_name(kvs_chat_family f);
/* The family of that name; KVS_INVALID lists the names. */
kvs_status kvs_chat_family_find(kvs_chat_family *f, const char *name, kvs_error *err);

typedef enum kvs_chat_role {
    KVS_CHAT_SYSTEM = 1,
    KVS_CHAT_USER = 2,
    KVS_CHAT_ASSISTANT = 3,
    KVS_CHAT_TOOL = 4, /* the result of a call                                                 */
    KVS_CHAT_DEVELOPER =
        5 /* v3.2 only: a user turn written by the application                     */
} kvs_chat_role;

typedef struct kvs_chat_call {
    const char *name;
    const char
        *arguments; /* a JSON object                                                        */
} kvs_chat_call;

typedef struct kvs_chat_message {
    kvs_chat_role role;
    const char *content; /* NULL: ""                                                             */
    const char
        *reasoning; /* assistant: what was thought; NULL: none                              */
    const kvs_chat_call
        *calls; /* assistant: [n_call]                                             */
    int32_t n_call;
} kvs_chat_message;

typedef enum kvs_chat_think {
    KVS_THINK_AUTO =
        0, /* on for r1, v3.1, v3.2, glm; there is no thinking in v2 and v3            */
    KVS_THINK_ON = 1,
    KVS_THINK_OFF = 2
} kvs_chat_think;

typedef struct kvs_chat_config {
    size_t struct_size;
    kvs_chat_family family;
    kvs_chat_think think; /* on is refused for v2 and v3, off for r1                             */
    const char *effort;   /* glm-5.2: "max" (default) or "high"; others: NULL                    */
    const char *tools;    /* a JSON array of function schemas, or NULL; v2, v3 and r1 refuse it. An
                               entry {"type": "function", "function": {...}} or the inner object   */
    int32_t
        keep_reasoning; /* glm: 1 keeps the reasoning of all past turns                        */
    int32_t
        no_prompt; /* 1: the text ends after the last message, without the opening of an answer */
} kvs_chat_config;

static inline kvs_chat_config kvs_chat_config_default(void)
{
    kvs_chat_config c;
    c.struct_size = sizeof(c);
    c.family = KVS_CHAT_NONE;
    c.think = KVS_THINK_AUTO;
    c.effort = NULL;
    c.tools = NULL;
    c.keep_reasoning = 0;
    c.no_prompt = 0;
    return c;
}

/* Bytes [begin, end) of a prompt are one special token. */
typedef struct kvs_chat_span {
    int64_t begin, end;
} kvs_chat_span;

typedef struct kvs_chat_prompt kvs_chat_prompt;

/* Renders messages [n_msg]. Refused, with the number of the message: an unknown role, a tool result that
 * follows no call, calls whose arguments are no JSON object, roles or tools that the family has no form for,
 * no messages at all. On failure *out is NULL. Threads: any. */
kvs_status kvs_chat_render(kvs_chat_prompt **out, const kvs_chat_config *cfg,
                           const kvs_chat_message *msg, int32_t n_msg, kvs_error *err);
void kvs_chat_prompt_free(kvs_chat_prompt *p);
/* The text, n bytes and a NUL; valid until the prompt is freed. */
const char *kvs_chat_prompt_text(const kvs_chat_prompt *p, size_t *n);
/* The special tokens, ascending and disjoint. */
const kvs_chat_span *kvs_chat_prompt_spans(const kvs_chat_prompt *p, int32_t *n);
/* 1: the text ends inside the reasoning of the answer that follows: give it to kvs_chat_parse. */
int32_t kvs_chat_prompt_thinks(const kvs_chat_prompt *p);

/* The ids of a prompt, as kvs_tokens_encode counts and gives them. A special token is the id that the
 * vocabulary has for it; where it has none, its text goes in like any other. Everything else is plain text:
 * no added token is found in it. The tokenizer's own bos is not added: the formats have theirs.
 * Threads: any. */
kvs_status kvs_chat_encode(const kvs_chat_prompt *p, const kvs_tokenizer *t, int32_t *ids,
                           size_t cap, size_t *n_ids, kvs_error *err);

/* An answer taken apart. */
typedef struct kvs_chat_answer kvs_chat_answer;

/* text: n bytes that a model answered, special tokens included as text, end-of-turn tokens or not. thinks: as
 * kvs_chat_prompt_thinks said. tools: as in kvs_chat_config, or NULL; an argument that its schema says is a
 * string stays raw, others are read as JSON where they are JSON. Never fails for what the model wrote: what is
 * no well-formed call stays content. Content and reasoning come without the white space around
 * them and without NULs. Reasoning without an end is all reasoning. Threads: any. */
kvs_status kvs_chat_parse(kvs_chat_answer **out, kvs_chat_family family, int32_t thinks,
                          const char *tools, const char *text, size_t n, kvs_error *err);
void kvs_chat_answer_free(kvs_chat_answer *a);
const char *
kvs_chat_answer_reasoning(const kvs_chat_answer *a); /* "" without                     */
const char *kvs_chat_answer_content(const kvs_chat_answer *a);
const kvs_chat_call *kvs_chat_answer_calls(const kvs_chat_answer *a, int32_t *n);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
