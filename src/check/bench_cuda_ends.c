/* bench_cuda_ends.c - the pool's rows, queries and results of attention cases on a CUDA device (bench_cuda.h). */
#include "base/err.h"
#include "base/mem.h"
#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/case_attn.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM };

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
    TRY(cuda_case_alloc(c, heads * VDIM * sizeof(float), &p, err));
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
