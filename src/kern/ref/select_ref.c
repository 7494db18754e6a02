/* select_ref.c - scores and the k best together, the definition: index_score and topk over ranges of
 * keys, row by row, then local indices to positions. */
#include "kern/ref/ref.h"
#include "num/kvfmt.h"

enum { N_COL = 1024, ALIGN = 64 };

static size_t aligned(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* The two ops for one row, over its columns from `col` on. */
static void row_args(const index_select_args *a, int64_t row, index_score_args *s, topk_args *t)
{
    const int64_t width = (int64_t)a->in.n_head * KVS_INDEX_DIM;
    *s = a->in;
    s->n_row = 1;
    s->q = (const uint8_t *)a->in.q + row * width * (a->in.fmt == KVS_INDEX_F32 ? 4 : 1);
    s->w = a->in.w + row * a->in.n_head;
    s->row_req = a->in.row_req + row;
    s->kv_len = a->in.kv_len + row;
    s->score_stride = N_COL;
    *t = (topk_args){
        .n_row = 1,
        .k = a->k,
        .score_stride = N_COL,
        .list_id = a->list_id + row * a->k,
        .list_score = a->list_score + row * a->k,
        .list_count = a->list_count + row,
    };
}

static size_t index_select_scratch_ref(const index_select_args *a, const dev_queue *q)
{
    kern_table ref;
    ref_apply_index_score(&ref);
    ref_apply_topk(&ref);
    index_score_args s;
    topk_args t;
    row_args(a, 0, &s, &t);
    return N_COL * sizeof(float) + aligned(ref.index_score_scratch(&s, q)) +
           aligned(ref.topk_scratch(&t, q));
}

static void index_select_ref(const index_select_args *a, dev_queue *q)
{
    kern_table ref;
    ref_apply_index_score(&ref);
    ref_apply_topk(&ref);
    const shard_geom geom = {a->dcp, a->interleave, a->rank};
    for (int64_t row = 0; row < a->in.n_row; row++) {
        index_score_args s;
        topk_args t;
        row_args(a, row, &s, &t);
        uint8_t *scratch = a->scratch;
        s.score = (float *)(void *)scratch;
        s.scratch = scratch + N_COL * sizeof(float);
        t.score = s.score;
        t.scratch = (uint8_t *)s.scratch + aligned(ref.index_score_scratch(&s, q));
        *t.list_count = 0;
        const int32_t len = a->in.kv_len[row];
        int32_t n_col = 0;
        t.n_col = &n_col;
        for (int64_t col = 0; col < len; col += N_COL) {
            n_col = len - col < N_COL ? (int32_t)(len - col) : N_COL;
            s.col_begin = (int32_t)col;
            s.col_end = s.col_begin + n_col;
            t.id_base = s.col_begin;
            ref.index_score(&s, q);
            ref.topk(&t, q);
        }
        for (int32_t i = 0; i < a->k; i++) {
            const int in = i < *t.list_count;
            t.list_id[i] = in ? (int32_t)shard_pos(geom, (kvs_local){t.list_id[i]}).v : -1;
            t.list_score[i] = in ? t.list_score[i] : 0.0f;
        }
    }
}

void ref_apply_index_select(kern_table *t)
{
    t->index_select = index_select_ref;
    t->index_select_scratch = index_select_scratch_ref;
}
