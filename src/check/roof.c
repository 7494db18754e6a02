/* check/roof.c - which loop measures a ceiling, its windows and its threads. */
#include "check/roof.h"

#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/err.h"
#include "base/mem.h"

enum { STEPS = 400000, PIECE = 4 << 20 };

static const struct {
    const char *name;
    int is_bytes;
} k_kind[] = {
#define ROOF_ROW(constant, name, is_bytes) {name, is_bytes},
    ROOF_LIST(ROOF_ROW)
#undef ROOF_ROW
};

const char *roof_name(roof_kind kind)
{
    return k_kind[kind].name;
}

int roof_is_bytes(roof_kind kind)
{
    return k_kind[kind].is_bytes;
}

roof_kind roof_of_variant(const char *variant, int f32)
{
    static const struct {
        const char *variant;
        roof_kind of_bf16, of_f32;
    } known[] = {{"avx2", ROOF_FMA_AVX2, ROOF_FMA_AVX2},
                 {"avx512", ROOF_FMA_AVX512, ROOF_FMA_AVX512},
                 {"avx512bf16", ROOF_DOT_BF16, ROOF_FMA_AVX512},
                 {"amx", ROOF_TILE_BF16, ROOF_FMA_AVX512}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(variant, known[i].variant) == 0) {
            return f32 ? known[i].of_f32 : known[i].of_bf16;
        }
    }
    return ROOF_FMA_REF;
}

/* ---- plain C --------------------------------------------------------------------------------- */

static uint64_t read_ref(const uint8_t *p, size_t n)
{
    uint64_t x[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < n; i += 32) {
        uint64_t w[4];
        memcpy(w, p + i, sizeof w);
        x[0] ^= w[0];
        x[1] ^= w[1];
        x[2] ^= w[2];
        x[3] ^= w[3];
    }
    return x[0] ^ x[1] ^ x[2] ^ x[3];
}

/* A product and a sum in eight chains of four lanes. */
static int fma_ref(int64_t n, double *flops)
{
    enum { LANES = 32 };
    float a[LANES];
    float one = 1.0f;
    for (int l = 0; l < LANES; l++) {
        a[l] = (float)l;
    }
    for (int64_t k = 0; k < n; k++) {
        __asm__ volatile("" : "+m"(one));
        for (int l = 0; l < LANES; l++) {
            a[l] += one * one;
        }
    }
    int ok = 1;
    for (int l = 0; l < LANES; l++) {
        ok = ok && a[l] == (float)l + (float)n;
    }
    *flops = (double)n * LANES * 2;
    return ok;
}

/* ---- windows --------------------------------------------------------------------------------- */

typedef struct window {
    roof *r;
    roof_loop_fn loop;
    uint64_t (*read)(const uint8_t *, size_t);
    void (*copy)(uint8_t *, const uint8_t *, size_t);
    atomic_uint_fast64_t sum;
    atomic_int_fast64_t n_wrong;
    double work; /* of one task */
} window;

static void copy_ref(uint8_t *to, const uint8_t *from, size_t n)
{
    memcpy(to, from, n);
}

static void task_read(void *ctx, int64_t i_task, int i_worker)
{
    (void)i_worker;
    window *w = ctx;
    const uint64_t x = w->read(w->r->mem + (size_t)i_task * PIECE, PIECE);
    atomic_fetch_xor_explicit(&w->sum, x, memory_order_relaxed);
}

/* The upper half from the lower. */
static void task_copy(void *ctx, int64_t i_task, int i_worker)
{
    (void)i_worker;
    window *w = ctx;
    uint8_t *from = w->r->mem + (size_t)i_task * PIECE;
    w->copy(from + w->r->bytes / 2, from, PIECE);
}

static void task_loop(void *ctx, int64_t i_task, int i_worker)
{
    (void)i_task;
    (void)i_worker;
    window *w = ctx;
    double flops = 0.0;
    if (!w->loop(STEPS, &flops)) {
        atomic_fetch_add(&w->n_wrong, 1);
    }
}

