/* attn_probe.c - speed of the attention kernels beside the dot peak of the machine it runs on.
 *
 *     attn_probe [parts] [sparse] [dense] [variant=NAME] [threads=N] [gib=N] [quick]
 *                [cpu]
 *
 * Without a word all of it runs, for every variant the machine has. `peak` is what independent chains of
 * the variant's own product (pair dots of bf16, or fused multiply-adds) reach on that many threads just
 * before, and `share` is useful flops (2 * 1088 per head and attended key) over it. Caches are pools of at
 * least gib GiB (default 1), and each repetition attends other slots, so rows come from memory. A result
 * is checked against plain float64 loops on a sample, and for the same bits on 1 and N threads. Ends with
 * 1 where something is wrong. `cpu` runs one thread and counts its processor time: for busy machines. */
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/rng.h"
#include "dev/dev.h"
#include "kern/kern.h"
#include "kern/x86/attn_x86.h"
#include "num/kvfmt.h"

enum { MAX_REP = 64, N_LIST = 8 /* different key lists, taken in turn */ };

static int g_wrong;
static bool g_quick;
static bool g_cpu_time;
static double g_gib = 1.0;

static void *map(size_t bytes)
{
    kvs_error err;
    void *p = mem_map_pages(bytes, 1, &err);
    if (p == NULL) {
        fprintf(stderr, "attn_probe: %s\n", err.text);
        exit(2);
    }
    return p;
}

