/* Checkpoints that are not what their config.json says: each missing, cut, misshapen, mistyped or superfluous tensor is
 * refused by its name; scales and norms that no model can have are found when opening. */
#include "unit/unit.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/wt.h"
#include "unit/model/ckpt.h"

static char s_dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(s_dir, sizeof s_dir, "/tmp/kvspan-wt-XXXXXX");
    return mkdtemp(s_dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    ckpt_remove(s_dir);
    return 0;
}

#define SPEC(type, ...) (&(const ckpt_spec){.dtype = (type), __VA_ARGS__})

/* The most varied form: fp8, indexers, experts one by one, a draft layer. */
static ckpt *varied(void)
{
    return ckpt_new(SPEC("F8_E4M3", .index = true, .mtp = true));
}

/* Opening what lies in the folder must end with one of two codes and name both words. */
static void refuse_dir(kvs_status want, const char *word_a, const char *word_b)
{
    wt *w = (wt *)1;
    kvs_error err = {.code = KVS_OK};
    const kvs_status st = wt_open(&w, s_dir, 1, &err);
    if (st != want || strstr(err.text, word_a) == NULL || strstr(err.text, word_b) == NULL) {
        fail_msg("%s, %s: %s \"%s\"", word_a, word_b, kvs_status_name(st), err.text);
    }
    assert_null(w);
}

static void refuse(const ckpt *c, kvs_status want, const char *word_a, const char *word_b)
{
    ckpt_write(c, s_dir, 1, 0);
    refuse_dir(want, word_a, word_b);
}

static void each_missing_tensor_is_named(void **state)
{
    (void)state;
    ckpt *c = varied();
    const int n = c->n;
    assert_true(n > 100);
    for (int i = 0; i < n; i++) {
        const ckpt_tensor t = c->t[i];
        c->t[i] = c->t[n - 1];
        c->n = n - 1;
        char word[200];
        snprintf(word, sizeof word, "tensor %s is missing", t.name);
        refuse(c, KVS_FORMAT, word, s_dir);
        c->n = n;
        c->t[i] = t;
    }
    ckpt_free(c);
}

static void each_wrong_shape_is_named_with_the_right_one(void **state)
{
    (void)state;
    ckpt *c = varied();
    for (int i = 0; i < c->n; i++) {
        ckpt_tensor *t = &c->t[i];
        const ckpt_tensor good = *t;
        char must[80];
        if (good.n_dim == 1) {
            snprintf(must, sizeof must, "must be [%d]", (int)good.dim[0]);
        } else {
            snprintf(must, sizeof must, "must be [%d, %d]", (int)good.dim[0], (int)good.dim[1]);
        }
        /* a dimension more, one row more, transposed */
        t->n_dim = good.n_dim + 1;
        t->dim[good.n_dim] = 1;
        refuse(c, KVS_FORMAT, good.name, must);
        *t = good;
        if (good.n_dim == 2 && good.dim[0] != good.dim[1] && i % 4 == 0) {
            t->dim[0] = good.dim[1];
            t->dim[1] = good.dim[0];
            refuse(c, KVS_FORMAT, good.name, must);
            *t = good;
        }
    }
    ckpt_tensor *o = &c->t[ckpt_find(c, "model.layers.1.self_attn.kv_b_proj.weight")];
    o->dim[0]--;
    o->bytes -= (size_t)o->dim[1];
    refuse(c, KVS_FORMAT, "kv_b_proj.weight", "shape [275, 140]: must be [276, 140]");
    ckpt_free(c);
}

static void retype(ckpt *c, const char *name, const char *dtype)
{
    ckpt_tensor *t = &c->t[ckpt_find(c, name)];
    char copy[160];
    snprintf(copy, sizeof copy, "%s", name);
    const ckpt_tensor old = *t;
    const int i = ckpt_add(c, copy, dtype, old.dim[0], old.dim[1], old.dim[2]);
    ckpt_tensor *added = &c->t[i];
    *t = *added;
    *added = old;
    ckpt_drop(c, i);
}

static void types_that_are_not_read_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *name, *dtype, *word;
    } bad[] = {
        {"model.layers.0.self_attn.o_proj.weight", "F16", "type F16: must be BF16, F32 or F8_E4M3"},
        {"model.layers.0.self_attn.o_proj.weight", "U8", "type U8"},
        {"model.layers.0.self_attn.o_proj.weight", "F8_E5M2", "type F8_E5M2"},
        {"model.layers.2.mlp.experts.3.down_proj.weight", "I32", "type I32"},
        {"model.embed_tokens.weight", "F8_E4M3", "type F8_E4M3: must be BF16 or F32"},
        {"lm_head.weight", "F8_E4M3", "type F8_E4M3"},
        {"model.layers.1.mlp.gate.weight", "F8_E4M3", "type F8_E4M3"},
        {"model.layers.0.self_attn.indexer.weights_proj.weight", "F8_E4M3", "type F8_E4M3"},
        {"model.layers.0.input_layernorm.weight", "F16", "type F16: must be BF16 or F32"},
        {"model.layers.1.mlp.gate.e_score_correction_bias", "F8_E4M3", "type F8_E4M3"},
        {"model.layers.1.self_attn.o_proj.weight_scale_inv", "BF16", "type BF16: must be F32"},
        {"model.layers.1.self_attn.o_proj.weight_scale_inv", "F8_E8M0", "type F8_E8M0"},
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        ckpt *c = varied();
        retype(c, bad[i].name, bad[i].dtype);
        refuse(c, KVS_UNSUPPORTED, bad[i].name, bad[i].word);
        ckpt_free(c);
    }
}

