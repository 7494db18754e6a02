/* model/hp_json.c - a model's hyper-parameters from its config.json.
 *
 * Untrusted input: every key is checked for its type and the limits of hp.h before it is used, and the message
 * names the key and the value. `null` counts as absent. A key that sizes or maths depend on has no default, unless
 * the architecture fixes it or every reader of the file uses the same one. Keys that this file does not read are
 * judged by hp_keys.c.
 *
 * Rope settings come flat (rope_theta beside rope_scaling) or nested (rope_parameters). In a multimodal wrapper the
 * text model's settings are those of text_config. */
#include "model/hp.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "model/hp_keys.h"

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

typedef struct arch {
    const char *name;
    const char *model_type; /* where the file does not say                             */
    bool dsa;               /* index keys are required; without: refused               */
    bool sigmoid;           /* the router, where scoring_func and topk_method are absent */
    bool index_interleaved; /* where indexer_rope_interleave is absent                 */
} arch;

static const arch k_arch[] = {
    {"DeepseekV2ForCausalLM", "deepseek_v2", false, false, false},
    {"DeepseekV3ForCausalLM", "deepseek_v3", false, true, false},
    {"DeepseekV32ForCausalLM", "deepseek_v32", true, true, false},
    {"GlmMoeDsaForCausalLM", "glm_moe_dsa", true, true, true},
    {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", false, true, true},
};

enum { N_ARCH = (int)(sizeof k_arch / sizeof *k_arch) };

#define USE_ONE_OF                                                                                 \
    "use one of DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, DeepseekV32ForCausalLM, "            \
    "GlmMoeDsaForCausalLM, Glm4MoeLiteForCausalLM"

/* ---- values ---------------------------------------------------------------------------------- */

static const json_t *get(const json_t *root, const char *key)
{
    const json_t *v = json_object_get(root, key);
    return v == NULL || json_is_null(v) ? NULL : v;
}

/* The integer `key` in lo..hi, or `absent` where it is missing; absent < lo makes it required. */
static kvs_status get_int(const json_t *root, const char *key, int64_t lo, int64_t hi,
                          int64_t absent, int64_t *out, kvs_error *err)
{
    const json_t *v = get(root, key);
    if (v == NULL) {
        if (absent < lo) {
            return err_set(err, KVS_FORMAT, "config.json: %s is missing", key);
        }
        *out = absent;
        return KVS_OK;
    }
    if (!json_is_integer(v)) {
        return err_set(err, KVS_FORMAT, "config.json: %s is no integer", key);
    }
    const int64_t x = json_integer_value(v);
    if (x < lo || x > hi) {
        return err_set(err, KVS_FORMAT,
                       "config.json: %s %" PRId64 ": must be %" PRId64 " to %" PRId64, key, x, lo,
                       hi);
    }
    *out = x;
    return KVS_OK;
}

static kvs_status get_i32(const json_t *root, const char *key, int32_t lo, int32_t hi,
                          int32_t absent, int32_t *out, kvs_error *err)
{
    int64_t x = 0;
    TRY(get_int(root, key, lo, hi, absent, &x, err));
    *out = (int32_t)x;
    return KVS_OK;
}

/* The finite number `key` in lo..hi, or `absent`; an absent of NAN makes it required. */
static kvs_status get_num(const json_t *root, const char *key, double lo, double hi, double absent,
                          double *out, kvs_error *err)
{
    const json_t *v = get(root, key);
    if (v == NULL) {
        if (isnan(absent)) {
            return err_set(err, KVS_FORMAT, "config.json: %s is missing", key);
        }
        *out = absent;
        return KVS_OK;
    }
    if (!json_is_number(v)) {
        return err_set(err, KVS_FORMAT, "config.json: %s is no number", key);
    }
    const double x = json_number_value(v);
    if (!(x >= lo && x <= hi)) {
        return err_set(err, KVS_FORMAT, "config.json: %s %g: must be %g to %g", key, x, lo, hi);
    }
    *out = x;
    return KVS_OK;
}

typedef enum absent_flag { ABSENT_FALSE, ABSENT_TRUE, ABSENT_ERROR } absent_flag;

static kvs_status get_flag(const json_t *root, const char *key, absent_flag absent, bool *out,
                           kvs_error *err)
{
    const json_t *v = get(root, key);
    if (v == NULL && absent == ABSENT_ERROR) {
        return err_set(err, KVS_FORMAT, "config.json: %s is missing", key);
    }
    if (v != NULL && !json_is_boolean(v)) {
        return err_set(err, KVS_FORMAT, "config.json: %s is neither true nor false", key);
    }
    *out = v == NULL ? absent == ABSENT_TRUE : json_is_true(v);
    return KVS_OK;
}

static kvs_status get_text(const json_t *root, const char *key, const char *absent,
                           const char **out, kvs_error *err)
{
    const json_t *v = get(root, key);
    if (v != NULL && !json_is_string(v)) {
        return err_set(err, KVS_FORMAT, "config.json: %s is no text", key);
    }
    *out = v == NULL ? absent : json_string_value(v);
    return KVS_OK;
}

/* Refuses a flag that is there and not the one value that this library follows. */
static kvs_status only_flag(const json_t *root, const char *key, bool want, kvs_error *err)
{
    bool set = false;
    TRY(get_flag(root, key, want ? ABSENT_TRUE : ABSENT_FALSE, &set, err));
    if (set != want) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: %s %s: only %s is supported", key,
                       set ? "true" : "false", want ? "true" : "false");
    }
    return KVS_OK;
}

