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
    print_message(
        "%-9s %-4s %-5s T %3d tp %d dcp %d: |logit| %.1e, draft %.1e, KL %.1e (most %.1e), "
        "top-1 %d/%d, sets %d/%d, ids %.4f\n",
        c->variant, c->dtype, c->mode, c->prompt, c->tp > 0 ? c->tp : 1, c->dcp > 0 ? c->dcp : 1,
        r->diff, r->draft_diff, r->kl, r->kl_most, r->top1, r->rows, r->sets - r->differ, r->sets,
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
            if (!everything && p != 1 && !is_any(mkmodel_variants[i], "glm52", "v2"))
                continue;
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

static void test_eps_of_the_config_and_drafts_in_f32(void **state)
{
    (void)state;
    for (int i = 0; mkmodel_variants[i] != NULL; i++) {
        const int drafts = has_drafts(mkmodel_variants[i]);
        for (int p = 0; p < PROMPTS; p++) {
            if (!everything && (drafts ? p == 2 && !is_any(mkmodel_variants[i], "glm52", "v32")
                                       : strcmp(mkmodel_variants[i], "moonlight") != 0 || p != 1))
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

int main(int argc, char **argv)
{
    everything = argc > 1 && strcmp(argv[1], "all") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transformers_in_f32),
        cmocka_unit_test(test_eps_of_the_config_and_drafts_in_f32),
        cmocka_unit_test(test_ranks_answer_the_same),
    };
    return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
