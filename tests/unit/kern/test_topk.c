/* Exact selection against a plain sort: every variant, over lengths, k, orders and ties; rows fed whole
 * and in pieces; candidate lists and their cut. */
#include "unit/unit.h"

#include <math.h>

#include "kern_x86.h"
#include "num/fmt.h"

enum { N_PATTERN = 15 };

/* Scores of one row. Values are coarse in some patterns, so that ties decide. */
static void fill(float *v, int64_t n, int pattern, uint64_t seed)
{
    rng r = rng_init(seed, (uint64_t)pattern);
    for (int64_t i = 0; i < n; i++) {
        const float normal = (float)rng_next_normal(&r);
        const float up = (float)i / (float)n;
        switch (pattern) {
        case 0:
            v[i] = normal;
            break;
        case 1:
            v[i] = 3.5f;
            break;
        case 2:
            v[i] = up;
            break;
        case 3:
            v[i] = -up;
            break;
        case 4:
            v[i] = (float)(rng_next(&r) % 5);
            break;
        case 5: /* one column of every 16 stands out */
            v[i] = i % 16 == 3 ? 10.0f + normal : normal;
            break;
        case 6: /* two zeros that must count as equal */
            v[i] = rng_next(&r) % 2 ? 0.0f : -0.0f;
            break;
        case 7: /* what can never be selected, and infinity, which can */
            v[i] = rng_next(&r) % 3 == 0 ? NAN : rng_next(&r) % 3 == 0 ? -INFINITY : normal;
            v[i] = rng_next(&r) % 64 == 0 ? INFINITY : v[i];
            break;
        case 8: /* a few large, the rest zero */
            v[i] = rng_next(&r) % 97 == 0 ? 1.0f : 0.0f;
            break;
        case 9: /* the best of a row stand together, rising */
            v[i] = i >= n / 2 && i < n / 2 + 5000 ? 100.0f + (float)i * 0.01f : normal;
            break;
        case 10:
            v[i] = -INFINITY;
            break;
        case 11: /* subnormal */
            v[i] = (float)(int)(rng_next(&r) % 2000 - 1000) * 0x1p-149f;
            break;
        case 12: /* a period of 4096, the columns of a group */
            v[i] = (float)(i % 4096) + normal * 0.001f;
            break;
        case 13: /* neighbours among floats, rising: what just beats the worst of a full list */
            v[i] = f32_from_bits(0x3F800000u + (uint32_t)(i / 900));
            break;
        default: /* the bits of any f32 */
            v[i] = f32_from_bits((uint32_t)rng_next(&r));
            break;
        }
    }
}

typedef struct cand {
    float score;
    int32_t id;
} cand;

static int by_rank(const void *x, const void *y)
{
    const cand *a = x;
    const cand *b = y;
    if (a->score != b->score) {
        return a->score > b->score ? -1 : 1;
    }
    return a->id < b->id ? -1 : a->id > b->id;
}

static int by_id(const void *x, const void *y)
{
    const cand *a = x;
    const cand *b = y;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* The k best of n scores whose ids start at id0, by id; returns how many. */
static int64_t plain_topk(const float *v, int64_t n, int32_t id0, int64_t k, cand *out)
{
    cand *all = malloc((size_t)(n + 1) * sizeof *all);
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isnan(v[i]) && !(isinf(v[i]) && v[i] < 0)) {
            all[m++] = (cand){v[i], id0 + (int32_t)i};
        }
    }
    qsort(all, (size_t)m, sizeof *all, by_rank);
    m = m < k ? m : k;
    qsort(all, (size_t)m, sizeof *all, by_id);
    memcpy(out, all, (size_t)m * sizeof *all);
    free(all);
    return m;
}

static void expect_list(const char *what, int pattern, int64_t n, int32_t k, const cand *want,
                        int64_t n_want, const int32_t *id, const float *score, int32_t count)
{
    if (count != n_want) {
        fail_msg("%s pattern %d n %lld k %d: %d selected, want %lld", what, pattern, (long long)n, k,
                 count, (long long)n_want);
    }
    for (int64_t i = 0; i < n_want; i++) {
        if (id[i] != want[i].id || memcmp(&score[i], &want[i].score, sizeof *score) != 0) {
            fail_msg("%s pattern %d n %lld k %d: entry %lld is %d (%a), want %d (%a)", what, pattern,
                     (long long)n, k, (long long)i, id[i], (double)score[i], want[i].id,
                     (double)want[i].score);
        }
    }
}

