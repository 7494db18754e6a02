/* check/bench_attn.c - attention over one rank's shard: dense through block tables, sparse
 * through lists.
 *
 * A context is the cache of `batch` sequences of `len` tokens, of which the rank stores its
 * share; its pages lie anywhere in the pool. There are as many contexts as fill the pool. Dense
 * rows attend all of theirs; a set is a context. Sparse rows attend topk positions drawn from
 * the whole sequence, of which the rank owns some; a set is a draw over a context. With
 * `invalid`, that share of a row's entries is -1. Contents: random rows, the same few thousand
 * over and over.
 *
 * Work: 2 * (576 + 512) operations per head and key attended. Bytes: dense, each key of a
 * sequence once; sparse, each entry of a row once; and queries, outputs, LSE. */
#include "check/bench.h"

#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/case_attn.h"

enum {
    DIM = KVS_ROW_DIM,
    VDIM = KVS_LATENT_DIM,
    PAGE = KVS_PAGE_TOKENS,
    N_TEMPLATE = 2048,
    N_Q = 4
};

typedef struct attn_state {
    attn_args a; /* of set 0; call() moves the pointers */
    uint8_t *pool;
    int32_t n_context; /* in the pool */
    int64_t pages;     /* of one sequence on this rank */
    int32_t local;     /* tokens of one sequence on this rank */
    int32_t *table;    /* [n_context, batch, pages] */
    int32_t *slots;    /* [n_set, n_row, stride] */
    int32_t *count;    /* [n_set, n_row, n_lane] */
    uint16_t *q;       /* [N_Q, n_row, heads, 576] bf16, or f32 with f32 rows */
    size_t q_bytes;
} attn_state;

static kvs_status call(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const attn_state *s = c->state;
    attn_args a = s->a;
    const int64_t n_row = a.n_row;
    a.q = (const uint8_t *)s->q + (size_t)(set % N_Q) * s->q_bytes;
    if (a.slots != NULL) {
        a.slots = s->slots + set * n_row * a.slots_stride;
        a.lane_count = s->count + set * n_row * a.n_lane;
    } else {
        a.table = s->table + set % s->n_context * a.n_req * a.table_stride;
    }
    c->run->kern.attn(&a, &c->run->queue);
    return KVS_OK;
}

/* ---- building -------------------------------------------------------------------------------- */

static kvs_status fill_pool(bench_case *c, attn_state *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const int64_t row_bytes = orc_row_bytes(a->fmt);
    const int64_t n_page = (int64_t)s->n_context * c->p.batch * s->pages;
    a->row_stride = row_bytes;
    a->page_stride = row_bytes * PAGE;
    a->n_slot = n_page * PAGE;
    a->k_scale = 0.015f;
    void *p = NULL;
    TRY(bench_alloc(c, (size_t)(n_page * a->page_stride), &p, err));
    s->pool = p;
    a->kv = p;
    const int64_t n = a->n_slot < N_TEMPLATE ? a->n_slot : N_TEMPLATE;
    for (int64_t i = 0; i < n; i++) {
        gen_row(&c->r, a->fmt, a->k_scale, s->pool + i * row_bytes, 1.0f);
    }
    const int64_t done = n * row_bytes;
    const int64_t all = n_page * a->page_stride;
    for (int64_t at = done; at < all; at += done) {
        memcpy(s->pool + at, s->pool, (size_t)(all - at < done ? all - at : done));
    }
    return KVS_OK;
}

static kvs_status make_tables(bench_case *c, attn_state *s, kvs_error *err)
{
    void *p = NULL;
    const int64_t n = s->a.n_slot / PAGE;
    TRY(bench_alloc(c, (size_t)n * sizeof(int32_t), &p, err));
    s->table = p;
    gen_permutation(&c->r, s->table, (int32_t)n);
    return KVS_OK;
}

