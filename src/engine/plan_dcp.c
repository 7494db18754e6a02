/* engine/plan_dcp.c - what the attention layer sends, by the settings alone.
 *
 * Per layer and token a rank sends, to each of the N - 1 other ranks of its DCP group:
 *   its heads' queries (all-gather over heads); one merged partial of each of the other's heads
 *   with its LSE (a2a), or its share of a reduce-scatter with the LSE of all the group's heads
 *   (ag_rs); and in layers with an indexer its candidates, a score and an id each, with their
 *   count. A rank brings topk candidates, or as many as its shard holds. */
#include "engine/plan.h"

#include "kvspan/dcp.h"
#include "shard/shard.h"

enum { SCORE_BYTES = 4, ID_BYTES = 4, COUNT_BYTES = 4, F32_BYTES = 4 };

static int64_t q_elem_bytes(const plan_shape *s)
{
    return s->kv == KVS_KV_F32 ? 4 : 2;
}

/* Candidates of one rank for a row at the end of a sequence of max_len tokens. */
static int64_t candidates(const plan_shape *s)
{
    const shard_geom g = {.n = s->dcp, .i = s->interleave, .rank = 0};
    const int64_t most = shard_len_max(g, s->max_len);
    return most < s->topk ? most : s->topk;
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
        x.selection = n_row * (candidates(s) * (SCORE_BYTES + ID_BYTES) + COUNT_BYTES) * peers;
    }
    return x;
}
