/* simd_cases.c: kern/x86/simd.h against scalar code, compiled once per kind of vector. SIMD_CASES is
 * the name of the table it defines; SIMD_LANES and SIMD_EMULATE choose the vectors. */
#include "kern/x86/simd.h"

#include "simd_cases.h"
#include "unit/unit.h"

#include <math.h>

#include "base/rng.h"
#include "num/fmt.h"

enum { L = SIMD_LANES };

static uint32_t bits(float x)
{
    return f32_bits(x);
}

static void check_lane(const char *what, float in, float got, float want)
{
    if (bits(got) != bits(want) && !(isnan(got) && isnan(want))) {
        fail_msg("%s(%a) gives %a, the scalar form %a", what, (double)in, (double)got,
                 (double)want);
    }
}

static void check_exp(const float *x)
{
    _Alignas(64) float y[L];
    vf_store(y, vf_exp(vf_load(x)));
    for (int i = 0; i < L; i++) {
        check_lane("exp", x[i], y[i], kexp(x[i]));
    }
    vf_store(y, vf_exp_neg(vf_load(x)));
    for (int i = 0; i < L; i++) {
        if (!(x[i] > 0.0f)) {
            check_lane("exp_neg", x[i], y[i], kexp(x[i]));
        }
    }
}

/* Every 1009th bit pattern, so all exponents and both signs. */
static void exp_log_bits(void **state)
{
    (void)state;
    _Alignas(64) float x[L];
    _Alignas(64) float y[L];
    uint64_t u = 0;
    while (u < (UINT64_C(1) << 32)) {
        for (int i = 0; i < L; i++, u += 1009) {
            x[i] = f32_from_bits((uint32_t)u);
        }
        check_exp(x);
        vf_store(y, vf_log(vf_load(x)));
        for (int i = 0; i < L; i++) {
            if (x[i] >= FLT_MIN && x[i] < INFINITY) {
                check_lane("log", x[i], y[i], klog(x[i]));
            }
        }
    }
    const float edge[] = {0.0f,      -0.0f,    1.0f, -87.0f,  -87.00001f, 88.0f,    88.00001f,
                          -INFINITY, INFINITY, NAN,  -1e-30f, FLT_MAX,    -FLT_MAX, FLT_MIN};
    for (size_t k = 0; k < UNIT_COUNT(edge); k++) {
        for (int i = 0; i < L; i++) {
            x[i] = edge[(k + (size_t)i) % UNIT_COUNT(edge)];
        }
        check_exp(x);
    }
}

static void node_bits(void **state)
{
    (void)state;
    const float odd[] = {-INFINITY, INFINITY, NAN, 0.0f, -0.0f, 3.5f, -90.0f, 120.0f};
    rng r = rng_init(1, 0);
    for (int k = 0; k < 4000; k++) {
        _Alignas(64) float a[L], b[L], x[L], y[L], out[L], lse[L];
        for (int i = 0; i < L; i++) {
            a[i] = (float)(40.0 * (rng_next_uniform(&r) - 0.5));
            b[i] = (float)(40.0 * (rng_next_uniform(&r) - 0.5));
            x[i] = (float)(rng_next_uniform(&r) - 0.5);
            y[i] = (float)(rng_next_uniform(&r) - 0.5);
            if (rng_next(&r) % 4 == 0) {
                a[i] = odd[rng_next(&r) % UNIT_COUNT(odd)];
                x[i] = isnan(a[i]) ? NAN : x[i];
            }
            if (rng_next(&r) % 4 == 0) {
                b[i] = odd[rng_next(&r) % UNIT_COUNT(odd)];
                y[i] = isnan(b[i]) ? NAN : y[i];
            }
        }
        const vf_node n = vf_node_weights(vf_load(a), vf_load(b));
        vf_store(out, vf_node_value(&n, vf_load(x), vf_load(y)));
        vf_store(lse, n.lse);
        for (int i = 0; i < L; i++) {
            const merge_weight w = merge_node_weights(a[i], b[i]);
            const float want = merge_node_value(w, x[i], y[i]);
            if (bits(lse[i]) != bits(w.lse) || bits(out[i]) != bits(want)) {
                fail_msg("node of (%a, %a): lse %a, want %a; out %a, want %a", (double)a[i],
                         (double)b[i], (double)lse[i], (double)w.lse, (double)out[i], (double)want);
            }
        }
    }
}

