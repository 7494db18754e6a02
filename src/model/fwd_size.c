/* model/fwd_size.c - what a rank does of a model, and the sizes of its buffers.
 *
 * Everything here follows from the hyper-parameters, the config and the rank: fwd_open allocates what
 * fwd_bytes reports. No size depends on the length of a context; those that could grow with heads or inner
 * dimensions are cut into chunks of rows (attend_rows, ffn_rows), which no result knows.
 */
#include <string.h>
#include "base/err.h"
#include "base/mem.h"
#include "model/fwd_impl.h"
#include "num/kvfmt.h"

static int32_t at_least_one(int64_t n, int32_t most)
{
    return n < 1 ? 1 : n > most ? most : (int32_t)n;
}

static int32_t blocks_of(int32_t n)
{
    return (n + GEMM_BLOCK - 1) / GEMM_BLOCK;
}

/* Columns of n that rank `r` of `of` takes in blocks of 128. */
static wt_range columns_of(int32_t n, int32_t of, int32_t r)
{
    wt_range b = wt_share(blocks_of(n), of, r);
    b.begin = b.begin * GEMM_BLOCK < n ? b.begin * GEMM_BLOCK : n;
    b.end = b.end * GEMM_BLOCK < n ? b.end * GEMM_BLOCK : n;
    return b;
}

static int32_t width_of(wt_range r)
{
    return r.end - r.begin;
}

static kvs_status check_config(const hp *h, const fwd_config *cfg, int32_t tp, kvs_error *err)
{
    if (tp < 1 || h->n_head % tp != 0)
        return err_set(err, KVS_INVALID, "tp %d: use a divisor of the model's %d heads", tp, h->n_head);
    if (cfg->ep < 0 || (cfg->ep > 0 && tp % cfg->ep != 0))
        return err_set(err, KVS_INVALID, "ep %d: use a divisor of tp %d", cfg->ep, tp);
    if (cfg->max_rows < 1 || cfg->max_rows > 1 << 20)
        return err_set(err, KVS_INVALID, "max_rows %d: use 1 to %d", cfg->max_rows, 1 << 20);
    if (cfg->max_logits < 0 || cfg->max_logits > cfg->max_rows)
        return err_set(err, KVS_INVALID, "max_logits %d: use 0 to max_rows %d", cfg->max_logits,
                       cfg->max_rows);
    if (cfg->max_reqs < 1 || cfg->max_reqs > 1 << 16)
        return err_set(err, KVS_INVALID, "max_reqs %d: use 1 to %d", cfg->max_reqs, 1 << 16);
    if ((cfg->hadamard != 0 && cfg->hadamard != 1) || (cfg->trace != 0 && cfg->trace != 1) ||
        (cfg->selection_last != 0 && cfg->selection_last != 1))
        return err_set(err, KVS_INVALID, "hadamard %d, trace %d, selection_last %d: use 0 or 1",
                       cfg->hadamard, cfg->trace, cfg->selection_last);
    if (!(cfg->latent_eps >= 0.0f && cfg->latent_eps < 1.0f))
        return err_set(err, KVS_INVALID, "latent_eps %g: use 0 (the model's) or a small number",
                       (double)cfg->latent_eps);
    if ((cfg->hadamard || cfg->trace || cfg->selection_last) && h->n_index_head == 0)
        return err_set(err, KVS_INVALID,
                       "hadamard, trace and selection_last concern an indexer, which %s does not have: leave "
                       "them 0",
                       h->name);
    return KVS_OK;
}

/* Rotated keys differ from plain ones only in how e4m3 rounds them. */
static kvs_status check_hadamard(const hp *h, const fwd_config *cfg, kvs_error *err)
{
    kv_layout l = {.kv = cfg->kv, .index = cfg->index_kv, .hadamard = 0};
    TRY(kv_layout_resolve(h->n_index_head > 0, &l, err));
    if (cfg->hadamard && l.index != KVS_INDEX_FP8)
        return err_set(err, KVS_INVALID,
                       "hadamard with %s index keys: the rotation changes how fp8 rounds and nothing else; use "
                       "index_kv fp8 or hadamard 0",
                       index_fmt_name((int32_t)l.index));
    return KVS_OK;
}

