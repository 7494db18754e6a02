/* kern/cuda/cuda.h - the CUDA kernels: their host functions, and what they share.
 *
 * A kernel op_sm90 is a host function with the op's args struct (kern/kern.h says what its pointers are)
 * that launches on q->stream and reports a failed launch by cuda_launched. It is listed in cuda/init.c.
 *
 * Alignment. Rows that are moved 16 bytes at a time begin at addresses, and follow at strides, that are
 * multiples of 16 bytes: caches (page and row stride too), queries, latents, ropes, keys, outputs.
 * Everything else (slots, tables, lengths, lse, weights, scores, counters) is aligned to its element. A
 * launcher refuses what breaks this; it never falls back to another kernel.
 *
 * Read by the C compiler and by nvcc; the helpers of launches by nvcc alone.
 */
#ifndef KVS_KERN_CUDA_CUDA_H
#define KVS_KERN_CUDA_CUDA_H

#include "kern/kern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All variants for CUDA (init.c; none.c in a build without). */
const kern_variant *cuda_variants(int32_t *n);

/* attn_sm90.cu: a row's keys cut by the work, or (det) by lane and segment, bits as kern/attn.h says */
void attn_sm90(const attn_args *a, dev_queue *q);
size_t attn_scratch_sm90(const attn_args *a, const dev_queue *q);
void attn_sm90_det(const attn_args *a, dev_queue *q);
size_t attn_scratch_sm90_det(const attn_args *a, const dev_queue *q);
/* mha_sm90.cu */
void mha_sm90(const mha_args *a, dev_queue *q);
size_t mha_scratch_sm90(const mha_args *a, const dev_queue *q);
/* gemm_sm90.cu */
void gemm_sm90(const gemm_args *a, dev_queue *q);
size_t gemm_scratch_sm90(const gemm_args *a, const dev_queue *q);
/* merge.cu */
void merge_sm90(const merge_args *a, dev_queue *q);
/* quant.cu */
void quant_q_sm90(const quant_q_args *a, dev_queue *q);
void index_quant_sm90(const index_quant_args *a, dev_queue *q);
/* kvio.cu */
void kv_write_sm90(const kv_write_args *a, dev_queue *q);
void index_write_sm90(const index_write_args *a, dev_queue *q);
void gather_sm90(const gather_args *a, dev_queue *q);
/* index_sm90.cu, index_select_sm90.cu, topk.cu, localise.cu */
void index_score_sm90(const index_score_args *a, dev_queue *q);
size_t index_score_scratch_sm90(const index_score_args *a, const dev_queue *q);
void index_select_sm90(const index_select_args *a, dev_queue *q);
size_t index_select_scratch_sm90(const index_select_args *a, const dev_queue *q);
void topk_sm90(const topk_args *a, dev_queue *q);
size_t topk_scratch_sm90(const topk_args *a, const dev_queue *q);
void topk_merge_sm90(const topk_merge_args *a, dev_queue *q);
size_t topk_merge_scratch_sm90(const topk_merge_args *a, const dev_queue *q);
void localise_sm90(const localise_args *a, dev_queue *q);
size_t localise_scratch_sm90(const localise_args *a, const dev_queue *q);

/* Why the args are not for the kernel; NULL where they are. */
const char *index_score_refuses_sm90(const void *args);
const char *index_select_refuses_sm90(const void *args);
const char *topk_refuses_sm90(const void *args);
const char *topk_merge_refuses_sm90(const void *args);
const char *localise_refuses_sm90(const void *args);
const char *attn_refuses_sm90(const void *args);
const char *attn_det_refuses_sm90(const void *args);
const char *mha_refuses_sm90(const void *args);
const char *gemm_refuses_sm90(const void *args);
const char *merge_refuses_sm90(const void *args);
const char *quant_q_refuses_sm90(const void *args);
const char *index_quant_refuses_sm90(const void *args);
const char *kv_write_refuses_sm90(const void *args);
const char *index_write_refuses_sm90(const void *args);
const char *gather_refuses_sm90(const void *args);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
#include <cuda_runtime.h>

static inline cudaStream_t cuda_stream(const dev_queue *q)
{
    return (cudaStream_t)q->stream;
}

/* After a launch: records its failure with the name of the kernel. */
static inline void cuda_launched(dev_queue *q, const char *kernel)
{
    dev_queue_fail_cuda(q, (int)cudaGetLastError(), kernel);
}

/* At the begin of a launcher: true, with the reason recorded, when it must not go on. */
static inline bool cuda_refused(dev_queue *q, const char *why)
{
    if (why != NULL) {
        dev_queue_fail(q, KVS_UNSUPPORTED, why);
    }
    return why != NULL;
}

/* Lets blocks of a kernel have `bytes` of shared memory on the current device; *done, one word per kernel,
 * remembers for which devices that has been asked. */
template <typename F>
static inline void cuda_shared_max(F *kernel, size_t bytes, uint64_t *done)
{
    int device = 0;
    (void)cudaGetDevice(&device);
    const uint64_t bit = (uint64_t)1 << (device & 63);
    if ((__atomic_load_n(done, __ATOMIC_RELAXED) & bit) == 0) {
        (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        (void)__atomic_fetch_or(done, bit, __ATOMIC_RELAXED);
    }
}

static inline bool cuda_aligned16(const void *p)
{
    return ((uintptr_t)p & 15u) == 0;
}

/* Blocks of a grid-stride loop over n items, `per_block` in each: enough for all, at most `waves` times
 * the device's multiprocessors. */
static inline unsigned cuda_blocks(const dev_queue *q, int64_t n, int64_t per_block, int32_t waves)
{
    const int64_t want = (n + per_block - 1) / per_block;
    const int64_t most = (int64_t)(q->n_sm > 0 ? q->n_sm : 1) * waves;
    return (unsigned)(want < 1 ? 1 : want < most ? want : most);
}
#endif

#endif
