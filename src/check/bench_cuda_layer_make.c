/* bench_cuda_layer_make.c - inputs and buffers of a layer over ranks.
 *
 * Both ways of cutting hold the same tokens: token t of all sequences, laid end to end, is row t modulo CUDA_ATTN_ROWS of
 * the template, and index key t modulo n_key. A rank of n has every n-th, so its own pattern is as much shorter. Where
 * nothing is selected (topk 0), attention reads through the page tables that the indexer reads through elsewhere. */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench_cuda_layer.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM, IDIM = KVS_INDEX_DIM, PAGE = KVS_PAGE_TOKENS };

/* ---- inputs ------------------------------------------------------------------------------------ */

/* dst of a rank's device: repetitions of n bytes. */
static void tile(layer_bench *s, int32_t r, void *dst, int64_t bytes, const void *src, int64_t n)
{
    uint8_t *to = dst;
    int64_t done = n < bytes ? n : bytes;
    gpu_put(&s->w, r, to, src, (size_t)done);
    while (done < bytes) {
        const int64_t more = bytes - done < done ? bytes - done : done;
        dev_queue_copy(&s->w.queue[r], to + done, to, (size_t)more);
        done += more;
    }
    dev_queue_sync(&s->w.queue[r]);
}

/* Index keys and what is scored against them. */
static kvs_status make_host_index(layer_bench *s, rng *g, kvs_error *err)
{
    s->keys = mem_alloc((size_t)s->n_key / PAGE * INDEX_PAGE_BYTES_FP8, 0);
    s->index_q = mem_alloc((size_t)s->n_row * LAYER_INDEX_HEAD * IDIM, 0);
    s->index_w = mem_alloc_array((size_t)s->n_row * LAYER_INDEX_HEAD, sizeof *s->index_w, 0);
    if (s->keys == NULL || s->index_q == NULL || s->index_w == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the index of a layer");
    }
    for (int32_t i = 0; i < s->n_key / PAGE; i++) {
        cuda_index_page(g, s->keys + (size_t)i * INDEX_PAGE_BYTES_FP8);
    }
    gen_e4m3(g, s->index_q, (int64_t)s->n_row * LAYER_INDEX_HEAD * IDIM);
    gen_f32(g, s->index_w, (int64_t)s->n_row * LAYER_INDEX_HEAD, 0.05f);
    return KVS_OK;
}

static kvs_status make_host(layer_bench *s, kvs_error *err)
{
    const int64_t row = orc_row_bytes(s->p->kv);
    rng g = rng_init(s->b->cfg->seed, 77);
    s->rows = mem_alloc((size_t)(CUDA_ATTN_ROWS * row), 0);
    s->q = mem_alloc_array((size_t)s->n_row * (size_t)s->heads * DIM, sizeof *s->q, 0);
    if (s->rows == NULL || s->q == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the inputs of a layer");
    }
    for (int64_t i = 0; i < CUDA_ATTN_ROWS; i++) {
        gen_row(&g, s->p->kv, LAYER_K_SCALE, s->rows + i * row, 1.0f);
        if (s->p->kv == KVS_KV_FP8_DS_MLA) {
            cuda_scales_to_pow2(s->rows + i * row);
        }
    }
    gen_bf16(&g, s->q, (int64_t)s->n_row * s->heads * DIM, 1.5f);
    return layer_is_sparse(s) ? make_host_index(s, &g, err) : KVS_OK;
}

/* Latent rows of the rank's tokens: the template's, every n-th. */
static kvs_status make_rows(layer_bench *s, int32_t r, rank_layer *l, kvs_error *err)
{
    const int64_t row = orc_row_bytes(s->p->kv);
    const int64_t n = CUDA_ATTN_ROWS / l->geom.n;
    uint8_t *own = mem_alloc((size_t)(n * row), 0);
    void *p = NULL;
    attn_args *a = &l->attn;
    a->fmt = s->p->kv;
    a->k_scale = LAYER_K_SCALE;
    a->n_lane = shard_n_lane(l->geom);
    a->row_stride = row;
    a->page_stride = row * PAGE;
    a->n_slot = s->p->batch * s->p->len / l->geom.n;
    kvs_status st = own == NULL ? err_set(err, KVS_NOMEM, "no memory for rows") : KVS_OK;
    st = st == KVS_OK ? gpu_alloc(&s->w, r, (size_t)(a->n_slot * row), &p, err) : st;
    for (int64_t i = 0; i < n && st == KVS_OK; i++) {
        memcpy(own + i * row, s->rows + (i * l->geom.n + l->geom.rank) * row, (size_t)row);
    }
    if (st == KVS_OK) {
        tile(s, r, p, a->n_slot * row, own, n * row);
    }
    a->kv = p;
    mem_free(own);
    return st;
}

