/* Conversions and scales of num/fmt.h against the definitions of oracle.h: every code both ways,
 * every midpoint of neighbours with what lies beside it, and a dense sample of all f32. */
#include "unit/unit.h"

#include <float.h>

#include "num/fmt.h"
#include "oracle.h"

static float f32_up(float x)
{
    return nextafterf(x, (float)INFINITY);
}

static float f32_down(float x)
{
    return nextafterf(x, -(float)INFINITY);
}

static int is_nan_code(int code)
{
    return (code & 0x7F) == 0x7F;
}

/* ---- e4m3 ------------------------------------------------------------------------------------ */

static void check_e4m3(float x)
{
    const int got = e4m3_from_f32(x);
    const int want = oracle_e4m3_nearest((double)x);
    if (got != want) {
        fail_msg("e4m3 of %a is 0x%02x, want 0x%02x", (double)x, got, want);
    }
    const int sat = isinf(x) || fabs((double)x) > 464.0;
    if (e4m3_saturates(x) != sat) {
        fail_msg("saturation of %a is not %d", (double)x, sat);
    }
}

static void e4m3_every_code(void **state)
{
    (void)state;
    for (int c = 0; c < 256; c++) {
        const float v = e4m3_to_f32((uint8_t)c);
        if (is_nan_code(c)) {
            assert_int_equal(f32_bits(v), c == 0x7F ? 0x7FC00000 : 0xFFC00000);
        } else {
            assert_true((double)v == oracle_e4m3_value(c));
            assert_int_equal(signbit(v) != 0, c >> 7); /* 0x80 is -0.0 */
            check_e4m3(v);
        }
        assert_int_equal(e4m3_from_f32(v), c);
    }
    assert_true((double)e4m3_to_f32(0x7E) == 448.0);
    assert_true(e4m3_to_f32(0x01) == 0x1p-9f);
}

static void e4m3_every_midpoint(void **state)
{
    (void)state;
    for (int c = 0; c < 0x7E; c++) {
        const float mid = (float)((oracle_e4m3_value(c) + oracle_e4m3_value(c + 1)) / 2);
        const float at[] = {f32_down(mid), mid, f32_up(mid)};
        for (size_t i = 0; i < UNIT_COUNT(at); i++) {
            check_e4m3(at[i]);
            check_e4m3(-at[i]);
        }
        assert_int_equal(e4m3_from_f32(mid) % 2, 0);
    }
}

static void e4m3_saturates_and_keeps_nan(void **state)
{
    (void)state;
    static const float at[] = {447.0f, 448.0f, 449.0f, 463.9f, 464.0f,          464.1f, 465.0f,
                               480.0f, 512.0f, 1e4f,   1e38f,  (float)INFINITY, FLT_MAX};
    for (size_t i = 0; i < UNIT_COUNT(at); i++) {
        check_e4m3(at[i]);
        check_e4m3(-at[i]);
        assert_int_equal(e4m3_from_f32(at[i]), 0x7E);
        assert_int_equal(e4m3_from_f32(-at[i]), 0xFE);
    }
    static const uint32_t nans[] = {0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F900000};
    for (size_t i = 0; i < UNIT_COUNT(nans); i++) {
        assert_int_equal(e4m3_from_f32(f32_from_bits(nans[i])), 0x7F);
        assert_int_equal(e4m3_from_f32(f32_from_bits(nans[i] | 0x80000000u)), 0xFF);
        assert_int_equal(e4m3_saturates(f32_from_bits(nans[i])), 0);
    }
    assert_int_equal(e4m3_from_f32(0.0f), 0x00);
    assert_int_equal(e4m3_from_f32(-0.0f), 0x80);
    assert_int_equal(e4m3_from_f32(-FLT_TRUE_MIN), 0x80);
}

/* Every bf16 value, and f32 codes 8191 apart (odd, so that all low bits occur). */
static void e4m3_sample_of_all_f32(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 0x10000; b++) {
        const float x = f32_from_bits(b << 16);
        if (!f32_is_nan(x)) {
            check_e4m3(x);
        }
    }
    for (uint64_t u = 0; u <= UINT32_MAX; u += 8191) {
        const float x = f32_from_bits((uint32_t)u);
        if (!f32_is_nan(x)) {
            check_e4m3(x);
        }
    }
}

/* ---- bf16 ------------------------------------------------------------------------------------ */

