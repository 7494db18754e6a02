/* case_mha.c - building and comparing cases of multi-head attention.
 *
 * Bound of a block's result: that of case_attn.c with K = nope + 64 products to a score and no node: delta =
 * sqrt(K) u |q||k| scale + 4 u |score|, u = 2^-24, and (|q|_1 + K) 2^-126 scale where bf16 products may flush
 * denormals; the LSE delta + (sqrt(n) + 40) u; a value expm1(2 delta) times the mean absolute deviation, +
 * (sqrt(n) + 40) u sqrt(sum w v^2), + 2^-8 of that where P is rounded to bf16.
 *
 * The fold: weights are off by expm1(2 (LSE's bound + 10 u)) of w_a w_b |a - b|; 10 u of either side for its
 * operations; the LSE by 10 u + 1e-7 + 2 u |lse| more. Each block of a call but the first is one more fold, which
 * moves weights of keys by as much as it moves the LSE.
 *
 * Where a variant's sums do not round to nearest (kern_variant.dot_u, key_u), its own factors stand for sqrt(K) and
 * sqrt(n), and what earlier calls gave goes through such sums, too.
 */
#include "check/case_mha.h"

#include <math.h>
#include <string.h>

enum { ROPE = KVS_ROPE_DIM };

static const double u = 0x1p-24;

void mha_call(const kern_table *t, check_case *k, dev_queue *q, mha_args *a)
{
    a->scratch_bytes = t->mha_scratch(a, q);
    a->scratch = case_scratch(k, a->scratch_bytes);
    t->mha(a, q);
}

void mha_run(const kern_table *t, check_case *k, dev_queue *q)
{
    mha_args a = *(mha_args *)k->args;
    mha_call(t, k, q, &a);
}

/* ---- building ---- */

static check_elem elem_of(int32_t type)
{
    return type == KVS_DTYPE_F32 ? EL_F32 : EL_U16;
}

/* Where elements of a row begin: anywhere, or (wide, one buffer in two) at multiples of 8, in which kernels read and
 * write 16 bytes at a time. */
typedef struct place {
    int wide;
    int32_t skew;
} place;

static place place_pick(rng *r)
{
    const int wide = gen_pick(r, 2);
    return (place){wide, wide ? 0 : gen_pick(r, 3)};
}

static int64_t place_stride(place p, int64_t n)
{
    return p.wide ? (n + 7) / 8 * 8 : n;
}

static void new_queries(check_case *k, mha_args *a)
{
    rng *r = &k->r;
    const place at = place_pick(r);
    const int32_t dim = a->nope + ROPE;
    a->q_stride_head = place_stride(at, dim + gen_pick(r, 4));
    a->q_stride_row = place_stride(at, a->q_stride_head * a->n_head + gen_pick(r, 9));
    void *q = case_buf(k, "q", BUF_IN, elem_of(a->type), a->n_row * a->q_stride_row, at.skew);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const float sigma = (row + head) % 4 == 3 ? 6.0f : 1.5f; /* some rows are peaked */
            gen_any(r, q, a->type, row * a->q_stride_row + head * a->q_stride_head, dim, sigma);
        }
    }
    a->q = q;
    a->softmax_scale = 1.0f / sqrtf((float)dim);
}

static void new_keys(check_case *k, mha_args *a)
{
    rng *r = &k->r;
    const int32_t width = a->nope + a->v_dim;
    const place kv_at = place_pick(r), rope_at = place_pick(r);
    a->kv_stride_head = place_stride(kv_at, width + gen_pick(r, 3));
    a->kv_stride_key = place_stride(kv_at, a->kv_stride_head * a->n_head + gen_pick(r, 9));
    a->rope_stride = place_stride(rope_at, ROPE + gen_pick(r, 9));
    float *kv = case_buf(k, "kv", BUF_IN, EL_F32, a->n_key * a->kv_stride_key, kv_at.skew);
    void *rope = case_buf(k, "rope", BUF_IN, elem_of(a->type), a->n_key * a->rope_stride, rope_at.skew);
    for (int64_t key = 0; key < a->n_key && !k->failed; key++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            gen_f32(r, kv + key * a->kv_stride_key + head * a->kv_stride_head, width, 1.0f);
        }
        gen_any(r, rope, a->type, key * a->rope_stride, ROPE, 1.0f);
    }
    a->kv = kv;
    a->rope = rope;
}

