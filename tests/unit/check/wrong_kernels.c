/* wrong_kernels.c - kernels that are wrong on purpose.
 *
 * Each calls the reference and then breaks one promise, as little as a real fault might: a list of one key
 * too few, one ULP where bits are promised, a NaN that comes through. What differs by no more than a
 * tolerance stays within it, so that the class named beside it is the one that must notice.
 */
#include "unit/check/wrong_kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "unit/unit.h"

static kern_table g_ref;

/* Where 32 bits hold the offset of a page, pages of the check's `far pages` lie nearer. */
enum { FAR_PAGE = 4600, NEAR_PAGE = 3988 };

/* The table as a kernel sees it that cuts offsets; valid until the next call. */
static const int32_t *cut_table(const int32_t *table, int64_t n, int64_t n_page)
{
    static int32_t cut[4096];
    if (n_page != FAR_PAGE || n > (int64_t)UNIT_COUNT(cut)) {
        return table;
    }
    for (int64_t i = 0; i < n; i++) {
        cut[i] = table[i] % NEAR_PAGE;
    }
    return cut;
}

static const int64_t *cut_slots(const int64_t *slot, int64_t n, int64_t n_slot)
{
    static int64_t cut[64];
    if (n_slot != FAR_PAGE * 64 || n > (int64_t)UNIT_COUNT(cut)) {
        return slot;
    }
    for (int64_t i = 0; i < n; i++) {
        cut[i] = slot[i] % (NEAR_PAGE * 64);
    }
    return cut;
}

static void attn_forgets_last(const attn_args *in, dev_queue *q)
{
    attn_args a = *in;
    int32_t len[64];
    for (int32_t row = 0; row < a.n_row && a.slots == NULL; row++) {
        len[row] = a.kv_len[row] > 64 ? a.kv_len[row] - 1 : a.kv_len[row];
    }
    a.kv_len = len;
    g_ref.attn(&a, q);
}

static void attn_base_two(const attn_args *a, dev_queue *q)
{
    g_ref.attn(a, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        a->lse[i] *= 1.44269504f;
    }
}

/* Scores off by a thousandth: far beyond rounding, far below one key. */
static void attn_scale_off(const attn_args *in, dev_queue *q)
{
    attn_args a = *in;
    a.softmax_scale *= 1.001f;
    g_ref.attn(&a, q);
}

static void attn_lse_transposed(const attn_args *a, dev_queue *q)
{
    g_ref.attn(a, q);
    float t[4096];
    const int64_t n = (int64_t)a->n_row * a->n_head;
    for (int64_t i = 0; i < n && n <= 4096; i++) {
        t[i] = a->lse[i];
    }
    for (int64_t i = 0; i < n && n <= 4096; i++) {
        a->lse[i % a->n_head * a->n_row + i / a->n_head] = t[i];
    }
}

/* All lanes as one: the tree differs. */
static void attn_one_lane(const attn_args *in, dev_queue *q)
{
    attn_args a = *in;
    int32_t sum[64] = {0};
    for (int32_t row = 0; row < a.n_row && a.slots != NULL; row++) {
        for (int32_t lane = 0; lane < a.n_lane; lane++) {
            sum[row] += a.lane_count[row * a.n_lane + lane];
        }
    }
    if (a.slots != NULL) {
        a.lane_count = sum;
        a.n_lane = 1;
    }
    g_ref.attn(&a, q);
}

/* A scale that depends on which rows share the call. */
static void attn_by_batch(const attn_args *in, dev_queue *q)
{
    g_ref.attn(in, q);
    if (in->n_row > 1) {
        for (int64_t i = 0; i < (int64_t)in->n_row * in->n_head; i++) {
            in->lse[i] = nextafterf(in->lse[i], 0.0f);
        }
    }
}

static void attn_empty_is_inf(const attn_args *a, dev_queue *q)
{
    g_ref.attn(a, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        if (a->lse[i] == -INFINITY) {
            a->lse[i] = INFINITY;
        }
    }
}

