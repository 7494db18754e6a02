/* bench_cuda_dense.c - dense attention over one rank's shard through block tables, on a CUDA device.
 *
 * A set has batch sequences of len tokens, of which rank 0 of dcp stores its share, on pages that lie anywhere
 * in a pool of all sets; queries, outputs and scratch are one. Rows of the pool repeat a template of normal
 * values, from which the check takes the keys.
 *
 * Work: 2 (576 + 512) operations per head and key attended. Bytes: each key of a sequence once; queries,
 * outputs and LSE. */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/case_attn.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM, PAGE = KVS_PAGE_TOKENS };

typedef struct dense_bench {
    attn_args a;    /* of set 0, pointers of the device */
    int64_t pages;  /* of a sequence */
    int32_t *table; /* [n_set, batch, pages] on the host */
    int32_t *len;   /* [n_row] */
    int64_t n_key;  /* of a set */
    uint8_t *rows;  /* [CUDA_ATTN_ROWS] of the cache */
    uint16_t *q;    /* [CUDA_ATTN_Q] */
} dense_bench;

static void launch(cuda_case *c, int32_t set)
{
    const dense_bench *s = c->state;
    attn_args a = s->a;
    a.table += (int64_t)set * c->p.batch * s->pages;
    a.stats = NULL;
    c->b->kern.attn(&a, &c->b->queue);
}

/* ---- building -------------------------------------------------------------------------------- */

static kvs_status put_new(cuda_case *c, const void *from, size_t bytes, const void **to,
                          kvs_error *err)
{
    void *p = NULL;
    TRY(cuda_case_alloc(c, bytes, &p, err));
    dev_cuda.put(p, from, bytes);
    *to = p;
    return KVS_OK;
}

static kvs_status make_tables(cuda_case *c, dense_bench *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const shard_geom geom = {.n = c->p.dcp, .i = 1};
    const int64_t n_page = c->n_set * c->p.batch * s->pages;
    const size_t rows = (size_t)a->n_row * sizeof(int32_t);
    s->table = mem_alloc((size_t)n_page * sizeof *s->table, 0);
    s->len = mem_alloc(rows, 0);
    int32_t *req = mem_alloc(rows, 0);
    kvs_status st = KVS_OK;
    if (s->table == NULL || s->len == NULL || req == NULL) {
        st = err_set(err, KVS_NOMEM, "no memory for the tables of a case");
    }
    for (int32_t row = 0; row < a->n_row && st == KVS_OK; row++) {
        req[row] = row / c->p.q;
        s->len[row] = (int32_t)shard_local_bound(geom, c->p.len, c->p.q, row % c->p.q);
        s->n_key += s->len[row];
    }
    const void *p = NULL;
    if (st == KVS_OK) {
        gen_permutation(&c->r, s->table, (int32_t)n_page);
        st = put_new(c, s->table, (size_t)n_page * sizeof *s->table, &p, err);
        a->table = p;
    }
    if (st == KVS_OK) {
        st = put_new(c, s->len, rows, &p, err);
        a->kv_len = p;
    }
    if (st == KVS_OK) {
        st = put_new(c, req, rows, &p, err);
        a->row_req = p;
    }
    mem_free(req);
    a->n_slot = n_page * PAGE;
    a->table_stride = s->pages;
    a->table_width = (int32_t)s->pages;
    a->n_req = c->p.batch;
    a->interleave = 1;
    return st;
}

