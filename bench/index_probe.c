/* index_probe.c - speed of the index and cache kernels beside the ceilings of the machine it runs on.
 *
 *     index_probe [roof] [score] [topk] [merge] [write] [quick]
 *
 * Every variant that the machine can run is measured on pools of at least 1 GiB (64 MiB with `quick`)
 * that are rotated, so that data comes from memory, and its results are checked against the reference
 * on a sample. Times are medians; a ceiling is the best that was seen. `share` is of the ceiling named
 * in the row. Ends with 1 where a result is wrong. */
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/rng.h"
#include "dev/dev.h"
#include "kern/kern.h"
#include "num/kvfmt.h"

enum { MAX_SAMPLE = 4096 };

static size_t g_pool_bytes = (size_t)1 << 30;
static int g_n_wrong;
static pool *g_pool;
static int g_n_thread;

static void *map(size_t bytes)
{
    kvs_error err;
    void *p = mem_map_pages(bytes, 1, &err);
    if (p == NULL) {
        fprintf(stderr, "index_probe: %s\n", err.text);
        exit(2);
    }
    return p;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static void wrong(const char *what)
{
    printf("  WRONG: %s\n", what);
    g_n_wrong++;
}

/* Fast, seeded, roughly normal. */
static uint64_t g_lcg = 88172645463325252u;

static uint64_t draw(void)
{
    g_lcg ^= g_lcg << 13;
    g_lcg ^= g_lcg >> 7;
    g_lcg ^= g_lcg << 17;
    return g_lcg;
}

static float draw_normal(void)
{
    const uint64_t u = draw();
    const int32_t s = (int32_t)(u & 0xFFFF) + (int32_t)(u >> 16 & 0xFFFF) +
                      (int32_t)(u >> 32 & 0xFFFF) + (int32_t)(u >> 48);
    return ((float)(s - 131070) + (float)(draw() >> 40) * 0x1p-24f) * 2.6e-5f;
}

/* ---- ceilings ------------------------------------------------------------------------------------- */

static volatile float g_sink;

__attribute__((target("avx2,fma"))) static float read_bytes(const float *p, int64_t n)
{
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                   _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int j = 0; j < 4; j++) {
            s[j] = _mm256_or_ps(s[j], _mm256_loadu_ps(p + i + j * 8));
        }
    }
    float out[8];
    _mm256_storeu_ps(out, _mm256_or_ps(_mm256_or_ps(s[0], s[1]), _mm256_or_ps(s[2], s[3])));
    for (; i < n; i++) {
        out[0] += p[i];
    }
    return out[0];
}

__attribute__((target("avx2,fma"))) static float peak_fma_256(int64_t n)
{
    __m256 a[12];
    const __m256 x = _mm256_set1_ps(0.999f);
    for (int i = 0; i < 12; i++) {
        a[i] = _mm256_set1_ps((float)i);
    }
    for (int64_t k = 0; k < n; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = _mm256_fmadd_ps(a[i], x, x);
        }
    }
    float out[8];
    for (int i = 1; i < 12; i++) {
        a[0] = _mm256_add_ps(a[0], a[i]);
    }
    _mm256_storeu_ps(out, a[0]);
    return out[0];
}

__attribute__((target("avx512f"))) static float peak_fma_512(int64_t n)
{
    __m512 a[16];
    const __m512 x = _mm512_set1_ps(0.999f);
    for (int i = 0; i < 16; i++) {
        a[i] = _mm512_set1_ps((float)i);
    }
    for (int64_t k = 0; k < n; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            a[i] = _mm512_fmadd_ps(a[i], x, x);
        }
    }
    for (int i = 1; i < 16; i++) {
        a[0] = _mm512_add_ps(a[0], a[i]);
    }
    return _mm512_reduce_add_ps(a[0]);
}

__attribute__((target("avx512f,avx512bf16"))) static float peak_dot_512(int64_t n)
{
    __m512 a[16];
    const __m512i w = _mm512_set1_epi32(0x3C003C00);
    for (int i = 0; i < 16; i++) {
        a[i] = _mm512_set1_ps((float)i);
    }
    for (int64_t k = 0; k < n; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)w, (__m512bh)w);
        }
    }
    for (int i = 1; i < 16; i++) {
        a[0] = _mm512_add_ps(a[0], a[i]);
    }
    return _mm512_reduce_add_ps(a[0]);
}

typedef struct peak_job {
    float (*fn)(int64_t n);
    int64_t n;
} peak_job;

static void peak_task(void *ctx, int64_t i, int worker)
{
    const peak_job *j = ctx;
    (void)i;
    (void)worker;
    g_sink = j->fn(j->n);
}

