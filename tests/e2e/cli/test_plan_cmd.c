/* kvspan plan: the page, the JSON, files, exit codes. */
#include "prog.h"

#include <jansson.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static int64_t at(const json_t *root, const char *a, const char *b)
{
    const json_t *v = json_object_get(json_object_get(root, a), b);
    assert_true(json_is_integer(v));
    return json_integer_value(v);
}

static json_t *parse(const char *text)
{
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        fail_msg("%s at line %d", why.text, why.line);
    }
    return root;
}

static void json_on_standard_output_is_all_there_is(void **state)
{
    (void)state;
    prog p = RUN("plan", "--preset", "glm-5.2", "--dcp", "8", "--seqs", "4", "--mtp", "3", "--ctx",
                 "262144", "--mem", "131GiB", "--json", "-");
    assert_int_equal(p.code, 0);
    assert_string_equal(p.err, "");
    json_t *root = parse(p.out);
    assert_int_equal(at(root, "model", "parameters") + at(root, "model", "parameters_mtp"),
                     753329921024);
    assert_int_equal(at(root, "token_bytes", "total"), 54728);
    assert_int_equal(at(root, "settings", "mem"), 131LL << 30);
    assert_int_equal(at(root, "settings", "mtp"), 3);
    assert_int_equal(at(root, "rank_bytes", "page"), 64 * 54728);
    assert_int_equal(at(root, "tokens", "group"), 8 * 64 * at(root, "rank_bytes", "pages"));
    const json_t *x = json_object_get(root, "exchange");
    assert_int_equal(json_integer_value(json_object_get(x, "rows")), 16);
    assert_int_equal(at(x, "a2a", "q"), 16 * 8 * 576 * 2 * 7);
    assert_int_equal(json_array_size(json_object_get(root, "refusals")), 0);
    json_decref(root);
    prog_free(&p);
}

static void the_page_names_what_people_look_for(void **state)
{
    (void)state;
    prog p = RUN("plan", "--preset=deepseek-v3.2", "--dcp=4", "--seqs=2", "--gpus=16", "--tp=8");
    assert_int_equal(p.code, 0);
    static const char *const words[] = {
        "671.88 B parameters",
        "48,068",
        "latent rows",
        "index keys",
        "weights",
        "workspaces",
        "pages of 64",
        "stored by one rank",
        "in a DCP group",
        "in all replicas",
        "longest context",
        "a2a",
        "selection",
        "each of 2",
    };
    for (size_t i = 0; i < UNIT_COUNT(words); i++) {
        if (strstr(p.out, words[i]) == NULL) {
            fail_msg("no \"%s\" in:\n%s", words[i], p.out);
        }
    }
    assert_null(strstr(p.out, "refused"));
    prog_free(&p);
}

static void small_models_have_three_digits(void **state)
{
    (void)state;
    static const char *const says[][2] = {
        {"needle", "): 13.2 M parameters and 2.09 M of drafts;"},
        {"random-v32", "): 5.75 M parameters and 2.09 M of drafts;"},
        {"kimi-k2", "): 1026.41 B parameters;"},
    };
    for (size_t i = 0; i < UNIT_COUNT(says); i++) {
        prog p = RUN("plan", "--preset", says[i][0]);
        if (strstr(p.out, says[i][1]) == NULL) {
            fail_msg("no \"%s\" in:\n%s", says[i][1], p.out);
        }
        prog_free(&p);
    }
}

static void refused_settings_are_listed_and_exit_code_1(void **state)
{
    (void)state;
    prog p = RUN("plan", "--preset", "deepseek-v3.2", "--dcp", "3", "--kv", "fp8", "--json", "-");
    json_t *root = parse(p.out);
    const json_t *list = json_object_get(root, "refusals");
    assert_int_equal(json_array_size(list), 2);
    const json_t *r = json_array_get(list, 0);
    assert_string_equal(json_string_value(json_object_get(r, "rule")), "dcp_same_bits");
    assert_string_equal(json_string_value(json_object_get(r, "value")), "dcp 3");
    assert_string_equal(json_string_value(json_object_get(r, "nearest")), "--dcp 4");
    assert_true(json_string_length(json_object_get(r, "why")) > 0);
    assert_int_equal(at(root, "settings", "dcp"), 4);
    json_decref(root);
    prog_expect(p, 1, "dcp 3: ");
    p = RUN("plan", "--preset", "deepseek-v3.2", "--dcp", "3");
    assert_non_null(strstr(p.out, "dcp_same_bits: dcp 3"));
    prog_expect(p, 1, "use --dcp 4");
}

