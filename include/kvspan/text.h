/* kvspan/text.h - text to token ids and back.
 *
 * A tokenizer is read from a model's folder: tokenizer.json (byte-level BPE, as the DeepSeek and GLM
 * families publish it) and, where it is there, tokenizer_config.json. Its ids are those that the
 * `tokenizers` library gives for the same file. What a file asks for and this library does not do
 * is refused by name when the tokenizer is opened, never guessed; docs/models.md lists it.
 *
 *     kvs_tokenizer *t = NULL;
 *     kvs_tokenizer_open(&t, "models/needle", &err);
 *     size_t n = 0;
 *     int32_t *ids = malloc(kvs_tokens_bound(n_bytes) * sizeof *ids);
 *     kvs_tokens_encode(t, text, n_bytes, KVS_ENCODE_TEMPLATE, ids, kvs_tokens_bound(n_bytes), &n, &err);
 *
 * Text is UTF-8 and need not end in NUL. Broken UTF-8 is accepted: each maximal bad sequence counts
 * as one U+FFFD, before anything else is done. Such a sequence is the longest run of bytes that
 * begins a valid character and breaks off, or else a single byte; Python's errors="replace" does the
 * same.
 *
 * Added tokens are those that a file lists besides the vocabulary: control tokens such as <|user|>,
 * most of which are marked special. Spelled out in a text they are found by default unless they are
 * special; see the flags below. Text from a stranger goes in with KVS_ENCODE_NO_ADDED: then nothing
 * in it can become a control token. Where it is to be such a token, use kvs_token_find.
 *
 * Limits: files of 256 MiB, ids below 2^22, pieces of 8192 bytes, texts of 341 MiB. A regular
 * expression that takes too long on a text (10 s and 2 s more per MiB) ends the call with KVS_LIMIT.
 *
 * Compiles as C11 and C++17. */
#ifndef KVSPAN_TEXT_H
#define KVSPAN_TEXT_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct kvs_tokenizer kvs_tokenizer;
typedef struct kvs_detok kvs_detok;

/* Reads the tokenizer of a model's folder. KVS_FORMAT: a file is malformed; KVS_UNSUPPORTED: it asks
 * for something that is not done, or the folder has only tiktoken.model (Kimi); KVS_IO: it cannot
 * be read. On failure *out is NULL and nothing needs closing.
 * Threads: any. A tokenizer never changes; any number of threads may use it at once. */
kvs_status kvs_tokenizer_open(kvs_tokenizer **out, const char *model_dir, kvs_error *err);

/* Frees a tokenizer, which no detokeniser may use any more. NULL is fine.
 * Threads: one, when no other uses it. */
void kvs_tokenizer_close(kvs_tokenizer *t);

/* One more than the largest id, added tokens included; some ids below it may have no piece. A
 * model's embedding may be larger. 0 for NULL.
 * Threads: any. */
int32_t kvs_tokenizer_size(const kvs_tokenizer *t);

/* The ids of bos_token and eos_token of tokenizer_config.json; -1 where they are not named. What ends
 * an answer is said by the model's config.json, which may list more.
 * Threads: any. */
int32_t kvs_tokenizer_bos(const kvs_tokenizer *t);
int32_t kvs_tokenizer_eos(const kvs_tokenizer *t);

/* 1 when KVS_ENCODE_TEMPLATE puts the bos token in front: tokenizer_config.json says so in
 * add_bos_token, or where it does not speak, the template of tokenizer.json.
 * Threads: any. */
int32_t kvs_tokenizer_adds_bos(const kvs_tokenizer *t);

/* The ids that KVS_ENCODE_TEMPLATE puts in front of a text (usually none, or bos) are written to
 * ids[0..cap); returns how many there are, at most 8. ids may be NULL with cap 0.
 * Threads: any. */
int32_t kvs_tokenizer_prefix(const kvs_tokenizer *t, int32_t *ids, int32_t cap);