/* GFLOP/s with n_thread threads at once; flops per call of fn(1). */
static double peak_rate(float (*fn)(int64_t), double flops, int n_thread)
{
    peak_job j = {fn, 2000000};
    double best = 0.0;
    for (int r = 0; r < 8; r++) {
        const int64_t t0 = clock_ns();
        pool_run(n_thread > 1 ? g_pool : NULL, peak_task, &j, n_thread);
        const double rate = flops * (double)j.n * n_thread / (double)(clock_ns() - t0);
        best = rate > best ? rate : best;
    }
    return best;
}

static double g_peak_fma[2]; /* GFLOP/s of the widest f32 FMA: one thread, all          */
static double g_peak_fma256[2];
static double g_peak_dot[2]; /* of the bf16 dot product                                */
static double g_read[2];     /* GB/s                                                   */
static double g_copy[2];     /* GB/s, read + written                                   */

typedef struct copy_job {
    char *p;
    size_t bytes; /* of one task */
    bool copy;
} copy_job;

static void copy_task(void *ctx, int64_t i, int worker)
{
    const copy_job *j = ctx;
    (void)worker;
    if (j->copy) {
        memcpy(j->p + (size_t)i * j->bytes, j->p + (size_t)i * j->bytes + j->bytes / 2, j->bytes / 2);
    } else {
        g_sink = read_bytes((const float *)(void *)(j->p + (size_t)i * j->bytes),
                            (int64_t)(j->bytes / sizeof(float)));
    }
}

static double copy_rate(char *p, bool copy, bool all)
{
    const copy_job j = {p, (size_t)8 << 20, copy};
    double best = 0.0;
    for (int r = 0; r < 6; r++) {
        const int64_t t0 = clock_ns();
        pool_run(all ? g_pool : NULL, copy_task, (void *)&j, (int64_t)(g_pool_bytes / j.bytes));
        const double rate = (double)g_pool_bytes / (double)(clock_ns() - t0);
        best = rate > best ? rate : best;
    }
    return best;
}

static void measure_roof(char *p)
{
    const uint32_t have = cpu_features();
    for (int all = 0; all < 2; all++) {
        const int n = all ? g_n_thread : 1;
        g_peak_fma256[all] = peak_rate(peak_fma_256, 12 * 16, n);
        g_peak_fma[all] = g_peak_fma256[all];
        if (cpu_has(have, CPU_NEED_AVX512)) {
            g_peak_fma[all] = peak_rate(peak_fma_512, 16 * 32, n);
        }
        if (cpu_has(have, CPU_NEED_AVX512BF16)) {
            g_peak_dot[all] = peak_rate(peak_dot_512, 16 * 64, n);
        }
        g_read[all] = copy_rate(p, false, all != 0);
        g_copy[all] = copy_rate(p, true, all != 0);
        printf("roof, %d thread(s): f32 FMA 256-bit %.1f, widest %.1f, bf16 dot %.1f GFLOP/s; "
               "read %.2f, copy (read + written) %.2f GB/s\n",
               n, g_peak_fma256[all], g_peak_fma[all], g_peak_dot[all], g_read[all], g_copy[all]);
    }
}

/* ---- topk ----------------------------------------------------------------------------------------- */

static const char *const g_pattern[] = {"random",   "all equal", "ascending",  "descending",
                                        "5 values", "period 16", "period 4096", "few ones, zeros",
                                        "rising block", "all -inf"};
enum { N_PATTERN = sizeof g_pattern / sizeof *g_pattern };

static void fill_row(float *v, int64_t n, int pattern)
{
    for (int64_t i = 0; i < n; i++) {
        const float x = draw_normal();
        const float up = (float)i / (float)n;
        const float make[N_PATTERN] = {x,
                                       1.5f,
                                       up,
                                       -up,
                                       (float)(draw() % 5),
                                       i % 16 == 3 ? 10.0f + x : x,
                                       (float)(i % 4096) + x * 0.01f,
                                       draw() % 97 == 0 ? 1.0f : 0.0f,
                                       i >= n / 2 && i < n / 2 + 9000 ? 9.0f + (float)i * 1e-4f : x,
                                       -INFINITY};
        v[i] = make[pattern];
    }
}

typedef struct topk_bufs {
    int32_t *id;
    float *score;
    int32_t count;
    void *scratch;
} topk_bufs;

static topk_args topk_case(const float *row, int64_t n, int32_t k, topk_bufs *b, int32_t *n_col)
{
    *n_col = (int32_t)n;
    b->count = 0;
    const topk_args a = {.n_row = 1,
                         .k = k,
                         .score = row,
                         .score_stride = n,
                         .n_col = n_col,
                         .list_id = b->id,
                         .list_score = b->score,
                         .list_count = &b->count};
    return a;
}

