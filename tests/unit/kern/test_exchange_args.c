/* Exchanges: what is refused before anything is launched, and how large a message is. The kernels are checked
 * on devices by `kvspan check --comm --device cuda`. */
#include "unit/unit.h"

#include "kern/exchange.h"
#include "kvspan/config.h"

static _Alignas(16) uint8_t g_mem[64];

static exchange_args plain(void)
{
    exchange_args a;
    memset(&a, 0, sizeof a);
    a.w.n_rank = 2;
    a.w.n_cell = exchange_cells_for(1000);
    a.op = EXCHANGE_Q;
    a.n_row = 5;
    a.n_part = 1;
    a.part[0].src = g_mem;
    a.part[0].dst = g_mem;
    a.part[0].bytes = 200;
    a.part[0].src_row = 200;
    a.part[0].dst_row = 400;
    a.part[0].dst_rank = 200;
    return a;
}

static void refused(exchange_args a, const char *text)
{
    const char *why = exchange_refuses(&a);
    assert_non_null(why);
    if (strstr(why, text) == NULL) {
        fail_msg("%s", why);
    }
}

static void args_that_no_kernel_takes_are_refused(void **state)
{
    (void)state;
    exchange_args a = plain();
    assert_null(exchange_refuses(&a));
    a.w.n_rank = 9;
    refused(a, "1 to 8 ranks");
    a = plain();
    a.w.rank = 2;
    refused(a, "numbered from 0");
    a = plain();
    a.op = EXCHANGE_N_OP;
    refused(a, "out of range");
    a = plain();
    a.n_row = -1;
    refused(a, "out of range");
    a = plain();
    a.n_part = EXCHANGE_MAX_PART + 1;
    refused(a, "at most 4 parts");
    a = plain();
    a.part[0].bytes = 0;
    refused(a, "widths not 0");
    a = plain();
    a.part[0].bytes = 6;
    refused(a, "multiples of 4");
    a = plain();
    a.part[0].dst_rank = 202;
    refused(a, "multiples of 4");
    a = plain();
    a.part[0].src = g_mem + 2;
    refused(a, "multiples of 4");
    a = plain();
    a.n_row = 11000000;
    refused(a, "2 GiB");
    a = plain();
    a.n_part = 0;
    a.n_row = 0;
    assert_null(exchange_refuses(&a)); /* a barrier */
}

static void a_message_fits_or_is_refused(void **state)
{
    (void)state;
    exchange_args a = plain();
    assert_int_equal(exchange_bytes(&a), 1000);
    a.w.n_cell = 63; /* 1000 / 16, rounded up */
    assert_null(exchange_refuses(&a));
    a.w.n_cell = 62;
    refused(a, "larger than the group was opened for");
    /* parts begin cells of their own: four of one word each */
    a = plain();
    a.n_row = 1;
    a.n_part = 4;
    for (int i = 0; i < 4; i++) {
        a.part[i] = a.part[0];
        a.part[i].bytes = 4;
    }
    a.w.n_cell = 4;
    assert_null(exchange_refuses(&a));
    a.w.n_cell = 3;
    refused(a, "larger");
    assert_true(exchange_cells_for(16) >= 4);
}

static exchange_merge_args partials(void)
{
    exchange_merge_args a;
    memset(&a, 0, sizeof a);
    a.w.n_rank = 2;
    a.n_row = 3;
    a.n_head = 6;
    a.part = (const float *)(const void *)g_mem;
    a.out = g_mem;
    a.out_type = KVS_DTYPE_BF16;
    a.part_row = 6 * 512;
    a.out_row = 3 * 512;
    a.w.n_cell = exchange_cells_for(exchange_merge_bytes(&a));
    return a;
}

static void refused_merge(exchange_merge_args a, const char *text)
{
    const char *why = exchange_merge_refuses(&a);
    assert_non_null(why);
    if (strstr(why, text) == NULL) {
        fail_msg("%s", why);
    }
}

