/* The table of kernels: what the list holds, what kern_init chooses, what it refuses. */
#include "unit/unit.h"

#include "base/cpu.h"
#include "kern/kern.h"

static void names_of_ops(void **state)
{
    (void)state;
    assert_string_equal(kern_op_name(KERN_OP_attn), "attn");
    assert_string_equal(kern_op_name(KERN_OP_gather), "gather");
    assert_string_equal(kern_op_name(KERN_N_OP), "?");
    assert_string_equal(kern_op_name((kern_op)-1), "?");
}

/* The slot of an op in a table, as bytes; ops with a scratch query own two. */
static int slots_filled(const kern_table *t, kern_op op)
{
    switch (op) {
    case KERN_OP_attn:
        return t->attn != NULL && t->attn_scratch != NULL;
    case KERN_OP_merge:
        return t->merge != NULL;
    case KERN_OP_quant_q:
        return t->quant_q != NULL;
    case KERN_OP_index_quant:
        return t->index_quant != NULL;
    case KERN_OP_index_score:
        return t->index_score != NULL && t->index_score_scratch != NULL;
    case KERN_OP_index_select:
        return t->index_select != NULL && t->index_select_scratch != NULL;
    case KERN_OP_topk:
        return t->topk != NULL && t->topk_scratch != NULL;
    case KERN_OP_topk_merge:
        return t->topk_merge != NULL && t->topk_merge_scratch != NULL;
    case KERN_OP_localise:
        return t->localise != NULL && t->localise_scratch != NULL;
    case KERN_OP_kv_write:
        return t->kv_write != NULL;
    case KERN_OP_index_write:
        return t->index_write != NULL;
    case KERN_OP_mha:
        return t->mha != NULL && t->mha_scratch != NULL;
    case KERN_OP_gemm:
        return t->gemm != NULL && t->gemm_scratch != NULL;
    case KERN_OP_gather:
        return t->gather != NULL;
    case KERN_OP_norm:
        return t->norm != NULL;
    case KERN_OP_rope:
        return t->rope != NULL;
    case KERN_OP_act:
        return t->act != NULL;
    case KERN_OP_route:
        return t->route != NULL;
    default:
        return 0;
    }
}

static void every_op_begins_with_the_reference(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        int32_t first = 0;
        while (first < n && (int32_t)v[first].op != op) {
            first++;
        }
        assert_true(first < n);
        assert_string_equal(v[first].name, "ref");
        assert_int_equal(v[first].features, 0);
    }
}

static void a_variant_sets_its_own_slots_only(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        kern_table t;
        memset(&t, 0, sizeof t);
        v[i].apply(&t);
        for (int32_t op = 0; op < KERN_N_OP; op++) {
            assert_int_equal(slots_filled(&t, (kern_op)op), op == (int32_t)v[i].op);
        }
    }
}

static void names_differ_within_an_op(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            assert_true(v[i].op != v[j].op || strcmp(v[i].name, v[j].name) != 0);
        }
    }
}

static void no_features_give_the_reference(void **state)
{
    (void)state;
    kern_table t;
    assert_int_equal(kern_init(&t, 0, NULL, NULL), KVS_OK);
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        assert_string_equal(t.variant[op], "ref");
        assert_true(slots_filled(&t, (kern_op)op));
    }
}

/* The last variant of the list whose features are allowed, for the features of every level. */
static void the_best_allowed_variant_wins(void **state)
{
    (void)state;
    const uint32_t levels[] = {0, CPU_NEED_AVX2, CPU_NEED_AVX512, CPU_NEED_AVX512BF16, UINT32_MAX};
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (size_t l = 0; l < UNIT_COUNT(levels); l++) {
        kern_table t;
        assert_int_equal(kern_init(&t, levels[l], "", NULL), KVS_OK);
        for (int32_t op = 0; op < KERN_N_OP; op++) {
            const char *best = NULL;
            for (int32_t i = 0; i < n; i++) {
                if ((int32_t)v[i].op == op && cpu_has(levels[l], v[i].features)) {
                    best = v[i].name;
                }
            }
            assert_string_equal(t.variant[op], best);
        }
    }
}

static void overrides_apply_in_order(void **state)
{
    (void)state;
    kern_table best;
    kern_table t;
    assert_int_equal(kern_init(&best, UINT32_MAX, NULL, NULL), KVS_OK);
    assert_int_equal(kern_init(&t, UINT32_MAX, "topk=ref,merge=ref", NULL), KVS_OK);
    kern_table ref;
    assert_int_equal(kern_init(&ref, 0, NULL, NULL), KVS_OK);
    assert_string_equal(t.variant[KERN_OP_topk], "ref");
    assert_true(t.topk == ref.topk);
    assert_true(t.topk_scratch == ref.topk_scratch);
    assert_true(t.merge == ref.merge);
    assert_true(t.topk_merge == best.topk_merge);
    assert_string_equal(t.variant[KERN_OP_gather], best.variant[KERN_OP_gather]);
}

