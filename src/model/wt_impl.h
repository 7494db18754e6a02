/* model/wt_impl.h - what wt.c (the model) and wt_bind.c (one tensor) share. */
#ifndef MODEL_WT_IMPL_H
#define MODEL_WT_IMPL_H

#include "model/wt.h"
#include "num/safet.h"

enum { WT_NAME_CAP = 320, WT_TOP = -1 };

/* A block of copies; all are freed with the weights. */
typedef struct wt_block {
    struct wt_block *next;
    size_t bytes;
} wt_block;

struct wt_store {
    safet *files;
    wt_block *block;
};

/* The state of opening. */
typedef struct wt_binder {
    wt *w;
    const safet *s;
    unsigned char *used; /* [safet_count]                                      */
    float e4m3[256];     /* the values of the codes                            */
    char name[WT_NAME_CAP];
    kvs_error *err;
} wt_binder;

/* Which types a matrix may have. */
typedef enum wt_accept { WT_PLAIN, WT_QUANT } wt_accept; /* bf16, f32; also fp8 */

/* Copies live as long as the weights. NULL without memory, with the error filled. */
void *wt_own(wt_binder *b, size_t bytes);

/* The tensor `suffix` of layer `layer` (WT_TOP: of the model); NULL where there is none. It counts as used. b->name
 * becomes its full name. */
const safet_tensor *wt_look(wt_binder *b, int32_t layer, const char *suffix);

/* The matrix [out, in], or the vector [n] as f32; missing, of another shape or type: refused by name. */
kvs_status wt_bind_mat(wt_binder *b, int32_t layer, const char *suffix, int64_t out, int64_t in,
                       wt_accept accept, gemm_mat *m);
kvs_status wt_bind_vec(wt_binder *b, int32_t layer, const char *suffix, int64_t n, const float **v);
/* n matrices [out, in] in one tensor [n, out, in]: the first of them, and the elements and scales from one to the
 * next. */
kvs_status wt_bind_fused(wt_binder *b, int32_t layer, const char *suffix, int64_t n, int64_t out,
                         int64_t in, gemm_mat *m, int64_t *step, int64_t *scale_step);
/* One positive number, of shape [] or [1]. */
kvs_status wt_bind_scalar(wt_binder *b, int32_t layer, const char *suffix, float *x);

/* uk and uv of a layer from its kv_b. */
kvs_status wt_absorb(wt_binder *b, wt_layer *l);

#endif
