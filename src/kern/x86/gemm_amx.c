/* x86/gemm_amx.c - products with a weight matrix for AMX: bf16 pairs in tiles (tile.h), f32 weights through FMA.
 *
 * Along a block an output is what one cell of a result tile sums, 32 elements an instruction, whichever side of
 * the product the weights are on; so the two forms give the same bits:
 *   few rows    16 rows of weights as they are stored are the left side, 32 elements of one row of x the right
 *               one, a single column. Nothing is turned, and weights cost 16 clocks per 512. Codes are
 *               dequantised 128 columns at a time into a buffer that stays in the first cache.
 *   more rows   rows of x as they are stored are the left side, panels of turned weights the right one, 32 x 32
 *               results at a time.
 * Subnormal numbers count as 0.
 */
#define SIMD_LANES 16
#define GEMM_DOT   1
#define GEMM_F32_ONLY
#include "kern/x86/gemm_codes.h"
#include "kern/x86/gemm_loops.h"
#include "kern/x86/tile.h"

enum {
    STEP_ELEM = 2 * TILE, /* elements of one instruction */
    PAIR = 2 * TILE,      /* rows and outputs worked on together */
    FEW = 4               /* rows */
};

static void begin(int packed)
{
    tile_begin_wide(packed ? TILE : 1);
}

/* y[0 .. n), n <= 16: c, or y + c; NaN as the quiet one. */
SIMD_FN void put_row(float *y, const float *c, int32_t n, int first)
{
    float part[L] = {0.0f};
    float *at = n >= L ? y : part;
    vf s = vf_loadu(c);
    if (!first) {
        if (n < L) {
            memcpy(part, y, (size_t)n * sizeof *y);
        }
        s = vf_add(vf_loadu(at), s);
    }
    vf_storeu(at, vf_select(vm_nan(s), vf_set_bits(0x7fc00000u), s));
    if (n < L) {
        memcpy(y, part, (size_t)n * sizeof *y);
    }
}

/* ---- few rows ---------------------------------------------------------------------------------- */

/* 32 elements of 16 rows of weights times those of m rows of x; stride: bytes between rows of weights. */
SIMD_FN void few_step(const uint8_t *w, int64_t stride, const uint8_t *x, int64_t x_stride,
                      const int m)
{
    TILE_LOAD(4, w, stride);
    TILE_LOAD(6, x, 4);
    TILE_DOT(0, 4, 6);
    if (m > 1) {
        TILE_LOAD(7, x + x_stride, 4);
        TILE_DOT(1, 4, 7);
    }
    if (m > 2) {
        TILE_LOAD(6, x + 2 * x_stride, 4);
        TILE_DOT(2, 4, 6);
    }
    if (m > 3) {
        TILE_LOAD(7, x + 3 * x_stride, 4);
        TILE_DOT(3, 4, 7);
    }
}

