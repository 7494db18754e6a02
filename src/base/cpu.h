/* cpu.h: what instructions this machine runs, as one bit per feature.
 *
 * A bit is set only when the processor has the feature and the operating system saves its
 * registers. Decisions are made on features, never on families or model numbers. A level is a cap:
 * the features a user allows, to be and-ed with what the machine has. */
#ifndef BASE_CPU_H
#define BASE_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

/* X(constant, name, bit) */
#define CPU_FEATURE_LIST(X)                                                                        \
    X(CPU_POPCNT, "popcnt", 0)                                                                     \
    X(CPU_BMI2, "bmi2", 1)                                                                         \
    X(CPU_F16C, "f16c", 2)                                                                         \
    X(CPU_FMA, "fma", 3)                                                                           \
    X(CPU_AVX2, "avx2", 4)                                                                         \
    X(CPU_AVX512F, "avx512f", 8)                                                                   \
    X(CPU_AVX512BW, "avx512bw", 9)                                                                 \
    X(CPU_AVX512DQ, "avx512dq", 10)                                                                \
    X(CPU_AVX512VL, "avx512vl", 11)                                                                \
    X(CPU_AVX512VBMI, "avx512vbmi", 12)                                                            \
    X(CPU_AVX512VBMI2, "avx512vbmi2", 13)                                                          \
    X(CPU_AVX512VNNI, "avx512vnni", 14)                                                            \
    X(CPU_AVX512BF16, "avx512bf16", 15)                                                            \
    X(CPU_AMX_TILE, "amx_tile", 20)                                                                \
    X(CPU_AMX_BF16, "amx_bf16", 21)                                                                \
    X(CPU_AMX_INT8, "amx_int8", 22)

enum {
#define CPU_FEATURE_ENUM(constant, name, bit) constant = 1 << (bit),
    CPU_FEATURE_LIST(CPU_FEATURE_ENUM)
#undef CPU_FEATURE_ENUM

    /* What a variant of that level may use, so what a machine must have to run it. */
    CPU_NEED_AVX2 = CPU_POPCNT | CPU_BMI2 | CPU_F16C | CPU_FMA | CPU_AVX2,
    CPU_NEED_AVX512 = CPU_NEED_AVX2 | CPU_AVX512F | CPU_AVX512BW | CPU_AVX512DQ | CPU_AVX512VL,
    CPU_NEED_AVX512BF16 = CPU_NEED_AVX512 | CPU_AVX512BF16,
    CPU_NEED_AMX = CPU_NEED_AVX512BF16 | CPU_AMX_TILE | CPU_AMX_BF16
};

/* The features of this machine; found once, then remembered. 0 where it is not x86-64. AMX is asked for
 * (cpu_amx_request) and counts where the kernel grants it. */
uint32_t cpu_features(void);

/* Whether `have` holds every bit of `need`. */
static inline int cpu_has(uint32_t have, uint32_t need)
{
    return (have & need) == need;
}

/* The mask of features a level allows: "ref" none, "avx2", "avx512", "avx512bf16", "amx". NULL or
 * "" allows all. Anything else is KVS_INVALID and leaves *mask alone. */
kvs_status cpu_parse_level(const char *level, uint32_t *mask, kvs_error *err);

/* The highest level whose needs `have` meets. */
const char *cpu_level_name(uint32_t have);

/* Writes the names of the features in `have`, separated by spaces; cut at cap. Returns buf. */
char *cpu_describe(uint32_t have, char *buf, size_t cap);

/* Asks the kernel to let this process use the AMX tile registers; needed once before the first tile
 * instruction. KVS_UNSUPPORTED where it refuses. */
kvs_status cpu_amx_request(kvs_error *err);

/* The CPUID words and XCR0 that decide, as the processor returns them; 0 where a leaf is absent. */
typedef struct cpu_leaves {
    uint32_t l1_ecx;
    uint32_t l7_ebx;
    uint32_t l7_ecx;
    uint32_t l7_edx;
    uint32_t l7_1_eax;
    uint64_t xcr0;
} cpu_leaves;

/* The features that those words amount to. */
uint32_t cpu_decode(const cpu_leaves *l);

#endif
