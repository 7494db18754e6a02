/* api/plan_api.c - public functions of kvspan/plan.h. */
#include "kvspan/plan.h"

#include <string.h>

#include "base/err.h"
#include "engine/plan.h"

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

kvs_status kvs_plan_make(kvs_plan *out, const kvs_plan_config *cfg, kvs_error *err)
{
    if (out == NULL || cfg == NULL) {
        return err_set(err, KVS_INVALID, "plan: out and cfg must be given");
    }
    if (cfg->struct_size < sizeof cfg->struct_size || out->struct_size < sizeof out->struct_size) {
        return err_set(err, KVS_INVALID,
                       "plan: struct_size is not set: use kvs_plan_config_default and "
                       "kvs_plan_empty");
    }
    kvs_plan_config c;
    memset(&c, 0, sizeof c);
    memcpy(&c, cfg, smaller(cfg->struct_size, sizeof c));
    TRY(plan_check_config(&c, err));
    if ((c.preset == NULL) == (c.model_dir == NULL)) {
        return err_set(err, KVS_INVALID, "plan: give %s: a preset or a model folder",
                       c.preset == NULL ? "a model" : "one model, not two");
    }
    hp g;
    TRY(c.preset != NULL ? hp_find(&g, c.preset, err) : hp_read(&g, c.model_dir, err));
    kvs_plan p = kvs_plan_empty();
    const fwd_config like = {.cpu = c.cpu, .kernels = c.kernels};
    TRY(plan_make(&p, &g, &c, &like, err));
    p.struct_size = out->struct_size;
    memcpy(out, &p, smaller(out->struct_size, sizeof p));
    return KVS_OK;
}

const char *kvs_plan_preset(int32_t i)
{
    const hp *g = hp_preset(i);
    return g != NULL ? g->name : NULL;
}
