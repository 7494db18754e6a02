/* bench_mha.c - attention in its multi-head form: the last q positions of a context of len, with expanded keys and
 * values of 128 + 64 and 128 dims for each head (mha_wide: 192 + 64 and 256), all blocks in one call.
 *
 * A set is the expanded keys and values of a context; queries and rope parts stay where they are.
 *
 * Work: 2 (192 + 128) operations, or 2 (256 + 256), per head and key attended, keys past a row's own left out. Bytes: expanded keys,
 * values and rope parts, queries, outputs and LSE once. */
#include "check/bench.h"

#include <math.h>
#include <string.h>

#include "check/bench_mha.h"
#include "check/case_mha.h"

enum { N_PAIR = 6 };

typedef struct mha_state {
    mha_args a;
    float *kv; /* [n_set][set_bytes] */
    double *work;
    orc_mha *o; /* [1] */
} mha_state;

int32_t bench_mha_q_dim(const mha_args *a)
{
    return a->nope + ROPE;
}

int32_t bench_mha_kv_dim(const mha_args *a)
{
    return a->nope + a->v_dim;
}

mha_args bench_mha_args(int32_t n_row, int32_t n_head, int32_t n_key, int32_t wide, int32_t type)
{
    mha_args a = {.n_row = n_row,
                  .n_head = n_head,
                  .nope = wide ? BENCH_MHA_NOPE : 128,
                  .v_dim = wide ? BENCH_MHA_VDIM : 128,
                  .type = type,
                  .n_key = n_key,
                  .rope_stride = ROPE,
                  .first = 1};
    a.q_stride_head = bench_mha_q_dim(&a);
    a.q_stride_row = n_head * a.q_stride_head;
    a.softmax_scale = 1.0f / sqrtf((float)bench_mha_q_dim(&a));
    a.kv_stride_head = bench_mha_kv_dim(&a);
    a.kv_stride_key = n_head * a.kv_stride_head;
    a.out_stride_head = a.v_dim;
    a.out_stride_row = (int64_t)n_head * a.v_dim;
    return a;
}

double bench_mha_lengths(const mha_args *a, int32_t *len)
{
    double n_key = 0.0;
    for (int32_t row = 0; row < a->n_row; row++) {
        len[row] = a->n_key - a->n_row + 1 + row;
        n_key += len[row];
    }
    return 2.0 * (bench_mha_q_dim(a) + a->v_dim) * a->n_head * n_key;
}

static kvs_status call_mha(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const mha_state *s = c->state;
    mha_args a = s->a;
    a.kv = (const float *)(const void *)((const uint8_t *)s->kv + (size_t)set * c->set_bytes);
    c->run->kern.mha(&a, &c->run->queue);
    return KVS_OK;
}

static kvs_status check_mha(bench_case *c, check_result *r, kvs_error *err)
{
    mha_state *s = c->state;
    TRY(call_mha(c, 0, err));
    const mha_args *a = &s->a;
    const check_variant v = bench_variant(c);
    const mha_expect e = {.o = s->o, .spread = 1};
    for (int i = 0; i < N_PAIR; i++) {
        const int64_t row = i == 0 ? a->n_row - 1 : gen_pick(&c->r, a->n_row);
        const int64_t head = gen_pick(&c->r, a->n_head);
        const int64_t pair = row * a->n_head + head;
        mha_args one = *a; /* the pair as a problem of its own */
        one.n_row = 1;
        one.n_head = 1;
        one.q =
            (const uint8_t *)a->q + pair * bench_mha_q_dim(a) * (a->type == KVS_DTYPE_F32 ? 4 : 2);
        one.kv = s->kv + head * bench_mha_kv_dim(a);
        one.len = a->len + row;
        one.out = a->out + pair * a->v_dim;
        one.lse = a->lse + pair;
        orc_mha_head(&one, 0, 0, NULL, -INFINITY, s->work, s->o);
        mha_compare_head(&one, &e, 0, 0, &v, r);
    }
    return KVS_OK;
}

/* n elements of a type, of the case. */
static kvs_status make_typed(bench_case *c, int32_t type, int64_t n, float sigma, void **out,
                             kvs_error *err)
{
    TRY(bench_alloc(c, (size_t)n * (type == KVS_DTYPE_F32 ? 4 : 2), out, err));
    gen_any(&c->r, *out, type, 0, n, sigma);
    return KVS_OK;
}

/* Sets repeat the values of one stretch. */
static kvs_status make_keys(bench_case *c, mha_state *s, kvs_error *err)
{
    const size_t all = (size_t)c->n_set * c->set_bytes;
    const size_t own = (size_t)1 << 22 < all ? (size_t)1 << 22 : all;
    void *p = NULL;
    TRY(bench_alloc(c, all, &p, err));
    s->kv = p;
    gen_f32(&c->r, s->kv, (int64_t)(own / sizeof(float)), 1.0f);
    for (size_t at = own; at < all; at += own) {
        memcpy((uint8_t *)p + at, p, all - at < own ? all - at : own);
    }
    return KVS_OK;
}

