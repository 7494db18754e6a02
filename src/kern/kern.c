/* kern.c - the list of variants and the choice among them.
 *
 * The list holds every implementation of every op: the reference first, then better ones in rising
 * order, so that the last one whose features are allowed wins. A variant of an instruction set adds
 * one line here and its file in CMakeLists.txt; its apply function sets the op's slots and nothing
 * else. No shape enters the choice. Variants for CUDA have a list of their own (cuda/init.c).
 */
#include "kern/kern.h"

#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "base/err.h"
#include "kern/cuda/cuda.h"
#include "kern/ref/ref.h"
#include "kern/x86/attn_x86.h"
#include "kern/x86/gemm_x86.h"
#include "kern/x86/index_x86.h"
#include "kern/x86/merge_x86.h"
#include "kern/x86/mha_x86.h"
#include "kern/x86/ops_x86.h"

static const kern_variant g_variants[] = {
#define KERN_REF_VARIANT(op) KERN_VARIANT(op, "ref", 0, ref_apply_##op),
    KERN_OP_LIST(KERN_REF_VARIANT)
#undef KERN_REF_VARIANT
#ifdef __x86_64__
    KERN_VARIANT(attn, "avx2", CPU_NEED_AVX2, attn_apply_avx2),
    KERN_VARIANT(attn, "avx512", CPU_NEED_AVX512, attn_apply_avx512),
    KERN_VARIANT(attn, "avx512bf16", CPU_NEED_AVX512BF16, attn_apply_avx512bf16),
    KERN_VARIANT(attn, "amx", CPU_NEED_AMX, attn_apply_amx),
    KERN_VARIANT(merge, "avx2", CPU_NEED_AVX2, merge_apply_avx2),
    KERN_VARIANT(merge, "avx512", CPU_NEED_AVX512, merge_apply_avx512),
    KERN_VARIANT(quant_q, "avx2", CPU_NEED_AVX2, quant_q_apply_avx2),
    KERN_VARIANT(quant_q, "avx512", CPU_NEED_AVX512, quant_q_apply_avx512),
    KERN_VARIANT(index_score, "avx2", CPU_NEED_AVX2, index_score_apply_avx2),
    KERN_VARIANT(index_score, "avx512bf16", CPU_NEED_AVX512BF16, index_score_apply_avx512),
    KERN_VARIANT(index_score, "amx", CPU_NEED_AMX, index_score_apply_amx),
    KERN_VARIANT(topk, "avx2", CPU_NEED_AVX2, topk_apply_avx2),
    KERN_VARIANT(topk, "avx512", CPU_NEED_AVX512, topk_apply_avx512),
    KERN_VARIANT(topk_merge, "avx2", CPU_NEED_AVX2, topk_merge_apply_avx2),
    KERN_VARIANT(topk_merge, "avx512", CPU_NEED_AVX512, topk_merge_apply_avx512),
    KERN_VARIANT(localise, "avx2", CPU_NEED_AVX2, localise_apply_avx2),
    KERN_VARIANT(index_quant, "avx2", CPU_NEED_AVX2, index_quant_apply_avx2),
    KERN_VARIANT(index_quant, "avx512", CPU_NEED_AVX512, index_quant_apply_avx512),
    /* the last one wins: on the Xeon of docs/performance.md AVX2 writes as fast or faster */
    KERN_VARIANT(kv_write, "avx512", CPU_NEED_AVX512, kv_write_apply_avx512),
    KERN_VARIANT(kv_write, "avx2", CPU_NEED_AVX2, kv_write_apply_avx2),
    KERN_VARIANT(index_write, "avx512", CPU_NEED_AVX512, index_write_apply_avx512),
    KERN_VARIANT(index_write, "avx2", CPU_NEED_AVX2, index_write_apply_avx2),
    KERN_VARIANT(gather, "avx2", CPU_NEED_AVX2, gather_apply_avx2),
    KERN_VARIANT(gather, "avx512", CPU_NEED_AVX512, gather_apply_avx512),
    KERN_VARIANT(norm, "avx2", CPU_NEED_AVX2, norm_apply_avx2),
    KERN_VARIANT(norm, "avx512", CPU_NEED_AVX512, norm_apply_avx512),
    KERN_VARIANT(rope, "avx2", CPU_NEED_AVX2, rope_apply_avx2),
    KERN_VARIANT(rope, "avx512", CPU_NEED_AVX512, rope_apply_avx512),
    KERN_VARIANT(act, "avx2", CPU_NEED_AVX2, act_apply_avx2),
    KERN_VARIANT(act, "avx512", CPU_NEED_AVX512, act_apply_avx512),
    KERN_VARIANT(route, "avx2", CPU_NEED_AVX2, route_apply_avx2),
    KERN_VARIANT(route, "avx512", CPU_NEED_AVX512, route_apply_avx512),
    KERN_VARIANT(gemm, "avx2", CPU_NEED_AVX2, gemm_apply_avx2),
    KERN_VARIANT(gemm, "avx512", CPU_NEED_AVX512, gemm_apply_avx512),
    KERN_VARIANT(gemm, "avx512bf16", CPU_NEED_AVX512BF16, gemm_apply_avx512bf16),
    KERN_VARIANT(gemm, "amx", CPU_NEED_AMX | CPU_AVX512VBMI, gemm_apply_amx),
    KERN_VARIANT(mha, "avx2", CPU_NEED_AVX2, mha_apply_avx2),
    KERN_VARIANT(mha, "avx512", CPU_NEED_AVX512, mha_apply_avx512),
    KERN_VARIANT(mha, "avx512bf16", CPU_NEED_AVX512BF16, mha_apply_avx512bf16),
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

const kern_variant *kern_variants_cuda(int32_t *n)
{
    return cuda_variants(n);
}

/* The variants that a table may be filled from. */
typedef struct kern_list {
    const kern_variant *v;
    int32_t n;
    uint32_t features;
} kern_list;

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
static kvs_status override_one(kern_table *t, const kern_list *list, const char *text, size_t len,
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
    for (int32_t i = 0; i < list->n; i++) {
        const kern_variant *v = &list->v[i];
        if (v->op != op) {
            continue;
        }
        list_add(all, sizeof all, v->name);
        if (strlen(v->name) != n_name || memcmp(v->name, name, n_name) != 0) {
            continue;
        }
        if ((v->features & ~list->features) != 0) {
            char lacks[96];
            return err_set(
                err, KVS_UNSUPPORTED,
                "kernels: %s=%s needs what this machine or the CPU cap lacks (%s); take a "
                "lower variant or raise the cap",
                kern_op_name(op), v->name,
                cpu_describe(v->features & ~list->features, lacks, sizeof lacks));
        }
        apply(t, v);
        return KVS_OK;
    }
    return err_set(err, KVS_INVALID, "kernels: %s has no variant \"%.*s\"; it has %s",
                   kern_op_name(op), (int)(n_name < 32 ? n_name : 32), name, all);
}

static kvs_status fill(kern_table *t, const kern_list *list, const char *overrides, kvs_error *err)
{
    memset(t, 0, sizeof *t);
    for (int32_t i = 0; i < list->n; i++) {
        if ((list->v[i].features & ~list->features) == 0) {
            apply(t, &list->v[i]);
        }
    }
    const char *p = overrides != NULL ? overrides : "";
    while (*p != '\0') {
        const size_t len = strcspn(p, ",");
        TRY(override_one(t, list, p, len, err));
        p += len;
        if (*p == ',') {
            p++;
        }
    }
    return KVS_OK;
}

kvs_status kern_init(kern_table *t, uint32_t features, const char *overrides, kvs_error *err)
{
    const kern_list list = {g_variants, N_VARIANT, features};
    return fill(t, &list, overrides, err);
}

kvs_status kern_init_cuda(kern_table *t, const char *overrides, kvs_error *err)
{
    kern_list list = {NULL, 0, 0};
    list.v = kern_variants_cuda(&list.n);
    if (list.n == 0) {
        memset(t, 0, sizeof *t);
        return err_set(err, KVS_UNSUPPORTED, "kernels: this build has none for CUDA; build with the "
                                             "preset cuda, or run on the CPU");
    }
    return fill(t, &list, overrides, err);
}

kvs_status kern_need(const kern_table *t, const kern_op *ops, int32_t n, kvs_error *err)
{
    for (int32_t i = 0; i < n; i++) {
        if (t->variant[ops[i]] == NULL) {
            return err_set(err, KVS_UNSUPPORTED,
                           "kernels: there is no %s for this device; run on the CPU",
                           kern_op_name(ops[i]));
        }
    }
    return KVS_OK;
}