static void check_topk(const kern_table *t, const float *row, int64_t n, int32_t k, topk_bufs *b)
{
    kern_table ref;
    int32_t n_col = 0;
    kern_init(&ref, 0, NULL, NULL);
    topk_args a = topk_case(row, n, k, b, &n_col);
    a.scratch = b->scratch;
    t->topk(&a, NULL);
    const int32_t count = b->count;
    int32_t *id = malloc((size_t)k * sizeof *id);
    memcpy(id, b->id, (size_t)k * sizeof *id);
    void *scratch = malloc(ref.topk_scratch(&a, NULL));
    a = topk_case(row, n, k, b, &n_col);
    a.scratch = scratch;
    ref.topk(&a, NULL);
    if (count != b->count || memcmp(id, b->id, (size_t)count * sizeof *id) != 0) {
        wrong("topk");
    }
    free(scratch);
    free(id);
}

/* One variant over rows of n scores that tile the pool: median time as a multiple of a plain read. */
static void time_topk(const kern_table *t, const char *name, float *pool_rows, int64_t n, int32_t k,
                      int pattern)
{
    const int64_t n_row = (int64_t)(g_pool_bytes / sizeof(float)) / n;
    const int64_t n_fresh = n_row < 24 ? n_row : 24;
    topk_bufs b;
    b.id = malloc((size_t)k * sizeof *b.id);
    b.score = malloc((size_t)k * sizeof *b.score);
    int32_t n_col = 0;
    topk_args a = topk_case(pool_rows, n, k, &b, &n_col);
    b.scratch = mem_alloc(t->topk_scratch(&a, NULL), 0);
    memset(b.scratch, 0, t->topk_scratch(&a, NULL));
    check_topk(t, pool_rows + (n_fresh - 1) * n, n, k, &b);
    static double read_us[MAX_SAMPLE];
    static double topk_us[MAX_SAMPLE];
    const int64_t reps = n_row / 2 < 400 ? n_row / 2 : 400;
    for (int64_t i = 0; i < reps; i++) {
        const float *cold = pool_rows + (2 * i) % n_row * n;
        const int64_t t0 = clock_ns();
        g_sink = read_bytes(cold, n);
        const int64_t t1 = clock_ns();
        a = topk_case(pool_rows + (2 * i + 1) % n_row * n, n, k, &b, &n_col);
        a.scratch = b.scratch;
        const int64_t t2 = clock_ns();
        t->topk(&a, NULL);
        const int64_t t3 = clock_ns();
        read_us[i] = (double)(t1 - t0) * 1e-3;
        topk_us[i] = (double)(t3 - t2) * 1e-3;
    }
    const double r = median(read_us, (int)reps);
    const double us = median(topk_us, (int)reps);
    printf("topk %-8s n %8lld k %5d %-16s read %8.1f us  topk %8.1f us  = %.2f reads\n", name,
           (long long)n, k, g_pattern[pattern], r, us, us / r);
    mem_free(b.scratch);
    free(b.id);
    free(b.score);
}

static void fill_pool(float *p, int64_t n, int pattern)
{
    const int64_t n_row = (int64_t)(g_pool_bytes / sizeof(float)) / n;
    const int64_t n_fresh = n_row < 24 ? n_row : 24;
    for (int64_t r = 0; r < n_row; r++) {
        if (r < n_fresh) {
            fill_row(p + r * n, n, pattern);
        } else {
            memcpy(p + r * n, p + r % n_fresh * n, (size_t)n * sizeof *p);
        }
    }
}

static void over_variants(kern_op op, void (*fn)(const kern_table *, const char *, void *), void *ctx)
{
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        if (v[i].op == op && v[i].features != 0 && cpu_has(cpu_features(), v[i].features)) {
            kern_table t;
            memset(&t, 0, sizeof t);
            v[i].apply(&t);
            fn(&t, v[i].name, ctx);
        }
    }
}

typedef struct topk_point {
    float *rows;
    int64_t n;
    int32_t k;
    int pattern;
} topk_point;

static void topk_variant(const kern_table *t, const char *name, void *ctx)
{
    const topk_point *c = ctx;
    time_topk(t, name, c->rows, c->n, c->k, c->pattern);
}

static void measure_topk(char *p)
{
    topk_point c = {(float *)(void *)p, 131072, 2048, 0};
    for (int pattern = 0; pattern < N_PATTERN; pattern++) {
        c.pattern = pattern;
        fill_pool(c.rows, c.n, pattern);
        over_variants(KERN_OP_topk, topk_variant, &c);
    }
    static const int64_t n[] = {2049, 4096, 6000, 8192, 16384, 32768, 65536, 262144, 1000000, 4194304};
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        c.n = n[i];
        static const int few[] = {0, 1, 2};
        for (int j = 0; j < 3; j++) {
            c.pattern = few[j];
            fill_pool(c.rows, c.n, c.pattern);
            over_variants(KERN_OP_topk, topk_variant, &c);
        }
    }
    c.n = 131072;
    c.pattern = 0;
    fill_pool(c.rows, c.n, 0);
    static const int32_t k[] = {1, 64, 512, 1024, 8192, 32768};
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        c.k = k[i];
        over_variants(KERN_OP_topk, topk_variant, &c);
    }
}

