/* comm/p2p_impl.h: what p2p.c (areas, faults) shares with p2p_process.c (groups over processes); private to both. */
#ifndef KVS_COMM_P2P_IMPL_H
#define KVS_COMM_P2P_IMPL_H

#include <stdbool.h>
#include "base/err.h"
#include "base/mem.h"
#include "comm/p2p.h"

struct p2p {
    p2p_config cfg;
    comm *host;                    /* of ranks that are processes; NULL: all ranks are here */
    int32_t device[WIRE_MAX_RANK]; /* over processes this one's for every rank: from there all areas are reached */
    uint8_t *area[WIRE_MAX_RANK];
    size_t bytes;
    bool named; /* other processes know the area of this one's rank */
    kvs_error told[WIRE_MAX_RANK]; /* what p2p_check has said; code 0: nothing */
};

/* Whether the rank's area lies in this process. */
static inline bool p2p_is_here(const p2p *g, int32_t rank)
{
    return g->host == NULL || rank == comm_rank(g->host);
}

kvs_status p2p_check_config(const p2p_config *c, kvs_error *err);
/* Without areas; NULL: no memory. */
p2p *p2p_new(const p2p_config *cfg);
kvs_status p2p_alloc_area(p2p *g, int32_t rank, size_t bytes, kvs_error *err);
/* Makes the areas that are here as if nothing had ever been sent. */
kvs_status p2p_wipe(const p2p *g, kvs_error *err);

/* Lets go of the areas of other processes. Whether they have let go of this one's, so that it can be freed. */
bool p2p_let_go(p2p *g);

#endif
