/* world.c - see world.h. One thread per rank; the test's own checks run in the main thread. */
#include "world.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/err.h"
#include "comm/comm.h"
#include "kv/cache.h"
#include "num/fmt.h"
#include "shard/shard.h"

/* ---- data ------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* About normal with unit variance: the sum of four uniform 16-bit numbers. */
static void fill(const scenario *s, world_data kind, int32_t req_id, int64_t pos, int32_t head,
                 float *x, int n, float scale)
{
    if (s->data != NULL && s->data(kind, req_id, pos, head, x, n)) {
        return;
    }
    uint64_t key = mix(s->seed + (uint64_t)kind);
    key = mix(key ^ (uint64_t)req_id);
    key = mix(key + (uint64_t)pos);
    key = mix(key ^ (uint64_t)head << 20);
    for (int i = 0; i < n; i++) {
        const uint64_t u = mix(key + (uint64_t)i * 0x9E3779B97F4A7C15u);
        const int sum = (int)(u & 0xFFFF) + (int)(u >> 16 & 0xFFFF) + (int)(u >> 32 & 0xFFFF) +
                        (int)(u >> 48);
        x[i] = (float)(sum - 131070) / 37837.0f * scale;
    }
}

void data_row(const scenario *s, int32_t req_id, int64_t pos, float row[576])
{
    fill(s, DATA_ROW, req_id, pos, 0, row, 576, 1.0f);
}

void data_index_key(const scenario *s, int32_t req_id, int64_t pos, float key[128])
{
    fill(s, DATA_INDEX_KEY, req_id, pos, 0, key, 128, 1.0f);
}

void data_query(const scenario *s, int32_t req_id, int64_t pos, int32_t head, float q[576])
{
    fill(s, DATA_QUERY, req_id, pos, head, q, 576, 2.0f);
}

void data_index_query(const scenario *s, int32_t req_id, int64_t pos, int32_t head, float q[128])
{
    fill(s, DATA_INDEX_QUERY, req_id, pos, head, q, 128, 1.0f);
}

float data_index_weight(const scenario *s, int32_t req_id, int64_t pos, int32_t head)
{
    float w = 0.0f;
    fill(s, DATA_INDEX_WEIGHT, req_id, pos, head, &w, 1, 1.0f);
    return w;
}

scenario scenario_default(void)
{
    scenario s;
    memset(&s, 0, sizeof s);
    s.seed = 20260;
    s.tp = 8;
    s.dcp = 1;
    s.interleave = 1;
    s.n_head = 16;
    s.n_index_head = 4;
    s.topk = 64;
    s.kv = KVS_KV_FP8_DS_MLA;
    s.index_kv = KVS_INDEX_AUTO;
    s.exchange = KVS_EXCHANGE_A2A;
    s.how = KVS_ATTEND_SPARSE;
    s.select = WORLD_INDEXER;
    s.q_type = KVS_DTYPE_BF16;
    s.out_type = KVS_DTYPE_F32;
    s.n_req = 1;
    s.q_len[0] = 1;
    s.seq_len[0] = 100;
    s.threads = 1;
    s.spare_pages = 3;
    return s;
}

int32_t scenario_rows(const scenario *s)
{
    int32_t rows = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        rows += s->q_len[i];
    }
    return rows;
}

/* ---- one rank -------------------------------------------------------------------------------- */

typedef struct world {
    const scenario *s;
    outcome *o;
    pthread_mutex_t lock;
    pthread_cond_t turn;
    int32_t running; /* rank that may run, with serialise; -1: none */
    kvs_cache *cache[WORLD_MAX_TP];
    int64_t n_page, width, stride;
    int32_t *table; /* [n_req, stride] */
} world;

typedef struct rank_ctx {
    world *w;
    kvs_comm *comm;
    int32_t rank;
} rank_ctx;

static void protect(const kvs_cache *c, int prot)
{
    if (c != NULL && c->map != NULL) {
        assert_int_equal(mprotect(c->map, c->map_bytes, prot), 0);
    }
}

