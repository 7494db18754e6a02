/* vocab.h: pieces, their ids, and the merges of a byte-level BPE model.
 *
 * A file spells a piece in the byte alphabet: each byte is one printable character (33..126, 161..172
 * and 174..255 stand for themselves, the other 68 bytes are U+0100..U+0143 in rising order). Here a
 * piece is its bytes. A piece with any character outside the alphabet stands for its own UTF-8; text
 * never becomes such a piece by merging, only an added token has it.
 *
 * Invariants once built:
 *  1. An id in 0..n_id-1 has one piece or none (a hole); a piece in the alphabet has one id.
 *  2. Every byte that valid UTF-8 can hold has a piece of its own: byte_id.
 *  3. The id of a merge has the bytes of its left and right piece, one after the other.
 *  4. Merges have different ranks; the lower rank goes first. */
#ifndef TEXT_VOCAB_H
#define TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

enum {
    VOCAB_ID_MAX = (1 << 22) - 1, /* the largest id; bounds the tables that a file can ask for */
    VOCAB_PIECE_MAX = 1 << 13     /* bytes of a piece as the file spells it                     */
};

/* Flags of an id; 0 is a hole. */
enum { VOCAB_HAS = 1, VOCAB_RAW = 2, VOCAB_ADDED = 4, VOCAB_SPECIAL = 8 };

#define VOCAB_NO_RANK UINT32_MAX

typedef struct vocab_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: an empty slot */
    uint32_t rank;
    int32_t id;
} vocab_merge;

typedef struct vocab {
    int32_t n_id;
    uint32_t *at;   /* [n_id] offset of a piece in bytes */
    uint32_t *len;  /* [n_id]                            */
    uint8_t *flags; /* [n_id]                           */
    char *bytes;
    size_t n_byte;
    size_t cap_byte;
    size_t max_len; /* of any piece */
    int32_t *slot;  /* open addressing over pieces of the alphabet; -1: empty */
    size_t slot_mask;
    vocab_merge *merge; /* open addressing */
    size_t merge_mask;
    int32_t byte_id[256]; /* -1: no piece of this byte alone */
} vocab;

/* Room for ids 0..n_id-1, n_piece pieces with byte_cap bytes together, n_merge merges. On failure
 * *v is empty and needs no fini. */
kvs_status vocab_init(vocab *v, int32_t n_id, size_t n_piece, size_t byte_cap, size_t n_merge,
                      kvs_error *err);
void vocab_fini(vocab *v);

/* The bytes that `name` spells, written to out (at most n bytes): true; or false, with the name
 * itself as it is, where a character is outside the alphabet. *n_out is their number. */
bool vocab_spell(const char *name, size_t n, char *out, size_t *n_out);

/* Gives id the piece spelled by name. with_hash: text may become this piece. Refuses an id that is
 * taken and a name that is too long. */
kvs_status vocab_add(vocab *v, int32_t id, const char *name, size_t n, bool with_hash,
                     kvs_error *err);

/* The id of a piece by its bytes, -1 where there is none. */
int32_t vocab_find(const vocab *v, const char *bytes, size_t n);
int32_t vocab_find_hashed(const vocab *v, const char *bytes, size_t n, uint64_t hash);

/* Adds the merge of two pieces by their bytes; a repeated one takes the later rank. On failure
 * returns which of the three pieces is unknown: 1 left, 2 right, 3 both together; 0 on success. */
int vocab_add_merge(vocab *v, uint32_t rank, const char *left, size_t n_left, const char *right,
                    size_t n_right);

/* The rank of a pair and, in *id, what it becomes; VOCAB_NO_RANK where it does not merge. */
uint32_t vocab_rank(const vocab *v, int32_t left, int32_t right, int32_t *id);

/* Fills byte_id and refuses a vocabulary that breaks invariant 2. */
kvs_status vocab_finish(vocab *v, kvs_error *err);

static inline bool vocab_has(const vocab *v, int32_t id)
{
    return id >= 0 && id < v->n_id && v->flags[id] != 0;
}

#endif
