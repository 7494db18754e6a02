/* kern/x86/attn_x86.c - attention over the shard: who computes which block, and in which order results
 * are merged. The arithmetic is in the instruction sets' kernels (attn_x86.h).
 *
 * Two ways of sharing the work, the same bits:
 *   - whole blocks: a worker takes a block through all its lanes and segments, folding as it goes, in a
 *     handful of nodes of its own;
 *   - pieces, when whole blocks would leave workers idle: (block, lane, segment) items are computed in
 *     parallel into nodes, a window of them at a time, then folded, blocks and vectors in parallel.
 * Both build the same tree of merges (attn_fold.h).
 *
 * Scratch: a state per worker and a fixed number of nodes. Nothing depends on lengths or row counts.
 */
#include "kern/x86/attn_x86.h"

#include <math.h>
#include <string.h>

#include "base/pool.h"
#include "kern/x86/attn_fold.h"
#include "kern/x86/attn_keys.h"

enum {
    LANES_MAX = 16, /* widest vector                              */
    FOLD_NODES = 5, /* of one fold: attn_fold.h                   */
    WINDOW_MIN = 32,
    WINDOW_PER_WORKER = 4, /* items computed before they are folded      */
    GUESS_WORKERS = 8      /* see whole_blocks_do                        */
};

typedef struct worker {
    attn_work w;
    key_walk walk;
    fold f;
    int32_t packed; /* row0 of the block whose queries are packed, -1: none */
} worker;

/* A block of the second way. */
typedef struct plan_block {
    key_block b;
    int64_t n_key[KVS_LANES]; /* attended keys of each lane, in the order of key_lane */
    bool plain;
} plan_block;

typedef struct plan_item {
    const plan_block *block;
    int32_t i_lane;
    int64_t i_segment;
    int32_t node;
} plan_item;

/* What a window does to one block: merges, then perhaps the output. */
typedef struct plan_fold {
    const plan_block *block;
    int32_t op0, n_op;
    int32_t root; /* node to emit, -1: the block goes on */
} plan_fold;

typedef struct run {
    const attn_args *a;
    const attn_isa *isa;
    int32_t n_worker, n_node, n_window;
    worker *workers; /* [n_worker] */
    int64_t *load;   /* [n_worker] */
    float *nodes;    /* [n_node] of node_cells */
    size_t node_cells;
    plan_block *blocks;  /* [n_window] */
    plan_item *items;    /* [n_window] */
    plan_fold *folds;    /* [n_window + 1]: a block begins, then the window turns out full */
    fold_op *ops;        /* [n_window + FOLD_NODES]: a merge ends a node */
    int32_t *free_nodes; /* [n_node] */
    int32_t n_block, n_item, n_fold;
} run;

/* ---- scratch --------------------------------------------------------------------------------- */

/* Hands out 64-byte aligned pieces behind `base`; with base NULL it only counts. */
typedef struct carve {
    uint8_t *base;
    size_t at;
} carve;

static void *carve_take(carve *c, size_t bytes)
{
    void *p = c->base != NULL ? c->base + c->at : NULL;
    c->at += (bytes + 63) / 64 * 64;
    return p;
}

static size_t size_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* The largest block of this head count, in columns of whole vectors. */
static size_t padded_cols(const attn_args *a)
{
    const int32_t n_row = a->n_head < ATTN_COLS ? ATTN_COLS / a->n_head : 1;
    return ((size_t)n_row * (size_t)a->n_head + LANES_MAX - 1) / LANES_MAX * LANES_MAX;
}

