/* model/fwd_impl.h - what the files of the forward pass share: the handle, its workspace, its helpers.
 *
 * The workspace is one block. FWD_SPACE lists every buffer with the phase it lives in: buffers of COMMON are
 * always there, those of the other phases share one place, because a phase never reads another's; ABSORB and HEADS
 * are the two forms of attention, and share what lies behind ATTN. Sizes are elements and follow from the
 * hyper-parameters, the config and the rank alone (fwd_size_space), so that a plan knows them without weights.
 *
 * Operands of products come in two types. A buffer pair NAME_b, NAME_f holds bf16 and f32 forms of one input;
 * the forms that some product asks for are filled (fwd_need).
 */
#ifndef MODEL_FWD_IMPL_H
#define MODEL_FWD_IMPL_H

#include "dcp/dcp.h"
#include "model/fwd.h"
#include "num/fmt.h"

enum {
    FWD_ATTEND_PAIRS = 16384,     /* (row, head) pairs whose queries exist at a time, at least one row     */
    FWD_HEADS_PAIRS = 32768,      /* the same in the multi-head form, which takes all rows and few heads   */
    FWD_HEADS_MOST = 16,          /* heads whose keys and values are expanded at a time, at least one      */
    FWD_FFN_VALUES = 1 << 22,     /* values of gate and up that exist at a time, at least one row          */
    FWD_REDUCE_VALUES = 1 << 20,  /* values of one sum over ranks, at most                                  */
    FWD_HALF_ROPE = KVS_ROPE_DIM / 2
};

/* X(phase, type, name) */
#define FWD_SPACE(X)                                                                                      \
    X(COMMON, float, x)           /* [R, hidden] the residual stream                                    */ \
    X(COMMON, float, hidden)      /* [R, hidden] after the final norm, until the next step              */ \
    X(COMMON, float, sum)         /* [R, hidden] what a layer adds, before and after the ranks' sum     */ \
    X(COMMON, bf16, in_b)         /* [R, hidden] the layer's normed input                               */ \
    X(COMMON, float, in_f)                                                                                 \
    X(COMMON, float, cos)         /* [R, 32] of each row's position                                     */ \
    X(COMMON, float, sin)                                                                                  \
    X(COMMON, int32_t, last)      /* [R, topk] with selection_last: the last positions                  */ \
    X(COMMON, int32_t, trace)     /* [index layer][R, topk] with trace                                  */ \
    X(COMMON, int32_t, trace_n)   /* [index layer][R]                                                   */ \
    X(COMMON, int32_t, keep)      /* [reqs, topk] slots kept for reuse                                  */ \
    X(COMMON, int32_t, keep_lane) /* [reqs, 8]                                                          */ \
    X(COMMON, uint8_t, is_prompt) /* [R] rows that take the multi-head form                             */ \
    X(COMMON, uint8_t, gemm)      /* scratch of products                                                */ \
    X(ATTN, float, q_lat)         /* [R, q_lora]                                                        */ \
    X(ATTN, bf16, q_lat_b)                                                                                 \
    X(ATTN, float, q_lat_f)                                                                                \
    X(ATTN, float, kv)            /* [R, 576] latent and rope key as the product leaves them            */ \
    X(ATTN, float, latent)        /* [R, 512] normed                                                    */ \
    X(ATTN, float, k_rope)        /* [R, 64]                                                            */ \
    X(ATTN, float, index_k)       /* [R, 128]                                                           */ \
    X(ATTN, float, index_q)       /* [R, index heads, 128]                                              */ \
    X(ATTN, float, index_w)       /* [R, index heads]                                                   */ \
    X(ATTN, bf16, v_in)           /* [A, heads, v_dim] values of all heads, rounded                     */ \
    X(ABSORB, float, q)           /* [A, heads, nope + rope]                                            */ \
    X(ABSORB, float, q_nope)      /* [A, heads, nope] in the type of uk                                 */ \
    X(ABSORB, float, q_latent)    /* [A, heads, 512] absorbed, then the attention's output              */ \
    X(ABSORB, uint8_t, q_row)     /* [A, heads, 576] bf16 or f32: what attention takes                  */ \
    X(ABSORB, float, v)           /* [A, heads, v_dim]                                                  */ \
    X(HEADS, float, hq)           /* [G pairs, nope + rope]                                             */ \
    X(HEADS, bf16, hq_b)          /* the same rounded, unless rows are f32                              */ \
    X(HEADS, float, hv)           /* [R, heads, v_dim] what blocks so far give                          */ \
    X(HEADS, float, h_lse)        /* [G pairs]                                                          */ \
    X(HEADS, float, h_lat)        /* [512, 512] latents of a block in the type of kv_b                  */ \
    X(HEADS, float, h_kv)         /* [512, G heads, nope + v_dim] expanded                              */ \
    X(HEADS, int32_t, h_len)      /* [R] keys of the block that each row attends                        */ \
    X(HEADS, uint8_t, h_scratch)  /* of the kernel                                                      */ \
    X(FFN, float, gate_up)        /* [F, 2 * inner] of one expert, or of the layer                      */ \
    X(FFN, float, act)            /* [F, inner] in the type of down                                     */ \
    X(FFN, float, expert_out)     /* [F, hidden]                                                        */ \
    X(FFN, bf16, gather_b)        /* [F, hidden] rows of one expert                                     */ \
    X(FFN, float, gather_f)                                                                                \
    X(FFN, float, router)         /* [R, experts] logits                                                */ \
    X(FFN, int32_t, expert_id)    /* [R, active]                                                        */ \
    X(FFN, float, expert_w)       /* [R, active]                                                        */ \
    X(FFN, int32_t, list_row)     /* [R * active] rows by expert                                        */ \
    X(FFN, float, list_w)         /* [R * active] their weights                                         */ \
    X(FFN, int32_t, list_at)      /* [experts + 1] where each expert's rows begin                       */ \
    X(DRAFT, float, embed)        /* [R, hidden]                                                        */ \
    X(DRAFT, bf16, pair_b)        /* [R, 2 * hidden] normed embedding, then normed hidden               */ \
    X(DRAFT, float, pair_f)                                                                                \
    X(HEAD, bf16, head_b)         /* [L, hidden]                                                        */ \
    X(HEAD, float, head_f)                                                                                 \
    X(HEAD, float, head_part)     /* [tp][L, rows of a rank] with tp > 1                                */

