/* x86/kvio_x86.h - rows and keys in and out of caches: what the drivers (kvio.c) and the loops share.
 *
 * The loops give the bytes of num/kvfmt.h for one row, one key or one query head; the drivers find the
 * rows, check slots, count, and spread tokens over threads.
 *
 * Included by kern/x86/ only.
 */
#ifndef KVS_KERN_X86_KVIO_X86_H
#define KVS_KERN_X86_KVIO_X86_H

#include <stdbool.h>
#include <stdint.h>

#include "kern/index.h"
#include "kern/kern.h"
#include "kern/kvio.h"
#include "num/kvfmt.h"

enum { KVIO_KEYS = 4 }; /* of one call of write_keys at most */

/* A row to be written: its values, and those of a later row, which are asked for in passing (or the same).
 * stream: past the caches where that helps; the row aligned to 64 and whole lines, the caller fences. */
typedef struct kvio_row {
    const uint8_t *latent, *rope;
    const uint8_t *next_latent, *next_rope;
    bool stream;
} kvio_row;

/* A key to be written: 128 values, those of a later key, its page and its place there. */
typedef struct kvio_key {
    const uint8_t *value, *next;
    uint8_t *page;
    int32_t off;
} kvio_key;

/* n bf16 keys, a multiple of KVIO_KEYS, that lie one behind the other in one page, from place `off` on; their
 * values are `stride` bytes apart, and what lies `ahead` bytes behind them is asked for in passing. */
typedef struct kvio_line {
    const uint8_t *value;
    int64_t stride, ahead;
    uint8_t *page;
    int32_t off, n;
} kvio_line;

typedef struct kvio_isa {
    /* kv_row_write of num/kvfmt.h; count is not NULL. */
    void (*write_row)(const kv_writer *w, uint8_t *row, const kvio_row *in, kv_count *count);
    /* index_key_write for n keys. stream: past the caches where that helps, keys aligned to 64; the
     * caller fences. */
    void (*write_keys)(int32_t fmt, int32_t in_type, const kvio_key *k, int32_t n, bool stream,
                       kv_count *count);
    /* The same for a line of fp8 keys, past the caches. */
    void (*write_line)(const kvio_line *l, kv_count *count);
    /* The 576 values of a row as out_type. */
    void (*read_row)(int32_t fmt, float k_scale, const uint8_t *row, int32_t out_type, void *out);
    /* Copies `bytes` (a multiple of 64) to a place aligned to 64, past the caches. The caller
     * fences. */
    void (*stream)(void *out, const void *from, int64_t bytes);
    /* 128 values of in_type -> e4m3, returning the scale (scale_index); NaN are added to *n_nan. */
    float (*quant_head)(const void *x, int32_t in_type, uint8_t *q8, uint64_t *n_nan);
    /* 128 values of in_type -> f32; NaN are added to *n_nan. */
    void (*widen_head)(const void *x, int32_t in_type, float *out, uint64_t *n_nan);
} kvio_isa;

void kv_write_run(const kvio_isa *isa, const kv_write_args *a, dev_queue *q);
void index_write_run(const kvio_isa *isa, const index_write_args *a, dev_queue *q);
void gather_run(const kvio_isa *isa, const gather_args *a, dev_queue *q);
void index_quant_run(const kvio_isa *isa, const index_quant_args *a, dev_queue *q);

#endif
