/* Random numbers: published vectors of Philox 4x32-10, distributions, independence of the order. */
#include "unit/unit.h"

#include <math.h>

#include "base/rng.h"

static void block_equals_the_published_vectors(void **state)
{
    (void)state;
    static const struct {
        uint32_t c[4], k[2], out[4];
    } v[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < UNIT_COUNT(v); i++) {
        uint32_t out[4];
        rng_block((uint64_t)v[i].k[1] << 32 | v[i].k[0], (uint64_t)v[i].c[1] << 32 | v[i].c[0],
                  (uint64_t)v[i].c[3] << 32 | v[i].c[2], out);
        assert_memory_equal(out, v[i].out, sizeof out);
    }
    /* seed is the key, counter the low half, stream the high half */
    assert_true(rng_u64(UINT64_C(0x299f31d0a4093822), UINT64_C(0x0370734413198a2e),
                        UINT64_C(0x85a308d3243f6a88)) == UINT64_C(0x94fdccebd16cfe09));
}

static void cursor_walks_the_counters(void **state)
{
    (void)state;
    rng r = rng_init(5, 9);
    for (uint64_t i = 0; i < 100; i++) {
        if (i % 3 == 0) {
            assert_true(rng_next(&r) == rng_u64(5, 9, i));
        } else if (i % 3 == 1) {
            assert_true(rng_next_uniform(&r) == rng_uniform(5, 9, i));
        } else {
            assert_true(rng_next_normal(&r) == rng_normal(5, 9, i));
        }
    }
}

static void seeds_streams_and_counters_differ(void **state)
{
    (void)state;
    enum { N = 8 };
    static uint64_t seen[N * N * N];
    size_t n = 0;
    for (uint64_t a = 0; a < N; a++) {
        for (uint64_t b = 0; b < N; b++) {
            for (uint64_t c = 0; c < N; c++) {
                seen[n++] = rng_u64(a << 32 | a, b << 29, c);
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            assert_true(seen[i] != seen[k]);
        }
    }
}

static void uniform_and_normal_have_their_moments(void **state)
{
    (void)state;
    enum { N = 200000 };
    double u1 = 0;
    double u2 = 0;
    double g1 = 0;
    double g2 = 0;
    double g4 = 0;
    double g_max = 0;
    for (uint64_t i = 0; i < N; i++) {
        const double u = rng_uniform(1, 2, i);
        const double g = rng_normal(1, 3, i);
        assert_true(u >= 0 && u < 1);
        assert_true(isfinite(g) && fabs(g) < 8.6);
        u1 += u;
        u2 += u * u;
        g1 += g;
        g2 += g * g;
        g4 += g * g * g * g;
        g_max = fmax(g_max, fabs(g));
    }
    /* five standard errors of each mean */
    assert_true(fabs(u1 / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
    assert_true(fabs(u2 / N - 1.0 / 3) < 5 * sqrt(4.0 / 45 / N));
    assert_true(fabs(g1 / N) < 5 * sqrt(1.0 / N));
    assert_true(fabs(g2 / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(g4 / N - 3) < 5 * sqrt(96.0 / N));
    assert_true(g_max > 3.5);
}

static void below_and_range_cover_their_bounds(void **state)
{
    (void)state;
    static const uint64_t ns[] = {1, 2, 3, 7, 64};
    for (size_t k = 0; k < UNIT_COUNT(ns); k++) {
        int hits[64] = {0};
        for (uint64_t i = 0; i < 20000; i++) {
            const uint64_t x = rng_below(3, k, i, ns[k]);
            assert_true(x < ns[k]);
            hits[x]++;
        }
        const double want = 20000.0 / (double)ns[k];
        for (uint64_t x = 0; x < ns[k]; x++) {
            assert_true(fabs(hits[x] - want) <= 6 * sqrt(want));
        }
    }
    rng r = rng_init(11, 0);
    int lo = 0;
    int hi = 0;
    for (int i = 0; i < 1000; i++) {
        const int64_t x = rng_next_range(&r, -3, 3);
        assert_true(x >= -3 && x <= 3);
        lo += x == -3;
        hi += x == 3;
    }
    assert_true(lo > 50 && hi > 50);
    int neg = 0;
    for (int i = 0; i < 1000; i++) {
        neg += rng_next_range(&r, INT64_MIN, INT64_MAX) < 0;
    }
    assert_true(neg > 400 && neg < 600);
    assert_true(rng_next_range(&r, INT64_MAX, INT64_MAX) == INT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(block_equals_the_published_vectors),
        cmocka_unit_test(cursor_walks_the_counters),
        cmocka_unit_test(seeds_streams_and_counters_differ),
        cmocka_unit_test(uniform_and_normal_have_their_moments),
        cmocka_unit_test(below_and_range_cover_their_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
