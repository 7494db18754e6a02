/* case_kvio.c - cases of kv_write, index_write and gather. All EXACT: what is stored and what is
 * read back has one right answer, scales and NaN codes included. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "check/check.h"
#include "check/oracle.h"

enum { PAGE = KVS_PAGE_TOKENS };

/* Values at which a format or a rule changes its mind. */
static const float g_special[] = {
    0.0f,      -0.0f,    1e-40f,    -1e-40f, 0x1p-149f, FLT_MIN, -FLT_MIN,  0x1p-10f,
    0x1.8p-9f, 0x1p-7f,  1e-30f,    1e-3f,   0.0175f,   1.0f,    1.0625f,   1.1875f,
    3.7f,      17.0f,    19.0f,     447.0f,  448.0f,    -448.0f, 448.0001f, 449.0f,
    463.9f,    464.0f,   464.1f,    -465.0f, 1e4f,      -1e4f,   60000.f,   3.4e38f,
    -3.4e38f,  INFINITY, -INFINITY, NAN,     -NAN,
};
enum { N_SPECIAL = sizeof g_special / sizeof *g_special };

static float special(rng *r)
{
    return g_special[gen_pick(r, N_SPECIAL)];
}

/* n values of a tile of edge case `kind` at element `at`. */
static void edge_tile(rng *r, void *x, int32_t type, int64_t at, int64_t n, int32_t kind)
{
    const int64_t one = at + gen_pick(r, (int32_t)n);
    for (int64_t i = at; i < at + n; i++) {
        float v = 0.0f;
        switch (kind % 8) {
        case 0: /* all zero */
            break;
        case 1: /* all -0 */
            v = -0.0f;
            break;
        case 2: /* one special among zeros */
            v = i == one ? special(r) : 0.0f;
            break;
        case 3: /* one special among normal values */
            gen_f32(r, &v, 1, 1.0f);
            v = i == one ? special(r) : v;
            break;
        case 4: /* specials only */
            v = special(r);
            break;
        case 5: /* no finite value at all */
            v = (i & 1) != 0 ? NAN : -INFINITY;
            break;
        case 6: /* halfway between two codes when the scale is 1: ties go to the even one */
            v = i == one ? 448.0f : ((float)gen_pick(r, 127) + 0.5f) * 0x1p-9f;
            break;
        default: /* magnitudes over the whole range */
            v = ldexpf(1.0f + (float)gen_pick(r, 8) / 8.0f, gen_pick(r, 240) - 120);
            break;
        }
        gen_store(x, type, i, v);
    }
}

/* Slots for n_tok tokens: distinct, some -1, some outside the pool where bad is set. */
static void pick_slots(check_case *k, int64_t *slot, int64_t n_tok, int64_t n_slot, int bad)
{
    int32_t *order = case_alloc(k, n_slot, sizeof *order);
    gen_permutation(&k->r, order, (int32_t)n_slot);
    for (int64_t t = 0; t < n_tok; t++) {
        slot[t] = order[t];
        const int32_t dice = gen_pick(&k->r, 8);
        if (bad && dice == 0) {
            slot[t] = -1;
        } else if (bad && dice == 1) {
            static const int64_t outside[] = {-2, INT64_MIN, INT64_MAX, INT64_C(1) << 33};
            const int32_t which = gen_pick(&k->r, 5);
            slot[t] = which == 4 ? n_slot : outside[which];
        }
    }
}

enum { STATS_START = 1000, N_STAT = 4 };

/* The four counters of kvio_stats, starting above 0. */
static kvio_stats *new_stats(check_case *k)
{
    uint64_t *s = case_buf(k, "stats", BUF_INOUT, EL_U64, N_STAT, 0);
    for (int i = 0; i < N_STAT; i++) {
        s[i] = STATS_START;
    }
    case_mark_all(k, s);
    return (kvio_stats *)s;
}

typedef struct write_expect {
    uint8_t *bytes; /* the pool as it should be; far: with nothing but the written rows */
    kvio_stats stats;
} write_expect;

/* Pages of `far pages`: their bytes lie where 31 and 32 bits end. */
enum { FAR_PAGE = 4600, FAR_STRIDE = 1077120 };

