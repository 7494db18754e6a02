/* x86/gemm_vbmi.c - see gemm_codes.h. */
#define SIMD_LANES 16
#include "kern/x86/gemm_codes.h"

#include "kern/x86/gemm_vec.h"
#include "num/fmt.h"

enum { N_MAG = 128, STEP = 64, NR = 8 /* outputs of a tile of its isa */ };

typedef struct byte_table {
    uint8_t lo[N_MAG], hi[N_MAG];
    float scale;
    uint8_t pad[60];
} byte_table;

static void byte_table_fill(byte_table *t, float scale, const float *mag)
{
    const vf s = vf_set1(scale);
    SIMD_UNROLL
    for (int i = 0; i < N_MAG; i += STEP) {
        const vw a = vw_join_bf16(vf_mul(vf_loadu(mag + i), s), vf_mul(vf_loadu(mag + i + 16), s));
        const vw b =
            vw_join_bf16(vf_mul(vf_loadu(mag + i + 32), s), vf_mul(vf_loadu(mag + i + 48), s));
        vi_storeu(t->lo + i, vb_even_bytes(a, b));
        vi_storeu(t->hi + i, vb_odd_bytes(a, b));
    }
    t->scale = scale;
}

static void byte_tables(const float *scale, int32_t n, uint8_t *table)
{
    float mag[N_MAG];
    for (int i = 0; i < N_MAG; i++) {
        mag[i] = e4m3_to_f32((uint8_t)i);
    }
    for (int32_t i = 0; i < n; i++) {
        byte_table_fill((byte_table *)(void *)table + i, scale[i], mag);
    }
}

typedef struct byte_lookup {
    vi lo[2], hi[2];
} byte_lookup;

SIMD_FN byte_lookup lookup_of(const byte_table *t)
{
    const byte_lookup k = {{vi_loadu(t->lo), vi_loadu(t->lo + STEP)},
                           {vi_loadu(t->hi), vi_loadu(t->hi + STEP)}};
    return k;
}

/* STEP codes in memory -> two vectors of bf16, in order. */
typedef struct bf16_pair {
    vi a, b;
} bf16_pair;

SIMD_FN bf16_pair codes_to_bf16(const uint8_t *code, const byte_lookup *t)
{
    const vi x = vb_before_zip(vi_loadu(code));
    const vi lo = vb_lookup128(t->lo[0], t->lo[1], x);
    const vi hi = vi_xor(vb_lookup128(t->hi[0], t->hi[1], x), vi_and(x, vb_set1(0x80)));
    const bf16_pair p = {vb_zip_lo(lo, hi), vb_zip_hi(lo, hi)};
    return p;
}

SIMD_FN void codes_store(const uint8_t *code, const byte_lookup *t, uint16_t *to)
{
    const bf16_pair p = codes_to_bf16(code, t);
    vi_storeu(to, p.a);
    vi_storeu(to + STEP / 2, p.b);
}

static void dequant(const gemm_strip *s)
{
    const byte_table *t = (const byte_table *)(const void *)s->table;
    const byte_lookup k = lookup_of(t);
    const int32_t whole = s->n / STEP * STEP;
    for (int32_t r = 0; r < s->n_row; r++) {
        const uint8_t *code = s->code + r * s->stride;
        uint16_t *to = s->to + r * s->to_stride;
        if (whole == GEMM_BLOCK) {
            SIMD_UNROLL
            for (int32_t i = 0; i < GEMM_BLOCK; i += STEP) {
                _mm_prefetch((const char *)(code + i + s->ahead), _MM_HINT_T0);
                codes_store(code + i, &k, to + i);
            }
            continue;
        }
        for (int32_t i = 0; i < whole; i += STEP) {
            codes_store(code + i, &k, to + i);
        }
        for (int32_t i = whole; i < s->n; i++) {
            to[i] = bf16_from_f32(e4m3_to_f32(code[i]) * t->scale).bits;
        }
    }
}

/* m rows of x from row r on and nr rows of w from row j0 on; m, nr and streams are constants of the
 * caller. */
SIMD_FN void dot_part(const gemm_tile *t, const uint8_t *table, int32_t r, int32_t j0, const int m,
                      const int nr, const int streams)
{
    const uint8_t *x = t->x + r * t->x_stride;
    vf acc[16];
    SIMD_UNROLL
    for (int i = 0; i < m * nr; i++) {
        acc[i] = vf_zero();
    }
    for (int64_t at = 0; at < t->n; at += STEP) {
        const byte_table *of = (const byte_table *)(const void *)table + at / N_MAG;
        const byte_lookup k = lookup_of(of);
        const int64_t to = at + (at < t->turn ? GEMM_AHEAD : t->jump);
        SIMD_UNROLL
        for (int j = 0; j < nr; j++) {
            if (streams) {
                _mm_prefetch((const char *)(t->w[j0 + j] + to), _MM_HINT_T0);
            }
            const bf16_pair w = codes_to_bf16(t->w[j0 + j] + at, &k);
            SIMD_UNROLL
            for (int i = 0; i < m; i++) {
                const uint8_t *xi = x + i * t->x_stride + 2 * at;
                acc[i * nr + j] = vf_dot_bf16(acc[i * nr + j], w.a, vi_loadu(xi));
                acc[i * nr + j] = vf_dot_bf16(acc[i * nr + j], w.b, vi_loadu(xi + STEP));
            }
        }
    }
    SIMD_UNROLL
    for (int i = 0; i < m; i++) {
        float *y = t->y + (r + i) * t->y_stride + j0;
        SIMD_UNROLL
        for (int j = 0; j < nr; j += 4) {
            const vf *s = acc + i * nr + j;
            if (j0 + j < t->n_out) {
                put4(y + j, vf_sum4(s[0], s[1], s[2], s[3]), t->n_out - j0 - j, t->first);
            }
        }
    }
}

SIMD_FN void dot_rows(const gemm_tile *t, const uint8_t *table, int32_t r, int32_t m,
                      const int streams)
{
    if (m == 1) {
        dot_part(t, table, r, 0, 1, NR, streams);
    } else if (m == 2) {
        dot_part(t, table, r, 0, 2, NR, streams);
    }
    for (int32_t j0 = 0; m > 2 && j0 < t->n_out; j0 += NR / 2) {
        if (m == 3) {
            dot_part(t, table, r, j0, 3, NR / 2, streams);
        } else {
            dot_part(t, table, r, j0, 4, NR / 2, streams);
        }
    }
}

void gemm_dot_codes_vbmi(const gemm_tile *t, const uint8_t *table)
{
    for (int32_t r = 0; r < t->n_row;) {
        const int32_t left = t->n_row - r;
        const int32_t m = left <= 4 ? left : (left + 1) / 2;
        if (r == 0) {
            dot_rows(t, table, r, m, 1);
        } else {
            dot_rows(t, table, r, m, 0);
        }
        r += m;
    }
}

const gemm_codes gemm_codes_vbmi = {sizeof(byte_table), byte_tables, dequant};
