/* dcp/select.c - the global top-k: local scores and winners, exchange of candidates, own members.
 *
 * Rows go in rounds of score_rows. A round scores the shard DCP_SCORE_COLUMNS keys at a time into a running
 * local top-k, so no buffer grows with the context. A global winner is a local winner, and both selections
 * use one total order (larger score, then lower position; local order is position order), so the k best of
 * all ranks' candidates are the k best of all keys. Every rank sees the same candidates, finds the same cut,
 * and keeps the candidates of its own that are inside it. Scores and ids travel as they are, in 32 bits each.
 */
#include <string.h>
#include "base/err.h"
#include "dcp/dcp.h"

/* One message of a round: [n, k] ids, [n, k] scores, [n] counts. */
typedef struct cand_view {
    int32_t *id;
    float *score;
    int32_t *count;
} cand_view;

static cand_view cand_at(int32_t *base, int64_t rank, int32_t n, int32_t k)
{
    int32_t *p = base + rank * ((int64_t)n * (2 * (int64_t)k + 1));
    cand_view v;
    v.id = p;
    v.score = (float *)(void *)(p + (int64_t)n * k);
    v.count = p + 2 * (int64_t)n * k;
    return v;
}

/* Candidates that any rank may bring for rows [row0, row0 + n): the same on every rank. */
static int32_t round_k(const kvs_dcp *d, int32_t row0, int32_t n)
{
    int64_t most = 1;
    for (int32_t t = 0; t < n; t++) {
        int64_t m = shard_len_max(d->geom, d->plan.bound[row0 + t]);
        most = m > most ? m : most;
    }
    return (int32_t)(most < d->s.topk ? most : d->s.topk);
}

static void quantise_query(kvs_dcp *d, const void *q, kvs_dtype type, const float *w, int32_t row0,
                           int32_t n)
{
    int64_t width = (int64_t)d->s.n_index_head * KVS_INDEX_DIM;
    int is_f32 = d->s.index_fmt == KVS_INDEX_F32;
    index_quant_args a = {
        .n_row = n,
        .n_head = d->s.n_index_head,
        .q = (const uint8_t *)q + row0 * width * (type == KVS_DTYPE_F32 ? 4 : 2),
        .q_type = (int32_t)type,
        .w = w + (int64_t)row0 * d->s.n_index_head,
        .q8 = is_f32 ? NULL : d->iq8,
        .q_f32 = is_f32 ? (float *)(void *)d->iq8 : NULL,
        .w_out = d->iw,
        .n_nan = &d->info.n_nan,
    };
    d->kern.index_quant(&a, &d->queue);
}

/* Local winners of rows [row0, row0 + n) as global positions into `v`, whose lists hold k entries. */
static void local_winners(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, int32_t row0, int32_t n,
                          int32_t k, cand_view v)
{
    const dcp_plan *p = &d->plan;
    int32_t longest = 0;
    for (int32_t t = 0; t < n; t++) {
        v.count[t] = 0;
        int32_t b = p->bound_local[row0 + t];
        longest = b > longest ? b : longest;
    }
    index_score_args sa = {
        .n_row = n,
        .n_head = d->s.n_index_head,
        .q = d->iq8,
        .w = d->iw,
        .table = p->table,
        .table_stride = p->table_width,
        .table_width = (int32_t)p->table_width,
        .n_req = p->n_req,
        .row_req = p->row_req + row0,
        .kv_len = p->bound_local + row0,
        .score = d->score,
        .score_stride = DCP_SCORE_COLUMNS,
        .n_bad_id = &d->info.n_bad_id,
        .n_key = &d->info.n_key_scored,
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
    };
    cache_index_args(c, index_layer, &sa);
    topk_args ta = {
        .n_row = n,
        .k = k,
        .score = d->score,
        .score_stride = DCP_SCORE_COLUMNS,
        .n_col = d->n_col,
        .list_id = v.id,
        .list_score = v.score,
        .list_count = v.count,
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
    };
    for (int32_t col = 0; col < longest; col += DCP_SCORE_COLUMNS) {
        sa.col_begin = col;
        sa.col_end = col + dcp_min32(DCP_SCORE_COLUMNS, longest - col);
        d->kern.index_score(&sa, &d->queue);
        for (int32_t t = 0; t < n; t++) {
            int32_t left = p->bound_local[row0 + t] - col;
            d->n_col[t] = left < 0 ? 0 : dcp_min32(left, DCP_SCORE_COLUMNS);
        }
        ta.id_base = col;
        d->kern.topk(&ta, &d->queue);
    }
    for (int32_t t = 0; t < n; t++) {
        int32_t *id = v.id + (int64_t)t * k;
        for (int32_t i = 0; i < v.count[t]; i++) {
            kvs_local l = {id[i]};
            id[i] = (int32_t)shard_pos(d->geom, l).v;
        }
    }
}

