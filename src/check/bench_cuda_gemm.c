/* bench_cuda_gemm.c - products with a weight matrix on a CUDA device, as keys and values of heads are made from latents:
 * q rows of len inputs times weights, bf16 or e4m3 with block scales, of 256 outputs for each head.
 *
 * Inputs and weights repeat templates, from which the check takes those of an output. There is one set: outputs are
 * many times the L2.
 *
 * Work: 2 operations per row and weight. Bytes: inputs, weights, scales and outputs once. The ceiling is the same number
 * of products by a kernel that does nothing else. */
#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "num/fmt.h"

enum {
    OUT_HEAD = 256,
    N_SAMPLE = 24,
    N_X = 524309,
    N_W = 1048583 /* no multiples of each other or of a row */
};

typedef struct gemm_bench {
    gemm_args a;  /* pointers of the device        */
    uint16_t *x;  /* [N_X], ... on the host        */
    uint8_t *w;   /* [N_W], elements of the weight */
    float *scale; /* all                           */
    int64_t n_scale;
    int32_t size; /* of an element of w            */
} gemm_bench;

static void launch(cuda_case *c, int32_t set)
{
    const gemm_bench *s = c->state;
    (void)set;
    c->b->kern.gemm(&s->a, &c->b->queue);
}

static void products_only(cuda_case *c, int32_t set)
{
    (void)set;
    roof_cuda_products(c->flop, ((gemm_bench *)c->state)->a.y, &c->b->queue);
}

/* ---- building -------------------------------------------------------------------------------- */

