/* The axes on which models of the family differ, each read from a config.json as published or as a writer would put
 * it: routers, rope in both forms, index sharing, token ids, wrappers; and keys that would change the maths, refused
 * by their name, beside keys that change nothing. */
#include "unit/unit.h"

#include <math.h>
#include <stdbool.h>

#include "model/hp.h"

/* A small V3.2 without a closing brace and without what the tests put in: rope, router. */
#define BODY                                                                                       \
    "\"vocab_size\":512,\"hidden_size\":256,\"intermediate_size\":512,\"num_hidden_layers\":6,"    \
    "\"num_attention_heads\":4,\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,"                     \
    "\"qk_rope_head_dim\":64,\"v_head_dim\":128,\"max_position_embeddings\":4096,"                 \
    "\"rms_norm_eps\":1e-6,\"n_routed_experts\":16,\"n_shared_experts\":1,"                        \
    "\"moe_intermediate_size\":128,\"first_k_dense_replace\":1,\"num_experts_per_tok\":4,"         \
    "\"norm_topk_prob\":true"
#define GROUPS ",\"n_group\":4,\"topk_group\":2,\"routed_scaling_factor\":2.5"
#define INDEX  ",\"q_lora_rank\":128,\"index_n_heads\":4,\"index_head_dim\":128,\"index_topk\":16"
#define THETA  ",\"rope_theta\":10000"
#define V2     "{\"architectures\":[\"DeepseekV2ForCausalLM\"]," BODY
#define V3     "{\"architectures\":[\"DeepseekV3ForCausalLM\"]," BODY
#define V32    "{\"architectures\":[\"DeepseekV32ForCausalLM\"]," BODY INDEX
#define GLM    "{\"architectures\":[\"GlmMoeDsaForCausalLM\"]," BODY INDEX
#define V3_ALL V3 GROUPS THETA
#define V3_MOVED                                                                                   \
    "{ \"eos_token_id\" : 1,\n" BODY GROUPS THETA                                                  \
    ", \"architectures\" : [ \"DeepseekV3ForCausalLM\" ] }"

static kvs_status parse(hp *h, const char *text, kvs_error *err)
{
    return hp_parse(h, "m", text, strlen(text), err);
}

static hp read_ok(const char *text)
{
    hp h;
    kvs_error err = {.code = KVS_OK};
    if (parse(&h, text, &err) != KVS_OK) {
        fail_msg("%s\n%s", err.text, text);
    }
    return h;
}

static void refuse(const char *text, kvs_status want, const char *word)
{
    hp h;
    kvs_error err = {.code = KVS_OK};
    const kvs_status st = parse(&h, text, &err);
    if (st != want || strstr(err.text, word) == NULL) {
        fail_msg("%s: %s \"%s\"\n%s", word, kvs_status_name(st), err.text, text);
    }
}

/* Settings put behind a text that is good without them must be refused by their name. */
static void refuse_all(const char *base, const char *const (*bad)[2], size_t n, kvs_status want)
{
    for (size_t i = 0; i < n; i++) {
        char text[4096];
        snprintf(text, sizeof text, "%s,%s}", base, bad[i][0]);
        refuse(text, want, bad[i][1]);
    }
}

static void presets_are_whole_and_can_run(void **state)
{
    (void)state;
    for (int32_t i = 0; hp_preset(i) != NULL; i++) {
        const hp *h = hp_preset(i);
        int32_t n_full = 0;
        for (int32_t k = 0; k < HP_MAX_LAYER; k++) {
            n_full += h->index_full[k];
            assert_true(k < h->n_layer || h->index_full[k] == 0);
        }
        assert_int_equal(n_full, h->n_index_layer);
        assert_int_equal(h->index_full[0], h->n_index_head > 0);
        assert_in_range(h->n_active, 1, h->n_expert / h->n_group * h->topk_group);
        assert_true(h->theta > 1.0 && h->eps > 0.0f && h->n_eos > 0 && h->family > 0);
        assert_int_equal(h->router_bias, h->router == HP_SIGMOID);
        assert_int_equal(hp_runnable(h, NULL), KVS_OK);
    }
}

