/* quant_ref.c - quantisation of attention queries and of index queries, the definition. */
#include "kern/ref/ref.h"

static float amax_of(const void *x, int32_t type, int64_t at, int32_t n)
{
    float amax = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        amax = amax_add(amax, ref_load(x, type, at + i));
    }
    return amax;
}

static void quant_q_ref(const quant_q_args *a, dev_queue *q)
{
    (void)q;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
            const float s = scale_for(a->rule, amax_of(a->q, a->q_type, at, KVS_ROW_DIM));
            uint16_t *out = a->q_out + (row * a->n_head + head) * KVS_ROW_DIM;
            for (int32_t i = 0; i < KVS_ROW_DIM; i++) {
                const uint8_t code = e4m3_quant(ref_load(a->q, a->q_type, at + i), s);
                out[i] = bf16_from_f32(e4m3_to_f32(code)).bits;
            }
            a->scale[row * a->n_head + head] = s;
        }
    }
}

static void index_quant_ref(const index_quant_args *a, dev_queue *q)
{
    (void)q;
    const float by_dim = (float)(1.0 / sqrt((double)KVS_INDEX_DIM));
    const float by_head = (float)(1.0 / sqrt((double)a->n_head));
    uint64_t n_nan = 0;
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        const int64_t at = i * KVS_INDEX_DIM;
        const float s =
            a->q8 != NULL ? scale_index(amax_of(a->q, a->q_type, at, KVS_INDEX_DIM)) : 1.0f;
        for (int64_t d = at; d < at + KVS_INDEX_DIM; d++) {
            const float x = ref_load(a->q, a->q_type, d);
            n_nan += (uint64_t)f32_is_nan(x);
            if (a->q8 != NULL) {
                a->q8[d] = e4m3_quant(x, s);
            } else {
                a->q_f32[d] = x;
            }
        }
        n_nan += (uint64_t)f32_is_nan(a->w[i]);
        a->w_out[i] = a->w[i] * s * by_dim * by_head;
    }
    ref_count(a->n_nan, n_nan);
}

void ref_apply_quant_q(kern_table *t)
{
    t->quant_q = quant_q_ref;
}

void ref_apply_index_quant(kern_table *t)
{
    t->index_quant = index_quant_ref;
}
