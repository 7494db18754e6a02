/* attn_ref.c - attention over one shard, the definition: kern/attn.h in plain loops.
 *
 * A row is walked lane by lane. The attended keys of a lane arrive one by one from key_next, which
 * skips -1 and counts bad ids; 64 of them make a tile, 2048 a segment. Scores, probabilities and
 * sums are double, P is not rounded; the result of a segment becomes f32 and enters the fold of its
 * lane through merge_node, then the lanes enter the tree. One thread; the pool of the queue is not
 * used.
 */
#include "kern/ref/ref.h"
#include "num/kvfmt.h"

enum { DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM };

/* Of one head within the current segment. */
typedef struct seg_state {
    double m; /* largest score, -inf before the first */
    double l; /* sum of exp(score - m) */
    int bad;  /* a score was NaN or +inf */
} seg_state;

typedef struct scratch {
    double *acc;     /* [n_head, 512] */
    seg_state *seg;  /* [n_head] */
    float *key;      /* [64, 576] the tile */
    float *lane_out; /* [n_lane, n_head, 512] */
    float *lane_lse; /* [n_lane, n_head] */
} scratch;

typedef struct key_iter {
    const attn_args *a;
    const int32_t *list;  /* list mode: the lane's entries */
    const int32_t *table; /* table mode: the request's row; NULL where the request does not exist */
    int32_t lane;
    int64_t n, k;
    attn_stats *stats;
} key_iter;

static size_t attn_scratch_ref(const attn_args *a, const dev_queue *q)
{
    (void)q;
    const size_t n_head = (size_t)a->n_head;
    const size_t n_lane = (size_t)a->n_lane;
    return n_head * VDIM * sizeof(double) + n_head * sizeof(seg_state) +
           (size_t)ATTN_TILE * DIM * sizeof(float) + n_lane * n_head * (VDIM + 1) * sizeof(float);
}

static scratch scratch_lay(const attn_args *a)
{
    const size_t n_head = (size_t)a->n_head;
    scratch s;
    s.acc = a->scratch;
    s.seg = (seg_state *)(s.acc + n_head * VDIM);
    s.key = (float *)(s.seg + n_head);
    s.lane_out = s.key + (size_t)ATTN_TILE * DIM;
    s.lane_lse = s.lane_out + (size_t)a->n_lane * n_head * VDIM;
    return s;
}

static key_iter key_begin(const attn_args *a, int32_t row, int32_t lane, attn_stats *stats)
{
    key_iter it = {.a = a, .lane = lane, .stats = stats};
    if (a->slots != NULL) {
        const int32_t *count = a->lane_count + (int64_t)row * a->n_lane;
        it.list = a->slots + row * a->slots_stride;
        for (int32_t j = 0; j < lane; j++) {
            it.list += count[j];
        }
        it.n = count[lane];
        return it;
    }
    const int32_t req = a->row_req[row];
    const int64_t len = a->kv_len[row] > 0 ? a->kv_len[row] : 0;
    it.table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
    it.n = shard_lane_len(a->n_lane, a->interleave, lane, len);
    return it;
}

/* The next attended key of the lane as a slot, or -1 when there is none. */
static int64_t key_next(key_iter *it)
{
    const attn_args *a = it->a;
    while (it->k < it->n) {
        const int64_t k = it->k++;
        int64_t slot = -1;
        if (it->list != NULL) {
            if (it->list[k] == -1) {
                continue;
            }
            slot = it->list[k] < a->n_slot ? it->list[k] : -1;
        } else {
            const kvs_local l = shard_lane_key(a->n_lane, a->interleave, it->lane, k);
            slot = ref_slot(it->table, a->table_width, a->n_slot, l.v);
        }
        if (slot >= 0) {
            return slot;
        }
        it->stats->n_bad_id++;
    }
    return -1;
}

