/* world.h: the loop of an engine over the fake forward pass, with ranks as threads. */
#ifndef ENGINE_WORLD_H
#define ENGINE_WORLD_H

#include "engine/loop.h"
#include "fake_fwd.h"
#include "unit/unit.h"

enum { WORLD_MAX_TP = 8, WORLD_OUT = 1200 };

typedef struct world_cfg {
    int32_t tp, dcp, chunk, mtp, max_seqs, vocab, n_eos, eos[2];
    int64_t ctx, n_page; /* n_page 0: room for all */
    bool share;          /* index_share_mtp */
    bool no_reuse, keep_prompt;
} world_cfg;

typedef struct world {
    world_cfg c;
    wt w;
    queue q;
    loop l;
    rank r[WORLD_MAX_TP];
    comm *end[WORLD_MAX_TP];
    pthread_t thread[WORLD_MAX_TP];
    kvs_status followed[WORLD_MAX_TP];
    kvs_error err[WORLD_MAX_TP];
} world;

/* What one request gave. */
typedef struct answer {
    int32_t token[WORLD_OUT];
    int32_t n, end;      /* end: a kvs_finish, -1 an error, 0 none yet */
    uint64_t digest;
    int64_t done, total, reused; /* of the last progress */
    int32_t n_progress;
    kvs_error error;
} answer;

world_cfg world_default(void);
void world_open(world *w, world_cfg c);
/* Ends the ranks; every follower has returned. */
void world_close(world *w);

uint64_t world_submit(world *w, const kvs_request *r);
/* Steps and polls until idle or the engine fails; answers[id - 1] of n. Returns the last status. */
kvs_status world_run(world *w, answer *answers, int32_t n, kvs_error *err);
/* Adds what a poll gives. */
void world_poll(world *w, answer *answers, int32_t n);

/* One request on a world of its own. */
answer world_answer(world_cfg c, const kvs_request *r);

/* The prompt of n tokens number `which`. */
void world_prompt(int32_t *token, int64_t n, int32_t vocab, uint64_t which);

#endif
