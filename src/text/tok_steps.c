/* text/tok_steps.c - normalizer, pre_tokenizer, post_processor and decoder of tokenizer.json, and
 * tokenizer_config.json. What would change ids or text and is not done here is refused by name. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "text/tok_json.h"

enum { NEST_MAX = 8 };

/* What ByteLevel with use_regex cuts at. */
static const char k_byte_level[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static bool is(const json_t *v, const char *type)
{
    return strcmp(tj_type(v), type) == 0;
}

static kvs_status check_normalizer(const json_t *v, int depth, kvs_error *err)
{
    if (v == NULL) {
        return KVS_OK;
    }
    const json_t *list = tj_get(v, "normalizers");
    if (!is(v, "Sequence") || !json_is_array(list) || depth == NEST_MAX) {
        return err_set(err, KVS_UNSUPPORTED,
                       "normalizer %.40s: only null and an empty Sequence are supported",
                       tj_type(v));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        TRY(check_normalizer(json_array_get(list, i), depth + 1, err));
    }
    return KVS_OK;
}

static kvs_status read_split(pretok *p, const json_t *v, const char *name, kvs_error *err)
{
    const json_t *pattern = tj_get(v, "pattern");
    const json_t *source = tj_get(pattern, "Regex");
    const json_t *text = tj_get(pattern, "String");
    const char *behavior = json_string_value(tj_get(v, "behavior"));
    bool invert = false; /* with Isolated both parts are kept apart, so it changes nothing */
    if (behavior == NULL || strcmp(behavior, "Isolated") != 0) {
        return err_set(err, KVS_UNSUPPORTED, "%s: Split with behavior %.40s: only Isolated", name,
                       behavior != NULL ? behavior : "missing");
    }
    TRY(tj_bool(v, name, "invert", false, &invert, err));
    if (json_is_string(source)) {
        return pretok_add(p, name, json_string_value(source), json_string_length(source), err);
    }
    if (json_is_string(text) && json_string_length(text) > 0) {
        return pretok_add_text(p, name, json_string_value(text), json_string_length(text), err);
    }
    return err_set(err, KVS_FORMAT, "%s: Split has neither a Regex nor a String", name);
}

static kvs_status read_byte_level(pretok *p, const json_t *v, const char *name, kvs_error *err)
{
    bool prefix = false;
    bool cut = false;
    TRY(tj_bool(v, name, "add_prefix_space", true, &prefix, err));
    TRY(tj_bool(v, name, "use_regex", true, &cut, err));
    if (prefix) {
        return err_set(err, KVS_UNSUPPORTED,
                       "%s: ByteLevel with add_prefix_space: only false is supported", name);
    }
    return cut ? pretok_add(p, name, k_byte_level, sizeof k_byte_level - 1, err) : KVS_OK;
}

/* *done: ByteLevel was met, behind which nothing may come. i_step counts the leaves. */
static kvs_status read_pretok(pretok *p, const json_t *v, int depth, int *i_step, bool *done,
                              kvs_error *err)
{
    char name[40];
    const json_t *list = tj_get(v, "pretokenizers");
    if (is(v, "Sequence") && json_is_array(list) && depth < NEST_MAX) {
        for (size_t i = 0; i < json_array_size(list); i++) {
            TRY(read_pretok(p, json_array_get(list, i), depth + 1, i_step, done, err));
        }
        return KVS_OK;
    }
    snprintf(name, sizeof name, "pre_tokenizer step %d", (*i_step)++);
    if (*done) {
        return err_set(err, KVS_UNSUPPORTED, "%s: %.40s behind ByteLevel is not supported", name,
                       tj_type(v));
    }
    if (is(v, "Split")) {
        return read_split(p, v, name, err);
    }
    if (is(v, "Digits")) {
        bool single = false;
        TRY(tj_bool(v, name, "individual_digits", false, &single, err));
        return pretok_add(p, name, single ? "\\p{N}" : "\\p{N}+", single ? 5 : 6, err);
    }
    if (is(v, "ByteLevel")) {
        *done = true;
        return read_byte_level(p, v, name, err);
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "%s: %.40s is not supported: only Split, Digits, ByteLevel and a Sequence of "
                   "them",
                   name, tj_type(v));
}

/* The ids of a special token of a template. */
static kvs_status add_template_token(const json_t *map, const char *name, int32_t *ids, int32_t *n,
                                     const kvs_tokenizer *t, kvs_error *err)
{
    const json_t *list = tj_get(tj_get(map, name), "ids");
    if (!json_is_array(list)) {
        return err_set(err, KVS_FORMAT, "post_processor: \"%.60s\" has no ids in special_tokens",
                       name);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_array_get(list, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= t->v.n_id ||
            !vocab_has(&t->v, (int32_t)json_integer_value(id))) {
            return err_set(err, KVS_FORMAT, "post_processor: \"%.60s\" has an id of no token",
                           name);
        }
        if (*n == TOK_WRAP_MAX) {
            return err_set(err, KVS_LIMIT, "post_processor: more than %d tokens on one side",
                           TOK_WRAP_MAX);
        }
        ids[(*n)++] = (int32_t)json_integer_value(id);
    }
    return KVS_OK;
}

/* [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...] */
static kvs_status read_template(kvs_tokenizer *t, const json_t *v, kvs_error *err)
{
    const json_t *single = tj_get(v, "single");
    bool past = false;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *part = json_array_get(single, i);
        const char *token = json_string_value(tj_get(tj_get(part, "SpecialToken"), "id"));
        if (token != NULL) {
            TRY(add_template_token(tj_get(v, "special_tokens"), token, past ? t->after : t->before,
                                   past ? &t->n_after : &t->n_before, t, err));
        } else if (tj_get(part, "Sequence") != NULL && !past) {
            past = true;
        } else {
            return err_set(err, KVS_FORMAT,
                           "post_processor: single[%zu] is no SpecialToken or a second Sequence",
                           i);
        }
    }
    if (!past) {
        return err_set(err, KVS_FORMAT, "post_processor: single has no Sequence");
    }
    return KVS_OK;
}

