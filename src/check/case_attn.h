/* check/case_attn.h - what the attention cases share: shapes, building, comparison. */
#ifndef KVS_CHECK_CASE_ATTN_H
#define KVS_CHECK_CASE_ATTN_H

#include "check/check.h"
#include "check/oracle.h"

enum { ATTN_MAX_LEN = 8 };

typedef struct attn_shape {
    int32_t n_head, n_lane;
    int32_t interleave;        /* list mode: 0 takes slots from all of ATTN_FAR_PAGE pages */
    int32_t n_req, rows;       /* query rows per request */
    int32_t len[ATTN_MAX_LEN]; /* table mode: local keys of each row, cycled; ends at -1 */
    int32_t topk;              /* list mode: entries per row; 0: table mode */
    int32_t none;              /* list mode: percent of entries that are -1 */
} attn_shape;

/* 8 million slots: 5.5 GB of fp8_ds_mla rows, 9.7 GB of bf16 ones. */
enum { ATTN_FAR_PAGE = 131072 };

typedef struct attn_expect {
    orc_pool pool;
    uint8_t *used; /* [n_slot] slots that some row attends */
    int32_t *pick; /* [n_pick] heads the oracle works out */
    int32_t n_pick;
    orc_attn *o;    /* [n_row, n_pick] */
    int64_t *n_key; /* [n_row] */
    uint64_t n_bad_id, n_all_key, n_least_fetched;
    uint64_t n_nan, n_nan_row; /* segments with a NaN, and (row, head)s with such a segment */
    int32_t all_heads;  /* every head is picked */
    int32_t spread;     /* data without structure: the norm of a head's error is held, too */
    int32_t clean_only; /* only that nothing but finite values and lse -inf come out */
    int32_t any_order;  /* what goes with a NaN depends on the order of sums: such heads are clean, and counted */
    float *out2, *lse2; /* what the invariance classes compute a second way; NULL elsewhere */
    uint16_t *out16;    /* the same results as bf16, NULL elsewhere; their lse is lse2 */
} attn_expect;

/* The formats in turn; of shape index % n, one that differs each time round. */
int32_t attn_fmt(int32_t index);
int32_t attn_fmt_of(int32_t index, int32_t n);
/* A case of a shape, in format `fmt`: queries, an empty pool (all NaN), tables or lists. */
attn_args *attn_new(check_case *k, const attn_shape *s, int32_t fmt);
/* Fills the slots that rows attend with keys; everything else stays NaN. */
void attn_fill(check_case *k);
/* The oracle's answer; after every change of keys and queries. */
void attn_finish(check_case *k);
uint8_t *attn_row_at(const attn_args *a, int64_t slot);
/* Runs with scratch of the case. */
void attn_call(const kern_table *t, check_case *k, dev_queue *q, attn_args *a);
void attn_run(const kern_table *t, check_case *k, dev_queue *q);
void attn_compare(check_case *k, const check_variant *v, check_result *r);
/* One head of one row against the oracle; spread: the norm of its error is held, too. */
void attn_compare_head(const attn_args *a, const orc_attn *o, int64_t row, int64_t head, int spread,
                       const check_variant *v, check_result *r);

/* The classes of case_attn_big.c: more rows than a grid has in y, slots past 2^31 bytes. */
void attn_many_rows(check_case *k, int32_t index);
void attn_far_slots(check_case *k, int32_t index);

/* The class of case_attn_mixed.c: answers' rows and a prompt's in one call. */
void attn_mixed(check_case *k, int32_t index);

/* The classes of case_attn_same.c. */
void attn_bf16(check_case *k, int32_t index);
void attn_bf16_run(const kern_table *t, check_case *k, dev_queue *q);
void attn_alone(check_case *k, int32_t index);
void attn_alone_run(const kern_table *t, check_case *k, dev_queue *q);
void attn_tree(check_case *k, int32_t index);
void attn_tree_run(const kern_table *t, check_case *k, dev_queue *q);
void attn_listed(check_case *k, int32_t index);
void attn_listed_run(const kern_table *t, check_case *k, dev_queue *q);
void attn_fold(check_case *k, int32_t index);
void attn_fold_run(const kern_table *t, check_case *k, dev_queue *q);

#endif