kvs_status fwd_shape_of(fwd_shape *s, const hp *h, const fwd_config *cfg, int32_t tp, int32_t rank,
                        kvs_error *err)
{
    TRY(hp_runnable(h, err));
    TRY(check_config(h, cfg, tp, err));
    TRY(check_hadamard(h, cfg, err));
    memset(s, 0, sizeof *s);
    s->tp = tp;
    s->rank = rank;
    s->n_head = h->n_head / tp;
    s->head0 = rank * s->n_head;
    s->q_dim = h->nope + h->rope;
    const int32_t ep = cfg->ep > 0 ? cfg->ep : tp;
    const int32_t group = tp / ep;
    s->inter = columns_of(h->inter, tp, rank);
    s->shared = columns_of(h->n_shared * h->moe_inter, tp, rank);
    s->expert = wt_share(h->n_expert, ep, rank / group);
    s->moe = columns_of(h->moe_inter, group, rank % group);
    s->vocab = wt_share(h->vocab, tp, rank);
    s->vocab_most = h->vocab / tp + (h->vocab % tp != 0);
    s->attend_rows = at_least_one(FWD_ATTEND_PAIRS / s->n_head, cfg->max_rows);
    s->head_most = s->n_head < FWD_HEADS_MOST ? s->n_head : FWD_HEADS_MOST;
    const int64_t pairs = (int64_t)cfg->max_rows * s->head_most;
    const int32_t fit = cfg->max_rows > FWD_HEADS_PAIRS ? cfg->max_rows : FWD_HEADS_PAIRS;
    s->head_pairs = pairs < fit ? (int32_t)pairs : fit;
    int32_t widest = width_of(s->inter);
    widest = width_of(s->shared) > widest ? width_of(s->shared) : widest;
    widest = width_of(s->moe) > widest ? width_of(s->moe) : widest;
    widest = 2 * widest > h->hidden ? 2 * widest : h->hidden;
    s->ffn_rows = at_least_one(FWD_FFN_VALUES / widest, cfg->max_rows);
    s->reduce_values = FWD_REDUCE_VALUES;
    s->n_mtp = h->n_mtp;
    s->n_index = h->n_index_head > 0 ? h->n_index_layer : 0;
    s->latent_eps = cfg->latent_eps > 0.0f ? cfg->latent_eps : h->eps;
    return KVS_OK;
}

kvs_dcp_config fwd_dcp_config(const hp *h, const fwd_config *cfg, int32_t tp)
{
    kvs_dcp_config c = kvs_dcp_config_default();
    c.tp = tp;
    c.dcp = cfg->dcp;
    c.interleave = cfg->interleave;
    c.n_head = h->n_head;
    c.n_index_head = h->n_index_head;
    c.topk = h->n_index_head > 0 ? h->topk : 0;
    c.softmax_scale = hp_softmax_scale(h);
    c.kv = cfg->kv;
    c.index_kv = cfg->index_kv;
    c.exchange = cfg->exchange;
    c.max_rows = cfg->max_rows;
    c.max_reqs = cfg->max_reqs;
    c.max_len = cfg->max_len;
    c.threads = cfg->threads;
    c.trace = cfg->trace;
    c.cpu = cfg->cpu;
    c.kernels = cfg->kernels;
    c.forms = h->n_index_head > 0 ? 1 << KVS_ATTEND_SPARSE : 1 << KVS_ATTEND_DENSE | DCP_BLOCKS;
    c.q_ready = 1;
    return c;
}

kvs_cache_config fwd_cache_config(const hp *h, const fwd_config *cfg, const fwd_shape *s)
{
    kvs_cache_config c = kvs_cache_config_default();
    c.kv = cfg->kv;
    c.index_kv = cfg->index_kv;
    c.scale_rule = cfg->scale_rule;
    c.hadamard = cfg->hadamard;
    c.n_layer = h->n_layer + s->n_mtp;
    c.n_index_layer = h->n_index_head > 0 ? s->n_index + s->n_mtp : 0;
    c.dcp = cfg->dcp;
    c.interleave = cfg->interleave;
    c.n_page = cfg->n_page;
    return c;
}

