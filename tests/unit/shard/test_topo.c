/* Topology: groups and heads of every rank, and refusals that explain themselves. */
#include "unit/unit.h"

#include "shard/topo.h"

static topo_config config(int32_t tp, int32_t dcp, int32_t heads)
{
    topo_config c;
    memset(&c, 0, sizeof c);
    c.tp = tp;
    c.dcp = dcp;
    c.heads = heads;
    return c;
}

static void zeros_are_one_rank(void **state)
{
    (void)state;
    topo t;
    const topo_config c = config(0, 0, 0);
    assert_int_equal(topo_init(&t, &c, NULL), KVS_OK);
    assert_int_equal(t.tp, 1);
    assert_int_equal(t.dcp, 1);
    assert_int_equal(t.interleave, 1);
    assert_int_equal(t.geom.n, 1);
    assert_int_equal(t.geom.i, 1);
    assert_int_equal(t.geom.rank, 0);
    assert_int_equal(t.heads_gathered, 0);
    assert_int_equal(t.table_width, 0);
    const topo_config d = config(0, 4, 0); /* tp follows dcp */
    assert_int_equal(topo_init(&t, &d, NULL), KVS_OK);
    assert_int_equal(t.tp, 4);
    assert_int_equal(t.n_group, 1);
}

/* Groups are runs of ranks; every head lies on one rank and is gathered by one group. */
static void ranks_groups_heads(void **state)
{
    (void)state;
    for (int32_t dcp = 1; dcp <= 8; dcp *= 2) {
        topo_config c = config(8, dcp, 128);
        c.interleave = 16;
        c.max_context = 1000000;
        topo first;
        assert_int_equal(topo_init(&first, &c, NULL), KVS_OK);
        int32_t group = 0;
        int32_t in_group = 0;
        for (c.rank = 0; c.rank < 8; c.rank++) {
            topo t;
            assert_int_equal(topo_init(&t, &c, NULL), KVS_OK);
            const topo same = topo_at(&first, c.rank);
            assert_memory_equal(&t, &same, offsetof(topo, geom) + sizeof t.geom);
            assert_int_equal(t.rank, c.rank);
            assert_int_equal(t.i_group, group);
            assert_int_equal(t.group_rank, in_group);
            assert_int_equal(t.geom.rank, in_group);
            assert_int_equal(t.geom.n, dcp);
            assert_int_equal(t.geom.i, 16);
            assert_int_equal(t.n_group, 8 / dcp);
            assert_int_equal(t.heads_local, 16);
            assert_int_equal(t.heads_gathered, 16 * dcp);
            assert_int_equal(t.heads, 128);
            assert_int_equal(t.interleave, 16);
            assert_int_equal(t.table_width, (1000000 + 64 * dcp - 1) / (64 * dcp));
            if (++in_group == dcp) {
                in_group = 0;
                group++;
            }
        }
    }
}

typedef struct refused {
    topo_config c;
    kvs_status status;
    const char *rule, *value, *nearest;
    const char *why_part;
} refused;