/* Index keys likewise. */
static kvs_status make_keys(layer_bench *s, int32_t r, rank_layer *l, kvs_error *err)
{
    index_score_args *a = &l->select.in;
    const int64_t n = s->n_key / l->geom.n;
    const int64_t bytes = a->n_page * a->page_stride;
    uint8_t *own = mem_alloc((size_t)(n / PAGE * a->page_stride), 0);
    void *p = NULL;
    kvs_status st = own == NULL ? err_set(err, KVS_NOMEM, "no memory for index keys") : KVS_OK;
    st = st == KVS_OK ? gpu_alloc(&s->w, r, (size_t)bytes, &p, err) : st;
    for (int64_t i = 0; i < n && st == KVS_OK; i++) {
        const int64_t t = i * l->geom.n + l->geom.rank;
        uint8_t *to = own + i / PAGE * a->page_stride;
        const uint8_t *from = s->keys + t / PAGE * a->page_stride;
        memcpy(to + i % PAGE * IDIM, from + t % PAGE * IDIM, IDIM);
        memcpy(to + INDEX_SCALE_AT + i % PAGE * 4, from + INDEX_SCALE_AT + t % PAGE * 4, 4);
    }
    if (st == KVS_OK) {
        tile(s, r, p, bytes, own, n / PAGE * a->page_stride);
    }
    a->keys = p;
    mem_free(own);
    return st;
}

static kvs_status put_words(layer_bench *s, int32_t r, const int32_t *src, size_t n,
                            const int32_t **out, kvs_error *err)
{
    void *p = NULL;
    TRY(gpu_alloc(&s->w, r, n * sizeof *src, &p, err));
    gpu_put(&s->w, r, p, src, n * sizeof *src);
    *out = p;
    return KVS_OK;
}

/* Page tables, requests and bounds of rows. */
static kvs_status make_plan(layer_bench *s, int32_t r, rank_layer *l, kvs_error *err)
{
    index_score_args *a = &l->select.in;
    const size_t rows = (size_t)s->n_row;
    a->n_req = s->p->batch;
    a->table_width = (int32_t)(s->p->len / l->geom.n / PAGE);
    a->table_stride = a->table_width;
    a->n_page = (int64_t)a->n_req * a->table_width;
    int32_t *word = mem_alloc_array((size_t)a->n_page + 3 * rows, sizeof *word, 0);
    if (word == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the plan of a layer");
    }
    int32_t *req = word + a->n_page;
    int32_t *bound = req + rows;
    int32_t *len = bound + rows;
    for (int32_t i = 0; i < a->n_page; i++) {
        word[i] = i;
    }
    for (int32_t i = 0; i < s->n_row; i++) {
        req[i] = i / s->p->q;
        bound[i] = (int32_t)shard_bound(s->p->len, s->p->q, i % s->p->q);
        len[i] = (int32_t)shard_len(l->geom, bound[i]);
    }
    kvs_status st = put_words(s, r, word, (size_t)a->n_page, &a->table, err);
    st = st == KVS_OK ? put_words(s, r, req, rows, &a->row_req, err) : st;
    st = st == KVS_OK ? put_words(s, r, bound, rows, &l->local.bound, err) : st;
    st = st == KVS_OK ? put_words(s, r, len, rows, &a->kv_len, err) : st;
    mem_free(word);
    return st;
}

/* ---- a rank's layer ---------------------------------------------------------------------------- */

static kvs_status make_select(layer_bench *s, int32_t r, rank_layer *l, const uint8_t *q,
                              const float *w, kvs_error *err)
{
    index_select_args *t = &l->select;
    index_score_args *a = &t->in;
    const int64_t list = (int64_t)s->n_row * s->p->topk;
    void *p = NULL;
    a->n_row = s->n_row;
    a->n_head = LAYER_INDEX_HEAD;
    a->q = q;
    a->w = w;
    a->fmt = KVS_INDEX_FP8;
    a->page_stride = INDEX_PAGE_BYTES_FP8;
    t->k = s->p->topk;
    t->dcp = l->geom.n;
    t->interleave = l->geom.i;
    t->rank = l->geom.rank;
    TRY(make_keys(s, r, l, err));
    TRY(gpu_alloc(&s->w, r, (size_t)s->list_bytes, &p, err));
    t->list_id = p;
    t->list_score = (float *)p + list;
    t->list_count = (int32_t *)p + 2 * list;
    t->scratch_bytes = s->b->kern.index_select_scratch(t, &s->w.queue[r]);
    return gpu_alloc(&s->w, r, t->scratch_bytes + 64, &t->scratch, err);
}

