/* kvfmt.c - names, tags and the scalar definition of cache rows and index keys.
 *
 * The writers and readers go value by value through num/fmt.h and touch memory by bytes only, so
 * that any address is allowed. Formats and types were validated when the cache was opened. */
#include "num/kvfmt.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"

typedef struct name_value {
    const char *name;
    int32_t value;
} name_value;

static const name_value kv_names[] = {{"auto", KVS_KV_AUTO},
                                      {"f32", KVS_KV_F32},
                                      {"bf16", KVS_KV_BF16},
                                      {"fp8", KVS_KV_FP8},
                                      {"fp8_ds_mla", KVS_KV_FP8_DS_MLA}};
static const name_value index_names[] = {
    {"auto", KVS_INDEX_AUTO}, {"fp8", KVS_INDEX_FP8}, {"f32", KVS_INDEX_F32}};
static const name_value rule_names[] = {
    {"auto", KVS_SCALE_AUTO}, {"pow2", KVS_SCALE_POW2}, {"exact", KVS_SCALE_EXACT}};

#define N_OF(a) ((int32_t)(sizeof(a) / sizeof *(a)))

static const char *name_of(const name_value *list, int32_t n, int32_t value)
{
    for (int32_t i = 0; i < n; i++) {
        if (list[i].value == value) {
            return list[i].name;
        }
    }
    return "?";
}

static int32_t value_of(const name_value *list, int32_t n, const char *name)
{
    for (int32_t i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) == 0) {
            return list[i].value;
        }
    }
    return -1;
}

const char *kv_fmt_name(int32_t fmt)
{
    return name_of(kv_names, N_OF(kv_names), fmt);
}

const char *index_fmt_name(int32_t fmt)
{
    return name_of(index_names, N_OF(index_names), fmt);
}

const char *scale_rule_name(int32_t rule)
{
    return name_of(rule_names, N_OF(rule_names), rule);
}

kvs_status kv_fmt_parse(const char *name, kvs_kv_format *out, kvs_error *err)
{
    const int32_t v = value_of(kv_names, N_OF(kv_names), name);
    if (v < 0) {
        return err_set(err, KVS_INVALID,
                       "cache row format \"%.40s\": use auto, f32, bf16, fp8 or fp8_ds_mla", name);
    }
    *out = (kvs_kv_format)v;
    return KVS_OK;
}

kvs_status index_fmt_parse(const char *name, kvs_index_format *out, kvs_error *err)
{
    const int32_t v = value_of(index_names, N_OF(index_names), name);
    if (v < 0) {
        return err_set(err, KVS_INVALID, "index key format \"%.40s\": use auto, fp8 or f32", name);
    }
    *out = (kvs_index_format)v;
    return KVS_OK;
}

kvs_status scale_rule_parse(const char *name, kvs_scale_rule *out, kvs_error *err)
{
    const int32_t v = value_of(rule_names, N_OF(rule_names), name);
    if (v < 0) {
        return err_set(err, KVS_INVALID, "scale rule \"%.40s\": use auto, pow2 or exact", name);
    }
    *out = (kvs_scale_rule)v;
    return KVS_OK;
}

static kvs_status refuse_pair(const kv_layout *l, kvs_error *err)
{
    if (l->kv == KVS_KV_FP8) {
        return err_set(err, KVS_UNSUPPORTED,
                       "fp8 rows with index keys: sparse attention keeps fp8 rows as fp8_ds_mla; "
                       "use fp8_ds_mla, or bf16");
    }
    return err_set(err, KVS_UNSUPPORTED,
                   "f32 index keys with %s rows: use fp8 index keys, or bf16 rows",
                   kv_fmt_name(l->kv));
}

