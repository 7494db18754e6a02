/* Indexer scores of every variant against the formula in double: head counts, both key formats, bounds,
 * bad pages, NaN in keys, queries and weights, an infinite key; and the same bits whatever shares the
 * call, also in a prompt of many rows. */
#include "unit/unit.h"

#include <float.h>
#include <math.h>

#include "kern_x86.h"
#include "num/kvfmt.h"

enum { DIM = KVS_INDEX_DIM, N_PAGE = 12, WIDTH = 8, N_REQ = 3, MAX_ROW = 90, MAX_WIDTH = 56 };

typedef struct scene {
    int32_t fmt, n_head, n_row;
    uint8_t *keys;
    int64_t page_stride;
    int32_t width; /* of the table */
    int32_t table[N_REQ * MAX_WIDTH];
    void *q;
    float *w;
    int32_t row_req[MAX_ROW];
    int32_t kv_len[MAX_ROW];
} scene;

/* Every key its own page-wise permuted place; page 3 of request 1 lies outside the pool, one key of page
 * 0 is NaN, and its neighbours must not notice. */
static void scene_make(scene *s, int32_t fmt, int32_t n_head, int32_t n_row, uint64_t seed)
{
    rng r = rng_init(seed, 7);
    s->fmt = fmt;
    s->n_head = n_head;
    s->n_row = n_row;
    s->width = WIDTH;
    s->page_stride = index_page_bytes(fmt) + 64;
    s->keys = malloc((size_t)(N_PAGE * s->page_stride));
    memset(s->keys, 0xFF, (size_t)(N_PAGE * s->page_stride));
    for (int32_t p = 0; p < N_PAGE; p++) {
        for (int32_t t = 0; t < KVS_PAGE_TOKENS; t++) {
            float key[DIM];
            const double size = exp(rng_next_normal(&r));
            for (int32_t d = 0; d < DIM; d++) {
                key[d] = (float)(rng_next_normal(&r) * size);
            }
            if (p == 0 && t == 9) {
                key[5] = NAN;
            }
            if (p == 1 && t == 2 && fmt == KVS_INDEX_F32) {
                key[5] = INFINITY; /* heads that are only padding must not make it NaN */
            }
            if (p == 1 && t == 1) {
                memset(key, 0, sizeof key);
            }
            index_key_write(fmt, KVS_DTYPE_F32, s->keys + p * s->page_stride, t, key, NULL);
        }
    }
    for (int32_t i = 0; i < N_REQ * WIDTH; i++) {
        s->table[i] = (i * 5 + 2) % N_PAGE;
    }
    s->table[WIDTH + 3] = N_PAGE;
    s->table[2 * WIDTH] = -1;
    const int64_t n_q = (int64_t)n_row * n_head * DIM;
    s->q = malloc((size_t)n_q * sizeof(float));
    s->w = malloc((size_t)(n_row * n_head) * sizeof(float));
    for (int64_t i = 0; i < n_q; i++) {
        if (fmt == KVS_INDEX_F32) {
            ((float *)s->q)[i] = (float)rng_next_normal(&r);
        } else { /* every code but NaN */
            const uint8_t c = (uint8_t)rng_next(&r);
            ((uint8_t *)s->q)[i] = (c & 0x7F) == 0x7F ? 0 : c;
        }
    }
    for (int64_t i = 0; i < (int64_t)n_row * n_head; i++) {
        s->w[i] = (float)rng_next_normal(&r);
    }
    /* NaN in the last head of two rows: those that share their vectors must not notice */
    if (n_row > 4) {
        const int64_t last = (int64_t)(n_row - 3) * n_head - 1;
        if (fmt == KVS_INDEX_F32) {
            ((float *)s->q)[last * DIM + 3] = NAN;
        } else {
            ((uint8_t *)s->q)[last * DIM + 3] = 0x7F;
        }
        s->w[last + n_head] = NAN;
    }
    for (int32_t i = 0; i < n_row; i++) {
        s->row_req[i] = i * N_REQ / n_row;
        s->kv_len[i] = (int32_t)rng_next_below(&r, WIDTH * KVS_PAGE_TOKENS + 40);
    }
    s->kv_len[0] = WIDTH * KVS_PAGE_TOKENS + 3; /* past the table */
    if (n_row > 2) {
        s->kv_len[1] = 0;
    }
}

