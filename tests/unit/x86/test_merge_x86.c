/* test_merge_x86.c: merge and quant_q in the x86 instruction sets give the bits of the reference, for every
 * shape, with parts missing, odd LSEs and unread NaN. AVX-512 runs emulated, and on the hardware where it
 * is. */
#include "unit/unit.h"

#include <math.h>
#include <stdbool.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "base/rng.h"
#include "kern/ref/ref.h"
#include "kern/x86/merge_x86.h"
#include "num/fmt.h"

void merge_apply_avx512_emulated(kern_table *t);
void quant_q_apply_avx512_emulated(kern_table *t);

typedef struct variant {
    const char *name;
    uint32_t need;
    void (*merge)(kern_table *t);
    void (*quant_q)(kern_table *t);
} variant;

static const variant g_variants[] = {
    {"avx2", CPU_NEED_AVX2, merge_apply_avx2, quant_q_apply_avx2},
    {"avx512 emulated", CPU_NEED_AVX2, merge_apply_avx512_emulated, quant_q_apply_avx512_emulated},
    {"avx512", CPU_NEED_AVX512, merge_apply_avx512, quant_q_apply_avx512},
};

enum { MAX_PART = 40, RED = 8 };

static void *room(size_t bytes)
{
    void *p = malloc(bytes);
    if (p == NULL) {
        abort();
    }
    memset(p, 0xff, bytes);
    return p;
}

/* ---- merge ----------------------------------------------------------------------------------- */

typedef struct shape {
    int32_t mode, n_part, n_row, n_head, dim, out_type;
    double odd; /* share of parts whose LSE is -inf, +inf or NaN, their values NaN */
    uint64_t seed;
} shape;

typedef struct inputs {
    float *out[MAX_PART], *lse[MAX_PART];
    merge_args a;
} inputs;

static float random_lse(const shape *s, rng *r)
{
    const float odd[] = {-INFINITY, INFINITY, NAN};
    if (rng_next_uniform(r) < s->odd) {
        return odd[rng_next_below(r, 3)];
    }
    /* now and then so far below the others that its weight is 0 */
    return (float)(10.0 * rng_next_uniform(r) - (rng_next_below(r, 9) == 0 ? 200.0 : 0.0));
}

static inputs inputs_make(const shape *s)
{
    rng r = rng_init(s->seed, 3);
    inputs in = {0};
    merge_args *a = &in.a;
    a->n_part = s->n_part;
    a->mode = s->mode;
    a->n_row = s->n_row;
    a->n_head = s->n_head;
    a->dim = s->dim;
    a->out_type = s->out_type;
    a->in_stride_head = s->dim + 3;
    a->in_stride_row = a->in_stride_head * s->n_head + 1;
    a->lse_stride_row = s->n_head + 2;
    a->out_stride_head = s->dim + 5;
    a->out_stride_row = a->out_stride_head * s->n_head + 7;
    for (int32_t p = 0; p < s->n_part; p++) {
        in.out[p] = room((size_t)(a->in_stride_row * s->n_row) * sizeof(float));
        in.lse[p] = room((size_t)(a->lse_stride_row * s->n_row) * sizeof(float));
        for (int32_t i = 0; i < s->n_row; i++) {
            for (int32_t h = 0; h < s->n_head; h++) {
                const float lse = random_lse(s, &r);
                in.lse[p][i * a->lse_stride_row + h] = lse;
                float *out = in.out[p] + i * a->in_stride_row + h * a->in_stride_head;
                for (int32_t d = 0; d < s->dim && isfinite(lse); d++) {
                    out[d] = (float)(rng_next_uniform(&r) - 0.5);
                    out[d] = rng_next_below(&r, 16) == 0 ? -0.0f : out[d];
                }
            }
        }
    }
    a->out_in = (const float *const *)in.out;
    a->lse_in = (const float *const *)in.lse;
    return in;
}

typedef struct merged {
    uint8_t *out;
    float *lse;
    size_t n_out, n_lse;
    uint64_t n_nan;
} merged;

