/* check/bench_gemm.c - products with a weight matrix: few rows, bound by the reading of weights,
 * and many, bound by arithmetic.
 *
 * A case is a shape, outputs x inputs, with batch x q rows of x. A set is a weight matrix of its
 * own; x and y stay where they are. Bytes: weights, scales, x and y once. Operations: 2 per row
 * and weight. */
#include "check/bench.h"

#include <string.h>

static const struct gemm_dims {
    int32_t n_out, n_in;
} k_dims[] = {{2048, 7168}, {7168, 2048}, {576, 7168}};

static const char *const k_label[] = {"2048x7168", "7168x2048", "576x7168"};

enum { N_DIMS = sizeof k_dims / sizeof *k_dims };

typedef struct gemm_state {
    gemm_args a;
    uint8_t *w; /* [n_set][set_bytes] */
} gemm_state;

static kvs_status call_gemm(bench_case *c, int32_t set, kvs_error *err)
{
    (void)err;
    const gemm_state *s = c->state;
    gemm_args a = s->a;
    a.w.data = s->w + (size_t)set * c->set_bytes;
    c->run->kern.gemm(&a, &c->run->queue);
    return KVS_OK;
}

static kvs_status check_gemm(bench_case *c, check_result *r, kvs_error *err)
{
    const gemm_state *s = c->state;
    TRY(call_gemm(c, 0, err));
    gemm_args a = s->a;
    a.w.data = s->w;
    const check_variant v = bench_variant(c);
    for (int32_t i = 0; i < 16; i++) {
        const int64_t row = i == 0 ? a.n_row - 1 : gen_pick(&c->r, a.n_row);
        const int64_t out = i == 0 ? a.w.n_out - 1 : gen_pick(&c->r, a.w.n_out);
        gemm_compare_one(&a, 0, row, out, &v, r);
    }
    return KVS_OK;
}

/* Many matrices from the values of one stretch. */
static kvs_status make_weights(bench_case *c, gemm_state *s, kvs_error *err)
{
    const gemm_mat *w = &s->a.w;
    const size_t size = w->type == GEMM_F32 ? 4 : w->type == GEMM_BF16 ? 2 : 1;
    const size_t all = (size_t)c->n_set * c->set_bytes;
    const size_t own = (size_t)1 << 20 < all ? (size_t)1 << 20 : all;
    void *p = NULL;
    TRY(bench_alloc(c, all, &p, err));
    s->w = p;
    if (w->type == GEMM_FP8) {
        gen_e4m3(&c->r, s->w, (int64_t)own);
    } else {
        gen_any(&c->r, s->w, w->type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16, 0,
                (int64_t)(own / size), 0.05f);
    }
    for (size_t at = own; at < all; at += own) {
        memcpy(s->w + at, s->w, all - at < own ? all - at : own);
    }
    return KVS_OK;
}

static kvs_status setup_gemm(bench_case *c, int32_t i_label, kvs_error *err)
{
    const int32_t type = c->p.kv == KVS_KV_F32    ? GEMM_F32
                         : c->p.kv == KVS_KV_BF16 ? GEMM_BF16
                                                  : GEMM_FP8;
    if (c->p.kv == KVS_KV_FP8_DS_MLA) {
        return bench_skip(c, "weights are fp8, bf16 or f32");
    }
    void *p = NULL;
    TRY(bench_alloc(c, sizeof(gemm_state), &p, err));
    gemm_state *s = p;
    c->state = s;
    gemm_args *a = &s->a;
    gemm_mat *w = &a->w;
    const int64_t size_w = type == GEMM_F32 ? 4 : type == GEMM_BF16 ? 2 : 1;
    const int64_t size_x = type == GEMM_F32 ? 4 : 2;
    w->type = type;
    w->n_out = k_dims[i_label].n_out;
    w->n_in = k_dims[i_label].n_in;
    w->stride = w->n_in;
    w->scale_stride = w->n_in / GEMM_BLOCK;
    a->n_row = c->p.batch * c->p.q;
    a->n_batch = 1;
    a->x_stride = w->n_in;
    a->y_stride = w->n_out;
    c->set_bytes = (size_t)(w->n_out * (int64_t)w->n_in * size_w);
    c->n_set = bench_n_set(c, c->set_bytes);
    TRY(make_weights(c, s, err));
    const int64_t n_scale = shard_cdiv(w->n_out, GEMM_BLOCK) * w->scale_stride;
    TRY(bench_alloc(c, (size_t)n_scale * sizeof(float), &p, err));
    w->scale = p;
    for (int64_t i = 0; i < n_scale; i++) {
        ((float *)p)[i] = 1e-3f * (1.0f + (float)gen_pick(&c->r, 1000) / 1000.0f);
    }
    const int64_t n_x = (int64_t)a->n_row * w->n_in;
    TRY(bench_alloc(c, (size_t)(n_x * size_x), &p, err));
    gen_any(&c->r, p, type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16, 0, n_x, 1.0f);
    a->x = p;
    const int64_t n_y = (int64_t)a->n_row * w->n_out;
    TRY(bench_alloc(c, (size_t)n_y * sizeof(float), &p, err));
    a->y = p;
    TRY(bench_scratch(c, c->run->kern.gemm_scratch(a, &c->run->queue), &a->scratch,
                      &a->scratch_bytes, err));
    c->flop = 2.0 * (double)a->n_row * (double)w->n_out * (double)w->n_in;
    c->byte = (double)c->set_bytes + (double)(n_x * size_x) + 4.0 * (double)n_y;
    c->byte += type == GEMM_FP8 ? 4.0 * (double)n_scale : 0.0;
    c->kv = kv_fmt_name(c->p.kv);
    c->call = call_gemm;
    c->check = check_gemm;
    return KVS_OK;
}

static const int64_t k_rows[] = {1, 8, 512};
static const int64_t k_types[] = {KVS_KV_FP8, KVS_KV_BF16, KVS_KV_F32};

const bench_op bench_gemm_op = {
    .pub = {.name = "gemm",
            .about = "batch x q rows times weights of the format kv (fp8, bf16, f32), outputs x "
                     "inputs 2048x7168, 7168x2048 and 576x7168. Own grid: batch 1, 8, 512, q 1",
            .axes = KVS_BENCH_BATCH | KVS_BENCH_Q | KVS_BENCH_KV | KVS_BENCH_KERNELS |
                    KVS_BENCH_POOL | KVS_BENCH_THREADS},
    .op = KERN_OP_gemm,
    .def = {.batch = 1, .q = 1},
    .labels = k_label,
    .n_label = N_DIMS,
    .batch = {k_rows, 3},
    .kv = {k_types, 3},
    .setup = setup_gemm,
};