/* Whether a weight is fp8 is its tensor's to say, so a scale beside a weight that is not must be a mistake. */
static void a_scale_beside_a_weight_that_is_not_fp8_is_refused(void **state)
{
    (void)state;
    ckpt *c = varied();
    retype(c, "model.layers.1.self_attn.o_proj.weight", "BF16");
    refuse(c, KVS_FORMAT, "model.layers.1.self_attn.o_proj.weight_scale_inv", "BF16");
    ckpt_drop(c, ckpt_find(c, "model.layers.1.self_attn.o_proj.weight_scale_inv"));
    ckpt_write(c, s_dir, 1, 0);
    wt *w = NULL;
    assert_int_equal(wt_open(&w, s_dir, 1, NULL), KVS_OK); /* one bf16 weight among fp8 */
    assert_int_equal(w->layer[1].o.type, GEMM_BF16);
    assert_int_equal(w->layer[2].o.type, GEMM_FP8);
    wt_close(w);
    ckpt_free(c);
}

static void put_f32(ckpt *c, const char *name, size_t at, float x)
{
    ckpt_tensor *t = &c->t[ckpt_find(c, name)];
    assert_string_equal(t->dtype, "F32");
    assert_true(4 * at < t->bytes);
    memcpy(t->data + 4 * at, &x, sizeof x);
}

static void scales_and_norms_that_cannot_be_are_refused(void **state)
{
    (void)state;
    static const char scale[] = "model.layers.3.mlp.experts.2.up_proj.weight_scale_inv";
    const float bad[] = {NAN, INFINITY, -INFINITY, -0.5f};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        ckpt *c = varied();
        put_f32(c, scale, 1, bad[i]); /* the last of [1, 2] */
        refuse(c, KVS_FORMAT, scale, "element 1");
        ckpt_free(c);
    }
    ckpt *c = varied();
    put_f32(c, scale, 1, 0.0f);
    put_f32(c, "model.layers.0.self_attn.indexer.k_norm.bias", 15, INFINITY);
    refuse(c, KVS_FORMAT, "indexer.k_norm.bias", "element 15");
    put_f32(c, "model.layers.0.self_attn.indexer.k_norm.bias", 15, 0.5f);
    ckpt_tensor *norm = &c->t[ckpt_find(c, "model.norm.weight")];
    norm->data[2 * 159] = 0xC0; /* bf16 7FC0 */
    norm->data[2 * 159 + 1] = 0x7F;
    refuse(c, KVS_FORMAT, "model.norm.weight", "element 159");
    ckpt_free(c);
}

static void scales_of_cached_rows_must_be_positive(void **state)
{
    (void)state;
    const float bad[] = {0.0f, -1.0f, NAN, INFINITY};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        ckpt *c = ckpt_new(SPEC("BF16", .mtp = true));
        const int k = ckpt_add(c, "model.layers.2.self_attn.attn.k_scale", "F32", 1, 0, 0);
        memcpy(c->t[k].data, &bad[i], 4);
        refuse(c, KVS_FORMAT, "model.layers.2.self_attn.attn.k_scale", "must be positive");
        ckpt_free(c);
    }
    ckpt *c = ckpt_new(SPEC("BF16", .mtp = true));
    ckpt_add(c, "model.layers.2.self_attn.k_scale", "F32", 2, 0, 0);
    refuse(c, KVS_FORMAT, "model.layers.2.self_attn.k_scale", "shape [2]");
    ckpt_free(c);
}

