/* kern/x86/mha_tile.h - multi-head attention of a piece (mha_x86.h): scores, softmax, sums, the fold.
 *
 * Included once by the file of an instruction set, after simd.h, with ATTN_BF16 0 or 1 (attn_soft.h). Every score
 * is one chain of products over the cells of its key and column, every sum one chain over the keys of a tile, so
 * that the group sizes below are a matter of registers only.
 *
 * A pair of vectors whose columns all attend the whole tile takes the fast way. Where a column's keys end inside
 * it, scores behind them become -inf, hence P 0, and the sums of that column are left as they were: what remains
 * are the operations that the column alone would see, to the bit, whatever the keys behind hold.
 */
#ifndef KERN_X86_MHA_TILE_H
#define KERN_X86_MHA_TILE_H

#include "kern/x86/mha_load.h"

enum {
    N_KEY = SIMD_LANES == 16 ? 12 : 6, /* accumulators of a pair: what the registers hold beside q or P */
    N_PART = 4                         /* rows of values at a time where columns end in a tile          */
};

/* Scores of nk keys for a pair: s[key] = k[key] . q. */
SIMD_FN void score_group(const int nk, int32_t n_step, const float *q, const float *k, float *s)
{
    vf acc[N_KEY][2];
    SIMD_UNROLL
    for (int i = 0; i < nk; i++) {
        acc[i][0] = vf_zero();
        acc[i][1] = vf_zero();
    }
    for (int32_t t = 0; t < n_step; t++) {
        const cell x0 = cell_load(q);
        const cell x1 = cell_load(q + L);
        SIMD_UNROLL
        for (int i = 0; i < nk; i++) {
            const cell b = cell_bcast(k + i);
            acc[i][0] = cell_mul_add(acc[i][0], b, x0);
            acc[i][1] = cell_mul_add(acc[i][1], b, x1);
        }
        q += WIDE;
        k += TILE;
    }
    SIMD_UNROLL
    for (int i = 0; i < nk; i++) {
        vf_store(s + i * WIDE, acc[i][0]);
        vf_store(s + i * WIDE + L, acc[i][1]);
    }
}

#define SCORE_CASE(nk)                                                                             \
    case nk:                                                                                       \
        score_group(nk, n_step, q, k, s);                                                          \
        break;

static __attribute__((noinline)) void score_keys(int32_t nk, int32_t n_step, const float *q,
                                                 const float *k, float *s)
{
    switch (nk) {
        SCORE_CASE(2)
        SCORE_CASE(4)
        SCORE_CASE(6)
#if SIMD_LANES == 16
        SCORE_CASE(8)
        SCORE_CASE(10)
        SCORE_CASE(12)
#endif
    default:
        break;
    }
}

/* Scores of n keys, in groups of an even number of keys, as equal as can be. With n odd one key more is
 * computed, from what the tile holds, and not read. */
static void score(const mha_work *w, int32_t n, int32_t i_pair)
{
    const int32_t n_two = (n + 1) / 2;
    const int32_t n_group = (2 * n_two + N_KEY - 1) / N_KEY;
    const float *q = w->q + (int64_t)i_pair * w->n_step * WIDE;
    for (int32_t g = 0; g < n_group; g++) {
        const int32_t i = 2 * (n_two * g / n_group);
        const int32_t nk = 2 * (n_two * (g + 1) / n_group) - i;
        score_keys(nk, w->n_step, q, w->k + i, w->s + i * WIDE);
    }
}

/* Online softmax of one vector of a pair over n keys; returns the factor by which what was summed before
 * shrinks. A score of NaN or +inf makes l NaN. Scores all -inf weigh nothing. */
static vf softmax(const mha_work *w, int32_t i_vec, int32_t n)
{
    const vf scale = vf_set1(w->a->softmax_scale);
    const float *s = w->s + i_vec % 2 * L;
    const vf m_old = vf_load(w->m + i_vec * L);
    const vf m = score_max(s, WIDE, n, scale, m_old);
    const vf base = vf_zero_where(vm_not(vm_lt(vf_neg_inf(), m)), m);
    const vf shrink = vf_exp_neg(vf_sub(m_old, base));
    const vf sum = score_exp(s, w->p + i_vec % 2 * L, WIDE, n, scale, base);
    vf_store(w->m + i_vec * L, m);
    vf_store(w->l + i_vec * L, vf_fma(vf_load(w->l + i_vec * L), shrink, sum));
    return shrink;
}

