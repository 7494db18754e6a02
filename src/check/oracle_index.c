/* oracle_index.c - indexer scores, selection by full sort, places of positions. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/oracle.h"

orc_score orc_index_score(const index_score_args *a, int64_t row, int64_t slot)
{
    float key[128];
    const double k_scale =
        (double)orc_index_read(a->fmt, a->keys + slot / 64 * a->page_stride, slot % 64, key);
    double k_norm2 = 0.0;
    for (int d = 0; d < 128; d++) {
        k_norm2 += (double)key[d] * (double)key[d];
    }
    orc_score o = {0.0, 0.0, 0.0};
    for (int64_t h = 0; h < a->n_head; h++) {
        const int64_t at = (row * a->n_head + h) * 128;
        const double w = (double)a->w[row * a->n_head + h];
        double dot = 0.0;
        double q_norm2 = 0.0;
        for (int d = 0; d < 128; d++) {
            const double q = a->fmt == KVS_INDEX_F32
                                 ? (double)((const float *)a->q)[at + d]
                                 : (double)orc_e4m3(((const uint8_t *)a->q)[at + d]);
            dot += q * (double)key[d];
            q_norm2 += q * q;
        }
        const double relu = dot < 0.0 ? 0.0 : dot;
        o.value += relu * w;
        o.sum_terms += relu * fabs(w);
        o.dot_terms += sqrt(q_norm2 * k_norm2) * fabs(w);
    }
    o.value *= k_scale;
    o.sum_terms *= fabs(k_scale);
    o.dot_terms *= fabs(k_scale);
    return o;
}

static int by_order(const void *pa, const void *pb)
{
    const orc_cand *a = pa;
    const orc_cand *b = pb;
    if (a->score != b->score) {
        return a->score > b->score ? -1 : 1;
    }
    return (a->id > b->id) - (a->id < b->id);
}

static int by_id(const void *pa, const void *pb)
{
    const orc_cand *a = pa;
    const orc_cand *b = pb;
    return (a->id > b->id) - (a->id < b->id);
}

int64_t orc_select(orc_cand *c, int64_t n)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isnan(c[i].score) && c[i].score != -INFINITY) {
            c[kept++] = c[i];
        }
    }
    qsort(c, (size_t)kept, sizeof *c, by_order);
    return kept;
}

void orc_sort_id(orc_cand *c, int64_t n)
{
    qsort(c, (size_t)n, sizeof *c, by_id);
}

orc_place orc_place_of(int64_t pos, int64_t dcp, int64_t interleave)
{
    /* the sequence in rounds of dcp runs of `interleave` tokens; a rank takes one run of each */
    const int64_t round = pos / (dcp * interleave);
    const int64_t in_round = pos - round * dcp * interleave;
    const int64_t run = in_round / interleave;
    orc_place p;
    p.owner = (int32_t)run;
    p.local = round * interleave + (in_round - run * interleave);
    p.n_lane = 8 % dcp == 0 ? (int32_t)(8 / dcp) : 1;
    p.lane = (int32_t)(round % p.n_lane);
    return p;
}

static int by_value(const void *pa, const void *pb)
{
    const int64_t a = *(const int64_t *)pa;
    const int64_t b = *(const int64_t *)pb;
    return (a > b) - (a < b);
}

static int inside_cut(const localise_args *a, int64_t row, int64_t i)
{
    if (a->cut_score == NULL) {
        return 1;
    }
    const float s = a->score[row * a->id_stride + i];
    const int32_t id = a->id[row * a->id_stride + i];
    return s > a->cut_score[row] || (s == a->cut_score[row] && id <= a->cut_id[row]);
}

uint64_t orc_localise(const localise_args *a, int64_t row, int32_t *slots, int32_t *lane_count,
                      int64_t *order)
{
    uint64_t n_bad = 0;
    const int64_t n_in = a->count != NULL ? a->count[row] : a->k;
    int32_t n_lane = orc_place_of(0, a->dcp, a->interleave).n_lane;
    memset(lane_count, 0, (size_t)n_lane * sizeof *lane_count);
    int64_t n_own = 0;
    for (int64_t i = 0; i < n_in; i++) {
        const int64_t id = a->id[row * a->id_stride + i];
        if (id == -1 || !inside_cut(a, row, i)) {
            continue;
        }
        if (id < 0 || id >= a->bound[row]) {
            n_bad++;
        } else if (orc_place_of(id, a->dcp, a->interleave).owner == a->rank) {
            order[n_own++] = id;
        }
    }
    qsort(order, (size_t)n_own, sizeof *order, by_value);
    int64_t n = 0;
    const int64_t req = a->row_req[row];
    for (int32_t lane = 0; lane < n_lane; lane++) {
        for (int64_t i = 0; i < n_own; i++) {
            const orc_place p = orc_place_of(order[i], a->dcp, a->interleave);
            if (p.lane != lane) {
                continue;
            }
            const int64_t slot = req < 0 || req >= a->n_req
                                     ? -1
                                     : orc_slot(a->table + req * a->table_stride, a->table_width,
                                                a->n_slot, p.local);
            if (slot < 0 || (i > 0 && order[i] == order[i - 1])) {
                n_bad++;
                continue;
            }
            slots[n++] = (int32_t)slot;
            lane_count[lane]++;
        }
    }
    while (n < a->k) {
        slots[n++] = -1;
    }
    return n_bad;
}