static void scene_free(scene *s)
{
    free(s->keys);
    free(s->q);
    free(s->w);
}

static void run(const kern_table *t, dev_queue *q, const scene *s, int32_t row, int32_t n_row,
                int32_t begin, int32_t end, float *score, uint64_t *n_bad, uint64_t *n_key)
{
    const int64_t at = (int64_t)row * s->n_head;
    const int64_t size = s->fmt == KVS_INDEX_F32 ? 4 : 1;
    index_score_args a = {.n_row = n_row,
                          .n_head = s->n_head,
                          .q = (const uint8_t *)s->q + at * DIM * size,
                          .w = s->w + at,
                          .keys = s->keys,
                          .fmt = s->fmt,
                          .page_stride = s->page_stride,
                          .n_page = N_PAGE,
                          .table = s->table,
                          .table_stride = s->width,
                          .table_width = s->width,
                          .n_req = N_REQ,
                          .row_req = s->row_req + row,
                          .kv_len = s->kv_len + row,
                          .col_begin = begin,
                          .col_end = end,
                          .score = score,
                          .score_stride = end - begin + 3,
                          .n_bad_id = n_bad,
                          .n_key = n_key};
    a.scratch_bytes = t->index_score_scratch(&a, q);
    a.scratch = mem_alloc(a.scratch_bytes, 64);
    memset(a.scratch, 0xFF, a.scratch_bytes);
    t->index_score(&a, q);
    mem_free(a.scratch);
}

/* The formula in double, and the sum of the magnitudes of its terms. */
static double formula(const scene *s, int32_t row, const uint8_t *page, int32_t off,
                      double *sum_abs)
{
    float key[DIM];
    const double scale = (double)index_key_read(s->fmt, page, off, key);
    double sum = 0.0;
    *sum_abs = 0.0;
    for (int32_t h = 0; h < s->n_head; h++) {
        double dot = 0.0;
        double mag = 0.0;
        for (int32_t d = 0; d < DIM; d++) {
            const int64_t i = ((int64_t)row * s->n_head + h) * DIM + d;
            const double x = s->fmt == KVS_INDEX_F32
                                 ? (double)((const float *)s->q)[i]
                                 : (double)e4m3_to_f32(((const uint8_t *)s->q)[i]);
            dot += x * (double)key[d];
            mag += fabs(x * (double)key[d]);
        }
        const double w = (double)s->w[(int64_t)row * s->n_head + h];
        sum += (dot <= 0.0 ? 0.0 : dot) * w;
        *sum_abs += mag * fabs(w);
    }
    *sum_abs *= fabs(scale);
    return sum * scale;
}