static void check_bf16(float x)
{
    const int got = bf16_from_f32(x).bits;
    const int want = oracle_bf16_nearest((double)x);
    if (got != want || f32_bits(bf16_round(x)) != (uint32_t)want << 16) {
        fail_msg("bf16 of %a is 0x%04x, want 0x%04x", (double)x, got, want);
    }
}

static void bf16_every_code(void **state)
{
    (void)state;
    int n_nan = 0;
    for (int c = 0; c < 0x10000; c++) {
        const bf16 b = {(uint16_t)c};
        const float v = bf16_to_f32(b);
        assert_int_equal(f32_bits(v), (uint32_t)c << 16);
        if ((c & 0x7FFF) > 0x7F80) {
            n_nan++;
            assert_true(f32_is_nan(v) && isnan(v));
            assert_int_equal(bf16_from_f32(v).bits, c | 0x0040); /* quiet, the rest kept */
            continue;
        }
        if ((c & 0x7FFF) == 0x7F80) {
            assert_true(isinf(v));
        } else {
            assert_true((double)v == oracle_bf16_value(c));
        }
        assert_int_equal(signbit(v) != 0, c >> 15);
        assert_int_equal(bf16_from_f32(v).bits, c);
    }
    assert_int_equal(n_nan, 254);
}

static void bf16_every_midpoint(void **state)
{
    (void)state;
    for (int c = 0; c < 0x7F80; c++) {
        const uint32_t low = (uint32_t)c << 16;
        const uint32_t mid = low + 0x8000;
        /* halfway in the code is halfway in value */
        assert_true((double)f32_from_bits(mid) ==
                    (oracle_bf16_value(c) + oracle_bf16_value(c + 1)) / 2);
        const uint32_t at[] = {low + 1, low + 0x5A5A, mid - 1, mid, mid + 1, low + 0xFFFF};
        for (size_t i = 0; i < UNIT_COUNT(at); i++) {
            check_bf16(f32_from_bits(at[i]));
            check_bf16(-f32_from_bits(at[i]));
        }
    }
}

static void bf16_edges(void **state)
{
    (void)state;
    assert_int_equal(bf16_from_f32(FLT_MAX).bits, 0x7F80); /* rounds up to infinity */
    assert_int_equal(bf16_from_f32(f32_from_bits(0x7F7F7FFF)).bits, 0x7F7F);
    assert_int_equal(bf16_from_f32((float)INFINITY).bits, 0x7F80);
    assert_int_equal(bf16_from_f32(-(float)INFINITY).bits, 0xFF80);
    /* a payload in the lower half only: cutting it off would leave infinity */
    assert_int_equal(bf16_from_f32(f32_from_bits(0x7F800001)).bits, 0x7FC0);
    assert_int_equal(bf16_from_f32(f32_from_bits(0xFF80FFFF)).bits, 0xFFC0);
    assert_int_equal(bf16_from_f32(f32_from_bits(0x7FFFFFFF)).bits, 0x7FFF);
    assert_int_equal(bf16_from_f32(-0.0f).bits, 0x8000);
    assert_int_equal(bf16_from_f32(FLT_TRUE_MIN).bits, 0);
}

static void bf16_sample_of_all_f32(void **state)
{
    (void)state;
    for (uint64_t u = 0; u <= UINT32_MAX; u += 8191) {
        const float x = f32_from_bits((uint32_t)u);
        assert_int_equal(f32_is_nan(x), isnan(x) ? 1 : 0);
        assert_int_equal(f32_is_finite(x), isfinite(x) ? 1 : 0);
        if (!isnan(x)) {
            check_bf16(x);
        }
    }
}

/* ---- ue8m0 and powers of two ----------------------------------------------------------------- */

static int oracle_ue8m0(float x)
{
    if (isnan(x)) {
        return 255;
    }
    int c = 0;
    while (c < 254 && ldexp(1.0, c - 127) < (double)x) {
        c++;
    }
    return c;
}

