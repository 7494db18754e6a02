/* num/safet.c - one safetensors file: its header, checked, as tensors. */
#include "num/safet.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "num/safet_impl.h"

#define HEADER_MAX ((uint64_t)100 << 20)

enum { PREFIX = 8 }; /* bytes of the header's length */

static const struct {
    const char *name;
    int32_t bytes;
} k_type[] = {
    [SAFET_BOOL] = {"BOOL", 1},       [SAFET_U8] = {"U8", 1},
    [SAFET_I8] = {"I8", 1},           [SAFET_F8_E4M3] = {"F8_E4M3", 1},
    [SAFET_F8_E5M2] = {"F8_E5M2", 1}, [SAFET_F8_E8M0] = {"F8_E8M0", 1},
    [SAFET_U16] = {"U16", 2},         [SAFET_I16] = {"I16", 2},
    [SAFET_F16] = {"F16", 2},         [SAFET_BF16] = {"BF16", 2},
    [SAFET_U32] = {"U32", 4},         [SAFET_I32] = {"I32", 4},
    [SAFET_F32] = {"F32", 4},         [SAFET_U64] = {"U64", 8},
    [SAFET_I64] = {"I64", 8},         [SAFET_F64] = {"F64", 8},
};

enum { N_TYPE = (int)(sizeof k_type / sizeof *k_type) };

const char *safet_type_name(safet_type t)
{
    return (int)t >= 1 && (int)t < N_TYPE ? k_type[t].name : "?";
}

int32_t safet_type_bytes(safet_type t)
{
    return (int)t >= 1 && (int)t < N_TYPE ? k_type[t].bytes : 0;
}

/* ---- one entry of the header ----------------------------------------------------------------- */

/* Where an entry is, for messages. */
typedef struct place {
    const char *file, *tensor;
    kvs_error *err;
} place;

#define REFUSE(p, code, ...) refuse((p), (code), __LINE__, __VA_ARGS__)

ERR_PRINTF(4, 5)
static kvs_status refuse(const place *p, kvs_status code, int line, const char *fmt, ...)
{
    char why[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return err_set_at(p->err, __FILE__, line, code, "%.60s: tensor %.80s: %s", p->file, p->tensor,
                      why);
}

static kvs_status check_name(const place *p)
{
    const size_t n = strlen(p->tensor);
    if (n < 1 || n > SAFET_MAX_NAME) {
        return REFUSE(p, KVS_FORMAT, "a name of %zu bytes: must have 1 to %d", n, SAFET_MAX_NAME);
    }
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)p->tensor[i] < 0x20 || p->tensor[i] == 0x7F) {
            const place unnamed = {p->file, "?", p->err};
            return REFUSE(&unnamed, KVS_FORMAT, "a name with a control character");
        }
    }
    return KVS_OK;
}

static kvs_status read_type(const place *p, const json_t *v, safet_type *out)
{
    const char *name = json_string_value(v);
    if (name == NULL) {
        return REFUSE(p, KVS_FORMAT, "dtype is missing or no text");
    }
    for (int i = 1; i < N_TYPE; i++) {
        if (strcmp(name, k_type[i].name) == 0) {
            *out = (safet_type)i;
            return KVS_OK;
        }
    }
    return REFUSE(p, KVS_UNSUPPORTED, "dtype %.32s is unknown", name);
}