/* Positions -> this rank's slots of rows [row0, row0 + n). cut may be NULL. */
static void to_slots(kvs_dcp *d, const int32_t *id, int64_t stride, int32_t k, const int32_t *count,
                     const float *score, int use_cut, int32_t row0, int32_t n)
{
    const dcp_plan *p = &d->plan;
    localise_args a = {
        .n_row = n,
        .k = k,
        .id = id,
        .id_stride = stride,
        .count = count,
        .score = score,
        .cut_score = use_cut ? d->cut_score : NULL,
        .cut_id = d->cut_id,
        .dcp = d->s.dcp,
        .interleave = d->s.interleave,
        .rank = d->geom.rank,
        .table = p->table,
        .table_stride = p->table_width,
        .table_width = (int32_t)p->table_width,
        .n_req = p->n_req,
        .n_slot = p->n_page * KVS_PAGE_TOKENS,
        .row_req = p->row_req + row0,
        .bound = p->bound + row0,
        .slots = d->sel.slots + (int64_t)row0 * d->s.topk,
        .slots_stride = d->s.topk,
        .lane_count = d->sel.lane_count + (int64_t)row0 * d->n_lane,
        .n_bad_id = &d->info.n_bad_id,
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
    };
    d->kern.localise(&a, &d->queue);
}

/* Finds the cut of the k best over all ranks' candidates; with trace keeps the whole set. */
static void find_cut(kvs_dcp *d, int32_t row0, int32_t n, int32_t k)
{
    const float *score[KVS_MAX_RANKS];
    const int32_t *id[KVS_MAX_RANKS];
    const int32_t *count[KVS_MAX_RANKS];
    int32_t *from = d->s.dcp == 1 ? d->cand_send : d->cand_recv;
    for (int32_t r = 0; r < d->s.dcp; r++) {
        cand_view v = cand_at(from, r, n, k);
        score[r] = v.score;
        id[r] = v.id;
        count[r] = v.count;
    }
    topk_merge_args a = {
        .n_row = n,
        .n_list = d->s.dcp,
        .k = d->s.topk,
        .cand_score = score,
        .cand_id = id,
        .cand_count = count,
        .cand_stride = k,
        .cut_score = d->cut_score,
        .cut_id = d->cut_id,
        .n_total = d->s.trace ? d->sel.all_count + row0 : d->cut_total,
        .all_id = d->s.trace ? d->sel.all_id + (int64_t)row0 * d->s.topk : NULL,
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
    };
    d->kern.topk_merge(&a, &d->queue);
}

static kvs_status select_round(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, int32_t row0,
                               int32_t n, kvs_error *err)
{
    int32_t k = round_k(d, row0, n);
    cand_view mine = cand_at(d->cand_send, 0, n, k);
    local_winners(d, c, index_layer, row0, n, k, mine);
    if (d->s.dcp > 1) {
        /* entries behind a list's end cross the wire too: make them the same on every run */
        for (int32_t t = 0; t < n; t++)
            for (int32_t i = mine.count[t]; i < k; i++) {
                mine.id[(int64_t)t * k + i] = -1;
                mine.score[(int64_t)t * k + i] = 0.0f;
            }
        size_t bytes = (size_t)n * (2 * (size_t)k + 1) * sizeof(int32_t);
        uint64_t before = dcp_bytes_sent(d);
        TRY(comm_all_gather(d->group, d->cand_send, d->cand_recv, bytes, err));
        d->info.bytes_select += dcp_bytes_sent(d) - before;
    }
    int need_cut = d->s.dcp > 1;
    if (need_cut || d->s.trace)
        find_cut(d, row0, n, k);
    to_slots(d, mine.id, k, k, mine.count, mine.score, need_cut, row0, n);
    return KVS_OK;
}

kvs_status dcp_select(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, const void *q, kvs_dtype type,
                      const float *w, kvs_error *err)
{
    if (d->s.n_index_head == 0 || d->s.topk == 0)
        return err_set(err, KVS_INVALID,
                       "select on a handle opened with n_index_head %d, topk %d: both must be set",
                       d->s.n_index_head, d->s.topk);
    TRY(dcp_check_cache(d, c, DCP_NO_LAYER, index_layer, err));
    if (type != KVS_DTYPE_F32 && type != KVS_DTYPE_BF16)
        return err_set(err, KVS_INVALID, "q type %d: use KVS_DTYPE_F32 or KVS_DTYPE_BF16", (int)type);
    d->sel.n_row = -1;
    d->sel.has_all = 0;
    for (int32_t row0 = 0; row0 < d->plan.n_row; row0 += d->score_rows) {
        int32_t n = dcp_min32(d->score_rows, d->plan.n_row - row0);
        quantise_query(d, q, type, w, row0, n);
        TRY(select_round(d, c, index_layer, row0, n, err));
    }
    d->sel.n_row = d->plan.n_row;
    d->sel.has_all = d->s.trace;
    return KVS_OK;
}

