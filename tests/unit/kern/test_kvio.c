/* Cache writers, gather and query quantisation of every variant: the bytes of num/fmt.h and num/kvfmt.h
 * for all codes, a dense sweep of f32, and rows of every format with what can go wrong in them. */
#include "unit/unit.h"

#include <math.h>

#include "kern_x86.h"
#include "num/kvfmt.h"

enum { N_TOK = 70, N_SLOT = 3 * KVS_PAGE_TOKENS, ROW = KVS_ROW_DIM };

static int32_t g_variant;

/* The next variant of op, or NULL. */
static const char *next_variant(kern_table *t, kern_op op)
{
    return table_nth(t, op, g_variant++);
}

/* e4m3(x / k_scale) of many x against e4m3_quant, 576 at a time. */
static void sweep_quant(const kern_table *t, const char *name, float k_scale)
{
    float row[ROW];
    uint8_t out[ROW];
    const int64_t slot = 0;
    kvio_stats stats = {0};
    kv_write_args a = {.n_tok = 1,
                       .latent = row,
                       .rope = row + KVS_LATENT_DIM,
                       .latent_stride = ROW,
                       .rope_stride = ROW,
                       .in_type = KVS_DTYPE_F32,
                       .slot = &slot,
                       .kv = out,
                       .fmt = KVS_KV_FP8,
                       .page_stride = 64 * ROW,
                       .row_stride = ROW,
                       .n_slot = 1,
                       .k_scale = k_scale,
                       .stats = &stats};
    uint64_t n_nan = 0;
    uint64_t n_sat = 0;
    int32_t n = 0;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 3001) {
        /* every 16th value is put next to a border of rounding: the middle between two codes */
        uint32_t bits = (uint32_t)u;
        if (u % 16 == 0) {
            bits = (bits & 0xFFF00000u) + 0x80000u + (uint32_t)(u >> 4) % 3 - 1;
        }
        row[n++] = f32_from_bits(bits);
        if (n < ROW) {
            continue;
        }
        n = 0;
        t->kv_write(&a, NULL);
        for (int32_t i = 0; i < ROW; i++) {
            n_nan += (uint64_t)f32_is_nan(row[i]);
            n_sat += (uint64_t)e4m3_saturates(row[i] / k_scale);
            if (out[i] != e4m3_quant(row[i], k_scale)) {
                fail_msg("%s: e4m3(%a / %a) is 0x%02x, want 0x%02x", name, (double)row[i],
                         (double)k_scale, out[i], e4m3_quant(row[i], k_scale));
            }
        }
    }
    assert_true(n_nan > 0 && (n_sat > 0 || k_scale > 1.0f));
    assert_int_equal(stats.n_nan, n_nan);
    assert_int_equal(stats.n_sat, n_sat);
}

static void test_sweep(void **state)
{
    (void)state;
    kern_table t;
    const char *name = NULL;
    for (g_variant = 0; (name = next_variant(&t, KERN_OP_kv_write)) != NULL;) {
        sweep_quant(&t, name, 1.0f);
        sweep_quant(&t, name, 0.0625f);
        sweep_quant(&t, name, 0.37f);
        sweep_quant(&t, name, 0x1p-126f);
        sweep_quant(&t, name, 0x1p127f);
    }
}

/* Every bf16, 576 neighbours at a time; shuffled, so that a row holds all magnitudes; the same without the
 * large ones, so that the largest of a row is just below or just above what saturates. */