static void worker_lay(attn_work *w, size_t cols, carve *c)
{
    const size_t f32_tile = (size_t)ATTN_TILE * ATTN_F32_STRIDE;
    const size_t bf16_keys = (size_t)ATTN_TILE * ATTN_BF16_STRIDE;
    const size_t bf16_tile = bf16_keys + (size_t)ATTN_TILE / 2 * ATTN_PAIR_STRIDE;
    const size_t scores = (size_t)ATTN_CHUNK * ATTN_TILE * LANES_MAX;
    attn_work lay = {.q = carve_take(c, cols * ATTN_MAX_STEP * sizeof(float)),
                     .scale = carve_take(c, cols * sizeof(float)),
                     .m = carve_take(c, cols * sizeof(float)),
                     .l = carve_take(c, cols * sizeof(float)),
                     .k = carve_take(c, size_max(f32_tile, bf16_tile) * sizeof(float)),
                     .s = carve_take(c, scores * sizeof(float)),
                     .p = carve_take(c, scores * sizeof(float))};
    if (c->base != NULL) {
        *w = lay;
    }
}

static void run_lay(run *r, const attn_args *a, int32_t n_worker, carve *c)
{
    const size_t n = (size_t)n_worker;
    const size_t cols = padded_cols(a);
    r->a = a;
    r->n_worker = n_worker;
    r->node_cells = cols * (KVS_LATENT_DIM + 1);
    r->n_window =
        n_worker * WINDOW_PER_WORKER > WINDOW_MIN ? n_worker * WINDOW_PER_WORKER : WINDOW_MIN;
    if (n_worker == 1) {
        r->n_window = 0;
    }
    r->n_node = n_worker * FOLD_NODES;
    r->n_node = r->n_window + FOLD_NODES > r->n_node ? r->n_window + FOLD_NODES : r->n_node;
    const size_t window = (size_t)r->n_window;
    r->workers = carve_take(c, n * sizeof(worker));
    r->load = carve_take(c, n * sizeof *r->load);
    r->blocks = carve_take(c, window * sizeof *r->blocks);
    r->items = carve_take(c, window * sizeof *r->items);
    r->folds = carve_take(c, (window + 1) * sizeof *r->folds);
    r->ops = carve_take(c, (window + FOLD_NODES) * sizeof *r->ops);
    r->free_nodes = carve_take(c, (size_t)r->n_node * sizeof *r->free_nodes);
    for (size_t i = 0; i < n; i++) {
        worker_lay(c->base != NULL ? &r->workers[i].w : NULL, cols, c);
    }
    r->nodes = carve_take(c, (size_t)r->n_node * r->node_cells * sizeof(float));
}

size_t attn_x86_scratch(const attn_args *a, const dev_queue *q)
{
    run r;
    carve c = {.base = NULL, .at = 0};
    run_lay(&r, a, q->n_worker > 0 ? q->n_worker : 1, &c);
    return c.at;
}

static float *node_at(const run *r, int32_t i)
{
    return r->nodes + (size_t)i * r->node_cells;
}

/* ---- one segment ----------------------------------------------------------------------------- */

static void worker_begin_block(worker *wk, const attn_isa *isa, key_block b)
{
    attn_work *w = &wk->w;
    if (wk->packed == b.row0) {
        return;
    }
    wk->packed = b.row0;
    w->row0 = b.row0;
    w->n_row = b.n_row;
    w->n_col = b.n_row * w->a->n_head;
    w->n_vec = (w->n_col + isa->lanes - 1) / isa->lanes;
    isa->pack_q(w);
}

/* Keys of the tile that row i of the block attends. */
static int32_t row_keys(const attn_work *w, const key_tile *t, int32_t lane, int32_t i)
{
    const int64_t bound = key_bound(w->a, lane, w->row0 + i);
    int32_t n = t->n;
    while (n > 0 && t->key[n - 1] >= bound) {
        n--;
    }
    return n;
}

/* A tile that some rows do not attend in full. Each row gets the tile cut to its own keys, the longest
 * first, since cutting destroys: what it computes is what it would compute alone. */
