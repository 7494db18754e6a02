/* Ceilings: what can be measured is, what cannot is 0, and the best value is remembered. */
#include "unit/unit.h"

#include "base/cpu.h"
#include "check/roof.h"

enum { MIB = 1 << 20 };

static void every_ceiling_that_the_machine_has_is_measured(void **state)
{
    (void)state;
    const uint32_t has = cpu_features();
    const struct {
        roof_kind kind;
        uint32_t need;
    } kinds[] = {
        {ROOF_READ, 0},
        {ROOF_COPY, 0},
        {ROOF_FMA_REF, 0},
        {ROOF_FMA_AVX2, CPU_NEED_AVX2},
        {ROOF_FMA_AVX512, CPU_NEED_AVX512},
        {ROOF_DOT_BF16, CPU_NEED_AVX512BF16},
        {ROOF_TILE_BF16, CPU_NEED_AMX},
    };
    roof r;
    assert_int_equal(roof_open(&r, 64 * MIB, has, NULL), KVS_OK);
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    for (size_t i = 0; i < UNIT_COUNT(kinds); i++) {
        roof_value v;
        kvs_error err;
        if (roof_measure(&r, kinds[i].kind, p, &v, &err) != KVS_OK) {
            fail_msg("%s: %s", roof_name(kinds[i].kind), err.text);
        }
        if (!cpu_has(has, kinds[i].need)) {
            assert_true(v.best == 0.0);
            continue;
        }
        assert_true(v.best > 1e6 && v.best < 1e16);
        assert_true(v.best_seen >= v.best);
        double shortest = v.window[0];
        for (int k = 1; k < ROOF_N_WINDOW; k++) {
            shortest = v.window[k] < shortest ? v.window[k] : shortest;
        }
        assert_true(v.best == v.work / shortest);
    }
    pool_close(p);
    roof_close(&r);
}

/* The caller's features are a cap, not a wish. */
static void features_that_are_not_allowed_are_not_used(void **state)
{
    (void)state;
    roof r;
    assert_int_equal(roof_open(&r, 64 * MIB, 0, NULL), KVS_OK);
    for (int k = 0; k < ROOF_N_KIND; k++) {
        roof_value v;
        assert_int_equal(roof_measure(&r, (roof_kind)k, NULL, &v, NULL), KVS_OK);
        const int plain = k == ROOF_READ || k == ROOF_COPY || k == ROOF_FMA_REF;
        assert_int_equal(v.best > 0.0, plain);
    }
    roof_close(&r);
}

static void the_best_is_kept_by_kind_and_threads(void **state)
{
    (void)state;
    roof r;
    assert_int_equal(roof_open(&r, 64 * MIB, 0, NULL), KVS_OK);
    roof_value v;
    assert_int_equal(roof_measure(&r, ROOF_FMA_REF, NULL, &v, NULL), KVS_OK);
    assert_int_equal(r.n_seen, 1);
    r.seen[0].best = 1e18; /* as if the machine had once been that fast */
    assert_int_equal(roof_measure(&r, ROOF_FMA_REF, NULL, &v, NULL), KVS_OK);
    assert_true(v.best_seen == 1e18 && v.best < 1e16);
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 2, NULL), KVS_OK);
    assert_int_equal(roof_measure(&r, ROOF_FMA_REF, p, &v, NULL), KVS_OK);
    assert_true(v.best_seen == v.best); /* of two threads: its own record */
    assert_int_equal(r.n_seen, 2);
    pool_close(p);
    roof_close(&r);
}

static void sizes_and_names_are_checked(void **state)
{
    (void)state;
    roof r;
    kvs_error err;
    assert_int_equal(roof_open(&r, 32 * MIB, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "at least 64 MiB"));
    assert_int_equal(roof_open(&r, 64 * MIB + 4096, 0, &err), KVS_INVALID);
    for (int f32 = 0; f32 < 2; f32++) {
        assert_int_equal(roof_of_variant("avx512", f32), ROOF_FMA_AVX512);
        assert_int_equal(roof_of_variant("avx2", f32), ROOF_FMA_AVX2);
        assert_int_equal(roof_of_variant("ref", f32), ROOF_FMA_REF);
    }
    assert_int_equal(roof_of_variant("amx", 0), ROOF_TILE_BF16);
    assert_int_equal(roof_of_variant("avx512bf16", 0), ROOF_DOT_BF16);
    assert_int_equal(roof_of_variant("amx", 1), ROOF_FMA_AVX512);
    assert_int_equal(roof_of_variant("avx512bf16", 1), ROOF_FMA_AVX512);
    assert_string_equal(roof_name(ROOF_COPY), "copy");
    assert_true(roof_is_bytes(ROOF_READ) && roof_is_bytes(ROOF_COPY));
    assert_false(roof_is_bytes(ROOF_DOT_BF16));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_ceiling_that_the_machine_has_is_measured),
        cmocka_unit_test(features_that_are_not_allowed_are_not_used),
        cmocka_unit_test(the_best_is_kept_by_kind_and_threads),
        cmocka_unit_test(sizes_and_names_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