static kvs_status only_text(const json_t *root, const char *key, const char *want, kvs_error *err)
{
    const char *text = NULL;
    TRY(get_text(root, key, want, &text, err));
    if (strcmp(text, want) != 0) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: %s %.40s: only %s is supported", key,
                       text, want);
    }
    return KVS_OK;
}

/* Refuses an integer that is there and contradicts what another key says. */
static kvs_status same_int(const json_t *root, const char *key, int64_t want, const char *as,
                           kvs_error *err)
{
    int64_t x = 0;
    TRY(get_int(root, key, 0, INT32_MAX, want, &x, err));
    if (x != want) {
        return err_set(err, KVS_FORMAT, "config.json: %s %" PRId64 ": %s gives %" PRId64, key, x,
                       as, want);
    }
    return KVS_OK;
}

/* ---- architecture and sizes ------------------------------------------------------------------ */

static const arch *find_arch(const char *name, const char *model_type)
{
    for (int i = 0; i < N_ARCH; i++) {
        if (name != NULL ? strcmp(name, k_arch[i].name) == 0
                         : strcmp(model_type, k_arch[i].model_type) == 0) {
            return &k_arch[i];
        }
    }
    return NULL;
}

static kvs_status read_arch(hp *h, const json_t *root, const arch **out, kvs_error *err)
{
    const json_t *list = get(root, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    const char *type = NULL;
    TRY(get_text(root, "model_type", NULL, &type, err));
    if (name == NULL && (list != NULL || type == NULL || h->prefix[0] == '\0')) {
        return err_set(err, KVS_FORMAT,
                       "config.json: architectures is missing or no list of names: " USE_ONE_OF);
    }
    const bool kimi = name == NULL && strcmp(type, "kimi_k2") == 0;
    const arch *a = find_arch(name, kimi ? "deepseek_v3" : type);
    if (a == NULL) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: architecture %.48s: " USE_ONE_OF,
                       name != NULL ? name : type);
    }
    const arch *named = type != NULL ? find_arch(NULL, type) : a;
    if (named != NULL && named != a) {
        return err_set(err, KVS_FORMAT,
                       "config.json: model_type %.40s is that of %s, architectures names %s: make "
                       "them agree",
                       type, named->name, a->name);
    }
    snprintf(h->arch, sizeof h->arch, "%s", a->name);
    snprintf(h->model_type, sizeof h->model_type, "%s", type != NULL ? type : a->model_type);
    *out = a;
    return KVS_OK;
}

