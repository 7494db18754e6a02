/* x86/gemm.c - products with a weight matrix: tasks, blocks and panels around the tiles of a
 * gemm_isa.
 *
 * A task is a range of rows of x times a part of the outputs of one product. It walks n_in in
 * blocks; in a block it takes the rows in groups that stay in the cache and runs the tiles of its
 * outputs over each. FP8 weights are dequantised tile by tile; with several groups of rows they are
 * kept in a panel, so that a task dequantises a weight once. Few rows of bf16 are multiplied as
 * stored, more of them from panels in the form that the instruction set multiplies fastest. How the
 * work is cut follows the size and the number of workers; the bits of an output do not
 * (gemm_x86.h).
 */
#include "kern/x86/gemm_x86.h"

#include "base/pool.h"
#include "shard/shard.h"

enum {
    CODES_AHEAD = 512, /* bytes between the codes read and the codes fetched */
    PAD = 64,          /* bytes behind a panel's row: rows fall into different sets of a cache */
    TASKS_PER_WORKER = 16,
    TASK_BYTES = 32 * 1024,  /* of weights, at least            */
    X_IN_CACHE = 256 * 1024, /* bytes of x that tiles read again and again */
    ALONE_COST = 128 * 1024, /* below: the calling thread alone */
};

/* What a worker owns: first [group_row] packed rows of x, then what the offsets say. In bytes. */
typedef struct gemm_work {
    uint8_t *at;
    size_t w;          /* [panel_out] rows, packed or of bf16; one tile where rows are few */
    size_t codes;      /* [outputs of a tile] rows of bf16, on the way to packed ones      */
    size_t tables;     /* of one row of scales                                         */
    size_t bytes;      /* of all                                                       */
    int64_t stride;    /* of a row of x and w                                          */
    int64_t stride_c;  /* of codes                                                     */
    int64_t scale_row; /* whose tables are there; -1: none                             */
} gemm_work;

/* Outputs [out, out + n_out) along [k0, k0 + n). */
typedef struct gemm_span {
    int32_t out, n_out, k0, n;
} gemm_span;

typedef struct gemm_job {
    const gemm_isa *isa;
    const gemm_args *a;
    int32_t size_w, size_x; /* bytes of an element                     */
    int32_t block;          /* elements of n_in                        */
    int32_t packed;         /* bf16 operands go through panels         */
    int32_t in_panel;       /* the tiles read w from a panel           */
    int32_t tile_out;       /* outputs of a tile                       */
    /* a tile goes along all of n_in before the next one, so that memory is read in long runs;
       else the outputs of a task share a block of x */
    int32_t end_to_end;
    int32_t n_group; /* groups of rows, of group_row each */
    int32_t group_row;
    int32_t n_range, range_row; /* rows of a task    */
    int32_t n_part, part_out;   /* outputs of a task */
    gemm_work work;
} gemm_job;

/* One task. */
typedef struct gemm_part {
    const uint8_t *x, *w;
    float *y;
    int32_t row, row_end, out, out_end;
} gemm_part;

static int32_t min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t round_up(int64_t x, int32_t unit)
{
    return (int32_t)(shard_cdiv(x, unit) * unit);
}

static size_t worker_count(const dev_queue *q)
{
    return q != NULL && q->n_worker > 1 ? (size_t)q->n_worker : 1;
}

static int32_t block_of(const gemm_isa *isa, const gemm_mat *w)
{
    return w->type == GEMM_F32 ? isa->block_f32 : isa->block_bf16;
}

static int is_packed(const gemm_isa *isa, const gemm_args *a)
{
    return isa->few > 0 && a->n_row > isa->few && a->w.type != GEMM_F32;
}