static void mark_rows(check_case *k, const mha_args *a, float *out)
{
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            case_mark(k, out + row * a->out_stride_row + head * a->out_stride_head, 4 * (int64_t)a->v_dim);
        }
    }
}

/* Results of earlier blocks: values in the gaps between rows stay NaN; some rows had nothing yet. */
static void fill_earlier(check_case *k, const mha_args *a)
{
    rng *r = &k->r;
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
            float *lse = &a->lse[row * a->n_head + head];
            gen_f32(r, out, a->v_dim, 0.5f);
            gen_f32(r, lse, 1, 4.0f);
            if (gen_pick(r, 5) == 0) {
                memset(out, 0, (size_t)a->v_dim * sizeof *out);
                *lse = -INFINITY;
            }
        }
    }
}

static void new_outputs(check_case *k, mha_args *a)
{
    rng *r = &k->r;
    const check_kind kind = a->first ? BUF_OUT : BUF_INOUT;
    const place at = place_pick(r);
    a->out_stride_head = place_stride(at, a->v_dim + gen_pick(r, 3));
    a->out_stride_row = place_stride(at, a->out_stride_head * a->n_head + gen_pick(r, 9));
    a->out = case_buf(k, "out", kind, EL_F32, a->n_row * a->out_stride_row, at.skew);
    a->lse = case_buf(k, "lse", kind, EL_F32, (int64_t)a->n_row * a->n_head, gen_pick(r, 3));
    case_mark_all(k, a->lse);
    mark_rows(k, a, a->out);
    if (!a->first) {
        fill_earlier(k, a);
    }
    a->n_nan = case_counter(k, "n_nan");
}

static void new_lengths(check_case *k, mha_args *a, const mha_shape *s)
{
    int32_t n = 0;
    while (n < MHA_MAX_LEN && s->len[n] >= 0) {
        n++;
    }
    int32_t *len = case_buf(k, "len", BUF_IN, EL_I32, a->n_row, 0);
    for (int32_t row = 0; row < a->n_row && !k->failed; row++) {
        len[row] = n > 0 ? s->len[row % n] : a->n_key - a->n_row + 1 + row;
    }
    a->len = len;
    int32_t *kept = case_alloc(k, a->n_row, sizeof *kept);
    if (!k->failed) {
        memcpy(kept, len, (size_t)a->n_row * sizeof *kept);
    }
    ((mha_expect *)k->expect)->len = kept;
}

mha_args *mha_new(check_case *k, const mha_shape *s, int32_t type, int32_t first)
{
    mha_args *a = case_alloc(k, 1, sizeof *a);
    k->args = a;
    k->expect = case_alloc(k, 1, sizeof(mha_expect));
    a->n_row = s->n_row;
    a->n_head = s->n_head;
    a->nope = s->nope;
    a->v_dim = s->v_dim;
    a->n_key = s->n_key;
    a->type = type;
    a->first = first;
    new_queries(k, a);
    new_keys(k, a);
    new_lengths(k, a, s);
    new_outputs(k, a);
    return a;
}

void mha_second(check_case *k)
{
    const mha_args *a = k->args;
    mha_expect *e = k->expect;
    const check_kind kind = a->first ? BUF_OUT : BUF_INOUT;
    const int64_t n_out = a->n_row * a->out_stride_row;
    const int64_t n_lse = (int64_t)a->n_row * a->n_head;
    e->out2 = case_buf(k, "out2", kind, EL_F32, n_out, 1);
    e->lse2 = case_buf(k, "lse2", kind, EL_F32, n_lse, 0);
    case_mark_all(k, e->lse2);
    mark_rows(k, a, e->out2);
    if (!a->first && !k->failed) {
        memcpy(e->out2, a->out, (size_t)n_out * sizeof(float));
        memcpy(e->lse2, a->lse, (size_t)n_lse * sizeof(float));
    }
}