/* From the rank's lists, with a cut where there are more ranks, to slots. */
static kvs_status make_local(layer_bench *s, int32_t r, rank_layer *l, kvs_error *err)
{
    const index_score_args *in = &l->select.in;
    localise_args *a = &l->local;
    const size_t rows = (size_t)s->n_row;
    void *p = NULL;
    a->n_row = s->n_row;
    a->k = s->p->topk;
    a->id = l->select.list_id;
    a->id_stride = a->k;
    a->count = l->select.list_count;
    a->score = l->select.list_score;
    a->dcp = l->geom.n;
    a->interleave = l->geom.i;
    a->rank = l->geom.rank;
    a->table = in->table;
    a->table_stride = in->table_stride;
    a->table_width = in->table_width;
    a->n_req = in->n_req;
    a->n_slot = l->attn.n_slot;
    a->row_req = in->row_req;
    a->slots_stride = a->k;
    TRY(gpu_alloc(&s->w, r, rows * (size_t)a->k * 4, &p, err));
    a->slots = p;
    TRY(gpu_alloc(&s->w, r, rows * (size_t)l->attn.n_lane * 4, &p, err));
    a->lane_count = p;
    if (l->geom.n > 1) {
        topk_merge_args *c = &l->cut;
        TRY(gpu_alloc(&s->w, r, rows * 3 * 4, &p, err));
        c->n_row = s->n_row;
        c->n_list = l->geom.n;
        c->k = a->k;
        c->cand_stride = a->k;
        c->cut_score = p;
        c->cut_id = (int32_t *)p + rows;
        c->n_total = (int32_t *)p + 2 * rows;
        c->scratch_bytes = s->b->kern.topk_merge_scratch(c, &s->w.queue[r]);
        TRY(gpu_alloc(&s->w, r, c->scratch_bytes + 64, &c->scratch, err));
        a->cut_score = c->cut_score;
        a->cut_id = c->cut_id;
    }
    a->scratch_bytes = s->b->kern.localise_scratch(a, &s->w.queue[r]);
    return gpu_alloc(&s->w, r, a->scratch_bytes + 64, &a->scratch, err);
}

static kvs_status make_attn(layer_bench *s, int32_t r, rank_layer *l, const void *q, int32_t n_head,
                            kvs_error *err)
{
    attn_args *a = &l->attn;
    const size_t pairs = (size_t)s->n_row * (size_t)n_head;
    void *p = NULL;
    a->n_row = s->n_row;
    a->n_head = n_head;
    a->q = q;
    a->q_type = KVS_DTYPE_BF16;
    a->q_stride_head = DIM;
    a->q_stride_row = (int64_t)n_head * DIM;
    a->softmax_scale = 1.0f / 24.0f; /* 576^-1/2 */
    if (layer_is_sparse(s)) {
        a->slots = l->local.slots;
        a->slots_stride = l->local.slots_stride;
        a->lane_count = l->local.lane_count;
    } else {
        const index_score_args *in = &l->select.in;
        a->table = in->table;
        a->table_stride = in->table_stride;
        a->table_width = in->table_width;
        a->row_req = in->row_req;
        a->kv_len = in->kv_len;
        a->interleave = l->geom.i;
        a->n_req = in->n_req;
    }
    a->out_stride_head = VDIM;
    a->out_stride_row = (int64_t)n_head * VDIM;
    TRY(gpu_alloc(&s->w, r, pairs * VDIM * 4, &p, err));
    a->out = p;
    TRY(gpu_alloc(&s->w, r, pairs * 4, &p, err));
    a->lse = p;
    a->scratch_bytes = s->b->kern.attn_scratch(a, &s->w.queue[r]);
    return gpu_alloc(&s->w, r, a->scratch_bytes + 64, &a->scratch, err);
}

static exchange_part gathered(const void *src, void *dst, int64_t bytes, int64_t dst_rank,
                              int64_t dst_row)
{
    exchange_part p;
    memset(&p, 0, sizeof p);
    p.src = src;
    p.src_row = bytes;
    p.dst = dst;
    p.dst_rank = dst_rank;
    p.dst_row = dst_row;
    p.bytes = (int32_t)bytes;
    return p;
}

/* Queries and candidates in one message: both are needed before the next thing a rank does. */
static void add_candidates(layer_bench *s, int32_t r)
{
    const index_select_args *t = &s->part[r].select;
    const int64_t k = (int64_t)t->k * 4;
    uint8_t *lists = s->lists[r];
    exchange_args *a = &s->send[r];
    a->part[1] = gathered(t->list_id, lists, k, s->list_bytes, k);
    a->part[2] = gathered(t->list_score, lists + s->n_row * k, k, s->list_bytes, k);
    a->part[3] = gathered(t->list_count, lists + 2 * s->n_row * k, 4, s->list_bytes, 4);
    a->n_part = 4;
}