/* Wall time, or with `cpu` the processor time of the process. */
static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(g_cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * INT64_C(1000000000) + (int64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* ---- peak ------------------------------------------------------------------------------------ */

#define CHAINS_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx2,fma"))) static float chains_avx2(int64_t n)
{
    const __m256 a = _mm256_set1_ps(0.999f);
    const __m256 b = _mm256_set1_ps(1e-3f);
#define DECLARE(i) __m256 x##i = _mm256_set1_ps((float)i);
    CHAINS_12(DECLARE)
#undef DECLARE
    for (int64_t k = 0; k < n; k++) {
#define STEP(i) x##i = _mm256_fmadd_ps(x##i, a, b);
        CHAINS_12(STEP)
#undef STEP
    }
    __m256 s = _mm256_setzero_ps();
#define SUM(i) s = _mm256_add_ps(s, x##i);
    CHAINS_12(SUM)
#undef SUM
    return _mm256_cvtss_f32(s);
}

__attribute__((target("avx512f"))) static float chains_avx512(int64_t n)
{
    const __m512 a = _mm512_set1_ps(0.999f);
    const __m512 b = _mm512_set1_ps(1e-3f);
#define DECLARE(i)                                                                                 \
    __m512 x##i = _mm512_set1_ps((float)i);                                                        \
    __m512 y##i = _mm512_set1_ps((float)(i + 12));
    CHAINS_12(DECLARE)
#undef DECLARE
    for (int64_t k = 0; k < n; k++) {
#define STEP(i)                                                                                    \
    x##i = _mm512_fmadd_ps(x##i, a, b);                                                            \
    y##i = _mm512_fmadd_ps(y##i, a, b);
        CHAINS_12(STEP)
#undef STEP
    }
    __m512 s = _mm512_setzero_ps();
#define SUM(i) s = _mm512_add_ps(s, _mm512_add_ps(x##i, y##i));
    CHAINS_12(SUM)
#undef SUM
    return _mm512_cvtss_f32(s);
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) static float chains_bf16(int64_t n)
{
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00); /* 2^-7 */
    const __m512bh b = (__m512bh)_mm512_set1_epi16(0x3f00); /* 0.5 */
#define DECLARE(i)                                                                                 \
    __m512 x##i = _mm512_set1_ps((float)i);                                                        \
    __m512 y##i = _mm512_set1_ps((float)(i + 12));
    CHAINS_12(DECLARE)
#undef DECLARE
    for (int64_t k = 0; k < n; k++) {
#define STEP(i)                                                                                    \
    x##i = _mm512_dpbf16_ps(x##i, a, b);                                                           \
    y##i = _mm512_dpbf16_ps(y##i, a, b);
        CHAINS_12(STEP)
#undef STEP
    }
    __m512 s = _mm512_setzero_ps();
#define SUM(i) s = _mm512_add_ps(s, _mm512_add_ps(x##i, y##i));
    CHAINS_12(SUM)
#undef SUM
    return _mm512_cvtss_f32(s);
}

typedef struct ceiling {
    float (*chains)(int64_t n);
    double flop_per_round; /* of one round of all chains */
    int64_t n;
    volatile float sink[1024];
} ceiling;

static void ceiling_task(void *ctx, int64_t i_task, int i_worker)
{
    ceiling *c = ctx;
    (void)i_worker;
    c->sink[i_task % 1024] = c->chains(c->n);
}

/* The best of several tries, in flop/s over all threads. */
static double peak(pool *p, const char *product)
{
    static ceiling c;
    const int n_thread = pool_size(p);
    c.n = 100000;
    c.chains = chains_avx2;
    c.flop_per_round = 12 * 8 * 2;
    if (strcmp(product, "f32x16") == 0) {
        c.chains = chains_avx512;
        c.flop_per_round = 24 * 16 * 2;
    } else if (strcmp(product, "bf16") == 0) {
        c.chains = chains_bf16;
        c.flop_per_round = 24 * 32 * 2;
    }
    double best = 0.0;
    for (int i = 0; i < 60; i++) {
        const int64_t t = now_ns();
        pool_run(p, ceiling_task, &c, n_thread);
        const double s = (double)(now_ns() - t) * 1e-9;
        const double rate = c.flop_per_round * (double)c.n * n_thread / s;
        best = rate > best ? rate : best;
    }
    return best;
}

/* ---- caches ---------------------------------------------------------------------------------- */

typedef struct cache {
    int32_t fmt;
    uint8_t *kv;
    size_t bytes;
    int64_t n_slot;
} cache;

/* A pool of at least g_gib GiB: 4096 different rows, repeated. */
static cache cache_make(int32_t fmt, int64_t min_slot)
{
    const int64_t row = kv_row_bytes(fmt);
    cache c = {.fmt = fmt};
    c.n_slot = (int64_t)(g_gib * 1024.0 * 1024.0 * 1024.0) / row;
    c.n_slot = (c.n_slot > min_slot ? c.n_slot : min_slot) / 64 * 64 + 64;
    c.bytes = (size_t)(c.n_slot * row);
    c.kv = map(c.bytes);
    const kv_writer w = {.fmt = fmt, .k_scale = 0.0625f, .in_type = KVS_DTYPE_F32};
    rng r = rng_init(7, (uint64_t)fmt);
    for (int64_t i = 0; i < c.n_slot; i++) {
        if (i >= 4096) {
            memcpy(c.kv + i * row, c.kv + (i % 4096) * row, (size_t)row);
            continue;
        }
        float x[KVS_ROW_DIM];
        for (int32_t d = 0; d < KVS_ROW_DIM; d++) {
            x[d] = (float)rng_next_normal(&r);
        }
        kv_row_write(&w, c.kv + i * row, x, x + KVS_LATENT_DIM, NULL);
    }
    return c;
}

/* ---- one case -------------------------------------------------------------------------------- */

typedef struct spec {
    const char *name;
    int32_t fmt, n_row, n_head, n_lane;
    int32_t n_key; /* of each row */
    bool list;
    int32_t none;      /* of 8 entries, how many are -1 */
    int32_t rows_each; /* table mode: rows of a request */
} spec;

typedef struct job {
    attn_args a;
    void *q;
    int32_t *slots[N_LIST], *lane_count, *table[N_LIST], *row_req, *kv_len;
    dev_queue queue;
} job;

static void *alloc(size_t bytes)
{
    void *p = mem_alloc(bytes, 64);
    if (p == NULL) {
        fprintf(stderr, "attn_probe: out of memory\n");
        exit(2);
    }
    memset(p, 0, bytes);
    return p;
}

static void job_lists(job *j, const spec *s, const cache *c, rng *r)
{
    attn_args *a = &j->a;
    a->slots_stride = s->n_key;
    j->lane_count = alloc((size_t)(s->n_row * s->n_lane) * sizeof *j->lane_count);
    for (int32_t i = 0; i < s->n_row * s->n_lane; i++) {
        j->lane_count[i] = s->n_key / s->n_lane;
    }
    for (int32_t n = 0; n < N_LIST; n++) {
        j->slots[n] = alloc((size_t)s->n_row * (size_t)s->n_key * sizeof *j->slots[n]);
        for (int64_t i = 0; i < (int64_t)s->n_row * s->n_key; i++) {
            const int32_t slot = (int32_t)rng_next_below(r, (uint64_t)c->n_slot);
            j->slots[n][i] = (int32_t)rng_next_below(r, 8) < s->none ? -1 : slot;
        }
    }
    a->slots = j->slots[0];
    a->lane_count = j->lane_count;
}

static void job_tables(job *j, const spec *s, const cache *c, rng *r)
{
    attn_args *a = &j->a;
    a->n_req = (s->n_row + s->rows_each - 1) / s->rows_each;
    a->table_width = (s->n_key + 63) / 64;
    a->table_stride = a->table_width;
    a->interleave = 1;
    j->row_req = alloc((size_t)s->n_row * sizeof *j->row_req);
    j->kv_len = alloc((size_t)s->n_row * sizeof *j->kv_len);
    for (int32_t i = 0; i < s->n_row; i++) {
        j->row_req[i] = i / s->rows_each;
        j->kv_len[i] = s->n_key - (s->rows_each - 1 - i % s->rows_each);
    }
    for (int32_t n = 0; n < N_LIST; n++) {
        const size_t cells = (size_t)a->n_req * (size_t)a->table_width;
        j->table[n] = alloc(cells * sizeof *j->table[n]);
        for (size_t i = 0; i < cells; i++) {
            j->table[n][i] = (int32_t)rng_next_below(r, (uint64_t)(c->n_slot / 64));
        }
    }
    a->table = j->table[0];
    a->row_req = j->row_req;
    a->kv_len = j->kv_len;
}

static job job_make(const spec *s, const cache *c, pool *p)
{
    job j;
    memset(&j, 0, sizeof j);
    attn_args *a = &j.a;
    rng r = rng_init(11, 0);
    a->n_row = s->n_row;
    a->n_head = s->n_head;
    a->n_lane = s->n_lane;
    a->fmt = s->fmt;
    a->softmax_scale = 0.0417f;
    a->k_scale = 0.0625f;
    a->kv = c->kv;
    a->n_slot = c->n_slot;
    a->row_stride = kv_row_bytes(s->fmt);
    a->page_stride = 64 * a->row_stride;
    a->q_type = s->fmt == KVS_KV_F32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->q_stride_head = KVS_ROW_DIM;
    a->q_stride_row = (int64_t)KVS_ROW_DIM * s->n_head;
    const int64_t n_q = a->q_stride_row * s->n_row;
    j.q = alloc((size_t)n_q * 4);
    for (int64_t i = 0; i < n_q; i++) {
        const float x = (float)rng_next_normal(&r);
        if (a->q_type == KVS_DTYPE_F32) {
            ((float *)j.q)[i] = x;
        } else {
            ((bf16 *)j.q)[i] = bf16_from_f32(x);
        }
    }
    a->q = j.q;
    if (s->list) {
        job_lists(&j, s, c, &r);
    } else {
        job_tables(&j, s, c, &r);
    }
    a->out_stride_head = KVS_LATENT_DIM;
    a->out_stride_row = (int64_t)KVS_LATENT_DIM * s->n_head;
    a->out = alloc((size_t)(a->out_stride_row * s->n_row) * sizeof(float));
    a->lse = alloc((size_t)(s->n_row * s->n_head) * sizeof(float));
    dev_queue_init(&j.queue, p);
    a->scratch_bytes = attn_x86_scratch(a, &j.queue);
    a->scratch = map(a->scratch_bytes);
    return j;
}

static void job_free(job *j)
{
    for (int32_t n = 0; n < N_LIST; n++) {
        mem_free(j->slots[n]);
        mem_free(j->table[n]);
    }
    mem_free(j->lane_count);
    mem_free(j->row_req);
    mem_free(j->kv_len);
    mem_free(j->q);
    mem_free(j->a.out);
    mem_free(j->a.lse);
    mem_unmap_pages(j->a.scratch, j->a.scratch_bytes);
}

static int64_t slot_of(const attn_args *a, int32_t row, int32_t k)
{
    if (a->slots != NULL) {
        return a->slots[row * a->slots_stride + k];
    }
    return (int64_t)a->table[a->row_req[row] * a->table_stride + k / 64] * 64 + k % 64;
}

/* One (row, head) against plain loops in double. */
static bool sample_is_right(const attn_args *a, int32_t row, int32_t head)
{
    static double score[1 << 20];
    const int32_t n = a->slots != NULL ? (int32_t)a->slots_stride : a->kv_len[row];
    float q[KVS_ROW_DIM], k[KVS_ROW_DIM];
    const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
    for (int32_t d = 0; d < KVS_ROW_DIM; d++) {
        q[d] = a->q_type == KVS_DTYPE_F32 ? ((const float *)a->q)[at + d]
                                          : bf16_to_f32(((const bf16 *)a->q)[at + d]);
    }
    double m = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        const int64_t slot = slot_of(a, row, i);
        score[i] = -INFINITY;
        if (slot < 0) {
            continue;
        }
        kv_row_read(a->fmt, a->k_scale, a->kv + slot * a->row_stride, k);
        score[i] = 0.0;
        for (int32_t d = 0; d < KVS_ROW_DIM; d++) {
            score[i] += (double)q[d] * (double)k[d];
        }
        score[i] *= (double)a->softmax_scale;
        m = score[i] > m ? score[i] : m;
    }
    static double out[KVS_LATENT_DIM];
    double l = 0.0;
    memset(out, 0, sizeof out);
    for (int32_t i = 0; i < n; i++) {
        if (score[i] == -INFINITY) {
            continue;
        }
        const int64_t slot = slot_of(a, row, i);
        kv_row_read(a->fmt, a->k_scale, a->kv + slot * a->row_stride, k);
        const double p = exp(score[i] - m);
        l += p;
        for (int32_t d = 0; d < KVS_LATENT_DIM; d++) {
            out[d] += p * (double)k[d];
        }
    }
    const float *got = a->out + row * a->out_stride_row + head * a->out_stride_head;
    double worst = fabs((double)a->lse[row * a->n_head + head] - (m + log(l)));
    for (int32_t d = 0; d < KVS_LATENT_DIM; d++) {
        const double e = fabs((double)got[d] - out[d] / l);
        worst = e > worst ? e : worst;
    }
    return worst < 2e-3; /* values of size 1; P may be rounded to bf16 */
}

