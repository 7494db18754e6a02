/* x86/index_score.c - indexer scores: rows into panels, pages into chunks of keys, tasks over threads.
 *
 * A task is up to ROWS rows of one request times a range of columns. It packs the rows once, then
 * unpacks each chunk of keys once and runs all its rows over it, so that prefill and decode share one
 * scorer and a key's conversion is paid once per task. Columns at and past a row's bound are filled and
 * cost no products.
 */
#include "kern/x86/index_score.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/pool.h"
#include "num/kvfmt.h"
#include "shard/shard.h"

enum {
    ROWS = 8,
    RANGE = 16 * SCORE_CHUNK, /* columns of a task */
    DIM = KVS_INDEX_DIM
};

typedef struct score_count {
    uint64_t n_bad, n_key;
    uint8_t pad[48]; /* a cache line each */
} score_count;

typedef struct score_job {
    const score_isa *isa;
    const index_score_args *a;
    int32_t block, n_cell;
    int64_t n_range;
    size_t panel_cells;
    score_count *count; /* [n_worker]   */
    int32_t *begin;     /* [n_row + 1] first row of each block of rows */
    uint8_t *work;      /* worker_bytes each */
} score_job;

/* A worker's memory. */
typedef struct score_work {
    float *panel; /* [ROWS][panel_cells]                  */
    float *w;     /* [ROWS][SCORE_MAX_HEAD]               */
    float *q;     /* [block-rounded heads][n_cell] one row before it is transposed */
    float *key;   /* [SCORE_CHUNK][n_cell]                */
    float *sum;   /* [SCORE_CHUNK][lanes]                 */
    float *scale; /* [SCORE_CHUNK]                        */
} score_work;

static int32_t cells_of(const score_isa *isa, const index_score_args *a)
{
    return a->fmt == KVS_INDEX_F32 ? DIM : isa->fp8_cells;
}

/* Heads rounded up to whole blocks. */
static int32_t padded_heads(const score_isa *isa, int32_t n_head)
{
    const int32_t block = isa->block(n_head);
    return (n_head + block - 1) / block * block;
}

static size_t worker_floats(const score_isa *isa, const index_score_args *a)
{
    const size_t n_cell = (size_t)cells_of(isa, a);
    const size_t panel = (size_t)padded_heads(isa, a->n_head) * n_cell;
    return (ROWS + 1) * panel + (size_t)ROWS * SCORE_MAX_HEAD +
           SCORE_CHUNK * (n_cell + (size_t)isa->lanes + 1);
}

static size_t worker_bytes(const score_isa *isa, const index_score_args *a)
{
    return (worker_floats(isa, a) * sizeof(float) + 63) & ~(size_t)63;
}

static size_t begin_bytes(const index_score_args *a)
{
    return ((size_t)(a->n_row + 1) * sizeof(int32_t) + 63) & ~(size_t)63;
}

static size_t worker_count(const dev_queue *q)
{
    return q != NULL && q->n_worker > 1 ? (size_t)q->n_worker : 1;
}

size_t index_score_scratch_run(const score_isa *isa, const index_score_args *a, const dev_queue *q)
{
    return worker_count(q) * (sizeof(score_count) + worker_bytes(isa, a)) + begin_bytes(a);
}

static score_work work_of(const score_job *j, int i_worker)
{
    const size_t n_cell = (size_t)j->n_cell;
    float *p = (float *)(void *)(j->work + (size_t)i_worker * worker_bytes(j->isa, j->a));
    score_work w;
    w.panel = p;
    w.q = w.panel + ROWS * j->panel_cells;
    w.key = w.q + j->panel_cells;
    w.sum = w.key + SCORE_CHUNK * n_cell;
    w.w = w.sum + SCORE_CHUNK * (size_t)j->isa->lanes;
    w.scale = w.w + (size_t)ROWS * SCORE_MAX_HEAD;
    return w;
}

