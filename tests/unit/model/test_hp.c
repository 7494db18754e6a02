/* Reading config.json: the public models give the presets, in both styles that files come in; whatever is missing,
 * mistyped, out of range, unknown or beyond this library is refused by name. */
#include "unit/unit.h"

#include <sys/stat.h>
#include <unistd.h>

#include <math.h>

#include "model/hp.h"

#define V32_DIMS                                                                                   \
    "\"vocab_size\":129280,\"hidden_size\":7168,\"intermediate_size\":18432,"                      \
    "\"num_hidden_layers\":61,\"num_attention_heads\":128,\"num_key_value_heads\":128,"            \
    "\"q_lora_rank\":1536,\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,"  \
    "\"v_head_dim\":128,\"max_position_embeddings\":163840,\"rms_norm_eps\":1e-06,"                \
    "\"bos_token_id\":0,\"eos_token_id\":1,\"hidden_act\":\"silu\""
#define ROUTER                                                                                     \
    "\"n_shared_experts\":1,\"num_experts_per_tok\":8,\"n_group\":8,\"topk_group\":4,"             \
    "\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\","          \
    "\"topk_method\":\"noaux_tc\""
#define V32_MOE                                                                                    \
    "\"n_routed_experts\":256,\"moe_intermediate_size\":2048,"                                     \
    "\"first_k_dense_replace\":3,\"moe_layer_freq\":1," ROUTER
#define YARN_40(m)                                                                                 \
    "\"rope_theta\":10000,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"                      \
    "\"original_max_position_embeddings\":4096,\"beta_fast\":32,\"beta_slow\":1,\"mscale\":" m     \
    ",\"mscale_all_dim\":" m "}"
#define V32_INDEX "\"index_n_heads\":64,\"index_head_dim\":128,\"index_topk\":2048"
#define V32_ARCH  "\"architectures\":[\"DeepseekV32ForCausalLM\"],\"model_type\":\"deepseek_v32\""
#define FP8                                                                                        \
    "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","                          \
    "\"weight_block_size\":[128,128],\"scale_fmt\":\"ue8m0\"}"

static const char k_v32[] =
    "{" V32_ARCH "," V32_DIMS "," V32_MOE "," V32_INDEX ",\"num_nextn_predict_layers\":1," YARN_40(
        "1") ","
             "\"tie_word_embeddings\":false,\"attention_bias\":false," FP8 "}";

static const char k_v2_lite[] =
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"vocab_size\":102400,\"hidden_size\":2048,"
    "\"intermediate_size\":10944,\"moe_intermediate_size\":1408,\"num_hidden_layers\":27,"
    "\"num_attention_heads\":16,\"num_key_value_heads\":16,\"q_lora_rank\":null,"
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
    "\"n_routed_experts\":64,\"n_shared_experts\":2,\"first_k_dense_replace\":1,"
    "\"moe_layer_freq\":1,\"max_position_embeddings\":163840,\"torch_dtype\":\"bfloat16\","
    "\"num_experts_per_tok\":6,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":false,"
    "\"routed_scaling_factor\":1.0,\"scoring_func\":\"softmax\",\"topk_method\":\"greedy\","
    "\"rms_norm_eps\":1e-06,\"bos_token_id\":100000,\"eos_token_id\":100001," YARN_40("0.707") "}";

/* GLM-5.2 as transformers 5 writes it: %s is what says which layers have an indexer. */
static const char k_glm52[] =
    "{\"architectures\":[\"GlmMoeDsaForCausalLM\"],\"model_type\":\"glm_moe_dsa\","
    "\"vocab_size\":154880,\"hidden_size\":6144,\"intermediate_size\":12288,\"head_dim\":192,"
    "\"moe_intermediate_size\":2048,\"num_hidden_layers\":78,\"num_attention_heads\":64,"
    "\"num_key_value_heads\":64,\"q_lora_rank\":2048,\"kv_lora_rank\":512,"
    "\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,\"v_head_dim\":256,\"index_n_heads\":32,"
    "\"index_head_dim\":128,\"index_topk\":2048,\"n_routed_experts\":256,\"n_shared_experts\":1,"
    "\"num_experts_per_tok\":8,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,"
    "\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\","
    "\"rms_norm_eps\":1e-05,\"eos_token_id\":[154820,154827,154829],\"rope_interleave\":true,"
    "\"moe_router_dtype\":\"float32\",\"qk_head_dim\":256,"
    "\"first_k_dense_replace\":3,\"num_nextn_predict_layers\":1,"
    "\"max_position_embeddings\":1048576,"
    "\"rope_parameters\":{\"rope_theta\":8e6,\"rope_type\":\"default\"}," FP8 "%s}";