static void tensors_that_nothing_computes_are_refused(void **state)
{
    (void)state;
    static const char *const extra[] = {
        "model.layers.1.self_attn.q_b_proj.bias",
        "model.layers.1.self_attn.sinks",
        "model.layers.1.self_attn.indexer.wk.weight", /* this layer shares the selection of layer 0 */
        "model.layers.0.mlp.gate.weight",             /* this one is dense */
        "model.layers.2.mlp.experts.4.up_proj.weight",
        "model.layers.4.embed_norm.weight",
        "model.layers.5.input_layernorm.weight", /* behind the one draft layer */
        "model.layers.99999999999999999999.mlp.gate.weight",
        "model.extra.weight",
        "lm_head.bias",
        "visual.blocks.0.weight",
        "model.layers.0.self_attn.kv_a_layernorm.weight_scale_inv",
    };
    for (size_t i = 0; i < UNIT_COUNT(extra); i++) {
        ckpt *c = varied();
        ckpt_add(c, extra[i], "BF16", 4, 4, 0);
        refuse(c, KVS_UNSUPPORTED, extra[i], "has no place");
        ckpt_add(c, "zzz", "BF16", 4, 4, 0);
        refuse(c, KVS_UNSUPPORTED, extra[i], "1 more");
        ckpt_free(c);
    }
    /* both forms of experts at once */
    ckpt *c = varied();
    ckpt_add(c, "model.layers.1.mlp.experts.gate_up_proj", "BF16", CKPT_EXPERT, 2 * CKPT_MOE,
             CKPT_HIDDEN);
    ckpt_add(c, "model.layers.1.mlp.experts.down_proj", "BF16", CKPT_EXPERT, CKPT_HIDDEN, CKPT_MOE);
    refuse(c, KVS_UNSUPPORTED, "model.layers.1.mlp.experts.0.", "more");
    ckpt_free(c);
}

static void fused_experts_of_a_wrong_shape_are_named(void **state)
{
    (void)state;
    static const char *const name[] = {"model.layers.1.mlp.experts.gate_up_proj",
                                       "model.layers.2.mlp.experts.down_proj",
                                       "model.layers.3.mlp.experts.down_proj_scale_inv"};
    static const char *const must[] = {"must be [4, 256, 160]", "must be [4, 160, 128]",
                                       "must be [4, 2, 1]"};
    for (size_t i = 0; i < UNIT_COUNT(name); i++) {
        ckpt *c = ckpt_new(SPEC("F8_E4M3", .fused = true, .index = true, .moe = 128));
        ckpt_tensor *t = &c->t[ckpt_find(c, name[i])];
        t->dim[0] /= 2;
        t->dim[1] *= 2;
        refuse(c, KVS_FORMAT, name[i], must[i]);
        ckpt_free(c);
    }
}

/* Where gate's last block is not full, writers disagree on where up's first begins. */
static void fused_fp8_experts_that_share_a_block_are_refused(void **state)
{
    (void)state;
    ckpt *c = ckpt_new(SPEC("F8_E4M3", .fused = true));
    refuse(c, KVS_UNSUPPORTED, "model.layers.1.mlp.experts.gate_up_proj", "96");
    ckpt_free(c);
}

static void a_shard_that_was_cut_is_named(void **state)
{
    (void)state;
    ckpt *c = varied();
    ckpt_write(c, s_dir, 3, 0);
    char path[128];
    snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", s_dir);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size - 1), 0);
    refuse_dir(KVS_FORMAT, "model-00002-of-00003.safetensors", "tensor");
    unlink(path);
    refuse_dir(KVS_IO, "model-00002-of-00003.safetensors", "");
    ckpt_free(c);
}

static void storage_that_is_not_read_is_refused_before_the_files(void **state)
{
    (void)state;
    ckpt *c = varied();
    char *at = strstr(c->config, "\"fp8\"");
    assert_non_null(at);
    memcpy(at, "\"awq\"", 5);
    refuse(c, KVS_UNSUPPORTED, "awq", "e4m3");
    memcpy(at, "\"fp8\"", 5);
    memcpy(strstr(c->config, "[128,128]"), "[ 64,128]", 9);
    refuse(c, KVS_UNSUPPORTED, "fp8", "128 x 128");
    ckpt_free(c);
}

static void folders_without_config_or_weights_are_refused(void **state)
{
    (void)state;
    refuse_dir(KVS_IO, "config.json", s_dir);
    ckpt *c = varied();
    ckpt_write(c, s_dir, 1, 0);
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors", s_dir);
    unlink(path);
    refuse_dir(KVS_IO, "neither model.safetensors", s_dir);
    snprintf(path, sizeof path, "%s/config.json", s_dir);
    unlink(path);
    ckpt_free(c);
}

int main(void)
{
#define IN_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        IN_DIR(each_missing_tensor_is_named),
        IN_DIR(each_wrong_shape_is_named_with_the_right_one),
        IN_DIR(types_that_are_not_read_are_named),
        IN_DIR(a_scale_beside_a_weight_that_is_not_fp8_is_refused),
        IN_DIR(scales_and_norms_that_cannot_be_are_refused),
        IN_DIR(scales_of_cached_rows_must_be_positive),
        IN_DIR(tensors_that_nothing_computes_are_refused),
        IN_DIR(fused_experts_of_a_wrong_shape_are_named),
        IN_DIR(fused_fp8_experts_that_share_a_block_are_refused),
        IN_DIR(a_shard_that_was_cut_is_named),
        IN_DIR(storage_that_is_not_read_is_refused_before_the_files),
        IN_DIR(folders_without_config_or_weights_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
