/* kern/x86/attn_x86.h - what the driver of x86 attention (attn_x86.c) and the kernels of its
 * instruction sets (attn_avx2.c, attn_avx512.c, attn_avx512bf16.c, attn_amx.c) share.
 *
 * Heads lie in SIMD lanes. A block is a set of query rows, all heads of each: column c of a block is
 * head c % n_head of its row c / n_head, at most 128 columns; in table mode the rows of a block belong
 * to one request, in list mode there is one. Columns are cut into vectors of `lanes`; a column never
 * meets another, so a result does not depend on what shares its block.
 *
 * Arrays of a block are vector-major, all of 4-byte cells (a float, or a pair of bf16):
 *     q      [n_vec][n_step][lanes]     n_step = 576 floats or 288 pairs
 *     k      [64][k_stride]             the tile, keys as rows of n_step cells
 *     v      [n][v_stride]              f32: the same rows as k; bf16: cell (j, r) holds value r of
 *                                       keys 2j and 2j + 1, so [32][...]
 *     s, p   [2][64 or 32][lanes]       scores, then P, of the two vectors being worked on
 *     node   [n_vec][512][lanes] (of tiles [n_vec][lanes][512]), then lse [n_vec][lanes]
 * Which value of a key row r of a node holds is the instruction set's own affair: emit writes them
 * where they belong.
 */
#ifndef KERN_X86_ATTN_X86_H
#define KERN_X86_ATTN_X86_H

#include "kern/attn.h"
#include "kern/kern.h"

enum {
    ATTN_COLS = 128,       /* columns of a block                            */
    ATTN_CHUNK = 2,        /* vectors worked on together                    */
    ATTN_MAX_STEP = 576,   /* cells of a packed query                       */
    ATTN_F32_STRIDE = 592, /* cells between keys: an odd number of cache lines, so that a column of
                             the tile meets every set of the cache         */
    ATTN_BF16_STRIDE = 304,
    ATTN_PAIR_STRIDE = 528 /* cells between pairs of keys in v             */
};

/* The rows of the tile after this one, fetched into the cache line by line as the work goes on. */
typedef struct attn_prefetch {
    const uint8_t *const *row;
    int32_t n_row;
    int32_t n_line;        /* lines of a row                                     */
    int32_t i_row, i_line; /* the next line                                      */
    int64_t rate, credit;  /* what a product earns, of ATTN_PREFETCH_LINE a line */
} attn_prefetch;

#define ATTN_PREFETCH_LINE (INT64_C(1) << 24)

/* One worker's state: the block, the segment and the tile it works on. */
typedef struct attn_work {
    const attn_args *a;

    int32_t row0, n_row; /* rows of the block                      */
    int32_t n_col, n_vec;

    float *q;     /* packed queries                                */
    float *scale; /* [n_vec, lanes] factor of the scores           */
    float *m;     /* [n_vec, lanes] largest scaled score so far    */
    float *l;     /* [n_vec, lanes] sum of exp(score - m)          */
    float *k, *v; /* the tile                                      */
    float *s, *p;
    float *node;   /* of the segment: sums, then results           */
    int32_t first; /* the node holds nothing yet                   */
    int32_t n_pair; /* rows of v that may be other than 0: kernels of tiles only */

    attn_prefetch next;
    attn_stats stats;
} attn_work;

/* The kernels of one instruction set and product type. */
typedef struct attn_isa {
    int32_t lanes;
    int32_t bf16; /* products of bf16 pairs: neither rows nor queries are f32 */

    /* Fills w->q and w->scale from the rows of the block; columns past n_col get zeros. */
    void (*pack_q)(attn_work *w);
    /* Dequantises n rows into the tile. */
    void (*load_tile)(attn_work *w, const uint8_t *const *row, int32_t n);
    /* The first n keys of the tile into columns [from, to): scores, online softmax, sums. Nothing of
     * another column changes. */
    void (*apply)(attn_work *w, int32_t n, int32_t from, int32_t to);
    /* Makes the tile one of n keys: what belongs to key n and is multiplied with key n - 1 becomes 0. */
    void (*cut_tile)(attn_work *w, int32_t n);
    /* Products of one vector that `apply` computes for n keys and n_vec vectors. */
    int64_t (*n_product)(int32_t n, int32_t n_vec);
    /* Sums of the segment -> normalised results and lse, in w->node. */
    void (*finish)(attn_work *w);
    /* Node a = node(a, b) for vectors [v0, v1) of n_vec. */
    void (*merge)(float *a, const float *b, int32_t n_vec, int32_t v0, int32_t v1);
    /* Writes vectors [v0, v1) of the block at row0 to a->out and a->lse. */
    void (*emit)(const attn_args *a, int32_t row0, int32_t n_row, const float *node, int32_t v0,
                 int32_t v1);
} attn_isa;

extern const attn_isa attn_isa_avx2;
extern const attn_isa attn_isa_avx512;
extern const attn_isa attn_isa_avx512bf16;
extern const attn_isa attn_isa_amx;

/* What the file of an instruction set puts into its attn_isa. */
#define ATTN_ISA_TABLE                                                                             \
    {                                                                                              \
        .lanes = L, .bf16 = ATTN_BF16, .pack_q = pack_q, .load_tile = load_tile, .apply = apply,   \
        .cut_tile = cut_tile, .n_product = n_product, .finish = finish, .merge = merge,            \
        .emit = emit                                                                               \
    }

/* The kernels of one variant: those for f32 rows or queries, and those for the rest. */
typedef struct attn_kernels {
    const attn_isa *f32, *other;
} attn_kernels;

/* The op of kern/attn.h with these kernels. Too little scratch fails the queue with KVS_INVALID. */
void attn_x86_run(const attn_kernels *k, const attn_args *a, dev_queue *q);
/* The same for every variant, row count, length and key list. */
size_t attn_x86_scratch(const attn_args *a, const dev_queue *q);

void attn_apply_avx2(kern_table *t);
void attn_apply_avx512(kern_table *t);
void attn_apply_avx512bf16(kern_table *t);
void attn_apply_amx(kern_table *t);

#endif
