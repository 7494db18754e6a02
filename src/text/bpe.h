/* bpe.h: the ids of a pre-token.
 *
 * A pre-token starts as one symbol per byte. Of all neighbouring symbols that have a merge, those of
 * the lowest rank merge first, the leftmost first among equals, until none is left. Short ones are
 * done by looking at every pair each time; long ones with a heap and a linked list, in n log n, and
 * give the same ids. With ignore_merges a pre-token that is a piece as a whole is that piece.
 *
 * A bpe_run belongs to one call: it holds the scratch memory and remembers short pre-tokens, in a
 * table whose size is fixed when it is made. */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text/vocab.h"

/* Where ids go: as many as fit are kept, all are counted. */
typedef struct id_sink {
    int32_t *ids; /* [cap]; may be NULL with cap 0 */
    size_t cap;
    size_t n;
} id_sink;

static inline void sink_add(id_sink *s, int32_t id)
{
    if (s->n < s->cap) {
        s->ids[s->n] = id;
    }
    s->n++;
}

enum {
    BPE_SHORT_MAX = 64, /* bytes up to which every pair is looked at */
    BPE_WORD_BYTES = 22,
    BPE_WORD_IDS = 8,
    BPE_WORDS_MAX = 16384
};

/* A remembered pre-token: 64 bytes, empty while n_byte is 0. */
typedef struct bpe_word {
    uint64_t hash;
    uint8_t n_byte;
    uint8_t n_id;
    char bytes[BPE_WORD_BYTES];
    int32_t ids[BPE_WORD_IDS];
} bpe_word;

typedef struct bpe_run {
    const vocab *v;
    bool ignore_merges;
    bpe_word *word; /* [word_mask + 1] */
    size_t word_mask;
    int32_t *sym; /* scratch for long pre-tokens, [3 * cap]: id, next and previous of each symbol */
    uint64_t *heap; /* [2 * cap] rank << 32 | position */
    size_t cap;
} bpe_run;

/* n_byte: how much text will come, from which the table gets its size. On failure nothing needs
 * bpe_run_fini. */
kvs_status bpe_run_init(bpe_run *r, const vocab *v, bool ignore_merges, size_t n_byte,
                        kvs_error *err);
void bpe_run_fini(bpe_run *r);

/* Adds the ids of s[0..n), n < 2^31. Bytes without a piece, which valid UTF-8 cannot hold, are left
 * out. */
kvs_status bpe_encode(bpe_run *r, const char *s, size_t n, id_sink *out, kvs_error *err);

/* The two ways, for any n > 0 (short: at most BPE_SHORT_MAX). */
void bpe_encode_short(const bpe_run *r, const char *s, size_t n, id_sink *out);
kvs_status bpe_encode_long(bpe_run *r, const char *s, size_t n, id_sink *out, kvs_error *err);

#endif
