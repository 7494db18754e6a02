/* mem.c: aligned blocks with a header, page mappings, counters, test hooks, the arena.
 *
 * A block is [padding][header][n bytes]; the header sits right below the address handed out, and the
 * n bytes end where the system's block ends, so that a sanitizer sees an overrun by one byte. */
#include "base/mem.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/err.h"

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct mem_head {
    void *raw;
    size_t n;
    size_t align;
    uint64_t magic; /* MEM_MAGIC while the block lives */
} mem_head;

#define MEM_MAGIC UINT64_C(0x6b76736d656d3031)

static struct {
    atomic_int_fast64_t live_bytes;
    atomic_int_fast64_t peak_bytes;
    atomic_int_fast64_t n_live;
    atomic_int_fast64_t n_alloc;
    atomic_int_fast64_t n_violation;
    atomic_int_fast64_t fail_left; /* allocations up to and with the one to fail; 0 = disarmed */
    atomic_bool fail_fired;
    atomic_bool poison;
} g_mem;

static _Thread_local int t_guard_depth;
static _Thread_local int64_t t_guard_violation;

static void count_add(int64_t bytes, int64_t n)
{
    atomic_fetch_add_explicit(&g_mem.n_live, n, memory_order_relaxed);
    const int64_t live =
        atomic_fetch_add_explicit(&g_mem.live_bytes, bytes, memory_order_relaxed) + bytes;
    int64_t peak = atomic_load_explicit(&g_mem.peak_bytes, memory_order_relaxed);
    while (live > peak &&
           !atomic_compare_exchange_weak_explicit(&g_mem.peak_bytes, &peak, live,
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

/* Counts an attempt to allocate; false when the test hook wants it to fail. */
static bool admit(void)
{
    atomic_fetch_add_explicit(&g_mem.n_alloc, 1, memory_order_relaxed);
    if (t_guard_depth > 0) {
        t_guard_violation++;
        atomic_fetch_add_explicit(&g_mem.n_violation, 1, memory_order_relaxed);
    }
    int64_t left = atomic_load_explicit(&g_mem.fail_left, memory_order_relaxed);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&g_mem.fail_left, &left, left - 1)) {
            if (left == 1) {
                atomic_store(&g_mem.fail_fired, true);
                return false;
            }
            break;
        }
    }
    return true;
}

static mem_head *head_of(const void *p)
{
    mem_head *h = (mem_head *)((uintptr_t)p - sizeof(mem_head));
    assert(h->magic == MEM_MAGIC);
    return h;
}

static bool is_pow2(size_t x)
{
    return x != 0 && (x & (x - 1)) == 0;
}

static void *block_new(size_t n, size_t align)
{
    if (align < MEM_ALIGN) {
        if (align != 0 && !is_pow2(align)) {
            return NULL;
        }
        align = MEM_ALIGN;
    }
    static_assert(sizeof(mem_head) <= MEM_ALIGN, "the header fits below the least alignment");
    if (!is_pow2(align) || n > PTRDIFF_MAX - align || align > PTRDIFF_MAX / 2) {
        return NULL;
    }
    void *raw = NULL;
    if (posix_memalign(&raw, align, align + n) != 0) {
        return NULL;
    }
    unsigned char *p = (unsigned char *)raw + align;
    const mem_head h = {.raw = raw, .n = n, .align = align, .magic = MEM_MAGIC};
    memcpy(p - sizeof h, &h, sizeof h);
    count_add((int64_t)n, 1);
    return p;
}

void *mem_alloc(size_t n, size_t align)
{
    if (!admit()) {
        return NULL;
    }
    void *p = block_new(n, align);
    if (p != NULL && atomic_load_explicit(&g_mem.poison, memory_order_relaxed)) {
        memset(p, 0xFF, n);
    }
    return p;
}

void *mem_alloc_array(size_t n, size_t size, size_t align)
{
    size_t bytes = 0;
    if (__builtin_mul_overflow(n, size, &bytes)) {
        return NULL;
    }
    return mem_alloc(bytes, align);
}

void *mem_calloc(size_t n, size_t size)
{
    size_t bytes = 0;
    if (!admit() || __builtin_mul_overflow(n, size, &bytes)) {
        return NULL;
    }
    void *p = block_new(bytes, MEM_ALIGN);
    if (p != NULL) {
        memset(p, 0, bytes);
    }
    return p;
}

void *mem_realloc(void *p, size_t n)
{
    if (p == NULL) {
        return mem_alloc(n, 0);
    }
    const mem_head *h = head_of(p);
    void *q = mem_alloc(n, h->align);
    if (q == NULL) {
        return NULL;
    }
    memcpy(q, p, n < h->n ? n : h->n);
    mem_free(p);
    return q;
}