static kvs_status read_dims(hp *h, const json_t *root, kvs_error *err)
{
    int32_t kv_heads = 0;
    TRY(get_i32(root, "vocab_size", 1, 1 << 24, 0, &h->vocab, err));
    TRY(get_i32(root, "hidden_size", 1, 65536, 0, &h->hidden, err));
    TRY(get_i32(root, "intermediate_size", 1, 1 << 18, 0, &h->inter, err));
    TRY(get_i32(root, "num_hidden_layers", 1, HP_MAX_LAYER, 0, &h->n_layer, err));
    TRY(get_i32(root, "num_attention_heads", 1, 1024, 0, &h->n_head, err));
    TRY(get_i32(root, "num_key_value_heads", 1, 1024, h->n_head, &kv_heads, err));
    TRY(get_i32(root, "q_lora_rank", 0, 65536, 0, &h->q_lora, err));
    TRY(get_i32(root, "kv_lora_rank", 1, 65536, 0, &h->kv_lora, err));
    TRY(get_i32(root, "qk_nope_head_dim", 1, 4096, 0, &h->nope, err));
    TRY(get_i32(root, "qk_rope_head_dim", 1, 4096, 0, &h->rope, err));
    TRY(get_i32(root, "v_head_dim", 1, 4096, 0, &h->v_dim, err));
    TRY(get_int(root, "max_position_embeddings", 1, INT32_MAX, 0, &h->max_ctx, err));
    TRY(get_i32(root, "num_nextn_predict_layers", 0, 8, 0, &h->n_mtp, err));
    if (get(root, "num_nextn_predict_layers") == NULL) {
        TRY(get_i32(root, "num_mtp_layers", 0, 8, 0, &h->n_mtp, err));
    }
    TRY(same_int(root, "num_mtp_layers", h->n_mtp, "num_nextn_predict_layers", err));
    TRY(same_int(root, "qk_head_dim", (int64_t)h->nope + h->rope,
                 "qk_nope_head_dim + qk_rope_head_dim", err));
    if (kv_heads != h->n_head) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: num_key_value_heads %d: must equal num_attention_heads %d",
                       kv_heads, h->n_head);
    }
    if (h->rope % 2 != 0) {
        return err_set(err, KVS_FORMAT, "config.json: qk_rope_head_dim %d: must be even", h->rope);
    }
    double eps = 0.0;
    TRY(get_num(root, "rms_norm_eps", 1e-12, 1.0, NAN, &eps, err));
    h->eps = (float)eps;
    TRY(get_flag(root, "tie_word_embeddings", ABSENT_FALSE, &h->tied, err));
    TRY(only_flag(root, "attention_bias", false, err));
    TRY(only_flag(root, "mlp_bias", false, err));
    TRY(only_flag(root, "is_causal", true, err));
    return only_text(root, "hidden_act", "silu", err);
}

static kvs_status read_tokens(hp *h, const json_t *root, kvs_error *err)
{
    TRY(get_i32(root, "bos_token_id", -1, INT32_MAX, -1, &h->bos, err));
    const json_t *eos = get(root, "eos_token_id");
    if (eos == NULL) {
        return KVS_OK;
    }
    const size_t n = json_is_array(eos) ? json_array_size(eos) : 1;
    if (n > HP_MAX_EOS) {
        return err_set(err, KVS_FORMAT, "config.json: eos_token_id lists %zu tokens: at most %d", n,
                       HP_MAX_EOS);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(eos) ? json_array_get(eos, i) : eos;
        const json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id < 0 || id >= h->vocab) {
            return err_set(err, KVS_FORMAT,
                           "config.json: eos_token_id is no token of 0 to %d or list of such",
                           h->vocab - 1);
        }
        h->eos[h->n_eos++] = (int32_t)id;
    }
    return KVS_OK;
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* Layers that have no experts: first_k_dense_replace, or the leading "dense" of mlp_layer_types. */
static kvs_status read_dense_layers(hp *h, const json_t *root, kvs_error *err)
{
    int32_t freq = 0;
    int32_t first = 0;
    TRY(get_i32(root, "moe_layer_freq", 1, 1024, 1, &freq, err));
    if (freq != 1) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: moe_layer_freq %d: only 1 is supported",
                       freq);
    }
    const json_t *types = get(root, "mlp_layer_types");
    const bool has_first = get(root, "first_k_dense_replace") != NULL;
    TRY(get_i32(root, "first_k_dense_replace", 0, h->n_layer, 0, &first, err));
    if (types == NULL) {
        if (!has_first) {
            return err_set(err, KVS_FORMAT, "config.json: first_k_dense_replace is missing");
        }
        h->n_dense = first;
        return KVS_OK;
    }
    if (!json_is_array(types) || json_array_size(types) < (size_t)h->n_layer) {
        return err_set(err, KVS_FORMAT, "config.json: mlp_layer_types does not list %d layers",
                       h->n_layer);
    }
    int32_t n_dense = 0;
    for (int32_t i = 0; i < h->n_layer; i++) {
        const char *t = json_string_value(json_array_get(types, (size_t)i));
        const bool dense = t != NULL && strcmp(t, "dense") == 0;
        if (!dense && (t == NULL || strcmp(t, "sparse") != 0)) {
            return err_set(err, KVS_FORMAT,
                           "config.json: mlp_layer_types[%d] is neither dense nor sparse", i);
        }
        if (dense && n_dense != i) {
            return err_set(err, KVS_UNSUPPORTED,
                           "config.json: mlp_layer_types[%d] is dense after a sparse layer: dense "
                           "layers must come first",
                           i);
        }
        n_dense += dense;
    }
    if (has_first && first != n_dense) {
        return err_set(err, KVS_FORMAT,
                       "config.json: first_k_dense_replace %d and mlp_layer_types with %d dense "
                       "layers disagree",
                       first, n_dense);
    }
    h->n_dense = n_dense;
    return KVS_OK;
}

