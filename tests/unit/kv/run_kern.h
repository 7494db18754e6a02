/* run_kern.h: attention and index scores of one request over a cache, and a walk over the variants of
 * an op, so that two caches can be compared. */
#ifndef TESTS_RUN_KERN_H
#define TESTS_RUN_KERN_H

#include <stdbool.h>
#include "kv/cache.h"

enum { RUN_HEADS = 16, RUN_INDEX_HEADS = 8, RUN_ROWS = 2 };

/* fn(table, ctx) with every variant of the op that this machine runs, over the reference. */
void each_variant(kern_op op, void (*fn)(const kern_table *t, void *ctx), void *ctx);

void random_f32(float *x, int64_t n, uint64_t stream);

/* RUN_ROWS rows that attend the first kv_len[r] tokens (rank 0 of dcp 1), through the table or, sparse,
 * through lists of slots. The queries are fixed. out [RUN_ROWS, RUN_HEADS, 512], lse [RUN_ROWS,
 * RUN_HEADS]. Asserts that every key was counted and none was bad. */
void run_attn(const kern_table *t, const kvs_cache *c, const int32_t *table, int32_t width,
              const int32_t *kv_len, bool sparse, float *out, float *lse);

/* Scores of the first len keys, -inf up to 64 * width, in score [64 * width]. */
void run_score(const kern_table *t, const kvs_cache *c, const int32_t *table, int32_t width,
               int32_t len, float *score);

#endif