/* Keys past a row's bound are multiplied by 0. */
static void attn_zero_times(const attn_args *a, dev_queue *q)
{
    g_ref.attn(a, q);
    for (int64_t row = 0; row < a->n_row; row++) {
        const int64_t slot =
            a->table != NULL && a->kv_len[row] % 64 != 0 && a->kv_len[row] > 0
                ? (int64_t)a->table[a->row_req[row] * a->table_stride + a->kv_len[row] / 64] * 64 +
                      a->kv_len[row] % 64
                : -1;
        if (slot >= 0 && slot < a->n_slot && a->fmt == KVS_KV_F32) {
            const float *next = (const float *)(const void *)(a->kv + slot / 64 * a->page_stride +
                                                              slot % 64 * a->row_stride);
            a->out[row * a->out_stride_row] += 0.0f * next[0];
        }
    }
}

static void merge_swapped(const merge_args *in, dev_queue *q)
{
    merge_args a = *in;
    const float *out_in[8];
    const float *lse_in[8];
    for (int32_t p = 0; p < a.n_part; p++) {
        out_in[p] = a.out_in[a.n_part - 1 - p];
        lse_in[p] = a.lse_in[a.n_part - 1 - p];
    }
    a.out_in = out_in;
    a.lse_in = lse_in;
    g_ref.merge(&a, q);
}

/* A side of weight 0 is read: its NaN comes through. */
static void merge_reads_dead(const merge_args *a, dev_queue *q)
{
    g_ref.merge(a, q);
    for (int64_t row = 0; row < a->n_row && a->out_type == KVS_DTYPE_F32; row++) {
        float *out = (float *)a->out + row * a->out_stride_row;
        out[0] += 0.0f * a->out_in[a->n_part - 1][row * a->in_stride_row];
    }
}

static void quant_q_floor(const quant_q_args *a, dev_queue *q)
{
    g_ref.quant_q(a, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        a->scale[i] = a->scale[i] < 0x1p-12f ? 0x1p-12f : a->scale[i];
    }
}

static void attn_nan_uncounted(const attn_args *a, dev_queue *q)
{
    const uint64_t before = a->stats != NULL ? a->stats->n_nan : 0;
    g_ref.attn(a, q);
    if (a->stats != NULL) {
        a->stats->n_nan = before;
    }
}

/* A row's first scale for all of its heads. */
static void attn_one_q_scale(const attn_args *in, dev_queue *q)
{
    attn_args a = *in;
    static float scale[4096];
    const int64_t n = (int64_t)a.n_row * a.n_head;
    if (a.q_scale != NULL && n <= (int64_t)UNIT_COUNT(scale) && a.fmt == KVS_KV_FP8_DS_MLA) {
        for (int64_t i = 0; i < n; i++) {
            scale[i] = a.q_scale[i / a.n_head * a.n_head];
        }
        a.q_scale = scale;
    }
    g_ref.attn(&a, q);
}

/* Scales below what a narrow format holds come out as the least that it holds. */
static void attn_scale_floor(const attn_args *in, dev_queue *q)
{
    attn_args a = *in;
    const size_t bytes = (size_t)(a.n_slot / 64 * a.page_stride);
    uint8_t *kv = malloc(bytes);
    assert_non_null(kv);
    memcpy(kv, a.kv, bytes);
    for (int64_t s = 0; s < a.n_slot && a.fmt == KVS_KV_FP8_DS_MLA; s++) {
        uint8_t *at = kv + s / 64 * a.page_stride + s % 64 * a.row_stride + 512;
        for (int t = 0; t < 4; t++) {
            float scale;
            memcpy(&scale, at + 4 * t, sizeof scale);
            scale = scale < 0x1p-10f ? 0x1p-10f : scale;
            memcpy(at + 4 * t, &scale, sizeof scale);
        }
    }
    a.kv = kv;
    g_ref.attn(&a, q);
    free(kv);
}

