/* The checking tool: it passes the reference, reports planted faults, and fails wrong variants of
 * every op, each in the class that is there for it. */
#include "unit/unit.h"

#include <math.h>

#include "base/cpu.h"
#include "check/check.h"

static kern_table g_ref;

static int setup(void **state)
{
    (void)state;
    return kern_init(&g_ref, 0, NULL, NULL);
}

/* ---- running ---- */

typedef struct lines {
    char last[512];
    char with[512]; /* the last line that contains `word` */
    const char *word;
    int n;
} lines;

static void keep_line(void *ctx, const char *text)
{
    lines *l = ctx;
    snprintf(l->last, sizeof l->last, "%s", text);
    if (l->word != NULL && strstr(text, l->word) != NULL) {
        snprintf(l->with, sizeof l->with, "%s", text);
    }
    l->n++;
}

static kvs_check_config config(const char *op, lines *l, kvs_check_result *result)
{
    kvs_check_config c = kvs_check_config_default();
    c.op = op;
    c.quick = 1;
    c.line = keep_line;
    c.ctx = l;
    c.result = result;
    return c;
}

/* The reference passes every class of the op, by the oracle: the first cases of each, or all. */
static void reference_passes(const char *op, int32_t n_case)
{
    lines l = {.word = "FAIL"};
    kvs_check_result result;
    kvs_check_config c = config(op, &l, &result);
    c.variant = "ref";
    kvs_error err;
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    if (check_run_variants(&c, all, n, (check_filter){NULL, n_case}, &err) != KVS_OK) {
        fail_msg("%s: %s; %s", op, err.text, l.with);
    }
    assert_true(result.n_passed > 0);
    assert_int_equal(result.n_failed, 0);
    assert_non_null(strstr(l.last, "0 failed"));
}

/* KVS_TEST_OP=attn restricts what runs per op to that one, and runs all quick cases of it. */
static int op_wanted(kern_op op)
{
    const char *only = getenv("KVS_TEST_OP");
    return only == NULL || strcmp(only, kern_op_name(op)) == 0;
}

static void the_reference_passes(void **state)
{
    (void)state;
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (op_wanted((kern_op)op)) {
            reference_passes(kern_op_name((kern_op)op), getenv("KVS_TEST_OP") != NULL ? 0 : 3);
        }
    }
}

static void planted_faults_are_reported(void **state)
{
    (void)state;
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (!op_wanted((kern_op)op)) {
            continue;
        }
        lines l = {.word = "FAIL"};
        kvs_check_result result;
        kvs_check_config c = config(kern_op_name((kern_op)op), &l, &result);
        c.selftest = 1;
        kvs_error err;
        if (kvs_check_run(&c, &err) != KVS_OK) {
            fail_msg("%s: %s", err.text, l.with);
        }
        assert_true(result.n_passed >= 6);
    }
}

/* ---- wrong variants ---- */

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
    Y(merge, merge_swapped, "random", 12)                                                          \
    Y(merge, merge_reads_dead, "edges", 12)                                                        \
    Y(merge, merge_by_chance, "random", 12)                                                        \
    Y(quant_q, quant_q_floor, "random", 12)                                                        \
    Y(index_quant, index_quant_no_heads, "random", 12)                                             \
    X(index_score, score_nan_is_zero, "nan", 12)                                                   \
    X(index_score, score_by_place, "alone", 12)                                                    \
    X(index_select, select_high_ties, "ties", 12)                                                  \
    X(index_select, select_local_ids, "random", 12)                                                \
    X(index_select, select_scores_behind, "bad", 12)                                               \
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
WRONG(merge, merge_swapped)
WRONG(merge, merge_reads_dead)
WRONG(merge, merge_by_chance)
WRONG(quant_q, quant_q_floor)
WRONG(index_quant, index_quant_no_heads)
WRONG_SCRATCH(index_score, score_nan_is_zero)
WRONG_SCRATCH(index_score, score_by_place)
WRONG_SCRATCH(index_select, select_high_ties)
WRONG_SCRATCH(index_select, select_local_ids)
WRONG_SCRATCH(index_select, select_scores_behind)
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
WRONG(norm, norm_no_centre)
WRONG(norm, norm_no_eps)
WRONG(rope, rope_other_pairs)
WRONG(act, act_swapped)
WRONG(route, route_no_bias)
WRONG(route, route_bias_weighs)
WRONG(route, route_high_ties)
WRONG_SCRATCH(gemm, gemm_one_scale)
WRONG_SCRATCH(gemm, gemm_by_company)

/* The reference of an op and one more variant. */
static void two_variants(kern_variant list[2], kern_op op, kern_variant second)
{
    int32_t n = 0;
    const kern_variant *all = kern_variants(&n);
    for (int32_t i = 0; i < n; i++) {
        if (all[i].op == op) {
            list[0] = all[i];
            break;
        }
    }
    list[1] = second;
}

static void wrong_variants_fail(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        check_filter only;
        kern_variant v;
    } wrong[] = {
#define WRONG_ROW(op, name, cls, n) {#name, {cls, n}, KERN_VARIANT(op, "wrong", 0, apply_##name)},
        WRONG_LIST(WRONG_ROW, WRONG_ROW)};
    for (size_t i = 0; i < UNIT_COUNT(wrong); i++) {
        if (!op_wanted(wrong[i].v.op)) {
            continue;
        }
        kern_variant list[2];
        two_variants(list, wrong[i].v.op, wrong[i].v);
        lines l = {.word = "wrong"};
        kvs_check_result result;
        kvs_check_config c = config(kern_op_name(wrong[i].v.op), &l, &result);
        kvs_error err;
        const kvs_status st = check_run_variants(&c, list, 2, wrong[i].only, &err);
        if (st != KVS_INTERNAL || result.n_failed != 1 || result.n_passed != 1 ||
            strstr(l.with, "FAIL") == NULL) {
            fail_msg("%s passed %s: %s", wrong[i].name, wrong[i].only.cls, l.with);
        }
        assert_non_null(strstr(err.text, wrong[i].only.cls));
        assert_non_null(strstr(err.text, "(case "));
    }
}