static void expect_scores(const char *name, const scene *s, const float *score, int32_t begin,
                          int32_t end, uint64_t n_bad, uint64_t n_key)
{
    for (int32_t r = 0; r < s->n_row; r++) {
        for (int32_t l = begin; l < end; l++) {
            const float got = score[(int64_t)r * (end - begin + 3) + l - begin];
            if (l >= s->kv_len[r]) {
                assert_true(got == -INFINITY);
                continue;
            }
            const int32_t page = l / KVS_PAGE_TOKENS < WIDTH
                                     ? s->table[s->row_req[r] * WIDTH + l / KVS_PAGE_TOKENS]
                                     : -1;
            if (page < 0 || page >= N_PAGE) {
                assert_true(got == -INFINITY);
                n_bad--;
                continue;
            }
            n_key--;
            double sum_abs = 0.0;
            const double want =
                formula(s, r, s->keys + page * s->page_stride, l % KVS_PAGE_TOKENS, &sum_abs);
            const double bound = 16.0 * FLT_EPSILON * sum_abs + FLT_MIN;
            if (isnan(want)   ? !isnan(got)
                : isinf(want) ? (double)got != want
                              : !(fabs((double)got - want) <= bound)) {
                fail_msg("%s fmt %d heads %d row %d key %d: %a, want %a within %g", name, s->fmt,
                         s->n_head, r, l, (double)got, want, bound);
            }
        }
        /* behind the row */
        for (int32_t i = 0; i < 3; i++) {
            const float pad = score[(int64_t)r * (end - begin + 3) + end - begin + i];
            assert_true(pad == 77.0f);
        }
    }
    assert_int_equal(n_bad, 0);
    assert_int_equal(n_key, 0);
}

static float *paint(int64_t n)
{
    float *score = malloc((size_t)n * sizeof *score);
    for (int64_t i = 0; i < n; i++) {
        score[i] = 77.0f;
    }
    return score;
}

static void one_scene(const kern_table *t, dev_queue *q, const char *name, int32_t fmt,
                      int32_t n_head, int32_t n_row, uint64_t seed)
{
    scene s;
    scene_make(&s, fmt, n_head, n_row, seed);
    const int32_t end = WIDTH * KVS_PAGE_TOKENS + 30;
    float *score = paint((int64_t)n_row * (end + 3));
    uint64_t n_bad = 0;
    uint64_t n_key = 0;
    run(t, q, &s, 0, n_row, 0, end, score, &n_bad, &n_key);
    expect_scores(name, &s, score, 0, end, n_bad, n_key);
    /* a part of the columns, and each row alone: the same bits */
    const int32_t from = 2 * KVS_PAGE_TOKENS;
    const int32_t to = 5 * KVS_PAGE_TOKENS + 11;
    float *part = paint(to - from + 3);
    for (int32_t r = 0; r < n_row; r++) {
        run(t, q, &s, r, 1, from, to, part, NULL, NULL);
        assert_memory_equal(part, score + (int64_t)r * (end + 3) + from,
                            (size_t)(to - from) * sizeof *part);
    }
    free(part);
    free(score);
    scene_free(&s);
}

static void test_scores(void **state)
{
    (void)state;
    static const int32_t heads[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                    11, 12, 13, 14, 15, 16, 17, 32, 40, 64};
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 3, NULL), KVS_OK);
    kern_table t;
    const char *name = NULL;
    for (int32_t i = 0; (name = table_nth(&t, KERN_OP_index_score, i)) != NULL; i++) {
        for (size_t h = 0; h < UNIT_COUNT(heads); h++) {
            dev_queue q;
            dev_queue_init(&q, h % 2 ? p : NULL);
            /* where rows may share vectors: full panels and part ones */
            const int shared = heads[h] <= 8;
            const int32_t n_fp8 = shared || h % 3 == 0 ? 28 : 5;
            const int32_t n_f32 = shared || h % 3 == 1 ? 14 : 3;
            one_scene(&t, &q, name, KVS_INDEX_FP8, heads[h], n_fp8, 100 + h);
            one_scene(&t, &q, name, KVS_INDEX_F32, heads[h], n_f32, 200 + h);
        }
    }
    pool_close(p);
}

