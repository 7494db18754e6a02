/* engine/geom.c - the known models. */
#include "engine/geom.h"

#include <string.h>

#include "base/err.h"

/* clang-format off */
static const geom k_preset[] = {
    {.name = "deepseek-v2-lite", .arch = "DeepseekV2ForCausalLM",
     .vocab = 102400, .hidden = 2048, .inter = 10944, .moe_inter = 1408, .n_layer = 27,
     .n_dense = 1, .n_head = 16, .q_lora = 0, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 128, .n_expert = 64, .n_shared = 2, .router_bias = false, .max_ctx = 163840,
     .stored = KVS_WEIGHT_BF16, .stored_as = "bf16"},
    {.name = "deepseek-v3", .arch = "DeepseekV3ForCausalLM",
     .vocab = 129280, .hidden = 7168, .inter = 18432, .moe_inter = 2048, .n_layer = 61,
     .n_dense = 3, .n_head = 128, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 128, .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1,
     .max_ctx = 163840, .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "deepseek-v3.1", .arch = "DeepseekV3ForCausalLM",
     .vocab = 129280, .hidden = 7168, .inter = 18432, .moe_inter = 2048, .n_layer = 61,
     .n_dense = 3, .n_head = 128, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 128, .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1,
     .max_ctx = 163840, .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "deepseek-v3.2", .arch = "DeepseekV32ForCausalLM",
     .vocab = 129280, .hidden = 7168, .inter = 18432, .moe_inter = 2048, .n_layer = 61,
     .n_dense = 3, .n_head = 128, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 128, .n_index_head = 64, .index_dim = 128, .topk = 2048, .n_index_layer = 61,
     .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1, .max_ctx = 163840,
     .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "kimi-k2", .arch = "DeepseekV3ForCausalLM",
     .vocab = 163840, .hidden = 7168, .inter = 18432, .moe_inter = 2048, .n_layer = 61,
     .n_dense = 1, .n_head = 64, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64,
     .v_dim = 128, .n_expert = 384, .n_shared = 1, .router_bias = true, .max_ctx = 131072,
     .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "glm-5", .arch = "GlmMoeDsaForCausalLM",
     .vocab = 154880, .hidden = 6144, .inter = 12288, .moe_inter = 2048, .n_layer = 78,
     .n_dense = 3, .n_head = 64, .q_lora = 2048, .kv_lora = 512, .nope = 192, .rope = 64,
     .v_dim = 256, .n_index_head = 32, .index_dim = 128, .topk = 2048, .n_index_layer = 78,
     .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1, .max_ctx = 202752,
     .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "glm-5.1", .arch = "GlmMoeDsaForCausalLM",
     .vocab = 154880, .hidden = 6144, .inter = 12288, .moe_inter = 2048, .n_layer = 78,
     .n_dense = 3, .n_head = 64, .q_lora = 2048, .kv_lora = 512, .nope = 192, .rope = 64,
     .v_dim = 256, .n_index_head = 32, .index_dim = 128, .topk = 2048, .n_index_layer = 78,
     .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1, .max_ctx = 202752,
     .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
    {.name = "glm-5.2", .arch = "GlmMoeDsaForCausalLM",
     .vocab = 154880, .hidden = 6144, .inter = 12288, .moe_inter = 2048, .n_layer = 78,
     .n_dense = 3, .n_head = 64, .q_lora = 2048, .kv_lora = 512, .nope = 192, .rope = 64,
     .v_dim = 256, .n_index_head = 32, .index_dim = 128, .topk = 2048, .n_index_layer = 21,
     .n_expert = 256, .n_shared = 1, .router_bias = true, .n_mtp = 1, .max_ctx = 1048576,
     .stored = KVS_WEIGHT_FP8, .stored_as = "fp8"},
};
/* clang-format on */

enum { N_PRESET = (int)(sizeof k_preset / sizeof *k_preset) };

const geom *geom_preset(int32_t i)
{
    return i >= 0 && i < N_PRESET ? &k_preset[i] : NULL;
}

kvs_status geom_find(geom *g, const char *preset, kvs_error *err)
{
    char known[192] = "";
    for (int32_t i = 0; i < N_PRESET; i++) {
        if (strcmp(preset, k_preset[i].name) == 0) {
            *g = k_preset[i];
            return KVS_OK;
        }
        strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, k_preset[i].name, sizeof known - strlen(known) - 1);
    }
    return err_set(err, KVS_INVALID, "preset %.40s: unknown; use one of %s", preset, known);
}
