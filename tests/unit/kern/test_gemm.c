/* Products with a weight matrix, every variant: the value of every e4m3 code under many scales,
 * sums against double, the same bits whatever shares the call, scratch within its promise. */
#include "unit/unit.h"

#include <math.h>

#include "kern_x86.h"
#include "num/fmt.h"

enum { BLOCK = GEMM_BLOCK };

/* One call with as much scratch as it asks for. */
static void call(const kern_table *t, const gemm_args *in, dev_queue *q)
{
    gemm_args a = *in;
    a.scratch_bytes = t->gemm_scratch(&a, q);
    kvs_error err;
    a.scratch = a.scratch_bytes > 0 ? mem_map_pages(a.scratch_bytes, 0, &err) : NULL;
    assert_true(a.scratch_bytes == 0 || a.scratch != NULL);
    if (a.scratch != NULL) {
        memset(a.scratch, 0xFF, a.scratch_bytes);
    }
    t->gemm(&a, q);
    mem_unmap_pages(a.scratch, a.scratch_bytes);
}

static int flushes(const char *variant)
{
    return strstr(variant, "bf16") != NULL || strstr(variant, "amx") != NULL;
}

/* ---- codes ---- */

enum { N_CODE = 254 };

/* x picks column i in row i, so y[i] is the weight there; all codes but NaN, twice where the second
 * 128-column block begins. */
static void codes_with(const kern_table *t, const char *variant, const float scale[2],
                       int32_t n_row)
{
    static uint16_t x[N_CODE][N_CODE];
    uint8_t w[N_CODE];
    float y[N_CODE];
    for (int32_t i = 0; i < N_CODE; i++) {
        w[i] = (uint8_t)(i < 127 ? i : i + 1);
        x[i][i] = 0x3F80;
    }
    gemm_args a = {.n_batch = 1, .x_stride = N_CODE, .y = y, .y_stride = 1};
    a.w = (gemm_mat){.data = w,
                     .stride = N_CODE,
                     .scale = scale,
                     .scale_stride = 2,
                     .n_out = 1,
                     .n_in = N_CODE,
                     .type = GEMM_FP8};
    a.w.col0 = 2; /* the second scale from column 126 on */
    for (int32_t r = 0; r < N_CODE; r += n_row) {
        a.n_row = r + n_row < N_CODE ? n_row : N_CODE - r;
        a.x = x[r];
        a.y = y + r;
        call(t, &a, NULL);
    }
    for (int32_t i = 0; i < N_CODE; i++) {
        const float want = e4m3_dequant(w[i], scale[i >= 126]);
        if (!(y[i] == want || (flushes(variant) && fabsf(want) < 0x1p-126f && y[i] == 0.0f))) {
            fail_msg("%s: code 0x%02x times %a gives %a, want %a", variant, (unsigned)w[i],
                     (double)scale[i >= 126], (double)y[i], (double)want);
        }
    }
}

static void every_code_under_every_scale(void **state)
{
    (void)state;
    kern_table t;
    const char *name = NULL;
    for (int32_t v = 0; (name = table_nth(&t, KERN_OP_gemm, v)) != NULL; v++) {
        rng r = rng_init(5, 1);
        for (int32_t i = 0; i < 60; i++) {
            /* the smallest exponents, the largest at which no product overflows, random ones */
            const int32_t e = i < 26 ? i : i < 40 ? 206 + i : (int32_t)rng_next_below(&r, 240);
            const uint32_t m = i % 3 == 0 ? 0 : (uint32_t)rng_next(&r) & 0x807FFFFFu;
            const float scale[2] = {f32_from_bits((uint32_t)e << 23 | m),
                                    f32_from_bits((uint32_t)(e / 2 + 60) << 23 | (m ^ 0x5A5A5u))};
            codes_with(&t, name, scale, i % 2 == 0 ? N_CODE : 1 + i % 5);
        }
    }
    assert_true(name == NULL);
}

