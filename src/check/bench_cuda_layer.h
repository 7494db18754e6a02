/* check/bench_cuda_layer.h - one layer of attention over ranks with a CUDA device each: what its files share.
 *
 * bench_cuda_layer_make.c builds it for both ways of cutting the context, bench_cuda_layer_check.c compares what they
 * give, bench_cuda_layer.c records and times it. */
#ifndef CHECK_BENCH_CUDA_LAYER_H
#define CHECK_BENCH_CUDA_LAYER_H

#include "check/bench.h"
#include "check/bench_cuda.h"
#include "check/comm_cuda.h"

enum {
    LAYER_INDEX_HEAD = 64,
    LAYER_KEY = 65536,
    LAYER_TRASH = 128 << 20 /* bytes that fills keep a device busy with */
};

#define LAYER_K_SCALE 0.015f /* of per-tensor rows */

/* A layer on one rank, the context cut over dcp ranks: 1, or as many as there are. */
typedef struct rank_layer {
    shard_geom geom;
    index_select_args select;
    topk_merge_args cut;
    localise_args local;
    attn_args attn;
} rank_layer;

typedef struct layer_bench {
    cuda_bench *b;
    const cuda_point *p;
    gpu_world w;
    int32_t n, n_row, heads, local; /* heads of all ranks and of one */
    int64_t list_bytes;             /* a rank's candidates: ids, scores, counts */
    rank_layer one[WIRE_MAX_RANK], part[WIRE_MAX_RANK];
    exchange_args start[WIRE_MAX_RANK], send[WIRE_MAX_RANK];
    exchange_merge_args back[WIRE_MAX_RANK];
    void *lists[WIRE_MAX_RANK];     /* candidates of all ranks */
    void *moved_out[WIRE_MAX_RANK]; /* NCCL's partials, sent and received */
    void *moved_in[WIRE_MAX_RANK];
    void *trash[WIRE_MAX_RANK];
    dev_graph graph[WIRE_MAX_RANK];
    uint8_t *rows; /* [CUDA_ATTN_ROWS] of the cache, on the host */
    uint8_t *keys; /* [n_key] index keys and their scales, page by page */
    int64_t n_key; /* as many as there are, but not more than LAYER_KEY */
    uint16_t *q;   /* [n_row, heads, 576] */
    uint8_t *index_q;
    float *index_w;
} layer_bench;

/* Rows attend what an indexer selects; else all before them. */
static inline int layer_is_sparse(const layer_bench *s)
{
    return s->p->topk > 0;
}

/* Elements of a rank's result. */
static inline size_t layer_out_n(const layer_bench *s)
{
    return (size_t)s->n_row * (size_t)s->local * KVS_LATENT_DIM;
}

/* Of partials and LSE that go to one rank. */
static inline int64_t layer_part_bytes(const layer_bench *s)
{
    return (int64_t)s->n_row * s->local * (KVS_LATENT_DIM + 1) * 4;
}

/* Inputs, buffers and args of all ranks, after the group has been opened; gives bf16. */
kvs_status layer_make(layer_bench *s, kvs_error *err);
void layer_free(layer_bench *s);
/* What both cuts give: f32 to look at, or bf16 as the model takes it. */
void layer_set_out(layer_bench *s, int32_t type);
/* Selections and f32 results of both cuts, which have just been made. */
kvs_status layer_compare(layer_bench *s, check_result *res, kvs_error *err);

#endif