/* Dimensions, and the bytes they make. */
static kvs_status read_shape(const place *p, const json_t *v, safet_tensor *t, int64_t *bytes)
{
    if (!json_is_array(v)) {
        return REFUSE(p, KVS_FORMAT, "shape is missing or no list");
    }
    if (json_array_size(v) > SAFET_MAX_DIM) {
        return REFUSE(p, KVS_FORMAT, "shape has %zu dimensions: at most %d", json_array_size(v),
                      SAFET_MAX_DIM);
    }
    t->n_dim = (int32_t)json_array_size(v);
    int64_t n = safet_type_bytes(t->type);
    bool empty = false;
    for (int32_t i = 0; i < t->n_dim; i++) {
        const json_t *d = json_array_get(v, (size_t)i);
        if (!json_is_integer(d) || json_integer_value(d) < 0) {
            return REFUSE(p, KVS_FORMAT, "shape[%d] is no size", i);
        }
        t->dim[i] = json_integer_value(d);
        empty = empty || t->dim[i] == 0;
        if (t->dim[i] > 0 && n > INT64_MAX / t->dim[i]) {
            return REFUSE(p, KVS_FORMAT, "shape: the product of its %d sizes overflows", t->n_dim);
        }
        n *= t->dim[i] > 0 ? t->dim[i] : 1;
    }
    *bytes = empty ? 0 : n;
    return KVS_OK;
}

static kvs_status read_offsets(const place *p, const json_t *v, int64_t limit, int64_t *begin,
                               int64_t *end)
{
    const json_t *b = json_array_get(v, 0);
    const json_t *e = json_array_get(v, 1);
    if (!json_is_array(v) || json_array_size(v) != 2 || !json_is_integer(b) ||
        !json_is_integer(e)) {
        return REFUSE(p, KVS_FORMAT, "data_offsets is missing or no pair of integers");
    }
    *begin = json_integer_value(b);
    *end = json_integer_value(e);
    if (*begin < 0 || *end < *begin || *end > limit) {
        return REFUSE(p, KVS_FORMAT,
                      "data_offsets %" PRId64 "..%" PRId64 ": the file has 0..%" PRId64, *begin,
                      *end, limit);
    }
    return KVS_OK;
}

static kvs_status read_entry(const place *p, const json_t *v, const safet_file *f, safet_tensor *t)
{
    TRY(check_name(p));
    if (!json_is_object(v)) {
        return REFUSE(p, KVS_FORMAT, "its entry is no object");
    }
    if (json_object_size(v) != 3) {
        return REFUSE(p, KVS_FORMAT,
                      "its entry has %zu keys: dtype, shape and data_offsets are known",
                      json_object_size(v));
    }
    const int64_t limit = (int64_t)(f->n - PREFIX - f->header);
    int64_t bytes = 0;
    int64_t begin = 0;
    int64_t end = 0;
    TRY(read_type(p, json_object_get(v, "dtype"), &t->type));
    TRY(read_shape(p, json_object_get(v, "shape"), t, &bytes));
    TRY(read_offsets(p, json_object_get(v, "data_offsets"), limit, &begin, &end));
    if (end - begin != bytes) {
        return REFUSE(p, KVS_FORMAT, "its shape takes %" PRId64 " bytes, its offsets span %" PRId64,
                      bytes, end - begin);
    }
    t->data = f->data + PREFIX + f->header + begin;
    t->bytes = bytes;
    return KVS_OK;
}

/* ---- the header ------------------------------------------------------------------------------ */

static uint64_t load_u64(const unsigned char *p)
{
    uint64_t x = 0;
    for (int i = 0; i < PREFIX; i++) {
        x |= (uint64_t)p[i] << (8 * i);
    }
    return x;
}

