/* text/chat_parse.c - answers taken apart: reasoning, content, calls.
 *
 * What a model wrote is untrusted: a call counts only when its whole mark-up is there; everything else stays
 * content. After BAD_CALLS openings that were no calls the rest is content too, which keeps the work linear in
 * the text. */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/chat.h"
#include "text/pyjson.h"

enum { BAD_CALLS = 64 };

/* A stretch of the answer. */
typedef struct view {
    const char *s;
    size_t n;
} view;

static const char *find(view v, const char *what)
{
    const size_t n = strlen(what);
    return n <= v.n ? memmem(v.s, v.n, what, n) : NULL;
}

static bool starts(view v, const char *what)
{
    const size_t n = strlen(what);
    return v.n >= n && memcmp(v.s, what, n) == 0;
}

static view skip(view v, size_t n)
{
    return (view){v.s + n, v.n - n};
}

/* Takes `what` off the front. */
static bool take(view *v, const char *what)
{
    if (!starts(*v, what)) {
        return false;
    }
    *v = skip(*v, strlen(what));
    return true;
}

/* Takes everything up to and with `end` off the front; *in is what stood before it. */
static bool take_until(view *v, const char *end, view *in)
{
    const char *at = find(*v, end);
    if (at == NULL) {
        return false;
    }
    *in = (view){v->s, (size_t)(at - v->s)};
    *v = skip(*v, in->n + strlen(end));
    return true;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static view trim(view v)
{
    while (v.n > 0 && is_space(v.s[0])) {
        v = skip(v, 1);
    }
    while (v.n > 0 && is_space(v.s[v.n - 1])) {
        v.n--;
    }
    return v;
}

/* The type that a tool's schema gives an argument; NULL where it says nothing. */
static const char *schema_type(const json_t *tools, view name, view key)
{
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *f = json_array_get(tools, i);
        const char *s = json_string_value(json_object_get(f, "name"));
        if (s == NULL || strlen(s) != name.n || memcmp(s, name.s, name.n) != 0) {
            continue;
        }
        const json_t *props = json_object_get(json_object_get(f, "parameters"), "properties");
        char k[256];
        if (key.n >= sizeof k) {
            return NULL;
        }
        memcpy(k, key.s, key.n);
        k[key.n] = '\0';
        return json_string_value(json_object_get(json_object_get(props, k), "type"));
    }
    return NULL;
}

/* Adds `"key": value` to an object under construction. text: the value is a text whatever it looks like. */
static void add_argument(textbuf *b, view key, view value, bool text)
{
    if (b->n > 1) {
        buf_text(b, ", ");
    }
    json_t *k = json_stringn(key.s, key.n);
    json_t *v = text ? NULL : json_loadb(value.s, value.n, JSON_DECODE_ANY, NULL);
    if (v == NULL) {
        v = json_stringn(value.s, value.n);
    }
    if (k == NULL || v == NULL) {
        b->failed = true; /* no memory, or no UTF-8 */
    } else {
        pyjson_add(b, k);
        buf_text(b, ": ");
        pyjson_add(b, v);
    }
    json_decref(k);
    json_decref(v);
}

static char *copy(const char *s, size_t n)
{
    char *c = mem_alloc(n + 1, 0);
    if (c != NULL) {
        memcpy(c, s, n);
        c[n] = '\0';
    }
    return c;
}

/* 1 added, 0 no call: the arguments are no JSON object as a prompt could carry it (a name with a NUL, a key
 * twice, nesting past the reader's depth), -1 no memory. */
static int add_call(kvs_chat_answer *a, view name, view args)
{
    json_t *o = json_loadb(args.s, args.n, JSON_REJECT_DUPLICATES, NULL);
    const bool good = json_is_object(o) && name.n > 0 && memchr(name.s, '\0', name.n) == NULL;
    json_decref(o);
    if (!good) {
        return 0;
    }
    if (a->n_call == a->cap_call) {
        const int32_t cap = a->cap_call > 0 ? 2 * a->cap_call : 4;
        kvs_chat_call *c = mem_realloc(a->call, (size_t)cap * sizeof *c);
        if (c == NULL) {
            return -1;
        }
        a->call = c;
        a->cap_call = cap;
    }
    char *s = copy(name.s, name.n);
    char *t = copy(args.s, args.n);
    if (s == NULL || t == NULL) {
        mem_free(s);
        mem_free(t);
        return -1;
    }
    a->call[a->n_call++] = (kvs_chat_call){s, t};
    return 1;
}

