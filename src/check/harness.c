/* harness.c - memory of a case, and one variant run over it.
 *
 * What a kernel may not do shows here, whatever the op: write outside its outputs, change an input,
 * leave an output unwritten, depend on what the outputs or the scratch held, on the number of
 * workers or on chance.
 */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "check/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

/* Reserved, not committed: a case touches what it needs. */
enum {
    CASE_GIB = 2,
    FEW_SM = 4,
    QUICK_FURTHER = 4 /* of so many quick cases one has further runs on a device */
};

/* NaN as f32, as bf16 in both halves, and as e4m3 in two bytes of four; as an int far out of range.
 */
static const uint8_t g_poison[4] = {0xA5, 0xFF, 0xC3, 0x7F};

void poison_fill(void *p, size_t bytes)
{
    uint8_t *b = p;
    size_t n = bytes < sizeof g_poison ? bytes : sizeof g_poison;
    memcpy(b, g_poison, n);
    for (; n < bytes; n *= 2) {
        memcpy(b + n, b, n < bytes - n ? n : bytes - n);
    }
}

/* The first byte of [p, p + bytes) that is not poison, or -1. */
static int64_t poison_broken(const uint8_t *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (p[i] != g_poison[i % sizeof g_poison]) {
            return (int64_t)i;
        }
    }
    return -1;
}

static void zones_guard(check_buf *b, int on)
{
    if (b->data == NULL) {
        return;
    }
#if defined(__SANITIZE_ADDRESS__)
    if (on) {
        ASAN_POISON_MEMORY_REGION(b->data - CHECK_ZONE, CHECK_ZONE);
        ASAN_POISON_MEMORY_REGION(b->data + b->bytes, CHECK_ZONE);
    } else {
        ASAN_UNPOISON_MEMORY_REGION(b->data - CHECK_ZONE, 2 * (size_t)CHECK_ZONE + b->bytes);
    }
#else
    (void)b;
    (void)on;
#endif
}

void *case_alloc(check_case *k, int64_t n, size_t size)
{
    const size_t bytes = ((size_t)n * size + 63) / 64 * 64;
    if (k->failed || bytes > k->cap - k->used) {
        /* reported by case_build; until then everything lands in the same harmless place */
        k->failed = 1;
        return k->mem;
    }
    void *p = k->mem + k->used;
    k->used += bytes;
    if (k->queue != NULL) {
        memset(p, 0, bytes); /* fresh pages of the host are zero, others need not be */
    }
    return p;
}

int32_t case_step(const check_case *k, int32_t elem_bytes)
{
    return k->queue != NULL ? 16 / elem_bytes : 1;
}

void *case_far(check_case *k, int64_t bytes, int shared)
{
    shared = shared && k->queue != NULL;
    void *p = NULL;
    if (k->n_far < CHECK_MAX_FAR && !k->failed) {
        p = shared ? dev_cuda_alloc_shared((size_t)bytes) : mem_map_pages((size_t)bytes, 0, NULL);
    }
    if (p == NULL) {
        k->failed = 1;
        return k->mem;
    }
    k->far[k->n_far].p = p;
    k->far[k->n_far].bytes = (size_t)bytes;
    k->far[k->n_far++].shared = shared;
    return p;
}

void case_sync(dev_queue *q)
{
    dev_queue_sync(q);
}

static int zones_broken(const check_buf *b)
{
    return poison_broken(b->data - CHECK_ZONE, CHECK_ZONE) >= 0 ||
           poison_broken(b->data + b->bytes, CHECK_ZONE) >= 0;
}

static size_t elem_size(check_elem e)
{
    switch (e) {
    case EL_U8:
        return 1;
    case EL_U16:
        return 2;
    case EL_F32:
    case EL_I32:
        return 4;
    default:
        return 8;
    }
}

