/* bench_cuda_layer_check.c - what a layer over ranks must give: the positions that one rank alone selects, if any are, and its
 * results: within the bounds of double precision, or to the bit where the variant of attention is deterministic. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench_cuda_layer.h"
#include "check/case_attn.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM };

static int by_value(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a;
    const int32_t y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Positions that a row attends on one rank, appended to pos; slots are those of the row's own sequence. */
static int32_t row_positions(layer_bench *s, int32_t r, const rank_layer *l, int32_t row,
                             int32_t *slots, int32_t *pos)
{
    int32_t count[KVS_LANES];
    int32_t n = 0;
    gpu_get(&s->w, r, count, l->local.lane_count + (int64_t)row * l->attn.n_lane,
            (size_t)l->attn.n_lane * 4);
    gpu_get(&s->w, r, slots, l->local.slots + (int64_t)row * l->local.k, (size_t)l->local.k * 4);
    for (int32_t i = 0; i < l->attn.n_lane; i++) {
        n += count[i];
    }
    const int64_t first = row / s->p->q * (s->p->len / l->geom.n);
    for (int32_t i = 0; i < n && n <= l->local.k; i++) {
        pos[i] = (int32_t)shard_pos(l->geom, (kvs_local){slots[i] - first}).v;
    }
    return n <= l->local.k ? n : 0;
}

/* The ranks together attend what one alone does. */
static kvs_status compare_selection(layer_bench *s, int32_t row, check_result *res, kvs_error *err)
{
    const size_t k = (size_t)s->p->topk;
    int32_t *slots = mem_alloc_array((size_t)(s->n + 2) * k, sizeof *slots, 0);
    if (slots == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to compare a selection");
    }
    int32_t *want = slots + k;
    int32_t *got = want + k;
    const int32_t n_want = row_positions(s, 0, &s->one[0], row, slots, want);
    int32_t n_got = 0;
    for (int32_t r = 0; r < s->n; r++) {
        n_got += row_positions(s, r, &s->part[r], row, slots, got + n_got);
    }
    const int64_t bound = shard_bound(s->p->len, s->p->q, row % s->p->q);
    cmp_i64(res, (coord){"selected by one rank", row, -1, -1}, n_want,
            bound < s->p->topk ? bound : s->p->topk);
    cmp_i64(res, (coord){"selected by all ranks", row, -1, -1}, n_got, n_want);
    qsort(want, (size_t)n_want, sizeof *want, by_value);
    qsort(got, (size_t)n_got, sizeof *got, by_value);
    for (int32_t i = 0; i < n_want && n_got == n_want; i++) {
        cmp_i64(res, (coord){"position", row, -1, i}, got[i], want[i]);
    }
    mem_free(slots);
    return KVS_OK;
}

/* Results of rank r, f32. */
typedef struct results {
    float *one, *part, *lse_one, *lse_part;
} results;

static kvs_status fetch_results(layer_bench *s, int32_t r, results *x, kvs_error *err)
{
    const size_t n = layer_out_n(s);
    const size_t lse = n / VDIM;
    x->one = mem_alloc_array(2 * (n + lse), sizeof *x->one, 0);
    if (x->one == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to compare results");
    }
    x->part = x->one + n;
    x->lse_one = x->part + n;
    x->lse_part = x->lse_one + lse;
    gpu_get(&s->w, r, x->one, s->one[r].attn.out, n * 4);
    gpu_get(&s->w, r, x->part, s->back[r].out, n * 4);
    gpu_get(&s->w, r, x->lse_one, s->one[r].attn.lse, lse * 4);
    gpu_get(&s->w, r, x->lse_part, s->back[r].lse, lse * 4);
    return KVS_OK;
}

static void compare_bits(const layer_bench *s, const results *x, check_result *res)
{
    for (size_t i = 0; i < layer_out_n(s); i++) {
        const int64_t row = (int64_t)(i / VDIM) / s->local;
        cmp_bits(res,
                 (coord){"out of dcp 1 and of all", row, (int64_t)(i / VDIM) % s->local,
                         (int64_t)(i % VDIM)},
                 x->part[i], x->one[i]);
        if (i % VDIM == 0) {
            cmp_bits(res,
                     (coord){"lse of dcp 1 and of all", row, (int64_t)(i / VDIM) % s->local, -1},
                     x->lse_part[i / VDIM], x->lse_one[i / VDIM]);
        }
    }
}

/* A head of a row of both results in double precision. */
typedef struct head_work {
    attn_args one; /* the row and the head alone, on the host */
    orc_keys keys;
    orc_pool pool;
    double *work;
    int32_t count[KVS_LANES];
    void *block;
} head_work;

