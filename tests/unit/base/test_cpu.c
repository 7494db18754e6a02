/* CPU features: decoding of CPUID words, the system's part, levels, names. */
#include "unit/unit.h"

#include "base/cpu.h"

/* CPUID words of a processor with everything, as Intel's manual numbers the bits. */
static cpu_leaves everything(void)
{
    const cpu_leaves l = {
        .l1_ecx = 1u << 12 | 1u << 23 | 1u << 27 | 1u << 28 | 1u << 29,
        .l7_ebx = 1u << 5 | 1u << 8 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31,
        .l7_ecx = 1u << 1 | 1u << 6 | 1u << 11,
        .l7_edx = 1u << 22 | 1u << 24 | 1u << 25,
        .l7_1_eax = 1u << 5,
        .xcr0 = 0x602E7,
    };
    return l;
}

static uint32_t all_features(void)
{
    uint32_t all = 0;
#define OR(constant, name, bit) all |= constant;
    CPU_FEATURE_LIST(OR)
#undef OR
    return all;
}

static void decode_needs_processor_and_system(void **state)
{
    (void)state;
    const uint32_t avx512 = CPU_AVX512F | CPU_AVX512BW | CPU_AVX512DQ | CPU_AVX512VL |
                            CPU_AVX512VBMI | CPU_AVX512VBMI2 | CPU_AVX512VNNI | CPU_AVX512BF16;
    const uint32_t amx = CPU_AMX_TILE | CPU_AMX_BF16 | CPU_AMX_INT8;
    const uint32_t scalar = CPU_POPCNT | CPU_BMI2;
    const uint32_t all = all_features();
    cpu_leaves l = everything();
    assert_int_equal(cpu_decode(&l), all);

    static const struct {
        uint64_t xcr0;
        int avx, avx512, amx;
    } os[] = {
        {0x0, 0, 0, 0},     {0x2, 0, 0, 0},     {0x4, 0, 0, 0},     {0x6, 1, 0, 0},
        {0x7, 1, 0, 0},     {0x26, 1, 0, 0},    {0xA6, 1, 0, 0},    {0xC6, 1, 0, 0},
        {0xE6, 1, 1, 0},    {0xE0, 0, 0, 0},    {0x600E6, 1, 1, 1}, {0x200E6, 1, 1, 0},
        {0x400E6, 1, 1, 0}, {0x60006, 1, 0, 1}, {0x60000, 0, 0, 0},
    };
    for (size_t i = 0; i < UNIT_COUNT(os); i++) {
        l = everything();
        l.xcr0 = os[i].xcr0;
        uint32_t want = scalar;
        want |= os[i].avx ? CPU_AVX2 | CPU_FMA | CPU_F16C : 0u;
        want |= os[i].avx512 ? avx512 : 0u;
        want |= os[i].amx ? amx : 0u;
        assert_int_equal(cpu_decode(&l), want);
        l.l1_ecx &= ~(1u << 27); /* no OSXSAVE: XCR0 means nothing */
        assert_int_equal(cpu_decode(&l), scalar);
    }
    l = everything();
    l.l1_ecx &= ~(1u << 28);
    assert_int_equal(cpu_decode(&l), scalar);
    l = everything();
    l.l7_ebx &= ~(1u << 16); /* without the foundation no AVX-512 at all */
    assert_int_equal(cpu_decode(&l), all & ~avx512);
}

static void each_bit_is_its_own(void **state)
{
    (void)state;
    static const struct {
        int word, bit;
        uint32_t feature;
    } bits[] = {
        {0, 12, CPU_FMA},        {0, 23, CPU_POPCNT},     {0, 29, CPU_F16C},
        {1, 5, CPU_AVX2},        {1, 8, CPU_BMI2},        {1, 17, CPU_AVX512DQ},
        {1, 30, CPU_AVX512BW},   {1, 31, CPU_AVX512VL},   {2, 1, CPU_AVX512VBMI},
        {2, 6, CPU_AVX512VBMI2}, {2, 11, CPU_AVX512VNNI}, {3, 22, CPU_AMX_BF16},
        {3, 24, CPU_AMX_TILE},   {3, 25, CPU_AMX_INT8},   {4, 5, CPU_AVX512BF16},
    };
    for (size_t i = 0; i < UNIT_COUNT(bits); i++) {
        cpu_leaves l = everything();
        uint32_t *words[] = {&l.l1_ecx, &l.l7_ebx, &l.l7_ecx, &l.l7_edx, &l.l7_1_eax};
        *words[bits[i].word] &= ~(1u << bits[i].bit);
        assert_int_equal(cpu_decode(&l), all_features() & ~bits[i].feature);
    }
}

