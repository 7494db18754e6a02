/* x86/gemm.c - products with a weight matrix: tasks, blocks and panels around the tiles of a gemm_isa.
 *
 * A task is a range of rows of x times a part of the outputs of one product. It walks n_in in blocks;
 * in a block it takes the rows in groups that stay in the cache and runs the tiles of its outputs over
 * each. FP8 weights are dequantised tile by tile; with several groups of rows they are kept in a panel,
 * so that a task dequantises a weight once. Few rows of bf16 are multiplied as stored, more of them from
 * panels of f32 where the instruction set has no product of bf16. How the work is cut follows the size
 * and the number of workers; the bits of an output do not (gemm_x86.h).
 */
#include "kern/x86/gemm_x86.h"

#include "base/pool.h"
#include "shard/shard.h"

enum {
    PAD = 64, /* bytes behind a panel's row: rows fall into different sets of a cache */
    TASKS_PER_WORKER = 8,
    TASK_BYTES = 64 * 1024,  /* of weights, at least            */
    ALONE_COST = 128 * 1024, /* below: the calling thread alone */
};

/* What a worker owns: offsets and row lengths in bytes. */
typedef struct gemm_work {
    uint8_t *at;
    size_t w;     /* [panel_out] rows of f32 or bf16; one tile where rows are few. Before it,
                         [group_row] rows of x in f32                                     */
    size_t codes; /* [n_out of a tile] rows of bf16, on the way to f32                */
    size_t bytes;
    int64_t stride;   /* of a row of x and w                                              */
    int64_t stride_c; /* of codes                                                         */
} gemm_work;

