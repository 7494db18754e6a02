/* case_index.c - building the cases of index scores and of selection, and what the oracle says of their
 * keys. The files of the two ops decide what lies in the keys and what of the answer counts.
 *
 * Bound of a score: K = 128 products in a dot, then n_head terms: sqrt(128) u sum|q||k||w| + (sqrt(n_head) +
 * 2) u sum|w relu|, both times k_scale, + 2 u |score| for the scale and the last rounding; u =
 * 2^-24 in every variant, since the products of fp8 values are exact in f32 and f32 keys are
 * multiplied in f32. Where a variant's sums do not round to nearest (kern_variant.dot_u), its own factor
 * stands for sqrt(128).
 */
#include "check/case_index.h"

#include <math.h>
#include <string.h>

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_INDEX_DIM };

/* ---- building ---- */

/* Bytes by which pages and what holds them may shift. */
static int32_t page_unit(const check_case *k)
{
    return 4 * case_step(k, 4);
}

void index_sizes(check_case *k, index_score_args *a, const index_shape *s, int32_t page_gap)
{
    a->fmt = s->fmt;
    a->n_head = s->n_head;
    a->n_row = s->n_req * s->rows_per_req;
    a->n_req = s->n_req;
    a->table_width = s->width;
    a->table_stride = s->width + gen_pick(&k->r, 3);
    a->n_page = (int64_t)s->n_req * s->width + 2;
    a->page_stride = orc_index_page_bytes(s->fmt) + page_unit(k) * gen_pick(&k->r, page_gap);
    if (s->far) {
        a->n_page = INDEX_FAR_PAGE;
        a->page_stride = INDEX_FAR_STRIDE;
    }
}

void index_inputs(check_case *k, index_score_args *a, int32_t skew)
{
    rng *r = &k->r;
    const int f32 = a->fmt == KVS_INDEX_F32;
    const int64_t n_q = (int64_t)a->n_row * a->n_head;
    a->q = case_buf(k, "q", BUF_IN, f32 ? EL_F32 : EL_U8, n_q * DIM,
                    skew > 0 ? case_step(k, f32 ? 4 : 1) * gen_pick(r, skew) : 0);
    a->w = case_buf(k, "w", BUF_IN, EL_F32, n_q, gen_pick(r, 3));
    a->keys = a->n_page == INDEX_FAR_PAGE
                  ? case_far(k, a->n_page * a->page_stride, 1)
                  : case_buf(k, "keys", BUF_IN, EL_U8, a->n_page * a->page_stride,
                             skew > 0 ? page_unit(k) * gen_pick(r, skew) : 0);
    a->table = case_buf(k, "table", BUF_IN, EL_I32, a->n_req * a->table_stride, 0);
    a->row_req = case_buf(k, "row_req", BUF_IN, EL_I32, a->n_row, 0);
    a->kv_len = case_buf(k, "kv_len", BUF_IN, EL_I32, a->n_row, 0);
}

void index_fill(check_case *k, index_score_args *a, const index_shape *s)
{
    a->n_bad_id = case_counter(k, "n_bad_id");
    a->n_key = case_counter(k, "n_key");
    int32_t *page = case_alloc(k, a->n_page, sizeof *page);
    if (k->failed) {
        return;
    }
    const int64_t n_q = (int64_t)a->n_row * a->n_head;
    int32_t *table = (int32_t *)a->table;
    if (a->fmt == KVS_INDEX_F32) {
        gen_f32(&k->r, (float *)a->q, n_q * DIM, 1.0f);
    } else {
        gen_e4m3(&k->r, (uint8_t *)a->q, n_q * DIM);
    }
    gen_f32(&k->r, (float *)a->w, n_q, 0.05f);
    gen_permutation(&k->r, page, (int32_t)a->n_page);
    if (s->far) { /* the last page below and the first past 2^31, the same of 2^32, the pool's last */
        static const int32_t edge[] = {1993, 1994, 3987, 3988, INDEX_FAR_PAGE - 1};
        for (int32_t i = 0; i < (int32_t)(sizeof edge / sizeof *edge); i++) {
            int32_t at = 0;
            while (page[at] != edge[i]) {
                at++;
            }
            page[at] = page[i];
            page[i] = edge[i];
        }
    }
    for (int32_t req = 0; req < s->n_req; req++) {
        for (int32_t i = 0; i < s->width; i++) {
            table[req * a->table_stride + i] = page[req * s->width + i];
        }
    }
    for (int32_t row = 0; row < a->n_row; row++) {
        ((int32_t *)a->row_req)[row] = row / s->rows_per_req;
        ((int32_t *)a->kv_len)[row] = s->lens[row % s->n_len];
    }
}

