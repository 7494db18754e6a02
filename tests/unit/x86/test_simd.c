/* test_simd.c: the vectors that x86 kernels are written in give the bits of the scalar code they
 * stand for: exp, log, merge nodes, conversions, bf16 products, masks. */
#include "unit/unit.h"

#include "base/cpu.h"
#include "simd_cases.h"

static void need(uint32_t features)
{
    if (!cpu_has(cpu_features(), features)) {
        skip();
    }
}

static void avx2(void **state)
{
    (void)state;
    need(CPU_NEED_AVX2);
    simd_cases_avx2();
}

static void emulated_avx512(void **state)
{
    (void)state;
    need(CPU_NEED_AVX2);
    simd_cases_emulate();
}

static void avx512(void **state)
{
    (void)state;
    need(CPU_NEED_AVX512BF16);
    simd_cases_avx512();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(avx2),
        cmocka_unit_test(emulated_avx512),
        cmocka_unit_test(avx512),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