static void index_quant_no_heads(const index_quant_args *a, dev_queue *q)
{
    g_ref.index_quant(a, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        a->w_out[i] *= a->n_head == 64 ? 8.0f : 1.0f;
    }
}

static void score_nan_is_zero(const index_score_args *a, dev_queue *q)
{
    g_ref.index_score(a, q);
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t c = 0; c < a->col_end - a->col_begin; c++) {
            float *s = &a->score[row * a->score_stride + c];
            *s = isnan(*s) ? 0.0f : *s;
        }
    }
}

static void score_by_place(const index_score_args *a, dev_queue *q)
{
    g_ref.index_score(a, q);
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t c = 0; c < a->col_end - a->col_begin; c += 2) {
            float *s = &a->score[row * a->score_stride + c];
            *s = isfinite(*s) ? nextafterf(*s, 0.0f) : *s;
        }
    }
}

/* One ULP off in every column, where a row has company: within the tolerance, and the same wherever the key
 * lies. */
static void score_by_company(const index_score_args *a, dev_queue *q)
{
    g_ref.index_score(a, q);
    for (int64_t row = 0; row < a->n_row && a->n_row > 1; row++) {
        for (int64_t c = 0; c < a->col_end - a->col_begin; c++) {
            float *s = &a->score[row * a->score_stride + c];
            *s = isfinite(*s) ? nextafterf(*s, 0.0f) : *s;
        }
    }
}

static void score_32_bits(const index_score_args *in, dev_queue *q)
{
    index_score_args a = *in;
    a.table = cut_table(a.table, a.n_req * a.table_stride, a.n_page);
    g_ref.index_score(&a, q);
}

static void select_32_bits(const index_select_args *in, dev_queue *q)
{
    index_select_args a = *in;
    a.in.table = cut_table(a.in.table, a.in.n_req * a.in.table_stride, a.in.n_page);
    g_ref.index_select(&a, q);
}

/* What comes when a list of 8192 is full is dropped. */
static void select_list_full(const index_select_args *in, dev_queue *q)
{
    index_select_args a = *in;
    int32_t len[64];
    for (int32_t row = 0; row < a.in.n_row && row < 64; row++) {
        len[row] = a.in.kv_len[row] < 8192 ? a.in.kv_len[row] : 8192;
    }
    a.in.kv_len = len;
    a.in.n_key = NULL;
    g_ref.index_select(&a, q);
}

/* A NaN weight counts as 0, so that its row is not empty. */
static void select_nan_is_zero(const index_select_args *in, dev_queue *q)
{
    index_select_args a = *in;
    static float w[64 * 64];
    const int64_t n = (int64_t)a.in.n_row * a.in.n_head;
    for (int64_t i = 0; i < n && n <= (int64_t)UNIT_COUNT(w); i++) {
        w[i] = isnan(a.in.w[i]) ? 0.0f : a.in.w[i];
    }
    a.in.w = n <= (int64_t)UNIT_COUNT(w) ? w : a.in.w;
    g_ref.index_select(&a, q);
}

/* The last member of a full list gives way to the key behind it on the rank. */
static void select_high_ties(const index_select_args *a, dev_queue *q)
{
    g_ref.index_select(a, q);
    for (int64_t row = 0; row < a->in.n_row; row++) {
        if (a->list_count[row] == a->k && a->interleave == 1 && a->in.kv_len[row] > a->k) {
            a->list_id[(row + 1) * a->k - 1] += a->dcp;
        }
    }
}

static void select_local_ids(const index_select_args *a, dev_queue *q)
{
    index_select_args b = *a;
    b.dcp = 1;
    b.rank = 0;
    g_ref.index_select(&b, q);
}