kvs_status kv_layout_resolve(int has_index, kv_layout *l, kvs_error *err)
{
    kv_layout r = *l;
    if (r.kv == KVS_KV_AUTO) {
        r.kv = has_index ? KVS_KV_FP8_DS_MLA : KVS_KV_BF16;
    }
    if (kv_row_bytes(r.kv) == 0) {
        return err_set(err, KVS_INVALID, "cache row format %d: use a value of kvs_kv_format",
                       (int)l->kv);
    }
    if (r.hadamard != 0 && r.hadamard != 1) {
        return err_set(err, KVS_INVALID, "hadamard %d: use 0 or 1", (int)r.hadamard);
    }
    if (!has_index) {
        if (r.index != KVS_INDEX_AUTO || r.hadamard != 0) {
            return err_set(err, KVS_INVALID,
                           "%s given for a cache without index keys: leave it out",
                           r.hadamard ? "hadamard" : "an index key format");
        }
        *l = r;
        return KVS_OK;
    }
    if (r.index == KVS_INDEX_AUTO) {
        r.index = r.kv == KVS_KV_F32 ? KVS_INDEX_F32 : KVS_INDEX_FP8;
    }
    if (index_page_bytes(r.index) == 0) {
        return err_set(err, KVS_INVALID, "index key format %d: use a value of kvs_index_format",
                       (int)l->index);
    }
    if (r.kv == KVS_KV_FP8 || (r.kv == KVS_KV_FP8_DS_MLA && r.index == KVS_INDEX_F32)) {
        return refuse_pair(&r, err);
    }
    *l = r;
    return KVS_OK;
}

kvs_status kv_k_scale_check(float k_scale, int32_t i_layer, kvs_error *err)
{
    if (!f32_is_finite(k_scale) || !(k_scale > 0.0f)) {
        return err_set(err, KVS_INVALID,
                       "k_scale of layer %d is %g: it must be finite and above 0 (1 where the "
                       "checkpoint has none)",
                       (int)i_layer, (double)k_scale);
    }
    return KVS_OK;
}

/* ---- tags ------------------------------------------------------------------------------------ */

#define TAG_PAGE ((uint32_t)KVS_PAGE_TOKENS << 8)

uint32_t kv_tag(kv_layout l)
{
    return KV_TAG_BASE | TAG_PAGE | (uint32_t)l.kv;
}

uint32_t index_tag(kv_layout l)
{
    if (l.index == KVS_INDEX_AUTO) {
        return 0;
    }
    return INDEX_TAG_BASE | (l.hadamard ? INDEX_TAG_HADAMARD : 0u) | TAG_PAGE | (uint32_t)l.index;
}

uint64_t cache_tag(kv_layout l)
{
    return (uint64_t)index_tag(l) << 32 | kv_tag(l);
}

kvs_status cache_tag_parse(uint64_t tag, kv_layout *out, kvs_error *err)
{
    const uint32_t rows = (uint32_t)tag;
    const uint32_t keys = (uint32_t)(tag >> 32);
    const kv_layout l = {(kvs_kv_format)(rows & 0xFFu), (kvs_index_format)(keys & 0xFFu),
                         (keys & INDEX_TAG_HADAMARD) != 0};
    /* rebuilding the tag from what was read checks every bit of it at once */
    if (kv_row_bytes(l.kv) == 0 || rows != kv_tag(l)) {
        return err_set(
            err, KVS_FORMAT,
            "0x%08x is no row format tag: want 0x%08x + format 1..4 (pages of 64 tokens)",
            (unsigned)rows, (unsigned)(KV_TAG_BASE | TAG_PAGE));
    }
    if (keys != 0 && (index_page_bytes(l.index) == 0 || keys != index_tag(l))) {
        return err_set(err, KVS_FORMAT,
                       "0x%08x is no index format tag: want 0, or 0x%08x + format 1..2 (+ 0x8000 "
                       "for Hadamard-rotated keys)",
                       (unsigned)keys, (unsigned)(INDEX_TAG_BASE | TAG_PAGE));
    }
    *out = l;
    return KVS_OK;
}

/* "fp8_ds_mla rows (656 bytes), fp8 index keys, Hadamard-rotated" */
typedef struct layout_text {
    char s[80];
} layout_text;

