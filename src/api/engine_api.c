/* api/engine_api.c - public functions of kvspan/engine.h: arguments checked, engine/ called. */
#include "kvspan/engine.h"

#include <string.h>

#include "base/err.h"
#include "engine/engine.h"

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

kvs_status kvs_engine_open(kvs_engine **out, const kvs_engine_config *cfg, kvs_error *err)
{
    if (out == NULL) {
        return err_set(err, KVS_INVALID, "out is NULL: give the address of a kvs_engine pointer");
    }
    *out = NULL;
    if (cfg == NULL || cfg->struct_size < sizeof cfg->struct_size) {
        return err_set(err, KVS_INVALID,
                       "kvs_engine_config: start from kvs_engine_config_default()");
    }
    kvs_engine_config c;
    memset(&c, 0, sizeof c);
    memcpy(&c, cfg, smaller(cfg->struct_size, sizeof c));
    if (c.model_dir == NULL || c.model_dir[0] == '\0') {
        return err_set(err, KVS_INVALID,
                       "kvs_engine_config.model_dir is missing: name a model's folder");
    }
    return engine_open(out, &c, err);
}

void kvs_engine_close(kvs_engine *e)
{
    engine_close(e);
}

static kvs_status no_engine(kvs_error *err)
{
    return err_set(err, KVS_INVALID, "the engine is NULL: open one with kvs_engine_open");
}

kvs_status kvs_engine_follow(kvs_engine *e, kvs_error *err)
{
    return e != NULL ? engine_follow(e, err) : no_engine(err);
}

kvs_status kvs_engine_submit(kvs_engine *e, const kvs_request *r, uint64_t *id, kvs_error *err)
{
    if (e == NULL) {
        return no_engine(err);
    }
    if (r == NULL || id == NULL || r->struct_size < sizeof r->struct_size) {
        return err_set(err, KVS_INVALID,
                       "kvs_request: give one made by kvs_request_default(), and id");
    }
    kvs_request full;
    memset(&full, 0, sizeof full);
    memcpy(&full, r, smaller(r->struct_size, sizeof full));
    return engine_submit(e, &full, id, err);
}

void kvs_engine_cancel(kvs_engine *e, uint64_t id)
{
    if (e != NULL) {
        queue_cancel(&e->q, e->l.run, e->l.max_seqs, id);
    }
}

kvs_status kvs_engine_step(kvs_engine *e, kvs_error *err)
{
    if (e == NULL) {
        return no_engine(err);
    }
    if (comm_rank(e->world) != 0) {
        return err_set(err, KVS_INVALID, "rank %d: only rank 0 steps; use kvs_engine_follow",
                       (int)comm_rank(e->world));
    }
    return loop_step(&e->l, err);
}

int32_t kvs_engine_poll(kvs_engine *e, kvs_event *events, int32_t cap)
{
    return e != NULL && events != NULL && cap > 0 ? queue_poll(&e->q, events, cap) : 0;
}

const char *kvs_finish_name(kvs_finish reason)
{
    static const char *const name[] = {"?", "stop", "length", "context", "interrupted"};
    return reason >= KVS_FINISH_STOP && reason <= KVS_FINISH_INTERRUPTED ? name[reason] : "?";
}

int32_t kvs_engine_selection(const kvs_engine *e, int32_t layer, int32_t row, int32_t *ids,
                             int32_t cap)
{
    return e != NULL ? engine_selection(e, layer, row, ids, cap) : -1;
}

void kvs_engine_get_stats(const kvs_engine *e, kvs_engine_stats *out)
{
    if (e == NULL || out == NULL || out->struct_size < sizeof out->struct_size) {
        return;
    }
    kvs_engine_stats s;
    engine_get_stats(e, &s);
    const size_t n = out->struct_size;
    s.struct_size = n;
    memcpy(out, &s, smaller(n, sizeof s));
}
