/* kern/x86/attn_tile.h - one tile of keys into the columns of a block: scores, softmax, sums.
 *
 * Included once by the file of an instruction set, after simd.h, with ATTN_BF16 0 (cells are floats,
 * products are fma) or 1 (cells are pairs of bf16, products are pair dots). With ATTN_TILES products are those of
 * tiles (attn_tile_amx.h). Else every score is one chain of
 * n_step products over the cells of its key and column, every sum one chain over the keys of the tile:
 * neither depends on how many keys or columns are worked on together, so the group sizes below are a
 * matter of registers only.
 */
#ifndef KERN_X86_ATTN_TILE_H
#define KERN_X86_ATTN_TILE_H

#include "kern/x86/attn_soft.h"
#include "kern/x86/attn_x86.h"

#ifndef ATTN_TILES
#define ATTN_TILES 0
#endif

enum {
    N_STEP = ATTN_BF16 ? KVS_ROW_DIM / 2 : KVS_ROW_DIM,
    K_STRIDE = ATTN_BF16 ? ATTN_BF16_STRIDE : ATTN_F32_STRIDE,
    V_STRIDE = ATTN_BF16 ? ATTN_PAIR_STRIDE : ATTN_F32_STRIDE,
    N_PART = 9, /* of a score's chain, a prefetch step after each */
    CHUNK = ATTN_CHUNK,
    N_ACC = SIMD_LANES == 16 ? 24 : 12, /* accumulators: what the registers hold beside q or P */
    VDIM = KVS_LATENT_DIM
};

/* Asks for the lines of the next tile that n products of a vector buy: evenly spread, they arrive in the
 * shadow of the products, in bursts they would delay the loads of this tile. */
SIMD_FN void prefetch_step(attn_prefetch *f, int64_t n)
{
    f->credit += n * f->rate;
    while (f->credit >= 0 && f->i_row < f->n_row) {
        f->credit -= ATTN_PREFETCH_LINE;
        _mm_prefetch((const char *)f->row[f->i_row] + 64 * f->i_line, _MM_HINT_T1);
        if (++f->i_line == f->n_line) {
            f->i_line = 0;
            f->i_row++;
        }
    }
}

typedef struct sum_job {
    float *o;       /* [CHUNK][512][L], tiles: [CHUNK][L][512] */
    const float *v; /* [n][V_STRIDE]  */
    const float *p; /* [CHUNK][..][L] */
    int32_t n;      /* steps          */
    int32_t first;
    vf shrink[CHUNK];
    vm mask[CHUNK];
    int32_t all; /* every lane is in its mask */
} sum_job;

#if ATTN_TILES
#include "kern/x86/attn_tile_amx.h"
#else

/* Scores of nk keys for nv vectors: s[v][key] = k[key] . q[v]. */
SIMD_FN void score_group(const int nk, const int nv, const float *q, const float *k, float *s,
                         attn_prefetch *f)
{
    vf acc[N_ACC][CHUNK];
    SIMD_UNROLL
    for (int i = 0; i < nk; i++) {
        SIMD_UNROLL
        for (int v = 0; v < nv; v++) {
            acc[i][v] = vf_zero();
        }
    }
    for (int part = 0; part < N_PART; part++) {
        for (int t = 0; t < N_STEP / N_PART; t++) {
            cell x[CHUNK];
            SIMD_UNROLL
            for (int v = 0; v < nv; v++) {
                x[v] = cell_load(q + v * N_STEP * L);
            }
            SIMD_UNROLL
            for (int i = 0; i < nk; i++) {
                const cell b = cell_bcast(k + i * K_STRIDE);
                SIMD_UNROLL
                for (int v = 0; v < nv; v++) {
                    acc[i][v] = cell_mul_add(acc[i][v], b, x[v]);
                }
            }
            q += L;
            k++;
        }
        prefetch_step(f, nk * nv * (N_STEP / N_PART));
    }
    SIMD_UNROLL
    for (int i = 0; i < nk; i++) {
        SIMD_UNROLL
        for (int v = 0; v < nv; v++) {
            vf_store(s + (v * ATTN_TILE + i) * L, acc[i][v]);
        }
    }
}

