/* num/kvfmt.h - how the bytes of a cache lie: latent rows, index pages, format tags.
 *
 * A latent row is one token of one layer: 512 latent values, then 64 rope values. An index page is
 * 64 tokens of one layer: all keys, then all scales. Sizes and offsets are asserted below and equal
 * what vLLM, SGLang and FlashMLA store. Numbers are little-endian. Rows may lie at any address
 * here; kernels may ask for more.
 *
 * kv_row_write, kv_row_read, index_key_write and index_key_read define what is stored and what
 * attention and the indexer read; kernels give the same bytes and the same bits.
 *
 * Which formats go together (kv_layout_resolve):
 *     rows          index keys             why
 *     f32           f32 (default), fp8     parity checks; fp8 shows the index's rounding alone
 *     bf16          fp8 (default), f32     as the user chooses
 *     fp8_ds_mla    fp8                    the shared layout has fp8 keys only
 *     fp8           none                   refused with index keys: the fp8 layout of sparse
 *                                          attention is fp8_ds_mla
 * Without index keys every row format is allowed.
 *
 * Read by the C compiler, the C++ compiler and nvcc.
 */
#ifndef KVS_NUM_KVFMT_H
#define KVS_NUM_KVFMT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "kvspan/status.h"
#include "num/fmt.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KV_ROW_BYTES_F32 = 2304,
    KV_ROW_BYTES_BF16 = 1152,
    KV_ROW_BYTES_FP8 = 576,
    KV_ROW_BYTES_FP8_DS_MLA = 656,
    KV_DS_TILE = 128,                           /* latents that share a scale          */
    KV_DS_N_TILE = KVS_LATENT_DIM / KV_DS_TILE, /* 4                                   */
    KV_DS_SCALE_AT = 512,                       /* bytes into a fp8_ds_mla row         */
    KV_DS_ROPE_AT = 528,                        /* bytes into a fp8_ds_mla row         */
    INDEX_PAGE_BYTES_FP8 = 8448,
    INDEX_PAGE_BYTES_F32 = 32768,
    INDEX_SCALE_AT = 8192 /* bytes into an fp8 index page        */
};

typedef struct kv_row_f32 {
    float latent[KVS_LATENT_DIM];
    float rope[KVS_ROPE_DIM];
} kv_row_f32;

typedef struct kv_row_bf16 {
    bf16 latent[KVS_LATENT_DIM];
    bf16 rope[KVS_ROPE_DIM];
} kv_row_bf16;

typedef struct kv_row_fp8 {
    uint8_t latent[KVS_LATENT_DIM]; /* e4m3 of x / k_scale */
    uint8_t rope[KVS_ROPE_DIM];     /* e4m3 of x / k_scale */
} kv_row_fp8;

typedef struct kv_row_fp8_ds_mla {
    uint8_t latent[KVS_LATENT_DIM]; /* e4m3 of x / scale[i / 128] */
    float scale[KV_DS_N_TILE];
    bf16 rope[KVS_ROPE_DIM];
} kv_row_fp8_ds_mla;

typedef struct index_page_fp8 {
    uint8_t key[KVS_PAGE_TOKENS][KVS_INDEX_DIM]; /* e4m3 of x / scale[token] */
    float scale[KVS_PAGE_TOKENS];
} index_page_fp8;

typedef struct index_page_f32 {
    float key[KVS_PAGE_TOKENS][KVS_INDEX_DIM];
} index_page_f32;

static_assert(sizeof(kv_row_f32) == KV_ROW_BYTES_F32, "f32 row");
static_assert(sizeof(kv_row_bf16) == KV_ROW_BYTES_BF16, "bf16 row");
static_assert(sizeof(kv_row_fp8) == KV_ROW_BYTES_FP8, "fp8 row");
static_assert(sizeof(kv_row_fp8_ds_mla) == KV_ROW_BYTES_FP8_DS_MLA, "fp8_ds_mla row");
static_assert(offsetof(kv_row_f32, rope) == 2048, "rope of an f32 row");
static_assert(offsetof(kv_row_bf16, rope) == 1024, "rope of a bf16 row");
static_assert(offsetof(kv_row_fp8, rope) == 512, "rope of an fp8 row");
static_assert(offsetof(kv_row_fp8_ds_mla, scale) == KV_DS_SCALE_AT, "scales of a fp8_ds_mla row");
static_assert(offsetof(kv_row_fp8_ds_mla, rope) == KV_DS_ROPE_AT, "rope of a fp8_ds_mla row");
static_assert(sizeof(index_page_fp8) == INDEX_PAGE_BYTES_FP8, "fp8 index page");
static_assert(sizeof(index_page_f32) == INDEX_PAGE_BYTES_F32, "f32 index page");
static_assert(offsetof(index_page_fp8, scale) == INDEX_SCALE_AT, "scales of an fp8 index page");

/* Bytes of a row by kvs_kv_format; 0 for a value that is no format. */
FMT_FN int64_t kv_row_bytes(int32_t fmt)
{
    switch (fmt) {
    case KVS_KV_F32:
        return KV_ROW_BYTES_F32;
    case KVS_KV_BF16:
        return KV_ROW_BYTES_BF16;
    case KVS_KV_FP8:
        return KV_ROW_BYTES_FP8;
    case KVS_KV_FP8_DS_MLA:
        return KV_ROW_BYTES_FP8_DS_MLA;
    default:
        return 0;
    }
}

/* Bytes of 64 rows without padding. */
FMT_FN int64_t kv_page_bytes(int32_t fmt)
{
    return kv_row_bytes(fmt) * KVS_PAGE_TOKENS;
}

