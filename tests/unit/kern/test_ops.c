/* The row-wise ops: values worked out by hand, the exp of kern/exp.h to the bit, and rows that do not know
 * their company. Every variant that this machine runs. */
#include "unit/unit.h"

#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "base/rng.h"
#include "kern/exp.h"
#include "kern/kern.h"
#include "num/fmt.h"

static dev_queue g_queue;

/* The i-th table made of an allowed variant of `op`, or 0 at the end. */
static int variant_nth(kern_op op, int32_t i, kern_table *t)
{
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t j = 0; j < n; j++) {
        if (v[j].op == op && (v[j].features & ~cpu_features()) == 0 && i-- == 0) {
            memset(t, 0, sizeof *t);
            v[j].apply(t);
            return 1;
        }
    }
    return 0;
}

static void norm_by_hand(void **state)
{
    (void)state;
    kern_table t;
    for (int32_t i = 0; variant_nth(KERN_OP_norm, i, &t); i++) {
        const float x[4] = {3.0f, -1.0f, 2.0f, 2.0f};
        const float w[4] = {1.0f, 2.0f, 0.5f, -1.0f};
        const float b[4] = {0.0f, 10.0f, 0.0f, 1.0f};
        float y[4];
        norm_args a = {.n_row = 1,
                       .dim = 4,
                       .x = x,
                       .x_stride = 4,
                       .weight = w,
                       .y = y,
                       .y_type = KVS_DTYPE_F32,
                       .y_stride = 4};
        /* mean square 4.5 */
        a.eps = 11.5f;
        t.norm(&a, &g_queue);
        const float rms[4] = {0.75f, -0.5f, 0.25f, -0.5f};
        assert_memory_equal(y, rms, sizeof y);
        /* mean 1.5; squares 2.25, 6.25, 0.25, 0.25: mean 2.25 */
        a.eps = 1.75f;
        a.centre = 1;
        a.bias = b;
        t.norm(&a, &g_queue);
        const float layer[4] = {0.75f, 7.5f, 0.125f, 0.75f};
        assert_memory_equal(y, layer, sizeof y);
        bf16 half[4];
        a.y = half;
        a.y_type = KVS_DTYPE_BF16;
        t.norm(&a, &g_queue);
        for (int k = 0; k < 4; k++) {
            assert_true(bf16_to_f32(half[k]) == layer[k]);
        }
    }
}

static void rope_by_hand(void **state)
{
    (void)state;
    kern_table t;
    for (int32_t i = 0; variant_nth(KERN_OP_rope, i, &t); i++) {
        const float c[2] = {0.0f, 0.5f};
        const float s[2] = {1.0f, 0.25f};
        float x[6] = {9.0f, 1.0f, 2.0f, 4.0f, 8.0f, 9.0f};
        rope_args a = {.n_row = 1,
                       .n_head = 1,
                       .n_pair = 2,
                       .dim0 = 1,
                       .interleaved = 1,
                       .x = x,
                       .x_stride_row = 6,
                       .x_stride_head = 6,
                       .cos = c,
                       .sin = s};
        t.rope(&a, &g_queue);
        const float pairs[6] = {9.0f, -2.0f, 1.0f, 0.0f, 5.0f, 9.0f};
        assert_memory_equal(x, pairs, sizeof x);
        float z[6] = {9.0f, 1.0f, 2.0f, 4.0f, 8.0f, 9.0f};
        a.x = z;
        a.interleaved = 0;
        t.rope(&a, &g_queue);
        const float halves[6] = {9.0f, -4.0f, -1.0f, 1.0f, 4.5f, 9.0f};
        assert_memory_equal(z, halves, sizeof z);
    }
}

/* act is g / (1 + kexp(-g)) * up to the bit, over the whole range and its edges. */
static void act_has_the_exp_of_every_softmax(void **state)
{
    (void)state;
    enum { N = 40001 };
    static float g[N + 8];
    static float up[N + 8];
    static float y[N + 8];
    static const float odd[8] = {0.0f, -0.0f, INFINITY, 87.0f, -88.0f, 3e38f, -3e38f, 1e-42f};
    rng r = rng_init(7, 1);
    for (int32_t i = 0; i < N; i++) {
        g[i] = (float)(-100.0 + 200.0 * (double)i / N);
        up[i] = (float)(rng_next_uniform(&r) * 4.0 - 2.0);
    }
    memcpy(g + N, odd, sizeof odd);
    for (int k = 0; k < 8; k++) {
        up[N + k] = 0.75f;
    }
    kern_table t;
    for (int32_t i = 0; variant_nth(KERN_OP_act, i, &t); i++) {
        const act_args a = {.n_row = 1,
                            .dim = N + 8,
                            .gate = g,
                            .up = up,
                            .stride = N + 8,
                            .y = y,
                            .y_type = KVS_DTYPE_F32,
                            .y_stride = N + 8};
        t.act(&a, &g_queue);
        for (int32_t k = 0; k < N + 8; k++) {
            const float want = g[k] / (1.0f + kexp(-g[k])) * up[k];
            if (memcmp(&want, &y[k], sizeof want) != 0) {
                fail_msg("variant %d: act(%a) = %a, want %a", i, (double)g[k], (double)y[k],
                         (double)want);
            }
        }
        const float nan_in = NAN;
        float nan_out = 0.0f;
        const act_args n = {.n_row = 1,
                            .dim = 1,
                            .gate = &nan_in,
                            .up = up,
                            .stride = 1,
                            .y = &nan_out,
                            .y_type = KVS_DTYPE_F32,
                            .y_stride = 1};
        t.act(&n, &g_queue);
        assert_true(isnan(nan_out));
    }
}

