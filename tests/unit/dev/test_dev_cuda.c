/* CUDA devices. Without one, or in a build without CUDA, every way in refuses with the reason; with one,
 * memory goes there and back, queues keep their order and their first failure, graphs replay. */
#include "unit/unit.h"

#include "dev/dev.h"

static int g_have; /* a device that can be used */

static int find_device(void **state)
{
    (void)state;
    g_have = dev_cuda_open(0, NULL, NULL) == KVS_OK;
    return 0;
}

static void a_missing_device_is_refused_with_the_reason(void **state)
{
    (void)state;
    kvs_error err;
    memset(&err, 0, sizeof err);
    const kvs_status st = dev_cuda_open(1000000, NULL, &err);
    assert_int_equal(err.code, st);
    if (!dev_cuda_built()) {
        assert_int_equal(st, KVS_UNSUPPORTED);
        assert_non_null(strstr(err.text, "build with the preset cuda"));
    } else {
        assert_int_equal(st, KVS_NODEV);
        assert_non_null(strstr(err.text, g_have ? "1000000" : "no CUDA device here"));
    }
    assert_int_equal(dev_cuda_open(-1, NULL, NULL), st);
}

static void nothing_opens_without_a_device(void **state)
{
    (void)state;
    if (g_have) {
        skip();
    }
    dev_queue q;
    kvs_error err;
    memset(&q, 0x5A, sizeof q);
    assert_true(dev_queue_open_cuda(&q, &err) < 0);
    assert_null(q.stream);
    dev_queue_sync(&q);
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);
    dev_queue_close(&q);
    dev_event e;
    assert_true(dev_event_open(&e, &err) < 0);
    assert_null(e.event);
    dev_event_close(&e);
    assert_null(dev_cuda.alloc(64));
    assert_null(dev_cuda_alloc_shared(64));
    dev_cuda.free(NULL);
    assert_string_equal(dev_cuda.name, "cuda");
}

static void a_device_describes_itself(void **state)
{
    (void)state;
    if (!g_have) {
        skip();
    }
    dev_cuda_info i;
    assert_int_equal(dev_cuda_open(0, &i, NULL), KVS_OK);
    assert_true(strlen(i.name) > 0);
    assert_int_equal(i.major * 10 + i.minor, 90);
    assert_true(i.n_sm > 50 && i.n_sm < 1000);
    assert_true(i.l2_bytes > (10 << 20) && i.mem_bytes > (INT64_C(10) << 30));
    assert_true(i.shared_max >= 227 * 1024);
    assert_true(i.driver >= i.runtime);
}

static void memory_goes_there_and_back(void **state)
{
    (void)state;
    if (!g_have) {
        skip();
    }
    uint8_t src[1000];
    uint8_t back[1000];
    for (size_t i = 0; i < sizeof src; i++) {
        src[i] = (uint8_t)(i * 7 + 1);
    }
    uint8_t *p = dev_cuda.alloc(sizeof src + 2);
    assert_non_null(p);
    dev_cuda.fill(p, 0xA5, sizeof src + 2);
    dev_cuda.put(p + 1, src, sizeof src);
    dev_cuda.put(p, NULL, 0);
    dev_cuda.get(back, p + 1, sizeof back);
    assert_memory_equal(back, src, sizeof src);
    dev_cuda.get(back, p, 1);
    dev_cuda.get(back + 1, p + 1 + sizeof src, 1);
    assert_true(back[0] == 0xA5 && back[1] == 0xA5);
    dev_cuda.free(p);
    assert_null(dev_cuda.alloc((size_t)1 << 60));

    dev_queue q;
    assert_int_equal(dev_queue_open_cuda(&q, NULL), KVS_OK);
    assert_true(q.n_sm > 0);
    dev_queue_sync(&q); /* a refused allocation is no failure of the queue */
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);
    dev_cuda.put(NULL, src, 100);
    dev_cuda.sync(&q);
    kvs_error err;
    assert_int_equal(dev_queue_check(&q, &err), KVS_DEVICE);
    assert_non_null(strstr(err.text, "cudaError"));
    dev_queue_close(&q);
}

static void shared_memory_has_one_address(void **state)
{
    (void)state;
    if (!g_have) {
        skip();
    }
    dev_queue q;
    assert_int_equal(dev_queue_open_cuda(&q, NULL), KVS_OK);
    uint8_t *p = dev_cuda_alloc_shared((size_t)64 << 20);
    assert_non_null(p);
    memset(p, 3, 100);
    dev_queue_copy(&q, p + (32 << 20), p, 100);
    dev_queue_sync(&q);
    assert_memory_equal(p + (32 << 20), p, 100);
    dev_cuda_free_shared(p);
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);
    dev_queue_close(&q);
}

static void a_graph_replays_what_was_recorded(void **state)
{
    (void)state;
    if (!g_have) {
        skip();
    }
    dev_queue q;
    dev_graph g;
    dev_event from;
    dev_event to;
    uint8_t got[4] = {0};
    assert_int_equal(dev_queue_open_cuda(&q, NULL), KVS_OK);
    assert_int_equal(dev_event_open(&from, NULL), KVS_OK);
    assert_int_equal(dev_event_open(&to, NULL), KVS_OK);
    uint8_t *p = dev_cuda.alloc(4);
    dev_cuda.fill(p, 1, 4);
    assert_int_equal(dev_capture_begin(&q, NULL), KVS_OK);
    dev_queue_fill(&q, p, 7, 2);
    dev_queue_copy(&q, p + 2, p, 2);
    assert_int_equal(dev_capture_end(&q, &g, NULL), KVS_OK);
    assert_int_equal(g.n_node, 2);
    dev_queue_sync(&q);
    dev_cuda.get(got, p, 4);
    assert_memory_equal(got, "\1\1\1\1", 4); /* recorded, not run */
    dev_event_record(&from, &q);
    dev_graph_launch(&g, &q);
    dev_event_record(&to, &q);
    dev_queue_sync(&q);
    dev_cuda.get(got, p, 4);
    assert_memory_equal(got, "\7\7\7\7", 4);
    const double us = dev_event_elapsed_us(&from, &to);
    assert_true(us > 0.0 && us < 1e6);
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);
    dev_graph_free(&g);
    dev_event_close(&from);
    dev_event_close(&to);
    dev_cuda.free(p);
    dev_queue_close(&q);
}

static void a_cuda_failure_has_its_name_and_the_first_wins(void **state)
{
    (void)state;
    dev_queue q;
    kvs_error err;
    dev_queue_init(&q, NULL);
    dev_queue_fail_cuda(&q, 0, "attn");
    assert_int_equal(dev_queue_check(&q, NULL), KVS_OK);
    dev_queue_fail_cuda(&q, 1, "attn");
    dev_queue_fail_cuda(&q, 9, "merge");
    const kvs_status st = dev_queue_check(&q, &err);
    if (dev_cuda_built()) {
        assert_int_equal(st, KVS_DEVICE);
        assert_non_null(strstr(err.text, "attn: cudaErrorInvalidValue"));
    } else {
        assert_int_equal(st, KVS_UNSUPPORTED);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_device_is_refused_with_the_reason),
        cmocka_unit_test(nothing_opens_without_a_device),
        cmocka_unit_test(a_device_describes_itself),
        cmocka_unit_test(memory_goes_there_and_back),
        cmocka_unit_test(shared_memory_has_one_address),
        cmocka_unit_test(a_graph_replays_what_was_recorded),
        cmocka_unit_test(a_cuda_failure_has_its_name_and_the_first_wins),
    };
    return cmocka_run_group_tests(tests, find_device, NULL);
}
