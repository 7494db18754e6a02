/* tiny.c - tiny models in memory, and groups of thread ranks that run them. */
#include "unit/unit.h"

#include <math.h>
#include <pthread.h>

#include "tiny.h"

#include "base/err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "comm/comm.h"
#include "num/fmt.h"

/* ---- weights --------------------------------------------------------------------------------- */

typedef struct owned {
    struct owned *next;
    max_align_t data[];
} owned;

typedef struct maker {
    const tiny_spec *spec;
    owned *all;
    uint64_t state;
    int32_t n_mat;
} maker;

static void *own(maker *m, size_t bytes)
{
    owned *o = calloc(1, sizeof *o + bytes + 64);
    assert_non_null(o);
    o->next = m->all;
    m->all = o;
    return o->data;
}

/* The sum of four uniforms of 16 bits: standard deviation 1. */
static float normal(maker *m)
{
    m->state = m->state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t x = (m->state ^ m->state >> 29) * 0xBF58476D1CE4E5B9u;
    const int32_t sum = (int32_t)(x & 0xFFFF) + (int32_t)(x >> 16 & 0xFFFF) + (int32_t)(x >> 32 & 0xFFFF) +
                        (int32_t)(x >> 48);
    return (float)(sum - 131070) * 2.6428e-5f;
}

static const float *vector(maker *m, int32_t n, float around, float spread)
{
    float *v = own(m, (size_t)n * sizeof *v);
    for (int32_t i = 0; i < n; i++) {
        v[i] = bf16_round(around + spread * normal(m));
    }
    return v;
}

