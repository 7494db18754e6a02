/* Edges of pages, pools, tables, steps and head counts. Whatever no sequence has written is NaN, workspaces
 * included, so that a key, a row or a head too many shows. */
#include "unit/unit.h"

#include <math.h>

#include "base/mem.h"
#include "shard/shard.h"
#include "world.h"

static const int32_t k_dcp[] = {1, 2, 4, 8};
static const kvs_attend k_forms[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};

static scenario with_requests(int32_t n, const int64_t *seq_len, const int32_t *q_len)
{
    scenario s = scenario_default();
    s.n_req = n;
    for (int32_t i = 0; i < n; i++) {
        s.req_id[i] = i;
        s.seq_len[i] = seq_len[i];
        s.q_len[i] = q_len[i];
    }
    return s;
}

static void use_form(scenario *s, kvs_attend how)
{
    s->how = how;
    s->n_index_head = how == KVS_ATTEND_SPARSE ? 4 : 0;
}

/* No NaN was met, masked or given back. */
static void clean(const scenario *s, const outcome *o)
{
    for (int32_t r = 0; r < s->tp; r++) {
        assert_int_equal(o->info[r].n_nan, 0);
        assert_int_equal(o->info[r].n_bad_id, 0);
    }
    for (int64_t i = 0; i < (int64_t)o->n_row * o->n_head; i++) {
        assert_true(isfinite(o->lse[i]));
        for (int64_t d = 0; d < 512; d++) {
            assert_true(isfinite(o->out[i * 512 + d]));
        }
    }
}

/* Lengths at which a rank's last page is just short, just full and just begun. */
static void a_full_page_is_the_last_one_read(void **state)
{
    (void)state;
    static const int32_t q[] = {1, 1, 1, 1, 1, 1, 2};
    static const kvs_kv_format fmt[] = {KVS_KV_FP8, KVS_KV_FP8_DS_MLA};
    for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
        if (k_dcp[i] == 4) {
            continue;
        }
        const int64_t n = k_dcp[i];
        const int64_t seq[] = {63, 64, 65, 128, 64 * n, 64 * n - 1, 64 * n + 1};
        for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
            for (size_t f = 0; f < UNIT_COUNT(fmt); f++) {
                if (k_forms[m] == KVS_ATTEND_SPARSE && fmt[f] == KVS_KV_FP8) {
                    continue;
                }
                scenario s = with_requests(7, seq, q);
                use_form(&s, k_forms[m]);
                s.dcp = (int32_t)n;
                s.n_head = 8;
                s.kv = fmt[f];
                outcome o;
                world_run(&s, &o);
                clean(&s, &o);
                for (int32_t r = 0; r < s.tp && s.how == KVS_ATTEND_DENSE; r++) {
                    const shard_geom g = {s.dcp, s.interleave, r % s.dcp};
                    uint64_t rows = 0;
                    for (int32_t k = 0; k < 7; k++) {
                        rows += (uint64_t)shard_len(g, seq[k]);
                    }
                    rows += (uint64_t)shard_len(g, seq[6] - 1);
                    assert_int_equal(o.info[r].n_key_attended, rows);
                }
                outcome_fini(&o);
            }
        }
    }
}

/* Every page of the pool belongs to a sequence, the last one of all ranks included. */
static void the_last_page_of_the_pool_is_used(void **state)
{
    (void)state;
    static const int64_t seq[] = {64 * 8 * 2, 64 * 8, 130};
    static const int32_t q[] = {1, 2, 1};
    for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
        scenario s = with_requests(3, seq, q);
        use_form(&s, k_forms[m]);
        s.n_head = 8;
        s.topk = 1024;
        outcome roomy;
        world_run(&s, &roomy);
        s.spare_pages = 0;
        for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
            s.dcp = k_dcp[i];
            outcome o;
            world_run(&s, &o);
            clean(&s, &o);
            same_bits(&roomy, &o, "a pool without a free page");
            outcome_fini(&o);
        }
        outcome_fini(&roomy);
    }
}

/* A step's table is narrower or wider than the handle's, which is sized for max_len: each request keeps
 * its own pages. */
