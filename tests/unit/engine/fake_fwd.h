/* fake_fwd.h: a stand-in for the forward pass whose logits are a hash of all tokens up to the row.
 *
 * Caches are simulated slot by slot through the block tables: a slot remembers what was written, a row reads
 * every slot before it, so a wrong page, a stale or missing row, a wrong position changes the result or is
 * reported. The draft layer's cache is checked against what the main cache says its true content is, whenever a
 * pass with true rows begins. Every rank's calls are compared with every other's. */
#ifndef FAKE_FWD_H
#define FAKE_FWD_H

#include <stdbool.h>
#include <stdint.h>

#include "model/fwd.h"

enum { FAKE_LOG = 4000 };

typedef struct fake_model {
    uint64_t seed;
    int32_t accuracy;    /* percent of states in which the draft layer knows the largest logit       */
    double spread;       /* logits lie in [0, spread)                                                */
    int32_t nan_after;   /* a row whose token is this gets NaN logits; -1: none                      */
    int32_t fail_rank;   /* this rank fails its fail_call-th call (from 1); -1: none                 */
    int32_t fail_call;
    bool log;            /* rank 0 writes its calls to fake_log                                      */
} fake_model;

extern fake_model fake;
extern char fake_log[FAKE_LOG];
extern int32_t fake_n_step, fake_n_draft; /* calls of rank 0 */

/* Length of every request's prompt, 0: any. With it the calls must say which rows are the prompt's. */
extern int64_t fake_n_prompt;

/* A model of that vocabulary; w->h and nothing else is set. */
void fake_weights(wt *w, int32_t vocab, int32_t n_mtp, bool share);

/* The state after a token, and the logit of v in a state. */
uint64_t fake_next(uint64_t state, int32_t token);
float fake_logit(uint64_t state, int32_t v);
/* The state after n tokens. */
uint64_t fake_state(const int32_t *token, int64_t n);

#endif
