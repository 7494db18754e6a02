/* check/roof_cuda.h - the ceilings of a CUDA device's memory and tensor cores. Read by the C compiler and by nvcc. */
#ifndef CHECK_ROOF_CUDA_H
#define CHECK_ROOF_CUDA_H

#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads n_bytes, a multiple of 16, once. sink: [1], written never in practice. */
void roof_cuda_read(const void *p, int64_t n_bytes, uint32_t *sink, dev_queue *q);
/* Reads the rows that lists of slots name, -1 left out: slots [n_row, stride], count [n_row, n_lane]. Row s
 * lies at kv + s * row_bytes. */
void roof_cuda_gather(const uint8_t *kv, int64_t row_bytes, const int32_t *slots, int64_t stride,
                      const int32_t *count, int32_t n_lane, int32_t n_row, uint32_t *sink, dev_queue *q);

/* So many operations (two to a multiply-add) by bf16 products of the tensor cores and nothing else, on operands of normal
 * values that stay in shared memory. sink: [1], written never in practice. */
void roof_cuda_products(double flop, float *sink, dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