/* What the cache classes of transformers 5 are chosen by: it may say only what the architecture does anyway. */
static kvs_status check_layer_types(const json_t *root, kvs_error *err)
{
    const json_t *types = get(root, "layer_types");
    if (types != NULL && !json_is_array(types)) {
        return err_set(err, KVS_FORMAT, "config.json: layer_types is no list");
    }
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *t = json_string_value(json_array_get(types, i));
        if (t == NULL ||
            (strcmp(t, "deepseek_sparse_attention") != 0 && strcmp(t, "full_attention") != 0)) {
            return err_set(
                err, KVS_UNSUPPORTED,
                "config.json: layer_types[%zu] %.40s: only deepseek_sparse_attention and "
                "full_attention are supported",
                i, t != NULL ? t : "is no name");
        }
    }
    return KVS_OK;
}

/* ---- experts --------------------------------------------------------------------------------- */

static kvs_status read_groups(hp *h, const json_t *root, const char *method, kvs_error *err)
{
    h->n_group = 1;
    h->topk_group = 1;
    if (strcmp(method, "greedy") == 0) {
        return KVS_OK;
    }
    TRY(get_i32(root, "n_group", 1, h->n_expert, 0, &h->n_group, err));
    TRY(get_i32(root, "topk_group", 1, h->n_group, 0, &h->topk_group, err));
    const int32_t size = h->n_expert / h->n_group;
    if (h->n_expert % h->n_group != 0 || (h->n_group > 1 && !h->group_max && size < 2)) {
        return err_set(err, KVS_FORMAT, "config.json: n_group %d: %d experts make no such groups",
                       h->n_group, h->n_expert);
    }
    if (h->n_active > size * h->topk_group) {
        return err_set(err, KVS_FORMAT,
                       "config.json: num_experts_per_tok %d: topk_group %d leaves %d experts",
                       h->n_active, h->topk_group, size * h->topk_group);
    }
    return KVS_OK;
}

/* Two routers exist: softmax, whose choice is the score (greedy, or the best groups first by their largest), and
 * sigmoid with a bias that takes part in the choice alone (noaux_tc). */
static kvs_status read_router(hp *h, const arch *a, const json_t *root, kvs_error *err)
{
    const char *score = NULL;
    const char *method = NULL;
    TRY(get_text(root, "scoring_func", a->sigmoid ? "sigmoid" : "softmax", &score, err));
    TRY(get_text(root, "topk_method", a->sigmoid ? "noaux_tc" : "greedy", &method, err));
    TRY(only_text(root, "moe_router_dtype", "float32", err));
    const bool sigmoid = strcmp(score, "sigmoid") == 0;
    if (!sigmoid && strcmp(score, "softmax") != 0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: scoring_func %.40s: only softmax and sigmoid are supported",
                       score);
    }
    const bool fits =
        sigmoid ? strcmp(method, "noaux_tc") == 0
                : strcmp(method, "greedy") == 0 || strcmp(method, "group_limited_greedy") == 0;
    if (!fits) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: topk_method %.40s: with %s only %s",
                       method, score, sigmoid ? "noaux_tc" : "greedy and group_limited_greedy");
    }
    h->router = sigmoid ? HP_SIGMOID : HP_SOFTMAX;
    h->router_bias = sigmoid;
    h->group_max = strcmp(method, "group_limited_greedy") == 0;
    double scale = 0.0;
    TRY(get_i32(root, "num_experts_per_tok", 1, h->n_expert, 0, &h->n_active, err));
    TRY(get_flag(root, "norm_topk_prob", ABSENT_ERROR, &h->norm_topk, err));
    TRY(get_num(root, "routed_scaling_factor", 1e-6, 1e6, NAN, &scale, err));
    h->route_scale = (float)scale;
    if (!sigmoid && h->norm_topk && scale != 1.0) {
        return err_set(
            err, KVS_UNSUPPORTED,
            "config.json: routed_scaling_factor %g with norm_topk_prob and softmax: readers "
            "of this architecture disagree on whether it applies",
            scale);
    }
    return read_groups(h, root, method, err);
}

