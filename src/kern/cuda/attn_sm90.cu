/* attn_sm90.cu - the op attn on sm_90a: lists of slots go to the sparse kernels, block tables to the dense
 * ones, or in the deterministic mode to the sparse ones through lists made of them. And the form of it that sends. */
#include "kern/cuda/attn_dense.h"
#include "kern/cuda/attn_sparse.h"
#include "kern/cuda/attn_tables.h"
#include "kern/cuda/cuda.h"
#include "kern/exchange.h"

static const char *refuses(const attn_args *a, int deterministic)
{
    if (a->slots != NULL)
        return attn_sparse_refuses(a);
    return deterministic ? attn_tables_refuses(a) : attn_dense_refuses(a);
}

/* The most keys of a lane that a list can have, for the deterministic mode. */
static int64_t lane_most(const attn_args *a, int deterministic)
{
    return !deterministic ? 0 : a->slots_stride > 1 ? a->slots_stride : 1;
}

const char *attn_refuses_sm90(const void *args)
{
    return refuses((const attn_args *)args, 0);
}

const char *attn_det_refuses_sm90(const void *args)
{
    return refuses((const attn_args *)args, 1);
}

static void op_enqueue(const attn_args *a, int deterministic, const attn_send *to, dev_queue *q)
{
    if (cuda_refused(q, refuses(a, deterministic)) || a->n_row == 0)
        return;
    if (a->slots != NULL)
        dev_queue_fail_cuda(q,
                            (int)attn_sparse_launch(a, lane_most(a, deterministic), q->n_sm, to,
                                                    cuda_stream(q)),
                            "attn_sparse");
    else if (deterministic)
        dev_queue_fail_cuda(q, (int)attn_tables_launch(a, q->n_sm, to, cuda_stream(q)), "attn_tables");
    else
        dev_queue_fail_cuda(q, (int)attn_dense_launch(a, q->n_sm, cuda_stream(q)), "attn_dense");
}

void attn_sm90(const attn_args *a, dev_queue *q)
{
    op_enqueue(a, 0, NULL, q);
}

void attn_sm90_det(const attn_args *a, dev_queue *q)
{
    op_enqueue(a, 1, NULL, q);
}

void attn_send_sm90(const attn_args *a, const wire *w, int32_t deterministic, dev_queue *q)
{
    if (cuda_refused(q, attn_send_refuses(a, w, deterministic)))
        return;
    const int32_t local = a->n_head / w->n_rank;
    const attn_send to = {*w, 0, local, exchange_merge_works(a->n_row, a->n_head, w->n_rank),
                          (uint32_t)((int64_t)a->n_row * local)};
    op_enqueue(a, deterministic, &to, q);
}

size_t attn_scratch_sm90(const attn_args *a, const dev_queue *q)
{
    return a->slots != NULL ? attn_sparse_scratch(a, lane_most(a, 0), q->n_sm)
                            : attn_dense_scratch(a, q->n_sm);
}

size_t attn_scratch_sm90_det(const attn_args *a, const dev_queue *q)
{
    return a->slots != NULL ? attn_sparse_scratch(a, lane_most(a, 1), q->n_sm)
                            : attn_tables_scratch(a, q->n_sm);
}
