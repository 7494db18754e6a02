/* oracle_num.c - the number formats by arithmetic on their fields, and rounding by search. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "check/oracle.h"

static float g_e4m3[256];
static float g_bf16[65536];

/* sign, exponent and mantissa fields of a small float with subnormals and no infinity */
static double decode(int sign, int e, int m, int n_m, int bias)
{
    const double frac = (double)m / (double)(1 << n_m);
    const double v = e == 0 ? ldexp(frac, 1 - bias) : ldexp(1.0 + frac, e - bias);
    return sign ? -v : v;
}

void orc_init(void)
{
    for (int c = 0; c < 256; c++) {
        g_e4m3[c] = (c & 127) == 127 ? copysignf(NAN, c < 128 ? 1.0f : -1.0f)
                                     : (float)decode(c >> 7, (c >> 3) & 15, c & 7, 3, 7);
    }
    for (int c = 0; c < 65536; c++) {
        const int e = (c >> 7) & 255;
        const int m = c & 127;
        if (e == 255) {
            /* the payload matters where a NaN is copied */
            const uint32_t u = (uint32_t)c << 16;
            memcpy(&g_bf16[c], &u, sizeof u);
        } else {
            g_bf16[c] = (float)decode(c >> 15, e, m, 7, 127);
        }
    }
}

float orc_e4m3(uint8_t code)
{
    return g_e4m3[code];
}

float orc_bf16(uint16_t bits)
{
    return g_bf16[bits];
}

/* The nearest of the 127 magnitudes, the even code where two are equally near. */
uint8_t orc_to_e4m3(float x)
{
    const int sign = signbit(x) ? 128 : 0;
    if (isnan(x)) {
        return (uint8_t)(sign | 127);
    }
    const double a = fabs((double)x);
    int lo = 0;
    int hi = 126;
    if (a >= (double)g_e4m3[hi]) {
        return (uint8_t)(sign | hi);
    }
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (a < (double)g_e4m3[mid]) {
            hi = mid;
        } else {
            lo = mid;
        }
    }
    const double below = a - (double)g_e4m3[lo];
    const double above = (double)g_e4m3[hi] - a;
    const int up = above < below || (above == below && lo % 2 != 0);
    return (uint8_t)(sign | (up ? hi : lo));
}

float orc_round_bf16(float x)
{
    if (isnan(x) || isinf(x) || x == 0.0f) {
        return x;
    }
    /* adding 1.5 * 2^52 units in the last place lets the double addition do the rounding */
    const int e = ilogbf(x) < -126 ? -126 : ilogbf(x);
    const double magic = ldexp(1.5, e - 7 + 52);
    const volatile double sum = (double)x + magic;
    const double r = sum - magic;
    if (fabs(r) >= ldexp(1.0, 128)) {
        return copysignf(INFINITY, x);
    }
    return copysignf((float)r, x);
}

uint16_t orc_to_bf16(float x)
{
    const float r = orc_round_bf16(x);
    uint32_t u = 0;
    memcpy(&u, &r, sizeof u);
    /* a NaN keeps its sign and upper payload and becomes quiet */
    return (uint16_t)((u >> 16) | (isnan(x) ? 0x40u : 0u));
}

/* The smallest power of two >= x > 0. */
static float pow2_at_least(double x)
{
    int e = 0;
    const double f = frexp(x, &e);
    return (float)ldexp(1.0, f == 0.5 ? e - 1 : e);
}

float orc_scale(int32_t rule, float amax)
{
    const float s = amax / 448.0f;
    if (rule == KVS_SCALE_EXACT) {
        return fmaxf(s, FLT_MIN);
    }
    return pow2_at_least(fmax((double)s, 1e-4));
}

float orc_scale_index(float amax)
{
    return pow2_at_least(fmax((double)amax, 1e-4) / 448.0);
}

float orc_load(const void *p, int32_t type, int64_t i)
{
    return type == KVS_DTYPE_BF16 ? g_bf16[((const uint16_t *)p)[i]] : ((const float *)p)[i];
}

float orc_amax(const void *p, int32_t type, int64_t i, int64_t n)
{
    float amax = 0.0f;
    for (int64_t j = i; j < i + n; j++) {
        const float x = fabsf(orc_load(p, type, j));
        if (isfinite(x)) {
            amax = fmaxf(amax, x);
        }
    }
    return amax;
}

uint8_t orc_quant(float x, float s, orc_count *c)
{
    const float y = x / s;
    c->n_nan += isnan(x) ? 1 : 0;
    c->n_sat += fabsf(y) > 464.0f ? 1 : 0;
    return orc_to_e4m3(y);
}
