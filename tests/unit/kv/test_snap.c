/* Snapshots: what is in the file, any DCP size reads what any wrote, and writers that fail
 * together. */
#include "unit/unit.h"

#include <signal.h>
#include <sys/resource.h>

#include "base/hash.h"
#include "base/mem.h"
#include "kv/snap.h"
#include "unit/comm/ranks.h"
#include "unit/kv/shards.h"

enum { N_PAGE = 24 };

static const shape shapes[] = {
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 2, 2, 0},  {KVS_KV_BF16, KVS_INDEX_FP8, 2, 1, 1},
    {KVS_KV_F32, KVS_INDEX_F32, 1, 1, 0},         {KVS_KV_F32, KVS_INDEX_FP8, 1, 1, 0},
    {KVS_KV_BF16, KVS_INDEX_F32, 1, 1, 0},        {KVS_KV_FP8, KVS_INDEX_AUTO, 3, 0, 0},
    {KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, 1, 0, 0}, {KVS_KV_BF16, KVS_INDEX_AUTO, 2, 0, 0},
};

static const uint64_t model[2] = {0x1122334455667788, 0x99AABBCCDDEEFF00};

typedef struct write_job {
    const char *path;
    const shape *s;
    int32_t interleave;
    int64_t n_page;
    int64_t n_token;
    int64_t width;
    const int32_t *table;
    const int32_t *tokens;
} write_job;

static void write_rank(rank_job *job)
{
    const write_job *w = job->ctx;
    kvs_cache *c = shard_new(w->s, job->n, w->interleave, job->rank, w->n_page);
    shard_fill(c, w->s, w->table, w->n_token);
    EXPECT_OK(job, snap_write(w->path, job->c, c, w->table, w->width, w->n_token, w->tokens, model,
                              &job->err));
    cache_free(c);
}

static void write_at(const write_job *w, int32_t n)
{
    const comm_config cfg = test_config(LONG_MS);
    write_job own = *w;
    ranks_run(n, &cfg, write_rank, &own);
}

/* Everything behind the header, as docs/snapshot-format.md says. */
static void assert_body(const char *path, const shape *s, int64_t n_token, const int32_t *tokens)
{
    int64_t n = 0;
    uint8_t *data = file_bytes(path, &n);
    assert_non_null(data);
    static uint8_t page[64 * 2304];
    int64_t at = 4096;
    if (tokens != NULL) {
        assert_memory_equal(data + at, tokens, (size_t)n_token * 4);
        at += n_token * 4;
    }
    for (int32_t i = 0; i < s->n_layer + s->n_index; i++) {
        const int index = i >= s->n_layer;
        uint64_t said;
        memcpy(&said, data + 128 + 16 * i, 8);
        assert_int_equal(said, at);
        for (int64_t p = 0; p * 64 < n_token; p++) {
            const int64_t bytes =
                token_page(s, index, index ? i - s->n_layer : i, p, n_token, page);
            assert_true(at + bytes + 8 <= n);
            assert_memory_equal(data + at, page, (size_t)bytes);
            const uint64_t hash = XXH3_64bits(page, (size_t)bytes);
            assert_memory_equal(data + at + bytes, &hash, 8);
            at += bytes + 8;
        }
    }
    assert_int_equal(at, n);
    free(data);
}

static void read_at(const char *path, const shape *s, int32_t n, int32_t interleave,
                    int64_t n_token, const int32_t *tokens)
{
    const int64_t width = (n_token + 64 * n - 1) / (64 * n);
    const int64_t n_page = width + 2;
    int32_t table[70];
    int32_t *ids = malloc(((size_t)n_token + 1) * sizeof *ids);
    table_shuffled(table, width, n_page, (uint64_t)(n * 100 + interleave));
    for (int32_t rank = 0; rank < n; rank++) {
        kvs_cache *got = shard_new(s, n, interleave, rank, n_page);
        kvs_cache *want = shard_new(s, n, interleave, rank, n_page);
        shard_fill(want, s, table, n_token);
        memset(ids, 0x5A, ((size_t)n_token + 1) * sizeof *ids);
        kvs_error err = {0};
        const kvs_status st =
            snap_read(path, got, table, width, model, tokens != NULL ? ids : NULL, n_token, &err);
        if (st != KVS_OK) {
            fail_msg("%s", err.text);
        }
        /* What lies outside the sequence is as it was. */
        assert_int_equal(shard_differs(got, want), -1);
        assert_true(tokens == NULL || memcmp(ids, tokens, (size_t)n_token * 4) == 0);
        assert_int_equal(ids[n_token], 0x5A5A5A5A);
        cache_free(got);
        cache_free(want);
    }
    free(ids);
}

