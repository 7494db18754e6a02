/* The forward pass answers what transformers answers, and where transformers has no answer (drafts,
 * quantised caches, FP8 weights) what a double-precision pass written from the formulas answers. */
#include "unit/unit.h"

#include "oracle/mkmodel.h"
#include "tiny_run.h"

enum { PROMPTS = 3 };
static const int32_t prompts[PROMPTS] = {12, 96, 300};

/* With the argument `all` every variant runs every prompt; else a share of them that stays quick. */
static int everything;

static int is_any(const char *name, const char *a, const char *b)
{
    return strcmp(name, a) == 0 || strcmp(name, b) == 0;
}

static void show(const tiny_case *c, const tiny_result *r)
{
    print_message("%-9s %-4s %-5s T %3d tp %d dcp %d: |logit| %.1e (median %.1e), draft %.1e, "
                  "KL %.1e (most %.1e), top-1 %d/%d, sets %d/%d, ids %.4f\n",
                  c->variant, c->dtype, c->mode, c->prompt, c->tp > 0 ? c->tp : 1,
                  c->dcp > 0 ? c->dcp : 1, r->diff, r->median, r->draft_diff, r->kl, r->kl_most,
                  r->top1, r->rows, r->sets - r->differ, r->sets,
                  r->ids > 0 ? (double)r->common / (double)r->ids : 1.0);
}

static int has_drafts(const char *variant)
{
    char msg[256];
    golden *const g = golden_open(variant, msg, sizeof msg);
    assert_non_null(g);
    const int yes = golden_get(g, "exact.mtp.logits.12").n > 0;
    golden_close(g);
    return yes;
}

/* f32 throughout: as transformers to 1e-3 (in fact far below), the same sets. */
static void assert_exact(const tiny_case *c)
{
    const tiny_result r = tiny_measure(c);
    show(c, &r);
    assert_int_equal(r.rows, 18);
    assert_true(r.diff < 1e-3);
    assert_true(r.draft_diff < 1e-3);
    assert_int_equal(r.wrong, 0);
    assert_int_equal(r.top1, r.rows);
}

static void test_transformers_in_f32(void **state)
{
    (void)state;
    for (int i = 0; mkmodel_variants[i] != NULL; i++) {
        for (int p = 0; p < PROMPTS; p++) {
            if (!everything && p != 1 && (p == 2 || !is_any(mkmodel_variants[i], "glm52", "v2")))
                continue;
            if (UNIT_SANITIZED && !is_any(mkmodel_variants[i], "k2", "v2"))
                continue; /* below with drafts */
            const tiny_case c = {.variant = mkmodel_variants[i],
                                 .dtype = "f32",
                                 .mode = "hf",
                                 .prompt = prompts[p],
                                 .kv = KVS_KV_F32,
                                 .index_kv = KVS_INDEX_F32,
                                 .latent_eps = 1e-6F};
            assert_exact(&c);
        }
    }
}

/* Prompt rows of dense layers in the form of generated ones. */
static void test_absorbed_prompt_rows_in_f32(void **state)
{
    (void)state;
    static const char *const some[] = {"v3", "v2", "glm47"};
    for (size_t i = 0; i < (everything ? UNIT_COUNT(some) : 1); i++) {
        const tiny_case c = {.variant = some[i],
                             .dtype = "f32",
                             .mode = "hf",
                             .prompt = 96,
                             .kv = KVS_KV_F32,
                             .index_kv = KVS_INDEX_F32,
                             .latent_eps = 1e-6F,
                             .absorbed = 1};
        assert_exact(&c);
    }
}

static void test_eps_of_the_config_and_drafts_in_f32(void **state)
{
    (void)state;
    for (int i = 0; mkmodel_variants[i] != NULL; i++) {
        const int drafts = has_drafts(mkmodel_variants[i]);
        for (int p = 0; p < PROMPTS; p++) {
            if (!everything && (drafts ? p == 2 && strcmp(mkmodel_variants[i], "glm52") != 0
                                       : strcmp(mkmodel_variants[i], "moonlight") != 0 || p != 1))
                continue;
            if (UNIT_SANITIZED && drafts && p != (is_any(mkmodel_variants[i], "glm52", "v3") ? 0 : 1))
                continue;
            const tiny_case c = {.variant = mkmodel_variants[i],
                                 .dtype = "f32",
                                 .mode = "exact",
                                 .prompt = prompts[p],
                                 .chunk = p == 2 ? 128 : 0,
                                 .kv = KVS_KV_F32,
                                 .index_kv = KVS_INDEX_F32,
                                 .drafts = drafts};
            assert_exact(&c);
        }
    }
}

static void test_ranks_answer_the_same(void **state)
{
    (void)state;
    static const char *const some[] = {"glm52", "v32", "v3"};
    for (size_t i = 0; i < UNIT_COUNT(some); i++) {
        const tiny_case c = {.variant = some[i],
                             .dtype = "f32",
                             .mode = "exact",
                             .prompt = 96,
                             .chunk = 40,
                             .kv = KVS_KV_F32,
                             .index_kv = KVS_INDEX_F32,
                             .tp = 4,
                             .dcp = i == 2 ? 2 : 4,
                             .drafts = 1};
        assert_exact(&c);
    }
}