/* A row alone takes a panel, a range and a unit of its own; in a prompt it shares them all. */
static void one_prompt(const kern_table *t, dev_queue *q, const char *name, int32_t fmt,
                       int32_t n_head, int32_t width)
{
    enum { ROW = 84, BEGIN = 64 };
    const int32_t end = width * KVS_PAGE_TOKENS + 20;
    const int32_t stride = end - BEGIN + 3;
    scene s;
    scene_make(&s, fmt, n_head, ROW, 7);
    s.width = width;
    for (int32_t i = 0; i < width; i++) {
        s.table[i] = (i * 5 + 2) % N_PAGE;
    }
    s.table[20] = N_PAGE;
    for (int32_t i = 0; i < ROW; i++) {
        s.row_req[i] = 0;
        s.kv_len[i] = end - ROW + i;
    }
    s.kv_len[17] = 0;
    s.kv_len[18] = 1000;
    float *score = paint(ROW * (int64_t)stride);
    float *alone = paint(stride);
    uint64_t n_bad[2] = {0};
    uint64_t n_key[2] = {0};
    run(t, q, &s, 0, ROW, BEGIN, end, score, &n_bad[0], &n_key[0]);
    for (int32_t r = 0; r < ROW; r++) {
        const int32_t left = s.kv_len[r] - BEGIN;
        n_key[1] += (uint64_t)(left < 0 ? 0 : left);
        if (r % 7 > 0 && r != 18) {
            continue;
        }
        run(t, q, &s, r, 1, BEGIN, end, alone, NULL, NULL);
        const float *shared = score + r * (int64_t)stride;
        if (memcmp(shared, alone, (size_t)stride * sizeof *alone) != 0) {
            fail_msg("%s fmt %d heads %d: row %d differs in a prompt", name, fmt, n_head, r);
        }
    }
    assert_int_equal(n_key[0] + n_bad[0], n_key[1]);
    assert_true(n_bad[0] > 0);
    free(alone);
    free(score);
    scene_free(&s);
}

static void test_prompt(void **state)
{
    (void)state;
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 3, NULL), KVS_OK);
    kern_table t;
    const char *name = NULL;
    for (int32_t i = 0; (name = table_nth(&t, KERN_OP_index_score, i)) != NULL; i++) {
        dev_queue q;
        dev_queue_init(&q, NULL);
        one_prompt(&t, &q, name, KVS_INDEX_FP8, 4, MAX_WIDTH);
        dev_queue_init(&q, p);
        one_prompt(&t, &q, name, KVS_INDEX_FP8, 7, 24);
        one_prompt(&t, &q, name, KVS_INDEX_F32, 3, 24);
    }
    pool_close(p);
}

/* All 256 codes as keys against a query that picks one dimension: the score is the code's value. */
static void test_codes(void **state)
{
    (void)state;
    kern_table t;
    const char *name = NULL;
    for (int32_t i = 0; (name = table_nth(&t, KERN_OP_index_score, i)) != NULL; i++) {
        scene s;
        scene_make(&s, KVS_INDEX_FP8, 2, 1, 1);
        for (int32_t c = 0; c < 256; c++) {
            const int32_t at = c / KVS_PAGE_TOKENS; /* local page -> physical page */
            uint8_t *page = s.keys + s.table[at] * s.page_stride;
            memset(page + c % KVS_PAGE_TOKENS * DIM, 0, DIM);
            page[c % KVS_PAGE_TOKENS * DIM + 77] = (uint8_t)c;
            const float one = 1.0f;
            memcpy(page + index_scale_at(c % KVS_PAGE_TOKENS), &one, sizeof one);
        }
        memset(s.q, 0, 2 * DIM);
        ((uint8_t *)s.q)[77] = 0x38;       /* +1 */
        ((uint8_t *)s.q)[DIM + 77] = 0xB8; /* -1 */
        s.w[0] = 1.0f;
        s.w[1] = -1.0f; /* relu(x) - relu(-x) = x */
        float score[256 + 3];
        run(&t, NULL, &s, 0, 1, 0, 256, score, NULL, NULL);
        for (int32_t c = 0; c < 256; c++) {
            const float want = e4m3_to_f32((uint8_t)c);
            if (isnan(want) ? !isnan(score[c]) : score[c] != want) {
                fail_msg("%s code 0x%02x: %a, want %a", name, (unsigned)c, (double)score[c],
                         (double)want);
            }
        }
        scene_free(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
