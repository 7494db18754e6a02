/* x86/index_score.c - indexer scores: rows into panels, pages into chunks of keys, tasks over threads.
 *
 * A task is some rows of one request times a range of columns. It packs the rows once, then unpacks each
 * chunk of keys once and runs all its rows over it, so that prefill and decode share one scorer and a key's
 * conversion is paid once per task. Rows of few heads share panels of ROWS rows, and a task takes several
 * panels where that leaves tasks enough for all workers. Columns at and past a row's bound are filled and
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
    ROWS = SCORE_ROWS,
    MAX_PANEL = 8,                 /* shared by the rows of a task */
    RANGE = 16 * SCORE_CHUNK,      /* columns of a task, at most   */
    LEAST_RANGE = 4 * SCORE_CHUNK, /* for the sake of more tasks   */
    TASKS = 2,                     /* of a worker, at least        */
    DIM = KVS_INDEX_DIM,
    SUMS = SCORE_CHUNK * 16 /* 16 lanes at most; as many as SCORE_PART * ROWS * 8 */
};

_Static_assert(SCORE_PART *ROWS * 8 <= SUMS, "the sums of rows that share a panel fit");

typedef struct score_count {
    uint64_t n_bad, n_key;
    uint8_t pad[48]; /* a cache line each */
} score_count;

typedef struct score_job {
    const score_isa *isa;
    const index_score_args *a;
    int32_t block, n_cell;
    int32_t row_lanes;      /* 4 or 8: rows share panels; 0: each has its own */
    int64_t n_range, range; /* ranges of so many columns */
    int64_t n_block;        /* of rows                   */
    size_t panel_cells;
    score_count *count; /* [n_worker]   */
    int32_t *begin;     /* [n_row + 1] first row of each block of rows */
    uint8_t *work;      /* worker_bytes each */
} score_job;

