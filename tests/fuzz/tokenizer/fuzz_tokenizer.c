/* fuzz_tokenizer.c - a tokenizer file of any bytes is refused with a message or works, on any text.
 *
 * The input is a kind, a file and a text, parted by the byte 0xFE: kind 0 takes the file as
 * tokenizer.json and what follows as tokenizer_config.json and text; the other kinds put it into a
 * small file that parses, as a regular expression, as added tokens, as vocabulary and merges, or not
 * at all, so that the text is what is tried.
 *
 * Of what works: ids are in range and no more than the bound, counting agrees with writing, and with
 * no added tokens and no template decoding gives the text back with broken sequences replaced. Ids
 * pushed one at a time give the text of all at once. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer.h"
#include "text/utf8.h"
#include "unit/text/tiny.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PART = 0xFE, MAX_INPUT = 1 << 16 };

static void must(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* The next part of the input, as a string. */
static char *next_part(const uint8_t *data, size_t size, size_t *at, size_t *n)
{
    const uint8_t *end = *at < size ? memchr(data + *at, PART, size - *at) : NULL;
    *n = *at >= size ? 0 : end != NULL ? (size_t)(end - data) - *at : size - *at;
    char *s = malloc(*n + 1);
    must(s != NULL, "no memory");
    if (*n > 0) {
        memcpy(s, data + *at, *n);
    }
    s[*n] = '\0';
    *at += *n + 1;
    return s;
}

static void check_round_trip(const kvs_tokenizer *t, const char *text, size_t n, const int32_t *ids,
                             size_t n_ids)
{
    textbuf want;
    kvs_detok *d = NULL;
    size_t n_out = 0;
    size_t at = 0;
    kvs_error err;
    buf_init(&want);
    utf8_repair(&want, text, n);
    must(kvs_tokens_decode(t, ids, n_ids, 0, NULL, 0, &n_out, &err) == KVS_OK, "decode");
    must(n_out == want.n, "decoding has another length than the text");
    must(kvs_detok_new(&d, t, 0, &err) == KVS_OK, "detok");
    char *out = malloc(kvs_detok_bound(d));
    must(out != NULL, "no memory");
    for (size_t i = 0; i <= n_ids; i++) {
        size_t k = 0;
        const kvs_status st = i < n_ids
                                  ? kvs_detok_push(d, ids[i], out, kvs_detok_bound(d), &k, &err)
                                  : kvs_detok_flush(d, out, kvs_detok_bound(d), &k, &err);
        must(st == KVS_OK && utf8_valid(out, k), "a push fails or cuts a character");
        must(k <= want.n - at && memcmp(out, buf_str(&want) + at, k) == 0, "another text comes back");
        at += k;
    }
    must(at == want.n, "text is missing");
    free(out);
    kvs_detok_free(d);
    buf_fini(&want);
}

static void try_text(const kvs_tokenizer *t, const char *text, size_t n)
{
    static const uint32_t flags[] = {KVS_ENCODE_NO_ADDED, 0,
                                     KVS_ENCODE_SPECIAL | KVS_ENCODE_TEMPLATE};
    for (int k = 0; k < 3; k++) {
        kvs_error err = {0};
        size_t n_ids = 0;
        size_t n_again = 0;
        const size_t cap = kvs_tokens_bound(n);
        int32_t *ids = malloc(cap * sizeof *ids);
        must(ids != NULL, "no memory");
        const kvs_status st = kvs_tokens_encode(t, text, n, flags[k], ids, cap, &n_ids, &err);
        must(st == KVS_OK || (st == KVS_LIMIT && err.text[0] != '\0' && n_ids == 0), "encode");
        if (st == KVS_OK) {
            for (size_t i = 0; i < n_ids; i++) {
                must(ids[i] >= 0 && ids[i] < kvs_tokenizer_size(t), "an id is out of range");
            }
            must(kvs_tokens_encode(t, text, n, flags[k], NULL, 0, &n_again, &err) == KVS_OK &&
                     n_again == n_ids,
                 "counting and writing disagree");
        }
        if (st == KVS_OK && k == 0) {
            check_round_trip(t, text, n, ids, n_ids);
        }
        free(ids);
    }
}

/* A JSON string of any bytes that JSON can hold. */
static void quote(textbuf *b, const char *s, size_t n)
{
    textbuf clean;
    buf_init(&clean);
    utf8_repair(&clean, s, n);
    buf_char(b, '"');
    for (size_t i = 0; i < clean.n; i++) {
        const unsigned char c = (unsigned char)clean.data[i];
        if (c == '"' || c == '\\' || c < 0x20) {
            buf_printf(b, "\\u%04x", c == 0 ? 1u : c);
        } else {
            buf_char(b, (char)c);
        }
    }
    buf_char(b, '"');
    buf_fini(&clean);
}

static kvs_status parse_kind(kvs_tokenizer **t, int kind, const char *a, size_t n, const char *b,
                             kvs_error *err)
{
    textbuf x;
    tiny what = {NULL};
    kvs_status st = KVS_OK;
    buf_init(&x);
    if (kind == 1) {
        buf_text(&x,
                 "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": "
                 "{\"Regex\": ");
        quote(&x, a, n);
        buf_text(&x,
                 "}, \"behavior\": \"Isolated\"}, {\"type\": \"ByteLevel\", \"add_prefix_space\": "
                 "false}]}");
        what.pre = buf_str(&x);
    } else if (kind == 2) {
        what.added = a;
        what.post = b[0] != '\0' ? b : NULL;
    } else if (kind == 3) {
        what.vocab = a;
        what.merges = b;
        what.options = "\"type\": \"BPE\", \"ignore_merges\": true, ";
    }
    st = kind == 0 ? tok_parse(t, a, n, b[0] != '\0' ? b : NULL, strlen(b), err)
                   : tiny_parse(t, &what, err);
    buf_fini(&x);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > MAX_INPUT) {
        return 0;
    }
    size_t at = 1;
    size_t n[3];
    char *part[3];
    for (int i = 0; i < 3; i++) {
        part[i] = next_part(data, size, &at, &n[i]);
    }
    kvs_tokenizer *t = NULL;
    kvs_error err = {0};
    const kvs_status st = parse_kind(&t, data[0] % 5, part[0], n[0], part[1], &err);
    if (st == KVS_OK) {
        try_text(t, part[2], n[2]);
        try_text(t, (const char *)data, size);
    } else {
        must(t == NULL && err.text[0] != '\0' &&
                 (st == KVS_FORMAT || st == KVS_UNSUPPORTED || st == KVS_LIMIT),
             "a refusal without a reason");
    }
    kvs_tokenizer_close(t);
    for (int i = 0; i < 3; i++) {
        free(part[i]);
    }
    return 0;
}