#define SCORE_CASE(nk, nv)                                                                         \
    case nk:                                                                                       \
        score_group(nk, nv, q, k, s, f);                                                           \
        break;

static __attribute__((noinline)) void score_two(int32_t nk, const float *q, const float *k,
                                                float *s, attn_prefetch *f)
{
    switch (nk) {
        SCORE_CASE(2, 2)
        SCORE_CASE(4, 2)
        SCORE_CASE(6, 2)
#if SIMD_LANES == 16
        SCORE_CASE(8, 2)
        SCORE_CASE(10, 2)
        SCORE_CASE(12, 2)
#endif
    default:
        break;
    }
}

static __attribute__((noinline)) void score_one(int32_t nk, const float *q, const float *k,
                                                float *s, attn_prefetch *f)
{
    switch (nk) {
        SCORE_CASE(2, 1)
        SCORE_CASE(4, 1)
        SCORE_CASE(6, 1)
        SCORE_CASE(8, 1)
        SCORE_CASE(10, 1)
        SCORE_CASE(12, 1)
#if SIMD_LANES == 16
        SCORE_CASE(14, 1)
        SCORE_CASE(16, 1)
        SCORE_CASE(18, 1)
        SCORE_CASE(20, 1)
        SCORE_CASE(22, 1)
        SCORE_CASE(24, 1)
#endif
    default:
        break;
    }
}

/* Scores of n keys, in groups of an even number of keys, as equal as can be: a short last group would
 * wait for its own sums. With n odd one key more is computed, from what the tile holds, and not read. */
static void score(attn_work *w, int32_t n, int32_t v0, int32_t nv)
{
    const int32_t n_two = (n + 1) / 2;
    const int32_t n_group = (2 * n_two * nv + N_ACC - 1) / N_ACC;
    const float *q = w->q + (int64_t)v0 * N_STEP * L;
    for (int32_t g = 0; g < n_group; g++) {
        const int32_t i = 2 * (n_two * g / n_group);
        const int32_t nk = 2 * (n_two * (g + 1) / n_group) - i;
        const float *k = w->k + (int64_t)i * K_STRIDE;
        if (nv == CHUNK) {
            score_two(nk, q, k, w->s + i * L, &w->next);
        } else {
            score_one(nk, q, k, w->s + i * L, &w->next);
        }
    }
}

/* o[v][r] = o[v][r] * shrink[v] + sum over steps of v[step][r] * p[v][step], for nr rows from r. */
SIMD_FN void sum_group(const int nr, const int nv, const sum_job *j, int32_t r)
{
    vf acc[N_ACC][CHUNK];
    float *o = j->o + r * L;
    SIMD_UNROLL
    for (int i = 0; i < nr; i++) {
        SIMD_UNROLL
        for (int v = 0; v < nv; v++) {
            acc[i][v] = vf_zero();
        }
    }
    if (!j->first) {
        SIMD_UNROLL
        for (int i = 0; i < nr; i++) {
            SIMD_UNROLL
            for (int v = 0; v < nv; v++) {
                acc[i][v] = vf_mul(vf_load(o + (v * VDIM + i) * L), j->shrink[v]);
            }
        }
    }
    const float *p = j->p;
    const float *value = j->v + r;
    const int32_t n = j->n;
    for (int32_t t = 0; t < n; t++) {
        cell x[CHUNK];
        SIMD_UNROLL
        for (int v = 0; v < nv; v++) {
            x[v] = cell_load(p + v * ATTN_TILE * L);
        }
        SIMD_UNROLL
        for (int i = 0; i < nr; i++) {
            const cell b = cell_bcast(value + i);
            SIMD_UNROLL
            for (int v = 0; v < nv; v++) {
                acc[i][v] = cell_mul_add(acc[i][v], b, x[v]);
            }
        }
        p += L;
        value += V_STRIDE;
    }
    if (j->all) {
        SIMD_UNROLL
        for (int i = 0; i < nr; i++) {
            SIMD_UNROLL
            for (int v = 0; v < nv; v++) {
                vf_store(o + (v * VDIM + i) * L, acc[i][v]);
            }
        }
        return;
    }
    SIMD_UNROLL
    for (int i = 0; i < nr; i++) {
        SIMD_UNROLL
        for (int v = 0; v < nv; v++) {
            vf_store_where(o + (v * VDIM + i) * L, j->mask[v], acc[i][v]);
        }
    }
}

