/* case_attn_op.c - the classes of attention cases and their shapes. */
#include <math.h>
#include <string.h>

#include "check/case_attn.h"

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_ROW_DIM };

/* ---- table mode ---- */

static const attn_shape g_dense[] = {
    /* heads, lanes, I, requests, rows, lengths */
    {16, 1, 1, 2, 3, {63, 64, 65, 128, 1, 0, -1}, 0, 0},
    {3, 2, 2, 3, 2, {130, 127, 0, 64, 65, 300, -1}, 0, 0},
    {8, 4, 4, 1, 8, {193, 194, 195, 196, 197, 198, 199, 200}, 0, 0},
    {17, 8, 64, 2, 2, {600, 511, 513, 65, -1}, 0, 0},
    {128, 8, 16, 1, 2, {300, 129, -1}, 0, 0},
    {2, 1, 1, 3, 1, {2047, 2048, 2049, -1}, 0, 0},
    {40, 2, 1, 4, 1, {70, 0, 3, 129, -1}, 0, 0},
    {65, 1, 8, 2, 1, {66, 190, -1}, 0, 0},
    {1, 2, 32, 2, 2, {4094, 4095, 4097, 4160, -1}, 0, 0},
    {96, 4, 1, 1, 3, {100, 101, 102, -1}, 0, 0},
    {48, 8, 1, 3, 2, {7, 8, 9, 16, 1, 515, -1}, 0, 0},
    {64, 1, 1, 1, 5, {126, 127, 128, 129, 130, -1}, 0, 0},
    {4, 8, 2, 1, 1, {16390, -1}, 0, 0},
    {5, 1, 1, 0, 1, {64, -1}, 0, 0},
    {16, 2, 1, 5, 1, {700, 65, 0, 2000, 129, -1}, 0, 0},
    {5, 1, 1, 3, 3, {190, 192, 193, 900, 901, 902, 0, 64}, 0, 0},
};
enum { N_DENSE = sizeof g_dense / sizeof *g_dense };

static void attn_dense(check_case *k, int32_t index)
{
    attn_new(k, &g_dense[index % N_DENSE], attn_fmt_of(index, N_DENSE));
    attn_fill(k);
    attn_finish(k);
    ((attn_expect *)k->expect)->spread = 1;
}

/* Pages outside the pool, rows longer than the table, rows of no request, a NULL for stats. */
static void attn_bad_pages(check_case *k, int32_t index)
{
    const attn_shape s = {
        6, 1 << (index % 4), 1 << (index % 7), 4, 2, {200, 130, 64, 300, 0, 65, 128, 255}, 0, 0};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    if (!k->failed) {
        int32_t *table = (int32_t *)a->table;
        table[0] = -1;
        table[a->table_stride] = INT32_MAX;
        table[a->table_stride + 1] = (int32_t)(a->n_slot / PAGE);
        table[2 * a->table_stride + 1] = INT32_MIN;
        a->table = case_fenced_table(k, table, a->n_req, a->table_stride, a->n_slot / PAGE);
        ((int32_t *)a->row_req)[0] = 4;
        ((int32_t *)a->row_req)[1] = -1;
        ((int32_t *)a->kv_len)[5] = a->table_width * PAGE + 100;
        ((int32_t *)a->kv_len)[4] = -3;
    }
    attn_fill(k);
    attn_finish(k);
}

/* Rows of one request with different bounds; the keys between two bounds hold NaN. */
static void attn_past_bound(check_case *k, int32_t index)
{
    static const int32_t cuts[] = {64, 63, 65, 127, 128, 30};
    const int32_t cut = cuts[index % 6];
    const int32_t n_head = index % 8 == 7 ? 5 : 9;
    const attn_shape s = {
        n_head, 1 << (index % 4), 1 << (index % 3), 2, 3, {cut, cut + 70, cut, -1}, 0, 0};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    attn_fill(k);
    for (int64_t l = cut; l < cut + 70 && !k->failed; l++) {
        for (int32_t req = 0; req < 2; req++) {
            const int64_t slot =
                orc_slot(a->table + req * a->table_stride, a->table_width, a->n_slot, l);
            poison_fill(attn_row_at(a, slot), (size_t)orc_row_bytes(a->fmt));
        }
    }
    attn_finish(k);
}