static void select_scores_behind(const index_select_args *a, dev_queue *q)
{
    g_ref.index_select(a, q);
    for (int64_t row = 0; row < a->in.n_row; row++) {
        for (int32_t i = a->list_count[row]; i < a->k; i++) {
            a->list_score[row * a->k + i] = -INFINITY;
        }
    }
}

static void topk_high_ties(const topk_args *a, dev_queue *q)
{
    g_ref.topk(a, q);
    for (int64_t row = 0; row < a->n_row; row++) {
        /* the last member gives way to an equal score behind it */
        const int32_t n = a->list_count[row];
        int32_t *id = a->list_id + row * a->k + n - 1;
        const int64_t next = n > 0 ? (int64_t)*id + 1 - a->id_base : -1;
        if (next >= 0 && next < a->n_col[row] &&
            a->score[row * a->score_stride + next] == a->list_score[row * a->k + n - 1]) {
            ++*id;
        }
    }
}

static void topk_forgets_list(const topk_args *in, dev_queue *q)
{
    for (int32_t row = 0; row < in->n_row; row++) {
        in->list_count[row] = 0;
    }
    g_ref.topk(in, q);
}

static void topk_merge_cut_before(const topk_merge_args *a, dev_queue *q)
{
    g_ref.topk_merge(a, q);
    for (int32_t row = 0; row < a->n_row; row++) {
        a->cut_id[row] -= a->n_total[row] == a->k && a->k == 7;
    }
}

static void localise_position_order(const localise_args *a, dev_queue *q)
{
    g_ref.localise(a, q);
    const int32_t n_lane = 8 % a->dcp == 0 ? 8 / a->dcp : 1;
    for (int64_t row = 0; row < a->n_row && n_lane > 1; row++) {
        int32_t *s = a->slots + row * a->slots_stride;
        if (a->k > 1 && s[1] >= 0 && a->lane_count[row * n_lane] > 1) {
            const int32_t t = s[0];
            s[0] = s[1];
            s[1] = t;
        }
    }
}

static void localise_keeps_repeated(const localise_args *a, dev_queue *q)
{
    g_ref.localise(a, q);
    if (a->n_bad_id != NULL) {
        --*a->n_bad_id;
    }
}

static void kv_write_reciprocal(const kv_write_args *in, dev_queue *q)
{
    kv_write_args a = *in;
    a.rule = KVS_SCALE_POW2; /* whatever was asked for */
    g_ref.kv_write(&a, q);
}

static void index_write_wrong_page(const index_write_args *in, dev_queue *q)
{
    index_write_args a = *in;
    a.page_stride = a.fmt == KVS_INDEX_F32 ? 32768 : 8448; /* the given one is not read */
    g_ref.index_write(&a, q);
}

static void gather_aligned(const gather_args *in, dev_queue *q)
{
    gather_args a = *in;
    int64_t start[16];
    for (int32_t r = 0; r < a.n_req; r++) {
        start[r] = in->start[r] / 64 * 64;
    }
    a.start = start;
    g_ref.gather(&a, q);
}

static void gather_writes_behind(const gather_args *a, dev_queue *q)
{
    g_ref.gather(a, q);
    if (a->n_req > 0 && a->count[0] > 0) {
        const int64_t end = (a->out_begin[0] + a->count[0]) * a->out_stride;
        if (a->out_type == KVS_DTYPE_F32) {
            ((float *)a->out)[end] = 0.0f;
        } else {
            ((uint16_t *)a->out)[end] = 0;
        }
    }
}

static void topk_writes_input(const topk_args *a, dev_queue *q)
{
    g_ref.topk(a, q);
    if (a->n_row > 0 && a->n_col[0] > 3) {
        ((float *)a->score)[2] = -INFINITY;
    }
}

static void merge_by_chance(const merge_args *a, dev_queue *q)
{
    static int n_call;
    g_ref.merge(a, q);
    if (++n_call % 2 == 0 && a->lse != NULL && a->n_row > 0) {
        a->lse[0] = nextafterf(a->lse[0], 9.0f);
    }
}

