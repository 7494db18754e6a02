/* Every variant of localise against a plain walk over positions: selections in order and out of it,
 * repeated, past the bound, outside the table; all group sizes and interleaves. */
#include "unit/unit.h"

#include <math.h>

#include "kern_x86.h"
#include "shard/shard.h"

enum { K = 300, LEN = 5000, WIDTH = 100, STRIDE = K + 7 };

typedef struct pick {
    int32_t id[K];
    float score[K];
    int32_t count, bound;
} pick;

static void make_pick(pick *p, rng *r, bool ascending, bool dirty)
{
    p->count = (int32_t)rng_next_range(r, 0, K);
    p->bound = LEN - 40;
    int32_t at = 0;
    for (int32_t i = 0; i < p->count; i++) {
        at = ascending ? at + 1 + (int32_t)rng_next_below(r, 2 * LEN / K - 2)
                       : (int32_t)rng_next_below(r, LEN);
        p->id[i] = at;
        p->score[i] = (float)rng_next_below(r, 4);
        if (dirty && rng_next(r) % 8 == 0) {
            static const int32_t odd[] = {-1, -5, LEN - 40, LEN + 9, INT32_MAX};
            p->id[i] = odd[rng_next_below(r, UNIT_COUNT(odd))];
        }
        if (dirty && i > 0 && rng_next(r) % 8 == 0) {
            p->id[i] = p->id[i - 1];
        }
    }
}

/* What a rank keeps: every position in order, if some entry names it. */
static int32_t walk(const pick *p, shard_geom g, const int32_t *table, bool cut, int32_t *slots,
                    int32_t *lane_count, uint64_t *n_bad)
{
    const int32_t n_lane = shard_n_lane(g);
    int32_t n = 0;
    int32_t n_seen[LEN] = {0};
    for (int32_t i = 0; i < p->count; i++) {
        const bool in = !cut || p->score[i] > 2.0f || (p->score[i] == 2.0f && p->id[i] <= 2500);
        if (p->id[i] == -1 || !in) {
            continue;
        }
        if (p->id[i] < 0 || p->id[i] >= p->bound) {
            ++*n_bad;
        } else {
            n_seen[p->id[i]]++;
        }
    }
    for (int32_t lane = 0; lane < n_lane; lane++) {
        lane_count[lane] = 0;
        for (int32_t pos = 0; pos < p->bound; pos++) {
            if (n_seen[pos] == 0 || shard_owner(g, (kvs_pos){pos}) != g.rank ||
                (n_lane > 1 && shard_lane(g, (kvs_pos){pos}) != lane * g.n + g.rank)) {
                continue;
            }
            const int64_t local = shard_local(g, (kvs_pos){pos}).v;
            const int32_t page = local / 64 < WIDTH ? table[local / 64] : -1;
            const bool ok = page >= 0 && page < WIDTH - 3;
            *n_bad += (uint64_t)(n_seen[pos] - (ok ? 1 : 0));
            if (ok) {
                slots[n++] = page * 64 + (int32_t)(local % 64);
                lane_count[lane]++;
            }
        }
    }
    return n;
}

static void one_geom(const kern_table *t, const char *name, shard_geom g, uint64_t seed)
{
    enum { N_ROW = 8 };
    rng r = rng_init(seed, 1);
    int32_t table[WIDTH];
    for (int32_t i = 0; i < WIDTH; i++) {
        table[i] = (i * 37 + 11) % WIDTH; /* the last three lie outside the pool */
    }
    table[1] = -1;
    static pick p[N_ROW];
    static int32_t id[N_ROW * STRIDE];
    static float score[N_ROW * STRIDE];
    int32_t count[N_ROW];
    int32_t bound[N_ROW];
    int32_t row_req[N_ROW] = {0};
    float cut_score[N_ROW];
    int32_t cut_id[N_ROW];
    for (int32_t i = 0; i < N_ROW; i++) {
        make_pick(&p[i], &r, i % 2 == 0, i % 4 >= 2);
        memcpy(id + i * STRIDE, p[i].id, sizeof p[i].id);
        memcpy(score + i * STRIDE, p[i].score, sizeof p[i].score);
        count[i] = p[i].count;
        bound[i] = p[i].bound;
        cut_score[i] = 2.0f;
        cut_id[i] = 2500;
    }
    for (int cut = 0; cut < 2; cut++) {
        static int32_t slots[N_ROW * STRIDE];
        int32_t lane_count[N_ROW * KVS_LANES];
        uint64_t n_bad = 0;
        localise_args a = {.n_row = N_ROW,
                           .k = K,
                           .id = id,
                           .id_stride = STRIDE,
                           .count = count,
                           .score = score,
                           .cut_score = cut ? cut_score : NULL,
                           .cut_id = cut_id,
                           .dcp = g.n,
                           .interleave = g.i,
                           .rank = g.rank,
                           .table = table,
                           .table_stride = WIDTH,
                           .table_width = WIDTH,
                           .n_req = 1,
                           .n_slot = (WIDTH - 3) * 64,
                           .row_req = row_req,
                           .bound = bound,
                           .slots = slots,
                           .slots_stride = STRIDE,
                           .lane_count = lane_count,
                           .n_bad_id = &n_bad};
        a.scratch_bytes = t->localise_scratch(&a, NULL);
        a.scratch = mem_alloc(a.scratch_bytes, 64);
        t->localise(&a, NULL);
        mem_free(a.scratch);
        uint64_t want_bad = 0;
        const int32_t n_lane = shard_n_lane(g);
        for (int32_t i = 0; i < N_ROW; i++) {
            int32_t want[K];
            int32_t lanes[KVS_LANES];
            const int32_t n = walk(&p[i], g, table, cut != 0, want, lanes, &want_bad);
            for (int32_t s = 0; s < K; s++) {
                if (slots[i * STRIDE + s] != (s < n ? want[s] : -1)) {
                    fail_msg("%s N %d I %d rank %d row %d cut %d seed %llu: slot %d is %d, want %d",
                             name, g.n, g.i, g.rank, i, cut, (unsigned long long)seed, s,
                             slots[i * STRIDE + s], s < n ? want[s] : -1);
                }
            }
            assert_memory_equal(lane_count + i * n_lane, lanes, (size_t)n_lane * sizeof *lanes);
        }
        assert_int_equal(n_bad, want_bad);
    }
}

static void test_localise(void **state)
{
    (void)state;
    kern_table t;
    const char *name = NULL;
    for (int32_t v = 0; (name = table_nth(&t, KERN_OP_localise, v)) != NULL; v++) {
        uint64_t seed = 1;
        for (int32_t n = 1; n <= 8; n++) {
            for (int32_t i = 1; i <= 64; i *= 4) {
                one_geom(&t, name, (shard_geom){n, i, (int32_t)(seed % (uint64_t)n)}, seed);
                seed++;
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_localise)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