static const char *product_of(const char *variant, int32_t fmt)
{
    if (strcmp(variant, "avx2") == 0 || strcmp(variant, "ref") == 0) {
        return "f32x8";
    }
    return strcmp(variant, "avx512bf16") == 0 && fmt != KVS_KV_F32 ? "bf16" : "f32x16";
}

static double run_once(const kern_table *t, job *j, int32_t i_list)
{
    attn_args a = j->a;
    a.slots = j->slots[i_list % N_LIST];
    a.table = j->table[i_list % N_LIST];
    const int64_t start = now_ns();
    t->attn(&a, &j->queue);
    return (double)(now_ns() - start) * 1e-9;
}

static void run_case(const kern_table *t, const spec *s, const cache *c, pool *p, pool *single)
{
    const char *variant = t->variant[KERN_OP_attn];
    job j = job_make(s, c, p);
    const double top = peak(p, product_of(variant, s->fmt));
    attn_stats stats = {0};
    j.a.stats = &stats;
    run_once(t, &j, 0);
    const double flop = 2.0 * 1088.0 * (double)stats.n_key * s->n_head;
    j.a.stats = NULL;
    bool right = true;
    for (int32_t i = 0; i < 3; i++) {
        right = right && sample_is_right(&j.a, i * (s->n_row - 1) / 2, i * (s->n_head - 1) / 2);
    }
    double time[MAX_REP];
    int n = 0;
    const int64_t begin = now_ns();
    while (n < 5 || (n < MAX_REP && now_ns() - begin < (g_quick ? 300 : 1500) * INT64_C(1000000))) {
        time[n] = run_once(t, &j, n + 1);
        n++;
    }
    qsort(time, (size_t)n, sizeof *time, by_value);
    /* the same bits from one thread */
    const size_t out_bytes = (size_t)(j.a.out_stride_row * s->n_row) * sizeof(float);
    run_once(t, &j, 0);
    float *many = alloc(out_bytes);
    memcpy(many, j.a.out, out_bytes);
    dev_queue_init(&j.queue, single);
    const double alone = run_once(t, &j, 0);
    const bool same = memcmp(many, j.a.out, out_bytes) == 0;
    mem_free(many);
    printf("%-11s %-10s %-9s rows %3d heads %3d lanes %d keys %6d %s | median %9.3f ms min %9.3f | "
           "%8.1f GFLOP/s peak %8.1f share %5.1f %% (min %5.1f %%) | x%.2f of 1 thread | %s%s\n",
           variant, s->name, kv_fmt_name(s->fmt), s->n_row, s->n_head, s->n_lane, s->n_key,
           s->none ? "7/8 none" : "        ", time[n / 2] * 1e3, time[0] * 1e3,
           flop / time[n / 2] * 1e-9, top * 1e-9, 100.0 * flop / time[n / 2] / top,
           100.0 * flop / time[0] / top, alone / time[n / 2], right ? "right" : "WRONG VALUES",
           same ? "" : " BITS DIFFER");
    fflush(stdout);
    g_wrong += !right || !same;
    job_free(&j);
}