static void tables_of_any_stride_keep_their_rows(void **state)
{
    (void)state;
    static const int64_t seq[] = {70, 129, 400, 1, 64, 300, 257, 128};
    static const int32_t q[] = {1, 2, 1, 1, 3, 1, 1, 1};
    for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
        scenario s = with_requests(8, seq, q);
        use_form(&s, k_forms[m]);
        s.dcp = 2;
        s.n_head = 8;
        outcome plain;
        world_run(&s, &plain);
        s.max_len = 1000000;
        for (s.table_pad = 0; s.table_pad < 12; s.table_pad += 11) {
            outcome o;
            world_run(&s, &o);
            same_bits(&plain, &o, "a table of another width");
            outcome_fini(&o);
        }
        outcome_fini(&plain);
    }
}

/* Steps of 3, 5 and 7 rows on a handle that has just done larger and smaller ones. */
static void a_smaller_step_sees_nothing_of_a_larger_one(void **state)
{
    (void)state;
    static const int32_t warm[][WORLD_MAX_REQ] = {
        {4, 4, 4, 4, 4, 4, 4, 4}, {0, 1}, {9, 0, 30, 0, 2}, {1, 1, 1, 1, 1, 1, 1, 1}};
    static const int64_t seq[] = {90, 33, 140, 65, 20, 70, 129, 41};
    for (size_t m = 0; m < UNIT_COUNT(k_forms); m++) {
        for (int32_t rows = 3; rows <= 7; rows += 2) {
            int32_t q[8] = {0};
            for (int32_t i = 0; i < rows; i++) {
                q[(i * 3) % 8] = 1;
            }
            scenario s = with_requests(8, seq, q);
            use_form(&s, k_forms[m]);
            s.n_head = 8;
            s.max_rows = 64;
            outcome fresh;
            world_run(&s, &fresh);
            s.warm = warm;
            s.tp = s.dcp = rows == 5 ? 8 : 2;
            for (s.n_warm = 1; s.n_warm <= 4; s.n_warm += 3) {
                outcome o;
                world_run(&s, &o);
                clean(&s, &o);
                same_bits(&fresh, &o, "after other steps");
                outcome_fini(&o);
            }
            outcome_fini(&fresh);
        }
    }
}

/* ---- head counts ----------------------------------------------------------------------------- */

/* Data does not depend on the number of heads, so head h of any run is head h of the largest. */
static void head_counts_work_or_are_refused(void **state)
{
    (void)state;
    static const int32_t heads[] = {16, 48, 65, 96, 128};
    static const int64_t seq[] = {200, 3};
    static const int32_t q[] = {2, 1};
    scenario s = with_requests(2, seq, q);
    outcome most;
    s.tp = 1;
    s.n_head = 128;
    world_run(&s, &most);
    for (size_t k = 0; k < UNIT_COUNT(heads); k++) {
        for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
            s.tp = k_dcp[i];
            s.dcp = k_dcp[i];
            s.n_head = heads[k];
            outcome o;
            world_try(&s, &o);
            for (int32_t r = 0; r < s.tp; r++) {
                if (heads[k] % s.tp == 0) {
                    assert_int_equal(o.status[r], KVS_OK);
                } else {
                    assert_true(o.status[r] < 0);
                    assert_non_null(strstr(o.error[r].text, "heads 65, tp"));
                }
            }
            for (int32_t row = 0; row < o.n_row && heads[k] % s.tp == 0; row++) {
                const int64_t at = (int64_t)row * s.n_head;
                assert_memory_equal(o.lse + at, most.lse + row * 128,
                                    (size_t)s.n_head * sizeof(float));
                assert_memory_equal(o.out + at * 512, most.out + row * 128 * 512,
                                    (size_t)s.n_head * 512 * sizeof(float));
            }
            outcome_fini(&o);
        }
    }
    outcome_fini(&most);
}

/* ---- keys that hold their position ----------------------------------------------------------- */

/* Value 0 is the position, value 1 the request; index scores rise with the position. */
static int positions(world_data kind, int32_t req_id, int64_t pos, int32_t head, float *x, int n)
{
    (void)head;
    memset(x, 0, (size_t)n * sizeof *x);
    switch (kind) {
    case DATA_ROW:
        x[0] = (float)pos;
        x[1] = (float)req_id;
        break;
    case DATA_INDEX_KEY:
        x[0] = (float)pos;
        break;
    case DATA_INDEX_QUERY:
    case DATA_INDEX_WEIGHT:
        x[0] = 1.0f;
        break;
    default:
        break; /* all keys weigh the same */
    }
    return 1;
}

