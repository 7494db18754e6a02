/* Hashes: values fixed for all time (files carry them), streams in any pieces, the clock. */
#include "unit/unit.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/rng.h"

static void empty_input_has_the_published_values(void **state)
{
    (void)state;
    assert_true(hash_xx64("", 0) == UINT64_C(0x2D06800538D394C2));
    const hash128 h = hash_xx128("", 0);
    assert_true(h.lo == UINT64_C(0x6001C324468D497F));
    assert_true(h.hi == UINT64_C(0x99AA06D3014798D8));
}

static void streams_equal_whole_buffers(void **state)
{
    (void)state;
    static unsigned char data[5000];
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (unsigned char)rng_u64(1, 0, i);
    }
    rng r = rng_init(2, 0);
    for (size_t n = 0; n <= sizeof data; n += n < 300 ? 1 : 401) {
        hash_state a;
        hash_state b;
        hash_init64(&a);
        hash_init128(&b);
        for (size_t at = 0; at < n;) {
            const size_t left = n - at;
            const size_t take = 1 + (size_t)rng_next_below(&r, left);
            hash_add64(&a, data + at, take);
            hash_add128(&b, data + at, take);
            at += take;
        }
        assert_true(hash_get64(&a) == hash_xx64(data, n));
        assert_true(hash128_equal(hash_get128(&b), hash_xx128(data, n)));
    }
}

static void one_bit_changes_the_hash(void **state)
{
    (void)state;
    unsigned char data[100] = {0};
    const uint64_t h = hash_xx64(data, sizeof data);
    const hash128 w = hash_xx128(data, sizeof data);
    for (size_t i = 0; i < 8 * sizeof data; i++) {
        data[i / 8] ^= (unsigned char)(1u << i % 8);
        assert_true(hash_xx64(data, sizeof data) != h);
        assert_false(hash128_equal(hash_xx128(data, sizeof data), w));
        data[i / 8] ^= (unsigned char)(1u << i % 8);
    }
    const hash128 lo = {w.lo + 1, w.hi};
    const hash128 hi = {w.lo, w.hi + 1};
    assert_false(hash128_equal(w, lo));
    assert_false(hash128_equal(w, hi));
}

static void the_clock_goes_forward(void **state)
{
    (void)state;
    const int64_t t0 = clock_ns();
    const struct timespec nap = {0, 2000000};
    nanosleep(&nap, NULL);
    const int64_t dt = clock_ns() - t0;
    assert_true(dt >= 2000000);
    assert_true(dt < INT64_C(10000000000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(empty_input_has_the_published_values),
        cmocka_unit_test(streams_equal_whole_buffers),
        cmocka_unit_test(one_bit_changes_the_hash),
        cmocka_unit_test(the_clock_goes_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