static void buf_lay(check_case *k, check_buf *b, size_t bytes, size_t skew)
{
    const size_t span = bytes + skew + 2 * (size_t)CHECK_ZONE;
    uint8_t *p = case_alloc(k, (int64_t)span, 1);
    b->data = p + CHECK_ZONE + skew;
    b->bytes = bytes;
    if (!k->failed) {
        poison_fill(b->data - CHECK_ZONE, CHECK_ZONE);
        poison_fill(b->data, bytes);
        poison_fill(b->data + bytes, CHECK_ZONE);
    }
}

void *case_buf(check_case *k, const char *name, check_kind kind, check_elem elem, int64_t n,
               int32_t skew)
{
    if (k->n_buf == CHECK_MAX_BUF) {
        k->failed = 1;
        return k->mem;
    }
    check_buf *b = &k->buf[k->n_buf++];
    *b = (check_buf){.name = name, .kind = kind, .elem = elem};
    buf_lay(k, b, (size_t)n * elem_size(elem), (size_t)skew * elem_size(elem));
    if (kind == BUF_OUT || kind == BUF_INOUT) {
        b->mask = case_alloc(k, (int64_t)b->bytes, 1);
        b->first = case_alloc(k, (int64_t)b->bytes, 1);
        b->ref = case_alloc(k, (int64_t)b->bytes, 1);
    }
    if (kind != BUF_OUT) {
        b->init = case_alloc(k, (int64_t)b->bytes, 1);
    }
    return b->data;
}

const int32_t *case_fenced_table(check_case *k, const int32_t *table, int32_t n_req, int64_t stride,
                                 int64_t n_page)
{
    const int64_t front = (stride + 3) / 4 * 4; /* a device may want 16 bytes of alignment */
    const int64_t n = (n_req + 1) * stride;
    int32_t *fenced = case_buf(k, "table", BUF_IN, EL_I32, front + n, 0);
    for (int64_t i = 0; i < front + n && !k->failed; i++) {
        const int64_t at = i - front;
        fenced[i] = at >= 0 && at < n_req * stride
                        ? table[at]
                        : (int32_t)rng_next_below(&k->r, (uint64_t)n_page);
    }
    return k->failed ? NULL : fenced + front;
}

static check_buf *buf_of(check_case *k, const void *p)
{
    for (int32_t i = 0; i < k->n_buf; i++) {
        const uint8_t *d = k->buf[i].data;
        if ((const uint8_t *)p >= d && (const uint8_t *)p <= d + k->buf[i].bytes) {
            return &k->buf[i];
        }
    }
    return NULL;
}

void case_mark(check_case *k, const void *p, int64_t bytes)
{
    check_buf *b = buf_of(k, p);
    if (b == NULL || b->mask == NULL || k->failed) {
        k->failed = 1;
        return;
    }
    memset(b->mask + ((const uint8_t *)p - b->data), 1, (size_t)bytes);
}

void case_mark_all(check_case *k, const void *p)
{
    const check_buf *b = buf_of(k, p);
    case_mark(k, p, b != NULL ? (int64_t)b->bytes : 0);
}

void *case_scratch(check_case *k, size_t bytes)
{
    if (k->scratch.data != NULL && k->scratch.bytes == bytes) {
        return k->scratch.data; /* what an earlier call of this run left is as good as poison */
    }
    zones_guard(&k->scratch, 0);
    if (k->scratch.data != NULL) {
        k->scratch_broken |= zones_broken(&k->scratch);
    }
    k->has_scratch = 1;
    k->scratch = (check_buf){.name = "scratch", .kind = BUF_SCRATCH};
    buf_lay(k, &k->scratch, bytes, 0);
    zones_guard(&k->scratch, 1);
    return k->scratch.data;
}

enum { COUNTER_START = 1000 };

uint64_t *case_counter(check_case *k, const char *name)
{
    uint64_t *c = case_buf(k, name, BUF_INOUT, EL_U64, 1, 0);
    *c = COUNTER_START;
    case_mark_all(k, c);
    return c;
}

uint64_t case_counted(const check_case *k, const uint64_t *counter)
{
    (void)k;
    return *counter - COUNTER_START;
}