static void refuses(const char *overrides, uint32_t features, kvs_status code, const char *a,
                    const char *b)
{
    kern_table t;
    kvs_error err;
    memset(&err, 0, sizeof err);
    assert_int_equal(kern_init(&t, features, overrides, &err), code);
    assert_int_equal(err.code, code);
    if (strstr(err.text, a) == NULL || strstr(err.text, b) == NULL) {
        fail_msg("\"%s\" has neither \"%s\" nor \"%s\"", err.text, a, b);
    }
    assert_int_equal(kern_init(&t, features, overrides, NULL), code);
}

static void refusals_say_what_exists(void **state)
{
    (void)state;
    refuses("atn=ref", 0, KVS_INVALID, "\"atn\"", "localise");
    refuses("attn=fast", 0, KVS_INVALID, "\"fast\"", "ref");
    refuses("attn", 0, KVS_INVALID, "\"attn\"", "op=variant");
    refuses("attn=ref,,topk=ref", 0, KVS_INVALID, "op=variant", "");
    refuses("attn=ref,merge=", 0, KVS_INVALID, "merge", "ref");
    refuses("=ref", 0, KVS_INVALID, "unknown op", "attn");
    refuses("attn=re", 0, KVS_INVALID, "\"re\"", "ref");
    refuses("attn=reff", 0, KVS_INVALID, "\"reff\"", "ref");
    char longest[400];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    refuses(longest, 0, KVS_INVALID, "xxx", "");
}

static void a_missing_feature_is_named(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        if (v[i].features != 0) {
            char text[64];
            snprintf(text, sizeof text, "%s=%s", kern_op_name(v[i].op), v[i].name);
            refuses(text, 0, KVS_UNSUPPORTED, text, "avx2");
            kern_table t;
            assert_int_equal(kern_init(&t, v[i].features, text, NULL), KVS_OK);
            assert_string_equal(t.variant[v[i].op], v[i].name);
        }
    }
}

/* What holds for the list of the host holds for that of CUDA; ops may be absent from it. */
static void cuda_variants_set_their_own_slots_only(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants_cuda(&n);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(v[i].place, KERN_CUDA);
        assert_int_equal(v[i].features, 0);
        kern_table t;
        memset(&t, 0, sizeof t);
        v[i].apply(&t);
        for (int32_t op = 0; op < KERN_N_OP; op++) {
            assert_int_equal(slots_filled(&t, (kern_op)op), op == (int32_t)v[i].op);
        }
        for (int32_t j = 0; j < i; j++) {
            assert_true(v[i].op != v[j].op || strcmp(v[i].name, v[j].name) != 0);
        }
    }
    const kern_variant *host = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(host[i].place, KERN_HOST);
    }
}

static void a_cuda_table_has_no_slots_of_the_host(void **state)
{
    (void)state;
    int32_t n = 0;
    const kern_variant *v = kern_variants_cuda(&n);
    kern_table t;
    kvs_error err;
    if (n == 0) {
        assert_int_equal(kern_init_cuda(&t, NULL, &err), KVS_UNSUPPORTED);
        assert_non_null(strstr(err.text, "preset cuda"));
        assert_null(t.merge);
        return;
    }
    assert_int_equal(kern_init_cuda(&t, NULL, &err), KVS_OK);
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        const char *last = NULL;
        for (int32_t i = 0; i < n; i++) {
            last = (int32_t)v[i].op == op ? v[i].name : last;
        }
        assert_int_equal(slots_filled(&t, (kern_op)op), last != NULL);
        assert_true((last == NULL) == (t.variant[op] == NULL));
    }
    assert_int_equal(kern_init_cuda(&t, "merge=avx2", &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "merge has no variant \"avx2\""));
    assert_int_equal(kern_init_cuda(&t, "merge=sm90", &err), KVS_OK);
}

static void the_first_hole_of_a_table_is_named(void **state)
{
    (void)state;
    static const kern_op ops[] = {KERN_OP_merge, KERN_OP_route, KERN_OP_attn};
    kern_table t;
    kvs_error err;
    assert_int_equal(kern_init(&t, 0, NULL, NULL), KVS_OK);
    assert_int_equal(kern_need(&t, ops, 3, &err), KVS_OK);
    t.variant[KERN_OP_attn] = NULL;
    t.variant[KERN_OP_route] = NULL;
    assert_int_equal(kern_need(&t, ops, 1, &err), KVS_OK);
    assert_int_equal(kern_need(&t, ops, 3, &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no route for"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_of_ops),
        cmocka_unit_test(every_op_begins_with_the_reference),
        cmocka_unit_test(a_variant_sets_its_own_slots_only),
        cmocka_unit_test(names_differ_within_an_op),
        cmocka_unit_test(no_features_give_the_reference),
        cmocka_unit_test(the_best_allowed_variant_wins),
        cmocka_unit_test(overrides_apply_in_order),
        cmocka_unit_test(refusals_say_what_exists),
        cmocka_unit_test(a_missing_feature_is_named),
        cmocka_unit_test(cuda_variants_set_their_own_slots_only),
        cmocka_unit_test(a_cuda_table_has_no_slots_of_the_host),
        cmocka_unit_test(the_first_hole_of_a_table_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
