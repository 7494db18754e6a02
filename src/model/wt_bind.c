/* model/wt_bind.c - one tensor at a time: found, checked against what the model wants, viewed or copied; and the
 * absorbed matrices. */
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "model/wt_impl.h"
#include "num/fmt.h"

/* ---- names and copies ------------------------------------------------------------------------ */

void *wt_own(wt_binder *b, size_t bytes)
{
    enum { HEAD = MEM_ALIGN };
    static_assert(sizeof(wt_block) <= HEAD, "the data behind it stays aligned");
    wt_block *block = bytes <= SIZE_MAX - HEAD ? mem_alloc(HEAD + bytes, MEM_ALIGN) : NULL;
    if (block == NULL) {
        err_set(b->err, KVS_NOMEM, "%s: no memory for %zu bytes", b->name, bytes);
        return NULL;
    }
    struct wt_store *store = b->w->store;
    block->next = store->block;
    block->bytes = bytes;
    store->block = block;
    b->w->bytes_owned += (int64_t)bytes;
    return (unsigned char *)block + HEAD;
}

const safet_tensor *wt_look(wt_binder *b, int32_t layer, const char *suffix)
{
    if (layer == WT_TOP) {
        snprintf(b->name, sizeof b->name, "%s%s", b->w->h.prefix, suffix);
    } else {
        snprintf(b->name, sizeof b->name, "%smodel.layers.%d.%s", b->w->h.prefix, layer, suffix);
    }
    const safet_tensor *t = safet_find(b->s, b->name);
    if (t != NULL) {
        b->used[safet_index(b->s, t)] = 1;
    }
    return t;
}

static kvs_status need(wt_binder *b, int32_t layer, const char *suffix, const safet_tensor **t)
{
    *t = wt_look(b, layer, suffix);
    return *t != NULL ? KVS_OK : err_set(b->err, KVS_FORMAT, "tensor %.140s is missing", b->name);
}

/* "[3, 4]" */
static void shape_text(char *text, size_t cap, int32_t n_dim, const int64_t *dim)
{
    size_t n = (size_t)snprintf(text, cap, "[");
    for (int32_t i = 0; i < n_dim && n < cap; i++) {
        n += (size_t)snprintf(text + n, cap - n, "%s%" PRId64, i > 0 ? ", " : "", dim[i]);
    }
    if (n < cap) {
        snprintf(text + n, cap - n, "]");
    }
}

static kvs_status check_shape(wt_binder *b, const safet_tensor *t, int32_t n_dim,
                              const int64_t *want)
{
    bool same = t->n_dim == n_dim;
    for (int32_t i = 0; same && i < n_dim; i++) {
        same = t->dim[i] == want[i];
    }
    if (same) {
        return KVS_OK;
    }
    char is[64];
    char must[64];
    shape_text(is, sizeof is, t->n_dim, t->dim);
    shape_text(must, sizeof must, n_dim, want);
    return err_set(b->err, KVS_FORMAT, "tensor %.120s (%.30s): shape %s: must be %s", t->name,
                   safet_file_name(b->s, t->file), is, must);
}

static kvs_status refuse_type(wt_binder *b, const safet_tensor *t, const char *want)
{
    return err_set(b->err, KVS_UNSUPPORTED, "tensor %.120s (%.30s): type %s: must be %s", t->name,
                   safet_file_name(b->s, t->file), safet_type_name(t->type), want);
}

/* The data of t at an address divisible by its element's size. */
static const void *aligned(wt_binder *b, const safet_tensor *t)
{
    const size_t size = (size_t)safet_type_bytes(t->type);
    if ((uintptr_t)t->data % size == 0) {
        return t->data;
    }
    void *copy = wt_own(b, (size_t)t->bytes);
    return copy != NULL ? memcpy(copy, t->data, (size_t)t->bytes) : NULL;
}

/* ---- vectors --------------------------------------------------------------------------------- */

/* Element i of a BF16 or F32 tensor, wherever it lies. */
static float element(const safet_tensor *t, int64_t i)
{
    if (t->type == SAFET_BF16) {
        bf16 x;
        memcpy(&x, t->data + 2 * i, sizeof x);
        return bf16_to_f32(x);
    }
    float x = 0.0f;
    memcpy(&x, t->data + 4 * i, sizeof x);
    return x;
}

kvs_status wt_bind_vec(wt_binder *b, int32_t layer, const char *suffix, int64_t n, const float **v)
{
    const safet_tensor *t = NULL;
    TRY(need(b, layer, suffix, &t));
    TRY(check_shape(b, t, 1, &n));
    if (t->type != SAFET_BF16 && t->type != SAFET_F32) {
        return refuse_type(b, t, "BF16 or F32");
    }
    float *copy = wt_own(b, (size_t)n * sizeof *copy);
    if (copy == NULL) {
        return KVS_NOMEM;
    }
    for (int64_t i = 0; i < n; i++) {
        copy[i] = element(t, i);
        if (!isfinite(copy[i])) {
            return err_set(b->err, KVS_FORMAT, "tensor %.140s: element %" PRId64 " is %g", t->name,
                           i, (double)copy[i]);
        }
    }
    *v = copy;
    return KVS_OK;
}