static void any_dcp_reads_what_any_wrote(void **state)
{
    (void)state;
    static const int32_t ns[] = {1, 2, 4, 8};
    static const int32_t is[] = {1, 8, 64};
    static const int64_t lens[] = {0, 1, 63, 64, 65, 127, 128, 129, 511, 512, 513};
    static int32_t ids[513];
    for (int32_t t = 0; t < 513; t++) {
        ids[t] = (t * 7919) % 129280;
    }
    int32_t turn = 0;
    for (size_t k = 0; k < UNIT_COUNT(shapes); k++) {
        for (size_t a = 0; a < UNIT_COUNT(lens); a += unit_valgrind() ? 3 : 1) {
            for (size_t b = 0; b < UNIT_COUNT(ns); b++, turn++) {
                /* Interleaves take turns; over the lengths every N meets every I. Formats behind
                 * the second share the cases. */
                if (k >= 2 && (a + 2 * b + k) % 3 != 0) {
                    continue;
                }
                const int32_t i = is[(a + b + k) % 3];
                const int32_t n = ns[b];
                const int32_t *tokens = turn % 3 != 0 ? ids : NULL;
                const int64_t width = (lens[a] + 64 * n - 1) / (64 * n);
                int32_t table[N_PAGE];
                table_shuffled(table, width, width + 2, (uint64_t)turn);
                const char *path = test_path("a.kvs");
                const write_job w = {path, &shapes[k], i, width + 2, lens[a], width, table, tokens};
                write_at(&w, n);
                assert_body(path, &shapes[k], lens[a], tokens);
                for (size_t m = 0; m < UNIT_COUNT(ns); m++) {
                    if (k < 2 || (size_t)turn % 4 == m) {
                        read_at(path, &shapes[k], ns[m], is[(a + m) % 3], lens[a], tokens);
                    }
                }
            }
        }
    }
    test_dir_remove();
}

/* Several chunks of writing and several batches of reading, and an N that is no power of two. */
static void long_sequences_and_odd_sizes(void **state)
{
    (void)state;
    static const struct {
        int32_t n, i, m, j;
        int64_t n_token;
    } cases[] = {{1, 1, 8, 2, 1100}, {8, 2, 1, 1, 4200}, {3, 4, 5, 16, 2500}, {2, 64, 7, 1, 1025}};
    for (size_t k = 0; k < UNIT_COUNT(cases); k++) {
        const shape *s = &shapes[k % 2];
        const int64_t width = (cases[k].n_token + 64 * cases[k].n - 1) / (64 * cases[k].n);
        int32_t table[2 * N_PAGE];
        table_shuffled(table, width, N_PAGE, k);
        const char *path = test_path("long.kvs");
        const write_job w = {path, s, cases[k].i, N_PAGE, cases[k].n_token, width, table, NULL};
        write_at(&w, cases[k].n);
        assert_body(path, s, cases[k].n_token, NULL);
        read_at(path, s, cases[k].m, cases[k].j, cases[k].n_token, NULL);
    }
    test_dir_remove();
}

/* Page 0 offset 3 -> page 1 offset 6, page 1 offset 0 -> page 0 offset 5: row, key and scale go
 * together and nothing else moves. */
static void a_token_that_changes_its_slot_keeps_key_and_scale(void **state)
{
    (void)state;
    static const struct {
        int64_t pos;
        int32_t n, rank, page; /* of the writer */
        int64_t slot, new_slot;
        int32_t new_page;
    } moves[] = {{6, 2, 0, 0, 3, 70, 1}, {5, 8, 5, 1, 64, 5, 0}};
    const shape *s = &shapes[0];
    for (size_t k = 0; k < UNIT_COUNT(moves); k++) {
        const char *path = test_path("move.kvs");
        const write_job w = {path, s, 1, 2, 7, 1, &moves[k].page, NULL};
        write_at(&w, moves[k].n);
        uint8_t row[656];
        uint8_t key[132];
        token_item(s, 0, 1, moves[k].pos, row);
        token_item(s, 1, 1, moves[k].pos, key);
        kvs_cache *from = shard_new(s, moves[k].n, 1, moves[k].rank, 2);
        shard_fill(from, s, &moves[k].page, 7);
        kvs_cache *to = shard_new(s, 1, 1, 0, 2);
        assert_int_equal(snap_read(path, to, &moves[k].new_page, 1, NULL, NULL, 0, NULL), KVS_OK);
        const kvs_cache *both[2] = {from, to};
        for (int side = 0; side < 2; side++) {
            const int64_t slot = side == 0 ? moves[k].slot : moves[k].new_slot;
            const uint8_t *page = both[side]->index_layer[1].keys + slot / 64 * 8448;
            assert_memory_equal(both[side]->layer[1].kv + slot * 656, row, 656);
            assert_memory_equal(page + slot % 64 * 128, key, 128);
            assert_memory_equal(page + 8192 + slot % 64 * 4, key + 128, 4);
        }
        cache_free(from);
        cache_free(to);
    }
    test_dir_remove();
}

