/* merge_ref.c - merge of partials, the definition. The node is the one of kern/exp.h; this file is
 * the order of the nodes. Values go through in blocks, so that no memory is needed beyond the
 * stack.
 */
#include "kern/ref/ref.h"

enum { BLOCK = 16, MAX_TREE = 8 };

static const float *part_at(const merge_args *a, int32_t p, int32_t row, int32_t head)
{
    return a->out_in[p] + row * a->in_stride_row + head * a->in_stride_head;
}

static float lse_at(const merge_args *a, int32_t p, int32_t row, int32_t head)
{
    return a->lse_in[p][row * a->lse_stride_row + head];
}

static void store(const merge_args *a, int32_t row, int32_t head, int32_t d, const float *v)
{
    const int64_t at = row * a->out_stride_row + head * a->out_stride_head + d;
    for (int32_t i = 0; i < BLOCK; i++) {
        if (a->out_type == KVS_DTYPE_BF16) {
            ((bf16 *)a->out)[at + i] = bf16_from_f32(v[i]);
        } else {
            ((float *)a->out)[at + i] = v[i];
        }
    }
}

/* A single part is merged with the identity: its bits, or zeros where its lse says that it is
 * empty. */
static float fold_block(const merge_args *a, int32_t row, int32_t head, int32_t d, float *v)
{
    float lse = -INFINITY;
    memset(v, 0, BLOCK * sizeof *v);
    for (int32_t p = 0; p < a->n_part; p++) {
        const merge_weight w = merge_node_weights(lse, lse_at(a, p, row, head));
        const float *b = part_at(a, p, row, head) + d;
        for (int32_t i = 0; i < BLOCK; i++) {
            v[i] = merge_node_value(w, v[i], b[i]);
        }
        lse = w.lse;
    }
    return lse;
}

static float tree_block(const merge_args *a, int32_t row, int32_t head, int32_t d, float *v)
{
    float part[MAX_TREE][BLOCK];
    float lse[MAX_TREE];
    for (int32_t p = 0; p < a->n_part; p++) {
        memcpy(part[p], part_at(a, p, row, head) + d, sizeof part[p]);
        lse[p] = lse_at(a, p, row, head);
    }
    for (int32_t half = a->n_part / 2; half >= 1; half /= 2) {
        for (int32_t p = 0; p < half; p++) {
            const merge_weight w = merge_node_weights(lse[p], lse[p + half]);
            for (int32_t i = 0; i < BLOCK; i++) {
                part[p][i] = merge_node_value(w, part[p][i], part[p + half][i]);
            }
            lse[p] = w.lse;
        }
    }
    memcpy(v, part[0], sizeof part[0]);
    return lse[0];
}

static void merge_ref(const merge_args *a, dev_queue *q)
{
    (void)q;
    uint64_t n_nan = 0;
    for (int32_t row = 0; row < a->n_row; row++) {
        for (int32_t head = 0; head < a->n_head; head++) {
            float lse = -INFINITY;
            for (int32_t p = 0; p < a->n_part; p++) {
                n_nan += (uint64_t)f32_is_nan(lse_at(a, p, row, head));
            }
            for (int32_t d = 0; d < a->dim; d += BLOCK) {
                float v[BLOCK];
                lse = a->mode == MERGE_TREE && a->n_part > 1 ? tree_block(a, row, head, d, v)
                                                             : fold_block(a, row, head, d, v);
                store(a, row, head, d, v);
            }
            if (a->lse != NULL) {
                a->lse[(int64_t)row * a->n_head + head] = lse;
            }
        }
    }
    ref_count(a->n_nan, n_nan);
}

void ref_apply_merge(kern_table *t)
{
    t->merge = merge_ref;
}
