/* case_attn.c - building and comparing attention cases.
 *
 * Bound of a score: K = 576 products, sqrt(576) u |q||k| scale, + 4 u |score| for the scaling and
 * the difference to the maximum; u = 2^-24 in every variant, since products of bf16 values are
 * exact in f32 and f32 rows are multiplied in f32. Variants with bf16 products may flush denormals:
 * (sum|q| + 576) 2^-126 scale. Call it delta.
 *
 * Bound of the LSE: delta, + (sqrt(n) + 40) u for the sum of n probabilities (exp 2 ulp = 4 u; at
 * most 32 times per segment a rescaling of 6 u, as sqrt(32) 6 u), + per merge node 10 u + 1e-7 for
 * exp and log and 2 u |lse|.
 *
 * Bound of a value: scores off by delta move the softmax average by at most expm1(2 delta) times
 * the mean absolute deviation, itself at most sqrt(sum w v^2 - out^2); the sum adds (sqrt(n) + 40 +
 * 10 nodes) u times sum w|v| <= sqrt(sum w v^2); rounding P to bf16 adds 2^-8 of that in the worst
 * case. Since roundings of P are independent where the data has no structure, there the Euclidean
 * norm of a head's error is held to 2^-8 sqrt(sum w^2 |v|^2) (1.7 times its expected size), which
 * notices one wrong key among thousands.
 *
 * Where a variant's sums do not round to nearest (kern_variant.dot_u, key_u), its own factors stand for
 * sqrt(576) and sqrt(n). One that holds values in multiples of a step (kern_variant.step) is off by half of
 * that in every value: in a score sum|q| scale step / 2, in the average step / 2.
 */
#include "check/case_attn.h"

#include <math.h>
#include <string.h>

enum { PAGE = KVS_PAGE_TOKENS, DIM = KVS_ROW_DIM, VDIM = KVS_LATENT_DIM };

/* The op adds to counters; it never resets them. */
static const uint64_t stats_start = 1000;

static const double u = 0x1p-24;

uint8_t *attn_row_at(const attn_args *a, int64_t slot)
{
    return (uint8_t *)a->kv + slot / PAGE * a->page_stride + slot % PAGE * a->row_stride;
}

void attn_call(const kern_table *t, check_case *k, dev_queue *q, attn_args *a)
{
    a->scratch_bytes = t->attn_scratch(a, q);
    a->scratch = case_scratch(k, a->scratch_bytes);
    t->attn(a, q);
}

void attn_run(const kern_table *t, check_case *k, dev_queue *q)
{
    attn_args a = *(attn_args *)k->args;
    attn_call(t, k, q, &a);
}

/* ---- building ---- */

static void new_queries(check_case *k, attn_args *a)
{
    rng *r = &k->r;
    const int32_t step = case_step(k, a->fmt == KVS_KV_F32 ? 4 : 2);
    a->q_type = a->fmt == KVS_KV_F32 && k->index % 3 != 2 ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
    a->q_stride_head = DIM + 8 * gen_pick(r, 2);
    a->q_stride_row = a->q_stride_head * a->n_head + gen_pick(r, 2) * 24;
    const int64_t n = a->n_row * a->q_stride_row;
    void *q = case_buf(k, "q", BUF_IN, a->q_type == KVS_DTYPE_F32 ? EL_F32 : EL_U16, n,
                       step * gen_pick(r, 3));
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const float sigma = (row + head) % 4 == 3 ? 6.0f : 1.5f; /* some rows are peaked */
            gen_any(r, q, a->q_type, row * a->q_stride_row + head * a->q_stride_head, DIM, sigma);
        }
    }
    a->q = q;
    a->softmax_scale = 0.0416f;
    if (a->fmt == KVS_KV_FP8 && k->index % 3 != 2) { /* fp8 comes with odd indices */
        float *scale = case_buf(k, "q_scale", BUF_IN, EL_F32, (int64_t)a->n_row * a->n_head, 0);
        for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head && !k->failed; i++) {
            scale[i] = ldexpf(1.0f, gen_pick(r, 3) - 1);
        }
        a->q_scale = scale;
    }
}

