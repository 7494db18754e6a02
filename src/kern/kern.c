/* kern.c - the list of variants and the choice among them.
 *
 * The list holds every implementation of every op: the reference first, then better ones in rising
 * order, so that the last one whose features are allowed wins. A variant of an instruction set adds
 * one line here and its file in CMakeLists.txt; its apply function sets the op's slots and nothing
 * else. No shape enters the choice.
 */
#include "kern/kern.h"

#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "base/err.h"
#include "kern/ref/ref.h"
#include "kern/x86/attn_x86.h"
#include "kern/x86/gemm_x86.h"
#include "kern/x86/index_x86.h"
#include "kern/x86/merge_x86.h"
#include "kern/x86/ops_x86.h"

static const kern_variant g_variants[] = {
#define KERN_REF_VARIANT(op) {KERN_OP_##op, "ref", 0, ref_apply_##op},
    KERN_OP_LIST(KERN_REF_VARIANT)
#undef KERN_REF_VARIANT
#ifdef __x86_64__
    {KERN_OP_attn, "avx2", CPU_NEED_AVX2, attn_apply_avx2},
    {KERN_OP_attn, "avx512", CPU_NEED_AVX512, attn_apply_avx512},
    {KERN_OP_attn, "avx512bf16", CPU_NEED_AVX512BF16, attn_apply_avx512bf16},
    {KERN_OP_merge, "avx2", CPU_NEED_AVX2, merge_apply_avx2},
    {KERN_OP_merge, "avx512", CPU_NEED_AVX512, merge_apply_avx512},
    {KERN_OP_quant_q, "avx2", CPU_NEED_AVX2, quant_q_apply_avx2},
    {KERN_OP_quant_q, "avx512", CPU_NEED_AVX512, quant_q_apply_avx512},
    {KERN_OP_index_score, "avx2", CPU_NEED_AVX2, index_score_apply_avx2},
    {KERN_OP_index_score, "avx512bf16", CPU_NEED_AVX512BF16, index_score_apply_avx512},
    {KERN_OP_topk, "avx2", CPU_NEED_AVX2, topk_apply_avx2},
    {KERN_OP_topk, "avx512", CPU_NEED_AVX512, topk_apply_avx512},
    {KERN_OP_topk_merge, "avx2", CPU_NEED_AVX2, topk_merge_apply_avx2},
    {KERN_OP_topk_merge, "avx512", CPU_NEED_AVX512, topk_merge_apply_avx512},
    {KERN_OP_localise, "avx2", CPU_NEED_AVX2, localise_apply_avx2},
    {KERN_OP_index_quant, "avx2", CPU_NEED_AVX2, index_quant_apply_avx2},
    {KERN_OP_index_quant, "avx512", CPU_NEED_AVX512, index_quant_apply_avx512},
    {KERN_OP_kv_write, "avx2", CPU_NEED_AVX2, kv_write_apply_avx2},
    {KERN_OP_kv_write, "avx512", CPU_NEED_AVX512, kv_write_apply_avx512},
    {KERN_OP_index_write, "avx2", CPU_NEED_AVX2, index_write_apply_avx2},
    {KERN_OP_index_write, "avx512", CPU_NEED_AVX512, index_write_apply_avx512},
    {KERN_OP_gather, "avx2", CPU_NEED_AVX2, gather_apply_avx2},
    {KERN_OP_gather, "avx512", CPU_NEED_AVX512, gather_apply_avx512},
    {KERN_OP_norm, "avx2", CPU_NEED_AVX2, norm_apply_avx2},
    {KERN_OP_norm, "avx512", CPU_NEED_AVX512, norm_apply_avx512},
    {KERN_OP_rope, "avx2", CPU_NEED_AVX2, rope_apply_avx2},
    {KERN_OP_rope, "avx512", CPU_NEED_AVX512, rope_apply_avx512},
    {KERN_OP_act, "avx2", CPU_NEED_AVX2, act_apply_avx2},
    {KERN_OP_act, "avx512", CPU_NEED_AVX512, act_apply_avx512},
    {KERN_OP_route, "avx2", CPU_NEED_AVX2, route_apply_avx2},
    {KERN_OP_route, "avx512", CPU_NEED_AVX512, route_apply_avx512},
    {KERN_OP_gemm, "avx2", CPU_NEED_AVX2, gemm_apply_avx2},
    {KERN_OP_gemm, "avx512", CPU_NEED_AVX512, gemm_apply_avx512},
    {KERN_OP_gemm, "avx512bf16", CPU_NEED_AVX512BF16, gemm_apply_avx512bf16},
#endif
};

