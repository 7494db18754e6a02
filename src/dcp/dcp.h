/* dcp/dcp.h - attention and selection across the shards of one DCP group.
 *
 * Owns: the resolved set-up of one rank, its plan, its selection and its workspaces.
 *
 * Invariants: (1) everything is allocated by dcp_open; plan, write, select and attend allocate nothing;
 * (2) the plan is made of integers that are the same on every rank except what shard.h localises, and `run`
 * functions decide nothing from data; (3) every rank of the group enters every collective with sizes that
 * follow from the set-up and the plan only; (4) rows are handled in chunks of chunk_rows, and no result
 * depends on that number.
 */
#ifndef KVS_DCP_DCP_H
#define KVS_DCP_DCP_H

#include "base/pool.h"
#include "comm/comm.h"
#include "kern/kern.h"
#include "kv/cache.h"
#include "kvspan/dcp.h"
#include "shard/shard.h"

enum {
    DCP_CHUNK_COLUMNS = 8192, /* (row, head) pairs of one exchange, at least one row                  */
    DCP_SCORE_COLUMNS = 8192, /* keys scored before the running top-k takes them in                    */
    DCP_SCORE_ROWS = 64,      /* rows scored together                                                  */
    DCP_CONTEXT_BLOCK = 512,  /* positions folded at a time by KVS_ATTEND_CONTEXT                      */
    DCP_NO_LAYER = INT32_MIN  /* to dcp_check_cache: no layer of this kind is meant                    */
};

/* The set-up with every default resolved. */
typedef struct dcp_setup {
    int32_t tp, dcp, interleave;
    int32_t n_head;      /* of the TP group                                                            */
    int32_t head_local;  /* of this rank: n_head / tp                                                  */
    int32_t head_group;  /* of the DCP group: head_local * dcp; what the attention kernel sees         */
    int32_t n_index_head, topk;
    float softmax_scale;
    int32_t fmt, index_fmt; /* kvs_kv_format, kvs_index_format                                         */
    int32_t exchange;       /* kvs_exchange                                                            */
    int32_t q_fp8, trace, kernel_level;
    int32_t forms;          /* bits 1 << KVS_ATTEND_*, DCP_BLOCKS; never 0                             */
    int32_t q_ready;        /* no staging of queries in another type                                   */
    int32_t max_rows, max_reqs;
    int64_t max_len;
    int32_t threads;
} dcp_setup;

/* One step, on this rank. Arrays are allocated once; rows are tokens of the step, requests in order. */
typedef struct dcp_plan {
    int32_t n_row, n_req;
    int64_t table_width;   /* entries of a table row in use: shard_table_width(max_len)                */
    int64_t n_page;        /* of the pool the tables point into                                        */
    int32_t *table;        /* [max_reqs, table_width]                                                  */
    int32_t *row_req;      /* [max_rows]                                                               */
    int32_t *bound;        /* [max_rows] GLOBAL keys the row may attend                                */
    int32_t *bound_local;  /* [max_rows] the same on this rank                                         */
    int64_t *slot;         /* [max_rows] where this rank stores the row's token, -1: another rank does */
} dcp_plan;

/* The selected keys of each row on this rank. */
typedef struct dcp_selection {
    int32_t n_row;         /* rows it was made for; -1: none                                           */
    int32_t *slots;        /* [max_rows, topk] lane-major ascending, -1 behind                         */
    int32_t *lane_count;   /* [max_rows, n_lane]                                                       */
    int32_t *all_id;       /* [max_rows, topk] whole set, with trace                                   */
    int32_t *all_count;    /* [max_rows]                                                               */
    int32_t has_all;
} dcp_selection;

/* Bytes of each workspace, a function of the set-up alone; `plan` prints them. */
typedef struct dcp_workspace {
    int64_t plan;      /* tables, bounds, slots                                                        */
    int64_t selection; /* slots and counts, trace                                                      */
    int64_t q;         /* gathered queries                                                             */
    int64_t partial;   /* node results, send and receive sides                                         */
    int64_t score;     /* quantised index queries, score chunk, candidates                             */
    int64_t context;   /* rows of a context block, its partials                                        */
    int64_t kernel;    /* scratch of the kernels                                                       */
    int64_t total;
    int64_t message;   /* not part of total: the most that a rank hands its group in one collective    */
} dcp_workspace;