static int by_place(const void *a, const void *b)
{
    const safet_tensor *x = a;
    const safet_tensor *y = b;
    if (x->data != y->data) {
        return x->data < y->data ? -1 : 1;
    }
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Whether n tensors cover the data of their file from its first to its last byte, each once. */
static kvs_status check_cover(const safet_file *f, safet_tensor *t, int64_t n, kvs_error *err)
{
    if (n > 0) {
        qsort(t, (size_t)n, sizeof *t, by_place);
    }
    const unsigned char *at = f->data + PREFIX + f->header;
    for (int64_t i = 0; i < n; i++) {
        const place p = {f->name, t[i].name, err};
        if (t[i].data < at) {
            return REFUSE(&p, KVS_FORMAT, "it overlaps tensor %.80s", t[i - 1].name);
        }
        if (t[i].data > at) {
            return REFUSE(&p, KVS_FORMAT, "%" PRId64 " bytes before it belong to no tensor",
                          (int64_t)(t[i].data - at));
        }
        at += t[i].bytes;
    }
    const int64_t left = f->data + f->n - at;
    if (left > 0) {
        return err_set(err, KVS_FORMAT, "%.100s: %" PRId64 " bytes at its end belong to no tensor",
                       f->name, left);
    }
    return KVS_OK;
}

static kvs_status check_metadata(const safet_file *f, const json_t *v, kvs_error *err)
{
    const char *key = NULL;
    json_t *value = NULL;
    bool good = json_is_object(v);
    json_object_foreach((json_t *)(uintptr_t)v, key, value)
    {
        good = good && json_is_string(value);
    }
    return good ? KVS_OK
                : err_set(err, KVS_FORMAT, "%.100s: __metadata__ is no object of texts", f->name);
}

static kvs_status grow(safet *s, size_t more, kvs_error *err)
{
    const int64_t want = s->n_tensor + (int64_t)more;
    if (want <= s->cap_tensor) {
        return KVS_OK;
    }
    const int64_t cap = want > 2 * s->cap_tensor ? want : 2 * s->cap_tensor;
    safet_tensor *t = mem_realloc(s->tensor, (size_t)cap * sizeof *t);
    if (t == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for %" PRId64 " tensors", cap);
    }
    s->tensor = t;
    s->cap_tensor = cap;
    return KVS_OK;
}

static kvs_status add_entries(safet *s, int32_t i_file, json_t *root, kvs_error *err)
{
    const safet_file *f = &s->file[i_file];
    TRY(grow(s, json_object_size(root), err));
    const int64_t first = s->n_tensor;
    const char *key = NULL;
    json_t *v = NULL;
    json_object_foreach(root, key, v)
    {
        if (strcmp(key, "__metadata__") == 0) {
            TRY(check_metadata(f, v, err));
            continue;
        }
        const place p = {f->name, key, err};
        safet_tensor t;
        memset(&t, 0, sizeof t);
        t.file = i_file;
        TRY(read_entry(&p, v, f, &t));
        const size_t n = strlen(key) + 1;
        char *name = mem_alloc(n, 0);
        if (name == NULL) {
            return err_set(err, KVS_NOMEM, "%.100s: no memory for the names of its tensors",
                           f->name);
        }
        memcpy(name, key, n);
        t.name = name;
        s->tensor[s->n_tensor++] = t;
    }
    const int64_t n = s->n_tensor - first;
    return check_cover(f, n > 0 ? s->tensor + first : NULL, n, err);
}

kvs_status safet_add_tensors(safet *s, int32_t i_file, kvs_error *err)
{
    safet_file *f = &s->file[i_file];
    if (f->n < PREFIX) {
        return err_set(err, KVS_FORMAT,
                       "%.100s: %zu bytes: a safetensors file starts with 8 of length", f->name,
                       f->n);
    }
    const uint64_t n = load_u64(f->data);
    if (n < 2 || n > HEADER_MAX || n > f->n - PREFIX) {
        return err_set(err, KVS_FORMAT, "%.100s: a header of %" PRIu64 " bytes in a file of %zu",
                       f->name, n, f->n);
    }
    f->header = (size_t)n;
    json_error_t why;
    json_t *root =
        json_loadb((const char *)f->data + PREFIX, f->header, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        const kvs_status st = err_set(err, KVS_FORMAT, "%.100s: header: %s", f->name, why.text);
        err_at(err, (int64_t)why.position + PREFIX);
        return st;
    }
    const kvs_status st = json_is_object(root)
                              ? add_entries(s, i_file, root, err)
                              : err_set(err, KVS_FORMAT, "%.100s: header: no object", f->name);
    json_decref(root);
    return st;
}

/* ---- the set --------------------------------------------------------------------------------- */

kvs_status safet_add_file(safet *s, const char *name, kvs_error *err)
{
    if (s->n_file == s->cap_file) {
        const int32_t cap = s->cap_file > 0 ? 2 * s->cap_file : 4;
        safet_file *f = mem_realloc(s->file, (size_t)cap * sizeof *f);
        if (f == NULL) {
            return err_set(err, KVS_NOMEM, "no memory for %d files", cap);
        }
        s->file = f;
        s->cap_file = cap;
    }
    const size_t n = strlen(name) + 1;
    char *copy = mem_alloc(n, 0);
    if (copy == NULL) {
        return err_set(err, KVS_NOMEM, "%.100s: no memory for its name", name);
    }
    memcpy(copy, name, n);
    memset(&s->file[s->n_file], 0, sizeof *s->file);
    s->file[s->n_file++].name = copy;
    return KVS_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const safet_tensor *)a)->name, ((const safet_tensor *)b)->name);
}