static void new_pool(check_case *k, attn_args *a, int64_t n_page, int far)
{
    rng *r = &k->r;
    const int32_t elem = a->fmt == KVS_KV_F32 ? 4 : a->fmt == KVS_KV_BF16 ? 2 : 1;
    const int32_t unit = elem * case_step(k, elem);
    /* one that is usual, a power of two, and one whose products with codes lie at halves (attn_dense_round.h) */
    static const float k_scales[] = {0.015f, 0x1p-6f, 0x1.0a762cp-5f};
    a->k_scale = a->fmt == KVS_KV_FP8 ? k_scales[k->index / 4 % 3]
                                      : NAN; /* other formats must not look at it */
    a->row_stride = orc_row_bytes(a->fmt) + unit * gen_pick(r, 2) * 3;
    a->page_stride = a->row_stride * PAGE + unit * gen_pick(r, 40);
    a->n_slot = n_page * PAGE;
    a->kv = far ? case_far(k, n_page * a->page_stride, 1)
                : case_buf(k, "kv", BUF_IN, EL_U8, n_page * a->page_stride, unit * gen_pick(r, 3));
}

static void new_outputs(check_case *k, attn_args *a)
{
    a->out_stride_head = VDIM + 4 * gen_pick(&k->r, 2);
    a->out_stride_row = a->out_stride_head * a->n_head + gen_pick(&k->r, 2) * 20;
    a->out = case_buf(k, "out", BUF_OUT, EL_F32, a->n_row * a->out_stride_row,
                      case_step(k, 4) * gen_pick(&k->r, 3));
    a->lse = case_buf(k, "lse", BUF_OUT, EL_F32, (int64_t)a->n_row * a->n_head, gen_pick(&k->r, 3));
    case_mark_all(k, a->lse);
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            case_mark(k, a->out + row * a->out_stride_row + head * a->out_stride_head, 4 * VDIM);
        }
    }
    uint64_t *stats = case_buf(k, "stats", BUF_INOUT, EL_U64, 4, 0);
    for (int i = 0; i < 4 && !k->failed; i++) {
        stats[i] = stats_start;
    }
    case_mark_all(k, stats);
    a->stats = (attn_stats *)stats;
}

static int32_t row_len(const attn_shape *s, int32_t row)
{
    int32_t n = 0;
    while (n < ATTN_MAX_LEN && s->len[n] >= 0) {
        n++;
    }
    return s->len[row % n];
}

/* Pages of a request are in no order; entries behind the last one it needs are rubbish. */
static void new_table(check_case *k, attn_args *a, const attn_shape *s)
{
    int32_t most = 1;
    for (int32_t row = 0; row < a->n_row; row++) {
        most = row_len(s, row) > most ? row_len(s, row) : most;
    }
    a->table_width = (most + PAGE - 1) / PAGE + gen_pick(&k->r, 2);
    a->table_stride = a->table_width + gen_pick(&k->r, 3);
    new_pool(k, a, (int64_t)a->n_req * a->table_width + 1, 0);
    int32_t *table = case_buf(k, "table", BUF_IN, EL_I32, a->n_req * a->table_stride, 0);
    int32_t *row_req = case_buf(k, "row_req", BUF_IN, EL_I32, a->n_row, 0);
    int32_t *kv_len = case_buf(k, "kv_len", BUF_IN, EL_I32, a->n_row, 0);
    int32_t *page = case_alloc(k, a->n_slot / PAGE, sizeof *page);
    if (k->failed) {
        return;
    }
    gen_permutation(&k->r, page, (int32_t)(a->n_slot / PAGE));
    for (int32_t row = 0; row < a->n_row; row++) {
        row_req[row] = a->n_req - 1 - row / s->rows; /* in falling order */
        kv_len[row] = row_len(s, row);
    }
    for (int32_t req = 0; req < a->n_req; req++) {
        int32_t len = 0;
        for (int32_t row = 0; row < a->n_row; row++) {
            len = row_req[row] == req && kv_len[row] > len ? kv_len[row] : len;
        }
        for (int32_t i = 0; i < (len + PAGE - 1) / PAGE; i++) {
            table[req * a->table_stride + i] = page[req * a->table_width + i];
        }
    }
    a->table = table;
    a->row_req = row_req;
    a->kv_len = kv_len;
    a->interleave = s->interleave;
}

/* n distinct slots from everywhere in the pool, its last one among them. */
static void far_slots(rng *r, int32_t *order, int32_t n, int64_t n_slot)
{
    const int64_t part = n_slot / n;
    for (int32_t i = 0; i < n; i++) {
        order[i] = (int32_t)(part * i + (int64_t)rng_next_below(r, (uint64_t)part));
    }
    order[n - 1] = (int32_t)(n_slot - 1);
    for (int32_t i = 0; i < n / 2; i++) { /* the far half first, since only some are taken */
        const int32_t x = order[i];
        order[i] = order[n - 1 - i];
        order[n - 1 - i] = x;
    }
}

