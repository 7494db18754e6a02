/* oracle_kvio.c - rows and index pages as bytes. */
#include <math.h>
#include <string.h>

#include "check/oracle.h"

int64_t orc_row_bytes(int32_t fmt)
{
    switch (fmt) {
    case KVS_KV_F32:
        return 576 * 4;
    case KVS_KV_BF16:
        return 576 * 2;
    case KVS_KV_FP8:
        return 576;
    default:
        return 512 + 4 * 4 + 64 * 2;
    }
}

int64_t orc_index_page_bytes(int32_t fmt)
{
    return fmt == KVS_INDEX_F32 ? 64 * 128 * 4 : 64 * 128 + 64 * 4;
}

static float load_f32(const uint8_t *p)
{
    float x = 0.0f;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static void store_u16(uint8_t *p, uint16_t x)
{
    p[0] = (uint8_t)(x & 255);
    p[1] = (uint8_t)(x >> 8);
}

void orc_row_read(int32_t fmt, float k_scale, const uint8_t *row, float *out)
{
    for (int i = 0; i < 576; i++) {
        switch (fmt) {
        case KVS_KV_F32:
            out[i] = load_f32(row + 4 * i);
            break;
        case KVS_KV_BF16:
            out[i] = orc_bf16(load_u16(row + 2 * i));
            break;
        case KVS_KV_FP8:
            out[i] = orc_round_bf16(orc_e4m3(row[i]) * k_scale);
            break;
        default:
            out[i] = i < 512
                         ? orc_round_bf16(orc_e4m3(row[i]) * load_f32(row + 512 + 4 * (i / 128)))
                         : orc_bf16(load_u16(row + 528 + 2 * (i - 512)));
            break;
        }
    }
}

/* bf16 of element i: the bits themselves where the input is bf16. */
static uint16_t as_bf16(const void *p, int32_t type, int64_t i)
{
    return type == KVS_DTYPE_BF16 ? ((const uint16_t *)p)[i] : orc_to_bf16(((const float *)p)[i]);
}

void orc_row_write(const kv_write_args *a, int64_t tok, uint8_t *row, orc_count *c)
{
    const int64_t at_l = tok * a->latent_stride;
    const int64_t at_r = tok * a->rope_stride;
    for (int64_t i = 0; i < 576; i++) {
        const void *from = i < 512 ? a->latent : a->rope;
        const int64_t at = i < 512 ? at_l + i : at_r + i - 512;
        const float x = orc_load(from, a->in_type, at);
        if (a->fmt == KVS_KV_F32) {
            memcpy(row + 4 * i, &x, sizeof x);
        } else if (a->fmt == KVS_KV_BF16) {
            store_u16(row + 2 * i, as_bf16(from, a->in_type, at));
        } else if (a->fmt == KVS_KV_FP8) {
            row[i] = orc_quant(x, a->k_scale, c);
            continue;
        } else if (i < 512) {
            const int64_t tile = i / 128;
            const float s =
                orc_scale(a->rule, orc_amax(a->latent, a->in_type, at_l + 128 * tile, 128));
            row[i] = orc_quant(x, s, c);
            memcpy(row + 512 + 4 * tile, &s, sizeof s);
            continue;
        } else {
            store_u16(row + 528 + 2 * (i - 512), as_bf16(from, a->in_type, at));
        }
        c->n_nan += isnan(x) ? 1 : 0;
    }
}

float orc_index_read(int32_t fmt, const uint8_t *page, int64_t off, float *out)
{
    for (int64_t i = 0; i < 128; i++) {
        out[i] = fmt == KVS_INDEX_F32 ? load_f32(page + 4 * (off * 128 + i))
                                      : orc_e4m3(page[off * 128 + i]);
    }
    return fmt == KVS_INDEX_F32 ? 1.0f : load_f32(page + 8192 + 4 * off);
}

void orc_index_write(const index_write_args *a, int64_t tok, uint8_t *page, int64_t off,
                     orc_count *c)
{
    const int64_t at = tok * a->key_stride;
    const float s = orc_scale_index(orc_amax(a->key, a->in_type, at, 128));
    for (int64_t i = 0; i < 128; i++) {
        const float x = orc_load(a->key, a->in_type, at + i);
        if (a->fmt == KVS_INDEX_F32) {
            memcpy(page + 4 * (off * 128 + i), &x, sizeof x);
            c->n_nan += isnan(x) ? 1 : 0;
        } else {
            page[off * 128 + i] = orc_quant(x, s, c);
        }
    }
    if (a->fmt != KVS_INDEX_F32) {
        memcpy(page + 8192 + 4 * off, &s, sizeof s);
    }
}

int64_t orc_slot(const int32_t *table, int64_t width, int64_t n_slot, int64_t l)
{
    if (l < 0 || l / 64 >= width) {
        return -1;
    }
    const int64_t slot = (int64_t)table[l / 64] * 64 + l % 64;
    return table[l / 64] >= 0 && slot < n_slot ? slot : -1;
}