/* Query and weights of one row into panel i. */
static void pack_row(const score_job *j, const score_work *w, int64_t row, int64_t i)
{
    const index_score_args *a = j->a;
    const size_t n_cell = (size_t)j->n_cell;
    const size_t used = (size_t)a->n_head * n_cell;
    const int64_t at = row * a->n_head * DIM;
    memset(w->q + used, 0, (j->panel_cells - used) * sizeof(float));
    if (a->fmt == KVS_INDEX_F32) {
        memcpy(w->q, (const float *)a->q + at, used * sizeof(float));
    } else {
        j->isa->unpack((const uint8_t *)a->q + at, a->n_head, w->q);
    }
    float *panel = w->panel + (size_t)i * j->panel_cells;
    for (int32_t h = 0; h < a->n_head; h += j->block) {
        const size_t skip = (size_t)h * n_cell;
        j->isa->transpose(w->q + skip, j->block, j->n_cell, panel + skip, j->block);
    }
    float *weight = w->w + i * SCORE_MAX_HEAD;
    const float factor = a->fmt == KVS_INDEX_F32 ? 1.0f : j->isa->w_factor;
    for (int32_t h = 0; h < SCORE_MAX_HEAD; h++) {
        weight[h] = h < a->n_head ? a->w[row * a->n_head + h] * factor : 0.0f;
    }
}

/* Unpacks local indices [l, l + n), l at the start of a page; bit p of the result: page p is bad. */
static uint32_t unpack_chunk(const score_job *j, const score_work *w, const int32_t *table,
                             int64_t l, int64_t n)
{
    const index_score_args *a = j->a;
    uint32_t bad = 0;
    for (int64_t at = 0; at < n; at += KVS_PAGE_TOKENS) {
        const int64_t i_page = (l + at) / KVS_PAGE_TOKENS;
        const int64_t page = table != NULL && i_page < a->table_width ? table[i_page] : -1;
        if (page < 0 || page >= a->n_page) {
            bad |= 1u << (at / KVS_PAGE_TOKENS);
            continue;
        }
        const int64_t m = n - at < KVS_PAGE_TOKENS ? n - at : KVS_PAGE_TOKENS;
        const uint8_t *p = a->keys + page * a->page_stride;
        float *key = w->key + at * j->n_cell;
        if (a->fmt == KVS_INDEX_F32) {
            memcpy(key, p, (size_t)m * DIM * sizeof(float));
        } else {
            j->isa->unpack(p, m, key);
            memcpy(w->scale + at, p + INDEX_SCALE_AT, (size_t)m * sizeof(float));
        }
    }
    return bad;
}

/* Scores of n keys of the chunk for one row. */
static void score_chunk(const score_job *j, const score_work *w, int64_t i, int64_t n, uint32_t bad,
                        float *out, score_count *count)
{
    const index_score_args *a = j->a;
    const score_panel p = {.cell = w->panel + (size_t)i * j->panel_cells,
                           .w = w->w + i * SCORE_MAX_HEAD,
                           .n_head = a->n_head,
                           .n_cell = j->n_cell,
                           .block = j->block};
    j->isa->sums(&p, w->key, a->fmt, (int32_t)n, w->sum);
    j->isa->finish(w->sum, w->scale, (int32_t)n, out);
    int64_t n_bad = 0;
    for (int64_t at = 0; bad >> (at / KVS_PAGE_TOKENS) != 0 && at < n; at += KVS_PAGE_TOKENS) {
        if (bad >> (at / KVS_PAGE_TOKENS) & 1) {
            const int64_t end = at + KVS_PAGE_TOKENS < n ? at + KVS_PAGE_TOKENS : n;
            for (int64_t c = at; c < end; c++) {
                out[c] = -INFINITY;
            }
            n_bad += end - at;
        }
    }
    count->n_bad += (uint64_t)n_bad;
    count->n_key += (uint64_t)(n - n_bad);
}

