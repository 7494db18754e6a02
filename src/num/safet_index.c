/* num/safet_index.c - the safetensors files of a folder: one, or the shards that an index names.
 *
 * The index is untrusted too: a shard's name may not leave the folder. */
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"
#include "num/safet_impl.h"

#define INDEX_BYTES_MAX ((size_t)256 << 20)

static const char k_single[] = "model.safetensors";
static const char k_index[] = "model.safetensors.index.json";

enum { PATH_CAP = 4096 };

static kvs_status path_of(char *path, const char *dir, const char *name, kvs_error *err)
{
    const int n = snprintf(path, PATH_CAP, "%s/%s", dir, name);
    if (n < 0 || n >= PATH_CAP) {
        return err_set(err, KVS_INVALID, "model folder: a path of %zu bytes is too long",
                       strlen(dir) + strlen(name));
    }
    return KVS_OK;
}

static kvs_status map_file(safet *s, const char *dir, int32_t i, kvs_error *err)
{
    safet_file *f = &s->file[i];
    char path[PATH_CAP];
    TRY(path_of(path, dir, f->name, err));
    TRY(file_map_open(&f->map, path, err));
    f->data = f->map.data;
    f->n = f->map.n;
    return safet_add_tensors(s, i, err);
}

static bool plain_name(const char *name)
{
    const size_t n = strlen(name);
    static const char k_end[] = ".safetensors";
    return n > sizeof k_end - 1 && n <= 200 && name[0] != '.' && strchr(name, '/') == NULL &&
           strcmp(name + n - (sizeof k_end - 1), k_end) == 0;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct shards of the map, in the order of their names. */
static kvs_status list_shards(safet *s, json_t *map, kvs_error *err)
{
    const size_t n = json_object_size(map);
    const char **name = mem_alloc_array(n, sizeof *name, 0);
    if (name == NULL) {
        return err_set(err, KVS_NOMEM, "%s: no memory for %zu entries", k_index, n);
    }
    kvs_status st = KVS_OK;
    size_t i = 0;
    const char *key = NULL;
    json_t *v = NULL;
    json_object_foreach(map, key, v)
    {
        name[i] = json_string_value(v);
        if (name[i] == NULL || !plain_name(name[i])) {
            st = err_set(err, KVS_FORMAT,
                         "%s: tensor %.80s: its shard %.40s is no name of a .safetensors file",
                         k_index, key, name[i] != NULL ? name[i] : "");
            goto out;
        }
        i++;
    }
    qsort(name, n, sizeof *name, by_text);
    for (i = 0; i < n; i++) {
        if (i > 0 && strcmp(name[i], name[i - 1]) == 0) {
            continue;
        }
        if (s->n_file == SAFET_MAX_FILE) {
            st = err_set(err, KVS_LIMIT, "%s: more than %d shards", k_index, SAFET_MAX_FILE);
            goto out;
        }
        TRY_GOTO(safet_add_file(s, name[i], err), out);
    }
out:
    mem_free(name);
    return st;
}

/* Drops the tensors that the index does not list or lists elsewhere. */
static void keep_listed(safet *s, const json_t *map)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < s->n_tensor; i++) {
        const safet_tensor *t = &s->tensor[i];
        const char *shard = json_string_value(json_object_get(map, t->name));
        if (shard != NULL && strcmp(shard, s->file[t->file].name) == 0) {
            s->tensor[kept++] = *t;
        } else {
            mem_free((char *)(uintptr_t)t->name);
        }
    }
    s->n_tensor = kept;
}

static kvs_status check_listed(const safet *s, json_t *map, kvs_error *err)
{
    if ((size_t)s->n_tensor == json_object_size(map)) {
        return KVS_OK; /* names are distinct, and all of them are in the map */
    }
    const char *key = NULL;
    json_t *v = NULL;
    json_object_foreach(map, key, v)
    {
        if (safet_find(s, key) == NULL) {
            return err_set(err, KVS_FORMAT, "%s: tensor %.80s is not in %.60s", k_index, key,
                           json_string_value(v));
        }
    }
    return KVS_OK;
}

static kvs_status open_map(safet *s, const char *dir, json_t *map, kvs_error *err)
{
    if (!json_is_object(map) || json_object_size(map) == 0) {
        return err_set(err, KVS_FORMAT, "%s: weight_map is missing, empty or no object", k_index);
    }
    TRY(list_shards(s, map, err));
    for (int32_t i = 0; i < s->n_file; i++) {
        TRY(map_file(s, dir, i, err));
    }
    keep_listed(s, map);
    TRY(safet_sort(s, err));
    return check_listed(s, map, err);
}

static kvs_status open_index(safet *s, const char *dir, kvs_error *err)
{
    char path[PATH_CAP];
    char *text = NULL;
    size_t n = 0;
    TRY(path_of(path, dir, k_index, err));
    TRY(file_read_all(path, INDEX_BYTES_MAX, &text, &n, err));
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    mem_free(text);
    if (root == NULL) {
        const kvs_status st =
            err_set(err, KVS_FORMAT, "%s line %d: %s", k_index, why.line, why.text);
        err_at(err, why.position);
        return st;
    }
    const kvs_status st = open_map(s, dir, json_object_get(root, "weight_map"), err);
    json_decref(root);
    return st;
}

static kvs_status open_dir(safet *s, const char *dir, kvs_error *err)
{
    char single[PATH_CAP];
    char index[PATH_CAP];
    TRY(path_of(single, dir, k_single, err));
    TRY(path_of(index, dir, k_index, err));
    const bool has_single = access(single, F_OK) == 0;
    const bool has_index = access(index, F_OK) == 0;
    if (has_single && has_index) {
        return err_set(err, KVS_FORMAT, "the folder holds both %s and %s: take one away", k_single,
                       k_index);
    }
    if (has_index) {
        return open_index(s, dir, err);
    }
    if (!has_single) {
        return err_set(err, KVS_IO, "the folder holds neither %s nor %s", k_single, k_index);
    }
    TRY(safet_add_file(s, k_single, err));
    TRY(map_file(s, dir, 0, err));
    return safet_sort(s, err);
}

kvs_status safet_open(safet **out, const char *dir, kvs_error *err)
{
    *out = NULL;
    safet *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "%.100s: no memory to read it", dir);
    }
    const kvs_status st = open_dir(s, dir, err);
    if (st < 0) {
        safet_close(s);
        return st;
    }
    *out = s;
    return KVS_OK;
}