struct kvs_dcp {
    dcp_setup s;
    shard_geom geom;
    int32_t n_lane;
    int32_t chunk_rows;    /* rows of one exchange                                                     */
    int32_t score_rows;    /* rows of one selection round                                              */
    int32_t elem_bytes;    /* of a query value on the wire: 4 with f32 rows, else 2                    */
    comm *group;           /* this rank's DCP group                                                    */
    pool *workers;
    dev_queue queue;
    kern_table kern;
    char kernels[512];
    dcp_plan plan;
    dcp_selection sel;
    dcp_workspace bytes;

    /* exchange: [chunk_rows, ...] */
    void *q_local;         /* [chunk, head_local, 576] of elem_bytes, then [chunk, head_local] scales  */
    void *q_wire;          /* [dcp] of the former                                                      */
    void *q_full;          /* [chunk, head_group, 576]                                                 */
    float *q_scale;        /* [chunk, head_group] with q_fp8                                           */
    float *node_out;       /* [chunk, head_group, 512] this rank's partial                             */
    float *node_lse;       /* [chunk, head_group]                                                      */
    float *wire_send;      /* [dcp][chunk, head_local, 512 then chunk, head_local]                     */
    float *wire_recv;      /* the same                                                                 */

    /* selection */
    uint8_t *iq8;          /* [score_rows, n_index_head, 128] e4m3 or f32                              */
    float *iw;             /* [score_rows, n_index_head]                                               */
    float *score;          /* [score_rows, DCP_SCORE_COLUMNS]                                          */
    int32_t *n_col;        /* [score_rows]                                                             */
    int32_t *cand_send;    /* [score_rows, topk] ids, [score_rows, topk] scores, [score_rows] counts   */
    int32_t *cand_recv;    /* [dcp] of the former                                                      */
    float *cut_score;      /* [score_rows]                                                             */
    int32_t *cut_id;       /* [score_rows]                                                             */
    int32_t *cut_total;    /* [score_rows]                                                             */

    /* context */
    void *ctx_local;       /* [ctx_pad, 576] this rank's rows of a block                               */
    void *ctx_wire;        /* [dcp, ctx_pad, 576]                                                      */
    void *ctx_rows;        /* [512, 576] in sequence order                                             */
    float *ctx_part[3];    /* [chunk_rows_ctx, head_local, 512] block, running, next                   */
    float *ctx_lse[3];     /* [chunk_rows_ctx, head_local]                                             */
    int32_t *ctx_len;      /* [chunk_rows_ctx]                                                         */
    int32_t ctx_chunk;     /* rows of one round                                                        */
    int32_t ctx_pad;       /* rows of one rank in a block, padded to the most any rank has             */

    void *scratch;
    size_t scratch_bytes;

    attn_stats attn_count;
    kvs_step_info info;    /* counters since the last finish                                           */
};

enum {
    DCP_ALL_FORMS = 1 << KVS_ATTEND_DENSE | 1 << KVS_ATTEND_SPARSE | 1 << KVS_ATTEND_CONTEXT,
    DCP_BLOCKS = 1 << 8 /* beside the forms: dcp_context_block, for a caller that attends blocks itself */
};

static inline int dcp_has_form(const dcp_setup *s, kvs_attend how)
{
    return (s->forms >> (int)how & 1) != 0;
}

/* Resolves defaults and checks every field; the message says what, which value, what would work. */
kvs_status dcp_setup_resolve(dcp_setup *out, const kvs_dcp_config *cfg, int32_t world_size,
                             kvs_error *err);
/* CPU features that kernels may use: those of the machine, capped by `cpu` ("avx2", ...), or by the
 * environment's cap when NULL. */
kvs_status dcp_features(const char *cpu, uint32_t *features, kvs_error *err);
/* Bytes of the workspaces that dcp_open makes for a set-up with a kernel table. */
kvs_status dcp_workspace_bytes(const dcp_setup *s, const kern_table *kern, dcp_workspace *out,
                               kvs_error *err);

kvs_status dcp_open(kvs_dcp **out, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err);
void dcp_close(kvs_dcp *d);

kvs_status dcp_plan_batch(kvs_dcp *d, const kvs_batch *b, kvs_error *err);
kvs_status dcp_write(kvs_dcp *d, kvs_cache *c, int32_t layer, const void *latent, const void *rope,
                     kvs_dtype type, kvs_error *err);
