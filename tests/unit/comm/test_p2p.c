/* Groups over peer memory, on devices made of host memory: what is refused, where messages lie, how
 * exchanges are numbered, and what a rank is told. */
#include "unit/unit.h"

#include <stdlib.h>
#include "comm/p2p.h"
#include "unit/comm/fake_dev.h"

static const char *op_name(int32_t op)
{
    return op == 1 ? "queries" : "candidates";
}

static const int32_t k_device[WIRE_MAX_RANK] = {0, 1, 2, 3, 0, 1, 2, 3};

static p2p_config config(int32_t n)
{
    const p2p_config c = {.n_rank = n, .device = k_device, .n_cell = 7, .timeout_ms = 50,
                          .op_name = op_name};
    return c;
}

static int setup(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    return 0;
}

static void refused(p2p_config c, kvs_status want, const char *text)
{
    p2p *g = (p2p *)&c;
    kvs_error err = {0};
    assert_int_equal(p2p_open(&g, &c, &err), want);
    assert_null(g);
    assert_non_null(strstr(err.text, text));
    assert_int_equal(fake.n_live, 0);
}

static void what_cannot_be_a_group_is_refused(void **state)
{
    (void)state;
    refused(config(0), KVS_INVALID, "0 ranks: use 1 to 8");
    refused(config(9), KVS_INVALID, "9 ranks");
    p2p_config c = config(2);
    c.device = NULL;
    refused(c, KVS_INVALID, "a device each");
    c = config(2);
    c.n_cell = 0;
    refused(c, KVS_INVALID, "0 cells");
    c = config(2);
    c.timeout_ms = 0;
    refused(c, KVS_INVALID, "time-out of 0 ms");
    static const int32_t absent[] = {0, 4};
    c = config(2);
    c.device = absent;
    refused(c, KVS_NODEV, "device 4");
    fake.apart = true;
    refused(config(2), KVS_UNSUPPORTED, "cannot reach");
    fake.apart = false;
    fake.no_memory = true;
    refused(config(2), KVS_NOMEM, "area of rank 0");
}

static void devices_reach_each_other_both_ways(void **state)
{
    (void)state;
    static const int32_t device[] = {2, 0, 2};
    p2p_config c = config(3);
    p2p *g = NULL;
    c.device = device;
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    assert_true(fake.reach[2][0] > 0 && fake.reach[0][2] > 0);
    assert_int_equal(fake.reach[2][2], 0);
    assert_int_equal(fake.n_live, 3);
    for (int32_t r = 0; r < 3; r++) {
        const wire w = p2p_wire(g, r);
        assert_int_equal(w.rank, r);
        assert_int_equal(w.n_rank, 3);
        assert_int_equal(w.limit_ns, 50000000);
        assert_true(w.area[0] != w.area[1] && w.area[1] != w.area[2] && w.area[3] == NULL);
        assert_int_equal(p2p_check(g, r, NULL), KVS_OK);
        assert_int_equal(p2p_count(g, r), 0);
    }
    p2p_close(g);
    p2p_close(NULL);
    assert_int_equal(fake.n_live, 0);
}

/* ---- layout ------------------------------------------------------------------------------------ */

typedef struct span {
    size_t begin, end;
} span;

