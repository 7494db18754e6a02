/* The page allocator against a list of counters searched from the front. */
#include "unit/unit.h"

#include <stdbool.h>

#include "base/mem.h"
#include "base/rng.h"
#include "kv/table.h"

enum { N_SEQ = 12, WIDTH = 700 };

typedef struct sim {
    int64_t n_page;
    int32_t *ref;
    int32_t table[N_SEQ][WIDTH]; /* of the simulation */
    int32_t got[N_SEQ][WIDTH];   /* of the allocator  */
    int64_t n_have[N_SEQ];
    int64_t n_got[N_SEQ];
} sim;

static int64_t sim_free(const sim *s)
{
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_page; i++) {
        n += s->ref[i] == 0;
    }
    return n;
}

static int32_t sim_take(sim *s)
{
    for (int64_t i = 0; i < s->n_page; i++) {
        if (s->ref[i] == 0) {
            s->ref[i] = 1;
            return (int32_t)i;
        }
    }
    return -1;
}

static void compare(const sim *s, const kvs_pages *p)
{
    assert_int_equal(pages_available(p), sim_free(s));
    for (int32_t q = 0; q < N_SEQ; q++) {
        assert_int_equal(s->n_got[q], s->n_have[q]);
        assert_memory_equal(s->got[q], s->table[q], sizeof s->table[q]);
    }
}

static void op_extend(sim *s, kvs_pages *p, rng *r)
{
    const int32_t q = (int32_t)rng_next_below(r, N_SEQ);
    const int32_t dcp = 1 << rng_next_below(r, 4);
    const int64_t len = rng_next_range(r, 0, 64 * dcp * (int64_t)(WIDTH + 1) / 3);
    int64_t need = 0;
    while (need * 64 * dcp < len) {
        need++;
    }
    const int64_t more = need - s->n_have[q];
    kvs_error err;
    const kvs_status st = pages_extend(p, dcp, s->got[q], WIDTH, &s->n_got[q], len, &err);
    if (more > sim_free(s)) {
        assert_int_equal(st, KVS_LIMIT);
        char missing[40];
        snprintf(missing, sizeof missing, ": %d missing", (int)(more - sim_free(s)));
        assert_non_null(strstr(err.text, missing));
        return;
    }
    assert_int_equal(st, KVS_OK);
    while (s->n_have[q] < need) {
        s->table[q][s->n_have[q]++] = sim_take(s);
    }
}

static void op_truncate(sim *s, kvs_pages *p, rng *r)
{
    const int32_t q = (int32_t)rng_next_below(r, N_SEQ);
    const int64_t keep = rng_next_range(r, 0, s->n_have[q]);
    assert_int_equal(pages_truncate(p, s->got[q], &s->n_got[q], keep, NULL), KVS_OK);
    while (s->n_have[q] > keep) {
        s->ref[s->table[q][--s->n_have[q]]]--;
        s->table[q][s->n_have[q]] = -1;
    }
}

/* A sequence that holds nothing takes the first entries of another. */
static void op_share(sim *s, kvs_pages *p, rng *r)
{
    const int32_t from = (int32_t)rng_next_below(r, N_SEQ);
    const int32_t to = (int32_t)rng_next_below(r, N_SEQ);
    if (s->n_have[to] != 0 || from == to) {
        return;
    }
    const int64_t n = rng_next_range(r, 0, s->n_have[from]);
    assert_int_equal(pages_share(p, s->got[from], n, NULL), KVS_OK);
    for (int64_t b = 0; b < n; b++) {
        s->ref[s->table[from][b]]++;
        s->table[to][b] = s->table[from][b];
        s->got[to][b] = s->got[from][b];
    }
    s->n_have[to] = n;
    s->n_got[to] = n;
}

/* Giving back, or sharing, what is not held: refused, nothing changed. */
static void op_wrong(sim *s, kvs_pages *p, rng *r)
{
    int32_t bad[4] = {-1, -1, -1, -1};
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_page && n < 2; i++) {
        if (s->ref[i] == 1) {
            bad[n++] = (int32_t)i; /* valid ones before the wrong one must be restored */
        }
    }
    switch (rng_next_below(r, 4)) {
    case 0:
        bad[n++] = (int32_t)s->n_page;
        break;
    case 1:
        bad[n++] = -1;
        break;
    case 2:
        if (n == 0) {
            return;
        }
        bad[n] = bad[0]; /* twice, owned once */
        n++;
        break;
    default:
        for (int64_t i = s->n_page - 1; i >= 0; i--) {
            if (s->ref[i] == 0) {
                bad[n++] = (int32_t)i;
                break;
            }
        }
        if (n == 0 || s->ref[bad[n - 1]] != 0) {
            return;
        }
    }
    int32_t copy[4];
    memcpy(copy, bad, sizeof copy);
    int64_t have = n;
    kvs_error err;
    const bool foreign = bad[n - 1] < 0 || bad[n - 1] >= s->n_page;
    assert_int_equal(pages_truncate(p, bad, &have, 0, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, foreign ? "is not of this pool" : "has no owner left"));
    assert_int_equal(have, n);
    assert_memory_equal(bad, copy, sizeof bad);
    if (n < 3 || bad[2] != bad[0]) {
        assert_int_equal(pages_share(p, bad, n, NULL), KVS_INVALID);
    }
}

