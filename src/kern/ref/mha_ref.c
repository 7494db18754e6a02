/* mha_ref.c - attention in its multi-head form over blocks of keys, the definition: kern/mha.h in plain loops.
 *
 * One (row, head) at a time; scores, probabilities and sums are double, P is not rounded; the result of the
 * block becomes f32 and enters the fold through merge_node. Sums are taken key by key, without tiles: in double
 * the difference does not show.
 */
#include "kern/ref/ref.h"

enum { ROPE = KVS_ROPE_DIM };

typedef struct block_sum {
    double acc[MHA_MAX_DIM];
    double score[MHA_BLOCK];
    float out[MHA_MAX_DIM];
    float lse;
} block_sum;

static size_t mha_scratch_ref(const mha_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return sizeof(block_sum);
}

/* An expanded value as it is multiplied. */
static double operand(const mha_args *a, float x)
{
    return (double)(a->type == KVS_DTYPE_F32 ? x : bf16_round(x));
}

static double score_of(const mha_args *a, int64_t row, int64_t head, int64_t key)
{
    const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
    const float *k = a->kv + key * a->kv_stride_key + head * a->kv_stride_head;
    double sum = 0.0;
    for (int64_t d = 0; d < a->nope; d++) {
        sum += (double)ref_load(a->q, a->type, at + d) * operand(a, k[d]);
    }
    for (int64_t d = 0; d < ROPE; d++) {
        sum += (double)ref_load(a->q, a->type, at + a->nope + d) *
               (double)ref_load(a->rope, a->type, key * a->rope_stride + d);
    }
    return sum * (double)a->softmax_scale;
}

/* The result of one (row, head) over keys [key0, key0 + n), into s->out and s->lse; 1 where it had to be dropped. */
static int block_run(const mha_args *a, int64_t row, int64_t head, int64_t key0, int32_t n, block_sum *s)
{
    s->lse = -INFINITY;
    double m = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        s->score[i] = score_of(a, row, head, key0 + i);
        /* as f32, so that an overflow of the type that crosses the interface is one here too */
        if (!((float)s->score[i] < INFINITY)) {
            return 1;
        }
        m = s->score[i] > m ? s->score[i] : m;
    }
    if (!((float)m > -INFINITY)) {
        return 0;
    }
    double l = 0.0;
    memset(s->acc, 0, (size_t)a->v_dim * sizeof *s->acc);
    for (int32_t i = 0; i < n; i++) {
        const double p = ref_exp(s->score[i] - m);
        const float *v = a->kv + (key0 + i) * a->kv_stride_key + head * a->kv_stride_head + a->nope;
        l += p;
        for (int32_t d = 0; d < a->v_dim; d++) {
            s->acc[d] += p * operand(a, v[d]);
        }
    }
    const float lse = (float)(m + ref_log(l));
    int bad = !f32_is_finite(lse);
    for (int32_t d = 0; d < a->v_dim; d++) {
        s->out[d] = (float)(s->acc[d] / l);
        bad |= !f32_is_finite(s->out[d]);
    }
    s->lse = bad ? -INFINITY : lse;
    return bad;
}

/* Folds a block's result, or the lack of one, into the (row, head). */
static void block_fold(const mha_args *a, int64_t row, int64_t head, int first, const block_sum *s)
{
    float *lse = a->lse + row * a->n_head + head;
    float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
    const merge_weight w = merge_node_weights(first ? -INFINITY : *lse, s->lse);
    for (int32_t d = 0; d < a->v_dim; d++) {
        out[d] = merge_node_value(w, first ? 0.0f : out[d], s->out[d]);
    }
    *lse = w.lse;
}

static void mha_ref(const mha_args *a, dev_queue *q)
{
    (void)q;
    block_sum *s = a->scratch;
    uint64_t n_nan = 0;
    for (int64_t row = 0; row < a->n_row; row++) {
        const int32_t most = a->len[row] < a->n_key ? a->len[row] : a->n_key;
        for (int64_t head = 0; head < a->n_head; head++) {
            int64_t key0 = 0;
            do { /* once at least: `first` leaves (0, -inf) where there are no keys */
                const int64_t n = most - key0 < MHA_BLOCK ? most - key0 : MHA_BLOCK;
                n_nan += (uint64_t)block_run(a, row, head, key0, (int32_t)n, s);
                block_fold(a, row, head, a->first && key0 == 0, s);
                key0 += MHA_BLOCK;
            } while (key0 < most);
        }
    }
    ref_count(a->n_nan, n_nan);
}

void ref_apply_mha(kern_table *t)
{
    t->mha = mha_ref;
    t->mha_scratch = mha_scratch_ref;
}
