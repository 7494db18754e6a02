/* attn_problem.h: made-up caches, queries and key lists for tests of attention kernels, and the answer in
 * float64, from the formulas alone: nothing here uses num/, shard/ or kern/ beyond the argument struct. */
#ifndef ATTN_PROBLEM_H
#define ATTN_PROBLEM_H

#include <stdbool.h>

#include "base/rng.h"
#include "kern/attn.h"

typedef struct problem_spec {
    int32_t fmt; /* kvs_kv_format */
    bool list;   /* lists of slots, else a block table */
    int32_t n_row, n_head, n_lane, interleave;
    int32_t n_key;   /* entries of each row's list, or the largest bound                       */
    double none;     /* list mode: share of entries that are -1                                */
    double bad;      /* share of entries, or of pages, that lie outside the pool               */
    bool odd_scales; /* e4m3 scales that are no powers of two, and some NaN-free extreme codes */
    int32_t n_req;   /* table mode                                                             */
    bool ragged;     /* table mode: bounds of a request's rows differ by up to 9 keys          */
    int32_t row_pad; /* bytes behind each cache row                                            */
    float q_size;    /* magnitude of queries: large makes the softmax sharp                    */
    uint64_t seed;
} problem_spec;

typedef struct problem {
    problem_spec spec;
    attn_args a; /* out, lse, stats, scratch unset */
    uint8_t *kv;
    size_t kv_bytes;
    void *q;
    float *q_scale;
    float *value; /* [n_slot, 576] what attention reads of the attended slots, as made */
    int32_t *slots, *lane_count, *table, *row_req, *kv_len;
} problem;

/* Everything a row does not attend is NaN bytes. Aborts when memory is short. */
problem problem_make(problem_spec spec);
void problem_free(problem *p);

/* One value of a stored row, as the format's text defines it. */
double problem_value(const problem *p, int64_t slot, int32_t d);
double problem_query(const problem *p, int32_t row, int32_t head, int32_t d);

/* Slots that `row` attends, lane by lane, into slot[] (room for spec.n_key); counts per lane into
 * lane_n[8]; returns how many. n_bad may be NULL. */
int32_t problem_keys(const problem *p, int32_t row, int32_t *slot, int32_t *lane_n,
                     uint64_t *n_bad);

/* Compares out [512] and lse of (row, head) with float64; a message and false on the first value beyond
 * its bound. p_unit: unit round-off of P, 0 where P is f32. */
bool problem_check(const problem *p, int32_t row, int32_t head, const float *out, float lse,
                   double p_unit, char *msg, size_t cap);

#endif
