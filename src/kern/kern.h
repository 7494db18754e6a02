/* kern/kern.h - the kernel table: one slot per op, filled by the reference and overwritten by variants.
 *
 * A variant is chosen by (op, CPU features, overrides), never by shape. kern_init takes the features the
 * caller allows (base/cpu.h mask) and optional overrides "op=variant,op=variant". Every op's variants are
 * listed in one static array in kern.c; `kvspan check` walks that list, so a kernel that is not listed does
 * not exist. Which variant a slot holds is part of the start-up handshake between ranks.
 *
 * A table belongs to one place. kern_init fills one for the host, where every slot is filled;
 * kern_init_cuda fills a fresh one for a CUDA device with CUDA kernels only and leaves the slots of other
 * ops empty: kern_need refuses, naming the first hole, before one of them is called.
 *
 * A CUDA kernel is the same function of the same args, with these rules: data, tables, lengths, statistics
 * and counters are memory of the device (counters are added to with atomics); arrays of pointers are memory
 * of the host with at most 8 entries. It enqueues work on the queue's stream and returns: nothing is
 * allocated, read back or waited for, and all of it can be captured in a graph. A failed launch goes to
 * dev_queue_fail. Scratch sizes depend on shapes only.
 */
#ifndef KVS_KERN_KERN_H
#define KVS_KERN_KERN_H

#include "kern/attn.h"
#include "kern/gemm.h"
#include "kern/index.h"
#include "kern/kvio.h"
#include "kern/mha.h"
#include "kern/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* op name, slot of the function, slot of its scratch query or "none" */
#define KERN_OP_LIST(X)                                                                                 \
    X(attn) X(merge) X(quant_q) X(index_quant) X(index_score) X(index_select) X(topk) X(topk_merge)    \
    X(localise) X(kv_write) X(index_write) X(gather)                                                    \
    X(norm) X(rope) X(act) X(route) X(gemm) X(mha)

typedef enum kern_op {
#define KERN_OP_ENUM(name) KERN_OP_##name,
    KERN_OP_LIST(KERN_OP_ENUM)
#undef KERN_OP_ENUM
    KERN_N_OP
} kern_op;

typedef struct kern_table {
    const char *variant[KERN_N_OP]; /* name of the variant in each slot: "ref", "avx2", ...            */
    attn_fn attn;
    attn_scratch_fn attn_scratch;
    mha_fn mha;
    mha_scratch_fn mha_scratch;
    merge_fn merge;
    quant_q_fn quant_q;
    index_quant_fn index_quant;
    index_score_fn index_score;
    index_score_scratch_fn index_score_scratch;
    index_select_fn index_select;
    index_select_scratch_fn index_select_scratch;
    topk_fn topk;
    topk_scratch_fn topk_scratch;
    topk_merge_fn topk_merge;
    topk_merge_scratch_fn topk_merge_scratch;
    localise_fn localise;
    localise_scratch_fn localise_scratch;
    kv_write_fn kv_write;
    index_write_fn index_write;
    gather_fn gather;
    norm_fn norm;
    rope_fn rope;
    act_fn act;
    route_fn route;
    gemm_fn gemm;
    gemm_scratch_fn gemm_scratch;
} kern_table;

typedef enum kern_place { KERN_HOST = 0, KERN_CUDA = 1 } kern_place;

/* kern_variant.flags. KERN_FREE_ORDER: the bits of a row may depend on what shares the call (its other
 * rows and heads, the cut into lanes and segments), though never on chance; a score that is NaN or +inf
 * drops the whole (row, head), where the contract drops its segment. */
enum { KERN_FREE_ORDER = 1 };

/* One implementation of one op. `apply` overwrites the op's slots in a table. */
typedef struct kern_variant {
    kern_op op;
    const char *name;
    uint32_t features;              /* base/cpu.h bits it needs                                        */
    void (*apply)(kern_table *t);
    kern_place place;
    uint32_t flags;
    /* Why these args of the op (attn_args, ...) are not for it; NULL where they are. Looks at shapes,
     * types, strides and alignment, not at data. NULL itself: it takes all that the contract allows. */
    const char *(*refuses)(const void *args);
    /* What kvspan check allows beyond f32 sums that round to nearest, in units of 2^-24; 0: nothing.
     * dot_u: of one dot product, times the product of the norms of its two vectors. key_u: of the sum of
     * n weighted values, times n times that sum's size. */
    float dot_u, key_u;
    /* What the values of an fp8_ds_mla row are held in multiples of; 0: as they are. */
    float step;
} kern_variant;

/* A variant of the host that keeps the whole contract. */
#define KERN_VARIANT(op, name, features, apply)                                                         \
    {                                                                                                   \
        KERN_OP_##op, name, features, apply, KERN_HOST, 0, NULL, 0, 0, 0                                \
    }

const char *kern_op_name(kern_op op);
/* All variants of the host of all ops, reference first, better ones later. */
const kern_variant *kern_variants(int32_t *n);
/* Those of CUDA, in this build; none (*n 0) in one without. */
const kern_variant *kern_variants_cuda(int32_t *n);
/* Fills `t` with the best variants allowed by `features`, then applies `overrides` (may be NULL or "").
 * KVS_INVALID names an unknown op or variant and lists what exists; KVS_UNSUPPORTED a missing feature. */
kvs_status kern_init(kern_table *t, uint32_t features, const char *overrides, kvs_error *err);
/* As kern_init, for a CUDA device: slots of ops without a CUDA kernel are NULL, their variant too. */
kvs_status kern_init_cuda(kern_table *t, const char *overrides, kvs_error *err);
/* KVS_UNSUPPORTED, naming the first one, when a slot of the n ops is empty. */
kvs_status kern_need(const kern_table *t, const kern_op *ops, int32_t n, kvs_error *err);

#ifdef __cplusplus
}
#endif
#endif
