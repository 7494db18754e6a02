/* api/text_api.c - public functions of kvspan/text.h. */
#include "kvspan/text.h"

#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "text/detok.h"
#include "text/tokenizer.h"

kvs_status kvs_tokenizer_open(kvs_tokenizer **out, const char *model_dir, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID,
                       "out is NULL; give the address of a kvs_tokenizer pointer");
    }
    *out = NULL;
    if (model_dir == NULL) {
        return err_set(err, KVS_INVALID, "model_dir is NULL; give a model's folder");
    }
    return tok_open(out, model_dir, err);
}

void kvs_tokenizer_close(kvs_tokenizer *t)
{
    tok_free(t);
}

int32_t kvs_tokenizer_size(const kvs_tokenizer *t)
{
    return t != NULL ? t->v.n_id : 0;
}

int32_t kvs_tokenizer_bos(const kvs_tokenizer *t)
{
    return t != NULL ? t->bos : -1;
}

int32_t kvs_tokenizer_eos(const kvs_tokenizer *t)
{
    return t != NULL ? t->eos : -1;
}

int32_t kvs_tokenizer_adds_bos(const kvs_tokenizer *t)
{
    for (int32_t i = 0; t != NULL && t->bos >= 0 && i < t->n_before; i++) {
        if (t->before[i] == t->bos) {
            return 1;
        }
    }
    return 0;
}

int32_t kvs_tokenizer_prefix(const kvs_tokenizer *t, int32_t *ids, int32_t cap)
{
    if (t == NULL) {
        return 0;
    }
    for (int32_t i = 0; ids != NULL && i < t->n_before && i < cap; i++) {
        ids[i] = t->before[i];
    }
    return t->n_before;
}

size_t kvs_tokens_bound(size_t n_bytes)
{
    const size_t most = (SIZE_MAX - 2 * TOK_WRAP_MAX) / 3;
    return n_bytes < most ? 3 * n_bytes + 2 * TOK_WRAP_MAX : SIZE_MAX;
}

kvs_status kvs_tokens_encode(const kvs_tokenizer *t, const char *text, size_t n_bytes,
                             uint32_t flags, int32_t *ids, size_t cap, size_t *n_ids,
                             kvs_error *err)
{
    const uint32_t all = KVS_ENCODE_TEMPLATE | KVS_ENCODE_SPECIAL | KVS_ENCODE_NO_ADDED;
    const uint32_t both = KVS_ENCODE_SPECIAL | KVS_ENCODE_NO_ADDED;
    if (n_ids == NULL) {
        return err_set(err, KVS_INVALID, "n_ids is NULL; give the address of a size_t");
    }
    *n_ids = 0;
    if (t == NULL || (text == NULL && n_bytes > 0) || (ids == NULL && cap > 0)) {
        return err_set(err, KVS_INVALID, "%s is NULL",
                       t == NULL                ? "the tokenizer"
                       : ids == NULL && cap > 0 ? "ids"
                                                : "text");
    }
    if ((flags & ~all) != 0 || (flags & both) == both) {
        return err_set(err, KVS_INVALID,
                       "flags %u: KVS_ENCODE_TEMPLATE, and KVS_ENCODE_SPECIAL or "
                       "KVS_ENCODE_NO_ADDED",
                       flags);
    }
    id_sink out = {ids, cap, 0};
    TRY(tok_encode(t, text, n_bytes, flags, &out, err));
    *n_ids = out.n;
    if (out.n > cap && ids != NULL) {
        return err_set(err, KVS_LIMIT, "room for %zu ids, %zu are needed", cap, out.n);
    }
    return KVS_OK;
}

const char *kvs_token_piece(const kvs_tokenizer *t, int32_t id, size_t *n)
{
    const int has = t != NULL && vocab_has(&t->v, id);
    if (n != NULL) {
        *n = has ? t->v.len[id] : 0;
    }
    return has ? t->v.bytes + t->v.at[id] : NULL;
}

int32_t kvs_token_is_special(const kvs_tokenizer *t, int32_t id)
{
    return t != NULL && vocab_has(&t->v, id) && (t->v.flags[id] & VOCAB_SPECIAL) != 0;
}

int32_t kvs_token_find(const kvs_tokenizer *t, const char *text)
{
    return t != NULL && text != NULL ? tok_find(t, text, strlen(text)) : -1;
}

kvs_status kvs_detok_new(kvs_detok **out, const kvs_tokenizer *t, int32_t skip_special,
                         kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "out is NULL; give the address of a kvs_detok pointer");
    }
    *out = NULL;
    if (t == NULL) {
        return err_set(err, KVS_INVALID, "the tokenizer is NULL");
    }
    return detok_new(out, t, skip_special != 0, err);
}

void kvs_detok_free(kvs_detok *d)
{
    detok_free(d);
}

size_t kvs_detok_bound(const kvs_detok *d)
{
    return d != NULL ? detok_bound(d->t) : 0;
}

static kvs_status check_push(const kvs_detok *d, const char *out, size_t cap, const size_t *n,
                             kvs_error *err)
{
    if (d == NULL || n == NULL || (out == NULL && cap > 0)) {
        return err_set(err, KVS_INVALID, "%s is NULL",
                       d == NULL   ? "the detokeniser"
                       : n == NULL ? "n"
                                   : "out");
    }
    return KVS_OK;
}

kvs_status kvs_detok_push(kvs_detok *d, int32_t id, char *out, size_t cap, size_t *n,
                          kvs_error *err)
{
    TRY(check_push(d, out, cap, n, err));
    *n = 0;
    if (id < 0) {
        return err_set(err, KVS_INVALID, "token id %d: ids are not negative", id);
    }
    return detok_push(d, id, out, cap, n, err);
}

kvs_status kvs_detok_flush(kvs_detok *d, char *out, size_t cap, size_t *n, kvs_error *err)
{
    TRY(check_push(d, out, cap, n, err));
    return detok_flush(d, out, cap, n, err);
}

kvs_status kvs_tokens_decode(const kvs_tokenizer *t, const int32_t *ids, size_t n_ids,
                             int32_t skip_special, char *out, size_t cap, size_t *n, kvs_error *err)
{
    if (n == NULL) {
        return err_set(err, KVS_INVALID, "n is NULL; give the address of a size_t");
    }
    *n = 0;
    if ((ids == NULL && n_ids > 0) || (out == NULL && cap > 0)) {
        return err_set(err, KVS_INVALID, "%s is NULL", ids == NULL && n_ids > 0 ? "ids" : "out");
    }
    kvs_detok *d = NULL;
    TRY(kvs_detok_new(&d, t, skip_special, err));
    const size_t bound = detok_bound(t);
    char *part = mem_alloc(bound, 0);
    kvs_status st = part != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "detok: no memory");
    size_t total = 0;
    for (size_t i = 0; st == KVS_OK && i <= n_ids; i++) {
        size_t len = 0;
        st = i < n_ids ? kvs_detok_push(d, ids[i], part, bound, &len, err)
                       : kvs_detok_flush(d, part, bound, &len, err);
        if (total < cap) {
            memcpy(out + total, part, len < cap - total ? len : cap - total);
        }
        total += len;
    }
    mem_free(part);
    detok_free(d);
    TRY(st);
    *n = total;
    if (total > cap && out != NULL) {
        return err_set(err, KVS_LIMIT, "room for %zu bytes of text, %zu are needed", cap, total);
    }
    return KVS_OK;
}