/* All 512 rows of the sums: groups that fill the registers, then the rest. */
static __attribute__((noinline)) void sum_two(const sum_job *j, attn_prefetch *f)
{
    enum { NR = N_ACC / 2 };
    int32_t r = 0;
    for (; r + NR <= VDIM; r += NR) {
        sum_group(NR, 2, j, r);
        prefetch_step(f, (int64_t)NR * 2 * j->n);
    }
    sum_group(VDIM % NR, 2, j, r);
}

static __attribute__((noinline)) void sum_one(const sum_job *j, attn_prefetch *f)
{
    enum { NR = N_ACC };
    int32_t r = 0;
    for (; r + NR <= VDIM; r += NR) {
        sum_group(NR, 1, j, r);
        prefetch_step(f, (int64_t)NR * j->n);
    }
    sum_group(VDIM % NR, 1, j, r);
}

static void sum_all(const sum_job *j, int32_t nv, attn_prefetch *f)
{
    if (nv == CHUNK) {
        sum_two(j, f);
    } else {
        sum_one(j, f);
    }
}

#endif

/* Online softmax of one vector over n keys, for the lanes in `mask`; returns the factor by which what
 * was summed before shrinks. A score of NaN or +inf makes l NaN. Scores all -inf weigh nothing. */
static vf softmax(attn_work *w, int32_t i_vec, const float *s, float *p, int32_t n, vm mask)
{
    const vf scale = vf_load(w->scale + i_vec * L);
    const vf m_old = vf_load(w->m + i_vec * L);
    const vf l_old = vf_load(w->l + i_vec * L);
    const vf m = score_max(s, L, n, scale, m_old);
    const vf base = vf_zero_where(vm_not(vm_lt(vf_neg_inf(), m)), m);
    const vf shrink = vf_exp_neg(vf_sub(m_old, base));
    const vf sum = score_exp(s, p, L, n, scale, base);
    vf_store(w->m + i_vec * L, vf_select(mask, m, m_old));
    vf_store(w->l + i_vec * L, vf_select(mask, vf_fma(l_old, shrink, sum), l_old));
    return shrink;
}

static void apply(attn_work *w, int32_t n, int32_t from, int32_t to)
{
#if ATTN_TILES
    tile_begin();
#endif
    /* lanes past the last column hold zeros and are nobody's */
    const int32_t end = to == w->n_col ? w->n_vec * L : to;
    for (int32_t v0 = from / L; v0 * L < end; v0 += CHUNK) {
        const int32_t nv = end - v0 * L > L ? 2 : 1;
        sum_job j = {.o = w->node + (int64_t)v0 * VDIM * L,
                     .v = w->v,
                     .p = w->p,
                     .n = ATTN_BF16 ? (n + 1) / 2 : n,
                     .first = w->first,
                     .all = 1};
        score(w, n, v0, nv);
        for (int32_t v = 0; v < nv; v++) {
            j.mask[v] = vm_range((v0 + v) * L, from, end);
            j.all = j.all && vm_bits(j.mask[v]) == (1u << L) - 1u;
            j.shrink[v] = softmax(w, v0 + v, w->s + v * ATTN_TILE * L, w->p + v * ATTN_TILE * L, n,
                                  j.mask[v]);
        }
        sum_all(&j, nv, &w->next);
    }
#if ATTN_TILES
    tile_end();
#endif
}

static int64_t n_product(int32_t n, int32_t n_vec)
{
    const int64_t n_two = (n + 1) / 2;
    return n_vec * (2 * n_two * N_STEP + VDIM * (ATTN_BF16 ? n_two : n));
}

#endif
