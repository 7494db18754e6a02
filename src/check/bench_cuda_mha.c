/* bench_cuda_mha.c - attention in its multi-head form on a CUDA device: the last q positions of a context of len, with
 * expanded keys and values of 128 + 64 and 128 dims for each head (mha_wide: 192 + 64 and 256), all blocks in one call.
 *
 * Keys, values and queries repeat templates of normal values, from which the check takes those of a row. There is one
 * set: it is many times the L2.
 *
 * Work: 2 (192 + 128) operations, or 2 (256 + 256), per head and key attended, keys past a row's own left out. Bytes: expanded keys,
 * values and rope parts, queries, outputs and LSE once. The ceiling is the same number of products by a kernel that
 * does nothing else. */
#include <math.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/bench_mha.h"
#include "check/case_mha.h"

/* Values of the templates; no multiples of each other or of a row. */
enum { N_KV = 1048583, N_TYPED = 524309 };

typedef struct mha_bench {
    mha_args a;         /* pointers of the device */
    float *kv;          /* [N_KV], ...            */
    uint16_t *q, *rope; /* [N_TYPED] on the host  */
    int32_t *len;       /* [n_row]                */
} mha_bench;

static void launch(cuda_case *c, int32_t set)
{
    const mha_bench *s = c->state;
    (void)set;
    mha_args a = s->a;
    a.n_nan = NULL;
    c->b->kern.mha(&a, &c->b->queue);
}

static void products_only(cuda_case *c, int32_t set)
{
    (void)set;
    roof_cuda_products(c->flop, ((mha_bench *)c->state)->a.lse, &c->b->queue);
}

/* ---- building -------------------------------------------------------------------------------- */

/* `bytes` of the device that repeat n bytes of the host. */
static kvs_status put_tiled(cuda_case *c, size_t bytes, const void *from, size_t n, void **to,
                            kvs_error *err)
{
    TRY(cuda_case_alloc(c, bytes, to, err));
    cuda_case_tile(c, *to, (int64_t)bytes, from, (int64_t)n);
    return KVS_OK;
}