/* What the sums of a pair over a tile need. */
typedef struct sum_job {
    float *o;       /* [n_value][2][L] */
    const float *v; /* [n][n_value]    */
    const float *p; /* [n][2][L]       */
    int64_t n_value;
    int32_t n; /* steps           */
    vf shrink[2];
    vf left[2]; /* keys of the tile that each column attends */
} sum_job;

/* o[r] = o[r] * shrink + sum over steps of v[step][r] * p[step], for nr rows from r. */
SIMD_FN void sum_group(const int nr, const sum_job *j, int64_t r)
{
    vf acc[N_KEY][2];
    float *o = j->o + r * WIDE;
    SIMD_UNROLL
    for (int i = 0; i < nr; i++) {
        acc[i][0] = vf_mul(vf_load(o + i * WIDE), j->shrink[0]);
        acc[i][1] = vf_mul(vf_load(o + i * WIDE + L), j->shrink[1]);
    }
    const float *p = j->p;
    const float *value = j->v + r;
    for (int32_t t = 0; t < j->n; t++) {
        const cell x0 = cell_load(p);
        const cell x1 = cell_load(p + L);
        SIMD_UNROLL
        for (int i = 0; i < nr; i++) {
            const cell b = cell_bcast(value + i);
            acc[i][0] = cell_mul_add(acc[i][0], b, x0);
            acc[i][1] = cell_mul_add(acc[i][1], b, x1);
        }
        p += WIDE;
        value += j->n_value;
    }
    SIMD_UNROLL
    for (int i = 0; i < nr; i++) {
        vf_store(o + i * WIDE, acc[i][0]);
        vf_store(o + i * WIDE + L, acc[i][1]);
    }
}

/* All rows: groups that fill the registers, then the rest, which is a multiple of 4 (16 lanes) or 2. */
static __attribute__((noinline)) void sum_whole(const sum_job *j)
{
    int64_t r = 0;
    for (; r + N_KEY <= j->n_value; r += N_KEY) {
        sum_group(N_KEY, j, r);
    }
    switch (j->n_value - r) {
    case 2:
        sum_group(2, j, r);
        break;
    case 4:
        sum_group(4, j, r);
        break;
#if SIMD_LANES == 16
    case 8:
        sum_group(8, j, r);
        break;
#endif
    default:
        break;
    }
}

/* One step into one vector, in the columns that attend its keys. */
SIMD_FN vf sum_where(vf acc, cell b, cell x, int32_t t, vf left)
{
#if ATTN_BF16
    const vm one = vm_lt(vf_set1((float)(2 * t)), left);
    const vm two = vm_lt(vf_set1((float)(2 * t + 1)), left);
    const cell half = vi_and(b, vi_set1(0xffff));
    const cell mine = vi_of_vf(vf_select(two, vf_of_vi(b), vf_of_vi(half)));
    return vf_select(one, cell_mul_add(acc, mine, x), acc);
#else
    return vf_select(vm_lt(vf_set1((float)t), left), cell_mul_add(acc, b, x), acc);
#endif
}

/* The same as sum_whole in columns whose keys end inside the tile. */
static __attribute__((noinline)) void sum_cut(const sum_job *j)
{
    for (int64_t r = 0; r < j->n_value; r += N_PART) {
        vf acc[N_PART][2];
        float *o = j->o + r * WIDE;
        for (int i = 0; i < N_PART; i++) {
            acc[i][0] = vf_mul(vf_load(o + i * WIDE), j->shrink[0]);
            acc[i][1] = vf_mul(vf_load(o + i * WIDE + L), j->shrink[1]);
        }
        for (int32_t t = 0; t < j->n; t++) {
            const float *p = j->p + t * WIDE;
            const float *value = j->v + t * j->n_value + r;
            const cell x0 = cell_load(p);
            const cell x1 = cell_load(p + L);
            SIMD_UNROLL
            for (int i = 0; i < N_PART; i++) {
                const cell b = cell_bcast(value + i);
                acc[i][0] = sum_where(acc[i][0], b, x0, t, j->left[0]);
                acc[i][1] = sum_where(acc[i][1], b, x1, t, j->left[1]);
            }
        }
        for (int i = 0; i < N_PART; i++) {
            vf_store(o + i * WIDE, acc[i][0]);
            vf_store(o + i * WIDE + L, acc[i][1]);
        }
    }
}

