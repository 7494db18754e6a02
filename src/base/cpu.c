/* cpu.c: CPUID, XGETBV, levels. */
#include "base/cpu.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/err.h"

/* Register groups of XCR0 that the system must save before their instructions are safe. */
#define XCR0_AVX    UINT64_C(0x6)     /* xmm, ymm             */
#define XCR0_AVX512 UINT64_C(0xE6)    /* and opmask, both zmm */
#define XCR0_AMX    UINT64_C(0x60000) /* tile config and data */

enum {
    L1_ECX_FMA = 12,
    L1_ECX_POPCNT = 23,
    L1_ECX_OSXSAVE = 27,
    L1_ECX_AVX = 28,
    L1_ECX_F16C = 29
};

typedef struct feature_bit {
    uint32_t feature;
    int bit;
} feature_bit;

static const feature_bit l7_ebx_avx[] = {{CPU_AVX2, 5}};
static const feature_bit l7_ebx_avx512[] = {
    {CPU_AVX512F, 16}, {CPU_AVX512DQ, 17}, {CPU_AVX512BW, 30}, {CPU_AVX512VL, 31}};
static const feature_bit l7_ecx_avx512[] = {
    {CPU_AVX512VBMI, 1}, {CPU_AVX512VBMI2, 6}, {CPU_AVX512VNNI, 11}};
static const feature_bit l7_1_eax_avx512[] = {{CPU_AVX512BF16, 5}};
static const feature_bit l7_edx_amx[] = {
    {CPU_AMX_BF16, 22}, {CPU_AMX_TILE, 24}, {CPU_AMX_INT8, 25}};

#define PICK(word, table) pick((word), (table), sizeof(table) / sizeof *(table))

static uint32_t pick(uint32_t word, const feature_bit *table, size_t n)
{
    uint32_t have = 0;
    for (size_t i = 0; i < n; i++) {
        have |= (word >> table[i].bit & 1) != 0 ? table[i].feature : 0;
    }
    return have;
}

uint32_t cpu_decode(const cpu_leaves *l)
{
    const feature_bit l1[] = {{CPU_POPCNT, L1_ECX_POPCNT}};
    const feature_bit l1_avx[] = {{CPU_FMA, L1_ECX_FMA}, {CPU_F16C, L1_ECX_F16C}};
    const feature_bit l7_ebx[] = {{CPU_BMI2, 8}};
    uint32_t have = PICK(l->l1_ecx, l1) | PICK(l->l7_ebx, l7_ebx);

    const uint64_t xcr0 = (l->l1_ecx >> L1_ECX_OSXSAVE & 1) != 0 ? l->xcr0 : 0;
    const int avx = (l->l1_ecx >> L1_ECX_AVX & 1) != 0 && (xcr0 & XCR0_AVX) == XCR0_AVX;
    if (!avx) {
        return have;
    }
    have |= PICK(l->l1_ecx, l1_avx) | PICK(l->l7_ebx, l7_ebx_avx);
    if ((xcr0 & XCR0_AVX512) == XCR0_AVX512 && (l->l7_ebx >> 16 & 1) != 0) {
        have |= PICK(l->l7_ebx, l7_ebx_avx512) | PICK(l->l7_ecx, l7_ecx_avx512) |
                PICK(l->l7_1_eax, l7_1_eax_avx512);
    }
    if ((xcr0 & XCR0_AMX) == XCR0_AMX) {
        have |= PICK(l->l7_edx, l7_edx_amx);
    }
    return have;
}

#if defined(__x86_64__)
static uint64_t read_xcr0(void)
{
    uint32_t lo = 0;
    uint32_t hi = 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static uint32_t detect(void)
{
    cpu_leaves l = {0};
    uint32_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    uint32_t d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        l.l1_ecx = c;
    }
    if ((l.l1_ecx >> L1_ECX_OSXSAVE & 1) != 0) {
        l.xcr0 = read_xcr0();
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        l.l7_ebx = b;
        l.l7_ecx = c;
        l.l7_edx = d;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            l.l7_1_eax = a;
        }
    }
    const uint32_t have = cpu_decode(&l);
    const uint32_t amx = CPU_AMX_TILE | CPU_AMX_BF16 | CPU_AMX_INT8;
    return (have & amx) != 0 && cpu_amx_request(NULL) < 0 ? have & ~amx : have;
}
#else
static uint32_t detect(void)
{
    return 0;
}
#endif

uint32_t cpu_features(void)
{
    static atomic_uint found; /* the features, with the top bit as "already looked" */
    const uint32_t looked = UINT32_C(1) << 31;
    uint32_t have = atomic_load_explicit(&found, memory_order_relaxed);
    if (have == 0) {
        have = detect() | looked;
        atomic_store_explicit(&found, have, memory_order_relaxed);
    }
    return have & ~looked;
}

typedef struct cpu_level {
    const char *name;
    uint32_t need;
    uint32_t allow;
} cpu_level;

static const cpu_level levels[] = {
    {"ref", 0, 0},
    {"avx2", CPU_NEED_AVX2, CPU_NEED_AVX2},
    {"avx512", CPU_NEED_AVX512,
     CPU_NEED_AVX512 | CPU_AVX512VBMI | CPU_AVX512VBMI2 | CPU_AVX512VNNI},
    {"avx512bf16", CPU_NEED_AVX512BF16,
     CPU_NEED_AVX512BF16 | CPU_AVX512VBMI | CPU_AVX512VBMI2 | CPU_AVX512VNNI},
    {"amx", CPU_NEED_AMX, UINT32_MAX},
};
enum { N_LEVEL = sizeof levels / sizeof *levels };

kvs_status cpu_parse_level(const char *level, uint32_t *mask, kvs_error *err)
{
    if (level == NULL || level[0] == '\0') {
        *mask = UINT32_MAX;
        return KVS_OK;
    }
    for (int i = 0; i < N_LEVEL; i++) {
        if (strcmp(level, levels[i].name) == 0) {
            *mask = levels[i].allow;
            return KVS_OK;
        }
    }
    return err_set(err, KVS_INVALID,
                   "CPU level \"%s\" is unknown: use ref, avx2, avx512, avx512bf16 or amx", level);
}

const char *cpu_level_name(uint32_t have)
{
    int best = 0;
    for (int i = 0; i < N_LEVEL; i++) {
        if (cpu_has(have, levels[i].need)) {
            best = i;
        }
    }
    return levels[best].name;
}

char *cpu_describe(uint32_t have, char *buf, size_t cap)
{
    static const struct {
        uint32_t feature;
        const char *name;
    } names[] = {
#define CPU_FEATURE_NAME(constant, name, bit) {constant, name},
        CPU_FEATURE_LIST(CPU_FEATURE_NAME)
#undef CPU_FEATURE_NAME
    };
    size_t n = 0;
    if (cap > 0) {
        buf[0] = '\0';
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if ((have & names[i].feature) == 0 || n >= cap) {
            continue;
        }
        const int m = snprintf(buf + n, cap - n, "%s%s", n > 0 ? " " : "", names[i].name);
        n += m > 0 ? (size_t)m : 0;
    }
    return buf;
}

kvs_status cpu_amx_request(kvs_error *err)
{
#if defined(__x86_64__)
    enum { REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0) {
        return KVS_OK;
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "the kernel does not grant AMX tiles: %s; set KVS_CPU=avx512bf16",
                   strerrordesc_np(errno));
#else
    return err_set(err, KVS_UNSUPPORTED, "this processor has no AMX; set KVS_CPU=ref");
#endif
}
