/* model/hp_presets.c - the known models: what their published config.json says; and those of models/. */
#include "model/hp.h"

#include <string.h>

#include "base/err.h"

/* clang-format off */
#define ONE_8   1, 1, 1, 1, 1, 1, 1, 1
#define ONE_60  ONE_8, ONE_8, ONE_8, ONE_8, ONE_8, ONE_8, ONE_8, 1, 1, 1, 1
#define EVERY_4 0, 0, 0, 1 /* three layers that share, one with an indexer of its own */

#define MLA_DIMS .kv_lora = 512, .nope = 128, .rope = 64, .v_dim = 128
#define YARN(f, fast, m)                                                                           \
    .yarn = true, .yarn_factor = (f), .yarn_orig = 4096, .yarn_beta_fast = (fast),                 \
    .yarn_beta_slow = 1.0, .yarn_mscale = (m), .yarn_mscale_all = (m)
#define FP8 .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"

#define ROUTER_V3                                                                                  \
    .n_shared = 1, .n_active = 8, .router = HP_SIGMOID, .norm_topk = true, .router_bias = true

#define DEEPSEEK_V3                                                                                \
    .vocab = 129280, .hidden = 7168, .inter = 18432, .moe_inter = 2048, .n_layer = 61,             \
    .n_dense = 3, .n_head = 128, .q_lora = 1536, MLA_DIMS, ROUTER_V3, .n_expert = 256,             \
    .n_group = 8, .topk_group = 4, .route_scale = 2.5f, .eps = 1e-6f, .theta = 10000.0,            \
    YARN(40.0, 32.0, 1.0), .n_mtp = 1, .max_ctx = 163840, .bos = 0, .n_eos = 1, .eos = {1}, FP8

#define GLM_5                                                                                      \
    .arch = "GlmMoeDsaForCausalLM", .model_type = "glm_moe_dsa", .vocab = 154880, .hidden = 6144,  \
    .inter = 12288, .moe_inter = 2048, .n_layer = 78, .n_dense = 3, .n_head = 64, .q_lora = 2048,  \
    .kv_lora = 512, .nope = 192, .rope = 64, .v_dim = 256, .n_index_head = 32, .index_dim = 128,   \
    .topk = 2048, .index_interleaved = true, ROUTER_V3, .n_expert = 256, .n_group = 1,             \
    .topk_group = 1, .route_scale = 2.5f, .eps = 1e-5f, .n_mtp = 1, .bos = -1, .n_eos = 3,         \
    .eos = {154820, 154827, 154829}, FP8

#define INDEX_78_OF_78 .n_index_layer = 78, .index_full = {ONE_60, ONE_8, ONE_8, 1, 1}
#define INDEX_21_OF_78 .n_index_layer = 21,                                                        \
    .index_full = {1, 1, 1, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4,         \
                   EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4, EVERY_4,         \
                   EVERY_4, EVERY_4, EVERY_4, 0, 0, 0}