typedef struct gemm_job {
    const gemm_isa *isa;
    const gemm_args *a;
    int32_t size_w, size_x; /* bytes of an element                     */
    int32_t block;          /* elements of n_in                        */
    int32_t widened;        /* bf16 operands go through panels of f32  */
    int32_t n_group;        /* groups of rows, of group_row each       */
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

static int is_widened(const gemm_isa *isa, const gemm_args *a)
{
    return isa->few > 0 && a->n_row > isa->few && a->w.type != GEMM_F32;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static gemm_work work_of(const gemm_isa *isa, const gemm_args *a)
{
    const int widened = is_widened(isa, a);
    const int32_t n = min32(block_of(isa, &a->w), round_up(a->w.n_in, PAD));
    const int64_t slots = a->n_row > isa->panel_row ? isa->panel_out : isa->n_out;
    const int64_t rows = widened ? min32(a->n_row, isa->panel_row) : 0;
    gemm_work k = {.stride = (int64_t)n * (widened ? 4 : 2) + PAD,
                   .stride_c = (int64_t)n * 2 + PAD};
    k.w = (size_t)(rows * k.stride);
    k.codes = k.w + (widened || a->w.type == GEMM_FP8 ? (size_t)(slots * k.stride) : 0);
    k.bytes = k.codes;
    if (widened && a->w.type == GEMM_FP8) {
        k.bytes += (size_t)(isa->n_out * k.stride_c);
    }
    return k;
}

size_t gemm_scratch_run(const gemm_isa *isa, const gemm_args *a, const dev_queue *q)
{
    return worker_count(q) * work_of(isa, a).bytes;
}

/* ---- panels ---------------------------------------------------------------------------------- */

static void dequant_rows(const gemm_job *j, const gemm_part *p, int32_t out, int32_t n_out,
                         int32_t k0, int32_t n, uint8_t *to, int64_t stride)
{
    const gemm_mat *w = &j->a->w;
    for (int32_t o = out; o < out + n_out;) {
        const int64_t o_whole = (int64_t)w->row0 + o;
        const int32_t same =
            (int32_t)(GEMM_BLOCK - o_whole % GEMM_BLOCK); /* outputs to the next row of scales */
        const int32_t n_row = min32(same, out + n_out - o);
        const float *scale = w->scale + o_whole / GEMM_BLOCK * w->scale_stride;
        for (int32_t i = 0; i < n;) {
            const int64_t i_whole = (int64_t)w->col0 + k0 + i;
            const int32_t len = min32((int32_t)(GEMM_BLOCK - i_whole % GEMM_BLOCK), n - i);
            j->isa->dequant(p->w + o * w->stride + k0 + i, w->stride, n_row, len,
                            scale[i_whole / GEMM_BLOCK],
                            (uint16_t *)(void *)(to + (o - out) * stride) + i, stride / 2);
            i += len;
        }
        o += n_row;
    }
}

static void widen_rows(const gemm_job *j, const uint8_t *from, int64_t from_stride, int32_t n_row,
                       int32_t n, uint8_t *to, int64_t stride)
{
    for (int32_t r = 0; r < n_row; r++) {
        j->isa->widen(from + r * from_stride, n, (float *)(void *)(to + r * stride));
    }
}

/* n_out rows of w from `out` on, along one block, in the form the tiles read. */
static void panel_fill(const gemm_job *j, const gemm_work *k, const gemm_part *p, int32_t out,
                       int32_t n_out, int32_t k0, int32_t n, uint8_t *to)
{
    const gemm_mat *w = &j->a->w;
    const int is_fp8 = w->type == GEMM_FP8;
    if (is_fp8) {
        dequant_rows(j, p, out, n_out, k0, n, j->widened ? k->at + k->codes : to,
                     j->widened ? k->stride_c : k->stride);
    }
    if (j->widened) {
        const uint8_t *from = is_fp8 ? k->at + k->codes : p->w + (out * w->stride + k0) * j->size_w;
        widen_rows(j, from, is_fp8 ? k->stride_c : w->stride * j->size_w, n_out, n, to, k->stride);
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* Rows [row, row + n_row) times the outputs of the part along [k0, k0 + n). */
static void run_group(const gemm_job *j, const gemm_work *k, const gemm_part *p, int32_t row,
                      int32_t n_row, int32_t k0, int32_t n)
{
    const gemm_args *a = j->a;
    const gemm_isa *isa = j->isa;
    const int in_panel = j->widened || a->w.type == GEMM_FP8;
    const int many = p->row_end - p->row > j->group_row; /* groups share the panel */
    gemm_tile t = {.n_row = n_row, .n = n, .first = k0 == 0, .y_stride = a->y_stride};
    t.x = p->x + (row * a->x_stride + k0) * j->size_x;
    t.x_stride = a->x_stride * j->size_x;
    t.streams = !in_panel && row == p->row;
    if (j->widened) {
        widen_rows(j, t.x, t.x_stride, n_row, n, k->at, k->stride);
        t.x = k->at;
        t.x_stride = k->stride;
        t.n = round_up(n, isa->block_f32 / 32);
    }
    const int64_t stride = in_panel ? k->stride : a->w.stride * j->size_w;
    for (int32_t o = p->out; o < p->out_end; o += isa->n_out) {
        t.n_out = min32(isa->n_out, p->out_end - o);
        const uint8_t *w = p->w + (o * a->w.stride + k0) * j->size_w;
        if (in_panel) {
            uint8_t *slot = k->at + k->w + (many ? o - p->out : 0) * k->stride;
            if (row == p->row) {
                panel_fill(j, k, p, o, t.n_out, k0, n, slot);
            }
            w = slot;
        }
        for (int32_t i = 0; i < isa->n_out; i++) {
            t.w[i] = w + min32(i, t.n_out - 1) * stride;
        }
        t.y = p->y + row * a->y_stride + o;
        if (a->w.type == GEMM_F32 || j->widened) {
            isa->dot_f32(&t);
        } else {
            isa->dot_bf16(&t);
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
    for (int32_t k0 = 0; k0 < a->w.n_in; k0 += j->block) {
        const int32_t n = min32(j->block, a->w.n_in - k0);
        for (int32_t row = p.row; row < p.row_end; row += j->group_row) {
            run_group(j, &k, &p, row, min32(j->group_row, p.row_end - row), k0, n);
        }
    }
}

/* Cuts the product into tasks. */
static void plan(gemm_job *j, int64_t n_worker)
{
    const gemm_args *a = j->a;
    const gemm_isa *isa = j->isa;
    enum { ROWS = 3 }; /* of a tile: groups are multiples of it */
    j->n_group = (int32_t)shard_cdiv(a->n_row, isa->panel_row);
    j->group_row = round_up(shard_cdiv(a->n_row, j->n_group), ROWS);
    j->n_range = 1;
    j->range_row = a->n_row;
    const int64_t n_task = n_worker * TASKS_PER_WORKER;
    if (j->n_group == 1) {
        const int64_t row_bytes = (int64_t)a->w.n_in * j->size_w;
        const int64_t least = shard_cdiv(TASK_BYTES, row_bytes);
        const int64_t share = shard_cdiv((int64_t)a->w.n_out * a->n_batch, n_task);
        const int64_t part = share > least ? share : least;
        j->part_out = round_up(part < a->w.n_out ? part : a->w.n_out, isa->n_out);
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
    j.widened = is_widened(isa, a);
    plan(&j, (int64_t)worker_count(q));
    const int64_t n_weight = (int64_t)a->n_batch * a->w.n_out * a->w.n_in;
    const int alone = n_weight * (j.size_w + a->n_row / 4) < ALONE_COST;
    pool_run(q != NULL && !alone ? q->pool : NULL, gemm_task, &j,
             (int64_t)a->n_batch * j.n_range * j.n_part);
}