static void sweep_words(const kern_table *t, const char *name, float k_scale)
{
    enum { N_WORD = 1 << 16 };
    bf16 row[ROW];
    uint8_t out[ROW];
    const int64_t slot = 0;
    kvio_stats stats = {0};
    kv_write_args a = {.n_tok = 1,
                       .latent = row,
                       .rope = row + KVS_LATENT_DIM,
                       .latent_stride = ROW,
                       .rope_stride = ROW,
                       .in_type = KVS_DTYPE_BF16,
                       .slot = &slot,
                       .kv = out,
                       .fmt = KVS_KV_FP8,
                       .page_stride = 64 * ROW,
                       .row_stride = ROW,
                       .n_slot = 1,
                       .k_scale = k_scale,
                       .stats = &stats};
    uint64_t n_nan = 0;
    uint64_t n_sat = 0;
    for (int32_t from = 0; from < 4 * N_WORD; from += ROW) {
        const float most = (from < 3 * N_WORD ? E4M3_SAT : E4M3_SAT + 2.0f) * k_scale;
        for (int32_t i = 0; i < ROW; i++) {
            const uint32_t u = (uint32_t)(from + i);
            row[i].bits = (uint16_t)(u < N_WORD ? u : u * 40503u);
            if (u >= 2 * N_WORD && !(fabsf(bf16_to_f32(row[i])) <= most)) {
                row[i].bits = (uint16_t)(f32_bits(most) >> 16);
            }
        }
        t->kv_write(&a, NULL);
        for (int32_t i = 0; i < ROW; i++) {
            const float x = bf16_to_f32(row[i]);
            n_nan += (uint64_t)f32_is_nan(x);
            n_sat += (uint64_t)e4m3_saturates(x / k_scale);
            if (out[i] != e4m3_quant(x, k_scale)) {
                fail_msg("%s: e4m3(bf16 0x%04x / %a) is 0x%02x, want 0x%02x", name, row[i].bits,
                         (double)k_scale, out[i], e4m3_quant(x, k_scale));
            }
        }
    }
    assert_true(n_nan > 0);
    assert_int_equal(stats.n_nan, n_nan);
    assert_int_equal(stats.n_sat, n_sat);
}

static void test_sweep_words(void **state)
{
    (void)state;
    static const float scale[] = {1.0f,    0.0625f,  0x1p-20f, 0x1p-30f, 0x1p20f, 0x1p-100f,
                                  0x1p100f, 0x1p-101f, 0x1p101f, 0x1p-126f, 0.37f};
    kern_table t;
    const char *name = NULL;
    for (g_variant = 0; (name = next_variant(&t, KERN_OP_kv_write)) != NULL;) {
        for (size_t i = 0; i < UNIT_COUNT(scale); i++) {
            sweep_words(&t, name, scale[i]);
        }
    }
}

/* n values of which the largest magnitude is `most`, the others down to 2^-24 of it. */
static void make_tile(rng *r, float most, int32_t n, float *f, bf16 *h)
{
    const int32_t at = (int32_t)rng_next_below(r, (uint64_t)n);
    for (int32_t i = 0; i < n; i++) {
        const float x = i == at ? most : ldexpf(most, -(int)rng_next_below(r, 25));
        f[i] = rng_next(r) % 2 ? x : -x;
        h[i].bits = (uint16_t)(f32_bits(f[i]) >> 16);
    }
}

/* Scales of tiles whose largest value lies where the scale changes: 1.75 times any power of two and its
 * neighbours, in f32 and in bf16. */
