/* check/check.h - how an op is checked: cases, their buffers, the harness that runs a variant,
 * results.
 *
 * An op (check_op) has classes; a class has numbered cases. build() of a class makes one case: it
 * takes buffers from the case, fills the inputs, marks which bytes of the outputs the op may write,
 * and computes what the oracle expects. The harness then runs every variant over the same case:
 *   1  inputs and in-out buffers as built, outputs poisoned with NaN, red zones around every buffer
 *   2  run; the red zones, the inputs and every byte that is not marked must be as before
 *   3  compare() against the oracle
 *   4  run again, and on the host again with two worker threads: the same output bytes; on a device again
 *      as on a slice of it, with so few blocks that each has much to do one after the other: as 2 and 3, and
 *      the same bytes where the variant promises an order of sums; and once more from a graph, recorded while
 *      the inputs hold poison: a launch may depend on pointers and sizes alone
 *   5  where the class says so: the same output bytes as the reference variant
 * A fault (selftest.c) is planted between 2 and 3, or in a later run, and must end up in the
 * result.
 *
 * A case lives in one mapping that is given back as a whole; nothing in it is freed by itself. For a
 * CUDA device it is memory that host and device see at the same address: the reference runs on the host
 * and the kernels of the device after it, over the same bytes.
 */
#ifndef KVS_CHECK_CHECK_H
#define KVS_CHECK_CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/pool.h"
#include "base/rng.h"
#include "check/oracle.h"
#include "kern/kern.h"
#include "kvspan/check.h"

typedef struct check_class check_class;
typedef struct check_op check_op;

/* ---- buffers --------------------------------------------------------------------------------- */

typedef enum check_kind { BUF_IN, BUF_OUT, BUF_INOUT, BUF_SCRATCH } check_kind;
typedef enum check_elem { EL_U8, EL_U16, EL_F32, EL_I32, EL_I64, EL_U64 } check_elem;

enum { CHECK_ZONE = 256, CHECK_MAX_BUF = 40, CHECK_MAX_DETAIL = 160, CHECK_MAX_FAR = 8 };

typedef struct check_buf {
    const char *name;
    check_kind kind;
    check_elem elem;
    uint8_t *data; /* CHECK_ZONE bytes of red zone before and behind */
    size_t bytes;
    uint8_t *init;  /* IN, INOUT: the content as built */
    uint8_t *mask;  /* OUT, INOUT: 1 where the op may write */
    uint8_t *first; /* OUT, INOUT: what the first run left */
    uint8_t *ref;   /* OUT, INOUT: what the reference variant left, where a class compares bits */
} check_buf;

/* ---- results --------------------------------------------------------------------------------- */

/* Of one (op, variant, class). */
typedef struct check_result {
    int64_t n_case;
    int64_t n_bad;                /* comparisons that failed */
    double worst;                 /* largest error over its bound */
    char first[CHECK_MAX_DETAIL]; /* the first failure */
    int64_t plant;      /* selftest: counts down in cmp_near; at 0 the value is moved ... */
    int32_t plant_over; /* ... one ULP over its bound (1) or just inside it (0) */
} check_result;

/* ---- a case ---------------------------------------------------------------------------------- */

typedef struct check_case {
    dev_queue
        *queue; /* not NULL: the case lies where the CUDA device of that queue sees it, and its
                         addresses and strides keep to steps of 16 bytes */
    const check_op *op;
    const check_class *cls;
    int32_t index;
    int32_t quick;
    rng r;

    uint8_t *mem; /* the mapping */
    size_t cap, used;
    int failed; /* the mapping was too small */
    int broken; /* the device failed: nothing more can be run or looked at */
    struct {
        void *p;
        size_t bytes;
        int shared;
    } far[CHECK_MAX_FAR]; /* see case_far */
    int32_t n_far;

    check_buf buf[CHECK_MAX_BUF];
    int32_t n_buf;
    check_buf scratch;  /* of the variant under test */
    int has_scratch;    /* the op asks for some */
    int scratch_broken; /* the zones of an earlier call's scratch were written */

    void *args;   /* the op's args struct */
    void *expect; /* what the class's compare wants to know */
} check_case;

typedef struct check_variant {
    const char *name;
    double u_p;   /* relative error of the one rounded product operand: 2^-8 for bf16, or 0 */
    int32_t bf16; /* products may flush denormals */
    kern_place place;
    double dot_u, key_u, step; /* see kern_variant */
    int32_t free_order;  /* KERN_FREE_ORDER: a NaN drops, and counts as, a whole (row, head) */
} check_variant;

enum {
    CLASS_SAME_BITS = 1, /* every variant gives the reference's bytes */
    CLASS_ORDER = 2,     /* not for variants with KERN_FREE_ORDER */
    CLASS_DEVICE = 4,    /* too large but for a device; the reference sits it out */
    CLASS_STEPS = 8      /* its run looks at data or waits: no graph can hold it */
};