/* ---- models that are no preset --------------------------------------------------------------- */

static void a_16b_model_has_sigmoid_routing_without_query_latent(void **state)
{
    (void)state;
    const hp h = read_ok(
        "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\","
        "\"auto_map\":{\"AutoConfig\":\"configuration_deepseek.DeepseekV3Config\"},"
        "\"attention_bias\":false,\"attention_dropout\":0.0,\"aux_loss_alpha\":0.001,"
        "\"bos_token_id\":163584,\"eos_token_id\":163585,\"ep_size\":1,\"first_k_dense_replace\":1,"
        "\"hidden_act\":\"silu\",\"hidden_size\":2048,\"initializer_range\":0.02,"
        "\"intermediate_size\":11264,\"kv_lora_rank\":512,\"max_position_embeddings\":8192,"
        "\"moe_intermediate_size\":1408,\"moe_layer_freq\":1,\"n_group\":1,\"n_routed_experts\":64,"
        "\"n_shared_experts\":2,\"norm_topk_prob\":true,\"num_attention_heads\":16,"
        "\"num_experts_per_tok\":6,\"num_hidden_layers\":27,\"num_key_value_heads\":16,"
        "\"num_nextn_predict_layers\":0,\"pretraining_tp\":1,\"q_lora_rank\":null,"
        "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-05,"
        "\"rope_scaling\":null,\"rope_theta\":50000.0,\"routed_scaling_factor\":2.446,"
        "\"scoring_func\":\"sigmoid\",\"seq_aux\":true,\"tie_word_embeddings\":false,"
        "\"topk_group\":1,\"topk_method\":\"noaux_tc\",\"torch_dtype\":\"bfloat16\","
        "\"transformers_version\":\"4.46.3\",\"use_cache\":true,\"v_head_dim\":128,"
        "\"vocab_size\":163840}");
    assert_int_equal(h.q_lora, 0);
    assert_int_equal(h.router, HP_SIGMOID);
    assert_true(h.router_bias && h.norm_topk && !h.yarn);
    assert_int_equal(h.n_active, 6);
    assert_int_equal(h.n_shared, 2);
    assert_true(h.route_scale == 2.446f && h.eps == 1e-5f && h.theta == 50000.0);
    assert_int_equal(h.family, HP_KIMI);
    assert_int_equal(h.n_mtp, 0);
    assert_int_equal(h.stored, KVS_WEIGHT_BF16);
    assert_int_equal(hp_runnable(&h, NULL), KVS_OK);
}

static void a_flash_model_has_glm_dims_without_indexer(void **state)
{
    (void)state;
    const hp h = read_ok(
        "{\"architectures\":[\"Glm4MoeLiteForCausalLM\"],\"model_type\":\"glm4_moe_lite\","
        "\"attention_bias\":false,\"attention_dropout\":0.0,\"dtype\":\"bfloat16\","
        "\"eos_token_id\":[154820,154827,154829],\"first_k_dense_replace\":1,"
        "\"hidden_act\":\"silu\",\"hidden_size\":2048,\"intermediate_size\":10240,"
        "\"kv_lora_rank\":512,\"max_position_embeddings\":202752,\"moe_intermediate_size\":1536,"
        "\"n_group\":1,\"n_routed_experts\":64,\"n_shared_experts\":1,\"norm_topk_prob\":true,"
        "\"num_attention_heads\":20,\"num_experts_per_tok\":4,\"num_hidden_layers\":47,"
        "\"num_key_value_heads\":20,\"num_nextn_predict_layers\":1,\"pad_token_id\":154820,"
        "\"partial_rotary_factor\":1.0,\"q_lora_rank\":768,\"qk_nope_head_dim\":192,"
        "\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-05,\"rope_scaling\":null,"
        "\"rope_theta\":1000000,\"routed_scaling_factor\":1.8,\"topk_group\":1,"
        "\"topk_method\":\"noaux_tc\",\"tie_word_embeddings\":false,\"v_head_dim\":256,"
        "\"vocab_size\":154880}");
    assert_int_equal(h.family, HP_GLM4_LITE);
    assert_int_equal(h.n_head, 20);
    assert_int_equal(h.n_index_head, 0);
    assert_int_equal(h.n_mtp, 1);
    assert_int_equal(h.bos, -1);
    assert_int_equal(h.n_eos, 3);
    assert_int_equal(h.eos[2], 154829);
    assert_int_equal(h.router, HP_SIGMOID);
    assert_int_equal(hp_runnable(&h, NULL), KVS_OK);
}