void mem_free(void *p)
{
    if (p == NULL) {
        return;
    }
    mem_head *h = head_of(p);
    count_add(-(int64_t)h->n, -1);
    h->magic = 0;
    free(h->raw);
}

size_t mem_size(const void *p)
{
    return head_of(p)->n;
}

size_t mem_page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

size_t mem_page_round(size_t bytes)
{
    const size_t page = mem_page_size();
    return (bytes + page - 1) / page * page;
}

void *mem_map_pages(size_t bytes, int huge, kvs_error *err)
{
    if (bytes == 0 || bytes > PTRDIFF_MAX - 2 * HUGE_PAGE) {
        err_set(err, KVS_INVALID, "cannot map %zu bytes: ask for 1 to %zu", bytes,
                (size_t)PTRDIFF_MAX - 2 * HUGE_PAGE);
        return NULL;
    }
    if (!admit()) {
        err_set(err, KVS_NOMEM, "cannot map %zu bytes", bytes);
        return NULL;
    }
    const size_t want = mem_page_round(bytes);
    const size_t slack = huge ? HUGE_PAGE : 0;
    unsigned char *raw = mmap(NULL, want + slack, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        err_set(err, KVS_NOMEM, "cannot map %zu bytes: %s; use a shorter context or more ranks",
                bytes, strerrordesc_np(errno));
        return NULL;
    }
    if (huge) {
        const size_t head = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
        if (head != 0) {
            munmap(raw, head);
        }
        if (slack - head != 0) {
            munmap(raw + head + want, slack - head);
        }
        raw += head;
        (void)madvise(raw, want, MADV_HUGEPAGE);
    }
    count_add((int64_t)bytes, 1);
    return raw;
}

void mem_unmap_pages(void *p, size_t bytes)
{
    if (p == NULL) {
        return;
    }
    munmap(p, mem_page_round(bytes));
    count_add(-(int64_t)bytes, -1);
}

mem_stats mem_stats_get(void)
{
    const mem_stats s = {
        .live_bytes = atomic_load(&g_mem.live_bytes),
        .peak_bytes = atomic_load(&g_mem.peak_bytes),
        .n_live = atomic_load(&g_mem.n_live),
        .n_alloc = atomic_load(&g_mem.n_alloc),
        .n_violation = atomic_load(&g_mem.n_violation),
    };
    return s;
}

void mem_peak_reset(void)
{
    atomic_store(&g_mem.peak_bytes, atomic_load(&g_mem.live_bytes));
}

void mem_fail_after(int64_t n)
{
    atomic_store(&g_mem.fail_fired, false);
    atomic_store(&g_mem.fail_left, n > 0 ? n : 0);
}

bool mem_fail_fired(void)
{
    return atomic_load(&g_mem.fail_fired);
}

void mem_guard_begin(void)
{
    if (t_guard_depth++ == 0) {
        t_guard_violation = 0;
    }
}

int64_t mem_guard_end(void)
{
    assert(t_guard_depth > 0);
    t_guard_depth--;
    return t_guard_violation;
}

bool mem_guard_active(void)
{
    return t_guard_depth > 0;
}

void mem_poison(bool on)
{
    atomic_store(&g_mem.poison, on);
}

kvs_status arena_init(arena *a, size_t cap, kvs_error *err)
{
    *a = (arena){0};
    unsigned char *base = mem_alloc(cap, MEM_ALIGN);
    if (base == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for an arena of %zu bytes", cap);
    }
    arena_init_with(a, base, cap);
    a->owned = true;
    return KVS_OK;
}

void arena_init_with(arena *a, void *base, size_t cap)
{
    *a = (arena){.base = base, .cap = cap};
}

void *arena_alloc(arena *a, size_t n, size_t align)
{
    if (align == 0) {
        align = MEM_ALIGN;
    }
    if (!is_pow2(align)) {
        return NULL;
    }
    const size_t pad = (size_t)(-((uintptr_t)a->base + a->used) & (align - 1));
    const size_t room = a->cap - a->used;
    if (pad > room || n > room - pad) {
        return NULL;
    }
    unsigned char *p = a->base + a->used + pad;
    a->used += pad + n;
    a->peak = a->used > a->peak ? a->used : a->peak;
    return p;
}

void arena_reset(arena *a)
{
    a->used = 0;
}

void arena_rewind(arena *a, size_t mark)
{
    assert(mark <= a->used);
    a->used = mark;
}

void arena_fini(arena *a)
{
    if (a->owned) {
        mem_free(a->base);
    }
    *a = (arena){0};
}