kvs_status dcp_set_selection(kvs_dcp *d, const int32_t *ids, int64_t stride, kvs_error *err)
{
    if (d->s.topk == 0)
        return err_set(err, KVS_INVALID, "set_selection on a handle opened with topk 0");
    if (stride < 0 || stride > d->s.topk)
        return err_set(err, KVS_INVALID, "selection stride %lld: use 0 to topk %d", (long long)stride,
                       d->s.topk);
    d->sel.n_row = -1;
    d->sel.has_all = 0;
    for (int32_t row0 = 0; row0 < d->plan.n_row; row0 += d->score_rows) {
        int32_t n = dcp_min32(d->score_rows, d->plan.n_row - row0);
        to_slots(d, ids + row0 * stride, stride, (int32_t)stride, NULL, NULL, 0, row0, n);
    }
    d->sel.n_row = d->plan.n_row;
    return KVS_OK;
}

kvs_status dcp_selection_keep(const kvs_dcp *d, const int32_t *row, int32_t n, int32_t *slots,
                              int32_t *lane_count, kvs_error *err)
{
    if (d->s.topk == 0 || d->sel.n_row < 0)
        return err_set(err, KVS_INVALID, "no selection to keep: call select after the plan");
    for (int32_t i = 0; i < n; i++) {
        if (row[i] < 0 || row[i] >= d->sel.n_row)
            return err_set(err, KVS_INVALID, "selection of row %d: the last select had rows 0 to %d",
                           row[i], d->sel.n_row - 1);
    }
    const int64_t k = d->s.topk;
    for (int32_t i = 0; i < n; i++) {
        memcpy(slots + i * k, d->sel.slots + row[i] * k, (size_t)k * sizeof *slots);
        memcpy(lane_count + (int64_t)i * d->n_lane, d->sel.lane_count + (int64_t)row[i] * d->n_lane,
               (size_t)d->n_lane * sizeof *lane_count);
    }
    return KVS_OK;
}

kvs_status dcp_selection_restore(kvs_dcp *d, const int32_t *slots, const int32_t *lane_count, int32_t n,
                                 kvs_error *err)
{
    if (d->s.topk == 0 || d->s.n_index_head == 0)
        return err_set(err, KVS_INVALID, "kept selections on a handle without an indexer");
    const dcp_plan *p = &d->plan;
    for (int32_t row = 0; row < p->n_row; row++) {
        if (p->row_req[row] >= n)
            return err_set(err, KVS_INVALID, "row %d belongs to request %d; selections are kept for %d",
                           row, p->row_req[row], n);
    }
    const int64_t k = d->s.topk;
    for (int32_t row = 0; row < p->n_row; row++) {
        const int32_t bound = p->bound[row];
        if (bound <= d->s.topk) {
            for (int32_t i = 0; i < bound; i++)
                d->cand_send[i] = i;
            to_slots(d, d->cand_send, bound, bound, NULL, NULL, 0, row, 1);
            for (int64_t i = bound; i < k; i++)
                d->sel.slots[row * k + i] = -1;
            continue;
        }
        const int64_t from = p->row_req[row];
        memcpy(d->sel.slots + row * k, slots + from * k, (size_t)k * sizeof *slots);
        memcpy(d->sel.lane_count + (int64_t)row * d->n_lane, lane_count + from * d->n_lane,
               (size_t)d->n_lane * sizeof *lane_count);
    }
    d->sel.n_row = p->n_row;
    d->sel.has_all = 0;
    return KVS_OK;
}

kvs_status dcp_selection_copy(const kvs_dcp *d, int32_t *ids, int32_t *count, kvs_error *err)
{
    if (!d->sel.has_all || d->sel.n_row != d->plan.n_row)
        return err_set(err, KVS_INVALID,
                       d->s.trace ? "no selected set: call kvs_dcp_select after the plan"
                                  : "no selected set: open the handle with trace = 1");
    memcpy(ids, d->sel.all_id, (size_t)d->sel.n_row * (size_t)d->s.topk * sizeof *ids);
    memcpy(count, d->sel.all_count, (size_t)d->sel.n_row * sizeof *count);
    return KVS_OK;
}