/* ---- index_score ---------------------------------------------------------------------------------- */

typedef struct score_point {
    char *pool_pages;
    int32_t fmt, n_head, n_row, n_req, len;
} score_point;

static void check_scores(const index_score_args *a, const kern_table *t)
{
    kern_table ref;
    kern_init(&ref, 0, NULL, NULL);
    index_score_args b = *a;
    b.n_row = 1;
    b.col_end = b.col_begin + 128;
    b.score_stride = 128;
    float want[128];
    float got[128];
    b.score = want;
    b.scratch = malloc(ref.index_score_scratch(&b, NULL));
    ref.index_score(&b, NULL);
    free(b.scratch);
    b.score = got;
    b.scratch = mem_alloc(t->index_score_scratch(&b, NULL), 0);
    t->index_score(&b, NULL);
    mem_free(b.scratch);
    double error = 0.0;
    double size = 0.0;
    for (int i = 0; i < 128; i++) {
        error += fabs((double)want[i] - (double)got[i]);
        size += fabs((double)want[i]);
    }
    if (!(error <= 1e-5 * size) || size == 0.0) {
        wrong("index_score");
    }
}

static void score_variant(const kern_table *t, const char *name, void *ctx)
{
    const score_point *c = ctx;
    const int64_t page_bytes = index_page_bytes(c->fmt);
    const int64_t n_page = (int64_t)g_pool_bytes / page_bytes;
    const int32_t width = c->len / KVS_PAGE_TOKENS;
    int32_t *table = malloc((size_t)(c->n_req * width) * sizeof *table);
    uint8_t *q = malloc((size_t)(c->n_row * c->n_head * KVS_INDEX_DIM) * sizeof(float));
    float *w = malloc((size_t)(c->n_row * c->n_head) * sizeof *w);
    int32_t *row_req = malloc((size_t)c->n_row * sizeof *row_req);
    int32_t *kv_len = malloc((size_t)c->n_row * sizeof *kv_len);
    for (int64_t i = 0; i < (int64_t)c->n_row * c->n_head * KVS_INDEX_DIM; i++) {
        if (c->fmt == KVS_INDEX_F32) {
            ((float *)(void *)q)[i] = draw_normal();
        } else {
            q[i] = e4m3_from_f32(draw_normal() * 100.0f);
        }
    }
    for (int32_t i = 0; i < c->n_row * c->n_head; i++) {
        w[i] = draw_normal();
    }
    for (int32_t i = 0; i < c->n_row; i++) {
        row_req[i] = i * c->n_req / c->n_row;
        kv_len[i] = c->len;
    }
    float *score = malloc((size_t)c->n_row * (size_t)c->len * sizeof *score);
    memset(score, 0, (size_t)c->n_row * (size_t)c->len * sizeof *score);
    index_score_args a = {.n_row = c->n_row,
                          .n_head = c->n_head,
                          .q = q,
                          .w = w,
                          .keys = (const uint8_t *)c->pool_pages,
                          .fmt = c->fmt,
                          .page_stride = page_bytes,
                          .n_page = n_page,
                          .table = table,
                          .table_stride = width,
                          .table_width = width,
                          .n_req = c->n_req,
                          .row_req = row_req,
                          .kv_len = kv_len,
                          .col_end = c->len,
                          .score = score,
                          .score_stride = c->len};
    double gflops[2] = {0};
    for (int all = 0; all < 2; all++) {
        dev_queue queue;
        dev_queue_init(&queue, all ? g_pool : NULL);
        a.scratch = mem_alloc(t->index_score_scratch(&a, &queue), 0);
        static double us[MAX_SAMPLE];
        int n = 0;
        int64_t next = 0;
        for (const int64_t stop = clock_ns() + 1500000000; n < 3 || (clock_ns() < stop && n < 100);) {
            for (int32_t i = 0; i < c->n_req * width; i++) {
                table[i] = (int32_t)(next++ * 7 % n_page);
            }
            const int64_t t0 = clock_ns();
            t->index_score(&a, &queue);
            us[n++] = (double)(clock_ns() - t0) * 1e-3;
        }
        mem_free(a.scratch);
        gflops[all] = 2.0 * KVS_INDEX_DIM * c->n_head * c->n_row * (double)c->len / median(us, n) * 1e-3;
    }
    check_scores(&a, t);
    const bool dot = strstr(name, "bf16") != NULL && c->fmt == KVS_INDEX_FP8;
    const bool wide = strstr(name, "512") != NULL;
    const double *peak = dot ? g_peak_dot : wide ? g_peak_fma : g_peak_fma256;
    printf("score %-10s %s %3d rows of %2d requests, len %6d, %2d heads: %8.1f GFLOP/s = %4.1f %%; "
           "%d threads %8.1f = %4.1f %% (x%.2f)\n",
           name, index_fmt_name(c->fmt), c->n_row, c->n_req, c->len, c->n_head, gflops[0],
           100.0 * gflops[0] / peak[0], g_n_thread, gflops[1], 100.0 * gflops[1] / peak[1],
           gflops[1] / gflops[0]);
    free(table);
    free(q);
    free(w);
    free(row_req);
    free(kv_len);
    free(score);
}