static void localise_by_worker(const localise_args *a, dev_queue *q)
{
    g_ref.localise(a, q);
    if (q->n_worker > 1 && a->n_row > 0) {
        a->slots[0] ^= 1;
    }
}

static void gather_fails_queue(const gather_args *a, dev_queue *q)
{
    g_ref.gather(a, q);
    dev_queue_fail(q, KVS_DEVICE, "no");
}

static void norm_no_centre(const norm_args *in, dev_queue *q)
{
    norm_args a = *in;
    a.centre = 0;
    g_ref.norm(&a, q);
}

static void norm_no_eps(const norm_args *in, dev_queue *q)
{
    norm_args a = *in;
    a.eps = 0.0f;
    g_ref.norm(&a, q);
}

static void rope_other_pairs(const rope_args *in, dev_queue *q)
{
    rope_args a = *in;
    a.interleaved = !a.interleaved;
    g_ref.rope(&a, q);
}

static void act_swapped(const act_args *in, dev_queue *q)
{
    act_args a = *in;
    a.gate = in->up;
    a.up = in->gate;
    g_ref.act(&a, q);
}

static void route_no_bias(const route_args *in, dev_queue *q)
{
    route_args a = *in;
    a.bias = NULL;
    g_ref.route(&a, q);
}

static void route_bias_weighs(const route_args *a, dev_queue *q)
{
    g_ref.route(a, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_active && a->bias != NULL; i++) {
        a->weight[i] += a->bias[a->id[i]];
    }
}

/* The experts numbered from behind. */
static void route_high_ties(const route_args *in, dev_queue *q)
{
    enum { MOST = 64 };
    for (int64_t row = 0; row < in->n_row; row++) {
        float logit[MOST];
        float bias[MOST];
        for (int32_t i = 0; i < in->n_expert; i++) {
            logit[i] = in->logit[(row + 1) * in->n_expert - 1 - i];
            bias[i] = in->bias != NULL ? in->bias[in->n_expert - 1 - i] : 0.0f;
        }
        int32_t id[MOST];
        float weight[MOST];
        route_args a = *in;
        a.n_row = 1;
        a.logit = logit;
        a.bias = bias;
        a.id = id;
        a.weight = weight;
        g_ref.route(&a, q);
        for (int32_t k = 0; k < in->n_active; k++) {
            in->id[row * in->n_active + k] = in->n_expert - 1 - id[in->n_active - 1 - k];
            in->weight[row * in->n_active + k] = weight[in->n_active - 1 - k];
        }
    }
}

static void gemm_one_scale(const gemm_args *in, dev_queue *q)
{
    gemm_args a = *in;
    float one[64];
    for (int32_t i = 0; i < 64; i++) {
        one[i] = 1.0f; /* the scale of the first block for all of the tensor */
    }
    a.w.scale = a.w.type == GEMM_FP8 ? one : NULL;
    g_ref.gemm(&a, q);
    for (int64_t r = 0; r < in->n_row && in->w.type == GEMM_FP8; r++) {
        for (int64_t o = 0; o < in->w.n_out; o++) {
            a.y[r * a.y_stride + o] *= in->w.scale[0];
        }
    }
}

static void gemm_by_company(const gemm_args *a, dev_queue *q)
{
    g_ref.gemm(a, q);
    for (int64_t r = 0; r < a->n_row && a->n_row > 1 && a->w.n_out > 0; r++) {
        a->y[r * a->y_stride] = nextafterf(a->y[r * a->y_stride], 0.0f);
    }
}

static void kv_write_32_bits(const kv_write_args *in, dev_queue *q)
{
    kv_write_args a = *in;
    a.slot = cut_slots(a.slot, a.n_tok, a.n_slot);
    g_ref.kv_write(&a, q);
}