static int is_far(const check_case *k)
{
    return strcmp(k->cls->name, "far pages") == 0;
}

/* Slots of the last page below and the first past 2^31 and 2^32 bytes, of the last one, and of any. */
static void far_slots(rng *r, int64_t *slot, int64_t n_tok)
{
    static const int32_t edge[] = {1993, 1994, 3987, 3988, FAR_PAGE - 1};
    for (int64_t t = 0; t < n_tok; t++) {
        const int64_t page = t < 5 ? edge[t] : 2 * t; /* distinct: tokens are few */
        slot[t] = page * PAGE + (t == 4 ? PAGE - 1 : gen_pick(r, PAGE));
    }
}

static void compare_stats(const kvio_stats *got, const kvio_stats *want, check_result *r)
{
    const uint64_t g[N_STAT] = {got->n_written, got->n_bad_id, got->n_nan, got->n_sat};
    const uint64_t w[N_STAT] = {want->n_written, want->n_bad_id, want->n_nan, want->n_sat};
    static const char *const names[N_STAT] = {"n_written", "n_bad_id", "n_nan", "n_sat"};
    for (int i = 0; i < N_STAT; i++) {
        cmp_i64(r, (coord){names[i], 0, -1, -1}, (int64_t)g[i] - STATS_START, (int64_t)w[i]);
    }
}

/* ---- kv_write ---- */

static const int32_t g_row_fmt[4] = {KVS_KV_FP8_DS_MLA, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_F32};

static uint8_t *kv_row_at(const kv_write_args *a, uint8_t *kv, int64_t slot)
{
    return kv + slot / PAGE * a->page_stride + slot % PAGE * a->row_stride;
}

static void kv_write_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const kv_write_args *a = k->args;
    for (int64_t i = 0; is_far(k) && i < a->n_tok; i++) { /* as an earlier run left it, it would be right */
        poison_fill(kv_row_at(a, a->kv, a->slot[i]), (size_t)orc_row_bytes(a->fmt));
    }
    t->kv_write(a, q);
}

/* Bytes by which strides and begins of rows may differ. */
static int64_t row_unit(const check_case *k, int32_t fmt)
{
    const int32_t elem = fmt == KVS_KV_F32 ? 4 : fmt == KVS_KV_BF16 ? 2 : 1;
    return (int64_t)elem * case_step(k, elem);
}

/* Shape of case `index`; data and slots come after. */
static kv_write_args *kv_write_new(check_case *k, int32_t index, int64_t n_tok, int64_t n_page)
{
    kv_write_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    a->fmt = g_row_fmt[index % 4];
    a->in_type = (index / 4) % 2 != 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->rule = (index / 8) % 2 != 0  ? KVS_SCALE_EXACT
              : index / 16 % 2 != 0 ? KVS_SCALE_AUTO
                                    : KVS_SCALE_POW2;
    static const float k_scales[] = {1.0f, 0.5f, 0.06f, 3.7f};
    a->k_scale = k_scales[gen_pick(r, 4)];
    a->n_tok = n_tok;
    const int32_t step = case_step(k, a->in_type == KVS_DTYPE_F32 ? 4 : 2);
    a->latent_stride = KVS_LATENT_DIM + step * gen_pick(r, 3);
    a->rope_stride = KVS_ROPE_DIM + gen_pick(r, 2) * 512;
    const int64_t unit = row_unit(k, a->fmt);
    a->row_stride = orc_row_bytes(a->fmt) + unit * gen_pick(r, 3);
    a->page_stride = a->row_stride * PAGE + unit * gen_pick(r, 40);
    a->n_slot = n_page * PAGE - gen_pick(r, 2) * 7;
    if (is_far(k)) {
        a->page_stride = FAR_STRIDE;
        a->n_slot = n_page * PAGE;
    }
    const check_elem in = a->in_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16;
    a->latent = case_buf(k, "latent", BUF_IN, in, n_tok * a->latent_stride, step * gen_pick(r, 3));
    a->rope = case_buf(k, "rope", BUF_IN, in, n_tok * a->rope_stride, step * gen_pick(r, 3));
    a->slot = case_buf(k, "slot", BUF_IN, EL_I64, n_tok, 0);
    a->kv = is_far(k) ? case_far(k, n_page * a->page_stride, 1)
                      : case_buf(k, "kv", BUF_INOUT, EL_U8, n_page * a->page_stride,
                                 (int32_t)unit * gen_pick(r, 5));
    a->stats = index % 5 == 4 ? NULL : new_stats(k);
    k->args = a;
    return a;
}