static void test_scales(void **state)
{
    (void)state;
    static const uint32_t mantissa[] = {0,        1,        0x5F0000, 0x5FFFFF, 0x600000,
                                        0x600001, 0x610000, 0x7F0000, 0x7FFFFF};
    rng r = rng_init(11, 0);
    for (uint32_t e = 0; e < 255; e++) {
        float f[ROW];
        bf16 h[ROW];
        for (int32_t i = 0; i + 1 < (int32_t)UNIT_COUNT(mantissa); i += 4) {
            for (int32_t k = 0; k < KV_DS_N_TILE; k++) {
                const uint32_t m = mantissa[(i + k) % (int32_t)UNIT_COUNT(mantissa)];
                make_tile(&r, f32_from_bits(e << 23 | m), KV_DS_TILE, f + k * KV_DS_TILE,
                          h + k * KV_DS_TILE);
            }
            make_tile(&r, 3.0f, KVS_ROPE_DIM, f + KVS_LATENT_DIM, h + KVS_LATENT_DIM);
            kern_table t;
            const char *name = NULL;
            for (g_variant = 0; (name = next_variant(&t, KERN_OP_kv_write)) != NULL;) {
                for (int32_t type = KVS_DTYPE_F32; type <= KVS_DTYPE_BF16; type++) {
                    const void *x = type == KVS_DTYPE_F32 ? (const void *)f : (const void *)h;
                    const void *y = type == KVS_DTYPE_F32 ? (const void *)(f + KVS_LATENT_DIM)
                                                          : (const void *)(h + KVS_LATENT_DIM);
                    const kv_writer w = {KVS_KV_FP8_DS_MLA, KVS_SCALE_POW2, 1.0f, type};
                    uint8_t got[KV_ROW_BYTES_FP8_DS_MLA];
                    uint8_t want[KV_ROW_BYTES_FP8_DS_MLA];
                    const int64_t slot = 0;
                    const kv_write_args a = {.n_tok = 1,
                                             .latent = x,
                                             .rope = y,
                                             .latent_stride = KVS_LATENT_DIM,
                                             .rope_stride = KVS_ROPE_DIM,
                                             .in_type = type,
                                             .slot = &slot,
                                             .kv = got,
                                             .fmt = w.fmt,
                                             .page_stride = 64 * KV_ROW_BYTES_FP8_DS_MLA,
                                             .row_stride = KV_ROW_BYTES_FP8_DS_MLA,
                                             .n_slot = 1,
                                             .rule = w.rule};
                    t.kv_write(&a, NULL);
                    kv_row_write(&w, want, x, y, NULL);
                    if (memcmp(got, want, sizeof got) != 0) {
                        fail_msg("%s: row of type %d, exponent %u", name, type, e);
                    }
                }
            }
            for (g_variant = 0; (name = next_variant(&t, KERN_OP_index_write)) != NULL;) {
                for (int32_t type = KVS_DTYPE_F32; type <= KVS_DTYPE_BF16; type++) {
                    static uint8_t page[2][INDEX_PAGE_BYTES_FP8];
                    const int64_t slot[4] = {5, 63, 0, 6};
                    const index_write_args a = {.n_tok = 4,
                                                .key = type == KVS_DTYPE_F32 ? (const void *)f
                                                                             : (const void *)h,
                                                .key_stride = KVS_INDEX_DIM,
                                                .in_type = type,
                                                .slot = slot,
                                                .keys = page[0],
                                                .fmt = KVS_INDEX_FP8,
                                                .page_stride = INDEX_PAGE_BYTES_FP8,
                                                .n_slot = 64};
                    t.index_write(&a, NULL);
                    for (int32_t k = 0; k < 4; k++) {
                        const size_t size = type == KVS_DTYPE_F32 ? sizeof *f : sizeof *h;
                        index_key_write(KVS_INDEX_FP8, type, page[1], (int32_t)slot[k],
                                        (const uint8_t *)a.key + (size_t)k * KVS_INDEX_DIM * size,
                                        NULL);
                    }
                    if (memcmp(page[0], page[1], sizeof page[0]) != 0) {
                        fail_msg("%s: keys of type %d, exponent %u", name, type, e);
                    }
                }
            }
        }
    }
}

/* All codes, several times in a row, times all kinds of scales. */
static void sweep_codes(const kern_table *t, const char *name, float s, int32_t out_type)
{
    uint8_t row[ROW];
    float f32[ROW];
    bf16 half[ROW];
    const int32_t table = 0;
    const int64_t start = 0;
    const int64_t one = 1;
    gather_args a = {.n_req = 1,
                     .table = &table,
                     .table_stride = 1,
                     .table_width = 1,
                     .start = &start,
                     .count = &one,
                     .out_begin = &start,
                     .kv = row,
                     .fmt = KVS_KV_FP8,
                     .page_stride = 64 * ROW,
                     .row_stride = ROW,
                     .n_slot = 64,
                     .k_scale = s,
                     .out = out_type == KVS_DTYPE_BF16 ? (void *)half : (void *)f32,
                     .out_type = out_type,
                     .out_stride = ROW};
    for (int with_nan = 0; with_nan < 2; with_nan++) {
        for (int32_t i = 0; i < ROW; i++) {
            row[i] = (uint8_t)(i * 37);
            row[i] = !with_nan && (row[i] & 0x7F) == 0x7F ? 0 : row[i];
        }
        t->gather(&a, NULL);
        for (int32_t i = 0; i < ROW; i++) {
            const float want = e4m3_dequant(row[i], s);
            const bf16 want_half = bf16_from_f32(want);
            const int same = out_type == KVS_DTYPE_BF16
                                 ? memcmp(&half[i], &want_half, sizeof(bf16)) == 0
                                 : memcmp(&f32[i], &want, sizeof(float)) == 0;
            if (!same) {
                fail_msg("%s: code 0x%02x times %a as type %d", name, row[i], (double)s, out_type);
            }
        }
    }
}

