/* model/weights.c - the inventory of tensors. */
#include "model/weights.h"

#include <assert.h>

#include "model/wt.h"
#include "shard/shard.h"

enum { BLOCK = 128, MAX_TENSOR = 24 };

typedef enum store {
    STORE_QUANT, /* e4m3 with block scales in an FP8 checkpoint, else bf16 */
    STORE_BF16,
    STORE_F32 /* not counted as parameters */
} store;

typedef enum split { SPLIT_NONE, SPLIT_OUT, SPLIT_IN } split;

typedef struct tensor {
    int64_t out, in; /* [out, in]; a vector is [1, n]                        */
    int64_t unit;    /* rows or columns of the split dimension that stay together */
    store store;
    split split;
    int32_t n_expert; /* 0: one tensor; else so many, spread over EP groups  */
    bool vector;      /* opening makes an f32 copy of it                     */
} tensor;

typedef struct tensor_list {
    tensor t[MAX_TENSOR];
    int32_t n;
} tensor_list;

static void add(tensor_list *l, tensor t)
{
    assert(l->n < MAX_TENSOR);
    l->t[l->n++] = t;
}

static void add_whole(tensor_list *l, int64_t out, int64_t in, store s)
{
    add(l, (tensor){.out = out, .in = in, .unit = 1, .store = s, .split = SPLIT_NONE});
}

static void add_vector(tensor_list *l, int64_t n, store s)
{
    add(l, (tensor){.out = 1, .in = n, .unit = 1, .store = s, .split = SPLIT_NONE, .vector = true});
}

static void add_split(tensor_list *l, int64_t out, int64_t in, split by, int64_t unit, store s)
{
    add(l, (tensor){.out = out, .in = in, .unit = unit, .store = s, .split = by});
}

/* gate, up, down; n_expert copies of each where it is not 0 */
static void add_ffn(tensor_list *l, int64_t hidden, int64_t inter, int32_t n_expert)
{
    for (int i = 0; i < 2; i++) {
        add(l, (tensor){.out = inter,
                        .in = hidden,
                        .unit = BLOCK,
                        .store = STORE_QUANT,
                        .split = SPLIT_OUT,
                        .n_expert = n_expert});
    }
    add(l, (tensor){.out = hidden,
                    .in = inter,
                    .unit = BLOCK,
                    .store = STORE_QUANT,
                    .split = SPLIT_IN,
                    .n_expert = n_expert});
}

static void list_top(tensor_list *l, const hp *g)
{
    add_split(l, g->vocab, g->hidden, SPLIT_OUT, 1, STORE_BF16);
    if (!g->tied) {
        add_split(l, g->vocab, g->hidden, SPLIT_OUT, 1, STORE_BF16);
    }
    add_vector(l, g->hidden, STORE_BF16);
}

/* Both norms of a layer and its attention. */
static void list_attention(tensor_list *l, const hp *g)
{
    const int64_t q_head = (int64_t)g->nope + g->rope;
    const int64_t kv_head = (int64_t)g->nope + g->v_dim;
    add_vector(l, g->hidden, STORE_BF16);
    add_vector(l, g->hidden, STORE_BF16);
    if (g->q_lora > 0) {
        add_whole(l, g->q_lora, g->hidden, STORE_QUANT);
        add_vector(l, g->q_lora, STORE_BF16);
        add_split(l, g->n_head * q_head, g->q_lora, SPLIT_OUT, q_head, STORE_QUANT);
    } else {
        add_split(l, g->n_head * q_head, g->hidden, SPLIT_OUT, q_head, STORE_QUANT);
    }
    add_whole(l, (int64_t)g->kv_lora + g->rope, g->hidden, STORE_QUANT);
    add_vector(l, g->kv_lora, STORE_BF16);
    add_split(l, g->n_head * kv_head, g->kv_lora, SPLIT_OUT, kv_head, STORE_QUANT);
    add_split(l, g->hidden, (int64_t)g->n_head * g->v_dim, SPLIT_IN, g->v_dim, STORE_QUANT);
}