static kvs_status read_post(kvs_tokenizer *t, const json_t *v, int depth, kvs_error *err)
{
    const json_t *list = tj_get(v, "processors");
    if (v == NULL || is(v, "ByteLevel")) {
        return KVS_OK; /* changes offsets only */
    }
    if (is(v, "Sequence") && json_is_array(list) && depth < NEST_MAX) {
        for (size_t i = 0; i < json_array_size(list); i++) {
            TRY(read_post(t, json_array_get(list, i), depth + 1, err));
        }
        return KVS_OK;
    }
    if (is(v, "TemplateProcessing") && t->n_before + t->n_after == 0) {
        return read_template(t, v, err);
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "post_processor %.40s: only ByteLevel and one TemplateProcessing are supported",
                   tj_type(v));
}

static kvs_status check_decoder(const json_t *v, int depth, kvs_error *err)
{
    const json_t *list = tj_get(v, "decoders");
    if (is(v, "Sequence") && json_array_size(list) == 1 && depth < NEST_MAX) {
        return check_decoder(json_array_get(list, 0), depth + 1, err);
    }
    if (!is(v, "ByteLevel")) {
        return err_set(err, KVS_UNSUPPORTED, "decoder %.40s: only ByteLevel is supported",
                       v == NULL ? "is missing" : tj_type(v));
    }
    return KVS_OK;
}

kvs_status tok_read_steps(kvs_tokenizer *t, const json_t *root, kvs_error *err)
{
    const json_t *pre = tj_get(root, "pre_tokenizer");
    bool done = false;
    int i_step = 0;
    TRY(check_normalizer(tj_get(root, "normalizer"), 0, err));
    if (pre != NULL) {
        TRY(read_pretok(&t->pre, pre, 0, &i_step, &done, err));
    }
    if (!done) {
        return err_set(err, KVS_UNSUPPORTED,
                       "pre_tokenizer: without ByteLevel at its end it is not supported");
    }
    TRY(read_post(t, tj_get(root, "post_processor"), 0, err));
    return check_decoder(tj_get(root, "decoder"), 0, err);
}

/* "bos_token": "<s>", or an object with content. -1 where it is not given. */
static kvs_status read_token(const kvs_tokenizer *t, const json_t *config, const char *key,
                             int32_t *id, kvs_error *err)
{
    const json_t *v = tj_get(config, key);
    if (v == NULL) {
        return KVS_OK;
    }
    const json_t *text = json_is_object(v) ? tj_get(v, "content") : v;
    if (!json_is_string(text)) {
        return err_set(err, KVS_FORMAT, "tokenizer_config.json: %s is no text", key);
    }
    *id = tok_find(t, json_string_value(text), json_string_length(text));
    if (*id < 0) {
        return err_set(err, KVS_FORMAT, "tokenizer_config.json: %s \"%.60s\" is no token", key,
                       json_string_value(text));
    }
    return KVS_OK;
}

/* add_bos_token and add_eos_token, where they are given, decide about the token itself; anything
 * else that a template adds stays. */
static kvs_status settle(const json_t *config, const char *key, int32_t id, int32_t *ids,
                         int32_t *n, bool front, kvs_error *err)
{
    bool add = false;
    if (tj_get(config, key) == NULL) {
        return KVS_OK;
    }
    TRY(tj_bool(config, "tokenizer_config.json", key, false, &add, err));
    if (add && id < 0) {
        return err_set(err, KVS_FORMAT, "tokenizer_config.json: %s without such a token", key);
    }
    int32_t k = 0;
    while (k < *n && ids[k] != id) {
        k++;
    }
    if (add && k == *n) {
        if (*n == TOK_WRAP_MAX) {
            return err_set(err, KVS_LIMIT,
                           "tokenizer_config.json: %s makes more than %d tokens on one side", key,
                           TOK_WRAP_MAX);
        }
        const int32_t at = front ? 0 : *n;
        memmove(ids + at + 1, ids + at, (size_t)(*n - at) * sizeof *ids);
        ids[at] = id;
        (*n)++;
    } else if (!add && k < *n) {
        memmove(ids + k, ids + k + 1, (size_t)(*n - k - 1) * sizeof *ids);
        (*n)--;
    }
    return KVS_OK;
}

kvs_status tok_read_config(kvs_tokenizer *t, const json_t *config, kvs_error *err)
{
    TRY(read_token(t, config, "bos_token", &t->bos, err));
    TRY(read_token(t, config, "eos_token", &t->eos, err));
    TRY(settle(config, "add_bos_token", t->bos, t->before, &t->n_before, true, err));
    return settle(config, "add_eos_token", t->eos, t->after, &t->n_after, false, err);
}