static kvs_status make_rest(cuda_case *c, dense_bench *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const size_t heads = (size_t)a->n_row * (size_t)a->n_head;
    TRY(cuda_attn_rows(c, a, NULL, &s->rows, err));
    TRY(cuda_attn_ends(c, a, 1, &s->q, err));
    c->flop = 2.0 * (DIM + VDIM) * a->n_head * (double)s->n_key;
    const shard_geom geom = {.n = c->p.dcp, .i = 1};
    c->byte = (double)a->row_stride * c->p.batch * (double)shard_len(geom, c->p.len) +
              (double)heads * (DIM * 2.0 + VDIM * (double)cuda_attn_out_size(a) + 4.0);
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* A row as a problem of its own: its keys packed, one head's queries and results at a time. */
typedef struct row_work {
    attn_args one;
    orc_keys keys;
    orc_pool pool;
    double *work;
    uint8_t *used;
    uint16_t q[DIM];
    float out[VDIM], lse;
} row_work;

static int row_alloc(row_work *w, size_t n, size_t row_bytes)
{
    w->one.kv = mem_alloc(n * row_bytes, 0);
    w->keys.slot = mem_alloc_array(n, sizeof *w->keys.slot, 0);
    w->keys.seg = mem_alloc_array(n, sizeof *w->keys.seg, 0);
    w->pool.value = mem_alloc_array(n, DIM * sizeof *w->pool.value, 0);
    w->pool.norm = mem_alloc_array(n, sizeof *w->pool.norm, 0);
    w->pool.vnorm2 = mem_alloc_array(n, sizeof *w->pool.vnorm2, 0);
    w->work = mem_alloc_array(n, sizeof *w->work, 0);
    w->used = mem_alloc(n, 0);
    return w->one.kv != NULL && w->keys.slot != NULL && w->keys.seg != NULL &&
           w->pool.value != NULL && w->pool.norm != NULL && w->pool.vnorm2 != NULL &&
           w->work != NULL && w->used != NULL;
}

static void row_free(row_work *w)
{
    void *block[] = {(void *)w->one.kv, w->keys.slot,   w->keys.seg, w->pool.value,
                     w->pool.norm,      w->pool.vnorm2, w->work,     w->used};
    for (size_t i = 0; i < sizeof block / sizeof *block; i++) {
        mem_free(block[i]);
    }
}

static void row_keys(const cuda_case *c, int32_t row, row_work *w)
{
    const dense_bench *s = c->state;
    const int64_t bytes = s->a.row_stride;
    const int32_t *table = s->table + row / c->p.q * s->pages;
    for (int64_t i = 0; i < s->len[row]; i++) {
        const int64_t slot = (int64_t)table[i / PAGE] * PAGE + i % PAGE;
        memcpy((uint8_t *)w->one.kv + i * bytes, s->rows + slot % CUDA_ATTN_ROWS * bytes,
               (size_t)bytes);
        w->keys.slot[i] = (int32_t)i;
        w->keys.seg[i] = (int32_t)(i / ATTN_SEGMENT);
    }
    w->keys.n = s->len[row];
    memset(w->used, 1, (size_t)s->len[row]);
    orc_pool_fill(&w->one, w->used, &w->pool);
}

static kvs_status compare_row(const cuda_case *c, int32_t row, check_result *r, kvs_error *err)
{
    const dense_bench *s = c->state;
    const attn_args *a = &s->a;
    const check_variant v = cuda_case_variant(c);
    row_work w;
    memset(&w, 0, sizeof w);
    w.one = *a;
    const int have = row_alloc(&w, (size_t)s->len[row], (size_t)a->row_stride);
    if (have) {
        w.one.n_slot = s->len[row];
        w.one.n_row = w.one.n_head = 1;
        w.one.q = w.q;
        w.one.out = w.out;
        w.one.lse = &w.lse;
        row_keys(c, row, &w);
    }
    const int32_t heads[2] = {a->n_head / 3, a->n_head - 1};
    for (int i = 0; have && i < 2; i++) {
        const int64_t at = (int64_t)row * a->n_head + heads[i];
        dev_cuda.get(w.q, (const uint16_t *)a->q + at * DIM, sizeof w.q);
        dev_cuda.get(w.out, a->out + at * VDIM, sizeof w.out);
        dev_cuda.get(&w.lse, a->lse + at, sizeof w.lse);
        orc_attn o;
        orc_attn_head(&w.one, &w.pool, &w.keys, 0, 0, w.work, &o);
        attn_compare_head(&w.one, &o, 0, 0, 1, &v, r);
    }
    row_free(&w);
    return have ? KVS_OK : err_set(err, KVS_NOMEM, "no memory to check a row");
}

static kvs_status check(cuda_case *c, check_result *r, kvs_error *err)
{
    const dense_bench *s = c->state;
    const int32_t rows[2] = {s->a.n_row - 1, s->a.n_row / 2};
    const int32_t n = s->a.n_row > 1 && c->p.len <= 32768 ? 2 : 1;
    return cuda_attn_check(c, &s->a, s->n_key, rows, n, compare_row, r, err);
}

static void free_dense(cuda_case *c)
{
    dense_bench *s = c->state;
    mem_free(s->table);
    mem_free(s->len);
    mem_free(s->rows);
    mem_free(s->q);
}

kvs_status cuda_setup_dense(cuda_case *c, kvs_error *err)
{
    dense_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    c->state = s;
    c->free_state = free_dense;
    c->launch = launch;
    c->check = check;
    c->kv = kv_fmt_name(c->p.kv);
    snprintf(c->label, sizeof c->label, "%dx%d h%d dense%s", (int)c->p.batch, (int)c->p.q,
             (int)c->p.heads, c->p.dcp > 1 ? " shard" : "");
    attn_args *a = &s->a;
    const shard_geom geom = {.n = c->p.dcp, .i = 1};
    a->fmt = c->p.kv;
    a->k_scale = 0.015f;
    a->n_head = c->p.heads;
    a->n_row = c->p.batch * c->p.q;
    a->n_lane = shard_n_lane(geom);
    a->out_type = cuda_attn_out(&c->p);
    a->row_stride = orc_row_bytes(a->fmt);
    a->page_stride = a->row_stride * PAGE;
    s->pages = shard_cdiv(shard_len(geom, c->p.len), PAGE);
    c->n_set = cuda_case_sets(c, (double)(c->p.batch * s->pages) * (double)a->page_stride);
    TRY(make_tables(c, s, err));
    return make_rest(c, s, err);
}