static merged merged_run(merge_fn fn, inputs *in, int n_worker)
{
    merge_args a = in->a;
    a.out_in = (const float *const *)in->out;
    a.lse_in = (const float *const *)in->lse;
    pool *p = NULL;
    dev_queue q;
    assert_int_equal(pool_open(&p, n_worker, NULL), KVS_OK);
    dev_queue_init(&q, p);
    merged m = {.n_out = (size_t)(a.out_stride_row * a.n_row + RED) * 4,
                .n_lse = (size_t)(a.n_row * a.n_head + RED)};
    m.out = room(m.n_out);
    m.lse = room(m.n_lse * sizeof *m.lse);
    a.out = m.out;
    a.lse = m.lse;
    a.n_nan = &m.n_nan;
    fn(&a, &q);
    pool_close(p);
    return m;
}

static void check_shape(const variant *v, shape s)
{
    kern_table ref = {0};
    kern_table own = {0};
    ref_apply_merge(&ref);
    v->merge(&own);
    inputs in = inputs_make(&s);
    merged want = merged_run(ref.merge, &in, 1);
    for (int n_worker = 1; n_worker <= 3; n_worker += 2) {
        merged got = merged_run(own.merge, &in, n_worker);
        if (memcmp(want.out, got.out, want.n_out) != 0 ||
            memcmp(want.lse, got.lse, want.n_lse * sizeof *want.lse) != 0 ||
            want.n_nan != got.n_nan) {
            fail_msg("%s: mode %d parts %d rows %d heads %d dim %d type %d seed %llu differs",
                     v->name, s.mode, s.n_part, s.n_row, s.n_head, s.dim, s.out_type,
                     (unsigned long long)s.seed);
        }
        free(got.out);
        free(got.lse);
    }
    free(want.out);
    free(want.lse);
    for (int32_t p = 0; p < s.n_part; p++) {
        free(in.out[p]);
        free(in.lse[p]);
    }
}

static void merge_bits(const variant *v)
{
    const int32_t trees[] = {1, 2, 4, 8};
    const int32_t folds[] = {1, 2, 3, 8, 9, 15, 16, 40};
    const int32_t heads[] = {1, 7, 8, 16, 19};
    uint64_t seed = 1;
    for (size_t i = 0; i < UNIT_COUNT(trees) + UNIT_COUNT(folds); i++) {
        const bool tree = i < UNIT_COUNT(trees);
        for (size_t h = 0; h < UNIT_COUNT(heads); h++) {
            for (int odd = 0; odd < 3; odd++, seed++) {
                check_shape(v, (shape){.mode = tree ? MERGE_TREE : MERGE_FOLD,
                                       .n_part = tree ? trees[i] : folds[i - UNIT_COUNT(trees)],
                                       .n_row = 1 + (int32_t)(seed % 3),
                                       .n_head = heads[h],
                                       .dim = seed % 2 ? 16 : 80,
                                       .out_type = seed % 2 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
                                       .odd = 0.3 * odd * odd / 2.0,
                                       .seed = seed});
            }
        }
    }
    /* more values than a long fold carries at once */
    check_shape(v, (shape){.mode = MERGE_FOLD,
                           .n_part = 11,
                           .n_row = 2,
                           .n_head = 3,
                           .dim = 1040,
                           .out_type = KVS_DTYPE_BF16,
                           .odd = 0.1,
                           .seed = 900});
    check_shape(v, (shape){.mode = MERGE_FOLD,
                           .n_part = 11,
                           .n_row = 0,
                           .n_head = 3,
                           .dim = 16,
                           .out_type = KVS_DTYPE_F32,
                           .odd = 0.1,
                           .seed = 901});
}

/* ---- quant_q --------------------------------------------------------------------------------- */

