/* gemm_ref.c - the definition of a product with a weight matrix: one sum in double per output. */
#include "kern/ref/ref.h"

/* Element i of output row o of w, as it is multiplied. */
static float weight(const gemm_mat *w, const void *data, int64_t o, int64_t i)
{
    const int64_t at = o * w->stride + i;
    if (w->type == GEMM_F32) {
        return ((const float *)data)[at];
    }
    if (w->type == GEMM_BF16) {
        return bf16_to_f32(((const bf16 *)data)[at]);
    }
    const int64_t row = (w->row0 + o) / GEMM_BLOCK;
    const int64_t col = (w->col0 + i) / GEMM_BLOCK;
    return e4m3_dequant(((const uint8_t *)data)[at], w->scale[row * w->scale_stride + col]);
}

static void gemm_ref(const gemm_args *a, dev_queue *q)
{
    (void)q;
    const gemm_mat *w = &a->w;
    const int64_t size = w->type == GEMM_F32 ? 4 : w->type == GEMM_BF16 ? 2 : 1;
    const int32_t x_type = w->type == GEMM_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    for (int64_t b = 0; b < a->n_batch; b++) {
        const void *data = (const uint8_t *)w->data + b * a->w_batch * size;
        for (int64_t r = 0; r < a->n_row; r++) {
            for (int64_t o = 0; o < w->n_out; o++) {
                double sum = 0.0;
                for (int64_t i = 0; i < w->n_in; i++) {
                    const float x = ref_load(a->x, x_type, b * a->x_batch + r * a->x_stride + i);
                    sum += (double)x * (double)weight(w, data, o, i);
                }
                a->y[b * a->y_batch + r * a->y_stride + o] = (float)sum;
            }
        }
    }
}

static size_t gemm_scratch_ref(const gemm_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}

void ref_apply_gemm(kern_table *t)
{
    t->gemm = gemm_ref;
    t->gemm_scratch = gemm_scratch_ref;
}