void mha_poison_keys(check_case *k, int32_t from)
{
    const mha_args *a = k->args;
    for (int64_t key = from; key < a->n_key && !k->failed; key++) {
        poison_fill((float *)a->kv + key * a->kv_stride_key, (size_t)a->kv_stride_key * sizeof(float));
        poison_fill((uint8_t *)a->rope + key * a->rope_stride * (a->type == KVS_DTYPE_F32 ? 4 : 2),
                    (size_t)a->rope_stride * (a->type == KVS_DTYPE_F32 ? 4 : 2));
    }
}

/* All heads of every row, or one head of each, so that the case stays short. */
void mha_finish(check_case *k)
{
    const mha_args *a = k->args;
    mha_expect *e = k->expect;
    const int64_t n_pair = (int64_t)a->n_row * a->n_head;
    const int64_t work = n_pair * a->n_key * (a->nope + a->v_dim);
    e->all = work < (k->quick ? 4000000 : 20000000);
    e->pick = case_alloc(k, a->n_row, sizeof *e->pick);
    e->o = case_alloc(k, n_pair, sizeof *e->o);
    double *s = case_alloc(k, 2 * (int64_t)a->n_key, sizeof *s);
    if (!a->first) {
        const int64_t n_out = a->n_row * a->out_stride_row;
        e->out_a = case_alloc(k, n_out, sizeof(float));
        e->lse_a = case_alloc(k, n_pair, sizeof(float));
        if (!k->failed) {
            memcpy(e->out_a, a->out, (size_t)n_out * sizeof(float));
            memcpy(e->lse_a, a->lse, (size_t)n_pair * sizeof(float));
        }
    }
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        e->pick[row] = e->all ? -1 : gen_pick(&k->r, a->n_head);
        for (int64_t head = 0; head < a->n_head; head++) {
            if (e->all || e->pick[row] == head) {
                const int64_t at = row * a->n_head + head;
                const float *out_a =
                    a->first ? NULL : e->out_a + row * a->out_stride_row + head * a->out_stride_head;
                orc_mha_head(a, row, head, out_a, a->first ? -INFINITY : e->lse_a[at], s, &e->o[at]);
                e->n_nan += (uint64_t)e->o[at].n_nan;
            }
        }
    }
}

/* ---- comparison ---- */

static void compare_clean(const mha_args *a, int64_t row, int64_t head, check_result *r)
{
    const float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
    const float lse = a->lse[row * a->n_head + head];
    if (isnan(lse) || lse == INFINITY) {
        cmp_fail(r, "lse[%lld, %lld]: %g crosses the interface", (long long)row, (long long)head,
                 (double)lse);
    }
    for (int64_t d = 0; d < a->v_dim; d++) {
        if (lse == -INFINITY) {
            cmp_bits(r, (coord){"out of an empty row", row, head, d}, out[d], 0.0f);
        } else if (!isfinite(out[d])) {
            cmp_fail(r, "out[%lld, %lld, %lld]: %g crosses the interface", (long long)row,
                     (long long)head, (long long)d, (double)out[d]);
        }
    }
}

/* A call that gives nothing leaves the earlier bits. */
static void compare_kept(const mha_args *a, const mha_expect *e, int64_t row, int64_t head,
                         check_result *r)
{
    const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
    const int64_t i = row * a->n_head + head;
    cmp_bits(r, (coord){"lse, kept", row, head, -1}, a->lse[i], a->first ? -INFINITY : e->lse_a[i]);
    for (int64_t d = 0; d < a->v_dim; d++) {
        cmp_bits(r, (coord){"out, kept", row, head, d}, a->out[at + d], a->first ? 0.0f : e->out_a[at + d]);
    }
}