static void test_codes(void **state)
{
    (void)state;
    static const float scale[] = {1.0f,      0.5f,     0x1p-22f, 0x1p-110f, 0x1p-120f, 0x1p-149f, 0x1p100f,
                                  0x1p119f,  0x1p120f, 0x1p127f, 0.1f,      3.3e-5f,   1.7e38f,   1.2e-38f,
                                  1.0e-41f, 0x1.fffffep-1f, 0x1.008p0f, 0x1.018p3f};
    kern_table t;
    const char *name = NULL;
    for (g_variant = 0; (name = next_variant(&t, KERN_OP_gather)) != NULL;) {
        for (size_t i = 0; i < UNIT_COUNT(scale); i++) {
            sweep_codes(&t, name, scale[i], KVS_DTYPE_BF16);
            sweep_codes(&t, name, scale[i], KVS_DTYPE_F32);
        }
    }
}

/* n values of one of several kinds per token: small, large, with special values. */
static void make_values(float *x, int64_t n, uint64_t seed)
{
    rng r = rng_init(seed, 3);
    for (int64_t i = 0; i < n; i++) {
        const int kind = (int)(i / 128 % 7);
        const double size = kind == 0 ? 1.0 : kind == 1 ? 1e-7 : kind == 2 ? 3e4 : 20.0;
        x[i] = (float)(rng_next_normal(&r) * size);
        if (kind == 4 && rng_next(&r) % 16 == 0) {
            x[i] = rng_next(&r) % 2 ? INFINITY : -INFINITY;
        }
        if (kind == 5 && rng_next(&r) % 32 == 0) {
            x[i] = f32_from_bits(0x7F800001u | (uint32_t)(rng_next(&r) % 2) << 31 |
                                 (uint32_t)(rng_next(&r) % 100) << 14);
        }
        if (kind == 6) {
            x[i] = rng_next(&r) % 4 ? -0.0f : 0x1p-149f;
        }
    }
}

static void to_bf16(const float *x, int64_t n, bf16 *out)
{
    for (int64_t i = 0; i < n; i++) {
        out[i].bits = (uint16_t)(f32_bits(x[i]) >> 16); /* signalling NaN stay */
        if (f32_is_nan(x[i]) && (out[i].bits & 0x7F) == 0) {
            out[i].bits |= 1;
        }
    }
}

static void make_slots(int64_t *slot, uint64_t seed)
{
    rng r = rng_init(seed, 4);
    for (int64_t i = 0; i < N_TOK; i++) {
        slot[i] = (i * 7 + (int64_t)(seed % 5)) % N_SLOT; /* distinct */
        const uint64_t d = rng_next(&r) % 10;
        slot[i] = d == 0 ? -1 : d == 1 ? N_SLOT + i : d == 2 ? -2 - i : slot[i];
    }
}

static void expect_stats(const char *name, kvio_stats a, kvio_stats b)
{
    if (memcmp(&a, &b, sizeof a) != 0) {
        fail_msg("%s: written %llu bad %llu nan %llu sat %llu, want %llu %llu %llu %llu", name,
                 (unsigned long long)a.n_written, (unsigned long long)a.n_bad_id,
                 (unsigned long long)a.n_nan, (unsigned long long)a.n_sat,
                 (unsigned long long)b.n_written, (unsigned long long)b.n_bad_id,
                 (unsigned long long)b.n_nan, (unsigned long long)b.n_sat);
    }
}

