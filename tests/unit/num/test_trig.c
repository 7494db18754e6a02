/* Sine and cosine against the host's long double, over all the angles that a rope table can hold. */
#include "unit/unit.h"

#include <math.h>

#include "base/rng.h"
#include "num/trig.h"

static double g_worst;

static void check_angle(float angle)
{
    double s = 0.0;
    double c = 0.0;
    trig_sincos((double)angle, &s, &c);
    const double off_s = fabs((double)((long double)s - sinl((long double)angle)));
    const double off_c = fabs((double)((long double)c - cosl((long double)angle)));
    const double off = off_s > off_c ? off_s : off_c;
    g_worst = off > g_worst ? off : g_worst;
    if (!(off <= 0x1p-52)) {
        fail_msg("angle %a: off by %g", (double)angle, off);
    }
}

/* The f32 product of a position and a frequency, as the forward pass forms it. */
static void angles_of_positions(void **state)
{
    (void)state;
    rng r = rng_init(3, 0);
    for (int i = 0; i < 300000; i++) {
        const float freq = (float)exp(-20.0 * rng_next_uniform(&r));
        const float pos = (float)(rng_next(&r) >> 33 >> (i % 31));
        check_angle(pos * freq);
        check_angle(-pos * freq);
    }
    assert_true(g_worst > 0.0);
}

/* Next to multiples of pi/2, where the reduction loses most, and at the ends of the range. */
static void angles_near_the_axes(void **state)
{
    (void)state;
    rng r = rng_init(4, 0);
    for (int i = 0; i < 200000; i++) {
        const double n = (double)(rng_next(&r) >> 34 >> (i % 30));
        const float near = (float)(n * 1.57079632679489661923);
        check_angle(near);
        check_angle(nextafterf(near, 0.0f));
        check_angle(nextafterf(near, 4e9f) < 0x1p31f ? nextafterf(near, 4e9f) : 0x1p31f);
    }
    check_angle(0x1p31f);
    check_angle(0x1.fffffep30f);
    check_angle(0x1p-149f);
    check_angle(0.785398185f);
    check_angle(0.785398126f);
}

static void exact_values(void **state)
{
    (void)state;
    double s = 1.0;
    double c = 0.0;
    trig_sincos(0.0, &s, &c);
    assert_true(s == 0.0 && c == 1.0);
    trig_sincos(1.0, &s, &c);
    assert_true((float)s == 0.841470957f && (float)c == 0.540302277f);
    /* third quadrant: both negative */
    trig_sincos(4.0, &s, &c);
    assert_true((float)s == -0.756802499f && (float)c == -0.653643608f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(angles_of_positions),
        cmocka_unit_test(angles_near_the_axes),
        cmocka_unit_test(exact_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
