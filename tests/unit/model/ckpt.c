#include "unit/unit.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

#include "unit/model/ckpt.h"

static uint64_t s_random; /* xorshift */

double ckpt_e4m3(uint8_t code)
{
    const int e = code >> 3 & 15;
    const int m = code & 7;
    const double sign = code & 0x80 ? -1.0 : 1.0;
    if (e == 15 && m == 7) {
        return NAN;
    }
    return sign * (e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10));
}

static int size_of(const char *dtype)
{
    return strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0  ? 2
           : strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0 ? 4
                                                                    : 1;
}

/* Any value that is finite; scales are told by their name, and positive. */
static void fill(ckpt_tensor *t)
{
    const size_t size = (size_t)size_of(t->dtype);
    const bool scale = strstr(t->name, "scale") != NULL;
    const bool bf16 = strcmp(t->dtype, "BF16") == 0;
    const bool f32 = strcmp(t->dtype, "F32") == 0;
    for (size_t i = 0; i < t->bytes; i += size) {
        s_random ^= s_random << 13;
        s_random ^= s_random >> 7;
        s_random ^= s_random << 17;
        const float x = (float)(s_random >> 40) * 0x1p-23f - (scale ? -0.01f : 1.0f);
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        if (f32) {
            memcpy(t->data + i, &u, sizeof u);
        } else if (bf16) {
            const uint16_t high = (uint16_t)(u >> 16);
            memcpy(t->data + i, &high, sizeof high);
        } else {
            const int code = (int)(s_random >> 32 & 255);
            memset(t->data + i, (code & 0x7F) == 0x7F ? 0x11 : code, size);
        }
    }
}

int ckpt_add(ckpt *c, const char *name, const char *dtype, int64_t d0, int64_t d1, int64_t d2)
{
    assert_true(c->n < CKPT_MAX_TENSOR);
    ckpt_tensor *t = &c->t[c->n];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    const int64_t dim[3] = {d0, d1, d2};
    t->bytes = (size_t)size_of(dtype);
    while (t->n_dim < 3 && dim[t->n_dim] > 0) {
        t->bytes *= (size_t)dim[t->n_dim];
        t->dim[t->n_dim] = dim[t->n_dim];
        t->n_dim++;
    }
    t->data = malloc(t->bytes);
    assert_non_null(t->data);
    fill(t);
    return c->n++;
}

static int look(const ckpt *c, const char *name)
{
    static int last; /* the one asked for before: elements of a tensor are asked for in a row */
    if (last < c->n && strcmp(c->t[last].name, name) == 0) {
        return last;
    }
    for (int i = 0; i < c->n; i++) {
        if (strcmp(c->t[i].name, name) == 0) {
            last = i;
            return i;
        }
    }
    return -1;
}

bool ckpt_has(const ckpt *c, const char *name)
{
    return look(c, name) >= 0;
}

int ckpt_find(const ckpt *c, const char *name)
{
    const int i = look(c, name);
    if (i < 0) {
        fail_msg("the checkpoint has no %s", name);
    }
    return i;
}

void ckpt_drop(ckpt *c, int i)
{
    free(c->t[i].data);
    c->t[i] = c->t[--c->n];
}

void ckpt_free(ckpt *c)
{
    while (c->n > 0) {
        ckpt_drop(c, 0);
    }
    free(c);
}

/* ---- the tiny model -------------------------------------------------------------------------- */

int ckpt_moe(const ckpt_spec *s)
{
    return s->moe > 0 ? s->moe : CKPT_MOE;
}

typedef struct maker {
    ckpt *c;
    const ckpt_spec *s;
    char at[96]; /* "language_model.model.layers.3." */
} maker;

static const char *plain_dtype(const maker *m)
{
    return strcmp(m->s->dtype, "F32") == 0 ? "F32" : "BF16";
}

static void plain(const maker *m, const char *name, int64_t d0, int64_t d1)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s", m->at, name);
    ckpt_add(m->c, full, plain_dtype(m), d0, d1, 0);
}

