/* Every formula of shard.h against a dealer that hands out tokens one by one, as cards are dealt.
 *
 * The dealer knows no division: it gives I tokens to a rank, moves to the next, starts again after
 * the last, and takes a new page on every rank whenever one rank has filled its own. Small lengths
 * are compared exhaustively; large ones through the period of the deal (I * N tokens) at random. */
#include "unit/unit.h"

#include "base/rng.h"
#include "shard/shard.h"

enum { MAX_LEN = 1024, MAX_PAGE = MAX_LEN, N_RANDOM = 1000000 };

static const int32_t interleaves[] = {1, 2, 4, 8, 16, 32, 64};

/* Deals to `n` players, `i` in a run. */
typedef struct dealer {
    int32_t n, i;
    int32_t player, given;
} dealer;

static int32_t deal(dealer *d)
{
    if (d->given == d->i) {
        d->given = 0;
        d->player = d->player + 1 == d->n ? 0 : d->player + 1;
    }
    d->given++;
    return d->player;
}

typedef struct sim {
    int32_t n, i, n_lane;
    int32_t owner[MAX_LEN];
    int32_t lane[MAX_LEN];       /* 0..7 */
    int32_t local_lane[MAX_LEN]; /* of its owner */
    int64_t local[MAX_LEN];
    int64_t lane_k[MAX_LEN]; /* index in the list of its (owner, local lane) */
    int64_t slot[MAX_LEN];
    int64_t len[8][MAX_LEN + 1];         /* [rank][tokens dealt] */
    int64_t lane_len[8][8][MAX_LEN + 1]; /* [rank][local lane][tokens dealt] */
    int64_t width[MAX_LEN + 1];
    int32_t table[MAX_PAGE];
} sim;

static sim the_sim; /* a megabyte and more: too large for the stack */

static void sim_run(sim *s, int32_t n, int32_t i)
{
    memset(s, 0, sizeof *s);
    s->n = n;
    s->i = i;
    s->n_lane = n == 1 ? 8 : n == 2 ? 4 : n == 4 ? 2 : 1;
    dealer ranks = {n, i, 0, 0};
    dealer lanes = {8, i, 0, 0};
    int32_t lane_owner[8]; /* local lane of each of the 8: counted as the owner meets them */
    int32_t lane_local[8];
    int32_t n_met[8] = {0};
    memset(lane_owner, -1, sizeof lane_owner);
    int64_t page_used[8] = {0};
    int64_t n_entry = 0;
    int32_t page[8] = {0};
    for (int32_t p = 0; p < MAX_PAGE; p++) {
        s->table[p] = (p * 7 + 3) % 1031; /* page ids in no order */
    }
    for (int64_t p = 0; p < MAX_LEN; p++) {
        const int32_t r = deal(&ranks);
        const int32_t l = deal(&lanes);
        int32_t ll = 0;
        if (s->n_lane > 1 || n == 8) {
            if (lane_owner[l] < 0) {
                lane_owner[l] = r;
                lane_local[l] = n_met[r]++;
            }
            assert_int_equal(lane_owner[l], r); /* a lane lies whole in one rank */
            ll = lane_local[l];
        }
        for (int32_t q = 0; q < n; q++) {
            s->len[q][p + 1] = s->len[q][p];
            for (int32_t j = 0; j < s->n_lane; j++) {
                s->lane_len[q][j][p + 1] = s->lane_len[q][j][p];
            }
        }
        s->owner[p] = r;
        s->lane[p] = l;
        s->local_lane[p] = ll;
        s->local[p] = s->len[r][p + 1]++;
        s->lane_k[p] = s->lane_len[r][ll][p + 1]++;
        /* a rank with no room in its last page turns to the next entry, new or not */
        if (s->local[p] == 0 || page_used[r] == 64) {
            page[r] = s->local[p] == 0 ? 0 : page[r] + 1;
            page_used[r] = 0;
            n_entry = page[r] + 1 > n_entry ? page[r] + 1 : n_entry;
        }
        s->slot[p] = (int64_t)s->table[page[r]] * 64 + page_used[r]++;
        s->width[p + 1] = n_entry;
    }
}

