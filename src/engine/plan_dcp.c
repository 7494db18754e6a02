/* engine/plan_dcp.c - what the attention layer sends and allocates, by the settings alone.
 *
 * Per layer and token a rank sends, to each of the N - 1 other ranks of its DCP group:
 *   its heads' queries (all-gather over heads); one merged partial of each of the other's heads
 *   with its LSE (a2a), or its share of a reduce-scatter with the LSE of all the group's heads
 *   (ag_rs); and in layers with an indexer its topk candidates, a score and an id each, with
 *   their count. */
#include "engine/plan.h"

enum { SCORE_BYTES = 4, ID_BYTES = 4, COUNT_BYTES = 4, F32_BYTES = 4 };

static int64_t q_elem_bytes(const plan_shape *s)
{
    return s->kv == KVS_KV_F32 ? 4 : 2;
}

kvs_plan_exchange plan_exchange(const plan_shape *s, kvs_exchange how, int32_t n_row)
{
    const int64_t peers = s->dcp - 1;
    const int64_t heads = s->n_head / s->tp;
    kvs_plan_exchange x = {0, 0, 0, 0};
    x.q = n_row * heads * KVS_ROW_DIM * q_elem_bytes(s) * peers;
    x.partial = n_row * heads * KVS_LATENT_DIM * F32_BYTES * peers;
    x.lse = n_row * heads * F32_BYTES * peers * (how == KVS_EXCHANGE_AG_RS ? s->dcp : 1);
    if (s->topk > 0) {
        x.selection = n_row * (s->topk * (SCORE_BYTES + ID_BYTES) + COUNT_BYTES) * peers;
    }
    return x;
}

int64_t plan_workspace_bytes(const plan_shape *s)
{
    const int64_t rows = s->max_rows;
    const int64_t heads = (int64_t)s->n_head / s->tp * s->dcp;
    const int64_t q = rows * heads * KVS_ROW_DIM * q_elem_bytes(s);
    const int64_t partial = rows * heads * (KVS_LATENT_DIM + 1) * F32_BYTES;
    const int64_t candidates = rows * s->topk * (SCORE_BYTES + ID_BYTES) * (s->dcp + 1);
    const int64_t slots = rows * s->topk * ID_BYTES;
    return q + 2 * partial + candidates + slots;
}
