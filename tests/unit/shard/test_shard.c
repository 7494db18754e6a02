/* shard.h where a dealt table does not reach: worked examples, checked slots, segments, 64 bits. */
#include "unit/unit.h"

#include "shard/shard.h"

static shard_geom geom(int32_t n, int32_t i, int32_t rank)
{
    const shard_geom g = {n, i, rank};
    return g;
}

static kvs_pos pos(int64_t v)
{
    const kvs_pos p = {v};
    return p;
}

static kvs_local loc(int64_t v)
{
    const kvs_local l = {v};
    return l;
}

/* Three verify rows that end at 10: subtracting in local space would give 3, 4, 5. */
static void bounds_are_localised_one_by_one(void **state)
{
    (void)state;
    static const int64_t want[] = {4, 4, 5};
    for (int64_t j = 0; j < 3; j++) {
        assert_int_equal(shard_bound(10, 3, j), 8 + j);
        assert_int_equal(shard_local_bound(geom(2, 1, 1), 10, 3, j), want[j]);
    }
    assert_int_equal(shard_bound(2, 4, 0), 0); /* a padding row */
    assert_int_equal(shard_bound(2, 4, 1), 0);
    assert_int_equal(shard_bound(2, 4, 2), 1);
}

/* Rank r has nothing until r * I tokens have been written before its own. */
static void short_sequences_leave_ranks_empty(void **state)
{
    (void)state;
    for (int32_t r = 0; r < 8; r++) {
        const shard_geom g = geom(8, 16, r);
        assert_int_equal(shard_len(g, 16 * (int64_t)r), 0);
        assert_int_equal(shard_len(g, 16 * (int64_t)r + 1), 1);
        assert_int_equal(shard_len(g, 0), 0);
    }
}

static void table_widths(void **state)
{
    (void)state;
    assert_int_equal(shard_table_width(geom(4, 1, 0), 480000), 1875);
    assert_int_equal(shard_table_width(geom(2, 1, 1), 1048576), 8192);
    assert_int_equal(shard_table_width(geom(1, 1, 0), 0), 0);
    assert_int_equal(shard_table_width(geom(1, 1, 0), 64), 1);
    assert_int_equal(shard_table_width(geom(1, 1, 0), 65), 2);
    assert_int_equal(shard_table_width(geom(8, 64, 7), INT64_C(1) << 40), INT64_C(1) << 31);
}

static void slots_are_64_bit(void **state)
{
    (void)state;
    const int32_t table[] = {INT32_MAX, SHARD_MAX_PAGE - 1};
    assert_true(shard_slot(table, loc(63)).v == INT64_C(2147483647) * 64 + 63);
    const int64_t last = shard_slot(table, loc(127)).v;
    assert_true(last <= INT32_MAX); /* the last slot of the largest pool fits an int32 */
    assert_true(last == (int64_t)SHARD_MAX_PAGE * 64 - 1);
}

/* Entry -1 at offset 63 would be slot -1, "none", and go uncounted. */
static void checked_slots(void **state)
{
    (void)state;
    const int32_t table[] = {5, -1, 0, 6};
    const int64_t n_slot = 6 * 64;
    for (int64_t l = -70; l < 300; l++) {
        int64_t want = SHARD_BAD_SLOT;
        if (l >= 0 && l < 64) {
            want = 5 * 64 + l;
        } else if (l >= 128 && l < 192) {
            want = l - 128;
        }
        assert_int_equal(shard_slot_checked(table, 4, n_slot, loc(l)).v, want);
        const int64_t narrow = l < 64 ? want : SHARD_BAD_SLOT;
        assert_int_equal(shard_slot_checked(table, 1, n_slot, loc(l)).v, narrow);
    }
    assert_int_equal(shard_slot_checked(table, 4, n_slot + 1, loc(192)).v, n_slot);
    assert_int_equal(shard_slot_checked(table, 4, n_slot + 1, loc(193)).v, SHARD_BAD_SLOT);
    assert_int_equal(shard_slot_checked(NULL, 0, n_slot, loc(0)).v, SHARD_BAD_SLOT);
}

/* Of the ranks of a group exactly the owner writes; another's bad entry is not its business. */
static void only_the_owner_writes(void **state)
{
    (void)state;
    const int32_t table[] = {2, 1, -1};
    for (int64_t p = 0; p < 64 * 4 * 3 + 5; p++) {
        int n_own = 0;
        for (int32_t r = 0; r < 4; r++) {
            const int64_t slot = shard_write_slot(geom(4, 8, r), table, 3, 192, pos(p)).v;
            if (slot != SHARD_NO_SLOT) {
                n_own++;
                assert_int_equal(slot == SHARD_BAD_SLOT, p >= 512);
            }
        }
        assert_int_equal(n_own, 1);
    }
}

/* Segments cover the keys of a lane once, in order, 2048 each but the last. */
static void segments_tile_a_lane(void **state)
{
    (void)state;
    static const int64_t counts[] = {0, 1, 64, 2047, 2048, 2049, 4096, 5000, INT64_C(1) << 33};
    for (size_t c = 0; c < UNIT_COUNT(counts); c++) {
        const int64_t n = counts[c];
        const int64_t n_seg = shard_n_segment(n);
        const int64_t step = n_seg > 10 ? n_seg / 5 : 1;
        for (int64_t i = 0; i < n_seg; i += step) {
            const int64_t begin = shard_segment_begin(i);
            const int64_t end = shard_segment_end(n, i);
            assert_true(end > begin && end <= n);
            assert_true(end - begin == 2048 || i == n_seg - 1);
            assert_true(begin == (i == 0 ? 0 : shard_segment_end(n, i - 1)));
        }
        assert_true(n == 0 ? n_seg == 0 : shard_segment_end(n, n_seg - 1) == n);
    }
}

/* The last position of the largest context, and positions that no int32 holds. */
static void large_positions(void **state)
{
    (void)state;
    const int64_t p = INT64_C(2147483646); /* = 0x7FFFFFFE */
    assert_int_equal(shard_owner(geom(8, 1, 0), pos(p)), 6);
    assert_int_equal(shard_local(geom(8, 1, 6), pos(p)).v, 0x0FFFFFFF);
    assert_true(shard_pos(geom(8, 64, 7), loc(INT64_C(1) << 30)).v == (INT64_C(1) << 33) + 7 * 64);
    assert_true(shard_len(geom(1, 1, 0), INT64_C(1) << 33) == INT64_C(1) << 33);
    assert_true(shard_len(geom(3, 2, 2), INT64_C(6000000000)) == INT64_C(2000000000));
    assert_true(shard_lane_key(8, 64, 7, INT64_C(1) << 30).v == (INT64_C(1) << 33) + 7 * 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_are_localised_one_by_one),
        cmocka_unit_test(short_sequences_leave_ranks_empty),
        cmocka_unit_test(table_widths),
        cmocka_unit_test(slots_are_64_bit),
        cmocka_unit_test(checked_slots),
        cmocka_unit_test(only_the_owner_writes),
        cmocka_unit_test(segments_tile_a_lane),
        cmocka_unit_test(large_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
