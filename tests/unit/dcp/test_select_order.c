/* Which keys are selected where scores tie, are NaN or infinite, or belong to another request: the same
 * set for every DCP size, worked out here from the order "larger score, then lower position". */
#include "unit/unit.h"

#include <math.h>

#include "base/mem.h"
#include "world.h"

static const int32_t k_dcp[] = {1, 2, 4, 8};

/* All keys of the latent cache alike; index queries read value 0 of a key. */
static int plain(world_data kind, float *x, int n)
{
    memset(x, 0, (size_t)n * sizeof *x);
    if (kind == DATA_INDEX_QUERY || kind == DATA_INDEX_WEIGHT || kind == DATA_ROW) {
        x[0] = 1.0f;
    }
    return 1;
}

static scenario scenario_of(int32_t n, const int64_t *seq_len, const int32_t *q_len)
{
    scenario s = scenario_default();
    s.n_req = n;
    for (int32_t i = 0; i < n; i++) {
        s.req_id[i] = i;
        s.seq_len[i] = seq_len[i];
        s.q_len[i] = q_len[i];
    }
    s.n_index_head = 1;
    s.q_type = KVS_DTYPE_F32;
    return s;
}

static void expect_row(const outcome *o, int32_t row, const int32_t *want, int32_t n, int32_t dcp)
{
    if (o->count[row] != n) {
        fail_msg("dcp %d, row %d: %d selected, not %d", dcp, row, o->count[row], n);
    }
    for (int32_t i = 0; i < o->topk; i++) {
        const int32_t id = o->ids[(int64_t)row * o->topk + i];
        if (id != (i < n ? want[i] : -1)) {
            fail_msg("dcp %d, row %d, entry %d: position %d, not %d", dcp, row, i, id,
                     i < n ? want[i] : -1);
        }
    }
}

/* ---- ties ------------------------------------------------------------------------------------ */

enum { LONG = 8320, TOPK = 2048, ONES = 100 };

static int is_one(int64_t pos)
{
    return pos % 83 == 30; /* 100 positions below 8320 */
}

static int mostly_zero(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    (void)head;
    plain(kind, x, n);
    if (kind == DATA_INDEX_KEY) {
        x[0] = req_id == 1 && is_one(pos) ? 1.0f : 0.0f;
    }
    return 1;
}

/* 100 keys of score 1 and then the zeros of the lowest positions. A request of equal scores stands
 * before, so that the row does not start where the buffers do. */
static void ties_go_to_the_lowest_positions(void **state)
{
    (void)state;
    static const int64_t seq[] = {37, LONG};
    static const int32_t q[] = {1, 2};
    static int32_t want[TOPK];
    static int32_t low[37];
    int32_t n = 0;
    for (int32_t pos = 0; pos < LONG; pos++) {
        const int32_t n_zero = pos - (pos + 52) / 83; /* zeros below pos */
        if (is_one(pos) || n_zero < TOPK - ONES) {
            want[n++] = pos;
        }
    }
    assert_int_equal(n, TOPK);
    for (int32_t i = 0; i < 37; i++) {
        low[i] = i;
    }
    for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
        for (int32_t f32 = 0; f32 < 2; f32++) {
            scenario s = scenario_of(2, seq, q);
            s.tp = s.dcp = s.n_head = k_dcp[i];
            s.kv = f32 ? KVS_KV_F32 : KVS_KV_FP8_DS_MLA;
            s.topk = TOPK;
            s.threads = 1 + f32;
            s.data = mostly_zero;
            s.max_rows = 256;
            outcome o;
            world_run(&s, &o);
            expect_row(&o, 0, low, 37, s.dcp);
            expect_row(&o, 1, want, TOPK, s.dcp);
            expect_row(&o, 2, want, TOPK, s.dcp);
            for (int32_t r = 0; r < s.tp; r++) {
                assert_int_equal(o.info[r].n_bad_id, 0);
            }
            outcome_fini(&o);
        }
    }
}

/* ---- what is not a number -------------------------------------------------------------------- */

/* Keys of request r that are NaN: none, position 5, all but 2 and 11, all. Request 4 has +inf at 3 and 9. */
static int is_nan_key(int32_t req_id, int64_t pos)
{
    return (req_id == 1 && pos == 5) || (req_id == 2 && pos != 2 && pos != 11) || req_id == 3;
}

