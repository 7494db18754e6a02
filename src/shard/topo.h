/* shard/topo.h - which ranks share heads, which share a cache, and what set-ups are refused.
 *
 * A TP group of tp ranks holds the attention heads, heads / tp on each. Consecutive runs of dcp
 * ranks are the DCP groups: TP rank r is rank r mod dcp of group r / dcp. Queries of a group are
 * gathered, so a kernel of the group works on dcp * heads / tp heads.
 *
 * topo_check lists everything that is wrong with a set-up, each refusal with the rule, the value,
 * the reason and the nearest setting that works; topo_init builds it or reports the first refusal.
 * Nothing else in the project validates these numbers.
 */
#ifndef KVS_SHARD_TOPO_H
#define KVS_SHARD_TOPO_H

#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"
#include "shard/shard.h"

/* Zero means default. */
typedef struct topo_config {
    int32_t tp;          /* ranks that share the heads; default dcp                              */
    int32_t dcp;         /* ranks that share a cache, 1..8, divides tp; default 1                */
    int32_t rank;        /* in the TP group, 0 .. tp - 1                                         */
    int32_t interleave;  /* 1, 2, 4, ... 64; default 1                                           */
    int32_t heads;       /* attention heads of the TP group; 0: not known, not checked           */
    int64_t max_context; /* tokens, below 2^31; 0: not known, not checked                        */
    int kernel_level;    /* 1: dcp 3, 5, 6 and 7 too: equal to tolerance, not to the bit         */
} topo_config;

typedef struct topo {
    int32_t tp, dcp, interleave;
    int32_t rank;             /* in the TP group                                           */
    int32_t i_group, n_group; /* which DCP group, of tp / dcp                              */
    int32_t group_rank;       /* in the DCP group: geom.rank                               */
    int32_t heads;            /* of the TP group                                           */
    int32_t heads_local;      /* of this rank: [rank * heads_local, ...) of all heads      */
    int32_t heads_gathered;   /* of the DCP group: dcp * heads_local, in rank order        */
    int64_t max_context;      /* 0: not known                                              */
    int64_t table_width;      /* block-table entries for max_context                       */
    shard_geom geom;
} topo;

typedef struct topo_refusal {
    kvs_status status; /* KVS_INVALID, or KVS_UNSUPPORTED for what exists at kernel level only */
    const char *rule;  /* short name, static: "dcp_divides_tp"                                 */
    char value[56];    /* "dcp 3, tp 8"                                                        */
    char why[112];     /* the reason, a clause                                                 */
    char nearest[48];  /* "dcp 4", "tp 5, dcp 1"; "" where neither would do                    */
} topo_refusal;

enum { TOPO_N_RULE = 10, TOPO_MAX_CONTEXT = INT32_MAX };

/* Everything that is wrong with cfg, in a fixed order; returns how many, 0 for a set-up that works.
 * A rule is checked where those it rests on hold. `nearest` repairs its own rule and breaks none
 * that holds: where nothing else is wrong it works. */
int32_t topo_check(const topo_config *cfg, topo_refusal out[TOPO_N_RULE]);

/* "value: why; use nearest" in text of cap bytes, cut where it does not fit. */
void topo_refusal_text(const topo_refusal *r, char *text, size_t cap);

/* Fills *out, or leaves it alone and reports the first refusal, worded as above. */
kvs_status topo_init(topo *out, const topo_config *cfg, kvs_error *err);

/* The same topology seen by another TP rank, 0 <= rank < tp. */
topo topo_at(const topo *t, int32_t rank);

#endif