/* Feeds two rows, of n and of n / 3 scores, in pieces of `piece` columns. */
static void run_rows(const kern_table *t, dev_queue *q, const char *name, int pattern, int64_t n,
                     int32_t k, int64_t piece)
{
    const int64_t stride = n + 5;
    const int64_t len[2] = {n, n / 3};
    float *v = malloc((size_t)(2 * stride) * sizeof *v);
    fill(v, 2 * stride, pattern, (uint64_t)(n * 31 + k));
    int32_t *id = malloc(2 * (size_t)k * sizeof *id);
    float *score = malloc(2 * (size_t)k * sizeof *score);
    memset(id, 0x7F, 2 * (size_t)k * sizeof *id);
    int32_t count[2] = {0, 0};
    for (int64_t at = 0; at == 0 || at < n; at += piece) {
        int32_t n_col[2];
        for (int r = 0; r < 2; r++) {
            const int64_t left = len[r] - at;
            n_col[r] = (int32_t)(left < 0 ? 0 : left < piece ? left : piece);
        }
        topk_args a = {.n_row = 2,
                       .k = k,
                       .score = v + at,
                       .score_stride = stride,
                       .n_col = n_col,
                       .id_base = 1000 + (int32_t)at,
                       .list_id = id,
                       .list_score = score,
                       .list_count = count};
        a.scratch_bytes = t->topk_scratch(&a, q);
        a.scratch = mem_alloc(a.scratch_bytes, 64);
        memset(a.scratch, 0xFF, a.scratch_bytes);
        t->topk(&a, q);
        mem_free(a.scratch);
    }
    cand *want = malloc((size_t)k * sizeof *want);
    for (int r = 0; r < 2; r++) {
        const int64_t m = plain_topk(v + r * stride, len[r], 1000, k, want);
        expect_list(name, pattern, len[r], k, want, m, id + r * k, score + r * k, count[r]);
    }
    free(want);
    free(score);
    free(id);
    free(v);
}

static void over_variants(void (*one)(const kern_table *t, dev_queue *q, const char *name),
                          kern_op op)
{
    pool *p = NULL;
    assert_int_equal(pool_open(&p, 5, NULL), KVS_OK);
    kern_table t;
    const char *name = NULL;
    for (int32_t i = 0; (name = table_nth(&t, op, i)) != NULL; i++) {
        dev_queue q;
        dev_queue_init(&q, NULL);
        one(&t, &q, name);
        dev_queue_init(&q, p);
        one(&t, &q, name);
    }
    pool_close(p);
}

static void topk_lengths(const kern_table *t, dev_queue *q, const char *name)
{
    static const int64_t n[] = {1, 7, 8, 31, 32, 33, 64, 100, 257, 1023, 2048, 2049, 4095, 4096, 4200};
    static const int32_t k[] = {1, 2, 3, 16, 33, 64, 1000, 2048};
    for (size_t i = 0; i < UNIT_COUNT(n); i++) {
        for (size_t j = 0; j < UNIT_COUNT(k); j++) {
            run_rows(t, q, name, (int)((i + j) % N_PATTERN), n[i], k[j], n[i]);
        }
    }
}

static void topk_patterns(const kern_table *t, dev_queue *q, const char *name)
{
    for (int p = 0; p < N_PATTERN; p++) {
        run_rows(t, q, name, p, 20000, 512, 20000);
        run_rows(t, q, name, p, 20000, 100, 7013);
        run_rows(t, q, name, p, 3000, 512, 64);
    }
}

static void topk_long(const kern_table *t, dev_queue *q, const char *name)
{
    for (int p = 0; p < N_PATTERN; p++) {
        run_rows(t, q, name, p, 140001, 2048, 140001);
    }
}

static void test_topk_lengths(void **state)
{
    (void)state;
    over_variants(topk_lengths, KERN_OP_topk);
}

static void test_topk_patterns(void **state)
{
    (void)state;
    over_variants(topk_patterns, KERN_OP_topk);
}

static void test_topk_long(void **state)
{
    (void)state;
    over_variants(topk_long, KERN_OP_topk);
}