static void features_agree_with_the_kernel(void **state)
{
    (void)state;
    if (unit_valgrind()) {
        skip(); /* its CPUID is of another processor than the kernel tells of */
    }
    FILE *f = fopen("/proc/cpuinfo", "r");
    assert_non_null(f);
    static char line[65536];
    int found = 0;
    while (!found && fgets(line, (int)sizeof line - 2, f) != NULL) {
        found = strncmp(line, "flags", 5) == 0;
    }
    fclose(f);
    if (!found) {
        skip(); /* not x86 */
    }
    line[strcspn(line, "\n")] = ' ';
    static const struct {
        uint32_t feature;
        const char *flag;
    } flags[] = {
        {CPU_POPCNT, " popcnt "},
        {CPU_BMI2, " bmi2 "},
        {CPU_F16C, " f16c "},
        {CPU_FMA, " fma "},
        {CPU_AVX2, " avx2 "},
        {CPU_AVX512F, " avx512f "},
        {CPU_AVX512BW, " avx512bw "},
        {CPU_AVX512DQ, " avx512dq "},
        {CPU_AVX512VL, " avx512vl "},
        {CPU_AVX512VBMI, " avx512vbmi "},
        {CPU_AVX512VBMI2, " avx512_vbmi2 "},
        {CPU_AVX512VNNI, " avx512_vnni "},
        {CPU_AVX512BF16, " avx512_bf16 "},
        {CPU_AMX_TILE, " amx_tile "},
        {CPU_AMX_BF16, " amx_bf16 "},
        {CPU_AMX_INT8, " amx_int8 "},
    };
    for (size_t i = 0; i < UNIT_COUNT(flags); i++) {
        const int have = (cpu_features() & flags[i].feature) != 0;
        /* An older kernel may not know the flag of a newer feature, but never the reverse. */
        const int refused =
            flags[i].feature >= CPU_AMX_TILE && cpu_amx_request(NULL) == KVS_UNSUPPORTED;
        if (refused) {
            assert_false(have);
        } else if (strstr(line, flags[i].flag) != NULL) {
            assert_true(have);
        } else if (flags[i].feature <= CPU_AVX512F) {
            assert_false(have);
        }
    }
    assert_int_equal(cpu_features(), cpu_features());
}

static void levels_are_nested_caps(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint32_t need;
    } levels[] = {{"ref", 0},
                  {"avx2", CPU_NEED_AVX2},
                  {"avx512", CPU_NEED_AVX512},
                  {"avx512bf16", CPU_NEED_AVX512BF16},
                  {"amx", CPU_NEED_AMX}};
    const uint32_t all = all_features();
    uint32_t below = 0;
    for (size_t i = 0; i < UNIT_COUNT(levels); i++) {
        uint32_t mask = 0x1234;
        assert_int_equal(cpu_parse_level(levels[i].name, &mask, NULL), KVS_OK);
        assert_string_equal(cpu_level_name(all & mask), levels[i].name);
        assert_true(cpu_has(mask, levels[i].need));
        assert_true(cpu_has(mask, below));
        for (size_t k = i + 1; k < UNIT_COUNT(levels); k++) {
            assert_false(cpu_has(all & mask, levels[k].need));
        }
        below = mask;
    }
    uint32_t mask = 0;
    assert_int_equal(cpu_parse_level(NULL, &mask, NULL), KVS_OK);
    assert_int_equal(mask, UINT32_MAX);
    mask = 0;
    assert_int_equal(cpu_parse_level("", &mask, NULL), KVS_OK);
    assert_int_equal(mask, UINT32_MAX);
    static const char *const bad[] = {"AVX2", "avx", "avx2 ", "sse", "avx512bf"};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        kvs_error err = {0};
        mask = 77;
        assert_int_equal(cpu_parse_level(bad[i], &mask, &err), KVS_INVALID);
        assert_int_equal(mask, 77);
        assert_non_null(strstr(err.text, bad[i]));
        assert_non_null(strstr(err.text, "avx512bf16"));
    }
    assert_string_equal(cpu_level_name(CPU_NEED_AVX2 & ~(uint32_t)CPU_F16C), "ref");
}

static void names_are_listed(void **state)
{
    (void)state;
    char buf[256];
    assert_string_equal(cpu_describe(0, buf, sizeof buf), "");
    assert_string_equal(cpu_describe(CPU_FMA | CPU_AVX512BF16, buf, sizeof buf), "fma avx512bf16");
    assert_string_equal(cpu_describe(CPU_FMA | CPU_AVX512BF16, buf, 7), "fma av");
    assert_true(strlen(cpu_describe(UINT32_MAX, buf, sizeof buf)) > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_needs_processor_and_system),
        cmocka_unit_test(each_bit_is_its_own),
        cmocka_unit_test(features_agree_with_the_kernel),
        cmocka_unit_test(levels_are_nested_caps),
        cmocka_unit_test(names_are_listed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
