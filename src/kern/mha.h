/* kern/mha.h - contract of the attention op in its unabsorbed (multi-head) form, block of keys by block of keys.
 *
 * For each query row and head: softmax attention over the first len[row] keys, every head with keys and values of
 * its own, folded into what earlier calls for the same row gave. Keys [512 b, 512 b + 512) are block b: one
 * segment, an online softmax over tiles of 64 keys, normalised, then merge_node(so far, block) of kern/exp.h. The
 * caller gives the blocks of a context in order, with `first` for the first, in as many calls as it likes: a call
 * of many blocks leaves the bits of as many calls of one.
 *
 * Operands: q and the shared rope part of the keys as given; expanded keys and values come in f32, as a product
 * leaves them, and are rounded once to bf16 where `type` is bf16. Scores and sums accumulate in f32 (the
 * reference: double within a block); scaled score = (q_nope . k_nope + q_rope . k_rope) * softmax_scale; P is
 * rounded to the product's operand type where the variant says so, the row sum uses the unrounded f32 P. A variant
 * may fold by going on from the state (out, lse) instead of a merge node: the same function, other roundings.
 *
 * Row invariance: the bits of (row, head) depend on that row, that head and its keys only. A key past len[row]
 * cannot touch the row even if it holds NaN. A NaN or +inf score, and a block whose result is not finite, make
 * the block the identity for that (row, head) and are counted.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_MHA_H
#define KVS_KERN_MHA_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MHA_BLOCK = 512, MHA_TILE = 64, MHA_MAX_DIM = 4096 };

typedef struct mha_args {
    int32_t n_row, n_head;       /* >= 0, >= 1                                                       */
    int32_t nope, v_dim;         /* 1..MHA_MAX_DIM                                                   */
    int32_t type;                /* kvs_dtype of q, of rope, and of what keys and values round to    */
    const void *q;               /* [n_row, n_head, nope + 64]: nope, then rope                      */
    int64_t q_stride_row, q_stride_head; /* elements                                                 */
    float softmax_scale;         /* finite, > 0                                                      */

    int32_t n_key;               /* >= 0; a call but the last for a row: a multiple of MHA_BLOCK     */
    const float *kv;             /* [n_key, n_head, nope + v_dim]: the key's nope part, then values  */
    int64_t kv_stride_key, kv_stride_head; /* elements                                               */
    const void *rope;            /* [n_key, 64] the key's rope part, of every head                   */
    int64_t rope_stride;         /* elements                                                         */
    const int32_t *len;          /* [n_row] keys of the call each row attends; above n_key: n_key,
                                    below 0: 0                                                       */

    int32_t first;               /* 1: out and lse hold nothing yet and are not read                 */
    float *out;                  /* [n_row, n_head, v_dim] f32, normalised; in: of earlier calls     */
    int64_t out_stride_row, out_stride_head; /* elements                                             */
    float *lse;                  /* [n_row, n_head] dense                                            */
    uint64_t *n_nan;             /* (row, head, block) that were dropped are added; may be NULL      */
    void *scratch;               /* mha_scratch bytes, 64-byte aligned                               */
    size_t scratch_bytes;
} mha_args;

typedef void (*mha_fn)(const mha_args *a, dev_queue *q);
/* Bytes of scratch for these args on this queue: on the host of nope, v_dim and workers alone, on a device of
 * n_key and n_head, too. */
typedef size_t (*mha_scratch_fn)(const mha_args *a, const dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