static void e4m3_all_codes(void **state)
{
    (void)state;
    uint8_t code[256];
    for (int i = 0; i < 256; i++) {
        code[i] = (uint8_t)i;
    }
    for (int nan_safe = 0; nan_safe < 2; nan_safe++) {
        for (int at = 0; at < 256; at += L) {
            _Alignas(64) float y[L];
            vf_store(y, nan_safe ? vf_loadu_e4m3(code + at, 1) : vf_loadu_e4m3(code + at, 0));
            for (int i = 0; i < L; i++) {
                const float want = e4m3_to_f32((uint8_t)(at + i));
                if (isnan(want)) {
                    assert_true(nan_safe ? isnan(y[i]) : fabsf(y[i]) == 1.875f);
                    continue;
                }
                assert_int_equal(bits(y[i] * 256.0f), bits(want));
            }
        }
    }
}

static void bf16_widen(void **state)
{
    (void)state;
    for (uint32_t at = 0; at < 65536; at += L) {
        uint16_t w[L];
        _Alignas(64) float y[L];
        for (uint32_t i = 0; i < L; i++) {
            w[i] = (uint16_t)(at + i);
        }
        vf_store(y, vf_loadu_bf16(w));
        for (uint32_t i = 0; i < L; i++) {
            assert_int_equal(bits(y[i]), (at + i) << 16);
        }
    }
}

/* Every 251st bit pattern, and each upper half with the ties and their neighbours below it. */
static void bf16_round_all(void **state)
{
    (void)state;
    const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    uint64_t u = 0;
    for (uint64_t k = 0; k < (UINT64_C(1) << 32) / 251 + 6 * 65536; k += L) {
        _Alignas(64) float x[L];
        _Alignas(64) float y[L];
        uint16_t w[L + 1];
        for (uint64_t i = 0; i < L; i++) {
            const uint64_t n = k + i;
            const uint32_t at = n < 6 * 65536 ? (uint32_t)(n / 6) << 16 | low[n % 6] : (uint32_t)u;
            u += n < 6 * 65536 ? 0 : 251;
            x[i] = f32_from_bits(at);
        }
        vf_store(y, vf_round_bf16(vf_load(x)));
        w[L] = 0x1234;
        vf_storeu_bf16(w, vf_load(x));
        for (int i = 0; i < L; i++) {
            const bf16 want = bf16_from_f32(x[i]);
            if (w[i] != want.bits || bits(y[i]) != (uint32_t)want.bits << 16) {
                fail_msg("bf16 of %08x: %04x, %08x, want %04x", bits(x[i]), w[i], bits(y[i]),
                         want.bits);
            }
        }
        assert_int_equal(w[L], 0x1234);
    }
}

static void masks_and_transpose(void **state)
{
    (void)state;
    for (int base = -24; base <= 40; base++) {
        for (int from = 0; from <= 32; from++) {
            const uint32_t got = vm_bits(vm_range(base, from, from + 7));
            for (int i = 0; i < L; i++) {
                const int in = base + i >= from && base + i < from + 7;
                assert_int_equal((got >> i) & 1u, in);
            }
        }
    }
    _Alignas(64) float y[L];
    vf_store(y, vf_set1(1.0f));
    vf_store_where(y, vm_range(0, 2, 5), vf_set1(2.0f));
    for (int i = 0; i < L; i++) {
        assert_true(y[i] == (i >= 2 && i < 5 ? 2.0f : 1.0f));
    }
    __m256 r[8];
    for (int i = 0; i < 8; i++) {
        float row[8];
        for (int j = 0; j < 8; j++) {
            row[j] = (float)(10 * i + j);
        }
        r[i] = _mm256_loadu_ps(row);
    }
    transpose8(r);
    for (int i = 0; i < 8; i++) {
        float row[8];
        _mm256_storeu_ps(row, r[i]);
        for (int j = 0; j < 8; j++) {
            assert_true(row[j] == (float)(10 * j + i));
        }
    }
}

#if SIMD_LANES == 16
static float flush(float x)
{
    return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x;
}