/* {tp, dcp, rank, interleave, heads, max_context, kernel_level} */
static const refused refusals[] = {
    {{0, 9, 0, 0, 0, 0, 0}, KVS_INVALID, "dcp_range", "dcp 9", "dcp 8", "1 to 8"},
    {{0, 9, 0, 0, 0, 0, 1}, KVS_INVALID, "dcp_range", "dcp 9", "dcp 8", "1 to 8"},
    {{4, 9, 0, 0, 0, 0, 0}, KVS_INVALID, "dcp_range", "dcp 9", "dcp 4", "1 to 8"},
    {{0, -1, 0, 0, 0, 0, 0}, KVS_INVALID, "dcp_range", "dcp -1", "dcp 1", "1 to 8"},
    {{0, 3, 0, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 3", "dcp 4", "same bits"},
    {{6, 3, 0, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 3", "dcp 2", "same bits"},
    {{0, 5, 0, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 5", "dcp 4", "same bits"},
    {{0, 6, 0, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 6", "dcp 8", "same bits"},
    {{0, 6, 0, 0, 20, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 6", "dcp 4", "same bits"},
    {{0, 7, 0, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 7", "dcp 8", "same bits"},
    {{0, 3, 2, 0, 0, 0, 0}, KVS_UNSUPPORTED, "dcp_same_bits", "dcp 3", "dcp 4", "same bits"},
    {{8, 3, 0, 0, 0, 0, 1}, KVS_INVALID, "dcp_divides_tp", "dcp 3, tp 8", "dcp 4", "equal runs"},
    {{-2, 1, 0, 0, 0, 0, 0}, KVS_INVALID, "tp_range", "tp -2", "tp 1", "at least one"},
    {{-2, 4, 0, 0, 0, 0, 0}, KVS_INVALID, "tp_range", "tp -2", "tp 4", "at least one"},
    {{6, 4, 0, 0, 0, 0, 0}, KVS_INVALID, "dcp_divides_tp", "dcp 4, tp 6", "dcp 2", "equal runs"},
    {{6, 4, 0, 0, 0, 0, 1}, KVS_INVALID, "dcp_divides_tp", "dcp 4, tp 6", "dcp 3", "equal runs"},
    {{4, 8, 0, 0, 0, 0, 0}, KVS_INVALID, "dcp_divides_tp", "dcp 8, tp 4", "dcp 4", "equal runs"},
    {{8, 2, 8, 0, 0, 0, 0}, KVS_INVALID, "rank_range", "rank 8, tp 8", "rank 7", "from 0"},
    {{8, 2, -1, 0, 0, 0, 0}, KVS_INVALID, "rank_range", "rank -1, tp 8", "rank 0", "from 0"},
    {{0, 2, 0, 3, 0, 0, 0},
     KVS_INVALID,
     "interleave_divides_page",
     "interleave 3",
     "interleave 4",
     "whole runs"},
    {{0, 2, 0, 128, 0, 0, 0},
     KVS_INVALID,
     "interleave_divides_page",
     "interleave 128",
     "interleave 64",
     "whole runs"},
    {{0, 2, 0, 20, 0, 0, 0},
     KVS_INVALID,
     "interleave_divides_page",
     "interleave 20",
     "interleave 16",
     "whole runs"},
    {{0, 2, 0, -8, 0, 0, 0},
     KVS_INVALID,
     "interleave_divides_page",
     "interleave -8",
     "interleave 1",
     "whole runs"},
    {{4, 2, 0, 0, -5, 0, 0}, KVS_INVALID, "heads_range", "heads -5", "heads 4", "at least one"},
    {{8, 1, 0, 0, 20, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 20, tp 8", "tp 10", "same"},
    {{8, 4, 0, 0, 20, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 20, tp 8", "tp 4", "same"},
    {{8, 4, 5, 0, 20, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 20, tp 8", "tp 20", "same"},
    {{8, 8, 0, 0, 20, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 20, tp 8", "tp 10, dcp 1", "same"},
    {{2, 2, 0, 0, 65, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 65, tp 2", "tp 1, dcp 1", "same"},
    {{2, 2, 1, 0, 65, 0, 0}, KVS_INVALID, "tp_divides_heads", "heads 65, tp 2", "tp 5, dcp 1", "same"},
    {{8, 8, 0, 0, 256, 0, 0},
     KVS_INVALID,
     "heads_gathered",
     "heads 256, tp 8, dcp 8",
     "dcp 4",
     "= 256 heads, kernels take 128"},
    {{1, 1, 0, 0, 256, 0, 0},
     KVS_INVALID,
     "heads_gathered",
     "heads 256, tp 1, dcp 1",
     "tp 2",
     "= 256 heads, kernels take 128"},
    {{0, 2, 0, 0, 0, INT64_C(2147483648), 0},
     KVS_INVALID,
     "context_range",
     "max context 2147483648",
     "max context 2147483647",
     "2^31 - 1"},
    {{0, 2, 0, 0, 0, -3, 0},
     KVS_INVALID,
     "context_range",
     "max context -3",
     "max context 1",
     "2^31 - 1"},
};

static void each_refusal_explains_itself(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(refusals); i++) {
        const refused *w = &refusals[i];
        topo_refusal got[TOPO_N_RULE];
        assert_int_equal(topo_check(&w->c, got), 1);
        assert_string_equal(got[0].rule, w->rule);
        assert_string_equal(got[0].value, w->value);
        assert_string_equal(got[0].nearest, w->nearest);
        assert_non_null(strstr(got[0].why, w->why_part));
        assert_int_equal(got[0].status, w->status);

        topo t;
        memset(&t, 0x5A, sizeof t);
        const topo untouched = t;
        kvs_error err;
        assert_int_equal(topo_init(&t, &w->c, &err), w->status);
        assert_int_equal(topo_init(&t, &w->c, NULL), w->status);
        assert_memory_equal(&t, &untouched, sizeof t);
        char want[232];
        const char *use = w->nearest[0] != '\0' ? "; use " : "";
        snprintf(want, sizeof want, "%s: %s%s%s", w->value, got[0].why, use, w->nearest);
        assert_string_equal(err.text, want);
    }
}

static void set_field(topo_config *c, const char *text)
{
    if (strchr(text, ',') != NULL) { /* "tp 5, dcp 1" */
        char first[24];
        snprintf(first, sizeof first, "%.*s", (int)(strchr(text, ',') - text), text);
        set_field(c, first);
        text = strchr(text, ',') + 2;
    }
    char name[24];
    int64_t v = 0;
    long long ll = 0;
    const char *space = strrchr(text, ' ');
    assert_non_null(space);
    snprintf(name, sizeof name, "%.*s", (int)(space - text), text);
    assert_int_equal(sscanf(space, "%lld", &ll), 1);
    v = ll;
    if (strcmp(name, "dcp") == 0) {
        c->dcp = (int32_t)v;
    } else if (strcmp(name, "tp") == 0) {
        c->tp = (int32_t)v;
    } else if (strcmp(name, "rank") == 0) {
        c->rank = (int32_t)v;
    } else if (strcmp(name, "interleave") == 0) {
        c->interleave = (int32_t)v;
    } else if (strcmp(name, "heads") == 0) {
        c->heads = (int32_t)v;
    } else {
        assert_string_equal(name, "max context");
        c->max_context = v;
    }
}

static int has_rule(const topo_refusal *list, int32_t n, const char *rule)
{
    for (int32_t i = 0; i < n; i++) {
        if (strcmp(list[i].rule, rule) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Over a grid of set-ups, right and wrong: taking a refusal's advice removes it and adds none. */
static void advice_works(void **state)
{
    (void)state;
    static const int32_t tps[] = {-1, 0, 1, 2, 3, 4, 6, 8, 16};
    static const int32_t dcps[] = {-3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
    static const int32_t ranks[] = {-1, 0, 1, 3, 7, 15};
    static const int32_t runs[] = {0, 1, 3, 64, 65};
    static const int32_t heads[] = {-1, 0, 1, 16, 20, 64, 128, 256, 384};
    int64_t n_ok = 0;
    int64_t n_refused = 0;
    for (size_t i = 0; i < UNIT_COUNT(tps) * UNIT_COUNT(dcps) * UNIT_COUNT(ranks) *
                               UNIT_COUNT(runs) * UNIT_COUNT(heads) * 2;
         i += 3) {
        size_t k = i;
        topo_config c;
        memset(&c, 0, sizeof c);
        c.kernel_level = k % 2 == 1;
        k /= 2;
        c.heads = heads[k % UNIT_COUNT(heads)];
        k /= UNIT_COUNT(heads);
        c.interleave = runs[k % UNIT_COUNT(runs)];
        k /= UNIT_COUNT(runs);
        c.rank = ranks[k % UNIT_COUNT(ranks)];
        k /= UNIT_COUNT(ranks);
        c.dcp = dcps[k % UNIT_COUNT(dcps)];
        k /= UNIT_COUNT(dcps);
        c.tp = tps[k];
        topo_refusal list[TOPO_N_RULE];
        const int32_t n = topo_check(&c, list);
        n_ok += n == 0;
        for (int32_t j = 0; j < n; j++) {
            n_refused++;
            assert_true(strlen(list[j].why) > 10 && strlen(list[j].why) + 1 < sizeof list[j].why);
            if (list[j].nearest[0] == '\0') {
                continue;
            }
            topo_config fixed = c;
            set_field(&fixed, list[j].nearest);
            topo_refusal after[TOPO_N_RULE];
            const int32_t n_after = topo_check(&fixed, after);
            assert_true(n_after < n);
            assert_false(has_rule(after, n_after, list[j].rule));
            for (int32_t m = 0; m < n_after; m++) {
                assert_true(has_rule(list, n, after[m].rule));
            }
        }
    }
    assert_true(n_ok > 100);
    assert_true(n_refused > 10000);
}

/* What works is exactly what the rules say, told here in another way. */
static void accepted_is_what_the_rules_say(void **state)
{
    (void)state;
    for (int32_t tp = 1; tp <= 16; tp++) {
        for (int32_t dcp = 1; dcp <= 10; dcp++) {
            for (int32_t heads = 1; heads <= 160; heads++) {
                for (int32_t level = 0; level <= 1; level++) {
                    topo_config c = config(tp, dcp, heads);
                    c.kernel_level = level;
                    c.rank = tp - 1;
                    const int small = dcp == 1 || dcp == 2 || dcp == 4 || dcp == 8;
                    int groups = 0;
                    for (int32_t r = 0; r + dcp <= tp; r += dcp) {
                        groups++;
                    }
                    int32_t each = 0;
                    while (each * tp < heads) {
                        each++;
                    }
                    const int want = dcp <= 8 && (small || level) && groups * dcp == tp &&
                                     each * tp == heads && each * dcp <= 128;
                    topo t;
                    assert_int_equal(topo_init(&t, &c, NULL) == KVS_OK, want);
                }
            }
        }
    }
}

static void several_refusals_are_all_listed(void **state)
{
    (void)state;
    topo_config c = config(6, 4, 20);
    c.rank = 9;
    c.interleave = 5;
    c.max_context = -1;
    topo_refusal list[TOPO_N_RULE];
    assert_int_equal(topo_check(&c, list), 5);
    assert_string_equal(list[0].rule, "dcp_divides_tp");
    assert_string_equal(list[1].rule, "rank_range");
    assert_string_equal(list[2].rule, "interleave_divides_page");
    assert_string_equal(list[3].rule, "tp_divides_heads");
    assert_string_equal(list[4].rule, "context_range");
    char text[12];
    topo_refusal_text(&list[0], text, sizeof text);
    assert_string_equal(text, "dcp 4, tp 6");
}

static void kernel_level_allows_odd_sizes(void **state)
{
    (void)state;
    for (int32_t dcp = 1; dcp <= 8; dcp++) {
        topo_config c = config(0, dcp, 0);
        c.kernel_level = 1;
        c.max_context = TOPO_MAX_CONTEXT;
        topo t;
        assert_int_equal(topo_init(&t, &c, NULL), KVS_OK);
        assert_int_equal(t.dcp, dcp);
        assert_true(t.table_width * 64 * dcp >= TOPO_MAX_CONTEXT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zeros_are_one_rank),
        cmocka_unit_test(ranks_groups_heads),
        cmocka_unit_test(each_refusal_explains_itself),
        cmocka_unit_test(advice_works),
        cmocka_unit_test(accepted_is_what_the_rules_say),
        cmocka_unit_test(several_refusals_are_all_listed),
        cmocka_unit_test(kernel_level_allows_odd_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