/* n_list lists of up to `len` candidates with ids dealt out among them; row 1 has one list empty. */
static void run_merge(const kern_table *t, dev_queue *q, const char *name, int pattern, int32_t n_list,
                      int64_t len, int32_t k)
{
    enum { N_ROW = 2, MAX_LIST = 8 };
    const int64_t stride = len + 3;
    float *score[MAX_LIST];
    int32_t *id[MAX_LIST];
    int32_t *count[MAX_LIST];
    float *row = malloc((size_t)(n_list * len) * sizeof *row);
    cand *want = malloc((size_t)(k + 1) * sizeof *want);
    int32_t *all = malloc(N_ROW * (size_t)k * sizeof *all);
    float cut_score[N_ROW];
    int32_t cut_id[N_ROW];
    int32_t n_total[N_ROW];
    for (int32_t l = 0; l < n_list; l++) {
        score[l] = malloc((size_t)(N_ROW * stride) * sizeof(float));
        id[l] = malloc((size_t)(N_ROW * stride) * sizeof(int32_t));
        count[l] = malloc(N_ROW * sizeof(int32_t));
    }
    for (int r = 0; r < N_ROW; r++) {
        const uint64_t seed = (uint64_t)(len * 7 + r + 100 * k);
        fill(row, n_list * len, pattern, seed);
        rng dice = rng_init(seed, 99);
        for (int32_t l = 0; l < n_list; l++) {
            count[l][r] = 0;
        }
        for (int32_t i = 0; i < n_list * len; i++) {
            const int32_t l = (int32_t)rng_next_below(&dice, (uint64_t)n_list);
            if (count[l][r] == len || (r == 1 && l == n_list / 2) || rng_next(&dice) % 8 == 0) {
                row[i] = NAN; /* on no list */
                continue;
            }
            id[l][r * stride + count[l][r]] = i;
            score[l][r * stride + count[l][r]++] = row[i];
        }
        const int64_t m = plain_topk(row, n_list * len, 0, k, want);
        topk_merge_args a = {.n_row = N_ROW,
                             .n_list = n_list,
                             .k = k,
                             .cand_score = (const float *const *)score,
                             .cand_id = (const int32_t *const *)id,
                             .cand_count = (const int32_t *const *)count,
                             .cand_stride = stride,
                             .cut_score = cut_score,
                             .cut_id = cut_id,
                             .n_total = n_total,
                             .all_id = all};
        if (r + 1 < N_ROW) {
            a.n_row = 1;
        }
        a.scratch_bytes = t->topk_merge_scratch(&a, q);
        a.scratch = mem_alloc(a.scratch_bytes, 64);
        memset(a.scratch, 0xFF, a.scratch_bytes);
        memset(all, 0x7F, N_ROW * (size_t)k * sizeof *all);
        t->topk_merge(&a, q);
        assert_int_equal(n_total[r], m);
        for (int64_t i = 0; i < k; i++) {
            if (all[r * k + i] != (i < m ? want[i].id : -1)) {
                fail_msg("%s pattern %d lists %d len %lld k %d: entry %lld is %d, want %d", name,
                         pattern, n_list, (long long)len, k, (long long)i, all[r * k + i],
                         i < m ? want[i].id : -1);
            }
        }
        qsort(want, (size_t)m, sizeof *want, by_rank);
        const cand worst = m > 0 ? want[m - 1] : (cand){INFINITY, -1};
        assert_int_equal(cut_id[r], worst.id);
        assert_memory_equal(&cut_score[r], &worst.score, sizeof(float));
        a.all_id = NULL; /* the cut alone */
        cut_id[r] = -7;
        t->topk_merge(&a, q);
        assert_int_equal(cut_id[r], worst.id);
        mem_free(a.scratch);
    }
    for (int32_t l = 0; l < n_list; l++) {
        free(score[l]);
        free(id[l]);
        free(count[l]);
    }
    free(all);
    free(want);
    free(row);
}

static void merge_cases(const kern_table *t, dev_queue *q, const char *name)
{
    for (int p = 0; p < N_PATTERN; p++) {
        run_merge(t, q, name, p, 1, 50, 20);
        run_merge(t, q, name, p, 2, 64, 64);
        run_merge(t, q, name, p, 3, 10, 100);
        run_merge(t, q, name, p, 8, 300, 256);
        run_merge(t, q, name, p, 4, 2048, 2048);
    }
}

static void test_merge(void **state)
{
    (void)state;
    over_variants(merge_cases, KERN_OP_topk_merge);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topk_lengths),
        cmocka_unit_test(test_topk_patterns),
        cmocka_unit_test(test_topk_long),
        cmocka_unit_test(test_merge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
