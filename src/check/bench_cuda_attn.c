/* bench_cuda_attn.c - sparse attention over one rank's shard on a CUDA device.
 *
 * The pool holds batch sequences of len tokens, of which rank 0 of dcp stores its share. Each row has topk
 * positions drawn from its whole sequence; those the rank owns are its list, lane by lane, so with dcp > 1
 * it is short, and with `invalid` that share of its entries is -1. A set is a draw, with queries and
 * outputs of its own. Rows of the pool repeat a template of normal values, from which the check takes the
 * keys.
 *
 * Work: 2 (576 + 512) operations per head and key attended. Bytes: each entry's row once; queries, outputs
 * and LSE. */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/case_attn.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM, PAGE = KVS_PAGE_TOKENS };

typedef struct attn_bench {
    attn_args a;                    /* of set 0, pointers of the device */
    size_t q_set, out_set, lse_set; /* elements from one set to the next */
    int32_t *slots;                 /* [n_set, n_row, stride] on the host */
    int32_t *count;                 /* [n_set, n_row, n_lane] */
    int64_t *n_key;                 /* [n_set] entries that are attended */
    uint32_t *sink;
    uint8_t *rows; /* [CUDA_ATTN_ROWS] of the cache */
    uint16_t *q;   /* [CUDA_ATTN_Q] */
} attn_bench;

static attn_args args_of(const cuda_case *c, int32_t set)
{
    const attn_bench *s = c->state;
    attn_args a = s->a;
    a.q = (const uint16_t *)a.q + (size_t)set * s->q_set;
    a.out = (float *)(void *)((char *)a.out + (size_t)set * s->out_set * cuda_attn_out_size(&a));
    a.lse += (size_t)set * s->lse_set;
    a.slots += (int64_t)set * a.n_row * a.slots_stride;
    a.lane_count += (int64_t)set * a.n_row * a.n_lane;
    return a;
}

static void launch(cuda_case *c, int32_t set)
{
    attn_args a = args_of(c, set);
    a.stats = NULL;
    c->b->kern.attn(&a, &c->b->queue);
}

static void fetch_only(cuda_case *c, int32_t set)
{
    const attn_bench *s = c->state;
    const attn_args a = args_of(c, set);
    roof_cuda_gather(a.kv, a.row_stride, a.slots, a.slots_stride, a.lane_count, a.n_lane, a.n_row,
                     s->sink, &c->b->queue);
}

/* ---- building -------------------------------------------------------------------------------- */

/* One row of a set; returns how many keys it attends. */
static int64_t draw_row(cuda_case *c, attn_bench *s, int32_t set, int32_t row, int32_t *pos,
                        uint8_t *mark)
{
    const attn_args *a = &s->a;
    const int64_t at = (int64_t)set * a->n_row + row;
    const shard_geom geom = {.n = c->p.dcp, .i = 1};
    const int64_t pages = shard_cdiv(shard_len(geom, c->p.len), PAGE);
    const bench_list l = {.geom = geom,
                          .n_lane = a->n_lane,
                          .bound = (int32_t)shard_bound(c->p.len, c->p.q, row % c->p.q),
                          .topk = c->p.topk,
                          .invalid = c->p.invalid,
                          .first = row / c->p.q * pages * PAGE};
    return bench_draw_list(&c->r, &l, pos, mark, s->slots + at * a->slots_stride,
                           s->count + at * a->n_lane);
}

