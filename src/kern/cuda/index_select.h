/* kern/cuda/index_select.h - selection by steps: for the args that the fused kernel does not take (f32 keys,
 * lists longer than its shared memory), the same selection by index_score and topk over ranges of keys. */
#ifndef KVS_KERN_CUDA_INDEX_SELECT_H
#define KVS_KERN_CUDA_INDEX_SELECT_H

#include "kern/index.h"

/* Keys of a row that are scored; positions a few tiles further are still int32. */
enum { INDEX_MAX_LEN = INT32_MAX - 1023 };

#ifdef __cplusplus
extern "C" {
#endif

size_t select_steps_scratch(const index_select_args *a, const dev_queue *q);
void select_steps(const index_select_args *a, dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