static void fill_index_pages(uint8_t *p, int32_t fmt)
{
    const int64_t n_page = (int64_t)g_pool_bytes / index_page_bytes(fmt);
    for (int64_t i = 0; i < n_page; i++) {
        uint8_t *page = p + i * index_page_bytes(fmt);
        if (i >= 64) {
            memcpy(page, page - 64 * index_page_bytes(fmt), (size_t)index_page_bytes(fmt));
            continue;
        }
        for (int32_t t = 0; t < KVS_PAGE_TOKENS; t++) {
            float key[KVS_INDEX_DIM];
            for (int d = 0; d < KVS_INDEX_DIM; d++) {
                key[d] = draw_normal();
            }
            index_key_write(fmt, KVS_DTYPE_F32, page, t, key, NULL);
        }
    }
}

static void measure_score(char *p)
{
    static const int32_t heads[] = {64, 48, 32, 17, 16, 4};
    score_point c = {p, KVS_INDEX_FP8, 64, 8, 8, 32768};
    fill_index_pages((uint8_t *)p, c.fmt);
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        c.n_head = heads[i];
        over_variants(KERN_OP_index_score, score_variant, &c);
    }
    c.n_head = 64;
    c.n_row = 64;
    c.n_req = 1;
    c.len = 8192;
    over_variants(KERN_OP_index_score, score_variant, &c);
    c = (score_point){p, KVS_INDEX_F32, 64, 8, 8, 8192};
    fill_index_pages((uint8_t *)p, c.fmt);
    over_variants(KERN_OP_index_score, score_variant, &c);
}

/* ---- writers, gather, query quantisation ---------------------------------------------------------- */

enum { N_TOK = 8192 };

typedef struct write_point {
    char *p;          /* first half: inputs, second half: outputs */
    kern_op op;
    int32_t fmt, type, rule;
    const char *what;
} write_point;

static void run_write(const kern_table *t, const write_point *c, dev_queue *q, int64_t turn,
                      const int64_t *slot, const int32_t *table)
{
    const size_t half = g_pool_bytes / 2;
    const int64_t size = c->type == KVS_DTYPE_BF16 ? 2 : 4;
    if (c->op == KERN_OP_index_write) {
        const int64_t in = N_TOK * KVS_INDEX_DIM * size;
        const int64_t out = N_TOK / 64 * index_page_bytes(c->fmt);
        const index_write_args a = {.n_tok = N_TOK,
                                    .key = c->p + turn % ((int64_t)half / in) * in,
                                    .key_stride = KVS_INDEX_DIM,
                                    .in_type = c->type,
                                    .slot = slot,
                                    .keys = (uint8_t *)c->p + half + turn % ((int64_t)half / out) * out,
                                    .fmt = c->fmt,
                                    .page_stride = index_page_bytes(c->fmt),
                                    .n_slot = N_TOK};
        t->index_write(&a, q);
        return;
    }
    const int64_t wide = N_TOK * KVS_ROW_DIM * size;
    const int64_t rows = N_TOK * kv_row_bytes(c->fmt);
    char *const values = c->p + turn % ((int64_t)half / wide) * wide;
    uint8_t *const kv = (uint8_t *)c->p + half + turn % ((int64_t)half / rows) * rows;
    if (c->op == KERN_OP_kv_write) {
        const kv_write_args a = {.n_tok = N_TOK,
                                 .latent = values,
                                 .rope = values + KVS_LATENT_DIM * size,
                                 .latent_stride = KVS_ROW_DIM,
                                 .rope_stride = KVS_ROW_DIM,
                                 .in_type = c->type,
                                 .slot = slot,
                                 .kv = kv,
                                 .fmt = c->fmt,
                                 .page_stride = kv_page_bytes(c->fmt),
                                 .row_stride = kv_row_bytes(c->fmt),
                                 .n_slot = N_TOK,
                                 .rule = c->rule,
                                 .k_scale = 1.0f};
        t->kv_write(&a, q);
        return;
    }
    const int64_t start = 0;
    const int64_t count = N_TOK;
    const gather_args a = {.n_req = 1,
                           .table = table,
                           .table_stride = N_TOK / 64,
                           .table_width = N_TOK / 64,
                           .start = &start,
                           .count = &count,
                           .out_begin = &start,
                           .kv = kv,
                           .fmt = c->fmt,
                           .page_stride = kv_page_bytes(c->fmt),
                           .row_stride = kv_row_bytes(c->fmt),
                           .n_slot = N_TOK,
                           .k_scale = 1.0f,
                           .out = values,
                           .out_type = c->type,
                           .out_stride = KVS_ROW_DIM};
    t->gather(&a, q);
}