static void product(const maker *m, const char *name, int64_t d0, int64_t d1, int64_t d2)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s", m->at, name);
    ckpt_add(m->c, full, m->s->dtype, d0, d1, d2);
    if (strcmp(m->s->dtype, "F8_E4M3") == 0) {
        strncat(full, "_scale_inv", sizeof full - strlen(full) - 1);
        if (d2 > 0) {
            ckpt_add(m->c, full, "F32", d0, (d1 + 127) / 128, (d2 + 127) / 128);
        } else {
            ckpt_add(m->c, full, "F32", (d0 + 127) / 128, (d1 + 127) / 128, 0);
        }
    }
}

static void ffn(const maker *m, const char *where, int64_t inter)
{
    char name[96];
    snprintf(name, sizeof name, "%s.gate_proj.weight", where);
    product(m, name, inter, CKPT_HIDDEN, 0);
    snprintf(name, sizeof name, "%s.up_proj.weight", where);
    product(m, name, inter, CKPT_HIDDEN, 0);
    snprintf(name, sizeof name, "%s.down_proj.weight", where);
    product(m, name, CKPT_HIDDEN, inter, 0);
}

static void moe(const maker *m)
{
    plain(m, "mlp.gate.weight", CKPT_EXPERT, CKPT_HIDDEN);
    if (!m->s->softmax) {
        char full[160];
        snprintf(full, sizeof full, "%smlp.gate.e_score_correction_bias", m->at);
        ckpt_add(m->c, full, "F32", CKPT_EXPERT, 0, 0);
    }
    if (m->s->fused) {
        product(m, "mlp.experts.gate_up_proj", CKPT_EXPERT, 2 * ckpt_moe(m->s), CKPT_HIDDEN);
        product(m, "mlp.experts.down_proj", CKPT_EXPERT, CKPT_HIDDEN, ckpt_moe(m->s));
    }
    for (int e = 0; e < CKPT_EXPERT && !m->s->fused; e++) {
        char where[40];
        snprintf(where, sizeof where, "mlp.experts.%d", e);
        ffn(m, where, ckpt_moe(m->s));
    }
    ffn(m, "mlp.shared_experts", CKPT_SHARED * ckpt_moe(m->s));
}

static void layer(maker *m, int i)
{
    snprintf(m->at, sizeof m->at, "%smodel.layers.%d.", m->s->prefix, i);
    const bool draft = i >= CKPT_LAYER;
    plain(m, "input_layernorm.weight", CKPT_HIDDEN, 0);
    plain(m, "post_attention_layernorm.weight", CKPT_HIDDEN, 0);
    if (!m->s->no_q_lora) {
        product(m, "self_attn.q_a_proj.weight", CKPT_Q_LORA, CKPT_HIDDEN, 0);
        plain(m, "self_attn.q_a_layernorm.weight", CKPT_Q_LORA, 0);
        product(m, "self_attn.q_b_proj.weight", CKPT_HEAD * (CKPT_NOPE + CKPT_ROPE), CKPT_Q_LORA,
                0);
    } else {
        product(m, "self_attn.q_proj.weight", CKPT_HEAD * (CKPT_NOPE + CKPT_ROPE), CKPT_HIDDEN, 0);
    }
    product(m, "self_attn.kv_a_proj_with_mqa.weight", CKPT_KV_LORA + CKPT_ROPE, CKPT_HIDDEN, 0);
    plain(m, "self_attn.kv_a_layernorm.weight", CKPT_KV_LORA, 0);
    product(m, "self_attn.kv_b_proj.weight", CKPT_HEAD * (CKPT_NOPE + CKPT_V), CKPT_KV_LORA, 0);
    product(m, "self_attn.o_proj.weight", CKPT_HIDDEN, CKPT_HEAD * CKPT_V, 0);
    if (m->s->index && (draft || i % 2 == 0)) {
        product(m, "self_attn.indexer.wq_b.weight", CKPT_INDEX_HEAD * CKPT_INDEX_DIM, CKPT_Q_LORA,
                0);
        product(m, "self_attn.indexer.wk.weight", CKPT_INDEX_DIM, CKPT_HIDDEN, 0);
        plain(m, "self_attn.indexer.weights_proj.weight", CKPT_INDEX_HEAD, CKPT_HIDDEN);
        char full[160]; /* f32 in one layer, bf16 in another: readers look at the type */
        snprintf(full, sizeof full, "%sself_attn.indexer.k_norm.weight", m->at);
        ckpt_add(m->c, full, i == 0 ? "F32" : plain_dtype(m), CKPT_INDEX_DIM, 0, 0);
        snprintf(full, sizeof full, "%sself_attn.indexer.k_norm.bias", m->at);
        ckpt_add(m->c, full, i == 0 ? "F32" : plain_dtype(m), CKPT_INDEX_DIM, 0, 0);
    }
    if (i == 0) {
        ffn(m, "mlp", CKPT_INTER);
    } else {
        moe(m);
    }
    if (draft) {
        plain(m, "enorm.weight", CKPT_HIDDEN, 0);
        plain(m, "hnorm.weight", CKPT_HIDDEN, 0);
        plain(m, "shared_head.norm.weight", CKPT_HIDDEN, 0);
        plain(m, "eh_proj.weight", CKPT_HIDDEN, 2 * CKPT_HIDDEN);
    }
}

