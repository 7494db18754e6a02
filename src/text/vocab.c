/* text/vocab.c - the tables of a vocabulary. */
#include "text/vocab.h"

#include <string.h>

#include "base/err.h"
#include "base/hash.h"
#include "base/mem.h"
#include "text/utf8.h"

/* A power of two that is at least twice n and never full. */
static size_t table_size(size_t n)
{
    size_t size = 16;
    while (size < 2 * n) {
        size *= 2;
    }
    return size;
}

kvs_status vocab_init(vocab *v, int32_t n_id, size_t n_piece, size_t byte_cap, size_t n_merge,
                      kvs_error *err)
{
    memset(v, 0, sizeof *v);
    const size_t n = n_id > 0 ? (size_t)n_id : 1;
    const size_t n_slot = table_size(n_piece);
    const size_t n_merge_slot = table_size(n_merge);
    v->n_id = n_id;
    v->at = mem_calloc(n, sizeof *v->at);
    v->len = mem_calloc(n, sizeof *v->len);
    v->flags = mem_calloc(n, sizeof *v->flags);
    v->bytes = mem_alloc(byte_cap, 0);
    v->cap_byte = byte_cap;
    v->slot = mem_alloc_array(n_slot, sizeof *v->slot, 0);
    v->merge = mem_alloc_array(n_merge_slot, sizeof *v->merge, 0);
    if (v->at == NULL || v->len == NULL || v->flags == NULL || v->bytes == NULL ||
        v->slot == NULL || v->merge == NULL) {
        vocab_fini(v);
        return err_set(err, KVS_NOMEM, "tokenizer: no memory for %d ids and %zu merges", n_id,
                       n_merge);
    }
    v->slot_mask = n_slot - 1;
    v->merge_mask = n_merge_slot - 1;
    memset(v->slot, 0xFF, n_slot * sizeof *v->slot);
    memset(v->merge, 0xFF, n_merge_slot * sizeof *v->merge);
    memset(v->byte_id, 0xFF, sizeof v->byte_id);
    return KVS_OK;
}

void vocab_fini(vocab *v)
{
    mem_free(v->at);
    mem_free(v->len);
    mem_free(v->flags);
    mem_free(v->bytes);
    mem_free(v->slot);
    mem_free(v->merge);
    memset(v, 0, sizeof *v);
}

/* Whether a byte stands for itself in the alphabet. */
static bool is_itself(uint32_t c)
{
    return (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255);
}

/* The byte that a character of the alphabet stands for, -1 for others. */
static int byte_of(uint32_t c)
{
    if (c < 256) {
        return is_itself(c) ? (int)c : -1;
    }
    if (c > 0x143) {
        return -1;
    }
    /* The others in rising order: 0..32, 127..160, 173. */
    const uint32_t k = c - 256;
    return (int)(k <= 32 ? k : k <= 66 ? k - 33 + 127 : 173);
}

bool vocab_spell(const char *name, size_t n, char *out, size_t *n_out)
{
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        size_t len = 0;
        const utf8_kind kind = utf8_next(name + i, n - i, &len);
        const int b = kind == UTF8_CHAR ? byte_of(utf8_value(name + i, len)) : -1;
        if (b < 0) {
            memcpy(out, name, n);
            *n_out = n;
            return false;
        }
        out[k++] = (char)(unsigned char)b;
        i += len;
    }
    *n_out = k;
    return true;
}

static bool slot_holds(const vocab *v, int32_t id, const char *bytes, size_t n)
{
    return v->len[id] == n && memcmp(v->bytes + v->at[id], bytes, n) == 0;
}

int32_t vocab_find_hashed(const vocab *v, const char *bytes, size_t n, uint64_t hash)
{
    size_t i = (size_t)hash & v->slot_mask;
    while (v->slot[i] >= 0 && !slot_holds(v, v->slot[i], bytes, n)) {
        i = (i + 1) & v->slot_mask;
    }
    return v->slot[i];
}