static void the_wrapper_of_kimi_is_read_through_its_text_config(void **state)
{
    (void)state;
    hp h = read_ok(
        "{\"architectures\":[\"KimiK25ForConditionalGeneration\"],"
        "\"model_type\":\"kimi_k25\",\"vision_config\":{\"depth\":27},"
        "\"media_placeholder_token_id\":163605,\"text_config\":"
        "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"kimi_k2\"," BODY GROUPS
            THETA "}}");
    assert_string_equal(h.prefix, "language_model.");
    assert_string_equal(h.arch, "DeepseekV3ForCausalLM");
    assert_int_equal(h.family, HP_KIMI);
    assert_int_equal(h.stored, KVS_WEIGHT_BF16);
    assert_int_equal(hp_runnable(&h, NULL), KVS_OK);
    /* without architectures inside, by its type; int4 experts are told by name */
    h = read_ok(
        "{\"model_type\":\"kimi_k25\",\"text_config\":{\"model_type\":\"kimi_k2\"," BODY GROUPS
            THETA ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\"}}}");
    assert_int_equal(h.stored, KVS_WEIGHT_AUTO);
    kvs_error err = {.code = KVS_OK};
    assert_int_equal(hp_runnable(&h, &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "compressed-tensors"));
    refuse("{\"model_type\":\"other_vl\",\"text_config\":{\"architectures\":["
           "\"DeepseekV3ForCausalLM\"]," BODY GROUPS THETA "}}",
           KVS_UNSUPPORTED, "other_vl");
    refuse("{\"model_type\":\"kimi_k25\",\"text_config\":[1]}", KVS_FORMAT, "text_config");
    refuse("{\"model_type\":\"kimi_k25\",\"text_config\":{\"model_type\":\"kimi_k3\"," BODY GROUPS
               THETA "}}",
           KVS_UNSUPPORTED, "kimi_k3");
}

static void families_are_told_by_type_and_geometry(void **state)
{
    (void)state;
    const char *const quant = ",\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
                              "\"weight_block_size\":[128,128]%s}}";
    char text[4096];
    char tail[256];
    snprintf(tail, sizeof tail, quant, "");
    snprintf(text, sizeof text, "%s%s", V3_ALL, tail);
    assert_int_equal(read_ok(text).family, HP_V3);
    snprintf(tail, sizeof tail, quant, ",\"scale_fmt\":\"ue8m0\"");
    snprintf(text, sizeof text, "%s%s", V3_ALL, tail);
    assert_int_equal(read_ok(text).family, HP_V31);
    assert_int_equal(read_ok(V32 GROUPS THETA "}").family, HP_V32);
    assert_int_equal(read_ok(GLM GROUPS THETA "}").family, HP_GLM5);
    assert_int_equal(read_ok(GLM GROUPS THETA ",\"index_share_for_mtp_iteration\":true}").family,
                     HP_GLM52);
    assert_int_equal(read_ok(GLM GROUPS THETA ",\"index_topk_pattern\":\"FFFSFS\"}").family,
                     HP_GLM52);
}

/* ---- routers --------------------------------------------------------------------------------- */

static void routers_come_from_their_keys_or_the_architecture(void **state)
{
    (void)state;
    hp h = read_ok(V3_ALL "}");
    assert_int_equal(h.router, HP_SIGMOID);
    assert_int_equal(h.n_group, 4);
    assert_int_equal(h.topk_group, 2);
    assert_true(h.router_bias && !h.group_max && h.route_scale == 2.5f);
    h = read_ok(V2 ",\"routed_scaling_factor\":1.0,\"n_group\":4,\"topk_group\":2" THETA "}");
    assert_int_equal(h.router, HP_SOFTMAX);
    assert_int_equal(h.n_group, 1); /* greedy looks at no group */
    assert_int_equal(h.topk_group, 1);
    assert_true(!h.router_bias && !h.group_max);
    h = read_ok(V2 ",\"routed_scaling_factor\":1.0,\"n_group\":4,\"topk_group\":2,"
                   "\"scoring_func\":\"softmax\",\"topk_method\":\"group_limited_greedy\"" THETA
                   "}");
    assert_int_equal(h.n_group, 4);
    assert_true(h.group_max && !h.router_bias);
}