static void route_by_hand(void **state)
{
    (void)state;
    kern_table t;
    for (int32_t i = 0; variant_nth(KERN_OP_route, i, &t); i++) {
        /* sigmoid: 0.5 everywhere; the bias alone decides, and does not weigh */
        const float logit[8] = {0.0f};
        const float bias[8] = {0.0f, 0.5f, 0.25f, 0.25f, -0.5f, 1.0f, 0.0f, 0.0f};
        int32_t id[3];
        float weight[3];
        route_args a = {.n_row = 1,
                        .n_expert = 8,
                        .n_active = 3,
                        .n_group = 1,
                        .topk_group = 1,
                        .kind = ROUTE_SIGMOID,
                        .scale = 3.0f,
                        .logit = logit,
                        .bias = bias,
                        .id = id,
                        .weight = weight};
        t.route(&a, &g_queue);
        const int32_t want[3] = {1, 2, 5};
        const float half[3] = {1.5f, 1.5f, 1.5f};
        assert_memory_equal(id, want, sizeof id);
        assert_memory_equal(weight, half, sizeof weight);
        /* groups of two: sums 1.5, 1.5, 1.5, 1: of equal ones the lower; largest: 1, 0.75, 1.5, 0.5 */
        a.n_group = 4;
        a.topk_group = 2;
        t.route(&a, &g_queue);
        const int32_t lower[3] = {1, 2, 3};
        assert_memory_equal(id, lower, sizeof id);
        a.group_max = 1;
        t.route(&a, &g_queue);
        const int32_t largest[3] = {0, 1, 5};
        assert_memory_equal(id, largest, sizeof id);
        /* one group of two for three experts: the lowest of the others joins */
        a.topk_group = 1;
        t.route(&a, &g_queue);
        const int32_t others[3] = {0, 4, 5};
        assert_memory_equal(id, others, sizeof id);
        a.kind = ROUTE_SOFTMAX;
        a.n_group = 1;
        a.norm_topk = 1;
        a.scale = 1.0f;
        t.route(&a, &g_queue);
        for (int k = 0; k < 3; k++) {
            assert_true(fabsf(weight[k] - 1.0f / 3.0f) < 1e-7f);
        }
    }
}

/* A row alone, in a batch, and with a second worker: the same bits. */
static void rows_do_not_know_their_company(void **state)
{
    (void)state;
    enum { ROWS = 70, DIM = 700 };
    static float x[ROWS * DIM];
    static float many[ROWS * DIM];
    static float one[DIM];
    static float w[DIM];
    rng r = rng_init(8, 2);
    for (int32_t i = 0; i < ROWS * DIM; i++) {
        x[i] = (float)(rng_next_uniform(&r) * 2.0 - 1.0);
        w[i % DIM] = x[i];
    }
    pool *workers = NULL;
    assert_int_equal(pool_open(&workers, 2, NULL), KVS_OK);
    dev_queue two;
    dev_queue_init(&two, workers);
    kern_table t;
    for (int32_t i = 0; variant_nth(KERN_OP_norm, i, &t); i++) {
        norm_args a = {.n_row = ROWS,
                       .dim = DIM,
                       .x = x,
                       .x_stride = DIM,
                       .weight = w,
                       .y = many,
                       .y_type = KVS_DTYPE_F32,
                       .y_stride = DIM,
                       .eps = 1e-6f};
        t.norm(&a, &two);
        a.n_row = 1;
        a.y = one;
        for (int32_t row = 0; row < ROWS; row++) {
            a.x = x + row * DIM;
            t.norm(&a, &g_queue);
            assert_memory_equal(one, many + row * DIM, sizeof one);
        }
    }
    pool_close(workers);
}

int main(void)
{
    dev_queue_init(&g_queue, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_by_hand),
        cmocka_unit_test(rope_by_hand),
        cmocka_unit_test(act_has_the_exp_of_every_softmax),
        cmocka_unit_test(route_by_hand),
        cmocka_unit_test(rows_do_not_know_their_company),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