/* Bytes of an index page by kvs_index_format; 0 for a value that is no format. */
FMT_FN int64_t index_page_bytes(int32_t fmt)
{
    switch (fmt) {
    case KVS_INDEX_FP8:
        return INDEX_PAGE_BYTES_FP8;
    case KVS_INDEX_F32:
        return INDEX_PAGE_BYTES_F32;
    default:
        return 0;
    }
}

/* Bytes of one index key without its scale: 128 or 512; token `off` of a page starts
 * at off * this. */
FMT_FN int64_t index_key_bytes(int32_t fmt)
{
    return fmt == KVS_INDEX_F32 ? (int64_t)sizeof(float) * KVS_INDEX_DIM : (int64_t)KVS_INDEX_DIM;
}

/* Where the scale of token `off` lies in an fp8 index page, in bytes. */
FMT_FN int64_t index_scale_at(int32_t off)
{
    return INDEX_SCALE_AT + (int64_t)sizeof(float) * off;
}

/* ---- layouts --------------------------------------------------------------------------------- */

typedef struct kv_layout {
    kvs_kv_format kv;
    kvs_index_format index; /* AUTO once resolved: no index keys    */
    int32_t hadamard;       /* 1: index keys are stored rotated     */
} kv_layout;

/* Replaces AUTO by the default and refuses what does not go together, naming what would. has_index:
 * the cache holds index keys; without them l->index must be AUTO and l->hadamard 0. Row default:
 * fp8_ds_mla with index keys, else bf16. On failure *l is unchanged. */
kvs_status kv_layout_resolve(int has_index, kv_layout *l, kvs_error *err);

/* ---- names ----------------------------------------------------------------------------------- */

/* "f32", "bf16", "fp8", "fp8_ds_mla"; "auto" for 0, "?" for anything else. Static storage. */
const char *kv_fmt_name(int32_t fmt);
/* "fp8", "f32"; "auto", "?". */
const char *index_fmt_name(int32_t fmt);
/* "pow2", "exact"; "auto", "?". */
const char *scale_rule_name(int32_t rule);

/* The reverse, "auto" included. KVS_INVALID names the text and lists what exists. */
kvs_status kv_fmt_parse(const char *name, kvs_kv_format *out, kvs_error *err);
kvs_status index_fmt_parse(const char *name, kvs_index_format *out, kvs_error *err);
kvs_status scale_rule_parse(const char *name, kvs_scale_rule *out, kvs_error *err);

/* k_scale of layer i_layer is finite and > 0, else KVS_INVALID naming both. */
kvs_status kv_k_scale_check(float k_scale, int32_t i_layer, kvs_error *err);

/* ---- tags ------------------------------------------------------------------------------------ */

/* A tag says which layout some bytes have; a reader checks it before it reads them.
 *     rows, u32         KV_TAG_BASE | page tokens << 8 | kvs_kv_format
 *     index keys, u32   INDEX_TAG_BASE | Hadamard bit | page tokens << 8 | kvs_index_format; 0 for
 *                       a cache without them
 *     cache, u64        index keys << 32 | rows; never 0
 * The scale rule is not part of it: readers accept both. */
#define KV_TAG_BASE        0x4B560000u
#define INDEX_TAG_BASE     0x4B490000u
#define INDEX_TAG_HADAMARD 0x00008000u

/* l is resolved: no AUTO rows. */
uint32_t kv_tag(kv_layout l);
uint32_t index_tag(kv_layout l);
uint64_t cache_tag(kv_layout l);

/* The layout a tag stands for. KVS_FORMAT for a number that is no tag; then *out is unchanged. */
kvs_status cache_tag_parse(uint64_t tag, kv_layout *out, kvs_error *err);

/* KVS_OK where got == cache_tag(want), else KVS_FORMAT with both layouts and row sizes in words. */
kvs_status cache_tag_check(uint64_t got, kv_layout want, kvs_error *err);

/* ---- one row, one key ------------------------------------------------------------------------ */

/* What a writer met. Functions add to it. */
typedef struct kv_count {
    uint64_t n_nan; /* NaN values written, in any format                               */
    uint64_t n_sat; /* values that lost magnitude to +-448 (|x / s| > 464, infinity too) */
} kv_count;

typedef struct kv_writer {
    int32_t fmt;     /* kvs_kv_format, resolved                         */
    int32_t rule;    /* kvs_scale_rule, fp8_ds_mla only                 */
    float k_scale;   /* fp8 only                                        */
    int32_t in_type; /* kvs_dtype of what is written: f32 or bf16       */
} kv_writer;

/* Writes the kv_row_bytes(fmt) bytes of one row from latent [512] and rope [64] of in_type.
 *   f32         the values; bf16 input widened
 *   bf16        bf16 input bit for bit; f32 input rounded
 *   fp8         e4m3(x / k_scale), all 576
 *   fp8_ds_mla  per 128 latents s = scale_for(rule, amax over the finite ones), e4m3(x / s); the
 *               rope as in bf16
 * count may be NULL. */
void kv_row_write(const kv_writer *w, uint8_t *row, const void *latent, const void *rope,
                  kv_count *count);

/* The 576 values attention reads: stored f32 and bf16 as they are, e4m3 through e4m3_dequant. */
void kv_row_read(int32_t fmt, float k_scale, const uint8_t *row, float *out);

/* Writes token `off` (0..63) of an index page from key [128] of in_type: its 128 values and, with
 * fp8, its scale (scale_index). Nothing else of the page is touched. count may be NULL. */
void index_key_write(int32_t fmt, int32_t in_type, uint8_t *page, int32_t off, const void *key,
                     kv_count *count);

/* The 128 values of token `off` as the indexer multiplies them, without the scale, which is
 * returned (1 for f32 keys). */
float index_key_read(int32_t fmt, const uint8_t *page, int32_t off, float *out);

#ifdef __cplusplus
}
#endif
#endif
