/* x86/kvio_loops.h - the loops of a kvio_isa in the vectors of simd.h: rows and keys written and read.
 *
 * How values become e4m3: kvio_quant.h. Included once by a file that has defined SIMD_LANES.
 */
#ifndef KVS_KERN_X86_KVIO_LOOPS_H
#define KVS_KERN_X86_KVIO_LOOPS_H

#include <math.h>
#include <stdbool.h>

#include "kern/x86/index_x86.h"
#include "kern/x86/kvio_quant.h"
#include "kern/x86/kvio_x86.h"
#include "kern/x86/simd_more.h"

/* ---- f32 and bf16 --------------------------------------------------------------------------------- */

/* bf16 bits of f32 bits: nearest even; NaN keeps sign and upper payload and becomes quiet. */
SIMD_FN vi bf16_bits(vi u, const int may_be_nan)
{
    const vi even = vi_and(vi_srl(u, 16), vi_set1(1));
    const vi r = vi_srl(vi_add(vi_add(u, even), vi_set1(0x7FFF)), 16);
    if (!may_be_nan) {
        return r;
    }
    const vm nan = vm_lt_i(vi_set1(F32_INF), vi_and(u, vi_set1(F32_ABS)));
    return vi_select(nan, vi_or(vi_srl(u, 16), vi_set1(0x40)), r);
}

/* n values (a multiple of 2 * L); returns how many are NaN. */
SIMD_FN int64_t put_bf16(const uint8_t *x, const int wide, int32_t n, uint8_t *out)
{
    if (wide) {
        for (int32_t i = 0; i < n; i += 2 * L) {
            const vi a = bf16_bits(vi_loadu(x + 4 * i), 1);
            const vi b = bf16_bits(vi_loadu(x + 4 * (i + L)), 1);
            vi_store2_u16(out + 2 * i, a, b);
        }
        return count_nan(x, 1, n);
    }
    vi top = vi_set1(0);
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi w = vi_loadu(x + 2 * i);
        vi_storeu(out + 2 * i, w);
        top = vi_max16(top, vi_and(w, vi_set1(0x7FFF7FFF)));
    }
    return vi_any_lt16(vi_set1(0x7F807F80), top) ? scan_careful(x, 0, n).n_nan : 0;
}

/* stream: past the caches, out aligned to 64. */
SIMD_FN void put_f32(const uint8_t *x, const int wide, int32_t n, const int stream, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += L) {
        const vi v = vi_of_vf(in_load(x + i * in_bytes(wide), wide));
        if (stream) {
            vi_stream(out + 4 * i, v);
        } else {
            vi_storeu(out + 4 * i, v);
        }
    }
}

/* ---- writers -------------------------------------------------------------------------------------- */

/* The latents of a fp8_ds_mla row tile by tile, whatever they are. */
SIMD_FN void write_tiles(const kv_writer *w, uint8_t *row, const uint8_t *latent, const int wide, float *s,
                         kv_count *count)
{
    const bool exact = w->rule == KVS_SCALE_EXACT;
    for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
        s[t] = quant_tile(latent + t * KV_DS_TILE * in_bytes(wide), wide, KV_DS_TILE, exact, LEAST_ROW,
                          row + t * KV_DS_TILE, count);
    }
}

SIMD_FN void write_ds_mla(const kv_writer *w, uint8_t *row, const kvio_row *in, const int wide,
                          kv_count *count)
{
    float s[KV_DS_N_TILE];
    bool done = false;
    if (!wide && w->rule != KVS_SCALE_EXACT) {
        const uint8_t *x[GROUP];
        const uint8_t *next[GROUP];
        uint8_t *out[GROUP];
        for (int32_t t = 0; t < GROUP; t++) {
            x[t] = in->latent + t * KV_DS_TILE * in_bytes(wide);
            next[t] = in->next_latent + t * KV_DS_TILE * in_bytes(wide);
            out[t] = row + t * KV_DS_TILE;
        }
        done = quant_group(x, next, KV_DS_N_TILE, KV_DS_TILE, LEAST_ROW, 0, out, s);
    }
    if (!done) {
        write_tiles(w, row, in->latent, wide, s, count);
    }
    memcpy(row + KV_DS_SCALE_AT, s, sizeof s);
    ask(in->next_rope, KVS_ROPE_DIM * sizeof(bf16));
    count->n_nan += (uint64_t)put_bf16(in->rope, wide, KVS_ROPE_DIM, row + KV_DS_ROPE_AT);
}

static_assert((int)GROUP == (int)KV_DS_N_TILE, "a row is a group of tiles");

