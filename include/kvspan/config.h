/* kvspan/config.h - enumerations shared by every public header.
 *
 * Zero is always "choose for me". The number contract these names stand for is docs/numbers.md.
 */
#ifndef KVSPAN_CONFIG_H
#define KVSPAN_CONFIG_H

#ifdef __cplusplus
extern "C" {
#endif

/* Row format of the latent cache: one row is one token of one layer, 512 latents then 64 rope. */
typedef enum kvs_kv_format {
    KVS_KV_AUTO = 0,
    KVS_KV_F32 = 1,       /* 2304 bytes: 576 f32; for parity checks                                */
    KVS_KV_BF16 = 2,      /* 1152 bytes: 576 bf16                                                  */
    KVS_KV_FP8 = 3,       /*  576 bytes: 576 e4m3, one f32 k_scale per layer                       */
    KVS_KV_FP8_DS_MLA = 4 /*  656 bytes: 512 e4m3, 4 f32 scales (one per 128 latents), 64 bf16     */
} kvs_kv_format;

/* Format of the index-key cache, stored in pages of 64 tokens. */
typedef enum kvs_index_format {
    KVS_INDEX_AUTO = 0,
    KVS_INDEX_FP8 = 1, /* page of 8448 bytes: 64 x 128 e4m3, then 64 f32 scales                    */
    KVS_INDEX_F32 = 2  /* page of 32768 bytes: 64 x 128 f32                                        */
} kvs_index_format;

/* How a writer derives the scale s of a tile from amax, the largest finite magnitude in it. */
typedef enum kvs_scale_rule {
    KVS_SCALE_AUTO = 0,
    KVS_SCALE_POW2 = 1, /* s = 2^ceil(log2(max(amax / 448, 1e-4)))                                 */
    KVS_SCALE_EXACT = 2 /* s = max(amax / 448, FLT_MIN), an arbitrary f32                          */
} kvs_scale_rule;

/* How partial attention results cross ranks. */
typedef enum kvs_exchange {
    KVS_EXCHANGE_AUTO = 0,
    KVS_EXCHANGE_A2A = 1,  /* all-to-all of f32 node results, merged by our own tree: same bits
                              for DCP 1, 2, 4, 8                                                   */
    KVS_EXCHANGE_AG_RS = 2 /* all-gather of LSE, scale, reduce-scatter in f32: equal to tolerance  */
} kvs_exchange;

/* Element type of a buffer that may be given in more than one type. */
typedef enum kvs_dtype {
    KVS_DTYPE_AUTO = 0,
    KVS_DTYPE_F32 = 1,
    KVS_DTYPE_BF16 = 2
} kvs_dtype;

enum {
    KVS_LATENT_DIM = 512,                          /* kv_lora_rank                                 */
    KVS_ROPE_DIM = 64,                             /* qk_rope_head_dim                             */
    KVS_ROW_DIM = KVS_LATENT_DIM + KVS_ROPE_DIM,   /* 576: what a key is made of                   */
    KVS_INDEX_DIM = 128,                           /* index_head_dim                               */
    KVS_PAGE_TOKENS = 64,                          /* tokens of one rank's cache in one page       */
    KVS_LANES = 8,                                 /* lanes of the deterministic reduction tree    */
    KVS_MAX_RANKS = 8,                             /* largest DCP group                            */
    KVS_MAX_HEADS = 128,                           /* attention heads of one kernel call           */
    KVS_MAX_TOPK = 32768                           /* entries of one row's selection               */
};

#ifdef __cplusplus
}
#endif
#endif
