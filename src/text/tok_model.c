/* text/tok_model.c - "model" of tokenizer.json. */
#include <inttypes.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/tok_json.h"

/* What would change ids and is not done here. */
static kvs_status check_options(const json_t *model, kvs_error *err)
{
    static const char *const affix[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = tj_type(model);
    bool fallback = false;
    if (strcmp(type, "BPE") != 0 && (type[0] != '\0' || tj_get(model, "merges") == NULL)) {
        return err_set(err, KVS_UNSUPPORTED, "model.type %.40s: only BPE is supported",
                       type[0] != '\0' ? type : "is missing");
    }
    for (size_t i = 0; i < sizeof affix / sizeof *affix; i++) {
        const json_t *x = tj_get(model, affix[i]);
        if (x != NULL && (!json_is_string(x) || json_string_length(x) != 0)) {
            return err_set(err, KVS_UNSUPPORTED, "model.%s is set: only null is supported",
                           affix[i]);
        }
    }
    const json_t *dropout = tj_get(model, "dropout");
    if (dropout != NULL && (!json_is_number(dropout) || json_number_value(dropout) != 0.0)) {
        return err_set(err, KVS_UNSUPPORTED, "model.dropout is set: only null is supported");
    }
    TRY(tj_bool(model, "model", "byte_fallback", false, &fallback, err));
    if (fallback) {
        return err_set(err, KVS_UNSUPPORTED, "model.byte_fallback: only false is supported");
    }
    return KVS_OK;
}

/* Checks ids and counts bytes of the vocabulary. */
static kvs_status measure(const json_t *pieces, int32_t *max_id, size_t *bytes, kvs_error *err)
{
    if (!json_is_object(pieces)) {
        return err_set(err, KVS_FORMAT, "model.vocab is no object");
    }
    void *it = json_object_iter((json_t *)(uintptr_t)pieces);
    for (; it != NULL; it = json_object_iter_next((json_t *)(uintptr_t)pieces, it)) {
        const char *name = json_object_iter_key(it);
        const json_t *id = json_object_iter_value(it);
        const int64_t x = json_is_integer(id) ? (int64_t)json_integer_value(id) : -1;
        if (x < 0 || x > VOCAB_ID_MAX) {
            return err_set(err, KVS_FORMAT, "model.vocab: the id of \"%.40s\" is not in 0..%d",
                           name, VOCAB_ID_MAX);
        }
        *max_id = x > *max_id ? (int32_t)x : *max_id;
        *bytes += strlen(name);
    }
    return KVS_OK;
}

static kvs_status add_pieces(kvs_tokenizer *t, const json_t *pieces, kvs_error *err)
{
    void *it = json_object_iter((json_t *)(uintptr_t)pieces);
    for (; it != NULL; it = json_object_iter_next((json_t *)(uintptr_t)pieces, it)) {
        const char *name = json_object_iter_key(it);
        const int32_t id = (int32_t)json_integer_value(json_object_iter_value(it));
        const kvs_status st = vocab_add(&t->v, id, name, strlen(name), true, err);
        if (st < 0) {
            err_prefix(err, "model.vocab");
            return st;
        }
    }
    return KVS_OK;
}

/* The two sides of a merge, "a b" or ["a", "b"]. */
static bool sides(const json_t *merge, const char *side[2], size_t n[2])
{
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (size_t i = 0; i < 2; i++) {
            side[i] = json_string_value(json_array_get(merge, i));
            n[i] = json_string_length(json_array_get(merge, i));
        }
        return side[0] != NULL && side[1] != NULL;
    }
    if (!json_is_string(merge)) {
        return false;
    }
    const char *s = json_string_value(merge);
    const char *space = strchr(s, ' ');
    if (space == NULL || strchr(space + 1, ' ') != NULL) {
        return false;
    }
    side[0] = s;
    n[0] = (size_t)(space - s);
    side[1] = space + 1;
    n[1] = json_string_length(merge) - n[0] - 1;
    return true;
}

static kvs_status add_merge(kvs_tokenizer *t, const json_t *merge, size_t rank, kvs_error *err)
{
    static const char *const which[] = {"", "left piece", "right piece", "result"};
    char text[2][VOCAB_PIECE_MAX];
    const char *side[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    if (!sides(merge, side, n)) {
        return err_set(err, KVS_FORMAT, "model.merges[%zu] is no pair of pieces", rank);
    }
    for (int i = 0; i < 2; i++) {
        if (n[i] > VOCAB_PIECE_MAX || !vocab_spell(side[i], n[i], text[i], &n[i])) {
            return err_set(err, KVS_FORMAT,
                           "model.merges[%zu]: \"%.40s\" is not spelled in the byte alphabet", rank,
                           side[i]);
        }
    }
    const int unknown = vocab_add_merge(&t->v, (uint32_t)rank, text[0], n[0], text[1], n[1]);
    if (unknown != 0) {
        return err_set(err, KVS_FORMAT,
                       "model.merges[%zu] (%.*s, %.*s): its %s is not in model.vocab", rank,
                       n[0] < 40 ? (int)n[0] : 40, text[0], n[1] < 40 ? (int)n[1] : 40, text[1],
                       which[unknown]);
    }
    return KVS_OK;
}

kvs_status tok_read_model(kvs_tokenizer *t, const json_t *model, const json_t *added,
                          kvs_error *err)
{
    const json_t *pieces = tj_get(model, "vocab");
    const json_t *merges = tj_get(model, "merges");
    int32_t max_id = -1;
    size_t bytes = 0;
    TRY(check_options(model, err));
    TRY(tj_bool(model, "model", "ignore_merges", false, &t->ignore_merges, err));
    TRY(measure(pieces, &max_id, &bytes, err));
    TRY(tok_measure_added(added, &max_id, &bytes, err));
    if (!json_is_array(merges)) {
        return err_set(err, KVS_FORMAT, "model.merges is no list");
    }
    const size_t n_merge = json_array_size(merges);
    TRY(vocab_init(&t->v, max_id + 1, json_object_size(pieces), bytes, n_merge, err));
    TRY(add_pieces(t, pieces, err));
    for (size_t i = 0; i < n_merge; i++) {
        TRY(add_merge(t, json_array_get(merges, i), i, err));
    }
    return vocab_finish(&t->v, err);
}