static void sparse(const kern_table *t, pool *p, pool *single)
{
    const int32_t fmts[] = {KVS_KV_FP8_DS_MLA, KVS_KV_BF16, KVS_KV_F32};
    for (size_t f = 0; f < (g_quick ? 1 : 3); f++) {
        const cache c = cache_make(fmts[f], 0);
        const int32_t heads[] = {16, 128, 8, 24, 64};
        for (size_t i = 0; i < (f == 0 && !g_quick ? 5 : 2); i++) {
            const spec s = {.name = "sparse",
                            .fmt = fmts[f],
                            .n_row = 8,
                            .n_head = heads[i],
                            .n_lane = 8,
                            .n_key = 2048,
                            .list = true};
            run_case(t, &s, &c, p, single);
        }
        if (f == 0) {
            spec s = {.name = "sparse/8",
                      .fmt = fmts[f],
                      .n_row = 8,
                      .n_head = 128,
                      .n_lane = 1,
                      .n_key = 256,
                      .list = true};
            run_case(t, &s, &c, p, single);
            s.n_key = 2048;
            s.none = 7;
            run_case(t, &s, &c, p, single);
            s.n_head = 16;
            run_case(t, &s, &c, p, single);
        }
        mem_unmap_pages(c.kv, c.bytes);
    }
}

