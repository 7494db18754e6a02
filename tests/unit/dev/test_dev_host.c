/* The host place and the queue: alignment, empty transfers, first failure wins, check clears. */
#include "unit/unit.h"

#include "base/mem.h"
#include "base/pool.h"
#include "dev/dev.h"

static void memory_goes_there_and_back(void **state)
{
    (void)state;
    const int64_t n_live = mem_stats_get().n_live;
    uint8_t src[200];
    uint8_t back[200];
    for (size_t i = 0; i < sizeof src; i++) {
        src[i] = (uint8_t)(i * 7 + 1);
    }
    for (size_t n = 0; n <= sizeof src; n++) {
        uint8_t *p = dev_host.alloc(n + 2);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        assert_int_equal(mem_stats_get().n_live, n_live + 1);
        dev_host.fill(p, 0xA5, n + 2);
        dev_host.put(p + 1, src, n);
        memset(back, 0, sizeof back);
        dev_host.get(back, p + 1, n);
        assert_memory_equal(back, src, n);
        assert_int_equal(p[0], 0xA5);
        assert_int_equal(p[n + 1], 0xA5);
        dev_host.free(p);
    }
    assert_int_equal(mem_stats_get().n_live, n_live);
    dev_host.free(NULL);
    assert_string_equal(dev_host.name, "host");
}

static void nothing_may_come_with_null(void **state)
{
    (void)state;
    dev_host.put(NULL, NULL, 0);
    dev_host.get(NULL, NULL, 0);
    dev_host.fill(NULL, 1, 0);
    dev_host.sync(NULL);
}

static void out_of_memory_gives_null(void **state)
{
    (void)state;
    mem_fail_after(1);
    assert_null(dev_host.alloc(64));
    assert_null(dev_host.alloc(SIZE_MAX - 8));
}

static void first_failure_wins_and_check_clears(void **state)
{
    (void)state;
    dev_queue q;
    memset(&q, 0x5A, sizeof q);
    dev_queue_init(&q, NULL);
    assert_int_equal(q.n_worker, 1);
    assert_null(q.pool);
    kvs_error err;
    memset(&err, 0x5A, sizeof err);
    kvs_error before = err;
    assert_int_equal(dev_queue_check(&q, &err), KVS_OK);
    assert_memory_equal(&err, &before, sizeof err);

    dev_queue_fail(&q, KVS_DEVICE, "attn: 100% of \"it\" failed");
    dev_queue_fail(&q, KVS_NOMEM, "later");
    assert_int_not_equal(q.failed, 0);
    assert_int_equal(dev_queue_check(&q, &err), KVS_DEVICE);
    assert_int_equal(err.code, KVS_DEVICE);
    assert_string_equal(err.text, "attn: 100% of \"it\" failed");
    assert_int_equal(err.pos, -1);
    assert_int_equal(q.failed, 0);
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);

    dev_queue_fail(&q, KVS_NOMEM, "again");
    assert_int_equal(dev_queue_check(&q, NULL), KVS_NOMEM);
    assert_int_equal(dev_queue_check(&q, &err), KVS_OK);
}

static void success_is_not_a_failure(void **state)
{
    (void)state;
    dev_queue q;
    dev_queue_init(&q, NULL);
    dev_queue_fail(&q, KVS_OK, "odd");
    assert_int_equal(dev_queue_check(&q, NULL), KVS_INTERNAL);
    dev_queue_fail(&q, KVS_IDLE, "odd");
    assert_int_equal(dev_queue_check(&q, NULL), KVS_INTERNAL);
}

static void fail_task(void *ctx, int64_t i_task, int i_worker)
{
    (void)i_worker;
    char text[32];
    snprintf(text, sizeof text, "task %d says so", (int)i_task);
    dev_queue_fail(ctx, (kvs_status) - (1 + (int)i_task % 12), text);
}

/* Whichever worker wins, its code and its text stay together. */
static void workers_may_fail_at_once(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 4, NULL), KVS_OK);
    dev_queue q;
    dev_queue_init(&q, p);
    assert_int_equal(q.n_worker, 4);
    assert_ptr_equal(q.pool, p);
    for (int round = 0; round < 200; round++) {
        pool_run(p, fail_task, &q, 24);
        kvs_error err;
        const kvs_status st = dev_queue_check(&q, &err);
        int task = -1;
        assert_int_equal(sscanf(err.text, "task %d says so", &task), 1);
        assert_in_range(task, 0, 23);
        assert_int_equal(st, -(1 + task % 12));
        assert_int_equal(err.code, st);
    }
    pool_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_goes_there_and_back),
        cmocka_unit_test(nothing_may_come_with_null),
        cmocka_unit_test(out_of_memory_gives_null),
        cmocka_unit_test(first_failure_wins_and_check_clears),
        cmocka_unit_test(success_is_not_a_failure),
        cmocka_unit_test(workers_may_fail_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