static void quant_case(const variant *v, int32_t type, int32_t rule, double size, bool odd,
                       uint64_t seed)
{
    enum { ROWS = 3, HEADS = 5, STRIDE = 576 + 8 };
    static float f[ROWS * HEADS * STRIDE];
    static uint16_t w[ROWS * HEADS * STRIDE];
    static uint16_t got[ROWS * HEADS * 576 + RED], want[ROWS * HEADS * 576 + RED];
    float got_scale[ROWS * HEADS + RED], want_scale[ROWS * HEADS + RED];
    const float special[] = {NAN, INFINITY, -INFINITY, -NAN, 0.0f, -0.0f, FLT_MIN, 1e-40f};
    rng r = rng_init(seed, 5);
    for (size_t i = 0; i < UNIT_COUNT(f); i++) {
        f[i] = (float)(size * exp(6.0 * (rng_next_uniform(&r) - 0.5)) *
                       (rng_next(&r) % 2 == 0 ? 1.0 : -1.0));
        if (odd && rng_next_below(&r, 20) == 0) {
            f[i] = special[rng_next_below(&r, UNIT_COUNT(special))];
        }
        w[i] = bf16_from_f32(f[i]).bits;
    }
    quant_q_args a = {.n_row = ROWS,
                      .n_head = HEADS,
                      .q = type == KVS_DTYPE_F32 ? (const void *)f : (const void *)w,
                      .q_type = type,
                      .q_stride_row = HEADS * STRIDE,
                      .q_stride_head = STRIDE,
                      .rule = rule};
    kern_table t = {0};
    dev_queue q;
    dev_queue_init(&q, NULL);
    memset(got, 0xee, sizeof got);
    memset(want, 0xee, sizeof want);
    memset(got_scale, 0xee, sizeof got_scale);
    memset(want_scale, 0xee, sizeof want_scale);
    ref_apply_quant_q(&t);
    a.q_out = want;
    a.scale = want_scale;
    t.quant_q(&a, &q);
    v->quant_q(&t);
    a.q_out = got;
    a.scale = got_scale;
    t.quant_q(&a, &q);
    assert_memory_equal(got_scale, want_scale, sizeof got_scale);
    for (size_t i = 0; i < UNIT_COUNT(got); i++) {
        if (got[i] != want[i]) {
            fail_msg("%s: seed %llu value %zu: %04x, want %04x", v->name, (unsigned long long)seed,
                     i, got[i], want[i]);
        }
    }
}

/* A query whose scale is 1 and whose values are every 2521st float up to 448. */
static void quant_all_values(const variant *v)
{
    float q[576];
    uint16_t out[576];
    float scale = 0.0f;
    kern_table t = {0};
    dev_queue queue;
    dev_queue_init(&queue, NULL);
    v->quant_q(&t);
    for (uint32_t u = 0; u < 0x43e00000u; u += 575 * 2521) {
        for (uint32_t i = 0; i < 575; i++) {
            const uint32_t at = u + i * 2521 < 0x43e00000u ? u + i * 2521 : 0;
            q[i] = f32_from_bits(at | (i % 2 != 0 ? 0x80000000u : 0));
        }
        q[575] = 448.0f;
        const quant_q_args a = {.n_row = 1,
                                .n_head = 1,
                                .q = q,
                                .q_type = KVS_DTYPE_F32,
                                .rule = KVS_SCALE_POW2,
                                .q_out = out,
                                .scale = &scale};
        t.quant_q(&a, &queue);
        assert_true(scale == 1.0f);
        for (int i = 0; i < 576; i++) {
            const uint16_t want = bf16_from_f32(e4m3_to_f32(e4m3_from_f32(q[i]))).bits;
            if (out[i] != want) {
                fail_msg("%s: %a gives %04x, want %04x", v->name, (double)q[i], out[i], want);
            }
        }
    }
}

static void quant_bits(const variant *v)
{
    const double sizes[] = {1e-42, 1e-6, 1.0, 300.0, 1e37};
    uint64_t seed = 1;
    for (size_t i = 0; i < UNIT_COUNT(sizes); i++) {
        for (int k = 0; k < 8; k++, seed++) {
            quant_case(v, k % 2 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
                       k / 2 % 2 ? KVS_SCALE_POW2 : KVS_SCALE_EXACT, sizes[i], k >= 4, seed);
        }
    }
    quant_all_values(v);
}

static void for_variants(void (*fn)(const variant *v))
{
    for (size_t i = 0; i < UNIT_COUNT(g_variants); i++) {
        if (cpu_has(cpu_features(), g_variants[i].need)) {
            fn(&g_variants[i]);
        }
    }
}

static void test_merge_bits(void **state)
{
    (void)state;
    for_variants(merge_bits);
}

static void test_quant_bits(void **state)
{
    (void)state;
    for_variants(quant_bits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge_bits),
        cmocka_unit_test(test_quant_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