struct check_class {
    const char *name;
    /* The sentence of the contract it pins; NULL: not part of the conformance run. */
    const char *rule;
    int32_t n_case, n_quick;
    int32_t flags; /* of CLASS_... */
    void (*build)(check_case *k, int32_t index);
    void (*run)(const kern_table *t, check_case *k, dev_queue *q); /* NULL: the op's */
    void (*compare)(check_case *k, const check_variant *v, check_result *r);
};

struct check_op {
    kern_op op;
    int32_t n_class;
    const check_class *cls;
    /* Whether the table has what the op needs, and whether two tables hold the same function. */
    int (*filled)(const kern_table *t);
    int (*same)(const kern_table *a, const kern_table *b);
    void (*run)(const kern_table *t, check_case *k, dev_queue *q);
    /* Poisons what the outputs hold without a meaning, so that bytes can be compared; NULL:
     * nothing. */
    void (*settle)(check_case *k);
};

/* The ops in the order of KERN_OP_LIST. */
const check_op *check_op_of(kern_op op);
extern const check_op check_attn_op, check_merge_op, check_quant_q_op, check_index_quant_op,
    check_index_score_op, check_index_select_op, check_topk_op, check_topk_merge_op, check_localise_op, check_kv_write_op,
    check_index_write_op, check_gather_op, check_norm_op, check_rope_op, check_act_op,
    check_route_op, check_gemm_op, check_mha_op;

/* ---- case memory (harness.c) ----------------------------------------------------------------- */

/* cuda: a queue of the device that is to see the case; NULL: none. */
kvs_status case_open(check_case *k, const check_op *op, const check_class *cls, int32_t index,
                     uint64_t seed, int32_t quick, dev_queue *cuda, kvs_error *err);
void case_close(check_case *k);
/* Builds it and takes the copies that inputs are compared with. */
kvs_status case_build(check_case *k, kvs_error *err);

/* 64-byte aligned memory of the case, zero while the case is being built. */
void *case_alloc(check_case *k, int64_t n, size_t size);
/* A buffer of n elements whose first lies `skew` elements past a 64-byte boundary. All of it is
 * poison. */
void *case_buf(check_case *k, const char *name, check_kind kind, check_elem elem, int64_t n,
               int32_t skew);
/* A block table as it is now, with ids of pages below n_page in the row before its first and in the one
 * behind its last: what a request that does not exist must not be given. */
const int32_t *case_fenced_table(check_case *k, const int32_t *table, int32_t n_req, int64_t stride,
                                 int64_t n_page);
/* Elements of so many bytes by which skews and strides of rows may differ: 1, or those of 16 bytes where
 * a device moves rows in such pieces. */
int32_t case_step(const check_case *k, int32_t elem_bytes);
/* Memory that is taken page by page as it is touched, for what is large and mostly empty; without red
 * zones, not compared with what it held, of any content. shared: a device may look at it. */
void *case_far(check_case *k, int64_t bytes, int shared);
/* Waits for a call on the device, whose results are to be read before the run ends. */
void case_sync(dev_queue *q);
/* The op may write these bytes. */
void case_mark(check_case *k, const void *p, int64_t bytes);
void case_mark_all(check_case *k, const void *p);
/* Scratch for the variant under test: exactly so many bytes between red zones, poisoned before the
 * first call of a run. */
void *case_scratch(check_case *k, size_t bytes);
void poison_fill(void *p, size_t bytes);

/* A counter of the op: an in-out buffer of one u64 that starts at a value other than 0. */
uint64_t *case_counter(check_case *k, const char *name);
/* What was added to it. */
uint64_t case_counted(const check_case *k, const uint64_t *counter);

/* ---- running (harness.c) --------------------------------------------------------------------- */

typedef enum fault_kind {
    FAULT_NONE,
    FAULT_ELEMENT, /* one element of an output is not written */
    FAULT_INDEX,   /* one integer of an output is off by one */
    FAULT_ULP,     /* one value is an ULP over its bound (cmp_near) */
    FAULT_INSIDE,  /* one value is just inside its bound: must be accepted */
    FAULT_ZONE_LO, /* a byte of the red zone before an output */
    FAULT_ZONE_HI, /* a byte of the red zone behind an output */
    FAULT_SCRATCH, /* a byte of the red zone behind the scratch */
    FAULT_INPUT,   /* a byte of an input */
    FAULT_GAP,     /* a byte of an output that is not the op's to write */
    FAULT_RERUN,   /* a byte of the second run's output */
    FAULT_THREAD,  /* a byte of the output with two workers */
    FAULT_COUNTER, /* a counter is one too high */
    FAULT_BITS,    /* a bit differs from the reference variant */
    N_FAULT
} fault_kind;

typedef struct check_fault {
    fault_kind kind;
    uint64_t pick; /* which element or byte, modulo how many there are */
} check_fault;

/* Whether the case has a place for that fault. */
int fault_applies(const check_case *k, fault_kind kind);
const char *fault_name(fault_kind kind);

/* Runs one variant over a built case and adds to r. is_ref: its outputs become what the others are
 * compared with. pool: two workers, or NULL to leave that run out. */
