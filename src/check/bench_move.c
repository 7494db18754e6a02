/* check/bench_move.c - what is bound by memory: the merge of partials, and writers of rows and
 * keys.
 *
 * Merge: dcp partials of every row and head, f32, into bf16, by the tree; a set is its own
 * partials. Write: batch requests of q tokens, bf16; the tokens of a request lie one behind the
 * other in pages that are anywhere in the pool, so that q 1 is a decode step and a large q a
 * prompt; a set is its own tokens and slots. Bytes: all that is read and written, once. */
#include "check/bench.h"

#include <string.h>

#include "base/err.h"

enum { DIM = KVS_LATENT_DIM, PAGE = KVS_PAGE_TOKENS };

#define MOVE_AXES                                                                                  \
    (KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_KERNELS | KVS_BENCH_POOL | KVS_BENCH_THREADS)

/* ---- merge ----------------------------------------------------------------------------------- */

typedef struct merge_state {
    merge_args a;
    float *part; /* [n_set, n_part, n_row, n_head, 512] */
    float *lse;  /* [n_set, n_part, n_row, n_head] */
    const float *out_in[8];
    const float *lse_in[8];
} merge_state;

static kvs_status call_merge(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    merge_state *s = c->state;
    const int64_t pairs = (int64_t)s->a.n_row * s->a.n_head;
    for (int32_t p = 0; p < s->a.n_part; p++) {
        const int64_t at = ((int64_t)set * s->a.n_part + p) * pairs;
        s->out_in[p] = s->part + at * DIM;
        s->lse_in[p] = s->lse + at;
    }
    c->run->kern.merge(&s->a, &c->run->queue);
    return KVS_OK;
}

static kvs_status check_merge(bench_case *c, check_result *r, kvs_error *err)
{
    const merge_state *s = c->state;
    TRY(call_merge(c, 0, err));
    const int64_t rows[2] = {0, s->a.n_row - 1};
    const int64_t heads[2] = {0, s->a.n_head - 1};
    for (int i = 0; i < 4; i++) {
        orc_merge o;
        orc_merge_head(&s->a, rows[i / 2], heads[i % 2], &o);
        merge_compare_head(&s->a, &o, rows[i / 2], heads[i % 2], r);
    }
    return KVS_OK;
}

static kvs_status setup_merge(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    if (KVS_LANES % c->p.dcp != 0) {
        return bench_skip(c, "dcp %d: a tree has 1, 2, 4 or 8 parts", c->p.dcp);
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(merge_state), &p, err));
    merge_state *s = p;
    c->state = s;
    merge_args *a = &s->a;
    a->n_part = c->p.dcp;
    a->mode = MERGE_TREE;
    a->n_row = c->p.batch * c->p.q;
    a->n_head = c->p.heads;
    a->dim = DIM;
    a->out_in = s->out_in;
    a->lse_in = s->lse_in;
    a->in_stride_head = a->out_stride_head = DIM;
    a->in_stride_row = a->out_stride_row = (int64_t)DIM * a->n_head;
    a->lse_stride_row = a->n_head;
    a->out_type = KVS_DTYPE_BF16;
    const int64_t pairs = (int64_t)a->n_row * a->n_head;
    const size_t set = (size_t)(a->n_part * pairs) * (DIM + 1) * sizeof(float);
    c->n_set = bench_n_set(c, set);
    const int64_t all = (int64_t)c->n_set * a->n_part * pairs;
    TRY(bench_alloc(c, (size_t)all * DIM * sizeof(float), &p, err));
    s->part = p;
    const int64_t own = all * DIM < 1 << 20 ? all * DIM : 1 << 20;
    gen_f32(&c->r, s->part, own, 1.0f);
    for (int64_t at = own; at < all * DIM; at += own) {
        const int64_t n = all * DIM - at < own ? all * DIM - at : own;
        memcpy(s->part + at, s->part, (size_t)n * sizeof(float));
    }
    TRY(bench_alloc(c, (size_t)all * sizeof(float), &p, err));
    s->lse = p;
    gen_f32(&c->r, s->lse, all, 4.0f);
    TRY(bench_alloc(c, (size_t)pairs * DIM * sizeof(uint16_t), &p, err));
    a->out = p;
    TRY(bench_alloc(c, (size_t)pairs * sizeof(float), &p, err));
    a->lse = p;
    c->byte = (double)set + (double)pairs * (DIM * 2 + 4);
    c->mem_kind = ROOF_COPY;
    c->call = call_merge;
    c->check = check_merge;
    return KVS_OK;
}

/* ---- write ----------------------------------------------------------------------------------- */

enum { WRITE_LATENT, WRITE_INDEX, N_WRITE };
static const char *const k_write[N_WRITE] = {"latent", "index"};