static void stat_tells_what_was_written(void **state)
{
    (void)state;
    const int32_t table[1] = {5};
    int32_t ids[70];
    for (int32_t t = 0; t < 70; t++) {
        ids[t] = 3 * t;
    }
    const char *path = test_path("stat.kvs");
    const write_job w = {path, &shapes[1], 16, N_PAGE, 70, 1, table, ids};
    write_at(&w, 4);
    kvs_snapshot_info info;
    memset(&info, 0x77, sizeof info);
    assert_int_equal(snap_stat(path, &info, NULL), KVS_OK);
    const XXH128_hash_t ids_hash = XXH3_128bits(ids, sizeof ids);
    assert_int_equal(info.kv, KVS_KV_BF16);
    assert_int_equal(info.index_kv, KVS_INDEX_FP8);
    assert_int_equal(info.hadamard, 1);
    assert_int_equal(info.n_layer, 2);
    assert_int_equal(info.n_index_layer, 1);
    assert_int_equal(info.writer_dcp, 4);
    assert_int_equal(info.writer_interleave, 16);
    assert_int_equal(info.n_token, 70);
    assert_true(info.k_scale[0] == 1.0f && info.k_scale[1] == 1.0f);
    const write_job fp8 = {path, &shapes[5], 16, N_PAGE, 70, 1, table, ids};
    write_at(&fp8, 4);
    kvs_snapshot_info with_scales;
    assert_int_equal(snap_stat(path, &with_scales, NULL), KVS_OK);
    kvs_cache *c = shard_new(&shapes[5], 2, 1, 0, 1);
    assert_int_equal(with_scales.n_layer, 3);
    for (int32_t i = 0; i < 3; i++) {
        assert_true(with_scales.k_scale[i] == c->layer[i].k_scale && with_scales.k_scale[i] != 0.0f);
    }
    cache_free(c);
    assert_memory_equal(info.model_hash, model, sizeof model);
    assert_true(info.token_hash[0] == ids_hash.low64 && info.token_hash[1] == ids_hash.high64);
    test_dir_remove();
}

/* ---- ranks that cannot go on ---------------------------------------------------------------- */

typedef struct fail_job {
    const char *path;
    kvs_status want;
    const char *says;
    int32_t odd; /* the rank that differs */
    int what;
} fail_job;

enum {
    ALL_WELL,
    PATH_NULL,
    CACHE_NULL,
    TABLE_SHORT,
    TABLE_FOREIGN,
    TOKEN_NEGATIVE,
    LEN_NEGATIVE,
    OTHER_LEN,
    OTHER_TABLE,
    OTHER_TOKENS,
    OTHER_MODEL,
    OTHER_INTERLEAVE,
    OTHER_FORMAT,
    OTHER_SCALE,
    OTHER_RANK,
    GONE
};

static void failing_rank(rank_job *job)
{
    const fail_job *f = job->ctx;
    const bool odd = job->rank == f->odd;
    const int what = odd ? f->what : ALL_WELL;
    const shape *s = what == OTHER_FORMAT ? &shapes[7] : &shapes[5];
    const int32_t rank = what == OTHER_RANK ? (job->rank + 1) % job->n : job->rank;
    kvs_cache *c = shard_new(s, job->n, what == OTHER_INTERLEAVE ? 2 : 1, rank, N_PAGE);
    int32_t table[2] = {1, what == OTHER_TABLE ? 3 : 2};
    int32_t tokens[200] = {0};
    const uint64_t other[2] = {1, 2};
    tokens[150] = what == OTHER_TOKENS ? 4 : what == TOKEN_NEGATIVE ? -4 : 0;
    table[1] = what == TABLE_FOREIGN ? N_PAGE : table[1];
    if (what == OTHER_SCALE) {
        c->layer[2].k_scale = 4.0f;
    }
    if (what == GONE) {
        comm_close(job->c);
        job->c = NULL;
    } else {
        const int64_t len = what == OTHER_LEN ? 199 : what == LEN_NEGATIVE ? -1 : 200;
        const kvs_status st =
            snap_write(what == PATH_NULL ? NULL : f->path, job->c, what == CACHE_NULL ? NULL : c,
                       table, what == TABLE_SHORT ? 1 : 2, len, tokens,
                       what == OTHER_MODEL ? other : model, &job->err);
        if (st != f->want || !rank_says(job, f->says)) {
            rank_note(job, __FILE__, __LINE__, "case %d: %s \"%s\", not \"%s\"", f->what,
                      kvs_status_name(st), job->err.text, f->says);
        }
    }
    cache_free(c);
}

