/* model/hp_keys.c - the keys of config.json that are read, and those that change nothing. */
#include "model/hp_keys.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"

/* hp_json.c looks at these and refuses the values that it cannot follow. */
static const char *const k_read[] = {
    "architectures",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "first_k_dense_replace",
    "hidden_act",
    "hidden_size",
    "index_head_dim",
    "index_n_heads",
    "index_share_for_mtp_iteration",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "intermediate_size",
    "is_causal",
    "kv_lora_rank",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_layer_types",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "moe_router_dtype",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "quantization_config",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "scoring_func",
    "tie_word_embeddings",
    "topk_group",
    "topk_method",
    "v_head_dim",
    "vocab_size",
};

/* Training, bookkeeping, dtypes (tensors say their own), the generation defaults that transformers 4 wrote into
 * this file, and head_dim, which has no meaning in this family. */
static const char *const k_skip[] = {
    "add_cross_attention",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "base_model_ep_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
};

static const char *const k_rope[] = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
};

#define COUNT(list) (sizeof(list) / sizeof *(list))

static bool has(const char *const *list, size_t n, const char *key)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i], key) == 0) {
            return true;
        }
    }
    return false;
}

/* Whether a value switches nothing on. */
static bool is_off(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) ||
           (json_is_number(v) && json_number_value(v) == 0.0) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static kvs_status refuse_key(const char *where, const char *key, const json_t *v, kvs_error *err)
{
    char value[40] = "a structure";
    if (json_is_string(v)) {
        snprintf(value, sizeof value, "\"%.24s\"", json_string_value(v));
    } else if (json_is_number(v)) {
        snprintf(value, sizeof value, "%g", json_number_value(v));
    } else if (json_is_boolean(v)) {
        snprintf(value, sizeof value, "%s", json_is_true(v) ? "true" : "false");
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "config.json: %s%.60s is %s: an unknown key may change the maths; take it out "
                   "if it does not",
                   where, key, value);
}

kvs_status hp_keys_check(const json_t *config, kvs_error *err)
{
    for (void *it = json_object_iter((json_t *)(uintptr_t)config); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)config, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *v = json_object_iter_value(it);
        if (key[0] != '_' && !is_off(v) && !has(k_read, COUNT(k_read), key) &&
            !has(k_skip, COUNT(k_skip), key)) {
            return refuse_key("", key, v, err);
        }
    }
    return KVS_OK;
}

kvs_status hp_keys_check_rope(const json_t *rope, const char *where, kvs_error *err)
{
    for (void *it = json_object_iter((json_t *)(uintptr_t)rope); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)rope, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *v = json_object_iter_value(it);
        if (!json_is_null(v) && !has(k_rope, COUNT(k_rope), key)) {
            char prefix[32];
            snprintf(prefix, sizeof prefix, "%s.", where);
            return refuse_key(prefix, key, v, err);
        }
    }
    return KVS_OK;
}

kvs_status hp_keys_check_no_index(const json_t *config, const char *arch, kvs_error *err)
{
    for (void *it = json_object_iter((json_t *)(uintptr_t)config); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)config, it)) {
        const char *key = json_object_iter_key(it);
        if (strncmp(key, "index", 5) == 0 && !is_off(json_object_iter_value(it))) {
            return err_set(err, KVS_FORMAT,
                           "config.json: %.60s: %s has no indexer: take the key out, or name an "
                           "architecture that has one",
                           key, arch);
        }
    }
    return KVS_OK;
}