static void index_write_32_bits(const index_write_args *in, dev_queue *q)
{
    index_write_args a = *in;
    a.slot = cut_slots(a.slot, a.n_tok, a.n_slot);
    g_ref.index_write(&a, q);
}

static void gather_32_bits(const gather_args *in, dev_queue *q)
{
    gather_args a = *in;
    a.table = cut_table(a.table, a.n_req * a.table_stride, a.n_slot / 64);
    g_ref.gather(&a, q);
}

#define WRONG(op, name)                                                                            \
    static void apply_##name(kern_table *t)                                                        \
    {                                                                                              \
        t->op = name;                                                                              \
    }
#define WRONG_SCRATCH(op, name)                                                                    \
    static void apply_##name(kern_table *t)                                                        \
    {                                                                                              \
        t->op = name;                                                                              \
        t->op##_scratch = g_ref.op##_scratch;                                                      \
    }
#define WRONG_LIST(X, Y)                                                                           \
    X(attn, attn_forgets_last, "dense", 2)                                                         \
    X(attn, attn_base_two, "sparse", 2)                                                            \
    X(attn, attn_scale_off, "dense", 2)                                                            \
    X(attn, attn_lse_transposed, "dense", 2)                                                       \
    X(attn, attn_one_lane, "tree", 1)                                                              \
    X(attn, attn_by_batch, "alone", 1)                                                             \
    X(attn, attn_empty_is_inf, "list edges", 2)                                                    \
    X(attn, attn_zero_times, "past bound", 3)                                                      \
    X(attn, attn_nan_uncounted, "nan, any order", 2)                                               \
    X(attn, attn_one_q_scale, "scales", 4)                                                         \
    X(attn, attn_scale_floor, "scales", 4)                                                         \
    Y(merge, merge_swapped, "random", 12)                                                          \
    Y(merge, merge_reads_dead, "edges", 12)                                                        \
    Y(merge, merge_by_chance, "random", 12)                                                        \
    Y(quant_q, quant_q_floor, "random", 12)                                                        \
    Y(index_quant, index_quant_no_heads, "random", 12)                                             \
    X(index_score, score_nan_is_zero, "nan", 12)                                                   \
    X(index_score, score_by_place, "alone", 12)                                                    \
    X(index_score, score_by_company, "alone", 12)                                                  \
    X(index_select, select_high_ties, "ties", 12)                                                  \
    X(index_select, select_local_ids, "random", 12)                                                \
    X(index_select, select_scores_behind, "bad", 12)                                               \
    X(index_score, score_32_bits, "far pages", 2)                                                  \
    X(index_select, select_32_bits, "far pages", 2)                                                \
    X(index_select, select_list_full, "long", 2)                                                   \
    X(index_select, select_nan_is_zero, "nan", 4)                                                  \
    X(topk, topk_high_ties, "patterns", 12)                                                        \
    X(topk, topk_forgets_list, "list", 12)                                                         \
    X(topk, topk_forgets_list, "stream", 12)                                                       \
    X(topk, topk_writes_input, "random", 12)                                                       \
    X(topk_merge, topk_merge_cut_before, "random", 12)                                             \
    X(localise, localise_position_order, "random", 12)                                             \
    X(localise, localise_keeps_repeated, "bad ids", 12)                                            \
    X(localise, localise_by_worker, "cut", 12)                                                     \
    Y(kv_write, kv_write_reciprocal, "random", 12)                                                 \
    Y(index_write, index_write_wrong_page, "random", 12)                                           \
    Y(gather, gather_aligned, "random", 12)                                                        \
    Y(gather, gather_writes_behind, "random", 12)                                                  \
    Y(gather, gather_fails_queue, "bad pages", 12)                                                 \
    Y(kv_write, kv_write_32_bits, "far pages", 2)                                                  \
    Y(index_write, index_write_32_bits, "far pages", 2)                                            \
    Y(gather, gather_32_bits, "far pages", 4)                                                      \
    Y(norm, norm_no_centre, "random", 12)                                                          \
    Y(norm, norm_no_eps, "edges", 12)                                                              \
    Y(rope, rope_other_pairs, "random", 12)                                                        \
    Y(act, act_swapped, "random", 12)                                                              \
    Y(route, route_no_bias, "random", 12)                                                          \
    Y(route, route_bias_weighs, "random", 12)                                                      \
    Y(route, route_high_ties, "ties", 12)                                                          \
    X(gemm, gemm_one_scale, "random", 12)                                                          \
    X(gemm, gemm_by_company, "alone", 12)

