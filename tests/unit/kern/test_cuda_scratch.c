/* What the CUDA kernels of selection and attention ask of scratch memory: what the largest call is given is enough for
 * every smaller one, whatever its rows are made of. A caller opens with the largest and asks once. Host code only. */
#include "unit/unit.h"

#include <stdbool.h>

#include "kern/cuda/cuda.h"

static const int32_t sms[] = {1, 4, 16, 78, 132, 148};

static size_t select_scratch(int32_t n_row, int32_t n_req, int32_t k, int32_t n_sm)
{
    const index_select_args a = {.in = {.n_row = n_row,
                                        .n_req = n_req,
                                        .n_head = 64,
                                        .fmt = KVS_KV_FP8,
                                        .table_width = 2048},
                                 .k = k};
    const dev_queue q = {.n_sm = n_sm};
    return index_select_scratch_sm90(&a, &q);
}

static void selection_never_asks_for_more_with_fewer_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof sms / sizeof sms[0]; i++) {
        size_t least = 0; /* of as many rows, over all numbers of requests */
        for (int32_t n_row = 1; n_row <= 300; n_row++) {
            size_t most = 0, fewest = SIZE_MAX;
            for (int32_t n_req = 0; n_req <= n_row; n_req++) {
                const size_t b = select_scratch(n_row, n_req, 2048, sms[i]);
                most = b > most ? b : most;
                fewest = b < fewest ? b : fewest;
            }
            assert_true(fewest > 0);
            assert_int_equal(most, fewest);
            assert_true(fewest >= least);
            least = fewest;
        }
        assert_true(select_scratch(8192, 1, 2048, sms[i]) < (size_t)128 << 20);
    }
}

static size_t attention_scratch(int32_t n_row, int32_t n_head, int64_t stride, int32_t n_lane,
                                bool det, int32_t n_sm)
{
    static const int32_t slots[1];
    const attn_args a = {.n_row = n_row,
                         .n_head = n_head,
                         .fmt = KVS_KV_FP8_DS_MLA,
                         .slots = slots,
                         .slots_stride = stride,
                         .n_lane = n_lane};
    const dev_queue q = {.n_sm = n_sm};
    return det ? attn_scratch_sm90_det(&a, &q) : attn_scratch_sm90(&a, &q);
}

static void attention_never_asks_for_more_with_fewer_rows(void **state)
{
    (void)state;
    static const int64_t strides[] = {1, 64, 2048, 32768};
    for (size_t i = 0; i < sizeof sms / sizeof sms[0]; i++)
        for (size_t j = 0; j < sizeof strides / sizeof strides[0]; j++)
            for (int det = 0; det < 2; det++) {
                size_t before = 0;
                for (int32_t n_row = 1; n_row <= 200; n_row++) {
                    const size_t b = attention_scratch(n_row, 128, strides[j], 8, det, sms[i]);
                    assert_true(b >= before && b > 0);
                    assert_true(b >= attention_scratch(n_row, 16, strides[j], 8, det, sms[i]));
                    before = b;
                }
            }
}

static size_t heads_scratch(int32_t n_key, int32_t n_head, int32_t nope, int32_t v_dim)
{
    const mha_args a = {.n_row = 1, .n_head = n_head, .nope = nope, .v_dim = v_dim, .n_key = n_key};
    const dev_queue q = {.n_sm = 132};
    return mha_scratch_sm90(&a, &q);
}

static void the_multi_head_form_never_asks_for_more_with_fewer_keys_or_heads(void **state)
{
    (void)state;
    static const int32_t heads[] = {1, 2, 16, 128};
    static const int32_t dims[][2] = {{128, 128}, {192, 256}, {129, 8}, {8, 129}};
    for (size_t i = 0; i < 4 * sizeof heads / sizeof heads[0]; i++) {
        const int32_t n_head = heads[i / 4], nope = dims[i % 4][0], v_dim = dims[i % 4][1];
        size_t before = 0;
        for (int32_t n_key = 0; n_key <= 3000; n_key++) {
            const size_t b = heads_scratch(n_key, n_head, nope, v_dim);
            assert_true(b >= before && b >= heads_scratch(n_key, 1, nope, v_dim));
            /* keys and values of every head, and the rope part, in bf16 */
            assert_true(b >= (size_t)n_key * ((size_t)n_head * (size_t)(nope + v_dim) + 64) * 2);
            before = b;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection_never_asks_for_more_with_fewer_rows),
        cmocka_unit_test(attention_never_asks_for_more_with_fewer_rows),
        cmocka_unit_test(the_multi_head_form_never_asks_for_more_with_fewer_keys_or_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
