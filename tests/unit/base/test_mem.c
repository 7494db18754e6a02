/* Memory: alignment, overflow, accounting, the failure hook, the guard, page mappings, the arena. */
#include "unit/unit.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"

static void blocks_are_aligned_and_apart(void **state)
{
    (void)state;
    static const size_t aligns[] = {0, 1, 2, 8, 16, 32, 64, 128, 256, 4096, 2 << 20};
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 100000};
    unsigned char *p[UNIT_COUNT(aligns) * UNIT_COUNT(sizes)];
    size_t n = 0;
    for (size_t a = 0; a < UNIT_COUNT(aligns); a++) {
        for (size_t s = 0; s < UNIT_COUNT(sizes); s++, n++) {
            p[n] = mem_alloc(sizes[s], aligns[a]);
            assert_non_null(p[n]);
            const size_t align = aligns[a] < MEM_ALIGN ? MEM_ALIGN : aligns[a];
            assert_int_equal((uintptr_t)p[n] % align, 0);
            assert_int_equal(mem_size(p[n]), sizes[s]);
            memset(p[n], (int)n, sizes[s]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < mem_size(p[i]); k++) {
            assert_int_equal(p[i][k], (unsigned char)i);
        }
        mem_free(p[i]);
    }
    mem_free(NULL);
}

static void impossible_requests_are_null(void **state)
{
    (void)state;
    const mem_stats before = mem_stats_get();
    assert_null(mem_alloc(16, 3));
    assert_null(mem_alloc(16, 96));
    assert_null(mem_alloc(SIZE_MAX, 0));
    assert_null(mem_alloc(SIZE_MAX - 64, 64));
    assert_null(mem_alloc((size_t)PTRDIFF_MAX, 64));
    assert_null(mem_alloc(16, (size_t)1 << 63));
    assert_null(mem_alloc_array(SIZE_MAX / 2 + 2, 2, 0));
    assert_null(mem_alloc_array((size_t)1 << 32, (size_t)1 << 32, 0));
    assert_null(mem_calloc(SIZE_MAX / 4 + 2, 4));
    const mem_stats after = mem_stats_get();
    assert_int_equal(after.live_bytes, before.live_bytes);
    assert_int_equal(after.n_live, before.n_live);
    void *p = mem_alloc_array(3, 5, 0);
    assert_int_equal(mem_size(p), 15);
    mem_free(p);
}

static void calloc_is_zero_and_realloc_keeps(void **state)
{
    (void)state;
    mem_poison(true);
    unsigned char *z = mem_calloc(300, 3);
    for (size_t i = 0; i < 900; i++) {
        assert_int_equal(z[i], 0);
    }
    mem_free(z);
    unsigned char *p = mem_alloc(100, (size_t)1 << 20);
    for (size_t i = 0; i < 100; i++) {
        assert_int_equal(p[i], 0xFF);
        p[i] = (unsigned char)i;
    }
    mem_poison(false);
    p = mem_realloc(p, 5000);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % ((size_t)1 << 20), 0);
    for (size_t i = 0; i < 100; i++) {
        assert_int_equal(p[i], i);
    }
    p = mem_realloc(p, 10);
    assert_int_equal(mem_size(p), 10);
    for (size_t i = 0; i < 10; i++) {
        assert_int_equal(p[i], i);
    }
    mem_fail_after(1);
    assert_null(mem_realloc(p, 20));
    mem_fail_after(0);
    assert_int_equal(p[9], 9);
    mem_free(p);
    p = mem_realloc(NULL, 7);
    assert_int_equal(mem_size(p), 7);
    mem_free(p);
}

static void accounting_follows_blocks_and_pages(void **state)
{
    (void)state;
    mem_peak_reset();
    const mem_stats s0 = mem_stats_get();
    assert_int_equal(s0.peak_bytes, s0.live_bytes);
    void *a = mem_alloc(1000, 0);
    void *b = mem_calloc(10, 50);
    void *m = mem_map_pages(5000, 0, NULL);
    mem_stats s = mem_stats_get();
    assert_int_equal(s.live_bytes - s0.live_bytes, 6500);
    assert_int_equal(s.n_live - s0.n_live, 3);
    assert_int_equal(s.n_alloc - s0.n_alloc, 3);
    a = mem_realloc(a, 200);
    mem_free(b);
    mem_unmap_pages(m, 5000);
    s = mem_stats_get();
    assert_int_equal(s.live_bytes - s0.live_bytes, 200);
    assert_int_equal(s.n_live - s0.n_live, 1);
    assert_int_equal(s.peak_bytes - s0.live_bytes, 6700);
    mem_free(a);
    s = mem_stats_get();
    assert_int_equal(s.live_bytes, s0.live_bytes);
    assert_int_equal(s.n_live, s0.n_live);
    mem_peak_reset();
    assert_int_equal(mem_stats_get().peak_bytes, s0.live_bytes);
}