void mha_compare_head(const mha_args *a, const mha_expect *e, int64_t row, int64_t head,
                      const check_variant *v, check_result *r)
{
    const orc_mha *o = &e->o[row * a->n_head + head];
    if (o->n_used == 0) {
        compare_kept(a, e, row, head, r);
        return;
    }
    const int typed = a->type != KVS_DTYPE_F32;
    const double n = (double)o->n_used;
    const double more = (double)((a->n_key + MHA_BLOCK - 1) / MHA_BLOCK - 1); /* folds inside the call */
    const double off_fold = 10.0 * u + 1e-7 + 2.0 * u * fmax(fabs(o->lse), fabs(o->lse_block));
    const double delta = fmax(sqrt((double)(a->nope + ROPE)), v->dot_u) * u * o->terms +
                         4.0 * u * o->score + (v->bf16 && typed ? o->flush : 0.0) +
                         more * off_fold;
    const double sum = (fmax(sqrt(n), v->key_u * n) + 40.0 + 10.0 * more) * u;
    const double off_lse = delta + sum + 1e-7 + 2.0 * u * fabs(o->lse_block);
    cmp_near(r, (coord){"lse", row, head, -1}, a->lse[row * a->n_head + head], o->lse,
             off_lse + 10.0 * u + 1e-7 + 2.0 * u * fabs(o->lse));

    const double u_p = typed ? v->u_p : 0.0;
    const double moved = expm1(2.0 * delta);
    const double turned = expm1(2.0 * (off_lse + 10.0 * u));
    const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
    double error2 = 0.0;
    double tol2 = 0.0;
    for (int64_t d = 0; d < a->v_dim; d++) {
        const double square = o->square[d];
        const double apart = square - o->block[d] * o->block[d];
        const double off = apart > 1e-12 * square ? sqrt(apart) * moved : 0.0;
        const double before = o->w_a > 0.0 ? (double)e->out_a[at + d] : 0.0;
        const double mixed = o->w_a * o->w_b * fabs(before - o->block[d]);
        const double fold = (mixed > 0.0 ? mixed * turned : 0.0) +
                            10.0 * u * (o->w_a * fabs(before) + o->w_b * fabs(o->block[d])) +
                            (v->key_u * n + 10.0 * more) * u * o->w_a * fabs(before);
        const double tol = o->w_b * (off + sqrt(square) * sum) + fold + half_ulp_f32(o->out[d]);
        cmp_near(r, (coord){"out", row, head, d}, a->out[at + d], o->out[d],
                 tol + o->w_b * sqrt(square) * u_p);
        const double error = (double)a->out[at + d] - o->out[d];
        error2 += error * error;
        tol2 += tol * tol;
    }
    if (e->spread && isfinite(error2)) {
        cmp_ratio(r, (coord){"norm of the error of out", row, head, -1}, sqrt(error2),
                  sqrt(tol2) + u_p * o->w_b * sqrt(o->w2v2));
    }
}

static void compare_second(const mha_args *a, const mha_expect *e, check_result *r)
{
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
            cmp_bits(r, (coord){"lse, the other way", row, head, -1}, e->lse2[row * a->n_head + head],
                     a->lse[row * a->n_head + head]);
            for (int64_t d = 0; d < a->v_dim; d++) {
                cmp_bits(r, (coord){"out, the other way", row, head, d}, e->out2[at + d], a->out[at + d]);
            }
        }
    }
}

void mha_compare(check_case *k, const check_variant *v, check_result *r)
{
    const mha_args *a = k->args;
    const mha_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            compare_clean(a, row, head, r);
            if (!e->clean_only && (e->all || e->pick[row] == head)) {
                mha_compare_head(a, e, row, head, v, r);
            }
        }
    }
    if (e->all && !e->clean_only) {
        cmp_i64(r, (coord){"n_nan", 0, -1, -1}, (int64_t)case_counted(k, a->n_nan), (int64_t)e->n_nan);
    }
    if (e->out2 != NULL) {
        compare_second(a, e, r);
    }
}
