/* engine/sample.h - from a row of logits to a token.
 *
 * The filters, in this order, each on what the former left: repetition penalty, temperature, top-k, top-p, min-p.
 * Then one uniform number in [0, 1) picks from the cumulated weights. A result is a function of (logits, settings,
 * tokens seen, number) alone: no state, no dependence on company. Sums are in double, in a fixed order.
 *
 * Logits that are no distribution (a NaN, +inf, all of them -inf) are refused, never sampled from. -inf means
 * probability 0.
 */
#ifndef ENGINE_SAMPLE_H
#define ENGINE_SAMPLE_H

#include <stdint.h>

#include "kvspan/engine.h"
#include "kvspan/status.h"

typedef struct sample_set {
    double temp;           /* >= 0; 0: the largest logit                                              */
    double top_p;          /* in (0, 1]; 1: off                                                       */
    double min_p;          /* in [0, 1]; 0: off                                                       */
    double repeat_penalty; /* > 0; 1: off                                                             */
    int32_t top_k;         /* >= 0; 0 and >= vocab: off                                               */
} sample_set;

typedef struct sampler sampler; /* scratch for one row; one thread at a time */

kvs_status sample_new(sampler **out, int32_t vocab, kvs_error *err);
void sample_free(sampler *s);

/* seen: bit i % 64 of word i / 64 is set where token i occurred; NULL: none did. u in [0, 1). KVS_INVALID where
 * the logits are no distribution; allocates nothing. */
kvs_status sample_token(sampler *s, const sample_set *set, const float *logits, const uint64_t *seen,
                        double u, int32_t *token, kvs_error *err);

/* Natural logs of softmax(logits): of `token`, and the n <= KVS_MAX_LOGPROBS largest, the best first, ties by
 * lower id. Logits as sample_token accepted them. */
void sample_logprobs(const float *logits, int32_t vocab, int32_t token, int32_t n, double *logprob,
                     int32_t *top_token, double *top_logprob);

/* The largest of n logits, the lower index of equals; NaN is never chosen over a number. */
int32_t sample_argmax(const float *logits, int32_t n);

#endif
