/* Stands in for the library's checks in a copy of the program: everything it runs is wrong, so
 * that what the program does with failures can be seen. */
#include <stdio.h>

#include "base/err.h"
#include "kvspan/bench.h"
#include "kvspan/check.h"

kvs_status kvs_check_run(const kvs_check_config *cfg, kvs_error *err)
{
    const char *line =
        "merge        ref         random         FAIL       1.5  out[1, 2]: got 3, want 4";
    const kvs_check_row row = {
        "merge", "ref", "random", "FAIL", 12, 1.5, "out[1, 2]: got 3, want 4", line};
    cfg->line(cfg->ctx, line);
    cfg->row(cfg->ctx, &row);
    cfg->line(cfg->ctx, "0 passed, 1 failed, 0 skipped");
    *cfg->result = (kvs_check_result){0, 1, 0};
    if (cfg->csv != NULL) {
        FILE *f = fopen(cfg->csv, "w");
        if (f != NULL) {
            fputs("op,variant,class\nmerge,ref,random\n", f);
            fclose(f);
        }
    }
    return err_set(err, KVS_INTERNAL, "1 of 1 checks failed, first merge ref random: out[1, 2]");
}

kvs_status kvs_bench_run(const kvs_bench_config *cfg, kvs_error *err)
{
    const kvs_bench_row row = {.name = "random/cold/t1",
                               .op = "topk",
                               .variant = "ref",
                               .device = "cpu",
                               .kv = "",
                               .batch = 1,
                               .len = 100,
                               .topk = 8,
                               .dcp = 1,
                               .threads = 1,
                               .n_rep = 3,
                               .median_us = 2.0,
                               .min_us = 1.0,
                               .p90_us = 3.0,
                               .gbyte = 1e-6,
                               .byte_per_s = 5e8,
                               .ceiling_kind = "read",
                               .ceiling = 1e9,
                               .share = 0.5,
                               .passed = 0,
                               .err = 7.0};
    cfg->row(cfg->ctx, &row);
    return err_set(err, KVS_INTERNAL, "1 of 1 rows are wrong, first topk random/cold/t1");
}