/* One position per row, another for each. */
static int32_t picked(int64_t bound)
{
    return (int32_t)((bound * 2654435761 >> 7) % bound);
}

static void ids_one(int32_t req_id, int64_t bound, int32_t topk, int32_t *out)
{
    (void)req_id;
    for (int32_t i = 0; i < topk; i++) {
        out[i] = i == topk / 2 ? picked(bound) : -1;
    }
}

static scenario position_scenario(int32_t dcp, kvs_attend how)
{
    static const int64_t seq[] = {300, 70, 650};
    static const int32_t q[] = {40, 70, 9};
    scenario s = with_requests(3, seq, q);
    s.tp = dcp;
    s.dcp = dcp;
    s.interleave = dcp == 4 ? 16 : 1;
    s.n_head = dcp;
    s.kv = KVS_KV_F32;
    s.how = how;
    s.q_type = KVS_DTYPE_F32;
    s.data = positions;
    return s;
}

static void permuted_pages_keep_every_position(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(k_dcp); i++) {
        for (int32_t m = 0; m < 4; m++) {
            scenario s = position_scenario(k_dcp[i], m < 3 ? k_forms[m] : KVS_ATTEND_SPARSE);
            s.topk = m == 0 ? 5 : 64;
            s.select = m == 0 ? WORLD_IDS : WORLD_INDEXER;
            s.ids = ids_one;
            s.n_index_head = m == 3 ? 1 : 0;
            outcome o;
            world_run(&s, &o);
            int32_t row = 0;
            for (int32_t b = 0; b < 3; b++) {
                for (int32_t j = 0; j < s.q_len[b]; j++, row++) {
                    const int64_t bound = s.seq_len[b] - s.q_len[b] + j + 1;
                    double want = (double)(bound - 1) / 2; /* the mean of all */
                    if (m == 0) {
                        want = picked(bound);
                    } else if (m == 3) {
                        /* the last 64 have the largest scores */
                        const int64_t first = bound > 64 ? bound - 64 : 0;
                        want = (double)(first + bound - 1) / 2;
                        for (int64_t k = first; k < bound; k++) {
                            assert_int_equal(o.ids[(int64_t)row * 64 + k - first], k);
                        }
                    }
                    for (int32_t h = 0; h < s.n_head; h++) {
                        const float *v = o.out + ((int64_t)row * s.n_head + h) * 512;
                        assert_true(fabs((double)v[0] - want) < (m == 0 ? 1e-30 : 1e-3));
                        assert_true(fabsf(v[1] - (float)b) < 1e-5f);
                    }
                }
            }
            outcome_fini(&o);
        }
    }
}

/* More rows than one exchange holds: those of a later one belong to other requests. */
static void later_rows_keep_their_requests(void **state)
{
    (void)state;
    static const int64_t seq[] = {50, 30, 21};
    static const int32_t q[] = {50, 30, 21};
    scenario s = with_requests(3, seq, q);
    s.tp = 1;
    s.n_head = 128; /* 64 rows of them make an exchange */
    s.kv = KVS_KV_F32;
    s.how = KVS_ATTEND_DENSE;
    s.n_index_head = 0;
    s.q_type = KVS_DTYPE_F32;
    s.data = positions;
    outcome o;
    world_run(&s, &o);
    int32_t row = 0;
    for (int32_t b = 0; b < 3; b++) {
        for (int32_t j = 0; j < q[b]; j++, row++) {
            for (int32_t h = 0; h < s.n_head; h++) {
                const float *v = o.out + ((int64_t)row * s.n_head + h) * 512;
                assert_true(fabs((double)v[0] - j / 2.0) < 1e-4);
                assert_true(fabsf(v[1] - (float)b) < 1e-5f);
            }
        }
    }
    outcome_fini(&o);
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_page_is_the_last_one_read),
        cmocka_unit_test(the_last_page_of_the_pool_is_used),
        cmocka_unit_test(tables_of_any_stride_keep_their_rows),
        cmocka_unit_test(a_smaller_step_sees_nothing_of_a_larger_one),
        cmocka_unit_test(head_counts_work_or_are_refused),
        cmocka_unit_test(permuted_pages_keep_every_position),
        cmocka_unit_test(later_rows_keep_their_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
