/* engine/plan.h - the memory and exchange plan of a model on a number of devices.
 *
 * Integers in, integers out. Formulas of rows and pages come from num/kvfmt.h, of ownership from
 * shard/shard.h, of weights from weights.h; workspaces and exchange bytes from the two functions
 * below, which know what the attention layer does. A refused setting is replaced by the nearest one
 * that works before anything is worked out with it, so the numbers always describe settings that
 * could run; the result says which. */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include <stdint.h>

#include "model/hp.h"
#include "kern/kern.h"
#include "kvspan/plan.h"

/* What the attention layer is opened with: the part of a plan that its buffers depend on. */
typedef struct plan_shape {
    int32_t tp, dcp;
    int32_t n_head;       /* of the TP group */
    int32_t n_index_head; /* 0: no indexer   */
    int32_t topk;         /* 0: no indexer   */
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int32_t max_rows, max_reqs; /* of one step */
    int64_t max_len;
    int32_t interleave;
} plan_shape;

/* Bytes of the workspaces that the attention layer of one rank allocates with those kernels. */
kvs_status plan_workspace_bytes(const plan_shape *s, const kern_table *kern, int64_t *bytes,
                                kvs_error *err);

/* What one rank sends in one layer of a step of n_row tokens. */
kvs_plan_exchange plan_exchange(const plan_shape *s, kvs_exchange how, int32_t n_row);

/* As kvs_plan_make, for a geometry and a config whose ranges have been checked. Workspaces are
 * those of the kernels in `kern`. */
kvs_status plan_make(kvs_plan *p, const hp *g, const kvs_plan_config *cfg, const kern_table *kern,
                     kvs_error *err);

/* The kernels that this machine would choose. */
kvs_status plan_kernels(kern_table *kern, kvs_error *err);

/* Ranges of the config's fields; KVS_INVALID names the field. */
kvs_status plan_check_config(const kvs_plan_config *cfg, kvs_error *err);

#endif