/* Runs around every collective: a rank that waits gives its turn away, its rows unreadable meanwhile. */
static void take_turns(void *ctx, int32_t rank, bool waiting)
{
    world *w = ctx;
    pthread_mutex_lock(&w->lock);
    if (waiting) {
        protect(w->cache[rank], PROT_NONE);
        w->running = -1;
        pthread_cond_broadcast(&w->turn);
    } else {
        while (w->running != -1) {
            pthread_cond_wait(&w->turn, &w->lock);
        }
        w->running = rank;
        protect(w->cache[rank], PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&w->lock);
}

static size_t type_bytes(kvs_dtype t)
{
    return t == KVS_DTYPE_F32 ? 4 : 2;
}

static void store(void *dst, kvs_dtype type, int64_t at, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        if (type == KVS_DTYPE_F32) {
            ((float *)dst)[at + i] = x[i];
        } else {
            ((bf16 *)dst)[at + i] = bf16_from_f32(x[i]);
        }
    }
}

/* Data is bf16 in nature (as a model's activations are), except with f32 rows. */
static kvs_dtype data_type(const scenario *s)
{
    return s->kv == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
}

typedef struct step {
    int32_t n_req;
    int32_t q_len[WORLD_MAX_REQ];
    int64_t seq_len[WORLD_MAX_REQ];
} step;

static kvs_status plan_step(kvs_dcp *d, const world *w, const step *st, kvs_error *err)
{
    const kvs_batch b = {
        .n_req = st->n_req,
        .q_len = st->q_len,
        .seq_len = st->seq_len,
        .table = w->table,
        .table_stride = w->stride,
        .n_page = w->n_page,
    };
    return kvs_dcp_plan(d, &b, err);
}

static kvs_status write_step(kvs_dcp *d, const rank_ctx *r, const step *st, kvs_error *err)
{
    const scenario *s = r->w->s;
    const kvs_dtype type = data_type(s);
    int32_t rows = 0;
    for (int32_t i = 0; i < st->n_req; i++) {
        rows += st->q_len[i];
    }
    void *latent = calloc((size_t)rows + 1, 512 * type_bytes(type));
    void *rope = calloc((size_t)rows + 1, 64 * type_bytes(type));
    void *key = calloc((size_t)rows + 1, 128 * type_bytes(type));
    const shard_geom g = {s->dcp, s->interleave, r->rank % s->dcp};
    int32_t row = 0;
    for (int32_t i = 0; i < st->n_req; i++) {
        for (int32_t j = 0; j < st->q_len[i]; j++, row++) {
            const kvs_pos pos = {st->seq_len[i] - st->q_len[i] + j};
            if (shard_owner(g, pos) != g.rank) {
                continue; /* its data is never read */
            }
            float x[576];
            data_row(s, s->req_id[i], pos.v, x);
            store(latent, type, (int64_t)row * 512, x, 512);
            store(rope, type, (int64_t)row * 64, x + 512, 64);
            data_index_key(s, s->req_id[i], pos.v, x);
            store(key, type, (int64_t)row * 128, x, 128);
        }
    }
    kvs_cache *c = r->w->cache[r->rank];
    kvs_status st2 = kvs_dcp_write(d, c, 0, latent, rope, type, err);
    if (st2 >= 0 && s->n_index_head > 0) {
        st2 = kvs_dcp_write_index(d, c, 0, key, type, err);
    }
    free(latent);
    free(rope);
    free(key);
    return st2;
}

/* Everything before the last step's rows, in pieces. */
static kvs_status write_history(kvs_dcp *d, const rank_ctx *r, int32_t max_rows, kvs_error *err)
{
    const scenario *s = r->w->s;
    for (int32_t i = 0; i < s->n_req; i++) {
        const int64_t end = s->seq_len[i] - s->q_len[i];
        int32_t piece = s->write_chunk > 0 ? s->write_chunk : max_rows;
        piece = piece < max_rows ? piece : max_rows;
        for (int64_t at = 0; at < end; at += piece) {
            step st;
            memset(&st, 0, sizeof st);
            st.n_req = s->n_req;
            const int64_t n = end - at < piece ? end - at : piece;
            st.q_len[i] = (int32_t)n;
            st.seq_len[i] = at + n;
            kvs_status rc = plan_step(d, r->w, &st, err);
            if (rc >= 0) {
                rc = write_step(d, r, &st, err);
            }
            if (rc < 0) {
                return rc;
            }
        }
    }
    return KVS_OK;
}