static const hp k_preset[] = {
    {.name = "deepseek-v2-lite", .arch = "DeepseekV2ForCausalLM", .model_type = "deepseek_v2",
     .family = HP_V2, .vocab = 102400, .hidden = 2048, .inter = 10944, .moe_inter = 1408,
     .n_layer = 27, .n_dense = 1, .n_head = 16, .q_lora = 0, MLA_DIMS, .n_expert = 64,
     .n_shared = 2, .n_active = 6, .n_group = 1, .topk_group = 1, .router = HP_SOFTMAX,
     .norm_topk = false, .route_scale = 1.0f, .router_bias = false, .eps = 1e-6f,
     .theta = 10000.0, YARN(40.0, 32.0, 0.707), .max_ctx = 163840, .bos = 100000, .n_eos = 1,
     .eos = {100001}, .stored = KVS_WEIGHT_BF16, .stored_as = "bf16"},
    {.name = "deepseek-v3", .arch = "DeepseekV3ForCausalLM", .model_type = "deepseek_v3",
     .family = HP_V3, DEEPSEEK_V3},
    {.name = "deepseek-v3.1", .arch = "DeepseekV3ForCausalLM", .model_type = "deepseek_v3",
     .family = HP_V31, DEEPSEEK_V3},
    {.name = "deepseek-v3.2", .arch = "DeepseekV32ForCausalLM", .model_type = "deepseek_v32",
     .family = HP_V32, DEEPSEEK_V3, .n_index_head = 64, .index_dim = 128, .topk = 2048,
     .n_index_layer = 61, .index_full = {ONE_60, 1}},
    {.name = "kimi-k2", .arch = "DeepseekV3ForCausalLM", .model_type = "kimi_k2",
     .family = HP_KIMI, .vocab = 163840, .hidden = 7168, .inter = 18432, .moe_inter = 2048,
     .n_layer = 61, .n_dense = 1, .n_head = 64, .q_lora = 1536, MLA_DIMS, ROUTER_V3,
     .n_expert = 384, .n_group = 1, .topk_group = 1, .route_scale = 2.827f, .eps = 1e-6f,
     .theta = 50000.0, YARN(32.0, 1.0, 1.0), .max_ctx = 131072, .bos = 163584, .n_eos = 1,
     .eos = {163585}, FP8},
    {.name = "glm-5", .family = HP_GLM5, GLM_5, INDEX_78_OF_78, .theta = 1e6, .max_ctx = 202752},
    {.name = "glm-5.1", .family = HP_GLM5, GLM_5, INDEX_78_OF_78, .theta = 1e6,
     .max_ctx = 202752},
    {.name = "glm-5.2", .family = HP_GLM52, GLM_5, INDEX_21_OF_78, .index_share_mtp = true,
     .theta = 8e6, .max_ctx = 1048576},
    {.name = "needle", .arch = "GlmMoeDsaForCausalLM", .model_type = "glm_moe_dsa",
     .family = HP_GLM52, .vocab = 4096, .hidden = 256, .inter = 1024, .moe_inter = 128,
     .n_layer = 6, .n_dense = 2, .n_head = 8, .q_lora = 128, .kv_lora = 512, .nope = 64, .rope = 64,
     .v_dim = 64, .n_index_head = 4, .index_dim = 128, .topk = 128, .index_interleaved = true,
     .n_index_layer = 2, .index_full = {1, 0, 0, 1, 0, 0}, .index_share_mtp = true, .n_expert = 8,
     .n_shared = 1, .n_active = 2, .n_group = 1, .topk_group = 1, .router = HP_SIGMOID,
     .norm_topk = true, .route_scale = 2.5f, .router_bias = true, .eps = 1e-5f, .theta = 8e6,
     .n_mtp = 1, .max_ctx = 1048576, .bos = -1, .n_eos = 3, .eos = {4075, 4082, 4084}, FP8},
    {.name = "random-v32", .arch = "DeepseekV32ForCausalLM", .model_type = "deepseek_v32",
     .family = HP_V32, .vocab = 1024, .hidden = 128, .inter = 384, .moe_inter = 128, .n_layer = 3,
     .n_dense = 1, .n_head = 8, .q_lora = 128, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 64, .n_index_head = 4, .index_dim = 128, .topk = 32, .n_index_layer = 3,
     .index_full = {1, 1, 1}, .n_expert = 16, .n_shared = 1, .n_active = 4, .n_group = 4,
     .topk_group = 2, .router = HP_SIGMOID, .norm_topk = true, .route_scale = 2.5f,
     .router_bias = true, .eps = 1e-6f, .theta = 10000.0, .yarn = true, .yarn_factor = 40.0,
     .yarn_orig = 64, .yarn_beta_fast = 32.0, .yarn_beta_slow = 1.0, .yarn_mscale = 1.0,
     .yarn_mscale_all = 1.0, .n_mtp = 1, .max_ctx = 2560, .bos = 0, .n_eos = 1, .eos = {1}, FP8},
};
/* clang-format on */

enum { N_PRESET = (int)(sizeof k_preset / sizeof *k_preset) };

const hp *hp_preset(int32_t i)
{
    return i >= 0 && i < N_PRESET ? &k_preset[i] : NULL;
}

kvs_status hp_find(hp *h, const char *preset, kvs_error *err)
{
    char known[256] = "";
    for (int32_t i = 0; i < N_PRESET; i++) {
        if (strcmp(preset, k_preset[i].name) == 0) {
            *h = k_preset[i];
            return KVS_OK;
        }
        strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, k_preset[i].name, sizeof known - strlen(known) - 1);
    }
    return err_set(err, KVS_INVALID, "preset %.40s: unknown; use one of %s", preset, known);
}