kvs_status case_open(check_case *k, const check_op *op, const check_class *cls, int32_t index,
                     uint64_t seed, int32_t quick, dev_queue *cuda, kvs_error *err)
{
    memset(k, 0, sizeof *k);
    k->queue = cuda;
    k->op = op;
    k->cls = cls;
    k->index = index;
    k->quick = quick;
    const uint64_t i_class = (uint64_t)(cls - op->cls);
    k->r = rng_init(seed, (uint64_t)op->op << 40 | i_class << 24 | (uint64_t)index);
    k->cap = (size_t)CASE_GIB << 30;
    if (cuda == NULL) {
        k->mem = mem_map_pages(k->cap, 0, err);
        return k->mem != NULL ? KVS_OK : KVS_NOMEM;
    }
    k->mem = dev_cuda_alloc_shared(k->cap);
    return k->mem != NULL
               ? KVS_OK
               : err_set(err, KVS_NOMEM,
                         "check: no %d GiB of memory that the host and the device share", CASE_GIB);
}

void case_close(check_case *k)
{
    if (k->mem != NULL) {
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(k->mem, k->used);
#endif
        if (k->queue != NULL) {
            dev_cuda_free_shared(k->mem);
        } else {
            mem_unmap_pages(k->mem, k->cap);
        }
        k->mem = NULL;
    }
    for (int32_t i = 0; i < k->n_far; i++) {
        if (k->far[i].shared) {
            dev_cuda_free_shared(k->far[i].p);
        } else {
            mem_unmap_pages(k->far[i].p, k->far[i].bytes);
        }
    }
    k->n_far = 0;
}

kvs_status case_build(check_case *k, kvs_error *err)
{
    k->cls->build(k, k->index);
    if (k->failed) {
        return err_set(err, KVS_INTERNAL, "case %d of %s %s does not fit its memory or its buffers",
                       k->index, kern_op_name(k->op->op), k->cls->name);
    }
    for (int32_t i = 0; i < k->n_buf; i++) {
        check_buf *b = &k->buf[i];
        if (b->init != NULL) {
            memcpy(b->init, b->data, b->bytes);
        }
    }
    return KVS_OK;
}

/* ---- one run ---- */

static void restore(check_case *k)
{
    for (int32_t i = 0; i < k->n_buf; i++) {
        check_buf *b = &k->buf[i];
        if (b->kind == BUF_INOUT) {
            memcpy(b->data, b->init, b->bytes);
        } else if (b->kind == BUF_OUT) {
            poison_fill(b->data, b->bytes);
        }
        zones_guard(b, 1);
    }
}

static void check_zones(check_buf *b, check_result *r)
{
    zones_guard(b, 0);
    const int64_t lo = poison_broken(b->data - CHECK_ZONE, CHECK_ZONE);
    const int64_t hi = poison_broken(b->data + b->bytes, CHECK_ZONE);
    if (lo >= 0) {
        cmp_fail(r, "%s: written %lld bytes before its begin", b->name,
                 (long long)(CHECK_ZONE - lo));
    }
    if (hi >= 0) {
        cmp_fail(r, "%s: written %lld bytes past its end", b->name, (long long)hi);
    }
}

/* Bytes that are not the op's to write, and bytes of inputs, are as before the run. */
static void check_untouched(const check_buf *b, check_result *r)
{
    if (b->kind == BUF_IN) {
        if (memcmp(b->data, b->init, b->bytes) != 0) {
            cmp_fail(r, "%s: an input was changed", b->name);
        }
        return;
    }
    for (size_t i = 0; i < b->bytes; i++) {
        const uint8_t was = b->kind == BUF_INOUT ? b->init[i] : g_poison[i % sizeof g_poison];
        if (!b->mask[i] && b->data[i] != was) {
            cmp_fail(r, "%s: byte %zu, outside what the op may write, was written", b->name, i);
            return;
        }
    }
}

