/* NCCL, loaded at run time: refused by name where it is missing; with a library that stands for it, what its
 * collectives move, that calls are compared, and that late ranks are named. */
#include "unit/unit.h"

#include <pthread.h>
#include "base/log.h"
#include "comm/nccl.h"
#include "comm/nccl_load.h"
#include "unit/comm/fake_dev.h"

enum { N = 3, BYTES = 1000 };

typedef struct rank {
    pthread_t thread;
    comm *host;
    nccl *c;
    int32_t rank;
    void (*body)(struct rank *r);
    kvs_status st;
    kvs_error err;
    uint8_t send[N * BYTES], recv[N * BYTES];
    dev_queue queue;
    bool wrong;
} rank;

static rank g_rank[N];

static void *rank_main(void *arg)
{
    rank *r = arg;
    r->st = nccl_open(&r->c, r->host, r->rank, &r->err);
    if (r->st == KVS_OK) {
        r->body(r);
    }
    return NULL;
}

/* Runs body on N ranks; the ends stay open. */
static void run(void (*body)(rank *r), int32_t timeout_ms)
{
    const comm_config cfg = {.timeout_ms = timeout_ms};
    comm *host[N];
    memset(g_rank, 0, sizeof g_rank);
    assert_int_equal(comm_thread_open(host, N, &cfg, NULL), KVS_OK);
    for (int32_t i = 0; i < N; i++) {
        g_rank[i].host = host[i];
        g_rank[i].rank = i;
        g_rank[i].body = body;
        dev_queue_init(&g_rank[i].queue, NULL);
        assert_int_equal(pthread_create(&g_rank[i].thread, NULL, rank_main, &g_rank[i]), 0);
    }
    for (int32_t i = 0; i < N; i++) {
        pthread_join(g_rank[i].thread, NULL);
    }
}

static void end(void)
{
    for (int32_t i = 0; i < N; i++) {
        nccl_close(g_rank[i].c);
        comm_close(g_rank[i].host);
    }
}

static uint8_t value(int32_t from, size_t i)
{
    return (uint8_t)((size_t)from * 77 + i * 13 + i / 256);
}

/* ---- loading ----------------------------------------------------------------------------------- */

static void a_missing_library_is_named_with_what_would_help(void **state)
{
    (void)state;
    nccl_api api;
    kvs_error err = {0};
    assert_int_equal(nccl_api_load(&api, "libnccl-absent.so.2", &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "libnccl-absent.so.2"));
    assert_non_null(strstr(err.text, "LD_LIBRARY_PATH"));
    assert_null((void *)(uintptr_t)api.all_gather);
    assert_int_equal(nccl_api_load(&api, "libm.so.6", &err), KVS_UNSUPPORTED);
    assert_non_null(strstr(err.text, "libm.so.6 has no ncclGetVersion"));
}

static void the_library_is_loaded_by_its_name(void **state)
{
    (void)state;
    int32_t version = 0;
    assert_int_equal(nccl_load(&version, NULL), KVS_OK);
    assert_int_equal(version, 22809);
    assert_int_equal(nccl_load(NULL, NULL), KVS_OK);
}

/* ---- collectives ------------------------------------------------------------------------------- */

static void move(rank *r)
{
    for (size_t i = 0; i < sizeof r->send; i++) {
        r->send[i] = value(r->rank, i);
    }
    r->st = nccl_all_gather(r->c, r->send, r->recv, BYTES, &r->queue, &r->err);
    for (size_t i = 0; i < sizeof r->recv; i++) {
        r->wrong = r->wrong || r->recv[i] != value((int32_t)(i / BYTES), i % BYTES);
    }
    memset(r->recv, 0, sizeof r->recv);
    r->st = r->st < 0 ? r->st : nccl_all_to_all(r->c, r->send, r->recv, BYTES - 1, &r->queue, &r->err);
    for (size_t i = 0; i < N * (BYTES - 1); i++) {
        const size_t at = (size_t)r->rank * (BYTES - 1) + i % (BYTES - 1);
        r->wrong = r->wrong || r->recv[i] != value((int32_t)(i / (BYTES - 1)), at);
    }
    r->st = r->st < 0 ? r->st : nccl_broadcast(r->c, r->recv, 5, 2, &r->queue, &r->err);
    r->wrong = r->wrong || memcmp(r->recv, (uint8_t[]){value(0, 2 * 999), value(0, 2 * 999 + 1),
                                                       value(0, 2 * 999 + 2), value(0, 2 * 999 + 3),
                                                       value(0, 2 * 999 + 4)}, 5) != 0;
    r->st = r->st < 0 ? r->st : nccl_all_gather(r->c, NULL, NULL, 0, &r->queue, &r->err);
    r->st = r->st < 0 ? r->st : nccl_wait(r->c, &r->queue, &r->err);
}

static void collectives_move_what_they_say(void **state)
{
    (void)state;
    run(move, 20000);
    for (int32_t i = 0; i < N; i++) {
        assert_int_equal(g_rank[i].st, KVS_OK);
        assert_false(g_rank[i].wrong);
        assert_false(comm_failed(g_rank[i].host));
    }
    end();
}