static void routers_that_are_not_followed_are_refused_by_key(void **state)
{
    (void)state;
    static const char *const unsupported[][2] = {
        {"\"scoring_func\":\"sqrtsoftplus\"", "scoring_func sqrtsoftplus"},
        {"\"topk_method\":\"greedy\"", "topk_method greedy"},
        {"\"scoring_func\":\"softmax\"", "topk_method noaux_tc"},
        {"\"moe_router_dtype\":\"bfloat16\"", "moe_router_dtype bfloat16"},
        {"\"moe_layer_freq\":2", "moe_layer_freq 2"},
    };
    refuse_all(V3_ALL, unsupported, UNIT_COUNT(unsupported), KVS_UNSUPPORTED);
    static const char *const malformed[][2] = {
        {"\"scoring_func\":7", "scoring_func"},
        {"\"num_experts\":15", "num_experts 15"},
        {"\"num_local_experts\":17", "num_local_experts 17"},
        {"\"qk_head_dim\":191", "qk_head_dim 191"},
        {"\"num_mtp_layers\":1,\"num_nextn_predict_layers\":2", "num_mtp_layers 1"},
    };
    refuse_all(V3_ALL, malformed, UNIT_COUNT(malformed), KVS_FORMAT);
    static const char *const groups[][2] = {
        {"\"n_group\":3,\"topk_group\":1,\"routed_scaling_factor\":1.0", "n_group 3"},
        {"\"n_group\":16,\"topk_group\":4,\"routed_scaling_factor\":1.0", "n_group 16"},
        {"\"n_group\":4,\"topk_group\":5,\"routed_scaling_factor\":1.0", "topk_group 5"},
        {"\"n_group\":8,\"topk_group\":1,\"routed_scaling_factor\":1.0", "num_experts_per_tok 4"},
        {"\"topk_group\":1,\"routed_scaling_factor\":1.0", "n_group is missing"},
        {"\"n_group\":1,\"topk_group\":1", "routed_scaling_factor is missing"},
        {"\"n_group\":1,\"topk_group\":1,\"routed_scaling_factor\":-1", "routed_scaling_factor -1"},
    };
    refuse_all(V3 THETA, groups, UNIT_COUNT(groups), KVS_FORMAT);
    /* the vendor's code and transformers differ there */
    refuse(V2 ",\"routed_scaling_factor\":16.0,\"n_group\":1,\"topk_group\":1" THETA "}",
           KVS_UNSUPPORTED, "routed_scaling_factor 16");
}

/* ---- rope ------------------------------------------------------------------------------------ */

#define YARN_LENGTH "\"factor\":40,\"original_max_position_embeddings\":64"
#define YARN_BODY   YARN_LENGTH ",\"mscale\":1,\"mscale_all_dim\":1"

