/* check/bench.h - how a case is timed: points of a grid, memory, calls, checks.
 *
 * An op (bench_op) has a grid of its own and a setup function that turns a point into a
 * bench_case: the memory it needs, how much useful work one call does, how to call it with
 * rotated data and how to compare a sample of its results with the oracle. bench.c does the
 * rest.
 *
 * Rotation: a case has n_set sets of data, together at least pool_bytes; call i works on set i mod
 * n_set. Warm cases have one set. Memory of a case is given back as a whole. */
#ifndef CHECK_BENCH_H
#define CHECK_BENCH_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/pool.h"
#include "check/check.h"
#include "check/roof.h"
#include "kern/kern.h"
#include "kvspan/bench.h"
#include "num/kvfmt.h"
#include "shard/shard.h"

enum { BENCH_MAX_BLOCK = 64, BENCH_MAX_VALUE = 64 };

#define BENCH_MEM_MAX ((size_t)6 << 30)

typedef struct bench_point {
    int32_t batch, q, heads;
    int64_t len;
    int32_t topk, dcp, threads;
    double invalid;
    int32_t kv; /* kvs_kv_format, or kvs_index_format for index keys as fp8 or f32 */
} bench_point;

/* Rows handed to the caller. */
typedef struct bench_tally {
    int32_t n_row, n_wrong;
    char first_wrong[CHECK_MAX_DETAIL + 96];
} bench_tally;

typedef struct bench_run bench_run;
typedef struct bench_case bench_case;

struct bench_case {
    bench_run *run;
    bench_point p;
    shard_geom geom; /* rank 0 of p.dcp ranks */
    rng r;
    const char *label; /* "dense", "sparse", "random", ...; the op's name where it says no other */
    kern_op op;        /* whose variant is timed */
    const char *variant;
    const char *kv;   /* for the row; "" where there is none */
    const char *skip; /* see bench_op.setup; NULL: it runs */
    char skip_text[96];
    int32_t n_set;
    double flop, byte;  /* useful work of one call */
    roof_kind mem_kind; /* what bounds its bytes */
    size_t set_bytes;   /* of the rotated data of one set, for the setup to know */
    void *state;        /* the op's */
    void *block[BENCH_MAX_BLOCK];
    size_t block_bytes[BENCH_MAX_BLOCK];
    int32_t n_block;
    size_t mem_bytes;
    kvs_status (*call)(bench_case *c, int32_t set, kvs_error *err);
    kvs_status (*check)(bench_case *c, check_result *r, kvs_error *err);
    void (*fini)(bench_case *c); /* what memory alone does not undo; may be NULL */
};

typedef struct bench_op {
    kvs_bench_op pub;
    kern_op op;
    bench_point def;           /* scalars where an axis is not given */
    const char *const *labels; /* [n_label] each point is timed once per label; NULL: once */
    int32_t n_label;
    kvs_bench_axis batch, heads, len, topk, dcp, kv; /* the op's own grid */
    /* Fills the case for label i_label; or sets c->skip, where this point cannot be run, to the
     * reason ("" where none need be given), and leaves the rest alone. */
    kvs_status (*setup)(bench_case *c, int32_t i_label, kvs_error *err);
} bench_op;

extern const bench_op bench_attn_op, bench_index_op, bench_topk_op, bench_select_op, bench_merge_op,
    bench_write_op, bench_exchange_op, bench_gemm_op, bench_mha_op, bench_mha_wide_op;

struct bench_run {
    const kvs_bench_config *cfg;
    kern_table kern;
    uint32_t features;
    roof roof;
    pool *pool; /* of the current number of threads */
    dev_queue queue;
    int32_t n_thread;
    double rate[ROOF_N_KIND];     /* the ceilings as measured last, for n_thread */
    int64_t rate_ns[ROOF_N_KIND]; /* when; 0: not yet */
    int64_t n_done, n_total;
    char what[96]; /* the case in hand, for progress */
    int64_t asked_ns;
    bench_tally tally;
    char left_out[96];
};

/* What samples in microseconds say; sorts them. n at least 1. */
typedef struct bench_timing {
    double median_us, min_us, p90_us;
    int32_t n;
} bench_timing;

bench_timing bench_summary(double *us, int32_t n);

/* Hands over and counts a row; why: what is wrong with it, where something is. */
void bench_hand_over(const kvs_bench_config *cfg, bench_tally *t, const kvs_bench_row *row,
                     const char *why);
/* At the end of a run: KVS_INTERNAL where a row was wrong. */
kvs_status bench_verdict(const bench_tally *t, kvs_error *err);

/* Sets c->skip to a text. */
kvs_status bench_skip(bench_case *c, const char *fmt, ...) ERR_PRINTF(2, 3);
/* Zeroed memory of the case, huge pages where it is large. KVS_LIMIT past 6 GiB together. */
kvs_status bench_alloc(bench_case *c, size_t bytes, void **out, kvs_error *err);
/* How many sets of so many bytes make a pool: at least 1; 1 when warm. */
int32_t bench_n_set(const bench_case *c, size_t set_bytes);

/* The variant under test, for bounds that depend on it. */
check_variant bench_variant(const bench_case *c);

/* k distinct numbers of 0 .. n-1, ascending. mark: [n] zeroed bytes, zeroed again after. */
void bench_sample(rng *r, int32_t n, int32_t k, uint8_t *mark, int32_t *out);

/* The list of a row of sparse attention on rank 0 (bench_attn.c). */
typedef struct bench_list {
    shard_geom geom;
    int32_t n_lane;
    int32_t bound, topk;  /* so many of the sequence's first `bound` positions */
    double invalid;       /* share of the rank's entries that become -1 */
    const int32_t *table; /* pages of the sequence on the rank; NULL: one behind the other, ... */
    int64_t first;        /* ... from this slot on */
} bench_list;

/* Slots of the positions that the rank owns, lane by lane; count: [n_lane], zeroed before. Returns how many are
 * attended. pos, mark: [len] scratch, mark zeroed before and after. */
int64_t bench_draw_list(rng *r, const bench_list *l, int32_t *pos, uint8_t *mark, int32_t *slots,
                        int32_t *count);

/* `bytes` of scratch for a kernel call with this run's queue, kept until the case ends. */
kvs_status bench_scratch(bench_case *c, size_t bytes, void **out, size_t *n, kvs_error *err);

/* As kvs_bench_run, with kernels that tests may have broken; NULL: the machine's best. */
kvs_status bench_run_table(const kvs_bench_config *cfg, const kern_table *kern, kvs_error *err);

/* roof.c's rows: kvspan bench roof. */
kvs_status bench_roof(bench_run *b, kvs_error *err);
/* A ceiling with the current number of threads, measured again where it is old. */
kvs_status bench_ceiling(bench_run *b, roof_kind kind, double *rate, kvs_error *err);
/* What bounds the products of a case. */
roof_kind bench_flop_kind(const bench_case *c);
/* Makes n workers the run's. */
kvs_status bench_threads(bench_run *b, int32_t n, kvs_error *err);

#endif