/* Distinct slots of the pool, cut into lanes at random; a share of the entries is -1. */
static void new_lists(check_case *k, attn_args *a, const attn_shape *s)
{
    rng *r = &k->r;
    new_pool(k, a, s->interleave == 0 ? ATTN_FAR_PAGE : (s->topk + s->topk / 4) / PAGE + 2,
             s->interleave == 0);
    a->slots_stride = s->topk + gen_pick(r, 4);
    int32_t *slots =
        case_buf(k, "slots", BUF_IN, EL_I32, a->n_row * a->slots_stride, gen_pick(r, 3));
    int32_t *count = case_buf(k, "lane_count", BUF_IN, EL_I32, (int64_t)a->n_row * a->n_lane, 0);
    const int32_t n_order = s->interleave == 0 ? 2 * s->topk : (int32_t)a->n_slot;
    int32_t *order = case_alloc(k, n_order, sizeof *order);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        if (s->interleave == 0) {
            far_slots(r, order, n_order, a->n_slot);
        } else {
            gen_permutation(r, order, n_order);
        }
        int32_t left = s->topk;
        for (int32_t lane = 0; lane < a->n_lane; lane++) {
            const int32_t fair = left / (a->n_lane - lane);
            const int32_t n = lane == a->n_lane - 1 ? left
                              : gen_pick(r, 4) == 0 ? gen_pick(r, left + 1)
                                                    : fair;
            count[row * a->n_lane + lane] = n;
            left -= n;
        }
        for (int32_t i = 0; i < s->topk; i++) {
            slots[row * a->slots_stride + i] = gen_pick(r, 100) < s->none ? -1 : order[i];
        }
    }
    a->slots = slots;
    a->lane_count = count;
}

int32_t attn_fmt(int32_t index)
{
    static const int32_t fmt[4] = {KVS_KV_FP8_DS_MLA, KVS_KV_BF16, KVS_KV_F32, KVS_KV_FP8};
    return fmt[index % 4];
}

int32_t attn_fmt_of(int32_t index, int32_t n)
{
    return attn_fmt(index % n + index / n);
}

attn_args *attn_new(check_case *k, const attn_shape *s, int32_t fmt)
{
    attn_args *a = case_alloc(k, 1, sizeof *a);
    attn_expect *e = case_alloc(k, 1, sizeof *e);
    a->fmt = fmt;
    a->n_head = s->n_head;
    a->n_lane = s->n_lane;
    a->n_req = s->n_req;
    a->n_row = s->n_req * s->rows;
    k->args = a;
    k->expect = e;
    new_queries(k, a);
    if (s->topk > 0) {
        new_lists(k, a, s);
    } else {
        new_table(k, a, s);
    }
    new_outputs(k, a);
    e->used = case_alloc(k, a->n_slot, 1);
    return a;
}

static orc_keys keys_new(check_case *k, const attn_args *a)
{
    orc_keys keys = {0};
    const int64_t n = orc_attn_max_keys(a);
    keys.slot = case_alloc(k, n, sizeof *keys.slot);
    keys.seg = case_alloc(k, n, sizeof *keys.seg);
    return keys;
}

void attn_fill(check_case *k)
{
    const attn_args *a = k->args;
    attn_expect *e = k->expect;
    orc_keys keys = keys_new(k, a);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        orc_attn_keys(a, row, &keys);
        for (int64_t i = 0; i < keys.n; i++) {
            e->used[keys.slot[i]] = 1;
        }
    }
    for (int64_t s = 0; s < a->n_slot && !k->failed; s++) {
        if (e->used[s]) {
            gen_row(&k->r, a->fmt, a->k_scale, attn_row_at(a, s), 1.0f);
        }
    }
}

/* Which heads the oracle works out: all, or the first, the last, those at the edges of blocks of 8
 * and 16, and some at random, so many that the case stays short. */
static void pick_heads(check_case *k, attn_expect *e, const attn_args *a, int64_t n_key)
{
    const int64_t budget = k->quick ? 20000 : 60000;
    const int64_t fit = n_key > 0 ? budget / n_key : a->n_head;
    e->pick = case_alloc(k, a->n_head, sizeof *e->pick);
    e->all_heads = fit >= a->n_head;
    if (k->failed) {
        return;
    }
    const int32_t edges[] = {0, a->n_head - 1, a->n_head / 16 * 16, a->n_head / 8 * 8 - 1};
    for (int32_t h = 0; h < a->n_head; h++) {
        int take = e->all_heads;
        for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
            take |= h == edges[i];
        }
        take |= (int64_t)rng_next_below(&k->r, (uint64_t)a->n_head) < fit - 4;
        if (take) {
            e->pick[e->n_pick++] = h;
        }
    }
}

