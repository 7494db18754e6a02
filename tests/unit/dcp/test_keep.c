/* Rows of a plan attended in pieces, and selections kept across plans: the same bits as the whole, as the set
 * named by its positions, and as every key where a row has no more than topk. */
#include "unit/unit.h"

#include "base/mem.h"
#include "base/rng.h"
#include "comm/comm.h"
#include "dcp/dcp.h"

enum { HEADS = 4, TOPK = 8, N_REQ = 3, LONG = 110, MID = 40, SHORT = 6, ROWS = LONG + MID + SHORT, WIDTH = 3, N_PAGE = 10 };

typedef struct world {
    kvs_comm *comm;
    kvs_dcp *d;
    kvs_cache *cache;
    float latent[ROWS * 512], rope[ROWS * 64], key[ROWS * 128];
    float q[ROWS * HEADS * 576], iq[ROWS * 2 * 128], iw[ROWS * 2];
    float out[ROWS * HEADS * 512], again[ROWS * HEADS * 512];
} world;

static const int32_t g_table[N_REQ * WIDTH] = {5, 2, 7, 3, 0, 1, 8, 9, 4};

static void fill(rng *r, float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)(rng_next_uniform(r) * 2.0 - 1.0);
    }
}

static kvs_batch batch(const int32_t *q_len, const int64_t *seq_len)
{
    return (kvs_batch){.n_req = N_REQ, .q_len = q_len, .seq_len = seq_len, .table = g_table,
                       .table_stride = WIDTH, .n_page = N_PAGE};
}

/* Three requests, written and selected in one step. */
static world *world_new(void)
{
    world *w = calloc(1, sizeof *w);
    const comm_config cc = {.timeout_ms = 10000};
    assert_int_equal(comm_self_open(&w->comm, &cc, NULL), KVS_OK);
    kvs_dcp_config c = kvs_dcp_config_default();
    c.n_head = HEADS;
    c.n_index_head = 2;
    c.topk = TOPK;
    c.softmax_scale = 0.1f;
    c.kv = KVS_KV_BF16;
    c.max_rows = ROWS;
    c.max_reqs = 4;
    c.max_len = 64 * WIDTH;
    c.trace = 1;
    assert_int_equal(dcp_open(&w->d, &c, w->comm, NULL), KVS_OK);
    kvs_cache_config cc2 = kvs_cache_config_default();
    cc2.kv = KVS_KV_BF16;
    cc2.n_index_layer = 1;
    cc2.n_page = N_PAGE;
    assert_int_equal(cache_create(&w->cache, &cc2, NULL), KVS_OK);
    rng r = rng_init(5, 0);
    fill(&r, w->latent, ROWS * 512);
    fill(&r, w->rope, ROWS * 64);
    fill(&r, w->key, ROWS * 128);
    fill(&r, w->q, ROWS * HEADS * 576);
    fill(&r, w->iq, ROWS * 2 * 128);
    fill(&r, w->iw, ROWS * 2);
    const int32_t q_len[N_REQ] = {LONG, MID, SHORT};
    const int64_t seq_len[N_REQ] = {LONG, MID, SHORT};
    const kvs_batch b = batch(q_len, seq_len);
    assert_int_equal(dcp_plan_batch(w->d, &b, NULL), KVS_OK);
    assert_int_equal(dcp_write(w->d, w->cache, 0, w->latent, w->rope, KVS_DTYPE_F32, NULL), KVS_OK);
    assert_int_equal(dcp_write_index(w->d, w->cache, 0, w->key, KVS_DTYPE_F32, NULL), KVS_OK);
    assert_int_equal(dcp_select(w->d, w->cache, 0, w->iq, KVS_DTYPE_F32, w->iw, NULL), KVS_OK);
    return w;
}

static void world_end(world *w)
{
    assert_int_equal(dcp_finish(w->d, NULL, NULL), KVS_OK);
    dcp_close(w->d);
    cache_free(w->cache);
    comm_close(w->comm);
    free(w);
}

static void attend(world *w, kvs_attend how, float *out)
{
    assert_int_equal(dcp_attend(w->d, w->cache, 0, how, w->q, KVS_DTYPE_F32, out, KVS_DTYPE_F32, NULL,
                                NULL),
                     KVS_OK);
}

