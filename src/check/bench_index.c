/* check/bench_index.c - the indexer: scores, exact top-k of given scores, and both together.
 *
 * Keys: contexts of `batch` sequences in pages that lie anywhere in the pool, as bench_attn.c
 * has them; a set is a context. Scores for topk: rows of their own, a set is as many as a call
 * takes; the patterns are what selection algorithms stumble over.
 *
 * Work of scores: 2 * 128 operations per head and key; bytes: each key of a sequence once, each
 * score once. Of topk: each score once and the list it leaves. Of both: the keys and the list. */
#include "check/bench.h"

#include <math.h>
#include <string.h>

#include "base/err.h"

enum {
    DIM = KVS_INDEX_DIM,
    PAGE = KVS_PAGE_TOKENS,
    N_TEMPLATE = 64,
    CHUNK = 8192,
    N_COL_CHECK = 64,
    MAX_HEADS = 64 /* kern/index.h */
};

typedef struct index_state {
    index_score_args a;
    topk_args t;
    uint8_t *pool;
    int32_t *table; /* [n_context, batch, pages] */
    int32_t n_context;
    int64_t pages;
    int32_t longest; /* the largest kv_len */
    int32_t *n_col;  /* [n_row] of a chunk */
    float *score;    /* topk: [n_set, n_row, stride] */
} index_state;

/* ---- keys and queries ------------------------------------------------------------------------ */

/* A few pages of random keys, again and again. */
static kvs_status fill_keys(bench_case *c, index_state *s, kvs_error *err)
{
    index_score_args *a = &s->a;
    const int64_t page = orc_index_page_bytes(a->fmt);
    a->page_stride = page;
    a->n_page = (int64_t)s->n_context * c->p.batch * s->pages;
    void *p = NULL;
    TRY(bench_alloc(c, (size_t)(a->n_page * page), &p, err));
    s->pool = p;
    a->keys = p;
    const int64_t n = a->n_page < N_TEMPLATE ? a->n_page : N_TEMPLATE;
    for (int64_t i = 0; i < n; i++) {
        uint8_t *at = s->pool + i * page;
        if (a->fmt == KVS_INDEX_F32) {
            gen_f32(&c->r, (float *)(void *)at, PAGE * DIM, 1.0f);
            continue;
        }
        gen_e4m3(&c->r, at, PAGE * DIM);
        for (int k = 0; k < PAGE; k++) {
            const float scale = ldexpf(1.0f, gen_pick(&c->r, 3) - 7);
            memcpy(at + PAGE * DIM + 4 * k, &scale, sizeof scale);
        }
    }
    for (int64_t i = n; i < a->n_page; i++) {
        memcpy(s->pool + i * page, s->pool + i % n * page, (size_t)page);
    }
    TRY(bench_alloc(c, (size_t)a->n_page * sizeof(int32_t), &p, err));
    s->table = p;
    gen_permutation(&c->r, s->table, (int32_t)a->n_page);
    a->table = s->table;
    a->table_stride = s->pages;
    a->table_width = (int32_t)s->pages;
    return KVS_OK;
}