SIMD_FN void write_part(const kv_writer *w, uint8_t *out, const uint8_t *x, const uint8_t *next,
                        int32_t n, const int wide, const bool stream, kv_count *count)
{
    if (w->fmt == KVS_KV_FP8 && stream) {
        quant_given(x, next, wide, n, w->k_scale, 1, out, count);
    } else if (w->fmt == KVS_KV_FP8) {
        quant_given(x, next, wide, n, w->k_scale, 0, out, count);
    } else if (w->fmt == KVS_KV_BF16) {
        count->n_nan += (uint64_t)put_bf16(x, wide, n, out);
    } else {
        put_f32(x, wide, n, 0, out);
        count->n_nan += (uint64_t)count_nan(x, wide, n);
    }
}

SIMD_FN void write_row(const kv_writer *w, uint8_t *row, const kvio_row *in, const int wide,
                       kv_count *count)
{
    if (w->fmt == KVS_KV_FP8_DS_MLA) {
        write_ds_mla(w, row, in, wide, count);
        return;
    }
    const int64_t size = kv_row_bytes(w->fmt) / KVS_ROW_DIM;
    write_part(w, row, in->latent, in->next_latent, KVS_LATENT_DIM, wide, in->stream, count);
    write_part(w, row + KVS_LATENT_DIM * size, in->rope, in->next_rope, KVS_ROPE_DIM, wide, in->stream,
               count);
}

static void kvio_write_row(const kv_writer *w, uint8_t *row, const kvio_row *in, kv_count *count)
{
    if (w->in_type == KVS_DTYPE_BF16) {
        write_row(w, row, in, 0, count);
    } else {
        write_row(w, row, in, 1, count);
    }
}

static float kvio_quant_head(const void *x, int32_t in_type, uint8_t *q8, uint64_t *n_nan)
{
    kv_count c = {0};
    float s = 1.0f;
    if (in_type == KVS_DTYPE_F32) {
        s = quant_tile(x, 1, KVS_INDEX_DIM, false, LEAST_INDEX, q8, &c);
    } else {
        const uint8_t *head = x;
        if (!quant_group(&head, &head, 1, KVS_INDEX_DIM, LEAST_INDEX, 0, &q8, &s)) {
            s = quant_tile(x, 0, KVS_INDEX_DIM, false, LEAST_INDEX, q8, &c);
        }
    }
    *n_nan += c.n_nan;
    return s;
}

SIMD_FN void widen_key(const uint8_t *x, const int wide, const int stream, uint8_t *out, uint64_t *n_nan)
{
    put_f32(x, wide, KVS_INDEX_DIM, stream, out);
    *n_nan += (uint64_t)count_nan(x, wide, KVS_INDEX_DIM);
}

static void kvio_widen_head(const void *x, int32_t in_type, float *out, uint64_t *n_nan)
{
    if (in_type == KVS_DTYPE_BF16) {
        widen_key(x, 0, 0, (uint8_t *)out, n_nan);
    } else {
        widen_key(x, 1, 0, (uint8_t *)out, n_nan);
    }
}

SIMD_FN void quant_keys(const kvio_key *k, int32_t n, const int wide, const int stream, kv_count *count)
{
    float s[GROUP];
    uint8_t *out[GROUP];
    for (int32_t i = 0; i < n; i++) {
        out[i] = k[i].page + k[i].off * index_key_bytes(KVS_INDEX_FP8);
    }
    bool done = false;
    if (!wide && n == KVIO_KEYS) {
        const uint8_t *x[GROUP];
        const uint8_t *next[GROUP];
        for (int32_t i = 0; i < GROUP; i++) {
            x[i] = k[i].value;
            next[i] = k[i].next;
        }
        done = quant_group(x, next, KVIO_KEYS, KVS_INDEX_DIM, LEAST_INDEX, stream, out, s);
    }
    for (int32_t i = 0; i < n; i++) {
        if (!done) {
            s[i] = quant_tile(k[i].value, wide, KVS_INDEX_DIM, false, LEAST_INDEX, out[i], count);
        }
        memcpy(k[i].page + index_scale_at(k[i].off), &s[i], sizeof s[i]);
    }
}

static_assert((int)GROUP == (int)KVIO_KEYS, "a call writes a group of keys");

