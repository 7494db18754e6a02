/* Rows and index keys byte by byte at their published offsets, against a quantiser written from
 * oracle.h; formats, tags and names. */
#include "unit/unit.h"

#include <float.h>

#include "base/rng.h"
#include "num/kvfmt.h"
#include "oracle.h"

enum { ROW = 576, LATENT = 512, ROPE = 64, RED = 32, SEED = 7 };

static const int32_t kv_formats[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA};
static const int64_t kv_bytes[] = {2304, 1152, 576, 656};

/* One token as a writer gets it, in both types, and as f32 what each type holds. */
typedef struct token {
    float f32[ROW];
    uint16_t bf16[ROW];
} token;

/* ---- the layouts told again ------------------------------------------------------------------ */

static float token_value(const token *t, int32_t type, int i)
{
    return type == KVS_DTYPE_F32 ? t->f32[i] : f32_from_bits((uint32_t)t->bf16[i] << 16);
}

static const void *token_at(const token *t, int32_t type, int i)
{
    return type == KVS_DTYPE_F32 ? (const void *)&t->f32[i] : (const void *)&t->bf16[i];
}

static int want_e4m3(float x, float s)
{
    if (isnan(x)) {
        return signbit(x) ? 0xFF : 0x7F;
    }
    return oracle_e4m3_nearest((double)(float)((double)x / (double)s));
}

static int want_bf16(const token *t, int32_t type, int i)
{
    if (type == KVS_DTYPE_BF16) {
        return t->bf16[i];
    }
    const uint32_t bits = f32_bits(t->f32[i]);
    return isnan(t->f32[i]) ? (int)(bits >> 16) | 0x40 : oracle_bf16_nearest((double)t->f32[i]);
}

static double want_amax(const token *t, int32_t type, int first, int n)
{
    double amax = 0;
    for (int i = first; i < first + n; i++) {
        const double a = fabs((double)token_value(t, type, i));
        amax = isfinite(a) && a > amax ? a : amax;
    }
    return amax;
}

static void want_f32(uint8_t *at, uint32_t bits)
{
    for (int b = 0; b < 4; b++) {
        at[b] = (uint8_t)(bits >> (8 * b));
    }
}

static void want_row(uint8_t *row, const kv_writer *w, const token *t)
{
    for (int i = 0; i < ROW; i++) {
        const float x = token_value(t, w->in_type, i);
        const int b16 = want_bf16(t, w->in_type, i);
        switch (w->fmt) {
        case KVS_KV_F32:
            want_f32(row + 4 * i, f32_bits(x));
            break;
        case KVS_KV_BF16:
            row[2 * i] = (uint8_t)b16;
            row[2 * i + 1] = (uint8_t)(b16 >> 8);
            break;
        case KVS_KV_FP8:
            row[i] = (uint8_t)want_e4m3(x, w->k_scale);
            break;
        default:
            if (i < LATENT) {
                const int tile = i / 128;
                const float s = oracle_scale(w->rule == KVS_SCALE_EXACT, 0,
                                             want_amax(t, w->in_type, tile * 128, 128));
                row[i] = (uint8_t)want_e4m3(x, s);
                want_f32(row + 512 + 4 * tile, f32_bits(s));
            } else {
                row[528 + 2 * (i - LATENT)] = (uint8_t)b16;
                row[528 + 2 * (i - LATENT) + 1] = (uint8_t)(b16 >> 8);
            }
            break;
        }
    }
}

static uint32_t get_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The value attention reads from byte code q under scale s. */
static uint32_t want_dequant(int q, float s)
{
    if ((q & 0x7F) == 0x7F) {
        return (q & 0x80) != 0 ? 0xFFC00000 : 0x7FC00000;
    }
    return (uint32_t)oracle_bf16_nearest((double)(float)(oracle_e4m3_value(q) * (double)s)) << 16;
}

