/* The oracle against values and simulations that need no formula. */
#include "unit/unit.h"

#include <math.h>

#include "check/oracle.h"

static int setup(void **state)
{
    (void)state;
    orc_init();
    return 0;
}

static void e4m3_known_codes(void **state)
{
    (void)state;
    assert_true(orc_e4m3(0x00) == 0.0f);
    assert_true(signbit(orc_e4m3(0x80)));
    assert_true(orc_e4m3(0x01) == 0x1p-9f);
    assert_true(orc_e4m3(0x08) == 0x1p-6f);
    assert_true(orc_e4m3(0x38) == 1.0f);
    assert_true(orc_e4m3(0x7E) == 448.0f);
    assert_true(orc_e4m3(0xFE) == -448.0f);
    assert_true(isnan(orc_e4m3(0x7F)));
    assert_true(isnan(orc_e4m3(0xFF)));
    for (int c = 0; c < 256; c++) {
        assert_int_equal(orc_to_e4m3(orc_e4m3((uint8_t)c)), c);
    }
}

static void e4m3_rounds_to_even_and_saturates(void **state)
{
    (void)state;
    assert_int_equal(orc_to_e4m3(17.0f), 0x58);    /* 16 or 18 */
    assert_int_equal(orc_to_e4m3(19.0f), 0x5A);    /* 18 or 20 */
    assert_int_equal(orc_to_e4m3(0x1p-10f), 0x00); /* 0 or the least */
    assert_int_equal(orc_to_e4m3(0x1.8p-9f), 0x02);
    assert_int_equal(orc_to_e4m3(431.0f), 0x7D); /* 416 or 448 */
    assert_int_equal(orc_to_e4m3(432.0f), 0x7E);
    assert_int_equal(orc_to_e4m3(-449.0f), 0xFE);
    assert_int_equal(orc_to_e4m3(464.0f), 0x7E);
    assert_int_equal(orc_to_e4m3(465.0f), 0x7E);
    assert_int_equal(orc_to_e4m3(-1e30f), 0xFE);
    assert_int_equal(orc_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(orc_to_e4m3(NAN) & 0x7F, 0x7F);
}

static void bf16_rounds_to_even(void **state)
{
    (void)state;
    assert_int_equal(orc_to_bf16(1.0f), 0x3F80);
    assert_int_equal(orc_to_bf16(1.00390625f), 0x3F80); /* halfway up from an even one */
    assert_int_equal(orc_to_bf16(1.01171875f), 0x3F82); /* halfway up from an odd one */
    assert_int_equal(orc_to_bf16(-1.01171875f), 0xBF82);
    assert_int_equal(orc_to_bf16(3.4028235e38f), 0x7F80); /* overflows to infinity */
    assert_int_equal(orc_to_bf16(-INFINITY), 0xFF80);
    assert_int_equal(orc_to_bf16(-0.0f), 0x8000);
    assert_int_equal(orc_to_bf16(0x1p-133f), 0x0001); /* the least subnormal */
    assert_int_equal(orc_to_bf16(0x1p-134f), 0x0000);
    assert_int_equal(orc_to_bf16(0x1.8p-133f), 0x0002);
    for (uint32_t b = 0; b < 65536; b++) {
        if ((b & 0x7F80) != 0x7F80 || (b & 0x7F) == 0) {
            assert_int_equal(orc_to_bf16(orc_bf16((uint16_t)b)), b);
        }
    }
}

static void scales_of_known_tiles(void **state)
{
    (void)state;
    assert_true(orc_scale(KVS_SCALE_POW2, 0.0f) == 0x1p-13f);
    assert_true(orc_scale(KVS_SCALE_AUTO, 448.0f) == 1.0f);
    assert_true(orc_scale(KVS_SCALE_POW2, 448.0001f) == 2.0f);
    assert_true(orc_scale(KVS_SCALE_POW2, 3.7f) == 0x1p-6f);
    assert_true(orc_scale(KVS_SCALE_POW2, 60000.0f) == 256.0f);
    assert_true(orc_scale(KVS_SCALE_EXACT, 0.0f) == 0x1p-126f);
    assert_true(orc_scale(KVS_SCALE_EXACT, 896.0f) == 2.0f);
    assert_true(orc_scale_index(0.0f) == 0x1p-22f);
    assert_true(orc_scale_index(448.0f) == 1.0f);
}

/* Deals positions out one by one. */
static void places_match_dealing(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= 8; n++) {
        for (int64_t i = 1; i <= 64; i *= 2) {
            int64_t held[8] = {0};
            int64_t owner = 0;
            int64_t in_run = 0;
            for (int64_t pos = 0; pos < 1500; pos++) {
                const orc_place p = orc_place_of(pos, n, i);
                assert_int_equal(p.owner, owner);
                assert_int_equal(p.local, held[owner]);
                if (8 % n == 0) {
                    /* lane (pos / I) mod 8 is the owner's lane number p.lane */
                    assert_int_equal(p.lane * n + p.owner, pos / i % 8);
                } else {
                    assert_int_equal(p.lane, 0);
                }
                held[owner]++;
                if (++in_run == i) {
                    in_run = 0;
                    owner = (owner + 1) % n;
                }
            }
        }
    }
}