static void kvio_write_line(const kvio_line *l, kv_count *count)
{
    for (int32_t i = 0; i < l->n; i += GROUP) {
        float s[GROUP];
        const uint8_t *x[GROUP];
        const uint8_t *next[GROUP];
        uint8_t *out[GROUP];
        SIMD_UNROLL
        for (int32_t t = 0; t < GROUP; t++) {
            x[t] = l->value + (i + t) * l->stride;
            /* may lie behind the last token: it is asked for, not read */
            next[t] = (const uint8_t *)((uintptr_t)x[t] + (uintptr_t)l->ahead);
            out[t] = l->page + (l->off + i + t) * KVS_INDEX_DIM;
        }
        if (!quant_group(x, next, GROUP, KVS_INDEX_DIM, LEAST_INDEX, 1, out, s)) {
            for (int32_t t = 0; t < GROUP; t++) {
                s[t] = quant_tile(x[t], 0, KVS_INDEX_DIM, false, LEAST_INDEX, out[t], count);
            }
        }
        memcpy(l->page + index_scale_at(l->off + i), s, sizeof s);
    }
}

SIMD_FN void write_keys(int32_t fmt, const kvio_key *k, int32_t n, const int wide, const int stream,
                        kv_count *count)
{
    if (fmt == KVS_INDEX_FP8) {
        quant_keys(k, n, wide, stream, count);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        widen_key(k[i].value, wide, stream, k[i].page + k[i].off * index_key_bytes(fmt), &count->n_nan);
    }
}

static void kvio_write_keys(int32_t fmt, int32_t in_type, const kvio_key *k, int32_t n, bool stream,
                            kv_count *count)
{
    if (in_type == KVS_DTYPE_BF16) {
        if (stream) {
            write_keys(fmt, k, n, 0, 1, count);
        } else {
            write_keys(fmt, k, n, 0, 0, count);
        }
    } else {
        if (stream) {
            write_keys(fmt, k, n, 1, 1, count);
        } else {
            write_keys(fmt, k, n, 1, 0, count);
        }
    }
}

/* ---- reader --------------------------------------------------------------------------------------- */

/* Whether one of n codes is NaN; n a multiple of 32. */
static bool has_nan_code(const uint8_t *p, int32_t n)
{
    const __m256i mag = _mm256_set1_epi8(0x7F);
    __m256i any = _mm256_setzero_si256();
    for (int32_t i = 0; i < n; i += 32) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(p + i));
        any = _mm256_or_si256(any, _mm256_cmpeq_epi8(_mm256_and_si256(x, mag), mag));
    }
    return !_mm256_testz_si256(any, any);
}

/* bf16 of 0 .. 7 times 2^-9, and which of them have an exponent, for every 128 bits. */
#define KVIO_SUBNORMAL 0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60
#define KVIO_NONZERO   0x0000, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF
static const uint16_t subnormal_table[32] = {KVIO_SUBNORMAL, KVIO_SUBNORMAL, KVIO_SUBNORMAL,
                                             KVIO_SUBNORMAL};
static const uint16_t subnormal_mask[32] = {KVIO_NONZERO, KVIO_NONZERO, KVIO_NONZERO, KVIO_NONZERO};

/* n codes (a multiple of 2 * L), none NaN, times 2^e, every product a normal bf16 or 0: the exponent is
 * shifted, subnormal codes come from a table. */
SIMD_FN void read_words(const uint8_t *p, int32_t e, int32_t n, const int wide, uint8_t *out)
{
    const uint32_t step = (uint32_t)(e * 128) & 0xFFFFu;
    const vi scale = vi_set1((int32_t)(step << 16 | step));
    const vi table = vi_add16(vi_loadu(subnormal_table), vi_and(vi_loadu(subnormal_mask), scale));
    const vi offset = vi_set1((120 + e) * (128 * 0x10001));
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi x = vi_loadu_i8(p + i);
        const vi shifted = vi_and(vi_sll16(x, 4), vi_set1(0x07F007F0));
        vi mag = vi_add16(shifted, offset);
        /* eight lanes pay more for the table than for asking whether it is needed */
        if (L == 16 || vi_any_lt16(shifted, vi_set1(0x00800080))) {
            mag = vi_lookup8_where_clear(x, vi_set1(0x00780078), table, mag);
        }
        const vi w = vi_or(mag, vi_and(x, vi_set1((int32_t)0x80008000u)));
        if (wide) {
            vi_store_high(out + 4 * i, w);
        } else {
            vi_storeu(out + 2 * i, w);
        }
    }
}

/* n codes (a multiple of 2 * L), none NaN, times s, rounded to bf16, as f32 (wide) or bf16. */
SIMD_FN void read_rounded(const uint8_t *p, float s, int32_t n, const int wide, uint8_t *out)
{
    const vf by = vf_set1(s * 256.0f); /* vf_loadu_e4m3 gives value / 256 */
    for (int32_t i = 0; i < n; i += 2 * L) {
        vi w[2];
        SIMD_UNROLL
        for (int j = 0; j < 2; j++) {
            const vi u = vi_of_vf(vf_mul(vf_loadu_e4m3(p + i + j * L, 0), by));
            w[j] = bf16_bits(u, 0);
        }
        if (wide) {
            vi_storeu(out + 4 * i, vi_sll(w[0], 16));
            vi_storeu(out + 4 * (i + L), vi_sll(w[1], 16));
        } else {
            vi_store2_u16(out + 2 * i, w[0], w[1]);
        }
    }
}

