/* check/case_index.h - what the cases of index scores and of selection share: requests with keys in pages
 * that lie anywhere in the pool, rows with queries and bounds, what the oracle scores of them. */
#ifndef KVS_CHECK_CASE_INDEX_H
#define KVS_CHECK_CASE_INDEX_H

#include "check/check.h"
#include "check/oracle.h"

typedef struct index_shape {
    int32_t fmt, n_head, n_req, rows_per_req;
    int32_t width;       /* pages of a request's table */
    const int32_t *lens; /* kv_len by row, cycled */
    int32_t n_len;
    int32_t far; /* pages are INDEX_FAR_STRIDE apart, and lie past 2^31 and 2^32 bytes */
} index_shape;

enum { INDEX_FAR_PAGE = 4600, INDEX_FAR_STRIDE = 1077120 };

/* What the oracle says of every key that a row attends. */
typedef struct index_expect {
    orc_score *score; /* [n_row, n_col] */
    uint8_t *state;   /* [n_row, n_col] 1: a score, 0: none */
    int64_t n_col;
    uint64_t n_bad, n_key;
} index_expect;

/* A case has these four in this order, its own buffers before index_fill: sizes, with up to page_gap - 1
 * steps between pages; ... */
void index_sizes(check_case *k, index_score_args *a, const index_shape *s, int32_t page_gap);
/* ... inputs without content, queries and keys up to skew - 1 steps past their boundary; ... */
void index_inputs(check_case *k, index_score_args *a, int32_t skew);
/* ... queries, weights, bounds and tables, whose pages are a permutation, and counters. The pool stays
 * NaN. */
void index_fill(check_case *k, index_score_args *a, const index_shape *s);

/* The page with local index l of a request; NULL where the table or the pool has none. */
uint8_t *index_page(const index_score_args *a, int32_t req, int64_t l);
/* Token `off` of a page: 128 values, codes or floats, and, with codes, their scale. */
void index_key_put(int32_t fmt, uint8_t *page, int64_t off, const void *value, float scale);

/* Rows of `bad`: longer than their table, of no length; then pages outside the pool, a row of no request, and
 * page ids around the table. */
extern const int32_t index_bad_lens[6];
void index_make_bad(check_case *k, index_score_args *a, int32_t index);

/* The oracle's scores of the local indices [begin, end) of each row, at column l - begin of n_col; after
 * every change of keys and queries. */
void index_expect_make(check_case *k, const index_score_args *a, int64_t begin, int64_t end,
                       int64_t n_col, index_expect *e);
/* How far from the oracle a score may lie. */
double index_score_bound(const index_score_args *a, const orc_score *o, const check_variant *v);
/* Keys scored and keys masked, as the op counts them. */
void index_compare_counts(check_case *k, const index_score_args *a, const index_expect *e,
                          check_result *r);

#endif
