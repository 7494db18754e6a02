/* no_roof_cuda.c - what stands for roof_cuda.cu in a build without CUDA: the bench refuses before it gets
 * here, and a queue that gets here fails. */
#include "check/roof_cuda.h"

static const char reason[] = "this build has no CUDA kernels";

void roof_cuda_read(const void *p, int64_t n_bytes, uint32_t *sink, dev_queue *q)
{
    (void)p;
    (void)n_bytes;
    (void)sink;
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

void roof_cuda_products(double flop, float *sink, dev_queue *q)
{
    (void)flop;
    (void)sink;
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}

void roof_cuda_gather(const uint8_t *kv, int64_t row_bytes, const int32_t *slots, int64_t stride,
                      const int32_t *count, int32_t n_lane, int32_t n_row, uint32_t *sink, dev_queue *q)
{
    (void)kv;
    (void)row_bytes;
    (void)slots;
    (void)stride;
    (void)count;
    (void)n_lane;
    (void)n_row;
    (void)sink;
    dev_queue_fail(q, KVS_UNSUPPORTED, reason);
}