SIMD_FN void read_codes(const uint8_t *p, float s, int32_t n, const int wide, uint8_t *out)
{
    const uint32_t u = f32_bits(s);
    const uint32_t e = u >> 23;
    const bool pow2 = (u & 0x807FFFFFu) == 0 && e >= 20 && e <= 240; /* products normal */
    if (!f32_is_finite(s * 256.0f) || has_nan_code(p, n)) {
        for (int32_t i = 0; i < n; i++) {
            const float v = e4m3_dequant(p[i], s);
            const bf16 b = bf16_from_f32(v);
            if (wide) {
                memcpy(out + 4 * i, &v, sizeof v);
            } else {
                memcpy(out + 2 * i, &b, sizeof b);
            }
        }
    } else if (pow2) {
        read_words(p, (int32_t)e - 127, n, wide, out);
    } else {
        read_rounded(p, s, n, wide, out);
    }
}

/* n stored bf16 values (a multiple of 2 * L); as bf16 a NaN becomes quiet. */
SIMD_FN void read_bf16(const uint8_t *p, int32_t n, const int wide, uint8_t *out)
{
    for (int32_t i = 0; i < n; i += 2 * L) {
        const vi w = vi_loadu(p + 2 * i);
        if (wide) {
            vi_store_high(out + 4 * i, w);
            continue;
        }
        vi_storeu(out + 2 * i, w);
        if (vi_any_lt16(vi_set1(0x7F807F80), vi_and(w, vi_set1(0x7FFF7FFF)))) {
            for (int32_t j = i; j < i + 2 * L; j++) {
                bf16 x;
                memcpy(&x, p + 2 * j, sizeof x);
                x = bf16_from_f32(bf16_to_f32(x));
                memcpy(out + 2 * j, &x, sizeof x);
            }
        }
    }
}

SIMD_FN void read_row(int32_t fmt, float k_scale, const uint8_t *row, const int wide, uint8_t *out)
{
    const int64_t size = in_bytes(wide);
    if (fmt == KVS_KV_FP8_DS_MLA) {
        for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
            float s;
            memcpy(&s, row + KV_DS_SCALE_AT + t * (int32_t)sizeof s, sizeof s);
            read_codes(row + t * KV_DS_TILE, s, KV_DS_TILE, wide, out + t * KV_DS_TILE * size);
        }
        read_bf16(row + KV_DS_ROPE_AT, KVS_ROPE_DIM, wide, out + KVS_LATENT_DIM * size);
    } else if (fmt == KVS_KV_FP8) {
        read_codes(row, k_scale, KVS_ROW_DIM, wide, out);
    } else if (fmt == KVS_KV_BF16) {
        read_bf16(row, KVS_ROW_DIM, wide, out);
    } else if (wide) {
        memcpy(out, row, KV_ROW_BYTES_F32);
    } else {
        put_bf16(row, 1, KVS_ROW_DIM, out);
    }
}

static void kvio_read_row(int32_t fmt, float k_scale, const uint8_t *row, int32_t out_type, void *out)
{
    if (out_type == KVS_DTYPE_BF16) {
        read_row(fmt, k_scale, row, 0, out);
    } else {
        read_row(fmt, k_scale, row, 1, out);
    }
}

static void kvio_stream(void *out, const void *from, int64_t bytes)
{
    uint8_t *to = out;
    for (int64_t i = 0; i < bytes; i += 4 * L) {
        vi_stream(to + i, vi_loadu((const uint8_t *)from + i));
    }
}

/* ---- ops ------------------------------------------------------------------------------------------ */

static const kvio_isa g_isa = {
    .write_row = kvio_write_row,
    .write_keys = kvio_write_keys,
    .write_line = kvio_write_line,
    .read_row = kvio_read_row,
    .stream = kvio_stream,
    .quant_head = kvio_quant_head,
    .widen_head = kvio_widen_head,
};

static void kv_write_simd(const kv_write_args *a, dev_queue *q)
{
    kv_write_run(&g_isa, a, q);
}

static void index_write_simd(const index_write_args *a, dev_queue *q)
{
    index_write_run(&g_isa, a, q);
}

static void gather_simd(const gather_args *a, dev_queue *q)
{
    gather_run(&g_isa, a, q);
}

static void index_quant_simd(const index_quant_args *a, dev_queue *q)
{
    index_quant_run(&g_isa, a, q);
}

#endif