static kvs_status do_select(kvs_dcp *d, const rank_ctx *r, int32_t rows, kvs_error *err)
{
    const scenario *s = r->w->s;
    kvs_status rc = KVS_OK;
    if (s->select == WORLD_IDS) {
        int32_t *ids = calloc((size_t)rows + 1, (size_t)s->topk * sizeof *ids);
        int32_t row = 0;
        for (int32_t i = 0; i < s->n_req; i++) {
            for (int32_t j = 0; j < s->q_len[i]; j++, row++) {
                s->ids(s->req_id[i], shard_bound(s->seq_len[i], s->q_len[i], j), s->topk,
                       ids + (int64_t)row * s->topk);
            }
        }
        rc = kvs_dcp_set_selection(d, ids, s->topk, err);
        free(ids);
        return rc;
    }
    const kvs_dtype type = data_type(s);
    void *q = calloc((size_t)rows + 1, (size_t)s->n_index_head * 128 * type_bytes(type));
    float *wt = calloc((size_t)rows + 1, (size_t)s->n_index_head * sizeof *wt);
    int32_t row = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        for (int32_t j = 0; j < s->q_len[i]; j++, row++) {
            const int64_t pos = s->seq_len[i] - s->q_len[i] + j;
            for (int32_t h = 0; h < s->n_index_head; h++) {
                float x[128];
                data_index_query(s, s->req_id[i], pos, h, x);
                store(q, type, ((int64_t)row * s->n_index_head + h) * 128, x, 128);
                wt[row * s->n_index_head + h] = data_index_weight(s, s->req_id[i], pos, h);
            }
        }
    }
    rc = kvs_dcp_select(d, r->w->cache[r->rank], 0, q, type, wt, err);
    free(q);
    free(wt);
    return rc;
}

/* The row behind the step's last one is still as it was before. */
static bool is_untouched(const void *out, const float *lse, int32_t rows, int32_t heads,
                         kvs_dtype type)
{
    const size_t bytes = (size_t)heads * 512 * type_bytes(type);
    const uint8_t *o = (const uint8_t *)out + (size_t)rows * bytes;
    const uint8_t *l = (const uint8_t *)(lse + (size_t)rows * (size_t)heads);
    int all = 0xFF;
    for (size_t i = 0; i < bytes; i++) {
        all &= o[i];
    }
    for (size_t i = 0; i < (size_t)heads * sizeof *lse; i++) {
        all &= l[i];
    }
    return all == 0xFF;
}

static kvs_status do_attend(kvs_dcp *d, const rank_ctx *r, int32_t rows, kvs_error *err)
{
    const scenario *s = r->w->s;
    outcome *o = r->w->o;
    const int32_t hl = kvs_dcp_heads(d);
    void *q = calloc((size_t)rows + 1, (size_t)hl * 576 * type_bytes(s->q_type));
    void *out = malloc(((size_t)rows + 1) * (size_t)hl * 512 * type_bytes(s->out_type));
    float *lse = malloc(((size_t)rows + 1) * (size_t)hl * sizeof *lse);
    memset(out, 0xFF, ((size_t)rows + 1) * (size_t)hl * 512 * type_bytes(s->out_type));
    memset(lse, 0xFF, ((size_t)rows + 1) * (size_t)hl * sizeof *lse);
    int32_t row = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        for (int32_t j = 0; j < s->q_len[i]; j++, row++) {
            for (int32_t h = 0; h < hl; h++) {
                float x[576];
                data_query(s, s->req_id[i], s->seq_len[i] - s->q_len[i] + j, r->rank * hl + h, x);
                store(q, s->q_type, ((int64_t)row * hl + h) * 576, x, 576);
            }
        }
    }
    kvs_status rc = kvs_dcp_attend(d, r->w->cache[r->rank], 0, s->how, q, s->q_type, out,
                                   s->out_type, lse, err);
    if (rc >= 0 && !is_untouched(out, lse, rows, hl, s->out_type)) {
        rc = err_set(err, KVS_INTERNAL, "rows behind the %d of the step were written", rows);
    }
    for (int32_t t = 0; rc >= 0 && t < rows; t++) {
        const int64_t head = (int64_t)t * o->n_head + (int64_t)r->rank * hl;
        memcpy(o->lse + head, lse + (int64_t)t * hl, (size_t)hl * sizeof *lse);
        for (int64_t i = 0; i < (int64_t)hl * 512; i++) {
            const int64_t at = (int64_t)t * hl * 512 + i;
            o->out[head * 512 + i] = s->out_type == KVS_DTYPE_F32
                                         ? ((const float *)out)[at]
                                         : bf16_to_f32(((const bf16 *)out)[at]);
        }
    }
    free(q);
    free(out);
    free(lse);
    return rc;
}