static void kv_write_finish(check_case *k, kv_write_args *a)
{
    write_expect *e = case_alloc(k, 1, sizeof *e);
    const int64_t bytes = (a->n_slot + PAGE - 1) / PAGE * a->page_stride;
    e->bytes = is_far(k) ? case_far(k, bytes, 0) : case_alloc(k, bytes, 1);
    if (k->failed) {
        return;
    }
    if (!is_far(k)) {
        memcpy(e->bytes, a->kv, (size_t)bytes);
    }
    orc_count c = {0, 0};
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (slot < 0 || slot >= a->n_slot) {
            e->stats.n_bad_id += slot != -1;
            continue;
        }
        orc_row_write(a, t, kv_row_at(a, e->bytes, slot), &c);
        if (!is_far(k)) {
            case_mark(k, kv_row_at(a, a->kv, slot), orc_row_bytes(a->fmt));
        }
        e->stats.n_written++;
    }
    e->stats.n_nan = c.n_nan;
    e->stats.n_sat = c.n_sat;
    k->expect = e;
}

static void kv_write_random(check_case *k, int32_t index)
{
    kv_write_args *a = kv_write_new(k, index, k->quick ? 37 : 150, k->quick ? 2 : 5);
    for (int64_t t = 0; t < a->n_tok; t++) {
        const float sigma = ldexpf(1.0f, gen_pick(&k->r, 24) - 12);
        gen_any(&k->r, (void *)a->latent, a->in_type, t * a->latent_stride, KVS_LATENT_DIM, sigma);
        gen_any(&k->r, (void *)a->rope, a->in_type, t * a->rope_stride, KVS_ROPE_DIM, sigma);
    }
    pick_slots(k, (int64_t *)a->slot, a->n_tok, a->n_slot, index > 0);
    /* what must not be read: the data of tokens without a slot stay NaN */
    kv_write_finish(k, a);
}

static void kv_write_far(check_case *k, int32_t index)
{
    kv_write_args *a = kv_write_new(k, index, 12, FAR_PAGE);
    for (int64_t t = 0; t < a->n_tok; t++) {
        gen_any(&k->r, (void *)a->latent, a->in_type, t * a->latent_stride, KVS_LATENT_DIM, 1.0f);
        gen_any(&k->r, (void *)a->rope, a->in_type, t * a->rope_stride, KVS_ROPE_DIM, 1.0f);
    }
    far_slots(&k->r, (int64_t *)a->slot, a->n_tok);
    kv_write_finish(k, a);
}

static void kv_write_edges(check_case *k, int32_t index)
{
    kv_write_args *a = kv_write_new(k, index, k->quick ? 40 : 96, 2);
    for (int64_t t = 0; t < a->n_tok; t++) {
        for (int64_t tile = 0; tile < 4; tile++) {
            edge_tile(&k->r, (void *)a->latent, a->in_type, t * a->latent_stride + 128 * tile, 128,
                      (int32_t)(t + tile));
        }
        edge_tile(&k->r, (void *)a->rope, a->in_type, t * a->rope_stride, KVS_ROPE_DIM,
                  (int32_t)(2 + t % 6));
    }
    pick_slots(k, (int64_t *)a->slot, a->n_tok, a->n_slot, 1);
    kv_write_finish(k, a);
}

/* No tokens; no token with a slot. */
static void kv_write_empty(check_case *k, int32_t index)
{
    kv_write_args *a = kv_write_new(k, index, index % 2 != 0 ? 9 : 0, 1);
    for (int64_t t = 0; t < a->n_tok; t++) {
        ((int64_t *)a->slot)[t] = -1;
    }
    kv_write_finish(k, a);
}