/* One format: written by the variant and by the reference, then gathered by both. */
static void one_format(const char *name, const kern_table *t, const kern_table *ref, dev_queue *q,
                       int32_t fmt, int32_t in_type, int32_t rule, float k_scale)
{
    enum { LATENT_STRIDE = KVS_LATENT_DIM + 8, ROPE_STRIDE = KVS_ROPE_DIM + 4 };
    const int64_t row_stride = kv_row_bytes(fmt);
    const int64_t page_stride = row_stride * KVS_PAGE_TOKENS + 128;
    const size_t bytes = (size_t)(3 * page_stride);
    static float x[N_TOK * LATENT_STRIDE];
    static float y[N_TOK * ROPE_STRIDE];
    static bf16 xh[N_TOK * LATENT_STRIDE];
    static bf16 yh[N_TOK * ROPE_STRIDE];
    int64_t slot[N_TOK];
    make_values(x, N_TOK * LATENT_STRIDE, (uint64_t)fmt);
    make_values(y, N_TOK * ROPE_STRIDE, 77);
    to_bf16(x, N_TOK * LATENT_STRIDE, xh);
    to_bf16(y, N_TOK * ROPE_STRIDE, yh);
    make_slots(slot, (uint64_t)(fmt * 3 + rule));
    uint8_t *got = malloc(bytes);
    uint8_t *want = malloc(bytes);
    memset(got, 0xA5, bytes);
    memset(want, 0xA5, bytes);
    kvio_stats got_stats = {.n_written = 1, .n_sat = 2};
    kvio_stats want_stats = got_stats;
    const int half = in_type == KVS_DTYPE_BF16;
    kv_write_args a = {.n_tok = N_TOK,
                       .latent = half ? (const void *)xh : (const void *)x,
                       .rope = half ? (const void *)yh : (const void *)y,
                       .latent_stride = LATENT_STRIDE,
                       .rope_stride = ROPE_STRIDE,
                       .in_type = in_type,
                       .slot = slot,
                       .kv = got,
                       .fmt = fmt,
                       .page_stride = page_stride,
                       .row_stride = row_stride,
                       .n_slot = N_SLOT,
                       .rule = rule,
                       .k_scale = k_scale,
                       .stats = &got_stats};
    t->kv_write(&a, q);
    a.kv = want;
    a.stats = &want_stats;
    ref->kv_write(&a, q);
    for (size_t i = 0; i < bytes; i++) {
        if (got[i] != want[i]) {
            fail_msg("%s fmt %d in %d rule %d: byte %zu of page %zu is 0x%02x, want 0x%02x", name, fmt,
                     in_type, rule, i % (size_t)page_stride, i / (size_t)page_stride, got[i], want[i]);
        }
    }
    expect_stats(name, got_stats, want_stats);
    /* two requests, one of them reaching past the table, in pages out of order */
    static const int32_t table[2 * 3] = {2, 0, 1, 1, -1, 3};
    static const int64_t start[3] = {3, 50, 7};
    static const int64_t count[3] = {130, 150, 0};
    static const int64_t out_begin[3] = {0, 140, 290};
    enum { OUT_ROWS = 292, OUT_STRIDE = ROW + 6 };
    for (int32_t type = KVS_DTYPE_F32; type <= KVS_DTYPE_BF16; type++) {
        static float out[2][OUT_ROWS * OUT_STRIDE];
        uint64_t n_bad[2] = {0, 0};
        memset(out, 0x5A, sizeof out);
        for (int i = 0; i < 2; i++) {
            gather_args g = {.n_req = 2,
                             .table = table,
                             .table_stride = 3,
                             .table_width = 3,
                             .start = start,
                             .count = count,
                             .out_begin = out_begin,
                             .kv = want,
                             .fmt = fmt,
                             .page_stride = page_stride,
                             .row_stride = row_stride,
                             .n_slot = N_SLOT,
                             .k_scale = k_scale,
                             .out = out[i],
                             .out_type = type,
                             .out_stride = OUT_STRIDE,
                             .n_bad_id = &n_bad[i]};
            (i == 0 ? t : ref)->gather(&g, q);
        }
        assert_memory_equal(out[0], out[1], sizeof out[0]);
        assert_int_equal(n_bad[0], n_bad[1]);
        assert_true(n_bad[1] > 0);
    }
    free(got);
    free(want);
}