static kvs_status make_templates(cuda_case *c, mha_bench *s, kvs_error *err)
{
    s->kv = mem_alloc(N_KV * sizeof *s->kv, 0);
    s->q = mem_alloc(N_TYPED * sizeof *s->q, 0);
    s->rope = mem_alloc(N_TYPED * sizeof *s->rope, 0);
    s->len = mem_alloc((size_t)s->a.n_row * sizeof *s->len, 0);
    if (s->kv == NULL || s->q == NULL || s->rope == NULL || s->len == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    gen_f32(&c->r, s->kv, N_KV, 1.0f);
    gen_bf16(&c->r, s->q, N_TYPED, 1.5f);
    gen_bf16(&c->r, s->rope, N_TYPED, 1.0f);
    return KVS_OK;
}

static kvs_status make_inputs(cuda_case *c, mha_bench *s, kvs_error *err)
{
    mha_args *a = &s->a;
    const size_t pairs = (size_t)a->n_row * (size_t)a->n_head;
    void *p = NULL;
    const size_t q_dim = (size_t)bench_mha_q_dim(a);
    const size_t kv_dim = (size_t)bench_mha_kv_dim(a);
    c->flop = bench_mha_lengths(a, s->len);
    TRY(put_tiled(c, pairs * q_dim * sizeof *s->q, s->q, N_TYPED * sizeof *s->q, &p, err));
    a->q = p;
    TRY(put_tiled(c, (size_t)a->n_key * (size_t)a->n_head * kv_dim * sizeof *s->kv, s->kv,
                  N_KV * sizeof *s->kv, &p, err));
    a->kv = p;
    TRY(put_tiled(c, (size_t)a->n_key * ROPE * sizeof *s->rope, s->rope, N_TYPED * sizeof *s->rope,
                  &p, err));
    a->rope = p;
    const size_t len_bytes = (size_t)a->n_row * sizeof *s->len;
    TRY(put_tiled(c, len_bytes, s->len, len_bytes, &p, err));
    a->len = p;
    c->byte = (double)a->n_key * (4.0 * (double)kv_dim * a->n_head + 2.0 * ROPE) +
              (double)pairs * (2.0 * (double)q_dim + 4.0 * a->v_dim + 4.0);
    return KVS_OK;
}

static kvs_status make_outputs(cuda_case *c, mha_bench *s, kvs_error *err)
{
    mha_args *a = &s->a;
    const size_t pairs = (size_t)a->n_row * (size_t)a->n_head;
    void *p = NULL;
    TRY(cuda_case_alloc(c, pairs * (size_t)a->v_dim * sizeof(float), &p, err));
    a->out = p;
    TRY(cuda_case_alloc(c, pairs * sizeof(float), &p, err));
    a->lse = p;
    TRY(cuda_case_alloc(c, sizeof *a->n_nan, &p, err));
    a->n_nan = p;
    a->scratch_bytes = c->b->kern.mha_scratch(a, &c->b->queue);
    TRY(cuda_case_alloc(c, a->scratch_bytes, &a->scratch, err));
    dev_cuda.fill(a->scratch, 0xFF, a->scratch_bytes);
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* A (row, head) as a problem of its own on the host. */
typedef struct pair_work {
    mha_args one;
    float *kv, out[BENCH_MHA_VDIM], lse;
    uint16_t *rope, q[BENCH_MHA_NOPE + ROPE];
    int32_t len;
    double *work;
    orc_mha o;
} pair_work;

static void pair_fetch(const mha_bench *s, int32_t row, int32_t head, pair_work *w)
{
    const mha_args *a = &s->a;
    const int64_t pair = (int64_t)row * a->n_head + head;
    const int64_t q_dim = bench_mha_q_dim(a);
    const int64_t kv_dim = bench_mha_kv_dim(a);
    w->len = s->len[row];
    for (int64_t d = 0; d < q_dim; d++) {
        w->q[d] = s->q[(pair * q_dim + d) % N_TYPED];
    }
    for (int64_t key = 0; key < w->len; key++) {
        for (int64_t d = 0; d < kv_dim; d++) {
            w->kv[key * kv_dim + d] = s->kv[((key * a->n_head + head) * kv_dim + d) % N_KV];
        }
        for (int64_t d = 0; d < ROPE; d++) {
            w->rope[key * ROPE + d] = s->rope[(key * ROPE + d) % N_TYPED];
        }
    }
    dev_cuda.get(w->out, a->out + pair * a->v_dim, (size_t)a->v_dim * sizeof *w->out);
    dev_cuda.get(&w->lse, a->lse + pair, sizeof w->lse);
    w->one = *a;
    w->one.n_row = 1;
    w->one.n_head = 1;
    w->one.q = w->q;
    w->one.n_key = w->len;
    w->one.kv = w->kv;
    w->one.kv_stride_key = kv_dim;
    w->one.rope = w->rope;
    w->one.len = &w->len;
    w->one.out = w->out;
    w->one.lse = &w->lse;
}

static kvs_status compare_pairs(cuda_case *c, check_result *r, kvs_error *err)
{
    const mha_bench *s = c->state;
    const mha_args *a = &s->a;
    const check_variant v = cuda_case_variant(c);
    pair_work *w = mem_calloc(1, sizeof *w);
    const size_t n = (size_t)a->n_key;
    if (w != NULL) {
        w->kv = mem_alloc_array(n, (size_t)bench_mha_kv_dim(a) * sizeof *w->kv, 0);
        w->rope = mem_alloc_array(n, ROPE * sizeof *w->rope, 0);
        w->work = mem_alloc_array(n, 2 * sizeof *w->work, 0);
    }
    const int have = w != NULL && w->kv != NULL && w->rope != NULL && w->work != NULL;
    for (int i = 0; have && i < 6; i++) {
        const int32_t row = i == 0 ? 0 : i == 1 ? a->n_row - 1 : gen_pick(&c->r, a->n_row);
        const int32_t head = i == 0 ? 0 : i == 1 ? a->n_head - 1 : gen_pick(&c->r, a->n_head);
        pair_fetch(s, row, head, w);
        orc_mha_head(&w->one, 0, 0, NULL, -INFINITY, w->work, &w->o);
        const mha_expect e = {.o = &w->o, .spread = 1};
        mha_compare_head(&w->one, &e, 0, 0, &v, r);
    }
    if (w != NULL) {
        mem_free(w->kv);
        mem_free(w->rope);
        mem_free(w->work);
        mem_free(w);
    }
    return have ? KVS_OK : err_set(err, KVS_NOMEM, "no memory to check a row");
}

static kvs_status check(cuda_case *c, check_result *r, kvs_error *err)
{
    const mha_bench *s = c->state;
    const mha_args *a = &s->a;
    const size_t pairs = (size_t)a->n_row * (size_t)a->n_head;
    uint64_t n_nan = 0;
    dev_cuda.fill(a->out, 0xFF, pairs * (size_t)a->v_dim * sizeof(float));
    dev_cuda.fill(a->lse, 0xFF, pairs * sizeof(float));
    dev_cuda.fill(a->n_nan, 0, sizeof n_nan);
    c->b->kern.mha(a, &c->b->queue);
    dev_queue_sync(&c->b->queue);
    TRY(dev_queue_check(&c->b->queue, err));
    dev_cuda.get(&n_nan, a->n_nan, sizeof n_nan);
    cmp_i64(r, (coord){"n_nan", 0, -1, -1}, (int64_t)n_nan, 0);
    return compare_pairs(c, r, err);
}

static void free_mha(cuda_case *c)
{
    mha_bench *s = c->state;
    mem_free(s->kv);
    mem_free(s->q);
    mem_free(s->rope);
    mem_free(s->len);
}

static kvs_status setup(cuda_case *c, int32_t wide, kvs_error *err)
{
    mha_bench *s = mem_calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a case");
    }
    c->state = s;
    c->free_state = free_mha;
    c->launch = launch;
    c->floor = products_only;
    c->floor_products = 1;
    c->check = check;
    c->kv = kv_fmt_name(c->p.kv);
    c->n_set = 1;
    snprintf(c->label, sizeof c->label, "%d of %d h%d", (int)c->p.q, (int)c->p.len,
             (int)c->p.heads);
    s->a = bench_mha_args(c->p.q, c->p.heads, (int32_t)c->p.len, wide, KVS_DTYPE_BF16);
    TRY(make_templates(c, s, err));
    TRY(make_inputs(c, s, err));
    return make_outputs(c, s, err);
}

kvs_status cuda_setup_mha(cuda_case *c, kvs_error *err)
{
    return setup(c, 0, err);
}

kvs_status cuda_setup_mha_wide(cuda_case *c, kvs_error *err)
{
    return setup(c, 1, err);
}