static gemm_mat matrix(maker *m, int32_t type, int32_t n_out, int32_t n_in, float gain)
{
    gemm_mat w = {.n_out = n_out, .n_in = n_in, .stride = n_in, .type = type};
    const float std = gain / sqrtf((float)n_in);
    const int64_t n = (int64_t)n_out * n_in;
    if (type == GEMM_FP8) {
        uint8_t *x = own(m, (size_t)n);
        w.scale_stride = (n_in + GEMM_BLOCK - 1) / GEMM_BLOCK;
        const int64_t n_scale = w.scale_stride * ((n_out + GEMM_BLOCK - 1) / GEMM_BLOCK);
        float *scale = own(m, (size_t)n_scale * sizeof *scale);
        for (int64_t i = 0; i < n_scale; i++) {
            scale[i] = std / 100.0f * (1.5f + 0.25f * normal(m));
        }
        for (int64_t i = 0; i < n; i++) {
            x[i] = e4m3_from_f32(70.0f * normal(m));
        }
        w.data = x;
        w.scale = scale;
    } else if (type == GEMM_BF16) {
        bf16 *x = own(m, (size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) {
            x[i] = bf16_from_f32(std * normal(m));
        }
        w.data = x;
    } else {
        float *x = own(m, (size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) {
            x[i] = std * normal(m);
        }
        w.data = x;
    }
    return w;
}

static gemm_mat product(maker *m, int32_t n_out, int32_t n_in)
{
    const int32_t plain = m->spec->mixed && m->n_mat++ % 3 == 0;
    return matrix(m, plain && m->spec->type == GEMM_FP8 ? GEMM_BF16 : m->spec->type, n_out, n_in, 1.0f);
}

/* Router, head, embedding, index weights: never fp8. */
static gemm_mat plain(maker *m, int32_t n_out, int32_t n_in, float gain)
{
    return matrix(m, m->spec->type == GEMM_F32 ? GEMM_F32 : GEMM_BF16, n_out, n_in, gain);
}

static wt_ffn ffn(maker *m, int32_t inner, int32_t hidden)
{
    wt_ffn f;
    f.gate = product(m, inner, hidden);
    f.up = product(m, inner, hidden);
    f.down = product(m, hidden, inner);
    return f;
}

/* One value of a matrix as products multiply it. */
static float value(const gemm_mat *w, int64_t o, int64_t i)
{
    const int64_t at = o * w->stride + i;
    switch (w->type) {
    case GEMM_F32:
        return ((const float *)w->data)[at];
    case GEMM_BF16:
        return bf16_to_f32(((const bf16 *)w->data)[at]);
    default:
        return e4m3_dequant(((const uint8_t *)w->data)[at],
                            w->scale[(w->row0 + o) / GEMM_BLOCK * w->scale_stride +
                                     (w->col0 + i) / GEMM_BLOCK]);
    }
}

/* W_UK^T and W_UV of every head out of kv_b. */
static void absorb(maker *m, const hp *h, wt_layer *l)
{
    const int32_t type = l->kv_b.type == GEMM_F32 ? GEMM_F32 : GEMM_BF16;
    const size_t size = type == GEMM_F32 ? 4 : 2;
    l->uk_head = (int64_t)h->kv_lora * h->nope;
    l->uv_head = (int64_t)h->kv_lora * h->v_dim;
    void *uk = own(m, (size_t)(h->n_head * l->uk_head) * size);
    void *uv = own(m, (size_t)(h->n_head * l->uv_head) * size);
    for (int64_t head = 0; head < h->n_head; head++) {
        for (int64_t d = 0; d < h->nope + h->v_dim; d++) {
            for (int64_t c = 0; c < h->kv_lora; c++) {
                const float x = value(&l->kv_b, head * (h->nope + h->v_dim) + d, c);
                const int is_k = d < h->nope;
                const int64_t at = is_k ? head * l->uk_head + c * h->nope + d
                                        : head * l->uv_head + (d - h->nope) * h->kv_lora + c;
                void *to = is_k ? uk : uv;
                if (type == GEMM_F32) {
                    ((float *)to)[at] = x;
                } else {
                    ((bf16 *)to)[at] = bf16_from_f32(x);
                }
            }
        }
    }
    l->uk = (gemm_mat){.data = uk, .stride = h->nope, .n_out = h->kv_lora, .n_in = h->nope, .type = type};
    l->uv = (gemm_mat){.data = uv, .stride = h->kv_lora, .n_out = h->v_dim, .n_in = h->kv_lora,
                       .type = type};
}

static void layer(maker *m, const hp *h, wt_layer *l, int32_t dense, int32_t index)
{
    const int32_t q_rows = h->n_head * (h->nope + h->rope);
    l->attn_norm = vector(m, h->hidden, 1.0f, 0.2f);
    l->ffn_norm = vector(m, h->hidden, 1.0f, 0.2f);
    if (h->q_lora == 0) {
        l->q = product(m, q_rows, h->hidden);
    } else {
        l->q_a = product(m, h->q_lora, h->hidden);
        l->q_norm = vector(m, h->q_lora, 1.0f, 0.2f);
        l->q_b = product(m, q_rows, h->q_lora);
    }
    l->kv_a = product(m, h->kv_lora + h->rope, h->hidden);
    l->kv_norm = vector(m, h->kv_lora, 1.0f, 0.2f);
    l->kv_b = product(m, h->n_head * (h->nope + h->v_dim), h->kv_lora);
    absorb(m, h, l);
    l->o = product(m, h->hidden, h->n_head * h->v_dim);
    if (index) {
        l->has_index = 1;
        l->iq = product(m, h->n_index_head * h->index_dim, h->q_lora);
        l->ik = product(m, h->index_dim, h->hidden);
        l->iw = plain(m, h->n_index_head, h->hidden, 1.0f);
        l->ik_norm = vector(m, h->index_dim, 1.0f, 0.2f);
        l->ik_bias = vector(m, h->index_dim, 0.0f, 0.2f);
    }
    if (dense) {
        l->ffn = ffn(m, h->inter, h->hidden);
        return;
    }
    l->n_expert = h->n_expert;
    l->router = plain(m, h->n_expert, h->hidden, 3.0f);
    l->router_bias = h->router_bias ? vector(m, h->n_expert, 0.0f, 0.3f) : NULL;
    l->shared = ffn(m, h->n_shared * h->moe_inter, h->hidden);
    wt_ffn *e = own(m, (size_t)h->n_expert * sizeof *e);
    for (int32_t i = 0; i < h->n_expert; i++) {
        e[i] = ffn(m, h->moe_inter, h->hidden);
    }
    l->expert = e;
}

static void geometry(hp *h, tiny_kind kind)
{
    static const char *const names[] = {"tiny-glm52", "tiny-v32", "tiny-v3", "tiny-v2"};
    *h = (hp){
        .family = kind == TINY_GLM52 ? HP_GLM52 : HP_V32,
        .vocab = TINY_VOCAB,
        .hidden = TINY_HIDDEN,
        .inter = 300, /* blocks of 128, 128 and 44 */
        .moe_inter = 136,
        .n_layer = 4,
        .n_dense = 1,
        .n_head = 8,
        .q_lora = kind == TINY_V2 ? 0 : 96,
        .kv_lora = KVS_LATENT_DIM,
        .nope = 24,
        .rope = KVS_ROPE_DIM,
        .v_dim = 40,
        .n_expert = 8,
        .n_shared = kind == TINY_V2 ? 2 : 1,
        .n_active = 3,
        .n_group = kind == TINY_V32 || kind == TINY_V3 ? 4 : 1,
        .topk_group = kind == TINY_V32 || kind == TINY_V3 ? 2 : 1,
        .router = kind == TINY_V2 ? HP_SOFTMAX : HP_SIGMOID,
        .norm_topk = kind != TINY_V2,
        .route_scale = kind == TINY_V2 ? 1.0f : 2.5f,
        .router_bias = kind != TINY_V2,
        .eps = kind == TINY_GLM52 ? 1e-5f : 1e-6f,
        .theta = kind == TINY_GLM52 ? 8e6 : 1e4,
        .yarn = kind != TINY_GLM52,
        .yarn_factor = 40.0,
        .yarn_beta_fast = 32.0,
        .yarn_beta_slow = 1.0,
        .yarn_mscale = 1.0,
        .yarn_mscale_all = 1.0,
        .yarn_orig = 64,
        .n_mtp = kind == TINY_V2 ? 0 : 1,
        .max_ctx = 4096,
        .bos = -1,
        .stored = KVS_WEIGHT_BF16,
    };
    snprintf(h->name, sizeof h->name, "%s", names[kind]);
    if (kind == TINY_GLM52 || kind == TINY_V32) {
        h->n_index_head = 4;
        h->index_dim = KVS_INDEX_DIM;
        h->topk = TINY_TOPK;
        h->index_interleaved = kind == TINY_GLM52;
        h->index_share_mtp = kind == TINY_GLM52;
        for (int32_t i = 0; i < h->n_layer; i++) {
            h->index_full[i] = kind == TINY_V32 || i % 2 == 0;
            h->n_index_layer += h->index_full[i];
        }
    }
}

wt *tiny_new(const tiny_spec *spec)
{
    maker m = {.spec = spec, .state = spec->seed * 1000003u + (uint64_t)spec->kind};
    wt *w = calloc(1, sizeof *w);
    assert_non_null(w);
    hp *h = &w->h;
    geometry(h, spec->kind);
    w->embed = plain(&m, h->vocab, h->hidden, sqrtf((float)h->hidden));
    w->head = plain(&m, h->vocab, h->hidden, 2.0f);
    w->norm = vector(&m, h->hidden, 1.0f, 0.2f);
    w->layer = own(&m, (size_t)(h->n_layer + h->n_mtp) * sizeof *w->layer);
    for (int32_t i = 0; i < h->n_layer; i++) {
        layer(&m, h, &w->layer[i], i < h->n_dense, h->index_full[i]);
    }
    for (int32_t i = h->n_layer; i < h->n_layer + h->n_mtp; i++) {
        wt_layer *l = &w->layer[i];
        layer(&m, h, l, 0, h->n_index_head > 0);
        l->enorm = vector(&m, h->hidden, 1.0f, 0.2f);
        l->hnorm = vector(&m, h->hidden, 1.0f, 0.2f);
        l->head_norm = vector(&m, h->hidden, 1.0f, 0.2f);
        l->eh = plain(&m, h->hidden, 2 * h->hidden, 1.0f);
    }
    w->hash[0] = spec->seed;
    w->store = (struct wt_store *)(void *)m.all;
    return w;
}

void tiny_free(wt *w)
{
    owned *o = (owned *)(void *)w->store;
    while (o != NULL) {
        owned *next = o->next;
        free(o);
        o = next;
    }
    free(w);
}

int32_t tiny_token(int32_t seq, int64_t pos)
{
    rng r = rng_init(977, (uint64_t)seq * 100000u + (uint64_t)pos);
    return (int32_t)rng_next_below(&r, TINY_VOCAB);
}

/* ---- runs ------------------------------------------------------------------------------------ */

typedef struct rank_run {
    const wt *w;
    const tiny_run *r;
    kvs_comm *comm;
    tiny_result res;
    fwd *f;
    int32_t width;   /* entries of a table */
    int32_t *table;  /* [n_seq, width] */
    int32_t *other;  /* the same pages, dealt otherwise */
    int64_t n_page;
    int32_t n_step, n_draft;
    float *rows;     /* [rows of a step, vocab] */
    float *g;        /* [rows, hidden] */
    float *h;        /* [rows, hidden] */
} rank_run;

enum { MAX_STEP = TINY_MAX_SEQ * TINY_MAX_LEN };

tiny_run tiny_default(void)
{
    return (tiny_run){.tp = 1,
                      .dcp = 1,
                      .interleave = 1,
                      .threads = 1,
                      .n_seq = 3,
                      .len = {130, 37, 5},
                      .prompt = {77, 37, 0},
                      .cut = TINY_MAX_LEN};
}

float *tiny_at(float *base, int32_t seq, int64_t pos, int32_t width)
{
    return base + (seq * (int64_t)TINY_MAX_LEN + pos) * width;
}

static void result_new(tiny_result *o)
{
    const size_t rows = (size_t)TINY_MAX_SEQ * TINY_MAX_LEN;
    memset(o, 0, sizeof *o);
    o->logits = calloc(rows * TINY_VOCAB, sizeof(float));
    o->draft = calloc(rows * TINY_VOCAB, sizeof(float));
    o->chain = calloc(rows * TINY_VOCAB * TINY_CHAIN, sizeof(float));
    o->hidden = calloc(rows * TINY_HIDDEN, sizeof(float));
    o->ids = calloc(rows * TINY_TOPK * 4, sizeof(int32_t));
}

void tiny_result_free(tiny_result *r)
{
    free(r->logits);
    free(r->draft);
    free(r->chain);
    free(r->hidden);
    free(r->ids);
}

/* A batch: rows [first[i], first[i] + q_len[i]) of every sequence. */
typedef struct piece {
    int32_t q_len[TINY_MAX_SEQ];
    int64_t seq_len[TINY_MAX_SEQ];
    int32_t n_prompt[TINY_MAX_SEQ];
    int32_t n_row;
    kvs_batch b;
} piece;

static void piece_make(const rank_run *x, piece *p, const int64_t *first, const int32_t *n)
{
    p->n_row = 0;
    for (int32_t i = 0; i < x->r->n_seq; i++) {
        p->q_len[i] = n[i];
        p->seq_len[i] = first[i] + n[i];
        const int64_t left = x->r->prompt[i] - first[i];
        p->n_prompt[i] = left < 0 ? 0 : left < n[i] ? (int32_t)left : n[i];
        p->n_row += n[i];
    }
    p->b = (kvs_batch){.n_req = x->r->n_seq,
                       .q_len = p->q_len,
                       .seq_len = p->seq_len,
                       .table = x->table,
                       .table_stride = x->width,
                       .n_page = x->n_page};
}

static void tokens_of(const piece *p, int32_t shift, int32_t *token, int32_t *all)
{
    int32_t row = 0;
    for (int32_t i = 0; i < p->b.n_req; i++) {
        for (int32_t j = 0; j < p->q_len[i]; j++, row++) {
            token[row] = tiny_token(i, p->seq_len[i] - p->q_len[i] + j + shift);
            all[row] = row;
        }
    }
}

static void scatter(const piece *p, const float *rows, float *to, int32_t width)
{
    int32_t row = 0;
    for (int32_t i = 0; i < p->b.n_req; i++) {
        for (int32_t j = 0; j < p->q_len[i]; j++, row++) {
            memcpy(tiny_at(to, i, p->seq_len[i] - p->q_len[i] + j, width), rows + (int64_t)row * width,
                   (size_t)width * sizeof *to);
        }
    }
}

static void collect_ids(rank_run *x, const piece *p)
{
    for (int32_t layer_i = 0; layer_i < 4; layer_i++) {
        int32_t row = 0;
        for (int32_t i = 0; i < p->b.n_req; i++) {
            for (int32_t j = 0; j < p->q_len[i]; j++, row++) {
                const int64_t at = (layer_i * (int64_t)TINY_MAX_SEQ + i) * TINY_MAX_LEN +
                                   p->seq_len[i] - p->q_len[i] + j;
                fwd_selection(x->f, layer_i, row, x->res.ids + at * TINY_TOPK);
            }
        }
    }
}

static kvs_status wrong(const char *what, kvs_error *err)
{
    return what != NULL ? err_set(err, KVS_INTERNAL, "%s", what) : KVS_OK;
}

/* TINY_CHAIN passes of one row each, from every sequence's last row on. */
static kvs_status chain(rank_run *x, const piece *p, kvs_error *err)
{
    int32_t row[TINY_MAX_SEQ];
    int32_t n[TINY_MAX_SEQ];
    int32_t at = 0;
    for (int32_t i = 0; i < p->b.n_req; i++) {
        if (p->q_len[i] == 0) {
            return KVS_OK; /* a sequence has ended: the chains are those of earlier steps */
        }
        at += p->q_len[i];
        row[i] = at - 1;
        n[i] = 1;
        memcpy(x->h + i * TINY_HIDDEN, x->g + row[i] * TINY_HIDDEN, TINY_HIDDEN * sizeof(float));
    }
    const int32_t reuse = x->w->h.n_index_head > 0;
    if (reuse) {
        const kvs_status st = fwd_draft_keep(x->f, row, p->b.n_req, err);
        if (st < 0) {
            return st;
        }
    }
    for (int32_t step = 0; step < TINY_CHAIN; step++) {
        int64_t first[TINY_MAX_SEQ];
        int32_t token[TINY_MAX_SEQ];
        int32_t all[TINY_MAX_SEQ];
        piece c;
        for (int32_t i = 0; i < p->b.n_req; i++) {
            first[i] = p->seq_len[i] + step;
        }
        piece_make(x, &c, first, n);
        tokens_of(&c, 1, token, all);
        const kvs_status st = fwd_draft(x->f, 0, &c.b, c.n_prompt, token, x->h, reuse, all, c.n_row,
                                        x->rows, x->h, err);
        if (st < 0) {
            return st;
        }
        for (int32_t i = 0; i < p->b.n_req; i++) {
            float *to = x->res.chain +
                        (((int64_t)i * TINY_CHAIN + step) * TINY_MAX_LEN + p->seq_len[i]) * TINY_VOCAB;
            memcpy(to, x->rows + i * TINY_VOCAB, TINY_VOCAB * sizeof *to);
        }
    }
    return KVS_OK;
}

/* Draft layer 0 over a piece, in passes of draft_cut rows of each sequence. */
static kvs_status draft(rank_run *x, const piece *p, kvs_error *err)
{
    static _Thread_local int32_t token[MAX_STEP];
    static _Thread_local int32_t all[MAX_STEP];
    static _Thread_local float hidden[MAX_STEP * TINY_HIDDEN];
    int64_t first[TINY_MAX_SEQ];
    int32_t left[TINY_MAX_SEQ];
    for (int32_t i = 0; i < x->r->n_seq; i++) {
        first[i] = p->seq_len[i] - p->q_len[i];
        left[i] = p->q_len[i];
    }
    for (int32_t more = p->n_row; more > 0;) {
        int32_t n[TINY_MAX_SEQ];
        int32_t row = 0;
        for (int32_t i = 0; i < x->r->n_seq; i++) {
            n[i] = x->r->draft_cut > 0 && left[i] > x->r->draft_cut ? x->r->draft_cut : left[i];
            for (int32_t j = 0; j < n[i]; j++, row++) {
                memcpy(hidden + row * TINY_HIDDEN, tiny_at(x->res.hidden, i, first[i] + j, TINY_HIDDEN),
                       TINY_HIDDEN * sizeof *hidden);
            }
        }
        piece c;
        piece_make(x, &c, first, n);
        tokens_of(&c, 1, token, all);
        if (x->r->moved && x->n_draft++ % 2 == 1) {
            c.b.table = x->other;
        }
        const kvs_status st = fwd_draft(x->f, 0, &c.b, c.n_prompt, token, hidden, 0, all, c.n_row,
                                        x->rows, x->g, err);
        if (st < 0) {
            return st;
        }
        scatter(&c, x->rows, x->res.draft, TINY_VOCAB);
        for (int32_t i = 0; i < x->r->n_seq; i++) {
            first[i] += n[i];
            left[i] -= n[i];
            more -= n[i];
        }
    }
    return KVS_OK;
}

static kvs_status one_step(rank_run *x, const int64_t *first, const int32_t *n, kvs_error *err)
{
    static _Thread_local int32_t token[MAX_STEP];
    static _Thread_local int32_t all[MAX_STEP];
    piece p;
    piece_make(x, &p, first, n);
    tokens_of(&p, 0, token, all);
    if (x->r->between != NULL) {
        TRY(wrong(x->r->between(x->f, &p.b), err));
    }
    const int guarded = x->r->guard && x->n_step++ > 0;
    if (guarded) {
        mem_guard_begin();
    }
    kvs_status st = fwd_step(x->f, &p.b, p.n_prompt, token, all, p.n_row, x->rows, err);
    if (guarded && mem_guard_end() > 0) {
        return wrong("a step allocated", err);
    }
    if (st < 0) {
        return st;
    }
    scatter(&p, x->rows, x->res.logits, TINY_VOCAB);
    scatter(&p, fwd_hidden(x->f), x->res.hidden, TINY_HIDDEN);
    if (x->r->trace) {
        collect_ids(x, &p);
    }
    if (x->r->draft) {
        st = draft(x, &p, err);
    }
    return st < 0 || !x->r->chain ? st : chain(x, &p, err);
}

static kvs_status all_steps(rank_run *x, kvs_error *err)
{
    const tiny_run *r = x->r;
    int64_t done[TINY_MAX_SEQ] = {0};
    for (;;) {
        int32_t n[TINY_MAX_SEQ] = {0};
        int32_t any = 0;
        for (int32_t i = 0; i < r->n_seq && !(r->apart && any); i++) {
            const int64_t left = r->len[i] - done[i];
            n[i] = left < r->cut ? (int32_t)left : r->cut;
            any |= n[i] > 0;
        }
        if (!any) {
            return KVS_OK;
        }
        const kvs_status st = one_step(x, done, n, err);
        if (st < 0) {
            return st;
        }
        for (int32_t i = 0; i < r->n_seq; i++) {
            done[i] += n[i];
        }
    }
}

static void deal_pages(rank_run *x)
{
    const int64_t n = (int64_t)x->r->n_seq * x->width;
    x->n_page = n + 3;
    x->table = malloc((size_t)n * sizeof *x->table);
    x->other = malloc((size_t)n * sizeof *x->other);
    for (int64_t i = 0; i < n; i++) {
        x->other[i] = (int32_t)(n - 1 - i);
        x->table[i] = (int32_t)(x->r->pages == 0 ? i : n + 2 - i);
    }
}

/* Most rows of a step. */
static int32_t rows_of_run(const tiny_run *r)
{
    int64_t n = TINY_MAX_SEQ;
    for (int32_t i = 0; i < r->n_seq; i++) {
        n += r->len[i];
    }
    return (int32_t)n;
}

static void *rank_main(void *arg)
{
    rank_run *x = arg;
    const tiny_run *r = x->r;
    x->width = (int32_t)((TINY_MAX_LEN + 64 * r->dcp - 1) / (64 * r->dcp));
    deal_pages(x);
    const fwd_config c = {
        .dcp = r->dcp,
        .interleave = r->interleave,
        .ep = r->ep,
        .threads = r->threads,
        .kv = r->kv,
        .index_kv = r->index_kv,
        .hadamard = r->hadamard,
        .latent_eps = r->latent_eps,
        .max_rows = rows_of_run(r),
        .max_reqs = TINY_MAX_SEQ,
        .max_logits = rows_of_run(r),
        .max_len = TINY_MAX_LEN,
        .n_page = x->n_page,
        .trace = r->trace,
        .selection_last = r->selection_last,
        .cpu = r->cpu,
    };
    x->res.status = fwd_open(&x->f, x->w, &c, x->comm, &x->res.error);
    if (x->res.status < 0) {
        return NULL;
    }
    x->rows = malloc((size_t)MAX_STEP * TINY_VOCAB * sizeof *x->rows);
    x->g = malloc((size_t)MAX_STEP * TINY_HIDDEN * sizeof *x->g);
    x->h = malloc((size_t)TINY_MAX_SEQ * TINY_HIDDEN * sizeof *x->h);
    x->res.status = all_steps(x, &x->res.error);
    fwd_get_info(x->f, &x->res.info);
    if (x->res.status >= 0 && r->at_end != NULL) {
        x->res.status = wrong(r->at_end(x->f), &x->res.error);
    }
    return NULL;
}

static void rank_end(rank_run *x)
{
    fwd_close(x->f);
    comm_close(x->comm);
    free(x->table);
    free(x->other);
    free(x->rows);
    free(x->g);
    free(x->h);
}

void tiny_execute(const wt *w, const tiny_run *r, tiny_result *out)
{
    enum { MAX_TP = 8 };
    rank_run rank[MAX_TP];
    kvs_comm *group[MAX_TP];
    pthread_t thread[MAX_TP];
    const comm_config cc = {.timeout_ms = 60000};
    assert_int_equal(comm_thread_open(group, r->tp, &cc, NULL), KVS_OK);
    for (int32_t i = 0; i < r->tp; i++) {
        rank[i] = (rank_run){.w = w, .r = r, .comm = group[i]};
        result_new(&rank[i].res);
    }
    for (int32_t i = 1; i < r->tp; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, rank_main, &rank[i]), 0);
    }
    rank_main(&rank[0]);
    for (int32_t i = 1; i < r->tp; i++) {
        pthread_join(thread[i], NULL);
    }
    for (int32_t i = 0; i < r->tp; i++) {
        if (rank[i].res.status < 0) {
            fail_msg("rank %d: %s", i, rank[i].res.error.text);
        }
        rank_end(&rank[i]);
        if (i > 0) {
            tiny_same(r, &rank[0].res, &rank[i].res, "ranks");
            tiny_result_free(&rank[i].res);
        }
    }
    *out = rank[0].res;
}