static int some_nan(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    (void)head;
    plain(kind, x, n);
    if (kind == DATA_INDEX_KEY) {
        x[0] = is_nan_key(req_id, pos) ? NAN : 1.0f;
        x[0] = req_id == 4 && (pos == 3 || pos == 9) ? INFINITY : x[0];
    }
    return 1;
}

static void nan_is_never_selected(void **state)
{
    (void)state;
    static const int64_t seq[] = {40, 40, 40, 40, 40, 6};
    static const int32_t q[] = {1, 1, 1, 1, 1, 1};
    static const int32_t first[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const int32_t skip[] = {0, 1, 2, 3, 4, 6, 7, 8};
    static const int32_t two[] = {2, 11};
    static const int32_t inf[] = {0, 1, 2, 3, 4, 5, 6, 9};
    for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
        for (int32_t f32 = 0; f32 < 2; f32++) {
            scenario s = scenario_of(6, seq, q);
            s.req_id[5] = 0;
            s.tp = s.dcp = s.n_head = k_dcp[i];
            s.kv = f32 ? KVS_KV_F32 : KVS_KV_FP8_DS_MLA;
            s.topk = 8;
            s.data = some_nan;
            outcome o;
            world_run(&s, &o);
            expect_row(&o, 0, first, 8, s.dcp);
            expect_row(&o, 1, skip, 8, s.dcp);
            expect_row(&o, 2, two, 2, s.dcp);
            expect_row(&o, 3, NULL, 0, s.dcp);
            if (f32) { /* fp8 keys hold no infinity */
                expect_row(&o, 4, inf, 8, s.dcp);
            }
            expect_row(&o, 5, first, 6, s.dcp);
            for (int32_t h = 0; h < s.n_head; h++) {
                assert_true(o.lse[3 * s.n_head + h] == -INFINITY);
                assert_true(o.out[(int64_t)(3 * s.n_head + h) * 512] == 0.0f);
                assert_true(fabsf(o.lse[2 * s.n_head + h] - logf(2.0f)) < 1e-5f);
            }
            outcome_fini(&o);
        }
    }
}

/* ---- other requests -------------------------------------------------------------------------- */

/* Request 0's keys beat every other request's; the others have the default data. */
static int one_is_huge(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    (void)head;
    if (req_id != 0 || kind == DATA_INDEX_QUERY || kind == DATA_INDEX_WEIGHT) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        x[i] = 300.0f + (float)(pos % 7);
    }
    return 1;
}

static void a_prompt_selects_its_own_keys_only(void **state)
{
    (void)state;
    static const int64_t seq[] = {100, 4000};
    static const int32_t q[] = {100, 12};
    for (int32_t dcp = 1; dcp <= 4; dcp += 3) {
        scenario s = scenario_of(2, seq, q);
        s.tp = s.dcp = s.n_head = dcp;
        s.n_index_head = 2;
        s.kv = KVS_KV_BF16;
        s.data = one_is_huge;
        s.max_rows = 128;
        outcome both;
        world_run(&s, &both);
        s.n_req = 1;
        s.req_id[0] = 1;
        s.seq_len[0] = seq[1];
        s.q_len[0] = q[1];
        outcome alone;
        world_run(&s, &alone);
        const size_t n = (size_t)q[1];
        const size_t heads = (size_t)s.n_head;
        const size_t at = (size_t)q[0];
        assert_memory_equal(both.count + at, alone.count, n * sizeof(int32_t));
        assert_memory_equal(both.ids + at * (size_t)s.topk, alone.ids,
                            n * (size_t)s.topk * sizeof(int32_t));
        assert_memory_equal(both.lse + at * heads, alone.lse, n * heads * sizeof(float));
        assert_memory_equal(both.out + at * heads * 512, alone.out,
                            n * heads * 512 * sizeof(float));
        outcome_fini(&both);
        outcome_fini(&alone);
    }
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_go_to_the_lowest_positions),
        cmocka_unit_test(nan_is_never_selected),
        cmocka_unit_test(a_prompt_selects_its_own_keys_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