static void write_variant(const kern_table *t, const char *name, void *ctx)
{
    const write_point *c = ctx;
    static int64_t slot[N_TOK];
    static int32_t table[N_TOK / 64];
    for (int64_t i = 0; i < N_TOK; i++) {
        slot[i] = (i / 64 * 37 % (N_TOK / 64)) * 64 + i % 64; /* pages out of order */
        table[i / 64] = (int32_t)(i / 64 * 37 % (N_TOK / 64));
    }
    const int64_t size = c->type == KVS_DTYPE_BF16 ? 2 : 4;
    const double bytes =
        c->op == KERN_OP_index_write
            ? N_TOK * (double)(KVS_INDEX_DIM * size + index_page_bytes(c->fmt) / 64)
            : N_TOK * (double)(KVS_ROW_DIM * size + kv_row_bytes(c->fmt));
    double rate[2] = {0};
    for (int all = 0; all < 2; all++) {
        dev_queue queue;
        dev_queue_init(&queue, all ? g_pool : NULL);
        static double us[MAX_SAMPLE];
        int n = 0;
        for (const int64_t stop = clock_ns() + 800000000; n < 5 || (clock_ns() < stop && n < 400);) {
            const int64_t t0 = clock_ns();
            run_write(t, c, &queue, n, slot, table);
            us[n++] = (double)(clock_ns() - t0) * 1e-3;
        }
        rate[all] = bytes / median(us, n) * 1e-3;
    }
    /* the result of turn 0, against the reference */
    const size_t half = g_pool_bytes / 2;
    run_write(t, c, NULL, 0, slot, table);
    char *const out = c->op == KERN_OP_gather ? c->p : c->p + half;
    const size_t check = (size_t)N_TOK * (size_t)(c->op == KERN_OP_gather        ? KVS_ROW_DIM * size
                                                  : c->op == KERN_OP_index_write ? index_page_bytes(c->fmt) / 64
                                                                                 : kv_row_bytes(c->fmt));
    char *const got = malloc(check);
    memcpy(got, out, check);
    kern_table ref;
    kern_init(&ref, 0, NULL, NULL);
    run_write(&ref, c, NULL, 0, slot, table);
    if (memcmp(got, out, check) != 0) {
        wrong(c->what);
    }
    free(got);
    printf("write %-8s %-34s %6.2f GB/s = %4.1f %% of read, %4.1f %% of copy; %d threads %6.2f = %4.1f %%, "
           "%4.1f %%\n",
           name, c->what, rate[0], 100 * rate[0] / g_read[0], 100 * rate[0] / g_copy[0], g_n_thread,
           rate[1], 100 * rate[1] / g_read[1], 100 * rate[1] / g_copy[1]);
}