static kvs_status make_rows(bench_case *c, index_state *s, kvs_error *err)
{
    index_score_args *a = &s->a;
    void *p = NULL;
    const size_t rows = (size_t)a->n_row;
    const int64_t n_q = (int64_t)a->n_row * a->n_head * DIM;
    TRY(bench_alloc(c, (size_t)n_q * (a->fmt == KVS_INDEX_F32 ? sizeof(float) : 1), &p, err));
    if (a->fmt == KVS_INDEX_F32) {
        gen_f32(&c->r, p, n_q, 1.0f);
    } else {
        gen_e4m3(&c->r, p, n_q);
    }
    a->q = p;
    TRY(bench_alloc(c, rows * (size_t)a->n_head * sizeof(float), &p, err));
    gen_f32(&c->r, p, (int64_t)a->n_row * a->n_head, 0.01f);
    a->w = p;
    TRY(bench_alloc(c, rows * sizeof(int32_t), &p, err));
    int32_t *req = p;
    TRY(bench_alloc(c, rows * sizeof(int32_t), &p, err));
    int32_t *len = p;
    int64_t n_pair = 0;
    for (int32_t r = 0; r < a->n_row; r++) {
        req[r] = r / c->p.q;
        len[r] = (int32_t)shard_len(c->geom, shard_bound(c->p.len, c->p.q, r % c->p.q));
        n_pair += len[r];
        s->longest = len[r] > s->longest ? len[r] : s->longest;
    }
    a->row_req = req;
    a->kv_len = len;
    a->n_req = c->p.batch;
    const double key_bytes = (double)orc_index_page_bytes(a->fmt) / PAGE;
    c->flop = 2.0 * DIM * a->n_head * (double)n_pair;
    c->byte = key_bytes * c->p.batch * (double)shard_len(c->geom, c->p.len);
    return KVS_OK;
}

/* Keys, queries and bounds; `columns` scores of a row at a time. */
static kvs_status make_scores(bench_case *c, int32_t columns, index_state **out, kvs_error *err)
{
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(index_state), &p, err));
    index_state *s = p;
    c->state = s;
    *out = s;
    c->kv = index_fmt_name(c->p.kv);
    index_score_args *a = &s->a;
    a->fmt = c->p.kv;
    a->n_head = c->p.heads;
    a->n_row = c->p.batch * c->p.q;
    const int64_t local = shard_len(c->geom, c->p.len);
    s->pages = shard_cdiv(local > 0 ? local : 1, PAGE);
    const int64_t set = c->p.batch * s->pages * orc_index_page_bytes(a->fmt);
    s->n_context = bench_n_set(c, (size_t)set);
    c->n_set = s->n_context;
    TRY(fill_keys(c, s, err));
    TRY(make_rows(c, s, err));
    a->score_stride = columns > 0 ? columns : s->longest;
    a->col_end = (int32_t)a->score_stride;
    TRY(bench_alloc(c, (size_t)a->n_row * (size_t)a->score_stride * sizeof(float), &p, err));
    a->score = p;
    TRY(bench_scratch(c, c->run->kern.index_score_scratch(a, &c->run->queue), &p, &a->scratch_bytes,
                      err));
    a->scratch = p;
    return KVS_OK;
}

/* Makes the grid's format one of index keys. Returns 0 where it or the heads have no kernel. */
static int indexable(bench_case *c)
{
    const int32_t kv = c->p.kv;
    if (kv != KVS_KV_F32 && kv != KVS_KV_FP8) {
        bench_skip(c, "index keys are fp8 or f32, not %s", kv_fmt_name(kv));
        return 0;
    }
    if (c->p.heads > MAX_HEADS) {
        bench_skip(c, "%d index heads: there are at most %d", c->p.heads, MAX_HEADS);
        return 0;
    }
    c->p.kv = kv == KVS_KV_F32 ? KVS_INDEX_F32 : KVS_INDEX_FP8;
    return 1;
}

static int selects(bench_case *c)
{
    if (c->p.topk == 0) {
        bench_skip(c, "topk 0 selects nothing");
    }
    return c->p.topk > 0;
}

/* ---- index ----------------------------------------------------------------------------------- */

static kvs_status call_index(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const index_state *s = c->state;
    index_score_args a = s->a;
    a.table = s->table + (int64_t)set * a.n_req * a.table_stride;
    c->run->kern.index_score(&a, &c->run->queue);
    return KVS_OK;
}