/* Inputs are put back at once: compare() may use them. */
static void check_surroundings(check_case *k, check_result *r)
{
    for (int32_t i = 0; i < k->n_buf; i++) {
        check_buf *b = &k->buf[i];
        check_zones(b, r);
        check_untouched(b, r);
        if (b->kind == BUF_IN) {
            memcpy(b->data, b->init, b->bytes);
        }
    }
    if (k->scratch.data != NULL) {
        check_zones(&k->scratch, r);
    }
    if (k->scratch_broken) {
        cmp_fail(r, "scratch: written outside of it");
    }
    k->scratch_broken = 0;
}

static void call_op(check_case *k, const kern_table *t, dev_queue *q)
{
    zones_guard(&k->scratch, 0);
    k->scratch.data = NULL;
    if (k->cls->run != NULL) {
        k->cls->run(t, k, q);
    } else {
        k->op->run(t, k, q);
    }
}

/* Waits, and takes note of what went wrong. */
static void end_run(check_case *k, const check_variant *v, dev_queue *q, check_result *r)
{
    case_sync(q);
    kvs_error err;
    const kvs_status st = dev_queue_check(q, &err);
    if (st != KVS_OK) {
        cmp_fail(r, "the queue failed: %s", err.text);
        k->broken = v->place == KERN_CUDA && st == KVS_DEVICE;
    }
    if (k->op->settle != NULL && !k->broken) {
        k->op->settle(k);
    }
}

static void run_once(check_case *k, const check_variant *v, const kern_table *t, pool *workers,
                     check_result *r)
{
    dev_queue host;
    dev_queue *q = v->place == KERN_CUDA ? k->queue : &host;
    restore(k);
    dev_queue_init(&host, workers);
    call_op(k, t, q);
    end_run(k, v, q, r);
}

static void keep(check_case *k, int as_ref)
{
    for (int32_t i = 0; i < k->n_buf; i++) {
        check_buf *b = &k->buf[i];
        if (b->mask != NULL) {
            memcpy(as_ref ? b->ref : b->first, b->data, b->bytes);
        }
    }
}

static void same_bytes(check_case *k, int as_ref, const char *than, check_result *r)
{
    for (int32_t i = 0; i < k->n_buf; i++) {
        const check_buf *b = &k->buf[i];
        const uint8_t *want = as_ref ? b->ref : b->first;
        for (size_t j = 0; b->mask != NULL && j < b->bytes; j++) {
            if (b->mask[j] && b->data[j] != want[j]) {
                cmp_fail(r, "%s: byte %zu differs from %s", b->name, j, than);
                break;
            }
        }
    }
}

/* ---- faults ---- */

/* Whether a fault of this kind can hit the buffer. */
static int fault_fits(const check_buf *b, fault_kind kind)
{
    const int out = b->mask != NULL;
    switch (kind) {
    case FAULT_ELEMENT:
    case FAULT_RERUN:
    case FAULT_THREAD:
    case FAULT_BITS:
        return out && b->bytes > 0 && b->elem != EL_U64 && memchr(b->mask, 1, b->bytes) != NULL;
    case FAULT_INDEX:
        return out && b->elem == EL_I32 && memchr(b->mask, 1, b->bytes) != NULL;
    case FAULT_COUNTER:
        return out && b->elem == EL_U64;
    case FAULT_ZONE_LO:
    case FAULT_ZONE_HI:
        return out;
    case FAULT_INPUT:
        return b->kind == BUF_IN && b->bytes > 0;
    case FAULT_GAP:
        return out && b->bytes > 0 && memchr(b->mask, 0, b->bytes) != NULL;
    default:
        return 0;
    }
}

/* The pick-th byte of the buffer, counted modulo, with that value in the mask. */
static size_t masked_byte(const check_buf *b, uint8_t value, uint64_t pick)
{
    size_t i = (size_t)(pick % b->bytes);
    while (b->mask[i] != value) {
        i = (i + 1) % b->bytes;
    }
    return i;
}