static void measure_write(char *p)
{
    static const write_point points[] = {
        {NULL, KERN_OP_kv_write, KVS_KV_FP8_DS_MLA, KVS_DTYPE_BF16, KVS_SCALE_POW2, "kv_write bf16 -> fp8_ds_mla"},
        {NULL, KERN_OP_kv_write, KVS_KV_FP8_DS_MLA, KVS_DTYPE_F32, KVS_SCALE_POW2, "kv_write f32 -> fp8_ds_mla"},
        {NULL, KERN_OP_kv_write, KVS_KV_FP8_DS_MLA, KVS_DTYPE_BF16, KVS_SCALE_EXACT, "kv_write bf16 -> fp8_ds_mla exact"},
        {NULL, KERN_OP_kv_write, KVS_KV_FP8, KVS_DTYPE_BF16, KVS_SCALE_POW2, "kv_write bf16 -> fp8"},
        {NULL, KERN_OP_kv_write, KVS_KV_BF16, KVS_DTYPE_BF16, KVS_SCALE_POW2, "kv_write bf16 -> bf16"},
        {NULL, KERN_OP_kv_write, KVS_KV_BF16, KVS_DTYPE_F32, KVS_SCALE_POW2, "kv_write f32 -> bf16"},
        {NULL, KERN_OP_kv_write, KVS_KV_F32, KVS_DTYPE_F32, KVS_SCALE_POW2, "kv_write f32 -> f32"},
        {NULL, KERN_OP_index_write, KVS_INDEX_FP8, KVS_DTYPE_BF16, 0, "index_write bf16 -> fp8"},
        {NULL, KERN_OP_index_write, KVS_INDEX_FP8, KVS_DTYPE_F32, 0, "index_write f32 -> fp8"},
        {NULL, KERN_OP_index_write, KVS_INDEX_F32, KVS_DTYPE_F32, 0, "index_write f32 -> f32"},
        {NULL, KERN_OP_gather, KVS_KV_FP8_DS_MLA, KVS_DTYPE_BF16, 0, "gather fp8_ds_mla -> bf16"},
        {NULL, KERN_OP_gather, KVS_KV_FP8_DS_MLA, KVS_DTYPE_F32, 0, "gather fp8_ds_mla -> f32"},
        {NULL, KERN_OP_gather, KVS_KV_FP8, KVS_DTYPE_BF16, 0, "gather fp8 -> bf16"},
        {NULL, KERN_OP_gather, KVS_KV_BF16, KVS_DTYPE_BF16, 0, "gather bf16 -> bf16"},
        {NULL, KERN_OP_gather, KVS_KV_F32, KVS_DTYPE_F32, 0, "gather f32 -> f32"},
    };
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        write_point c = points[i];
        c.p = p;
        const size_t half = g_pool_bytes / 2;
        if (c.op != KERN_OP_gather) {
            for (size_t j = 0; j < half / 4; j += 2048) { /* values in the first half */
                for (size_t d = j; d < j + 2048 && j < 4 * 2048; d++) {
                    const float x = draw_normal();
                    const float y = draw_normal();
                    const uint32_t pair = (uint32_t)bf16_from_f32(x).bits << 16 | bf16_from_f32(y).bits;
                    memcpy(p + 4 * d, c.type == KVS_DTYPE_BF16 ? (const void *)&pair : (const void *)&x, 4);
                }
                if (j >= 4 * 2048) {
                    memcpy(p + 4 * j, p + 4 * (j % (4 * 2048)), 4 * 2048);
                }
            }
        } else { /* rows in the second half */
            const kv_writer w = {c.fmt, KVS_SCALE_POW2, 1.0f, KVS_DTYPE_F32};
            const size_t row = (size_t)kv_row_bytes(c.fmt);
            for (size_t r = 0; (r + 1) * row <= half; r++) {
                uint8_t *const at = (uint8_t *)p + half + r * row;
                if (r >= 64) {
                    memcpy(at, at - 64 * row, row);
                    continue;
                }
                float x[KVS_ROW_DIM];
                for (int d = 0; d < KVS_ROW_DIM; d++) {
                    x[d] = draw_normal();
                }
                kv_row_write(&w, at, x, x + KVS_LATENT_DIM, NULL);
            }
        }
        over_variants(c.op, write_variant, &c);
    }
}

/* ---- candidate merge and localise ----------------------------------------------------------------- */

enum { MERGE_LIST = 8, MERGE_K = 2048 };

static void merge_variant(const kern_table *t, const char *name, void *ctx)
{
    static float score[MERGE_LIST][MERGE_K];
    static int32_t id[MERGE_LIST][MERGE_K];
    const float *scores[MERGE_LIST];
    const int32_t *ids[MERGE_LIST];
    const int32_t *counts[MERGE_LIST];
    const int32_t count = MERGE_K;
    const bool ties = *(const int *)ctx != 0;
    for (int l = 0; l < MERGE_LIST; l++) {
        for (int i = 0; i < MERGE_K; i++) {
            score[l][i] = ties ? (float)(draw() % 3) : draw_normal();
            id[l][i] = (i * MERGE_LIST + l) * 3;
        }
        scores[l] = score[l];
        ids[l] = id[l];
        counts[l] = &count;
    }
    float cut_score[2];
    int32_t cut_id[2];
    int32_t n_total = 0;
    topk_merge_args a = {.n_row = 1,
                         .n_list = MERGE_LIST,
                         .k = MERGE_K,
                         .cand_score = scores,
                         .cand_id = ids,
                         .cand_count = counts,
                         .cand_stride = MERGE_K,
                         .n_total = &n_total};
    kern_table ref;
    kern_init(&ref, 0, NULL, NULL);
    double us[2];
    for (int i = 0; i < 2; i++) {
        const kern_table *run = i == 0 ? t : &ref;
        a.cut_score = &cut_score[i];
        a.cut_id = &cut_id[i];
        a.scratch = mem_alloc(run->topk_merge_scratch(&a, NULL), 0);
        static double sample[MAX_SAMPLE];
        for (int n = 0; n < 200; n++) {
            const int64_t t0 = clock_ns();
            run->topk_merge(&a, NULL);
            sample[n] = (double)(clock_ns() - t0) * 1e-3;
        }
        us[i] = median(sample, 200);
        mem_free(a.scratch);
    }
    if (cut_id[0] != cut_id[1] || cut_score[0] != cut_score[1]) {
        wrong("topk_merge");
    }
    printf("merge %-8s topk_merge %d x %d -> %d, %s: %.1f us a row, reference %.1f\n", name, MERGE_LIST,
           MERGE_K, MERGE_K, ties ? "ties" : "random", us[0], us[1]);
}