kvs_status safet_sort(safet *s, kvs_error *err)
{
    if (s->n_tensor > 0) {
        qsort(s->tensor, (size_t)s->n_tensor, sizeof *s->tensor, by_name);
    }
    for (int64_t i = 1; i < s->n_tensor; i++) {
        const safet_tensor *a = &s->tensor[i - 1];
        const safet_tensor *b = &s->tensor[i];
        if (strcmp(a->name, b->name) == 0) {
            return err_set(err, KVS_FORMAT, "tensor %.100s is in %.50s and in %.50s", a->name,
                           s->file[a->file].name, s->file[b->file].name);
        }
    }
    return KVS_OK;
}

kvs_status safet_open_memory(safet **out, const char *name, const void *data, size_t n,
                             kvs_error *err)
{
    *out = NULL;
    safet *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "%.100s: no memory to read it", name);
    }
    kvs_status st = safet_add_file(s, name, err);
    if (st >= 0) {
        s->file[0].data = data;
        s->file[0].n = n;
        st = safet_add_tensors(s, 0, err);
    }
    if (st >= 0) {
        st = safet_sort(s, err);
    }
    if (st < 0) {
        safet_close(s);
        return st;
    }
    *out = s;
    return KVS_OK;
}

void safet_close(safet *s)
{
    if (s == NULL) {
        return;
    }
    for (int64_t i = 0; i < s->n_tensor; i++) {
        mem_free((char *)(uintptr_t)s->tensor[i].name);
    }
    for (int32_t i = 0; i < s->n_file; i++) {
        file_map_close(&s->file[i].map);
        mem_free(s->file[i].name);
    }
    mem_free(s->tensor);
    mem_free(s->file);
    mem_free(s);
}

const safet_tensor *safet_find(const safet *s, const char *name)
{
    const safet_tensor key = {.name = name};
    return s->n_tensor > 0
               ? bsearch(&key, s->tensor, (size_t)s->n_tensor, sizeof *s->tensor, by_name)
               : NULL;
}

int64_t safet_count(const safet *s)
{
    return s->n_tensor;
}

const safet_tensor *safet_at(const safet *s, int64_t i)
{
    return &s->tensor[i];
}

int64_t safet_index(const safet *s, const safet_tensor *t)
{
    return t - s->tensor;
}

int32_t safet_n_file(const safet *s)
{
    return s->n_file;
}

const char *safet_file_name(const safet *s, int32_t i_file)
{
    return s->file[i_file].name;
}

const void *safet_header(const safet *s, int32_t i_file, size_t *n)
{
    *n = s->file[i_file].header;
    return s->file[i_file].data + PREFIX;
}

void safet_scattered(const safet *s, bool on)
{
    for (int32_t i = 0; i < s->n_file; i++) {
        file_map_scattered(&s->file[i].map, on);
    }
}

void safet_want(const safet *s, const safet_tensor *t)
{
    const safet_file *f = &s->file[t->file];
    file_map_want(&f->map, (size_t)(t->data - f->data), (size_t)t->bytes);
}