static void tile_by_rows(attn_work *w, const attn_isa *isa, const key_tile *t)
{
    const int32_t lane = key_lane(w->a->n_lane, t->i_lane);
    const int32_t n_head = w->a->n_head;
    int32_t keys[ATTN_COLS];
    for (int32_t i = 0; i < w->n_row; i++) {
        keys[i] = row_keys(w, t, lane, i);
        w->stats.n_key += (uint64_t)keys[i];
    }
    for (int32_t n = t->n; n > 0;) {
        int32_t next = 0;
        if (n < t->n) {
            isa->cut_tile(w, n);
        }
        for (int32_t i = 0; i < w->n_row; i++) {
            if (keys[i] < n) {
                next = keys[i] > next ? keys[i] : next;
                continue;
            }
            if (keys[i] > n) {
                continue;
            }
            const int32_t from = i;
            while (i + 1 < w->n_row && keys[i + 1] == n) {
                i++;
            }
            isa->apply(w, n, from * n_head, (i + 1) * n_head);
        }
        n = next;
    }
}

static int32_t lines_of_row(int32_t fmt)
{
    static const int32_t lines[] = {[KVS_KV_F32] = 36, [KVS_KV_BF16] = 18, [KVS_KV_FP8] = 9};
    return fmt == KVS_KV_FP8_DS_MLA ? 11 : lines[fmt];
}

/* All lines of the next tile by the time that n keys of this one are done. */
static void prefetch_set(attn_work *w, const attn_isa *isa, const key_tile *next, int32_t n)
{
    const int32_t n_line = lines_of_row(w->a->fmt);
    w->next = (attn_prefetch){.row = next->row,
                              .n_row = next->n,
                              .n_line = n_line,
                              .rate = next->n * n_line * ATTN_PREFETCH_LINE /
                                      isa->n_product(n, w->n_vec)};
}

/* The current segment of the walk into `node`; the walk stands behind it then. */
static void segment_run(worker *wk, const attn_isa *isa, float *node)
{
    attn_work *w = &wk->w;
    const int32_t i_lane = key_walk_tile(&wk->walk)->i_lane;
    w->node = node;
    w->first = 1;
    for (int32_t i = 0; i < w->n_vec * isa->lanes; i++) {
        w->m[i] = -INFINITY;
        w->l[i] = 0.0f;
    }
    for (int32_t i = 0; i < ATTN_SEGMENT / ATTN_TILE; i++) {
        const key_tile *t = key_walk_tile(&wk->walk);
        const key_tile *next = key_walk_next(&wk->walk);
        if (t->n == 0 || t->i_lane != i_lane) {
            break;
        }
        prefetch_set(w, isa, next, t->n);
        isa->load_tile(w, t->row, t->n);
        w->stats.n_fetched += (uint64_t)t->n;
        if (t->whole) {
            isa->apply(w, t->n, 0, w->n_col);
            w->stats.n_key += (uint64_t)t->n * (uint64_t)w->n_row;
        } else {
            tile_by_rows(w, isa, t);
        }
        w->first = 0;
        key_walk_step(&wk->walk);
    }
    isa->finish(w);
}

/* ---- whole blocks ---------------------------------------------------------------------------- */

static void emit_nothing(const attn_args *a, key_block b)
{
    for (int32_t i = b.row0; i < b.row0 + b.n_row; i++) {
        for (int32_t h = 0; h < a->n_head; h++) {
            float *out = a->out + i * a->out_stride_row + h * a->out_stride_head;
            memset(out, 0, KVS_LATENT_DIM * sizeof *out);
            a->lse[(int64_t)i * a->n_head + h] = -INFINITY;
        }
    }
}

/* Performs what the fold asks for at once. */
static void fold_do(const run *r, const attn_work *w, const fold_ops *ops)
{
    for (int32_t i = 0; i < ops->n; i++) {
        r->isa->merge(node_at(r, ops->op[i].a), node_at(r, ops->op[i].b), w->n_vec, 0, w->n_vec);
    }
}