static void kv_write_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const kv_write_args *a = k->args;
    const write_expect *e = k->expect;
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (slot >= 0 && slot < a->n_slot) {
            cmp_bytes(r, (coord){"row of token", t, -1, -1}, kv_row_at(a, a->kv, slot),
                      kv_row_at(a, e->bytes, slot), (size_t)orc_row_bytes(a->fmt));
        }
    }
    if (a->stats != NULL) {
        compare_stats(a->stats, &e->stats, r);
    }
}

static int kv_write_filled(const kern_table *t)
{
    return t->kv_write != NULL;
}

static int kv_write_same(const kern_table *a, const kern_table *b)
{
    return a->kv_write == b->kv_write;
}

static const check_class g_kv_write[] = {
    {"random",
     "rows hold e4m3(x / s) with s = 2^ceil(log2(max(amax / 448, 1e-4))) or max(amax / 448, "
     "FLT_MIN); slot -1 is skipped",
     64, 16, 0, kv_write_random, NULL, kv_write_compare},
    {"edges",
     "quantising rounds to nearest even and saturates to +-448, inf too; NaN stays NaN and is "
     "counted; amax is over finite values",
     64, 16, 0, kv_write_edges, NULL, kv_write_compare},
    {"empty", NULL, 16, 8, 0, kv_write_empty, NULL, kv_write_compare},
    {"far pages", "a page is found by its id and a stride of 64 bits", 8, 4, CLASS_STEPS, kv_write_far, NULL,
     kv_write_compare},
};

const check_op check_kv_write_op = {
    KERN_OP_kv_write,
    sizeof g_kv_write / sizeof *g_kv_write,
    g_kv_write,
    kv_write_filled,
    kv_write_same,
    kv_write_run,
    NULL,
};

/* ---- index_write ---- */

static int64_t index_key_size(int32_t fmt)
{
    return fmt == KVS_INDEX_F32 ? 512 : 128;
}

static uint8_t *index_page_at(const index_write_args *a, uint8_t *keys, int64_t slot)
{
    return keys + slot / PAGE * a->page_stride;
}

static void index_write_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const index_write_args *a = k->args;
    for (int64_t i = 0; is_far(k) && i < a->n_tok; i++) { /* as an earlier run left it, it would be right */
        poison_fill(index_page_at(a, a->keys, a->slot[i]), (size_t)orc_index_page_bytes(a->fmt));
    }
    t->index_write(a, q);
}

