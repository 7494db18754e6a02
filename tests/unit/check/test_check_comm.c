/* The collectives' own check: everything passes on self and threads, and no case is left out. */
#include <stdbool.h>
#include "unit/unit.h"
#include "check/check_comm.h"
#include "kvspan/status.h"

typedef struct rows {
    int n;
    int n_pass;
    int n_skip;
    char text[1024][512];
} rows;

static void take(void *ctx, const char *text)
{
    rows *r = ctx;
    assert_in_range(r->n, 0, 1023);
    snprintf(r->text[r->n++], sizeof r->text[0], "%s", text);
    r->n_pass += strstr(text, " pass ") != NULL;
    r->n_skip += strstr(text, " skip ") != NULL;
}

static int count(const rows *r, const char *a, const char *b, const char *c)
{
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        n += strstr(r->text[i], a) != NULL && strstr(r->text[i], b) != NULL &&
             strstr(r->text[i], c) != NULL;
    }
    return n;
}

static rows *run_quick(void)
{
    static rows r;
    static bool done;
    if (!done) {
        done = true;
        check_comm_totals totals;
        const check_comm_config cfg = {
            .seed = 5, .quick = 1, .line = take, .ctx = &r, .totals = &totals};
        kvs_error err = {0};
        if (check_comm_run(&cfg, &err) != KVS_OK) {
            fail_msg("%s", err.text);
        }
        assert_int_equal(totals.n_passed, r.n_pass);
        assert_int_equal(totals.n_skipped, r.n_skip);
        assert_int_equal(totals.n_failed, 0);
        assert_int_equal(r.n, r.n_pass + r.n_skip);
    }
    return &r;
}

static const char *const k_op[] = {"op=all_gather ", "op=all_to_all ", "op=reduce_scatter ",
                                   "op=all_reduce ", "op=broadcast ",  "op=barrier ",
                                   "op=split "};

static void test_every_collective_of_every_size(void **state)
{
    (void)state;
    static const char *const size[] = {"size=0 ", "size=1 ", "size=odd ", "size=large ",
                                       "size=uneven "};
    const rows *r = run_quick();
    for (size_t i = 0; i < 5; i++) {
        for (size_t j = 0; j < UNIT_COUNT(size); j++) {
            assert_int_equal(count(r, k_op[i], "transport=threads", size[j]), 5);
            assert_int_equal(count(r, k_op[i], "transport=self", size[j]), 1);
        }
    }
    assert_int_equal(count(r, "transport=threads", "fault=none", "size=in_place "), 10);
    assert_int_equal(count(r, "op=barrier ", "transport=threads", "size=0 "), 5);
    assert_int_equal(count(r, "op=split ", "transport=threads", "size=uneven "), 5);
}

static void test_every_collective_with_every_fault(void **state)
{
    (void)state;
    static const char *const fault[] = {
        "fault=slow ", "fault=order ", "fault=late ", "fault=stall ", "fault=die ",
        "fault=drop ", "fault=bytes ", "fault=op ",   "fault=close ", "fault=abort "};
    const rows *r = run_quick();
    for (size_t i = 0; i < UNIT_COUNT(k_op); i++) {
        for (size_t j = 0; j < UNIT_COUNT(fault); j++) {
            assert_int_equal(count(r, k_op[i], "transport=threads n=3", fault[j]), 1);
        }
    }
    assert_int_equal(count(r, "op=handshake ", "transport=threads", "pass"), 3);
    assert_int_equal(count(r, "op=agree ", "transport=threads", "fault=status "), 1);
    assert_int_equal(count(r, "transport=self", "fault=abort ", "rank 0 ended"), 7);
    assert_int_equal(count(r, "transport=mpi", "skip", ""), 1);
    assert_int_equal(count(r, "transport=tcp", "skip", "rendezvous"), 1);
}

static void test_bad_timeout(void **state)
{
    (void)state;
    const check_comm_config cfg = {.timeout_ms = -1};
    kvs_error err = {0};
    assert_int_equal(check_comm_run(&cfg, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "-1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_collective_of_every_size),
        cmocka_unit_test(test_every_collective_with_every_fault),
        cmocka_unit_test(test_bad_timeout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
