/* engine/geom_json.c - a model's geometry from its config.json.
 *
 * Untrusted input: every key is checked for its type and the limits of geom.h before it is used,
 * and the message names the key and the value. `null` counts as absent. Keys that do not decide
 * sizes are not looked at. */
#include "engine/geom.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "base/mem.h"

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

typedef struct arch {
    const char *name;
    bool dsa;  /* index keys are required; without: refused */
    bool bias; /* a bias beside the router                   */
} arch;

static const arch k_arch[] = {
    {"DeepseekV2ForCausalLM", false, false},
    {"DeepseekV3ForCausalLM", false, true},
    {"DeepseekV32ForCausalLM", true, true},
    {"GlmMoeDsaForCausalLM", true, true},
};

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

/* Refuses a key that is there and true: it would add tensors that are not counted. */
static kvs_status refuse_true(const json_t *root, const char *key, kvs_error *err)
{
    const json_t *v = get(root, key);
    if (v != NULL && !json_is_false(v)) {
        return err_set(err, KVS_UNSUPPORTED, "config.json: %s is set: only false is supported",
                       key);
    }
    return KVS_OK;
}

static kvs_status read_arch(geom *g, const json_t *root, const arch **out, kvs_error *err)
{
    const json_t *list = get(root, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    if (name == NULL) {
        return err_set(err, KVS_FORMAT, "config.json: architectures is no list of names");
    }
    for (size_t i = 0; i < sizeof k_arch / sizeof *k_arch; i++) {
        if (strcmp(name, k_arch[i].name) == 0) {
            snprintf(g->arch, sizeof g->arch, "%s", name);
            g->router_bias = k_arch[i].bias;
            *out = &k_arch[i];
            return KVS_OK;
        }
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "config.json: architecture %.48s: use one of DeepseekV2ForCausalLM, "
                   "DeepseekV3ForCausalLM, DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM",
                   name);
}

static kvs_status read_dims(geom *g, const json_t *root, kvs_error *err)
{
    int32_t kv_heads = 0;
    TRY(get_i32(root, "vocab_size", 1, 1 << 24, 0, &g->vocab, err));
    TRY(get_i32(root, "hidden_size", 1, 65536, 0, &g->hidden, err));
    TRY(get_i32(root, "intermediate_size", 1, 1 << 18, 0, &g->inter, err));
    TRY(get_i32(root, "num_hidden_layers", 1, 1024, 0, &g->n_layer, err));
    TRY(get_i32(root, "num_attention_heads", 1, 1024, 0, &g->n_head, err));
    TRY(get_i32(root, "num_key_value_heads", 1, 1024, g->n_head, &kv_heads, err));
    TRY(get_i32(root, "q_lora_rank", 0, 65536, 0, &g->q_lora, err));
    TRY(get_i32(root, "kv_lora_rank", 1, 65536, 0, &g->kv_lora, err));
    TRY(get_i32(root, "qk_nope_head_dim", 1, 4096, 0, &g->nope, err));
    TRY(get_i32(root, "qk_rope_head_dim", 1, 4096, 0, &g->rope, err));
    TRY(get_i32(root, "v_head_dim", 1, 4096, 0, &g->v_dim, err));
    TRY(get_int(root, "max_position_embeddings", 1, INT32_MAX, 0, &g->max_ctx, err));
    TRY(get_i32(root, "num_nextn_predict_layers", 0, 8, 0, &g->n_mtp, err));
    if (kv_heads != g->n_head) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: num_key_value_heads %d: must equal num_attention_heads %d",
                       kv_heads, g->n_head);
    }
    const json_t *tied = get(root, "tie_word_embeddings");
    g->tied = tied != NULL && json_is_true(tied);
    return refuse_true(root, "attention_bias", err);
}

/* Layers that have no experts: first_k_dense_replace, or the leading "dense" of mlp_layer_types. */
static kvs_status read_dense_layers(geom *g, const json_t *root, kvs_error *err)
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
    TRY(get_i32(root, "first_k_dense_replace", 0, g->n_layer, 0, &first, err));
    if (types == NULL) {
        if (!has_first) {
            return err_set(err, KVS_FORMAT, "config.json: first_k_dense_replace is missing");
        }
        g->n_dense = first;
        return KVS_OK;
    }
    if (!json_is_array(types) || json_array_size(types) < (size_t)g->n_layer) {
        return err_set(err, KVS_FORMAT, "config.json: mlp_layer_types does not list %d layers",
                       g->n_layer);
    }
    int32_t n_dense = 0;
    for (int32_t i = 0; i < g->n_layer; i++) {
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
    g->n_dense = n_dense;
    return KVS_OK;
}

static kvs_status read_experts(geom *g, const json_t *root, kvs_error *err)
{
    TRY(get_i32(root, "n_routed_experts", 0, 4096, 0, &g->n_expert, err));
    TRY(get_i32(root, "n_shared_experts", 0, 64, 0, &g->n_shared, err));
    if (g->n_expert == 0) {
        g->n_dense = g->n_layer;
        return KVS_OK;
    }
    TRY(get_i32(root, "moe_intermediate_size", 1, 65536, 0, &g->moe_inter, err));
    return read_dense_layers(g, root, err);
}

/* Which layers have an indexer of their own: indexer_types, else index_topk_freq with
 * index_skip_topk_offset, else all. */