static void ue8m0_every_code(void **state)
{
    (void)state;
    for (int c = 0; c < 255; c++) {
        const float v = ue8m0_to_f32((uint8_t)c);
        assert_true((double)v == ldexp(1.0, c - 127));
        assert_int_equal(ue8m0_from_f32(v), c);
        assert_int_equal(ue8m0_from_f32(f32_up(v)), oracle_ue8m0(f32_up(v)));
        assert_int_equal(ue8m0_from_f32(f32_down(v)), oracle_ue8m0(f32_down(v)));
        assert_int_equal(ue8m0_from_f32(v * 1.5f), oracle_ue8m0(v * 1.5f));
    }
    assert_true(isnan(ue8m0_to_f32(255)));
    assert_int_equal(ue8m0_from_f32(f32_from_bits(0x7F800001)), 255);
    assert_int_equal(ue8m0_from_f32(f32_from_bits(0xFFC00000)), 255);
    assert_int_equal(ue8m0_from_f32((float)INFINITY), 254);
    assert_int_equal(ue8m0_from_f32(FLT_MAX), 254);
    assert_int_equal(ue8m0_from_f32(0.0f), 0);
    assert_int_equal(ue8m0_from_f32(-0.0f), 0);
    assert_int_equal(ue8m0_from_f32(-4.0f), 0);
    assert_int_equal(ue8m0_from_f32(-(float)INFINITY), 0);
}

static void pow2_ceil_everywhere(void **state)
{
    (void)state;
    for (int e = -126; e <= 127; e++) {
        const float p = ldexpf(1.0f, e);
        const float at[] = {f32_down(p), p, f32_up(p), p * 1.5f, f32_down(2.0f * p)};
        for (size_t i = 0; i < UNIT_COUNT(at); i++) {
            if (at[i] > 0x1p127f) {
                continue;
            }
            const double want = at[i] < FLT_MIN ? 0x1p-126 : oracle_pow2_ceil((double)at[i]);
            assert_true((double)pow2_ceil(at[i]) == want);
        }
    }
    assert_true(pow2_ceil(0.0f) == FLT_MIN);
    assert_true(pow2_ceil(FLT_TRUE_MIN) == FLT_MIN);
}

/* ---- amax and scales ------------------------------------------------------------------------- */

static void amax_ignores_what_is_not_finite(void **state)
{
    (void)state;
    const float inf = (float)INFINITY;
    const float x[] = {1.0f,       -3.5f,       inf,  -inf,
                       (float)NAN, -(float)NAN, 2.0f, f32_from_bits(0x7F800001)};
    bf16 b[UNIT_COUNT(x)];
    for (size_t i = 0; i < UNIT_COUNT(x); i++) {
        b[i].bits = (uint16_t)(f32_bits(x[i]) >> 16);
    }
    b[7].bits = 0x7F81;
    assert_true(amax_f32(x, 8) == 3.5f);
    assert_true(amax_bf16(b, 8) == 3.5f);
    assert_true(amax_f32(x + 2, 4) == 0.0f);
    assert_true(amax_bf16(b + 2, 4) == 0.0f);
    assert_true(amax_f32(x, 0) == 0.0f);
    assert_true(amax_f32(x, 1) == 1.0f);
    const float small[] = {-FLT_TRUE_MIN, 0.0f, -0.0f};
    assert_true(amax_f32(small, 3) == FLT_TRUE_MIN);
    assert_int_equal(f32_bits(amax_f32(small + 1, 2)), 0); /* not -0.0 */
    const float large[] = {FLT_MAX, -FLT_MAX, inf};
    assert_true(amax_f32(large, 3) == FLT_MAX);
}

static void check_scales(float amax)
{
    const float pow2 = scale_pow2(amax);
    const float exact = scale_exact(amax);
    const float index = scale_index(amax);
    if (pow2 != oracle_scale(0, 0, (double)amax) || exact != oracle_scale(1, 0, (double)amax) ||
        index != oracle_scale(0, 1, (double)amax)) {
        fail_msg("scales of amax %a: %a %a %a", (double)amax, (double)pow2, (double)exact,
                 (double)index);
    }
    assert_true(scale_for(KVS_SCALE_AUTO, amax) == pow2);
    assert_true(scale_for(KVS_SCALE_POW2, amax) == pow2);
    assert_true(scale_for(KVS_SCALE_EXACT, amax) == exact);
    assert_int_equal(f32_bits(pow2) & 0x7FFFFF, 0);
    assert_int_equal(f32_bits(index) & 0x7FFFFF, 0);
    assert_true(pow2 >= 0x1p-13f && exact >= FLT_MIN && index >= 0x1p-22f);
    /* the largest value never saturates beyond rounding */
    assert_false(e4m3_saturates(amax / pow2));
    assert_false(e4m3_saturates(amax / exact));
    assert_false(e4m3_saturates(amax / index));
}