static uint32_t want_read(int32_t fmt, float k_scale, const uint8_t *row, int i)
{
    switch (fmt) {
    case KVS_KV_F32:
        return get_u32(row + 4 * i);
    case KVS_KV_BF16:
        return (uint32_t)row[2 * i] << 16 | (uint32_t)row[2 * i + 1] << 24;
    case KVS_KV_FP8:
        return want_dequant(row[i], k_scale);
    default:
        if (i >= LATENT) {
            const uint8_t *at = row + 528 + 2 * (i - LATENT);
            return (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
        }
        return want_dequant(row[i], f32_from_bits(get_u32(row + 512 + 4 * (i / 128))));
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void token_from_f32(token *t)
{
    for (int i = 0; i < ROW; i++) {
        const float x = t->f32[i];
        t->bf16[i] = isnan(x) ? (uint16_t)(f32_bits(x) >> 16 | 0x40)
                              : (uint16_t)oracle_bf16_nearest((double)x);
    }
}

static void token_random(token *t, uint64_t stream)
{
    rng r = rng_init(SEED, stream);
    for (int tile = 0; tile < 5; tile++) {
        const int e = (int)rng_next_range(&r, -20, 20);
        const int n = tile < 4 ? 128 : 64;
        for (int i = 0; i < n; i++) {
            const int spread = (int)rng_next_range(&r, -12, 0);
            t->f32[tile * 128 + i] = (float)ldexp(rng_next_normal(&r), e + spread);
        }
    }
    token_from_f32(t);
}

/* Writes at an odd address between red zones, compares every byte, reads back. */
static void check_row(const kv_writer *w, const token *t)
{
    uint8_t got[RED + 2304 + RED];
    uint8_t want[sizeof got];
    memset(got, 0xA7, sizeof got);
    memset(want, 0xA7, sizeof want);
    kv_row_write(w, got + RED + 1, token_at(t, w->in_type, 0), token_at(t, w->in_type, LATENT),
                 NULL);
    want_row(want + RED + 1, w, t);
    for (size_t i = 0; i < sizeof got; i++) {
        if (got[i] != want[i]) {
            fail_msg("format %s rule %s type %d byte %d: 0x%02x, want 0x%02x", kv_fmt_name(w->fmt),
                     scale_rule_name(w->rule), w->in_type, (int)i - RED - 1, got[i], want[i]);
        }
    }
    float out[ROW + 2];
    out[0] = out[ROW + 1] = 77.0f;
    kv_row_read(w->fmt, w->k_scale, got + RED + 1, out + 1);
    assert_true(out[0] == 77.0f && out[ROW + 1] == 77.0f);
    for (int i = 0; i < ROW; i++) {
        assert_int_equal(f32_bits(out[1 + i]), want_read(w->fmt, w->k_scale, want + RED + 1, i));
    }
}

static void check_all_rows(const token *t)
{
    static const float k_scales[] = {1.0f, 0.06f, 0.5f, 3.0f};
    for (size_t f = 0; f < UNIT_COUNT(kv_formats); f++) {
        for (int32_t type = KVS_DTYPE_F32; type <= KVS_DTYPE_BF16; type++) {
            for (int32_t rule = KVS_SCALE_AUTO; rule <= KVS_SCALE_EXACT; rule++) {
                const kv_writer w = {kv_formats[f], rule, k_scales[rule], type};
                check_row(&w, t);
            }
        }
    }
}

static void random_rows(void **state)
{
    (void)state;
    token t;
    for (uint64_t stream = 0; stream < 20; stream++) {
        token_random(&t, stream);
        check_all_rows(&t);
    }
}

static void fill(token *t, float x)
{
    for (int i = 0; i < ROW; i++) {
        t->f32[i] = x;
    }
    token_from_f32(t);
}

/* Rows of zeros, of -0.0, with one denormal, with some or nothing but NaN or infinity. */
static void odd_rows(void **state)
{
    (void)state;
    const float inf = (float)INFINITY;
    token t;
    fill(&t, 0.0f);
    check_all_rows(&t);
    fill(&t, -0.0f);
    check_all_rows(&t);
    fill(&t, 0.0f);
    t.f32[130] = FLT_TRUE_MIN;
    t.f32[LATENT] = -FLT_TRUE_MIN;
    token_from_f32(&t);
    check_all_rows(&t);
    token_random(&t, 100);
    t.f32[0] = inf;
    t.f32[127] = -inf;
    t.f32[128] = (float)NAN;
    t.f32[255] = -(float)NAN;
    t.f32[256] = f32_from_bits(0x7F800001);
    t.f32[LATENT] = inf;
    t.f32[ROW - 1] = f32_from_bits(0xFFC12345);
    token_from_f32(&t);
    t.bf16[300] = 0x7F81; /* a signalling NaN is copied bit for bit */
    t.bf16[ROW - 2] = 0xFF82;
    check_all_rows(&t);
    fill(&t, (float)NAN);
    check_all_rows(&t);
    fill(&t, -inf);
    check_all_rows(&t);
    fill(&t, FLT_MAX);
    check_all_rows(&t);
}

/* The largest value counts wherever in its tile it stands. */
static void amax_reaches_every_place(void **state)
{
    (void)state;
    for (int at = 0; at < LATENT; at++) {
        token t;
        fill(&t, 1.0f);
        t.f32[at] = at % 2 == 0 ? 60000.0f : -60000.0f;
        token_from_f32(&t);
        const kv_writer w = {KVS_KV_FP8_DS_MLA, 1 + at % 2, 1.0f, 1 + at / 2 % 2};
        check_row(&w, &t);
        uint8_t page[8448];
        index_key_write(KVS_INDEX_FP8, KVS_DTYPE_F32, page, 3, t.f32, NULL);
        const float s = at < 128 ? 0x1p8f : 0x1p-8f; /* 60000 / 448 = 133.9, 1 / 448 */
        assert_int_equal(get_u32(page + 8192 + 12), f32_bits(s));
    }
}

/* Scales are finite and zeros come back as zeros of their sign. */
static void zero_tiles_read_back_as_zero(void **state)
{
    (void)state;
    for (int32_t rule = KVS_SCALE_POW2; rule <= KVS_SCALE_EXACT; rule++) {
        for (int sign = 0; sign < 2; sign++) {
            token t;
            fill(&t, sign ? -0.0f : 0.0f);
            const kv_writer w = {KVS_KV_FP8_DS_MLA, rule, 1.0f, KVS_DTYPE_F32};
            kv_row_fp8_ds_mla row;
            kv_row_write(&w, (uint8_t *)&row, t.f32, t.f32 + LATENT, NULL);
            float out[ROW];
            kv_row_read(w.fmt, 1.0f, (const uint8_t *)&row, out);
            for (int i = 0; i < ROW; i++) {
                assert_int_equal(f32_bits(out[i]), sign ? 0x80000000 : 0);
            }
            assert_true(row.scale[3] == (rule == KVS_SCALE_POW2 ? 0x1p-13f : FLT_MIN));
        }
    }
}

/* A value read is within half an e4m3 step of the stored scale of what was written; with an exact
 * scale the rounding of the product to bf16 comes on top. */
static void error_is_half_a_step(void **state)
{
    (void)state;
    static const float amaxes[] = {1e-30f, 1e-3f, 3.7f, 448.0f, 60000.0f, 0.05f, 1.0f, 1e30f};
    for (size_t a = 0; a < UNIT_COUNT(amaxes); a++) {
        for (int32_t rule = KVS_SCALE_POW2; rule <= KVS_SCALE_EXACT; rule++) {
            token t;
            rng r = rng_init(SEED, 1000 + a);
            for (int i = 0; i < ROW; i++) {
                const double u = rng_next_uniform(&r) * 2 - 1;
                t.f32[i] = (float)(u * u * u * (double)amaxes[a]);
            }
            t.f32[200] = -amaxes[a];
            const kv_writer w = {KVS_KV_FP8_DS_MLA, rule, 1.0f, KVS_DTYPE_F32};
            kv_row_fp8_ds_mla row;
            kv_row_write(&w, (uint8_t *)&row, t.f32, t.f32 + LATENT, NULL);
            float out[ROW];
            kv_row_read(w.fmt, 1.0f, (const uint8_t *)&row, out);
            for (int i = 0; i < LATENT; i++) {
                const double s = (double)row.scale[i / 128];
                int e = 0;
                assert_true(rule != KVS_SCALE_POW2 || frexp(s, &e) == 0.5);
                const double half = oracle_e4m3_step(row.latent[i] & 0x7F) * s / 2;
                const double extra = rule == KVS_SCALE_POW2 ? 0 : fabs((double)out[i]) / 256;
                assert_true(fabs((double)out[i] - (double)t.f32[i]) <= half + extra);
            }
        }
    }
}

static void writers_count_what_they_meet(void **state)
{
    (void)state;
    token t;
    fill(&t, 1.0f);
    t.f32[3] = (float)INFINITY;
    t.f32[4] = -(float)INFINITY;
    t.f32[5] = (float)NAN;
    t.f32[LATENT + 1] = (float)NAN;
    t.f32[LATENT + 2] = 500.0f;
    t.f32[300] = 464.0f; /* rounds to 448: no loss beyond rounding */
    t.f32[301] = 465.0f;
    token_from_f32(&t);
    for (size_t f = 0; f < UNIT_COUNT(kv_formats); f++) {
        const kv_writer w = {kv_formats[f], KVS_SCALE_POW2, 1.0f, KVS_DTYPE_F32};
        uint8_t row[2304];
        kv_count count = {10, 20};
        kv_row_write(&w, row, t.f32, t.f32 + LATENT, &count);
        /* fp8_ds_mla: the tile of 465 has scale 2; the rope is not quantised */
        const uint64_t n_sat = w.fmt == KVS_KV_FP8 ? 4 : w.fmt == KVS_KV_FP8_DS_MLA ? 2 : 0;
        assert_int_equal(count.n_nan, 10 + 2);
        assert_int_equal(count.n_sat, 20 + n_sat);
    }
    uint8_t page[32768];
    for (int32_t fmt = KVS_INDEX_FP8; fmt <= KVS_INDEX_F32; fmt++) {
        kv_count count = {0, 0};
        index_key_write(fmt, KVS_DTYPE_F32, page, 9, t.f32, &count);
        assert_int_equal(count.n_nan, 1);
        assert_int_equal(count.n_sat, fmt == KVS_INDEX_FP8 ? 2 : 0);
        index_key_write(fmt, KVS_DTYPE_BF16, page, 9, t.bf16, NULL);
    }
}

/* Bytes of a foreign writer: any code under any scale is read by the same rule. */
static void reader_takes_any_bytes(void **state)
{
    (void)state;
    rng r = rng_init(SEED, 5);
    for (int k = 0; k < 40; k++) {
        uint8_t row[2304];
        for (size_t i = 0; i < sizeof row; i++) {
            row[i] = (uint8_t)rng_next(&r);
        }
        for (int tile = 0; tile < 4; tile++) { /* finite scales of all sizes */
            want_f32(row + 512 + 4 * tile, (uint32_t)rng_next(&r) & 0x7F7FFFFF);
        }
        for (size_t f = 0; f < UNIT_COUNT(kv_formats); f++) {
            float out[ROW];
            kv_row_read(kv_formats[f], 0.37f, row, out);
            for (int i = 0; i < ROW; i++) {
                const uint32_t want = want_read(kv_formats[f], 0.37f, row, i);
                assert_int_equal(f32_bits(out[i]), want);
            }
        }
    }
}

/* ---- index pages ----------------------------------------------------------------------------- */

static void want_index_key(uint8_t *page, int32_t fmt, int off, const token *t, int32_t type)
{
    const float s = oracle_scale(0, 1, want_amax(t, type, 0, 128));
    for (int i = 0; i < 128; i++) {
        const float x = token_value(t, type, i);
        if (fmt == KVS_INDEX_F32) {
            want_f32(page + 512 * off + 4 * i, f32_bits(x));
        } else {
            page[128 * off + i] = (uint8_t)want_e4m3(x, s);
        }
    }
    if (fmt == KVS_INDEX_FP8) {
        want_f32(page + 8192 + 4 * off, f32_bits(s));
    }
}

/* Tokens of a page written in no order: each touches its key and its scale alone. */
static void index_keys(void **state)
{
    (void)state;
    for (int32_t fmt = KVS_INDEX_FP8; fmt <= KVS_INDEX_F32; fmt++) {
        const size_t bytes = fmt == KVS_INDEX_FP8 ? 8448 : 32768;
        uint8_t got[1 + 32768 + RED];
        uint8_t want[sizeof got];
        memset(got, 0x5C, sizeof got);
        memset(want, 0x5C, sizeof want);
        for (int k = 0; k < 64; k++) {
            const int off = (k * 29 + 11) % 64;
            const int32_t type = k % 2 == 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
            token t;
            token_random(&t, 200 + (uint64_t)k);
            if (k == 5) {
                fill(&t, 0.0f);
            } else if (k == 6) {
                t.f32[1] = (float)INFINITY;
                t.f32[2] = (float)NAN;
                token_from_f32(&t);
            } else if (k == 7) {
                fill(&t, -FLT_TRUE_MIN);
            }
            index_key_write(fmt, type, got + 1, off, token_at(&t, type, 0), NULL);
            want_index_key(want + 1, fmt, off, &t, type);
            assert_memory_equal(got, want, sizeof got);
            float out[128];
            const float s = index_key_read(fmt, got + 1, off, out);
            const uint8_t *page = want + 1;
            assert_true(f32_bits(s) ==
                        (fmt == KVS_INDEX_F32 ? 0x3F800000 : get_u32(page + 8192 + 4 * off)));
            for (int i = 0; i < 128; i++) {
                const int code = page[128 * off + i];
                const uint32_t bits = fmt == KVS_INDEX_F32 ? get_u32(page + 512 * off + 4 * i)
                                                           : want_dequant(code, 1.0f);
                assert_int_equal(f32_bits(out[i]), bits);
            }
        }
        assert_int_equal(got[1 + bytes], 0x5C);
    }
}

static void sizes(void **state)
{
    (void)state;
    for (size_t f = 0; f < UNIT_COUNT(kv_formats); f++) {
        assert_int_equal(kv_row_bytes(kv_formats[f]), kv_bytes[f]);
        assert_int_equal(kv_page_bytes(kv_formats[f]), 64 * kv_bytes[f]);
    }
    assert_int_equal(kv_row_bytes(KVS_KV_AUTO), 0);
    assert_int_equal(kv_row_bytes(5), 0);
    assert_int_equal(kv_row_bytes(-1), 0);
    assert_int_equal(index_page_bytes(KVS_INDEX_FP8), 64 * 128 + 64 * 4);
    assert_int_equal(index_page_bytes(KVS_INDEX_F32), 64 * 128 * 4);
    assert_int_equal(index_page_bytes(KVS_INDEX_AUTO), 0);
    assert_int_equal(index_page_bytes(3), 0);
    assert_int_equal(index_scale_at(63), 8444);
}

/* ---- formats, names, tags -------------------------------------------------------------------- */

static void names_go_both_ways(void **state)
{
    (void)state;
    static const char *const kv[] = {"auto", "f32", "bf16", "fp8", "fp8_ds_mla"};
    static const char *const index[] = {"auto", "fp8", "f32"};
    static const char *const rule[] = {"auto", "pow2", "exact"};
    kvs_error err;
    for (int32_t i = 0; i < 5; i++) {
        kvs_kv_format f = (kvs_kv_format)99;
        assert_string_equal(kv_fmt_name(i), kv[i]);
        assert_int_equal(kv_fmt_parse(kv[i], &f, NULL), KVS_OK);
        assert_int_equal(f, i);
    }
    for (int32_t i = 0; i < 3; i++) {
        kvs_index_format f = (kvs_index_format)99;
        kvs_scale_rule r = (kvs_scale_rule)99;
        assert_string_equal(index_fmt_name(i), index[i]);
        assert_int_equal(index_fmt_parse(index[i], &f, NULL), KVS_OK);
        assert_int_equal(f, i);
        assert_string_equal(scale_rule_name(i), rule[i]);
        assert_int_equal(scale_rule_parse(rule[i], &r, NULL), KVS_OK);
        assert_int_equal(r, i);
    }
    assert_string_equal(kv_fmt_name(5), "?");
    assert_string_equal(index_fmt_name(-1), "?");
    assert_string_equal(scale_rule_name(3), "?");
    kvs_kv_format f = KVS_KV_BF16;
    assert_int_equal(kv_fmt_parse("fp8_ds", &f, &err), KVS_INVALID);
    assert_int_equal(f, KVS_KV_BF16);
    assert_non_null(strstr(err.text, "\"fp8_ds\""));
    assert_non_null(strstr(err.text, "fp8_ds_mla"));
    kvs_index_format x = KVS_INDEX_F32;
    assert_int_equal(index_fmt_parse("bf16", &x, &err), KVS_INVALID);
    assert_int_equal(x, KVS_INDEX_F32);
    assert_non_null(strstr(err.text, "fp8 or f32"));
    kvs_scale_rule r = KVS_SCALE_EXACT;
    assert_int_equal(scale_rule_parse("", &r, &err), KVS_INVALID);
    assert_int_equal(r, KVS_SCALE_EXACT);
    assert_non_null(strstr(err.text, "pow2 or exact"));
}

/* rows, index -> what becomes of them; -1: refused */
static const struct {
    int has_index;
    int32_t kv, index, want_kv, want_index;
    const char *why;
} pairs[] = {
    {0, KVS_KV_AUTO, KVS_INDEX_AUTO, KVS_KV_BF16, KVS_INDEX_AUTO, NULL},
    {0, KVS_KV_F32, KVS_INDEX_AUTO, KVS_KV_F32, KVS_INDEX_AUTO, NULL},
    {0, KVS_KV_BF16, KVS_INDEX_AUTO, KVS_KV_BF16, KVS_INDEX_AUTO, NULL},
    {0, KVS_KV_FP8, KVS_INDEX_AUTO, KVS_KV_FP8, KVS_INDEX_AUTO, NULL},
    {0, KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, NULL},
    {0, KVS_KV_BF16, KVS_INDEX_FP8, -1, 0, "index key format given for a cache without"},
    {1, KVS_KV_AUTO, KVS_INDEX_AUTO, KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_F32, KVS_INDEX_AUTO, KVS_KV_F32, KVS_INDEX_F32, NULL},
    {1, KVS_KV_F32, KVS_INDEX_F32, KVS_KV_F32, KVS_INDEX_F32, NULL},
    {1, KVS_KV_F32, KVS_INDEX_FP8, KVS_KV_F32, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_BF16, KVS_INDEX_AUTO, KVS_KV_BF16, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_BF16, KVS_INDEX_FP8, KVS_KV_BF16, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_BF16, KVS_INDEX_F32, KVS_KV_BF16, KVS_INDEX_F32, NULL},
    {1, KVS_KV_FP8, KVS_INDEX_AUTO, -1, 0, "use fp8_ds_mla"},
    {1, KVS_KV_FP8, KVS_INDEX_FP8, -1, 0, "use fp8_ds_mla"},
    {1, KVS_KV_FP8, KVS_INDEX_F32, -1, 0, "use fp8_ds_mla"},
    {1, KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, NULL},
    {1, KVS_KV_FP8_DS_MLA, KVS_INDEX_F32, -1, 0, "use fp8 index keys, or bf16 rows"},
    {1, KVS_KV_AUTO, KVS_INDEX_F32, -1, 0, "f32 index keys with fp8_ds_mla rows"},
    {1, 5, KVS_INDEX_AUTO, -1, 0, "cache row format 5"},
    {1, KVS_KV_BF16, 3, -1, 0, "index key format 3"},
    {0, -1, KVS_INDEX_AUTO, -1, 0, "cache row format -1"},
};

static void formats_resolve_or_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(pairs); i++) {
        for (int32_t hadamard = 0; hadamard <= pairs[i].has_index; hadamard++) {
            kv_layout l = {(kvs_kv_format)pairs[i].kv, (kvs_index_format)pairs[i].index, hadamard};
            kvs_error err;
            const kvs_status st = kv_layout_resolve(pairs[i].has_index, &l, &err);
            if (pairs[i].want_kv < 0) {
                assert_true(st == KVS_INVALID || st == KVS_UNSUPPORTED);
                assert_non_null(strstr(err.text, pairs[i].why));
                assert_true(l.kv == (kvs_kv_format)pairs[i].kv);
                assert_true(l.index == (kvs_index_format)pairs[i].index);
                continue;
            }
            assert_int_equal(st, KVS_OK);
            assert_int_equal(l.kv, pairs[i].want_kv);
            assert_int_equal(l.index, pairs[i].want_index);
            assert_int_equal(l.hadamard, hadamard);
        }
    }
    kvs_error err;
    kv_layout l = {KVS_KV_BF16, KVS_INDEX_AUTO, 1};
    assert_int_equal(kv_layout_resolve(0, &l, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "hadamard given for a cache without"));
    l.hadamard = 2;
    assert_int_equal(kv_layout_resolve(1, &l, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "hadamard 2"));
}

static int32_t all_layouts(kv_layout out[40])
{
    int32_t n = 0;
    for (size_t f = 0; f < UNIT_COUNT(kv_formats); f++) {
        for (int32_t x = KVS_INDEX_AUTO; x <= KVS_INDEX_F32; x++) {
            for (int32_t h = 0; h <= (x != KVS_INDEX_AUTO); h++) {
                const kv_layout l = {(kvs_kv_format)kv_formats[f], (kvs_index_format)x, h};
                out[n++] = l;
            }
        }
    }
    return n;
}

/* Distinct, never 0, readable; a tag with one bit changed is another layout's or no tag. */
static void tags_tell_layouts_apart(void **state)
{
    (void)state;
    kv_layout all[40];
    const int32_t n = all_layouts(all);
    assert_int_equal(n, 20);
    for (int32_t i = 0; i < n; i++) {
        const uint64_t tag = cache_tag(all[i]);
        assert_true(tag != 0);
        assert_true(tag == ((uint64_t)index_tag(all[i]) << 32 | kv_tag(all[i])));
        kv_layout l = {KVS_KV_AUTO, KVS_INDEX_AUTO, 7};
        assert_int_equal(cache_tag_parse(tag, &l, NULL), KVS_OK);
        assert_memory_equal(&l, &all[i], sizeof l);
        assert_int_equal(cache_tag_check(tag, all[i], NULL), KVS_OK);
        for (int b = 0; b < 64; b++) {
            const uint64_t other = tag ^ UINT64_C(1) << b;
            assert_int_equal(cache_tag_check(other, all[i], NULL), KVS_FORMAT);
            l.hadamard = 7;
            if (cache_tag_parse(other, &l, NULL) == KVS_OK) {
                assert_true(cache_tag(l) == other);
            } else {
                assert_int_equal(l.hadamard, 7);
            }
        }
        for (int32_t j = 0; j < n; j++) {
            const int same = cache_tag(all[j]) == tag;
            assert_int_equal(same, i == j);
        }
    }
    kv_layout l;
    for (uint64_t f = 0; f < 256; f++) {
        const kvs_status rows = cache_tag_parse(UINT64_C(0x4B564000) | f, &l, NULL);
        const uint64_t keys = (UINT64_C(0x4B494000) | f) << 32;
        const kvs_status index = cache_tag_parse(keys | UINT64_C(0x4B564002), &l, NULL);
        assert_int_equal(rows, f >= 1 && f <= 4 ? KVS_OK : KVS_FORMAT);
        assert_int_equal(index, f >= 1 && f <= 2 ? KVS_OK : KVS_FORMAT);
    }
    /* fixed: files hold these numbers */
    const kv_layout ds = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 1};
    assert_true(cache_tag(ds) == UINT64_C(0x4B49C0014B564004));
}