typedef struct fwd_space {
#define FWD_FIELD(phase, type, name) type *name;
    FWD_SPACE(FWD_FIELD)
#undef FWD_FIELD
} fwd_space;

typedef struct fwd_sizes { /* elements of each buffer */
#define FWD_FIELD(phase, type, name) int64_t name;
    FWD_SPACE(FWD_FIELD)
#undef FWD_FIELD
} fwd_sizes;

/* What this rank does of the model. */
typedef struct fwd_shape {
    int32_t tp, rank;
    int32_t head0, n_head;       /* of this rank                                                        */
    int32_t q_dim;               /* nope + rope                                                         */
    wt_range inter, shared;      /* columns of a dense FFN and of the shared expert                     */
    wt_range expert, moe;        /* experts, and columns of each                                        */
    wt_range vocab;              /* rows of the head                                                    */
    int32_t vocab_most;          /* the most rows of any rank                                           */
    int32_t attend_rows;         /* A                                                                   */
    int32_t head_pairs;          /* G: (row, head) pairs, and heads, of the multi-head form at a time   */
    int32_t head_most;
    int32_t ffn_rows;            /* F                                                                   */
    int32_t reduce_values;       /* values of one sum over ranks                                        */
    int32_t n_mtp, n_index;      /* draft layers in use; index layers of the main model                 */
    float latent_eps;
} fwd_shape;

typedef struct fwd_op { /* one input of products, in the types they take */
    const bf16 *b;
    const float *f;
    int64_t stride;
} fwd_op;

struct fwd {
    const wt *w;
    const hp *h;
    fwd_config cfg;
    fwd_shape s;
    kvs_comm *world;
    kvs_dcp *d;
    kvs_cache *cache;
    void *block;
    int64_t block_bytes;
    size_t gemm_bytes, heads_bytes; /* of b.gemm and b.h_scratch                                        */
    fwd_space b;
    float inv_freq[FWD_HALF_ROPE];
    int32_t index_of[HP_MAX_LAYER + 8]; /* index layer of a layer of its own, else -1                   */
    int32_t source_of[HP_MAX_LAYER];    /* index layer whose selection a main layer attends, or -1      */
    int32_t n_traced;            /* rows of the last fwd_step, 0 after a failure                        */
    int32_t draft_rows;          /* rows whose own selection the handle holds after a draft, else -1    */
    int32_t n_keep;
};

/* ---- fwd_size.c ---- */

/* Refuses what the forward pass cannot run with these settings. */
kvs_status fwd_shape_of(fwd_shape *s, const hp *h, const fwd_config *cfg, int32_t tp, int32_t rank,
                        kvs_error *err);
kvs_dcp_config fwd_dcp_config(const hp *h, const fwd_config *cfg, int32_t tp);
kvs_cache_config fwd_cache_config(const hp *h, const fwd_config *cfg, const fwd_shape *s);
/* Elements of every buffer; those of `gemm` are bytes of scratch for `threads` workers. */
void fwd_size_space(fwd_sizes *z, const hp *h, const fwd_config *cfg, const fwd_shape *s,
                    const kern_table *kern);
/* Bytes of the block; with base set, also where each buffer lies in it. */
int64_t fwd_place_space(const fwd_sizes *z, uint8_t *base, fwd_space *b);

