/* case_mha_op.c - the classes of cases of multi-head attention and their shapes. */
#include <math.h>

#include "check/case_mha.h"
#include "num/fmt.h"

enum { ROPE = KVS_ROPE_DIM };

static int32_t type_of(int32_t index)
{
    return index % 2 == 0 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32;
}

/* ---- sizes ---- */

static const mha_shape g_blocks[] = {
    /* rows, heads, nope, v, keys, lengths */
    {5, 2, 128, 128, 200, {-1}},
    {17, 3, 24, 40, 64, {64, 1, 0, 63, 33, -1}},
    {40, 1, 192, 256, 130, {-1}},
    {1, 4, 128, 128, 512, {512, -1}},
    {300, 1, 16, 16, 65, {-1}},
    {33, 2, 1, 1, 129, {127, 128, 129, 2, -1}},
    {3, 2, 7, 33, 7, {7, 3, 1, -1}},
    {64, 1, 128, 64, 512, {512, -1}},
    {20, 1, 65, 100, 511, {-1}},
    {0, 2, 128, 128, 64, {1, -1}},
    {9, 1, 300, 300, 66, {66, 65, 64, -1}},
    {4, 2, 32, 48, 0, {0, -1}},
    /* several blocks */
    {150, 2, 128, 128, 1300, {-1}},
    {24, 2, 24, 40, 1100, {1100, 512, 513, 0, 1024, 1025, 700, -1}},
    {70, 1, 64, 128, 1537, {1537, 1536, 1535, 511, 1, -1}},
    {9, 3, 40, 24, 1024, {-1}},
    /* more than 128 dims */
    {150, 2, 192, 256, 1100, {-1}},
    {5, 2, 192, 256, 200, {200, 63, 64, 65, 128, -1}},
    {70, 1, 130, 8, 1100, {1100, 512, 513, 0, 1024, 1025, 700, -1}},
    {33, 2, 12, 250, 600, {-1}},
};
enum { N_BLOCK = sizeof g_blocks / sizeof *g_blocks };

static void mha_block(check_case *k, int32_t index)
{
    mha_new(k, &g_blocks[index % N_BLOCK], type_of(index + index / N_BLOCK), index / 3 % 2 == 0);
    mha_finish(k);
    ((mha_expect *)k->expect)->spread = 1;
}

/* Lengths that are none: below 0, and past the block. */
static void mha_odd_lengths(check_case *k, int32_t index)
{
    const mha_shape s = {21, 2, 40, 24, 70, {70, 12, 5, -1}};
    mha_args *a = mha_new(k, &s, type_of(index), index % 4 < 2);
    for (int32_t row = 0; row < a->n_row && !k->failed; row++) {
        static const int32_t odd[] = {-1, INT32_MIN, INT32_MAX, 71, 70, 0};
        ((int32_t *)a->len)[row] = odd[(row + index) % 6];
    }
    mha_finish(k);
}

/* ---- who meets whom ---- */

/* Rows that end before keys of NaN, beside rows that end elsewhere and one in five that meets the NaN. */
static void mha_past_len(check_case *k, int32_t index)
{
    static const int32_t cuts[] = {63, 64, 65, 1, 30, 127};
    const int32_t before = index % 4 < 2 ? 0 : MHA_BLOCK;
    const int32_t cut = before + cuts[index % 6];
    const int32_t v_dim = index % 3 == 1 ? 140 : 40;
    const mha_shape s = {
        37, 2, 24, v_dim, before + 140, {cut, cut / 2, 0, cut + 10, cut - 1, -1}};
    mha_new(k, &s, type_of(index + index / 6), index % 3 == 0);
    mha_poison_keys(k, cut);
    mha_finish(k);
}

static void mha_alone(check_case *k, int32_t index)
{
    static const mha_shape shapes[] = {
        {70, 2, 24, 40, 200, {-1}},
        {40, 3, 128, 128, 67, {67, 5, 64, 0, 33, 63, 1, -1}},
        {270, 1, 16, 16, 300, {-1}},
        {19, 2, 33, 17, 512, {512, 511, 449, 448, 447, -1}},
        {21, 2, 24, 40, 1100, {1100, 512, 513, 0, 1024, 1025, 700, -1}},
        {150, 1, 128, 128, 700, {-1}},
        {40, 2, 192, 256, 700, {700, 512, 513, 1, 64, 65, 0, -1}},
    };
    mha_new(k, &shapes[index % 7], type_of(index + index / 7), index % 3 != 1);
    mha_second(k);
    mha_finish(k);
}

