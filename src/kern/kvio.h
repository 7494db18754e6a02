/* kern/kvio.h - contracts of the ops that move rows into and out of a rank's cache.
 *
 * kv_write: latent and rope of new tokens -> cache rows, quantised as num/kvfmt.h says. index_write: index
 * keys -> index pages. gather: cache rows of several requests -> contiguous dequantised rows.
 * The slots of one call, other than -1, are distinct: workers write them side by side.
 * A slot of -1 is skipped without reading the token's data; a slot outside the pool is skipped and counted.
 * NaN stays NaN and is counted.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_KVIO_H
#define KVS_KERN_KVIO_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvio_stats {
    uint64_t n_written; /* rows written                                                              */
    uint64_t n_bad_id;  /* slots outside the pool, other than -1                                     */
    uint64_t n_nan;     /* NaN values among the written, in any format                               */
    uint64_t n_sat;     /* values that lost magnitude to +-448: |x / s| > 464, infinity too           */
} kvio_stats;

typedef struct kv_write_args {
    int64_t n_tok;
    const void *latent;          /* [n_tok, latent_stride] 512 values each                           */
    const void *rope;            /* [n_tok, rope_stride] 64 values each                              */
    int64_t latent_stride, rope_stride; /* elements                                                  */
    int32_t in_type;             /* kvs_dtype of both                                                */
    const int64_t *slot;         /* [n_tok]                                                          */
    uint8_t *kv;
    int32_t fmt;                 /* kvs_kv_format                                                    */
    int64_t page_stride, row_stride; /* bytes                                                        */
    int64_t n_slot;
    int32_t rule;                /* kvs_scale_rule, fp8_ds_mla only                                  */
    float k_scale;               /* fp8 only                                                         */
    kvio_stats *stats;           /* may be NULL                                                      */
} kv_write_args;
typedef void (*kv_write_fn)(const kv_write_args *a, dev_queue *q);

typedef struct index_write_args {
    int64_t n_tok;
    const void *key;             /* [n_tok, key_stride] 128 values each                              */
    int64_t key_stride;          /* elements                                                         */
    int32_t in_type;             /* kvs_dtype                                                        */
    const int64_t *slot;         /* [n_tok] same slots as the latent rows: page * 64 + offset        */
    uint8_t *keys;
    int32_t fmt;                 /* kvs_index_format                                                 */
    int64_t page_stride;         /* bytes                                                            */
    int64_t n_slot;
    kvio_stats *stats;           /* may be NULL                                                      */
} index_write_args;
typedef void (*index_write_fn)(const index_write_args *a, dev_queue *q);

/* Row t of request r is local index start[r] + t, t < count[r]; it lands at out row out_begin[r] + t. */
typedef struct gather_args {
    int32_t n_req;
    const int32_t *table;        /* [n_req, table_stride]                                            */
    int64_t table_stride;
    int32_t table_width;
    const int64_t *start;        /* [n_req] local indices, any alignment                             */
    const int64_t *count;        /* [n_req] rows, may be 0                                           */
    const int64_t *out_begin;    /* [n_req] rows                                                     */
    const uint8_t *kv;
    int32_t fmt;
    int64_t page_stride, row_stride, n_slot;
    float k_scale;
    void *out;                   /* rows of 576 bf16 or f32; a row that cannot be fetched becomes 0  */
    int32_t out_type;            /* kvs_dtype; bf16 of an f32 cache rounds to nearest even           */
    int64_t out_stride;          /* elements                                                         */
    uint64_t *n_bad_id;          /* may be NULL                                                      */
} gather_args;
typedef void (*gather_fn)(const gather_args *a, dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