static void scales_follow_the_rule(void **state)
{
    (void)state;
    static const float at[] = {0.0f,  1e-30f, 1e-3f, 1e-4f,        3.7f,    448.0f, 60000.0f,
                               1e38f, 0.05f,  0.1f,  FLT_TRUE_MIN, FLT_MAX, FLT_MIN};
    for (size_t i = 0; i < UNIT_COUNT(at); i++) {
        check_scales(at[i]);
    }
    for (int e = -149; e <= 127; e++) {
        for (int k = 0; k < 2; k++) { /* powers of two, and where amax / 448 is one */
            const float p = ldexpf(k == 0 ? 1.0f : 1.75f, e);
            check_scales(p);
            check_scales(f32_up(p) < FLT_MAX ? f32_up(p) : p);
            check_scales(f32_down(p));
        }
    }
    for (uint64_t u = 0; u < 0x7F800000; u += 9973) {
        check_scales(f32_from_bits((uint32_t)u));
    }
    assert_true(scale_pow2(0.0f) == 0x1p-13f);
    assert_true(scale_pow2(448.0f) == 1.0f);
    assert_true(scale_pow2(449.0f) == 2.0f);
    assert_true(scale_exact(0.0f) == FLT_MIN);
    assert_true(scale_exact(896.0f) == 2.0f);
    assert_true(scale_index(0.0f) == 0x1p-22f);
    assert_true(scale_index(448.0f) == 1.0f);
}

/* ---- quantise and dequantise ----------------------------------------------------------------- */

/* Every code with scales of both rules: the f32 product, then bf16, each rounded once. */
static void dequant_rounds_product_then_bf16(void **state)
{
    (void)state;
    static const float scales[] = {1.0f,    0x1p-13f, 0x1p-22f, FLT_MIN, 0.06f,        1.0f / 3.0f,
                                   133.93f, 0x1p100f, 1e-3f,    7e5f,    0x1.fffffep0f};
    for (size_t i = 0; i < UNIT_COUNT(scales); i++) {
        for (int c = 0; c < 256; c++) {
            const float got = e4m3_dequant((uint8_t)c, scales[i]);
            if (is_nan_code(c)) {
                assert_true(isnan(got));
                continue;
            }
            const float product = (float)(oracle_e4m3_value(c) * (double)scales[i]);
            assert_int_equal(f32_bits(got), (uint32_t)oracle_bf16_nearest((double)product) << 16);
        }
    }
}

/* x / s and x * (1 / s) differ for some x: the division is the rule. */
static void quant_divides(void **state)
{
    (void)state;
    int n_differ = 0;
    for (uint32_t u = 0x3F800000; u < 0x40800000; u += 9973) {
        const float x = f32_from_bits(u);
        const float s = 0.7f;
        const float y = (float)((double)x / (double)s);
        assert_int_equal(e4m3_quant(x, s), oracle_e4m3_nearest((double)y));
        n_differ += x / s != x * (1.0f / s);
    }
    assert_true(n_differ > 0);
    /* beside the midpoints the two give different codes */
    const float s = 41.0f;
    int n_code = 0;
    for (int c = 0x39; c < 0x7E; c++) {
        const double mid = (oracle_e4m3_value(c) + oracle_e4m3_value(c + 1)) / 2;
        for (float x = f32_down((float)(mid * 41.0)); x <= f32_up((float)(mid * 41.0));
             x = f32_up(x)) {
            const float y = (float)((double)x / 41.0);
            assert_int_equal(e4m3_quant(x, s), oracle_e4m3_nearest((double)y));
            n_code += e4m3_quant(x, s) != e4m3_from_f32(x * (1.0f / s));
        }
    }
    assert_true(n_code > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_every_code),
        cmocka_unit_test(e4m3_every_midpoint),
        cmocka_unit_test(e4m3_saturates_and_keeps_nan),
        cmocka_unit_test(e4m3_sample_of_all_f32),
        cmocka_unit_test(bf16_every_code),
        cmocka_unit_test(bf16_every_midpoint),
        cmocka_unit_test(bf16_edges),
        cmocka_unit_test(bf16_sample_of_all_f32),
        cmocka_unit_test(ue8m0_every_code),
        cmocka_unit_test(pow2_ceil_everywhere),
        cmocka_unit_test(amax_ignores_what_is_not_finite),
        cmocka_unit_test(scales_follow_the_rule),
        cmocka_unit_test(dequant_rounds_product_then_bf16),
        cmocka_unit_test(quant_divides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