static kvs_status read_experts(hp *h, const arch *a, const json_t *root, kvs_error *err)
{
    TRY(get_i32(root, "n_routed_experts", 0, 4096, 0, &h->n_expert, err));
    if (get(root, "n_routed_experts") == NULL) {
        TRY(get_i32(root, "num_experts", 0, 4096, 0, &h->n_expert, err));
    }
    TRY(same_int(root, "num_experts", h->n_expert, "n_routed_experts", err));
    TRY(same_int(root, "num_local_experts", h->n_expert, "n_routed_experts", err));
    TRY(get_i32(root, "n_shared_experts", 0, 64, 0, &h->n_shared, err));
    if (h->n_expert == 0) {
        h->n_dense = h->n_layer;
        h->n_shared = 0;
        return KVS_OK;
    }
    TRY(get_i32(root, "moe_intermediate_size", 1, 65536, 0, &h->moe_inter, err));
    TRY(read_dense_layers(h, root, err));
    return read_router(h, a, root, err);
}

/* ---- indexer --------------------------------------------------------------------------------- */

static kvs_status read_index_list(hp *h, const json_t *types, kvs_error *err)
{
    if (!json_is_array(types) || json_array_size(types) < (size_t)h->n_layer) {
        return err_set(err, KVS_FORMAT, "config.json: indexer_types does not list %d layers",
                       h->n_layer);
    }
    for (int32_t i = 0; i < h->n_layer; i++) {
        const char *t = json_string_value(json_array_get(types, (size_t)i));
        const bool full = t != NULL && strcmp(t, "full") == 0;
        if (!full && (t == NULL || strcmp(t, "shared") != 0 || i == 0)) {
            return err_set(err, KVS_FORMAT, "config.json: indexer_types[%d] is not %s", i,
                           i == 0 ? "full" : "full or shared");
        }
        h->index_full[i] = full;
    }
    return KVS_OK;
}

/* A letter per layer: F full, S shared. */
static kvs_status read_index_pattern(hp *h, const json_t *pattern, kvs_error *err)
{
    const char *text = json_string_value(pattern);
    if (text == NULL || strlen(text) < (size_t)h->n_layer) {
        return err_set(err, KVS_FORMAT,
                       "config.json: index_topk_pattern has no letter for each of %d layers",
                       h->n_layer);
    }
    for (int32_t i = 0; i < h->n_layer; i++) {
        if (text[i] != 'F' && (text[i] != 'S' || i == 0)) {
            return err_set(err, KVS_FORMAT, "config.json: index_topk_pattern: letter %d is not %s",
                           i, i == 0 ? "F" : "F or S");
        }
        h->index_full[i] = text[i] == 'F';
    }
    return KVS_OK;
}

/* Which layers have an indexer of their own: indexer_types, else index_topk_pattern, else
 * index_topk_freq with index_skip_topk_offset, else all. */
static kvs_status read_index_layers(hp *h, const json_t *root, kvs_error *err)
{
    const json_t *types = get(root, "indexer_types");
    const json_t *pattern = get(root, "index_topk_pattern");
    if (types != NULL) {
        TRY(read_index_list(h, types, err));
    } else if (pattern != NULL) {
        TRY(read_index_pattern(h, pattern, err));
    } else {
        int32_t freq = 1;
        int32_t offset = 0;
        if (get(root, "index_topk_freq") != NULL) {
            TRY(get_i32(root, "index_topk_freq", 1, 1024, 0, &freq, err));
            TRY(get_i32(root, "index_skip_topk_offset", 0, 1024, -1, &offset, err));
        }
        for (int32_t i = 0; i < h->n_layer; i++) {
            const int32_t past = i - offset + 1;
            h->index_full[i] = past <= 0 || past % freq == 0;
        }
        if (!h->index_full[0]) {
            return err_set(
                err, KVS_FORMAT,
                "config.json: index_skip_topk_offset %d with index_topk_freq %d: layer 0 "
                "would have no indexer to share",
                offset, freq);
        }
    }
    for (int32_t i = 0; i < h->n_layer; i++) {
        h->n_index_layer += h->index_full[i];
    }
    return KVS_OK;
}