static void rope_is_read_flat_and_nested_alike(void **state)
{
    (void)state;
    static const char *const form[] = {
        ",\"rope_theta\":8000000,\"rope_scaling\":{\"type\":\"yarn\"," YARN_BODY "}}",
        ",\"rope_theta\":8e6,\"rope_scaling\":{\"rope_type\":\"yarn\"," YARN_BODY "}}",
        ",\"rope_parameters\":{\"rope_theta\":8e6,\"rope_type\":\"yarn\"," YARN_BODY "}}",
        ",\"rope_parameters\":{\"rope_theta\":8e6,\"type\":\"yarn\",\"rope_type\":\"yarn\","
        "\"beta_fast\":32.0,\"beta_slow\":1,\"attention_factor\":1.0," YARN_BODY "}}",
        ",\"rope_theta\":8e6,\"rope_parameters\":{\"rope_theta\":8e6,\"rope_type\":"
        "\"yarn\"," YARN_BODY "}}",
    };
    for (size_t i = 0; i < UNIT_COUNT(form); i++) {
        char text[4096];
        snprintf(text, sizeof text, "%s%s", V3 GROUPS, form[i]);
        const hp h = read_ok(text);
        assert_true(h.theta == 8e6 && h.yarn && h.yarn_factor == 40.0 && h.yarn_orig == 64);
        assert_true(h.yarn_beta_fast == 32.0 && h.yarn_beta_slow == 1.0);
        assert_true(h.yarn_mscale == 1.0 && h.yarn_mscale_all == 1.0);
    }
    hp h =
        read_ok(V3 GROUPS ",\"rope_parameters\":{\"rope_theta\":8e6,\"rope_type\":\"default\"}}");
    assert_true(h.theta == 8e6 && !h.yarn);
    h = read_ok(V3 GROUPS ",\"rope_parameters\":{\"rope_theta\":8e6,\"rope_type\":\"default\","
                          "\"factor\":1.0,\"truncate\":null}}");
    assert_true(h.theta == 8e6 && !h.yarn);
    /* without mscale, but with the factor that it would give */
    h = read_ok(V3 GROUPS ",\"rope_theta\":1e4,\"rope_scaling\":{\"type\":\"yarn\"," YARN_LENGTH
                          ",\"mscale_all_dim\":1,\"attention_factor\":1}}");
    assert_true(h.yarn_mscale == 1.0 && h.yarn_mscale_all == 1.0);
    h = read_ok(V3 GROUPS ",\"rope_theta\":8e6,\"rope_scaling\":null}");
    assert_true(h.theta == 8e6 && !h.yarn);
    /* absent mscales: 1 for cos and sin, none for the softmax scale */
    h = read_ok(V3 GROUPS ",\"rope_theta\":1e4,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"
                          "\"original_max_position_embeddings\":64}}");
    assert_true(h.yarn_mscale == 1.0 && h.yarn_mscale_all == 0.0);
    assert_int_equal(hp_runnable(&h, NULL), KVS_UNSUPPORTED);
}

static void rope_that_is_not_followed_is_refused_by_key(void **state)
{
    (void)state;
    static const char *const unsupported[][2] = {
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}", "rope_scaling.rope_type linear"},
        {"\"rope_scaling\":{\"type\":\"longrope\"}", "longrope"},
        {"\"rope_scaling\":{\"type\":\"yarn\"," YARN_BODY ",\"truncate\":true}",
         "rope_scaling.truncate"},
        {"\"rope_scaling\":{\"type\":\"yarn\"," YARN_BODY ",\"attention_factor\":1.3}",
         "attention_factor 1.3"},
        {"\"rope_scaling\":{\"type\":\"yarn\"," YARN_BODY ",\"truncate\":false}",
         "rope_scaling.truncate is false"},
        {"\"rope_scaling\":{\"type\":\"yarn\"," YARN_LENGTH ",\"mscale_all_dim\":1}",
         "mscale is missing or 0 beside mscale_all_dim 1"},
        {"\"rope_scaling\":{\"type\":\"yarn\"," YARN_LENGTH ",\"mscale\":0,\"mscale_all_dim\":0}",
         "mscale is missing or 0 beside mscale_all_dim 0"},
        {"\"rope_interleave\":false", "rope_interleave false"},
        {"\"partial_rotary_factor\":0.5", "partial_rotary_factor 0.5"},
        {"\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}",
         "partial_rotary_factor 0.5"},
    };
    refuse_all(V3_ALL, unsupported, UNIT_COUNT(unsupported), KVS_UNSUPPORTED);
    static const char *const malformed[][2] = {
        {"\"rope_scaling\":7", "rope_scaling"},
        {"\"rope_scaling\":{\"factor\":4}", "rope_type"},
        {"\"rope_scaling\":{\"type\":\"default\",\"factor\":4}", "rope_scaling.factor 4"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"rope_type\":\"default\"}", "rope_type"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"original_max_position_embeddings\":64}",
         "factor is missing"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":0.5,\"original_max_position_embeddings\":"
         "64}",
         "factor 0.5"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40}",
         "original_max_position_embeddings is missing"},
        {"\"rope_parameters\":{\"rope_theta\":20000,\"rope_type\":\"default\"}",
         "rope_theta 10000"},
        {"\"rope_parameters\":{\"rope_type\":\"default\"},\"rope_scaling\":{\"type\":\"yarn\"}",
         "disagree"},
        {"\"rope_interleave\":1", "rope_interleave"},
    };
    refuse_all(V3_ALL, malformed, UNIT_COUNT(malformed), KVS_FORMAT);
    static const char *const theta[][2] = {
        {"\"x\":null", "rope_theta is missing"},
        {"\"rope_parameters\":{\"rope_type\":\"default\"}", "rope_theta is missing"},
        {"\"rope_theta\":1", "rope_theta 1"},
        {"\"rope_theta\":\"10000\"", "rope_theta is no number"},
    };
    refuse_all(V3 GROUPS, theta, UNIT_COUNT(theta), KVS_FORMAT);
}