static int32_t tile_out_of(const gemm_isa *isa, const gemm_args *a)
{
    return is_packed(isa, a) ? isa->packed_out : isa->n_out;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Blocks of 128 columns of the whole tensor that w has a part of. */
static int64_t scale_count(const gemm_mat *w)
{
    return ((int64_t)w->col0 + w->n_in - 1) / GEMM_BLOCK - w->col0 / GEMM_BLOCK + 1;
}

static gemm_work work_of(const gemm_isa *isa, const gemm_args *a)
{
    const int packed = is_packed(isa, a);
    const int is_fp8 = a->w.type == GEMM_FP8;
    const int32_t n = min32(block_of(isa, &a->w), round_up(a->w.n_in, PAD));
    const int64_t slots = a->n_row > isa->panel_row ? isa->panel_out : tile_out_of(isa, a);
    const int64_t rows = packed ? round_up(min32(a->n_row, isa->panel_row), isa->tile_row) : 0;
    gemm_work k = {.stride = (int64_t)n * (packed ? isa->packed_size : 2) + PAD,
                   .stride_c = (int64_t)n * 2 + PAD,
                   .scale_row = -1};
    k.w = (size_t)(rows * k.stride);
    k.codes = k.w + (packed || is_fp8 ? (size_t)(slots * k.stride) : 0);
    k.tables = k.codes + (packed && is_fp8 ? (size_t)(isa->packed_out * k.stride_c) : 0);
    k.bytes = k.tables + (is_fp8 ? (size_t)scale_count(&a->w) * isa->codes->table_bytes : 0);
    return k;
}

size_t gemm_scratch_run(const gemm_isa *isa, const gemm_args *a, const dev_queue *q)
{
    return worker_count(q) * work_of(isa, a).bytes;
}

/* ---- panels ---------------------------------------------------------------------------------- */

/* The tables of one row of scales, made once while outputs stay under it. */
static void tables_for(const gemm_job *j, gemm_work *k, int64_t scale_row)
{
    const gemm_mat *w = &j->a->w;
    if (k->scale_row != scale_row) {
        j->isa->codes->tables(w->scale + scale_row * w->scale_stride + w->col0 / GEMM_BLOCK,
                              (int32_t)scale_count(w), k->at + k->tables);
        k->scale_row = scale_row;
    }
}

static void dequant_span(const gemm_job *j, gemm_work *k, const gemm_part *p, gemm_span s,
                         uint8_t *to, int64_t stride)
{
    const gemm_mat *w = &j->a->w;
    const int64_t next_tile = j->tile_out * w->stride - w->n_in;
    for (int32_t o = s.out; o < s.out + s.n_out;) {
        const int64_t o_whole = (int64_t)w->row0 + o;
        const int32_t same = (int32_t)(GEMM_BLOCK - o_whole % GEMM_BLOCK);
        gemm_strip strip = {.stride = w->stride, .n_row = min32(same, s.out + s.n_out - o)};
        strip.to_stride = stride / 2;
        tables_for(j, k, o_whole / GEMM_BLOCK);
        for (int32_t i = 0; i < s.n; i += strip.n) {
            const int64_t col = (int64_t)w->col0 + s.k0 + i;
            const int64_t i_table = col / GEMM_BLOCK - w->col0 / GEMM_BLOCK;
            strip.n = min32((int32_t)(GEMM_BLOCK - col % GEMM_BLOCK), s.n - i);
            strip.code = p->w + o * w->stride + s.k0 + i;
            strip.table = k->at + k->tables + (size_t)i_table * j->isa->codes->table_bytes;
            strip.to = (uint16_t *)(void *)(to + (o - s.out) * stride) + i;
            strip.ahead = CODES_AHEAD;
            if (s.k0 + i + CODES_AHEAD >= w->n_in) {
                strip.ahead += next_tile;
            }
            j->isa->codes->dequant(&strip);
        }
        o += strip.n_row;
    }
}

/* Rows of w along one block, in the form the tiles read. */
static void panel_fill(const gemm_job *j, gemm_work *k, const gemm_part *p, gemm_span s,
                       uint8_t *to)
{
    const gemm_mat *w = &j->a->w;
    const int is_fp8 = w->type == GEMM_FP8;
    uint8_t *codes = k->at + k->codes;
    if (is_fp8) {
        dequant_span(j, k, p, s, j->packed ? codes : to, j->packed ? k->stride_c : k->stride);
    }
    if (j->packed) {
        const uint8_t *from = is_fp8 ? codes : p->w + (s.out * w->stride + s.k0) * j->size_w;
        j->isa->pack_w(from, is_fp8 ? k->stride_c : w->stride * j->size_w, s.n_out, s.n, to,
                       k->stride);
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* Whether the codes of a tile can be multiplied as they are stored. */
static int codes_fit(const gemm_job *j, gemm_span s)
{
    const gemm_mat *w = &j->a->w;
    const int64_t o = (int64_t)w->row0 + s.out;
    return w->type == GEMM_FP8 && j->a->n_row <= j->isa->codes_row && w->col0 % GEMM_BLOCK == 0 &&
           s.n % (GEMM_BLOCK / 2) == 0 && o / GEMM_BLOCK == (o + s.n_out - 1) / GEMM_BLOCK;
}

/* Rows [row, row + n_row) times one tile of outputs. t->x is set. */
static void run_tile(const gemm_job *j, gemm_work *k, const gemm_part *p, gemm_tile *t, int32_t row,
                     gemm_span s)
{
    const gemm_args *a = j->a;
    const int64_t row_bytes = a->w.stride * j->size_w;
    const int many = p->row_end - p->row > j->group_row; /* groups share the panel */
    int64_t stride = row_bytes;
    const uint8_t *w = p->w + s.out * row_bytes + (int64_t)s.k0 * j->size_w;
    t->n_out = s.n_out;
    t->first = s.k0 == 0;
    t->streams = !j->in_panel && row == p->row;
    const int by_codes = codes_fit(j, s);
    if (j->in_panel && !by_codes) {
        uint8_t *slot = k->at + k->w + (many ? s.out - p->out : 0) * k->stride;
        if (row == p->row) {
            panel_fill(j, k, p, s, slot);
        }
        w = slot;
        stride = k->stride;
    } else {
        t->turn = (int64_t)(a->w.n_in - s.k0) * j->size_w - GEMM_AHEAD;
        t->jump = j->tile_out * row_bytes - (int64_t)a->w.n_in * j->size_w + GEMM_AHEAD;
    }
    for (int32_t i = 0; i < min32(j->tile_out, GEMM_TILE_OUT); i++) {
        t->w[i] = w + min32(i, s.n_out - 1) * stride;
    }
    t->w_stride = stride;
    t->y = p->y + row * a->y_stride + s.out;
    if (by_codes) {
        tables_for(j, k, ((int64_t)a->w.row0 + s.out) / GEMM_BLOCK);
        j->isa->dot_codes(t, k->at + k->tables +
                                 (size_t)(s.k0 / GEMM_BLOCK) * j->isa->codes->table_bytes);
    } else if (j->packed) {
        j->isa->dot_packed(t);
    } else if (a->w.type == GEMM_F32) {
        j->isa->dot_f32(t);
    } else {
        j->isa->dot_bf16(t);
    }
}

/* Rows [row, row + n_row) times outputs [out, out_end) along one block. */
static void run_group(const gemm_job *j, gemm_work *k, const gemm_part *p, int32_t row, gemm_span s)
{
    const gemm_args *a = j->a;
    gemm_tile t = {.n_row = min32(j->group_row, p->row_end - row), .y_stride = a->y_stride};
    t.n = s.n;
    t.x = p->x + (row * a->x_stride + s.k0) * j->size_x;
    t.x_stride = a->x_stride * j->size_x;
    const gemm_isa *isa = j->isa;
    if (j->packed) {
        t.n = round_up(s.n, isa->packed_step);
        t.n_stored = isa->x_stored != NULL ? isa->x_stored(t.x_stride, t.n_row, s.n) : 0;
        t.packed = k->at;
        t.packed_stride = k->stride;
        isa->pack_x(t.x + t.n_stored * t.x_stride, t.x_stride, t.n_row - t.n_stored, s.n, k->at,
                    k->stride);
        if (t.n_stored == 0) {
            t.x = t.packed;
            t.x_stride = t.packed_stride;
        }
    }
    for (int32_t o = s.out; o < s.out + s.n_out; o += j->tile_out) {
        const int32_t n_out = min32(j->tile_out, s.out + s.n_out - o);
        run_tile(j, k, p, &t, row, (gemm_span){o, n_out, s.k0, s.n});
    }
}

/* Along n_in, all groups of rows over the outputs of the span in each block. */
static void run_span(const gemm_job *j, gemm_work *k, const gemm_part *p, int32_t out,
                     int32_t n_out)
{
    for (int32_t k0 = 0; k0 < j->a->w.n_in; k0 += j->block) {
        const gemm_span s = {out, n_out, k0, min32(j->block, j->a->w.n_in - k0)};
        for (int32_t row = p->row; row < p->row_end; row += j->group_row) {
            run_group(j, k, p, row, s);
        }
    }
}

static void gemm_task(void *ctx, int64_t i_task, int i_worker)
{
    const gemm_job *j = ctx;
    const gemm_args *a = j->a;
    const int64_t part = i_task % j->n_part;
    const int64_t range = i_task / j->n_part % j->n_range;
    const int64_t b = i_task / j->n_part / j->n_range;
    gemm_work k = j->work;
    if (k.bytes > 0) {
        k.at = (uint8_t *)a->scratch + (size_t)i_worker * k.bytes;
    }
    gemm_part p = {
        .x = (const uint8_t *)a->x + b * a->x_batch * j->size_x,
        .w = (const uint8_t *)a->w.data + b * a->w_batch * j->size_w,
        .y = a->y + b * a->y_batch,
        .row = (int32_t)(range * j->range_row),
        .out = (int32_t)(part * j->part_out),
    };
    p.row_end = min32(p.row + j->range_row, a->n_row);
    p.out_end = min32(p.out + j->part_out, a->w.n_out);
    const int32_t step = j->end_to_end ? j->tile_out : j->part_out;
    const int tiles = j->isa->begin != NULL && a->w.type != GEMM_F32;
    if (tiles) {
        j->isa->begin(j->packed);
    }
    for (int32_t o = p.out; o < p.out_end; o += step) {
        run_span(j, &k, &p, o, min32(step, p.out_end - o));
    }
    if (tiles) {
        j->isa->end();
    }
}

/* Cuts the product into tasks. */
static void plan(gemm_job *j, int64_t n_worker)
{
    const gemm_args *a = j->a;
    const gemm_isa *isa = j->isa;
    j->n_group = (int32_t)shard_cdiv(a->n_row, isa->panel_row);
    j->group_row = round_up(shard_cdiv(a->n_row, j->n_group), isa->tile_row);
    j->n_range = 1;
    j->range_row = a->n_row;
    const int64_t n_task = n_worker * TASKS_PER_WORKER;
    if (j->n_group == 1) {
        const int64_t row_bytes = (int64_t)a->w.n_in * j->size_w;
        const int64_t least = shard_cdiv(TASK_BYTES, row_bytes);
        const int64_t share = shard_cdiv((int64_t)a->w.n_out * a->n_batch, n_task);
        const int64_t part = share > least ? share : least;
        j->part_out = round_up(part < a->w.n_out ? part : a->w.n_out, j->tile_out);
    } else {
        j->part_out = isa->panel_out;
        const int64_t n_part = shard_cdiv(a->w.n_out, j->part_out) * a->n_batch;
        const int64_t want = shard_cdiv(n_task, n_part);
        j->n_range = (int32_t)(want < j->n_group ? want : j->n_group);
        j->range_row = (int32_t)shard_cdiv(j->n_group, j->n_range) * j->group_row;
        j->n_range = (int32_t)shard_cdiv(a->n_row, j->range_row);
    }
    j->n_part = (int32_t)shard_cdiv(a->w.n_out, j->part_out);
}

void gemm_run(const gemm_isa *isa, const gemm_args *a, dev_queue *q)
{
    if (a->n_row <= 0 || a->w.n_out <= 0 || a->n_batch <= 0) {
        return;
    }
    gemm_job j = {.isa = isa, .a = a, .block = block_of(isa, &a->w), .work = work_of(isa, a)};
    j.size_w = a->w.type == GEMM_F32 ? 4 : a->w.type == GEMM_BF16 ? 2 : 1;
    j.size_x = a->w.type == GEMM_F32 ? 4 : 2;
    j.packed = is_packed(isa, a);
    j.in_panel = j.packed || a->w.type == GEMM_FP8;
    j.tile_out = tile_out_of(isa, a);
    plan(&j, (int64_t)worker_count(q));
    j.end_to_end =
        j.n_group == 1 && !j.packed && (int64_t)a->n_row * a->w.n_in * j.size_x <= X_IN_CACHE;
    const int64_t n_weight = (int64_t)a->n_batch * a->w.n_out * a->w.n_in;
    const int alone = n_weight * (j.size_w + a->n_row / 4) < ALONE_COST;
    pool_run(q != NULL && !alone ? q->pool : NULL, gemm_task, &j,
             (int64_t)a->n_batch * j.n_range * j.n_part);
}