static void config(ckpt *c, const ckpt_spec *s)
{
    char text[3072];
    snprintf(text, sizeof text,
             "{\"architectures\":[\"%s\"],\"vocab_size\":%d,\"hidden_size\":%d,"
             "\"intermediate_size\":%d,\"moe_intermediate_size\":%d,\"num_hidden_layers\":%d,"
             "\"num_attention_heads\":%d,\"q_lora_rank\":%d,\"kv_lora_rank\":%d,"
             "\"qk_nope_head_dim\":%d,\"qk_rope_head_dim\":%d,\"v_head_dim\":%d,"
             "\"n_routed_experts\":%d,\"n_shared_experts\":%d,\"num_experts_per_tok\":2,"
             "\"first_k_dense_replace\":1,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":false,"
             "\"routed_scaling_factor\":1.0,\"rms_norm_eps\":1e-6,\"rope_theta\":10000,"
             "\"max_position_embeddings\":64,\"num_nextn_predict_layers\":%d,"
             "\"tie_word_embeddings\":%s%s%s}",
             s->softmax ? "DeepseekV2ForCausalLM"
             : s->index ? "GlmMoeDsaForCausalLM"
                        : "DeepseekV3ForCausalLM",
             CKPT_VOCAB, CKPT_HIDDEN, CKPT_INTER, ckpt_moe(s), CKPT_LAYER, CKPT_HEAD,
             !s->no_q_lora ? CKPT_Q_LORA : 0, CKPT_KV_LORA, CKPT_NOPE, CKPT_ROPE, CKPT_V,
             CKPT_EXPERT, CKPT_SHARED, s->mtp, s->tied ? "true" : "false",
             s->index ? ",\"index_n_heads\":2,\"index_head_dim\":16,\"index_topk\":8,"
                        "\"index_topk_pattern\":\"FSFS\""
                      : "",
             strcmp(s->dtype, "F8_E4M3") == 0
                 ? ",\"quantization_config\":{\"quant_method\":\"fp8\","
                   "\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"o_proj\"]}"
                 : "");
    snprintf(
        c->config, sizeof c->config,
        s->prefix[0] == '\0'
            ? "%s"
            : "{\"model_type\":\"kimi_k25\",\"vision_config\":{\"depth\":2},\"text_config\":%s}",
        text);
}

ckpt *ckpt_new(const ckpt_spec *s)
{
    ckpt *c = calloc(1, sizeof *c);
    assert_non_null(c);
    s_random = 88172645463325252;
    maker m = {.c = c, .s = s};
    snprintf(m.at, sizeof m.at, "%s", s->prefix);
    plain(&m, "model.embed_tokens.weight", CKPT_VOCAB, CKPT_HIDDEN);
    plain(&m, "model.norm.weight", CKPT_HIDDEN, 0);
    if (!s->tied) {
        plain(&m, "lm_head.weight", CKPT_VOCAB, CKPT_HIDDEN);
    }
    for (int i = 0; i < CKPT_LAYER + s->mtp; i++) {
        layer(&m, i);
    }
    config(c, s);
    return c;
}

/* ---- values ---------------------------------------------------------------------------------- */

