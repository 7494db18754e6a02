/* cli/bench.h - kvspan bench decode and prefill: a model end to end through the public engine. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "kvspan/bench.h"

typedef struct bench_model {
    const kvs_bench_config *cfg; /* len, dcp, threads, kv, interleave, exchange, timeout_ms, reps, seed, cpu,
                                    kernels; progress and ctx */
    const char *op;              /* "decode" or "prefill" */
    const char *model_dir;
    int32_t tp, mtp;             /* 0: the DCP size, no drafts */
    void (*row)(void *ctx, const kvs_bench_row *row, double tok_per_s);
} bench_model;

bool bench_model_has(const char *op);

/* Runs the grid; statuses as kvs_bench_run, and those of kvs_engine_open. */
kvs_status bench_model_run(const bench_model *m, kvs_error *err);

#endif