static layout_text layout_say(kv_layout l)
{
    layout_text t;
    const char *rotated = l.hadamard ? ", Hadamard-rotated" : "";
    if (l.index == KVS_INDEX_AUTO) {
        snprintf(t.s, sizeof t.s, "%s rows (%d bytes), no index keys", kv_fmt_name(l.kv),
                 (int)kv_row_bytes(l.kv));
    } else {
        snprintf(t.s, sizeof t.s, "%s rows (%d bytes), %s index keys%s", kv_fmt_name(l.kv),
                 (int)kv_row_bytes(l.kv), index_fmt_name(l.index), rotated);
    }
    return t;
}

kvs_status cache_tag_check(uint64_t got, kv_layout want, kvs_error *err)
{
    if (got == cache_tag(want)) {
        return KVS_OK;
    }
    kv_layout l;
    TRY(cache_tag_parse(got, &l, err));
    const layout_text have = layout_say(l);
    const layout_text need = layout_say(want);
    return err_set(err, KVS_FORMAT,
                   "the cache holds %s, the reader is set to %s: set it to the cache's", have.s,
                   need.s);
}

/* ---- one row, one key ------------------------------------------------------------------------ */

static float in_f32(const void *x, int32_t in_type, int32_t i)
{
    if (in_type == KVS_DTYPE_BF16) {
        bf16 b;
        memcpy(&b, (const uint8_t *)x + (size_t)i * sizeof b, sizeof b);
        return bf16_to_f32(b);
    }
    float f;
    memcpy(&f, (const uint8_t *)x + (size_t)i * sizeof f, sizeof f);
    return f;
}

static bf16 in_bf16(const void *x, int32_t in_type, int32_t i)
{
    if (in_type == KVS_DTYPE_BF16) {
        bf16 b;
        memcpy(&b, (const uint8_t *)x + (size_t)i * sizeof b, sizeof b);
        return b;
    }
    return bf16_from_f32(in_f32(x, in_type, i));
}

static uint64_t count_nan(const void *x, int32_t in_type, int32_t n)
{
    uint64_t n_nan = 0;
    for (int32_t i = 0; i < n; i++) {
        n_nan += (uint64_t)f32_is_nan(in_f32(x, in_type, i));
    }
    return n_nan;
}

static void put_f32(uint8_t *dst, const void *x, int32_t in_type, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const float f = in_f32(x, in_type, i);
        memcpy(dst + (size_t)i * sizeof f, &f, sizeof f);
    }
}

static void put_bf16(uint8_t *dst, const void *x, int32_t in_type, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const bf16 b = in_bf16(x, in_type, i);
        memcpy(dst + (size_t)i * sizeof b, &b, sizeof b);
    }
}

/* Values first .. first + n - 1 of x; returns how many saturate. */
static uint64_t put_e4m3(uint8_t *dst, const void *x, int32_t in_type, int32_t first, int32_t n,
                         float s)
{
    uint64_t n_sat = 0;
    for (int32_t i = 0; i < n; i++) {
        const float y = in_f32(x, in_type, first + i) / s;
        dst[i] = e4m3_from_f32(y);
        n_sat += (uint64_t)e4m3_saturates(y);
    }
    return n_sat;
}

static float amax_of(const void *x, int32_t in_type, int32_t first, int32_t n)
{
    float amax = 0.0f;
    for (int32_t i = first; i < first + n; i++) {
        amax = amax_add(amax, in_f32(x, in_type, i));
    }
    return amax;
}

static uint64_t put_ds_mla(const kv_writer *w, uint8_t *row, const void *latent, const void *rope)
{
    uint64_t n_sat = 0;
    for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
        const int32_t first = t * KV_DS_TILE;
        const float s = scale_for(w->rule, amax_of(latent, w->in_type, first, KV_DS_TILE));
        n_sat += put_e4m3(row + first, latent, w->in_type, first, KV_DS_TILE, s);
        memcpy(row + KV_DS_SCALE_AT + (size_t)t * sizeof s, &s, sizeof s);
    }
    put_bf16(row + KV_DS_ROPE_AT, rope, w->in_type, KVS_ROPE_DIM);
    return n_sat;
}