#define SHARE ",\"index_share_for_mtp_iteration\":true"

static kvs_status parse(hp *g, const char *text, kvs_error *err)
{
    return hp_parse(g, "m", text, strlen(text), err);
}

/* Everything but the name and the hash of the text. */
static void assert_like_preset(const hp *got, const char *name)
{
    hp want;
    assert_int_equal(hp_find(&want, name, NULL), KVS_OK);
    assert_string_equal(got->arch, want.arch);
    assert_string_equal(got->model_type, want.model_type);
    assert_string_equal(got->stored_as, want.stored_as);
    assert_string_equal(got->prefix, "");
#define SAME(f) assert_int_equal(got->f, want.f)
    SAME(vocab), SAME(hidden), SAME(inter), SAME(moe_inter), SAME(n_layer), SAME(n_dense);
    SAME(n_head), SAME(q_lora), SAME(kv_lora), SAME(nope), SAME(rope), SAME(v_dim);
    SAME(n_index_head), SAME(index_dim), SAME(topk), SAME(n_index_layer), SAME(n_expert);
    SAME(n_shared), SAME(router_bias), SAME(tied), SAME(n_mtp), SAME(max_ctx), SAME(stored);
    SAME(family), SAME(index_interleaved), SAME(index_share_mtp), SAME(n_active), SAME(n_group);
    SAME(topk_group), SAME(router), SAME(group_max), SAME(norm_topk), SAME(yarn), SAME(yarn_orig);
    SAME(bos), SAME(n_eos);
#undef SAME
#define SAME(f) assert_true(got->f == want.f)
    SAME(route_scale), SAME(eps), SAME(theta), SAME(yarn_factor), SAME(yarn_beta_fast);
    SAME(yarn_beta_slow), SAME(yarn_mscale), SAME(yarn_mscale_all);
#undef SAME
    assert_memory_equal(got->index_full, want.index_full, sizeof want.index_full);
    assert_memory_equal(got->eos, want.eos, sizeof want.eos);
}

static void public_models_are_read_as_their_presets(void **state)
{
    (void)state;
    hp g;
    assert_int_equal(parse(&g, k_v32, NULL), KVS_OK);
    assert_like_preset(&g, "deepseek-v3.2");
    assert_string_equal(g.name, "m");
    assert_string_equal(g.stored_as, "fp8");
    assert_int_equal(parse(&g, k_v2_lite, NULL), KVS_OK);
    assert_like_preset(&g, "deepseek-v2-lite");
}

/* The three ways to say which layers have an indexer of their own, and which of them wins. */
static void index_layers_come_from_the_list_then_from_frequency_then_are_all(void **state)
{
    (void)state;
    static char list[78 * 12] = "";
    for (int i = 0; i < 78; i++) {
        const int past = i - 3 + 1 > 0 ? i - 3 + 1 : 0;
        strcat(list, i > 0 ? "," : "");
        strcat(list, past % 4 == 0 ? "\"full\"" : "\"shared\"");
    }
    static char extra[1024];
    static char text[4096];
    hp g;

    snprintf(extra, sizeof extra, SHARE ",\"indexer_types\":[%s]", list);
    snprintf(text, sizeof text, k_glm52, extra);
    assert_int_equal(parse(&g, text, NULL), KVS_OK);
    assert_like_preset(&g, "glm-5.2");

    snprintf(text, sizeof text, k_glm52,
             SHARE
             ",\"index_topk_freq\":4,\"index_skip_topk_offset\":3,\"index_topk_pattern\":null");
    assert_int_equal(parse(&g, text, NULL), KVS_OK);
    assert_like_preset(&g, "glm-5.2");

    snprintf(extra, sizeof extra,
             ",\"indexer_types\":[%s],\"index_topk_freq\":9,\"index_skip_topk_offset\":1", list);
    snprintf(text, sizeof text, k_glm52, extra);
    assert_int_equal(parse(&g, text, NULL), KVS_OK);
    assert_int_equal(g.n_index_layer, 21);

    snprintf(text, sizeof text, k_glm52, "");
    assert_int_equal(parse(&g, text, NULL), KVS_OK);
    assert_int_equal(g.n_index_layer, 78);
}

