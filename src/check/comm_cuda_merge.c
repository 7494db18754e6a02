/* check/comm_cuda_merge.c: partials that are merged as they come, against the reference's merge. */
#include "check/comm_cuda.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "check/check.h"
#include "kern/kern.h"

enum { DIM = KVS_LATENT_DIM, SPECIAL = 5 };

typedef struct partials {
    int32_t n_row, type;
    gpu_content kind;
    exchange_merge_args a[WIRE_MAX_RANK];
    float *part[WIRE_MAX_RANK]; /* host */
    float *lse[WIRE_MAX_RANK];
} partials;

static size_t elem_bytes(int32_t type)
{
    return type == KVS_DTYPE_BF16 ? 2 : 4;
}

static kvs_status partials_make(partials *m, gpu_world *w, gpu_content kind, int32_t n_row, int32_t type,
                                kvs_error *err)
{
    const int32_t heads = GPU_LOCAL * w->n;
    memset(m, 0, sizeof *m);
    m->n_row = n_row;
    m->type = type;
    m->kind = kind;
    for (int32_t r = 0; r < w->n; r++) {
        exchange_merge_args *a = &m->a[r];
        void *p = NULL;
        a->w = p2p_wire(w->g, r);
        a->n_row = n_row;
        a->n_head = heads;
        TRY(gpu_alloc(w, r, (size_t)(n_row * heads * DIM) * 4 + 16, &p, err));
        a->part = p;
        a->part_row = heads * DIM;
        TRY(gpu_alloc(w, r, (size_t)(n_row * heads) * 4 + 16, &p, err));
        a->part_lse = p;
        a->lse_row = heads;
        TRY(gpu_alloc(w, r, (size_t)(n_row * GPU_LOCAL * DIM) * elem_bytes(type) + 16, &a->out, err));
        a->out_type = type;
        a->out_row = GPU_LOCAL * DIM;
        TRY(gpu_alloc(w, r, (size_t)(n_row * GPU_LOCAL) * 4 + 16, &p, err));
        a->lse = p;
        TRY(gpu_alloc(w, r, sizeof(uint64_t), &p, err));
        a->n_nan = p;
        m->part[r] = mem_alloc((size_t)(n_row * heads * DIM) * 4 + 16, 0);
        m->lse[r] = mem_alloc((size_t)(n_row * heads) * 4 + 16, 0);
        if (m->part[r] == NULL || m->lse[r] == NULL) {
            return err_set(err, KVS_NOMEM, "no memory for partials of the check");
        }
    }
    return KVS_OK;
}

static void partials_free(partials *m)
{
    for (int i = 0; i < WIRE_MAX_RANK; i++) {
        mem_free(m->part[i]);
        mem_free(m->lse[i]);
    }
}

/* About one part in five has an LSE that takes it out; its values are NaN then. */
static void partials_fill(partials *m, gpu_world *w, uint64_t seed)
{
    const float out[SPECIAL] = {(float)-INFINITY, (float)INFINITY, (float)NAN, (float)-INFINITY,
                                (float)-INFINITY};
    const int64_t pairs = (int64_t)m->n_row * GPU_LOCAL * w->n;
    for (int32_t r = 0; r < w->n; r++) {
        rng g = rng_init(seed, (uint64_t)r);
        uint64_t x = rng_next(&g);
        for (int64_t i = 0; i < pairs * DIM; i++) {
            x = gpu_next_word(x);
            m->part[r][i] = (float)(int32_t)(x >> 32) * 0x1p-31f;
        }
        if (m->kind == GPU_RESERVED) {
            gpu_fill_words(m->part[r], (size_t)(pairs * DIM) * 4, m->kind, x);
        }
        for (int64_t i = 0; i < pairs * DIM; i++) { /* which NaN an operation gives differs between machines */
            m->part[r][i] = isfinite(m->part[r][i]) ? m->part[r][i] : 1.0f;
        }
        gen_f32(&g, m->lse[r], pairs, 6.0f);
        for (int64_t i = 0; i < pairs; i++) {
            const int32_t pick = gen_pick(&g, 5 * SPECIAL);
            if (pick < SPECIAL) {
                m->lse[r][i] = out[pick];
                memset(m->part[r] + i * DIM, 0xFF, DIM * sizeof(float));
            }
        }
        const uint64_t zero = 0;
        gpu_put(w, r, (void *)(uintptr_t)m->a[r].part, m->part[r], (size_t)(pairs * DIM) * 4);
        gpu_put(w, r, (void *)(uintptr_t)m->a[r].part_lse, m->lse[r], (size_t)pairs * 4);
        gpu_put(w, r, m->a[r].n_nan, &zero, sizeof zero);
        gpu_fill(w, r, m->a[r].out, GPU_POISON, (size_t)(m->n_row * GPU_LOCAL * DIM) * elem_bytes(m->type));
        gpu_fill(w, r, m->a[r].lse, GPU_POISON, (size_t)(m->n_row * GPU_LOCAL) * 4);
    }
}