static kvs_status open_cache(rank_ctx *r, kvs_error *err)
{
    const scenario *s = r->w->s;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = s->kv;
    cc.index_kv = s->index_kv;
    cc.scale_rule = s->rule;
    cc.n_index_layer = s->n_index_head > 0;
    cc.dcp = s->dcp;
    cc.interleave = s->interleave;
    cc.rank = r->rank % s->dcp;
    cc.n_page = r->w->n_page;
    cc.kernel_level = s->kernel_level;
    cc.k_scale = s->k_scale != 0.0f ? &s->k_scale : NULL;
    kvs_status rc = kvs_cache_create(&r->w->cache[r->rank], &cc, err);
    if (rc >= 0) {
        /* NaN in every format: what nobody wrote must not be read */
        kvs_cache *c = r->w->cache[r->rank];
        memset(c->map, 0xFF, c->map_bytes);
    }
    return rc;
}

static void outcome_init(const scenario *s, outcome *o);

/* Step k of those that come before: whatever it leaves behind must not show. */
static kvs_status warm_step(kvs_dcp *d, const rank_ctx *r, int32_t k, kvs_error *err)
{
    scenario s = *r->w->s;
    step st;
    memset(&st, 0, sizeof st);
    st.n_req = s.n_req;
    for (int32_t i = 0; i < s.n_req; i++) {
        s.seq_len[i] -= s.q_len[i];
        s.q_len[i] = s.warm[k][i] < s.seq_len[i] ? s.warm[k][i] : (int32_t)s.seq_len[i];
        st.q_len[i] = s.q_len[i];
        st.seq_len[i] = s.seq_len[i];
    }
    outcome o;
    outcome_init(&s, &o);
    world w = *r->w;
    w.s = &s;
    w.o = &o;
    const rank_ctx own = {&w, r->comm, r->rank};
    const int32_t rows = scenario_rows(&s);
    kvs_status rc = plan_step(d, &w, &st, err);
    rc = rc < 0 ? rc : write_step(d, &own, &st, err);
    if (s.how == KVS_ATTEND_SPARSE) {
        rc = rc < 0 ? rc : do_select(d, &own, rows, err);
    }
    rc = rc < 0 ? rc : do_attend(d, &own, rows, err);
    rc = rc < 0 ? rc : kvs_dcp_finish(d, NULL, err);
    outcome_fini(&o);
    return rc;
}

static kvs_status rank_steps(rank_ctx *r, kvs_dcp *d, int32_t max_rows, kvs_error *err)
{
    const scenario *s = r->w->s;
    outcome *o = r->w->o;
    const int32_t rows = scenario_rows(s);
    kvs_status rc = write_history(d, r, max_rows, err);
    for (int32_t k = 0; k < s->n_warm && rc >= 0; k++) {
        rc = warm_step(d, r, k, err);
    }
    step st;
    memset(&st, 0, sizeof st);
    st.n_req = s->n_req;
    memcpy(st.q_len, s->q_len, sizeof st.q_len);
    memcpy(st.seq_len, s->seq_len, sizeof st.seq_len);
    rc = rc < 0 ? rc : plan_step(d, r->w, &st, err);
    rc = rc < 0 ? rc : write_step(d, r, &st, err);
    if (s->how == KVS_ATTEND_SPARSE) {
        rc = rc < 0 ? rc : do_select(d, r, rows, err);
    }
    rc = rc < 0 ? rc : do_attend(d, r, rows, err);
    if (rc >= 0 && s->how == KVS_ATTEND_SPARSE && s->select == WORLD_INDEXER) {
        int32_t *ids = malloc(((size_t)rows + 1) * (size_t)s->topk * sizeof *ids);
        int32_t *count = malloc(((size_t)rows + 1) * sizeof *count);
        rc = kvs_dcp_selection(d, ids, count, err);
        if (r->rank == 0) {
            memcpy(o->ids, ids, (size_t)rows * (size_t)s->topk * sizeof *ids);
            memcpy(o->count, count, (size_t)rows * sizeof *count);
        }
        free(ids);
        free(count);
    }
    rc = rc < 0 ? rc : kvs_dcp_finish(d, &o->info[r->rank], err);
    if (r->rank == 0) {
        o->workspace_bytes = kvs_dcp_workspace_bytes(d);
    }
    return rc;
}