/* ---- indexer --------------------------------------------------------------------------------- */

static void layers_with_an_indexer_come_from_list_pattern_or_frequency(void **state)
{
    (void)state;
    static const struct {
        const char *keys, *full;
    } want[] = {
        {"\"x\":0", "FFFFFF"},
        {"\"indexer_types\":null,\"index_topk_pattern\":null,\"index_topk_freq\":null", "FFFFFF"},
        {"\"index_topk_freq\":4,\"index_skip_topk_offset\":3", "FFFSSS"},
        {"\"index_topk_freq\":2,\"index_skip_topk_offset\":1", "FSFSFS"},
        {"\"index_topk_freq\":3,\"index_skip_topk_offset\":2", "FFSSFS"},
        {"\"index_topk_pattern\":\"FSSFSF\",\"index_topk_freq\":4,\"index_skip_topk_offset\":3",
         "FSSFSF"},
        {"\"index_topk_pattern\":\"FFFFFF\",\"indexer_types\":[\"full\",\"shared\",\"shared\","
         "\"full\","
         "\"shared\",\"shared\"],\"index_topk_freq\":4,\"index_skip_topk_offset\":3",
         "FSSFSS"},
        {"\"indexer_types\":[\"full\",\"shared\",\"shared\",\"full\",\"shared\",\"shared\","
         "\"full\"]",
         "FSSFSS"}, /* a draft layer's entry behind the main ones */
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        char text[4096];
        snprintf(text, sizeof text, "%s,%s}", GLM GROUPS THETA, want[i].keys);
        const hp h = read_ok(text);
        int32_t n = 0;
        for (int k = 0; k < 6; k++) {
            assert_int_equal(h.index_full[k], want[i].full[k] == 'F');
            n += h.index_full[k];
        }
        assert_int_equal(h.n_index_layer, n);
    }
    static const char *const bad[][2] = {
        {"\"index_topk_pattern\":\"SFFFFF\"", "letter 0"},
        {"\"index_topk_pattern\":\"FFxFFF\"", "letter 2"},
        {"\"index_topk_freq\":4,\"index_skip_topk_offset\":0", "index_skip_topk_offset 0"},
        {"\"indexer_rope_interleave\":\"yes\"", "indexer_rope_interleave"},
    };
    refuse_all(GLM GROUPS THETA, bad, UNIT_COUNT(bad), KVS_FORMAT);
}

static void a_model_without_indexer_has_no_setting_of_one(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"\"index_n_heads\":4", "index_n_heads: DeepseekV3ForCausalLM has no indexer"},
        {"\"index_topk\":64", "index_topk: "},
        {"\"index_topk_freq\":4,\"index_skip_topk_offset\":0", "index_topk_freq: "},
        {"\"indexer_types\":[\"full\",\"shared\"]", "indexer_types: "},
        {"\"index_share_for_mtp_iteration\":true", "index_share_for_mtp_iteration: "},
    };
    refuse_all(V3_ALL, bad, UNIT_COUNT(bad), KVS_FORMAT);
    read_ok(V3_ALL ",\"index_topk\":null,\"index_share_for_mtp_iteration\":false}");
}