WRONG_SCRATCH(attn, attn_forgets_last)
WRONG_SCRATCH(attn, attn_base_two)
WRONG_SCRATCH(attn, attn_scale_off)
WRONG_SCRATCH(attn, attn_lse_transposed)
WRONG_SCRATCH(attn, attn_one_lane)
WRONG_SCRATCH(attn, attn_by_batch)
WRONG_SCRATCH(attn, attn_empty_is_inf)
WRONG_SCRATCH(attn, attn_zero_times)
WRONG_SCRATCH(attn, attn_nan_uncounted)
WRONG_SCRATCH(attn, attn_one_q_scale)
WRONG_SCRATCH(attn, attn_scale_floor)
WRONG(merge, merge_swapped)
WRONG(merge, merge_reads_dead)
WRONG(merge, merge_by_chance)
WRONG(quant_q, quant_q_floor)
WRONG(index_quant, index_quant_no_heads)
WRONG_SCRATCH(index_score, score_nan_is_zero)
WRONG_SCRATCH(index_score, score_by_place)
WRONG_SCRATCH(index_score, score_by_company)
WRONG_SCRATCH(index_select, select_high_ties)
WRONG_SCRATCH(index_select, select_local_ids)
WRONG_SCRATCH(index_select, select_scores_behind)
WRONG_SCRATCH(index_score, score_32_bits)
WRONG_SCRATCH(index_select, select_32_bits)
WRONG_SCRATCH(index_select, select_list_full)
WRONG_SCRATCH(index_select, select_nan_is_zero)
WRONG_SCRATCH(topk, topk_high_ties)
WRONG_SCRATCH(topk, topk_forgets_list)
WRONG_SCRATCH(topk, topk_writes_input)
WRONG_SCRATCH(topk_merge, topk_merge_cut_before)
WRONG_SCRATCH(localise, localise_position_order)
WRONG_SCRATCH(localise, localise_keeps_repeated)
WRONG_SCRATCH(localise, localise_by_worker)
WRONG(kv_write, kv_write_reciprocal)
WRONG(index_write, index_write_wrong_page)
WRONG(gather, gather_aligned)
WRONG(gather, gather_writes_behind)
WRONG(gather, gather_fails_queue)
WRONG(kv_write, kv_write_32_bits)
WRONG(index_write, index_write_32_bits)
WRONG(gather, gather_32_bits)
WRONG(norm, norm_no_centre)
WRONG(norm, norm_no_eps)
WRONG(rope, rope_other_pairs)
WRONG(act, act_swapped)
WRONG(route, route_no_bias)
WRONG(route, route_bias_weighs)
WRONG(route, route_high_ties)
WRONG_SCRATCH(gemm, gemm_one_scale)
WRONG_SCRATCH(gemm, gemm_by_company)

const wrong_kernel *wrong_kernels(int32_t *n)
{
    static const wrong_kernel list[] = {
#define WRONG_ROW(op, name, cls, n) {#name, {cls, n}, KERN_VARIANT(op, "wrong", 0, apply_##name)},
        WRONG_LIST(WRONG_ROW, WRONG_ROW)};
    assert_int_equal(kern_init(&g_ref, 0, NULL, NULL), KVS_OK);
    *n = (int32_t)UNIT_COUNT(list);
    return list;
}