void case_run(check_case *k, const check_variant *v, const kern_table *t, int is_ref, pool *workers,
              const check_fault *fault, check_result *r);

/* ---- comparison (cmp.c) ---------------------------------------------------------------------- */

/* Counts a failure; the text of the first one stays. */
void cmp_fail(check_result *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Where a value lies: up to four named coordinates. */
typedef struct coord {
    const char *what; /* "out", "lse", ... */
    int64_t row, head, dim;
} coord;

/* |got - want| <= tol. Infinities and NaN must sit at the same places first. */
void cmp_near(check_result *r, coord at, float got, double want, double tol);
/* The same bits. */
void cmp_bits(check_result *r, coord at, float got, float want);
void cmp_i64(check_result *r, coord at, int64_t got, int64_t want);
void cmp_bytes(check_result *r, coord at, const void *got, const void *want, size_t n);
/* Adds an error that was judged elsewhere. */
void cmp_ratio(check_result *r, coord at, double error, double tol);
/* Half a unit in the last place of f32 and bf16 at x. */
double half_ulp_f32(double x);
double half_ulp_bf16(double x);

/* ---- single results with their op's bound (case_score.c, case_merge.c, case_gemm.c; case_attn.h) - */

void score_compare_one(const index_score_args *a, const orc_score *o, int64_t row, int64_t col,
                       const check_variant *v, check_result *r);
void merge_compare_head(const merge_args *a, const orc_merge *o, int64_t row, int64_t head,
                        check_result *r);
/* Output `out` of row `row` of product b. */
void gemm_compare_one(const gemm_args *a, int64_t b, int64_t row, int64_t out,
                      const check_variant *v, check_result *r);

/* ---- data (gen.c) ---------------------------------------------------------------------------- */

/* About normal with standard deviation sigma; every mantissa bit is used. */
void gen_f32(rng *r, float *x, int64_t n, float sigma);
void gen_bf16(rng *r, uint16_t *x, int64_t n, float sigma);
/* Of a type, elements [at, at + n). */
void gen_any(rng *r, void *x, int32_t type, int64_t at, int64_t n, float sigma);
/* e4m3 codes of about normal values with standard deviation 64; no NaN. */
void gen_e4m3(rng *r, uint8_t *x, int64_t n);
/* Stores one value into a buffer of f32 or bf16 (rounded to nearest even). */
void gen_store(void *x, int32_t type, int64_t at, float value);
/* 0 .. n-1 in random order. */
void gen_permutation(rng *r, int32_t *x, int32_t n);
/* One row of a cache in any format with values of standard deviation about sigma. */
void gen_row(rng *r, int32_t fmt, float k_scale, uint8_t *row, float sigma);

static inline int32_t gen_pick(rng *r, int32_t n)
{
    return (int32_t)rng_next_below(r, (uint64_t)n);
}

/* ---- the run (check.c, selftest.c) ----------------------------------------------------------- */

/* For tests: fewer classes and cases than a run has. */
typedef struct check_filter {
    const char *cls; /* the class of this name; NULL: all */
    int32_t n_case;  /* so many cases of a class at most; 0: all */
} check_filter;

typedef struct check_run {
    const kvs_check_config *cfg;
    check_filter only;
    const kern_variant *variants;
    int32_t n_variant;
    uint32_t features;
    pool *workers;
    dev_queue *queue; /* of the CUDA device; NULL: the host */
    FILE *csv;
    kvs_check_result total;
    int64_t n_done, n_total; /* steps, for progress */
    char first_fail[CHECK_MAX_DETAIL + 96];
} check_run;

/* As kvs_check_run, over a given list of variants: how tests register one. */
kvs_status check_run_variants(const kvs_check_config *cfg, const kern_variant *variants,
                              int32_t n_variant, check_filter only, kvs_error *err);
/* The same, with the kernels of a CUDA device among the variants; queue NULL: none. */
kvs_status check_run_on(const kvs_check_config *cfg, const kern_variant *variants,
                        int32_t n_variant, check_filter only, dev_queue *queue, kvs_error *err);
/* As kvs_check_run, on CUDA device 0 (check_cuda.c). */
kvs_status check_run_cuda(const kvs_check_config *cfg, kvs_error *err);
/* "cpu" and NULL give 0, "cuda" gives 1. */
kvs_status check_device_parse(const char *word, int32_t *cuda, kvs_error *err);
/* One line about the device. */
void check_describe_device(const dev_cuda_info *i, char *text, size_t cap);
/* Writes one row: verdict 0 pass, 1 FAIL, 2 skip. */
void check_row(check_run *c, const char *op, const char *variant, const char *cls, int verdict,
               const check_result *r, const char *note);
/* Counts a step and tells cfg->progress of it; KVS_CANCELLED where that wants the run to end. */
kvs_status check_report(check_run *c, const char *op, const char *what, kvs_error *err);
kvs_status check_selftest(check_run *c, kvs_error *err);
check_variant check_variant_of(const kern_variant *v);

#endif
