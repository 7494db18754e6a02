/* tok_json.h: reading JSON for tok_*.c. Untrusted input: jansson refuses what is no JSON, duplicate
 * keys, NUL in strings and nesting past 2048; the functions here refuse values of a wrong type, and
 * name file and key. `null` counts as absent everywhere. */
#ifndef TEXT_TOK_JSON_H
#define TEXT_TOK_JSON_H

#include <jansson.h>
#include <stdbool.h>

#include "text/tokenizer.h"

/* The object in text[0..n), for json_decref. `name` goes into messages. */
kvs_status tj_load(json_t **out, const char *name, const char *text, size_t n, kvs_error *err);

/* A member that is there and not null; NULL otherwise, also when v is no object. */
const json_t *tj_get(const json_t *v, const char *key);

/* A boolean member; `absent` where it is missing. where: "pre_tokenizer" and so on. */
kvs_status tj_bool(const json_t *v, const char *where, const char *key, bool absent, bool *out,
                   kvs_error *err);

/* The string of the member "type", "" where it has none. */
const char *tj_type(const json_t *v);

/* model: the vocabulary and its merges. The caller has counted what added tokens need. */
kvs_status tok_read_model(kvs_tokenizer *t, const json_t *model, const json_t *added,
                          kvs_error *err);

/* added_tokens; the vocabulary is there already. */
kvs_status tok_read_added(kvs_tokenizer *t, const json_t *vocab, const json_t *added,
                          kvs_error *err);

/* The largest id of added_tokens and the bytes of their texts; refuses entries that are malformed. */
kvs_status tok_measure_added(const json_t *added, int32_t *max_id, size_t *bytes, kvs_error *err);

/* normalizer, pre_tokenizer, post_processor, decoder. */
kvs_status tok_read_steps(kvs_tokenizer *t, const json_t *root, kvs_error *err);

/* tokenizer_config.json: bos, eos, and whether they are added. */
kvs_status tok_read_config(kvs_tokenizer *t, const json_t *config, kvs_error *err);

#endif
