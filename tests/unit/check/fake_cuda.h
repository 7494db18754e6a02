/* A CUDA device made of host memory: every function of dev.h's CUDA half and the list of CUDA variants,
 * linked in place of the library's, so that what drives a device is tested without one. Its kernels are the
 * reference's, named sm90; a test may break one. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "kern/kern.h"

typedef struct fake_cuda {
    int64_t n_live;    /* allocations not given back */
    int64_t n_open;    /* queues and events not closed */
    int64_t n_graph;   /* graphs launched */
    int32_t absent;    /* 1: there is no device */
    size_t full;       /* > 0: there is no memory for allocations of so many bytes */
    int32_t wrong;     /* 1: attn, mha, gemm, kv_write, topk and index_select give a wrong value */
    int32_t cut;       /* 1: topk_merge gives a wrong cut */
    int32_t cuts;      /* 1: attn cuts results to bf16 in place of rounding them */
    int32_t narrow;    /* 1: index_select gives a wrong value where few blocks share the work */
    int32_t peeks;     /* 1: index_select looks at a row's length while it is launched, and rejects a million */
    int32_t dies;      /* 1: merge fails as a device does */
    void *shared;      /* the last allocation of shared memory not given back */
    int32_t replays;   /* 1: graphs do all they hold each time they are launched, else the first time */
    int32_t deaf;      /* 1: exchanges do not notice that ranks differ */
    int32_t blames;    /* 1: exchanges name ranks that do not differ */
    int32_t device;    /* which of a host's the one device is: another UUID for each */
    int32_t dies_at;   /* exchange between processes in which this one ends, from 1; 0: none */
    int32_t limit_ms;  /* > 0: how long such exchanges wait at most, whatever they are told */
    int32_t strays;    /* 1: attention that sends gives a wrong value */
    void (*on_sync)(void); /* what waiting for a queue does */
    int64_t n_refused; /* args that are not aligned to 16 bytes */
} fake_cuda;

extern fake_cuda fake;

/* Whether a call of n bytes of args was recorded into a graph, and is not to be made now. */
typedef void (*fake_call)(const void *args, dev_queue *q);
int fake_recorded(fake_call fn, const void *args, size_t bytes);

#endif