/* Scratch of a product with n_in inputs, over every weight type, since a plan does not know which. */
static int64_t scratch_of(const kern_table *kern, const dev_queue *q, int32_t n_row, int32_t n_in,
                          int32_t n_out, int32_t n_batch)
{
    int64_t most = 0;
    for (int32_t type = GEMM_F32; type <= GEMM_FP8; type++) {
        if (n_batch > 1 && type == GEMM_FP8)
            continue;
        gemm_args a;
        memset(&a, 0, sizeof a);
        a.n_row = n_row;
        a.n_batch = n_batch;
        a.w.n_in = n_in;
        a.w.n_out = n_out;
        a.w.stride = n_in;
        a.w.type = type;
        const int64_t n = (int64_t)kern->gemm_scratch(&a, q);
        most = n > most ? n : most;
    }
    return most;
}

static int64_t gemm_scratch_of(const hp *h, const fwd_config *cfg, const fwd_shape *s,
                               const kern_table *kern)
{
    dev_queue q;
    memset(&q, 0, sizeof q);
    q.n_worker = cfg->threads < 1 ? 1 : cfg->threads;
    const struct {
        int32_t n_row, n_in, n_out, n_batch;
    } shape[] = {
        {cfg->max_rows, h->hidden, h->hidden, 1},
        {cfg->max_rows, 2 * h->hidden, h->hidden, 1},
        {cfg->max_rows, h->q_lora, h->n_head * s->q_dim, 1},
        {s->attend_rows, h->nope, KVS_LATENT_DIM, s->n_head},
        {s->attend_rows, KVS_LATENT_DIM, h->v_dim, s->n_head},
        {s->attend_rows, s->n_head * h->v_dim, h->hidden, 1},
        {DCP_CONTEXT_BLOCK, KVS_LATENT_DIM, s->head_most * (h->nope + h->v_dim), 1},
        {s->ffn_rows, width_of(s->inter), h->hidden, 1},
        {s->ffn_rows, width_of(s->shared), h->hidden, 1},
        {s->ffn_rows, width_of(s->moe), h->hidden, 1},
    };
    int64_t most = 0;
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        if (shape[i].n_in < 1)
            continue;
        const int64_t n = scratch_of(kern, &q, shape[i].n_row, shape[i].n_in, shape[i].n_out,
                                     shape[i].n_batch);
        most = n > most ? n : most;
    }
    return most;
}

/* Bytes of a query value as attention takes it: f32 with f32 rows, else bf16. */
static int64_t query_bytes(const hp *h, const fwd_config *cfg)
{
    kv_layout l = {.kv = cfg->kv, .index = cfg->index_kv, .hadamard = 0};
    return kv_layout_resolve(h->n_index_head > 0, &l, NULL) >= 0 && l.kv == KVS_KV_F32 ? 4 : 2;
}

static void size_attention(fwd_sizes *z, const hp *h, const fwd_config *cfg, const fwd_shape *s)
{
    const int64_t rows = cfg->max_rows;
    z->q_lat = rows * h->q_lora;
    z->q_lat_b = z->q_lat;
    z->q_lat_f = z->q_lat;
    z->kv = rows * KVS_ROW_DIM;
    z->latent = rows * KVS_LATENT_DIM;
    z->k_rope = rows * KVS_ROPE_DIM;
    if (h->n_index_head > 0) {
        z->index_k = rows * KVS_INDEX_DIM;
        z->index_q = rows * h->n_index_head * KVS_INDEX_DIM;
        z->index_w = rows * h->n_index_head;
    }
    const int64_t pairs = (int64_t)s->attend_rows * s->n_head;
    z->v_in = pairs * h->v_dim;
    z->q = pairs * s->q_dim;
    z->q_nope = pairs * h->nope;
    z->q_latent = pairs * KVS_LATENT_DIM;
    z->q_row = pairs * KVS_ROW_DIM * query_bytes(h, cfg);
    z->v = pairs * h->v_dim;
}