/* Scores behind a column's keys become -inf. */
static void cut_scores(const mha_work *w, int32_t n, const vf *left)
{
    for (int32_t i = 0; i < n; i++) {
        const vf key = vf_set1((float)i);
        for (int32_t v = 0; v < 2; v++) {
            float *s = w->s + i * WIDE + v * L;
            vf_store(s, vf_select(vm_lt(key, left[v]), vf_load(s), vf_neg_inf()));
        }
    }
}

/* Keys [key0, key0 + n) of the block, which the tile holds, into one pair. */
static void apply(const mha_work *w, int32_t key0, int32_t n, int32_t i_pair)
{
    const int32_t *len = w->len + i_pair * WIDE;
    int32_t least = TILE;
    int32_t most = 0;
    _Alignas(64) float left[2 * SIMD_LANES];
    for (int32_t i = 0; i < WIDE; i++) {
        const int32_t k = len[i] - key0 < 0 ? 0 : len[i] - key0 > n ? n : len[i] - key0;
        left[i] = (float)k;
        least = k < least ? k : least;
        most = k > most ? k : most;
    }
    if (most == 0) {
        return;
    }
    const int whole = least == n;
    sum_job j = {.o = w->o + (int64_t)i_pair * w->n_value * WIDE,
                 .v = w->v,
                 .p = w->p,
                 .n_value = w->n_value,
                 .n = ATTN_BF16 ? (most + 1) / 2 : most,
                 .left = {vf_load(left), vf_load(left + L)}};
    score(w, most, i_pair);
    if (!whole) {
        cut_scores(w, most, j.left);
    }
    j.shrink[0] = softmax(w, 2 * i_pair, most);
    j.shrink[1] = softmax(w, 2 * i_pair + 1, most);
    if (whole) {
        sum_whole(&j);
    } else {
        sum_cut(&j);
    }
}

/* ---- the end of the block ---- */

/* One vector's result: sums normalised, or 0. Returns its lse. */
static vf finish(mha_work *w, int32_t i_vec)
{
    float *o = w->o + (int64_t)(i_vec / 2) * w->n_value * WIDE + i_vec % 2 * L;
    const vf l = vf_load(w->l + i_vec * L);
    const vm some = vm_lt(vf_zero(), l);
    /* lanes without a sum: 1, so that no division by 0 and no log of 0 is formed */
    const vf sum = vf_select(some, l, vf_set1(1.0f));
    const vf value = vf_add(vf_load(w->m + i_vec * L), vf_log(sum));
    const vf inv = vf_div(vf_set1(1.0f), sum);
    const vm none = vm_not(some);
    vf odd = vf_zero(); /* NaN where something was not finite */
    for (int32_t r = 0; r < w->n_value; r++) {
        const vf x = vf_zero_where(none, vf_mul(vf_load(o + r * WIDE), inv));
        odd = vf_fma(x, vf_zero(), odd);
        vf_store(o + r * WIDE, x);
    }
    const vm bad = vm_or(vm_nan(l), vm_nan(odd));
    const vm mine = vm_range(i_vec * L, 0, w->n_row);
    w->n_nan += (uint64_t)__builtin_popcount(vm_bits(vm_and(bad, mine)));
    return vf_select(vm_and(some, vm_not(bad)), value, vf_neg_inf());
}

/* What a merge node does to the eight columns from `col` on. */
typedef struct fold_lane {
    float w_a, w_b;
    int32_t has_a, has_b;
    float *out;
} fold_lane;