/* ---- list mode ---- */

static const attn_shape g_sparse[] = {
    /* heads, lanes, I, requests, rows, -, topk, percent of -1 */
    {16, 1, 1, 1, 4, {0}, 130, 0},  {8, 8, 1, 1, 3, {0}, 256, 10},  {3, 2, 1, 1, 2, {0}, 2048, 30},
    {128, 4, 1, 1, 2, {0}, 100, 0}, {17, 1, 1, 1, 3, {0}, 64, 50},  {40, 1, 1, 1, 3, {0}, 65, 0},
    {48, 8, 1, 1, 2, {0}, 320, 87}, {64, 2, 1, 1, 2, {0}, 200, 87}, {65, 1, 1, 1, 2, {0}, 63, 5},
    {96, 1, 1, 1, 2, {0}, 128, 20}, {1, 1, 1, 1, 2, {0}, 2049, 0},  {2, 8, 1, 1, 2, {0}, 4200, 3},
    {5, 4, 1, 1, 5, {0}, 512, 100}, {8, 1, 1, 1, 2, {0}, 1, 0},     {16, 8, 1, 1, 9, {0}, 40, 60},
};
enum { N_SPARSE = sizeof g_sparse / sizeof *g_sparse };

static void attn_sparse(check_case *k, int32_t index)
{
    attn_new(k, &g_sparse[index % N_SPARSE], attn_fmt_of(index, N_SPARSE));
    attn_fill(k);
    attn_finish(k);
    ((attn_expect *)k->expect)->spread = 1;
}

/* The longest selection a row may have. */
static void attn_longest(check_case *k, int32_t index)
{
    const attn_shape s = {1, index % 2 != 0 ? 8 : 1, 1, 1, 1, {0}, KVS_MAX_TOPK, 1};
    attn_new(k, &s, attn_fmt(index));
    attn_fill(k);
    attn_finish(k);
    ((attn_expect *)k->expect)->spread = 1;
}

/* Ids out of range, repeated ids, rows and lanes of nothing but -1, lanes without entries. */
static void attn_list_edges(check_case *k, int32_t index)
{
    const attn_shape s = {index / 4 % 2 != 0 ? 70 : 7, 1 << (index % 4), 1, 1, 6, {0}, 150, 20};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        int32_t *list = (int32_t *)a->slots + row * a->slots_stride;
        int32_t *count = (int32_t *)a->lane_count + row * a->n_lane;
        const int32_t odd[] = {
            -2, INT32_MIN, INT32_MAX, (int32_t)a->n_slot, (int32_t)a->n_slot - 1, list[3]};
        for (int32_t i = 0; i < s.topk; i++) {
            if (row == 1) {
                list[i] = -1;
            } else if (row == 2) {
                list[i] = odd[i % 4];
            } else if (gen_pick(&k->r, 6) == 0) {
                list[i] = odd[gen_pick(&k->r, 6)];
            }
        }
        for (int32_t lane = 0; lane < a->n_lane; lane++) {
            count[lane] = row == 3 ? 0 : row == 4 && lane > 0 ? 0 : count[lane];
        }
    }
    attn_fill(k);
    attn_finish(k);
}

/* ---- values ---- */

/* Query of (row, head) as a multiple of one attended key: that key has all the weight. */
static void aim(const attn_args *a, const orc_keys *keys, int64_t row, int64_t head, float factor)
{
    float key[DIM];
    const int64_t slot = keys->slot[head * 7 % keys->n];
    orc_row_read(a->fmt, a->k_scale, attn_row_at(a, slot), key);
    for (int64_t d = 0; d < DIM; d++) {
        gen_store((void *)a->q, a->q_type, row * a->q_stride_row + head * a->q_stride_head + d,
                  key[d] * factor);
    }
}

/* Scores from 1e3 to 1e33. */
static void attn_huge(check_case *k, int32_t index)
{
    static const float factors[] = {3e2f, 1e4f, -1e4f, 1e15f, 1e30f, -1e30f};
    const attn_shape s = {index / 12 % 2 != 0 ? 66 : 8, 1 << (index % 4), 1, 1, 2, {0}, 180, 10};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    attn_fill(k);
    orc_keys keys = {0};
    keys.slot = case_alloc(k, orc_attn_max_keys(a), sizeof *keys.slot);
    keys.seg = case_alloc(k, orc_attn_max_keys(a), sizeof *keys.seg);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        orc_attn_keys(a, row, &keys);
        for (int64_t head = 0; head < a->n_head; head++) {
            aim(a, &keys, row, head, factors[(index + head) % 6]);
        }
    }
    attn_finish(k);
}