static kvs_status read_indexer(hp *h, const arch *a, const json_t *root, kvs_error *err)
{
    if (!a->dsa) {
        return hp_keys_check_no_index(root, a->name, err);
    }
    TRY(get_i32(root, "index_n_heads", 1, 1024, 0, &h->n_index_head, err));
    TRY(get_i32(root, "index_head_dim", 1, 4096, 0, &h->index_dim, err));
    TRY(get_i32(root, "index_topk", 1, 1 << 24, 0, &h->topk, err));
    TRY(get_flag(root, "indexer_rope_interleave", a->index_interleaved ? ABSENT_TRUE : ABSENT_FALSE,
                 &h->index_interleaved, err));
    TRY(get_flag(root, "index_share_for_mtp_iteration", ABSENT_FALSE, &h->index_share_mtp, err));
    if (h->q_lora == 0) {
        return err_set(err, KVS_FORMAT,
                       "config.json: q_lora_rank is missing: the indexer reads it");
    }
    return read_index_layers(h, root, err);
}

/* ---- rope ------------------------------------------------------------------------------------ */

static kvs_status read_yarn(hp *h, const json_t *rope, kvs_error *err)
{
    h->yarn = true;
    TRY(get_num(rope, "factor", 1.0, 1e6, NAN, &h->yarn_factor, err));
    TRY(get_int(rope, "original_max_position_embeddings", 1, INT32_MAX, 0, &h->yarn_orig, err));
    TRY(get_num(rope, "beta_fast", 1e-3, 1e6, 32.0, &h->yarn_beta_fast, err));
    TRY(get_num(rope, "beta_slow", 1e-3, 1e6, 1.0, &h->yarn_beta_slow, err));
    TRY(get_num(rope, "mscale", 0.0, 1e3, 1.0, &h->yarn_mscale, err));
    TRY(get_num(rope, "mscale_all_dim", 0.0, 1e3, 0.0, &h->yarn_mscale_all, err));
    double factor = 0.0;
    const bool open =
        get(rope, "mscale") != NULL ? h->yarn_mscale == 0.0 : h->yarn_mscale_all != 0.0;
    if (open && get(rope, "attention_factor") == NULL) {
        return err_set(
            err, KVS_UNSUPPORTED,
            "config.json: mscale is missing or 0 beside mscale_all_dim %g: readers disagree "
            "on what that means; known models set both alike",
            h->yarn_mscale_all);
    }
    TRY(get_num(rope, "attention_factor", 0.0, 1e3, hp_rope_magnitude(h), &factor, err));
    if (fabs(factor - hp_rope_magnitude(h)) > 1e-6) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: attention_factor %g: mscale and mscale_all_dim give %g",
                       factor, hp_rope_magnitude(h));
    }
    return KVS_OK;
}

/* theta from the nested object, the root, or both where they agree. */
static kvs_status read_theta(hp *h, const json_t *root, const json_t *rope, kvs_error *err)
{
    const bool nested = get(rope, "rope_theta") != NULL;
    TRY(get_num(nested ? rope : root, "rope_theta", 1.0 + 1e-6, 1e12, NAN, &h->theta, err));
    double other = 0.0;
    TRY(get_num(root, "rope_theta", 1.0 + 1e-6, 1e12, h->theta, &other, err));
    if (other != h->theta) {
        return err_set(err, KVS_FORMAT, "config.json: rope_theta %g: the nested one is %g", other,
                       h->theta);
    }
    return KVS_OK;
}

static kvs_status check_partial(const json_t *o, kvs_error *err)
{
    double partial = 1.0;
    TRY(get_num(o, "partial_rotary_factor", 0.0, 1.0, 1.0, &partial, err));
    if (partial != 1.0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: partial_rotary_factor %g: only 1 is supported", partial);
    }
    return KVS_OK;
}

