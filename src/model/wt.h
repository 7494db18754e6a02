/* model/wt.h - the weights of a model, as views of its mapped safetensors files.
 *
 * One wt serves every rank of a process: nothing here is per rank, and nothing changes after opening. Product
 * weights stay in their stored type (gemm_mat over the mapping; a tensor whose bytes are not aligned to its
 * element is copied). Small vectors (norms, router bias) are f32 copies. Names, shapes and types of all tensors
 * are checked against hp when opening: a missing tensor, a wrong shape or type, a truncated file names itself.
 *
 * The absorbed matrices are made once: uk[h] = W_UK[h]^T [kv_lora, nope] and uv[h] = W_UV[h] [v_dim, kv_lora],
 * bf16 where kv_b is bf16 or fp8 (dequantised as a product would), f32 where it is f32. uv is a view of kv_b where
 * that is not fp8.
 *
 * Whether a weight is fp8 is told by its tensor's type and its `_scale_inv`, never by config.json. Experts come one
 * tensor each, or fused ([n_expert, 2 * moe_inter, hidden], gate rows first, and [n_expert, hidden, moe_inter]).
 * Every tensor of the files is either used, or known to be skipped (draft layers that are not opened and the copies
 * of embedding and head in them, other towers of a wrapper, rotary tables, scales of queries and values), or the
 * folder is refused: a part of the model that nothing computes would be lost silently.
 */
#ifndef MODEL_WT_H
#define MODEL_WT_H

#include <stdint.h>

#include "kern/gemm.h"
#include "model/hp.h"

typedef struct wt_ffn {
    gemm_mat gate, up, down; /* [inter, hidden] twice, [hidden, inter]                                */
} wt_ffn;

typedef struct wt_layer {
    const float *attn_norm, *ffn_norm; /* [hidden]                                                    */
    gemm_mat q;             /* [n_head * (nope + rope), hidden] where q_lora is 0, else n_out 0       */
    gemm_mat q_a, q_b;      /* [q_lora, hidden], [n_head * (nope + rope), q_lora]                     */
    const float *q_norm;    /* [q_lora]                                                               */
    gemm_mat kv_a;          /* [kv_lora + rope, hidden]                                               */
    const float *kv_norm;   /* [kv_lora]                                                              */
    gemm_mat kv_b;          /* [n_head * (nope + v_dim), kv_lora]                                     */
    gemm_mat uk;            /* head 0 of [n_head][kv_lora, nope]; heads follow, uk_head elements apart */
    gemm_mat uv;            /* head 0 of [n_head][v_dim, kv_lora]; uv_head elements apart             */
    int64_t uk_head, uv_head;
    gemm_mat o;             /* [hidden, n_head * v_dim]                                               */

    int32_t has_index;      /* this layer has an indexer of its own                                   */
    gemm_mat iq;            /* wq_b [n_index_head * 128, q_lora]                                      */
    gemm_mat ik;            /* wk [128, hidden]                                                       */
    gemm_mat iw;            /* weights_proj [n_index_head, hidden]                                    */
    const float *ik_norm, *ik_bias; /* [128]                                                          */

    int32_t n_expert;       /* 0: a dense layer with `ffn`                                            */
    wt_ffn ffn;             /* dense layers                                                           */
    gemm_mat router;        /* [n_expert, hidden]                                                     */
    const float *router_bias; /* [n_expert] or NULL                                                   */
    wt_ffn shared;          /* inner dimension n_shared * moe_inter; n_out 0 without                  */
    const wt_ffn *expert;   /* [n_expert]                                                             */

    /* draft layers only */
    const float *enorm, *hnorm, *head_norm; /* [hidden]                                               */
    gemm_mat eh;            /* eh_proj [hidden, 2 * hidden]                                           */
} wt_layer;

typedef struct wt {
    hp h;
    gemm_mat embed;         /* [vocab, hidden]                                                        */
    gemm_mat head;          /* [vocab, hidden]                                                        */
    const float *norm;      /* [hidden]                                                               */
    wt_layer *layer;        /* [n_layer + n_mtp]                                                      */
    const float *k_scale;   /* [n_layer + n_mtp] of the cache's rows with kv = fp8 (1 where a layer has
                               none), or NULL where the files have none at all                        */
    uint64_t hash[2];       /* XXH3-128 of h.config_hash, the files' headers in order of their names,
                               and 4 KiB from the middle of every tensor in order of their names (of
                               experts: the first of each layer)                                      */
    int64_t n_param;        /* as counted in weights.h, of what is open                               */
    int64_t bytes_stored, bytes_owned; /* of the tensors in use, and of copies and absorbed matrices  */
    struct wt_store *store;
} wt;

/* Opens dir (config.json, model.safetensors or model.safetensors.index.json with its shards). with_mtp 0 leaves
 * the draft layers out: their entries are zero. On failure *out is NULL. Threads: any, one at a time. */
kvs_status wt_open(wt **out, const char *dir, int32_t with_mtp, kvs_error *err);
void wt_close(wt *w);

/* Rows [begin, end) or columns [begin, end) of a matrix; n_out 0 stays n_out 0. Columns: begin < end. */
gemm_mat wt_rows(const gemm_mat *m, int32_t begin, int32_t end);
gemm_mat wt_cols(const gemm_mat *m, int32_t begin, int32_t end);

/* How ranks share: unit u of n belongs to the rank whose [first, last) holds it. Rank r of tp takes units
 * [r n / tp, (r + 1) n / tp): heads of q, q_b, kv_b and o; blocks of 128 of an FFN's inner dimension (the last
 * one short); rows of the head. Experts: rank r holds wt_share(n_expert, ep, r / (tp / ep)), each cut by blocks
 * over the tp / ep ranks of that group. Also used by weights.h. */
typedef struct wt_range { int32_t begin, end; } wt_range;
wt_range wt_share(int32_t n, int32_t tp, int32_t rank);

#endif
