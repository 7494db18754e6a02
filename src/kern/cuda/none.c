/* none.c - the list of CUDA variants of a build without CUDA, and its exchanges, which refuse. */
#include "kern/cuda/cuda.h"
#include "kern/exchange.h"

const kern_variant *cuda_variants(int32_t *n)
{
    *n = 0;
    return NULL;
}

static void refuse(dev_queue *q)
{
    dev_queue_fail(q, KVS_UNSUPPORTED,
                   "exchange: this build has no CUDA kernels: build with the preset cuda (KVS_CUDA=ON)");
}

void exchange_sm90(const exchange_args *a, int32_t n, dev_queue *q)
{
    (void)a;
    (void)n;
    refuse(q);
}

void exchange_merge_sm90(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    (void)a;
    (void)n;
    refuse(q);
}

void attn_send_sm90(const attn_args *a, const wire *w, int32_t deterministic, dev_queue *q)
{
    (void)a;
    (void)w;
    (void)deterministic;
    refuse(q);
}