static void *pool_alloc(check_case *k, int far, int64_t bytes)
{
    return far ? case_far(k, bytes, 0) : case_alloc(k, bytes, 1);
}

void attn_finish(check_case *k)
{
    const attn_args *a = k->args;
    attn_expect *e = k->expect;
    orc_keys keys = keys_new(k, a);
    e->n_key = case_alloc(k, a->n_row, sizeof *e->n_key);
    double *work = case_alloc(k, orc_attn_max_keys(a), sizeof *work);
    const int far = a->n_slot >= (int64_t)ATTN_FAR_PAGE * PAGE;
    e->pool.value = pool_alloc(k, far, a->n_slot * DIM * (int64_t)sizeof *e->pool.value);
    e->pool.norm = pool_alloc(k, far, a->n_slot * (int64_t)sizeof *e->pool.norm);
    e->pool.vnorm2 = pool_alloc(k, far, a->n_slot * (int64_t)sizeof *e->pool.vnorm2);
    if (k->failed) {
        return;
    }
    orc_pool_fill(a, e->used, &e->pool);
    int64_t most = 0; /* of the rows of one request */
    for (int64_t row = 0; row < a->n_row; row++) {
        orc_attn_keys(a, row, &keys);
        e->n_key[row] = keys.n;
        e->n_all_key += (uint64_t)keys.n;
        e->n_bad_id += keys.n_bad_id;
        const int joined = a->slots == NULL && row > 0 && a->row_req[row] == a->row_req[row - 1];
        e->n_least_fetched += joined ? 0 : (uint64_t)most;
        most = joined && most > keys.n ? most : keys.n;
    }
    e->n_least_fetched += (uint64_t)most;
    pick_heads(k, e, a, (int64_t)e->n_all_key);
    e->o = case_alloc(k, (int64_t)a->n_row * e->n_pick, sizeof *e->o);
    for (int64_t row = 0; row < a->n_row && !k->failed; row++) {
        orc_attn_keys(a, row, &keys);
        for (int32_t i = 0; i < e->n_pick; i++) {
            orc_attn *o = &e->o[row * e->n_pick + i];
            orc_attn_head(a, &e->pool, &keys, row, e->pick[i], work, o);
            e->n_nan += (uint64_t)o->n_nan;
            e->n_nan_row += o->n_nan > 0;
        }
    }
}

/* ---- comparison ---- */

/* Nothing but finite values, and exactly (0, -inf) where the row attends nothing. */
static void compare_clean(const attn_args *a, const attn_expect *e, int64_t row, int64_t head,
                          check_result *r)
{
    const float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
    const float lse = a->lse[row * a->n_head + head];
    if (isnan(lse) || lse == INFINITY) {
        cmp_fail(r, "lse[%lld, %lld]: %g crosses the interface", (long long)row, (long long)head,
                 (double)lse);
    }
    const int empty = e->n_key[row] == 0 || lse == -INFINITY;
    if (e->n_key[row] == 0) {
        cmp_bits(r, (coord){"lse of an empty row", row, head, -1}, lse, -INFINITY);
    }
    for (int64_t d = 0; d < VDIM; d++) {
        if (empty) {
            cmp_bits(r, (coord){"out of an empty row", row, head, d}, out[d], 0.0f);
        } else if (!isfinite(out[d])) {
            cmp_fail(r, "out[%lld, %lld, %lld]: %g crosses the interface", (long long)row,
                     (long long)head, (long long)d, (double)out[d]);
        }
    }
}