typedef struct write_state {
    kv_write_args a;
    index_write_args x;
    uint8_t *pool;
    uint16_t *in;  /* [n_set, n_tok, 576 or 128] bf16 */
    int64_t *slot; /* [n_set, n_tok] */
    int32_t width; /* values of a token */
} write_state;

static kvs_status call_latent(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const write_state *s = c->state;
    kv_write_args a = s->a;
    a.latent = s->in + (int64_t)set * a.n_tok * KVS_ROW_DIM;
    a.rope = (const uint16_t *)a.latent + a.n_tok * DIM;
    a.slot = s->slot + (int64_t)set * a.n_tok;
    c->run->kern.kv_write(&a, &c->run->queue);
    return KVS_OK;
}

static kvs_status call_keys(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const write_state *s = c->state;
    index_write_args x = s->x;
    x.key = s->in + (int64_t)set * x.n_tok * KVS_INDEX_DIM;
    x.slot = s->slot + (int64_t)set * x.n_tok;
    c->run->kern.index_write(&x, &c->run->queue);
    return KVS_OK;
}

static kvs_status check_latent(bench_case *c, check_result *r, kvs_error *err)
{
    const write_state *s = c->state;
    TRY(call_latent(c, 0, err));
    kv_write_args a = s->a;
    a.latent = s->in;
    a.rope = s->in + a.n_tok * DIM;
    a.slot = s->slot;
    const int64_t step = a.n_tok / 64 + 1;
    for (int64_t t = 0; t < a.n_tok; t += step) {
        uint8_t want[2304];
        orc_count n = {0, 0};
        orc_row_write(&a, t, want, &n);
        cmp_bytes(r, (coord){"row of token", t, -1, -1},
                  s->pool + a.slot[t] / PAGE * a.page_stride + a.slot[t] % PAGE * a.row_stride,
                  want, (size_t)orc_row_bytes(a.fmt));
    }
    return KVS_OK;
}

static kvs_status check_keys(bench_case *c, check_result *r, kvs_error *err)
{
    const write_state *s = c->state;
    TRY(call_keys(c, 0, err));
    index_write_args x = s->x;
    x.key = s->in;
    x.slot = s->slot;
    const int64_t step = x.n_tok / 64 + 1;
    void *p = NULL;
    const size_t page_bytes = (size_t)orc_index_page_bytes(x.fmt);
    TRY(bench_alloc(c, page_bytes, &p, err));
    for (int64_t t = 0; t < x.n_tok; t += step) {
        const uint8_t *page = s->pool + x.slot[t] / PAGE * x.page_stride;
        const int64_t off = x.slot[t] % PAGE;
        memcpy(p, page, page_bytes);
        orc_count n = {0, 0};
        orc_index_write(&x, t, p, off, &n); /* changes nothing where the op was right */
        cmp_bytes(r, (coord){"page of token", t, -1, -1}, page, p, page_bytes);
    }
    return KVS_OK;
}

/* Slots of a request that lie together: a page, or less where q is less. A power of two. */
static int64_t unit_slots(const bench_case *c)
{
    int64_t unit = 1;
    while (unit < c->p.q && unit < PAGE) {
        unit *= 2;
    }
    return unit;
}

/* The slots of every set: units without order, no slot twice in a set. n_slot is a power of two. */
static void draw_slots(bench_case *c, const write_state *s, int64_t n_slot)
{
    const int64_t unit = unit_slots(c);
    const int64_t n_unit = n_slot / unit;
    int64_t *slot = s->slot;
    for (int32_t set = 0; set < c->n_set; set++) {
        /* a full cycle through the units: an odd step and a power of two */
        const int64_t step = (int64_t)rng_next_below(&c->r, (uint64_t)n_unit) | 1;
        int64_t at = (int64_t)rng_next_below(&c->r, (uint64_t)n_unit);
        for (int32_t b = 0; b < c->p.batch; b++) {
            for (int32_t t = 0; t < c->p.q; t++) {
                at = t % unit == 0 ? (at + step) & (n_unit - 1) : at;
                *slot++ = at * unit + t % unit;
            }
        }
    }
}

