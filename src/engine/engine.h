/* engine/engine.h - an engine as a whole: settings resolved, the model loaded, ranks started and ended.
 *
 * Rank 0 is the thread that steps; the others are threads that sit in rank_follow, or processes of the caller's
 * comm. One set of weights serves all ranks of a process.
 *
 *     setup.c    settings against the model, refusals, sizes of pool and steps
 *     engine.c   opening and closing; what belongs to the whole
 *     loop.h     iterations of rank 0;  rank.h  what every rank does
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/loop.h"

/* Settings with nothing left to default. */
typedef struct setup {
    kvs_plan plan;   /* tp, dcp, ep, interleave, formats, ctx, mtp, chunk, seqs */
    fwd_config fwd;
    rank_limits lim;
} setup;

/* Resolves cfg (zero is default) against a model on `ranks` ranks (0: as cfg says). KVS_INVALID names the field,
 * the value and the nearest that works. */
kvs_status setup_make(setup *s, const kvs_engine_config *cfg, const hp *h, int32_t ranks, kvs_error *err);
/* Whether the address space takes the caches of `n_here` ranks; KVS_NOMEM says which ctx it would take. */
kvs_status setup_check_space(const setup *s, int32_t n_here, kvs_error *err);

typedef struct rank_thread {
    struct kvs_engine *e;
    pthread_t thread;
    comm *end;
    int32_t number;
} rank_thread;

struct kvs_engine {
    wt *w;
    setup s;
    loop l;
    queue q;
    rank r;
    comm *world;        /* this rank's end */
    bool owns_world;
    rank_thread *other; /* [n_other] */
    int32_t n_other;
    int32_t *ids;       /* [topk] for engine_selection; NULL without trace */
    double load_s;
};

kvs_status engine_open(kvs_engine **out, const kvs_engine_config *cfg, kvs_error *err);
void engine_close(kvs_engine *e);
kvs_status engine_follow(kvs_engine *e, kvs_error *err);
kvs_status engine_submit(kvs_engine *e, const kvs_request *r, uint64_t *id, kvs_error *err);
int32_t engine_selection(const kvs_engine *e, int32_t layer, int32_t row, int32_t *ids, int32_t cap);
void engine_get_stats(const kvs_engine *e, kvs_engine_stats *s);

#endif