static void make_exchanges(layer_bench *s, int32_t r, const void *own_q, void *all_q)
{
    const int64_t q = (int64_t)s->local * DIM * 2;
    exchange_args *a = &s->send[r];
    exchange_merge_args *m = &s->back[r];
    a->w = p2p_wire(s->w.g, r);
    a->op = EXCHANGE_OTHER;
    a->n_row = s->n_row;
    a->n_part = 1;
    a->part[0] = gathered(own_q, all_q, q, q, (int64_t)s->heads * DIM * 2);
    if (layer_is_sparse(s)) {
        add_candidates(s, r);
    }
    s->start[r].w = a->w;
    s->start[r].op = EXCHANGE_BARRIER;
    m->w = a->w;
    m->n_row = s->n_row;
    m->n_head = s->heads;
    m->part = s->part[r].attn.out;
    m->part_row = s->part[r].attn.out_stride_row;
    m->part_lse = s->part[r].attn.lse;
    m->lse_row = s->heads;
    m->out_row = (int64_t)s->local * VDIM;
}

/* What both cuts share: the indexer's queries and weights, and room for all candidates. */
static kvs_status make_index(layer_bench *s, int32_t r, kvs_error *err)
{
    const size_t iq = (size_t)s->n_row * LAYER_INDEX_HEAD * IDIM;
    const size_t iw = (size_t)s->n_row * LAYER_INDEX_HEAD * sizeof(float);
    void *q, *w;
    TRY(gpu_alloc(&s->w, r, iq, &q, err));
    gpu_put(&s->w, r, q, s->index_q, iq);
    TRY(gpu_alloc(&s->w, r, iw, &w, err));
    gpu_put(&s->w, r, w, s->index_w, iw);
    TRY(make_select(s, r, &s->one[r], q, w, err));
    TRY(make_select(s, r, &s->part[r], q, w, err));
    return gpu_alloc(&s->w, r, (size_t)(s->list_bytes * s->n), &s->lists[r], err);
}

static kvs_status make_rank(layer_bench *s, int32_t r, kvs_error *err)
{
    const size_t row = (size_t)s->local * DIM * 2;
    void *own_q, *all_q, *p;
    TRY(gpu_alloc(&s->w, r, (size_t)s->n_row * row, &own_q, err));
    for (int32_t i = 0; i < s->n_row; i++) {
        gpu_put(&s->w, r, (uint8_t *)own_q + (size_t)i * row,
                s->q + ((size_t)i * (size_t)s->heads + (size_t)(r * s->local)) * DIM, row);
    }
    TRY(gpu_alloc(&s->w, r, (size_t)s->n_row * row * (size_t)s->n, &all_q, err));
    s->one[r].geom = (shard_geom){.n = 1, .i = 1, .rank = 0};
    s->part[r].geom = (shard_geom){.n = s->n, .i = 1, .rank = r};
    for (int i = 0; i < 2; i++) {
        rank_layer *l = i == 0 ? &s->one[r] : &s->part[r];
        TRY(make_rows(s, r, l, err));
        TRY(make_plan(s, r, l, err));
    }
    if (layer_is_sparse(s)) {
        TRY(make_index(s, r, err));
    }
    for (int i = 0; i < 2; i++) {
        rank_layer *l = i == 0 ? &s->one[r] : &s->part[r];
        if (layer_is_sparse(s)) {
            TRY(make_local(s, r, l, err));
        }
        TRY(make_attn(s, r, l, i == 0 ? own_q : all_q, i == 0 ? s->local : s->heads, err));
    }
    make_exchanges(s, r, own_q, all_q);
    TRY(gpu_alloc(&s->w, r, layer_out_n(s) * 4, &s->back[r].out, err));
    TRY(gpu_alloc(&s->w, r, layer_out_n(s) / VDIM * 4, &p, err));
    s->back[r].lse = p;
    TRY(gpu_alloc(&s->w, r, (size_t)(layer_part_bytes(s) * s->n), &s->moved_out[r], err));
    dev_cuda.fill(s->moved_out[r], 0x11, (size_t)(layer_part_bytes(s) * s->n));
    TRY(gpu_alloc(&s->w, r, (size_t)(layer_part_bytes(s) * s->n), &s->moved_in[r], err));
    return gpu_alloc(&s->w, r, LAYER_TRASH, &s->trash[r], err);
}

void layer_set_out(layer_bench *s, int32_t type)
{
    for (int32_t r = 0; r < s->n; r++) {
        s->one[r].attn.out_type = type;
        s->back[r].out_type = type;
    }
}

kvs_status layer_make(layer_bench *s, kvs_error *err)
{
    TRY(make_host(s, err));
    for (int32_t r = 0; r < s->n; r++) {
        TRY(make_rank(s, r, err));
    }
    return KVS_OK;
}

void layer_free(layer_bench *s)
{
    mem_free(s->rows);
    mem_free(s->keys);
    mem_free(s->q);
    mem_free(s->index_q);
    mem_free(s->index_w);
}