static kvs_status make_rest(bench_case *c, mha_state *s, kvs_error *err)
{
    mha_args *a = &s->a;
    const int64_t pairs = (int64_t)a->n_row * a->n_head;
    void *p = NULL;
    TRY(make_typed(c, a->type, pairs * bench_mha_q_dim(a), 1.5f, &p, err));
    a->q = p;
    TRY(make_typed(c, a->type, (int64_t)a->n_key * ROPE, 1.0f, &p, err));
    a->rope = p;
    TRY(bench_alloc(c, (size_t)a->n_row * sizeof(int32_t), &p, err));
    int32_t *len = p;
    a->len = len;
    c->flop = bench_mha_lengths(a, len);
    TRY(bench_alloc(c, (size_t)pairs * (size_t)a->v_dim * sizeof(float), &p, err));
    a->out = p;
    TRY(bench_alloc(c, (size_t)pairs * sizeof(float), &p, err));
    a->lse = p;
    TRY(bench_alloc(c, 2 * (size_t)a->n_key * sizeof(double), &p, err));
    s->work = p;
    TRY(bench_alloc(c, sizeof(orc_mha), &p, err));
    s->o = p;
    TRY(bench_scratch(c, c->run->kern.mha_scratch(a, &c->run->queue), &a->scratch,
                      &a->scratch_bytes, err));
    const double elem = a->type == KVS_DTYPE_F32 ? 4.0 : 2.0;
    c->byte = (double)c->set_bytes + elem * ROPE * a->n_key +
              (double)pairs * (elem * bench_mha_q_dim(a) + 4.0 * a->v_dim + 4.0);
    return KVS_OK;
}

static kvs_status setup(bench_case *c, int32_t wide, kvs_error *err)
{
    const int32_t kv = c->p.kv;
    if (kv != KVS_KV_F32 && kv != KVS_KV_BF16) {
        return bench_skip(c, "keys and values are rounded to bf16, or not: kv bf16 or f32");
    }
    if (c->p.len < c->p.q) {
        return bench_skip(c, "a context of %d tokens has no last %d", (int)c->p.len, (int)c->p.q);
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(mha_state), &p, err));
    mha_state *s = p;
    c->state = s;
    c->label = "causal";
    c->kv = kv_fmt_name(kv);
    c->call = call_mha;
    c->check = check_mha;
    s->a = bench_mha_args(c->p.q, c->p.heads, (int32_t)c->p.len, wide,
                          kv == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16);
    c->set_bytes =
        (size_t)c->p.len * (size_t)c->p.heads * (size_t)bench_mha_kv_dim(&s->a) * sizeof(float);
    c->n_set = bench_n_set(c, c->set_bytes);
    TRY(make_keys(c, s, err));
    return make_rest(c, s, err);
}

static kvs_status setup_mha(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    return setup(c, 0, err);
}

static kvs_status setup_wide(bench_case *c, int32_t i_label, kvs_error *err)
{
    (void)i_label;
    return setup(c, 1, err);
}

static const int64_t k_types[] = {KVS_KV_BF16, KVS_KV_F32};

#define AXES                                                                                       \
    (KVS_BENCH_Q | KVS_BENCH_HEADS | KVS_BENCH_LEN | KVS_BENCH_KV | KVS_BENCH_KERNELS |            \
     KVS_BENCH_POOL | KVS_BENCH_THREADS)

const bench_op bench_mha_op = {
    .pub = {.name = "mha",
            .about = "the last q positions of a context of len in the multi-head form of "
                     "attention, keys and values "
                     "of the type kv (bf16, f32). Own grid: 16 heads, 256 of 2048 positions",
            .axes = AXES},
    .op = KERN_OP_mha,
    .def = {.batch = 1, .q = 256, .heads = 16, .len = 2048, .dcp = 1, .kv = KVS_KV_BF16},
    .kv = {k_types, 2},
    .setup = setup_mha,
};

const bench_op bench_mha_wide_op = {
    .pub = {.name = "mha_wide",
            .about = "mha with keys of 192 + 64 dims and values of 256, not 128 + 64 and 128. Own "
                     "grid: 8 heads, 256 of 2048 positions",
            .axes = AXES},
    .op = KERN_OP_mha,
    .def = {.batch = 1, .q = 256, .heads = 8, .len = 2048, .dcp = 1, .kv = KVS_KV_BF16},
    .kv = {k_types, 2},
    .setup = setup_wide,
};