void kv_row_write(const kv_writer *w, uint8_t *row, const void *latent, const void *rope,
                  kv_count *count)
{
    const int32_t type = w->in_type;
    uint64_t n_sat = 0;
    switch (w->fmt) {
    case KVS_KV_F32:
        put_f32(row, latent, type, KVS_LATENT_DIM);
        put_f32(row + offsetof(kv_row_f32, rope), rope, type, KVS_ROPE_DIM);
        break;
    case KVS_KV_BF16:
        put_bf16(row, latent, type, KVS_LATENT_DIM);
        put_bf16(row + offsetof(kv_row_bf16, rope), rope, type, KVS_ROPE_DIM);
        break;
    case KVS_KV_FP8:
        n_sat = put_e4m3(row, latent, type, 0, KVS_LATENT_DIM, w->k_scale);
        n_sat +=
            put_e4m3(row + offsetof(kv_row_fp8, rope), rope, type, 0, KVS_ROPE_DIM, w->k_scale);
        break;
    default:
        n_sat = put_ds_mla(w, row, latent, rope);
        break;
    }
    if (count != NULL) {
        count->n_nan += count_nan(latent, type, KVS_LATENT_DIM);
        count->n_nan += count_nan(rope, type, KVS_ROPE_DIM);
        count->n_sat += n_sat;
    }
}

static void get_bf16(const uint8_t *src, float *out, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = in_f32(src, KVS_DTYPE_BF16, i);
    }
}

static void get_e4m3(const uint8_t *src, float s, float *out, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = e4m3_dequant(src[i], s);
    }
}

void kv_row_read(int32_t fmt, float k_scale, const uint8_t *row, float *out)
{
    switch (fmt) {
    case KVS_KV_F32:
        memcpy(out, row, KV_ROW_BYTES_F32);
        break;
    case KVS_KV_BF16:
        get_bf16(row, out, KVS_ROW_DIM);
        break;
    case KVS_KV_FP8:
        get_e4m3(row, k_scale, out, KVS_ROW_DIM);
        break;
    default:
        for (int32_t t = 0; t < KV_DS_N_TILE; t++) {
            float s;
            memcpy(&s, row + KV_DS_SCALE_AT + (size_t)t * sizeof s, sizeof s);
            get_e4m3(row + (size_t)t * KV_DS_TILE, s, out + (size_t)t * KV_DS_TILE, KV_DS_TILE);
        }
        get_bf16(row + KV_DS_ROPE_AT, out + KVS_LATENT_DIM, KVS_ROPE_DIM);
        break;
    }
}

void index_key_write(int32_t fmt, int32_t in_type, uint8_t *page, int32_t off, const void *key,
                     kv_count *count)
{
    uint8_t *dst = page + off * index_key_bytes(fmt);
    uint64_t n_sat = 0;
    if (fmt == KVS_INDEX_F32) {
        put_f32(dst, key, in_type, KVS_INDEX_DIM);
    } else {
        const float s = scale_index(amax_of(key, in_type, 0, KVS_INDEX_DIM));
        n_sat = put_e4m3(dst, key, in_type, 0, KVS_INDEX_DIM, s);
        memcpy(page + index_scale_at(off), &s, sizeof s);
    }
    if (count != NULL) {
        count->n_nan += count_nan(key, in_type, KVS_INDEX_DIM);
        count->n_sat += n_sat;
    }
}

float index_key_read(int32_t fmt, const uint8_t *page, int32_t off, float *out)
{
    const uint8_t *src = page + off * index_key_bytes(fmt);
    if (fmt == KVS_INDEX_F32) {
        memcpy(out, src, sizeof(float) * KVS_INDEX_DIM);
        return 1.0f;
    }
    for (int32_t i = 0; i < KVS_INDEX_DIM; i++) {
        out[i] = e4m3_to_f32(src[i]);
    }
    float s;
    memcpy(&s, page + index_scale_at(off), sizeof s);
    return s;
}