/* The columns of [begin, end) that a row may score end here. */
static int64_t row_end(const index_score_args *a, int64_t row, int64_t begin, int64_t end)
{
    const int64_t len = a->kv_len[row];
    return len < begin ? begin : len < end ? len : end;
}

static void score_task(void *ctx, int64_t i_task, int i_worker)
{
    const score_job *j = ctx;
    const index_score_args *a = j->a;
    const int64_t first = j->begin[i_task / j->n_range];
    const int64_t n_row = j->begin[i_task / j->n_range + 1] - first;
    const int64_t begin = a->col_begin + i_task % j->n_range * RANGE;
    const int64_t end = begin + RANGE < a->col_end ? begin + RANGE : a->col_end;
    const score_work w = work_of(j, i_worker);
    int64_t limit = begin;
    for (int64_t i = 0; i < n_row; i++) {
        const int64_t row = first + i;
        const int64_t stop = row_end(a, row, begin, end);
        float *score = a->score + row * a->score_stride - a->col_begin;
        for (int64_t c = stop; c < end; c++) {
            score[c] = -INFINITY;
        }
        if (stop > begin) {
            pack_row(j, &w, row, i);
        }
        limit = stop > limit ? stop : limit;
    }
    const int32_t req = a->row_req[first];
    const int32_t *table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
    for (int64_t c = begin; c < limit; c += SCORE_CHUNK) {
        const int64_t n = limit - c < SCORE_CHUNK ? limit - c : SCORE_CHUNK;
        const uint32_t bad = unpack_chunk(j, &w, table, c, n);
        for (int64_t i = 0; i < n_row; i++) {
            const int64_t n_own = row_end(a, first + i, c, c + n) - c;
            if (n_own > 0) {
                score_chunk(j, &w, i, n_own, bad,
                            a->score + (first + i) * a->score_stride + (c - a->col_begin),
                            &j->count[i_worker]);
            }
        }
    }
}

/* Cuts the rows into runs of one request, at most ROWS each; returns how many. */
static int64_t block_rows(const index_score_args *a, int32_t *begin)
{
    int64_t n = 0;
    for (int32_t row = 0; row < a->n_row; row++) {
        if (row == 0 || a->row_req[row] != a->row_req[row - 1] || row - begin[n - 1] == ROWS) {
            begin[n++] = row;
        }
    }
    begin[n] = a->n_row;
    return n;
}

void index_score_run(const score_isa *isa, const index_score_args *a, dev_queue *q)
{
    const int64_t n_col = (int64_t)a->col_end - a->col_begin;
    if (a->n_row <= 0 || n_col <= 0) {
        return;
    }
    const size_t n_worker = worker_count(q);
    score_job j = {.isa = isa, .a = a, .block = isa->block(a->n_head), .n_cell = cells_of(isa, a)};
    j.n_range = shard_cdiv(n_col, RANGE);
    j.panel_cells = (size_t)padded_heads(isa, a->n_head) * (size_t)j.n_cell;
    j.count = a->scratch;
    j.work = (uint8_t *)a->scratch + n_worker * sizeof *j.count;
    j.begin = (int32_t *)(void *)(j.work + n_worker * worker_bytes(isa, a));
    memset(j.count, 0, n_worker * sizeof *j.count);
    for (size_t i = 0; i < n_worker && a->fmt == KVS_INDEX_F32; i++) {
        const score_work w = work_of(&j, (int)i);
        for (int32_t c = 0; c < SCORE_CHUNK; c++) {
            w.scale[c] = 1.0f;
        }
    }
    const int64_t n_block = block_rows(a, j.begin);
    pool_run(q != NULL ? q->pool : NULL, score_task, &j, n_block * j.n_range);
    for (size_t i = 0; i < n_worker; i++) {
        if (a->n_bad_id != NULL) {
            *a->n_bad_id += j.count[i].n_bad;
        }
        if (a->n_key != NULL) {
            *a->n_key += j.count[i].n_key;
        }
    }
}