static void a_nan_code_or_scale_is_nan(void **state)
{
    (void)state;
    kern_table t;
    for (int32_t v = 0; table_nth(&t, KERN_OP_gemm, v) != NULL; v++) {
        for (int32_t n_row = 1; n_row <= 80; n_row += 79) {
            static uint8_t w[3][300];
            static uint16_t x[80][300];
            float y[80][3];
            const float scale[3] = {1.0f, 0.5f, f32_from_bits(0xFFFFFFFFu)};
            memset(w, 0x38, sizeof w);
            w[1][131] = 0xFF;
            gemm_args a = {
                .n_batch = 1, .n_row = n_row, .x = x, .x_stride = 300, .y = y[0], .y_stride = 3};
            a.w = (gemm_mat){.data = w,
                             .stride = 300,
                             .scale = scale,
                             .scale_stride = 3,
                             .n_out = 3,
                             .n_in = 256,
                             .type = GEMM_FP8};
            call(&t, &a, NULL);
            for (int32_t r = 0; r < n_row; r++) {
                assert_true(y[r][0] == 0.0f && isnan(y[r][1]) && y[r][2] == 0.0f);
            }
            a.w.n_in = 257; /* one column under the NaN scale */
            call(&t, &a, NULL);
            for (int32_t r = 0; r < n_row; r++) {
                assert_true(isnan(y[r][0]) && isnan(y[r][1]) && isnan(y[r][2]));
            }
        }
    }
}

/* ---- sums ---- */

typedef struct product {
    gemm_args a;
    uint8_t *w;
    uint8_t *x;
    float *scale;
    float *y;
} product;

static product product_make(int32_t type, int32_t n_row, int32_t n_out, int32_t n_in, uint64_t seed)
{
    product p;
    memset(&p, 0, sizeof p);
    rng r = rng_init(seed, 3);
    const int64_t n_w = (int64_t)n_out * n_in;
    const int64_t n_x = (int64_t)n_row * n_in;
    const int64_t n_scale = (int64_t)(n_out / BLOCK + 2) * (n_in / BLOCK + 2);
    /* not a byte more: reads past the end are for the sanitizer */
    p.w = calloc((size_t)n_w, type == GEMM_F32 ? 4 : type == GEMM_BF16 ? 2 : 1);
    p.x = calloc((size_t)n_x, type == GEMM_F32 ? 4 : 2);
    p.y = calloc((size_t)n_row * (size_t)n_out + 1, 4);
    p.scale = calloc((size_t)n_scale, 4);
    for (int64_t i = 0; i < n_w; i++) {
        const float f = (float)rng_next_normal(&r);
        const uint8_t code = (uint8_t)rng_next(&r);
        if (type == GEMM_FP8) {
            p.w[i] = (code & 0x7F) == 0x7F ? 0 : code;
        } else if (type == GEMM_BF16) {
            ((bf16 *)(void *)p.w)[i] = bf16_from_f32(f);
        } else {
            ((float *)(void *)p.w)[i] = f;
        }
    }
    for (int64_t i = 0; i < n_x; i++) {
        const float f = (float)rng_next_normal(&r);
        if (type == GEMM_F32) {
            ((float *)(void *)p.x)[i] = f;
        } else {
            ((bf16 *)(void *)p.x)[i] = bf16_from_f32(f);
        }
    }
    for (int64_t i = 0; i < n_scale; i++) {
        p.scale[i] = (float)exp(rng_next_normal(&r) - 5.0);
    }
    p.a = (gemm_args){
        .n_row = n_row, .x = p.x, .x_stride = n_in, .y = p.y, .y_stride = n_out, .n_batch = 1};
    p.a.w = (gemm_mat){.data = p.w,
                       .stride = n_in,
                       .scale = p.scale,
                       .scale_stride = n_in / BLOCK + 2,
                       .row0 = 77,
                       .col0 = 33,
                       .n_out = n_out,
                       .n_in = n_in,
                       .type = type};
    return p;
}

static void product_free(product *p)
{
    free(p->w);
    free(p->x);
    free(p->y);
    free(p->scale);
}