/* How kvs_tokens_encode reads a text; or them. 0: added tokens are found except special ones. */
enum {
    KVS_ENCODE_TEMPLATE = 1, /* put the model's template around it: bos, where the model wants it */
    KVS_ENCODE_SPECIAL = 2, /* special tokens that the text spells out are those tokens           */
    KVS_ENCODE_NO_ADDED = 4 /* no added token is found: all of it is text. Not with SPECIAL       */
};

/* The most ids that a text of n_bytes can have, the template included: 3 * n_bytes + 16. Valid UTF-8
 * has at most n_bytes + 16.
 * Threads: any. */
size_t kvs_tokens_bound(size_t n_bytes);

/* The ids of text[0..n_bytes). *n_ids is how many there are; the first cap of them are written to
 * ids. Where there are more, the call is KVS_LIMIT, except with ids NULL and cap 0, which counts.
 * text may be NULL when n_bytes is 0. On any other failure *n_ids is 0.
 * Threads: any. */
kvs_status kvs_tokens_encode(const kvs_tokenizer *t, const char *text, size_t n_bytes,
                             uint32_t flags, int32_t *ids, size_t cap, size_t *n_ids,
                             kvs_error *err);

/* The bytes of an id, n of them; not always whole characters. NULL and n 0 for an id without a piece.
 * They live as long as the tokenizer.
 * Threads: any. */
const char *kvs_token_piece(const kvs_tokenizer *t, int32_t id, size_t *n);

/* 1 when the id is an added token marked special.
 * Threads: any. */
int32_t kvs_token_is_special(const kvs_tokenizer *t, int32_t id);

/* The id of the added token, or else of the piece, with exactly this text (NUL-terminated): -1 where
 * there is none. "<|user|>" gives what KVS_ENCODE_SPECIAL would.
 * Threads: any. */
int32_t kvs_token_find(const kvs_tokenizer *t, const char *text);

/* ------------------------------------------------------------------------------------------------
 * Ids to text. Pieces are joined as bytes and given out as whole characters: bytes that may still
 * become a character are held back (three at most) until a later id completes it, or until it is
 * certain that none can; then they become U+FFFD by the rule above. What pushes and the final flush
 * give is, put together, the text of all ids at once. An id without a piece (a hole, or past
 * kvs_tokenizer_size, which a model with a padded embedding can emit) adds nothing.
 */

/* skip_special 1: ids marked special add nothing. t must outlive *out. On failure *out is NULL.
 * Threads: one at a time for each kvs_detok. */
kvs_status kvs_detok_new(kvs_detok **out, const kvs_tokenizer *t, int32_t skip_special,
                         kvs_error *err);
void kvs_detok_free(kvs_detok *d);

/* The most bytes that one push or flush gives.
 * Threads: any. */
size_t kvs_detok_bound(const kvs_detok *d);

/* Adds an id; the text that is complete now goes to out, *n bytes, without a NUL. With too little room
 * the call is KVS_LIMIT, *n says how much is needed, and the id has not been added. A negative id is
 * KVS_INVALID.
 * Threads: one at a time. */
kvs_status kvs_detok_push(kvs_detok *d, int32_t id, char *out, size_t cap, size_t *n,
                          kvs_error *err);

/* Ends the text: bytes held back become one U+FFFD. Afterwards a new text may begin.
 * Threads: one at a time. */
kvs_status kvs_detok_flush(kvs_detok *d, char *out, size_t cap, size_t *n, kvs_error *err);

/* The text of ids[0..n_ids) at once. *n is its length; the first cap bytes of it are written to out.
 * Where it is longer, the call is KVS_LIMIT, except with out NULL and cap 0, which counts.
 * Threads: any. */
kvs_status kvs_tokens_decode(const kvs_tokenizer *t, const int32_t *ids, size_t n_ids,
                             int32_t skip_special, char *out, size_t cap, size_t *n,
                             kvs_error *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