/* `plan --json path` where no file may grow as long as the JSON is, which the page does not. */
static prog plan_with_short_files(const char *path, rlim_t most)
{
    struct rlimit was;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    const struct rlimit tight = {.rlim_cur = most, .rlim_max = was.rlim_max};
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    const prog p = RUN("plan", "--preset", "glm-5.2", "--gpus", "16", "--json", path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, handler);
    return p;
}

static void files_are_written_whole_or_left_alone(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-plan-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char path[64];
    snprintf(path, sizeof path, "%s/plan.json", dir);
    prog p = RUN("plan", "--preset", "kimi-k2", "--gpus", "16", "--json", path);
    assert_int_equal(p.code, 0);
    assert_non_null(strstr(p.out, "kimi-k2"));
    prog_free(&p);
    char *text = prog_read(path);
    json_t *root = parse(text);
    assert_int_equal(at(root, "model", "parameters"), 1026408209408);
    json_decref(root);

    prog_expect(RUN("plan", "--preset", "no-such", "--json", path), 2, "no-such");
    char *again = prog_read(path);
    assert_string_equal(text, again); /* a failure leaves it */
    free(again);
    prog_expect(plan_with_short_files(path, strlen(text) - 100), 1,
                "plan.json: cannot write: File too large");
    again = prog_read(path);
    assert_non_null(again);
    assert_string_equal(text, again); /* also one that comes in the middle of the writing */
    free(again);
    free(text);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    const mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(st.st_mode & 0777, 0666 & ~mask); /* as any new file */

    char bad[80];
    snprintf(bad, sizeof bad, "%s/none/plan.json", dir);
    prog_expect(RUN("plan", "--preset", "kimi-k2", "--gpus", "16", "--json", bad), 1, bad);
    prog_expect(RUN("plan", "--preset", "kimi-k2", "--gpus", "16", "--json", dir), 1, dir);
    unlink(path);
    assert_int_equal(rmdir(dir), 0); /* nothing else was left behind */
}

static void model_folders_are_read_and_refused_by_name(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-model-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char path[64];
    snprintf(path, sizeof path, "%s/config.json", dir);
    prog_expect(RUN("plan", "-m", dir), 3, "config.json");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"vocab_size\":102400,"
          "\"hidden_size\":2048,\"intermediate_size\":10944,\"moe_intermediate_size\":1408,"
          "\"num_hidden_layers\":27,\"num_attention_heads\":16,\"kv_lora_rank\":512,"
          "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
          "\"n_routed_experts\":64,\"n_shared_experts\":2,\"first_k_dense_replace\":1,"
          "\"max_position_embeddings\":163840,\"num_experts_per_tok\":6,\"norm_topk_prob\":false,"
          "\"routed_scaling_factor\":1.0,\"rms_norm_eps\":1e-6,\"rope_theta\":10000}",
          f);
    fclose(f);
    prog p = RUN("plan", "-m", dir, "--json", "-", "--tp", "1", "--gpus", "1");
    assert_int_equal(p.code, 0);
    json_t *root = parse(p.out);
    assert_int_equal(at(root, "model", "parameters"), 15706484224);
    json_decref(root);
    prog_free(&p);
    prog_expect(RUN("plan", "-m", dir, "--preset", "glm-5"), 2, "not two");
    prog_expect(RUN("plan"), 2, "a preset or a model folder");
    f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"architectures\":[\"LlamaForCausalLM\"]}", f);
    fclose(f);
    prog_expect(RUN("plan", "-m", dir), 3, "LlamaForCausalLM");
    unlink(path);
    rmdir(dir);
}

int main(int argc, char **argv)
{
    prog_init(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_on_standard_output_is_all_there_is),
        cmocka_unit_test(the_page_names_what_people_look_for),
        cmocka_unit_test(small_models_have_three_digits),
        cmocka_unit_test(refused_settings_are_listed_and_exit_code_1),
        cmocka_unit_test(files_are_written_whole_or_left_alone),
        cmocka_unit_test(model_folders_are_read_and_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
