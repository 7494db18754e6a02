/* fuzz_model_index.c - a folder of two shards with any bytes as model.safetensors.index.json is refused with a message,
 * or holds exactly the tensors that the index lists, each from the shard it is listed in.
 *
 * Each input is tried as the index over two good shards, and once more up to its first NUL as the index and behind it
 * as the header of the first shard, of which the true length is put in front and 8 bytes of data behind. */
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "num/safet.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DATA = 8 }; /* bytes behind the header of each shard */

static const char k_index[] = "model.safetensors.index.json";
static const char k_shard[2][16] = {"a.safetensors", "b.safetensors"};
static const char k_header[2][200] = {
    "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
    "\"y\":{\"dtype\":\"U8\",\"shape\":[1,2],\"data_offsets\":[4,6]},"
    "\"z\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[6,8]}}",
    "{\"y\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]}}",
};
static char s_dir[64];

static void must(int holds)
{
    if (!holds) {
        abort();
    }
}

static const char *in_dir(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", s_dir, name);
    return path;
}

static void put(const char *name, const void *head, size_t n_head, const void *data, size_t n)
{
    FILE *f = fopen(in_dir(name), "wb");
    must(f != NULL);
    must(fwrite(head, 1, n_head, f) == n_head && fwrite(data, 1, n, f) == n);
    must(fclose(f) == 0);
}

/* Shard k of this header: its data are bytes of 'a' or 'b'. */
static void put_shard(int k, const void *header, size_t n)
{
    uint8_t *file = malloc(8 + n);
    must(file != NULL);
    for (int i = 0; i < 8; i++) {
        file[i] = (uint8_t)((uint64_t)n >> (8 * i));
    }
    memcpy(file + 8, header, n);
    char data[DATA];
    memset(data, 'a' + k, sizeof data);
    put(k_shard[k], file, 8 + n, data, sizeof data);
    free(file);
}

static void remove_dir(void)
{
    unlink(in_dir(k_index));
    unlink(in_dir(k_shard[0]));
    unlink(in_dir(k_shard[1]));
    rmdir(s_dir);
}

static void make_dir(void)
{
    static const char *const where[] = {"/dev/shm", "/tmp"};
    for (size_t i = 0; i < 2; i++) {
        snprintf(s_dir, sizeof s_dir, "%s/kvspan-fuzz-XXXXXX", where[i]);
        if (mkdtemp(s_dir) != NULL) {
            put_shard(1, k_header[1], strlen(k_header[1]));
            atexit(remove_dir);
            return;
        }
    }
    abort();
}

/* What opened is what the index says, read here once more. */
static void agrees(const safet *s, const char *index, size_t n)
{
    json_t *root = json_loadb(index, n, 0, NULL);
    json_t *map = json_object_get(root, "weight_map");
    must(json_is_object(map) && (int64_t)json_object_size(map) == safet_count(s));
    const char *key = NULL;
    json_t *v = NULL;
    json_object_foreach(map, key, v)
    {
        const safet_tensor *t = safet_find(s, key);
        must(t != NULL && json_is_string(v));
        must(strcmp(safet_file_name(s, t->file), json_string_value(v)) == 0);
        const int k = json_string_value(v)[0];
        for (int64_t i = 0; i < t->bytes; i++) {
            must(t->data[i] == k);
        }
    }
    json_decref(root);
}

static void check(const char *index, size_t n, const void *header, size_t n_header)
{
    put(k_index, index, n, "", 0);
    put_shard(0, header, n_header);
    safet *s = NULL;
    kvs_error err;
    memset(&err, 0, sizeof err);
    const kvs_status st = safet_open(&s, s_dir, &err);
    if (st < 0) {
        must(s == NULL && err.code == st && strstr(err.text, "safetensors") != NULL);
        return;
    }
    agrees(s, index, n);
    safet_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (s_dir[0] == '\0') {
        make_dir();
    }
    check((const char *)data, size, k_header[0], strlen(k_header[0]));
    const size_t n = size > 0 ? strnlen((const char *)data, size) : 0;
    if (n < size) {
        check((const char *)data, n, data + n + 1, size - n - 1);
    }
    return 0;
}