static void dense(const kern_table *t, pool *p, pool *single)
{
    const int32_t fmts[] = {KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA, KVS_KV_F32};
    for (size_t f = 0; f < (g_quick ? 2 : 4); f++) {
        const cache c = cache_make(fmts[f], 32768);
        spec s = {.name = "dense",
                  .fmt = fmts[f],
                  .n_row = 1,
                  .n_head = 128,
                  .n_lane = 8,
                  .n_key = 32768,
                  .rows_each = 1};
        run_case(t, &s, &c, p, single);
        if (f == 0 && !g_quick) {
            s.n_row = 4;
            s.rows_each = 4;
            s.n_head = 16;
            run_case(t, &s, &c, p, single);
            s.n_row = 1;
            s.rows_each = 1;
            run_case(t, &s, &c, p, single);
            s.n_row = 64;
            s.rows_each = 64;
            s.n_head = 128;
            s.n_key = 512;
            run_case(t, &s, &c, p, single);
        }
        mem_unmap_pages(c.kv, c.bytes);
    }
}

/* ---- parts ----------------------------------------------------------------------------------- */

static double best_of(const attn_isa *isa, attn_work *w, const uint8_t *const *row, int part)
{
    double best = 1.0;
    for (int k = 0; k < 30; k++) {
        const int64_t t = now_ns();
        w->first = k % 32 == 0;
        if (part == 0) {
            isa->load_tile(w, row, ATTN_TILE);
        } else if (part == 1) {
            isa->apply(w, ATTN_TILE, 0, w->n_col);
        } else if (part == 2) {
            isa->pack_q(w);
        } else if (part == 3) {
            isa->finish(w);
        } else {
            isa->merge(w->node, w->node + (int64_t)w->n_vec * isa->lanes * 513, w->n_vec, 0,
                       w->n_vec);
        }
        const double s = (double)(now_ns() - t) * 1e-9;
        best = s < best ? s : best;
    }
    return best;
}