static void fault_hit(check_buf *b, const check_fault *f)
{
    const size_t size = elem_size(b->elem);
    switch (f->kind) {
    case FAULT_ELEMENT: {
        const size_t i = masked_byte(b, 1, f->pick) / size * size;
        uint8_t was[8];
        memcpy(was, b->data + i, size);
        poison_fill(b->data + i, size);
        b->data[i] ^= memcmp(was, b->data + i, size) == 0;
        break;
    }
    case FAULT_INDEX: {
        int32_t v = 0;
        const size_t i = masked_byte(b, 1, f->pick) / size * size;
        memcpy(&v, b->data + i, sizeof v);
        v = (int32_t)((uint32_t)v + 1u);
        memcpy(b->data + i, &v, sizeof v);
        break;
    }
    case FAULT_COUNTER:
        b->data[0]++;
        break;
    case FAULT_ZONE_LO:
        b->data[-1] ^= 1;
        break;
    case FAULT_ZONE_HI:
        b->data[b->bytes + f->pick % CHECK_ZONE] ^= 1;
        break;
    case FAULT_INPUT:
        b->data[f->pick % b->bytes] ^= 1;
        break;
    case FAULT_GAP:
        b->data[masked_byte(b, 0, f->pick)] ^= 1;
        break;
    default:
        b->data[masked_byte(b, 1, f->pick)] ^= 1;
        break;
    }
}

int fault_applies(const check_case *k, fault_kind kind)
{
    if (kind == FAULT_SCRATCH) {
        return k->has_scratch;
    }
    if (kind == FAULT_BITS && (k->cls->flags & CLASS_SAME_BITS) == 0) {
        return 0;
    }
    for (int32_t i = 0; i < k->n_buf; i++) {
        if (fault_fits(&k->buf[i], kind)) {
            return 1;
        }
    }
    return 0;
}

static void fault_plant(check_case *k, const check_fault *f, fault_kind kind)
{
    if (f == NULL || f->kind != kind) {
        return;
    }
    if (kind == FAULT_SCRATCH) {
        zones_guard(&k->scratch, 0);
        k->scratch.data[k->scratch.bytes] ^= 1;
        return;
    }
    int32_t at = (int32_t)(f->pick % (uint64_t)k->n_buf);
    while (!fault_fits(&k->buf[at], kind)) {
        at = (at + 1) % k->n_buf;
    }
    zones_guard(&k->buf[at], 0);
    fault_hit(&k->buf[at], f);
}

const char *fault_name(fault_kind kind)
{
    static const char *const names[N_FAULT] = {
        "none",        "element",     "index",       "ulp over",       "ulp inside",
        "zone before", "zone behind", "scratch end", "input",          "gap",
        "second run",  "two workers", "counter",     "reference bits",
    };
    return names[kind];
}

/* Faults of one run's surroundings and values come right after it. */
static void plant_first_run(check_case *k, const check_fault *f)
{
    static const fault_kind kinds[] = {FAULT_ELEMENT, FAULT_INDEX, FAULT_ZONE_LO, FAULT_ZONE_HI,
                                       FAULT_SCRATCH, FAULT_INPUT, FAULT_GAP,     FAULT_COUNTER};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        fault_plant(k, f, kinds[i]);
    }
}

/* What a further run on a device left. */
static void compare_again(check_case *k, const check_variant *v, const char *than, check_result *r)
{
    check_surroundings(k, r);
    k->cls->compare(k, v, r);
    if (!v->free_order) {
        same_bytes(k, 0, than, r);
    }
}

/* Another run with blocks for FEW_SM multiprocessors. */
static void few_blocks_run(check_case *k, const check_variant *v, const kern_table *t, check_result *r)
{
    const int32_t n_sm = k->queue->n_sm;
    k->queue->n_sm = FEW_SM;
    run_once(k, v, t, NULL, r);
    k->queue->n_sm = n_sm;
    if (!k->broken) {
        compare_again(k, v, "the run with all multiprocessors", r);
    }
}

