/* kern/cuda/topk.h - topk with lengths that only the device knows, for selection by steps; the cut of a few lists. */
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

enum { TOPK_MAX_LIST = 8 };

/* topk_merge_args, the lists' addresses in it. */
typedef struct topk_lists {
    int32_t n_row, n_list, k;
    int64_t stride;
    const float *score[TOPK_MAX_LIST];
    const int32_t *id[TOPK_MAX_LIST];
    const int32_t *count[TOPK_MAX_LIST];
    float *cut_score;
    int32_t *cut_id, *n_total;
} topk_lists;

/* topk_cut.cu: the cut alone, of lists that fit. */
bool topk_cut_fits(const topk_lists *a);
void topk_cut_launch(const topk_lists *a, dev_queue *q);

#endif
