/* tiny.h - tiny models in memory, and groups of thread ranks that run them.
 *
 * A model is random weights of a small geometry with every part that a layer may have; no file is involved.
 * A run feeds the same token sequences (a token is a function of request and position) in whatever pieces its
 * scenario says and collects, for every position, logits, draft logits and selections. Two scenarios that
 * differ in nothing that the number contract lets matter must give the same bytes.
 */
#ifndef TEST_MODEL_TINY_H
#define TEST_MODEL_TINY_H

#include "model/fwd.h"

enum {
    TINY_VOCAB = 83,
    TINY_HIDDEN = 160,
    TINY_TOPK = 16,
    TINY_MAX_SEQ = 3,
    TINY_MAX_LEN = 640,
    TINY_CHAIN = 3 /* draft passes after the first */
};

typedef enum tiny_kind {
    TINY_GLM52, /* indexers on layers 0 and 2, shared by 1 and 3; interleaved; MTP, index_share_mtp    */
    TINY_V32,   /* an indexer on every layer, half-split; YaRN; grouped router; MTP                    */
    TINY_V3,    /* dense MLA; YaRN; grouped router; MTP                                                */
    TINY_V2     /* dense MLA; no query latent; softmax router without a bias; two shared experts       */
} tiny_kind;

typedef struct tiny_spec {
    tiny_kind kind;
    int32_t type;     /* gemm_type of the products; router, head, embedding: f32 with f32, else bf16   */
    int32_t mixed;    /* every third product is bf16 instead of the type, where that is fp8            */
    uint64_t seed;
} tiny_spec;

/* Never fails: ends the test instead. */
wt *tiny_new(const tiny_spec *spec);
void tiny_free(wt *w);
int32_t tiny_token(int32_t seq, int64_t pos);

typedef struct tiny_run {
    int32_t tp, dcp, interleave, ep, threads;
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int32_t hadamard, trace, selection_last;
    float latent_eps;
    int32_t n_seq;
    int64_t len[TINY_MAX_SEQ];
    int64_t prompt[TINY_MAX_SEQ]; /* positions below it are the prompt's                               */
    int32_t cut;       /* rows of a sequence in one step                                               */
    int32_t apart;     /* 1: one sequence after the other; 0: all in each step                         */
    int32_t draft;     /* 1: draft layer 0 follows every step over the same rows                       */
    int32_t chain;     /* 1: then TINY_CHAIN reuse passes from each sequence's last row                */
    int32_t pages;     /* 0: page ids ascend; 1: they descend from the pool's last                     */
    const char *cpu;
    int32_t draft_cut; /* rows of a draft pass, 0: those of the step                                   */
    int32_t moved;     /* 1: every other draft pass uses other pages than the one before               */
    int32_t guard;     /* 1: steps after the first may not allocate                                    */
    /* Called on every rank with its handle: before each step with the batch that comes, and at the end.
     * What is not NULL ends the run with that text. */
    const char *(*between)(fwd *f, const kvs_batch *coming);
    const char *(*at_end)(fwd *f);
} tiny_run;

typedef struct tiny_result {
    float *logits;   /* [seq][TINY_MAX_LEN][vocab] */
    float *draft;    /* the same, of draft layer 0 */
    float *chain;    /* [seq][TINY_CHAIN][TINY_MAX_LEN][vocab] */
    float *hidden;   /* [seq][TINY_MAX_LEN][hidden] */
    int32_t *ids;    /* [layer 4][seq][TINY_MAX_LEN][topk] with trace, -1 behind */
    fwd_info info;
    kvs_status status;
    kvs_error error;
} tiny_result;

tiny_run tiny_default(void);
/* Every rank must succeed and give the same bytes as rank 0. */
void tiny_execute(const wt *w, const tiny_run *r, tiny_result *out);
void tiny_result_free(tiny_result *r);
float *tiny_at(float *base, int32_t seq, int64_t pos, int32_t width);

/* Fails with the first position that differs. Logits, hidden rows, and what else both have. */
void tiny_same(const tiny_run *r, const tiny_result *a, const tiny_result *b, const char *what);
/* Largest |a - b| of logits over all positions. */
float tiny_apart(const tiny_run *r, const tiny_result *a, const tiny_result *b);

#endif