static void random_calls_equal_the_simulation(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 2, 63, 64, 65, 129, 1000, 4096, 4097};
    static sim s;
    for (uint64_t k = 0; k < UNIT_COUNT(sizes); k++) {
        memset(&s, 0, sizeof s);
        s.n_page = sizes[k];
        s.ref = calloc((size_t)s.n_page, sizeof *s.ref);
        memset(s.table, 0xFF, sizeof s.table);
        memset(s.got, 0xFF, sizeof s.got);
        kvs_pages *p = NULL;
        assert_int_equal(pages_new(&p, s.n_page, NULL), KVS_OK);
        rng r = rng_init(7, k);
        for (int32_t op = 0; op < 600; op++) {
            switch (rng_next_below(&r, 4)) {
            case 0:
                op_extend(&s, p, &r);
                break;
            case 1:
                op_truncate(&s, p, &r);
                break;
            case 2:
                op_share(&s, p, &r);
                break;
            default:
                op_wrong(&s, p, &r);
            }
            compare(&s, p);
        }
        pages_free(p);
        free(s.ref);
    }
}

/* One entry twice in a table that owns it twice. */
static void a_page_given_back_twice_by_right(void **state)
{
    (void)state;
    kvs_pages *p = NULL;
    assert_int_equal(pages_new(&p, 3, NULL), KVS_OK);
    int32_t table[4] = {-1, -1, -1, -1};
    int64_t have = 0;
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 64, NULL), KVS_OK);
    assert_int_equal(pages_share(p, table, 1, NULL), KVS_OK);
    table[1] = table[0];
    have = 2;
    assert_int_equal(pages_truncate(p, table, &have, 0, NULL), KVS_OK);
    assert_int_equal(pages_available(p), 3);
    assert_int_equal(table[0], -1);
    assert_int_equal(table[1], -1);
    have = 0;
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 192, NULL), KVS_OK);
    assert_int_equal(table[0], 0);
    assert_int_equal(table[1], 1);
    assert_int_equal(table[2], 2);
    pages_free(p);
}

static void wrong_arguments_are_refused(void **state)
{
    (void)state;
    kvs_pages *p = (kvs_pages *)&p;
    kvs_error err;
    assert_int_equal(pages_new(&p, 0, &err), KVS_INVALID);
    assert_null(p);
    assert_int_equal(pages_new(&p, (1 << 25), &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "33554431"));
    assert_int_equal(pages_new(&p, 10, &err), KVS_OK);
    int32_t table[4] = {-1, -1, -1, -1};
    int64_t have = 0;
    assert_int_equal(pages_extend(p, 0, table, 4, &have, 1, &err), KVS_INVALID);
    assert_int_equal(pages_extend(p, 9, table, 4, &have, 1, &err), KVS_INVALID);
    assert_int_equal(pages_extend(p, 1, table, 4, &have, -1, &err), KVS_INVALID);
    assert_int_equal(pages_extend(p, 1, table, 4, &have, INT64_C(1) << 31, &err), KVS_INVALID);
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 257, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "the table has 4; it reaches 256 tokens"));
    have = 5;
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 1, &err), KVS_INVALID);
    have = -1;
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 1, &err), KVS_INVALID);
    assert_int_equal(pages_available(p), 10);
    have = 0;
    assert_int_equal(pages_extend(p, 1, table, 4, &have, 256, &err), KVS_OK);
    assert_int_equal(pages_truncate(p, table, &have, 5, &err), KVS_INVALID);
    assert_int_equal(pages_truncate(p, table, &have, -1, &err), KVS_INVALID);
    assert_int_equal(pages_share(p, table, -1, &err), KVS_INVALID);
    assert_int_equal(have, 4);
    assert_int_equal(pages_available(p), 6);
    pages_free(p);
    pages_free(NULL);
}

static void the_largest_pool_opens(void **state)
{
    (void)state;
    kvs_pages *p = NULL;
    assert_int_equal(pages_new(&p, (1 << 25) - 1, NULL), KVS_OK);
    int32_t table[3];
    int64_t have = 0;
    assert_int_equal(pages_extend(p, 8, table, 3, &have, 1025, NULL), KVS_OK);
    assert_int_equal(have, 3);
    assert_int_equal(table[2], 2);
    assert_int_equal(pages_available(p), (1 << 25) - 4);
    pages_free(p);
}

static void no_memory_leaves_nothing(void **state)
{
    (void)state;
    const mem_stats before = mem_stats_get();
    int64_t n = 0;
    for (;;) {
        n++;
        mem_fail_after(n);
        kvs_pages *p = (kvs_pages *)&n;
        const kvs_status st = pages_new(&p, 70 * 64, NULL);
        mem_fail_after(0);
        if (st == KVS_OK) {
            pages_free(p);
            break;
        }
        assert_int_equal(st, KVS_NOMEM);
        assert_null(p);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
    }
    assert_int_equal(n, 6); /* the struct, the counts, three levels */
    assert_int_equal(mem_stats_get().n_live, before.n_live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls_equal_the_simulation),
        cmocka_unit_test(a_page_given_back_twice_by_right),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(the_largest_pool_opens),
        cmocka_unit_test(no_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