static void index_write_build(check_case *k, int32_t index)
{
    index_write_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    const int32_t n_page = is_far(k) ? FAR_PAGE : 1 + gen_pick(r, 4);
    a->fmt = index % 2 != 0 ? KVS_INDEX_F32 : KVS_INDEX_FP8;
    a->in_type = (index / 2) % 2 != 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->n_tok = is_far(k) ? 12 : index % 9 == 8 ? 0 : (int64_t)(n_page * PAGE / 2);
    const int32_t step = case_step(k, a->in_type == KVS_DTYPE_F32 ? 4 : 2);
    const int32_t unit = 4 * case_step(k, 4);
    a->key_stride = KVS_INDEX_DIM + step * gen_pick(r, 3);
    a->page_stride = is_far(k) ? FAR_STRIDE : orc_index_page_bytes(a->fmt) + unit * gen_pick(r, 40);
    a->n_slot = n_page * PAGE;
    a->key = case_buf(k, "key", BUF_IN, a->in_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16,
                      a->n_tok * a->key_stride, step * gen_pick(r, 3));
    a->slot = case_buf(k, "slot", BUF_IN, EL_I64, a->n_tok, 0);
    a->keys = is_far(k) ? case_far(k, n_page * a->page_stride, 1)
                        : case_buf(k, "keys", BUF_INOUT, EL_U8, n_page * a->page_stride, unit * gen_pick(r, 3));
    a->stats = index % 5 == 4 ? NULL : new_stats(k);
    const int edges = strcmp(k->cls->name, "edges") == 0;
    for (int64_t t = 0; t < a->n_tok; t++) {
        const float sigma = ldexpf(1.0f, gen_pick(r, 24) - 18);
        gen_any(r, (void *)a->key, a->in_type, t * a->key_stride, KVS_INDEX_DIM, sigma);
        if (edges) {
            edge_tile(r, (void *)a->key, a->in_type, t * a->key_stride, KVS_INDEX_DIM, (int32_t)t);
        }
    }
    if (is_far(k)) {
        far_slots(r, (int64_t *)a->slot, a->n_tok);
    } else {
        pick_slots(k, (int64_t *)a->slot, a->n_tok, a->n_slot, index > 0);
    }
    write_expect *e = case_alloc(k, 1, sizeof *e);
    e->bytes = is_far(k) ? case_far(k, n_page * a->page_stride, 0)
                         : case_alloc(k, n_page * a->page_stride, 1);
    if (k->failed) {
        return;
    }
    if (!is_far(k)) {
        memcpy(e->bytes, a->keys, (size_t)(n_page * a->page_stride));
    }
    orc_count c = {0, 0};
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (slot < 0 || slot >= a->n_slot) {
            e->stats.n_bad_id += slot != -1;
            continue;
        }
        orc_index_write(a, t, index_page_at(a, e->bytes, slot), slot % PAGE, &c);
        e->stats.n_written++;
        if (is_far(k)) {
            continue;
        }
        uint8_t *page = index_page_at(a, a->keys, slot);
        case_mark(k, page + slot % PAGE * index_key_size(a->fmt), index_key_size(a->fmt));
        if (a->fmt == KVS_INDEX_FP8) {
            case_mark(k, page + PAGE * 128 + slot % PAGE * 4, 4);
        }
    }
    e->stats.n_nan = c.n_nan;
    e->stats.n_sat = c.n_sat;
    k->args = a;
    k->expect = e;
}

static void index_write_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const index_write_args *a = k->args;
    const write_expect *e = k->expect;
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (slot < 0 || slot >= a->n_slot) {
            continue;
        }
        const int64_t at = index_page_at(a, a->keys, slot) - a->keys;
        const int64_t key = at + slot % PAGE * index_key_size(a->fmt);
        cmp_bytes(r, (coord){"key of token", t, -1, -1}, a->keys + key, e->bytes + key,
                  (size_t)index_key_size(a->fmt));
        if (a->fmt == KVS_INDEX_FP8) {
            const int64_t scale = at + PAGE * 128 + slot % PAGE * 4;
            cmp_bytes(r, (coord){"scale of token", t, -1, -1}, a->keys + scale, e->bytes + scale,
                      4);
        }
    }
    if (a->stats != NULL) {
        compare_stats(a->stats, &e->stats, r);
    }
}

static int index_write_filled(const kern_table *t)
{
    return t->index_write != NULL;
}

static int index_write_same(const kern_table *a, const kern_table *b)
{
    return a->index_write == b->index_write;
}

static const check_class g_index_write[] = {
    {"random", "an index page is 64 x 128 e4m3, then 64 f32 scales, pow2 with floor 1e-4 on amax",
     48, 16, 0, index_write_build, NULL, index_write_compare},
    {"edges", "index keys: NaN and infinity do not enter the scale", 32, 12, 0, index_write_build,
     NULL, index_write_compare},
    {"far pages", "a page is found by its id and a stride of 64 bits", 4, 2, CLASS_STEPS, index_write_build, NULL,
     index_write_compare},
};

const check_op check_index_write_op = {
    KERN_OP_index_write,
    sizeof g_index_write / sizeof *g_index_write,
    g_index_write,
    index_write_filled,
    index_write_same,
    index_write_run,
    NULL,
};

/* ---- gather ---- */

typedef struct gather_expect {
    float *row;       /* [n_out_row, 576] */
    uint8_t *written; /* [n_out_row] */
    int64_t n_out_row;
    uint64_t n_bad;
} gather_expect;

static void gather_run(const kern_table *t, check_case *k, dev_queue *q)
{
    t->gather(k->args, q);
}

/* The pages that far requests read, and which of them a page is; -1: none. */
static const int32_t g_far_page[] = {1993, 1994, 3987, 3988, FAR_PAGE - 1, 0};
enum { N_FAR_PAGE = sizeof g_far_page / sizeof *g_far_page };

