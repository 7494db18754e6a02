/* ckpt.h: checkpoints of tiny models, made and read without the code under test.
 *
 * A checkpoint is a list of tensors with random content and a config.json; a test changes it and writes it to a
 * folder. ckpt_at gives what a tensor's element is worth, decoded here from the stored bytes. */
#ifndef TESTS_CKPT_H
#define TESTS_CKPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ckpt_tensor {
    char name[160];
    char dtype[12];
    int n_dim;
    int64_t dim[4];
    unsigned char *data;
    size_t bytes;
} ckpt_tensor;

enum { CKPT_MAX_TENSOR = 600 };

typedef struct ckpt {
    ckpt_tensor t[CKPT_MAX_TENSOR];
    int n;
    char config[4096];
} ckpt;

/* What the tiny model is like; its sizes are below. */
typedef struct ckpt_spec {
    const char
        *dtype; /* of products: "BF16", "F32" or "F8_E4M3"; all else is BF16 or, with F32, F32 */
    char prefix[24]; /* "" or "language_model."                                          */
    bool no_q_lora, index, softmax, fused, mtp, tied;
    int moe; /* width of an expert; 0: CKPT_MOE */
} ckpt_spec;

/* No width is a multiple of 128, no head or expert starts at a block's border. */
enum {
    CKPT_VOCAB = 40,
    CKPT_HIDDEN = 160,
    CKPT_INTER = 200,
    CKPT_MOE = 96,
    CKPT_LAYER = 4, /* 0 dense; with an indexer: 0 and 2 of their own, 1 and 3 share */
    CKPT_HEAD = 3,
    CKPT_Q_LORA = 72,
    CKPT_KV_LORA = 140,
    CKPT_NOPE = 56,
    CKPT_ROPE = 8,
    CKPT_V = 36,
    CKPT_INDEX_HEAD = 2,
    CKPT_INDEX_DIM = 16,
    CKPT_EXPERT = 4,
    CKPT_SHARED = 2
};

int ckpt_moe(const ckpt_spec *spec);
ckpt *ckpt_new(const ckpt_spec *spec);
void ckpt_free(ckpt *c);

/* A tensor with random content of 1 to 3 dimensions (0 ends them); its index. */
int ckpt_add(ckpt *c, const char *name, const char *dtype, int64_t d0, int64_t d1, int64_t d2);
/* Exits the test when there is none. */
int ckpt_find(const ckpt *c, const char *name);
bool ckpt_has(const ckpt *c, const char *name);
void ckpt_drop(ckpt *c, int i);

/* Element (o, i) of the e-th matrix of a tensor (e = 0 where it has two dimensions), block scale applied. */
double ckpt_at(const ckpt *c, const char *name, int64_t e, int64_t o, int64_t i);

/* Writes config.json and the tensors, dealt to n_shard files in turn (1: model.safetensors), with `pad` spaces
 * behind the header. The folder must exist. */
void ckpt_write(const ckpt *c, const char *dir, int n_shard, int pad);
/* Removes what ckpt_write left, and the folder. */
void ckpt_remove(const char *dir);

/* What a code of e4m3 is worth, NaN for the two that are none. */
double ckpt_e4m3(uint8_t code);

#endif