static int by_begin(const void *a, const void *b)
{
    const span *x = a;
    const span *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static void nothing_in_an_area_overlaps(void **state)
{
    (void)state;
    static const uint32_t cells[] = {1, 5, 8, 24577};
    for (int32_t n = 1; n <= WIRE_MAX_RANK; n++) {
        for (int i = 0; i < 4; i++) {
            span s[1 + 7 * WIRE_MAX_RANK];
            int n_span = 0;
            s[n_span++] = (span){0, sizeof(wire_control)};
            for (int32_t r = 0; r < WIRE_MAX_RANK; r++) {
                s[n_span++] = (span){wire_reason_at(r), wire_reason_at(r) + WIRE_REASON_BYTES};
            }
            for (uint32_t e = 6; e < 8; e++) {
                for (int32_t r = 0; r < n; r++) {
                    const size_t head = wire_head_at(n, e, r);
                    const size_t word = wire_escape_at(n, cells[i], e, r);
                    const size_t cell = wire_cell_at(n, cells[i], e, r);
                    assert_true(head % 16 == 0 && word % 4 == 0 && cell % 128 == 0);
                    s[n_span++] = (span){head, head + sizeof(wire_head)};
                    s[n_span++] = (span){word, word + (size_t)cells[i] * 4};
                    s[n_span++] = (span){cell, cell + (size_t)cells[i] * WIRE_CELL};
                    assert_true(word + (size_t)cells[i] * 4 <= wire_cells_begin(n, cells[i]));
                    assert_true(cell >= wire_cells_begin(n, cells[i]));
                }
            }
            qsort(s, (size_t)n_span, sizeof *s, by_begin);
            for (int k = 1; k < n_span; k++) {
                assert_true(s[k].begin >= s[k - 1].end);
            }
            assert_true(s[n_span - 1].end <= wire_area_bytes(n, cells[i]));
        }
    }
}

static void a_new_area_is_empty(void **state)
{
    (void)state;
    const p2p_config c = config(2);
    p2p *g = NULL;
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    const wire w = p2p_wire(g, 1);
    const size_t cells = wire_cells_begin(2, c.n_cell);
    for (size_t i = 0; i < p2p_area_bytes(&c); i++) {
        assert_int_equal(w.area[1][i], i < cells ? 0 : WIRE_EMPTY);
    }
    uint32_t word[4];
    memcpy(word, w.area[1] + wire_cell_at(2, c.n_cell, 3, 1), sizeof word);
    assert_true(wire_is_reserved(word[0], word[1], word[2], word[3]));
    assert_int_equal(word[3], WIRE_EMPTY_WORD);
    assert_int_equal(p2p_area_bytes(&c), wire_area_bytes(2, 7));
    p2p_close(g);
}

/* ---- cells ------------------------------------------------------------------------------------- */

/* Everything but an empty cell and a mark travels as it is; those two are told apart by the word of the cell, which
 * no other epoch's passes for. */
static void only_two_contents_of_a_cell_are_reserved(void **state)
{
    (void)state;
    const uint32_t e = WIRE_EMPTY_WORD;
    assert_true(wire_is_reserved(e, e, e, e));
    assert_true(wire_is_reserved(e, e, e, WIRE_MARK_WORD));
    for (int bit = 0; bit < 128; bit++) {
        uint32_t v[4] = {e, e, e, e};
        v[bit / 32] ^= 1u << bit % 32;
        assert_int_equal(wire_is_reserved(v[0], v[1], v[2], v[3]), bit == 96);
    }
    assert_false(wire_is_reserved(0, 0, 0, 0));
    const uint32_t epoch[] = {1, 2, 0x40000000u, 0x40000001u, WIRE_LAST_EPOCH};
    for (size_t i = 0; i < UNIT_COUNT(epoch); i++) {
        const uint32_t a = wire_escape_of(epoch[i], WIRE_EMPTY_WORD);
        const uint32_t b = wire_escape_of(epoch[i], WIRE_MARK_WORD);
        assert_true(a >> 1 == epoch[i] && b >> 1 == epoch[i]);
        assert_int_equal(WIRE_EMPTY_WORD | (a & 1u), WIRE_EMPTY_WORD);
        assert_int_equal(WIRE_EMPTY_WORD | (b & 1u), WIRE_MARK_WORD);
    }
}

/* ---- epochs ------------------------------------------------------------------------------------ */

static void an_exchange_counts_once_all_its_blocks_have_ended(void **state)
{
    (void)state;
    uint64_t done = 0;
    for (uint32_t e = 1; e < 200; e++) {
        const uint32_t blocks = 1 + e * 37 % (WIRE_TURN - 1);
        for (uint32_t b = 0; b < blocks; b++) {
            assert_int_equal(wire_epoch(done), e); /* whoever starts while others have ended */
            done += b == blocks - 1 ? WIRE_TURN - (blocks - 1) : 1; /* the one that counts the rest comes last, */
        }
        uint64_t first = done - WIRE_TURN + WIRE_TURN - (blocks - 1); /* or first */
        for (uint32_t b = 1; b < blocks; b++) {
            assert_int_equal(wire_epoch(first), e);
            first++;
        }
        assert_int_equal(first, done);
    }
    assert_int_equal(wire_slot(4, 6, 3) + 4, wire_slot(4, 7, 3));
    assert_int_equal(wire_slot(4, 6, 3), wire_slot(4, 8, 3));
}

static void set_control(p2p *g, int32_t rank, uint64_t done, uint64_t fault)
{
    const wire_control c = {done, fault};
    memcpy(p2p_wire(g, rank).area[rank], &c, sizeof c);
}

static void a_worn_group_is_renewed_and_an_ended_one_is_not(void **state)
{
    (void)state;
    const p2p_config c = config(2);
    p2p *g = NULL;
    kvs_error err = {0};
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    assert_false(p2p_is_worn(0));
    assert_false(p2p_is_worn(WIRE_LAST_EPOCH / 2 - 1));
    assert_true(p2p_is_worn(WIRE_LAST_EPOCH / 2));
    set_control(g, 0, (uint64_t)1500000000u * WIRE_TURN, 0);
    set_control(g, 1, (uint64_t)1500000000u * WIRE_TURN, 0);
    assert_int_equal(p2p_count(g, 1), 1500000000u);
    assert_true(p2p_is_worn(p2p_count(g, 1)));
    p2p_wire(g, 1).area[1][wire_escape_at(2, 7, 0, 0) + 12] = 9; /* a word of long ago */
    p2p_wire(g, 1).area[1][wire_cell_at(2, 7, 0, 0) + 12] = 9;
    assert_int_equal(p2p_renew(g, NULL), KVS_OK);
    assert_int_equal(p2p_count(g, 0), 0);
    assert_int_equal(p2p_wire(g, 1).area[1][wire_escape_at(2, 7, 0, 0) + 12], 0);
    assert_int_equal(p2p_wire(g, 1).area[1][wire_cell_at(2, 7, 0, 0) + 12], WIRE_EMPTY);
    set_control(g, 1, WIRE_TURN, WIRE_FAULT(WIRE_WORN, 1, 1, 5));
    assert_int_equal(p2p_renew(g, &err), KVS_PEER);
    assert_non_null(strstr(err.text, "renew it in time"));
    assert_int_equal(p2p_count(g, 1), 1);
    p2p_close(g);
}

/* ---- faults ------------------------------------------------------------------------------------ */

static void a_fault_keeps_its_parts(void **state)
{
    (void)state;
    const uint64_t f = WIRE_FAULT(WIRE_MISMATCH, 7, 5, 0xFFFFFF00u);
    assert_int_equal(wire_fault_code(f), WIRE_MISMATCH);
    assert_int_equal(wire_fault_about(f), 7);
    assert_int_equal(wire_fault_by(f), 5);
    assert_int_equal(wire_fault_epoch(f), 0xFFFFFF00u);
    assert_true(WIRE_FAULT(WIRE_LATE, 0, 0, 0) != 0);
}

static void set_head(p2p *g, int32_t at, int32_t from, wire_head h)
{
    memcpy(p2p_wire(g, at).area[at] + wire_head_at(3, h.epoch, from), &h, sizeof h);
}

static void told(p2p *g, int32_t rank, const char *text)
{
    kvs_error err = {0};
    assert_int_equal(p2p_check(g, rank, &err), KVS_PEER);
    assert_string_equal(err.text, text);
}

/* What rank 1 has seen, and the text that its fault gets on another rank. */
static void late_or_differed(wire_head from_0, wire_head from_2, wire_fault code, const char *text)
{
    const p2p_config c = config(3);
    p2p *g = NULL;
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    set_head(g, 1, 0, from_0);
    set_head(g, 1, 1, (wire_head){1, 4, 288, 9});
    set_head(g, 1, 2, from_2);
    set_control(g, 0, 0, WIRE_FAULT(code, 2, 1, 9));
    told(g, 0, text);
    assert_int_equal(p2p_check(g, 1, NULL), KVS_OK);
    set_control(g, 0, 0, WIRE_FAULT(WIRE_WORN, 1, 1, 5)); /* what is said first is said again */
    told(g, 0, text);
    p2p_close(g);
}

static void ranks_are_told_who_was_late_or_differed(void **state)
{
    (void)state;
    const wire_head has_come = {1, 4, 288, 9};
    const wire_head of_before = {1, 4, 288, 7};
    const wire_head other = {3, 2, 10, 9};
    late_or_differed(has_come, of_before, WIRE_LATE,
                     "rank 2 more than 50 ms late for queries of 1152 bytes in 4 rows (exchange 9, "
                     "seen by rank 1)");
    late_or_differed(of_before, of_before, WIRE_LATE,
                     "ranks 0, 2 more than 50 ms late for queries of 1152 bytes in 4 rows (exchange 9, "
                     "seen by rank 1)");
    late_or_differed(has_come, has_come, WIRE_LATE, /* its head has come, the rest has not */
                     "rank 2 more than 50 ms late for queries of 1152 bytes in 4 rows (exchange 9, "
                     "seen by rank 1)");
    late_or_differed(has_come, other, WIRE_MISMATCH,
                     "rank 2 sent candidates of 40 bytes in 2 rows, rank 1 queries of 1152 bytes in 4 rows "
                     "(exchange 9)");
}

static void an_abort_reaches_all_and_the_first_reason_stays(void **state)
{
    (void)state;
    const p2p_config c = config(3);
    p2p *g = NULL;
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    set_control(g, 2, 0, WIRE_FAULT(WIRE_WORN, 2, 2, 1));
    p2p_abort(g, 1, "out of coffee");
    told(g, 0, "rank 1 ended the group: out of coffee");
    told(g, 1, "rank 1 ended the group: out of coffee");
    assert_int_equal(p2p_renew(g, NULL), KVS_PEER);
    kvs_error err = {0};
    assert_int_equal(p2p_check(g, 2, &err), KVS_PEER);
    assert_non_null(strstr(err.text, "used up"));
    p2p_close(g);
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    p2p_abort(g, 1, "out of coffee");
    set_control(g, 2, 0, 0); /* rank 0 ends it where rank 1 has not come yet: each fault has its reason */
    p2p_abort(g, 0, "out of tea");
    told(g, 1, "rank 1 ended the group: out of coffee");
    told(g, 2, "rank 0 ended the group: out of tea");
    p2p_close(g);
    assert_int_equal(p2p_open(&g, &c, NULL), KVS_OK);
    p2p_abort(g, 0, NULL);
    told(g, 2, "rank 0 ended the group: no reason given");
    p2p_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(what_cannot_be_a_group_is_refused, setup),
        cmocka_unit_test_setup(devices_reach_each_other_both_ways, setup),
        cmocka_unit_test_setup(nothing_in_an_area_overlaps, setup),
        cmocka_unit_test_setup(a_new_area_is_empty, setup),
        cmocka_unit_test_setup(only_two_contents_of_a_cell_are_reserved, setup),
        cmocka_unit_test_setup(an_exchange_counts_once_all_its_blocks_have_ended, setup),
        cmocka_unit_test_setup(a_worn_group_is_renewed_and_an_ended_one_is_not, setup),
        cmocka_unit_test_setup(a_fault_keeps_its_parts, setup),
        cmocka_unit_test_setup(ranks_are_told_who_was_late_or_differed, setup),
        cmocka_unit_test_setup(an_abort_reaches_all_and_the_first_reason_stays, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
