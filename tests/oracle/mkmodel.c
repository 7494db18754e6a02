/* mkmodel.c: the generator behind mkmodel.h.
 *
 * Owns: the list of tensors of a model (from the config template of its variant), the value of every
 * weight, quantisation to FP8 blocks and a minimal safetensors writer. It is the second writing of
 * the specification at the top of tools/oracle/make_tiny.py, and shares no code with src/: what the
 * loader reads here was written by something that cannot share its mistakes.
 *
 * Invariants: integer arithmetic and exact scalings by powers of two only, so the bytes do not depend
 * on compiler, libm or machine; the one rounding is that to e4m3 and its scale (IEEE division). */
#include "oracle/mkmodel.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

enum { NAME_MAX_LEN = 96, BLOCK = 128, KV_LORA = 512 };

typedef struct variant {
    const char *name;
    uint64_t seed;
    bool mtp_copies;   /* the MTP layer carries copies of embedding and head */
    bool k_norm_f32;   /* indexer.k_norm is stored as F32 */
    float bias_offset; /* added to the router's bias: most choices become negative */
    bool pow2_scales;  /* scales of FP8 blocks are powers of two (scale_fmt ue8m0) */
} variant;

static const variant variants[] = {
    {"glm52", 5202, false, false, 0.0F, false},     {"glm5", 503, false, false, 0.0F, false},
    {"v32", 3201, true, true, -0.75F, true},        {"v3", 301, true, false, -0.75F, false},
    {"v2", 202, false, false, 0.0F, false},         {"k2", 2201, false, false, 0.0F, false},
    {"moonlight", 1602, false, false, 0.0F, false}, {"glm47", 4702, false, false, 0.0F, false},
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

const char *const mkmodel_variants[] = {"glm52", "glm5",      "v32",   "v3", "v2",
                                        "k2",    "moonlight", "glm47", NULL};

typedef enum kind { LINEAR, LATENT, TABLE, NORM, BIAS, ROUTER } kind;

/* One tensor of the checkpoint, or the scales of one. */
typedef struct tensor {
    char name[NAME_MAX_LEN];
    char like[NAME_MAX_LEN]; /* whose values it has: its own name but for copies */
    kind kind;
    int gain;
    bool fp8;       /* an FP8 checkpoint stores it as e4m3 */
    bool scales;    /* the scales of the tensor before */
    int rows, cols; /* cols 0: a vector of `rows` */
} tensor;

typedef enum stored { STORE_F32, STORE_BF16, STORE_E4M3 } stored;

typedef struct model {
    const variant *v;
    const char *dtype;
    char *config; /* text of config.json */
    json_t *hp;   /* the same, parsed */
    tensor *list;
    int n, cap;
    char *msg;
    size_t msg_cap;
} model;

static int fail(model *m, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(m->msg, m->msg_cap, fmt, ap);
    va_end(ap);
    return -1;
}

/* ---- values ------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static uint64_t key_of(uint64_t seed, const char *name)
{
    uint64_t h = UINT64_C(0xCBF29CE484222325);
    for (const char *p = name; *p != '\0'; p++)
        h = (h ^ (uint8_t)*p) * UINT64_C(0x100000001B3);
    return mix(h ^ seed * GOLDEN);
}

static int byte_sum(uint64_t x)
{
    const uint64_t m = UINT64_C(0x00FF00FF00FF00FF);
    const uint64_t pairs = (x & m) + ((x >> 8) & m);
    return (int)((pairs * UINT64_C(0x0001000100010001)) >> 48);
}

/* The smallest h with 4^h >= n. */
static int half_log(int n)
{
    int h = 0;
    while ((INT64_C(1) << (2 * h)) < n)
        h++;
    return h;
}

static int64_t tensor_count(const tensor *t)
{
    return (int64_t)t->rows * (t->cols > 0 ? t->cols : 1);
}

static float draw_small(uint64_t x)
{
    return (float)((byte_sum(x) + 4) / 8 - 128); /* -128 .. 127 */
}

static void fill_linear(const tensor *t, uint64_t key, float *out)
{
    const int base = -4 - half_log(t->cols);
    for (int r = 0; r < t->rows; r++) {
        const int gain = t->kind == LATENT && r >= KV_LORA ? 0 : t->gain;
        for (int c0 = 0; c0 < t->cols; c0 += BLOCK) {
            const uint64_t block = (uint64_t)(r / BLOCK) * 4096 + (uint64_t)(c0 / BLOCK) + 1;
            const float scale = ldexpf(1.0F, base + gain - (int)(mix(key ^ block) % 3));
            const int c1 = c0 + BLOCK < t->cols ? c0 + BLOCK : t->cols;
            for (int c = c0; c < c1; c++) {
                const uint64_t i = (uint64_t)r * (uint64_t)t->cols + (uint64_t)c;
                out[i] = draw_small(mix(key + i * GOLDEN)) * scale;
            }
        }
    }
}

static void fill(const model *m, const tensor *t, float *out)
{
    const uint64_t key = key_of(m->v->seed, t->like);
    if (t->kind == LINEAR || t->kind == LATENT) {
        fill_linear(t, key, out);
        return;
    }
    const int64_t n = tensor_count(t);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t x = mix(key + (uint64_t)i * GOLDEN);
        if (t->kind == NORM)
            out[i] = (float)(64 + (int)(x & 127)) / 128.0F; /* 0.5 .. 1.4921875 */
        else if (t->kind == ROUTER)
            out[i] = (float)(byte_sum(x) - 1020) * 0x1p-10F + m->v->bias_offset;
        else
            out[i] = draw_small(x) * (t->kind == TABLE ? 0x1p-5F : 0x1p-7F);
    }
}

static uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

/* |x| <= 448: nearest, ties to even. */
static uint8_t e4m3_of(float x)
{
    const double a = fabs((double)x);
    int e = -6;
    if (a >= 0x1p-6) {
        frexp(a, &e);
        e--;
    }
    const int m = (int)nearbyint(ldexp(a, 3 - e)); /* 0 .. 16 */
    return (uint8_t)(((e + 6) * 8 + m) | (signbit(x) ? 0x80 : 0));
}

static float block_scale(const model *m, const tensor *t, const float *w, int r0, int c0)
{
    float amax = 0;
    for (int r = r0; r < r0 + BLOCK && r < t->rows; r++)
        for (int c = c0; c < c0 + BLOCK && c < t->cols; c++)
            amax = fmaxf(amax, fabsf(w[(int64_t)r * t->cols + c]));
    if (amax == 0)
        return 1.0F;
    const float s = amax / 448.0F;
    if (!m->v->pow2_scales)
        return s;
    int e;
    return frexpf(s, &e) == 0.5F ? ldexpf(1.0F, e - 1) : ldexpf(1.0F, e);
}

static int blocks(int n)
{
    return (n + BLOCK - 1) / BLOCK;
}

/* e4m3 codes to q, or with q NULL the scales to s. */
static void quantise(const model *m, const tensor *t, const float *w, uint8_t *q, float *s)
{
    for (int br = 0; br < blocks(t->rows); br++) {
        for (int bc = 0; bc < blocks(t->cols); bc++) {
            const float scale = block_scale(m, t, w, br * BLOCK, bc * BLOCK);
            if (q == NULL) {
                s[br * blocks(t->cols) + bc] = scale;
                continue;
            }
            for (int r = br * BLOCK; r < (br + 1) * BLOCK && r < t->rows; r++)
                for (int c = bc * BLOCK; c < (bc + 1) * BLOCK && c < t->cols; c++) {
                    const int64_t i = (int64_t)r * t->cols + c;
                    q[i] = e4m3_of(w[i] / scale);
                }
        }
    }
}

/* ---- the list of tensors ------------------------------------------------------------------ */

static int hp_int(const model *m, const char *key)
{
    return (int)json_integer_value(json_object_get(m->hp, key)); /* 0 where absent or null */
}

