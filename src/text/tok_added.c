/* text/tok_added.c - "added_tokens" of tokenizer.json. */
#include <string.h>

#include "base/err.h"
#include "text/tok_json.h"

/* The text and id of an entry. */
static kvs_status head(const json_t *entry, size_t i, const char **text, size_t *n, int32_t *id,
                       kvs_error *err)
{
    const json_t *content = tj_get(entry, "content");
    const json_t *number = tj_get(entry, "id");
    if (!json_is_string(content) || json_string_length(content) == 0 ||
        json_string_length(content) > ADDED_TEXT_MAX) {
        return err_set(err, KVS_FORMAT, "added_tokens[%zu]: content is no text of 1 to %d bytes", i,
                       ADDED_TEXT_MAX);
    }
    const int64_t x = json_is_integer(number) ? (int64_t)json_integer_value(number) : -1;
    if (x < 0 || x > VOCAB_ID_MAX) {
        return err_set(err, KVS_FORMAT, "added_tokens[%zu] \"%.60s\": id is not in 0..%d", i,
                       json_string_value(content), VOCAB_ID_MAX);
    }
    *text = json_string_value(content);
    *n = json_string_length(content);
    *id = (int32_t)x;
    return KVS_OK;
}

kvs_status tok_measure_added(const json_t *added, int32_t *max_id, size_t *bytes, kvs_error *err)
{
    for (size_t i = 0; i < json_array_size(added); i++) {
        const char *text = NULL;
        size_t n = 0;
        int32_t id = 0;
        TRY(head(json_array_get(added, i), i, &text, &n, &id, err));
        *max_id = id > *max_id ? id : *max_id;
        *bytes += n;
    }
    return KVS_OK;
}

static kvs_status read_flags(const json_t *entry, uint32_t *flags, kvs_error *err)
{
    static const struct {
        const char *key;
        uint32_t flag;
    } k_flag[] = {
        {"special", ADDED_SPECIAL},       {"lstrip", ADDED_LSTRIP},
        {"rstrip", ADDED_RSTRIP},         {"single_word", ADDED_SINGLE_WORD},
        {"normalized", ADDED_NORMALIZED},
    };
    *flags = 0;
    for (size_t i = 0; i < sizeof k_flag / sizeof *k_flag; i++) {
        bool on = false;
        TRY(tj_bool(entry, "added_tokens", k_flag[i].key, false, &on, err));
        *flags |= on ? k_flag[i].flag : 0;
    }
    return KVS_OK;
}

/* An added token may name a piece of the vocabulary, then by its id; otherwise its id is its own. */
static kvs_status settle_id(kvs_tokenizer *t, const json_t *pieces, const char *text, size_t n,
                            int32_t id, kvs_error *err)
{
    const json_t *known = json_object_get(pieces, text);
    if (known == NULL) {
        TRY(vocab_add(&t->v, id, text, n, false, err));
    } else if (json_integer_value(known) != id) {
        return err_set(err, KVS_FORMAT, "\"%.60s\" has the id %d here and %d in model.vocab", text,
                       id, (int)json_integer_value(known));
    }
    t->v.flags[id] |= VOCAB_ADDED;
    return KVS_OK;
}

kvs_status tok_read_added(kvs_tokenizer *t, const json_t *pieces, const json_t *added,
                          kvs_error *err)
{
    const size_t n_entry = json_array_size(added);
    size_t n_normal = 0;
    for (size_t i = 0; i < n_entry; i++) {
        uint32_t flags = 0;
        TRY(read_flags(json_array_get(added, i), &flags, err));
        n_normal += (flags & ADDED_NORMALIZED) != 0;
    }
    if (n_entry > VOCAB_ID_MAX) {
        return err_set(err, KVS_LIMIT, "added_tokens: %zu entries", n_entry);
    }
    TRY(added_init(&t->raw, (int32_t)(n_entry - n_normal), err));
    TRY(added_init(&t->normal, (int32_t)n_normal, err));
    added_token *next[2] = {t->raw.tok, t->normal.tok};
    for (size_t i = 0; i < n_entry; i++) {
        const json_t *entry = json_array_get(added, i);
        const char *text = NULL;
        size_t n = 0;
        int32_t id = 0;
        uint32_t flags = 0;
        TRY(head(entry, i, &text, &n, &id, err));
        TRY(read_flags(entry, &flags, err));
        kvs_status st = settle_id(t, pieces, text, n, id, err);
        if (st < 0) {
            err_prefix(err, "added_tokens[%zu]", i);
            return st;
        }
        if ((flags & ADDED_SPECIAL) != 0) {
            t->v.flags[id] |= VOCAB_SPECIAL;
        }
        added_token **to = &next[(flags & ADDED_NORMALIZED) != 0];
        TRY(added_fill((*to)++, text, n, id, flags, err));
    }
    TRY(added_sort(&t->raw, err));
    TRY(added_sort(&t->normal, err));
    for (int32_t i = 0; i < t->normal.n; i++) {
        const added_token *a = &t->normal.tok[i];
        if (added_find(&t->raw, a->text, a->n) != NULL) {
            return err_set(err, KVS_FORMAT, "added_tokens: \"%.*s\" is there twice",
                           (int)(a->n < 60 ? a->n : 60), a->text);
        }
    }
    return KVS_OK;
}