static void localise_variant(const kern_table *t, const char *name, void *ctx)
{
    const int dcp = *(const int *)ctx;
    static int32_t id[MERGE_K];
    static int32_t table[4096];
    static int32_t slots[2][MERGE_K];
    int32_t lane_count[8];
    const int32_t row_req = 0;
    const int32_t bound = 131072;
    for (int i = 0; i < MERGE_K; i++) {
        id[i] = i * 64 + (int32_t)(draw() % 64);
    }
    for (int i = 0; i < 4096; i++) {
        table[i] = i * 37 % 4096;
    }
    localise_args a = {.n_row = 1,
                       .k = MERGE_K,
                       .id = id,
                       .id_stride = MERGE_K,
                       .dcp = dcp,
                       .interleave = 1,
                       .table = table,
                       .table_stride = 4096,
                       .table_width = 4096,
                       .n_req = 1,
                       .n_slot = 4096 * 64,
                       .row_req = &row_req,
                       .bound = &bound,
                       .slots_stride = MERGE_K,
                       .lane_count = lane_count};
    kern_table ref;
    kern_init(&ref, 0, NULL, NULL);
    double us[2];
    for (int i = 0; i < 2; i++) {
        const kern_table *run = i == 0 ? t : &ref;
        a.slots = slots[i];
        a.scratch = mem_alloc(run->localise_scratch(&a, NULL) + 64, 0);
        static double sample[MAX_SAMPLE];
        for (int n = 0; n < 100; n++) {
            const int64_t t0 = clock_ns();
            run->localise(&a, NULL);
            sample[n] = (double)(clock_ns() - t0) * 1e-3;
        }
        us[i] = median(sample, 100);
        mem_free(a.scratch);
    }
    if (memcmp(slots[0], slots[1], sizeof slots[0]) != 0) {
        wrong("localise");
    }
    printf("merge %-8s localise %d ids, dcp %d: %.1f us a row, reference %.1f\n", name, MERGE_K, dcp,
           us[0], us[1]);
}

static void measure_merge(void)
{
    for (int ties = 0; ties < 2; ties++) {
        over_variants(KERN_OP_topk_merge, merge_variant, &ties);
    }
    for (int dcp = 1; dcp <= 8; dcp *= 2) {
        over_variants(KERN_OP_localise, localise_variant, &dcp);
    }
}

int main(int argc, char **argv)
{
    bool all = true;
    bool want[5] = {false};
    static const char *const section[] = {"roof", "score", "topk", "merge", "write"};
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (int s = 0; s < 5; s++) {
            if (strcmp(argv[i], section[s]) == 0) {
                want[s] = known = true;
                all = false;
            }
        }
        if (strcmp(argv[i], "quick") == 0) {
            g_pool_bytes = (size_t)64 << 20;
            known = true;
        }
        if (!known) {
            fprintf(stderr, "index_probe: %s is none of roof score topk merge write quick\n", argv[i]);
            return 2;
        }
    }
    if (!cpu_has(cpu_features(), CPU_NEED_AVX2)) {
        fprintf(stderr, "index_probe: this machine lacks AVX2; nothing to measure\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    g_n_thread = pool_cores();
    kvs_error err;
    if (pool_open(&g_pool, g_n_thread, &err) != KVS_OK) {
        fprintf(stderr, "index_probe: %s\n", err.text);
        return 2;
    }
    char text[256];
    printf("features: %s; %d cores; pool %zu MiB\n", cpu_describe(cpu_features(), text, sizeof text),
           g_n_thread, g_pool_bytes >> 20);
    char *p = map(g_pool_bytes);
    memset(p, 1, g_pool_bytes);
    measure_roof(p);
    if (all || want[1]) {
        measure_score(p);
    }
    if (all || want[2]) {
        measure_topk(p);
    }
    if (all || want[3]) {
        measure_merge();
    }
    if (all || want[4]) {
        measure_write(p);
    }
    mem_unmap_pages(p, g_pool_bytes);
    pool_close(g_pool);
    printf("%d wrong\n", g_n_wrong);
    return g_n_wrong != 0;
}
