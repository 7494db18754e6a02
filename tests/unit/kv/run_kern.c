#include "unit/unit.h"

#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "num/fmt.h"
#include "unit/kv/run_kern.h"

enum { MAX_LEN = 1024 };

void each_variant(kern_op op, void (*fn)(const kern_table *t, void *ctx), void *ctx)
{
    int32_t n = 0;
    const kern_variant *v = kern_variants(&n);
    int32_t n_run = 0;
    for (int32_t i = 0; i < n; i++) {
        kern_table t;
        assert_int_equal(kern_init(&t, 0, NULL, NULL), KVS_OK);
        if (v[i].op == op && cpu_has(cpu_features(), v[i].features)) {
            v[i].apply(&t);
            fn(&t, ctx);
            n_run++;
        }
    }
    assert_true(n_run > 0);
}

void random_f32(float *x, int64_t n, uint64_t stream)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)rng_normal(29, stream, (uint64_t)i);
    }
}

/* Lane by lane, ascending: what a selection of everything looks like. */
static void list_slots(attn_args *a, int32_t *slots, int32_t *lane_count)
{
    for (int32_t r = 0; r < a->n_row; r++) {
        int32_t n = 0;
        for (int32_t lane = 0; lane < 8; lane++) {
            lane_count[r * 8 + lane] = 0;
            for (int32_t pos = lane; pos < a->kv_len[r]; pos += 8) {
                slots[r * MAX_LEN + n++] = a->table[pos / 64] * 64 + pos % 64;
                lane_count[r * 8 + lane]++;
            }
        }
    }
    a->slots = slots;
    a->slots_stride = MAX_LEN;
    a->lane_count = lane_count;
}

void run_attn(const kern_table *t, const kvs_cache *c, const int32_t *table, int32_t width,
              const int32_t *kv_len, bool sparse, float *out, float *lse)
{
    static float query[RUN_ROWS * RUN_HEADS * 576];
    static uint16_t query16[RUN_ROWS * RUN_HEADS * 576];
    static int32_t slots[RUN_ROWS * MAX_LEN];
    static int32_t lane_count[RUN_ROWS * 8];
    random_f32(query, (int64_t)UNIT_COUNT(query), 4);
    for (size_t i = 0; i < UNIT_COUNT(query); i++) {
        query16[i] = bf16_from_f32(query[i]).bits;
    }
    dev_queue q;
    dev_queue_init(&q, NULL);
    const bool f32 = c->fmt == KVS_KV_F32;
    const int32_t row_req[RUN_ROWS] = {0, 0};
    attn_stats stats = {0};
    attn_args a = {.n_row = RUN_ROWS,
                   .n_head = RUN_HEADS,
                   .q = f32 ? (const void *)query : query16,
                   .q_type = f32 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16,
                   .q_stride_row = RUN_HEADS * 576,
                   .q_stride_head = 576,
                   .softmax_scale = 0.05f,
                   .n_lane = 8,
                   .table = table,
                   .table_stride = width,
                   .table_width = width,
                   .row_req = row_req,
                   .kv_len = kv_len,
                   .interleave = 1,
                   .n_req = 1,
                   .out = out,
                   .out_stride_row = RUN_HEADS * 512,
                   .out_stride_head = 512,
                   .lse = lse,
                   .stats = &stats};
    cache_attn_args(c, 0, &a);
    if (sparse) {
        list_slots(&a, slots, lane_count);
    }
    a.scratch_bytes = t->attn_scratch(&a, &q);
    a.scratch = mem_alloc(a.scratch_bytes, 64);
    t->attn(&a, &q);
    mem_free(a.scratch);
    assert_int_equal(stats.n_key, kv_len[0] + kv_len[1]);
    assert_int_equal(stats.n_bad_id + stats.n_nan, 0);
}

void run_score(const kern_table *t, const kvs_cache *c, const int32_t *table, int32_t width,
               int32_t len, float *score)
{
    static float query[RUN_INDEX_HEADS * 128];
    static uint8_t query8[RUN_INDEX_HEADS * 128];
    float w[RUN_INDEX_HEADS];
    random_f32(query, (int64_t)UNIT_COUNT(query), 5);
    for (size_t i = 0; i < UNIT_COUNT(query); i++) {
        query8[i] = e4m3_from_f32(query[i]);
    }
    for (int32_t h = 0; h < RUN_INDEX_HEADS; h++) {
        w[h] = 0.1f * (float)(h + 1);
    }
    dev_queue q;
    dev_queue_init(&q, NULL);
    const int32_t row_req[1] = {0};
    uint64_t n_bad = 0;
    index_score_args a = {.n_row = 1,
                          .n_head = RUN_INDEX_HEADS,
                          .q = c->index_fmt == KVS_INDEX_F32 ? (const void *)query : query8,
                          .w = w,
                          .table = table,
                          .table_stride = width,
                          .table_width = width,
                          .n_req = 1,
                          .row_req = row_req,
                          .kv_len = &len,
                          .col_begin = 0,
                          .col_end = 64 * width,
                          .score = score,
                          .score_stride = 64 * width,
                          .n_bad_id = &n_bad};
    cache_index_args(c, 0, &a);
    a.scratch_bytes = t->index_score_scratch(&a, &q);
    a.scratch = mem_alloc(a.scratch_bytes, 64);
    t->index_score(&a, &q);
    mem_free(a.scratch);
    assert_int_equal(n_bad, 0);
}