/* ---- fwd_row.c: loops over rows between the ops ---- */

/* to = from, row by row, n values each; to is of type gemm_type's operand (bf16 unless `type` is f32). */
void fwd_cast(fwd *f, int32_t n_row, int32_t n, const float *from, int64_t from_stride, void *to,
              int64_t to_stride, int32_t type);
/* One part of every head of every row: [n_row, n_head, n] between strides, cast to `type`. */
void fwd_cast_heads(fwd *f, int32_t n_row, int32_t n_head, int32_t n, const float *from,
                    int64_t from_row, int64_t from_head, void *to, int64_t to_row, int64_t to_head,
                    int32_t type);
/* Rows of a block of the context, f32 or bf16 as `type` says, 576 apart -> n_row latents of 512 for w. */
void fwd_latents(fwd *f, int32_t n_row, const void *rows, int32_t type, const gemm_mat *w, void *to);
/* x += y, n values. */
void fwd_add(fwd *f, int64_t n, float *x, const float *y);
void fwd_zero(float *x, int64_t n);
/* Rows of the embedding. */
void fwd_embed(fwd *f, int32_t n_row, const int32_t *token, float *to);
/* cos and sin of every row of the plan. */
void fwd_angles(fwd *f);
/* Walsh-Hadamard times 128^-1/2, in place, of n vectors of 128. */
void fwd_hadamard(fwd *f, int64_t n, float *x);
/* Rows list[0 .. n) of a [.., hidden] input, in its types. */
void fwd_gather(fwd *f, int32_t n, const int32_t *list, int32_t width, fwd_op in, bf16 *to_b, float *to_f);
/* sum[list[i]] += weight[i] * y[i], the product rounded first; rows of a list are distinct. */
void fwd_scatter_add(fwd *f, int32_t n, const int32_t *list, const float *weight, int32_t width,
                     const float *y, float *sum);

/* ---- fwd_layer.c ---- */

enum { FWD_NEED_B = 1, FWD_NEED_F = 2 };
/* The operand types of some products together. */
static inline int fwd_need(const gemm_mat *m)
{
    return m->n_out == 0 ? 0 : m->type == GEMM_F32 ? FWD_NEED_F : FWD_NEED_B;
}

static inline kvs_dtype fwd_operand(const gemm_mat *m)
{
    return m->type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
}

/* Rows [row0, ...) of an input. */
static inline fwd_op fwd_rows_from(fwd_op in, int64_t row0)
{
    const fwd_op r = {in.b ? in.b + row0 * in.stride : NULL, in.f ? in.f + row0 * in.stride : NULL,
                      in.stride};
    return r;
}

/* y [n_row, w.n_out] = in w^T. */
void fwd_product(fwd *f, const gemm_mat *w, int32_t n_row, fwd_op in, float *y, int64_t y_stride);
/* The same for n_batch heads; x of the type w takes. */
void fwd_product_heads(fwd *f, const gemm_mat *w, int64_t w_batch, int32_t n_batch, int32_t n_row,
                       const void *x, int64_t x_stride, int64_t x_batch, float *y, int64_t y_stride,
                       int64_t y_batch);
/* RMS norm of rows in f32 into the forms in `need`. */
fwd_op fwd_norm(fwd *f, int32_t n_row, int32_t dim, const float *x, int64_t x_stride,
                const float *weight, float eps, int need, bf16 *to_b, float *to_f);
/* The sum over ranks of the step's [n_row, hidden] in b.sum, added to the residual stream. */
kvs_status fwd_add_sum(fwd *f, int32_t n_row, kvs_error *err);

/* Rope of n_row rows of the plan from row0 on: dims [dim0, dim0 + 64) of every head, in place. */
void fwd_rope(fwd *f, int32_t row0, int32_t n_row, int32_t n_head, int32_t dim0, int interleaved, float *x,
              int64_t row_stride, int64_t head_stride);
/* The output product of rows [row0, row0 + n_row), n_row <= A, whose values of all heads are v. */
void fwd_output(fwd *f, const wt_layer *l, int32_t row0, int32_t n_row, const float *v);

/* One attention layer: `i_layer` counts main layers, then draft layers. reuse: kept selections. */
kvs_status fwd_attention(fwd *f, const wt_layer *l, int32_t i_layer, int32_t reuse, kvs_error *err);

/* ---- fwd_heads.c ---- */

/* Rows [row0, row0 + n) of the plan, prompt rows of one request; q_in is what q takes, of all rows. */
kvs_status fwd_attend_heads(fwd *f, const wt_layer *l, int32_t i_layer, fwd_op q_in, int32_t row0,
                            int32_t n, kvs_error *err);

/* ---- fwd_ffn.c ---- */

kvs_status fwd_ffn(fwd *f, const wt_layer *l, kvs_error *err);

#endif