/* Each reader below takes one call off the front: 1 taken, 0 not well formed (v is as it was), or a failure. */

/* <tool_call>NAME<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call> */
static int glm_call(kvs_chat_answer *a, view *v, const json_t *tools)
{
    view in, rest = *v;
    if (!take(&rest, "<tool_call>") || !take_until(&rest, "</tool_call>", &in)) {
        return 0;
    }
    const char *first = find(in, "<arg_key>");
    view name = {in.s, first != NULL ? (size_t)(first - in.s) : in.n};
    in = skip(in, name.n);
    name = trim(name);
    if (name.n == 0) {
        return 0;
    }
    textbuf b;
    buf_init(&b);
    buf_char(&b, '{');
    int done = 1;
    for (in = trim(in); in.n > 0; in = trim(in)) {
        view key, value;
        if (!take(&in, "<arg_key>") || !take_until(&in, "</arg_key>", &key) ||
            (in = trim(in), !take(&in, "<arg_value>")) ||
            !take_until(&in, "</arg_value>", &value)) {
            done = 0;
            break;
        }
        const char *type = schema_type(tools, name, key);
        add_argument(&b, trim(key), value, type != NULL && strcmp(type, "string") == 0);
    }
    buf_char(&b, '}');
    if (done == 1) {
        done = b.failed ? 0 : add_call(a, name, (view){b.data, b.n});
    }
    buf_fini(&b);
    if (done == 1) {
        *v = rest;
    }
    return done;
}

/* <|tool_call_begin|>NAME<|tool_sep|>JSON<|tool_call_end|> in DeepSeek's letters */
static int v31_call(kvs_chat_answer *a, view *v)
{
    view name, args, rest = *v;
    if (!take(&rest, "<\uff5ctool\u2581call\u2581begin\uff5c>") ||
        !take_until(&rest, "<\uff5ctool\u2581sep\uff5c>", &name) ||
        !take_until(&rest, "<\uff5ctool\u2581call\u2581end\uff5c>", &args)) {
        return 0;
    }
    name = trim(name);
    args = trim(args);
    const int done = add_call(a, name, args);
    if (done == 1) {
        *v = rest;
    }
    return done;
}

/* The value of an attribute: name="..." and what follows it. */
static bool attribute(view *v, const char *opening, view *value)
{
    return take(v, opening) && take_until(v, "\"", value);
}

/* <DSML invoke name="f"> parameters </DSML invoke> */
static int v32_call(kvs_chat_answer *a, view *v)
{
    view name, in, rest = *v;
    if (!attribute(&rest, "<\uff5cDSML\uff5cinvoke name=\"", &name) || !take(&rest, ">") ||
        !take_until(&rest, "</\uff5cDSML\uff5cinvoke>", &in) || name.n == 0) {
        return 0;
    }
    textbuf b;
    buf_init(&b);
    buf_char(&b, '{');
    int done = 1;
    for (in = trim(in); in.n > 0; in = trim(in)) {
        view key, kind, value;
        if (!attribute(&in, "<\uff5cDSML\uff5cparameter name=\"", &key) ||
            !attribute(&in, " string=\"", &kind) || !take(&in, ">") ||
            !take_until(&in, "</\uff5cDSML\uff5cparameter>", &value)) {
            done = 0;
            break;
        }
        add_argument(&b, key, value, starts(kind, "true"));
    }
    buf_char(&b, '}');
    if (done == 1) {
        done = b.failed ? 0 : add_call(a, name, (view){b.data, b.n});
    }
    buf_fini(&b);
    if (done == 1) {
        *v = rest;
    }
    return done;
}

/* What opens calls in a family, and what may stand around them. */
typedef struct markup {
    const char *open; /* the first call's, or a block's, beginning; NULL: the family has no calls */
    const char
        *close; /* of a block; NULL: none                                                   */
} markup;

static markup markup_of(kvs_chat_family f)
{
    switch (f) {
    case KVS_CHAT_GLM5:
    case KVS_CHAT_GLM52:
        return (markup){"<tool_call>", NULL};
    case KVS_CHAT_V31:
        return (markup){"<\uff5ctool\u2581calls\u2581begin\uff5c>",
                        "<\uff5ctool\u2581calls\u2581end\uff5c>"};
    case KVS_CHAT_V32:
        return (markup){"<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>"};
    default:
        return (markup){NULL, NULL};
    }
}

static int one_call(kvs_chat_answer *a, kvs_chat_family f, view *v, const json_t *tools)
{
    switch (f) {
    case KVS_CHAT_V31:
        return v31_call(a, v);
    case KVS_CHAT_V32:
        return v32_call(a, v);
    default:
        return glm_call(a, v, tools);
    }
}