static float weight_of(const product *p, int64_t o, int64_t i)
{
    const gemm_mat *w = &p->a.w;
    const int64_t at = o * w->stride + i;
    if (w->type == GEMM_F32) {
        return ((const float *)(const void *)p->w)[at];
    }
    if (w->type == GEMM_BF16) {
        return bf16_to_f32(((const bf16 *)(const void *)p->w)[at]);
    }
    return bf16_round(e4m3_to_f32(p->w[at]) *
                      p->scale[(w->row0 + o) / BLOCK * w->scale_stride + (w->col0 + i) / BLOCK]);
}

static void sums_match_double(void **state)
{
    (void)state;
    static const int32_t shapes[][3] = {{1, 9, 33},     {1, 300, 700}, {8, 13, 2100},
                                        {3, 1, 1},      {70, 30, 65},  {5, 100, 130},
                                        {131, 7, 1030}, {1300, 10, 70}};
    kern_table t;
    const char *name = NULL;
    for (int32_t v = 0; (name = table_nth(&t, KERN_OP_gemm, v)) != NULL; v++) {
        for (size_t i = 0; i < 3 * UNIT_COUNT(shapes); i++) {
            const int32_t *s = shapes[i / 3];
            const int32_t type = 1 + (int32_t)i % 3;
            product p = product_make(type, s[0], s[1], s[2], i);
            call(&t, &p.a, NULL);
            for (int64_t at = 0; at < (int64_t)s[0] * s[1]; at++) {
                double sum = 0.0;
                double size = 0.0;
                for (int64_t k = 0; k < s[2]; k++) {
                    const int64_t ix = at / s[1] * s[2] + k;
                    const float x = type == GEMM_F32 ? ((float *)(void *)p.x)[ix]
                                                     : bf16_to_f32(((bf16 *)(void *)p.x)[ix]);
                    const double term = (double)x * (double)weight_of(&p, at % s[1], k);
                    sum += term;
                    size += fabs(term);
                }
                const double tol = 0x1p-24 * (sqrt((double)s[2]) + 3.0) * size;
                if (!(fabs((double)p.y[at] - sum) <= tol)) {
                    fail_msg("%s type %d %dx%dx%d at %lld: %g, want %g", name, type, s[0], s[1],
                             s[2], (long long)at, (double)p.y[at], sum);
                }
            }
            product_free(&p);
        }
    }
}

/* ---- company ---- */

/* Rows alone, outputs alone, with workers and without: the bits of the whole. */
static void company_does_not_matter(void **state)
{
    (void)state;
    pool *workers = NULL;
    kvs_error err;
    assert_int_equal(pool_open(&workers, 3, &err), KVS_OK);
    dev_queue q;
    dev_queue_init(&q, workers);
    kern_table t;
    const char *name = NULL;
    for (int32_t v = 0; (name = table_nth(&t, KERN_OP_gemm, v)) != NULL; v++) {
        for (int32_t i = 0; i < 9; i++) {
            const int32_t type = 1 + i % 3;
            const int32_t size = type == GEMM_F32 ? 4 : type == GEMM_BF16 ? 2 : 1;
            const int32_t size_x = type == GEMM_F32 ? 4 : 2;
            const int32_t n_row = i < 3 ? 150 : i < 6 ? 8 : 1;
            const int32_t n_out = i < 3 ? 30 : 150;
            product p = product_make(type, n_row, n_out, 2240, (uint64_t)i);
            p.a.w.col0 = i % 2 == 0 ? 0 : 33; /* codes in registers, or by way of a panel */
            call(&t, &p.a, &q);
            for (int32_t k = 0; k < 40; k++) {
                const int32_t row = k * 37 % n_row;
                const int32_t out = k * 11 % n_out;
                const int32_t group = 1 + k % 4 < n_row - row ? 1 + k % 4 : n_row - row;
                float y[4] = {0.0f};
                gemm_args one = p.a;
                one.n_row = group;
                one.x = p.x + (int64_t)row * 2240 * size_x;
                one.w.data = p.w + (int64_t)out * 2240 * size;
                one.w.row0 += out;
                one.w.n_out = 1;
                one.y = y;
                one.y_stride = 1;
                call(&t, &one, NULL);
                for (int32_t r = 0; r < group; r++) {
                    if (memcmp(&y[r], &p.y[(row + r) * n_out + out], 4) != 0) {
                        fail_msg("%s: type %d row %d output %d: %a alone, %a with others", name,
                                 type, row + r, out, (double)y[r],
                                 (double)p.y[(row + r) * n_out + out]);
                    }
                }
            }
            product_free(&p);
        }
    }
    pool_close(workers);
}

