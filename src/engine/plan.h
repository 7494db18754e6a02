/* engine/plan.h - the memory and exchange plan of a model on a number of devices.
 *
 * Integers in, integers out. Each size has one formula, which is the one that the engine opens with:
 * rows and pages num/kvfmt.h, ownership shard/shard.h, weights weights.h, workspaces fwd_bytes and
 * rank_bytes. What a rank is opened with follows from a plan by plan_fwd_config and plan_limits,
 * here and when an engine opens. A refused setting is replaced by the nearest one that works before
 * anything is worked out with it, so the numbers always describe settings that could run; the
 * result says which. */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include <stdint.h>

#include "engine/rank.h"
#include "kvspan/plan.h"
#include "model/fwd.h"
#include "model/hp.h"

/* The part of a plan that an exchange depends on. */
typedef struct plan_shape {
    int32_t tp, dcp, interleave;
    int32_t n_head; /* of the TP group */
    int32_t topk;   /* 0: no indexer   */
    kvs_kv_format kv;
    int64_t max_len;
} plan_shape;

/* What one rank sends in one layer of a step of n_row tokens. */
kvs_plan_exchange plan_exchange(const plan_shape *s, kvs_exchange how, int32_t n_row);

/* As kvs_plan_make, for a geometry and a config whose ranges have been checked. `like` has what sizes
 * depend on and a plan does not say: cpu and kernels (those of cfg are not read), trace,
 * selection_last and the like. */
kvs_status plan_make(kvs_plan *p, const hp *g, const kvs_plan_config *cfg, const fwd_config *like,
                     kvs_error *err);

/* What a rank of the plan is opened with: `like`, with the plan's settings. Its pool holds `seqs`
 * sequences of ctx tokens, which may be more pages than a cache can have. */
fwd_config plan_fwd_config(const kvs_plan *p, const fwd_config *like);
rank_limits plan_limits(const kvs_plan *p); /* timeout_ms 0 */

/* Ranges of the config's fields; KVS_INVALID names the field. */
kvs_status plan_check_config(const kvs_plan_config *cfg, kvs_error *err);

#endif