/* Rank r's heads by the reference's merge. */
static void expect_merge(const partials *m, int32_t n, int32_t r, void *out, float *lse, uint64_t *n_nan)
{
    kern_table ref;
    dev_queue host;
    const float *out_in[WIRE_MAX_RANK];
    const float *lse_in[WIRE_MAX_RANK];
    for (int32_t p = 0; p < n; p++) {
        out_in[p] = m->part[p] + (size_t)(r * GPU_LOCAL) * DIM;
        lse_in[p] = m->lse[p] + r * GPU_LOCAL;
    }
    const merge_args a = {
        .n_part = n,
        .mode = KVS_LANES % n == 0 ? MERGE_TREE : MERGE_FOLD,
        .n_row = m->n_row,
        .n_head = GPU_LOCAL,
        .dim = DIM,
        .out_in = out_in,
        .lse_in = lse_in,
        .in_stride_row = (int64_t)n * GPU_LOCAL * DIM,
        .in_stride_head = DIM,
        .lse_stride_row = (int64_t)n * GPU_LOCAL,
        .out = out,
        .out_type = m->type,
        .out_stride_row = GPU_LOCAL * DIM,
        .out_stride_head = DIM,
        .lse = lse,
        .n_nan = n_nan,
    };
    *n_nan = 0;
    dev_queue_init(&host, NULL);
    (void)kern_init(&ref, 0, NULL, NULL);
    ref.merge(&a, &host);
}

static void compare_bytes(char *wrong, size_t cap, const char *what, int32_t rank, const void *got,
                          const void *want, size_t n)
{
    const uint8_t *g = got;
    const uint8_t *e = want;
    for (size_t i = 0; i < n && wrong[0] == '\0'; i++) {
        if (g[i] != e[i]) {
            snprintf(wrong, cap, "rank %d: %s, byte %zu of %zu: %02x, want %02x", (int)rank, what, i, n,
                     g[i], e[i]);
        }
    }
}

static kvs_status partials_compare(const partials *m, gpu_world *w, char *wrong, size_t cap, kvs_error *err)
{
    const size_t out_n = (size_t)(m->n_row * GPU_LOCAL * DIM) * elem_bytes(m->type);
    const size_t lse_n = (size_t)(m->n_row * GPU_LOCAL) * 4;
    uint8_t *mem = mem_alloc(2 * (out_n + lse_n) + 64, 0);
    if (mem == NULL) {
        return err_set(err, KVS_NOMEM, "no memory to compare partials");
    }
    float *want_lse = (float *)(void *)(mem + 2 * out_n);
    float *got_lse = want_lse + m->n_row * GPU_LOCAL;
    for (int32_t r = 0; r < w->n; r++) {
        if (!gpu_is_here(w, r)) {
            continue;
        }
        uint64_t want_nan;
        uint64_t got_nan = 0;
        expect_merge(m, w->n, r, mem, want_lse, &want_nan);
        gpu_get(w, r, mem + out_n, m->a[r].out, out_n);
        gpu_get(w, r, got_lse, m->a[r].lse, lse_n);
        gpu_get(w, r, &got_nan, m->a[r].n_nan, sizeof got_nan);
        compare_bytes(wrong, cap, "lse", r, got_lse, want_lse, lse_n);
        compare_bytes(wrong, cap, "out", r, mem + out_n, mem, out_n);
        if (got_nan != want_nan && wrong[0] == '\0') {
            snprintf(wrong, cap, "rank %d: %llu NaN counted, want %llu", (int)r,
                     (unsigned long long)got_nan, (unsigned long long)want_nan);
        }
    }
    mem_free(mem);
    return KVS_OK;
}

kvs_status gpu_check_partials(gpu_run *run, gpu_world *w, gpu_content kind, int32_t n_row, int32_t type,
                               char *wrong, size_t cap, kvs_error *err)
{
    partials m;
    const int32_t blocks = w->n_block;
    kvs_status st = partials_make(&m, w, kind, n_row, type, err);
    for (int rep = 0; rep < (n_row > 33 ? 1 : GPU_REPS) && st == KVS_OK && wrong[0] == '\0'; rep++) {
        partials_fill(&m, w, run->cfg->seed + ++run->n_case);
        gpu_merge(w, m.a);
        st = gpu_sync(w, err);
        gpu_check_sound(w, wrong, cap);
        st = st == KVS_OK ? partials_compare(&m, w, wrong, cap, err) : st;
        st = st == KVS_OK ? gpu_share(run, wrong, cap, err) : st;
    }
    partials_free(&m);
    if (st != KVS_DEVICE) {
        gpu_free_from(w, blocks);
    }
    return st;
}