/* Every (row, head) by itself, with a block that ends where the row's keys end. */
static void mha_alone_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const mha_args *whole = k->args;
    const mha_expect *e = k->expect;
    mha_run(t, k, q);
    for (int64_t row = 0; row < whole->n_row; row++) {
        for (int64_t head = 0; head < whole->n_head; head++) {
            mha_args a = *whole;
            const int64_t at = row * a.q_stride_row + head * a.q_stride_head;
            a.q = (const uint8_t *)a.q + at * (a.type == KVS_DTYPE_F32 ? 4 : 2);
            a.kv += head * a.kv_stride_head;
            a.len += row;
            a.n_key = e->len[row];
            a.n_row = 1;
            a.n_head = 1;
            a.out = e->out2 + row * a.out_stride_row + head * a.out_stride_head;
            a.lse = e->lse2 + row * whole->n_head + head;
            a.n_nan = NULL;
            mha_call(t, k, q, &a);
        }
    }
}

/* The blocks of a call in one call, and in several: of one block, then of the rest. */
static void mha_parts(check_case *k, int32_t index)
{
    static const mha_shape shapes[] = {
        {150, 2, 128, 128, 1300, {-1}},
        {40, 3, 24, 40, 2000, {2000, 512, 513, 0, 1024, 1025, 700, 1}},
        {70, 1, 128, 64, 1024, {1024, 1023, 512, -1}},
        {140, 1, 192, 256, 1100, {-1}},
    };
    const mha_args *a = mha_new(k, &shapes[index % 4], type_of(index + index / 4), index / 8 % 2 == 0);
    int32_t *len = case_buf(k, "len of parts", BUF_IN, EL_I32, 2 * (int64_t)a->n_row, 0);
    for (int32_t row = 0; row < a->n_row && !k->failed; row++) {
        len[row] = a->len[row];
        len[a->n_row + row] = a->len[row] - MHA_BLOCK;
    }
    mha_second(k);
    mha_expect *e = k->expect;
    e->part_len = len;
    mha_finish(k);
}

static void mha_parts_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const mha_args *whole = k->args;
    const mha_expect *e = k->expect;
    mha_run(t, k, q);
    for (int64_t part = 0; part < 2; part++) {
        mha_args a = *whole;
        const int64_t key0 = part * MHA_BLOCK;
        a.n_key = part == 0 ? MHA_BLOCK : whole->n_key - MHA_BLOCK;
        a.kv += key0 * a.kv_stride_key;
        a.rope = (const uint8_t *)a.rope + key0 * a.rope_stride * (a.type == KVS_DTYPE_F32 ? 4 : 2);
        a.len = e->part_len + part * a.n_row;
        a.first = whole->first && part == 0;
        a.out = e->out2;
        a.lse = e->lse2;
        a.n_nan = NULL;
        mha_call(t, k, q, &a);
    }
}

/* ---- values ---- */

/* A query that is a multiple of one key: scores up to 1e30, all weight on that key. */
static void mha_huge(check_case *k, int32_t index)
{
    static const float factors[] = {3e2f, 1e4f, -1e4f, 1e15f, 1e30f, -1e30f};
    const mha_shape s = {18, 2, index % 4 == 2 ? 150 : 40, 24, 150, {150, 149, 70, -1}};
    mha_args *a = mha_new(k, &s, type_of(index), index % 3 == 0);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const int64_t key = (row * 11 + head) % a->len[row];
            const float f = factors[(row + index + head) % 6];
            const int64_t at = row * a->q_stride_row + head * a->q_stride_head;
            const float *x = a->kv + key * a->kv_stride_key + head * a->kv_stride_head;
            for (int64_t d = 0; d < a->nope; d++) {
                gen_store((void *)a->q, a->type, at + d, x[d] * f);
            }
            for (int64_t d = 0; d < ROPE; d++) {
                gen_store((void *)a->q, a->type, at + a->nope + d,
                          orc_load(a->rope, a->type, key * a->rope_stride + d) * f);
            }
        }
    }
    mha_finish(k);
}

