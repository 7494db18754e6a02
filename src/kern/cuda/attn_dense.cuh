/* kern/cuda/attn_dense.cuh - what the kernels of dense attention on sm_90a share: the division of work.
 *
 * An op is two launches, three with counters: the main kernel (attn_dense_sm90.cu) and the merge of rows
 * that more than one thread block worked on (attn_dense.cu). Lengths are known on the device alone: every
 * block finds its share of the work from row_req and kv_len.
 *
 * Items, costs and parts: attn_dense_walk.h.
 *
 * The rows of an item in groups of `rows`, and heads in groups of `heads`, with rows x heads at most 64, are
 * the M of the products: one group of rows and heads to a thread block. The `n_side` blocks of a part, one
 * per group, lie side by side and read the same pages at about the same time.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_CUH

#include <cuda.h>
#include <stdint.h>

#include "kern/cuda/attn_dense_walk.h"

enum {
    DENSE_M = 64,       /* rows x heads of a thread block, at most */
    DENSE_MAX_SPAN = 8, /* rows of an item, at most                */
    DENSE_VDIM = 512,
    DENSE_DIM = 576
};

struct dense_params {
    CUtensorMap map;      /* of the pool: [page][64][row's values or codes]                  */
    CUtensorMap rope_map; /* of the ropes of fp8_ds_mla rows                                  */
    /* keys */
    const uint8_t *kv;
    int64_t page_stride,
        row_stride; /* bytes                                                        */
    int32_t n_page;
    float k_scale;
    const int32_t *table;
    int64_t table_stride; /* elements                                                     */
    /* queries: [n_row, n_head, 576] bf16 */
    const uint16_t *q;
    int64_t q_stride_row,
        q_stride_head;    /* elements                                                 */
    const float *q_scale; /* [n_row, n_head] or NULL                                  */
    float scale_log2;     /* softmax scale x log2(e)                                  */
    /* division of work */
    dense_work work;
    int32_t n_head;
    int32_t heads, rows; /* of a group of heads, of a group of rows                           */
    int32_t n_head_group, n_side;
    /* results */
    void *out; /* [n_row, n_head, 512] f32 or bf16                              */
    int64_t out_stride_row,
        out_stride_head;        /* elements                                             */
    int32_t out_bf16, out_wide; /* wide: pairs are aligned                              */
    float *lse;                 /* [n_row, n_head], natural log                         */
    float *part_out;            /* [2 n_part, span, n_head, 512]                        */
    float *part_lse;            /* the same without 512; base 2                         */
    int4 *cut; /* [n_part] {row, rows, last part, 0} of the item that goes on, or {-1}      */
    unsigned long long *n_nan; /* may be NULL                                                  */
};

/* kind: the rows of the pool. */
enum { DENSE_BF16, DENSE_FP8, DENSE_DS };
cudaError_t attn_dense_main_launch(const dense_params &p, int kind, cudaStream_t stream);

#endif
