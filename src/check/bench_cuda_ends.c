/* bench_cuda_ends.c - the pool's rows, queries and results of attention cases on a CUDA device, and how a case is
 * checked (bench_cuda.h). */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/case_attn.h"
#include "num/fmt.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM };

void cuda_scales_to_pow2(uint8_t *row)
{
    for (int t = 0; t < 4; t++) {
        uint32_t u;
        memcpy(&u, row + KVS_LATENT_DIM + 4 * t, sizeof u);
        u &= 0x7F800000u;
        memcpy(row + KVS_LATENT_DIM + 4 * t, &u, sizeof u);
    }
}

kvs_status cuda_attn_rows(cuda_case *c, attn_args *a, void (*change)(uint8_t *row), uint8_t **rows,
                          kvs_error *err)
{
    const int64_t n = CUDA_ATTN_ROWS * a->row_stride;
    void *p = NULL;
    *rows = mem_alloc((size_t)n, 0);
    TRY(cuda_case_alloc(c, (size_t)(a->n_slot * a->row_stride), &p, err));
    if (*rows == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the rows of a case");
    }
    for (int64_t i = 0; i < CUDA_ATTN_ROWS; i++) {
        uint8_t *row = *rows + i * a->row_stride;
        gen_row(&c->r, a->fmt, a->k_scale, row, 1.0f);
        if (change != NULL && a->fmt == KVS_KV_FP8_DS_MLA) {
            change(row);
        }
    }
    cuda_case_tile(c, p, a->n_slot * a->row_stride, *rows, n);
    a->kv = p;
    return KVS_OK;
}

int32_t cuda_attn_out(const cuda_point *p)
{
    return p->dcp == 1 && p->invalid == 0.0 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32;
}

size_t cuda_attn_out_size(const attn_args *a)
{
    return a->out_type == KVS_DTYPE_BF16 ? sizeof(uint16_t) : sizeof(float);
}

kvs_status cuda_attn_ends(cuda_case *c, attn_args *a, int32_t n_set, uint16_t **q, kvs_error *err)
{
    const size_t heads = (size_t)n_set * (size_t)a->n_row * (size_t)a->n_head;
    const size_t q_bytes = heads * DIM * sizeof **q;
    void *p = NULL;
    *q = mem_alloc(CUDA_ATTN_Q * sizeof **q, 0);
    if (*q == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the queries of a case");
    }
    gen_bf16(&c->r, *q, CUDA_ATTN_Q, 1.5f);
    TRY(cuda_case_alloc(c, q_bytes, &p, err));
    cuda_case_tile(c, p, (int64_t)q_bytes, *q, CUDA_ATTN_Q * (int64_t)sizeof **q);
    a->q = p;
    a->q_type = KVS_DTYPE_BF16;
    a->q_stride_head = DIM;
    a->q_stride_row = (int64_t)a->n_head * DIM;
    a->softmax_scale = 1.0f / 24.0f; /* 576^-1/2 */
    /* the check has f32 of one set */
    const size_t one = heads / (size_t)n_set * VDIM * sizeof(float);
    const size_t all = heads * VDIM * cuda_attn_out_size(a);
    TRY(cuda_case_alloc(c, all > one ? all : one, &p, err));
    a->out = p;
    a->out_stride_head = VDIM;
    a->out_stride_row = (int64_t)a->n_head * VDIM;
    TRY(cuda_case_alloc(c, heads * sizeof(float), &p, err));
    a->lse = p;
    TRY(cuda_case_alloc(c, sizeof(attn_stats), &p, err));
    a->stats = p;
    a->scratch_bytes = c->b->kern.attn_scratch(a, &c->b->queue);
    TRY(cuda_case_alloc(c, a->scratch_bytes, &a->scratch, err));
    dev_cuda.fill(a->scratch, 0xFF, a->scratch_bytes);
    return KVS_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* Runs the case once, its results in a type. */
static kvs_status run_as(cuda_case *c, const attn_args *set0, int32_t type, attn_stats *stats,
                         kvs_error *err)
{
    attn_args a = *set0;
    const size_t heads = (size_t)a.n_row * (size_t)a.n_head;
    a.out_type = type;
    dev_cuda.fill(a.out, 0xFF, heads * VDIM * cuda_attn_out_size(&a));
    dev_cuda.fill(a.lse, 0xFF, heads * sizeof(float));
    dev_cuda.fill(a.stats, 0, sizeof *stats);
    c->b->kern.attn(&a, &c->b->queue);
    dev_queue_sync(&c->b->queue);
    TRY(dev_queue_check(&c->b->queue, err));
    dev_cuda.get(stats, a.stats, sizeof *stats);
    return KVS_OK;
}

/* bf16 results are the f32 ones, rounded once. */
static kvs_status compare_bf16(cuda_case *c, const attn_args *set0, const int32_t *rows, int32_t n,
                               check_result *r, kvs_error *err)
{
    const size_t row_n = (size_t)set0->n_head * VDIM;
    float *f = mem_alloc_array((size_t)n * row_n, sizeof *f, 0);
    uint16_t *h = mem_alloc_array(row_n, sizeof *h, 0);
    attn_stats stats;
    kvs_status st = f != NULL && h != NULL
                        ? KVS_OK
                        : err_set(err, KVS_NOMEM, "no memory to check results in bf16");
    for (int32_t i = 0; i < n && st == KVS_OK; i++) {
        dev_cuda.get(f + (size_t)i * row_n, set0->out + (size_t)rows[i] * row_n, row_n * sizeof *f);
    }
    if (st == KVS_OK) {
        st = run_as(c, set0, KVS_DTYPE_BF16, &stats, err);
    }
    for (int32_t i = 0; i < n && st == KVS_OK; i++) {
        dev_cuda.get(h, (const uint16_t *)(const void *)set0->out + (size_t)rows[i] * row_n,
                     row_n * sizeof *h);
        for (size_t j = 0; j < row_n; j++) {
            cmp_bits(r, (coord){"out as bf16", rows[i], (int64_t)(j / VDIM), (int64_t)(j % VDIM)},
                     bf16_to_f32((bf16){h[j]}), bf16_round(f[(size_t)i * row_n + j]));
        }
    }
    mem_free(f);
    mem_free(h);
    return st;
}

kvs_status cuda_attn_check(cuda_case *c, const attn_args *set0, int64_t n_key, const int32_t *rows,
                           int32_t n, cuda_row_compare *compare, check_result *r, kvs_error *err)
{
    attn_stats stats;
    TRY(run_as(c, set0, KVS_DTYPE_F32, &stats, err));
    cmp_i64(r, (coord){"n_key", 0, -1, -1}, (int64_t)stats.n_key, n_key);
    cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)stats.n_bad_id, 0);
    for (int32_t i = 0; i < n; i++) {
        TRY(compare(c, rows[i], r, err));
    }
    return set0->out_type == KVS_DTYPE_BF16 ? compare_bf16(c, set0, rows, n, r, err) : KVS_OK;
}
