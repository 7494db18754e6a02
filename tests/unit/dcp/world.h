/* world.h - runs a step of attention on a whole TP group of thread ranks and collects what comes out.
 *
 * A scenario says everything that may change (shard sizes, formats, requests, batch composition, threads);
 * the data does not: every value is a function of (seed, request id, position, head, dimension) alone. So two
 * scenarios that differ in nothing that the number contract lets matter must give the same bytes.
 *
 * With `serialise` the ranks run one at a time between collectives, and only the running rank's cache is
 * readable: a read of another rank's rows ends the test with a fault.
 */
#ifndef TEST_WORLD_H
#define TEST_WORLD_H

#include <stdint.h>
#include "kvspan/dcp.h"

enum { WORLD_MAX_REQ = 96, WORLD_MAX_TP = 8 };

/* What a value belongs to; head is 0 where there is none. */
typedef enum world_data {
    DATA_ROW = 1,
    DATA_INDEX_KEY,
    DATA_QUERY,
    DATA_INDEX_QUERY,
    DATA_INDEX_WEIGHT
} world_data;

typedef enum world_select {
    WORLD_INDEXER,  /* kvs_dcp_select                                                                  */
    WORLD_IDS       /* kvs_dcp_set_selection with ids from scenario.ids                                */
} world_select;

typedef struct scenario {
    uint64_t seed;
    int32_t tp, dcp, interleave, n_head, n_index_head, topk;
    kvs_kv_format kv;
    kvs_index_format index_kv;
    kvs_scale_rule rule;
    kvs_exchange exchange;
    kvs_attend how;
    world_select select;
    int32_t q_fp8, kernel_level;
    kvs_dtype q_type, out_type;
    int32_t n_req;
    int32_t req_id[WORLD_MAX_REQ]; /* names the data of a request                                      */
    int32_t q_len[WORLD_MAX_REQ];
    int64_t seq_len[WORLD_MAX_REQ];
    /* ids of request i, row j: fills at most topk positions, -1 for none */
    void (*ids)(int32_t req_id, int64_t bound, int32_t topk, int32_t *out);
    int32_t threads;
    int32_t serialise;
    int32_t write_chunk;  /* rows per writing step; 0: all at once                                     */
    int32_t max_rows;     /* 0: as many as needed                                                      */
    const char *cpu;
    /* Data of the test's own: fills x [n] and returns 1, or returns 0 for the default.                */
    int (*data)(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n);
    float k_scale;        /* of fp8 rows; 0: 1                                                         */
    int64_t max_len;      /* of the handle; 0: the longest sequence                                    */
    int32_t table_pad;    /* entries behind each table row that no sequence has                        */
    int32_t spare_pages;  /* pages of the pool that no sequence has, full of NaN like all unwritten    */
    int32_t n_warm;       /* steps that the same handle does first: warm[k][i] rows of request i, of   */
    const int32_t (*warm)[WORLD_MAX_REQ]; /* its history                                              */
} scenario;

typedef struct outcome {
    int32_t n_row, n_head, topk;
    float *out;       /* [n_row, n_head, 512] (bf16 results widened)                                   */
    float *lse;       /* [n_row, n_head]                                                               */
    int32_t *ids;     /* [n_row, topk] selected positions, ascending, -1 behind                        */
    int32_t *count;   /* [n_row]                                                                       */
    kvs_step_info info[WORLD_MAX_TP];
    kvs_status status[WORLD_MAX_TP];
    kvs_error error[WORLD_MAX_TP];
    int64_t workspace_bytes;
} outcome;

scenario scenario_default(void);
int32_t scenario_rows(const scenario *s);
/* Every rank must succeed; otherwise prints and fails the test. Free with outcome_fini. */
void world_run(const scenario *s, outcome *o);
/* The same without demanding success. */
void world_try(const scenario *s, outcome *o);
/* This caller's rank of a group that some other transport made: fills the heads of that rank in *o, and the
 * selected sets on rank 0. The group stays open. */
void world_rank(const scenario *s, kvs_comm *group, outcome *o);
void outcome_fini(outcome *o);

/* The data, for oracles: what is written and asked. */
void data_row(const scenario *s, int32_t req_id, int64_t pos, float row[576]);
void data_index_key(const scenario *s, int32_t req_id, int64_t pos, float key[128]);
void data_query(const scenario *s, int32_t req_id, int64_t pos, int32_t head, float q[576]);
void data_index_query(const scenario *s, int32_t req_id, int64_t pos, int32_t head, float q[128]);
float data_index_weight(const scenario *s, int32_t req_id, int64_t pos, int32_t head);

/* Fails with the first differing element named. */
void same_bits(const outcome *a, const outcome *b, const char *what);

#endif
