/* fuzz_safetensors.c - a safetensors file of any bytes is refused with a message, or every tensor of it lies inside
 * the file, covers what its shape says and is found by its name.
 *
 * Each input is tried as it is, and once more as a header of which the true length is put in front, with data behind
 * it: as many bytes as its first byte says. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "num/safet.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int holds)
{
    if (!holds) {
        abort();
    }
}

static void check(const uint8_t *data, size_t size)
{
    safet *s = NULL;
    kvs_error err;
    memset(&err, 0, sizeof err);
    const kvs_status st = safet_open_memory(&s, "fuzz.safetensors", data, size, &err);
    if (st < 0) {
        must(s == NULL && err.code == st && strstr(err.text, "fuzz.safetensors") != NULL);
        return;
    }
    size_t n_header = 0;
    must((const uint8_t *)safet_header(s, 0, &n_header) == data + 8);
    int64_t total = 0;
    unsigned sum = 0;
    for (int64_t i = 0; i < safet_count(s); i++) {
        const safet_tensor *t = safet_at(s, i);
        must(safet_find(s, t->name) == t && safet_index(s, t) == i);
        must(t->data >= data + 8 + n_header && t->bytes >= 0);
        must((size_t)(t->data - data) + (size_t)t->bytes <= size);
        int64_t n = safet_type_bytes(t->type);
        for (int32_t d = 0; d < t->n_dim; d++) {
            n *= t->dim[d];
        }
        must(n == t->bytes);
        total += n;
        for (int64_t k = 0; k < t->bytes; k++) {
            sum += t->data[k];
        }
    }
    must((size_t)total == size - 8 - n_header && sum < UINT32_MAX);
    safet_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check(data, size);
    if (size < 1) {
        return 0;
    }
    const size_t n_header = size - 1;
    const size_t n = 8 + n_header + data[0];
    uint8_t *file = malloc(n);
    if (file == NULL) {
        return 0;
    }
    for (int i = 0; i < 8; i++) {
        file[i] = (uint8_t)((uint64_t)n_header >> (8 * i));
    }
    memcpy(file + 8, data + 1, n_header);
    memset(file + 8 + n_header, 7, data[0]);
    check(file, n);
    free(file);
    return 0;
}
