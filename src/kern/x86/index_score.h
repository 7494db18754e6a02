/* x86/index_score.h - indexer scores: what the driver (index_score.c) and the loops share.
 *
 * Heads lie in vector lanes, keys are broadcast. Operands are 4-byte cells: one f32 value, or a pair of
 * bf16 values. A panel is the query of one row as [head blocks][n_cell][block] cells, so that the loop
 * over cells reads it in order; heads behind n_head are zero and masked out of every sum. Each (row, key)
 * is one chain of n_cell products per head, then the heads in the order of their vectors, then the lanes
 * in a fixed tree: what shares the call with it has no say.
 *
 * A query of up to 8 heads takes 4 or 8 lanes, and SCORE_ROWS rows of a request lie side by side in the
 * vectors of a panel: few heads cost few lanes. Its heads are added by a fixed tree over those lanes,
 * wherever in a vector they lie. How many heads there are decides between the two forms, never the rows.
 *
 * Included by kern/x86/ only.
 */
#ifndef KVS_KERN_X86_INDEX_SCORE_H
#define KVS_KERN_X86_INDEX_SCORE_H

#include <stdint.h>

#include "kern/index.h"
#include "kern/kern.h"

enum {
    SCORE_MAX_HEAD = 64,
    SCORE_CHUNK = 192, /* keys unpacked at a time: 3 pages; a multiple of every group of keys */
    SCORE_PART = 48,   /* keys of several rows summed at a time: sums stay in the first cache  */
    SCORE_ROWS = 8     /* rows that share a panel                                              */
};

/* Where n scores of a row go. */
typedef struct score_dest {
    float *to;
    int32_t n;
} score_dest;

typedef struct score_panel {
    const float *cell; /* [blocks][n_cell][block] */
    const float *w;    /* [SCORE_MAX_HEAD], zero behind n_head */
    int32_t n_head;
    int32_t n_cell;
    int32_t block; /* heads */

    /* panels of several rows; 0 else. n_head is then that of a row */
    int32_t row_lanes; /* 4 or 8 lanes of a row                      */
    int32_t lanes;     /* of the panel: blocks * block               */
    int32_t n_key;     /* the most keys that one of its rows takes   */
    score_dest row[SCORE_ROWS];
} score_panel;

typedef struct score_isa {
    int32_t lanes;     /* of a vector                                           */
    int32_t fp8_cells; /* cells of an e4m3 key: 128 as f32, 64 as pairs of bf16 */
    float w_factor;    /* weights are multiplied by it: undoes unpack's scaling */
    /* Heads of a panel block for a call with n_head heads. */
    int32_t (*block)(int32_t n_head);
    /* 128 * n e4m3 codes -> fp8_cells * n cells, all values scaled by one power of two. */
    void (*unpack)(const uint8_t *code, int64_t n, float *cell);
    /* to[c * stride + r] = from[r * n_cell + c] for r < n_row, c < n_cell, both multiples of 8. */
    void (*transpose)(const float *from, int32_t n_row, int32_t n_cell, float *to, int32_t stride);
    /* Around the sums and rows of a task; NULL: nothing is to be done. */
    void (*begin)(int32_t fmt);
    void (*end)(int32_t fmt);
    /* sum[key * lanes + lane] = the relu'd products of the panel with n keys, weighted and added over
     * the heads of a lane. Keys up to the end of a group may be read and written. */
    void (*sums)(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *sum);
    /* out[key] = the lanes of a key added, times scale[key]. */
    void (*finish)(const float *sum, const float *scale, int32_t n, float *out);
    /* Scores of the rows of n_panel panels: of key k in row[].to[k] for k < row[].n. All of
     * SCORE_CHUNK keys and scales may be read; sum has SCORE_PART * SCORE_ROWS * 8 elements. */
    void (*rows)(const score_panel *p, int32_t n_panel, const float *key, int32_t fmt,
                 const float *scale, float *sum);
} score_isa;

void index_score_run(const score_isa *isa, const index_score_args *a, dev_queue *q);
size_t index_score_scratch_run(const score_isa *isa, const index_score_args *a, const dev_queue *q);

#endif
