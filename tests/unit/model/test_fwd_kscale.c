/* The checkpoint's scales of cached rows: used layer by layer where rows have one scale per tensor, without effect on
 * rows that have scales of their own or none. */
#include "unit/unit.h"

#include "tiny.h"

static void run(const wt *w, kvs_kv_format kv, tiny_result *out)
{
    tiny_run r = tiny_default();
    r.kv = kv;
    r.n_seq = 1;
    r.len[0] = 70;
    r.draft = 1;
    tiny_execute(w, &r, out);
}

static int same(const tiny_result *a, const tiny_result *b)
{
    const size_t bytes = (size_t)70 * TINY_VOCAB * sizeof(float);
    return memcmp(a->logits, b->logits, bytes) == 0 && memcmp(a->draft, b->draft, bytes) == 0;
}

static void rows_of_one_scale_take_the_checkpoints(void **state)
{
    (void)state;
    const tiny_spec spec = {.kind = TINY_V3, .type = GEMM_BF16, .seed = 5};
    wt *w = tiny_new(&spec);
    const int32_t n = w->h.n_layer + w->h.n_mtp;
    float scale[16];
    assert_in_range(n, 2, 16);
    for (int32_t i = 0; i < n; i++) {
        scale[i] = 1.0f;
    }
    tiny_result plain;
    tiny_result got;
    run(w, KVS_KV_FP8, &plain);
    w->k_scale = scale;
    run(w, KVS_KV_FP8, &got);
    assert_true(same(&plain, &got)); /* 1 is what is taken where there are none */
    tiny_result_free(&got);
    for (int32_t i = 0; i < n; i++) {
        scale[i] = 3.0f; /* of any layer: other roundings */
        run(w, KVS_KV_FP8, &got);
        assert_false(same(&plain, &got));
        /* the draft layer's alone leaves the main model as it was */
        const int main_same =
            memcmp(plain.logits, got.logits, (size_t)70 * TINY_VOCAB * sizeof(float)) == 0;
        assert_int_equal(main_same, i == w->h.n_layer);
        tiny_result_free(&got);
        scale[i] = 1.0f;
    }
    tiny_result_free(&plain);
    tiny_free(w);
}

static void other_rows_do_not_look_at_it(void **state)
{
    (void)state;
    static const kvs_kv_format kv[] = {KVS_KV_BF16, KVS_KV_F32};
    const tiny_spec spec = {.kind = TINY_V3, .type = GEMM_BF16, .seed = 5};
    wt *w = tiny_new(&spec);
    float scale[16];
    for (int32_t i = 0; i < 16; i++) {
        scale[i] = 3.0f;
    }
    for (size_t k = 0; k < UNIT_COUNT(kv); k++) {
        tiny_result plain;
        tiny_result got;
        w->k_scale = NULL;
        run(w, kv[k], &plain);
        w->k_scale = scale;
        run(w, kv[k], &got);
        assert_true(same(&plain, &got));
        tiny_result_free(&plain);
        tiny_result_free(&got);
    }
    tiny_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_one_scale_take_the_checkpoints),
        cmocka_unit_test(other_rows_do_not_look_at_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