/* Slots that one rank alone attends, into h: those it has selected, or all of the sequence. */
static void list_keys(layer_bench *s, int32_t r, int32_t row, int32_t *slots, head_work *h)
{
    const rank_layer *l = &s->one[r];
    if (layer_is_sparse(s)) {
        gpu_get(&s->w, r, slots, l->local.slots + (int64_t)row * l->local.k,
                (size_t)l->local.k * 4);
        gpu_get(&s->w, r, h->count, l->local.lane_count + (int64_t)row * l->attn.n_lane,
                (size_t)l->attn.n_lane * 4);
        h->one.slots = slots;
        h->one.lane_count = h->count;
        orc_attn_keys(&h->one, 0, &h->keys);
        return;
    }
    h->keys.n = shard_bound(s->p->len, s->p->q, row % s->p->q);
    for (int64_t i = 0; i < h->keys.n; i++) {
        h->keys.slot[i] = (int32_t)(row / s->p->q * s->p->len + i);
        h->keys.seg[i] = (int32_t)(i / ATTN_SEGMENT);
    }
}

/* The row's keys, from the template. */
static kvs_status take_keys(layer_bench *s, int32_t r, int32_t row, head_work *h, kvs_error *err)
{
    const rank_layer *l = &s->one[r];
    const size_t k = (size_t)(layer_is_sparse(s) ? s->p->topk : s->p->len);
    const size_t row_bytes = (size_t)l->attn.row_stride;
    const size_t each =
        3 * sizeof(int32_t) + DIM * sizeof(float) + 3 * sizeof(double) + row_bytes + 1;
    memset(h, 0, sizeof *h);
    uint8_t *at = h->block = mem_calloc(k + 1, each);
    if (at == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the keys of a row");
    }
    h->pool.norm = (double *)(void *)at;
    h->pool.vnorm2 = h->pool.norm + k;
    h->work = h->pool.vnorm2 + k;
    h->pool.value = (float *)(void *)(h->work + k);
    int32_t *slots = (int32_t *)(void *)(h->pool.value + k * DIM);
    h->keys.slot = slots + k;
    h->keys.seg = h->keys.slot + k;
    uint8_t *rows = (uint8_t *)(h->keys.seg + k);
    uint8_t *used = rows + k * row_bytes;
    attn_args *a = &h->one;
    *a = l->attn;
    a->n_row = 1;
    a->n_head = 1;
    a->out_type = KVS_DTYPE_F32;
    list_keys(s, r, row, slots, h);
    for (int64_t i = 0; i < h->keys.n; i++) {
        memcpy(rows + (size_t)i * row_bytes,
               s->rows + (size_t)(h->keys.slot[i] % CUDA_ATTN_ROWS) * row_bytes, row_bytes);
        h->keys.slot[i] = (int32_t)i;
    }
    a->kv = rows;
    a->n_slot = h->keys.n;
    memset(used, 1, (size_t)h->keys.n);
    orc_pool_fill(a, used, &h->pool);
    return KVS_OK;
}

static kvs_status compare_heads(layer_bench *s, int32_t r, int32_t row, const results *x,
                                check_result *res, kvs_error *err)
{
    const cuda_case c = {.b = s->b, .op = KERN_OP_attn};
    const check_variant v = cuda_case_variant(&c);
    const int32_t heads[2] = {0, s->local - 1};
    head_work h;
    kvs_status st = take_keys(s, r, row, &h, err);
    for (int i = 0; i < 4 && st == KVS_OK; i++) {
        orc_attn o;
        const size_t at = (size_t)row * (size_t)s->local + (size_t)heads[i / 2];
        h.one.q =
            s->q + ((size_t)row * (size_t)s->heads + (size_t)(r * s->local + heads[i / 2])) * DIM;
        h.one.out = (i % 2 == 0 ? x->one : x->part) + at * VDIM;
        h.one.lse = (i % 2 == 0 ? x->lse_one : x->lse_part) + at;
        orc_attn_head(&h.one, &h.pool, &h.keys, 0, 0, h.work, &o);
        attn_compare_head(&h.one, &o, 0, 0, 1, &v, res);
    }
    mem_free(h.block);
    return st;
}

kvs_status layer_compare(layer_bench *s, check_result *res, kvs_error *err)
{
    const int32_t rows[2] = {0, s->n_row - 1};
    const int exact = strstr(s->b->kern.variant[KERN_OP_attn], "det") != NULL;
    for (int i = 0; layer_is_sparse(s) && i < 2 && (i == 0 || rows[1] > 0); i++) {
        TRY(compare_selection(s, rows[i], res, err));
    }
    for (int32_t r = 0; r < s->n; r++) {
        results x = {0};
        TRY(fetch_results(s, r, &x, err));
        if (exact) {
            compare_bits(s, &x, res);
        }
        kvs_status st = KVS_OK;
        for (int i = 0; i < 2 && (i == 0 || rows[1] > 0) && st == KVS_OK && res->n_bad == 0; i++) {
            st = compare_heads(s, r, rows[i], &x, res, err);
        }
        mem_free(x.one);
        TRY(st);
    }
    return KVS_OK;
}