static void the_chosen_allocation_fails(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= 5; n++) {
        mem_fail_after(n);
        for (int64_t i = 1; i <= 6; i++) {
            assert_int_equal(mem_fail_fired(), i > n);
            void *p = i % 2 == 0 ? mem_alloc(8, 0) : mem_calloc(1, 8);
            if (i == n) {
                assert_null(p);
            } else {
                assert_non_null(p);
            }
            mem_free(p);
        }
    }
    kvs_error err = {0};
    mem_fail_after(1);
    assert_null(mem_map_pages(100, 0, &err));
    assert_int_equal(err.code, KVS_NOMEM);
    arena a;
    mem_fail_after(1);
    assert_int_equal(arena_init(&a, 100, &err), KVS_NOMEM);
    assert_null(arena_alloc(&a, 1, 1));
    mem_fail_after(1);
    mem_fail_after(0);
    assert_false(mem_fail_fired());
    void *p = mem_alloc(1, 0);
    assert_non_null(p);
    mem_free(p);
}

typedef struct churn {
    int n_null;
} churn;

static void *churn_main(void *arg)
{
    churn *c = arg;
    for (int i = 0; i < 2000; i++) {
        void *p = mem_alloc((size_t)i % 97, 0);
        c->n_null += p == NULL;
        mem_free(p);
    }
    return NULL;
}

static void one_failure_among_threads(void **state)
{
    (void)state;
    const mem_stats s0 = mem_stats_get();
    enum { N = 4 };
    pthread_t t[N];
    churn c[N] = {{0}};
    mem_fail_after(3000);
    for (int i = 0; i < N; i++) {
        assert_int_equal(pthread_create(&t[i], NULL, churn_main, &c[i]), 0);
    }
    int n_null = 0;
    for (int i = 0; i < N; i++) {
        pthread_join(t[i], NULL);
        n_null += c[i].n_null;
    }
    assert_int_equal(n_null, 1);
    assert_true(mem_fail_fired());
    const mem_stats s = mem_stats_get();
    assert_int_equal(s.live_bytes, s0.live_bytes);
    assert_int_equal(s.n_live, s0.n_live);
    assert_int_equal(s.n_alloc - s0.n_alloc, N * 2000);
}

static void the_guard_counts_this_thread_only(void **state)
{
    (void)state;
    const int64_t total = mem_stats_get().n_violation;
    mem_guard_begin();
    assert_true(mem_guard_active());
    churn c = {0};
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, churn_main, &c), 0);
    pthread_join(t, NULL);
    assert_int_equal(mem_guard_end(), 0);
    assert_false(mem_guard_active());

    mem_guard_begin();
    void *p = mem_alloc(1, 0);
    mem_guard_begin();
    p = mem_realloc(p, 2);
    assert_int_equal(mem_guard_end(), 2);
    void *m = mem_map_pages(1, 0, NULL);
    mem_free(p);
    mem_unmap_pages(m, 1);
    p = mem_calloc(1, 1);
    assert_int_equal(mem_guard_end(), 4);
    mem_free(p);
    assert_int_equal(mem_stats_get().n_violation - total, 4);
    p = mem_alloc(1, 0);
    mem_free(p);
    mem_guard_begin();
    assert_int_equal(mem_guard_end(), 0);
    assert_int_equal(mem_stats_get().n_violation - total, 4);
}

