/* bench_cuda_index.c - index scores, and scores with the exact top-k, on a CUDA device.
 *
 * batch sequences of len tokens, each with its own index keys; q rows a sequence, each of which sees one
 * token more than the one before. A set is a cache, so many as do not stay in the L2. A selection is one
 * index_select; what it is compared with are the scores that index_score gives the row, in pieces.
 *
 * Work: 2 * 128 operations per index head and key scored. Bytes: each key with its scale once per sequence,
 * queries and weights, and the scores or the lists. */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench_cuda.h"
#include "num/kvfmt.h"

enum { DIM = KVS_INDEX_DIM, PAGE = KVS_PAGE_TOKENS, N_TEMPLATE = 64, N_COL = 64, N_Q = 300007 };
enum { PIECE = 8192 };

typedef struct index_bench {
    index_score_args a;  /* of set 0, pointers of the device */
    index_select_args t; /* select only */
    int64_t set_pages;
    int32_t piece;  /* columns scored at a time */
    int32_t *len;   /* [n_row] on the host */
    uint8_t *pages; /* [N_TEMPLATE] */
} index_bench;

static index_score_args args_of(const cuda_case *c, int32_t set)
{
    const index_bench *s = c->state;
    index_score_args a = s->a;
    a.table += (int64_t)set * a.n_req * a.table_stride;
    return a;
}

static void launch_index(cuda_case *c, int32_t set)
{
    const index_score_args a = args_of(c, set);
    c->b->kern.index_score(&a, &c->b->queue);
}

static void launch_select(cuda_case *c, int32_t set)
{
    const index_bench *s = c->state;
    index_select_args t = s->t;
    t.in = args_of(c, set);
    c->b->kern.index_select(&t, &c->b->queue);
}

/* ---- building -------------------------------------------------------------------------------- */

void cuda_index_page(rng *r, uint8_t *page)
{
    gen_e4m3(r, page, (int64_t)PAGE * DIM);
    for (int64_t i = 0; i < PAGE; i++) {
        const float scale = 1.0f / (float)(64 << gen_pick(r, 3));
        memcpy(page + INDEX_SCALE_AT + 4 * i, &scale, sizeof scale);
    }
}

static kvs_status put_array(cuda_case *c, const void *src, size_t bytes, void **out, kvs_error *err)
{
    TRY(cuda_case_alloc(c, bytes, out, err));
    dev_cuda.put(*out, src, bytes);
    return KVS_OK;
}

/* Keys of all sets, their tables (pages in no order), queries and lengths. */
static kvs_status make_inputs(cuda_case *c, index_bench *s, int32_t *table, int32_t *req, float *w,
                              uint8_t *q, kvs_error *err)
{
    index_score_args *a = &s->a;
    void *p = NULL;
    const int64_t bytes = a->n_page * a->page_stride;
    for (int64_t i = 0; i < N_TEMPLATE; i++) {
        cuda_index_page(&c->r, s->pages + i * a->page_stride);
    }
    TRY(cuda_case_alloc(c, (size_t)bytes, &p, err));
    cuda_case_tile(c, p, bytes, s->pages, N_TEMPLATE * a->page_stride);
    a->keys = p;
    gen_permutation(&c->r, table, (int32_t)a->n_page);
    TRY(put_array(c, table, (size_t)a->n_page * sizeof *table, &p, err));
    a->table = p;
    for (int32_t r = 0; r < a->n_row; r++) {
        req[r] = r / c->p.q;
        s->len[r] = (int32_t)(c->p.len - c->p.q + r % c->p.q + 1);
    }
    TRY(put_array(c, req, (size_t)a->n_row * sizeof *req, &p, err));
    a->row_req = p;
    TRY(put_array(c, s->len, (size_t)a->n_row * sizeof *s->len, &p, err));
    a->kv_len = p;
    const int64_t n_w = (int64_t)a->n_row * a->n_head;
    gen_e4m3(&c->r, q, N_Q);
    gen_f32(&c->r, w, N_Q, 0.05f);
    TRY(cuda_case_alloc(c, (size_t)n_w * DIM, &p, err));
    cuda_case_tile(c, p, n_w * DIM, q, N_Q / 16 * 16);
    a->q = p;
    TRY(cuda_case_alloc(c, (size_t)n_w * sizeof(float), &p, err));
    cuda_case_tile(c, p, n_w * (int64_t)sizeof(float), w, N_Q / 4 * 16);
    a->w = p;
    return KVS_OK;
}

