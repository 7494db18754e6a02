/* text/tok_json.c - the files of a folder, and small readers. */
#include "text/tok_json.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/mem.h"

kvs_status tj_load(json_t **out, const char *name, const char *text, size_t n, kvs_error *err)
{
    json_error_t why;
    *out = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (*out != NULL && json_is_object(*out)) {
        return KVS_OK;
    }
    if (*out != NULL) {
        json_decref(*out);
        *out = NULL;
        return err_set(err, KVS_FORMAT, "%s: not an object", name);
    }
    const bool memory = json_error_code(&why) == json_error_out_of_memory;
    const kvs_status st =
        err_set(err, memory ? KVS_NOMEM : KVS_FORMAT, "%s line %d: %s", name, why.line, why.text);
    err_at(err, why.position);
    return st;
}

const json_t *tj_get(const json_t *v, const char *key)
{
    const json_t *x = json_object_get(v, key);
    return x == NULL || json_is_null(x) ? NULL : x;
}

kvs_status tj_bool(const json_t *v, const char *where, const char *key, bool absent, bool *out,
                   kvs_error *err)
{
    const json_t *x = tj_get(v, key);
    if (x != NULL && !json_is_boolean(x)) {
        return err_set(err, KVS_FORMAT, "%s: %s is neither true nor false", where, key);
    }
    *out = x == NULL ? absent : json_is_true(x);
    return KVS_OK;
}

const char *tj_type(const json_t *v)
{
    const char *s = json_string_value(tj_get(v, "type"));
    return s != NULL ? s : "";
}

static kvs_status read_root(kvs_tokenizer *t, const json_t *root, kvs_error *err)
{
    const json_t *model = tj_get(root, "model");
    const json_t *added = tj_get(root, "added_tokens");
    t->bos = -1;
    t->eos = -1;
    if (!json_is_object(model)) {
        return err_set(err, KVS_FORMAT, "model is missing");
    }
    if (added != NULL && !json_is_array(added)) {
        return err_set(err, KVS_FORMAT, "added_tokens is no list");
    }
    TRY(tok_read_model(t, model, added, err));
    TRY(tok_read_added(t, tj_get(model, "vocab"), added, err));
    return tok_read_steps(t, root, err);
}

kvs_status tok_parse(kvs_tokenizer **out, const char *json, size_t n, const char *config,
                     size_t n_config, kvs_error *err)
{
    json_t *root = NULL;
    json_t *conf = NULL;
    *out = NULL;
    kvs_tokenizer *t = mem_calloc(1, sizeof *t);
    kvs_status st = t != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "tokenizer: no memory");
    if (st == KVS_OK) {
        st = tj_load(&root, "tokenizer.json", json, n, err);
    }
    if (st == KVS_OK && config != NULL) {
        st = tj_load(&conf, "tokenizer_config.json", config, n_config, err);
    }
    if (st == KVS_OK) {
        st = read_root(t, root, err);
        if (st < 0) {
            err_prefix(err, "tokenizer.json");
        }
    }
    if (st == KVS_OK && conf != NULL) {
        st = tok_read_config(t, conf, err);
    }
    json_decref(root);
    json_decref(conf);
    if (st < 0) {
        tok_free(t);
        return st;
    }
    *out = t;
    return KVS_OK;
}

/* "dir/name" into path; refuses what does not fit. */
static kvs_status join(char *path, size_t cap, const char *dir, const char *name, kvs_error *err)
{
    size_t len = strlen(dir);
    while (len > 1 && dir[len - 1] == '/') {
        len--;
    }
    const int n = snprintf(path, cap, "%.*s/%s", len < cap ? (int)len : (int)cap, dir, name);
    if (n < 0 || (size_t)n >= cap) {
        return err_set(err, KVS_INVALID, "model folder: a path of %zu bytes is too long", len);
    }
    return KVS_OK;
}

static kvs_status read_file(const char *path, char **data, size_t *n, kvs_error *err)
{
    return file_read_all(path, TOK_FILE_MAX, data, n, err);
}

kvs_status tok_open(kvs_tokenizer **out, const char *dir, kvs_error *err)
{
    char path[4096];
    char config_path[4096];
    char tiktoken[4096];
    *out = NULL;
    TRY(join(path, sizeof path, dir, "tokenizer.json", err));
    TRY(join(config_path, sizeof config_path, dir, "tokenizer_config.json", err));
    TRY(join(tiktoken, sizeof tiktoken, dir, "tiktoken.model", err));
    if (access(path, F_OK) != 0 && access(tiktoken, F_OK) == 0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "%.120s has tiktoken.model (Kimi) and no tokenizer.json: this tokenizer is "
                       "not read yet",
                       dir);
    }
    char *json = NULL;
    char *config = NULL;
    size_t n = 0;
    size_t n_config = 0;
    TRY(read_file(path, &json, &n, err));
    kvs_status st = KVS_OK;
    if (access(config_path, F_OK) == 0) {
        st = read_file(config_path, &config, &n_config, err);
    }
    if (st == KVS_OK) {
        st = tok_parse(out, json, n, config, n_config, err);
        if (st < 0) {
            err_prefix(err, "%.80s", dir);
        }
    }
    mem_free(config);
    mem_free(json);
    return st;
}
