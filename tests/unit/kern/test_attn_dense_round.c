/* Factors by which fp16 arithmetic makes of a code what readers of the format make of it. The kernel that uses them is
 * checked on devices. */
#include "unit/unit.h"

#include "base/rng.h"
#include "kern/cuda/attn_dense_round.h"

/* A value of fp16, and one rounded to it. */
static double half(uint16_t bits)
{
    const int e = bits >> 10 & 31, m = bits & 1023;
    const double a = e == 0 ? ldexp(m, -24) : ldexp(1024 + m, e - 25);
    return bits >> 15 ? -a : a;
}

static double rounded(double x)
{
    const int e = x == 0.0 || ilogb(x) < -14 ? -14 : ilogb(x);
    return ldexp(nearbyint(ldexp(x, 10 - e)), e - 10);
}

/* What the device does: a product, and two that add, each rounded once (the sums are exact in double). */
static double made(double code, const dense_round *r)
{
    if (r->plain) {
        return code * (double)r->unit;
    }
    const double t = rounded(code * half(r->hi) + rounded(code * half(r->lo)));
    return rounded(t - code * half(r->back)) * (double)r->unit;
}

static void holds(float k_scale, const dense_round *r)
{
    for (int c = 0; c < 256; c++) {
        if ((c & 0x7F) == 0x7F) {
            continue;
        }
        const float code = e4m3_to_f32((uint8_t)c);
        const float want = bf16_round(code * k_scale);
        if (made((double)code, r) != (double)want) {
            print_message("scale %a code %d: %a, not %a\n", (double)k_scale, c,
                          made((double)code, r), (double)want);
            fail();
        }
    }
}

static void every_code_is_what_readers_make_of_it(void **state)
{
    (void)state;
    rng r = rng_init(1, 0);
    int n = 0;
    enum { ALL = 20000 };
    for (int i = 0; i < ALL; i++) {
        const float k_scale = ldexpf(1.0f + (float)rng_next_below(&r, 1 << 23) * 0x1p-23f,
                                     (int)rng_next_range(&r, -40, 20));
        dense_round f;
        if (dense_round_find(k_scale, &f)) {
            holds(k_scale, &f);
            n++;
        }
    }
    assert_true(n > ALL * 99 / 100);
}

static void usual_scales_have_factors(void **state)
{
    (void)state;
    static const float scales[] = {1.0f, 0.5f, 0.06f, 3.7f, 0.015f, 0x1p-6f, 1.0f / 448.0f};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        dense_round f;
        assert_true(dense_round_find(scales[i], &f));
        assert_int_equal(f.plain, frexpf(scales[i], &(int){0}) == 0.5f);
        holds(scales[i], &f);
    }
}

static void what_is_no_scale_has_none(void **state)
{
    (void)state;
    const float scales[] = {0.0f, -1.0f, NAN, INFINITY, 0x1p-130f, 0x1p120f, 0x1.0a762cp-5f};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        dense_round f;
        assert_false(dense_round_find(scales[i], &f));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_is_what_readers_make_of_it),
        cmocka_unit_test(usual_scales_have_factors),
        cmocka_unit_test(what_is_no_scale_has_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