static void tag_refusals_name_both_layouts(void **state)
{
    (void)state;
    const kv_layout a = {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 1};
    const kv_layout b = {KVS_KV_FP8, KVS_INDEX_AUTO, 0};
    kvs_error err;
    assert_int_equal(cache_tag_check(cache_tag(a), b, &err), KVS_FORMAT);
    assert_non_null(
        strstr(err.text, "holds fp8_ds_mla rows (656 bytes), fp8 index keys, Hadamard"));
    assert_non_null(strstr(err.text, "set to fp8 rows (576 bytes), no index keys"));
    assert_true(strlen(err.text) < sizeof err.text - 1);
    assert_int_equal(cache_tag_check(cache_tag(b), a, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "holds fp8 rows (576 bytes), no index keys"));
    assert_true(strlen(err.text) < sizeof err.text - 1);
    assert_int_equal(cache_tag_check(0, a, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "0x00000000 is no row format tag"));
    assert_int_equal(cache_tag_check(kv_tag(a) | UINT64_C(0xDEADBEEF) << 32, a, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "0xdeadbeef is no index format tag"));
    assert_true(strlen(err.text) < sizeof err.text - 1);
}

static void k_scale_is_positive_and_finite(void **state)
{
    (void)state;
    static const float good[] = {1.0f, 0.06f, FLT_MIN, FLT_TRUE_MIN, FLT_MAX};
    for (size_t i = 0; i < UNIT_COUNT(good); i++) {
        assert_int_equal(kv_k_scale_check(good[i], 0, NULL), KVS_OK);
    }
    const float bad[] = {0.0f, -0.0f, -1.0f, (float)INFINITY, -(float)INFINITY, (float)NAN};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        kvs_error err;
        assert_int_equal(kv_k_scale_check(bad[i], 41, &err), KVS_INVALID);
        assert_non_null(strstr(err.text, "layer 41"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),
        cmocka_unit_test(random_rows),
        cmocka_unit_test(odd_rows),
        cmocka_unit_test(amax_reaches_every_place),
        cmocka_unit_test(zero_tiles_read_back_as_zero),
        cmocka_unit_test(error_is_half_a_step),
        cmocka_unit_test(writers_count_what_they_meet),
        cmocka_unit_test(reader_takes_any_bytes),
        cmocka_unit_test(index_keys),
        cmocka_unit_test(names_go_both_ways),
        cmocka_unit_test(formats_resolve_or_are_refused),
        cmocka_unit_test(tags_tell_layouts_apart),
        cmocka_unit_test(tag_refusals_name_both_layouts),
        cmocka_unit_test(k_scale_is_positive_and_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