static kvs_status make_queries(bench_case *c, attn_state *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const int64_t n = (int64_t)a->n_row * a->n_head * DIM;
    a->q_type = a->fmt == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    s->q_bytes = (size_t)n * (a->q_type == KVS_DTYPE_F32 ? 4 : 2);
    void *p = NULL;
    TRY(bench_alloc(c, N_Q * s->q_bytes, &p, err));
    s->q = p;
    gen_any(&c->r, p, a->q_type, 0, n, 1.5f);
    for (int i = 1; i < N_Q; i++) {
        memcpy((uint8_t *)p + (size_t)i * s->q_bytes, p, s->q_bytes);
    }
    a->q = p;
    a->q_stride_head = DIM;
    a->q_stride_row = (int64_t)a->n_head * DIM;
    a->softmax_scale = 1.0f / 24.0f; /* 576^-1/2 */
    TRY(bench_alloc(c, (size_t)a->n_row * (size_t)a->n_head * VDIM * sizeof(float), &p, err));
    a->out = p;
    a->out_stride_head = VDIM;
    a->out_stride_row = (int64_t)a->n_head * VDIM;
    TRY(bench_alloc(c, (size_t)a->n_row * (size_t)a->n_head * sizeof(float), &p, err));
    a->lse = p;
    return KVS_OK;
}

/* Rows of a request see one key more each, as drafts do. */
static kvs_status make_dense(bench_case *c, attn_state *s, kvs_error *err)
{
    attn_args *a = &s->a;
    void *p = NULL;
    a->table = s->table;
    a->table_stride = s->pages;
    a->table_width = (int32_t)s->pages;
    a->interleave = c->geom.i;
    TRY(bench_alloc(c, (size_t)a->n_row * sizeof(int32_t), &p, err));
    int32_t *req = p;
    TRY(bench_alloc(c, (size_t)a->n_row * sizeof(int32_t), &p, err));
    int32_t *len = p;
    int64_t n_pair = 0;
    for (int32_t r = 0; r < a->n_row; r++) {
        req[r] = r / c->p.q;
        len[r] = (int32_t)shard_len(c->geom, shard_bound(c->p.len, c->p.q, r % c->p.q));
        n_pair += len[r];
    }
    a->row_req = req;
    a->kv_len = len;
    c->n_set = s->n_context;
    c->flop = 2.0 * (DIM + VDIM) * a->n_head * (double)n_pair;
    c->byte = (double)orc_row_bytes(a->fmt) * c->p.batch * s->local;
    return KVS_OK;
}

int64_t bench_draw_list(rng *r, const bench_list *l, int32_t *pos, uint8_t *mark, int32_t *slots,
                        int32_t *count)
{
    const int32_t k = l->topk < l->bound ? l->topk : l->bound;
    bench_sample(r, l->bound, k, mark, pos);
    int64_t n = 0;
    for (int32_t lane = 0; lane < l->n_lane; lane++) {
        for (int32_t i = 0; i < k; i++) {
            const kvs_pos p = {pos[i]};
            if (shard_owner(l->geom, p) != 0) {
                continue;
            }
            const kvs_local at = shard_local(l->geom, p);
            if (shard_lane_of_local(l->n_lane, l->geom.i, at) == lane) {
                slots[n++] =
                    (int32_t)(l->table != NULL ? shard_slot(l->table, at).v : l->first + at.v);
                count[lane]++;
            }
        }
    }
    const int32_t gone = (int32_t)(l->invalid * (double)n + 0.5);
    bench_sample(r, (int32_t)n, gone, mark, pos);
    for (int32_t i = 0; i < gone; i++) {
        slots[pos[i]] = -1;
    }
    return n - gone;
}