/* ---- faults ------------------------------------------------------------------------------------ */

static void all_were_told(int32_t but, const char *text)
{
    for (int32_t i = 0; i < N; i++) {
        if (i != but) {
            assert_int_equal(g_rank[i].st, KVS_PEER);
            if (strstr(g_rank[i].err.text, text) == NULL) {
                fail_msg("rank %d was told: %s", (int)i, g_rank[i].err.text);
            }
        }
        assert_true(comm_failed(g_rank[i].host));
    }
    end();
}

static void differ_in_size(rank *r)
{
    r->st = nccl_all_gather(r->c, r->send, r->recv, r->rank == 1 ? 8 : 16, &r->queue, &r->err);
}

static void differ_in_op(rank *r)
{
    r->st = r->rank == 2 ? nccl_all_to_all(r->c, r->send, r->recv, 16, &r->queue, &r->err)
                         : nccl_all_gather(r->c, r->send, r->recv, 16, &r->queue, &r->err);
}

static void differ_in_root(rank *r)
{
    r->st = nccl_broadcast(r->c, r->send, 16, r->rank == 1, &r->queue, &r->err);
}

static void ranks_that_differ_are_named(void **state)
{
    (void)state;
    run(differ_in_size, 20000);
    all_were_told(-1, "rank 1 called all_gather of 8 bytes (call 1), rank 0 all_gather of 16 bytes (call 1)");
    run(differ_in_op, 20000);
    all_were_told(-1, "rank 2 called all_to_all of 16 bytes (call 1), rank 0 all_gather");
    run(differ_in_root, 20000);
    all_were_told(-1, "rank 1 called broadcast of 16 bytes from rank 1 (call 1), rank 0 broadcast");
}

static void skip_call(rank *r)
{
    comm_set_timeout(r->host, 400);
    if (r->rank != 1) {
        r->st = nccl_all_gather(r->c, r->send, r->recv, 16, &r->queue, &r->err);
    }
}

static void skip_wait(rank *r)
{
    comm_set_timeout(r->host, 400);
    r->st = nccl_all_gather(r->c, r->send, r->recv, 16, &r->queue, &r->err);
    if (r->rank != 1 && r->st == KVS_OK) {
        r->st = nccl_wait(r->c, &r->queue, &r->err);
    }
}

static void ranks_that_do_not_come_are_named(void **state)
{
    (void)state;
    run(skip_call, 20000);
    all_were_told(1, "rank 1 more than 400 ms late for");
    run(skip_wait, 20000);
    all_were_told(1, "rank 1 more than 400 ms late for barrier");
}

static void never_done(rank *r)
{
    comm_set_timeout(r->host, 400);
    r->st = nccl_all_gather(r->c, r->send, r->recv, 16, &r->queue, &r->err);
    r->st = r->st < 0 ? r->st : nccl_wait(r->c, &r->queue, &r->err);
}

static void work_that_does_not_end_is_aborted(void **state)
{
    (void)state;
    fake.busy = true;
    run(never_done, 20000);
    fake.busy = false;
    all_were_told(-1, "not done after 400 ms");
}

static void null_buffer(rank *r)
{
    r->st = nccl_all_gather(r->c, r->rank == 0 ? NULL : r->send, r->recv, 16, &r->queue, &r->err);
}

static void bad_root(rank *r)
{
    r->st = nccl_broadcast(r->c, r->send, 16, r->rank == 0 ? N : 0, &r->queue, &r->err);
}

static void a_refused_call_ends_the_group(void **state)
{
    (void)state;
    run(null_buffer, 20000);
    assert_int_equal(g_rank[0].st, KVS_INVALID);
    assert_non_null(strstr(g_rank[0].err.text, "NULL"));
    all_were_told(0, "rank 0 ended the group: a buffer is NULL");
    run(bad_root, 20000);
    assert_int_equal(g_rank[0].st, KVS_INVALID);
    all_were_told(0, "rank 0 ended the group: there is no such root");
}

static void nothing(rank *r)
{
    (void)r;
}

static void connecting_that_never_ends_does_not_keep_anybody(void **state)
{
    (void)state;
    assert_int_equal(setenv("FAKE_NCCL_STUCK", "1", 1), 0);
    run(nothing, 200);
    assert_int_equal(unsetenv("FAKE_NCCL_STUCK"), 0);
    for (int32_t i = 0; i < N; i++) {
        assert_int_equal(g_rank[i].st, KVS_PEER);
        assert_null(g_rank[i].c);
        assert_non_null(strstr(g_rank[i].err.text, "within 200 ms"));
        comm_close(g_rank[i].host);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_library_is_named_with_what_would_help),
        cmocka_unit_test(the_library_is_loaded_by_its_name),
        cmocka_unit_test(collectives_move_what_they_say),
        cmocka_unit_test(ranks_that_differ_are_named),
        cmocka_unit_test(ranks_that_do_not_come_are_named),
        cmocka_unit_test(work_that_does_not_end_is_aborted),
        cmocka_unit_test(a_refused_call_ends_the_group),
        cmocka_unit_test(connecting_that_never_ends_does_not_keep_anybody),
    };
    (void)kvs_log_levels("comm=off", NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