static void apply_nothing(kern_table *t)
{
    (void)t;
}

static void apply_half(kern_table *t)
{
    t->topk = g_ref.topk; /* and no scratch query */
}

static void apply_ref_topk(kern_table *t)
{
    t->topk = g_ref.topk;
    t->topk_scratch = g_ref.topk_scratch;
}

static void run_second(kern_variant second, lines *l, kvs_check_result *result, kvs_status want)
{
    kern_variant list[2];
    two_variants(list, KERN_OP_topk, second);
    kvs_check_config c = config("topk", l, result);
    assert_int_equal(check_run_variants(&c, list, 2, (check_filter){"list", 1}, NULL), want);
}

static void empty_and_inherited_variants_are_named(void **state)
{
    (void)state;
    lines l = {.word = "hollow"};
    kvs_check_result result;
    run_second((kern_variant)KERN_VARIANT(topk, "hollow", 0, apply_nothing), &l, &result,
               KVS_INTERNAL);
    assert_non_null(strstr(l.with, "sets no function"));
    assert_int_equal(result.n_failed, 1);
    run_second((kern_variant)KERN_VARIANT(topk, "hollow", 0, apply_half), &l, &result,
               KVS_INTERNAL);
    assert_int_equal(result.n_failed, 1);
    l.word = "heir";
    run_second((kern_variant)KERN_VARIANT(topk, "heir", 0, apply_ref_topk), &l, &result, KVS_OK);
    assert_non_null(strstr(l.with, "inherited"));
    assert_int_equal(result.n_skipped, 1);
    l.word = "future";
    run_second((kern_variant)KERN_VARIANT(topk, "future", 1u << 31, apply_ref_topk), &l, &result,
               KVS_OK);
    assert_non_null(strstr(l.with, "skip"));
    assert_int_equal(result.n_skipped, 1);
    assert_string_equal(l.last, "1 passed, 0 failed, 1 skipped");
}

/* ---- the entry ---- */

static void refuses(kvs_check_config c, const char *a, const char *b)
{
    kvs_error err;
    assert_int_equal(kvs_check_run(&c, &err), KVS_INVALID);
    if (strstr(err.text, a) == NULL || strstr(err.text, b) == NULL) {
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", err.text, a, b);
    }
}

static void bad_configs_are_refused(void **state)
{
    (void)state;
    kvs_check_config c = kvs_check_config_default();
    c.op = "atn";
    refuses(c, "\"atn\"", "localise");
    c = kvs_check_config_default();
    c.variant = "fast";
    refuses(c, "\"fast\"", "ref");
    c.op = "merge";
    refuses(c, "merge", "ref");
    c = kvs_check_config_default();
    c.cpu = "mmx";
    refuses(c, "mmx", "avx2");
    c = kvs_check_config_default();
    c.quick = 2;
    refuses(c, "quick", "2");
    c = kvs_check_config_default();
    c.conformance = 1;
    c.seed = 3;
    refuses(c, "conformance", "seed");
    c = kvs_check_config_default();
    c.struct_size = 0;
    refuses(c, "struct_size", "");
    assert_int_equal(kvs_check_run(NULL, NULL), KVS_INVALID);
    c = kvs_check_config_default();
    c.op = "topk_merge";
    c.csv = "/nonexistent/x.csv";
    kvs_error err;
    assert_int_equal(kvs_check_run(&c, &err), KVS_IO);
    assert_non_null(strstr(err.text, "/nonexistent/x.csv"));
}

static void a_short_config_has_defaults_behind_it(void **state)
{
    (void)state;
    kvs_check_config c = kvs_check_config_default();
    c.op = "topk_merge";
    c.variant = "ref";
    c.selftest = 7; /* behind the size: not read */
    c.struct_size = offsetof(kvs_check_config, conformance);
    c.quick = 1;
    assert_int_equal(kvs_check_run(&c, NULL), KVS_OK);
}

static void csv_and_conformance_rows(void **state)
{
    (void)state;
    char path[] = "/tmp/kvspan_check_XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "r");
    assert_non_null(f);
    lines l = {.word = "cut is (+inf, -1)"};
    kvs_check_config c = config("topk_merge", &l, NULL);
    c.quick = 0;
    c.conformance = 1;
    c.variant = "ref";
    c.csv = path;
    assert_int_equal(kvs_check_run(&c, NULL), KVS_OK);
    assert_non_null(strstr(l.with, "pass"));
    char row[512];
    assert_non_null(fgets(row, sizeof row, f));
    assert_string_equal(row, "op,variant,class,cases,verdict,worst,detail,seed\n");
    int n = 0;
    while (fgets(row, sizeof row, f) != NULL) {
        assert_non_null(strstr(row, "topk_merge,ref,"));
        assert_non_null(strstr(row, ",40,pass,0,\""));
        n++;
    }
    assert_int_equal(n, 2);
    fclose(f);
    remove(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_reference_passes),
        cmocka_unit_test(planted_faults_are_reported),
        cmocka_unit_test(wrong_variants_fail),
        cmocka_unit_test(empty_and_inherited_variants_are_named),
        cmocka_unit_test(bad_configs_are_refused),
        cmocka_unit_test(a_short_config_has_defaults_behind_it),
        cmocka_unit_test(csv_and_conformance_rows),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
