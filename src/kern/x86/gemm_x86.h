/* x86/gemm_x86.h - products with a weight matrix: what the driver (gemm.c) and the loops share.
 *
 * n_in is cut into blocks of a fixed length. Within a block lane j of a vector sums what the
 * vectors hold in lane j, one fused multiply-add (or dot product of a pair) after the other; the
 * block ends with a fixed tree over the lanes, and blocks are added in order. That is the whole
 * order of a product: tiles of any number of rows and outputs, operands as stored or copied into
 * panels, give the same bits. Behind the end of a row lies zero. A NaN is written as the quiet NaN.
 * Tile registers have an order of their own (tile.h, gemm_amx.c), with the same property.
 *
 * Where an instruction set has no product of bf16 pairs, a vector of bf16 is two vectors of f32:
 * the even elements, then the odd ones, exactly; a panel holds them in that order.
 *
 * Included by kern/x86/ and kern.c only.
 */
#ifndef KVS_KERN_X86_GEMM_X86_H
#define KVS_KERN_X86_GEMM_X86_H

#include <stdint.h>

#include "kern/gemm.h"
#include "kern/kern.h"

enum {
    GEMM_TILE_OUT = 16, /* most outputs of a tile of operands as stored   */
    GEMM_AHEAD = 1024   /* bytes between what is read and what is fetched */
};

/* Some rows of x times the rows of w of a tile along one block. */
typedef struct gemm_tile {
    const uint8_t *x;
    int64_t x_stride; /* bytes */
    int32_t n_row;
    int32_t n_stored;      /* of panels: so many rows are at x as they are stored, ...  */
    const uint8_t *packed; /* ... the others here; where none is stored, x is this, too */
    int64_t packed_stride;
    const uint8_t *w[GEMM_TILE_OUT]; /* every entry up to isa->n_out can be read */
    int64_t w_stride;                /* bytes from w[0] to w[1]                  */
    int32_t n_out;
    int32_t n;     /* elements along the block; panels: padded with zeros to whole steps */
    int32_t first; /* y is set, else added to */
    float *y;
    int64_t y_stride; /* elements */

    /* Where w comes from memory: what lies GEMM_AHEAD bytes further is fetched, and from byte
     * `turn` of the block on what lies `jump` bytes further, in the next tile's rows. */
    int32_t streams;
    int64_t turn, jump;
} gemm_tile;

/* Codes of some rows under one scale, as bf16. */
typedef struct gemm_strip {
    const uint8_t *code;
    int64_t stride;
    int32_t n_row, n;
    int64_t ahead;        /* bytes to what is fetched meanwhile */
    const uint8_t *table; /* of the scale                       */
    uint16_t *to;
    int64_t to_stride; /* elements */
} gemm_strip;

/* How codes become bf16: through a table per scale. */
typedef struct gemm_codes {
    size_t table_bytes; /* a multiple of 64 */
    void (*tables)(const float *scale, int32_t n, uint8_t *table);
    void (*dequant)(const gemm_strip *s);
} gemm_codes;

/* n_row rows of n bf16, `stride` bytes apart, into a panel whose rows take to_stride bytes. */
typedef void (*gemm_pack_fn)(const uint8_t *from, int64_t stride, int32_t n_row, int32_t n,
                             uint8_t *to, int64_t to_stride);

typedef struct gemm_isa {
    int32_t n_out;     /* outputs of a tile, a multiple of 4                                      */
    int32_t block_f32; /* elements of a block of f32 operands ...                                 */
    int32_t
        block_bf16;    /* ... and of bf16 operands                                                */
    int32_t panel_out; /* outputs of a panel of w, panel_row: rows of a panel of x                */
    int32_t panel_row;
    int32_t tile_row; /* rows of a tile: groups of rows are multiples of it                       */
    void (*dot_f32)(const gemm_tile *t);
    void (*dot_bf16)(const gemm_tile *t); /* bf16 as stored */
    /* More rows of bf16 than `few` (0: any number is multiplied as stored) are multiplied from panels, in
     * tiles of packed_out outputs. pack_x and pack_w copy rows of n bf16 into the form of such a panel, whose
     * rows take packed_size bytes an element, with zeros behind n up to a multiple of packed_step. */
    int32_t few;
    int32_t packed_out, packed_size, packed_step;
    gemm_pack_fn pack_x, pack_w;
    void (*dot_packed)(const gemm_tile *t);
    /* How many of n_row rows of x dot_packed takes as they are stored; NULL: none. */
    int32_t (*x_stored)(int64_t stride, int32_t n_row, int32_t n);
    /* Around the products of a task; NULL: nothing to do. packed: of panels. */
    void (*begin)(int packed);
    void (*end)(void);
    const gemm_codes *codes;
    /* Up to codes_row rows of x times codes as they are stored, t->n a multiple of 64 that
     * begins with a scale's first column; table: the first of consecutive ones. codes_row 0:
     * there is no such form. */
    int32_t codes_row;
    void (*dot_codes)(const gemm_tile *t, const uint8_t *table);
} gemm_isa;

void gemm_run(const gemm_isa *isa, const gemm_args *a, dev_queue *q);
size_t gemm_scratch_run(const gemm_isa *isa, const gemm_args *a, const dev_queue *q);

/* With SIMD_EMULATE the AVX-512 files compile under names of their own, for tests. */
#ifdef SIMD_EMULATE
#define GEMM_X86_AVX512(name)     name##_emulate
#define GEMM_X86_AVX512BF16(name) name##_emulate_bf16
#define GEMM_X86_VBMI(name)       name##_emulate_vbmi
#define GEMM_X86_AMX(name)        name##_emulate_amx
#else
#define GEMM_X86_AVX512(name)     name##_avx512
#define GEMM_X86_AVX512BF16(name) name##_avx512bf16
#define GEMM_X86_VBMI(name)       name##_vbmi
#define GEMM_X86_AMX(name)        name##_amx
#endif

void gemm_apply_avx2(kern_table *t);
void GEMM_X86_AVX512(gemm_apply)(kern_table *t);
void GEMM_X86_AVX512BF16(gemm_apply)(kern_table *t); /* with byte lookups where there are any */
void GEMM_X86_VBMI(gemm_apply)(kern_table *t);       /* with them */
void GEMM_X86_AMX(gemm_apply)(kern_table *t);        /* with them, too */

#endif