static kvs_status read_index_layers(geom *g, const json_t *root, kvs_error *err)
{
    const json_t *types = get(root, "indexer_types");
    g->n_index_layer = 0;
    if (types != NULL) {
        if (!json_is_array(types) || json_array_size(types) < (size_t)g->n_layer) {
            return err_set(err, KVS_FORMAT, "config.json: indexer_types does not list %d layers",
                           g->n_layer);
        }
        for (int32_t i = 0; i < g->n_layer; i++) {
            const char *t = json_string_value(json_array_get(types, (size_t)i));
            const bool full = t != NULL && strcmp(t, "full") == 0;
            if (!full && (t == NULL || strcmp(t, "shared") != 0 || i == 0)) {
                return err_set(err, KVS_FORMAT, "config.json: indexer_types[%d] is not %s", i,
                               i == 0 ? "full" : "full or shared");
            }
            g->n_index_layer += full;
        }
        return KVS_OK;
    }
    if (get(root, "index_topk_pattern") != NULL) {
        return err_set(err, KVS_UNSUPPORTED,
                       "config.json: index_topk_pattern without indexer_types: list the layers in "
                       "indexer_types");
    }
    if (get(root, "index_topk_freq") == NULL) {
        g->n_index_layer = g->n_layer;
        return KVS_OK;
    }
    int32_t freq = 0;
    int32_t offset = 0;
    TRY(get_i32(root, "index_topk_freq", 1, 1024, 0, &freq, err));
    TRY(get_i32(root, "index_skip_topk_offset", 0, 1024, -1, &offset, err));
    for (int32_t i = 0; i < g->n_layer; i++) {
        const int32_t past = i - offset + 1;
        g->n_index_layer += past <= 0 || past % freq == 0;
    }
    return KVS_OK;
}

static kvs_status read_indexer(geom *g, const arch *a, const json_t *root, kvs_error *err)
{
    const json_t *heads = get(root, "index_n_heads");
    if (!a->dsa) {
        if (heads != NULL) {
            return err_set(err, KVS_FORMAT, "config.json: index_n_heads: %s has no indexer",
                           a->name);
        }
        return KVS_OK;
    }
    TRY(get_i32(root, "index_n_heads", 1, 1024, 0, &g->n_index_head, err));
    TRY(get_i32(root, "index_head_dim", 1, 4096, 0, &g->index_dim, err));
    TRY(get_i32(root, "index_topk", 1, 1 << 24, 0, &g->topk, err));
    if (g->q_lora == 0) {
        return err_set(err, KVS_FORMAT,
                       "config.json: q_lora_rank is missing: the indexer reads it");
    }
    return read_index_layers(g, root, err);
}

/* How the products are stored. An unknown form is not an error here: a plan may name another. */
static kvs_status read_quant(geom *g, const json_t *root, kvs_error *err)
{
    const json_t *q = get(root, "quantization_config");
    g->stored = KVS_WEIGHT_BF16;
    snprintf(g->stored_as, sizeof g->stored_as, "bf16");
    if (q == NULL) {
        return KVS_OK;
    }
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    if (method == NULL) {
        return err_set(err, KVS_FORMAT, "config.json: quantization_config has no quant_method");
    }
    const json_t *block = json_object_get(q, "weight_block_size");
    const bool fp8 = strcmp(method, "fp8") == 0 && json_array_size(block) == 2 &&
                     json_integer_value(json_array_get(block, 0)) == 128 &&
                     json_integer_value(json_array_get(block, 1)) == 128;
    g->stored = fp8 ? KVS_WEIGHT_FP8 : KVS_WEIGHT_AUTO;
    snprintf(g->stored_as, sizeof g->stored_as, "%s", method);
    return KVS_OK;
}

static kvs_status read_root(geom *g, const json_t *root, kvs_error *err)
{
    const arch *a = NULL;
    TRY(read_arch(g, root, &a, err));
    TRY(read_dims(g, root, err));
    TRY(read_experts(g, root, err));
    TRY(read_indexer(g, a, root, err));
    return read_quant(g, root, err);
}

kvs_status geom_parse(geom *g, const char *name, const char *text, size_t n, kvs_error *err)
{
    memset(g, 0, sizeof *g);
    snprintf(g->name, sizeof g->name, "%s", name);
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        const kvs_status st =
            err_set(err, KVS_FORMAT, "config.json line %d: %s", why.line, why.text);
        err_at(err, why.position);
        return st;
    }
    const kvs_status st = json_is_object(root)
                              ? read_root(g, root, err)
                              : err_set(err, KVS_FORMAT, "config.json: not an object");
    json_decref(root);
    return st;
}

kvs_status geom_read(geom *g, const char *dir, kvs_error *err)
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
    char name[sizeof g->name];
    size_t from = len;
    while (from > 0 && dir[from - 1] != '/') {
        from--;
    }
    snprintf(name, sizeof name, "%.*s", (int)(len - from), dir + from);
    char *text = NULL;
    size_t n_text = 0;
    TRY(file_read_all(path, CONFIG_BYTES_MAX, &text, &n_text, err));
    const kvs_status st = geom_parse(g, name, text, n_text, err);
    mem_free(text);
    if (st < 0) {
        err_prefix(err, "%.*s", (int)(len < 80 ? len : 80), dir);
    }
    return st;
}
