/* naive.h - the forward pass written a second time: double precision, one rank, one sequence, no cache.
 *
 * From the definition of the models alone: keys and values of every head are formed as such (nothing is absorbed),
 * attention is one softmax over the selected positions, experts run one by one, a selection is a full sort. Nothing
 * here calls the code under test.
 */
#ifndef TEST_MODEL_NAIVE_H
#define TEST_MODEL_NAIVE_H

#include "model/wt.h"

typedef struct naive {
    int32_t n_tok;
    double *logits;  /* [n_tok, vocab] */
    double *hidden;  /* [n_tok, hidden] */
    double *draft;   /* [n_tok, vocab] of draft layer 0, where the model has one */
    double *g;       /* [n_tok, hidden] after its head norm */
    uint8_t *chosen; /* [n_layer][n_tok, n_tok] */
    double gap;      /* smallest difference of two scores that decided a selection */
} naive;

/* token: [n_tok + 1], the last one only a draft's input. */
void naive_run(const wt *w, const int32_t *token, int32_t n_tok, double latent_eps, naive *out);
void naive_free(naive *n);

#endif