static void test_rows(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    kern_table t;
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    const char *name = NULL;
    for (int32_t i = 0; (name = table_nth(&t, KERN_OP_kv_write, i)) != NULL; i++) {
        kern_table g;
        assert_non_null(table_nth(&g, KERN_OP_gather, i));
        t.gather = g.gather;
        dev_queue q;
        dev_queue_init(&q, i % 2 ? p : NULL);
        for (int32_t type = KVS_DTYPE_F32; type <= KVS_DTYPE_BF16; type++) {
            one_format(name, &t, &ref, &q, KVS_KV_F32, type, KVS_SCALE_POW2, 1.0f);
            one_format(name, &t, &ref, &q, KVS_KV_BF16, type, KVS_SCALE_POW2, 1.0f);
            one_format(name, &t, &ref, &q, KVS_KV_FP8, type, KVS_SCALE_POW2, 0.25f);
            one_format(name, &t, &ref, &q, KVS_KV_FP8, type, KVS_SCALE_POW2, 0.3f);
            one_format(name, &t, &ref, &q, KVS_KV_FP8_DS_MLA, type, KVS_SCALE_POW2, 1.0f);
            one_format(name, &t, &ref, &q, KVS_KV_FP8_DS_MLA, type, KVS_SCALE_AUTO, 1.0f);
            one_format(name, &t, &ref, &q, KVS_KV_FP8_DS_MLA, type, KVS_SCALE_EXACT, 1.0f);
        }
    }
    pool_close(p);
}

static void test_index_keys(void **state)
{
    (void)state;
    enum { STRIDE = KVS_INDEX_DIM + 3 };
    static float x[N_TOK * STRIDE];
    static bf16 xh[N_TOK * STRIDE];
    make_values(x, N_TOK * STRIDE, 5);
    to_bf16(x, N_TOK * STRIDE, xh);
    int64_t slot[N_TOK];
    make_slots(slot, 8);
    kern_table t;
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    const char *name = NULL;
    for (g_variant = 0; (name = next_variant(&t, KERN_OP_index_write)) != NULL;) {
        for (int32_t c = 0; c < 4; c++) {
            const int32_t fmt = c / 2 ? KVS_INDEX_F32 : KVS_INDEX_FP8;
            const int64_t page_stride = index_page_bytes(fmt) + 192;
            const size_t bytes = (size_t)(3 * page_stride);
            uint8_t *pages[2] = {malloc(bytes), malloc(bytes)};
            kvio_stats stats[2] = {{0}, {0}};
            for (int i = 0; i < 2; i++) {
                memset(pages[i], 0xA5, bytes);
                const index_write_args a = {.n_tok = N_TOK,
                                            .key = c % 2 ? (const void *)xh : (const void *)x,
                                            .key_stride = STRIDE,
                                            .in_type = c % 2 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32,
                                            .slot = slot,
                                            .keys = pages[i],
                                            .fmt = fmt,
                                            .page_stride = page_stride,
                                            .n_slot = N_SLOT,
                                            .stats = &stats[i]};
                (i == 0 ? &t : &ref)->index_write(&a, NULL);
            }
            assert_memory_equal(pages[0], pages[1], bytes);
            expect_stats(name, stats[0], stats[1]);
            free(pages[0]);
            free(pages[1]);
        }
    }
}

/* ---- calls that write much ------------------------------------------------------------------------ */

enum { LONG_BYTES = 300 * 1024 }; /* more than what a writer leaves in the caches */

/* n distinct slots below n_slot, which is at least 2 n: runs of all lengths with a hole between, neighbours
 * turned round, -1 and slots outside among them. */
static void make_runs(int64_t *slot, int64_t n, int64_t n_slot, uint64_t seed)
{
    rng r = rng_init(seed, 5);
    int64_t at = n_slot - 3;
    int64_t left = 0;
    for (int64_t i = 0; i < n; i++) {
        if (left-- == 0) {
            left = (int64_t)rng_next_below(&r, i % 3 == 0 ? 100 : 4);
            at++;
        }
        slot[i] = at++ % n_slot;
        const uint64_t d = rng_next_below(&r, 40);
        slot[i] = d == 0 ? -1 : d == 1 ? n_slot + i : d == 2 ? -2 - i : slot[i];
        if (d == 3 && i > 0) {
            const int64_t before = slot[i - 1];
            slot[i - 1] = slot[i];
            slot[i] = before;
        }
    }
}

typedef struct long_call {
    int32_t fmt, in_type, rule;
    float k_scale;
    int64_t pad_row, pad_page; /* bytes behind every row and page    */
    int64_t shift;             /* of the first page from a cache line */
} long_call;