static kvs_status make_scores(cuda_case *c, index_bench *s, int32_t piece, kvs_error *err)
{
    index_score_args *a = &s->a;
    void *p = NULL;
    s->piece = piece;
    a->col_begin = 0;
    a->col_end = piece;
    a->score_stride = piece;
    TRY(cuda_case_alloc(c, (size_t)a->n_row * (size_t)piece * sizeof(float), &p, err));
    a->score = p;
    a->scratch_bytes = c->b->kern.index_score_scratch(a, &c->b->queue);
    return cuda_case_alloc(c, a->scratch_bytes, &a->scratch, err);
}

static kvs_status setup(cuda_case *c, int32_t piece, kvs_error *err)
{
    index_bench *s = c->state;
    index_score_args *a = &s->a;
    const int64_t width = (c->p.len + PAGE - 1) / PAGE;
    a->n_head = c->p.heads;
    a->n_row = c->p.batch * c->p.q;
    a->n_req = c->p.batch;
    a->fmt = KVS_INDEX_FP8;
    a->page_stride = INDEX_PAGE_BYTES_FP8;
    a->table_width = (int32_t)width;
    a->table_stride = width;
    s->set_pages = c->p.batch * width;
    c->n_set = cuda_case_sets(c, (double)(s->set_pages * a->page_stride));
    a->n_page = c->n_set * s->set_pages;
    s->len = mem_alloc_array((size_t)a->n_row, sizeof *s->len, 0);
    s->pages = mem_alloc((size_t)(N_TEMPLATE * a->page_stride), 0);
    int32_t *table = mem_alloc_array((size_t)a->n_page, sizeof *table, 0);
    int32_t *req = mem_alloc_array((size_t)a->n_row, sizeof *req, 0);
    float *w = mem_alloc_array(N_Q, sizeof *w, 0);
    uint8_t *q = mem_alloc(N_Q, 0);
    const int have = s->len != NULL && s->pages != NULL && table != NULL && req != NULL &&
                     w != NULL && q != NULL;
    kvs_status st = have ? make_inputs(c, s, table, req, w, q, err)
                         : err_set(err, KVS_NOMEM, "no memory for a case");
    mem_free(table);
    mem_free(req);
    mem_free(w);
    mem_free(q);
    st = st == KVS_OK ? make_scores(c, s, piece, err) : st;
    double n_pair = 0.0;
    for (int32_t r = 0; st == KVS_OK && r < a->n_row; r++) {
        n_pair += s->len[r];
    }
    c->flop = 2.0 * DIM * a->n_head * n_pair;
    c->byte = (double)c->p.batch * (double)c->p.len * (DIM + 4.0) +
              (double)a->n_row * a->n_head * (DIM + 4.0);
    return st;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* One row on the host: a page table of one page at a time, the template behind it. */
static kvs_status fetch_row(const cuda_case *c, int32_t row, uint8_t *q, float *w, int32_t *table,
                            kvs_error *err)
{
    const index_score_args *a = &((const index_bench *)c->state)->a;
    dev_cuda.get(q, (const uint8_t *)a->q + (int64_t)row * a->n_head * DIM,
                 (size_t)a->n_head * DIM);
    dev_cuda.get(w, a->w + (int64_t)row * a->n_head, (size_t)a->n_head * sizeof *w);
    dev_cuda.get(table, a->table + row / c->p.q * a->table_stride,
                 (size_t)a->table_width * sizeof *table);
    dev_queue_sync(&c->b->queue);
    return dev_queue_check(&c->b->queue, err);
}

/* Scores of a row, as the device has them from column 0 on, against the oracle at some columns. */
static kvs_status compare_scores(cuda_case *c, int32_t row, float *score, check_result *r,
                                 kvs_error *err)
{
    const index_bench *s = c->state;
    const check_variant v = cuda_case_variant(c);
    uint8_t q[64 * DIM];
    float w[64];
    int32_t *table = mem_alloc_array((size_t)s->a.table_width, sizeof *table, 0);
    if (table == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check a row");
    }
    const kvs_status st = fetch_row(c, row, q, w, table, err);
    index_score_args one = s->a;
    one.n_row = 1;
    one.q = q;
    one.w = w;
    one.keys = s->pages;
    one.score = score;
    const int32_t len = s->len[row];
    for (int32_t i = 0; st == KVS_OK && i < N_COL; i++) {
        const int32_t col = i == 0 ? 0 : i == 1 ? len - 1 : gen_pick(&c->r, len);
        const int64_t page = table[col / PAGE] % N_TEMPLATE;
        const orc_score o = orc_index_score(&one, 0, page * PAGE + col % PAGE);
        score_compare_one(&one, &o, 0, col, &v, r);
    }
    mem_free(table);
    return st;
}

static kvs_status check_index(cuda_case *c, check_result *r, kvs_error *err)
{
    const index_bench *s = c->state;
    const index_score_args *a = &s->a;
    float *score = mem_alloc_array((size_t)a->score_stride, sizeof *score, 0);
    if (score == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check a row");
    }
    dev_cuda.fill(a->score, 0xFF, (size_t)a->n_row * (size_t)a->score_stride * sizeof(float));
    launch_index(c, 0);
    dev_queue_sync(&c->b->queue);
    kvs_status st = dev_queue_check(&c->b->queue, err);
    const int32_t rows[2] = {0, a->n_row - 1};
    for (int i = 0; i < 2 && st == KVS_OK && (i == 0 || rows[1] > 0); i++) {
        dev_cuda.get(score, a->score + rows[i] * a->score_stride,
                     (size_t)a->score_stride * sizeof *score);
        st = compare_scores(c, rows[i], score, r, err);
        for (int64_t col = s->len[rows[i]]; col < a->col_end; col++) {
            cmp_bits(r, (coord){"score past the bound", rows[i], -1, col}, score[col], -INFINITY);
        }
    }
    mem_free(score);
    return st;
}

/* The list of a row is the exact selection among the scores that the kernel gives the row. */
static kvs_status compare_list(cuda_case *c, int32_t row, const float *score, check_result *r,
                               kvs_error *err)
{
    const index_bench *s = c->state;
    const index_select_args *t = &s->t;
    const int32_t len = s->len[row];
    orc_cand *want = mem_alloc_array((size_t)len, sizeof *want, 0);
    int32_t *id = mem_alloc_array((size_t)t->k, sizeof *id, 0);
    int32_t count = -1;
    if (want == NULL || id == NULL) {
        mem_free(want);
        mem_free(id);
        return err_set(err, KVS_NOMEM, "no memory to check a row");
    }
    for (int32_t i = 0; i < len; i++) {
        want[i] = (orc_cand){score[i], i};
    }
    const int64_t n = orc_select(want, len);
    const int64_t k = n < t->k ? n : t->k;
    orc_sort_id(want, k);
    dev_cuda.get(&count, t->list_count + row, sizeof count);
    dev_cuda.get(id, t->list_id + (int64_t)row * t->k, (size_t)t->k * sizeof *id);
    cmp_i64(r, (coord){"list_count", row, -1, -1}, count, k);
    for (int64_t i = 0; i < k && count == k; i++) {
        cmp_i64(r, (coord){"list_id", row, -1, i}, id[i], want[i].id);
    }
    mem_free(want);
    mem_free(id);
    return KVS_OK;
}

/* Scores of one row over all columns, one piece at a time, in the buffer of the pieces. */
static kvs_status all_scores(cuda_case *c, int32_t row, float *score, kvs_error *err)
{
    const index_bench *s = c->state;
    index_score_args a = args_of(c, 0);
    a.n_row = 1;
    a.q = (const uint8_t *)a.q + (int64_t)row * a.n_head * DIM;
    a.w += (int64_t)row * a.n_head;
    a.row_req += row;
    a.kv_len += row;
    for (int64_t col = 0; col < c->p.len; col += s->piece) {
        a.col_begin = (int32_t)col;
        a.col_end = (int32_t)(c->p.len - col < s->piece ? c->p.len : col + s->piece);
        c->b->kern.index_score(&a, &c->b->queue);
        dev_queue_sync(&c->b->queue);
        dev_cuda.get(score + col, a.score, (size_t)(a.col_end - a.col_begin) * sizeof *score);
    }
    return dev_queue_check(&c->b->queue, err);
}

static kvs_status check_select(cuda_case *c, check_result *r, kvs_error *err)
{
    const index_bench *s = c->state;
    const index_select_args *t = &s->t;
    float *score = mem_alloc_array((size_t)c->p.len, sizeof *score, 0);
    if (score == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to check a row");
    }
    const size_t list = (size_t)s->a.n_row * (size_t)t->k;
    dev_cuda.fill(t->list_id, 0xFF, list * sizeof(int32_t));
    dev_cuda.fill(t->list_score, 0xFF, list * sizeof(float));
    launch_select(c, 0);
    dev_queue_sync(&c->b->queue);
    kvs_status st = dev_queue_check(&c->b->queue, err);
    const int32_t rows[3] = {0, s->a.n_row / 2, s->a.n_row - 1};
    for (int i = 0; i < 3 && st == KVS_OK && (i == 0 || rows[i] != rows[i - 1]); i++) {
        st = all_scores(c, rows[i], score, err);
        st = st == KVS_OK ? compare_scores(c, rows[i], score, r, err) : st;
        st = st == KVS_OK ? compare_list(c, rows[i], score, r, err) : st;
    }
    mem_free(score);
    return st;
}

/* ---- the ops --------------------------------------------------------------------------------- */

static void free_index(cuda_case *c)
{
    index_bench *s = c->state;
    mem_free(s->len);
    mem_free(s->pages);
}

static kvs_status new_state(cuda_case *c, kvs_error *err)
{
    c->state = mem_calloc(1, sizeof(index_bench));
    c->free_state = free_index;
    c->kv = index_fmt_name(c->p.kv);
    snprintf(c->label, sizeof c->label, "%dx%d %dk", (int)c->p.batch, (int)c->p.q,
             (int)(c->p.len / 1024));
    return c->state != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for a case");
}

kvs_status cuda_setup_index(cuda_case *c, kvs_error *err)
{
    TRY(new_state(c, err));
    const int32_t piece = (int32_t)((c->p.len + PAGE - 1) / PAGE * PAGE);
    TRY(setup(c, piece, err));
    c->byte += 4.0 * (double)c->p.batch * c->p.q * (double)c->p.len;
    c->launch = launch_index;
    c->check = check_index;
    return KVS_OK;
}

static kvs_status make_lists(cuda_case *c, index_bench *s, kvs_error *err)
{
    index_select_args *t = &s->t;
    void *p = NULL;
    t->in = s->a;
    t->k = c->p.topk;
    t->dcp = 1;
    t->interleave = 1;
    t->rank = 0;
    const size_t n_row = (size_t)s->a.n_row;
    const size_t list = n_row * (size_t)t->k;
    TRY(cuda_case_alloc(c, list * sizeof(int32_t), &p, err));
    t->list_id = p;
    TRY(cuda_case_alloc(c, list * sizeof(float), &p, err));
    t->list_score = p;
    TRY(cuda_case_alloc(c, n_row * sizeof(int32_t), &p, err));
    t->list_count = p;
    t->scratch_bytes = c->b->kern.index_select_scratch(t, &c->b->queue);
    return cuda_case_alloc(c, t->scratch_bytes, &t->scratch, err);
}

kvs_status cuda_setup_select(cuda_case *c, kvs_error *err)
{
    TRY(new_state(c, err));
    TRY(setup(c, PIECE, err));
    TRY(make_lists(c, c->state, err));
    c->byte += 8.0 * (double)c->p.batch * c->p.q * c->p.topk;
    c->launch = launch_select;
    c->check = check_select;
    return KVS_OK;
}
