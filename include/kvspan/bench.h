/* kvspan/bench.h - times the kernels of this machine beside the ceilings measured with them.
 *
 * A case is one point of a grid: an op, a shape, a format, a number of threads. Each is set up,
 * checked on sampled rows against the oracle of kvspan/check.h, and timed with the data rotated
 * through pools that no cache holds (or in the caches, if asked for). Rates count useful work
 * only: valid entries, real heads, every byte once. The ceilings - read and copy bandwidth, the
 * rate of multiply-adds - are measured in the same process, with the same threads, just before;
 * a ceiling under 85 % of the best seen in the run is reported through the log (kvspan/log.h),
 * since shares taken then flatter.
 *
 * Compiles as C11 and C++17.
 */
#ifndef KVSPAN_BENCH_H
#define KVSPAN_BENCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "kvspan/config.h"
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* One timed case. Texts are valid during the call that hands the row over. */
typedef struct kvs_bench_row {
    const char *name;    /* "sparse/cold/t2": what the case is, cold or warm, threads */
    const char *op;      /* "attn", ... */
    const char *variant; /* of the kernel, or the transport of an exchange */
    const char *device;  /* "cpu", "cuda" */
    const char *kv;      /* format of rows or index keys; "" where there is none */
    int32_t batch, q, heads; /* 0 where the op has none, as below */
    int64_t len;
    int32_t topk, dcp, threads;
    double invalid;
    int32_t n_rep;
    double median_us, min_us, p90_us; /* of one call */
    double gflop, gbyte;              /* useful work of one call */
    double flop_per_s, byte_per_s;    /* of the median */
    const char *ceiling_kind;         /* the nearest ceiling: "read", "copy", "fma_avx2", ... */
    double ceiling;                   /* per second */
    double share;                     /* of that ceiling */
    int32_t passed;                   /* 0: a sampled row was wrong */
    double err;                       /* the largest error over its bound */
    double graph_us; /* of one call inside a CUDA graph of many; 0 on the CPU */
} kvs_bench_row;

/* Values of one axis of the grid. n 0: the op's own. */
typedef struct kvs_bench_axis {
    const int64_t *v;
    int32_t n;
} kvs_bench_axis;

/* Zero means default for every field. */
typedef struct kvs_bench_config {
    size_t struct_size;
    const char *op; /* a name of kvs_bench_op; NULL: a short case or two of each */
    kvs_bench_axis batch, q, heads, len, topk, dcp;
    kvs_bench_axis threads;   /* default: the machine's cores */
    kvs_bench_axis kv;        /* kvs_kv_format; FP8 or F32 where the op scores index keys */
    const double *invalid;    /* [n_invalid] shares of entries that belong to other ranks */
    int32_t n_invalid;
    int32_t interleave;       /* default 1 */
    kvs_exchange exchange;    /* default a2a */
    int32_t one;              /* 1: the first point of the grid only */
    int32_t reps;             /* timed calls of a case; default: what fits half a second */
    int32_t warm;             /* 1: leave the data in the caches */
    int64_t pool_bytes;       /* least size of what is rotated; default 1 GiB */
    int32_t timeout_ms;       /* of an exchange; default 30000 */
    uint64_t seed;
    const char *cpu;          /* cap: "ref", "avx2", ...; NULL: the variable KVS_CPU, else none */
    const char *kernels;      /* "op=variant,..."; NULL: none */
    /* Receives each row when it is done. */
    void (*row)(void *ctx, const kvs_bench_row *row);
    /* Told what is about to be done, of how many steps in all; a return value other than 0 ends the
     * run with KVS_CANCELLED. NULL: not wanted. */
    int (*progress)(void *ctx, const char *what, int64_t done, int64_t total);
    void *ctx;
    /* Where the kernels run: "cpu" (NULL too) or "cuda", the first device the process sees. On cuda
     * there are attn (sparse, and dense with topk 0), index, select, mha, exchange (between devices, which ranks may
     * share) and roof; threads, warm, pool_bytes, interleave, exchange, timeout_ms and cpu do not go with it. */
    const char *device;
} kvs_bench_config;

static inline kvs_bench_config kvs_bench_config_default(void)
{
    kvs_bench_config c;
    memset(&c, 0, sizeof(c));
    c.struct_size = sizeof(c);
    return c;
}

/* The axes an op takes. */
enum {
    KVS_BENCH_BATCH = 1,
    KVS_BENCH_Q = 2,
    KVS_BENCH_HEADS = 4,
    KVS_BENCH_LEN = 8,
    KVS_BENCH_TOPK = 16,
    KVS_BENCH_DCP = 32,
    KVS_BENCH_KV = 64,
    KVS_BENCH_INVALID = 128,
    KVS_BENCH_INTERLEAVE = 256,
    KVS_BENCH_EXCHANGE = 512, /* exchange and timeout_ms */
    KVS_BENCH_KERNELS = 1024, /* kernels */
    KVS_BENCH_POOL = 2048,    /* warm and pool_bytes */
    KVS_BENCH_THREADS = 4096
};

typedef struct kvs_bench_op {
    const char *name;
    const char *about; /* what it times, and its own grid */
    uint32_t axes;     /* KVS_BENCH_* */
} kvs_bench_op;

/* Op i, NULL from the last one on. Static storage. Threads: any. */
const kvs_bench_op *kvs_bench_ops(int32_t i);

/* Runs the grid. KVS_OK when every sampled row was right. KVS_INVALID: an unknown op, a value
 * out of range, an axis that the op does not take, a combination that no kernel has; the message
 * says what would work. KVS_LIMIT: a case that would take more than 6 GiB, or more than the device has.
 * KVS_NODEV, KVS_UNSUPPORTED: no CUDA device that can be used, or no such kernel. KVS_DEVICE: it failed. KVS_INTERNAL: a
 * result was wrong (all rows have been handed over). KVS_CANCELLED, KVS_NOMEM, KVS_PEER.
 * Threads: one call at a time; row and progress are called from the calling thread. */
kvs_status kvs_bench_run(const kvs_bench_config *cfg, kvs_error *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