static int32_t far_page(int64_t page)
{
    for (int32_t i = 0; i < N_FAR_PAGE; i++) {
        if (g_far_page[i] == page) {
            return i;
        }
    }
    return -1;
}

static void gather_pool(check_case *k, gather_args *a, int64_t n_page)
{
    rng *r = &k->r;
    const int64_t unit = row_unit(k, a->fmt);
    a->row_stride = orc_row_bytes(a->fmt) + unit * gen_pick(r, 3);
    a->page_stride = is_far(k) ? FAR_STRIDE : a->row_stride * PAGE + unit * gen_pick(r, 40);
    a->n_slot = n_page * PAGE;
    uint8_t *kv = is_far(k) ? case_far(k, n_page * a->page_stride, 1)
                            : case_buf(k, "kv", BUF_IN, EL_U8, n_page * a->page_stride,
                                       (int32_t)unit * gen_pick(r, 5));
    for (int64_t s = 0; s < a->n_slot && !k->failed; s++) {
        if (is_far(k) && far_page(s / PAGE) < 0) {
            continue;
        }
        uint8_t *row = kv + s / PAGE * a->page_stride + s % PAGE * a->row_stride;
        gen_row(r, a->fmt, a->k_scale, row, ldexpf(1.0f, gen_pick(r, 12) - 6));
        if (a->fmt == KVS_KV_FP8 || a->fmt == KVS_KV_FP8_DS_MLA) {
            row[gen_pick(r, 512)] = (uint8_t)gen_pick(r, 256); /* every code, NaN too */
        } else if (a->fmt == KVS_KV_F32) {
            const float x = special(r);
            memcpy(row + 4 * gen_pick(r, 576), &x, sizeof x);
        } else {
            const uint16_t x = orc_to_bf16(special(r));
            memcpy(row + 2 * gen_pick(r, 576), &x, sizeof x);
        }
    }
    a->kv = kv;
}

/* Requests with any local start, any count, out rows in any order with rows between that stay. */
static void gather_requests(check_case *k, gather_args *a, int64_t n_page, int bad)
{
    rng *r = &k->r;
    int32_t *table = case_buf(k, "table", BUF_IN, EL_I32, a->n_req * a->table_stride, 0);
    int64_t *start = case_buf(k, "start", BUF_IN, EL_I64, a->n_req, 0);
    int64_t *count = case_buf(k, "count", BUF_IN, EL_I64, a->n_req, 0);
    int64_t *begin = case_buf(k, "out_begin", BUF_IN, EL_I64, a->n_req, 0);
    int64_t next = 0;
    for (int64_t q = a->n_req - 1; q >= 0 && !k->failed; q--) {
        for (int32_t i = 0; i < a->table_width; i++) {
            table[q * a->table_stride + i] =
                is_far(k) ? g_far_page[(q * a->table_width + i) % N_FAR_PAGE]
                          : gen_pick(r, (int32_t)n_page);
            if (bad && gen_pick(r, 4) == 0) {
                static const int32_t wrong[] = {-1, INT32_MIN, INT32_MAX, 0};
                const int32_t w = wrong[gen_pick(r, 4)];
                table[q * a->table_stride + i] = w != 0 ? w : (int32_t)n_page;
            }
        }
        const int64_t room = (int64_t)a->table_width * PAGE;
        start[q] = rng_next_range(r, 0, room - 1);
        count[q] = q % 3 == 2 ? 0 : rng_next_range(r, 1, room - start[q]);
        count[q] += bad && q == 0 ? 70 : 0; /* past the end of the table */
        begin[q] = next + gen_pick(r, 3);
        next = begin[q] + count[q];
    }
    a->table = table;
    a->start = start;
    a->count = count;
    a->out_begin = begin;
}