static float bf16_at(const uint16_t *w, int i)
{
    return flush(f32_from_bits((uint32_t)w[i] << 16));
}

static void dot_of_pairs(void **state)
{
    (void)state;
    rng r = rng_init(2, 0);
    for (int k = 0; k < 20000; k++) {
        _Alignas(64) uint16_t a[32], b[32];
        _Alignas(64) float acc[16], y[16];
        for (int i = 0; i < 32; i++) {
            /* exponents around 0, and every 8th time any bits at all */
            const uint64_t u = rng_next(&r);
            const int wild = k % 8 == 0;
            a[i] = (uint16_t)(wild ? u : (u & 0x83ff) + 0x3e00);
            b[i] = (uint16_t)(wild ? u >> 16 : ((u >> 16) & 0x83ff) + 0x3e00);
        }
        for (int i = 0; i < 16; i++) {
            acc[i] = (float)(rng_next_uniform(&r) - 0.5);
        }
        vf_store(y, vf_dot_bf16(vf_load(acc), vi_load(a), vi_load(b)));
        for (int i = 0; i < 16; i++) {
            const float odd = flush(fmaf(bf16_at(a, 2 * i + 1), bf16_at(b, 2 * i + 1), acc[i]));
            check_lane("dot", acc[i], y[i], flush(fmaf(bf16_at(a, 2 * i), bf16_at(b, 2 * i), odd)));
        }
    }
}

static void bf16_narrow(void **state)
{
    (void)state;
    for (uint64_t u = 0; u < (UINT64_C(1) << 32);) {
        _Alignas(64) float x[32];
        _Alignas(64) uint16_t pair[32], join[32];
        for (int i = 0; i < 32; i++, u += 3307) {
            x[i] = f32_from_bits((uint32_t)u);
        }
        vi_store(pair, vi_pair_bf16(vf_load(x), vf_load(x + 16)));
        vi_store(join, vw_join_bf16(vf_load(x), vf_load(x + 16)));
        for (int i = 0; i < 32; i++) {
            const float want = bf16_round(flush(x[i]));
            check_lane("join", x[i], f32_from_bits((uint32_t)join[i] << 16), want);
            check_lane("pair", x[i], f32_from_bits((uint32_t)pair[i % 16 * 2 + i / 16] << 16),
                       want);
        }
    }
}

static void words(void **state)
{
    (void)state;
    _Alignas(64) int16_t table[32], y[32], lo[32], hi[32];
    for (int i = 0; i < 32; i++) {
        table[i] = (int16_t)(100 + i % 8);
    }
    for (int at = 0; at < 256; at += 32) {
        int8_t code[32];
        for (int i = 0; i < 32; i++) {
            code[i] = (int8_t)(at + i);
        }
        const vw x = vw_loadu_i8(code);
        vi_store(y, vw_lookup8_where_clear(x, vw_set1(0x78), vi_load(table),
                                           vw_merge_bits(vw_set1(0x0f0), vw_sll4(x), vw_set1(3))));
        for (int i = 0; i < 32; i++) {
            const int c = code[i];
            const int other = ((c * 16) & 0xf0) | (3 & ~0xf0);
            assert_int_equal(y[i], (c & 0x78) == 0 ? 100 + (c & 7) : (int16_t)other);
        }
    }
    for (int i = 0; i < 32; i++) {
        lo[i] = (int16_t)i;
        hi[i] = (int16_t)(100 + i);
    }
    const vw a = vi_load(lo);
    const vw b = vi_load(hi);
    vi_store(lo, vw_zip_lo(a, b));
    vi_store(hi, vw_zip_hi(a, b));
    for (int i = 0; i < 32; i++) {
        const int from = i / 8 * 8 + i % 8 / 2;
        assert_int_equal(lo[i], (i % 2 ? 100 : 0) + from);
        assert_int_equal(hi[i], (i % 2 ? 100 : 0) + from + 4);
    }
}
#endif

void SIMD_CASES(void)
{
    exp_log_bits(NULL);
    node_bits(NULL);
    e4m3_all_codes(NULL);
    bf16_widen(NULL);
    bf16_round_all(NULL);
    masks_and_transpose(NULL);
#if SIMD_LANES == 16
    dot_of_pairs(NULL);
    bf16_narrow(NULL);
    words(NULL);
#endif
}