kvs_status wt_bind_scalar(wt_binder *b, int32_t layer, const char *suffix, float *x)
{
    const safet_tensor *t = NULL;
    const int64_t one = 1;
    TRY(need(b, layer, suffix, &t));
    if (t->n_dim != 0) {
        TRY(check_shape(b, t, 1, &one));
    }
    if (t->type != SAFET_BF16 && t->type != SAFET_F32) {
        return refuse_type(b, t, "BF16 or F32");
    }
    *x = element(t, 0);
    if (!isfinite(*x) || *x <= 0.0f) {
        return err_set(b->err, KVS_FORMAT, "tensor %.140s: %g: a scale must be positive", t->name,
                       (double)*x);
    }
    return KVS_OK;
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* Block scales of the fp8 tensor b->name, of shape [n,] ceil(out / 128), ceil(in / 128). */
static kvs_status bind_scale(wt_binder *b, const safet_tensor *w, int64_t n, int64_t out,
                             int64_t in, gemm_mat *m)
{
    char name[WT_NAME_CAP + 16];
    snprintf(name, sizeof name, "%s_scale_inv", w->name);
    const safet_tensor *t = safet_find(b->s, name);
    if (t == NULL) {
        return err_set(b->err, KVS_FORMAT, "tensor %.140s is missing: its weight is fp8", name);
    }
    b->used[safet_index(b->s, t)] = 1;
    const int64_t dim[3] = {n, (out + GEMM_BLOCK - 1) / GEMM_BLOCK,
                            (in + GEMM_BLOCK - 1) / GEMM_BLOCK};
    TRY(check_shape(b, t, n > 0 ? 3 : 2, n > 0 ? dim : dim + 1));
    if (t->type != SAFET_F32) {
        return refuse_type(b, t, "F32");
    }
    m->scale = aligned(b, t);
    if (m->scale == NULL) {
        return KVS_NOMEM;
    }
    m->scale_stride = dim[2];
    const int64_t count = (n > 0 ? n : 1) * dim[1] * dim[2];
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(m->scale[i]) || m->scale[i] < 0.0f) {
            return err_set(b->err, KVS_FORMAT,
                           "tensor %.140s: element %" PRId64 " is %g: a scale is finite and not "
                           "negative",
                           t->name, i, (double)m->scale[i]);
        }
    }
    return KVS_OK;
}

/* A scale beside a weight that is not fp8 says that one of them is wrong. */
static kvs_status refuse_scale(wt_binder *b, const safet_tensor *w)
{
    char name[WT_NAME_CAP + 16];
    snprintf(name, sizeof name, "%s_scale_inv", w->name);
    if (safet_find(b->s, name) == NULL) {
        return KVS_OK;
    }
    return err_set(b->err, KVS_FORMAT,
                   "tensor %.140s belongs to a weight of type %s: must be F8_E4M3", name,
                   safet_type_name(w->type));
}

/* n = 0: a matrix [out, in]; else n of them. */
static kvs_status bind(wt_binder *b, const safet_tensor *t, int64_t n, int64_t out, int64_t in,
                       wt_accept accept, gemm_mat *m)
{
    const int64_t dim[3] = {n, out, in};
    TRY(check_shape(b, t, n > 0 ? 3 : 2, n > 0 ? dim : dim + 1));
    *m = (gemm_mat){.stride = in, .n_out = (int32_t)out, .n_in = (int32_t)in};
    if (t->type == SAFET_F8_E4M3 && accept == WT_QUANT) {
        m->type = GEMM_FP8;
        TRY(bind_scale(b, t, n, out, in, m));
    } else if (t->type == SAFET_BF16 || t->type == SAFET_F32) {
        m->type = t->type == SAFET_BF16 ? GEMM_BF16 : GEMM_F32;
        TRY(refuse_scale(b, t));
    } else {
        return refuse_type(b, t, accept == WT_QUANT ? "BF16, F32 or F8_E4M3" : "BF16 or F32");
    }
    m->data = aligned(b, t);
    b->w->n_param += (n > 0 ? n : 1) * out * in;
    return m->data != NULL ? KVS_OK : KVS_NOMEM;
}

kvs_status wt_bind_mat(wt_binder *b, int32_t layer, const char *suffix, int64_t out, int64_t in,
                       wt_accept accept, gemm_mat *m)
{
    const safet_tensor *t = NULL;
    TRY(need(b, layer, suffix, &t));
    return bind(b, t, 0, out, in, accept, m);
}

kvs_status wt_bind_fused(wt_binder *b, int32_t layer, const char *suffix, int64_t n, int64_t out,
                         int64_t in, gemm_mat *m, int64_t *step, int64_t *scale_step)
{
    const safet_tensor *t = NULL;
    TRY(need(b, layer, suffix, &t));
    TRY(bind(b, t, n, out, in, WT_QUANT, m));
    *step = out * in;
    *scale_step = (out + GEMM_BLOCK - 1) / GEMM_BLOCK * m->scale_stride;
    return KVS_OK;
}