static kvs_status check_index(bench_case *c, check_result *r, kvs_error *err)
{
    const index_state *s = c->state;
    const index_score_args *a = &s->a;
    const check_variant v = bench_variant(c);
    TRY(call_index(c, 0, err));
    const int64_t rows[2] = {0, a->n_row - 1};
    for (int i = 0; i < (a->n_row > 1 ? 2 : 1); i++) {
        const int64_t row = rows[i];
        const int32_t *table = s->table + (int64_t)a->row_req[row] * a->table_stride;
        const int64_t len = a->kv_len[row];
        for (int64_t k = 0; k < N_COL_CHECK && len > 0; k++) {
            /* the ends and some between */
            const int64_t col = k == 0   ? 0
                                : k == 1 ? len - 1
                                         : (int64_t)rng_next_below(&c->r, (uint64_t)len);
            const int64_t slot = orc_slot(table, a->table_width, a->n_page * PAGE, col);
            const orc_score o = orc_index_score(a, row, slot);
            score_compare_one(a, &o, row, col, &v, r);
        }
    }
    return KVS_OK;
}

static kvs_status setup_index(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    if (!indexable(c)) {
        return KVS_OK;
    }
    index_state *s = NULL;
    TRY(make_scores(c, 0, &s, err));
    c->byte += sizeof(float) * c->flop / (2.0 * DIM * c->p.heads); /* a score per pair */
    c->call = call_index;
    c->check = check_index;
    return KVS_OK;
}

/* ---- topk ------------------------------------------------------------------------------------ */

enum { PATTERN_RANDOM, PATTERN_EQUAL, PATTERN_RISING, PATTERN_FALLING, N_PATTERN };
static const char *const k_pattern[N_PATTERN] = {"random", "equal", "rising", "falling"};

static void fill_scores(bench_case *c, float *x, int64_t n, int32_t pattern)
{
    switch (pattern) {
    case PATTERN_RANDOM:
        gen_f32(&c->r, x, n, 1.0f);
        break;
    case PATTERN_EQUAL:
        for (int64_t i = 0; i < n; i++) {
            x[i] = 0.25f;
        }
        break;
    default:
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = pattern == PATTERN_RISING ? i : n - 1 - i;
            x[i] = (float)at * 1e-3f - 100.0f;
        }
        break;
    }
}

static kvs_status make_list(bench_case *c, index_state *s, int32_t n_row, kvs_error *err)
{
    topk_args *t = &s->t;
    void *p = NULL;
    const size_t rows = (size_t)n_row;
    const size_t list = rows * (size_t)c->p.topk * 4;
    t->n_row = n_row;
    t->k = c->p.topk;
    TRY(bench_alloc(c, list, &p, err));
    t->list_id = p;
    TRY(bench_alloc(c, list, &p, err));
    t->list_score = p;
    TRY(bench_alloc(c, rows * sizeof(int32_t), &p, err));
    t->list_count = p;
    TRY(bench_alloc(c, rows * sizeof(int32_t), &p, err));
    s->n_col = p;
    t->n_col = p;
    return KVS_OK;
}

static kvs_status scratch_topk(bench_case *c, index_state *s, kvs_error *err)
{
    void *p = NULL;
    TRY(bench_scratch(c, c->run->kern.topk_scratch(&s->t, &c->run->queue), &p, &s->t.scratch_bytes,
                      err));
    s->t.scratch = p;
    return KVS_OK;
}

static kvs_status call_topk(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const index_state *s = c->state;
    topk_args t = s->t;
    t.score = s->score + (int64_t)set * t.n_row * t.score_stride;
    memset(t.list_count, 0, (size_t)t.n_row * sizeof *t.list_count);
    c->run->kern.topk(&t, &c->run->queue);
    return KVS_OK;
}