int32_t vocab_find(const vocab *v, const char *bytes, size_t n)
{
    return vocab_find_hashed(v, bytes, n, hash_xx64(bytes, n));
}

kvs_status vocab_add(vocab *v, int32_t id, const char *name, size_t n, bool with_hash,
                     kvs_error *err)
{
    if (id < 0 || id >= v->n_id || n > v->cap_byte - v->n_byte) {
        return err_set(err, KVS_INTERNAL, "tokenizer: the tables are too small for id %d", id);
    }
    const int shown = n < 40 ? (int)n : 40;
    if (v->flags[id] != 0) {
        return err_set(err, KVS_FORMAT, "id %d belongs to two pieces; one is \"%.*s\"", id, shown,
                       name);
    }
    if (n > VOCAB_PIECE_MAX) {
        return err_set(err, KVS_LIMIT, "the piece of id %d is %zu bytes long: at most %d", id, n,
                       VOCAB_PIECE_MAX);
    }
    size_t len = 0;
    char *bytes = v->bytes + v->n_byte;
    const bool spelled = vocab_spell(name, n, bytes, &len);
    v->at[id] = (uint32_t)v->n_byte;
    v->len[id] = (uint32_t)len;
    v->flags[id] = spelled ? VOCAB_HAS : VOCAB_HAS | VOCAB_RAW;
    v->n_byte += len;
    v->max_len = len > v->max_len ? len : v->max_len;
    if (with_hash && spelled && len > 0) {
        size_t i = (size_t)hash_xx64(bytes, len) & v->slot_mask;
        while (v->slot[i] >= 0) {
            i = (i + 1) & v->slot_mask;
        }
        v->slot[i] = id;
    }
    return KVS_OK;
}

static size_t merge_slot(const vocab *v, uint64_t pair)
{
    /* Fibonacci hashing, then the high half, which depends on every bit of the pair. */
    uint64_t h = pair * UINT64_C(0x9E3779B97F4A7C15);
    h ^= h >> 32;
    size_t i = (size_t)h & v->merge_mask;
    while (v->merge[i].pair != UINT64_MAX && v->merge[i].pair != pair) {
        i = (i + 1) & v->merge_mask;
    }
    return i;
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

int vocab_add_merge(vocab *v, uint32_t rank, const char *left, size_t n_left, const char *right,
                    size_t n_right)
{
    const int32_t a = vocab_find(v, left, n_left);
    if (a < 0) {
        return 1;
    }
    const int32_t b = vocab_find(v, right, n_right);
    if (b < 0) {
        return 2;
    }
    char both[2 * VOCAB_PIECE_MAX]; /* pieces that were found are no longer than that */
    memcpy(both, left, n_left);
    memcpy(both + n_left, right, n_right);
    const int32_t id = vocab_find(v, both, n_left + n_right);
    if (id < 0) {
        return 3;
    }
    vocab_merge *m = &v->merge[merge_slot(v, pair_of(a, b))];
    m->pair = pair_of(a, b);
    m->rank = rank;
    m->id = id;
    return 0;
}

uint32_t vocab_rank(const vocab *v, int32_t left, int32_t right, int32_t *id)
{
    const vocab_merge *m = &v->merge[merge_slot(v, pair_of(left, right))];
    *id = m->id;
    return m->pair == UINT64_MAX ? VOCAB_NO_RANK : m->rank;
}

kvs_status vocab_finish(vocab *v, kvs_error *err)
{
    for (int b = 0; b < 256; b++) {
        const char c = (char)(unsigned char)b;
        v->byte_id[b] = vocab_find(v, &c, 1);
        const bool in_utf8 = b != 0xC0 && b != 0xC1 && b < 0xF5;
        if (v->byte_id[b] < 0 && in_utf8) {
            return err_set(err, KVS_UNSUPPORTED,
                           "model.vocab has no piece for the byte 0x%02X: text with it has no ids",
                           b);
        }
    }
    return KVS_OK;
}