static void dense_layers_come_from_either_key_and_must_agree(void **state)
{
    (void)state;
    const char *base = "{" V32_ARCH "," V32_DIMS "," V32_INDEX ",\"n_routed_experts\":64," ROUTER
                       ",\"moe_intermediate_size\":256," YARN_40("1") "%s}";
    char types[61 * 10 + 64] = "";
    for (int i = 0; i < 61; i++) {
        strcat(types, i > 0 ? "," : "");
        strcat(types, i < 2 ? "\"dense\"" : "\"sparse\"");
    }
    char extra[1024];
    char text[4096];
    hp g;
    kvs_error err;
    snprintf(extra, sizeof extra, ",\"mlp_layer_types\":[%s]", types);
    snprintf(text, sizeof text, base, extra);
    assert_int_equal(parse(&g, text, NULL), KVS_OK);
    assert_int_equal(g.n_dense, 2);
    snprintf(extra, sizeof extra, ",\"mlp_layer_types\":[%s],\"first_k_dense_replace\":3", types);
    snprintf(text, sizeof text, base, extra);
    assert_int_equal(parse(&g, text, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "first_k_dense_replace 3"));
    snprintf(text, sizeof text, base, "");
    assert_int_equal(parse(&g, text, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "first_k_dense_replace is missing"));
    types[2] = 'x'; /* the first entry */
    snprintf(extra, sizeof extra, ",\"mlp_layer_types\":[%s]", types);
    snprintf(text, sizeof text, base, extra);
    assert_int_equal(parse(&g, text, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "mlp_layer_types[0]"));
}

/* Replaces one key's value, or removes the key where value is NULL. */
static const char *with(const char *text, const char *key, const char *value)
{
    static char out[4096];
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(text, quoted);
    assert_non_null(at);
    const char *end = at + strlen(quoted);
    int depth = 0;
    while (depth > 0 || (*end != ',' && *end != '}')) {
        depth += *end == '[' || *end == '{';
        depth -= *end == ']' || *end == '}';
        end++;
    }
    const int head = (int)(at - text);
    if (value != NULL) {
        snprintf(out, sizeof out, "%.*s%s%s%s", head, text, quoted, value, end);
    } else {
        snprintf(out, sizeof out, "%.*s\"_\":0%s", head, text, end);
    }
    return out;
}

