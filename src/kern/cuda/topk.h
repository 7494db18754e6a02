/* kern/cuda/topk.h - topk with lengths that only the device knows, for selection by steps. */
#ifndef KVS_KERN_CUDA_TOPK_H
#define KVS_KERN_CUDA_TOPK_H

#include "kern/index.h"
#include "shard/shard.h"

typedef struct topk_rows {
    topk_args t;
    const int32_t *len; /* not NULL: row r has min(n_col, len[r] - id_base) columns, n_col of t unread */
    int32_t n_col;
    int32_t fresh;      /* the lists are empty, whatever list_count says                                */
    int32_t fill;       /* -1 and 0 behind the lists                                                    */
} topk_rows;

void topk_rows_launch(const topk_rows *a, dev_queue *q);

#endif