static void list_indexer(tensor_list *l, const hp *g)
{
    add_whole(l, (int64_t)g->n_index_head * g->index_dim, g->q_lora, STORE_QUANT);
    add_whole(l, g->index_dim, g->hidden, STORE_QUANT);
    add_vector(l, g->index_dim, STORE_BF16); /* k_norm, weight and bias */
    add_vector(l, g->index_dim, STORE_BF16);
    add_whole(l, g->n_index_head, g->hidden, STORE_BF16);
}

static void list_dense(tensor_list *l, const hp *g)
{
    add_ffn(l, g->hidden, g->inter, 0);
}

static void list_moe(tensor_list *l, const hp *g)
{
    if (g->n_expert == 0) {
        list_dense(l, g);
        return;
    }
    add_whole(l, g->n_expert, g->hidden, STORE_BF16);
    if (g->router_bias) {
        add_vector(l, g->n_expert, STORE_F32);
    }
    add_ffn(l, g->hidden, g->moe_inter, g->n_expert);
    if (g->n_shared > 0) {
        add_ffn(l, g->hidden, (int64_t)g->n_shared * g->moe_inter, 0);
    }
}

/* enorm, hnorm, shared_head.norm, eh_proj */
static void list_mtp(tensor_list *l, const hp *g)
{
    for (int i = 0; i < 3; i++) {
        add_vector(l, g->hidden, STORE_BF16);
    }
    add_whole(l, g->hidden, 2 * (int64_t)g->hidden, STORE_BF16);
}

/* A group of tensors and how often the part has it. */
typedef struct block {
    void (*list)(tensor_list *l, const hp *g);
    int32_t n;
} block;

enum { N_BLOCK = 5 };

static void part_blocks(const hp *g, weights_part part, block b[N_BLOCK])
{
    const bool mtp = part == WEIGHTS_MTP;
    const int32_t n_layer = mtp ? g->n_mtp : g->n_layer;
    const int32_t n_dense = mtp ? 0 : g->n_dense;
    const int32_t n_index = mtp ? (g->n_index_head > 0 ? g->n_mtp : 0) : g->n_index_layer;
    b[0] = (block){mtp ? list_mtp : list_top, mtp ? g->n_mtp : 1};
    b[1] = (block){list_attention, n_layer};
    b[2] = (block){list_indexer, n_index};
    b[3] = (block){list_dense, n_dense};
    b[4] = (block){list_moe, n_layer - n_dense};
}

/* Bytes of rows [r0, r1) and columns [c0, c1): the scale blocks they touch included. */
static int64_t region_bytes(store s, kvs_weight_format format, int64_t r0, int64_t r1, int64_t c0,
                            int64_t c1)
{
    if (r1 <= r0 || c1 <= c0) {
        return 0;
    }
    const int64_t n = (r1 - r0) * (c1 - c0);
    if (s == STORE_F32) {
        return n * 4;
    }
    if (s == STORE_BF16 || format == KVS_WEIGHT_BF16) {
        return n * 2;
    }
    const int64_t r_block = (r1 - 1) / BLOCK - r0 / BLOCK + 1;
    const int64_t c_block = (c1 - 1) / BLOCK - c0 / BLOCK + 1;
    return n + r_block * c_block * 4;
}

/* The rows or columns of share i of n: whole units, the last one short. */
static void share(int64_t dim, int64_t unit, int32_t n, int32_t i, int64_t *begin, int64_t *end)
{
    const wt_range r = wt_share((int32_t)shard_cdiv(dim, unit), n, i);
    *begin = r.begin * unit < dim ? r.begin * unit : dim;
    *end = r.end * unit < dim ? r.end * unit : dim;
}

static int64_t tensor_rank_bytes(const tensor *t, kvs_weight_format format, int32_t tp, int32_t ep,
                                 int32_t rank)
{
    int64_t copies = 1;
    int32_t n = tp;
    int32_t i = rank;
    if (t->n_expert > 0) {
        n = tp / ep;
        i = rank % n;
        const wt_range held = wt_share(t->n_expert, ep, rank / n);
        copies = held.end - held.begin;
    }
    int64_t r0 = 0;
    int64_t r1 = t->out;
    int64_t c0 = 0;
    int64_t c1 = t->in;
    if (t->split == SPLIT_OUT) {
        share(t->out, t->unit, n, i, &r0, &r1);
    } else if (t->split == SPLIT_IN) {
        share(t->in, t->unit, n, i, &c0, &c1);
    }
    return copies * region_bytes(t->store, format, r0, r1, c0, c1);
}