static void each_sim(void (*check)(const sim *s))
{
    for (int32_t n = 1; n <= 8; n++) {
        for (size_t k = 0; k < UNIT_COUNT(interleaves); k++) {
            sim_run(&the_sim, n, interleaves[k]);
            check(&the_sim);
        }
    }
}

static shard_geom geom(const sim *s, int32_t rank)
{
    const shard_geom g = {s->n, s->i, rank};
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

static void check_tokens(const sim *s)
{
    const shard_geom any = geom(s, 0);
    assert_int_equal(shard_n_lane(any), s->n_lane);
    for (int64_t p = 0; p < MAX_LEN; p++) {
        const int32_t r = s->owner[p];
        const kvs_local l = shard_local(any, pos(p));
        assert_int_equal(shard_owner(any, pos(p)), r);
        assert_int_equal(l.v, s->local[p]);
        assert_int_equal(shard_pos(geom(s, r), l).v, p);
        assert_int_equal(shard_lane(any, pos(p)), s->lane[p]);
        const int32_t ll = shard_lane_of_local(s->n_lane, s->i, l);
        assert_int_equal(ll, s->local_lane[p]);
        if (8 % s->n == 0) {
            assert_int_equal(ll * s->n + r, s->lane[p]);
        }
        assert_int_equal(shard_lane_key(s->n_lane, s->i, ll, s->lane_k[p]).v, s->local[p]);
    }
}

static void check_lengths(const sim *s)
{
    for (int64_t len = 0; len <= MAX_LEN; len++) {
        int64_t sum = 0;
        int64_t most = 0;
        for (int32_t r = 0; r < s->n; r++) {
            const int64_t n = shard_len(geom(s, r), len);
            assert_int_equal(n, s->len[r][len]);
            sum += n;
            most = n > most ? n : most;
            int64_t lane_sum = 0;
            for (int32_t j = 0; j < s->n_lane; j++) {
                const int64_t k = shard_lane_len(s->n_lane, s->i, j, n);
                assert_int_equal(k, s->lane_len[r][j][len]);
                lane_sum += k;
            }
            assert_int_equal(lane_sum, n);
            assert_int_equal(shard_len_max(geom(s, r), len), s->len[0][len]);
        }
        assert_int_equal(sum, len);
        assert_int_equal(most, s->len[0][len]);
    }
}

static void check_tables(const sim *s)
{
    const shard_geom any = geom(s, 0);
    assert_int_equal(shard_span(any), 64 * s->n);
    for (int64_t len = 0; len <= MAX_LEN; len++) {
        assert_int_equal(shard_table_width(any, len), s->width[len]);
    }
    for (int64_t p = 0; p < MAX_LEN; p++) {
        const int64_t width = shard_table_width(any, p + 1);
        const kvs_local l = shard_local(any, pos(p));
        assert_int_equal(shard_slot(s->table, l).v, s->slot[p]);
        for (int32_t r = 0; r < s->n; r++) {
            const int64_t want = r == s->owner[p] ? s->slot[p] : -1;
            const shard_geom g = geom(s, r);
            assert_int_equal(shard_write_slot(g, s->table, width, 1031 * 64, pos(p)).v, want);
        }
    }
}

/* Bounds of n query tokens, each localised on its own; padding rows give 0. */
static void check_bounds(const sim *s)
{
    for (int64_t len = 0; len <= MAX_LEN; len++) {
        for (int64_t n = 1; n <= 8; n++) {
            for (int64_t j = 0; j < n; j++) {
                int64_t seen = len + j + 1 - n; /* tokens dealt when token j is the newest */
                seen = seen > 0 ? seen : 0;
                assert_int_equal(shard_bound(len, n, j), seen);
                for (int32_t r = 0; r < s->n; r++) {
                    assert_int_equal(shard_local_bound(geom(s, r), len, n, j), s->len[r][seen]);
                }
            }
        }
    }
}

static void check_ranges(const sim *s)
{
    for (int64_t begin = 0; begin <= MAX_LEN; begin += 7) {
        for (int64_t end = begin; end <= MAX_LEN; end += 5) {
            int64_t most = 0;
            for (int32_t r = 0; r < s->n; r++) {
                const int64_t n = s->len[r][end] - s->len[r][begin];
                most = n > most ? n : most;
            }
            assert_int_equal(shard_range_max(geom(s, s->n - 1), begin, end), most);
        }
    }
}

static void tokens_as_dealt(void **state)
{
    (void)state;
    each_sim(check_tokens);
}

static void lengths_as_dealt(void **state)
{
    (void)state;
    each_sim(check_lengths);
}

static void tables_as_dealt(void **state)
{
    (void)state;
    each_sim(check_tables);
}

static void bounds_as_dealt(void **state)
{
    (void)state;
    each_sim(check_bounds);
}

static void ranges_as_dealt(void **state)
{
    (void)state;
    each_sim(check_ranges);
}

/* The deal repeats after I * N tokens, so position q * I * N + p is token p of round q; the lanes
 * repeat after 8 * I. */
static void check_random(const sim *s, rng *rnd, int32_t n_draw)
{
    const int64_t round = (int64_t)s->i * s->n;
    for (int32_t t = 0; t < n_draw; t++) {
        const int bits = (int)rng_next_range(rnd, 1, 33); /* every magnitude up to 2^33 */
        const int64_t v = rng_next_range(rnd, 0, INT64_C(1) << bits);
        const int64_t q = v / round;
        const int64_t p = v - q * round;
        const int32_t r = s->owner[p];
        const shard_geom g = geom(s, r);
        const int64_t local = q * s->i + s->local[p];
        const int64_t lane_round = v / (8 * (int64_t)s->i);
        int ok = shard_owner(g, pos(v)) == r && shard_local(g, pos(v)).v == local &&
                 shard_pos(g, loc(local)).v == v &&
                 shard_lane(g, pos(v)) == s->lane[v - lane_round * 8 * s->i];
        int64_t sum = 0;
        for (int32_t k = 0; k < s->n; k++) {
            const int64_t len = shard_len(geom(s, k), v);
            ok = ok && len == q * s->i + s->len[k][p];
            sum += len;
        }
        ok = ok && sum == v;
        /* the lane lists of a rank repeat after i * n_lane of its tokens */
        const int64_t list_round = local / ((int64_t)s->i * s->n_lane);
        const int32_t ll = shard_lane_of_local(s->n_lane, s->i, loc(local));
        ok = ok && (s->n_lane == 1 || ll * s->n + r == shard_lane(g, pos(v)));
        const int64_t k = shard_lane_len(s->n_lane, s->i, ll, local);
        ok = ok && k == list_round * s->i + local % s->i &&
             shard_lane_key(s->n_lane, s->i, ll, k).v == local;
        const int64_t width = shard_table_width(g, v + 1);
        ok = ok && width * 64 * s->n > v && (width - 1) * 64 * s->n <= v;
        if (!ok) {
            fail_msg("seed 0 stream %llu: n %d i %d position %lld", (unsigned long long)rnd->stream,
                     s->n, s->i, (long long)v);
        }
    }
}

static void random_positions_as_dealt(void **state)
{
    (void)state;
    const int32_t per_case = N_RANDOM / (8 * (int32_t)UNIT_COUNT(interleaves)) + 1;
    for (int32_t n = 1; n <= 8; n++) {
        for (size_t k = 0; k < UNIT_COUNT(interleaves); k++) {
            rng rnd = rng_init(0, (uint64_t)n * 16 + k);
            sim_run(&the_sim, n, interleaves[k]);
            check_random(&the_sim, &rnd, per_case);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_as_dealt), cmocka_unit_test(lengths_as_dealt),
        cmocka_unit_test(tables_as_dealt), cmocka_unit_test(bounds_as_dealt),
        cmocka_unit_test(ranges_as_dealt), cmocka_unit_test(random_positions_as_dealt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