/* All scores equal: queries of 0, -0 and denormals. */
static void attn_flat(check_case *k, int32_t index)
{
    const attn_shape s = {6, 1 << (index % 4), 1, 1, 2, {0}, 300, 10};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            static const float few[] = {0.0f, -0.0f, 1e-39f};
            for (int64_t d = 0; d < DIM; d++) {
                gen_store((void *)a->q, a->q_type,
                          row * a->q_stride_row + head * a->q_stride_head + d, few[head % 3]);
            }
        }
    }
    attn_fill(k);
    attn_finish(k);
    ((attn_expect *)k->expect)->spread = 1;
}

/* One element of a row becomes `value`. */
static void put_value(check_case *k, const attn_args *a, int64_t slot, float value)
{
    uint8_t *row = attn_row_at(a, slot);
    const int32_t d = gen_pick(&k->r, 512);
    if (a->fmt == KVS_KV_F32) {
        memcpy(row + 4 * d, &value, sizeof value);
    } else if (a->fmt == KVS_KV_BF16) {
        const uint16_t h = orc_to_bf16(value);
        memcpy(row + 2 * d, &h, sizeof h);
    } else if (isnan(value)) {
        row[d] = (uint8_t)(0x7F | (gen_pick(&k->r, 2) << 7));
    } else {
        const uint16_t h = orc_to_bf16(value); /* fp8 has no infinity; the rope of fp8_ds_mla has */
        memcpy(row + (a->fmt == KVS_KV_FP8 ? 0 : 528), &h, a->fmt == KVS_KV_FP8 ? 0 : sizeof h);
    }
}

/* A NaN among the attended keys: that segment is dropped for every head and counted. */
static void attn_nan(check_case *k, int32_t index)
{
    const int two = index % 3 == 2; /* more than one segment in a lane, the NaN in the first */
    const attn_shape s = {two ? 2 : 6, two ? 1 : 1 << (index % 4), 1, 1, 3,
                          {0},         two ? 2300 : 190,           10};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    attn_fill(k);
    if (!k->failed) {
        for (int32_t row = 0; row < 2; row++) {
            const int32_t *list = a->slots + row * a->slots_stride;
            int32_t i = gen_pick(&k->r, 100);
            while (list[i] < 0) {
                i++;
            }
            put_value(k, a, list[i], NAN);
        }
        if (index % 2 != 0) {
            gen_store((void *)a->q, a->q_type, 2 * a->q_stride_row + a->q_stride_head + 5, NAN);
        }
    }
    attn_finish(k);
}

/* The same for kernels that cut a row as they like: a NaN key in the first row, a NaN query in the second. */
static void attn_nan_any(check_case *k, int32_t index)
{
    const attn_shape s = {
        index / 8 % 2 != 0 ? 72 : 6, 1 << (index % 4), 1, 1, 4, {0}, index % 2 != 0 ? 700 : 90, 10};
    attn_args *a = attn_new(k, &s, attn_fmt(index + index / 4));
    attn_fill(k);
    if (!k->failed) {
        int32_t i = gen_pick(&k->r, 60);
        while (a->slots[i] < 0) {
            i++;
        }
        put_value(k, a, a->slots[i], NAN);
        gen_store((void *)a->q, a->q_type, a->q_stride_row + a->q_stride_head + 5, NAN);
    }
    attn_finish(k);
    ((attn_expect *)k->expect)->any_order = 1;
}

/* Infinities among keys and values: what comes out is finite or nothing. */
static void attn_inf(check_case *k, int32_t index)
{
    const attn_shape s = {index / 4 % 2 != 0 ? 65 : 8, 1 << (index % 4), 1, 1, 3, {0}, 150, 10};
    attn_args *a = attn_new(k, &s, attn_fmt(index));
    attn_fill(k);
    for (int32_t row = 0; row < a->n_row && !k->failed; row++) {
        const int32_t *list = a->slots + row * a->slots_stride;
        for (int32_t i = row; i < s.topk; i += 40) {
            if (list[i] >= 0) {
                put_value(k, a, list[i], (i & 1) != 0 ? INFINITY : -INFINITY);
            }
        }
    }
    attn_finish(k);
    ((attn_expect *)k->expect)->clean_only = 1;
}