/* The list of a row against a full sort of its scores. */
static kvs_status compare_list(bench_case *c, const topk_args *t, int64_t row, const float *score,
                               int64_t n, check_result *r, kvs_error *err)
{
    void *p = NULL;
    TRY(bench_alloc(c, (size_t)n * sizeof(orc_cand), &p, err));
    orc_cand *all = p;
    for (int64_t i = 0; i < n; i++) {
        all[i] = (orc_cand){score[i], (int32_t)i};
    }
    int64_t m = orc_select(all, n);
    m = m < t->k ? m : t->k;
    orc_sort_id(all, m);
    cmp_i64(r, (coord){"list_count", row, -1, -1}, t->list_count[row], m);
    for (int64_t i = 0; i < m; i++) {
        cmp_i64(r, (coord){"list_id", row, -1, i}, t->list_id[row * t->k + i], all[i].id);
        cmp_bits(r, (coord){"list_score", row, -1, i}, t->list_score[row * t->k + i], all[i].score);
    }
    return KVS_OK;
}

static kvs_status check_topk(bench_case *c, check_result *r, kvs_error *err)
{
    const index_state *s = c->state;
    TRY(call_topk(c, 0, err));
    return compare_list(c, &s->t, 0, s->score, s->t.n_col[0], r, err);
}

static kvs_status setup_topk(bench_case *c, int32_t i_label, kvs_error *err)
{
    if (!selects(c)) {
        return KVS_OK;
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(index_state), &p, err));
    index_state *s = p;
    c->state = s;
    const int32_t n_row = c->p.batch * c->p.q;
    TRY(make_list(c, s, n_row, err));
    topk_args *t = &s->t;
    t->score_stride = c->p.len;
    const size_t set = (size_t)n_row * (size_t)c->p.len * sizeof(float);
    c->n_set = bench_n_set(c, set);
    TRY(bench_alloc(c, (size_t)c->n_set * set, &p, err));
    s->score = p;
    const int64_t all = (int64_t)c->n_set * n_row;
    /* rows repeat after a few million scores */
    const int64_t own = all < 1 + (4 << 20) / c->p.len ? all : 1 + (4 << 20) / c->p.len;
    for (int64_t i = 0; i < all; i++) {
        if (i < own) {
            fill_scores(c, s->score + i * c->p.len, c->p.len, i_label);
        } else {
            memcpy(s->score + i * c->p.len, s->score + i % own * c->p.len,
                   (size_t)c->p.len * sizeof(float));
        }
    }
    for (int32_t i = 0; i < n_row; i++) {
        s->n_col[i] = (int32_t)c->p.len;
    }
    const double taken = (double)(c->p.topk < c->p.len ? c->p.topk : c->p.len);
    c->byte = (double)set + 8.0 * taken * n_row;
    TRY(scratch_topk(c, s, err));
    c->call = call_topk;
    c->check = check_topk;
    return KVS_OK;
}

/* ---- select ---------------------------------------------------------------------------------- */

/* As a rank selects: scores of a chunk of keys, then the running list takes them in. */
static kvs_status call_select(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const index_state *s = c->state;
    index_score_args a = s->a;
    topk_args t = s->t;
    a.table = s->table + (int64_t)set * a.n_req * a.table_stride;
    memset(t.list_count, 0, (size_t)t.n_row * sizeof *t.list_count);
    for (int32_t col = 0; col < s->longest; col += CHUNK) {
        a.col_begin = col;
        a.col_end = s->longest - col < CHUNK ? s->longest : col + CHUNK;
        c->run->kern.index_score(&a, &c->run->queue);
        for (int32_t r = 0; r < t.n_row; r++) {
            const int32_t left = a.kv_len[r] - col;
            s->n_col[r] = left < 0 ? 0 : left < CHUNK ? left : CHUNK;
        }
        t.id_base = col;
        c->run->kern.topk(&t, &c->run->queue);
    }
    return KVS_OK;
}

/* The list against a sort of the kernel's own scores of the whole row: that the pieces fit
 * together; the scores themselves against the oracle as for index. */