static kvs_status rank_run(rank_ctx *r, kvs_error *err)
{
    const scenario *s = r->w->s;
    const int32_t rows = scenario_rows(s);
    int32_t max_rows = s->max_rows > 0 ? s->max_rows : rows;
    max_rows = max_rows < 64 && s->max_rows == 0 ? 64 : max_rows;
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.tp = s->tp;
    dc.dcp = s->dcp;
    dc.interleave = s->interleave;
    dc.n_head = s->n_head;
    dc.n_index_head = s->n_index_head;
    dc.topk = s->topk;
    dc.softmax_scale = 1.0f / 24.0f;
    dc.kv = s->kv;
    dc.index_kv = s->index_kv;
    dc.exchange = s->exchange;
    dc.q_fp8 = s->q_fp8;
    dc.max_rows = max_rows;
    dc.max_reqs = WORLD_MAX_REQ;
    dc.max_len = 1;
    for (int32_t i = 0; i < s->n_req; i++) {
        dc.max_len = s->seq_len[i] > dc.max_len ? s->seq_len[i] : dc.max_len;
    }
    dc.max_len = s->max_len > 0 ? s->max_len : dc.max_len;
    dc.threads = s->threads;
    dc.kernel_level = s->kernel_level;
    dc.trace = s->how == KVS_ATTEND_SPARSE && s->select == WORLD_INDEXER;
    dc.cpu = s->cpu;
    kvs_dcp *d = NULL;
    kvs_status rc = open_cache(r, err);
    rc = rc < 0 ? rc : kvs_dcp_open(&d, &dc, r->comm, err);
    rc = rc < 0 ? rc : rank_steps(r, d, max_rows, err);
    kvs_dcp_close(d);
    return rc;
}

static void *rank_main(void *arg)
{
    rank_ctx *r = arg;
    outcome *o = r->w->o;
    if (r->w->s->serialise) {
        comm_set_hook(r->comm, take_turns, r->w);
        take_turns(r->w, r->rank, false);
    }
    o->status[r->rank] = rank_run(r, &o->error[r->rank]);
    if (r->w->s->serialise) {
        take_turns(r->w, r->rank, true);
    }
    kvs_comm_close(r->comm);
    return NULL;
}

/* ---- the whole group ------------------------------------------------------------------------- */

/* Pages in an order that is not the identity, some left unused. */
static void make_tables(world *w)
{
    const scenario *s = w->s;
    int64_t longest = 1;
    for (int32_t i = 0; i < s->n_req; i++) {
        longest = s->seq_len[i] > longest ? s->seq_len[i] : longest;
    }
    w->width = kvs_table_width(s->dcp, longest);
    int64_t used = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        used += kvs_table_width(s->dcp, s->seq_len[i]);
    }
    w->n_page = used + s->spare_pages;
    w->stride = w->width + s->table_pad;
    int32_t *order = malloc((size_t)w->n_page * sizeof *order);
    for (int64_t i = 0; i < w->n_page; i++) {
        order[i] = (int32_t)i;
    }
    for (int64_t i = w->n_page - 1; i > 0; i--) {
        const int64_t j = (int64_t)(mix(s->seed + (uint64_t)i) % (uint64_t)(i + 1));
        const int32_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    w->table = malloc((size_t)(s->n_req * w->stride + 1) * sizeof *w->table);
    int64_t next = 0;
    for (int32_t i = 0; i < s->n_req; i++) {
        const int64_t need = kvs_table_width(s->dcp, s->seq_len[i]);
        for (int64_t b = 0; b < w->stride; b++) {
            w->table[i * w->stride + b] = b < need ? order[next++] : -1;
        }
    }
    free(order);
}

