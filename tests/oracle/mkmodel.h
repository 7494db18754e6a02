/* mkmodel.h: tiny checkpoints of every supported model family, written on the spot.
 *
 * The weights are integer functions of (variant, tensor name, element index): the specification
 * stands in tools/oracle/make_tiny.py, whose output is the same to the byte. The expected results
 * for these checkpoints are in tests/oracle/golden. Nothing here uses the library under test. */
#ifndef ORACLE_MKMODEL_H
#define ORACLE_MKMODEL_H

#include <stddef.h>
#include <stdint.h>

/* Names of the variants, ended by NULL: glm52, glm5, v32, v3, v2, k2, moonlight, glm47. */
extern const char *const mkmodel_variants[];

/* Writes config.json and the weights of `variant` into the folder `dir`, which must exist. `dtype`:
 * "f32", "bf16", or "fp8" (blocks of 128 x 128). `shards`: 1 writes model.safetensors, more write
 * that many files and an index. Returns 0, or -1 with a sentence in msg. */
int mkmodel_write(const char *variant, const char *dtype, int shards, const char *dir, char *msg,
                  size_t cap);

/* The same into a new folder under TMPDIR or /tmp, whose name goes to dir (cap_dir bytes). */
int mkmodel_temp(const char *variant, const char *dtype, int shards, char *dir, size_t cap_dir,
                 char *msg, size_t cap);

/* The same with one shard, and the tokenizer.json of the folder `other` linked beside it. */
int mkmodel_temp_text(const char *variant, const char *dtype, const char *other, char *dir,
                      size_t cap_dir, char *msg, size_t cap);

/* Removes a folder of mkmodel_temp with the files in it. */
void mkmodel_remove(const char *dir);

/* The first n tokens of the variant's text, below vocab. Returns -1 for an unknown variant. */
int mkmodel_tokens(const char *variant, int32_t vocab, int32_t n, int32_t *out);

/* n rows of `width` made-up hidden states for the draft layer alone. Returns as above. */
int mkmodel_hidden(const char *variant, int32_t n, int32_t width, float *out);

#endif