/* Another run, from a graph that was recorded while the inputs held poison. */
static void graph_run(check_case *k, const check_variant *v, const kern_table *t, check_result *r)
{
    kvs_error err;
    dev_graph g;
    kvs_status st = dev_capture_begin(k->queue, &err);
    if (st >= 0) {
        for (int32_t i = 0; i < k->n_buf; i++) {
            if (k->buf[i].kind == BUF_IN) {
                poison_fill(k->buf[i].data, k->buf[i].bytes);
            }
        }
        call_op(k, t, k->queue);
        st = dev_capture_end(k->queue, &g, &err);
        for (int32_t i = 0; i < k->n_buf; i++) {
            if (k->buf[i].kind == BUF_IN) {
                memcpy(k->buf[i].data, k->buf[i].init, k->buf[i].bytes);
            }
        }
    }
    if (st < 0) {
        cmp_fail(r, "no graph can hold it: %s", err.text);
        return;
    }
    restore(k);
    dev_graph_launch(&g, k->queue);
    end_run(k, v, k->queue, r);
    dev_graph_free(&g);
    if (!k->broken) {
        compare_again(k, v, "the run without a graph", r);
    }
}

static void further_runs(check_case *k, const check_variant *v, const kern_table *t, check_result *r)
{
    if (k->queue->n_sm > FEW_SM) {
        few_blocks_run(k, v, t, r);
    }
    if (!k->broken && (k->cls->flags & CLASS_STEPS) == 0) {
        graph_run(k, v, t, r);
    }
}

/* Everything but what comes before and after all runs. */
static void all_runs(check_case *k, const check_variant *v, const kern_table *t, int is_ref,
                     pool *workers, const check_fault *fault, check_result *r)
{
    run_once(k, v, t, NULL, r);
    if (k->broken) {
        return;
    }
    plant_first_run(k, fault);
    check_surroundings(k, r);
    k->cls->compare(k, v, r);
    keep(k, 0);
    if (is_ref) {
        keep(k, 1);
    } else if ((k->cls->flags & CLASS_SAME_BITS) != 0) {
        fault_plant(k, fault, FAULT_BITS);
        same_bytes(k, 1, "the reference variant's", r);
    }
    run_once(k, v, t, NULL, r);
    if (k->broken) {
        return;
    }
    fault_plant(k, fault, FAULT_RERUN);
    same_bytes(k, 0, "the first run's", r);
    check_surroundings(k, r);
    if (v->place == KERN_CUDA && (!k->quick || k->index % QUICK_FURTHER == 0)) {
        further_runs(k, v, t, r);
    }
    if (workers != NULL && v->place == KERN_HOST) {
        run_once(k, v, t, workers, r);
        fault_plant(k, fault, FAULT_THREAD);
        same_bytes(k, 0, "the run with one worker", r);
        check_surroundings(k, r);
    }
}

void case_run(check_case *k, const check_variant *v, const kern_table *t, int is_ref, pool *workers,
              const check_fault *fault, check_result *r)
{
    const size_t mark = k->used;
    const int64_t bad_before = r->n_bad;
    r->n_case++;
    all_runs(k, v, t, is_ref, workers, fault, r);
    if (r->n_bad != bad_before && bad_before == 0) {
        const size_t n = strlen(r->first);
        snprintf(r->first + n, sizeof r->first - n, " (case %d)", k->index);
    }
    if (k->broken) {
        return;
    }
    /* restore inputs that a fault or a wrong kernel changed, and give the scratch back */
    for (int32_t i = 0; i < k->n_buf; i++) {
        check_buf *b = &k->buf[i];
        zones_guard(b, 0);
        if (b->init != NULL) {
            memcpy(b->data, b->init, b->bytes);
        }
        poison_fill(b->data - CHECK_ZONE, CHECK_ZONE);
        poison_fill(b->data + b->bytes, CHECK_ZONE);
    }
    zones_guard(&k->scratch, 0);
    k->scratch.data = NULL;
    k->used = mark;
}