/* Lists of all sets, on the host; then the same on the device. */
static kvs_status make_lists(cuda_case *c, attn_bench *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const size_t rows = (size_t)c->n_set * (size_t)a->n_row;
    const size_t slot_bytes = rows * (size_t)a->slots_stride * sizeof(int32_t);
    const size_t count_bytes = rows * (size_t)a->n_lane * sizeof(int32_t);
    int32_t *pos = mem_calloc((size_t)c->p.len, sizeof *pos);
    uint8_t *mark = mem_calloc((size_t)c->p.len, 1);
    s->slots = mem_alloc(slot_bytes, 0);
    s->count = mem_calloc(count_bytes, 1);
    s->n_key = mem_calloc((size_t)c->n_set, sizeof *s->n_key);
    const int have =
        pos != NULL && mark != NULL && s->slots != NULL && s->count != NULL && s->n_key != NULL;
    double mean = 0.0;
    for (int32_t set = 0; have && set < c->n_set; set++) {
        for (int32_t row = 0; row < a->n_row; row++) {
            s->n_key[set] += draw_row(c, s, set, row, pos, mark);
        }
        mean += (double)s->n_key[set] / c->n_set;
    }
    mem_free(pos);
    mem_free(mark);
    if (!have) {
        return err_set(err, KVS_NOMEM, "no memory for the lists of a case");
    }
    c->flop = 2.0 * (DIM + VDIM) * a->n_head * mean;
    c->byte = (double)a->row_stride * mean;
    void *p = NULL;
    TRY(cuda_case_alloc(c, slot_bytes, &p, err));
    dev_cuda.put(p, s->slots, slot_bytes);
    a->slots = p;
    TRY(cuda_case_alloc(c, count_bytes, &p, err));
    dev_cuda.put(p, s->count, count_bytes);
    a->lane_count = p;
    return KVS_OK;
}

static kvs_status make_pool(cuda_case *c, attn_bench *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const shard_geom geom = {.n = c->p.dcp, .i = 1};
    a->row_stride = orc_row_bytes(a->fmt);
    a->page_stride = a->row_stride * PAGE;
    a->n_slot = c->p.batch * shard_cdiv(shard_len(geom, c->p.len), PAGE) * PAGE;
    return cuda_attn_rows(c, a, cuda_scales_to_pow2, &s->rows, err);
}