static void gather_build(check_case *k, int32_t index)
{
    gather_args *a = case_alloc(k, 1, sizeof *a);
    rng *r = &k->r;
    const int bad = strcmp(k->cls->name, "bad pages") == 0;
    const int64_t n_page = is_far(k) ? FAR_PAGE : 6;
    a->fmt = g_row_fmt[index % 4];
    a->out_type = (index / 4) % 2 != 0 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    static const float k_scales[] = {1.0f, 0.5f, 0.06f, 3.7f};
    a->k_scale = k_scales[gen_pick(r, 4)];
    a->n_req = index % 7 == 6 ? 0 : 1 + gen_pick(r, 4);
    a->table_width = 1 + gen_pick(r, 3);
    a->table_stride = a->table_width + gen_pick(r, 3);
    a->out_stride = KVS_ROW_DIM + gen_pick(r, 3) * 8;
    gather_pool(k, a, n_page);
    gather_requests(k, a, n_page, bad);
    a->n_bad_id = index % 5 == 4 ? NULL : case_counter(k, "n_bad_id");
    gather_expect *e = case_alloc(k, 1, sizeof *e);
    for (int64_t q = 0; q < a->n_req; q++) {
        const int64_t end = a->out_begin[q] + a->count[q] + 1;
        e->n_out_row = end > e->n_out_row ? end : e->n_out_row;
    }
    e->row = case_alloc(k, e->n_out_row * KVS_ROW_DIM, sizeof *e->row);
    e->written = case_alloc(k, e->n_out_row, 1);
    const int64_t size = a->out_type == KVS_DTYPE_F32 ? 4 : 2;
    a->out = case_buf(k, "out", BUF_OUT, size == 4 ? EL_F32 : EL_U16, e->n_out_row * a->out_stride,
                      case_step(k, (int32_t)size) * gen_pick(r, 3));
    for (int64_t q = 0; q < a->n_req && !k->failed; q++) {
        for (int64_t t = 0; t < a->count[q]; t++) {
            const int64_t to = a->out_begin[q] + t;
            const int64_t slot = orc_slot(a->table + q * a->table_stride, a->table_width, a->n_slot,
                                          a->start[q] + t);
            case_mark(k, (uint8_t *)a->out + to * a->out_stride * size, KVS_ROW_DIM * size);
            e->written[to] = 1;
            e->n_bad += slot < 0;
            if (slot >= 0) {
                orc_row_read(a->fmt, a->k_scale,
                             a->kv + slot / PAGE * a->page_stride + slot % PAGE * a->row_stride,
                             e->row + to * KVS_ROW_DIM);
            }
        }
    }
    k->args = a;
    k->expect = e;
}

static void gather_compare(check_case *k, const check_variant *v, check_result *r)
{
    (void)v;
    const gather_args *a = k->args;
    const gather_expect *e = k->expect;
    for (int64_t to = 0; to < e->n_out_row; to++) {
        for (int64_t d = 0; d < KVS_ROW_DIM && e->written[to]; d++) {
            const float want = e->row[to * KVS_ROW_DIM + d];
            const coord at = {"out", to, -1, d};
            if (a->out_type == KVS_DTYPE_F32) {
                cmp_bits(r, at, ((const float *)a->out)[to * a->out_stride + d], want);
            } else {
                cmp_i64(r, at, ((const uint16_t *)a->out)[to * a->out_stride + d],
                        orc_to_bf16(want));
            }
        }
    }
    if (a->n_bad_id != NULL) {
        cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)case_counted(k, a->n_bad_id),
                (int64_t)e->n_bad);
    }
}

static int gather_filled(const kern_table *t)
{
    return t->gather != NULL;
}

static int gather_same(const kern_table *a, const kern_table *b)
{
    return a->gather == b->gather;
}

static const check_class g_gather[] = {
    {"random", "every reader sees bf16_rne(f32(q) * s)", 48, 16, 0, gather_build, NULL,
     gather_compare},
    {"bad pages", "an id outside the table is masked and counted, never dereferenced", 24, 8, 0,
     gather_build, NULL, gather_compare},
    {"far pages", "a page is found by its id and a stride of 64 bits", 8, 4, 0, gather_build, NULL, gather_compare},
};

const check_op check_gather_op = {
    KERN_OP_gather, sizeof g_gather / sizeof *g_gather,
    g_gather,       gather_filled,
    gather_same,    gather_run,
    NULL,
};