static kvs_status make_write(bench_case *c, write_state *s, int64_t n_tok, int64_t out_bytes,
                             int64_t page_bytes, kvs_error *err)
{
    void *p = NULL;
    const size_t set = (size_t)n_tok * (size_t)(s->width * 2 + out_bytes);
    c->n_set = bench_n_set(c, set);
    const int64_t unit = unit_slots(c);
    const int64_t taken = c->p.batch * shard_cdiv(c->p.q, unit) * unit; /* of a set, with gaps */
    int64_t n_slot = PAGE;
    while (n_slot < taken || n_slot < n_tok * c->n_set) {
        n_slot *= 2;
    }
    TRY(bench_alloc(c, (size_t)(n_slot / PAGE * page_bytes), &p, err));
    s->pool = p;
    memset(s->pool, 0x5A, (size_t)(n_slot / PAGE * page_bytes)); /* no page is new to a call */
    const int64_t n = (int64_t)c->n_set * n_tok * s->width;
    TRY(bench_alloc(c, (size_t)n * sizeof(uint16_t), &p, err));
    s->in = p;
    const int64_t own = n < 1 << 20 ? n : 1 << 20;
    gen_bf16(&c->r, s->in, own, 1.0f);
    for (int64_t at = own; at < n; at += own) {
        memcpy(s->in + at, s->in, (size_t)(n - at < own ? n - at : own) * sizeof(uint16_t));
    }
    TRY(bench_alloc(c, (size_t)c->n_set * (size_t)n_tok * sizeof(int64_t), &p, err));
    s->slot = p;
    draw_slots(c, s, n_slot);
    s->a.n_slot = n_slot;
    s->x.n_slot = n_slot;
    c->byte = (double)set + 8.0 * (double)n_tok;
    c->mem_kind = ROOF_COPY;
    return KVS_OK;
}

static kvs_status setup_write(bench_case *c, int32_t i_label, kvs_error *err)
{
    const int keys = i_label == WRITE_INDEX;
    if (keys && c->p.kv != KVS_KV_FP8 && c->p.kv != KVS_KV_F32) {
        c->skip = ""; /* index keys are fp8 or f32; the latent rows of this format do run */
        return KVS_OK;
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(write_state), &p, err));
    write_state *s = p;
    c->state = s;
    const int64_t n_tok = (int64_t)c->p.batch * c->p.q;
    if (keys) {
        const int32_t fmt = c->p.kv == KVS_KV_F32 ? KVS_INDEX_F32 : KVS_INDEX_FP8;
        const int64_t page = orc_index_page_bytes(fmt);
        s->width = KVS_INDEX_DIM;
        s->x = (index_write_args){.n_tok = n_tok,
                                  .key_stride = KVS_INDEX_DIM,
                                  .in_type = KVS_DTYPE_BF16,
                                  .fmt = fmt,
                                  .page_stride = page};
        c->op = KERN_OP_index_write;
        c->kv = index_fmt_name(fmt);
        TRY(make_write(c, s, n_tok, page / PAGE, page, err));
        s->x.keys = s->pool;
        c->call = call_keys;
        c->check = check_keys;
    } else {
        const int64_t row = orc_row_bytes(c->p.kv);
        s->width = KVS_ROW_DIM;
        s->a = (kv_write_args){.n_tok = n_tok,
                               .latent_stride = DIM,
                               .rope_stride = KVS_ROPE_DIM,
                               .in_type = KVS_DTYPE_BF16,
                               .fmt = c->p.kv,
                               .page_stride = row * PAGE,
                               .row_stride = row,
                               .rule = KVS_SCALE_POW2,
                               .k_scale = 1.0f};
        c->kv = kv_fmt_name(c->p.kv);
        TRY(make_write(c, s, n_tok, row, row * PAGE, err));
        s->a.kv = s->pool;
        c->call = call_latent;
        c->check = check_latent;
    }
    c->variant = c->run->kern.variant[c->op];
    return KVS_OK;
}

/* ---- the ops --------------------------------------------------------------------------------- */

static const int64_t k_merge_dcp[] = {8, 2};
static const int64_t k_write_kv[] = {KVS_KV_FP8_DS_MLA, KVS_KV_FP8, KVS_KV_BF16};

const bench_op bench_merge_op = {
    .pub = {.name = "merge",
            .about = "the tree merge of dcp partials of f32 into bf16. Own grid: batch 64, q 1, "
                     "heads 16, dcp 8 and 2",
            .axes = MOVE_AXES | KVS_BENCH_HEADS | KVS_BENCH_DCP},
    .op = KERN_OP_merge,
    .def = {.batch = 64, .q = 1, .heads = 16, .kv = KVS_KV_BF16},
    .dcp = {k_merge_dcp, 2},
    .setup = setup_merge,
};

const bench_op bench_write_op = {
    .pub = {.name = "write",
            .about = "batch requests of q tokens into the cache: latent rows, and index keys where "
                     "kv is fp8 or f32. Own grid: batch 4096, q 1, fp8_ds_mla, fp8, bf16",
            .axes = MOVE_AXES | KVS_BENCH_KV},
    .op = KERN_OP_kv_write,
    .def = {.batch = 4096, .q = 1},
    .labels = k_write,
    .n_label = N_WRITE,
    .kv = {k_write_kv, 3},
    .setup = setup_write,
};