/* A pool of the variant and one of the reference, alike to every byte, also where nothing is written. */
static void one_long_call(const char *name, const kern_table *t, const kern_table *ref, dev_queue *q,
                          int is_index, const long_call *c)
{
    const int64_t row = is_index ? index_key_bytes(c->fmt) : kv_row_bytes(c->fmt) + c->pad_row;
    const int64_t page = (is_index ? index_page_bytes(c->fmt) : 64 * row) + c->pad_page;
    const int64_t n = LONG_BYTES / row + 1;
    int64_t n_slot = 64;
    while (n_slot < 2 * n) {
        n_slot *= 2;
    }
    const int64_t width = is_index ? KVS_INDEX_DIM : ROW;
    float *f = malloc((size_t)(n * width) * sizeof *f);
    bf16 *h = malloc((size_t)(n * width) * sizeof *h);
    int64_t *slot = malloc((size_t)n * sizeof *slot);
    make_values(f, n * width, (uint64_t)(c->fmt + 50));
    to_bf16(f, n * width, h);
    make_runs(slot, n, n_slot, (uint64_t)(c->shift + c->fmt));
    const size_t bytes = (size_t)(n_slot / 64 * page + 128);
    uint8_t *mem[2];
    kvio_stats stats[2] = {{0}, {0}};
    for (int i = 0; i < 2; i++) {
        mem[i] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        memset(mem[i], 0xA5, bytes);
        const void *x = c->in_type == KVS_DTYPE_BF16 ? (const void *)h : (const void *)f;
        const kern_table *of = i == 0 ? t : ref;
        if (is_index) {
            const index_write_args a = {.n_tok = n, .key = x, .key_stride = width, .in_type = c->in_type,
                                        .slot = slot, .keys = mem[i] + c->shift, .fmt = c->fmt,
                                        .page_stride = page, .n_slot = n_slot, .stats = &stats[i]};
            of->index_write(&a, q);
        } else {
            const size_t size = c->in_type == KVS_DTYPE_BF16 ? sizeof *h : sizeof *f;
            const kv_write_args a = {.n_tok = n, .latent = x,
                                     .rope = (const uint8_t *)x + KVS_LATENT_DIM * size,
                                     .latent_stride = width, .rope_stride = width,
                                     .in_type = c->in_type, .slot = slot, .kv = mem[i] + c->shift,
                                     .fmt = c->fmt, .page_stride = page, .row_stride = row,
                                     .n_slot = n_slot, .rule = c->rule, .k_scale = c->k_scale,
                                     .stats = &stats[i]};
            of->kv_write(&a, q);
        }
    }
    for (size_t i = 0; i < bytes; i++) {
        if (mem[0][i] != mem[1][i]) {
            fail_msg("%s %s fmt %d in %d shift %d: byte %zu is 0x%02x, want 0x%02x", name,
                     is_index ? "keys" : "rows", c->fmt, c->in_type, (int)c->shift, i, mem[0][i],
                     mem[1][i]);
        }
    }
    expect_stats(name, stats[0], stats[1]);
    assert_true(stats[0].n_written > 0 && stats[0].n_bad_id > 0 && stats[0].n_nan > 0);
    for (int i = 0; i < 2; i++) {
        free(mem[i]);
    }
    free(slot);
    free(h);
    free(f);
}