static kvs_status read_rope(hp *h, const json_t *root, kvs_error *err)
{
    const json_t *nested = get(root, "rope_parameters");
    const json_t *flat = get(root, "rope_scaling");
    const char *where = nested != NULL ? "rope_parameters" : "rope_scaling";
    const json_t *rope = nested != NULL ? nested : flat;
    if (rope != NULL && !json_is_object(rope)) {
        return err_set(err, KVS_FORMAT, "config.json: %s is no object", where);
    }
    if (nested != NULL && flat != NULL && !json_equal(nested, flat)) {
        return err_set(err, KVS_FORMAT,
                       "config.json: rope_scaling and rope_parameters disagree: keep one");
    }
    TRY(only_flag(root, "rope_interleave", true, err));
    TRY(check_partial(root, err));
    TRY(read_theta(h, root, rope, err));
    if (rope == NULL) {
        return KVS_OK;
    }
    TRY(hp_keys_check_rope(rope, where, err));
    TRY(check_partial(rope, err));
    const char *type = NULL;
    const char *old = NULL;
    TRY(get_text(rope, "type", NULL, &old, err));
    TRY(get_text(rope, "rope_type", old, &type, err));
    if (type == NULL || (old != NULL && strcmp(old, type) != 0)) {
        return err_set(err, KVS_FORMAT, "config.json: %s.rope_type is missing or differs from type",
                       where);
    }
    if (strcmp(type, "default") == 0) {
        double factor = 1.0;
        TRY(get_num(rope, "factor", 0.0, 1e6, 1.0, &factor, err));
        return factor == 1.0 ? KVS_OK
                             : err_set(err, KVS_FORMAT,
                                       "config.json: %s.factor %g with rope_type default, which "
                                       "stretches nothing: say yarn, or take it out",
                                       where, factor);
    }
    if (strcmp(type, "yarn") != 0) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: %s.rope_type %.40s: only default and yarn are supported",
                       where, type);
    }
    return read_yarn(h, rope, err);
}

/* ---- storage, family ------------------------------------------------------------------------- */

/* How the products are stored. An unknown form is not an error here: a plan may name another. */
static kvs_status read_quant(hp *h, const json_t *root, bool *ue8m0, kvs_error *err)
{
    const json_t *q = get(root, "quantization_config");
    h->stored = KVS_WEIGHT_BF16;
    snprintf(h->stored_as, sizeof h->stored_as, "bf16");
    *ue8m0 = false;
    if (q == NULL) {
        return KVS_OK;
    }
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    if (method == NULL) {
        return err_set(err, KVS_FORMAT, "config.json: quantization_config has no quant_method");
    }
    const json_t *block = json_object_get(q, "weight_block_size");
    const char *fmt = json_string_value(json_object_get(q, "fmt"));
    const char *scale = json_string_value(json_object_get(q, "scale_fmt"));
    const bool fp8 = strcmp(method, "fp8") == 0 && json_array_size(block) == 2 &&
                     json_integer_value(json_array_get(block, 0)) == 128 &&
                     json_integer_value(json_array_get(block, 1)) == 128 &&
                     (fmt == NULL || strcmp(fmt, "e4m3") == 0);
    h->stored = fp8 ? KVS_WEIGHT_FP8 : KVS_WEIGHT_AUTO;
    snprintf(h->stored_as, sizeof h->stored_as, "%s", method);
    *ue8m0 = scale != NULL && strcmp(scale, "ue8m0") == 0;
    return KVS_OK;
}

/* Which prompts the model expects. Kimi's models are known by their vocabulary where the type is DeepSeek's; V3.1
 * differs from V3 in this file by the form of its activation scales alone. */
static hp_family family_of(const hp *h, const arch *a, bool ue8m0)
{
    if (strcmp(a->model_type, "deepseek_v2") == 0) {
        return HP_V2;
    }
    if (strcmp(a->model_type, "deepseek_v32") == 0) {
        return HP_V32;
    }
    if (strcmp(a->model_type, "glm4_moe_lite") == 0) {
        return HP_GLM4_LITE;
    }
    if (strcmp(a->model_type, "glm_moe_dsa") == 0) {
        return h->n_index_layer < h->n_layer || h->index_share_mtp ? HP_GLM52 : HP_GLM5;
    }
    if (strncmp(h->model_type, "kimi", 4) == 0 || h->vocab == 163840) {
        return HP_KIMI;
    }
    return ue8m0 ? HP_V31 : HP_V3;
}