/* Each kernel by itself on one thread, warm: nanoseconds, and the share of the peak of `apply`. */
static void parts_of(const char *name, const attn_isa *isa, const char *product, int32_t fmt,
                     pool *single)
{
    const double old = g_gib;
    g_gib = 0.01;
    const cache c = cache_make(fmt, 64);
    const double top = peak(single, product);
    const int32_t heads[] = {8, 16, 32, 48, 64, 128};
    for (size_t i = 0; i < 6; i++) {
        spec s = {
            .fmt = fmt, .n_row = 1, .n_head = heads[i], .n_lane = 1, .n_key = 64, .list = true};
        job j = job_make(&s, &c, single);
        const int32_t n_vec = (heads[i] + isa->lanes - 1) / isa->lanes;
        const size_t cols = (size_t)n_vec * (size_t)isa->lanes;
        attn_work w = {.a = &j.a, .n_row = 1, .n_col = heads[i], .n_vec = n_vec};
        w.q = alloc(cols * 576 * 4);
        w.scale = alloc(cols * 4);
        w.m = alloc(cols * 4);
        w.l = alloc(cols * 4);
        w.k = alloc((size_t)ATTN_TILE * ATTN_F32_STRIDE * 4 * 2);
        w.v = isa->bf16 ? w.k + ATTN_TILE * ATTN_BF16_STRIDE : w.k;
        w.s = alloc(2 * 64 * 16 * 4);
        w.p = isa->bf16 ? alloc(2 * 64 * 16 * 4) : w.s;
        w.node = alloc(cols * 513 * 4 * 2);
        const uint8_t *row[ATTN_TILE];
        for (int32_t k = 0; k < ATTN_TILE; k++) {
            row[k] = c.kv + (k * 37 % 64) * kv_row_bytes(fmt);
        }
        const double pack = best_of(isa, &w, row, 2);
        const double load = best_of(isa, &w, row, 0);
        const double apply = best_of(isa, &w, row, 1);
        const double finish = best_of(isa, &w, row, 3);
        const double merge = best_of(isa, &w, row, 4);
        printf("%-11s parts %-10s heads %3d | pack %8.0f ns  tile: load %8.0f apply %9.0f (share "
               "%5.1f %%)"
               "  segment: finish %7.0f merge %7.0f\n",
               name, kv_fmt_name(fmt), heads[i], pack * 1e9, load * 1e9, apply * 1e9,
               100.0 * 2.0 * 1088.0 * 64.0 * heads[i] / apply / top, finish * 1e9, merge * 1e9);
        mem_free(w.q);
        mem_free(w.scale);
        mem_free(w.m);
        mem_free(w.l);
        mem_free(w.k);
        if (isa->bf16) {
            mem_free(w.p);
        }
        mem_free(w.s);
        mem_free(w.node);
        job_free(&j);
    }
    fflush(stdout);
    mem_unmap_pages(c.kv, c.bytes);
    g_gib = old;
}