static double stored(const ckpt_tensor *t, int64_t at)
{
    if (strcmp(t->dtype, "F8_E4M3") == 0) {
        return ckpt_e4m3(t->data[at]);
    }
    uint32_t u = 0;
    if (strcmp(t->dtype, "BF16") == 0) {
        uint16_t high;
        memcpy(&high, t->data + 2 * at, sizeof high);
        u = (uint32_t)high << 16;
    } else {
        memcpy(&u, t->data + 4 * at, sizeof u);
    }
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

double ckpt_at(const ckpt *c, const char *name, int64_t e, int64_t o, int64_t i)
{
    const ckpt_tensor *t = &c->t[ckpt_find(c, name)];
    const int64_t n_in = t->dim[t->n_dim - 1];
    const int64_t n_out = t->n_dim > 1 ? t->dim[t->n_dim - 2] : 1;
    const double x = stored(t, (e * n_out + o) * n_in + i);
    if (strcmp(t->dtype, "F8_E4M3") != 0) {
        return x;
    }
    const ckpt_tensor *scale = t + 1; /* where it was added */
    assert_true(strncmp(scale->name, name, strlen(name)) == 0);
    const int64_t rows = (n_out + 127) / 128;
    const int64_t cols = (n_in + 127) / 128;
    return x * stored(scale, (e * rows + o / 128) * cols + i / 128);
}

/* ---- files ----------------------------------------------------------------------------------- */

static FILE *create(const char *dir, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    return f;
}

static void shard_name(char name[64], int k, int n_shard)
{
    if (n_shard == 1) {
        snprintf(name, 64, "model.safetensors");
    } else {
        snprintf(name, 64, "model-%05d-of-%05d.safetensors", k + 1, n_shard);
    }
}

static void write_shard(const ckpt *c, const char *dir, int k, int n_shard, int pad)
{
    char *header = malloc(1 << 18);
    assert_non_null(header);
    size_t n = (size_t)sprintf(header, "{\"__metadata__\":{\"format\":\"pt\"}");
    size_t at = 0;
    for (int i = k; i < c->n; i += n_shard) {
        const ckpt_tensor *t = &c->t[i];
        n +=
            (size_t)sprintf(header + n, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int d = 0; d < t->n_dim; d++) {
            n += (size_t)sprintf(header + n, "%s%" PRId64, d > 0 ? "," : "", t->dim[d]);
        }
        n += (size_t)sprintf(header + n, "],\"data_offsets\":[%zu,%zu]}", at, at + t->bytes);
        at += t->bytes;
    }
    n += (size_t)sprintf(header + n, "}%*s", pad + (int)((8 - (n + 1) % 8) % 8), "");
    char name[64];
    shard_name(name, k, n_shard);
    FILE *f = create(dir, name);
    for (int i = 0; i < 8; i++) {
        fputc((int)(n >> (8 * i) & 255), f);
    }
    fwrite(header, 1, n, f);
    for (int i = k; i < c->n; i += n_shard) {
        fwrite(c->t[i].data, 1, c->t[i].bytes, f);
    }
    assert_int_equal(fclose(f), 0);
    free(header);
}

void ckpt_write(const ckpt *c, const char *dir, int n_shard, int pad)
{
    FILE *f = create(dir, "config.json");
    fputs(c->config, f);
    fclose(f);
    for (int k = 0; k < n_shard; k++) {
        write_shard(c, dir, k, n_shard, pad);
    }
    if (n_shard == 1) {
        return;
    }
    f = create(dir, "model.safetensors.index.json");
    fputs("{\"metadata\":{},\"weight_map\":{", f);
    for (int i = 0; i < c->n; i++) {
        char name[64];
        shard_name(name, i % n_shard, n_shard);
        fprintf(f, "%s\"%s\":\"%s\"", i > 0 ? "," : "", c->t[i].name, name);
    }
    fputs("}}", f);
    fclose(f);
}

void ckpt_remove(const char *dir)
{
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        char path[512];
        snprintf(path, sizeof path, "%s/%.200s", dir, e->d_name);
        if (e->d_name[0] != '.') {
            unlink(path);
        }
    }
    closedir(d);
    rmdir(dir);
}