static void test_long_calls(void **state)
{
    (void)state;
    enum { F32 = KVS_DTYPE_F32, HALF = KVS_DTYPE_BF16, POW2 = KVS_SCALE_POW2 };
    static const long_call row[] = {
        {KVS_KV_FP8_DS_MLA, HALF, POW2, 1.0f, 0, 0, 0},   {KVS_KV_FP8_DS_MLA, F32, POW2, 1.0f, 0, 0, 48},
        {KVS_KV_FP8_DS_MLA, HALF, POW2, 1.0f, 48, 0, 16}, {KVS_KV_FP8_DS_MLA, HALF, POW2, 1.0f, 0, 8, 7},
        {KVS_KV_FP8, HALF, POW2, 0.25f, 0, 0, 0},         {KVS_KV_FP8, HALF, POW2, 0.3f, 0, 64, 32},
        {KVS_KV_FP8, HALF, POW2, 0.25f, 0, 0, 16},        {KVS_KV_FP8, HALF, POW2, 0.25f, 16, 0, 0},
        {KVS_KV_FP8, HALF, POW2, 0.25f, 0, 48, 0},        {KVS_KV_FP8, HALF, POW2, 0.3f, 0, 0, 0},
        {KVS_KV_BF16, HALF, POW2, 1.0f, 0, 0, 0},         {KVS_KV_BF16, F32, POW2, 1.0f, 0, 0, 61},
        {KVS_KV_F32, HALF, POW2, 1.0f, 0, 0, 4},          {KVS_KV_F32, F32, POW2, 1.0f, 0, 0, 0},
    };
    static const long_call key[] = {
        {KVS_INDEX_FP8, HALF, 0, 0.0f, 0, 0, 0},  {KVS_INDEX_FP8, F32, 0, 0.0f, 0, 64, 0},
        {KVS_INDEX_FP8, HALF, 0, 0.0f, 0, 0, 16}, {KVS_INDEX_FP8, HALF, 0, 0.0f, 0, 12, 0},
        {KVS_INDEX_F32, HALF, 0, 0.0f, 0, 0, 0},  {KVS_INDEX_F32, F32, 0, 0.0f, 0, 0, 4},
    };
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    kern_table t;
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    const char *name = NULL;
    for (int32_t v = 1; (name = table_nth(&t, KERN_OP_kv_write, v)) != NULL; v++) {
        dev_queue q;
        dev_queue_init(&q, v % 2 ? p : NULL);
        for (size_t i = 0; i < UNIT_COUNT(row); i++) {
            one_long_call(name, &t, &ref, &q, 0, &row[i]);
        }
    }
    for (int32_t v = 1; (name = table_nth(&t, KERN_OP_index_write, v)) != NULL; v++) {
        dev_queue q;
        dev_queue_init(&q, v % 2 ? p : NULL);
        for (size_t i = 0; i < UNIT_COUNT(key); i++) {
            one_long_call(name, &t, &ref, &q, 1, &key[i]);
        }
    }
    pool_close(p);
}

static void test_index_quant(void **state)
{
    (void)state;
    enum { N_ROW = 5, N_HEAD = 37, N = N_ROW * N_HEAD * KVS_INDEX_DIM };
    static float x[N];
    static bf16 xh[N];
    float w[N_ROW * N_HEAD];
    make_values(x, N, 6);
    to_bf16(x, N, xh);
    make_values(w, N_ROW * N_HEAD, 9);
    w[3] = NAN;
    kern_table t;
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    for (g_variant = 0; next_variant(&t, KERN_OP_index_quant) != NULL;) {
        for (int32_t c = 0; c < 4; c++) {
            static uint8_t q8[2][N];
            static float q_f32[2][N];
            float w_out[2][N_ROW * N_HEAD];
            uint64_t n_nan[2] = {0, 0};
            for (int i = 0; i < 2; i++) {
                const index_quant_args a = {.n_row = N_ROW,
                                            .n_head = N_HEAD,
                                            .q = c % 2 ? (const void *)xh : (const void *)x,
                                            .q_type = c % 2 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32,
                                            .w = w,
                                            .q8 = c / 2 ? NULL : q8[i],
                                            .q_f32 = c / 2 ? q_f32[i] : NULL,
                                            .w_out = w_out[i],
                                            .n_nan = &n_nan[i]};
                (i == 0 ? &t : &ref)->index_quant(&a, NULL);
            }
            assert_memory_equal(q8[0], q8[1], N);
            assert_memory_equal(q_f32[0], q_f32[1], N * sizeof(float));
            assert_memory_equal(w_out[0], w_out[1], sizeof w_out[0]);
            assert_int_equal(n_nan[0], n_nan[1]);
            assert_true(n_nan[0] > 1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sweep),      cmocka_unit_test(test_codes),
        cmocka_unit_test(test_rows),       cmocka_unit_test(test_index_keys),
        cmocka_unit_test(test_index_quant), cmocka_unit_test(test_sweep_words),
        cmocka_unit_test(test_scales),     cmocka_unit_test(test_long_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
