#include "unit/unit.h"

#include "base/file.h"
#include "base/mem.h"
#include "text/tokenizer.h"
#include "unit/text/golden.h"

reader reader_open(const char *dir, const char *name)
{
    reader r = {NULL, 0, 0};
    char path[1024];
    kvs_error err;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (file_read_all(path, (size_t)1 << 30, &r.data, &r.n, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    return r;
}

void reader_close(reader *r)
{
    mem_free(r->data);
}

const char *reader_bytes(reader *r, size_t n)
{
    assert_true(n <= r->n - r->at);
    r->at += n;
    return r->data + r->at - n;
}

static uint32_t number(reader *r, size_t n)
{
    const unsigned char *b = (const unsigned char *)reader_bytes(r, n);
    uint32_t x = 0;
    for (size_t i = n; i > 0; i--) {
        x = x << 8 | b[i - 1];
    }
    return x;
}

uint32_t reader_u8(reader *r)
{
    return number(r, 1);
}

uint32_t reader_u16(reader *r)
{
    return number(r, 2);
}

uint32_t reader_u32(reader *r)
{
    return number(r, 4);
}

static kvs_tokenizer *parse(const char *json, size_t n, const char *config)
{
    kvs_tokenizer *t = NULL;
    kvs_error err;
    if (tok_parse(&t, json, n, config, config != NULL ? strlen(config) : 0, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    return t;
}

kvs_tokenizer *golden_tokenizer(const char *dir, const char *name, const char *config)
{
    char leaf[64];
    snprintf(leaf, sizeof leaf, "%s.json", name);
    reader r = reader_open(dir, leaf);
    kvs_tokenizer *t = parse(r.data, r.n, config);
    reader_close(&r);
    return t;
}

kvs_tokenizer *golden_tokenizer_with(const char *dir, const char *name, const char *from,
                                     const char *to)
{
    char leaf[64];
    snprintf(leaf, sizeof leaf, "%s.json", name);
    reader r = reader_open(dir, leaf);
    const char *at = strstr(r.data, from);
    assert_non_null(at);
    const size_t head = (size_t)(at - r.data);
    const size_t n = r.n - strlen(from) + strlen(to);
    char *text = malloc(n + 1);
    assert_non_null(text);
    memcpy(text, r.data, head);
    memcpy(text + head, to, strlen(to));
    memcpy(text + head + strlen(to), at + strlen(from), r.n - head - strlen(from));
    kvs_tokenizer *t = parse(text, n, NULL);
    free(text);
    reader_close(&r);
    return t;
}
