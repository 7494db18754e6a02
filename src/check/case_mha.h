/* check/case_mha.h - what the cases of multi-head attention share: shapes, building, comparison. */
#ifndef KVS_CHECK_CASE_MHA_H
#define KVS_CHECK_CASE_MHA_H

#include "check/check.h"
#include "check/oracle.h"

enum { MHA_MAX_LEN = 8 };

typedef struct mha_shape {
    int32_t n_row, n_head, nope, v_dim, n_key;
    int32_t len[MHA_MAX_LEN]; /* of each row, cycled; ends at -1; none: row i attends n_key - n_row + 1 + i */
} mha_shape;

typedef struct mha_expect {
    float *out_a, *lse_a; /* what earlier calls gave, as the outputs are laid out; NULL with first */
    int32_t *pick;        /* [n_row] heads the oracle works out: this one of each row, or all: -1   */
    orc_mha *o;           /* [n_row, n_head] of those */
    uint64_t n_nan;
    int32_t all;          /* every (row, head) is worked out                    */
    int32_t spread;       /* data without structure: the norm of an error is held, too */
    int32_t clean_only;   /* only that nothing but finite values and lse -inf come out */
    float *out2, *lse2;   /* computed a second way; NULL elsewhere */
    const int32_t *len;      /* [n_row] as built: a run must not look at the buffers          */
    const int32_t *part_len; /* [2, n_row] lengths of the calls of that way, where it is several calls */
} mha_expect;

/* A case of a shape with operands of `type`; first: no earlier calls. Everything is filled. */
mha_args *mha_new(check_case *k, const mha_shape *s, int32_t type, int32_t first);
/* A second pair of outputs. */
void mha_second(check_case *k);
/* Keys [from, n_key) become NaN: values, rope part and all. */
void mha_poison_keys(check_case *k, int32_t from);
/* The oracle's answer; after every change of inputs. */
void mha_finish(check_case *k);
/* Runs with scratch of the case. */
void mha_call(const kern_table *t, check_case *k, dev_queue *q, mha_args *a);
void mha_run(const kern_table *t, check_case *k, dev_queue *q);
/* One (row, head) with e->o of it. */
void mha_compare_head(const mha_args *a, const mha_expect *e, int64_t row, int64_t head,
                      const check_variant *v, check_result *r);
void mha_compare(check_case *k, const check_variant *v, check_result *r);

#endif
