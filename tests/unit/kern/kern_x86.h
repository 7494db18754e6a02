/* kern_x86.h - what the tests of x86 variants share: the tables to test, patterned scores, buffers.
 *
 * A table per variant of one op that this machine can run.
 */
#ifndef TEST_KERN_X86_H
#define TEST_KERN_X86_H

#include "base/cpu.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/rng.h"
#include "dev/dev.h"
#include "kern/kern.h"
#include "unit/tile_trap.h"

/* The emulated AVX-512 kernels, as further variants. */
void topk_apply_emulate(kern_table *t);
void topk_merge_apply_emulate(kern_table *t);
void index_score_apply_emulate(kern_table *t);
void index_score_apply_emulate_amx(kern_table *t);
void kv_write_apply_emulate(kern_table *t);
void index_write_apply_emulate(kern_table *t);
void gather_apply_emulate(kern_table *t);
void index_quant_apply_emulate(kern_table *t);
void gemm_apply_emulate(kern_table *t);
void gemm_apply_emulate_bf16(kern_table *t);
void gemm_apply_emulate_vbmi(kern_table *t);
void gemm_apply_emulate_amx(kern_table *t);

static const kern_variant g_emulated[] = {
    KERN_VARIANT(topk, "avx512 emulated", CPU_NEED_AVX2, topk_apply_emulate),
    KERN_VARIANT(topk_merge, "avx512 emulated", CPU_NEED_AVX2, topk_merge_apply_emulate),
    KERN_VARIANT(index_score, "avx512bf16 emulated", CPU_NEED_AVX2, index_score_apply_emulate),
    KERN_VARIANT(index_score, "amx emulated", CPU_NEED_AVX2, index_score_apply_emulate_amx),
    KERN_VARIANT(kv_write, "avx512 emulated", CPU_NEED_AVX2, kv_write_apply_emulate),
    KERN_VARIANT(index_write, "avx512 emulated", CPU_NEED_AVX2, index_write_apply_emulate),
    KERN_VARIANT(gather, "avx512 emulated", CPU_NEED_AVX2, gather_apply_emulate),
    KERN_VARIANT(index_quant, "avx512 emulated", CPU_NEED_AVX2, index_quant_apply_emulate),
    KERN_VARIANT(gemm, "avx512 emulated", CPU_NEED_AVX2, gemm_apply_emulate),
    KERN_VARIANT(gemm, "avx512bf16 emulated", CPU_NEED_AVX2, gemm_apply_emulate_bf16),
    KERN_VARIANT(gemm, "avx512bf16 vbmi emulated", CPU_NEED_AVX2, gemm_apply_emulate_vbmi),
    KERN_VARIANT(gemm, "amx emulated", CPU_NEED_AVX2, gemm_apply_emulate_amx),
};

/* Fills t with variant number i (from 0) of `op` among those that can run here; NULL when there are no more,
 * else its name. With TILE_TRAP, of the AMX variant alone, whose tiles are instructions. */
static inline const char *table_nth(kern_table *t, kern_op op, int32_t i)
{
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    const int32_t n_emulated = sizeof g_emulated / sizeof *g_emulated;
    for (int32_t j = 0; j < n + n_emulated; j++) {
        const kern_variant *v = j < n ? &all[j] : &g_emulated[j - n];
#ifdef TILE_TRAP
        if (strcmp(v->name, "amx emulated") != 0) {
            continue;
        }
        tile_trap_install();
#endif
        if (v->op == op && cpu_has(cpu_features(), v->features) && i-- == 0) {
            memset(t, 0, sizeof *t);
            v->apply(t);
            return v->name;
        }
    }
    return NULL;
}

#endif