SIMD_FN void few_begin(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

/* The results of m rows of x. */
SIMD_FN void few_end(const gemm_tile *t, const int m)
{
    _Alignas(64) float c[FEW][TILE];
    TILE_STORE(0, c[0], 4);
    if (m > 1) {
        TILE_STORE(1, c[1], 4);
    }
    if (m > 2) {
        TILE_STORE(2, c[2], 4);
    }
    if (m > 3) {
        TILE_STORE(3, c[3], 4);
    }
    tile_fence();
    SIMD_UNROLL
    for (int i = 0; i < m; i++) {
        put_row(t->y + i * t->y_stride, c[i], t->n_out, t->first);
    }
}

/* The step at `at` bytes where rows of weights are missing or end in it: from a copy filled up with zeros. */
SIMD_FN void few_part(const gemm_tile *t, int64_t at, const int m)
{
    _Alignas(64) uint8_t part[TILE + FEW][4 * TILE];
    const int64_t rest = 2 * (int64_t)t->n - at;
    const size_t n = (size_t)(rest < 4 * TILE ? rest : 4 * TILE);
    memset(part, 0, sizeof part);
    for (int32_t j = 0; j < t->n_out; j++) {
        memcpy(part[j], t->w[j] + at, n);
    }
    for (int i = 0; i < m; i++) {
        memcpy(part[TILE + i], t->x + i * t->x_stride + at, n);
    }
    tile_fence();
    few_step(part[0], 4 * TILE, part[TILE], 4 * TILE, m);
    tile_fence();
}

/* Weights as stored. */
SIMD_FN void few_stored(const gemm_tile *t, const int m)
{
    const int64_t whole = t->n_out == TILE ? (int64_t)t->n / STEP_ELEM * STEP_ELEM * 2 : 0;
    int64_t at = 0;
    tile_fence();
    for (; at < whole; at += 4 * TILE) {
        if (t->streams) {
            const int64_t to = at + (at < t->turn ? GEMM_AHEAD : t->jump);
            SIMD_UNROLL
            for (int j = 0; j < TILE; j++) {
                _mm_prefetch((const char *)(t->w[j] + to), _MM_HINT_T0);
            }
        }
        few_step(t->w[0] + at, t->w_stride, t->x + at, t->x_stride, m);
    }
    for (; at < 2 * (int64_t)t->n; at += 4 * TILE) {
        few_part(t, at, m);
    }
}

/* The values of up to 128 columns from column `at` on. */
SIMD_FN void codes_strip(const gemm_tile *t, const uint8_t *table, int32_t at, uint8_t *to)
{
    const gemm_strip s = {.code = t->w[0] + at,
                          .stride = t->w_stride,
                          .n_row = t->n_out,
                          .n = t->n - at < GEMM_BLOCK ? t->n - at : GEMM_BLOCK,
                          .ahead = at < t->turn ? GEMM_AHEAD : t->jump,
                          .table = table + (size_t)(at / GEMM_BLOCK) * gemm_codes_vbmi.table_bytes,
                          .to = (uint16_t *)(void *)to,
                          .to_stride = GEMM_BLOCK};
    gemm_codes_vbmi.dequant(&s);
}

/* From codes, t->n a multiple of 64. The next columns become values before the products with these: what
 * was just stored does not go to a tile without waiting. */
SIMD_FN void few_codes(const gemm_tile *t, const uint8_t *table, const int m)
{
    enum { BYTES = 2 * GEMM_BLOCK };
    _Alignas(64) uint8_t values[2][TILE * BYTES];
    if (t->n_out < TILE) {
        memset(values, 0, sizeof values);
    }
    codes_strip(t, table, 0, values[0]);
    for (int32_t at = 0; at < t->n; at += GEMM_BLOCK) {
        const uint8_t *from = values[at / GEMM_BLOCK % 2];
        const int32_t next = at + GEMM_BLOCK;
        if (next < t->n) {
            codes_strip(t, table, next, values[next / GEMM_BLOCK % 2]);
        }
        const int32_t end = next < t->n ? next : t->n;
        tile_fence();
        for (int32_t i = at; i < end; i += STEP_ELEM, from += 2 * STEP_ELEM) {
            few_step(from, BYTES, t->x + 2 * (int64_t)i, t->x_stride, m);
        }
        tile_fence();
    }
}

/* table NULL: weights as stored. */
SIMD_FN void few_rows(const gemm_tile *t, const uint8_t *table, const int m)
{
    few_begin();
    if (table == NULL) {
        few_stored(t, m);
    } else {
        few_codes(t, table, m);
    }
    few_end(t, m);
}

/* At most FEW rows, as gemm.c promises. */
static void dot_codes(const gemm_tile *t, const uint8_t *table)
{
    switch (t->n_row) {
    case 1:
        few_rows(t, table, 1);
        break;
    case 2:
        few_rows(t, table, 2);
        break;
    case 3:
        few_rows(t, table, 3);
        break;
    default:
        few_rows(t, table, 4);
        break;
    }
}

static void dot_stored(const gemm_tile *t)
{
    dot_codes(t, NULL);
}

/* ---- more rows --------------------------------------------------------------------------------- */

static void pack_x(const uint8_t *from, int64_t stride, int32_t n_row, int32_t n, uint8_t *to,
                   int64_t to_stride)
{
    const size_t used = 2 * (size_t)n;
    const size_t row = (used + 4 * TILE - 1) / (4 * TILE) * (4 * TILE);
    for (int32_t r = 0; r < (n_row + TILE - 1) / TILE * TILE; r++) {
        uint8_t *at = to + r * to_stride;
        if (r < n_row) {
            memcpy(at, from + r * stride, used);
        }
        memset(at + (r < n_row ? used : 0), 0, row - (r < n_row ? used : 0));
    }
}

/* Whole tiles, where their rows can be counted in cells. */
static int32_t x_stored(int64_t stride, int32_t n_row, int32_t n)
{
    return stride % 4 == 0 && n % STEP_ELEM == 0 ? n_row / TILE * TILE : 0;
}

/* 32 elements of 32 rows, `stride` bytes apart -> [pair][row] cells. */
SIMD_FN void turn_step(const uint8_t *from, int64_t stride, float *to)
{
    for (int32_t r = 0; r < PAIR; r += 8) {
        SIMD_UNROLL
        for (int32_t p = 0; p < TILE; p += 8) {
            __m256 v[8];
            SIMD_UNROLL
            for (int i = 0; i < 8; i++) {
                v[i] =
                    _mm256_loadu_ps((const float *)(const void *)(from + (r + i) * stride + 4 * p));
            }
            transpose8(v);
            SIMD_UNROLL
            for (int i = 0; i < 8; i++) {
                _mm256_storeu_ps(to + (p + i) * PAIR + r, v[i]);
            }
        }
    }
}

/* Up to 32 outputs -> [step][pair][output] cells, zeros for outputs and elements that are not there. */
static void pack_w(const uint8_t *from, int64_t stride, int32_t n_row, int32_t n, uint8_t *to,
                   int64_t to_stride)
{
    (void)to_stride; /* the outputs of a tile lie together, in the bytes of as many rows */
    float *cell = (float *)(void *)to;
    for (int32_t i = 0; i < n; i += STEP_ELEM, cell += TILE * PAIR) {
        const uint8_t *at = from + 2 * (int64_t)i;
        if (n_row == PAIR && n - i >= STEP_ELEM) {
            turn_step(at, stride, cell);
            continue;
        }
        _Alignas(64) uint8_t part[PAIR][4 * TILE] = {{0}};
        const size_t rest = 2 * (size_t)(n - i < STEP_ELEM ? n - i : STEP_ELEM);
        for (int32_t r = 0; r < n_row; r++) {
            memcpy(part[r], at + r * stride, rest);
        }
        turn_step(part[0], 4 * TILE, cell);
    }
}

/* The products of up to 32 rows from row r on, all stored or all packed; returns how many. */
SIMD_FN int32_t packed_rows(const gemm_tile *t, int32_t r, float *c)
{
    const int stored = r < t->n_stored;
    const int32_t end = stored ? t->n_stored : t->n_row;
    const int32_t n_row = end - r < PAIR ? end - r : PAIR;
    const int64_t stride = stored ? t->x_stride : t->packed_stride;
    const uint8_t *x = stored ? t->x + r * stride : t->packed + (r - t->n_stored) * stride;
    const tile_job j = {.a = (const float *)(const void *)x,
                        .a_stride = stride / 4,
                        .b = (const float *)(const void *)t->w[0],
                        .b_stride = PAIR,
                        .b_next = TILE,
                        .n_step = t->n / STEP_ELEM,
                        .c = c,
                        .c_stride = PAIR,
                        .c_next = TILE};
    if (n_row > TILE) {
        tile_product(&j, 2, 2);
    } else {
        tile_product(&j, 1, 2);
    }
    return n_row;
}

SIMD_FN void put_rows(const gemm_tile *t, int32_t r, int32_t n_row, const float *c)
{
    for (int32_t i = 0; i < n_row; i++, c += PAIR) {
        float *y = t->y + (r + i) * t->y_stride;
        put_row(y, c, t->n_out, t->first);
        if (t->n_out > TILE) {
            put_row(y + TILE, c + TILE, t->n_out - TILE, t->first);
        }
    }
}

/* Results leave while the tiles work on the next rows: what a tile just stored is slow to read. */
static void dot_packed(const gemm_tile *t)
{
    _Alignas(64) float c[2][PAIR * PAIR];
    int32_t k = 0;
    int32_t before = 0;
    int32_t n_before = packed_rows(t, 0, c[k]);
    for (int32_t r = n_before; r < t->n_row; r += n_before) {
        k ^= 1;
        const int32_t n = packed_rows(t, r, c[k]);
        put_rows(t, before, n_before, c[k ^ 1]);
        before = r;
        n_before = n;
    }
    put_rows(t, before, n_before, c[k]);
}

/* Vectors take half as many outputs as tiles. */
static void dot_f32_wide(const gemm_tile *t)
{
    gemm_tile half = *t;
    half.n_out = t->n_out < NR ? t->n_out : NR;
    dot_f32(&half);
    if (t->n_out > NR) {
        half.n_out = t->n_out - NR;
        half.y = t->y + NR;
        memcpy(half.w, t->w + NR, NR * sizeof *t->w);
        dot_f32(&half);
    }
}

static const gemm_isa g_isa = {
    .n_out = TILE,
    .block_f32 = 1024,
    .block_bf16 = 1024,
    .panel_out = 128,
    .panel_row = 128,
    .tile_row = PAIR,
    .dot_f32 = dot_f32_wide,
    .dot_bf16 = dot_stored,
    .few = FEW,
    .packed_out = PAIR,
    .packed_size = 2,
    .packed_step = STEP_ELEM,
    .pack_x = pack_x,
    .pack_w = pack_w,
    .dot_packed = dot_packed,
    .x_stored = x_stored,
    .begin = begin,
    .end = tile_end,
    .codes = &gemm_codes_vbmi,
    .codes_row = FEW,
    .dot_codes = dot_codes,
};

static void gemm_simd(const gemm_args *a, dev_queue *q)
{
    gemm_run(&g_isa, a, q);
}

static size_t gemm_scratch_simd(const gemm_args *a, const dev_queue *q)
{
    return gemm_scratch_run(&g_isa, a, q);
}

void GEMM_X86_AMX(gemm_apply)(kern_table *t)
{
    t->gemm = gemm_simd;
    t->gemm_scratch = gemm_scratch_simd;
}