/* n <= 8 values: out = node(out, x). */
SIMD_FN void fold_values(const fold_lane *f, float *out, __m256 x, int32_t n)
{
    __m256 y = x;
    if (!f->has_b) {
        y = _mm256_setzero_ps();
    } else if (f->has_a) {
        float old[8] = {0};
        __m256 a;
        if (n == 8) {
            a = _mm256_loadu_ps(out);
        } else {
            memcpy(old, out, (size_t)n * sizeof *out);
            a = _mm256_loadu_ps(old);
        }
        y = _mm256_fmadd_ps(_mm256_set1_ps(f->w_b), x, _mm256_mul_ps(_mm256_set1_ps(f->w_a), a));
    }
    if (n == 8) {
        _mm256_storeu_ps(out, y);
    } else {
        float cut[8];
        _mm256_storeu_ps(cut, y);
        memcpy(out, cut, (size_t)n * sizeof *out);
    }
}

static void fold_eight(const mha_work *w, int32_t col, const fold_lane *f)
{
    const int32_t v_dim = w->a->v_dim;
    const float *o = w->o + column_at(col, w->n_value);
    for (int32_t d = 0; d < v_dim; d += 8) {
        __m256 r[8];
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            r[j] = _mm256_load_ps(o + (int64_t)(d + j) * WIDE);
        }
        transpose8(r);
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            /* a block that gave nothing leaves what there is */
            if (f[j].out != NULL && (f[j].has_b || !f[j].has_a)) {
                fold_values(&f[j], f[j].out + d, r[j], v_dim - d < 8 ? v_dim - d : 8);
            }
        }
    }
}

static void fold(mha_work *w, int32_t i_vec)
{
    const mha_args *a = w->a;
    _Alignas(64) float lse[2][SIMD_LANES];
    _Alignas(64) float weight[2][SIMD_LANES];
    const int32_t n = w->n_row - i_vec * L < L ? w->n_row - i_vec * L : L;
    const int64_t first = (int64_t)(w->row0 + i_vec * L) * a->n_head + w->head;
    for (int32_t i = 0; i < L; i++) {
        lse[0][i] = a->first || i >= n ? -INFINITY : a->lse[first + (int64_t)i * a->n_head];
    }
    const vf_node node = vf_node_weights(vf_load(lse[0]), finish(w, i_vec));
    vf_store(lse[1], node.lse);
    vf_store(weight[0], node.w_a);
    vf_store(weight[1], node.w_b);
    const uint32_t has_a = vm_bits(node.has_a);
    const uint32_t has_b = vm_bits(node.has_b);
    for (int32_t i = 0; i < n; i++) {
        a->lse[first + (int64_t)i * a->n_head] = lse[1][i];
    }
    for (int32_t i0 = 0; i0 < n; i0 += 8) {
        fold_lane f[8];
        for (int32_t j = 0; j < 8; j++) {
            const int32_t i = i0 + j;
            const int64_t row = w->row0 + i_vec * L + i;
            f[j] = (fold_lane){.w_a = weight[0][i],
                               .w_b = weight[1][i],
                               .has_a = (has_a >> i & 1u) != 0,
                               .has_b = (has_b >> i & 1u) != 0,
                               .out = i < n ? a->out + row * a->out_stride_row +
                                                  w->head * a->out_stride_head
                                            : NULL};
        }
        fold_eight(w, i_vec * L + i0, f);
    }
}

static void run_piece(mha_work *w)
{
    const int32_t n_col = w->n_pair * WIDE;
    load_queries(w);
    for (int32_t i = 0; i < n_col; i++) {
        w->m[i] = -INFINITY;
        w->l[i] = 0.0f;
    }
    memset(w->o, 0, (size_t)n_col * (size_t)w->n_value * sizeof *w->o);
    int32_t end = 0;
    for (int32_t i = 0; i < n_col; i++) {
        end = w->len[i] > end ? w->len[i] : end;
    }
    for (int32_t key0 = 0; key0 < end; key0 += TILE) {
        /* the tile of the block, not of this piece: its keys are what a column may attend */
        const int32_t n = w->a->n_key - key0 < TILE ? w->a->n_key - key0 : TILE;
        load_tile(w, key0, n);
        for (int32_t p = 0; p < w->n_pair; p++) {
            apply(w, key0, n, p);
        }
    }
    for (int32_t v = 0; v < 2 * w->n_pair; v++) {
        if (v * L < w->n_row) {
            fold(w, v);
        }
    }
}

#define MHA_ISA_TABLE                                                                              \
    {                                                                                              \
        .lanes = L, .bf16 = ATTN_BF16, .run = run_piece                                            \
    }

#endif
