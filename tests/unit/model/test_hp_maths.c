/* The numbers that follow from hyper-parameters: the softmax scale with YaRN's m squared, the magnitude of cos and sin
 * (another thing: a ratio, 1 where both mscales agree), and the rotary frequencies, against the formulas in long
 * double and the values published for known models. */
#include "unit/unit.h"

#include <math.h>

#include "model/hp.h"

static hp preset(const char *name)
{
    hp h;
    assert_int_equal(hp_find(&h, name, NULL), KVS_OK);
    return h;
}

static void near(double got, double want, double bound)
{
    if (!(fabs(got - want) <= bound)) {
        fail_msg("%.9g, not %.9g", got, want);
    }
}

static void softmax_scales_are_those_of_the_models(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double scale;
    } want[] = {
        {"deepseek-v2-lite", 0.1147214},
        {"deepseek-v3", 0.1352338},
        {"deepseek-v3.1", 0.1352338},
        {"deepseek-v3.2", 0.1352338},
        {"kimi-k2", 0.1308608},
        {"glm-5", 0.0625},
        {"glm-5.1", 0.0625},
        {"glm-5.2", 0.0625},
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        const hp h = preset(want[i].name);
        near(hp_softmax_scale(&h), want[i].scale, 5e-8);
        near(hp_rope_magnitude(&h), 1.0, 0.0);
        assert_int_equal(hp_runnable(&h, NULL), KVS_OK);
    }
    hp h = preset("kimi-k2");
    h.yarn_factor = 64.0;
    near(hp_softmax_scale(&h), 0.1446796, 5e-8);
    h = preset("glm-5");
    assert_true(hp_softmax_scale(&h) == 0.0625f);
}

/* The three ways in which files give the two mscales. */
static void scale_and_magnitude_are_two_things(void **state)
{
    (void)state;
    static const double mscale[3] = {0.707, 1.0, 1.0};
    static const double all[3] = {0.707, 1.0, 0.0}; /* 0: absent */
    hp h = preset("deepseek-v3");
    for (int i = 0; i < 3; i++) {
        h.yarn_mscale = mscale[i];
        h.yarn_mscale_all = all[i];
        const long double m = 1.0L + 0.1L * (long double)all[i] * logl(40.0L);
        near(hp_softmax_scale(&h), (double)(m * m / sqrtl(192.0L)), 2e-8);
        const long double ratio = (1.0L + 0.1L * (long double)mscale[i] * logl(40.0L)) / m;
        near(hp_rope_magnitude(&h), (double)ratio, 1e-15);
        kvs_error err = {.code = KVS_OK};
        assert_int_equal(hp_runnable(&h, &err), i < 2 ? KVS_OK : KVS_UNSUPPORTED);
        if (i == 2) {
            near(hp_rope_magnitude(&h), 1.36888795, 1e-8);
            assert_non_null(strstr(err.text, "mscale_all_dim 0"));
        }
    }
    h.yarn_factor = 1.0; /* nothing is stretched: no correction at all */
    near(hp_softmax_scale(&h), 1.0 / sqrt(192.0), 1e-8);
    near(hp_rope_magnitude(&h), 1.0, 0.0);
    h.yarn = false;
    h.yarn_factor = 40.0;
    near(hp_softmax_scale(&h), 1.0 / sqrt(192.0), 1e-8);
    near(hp_rope_magnitude(&h), 1.0, 0.0);
}

static void ramps_begin_and_end_at_the_published_pairs(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double beta_fast, low, high;
    } want[] = {
        {"deepseek-v2-lite", 32.0, 10.0, 23.0},
        {"deepseek-v3", 32.0, 10.0, 23.0},
        {"kimi-k2", 1.0, 19.0, 20.0},
        {"kimi-k2", 32.0, 8.0, 20.0}, /* K2.5 */
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        hp h = preset(want[i].name);
        h.yarn_beta_fast = want[i].beta_fast;
        double low = 0.0;
        double high = 0.0;
        hp_yarn_ramp(&h, &low, &high);
        near(low, want[i].low, 0.0);
        near(high, want[i].high, 0.0);
    }
    /* clamped to 0 and to rope - 1, and never of length 0 */
    hp h = preset("deepseek-v3");
    double low = -1.0;
    double high = -1.0;
    h.yarn_beta_fast = 1e6;
    h.yarn_beta_slow = 1e-3;
    hp_yarn_ramp(&h, &low, &high);
    near(low, 0.0, 0.0);
    near(high, 47.0, 0.0);
    h.theta = 3.0;
    hp_yarn_ramp(&h, &low, &high);
    near(high, 63.0, 0.0);
    h.theta = 26.19; /* both ends fall on the last pair */
    h.yarn_beta_fast = h.yarn_beta_slow = 1.0;
    hp_yarn_ramp(&h, &low, &high);
    near(low, 63.0, 0.0);
    near(high, 63.001, 1e-12);
}

static long double plain_freq(const hp *h, int i)
{
    return expl(-2.0L * i / h->rope * logl((long double)h->theta));
}

/* f32 nearest to x or its neighbour: two roundings, of double and of f32, may meet. */
static void near_f32(float got, long double x)
{
    assert_true(fabsl((long double)got - x) <= 0.5001L * ldexpl(1.0L, ilogbl(x) - 23));
}

static void plain_frequencies_are_powers_of_theta(void **state)
{
    (void)state;
    static const char *const name[] = {"glm-5", "glm-5.2"};
    for (size_t k = 0; k < UNIT_COUNT(name); k++) {
        const hp h = preset(name[k]);
        float f[33];
        f[32] = -7.0f;
        hp_inv_freq(&h, f);
        assert_true(f[0] == 1.0f);
        assert_true(f[32] == -7.0f);
        for (int i = 0; i < 32; i++) {
            near_f32(f[i], plain_freq(&h, i));
        }
    }
    const hp h = preset("glm-5.2");
    float f[32];
    hp_inv_freq(&h, f);
    near(f[16], 1.0 / sqrt(8e6), 1e-10);
}

static void yarn_slows_the_late_pairs_and_leaves_the_early_ones(void **state)
{
    (void)state;
    static const char *const name[] = {"deepseek-v3", "kimi-k2"};
    for (size_t k = 0; k < UNIT_COUNT(name); k++) {
        const hp h = preset(name[k]);
        const int low = k == 0 ? 10 : 19;
        const int high = k == 0 ? 23 : 20;
        float f[32];
        hp_inv_freq(&h, f);
        for (int i = 0; i < 32; i++) {
            const long double plain = plain_freq(&h, i);
            long double slow = (long double)(i - low) / (high - low);
            slow = slow < 0.0L ? 0.0L : slow > 1.0L ? 1.0L : slow;
            near_f32(f[i], (1.0L - slow) * plain + slow * plain / (long double)h.yarn_factor);
            assert_true(i == 0 || f[i] < f[i - 1]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(softmax_scales_are_those_of_the_models),
        cmocka_unit_test(scale_and_magnitude_are_two_things),
        cmocka_unit_test(ramps_begin_and_end_at_the_published_pairs),
        cmocka_unit_test(plain_frequencies_are_powers_of_theta),
        cmocka_unit_test(yarn_slows_the_late_pairs_and_leaves_the_early_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