static void each_bad_value_is_refused_by_its_key(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value;
        kvs_status st;
    } bad[] = {
        {"vocab_size", NULL, KVS_FORMAT},
        {"vocab_size", "0", KVS_FORMAT},
        {"vocab_size", "\"129280\"", KVS_FORMAT},
        {"vocab_size", "129280.0", KVS_FORMAT},
        {"vocab_size", "16777217", KVS_FORMAT},
        {"eos_token_id", "129280", KVS_FORMAT}, /* none of 129280 */
        {"eos_token_id", "[1, -1]", KVS_FORMAT},
        {"hidden_size", "-7168", KVS_FORMAT},
        {"hidden_size", "65537", KVS_FORMAT},
        {"intermediate_size", "9223372036854775807", KVS_FORMAT},
        {"num_hidden_layers", "1025", KVS_FORMAT},
        {"num_attention_heads", "null", KVS_FORMAT},
        {"num_key_value_heads", "8", KVS_UNSUPPORTED},
        {"kv_lora_rank", NULL, KVS_FORMAT},
        {"qk_nope_head_dim", "[]", KVS_FORMAT},
        {"qk_rope_head_dim", "true", KVS_FORMAT},
        {"v_head_dim", "4097", KVS_FORMAT},
        {"max_position_embeddings", "2147483648", KVS_FORMAT},
        {"q_lora_rank", NULL, KVS_FORMAT}, /* the indexer needs it */
        {"n_routed_experts", "4097", KVS_FORMAT},
        {"moe_intermediate_size", NULL, KVS_FORMAT},
        {"first_k_dense_replace", "62", KVS_FORMAT},
        {"moe_layer_freq", "2", KVS_UNSUPPORTED},
        {"index_n_heads", NULL, KVS_FORMAT},
        {"index_head_dim", NULL, KVS_FORMAT},
        {"index_topk", "0", KVS_FORMAT},
        {"num_nextn_predict_layers", "9", KVS_FORMAT},
        {"attention_bias", "true", KVS_UNSUPPORTED},
        {"architectures", "[]", KVS_FORMAT},
        {"architectures", "\"DeepseekV32ForCausalLM\"", KVS_FORMAT},
        {"quantization_config", "{}", KVS_FORMAT},
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        hp g;
        kvs_error err = {.code = KVS_OK};
        const kvs_status st = parse(&g, with(k_v32, bad[i].key, bad[i].value), &err);
        if (st != bad[i].st || strstr(err.text, bad[i].key) == NULL) {
            fail_msg("%s = %s: %s \"%s\"", bad[i].key, bad[i].value ? bad[i].value : "(absent)",
                     kvs_status_name(st), err.text);
        }
    }
}

static void unknown_architectures_are_refused_with_the_known_ones(void **state)
{
    (void)state;
    hp g;
    kvs_error err;
    const char *text = with(k_v32, "architectures", "[\"LlamaForCausalLM\"]");
    assert_int_equal(parse(&g, text, &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "LlamaForCausalLM"));
    assert_non_null(strstr(err.text, "DeepseekV32ForCausalLM"));
    /* an indexer where the architecture has none: the file contradicts itself */
    text = with(k_v32, "architectures", "[\"DeepseekV3ForCausalLM\"]");
    assert_int_equal(parse(&g, text, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "model_type deepseek_v32"));
    char named[4096];
    snprintf(named, sizeof named, "%s", text);
    assert_int_equal(parse(&g, with(named, "model_type", NULL), &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "DeepseekV3ForCausalLM has no indexer"));
}

static void index_layer_lists_that_cannot_be_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *extra, *word;
        kvs_status st;
    } bad[] = {
        {",\"indexer_types\":[\"full\"]", "indexer_types", KVS_FORMAT},
        {",\"indexer_types\":{}", "indexer_types", KVS_FORMAT},
        {",\"index_topk_pattern\":\"FSS\"", "index_topk_pattern", KVS_FORMAT},
        {",\"index_topk_pattern\":[\"F\"]", "index_topk_pattern", KVS_FORMAT},
        {",\"index_topk_freq\":4", "index_skip_topk_offset is missing", KVS_FORMAT},
        {",\"index_topk_freq\":0,\"index_skip_topk_offset\":3", "index_topk_freq", KVS_FORMAT},
    };
    hp g;
    kvs_error err;
    static char text[8192];
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        snprintf(text, sizeof text, k_glm52, bad[i].extra);
        assert_int_equal(parse(&g, text, &err), bad[i].st);
        assert_non_null(strstr(err.text, bad[i].word));
    }
    static char list[2048] = ",\"indexer_types\":[\"shared\"";
    for (int i = 1; i < 78; i++) {
        strcat(list, ",\"full\"");
    }
    strcat(list, "]");
    snprintf(text, sizeof text, k_glm52, list);
    assert_int_equal(parse(&g, text, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "indexer_types[0] is not full"));
}

