/* index_ref.c - indexer scores and the way from selected positions to slots, the definition. */
#include "kern/ref/ref.h"
#include "num/kvfmt.h"

enum { DIM = KVS_INDEX_DIM };

static size_t index_score_scratch_ref(const index_score_args *a, const dev_queue *q)
{
    (void)q;
    return (size_t)a->n_head * DIM * sizeof(float);
}

static double dot(const float *q, const float *k)
{
    double part[8] = {0};
    for (int32_t i = 0; i < DIM; i += 8) {
        for (int32_t j = 0; j < 8; j++) {
            part[j] += (double)q[i + j] * (double)k[i + j];
        }
    }
    return ((part[0] + part[4]) + (part[2] + part[6])) +
           ((part[1] + part[5]) + (part[3] + part[7]));
}

/* Score of one key against the heads of one row; q [n_head, 128] as f32. */
static float score_one(const index_score_args *a, const float *q, const float *w, int64_t slot)
{
    float key[DIM];
    const uint8_t *page = a->keys + slot / KVS_PAGE_TOKENS * a->page_stride;
    const float k_scale = index_key_read(a->fmt, page, (int32_t)(slot % KVS_PAGE_TOKENS), key);
    double sum = 0.0;
    for (int32_t h = 0; h < a->n_head; h++) {
        const double s = dot(q + (int64_t)h * DIM, key);
        /* written so that a NaN stays one */
        sum += (s <= 0.0 ? 0.0 : s) * (double)w[h];
    }
    return (float)(sum * (double)k_scale);
}

static void index_score_ref(const index_score_args *a, dev_queue *queue)
{
    (void)queue;
    float *q = a->scratch;
    uint64_t n_bad = 0;
    uint64_t n_key = 0;
    for (int32_t row = 0; row < a->n_row; row++) {
        const int64_t at = (int64_t)row * a->n_head * DIM;
        for (int64_t i = 0; i < (int64_t)a->n_head * DIM; i++) {
            q[i] = a->fmt == KVS_INDEX_F32 ? ((const float *)a->q)[at + i]
                                           : e4m3_to_f32(((const uint8_t *)a->q)[at + i]);
        }
        const int32_t req = a->row_req[row];
        const int32_t *table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
        float *score = a->score + row * a->score_stride;
        for (int64_t l = a->col_begin; l < a->col_end; l++) {
            score[l - a->col_begin] = -INFINITY;
            if (l >= a->kv_len[row]) {
                continue;
            }
            const int64_t slot = ref_slot(table, a->table_width, a->n_page * KVS_PAGE_TOKENS, l);
            if (slot < 0) {
                n_bad++;
                continue;
            }
            n_key++;
            score[l - a->col_begin] = score_one(a, q, a->w + (int64_t)row * a->n_head, slot);
        }
    }
    ref_count(a->n_bad_id, n_bad);
    ref_count(a->n_key, n_key);
}

/* Whether entry i of a row is a candidate at all: not "none", and inside the cut where there is
 * one. */
static int is_candidate(const localise_args *a, int64_t row, int64_t i)
{
    const int32_t id = a->id[row * a->id_stride + i];
    if (id == -1 || a->cut_score == NULL) {
        return id != -1;
    }
    const float score = a->score[row * a->id_stride + i];
    return score > a->cut_score[row] || (score == a->cut_score[row] && id <= a->cut_id[row]);
}

/* Lane-major, then ascending position. */
static int64_t sort_key(const localise_args *a, int32_t id)
{
    const shard_geom g = {a->dcp, a->interleave, a->rank};
    const kvs_local l = shard_local(g, (kvs_pos){id});
    return (int64_t)shard_lane_of_local(shard_n_lane(g), a->interleave, l) * INT64_C(0x80000000) +
           id;
}

static void sift_down(const localise_args *a, int32_t *v, int64_t i, int64_t n)
{
    for (int64_t c = 2 * i + 1; c < n; c = 2 * i + 1) {
        if (c + 1 < n && sort_key(a, v[c + 1]) > sort_key(a, v[c])) {
            c++;
        }
        if (sort_key(a, v[i]) >= sort_key(a, v[c])) {
            return;
        }
        const int32_t t = v[i];
        v[i] = v[c];
        v[c] = t;
        i = c;
    }
}

static void sort_ids(const localise_args *a, int32_t *v, int64_t n)
{
    for (int64_t i = n / 2 - 1; i >= 0; i--) {
        sift_down(a, v, i, n);
    }
    for (int64_t end = n - 1; end > 0; end--) {
        const int32_t t = v[0];
        v[0] = v[end];
        v[end] = t;
        sift_down(a, v, 0, end);
    }
}

/* The ids of the row that this rank owns, sorted, into v; returns how many. */
static int64_t collect(const localise_args *a, int64_t row, int32_t *v, uint64_t *n_bad)
{
    const shard_geom g = {a->dcp, a->interleave, a->rank};
    int64_t n_in = a->count != NULL ? a->count[row] : a->k;
    n_in = n_in > a->k ? a->k : n_in;
    int64_t n = 0;
    for (int64_t i = 0; i < n_in; i++) {
        const int32_t id = a->id[row * a->id_stride + i];
        if (!is_candidate(a, row, i)) {
            continue;
        }
        if (id < 0 || id >= a->bound[row]) {
            ++*n_bad;
        } else if (shard_owner(g, (kvs_pos){id}) == g.rank) {
            v[n++] = id;
        }
    }
    sort_ids(a, v, n);
    return n;
}

static size_t localise_scratch_ref(const localise_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}

static void localise_ref(const localise_args *a, dev_queue *q)
{
    (void)q;
    const shard_geom g = {a->dcp, a->interleave, a->rank};
    const int32_t n_lane = shard_n_lane(g);
    uint64_t n_bad = 0;
    for (int64_t row = 0; row < a->n_row; row++) {
        const int32_t req = a->row_req[row];
        const int32_t *table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
        int32_t *slots = a->slots + row * a->slots_stride;
        int32_t *lane_count = a->lane_count + row * n_lane;
        memset(lane_count, 0, (size_t)n_lane * sizeof *lane_count);
        const int64_t n_own = collect(a, row, slots, &n_bad);
        int64_t n = 0;
        int32_t last = -1;
        for (int64_t i = 0; i < n_own; i++) {
            const int32_t id = slots[i];
            const kvs_local l = shard_local(g, (kvs_pos){id});
            const int64_t slot = ref_slot(table, a->table_width, a->n_slot, l.v);
            if (id == last || slot < 0 || slot > INT32_MAX) {
                n_bad++;
                continue;
            }
            last = id;
            slots[n++] = (int32_t)slot;
            lane_count[shard_lane_of_local(n_lane, a->interleave, l)]++;
        }
        for (; n < a->k; n++) {
            slots[n] = -1;
        }
    }
    ref_count(a->n_bad_id, n_bad);
}

void ref_apply_index_score(kern_table *t)
{
    t->index_score = index_score_ref;
    t->index_score_scratch = index_score_scratch_ref;
}

void ref_apply_localise(kern_table *t)
{
    t->localise = localise_ref;
    t->localise_scratch = localise_scratch_ref;
}