/* Scales from a tile of almost nothing to one of 448 x 128, of single keys and of all, and of queries: those of either
 * sign or 0, since a key that is not there must weigh nothing under any. Where keys are large queries are
 * small, or the bound of a score would let everything pass. */
static void attn_scales(check_case *k, int32_t index)
{
    static const float small[] = {0x1p-13f, 1e-3f / 448.0f, 3.7f / 448.0f, 0x1p-7f, 0.013f, 1.0f};
    static const float large[] = {0x1p7f, 60000.0f / 448.0f, 100.0f, 0x1p5f};
    const attn_shape s = {6, 1 << (index % 4), 1, 1, 2, {0}, 200, 10};
    attn_args *a = attn_new(k, &s, KVS_KV_FP8_DS_MLA);
    const int big = index % 4 > 1;
    if (big) {
        float *q_scale = case_buf(k, "q_scale", BUF_IN, EL_F32, (int64_t)a->n_row * a->n_head, 0);
        for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head && !k->failed; i++) {
            const float sign = i % 5 == 1 ? -1.0f : i % 7 == 3 ? 0.0f : 1.0f;
            q_scale[i] = sign * (0.25f + 0.125f * (float)gen_pick(&k->r, 16));
        }
        a->q_scale = q_scale;
    }
    attn_fill(k);
    const attn_expect *e = k->expect;
    for (int64_t slot = 0; slot < a->n_slot && !k->failed; slot++) {
        for (int32_t t = 0; t < 4 && e->used[slot]; t++) {
            const int32_t pick = index % 2 != 0 ? index / 2 + t : gen_pick(&k->r, 12);
            const float scale = big && t == 3 ? large[pick % 4] : small[pick % 6];
            memcpy(attn_row_at(a, slot) + KVS_LATENT_DIM + 4 * t, &scale, sizeof scale);
        }
    }
    for (int64_t i = 0; big && i < (int64_t)a->n_row * a->n_head && !k->failed; i++) {
        const int64_t at = i / a->n_head * a->q_stride_row + i % a->n_head * a->q_stride_head;
        gen_any(&k->r, (void *)a->q, a->q_type, at, DIM, 0x1p-7f);
        gen_any(&k->r, (void *)a->q, a->q_type, at + 384, 128, 0x1p-12f);
    }
    attn_finish(k);
}

/* A key whose score is -inf with every query that is positive in its first rope value. */
static void put_minus_inf(const attn_args *a, int64_t slot)
{
    uint8_t *row = attn_row_at(a, slot);
    const float f = -INFINITY;
    const uint16_t h = orc_to_bf16(f);
    if (a->fmt == KVS_KV_F32) {
        memcpy(row + 4 * KVS_LATENT_DIM, &f, sizeof f);
    } else {
        memcpy(row + (a->fmt == KVS_KV_BF16 ? 2 * KVS_LATENT_DIM : 528), &h, sizeof h);
    }
}

/* Scores of -inf weigh nothing: more than the first tile of each lane, all of a row, one key in
 * three. */
static void attn_minus_inf(check_case *k, int32_t index)
{
    /* fp8 has no infinity */
    static const int32_t fmt[] = {KVS_KV_FP8_DS_MLA, KVS_KV_BF16, KVS_KV_F32};
    const int32_t n_lane = 1 << (index % 4);
    const attn_shape s = {index / 3 % 2 != 0 ? 68 : 6, n_lane, 1, 1, 2, {0}, 160 * n_lane, 10};
    attn_args *a = attn_new(k, &s, fmt[(index + index / 3) % 3]);
    attn_fill(k);
    const int32_t *entry = a->slots;
    for (int32_t lane = 0; lane < a->n_lane && !k->failed; lane++) {
        int32_t n = 0;
        for (int32_t i = 0; i < a->lane_count[lane]; i++, entry++) {
            const int hit = index % 3 == 0 ? n < 80 : index % 3 == 1 || n % 3 == 0;
            if (*entry >= 0 && hit) {
                put_minus_inf(a, *entry);
            }
            n += *entry >= 0;
        }
    }
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head && !k->failed; i++) {
        const int64_t at = i / a->n_head * a->q_stride_row + i % a->n_head * a->q_stride_head;
        gen_store((void *)a->q, a->q_type, at + KVS_LATENT_DIM, 0.5f);
    }
    attn_finish(k);
}