static void run_failing(const char *path, int what, int32_t odd, kvs_status want, const char *says)
{
    fail_job f = {path, want, says, odd, what};
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, failing_rank, &f);
}

static void one_ranks_refusal_is_every_ranks(void **state)
{
    (void)state;
    static const struct {
        int what;
        const char *says;
    } cases[] = {
        {PATH_NULL, "path is NULL"},
        {CACHE_NULL, "cache is NULL"},
        {TABLE_SHORT, "200 tokens need 2"},
        {TABLE_FOREIGN, "entry 1 is page 24"},
        {TOKEN_NEGATIVE, "token id -4 at position 150"},
        {LEN_NEGATIVE, "length -1"},
        {OTHER_LEN, "n_token"},
        {OTHER_TABLE, "block table"},
        {OTHER_TOKENS, "token ids"},
        {OTHER_MODEL, "model hash"},
        {OTHER_INTERLEAVE, "interleave"},
        {OTHER_FORMAT, "cache tag"},
        {OTHER_SCALE, "k_scale"},
        {OTHER_RANK, "DCP group"},
    };
    const char *path = test_path("kept.kvs");
    const uint8_t old[3] = {1, 2, 3};
    file_put(path, old, 3);
    for (size_t k = 0; k < UNIT_COUNT(cases); k++) {
        for (int32_t odd = 0; odd < 2; odd++) {
            run_failing(path, cases[k].what, odd, KVS_INVALID, cases[k].says);
            if (cases[k].what < OTHER_LEN) {
                char who[20];
                snprintf(who, sizeof who, "rank %d: ", (int)odd);
                run_failing(path, cases[k].what, odd, KVS_INVALID, who);
            }
        }
    }
    run_failing(path, GONE, 1, KVS_PEER, "rank 1");
    run_failing(path, GONE, 0, KVS_PEER, "rank 0");
    int64_t n = 0;
    uint8_t *now = file_bytes(path, &n);
    assert_int_equal(n, 3);
    assert_memory_equal(now, old, 3);
    free(now);
    assert_int_equal(test_dir_files(), 1);
    test_dir_remove();
}

static void a_failed_disk_is_known_to_every_rank(void **state)
{
    (void)state;
    run_failing(test_path("none/a.kvs"), ALL_WELL, 0, KVS_IO, "rank 0: ");
    assert_int_equal(test_dir_files(), 0);
    const char *path = test_path("full.kvs");
    const uint8_t old[3] = {1, 2, 3};
    file_put(path, old, 3);
    /* The disk is full after the header; inside the first section; in its middle; in the last. */
    static const rlim_t limits[] = {100, 5000, 4096 + 800 + 36872, 4096 + 800 + 9 * 36872};
    struct rlimit was;
    getrlimit(RLIMIT_FSIZE, &was);
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (size_t k = 0; k < UNIT_COUNT(limits); k++) {
        const struct rlimit now = {limits[k], was.rlim_max};
        setrlimit(RLIMIT_FSIZE, &now);
        run_failing(path, ALL_WELL, 0, KVS_IO, "rank 0: ");
        setrlimit(RLIMIT_FSIZE, &was);
        int64_t n = 0;
        uint8_t *left = file_bytes(path, &n);
        assert_int_equal(n, 3);
        assert_memory_equal(left, old, 3);
        free(left);
        assert_int_equal(test_dir_files(), 1);
    }
    signal(SIGXFSZ, handler);
    test_dir_remove();
}

/* ---- no memory ------------------------------------------------------------------------------ */