/* Takes a block of calls, or one call where the family has no blocks, off the front. All of it or nothing. */
static int take_calls(kvs_chat_answer *a, kvs_chat_family f, view *v, const json_t *tools)
{
    const markup m = markup_of(f);
    view in = *v;
    const int32_t n_before = a->n_call;
    if (m.close != NULL) {
        take(&in, m.open);
        in = trim(in);
    }
    int got = one_call(a, f, &in, tools);
    while (got == 1 && m.close != NULL) {
        in = trim(in);
        if (take(&in, m.close)) {
            break;
        }
        got = one_call(a, f, &in, tools);
    }
    if (got == 1) {
        *v = in;
        return 1;
    }
    while (a->n_call > n_before) { /* an unfinished block */
        a->n_call--;
        mem_free((void *)(uintptr_t)a->call[a->n_call].name);
        mem_free((void *)(uintptr_t)a->call[a->n_call].arguments);
    }
    return got;
}

static view without_end(view v)
{
    static const char *const ends[] = {"<|user|>", "<|observation|>", "<|endoftext|>",
                                       "<\uff5cend\u2581of\u2581sentence\uff5c>"};
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            const size_t n = strlen(ends[i]);
            if (v.n >= n && memcmp(v.s + v.n - n, ends[i], n) == 0) {
                v.n -= n;
                more = true;
            }
        }
    }
    return v;
}

/* Drops NULs, which would end the text for who reads it, and the white space around. */
static void tidy(textbuf *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->n; i++) {
        if (b->data[i] != '\0') {
            b->data[n++] = b->data[i];
        }
    }
    if (b->data != NULL) {
        const view t = trim((view){b->data, n});
        memmove(b->data, t.s, t.n);
        b->n = t.n;
        b->data[t.n] = '\0';
    }
}

static kvs_status parse(kvs_chat_answer *a, kvs_chat_family f, bool thinks, const json_t *tools,
                        view v)
{
    v = without_end(v);
    const bool opened = take(&v, "<think>");
    if (thinks || opened) {
        view in;
        if (!take_until(&v, "</think>", &in)) {
            in = v;
            v = skip(v, v.n);
        }
        buf_add(&a->reasoning, in.s, in.n);
    } else {
        take(&v, "</think>");
    }
    const markup m = markup_of(f);
    int32_t n_bad = 0;
    while (v.n > 0) {
        const char *at = m.open != NULL && n_bad < BAD_CALLS ? find(v, m.open) : NULL;
        const size_t n = at != NULL ? (size_t)(at - v.s) : v.n;
        buf_add(&a->content, v.s, n);
        v = skip(v, n);
        if (at == NULL) {
            break;
        }
        const int got = take_calls(a, f, &v, tools);
        if (got < 0) {
            return KVS_NOMEM;
        }
        if (got == 0) { /* no call after all */
            buf_add(&a->content, v.s, strlen(m.open));
            v = skip(v, strlen(m.open));
            n_bad++;
        }
    }
    tidy(&a->content);
    tidy(&a->reasoning);
    return a->content.failed || a->reasoning.failed ? KVS_NOMEM : KVS_OK;
}

kvs_status chat_parse(kvs_chat_answer **out, kvs_chat_family family, bool thinks, const char *tools,
                      const char *text, size_t n, kvs_error *err)
{
    *out = NULL;
    json_t *functions = NULL, *entries = NULL;
    TRY(chat_tools_read(&functions, &entries, tools, err));
    kvs_chat_answer *a = mem_calloc(1, sizeof *a);
    kvs_status st = KVS_NOMEM;
    if (a != NULL) {
        buf_init(&a->reasoning);
        buf_init(&a->content);
        st = parse(a, family, thinks, functions, (view){text, n});
    }
    json_decref(functions);
    json_decref(entries);
    if (st < 0) {
        chat_answer_free(a);
        return err_set(err, st, "chat: no memory for an answer of %zu bytes", n);
    }
    *out = a;
    return KVS_OK;
}

void chat_answer_free(kvs_chat_answer *a)
{
    if (a == NULL) {
        return;
    }
    for (int32_t i = 0; i < a->n_call; i++) {
        mem_free((void *)(uintptr_t)a->call[i].name);
        mem_free((void *)(uintptr_t)a->call[i].arguments);
    }
    mem_free(a->call);
    buf_fini(&a->reasoning);
    buf_fini(&a->content);
    mem_free(a);
}