const int32_t index_bad_lens[6] = {300, 0, 70, 256, -5, 257};

void index_make_bad(check_case *k, index_score_args *a, int32_t index)
{
    if (k->failed) {
        return;
    }
    int32_t *table = (int32_t *)a->table;
    table[1] = -1;
    table[2] = (int32_t)a->n_page;
    table[a->table_stride] = INT32_MAX;
    table[a->table_stride + 2] = INT32_MIN;
    a->table = case_fenced_table(k, table, a->n_req, a->table_stride, a->n_page);
    ((int32_t *)a->row_req)[5] = index % 2 != 0 ? a->n_req : -1;
}

/* ---- keys ---- */

/* The slot of local index l of a request; -1 where there is none. */
static int64_t slot_of(const index_score_args *a, int32_t req, int64_t l)
{
    return req < 0 || req >= a->n_req
               ? -1
               : orc_slot(a->table + req * a->table_stride, a->table_width, a->n_page * PAGE, l);
}

uint8_t *index_page(const index_score_args *a, int32_t req, int64_t l)
{
    const int64_t slot = slot_of(a, req, l);
    return slot < 0 ? NULL : (uint8_t *)a->keys + slot / PAGE * a->page_stride;
}

void index_key_put(int32_t fmt, uint8_t *page, int64_t off, const void *value, float scale)
{
    const int64_t size = fmt == KVS_INDEX_F32 ? 4 * DIM : DIM;
    memcpy(page + off * size, value, (size_t)size);
    if (fmt != KVS_INDEX_F32) {
        memcpy(page + PAGE * DIM + 4 * off, &scale, sizeof scale);
    }
}

/* ---- the oracle's answer ---- */

void index_expect_make(check_case *k, const index_score_args *a, int64_t begin, int64_t end,
                       int64_t n_col, index_expect *e)
{
    e->n_col = n_col;
    e->score = case_alloc(k, a->n_row * n_col, sizeof *e->score);
    e->state = case_alloc(k, a->n_row * n_col, 1);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t l = begin; l < end && l < a->kv_len[row]; l++) {
            const int64_t slot = slot_of(a, a->row_req[row], l);
            if (slot < 0) {
                e->n_bad++;
                continue;
            }
            const int64_t at = row * n_col + l - begin;
            e->n_key++;
            e->state[at] = 1;
            e->score[at] = orc_index_score(a, row, slot);
        }
    }
}

double index_score_bound(const index_score_args *a, const orc_score *o, const check_variant *v)
{
    const double u = 0x1p-24;
    return fmax(sqrt(128.0), v->dot_u) * u * o->dot_terms +
           (sqrt((double)a->n_head) + 2.0) * u * o->sum_terms + 2.0 * u * fabs(o->value) + 0x1p-149;
}

void index_compare_counts(check_case *k, const index_score_args *a, const index_expect *e,
                          check_result *r)
{
    cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)case_counted(k, a->n_bad_id),
            (int64_t)e->n_bad);
    cmp_i64(r, (coord){"n_key", 0, -1, -1}, (int64_t)case_counted(k, a->n_key), (int64_t)e->n_key);
}