static void malformed_text_is_refused_with_its_place(void **state)
{
    (void)state;
    hp g;
    kvs_error err;
    assert_int_equal(parse(&g, "", &err), KVS_FORMAT);
    assert_int_equal(parse(&g, "[1,2]", &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "not an object"));
    assert_int_equal(parse(&g, "{\"a\": 1,, }", &err), KVS_FORMAT);
    assert_int_equal(err.pos, 9);
    assert_int_equal(parse(&g, "{\"a\":1,\"a\":2}", &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "duplicate"));
    /* every cut of a good file */
    for (size_t n = 0; n + 1 < sizeof k_v32 - 1; n += 7) {
        assert_int_equal(hp_parse(&g, "m", k_v32, n, &err), KVS_FORMAT);
    }
    /* a value that nobody reads, nested far deeper than the stack would bear */
    enum { DEEP = 100000 };
    char *deep = malloc(DEEP + 16);
    assert_non_null(deep);
    strcpy(deep, "{\"x\":");
    memset(deep + 5, '[', DEEP);
    deep[5 + DEEP] = '\0';
    assert_int_equal(parse(&g, deep, &err), KVS_FORMAT);
    free(deep);
}

static void other_quantisations_are_told_apart_from_fp8_blocks(void **state)
{
    (void)state;
    static const struct {
        const char *value, *as;
        kvs_weight_format stored;
    } form[] = {
        {"null", "bf16", KVS_WEIGHT_BF16},
        {"{\"quant_method\":\"compressed-tensors\"}", "compressed-tensors", KVS_WEIGHT_AUTO},
        {"{\"quant_method\":\"fp8\"}", "fp8", KVS_WEIGHT_AUTO},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[64,128]}", "fp8", KVS_WEIGHT_AUTO},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}", "fp8", KVS_WEIGHT_FP8},
    };
    for (size_t i = 0; i < UNIT_COUNT(form); i++) {
        hp g;
        assert_int_equal(parse(&g, with(k_v32, "quantization_config", form[i].value), NULL),
                         KVS_OK);
        assert_int_equal(g.stored, form[i].stored);
        assert_string_equal(g.stored_as, form[i].as);
    }
}

static void folders_are_read_and_named_by_their_last_part(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-hp-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char path[128];
    char model[64];
    snprintf(model, sizeof model, "%s/Some-Model", dir);
    snprintf(path, sizeof path, "%s/config.json", model);
    hp g;
    kvs_error err;
    assert_int_equal(hp_read(&g, model, &err), KVS_IO);
    assert_non_null(strstr(err.text, "config.json"));
    assert_int_equal(mkdir(model, 0700), 0);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(k_v32, f);
    fclose(f);
    assert_int_equal(hp_read(&g, model, &err), KVS_OK);
    assert_string_equal(g.name, "Some-Model");
    strcat(model, "//");
    assert_int_equal(hp_read(&g, model, &err), KVS_OK);
    assert_string_equal(g.name, "Some-Model");
    f = fopen(path, "w");
    assert_non_null(f);
    fputs("{", f);
    fclose(f);
    assert_int_equal(hp_read(&g, model, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "Some-Model"));
    unlink(path);
    rmdir(model);
    rmdir(dir);
    char *longest = malloc(5000);
    assert_non_null(longest);
    memset(longest, 'x', 4999);
    longest[4999] = '\0';
    assert_int_equal(hp_read(&g, longest, &err), KVS_INVALID);
    free(longest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(public_models_are_read_as_their_presets),
        cmocka_unit_test(index_layers_come_from_the_list_then_from_frequency_then_are_all),
        cmocka_unit_test(dense_layers_come_from_either_key_and_must_agree),
        cmocka_unit_test(each_bad_value_is_refused_by_its_key),
        cmocka_unit_test(unknown_architectures_are_refused_with_the_known_ones),
        cmocka_unit_test(index_layer_lists_that_cannot_be_are_refused),
        cmocka_unit_test(malformed_text_is_refused_with_its_place),
        cmocka_unit_test(other_quantisations_are_told_apart_from_fp8_blocks),
        cmocka_unit_test(folders_are_read_and_named_by_their_last_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
