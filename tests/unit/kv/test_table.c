/* Slot maps and table checks, against a walk that hands tokens out one by one. */
#include "unit/unit.h"

#include "base/rng.h"
#include "kv/table.h"

static const int32_t interleaves[] = {1, 2, 4, 8, 16, 32, 64};

/* Deals tokens 0, 1, ... to ranks in turns of `i` tokens; each rank fills its pages in order. */
static void deal(int32_t n, int32_t i, const int32_t *table, int64_t len, int64_t *slot,
                 int32_t *owner)
{
    int64_t held[8] = {0};
    int32_t rank = 0;
    int32_t left = i;
    for (int64_t p = 0; p < len; p++) {
        const int64_t page = table[held[rank] / 64];
        owner[p] = rank;
        slot[p] = page * 64 + held[rank] % 64;
        held[rank]++;
        if (--left == 0) {
            left = i;
            rank = (rank + 1) % n;
        }
    }
}

static void slots_are_what_dealing_gives(void **state)
{
    (void)state;
    enum { LEN = 1300 };
    static int64_t want[LEN];
    static int32_t owner[LEN];
    static int64_t got[LEN];
    int32_t table[LEN / 64 + 1];
    rng r = rng_init(1, 0);
    for (size_t b = 0; b < UNIT_COUNT(table); b++) {
        table[b] = (int32_t)rng_next_below(&r, (1u << 25) - 1);
    }
    for (int32_t n = 1; n <= 8; n++) {
        for (size_t k = 0; k < UNIT_COUNT(interleaves); k++) {
            deal(n, interleaves[k], table, LEN, want, owner);
            for (int32_t rank = 0; rank < n; rank++) {
                const shard_geom g = {.n = n, .i = interleaves[k], .rank = rank};
                for (int64_t first = 0; first < LEN; first += 257) {
                    const kvs_pos p = {first};
                    memset(got, 0x55, sizeof got);
                    table_slots(g, table, p, LEN - first, got);
                    for (int64_t t = 0; t < LEN - first; t++) {
                        assert_int_equal(got[t], owner[first + t] == rank ? want[first + t] : -1);
                    }
                    assert_true(first == 0 || got[LEN - first] == 0x5555555555555555);
                }
            }
        }
    }
}

/* The last page of the largest pool, at the end of the longest sequence. */
static void far_ends_do_not_wrap(void **state)
{
    (void)state;
    const shard_geom g = {.n = 8, .i = 1, .rank = 7};
    const int64_t len = INT32_MAX;
    const int64_t width = len / 512 + 1;
    int32_t *table = calloc((size_t)width, sizeof *table);
    assert_non_null(table);
    table[width - 1] = (1 << 25) - 2;
    table[width - 2] = 5;
    assert_int_equal(table_check(g, table, width, len, (1 << 25) - 1, "far", NULL), KVS_OK);
    int64_t slot[2];
    const kvs_pos p = {len - 1}; /* 2^31 - 2: lane 6 */
    table_slots(g, table, p, 1, slot);
    assert_int_equal(slot[0], -1);
    const shard_geom g6 = {.n = 8, .i = 1, .rank = 6};
    table_slots(g6, table, p, 1, slot);
    assert_true(slot[0] == ((INT64_C(1) << 25) - 2) * 64 + 63);
    const kvs_pos before = {(len / 512) * 512 - 1};
    table_slots(g, table, before, 1, slot);
    assert_true(slot[0] == 5 * 64 + 63);
    free(table);
}

static void check_names_the_entry(void **state)
{
    (void)state;
    const shard_geom g = {.n = 2, .i = 1, .rank = 1};
    const int32_t table[4] = {0, 9, 3, -1};
    kvs_error err;
    /* Entry 3 is first reached by token 384; entry b by 128 * b. */
    assert_int_equal(table_check(g, table, 4, 384, 10, "request 5", &err), KVS_OK);
    assert_int_equal(table_check(g, table, 4, 385, 10, "request 5", &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "request 5"));
    assert_non_null(strstr(err.text, "entry 3 is page -1"));
    assert_int_equal(table_check(g, table, 4, 129, 9, "request 5", &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "entry 1 is page 9"));
    assert_non_null(strstr(err.text, "0 to 8"));
    assert_int_equal(table_check(g, table, 4, 128, 9, "request 5", &err), KVS_OK);
    assert_int_equal(table_check(g, table, 4, 512, 10, "x", &err), KVS_INVALID);
    assert_int_equal(table_check(g, table, 3, 385, 10, "x", &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "385 tokens need 4"));
    assert_non_null(strstr(err.text, "the table has 3; it reaches 384 tokens"));
    assert_int_equal(table_check(g, NULL, 0, 0, 1, "x", &err), KVS_OK);
    assert_int_equal(table_check(g, NULL, 4, 1, 1, "x", &err), KVS_INVALID);
    assert_int_equal(table_check(g, table, 4, -1, 10, "x", &err), KVS_INVALID);
    assert_int_equal(table_check(g, table, -3, 1, 10, "x", &err), KVS_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_what_dealing_gives),
        cmocka_unit_test(far_ends_do_not_wrap),
        cmocka_unit_test(check_names_the_entry),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