/* ---- comparison ------------------------------------------------------------------------------ */

static void same_rows(const tiny_run *r, float *a, float *b, int32_t width, const char *of,
                      const char *what)
{
    for (int32_t i = 0; i < r->n_seq; i++) {
        for (int64_t pos = 0; pos < r->len[i]; pos++) {
            const float *x = tiny_at(a, i, pos, width);
            const float *y = tiny_at(b, i, pos, width);
            for (int32_t k = 0; k < width; k++) {
                if (memcmp(&x[k], &y[k], sizeof *x) != 0) {
                    fail_msg("%s: %s of sequence %d, position %d, value %d: %a and %a", what, of, i,
                             (int)pos, k, (double)x[k], (double)y[k]);
                }
            }
        }
    }
}

void tiny_same(const tiny_run *r, const tiny_result *a, const tiny_result *b, const char *what)
{
    same_rows(r, a->hidden, b->hidden, TINY_HIDDEN, "hidden rows", what);
    same_rows(r, a->logits, b->logits, TINY_VOCAB, "logits", what);
    same_rows(r, a->draft, b->draft, TINY_VOCAB, "draft logits", what);
    const size_t n = (size_t)TINY_MAX_SEQ * TINY_MAX_LEN * TINY_TOPK * 4;
    assert_memory_equal(a->ids, b->ids, n * sizeof *a->ids);
    const size_t m = (size_t)TINY_MAX_SEQ * TINY_MAX_LEN * TINY_VOCAB * TINY_CHAIN;
    for (size_t i = 0; r->chain && i < m; i++) {
        if (memcmp(&a->chain[i], &b->chain[i], sizeof(float)) != 0) {
            fail_msg("%s: chained draft value %zu differs", what, i);
        }
    }
}

float tiny_apart(const tiny_run *r, const tiny_result *a, const tiny_result *b)
{
    float most = 0.0f;
    for (int32_t i = 0; i < r->n_seq; i++) {
        for (int64_t pos = 0; pos < r->len[i]; pos++) {
            const float *x = tiny_at(a->logits, i, pos, TINY_VOCAB);
            const float *y = tiny_at(b->logits, i, pos, TINY_VOCAB);
            for (int32_t k = 0; k < TINY_VOCAB; k++) {
                const float d = fabsf(x[k] - y[k]);
                most = d > most || isnan(d) ? d : most;
            }
        }
    }
    return most;
}