/* Scratch of the kernel of the multi-head form. */
static int64_t heads_scratch_of(const hp *h, const fwd_config *cfg, const kern_table *kern)
{
    dev_queue q;
    memset(&q, 0, sizeof q);
    q.n_worker = cfg->threads < 1 ? 1 : cfg->threads;
    mha_args a;
    memset(&a, 0, sizeof a);
    a.nope = h->nope;
    a.v_dim = h->v_dim;
    return (int64_t)kern->mha_scratch(&a, &q);
}

/* The multi-head form; models with an indexer do without. */
static void size_heads(fwd_sizes *z, const hp *h, const fwd_config *cfg, const fwd_shape *s,
                       const kern_table *kern)
{
    if (h->n_index_head > 0)
        return;
    const int64_t rows = cfg->max_rows;
    z->hq = (int64_t)s->head_pairs * s->q_dim;
    z->hq_b = query_bytes(h, cfg) == 2 ? z->hq : 0;
    z->hv = rows * s->n_head * h->v_dim;
    z->h_lse = s->head_pairs;
    z->h_lat = (int64_t)DCP_CONTEXT_BLOCK * KVS_LATENT_DIM;
    z->h_kv = (int64_t)DCP_CONTEXT_BLOCK * s->head_most * (h->nope + h->v_dim);
    z->h_len = rows;
    z->h_scratch = heads_scratch_of(h, cfg, kern);
}

static void size_ffn(fwd_sizes *z, const hp *h, int64_t rows, const fwd_shape *s)
{
    int64_t inner = width_of(s->inter);
    if (h->n_expert > 0) {
        inner = width_of(s->shared) > inner ? width_of(s->shared) : inner;
        inner = width_of(s->moe) > inner ? width_of(s->moe) : inner;
        z->expert_out = (int64_t)s->ffn_rows * h->hidden;
        z->gather_b = z->expert_out;
        z->gather_f = z->expert_out;
        z->router = rows * h->n_expert;
        z->expert_id = rows * h->n_active;
        z->expert_w = z->expert_id;
        z->list_row = z->expert_id;
        z->list_w = z->expert_id;
        z->list_at = h->n_expert + 1;
    }
    z->gate_up = 2 * inner * s->ffn_rows;
    z->act = inner * s->ffn_rows;
}

void fwd_size_space(fwd_sizes *z, const hp *h, const fwd_config *cfg, const fwd_shape *s,
                    const kern_table *kern)
{
    memset(z, 0, sizeof *z);
    const int64_t rows = cfg->max_rows;
    const int64_t all = rows * h->hidden;
    z->x = z->hidden = z->sum = z->in_b = z->in_f = all;
    z->cos = z->sin = rows * FWD_HALF_ROPE;
    if (cfg->selection_last)
        z->last = rows * h->topk;
    if (cfg->trace) {
        z->trace = s->n_index * rows * h->topk;
        z->trace_n = s->n_index * rows;
    }
    if (h->n_index_head > 0 && s->n_mtp > 0) {
        z->keep = (int64_t)cfg->max_reqs * h->topk;
        z->keep_lane = (int64_t)cfg->max_reqs * KVS_LANES;
    }
    z->gemm = gemm_scratch_of(h, cfg, s, kern);
    z->is_prompt = rows;
    size_attention(z, h, cfg, s);
    size_heads(z, h, cfg, s, kern);
    size_ffn(z, h, rows, s);
    if (s->n_mtp > 0) {
        z->embed = all;
        z->pair_b = z->pair_f = 2 * all;
    }
    z->head_b = z->head_f = (int64_t)cfg->max_logits * h->hidden;
    if (s->tp > 1)
        z->head_part = (int64_t)s->tp * cfg->max_logits * s->vocab_most;
}