/* What one tensor of the inventory counts for. */
typedef struct measure {
    const hp *g;
    kvs_weight_format format;
    int32_t tp, ep, rank;
} measure;
typedef int64_t (*measure_fn)(const measure *m, const tensor *t);

/* The sum of fn over the inventory of a part. */
static int64_t sum_tensors(const measure *m, weights_part part, measure_fn fn)
{
    block b[N_BLOCK];
    part_blocks(m->g, part, b);
    int64_t sum = 0;
    for (int i = 0; i < N_BLOCK; i++) {
        tensor_list l = {.n = 0};
        b[i].list(&l, m->g);
        for (int32_t k = 0; k < l.n; k++) {
            sum += b[i].n * fn(m, &l.t[k]);
        }
    }
    return sum;
}

static int64_t params_of(const tensor *t, int32_t n_expert)
{
    return t->store == STORE_F32 ? 0 : t->out * t->in * (t->n_expert > 0 ? n_expert : 1);
}

static int64_t all_params(const measure *m, const tensor *t)
{
    (void)m;
    return params_of(t, t->n_expert);
}

static int64_t active_params(const measure *m, const tensor *t)
{
    return params_of(t, m->g->n_active);
}

static int64_t active_bytes(const measure *m, const tensor *t)
{
    return region_bytes(t->store, m->format, 0, t->out, 0, t->in) *
           (t->n_expert > 0 ? m->g->n_active : 1);
}

static int64_t rank_bytes(const measure *m, const tensor *t)
{
    return tensor_rank_bytes(t, m->format, m->tp, m->ep, m->rank);
}

static int64_t vector_bytes(const measure *m, const tensor *t)
{
    (void)m;
    return t->vector ? t->out * t->in * (int64_t)sizeof(float) : 0;
}

int64_t weights_copy_bytes(const hp *g, weights_part part, kvs_weight_format format, int32_t tp)
{
    enum { BF16_BYTES = 2 };
    const measure m = {.g = g};
    const bool mtp = part == WEIGHTS_MTP;
    const int64_t n_layer = mtp ? g->n_mtp : g->n_layer;
    const int64_t n_moe = n_layer - (mtp ? 0 : g->n_dense);
    const int64_t rows = g->nope + (format == KVS_WEIGHT_FP8 ? g->v_dim : 0);
    return sum_tensors(&m, part, vector_bytes) +
           n_layer * (g->n_head / tp) * g->kv_lora * rows * BF16_BYTES +
           n_moe * g->n_expert * (int64_t)sizeof(wt_ffn);
}

int64_t weights_params(const hp *g, weights_part part)
{
    const measure m = {.g = g};
    return sum_tensors(&m, part, all_params);
}

int64_t weights_rank_bytes(const hp *g, weights_part part, kvs_weight_format format, int32_t tp,
                           int32_t ep, int32_t rank)
{
    const measure m = {.g = g, .format = format, .tp = tp, .ep = ep, .rank = rank};
    return sum_tensors(&m, part, rank_bytes);
}

int64_t weights_bytes(const hp *g, weights_part part, kvs_weight_format format)
{
    return weights_rank_bytes(g, part, format, 1, 1, 0);
}

int64_t weights_rank_bytes_max(const hp *g, weights_part part, kvs_weight_format format, int32_t tp,
                               int32_t ep)
{
    int64_t most = 0;
    for (int32_t r = 0; r < tp; r++) {
        const int64_t bytes = weights_rank_bytes(g, part, format, tp, ep, r);
        most = bytes > most ? bytes : most;
    }
    return most;
}

int64_t weights_head_params(const hp *g)
{
    return (int64_t)g->vocab * g->hidden;
}

int64_t weights_step_params(const hp *g)
{
    const measure m = {.g = g};
    return sum_tensors(&m, WEIGHTS_MAIN, active_params) -
           weights_head_params(g) * (g->tied ? 1 : 2);
}

int64_t weights_step_bytes(const hp *g, kvs_weight_format format)
{
    enum { BF16_BYTES = 2 };
    const measure m = {.g = g, .format = format};
    return sum_tensors(&m, WEIGHTS_MAIN, active_bytes) -
           (g->tied ? 0 : weights_head_params(g) * BF16_BYTES);
}
