/* kern/x86/tile.h - products of matrices in the tile registers of AMX.
 *
 * A tile is 16 rows of 16 cells of 4 bytes: floats of a result, or pairs of bf16. One instruction adds to a
 * result tile the products of 16 rows of 16 pairs each with 16 columns of 16 pairs. In it an element sums its
 * even products and its odd products from 0, one after the other, adds the two sums, and adds that to what
 * it held; subnormal inputs and results are 0. An element sees its own row and column only, so that a
 * result does not depend on what shares its tile.
 *
 * Registers 0 to 3 are for results, 4 and 5 for the left side, 6 and 7 for the right one. tile_begin configures
 * them, tile_end gives them back: nothing is left in them between calls of an op. With SIMD_EMULATE the
 * instructions are plain C, for tests on a machine without AMX. Include after simd.h.
 */
#ifndef KERN_X86_TILE_H
#define KERN_X86_TILE_H

#include <string.h>

enum { TILE = 16 }; /* rows, cells of a row, and columns */

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_row[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "what LDTILECFG reads");

#if defined(SIMD_EMULATE) && !defined(TILE_REAL)

typedef struct tile_regs {
    float cell[8][TILE][TILE];
    size_t row_bytes[8];
} tile_regs;

static _Thread_local tile_regs g_tiles;

/* Results and right sides of n_col columns, up to TILE. */
static inline void tile_begin_wide(int32_t n_col)
{
    memset(&g_tiles, 0, sizeof g_tiles);
    for (int i = 0; i < 8; i++) {
        g_tiles.row_bytes[i] = (size_t)(i / 2 == 2 ? TILE : n_col) * 4;
    }
}

/* What is used after the end is NaN. */
static inline void tile_end(void)
{
    memset(g_tiles.cell, 0xFF, sizeof g_tiles.cell);
}

static inline void tile_load(int t, const void *p, int64_t stride)
{
    for (int i = 0; i < TILE; i++) {
        memcpy(g_tiles.cell[t][i], (const uint8_t *)p + i * stride, g_tiles.row_bytes[t]);
    }
}

static inline void tile_store(int t, void *p, int64_t stride)
{
    for (int i = 0; i < TILE; i++) {
        memcpy((uint8_t *)p + i * stride, g_tiles.cell[t][i], g_tiles.row_bytes[t]);
    }
}

static inline void tile_zero(int t)
{
    memset(g_tiles.cell[t], 0, sizeof g_tiles.cell[t]);
}

SIMD_FN vf tile_flush(vf x)
{
    return vf_pair(flush8(x.lo), flush8(x.hi));
}

static inline void tile_dot(int c, int a, int b)
{
    for (int i = 0; i < TILE; i++) {
        vf sum[2] = {vf_zero(), vf_zero()};
        for (int k = 0; k < TILE; k++) {
            const vi x = vi_bcast(&g_tiles.cell[a][i][k]);
            const vi y = vi_loadu(g_tiles.cell[b][k]);
            const vf even = vf_fma(tile_flush(vf_of_vi(vi_sll(x, 16))),
                                   tile_flush(vf_of_vi(vi_sll(y, 16))), sum[0]);
            const vi upper = vi_set1((int32_t)0xFFFF0000u);
            const vf odd = vf_fma(tile_flush(vf_of_vi(vi_and(x, upper))),
                                  tile_flush(vf_of_vi(vi_and(y, upper))), sum[1]);
            sum[0] = tile_flush(even);
            sum[1] = tile_flush(odd);
        }
        const vf both = tile_flush(vf_add(sum[0], sum[1]));
        vf_storeu(g_tiles.cell[c][i], tile_flush(vf_add(vf_loadu(g_tiles.cell[c][i]), both)));
    }
}

#define TILE_LOAD(t, p, stride)  tile_load(t, p, stride)
#define TILE_STORE(t, p, stride) tile_store(t, p, stride)
#define TILE_ZERO(t)             tile_zero(t)
#define TILE_DOT(c, a, b)        tile_dot(c, a, b)

#else

static inline void tile_begin_wide(int32_t n_col)
{
    _Alignas(64) tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = (uint16_t)((i / 2 == 2 ? TILE : n_col) * 4);
        c.n_row[i] = TILE;
    }
    /* the intrinsic names eight bytes of it as its operand: the rest must be in memory, too */
    __asm__ volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}

static inline void tile_end(void)
{
    _tile_release();
}

#define TILE_LOAD(t, p, stride)  _tile_loadd(t, p, stride)
#define TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define TILE_ZERO(t)             _tile_zero(t)
#define TILE_DOT(c, a, b)        _tile_dpbf16ps(c, a, b)

#endif

static inline void tile_begin(void)
{
    tile_begin_wide(TILE);
}

/* For the compiler: what was written before is in memory when tiles read it, and what tiles stored before is
 * read from there. */
SIMD_FN void tile_fence(void)
{
    __asm__ volatile("" ::: "memory");
}

/* c [16 na][16 nb] = a [16 na][n pairs] times b [n pairs][16 nb]. Strides between rows are in cells. */
typedef struct tile_job {
    const float *a;
    int64_t a_stride;
    const float *b;
    int64_t b_stride;
    int64_t b_next; /* from the first 16 columns of b to the next, in cells */
    int32_t n_step; /* of 16 pairs                                          */
    float *c;
    int64_t c_stride;
    int64_t c_next; /* from the first 16 columns of c to the next           */
    int32_t add;    /* to what c holds                                      */
} tile_job;

/* na and nb, 1 or 2, are constants of the caller. */
SIMD_FN void tile_product(const tile_job *j, const int na, const int nb)
{
    const int64_t c_stride = j->c_stride * 4;
    const int64_t c_down = TILE * j->c_stride;
    tile_fence();
    if (j->add) {
        TILE_LOAD(0, j->c, c_stride);
        if (nb == 2) {
            TILE_LOAD(1, j->c + j->c_next, c_stride);
        }
        if (na == 2) {
            TILE_LOAD(2, j->c + c_down, c_stride);
        }
        if (na == 2 && nb == 2) {
            TILE_LOAD(3, j->c + c_down + j->c_next, c_stride);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int32_t t = 0; t < j->n_step; t++) {
        const float *a = j->a + t * TILE;
        const float *b = j->b + t * TILE * j->b_stride;
        TILE_LOAD(4, a, j->a_stride * 4);
        TILE_LOAD(6, b, j->b_stride * 4);
        TILE_DOT(0, 4, 6);
        if (nb == 2) {
            TILE_LOAD(7, b + j->b_next, j->b_stride * 4);
            TILE_DOT(1, 4, 7);
        }
        if (na == 2) {
            TILE_LOAD(5, a + TILE * j->a_stride, j->a_stride * 4);
            TILE_DOT(2, 5, 6);
        }
        if (na == 2 && nb == 2) {
            TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, j->c, c_stride);
    if (nb == 2) {
        TILE_STORE(1, j->c + j->c_next, c_stride);
    }
    if (na == 2) {
        TILE_STORE(2, j->c + c_down, c_stride);
    }
    if (na == 2 && nb == 2) {
        TILE_STORE(3, j->c + c_down + j->c_next, c_stride);
    }
    tile_fence();
}

#endif