void attn_compare_head(const attn_args *a, const orc_attn *o, int64_t row, int64_t head, int spread,
                       const check_variant *v, check_result *r)
{
    const float lse = a->lse[row * a->n_head + head];
    if (o->n_used == 0) {
        cmp_bits(r, (coord){"lse", row, head, -1}, lse, -INFINITY);
        return;
    }
    const double n = (double)o->n_used;
    const double nodes = n / 2048.0 + (a->n_lane > 1 ? 4.0 : 1.0);
    const double held = a->fmt == KVS_KV_FP8_DS_MLA ? 0.5 * v->step : 0.0;
    const double delta = fmax(24.0, v->dot_u) * u * o->terms + 4.0 * u * o->score +
                         (v->bf16 ? o->flush : 0.0) + held * 0x1p126 * o->flush;
    const double sum = (fmax(sqrt(n), v->key_u * n) + 40.0 + 10.0 * nodes) * u;
    cmp_near(r, (coord){"lse", row, head, -1}, lse, o->lse,
             delta + sum + nodes * (1e-7 + 2.0 * u * fabs(o->lse)));

    const double u_p = a->fmt == KVS_KV_F32 ? 0.0 : v->u_p;
    const double moved = expm1(2.0 * delta);
    const float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
    double error2 = 0.0;
    double tol2 = 0.0;
    for (int64_t d = 0; d < VDIM; d++) {
        const double square = o->square[d];
        const double apart = square - o->out[d] * o->out[d];
        /* below the rounding of the difference one key has all the weight */
        const double off = apart > 1e-12 * square ? sqrt(apart) * moved : 0.0;
        const double tol = off + sqrt(square) * sum + held + half_ulp_f32(o->out[d]);
        cmp_near(r, (coord){"out", row, head, d}, out[d], o->out[d], tol + sqrt(square) * u_p);
        const double error = (double)out[d] - o->out[d];
        error2 += error * error;
        tol2 += tol * tol;
    }
    if (spread && isfinite(error2)) {
        cmp_ratio(r, (coord){"norm of the error of out", row, head, -1}, sqrt(error2),
                  sqrt(tol2) + u_p * sqrt(o->w2v2));
    }
}

static void compare_stats(const attn_args *a, const attn_expect *e, const check_variant *v,
                          check_result *r)
{
    const attn_stats got = *a->stats;
    const attn_stats diff = {got.n_key - stats_start, got.n_fetched - stats_start,
                             got.n_bad_id - stats_start, got.n_nan - stats_start};
    const attn_stats *s = &diff;
    cmp_i64(r, (coord){"n_key", 0, -1, -1}, (int64_t)s->n_key, (int64_t)e->n_all_key);
    cmp_i64(r, (coord){"n_bad_id", 0, -1, -1}, (int64_t)s->n_bad_id, (int64_t)e->n_bad_id);
    if (e->all_heads && e->any_order) {
        cmp_i64(r, (coord){"n_nan above 0", 0, -1, -1}, s->n_nan > 0, e->n_nan > 0);
    } else if (e->all_heads && !e->clean_only) {
        cmp_i64(r, (coord){"n_nan", 0, -1, -1}, (int64_t)s->n_nan,
                (int64_t)(v->free_order ? e->n_nan_row : e->n_nan));
    }
    const uint64_t least = a->slots != NULL ? e->n_all_key : e->n_least_fetched;
    if (s->n_fetched < least || s->n_fetched > e->n_all_key) {
        cmp_fail(r, "n_fetched: %llu, not between %llu and %llu", (unsigned long long)s->n_fetched,
                 (unsigned long long)least, (unsigned long long)e->n_all_key);
    }
}

static void compare_second(const attn_args *a, const attn_expect *e, check_result *r)
{
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            const int64_t at = row * a->out_stride_row + head * a->out_stride_head;
            for (int64_t d = 0; d < VDIM && e->out16 != NULL; d++) {
                cmp_i64(r, (coord){"out as bf16", row, head, d}, e->out16[at + d],
                        orc_to_bf16(a->out[at + d]));
            }
            cmp_bits(r, (coord){"lse, the other way", row, head, -1},
                     e->lse2[row * a->n_head + head], a->lse[row * a->n_head + head]);
            for (int64_t d = 0; d < VDIM && e->out2 != NULL; d++) {
                cmp_bits(r, (coord){"out, the other way", row, head, d}, e->out2[at + d],
                         a->out[at + d]);
            }
        }
    }
}

void attn_compare(check_case *k, const check_variant *v, check_result *r)
{
    const attn_args *a = k->args;
    const attn_expect *e = k->expect;
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            compare_clean(a, e, row, head, r);
        }
        for (int32_t i = 0; i < e->n_pick && !e->clean_only; i++) {
            const orc_attn *o = &e->o[row * e->n_pick + i];
            if (e->any_order && o->n_nan > 0 && o->n_used > 0) {
                continue;
            }
            attn_compare_head(a, o, row, e->pick[i], e->spread, v, r);
        }
    }
    compare_stats(a, e, v, r);
    if (e->lse2 != NULL) {
        compare_second(a, e, r);
    }
}