static void pages_are_zero_apart_and_protectable(void **state)
{
    (void)state;
    const size_t page = mem_page_size();
    assert_int_equal(mem_page_round(1), page);
    assert_int_equal(mem_page_round(page), page);
    assert_int_equal(mem_page_round(page + 1), 2 * page);
    for (int huge = 0; huge < 2; huge++) {
        const size_t bytes = 3 * page + 17;
        kvs_error err = {0};
        unsigned char *a = mem_map_pages(bytes, huge, &err);
        unsigned char *b = mem_map_pages(bytes, huge, &err);
        assert_non_null(a);
        assert_non_null(b);
        assert_int_equal((uintptr_t)a % page, 0);
        if (huge) {
            assert_int_equal((uintptr_t)a % (2 << 20), 0);
            assert_int_equal((uintptr_t)b % (2 << 20), 0);
        }
        for (size_t i = 0; i < bytes; i++) {
            assert_int_equal(a[i], 0);
        }
        memset(a, 1, mem_page_round(bytes));
        assert_int_equal(b[0], 0);
        assert_int_equal(mprotect(a, mem_page_round(bytes), PROT_NONE), 0);
        b[bytes - 1] = 7;
        /* An address without access makes the kernel answer EFAULT instead of reading it. */
        int fd[2];
        assert_int_equal(pipe(fd), 0);
        assert_int_equal(write(fd[1], a, 1), -1);
        assert_int_equal(write(fd[1], b, 1), 1);
        close(fd[0]);
        close(fd[1]);
        mem_unmap_pages(a, bytes);
        mem_unmap_pages(b, bytes);
    }
    kvs_error err = {0};
    assert_null(mem_map_pages(0, 0, &err));
    assert_int_equal(err.code, KVS_INVALID);
    assert_null(mem_map_pages(SIZE_MAX, 1, &err));
    assert_int_equal(err.code, KVS_INVALID);
    mem_unmap_pages(NULL, 10);
}

static void a_large_reservation_costs_nothing_until_touched(void **state)
{
    (void)state;
    const size_t bytes = (size_t)9 << 30;
    kvs_error err = {0};
    unsigned char *p = mem_map_pages(bytes, 0, &err);
    assert_non_null(p);
    p[((size_t)1 << 32) + 5] = 3;
    p[bytes - 1] = 4;
    assert_int_equal(p[5], 0);
    mem_unmap_pages(p, bytes);
}

static void the_arena_is_a_bump_with_marks(void **state)
{
    (void)state;
    arena a;
    assert_int_equal(arena_init(&a, 1024, NULL), KVS_OK);
    unsigned char *p = arena_alloc(&a, 10, 1);
    unsigned char *q = arena_alloc(&a, 10, 1);
    assert_ptr_equal(q, p + 10);
    unsigned char *r = arena_alloc(&a, 100, 0);
    assert_int_equal((uintptr_t)r % MEM_ALIGN, 0);
    assert_ptr_equal(r, p + 64);
    const size_t mark = a.used;
    assert_null(arena_alloc(&a, 1024 - 164 + 1, 1));
    assert_null(arena_alloc(&a, SIZE_MAX, 1));
    assert_null(arena_alloc(&a, SIZE_MAX, 64));
    assert_null(arena_alloc(&a, 8, 12));
    assert_int_equal(a.used, mark);
    unsigned char *s = arena_alloc(&a, 1024 - 164, 1);
    assert_ptr_equal(s, p + 164);
    assert_null(arena_alloc(&a, 1, 1));
    assert_non_null(arena_alloc(&a, 0, 1));
    assert_int_equal(a.peak, 1024);
    arena_rewind(&a, mark);
    assert_ptr_equal(arena_alloc(&a, 4, 1), s);
    arena_reset(&a);
    assert_ptr_equal(arena_alloc(&a, 10, 1), p);
    assert_int_equal(a.peak, 1024);
    /* The padding alone may be more than what is left. */
    assert_non_null(arena_alloc(&a, 1024 - 10 - 5, 1));
    assert_null(arena_alloc(&a, 0, 4096));
    assert_null(arena_alloc(&a, 1, 4096));
    arena_fini(&a);
    assert_null(arena_alloc(&a, 1, 1));

    unsigned char raw[256];
    arena_init_with(&a, raw + 1, 200);
    unsigned char *t = arena_alloc(&a, 16, 32);
    assert_int_equal((uintptr_t)t % 32, 0);
    assert_true(t >= raw + 1 && t + 16 <= raw + 201);
    arena_fini(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_aligned_and_apart),
        cmocka_unit_test(impossible_requests_are_null),
        cmocka_unit_test(calloc_is_zero_and_realloc_keeps),
        cmocka_unit_test(accounting_follows_blocks_and_pages),
        cmocka_unit_test(the_chosen_allocation_fails),
        cmocka_unit_test(one_failure_among_threads),
        cmocka_unit_test(the_guard_counts_this_thread_only),
        cmocka_unit_test(pages_are_zero_apart_and_protectable),
        cmocka_unit_test(a_large_reservation_costs_nothing_until_touched),
        cmocka_unit_test(the_arena_is_a_bump_with_marks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