/* Fetches up to 64 keys of the lane, dequantised; returns how many. */
static int32_t tile_fetch(key_iter *it, float *key, int32_t max)
{
    const attn_args *a = it->a;
    int32_t n = 0;
    while (n < max) {
        const int64_t slot = key_next(it);
        if (slot < 0) {
            break;
        }
        const uint8_t *row = a->kv + slot / KVS_PAGE_TOKENS * a->page_stride +
                             slot % KVS_PAGE_TOKENS * a->row_stride;
        kv_row_read(a->fmt, a->k_scale, row, key + (int64_t)n * DIM);
        n++;
    }
    it->stats->n_key += (uint64_t)n;
    it->stats->n_fetched += (uint64_t)n;
    return n;
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

/* Online softmax: one tile into the state of one head. */
static void head_tile(seg_state *s, double *acc, const float *q, double scale, const float *key,
                      int32_t n)
{
    double score[ATTN_TILE];
    double m = s->m;
    for (int32_t i = 0; i < n; i++) {
        score[i] = dot(q, key + (int64_t)i * DIM) * scale;
        /* as f32, so that an overflow of the type that crosses the interface is one here too */
        if (!((float)score[i] < INFINITY)) {
            s->bad = 1;
            return;
        }
        m = score[i] > m ? score[i] : m;
    }
    if (!((float)m > -INFINITY)) {
        return; /* every score so far is -inf: nothing weighs anything, and m - m is never formed */
    }
    const double shrink = s->l > 0.0 ? ref_exp(s->m - m) : 0.0;
    s->m = m;
    s->l *= shrink;
    for (int32_t d = 0; d < VDIM; d++) {
        acc[d] *= shrink;
    }
    for (int32_t i = 0; i < n; i++) {
        const double p = ref_exp(score[i] - m);
        const float *v = key + (int64_t)i * DIM;
        s->l += p;
        for (int32_t d = 0; d < VDIM; d++) {
            acc[d] += p * (double)v[d];
        }
    }
}

/* out, lse <- node(out, lse ; out_b, lse_b) */
static void node_into(float *out, float *lse, const float *out_b, float lse_b)
{
    const merge_weight w = merge_node_weights(*lse, lse_b);
    for (int32_t d = 0; d < VDIM; d++) {
        out[d] = merge_node_value(w, out[d], out_b[d]);
    }
    *lse = w.lse;
}

/* Normalises the segment and folds it into its lane; a result that is not finite becomes the
 * identity. */
static void segment_end(const seg_state *s, const double *acc, float *out, float *lse,
                        attn_stats *stats)
{
    float seg_out[VDIM];
    float seg_lse = -INFINITY;
    int bad = s->bad;
    if (!bad && s->l > 0.0) {
        seg_lse = (float)(s->m + ref_log(s->l));
        for (int32_t d = 0; d < VDIM; d++) {
            seg_out[d] = (float)(acc[d] / s->l);
            bad |= !f32_is_finite(seg_out[d]);
        }
        bad |= !f32_is_finite(seg_lse);
    }
    if (bad || s->l <= 0.0) {
        stats->n_nan += (uint64_t)bad;
        return; /* merging with the identity changes nothing */
    }
    node_into(out, lse, seg_out, seg_lse);
}

/* One lane of one row, all heads: its segments folded into out [n_head, 512] and lse [n_head]. */
static void lane_run(const attn_args *a, int32_t row, key_iter *it, const scratch *s, float *out,
                     float *lse, attn_stats *stats)
{
    const int32_t n_head = a->n_head;
    memset(out, 0, (size_t)n_head * VDIM * sizeof *out);
    for (int32_t h = 0; h < n_head; h++) {
        lse[h] = -INFINITY;
    }
    for (int32_t n = ATTN_TILE; n == ATTN_TILE;) {
        memset(s->acc, 0, (size_t)n_head * VDIM * sizeof *s->acc);
        for (int32_t h = 0; h < n_head; h++) {
            s->seg[h] = (seg_state){.m = -INFINITY, .l = 0.0, .bad = 0};
        }
        for (int32_t t = 0; t < ATTN_SEGMENT && n == ATTN_TILE; t += ATTN_TILE) {
            n = tile_fetch(it, s->key, ATTN_TILE);
            for (int32_t h = 0; h < n_head && n > 0; h++) {
                if (s->seg[h].bad) {
                    continue;
                }
                float q[DIM];
                const int64_t at = row * a->q_stride_row + h * a->q_stride_head;
                for (int32_t d = 0; d < DIM; d++) {
                    q[d] = ref_load(a->q, a->q_type, at + d);
                }
                const int64_t i_scale = (int64_t)row * n_head + h;
                const double scale = (double)a->softmax_scale *
                                     (a->q_scale != NULL ? (double)a->q_scale[i_scale] : 1.0);
                head_tile(&s->seg[h], s->acc + (int64_t)h * VDIM, q, scale, s->key, n);
            }
        }
        for (int32_t h = 0; h < n_head; h++) {
            segment_end(&s->seg[h], s->acc + (int64_t)h * VDIM, out + (int64_t)h * VDIM, &lse[h],
                        stats);
        }
    }
}

static void attn_ref(const attn_args *a, dev_queue *q)
{
    if (a->out_type == KVS_DTYPE_BF16) {
        dev_queue_fail(q, KVS_UNSUPPORTED, "attn: only kernels for CUDA write bf16; set out_type to f32");
        return;
    }
    const scratch s = scratch_lay(a);
    const int64_t lane_size = (int64_t)a->n_head * VDIM;
    attn_stats stats = {0};
    for (int32_t row = 0; row < a->n_row; row++) {
        for (int32_t lane = 0; lane < a->n_lane; lane++) {
            key_iter it = key_begin(a, row, lane, &stats);
            lane_run(a, row, &it, &s, s.lane_out + lane * lane_size,
                     s.lane_lse + (int64_t)lane * a->n_head, &stats);
        }
        for (int32_t h = 0; h < a->n_head; h++) {
            float *out = s.lane_out + (int64_t)h * VDIM;
            float *lse = s.lane_lse + h;
            for (int32_t half = a->n_lane / 2; half >= 1; half /= 2) {
                for (int32_t j = 0; j < half; j++) {
                    node_into(out + j * lane_size, lse + (int64_t)j * a->n_head,
                              out + (j + half) * lane_size, lse[(int64_t)(j + half) * a->n_head]);
                }
            }
            memcpy(a->out + row * a->out_stride_row + h * a->out_stride_head, out,
                   VDIM * sizeof *out);
            a->lse[(int64_t)row * a->n_head + h] = *lse;
        }
    }
    if (a->stats != NULL) {
        a->stats->n_key += stats.n_key;
        a->stats->n_fetched += stats.n_fetched;
        a->stats->n_bad_id += stats.n_bad_id;
        a->stats->n_nan += stats.n_nan;
    }
}

void ref_apply_attn(kern_table *t)
{
    t->attn = attn_ref;
    t->attn_scratch = attn_scratch_ref;
}