static const char *const sparse[] = {"glm52", "glm5", "v32", NULL};
static const char *const dense[] = {"v3", "v2", "k2", "moonlight", "glm47", NULL};
static const char *const dense_drafts[] = {"v3", "glm47", NULL};
static const char *const with_drafts[] = {"glm52", "glm5", "v32", "v3", "glm47", NULL};

/* One layer with everything in it but other layers. */
static void assert_layer(const char *const *variants, tiny_case c, double diff, double kl)
{
    for (int i = 0; variants[i] != NULL; i++) {
        if (!everything && !is_any(variants[i], "glm52", "v3"))
            continue;
        c.variant = variants[i];
        const tiny_result r = tiny_measure_layer(&c);
        print_message("%-9s %-4s %-5s layer: |logit| %.1e (median %.1e), KL %.1e, top-1 %d/%d\n",
                      c.variant, c.dtype, c.mode, r.diff, r.median, r.kl, r.top1, r.rows);
        assert_int_equal(r.rows, 8);
        assert_true(r.diff < diff);
        assert_true(r.kl < kl);
        assert_int_equal(r.top1, r.rows);
    }
}

static void test_a_layer_with_quantised_rows_and_weights(void **state)
{
    (void)state;
    tiny_case c = {.dtype = "f32", .mode = "exact", .kv = KVS_KV_F32, .index_kv = KVS_INDEX_F32};
    assert_layer(with_drafts, c, 1e-4, 1e-10);
    c.index_kv = KVS_INDEX_FP8;
    c.mode = "ds";
    c.kv = KVS_KV_FP8_DS_MLA;
    assert_layer(with_drafts, c, 1e-2, 1e-6);
    c.mode = "had";
    c.hadamard = 1;
    assert_layer(sparse, c, 1e-2, 1e-6);
    c.hadamard = 0;
    c.mode = "kv8";
    c.kv = KVS_KV_FP8;
    assert_layer(dense_drafts, c, 1e-2, 1e-6);
    c.mode = c.dtype = "bf16";
    c.kv = KVS_KV_BF16;
    assert_layer(with_drafts, c, 6e-2, 2e-5);
    c.mode = c.dtype = "fp8";
    c.kv = KVS_KV_FP8_DS_MLA;
    assert_layer(with_drafts, c, 6e-2, 2e-5);
}

typedef struct bound {
    double median; /* of the rows' largest |logit - expected| */
    double kl;     /* mean of the rows */
    int32_t top1;  /* least number of rows of 18 */
    double ids;    /* least share of selected positions in common */
} bound;

static void assert_model(const char *const *variants, tiny_case c, bound b)
{
    for (int i = 0; variants[i] != NULL; i++) {
        c.variant = variants[i];
        const tiny_result r = tiny_measure(&c);
        show(&c, &r);
        assert_int_equal(r.rows, 18);
        assert_true(r.median < b.median);
        assert_true(r.kl < b.kl);
        assert_true(r.top1 >= b.top1);
        assert_true((double)r.common >= b.ids * (double)r.ids);
        assert_true((double)r.common0 >= 0.99 * (double)r.ids0); /* nothing has grown yet */
    }
}

/* Random weights, 16 keys of 300 and 2 to 4 experts: a rounding that falls the other way becomes another key or
 * another expert, and that moves logits by tenths. Noise of 1e-7 on each product of the double-precision pass
 * moves its own results as far as they differ here, so whole models are held to statistics. */
static void test_models_with_quantised_rows_and_weights(void **state)
{
    (void)state;
    static const bound smooth = {1e-1, 5e-2, 15, 1};
    static const bound rough = {2.5, 3e-1, 6, 0.8};
    tiny_case c = {.dtype = "f32",
                   .mode = "ds",
                   .prompt = 300,
                   .chunk = 64,
                   .kv = KVS_KV_FP8_DS_MLA,
                   .index_kv = KVS_INDEX_FP8};
    assert_model(sparse, c, rough);
    assert_model(dense, c, smooth);
    c.mode = "kv8";
    c.kv = KVS_KV_FP8;
    assert_model(dense, c, smooth);
    c.mode = c.dtype = "bf16";
    c.kv = KVS_KV_BF16;
    assert_model(sparse, c, rough);
    assert_model(dense, c, smooth);
    c.mode = c.dtype = "fp8";
    c.kv = KVS_KV_FP8_DS_MLA;
    assert_model(sparse, c, rough);
    assert_model(dense, c, smooth);
    c.mode = "had";
    c.dtype = "f32";
    c.hadamard = 1;
    assert_model(sparse, c, rough);
}

int main(int argc, char **argv)
{
    everything = argc > 1 && strcmp(argv[1], "all") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transformers_in_f32),
        cmocka_unit_test(test_absorbed_prompt_rows_in_f32),
        cmocka_unit_test(test_eps_of_the_config_and_drafts_in_f32),
        cmocka_unit_test(test_ranks_answer_the_same),
        cmocka_unit_test(test_a_layer_with_quantised_rows_and_weights),
    };
    const struct CMUnitTest slow[] = {
        cmocka_unit_test(test_models_with_quantised_rows_and_weights),
    };
    int failed = cmocka_run_group_tests_name("golden", tests, NULL, NULL);
    if (everything)
        failed += cmocka_run_group_tests_name("golden, whole models", slow, NULL, NULL);
    return failed;
}