static kvs_status make_rest(cuda_case *c, attn_bench *s, kvs_error *err)
{
    attn_args *a = &s->a;
    void *p = NULL;
    s->q_set = (size_t)a->n_row * (size_t)a->n_head * DIM;
    s->out_set = (size_t)a->n_row * (size_t)a->n_head * VDIM;
    s->lse_set = (size_t)a->n_row * (size_t)a->n_head;
    TRY(cuda_attn_ends(c, a, c->n_set, &s->q, err));
    TRY(cuda_case_alloc(c, 64, &p, err));
    s->sink = p;
    c->byte += 2.0 * (double)s->q_set + 4.0 * (double)s->lse_set +
               (double)(cuda_attn_out_size(a) * s->out_set);
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

typedef struct row_work {
    attn_args one; /* the row alone, on the host, its keys packed */
    orc_keys keys;
    orc_pool pool;
    double *work;
    void *block[10];
    int32_t n_block;
} row_work;

static void *take(row_work *w, size_t n, size_t size)
{
    void *p = mem_alloc_array(n > 0 ? n : 1, size, 0);
    w->block[w->n_block++] = p;
    return p;
}

/* The row as a problem of its own, its results fetched. False: no memory. */
static int row_fetch(const cuda_case *c, int32_t row, row_work *w)
{
    const attn_bench *s = c->state;
    const attn_args *a = &s->a;
    attn_args *one = &w->one;
    const size_t head_n = (size_t)a->n_head;
    const int64_t row_bytes = a->row_stride;
    *one = *a;
    one->n_row = 1;
    one->slots = s->slots + row * a->slots_stride;
    one->lane_count = s->count + (int64_t)row * a->n_lane;
    const size_t most = (size_t)orc_attn_max_keys(one);
    uint16_t *q = take(w, head_n * DIM, sizeof *q);
    one->out = take(w, head_n * VDIM, sizeof(float));
    one->lse = take(w, head_n, sizeof(float));
    w->keys.slot = take(w, most, sizeof(int32_t));
    w->keys.seg = take(w, most, sizeof(int32_t));
    uint8_t *rows = take(w, most, (size_t)row_bytes);
    w->pool.value = take(w, most, DIM * sizeof(float));
    w->pool.norm = take(w, most, 2 * sizeof(double));
    w->work = take(w, most, sizeof(double));
    uint8_t *used = take(w, most, 1);
    for (int32_t i = 0; i < w->n_block; i++) {
        if (w->block[i] == NULL) {
            return 0;
        }
    }
    w->pool.vnorm2 = w->pool.norm + most;
    dev_cuda.get(q, (const uint16_t *)a->q + row * a->q_stride_row, head_n * DIM * sizeof *q);
    dev_cuda.get(one->out, a->out + row * a->out_stride_row, head_n * VDIM * sizeof(float));
    dev_cuda.get(one->lse, a->lse + row * (int64_t)head_n, head_n * sizeof(float));
    one->q = q;
    orc_attn_keys(one, 0, &w->keys);
    for (int64_t i = 0; i < w->keys.n; i++) {
        memcpy(rows + i * row_bytes, s->rows + w->keys.slot[i] % CUDA_ATTN_ROWS * row_bytes,
               (size_t)row_bytes);
        w->keys.slot[i] = (int32_t)i;
    }
    one->kv = rows;
    one->n_slot = w->keys.n;
    memset(used, 1, most);
    orc_pool_fill(one, used, &w->pool);
    return 1;
}

static kvs_status compare_row(const cuda_case *c, int32_t row, check_result *r, kvs_error *err)
{
    row_work w;
    memset(&w, 0, sizeof w);
    const int have = row_fetch(c, row, &w);
    const check_variant v = cuda_case_variant(c);
    const int32_t n_head = w.one.n_head;
    const int32_t heads[4] = {0, n_head / 3, n_head / 2, n_head - 1};
    for (int i = 0; have && i < 4; i++) {
        orc_attn o;
        orc_attn_head(&w.one, &w.pool, &w.keys, 0, heads[i], w.work, &o);
        attn_compare_head(&w.one, &o, 0, heads[i], 1, &v, r);
    }
    for (size_t i = 0; have && w.keys.n == 0 && i < (size_t)n_head * VDIM; i++) {
        cmp_bits(r, (coord){"out of an empty row", row, (int64_t)(i / VDIM), (int64_t)(i % VDIM)},
                 w.one.out[i], 0.0f);
    }
    for (int32_t i = 0; i < w.n_block; i++) {
        mem_free(w.block[i]);
    }
    return have ? KVS_OK : err_set(err, KVS_NOMEM, "no memory to check a row");
}

static kvs_status check(cuda_case *c, check_result *r, kvs_error *err)
{
    const attn_bench *s = c->state;
    const int32_t last = s->a.n_row - 1, rows[3] = {0, last, s->a.n_row / 2};
    const int32_t n = last == 0 ? 1 : last == 1 ? 2 : 3;
    return cuda_attn_check(c, &s->a, s->n_key[0], rows, n, compare_row, r, err);
}

static void free_attn(cuda_case *c)
{
    attn_bench *s = c->state;
    mem_free(s->slots);
    mem_free(s->count);
    mem_free(s->n_key);
    mem_free(s->rows);
    mem_free(s->q);
}

kvs_status cuda_setup_attn(cuda_case *c, kvs_error *err)
{
    if (c->p.topk == 0) {
        return cuda_setup_dense(c, err);
    }
    attn_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    c->state = s;
    c->free_state = free_attn;
    c->launch = launch;
    c->floor = c->p.invalid < 1.0 ? fetch_only : NULL;
    c->check = check;
    c->kv = kv_fmt_name(c->p.kv);
    snprintf(c->label, sizeof c->label, "%dx%d h%d k%d%s", (int)c->p.batch, (int)c->p.q,
             (int)c->p.heads, (int)c->p.topk,
             c->p.invalid >= 1.0  ? " empty"
             : c->p.invalid > 0.0 ? " holes"
             : c->p.dcp > 1       ? " shard"
                                  : "");
    attn_args *a = &s->a;
    a->fmt = c->p.kv;
    a->k_scale = 1.0f;
    a->n_head = c->p.heads;
    a->n_row = c->p.batch * c->p.q;
    a->n_lane = shard_n_lane((shard_geom){.n = c->p.dcp, .i = 1});
    a->slots_stride = c->p.topk;
    a->out_type = cuda_attn_out(&c->p);
    const double kept = (1.0 - c->p.invalid) / c->p.dcp;
    c->n_set =
        cuda_case_sets(c, (double)a->n_row * (c->p.topk * kept * (double)orc_row_bytes(a->fmt) +
                                              (double)a->n_head * (double)(DIM * 2 + VDIM * cuda_attn_out_size(a))));
    TRY(make_pool(c, s, err));
    TRY(make_lists(c, s, err));
    return make_rest(c, s, err);
}