/* A NaN in a key, in a value or in a query drops the block of whoever meets it, and of nobody else. */
static void mha_nan(check_case *k, int32_t index)
{
    static const mha_shape shapes[] = {
        {35, 3, 40, 24, 100, {100, 20, 50, 70, 0, -1}},
        {35, 3, 40, 24, 1300, {1300, 20, 550, 700, 0, 1024, 61, -1}},
        {35, 3, 160, 200, 1300, {1300, 20, 550, 700, 0, 1024, 61, -1}},
    };
    mha_args *a = mha_new(k, &shapes[index / 2 % 3], type_of(index), index / 6 % 2 == 0);
    float *kv = (float *)a->kv;
    if (!k->failed) {
        kv[60 * a->kv_stride_key + 3] = NAN;                                         /* head 0 */
        gen_store((void *)a->q, a->type, 2 * a->q_stride_row + a->q_stride_head + 5, NAN); /* head 1 */
        /* a value, head 2 */
        kv[33 * a->kv_stride_key + 2 * a->kv_stride_head + a->nope + 7] = (index + index / 6) % 3 == 0 ? NAN : INFINITY;
        if (a->n_key > 600) {
            kv[600 * a->kv_stride_key + a->nope + 9] = -INFINITY; /* head 0, another block */
        }
        if (index % 2 == 0) {
            gen_store((void *)a->rope, a->type, 65 * a->rope_stride + 9, NAN);
        }
    }
    mha_finish(k);
}

/* NaN and infinities among keys and values: what comes out is finite or nothing. */
static void mha_inf(check_case *k, int32_t index)
{
    const int32_t more = index / 2 % 2 * 600;
    const int32_t v_dim = index % 8 == 6 ? 150 : 24;
    const mha_shape s = {35, 2, 40, v_dim, 100 + more, {100 + more, 20, 50, 70 + more, -1}};
    mha_args *a = mha_new(k, &s, type_of(index), index % 4 < 2);
    float *kv = (float *)a->kv;
    for (int64_t key = 15; key < a->n_key && !k->failed; key += 12) {
        kv[key * a->kv_stride_key + gen_pick(&k->r, a->nope + a->v_dim)] =
            key % 3 == 0 ? NAN : key % 3 == 1 ? INFINITY : -INFINITY;
    }
    mha_finish(k);
    ((mha_expect *)k->expect)->clean_only = 1;
}

/* ---- the op ---- */

static int mha_filled(const kern_table *t)
{
    return t->mha != NULL && t->mha_scratch != NULL;
}

static int mha_same(const kern_table *a, const kern_table *b)
{
    return a->mha == b->mha;
}

static const check_class g_classes[] = {
    {"block", "scores and sums accumulate in f32; blocks fold in order with the merge node", 4 * N_BLOCK,
     N_BLOCK, 0, mha_block, NULL, mha_compare},
    {"odd lengths", "a row with nothing to attend gives exactly (0, -inf), or leaves what was there", 8, 4,
     0, mha_odd_lengths, NULL, mha_compare},
    {"past length", "a key outside a row's bound cannot touch that row even if it holds NaN", 12, 6, 0,
     mha_past_len, NULL, mha_compare},
    {"alone", "the result of (row, head) depends on that row, that head and its keys only", 14, 7,
     CLASS_ORDER, mha_alone, mha_alone_run, mha_compare},
    {"parts", "a call of many blocks leaves the bits of as many calls of one", 16, 8, CLASS_ORDER, mha_parts,
     mha_parts_run, mha_compare},
    {"huge logits", NULL, 12, 6, 0, mha_huge, NULL, mha_compare},
    {"nan", "a NaN drops the block and is counted; no NaN crosses an interface", 12, 12, 0, mha_nan, NULL,
     mha_compare},
    {"inf", "no infinity crosses an interface but the lse -inf", 8, 8, 0, mha_inf, NULL, mha_compare},
};

const check_op check_mha_op = {
    KERN_OP_mha, sizeof g_classes / sizeof *g_classes, g_classes, mha_filled, mha_same, mha_run, NULL,
};