int64_t fwd_place_space(const fwd_sizes *z, uint8_t *base, fwd_space *b)
{
    enum { COMMON, ATTN, ABSORB, HEADS, FFN, DRAFT, HEAD, N_PHASE };
    int64_t used[N_PHASE] = {0};
#define FWD_ADD(phase, type, name)                                                                      \
    used[phase] += (z->name * (int64_t)sizeof(type) + MEM_ALIGN - 1) / MEM_ALIGN * MEM_ALIGN;
    FWD_SPACE(FWD_ADD)
#undef FWD_ADD
    const int64_t form = used[ABSORB] > used[HEADS] ? used[ABSORB] : used[HEADS];
    int64_t most = used[ATTN] + form;
    for (int phase = FFN; phase < N_PHASE; phase++)
        most = used[phase] > most ? used[phase] : most;
    const int64_t total = used[COMMON] + most;
    if (!base)
        return total;
    const int64_t forms = used[COMMON] + used[ATTN];
    int64_t at[N_PHASE] = {0, used[COMMON], forms, forms, used[COMMON], used[COMMON], used[COMMON]};
#define FWD_PUT(phase, type, name)                                                                      \
    b->name = z->name > 0 ? (type *)(void *)(base + at[phase]) : NULL;                                  \
    at[phase] += (z->name * (int64_t)sizeof(type) + MEM_ALIGN - 1) / MEM_ALIGN * MEM_ALIGN;
    FWD_SPACE(FWD_PUT)
#undef FWD_PUT
    return total;
}

/* Bytes of the main and the draft layers of a cache, latent rows and index keys apart. */
static kvs_status cache_bytes_of(const hp *h, const fwd_config *cfg, const fwd_shape *s, int64_t *bytes,
                                 kvs_error *err)
{
    kv_layout l = {.kv = cfg->kv, .index = cfg->index_kv, .hadamard = cfg->hadamard};
    TRY(kv_layout_resolve(h->n_index_head > 0, &l, err));
    const kvs_cache_config c = fwd_cache_config(h, cfg, s);
    *bytes = cfg->n_page * (kv_page_bytes((int32_t)l.kv) * c.n_layer +
                            index_page_bytes((int32_t)l.index) * c.n_index_layer);
    return KVS_OK;
}

/* The most that a rank hands the TP group at once: its sums' blocks for the others, or its part of the logits. */
static int64_t message_of(const hp *h, const fwd_config *cfg, const fwd_shape *s)
{
    if (s->tp == 1)
        return 0;
    const int64_t all = (int64_t)cfg->max_rows * h->hidden;
    const size_t n = (size_t)(all < s->reduce_values ? all : s->reduce_values);
    int64_t scatter = 0;
    for (int32_t p = 0; p < s->tp; p++) {
        const size_t block = (comm_block(n, s->tp, p) * sizeof(float) + MEM_ALIGN - 1) / MEM_ALIGN * MEM_ALIGN;
        scatter += p == s->rank ? 0 : (int64_t)block;
    }
    const int64_t logits = (int64_t)cfg->max_logits * s->vocab_most * (int64_t)sizeof(float);
    return scatter > logits ? scatter : logits;
}

kvs_status fwd_bytes(const hp *h, const fwd_config *cfg, int32_t tp, fwd_memory *out, kvs_error *err)
{
    fwd_shape s;
    TRY(fwd_shape_of(&s, h, cfg, tp, 0, err));
    TRY(cache_bytes_of(h, cfg, &s, &out->cache, err));
    const kvs_dcp_config dc = fwd_dcp_config(h, cfg, tp);
    dcp_setup setup;
    TRY(dcp_setup_resolve(&setup, &dc, tp, err));
    uint32_t features = 0;
    TRY(dcp_features(cfg->cpu, &features, err));
    kern_table kern;
    TRY(kern_init(&kern, features, cfg->kernels, err));
    dcp_workspace w;
    TRY(dcp_workspace_bytes(&setup, &kern, &w, err));
    out->workspace_all = 0;
    out->workspace_most = 0;
    out->messages = 0;
    for (int32_t rank = 0; rank < tp; rank++) {
        TRY(fwd_shape_of(&s, h, cfg, tp, rank, err));
        fwd_sizes z;
        fwd_size_space(&z, h, cfg, &s, &kern);
        const int64_t n = w.total + fwd_place_space(&z, NULL, NULL);
        out->workspace_all += n;
        out->messages += w.message + message_of(h, cfg, &s);
        out->workspace_most = n > out->workspace_most ? n : out->workspace_most;
    }
    return KVS_OK;
}
