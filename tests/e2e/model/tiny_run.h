/* tiny_run.h: runs a tiny checkpoint (oracle/mkmodel.h) and holds it against the expected results
 * (oracle/golden.h): the prompt in chunks, 16 decoded tokens, and drafts after the prompt. */
#ifndef TESTS_TINY_RUN_H
#define TESTS_TINY_RUN_H

#include <stdint.h>

#include "kvspan/config.h"
#include "oracle/golden.h"
#include "unit/comm/ranks.h"

typedef struct tiny_case {
    const char *variant, *dtype, *mode; /* mode: of the arrays' names, "hf", "exact", "fp8", ... */
    int32_t prompt, chunk;              /* chunk 0: the prompt at once */
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int32_t hadamard;
    float latent_eps;
    int32_t tp, dcp; /* 0: 1 */
    int32_t drafts;  /* 1: compare the drafts after the prompt too */
    int32_t absorbed; /* 1: prompt rows of dense layers take the absorbed form too */
} tiny_case;

typedef struct tiny_result {
    double diff;        /* largest |logit - expected| */
    double draft_diff;  /* the same of drafts */
    double kl, kl_most; /* mean and largest KL(expected || model) of a row, nats */
    int32_t rows, top1; /* rows compared; those whose best token is the expected one */
    int32_t sets, differ,
        wrong;     /* selections compared; not equal; not equal though no tie is near */
    double median; /* of the rows' largest |logit - expected| */
    int64_t ids, common, ids0, common0; /* ids expected; those selected too; of the
                                          first layer */
} tiny_result;

/* Both fail the test with the library's message when something does not run. */
tiny_result tiny_measure(const tiny_case *c);

/* The draft layer alone, 300 rows of made-up hidden states in one pass, the last 8 compared: only diff, kl,
 * rows and top1 are filled in. */
tiny_result tiny_measure_layer(const tiny_case *c);

#endif
