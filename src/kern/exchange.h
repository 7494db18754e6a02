/* kern/exchange.h - exchanges between ranks whose kernels reach each other's memory (dev/wire.h).
 *
 * One launch serves one rank, or several that share a device: they wait for each other, so they must run
 * at the same time, which blocks of one launch do (they all fit on the device at once) and launches on two
 * queues need not. Every rank of the group takes part in every exchange with the same op, rows and widths;
 * kernels compare that, and one that waits longer than the wire's limit gives up. Either ends the group: its
 * fault is set on every rank, later launches return at once, results are void (comm/p2p.h says why).
 *
 * Nothing here belongs to one graph or one epoch: the number of an exchange is counted by the kernels.
 *
 * These are not slots of the kernel table, whose ops run on one queue: `kvspan check --comm --device cuda`
 * knows them. For CUDA only; a build without refuses on the queue.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_EXCHANGE_H
#define KVS_KERN_EXCHANGE_H

#include "dev/dev.h"
#include "dev/wire.h"
#include "kern/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What an exchange is for; part of what is compared. Names: exchange_op_name. */
typedef enum exchange_op {
    EXCHANGE_BARRIER, /* heads only                                                                 */
    EXCHANGE_Q,       /* queries gathered                                                           */
    EXCHANGE_PARTIAL, /* partials and LSE, to the ranks of their heads                              */
    EXCHANGE_SELECT,  /* candidates of a selection gathered                                         */
    EXCHANGE_OTHER,
    EXCHANGE_N_OP
} exchange_op;

const char *exchange_op_name(int32_t op);

enum { EXCHANGE_MAX_PART = 4 };

/* n_row rows of `bytes` each, to every rank and from every rank; the own one is copied too. Gather:
 * src_rank 0, rank r's rows go to dst + r * dst_rank on every rank. All-to-all: src_rank is the way from
 * what goes to one rank to what goes to the next. bytes, addresses and strides: multiples of 4; fast where
 * all of them are multiples of 16. */
typedef struct exchange_part {
    const void *src;
    int64_t src_rank, src_row; /* bytes */
    void *dst;
    int64_t dst_rank, dst_row; /* bytes */
    int32_t bytes;
} exchange_part;

/* The parts make one message. */
typedef struct exchange_args {
    wire w;
    int32_t op;
    int32_t n_row;
    int32_t n_part;
    exchange_part part[EXCHANGE_MAX_PART];
} exchange_args;

/* Partials of all heads on this rank's shard go to the ranks of the heads and are merged there as they
 * come: bits of merge_args (kern/attn.h) over the ranks in their order, by the tree for 1, 2, 4, 8 ranks, else
 * by the fold. */
typedef struct exchange_merge_args {
    wire w;
    int32_t n_row;
    int32_t n_head;        /* of all ranks: a multiple of n_rank                                    */
    const float *part;     /* [n_row, n_head, 512]                                                  */
    int64_t part_row;      /* elements from row to row                                              */
    const float *part_lse; /* [n_row, n_head]                                                       */
    int64_t lse_row;
    void *out;             /* [n_row, n_head / n_rank, 512] of the own heads                        */
    int32_t out_type;      /* kvs_dtype                                                             */
    int64_t out_row;       /* elements                                                              */
    float *lse;            /* [n_row, n_head / n_rank] dense; may be NULL                           */
    uint64_t *n_nan;       /* NaN among the LSE is counted here; may be NULL                        */
    int32_t sent;          /* attn_send_sm90 has sent what is the peers': part and part_lse are read
                              for the own heads alone. The same for all ranks of a launch           */
} exchange_merge_args;

/* a: [n] ranks of the group that share the queue's device, n up to WIRE_MAX_RANK. */
void exchange_sm90(const exchange_args *a, int32_t n, dev_queue *q);
void exchange_merge_sm90(const exchange_merge_args *a, int32_t n, dev_queue *q);

/* attn_sm90 (or, deterministic, attn_sm90_det) of all heads on this rank's shard, whose results go to the ranks of their heads
 * as they are made: the message of the rank's next exchange, which must be a merge that is `sent`, of as many rows and heads,
 * behind it on the queue. Those of the own heads are written where the args say (out_stride_head is 512); of the other
 * heads nothing is.
 * Ranks may differ in whether attention sends. The same bits either way. For rows of fp8_ds_mla by lists of slots, and for
 * all that the deterministic mode takes. */
void attn_send_sm90(const attn_args *a, const wire *w, int32_t deterministic, dev_queue *q);

/* Why the args are not for the kernels; NULL where they are. attn_send_refuses: what attention itself refuses is for its
 * variant to say. */
const char *attn_send_refuses(const attn_args *a, const wire *w, int32_t deterministic);
const char *exchange_refuses(const exchange_args *a);
const char *exchange_merge_refuses(const exchange_merge_args *a);
/* Bytes of the message to one peer, which a wire must have room for. */
int64_t exchange_bytes(const exchange_args *a);
int64_t exchange_merge_bytes(const exchange_merge_args *a);
/* In how many works a head is sent, each with an LSE of its own. */
int32_t exchange_merge_works(int32_t n_row, int32_t n_head, int32_t n_rank);
/* Cells of a slot that messages of at most `bytes` to a peer fit into, whatever parts or heads they have. */
uint32_t exchange_cells_for(int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