static void selection_of_a_known_row(void **state)
{
    (void)state;
    orc_cand c[] = {{0.0f, 7},     {NAN, 1},  {-0.0f, 2}, {-INFINITY, 3},
                    {INFINITY, 9}, {1.0f, 5}, {-1.0f, 0}};
    const int64_t n = orc_select(c, 7);
    const int32_t want[] = {9, 5, 2, 7, 0};
    assert_int_equal(n, 5);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(c[i].id, want[i]);
    }
}

/* Shards whose sums of exponentials are 2 and 8 weigh 0.2 and 0.8: the lse is a natural log. */
static void merge_of_two_shards(void **state)
{
    (void)state;
    const float lse[2][1] = {{logf(2.0f)}, {logf(8.0f)}};
    const float *lse_in[2] = {lse[0], lse[1]};
    const merge_args a = {
        .n_part = 2, .n_row = 1, .n_head = 1, .lse_in = lse_in, .lse_stride_row = 1};
    orc_merge o;
    orc_merge_head(&a, 0, 0, &o);
    assert_true(fabs(o.weight[0] - 0.2) < 1e-7);
    assert_true(fabs(o.weight[1] - 0.8) < 1e-7);
    assert_true(fabs(o.lse - log(10.0)) < 1e-7);
}

/* Two keys, the second of which weighs three times the first. */
static void attention_over_two_keys(void **state)
{
    (void)state;
    static float kv[64][576];
    static float q[576];
    kv[5][0] = 1.0f;
    kv[9][1] = 8.0f;
    kv[9][575] = 1.0f;
    q[575] = logf(3.0f) * 2.0f;
    const int32_t slots[] = {5, -1, 64, 9};
    const int32_t count[] = {4};
    const attn_args a = {.n_row = 1,
                         .n_head = 1,
                         .q = q,
                         .q_type = KVS_DTYPE_F32,
                         .softmax_scale = 0.5f,
                         .kv = (const uint8_t *)kv,
                         .fmt = KVS_KV_F32,
                         .page_stride = 64 * 2304,
                         .row_stride = 2304,
                         .n_slot = 64,
                         .n_lane = 1,
                         .slots = slots,
                         .slots_stride = 4,
                         .lane_count = count};
    int32_t slot[4];
    int32_t seg[4];
    orc_keys keys = {.slot = slot, .seg = seg};
    static float value[64 * 576];
    static double norm[64];
    static double vnorm2[64];
    static uint8_t used[64];
    const orc_pool pool = {value, norm, vnorm2};
    used[5] = used[9] = 1;
    orc_pool_fill(&a, used, (orc_pool *)&pool);
    orc_attn_keys(&a, 0, &keys);
    assert_int_equal(keys.n, 2);
    assert_int_equal(keys.n_bad_id, 1);
    double work[4];
    orc_attn o;
    orc_attn_head(&a, &pool, &keys, 0, 0, work, &o);
    assert_true(fabs(o.out[0] - 0.25) < 1e-7);
    assert_true(fabs(o.out[1] - 6.0) < 1e-6);
    assert_true(fabs(o.lse - log(4.0)) < 1e-6);
    assert_int_equal(o.n_used, 2);
    kv[9][3] = NAN;
    orc_pool_fill(&a, used, (orc_pool *)&pool);
    orc_attn_head(&a, &pool, &keys, 0, 0, work, &o);
    assert_true(o.lse == -INFINITY);
    assert_int_equal(o.n_nan, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_known_codes),     cmocka_unit_test(e4m3_rounds_to_even_and_saturates),
        cmocka_unit_test(bf16_rounds_to_even),  cmocka_unit_test(scales_of_known_tiles),
        cmocka_unit_test(places_match_dealing), cmocka_unit_test(selection_of_a_known_row),
        cmocka_unit_test(merge_of_two_shards),  cmocka_unit_test(attention_over_two_keys),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