static void block_task(void *ctx, int64_t i_task, int i_worker)
{
    run *r = ctx;
    const attn_args *a = r->a;
    if (!key_block_starts(a, (int32_t)i_task)) {
        return;
    }
    worker *wk = &r->workers[i_worker];
    const key_block b = key_block_at(a, (int32_t)i_task);
    key_walk_block(&wk->walk, a, b, &wk->w.stats.n_bad_id);
    if (key_walk_tile(&wk->walk)->n == 0) {
        emit_nothing(a, b);
        return;
    }
    worker_begin_block(wk, r->isa, b);
    fold *f = &wk->f;
    fold_ops ops;
    fold_begin(f, a->n_lane);
    for (;;) {
        const key_tile *t = key_walk_tile(&wk->walk);
        const int32_t i_lane = t->n > 0 ? t->i_lane : a->n_lane;
        while (f->n_lane_done < i_lane) {
            fold_lane_end(f, &ops);
            fold_do(r, &wk->w, &ops);
        }
        if (t->n == 0) {
            break;
        }
        const int32_t node = fold_take(f);
        segment_run(wk, r->isa, node_at(r, node));
        fold_segment(f, node, &ops);
        fold_do(r, &wk->w, &ops);
    }
    const int32_t root = fold_end(f);
    r->isa->emit(a, b.row0, b.n_row, node_at(r, root), 0, wk->w.n_vec);
    fold_give(f, root);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Counts the attended keys of a block; writes the output of one that has none. */
static void plan_task(void *ctx, int64_t i_task, int i_worker)
{
    run *r = ctx;
    const attn_args *a = r->a;
    worker *wk = &r->workers[i_worker];
    plan_block *p = &r->blocks[i_task];
    int64_t n_all = 0;
    p->plain = a->slots == NULL && key_block_is_plain(a, p->b);
    for (int32_t i = 0; i < a->n_lane; i++) {
        key_stream s = key_stream_open(a, p->b, key_lane(a->n_lane, i), &wk->w.stats.n_bad_id);
        key_tile *t = &wk->walk.tile[0];
        p->n_key[i] = p->plain ? s.n : 0;
        if (!p->plain) {
            for (key_stream_next(&s, t); t->n > 0; key_stream_next(&s, t)) {
                p->n_key[i] += t->n;
            }
        }
        n_all += p->n_key[i];
    }
    if (n_all == 0) {
        emit_nothing(a, p->b);
    }
}

static void item_task(void *ctx, int64_t i_task, int i_worker)
{
    run *r = ctx;
    const plan_item *item = &r->items[i_task];
    worker *wk = &r->workers[i_worker];
    worker_begin_block(wk, r->isa, item->block->b);
    key_walk_segment(&wk->walk, r->a, item->block->b, item->i_lane, item->i_segment,
                     item->block->plain);
    segment_run(wk, r->isa, node_at(r, item->node));
}

/* The merges of one block, and its output, for one vector. */
static void fold_task(void *ctx, int64_t i_task, int i_worker)
{
    (void)i_worker;
    const run *r = ctx;
    const int32_t vec_max = ATTN_COLS / r->isa->lanes;
    const plan_fold *p = &r->folds[i_task / vec_max];
    const key_block b = p->block->b;
    const int32_t n_vec = (b.n_row * r->a->n_head + r->isa->lanes - 1) / r->isa->lanes;
    const int32_t v = (int32_t)(i_task % vec_max);
    if (v >= n_vec) {
        return;
    }
    for (int32_t i = p->op0; i < p->op0 + p->n_op; i++) {
        r->isa->merge(node_at(r, r->ops[i].a), node_at(r, r->ops[i].b), n_vec, v, v + 1);
    }
    if (p->root != FOLD_NONE) {
        r->isa->emit(r->a, b.row0, b.n_row, node_at(r, p->root), v, v + 1);
    }
}

static void window_run(run *r, fold *f, dev_queue *q)
{
    pool_run(q->pool, item_task, r, r->n_item);
    pool_run(q->pool, fold_task, r, (int64_t)r->n_fold * (ATTN_COLS / r->isa->lanes));
    fold_reclaim(f, r->n_node);
    r->n_item = 0;
    r->n_fold = 0;
}

static void fold_begin_block(run *r, const plan_block *block)
{
    const plan_fold *last = r->n_fold > 0 ? &r->folds[r->n_fold - 1] : NULL;
    r->folds[r->n_fold++] = (plan_fold){.block = block,
                                        .op0 = last != NULL ? last->op0 + last->n_op : 0,
                                        .n_op = 0,
                                        .root = FOLD_NONE};
}

static void fold_keep(run *r, const fold_ops *ops)
{
    plan_fold *p = &r->folds[r->n_fold - 1];
    for (int32_t i = 0; i < ops->n; i++) {
        r->ops[p->op0 + p->n_op++] = ops->op[i];
    }
}

/* Cuts a block into items and writes down the merges; runs the window whenever it is full. */
static void block_items(run *r, fold *f, const plan_block *block, dev_queue *q)
{
    const attn_args *a = r->a;
    fold_ops ops;
    fold_begin(f, a->n_lane);
    fold_begin_block(r, block);
    for (int32_t i = 0; i < a->n_lane; i++) {
        const int64_t n_segment = shard_n_segment(block->n_key[i]);
        for (int64_t s = 0; s < n_segment; s++) {
            if (r->n_item == r->n_window) {
                window_run(r, f, q);
                fold_begin_block(r, block);
            }
            const int32_t node = fold_take(f);
            r->items[r->n_item++] =
                (plan_item){.block = block, .i_lane = i, .i_segment = s, .node = node};
            fold_segment(f, node, &ops);
            fold_keep(r, &ops);
        }
        fold_lane_end(f, &ops);
        fold_keep(r, &ops);
    }
    r->folds[r->n_fold - 1].root = fold_end(f);
}

static bool has_keys(const plan_block *p, int32_t n_lane)
{
    int64_t n = 0;
    for (int32_t i = 0; i < n_lane; i++) {
        n += p->n_key[i];
    }
    return n > 0;
}

static void run_pieces(run *r, dev_queue *q)
{
    const attn_args *a = r->a;
    fold f = {.free = r->free_nodes, .keep = true};
    fold_begin(&f, a->n_lane);
    fold_reclaim(&f, r->n_node);
    int32_t row = 0;
    while (row < a->n_row) {
        int32_t n = 0;
        for (; row < a->n_row && n < r->n_window; n++) {
            r->blocks[n].b = key_block_at(a, row);
            row += r->blocks[n].b.n_row;
        }
        pool_run(q->pool, plan_task, r, n);
        for (int32_t i = 0; i < n; i++) {
            if (has_keys(&r->blocks[i], a->n_lane)) {
                block_items(r, &f, &r->blocks[i], q);
            }
        }
        window_run(r, &f, q);
    }
}

/* ---- the op ---------------------------------------------------------------------------------- */

/* Whether handing out whole blocks in order keeps the workers busy nine tenths of the time, going by
 * guesses of their keys. Not asked for when blocks are so many that only a giant among them matters. */
static bool whole_blocks_do(const run *r)
{
    const attn_args *a = r->a;
    if (r->n_worker == 1) {
        return true;
    }
    int64_t total = 0;
    int64_t most = 0;
    int32_t n_block = 0;
    for (int32_t row = 0; row < a->n_row; n_block++) {
        const key_block b = key_block_at(a, row);
        const int64_t n = key_block_guess(a, b);
        total += n;
        most = n > most ? n : most;
        row += b.n_row;
    }
    if (most * GUESS_WORKERS * r->n_worker <= total) {
        return true;
    }
    if (n_block > GUESS_WORKERS * r->n_worker) {
        return false;
    }
    memset(r->load, 0, (size_t)r->n_worker * sizeof *r->load);
    int64_t last = 0;
    for (int32_t row = 0; row < a->n_row;) {
        const key_block b = key_block_at(a, row);
        int32_t idle = 0;
        for (int32_t i = 1; i < r->n_worker; i++) {
            idle = r->load[i] < r->load[idle] ? i : idle;
        }
        r->load[idle] += key_block_guess(a, b);
        last = r->load[idle] > last ? r->load[idle] : last;
        row += b.n_row;
    }
    return last * r->n_worker * 9 <= total * 10;
}

static void run_begin(run *r)
{
    for (int32_t i = 0; i < r->n_worker; i++) {
        worker *wk = &r->workers[i];
        wk->w.a = r->a;
        wk->w.stats = (attn_stats){0};
        wk->w.n_pair = ATTN_TILE / 2;
        wk->packed = -1;
        /* bf16 cells need scores and P apart, and values apart from keys; floats lie in place */
        wk->w.v = r->isa->bf16 ? wk->w.k + ATTN_TILE * ATTN_BF16_STRIDE : wk->w.k;
        wk->w.p = r->isa->bf16 ? wk->w.p : wk->w.s;
        wk->f = (fold){.free = r->free_nodes + i * FOLD_NODES, .n_free = FOLD_NODES};
    }
    for (int32_t i = 0; i < r->n_node; i++) {
        r->free_nodes[i] = i;
    }
}

void attn_x86_run(const attn_kernels *k, const attn_args *a, dev_queue *q)
{
    if (a->n_row <= 0) {
        return;
    }
    if (a->out_type == KVS_DTYPE_BF16) {
        dev_queue_fail(q, KVS_UNSUPPORTED, "attn: only kernels for CUDA write bf16; set out_type to f32");
        return;
    }
    run r = {0};
    carve c = {.base = a->scratch, .at = 0};
    const bool f32 = a->fmt == KVS_KV_F32 || a->q_type == KVS_DTYPE_F32;
    r.isa = f32 ? k->f32 : k->other;
    if (a->scratch == NULL || a->scratch_bytes < attn_x86_scratch(a, q)) {
        dev_queue_fail(q, KVS_INVALID, "attn: the scratch is smaller than attn_scratch asks for");
        return;
    }
    run_lay(&r, a, q->n_worker > 0 ? q->n_worker : 1, &c);
    run_begin(&r);
    if (whole_blocks_do(&r)) {
        pool_run(q->pool, block_task, &r, a->n_row);
    } else {
        run_pieces(&r, q);
    }
    for (int32_t i = 0; i < r.n_worker && a->stats != NULL; i++) {
        const attn_stats *s = &r.workers[i].w.stats;
        a->stats->n_key += s->n_key;
        a->stats->n_fetched += s->n_fetched;
        a->stats->n_bad_id += s->n_bad_id;
        a->stats->n_nan += s->n_nan;
    }
}

/* ---- variants -------------------------------------------------------------------------------- */

static void attn_avx2(const attn_args *a, dev_queue *q)
{
    const attn_kernels k = {.f32 = &attn_isa_avx2, .other = &attn_isa_avx2};
    attn_x86_run(&k, a, q);
}

void attn_apply_avx2(kern_table *t)
{
    t->attn = attn_avx2;
    t->attn_scratch = attn_x86_scratch;
}

static void attn_avx512(const attn_args *a, dev_queue *q)
{
    const attn_kernels k = {.f32 = &attn_isa_avx512, .other = &attn_isa_avx512};
    attn_x86_run(&k, a, q);
}

void attn_apply_avx512(kern_table *t)
{
    t->attn = attn_avx512;
    t->attn_scratch = attn_x86_scratch;
}

static void attn_avx512bf16(const attn_args *a, dev_queue *q)
{
    const attn_kernels k = {.f32 = &attn_isa_avx512, .other = &attn_isa_avx512bf16};
    attn_x86_run(&k, a, q);
}

void attn_apply_avx512bf16(kern_table *t)
{
    t->attn = attn_avx512bf16;
    t->attn_scratch = attn_x86_scratch;
}

static void attn_amx(const attn_args *a, dev_queue *q)
{
    const attn_kernels k = {.f32 = &attn_isa_avx512, .other = &attn_isa_amx};
    attn_x86_run(&k, a, q);
}

void attn_apply_amx(kern_table *t)
{
    t->attn = attn_amx;
    t->attn_scratch = attn_x86_scratch;
}