/* A worker's memory. */
typedef struct score_work {
    float *panel; /* [n_panel][panel_cells]               */
    float *w;     /* [n_panel][SCORE_MAX_HEAD]            */
    float *q;     /* [block-rounded heads][n_cell] one panel before it is transposed */
    float *key;   /* [SCORE_CHUNK][n_cell]                */
    float *sum;   /* [SCORE_CHUNK][lanes], or products of a shared panel */
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

/* Lanes of a row where rows share a panel, 0 where they do not: a matter of n_head alone. */
static int32_t row_lanes_of(int32_t n_head)
{
    return n_head <= 4 ? 4 : n_head <= 8 ? 8 : 0;
}

/* Cells of a panel: the query of one row, or of ROWS rows that share it. */
static size_t panel_cells_of(const score_isa *isa, const index_score_args *a)
{
    const int32_t lanes = row_lanes_of(a->n_head);
    return (size_t)padded_heads(isa, lanes != 0 ? ROWS * lanes : a->n_head) *
           (size_t)cells_of(isa, a);
}

/* The most panels that a task may have. */
static int32_t n_panel(const index_score_args *a)
{
    const int32_t n = (a->n_row + ROWS - 1) / ROWS;
    return row_lanes_of(a->n_head) == 0 ? ROWS : n < MAX_PANEL ? n : MAX_PANEL;
}

static size_t worker_floats(const score_isa *isa, const index_score_args *a)
{
    const size_t n_cell = (size_t)cells_of(isa, a);
    const size_t n = (size_t)n_panel(a);
    return (n + 1) * panel_cells_of(isa, a) + n * SCORE_MAX_HEAD + SCORE_CHUNK * (n_cell + 1) +
           SUMS;
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
    w.q = w.panel + (size_t)n_panel(j->a) * j->panel_cells;
    w.key = w.q + j->panel_cells;
    w.sum = w.key + SCORE_CHUNK * n_cell;
    w.w = w.sum + SUMS;
    w.scale = w.w + (size_t)n_panel(j->a) * SCORE_MAX_HEAD;
    return w;
}

/* The query of one row as [n_head][n_cell] cells. */
static void unpack_query(const score_job *j, int64_t row, float *to)
{
    const index_score_args *a = j->a;
    const int64_t at = row * a->n_head * DIM;
    if (a->fmt == KVS_INDEX_F32) {
        memcpy(to, (const float *)a->q + at, (size_t)a->n_head * DIM * sizeof(float));
    } else {
        j->isa->unpack((const uint8_t *)a->q + at, a->n_head, to);
    }
}

static void transpose_query(const score_job *j, const float *q, int32_t n_head, int32_t block,
                            float *panel)
{
    for (int32_t h = 0; h < n_head; h += block) {
        const size_t skip = (size_t)h * (size_t)j->n_cell;
        j->isa->transpose(q + skip, block, j->n_cell, panel + skip, block);
    }
}

/* The weights of one row's heads, zero in lanes up to `lanes`. */
static void pack_weights(const score_job *j, int64_t row, float *weight, int32_t lanes)
{
    const index_score_args *a = j->a;
    const float factor = a->fmt == KVS_INDEX_F32 ? 1.0f : j->isa->w_factor;
    for (int32_t h = 0; h < lanes; h++) {
        weight[h] = h < a->n_head ? a->w[row * a->n_head + h] * factor : 0.0f;
    }
}

/* Query and weights of one row into panel i. */
static void pack_row(const score_job *j, const score_work *w, int64_t row, int64_t i)
{
    const size_t used = (size_t)j->a->n_head * (size_t)j->n_cell;
    memset(w->q + used, 0, (j->panel_cells - used) * sizeof(float));
    unpack_query(j, row, w->q);
    transpose_query(j, w->q, j->a->n_head, j->block, w->panel + (size_t)i * j->panel_cells);
    pack_weights(j, row, w->w + i * SCORE_MAX_HEAD, SCORE_MAX_HEAD);
}

/* Rows [first, first + n_row) side by side in panel i. */
static score_panel pack_rows(const score_job *j, const score_work *w, int64_t first, int64_t n_row,
                             int64_t i_panel)
{
    const int32_t used = (int32_t)n_row * j->row_lanes;
    const int32_t block = j->isa->block(used);
    float *cell = w->panel + (size_t)i_panel * j->panel_cells;
    float *weight = w->w + i_panel * SCORE_MAX_HEAD;
    const score_panel p = {.cell = cell,
                           .w = weight,
                           .n_head = j->a->n_head,
                           .n_cell = j->n_cell,
                           .block = block,
                           .row_lanes = j->row_lanes,
                           .lanes = (used + block - 1) / block * block};
    memset(w->q, 0, (size_t)p.lanes * (size_t)j->n_cell * sizeof(float));
    memset(weight, 0, (size_t)p.lanes * sizeof(float));
    for (int64_t i = 0; i < n_row; i++) {
        unpack_query(j, first + i, w->q + i * j->row_lanes * j->n_cell);
        pack_weights(j, first + i, weight + i * j->row_lanes, j->row_lanes);
    }
    transpose_query(j, w->q, p.lanes, block, cell);
    return p;
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

/* Takes back what n keys of bad pages were given, and counts. */
static void settle_chunk(int64_t n, uint32_t bad, float *out, score_count *count)
{
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

/* Scores of n keys of the chunk for one row. */
static void score_chunk(const score_job *j, const score_work *w, int64_t i, int64_t n, float *out)
{
    const score_panel p = {.cell = w->panel + (size_t)i * j->panel_cells,
                           .w = w->w + i * SCORE_MAX_HEAD,
                           .n_head = j->a->n_head,
                           .n_cell = j->n_cell,
                           .block = j->block};
    j->isa->sums(&p, w->key, j->a->fmt, (int32_t)n, w->sum);
    j->isa->finish(w->sum, w->scale, (int32_t)n, out);
}

/* The columns of [begin, end) that a row may score end here. */
static int64_t row_end(const index_score_args *a, int64_t row, int64_t begin, int64_t end)
{
    const int64_t len = a->kv_len[row];
    return len < begin ? begin : len < end ? len : end;
}

/* The rows of a task, and where their scores go. */
typedef struct score_rows {
    int64_t first, n_row;
    int64_t begin, end; /* columns */
} score_rows;

/* Row i's scores, so that column c is [c]. */
static float *scores_of(const index_score_args *a, const score_rows *t, int64_t i)
{
    return a->score + (t->first + i) * a->score_stride - a->col_begin;
}

/* Columns [c, c + n) that row i may score. */
static int64_t own_columns(const index_score_args *a, const score_rows *t, int64_t i, int64_t c,
                           int64_t n)
{
    return row_end(a, t->first + i, c, c + n) - c;
}

/* Keys [c, c + n), unpacked, for rows that share panels. */
static void score_shared(const score_job *j, const score_work *w, score_panel *panel,
                         const score_rows *t, int64_t c, int64_t n)
{
    const int64_t n_panel_used = shard_cdiv(t->n_row, ROWS);
    for (int64_t i = 0; i < n_panel_used; i++) {
        panel[i].n_key = 0;
    }
    for (int64_t i = 0; i < t->n_row; i++) {
        score_panel *p = &panel[i / ROWS];
        const int32_t n_own = (int32_t)own_columns(j->a, t, i, c, n);
        p->row[i % ROWS] = (score_dest){.to = scores_of(j->a, t, i) + c, .n = n_own};
        p->n_key = n_own > p->n_key ? n_own : p->n_key;
    }
    j->isa->rows(panel, (int32_t)n_panel_used, w->key, j->a->fmt, w->scale, w->sum);
}

/* The columns past its bound, for every row; the rows' queries into panels; returns the last column that a
 * row scores. */
static int64_t begin_rows(const score_job *j, const score_work *w, const score_rows *t)
{
    int64_t limit = t->begin;
    for (int64_t i = 0; i < t->n_row; i++) {
        const int64_t stop = row_end(j->a, t->first + i, t->begin, t->end);
        float *score = scores_of(j->a, t, i);
        for (int64_t c = stop; c < t->end; c++) {
            score[c] = -INFINITY;
        }
        if (stop > t->begin && j->row_lanes == 0) {
            pack_row(j, w, t->first + i, i);
        }
        limit = stop > limit ? stop : limit;
    }
    return limit;
}

/* The panels that the rows of a task share. */
static void pack_panels(const score_job *j, const score_work *w, const score_rows *t,
                        score_panel *panel)
{
    for (int64_t i = 0; i < t->n_row; i += ROWS) {
        const int64_t n = t->n_row - i < ROWS ? t->n_row - i : ROWS;
        panel[i / ROWS] = pack_rows(j, w, t->first + i, n, i / ROWS);
    }
}

/* Keys [c, c + n) for all rows. */
static void score_columns(const score_job *j, const score_work *w, score_panel *panel,
                          const score_rows *t, int64_t c, int64_t n, score_count *count)
{
    const index_score_args *a = j->a;
    const int32_t req = a->row_req[t->first];
    const int32_t *table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
    const uint32_t bad = unpack_chunk(j, w, table, c, n);
    if (j->row_lanes != 0) {
        score_shared(j, w, panel, t, c, n);
    }
    for (int64_t i = 0; i < t->n_row; i++) {
        const int64_t n_own = own_columns(a, t, i, c, n);
        if (n_own > 0) {
            float *out = scores_of(a, t, i) + c;
            if (j->row_lanes == 0) {
                score_chunk(j, w, i, n_own, out);
            }
            settle_chunk(n_own, bad, out, count);
        }
    }
}

static void score_task(void *ctx, int64_t i_task, int i_worker)
{
    const score_job *j = ctx;
    const index_score_args *a = j->a;
    score_rows t;
    t.first = j->begin[i_task / j->n_range];
    t.n_row = j->begin[i_task / j->n_range + 1] - t.first;
    t.begin = a->col_begin + i_task % j->n_range * j->range;
    t.end = t.begin + j->range < a->col_end ? t.begin + j->range : a->col_end;
    const score_work w = work_of(j, i_worker);
    const int64_t limit = begin_rows(j, &w, &t);
    if (limit == t.begin) {
        return;
    }
    score_panel panel[MAX_PANEL];
    if (j->row_lanes != 0) {
        pack_panels(j, &w, &t, panel);
    }
    if (j->isa->begin != NULL) {
        j->isa->begin(a->fmt);
    }
    for (int64_t c = t.begin; c < limit; c += SCORE_CHUNK) {
        const int64_t n = limit - c < SCORE_CHUNK ? limit - c : SCORE_CHUNK;
        score_columns(j, &w, panel, &t, c, n, &j->count[i_worker]);
    }
    if (j->isa->end != NULL) {
        j->isa->end(a->fmt);
    }
}

/* Cuts the rows into runs of one request, at most `most` each; returns how many. */
static int64_t block_rows(const index_score_args *a, int64_t most, int32_t *begin)
{
    int64_t n = 0;
    for (int32_t row = 0; row < a->n_row; row++) {
        if (row == 0 || a->row_req[row] != a->row_req[row - 1] || row - begin[n - 1] == most) {
            begin[n++] = row;
        }
    }
    begin[n] = a->n_row;
    return n;
}

/* Tasks as large as leaves enough of them: first the ranges become shorter, since rows are packed faster than keys
 * are unpacked, then rows have fewer panels. */
static void cut_tasks(score_job *j, int64_t n_worker)
{
    const int64_t n_col = (int64_t)j->a->col_end - j->a->col_begin;
    const int64_t want = n_worker > 1 ? TASKS * n_worker : 1;
    int64_t most = j->row_lanes != 0 ? MAX_PANEL * ROWS : ROWS;
    j->range = RANGE;
    j->n_block = block_rows(j->a, most, j->begin);
    while (j->range > LEAST_RANGE && j->n_block * shard_cdiv(n_col, j->range) < want) {
        j->range /= 2;
    }
    j->n_range = shard_cdiv(n_col, j->range);
    while (most > ROWS && j->n_block * j->n_range < want) {
        most /= 2;
        j->n_block = block_rows(j->a, most, j->begin);
    }
    /* whole pages, about equally many */
    j->range = shard_cdiv(shard_cdiv(n_col, j->n_range), KVS_PAGE_TOKENS) * KVS_PAGE_TOKENS;
    j->n_range = shard_cdiv(n_col, j->range);
}

void index_score_run(const score_isa *isa, const index_score_args *a, dev_queue *q)
{
    const int64_t n_col = (int64_t)a->col_end - a->col_begin;
    if (a->n_row <= 0 || n_col <= 0) {
        return;
    }
    const size_t n_worker = worker_count(q);
    score_job j = {.isa = isa,
                   .a = a,
                   .block = isa->block(a->n_head),
                   .n_cell = cells_of(isa, a),
                   .row_lanes = row_lanes_of(a->n_head)};
    j.panel_cells = panel_cells_of(isa, a);
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
    cut_tasks(&j, (int64_t)n_worker);
    pool_run(q != NULL ? q->pool : NULL, score_task, &j, j.n_block * j.n_range);
    for (size_t i = 0; i < n_worker; i++) {
        if (a->n_bad_id != NULL) {
            *a->n_bad_id += j.count[i].n_bad;
        }
        if (a->n_key != NULL) {
            *a->n_key += j.count[i].n_key;
        }
    }
}