static void the_indexers_rope_is_paired_as_the_model_says(void **state)
{
    (void)state;
    assert_false(read_ok(V32 GROUPS THETA "}").index_interleaved);
    assert_true(read_ok(V32 GROUPS THETA ",\"indexer_rope_interleave\":true}").index_interleaved);
    assert_true(read_ok(GLM GROUPS THETA "}").index_interleaved);
    assert_false(read_ok(GLM GROUPS THETA ",\"indexer_rope_interleave\":false}").index_interleaved);
    assert_false(read_ok(GLM GROUPS THETA "}").index_share_mtp);
}

/* ---- tokens, other keys ---------------------------------------------------------------------- */

static void token_ids_are_one_or_a_list(void **state)
{
    (void)state;
    hp h = read_ok(V3_ALL "}");
    assert_int_equal(h.bos, -1);
    assert_int_equal(h.n_eos, 0);
    h = read_ok(V3_ALL ",\"bos_token_id\":0,\"eos_token_id\":[1,0,7]}");
    assert_int_equal(h.bos, 0);
    assert_int_equal(h.n_eos, 3);
    assert_int_equal(h.eos[1], 0);
    h = read_ok(V3_ALL ",\"bos_token_id\":null,\"eos_token_id\":5}");
    assert_int_equal(h.bos, -1);
    assert_int_equal(h.n_eos, 1);
    assert_int_equal(h.eos[0], 5);
    static const char *const bad[][2] = {
        {"\"eos_token_id\":[1,2,3,4,5,6,7,8,9]", "eos_token_id lists 9"},
        {"\"eos_token_id\":\"</s>\"", "eos_token_id"},
        {"\"eos_token_id\":[1,null]", "eos_token_id"},
        {"\"eos_token_id\":-1", "eos_token_id"},
        {"\"bos_token_id\":1.5", "bos_token_id"},
    };
    refuse_all(V3_ALL, bad, UNIT_COUNT(bad), KVS_FORMAT);
}

static void keys_that_change_nothing_are_skipped(void **state)
{
    (void)state;
    read_ok(V3_ALL ",\"transformers_version\":\"5.17.0\",\"use_cache\":true,\"dtype\":\"bfloat16\","
                   "\"torch_dtype\":\"float32\",\"head_dim\":192,\"pad_token_id\":2,\"ep_size\":8,"
                   "\"auto_map\":{\"AutoModel\":\"x.Y\"},\"temperature\":0.6,\"seq_aux\":true,"
                   "\"layer_types\":[\"deepseek_sparse_attention\",\"full_attention\"],"
                   "\"initializer_range\":0.02,\"hidden_act\":\"silu\",\"mlp_bias\":false}");
    /* unknown, but they switch nothing on */
    read_ok(V3_ALL ",\"sliding_window\":null,\"use_qk_norm\":false,\"swiglu_limit\":0.0,\"a\":0,"
                   "\"b\":\"\",\"c\":[],\"d\":{},\"_name_or_path\":\"/tmp/x\"}");
}

static void keys_that_may_change_the_maths_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"\"sliding_window\":4096", "sliding_window is 4096"},
        {"\"use_qk_norm\":true", "use_qk_norm is true"},
        {"\"swiglu_limit\":10", "swiglu_limit is 10"},
        {"\"scale_emb\":12", "scale_emb"},
        {"\"compress_ratios\":[4,128]", "compress_ratios is a structure"},
        {"\"expert_dtype\":\"fp4\"", "expert_dtype is \"fp4\""},
        {"\"layer_types\":[\"linear_attention\"]", "layer_types[0] linear_attention"},
        {"\"hidden_act\":\"gelu\"", "hidden_act gelu"},
        {"\"attention_bias\":true", "attention_bias true"},
        {"\"mlp_bias\":true", "mlp_bias true"},
        {"\"is_causal\":false", "is_causal false"},
    };
    refuse_all(V3_ALL, bad, UNIT_COUNT(bad), KVS_UNSUPPORTED);
    static const char *const malformed[][2] = {
        {"\"mlp_bias\":\"false\"", "mlp_bias"},
        {"\"hidden_act\":true", "hidden_act"},
        {"\"tie_word_embeddings\":1", "tie_word_embeddings"},
        {"\"layer_types\":\"x\"", "layer_types"},
        {"\"model_type\":[]", "model_type"},
        {"\"model_type\":\"glm_moe_dsa\"",
         "model_type glm_moe_dsa is that of GlmMoeDsaForCausalLM"},
    };
    refuse_all(V3_ALL, malformed, UNIT_COUNT(malformed), KVS_FORMAT);
}

