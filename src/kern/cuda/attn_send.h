/* attn_send.h - what attention's kernels are told of sending their results (attn_send.cuh says how they do). */
#ifndef KVS_KERN_CUDA_ATTN_SEND_H
#define KVS_KERN_CUDA_ATTN_SEND_H

#include "dev/wire.h"

struct attn_send {
    wire w;
    int32_t row0;   /* of the launch's first row among those of the message */
    int32_t local;  /* heads of a rank                                      */
    int32_t works;  /* LSEs of a head: exchange_merge_works                 */
    uint32_t units; /* (row, head) that go to a peer                        */
};

#endif