static void partials_are_refused_likewise(void **state)
{
    (void)state;
    exchange_merge_args a = partials();
    assert_int_equal(exchange_merge_bytes(&a), 3 * 3 * 513 * 4);
    assert_null(exchange_merge_refuses(&a));
    a.n_head = 5;
    refused_merge(a, "multiple of the ranks");
    a = partials();
    a.n_head = 0;
    refused_merge(a, "multiple of the ranks");
    a = partials();
    a.part_row = 6 * 512 + 2;
    refused_merge(a, "multiples of 16 bytes");
    a = partials();
    a.out_row = 3 * 512 + 4; /* 8 bytes of bf16 */
    refused_merge(a, "multiples of 16 bytes");
    a.out_type = KVS_DTYPE_F32;
    assert_null(exchange_merge_refuses(&a));
    a = partials();
    a.out = g_mem + 8;
    refused_merge(a, "multiples of 16 bytes");
    a = partials();
    a.w.n_cell = 3 * 3 * (128 + 4); /* values, and an LSE for each quarter of them */
    assert_null(exchange_merge_refuses(&a));
    a.w.n_cell--;
    refused_merge(a, "larger");
    a = partials();
    a.w.n_rank = 0;
    refused_merge(a, "1 to 8 ranks");
}

static void attention_that_sends_is_refused_likewise(void **state)
{
    (void)state;
    static const int32_t slots[4];
    const wire w = partials().w;
    attn_args a;
    memset(&a, 0, sizeof a);
    a.n_row = 3;
    a.n_head = 6;
    a.fmt = KVS_KV_FP8_DS_MLA;
    a.slots = slots;
    a.out = (float *)(void *)g_mem;
    a.out_stride_row = 6 * 512;
    a.out_stride_head = 512;
    const attn_args right = a;
    assert_null(attn_send_refuses(&a, &w, 0));
    a.fmt = KVS_KV_BF16;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "let the merge send"));
    assert_null(attn_send_refuses(&a, &w, 1));
    a = right;
    a.slots = NULL;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "let the merge send"));
    assert_null(attn_send_refuses(&a, &w, 1));
    a = right;
    a.out_type = KVS_DTYPE_BF16;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "f32 results"));
    a = right;
    a.out_stride_head = 1024;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "one behind the other"));
    a = right;
    a.out_stride_row += 2;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "multiples of 16"));
    a = right;
    a.n_head = 5;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "multiple of the ranks"));
    a = right;
    a.n_row = 4;
    assert_non_null(strstr(attn_send_refuses(&a, &w, 0), "larger"));
}

static void works_are_few_where_heads_are_many(void **state)
{
    (void)state;
    assert_int_equal(exchange_merge_works(1, 128, 2), 4);
    assert_int_equal(exchange_merge_works(32, 128, 2), 4); /* 2048 heads to a peer */
    assert_int_equal(exchange_merge_works(33, 128, 2), 1);
    assert_int_equal(exchange_merge_works(18, 128, 8), 4);
    assert_int_equal(exchange_merge_works(19, 128, 8), 1);
    assert_int_equal(exchange_merge_works(2048, 1, 1), 4);
}

static void what_a_group_is_opened_for_fits(void **state)
{
    (void)state;
    static const int64_t size[] = {0, 4, 4096, 4100, 8404992};
    for (size_t i = 0; i < UNIT_COUNT(size); i++) {
        assert_true((int64_t)exchange_cells_for(size[i]) * 16 >= size[i]);
    }
    for (int32_t rows = 1; rows < 200; rows++) {
        exchange_merge_args a = partials();
        a.n_row = rows;
        a.w.n_cell = exchange_cells_for(exchange_merge_bytes(&a));
        assert_null(exchange_merge_refuses(&a));
    }
}

static void names_are_told_apart(void **state)
{
    (void)state;
    for (int32_t i = 0; i < EXCHANGE_N_OP; i++) {
        for (int32_t k = 0; k < i; k++) {
            assert_string_not_equal(exchange_op_name(i), exchange_op_name(k));
        }
    }
    assert_string_equal(exchange_op_name(-1), "?");
    assert_string_equal(exchange_op_name(EXCHANGE_N_OP), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(args_that_no_kernel_takes_are_refused),
        cmocka_unit_test(a_message_fits_or_is_refused),
        cmocka_unit_test(partials_are_refused_likewise),
        cmocka_unit_test(attention_that_sends_is_refused_likewise),
        cmocka_unit_test(works_are_few_where_heads_are_many),
        cmocka_unit_test(what_a_group_is_opened_for_fits),
        cmocka_unit_test(names_are_told_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