/* The values that the forward pass cannot run, each by its field. */
static void geometry_that_no_kernel_has_is_refused_with_its_field(void **state)
{
    (void)state;
    hp good;
    assert_int_equal(hp_find(&good, "glm-5.2", NULL), KVS_OK);
    static const char *const word[] = {"kv_lora_rank 256",  "qk_rope_head_dim 32",
                                       "index_head_dim 64", "index_n_heads 65",
                                       "index_topk 32769",  "gguf"};
    for (int i = 0; i < 6; i++) {
        hp h = good;
        h.kv_lora = i == 0 ? 256 : h.kv_lora;
        h.rope = i == 1 ? 32 : h.rope;
        h.index_dim = i == 2 ? 64 : h.index_dim;
        h.n_index_head = i == 3 ? 65 : h.n_index_head;
        h.topk = i == 4 ? 32769 : h.topk;
        if (i == 5) {
            h.stored = KVS_WEIGHT_AUTO;
            snprintf(h.stored_as, sizeof h.stored_as, "gguf");
        }
        kvs_error err = {.code = KVS_OK};
        assert_int_equal(hp_runnable(&h, &err), KVS_UNSUPPORTED);
        assert_non_null(strstr(err.text, word[i]));
        assert_int_equal(hp_readable(&h, NULL), i == 5 ? KVS_UNSUPPORTED : KVS_OK);
    }
    hp dense;
    assert_int_equal(hp_find(&dense, "deepseek-v3", NULL), KVS_OK);
    dense.index_dim = 64; /* no indexer: not looked at */
    assert_int_equal(hp_runnable(&dense, NULL), KVS_OK);
}

static void the_hash_of_a_config_is_that_of_its_content(void **state)
{
    (void)state;
    const hp a = read_ok(V3_ALL ",\"eos_token_id\":1}");
    const hp b = read_ok(V3_MOVED);
    const hp c = read_ok(V3_ALL ",\"eos_token_id\":2}");
    assert_memory_equal(a.config_hash, b.config_hash, sizeof a.config_hash);
    assert_memory_not_equal(a.config_hash, c.config_hash, sizeof a.config_hash);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_are_whole_and_can_run),
        cmocka_unit_test(a_16b_model_has_sigmoid_routing_without_query_latent),
        cmocka_unit_test(a_flash_model_has_glm_dims_without_indexer),
        cmocka_unit_test(the_wrapper_of_kimi_is_read_through_its_text_config),
        cmocka_unit_test(families_are_told_by_type_and_geometry),
        cmocka_unit_test(routers_come_from_their_keys_or_the_architecture),
        cmocka_unit_test(routers_that_are_not_followed_are_refused_by_key),
        cmocka_unit_test(rope_is_read_flat_and_nested_alike),
        cmocka_unit_test(rope_that_is_not_followed_is_refused_by_key),
        cmocka_unit_test(layers_with_an_indexer_come_from_list_pattern_or_frequency),
        cmocka_unit_test(a_model_without_indexer_has_no_setting_of_one),
        cmocka_unit_test(the_indexers_rope_is_paired_as_the_model_says),
        cmocka_unit_test(token_ids_are_one_or_a_list),
        cmocka_unit_test(keys_that_change_nothing_are_skipped),
        cmocka_unit_test(keys_that_may_change_the_maths_are_refused_by_name),
        cmocka_unit_test(geometry_that_no_kernel_has_is_refused_with_its_field),
        cmocka_unit_test(the_hash_of_a_config_is_that_of_its_content),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