kvs_status dcp_write_index(kvs_dcp *d, kvs_cache *c, int32_t index_layer, const void *key, kvs_dtype type,
                           kvs_error *err);
kvs_status dcp_select(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, const void *q, kvs_dtype type,
                      const float *w, kvs_error *err);
kvs_status dcp_set_selection(kvs_dcp *d, const int32_t *ids, int64_t stride, kvs_error *err);
kvs_status dcp_selection_copy(const kvs_dcp *d, int32_t *ids, int32_t *count, kvs_error *err);
/* Takes this rank's part of the selections of rows row[i], i < n, out of the handle: slots [n, topk], lane_count
 * [n, n_lane]. They stay true while the requests keep their pages. No communication. */
kvs_status dcp_selection_keep(const kvs_dcp *d, const int32_t *row, int32_t n, int32_t *slots,
                              int32_t *lane_count, kvs_error *err);
/* Makes kept selections those of the plan: a row of request i gets kept entry i, i < n; a row that may attend
 * topk keys or fewer gets all of them instead. No communication. */
kvs_status dcp_selection_restore(kvs_dcp *d, const int32_t *slots, const int32_t *lane_count, int32_t n,
                                 kvs_error *err);
kvs_status dcp_attend(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, const void *q,
                      kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse, kvs_error *err);
/* The same for rows [row0, row0 + n_row) of the plan, DENSE or SPARSE: q [n_row, head_local, 576] and out
 * [n_row, head_local, 512] hold those alone, so that a caller's buffers need not hold a whole step. Collective:
 * every rank cuts alike. */
kvs_status dcp_attend_rows(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, int32_t row0,
                           int32_t n_row, const void *q, kvs_dtype q_type, void *out,
                           kvs_dtype out_type, kvs_error *err);
kvs_status dcp_attend_local(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, const void *q,
                            kvs_dtype q_type, float *out, float *lse, kvs_error *err);
kvs_status dcp_finish(kvs_dcp *d, kvs_step_info *info, kvs_error *err);

/* Shared by the files of this folder. */

/* The cache fits the handle (shard, formats) and the layer exists. */
kvs_status dcp_check_cache(const kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t index_layer,
                           kvs_error *err);
/* Rows [row0, row0 + n) of the caller's queries as this handle computes with them, dense
 * [n, heads, 576]: bf16, or f32 with f32 rows; with q_fp8 their e4m3 values, and the scales [n, heads]
 * behind them. In `to`, or in the caller's memory where it already is that; `spare` holds as much. */
typedef struct dcp_query {
    const void *q;
    const float *scale; /* NULL without q_fp8 */
} dcp_query;
dcp_query dcp_query_of(kvs_dcp *d, const void *q, kvs_dtype q_type, int64_t row0, int32_t n,
                       int32_t heads, void *to, void *spare);
/* Fills what every attention call of this handle shares; queries and results are the caller's. */
void dcp_attn_args(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, int32_t row0,
                   int32_t n_row, attn_args *a);
/* Runs the attention kernel with the handle's scratch and counters. */
void dcp_attn_run(kvs_dcp *d, attn_args *a);
/* Positions [512 j, 512 j + 512) of request req of the plan, those below seq_len: their rows, dequantised, in
 * sequence order, into ctx_rows [512, 576] (f32 with f32 rows, else bf16) on every rank of the group. Returns how
 * many in *n. With CONTEXT or DCP_BLOCKS among the forms. Collective. */
kvs_status dcp_context_block(kvs_dcp *d, const kvs_cache *c, int32_t layer, int32_t req, int64_t j,
                             int64_t seq_len, int32_t *n, kvs_error *err);
/* KVS_ATTEND_CONTEXT. */
kvs_status dcp_attend_context(kvs_dcp *d, const kvs_cache *c, int32_t layer, const void *q,
                              kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse,
                              kvs_error *err);
/* What kvs_dcp_attend does besides the kernel, with dcp > 1: gathers the queries of n <= chunk_rows rows, then
 * exchanges and merges what node_out and node_lse hold (ag_rs uses node_out up). For the bench. Collective. */
kvs_status dcp_exchange(kvs_dcp *d, const void *q, kvs_dtype q_type, int32_t n, void *out,
                        kvs_dtype out_type, float *lse, kvs_error *err);
/* Bytes the group has sent so far, all operations. */
uint64_t dcp_bytes_sent(const kvs_dcp *d);

static inline int32_t dcp_min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

#endif