static kvs_status check_select(bench_case *c, check_result *r, kvs_error *err)
{
    index_state *s = c->state;
    const check_variant v = bench_variant(c);
    TRY(call_select(c, 0, err));
    index_score_args a = s->a;
    void *p = NULL;
    a.n_row = 1;
    a.col_begin = 0;
    a.col_end = a.kv_len[0];
    a.score_stride = a.col_end;
    TRY(bench_alloc(c, (size_t)a.col_end * sizeof(float), &p, err));
    a.score = p;
    c->run->kern.index_score(&a, &c->run->queue);
    for (int64_t k = 0; k < N_COL_CHECK && a.col_end > 0; k++) {
        const int64_t col = (int64_t)rng_next_below(&c->r, (uint64_t)a.col_end);
        const int64_t slot = orc_slot(s->table, a.table_width, a.n_page * PAGE, col);
        const orc_score o = orc_index_score(&a, 0, slot);
        score_compare_one(&a, &o, 0, col, &v, r);
    }
    return compare_list(c, &s->t, 0, a.score, a.col_end, r, err);
}

static kvs_status setup_select(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    if (!indexable(c) || !selects(c)) {
        return KVS_OK;
    }
    index_state *s = NULL;
    TRY(make_scores(c, CHUNK, &s, err));
    TRY(make_list(c, s, s->a.n_row, err));
    s->t.score = s->a.score;
    s->t.score_stride = CHUNK;
    c->byte += 8.0 * c->p.topk * s->a.n_row;
    TRY(scratch_topk(c, s, err));
    c->call = call_select;
    c->check = check_select;
    return KVS_OK;
}

/* ---- the ops --------------------------------------------------------------------------------- */

static const int64_t k_index_kv[] = {KVS_KV_FP8};
static const int64_t k_topk_len[] = {131072, 4096, 1048576};

#define INDEX_AXES                                                                                 \
    (KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_HEADS | KVS_BENCH_LEN | KVS_BENCH_DCP |             \
     KVS_BENCH_KV | KVS_BENCH_INTERLEAVE | KVS_BENCH_KERNELS | KVS_BENCH_POOL | KVS_BENCH_THREADS)

const bench_op bench_index_op = {
    .pub = {.name = "index",
            .about = "indexer scores of every key of a shard; kv is the format of the index keys. "
                     "Own grid: batch 4, q 1, heads 64, len 65536, fp8",
            .axes = INDEX_AXES},
    .op = KERN_OP_index_score,
    .def = {.batch = 4, .q = 1, .heads = 64, .len = 65536, .dcp = 1, .kv = KVS_KV_FP8},
    .kv = {k_index_kv, 1},
    .setup = setup_index,
};

const bench_op bench_topk_op = {
    .pub = {.name = "topk",
            .about = "exact top-k of given scores: random, all equal, rising, falling. Own grid: "
                     "batch 1, q 1, len 131072, 4096 and 1048576, topk 2048, one thread",
            .axes = KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_LEN | KVS_BENCH_TOPK |
                    KVS_BENCH_KERNELS | KVS_BENCH_POOL | KVS_BENCH_THREADS},
    .op = KERN_OP_topk,
    .def = {.batch = 1, .q = 1, .topk = 2048, .threads = 1, .kv = KVS_KV_FP8},
    .labels = k_pattern,
    .n_label = N_PATTERN,
    .len = {k_topk_len, 3},
    .setup = setup_topk,
};

const bench_op bench_select_op = {
    .pub = {.name = "select",
            .about =
                "scores and exact top-k together, in chunks as a rank selects. Own grid: batch "
                "4, q 1, heads 64, len 65536, topk 2048, fp8",
            .axes = INDEX_AXES | KVS_BENCH_TOPK},
    .op = KERN_OP_index_score,
    .def =
        {.batch = 4, .q = 1, .heads = 64, .len = 65536, .topk = 2048, .dcp = 1, .kv = KVS_KV_FP8},
    .kv = {k_index_kv, 1},
    .setup = setup_select,
};