static void outcome_init(const scenario *s, outcome *o)
{
    memset(o, 0, sizeof *o);
    o->n_row = scenario_rows(s);
    o->n_head = s->n_head;
    o->topk = s->topk;
    const size_t rows = (size_t)o->n_row + 1;
    o->out = malloc(rows * (size_t)s->n_head * 512 * sizeof *o->out);
    o->lse = malloc(rows * (size_t)s->n_head * sizeof *o->lse);
    o->ids = malloc(rows * ((size_t)s->topk + 1) * sizeof *o->ids);
    o->count = malloc(rows * sizeof *o->count);
    memset(o->out, 0xFF, rows * (size_t)s->n_head * 512 * sizeof *o->out);
    memset(o->lse, 0xFF, rows * (size_t)s->n_head * sizeof *o->lse);
    memset(o->ids, 0xFF, rows * ((size_t)s->topk + 1) * sizeof *o->ids);
    memset(o->count, 0xFF, rows * sizeof *o->count);
}

void world_rank(const scenario *s, kvs_comm *group, outcome *o)
{
    outcome_init(s, o);
    world w;
    memset(&w, 0, sizeof w);
    w.s = s;
    w.o = o;
    make_tables(&w);
    rank_ctx r = {&w, group, kvs_comm_rank(group)};
    o->status[r.rank] = rank_run(&r, &o->error[r.rank]);
    kvs_cache_free(w.cache[r.rank]);
    free(w.table);
}

void world_try(const scenario *s, outcome *o)
{
    world w;
    memset(&w, 0, sizeof w);
    w.s = s;
    w.o = o;
    w.running = -1;
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.turn, NULL);
    make_tables(&w);
    outcome_init(s, o);
    kvs_comm *end[WORLD_MAX_TP];
    kvs_error err;
    kvs_comm_config cc = kvs_comm_config_default();
    assert_int_equal(kvs_comm_open_threads(end, s->tp, &cc, &err), KVS_OK);
    rank_ctx ctx[WORLD_MAX_TP];
    pthread_t thread[WORLD_MAX_TP];
    for (int32_t r = 0; r < s->tp; r++) {
        ctx[r] = (rank_ctx){&w, end[r], r};
        assert_int_equal(pthread_create(&thread[r], NULL, rank_main, &ctx[r]), 0);
    }
    for (int32_t r = 0; r < s->tp; r++) {
        pthread_join(thread[r], NULL);
    }
    for (int32_t r = 0; r < s->tp; r++) {
        protect(w.cache[r], PROT_READ | PROT_WRITE);
        kvs_cache_free(w.cache[r]);
    }
    free(w.table);
    pthread_mutex_destroy(&w.lock);
    pthread_cond_destroy(&w.turn);
}

void world_run(const scenario *s, outcome *o)
{
    world_try(s, o);
    for (int32_t r = 0; r < s->tp; r++) {
        if (o->status[r] < 0) {
            fail_msg("rank %d of %d (dcp %d): %s: %s", r, s->tp, s->dcp,
                     kvs_status_name(o->status[r]), o->error[r].text);
        }
    }
}

void outcome_fini(outcome *o)
{
    free(o->out);
    free(o->lse);
    free(o->ids);
    free(o->count);
    memset(o, 0, sizeof *o);
}

void same_bits(const outcome *a, const outcome *b, const char *what)
{
    assert_int_equal(a->n_row, b->n_row);
    assert_int_equal(a->n_head, b->n_head);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        if (memcmp(&a->lse[i], &b->lse[i], sizeof(float)) != 0) {
            fail_msg("%s: lse of row %lld head %lld: %a and %a", what, (long long)(i / a->n_head),
                     (long long)(i % a->n_head), (double)a->lse[i], (double)b->lse[i]);
        }
    }
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head * 512; i++) {
        if (memcmp(&a->out[i], &b->out[i], sizeof(float)) != 0) {
            fail_msg("%s: out of row %lld head %lld value %lld: %a and %a", what,
                     (long long)(i / 512 / a->n_head), (long long)(i / 512 % a->n_head),
                     (long long)(i % 512), (double)a->out[i], (double)b->out[i]);
        }
    }
    const size_t n = (size_t)a->n_row * (size_t)a->topk * sizeof *a->ids;
    if (a->topk == b->topk && memcmp(a->ids, b->ids, n) != 0) {
        fail_msg("%s: the selected sets differ", what);
    }
}