static kvs_status make_templates(cuda_case *c, gemm_bench *s, kvs_error *err)
{
    s->x = mem_alloc(N_X * sizeof *s->x, 0);
    s->w = mem_alloc((size_t)N_W * (size_t)s->size, 0);
    s->scale = mem_alloc((size_t)s->n_scale * sizeof *s->scale, 0);
    if (s->x == NULL || s->w == NULL || s->scale == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    gen_bf16(&c->r, s->x, N_X, 1.0f);
    if (s->size == 1) {
        gen_e4m3(&c->r, s->w, N_W);
    } else {
        gen_bf16(&c->r, (uint16_t *)(void *)s->w, N_W, 0.05f);
    }
    for (int64_t i = 0; i < s->n_scale; i++) {
        s->scale[i] = 1e-3f * (1.0f + (float)gen_pick(&c->r, 1000) / 1000.0f);
    }
    return KVS_OK;
}

static kvs_status put(cuda_case *c, size_t bytes, const void *from, size_t n, const void **to,
                      kvs_error *err)
{
    void *p = NULL;
    TRY(cuda_case_alloc(c, bytes, &p, err));
    cuda_case_tile(c, p, (int64_t)bytes, from, (int64_t)n);
    *to = p;
    return KVS_OK;
}

static kvs_status make(cuda_case *c, gemm_bench *s, kvs_error *err)
{
    gemm_args *a = &s->a;
    const size_t n_x = (size_t)a->n_row * (size_t)a->w.n_in;
    const size_t n_w = (size_t)a->w.n_out * (size_t)a->w.n_in;
    const size_t n_y = (size_t)a->n_row * (size_t)a->w.n_out;
    const size_t scale_bytes = (size_t)s->n_scale * sizeof(float);
    const void *p = NULL;
    void *q = NULL;
    TRY(make_templates(c, s, err));
    TRY(put(c, n_x * 2, s->x, N_X * 2, &a->x, err));
    TRY(put(c, n_w * (size_t)s->size, s->w, (size_t)N_W * (size_t)s->size, &a->w.data, err));
    TRY(put(c, scale_bytes, s->scale, scale_bytes, &p, err));
    a->w.scale = p;
    TRY(cuda_case_alloc(c, n_y * sizeof(float), &q, err));
    a->y = q;
    a->scratch_bytes = c->b->kern.gemm_scratch(a, &c->b->queue);
    TRY(cuda_case_alloc(c, a->scratch_bytes, &a->scratch, err));
    dev_cuda.fill(a->scratch, 0xFF, a->scratch_bytes);
    c->flop = 2.0 * (double)n_x * a->w.n_out;
    c->byte = 2.0 * (double)n_x + (double)n_w * s->size + 4.0 * (double)n_y;
    c->byte += s->size == 1 ? 4.0 * (double)s->n_scale : 0.0;
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* One output as a problem of its own on the host; x and w hold a row. */
static void sample(const cuda_case *c, int32_t row, int32_t out, uint16_t *x, uint8_t *w,
                   check_result *r)
{
    const gemm_bench *s = c->state;
    const int64_t n = s->a.w.n_in;
    const check_variant v = cuda_case_variant(c);
    float y = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        x[i] = s->x[(row * n + i) % N_X];
        memcpy(w + i * s->size, s->w + (out * n + i) % N_W * s->size, (size_t)s->size);
    }
    dev_cuda.get(&y, s->a.y + row * s->a.y_stride + out, sizeof y);
    gemm_args one = s->a;
    one.n_row = 1;
    one.x = x;
    one.y = &y;
    one.w.data = w;
    one.w.scale = s->scale;
    one.w.row0 = out;
    one.w.n_out = 1;
    gemm_compare_one(&one, 0, 0, 0, &v, r);
}

static kvs_status check(cuda_case *c, check_result *r, kvs_error *err)
{
    const gemm_bench *s = c->state;
    const gemm_args *a = &s->a;
    dev_cuda.fill(a->y, 0xFF, (size_t)a->n_row * (size_t)a->w.n_out * sizeof(float));
    c->b->kern.gemm(a, &c->b->queue);
    dev_queue_sync(&c->b->queue);
    TRY(dev_queue_check(&c->b->queue, err));
    uint16_t *x = mem_alloc_array((size_t)a->w.n_in, sizeof *x, 0);
    uint8_t *w = mem_alloc_array((size_t)a->w.n_in, (size_t)s->size, 0);
    const int have = x != NULL && w != NULL;
    for (int i = 0; have && i < N_SAMPLE; i++) {
        const int32_t row = i == 0 ? 0 : i == 1 ? a->n_row - 1 : gen_pick(&c->r, a->n_row);
        const int32_t out = i == 0 ? 0 : i == 1 ? a->w.n_out - 1 : gen_pick(&c->r, a->w.n_out);
        sample(c, row, out, x, w, r);
    }
    mem_free(x);
    mem_free(w);
    return have ? KVS_OK : err_set(err, KVS_NOMEM, "no memory to check a row");
}

static void free_gemm(cuda_case *c)
{
    gemm_bench *s = c->state;
    mem_free(s->x);
    mem_free(s->w);
    mem_free(s->scale);
}

kvs_status cuda_setup_gemm(cuda_case *c, kvs_error *err)
{
    gemm_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    const int codes = c->p.kv == KVS_KV_FP8;
    gemm_args *a = &s->a;
    c->state = s;
    c->free_state = free_gemm;
    c->launch = launch;
    c->floor = products_only;
    c->floor_products = 1;
    c->check = check;
    c->kv = kv_fmt_name(c->p.kv);
    c->n_set = 1;
    a->w.type = codes ? GEMM_FP8 : GEMM_BF16;
    a->w.n_out = c->p.heads * OUT_HEAD;
    a->w.n_in = (int32_t)c->p.len;
    a->w.stride = a->w.n_in;
    a->w.scale_stride = shard_cdiv(a->w.n_in, GEMM_BLOCK);
    a->n_row = c->p.q;
    a->n_batch = 1;
    a->x_stride = a->w.n_in;
    a->y_stride = a->w.n_out;
    s->size = codes ? 1 : 2;
    s->n_scale = shard_cdiv(a->w.n_out, GEMM_BLOCK) * a->w.scale_stride;
    snprintf(c->label, sizeof c->label, "%d x %dx%d", (int)c->p.q, (int)a->w.n_out, (int)a->w.n_in);
    return make(c, s, err);
}