#if defined(__x86_64__)
static void choose(window *w, roof_kind kind, uint32_t features)
{
    const int avx2 = cpu_has(features, CPU_NEED_AVX2);
    const int avx512 = cpu_has(features, CPU_NEED_AVX512);
    w->read = avx512 ? roof_read_avx512 : avx2 ? roof_read_avx2 : read_ref;
    w->copy = avx512 ? roof_copy_avx512 : avx2 ? roof_copy_avx2 : copy_ref;
    w->loop = NULL;
    if (kind == ROOF_FMA_REF) {
        w->loop = fma_ref;
    } else if (kind == ROOF_FMA_AVX2 && avx2) {
        w->loop = roof_fma_avx2;
    } else if (kind == ROOF_FMA_AVX512 && avx512) {
        w->loop = roof_fma_avx512;
    } else if (kind == ROOF_DOT_BF16 && cpu_has(features, CPU_NEED_AVX512BF16)) {
        w->loop = roof_dot_avx512bf16;
    } else if (kind == ROOF_TILE_BF16 && cpu_has(features, CPU_NEED_AMX)) {
        w->loop = roof_tile_amx;
    }
}
#else
static void choose(window *w, roof_kind kind, uint32_t features)
{
    (void)features;
    w->read = read_ref;
    w->copy = copy_ref;
    w->loop = kind == ROOF_FMA_REF ? fma_ref : NULL;
}
#endif

/* The best value so far of a kind and thread count; 0 at first. NULL when the list is full. */
static double *seen_best(roof *r, roof_kind kind, int32_t n_thread)
{
    for (int32_t i = 0; i < r->n_seen; i++) {
        if (r->seen[i].kind == kind && r->seen[i].n_thread == n_thread) {
            return &r->seen[i].best;
        }
    }
    if (r->n_seen == ROOF_MAX_SEEN) {
        return NULL;
    }
    r->seen[r->n_seen].kind = kind;
    r->seen[r->n_seen].n_thread = n_thread;
    r->seen[r->n_seen].best = 0.0;
    return &r->seen[r->n_seen++].best;
}

static kvs_status verify(const window *w, roof_kind kind, kvs_error *err)
{
    const roof *r = w->r;
    int ok = atomic_load(&w->n_wrong) == 0;
    if (kind == ROOF_COPY) {
        ok = memcmp(r->mem, r->mem + r->bytes / 2, r->bytes / 2) == 0;
    } else if (kind == ROOF_READ) {
        ok = atomic_load(&w->sum) == read_ref(r->mem, r->bytes);
    }
    return ok ? KVS_OK
              : err_set(err, KVS_INTERNAL, "the loop of ceiling %s gave a wrong result",
                        roof_name(kind));
}

kvs_status roof_measure(roof *r, roof_kind kind, pool *p, roof_value *v, kvs_error *err)
{
    memset(v, 0, sizeof *v);
    window w = {.r = r};
    choose(&w, kind, r->features);
    int64_t n_task = pool_size(p);
    pool_fn task = task_loop;
    if (roof_is_bytes(kind)) {
        task = kind == ROOF_READ ? task_read : task_copy;
        n_task = (int64_t)(r->bytes / PIECE / (kind == ROOF_READ ? 1 : 2));
        v->work = (double)r->bytes;
    } else if (w.loop == NULL) {
        return KVS_OK;
    } else {
        double flops = 0.0;
        w.loop(1, &flops);
        v->work = flops * STEPS * (double)n_task;
    }
    pool_run(p, task, &w, n_task); /* wakes the workers and warms up */
    for (int i = 0; i < ROOF_N_WINDOW; i++) {
        atomic_store(&w.sum, 0);
        const int64_t t0 = clock_ns();
        pool_run(p, task, &w, n_task);
        v->window[i] = (double)(clock_ns() - t0) * 1e-9;
        const double rate = v->window[i] > 0.0 ? v->work / v->window[i] : 0.0;
        v->best = rate > v->best ? rate : v->best;
    }
    double *best = seen_best(r, kind, pool_size(p));
    if (best == NULL || *best == 0.0) {
        TRY(verify(&w, kind, err)); /* a pass over all memory: the first time only */
    }
    if (best != NULL) {
        *best = v->best > *best ? v->best : *best;
    }
    v->best_seen = best != NULL ? *best : v->best;
    return KVS_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

kvs_status roof_open(roof *r, size_t bytes, uint32_t features, kvs_error *err)
{
    memset(r, 0, sizeof *r);
    if (bytes < (size_t)64 << 20 || bytes % (2 * (size_t)PIECE) != 0) {
        return err_set(err, KVS_INVALID,
                       "memory for ceilings of %zu bytes: use a multiple of 8 MiB, at least 64 MiB",
                       bytes);
    }
    r->mem = mem_map_pages(bytes, 1, err);
    if (r->mem == NULL) {
        return KVS_NOMEM;
    }
    r->bytes = bytes;
    r->features = features;
    uint64_t x = 1;
    for (size_t i = 0; i < bytes; i += sizeof x) {
        x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
        memcpy(r->mem + i, &x, sizeof x);
    }
    return KVS_OK;
}

void roof_close(roof *r)
{
    mem_unmap_pages(r->mem, r->bytes);
    memset(r, 0, sizeof *r);
}