/* ---- the file -------------------------------------------------------------------------------- */

/* The settings of the text model: the root, or text_config in Kimi's multimodal wrapper. */
static kvs_status text_config(hp *h, const json_t *root, const json_t **out, kvs_error *err)
{
    const json_t *text = get(root, "text_config");
    *out = root;
    if (text == NULL) {
        return KVS_OK;
    }
    const char *type = NULL;
    TRY(get_text(root, "model_type", "of no name", &type, err));
    if (!json_is_object(text)) {
        return err_set(err, KVS_FORMAT, "config.json: text_config is no object");
    }
    if (strncmp(type, "kimi", 4) != 0) {
        return err_set(
            err, KVS_UNSUPPORTED,
            "config.json: model_type %.40s wraps a text_config: only Kimi's wrapper is known",
            type);
    }
    snprintf(h->prefix, sizeof h->prefix, "language_model.");
    *out = text;
    return KVS_OK;
}

static kvs_status read_root(hp *h, const json_t *root, kvs_error *err)
{
    const json_t *text = NULL;
    const arch *a = NULL;
    bool ue8m0 = false;
    TRY(text_config(h, root, &text, err));
    TRY(read_arch(h, text, &a, err));
    TRY(read_dims(h, text, err));
    TRY(read_tokens(h, text, err));
    TRY(read_experts(h, a, text, err));
    TRY(check_layer_types(text, err));
    TRY(read_indexer(h, a, text, err));
    TRY(read_rope(h, text, err));
    TRY(read_quant(h, get(text, "quantization_config") != NULL ? text : root, &ue8m0, err));
    h->family = family_of(h, a, ue8m0);
    return hp_keys_check(text, err);
}

static int hash_piece(const char *text, size_t n, void *state)
{
    hash_add128(state, text, n);
    return 0;
}

/* Piece by piece: json_dumps drops a quote where memory runs out at the wrong moment, and says nothing. */
static kvs_status hash_config(hp *h, const json_t *root, kvs_error *err)
{
    hash_state state;
    hash_init128(&state);
    if (json_dump_callback(root, hash_piece, &state, JSON_SORT_KEYS | JSON_COMPACT) != 0) {
        return err_set(err, KVS_NOMEM, "config.json: no memory for its canonical form");
    }
    const hash128 x = hash_get128(&state);
    h->config_hash[0] = x.lo;
    h->config_hash[1] = x.hi;
    return KVS_OK;
}

kvs_status hp_parse(hp *h, const char *name, const char *text, size_t n, kvs_error *err)
{
    memset(h, 0, sizeof *h);
    snprintf(h->name, sizeof h->name, "%s", name);
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        const kvs_status st =
            err_set(err, KVS_FORMAT, "config.json line %d: %s", why.line, why.text);
        err_at(err, why.position);
        return st;
    }
    kvs_status st = json_is_object(root) ? read_root(h, root, err)
                                         : err_set(err, KVS_FORMAT, "config.json: not an object");
    if (st >= 0) {
        st = hash_config(h, root, err);
    }
    json_decref(root);
    return st;
}

kvs_status hp_read(hp *h, const char *dir, kvs_error *err)
{
    size_t len = strlen(dir);
    while (len > 1 && dir[len - 1] == '/') {
        len--;
    }
    char path[4096];
    const int n = snprintf(path, sizeof path, "%.*s/config.json", (int)len, dir);
    if (n < 0 || (size_t)n >= sizeof path) {
        return err_set(err, KVS_INVALID, "model folder: a path of %zu bytes is too long", len);
    }
    char name[sizeof h->name];
    size_t from = len;
    while (from > 0 && dir[from - 1] != '/') {
        from--;
    }
    snprintf(name, sizeof name, "%.*s", (int)(len - from), dir + from);
    char *text = NULL;
    size_t n_text = 0;
    TRY(file_read_all(path, CONFIG_BYTES_MAX, &text, &n_text, err));
    const kvs_status st = hp_parse(h, name, text, n_text, err);
    mem_free(text);
    if (st < 0) {
        err_prefix(err, "%.*s", (int)(len < 80 ? len : 80), dir);
    }
    return st;
}