static void pieces_are_the_whole(void **state)
{
    (void)state;
    world *w = world_new();
    static const kvs_attend forms[] = {KVS_ATTEND_SPARSE, KVS_ATTEND_DENSE};
    for (int f = 0; f < 2; f++) {
        attend(w, forms[f], w->out);
        for (int32_t row0 = 0, n = 1; row0 < ROWS; row0 += n, n = n * 3 % 50 + 1) {
            n = n < ROWS - row0 ? n : ROWS - row0;
            assert_int_equal(dcp_attend_rows(w->d, w->cache, 0, forms[f], row0, n,
                                             w->q + row0 * HEADS * 576, KVS_DTYPE_F32,
                                             w->again + row0 * HEADS * 512, KVS_DTYPE_F32, NULL),
                             KVS_OK);
        }
        assert_memory_equal(w->out, w->again, sizeof w->out);
    }
    const int32_t bad[][2] = {{-1, 1}, {0, ROWS + 1}, {ROWS, 1}, {3, -1}};
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        assert_int_equal(dcp_attend_rows(w->d, w->cache, 0, KVS_ATTEND_DENSE, bad[i][0], bad[i][1], w->q,
                                         KVS_DTYPE_F32, w->again, KVS_DTYPE_F32, NULL),
                         KVS_INVALID);
    }
    assert_int_equal(dcp_attend_rows(w->d, w->cache, 0, KVS_ATTEND_CONTEXT, 0, 1, w->q, KVS_DTYPE_F32,
                                     w->again, KVS_DTYPE_F32, NULL),
                     KVS_INVALID);
    world_end(w);
}

/* One more token of each request attends what rows 100, 35 and 4 of theirs had selected. */
static void kept_selections_are_the_positions_they_were(void **state)
{
    (void)state;
    world *w = world_new();
    static int32_t ids[ROWS * TOPK];
    static int32_t count[ROWS];
    int32_t slots[N_REQ * TOPK];
    int32_t lanes[N_REQ * KVS_LANES];
    int32_t named[N_REQ * TOPK];
    const int32_t row[N_REQ] = {100, LONG + 35, LONG + MID + 4};
    assert_int_equal(dcp_selection_copy(w->d, ids, count, NULL), KVS_OK);
    assert_int_equal(dcp_selection_keep(w->d, row, N_REQ, slots, lanes, NULL), KVS_OK);
    const int32_t far[1] = {ROWS};
    assert_int_equal(dcp_selection_keep(w->d, far, 1, slots, lanes, NULL), KVS_INVALID);
    const int32_t q_len[N_REQ] = {1, 1, 1};
    const int64_t seq_len[N_REQ] = {LONG + 1, MID + 1, SHORT + 1};
    const kvs_batch b = batch(q_len, seq_len);
    assert_int_equal(dcp_plan_batch(w->d, &b, NULL), KVS_OK);
    assert_int_equal(dcp_selection_keep(w->d, row, 1, slots, lanes, NULL), KVS_INVALID);
    assert_int_equal(dcp_write(w->d, w->cache, 0, w->latent, w->rope, KVS_DTYPE_F32, NULL), KVS_OK);
    for (int32_t i = 0; i < TOPK; i++) {
        named[i] = ids[row[0] * TOPK + i];
        named[TOPK + i] = ids[row[1] * TOPK + i];
        /* the last request has 7 keys: no more than topk, so it attends them all */
        named[2 * TOPK + i] = i <= SHORT ? i : -1;
    }
    assert_int_equal(dcp_set_selection(w->d, named, TOPK, NULL), KVS_OK);
    attend(w, KVS_ATTEND_SPARSE, w->out);
    assert_int_equal(dcp_plan_batch(w->d, &b, NULL), KVS_OK);
    assert_int_equal(dcp_selection_restore(w->d, slots, lanes, N_REQ - 1, NULL), KVS_INVALID);
    assert_int_equal(dcp_selection_restore(w->d, slots, lanes, N_REQ, NULL), KVS_OK);
    attend(w, KVS_ATTEND_SPARSE, w->again);
    assert_memory_equal(w->out, w->again, N_REQ * HEADS * 512 * sizeof(float));
    attend(w, KVS_ATTEND_DENSE, w->again);
    const size_t one = HEADS * 512;
    assert_memory_equal(w->out + 2 * one, w->again + 2 * one, one * sizeof(float));
    assert_memory_not_equal(w->out, w->again, one * sizeof(float));
    assert_memory_not_equal(w->out + one, w->again + one, one * sizeof(float));
    world_end(w);
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_the_whole),
        cmocka_unit_test(kept_selections_are_the_positions_they_were),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