static void no_memory_leaves_the_old_file_or_the_new(void **state)
{
    (void)state;
    const shape *s = &shapes[0];
    const comm_config cfg = test_config(LONG_MS);
    const int32_t table[3] = {4, 0, 2};
    const char *path = test_path("mem.kvs");
    const write_job w = {path, s, 1, 5, 150, 3, table, NULL};
    write_at(&w, 1);
    int64_t n_want = 0;
    uint8_t *want = file_bytes(path, &n_want);
    const uint8_t old[3] = {1, 2, 3};
    kvs_cache *c = shard_new(s, 1, 1, 0, 5);
    shard_fill(c, s, table, 150);
    const mem_stats before = mem_stats_get();
    int64_t fail = 0;
    for (kvs_status st = KVS_NOMEM; st != KVS_OK;) {
        comm *cm = NULL;
        kvs_error err = {0};
        file_put(path, old, 3);
        assert_int_equal(comm_self_open(&cm, &cfg, NULL), KVS_OK);
        mem_fail_after(++fail);
        st = snap_write(path, cm, c, table, 3, 150, NULL, model, &err);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        comm_close(cm);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
        assert_int_equal(test_dir_files(), 1);
        int64_t n = 0;
        uint8_t *now = file_bytes(path, &n);
        if (st == KVS_OK) {
            assert_false(fired);
        } else {
            assert_true(st == KVS_NOMEM || st == KVS_PEER);
            assert_true(err.text[0] != '\0');
        }
        assert_true((st != KVS_OK && n == 3 && memcmp(now, old, 3) == 0) ||
                    (n == n_want && memcmp(now, want, (size_t)n) == 0));
        free(now);
    }
    assert_true(fail > 5);
    fail = 0;
    for (kvs_status st = KVS_NOMEM; st != KVS_OK;) {
        mem_fail_after(++fail);
        st = snap_read(path, c, table, 3, NULL, NULL, 0, NULL);
        mem_fail_after(0);
        assert_true(st == KVS_OK || st == KVS_NOMEM);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
    }
    assert_int_equal(fail, 3); /* the path, the pages */
    kvs_snapshot_info info;
    mem_fail_after(1);
    assert_int_equal(snap_stat(path, &info, NULL), KVS_NOMEM);
    mem_fail_after(0);
    cache_free(c);
    free(want);
    test_dir_remove();
}

static void two_ranks_write_or_get_an_error(rank_job *job)
{
    const write_job *w = job->ctx;
    kvs_cache *c = NULL;
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = KVS_KV_BF16;
    cfg.n_layer = 2;
    cfg.n_page = 5;
    cfg.dcp = 2;
    cfg.rank = job->rank;
    if (cache_create(&c, &cfg, &job->err) != KVS_OK) {
        comm_abort(job->c, job->err.text);
        return;
    }
    const kvs_status st =
        snap_write(w->path, job->c, c, w->table, w->width, w->n_token, NULL, model, &job->err);
    if (st != KVS_OK && (st != job->err.code || (st != KVS_NOMEM && st != KVS_PEER))) {
        rank_note(job, __FILE__, __LINE__, "%s: \"%s\"", kvs_status_name(st), job->err.text);
    }
    cache_free(c);
}

static void no_memory_on_any_rank_ends_the_write(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    const int32_t table[2] = {4, 0};
    const char *path = test_path("mem2.kvs");
    write_job w = {path, &shapes[7], 1, 5, 150, 2, table, NULL};
    const mem_stats before = mem_stats_get();
    for (int64_t fail = 1;; fail++) {
        comm *ends[2];
        assert_int_equal(comm_thread_open(ends, 2, &cfg, NULL), KVS_OK);
        mem_fail_after(fail);
        ranks_run_on(ends, 2, two_ranks_write_or_get_an_error, &w);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
        if (!fired) {
            break;
        }
        kvs_snapshot_info info;
        if (test_dir_files() != 0) { /* it failed after the file was in place */
            assert_int_equal(test_dir_files(), 1);
            assert_int_equal(snap_stat(path, &info, NULL), KVS_OK);
            remove(path);
        }
    }
    test_dir_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_dcp_reads_what_any_wrote),
        cmocka_unit_test(long_sequences_and_odd_sizes),
        cmocka_unit_test(a_token_that_changes_its_slot_keeps_key_and_scale),
        cmocka_unit_test(stat_tells_what_was_written),
        cmocka_unit_test(one_ranks_refusal_is_every_ranks),
        cmocka_unit_test(a_failed_disk_is_known_to_every_rank),
        cmocka_unit_test(no_memory_leaves_the_old_file_or_the_new),
        cmocka_unit_test(no_memory_on_any_rank_ends_the_write),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
