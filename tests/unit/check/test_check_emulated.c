/* The AVX-512 kernels, compiled with emulated vectors, through the checking tool: what a machine
 * with AVX-512 would check on the hardware. KVS_TEST_LONG=1 runs all quick cases instead of the
 * first ones. */
#include "unit/unit.h"

#include "base/cpu.h"
#include "check/check.h"
#include "kern/x86/attn_x86.h"
#include "kern/x86/mha_x86.h"
#include "unit/kern/kern_x86.h"

extern const attn_isa attn_isa_avx512_emulated;
extern const attn_isa attn_isa_avx512bf16_emulated;
extern const mha_isa mha_isa_avx512_emulated;
extern const mha_isa mha_isa_avx512bf16_emulated;
extern const attn_isa attn_isa_amx_emulated;

static void attn_avx512(const attn_args *a, dev_queue *q)
{
    static const attn_kernels k = {&attn_isa_avx512_emulated, &attn_isa_avx512_emulated};
    attn_x86_run(&k, a, q);
}

static void attn_avx512bf16(const attn_args *a, dev_queue *q)
{
    static const attn_kernels k = {&attn_isa_avx512_emulated, &attn_isa_avx512bf16_emulated};
    attn_x86_run(&k, a, q);
}

static void attn_amx(const attn_args *a, dev_queue *q)
{
    static const attn_kernels k = {&attn_isa_avx512_emulated, &attn_isa_amx_emulated};
    attn_x86_run(&k, a, q);
}

static void apply_avx512(kern_table *t)
{
    t->attn = attn_avx512;
    t->attn_scratch = attn_x86_scratch;
}

static void apply_avx512bf16(kern_table *t)
{
    t->attn = attn_avx512bf16;
    t->attn_scratch = attn_x86_scratch;
}

static void mha_avx512(const mha_args *a, dev_queue *q)
{
    static const mha_kernels k = {&mha_isa_avx512_emulated, &mha_isa_avx512_emulated};
    mha_x86_run(&k, a, q);
}

static void mha_avx512bf16(const mha_args *a, dev_queue *q)
{
    static const mha_kernels k = {&mha_isa_avx512_emulated, &mha_isa_avx512bf16_emulated};
    mha_x86_run(&k, a, q);
}

static void apply_mha_avx512(kern_table *t)
{
    t->mha = mha_avx512;
    t->mha_scratch = mha_x86_scratch;
}

static void apply_mha_avx512bf16(kern_table *t)
{
    t->mha = mha_avx512bf16;
    t->mha_scratch = mha_x86_scratch;
}

static void apply_amx(kern_table *t)
{
    t->attn = attn_amx;
    t->attn_scratch = attn_x86_scratch;
}

static const kern_variant g_attn[] = {
    KERN_VARIANT(attn, "avx512 emulated", CPU_NEED_AVX2, apply_avx512),
    KERN_VARIANT(attn, "avx512bf16 emulated", CPU_NEED_AVX2, apply_avx512bf16),
    KERN_VARIANT(mha, "avx512 emulated", CPU_NEED_AVX2, apply_mha_avx512),
    KERN_VARIANT(mha, "avx512bf16 emulated", CPU_NEED_AVX2, apply_mha_avx512bf16),
    KERN_VARIANT(attn, "amx emulated", CPU_NEED_AVX2, apply_amx),
};

static void keep_failure(void *ctx, const char *text)
{
    if (strstr(text, " FAIL ") != NULL) {
        snprintf(ctx, 512, "%s", text);
    }
}

/* The references of all ops, then the emulated variants. */
static int32_t list_variants(kern_variant *list, int32_t cap)
{
    int32_t n_all = 0;
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n_all);
    for (int32_t i = 0; i < n_all; i++) {
        if (all[i].features == 0) {
            assert_true(n < cap);
            list[n++] = all[i];
        }
    }
    for (size_t i = 0; i < UNIT_COUNT(g_attn) + UNIT_COUNT(g_emulated); i++) {
        assert_true(n < cap);
        list[n++] = i < UNIT_COUNT(g_attn) ? g_attn[i] : g_emulated[i - UNIT_COUNT(g_attn)];
    }
    return n;
}

static void check_op_emulated(kern_op op)
{
    kern_variant list[64];
    const int32_t n = list_variants(list, 64);
    char failure[512] = "";
    kvs_check_result result;
    kvs_check_config c = kvs_check_config_default();
    c.op = kern_op_name(op);
    c.quick = 1;
    c.line = keep_failure;
    c.ctx = failure;
    c.result = &result;
    const check_filter only = {NULL, getenv("KVS_TEST_LONG") != NULL ? 0 : 2};
    kvs_error err;
    if (check_run_variants(&c, list, n, only, &err) != KVS_OK) {
        fail_msg("%s: %s", err.text, failure);
    }
    assert_int_equal(result.n_skipped, 0);
}

static void emulated_kernels_pass(void **state)
{
    (void)state;
    if (!cpu_has(cpu_features(), CPU_NEED_AVX2)) {
        skip();
    }
    int seen[KERN_N_OP] = {0};
    seen[KERN_OP_attn] = 1;
    seen[KERN_OP_mha] = 1;
    for (size_t i = 0; i < UNIT_COUNT(g_emulated); i++) {
        seen[g_emulated[i].op] = 1;
    }
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (seen[op]) {
            check_op_emulated((kern_op)op);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(emulated_kernels_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