/* One row of a set; returns how many keys it attends. */
static int64_t draw_row(bench_case *c, attn_state *s, int32_t set, int32_t row, int32_t *pos,
                        uint8_t *mark)
{
    const attn_args *a = &s->a;
    const int64_t at = (int64_t)set * a->n_row + row;
    const int64_t seq = (int64_t)(set % s->n_context) * c->p.batch + row / c->p.q;
    const bench_list l = {.geom = c->geom,
                          .n_lane = a->n_lane,
                          .bound = (int32_t)shard_bound(c->p.len, c->p.q, row % c->p.q),
                          .topk = c->p.topk,
                          .invalid = c->p.invalid,
                          .table = s->table + seq * s->pages};
    return bench_draw_list(&c->r, &l, pos, mark, s->slots + at * a->slots_stride,
                           s->count + at * a->n_lane);
}

static kvs_status make_sparse(bench_case *c, attn_state *s, kvs_error *err)
{
    attn_args *a = &s->a;
    const size_t touched =
        (size_t)a->n_row * (size_t)(c->p.topk / c->p.dcp + 1) * (size_t)orc_row_bytes(a->fmt);
    c->n_set = bench_n_set(c, touched);
    c->n_set = c->n_set < s->n_context ? s->n_context : c->n_set;
    c->n_set = c->n_set > 128 ? 128 : c->n_set; /* by then no page is still in a cache */
    void *p = NULL;
    a->slots_stride = c->p.topk;
    const size_t rows = (size_t)c->n_set * (size_t)a->n_row;
    TRY(bench_alloc(c, rows * (size_t)a->slots_stride * sizeof(int32_t), &p, err));
    s->slots = p;
    TRY(bench_alloc(c, rows * (size_t)a->n_lane * sizeof(int32_t), &p, err));
    s->count = p;
    a->slots = s->slots;
    a->lane_count = s->count;
    void *mark = NULL;
    TRY(bench_alloc(c, (size_t)c->p.len, &mark, err));
    TRY(bench_alloc(c, (size_t)c->p.len * sizeof(int32_t), &p, err));
    int64_t n_pair = 0;
    for (int32_t set = 0; set < c->n_set; set++) {
        for (int32_t row = 0; row < a->n_row; row++) {
            n_pair += draw_row(c, s, set, row, p, mark);
        }
    }
    const double mean = (double)n_pair / c->n_set; /* sets differ a little with dcp > 1 */
    c->flop = 2.0 * (DIM + VDIM) * a->n_head * mean;
    c->byte = (double)orc_row_bytes(a->fmt) * mean;
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* A problem of one row whose keys lie packed in a small pool: what the oracle can dequantise. */
static void pack_row(const attn_args *a, const orc_keys *keys, attn_args *one, uint8_t *rows,
                     int32_t *slots)
{
    *one = *a;
    const int64_t row_bytes = orc_row_bytes(a->fmt);
    for (int64_t i = 0; i < keys->n; i++) {
        const int64_t at = keys->slot[i];
        memcpy(rows + i * row_bytes, a->kv + at / PAGE * a->page_stride + at % PAGE * a->row_stride,
               (size_t)row_bytes);
        slots[i] = (int32_t)i;
    }
    one->kv = rows;
    one->row_stride = row_bytes;
    one->page_stride = row_bytes * PAGE;
    one->n_slot = keys->n;
}

static kvs_status compare_row(bench_case *c, const attn_args *a, int64_t row, check_result *r,
                              kvs_error *err)
{
    const int64_t most = orc_attn_max_keys(a);
    void *mem[7] = {NULL};
    const size_t n = (size_t)(most > 0 ? most : 1);
    const size_t bytes[7] = {n * sizeof(int32_t),     n * sizeof(int32_t),
                             n * sizeof(int32_t),     n * (size_t)orc_row_bytes(a->fmt),
                             n * DIM * sizeof(float), n * 2 * sizeof(double),
                             n * (sizeof(double) + 1)};
    for (int i = 0; i < 7; i++) {
        TRY(bench_alloc(c, bytes[i], &mem[i], err));
    }
    orc_keys keys = {.slot = mem[0], .seg = mem[1]};
    orc_attn_keys(a, row, &keys);
    attn_args one;
    pack_row(a, &keys, &one, mem[3], mem[2]);
    keys.slot = mem[2];
    double *norm = mem[5];
    double *work = mem[6];
    uint8_t *used = (uint8_t *)(work + n);
    memset(used, 1, n);
    orc_pool keys_pool = {.value = mem[4], .norm = norm, .vnorm2 = norm + n};
    orc_pool_fill(&one, used, &keys_pool);
    const check_variant v = bench_variant(c);
    const int32_t heads[3] = {0, a->n_head / 2, a->n_head - 1};
    for (int i = 0; i < 3; i++) {
        orc_attn o;
        orc_attn_head(&one, &keys_pool, &keys, row, heads[i], work, &o);
        attn_compare_head(a, &o, row, heads[i], 1, &v, r);
    }
    return KVS_OK;
}

static kvs_status check(bench_case *c, check_result *r, kvs_error *err)
{
    const attn_state *s = c->state;
    TRY(call(c, 0, err));
    const int64_t last = s->a.n_row - 1;
    TRY(compare_row(c, &s->a, 0, r, err));
    return last > 0 ? compare_row(c, &s->a, last, r, err) : KVS_OK;
}

/* ---- the op ---------------------------------------------------------------------------------- */

static kvs_status setup(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    const int sparse = c->p.topk > 0;
    if (sparse && c->p.kv == KVS_KV_FP8) {
        return bench_skip(c, "sparse attention over fp8 rows: models that select store fp8_ds_mla");
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(attn_state), &p, err));
    attn_state *s = p;
    c->state = s;
    c->label = sparse ? "sparse" : "dense";
    c->kv = kv_fmt_name(c->p.kv);
    c->call = call;
    c->check = check;
    attn_args *a = &s->a;
    a->fmt = c->p.kv;
    a->n_head = c->p.heads;
    a->n_row = c->p.batch * c->p.q;
    a->n_req = c->p.batch;
    a->n_lane = shard_n_lane(c->geom);
    s->local = (int32_t)shard_len(c->geom, c->p.len);
    s->pages = shard_cdiv(s->local > 0 ? s->local : 1, PAGE);
    s->n_context = bench_n_set(c, (size_t)(c->p.batch * s->pages * PAGE * orc_row_bytes(a->fmt)));
    TRY(fill_pool(c, s, err));
    TRY(make_tables(c, s, err));
    TRY(make_queries(c, s, err));
    TRY(sparse ? make_sparse(c, s, err) : make_dense(c, s, err));
    c->byte += (double)s->q_bytes + 4.0 * (VDIM + 1) * a->n_row * a->n_head;
    TRY(bench_scratch(c, c->run->kern.attn_scratch(a, &c->run->queue), &p, &a->scratch_bytes, err));
    a->scratch = p;
    return KVS_OK;
}

static const int64_t k_heads[] = {128, 16};
static const int64_t k_topk[] = {2048, 0};
static const int64_t k_kv[] = {KVS_KV_FP8_DS_MLA, KVS_KV_BF16};

const bench_op bench_attn_op = {
    .pub = {.name = "attn",
            .about = "attention over a shard; topk 0 is dense. Own grid: batch 8, q 1, len 8192, "
                     "heads 128 and 16, dense and topk 2048, fp8_ds_mla and bf16",
            .axes = KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_HEADS | KVS_BENCH_LEN |
                    KVS_BENCH_TOPK | KVS_BENCH_DCP | KVS_BENCH_KV | KVS_BENCH_INVALID |
                    KVS_BENCH_INTERLEAVE | KVS_BENCH_KERNELS | KVS_BENCH_POOL | KVS_BENCH_THREADS},
    .op = KERN_OP_attn,
    .def = {.batch = 8,
            .q = 1,
            .heads = 128,
            .len = 8192,
            .topk = 2048,
            .dcp = 1,
            .kv = KVS_KV_FP8_DS_MLA},
    .heads = {k_heads, 2},
    .topk = {k_topk, 2},
    .kv = {k_kv, 2},
    .setup = setup,
};