static tensor *add(model *m, kind k, const char *prefix, const char *name, int rows, int cols)
{
    if (m->n == m->cap) {
        m->cap = m->cap > 0 ? 2 * m->cap : 256;
        tensor *const list = realloc(m->list, (size_t)m->cap * sizeof *list);
        if (list == NULL)
            abort(); /* a test helper: no memory, no test */
        m->list = list;
    }
    tensor *const t = &m->list[m->n++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
    memcpy(t->like, t->name, sizeof t->like);
    t->kind = k;
    t->rows = rows;
    t->cols = cols;
    return t;
}

/* A product that FP8 checkpoints quantise; its scales follow it there. */
static void add_product(model *m, const char *prefix, const char *name, int rows, int cols,
                        int gain)
{
    tensor *const t = add(m, LINEAR, prefix, name, rows, cols);
    t->gain = gain;
    t->fp8 = true;
    if (strcmp(name, "kv_a_proj_with_mqa.weight") == 0)
        t->kind = LATENT;
    if (strcmp(m->dtype, "fp8") != 0)
        return;
    char scales[NAME_MAX_LEN];
    snprintf(scales, sizeof scales, "%s_scale_inv", name);
    tensor *const s = add(m, LINEAR, prefix, scales, blocks(rows), blocks(cols));
    s->scales = true;
}

static void add_attention(model *m, const char *p, bool indexer)
{
    const int hidden = hp_int(m, "hidden_size");
    const int heads = hp_int(m, "num_attention_heads");
    const int dn = hp_int(m, "qk_nope_head_dim");
    const int dr = hp_int(m, "qk_rope_head_dim");
    const int dv = hp_int(m, "v_head_dim");
    const int rq = hp_int(m, "q_lora_rank");
    if (rq == 0) {
        add(m, LINEAR, p, "q_proj.weight", heads * (dn + dr), hidden)->gain = 1;
    } else {
        add_product(m, p, "q_a_proj.weight", rq, hidden, -5);
        add(m, NORM, p, "q_a_layernorm.weight", rq, 0);
        add_product(m, p, "q_b_proj.weight", heads * (dn + dr), rq, 1);
    }
    add_product(m, p, "kv_a_proj_with_mqa.weight", KV_LORA + dr, hidden, -5);
    add(m, NORM, p, "kv_a_layernorm.weight", KV_LORA, 0);
    add_product(m, p, "kv_b_proj.weight", heads * (dn + dv), KV_LORA, 0);
    add_product(m, p, "o_proj.weight", hidden, heads * dv, 0);
    if (!indexer)
        return;
    const int n_index = hp_int(m, "index_n_heads");
    const int d_index = hp_int(m, "index_head_dim");
    add_product(m, p, "indexer.wq_b.weight", n_index * d_index, rq, 0);
    add_product(m, p, "indexer.wk.weight", d_index, hidden, 0);
    add(m, NORM, p, "indexer.k_norm.weight", d_index, 0);
    add(m, BIAS, p, "indexer.k_norm.bias", d_index, 0);
    add(m, LINEAR, p, "indexer.weights_proj.weight", n_index, hidden);
}

static void add_mlp(model *m, const char *p, int inter)
{
    const int hidden = hp_int(m, "hidden_size");
    add_product(m, p, "gate_proj.weight", inter, hidden, 0);
    add_product(m, p, "up_proj.weight", inter, hidden, 0);
    add_product(m, p, "down_proj.weight", hidden, inter, 0);
}

static void add_moe(model *m, const char *p)
{
    const int moe = hp_int(m, "moe_intermediate_size");
    const int n = hp_int(m, "n_routed_experts");
    add(m, LINEAR, p, "gate.weight", n, hp_int(m, "hidden_size"))->gain = 1;
    const char *const method = json_string_value(json_object_get(m->hp, "topk_method"));
    if (strcmp(method, "noaux_tc") == 0)
        add(m, ROUTER, p, "gate.e_score_correction_bias", n, 0);
    char expert[NAME_MAX_LEN];
    for (int e = 0; e < n; e++) {
        snprintf(expert, sizeof expert, "%sexperts.%d.", p, e);
        add_mlp(m, expert, moe);
    }
    snprintf(expert, sizeof expert, "%sshared_experts.", p);
    add_mlp(m, expert, hp_int(m, "n_shared_experts") * moe);
}

static bool layer_has_indexer(const model *m, int layer)
{
    if (hp_int(m, "index_topk") == 0)
        return false;
    const json_t *const types = json_object_get(m->hp, "indexer_types");
    const char *const type = json_string_value(json_array_get(types, (size_t)layer));
    return type == NULL || strcmp(type, "full") == 0;
}

static void add_layer(model *m, int layer, bool mtp)
{
    const int hidden = hp_int(m, "hidden_size");
    const int vocab = hp_int(m, "vocab_size");
    char p[32], sub[48];
    snprintf(p, sizeof p, "model.layers.%d.", layer);
    if (mtp) {
        add(m, NORM, p, "enorm.weight", hidden, 0);
        add(m, NORM, p, "hnorm.weight", hidden, 0);
        add(m, LINEAR, p, "eh_proj.weight", hidden, 2 * hidden);
    }
    add(m, NORM, p, "input_layernorm.weight", hidden, 0);
    snprintf(sub, sizeof sub, "%sself_attn.", p);
    add_attention(m, sub, layer_has_indexer(m, layer));
    add(m, NORM, p, "post_attention_layernorm.weight", hidden, 0);
    snprintf(sub, sizeof sub, "%smlp.", p);
    if (layer < hp_int(m, "first_k_dense_replace"))
        add_mlp(m, sub, hp_int(m, "intermediate_size"));
    else
        add_moe(m, sub);
    if (!mtp)
        return;
    add(m, NORM, p, "shared_head.norm.weight", hidden, 0);
    if (!m->v->mtp_copies)
        return;
    strcpy(add(m, TABLE, p, "embed_tokens.weight", vocab, hidden)->like,
           "model.embed_tokens.weight");
    strcpy(add(m, LINEAR, p, "shared_head.head.weight", vocab, hidden)->like, "lm_head.weight");
}

static void add_all(model *m)
{
    const int hidden = hp_int(m, "hidden_size");
    const int vocab = hp_int(m, "vocab_size");
    const int layers = hp_int(m, "num_hidden_layers");
    add(m, TABLE, "", "model.embed_tokens.weight", vocab, hidden);
    for (int i = 0; i < layers + hp_int(m, "num_nextn_predict_layers"); i++)
        add_layer(m, i, i >= layers);
    add(m, NORM, "", "model.norm.weight", hidden, 0);
    add(m, LINEAR, "", "lm_head.weight", vocab, hidden);
}

/* ---- files -------------------------------------------------------------------------------- */

static stored stored_as(const model *m, const tensor *t)
{
    if (t->scales || t->kind == ROUTER || strcmp(m->dtype, "f32") == 0)
        return STORE_F32;
    if (m->v->k_norm_f32 && strstr(t->name, ".k_norm.") != NULL)
        return STORE_F32;
    return strcmp(m->dtype, "fp8") == 0 && t->fp8 ? STORE_E4M3 : STORE_BF16;
}

static int64_t stored_bytes(const model *m, const tensor *t)
{
    static const int size[] = {[STORE_F32] = 4, [STORE_BF16] = 2, [STORE_E4M3] = 1};
    return tensor_count(t) * size[stored_as(m, t)];
}

/* Consecutive runs; scales lie one shard further than their place. */
static int shard_of(const model *m, int i, int shards)
{
    const int at = (int)((int64_t)i * shards / m->n);
    return m->list[i].scales ? (at + 1) % shards : at;
}

static void *get(size_t bytes)
{
    void *const p = malloc(bytes);
    if (p == NULL)
        abort();
    return p;
}

/* Little-endian machines only, like the library. */
static int write_data(model *m, int i, FILE *f)
{
    const tensor *const t = &m->list[i];
    const tensor *const of = t->scales ? t - 1 : t;
    const int64_t n = tensor_count(of);
    float *const w = get((size_t)n * sizeof *w);
    fill(m, of, w);
    const size_t bytes = (size_t)stored_bytes(m, t);
    void *const out = get(bytes);
    switch (stored_as(m, t)) {
    case STORE_E4M3:
        quantise(m, of, w, out, NULL);
        break;
    case STORE_BF16:
        for (int64_t j = 0; j < n; j++)
            ((uint16_t *)out)[j] = bf16_of(w[j]);
        break;
    case STORE_F32:
        if (t->scales)
            quantise(m, of, w, NULL, out);
        else
            memcpy(out, w, bytes);
    }
    const bool ok = fwrite(out, 1, bytes, f) == bytes;
    free(w);
    free(out);
    return ok ? 0 : fail(m, "%s: %s", t->name, strerror(errno));
}

static void write_header(const model *m, FILE *f, int shard, int shards)
{
    static const char *const names[] = {
        [STORE_F32] = "F32", [STORE_BF16] = "BF16", [STORE_E4M3] = "F8_E4M3"};
    char *text = NULL;
    size_t len = 0;
    FILE *const s = open_memstream(&text, &len);
    if (s == NULL)
        abort();
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", s);
    int64_t at = 0;
    for (int i = 0; i < m->n; i++) {
        if (shard_of(m, i, shards) != shard)
            continue;
        const tensor *const t = &m->list[i];
        fprintf(s, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%d", t->name, names[stored_as(m, t)],
                t->rows);
        if (t->cols > 0)
            fprintf(s, ",%d", t->cols);
        const int64_t end = at + stored_bytes(m, t);
        fprintf(s, "],\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)end);
        at = end;
    }
    fputc('}', s);
    fflush(s);
    for (size_t pad = (8 - len % 8) % 8; pad > 0; pad--)
        fputc(' ', s);
    fclose(s);
    const uint64_t n = len;
    fwrite(&n, sizeof n, 1, f);
    fwrite(text, 1, len, f);
    free(text);
}

static FILE *open_in(model *m, const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *const f = fopen(path, "wb");
    if (f == NULL)
        fail(m, "%s: %s", path, strerror(errno));
    return f;
}

static int close_file(model *m, FILE *f, const char *name)
{
    const bool bad = ferror(f) != 0;
    return fclose(f) != 0 || bad ? fail(m, "%s: write failed", name) : 0;
}

static void shard_name(char *out, size_t cap, int shard, int shards)
{
    if (shards == 1)
        snprintf(out, cap, "model.safetensors");
    else
        snprintf(out, cap, "model-%05d-of-%05d.safetensors", shard + 1, shards);
}

static int write_index(model *m, const char *dir, int shards)
{
    FILE *const f = open_in(m, dir, "model.safetensors.index.json");
    if (f == NULL)
        return -1;
    int64_t total = 0;
    for (int i = 0; i < m->n; i++)
        total += stored_bytes(m, &m->list[i]);
    fprintf(f, "{\n  \"metadata\": {\"total_size\": %lld},\n  \"weight_map\": {", (long long)total);
    for (int i = 0; i < m->n; i++) {
        char file[64];
        shard_name(file, sizeof file, shard_of(m, i, shards), shards);
        fprintf(f, "%s\n    \"%s\": \"%s\"", i > 0 ? "," : "", m->list[i].name, file);
    }
    fputs("\n  }\n}\n", f);
    return close_file(m, f, "the index");
}

static int write_weights(model *m, const char *dir, int shards)
{
    for (int shard = 0; shard < shards; shard++) {
        char name[64];
        shard_name(name, sizeof name, shard, shards);
        FILE *const f = open_in(m, dir, name);
        if (f == NULL)
            return -1;
        write_header(m, f, shard, shards);
        int rc = 0;
        for (int i = 0; i < m->n && rc == 0; i++)
            if (shard_of(m, i, shards) == shard)
                rc = write_data(m, i, f);
        if (close_file(m, f, name) != 0 || rc != 0)
            return -1;
    }
    return shards == 1 ? 0 : write_index(m, dir, shards);
}

static char *read_text(model *m, const char *path)
{
    FILE *const f = fopen(path, "rb");
    if (f == NULL) {
        fail(m, "%s: %s", path, strerror(errno));
        return NULL;
    }
    char *const text = get(16384);
    const size_t n = fread(text, 1, 16383, f);
    text[n] = '\0';
    fclose(f);
    return text;
}

/* The template with its type filled in, and for FP8 the quantisation before its last brace. */
static int make_config(model *m)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/tiny/%s.json", ORACLE_DIR, m->v->name);
    char *const text = read_text(m, path);
    if (text == NULL)
        return -1;
    const char *const mark = "@DTYPE@";
    char *const at = strstr(text, mark);
    const bool fp8 = strcmp(m->dtype, "fp8") == 0;
    size_t len;
    FILE *const s = open_memstream(&m->config, &len);
    if (at == NULL || s == NULL)
        abort(); /* the templates are part of this program */
    fprintf(s, "%.*s%s", (int)(at - text), text,
            strcmp(m->dtype, "f32") == 0 ? "float32" : "bfloat16");
    const char *const rest = at + strlen(mark);
    fprintf(s, "%.*s", fp8 ? (int)strlen(rest) - 3 : (int)strlen(rest), rest); /* 3: "\n}\n" */
    if (fp8)
        fprintf(
            s,
            ",\n  \"quantization_config\": {\"activation_scheme\": \"dynamic\", \"fmt\": \"e4m3\", "
            "\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]%s}\n}\n",
            m->v->pow2_scales ? ", \"scale_fmt\": \"ue8m0\"" : "");
    fclose(s);
    free(text);
    json_error_t err;
    m->hp = json_loads(m->config, 0, &err);
    return m->hp != NULL ? 0 : fail(m, "%s: line %d: %s", path, err.line, err.text);
}

static int write_config(model *m, const char *dir)
{
    FILE *const f = open_in(m, dir, "config.json");
    if (f == NULL)
        return -1;
    fputs(m->config, f);
    return close_file(m, f, "config.json");
}

static const variant *find_variant(const char *name)
{
    for (int i = 0; i < N_VARIANTS; i++)
        if (strcmp(variants[i].name, name) == 0)
            return &variants[i];
    return NULL;
}

int mkmodel_write(const char *name, const char *dtype, int shards, const char *dir, char *msg,
                  size_t cap)
{
    model m = {.v = find_variant(name), .dtype = dtype, .msg = msg, .msg_cap = cap};
    if (m.v == NULL)
        return fail(&m, "%s is no variant", name);
    if (strcmp(dtype, "f32") != 0 && strcmp(dtype, "bf16") != 0 && strcmp(dtype, "fp8") != 0)
        return fail(&m, "%s is none of f32, bf16, fp8", dtype);
    if (shards < 1 || shards > 99)
        return fail(&m, "%d shards: 1 to 99 work", shards);
    int rc = make_config(&m);
    if (rc == 0) {
        add_all(&m);
        rc = write_config(&m, dir);
    }
    if (rc == 0)
        rc = write_weights(&m, dir, shards);
    json_decref(m.hp);
    free(m.config);
    free(m.list);
    return rc;
}

int mkmodel_temp(const char *name, const char *dtype, int shards, char *dir, size_t cap_dir,
                 char *msg, size_t cap)
{
    const char *const tmp = getenv("TMPDIR");
    const int n = snprintf(dir, cap_dir, "%s/kvspan-tiny-XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (n < 0 || (size_t)n >= cap_dir || mkdtemp(dir) == NULL) {
        snprintf(msg, cap, "no folder for %s", name);
        return -1;
    }
    if (mkmodel_write(name, dtype, shards, dir, msg, cap) == 0)
        return 0;
    mkmodel_remove(dir);
    return -1;
}

int mkmodel_temp_text(const char *name, const char *dtype, const char *other, char *dir,
                      size_t cap_dir, char *msg, size_t cap)
{
    char from[4096];
    char to[512];
    if (mkmodel_temp(name, dtype, 1, dir, cap_dir, msg, cap) != 0) {
        return -1;
    }
    if (realpath(other, from) != NULL &&
        strlen(from) + sizeof "/tokenizer.json" <= sizeof from) {
        strcat(from, "/tokenizer.json");
        snprintf(to, sizeof to, "%s/tokenizer.json", dir);
        if (symlink(from, to) == 0) {
            return 0;
        }
    }
    snprintf(msg, cap, "no tokenizer.json of %s beside %s: %s", other, dir, strerror(errno));
    mkmodel_remove(dir);
    return -1;
}

void mkmodel_remove(const char *dir)
{
    DIR *const d = opendir(dir);
    if (d == NULL)
        return;
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        if (e->d_name[0] != '.')
            unlinkat(dirfd(d), e->d_name, 0);
    closedir(d);
    rmdir(dir);
}

int mkmodel_tokens(const char *name, int32_t vocab, int32_t n, int32_t *out)
{
    const variant *const v = find_variant(name);
    if (v == NULL)
        return -1;
    const uint64_t key = key_of(v->seed, "tokens");
    for (int32_t i = 0; i < n; i++)
        out[i] = (int32_t)(mix(key + (uint64_t)i * GOLDEN) % (uint64_t)vocab);
    return 0;
}

int mkmodel_hidden(const char *name, int32_t n, int32_t width, float *out)
{
    const variant *const v = find_variant(name);
    if (v == NULL)
        return -1;
    const uint64_t key = key_of(v->seed, "hidden");
    for (int64_t i = 0; i < (int64_t)n * width; i++)
        out[i] = draw_small(mix(key + (uint64_t)i * GOLDEN)) * 0x1p-5F;
    return 0;
}