/* ---- the op ---- */

static int attn_filled(const kern_table *t)
{
    return t->attn != NULL && t->attn_scratch != NULL;
}

static int attn_same(const kern_table *a, const kern_table *b)
{
    return a->attn == b->attn;
}

static const check_class g_classes[] = {
    {"dense",
     "scores and output accumulate in f32; lse is f32, natural log, [tokens, heads]; per-token "
     "bounds",
     4 * N_DENSE, N_DENSE, 0, attn_dense, NULL, attn_compare},
    {"bad pages", "an id outside the table is masked and counted, never dereferenced", 16, 4, 0,
     attn_bad_pages, NULL, attn_compare},
    {"past bound", "a key outside a row's bound cannot touch that row even if it holds NaN", 12, 6,
     0, attn_past_bound, NULL, attn_compare},
    {"sparse", "P is rounded to the product's operand type, the row sum uses the unrounded P",
     4 * N_SPARSE, N_SPARSE, 0, attn_sparse, NULL, attn_compare},
    {"list edges", "-1 is none; a row with nothing to attend gives exactly (0, -inf)", 16, 4, 0,
     attn_list_edges, NULL, attn_compare},
    {"mixed step", "the result of (row, head) depends on that row, that head and its keys only", 8, 2, 0,
     attn_mixed, NULL, attn_compare},
    {"longest", NULL, 4, 0, 0, attn_longest, NULL, attn_compare},
    {"huge logits", NULL, 24, 8, 0, attn_huge, NULL, attn_compare},
    {"flat logits", NULL, 8, 4, 0, attn_flat, NULL, attn_compare},
    {"nan", "a NaN drops its segment and is counted; no NaN crosses an interface", 12, 6,
     CLASS_ORDER, attn_nan, NULL, attn_compare},
    {"nan, any order", "a NaN is counted and touches no other row or head", 16, 4, 0, attn_nan_any,
     NULL, attn_compare},
    {"scales", "a tile's scale is any from 2^-13 to 2^7, a power of two or not", 16, 4, 0,
     attn_scales, NULL, attn_compare},
    {"inf", "no infinity crosses an interface but the lse -inf", 8, 4, 0, attn_inf, NULL,
     attn_compare},
    {"-inf scores", "a segment all of whose scores are -inf is the identity, and is not counted", 9,
     6, 0, attn_minus_inf, NULL, attn_compare},
    {"alone", "the result of (row, head) depends on that row, that head and its keys only", 12, 4,
     CLASS_ORDER, attn_alone, attn_alone_run, attn_compare},
    {"tree", "N = 1, 2, 4, 8 have the same bits: lanes merge by (l, l+4), (l, l+2), (l, l+1)", 12,
     4, CLASS_ORDER | CLASS_STEPS, attn_tree, attn_tree_run, attn_compare},
    {"tables as lists", "a block table attends what lists of its slots do, in the order of lanes", 16, 4,
     CLASS_ORDER | CLASS_STEPS, attn_listed, attn_listed_run, attn_compare},
    {"fold", "segments of 2048 attended keys fold in order", 8, 2, CLASS_ORDER | CLASS_STEPS,
     attn_fold, attn_fold_run, attn_compare},
    {"bf16 out", "out as bf16 is the f32 result rounded once", 24, 6, CLASS_DEVICE, attn_bf16,
     attn_bf16_run, attn_compare},
    {"many rows", NULL, 2, 0, CLASS_DEVICE, attn_many_rows, NULL, attn_compare},
    {"far slots", NULL, 6, 2, CLASS_DEVICE, attn_far_slots, NULL, attn_compare},
};

const check_op check_attn_op = {
    KERN_OP_attn, sizeof g_classes / sizeof *g_classes, g_classes, attn_filled, attn_same, attn_run,
    NULL,
};
