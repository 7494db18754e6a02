/* check/bench_cuda.h - how a case is timed on a CUDA device.
 *
 * A case has n_set sets of inputs and outputs, together several times the L2; call i works on set i mod
 * n_set. It is timed in two ways: launches one by one between two events each (the time of an isolated call
 * with all its kernels), and many calls inside one CUDA graph (the time of a call where the host is not in
 * the way). Ceilings beside it: streaming reads, for attention a kernel that does nothing but fetch the
 * same rows, and for its multi-head form one that does nothing but as many products. */
#ifndef CHECK_BENCH_CUDA_H
#define CHECK_BENCH_CUDA_H

#include "check/bench.h"
#include "check/check.h"
#include "check/roof_cuda.h"
#include "kern/attn.h"
#include "kvspan/bench.h"

enum { CUDA_MAX_BLOCK = 48, CUDA_MAX_SET = 192, CUDA_BATCH = 40 };

typedef struct cuda_point {
    int32_t batch, q, heads;
    int64_t len;
    int32_t topk, dcp;
    double invalid;
    int32_t kv;
} cuda_point;

typedef struct cuda_bench {
    const kvs_bench_config *cfg;
    dev_queue queue;
    kern_table kern;
    dev_cuda_info info;
    dev_event event[2 * CUDA_BATCH];
    int32_t n_event;
    void *trash;      /* what fills keep the device busy with while the host enqueues */
    double read_rate; /* bytes per second of streaming reads */
    int64_t n_done, n_total;
    bench_tally tally;
} cuda_bench;

typedef struct cuda_case cuda_case;
struct cuda_case {
    cuda_bench *b;
    cuda_point p;
    rng r;
    int32_t n_set;
    void *block[CUDA_MAX_BLOCK];
    int32_t n_block;
    void *state;                      /* the op's */
    void (*free_state)(cuda_case *c); /* what state points to on the host */
    kern_op op;                       /* whose variant the row names */
    char label[40];
    double flop, byte; /* useful work of one call */
    const char *kv;
    void (*launch)(cuda_case *c, int32_t set);
    void (*floor)(cuda_case *c, int32_t set); /* fetches the same bytes; NULL: none */
    int32_t floor_products; /* floor does as many products instead: the ceiling is one of them */
    kvs_status (*check)(cuda_case *c, check_result *r, kvs_error *err);
};

/* Memory of the device that the case keeps; zero bytes become some. */
kvs_status cuda_case_alloc(cuda_case *c, size_t bytes, void **out, kvs_error *err);
/* Sets of so many bytes that do not stay in the L2. */
int32_t cuda_case_sets(const cuda_case *c, double set_bytes);
/* Fills `bytes` of the device with repetitions of the host's template. */
void cuda_case_tile(cuda_case *c, void *dst, int64_t bytes, const void *template_data, int64_t n);
/* What attention cases have in common. Rows of the pool repeat a template of CUDA_ATTN_ROWS normal rows, which *rows keeps on
 * the host (also after a failure); fmt, k_scale, n_slot and row_stride are set before. change, may be NULL: done to each
 * fp8_ds_mla row of the template. */
enum { CUDA_ATTN_ROWS = 4096, CUDA_ATTN_Q = 588096 };
kvs_status cuda_attn_rows(cuda_case *c, attn_args *a, void (*change)(uint8_t *row), uint8_t **rows,
                          kvs_error *err);
/* The kvs_dtype of a point's results: bf16 where the rank has all keys, for the next product takes that; else f32, what a
 * merge takes. And the bytes of one of them. */
int32_t cuda_attn_out(const cuda_point *p);
size_t cuda_attn_out_size(const attn_args *a);
/* bf16 queries, repetitions of the CUDA_ATTN_Q values that *q keeps on the host, outputs and LSE of n_set sets; stats, and
 * scratch filled with 0xFF. out_type is set before. */
kvs_status cuda_attn_ends(cuda_case *c, attn_args *a, int32_t n_set, uint16_t **q, kvs_error *err);
/* Runs set 0 with f32 results, over poisoned ones, and compares counters and these rows; where the case's results are bf16,
 * runs it with those and compares their bits with the f32 ones rounded. compare finds f32 results in a's out. */
typedef kvs_status cuda_row_compare(const cuda_case *c, int32_t row, check_result *r,
                                    kvs_error *err);
kvs_status cuda_attn_check(cuda_case *c, const attn_args *set0, int64_t n_key, const int32_t *rows,
                           int32_t n, cuda_row_compare *compare, check_result *r, kvs_error *err);
/* The bounds of the variant under test. */
check_variant cuda_case_variant(const cuda_case *c);

kvs_status cuda_setup_attn(cuda_case *c, kvs_error *err);
kvs_status cuda_setup_dense(cuda_case *c, kvs_error *err); /* attn with topk 0 */
kvs_status cuda_setup_index(cuda_case *c, kvs_error *err);
kvs_status cuda_setup_select(cuda_case *c, kvs_error *err);
kvs_status cuda_setup_mha(cuda_case *c, kvs_error *err);
kvs_status cuda_setup_mha_wide(cuda_case *c, kvs_error *err);
kvs_status cuda_setup_gemm(cuda_case *c, kvs_error *err);

/* One layer of sparse attention over p->dcp ranks, end to end: times and hands over its rows itself. */
int cuda_has_layer(const cuda_point *p);
kvs_status cuda_run_layer(cuda_bench *b, const cuda_point *p, kvs_error *err);
/* Scales of a fp8_ds_mla row become powers of two, as the default writer leaves them: check has the others too. */
void cuda_scales_to_pow2(uint8_t *row);
/* A page of 64 index keys with their scales. */
void cuda_index_page(rng *r, uint8_t *page);

/* Exchanges between devices: times and hands over its rows itself. */
kvs_status cuda_run_exchange(cuda_bench *b, const cuda_point *p, kvs_error *err);

/* As kvs_bench_run, on CUDA device 0; exchange on as many as it has ranks. */
kvs_status bench_run_cuda(const kvs_bench_config *cfg, kvs_error *err);

#endif