/* ---- absorbed matrices ----------------------------------------------------------------------- */

/* What the codes are worth in a block. */
static void block_values(const wt_binder *b, float scale, bf16 value[256])
{
    for (int c = 0; c < 256; c++) {
        value[c] = bf16_from_f32(b->e4m3[c] * scale);
    }
}

/* Rows [r0, r0 + n) of an fp8 matrix, one not cut from another, as bf16 [n, n_in]: what a product multiplies. Scales
 * are those of the rows' places in the whole. */
static void dequant_rows(const wt_binder *b, const gemm_mat *m, int64_t r0, int64_t n, bf16 *out)
{
    const uint8_t *code = m->data;
    bf16 value[256];
    for (int64_t c0 = 0; c0 < m->n_in; c0 += GEMM_BLOCK) {
        const int64_t c1 = c0 + GEMM_BLOCK < m->n_in ? c0 + GEMM_BLOCK : m->n_in;
        for (int64_t r = r0; r < r0 + n; r++) {
            if (r == r0 || r % GEMM_BLOCK == 0) {
                const int64_t at = r / GEMM_BLOCK * m->scale_stride + c0 / GEMM_BLOCK;
                block_values(b, m->scale[at], value);
            }
            for (int64_t c = c0; c < c1; c++) {
                out[(r - r0) * m->n_in + c] = value[code[r * m->stride + c]];
            }
        }
    }
}

/* out[c * n + r] = in[r * stride + c] for r < n, c < m, of elements of 2 or 4 bytes, in squares that stay in
 * the cache. */
static void transpose(void *out, const void *in, int64_t stride, int64_t n, int64_t m, int32_t size)
{
    enum { SQUARE = 32 };
    for (int64_t r0 = 0; r0 < n; r0 += SQUARE) {
        const int64_t r1 = r0 + SQUARE < n ? r0 + SQUARE : n;
        for (int64_t c0 = 0; c0 < m; c0 += SQUARE) {
            const int64_t c1 = c0 + SQUARE < m ? c0 + SQUARE : m;
            for (int64_t c = c0; c < c1; c++) {
                for (int64_t r = r0; r < r1; r++) {
                    if (size == 2) {
                        ((uint16_t *)out)[c * n + r] = ((const uint16_t *)in)[r * stride + c];
                    } else {
                        ((uint32_t *)out)[c * n + r] = ((const uint32_t *)in)[r * stride + c];
                    }
                }
            }
        }
    }
}

static kvs_status absorb_fp8(wt_binder *b, wt_layer *l, bf16 *uk)
{
    const hp *h = &b->w->h;
    const int64_t per_head = (int64_t)h->nope + h->v_dim;
    bf16 *uv = wt_own(b, (size_t)h->n_head * (size_t)h->v_dim * (size_t)h->kv_lora * sizeof *uv);
    bf16 *rows = mem_alloc_array((size_t)h->nope * (size_t)h->kv_lora, sizeof *rows, 0);
    if (uv == NULL || rows == NULL) {
        mem_free(rows);
        return err_set(b->err, KVS_NOMEM, "%s: no memory for its absorbed form", b->name);
    }
    l->uv_head = (int64_t)h->v_dim * h->kv_lora;
    for (int64_t i = 0; i < h->n_head; i++) {
        dequant_rows(b, &l->kv_b, i * per_head, h->nope, rows);
        transpose(uk + i * l->uk_head, rows, h->kv_lora, h->nope, h->kv_lora, 2);
        dequant_rows(b, &l->kv_b, i * per_head + h->nope, h->v_dim, uv + i * l->uv_head);
    }
    mem_free(rows);
    l->uv.data = uv;
    return KVS_OK;
}

kvs_status wt_absorb(wt_binder *b, wt_layer *l)
{
    const hp *h = &b->w->h;
    const bool f32 = l->kv_b.type == GEMM_F32;
    const int32_t size = f32 ? 4 : 2;
    const int32_t type = f32 ? GEMM_F32 : GEMM_BF16;
    l->uk_head = (int64_t)h->kv_lora * h->nope;
    unsigned char *uk = wt_own(b, (size_t)h->n_head * (size_t)l->uk_head * (size_t)size);
    if (uk == NULL) {
        return KVS_NOMEM;
    }
    l->uk = (gemm_mat){
        .data = uk, .stride = h->nope, .n_out = h->kv_lora, .n_in = h->nope, .type = type};
    l->uv = (gemm_mat){.stride = h->kv_lora, .n_out = h->v_dim, .n_in = h->kv_lora, .type = type};
    if (l->kv_b.type == GEMM_FP8) {
        return absorb_fp8(b, l, (bf16 *)(void *)uk);
    }
    const unsigned char *w = l->kv_b.data;
    l->uv_head = ((int64_t)h->nope + h->v_dim) * h->kv_lora;
    l->uv.data = w + (int64_t)h->nope * h->kv_lora * size;
    for (int64_t i = 0; i < h->n_head; i++) {
        transpose(uk + i * l->uk_head * size, w + i * l->uv_head * size, h->kv_lora, h->nope,
                  h->kv_lora, size);
    }
    return KVS_OK;
}
