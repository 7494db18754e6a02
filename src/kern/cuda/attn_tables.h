/* attn_tables.h - deterministic attention over block tables on sm_90a, from the host. */
#ifndef KVS_KERN_CUDA_ATTN_TABLES_H
#define KVS_KERN_CUDA_ATTN_TABLES_H

#include <cuda_runtime.h>

#include "kern/attn.h"
#include "kern/cuda/attn_send.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Why args with a table are not for it; NULL where they are. */
const char *attn_tables_refuses(const attn_args *a);
/* Bytes of scratch, and the op enqueued, for args that are not refused: lanes, segments, fold and tree of
 * kern/attn.h. to: as attn_sparse_launch takes it. */
size_t attn_tables_scratch(const attn_args *a, int n_sm);
cudaError_t attn_tables_launch(const attn_args *a, int n_sm, const struct attn_send *to, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