/* Both ways from codes to bf16 that the bf16 variant has: scales of any size, codes of any kind. */
static void both_ways_of_codes_give_the_same_bits(void **state)
{
    (void)state;
    if (!cpu_has(cpu_features(), CPU_NEED_AVX2)) {
        skip();
    }
    kern_table way[2];
    gemm_apply_emulate_bf16(&way[0]);
    gemm_apply_emulate_vbmi(&way[1]);
    for (int32_t i = 0; i < 40; i++) {
        const int32_t n_in = i % 2 != 0 ? 300 + i : 64 * (1 + i);
        const int32_t n_row = i % 10 == 9 ? 110 : 1 + i / 2 % 9;
        product p = product_make(GEMM_FP8, n_row, 20, n_in, 90 + (uint64_t)i);
        p.a.w.col0 = i % 2 != 0 ? 33 : 128;
        p.a.w.row0 = 77 + i; /* some tiles lie under two rows of scales */
        rng r = rng_init((uint64_t)i, 4);
        for (int32_t k = 0; k < 2 * (n_in / BLOCK + 2); k++) {
            p.scale[k] = f32_from_bits((uint32_t)rng_next(&r));
        }
        p.w[i] = i % 3 == 0 ? 0x7F : p.w[i];
        const size_t n = (size_t)p.a.n_row * (size_t)p.a.w.n_out;
        float *first = malloc(n * sizeof *first);
        call(&way[0], &p.a, NULL);
        memcpy(first, p.y, n * sizeof *first);
        call(&way[1], &p.a, NULL);
        assert_memory_equal(first, p.y, n * sizeof *first);
        free(first);
        product_free(&p);
    }
}

/* Scratch follows workers and, a little, n_in, never n_out; it falls with the rows. */
static void scratch_is_bounded(void **state)
{
    (void)state;
    dev_queue q;
    dev_queue_init(&q, NULL);
    kern_table t;
    for (int32_t v = 0; table_nth(&t, KERN_OP_gemm, v) != NULL; v++) {
        for (int32_t type = 1; type <= 3; type++) {
            gemm_args a = {.n_row = 1, .n_batch = 1};
            a.w = (gemm_mat){.n_out = 100, .n_in = 7168, .type = type};
            size_t last = 0;
            for (a.n_row = 1; a.n_row < 400; a.n_row += 1 + a.n_row / 9) {
                const size_t n = t.gemm_scratch(&a, &q);
                assert_true(n >= last && n <= (1u << 20));
                last = n;
            }
            a.w.n_out = 1000000;
            assert_int_equal(t.gemm_scratch(&a, &q), last);
            a.w.n_in = 18432; /* of which only tables of scales take more */
            const size_t wide = t.gemm_scratch(&a, &q);
            assert_true(wide >= last && wide - last <= (type == GEMM_FP8 ? 64u << 10 : 0));
            last = wide;
            q.n_worker = 5;
            assert_true(t.gemm_scratch(&a, &q) == 5 * last || last == 0);
            q.n_worker = 1;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_under_every_scale),
        cmocka_unit_test(a_nan_code_or_scale_is_nan),
        cmocka_unit_test(sums_match_double),
        cmocka_unit_test(company_does_not_matter),
        cmocka_unit_test(both_ways_of_codes_give_the_same_bits),
        cmocka_unit_test(scratch_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