static void parts(const char *variant, pool *single)
{
    if (strcmp(variant, "avx2") == 0) {
        parts_of(variant, &attn_isa_avx2, "f32x8", KVS_KV_FP8_DS_MLA, single);
    } else if (strcmp(variant, "avx512") == 0) {
        parts_of(variant, &attn_isa_avx512, "f32x16", KVS_KV_FP8_DS_MLA, single);
    } else if (strcmp(variant, "avx512bf16") == 0) {
        parts_of(variant, &attn_isa_avx512bf16, "bf16", KVS_KV_FP8_DS_MLA, single);
        parts_of(variant, &attn_isa_avx512bf16, "bf16", KVS_KV_BF16, single);
    }
}

/* ---- command line ---------------------------------------------------------------------------- */

typedef struct options {
    bool parts, sparse, dense;
    const char *variant;
    int n_thread;
} options;

static options parse(int argc, char **argv)
{
    options o = {.n_thread = pool_cores()};
    for (int i = 1; i < argc; i++) {
        const char *w = argv[i];
        if (strcmp(w, "parts") == 0) {
            o.parts = true;
        } else if (strcmp(w, "sparse") == 0) {
            o.sparse = true;
        } else if (strcmp(w, "dense") == 0) {
            o.dense = true;
        } else if (strcmp(w, "quick") == 0) {
            g_quick = true;
        } else if (strcmp(w, "cpu") == 0) {
            g_cpu_time = true;
        } else if (strncmp(w, "variant=", 8) == 0) {
            o.variant = w + 8;
        } else if (strncmp(w, "threads=", 8) == 0) {
            o.n_thread = atoi(w + 8);
        } else if (strncmp(w, "gib=", 4) == 0) {
            g_gib = atof(w + 4);
        } else {
            fprintf(stderr, "attn_probe: unknown word \"%s\"\n", w);
            exit(2);
        }
    }
    o.n_thread = g_cpu_time ? 1 : o.n_thread;
    if (!o.parts && !o.sparse && !o.dense) {
        o.parts = o.sparse = o.dense = true;
    }
    return o;
}

int main(int argc, char **argv)
{
    const options o = parse(argc, argv);
    kvs_error err;
    pool *p = NULL;
    pool *single = NULL;
    if (pool_open(&p, o.n_thread, &err) != KVS_OK || pool_open(&single, 1, &err) != KVS_OK) {
        fprintf(stderr, "attn_probe: %s\n", err.text);
        return 2;
    }
    char text[256];
    printf("cpu: %s; threads %d\n", cpu_describe(cpu_features(), text, sizeof text), o.n_thread);
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        const bool wanted = o.variant == NULL || strcmp(o.variant, v[i].name) == 0;
        if (v[i].op != KERN_OP_attn || v[i].features == 0 || !wanted ||
            !cpu_has(cpu_features(), v[i].features)) {
            continue;
        }
        kern_table t;
        char choice[64];
        snprintf(choice, sizeof choice, "attn=%s", v[i].name);
        if (kern_init(&t, cpu_features(), choice, &err) != KVS_OK) {
            fprintf(stderr, "attn_probe: %s\n", err.text);
            return 2;
        }
        if (o.parts) {
            parts(v[i].name, single);
        }
        if (o.sparse) {
            sparse(&t, p, single);
        }
        if (o.dense) {
            dense(&t, p, single);
        }
    }
    pool_close(p);
    pool_close(single);
    printf("%d wrong\n", g_wrong);
    return g_wrong > 0;
}
