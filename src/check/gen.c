/* gen.c - data of the cases. All of it is a function of the cursor it is drawn from. */
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

/* Four values per block: each the sum of two 16-bit uniforms, scaled to variance 1. */
static void four(rng *r, float out[4])
{
    uint32_t w[4];
    rng_block(r->seed, r->counter++, r->stream, w);
    for (int i = 0; i < 4; i++) {
        const float sum = (float)(w[i] & 0xFFFF) + (float)(w[i] >> 16) - 65535.0f;
        /* the last factor fills the low bits of the mantissa */
        out[i] = sum * 3.7378e-5f * (1.0f + 1e-4f * (float)(w[(i + 1) & 3] & 0xFF));
    }
}

void gen_f32(rng *r, float *x, int64_t n, float sigma)
{
    for (int64_t i = 0; i < n; i += 4) {
        float v[4];
        four(r, v);
        for (int64_t j = i; j < i + 4 && j < n; j++) {
            x[j] = v[j - i] * sigma;
        }
    }
}

void gen_bf16(rng *r, uint16_t *x, int64_t n, float sigma)
{
    for (int64_t i = 0; i < n; i += 4) {
        float v[4];
        four(r, v);
        for (int64_t j = i; j < i + 4 && j < n; j++) {
            const float f = v[j - i] * sigma;
            uint32_t u = 0;
            memcpy(&u, &f, sizeof u);
            x[j] = (uint16_t)(u >> 16);
        }
    }
}

void gen_any(rng *r, void *x, int32_t type, int64_t at, int64_t n, float sigma)
{
    if (type == KVS_DTYPE_BF16) {
        gen_bf16(r, (uint16_t *)x + at, n, sigma);
    } else {
        gen_f32(r, (float *)x + at, n, sigma);
    }
}

void gen_e4m3(rng *r, uint8_t *x, int64_t n)
{
    /* codes by quantile of |normal| * 64, found once */
    static uint8_t code[128];
    if (code[127] == 0) {
        for (int i = 0; i < 128; i++) {
            double lo = 0.0;
            double hi = 8.0;
            for (int step = 0; step < 50; step++) {
                const double mid = (lo + hi) / 2.0;
                if (erf(mid / sqrt(2.0)) < (i + 0.5) / 128.0) {
                    lo = mid;
                } else {
                    hi = mid;
                }
            }
            code[i] = orc_to_e4m3((float)(64.0 * lo));
        }
    }
    for (int64_t i = 0; i < n; i += 16) {
        uint32_t w[4];
        rng_block(r->seed, r->counter++, r->stream, w);
        for (int64_t j = i; j < i + 16 && j < n; j++) {
            const uint32_t b = w[(j - i) / 4] >> (8 * ((j - i) % 4)) & 0xFF;
            x[j] = (uint8_t)(code[b & 127] | (b & 128));
        }
    }
}

void gen_store(void *x, int32_t type, int64_t at, float value)
{
    if (type == KVS_DTYPE_BF16) {
        ((uint16_t *)x)[at] = orc_to_bf16(value);
    } else {
        ((float *)x)[at] = value;
    }
}

void gen_permutation(rng *r, int32_t *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const int32_t j = gen_pick(r, i + 1);
        x[i] = x[j];
        x[j] = i;
    }
}

void gen_row(rng *r, int32_t fmt, float k_scale, uint8_t *row, float sigma)
{
    union {
        float f[KVS_ROW_DIM];
        uint16_t h[KVS_ROW_DIM];
    } v;
    switch (fmt) {
    case KVS_KV_F32:
        gen_f32(r, v.f, KVS_ROW_DIM, sigma);
        memcpy(row, v.f, sizeof v.f);
        return;
    case KVS_KV_BF16:
        gen_bf16(r, v.h, KVS_ROW_DIM, sigma);
        memcpy(row, v.h, sizeof v.h);
        return;
    case KVS_KV_FP8:
        gen_e4m3(r, row, KVS_ROW_DIM);
        (void)k_scale;
        return;
    default:
        break;
    }
    gen_e4m3(r, row, KVS_LATENT_DIM);
    for (int t = 0; t < 4; t++) {
        /* powers of two as the default writer leaves them, or any f32 as older writers do */
        const float any = 1.0f + (float)(rng_next(r) & 0xFFFF) / 65536.0f;
        const float s = sigma / 64.0f;
        float scale = ldexpf(1.0f, ilogbf(s) + (int)(rng_next(r) & 1));
        scale *= (rng_next(r) & 1) != 0 ? any : 1.0f;
        memcpy(row + KVS_LATENT_DIM + 4 * t, &scale, sizeof scale);
    }
    gen_bf16(r, v.h, KVS_ROPE_DIM, sigma);
    memcpy(row + 528, v.h, KVS_ROPE_DIM * sizeof v.h[0]);
}
