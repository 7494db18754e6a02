/* What the comparisons of the checking tool hold for equal: at the bound passes, a little over it
 * fails, and the worst share of a bound is kept either way. The selftest plants its faults in
 * cmp_near alone, so that the comparison of norms is tested here. */
#include "unit/unit.h"

#include <math.h>

#include "check/check.h"

static void a_ratio_is_held_to_its_bound(void **state)
{
    (void)state;
    const coord at = {"norm", 1, 2, -1};
    check_result r = {0};
    cmp_ratio(&r, at, 0.0, 0.0);
    cmp_ratio(&r, at, 0.25, 0.5);
    cmp_ratio(&r, at, 0.5, 0.5);
    assert_int_equal(r.n_bad, 0);
    assert_true(r.worst == 1.0);
    cmp_ratio(&r, at, 0.5 * (1.0 + 0x1p-20), 0.5);
    assert_int_equal(r.n_bad, 1);
    assert_true(r.worst == 1.0 + 0x1p-20);
    assert_non_null(strstr(r.first, "norm"));
    cmp_ratio(&r, at, NAN, 0.5);
    cmp_ratio(&r, at, 0x1p-40, 0.0);
    assert_int_equal(r.n_bad, 3);
    assert_true(isinf(r.worst));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ratio_is_held_to_its_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
