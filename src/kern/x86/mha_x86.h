/* kern/x86/mha_x86.h - what the driver of x86 multi-head attention (mha_x86.c) and the kernels of its instruction
 * sets (mha_avx2.c, mha_avx512.c, mha_avx512bf16.c) share.
 *
 * Query rows lie in SIMD lanes: every head has keys of its own, so the rows of one head are what a key meets. A
 * piece is one head and up to MHA_COLS rows; a column never meets another, so a result does not depend on what
 * shares its piece. Two vectors of columns, a pair, are worked on together; a piece is filled up to whole pairs
 * with columns of zeros.
 *
 * Arrays of a piece hold 4-byte cells (a float, or a pair of bf16); those of columns go pair by pair:
 *     q      [n_pair][n_step][2][lanes]    n_step = cells of nope + 64 values, filled up to 8 with zeros
 *     k      [n_step][64]                  the tile of keys, a key a column
 *     v      [64][n_value]                 bf16: cell (j, r) holds value r of keys 2j and 2j + 1, so [32][...]
 *     s, p   [64 or 32][2][lanes]          scores, then P, of the pair being worked on
 *     o      [n_pair][n_value][2][lanes]   sums, then results
 *     m, l   [n_pair][2][lanes]            largest scaled score so far; sum of exp(score - m)
 *     turn   [8][n_step]                   rows on their way into columns
 */
#ifndef KERN_X86_MHA_X86_H
#define KERN_X86_MHA_X86_H

#include "kern/kern.h"

enum { MHA_COLS = 256, MHA_LANES_MAX = 16 };

/* One worker's piece. */
typedef struct mha_work {
    const mha_args *a;
    int32_t head, row0, n_row;
    int32_t n_pair;
    int32_t n_step, n_value;
    float *q, *k, *v, *s, *p, *o, *m, *l, *turn;
    int32_t *len; /* [n_pair * 2 * lanes] keys of the block that each column attends */
    uint64_t n_nan;
} mha_work;

/* The kernels of one instruction set and product type. */
typedef struct mha_isa {
    int32_t lanes;
    int32_t bf16; /* products of bf16 pairs: nothing is f32 */
    /* A piece whose head, rows and columns are set: folds the block into a->out and a->lse. */
    void (*run)(mha_work *w);
} mha_isa;

extern const mha_isa mha_isa_avx2;
extern const mha_isa mha_isa_avx512;
extern const mha_isa mha_isa_avx512bf16;

/* The kernels of one variant: those for f32 operands, and those for bf16. */
typedef struct mha_kernels {
    const mha_isa *f32, *other;
} mha_kernels;

/* The op of kern/mha.h with these kernels. Too little scratch fails the queue with KVS_INVALID. */
void mha_x86_run(const mha_kernels *k, const mha_args *a, dev_queue *q);
/* The same for every variant. */
size_t mha_x86_scratch(const mha_args *a, const dev_queue *q);

void mha_apply_avx2(kern_table *t);
void mha_apply_avx512(kern_table *t);
void mha_apply_avx512bf16(kern_table *t);

#endif