enum { N_VARIANT = sizeof g_variants / sizeof *g_variants };

const char *kern_op_name(kern_op op)
{
    static const char *const names[KERN_N_OP] = {
#define KERN_OP_NAME(name) #name,
        KERN_OP_LIST(KERN_OP_NAME)
#undef KERN_OP_NAME
    };
    return (int32_t)op >= 0 && op < KERN_N_OP ? names[op] : "?";
}

const kern_variant *kern_variants(int32_t *n)
{
    *n = N_VARIANT;
    return g_variants;
}

static void apply(kern_table *t, const kern_variant *v)
{
    v->apply(t);
    t->variant[v->op] = v->name;
}

/* Adds ", name" to a list of at most `cap` bytes. */
static void list_add(char *list, size_t cap, const char *name)
{
    const size_t n = strlen(list);
    snprintf(list + n, cap - n, "%s%s", n > 0 ? ", " : "", name);
}

static kvs_status op_find(const char *name, size_t len, kern_op *op, kvs_error *err)
{
    char all[160] = "";
    for (int32_t i = 0; i < KERN_N_OP; i++) {
        const char *known = kern_op_name((kern_op)i);
        if (strlen(known) == len && memcmp(known, name, len) == 0) {
            *op = (kern_op)i;
            return KVS_OK;
        }
        list_add(all, sizeof all, known);
    }
    return err_set(err, KVS_INVALID, "kernels: unknown op \"%.*s\"; ops are %s",
                   (int)(len < 32 ? len : 32), name, all);
}

/* Applies one "op=variant" of `len` bytes. */
static kvs_status override_one(kern_table *t, uint32_t features, const char *text, size_t len,
                               kvs_error *err)
{
    const char *eq = memchr(text, '=', len);
    if (eq == NULL) {
        return err_set(err, KVS_INVALID, "kernels: \"%.*s\" is not of the form op=variant",
                       (int)(len < 64 ? len : 64), text);
    }
    kern_op op = KERN_N_OP;
    TRY(op_find(text, (size_t)(eq - text), &op, err));
    const char *name = eq + 1;
    const size_t n_name = len - (size_t)(name - text);
    char all[128] = "";
    for (int32_t i = 0; i < N_VARIANT; i++) {
        const kern_variant *v = &g_variants[i];
        if (v->op != op) {
            continue;
        }
        list_add(all, sizeof all, v->name);
        if (strlen(v->name) != n_name || memcmp(v->name, name, n_name) != 0) {
            continue;
        }
        if ((v->features & ~features) != 0) {
            char lacks[96];
            return err_set(
                err, KVS_UNSUPPORTED,
                "kernels: %s=%s needs what this machine or the CPU cap lacks (%s); take a "
                "lower variant or raise the cap",
                kern_op_name(op), v->name,
                cpu_describe(v->features & ~features, lacks, sizeof lacks));
        }
        apply(t, v);
        return KVS_OK;
    }
    return err_set(err, KVS_INVALID, "kernels: %s has no variant \"%.*s\"; it has %s",
                   kern_op_name(op), (int)(n_name < 32 ? n_name : 32), name, all);
}

kvs_status kern_init(kern_table *t, uint32_t features, const char *overrides, kvs_error *err)
{
    memset(t, 0, sizeof *t);
    for (int32_t i = 0; i < N_VARIANT; i++) {
        if ((g_variants[i].features & ~features) == 0) {
            apply(t, &g_variants[i]);
        }
    }
    const char *p = overrides != NULL ? overrides : "";
    while (*p != '\0') {
        const size_t len = strcspn(p, ",");
        TRY(override_one(t, features, p, len, err));
        p += len;
        if (*p == ',') {
            p++;
        }
    }
    return KVS_OK;
}
